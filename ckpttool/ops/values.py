"""Sizes, counts and choices as people write them. An invalid one is a UsageError that names its option or argument."""

from __future__ import annotations

from typing import Any

from ckpttool.errors import UsageError


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
