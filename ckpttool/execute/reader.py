"""Reading strided blocks: by the executor's checks and tiles, and by whoever wants a block as an array."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from ckpttool.dtypes import itemsize, numpy_dtype
from ckpttool.execute.files import FilePool
from ckpttool.execute.moves import BRIDGE, Move, tiles
from ckpttool.execute.permute import Array, Permuter
from ckpttool.geometry import Box

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
ReadAt = Callable[[int, memoryview], None]
"""Fill the buffer from this offset of one file."""

_CHUNK = 4 << 20
_SCRATCH = 1 << 20


def read_block(
    path: str | os.PathLike[str],
    offset: int,
    strides: Sequence[int],
    shape: Sequence[int],
    dtype: str,
    *,
    files: FilePool | None = None,
) -> Array:
    """A strided block of a file as a contiguous array of the dtype's numpy type.

    ``strides`` are bytes per axis, in any order of size. ``files`` keeps descriptors open between calls; without it
    the file is opened and closed. Beside the result, memory for a few MiB is used. Raises CorruptError.
    """
    kind = numpy_dtype(dtype)
    out = np.empty(tuple(shape), kind)
    if not out.size:
        return out
    name = os.fspath(path)
    if files is None:
        with FilePool(1) as pool:
            _fill(pool, name, offset, tuple(strides), out, dtype)
    else:
        _fill(files, name, offset, tuple(strides), out, dtype)
    return out


def _fill(pool: FilePool, path: str, offset: int, strides: tuple[int, ...], out: Array, dtype: str) -> None:
    def read(at: int, buffer: memoryview) -> None:
        pool.read(path, at, (buffer,), once=False)

    size = out.itemsize
    long = [i for i, n in enumerate(out.shape) if n > 1]
    strides = tuple([strides[i] for i in long])
    out = out.reshape([out.shape[i] for i in long])
    order = _falling(strides, out.shape)
    scratch = np.empty(min(_SCRATCH, max(size, out.nbytes)), np.uint8)
    if order == sorted(order):
        read_strided(read, offset, strides, out.shape, size, out.reshape(-1).view(np.uint8), scratch)
        return
    # The file holds the axes in another order: read tiles in the order of the file and turn them in memory.
    dense = tuple([s * size for s in _steps(out.shape)])
    whole = Move(out.shape, 0, 0, dense, 0, offset, strides, dtype, dtype)
    tile = np.empty(min(_CHUNK, out.nbytes), np.uint8)
    flat = out.reshape(-1).view(np.uint8)
    turn = Permuter()
    for part in tiles(whole, max(1, tile.nbytes // size)):
        target: Array = np.ndarray(part.shape, kinds(part)[1], flat.data, part.to, part.dst_strides)
        turn.move(read_turned(read, part, tile, scratch), target)


def read_turned(read: ReadAt, move: Move, tile: Bytes, scratch: Bytes) -> Array:
    """A move's source block, read into ``tile`` in the order of the file, as a view with the axes of the move."""
    kind = kinds(move)[0]
    order = _falling(move.src_strides, move.shape)
    shape = tuple([move.shape[i] for i in order])
    strides = [move.src_strides[i] for i in order]
    nbytes = prod(shape) * kind.itemsize
    read_strided(read, move.start, strides, shape, kind.itemsize, tile[:nbytes], scratch)
    back = sorted(range(len(order)), key=order.__getitem__)
    block: Array = np.ndarray(shape, kind, tile.data)
    return block.transpose(back)


def kinds(move: Move) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """numpy types of both sides: the float types of a cast, else integers of that size, which move any bits fastest."""
    if move.src_dtype == move.dst_dtype:
        raw = np.dtype(f"u{itemsize(move.dst_dtype)}")
        return raw, raw
    return numpy_dtype(move.src_dtype), numpy_dtype(move.dst_dtype)


