"""Formats: one file each, and only an index of byte ranges.

A format has four duties: say whether a directory is its own (``detect``), turn headers into stored tensors with their
rank (``read``), name the files that a target consists of with exact sizes (``write``), and say how its names relate to
Hugging Face's (``naming``). It never reads or writes tensor data. To add one, write ``formats/NAME.py`` with an
instance of ``Format`` and list it in ``registry.py``.
"""
