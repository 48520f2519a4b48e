"""What an object store must be able to do for ``ObjectDestination``: objects, and uploads of them in parts.

An upload is not visible before it is completed, and then all of it is. ``s3`` and ``azure`` are such stores.
"""

from __future__ import annotations

import errno
import os
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from ckpttool.execute.files import Stopped
from ckpttool.storage import system

_MIB = 1 << 20


class TakenError(Exception):
    """The object is there already, or is another one than the one to be replaced."""


class GoneError(Exception):
    """The upload is not there (any more): completed, aborted, or cleared away by a rule of the bucket."""


class Found(NamedTuple):
    """A small object that was read."""

    data: bytes
    tag: str
    """What ``Store.put`` takes to replace just this version."""
    age: float
    """Seconds since it was written, by the clock of the store."""


class Held(NamedTuple):
    """What is known of an object without reading it."""

    size: int
    run: str
    """The run that wrote it, as given to ``put`` or ``create``; "" for an object of somebody else."""


class SentPart(NamedTuple):
    """A part of an upload."""

    size: int
    tag: str
    """Words, of which the first says which bytes these are."""


class Store(Protocol):
    """One bucket. Safe to use from several threads; all methods try again by themselves.

    All raise AccessError where the store is out of reach, OutputError where it refuses, both with bucket and key.
    """

    most_parts: int
    """Of an upload."""
    least_part: int
    """Bytes of every part but the last."""
    part_step: int
    """Sizes of parts are multiples of this."""

    def put(self, key: str, data: bytes | Slice, run: str, *, new: bool = False, replaces: str = "") -> str:
        """Write an object; returns its tag. ``new``: only where there is none; ``replaces``: only instead of the
        version with this tag. Raises TakenError, also after a lost answer of a request that was done."""

    def get(self, key: str) -> Found | None:
        """A small object; None when it is not there."""

    def head(self, key: str) -> Held | None:
        """None when it is not there."""

    def objects(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Keys and sizes of all objects whose key begins so."""

    def delete(self, key: str) -> None:
        """Also one that is not there."""

    def uploads(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Keys and names of all uploads that are neither completed nor aborted. It is called before parts are sent, and
        for what is left at the end."""

    def create(self, key: str, run: str) -> str:
        """Begin an upload; returns its name."""

    def put_part(self, key: str, upload: str, number: int, data: Slice) -> str:
        """Send a part (numbers count from 1); returns its tag. Sending it again replaces it. Raises GoneError."""

    def parts(self, key: str, upload: str) -> dict[int, SentPart]:
        """What has been sent, by number. Raises GoneError."""

    def complete(self, key: str, upload: str, parts: Mapping[int, str], run: str) -> None:
        """Make the object of the parts with these tags. Raises GoneError."""

    def abort(self, key: str, upload: str) -> None:
        """Also one that is not there."""

    def close(self) -> None: ...


class Slice:
    """A stretch of a file, as a file to read from. What reads it ends when ``stop`` is set.

    ``read`` may give more than it is asked for: libraries ask for 16 KiB, and send on what they get.
    """

    def __init__(self, path: str | Path, start: int, size: int, stop: threading.Event) -> None:
        self.size = size
        self._start = start
        self._at = 0
        self._stop = stop
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        # Pages that are read ahead would be there when a direct write changes the file below them.
        system.read_at_random(self._fd)

    def __len__(self) -> int:
        return self.size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read(self, _size: int = -1) -> bytes:
        """The next bytes, up to a MiB; none at the end."""
        if self._stop.is_set():
            raise Stopped
        n = min(_MIB, self.size - self._at)
        data = os.pread(self._fd, n, self._start + self._at) if n else b""
        if n and not data:
            raise OSError(errno.EIO, "the file is shorter than it was made")
        self._at += len(data)
        return data

    def seek(self, at: int, whence: int = os.SEEK_SET) -> int:
        """Where the next bytes are read; the beginning is 0."""
        if self._stop.is_set():
            raise Stopped
        self._at = at + (0, self._at, self.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def whole(self) -> bytes:
        """All of it in memory."""
        self.seek(0)
        return b"".join(iter(self.read, b""))

    def crc32(self) -> int:
        """Of all of it."""
        sum_ = 0
        self.seek(0)
        while data := self.read():
            sum_ = zlib.crc32(data, sum_)
        self.seek(0)
        return sum_
