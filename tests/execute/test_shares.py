"""Shares of a plan: every task in one of them, of equal work, and no page of a file that two of them write."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.core.plan import AssertEqual, Block, Copy, Fill, Output, Plan, Unit, WrittenTensor
from ckpttool.execute import moves, schedule, shares
from ckpttool.execute.extents import Extent, part_extents
from ckpttool.execute.hashing import ALGORITHM
from ckpttool.execute.schedule import Task
from ckpttool.execute.shares import TaskSurvey, cut, shared_pages
from tests.execute.merges import merge_plan
from tests.execute.test_bytes import recipes
from tests.helpers.sample import examples


def extents(plan: Plan, task: Task) -> list[Extent]:
    """Where a task writes."""
    unit = plan.units[task.computing] if task.computing >= 0 else None
    return [e for p in task.parts for e in part_extents(plan, p, unit) if e[1] < e[2]]


def pages(found: Sequence[Extent]) -> set[tuple[int, int]]:
    return {(f, page) for f, a, b in found for page in range(a // shares.PAGE, (b - 1) // shares.PAGE + 1)}


def check_shares(plan: Plan, tasks: Sequence[Task], found: Sequence[Sequence[int]]) -> None:
    """Every task is in one share; what is on a page of two, or of literal bytes, is held; nothing else is."""
    assert sorted(t for share in found for t in share) == list(range(len(tasks)))
    assert all(a < b for share in found for a, b in pairwise(share))
    held = shared_pages(plan, tasks, found)
    assert len(held) == len(found)
    owners = defaultdict(set)
    for s, share in enumerate(found):
        for page in pages([e for t in share for e in extents(plan, tasks[t])]):
            owners[page].add(s)
    for page in pages([(i, at, at + len(data)) for i, o in enumerate(plan.outputs) for at, data in o.literals]):
        owners[page].add(-1)
    for s, hold in enumerate(held):
        want = {page for page, some in owners.items() if s in some and len(some) > 1}
        assert {(output, page) for output, some in hold.items() for page in some} == want
        assert all(some == sorted(some) for some in hold.values())
    # What overlaps lies in one share: between pages that are held, no two write anywhere.
    places = sorted((f, a, b, s) for s, share in enumerate(found) for t in share for f, a, b in extents(plan, tasks[t]))
    last = (-1, 0, 0, 0)
    for f, a, b, s in places:
        assert f != last[0] or a >= last[2] or s == last[3]
        if f != last[0] or b > last[2]:
            last = f, a, b, s


def check_balance(plan: Plan, tasks: Sequence[Task], count: int) -> None:
    """No share has more than its part of the work, and the largest thing that stays together."""
    survey = TaskSurvey(plan, tasks)
    whole = survey.cut(len(tasks) * 1000)  # whatever can be apart is apart
    largest = max([sum([survey.weights[t] for t in share]) for share in whole], default=0)
    most = max([sum([survey.weights[t] for t in share]) for share in survey.cut(count)], default=0)
    assert most <= sum(survey.weights) / count + largest


@settings(max_examples=examples(60))
@given(recipes(), st.data())
def test_any_plan(recipe: Callable[[Path], Plan], data: st.DataObject) -> None:
    choose = st.sampled_from
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        plan = recipe(Path(directory, "src"))
        part = data.draw(choose((64, 1000, 1 << 20)))
        patch.setattr(schedule, "_MIB", part)
        patch.setattr(schedule, "_BATCH_UNITS", data.draw(choose((1, 2, 256))))
        patch.setattr(moves, "TURNED_PART", part)
        patch.setattr(shares, "PAGE", data.draw(choose((1, 16, 100, 4096))))
        plan.outputs.append(Output("head", 50, ((0, b"x" * 20), (48, b"y"))))
        tasks = schedule.schedule(plan, [ALGORITHM] * data.draw(st.integers(0, 1)))
        count = data.draw(st.integers(1, 9))
        check_shares(plan, tasks, cut(plan, tasks, count))
        check_balance(plan, tasks, count)


def test_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that is worked out is one task. Its weight is what it reads, too."""
    monkeypatch.setattr(shares, "PAGE", 64)
    plan, _ = merge_plan(tmp_path)
    tasks = schedule.schedule(plan, [])
    assert [t.computing for t in tasks] == [0, 1]
    for count in (1, 2, 3):
        check_shares(plan, tasks, cut(plan, tasks, count))
    assert cut(plan, tasks, 2) == [[0], [1]]
    assert TaskSurvey(plan, tasks).weights[0] >= 3 * tasks[0].nbytes


