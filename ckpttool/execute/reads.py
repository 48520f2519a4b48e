"""The source bytes that a task will read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod

from ckpttool.core.dtypes import itemsize, lookup, nbytes
from ckpttool.core.encodings import Contents
from ckpttool.core.plan import (
    Adapted,
    AssertEqual,
    AssertPadding,
    Block,
    Compute,
    Gathered,
    Operand,
    Quantize,
    Scaled,
    StoredOperand,
)
from ckpttool.execute.ahead import GAP
from ckpttool.execute.blocks import Mover
from ckpttool.execute.moves import ZEROS, Batch, FileRows, Item, RowBlock, StridedCopy, TransposeTile
from ckpttool.execute.reader import block_reads
from ckpttool.execute.strided import is_turned
from ckpttool.kernels.merge import METHODS

Range = tuple[int, int, int]
"""Source, first byte, end."""

Checking = AssertEqual | AssertPadding


def named(reads: Iterable[Range], sources: Sequence[Contents]) -> list[tuple[Contents, int, int]]:
    """The same, as a medium takes them."""
    return [(sources[f], a, b) for f, a, b in reads]


def item_reads(item: Item) -> Iterator[Range]:
    """Bytes that an item reads mostly in file order."""
    if isinstance(item, Batch):
        yield from ((r.src, r.start, r.start + r.nbytes) for r in item.runs if r.src != ZEROS)
    elif isinstance(item, RowBlock):
        apart = [lane for lane in item.reads if lane.stride - _row(item, lane) > GAP]
        for lane in item.reads:
            if lane not in apart:
                start = lane.offset + item.start * lane.stride
                yield lane.file, start, start + (item.stop - item.start - 1) * lane.stride + _row(item, lane)
        for i in range(item.start, item.stop) if apart else ():
            for lane in apart:
                start = lane.offset + i * lane.stride
                yield lane.file, start, start + _row(item, lane)


def turned_reads(item: Item) -> Iterator[Range]:
    """Bytes that an item reads in another order, perhaps several times."""
    if isinstance(item, RowBlock):
        for i in item.turned:
            move = item.moves[i]
            yield from _move_reads(move.cut((item.start, *[0] * len(move.shape[1:])), (item.stop, *move.shape[1:])))
    elif isinstance(item, TransposeTile):
        yield from _move_reads(item.move)


def _row(item: RowBlock, lane: FileRows) -> int:
    """Bytes of a file from the begin of a row that is read to its end."""
    if lane.solid:
        return lane.tail
    move = item.moves[lane.members[0].move]
    reach = sum([(n - 1) * s for n, s in zip(move.shape[1:], move.src_strides[1:], strict=True)])
    return reach + itemsize(move.src_dtype)


def _move_reads(move: StridedCopy) -> Iterator[Range]:
    if move.src != ZEROS:
        yield from block_reads(Block(move.src, move.start, move.src_strides), move.shape, itemsize(move.src_dtype))


def check_reads(step: Checking) -> Iterator[Range]:
    """The byte ranges that a comparison reads."""
    if 0 in step.shape:
        return
    if isinstance(step, AssertEqual):
        for block, dtype in ((step.a, step.dtype), (step.b, step.b_dtype or step.dtype)):
            if lookup(dtype).bits % 8:  # packed, and compared whole
                yield block.file, block.offset, block.offset + nbytes(dtype, prod(step.shape))
            else:
                yield from block_reads(block, step.shape, itemsize(dtype))
        return
    yield from block_reads(step.src, step.shape, itemsize(step.dtype))
    if step.like is not None:
        yield from block_reads(step.like, step.shape[1:], itemsize(step.dtype))


@contextmanager
def operands_at_hand(step: Compute | Quantize, carrier: Mover) -> Iterator[None]:
    """While a tensor is worked out: its operands are read ahead from other machines. Those that are read several times,
    or in another order than they lie there, are on this machine before that.
    """
    tensors = [s for o in step.operands for s in stored_tensors(o)]
    if not any(carrier.pool.is_far(carrier.sources[c.src.file]) for s in tensors for c in s.copies):
        yield
        return
    again = _is_read_again(step)
    kept = named([r for s in tensors if again or is_turned(s.copies) for r in _stored_reads(s)], carrier.sources)
    forget = carrier.pool.announce(named([r for s in tensors for r in _stored_reads(s)], carrier.sources))
    try:
        close = carrier.pool.keep(kept)
        try:
            yield
        finally:
            close()
    finally:
        forget()


def _is_read_again(step: Compute | Quantize) -> bool:
    if isinstance(step, Quantize):  # a factor of the whole tensor is known when all of it has been seen
        return any(r.role not in ("codes", "scales") for r in step.results)
    return METHODS[step.method].passes(dict(step.whole), len(step.models)) > 0


def _stored_reads(stored: StoredOperand) -> Iterator[Range]:
    for copy in stored.copies:
        yield from block_reads(copy.src, copy.shape, itemsize(copy.src_dtype))


def stored_tensors(operand: Operand) -> Iterator[StoredOperand]:
    """The tensors in files of which an operand is made."""
    if isinstance(operand, StoredOperand):
        yield operand
    elif isinstance(operand, Scaled):
        yield from (operand.weight, operand.scale, *([operand.factor] if operand.factor else []))
    elif isinstance(operand, Gathered):
        for source in operand.sources:
            yield from stored_tensors(source)
    elif isinstance(operand, Adapted):
        yield from stored_tensors(operand.weight)
        for term in operand.terms:
            yield from (term.up, term.down)
