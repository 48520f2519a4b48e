"""Orders of a run to a fleet that loses, repeats, delays and reorders them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest

from ckpttool.errors import CorruptError, OutputError, UsageError
from ckpttool.execute.fleets import dispatch as module
from ckpttool.execute.fleets import fleet_for
from ckpttool.execute.fleets.base import Answer, Fleet, FleetJob, Order, Worker
from ckpttool.execute.fleets.dispatch import TRIES, dispatch
from tests.helpers.fleet import WILD, FakeFleet, Trouble
from tests.helpers.sample import examples


@dataclass
class Squares:
    """A job whose orders are numbers. What was done is counted for all processes."""

    digest: str = "squares"
    bad: int = 1 << 40
    done: ClassVar[dict[int, int]] = {}

    def open(self) -> Worker:
        return self

    def do(self, order: Order) -> Answer:
        number = order["number"]
        if number == self.bad:
            raise CorruptError("not a square", where="file.bin")
        if number == -self.bad:
            raise KeyError(number)
        self.done[number] = self.done.get(number, 0) + 1
        return {"square": number**2}

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Squares.done.clear()


def orders(count: int) -> Iterator[Order]:
    return ({"number": i} for i in range(count))


def run(fleet: Fleet, count: int, job: FleetJob | None = None) -> dict[int, int]:
    fleet.start(job or Squares())
    found: dict[int, int] = {}
    for order, answer, node in dispatch(fleet, orders(count), threading.Event()):
        assert node.startswith("node-")
        assert order["number"] not in found
        found[order["number"]] = answer["square"]
    fleet.end(now=False)
    return found


def test_all_orders_are_done_once_where_nothing_goes_wrong() -> None:
    fleet = FakeFleet(3)
    assert run(fleet, 50) == {i: i**2 for i in range(50)}
    assert set(Squares.done.values()) == {1}
    assert fleet.opened == 3
    assert fleet.most == 6  # all slots are full
    assert fleet.step == 50


def test_no_orders() -> None:
    assert run(FakeFleet(2), 0) == {}
    assert run(FakeFleet(0), 0) == {}


@pytest.mark.parametrize("seed", range(examples(200)))
def test_each_order_is_answered_once_whatever_happens(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRIES", 100)
    trouble = Trouble(
        WILD.lost,
        WILD.torn,
        WILD.mute,
        WILD.repeated,
        WILD.delayed,
        WILD.ghosts,
        deaths={5: 0, 9: 1},
        births={12: 1, 15: 3},
    )
    assert run(FakeFleet(3, seed, trouble), 40) == {i: i**2 for i in range(40)}


def test_a_fleet_does_one_job_after_the_other() -> None:
    fleet = FakeFleet(2, 1, WILD)
    for job in (Squares(), Squares("again")):
        fleet.start(job)
        assert len(list(dispatch(fleet, orders(20), threading.Event()))) == 20
    fleet.end(now=False)


def test_an_order_is_made_when_it_can_be_sent() -> None:
    made = []

    def lazily() -> Iterator[Order]:
        for order in orders(20):
            made.append(order)
            yield order

    fleet = FakeFleet(2)
    fleet.start(Squares())
    found = dispatch(fleet, lazily(), threading.Event())
    next(found)
    assert len(made) == 4
    next(found)
    assert len(made) == 5  # the slot is filled before the next answer is awaited


def test_a_lost_order_goes_first() -> None:
    fleet = FakeFleet(2, trouble=Trouble(deaths={1: 0}))
    run(fleet, 10)
    first, again = [o["number"] for o in fleet.sent[:4]], [o["number"] for o in fleet.sent[4:7]]
    assert len(set(again) & set(first)) == 2


def test_what_is_lost_again_and_again_ends_the_run() -> None:
    fleet = FakeFleet(3, trouble=Trouble(lost=1))
    with pytest.raises(OutputError, match=f"lost {TRIES} times") as caught:
        run(fleet, 1)
    assert len(caught.value.where) == TRIES
    assert caught.value.where[0].startswith("on node-")
    assert len(fleet.sent) == TRIES


def test_an_error_names_its_node() -> None:
    with pytest.raises(CorruptError, match="not a square") as caught:
        run(FakeFleet(2), 20, Squares(bad=7))
    assert caught.value.where[0] == "file.bin"
    assert caught.value.where[1] in {"on node-0", "on node-1"}


def test_so_does_a_defect() -> None:
    with pytest.raises(RuntimeError, match=r"on node-[01]: 7"):
        run(FakeFleet(2), 20, Squares(bad=-7))


def test_an_error_of_what_was_given_up_is_of_no_interest() -> None:
    class Stumbling(FakeFleet):
        """The first order is given up, and then fails."""

        turns = 0

        def _turn(self, node: object, ticket: int, order: Order) -> None:
            self.turns += 1
            self._trouble = Trouble(ghosts=self.turns == 1)
            super()._turn(node, ticket, order if self.turns > 1 else {"number": -1})  # type: ignore[arg-type]

    assert run(Stumbling(1), 20) == {i: i**2 for i in range(20)}


def test_a_run_that_is_to_end_sends_no_more() -> None:
    fleet, stop = FakeFleet(2), threading.Event()
    fleet.start(Squares())
    found = dispatch(fleet, orders(100), stop)
    next(found)
    stop.set()
    assert list(found) == []
    assert len(fleet.sent) <= 5


def test_it_waits_for_nodes() -> None:
    fleet = FakeFleet(2, trouble=Trouble(deaths={2: 0, 3: 1}, births={50: 2}))
    assert len(run(fleet, 10)) == 10
    assert fleet.step > 50


def test_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0)
    with pytest.raises(OutputError, match="no working node is left"):
        run(FakeFleet(2, trouble=Trouble(deaths={2: 0, 3: 1})), 10)


def test_an_engine_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match="--on dusk=here: unknown engine") as caught:
        fleet_for("dusk=here")
    assert caught.value.hint == "engines: ray"


def test_an_address_that_is_empty() -> None:
    """As a variable of the shell that is not set leaves it: no other cluster is meant."""
    with pytest.raises(UsageError, match="--on ray=: the address is empty"):
        fleet_for("ray=")


def test_an_engine_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "ckpttool.execute.fleets.ray", raising=False)
    with pytest.raises(UsageError, match="--on ray needs a package that is not installed: ray") as caught:
        fleet_for("ray=host:6379")
    assert caught.value.hint == "pip install 'ckpttool[ray]'"
