"""One of several processes that make DST together (``--part I/N``): its share, then DST if all shares are done.

What they agree on, and how, is the destination's: see ``destinations.members``.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ckpttool.core.files import Place
from ckpttool.core.plan import Plan
from ckpttool.errors import OutputError
from ckpttool.execute.destinations import destination_for
from ckpttool.execute.destinations.base import Destination
from ckpttool.execute.destinations.claims import TakenOverError
from ckpttool.execute.destinations.members import CommitDestination, CommittedError, MemberDestination, PeerError
from ckpttool.execute.engine import Run, TaskExecutor, write_literals
from ckpttool.execute.files import Medium, create, share, write_error
from ckpttool.execute.journal import Edge, Finished
from ckpttool.execute.options import (
    Checksum,
    Member,
    PhasedProgress,
    Progress,
    RunOptions,
    RunResult,
    Standing,
)
from ckpttool.execute.parts.late import is_made, verify_made, verifying
from ckpttool.execute.schedule import Part
from ckpttool.execute.withheld_pages import WithholdingMedium
from ckpttool.execute.workforce import Outlet


def run(plan: Plan, dst: Place, member: Member, options: RunOptions, progress: Progress) -> RunResult:
    """Do one part of a run, ``options.member``, and make DST when that was the last one.

    Raises as ``engine.run``; ConflictError when another part has another plan, OutputError when another part fails.
    """
    destination = destination_for(dst, options)
    freezes = not gc.get_freeze_count()
    if freezes:
        gc.freeze()
    try:
        return _together(_share(plan, destination, options, progress), member)
    except OutputError:
        if not isinstance(destination, MemberDestination) or not is_made(plan, destination.path, member, options):
            raise
        said = f"DST exists already, and the share of {member} in it matches the sources"
        done = replace(_nothing_done(plan, options), verified=options.verify is not None)
        return _ended(progress, done, said, Standing(member, committed=True))
    finally:
        if freezes:
            gc.unfreeze()


def _share(plan: Plan, destination: Destination, options: RunOptions, progress: Progress) -> _PartRun:
    if isinstance(destination, MemberDestination):
        return _MemberRun(plan, destination, options, progress)
    from ckpttool.execute.parts.member_objects import share  # with a package that a directory does not need

    return share(plan, destination, options, progress)


class _PartDestination(Protocol):
    """DST for a process that does its part."""

    verify_is_known: bool

    @property
    def given(self) -> Place: ...


class _PartRun(Protocol):
    """A share of a run, and what comes after the last one."""

    @property
    def destination(self) -> _PartDestination: ...

    options: RunOptions
    plan: Plan
    progress: Progress
    waiting: tuple[int, ...]

    def go(self) -> RunResult: ...
    def commit(self) -> Run: ...


def _together(mine: _PartRun, member: Member) -> RunResult:
    """Do a share, then what is left to do when all are done."""
    result = _nothing_done(mine.plan, mine.options)
    try:
        result = mine.go()
        if mine.waiting:
            mine.progress.finish()
            return replace(result, standing=Standing(member, committed=False, waiting_for=mine.waiting))
        made = mine.commit().go()
    except CommittedError:
        said = f"{member} is done; another part has completed DST"
        if mine.options.verify is not None:
            seconds = 0.0 if mine.destination.verify_is_known else verify_made(mine.destination.given, mine.options)
            result = replace(result, verified=True, verify_seconds=seconds, seconds=result.seconds + seconds)
        return _ended(mine.progress, result, said, Standing(member, committed=True))
    return replace(
        result,
        seconds=result.seconds + made.seconds,
        verify_seconds=made.verify_seconds,
        verified=made.verified,
        manifest=made.manifest,
        notes=[*result.notes, *(n for n in made.notes if n not in result.notes)],
        standing=Standing(member, committed=True),
    )


def _nothing_done(plan: Plan, options: RunOptions) -> RunResult:
    return RunResult(0, 0, 0, 0.0, 0, "", plan_seconds=time.perf_counter() - options.begun, notes=list(plan.notes))


def _ended(progress: Progress, result: RunResult, said: str, standing: Standing) -> RunResult:
    progress.note(said)
    progress.finish()
    return replace(result, notes=[*result.notes, said], standing=standing)


class _CheckedMedium(WithholdingMedium):
    """Withholds pages that other machines write, and refuses writes of a process whose claim was taken over."""

    def __init__(self, medium: Medium, check: Callable[[], None]) -> None:
        super().__init__(medium)
        self._check = check

    def write(self, path: str, offset: int, data: memoryview, *, scattered: bool = False) -> None:
        self._check()
        super().write(path, offset, data, scattered=scattered)


class _MemberRun(Run):
    """A part of a run."""

    destination: MemberDestination

    def __init__(self, plan: Plan, destination: MemberDestination, options: RunOptions, progress: Progress) -> None:
        super().__init__(plan, destination, options, progress)
        self.again = f"run {destination.member} again to continue"
        self.waiting: tuple[int, ...] = ()
        """Parts that are not done when this one is."""

    def _medium(self, medium: Medium) -> Medium:
        return _CheckedMedium(medium, self.destination.check_lately)

    def _start_executor(self, finished: Finished) -> TaskExecutor:
        executor = super()._start_executor(finished)
        self.destination.beat()
        return executor

    def _work(
        self, pool: Medium, finished: Finished, undisturbed: Callable[[], AbstractContextManager[object]]
    ) -> TaskExecutor:
        executor = super()._work(pool, finished, undisturbed)
        self.record(pool, *executor.unrecorded())
        self._show(sum([p.nbytes for t in self.tasks for p in t.parts]))
        return executor

    def _finish(self, pool: Medium) -> None:
        self.waiting = self.destination.leave()

    def _seal(self, hold: Callable[[], None]) -> None:
        """DST is made when all parts are done."""

    def _publish(self) -> None:
        """See ``_seal``."""

    def commit(self) -> _MemberCommit:
        """The run that completes DST, once no part is left."""
        options = replace(self.options, member=None, resume=True)
        made = _MemberCommit(self.plan, self.destination.committer(), options, self.progress)
        made.again = self.again
        return made

    def _checksums(self) -> list[Checksum]:
        return []  # known when all parts are done

    def _begin(self) -> Finished:
        finished = super()._begin()
        self.tasks = [self.tasks[t] for t in self.destination.own]
        self.outlet = Outlet(self.outlet.paths, locks=self.outlet.locks, alone=False)  # what could be linked has been
        return finished

    def _prepare(self, pool: Medium, finished: Finished) -> None:
        """Have the outputs made, by this part or another one."""
        assert isinstance(pool, WithholdingMedium)  # noqa: S101 - for mypy: see ``_medium``
        pool.scratch = str(self.destination.common.path)  # what is below stays where it is
        paths, pages = self.outlet.paths, self.destination.pages
        outputs = {path: i for i, path in enumerate(paths)}

        def kept() -> Sequence[Edge]:
            return [(outputs[e.path], e.offset, e.data) for e in pool.take()]

        linked = self.destination.prepare(lambda directory: self._make(pool, directory))
        for how, count in Counter(linked.values()).items():
            self.notes.append(f"{'1 file' if count == 1 else f'{count} files'} {how}")
        for i, (output, path) in enumerate(zip(self.plan.outputs, paths, strict=True)):
            if i not in linked:
                pool.expect_writes(path, scattered=output.summed)
        pool.hold({paths[i]: some for i, some in pages.items()})
        self.destination.edges = kept
        parts = [p for t in self.tasks for p in t.parts]
        finished.parts |= {p.number for p in parts if p.carried in linked}
        self._announce(finished, parts)

    def _make(self, pool: Medium, directory: Path) -> dict[int, str]:
        """Make every file below a directory, with its literal bytes. Returns how those came about that were linked."""
        linked: dict[int, str] = {}
        made = []
        for i, output in enumerate(self.plan.outputs):
            path = directory / output.name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as e:
                raise write_error(e, str(path), 0, 0) from e
            if output.link and (how := share(output.carried, str(path))):
                linked[i] = how
                continue
            create(str(path), output.size)
            pool.expect_writes(str(path), scattered=output.summed)
            if not output.summed:
                write_literals(pool, str(path), output.literals)
            made.append(str(path))
        self.destination.settle(pool, made)
        return linked

    def _announce(self, finished: Finished, parts: Sequence[Part]) -> None:
        """Show how much this part has to do."""
        total, files = sum([p.nbytes for p in parts]), {f for p in parts for f in p.files}
        self.progress.start(total, len(files))
        for p in parts:
            for file in p.files:
                self.pending[file] += 1
        for p in parts:
            if p.number in finished.parts:
                self.skipped += p.nbytes
                self._file_progress(p)
        if isinstance(self.progress, PhasedProgress):
            self.progress.phase("write", total, self.skipped)
            self.shown = self.skipped
        self._show(self.skipped)

    def _give_up(self, error: BaseException, pool: Medium) -> BaseException:
        if self.destination.common.is_committed():
            self.destination.close()
            return CommittedError()
        _tell(self.destination, error, wrong=not self._may_pass(error))
        return super()._give_up(error, pool)


class _MemberCommit(Run):
    """Completes DST after the last share: everything is written, and the rename is left."""

    destination: CommitDestination

    def _begin(self) -> Finished:
        finished = super()._begin()
        if self.destination.is_to_verify:
            self.options = verifying(self.options)
        return finished

    def _announce(self, finished: Finished, parts: Sequence[Part]) -> None:
        self.shown = self.plan.bytes_written

    def _give_up(self, error: BaseException, pool: Medium) -> BaseException:
        if self.destination.common.is_committed():
            self.destination.close()
            return CommittedError()
        _tell(self.destination, error, wrong=not self._may_pass(error))
        return super()._give_up(error, pool)


def _tell(destination: Any, error: BaseException, *, wrong: bool) -> None:
    """Let the others know, unless they do, or can go on without this part for now."""
    if isinstance(error, PeerError):
        destination.wrong = error.wrong
    elif isinstance(error, Exception) and not isinstance(error, TakenOverError):
        destination.failed(error, wrong=wrong)
