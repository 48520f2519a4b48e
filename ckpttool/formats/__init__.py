"""Formats: one file or package for each software, and only an index of byte ranges.

A ``Reader`` says whether a directory is its own (``detect``) and turns headers into stored tensors with their rank
(``read``). A ``Writer`` says which meshes it can hold (``target_mesh``) and names the files that a target consists of,
with exact sizes (``write``). ``Capabilities`` say how formats differ. Neither ever reads or writes tensor data. To add
one, write ``formats/NAME.py`` and list an instance in ``registry.py``.
"""
