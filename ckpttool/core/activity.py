"""What the process is doing, for whoever shows it: a phrase, and how many of how many are done.

Whatever may take long says so in one place, whoever calls it; a command on a terminal shows it (``report/status``).
"""

from __future__ import annotations


class Activity:
    """The only one: what goes on now."""

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
