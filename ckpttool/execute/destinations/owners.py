"""Who sends which chunk when several machines write the same objects. Pure.

A chunk is sent once, by one machine, from bytes that this machine has made. So each chunk has an owner: the share that
writes most of it. A share does what writes into the chunks that it owns, also where that belongs to a neighbour, and
nothing whose chunks all belong to others. Done twice is only what crosses the border between chunks of two owners.

Outputs that nobody sends in chunks are left to whoever ends the run.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from ckpttool.execute.destinations.chunks import Range, covered, groups
from ckpttool.execute.extents import Extent
from ckpttool.execute.journal import Finished
from ckpttool.execute.schedule import Task, operand_keys
from ckpttool.plan import Plan


@dataclass(slots=True)
class Claim:
    """What one share does and sends."""

    tasks: list[int] = field(default_factory=list)
    """Numbers of tasks, ascending."""
    spared: list[int] = field(default_factory=list)
    """Numbers of parts of these tasks that this share need not do; of a task that is there for its hashes all."""
    chunks: list[list[int]] = field(default_factory=list)
    """What it sends: [output, first chunk, last + 1]. When its tasks are done but for the spared parts, these have all
    their bytes but literal ones."""


class _Piece:
    """A group of parts, and the chunks that it touches."""

    __slots__ = ("parts", "ranges", "stays", "task")

    def __init__(self, task: int, parts: list[int], ranges_: list[Range], *, stays: bool) -> None:
        self.task = task
        self.parts = parts
        self.ranges = ranges_
        self.stays = stays
        """It writes nothing, or its hashes are wanted: when no chunk asks for it, its own share does it."""


def claims(
    plan: Plan,
    tasks: Sequence[Task],
    shares: Sequence[Sequence[int]],
    sizes: Sequence[int],
    sent: Sequence[Collection[int]] = (),
    finished: Finished | None = None,
) -> list[Claim]:
    """A claim for each of ``shares``: numbers of tasks, each in one of them. Who owns a chunk follows from these alone.

    ``sizes`` are bytes of a chunk for each output, 0 for one that nobody sends. ``sent`` are the chunks of each output
    that need not be sent again, ``finished`` what need not be done again for them (``Chunks.finished``).
    """
    done = finished or Finished()
    share_of = array("l", [-1]) * len(tasks)
    for number, numbers in enumerate(shares):
        for t in numbers:
            share_of[t] = number
    owners = _Owners([-(-o.size // size) if size else 0 for o, size in zip(plan.outputs, sizes, strict=True)], sizes)
    pieces: list[_Piece] = []
    for group in groups(plan, tasks):
        share = share_of[group.task]
        if share < 0:
            continue
        owners.writes(share, group.extents)
        parts = [p.number for p in group.parts]
        if not parts or not done.parts.issuperset(parts):
            found = covered(group.extents, sizes)
            stays = bool(found and group.keys) or not any(a < b for _, a, b in group.extents)
            pieces.append(_Piece(group.task, parts, found, stays=stays))
    owners.choose()
    for f, chunks in enumerate(sent):
        owners.drop(f, chunks)
    doing: list[dict[int, set[int]]] = [{} for _ in shares]
    for p in pieces:
        wanted = {o for r in p.ranges for o in owners.of(r)}
        for o in wanted or ([share_of[p.task]] if p.stays else []):
            doing[o].setdefault(p.task, set()).update(p.parts)
    _add_operands(plan, tasks, share_of, doing, done.sums)
    out = []
    for parts_of, chunks_ in zip(doing, owners.chunks(len(shares)), strict=True):
        spared = [p.number for t, parts in parts_of.items() for p in tasks[t].parts if p.number not in parts]
        out.append(Claim(sorted(parts_of), sorted(spared), chunks_))
    return out


def _add_operands(
    plan: Plan,
    tasks: Sequence[Task],
    share_of: Sequence[int],
    doing: Sequence[dict[int, set[int]]],
    sums: Collection[str],
) -> None:
    """Tensors that an earlier run has written are read again where it has not left the hashes of their operands."""
    done = set().union(*doing)
    for t, task in enumerate(tasks):
        if share_of[t] < 0 or task.computing < 0 or t in done:
            continue
        if any(k not in sums for k in operand_keys(plan, task.computing)):
            doing[share_of[t]][t] = set()


class _Owners:
    """The share that owns each chunk of each output; -1 for chunks that nobody writes into or sends."""

    def __init__(self, counts: Sequence[int], sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._owner = [array("l", [-1]) * n for n in counts]
        self._held: dict[tuple[int, int], dict[int, int]] = {}
        """Bytes that each share writes into each chunk."""

    def writes(self, share: int, extents: Sequence[Extent]) -> None:
        """A share writes these."""
        for f, a, b in extents:
            size = self._sizes[f]
            if not size or a >= b:
                continue
            for c in range(a // size, (b - 1) // size + 1):
                held = self._held.setdefault((f, c), {})
                held[share] = held.get(share, 0) + min(b, (c + 1) * size) - max(a, c * size)

    def choose(self) -> None:
        """Who writes most of a chunk owns it, the first of equals."""
        for (f, c), held in self._held.items():
            self._owner[f][c] = min(held, key=lambda share: (-held[share], share))
        self._held.clear()

    def drop(self, output: int, chunks: Collection[int]) -> None:
        for c in chunks:
            self._owner[output][c] = -1

    def of(self, found: Range) -> set[int]:
        """Who owns one of these chunks."""
        f, first, stop = found
        return set(self._owner[f][first:stop]) - {-1}

    def chunks(self, shares: int) -> list[list[list[int]]]:
        """Of each share."""
        out: list[list[list[int]]] = [[] for _ in range(shares)]
        for f, owner in enumerate(self._owner):
            first = 0
            for share, run in groupby(owner):
                stop = first + len(list(run))
                if share >= 0:
                    out[share].append([f, first, stop])
                first = stop
        return out
