"""Cutting the tasks of a plan into shares, each of which one machine does. Pure.

A share can be done by anyone, again and by two at a time: it writes the same bytes to the same places. Two shares never
write into the same page of a file: two machines that do have a copy of it each, and whoever writes his last puts back
what the other one wrote. What lies on such a page is held back by whoever does the share, and written by one machine
for all of them.

Shares are cut by tensor and not by file: a task has what all ranks get of its tensors, so each byte of a source is read
by one machine.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from ckpttool.core.dtypes import lookup
from ckpttool.core.plan import STEP, AssertEqual, AssertPadding, Compute, Copy, Fill, Plan, Quantize, Step, joined
from ckpttool.execute.extents import part_extents, step_extents
from ckpttool.execute.reads import stored_tensors
from ckpttool.execute.schedule import Task

PAGE = 64 << 10
"""Bytes of a page, of any machine that this runs on; pages of an output begin at its multiples."""

_PART = 4 << 10
"""Bytes that could be moved while a part is looked after: a million tiny tensors are work, too."""

_Numbers = np.ndarray[Any, np.dtype[np.int64]]


def cut(plan: Plan, tasks: Sequence[Task], count: int) -> list[list[int]]:
    """``count`` shares of about equal work: numbers of tasks, each in one of them, rising.

    A share is a run of tasks in the order of what they write, which keeps together what writes into the same stretches.
    Some are empty where tasks are few, or one of them is most of the work.
    """
    return TaskSurvey(plan, tasks).cut(count)


def shared_pages(plan: Plan, tasks: Sequence[Task], shares: Sequence[Sequence[int]]) -> list[dict[int, list[int]]]:
    """For each share the pages of each output that it must not write to: other shares write there, too, or there are
    literal bytes. Pages have ``PAGE`` bytes and count from the beginning of the output.

    Tasks that are in no share have been done before, and count for nothing.
    """
    return TaskSurvey(plan, tasks).shared_pages(shares)


class TaskSurvey:
    """Weights and output extents of the tasks of a plan."""

    def __init__(self, plan: Plan, tasks: Sequence[Task]) -> None:
        self.plan = plan
        self.tasks = tasks
        self._count = len(tasks)
        self._units = [t.slice_of if t.slice_of >= 0 else -1 - i for i, t in enumerate(tasks)]
        """What belongs to one unit has the same number."""
        self.weights: list[int] = [_weight(plan, t) for t in tasks]
        """Bytes of each task that are written, or read to be compared or to be worked with."""
        units, places, numbers = plan.packed(), array("q"), array("q")
        owners, lengths, steps = array("q"), array("q"), array("q")
        for t, task in enumerate(tasks):
            if task.computing >= 0:
                for step in plan.units[task.computing].steps:
                    places.extend([n for e in step_extents(step) for n in e])
                numbers.extend([t] * (len(places) // 3 - len(numbers)))
                continue
            for part in task.parts:
                if part.unit >= 0:
                    found = units.packed_steps(part.unit)
                    steps.extend(found)
                    owners.append(t)
                    lengths.append(len(found) // STEP)
                else:
                    places.extend([n for e in part_extents(plan, part, None) for n in e])
                    numbers.extend([t] * (len(places) // 3 - len(numbers)))
        packed = _numbers(steps).reshape(-1, STEP)
        reach, checked = _by_form(units.forms)
        task_of, form = np.repeat(_numbers(owners), _numbers(lengths)), packed[:, 0]
        for t, nbytes in enumerate(np.bincount(task_of, checked[form], self._count).astype(np.int64).tolist()):
            self.weights[t] += nbytes
        direct = _numbers(places).reshape(-1, 3)
        output = np.concatenate((packed[:, 3], direct[:, 0]))
        start = np.concatenate((packed[:, 4], direct[:, 1]))
        stop = np.concatenate((packed[:, 4] + reach[form], direct[:, 2]))
        owner = np.concatenate((task_of, _numbers(numbers)))
        self._base = np.concatenate(([0], np.cumsum([o.size for o in plan.outputs], dtype=np.int64)))
        order = np.flatnonzero(start < stop)  # steps that compare have a source where others have an output
        order = order[np.argsort(self._base[output[order]] + start[order], kind="stable")]
        self.task: _Numbers = owner[order]
        """The task of each non-empty extent, in the order of outputs and offsets."""
        self.output: _Numbers = output[order]
        self.start: _Numbers = start[order]
        self.stop: _Numbers = stop[order]

    def cut(self, count: int) -> list[list[int]]:
        """Split the tasks into ``count`` shares of similar weight; see the function ``cut``."""
        shares: list[list[int]] = [[] for _ in range(count)]
        groups = self._groups()
        total, before = max(sum(self.weights), 1), 0
        for group in groups:
            weight = sum([self.weights[t] for t in group])
            # Where the middle of the group lies: so no share has more than its part and the largest group.
            shares[min((2 * before + weight) * count // (2 * total), count - 1)] += group
            before += weight
        for share in shares:
            share.sort()
        return shares

    def _groups(self) -> list[list[int]]:
        """Tasks that write into the same stretch together, in the order of what they write.

        Slices of a unit follow each other, although one may be what the first ranks get, another what the last ones
        get: otherwise each share would write into all outputs, here and there. What writes nothing but compares comes
        behind the task before it, which has most likely the same source.
        """
        begin, end = self._base[self.output] + self.start, self._base[self.output] + self.stop
        apart = np.ones(len(begin), bool)
        apart[1:] = begin[1:] >= np.maximum.accumulate(end)[:-1]
        first = self.task[apart][np.cumsum(apart) - 1] if len(begin) else self.task
        both = first != self.task
        links = set(zip(first[both].tolist(), self.task[both].tolist(), strict=True))
        places: dict[int, int] = {}
        found, index = np.unique(self.task, return_index=True)
        for t, place in zip(found.tolist(), begin[index].tolist(), strict=True):
            unit = self._units[t]
            places[unit] = min(place, places.get(unit, place))
        keys, last = [], 0
        for unit in self._units:
            last = places.get(unit, last)
            keys.append(last)
        groups = joined(range(self._count), links)
        groups.sort(key=lambda group: min([keys[t] for t in group]))
        return groups

    def shared_pages(self, shares: Sequence[Sequence[int]]) -> list[dict[int, list[int]]]:
        """The pages that each share must not write; see the function ``shared_pages``."""
        nobody, literals = len(shares) + 1, len(shares)
        share_of = np.full(self._count, nobody, np.int64)
        for s, share in enumerate(shares):
            share_of[list(share)] = s
        owner, kept = share_of[self.task], share_of[self.task] != nobody
        fixed = array("q")
        for i, made in enumerate(self.plan.outputs):
            for at, data in made.literals:
                if data:
                    fixed.extend((i, at, at + len(data)))
        literal = _numbers(fixed).reshape(-1, 3)
        output = np.concatenate((self.output[kept], literal[:, 0]))
        start = np.concatenate((self.start[kept], literal[:, 1]))
        stop = np.concatenate((self.stop[kept], literal[:, 2]))
        owner = np.concatenate((owner[kept], np.full(len(literal), literals)))
        # Pages of all outputs one behind the other.
        sizes = [o.size // PAGE + 1 for o in self.plan.outputs]
        base = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
        pages: list[set[int]] = [set() for _ in range(len(shares) + 1)]
        for a, b, low, high in _met(
            *_joined_pages(owner, base[output] + start // PAGE, base[output] + (stop - 1) // PAGE)
        ):
            pages[a].update(range(low, high))
            pages[b].update(range(low, high))
        return [_by_output(p, base) for p in pages[:-1]]


def _joined_pages(owner: _Numbers, first: _Numbers, last: _Numbers) -> tuple[list[int], list[int], list[int]]:
    """Stretches of pages (owner, first, end), those of an owner apart from each other; sorted by the first."""
    order = np.lexsort((first, owner))
    owner, first, end = owner[order], first[order], last[order] + 1
    if len(owner):
        # Owners one behind the other, so that what an owner reaches is less than what the next one begins with.
        span = int(end.max()) + 1
        apart = np.ones(len(owner), bool)
        apart[1:] = (owner * span + first)[1:] > np.maximum.accumulate(owner * span + end)[:-1]
        at = np.flatnonzero(apart)
        owner, first, end = owner[at], first[at], np.maximum.reduceat(end, at)
    order = np.argsort(first, kind="stable")
    return owner[order].tolist(), first[order].tolist(), end[order].tolist()


def _met(owners: Iterable[int], firsts: Iterable[int], ends: Iterable[int]) -> Iterator[tuple[int, int, int, int]]:
    """(owner, another one, first page, end) of what two owners have in common."""
    active: list[tuple[int, int]] = []
    for owner, first, end in zip(owners, firsts, ends, strict=True):
        active = [a for a in active if a[1] > first]
        for other, until in active:
            yield owner, other, first, min(until, end)
        active.append((owner, end))


def _by_output(pages: Iterable[int], base: _Numbers) -> dict[int, list[int]]:
    found = np.array(sorted(pages), np.int64)
    outputs = np.searchsorted(base, found, "right") - 1
    out: dict[int, list[int]] = {}
    for output, page in zip(outputs.tolist(), (found - base[outputs]).tolist(), strict=True):
        out.setdefault(output, []).append(page)
    return out


def _weight(plan: Plan, task: Task) -> int:
    """Without what the units of a batch compare."""
    weight = sum([p.nbytes + _PART for p in task.parts])
    weight += sum([_checked(c.step) for p in task.parts for c in p.checks])
    if task.computing >= 0:
        for step in plan.units[task.computing].steps:
            if isinstance(step, Compute | Quantize):
                copies = [c for o in step.operands for s in stored_tensors(o) for c in s.copies]
                weight += sum([prod(c.shape) * lookup(c.src_dtype).bits // 8 for c in copies])
    return weight


def _checked(step: Step) -> int:
    return prod(step.shape) * lookup(step.dtype).bits // 8 if isinstance(step, AssertEqual | AssertPadding) else 0


def _by_form(forms: Sequence[Step]) -> tuple[_Numbers, _Numbers]:
    """How far a step of each form reaches from its first byte, and how many bytes it compares."""
    reach = [max([b for _, _, b in step_extents(s)], default=0) if isinstance(s, Copy | Fill) else 0 for s in forms]
    return np.array(reach, np.int64), np.array([_checked(s) for s in forms], np.int64)


def _numbers(found: array[int]) -> _Numbers:
    return np.frombuffer(found, np.int64) if found else np.empty(0, np.int64)
