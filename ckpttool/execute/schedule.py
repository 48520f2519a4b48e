"""Cutting a plan into parts and tasks. Pure.

A part is what the journal records: a small unit, a slice of a large one, or a carried file. A task is what one worker
does in one go: one part; many small units, whose runs are then read and written together; or, when checksums are
wanted, all parts of a unit, because a hash takes its bytes in order.

Part numbers depend on the plan alone, so that a run can be resumed with other workers, other memory, and with or
without a manifest.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, overload

from ckpttool.core.dtypes import lookup
from ckpttool.core.plan import (
    AssertEqual,
    AssertPadding,
    Compute,
    Copy,
    Fill,
    Gathered,
    Plan,
    Quantize,
    Unit,
    WrittenTensor,
)
from ckpttool.execute.compute import part_elements, parts_of
from ckpttool.execute.hashing import ALGORITHM
from ckpttool.execute.moves import Item, RowBlock, TransposeTile, arrange, divide, item_bytes, item_files
from ckpttool.execute.quantize import part_bytes
from ckpttool.execute.quantize import parts_of as quantized_parts

_MIB = 1 << 20
_LARGEST_PART = 64 * _MIB
_BATCH = 4 * _MIB
"""Small units are done together up to this many bytes."""
_BATCH_UNITS = 256


@dataclass(frozen=True, slots=True)
class PairCheck:
    """A Same or Padding step, or a slice of one that begins at element ``first``."""

    step: AssertEqual | AssertPadding
    first: int = 0


@dataclass(slots=True)
class Part:
    """The smallest thing that is recorded as finished."""

    number: int
    nbytes: int
    """Bytes written."""
    files: tuple[int, ...]
    """Outputs it writes to."""
    unit: int = -1
    """A whole unit, which is arranged together with its neighbours in the task; -1 otherwise."""
    items: Sequence[Item] = ()
    checks: Sequence[PairCheck] = ()
    carried: int = -1
    """Output that is a companion file, copied whole; -1 otherwise."""
    compute: tuple[int, int] = (-1, 0)
    """(step of the unit, part of it) of a computed or quantized tensor; (-1, 0) otherwise."""


@dataclass(slots=True)
class Task:
    """Parts that one worker does, in order."""

    parts: list[Part]
    targets: list[tuple[str, WrittenTensor]] = field(default_factory=list)
    """StoredOperand tensors that the parts complete, with the keys of their checksums in the journal."""
    computing: int = -1
    """Unit with computed tensors, all of whose parts these are; -1 otherwise."""
    slice_of: int = -1
    """Large unit, some or all of whose parts these are; -1 otherwise."""

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return sum([p.nbytes for p in self.parts])


def part_limit(total: int) -> int:
    """Bytes of a part: small enough that a crash costs little of a small output, large enough for long runs."""
    return max(_MIB, min(_LARGEST_PART, total // 64 // _MIB * _MIB))


def schedule(plan: Plan, hashes: Sequence[str], far: Collection[int] = ()) -> list[Task]:
    """All tasks of a plan. The parts of a unit stay in one task when ``hashes`` (names of algorithms) are wanted, and
    where they transpose what is on other machines (``far`` are such sources): all of them read the same bytes.
    """
    return list(Schedule(plan, hashes, far))


class Schedule(Sequence[Task]):
    """The tasks of a plan, each made when it is asked for.

    How many tasks and parts there are of a unit is known from its size, but for large ones, which have to be cut up for
    that: this is most of the time that it takes to schedule a plan. Whoever schedules the same plan elsewhere is told
    (``large``, see ``large_units``); then only the units that are asked for are cut up.
    """

    def __init__(
        self,
        plan: Plan,
        hashes: Sequence[str],
        far: Collection[int] = (),
        large: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        self._plan, self._hashes, self._far = plan, hashes, far
        self._limit = part_limit(plan.bytes_written)
        self._units = plan.packed()
        self._measures = list(self._units.measure())
        self._made: dict[int, list[Task]] = {}
        """Parts of the large units that were cut up here, by unit."""
        self._last: tuple[int, list[Task]] = (-1, [])
        self._groups: list[_TaskGroup] = []
        self._starts = array("q")
        """The first task of each group."""
        self._length = 0
        self._group(large)

    def _group(self, large: Mapping[int, tuple[int, int]] | None) -> None:
        """Number all tasks and parts."""
        number = held = 0
        batch: _TaskGroup | None = None
        for i, output in enumerate(self._plan.outputs):
            if output.carried:
                self._add(_TaskGroup(number, carried=i), 1)
                number += 1
        for u, (written, checked, _, computes) in enumerate(self._measures):
            if computes or written > self._limit or checked > self._limit:
                if large is None:
                    self._made[u] = made = self._cut(u, number)
                    tasks, parts = len(made), sum([len(t.parts) for t in made])
                else:
                    tasks, parts = large[u]
                self._add(_TaskGroup(number, large=u), tasks)
                number += parts
                batch = batch if computes else None
                continue
            if batch is None or held + written + checked > _BATCH or len(batch.units) >= 2 * _BATCH_UNITS:
                batch = _TaskGroup(number, units=array("q"))
                self._add(batch, 1)
                held = 0
            held += written + checked
            batch.units.extend((u, number))
            number += 1

    def _add(self, group: _TaskGroup, tasks: int) -> None:
        self._starts.append(self._length)
        self._groups.append(group)
        self._length += tasks

    def _cut(self, u: int, first: int) -> list[Task]:
        """The tasks of a large unit, with parts that count from ``first``."""
        unit = self._units[u]
        if self._measures[u].computes:
            return [computing_task(unit, u, first, self._limit, self._hashes)]
        slices = _moved_parts(unit, self._limit)
        judged = [Part(0, 0, (), checks=(c,)) for step in separate(unit)[1] for c in _slices(step, self._limit)]
        for number, part in enumerate((*slices, *judged), first):
            part.number = number
        if self._hashes or (self._far and any(_turns(item, self._far) for p in slices for item in p.items)):
            tasks = [Task(slices, _targets(unit.stored_tensors, u, self._hashes), slice_of=u)]
        else:
            tasks = [Task([p], slice_of=u) for p in slices]
        return tasks + [Task([p], slice_of=u) for p in judged]

    def _tasks(self, at: int) -> list[Task]:
        """The tasks of a group."""
        group = self._groups[at]
        if (i := group.carried) >= 0:
            return [Task([Part(group.first, self._plan.outputs[i].size, (i,), carried=i)])]
        if group.large >= 0:
            return self._made.get(group.large) or self._cut(group.large, group.first)
        task = Task([])
        for u, number in zip(group.units[::2], group.units[1::2], strict=True):
            written, _, files, _ = self._measures[u]
            task.parts.append(Part(number, written, files, unit=u))
            if self._hashes:
                task.targets += _targets(self._units.stored_tensors(u), u, self._hashes)
        return [task]

    def computing(self) -> list[Task]:
        """The tasks of units with computed tensors."""
        computes = [at for at, g in enumerate(self._groups) if g.large >= 0 and self._measures[g.large].computes]
        return [task for at in computes for task in self._tasks(at)]

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Task]:
        for at in range(len(self._groups)):
            yield from self._tasks(at)

    @overload
    def __getitem__(self, at: int) -> Task: ...
    @overload
    def __getitem__(self, at: slice) -> list[Task]: ...
    def __getitem__(self, at: int | slice) -> Task | list[Task]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(self._length))]
        at = range(self._length)[at]
        group = bisect_right(self._starts, at) - 1
        if self._last[0] != group:  # the tasks of a unit are asked for one after the other
            self._last = group, self._tasks(group)
        return self._last[1][at - self._starts[group]]


def large_units(tasks: Iterable[Task]) -> dict[int, tuple[int, int]]:
    """How many of all tasks of a plan, and how many parts, each unit has that does not share a task with others."""
    found: dict[int, tuple[int, int]] = {}
    for task in tasks:
        if (u := max(task.slice_of, task.computing)) >= 0:
            count, parts = found.get(u, (0, 0))
            found[u] = count + 1, parts + len(task.parts)
    return found


class _TaskGroup(NamedTuple):
    """Tasks that are made together: a carried file, small units in one task, or a large unit."""

    first: int
    """Number of the first part."""
    units: array[int] = array("q")
    """(unit, number of its part), one pair behind the other, of small units."""
    large: int = -1
    carried: int = -1


def _turns(item: Item, far: Collection[int]) -> bool:
    """Whether an item transposes bytes of these sources."""
    if isinstance(item, RowBlock):
        return any(item.moves[i].src in far for i in item.turned)
    return isinstance(item, TransposeTile) and item.move.src in far


def computing_task(unit: Unit, number: int, first: int, limit: int, hashes: Sequence[str]) -> Task:
    """The task of a unit with computed tensors: unit ``number`` of its plan, with parts that count from ``first``."""
    parts = [*_computed_parts(unit), *_moved_parts(unit, limit)]
    for part in parts:
        part.number = first
        first += 1
    return Task(parts, _targets(unit.stored_tensors, number, hashes), number)


def sum_key(unit: int, target: int, algorithm: str) -> str:
    """Key of a stored tensor's hash in the journal."""
    return f"{unit}.{target}" + ("" if algorithm == ALGORITHM else f":{algorithm}")


