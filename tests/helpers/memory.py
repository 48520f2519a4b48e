"""A place that is not on this machine: the files of a checkpoint in a dict under ``mem:/``. Reads are counted."""

from __future__ import annotations

import hashlib
import io
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple, Self
from unittest.mock import patch

from ckpttool.core.files import DataFile
from ckpttool.storage.caches import forget
from ckpttool.storage.place import SCHEMES
from ckpttool.storage.stream import stream

FILES: dict[PurePosixPath, bytes] = {}


@dataclass
class Traffic:
    """What would have been requests to another machine since ``clear``."""

    reads: list[tuple[str, int, int]] = field(default_factory=list)
    """Ranges that were asked for: name of the file, first byte, bytes."""
    maps: list[str] = field(default_factory=list)
    """Files that were read whole into memory."""

    @property
    def nbytes(self) -> int:
        """Of all ranges."""
        return sum(n for _, _, n in self.reads)

    def clear(self) -> None:
        """Nothing has been asked for, and nothing is kept."""
        self.reads, self.maps = [], []
        forget()


TRAFFIC = Traffic()


class MemoryEntry(NamedTuple):
    """A name in a directory."""

    name: str
    place: MemoryPlace

    def is_file(self) -> bool:
        return self.place.is_file()

    def is_dir(self) -> bool:
        return self.place.is_dir()


class MemoryPlace(NamedTuple):
    """A file or directory of ``FILES``."""

    at: PurePosixPath

    def __str__(self) -> str:
        return f"mem:{self.at}"

    @property
    def name(self) -> str:
        return self.at.name

    @property
    def suffix(self) -> str:
        return self.at.suffix

    @property
    def parent(self) -> Self:
        return self._replace(at=self.at.parent)

    def __truediv__(self, name: str, /) -> Self:
        return self._replace(at=self.at / name)

    def is_file(self) -> bool:
        return self.at in FILES

    def is_dir(self) -> bool:
        return any(p.is_relative_to(self.at) for p in FILES.keys() - {self.at})

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def scan(self) -> list[MemoryEntry]:
        if not self.is_dir():
            raise FileNotFoundError(2, "No such file or directory", str(self))
        names = {p.relative_to(self.at).parts[0] for p in FILES if p.is_relative_to(self.at) and p != self.at}
        return [MemoryEntry(n, self / n) for n in names]

    def identity(self) -> tuple[int, str]:
        data = self._bytes()
        return len(data), f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'

    def open(self, mode: Literal["rb"] = "rb", buffering: int = -1) -> io.BufferedReader:
        return stream(self.open_file(), buffering)

    def on_disk(self) -> None:
        return None

    def open_file(self) -> MemoryFile:
        return MemoryFile(DataFile.at(self), self._bytes())

    def note(self) -> str:
        return ""

    def lost(self) -> str:
        return ""

    def _bytes(self) -> bytes:
        if not self.is_file():
            raise FileNotFoundError(2, "No such file or directory", str(self))
        return FILES[self.at]


class MemoryFile(NamedTuple):
    """An open file: its bytes stay those of ``info``. It gives fewer than it is asked for, as networks do."""

    info: DataFile
    data: bytes

    def pread(self, n: int, at: int) -> bytes:
        TRAFFIC.reads.append((self.info.place.name, at, n))
        return self.data[at : at + min(n, 1 << 20)]

    def read_into(self, buffer: memoryview, at: int) -> int:
        data = self.pread(len(buffer), at)
        buffer[: len(data)] = data
        return len(data)

    def map(self) -> mmap.mmap:
        TRAFFIC.maps.append(self.info.place.name)
        mapped = mmap.mmap(-1, len(self.data))
        mapped.write(self.data)
        return mapped

    def close(self) -> None:
        pass


@contextmanager
def in_memory(directory: Path) -> Iterator[str]:
    """The files of a directory under a text that ``ckpttool`` takes for SRC."""
    root = PurePosixPath("/checkpoints", directory.name)
    files = {root / p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
    TRAFFIC.clear()
    with (
        patch.dict(FILES, files),
        patch.dict(SCHEMES, {"mem": lambda text: MemoryPlace(PurePosixPath(text.removeprefix("mem:")))}),
        # Servers of other tests leave threads behind, and a fresh interpreter would not know the scheme.
        patch("ckpttool.execute.worker_pool.can_fork", lambda: True),
    ):
        yield f"mem:{root}"
