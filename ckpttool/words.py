"""Sizes, counts and lists as people read them, in messages and reports alike. Pure."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def short(n: int) -> str:
    """A number of bytes, in powers of 1000: ``688.57 GB``."""
    if n < 1000:
        return count(n, "byte")
    value, at = float(n), 0
    while value >= 1000 and at < len(_UNITS) - 1:
        value /= 1000
        at += 1
    return f"{value:.2f} {_UNITS[at]}"


def count(n: int, noun: str, plural: str = "") -> str:
    """``1 file``, ``1,000 files``."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {plural or noun + 's'}"


def either(values: Collection[str]) -> str:
    """``f64, f32, f16 or bf16``."""
    *others, last = values
    return f"{', '.join(others)} or {last}" if others else last


def some(names: Collection[str], most: int = 3) -> str:
    """The first names, and how many more there are: ``a, b, c and 4 more``."""
    shown = ", ".join(islice(names, most))
    return f"{shown} and {len(names) - most:,} more" if len(names) > most else shown
