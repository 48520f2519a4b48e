"""Where the bytes of a source are, and what identifies them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ckpttool.encodings import Encoding

Place = Path


class DataFile(NamedTuple):
    """A file of a source, as it was when it was looked at."""

    place: Place
    size: int
    tag: str
    """Another one when the bytes are others: nanoseconds of its last change; an object's ETag, a hub's commit."""
    encoding: Encoding | None = None
    """What its bytes are decoded to while they are read; stored tensors lie in these bytes then."""

    @property
    def contents(self) -> str | Encoding:
        """What stored tensors are read from."""
        return self.encoding or str(self.place)

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


def source_files(files: Iterable[DataFile]) -> list[DataFile]:
    """The files of a source, each once: some tensors may lie in its bytes, others in what these are decoded to."""
    return list({f.place: f._replace(encoding=None) for f in files}.values())
