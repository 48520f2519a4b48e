"""The nodes of a cluster for all tests of a session, whose workers stay where a run has ended well."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckpttool.execute.fleets.base import Fleet, FleetJob, Order, Reply


class LastingFleet:
    """A fleet that outlives a run, and does something to its nodes on the way."""

    def __init__(self, make: Callable[[], Fleet]) -> None:
        self._make = make
        self._fleet: Fleet | None = None
        self.begin()

    def begin(self) -> None:
        """What a test sees is its own."""
        self.at: dict[int, Callable[[], None]] = {}
        """What is done when so many orders have been answered."""
        self.heard: list[Reply] = []
        self.sent: list[Order] = []
        self.on_reply: Callable[[Reply], None] = lambda _reply: None

    @property
    def answered(self) -> list[Reply]:
        return [r for r in self.heard if r.answer is not None]

    @property
    def lost(self) -> list[Reply]:
        return [r for r in self.heard if r.lost]

    def _inner(self) -> Fleet:
        self._fleet = self._fleet or self._make()
        return self._fleet

    def start(self, job: FleetJob) -> None:
        self._inner().start(job)

    def nodes(self) -> int:
        return self._inner().nodes()

    def slots(self) -> int:
        return self._inner().slots()

    def send(self, ticket: int, order: Order) -> None:
        self.sent.append(order)
        self._inner().send(ticket, order)

    def replies(self, timeout: float) -> Sequence[Reply]:
        found = self._inner().replies(timeout)
        for reply in found:
            self.heard.append(reply)
            self.on_reply(reply)
            if reply.answer is not None and (do := self.at.pop(len(self.answered), None)):
                do()
        return found

    def end(self, *, now: bool) -> None:
        if now:
            self.dismiss()

    def dismiss(self) -> None:
        if self._fleet is not None:
            self._fleet.end(now=True)
            self._fleet = None
