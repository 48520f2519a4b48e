"""The machine that sends each chunk when several write the same objects. Pure.

A chunk is sent once, by one machine, from bytes that this machine has made. So each chunk has an owner: the share that
writes most of it. A share does what writes into the chunks that it owns, also where that belongs to a neighbour, and
nothing whose chunks all belong to others. Done twice is only what crosses the border between chunks of two owners.

Outputs that nobody sends in chunks are left to whoever ends the run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from ckpttool.execute.destinations.chunks import Range, covered, groups
from ckpttool.execute.journal import Finished
from ckpttool.execute.schedule import operand_keys
from ckpttool.execute.shares import TaskSurvey

_Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(slots=True)
class ShareClaim:
    """The tasks that one share does, and the chunks that it sends."""

    tasks: list[int] = field(default_factory=list)
    """Numbers of tasks, ascending."""
    spared: list[int] = field(default_factory=list)
    """Numbers of parts of these tasks that this share need not do: all parts of a task that only adds hashes."""
    chunks: list[list[int]] = field(default_factory=list)
    """The chunks that it sends: [output, first chunk, last + 1]. When its tasks are done but for the spared parts,
    these have all their bytes but literal ones."""


def claims(
    survey: TaskSurvey,
    shares: Sequence[Sequence[int]],
    sizes: Sequence[int],
    sent: Sequence[Collection[int]] = (),
    finished: Finished | None = None,
) -> list[ShareClaim]:
    """A claim for each of ``shares``: numbers of tasks, each in one of them. Who owns a chunk follows from these alone.

    ``sizes`` are bytes of a chunk for each output, 0 for one that nobody sends. ``sent`` are the chunks of each output
    that need not be sent again, ``finished`` what need not be done again for them (``Chunks.finished``).
    """
    plan, tasks, done = survey.plan, survey.tasks, finished or Finished()
    share_of = np.full(len(tasks), -1)
    for number, numbers in enumerate(shares):
        share_of[[*numbers]] = number
    owners = _Owners(survey, share_of, sizes, sent)
    doing: list[dict[int, set[int]]] = [{} for _ in shares]
    shared = []
    for t, (share, one) in enumerate(zip(share_of.tolist(), owners.only.tolist(), strict=True)):
        numbers = [p.number for p in tasks[t].parts] if share >= 0 else []
        if one >= 0 and done.parts.isdisjoint(numbers):  # all that it writes belongs to one share
            doing[one][t] = set(numbers)
        elif share >= 0:
            shared.append(t)
    for group in groups(plan, tasks, shared):
        parts = [p.number for p in group.parts]
        if parts and done.parts.issuperset(parts):
            continue
        found = covered(group.extents, sizes)
        # What writes nothing, and hashes of what has been sent: no chunk asks for them.
        stays = bool(found and group.keys) or not any(a < b for _, a, b in group.extents)
        wanted = {o for r in found for o in owners.of(r)}
        for o in wanted or ([int(share_of[group.task])] if stays else []):
            doing[o].setdefault(group.task, set()).update(parts)
    _add_operands(survey, share_of.tolist(), doing, done.sums)
    out = []
    for parts_of, chunks in zip(doing, owners.chunks(len(shares)), strict=True):
        spared = [p.number for t, some in parts_of.items() for p in tasks[t].parts if p.number not in some]
        out.append(ShareClaim(sorted(parts_of), sorted(spared), chunks))
    return out


def _add_operands(
    survey: TaskSurvey, share_of: Sequence[int], doing: Sequence[dict[int, set[int]]], sums: Collection[str]
) -> None:
    """Add tasks without parts: tensors that an earlier run has written without recording the hashes of their operands.

    Their operands are read again for these hashes.
    """
    done = set().union(*doing)
    for t, task in enumerate(survey.tasks):
        if share_of[t] < 0 or task.computing < 0 or t in done:
            continue
        if any(k not in sums for k in operand_keys(survey.plan, task.computing)):
            doing[share_of[t]][t] = set()


class _Owners:
    """The share that owns each chunk of each output; -1 for chunks that nobody writes into, or that have been sent."""

    def __init__(
        self, survey: TaskSurvey, share_of: _Numbers, sizes: Sequence[int], sent: Sequence[Collection[int]]
    ) -> None:
        size = np.array(sizes, np.int64)
        counts = [-(-o.size // n) if n else 0 for o, n in zip(survey.plan.outputs, sizes, strict=True)]
        self._base = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        """The first chunk of each output, all counted one behind the other."""
        used = np.flatnonzero((share_of[survey.task] >= 0) & (size[survey.output] > 0))
        task, output, start, stop = (x[used] for x in (survey.task, survey.output, survey.start, survey.stop))
        first = start // size[output]
        touched = (stop - 1) // size[output] + 1 - first
        row = np.repeat(np.arange(len(used)), touched)  # an extent for each chunk that it touches
        chunk = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(touched) - touched, touched)
        each = size[output[row]]
        nbytes = np.minimum(stop[row], (chunk + 1) * each) - np.maximum(start[row], chunk * each)
        counted = self._base[output[row]] + chunk  # the chunk, counted through all outputs
        self._owner = _largest_writers(counted, share_of[task[row]], nbytes, int(self._base[-1]))
        for f, chunks in enumerate(sent):
            self._owner[self._base[f] + np.fromiter(chunks, np.int64, len(chunks))] = -1
        lowest, highest = np.full(len(share_of), len(share_of)), np.full(len(share_of), -1)
        np.minimum.at(lowest, task[row], self._owner[counted])
        np.maximum.at(highest, task[row], self._owner[counted])
        self.only: _Numbers = np.where(lowest == highest, highest, -1)
        """The owner of all chunks that each task writes into; -1 where they have several, or none."""

    def of(self, found: Range) -> set[int]:
        """The shares that own these chunks."""
        f, first, stop = found
        return set(self._owner[self._base[f] + first : self._base[f] + stop].tolist()) - {-1}

    def chunks(self, shares: int) -> list[list[list[int]]]:
        """The chunks of each share: [output, first chunk, last + 1]."""
        out: list[list[list[int]]] = [[] for _ in range(shares)]
        for f, (begin, end) in enumerate(pairwise(self._base.tolist())):
            first = 0
            for share, run in groupby(self._owner[begin:end].tolist()):
                stop = first + len(list(run))
                if share >= 0:
                    out[share].append([f, first, stop])
                first = stop
        return out


def _largest_writers(chunk: _Numbers, share: _Numbers, nbytes: _Numbers, count: int) -> _Numbers:
    """The share that writes most bytes of each of ``count`` chunks: the lowest of equals, -1 for a chunk without bytes.

    Row i of the three arrays: share ``share[i]`` writes ``nbytes[i]`` into chunk ``chunk[i]``.
    """
    owner = np.full(count, -1)
    if len(chunk):
        shares = int(share.max()) + 1
        pairs, index = np.unique(chunk * shares + share, return_inverse=True)
        written = np.bincount(index, nbytes)
        order = np.lexsort((-(pairs % shares), written, pairs // shares))  # of each chunk, the last pair stays
        owner[pairs[order] // shares] = pairs[order] % shares
    return owner
