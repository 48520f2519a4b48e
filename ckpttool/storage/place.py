"""Where the bytes of a source are, and what identifies them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

Place = Path


class DataFile(NamedTuple):
    """A file of a source, as it was when it was looked at."""

    place: Place
    size: int
    tag: str
    """Another one when the bytes are others: nanoseconds of its last change; an object's ETag, a hub's commit."""
    label: str = ""
    """What plans call a file whose path is another in every run (decoded scratch files); "" is the path."""

    @classmethod
    def at(cls, place: Place, stat: os.stat_result | None = None) -> DataFile:
        """The file as it is now. Raises OSError."""
        stat = stat or place.stat()
        return cls(place, stat.st_size, str(stat.st_mtime_ns))

    def is_unchanged(self) -> bool:
        """Whether the file is still there, and the same."""
        try:
            return DataFile.at(self.place)[1:3] == self[1:3]
        except OSError:
            return False


def source_of(file: DataFile) -> Path:
    """The file of the source that a data file is, or was decoded from (its label says so)."""
    return Path(file.label.rpartition(" decoded")[0]) if file.label else file.place


def source_files(files: Sequence[DataFile]) -> list[DataFile]:
    """The files of the source, scratch files replaced by what they were decoded from, each once."""
    if not any(f.label for f in files):
        return list(files)
    out: dict[Path, DataFile] = {}
    for f in files:
        path = source_of(f)
        if path not in out:
            out[path] = DataFile.at(path)
    return list(out.values())
