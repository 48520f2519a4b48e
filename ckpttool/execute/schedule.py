"""Cutting a plan into parts and tasks. Pure.

A part is what the journal records: a small unit, a slice of a large one, or a carried file. A task is what one worker
does in one go: one part; many small units, whose runs are then read and written together; or, when checksums are
wanted, all parts of a unit, because a hash takes its bytes in order.

Part numbers depend on the plan alone, so that a run can be resumed with other workers, other memory, and with or
without a manifest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from ckpttool.dtypes import lookup
from ckpttool.execute.compute import part_elements, parts_of
from ckpttool.execute.hashing import ALGORITHM
from ckpttool.execute.moves import Item, RowBlock, TransposeTile, arrange, divide, item_bytes, item_files
from ckpttool.execute.quantize import part_bytes
from ckpttool.execute.quantize import parts_of as quantized_parts
from ckpttool.plan import AssertEqual, AssertPadding, Compute, Copy, Fill, Gathered, Plan, Quantize, Target, Unit

_MIB = 1 << 20
_LARGEST_PART = 64 * _MIB
_BATCH = 4 * _MIB
"""Small units are done together up to this many bytes."""
_BATCH_UNITS = 256


@dataclass(frozen=True, slots=True)
class Check:
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
    checks: Sequence[Check] = ()
    carried: int = -1
    """Output that is a companion file, copied whole; -1 otherwise."""
    compute: tuple[int, int] = (-1, 0)
    """(step of the unit, part of it) of a computed or quantised tensor; (-1, 0) otherwise."""


@dataclass(slots=True)
class Task:
    """Parts that one worker does, in order."""

    parts: list[Part]
    targets: list[tuple[str, Target]] = field(default_factory=list)
    """Stored tensors that the parts complete, with the keys of their checksums in the journal."""
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
    limit = part_limit(plan.bytes_written)
    tasks: list[Task] = []
    number = 0
    batch: Task | None = None
    held = 0
    for i, output in enumerate(plan.outputs):
        if output.carried:
            tasks.append(Task([Part(number, output.size, (i,), carried=i)]))
            number += 1
    for u, unit in enumerate(plan.units):
        if any(type(s) is Compute or type(s) is Quantize for s in unit.steps):
            tasks.append(computing_task(unit, u, number, limit, hashes))
            number += len(tasks[-1].parts)
            continue
        targets = _targets(unit, u, hashes)
        written, checked, files = _measure(unit)
        if written <= limit and checked <= limit:
            if batch is None or held + written + checked > _BATCH or len(batch.parts) >= _BATCH_UNITS:
                batch = Task([])
                tasks.append(batch)
                held = 0
            held += written + checked
            batch.parts.append(Part(number, written, files, unit=u))
            batch.targets += targets
            number += 1
            continue
        batch = None
        slices = _moved_parts(unit, limit)
        judged = [Part(0, 0, (), checks=(c,)) for step in separate(unit)[1] for c in _slices(step, limit)]
        for part in (*slices, *judged):
            part.number = number
            number += 1
        if hashes or (far and any(_turns(item, far) for p in slices for item in p.items)):
            tasks.append(Task(slices, targets, slice_of=u))
        else:
            tasks += [Task([p], slice_of=u) for p in slices]
        tasks += [Task([p], slice_of=u) for p in judged]
    return tasks


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
    return Task(parts, _targets(unit, number, hashes), number)


def sum_key(unit: int, target: int, algorithm: str) -> str:
    """Of the hash of a stored tensor, in the journal."""
    return f"{unit}.{target}" + ("" if algorithm == ALGORITHM else f":{algorithm}")


def _targets(unit: Unit, number: int, hashes: Sequence[str]) -> list[tuple[str, Target]]:
    return [(sum_key(number, t, h), target) for t, target in enumerate(unit.stored_tensors) for h in hashes]


def _moved_parts(unit: Unit, limit: int) -> list[Part]:
    """What a unit moves, in parts without numbers."""
    moves = separate(unit)[0]
    return [Part(0, sum(map(item_bytes, p)), _files(p), items=p) for p in divide(arrange(moves), limit)]


def _computed_parts(unit: Unit) -> Iterator[Part]:
    """What a unit works out, in parts without numbers."""
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
    """What a unit moves, and what it checks."""
    moves = [step for step in unit.steps if isinstance(step, Copy | Fill)]
    return moves, [step for step in unit.steps if isinstance(step, AssertEqual | AssertPadding)]


def _measure(unit: Unit) -> tuple[int, int, tuple[int, ...]]:
    """Bytes that a unit writes, bytes that it only checks, and the files it writes."""
    written = checked = 0
    files = set()
    for step in unit.steps:
        if isinstance(step, Copy | Fill):
            dtype = step.dst_dtype if isinstance(step, Copy) else step.dtype
            written += prod(step.shape) * lookup(dtype).bits // 8
            files.add(step.dst.file)
        elif isinstance(step, AssertEqual | AssertPadding):
            checked += prod(step.shape) * lookup(step.dtype).bits // 8
    return written, checked, tuple(files)


def _slices(step: AssertEqual | AssertPadding, limit: int) -> Iterator[Check]:
    """A large comparison in slices along its first axis. Padding is judged whole: rows must agree in what they are."""
    bits = lookup(step.dtype).bits
    size = prod(step.shape) * bits // 8
    if isinstance(step, AssertPadding) or size <= limit or bits % 8 or not step.shape:
        yield Check(step)
        return
    row = prod(step.shape[1:])
    rows = max(1, limit * 8 // bits // row)
    for a in range(0, step.shape[0], rows):
        shape = (min(rows, step.shape[0] - a), *step.shape[1:])
        x, y = (block._replace(offset=block.offset + a * block.strides[0]) for block in (step.a, step.b))
        yield Check(step._replace(a=x, b=y, shape=shape), a * row)
