"""A directory of which some files are on this machine and the others elsewhere, read as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Literal, NamedTuple, Self

from ckpttool.core.files import DataFile, Entry, OpenFile, Place
from ckpttool.storage.place import open_local, scan
from ckpttool.storage.remote import NamedEntry


class Overlay(NamedTuple):
    """A place (``Remote``) in a directory; the files called ``small`` are those of ``local``."""

    remote: Place
    local: Path
    small: frozenset[str]
    at: str = ""
    """Below both, with slashes."""

    @classmethod
    def of(cls, remote: Place, local: Path, small: Iterable[str]) -> Self:
        return cls(remote, local, frozenset(small))

    @property
    def _place(self) -> Place:
        place: Place = self.local if self.at in self.small else self.remote
        for name in self.at.split("/") if self.at else ():
            place = place / name
        return place

    def __str__(self) -> str:
        """The text of the place that has the bytes."""
        return str(self._place)

    @property
    def name(self) -> str:
        return self._place.name

    @property
    def suffix(self) -> str:
        return self._place.suffix

    @property
    def parent(self) -> Self:
        return self._replace(at=self.at.rpartition("/")[0])

    def __truediv__(self, name: str, /) -> Self:
        return self._replace(at=f"{self.at}/{name}" if self.at else name)

    def is_file(self) -> bool:
        return self._place.is_file()

    def is_dir(self) -> bool:
        return self._below() or self._place.is_dir()

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def _below(self) -> bool:
        return any(s.startswith(f"{self.at}/" if self.at else "") for s in self.small)

    def scan(self) -> Iterator[Entry]:
        start = f"{self.at}/" if self.at else ""
        mine = {s[len(start) :].partition("/")[::2] for s in self.small if s.startswith(start)}
        found: dict[str, Entry] = {name: NamedEntry(name, bool(rest)) for name, rest in sorted(mine)}
        try:
            for e in scan(self._place):
                if not e.name.startswith(".ckpttool-partial"):
                    found.setdefault(e.name, e)
        except FileNotFoundError:
            if not found:
                raise
        return iter(found.values())

    def identity(self) -> tuple[int, str]:
        return DataFile.at(self._place)[1:3]

    def open(self, mode: Literal["rb"] = "rb", buffering: int = -1) -> BufferedReader:
        place = self._place
        return place.open(mode) if isinstance(place, Path) else place.open(mode, buffering)

    def open_file(self) -> OpenFile:
        place = self._place
        return open_local(place) if isinstance(place, Path) else place.open_file()

    def on_disk(self) -> tuple[Path, int] | None:
        place = self._place
        return (place, 0) if isinstance(place, Path) else place.on_disk()

    def note(self) -> str:
        return ""

    def lost(self) -> str:
        place = self._place
        return "" if isinstance(place, Path) else place.lost()
