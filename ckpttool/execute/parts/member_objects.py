"""One of several processes that write an object store together: its share, then what completes DST.

What they agree on, and how, is the destination's: see ``destinations.object_member``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from ckpttool.core.plan import Plan
from ckpttool.errors import CkptError
from ckpttool.execute.destinations.base import Destination
from ckpttool.execute.destinations.members import CommittedError
from ckpttool.execute.destinations.object_member import ObjectCommit, ObjectMember
from ckpttool.execute.engine import Run, TaskExecutor
from ckpttool.execute.files import Medium
from ckpttool.execute.journal import Finished
from ckpttool.execute.options import Checksum, PhasedProgress, Progress, RunOptions
from ckpttool.execute.parts.late import verifying
from ckpttool.execute.schedule import Part


def share(plan: Plan, destination: Destination, options: RunOptions, progress: Progress) -> SentShare:
    """The part of this process."""
    assert isinstance(destination, ObjectMember)  # noqa: S101 - for mypy: there are two destinations of members
    return SentShare(plan, destination, options, progress)


class SentShare(Run):
    """A part of a run, sent to a store."""

    destination: ObjectMember

    def __init__(self, plan: Plan, destination: ObjectMember, options: RunOptions, progress: Progress) -> None:
        super().__init__(plan, destination, options, progress)
        self.again = f"run {destination.member} again to continue"
        self.waiting: tuple[int, ...] = ()
        """Parts that are not done when this one is."""

    def _begin(self) -> Finished:
        finished = super()._begin()
        self.tasks = [self.tasks[t] for t in self.destination.own]
        return finished

    def _start_executor(self, finished: Finished) -> TaskExecutor:
        executor = super()._start_executor(finished)
        self.destination.beat()
        return executor

    def _prepare(self, pool: Medium, finished: Finished) -> None:
        """The destination has made the files."""
        for path in self.outlet.paths:
            pool.expect_writes(path)
        self._announce(finished, [p for t in self.tasks for p in t.parts])

    def _work(
        self, pool: Medium, finished: Finished, undisturbed: Callable[[], AbstractContextManager[object]]
    ) -> TaskExecutor:
        executor = super()._work(pool, finished, undisturbed)
        self.record(pool, *executor.unrecorded())
        return executor

    def _finish(self, pool: Medium) -> None:
        self._check_sources()
        self.waiting = self.destination.leave(pool)

    def _seal(self, hold: Callable[[], None]) -> None:
        """DST is made when all parts are done."""

    def _publish(self) -> None:
        """See ``_seal``."""

    def _give_up(self, error: BaseException, pool: Medium) -> BaseException:
        """What to raise: what another part has completed needs nothing more of this one."""
        if isinstance(error, Exception) and not isinstance(error, CommittedError):
            with contextlib.suppress(CkptError):  # the first error is the one to tell
                try:
                    self.destination.check_running()
                except CommittedError as e:
                    error = e
        wrong = not isinstance(error, CommittedError) and not self._may_pass(error)
        self.destination.failed(error, wrong=wrong)
        self.recorded += not wrong  # the others have begun, if this one has not
        return super()._give_up(error, pool)

    def commit(self) -> SentCommit:
        """All parts are done: the run that completes DST."""
        options = replace(self.options, member=None, resume=True)
        made = SentCommit(self.plan, self.destination.committer(), options, self.progress)
        made.again = self.again
        return made

    def _announce(self, finished: Finished, parts: Sequence[Part]) -> None:
        """Show how much this part has to do."""
        mine = [p for p in parts if p.number not in finished.parts]
        done = [p for p in parts if p.number in self.destination.finished]
        total = sum([p.nbytes for p in mine]) + sum([p.nbytes for p in done])
        self.progress.start(total, len({f for p in parts for f in p.files}))
        for p in mine:
            for file in p.files:
                self.pending[file] += 1
        self.skipped = sum([p.nbytes for p in done])
        if isinstance(self.progress, PhasedProgress):
            self.progress.phase("write", total, self.skipped)
            self.shown = self.skipped
        self._show(self.skipped)

    def _checksums(self) -> list[Checksum]:
        """No checksums: the process that completes DST reads those of all parts."""
        return []


class SentCommit(Run):
    """Completes DST after the last share: the store has nearly everything, and DST is not there yet."""

    destination: ObjectCommit

    def _begin(self) -> Finished:
        finished = super()._begin()
        if self.destination.is_to_verify:
            self.options = verifying(self.options)
        return finished

    def _announce(self, finished: Finished, parts: Sequence[Part]) -> None:
        self.shown = self.plan.bytes_written
        for p in parts:
            for file in p.files:
                self.pending[file] += 1