def copy(output: int, offset: int, nbytes: int) -> Copy:
    return Copy(Block(0, 0, (1,)), Block(output, offset, (1,)), (nbytes,), "U8", "U8")


def test_few_tasks() -> None:
    """Shares without tasks, and plans without work."""
    empty = Plan([], [], [])
    assert cut(empty, [], 3) == [[], [], []]
    assert shared_pages(empty, [], [[], [], []]) == [{}, {}, {}]
    plan = Plan([], [Output("a", 8)], [Unit("a", (copy(0, 0, 8),))])
    tasks = schedule.schedule(plan, [])
    assert sorted(cut(plan, tasks, 3)) == [[], [], [0]]
    nothing = Plan([], [Output("a", 0)], [Unit("a", (copy(0, 0, 0),)), Unit("b", (Fill(Block(0, 0, ()), (0,), "U8"),))])
    tasks = schedule.schedule(nothing, [])
    check_shares(nothing, tasks, cut(nothing, tasks, 2))


def test_files_that_are_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is copied whole is in one share, and nothing of it is held back."""
    monkeypatch.setattr(shares, "PAGE", 16)
    outputs = [Output(f"{i}.json", 100, carried="/x", link=i == 1) for i in range(3)]
    plan = Plan([], [*outputs, Output("w", 100)], [Unit("w", (copy(3, 0, 100),))])
    tasks = schedule.schedule(plan, [])
    for count in range(1, 6):
        found = cut(plan, tasks, count)
        check_shares(plan, tasks, found)
        assert not any(shared_pages(plan, tasks, found))
    assert cut(plan, tasks, 4) == [[0], [1], [2], [3]]


def test_literal_bytes_belong_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever prepares a file, or finishes it, writes them: what lies on their pages is held back."""
    monkeypatch.setattr(shares, "PAGE", 16)
    units = [Unit("a", (copy(0, 8, 100),)), Unit("b", (copy(0, 112, 48),))]
    plan = Plan([], [Output("a", 176, ((0, b"x" * 8), (130, b""), (160, b"y" * 16)), checksums={8: (160,)})], units)
    monkeypatch.setattr(schedule, "_BATCH_UNITS", 1)
    tasks = schedule.schedule(plan, [])
    assert shared_pages(plan, tasks, [[0], [1]]) == [{0: [0]}, {}]
    assert shared_pages(plan, tasks, [[0, 1]]) == [{0: [0]}]


