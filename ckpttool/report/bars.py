"""Progress of a run: a bar on a terminal, one line for each finished file elsewhere. Both on stderr."""

from __future__ import annotations

import atexit
import sys
import time
from typing import TYPE_CHECKING

from ckpttool.errors import plain
from ckpttool.report.text import message, short

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from ckpttool.execute import Progress

REFRESH_S = 0.2
"""Seconds between two drawings of the bar."""
PATIENCE_S = 0.5
"""Seconds before a bar appears."""


def progress(*, quiet: bool) -> Progress:
    """Whoever watches the run: nobody when ``quiet``, a bar on a terminal, else lines."""
    from ckpttool.execute import NoProgress

    if quiet:
        return NoProgress()
    return Bar() if sys.stderr.isatty() else Lines()


class Lines:
    """One line for each finished file: ``[3/8] rank-00002-of-00008.safetensors 1.25 GB``."""

    def __init__(self) -> None:
        self._files = self._done = 0

    def start(self, total_bytes: int, files: int) -> None:
        self._files = files

    def advance(self, nbytes: int) -> None:
        pass

    def file_done(self, name: str, nbytes: int) -> None:
        self._done += 1
        message(f"[{self._done}/{self._files}] {plain(name)} {short(nbytes)}")

    def note(self, text: str) -> None:
        message(f"note: {plain(text)}")

    def finish(self) -> None:
        pass


class Bar:
    """A bar with rate and remaining time, gone when the run ends. A run that is done at once never shows one."""

    def __init__(self) -> None:
        self._rich: RichProgress | None = None
        self._task: TaskID | None = None
        self._total = self._done = 0
        self._drawn = 0.0

    def start(self, total_bytes: int, files: int) -> None:
        self._total, self._done = total_bytes, 0
        self._drawn = time.monotonic() + PATIENCE_S - REFRESH_S

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        now = time.monotonic()
        # Drawn from here and not by a thread of its own: at most a few times a second, and never after an error.
        if now - self._drawn >= REFRESH_S:
            self._drawn = now
            rich, task = self._show()
            rich.update(task, completed=self._done)
            rich.refresh()

    def _show(self) -> tuple[RichProgress, TaskID]:
        if self._rich is None or self._task is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

            self._rich = Progress(
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                auto_refresh=False,
                transient=True,
            )
            self._task = self._rich.add_task("", total=self._total)
            self._rich.start()
            atexit.register(self.finish)  # a run that fails does not call finish, and the cursor must come back
        return self._rich, self._task

    def file_done(self, name: str, nbytes: int) -> None:
        pass

    def note(self, text: str) -> None:
        if self._rich is not None:
            self._rich.console.print(f"note: {plain(text)}", markup=False, highlight=False)
        else:
            message(f"note: {plain(text)}")

    def finish(self) -> None:
        if self._rich is not None:
            self._rich.stop()
            self._rich = self._task = None
            atexit.unregister(self.finish)
