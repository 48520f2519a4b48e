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
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from ckpttool.errors import AccessError, CkptError, OutputError
from ckpttool.execute.blocks import Mover
from ckpttool.execute.checks import check
from ckpttool.execute.crew import Answer, ProcessPool, Serve, spawn
from ckpttool.execute.destinations import destination_for
from ckpttool.execute.destinations.base import Beginning
from ckpttool.execute.destinations.local import MANIFEST
from ckpttool.execute.draws import tensor_draws
from ckpttool.execute.files import Medium, SourceReadError, Stopped, create, remove_file, share, write_error
from ckpttool.execute.hashing import ALGORITHM, CRC32, Sums, joined_crc32
from ckpttool.execute.journal import Finished
from ckpttool.execute.options import Advance, Checksum, NoProgress, PhasedProgress, Progress, RunOptions, RunResult
from ckpttool.execute.reader import stop_reading
from ckpttool.execute.remote import check_unchanged, open_medium
from ckpttool.execute.schedule import Part, Task, operand_keys, part_limit, schedule, sum_key
from ckpttool.execute.upcoming import Turn, Upcoming
from ckpttool.execute.worker import ComputeWorker, Job, is_known, order, server
from ckpttool.plan import Output, Plan
from ckpttool.storage.place import DataFile, Place, parse_place

_T = TypeVar("_T")

_MIB = 1 << 20
_SMALLEST_ARENA = 64 << 10
_COMPUTING_MEMORY = 8 << 20
"""Least memory for a process that computes: a chunk of a few operands, and a stretch of the result."""
_ENTRY = "ckpttool.execute.worker:main"
_TICK = 0.2
"""Seconds between calls of the progress interface: often enough to look alive, too seldom to hold up the workers."""
_SPOOLED = 256 << 20
"""Most bytes that are written to a spool and not recorded."""
_RECORD_EVERY = 2.0
"""Seconds after which finished parts are recorded, however few."""


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
        return _Run(plan, dst, options or RunOptions(), progress or NoProgress()).go()
    finally:
        if freezes:
            gc.unfreeze()


@dataclass(slots=True)
class _Record:
    """Parts that a worker has finished."""

    parts: list[Part]
    sums: dict[str, str] = field(default_factory=dict)


class CompletionQueue:
    """Finished parts on their way to the journal. Workers post, the calling thread takes."""

    def __init__(self, batch: int, most: int) -> None:
        self.batch = batch
        self.wake = threading.Event()
        self._most = most
        self._records: deque[_Record] = deque()
        self._changed = threading.Condition()
        self._unsaved = 0

    def post(self, record: _Record, stop: threading.Event) -> None:
        """Add a record. Waits while so much is unrecorded that a crash now would cost too much."""
        nbytes = sum([p.nbytes for p in record.parts])
        with self._changed:
            self._records.append(record)
            self._unsaved += nbytes
            if self._unsaved >= self.batch:
                self.wake.set()
            while self._unsaved > self._most and not stop.is_set():
                self._changed.wait(0.2)

    def take(self) -> list[_Record]:
        with self._changed:
            records = list(self._records)
            self._records.clear()
            return records

    def saved(self, nbytes: int) -> None:
        with self._changed:
            self._unsaved -= nbytes
            self._changed.notify_all()


class _Meter:
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