def test_only_what_is_left_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks in no share were done by an interrupted run."""
    monkeypatch.setattr(shares, "PAGE", 16)
    monkeypatch.setattr(schedule, "_BATCH_UNITS", 1)
    plan = Plan([], [Output("a", 24)], [Unit(str(i), (copy(0, 8 * i, 8),)) for i in range(3)])
    tasks = schedule.schedule(plan, [])
    assert shared_pages(plan, tasks, [[0], [1], [2]]) == [{0: [0]}, {0: [0]}, {}]
    assert shared_pages(plan, tasks, [[1], [2]]) == [{}, {}]


def test_comparisons_count_and_stay_with_what_they_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas of a large tensor are compared in tasks of their own, which write nothing."""
    monkeypatch.setattr(schedule, "_MIB", 1000)
    monkeypatch.setattr(schedule, "_LARGEST_PART", 1000)
    monkeypatch.setattr(shares, "_PART", 0)
    blocks = Block(0, 0, (1,)), Block(1, 0, (1,))
    same = AssertEqual(*blocks, (10_000,), "U8", "x")
    units = [
        Unit(str(i), (copy(0, 10_000 * i, 10_000), same), (WrittenTensor("x", 0, 10_000 * i, 10_000),))
        for i in range(2)
    ]
    plan = Plan([], [Output("a", 20_000)], units)
    tasks = schedule.schedule(plan, [])
    found = cut(plan, tasks, 2)
    check_shares(plan, tasks, found)
    first = {t for t, task in enumerate(tasks) if task.parts[0].number < len(tasks) // 2}
    assert set(found[0]) == first
    assert sum(bool(tasks[t].parts[0].checks) for t in found[0]) == 10
    survey = TaskSurvey(plan, tasks)
    assert {survey.weights[t] for t in range(len(tasks))} == {1000}
    small = Plan([], [Output("a", 200)], [Unit("a", (copy(0, 0, 200), same._replace(shape=(100,))))])
    assert TaskSurvey(small, schedule.schedule(small, [])).weights == [300]


def test_what_interleaves_stays_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of one matrix, and what begins behind them in the same file."""
    monkeypatch.setattr(schedule, "_BATCH_UNITS", 1)
    monkeypatch.setattr(shares, "PAGE", 16)
    columns = [Copy(Block(0, 8 * i, (16, 1)), Block(0, 8 * i, (16, 1)), (10, 8), "U8", "U8") for i in range(2)]
    units = [Unit("a", (columns[0],)), Unit("b", (copy(0, 160, 160),)), Unit("c", (columns[1],))]
    plan = Plan([], [Output("a", 320)], units)
    tasks = schedule.schedule(plan, [])
    assert cut(plan, tasks, 2) == cut(plan, tasks, 3)[:1] + cut(plan, tasks, 3)[2:] == [[0, 2], [1]]
    check_shares(plan, tasks, [[0, 2], [1]])


def test_slices_of_a_unit_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which one may be written to the first file and the next one to the second."""
    monkeypatch.setattr(schedule, "_MIB", 100)
    monkeypatch.setattr(schedule, "_LARGEST_PART", 100)
    units = [Unit(str(i), (copy(0, 100 * i, 100), copy(1, 100 * i, 100))) for i in range(4)]
    plan = Plan([], [Output("a", 400), Output("b", 400)], units)
    tasks = schedule.schedule(plan, [])
    assert [t.slice_of for t in tasks] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert cut(plan, tasks, 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_many_meet_on_one_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "_BATCH_UNITS", 1)
    monkeypatch.setattr(shares, "PAGE", 100)
    ends = [0, 230, 240, 250, 260, 399, 400, 600]
    plan = Plan([], [Output("x", 0), Output("a", 600)], [Unit(str(a), (copy(1, a, b - a),)) for a, b in pairwise(ends)])
    tasks = schedule.schedule(plan, [])
    check_shares(plan, tasks, [[i] for i in range(7)])
    check_shares(plan, tasks, [[0, 2, 4], [1, 3, 5], [6]])
    check_shares(plan, tasks, [[6, *range(5)][1:], [5], [6]])


def test_the_last_page_of_a_file_and_the_first_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "_BATCH_UNITS", 1)
    monkeypatch.setattr(shares, "PAGE", 100)
    for size in (99, 100, 101):
        plan = Plan([], [Output(f"{i}", size) for i in range(3)], [Unit(str(i), (copy(i, 0, size),)) for i in range(3)])
        tasks = schedule.schedule(plan, [])
        check_shares(plan, tasks, [[0], [1], [2]])


def test_literal_bytes_in_the_gaps_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "PAGE", 100)
    rows = Copy(Block(0, 0, (100, 1)), Block(0, 0, (100, 1)), (10, 8), "U8", "U8")
    plan = Plan([], [Output("a", 1000, ((250, b"x"), (550, b"x")))], [Unit("a", (rows,))])
    tasks = schedule.schedule(plan, [])
    check_shares(plan, tasks, [[0]])
    assert shared_pages(plan, tasks, [[0]]) == [{0: [2, 5]}]


def test_replicas_of_many_sources() -> None:
    """There may be more sources than outputs."""
    same = [AssertEqual(Block(0, 0, (1,)), Block(i, 0, (1,)), (100,), "U8", "x") for i in range(8)]
    plan = Plan([], [Output("a", 200)], [Unit("a", (copy(0, 0, 200), *same))])
    tasks = schedule.schedule(plan, [])
    check_shares(plan, tasks, cut(plan, tasks, 2))
    assert TaskSurvey(plan, tasks).weights == [200 + 8 * 100 + shares._PART]
