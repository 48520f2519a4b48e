"""Reading strided blocks: by the executor's checks and tiles, and by whoever wants a block as an array."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from math import prod
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ckpttool.core.dtypes import itemsize, numpy_dtype
from ckpttool.core.encodings import TEXT_STEP, Contents, Encoding
from ckpttool.core.files import Place
from ckpttool.core.geometry import Box
from ckpttool.core.plan import Block
from ckpttool.execute.ahead import GAP
from ckpttool.execute.files import Medium
from ckpttool.execute.moves import BRIDGE, StridedCopy, dense, tiles
from ckpttool.execute.permute import Array, Permuter
from ckpttool.execute.remote import AHEAD, open_medium

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
ReadAt = Callable[[int, memoryview], None]
"""Fill the buffer from this offset of one file."""

_CHUNK = 4 << 20
_SCRATCH = 1 << 20
GAPS = 2 * TEXT_STEP
"""Scratch for what is decoded: gaps are read along only where these bytes hold several runs."""


def read_block(
    contents: Contents | Place,
    offset: int,
    strides: Sequence[int],
    shape: Sequence[int],
    dtype: str,
    *,
    files: Medium | None = None,
) -> Array:
    """A strided block of a file, or of what it is decoded to, as a contiguous array of the dtype's numpy type.

    ``strides`` are bytes per axis, in any order of size. ``files`` keeps descriptors open between calls; without it,
    and outside of ``reading``, the file is opened and closed. Beside the result, memory for a few MiB is used. Raises
    CorruptError.
    """
    kind = numpy_dtype(dtype)
    out = np.empty(tuple(shape), kind)
    if not out.size:
        return out
    name = contents if isinstance(contents, Encoding) else str(contents)
    with nullcontext(files) if files is not None else reading(1) as medium:
        _fill(medium, name, offset, tuple(strides), out, dtype)
    return out


class _SharedMedium:
    """The medium of all threads that read blocks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.medium: Medium | None = None
        self.users = 0


_SHARED = _SharedMedium()


@contextmanager
def reading(limit: int | None = None, *, memory: int = AHEAD, connections: int | None = None) -> Iterator[Medium]:
    """While this lasts, blocks are read through one medium, which the first who asks for it opens; see
    ``open_medium``. So a file on another machine is opened once, and read ahead.
    """
    with _SHARED.lock:
        if _SHARED.medium is None:
            _SHARED.medium = open_medium(limit, memory=memory, connections=connections)
        medium = _SHARED.medium
        _SHARED.users += 1
    try:
        yield medium
    finally:
        with _SHARED.lock:
            _SHARED.users -= 1
            last = not _SHARED.users
            if last:
                _SHARED.medium = None
        if last:
            medium.close()


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Reads(NamedTuple):
    """The bytes that will be read."""

    ranges: Sequence[tuple[Contents, int, int]]
    """File, first byte, end; in order."""
    again: bool = False
    """Some of it several times, or in another order than it lies in the file."""


def in_turn(
    workers: int, do: Callable[[_Item], _Result], items: Iterable[_Item], reads: Callable[[_Item], Reads]
) -> Generator[_Result, None, None]:
    """What ``do`` makes of each item, in threads that read blocks. What the next ones read from other machines is
    fetched before their turn comes.
    """
    waiting: deque[tuple[Future[_Result], Callable[[], None], int]] = deque()
    ahead = 0
    with reading() as medium, ThreadPoolExecutor(workers, thread_name_prefix="read") as pool:

        def done(item: _Item, what: Reads) -> _Result:
            kept = medium.keep(what.ranges if what.again else ())
            try:
                return do(item)
            finally:
                kept()

        try:
            for item in items:
                what = reads(item)
                size = sum([b - a for _, a, b in what.ranges])
                while len(waiting) > workers and ahead + size > medium.ahead:
                    ahead -= waiting[0][2]
                    yield _finished(waiting)
                forget = medium.announce(what.ranges)
                waiting.append((pool.submit(done, item, what), forget, size))
                ahead += size
            while waiting:
                yield _finished(waiting)
        except (KeyboardInterrupt, SystemExit):
            medium.stop()
            raise
        finally:
            for future, forget, _ in waiting:
                future.cancel()
                forget()


def _finished(waiting: deque[tuple[Future[_Result], Callable[[], None], int]]) -> _Result:
    try:
        return waiting[0][0].result()
    finally:
        waiting.popleft()[1]()


def stop_reading() -> None:
    """End all waiting for blocks of files on other machines; whoever waits gets Stopped."""
    with _SHARED.lock:
        if _SHARED.medium is not None:
            _SHARED.medium.stop()


