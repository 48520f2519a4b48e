"""Arithmetic on blocks of elements; no files, no plans."""
