"""The threads and processes of this machine that carry out tasks of a plan.

Threads move bytes. Tensors that are computed go to processes, each with a thread here that gives it orders. What is
finished waits in a queue; the calling thread shows how far everything is, and has another one make finished parts
durable and remember them.

A run has one workforce for all its tasks. A machine that does shares of a run has one for all of them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from ckpttool.core.plan import Output, Plan
from ckpttool.execute.blocks import Mover
from ckpttool.execute.checks import check
from ckpttool.execute.compute_worker import ComputeJob, ComputeWorker, edges, is_known, order, server
from ckpttool.execute.draws import tensor_draws
from ckpttool.execute.files import Fence, Medium, Stopped, create, share
from ckpttool.execute.hashing import TensorHashes
from ckpttool.execute.journal import Finished
from ckpttool.execute.options import RunOptions
from ckpttool.execute.schedule import Part, Task, operand_keys, part_limit
from ckpttool.execute.upcoming import Turn, Upcoming
from ckpttool.execute.worker_pool import Answer, ProcessPool, Serve, spawn

_T = TypeVar("_T")

_Duty = tuple[str, Callable[[], Any], Callable[[Any], None]]
"""A thread's name, the function that gives its next task, and the one that does it."""

_MIB = 1 << 20
_SMALLEST_ARENA = 64 << 10
_COMPUTING_MEMORY = 8 << 20
"""Least memory for a process that computes: a chunk of a few operands, and a stretch of the result."""
_ENTRY = "ckpttool.execute.compute_worker:main"
TICK = 0.2
"""Seconds between two looks at how far it is: often enough to look alive, too seldom to hold up the workers."""
_SPOOLED = 256 << 20
"""Most bytes that are written to a spool and not recorded."""
_RECORD_EVERY = 2.0
"""Seconds after which finished parts are recorded, however few."""


class Watcher(Protocol):
    """Receives the progress of tasks. All but ``record`` are called by the thread that waits for them."""

    def finished(self, parts: Sequence[Part], sums: Mapping[str, str]) -> None:
        """Parts are written, and these checksums known; they will be recorded."""

    def moved(self, nbytes: int) -> None:
        """So many bytes are written by now, since the tasks began."""

    def record(self, pool: Medium, parts: Sequence[Part], sums: Mapping[str, str]) -> None:
        """Make parts durable, and remember them with these checksums. Called in a thread of its own."""


@dataclass(slots=True)
class FinishedParts:
    """Parts that a worker has finished."""

    parts: list[Part]
    sums: dict[str, str] = field(default_factory=dict)


class CompletionQueue:
    """Finished parts on their way to the journal. Workers post, the calling thread takes."""

    def __init__(self, batch: int, most: int) -> None:
        self.batch = batch
        self.wake = threading.Event()
        self._most = most
        self._records: deque[FinishedParts] = deque()
        self._changed = threading.Condition()
        self._unsaved = 0

    def post(self, record: FinishedParts, stop: threading.Event) -> None:
        """Add a record. Waits while so much is unrecorded that a crash now would cost too much."""
        nbytes = sum([p.nbytes for p in record.parts])
        with self._changed:
            self._records.append(record)
            self._unsaved += nbytes
            if self._unsaved >= self.batch:
                self.wake.set()
            while self._unsaved > self._most and not stop.is_set():
                self._changed.wait(0.2)

    def take(self) -> list[FinishedParts]:
        with self._changed:
            records = list(self._records)
            self._records.clear()
            return records

    def saved(self, nbytes: int) -> None:
        with self._changed:
            self._unsaved -= nbytes
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Outlet:
    """The directory of a plan's outputs on this machine."""

    paths: Sequence[str]
    """Paths of the outputs."""
    spools: bool = False
    """Whether they leave this machine when they are recorded."""
    locks: Sequence[int] = ()
    """Descriptors that processes which may write keep open."""
    alone: bool = True
    """Whether nobody else may be at the same files: a file that is copied twice at a time stays what it is, one that is
    linked again is missing for a moment."""
    fence: Fence | None = None
    """See ``Medium``."""

    def links(self, output: Output) -> bool:
        """Not into a spool: its bytes are there for a moment, and those of a source may not be given back."""
        return output.link and not self.spools and self.alone


