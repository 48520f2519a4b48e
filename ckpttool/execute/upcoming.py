"""What tasks read. What the next ones read from other machines is announced before their turn."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod

from ckpttool.dtypes import itemsize, lookup, nbytes
from ckpttool.encodings import Contents
from ckpttool.execute.ahead import GAP
from ckpttool.execute.files import Medium
from ckpttool.execute.moves import ZEROS, Batch, FileRows, Item, Move, RowBlock, TransposeTile, arrange
from ckpttool.execute.reader import offsets
from ckpttool.execute.schedule import Task, separate
from ckpttool.plan import (
    Adapted,
    AssertEqual,
    AssertPadding,
    Block,
    Compute,
    Gathered,
    Operand,
    Plan,
    Quantize,
    Scaled,
    Stored,
    Unit,
)

Range = tuple[int, int, int]
"""Source, first byte, end."""

Checking = AssertEqual | AssertPadding


class Turn:
    """A task whose turn it is, and what was found out about it before."""

    def __init__(self, task: Task, plan: Plan, pool: Medium) -> None:
        self.task = task
        self._plan = plan
        self._pool = pool
        self.size = 0
        """Bytes that were announced; 0 where everything is on this machine."""
        self._forget: Callable[[], None] = lambda: None
        self._units = [plan.units[p.unit] for p in task.parts if p.unit >= 0]
        self._arranged: tuple[list[Item], list[Checking]] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is made of whole units, which are done together."""
        return bool(self._units)

    def arranged(self) -> tuple[list[Item], list[Checking]]:
        """What whole units move and check."""
        if self._arranged is None:
            found = [separate(u) for u in self._units]
            self._arranged = arrange([m for moves, _ in found for m in moves]), [c for _, cs in found for c in cs]
        return self._arranged

    @property
    def _items(self) -> Iterator[Item]:
        yield from self.arranged()[0]
        for part in self.task.parts:
            yield from part.items

    def announce(self, most: int) -> None:
        """Have read ahead what it reads, in order; up to ``most`` bytes are there at a time."""
        reads = [*self._turned(), *(r for item in self._items for r in item_reads(item))]
        for step in [*self.arranged()[1], *(c.step for part in self.task.parts for c in part.checks)]:
            reads += _check_reads(step)
        if sum([b - a for _, a, b in reads]) <= most // 4:
            reads.sort()  # all of it will be there: long requests are better than the right order
        outputs = [self._plan.outputs[part.carried] for part in self.task.parts if part.carried >= 0]
        ranges = [*self._named(reads), *((o.carried, 0, o.size) for o in outputs)]
        self.size = sum([b - a for _, a, b in ranges]) + 1
        self._forget = self._pool.announce(ranges)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """While it is carried out. What it reads in another order than it lies in a file is here before it begins."""
        kept = self._pool.keep(self._named(self._turned()) if self.size else ())
        try:
            yield
        finally:
            kept()
            self._forget()

    def _named(self, reads: Iterable[Range]) -> list[tuple[Contents, int, int]]:
        return [(self._plan.sources[f].contents, a, b) for f, a, b in reads]

    def _turned(self) -> Iterator[Range]:
        for item in self._items:
            yield from turned_reads(item)


class Upcoming:
    """Tasks in their order. What those that come next read is announced, as much as there is memory for."""

    def __init__(self, tasks: Iterable[Task], plan: Plan, pool: Medium, ahead: int) -> None:
        self._tasks = deque(tasks)
        self._plan = plan
        self._pool = pool
        self._ahead = ahead
        self._ready: deque[Turn] = deque()
        self._announced = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._tasks) + len(self._ready)

    def popleft(self) -> Turn:
        """The next task. Raises IndexError when there is none."""
        with self._lock:
            if not self._ahead:
                return Turn(self._tasks.popleft(), self._plan, self._pool)
            self._look_ahead(0)
            turn = self._ready.popleft()
            self._announced -= turn.size
            self._look_ahead(self._ahead)
            return turn

    def _look_ahead(self, wanted: int) -> None:
        """Announce tasks until so many bytes are, of one at least."""
        while self._tasks and (not self._ready or self._announced < wanted):
            turn = Turn(self._tasks.popleft(), self._plan, self._pool)
            turn.announce(self._ahead)
            self._ready.append(turn)
            self._announced += turn.size


def item_reads(item: Item) -> Iterator[Range]:
    """What an item reads in the order of the file, in its own order, mostly."""
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
    """What an item reads in another order, and perhaps several times."""
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


def _move_reads(move: Move) -> Iterator[Range]:
    if move.src != ZEROS:
        yield from block_reads(Block(move.src, move.start, move.src_strides), move.shape, itemsize(move.src_dtype))


def _check_reads(step: Checking) -> Iterator[Range]:
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


def block_reads(block: Block, shape: Sequence[int], size: int) -> Iterator[Range]:
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


def operand_reads(unit: Unit) -> Iterator[Range]:
    """What is read to work out the tensors of a unit."""
    for step in unit.steps:
        if isinstance(step, Compute | Quantize):
            for stored in [s for o in step.operands for s in _stored(o)]:
                for copy in stored.copies:
                    yield from block_reads(copy.src, copy.shape, itemsize(copy.src_dtype))


def _stored(operand: Operand) -> Iterator[Stored]:
    """The tensors in files of which an operand is made."""
    if isinstance(operand, Stored):
        yield operand
    elif isinstance(operand, Scaled):
        yield from (operand.weight, operand.scale, *([operand.factor] if operand.factor else []))
    elif isinstance(operand, Gathered):
        for source in operand.sources:
            yield from _stored(source)
    elif isinstance(operand, Adapted):
        yield from _stored(operand.weight)
        for term in operand.terms:
            yield from (term.up, term.down)
