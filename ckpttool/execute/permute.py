"""Rearranging a block in memory: the same elements under other strides, possibly of another float type."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ckpttool.kernels.cast import cast

Array = np.ndarray[Any, Any]

_HEIGHT, _WIDTH = 128, 512
"""A tile that stays in the first cache levels while it is read along one axis and written along the other."""

_SMALL = 4096
"""Planes below this many elements stay in cache anyway; one call for all of them beats one call for each."""

_PAD = 16
"""Elements between the rows of the tile, so that a column does not fall on one cache set."""


class Permuter:
    """Copies between views of any axis order. Holds one small tile, so each thread needs its own."""

    def __init__(self) -> None:
        self._tile: dict[np.dtype[Any], Array] = {}

    def move(self, src: Array, dst: Array) -> None:
        """``dst[...] = src`` with a cast where the types differ; both have the same shape."""
        fast = _fastest(src)
        last = _fastest(dst)
        if fast == last or src.shape[fast] * src.shape[last] < _SMALL:
            store(src, dst)
            return
        rest = [i for i in range(src.ndim) if i not in (fast, last)]
        # In the planes, the first axis is the fast one of the destination, the second that of the source.
        src, dst = src.transpose(*rest, last, fast), dst.transpose(*rest, last, fast)
        for index in itertools.product(*[range(n) for n in src.shape[:-2]]):
            self._plane(src[index], dst[index])

    def _plane(self, src: Array, dst: Array) -> None:
        """``src`` is fast along its second axis, ``dst`` along its first."""
        rows, columns = src.shape
        tile = self._tile.get(dst.dtype)
        if tile is None:
            tile = self._tile[dst.dtype] = np.empty((_HEIGHT, _WIDTH + _PAD), dst.dtype)
        for a in range(0, rows, _HEIGHT):
            for b in range(0, columns, _WIDTH):
                part = src[a : a + _HEIGHT, b : b + _WIDTH]
                held = tile[: part.shape[0], : part.shape[1]]
                store(part, held)
                # Written row by row of the destination: its fast axis is the tile's first.
                np.copyto(dst[a : a + _HEIGHT, b : b + _WIDTH].T, held.T)


def store(src: Array, dst: Array) -> None:
    """``dst[...] = src``, with a cast where the types differ."""
    if src.dtype == dst.dtype:
        np.copyto(dst, src)
    else:
        cast(src, dst)


def _fastest(a: Array) -> int:
    """The axis with the smallest step among those with more than one element."""
    axes = [i for i in range(a.ndim) if a.shape[i] > 1]
    return min(axes, key=lambda i: (a.strides[i], -i), default=a.ndim - 1)
