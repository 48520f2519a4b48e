"""Bytes that a machine may not write, because others write into the same pages of a file.

A machine that does a share of a run writes through a ``WithholdingMedium``. It writes what lies on pages of this share
alone, and keeps the rest, which one machine writes for all shares. Reads return what was written, kept or not.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from ckpttool.core.encodings import Contents
from ckpttool.execute import shares
from ckpttool.execute.files import Fence, Medium

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_Mask = np.ndarray[Any, np.dtype[np.bool_]]


class Edge(NamedTuple):
    """Bytes that were kept, of a file."""

    path: str
    offset: int
    data: bytes


class _Page:
    """Bytes written to a withheld page."""

    __slots__ = ("data", "fresh", "known")

    def __init__(self) -> None:
        self.data: _Bytes = np.zeros(shares.PAGE, np.uint8)
        self.known: _Mask = np.zeros(shares.PAGE, bool)
        self.fresh: _Mask = np.zeros(shares.PAGE, bool)
        """Bytes written since the last ``take``."""

    def runs(self) -> Iterator[tuple[int, bytes]]:
        """The fresh runs of bytes: (first byte, bytes)."""
        changes = np.flatnonzero(self.fresh[1:] != self.fresh[:-1]) + 1
        ends = [*[0] * int(self.fresh[0]), *changes.tolist(), *[len(self.fresh)] * int(self.fresh[-1])]
        for a, b in zip(ends[::2], ends[1::2], strict=True):
            yield a, self.data[a:b].tobytes()


class WithholdingMedium:
    """A medium that keeps in memory what is written to withheld pages.

    It holds nothing at first, and is the medium that it was made of then.
    """

    def __init__(self, medium: Medium) -> None:
        self._medium = medium
        self.held: Mapping[str, Sequence[int]] = {}
        self._pages: dict[str, dict[int, _Page]] = {}
        self._lock = threading.Lock()

    def hold(self, pages: Mapping[str, Sequence[int]]) -> None:
        """Hold these pages of these files from now on, sorted, and no others; forget what was kept."""
        with self._lock:
            self.held = {path: found for path, found in pages.items() if found}
            self._pages = {}

    def take(self) -> list[Edge]:
        """The bytes kept since the last call; they can still be read."""
        with self._lock:
            found = []
            for path, pages in self._pages.items():
                for number in sorted(pages):
                    page = pages[number]
                    found += [Edge(path, number * shares.PAGE + a, data) for a, data in page.runs()]
                    page.fresh[:] = False
            return found

    def write(self, path: str, offset: int, data: memoryview, *, scattered: bool = False) -> None:
        """Write what may be written, keep the rest."""
        if path not in self.held:
            self._medium.write(path, offset, data, scattered=scattered)
            return
        at, end = offset, offset + data.nbytes
        for number in self._within(path, offset, end):
            a, b = max(at, number * shares.PAGE), min(end, (number + 1) * shares.PAGE)
            if at < a:
                self._medium.write(path, at, data[at - offset : a - offset], scattered=scattered)
            self._keep(path, number, a, data[a - offset : b - offset])
            at = b
        if at < end:
            self._medium.write(path, at, data[at - offset :], scattered=scattered)

    def _within(self, path: str, start: int, stop: int) -> Sequence[int]:
        """The pages that are held of a stretch."""
        held = self.held[path]
        return held[bisect_left(held, start // shares.PAGE) : bisect_left(held, -(-stop // shares.PAGE))]

    def _keep(self, path: str, number: int, offset: int, data: memoryview) -> None:
        a = offset - number * shares.PAGE
        b = a + data.nbytes
        with self._lock:
            pages = self._pages.setdefault(path, {})
            page = pages.get(number)
            if page is None:
                page = pages[number] = _Page()
            page.data[a:b] = np.frombuffer(data, np.uint8)
            page.known[a:b] = page.fresh[a:b] = True

    def read(self, path: Contents, offset: int, buffers: Sequence[memoryview], *, once: bool = True) -> None:
        """Read from the file, and from the kept pages."""
        self._medium.read(path, offset, buffers, once=once)
        if not isinstance(path, str) or path not in self._pages:
            return
        for buffer in buffers:
            end = offset + buffer.nbytes
            target = np.frombuffer(buffer, np.uint8)
            with self._lock:
                for number in self._within(path, offset, end):
                    page = self._pages[path].get(number)
                    if page is not None:
                        begin = number * shares.PAGE
                        a, b = max(offset, begin), min(end, begin + shares.PAGE)
                        known = page.known[a - begin : b - begin]
                        np.copyto(target[a - offset : b - offset], page.data[a - begin : b - begin], where=known)
            offset = end

    # -- as the medium does

    @property
    def policy(self) -> str:
        return self._medium.policy

    @property
    def short_calls(self) -> threading.Lock:
        return self._medium.short_calls

    @property
    def ahead(self) -> int:
        return self._medium.ahead

    @property
    def scratch(self) -> str:
        return self._medium.scratch

    @scratch.setter
    def scratch(self, directory: str) -> None:
        self._medium.scratch = directory

    @property
    def unsynced(self) -> bool:
        return self._medium.unsynced

    @unsynced.setter
    def unsynced(self, failed: bool) -> None:
        self._medium.unsynced = failed

    @property
    def fence(self) -> Fence | None:
        return self._medium.fence

    @fence.setter
    def fence(self, fence: Fence | None) -> None:
        self._medium.fence = fence

    def is_far(self, path: Contents) -> bool:
        return self._medium.is_far(path)

    def announce(self, ranges: Iterable[tuple[Contents, int, int]]) -> Callable[[], None]:
        return self._medium.announce(ranges)

    def keep(self, ranges: Iterable[tuple[Contents, int, int]]) -> Callable[[], None]:
        return self._medium.keep(ranges)

    def stop(self) -> None:
        self._medium.stop()

    def expect_writes(self, path: str, *, scattered: bool = False) -> None:
        self._medium.expect_writes(path, scattered=scattered)

    def sync(self, path: str, *, metadata: bool = False) -> None:
        self._medium.sync(path, metadata=metadata)

    def close(self) -> None:
        self._medium.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
