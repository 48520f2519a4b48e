"""Who sends which chunk when several machines write the same objects. Pure.

A chunk is sent once, by one machine, from bytes that this machine has made. So each chunk has an owner: the share that
writes most of it. A share does what writes into the chunks that it owns, also where that belongs to a neighbour, and
nothing whose chunks all belong to others. Done twice is only what crosses the border between chunks of two owners.

An output that is not cut has no chunks: who has a share of it does just that.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from ckpttool.execute.destinations.chunks import Range, covered, groups, uncut
from ckpttool.execute.extents import Extent
from ckpttool.execute.schedule import Task
from ckpttool.plan import Plan


@dataclass(slots=True)
class Claim:
    """What one share does and sends."""

    tasks: list[int] = field(default_factory=list)
    """Numbers of tasks, ascending."""
    spared: list[int] = field(default_factory=list)
    """Numbers of parts of these tasks that this share need not do."""
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
        """It has something to do that no chunk asks for: the share that it belongs to does it."""


def claims(
    plan: Plan,
    tasks: Sequence[Task],
    shares: Sequence[Sequence[int]],
    sizes: Sequence[int],
    sent: Sequence[Collection[int]] = (),
    finished: Collection[int] = (),
) -> list[Claim]:
    """A claim for each of ``shares``: numbers of tasks, each in one of them.

    ``sizes`` are bytes of a chunk for each output, 0 for one that is not cut. ``sent`` are the chunks of each output
    that need not be sent again, ``finished`` the parts that need not be done again for them (``Chunks.finished``).
    """
    share_of = array("l", [-1]) * len(tasks)
    for number, numbers in enumerate(shares):
        for t in numbers:
            share_of[t] = number
    owners = _Owners([-(-o.size // size) if size else 0 for o, size in zip(plan.outputs, sizes, strict=True)], sizes)
    pieces: list[list[_Piece]] = [[] for _ in shares]
    extents: list[list[Extent]] = [[] for _ in shares]
    for group in groups(plan, tasks):
        share = share_of[group.task]
        parts = [p.number for p in group.parts]
        if share < 0 or (parts and all(p in finished for p in parts)):
            continue
        found = covered(group.extents, sizes)
        pieces[share].append(_Piece(group.task, parts, found, stays=not found or uncut(group.extents, sizes)))
        extents[share] += group.extents
    for number, touched in enumerate(extents):
        owners.claim(number, touched)
    for f, chunks in enumerate(sent):
        owners.drop(f, chunks)
    return _shared_out(tasks, pieces, owners)


def _shared_out(tasks: Sequence[Task], pieces: Sequence[Sequence[_Piece]], owners: _Owners) -> list[Claim]:
    doing: list[dict[int, set[int]]] = [{} for _ in pieces]
    for number, some in enumerate(pieces):
        for p in some:
            wanted = {o for r in p.ranges for o in owners.of(r)}
            if p.stays or not p.parts:
                wanted.add(number)
            for o in wanted:
                doing[o].setdefault(p.task, set()).update(p.parts)
    out = []
    for done, chunks in zip(doing, owners.chunks(len(pieces)), strict=True):
        spared = [p.number for t, parts in done.items() for p in tasks[t].parts if p.number not in parts]
        out.append(Claim(sorted(done), sorted(spared), chunks))
    return out


class _Owners:
    """The share that owns each chunk of each output; -1 for chunks that nobody writes into or sends."""

    def __init__(self, counts: Sequence[int], sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._owner = [array("l", [-1]) * n for n in counts]
        self._most = [array("Q", bytes(8 * n)) for n in counts]
        """Bytes that the owner writes."""

    def claim(self, share: int, extents: Sequence[Extent]) -> None:
        """A share writes these; it owns the chunks of which no other one has written more."""
        held: dict[tuple[int, int], int] = {}
        for f, a, b in extents:
            size = self._sizes[f]
            if not size or a >= b:
                continue
            for c in range(a // size, (b - 1) // size + 1):
                n = min(b, (c + 1) * size) - max(a, c * size)
                held[f, c] = held.get((f, c), 0) + n
        for (f, c), n in held.items():
            if n > self._most[f][c]:
                self._owner[f][c], self._most[f][c] = share, n

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