class _Run:
    def __init__(self, plan: Plan, dst: Place, options: RunOptions, progress: Progress) -> None:
        self.plan = plan
        self.options = options
        self.progress = progress
        self.destination = destination_for(dst, self.options)
        self.paths: list[str] = []
        """Of the outputs, where they are made."""
        self.sources = [s.contents for s in plan.sources]
        self.stop = threading.Event()
        self.halt: Callable[[], None] = lambda: None
        """Ends all waiting for bytes of other machines."""
        self.far: set[int] = set()
        """Sources on other machines."""
        self.ahead = 0
        """Of the memory, what is for bytes that are read ahead from other machines."""
        self.failures: list[BaseException] = []
        self.tasks: deque[Task] = deque()
        self.computing: deque[Task] = deque()
        self.crew: ProcessPool | None = None
        self.computed = [0, 0]
        """Bytes that were read and written for computed tensors."""
        self.computed_at: dict[int, int] = {}
        """Bytes that are done of each unit that is computed, while it is computed, too."""
        self.carriers: list[Mover] = []
        self.threads: list[threading.Thread] = []
        self.sums: dict[str, str] = {}
        self.hashes = [ALGORITHM] * options.manifest + [CRC32] * any(o.summed for o in plan.outputs)
        self.shared: list[str] = []
        """How each file that may be linked came about: a reflink, a hard link, or "" for a copy."""
        self.notes = list(plan.notes)
        total = plan.bytes_written
        batch, most = max(_MIB, min(256 * _MIB, total // 32)), max(4 * _MIB, total // 12)
        if self.destination.spools:  # what is not recorded takes room in the spool
            batch, most = min(batch, _SPOOLED // 4), min(most, _SPOOLED)
        self.ledger = CompletionQueue(batch, most)
        self.pending = [0] * len(plan.outputs)
        self.skipped = 0
        self.recorded = 0
        self.shown = 0
        self.unrecorded: list[_Record] = []
        self.unsynced = False
        """A sync has failed in a process that computes; see ``Medium``."""
        self.verifying = False
        self.verify_seconds = 0.0

    def go(self) -> RunResult:
        began = time.perf_counter()
        carried = [o.carried for o in self.plan.outputs if o.carried]
        roots, force = self.options.source_roots, self.options.force
        self.destination.check([s.path for s in self.plan.sources], roots, force=force, carried=carried)
        self._check_sources()
        self.destination.check_space(self.plan)
        half, connections = self.options.memory // 2, self.options.connections
        with _signals() as signals, open_medium(memory=half, connections=connections) as pool:
            self.halt = pool.stop
            self.far = {i for i, contents in enumerate(self.sources) if pool.is_far(contents)}
            self.ahead = half if self.far else 0
            finished = self._begin()
            try:
                pool.scratch = str(self.destination.partial)
                self._hire(finished)
                self._prepare(pool, finished)
                self._work(pool, finished, signals)
                self._finish(pool)
                # While there is a journal, what was done is not lost when DST may not be replaced.
                self.destination.check_absent(force=self.options.force, appeared=True)
                signals.hold()
                self.destination.seal()
            except BaseException as e:
                error = self._give_up(e, pool)
                if error is e:
                    raise
                raise error from e
            note = self.destination.publish(force=self.options.force)
        for how, count in Counter(self.shared).items():
            files = "1 file" if count == 1 else f"{count} files"
            self.notes.append(f"{files} {how}" if how else f"{files} copied: linking does not work here")
        if note:
            self.notes.append(note)
            self.progress.note(note)
        self.progress.finish()
        return RunResult(
            bytes_read=sum(c.bytes_read for c in self.carriers) + self.computed[0],
            bytes_written=sum(c.bytes_written for c in self.carriers) + self.computed[1],
            bytes_skipped=self.skipped,
            seconds=time.perf_counter() - began,
            peak_buffer=sum(c.arena.peak for c in self.carriers),
            policy=pool.policy,
            plan_seconds=began - self.options.begun,
            verify_seconds=self.verify_seconds,
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
        self.tasks = deque(schedule(self.plan, self.hashes, self.far))
        late = [*self.options.late_files, *[MANIFEST] * self.options.manifest]
        finished = self.destination.begin(
            Beginning(self.plan, tuple(self.tasks), late, self.options.force, self.options.resume, self.stop)
        )
        self.paths = [str(self.destination.partial / o.name) for o in self.plan.outputs]
        self.recorded = len(finished.parts)
        return finished

    def _prepare(self, pool: Medium, finished: Finished) -> None:
        """Make every file, with its literal bytes, and find out how much there is to do."""
        parts = [p for t in self.tasks for p in t.parts]
        made = set()
        for i, (output, path) in enumerate(zip(self.plan.outputs, self.paths, strict=True)):
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            except OSError as e:
                raise write_error(e, path, 0, 0) from e
            if self._links(output):  # made when its turn comes; never opened for writing: its bytes may be the source's
                if not Path(path).exists():
                    made.add(i)
                continue
            if not self.destination.make(path, output.size):
                made.add(i)
            pool.expect_writes(path, scattered=output.summed)
            if not output.summed:
                _write_literals(pool, path, output.literals)
        finished.parts -= {p.number for p in parts if not made.isdisjoint(p.files)}
        self.progress.start(self.plan.bytes_written, len(self.paths))
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

    # -- work

    def _hire(self, finished: Finished) -> None:
        """Start the processes that compute, before there is a thread."""
        jobs = [t for t in self.tasks if t.computing >= 0 and not self._is_done(t, finished)]
        if not jobs:
            return
        least = 2 * _COMPUTING_MEMORY if self.ahead else _COMPUTING_MEMORY
        memory = max(self.options.memory, least)
        count = max(1, min(self.options.computers, memory // least, len(jobs)))
        job = self._job(memory // count, count)
        known = all(is_known(self.plan.units[t.computing]) for t in jobs)
        self.crew = spawn(count, job.to_json() if known else None, server(job), _ENTRY, self.destination.locks)
        if self.crew is None and count > 1:
            self.notes.append("one thread computes: no other process can be started here")

    def _job(self, memory: int, count: int = 1) -> Job:
        """For ``count`` workers, of whom each has so much memory."""
        limit = part_limit(self.plan.bytes_written)
        ahead = memory // 2 if self.ahead else 0
        connections = self.options.connections and max(1, self.options.connections // count)
        return Job(
            self.sources, self.paths, self.plan.randomness, memory - ahead, limit, self.hashes, ahead, connections
        )

    def _is_done(self, task: Task, finished: Finished) -> bool:
        keys = [k for k, _ in task.targets] + operand_keys(self.plan, task.computing)
        return all(p.number in finished.parts for p in task.parts) and all(k in finished.sums for k in keys)

    def _work(self, pool: Medium, finished: Finished, signals: _Signals) -> None:
        self.sums = finished.sums
        jobs = [t for t in self.tasks if t.computing >= 0 and not self._is_done(t, finished)]
        self.done = finished.parts
        tasks = self._remaining([t for t in self.tasks if t.computing < 0], finished)
        upcoming = Upcoming(tasks, self.plan, pool, self.ahead)
        # Long tasks first, or the last one would keep all others waiting; the rest in the order of the files.
        long = sum([t.nbytes for t in jobs]) // (4 * self.options.computers)
        jobs.sort(key=lambda t: -t.nbytes if t.nbytes > long else 0)
        self.computing = deque(jobs)
        memory = max(self.options.memory - self.ahead, _SMALLEST_ARENA)
        workers = min(self.options.movers, memory // _SMALLEST_ARENA, len(upcoming))
        hands = [w.do for w in self.crew.workers] if self.crew else []
        if jobs and not hands:
            job = self._job(max(memory // 2, _COMPUTING_MEMORY))
            hands = [ComputeWorker(job, tensor_draws(job.randomness), pool, self.stop).serve]
        duties: list[tuple[str, int, Callable[[], Any], Callable[[Any], None]]] = [
            ("foreman", i, self.computing.popleft, partial(self._compute, work)) for i, work in enumerate(hands)
        ]
        for i in range(workers):
            carrier = Mover(self.sources, self.paths, pool, memory // workers, self.stop)
            self.carriers.append(carrier)
            duties.append(("worker", i, upcoming.popleft, partial(self._move, carrier)))
        threads = [
            threading.Thread(target=self._work_off, args=(take, do), name=f"{name}-{i}", daemon=True)
            for name, i, take, do in duties
        ]
        with signals.later():  # an interrupted `start` leaves a thread that runs and cannot be joined
            for thread in threads:
                thread.start()
                self.threads.append(thread)
        with ThreadPoolExecutor(1, thread_name_prefix="journal") as recorder:
            try:
                self._watch(pool, recorder)
            except BaseException:
                self.stop.set()  # a destination that sends what it records lets go
                raise

    def _remaining(self, tasks: Sequence[Task], finished: Finished) -> Iterator[Task]:
        """What is still to do; the checksums of tensors that an earlier run wrote without them, too."""
        for task in tasks:
            done = sum([p.number in finished.parts for p in task.parts])
            targets = [(key, target) for key, target in task.targets if key not in finished.sums]
            if done < len(task.parts) or targets:
                parts = [p for p in task.parts if p.number not in finished.parts] if done else task.parts
                yield Task(parts, targets)

    def _work_off(self, take: Callable[[], _T], do: Callable[[_T], None]) -> None:
        """The life of a thread: carry out one task after the other until there is none left."""
        try:
            while not self.stop.is_set():
                try:
                    task = take()
                except IndexError:
                    break
                do(task)
        except Stopped:
            pass
        except BaseException as e:  # noqa: BLE001 - raised again by the thread that called run
            self.failures.append(e)
            self.stop.set()
            self.halt()
        self.ledger.wake.set()

    def _compute(self, work: Serve, task: Task) -> None:
        """Order one tensor from a process."""
        parts = {p.number: p for p in task.parts}
        unit, done = self.plan.units[task.computing], parts.keys() & self.done
        work(order(unit, task.computing, task, done), partial(self._heard, task, parts))

    def _heard(self, task: Task, parts: Mapping[int, Part], answer: Answer) -> None:
        """Something is done of a task."""
        if "unsynced" in answer:
            self.unsynced = True
        elif self.stop.is_set():
            raise Stopped
        elif "part" in answer:
            self.ledger.post(_Record([parts[answer["part"]]]), self.stop)
        else:
            self.computed_at[task.computing] = answer["at"]
            if "end" in answer:
                self.computed[0] += answer["read"]
                self.computed[1] += answer["written"]
                self.ledger.post(_Record([], answer["sums"]), self.stop)

    def _move(self, carrier: Mover, turn: Turn) -> None:
        with turn.taken():
            self._do(carrier, turn)

    def _do(self, carrier: Mover, turn: Turn) -> None:
        task = turn.task
        carrier.sums = sums = Sums(task.targets) if task.targets else None
        if turn.is_whole:
            moves, checks = turn.arranged()
            carrier.carry(moves)
            for step in checks:
                check(step, carrier)
            self._close(_Record(task.parts), sums, carrier, last=True)
            return
        for i, part in enumerate(task.parts):
            if part.carried >= 0:
                self._carry(part.carried, carrier)
            carrier.carry(part.items)
            for c in part.checks:
                check(c.step, carrier, c.first)
            self._close(_Record([part]), sums, carrier, last=i == len(task.parts) - 1)
        if not task.parts:  # written by an earlier run that made no manifest
            self._close(_Record([]), sums, carrier, last=True)

    def _links(self, output: Output) -> bool:
        """Not into a spool: its bytes are there for a moment, and those of a source may not be given back."""
        return output.link and not self.destination.spools

    def _carry(self, number: int, carrier: Mover) -> None:
        """Copy a companion file, or link it."""
        output, path = self.plan.outputs[number], self.paths[number]
        if self._links(output):
            how = share(output.carried, path)
            self.shared.append(how)
            if how:
                return
            create(path, output.size)
            carrier.pool.expect_writes(path)
        carrier.copy_file(output.carried, number, output.size)

    def _close(self, record: _Record, sums: Sums | None, carrier: Mover, *, last: bool) -> None:
        """Take the checksums forward to the end of a part, and pass the part on."""
        if sums is not None:
            carrier.arena.reset()
            buffer = carrier.arena.take(min(_MIB, carrier.arena.size)).data
            sums.part_done(carrier.read_back, buffer)
            if last:
                record.sums = sums.finish(carrier.read_back, buffer)
        self.ledger.post(record, self.stop)

    def _watch(self, pool: Medium, recorder: ThreadPoolExecutor) -> None:
        """Show progress and have finished parts recorded, until the workers have ended."""
        ledger = self.ledger
        saving: Future[None] | None = None
        shown = recorded = time.monotonic()
        while True:
            running = any(t.is_alive() for t in self.threads)
            if running:
                ledger.wake.wait(_TICK)
                ledger.wake.clear()
            now = time.monotonic()
            for record in ledger.take():
                self.unrecorded.append(record)
                self.sums.update(record.sums)
                for part in record.parts:
                    self._file_progress(part)
            if now - shown >= _TICK:
                shown = now
                moved = sum([c.bytes_written for c in self.carriers])
                self._show(self.skipped + moved + sum(list(self.computed_at.values())))
            if saving is not None and saving.done():
                saving.result()
                saving = None
            held = sum([p.nbytes for r in self.unrecorded for p in r.parts])
            if saving is None and self.unrecorded and (held >= ledger.batch or now - recorded >= _RECORD_EVERY):
                records, self.unrecorded = self.unrecorded, []
                saving = recorder.submit(self._record, pool, records)
                saving.add_done_callback(lambda _: ledger.wake.set())
                recorded = now
            if not running:
                break
        if saving is not None:
            saving.result()
        if self.failures:
            raise self.failures[0]
        self._dismiss(now=False)

    def _record(self, pool: Medium, records: Sequence[_Record]) -> None:
        """Make parts durable, and have them remembered."""
        parts = [p for r in records for p in r.parts]
        self.destination.record(pool, parts, {k: v for r in records for k, v in r.sums.items()})
        self.recorded += len(parts)
        self.ledger.saved(sum([p.nbytes for p in parts]))

    # -- finish

    def _finish(self, pool: Medium) -> None:
        """Everything durable and checked; only the name is missing."""
        if CRC32 in self.hashes:
            self._write_summed(pool)
        self.destination.settle(pool, self.paths)
        self._check_sources()
        for name, late_files in self.options.late_files.items():
            self._write_small(pool, name, late_files(self.sums))
        if self.options.manifest:
            self._write_manifest(pool)
        self.destination.complete()
        self._show(self.plan.bytes_written)
        if self.options.verify is not None:
            self.verifying = True
            began = time.perf_counter()
            try:
                self._verify(self.options.verify)
            finally:
                # A source that changed while it was read again is the reason for any difference.
                self._check_sources()
            self.verify_seconds = time.perf_counter() - began
            self.verifying = False

    def _write_summed(self, pool: Medium) -> None:
        """Write the literal bytes of files that have checksums of tensors among them, which are known by now."""
        places = [array("Q") for _ in self.paths]
        sums = [array("I") for _ in self.paths]
        parts: list[list[tuple[int, int, int]]] = [[] for _ in self.paths]
        for u, unit in enumerate(self.plan.units):
            for t, target in enumerate(unit.stored_tensors):
                output = self.plan.outputs[target.file]
                if output.shared:
                    parts[target.file].append((target.offset, target.nbytes, int(self.sums[sum_key(u, t, CRC32)], 16)))
                for at in output.checksums.get(target.offset, ()):
                    places[target.file].append(at)
                    sums[target.file].append(int(self.sums[sum_key(u, t, CRC32)], 16))
        for path, output, at_, sum_, held in zip(self.paths, self.plan.outputs, places, sums, parts, strict=True):
            if output.summed:
                found = dict(zip(at_, sum_, strict=True))
                held.sort()
                for first, size, into in output.shared:
                    inner = held[bisect_left(held, (first,)) : bisect_left(held, (first + size,))]
                    found |= dict.fromkeys(into, joined_crc32(first, size, inner))
                _write_literals(pool, path, _filled(output.literals, found))

    def _verify(self, verify: Callable[[Place, Advance], None]) -> None:
        """Show how far another thread is with it. An interrupt ends that thread when it next says how far it is."""
        meter, total, phased = _Meter(self.stop), self.plan.bytes_written, isinstance(self.progress, PhasedProgress)
        if isinstance(self.progress, PhasedProgress):
            self.progress.phase("verify", total, 0)
            self.shown = 0
        with ThreadPoolExecutor(1, thread_name_prefix="verify") as thread:
            try:
                verifying = thread.submit(verify, self.destination.readable(), meter.advance)
                while not wait([verifying], _TICK).done:
                    if phased:
                        self._show(min(meter.done, total))
            except BaseException:
                self.stop.set()
                stop_reading()
                raise
        verifying.result()
        if phased:
            self._show(total)

    def _dismiss(self, *, now: bool) -> None:
        """Let the processes go, or kill them, and wait for their foremen, who end with them."""
        if self.crew:
            self.crew.dismiss(now=now)
        for thread in self.threads:
            thread.join()
        if self.crew:
            self.crew.close()
            self.crew = None

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
        self._dismiss(now=True)
        again = not isinstance(error, CkptError) or isinstance(error, OutputError | SourceReadError | AccessError)
        if self.verifying and isinstance(error, Exception):
            again = False
        if again and self.destination.can_record and not (pool.unsynced or self.unsynced):
            with contextlib.suppress(CkptError):
                self._record(pool, [*self.unrecorded, *self.ledger.take()])
        if self.destination.spools and isinstance(error, OutputError) and not error.hint:
            spool = str(self.destination.partial)
            if any(w.startswith(spool) for w in error.where):
                error.hint = "free space there, or set TMPDIR to a directory on a larger disk"
        if not again or not self.recorded or not self.destination.resumes:
            self.destination.discard()
            return error
        self.destination.close()
        return _resumable(error)


def _write_literals(pool: Medium, path: str, literals: Iterable[tuple[int, bytes]]) -> None:
    for offset, data in literals:
        pool.write(path, offset, memoryview(data))


def _filled(literals: Iterable[tuple[int, bytes]], sums: Mapping[int, int]) -> Iterator[tuple[int, bytes]]:
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


def _resumable(error: BaseException) -> BaseException:
    """The error with the way on in its hint."""
    how = "rerun with --resume to continue"
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
        """From now on the run is as good as finished: let it."""
        self._held = True

    @contextlib.contextmanager
    def later(self) -> Iterator[None]:
        """What comes meanwhile ends the run afterwards."""
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
