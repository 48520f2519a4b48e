"""Formats: one file each, and only an index of byte ranges.

A format has five duties: say whether a directory is its own (``detect``), turn headers into stored tensors with their
rank (``read``), say whose names it has (``naming``) and which meshes it can hold (``target_mesh``), and name the files
that a target consists of with exact sizes (``write``). It never reads or writes tensor data. To add one, write
``formats/NAME.py`` with an instance of ``Format`` and list it in ``registry.py``.
"""
