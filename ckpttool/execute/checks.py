"""Steps that write nothing: replicas must hold the same bytes, padding must be padding."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from math import prod

import numpy as np

from ckpttool.core.dtypes import itemsize, lookup, numpy_dtype
from ckpttool.core.encodings import Contents
from ckpttool.core.plan import TIED_HINT, AssertEqual, AssertPadding, Block
from ckpttool.errors import ConflictError, CorruptError
from ckpttool.execute.blocks import Mover
from ckpttool.execute.files import span
from ckpttool.execute.reader import GAPS, Bytes, blocks, read_strided
from ckpttool.execute.remote import open_medium
from ckpttool.kernels.cast import cast

_BLOCK = 2 << 20


def check(step: AssertEqual | AssertPadding, carrier: Mover, first: int = 0) -> None:
    """Do a comparison. Raises CorruptError when the sources contradict it, ConflictError when tied tensors differ.

    ``first``: number of the step's first element in its tensor, for the message.
    """
    if wrong := _problem(step, carrier, first):
        raise wrong


def _problem(step: AssertEqual | AssertPadding, carrier: Mover, first: int = 0) -> ConflictError | CorruptError | None:
    """The error for what contradicts the step. Raises CorruptError for a source that cannot be read."""
    if 0 in step.shape:
        return None
    return _inequality(step, carrier, first) if isinstance(step, AssertEqual) else _padding(step, carrier)


def agree(steps: Iterable[AssertEqual], sources: Sequence[Contents]) -> bool:
    """Whether both sides of every step hold the same bytes. Raises CorruptError for a source that cannot be read."""
    with open_medium() as pool:
        carrier = Mover(sources, (), pool, 4 * _BLOCK, threading.Event())
        return all(_problem(step, carrier) is None for step in steps)


class _BlockReader:
    """Reads boxes of ``count`` blocks, each into a buffer of its own in the arena of a mover.

    ``size``: bytes of an element; a buffer holds one at least. ``limit``: bytes of each buffer.
    """

    def __init__(self, carrier: Mover, count: int, size: int) -> None:
        self.carrier = carrier
        arena = carrier.arena
        arena.reset()
        self.limit = max(size, min(_BLOCK, arena.room(count + 1) // (count + 1)))
        self.buffers = [arena.take(self.limit) for _ in range(count)]
        self.scratch = arena.take(self.limit)

    def __call__(self, which: int, block: Block, start: tuple[int, ...], shape: tuple[int, ...], size: int) -> Bytes:
        """The bytes of a box of a block, in buffer number ``which``, until the next call for that buffer."""
        out = self.buffers[which][: prod(shape) * size]

        def read(at: int, buffer: memoryview) -> None:
            # The first block is what will be copied: let it stay in the page cache.
            self.carrier.read(block.file, at, (buffer,), once=which > 0)

        scratch = self.scratch if isinstance(self.carrier.sources[block.file], str) else self.scratch[:GAPS]
        read_strided(read, _at(block, start), block.strides, shape, size, out, scratch)
        return out


def _at(block: Block, index: tuple[int, ...]) -> int:
    """The offset of an element in the block's file."""
    return block.offset + sum([i * s for i, s in zip(index, block.strides, strict=True)])


def _bytewise(step: AssertEqual) -> AssertEqual:
    """A step over packed elements as one over bytes; such tensors are compared whole."""
    size = prod(step.shape) * lookup(step.dtype).bits // 8
    return step._replace(a=step.a._replace(strides=(1,)), b=step.b._replace(strides=(1,)), shape=(size,), dtype="U8")


def _inequality(step: AssertEqual, carrier: Mover, done: int) -> ConflictError | CorruptError | None:
    """The error for the first element of which two copies differ. ``done``: see ``check``."""
    if lookup(step.dtype).bits % 8:
        step = _bytewise(step)
    size, other = itemsize(step.dtype), step.b_dtype or step.dtype
    read = _BlockReader(carrier, 2, max(size, itemsize(other)))
    kind = np.dtype(f"u{size}")
    for box in blocks(step.shape, max(size, itemsize(other)), read.limit):
        a = read(0, step.a, box.start, box.shape, size)
        b = read(1, step.b, box.start, box.shape, itemsize(other))
        if other != step.dtype:
            rounded = np.empty(b.size // itemsize(other), numpy_dtype(step.dtype))
            cast(b.view(numpy_dtype(other)), rounded)
            b = rounded.view(np.uint8)
        if not np.array_equal(a, b):
            at = int(np.flatnonzero(a.view(kind) != b.view(kind))[0])
            inside = np.unravel_index(at, box.shape) if box.shape else ()
            index = tuple(int(i) + s for i, s in zip(inside, box.start, strict=True))
            values = [str(x.view(numpy_dtype(step.dtype))[at]) for x in (a, b)]
            where = [f"{carrier.sources[block.file]} {span(_at(block, index), size)}" for block in (step.a, step.b)]
            place = f"differ, first at element {done + at:,}: {values[0]} and {values[1]}"
            if step.tied:
                what = f"`{step.what}` and `{step.tied}`, which the config ties to each other, {place}"
                return ConflictError(what, where=where, hint=TIED_HINT)
            copies = f"two copies of `{step.what}`" if other == step.dtype else f"`{step.what}` and its master weight"
            return CorruptError(f"{copies} {place}", where=where)
        done += prod(box.shape)
    return None


def _padding(step: AssertPadding, carrier: Mover) -> CorruptError | None:
    """The error for padding that is neither zeros nor copies of the last row."""
    size = itemsize(step.dtype)
    read = _BlockReader(carrier, 2, size)
    zeros, copies = True, step.like is not None
    for box in blocks(step.shape, size, read.limit):
        found = read(0, step.src, box.start, box.shape, size)
        zeros = zeros and not found.any()
        if copies and step.like is not None:
            # A block is a number of whole rows, or a piece of one row: compare it with that piece of the row `like`.
            shape = box.shape[1:]
            row = read(1, step.like, box.start[1:], shape, size)
            copies = bool((found.reshape(-1, row.size) == row).all())
        if not zeros and not copies:
            wanted = "zeros or copies of the last row" if step.like is not None else "zeros"
            return CorruptError(
                f"the padding of `{step.what}` is not {wanted}",
                where=f"{carrier.sources[step.src.file]} {span(_at(step.src, box.start), found.size)}",
            )
    return None
