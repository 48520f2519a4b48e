"""The medium of a run: files of this machine, and sources on other machines, which are read ahead."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ckpttool.core.encodings import Contents, Encoding
from ckpttool.core.files import DataFile
from ckpttool.errors import AccessError, CorruptError
from ckpttool.execute.ahead import FarFile, ReadAhead
from ckpttool.execute.files import FilePool, Medium, unreadable, write_error
from ckpttool.storage.place import parse_place
from ckpttool.storage.readahead import at_once

AHEAD = 32 << 20
"""Bytes of memory for reading ahead where nobody says how many."""


class _Inside(NamedTuple):
    """The place of a file inside another file of this machine."""

    path: str
    begin: int


_PIECE = 1 << 20
"""Bytes that are put into a kept file at a time."""


class _KeptRanges:
    """Ranges of files on other machines, in a file of this one that has no name."""

    def __init__(self, directory: str) -> None:
        self.path = directory or tempfile.gettempdir()
        try:
            self._file = tempfile.TemporaryFile(dir=self.path, buffering=0)  # noqa: SIM115 - closed when it is not needed
        except OSError as e:
            raise write_error(e, self.path, 0, 0) from e
        self.fd = self._file.fileno()
        self._size = 0
        self._places: dict[FarFile, list[tuple[int, int, int]]] = {}
        """Start, stop, and where in the file."""

    def fetch(self, file: FarFile, start: int, stop: int, ahead: ReadAhead) -> None:
        """Put a range behind those that are there."""
        buffer = memoryview(bytearray(min(_PIECE, stop - start)))
        self._places.setdefault(file, []).append((start, stop, self._size))
        for at in range(start, stop, len(buffer)):
            piece = buffer[: min(len(buffer), stop - at)]
            ahead.read(file, at, (piece,))
            try:
                done = 0
                while done < len(piece):
                    done += os.pwrite(self.fd, piece[done:], self._size + done)
            except OSError as e:
                raise write_error(e, self.path, 0, 0) from e
            self._size += len(piece)

    def place(self, file: FarFile, offset: int, nbytes: int) -> int | None:
        """The position of these bytes; None unless all of them are there."""
        for start, stop, at in self._places.get(file, ()):
            if start <= offset and offset + nbytes <= stop:
                return at + offset - start
        return None

    def close(self) -> None:
        self._file.close()


class _Mine(threading.local):
    """The ranges that a thread has kept."""

    def __init__(self) -> None:
        self.kept: list[_KeptRanges] = []


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
        """Files, by the texts of their places."""
        self._placing = threading.Lock()
        self._mine = _Mine()

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

    def keep(self, ranges: Iterable[tuple[Contents, int, int]]) -> Callable[[], None]:
        found: dict[FarFile, list[tuple[int, int]]] = {}
        for file, start, stop in self._far(ranges):
            found.setdefault(file, []).append((start, stop))
        if not found:
            return super().keep(())
        kept, mine = _KeptRanges(self.scratch), self._mine.kept
        try:
            for file, spans in found.items():
                for start, stop in _united(spans):
                    try:
                        kept.fetch(file, start, stop, self._ahead)
                    except OSError as e:
                        raise unreadable(e, str(file.place), start, ()) from e
        except BaseException:
            kept.close()
            raise
        mine.append(kept)

        def forget() -> None:
            mine.remove(kept)
            kept.close()

        return forget

    def read(self, path: Contents, offset: int, buffers: Sequence[memoryview], *, once: bool = True) -> None:
        if isinstance(path, Encoding) or ":/" not in path:
            super().read(path, offset, buffers, once=once)
            return
        try:
            file = self._file(path)
            if isinstance(file, _Inside):
                super().read(file.path, file.begin + offset, buffers, once=once)
                return
            for kept in self._mine.kept:
                at = kept.place(file, offset, sum([b.nbytes for b in buffers]))
                if at is not None:
                    self._read(kept.fd, path, at, buffers, once=False)
                    return
            self._ahead.read(file, offset, buffers)
        except OSError as e:
            raise unreadable(e, path, offset, buffers) from e


def _united(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Spans that overlap or touch as one, in order."""
    last: tuple[int, int] | None = None
    for start, stop in sorted(spans):
        if last is not None and start <= last[1]:
            last = last[0], max(last[1], stop)
            continue
        if last is not None:
            yield last
        last = start, stop
    if last is not None:
        yield last


def check_unchanged(files: Sequence[DataFile]) -> None:
    """Raises CorruptError for the first source that is not the file any more that was planned."""
    for file in files:
        if isinstance(file.place, Path):
            _check(file)
    for _ in at_once([partial(_check, f) for f in files if not isinstance(f.place, Path)]):
        pass


def check_here(files: Iterable[DataFile]) -> None:
    """Raises AccessError for the first file of this machine that is not the one that another machine means.

    Of an output, which has the tag "", the size is compared. That says nothing of the file there, so a run that has
    come far can go on without this machine.
    """
    for file in files:
        if not isinstance(file.place, Path):
            continue
        try:
            found = DataFile.at(file.place)
        except OSError as e:
            what = f"this machine cannot read {'a source' if file.tag else 'an output'} of the run: {e.strerror or e}"
            hint = f"all nodes must see {'SRC' if file.tag else 'DST'} under the same path"
            raise AccessError(what, where=str(file.place), hint=hint) from e
        if not file.tag and found.size != file.size:
            raise AccessError(
                f"an output of the run has {found.size:,} bytes here, and {file.size:,} where it was made",
                where=str(file.place),
                hint="all nodes must see the same DST",
            )
        if file.tag and (found.size, found.tag) != (file.size, file.tag):
            raise AccessError(
                "a source is another file here than where the run was planned, or it has changed since",
                where=str(file.place),
                hint="all nodes must see the same SRC; if it was changed, repeat the command",
            )


def _check(file: DataFile) -> None:
    try:
        now = DataFile.at(file.place)
    except OSError as e:
        raise CorruptError(f"a source cannot be read: {e.strerror or e}", where=str(file.place)) from e
    if (now.size, now.tag) != (file.size, file.tag):
        raise CorruptError(
            "a source has changed since it was planned", where=str(file.place), hint="repeat the command"
        )
