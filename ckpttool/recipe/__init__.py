"""Merge recipes: what a user says about a merge, in one data structure, and what follows for every tensor.

    mergekit's YAML      \\
    merge_config.json     >  Recipe  ->  resolve  ->  Merged, one per tensor of the output
    command-line words   /

    model.py      the data structure: models, slices, settings that depend on the tensor and its layer
    document.py   reading text by key path and line, and collecting everything that is wrong with it
    check.py      what every recipe must fulfil, whoever wrote it
    mergekit.py   mergekit's YAML
    paddle.py     PaddleFormers' merge_config.json
    flags.py      words of the command line
    read.py       which of the first two a file is
    resolve.py    which tensor comes from which ones, with which parameters

Nothing here opens a checkpoint: of the models only the tensor names matter.
"""
