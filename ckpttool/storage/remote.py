"""What the places of all storages have in common: names, entries of directories, and files that are read by ranges."""

from __future__ import annotations

import os
from collections.abc import Callable
from io import BufferedReader
from mmap import mmap
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

from ckpttool.core.files import DataFile, Remote
from ckpttool.storage.stream import in_memory, stream


class NamedEntry(NamedTuple):
    """A name in a directory (``Entry``)."""

    name: str
    is_folder: bool = False

    def is_file(self) -> bool:
        return not self.is_folder

    def is_dir(self) -> bool:
        return self.is_folder


class RemotePlace(Remote):
    """A ``Remote`` whose names have slashes, without a file on this machine and without notes: the rest is its own."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __hash__(self) -> int:  # what a dataclass makes itself is not known to type checkers
        return hash(str(self))

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def open(self, mode: Literal["rb"] = "rb", buffering: int = -1) -> BufferedReader:
        return stream(self.open_file(), buffering)

    def on_disk(self) -> tuple[Path, int] | None:
        return None

    def note(self) -> str:
        return ""

    def lost(self) -> str:
        return ""

    def error(self, number: int) -> OSError:
        """The error of the system with this number, about this place."""
        return OSError(number, os.strerror(number), str(self))


class RangedFile(NamedTuple):
    """An open file (``OpenFile``) whose ranges are read by requests. There is nothing to close."""

    info: DataFile
    fill: Callable[[int, memoryview], None]
    """Puts the bytes from an offset on into memory, all of which are in the file."""

    def pread(self, n: int, at: int) -> bytes:
        data = bytearray(max(0, min(n, self.info.size - at)))
        self.read_into(memoryview(data), at)
        return bytes(data)

    def read_into(self, buffer: memoryview, at: int) -> int:
        n = max(0, min(len(buffer), self.info.size - at))
        if n:
            self.fill(at, buffer[:n])
        return n

    def map(self) -> mmap:
        return in_memory(self)

    def close(self) -> None:
        pass


def parts(text: str) -> list[str]:
    """The names of a text with slashes, as a ``Path`` has them."""
    return [p for p in text.split("/") if p not in ("", ".")]