def _targets(stored: Sequence[WrittenTensor], unit: int, hashes: Sequence[str]) -> list[tuple[str, WrittenTensor]]:
    """The stored tensors that a unit, or a task of one, completes."""
    return [(sum_key(unit, t, h), target) for t, target in enumerate(stored) for h in hashes]


def _moved_parts(unit: Unit, limit: int) -> list[Part]:
    """The parts of a unit that move bytes, without numbers."""
    moves = separate(unit)[0]
    return [Part(0, sum(map(item_bytes, p)), _files(p), items=p) for p in divide(arrange(moves), limit)]


def _computed_parts(unit: Unit) -> Iterator[Part]:
    """The computed parts of a unit, without numbers."""
    for i, step in enumerate(unit.steps):
        if not isinstance(step, Compute | Quantize):
            continue
        files = tuple(sorted({c.dst.file for c in step.outputs}))
        if isinstance(step, Quantize):
            for n in range(quantized_parts(step)):
                yield Part(0, part_bytes(step, n), files, compute=(i, n))
            continue
        total = sum([prod(c.shape) * lookup(c.dst_dtype).bits // 8 for c in step.outputs])
        size, each = max(prod(step.shape), 1), part_elements(step)
        for n in range(parts_of(step)):
            begin, end = min(n * each, size), min((n + 1) * each, size)
            yield Part(0, total * end // size - total * begin // size, files, compute=(i, n))


def operand_keys(plan: Plan, unit: int) -> list[str]:
    """Keys, in the journal, of the hashes of a unit's operands."""
    steps = plan.units[unit].steps
    return [
        f"{unit}:{i}:{k}"
        for i, s in enumerate(steps)
        if type(s) is Compute or type(s) is Quantize
        for k, o in enumerate(s.operands)
        if not isinstance(o, Gathered)  # its rows pass in another order
    ]


def _files(items: Sequence[Item]) -> tuple[int, ...]:
    return tuple(sorted({file for item in items for file, _ in item_files(item)}))


def separate(unit: Unit) -> tuple[list[Copy | Fill], list[AssertEqual | AssertPadding]]:
    """The steps of a unit that move bytes, and those that compare."""
    moves = [step for step in unit.steps if isinstance(step, Copy | Fill)]
    return moves, [step for step in unit.steps if isinstance(step, AssertEqual | AssertPadding)]


def _slices(step: AssertEqual | AssertPadding, limit: int) -> Iterator[PairCheck]:
    """A large comparison in slices along its first axis. Padding is judged whole: rows must agree in what they are."""
    bits = lookup(step.dtype).bits
    size = prod(step.shape) * bits // 8
    if isinstance(step, AssertPadding) or size <= limit or bits % 8 or not step.shape:
        yield PairCheck(step)
        return
    row = prod(step.shape[1:])
    rows = max(1, limit * 8 // bits // row)
    for a in range(0, step.shape[0], rows):
        shape = (min(rows, step.shape[0] - a), *step.shape[1:])
        x, y = (block._replace(offset=block.offset + a * block.strides[0]) for block in (step.a, step.b))
        yield PairCheck(step._replace(a=x, b=y, shape=shape), a * row)
