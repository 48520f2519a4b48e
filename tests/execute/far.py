"""A machine that sources lie on: how long it takes, what goes wrong, and what was asked of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import NamedTuple
from unittest.mock import patch

from ckpttool.core.files import DataFile
from tests.helpers import memory
from tests.helpers.memory import MemoryFile, MemoryPlace

Fault = Callable[[str, int, int], None]
"""(name, first byte, bytes) of a request: raises what it is to raise."""


class Request(NamedTuple):
    """A GET of a range."""

    name: str
    start: int
    nbytes: int


@dataclass
class Far:
    """Answers requests after ``delay`` seconds."""

    delay: float = 0
    fault: Fault | None = None
    requests: list[Request] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)
    closed: int = 0
    """Files that were closed."""
    at_once: int = 0
    """Most requests at one time."""
    gate: threading.Event | None = None
    """Requests wait for it."""
    _busy: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, file: FarMemoryFile, buffer: memoryview, at: int) -> int:
        """Answer one."""
        with self._lock:
            self.requests.append(Request(file.info.place.name, at, len(buffer)))
            self._busy += 1
            self.at_once = max(self.at_once, self._busy)
        try:
            if self.gate is not None:
                self.gate.wait(10)
            if self.delay:
                time.sleep(self.delay)
            if self.fault is not None:
                self.fault(file.info.place.name, at, len(buffer))
            data = file.data[at : at + len(buffer)]
            buffer[: len(data)] = data
            return len(data)
        finally:
            with self._lock:
                self._busy -= 1

    @property
    def nbytes(self) -> int:
        """That were asked for."""
        return sum([r.nbytes for r in self.requests])


class FarMemoryFile(MemoryFile):
    """An open file of ``Far``."""

    far: Far

    def read_into(self, buffer: memoryview, at: int) -> int:
        return self.far.get(self, buffer, at)

    def close(self) -> None:
        self.far.closed += 1


@contextmanager
def far_away(far: Far) -> Iterator[Far]:
    """All of ``mem:/`` lies on this machine."""

    def open_file(place: MemoryPlace) -> FarMemoryFile:
        far.opened.append(place.name)
        if far.delay:
            time.sleep(far.delay)
        return FarMemoryFile(DataFile.at(place), memory.FILES[place.at])

    with patch.object(MemoryPlace, "open_file", open_file), patch.object(FarMemoryFile, "far", far, create=True):
        yield far


def place_of(name: str, data: bytes) -> MemoryPlace:
    """A file in ``memory.FILES``, until somebody takes it out."""
    at = PurePosixPath("/far") / name
    memory.FILES[at] = data
    return MemoryPlace(at)
