"""The process that runs one command: its standard streams, what Ctrl-C does at any moment, and how it ends.

Imports next to nothing, so that Ctrl-C is answered from the first moment on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Literal, TextIO

_AGAIN = 0.01
"""Seconds after which an interrupt is tried again."""
_open_for_good: list[object] = []
"""They close when nothing refers to them."""


def open_streams() -> None:
    """Give what is closed of stdin and stderr to /dev/null, and let stdout be what cannot be written.

    Otherwise the first files that are opened get these numbers, and messages are written into data.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # what is opened now gets the lowest number that is free: this one
            if number == 1:
                _open_unwritable()
            else:
                os.open(os.devnull, os.O_WRONLY if number else os.O_RDONLY)
    # Python has set to None what was closed when it started.
    sys.stdin = sys.stdin or _stream(0, "r")
    sys.stdout = sys.stdout or _stream(1, "w")
    sys.stderr = sys.stderr or _stream(2, "w")


def _open_unwritable() -> None:
    """Open what fails when it is written, also as /dev/stdout: a queue of the kernel's events."""
    import select

    if sys.platform == "darwin":
        _open_for_good.append(select.kqueue())
    else:
        _open_for_good.append(select.epoll())


def _stream(number: int, mode: Literal["r", "w"]) -> TextIO:
    return open(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False)


def flush(stream: TextIO) -> OSError | None:
    """Write what is left in a stream. Returns why that cannot be; then nothing is left."""
    try:
        stream.flush()
    except OSError as e:
        silence(stream)
        return e
    return None


def silence(stream: TextIO) -> None:
    """What is left in a stream goes nowhere, and Python does not complain about that when it ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Print an answer that decides the exit code, too: the code stays where the reader stops early (`| head`)."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        silence(sys.stdout)


def say(text: str) -> None:
    """Lines on stderr. That they cannot be written changes nothing about how the command ends."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")


class Interrupts:
    """Ctrl-C: ends the process at once while it loads, raises KeyboardInterrupt in a command, and is too late after it.

    A module that is interrupted while it is imported may say anything; so the exception waits until none is. During
    the run of a plan its own handler decides.
    """

    def __init__(self) -> None:
        self._loading = self._over = self._postponed = False
        self.tick: Callable[[], None] | None = None
        """What the timer calls that is not set for an interrupt."""

    def install(self) -> None:
        """Answer from now on, unless the process was started to ignore Ctrl-C (in the background of a script)."""
        with contextlib.suppress(ValueError):  # not in the main thread: not ours
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                signal.signal(signal.SIGINT, self)
                signal.signal(signal.SIGALRM, self)
        self._loading, self._over = True, False

    def allow(self) -> None:
        """The command begins: from now on there may be something to clean up."""
        self._loading = False

    def ignore(self) -> None:
        """All is done; only the interpreter has to end, which would leave Ctrl-C to the system."""
        self._over = True
        if signal.getsignal(signal.SIGINT) is self:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    @property
    def answers_timer(self) -> bool:
        """Whether the timer's signal comes here, and does not end the process."""
        return signal.getsignal(signal.SIGALRM) is self

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._over:
            return
        if number == signal.SIGALRM and not self._postponed:
            if self.tick is not None:
                self.tick()
            return
        if self._loading:
            with contextlib.suppress(OSError):
                os.write(2, b"interrupted\n")
            os._exit(130)
        self._postponed = _imports(frame)
        if self._postponed:
            signal.setitimer(signal.ITIMER_REAL, _AGAIN)
        else:
            raise KeyboardInterrupt


interrupts = Interrupts()
"""The one handler of this process."""


def _imports(frame: FrameType | None) -> bool:
    """Whether a module is being imported."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
