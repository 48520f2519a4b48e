"""Sizes, counts, lists and choices as people read and write them. An invalid one is a UsageError. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice
from typing import Any

from ckpttool.errors import UsageError

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


def parse_size(text: str, option: str) -> int:
    """``5GB``, ``512MiB``, ``64M`` or a number of bytes. KB, MB, GB are powers of 1000; KiB, MiB, GiB of 1024."""
    import re

    m = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if not m or (m[3] and not m[2]):
        raise UsageError(f"{option} `{text}` is not a size", hint="write 5GB, 512MiB or a number of bytes")
    value = int(float(m[1]) * (1024 if m[3] else 1000) ** " kmgt".index(m[2] or " "))
    if not 1 <= value < 1 << 60:
        wrong = "must be positive" if value < 1 else "is larger than any file"
        raise UsageError(f"{option} {text} {wrong}", hint="write 5GB, 512MiB or a number of bytes")
    return value


def parse_count(text: str, option: str) -> int:
    """``32768``, ``32,768`` or ``32k``: as in the names of models, k is 1024 and m is 1024 x 1024."""
    import re

    m = re.fullmatch(r"\s*([0-9][0-9,_]*(?:\.[0-9]+)?)\s*([km]?)\s*", text.lower())
    value = float(re.sub("[,_]", "", m[1])) * 1024 ** " km".index(m[2] or " ") if m else 0.0
    if not value.is_integer() or not 1 <= value < 1 << 53:
        raise UsageError(f"{option} `{text}` is not a number of tokens", hint="write 32768 or 32k")
    return int(value)


def one_of(value: str, option: str, *allowed: str) -> Any:
    """``value``, or "" when nothing was said. Raises UsageError for anything but ``allowed``."""
    if value and value not in allowed:
        import difflib

        close = difflib.get_close_matches(value.lower(), allowed, n=1)
        hint = f"did you mean `{close[0]}`?" if close else None
        raise UsageError(f"{option} `{value}` is not one of {', '.join(allowed)}", hint=hint)
    return value


def ranges(numbers: Iterable[int], dash: str = "..") -> str:
    """``0..2,5`` for 0, 1, 2, 5."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join([str(a) if a == b else f"{a}{dash}{b}" for a, b in runs])