class Workforce:
    """Carries out tasks of one plan. Call ``start_workers`` while there is one thread, ``carry_out`` for each batch of
    tasks, then ``end``."""

    def __init__(
        self, plan: Plan, outlet: Outlet, options: RunOptions, hashes: Sequence[str], stop: threading.Event
    ) -> None:
        self.plan = plan
        self.outlet = outlet
        self.options = options
        self.hashes = hashes
        self.stop = stop
        self.sources = [s.contents for s in plan.sources]
        self.ahead = 0
        """Bytes of the memory that are for reading ahead from other machines."""
        self.notes: list[str] = []
        self.shared: list[str] = []
        """How each file that may be linked came about: a reflink, a hard link, or "" for a copy."""
        self.unsynced = False
        """A sync has failed in a process that computes; see ``Medium``."""
        self._pool: Medium
        self._worker_pool: ProcessPool | None = None
        self._computed = [0, 0]
        """Bytes that were read and written for computed tensors."""
        self._computed_at: dict[int, int] = {}
        """Bytes that are done of each unit that is computed, while it is computed, too."""
        self._carriers: list[Mover] = []
        self._retired = [0, 0]
        """Bytes that carriers read and wrote that are not there any more."""
        self._threads: list[threading.Thread] = []
        self._failures: list[BaseException] = []
        self._done: Collection[int] = ()
        self._unrecorded: list[FinishedParts] = []
        total = plan.bytes_written
        batch, most = max(_MIB, min(256 * _MIB, total // 32)), max(4 * _MIB, total // 12)
        if outlet.spools:  # what is not recorded takes room in the spool
            batch, most = min(batch, _SPOOLED // 4), min(most, _SPOOLED)
        self._ledger = CompletionQueue(batch, most)

    # -- what it has done

    @property
    def bytes_read(self) -> int:
        return self._retired[0] + sum([c.bytes_read for c in self._carriers]) + self._computed[0]

    @property
    def bytes_written(self) -> int:
        return self._retired[1] + sum([c.bytes_written for c in self._carriers]) + self._computed[1]

    @property
    def peak_buffer(self) -> int:
        """Most bytes of buffers in use at one time."""
        return sum([c.arena.peak for c in self._carriers])

    def _moved(self) -> int:
        """Bytes that are written so far, as a bar shows them."""
        moved = self._retired[1] + sum([c.bytes_written for c in self._carriers])
        return moved + sum(list(self._computed_at.values()))

    def unrecorded(self) -> tuple[list[Part], dict[str, str]]:
        """Takes the tasks that are finished and not yet recorded."""
        records = [*self._unrecorded, *self._ledger.take()]
        self._unrecorded = []
        self._ledger.saved(sum([p.nbytes for r in records for p in r.parts]))
        return [p for r in records for p in r.parts], {k: v for r in records for k, v in r.sums.items()}

    # -- processes

    def start_workers(self, tasks: Sequence[Task], finished: Finished) -> None:
        """Start the processes that compute what there is to compute of these tasks."""
        jobs = [t for t in tasks if t.computing >= 0 and not self._is_done(t, finished)]
        if not jobs or self._worker_pool is not None:
            return
        least = 2 * _COMPUTING_MEMORY if self.ahead else _COMPUTING_MEMORY
        memory = max(self.options.memory, least)
        count = max(1, min(self.options.computers, memory // least, len(jobs)))
        job = self._job(memory // count, count)
        known = all(is_known(self.plan.units[t.computing]) for t in jobs)
        self._worker_pool = spawn(count, job.to_json() if known else None, server(job), _ENTRY, self.outlet.locks)
        if self._worker_pool is None and count > 1:
            self.notes.append("computing with one thread: no other process can be started here")

    def _job(self, memory: int, count: int = 1) -> ComputeJob:
        """For ``count`` workers, of whom each has so much memory."""
        limit = part_limit(self.plan.bytes_written)
        ahead = memory // 2 if self.ahead else 0
        connections = self.options.connections and max(1, self.options.connections // count)
        paths = self.outlet.paths
        return ComputeJob(
            self.sources,
            paths,
            self.plan.randomness,
            memory - ahead,
            limit,
            self.hashes,
            ahead,
            connections,
            self.outlet.fence,
        )

    def _is_done(self, task: Task, finished: Finished) -> bool:
        keys = [k for k, _ in task.targets] + operand_keys(self.plan, task.computing)
        return all(p.number in finished.parts for p in task.parts) and all(k in finished.sums for k in keys)

    # -- work

    def carry_out(
        self,
        tasks: Sequence[Task],
        finished: Finished,
        pool: Medium,
        watcher: Watcher,
        undisturbed: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Do what ``finished`` does not say is done. Raises what stopped it.

        While threads are started, ``undisturbed`` keeps signals away.
        """
        self._pool, self._done = pool, finished.parts
        self._threads, self._failures = [], []
        jobs = [t for t in tasks if t.computing >= 0 and not self._is_done(t, finished)]
        moves = Upcoming(self._remaining([t for t in tasks if t.computing < 0], finished), self.plan, pool, self.ahead)
        duties = [*self._computing_duties(jobs, pool), *self._moving_duties(moves, pool)]
        began = self._moved()
        threads = [
            threading.Thread(target=self._work_off, args=(take, do), name=name, daemon=True)
            for name, take, do in duties
        ]
        with undisturbed():  # an interrupted `start` leaves a thread that runs and cannot be joined
            for thread in threads:
                thread.start()
                self._threads.append(thread)
        with ThreadPoolExecutor(1, thread_name_prefix="journal") as recorder:
            try:
                self._watch(watcher, recorder, began)
            except BaseException:
                self.stop.set()  # a destination that sends what it records lets go
                raise
        self._join()

    def _computing_duties(self, jobs: list[Task], pool: Medium) -> Iterator[_Duty]:
        """Duties of the threads that give orders to worker processes."""
        if not jobs:
            return
        # Long tasks first, or the last one would keep all others waiting; the rest in the order of the files.
        long = sum([t.nbytes for t in jobs]) // (4 * self.options.computers)
        jobs.sort(key=lambda t: -t.nbytes if t.nbytes > long else 0)
        waiting = deque(jobs)
        workers = [w.do for w in self._worker_pool.workers] if self._worker_pool else []
        if not workers:
            memory = max(self.options.memory - self.ahead, _SMALLEST_ARENA)
            job = self._job(max(memory // 2, _COMPUTING_MEMORY))
            workers = [ComputeWorker(job, tensor_draws(job.randomness), pool, self.stop).serve]
        for i, work in enumerate(workers[: len(jobs)]):
            yield f"foreman-{i}", waiting.popleft, partial(self._compute, work)

    def _moving_duties(self, moves: Upcoming, pool: Medium) -> Iterator[_Duty]:
        """Duties of the threads that move bytes."""
        memory = max(self.options.memory - self.ahead, _SMALLEST_ARENA)
        count = min(self.options.movers, memory // _SMALLEST_ARENA, len(moves))
        if count != len(self._carriers):
            for carrier in self._carriers:
                self._retired[0] += carrier.bytes_read
                self._retired[1] += carrier.bytes_written
            self._carriers = [
                Mover(self.sources, self.outlet.paths, pool, memory // count, self.stop) for _ in range(count)
            ]
        for i, carrier in enumerate(self._carriers):
            yield f"worker-{i}", moves.popleft, partial(self._move, carrier)

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
        except BaseException as e:  # noqa: BLE001 - raised again by the thread that waits
            self._failures.append(e)
            self.stop.set()
            self._pool.stop()
        self._ledger.wake.set()

    def _compute(self, work: Serve, task: Task) -> None:
        """Order one tensor from a process."""
        parts = {p.number: p for p in task.parts}
        unit, done = self.plan.units[task.computing], parts.keys() & self._done
        files, paths, pages = {f for p in task.parts for f in p.files}, self.outlet.paths, self._pool.held
        held = {f: pages[paths[f]] for f in sorted(files) if paths[f] in pages} if pages else {}
        work(order(unit, task.computing, task, done, held), partial(self._heard, task, parts))

    def _heard(self, task: Task, parts: Mapping[int, Part], answer: Answer) -> None:
        """Something is done of a task."""
        for output, offset, data in edges(answer):  # to be kept here, too
            self._pool.write(self.outlet.paths[output], offset, memoryview(data))
        if "unsynced" in answer:
            self.unsynced = True
        elif self.stop.is_set():
            raise Stopped
        elif "part" in answer:
            self._ledger.post(FinishedParts([parts[answer["part"]]]), self.stop)
        else:
            self._computed_at[task.computing] = answer["at"]
            if "end" in answer:
                self._computed[0] += answer["read"]
                self._computed[1] += answer["written"]
                self._ledger.post(FinishedParts([], answer["sums"]), self.stop)

    def _move(self, carrier: Mover, turn: Turn) -> None:
        with turn.taken():
            self._do(carrier, turn)

    def _do(self, carrier: Mover, turn: Turn) -> None:
        task = turn.task
        carrier.sums = sums = TensorHashes(task.targets) if task.targets else None
        if turn.is_whole:
            moves, checks = turn.arranged()
            carrier.carry(moves)
            for step in checks:
                check(step, carrier)
            self._close(FinishedParts(task.parts), sums, carrier, last=True)
            return
        for i, part in enumerate(task.parts):
            if part.carried >= 0:
                self._carry(part.carried, carrier)
            carrier.carry(part.items)
            for c in part.checks:
                check(c.step, carrier, c.first)
            self._close(FinishedParts([part]), sums, carrier, last=i == len(task.parts) - 1)
        if not task.parts:  # written by an earlier run that made no manifest
            self._close(FinishedParts([]), sums, carrier, last=True)

    def _carry(self, number: int, carrier: Mover) -> None:
        """Copy a companion file, or link it."""
        output, path = self.plan.outputs[number], self.outlet.paths[number]
        if self.outlet.links(output):
            how = share(output.carried, path)
            self.shared.append(how)
            if how:
                return
            create(path, output.size)
            carrier.pool.expect_writes(path)
        carrier.copy_file(output.carried, number, output.size)

    def _close(self, record: FinishedParts, sums: TensorHashes | None, carrier: Mover, *, last: bool) -> None:
        """Take the checksums forward to the end of a part, and pass the part on."""
        if sums is not None:
            carrier.arena.reset()
            buffer = carrier.arena.take(min(_MIB, carrier.arena.size)).data
            sums.part_done(carrier.read_back, buffer)
            if last:
                record.sums = sums.finish(carrier.read_back, buffer)
        self._ledger.post(record, self.stop)

    # -- watching

    def _watch(self, watcher: Watcher, recorder: ThreadPoolExecutor, began: int) -> None:
        """Show progress and have finished parts recorded, until the workers have ended."""
        ledger = self._ledger
        saving: Future[None] | None = None
        shown = recorded = time.monotonic()
        while True:
            running = any(t.is_alive() for t in self._threads)
            if running:
                ledger.wake.wait(TICK)
                ledger.wake.clear()
            now = time.monotonic()
            for record in ledger.take():
                self._unrecorded.append(record)
                watcher.finished(record.parts, record.sums)
            if now - shown >= TICK:
                shown = now
                watcher.moved(self._moved() - began)
            if saving is not None and saving.done():
                saving.result()
                saving = None
            held = sum([p.nbytes for r in self._unrecorded for p in r.parts])
            due = held >= ledger.batch or now - recorded >= _RECORD_EVERY
            if saving is None and self._unrecorded and due:
                records, self._unrecorded = self._unrecorded, []
                saving = recorder.submit(self._record, watcher, records)
                saving.add_done_callback(lambda _: ledger.wake.set())
                recorded = now
            if not running:
                break
        if saving is not None:
            saving.result()
        if self._failures:
            raise self._failures[0]

    def _record(self, watcher: Watcher, records: Sequence[FinishedParts]) -> None:
        parts = [p for r in records for p in r.parts]
        watcher.record(self._pool, parts, {k: v for r in records for k, v in r.sums.items()})
        self._ledger.saved(sum([p.nbytes for p in parts]))

    # -- the end

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()

    def end(self, *, now: bool) -> None:
        """Let the processes go, or kill them, and wait for their foremen, who end with them."""
        if self._worker_pool:
            self._worker_pool.dismiss(now=now)
        self._join()
        if self._worker_pool:
            self._worker_pool.close()
            self._worker_pool = None
