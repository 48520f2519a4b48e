"""The distance of a merged tensor from the models, and each model's contribution: sums over its elements.

y is the result as it was written, x_i the models (without the base), b the base, all as float32; d_i = x_i - b. Where
there is no base, a method that picks elements picks those of x_i, and d_i = x_i. p_i is what the method lets model i
add: d_i where it keeps the element, else 0, times its weight in mergekit's methods (see ``Contributions``); for methods
that keep everything it is d_i. Sums are those of ``kernels.portable``.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

import numpy as np

from ckpttool.kernels.merge.base import Array, Chunk, Contributions, MergeTensor, Method, Pass
from ckpttool.kernels.portable import dot

_OWN = 16
"""Scratch from here on is not used by methods."""


class Measured(NamedTuple):
    """Sums over the elements of a tensor. Those that do not apply to its method are empty or None."""

    elements: int
    squares: float
    """sum y^2"""
    gaps: tuple[float, ...]
    """sum (y - x_i)^2; of each model, then of the base"""
    norms: tuple[float, ...]
    """sum x_i^2; likewise"""
    dots: tuple[float, ...]
    """sum y x_i; likewise"""
    task_norms: tuple[float, ...] = ()
    """sum d_i^2; of each model, where there is a base"""
    task_dots: tuple[float, ...] = ()
    """sum (y - b) d_i; likewise"""
    changed: tuple[int, ...] = ()
    """Elements with d_i != 0; likewise"""
    kept: tuple[int, ...] = ()
    """Elements with p_i != 0; of each model, where the method picks elements"""
    agreeing: tuple[int, ...] = ()
    """Elements with p_i != 0 and the elected sign; of each model, where the method elects signs"""
    conflicts: int | None = None
    """Elements where some p_i > 0 and some p_j < 0; with a base or a method that picks elements, and two models."""


def measured(tensor: MergeTensor, method: Method) -> Generator[Pass, None, Measured]:
    """Measure a tensor whose result follows the models: ``chunk.model(len(tensor.models))``.

    Takes one pass, after those in which the method finds out what it picks.
    """
    sums = _DistanceSums(tensor, (yield from method.parts(tensor)) if method.parts is not None else None)
    yield sums.add
    return sums.result()


class _DistanceSums:
    def __init__(self, tensor: MergeTensor, parts: Contributions | None) -> None:
        self._count = count = len(tensor.models)
        self._size = tensor.size
        self._has_base = tensor.has_base
        self._parts = parts
        self._elects = parts is not None and parts.vote is not None
        self._pairs = count > 1 and (tensor.has_base or parts is not None)
        self._squares = 0.0
        self._sides = np.zeros((3, count + tensor.has_base))
        self._tasks = np.zeros((2, count))
        self._counts = np.zeros((3, count), np.int64)
        self._conflicts = 0

    def add(self, chunk: Chunk) -> None:
        """Count a chunk in."""
        result = chunk.scratch(_OWN)
        np.copyto(result, chunk.model(self._count))
        self._squares += dot(result, result, chunk.scratch(_OWN + 2))
        moved = chunk.scratch(_OWN + 1)
        base = chunk.base() if self._has_base else None
        if base is not None:
            np.subtract(result, base, out=moved)
            self._side(self._count, result, base, chunk)
        positive, negative = chunk.scratch(_OWN, np.bool_), chunk.scratch(_OWN + 1, np.bool_)
        positive.fill(0)
        negative.fill(0)
        for i in range(self._count):
            x = chunk.model(i)
            self._side(i, result, x, chunk)
            if base is not None:
                d = np.subtract(x, base, out=x)
                work = chunk.scratch(_OWN + 2)
                self._tasks[:, i] += dot(d, d, work), dot(moved, d, work)
                self._counts[0, i] += np.count_nonzero(d)
                if self._parts is None and self._pairs:
                    positive |= d > 0
                    negative |= d < 0
        if self._parts is not None:
            self._picked(self._parts, chunk, positive, negative)
        if self._pairs:
            self._conflicts += int(np.count_nonzero(positive & negative))

    def _side(self, i: int, result: Array, x: Array, chunk: Chunk) -> None:
        work = chunk.scratch(_OWN + 2)
        gap = np.subtract(result, x, out=work)
        self._sides[:, i] += dot(gap, gap, work), dot(x, x, work), dot(result, x, work)

    def _picked(self, parts: Contributions, chunk: Chunk, positive: Array, negative: Array) -> None:
        kept = []
        for i, part in enumerate(parts.of(chunk)):
            self._counts[1, i] += np.count_nonzero(part)
            positive |= part > 0
            negative |= part < 0
            if parts.vote is not None:
                kept.append(part)
        if parts.vote is None:
            return
        elected, vote = chunk.scratch(_OWN + 1), chunk.scratch(_OWN + 2)
        elected.fill(0)
        for i, part in enumerate(kept):
            parts.vote(i, part, vote)
            np.add(elected, vote, out=elected)
        up = elected >= 0
        for i, part in enumerate(kept):
            self._counts[2, i] += np.count_nonzero(((part > 0) & up) | ((part < 0) & ~up))

    def result(self) -> Measured:
        gaps, norms, dots = (tuple(map(float, row)) for row in self._sides)
        task_norms, task_dots = (tuple(map(float, row)) for row in self._tasks)
        changed, kept, agreeing = (tuple(map(int, row)) for row in self._counts)
        return Measured(
            self._size,
            self._squares,
            gaps,
            norms,
            dots,
            task_norms if self._has_base else (),
            task_dots if self._has_base else (),
            changed if self._has_base else (),
            kept if self._parts is not None else (),
            agreeing if self._elects else (),
            self._conflicts if self._pairs else None,
        )
