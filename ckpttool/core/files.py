"""A place and a file of a source, as everything above storage sees them: what can be asked of each, and no more.

    Place      Path of this machine, or a ``Remote``: an object, a file of the Hub, a member of an archive
    DataFile   one file as it was when it was looked at: place, size, tag
    OpenFile   its bytes

``storage`` has what answers; nothing is opened here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, Self, TypeAlias, overload

from ckpttool.core.encodings import Contents, Encoding


class Entry(Protocol):
    """A name in a directory; ``os.DirEntry`` is one."""

    @property
    def name(self) -> str: ...
    def is_file(self) -> bool: ...
    def is_dir(self) -> bool: ...


class Mapped(Protocol):
    """The bytes of a file by their numbers; ``mmap`` is one."""

    @overload
    def __getitem__(self, at: int, /) -> int: ...
    @overload
    def __getitem__(self, part: slice, /) -> bytes: ...
    def madvise(self, option: int, start: int = 0, length: int = 0, /) -> None: ...
    def close(self) -> None: ...


class OpenFile(Protocol):
    """A file that is read: all of its bytes are those of ``info``."""

    @property
    def info(self) -> DataFile: ...
    def pread(self, n: int, at: int) -> bytes:
        """Up to ``n`` bytes from an offset; fewer at the end, and wherever the system gives fewer. Raises OSError."""

    def read_into(self, buffer: memoryview, at: int) -> int:
        """``pread`` into memory that is there: returns how many bytes, 0 at the end. Safe in several threads."""

    def map(self) -> Mapped:
        """All bytes, in memory only where they are used. Raises OSError, and ValueError for an empty file."""

    def close(self) -> None: ...


class Remote(Protocol):
    """What sources need of a ``Path``, for bytes that are not on this machine. There are no links.

    ``str`` of it is the text that ``parse_place`` makes it from, in this process and in its workers. It is shown and
    recorded, so it holds no credentials. All methods raise OSError where a ``Path`` does, and AccessError where what is
    there cannot be reached.
    """

    @property
    def name(self) -> str: ...
    @property
    def suffix(self) -> str: ...
    @property
    def parent(self) -> Self: ...
    def __truediv__(self, name: str, /) -> Self: ...
    def __hash__(self) -> int: ...
    def is_file(self) -> bool: ...
    def is_dir(self) -> bool: ...
    def exists(self) -> bool: ...
    def scan(self) -> Iterable[Entry]:
        """The entries of a directory."""

    def identity(self) -> tuple[int, str]:
        """Bytes of a file, and its tag (see ``DataFile``)."""

    def open(self, mode: Literal["rb"] = "rb", buffering: int = -1) -> BufferedReader: ...
    def open_file(self) -> OpenFile: ...
    def on_disk(self) -> tuple[Path, int] | None:
        """The file of this machine that holds all bytes of this one, and the first of them; None where none does."""

    def note(self) -> str:
        """What a user should know of the bytes that are read here; "" where it is nothing."""

    def lost(self) -> str:
        """A hint on what became of a file or directory that is not there; "" where nothing is known."""


Place: TypeAlias = Path | Remote
AnyPlace: TypeAlias = str | os.PathLike[str] | Remote
"""The types that ``parse_place`` takes."""


class DataFile(NamedTuple):
    """A file of a source, as it was when it was looked at."""

    place: Place
    size: int
    tag: str
    """Another one when the bytes are others: nanoseconds of its last change; an object's ETag, a hub's commit."""
    encoding: Encoding | None = None
    """What its bytes are decoded to while they are read; stored tensors lie in these bytes then."""

    @property
    def contents(self) -> Contents:
        """A file from which stored tensors are read."""
        return self.encoding or str(self.place)

    @classmethod
    def at(cls, place: Place, stat: os.stat_result | None = None) -> DataFile:
        """The file as it is now. Raises OSError."""
        if not isinstance(place, Path):
            return cls(place, *place.identity())
        stat = stat or place.stat()
        return cls(place, stat.st_size, str(stat.st_mtime_ns))

    def is_unchanged(self) -> bool:
        """Whether the file is still there, and the same."""
        try:
            return DataFile.at(self.place)[1:3] == self[1:3]
        except OSError:
            return False


def source_files(files: Iterable[DataFile]) -> list[DataFile]:
    """The files of a source, each once: some tensors may lie in its bytes, others in what these are decoded to."""
    return list({f.place: f._replace(encoding=None) for f in files}.values())
