"""One function applied to many items: by the threads of this machine, or by the machines of a fleet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from ckpttool.execute.machines.work import Work
from ckpttool.execute.reader import in_turn

if TYPE_CHECKING:
    from ckpttool.execute.fleets.base import Fleet

_WORKERS = 2
"""Threads here, where a user is at other work, too."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def each(
    work: Work[_Item, _Result],
    items: Sequence[_Item],
    size: Callable[[_Item], int],
    fleet: Fleet | None = None,
) -> Iterator[_Result]:
    """The results of ``work`` for each item, in order: computed here, or on a fleet.

    ``size`` says how many bytes an item stands for. Raises what the work raises and what ``dispatch`` raises.
    """
    if fleet is None:
        return in_turn(_WORKERS, work.do, items, work.reads)
    from ckpttool.execute.machines.calls import map_over

    return map_over(fleet, work, items, list(map(size, items)))


@contextmanager
def machines(on: str) -> Iterator[Fleet | None]:
    """The fleet that ``--on`` names, as long as it is needed; None for "". Raises what ``fleet_for`` raises."""
    if not on:
        yield None
        return
    from ckpttool.execute import fleets

    fleet = fleets.fleet_for(on)
    try:
        yield fleet
    except BaseException:
        fleet.end(now=True)
        raise
    fleet.end(now=False)
