"""The interface of a destination: everything that the engine asks of DST, which is absent or complete.

Outputs are always made on this machine, below ``partial``: files of their full size, written in any order by threads
and processes. For a DST on this machine that is DST.partial/, which becomes DST. For any other it is a spool, from
which finished bytes are sent, and then forgotten.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Protocol

from ckpttool.core.files import Place
from ckpttool.core.plan import Plan
from ckpttool.execute.files import Fence, Medium
from ckpttool.execute.journal import Finished
from ckpttool.execute.schedule import Part, Task

if TYPE_CHECKING:  # a run on one machine needs neither
    from ckpttool.execute.fleets.base import Answer, Order
    from ckpttool.execute.shares import TaskSurvey


@dataclass(frozen=True, slots=True)
class Beginning:
    """The run, as a destination gets it before there is anything to write."""

    plan: Plan
    tasks: Sequence[Task]
    """All of them, whose parts have the numbers that ``Finished`` has."""
    late: Collection[str]
    """Names of small files that come at the end, beside the outputs of the plan."""
    force: bool
    """Replace DST, and what an interrupted run left."""
    resume: bool
    verify: bool
    """This process was asked to verify DST. Of several, the one that completes it does."""
    stop: Event
    """Set when the run is to end: nobody may wait any longer."""


class Destination(Protocol):
    """DST, in the order in which the engine calls. All raise OutputError, and AccessError where DST is out of reach."""

    @property
    def given(self) -> Place: ...

    @property
    def partial(self) -> Path:
        """Outputs are made below it. Known from ``begin`` on."""

    @property
    def spools(self) -> bool:
        """Whether bytes leave ``partial`` when they are recorded. Little stays unrecorded then, nothing is linked."""

    @property
    def proposes(self) -> bool:
        """Whether there are pull requests (``RunOptions.create_pr``)."""

    @property
    def shared(self) -> bool:
        """Whether several machines can write here (``RunOptions.on``, ``RunOptions.member``). If not, nobody calls what
        is for work on other machines."""

    @property
    def resumes(self) -> bool:
        """Whether ``--resume`` of another run can go on with what ``record`` has remembered."""

    def check(self, sources: Sequence[str], roots: Sequence[str], *, force: bool, carried: Sequence[str] = ()) -> None:
        """Refuse a DST that must not or cannot be written, before anything is.

        It may not hold a source or a companion, nor lie in one of ``roots`` (by default where the sources are).
        """

    def check_space(self, plan: Plan) -> None:
        """Refuse a plan whose outputs have no room."""

    def begin(self, beginning: Beginning) -> Finished:
        """Lock DST for this run and say what of its parts an interrupted run has finished. What that left stays if
        this fails. Raises ConflictError for the remains of another plan.
        """

    @property
    def locks(self) -> Sequence[int]:
        """Descriptors that processes of this run keep open as long as they may write."""

    def make(self, path: str, size: int) -> bool:
        """Make an output of ``size`` zero bytes; returns whether what an earlier run finished of it still counts."""

    def record(self, pool: Medium, parts: Sequence[Part], sums: Mapping[str, str]) -> None:
        """Make finished parts durable, then remember them, with checksums of tensors that they completed. Their bytes
        may leave ``partial`` now.
        """

    # -- work on other machines

    @property
    def least_share(self) -> int:
        """Bytes below which more shares cost more than they bring."""

    def branch(self) -> Mapping[str, Any]:
        """The data that ``branch_for`` needs on another machine to write here: plain data, no credentials.

        Raises UsageError where only one machine can write.
        """

    def orders(self, survey: TaskSurvey, shares: Sequence[Sequence[int]], finished: Finished) -> list[Order]:
        """The work of each share, for ``Branch.begin``: ``tasks`` (numbers), ``done`` (parts of them that are not to
        be done), and what the branch must know besides."""

    def remember(self, parts: Sequence[Part], answer: Answer) -> None:
        """Another machine has made parts durable: what ``record`` does when that is done. ``answer`` has the checksums,
        as ``sums``, and what the branch had to say."""

    # -- the end

    def settle(self, pool: Medium, paths: Sequence[str]) -> None:
        """All outputs are written: make everything durable, and see that it is."""

    def complete(self) -> None:
        """The sources are what they were: put tensors where they go, without what makes them a checkpoint."""

    def readable(self) -> Place:
        """The part of DST that is there, to be read as the checkpoint that it will be (--verify)."""

    def check_absent(self, *, force: bool, appeared: bool = False) -> None:
        """Refuse to replace a DST that is there; ``appeared`` since the run began."""

    def seal(self) -> None:
        """Nothing can go wrong any more but the last step; there is no way back to an interrupted run."""

    def publish(self, *, force: bool) -> str | None:
        """The last step: DST is there, complete. Returns a note on what could not be cleaned up."""

    @property
    def can_record(self) -> bool:
        """Whether ``record`` still makes sense: since ``begin``, and until ``seal`` or ``close``."""

    def close(self) -> None:
        """Let go of the lock; what was written stays for ``--resume``."""

    def discard(self) -> None:
        """Leave nothing."""


class Branch(Protocol):
    """A destination, on another machine than the one that runs: shares are made there, and made durable."""

    @property
    def partial(self) -> Path:
        """Outputs are made below it, on this machine or where all see it."""

    @property
    def spools(self) -> bool: ...

    @property
    def locks(self) -> Sequence[int]: ...

    @property
    def fence(self) -> Fence | None:
        """The fence of files below ``partial``."""

    def begin(self, order: Order) -> None:
        """An order comes. Raises OutputError when this machine does not see the run's DST, or the run has ended."""

    def record(self, pool: Medium, parts: Sequence[Part], sums: Mapping[str, str]) -> None:
        """Make finished parts durable."""

    def finish(self, pool: Medium) -> Answer:
        """All parts of the order were recorded. Returns what ``Destination.remember`` wants to hear besides."""

    def close(self) -> None: ...