def _falling(strides: Sequence[int], shape: Sequence[int]) -> list[int]:
    """The axes from the slowest to the fastest in the file."""
    return sorted(range(len(strides)), key=lambda i: (-strides[i] if shape[i] > 1 else 0, i))


def _steps(shape: Sequence[int]) -> list[int]:
    steps = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        steps[i] = steps[i + 1] * shape[i + 1]
    return steps


def read_strided(
    read: ReadAt,
    offset: int,
    strides: Sequence[int],
    shape: Sequence[int],
    size: int,
    out: Bytes,
    scratch: Bytes,
) -> None:
    """Fill ``out`` with the block's elements in the order of its axes. Falling strides make the longest runs.

    Runs with small gaps between them are read in one call through ``scratch``, gaps included; others one by one.
    """
    k, run = len(shape), size
    while k and (shape[k - 1] == 1 or strides[k - 1] == run):
        run *= shape[k - 1]
        k -= 1
    if not k:
        view = out.data
        for a in range(0, run, _CHUNK):
            read(offset + a, view[a : min(a + _CHUNK, run)])
        return
    # Axes j and later are read along with their gaps, one span per index of the axes before j.
    j, extent = k, run
    while j and 0 <= strides[j - 1] - extent <= BRIDGE and extent + strides[j - 1] <= scratch.nbytes:
        j -= 1
        extent += (shape[j] - 1) * strides[j]
        if extent > scratch.nbytes:
            break
    if j == k:
        view, at = out.data, 0
        for start in offsets(shape[:k], strides[:k]):
            read(offset + start, view[at : at + run])
            at += run
        return
    inner = (*shape[j + 1 : k], run // size)
    inner_strides = (*strides[j + 1 : k], size)
    row = sum([(n - 1) * s for n, s in zip(inner, inner_strides, strict=True)]) + size
    rows, step = shape[j], strides[j]
    at_once = max(1, (scratch.nbytes - row) // step + 1)
    kind = np.dtype(f"u{size}")
    result: Array = np.ndarray((prod(shape[:j]), rows, *inner), kind, out.data)
    view = scratch.data
    for i, start in enumerate(offsets(shape[:j], strides[:j])):
        for a in range(0, rows, at_once):
            n = min(at_once, rows - a)
            read(offset + start + a * step, view[: (n - 1) * step + row])
            found: Array = np.ndarray((n, *inner), kind, view, 0, (step, *inner_strides))
            np.copyto(result[i, a : a + n], found)


def offsets(shape: Sequence[int], strides: Sequence[int]) -> Iterator[int]:
    """Byte offsets of all indices, the last axis fastest."""
    if not shape:
        return iter((0,))
    axes = [range(0, n * s, s) if s else itertools.repeat(0, n) for n, s in zip(shape, strides, strict=True)]
    if len(axes) == 1:
        return iter(axes[0])
    return map(sum, itertools.product(*axes))


def blocks(shape: Sequence[int], itemsize: int, limit: int) -> Iterator[Box]:
    """Cut a tensor's box into row-major blocks of at most ``limit`` bytes (one element if that is more), in order.

    Each block is contiguous in a row-major tensor.
    """
    start = (0,) * len(shape)
    if 0 not in shape:
        yield from _blocks(start, tuple(shape), 0, max(1, limit // itemsize))


def _blocks(start: tuple[int, ...], stop: tuple[int, ...], axis: int, elements: int) -> Iterator[Box]:
    row = prod([b - a for a, b in zip(start[axis + 1 :], stop[axis + 1 :], strict=True)])
    if axis >= len(start) or row * (stop[axis] - start[axis]) <= elements:
        yield Box(start, stop)
        return
    step = max(1, elements // row)
    for a in range(start[axis], stop[axis], step):
        b = min(a + step, stop[axis])
        lo, hi = (*start[:axis], a, *start[axis + 1 :]), (*stop[:axis], b, *stop[axis + 1 :])
        if row > elements:
            yield from _blocks(lo, hi, axis + 1, elements)
        else:
            yield Box(lo, hi)
