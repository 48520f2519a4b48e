"""Running a plan: checks, workers, journal, and the one rename at the end.

    check     destination, space, open-file limit, sources as they were when planned
    prepare   lock DST.partial/, make every file at its full size, write the literal bytes
    work      workers take tasks in order; the calling thread shows progress; a third thread makes finished parts
              durable and then records them in the journal. Threads move bytes; tensors that are computed go to
              processes, each with a thread here that gives it orders
    finish    sync, check the sources again, manifest, verify, remove the journal, rename

When something fails, what is left depends on whether trying again can help: a full disk, an I/O error or Ctrl-C leave
DST.partial/ for ``--resume``; wrong input leaves nothing.
"""

from __future__ import annotations

import contextlib
import gc
import json
import signal
import threading
import time
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from ckpttool.core.files import DataFile, Place
from ckpttool.core.plan import Plan
from ckpttool.errors import AccessError, CkptError, OutputError
from ckpttool.execute.destinations import destination_for
from ckpttool.execute.destinations.base import Beginning, Destination
from ckpttool.execute.destinations.local import MANIFEST
from ckpttool.execute.files import FilePool, Medium, SourceReadError, Stopped, create, remove_file, write_error
from ckpttool.execute.hashing import ALGORITHM, CRC32, joined_crc32
from ckpttool.execute.journal import Finished
from ckpttool.execute.options import (
    Advance,
    Checksum,
    NoProgress,
    OnFleet,
    PhasedProgress,
    Progress,
    RunOptions,
    RunResult,
)
from ckpttool.execute.reader import stop_reading
from ckpttool.execute.remote import check_unchanged, open_medium
from ckpttool.execute.schedule import Part, Task, sum_key
from ckpttool.execute.tasks import run_tasks
from ckpttool.execute.workforce import TICK, Outlet, Watcher, Workforce
from ckpttool.storage.place import parse_place

if TYPE_CHECKING:
    from ckpttool.execute.fleets.base import Answer, Fleet


def run(plan: Plan, dst: Place, options: RunOptions | None = None, progress: Progress | None = None) -> RunResult:
    """Write the outputs of ``plan`` to the directory ``dst``, here or elsewhere, whole or not at all.

    Raises OutputError when the destination cannot be written, CorruptError when a source is not what the plan says,
    ConflictError when ``resume`` meets the remains of another plan, whatever ``options.verify`` raises, and
    KeyboardInterrupt on Ctrl-C or SIGTERM.
    """
    # A large plan is a million small tuples that stay: the garbage collector need not walk them again and again.
    freezes = not gc.get_freeze_count()  # what the program around us has frozen stays frozen
    if freezes:
        gc.freeze()
    try:
        options = options or RunOptions()
        return Run(plan, destination_for(dst, options), options, progress or NoProgress()).go()
    finally:
        if freezes:
            gc.unfreeze()


class _ByteCounter:
    """Bytes that several threads are done with."""

    def __init__(self, stop: threading.Event) -> None:
        self.done = 0
        self._stop = stop
        self._adding = threading.Lock()

    def advance(self, nbytes: int) -> None:
        """Raises Stopped when the run is to end."""
        if self._stop.is_set():
            raise Stopped
        with self._adding:
            self.done += nbytes


