"""All human, TSV and JSON output of results, and progress. The only place that imports rich.

A module for each command makes the documents (``answers.document``) of its plans and results; ``render`` prints them.
``target`` has what all commands that write a checkpoint say, ``text`` what a terminal gets and what a pipe gets,
``style`` who gets colours, ``tables`` fits columns to the terminal; ``layout`` draws who holds what in characters,
``strips`` and ``svg`` as pictures.

stdout carries data, stderr messages and progress.
"""
