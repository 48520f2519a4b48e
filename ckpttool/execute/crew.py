"""Workers that compute: forked processes, because threads that work on small arrays wait for the interpreter.

A worker is forked before any thread is started; it shares the plan with its parent, is told numbers of tasks through
a pipe, and answers with JSON lines:

    -> {"task": 7, "done": [31]}                        do this task; these of its parts are written already
    <- {"part": 32}                                     this part is written
    <- {"end": {"0": "<hash>"}, "sums": {...}, ...}      the task is finished
    <- {"error": ["CorruptError", "what", ["where"], "hint"]}

A worker whose parent is gone ends; a worker that ends by itself is an error of the run.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from ckpttool import errors
from ckpttool.errors import CkptError, OutputError
from ckpttool.execute.files import SourceReadError

Answer = dict[str, Any]
Serve = Callable[[dict[str, Any]], Iterator[Answer]]
"""What a worker does with an order: yields its answers."""

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT = 8 << 20
"""Bytes of freed memory that a worker keeps."""


def can_fork() -> bool:
    """Whether forking is safe here: no other thread could hold a lock at that moment."""
    return sys.platform == "linux" and threading.active_count() == 1


class Worker:
    """The parent's side of one worker."""

    def __init__(self, pid: int, orders: int, answers: int) -> None:
        self.pid = pid
        self._orders = orders
        self._answers = os.fdopen(answers, "rb")

    def do(self, order: dict[str, Any]) -> Iterator[Answer]:
        """Have an order carried out. Raises what the worker raised, OutputError when it died."""
        line = json.dumps(order).encode() + b"\n"
        try:
            while line:
                line = line[os.write(self._orders, line) :]
        except OSError:
            raise self._lost() from None
        while True:
            try:
                answer = json.loads(self._answers.readline())
            except (ValueError, OSError):
                raise self._lost() from None
            if "error" in answer:
                raise _revived(*answer["error"])
            yield answer
            if "end" in answer:
                return

    def _lost(self) -> CkptError:
        how = ""
        with contextlib.suppress(ChildProcessError):
            _, status = os.waitpid(self.pid, 0)
            self.pid = 0
            if os.WIFSIGNALED(status):
                number = os.WTERMSIG(status)
                how = f": killed by {signal.Signals(number).name}"
                if number == signal.SIGKILL:
                    how += " (out of memory?)"
        hint = "if memory was short, use fewer --workers or less --memory"
        return OutputError(f"a worker process ended{how}", hint=hint)

    def end(self, *, now: bool) -> None:
        """Let the worker finish, or kill it; then wait for it."""
        with contextlib.suppress(OSError):
            os.close(self._orders)
        if self.pid:
            if now:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            self.pid = 0

    def forget(self) -> None:
        """In a sibling: close the ends that belong to the parent."""
        os.close(self._orders)
        self._answers.close()

    def close(self) -> None:
        """After the thread that listens has ended."""
        self._answers.close()


def hire(count: int, serve: Callable[[], Serve]) -> list[Worker]:
    """Fork workers. ``serve`` is called in each of them and makes what carries out its orders."""
    workers: list[Worker] = []
    for _ in range(count):
        order_read, order_write = os.pipe()
        answer_read, answer_write = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            for other in workers:  # an end that a sibling holds would keep it from seeing the parent go
                other.forget()
            os.close(order_write)
            os.close(answer_read)
            _live(parent, order_read, answer_write, serve)
        os.close(order_read)
        os.close(answer_write)
        workers.append(Worker(pid, order_write, answer_read))
    return workers


def _live(parent: int, orders: int, answers: int, serve: Callable[[], Serve]) -> NoReturn:
    """A worker's life. It never returns into the program that it was forked from."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            # Arrays of a chunk come and go; glibc would return each of them to the system, and fault it in again.
            libc.mallopt(_M_MMAP_THRESHOLD, _KEPT)
            libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)
        if os.getppid() != parent:
            os._exit(1)
        work = serve()
        with os.fdopen(orders, "rb") as lines, os.fdopen(answers, "wb") as out:
            for line in lines:
                try:
                    for answer in work(json.loads(line)):
                        out.write(json.dumps(answer).encode() + b"\n")
                        out.flush()
                except Exception as e:  # noqa: BLE001 - raised again by the parent
                    out.write(json.dumps({"error": _told(e)}).encode() + b"\n")
                    out.flush()
        status = 0
    except BrokenPipeError:
        pass
    finally:
        os._exit(status)


def _told(e: Exception) -> list[Any]:
    if isinstance(e, CkptError):
        return [type(e).__name__, e.what, list(e.where), e.hint]
    import traceback

    return ["", "".join(traceback.format_exception(e)), [], None]


def _revived(kind: str, what: str, where: list[str], hint: str | None) -> Exception:
    found = SourceReadError if kind == SourceReadError.__name__ else getattr(errors, kind, None) if kind else None
    if found is None:
        return RuntimeError(f"in a worker process:\n{what}")
    error: Exception = found(what, where=where, hint=hint)
    return error
