"""Numbers of ``params.json``, and what Meta's software works out of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ckpttool.errors import CorruptError, IncompleteError, UnsupportedError

_MULTIPLE = 4096
"""The largest ``multiple_of`` that is written, a power of two."""


def number(params: Mapping[str, Any], name: str, where: str) -> int:
    """A positive whole number. Raises IncompleteError where there is none, CorruptError for anything else."""
    value = params.get(name)
    if value is None:
        raise IncompleteError(f"`{name}` is not in params.json", where=where)
    if type(value) is not int or value < 1:
        raise CorruptError(f"`{name}` in params.json is not a positive whole number: {value!s:.40}", where=where)
    return value


def real(params: Mapping[str, Any], name: str, where: str) -> float | None:
    """A positive number; None where there is none. Raises CorruptError for anything else."""
    value = params.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
        raise CorruptError(f"`{name}` in params.json is not a positive number: {value!s:.40}", where=where)
    return float(value)


def cannot(why: str, field: str) -> UnsupportedError:
    """The error for a config that params.json cannot say."""
    return UnsupportedError(f"--to meta: {why}", where=f"config.json: `{field}`")


def hidden_rows(dim: int, multiple: int, multiplier: float | None) -> int:
    """The rows of w1, as Meta's ``FeedForward`` computes them."""
    rows = int(2 * (4 * dim) / 3)
    if multiplier is not None:
        rows = int(multiplier * rows)
    return multiple * -(-rows // multiple)


def rate(dim: int, rows: int, *others: int) -> dict[str, Any]:
    """``multiple_of``, which divides ``others`` too, and the ``ffn_dim_multiplier`` with which an MLP has ``rows``."""
    multiple = min(n & -n for n in (rows, *others, _MULTIPLE))
    usual = int(2 * (4 * dim) / 3)  # of which it then takes the whole part, and rounds up to a multiple
    return {"multiple_of": multiple, "ffn_dim_multiplier": (rows - (multiple - 1) / 2 + 0.25) / usual}
