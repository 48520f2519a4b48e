"""Progress of a run: a bar on a terminal and in a notebook, elsewhere a line on stderr every ten seconds."""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
from abc import abstractmethod
from collections.abc import Iterator
from html import escape
from importlib import import_module
from math import exp
from typing import TYPE_CHECKING, Any

from ckpttool.core.activity import activity
from ckpttool.core.words import short
from ckpttool.errors import plain
from ckpttool.report import status
from ckpttool.report.text import message

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from ckpttool.execute import Progress

REFRESH_S = 0.1
"""Seconds between two drawings of the bar."""
PATIENCE_S = 0.3
"""Seconds before a bar appears."""
LINE_S = 10.0
"""Seconds between two lines where there is no terminal."""
_DOING = {"read": "reading", "write": "writing", "verify": "verifying"}
"""What a phase is called while there is no bar yet."""
SMOOTH_S = 10.0
"""Seconds after which what was done counts a third (1 / e) for the rate."""


def progress(*, quiet: bool, notes: bool = True, label: str = "") -> Progress:
    """What shows how far the run is: nothing when ``quiet``, a bar on a terminal and in a notebook, else lines.

    ``notes``: whether those of the run are shown when they come; a command shows them with its result. ``label``: of
    one of several processes that may write to one terminal; their lines begin with it, and none draws a bar.
    """
    from ckpttool.execute import NoProgress

    if quiet:
        return NoProgress()
    drawn = sys.stderr.isatty() and not label
    shown: NotebookBar | TerminalBar | ProgressLines
    shown = NotebookBar() if in_notebook() else TerminalBar() if drawn else ProgressLines(label)
    shown.notes = notes
    return shown


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def clock(seconds: float) -> str:
    """``0:09``, ``12:34``, ``1:02:03``."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


class _PhaseRate:
    """How far a phase is, how fast it goes, and when it will be over."""

    def __init__(self, total: int, done: int, now: float) -> None:
        self.total, self.done = total, done
        self._at = now
        self._counted = done
        self._bytes = self._seconds = 0.0

    def look(self, now: float) -> None:
        """Take into the rate what has been done since the last look."""
        passed = now - self._at
        if passed > 0:
            kept = exp(-passed / SMOOTH_S)
            self._bytes = self._bytes * kept + self.done - self._counted
            self._seconds = self._seconds * kept + passed
            self._at, self._counted = now, self.done

    @property
    def percent(self) -> int:
        return 100 * min(self.done, self.total) // self.total if self.total else 100

    def __str__(self) -> str:
        """``1.20 GB of 3.10 GB, 210.00 MB/s, 0:09 left``; there is no time left to tell while nothing moves."""
        rate = self._bytes / self._seconds if self._seconds else 0
        said = f"{short(self.done)} of {short(self.total)}, {short(round(rate))}/s"
        return said + (f", {clock((self.total - self.done) / rate)} left" if rate else "")


class _ProgressCounter:
    """Counts the bytes of the phases of a run; subclasses show them."""

    notes = True
    """Whether notes are shown."""

    def __init__(self, wait: float = 0) -> None:
        now = time.monotonic()
        self._phase = "read"
        self._meter = _PhaseRate(0, 0, now)
        self._shown_at = now + wait

    def start(self, total_bytes: int, files: int) -> None:
        del files
        self.phase(self._phase, total_bytes, 0)

    def phase(self, name: str, total_bytes: int, done_bytes: int) -> None:
        self._phase = name
        activity.begin(f"{_DOING.get(name, name)} {short(total_bytes)}")
        self._meter = _PhaseRate(total_bytes, done_bytes, time.monotonic())

    def file_done(self, name: str, nbytes: int) -> None:
        pass

    def note(self, text: str) -> None:
        if self.notes:
            message(f"note: {plain(text)}")

    def finish(self) -> None:
        pass

    def _is_due(self, nbytes: int, every: float) -> bool:
        """Count bytes. Whether it is ``every`` seconds ago that something was shown."""
        meter, now = self._meter, time.monotonic()
        meter.done += nbytes
        if now - self._shown_at < every:
            return False
        self._shown_at = now
        meter.look(now)
        return True


class ProgressLines(_ProgressCounter):
    """A line every ten seconds: ``write 38%, 1.20 GB of 3.10 GB, 210.00 MB/s, 0:09 left``; behind a label, if any."""

    def __init__(self, label: str = "") -> None:
        super().__init__()
        self._label = f"{label}: " if label else ""

    def advance(self, nbytes: int) -> None:
        if self._is_due(nbytes, LINE_S):
            message(f"{self._label}{self._phase} {self._meter.percent}%, {self._meter}")


class _DrawnProgress(_ProgressCounter):
    """What is drawn again and again, and is gone when the run ends. A run that is done at once never shows anything."""

    def __init__(self) -> None:
        super().__init__(PATIENCE_S - REFRESH_S)

    def advance(self, nbytes: int) -> None:
        # Drawn from here and not by a thread of its own: at most a few times a second, and never after an error.
        if self._is_due(nbytes, REFRESH_S):
            self._draw(self._meter)

    @abstractmethod
    def _draw(self, meter: _PhaseRate) -> None: ...


class NotebookBar(_DrawnProgress):
    """A bar in a notebook: an output of the cell that runs, empty in the end."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: Any = None

    def _draw(self, meter: _PhaseRate) -> None:
        said = f"{self._phase} {meter.percent}%, {meter}"
        bar = f'<progress value="{meter.percent}" max="100"></progress> {escape(said)}'
        self._show({"text/plain": said, "text/html": bar})

    def _show(self, what: dict[str, str]) -> None:
        if self._shown is None:
            self._shown = import_module("IPython.display").display(what, raw=True, display_id=True)
        else:
            self._shown.update(what, raw=True)

    def finish(self) -> None:
        if self._shown is not None:
            self._show({"text/plain": "", "text/html": ""})
            self._shown = None


