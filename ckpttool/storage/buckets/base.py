"""The operations of a bucket of any cloud: list, look, read and put under a condition, upload in parts, delete.

An upload is not visible before it is completed, and then all of it is.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol, Self

from ckpttool.errors import AccessError, CkptError, IncompleteError, OutputError
from ckpttool.storage import system
from ckpttool.storage.http import Answer, ChangedError, HttpError

_MIB = 1 << 20


class TakenError(Exception):
    """The object is there already, or is another one than the one to be replaced."""


class GoneError(Exception):
    """The upload is not there (any more): completed, aborted, or cleared away by a rule of the bucket."""


class SliceStoppedError(Exception):
    """The event is set that ends the reading of a ``FileSlice``."""


class ObjectInfo(NamedTuple):
    """Facts of an object that are known without reading it."""

    size: int
    """Bytes."""
    tag: str
    """Another one when the bytes are others: the ETag with its quotes, or a generation."""
    run: str = ""
    """The run of ckpttool that wrote it; "" for objects of others, and in listings."""


class ObjectContent(NamedTuple):
    """A small object that was read."""

    data: bytes
    tag: str
    age: float
    """Seconds since it was written, by the clock of the store."""


class ObjectPage(NamedTuple):
    """A page of a listing."""

    files: Sequence[tuple[str, ObjectInfo]]
    """Keys, and what they are."""
    folders: Sequence[str] = ()
    """The beginnings of other keys, up to a slash; none where everything below is listed."""


class SignedRead(NamedTuple):
    """A GET that a store will answer. The URL and the headers are secrets."""

    url: str
    headers: Mapping[str, str]
    if_match: str | None
    expected: Mapping[str, str] = {}
    """Headers of the answer that must have these values, if they are there: for stores that have other conditions."""


class SentPart(NamedTuple):
    """A part of an upload."""

    size: int
    tag: str
    """Words, of which the first says which bytes these are."""


class Bucket(Protocol):
    """One bucket. Safe to use from several threads and after a fork; all methods try again by themselves.

    All raise AccessError where the store is out of reach or denies, IncompleteError for a bucket that is not there. One
    that is opened to write raises OutputError for that, and for requests that the store refuses. Errors name the key.
    """

    most_parts: int
    """The most parts that an upload may have."""
    part_step: int
    """Sizes of parts are multiples of this, in bytes."""
    lister: str
    """The command that shows users what is there, with ``{}`` for the place."""

    def pages(self, prefix: str, *, deep: bool) -> Iterator[ObjectPage]:
        """Objects whose keys begin so; not ``deep``: up to the next slash. Raises AccessError for an odd answer."""

    def head(self, key: str) -> ObjectInfo:
        """Raises FileNotFoundError."""

    def get(self, key: str) -> ObjectContent | None:
        """A small object; None when it is not there."""

    def signed(self, key: str, tag: str, *, renew: bool) -> SignedRead:
        """A GET of ranges of an object, if it still has this tag. ``renew``: the last answer did not work."""

    def explain(self, e: HttpError, key: str) -> NoReturn:
        """Raise what the answer to such a GET means; FileNotFoundError among others."""

    def put(self, key: str, data: bytes | FileSlice, run: str, *, new: bool = False, replaces: str = "") -> str:
        """Write an object; returns its tag. ``new``: only where there is none; ``replaces``: only instead of the
        version with this tag. Raises TakenError, also after a lost answer of a request that was done, and
        FileNotFoundError for a version that is not there."""

    def delete(self, key: str) -> None:
        """Delete an object; one that is not there is no error."""

    def uploads(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Keys and names of all uploads that are neither completed nor aborted. It is called before parts are sent, and
        for what is left at the end."""

    def create(self, key: str, run: str) -> str:
        """Begin an upload; returns its name."""

    def put_part(self, key: str, upload: str, number: int, data: FileSlice) -> str:
        """Send a part (numbers count from 1); returns its tag. Sending it again replaces it. Raises GoneError."""

    def parts(self, key: str, upload: str) -> dict[int, SentPart]:
        """The parts that have been sent, by number. Raises GoneError."""

    def complete(self, key: str, upload: str, parts: Mapping[int, str], run: str) -> None:
        """Make the object of the parts with these tags. Raises GoneError."""

    def abort(self, key: str, upload: str) -> None:
        """Discard an upload; one that is not there is no error."""


