"""The current activity of the process: a phrase, and how many parts of it are done.

Code that may take long sets it; a command on a terminal shows it (``report/status``).
"""

from __future__ import annotations


class Activity:
    """The current activity. There is one, `activity`."""

    __slots__ = ("done", "total", "what")

    def __init__(self) -> None:
        self.begin("")

    def begin(self, what: str, total: int = 0) -> None:
        """``what`` begins (``reading headers``): ``total`` parts of it, or an unknown number."""
        self.what, self.done, self.total = what, 0, total

    def __str__(self) -> str:
        """``reading headers: 37 of 163``."""
        return f"{self.what}: {self.done:,} of {self.total:,}" if self.total else self.what


activity = Activity()
