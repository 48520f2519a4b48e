"""The views of ``inspect``: a file each, with its options, what contradicts them, and its answer.

    base.py           what a view and an answer are
    registry.py       the list of them; from options to a view, from a view to its answer
    tree.py           names that differ only in numbers as one line, without another option
    list.py, files.py, metadata.py, ranks.py, values.py, show.py, imports.py, family.py, check.py, diff.py, runs.py
    page.py           several of them in one HTML report

The command line reads the options of every view before it knows which is asked for: at the top of these files stands
nothing that reads a checkpoint.
"""
