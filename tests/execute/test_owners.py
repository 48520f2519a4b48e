"""Which share sends which chunk: every chunk once, by one that has made all of it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core.plan import Block, Fill, Output, Plan, Unit, WrittenTensor
from ckpttool.execute import moves, schedule
from ckpttool.execute.destinations.chunks import Chunks
from ckpttool.execute.destinations.owners import ShareClaim, claims
from ckpttool.execute.extents import part_extents
from ckpttool.execute.hashing import ALGORITHM
from ckpttool.execute.journal import Finished
from ckpttool.execute.schedule import Task
from ckpttool.execute.shares import TaskSurvey
from tests.execute.test_bytes import recipes


def check(
    plan: Plan, tasks: Sequence[Task], sizes: Sequence[int], found: Sequence[ShareClaim], sent: Sequence[set[int]]
) -> None:
    """Every chunk that is written and not sent is claimed once, by a share that does all that writes into it."""
    written = [set[int]() for _ in plan.outputs]
    doing = [{p.number for t in c.tasks for p in tasks[t].parts} - set(c.spared) for c in found]
    owner = {(f, n): i for i, c in enumerate(found) for f, a, b in c.chunks for n in range(a, b)}
    assert sum(b - a for c in found for _, a, b in c.chunks) == len(owner)
    for task in tasks:
        unit = plan.units[task.computing] if task.computing >= 0 else None
        for part in task.parts:
            for f, a, b in part_extents(plan, part, unit):
                for chunk in range(a // sizes[f], (b - 1) // sizes[f] + 1) if sizes[f] and a < b else ():
                    written[f].add(chunk)
                    if chunk not in sent[f]:
                        assert part.number in doing[owner[f, chunk]]
    assert owner.keys() == {(f, c) for f, some in enumerate(written) for c in some - sent[f]}
    for c, d in zip(found, doing, strict=True):
        assert c.tasks == sorted(set(c.tasks))
        for t in c.tasks:  # a hash takes all bytes of its tensor
            if tasks[t].targets:
                assert d.issuperset(p.number for p in tasks[t].parts)


@given(recipes(), st.data())
def test_any_plan_cut_anyhow(recipe: Callable[[Path], Plan], data: st.DataObject) -> None:
    choose = st.sampled_from
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        for module, name in ((schedule, "_MIB"), (schedule, "_LARGEST_PART"), (moves, "TURNED_PART")):
            patch.setattr(module, name, data.draw(choose((64, 1000))))
        plan = recipe(Path(directory))
        tasks = schedule.schedule(plan, data.draw(choose(([], [ALGORITHM]))))
        sizes = [data.draw(choose((0, 16, 100, 3000))) for _ in plan.outputs]
        shares: list[list[int]] = [[] for _ in range(data.draw(st.integers(1, 5)))]
        for number in range(len(tasks)):
            shares[data.draw(st.integers(0, len(shares) - 1))].append(number)
        none = [set[int]() for _ in plan.outputs]
        check(plan, tasks, sizes, claims(TaskSurvey(plan, tasks), shares, sizes), none)
        sent = [
            set(range(n)) if data.draw(st.booleans()) else set(range(0, n, 3))
            for n in Chunks(plan, tasks, sizes).counts
        ]
        keys = [k for t in tasks for k, _ in t.targets]
        finished = Chunks(plan, tasks, sizes).finished(sent, keys)
        rest = claims(TaskSurvey(plan, tasks), shares, sizes, sent, Finished(finished, dict.fromkeys(keys, "")))
        check(plan, tasks, sizes, rest, sent)
        assert not finished.intersection(
            p.number for c in rest for t in c.tasks for p in tasks[t].parts if p.number not in c.spared
        )


def fills(*places: tuple[int, int, int], sizes: Sequence[int]) -> Plan:
    """Units of one Fill each: (output, first byte, bytes)."""
    units = [
        Unit(f"t{i}", (Fill(Block(f, a, (1,)), (n,), "U8"),), (WrittenTensor(f"t{i}", f, a, n),))
        for i, (f, a, n) in enumerate(places)
    ]
    return Plan([], [Output(f"o{i}", n) for i, n in enumerate(sizes)], units)


def test_who_writes_most_of_a_chunk_sends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "_BATCH_UNITS", 1)
    plan = fills((0, 0, 90), (0, 90, 60), (0, 150, 50), (1, 0, 10), sizes=(200, 10))
    tasks = schedule.schedule(plan, [])
    one, two = claims(TaskSurvey(plan, tasks), [[0, 1], [2, 3]], [50, 0])
    # Chunk 2 is of the second task alone, and chunk 3 of the third: nothing is done twice. The last task writes into
    # what nobody sends.
    assert (one.tasks, one.chunks) == ([0, 1], [[0, 0, 3]])
    assert (two.tasks, two.chunks) == ([2], [[0, 3, 4]])
    one, two = claims(TaskSurvey(plan, tasks), [[0], [1, 2, 3]], [50, 50])
    assert (one.tasks, one.chunks) == ([0, 1], [[0, 0, 2]])  # the second task writes 10 bytes of its chunk 1
    assert (two.tasks, two.chunks) == ([1, 2, 3], [[0, 2, 4], [1, 0, 1]])


def test_a_share_does_nothing_that_others_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "_BATCH_UNITS", 1)
    plan = fills((0, 0, 90), (0, 90, 10), sizes=(100,))
    one, two = claims(TaskSurvey(plan, schedule.schedule(plan, [])), [[0], [1]], [100])
    assert (one.tasks, one.chunks) == ([0, 1], [[0, 0, 1]])
    assert (two.tasks, two.chunks) == ([], [])


def test_hashes_that_an_earlier_run_has_not_left() -> None:
    plan = fills((0, 0, 100), sizes=(100,))
    tasks = schedule.schedule(plan, [ALGORITHM])
    (claim,) = claims(TaskSurvey(plan, tasks), [[0]], [50], sent=[{0, 1}], finished=Finished())
    assert (claim.tasks, claim.spared, claim.chunks) == ([0], [], [])
    (claim,) = claims(TaskSurvey(plan, tasks), [[0]], [50], sent=[{0, 1}], finished=Finished({0}, {"0.0": "x"}))
    assert (claim.tasks, claim.spared, claim.chunks) == ([], [], [])


def test_parts_of_a_batch_are_spared() -> None:
    """Small units are done together, but only as many as a chunk asks for."""
    plan = fills((0, 0, 100), (0, 100, 50), (0, 150, 50), sizes=(200,))
    tasks = schedule.schedule(plan, [])
    assert len(tasks) == 1
    (claim,) = claims(TaskSurvey(plan, tasks), [[0]], [50], sent=[{0, 1, 2}], finished=Finished({0, 1}))
    assert (claim.tasks, claim.spared, claim.chunks) == ([0], [0, 1], [[0, 3, 4]])
