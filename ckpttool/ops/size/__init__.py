"""``ckpttool size``: what a model weighs in FP8 (or MXFP4, NVFP4, BF16), before anything is written.

model.py      SRC, a checkpoint or a config.json alone: the weights in high precision, and what is stored of them
names.py      class and module of a tensor, from its name
coding.py     codes and scales of one quantized weight, for any shape: the whole, or a rank's share
stored.py     a recipe over all weights: what is stored, by class, dtype and module; the files that hold it
resident.py   what each rank of a mesh holds in memory, and whether blocks of scales can be cut that way
cache.py      keys and values
training.py   gradients, master weights and moments
answer.py     a question with all its options -> one report

Headers and config.json only: no tensor is read, nothing but whole numbers is computed.
"""

from ckpttool.ops.size.answer import Question, SizeReport, answer

__all__ = ["Question", "SizeReport", "answer"]
