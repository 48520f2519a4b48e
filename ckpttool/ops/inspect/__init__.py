"""``ckpttool inspect``: what is inside a checkpoint, whether it is sound, and how it differs from another.

    listing.py    the tensors of a source, chosen and sorted; headers only
    names.py      names without their numbers
    tree.py       names that differ only in numbers become one line: ``layers.{0..60}``
    holdings.py   which rank holds which box of which tensor
    values.py     statistics, histograms, checksums and single elements; the only part that reads tensor data by itself
    check.py      every problem by name
    diff.py       two checkpoints, whatever their sharding and naming

Each module returns plain data; ``report`` prints it. Listing needs neither numpy nor the layout rules of a checkpoint
of whole tensors, so neither is loaded for it.
"""