def _fill(pool: Medium, path: Contents, offset: int, strides: tuple[int, ...], out: Array, dtype: str) -> None:
    def read(at: int, buffer: memoryview) -> None:
        pool.read(path, at, (buffer,), once=False)

    flat = out.reshape(-1).view(np.uint8)
    move = StridedCopy(out.shape, 0, 0, dense(out.shape, out.itemsize), 0, offset, strides, dtype, dtype)
    scratch = np.empty(min(_SCRATCH if isinstance(path, str) else GAPS, max(out.itemsize, out.nbytes)), np.uint8)
    shape, steps = _long_axes(out.shape, strides)
    if all(a >= b for a, b in itertools.pairwise(steps)):
        read_strided(read, offset, steps, shape, out.itemsize, flat, scratch)
        return
    turn = Permuter()
    for part in tiles(move, max(1, _CHUNK // out.itemsize), decoded=not isinstance(path, str)):
        target: Array = np.ndarray(part.shape, kinds(part)[1], flat.data, part.to, part.dst_strides)
        read_turned(read, part, target, scratch, turn)


def kinds(move: StridedCopy) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """numpy types of both sides: the float types of a cast, else integers of that size, which move any bits fastest."""
    if move.src_dtype == move.dst_dtype:
        raw = np.dtype(f"u{itemsize(move.dst_dtype)}")
        return raw, raw
    return numpy_dtype(move.src_dtype), numpy_dtype(move.dst_dtype)


def read_turned(read: ReadAt, move: StridedCopy, target: Array, scratch: Bytes, turn: Permuter) -> None:
    """Fill ``target`` from a move's source, which is read in the order of the file, a scratch buffer at a time."""
    shape, strides = _long_axes(move.shape, move.src_strides)
    order = sorted(range(len(shape)), key=lambda i: (-strides[i], i))
    turned = target.squeeze().transpose(order)
    ordered = [strides[i] for i in order]
    for index, found in _pieces(read, move.start, ordered, turned.shape, kinds(move)[0], scratch):
        turn.move(found, turned[(*index, ...)])


def read_strided(
    read: ReadAt, offset: int, strides: Sequence[int], shape: Sequence[int], size: int, out: Bytes, scratch: Bytes
) -> None:
    """Fill ``out`` with the block's elements in the order of its axes. Falling strides make the longest runs.

    Runs with small gaps between them are read in one call through ``scratch``, gaps included; others one by one.
    """
    shape, strides = _long_axes(shape, strides)
    k, run = len(shape), size
    while k and strides[k - 1] == run:
        run *= shape[k - 1]
        k -= 1
    view = out.data
    if not k:
        for a in range(0, run, _CHUNK):
            read(offset + a, view[a : min(a + _CHUNK, run)])
    elif 0 <= strides[k - 1] - run <= BRIDGE and run + strides[k - 1] <= scratch.nbytes:
        result: Array = np.ndarray(shape, np.dtype(f"u{size}"), view)
        for index, found in _pieces(read, offset, strides, shape, result.dtype, scratch):
            np.copyto(result[(*index, ...)], found)
    else:
        at = 0
        for start in offsets(shape[:k], strides[:k]):
            read(offset + start, view[at : at + run])
            at += run


def _pieces(
    read: ReadAt, offset: int, strides: Sequence[int], shape: Sequence[int], kind: np.dtype[Any], scratch: Bytes
) -> Iterator[tuple[tuple[int | slice, ...], Array]]:
    """Read a block piece by piece: (where in the block, its elements), valid until the next piece.

    The axes from ``j`` on, gaps included, are one span. Either several of its rows are one read, or, where spans lie
    too far apart, several spans are read one by one, close together.
    """
    j, span, room, view = len(shape), kind.itemsize, scratch.nbytes, scratch.data
    row = span
    apart = True
    while j and span <= room:
        step = strides[j - 1]
        apart = not 0 <= step - span <= BRIDGE
        if apart or span + step > room:
            break
        j -= 1
        row, span = span, span + (shape[j] - 1) * step
    if j < len(shape) and not (apart and j):
        step = strides[j]
        at_once = min(shape[j], (room - row) // step + 1)
        for outer, start in _walk(shape[:j], strides[:j]):
            for a in range(0, shape[j], at_once):
                n = min(at_once, shape[j] - a)
                read(offset + start + a * step, view[: (n - 1) * step + row])
                yield (*outer, slice(a, a + n)), np.ndarray((n, *shape[j + 1 :]), kind, view, 0, (*strides[j:],))
        return
    if not j:
        read(offset, view[:span])
        yield (), np.ndarray((), kind, view)
        return
    at_once = max(1, room // span)
    for outer, start in _walk(shape[: j - 1], strides[: j - 1]):
        for a in range(0, shape[j - 1], at_once):
            n = min(at_once, shape[j - 1] - a)
            for i in range(n):
                read(offset + start + (a + i) * strides[j - 1], view[i * span : (i + 1) * span])
            yield (*outer, slice(a, a + n)), np.ndarray((n, *shape[j:]), kind, view, 0, (span, *strides[j:]))


def _long_axes(shape: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Without the axes of one element, whose strides mean nothing."""
    long = [i for i, n in enumerate(shape) if n > 1]
    return tuple([shape[i] for i in long]), tuple([strides[i] for i in long])


def _walk(shape: Sequence[int], strides: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int]]:
    """(index, byte offset) of all indices, the last axis fastest."""
    return zip(itertools.product(*[range(n) for n in shape]), offsets(shape, strides), strict=True)


def offsets(shape: Sequence[int], strides: Sequence[int]) -> Iterator[int]:
    """Byte offsets of all indices, the last axis fastest."""
    if not shape:
        return iter((0,))
    axes = [range(0, n * s, s) if s else itertools.repeat(0, n) for n, s in zip(shape, strides, strict=True)]
    if len(axes) == 1:
        return iter(axes[0])
    return map(sum, itertools.product(*axes))


def block_reads(block: Block, shape: Sequence[int], size: int) -> Iterator[tuple[int, int, int]]:
    """The bytes of a strided block of elements of ``size`` bytes, with the gaps that are fetched along."""
    if 0 in shape:
        return
    start, run = block.offset, size
    axes = sorted([(s, n) for n, s in zip(shape, block.strides, strict=True) if n > 1], key=lambda axis: abs(axis[0]))
    start += sum([(n - 1) * s for s, n in axes if s < 0])
    while axes and abs(axes[0][0]) - run <= GAP:
        s, n = axes.pop(0)
        run += (n - 1) * abs(s)
    for at in offsets([n for _, n in reversed(axes)], [abs(s) for s, _ in reversed(axes)]):
        yield block.file, start + at, start + at + run


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
