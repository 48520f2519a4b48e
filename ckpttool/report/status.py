"""A line on a terminal while a command works and has nothing to show yet: ``reading headers: 37 of 163 ... 2 s``.

It appears after a moment, is drawn by a timer's signal and not by a thread (a process of several threads cannot fork
its workers), and is gone when something is printed. Nothing is imported or started for a command that is quick.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

from ckpttool.core.activity import activity

AFTER_S = 0.25
"""Seconds after which the line appears, and without output appears once more."""
EVERY_S = 0.1
"""Seconds between two drawings."""


class _StatusLine:
    """The line at the bottom of the terminal."""

    def __init__(self) -> None:
        self.started = 0.0
        self.quiet_since = 0.0
        self.on = self.drawn = False
        self.dim: Callable[[str], str] = str

    def tick(self) -> None:
        """Draw it, where nothing was printed for a while.

        Imports nothing: the signal may come within an import, which Python 3.11 ends with a KeyError then.
        """
        now = time.monotonic()
        if not self.on or now - self.quiet_since < AFTER_S or not activity.what:
            return
        with contextlib.suppress(OSError):
            columns = os.get_terminal_size(2).columns or 80
            said = f"{activity} ... {now - self.started:.0f} s"[: columns - 1]
            os.write(2, f"\r\x1b[K{self.dim(said)}".encode())
            self.drawn = True

    def clear(self) -> None:
        """Make room for what is printed now."""
        if self.on:  # first, because the timer may interrupt at any place below
            self.quiet_since = time.monotonic()
        if self.drawn:
            self.drawn = False
            with contextlib.suppress(OSError):
                os.write(2, b"\r\x1b[K")


_line = _StatusLine()
clear = _line.clear


tick = _line.tick


def start() -> bool:
    """Show it from now on, where stderr is a terminal that can erase a line; returns whether it is.

    The process must answer SIGALRM with ``tick``.
    """
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") in ("", "dumb"):
        return False
    # Never in ``tick``: it may interrupt the import of the same module.
    from ckpttool.report.style import DIM, coloured, styled

    _line.dim = partial(styled, code=DIM) if coloured(sys.stderr) else str
    activity.begin("starting")
    _line.on, _line.started = True, time.monotonic()
    _line.quiet_since = _line.started
    signal.setitimer(signal.ITIMER_REAL, AFTER_S, EVERY_S)
    return True


def stop() -> None:
    """Erase it for good: the command ends, must be quiet, or draws a bar."""
    if _line.on:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _line.clear()
        _line.on = False
