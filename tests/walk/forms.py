"""How a stored tensor is made of the model's own ones: joined, stacked, turned, interleaved.

The same form makes the whole tensor of whole ones and a rank's tensor of what that rank holds of each. That is all
there is to know of fused layers under parallelism, and it needs no geometry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from tests.walk.bits import Array

Get: TypeAlias = Callable[[str], Array | None]
"""A tensor of the model by name; None where a rank has nothing of it."""


@dataclass(frozen=True)
class Leaf:
    """The tensor itself."""

    name: str


@dataclass(frozen=True)
class Join:
    """One after the other on the first axis."""

    parts: tuple[Form, ...]


@dataclass(frozen=True)
class Stack:
    """One for each expert that is there, on a new first axis."""

    parts: tuple[Form, ...]


@dataclass(frozen=True)
class Turn:
    """The last two axes exchanged; a bias stays."""

    part: Form


@dataclass(frozen=True)
class Weave:
    """A slice of each in turn: q, k, v of the first group, then of the next."""

    parts: tuple[Form, ...]
    rows: int
    """Of a slice of the last part."""


@dataclass(frozen=True)
class Once:
    """On the first rank only; zeros on the others, because what they compute is added up."""

    part: Form


@dataclass(frozen=True)
class Squeeze:
    """Without its first axis, which has one element."""

    part: Form


Form: TypeAlias = Leaf | Join | Stack | Turn | Weave | Once | Squeeze


def leaves(form: Form) -> list[str]:
    """Names of the tensors that it is made of."""
    if isinstance(form, Leaf):
        return [form.name]
    if isinstance(form, Turn | Once | Squeeze):
        return leaves(form.part)
    return [name for part in form.parts for name in leaves(part)]


def build(form: Form, get: Get, first: bool = True) -> Array | None:
    """The stored tensor."""
    if isinstance(form, Leaf):
        return get(form.name)
    if isinstance(form, Turn):
        inner = build(form.part, get, first)
        return inner if inner is None or inner.ndim < 2 else np.swapaxes(inner, -1, -2)
    if isinstance(form, Once):
        inner = build(form.part, get, first)
        return inner if inner is None or first else np.zeros_like(inner)
    if isinstance(form, Squeeze):
        inner = build(form.part, get, first)
        return inner if inner is None else inner[0]
    parts = [p for p in (build(x, get, first) for x in form.parts) if p is not None]
    if not parts:
        return None
    if isinstance(form, Stack):
        return np.stack(parts)
    if isinstance(form, Join):
        return np.concatenate(parts)
    groups = len(parts[-1]) // form.rows
    return np.concatenate(
        [piece for group in zip(*(np.split(p, groups) for p in parts), strict=True) for piece in group]
    )
