"""The interface of a fleet: other machines that work for a run (``--on``).

A *job* is a run, as other machines see it; a *worker* is the job opened in one process of a node. The fleet takes the
job there once, and then carries orders and answers, each a few kB. Orders are idempotent: where an answer
does not come, the order is done again elsewhere (see ``dispatch``). Another engine is a module with
``fleet(address) -> Connected`` and a word in ``ENGINES``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Order = dict[str, Any]
"""Data that can be pickled."""
Answer = dict[str, Any]
"""Data that can be pickled. What an answer says is done is durable."""


class Worker(Protocol):
    """A job that a process has opened. It is given one order at a time."""

    def do(self, order: Order) -> Answer:
        """Carry out an order."""

    def close(self) -> None: ...


class FleetJob(Protocol):
    """A run, for other machines. It can be pickled."""

    @property
    def digest(self) -> str:
        """Jobs of equal digests are the same."""

    def open(self) -> Worker:
        """Called once in each process that works. Raises what makes this machine unfit for the job."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Outcome of an order: exactly one of the last three fields is set."""

    ticket: int | None
    """Ticket of the order; None for a node that can do no orders."""
    node: str
    """The machine, as people know it."""
    answer: Answer | None = None
    error: Exception | None = None
    """The worker's exception. A CkptError arrives unchanged."""
    lost: str = ""
    """Why there will be no answer: the process or the node is gone. Half of the order may be done."""


class Fleet(Protocol):
    """Machines that work for a run. All methods are called from one thread, and raise CkptErrors."""

    def start(self, job: FleetJob) -> None:
        """Take a job to the machines there are; more may come later. Called again when all orders of a job are
        answered and there is another one. Raises UsageError when there is no fleet, OutputError when no machine works.
        """

    def nodes(self) -> int:
        """Machines that can work now."""

    def slots(self) -> int:
        """Orders that may be under way now. A node may have its next one before it has finished."""

    def send(self, ticket: int, order: Order) -> None:
        """Have an order done somewhere. Tickets are not used twice."""

    def replies(self, timeout: float) -> Sequence[Reply]:
        """The replies that have arrived, or an empty list after ``timeout`` seconds."""

    def end(self, *, now: bool) -> None:
        """Let go of the machines; with ``now``, of those that still work, too. May be called twice."""
