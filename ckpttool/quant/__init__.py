"""Quantized weights: what a recipe makes of a tensor, what stays in high precision, and what configs say about it.

scheme.py   a recipe with all that it decides: codes, scales, names; what one weight becomes
keep.py     which tensors a recipe leaves alone
coded.py    the other way: which tensors of a checkpoint are codes and scales, and of what weight
config.py   quantization_config: read what a checkpoint says, write what a recipe made

Names, shapes and dtypes only: no numbers, no files.
"""
