"""TensorTable as numpy arrays: relations say where elements come from, numpy shows what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from ckpttool.core.catalog import Catalog, Key, LogicalTensor
from ckpttool.core.geometry import Box
from ckpttool.planning.relate import NONE, DerivedTensor

Array = np.ndarray[Any, np.dtype[np.int64]]
EMPTY = -1


@lru_cache(maxsize=4)
def _numbers(count: int) -> Array:
    out = np.arange(count)
    out.flags.writeable = False
    return out


def numbers(count: int) -> Array:
    """0, 1, ... in an array that all share: making such arrays took longer than looking at them."""
    return _numbers(1 << max(count - 1, 1).bit_length())[:count]


def catalog_of(shapes: Mapping[str, tuple[int, ...]]) -> tuple[Catalog, dict[str, Array]]:
    """A catalog without files, and for each tensor an array in which no two elements of all tensors are the same."""
    arrays: dict[str, Array] = {}
    tensors: dict[Key, LogicalTensor] = {}
    elements = numbers(sum(map(prod, shapes.values())))
    at = 0
    for name, shape in shapes.items():
        n = prod(shape)
        arrays[name] = elements[at : at + n].reshape(shape)
        tensors[Key(name)] = LogicalTensor(Key(name), "F32", shape, ())
        at += n
    return Catalog([], tensors), arrays


def index(box: Box) -> Any:
    """What stands between brackets to take a box out of an array as a view, of a scalar too."""
    return (..., *(slice(a, b) for a, b in zip(box.start, box.stop, strict=True)))


def slices(start: tuple[int, ...], count: tuple[int, ...], step: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + s * (n - 1) + 1, s) for a, n, s in zip(start, count, step, strict=True))


def materialise(view: DerivedTensor, arrays: Mapping[str, Array]) -> Array:
    """The elements of a view. Every element must come from exactly one part."""
    out = np.full(view.shape, EMPTY, np.int64)
    for part in view.parts:
        source = arrays[part.source.key.name]
        at: list[Any] = list(part.origin)
        for i, axis in enumerate(part.axes):
            if axis != NONE:
                (at[axis],) = slices((part.origin[axis],), (part.size[i],), (part.stride[i],))
        block = np.asarray(source[(..., *at)])
        walked = sorted(axis for axis in part.axes if axis != NONE)
        block = block.transpose([walked.index(axis) for axis in part.axes if axis != NONE])
        block = block.reshape(part.size)  # puts in the axes that the source does not have
        chosen: Any = (..., *slices(part.first, part.size, part.step))
        into = out[chosen]
        assert into.shape == block.shape, f"a part of {view.name} reaches outside of it"
        assert (into == EMPTY).all(), f"two parts of {view.name} overlap"
        into[...] = block
    assert (out != EMPTY).all(), f"no part of {view.name} fills some of its elements"
    return out
