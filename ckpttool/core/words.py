"""Sizes, counts, lists and choices as people read and write them. An invalid one is a UsageError. Pure."""

from __future__ import annotations

import re
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
    while value >= 999.995 and at < len(_UNITS) - 1:  # no 1000.00 MB
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
    m = re.fullmatch(r"\s*([0-9][0-9,_]*(?:\.[0-9]+)?)\s*([km]?)\s*", text.lower())
    value = float(re.sub("[,_]", "", m[1])) * 1024 ** " km".index(m[2] or " ") if m else 0.0
    if not value.is_integer() or not 1 <= value < 1 << 53:
        raise UsageError(f"{option} `{text}` is not a number of tokens", hint="write 32768 or 32k")
    return int(value)


def parse_sides(text: str, option: str) -> tuple[int, int]:
    """``128x128``: rows and columns of a block."""
    rows, cross, columns = text.lower().partition("x")
    if not (cross and rows.isdecimal() and columns.isdecimal() and int(rows) and int(columns)):
        raise UsageError(f"{option} `{text}` is not MxN", hint="for example 128x128")
    return int(rows), int(columns)


def parse_numbers(text: str, option: str, most: int, *, runs: bool = False) -> tuple[int, ...]:
    """``10,11,11``; with ``runs`` also ``0-3,7``. None is larger than ``most``."""
    out: list[int] = []
    try:
        for item in text.split(","):
            first, dash, last = item.partition("-") if runs else (item, "", "")
            run = range(int(first), int(last) + 1) if dash else [int(first)]
            if not run or run[-1] > most:
                raise ValueError  # 3-0, or a run that would not fit in memory
            out += run
    except ValueError:
        raise UsageError(
            f"{option} `{text}` is not a list of numbers", hint=f"for example {'0-3,7' if runs else '10,11,11'}"
        ) from None
    return tuple(out)


def parse_betas(text: str, option: str) -> tuple[float, float]:
    """``0.9,0.999``: those of Adam."""
    try:
        first, second = map(float, text.split(","))
        if not (0 <= first < 1 and 0 <= second < 1):
            raise ValueError
    except ValueError:
        raise UsageError(
            f"{option} `{text}` is not two numbers from 0 to below 1", hint="for example 0.9,0.999"
        ) from None
    return first, second


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


def natural(name: str) -> list[Any]:
    """Sort key with numbers as numbers (strings and numbers alternate, so keys always compare)."""
    return [int(p) if i % 2 else p for i, p in enumerate(re.split(r"(\d{1,18})", name))]