class TerminalBar(_DrawnProgress):
    """A bar on a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._rich: RichProgress | None = None
        self._task: TaskID | None = None
        self._gone = False

    def _draw(self, meter: _PhaseRate) -> None:
        if self._gone:
            return
        status.stop()
        with self._drawing():
            rich, task = self._show()
            percent = f"{meter.percent:3}%"
            rich.update(
                task, description=self._phase, total=meter.total, completed=meter.done, percent=percent, said=str(meter)
            )
            rich.refresh()

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        """A terminal that goes away in the middle of a run (EIO) is no reason to stop: no bar is drawn from then on."""
        try:
            yield
        except OSError:
            self._gone = True
            self._rich = self._task = None
            atexit.unregister(self.finish)

    def _show(self) -> tuple[RichProgress, TaskID]:
        if self._rich is None or self._task is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn
            from rich.table import Column

            def text(field: str) -> TextColumn:
                return TextColumn(field, markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))

            self._rich = Progress(
                text("{task.description:6}"),
                BarColumn(bar_width=16),
                text("{task.fields[percent]}"),
                text("{task.fields[said]}"),
                console=Console(stderr=True),
                auto_refresh=False,
                transient=True,
            )
            self._task = self._rich.add_task("", total=self._meter.total, percent="", said="")
            self._rich.start()
            atexit.register(self.finish)  # a run that fails does not call finish, and the cursor must come back
        return self._rich, self._task

    def note(self, text: str) -> None:
        if self._rich is None or not self.notes:
            super().note(text)
            return
        with self._drawing():
            self._rich.console.print(f"note: {plain(text)}", markup=False, highlight=False)

    def finish(self) -> None:
        if self._rich is not None:
            with self._drawing():
                self._rich.stop()
            self._rich = self._task = None
            atexit.unregister(self.finish)