class FileSlice:
    """A stretch of a file, as a file to read from. Reading raises SliceStoppedError when ``stop`` is set.

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
            raise SliceStoppedError
        n = min(_MIB, self.size - self._at)
        data = os.pread(self._fd, n, self._start + self._at) if n else b""
        if n and not data:
            raise OSError(errno.EIO, "the file is shorter than when it was written")
        self._at += len(data)
        return data

    def seek(self, at: int, whence: int = os.SEEK_SET) -> int:
        """Position of the next bytes to read, from 0."""
        if self._stop.is_set():
            raise SliceStoppedError
        self._at = at + (0, self._at, self.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at


class Rewindable(Protocol):
    """A file that can be sent again: ``FileSlice``, or one in memory."""

    def read(self, size: int = ..., /) -> bytes: ...
    def seek(self, at: int, /) -> int: ...


def crc32(data: bytes | Rewindable) -> str:
    """The checksum in base64, as S3 has it."""
    total = 0
    for piece in pieces(data):
        total = zlib.crc32(piece, total)
    return base64.b64encode(total.to_bytes(4, "big")).decode()


def md5(data: bytes | Rewindable) -> str:
    """The checksum in base64, as HTTP has it."""
    total = hashlib.md5(usedforsecurity=False)
    for piece in pieces(data):
        total.update(piece)
    return base64.b64encode(total.digest()).decode()


def pieces(data: bytes | Rewindable) -> Iterator[bytes]:
    """All of it; afterwards the next ``read`` begins at the beginning."""
    if isinstance(data, bytes):
        yield data
        return
    data.seek(0)
    yield from iter(partial(data.read, _MIB), b"")
    data.seek(0)


def object_info(size: object, tag: object, run: object = "") -> ObjectInfo:
    """The facts of an object in an answer. Raises ValueError, TypeError."""
    count = int(size)  # type: ignore[call-overload]  # TypeError is what `understood` is for
    if count < 0 or not tag:
        raise ValueError
    return ObjectInfo(count, str(tag), str(run))


@contextmanager
def understood(where: str) -> Iterator[None]:
    """Raises AccessError for an answer that lacks what every answer has."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError):
        raise AccessError("the answer does not come from an object store", where=where) from None


def no_bucket(kind: str, where: str, hint: str, *, writes: bool) -> CkptError:
    """The error for a bucket that is not there."""
    what = f"the {kind} does not exist"
    return (
        OutputError(what, where=where, hint=f"make it, or {hint}")
        if writes
        else IncompleteError(what, where=where, hint=hint)
    )


def no_object(where: str) -> OSError:
    """The error for an object that is not there."""
    return FileNotFoundError(errno.ENOENT, "No such file or directory", where)


def unlisted(e: OSError | CkptError, where: str, address: str) -> OSError | CkptError:
    """The error for a listing that failed: AccessError in place of FileNotFoundError, others as they are.

    404 to a listing comes from a server that is not an object store.
    """
    if not isinstance(e, FileNotFoundError):
        return e
    what = "the answer does not come from an object store: 404 to a listing"
    return AccessError(what, where=where, hint=f"check {address}")


def explain_read(e: HttpError, where: str, meaning: Callable[[Answer], OSError | CkptError]) -> NoReturn:
    """Raise what the answer to a GET of a range means; an answer that says nothing of the object stays what it is."""
    if isinstance(e, ChangedError) or e.answer is None or e.status >= 500:
        e.filename = where
        raise e
    raise meaning(e.answer) from None