class TaskExecutor(Protocol):
    """Carries out the tasks of a run: on this machine (``Workforce``) or on others (``Fleetwork``)."""

    notes: list[str]
    shared: list[str]
    unsynced: bool

    @property
    def bytes_read(self) -> int: ...
    @property
    def bytes_written(self) -> int: ...
    @property
    def peak_buffer(self) -> int: ...
    def start_workers(self, tasks: Sequence[Task], finished: Finished) -> None: ...
    def carry_out(
        self,
        tasks: Sequence[Task],
        finished: Finished,
        pool: Medium,
        watcher: Watcher,
        undisturbed: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None: ...
    def unrecorded(self) -> tuple[list[Part], dict[str, str]]: ...
    def end(self, *, now: bool) -> None: ...


class Run:
    """One run, and the ``Watcher`` of those who do its work."""

    again = "rerun with --resume to continue"
    """The hint after an error that may be temporary."""

    def __init__(self, plan: Plan, destination: Destination, options: RunOptions, progress: Progress) -> None:
        self.plan = plan
        self.options = options
        self.progress = progress
        self.destination = destination
        self.outlet = Outlet(())
        self.stop = threading.Event()
        self.halt: Callable[[], None] = lambda: None
        """Ends all waiting for bytes of other machines."""
        self.far: frozenset[int] = frozenset()
        """Sources on other machines."""
        self.tasks: Sequence[Task] = ()
        self.executor: TaskExecutor | None = None
        self.fleet: Fleet | None = None
        """Machines that work for this run; they do so until it is complete."""
        self.sums: dict[str, str] = {}
        self.hashes: Sequence[str] = ()
        self.notes = list(plan.notes)
        self.pending = [0] * len(plan.outputs)
        self.skipped = 0
        self.recorded = 0
        self.shown = 0
        self.verifying = False
        self.verified = False
        self.verify_seconds = 0.0
        self.measure_seconds = 0.0

    def go(self) -> RunResult:
        """Raises as ``run``."""
        began = time.perf_counter()
        carried = [o.carried for o in self.plan.outputs if o.carried]
        roots, force = self.options.source_roots, self.options.force
        self.destination.check([s.path for s in self.plan.sources], roots, force=force, carried=carried)
        self._check_sources()
        self.destination.check_space(self.plan)
        half, connections = self.options.memory // 2, self.options.connections
        with _signals() as signals, open_medium(memory=half, connections=connections) as medium:
            pool = self._medium(medium)
            self.halt = pool.stop
            self.hashes, self.far, self.tasks = run_tasks(self.plan, pool, manifest=self.options.manifest)
            finished = self._begin()
            try:
                executor = self._work(pool, finished, signals.later)
                self._finish(pool)
                self._seal(signals.hold)
            except BaseException as e:
                error = self._give_up(e, pool)
                if error is e:
                    raise
                raise error from e
            self._publish()
        return self._result(began, executor, pool)

    def _medium(self, medium: Medium) -> Medium:
        """The medium that all bytes go through."""
        return medium

    def _work(
        self, pool: Medium, finished: Finished, undisturbed: Callable[[], AbstractContextManager[object]]
    ) -> TaskExecutor:
        """Have everything written that is not finished."""
        pool.scratch = str(self.destination.partial)
        executor = self.executor = self._start_executor(finished)
        self._prepare(pool, finished)
        self.sums = finished.sums
        executor.carry_out(self.tasks, finished, pool, self, undisturbed)
        executor.end(now=False)
        return executor

    def _seal(self, hold: Callable[[], None]) -> None:
        """Nothing can go wrong any more but the last step; ``hold`` keeps signals away from now on."""
        # While there is a journal, what was done is not lost when DST may not be replaced.
        self.destination.check_absent(force=self.options.force, appeared=True)
        if self.fleet:
            self.fleet.end(now=False)
        hold()
        self.destination.seal()

    def _publish(self) -> None:
        note = self.destination.publish(force=self.options.force)
        if note:
            self.notes.append(note)
            self.progress.note(note)
        self.progress.finish()

    def _result(self, began: float, executor: TaskExecutor, pool: Medium) -> RunResult:
        self.notes += executor.notes
        for how, count in Counter(executor.shared).items():
            files = "1 file" if count == 1 else f"{count} files"
            self.notes.append(f"{files} {how}" if how else f"{files} copied: linking does not work here")
        return RunResult(
            bytes_read=executor.bytes_read,
            bytes_written=executor.bytes_written,
            bytes_skipped=self.skipped,
            seconds=time.perf_counter() - began,
            peak_buffer=executor.peak_buffer,
            policy=pool.policy,
            plan_seconds=began - self.options.begun,
            verify_seconds=self.verify_seconds,
            measure_seconds=self.measure_seconds,
            verified=self.verified,
            manifest=self._checksums() if self.options.manifest else [],
            notes=self.notes,
        )

    # -- check

    def _check_sources(self) -> None:
        """Raises CorruptError when a source is not the file that was planned."""
        carried = [DataFile(parse_place(o.carried), o.size, o.tag) for o in self.plan.outputs if o.carried]
        check_unchanged([*[DataFile(parse_place(s.path), s.size, s.tag) for s in self.plan.sources], *carried])

    # -- prepare

    def _begin(self) -> Finished:
        """Lock the destination, and hear what an interrupted run has finished."""
        options = self.options
        late = [*options.late_files, *[MANIFEST] * options.manifest]
        verify = options.verify is not None
        finished = self.destination.begin(
            Beginning(self.plan, tuple(self.tasks), late, options.force, options.resume, verify, self.stop)
        )
        paths = [str(self.destination.partial / o.name) for o in self.plan.outputs]
        self.outlet = Outlet(paths, self.destination.spools, self.destination.locks)
        self.recorded = len(finished.parts)
        return finished

    def _start_executor(self, finished: Finished) -> TaskExecutor:
        """Start the processes that compute, before there is a thread; or find out which machines work for us."""
        if self.options.on:
            return self._start_fleet(finished)
        workforce = Workforce(self.plan, self.outlet, self.options, self.hashes, self.stop)
        workforce.ahead = self.options.memory // 2 if self.far else 0
        workforce.start_workers(self.tasks, finished)
        return workforce

    def _start_fleet(self, finished: Finished) -> TaskExecutor:
        from ckpttool.execute.fleets import fleet_for  # with all that a run on one machine does not need
        from ckpttool.execute.machines.fleetwork import Fleetwork

        on = self.options.on
        self.fleet = fleet_for(on) if isinstance(on, str) else on
        fleetwork = Fleetwork(self.plan, self.destination, self.fleet, self.options, self.hashes)
        fleetwork.far, fleetwork.stop, fleetwork.remember = self.far, self.stop, self.remember
        fleetwork.start_workers(self.tasks, finished)
        return fleetwork

    def _prepare(self, pool: Medium, finished: Finished) -> None:
        """Make every file, with its literal bytes."""
        parts = [p for t in self.tasks for p in t.parts]
        made = set()
        for i, (output, path) in enumerate(zip(self.plan.outputs, self.outlet.paths, strict=True)):
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            except OSError as e:
                raise write_error(e, path, 0, 0) from e
            if self.outlet.links(output):  # made in its turn, never opened for writing: its bytes may be the source's
                if not Path(path).exists():
                    made.add(i)
                continue
            if not self.destination.make(path, output.size):
                made.add(i)
            pool.expect_writes(path, scattered=output.summed)
            if not output.summed:
                write_literals(pool, path, output.literals)
        finished.parts -= {p.number for p in parts if not made.isdisjoint(p.files)}
        self._announce(finished, parts)

    def _announce(self, finished: Finished, parts: Sequence[Part]) -> None:
        """Show how much there is to do."""
        self.progress.start(self.plan.bytes_written, len(self.plan.outputs))
        for p in parts:
            for file in p.files:
                self.pending[file] += 1
        literal = [o for o, n in zip(self.plan.outputs, self.pending, strict=True) if not n]
        for p in parts:
            if p.number in finished.parts:
                self.skipped += p.nbytes
                self._file_progress(p)
        for output in literal:
            self.progress.file_done(output.name, output.size)
        if isinstance(self.progress, PhasedProgress):
            self.progress.phase("write", self.plan.bytes_written, self.skipped)
            self.shown = self.skipped
        self._show(self.skipped)

    def _file_progress(self, part: Part) -> None:
        for file in part.files:
            self.pending[file] -= 1
            if not self.pending[file]:
                output = self.plan.outputs[file]
                self.progress.file_done(output.name, output.size)

    def _show(self, done: int) -> None:
        if done > self.shown:
            self.progress.advance(done - self.shown)
            self.shown = done

    # -- work, seen by those who do it

    def finished(self, parts: Sequence[Part], sums: Mapping[str, str]) -> None:
        self.sums.update(sums)
        for part in parts:
            self._file_progress(part)

    def moved(self, nbytes: int) -> None:
        self._show(self.skipped + nbytes)

    def record(self, pool: Medium, parts: Sequence[Part], sums: Mapping[str, str]) -> None:
        self.destination.record(pool, parts, sums)
        self.recorded += len(parts)

    def remember(self, parts: Sequence[Part], answer: Answer) -> None:
        self.destination.remember(parts, answer)
        self.recorded += len(parts)

    # -- finish

    def _finish(self, pool: Medium) -> None:
        """Everything durable and checked; only the name is missing."""
        if CRC32 in self.hashes:
            self._write_summed(pool)
        self.destination.settle(pool, self.outlet.paths)
        self._check_sources()
        self._write_late(pool)
        if self.options.manifest:
            self._write_manifest(pool)
        self.destination.complete()
        self._show(self.plan.bytes_written)
        if self.options.verify is not None:
            self.verifying = True
            began = time.perf_counter()
            try:
                self._read_back("verify", self.options.verify)
            finally:
                # A source that changed while it was read again is the reason for any difference.
                self._check_sources()
            self.verify_seconds = time.perf_counter() - began
            self.verifying, self.verified = False, True
        if self.options.measure is not None:
            began = time.perf_counter()
            self._read_back("measure", self.options.measure)
            self._check_sources()
            with FilePool() as fresh:  # the other one may have the first versions open
                self._write_late(fresh)
            self.measure_seconds = time.perf_counter() - began

    def _write_late(self, pool: Medium) -> None:
        for name, late_files in self.options.late_files.items():
            self._write_small(pool, name, late_files(self.sums))

    def _write_summed(self, pool: Medium) -> None:
        """Write the literal bytes of files that have checksums of tensors among them, which are known by now."""
        paths = self.outlet.paths
        places = [array("Q") for _ in paths]
        sums = [array("I") for _ in paths]
        parts: list[list[tuple[int, int, int]]] = [[] for _ in paths]
        for u, unit in enumerate(self.plan.units):
            for t, target in enumerate(unit.stored_tensors):
                output = self.plan.outputs[target.file]
                if output.shared:
                    parts[target.file].append((target.offset, target.nbytes, int(self.sums[sum_key(u, t, CRC32)], 16)))
                for at in output.checksums.get(target.offset, ()):
                    places[target.file].append(at)
                    sums[target.file].append(int(self.sums[sum_key(u, t, CRC32)], 16))
        for path, output, at_, sum_, held in zip(paths, self.plan.outputs, places, sums, parts, strict=True):
            if output.summed:
                found = dict(zip(at_, sum_, strict=True))
                held.sort()
                for first, size, into in output.shared:
                    inner = held[bisect_left(held, (first,)) : bisect_left(held, (first + size,))]
                    found |= dict.fromkeys(into, joined_crc32(first, size, inner))
                write_literals(pool, path, filled(output.literals, found))

    def _read_back(self, phase: str, read: Callable[[Place, Advance], None]) -> None:
        """Show how far another thread is with it. An interrupt ends that thread when it next says how far it is."""
        meter, total, phased = (
            _ByteCounter(self.stop),
            self.plan.bytes_written,
            isinstance(self.progress, PhasedProgress),
        )
        if isinstance(self.progress, PhasedProgress):
            self.progress.phase(phase, total, 0)
            self.shown = 0
        with ThreadPoolExecutor(1, thread_name_prefix=phase) as thread:
            try:
                reading = thread.submit(self._with_fleet(read), self.destination.readable(), meter.advance)
                while not wait([reading], TICK).done:
                    if phased:
                        self._show(min(meter.done, total))
            except BaseException:
                self.stop.set()
                stop_reading()
                raise
        reading.result()
        if phased:
            self._show(total)

    def _with_fleet(self, read: Callable[[Place, Advance], None]) -> Callable[[Place, Advance], None]:
        """The same, on the machines that work for this run, if there are any and it can be done in shares."""
        fleet = self.fleet
        if fleet is None or not isinstance(read, OnFleet):
            return read
        private = self.destination.partial if self.destination.spools else None
        return lambda written, advance: read.on(fleet, written, advance, self.stop, private)

    def _checksums(self) -> list[Checksum]:
        out = []
        for u, unit in enumerate(self.plan.units):
            for t, target in enumerate(unit.stored_tensors):
                digest = f"{ALGORITHM}:{self.sums[sum_key(u, t, ALGORITHM)]}"
                out.append(Checksum(self.plan.outputs[target.file].name, target.name, target.nbytes, digest))
        out.sort(key=lambda c: (c.file, c.tensor))
        return out

    def _write_manifest(self, pool: Medium) -> None:
        tensors: dict[str, dict[str, str]] = {}
        for c in self._checksums():
            tensors.setdefault(c.file, {})[c.tensor] = c.digest.removeprefix(f"{ALGORITHM}:")
        files = {o.name: o.size for o in sorted(self.plan.outputs, key=lambda o: o.name)}
        manifest = {"version": 1, "algorithm": ALGORITHM, "tensors": tensors, "files": files}
        data = json.dumps(manifest, ensure_ascii=False, indent=1).encode(errors="backslashreplace")
        self._write_small(pool, MANIFEST, data)

    def _write_small(self, pool: Medium, name: str, data: bytes) -> None:
        path = str(self.destination.partial / name)
        remove_file(path)
        create(path, len(data))
        pool.expect_writes(path)
        pool.write(path, 0, memoryview(data))
        pool.sync(path, metadata=True)

    # -- failure

    def _give_up(self, error: BaseException, pool: Medium) -> BaseException:
        """Stop the workers; keep or remove what there is. Returns the error to raise."""
        self.stop.set()
        self.halt()
        if self.executor:
            self.executor.end(now=True)
        again = self._may_pass(error)
        if again and self.executor and self.destination.can_record and not (pool.unsynced or self.executor.unsynced):
            with contextlib.suppress(CkptError):
                self.record(pool, *self.executor.unrecorded())
        if self.destination.spools and isinstance(error, OutputError) and not error.hint:
            spool = str(self.destination.partial)
            if any(w.startswith(spool) for w in error.where):
                error.hint = "free space there, or set TMPDIR to a directory on a larger disk"
        if not again or not self.recorded or not self.destination.resumes:
            self.destination.discard()
            return error
        self.destination.close()
        return _resumable(error, self.again)

    def _may_pass(self, error: BaseException) -> bool:
        """Whether the same may work another time."""
        passing = isinstance(error, OutputError | SourceReadError | AccessError)
        if self.verifying and isinstance(error, Exception):
            return passing  # bytes that could not be read, or machines that are gone, say nothing of the output
        return passing or not isinstance(error, CkptError)


def write_literals(pool: Medium, path: str, literals: Iterable[tuple[int, bytes]]) -> None:
    """Write what is known of an output before any tensor is moved: (offset, bytes)."""
    for offset, data in literals:
        pool.write(path, offset, memoryview(data))


def filled(literals: Iterable[tuple[int, bytes]], sums: Mapping[int, int]) -> Iterator[tuple[int, bytes]]:
    """Literal bytes with checksums in their places; those that follow each other are joined."""
    places = sorted(sums, reverse=True)
    runs: list[tuple[int, bytearray]] = []
    for offset, data in sorted(literals):
        if runs and runs[-1][0] + len(runs[-1][1]) == offset:
            runs[-1][1].extend(data)
        else:
            runs.append((offset, bytearray(data)))
    for offset, run in runs:
        while places and places[-1] < offset + len(run):
            at = places.pop()
            run[at - offset : at - offset + 4] = sums[at].to_bytes(4, "little")
        yield offset, bytes(run)


def _resumable(error: BaseException, how: str) -> BaseException:
    """The error with the way on in its hint."""
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt(f"interrupted; {how}")
    if isinstance(error, CkptError):
        error.hint = f"{error.hint}; then {how}" if error.hint else how
    return error


class _Signals:
    """Ctrl-C and SIGTERM end a run in the same way, except while names are exchanged."""

    def __init__(self) -> None:
        self._held = self._waits = self._came = False

    def hold(self) -> None:
        """Ignore signals until the run has ended."""
        self._held = True

    @contextlib.contextmanager
    def later(self) -> Iterator[None]:
        """Postpone signals: they end the run afterwards."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False
        if self._came:
            raise KeyboardInterrupt

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        self._came = True
        if not self._held and not self._waits:
            raise KeyboardInterrupt


@contextlib.contextmanager
def _signals() -> Iterator[_Signals]:
    signals = _Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    old = {number: signal.signal(number, signals) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
