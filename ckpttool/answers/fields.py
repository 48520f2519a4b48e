"""Fields of answers as JSON has them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def pick(of: object, names: str) -> dict[str, Any]:
    """Attributes for JSON: ``name bytes=nbytes family?``, the second under another key, an empty third as null."""
    return {key: getattr(of, name) or None if empty else getattr(of, name) for key, name, empty in _parsed(names)}


@cache
def _parsed(names: str) -> list[tuple[str, str, bool]]:
    words = [(word.rstrip("?").partition("="), word.endswith("?")) for word in names.split()]
    return [(key, name or key, empty) for (key, _, name), empty in words]


def shape(dims: Iterable[int]) -> str:
    """``[4096, 11008]``."""
    return "[" + ", ".join(map(str, dims)) + "]"


def finite(value: T) -> T | str:
    """JSON has no NaN and no infinity: they are written as text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def number(value: float | None, digits: int = 9) -> str:
    """A number with enough digits to identify a float32; pass 4 for display."""
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.{digits}g}"


def utc(seconds: float | None) -> str | None:
    """``2026-11-23T19:05:00Z``, of seconds since 1970."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
