"""One function applied to many items by the machines of a fleet, as ``in_turn`` does with threads."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ckpttool.core.files import source_files
from ckpttool.execute.files import Stopped
from ckpttool.execute.fleets.base import Answer, Fleet, Order
from ckpttool.execute.fleets.dispatch import dispatch
from ckpttool.execute.machines.work import Work
from ckpttool.execute.options import Advance, unwatched
from ckpttool.execute.reader import in_turn, reading
from ckpttool.execute.remote import check_here
from ckpttool.storage.access import settings, use_settings
from ckpttool.storage.system import cores

LARGEST = 512 << 20
"""Most bytes of an order, where its first item is not larger: a second or so, with something to do for all threads."""
SMALLEST = 16 << 20
"""An order of fewer bytes takes longer to send than to do."""
AHEAD = 256 << 20
_MOST = 4096
"""Items of an order, which may have no bytes at all."""
_THREADS = 8
"""More of them only pass Python's lock to and fro."""
_EACH = 8
"""Orders for each node, where there is that much: the last one keeps the others waiting."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Memory, connections and threads of each process."""

    ahead: int = AHEAD
    """Bytes for what it reads ahead from other machines: enough to fill a link of 10 Gbit/s."""
    connections: int | None = None
    workers: int | None = None
    """Threads; None is as many as suit the machine."""


def map_over(
    fleet: Fleet,
    work: Work[_Item, _Result],
    items: Sequence[_Item],
    sizes: Sequence[int],
    limits: CallLimits | None = None,
    *,
    stop: threading.Event | None = None,
    advance: Advance = unwatched,
) -> Iterator[_Result]:
    """The results of ``work`` for each item, in order. Starts a job of its own on the fleet.

    ``sizes`` are the bytes that each item stands for; ``advance`` hears of those that are done. Raises what the work
    raises and what ``dispatch`` raises, and Stopped once ``stop`` is set.
    """
    if not items:
        return
    stop = stop or threading.Event()
    fleet.start(CallJob(secrets.token_hex(8), work, limits or CallLimits(), settings()))
    runs = list(_runs(sizes, max(SMALLEST, min(LARGEST, sum(sizes) // (_EACH * max(1, fleet.nodes()))))))
    orders = ({"run": i, "items": list(items[a:b])} for i, (a, b) in enumerate(runs))
    early: dict[int, list[_Result]] = {}
    due = 0
    for order, answer, _ in dispatch(fleet, orders, stop):
        first, last = runs[order["run"]]
        early[order["run"]] = answer["results"]
        advance(sum(sizes[first:last]))
        while due in early:
            yield from early.pop(due)
            due += 1
    if due < len(runs):
        raise Stopped


def _runs(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Items that go together: [first, last)."""
    first = held = 0
    for i, size in enumerate(sizes):
        if i > first and (held + size > most or i - first >= _MOST):
            yield first, i
            first, held = i, 0
        held += size
    yield first, len(sizes)


@dataclass(frozen=True, slots=True)
class CallJob(Generic[_Item, _Result]):
    """Work for other machines."""

    digest: str
    work: Work[_Item, _Result]
    limits: CallLimits
    access: Mapping[str, str] = field(default_factory=dict)

    def open(self) -> CallWorker[_Item, _Result]:
        """Raises AccessError for a file that is not here, or another one."""
        use_settings(self.access)
        check_here(source_files(self.work.files))
        return CallWorker(self)


@dataclass(slots=True)
class CallWorker(Generic[_Item, _Result]):
    """The work, in a process of a machine. Files stay open from one order to the next."""

    job: CallJob[_Item, _Result]
    _open: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        limits = self.job.limits
        self._open.enter_context(reading(memory=limits.ahead, connections=limits.connections))

    def do(self, order: Order) -> Answer:
        """See ``Worker``."""
        work = self.job.work
        workers = self.job.limits.workers or max(2, min(_THREADS, cores()))
        return {"results": list(in_turn(workers, work.do, order["items"], work.reads))}

    def close(self) -> None:
        self._open.close()
