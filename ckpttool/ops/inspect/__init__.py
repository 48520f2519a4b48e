"""``ckpttool inspect``: what is inside a checkpoint, whether it is sound, and how it differs from another.

    views/            a file for each view: its options, what contradicts them, its answer for programs
    source.py         opening a checkpoint, or an adapter
    identity.py       what it is: family, layers, parameters, precision
    listing.py        the tensors of a source, chosen and sorted; headers only
    runs.py           the checkpoints of a run: steps, sizes, complete or not
    tree.py           names that differ only in numbers become one line: ``layers.{0..60}``
    holdings.py       which rank holds which box of which tensor
    values.py         statistics, histograms, checksums and single elements
    check.py          every problem by name: files, index, manifest
    soundness.py      ... and what names, dtypes, shapes and the config say
    values_check.py   ... and what only the elements can show
    code.py           ... and which files beside the weights can run code
    diff.py           two checkpoints, whatever their sharding and dialect
    drift.py          ... and how far they are apart, by layer and by module
    total.py          one digest of everything
    listing_json.py   what every JSON answer says of the checkpoint

Each module returns plain data; ``report`` prints it. Listing needs neither numpy nor the layout rules of a checkpoint
of whole tensors, so neither is loaded for it.
"""
