"""What is done of each of many items by the nodes of a fleet: what one machine does, in its order."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core.files import DataFile
from ckpttool.errors import CorruptError, OutputError
from ckpttool.execute.files import Stopped
from ckpttool.execute.fleets.base import Order
from ckpttool.execute.machines import calls
from ckpttool.execute.machines.each import each, machines
from ckpttool.execute.reader import Reads
from tests.helpers.fleet import CALM, WILD, FakeFleet, Trouble


@dataclass(frozen=True)
class Doubling:
    """Work that needs no file."""

    wrong: int = -1
    files: tuple[DataFile, ...] = ()

    def reads(self, item: tuple[int, int]) -> Reads:
        assert item[1] >= 0
        return Reads(())

    def do(self, item: tuple[int, int]) -> int:
        if item[0] == self.wrong:
            raise CorruptError("this item is wrong", where="a file")
        return 2 * item[0]


def items_of(sizes: Iterable[int]) -> list[tuple[int, int]]:
    return list(enumerate(sizes))


def runs(sent: list[Order]) -> dict[int, list[tuple[int, int]]]:
    return {o["run"]: o["items"] for o in sent}


@given(st.lists(st.integers(0, 300), max_size=60), st.integers(1, 4), st.integers(0, 99), st.sampled_from((CALM, WILD)))
@pytest.mark.usefixtures("_small")
def test_any_sizes(sizes: list[int], nodes: int, seed: int, trouble: Trouble) -> None:
    fleet, heard, items = FakeFleet(nodes, seed, trouble), list[int](), items_of(sizes)
    found = list(calls.map_over(fleet, Doubling(), items, sizes, advance=heard.append))
    assert found == list(each(Doubling(), items, lambda i: i[1])) == [2 * i for i, _ in items]
    assert sum(heard) == sum(sizes)
    sent = runs(fleet.sent)
    assert [i for run in sorted(sent) for i in sent[run]] == items  # each in one order, whatever was sent again
    most = max(40, min(200, sum(sizes) // (8 * nodes)))
    assert all(len(held) == 1 or sum(size for _, size in held) <= most for held in sent.values())


@pytest.fixture(scope="module")
def _small() -> Iterable[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "SMALLEST", 40)
        patch.setattr(calls, "LARGEST", 200)
        yield


@pytest.mark.usefixtures("_small")
def test_answers_of_an_earlier_job_are_not_heard() -> None:
    """They come late, and have the numbers of the first orders of the next one."""
    fleet, sizes = FakeFleet(2, 0, Trouble(repeated=1)), [50] * 4
    list(calls.map_over(fleet, Doubling(), items_of(sizes), sizes))
    others = [(i + 100, size) for i, size in items_of(sizes)]
    assert list(calls.map_over(fleet, Doubling(), others, sizes)) == [2 * i for i, _ in others]


@pytest.mark.usefixtures("_small")
def test_an_error_names_its_node() -> None:
    items = items_of([50] * 20)
    with pytest.raises(CorruptError, match="this item is wrong") as e:
        list(calls.map_over(FakeFleet(3), Doubling(7), items, [50] * 20))
    assert e.value.where[0] == "a file"
    assert e.value.where[-1].startswith("on node-")


@pytest.mark.usefixtures("_small")
def test_work_that_is_always_lost() -> None:
    with pytest.raises(OutputError, match="lost"):
        list(calls.map_over(FakeFleet(2, 0, Trouble(lost=1)), Doubling(), items_of([50] * 5), [50] * 5))


@pytest.mark.usefixtures("_small")
def test_nodes_that_come_and_go() -> None:
    trouble = Trouble(deaths={4: 0, 9: 1}, births={6: 2, 12: 0})
    found = calls.map_over(FakeFleet(2, 0, trouble), Doubling(), items_of([50] * 40), [50] * 40)
    assert list(found) == [2 * i for i in range(40)]


@pytest.mark.usefixtures("_small")
def test_stopped() -> None:
    stop = threading.Event()
    found = calls.map_over(FakeFleet(2), Doubling(), items_of([50] * 40), [50] * 40, stop=stop)
    assert next(found) == 0
    stop.set()
    with pytest.raises(Stopped):
        list(found)


def test_a_fleet_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = FakeFleet()
    monkeypatch.setattr("ckpttool.execute.fleets.fleet_for", lambda _text: fleet)
    with machines("") as none:
        assert none is None
    with machines("ray"):
        pass
    with pytest.raises(KeyboardInterrupt), machines("ray"):
        raise KeyboardInterrupt
    assert fleet.ended == [False, True]
