"""The medium of a run: files of this machine, and sources on other machines, which are read ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ckpttool.encodings import Contents, Encoding
from ckpttool.errors import CorruptError
from ckpttool.execute.ahead import CONNECTIONS, FarFile, ReadAhead
from ckpttool.execute.files import FilePool, Medium, unreadable
from ckpttool.storage.place import DataFile, parse_place

AHEAD = 32 << 20
"""Bytes of memory for reading ahead where nobody says how many."""


class _Inside(NamedTuple):
    """Where a file lies in another one of this machine."""

    path: str
    begin: int


def open_medium(limit: int | None = None, *, memory: int = AHEAD, connections: int | None = None) -> Medium:
    """A medium that keeps at most ``limit`` files open; None is what the system allows.

    ``memory`` is for bytes that come from other machines, ``connections`` how many requests are made at a time; None is
    as many as the memory is good for. Neither is used where all sources are on this machine.
    """
    return _RemoteSources(limit, memory, connections)


class _RemoteSources(FilePool):
    """Files, and sources that are in other places."""

    def __init__(self, limit: int | None, memory: int, connections: int | None) -> None:
        super().__init__(limit)
        self._ahead = ReadAhead(memory, connections)
        self.ahead = memory
        self._remote: dict[str, FarFile | _Inside] = {}
        """By text."""
        self._placing = threading.Lock()

    def stop(self) -> None:
        self._ahead.close()

    def close(self) -> None:
        super().close()
        self._ahead.close()
        while self._remote:
            file = self._remote.popitem()[1]
            if isinstance(file, FarFile):
                file.close()

    def _file(self, path: str) -> FarFile | _Inside:
        with self._placing:
            if path not in self._remote:
                place = parse_place(path)
                here = (place, 0) if isinstance(place, Path) else place.on_disk()
                if here is not None:
                    self._remote[path] = _Inside(str(here[0]), here[1])
                elif not isinstance(place, Path):
                    self._remote[path] = FarFile(place)
            return self._remote[path]

    def is_far(self, path: Contents) -> bool:
        path = path.path if isinstance(path, Encoding) else path
        return ":/" in path and isinstance(self._file(path), FarFile)

    def announce(self, ranges: Iterable[tuple[Contents, int, int]]) -> Callable[[], None]:
        found = list(self._far(ranges))
        return partial(self._ahead.forget, self._ahead.announce(found)) if found else super().announce(())

    def _far(self, ranges: Iterable[tuple[Contents, int, int]]) -> Iterator[tuple[FarFile, int, int]]:
        """Those that are on other machines; of what is decoded, what it is decoded from."""
        for contents, start, stop in ranges:
            if isinstance(contents, Encoding):
                yield from self._far((s.path, s.offset, s.offset + s.nbytes) for s in contents.spans(start, stop))
            elif ":/" in contents and isinstance(file := self._file(contents), FarFile):
                yield file, start, stop

    def read(self, path: Contents, offset: int, buffers: Sequence[memoryview], *, once: bool = True) -> None:
        if isinstance(path, Encoding) or ":/" not in path:
            super().read(path, offset, buffers, once=once)
            return
        try:
            file = self._file(path)
            if isinstance(file, _Inside):
                super().read(file.path, file.begin + offset, buffers, once=once)
            else:
                self._ahead.read(file, offset, buffers)
        except OSError as e:
            raise unreadable(e, path, offset, buffers) from e


def check_unchanged(files: Sequence[DataFile]) -> None:
    """Raises CorruptError for the first source that is not the file any more that was planned."""
    for file in files:
        if isinstance(file.place, Path):
            _check(file)
    far = [f for f in files if not isinstance(f.place, Path)]
    if far:
        with ThreadPoolExecutor(min(CONNECTIONS, len(far)), thread_name_prefix="identity") as pool:
            for _ in pool.map(_check, far):
                pass


def _check(file: DataFile) -> None:
    try:
        now = DataFile.at(file.place)
    except OSError as e:
        raise CorruptError(f"a source cannot be read: {e.strerror or e}", where=str(file.place)) from e
    if (now.size, now.tag) != (file.size, file.tag):
        raise CorruptError(
            "a source has changed since it was planned", where=str(file.place), hint="repeat the command"
        )
