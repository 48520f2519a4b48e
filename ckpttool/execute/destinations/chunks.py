"""Chunks of the outputs that are final: nothing more will be written to them. Pure.

An object is sent in chunks of equal size. A chunk may go when all has been done that writes into it: parts of the
plan, and, where checksums are wanted, the hashes that may read these parts back. What writes where is known beforehand,
as the first and the last byte of each step in each output: a chunk may wait for a step that has a gap there, never the
other way round.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from ckpttool.core.plan import Plan
from ckpttool.execute.extents import Extent, part_extents
from ckpttool.execute.schedule import Part, Task

Range = tuple[int, int, int]
"""(output, first chunk, last + 1)."""


class ChunkGroup(NamedTuple):
    """Steps that are done wholly or not at all: a part, or all parts of a task whose hashes are wanted."""

    task: int
    parts: Sequence[Part]
    keys: Sequence[str]
    """Keys of its hashes."""
    extents: Sequence[Extent]


def groups(plan: Plan, tasks: Sequence[Task], numbers: Iterable[int] | None = None) -> Iterator[ChunkGroup]:
    """The groups of the tasks with these numbers, by default of all."""
    for number in range(len(tasks)) if numbers is None else numbers:
        task = tasks[number]
        unit = plan.units[task.computing] if task.computing >= 0 else None
        extents = [list(part_extents(plan, p, unit)) for p in task.parts]
        keys = [k for k, _ in task.targets]
        if keys:
            yield ChunkGroup(number, task.parts, keys, [e for some in extents for e in some])
            continue
        for part, some in zip(task.parts, extents, strict=True):
            yield ChunkGroup(number, [part], (), some)


def covered(extents: Iterable[Extent], sizes: Sequence[int]) -> list[Range]:
    """The chunks that extents touch, each once. ``sizes`` as for ``Chunks``."""
    out: list[Range] = []
    for f, a, b in sorted(extents):
        size = sizes[f]
        if not size or a >= b:
            continue
        first, stop = a // size, (b - 1) // size + 1
        if out and out[-1][0] == f and first <= out[-1][2]:
            out[-1] = (f, out[-1][1], max(stop, out[-1][2]))
        else:
            out.append((f, first, stop))
    return out


def uncut(extents: Iterable[Extent], sizes: Sequence[int]) -> bool:
    """Whether something is written into an output that is not cut."""
    return any(not sizes[f] for f, a, b in extents if a < b)


class Chunks:
    """The chunks of a plan's outputs, and what they wait for.

    ``sizes`` are bytes of a chunk for each output, 0 for one that is not cut: its chunks are never ready, and what
    writes into it has to be done again by the next run.
    """

    def __init__(self, plan: Plan, tasks: Sequence[Task], sizes: Sequence[int]) -> None:
        self.counts = [-(-o.size // size) if size else 0 for o, size in zip(plan.outputs, sizes, strict=True)]
        self._sizes = sizes
        self._waits = [array("L", bytes(8 * n)) for n in self.counts]
        """Groups that write into each chunk, and have not been done."""
        self._ranges: list[tuple[Range, ...]] = []
        """The chunks that each group writes into."""
        self._whole: list[bool] = []
        """Whether a group writes into an output that is not cut, too."""
        self._parts: list[list[int]] = []
        self._keys: list[Collection[str]] = []
        self._group_of: dict[int | str, int] = {}
        self._left: list[int] = []
        """The number of parts and hashes that each group waits for."""
        for group in groups(plan, tasks):
            self._add(group)
        for i, o in enumerate(plan.outputs):
            if o.summed and sizes[i]:  # its literal bytes are known when all is written: these chunks are never ready
                self._count(covered(((i, at, at + len(data)) for at, data in o.literals), sizes), 1)

    def _add(self, group: ChunkGroup) -> None:
        number = len(self._parts)
        ranges = covered(group.extents, self._sizes)
        self._parts.append([p.number for p in group.parts])
        self._keys.append(group.keys)
        self._left.append(len(group.parts) + len(group.keys))
        self._ranges.append(tuple(ranges))
        self._whole.append(uncut(group.extents, self._sizes))
        self._group_of.update(dict.fromkeys(self._parts[-1], number))
        self._group_of.update(dict.fromkeys(group.keys, number))
        self._count(ranges, 1)

    def _count(self, ranges: Iterable[Range], by: int) -> None:
        for f, first, stop in ranges:
            waits = self._waits[f]
            for c in range(first, stop):
                waits[c] += by

    def finished(self, sent: Sequence[Collection[int]], sums: Collection[str]) -> set[int]:
        """Parts that need not be done again when these chunks of each output have been sent before.

        A hash that is not among ``sums`` has to read its tensor back, so all of that is done again. So is what writes
        nothing but compares: no chunk says that it was done.
        """
        out: set[int] = set()
        for parts, keys, ranges, whole in zip(self._parts, self._keys, self._ranges, self._whole, strict=True):
            chunks = ((f, c) for f, first, stop in ranges for c in range(first, stop))
            if ranges and not whole and all(k in sums for k in keys) and all(c in sent[f] for f, c in chunks):
                out.update(parts)
        return out

    def done(self, numbers: Iterable[int], keys: Iterable[str] = ()) -> Iterator[tuple[int, int]]:
        """These parts are written and these hashes known. Yields (output, chunk) of what is ready by that."""
        found: Iterable[int | str] = (*numbers, *keys)
        for what in found:
            group = self._group_of.get(what)
            if group is None:  # the hash of an operand
                continue
            self._left[group] -= 1
            if not self._left[group]:
                yield from self._ready(self._ranges[group])

    def _ready(self, ranges: Iterable[Range]) -> Iterator[tuple[int, int]]:
        for f, first, stop in ranges:
            waits = self._waits[f]
            for c in range(first, stop):
                waits[c] -= 1
                if not waits[c]:
                    yield f, c
