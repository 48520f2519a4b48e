"""Workers that compute: processes, because threads that work on small arrays wait for the interpreter.

A worker is told what to do through a pipe, a JSON line for each order, and answers with JSON lines:

    -> {"unit": ..., "first": 31, "done": [31]}          what ``worker`` makes of them is its own business
    <- {"part": 32}
    <- {"end": true, ...}                                the order is carried out
    <- {"error": ["CorruptError", "what", ["where"], "hint", ""]}

A process with one thread forks its workers: they are there at once. Where there are more threads (a notebook, a
program around the Python API) one of them could hold a lock at that moment, and nobody would open it in the fork. Then
a helper forks the workers: a fresh interpreter that has one thread and knows the job from a line of JSON. ``__main__``
is imported by neither.

A worker whose parent is gone ends; a worker that ends by itself is an error of the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

from ckpttool.errors import CkptError, OutputError
from ckpttool.execute.error_data import error_from_data, error_to_data
from ckpttool.storage import system
from ckpttool.version import __version__

Order = dict[str, Any]
Answer = dict[str, Any]
Serve = Callable[[Order, Callable[[Answer], None]], None]
"""Carries out an order, and tells the answers one after the other; the last one has an ``end``."""

_LOOK = 0.5
"""Seconds between two looks at a parent, where the system does not say that it has ended."""
_MOMENTS = 5
_KEPT = 8 << 20
"""Bytes of freed memory that a worker keeps."""


def can_fork() -> bool:
    """Whether forking is safe here: no other thread, of whatever library, could hold a lock at that moment."""
    threads = 0
    for _ in range(_MOMENTS):
        try:
            threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
        except OSError:
            threads = threading.active_count()
        if threads == 1 or threading.active_count() > 1:
            break
        time.sleep(0.001)  # for the system, a thread that was joined just now may not have ended
    return sys.platform == "linux" and threads == 1


class _WorkerParent(Protocol):
    """The process that has forked the workers."""

    def status(self, number: int) -> int:
        """Wait for a worker that has ended. Returns its exit code, or minus the signal that killed it."""

    def end(self, *, now: bool) -> None:
        """Wait until all have ended; with ``now``, kill them."""

    def close(self) -> None:
        """After the threads that ask for a ``status`` have ended."""


class WorkerProcess:
    """The side of one worker that gives it orders."""

    def __init__(self, number: int, parent: _WorkerParent, orders: int, answers: int) -> None:
        self._number = number
        self._parent = parent
        self._orders = orders
        self._answers = os.fdopen(answers, "rb")

    def do(self, order: Order, tell: Callable[[Answer], None]) -> None:
        """Have an order carried out. Raises what the worker raised, OutputError when it died."""
        try:
            _write(self._orders, order)
        except OSError:
            raise self._lost() from None
        while True:
            try:
                answer = json.loads(self._answers.readline())
            except (ValueError, OSError):
                raise self._lost() from None
            if "error" in answer:
                raise error_from_data(answer["error"], whose="a worker process")
            tell(answer)
            if "end" in answer:
                return

    def _lost(self) -> CkptError:
        how, status = "", self._parent.status(self._number)
        if status < 0:
            how = f": killed by {signal.Signals(-status).name}"
            if status == -signal.SIGKILL:
                how += " (out of memory?)"
        hint = "if memory was short, use fewer --workers or less --memory"
        return OutputError(f"a worker process ended{how}", hint=hint)

    def dismiss(self) -> None:
        """There will be no more orders."""
        with contextlib.suppress(OSError):
            # Not the end of the pipe alone: a process that the program around us has forked may hold a copy of it.
            _write(self._orders, None)

    def close(self) -> None:
        """After the thread that listens has ended. Waits until the worker has ended, too."""
        with contextlib.suppress(OSError):
            os.close(self._orders)
        with contextlib.suppress(OSError):
            self._answers.read()
        self._answers.close()


class ProcessPool:
    """Workers, and the process that they are children of."""

    def __init__(self, workers: list[WorkerProcess], parent: _WorkerParent) -> None:
        self.workers = workers
        self._parent = parent

    def dismiss(self, *, now: bool) -> None:
        """Let the workers finish, or kill them; then wait for them."""
        for worker in () if now else self.workers:
            worker.dismiss()
        self._parent.end(now=now)

    def close(self) -> None:
        """After the threads that listen have ended."""
        for worker in self.workers:
            worker.close()
        self._parent.close()


def spawn(
    count: int, job: dict[str, Any] | None, serve: Callable[[], Serve], entry: str, keep: Sequence[int]
) -> ProcessPool | None:
    """Start workers; None where that is not possible.

    ``serve`` is called in each of them and makes what carries out its orders. Where this process cannot be forked,
    ``entry`` ("module:function") is called in a fresh interpreter, and calls ``run_helper``, which makes it of ``job``.
    A job that only a fork can know is None. ``keep`` are descriptors that stay open in all of them: locks.
    """
    pipes = [(*os.pipe(), *os.pipe()) for _ in range(count)]
    ends = [(order_read, answer_write) for order_read, _, _, answer_write in pipes]
    ours = [fd for _, order_write, answer_read, _ in pipes for fd in (order_write, answer_read)]
    parent: _WorkerParent | None = None
    try:
        if can_fork():
            parent = _ForkedWorkers(ends, ours, serve)
        elif job is not None:
            parent = _HelperProcess.start(ends, job, entry, keep)
        elif sys.platform == "linux" and threading.active_count() == 1:
            with warnings.catch_warnings():  # threads of numpy's library, which knows how to be forked
                warnings.simplefilter("ignore", DeprecationWarning)
                parent = _ForkedWorkers(ends, ours, serve)
    finally:
        for fd in [fd for pair in ends for fd in pair] + ([] if parent else ours):
            os.close(fd)
    if parent is None:
        return None
    return ProcessPool([WorkerProcess(i, parent, write, read) for i, (_, write, read, _) in enumerate(pipes)], parent)


class _ForkedWorkers:
    """Workers that are children of this process."""

    def __init__(self, ends: Sequence[tuple[int, int]], others: Sequence[int], serve: Callable[[], Serve]) -> None:
        self._status: dict[int, int] = {}
        self.pids: list[int] = []
        here = os.getpid()
        for mine in ends:
            pid = os.fork()
            if not pid:
                # An end that a sibling holds would keep it from seeing the parent go.
                for fd in [*[fd for pair in ends if pair != mine for fd in pair], *others]:
                    os.close(fd)
                _live(here, *mine, serve)
            self.pids.append(pid)

    def status(self, number: int) -> int:
        if number not in self._status:
            try:
                _, found = os.waitpid(self.pids[number], 0)
                self._status[number] = os.waitstatus_to_exitcode(found)
            except ChildProcessError:  # the program around us waits for all children
                self._status[number] = 0
        return self._status[number]

    def end(self, *, now: bool) -> None:
        for number, pid in enumerate(self.pids):
            if now and number not in self._status:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.status(number)

    def close(self) -> None:
        """Does nothing: only the pipes of the workers are open."""


class _HelperProcess:
    """Workers that are children of a fresh interpreter, which says how they ended."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._known: dict[int, int] = {}
        self._asking = threading.Lock()

    @classmethod
    def start(
        cls, ends: Sequence[tuple[int, int]], job: dict[str, Any], entry: str, keep: Sequence[int]
    ) -> _HelperProcess | None:
        """Start the interpreter; None when it cannot start, is not an interpreter, or imports another ckpttool."""
        if sys.platform != "linux" or not sys.executable or getattr(sys, "frozen", False):
            return None
        module, function = entry.split(":")
        path = [str(p) for p in sys.path]
        code = f"import sys; sys.path[:] = {path!r}; from {module} import {function}; {function}()"
        try:
            process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-W", "ignore", "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[*[fd for pair in ends for fd in pair], *keep],
                process_group=0,  # the parent decides what Ctrl-C means
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
        except OSError:
            return None
        helper = cls(process)
        try:
            with contextlib.suppress(OSError):
                helper.tell({"parent": os.getpid(), "ends": ends, "job": job})
            if helper.hears() == {"ready": __version__}:
                return helper
        except BaseException:
            helper.end(now=True)
            helper.close()
            raise
        helper.end(now=True)
        helper.close()
        return None

    def tell(self, what: dict[str, Any]) -> None:
        stdin = self._process.stdin
        if stdin is not None:
            stdin.write(json.dumps(what).encode() + b"\n")
            stdin.close()

    def hears(self) -> Any:
        """The next line of the helper, None when there is none."""
        stdout = self._process.stdout
        try:
            return json.loads(stdout.readline()) if stdout is not None else None
        except ValueError:
            return None

    def status(self, number: int) -> int:
        with self._asking:
            while number not in self._known:
                said = self.hears()
                if said is None:
                    return self._process.wait()
                self._known[said["ended"]] = said["status"]
            return self._known[number]

    def end(self, *, now: bool) -> None:
        if now:
            self._process.kill()  # and the kernel kills its children
        self._process.wait()

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def run_helper(server: Callable[[dict[str, Any]], Callable[[], Serve]]) -> NoReturn:
    """The life of a helper: reads the job, forks the workers and waits for them. ``server`` makes them of the job."""
    said = json.loads(sys.stdin.buffer.readline())
    _die_with(said["parent"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ends = [(orders, answers) for orders, answers in said["ends"]]
    forked = _ForkedWorkers(ends, (), server(said["job"]))
    for fd in [fd for pair in ends for fd in pair]:
        os.close(fd)

    def say(what: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            _write(1, what)

    say({"ready": __version__})
    for _ in ends:
        pid, status = os.wait()
        say({"ended": forked.pids.index(pid), "status": os.waitstatus_to_exitcode(status)})
    os._exit(0)


def _write(fd: int, what: object) -> None:
    line = json.dumps(what).encode() + b"\n"
    while line:
        line = line[os.write(fd, line) :]


def _die_with(parent: int) -> None:
    """Be killed when the parent ends."""
    if not system.killed_with_parent(signal.SIGKILL):
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def _watch(parent: int) -> None:
    """End this process when its parent has ended, where the system does not do that."""
    while os.getppid() == parent:
        time.sleep(_LOOK)
    os._exit(1)


def _live(parent: int, orders: int, answers: int, serve: Callable[[], Serve]) -> NoReturn:
    """A worker's life. It never returns into the program that it was forked from."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _die_with(parent)
        # Arrays of a chunk come and go; glibc would return each of them to the system, and fault it in again.
        system.keep_freed(_KEPT)
        work = serve()

        def tell(answer: Answer) -> None:
            _write(answers, answer)

        with os.fdopen(orders, "rb") as lines:
            for line in lines:
                order = json.loads(line)
                if order is None:
                    break
                try:
                    work(order, tell)
                except BrokenPipeError:
                    raise
                except Exception as e:  # noqa: BLE001 - raised again by the parent
                    tell({"error": error_to_data(e)})
        status = 0
    except BrokenPipeError:
        pass
    finally:
        os._exit(status)
