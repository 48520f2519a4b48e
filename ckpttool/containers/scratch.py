"""Files for what has to be decoded before it can be read block by block; they go when the process ends.

Made where temporary files are made ($TMPDIR), because a source is never written to and DST may not be wanted at all
(inspect).
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Self

from ckpttool.errors import CorruptError, OutputError
from ckpttool.storage.place import DataFile


@dataclass(eq=False)
class Scratch:
    """A temporary directory, made on first use; gone after ``close`` or when the process ends."""

    limit: int | None = None
    """Bytes that may be written, None for what the disk holds."""
    files: dict[Path, DataFile] = field(default_factory=dict)
    """Identity of every file, labelled by its source, so that a plan made of it is the same in every run."""
    folder: str = ""
    _used: int = 0
    _owner: int = 0
    _count: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def create(self) -> Path:
        """The path of a new file. Raises OutputError when there is no room for a directory."""
        if not self.folder:
            try:
                self.folder = tempfile.mkdtemp(prefix="ckpttool-")
            except OSError as e:
                raise no_scratch(e, tempfile.gettempdir()) from None
            self._owner = os.getpid()
            atexit.register(self.close)
        self._count += 1
        return Path(self.folder, f"{self._count}.bin")

    def charge(self, size: int, path: Path) -> None:
        """Count bytes about to be written. Raises OutputError beyond the limit."""
        self._used += size
        if self.limit is not None and self._used > self.limit:
            raise OutputError(
                f"decoding takes more than the {self.limit:,} bytes of scratch that are allowed", where=str(path)
            )

    def finish(self, path: Path, source: DataFile, what: str = "") -> DataFile:
        """Note a file that is complete; ``what`` tells several files of one source apart.

        Raises CorruptError when the source changed while it was decoded: nobody looks at it again later. OutputError
        when the file cannot be given its time.
        """
        if not source.is_unchanged():
            raise CorruptError(
                "a source has changed while it was read", where=str(source.place), hint="repeat the command"
            )
        try:
            os.utime(path, ns=(int(source.tag),) * 2)
        except OSError as e:
            raise no_scratch(e, str(path)) from None
        label = f"{source.place} decoded" + (f": {what}" if what else "")
        self.files[path] = DataFile(path, path.stat().st_size, source.tag, label)
        return self.files[path]

    def release(self, paths: Iterable[Path]) -> None:
        """Remove those of these files that are scratch files."""
        for path in paths:
            if self._owner == os.getpid() and (file := self.files.pop(path, None)) is not None:
                path.unlink(missing_ok=True)
                self._used -= file.size

    def close(self) -> None:
        """Remove the directory and what is in it."""
        # Workers are forked, and the files are not theirs to remove.
        if self.folder and self._owner == os.getpid():
            shutil.rmtree(self.folder, ignore_errors=True)
            atexit.unregister(self.close)
            self.folder, self._used = "", 0
            self.files.clear()


DEFAULT = Scratch()
"""Of the process."""


def scratch_file(path: Path, scratch: Scratch | None = None) -> DataFile | None:
    """The identity of a scratch file that reading made (an Array's ``path``); None for any other file."""
    return (scratch or DEFAULT).files.get(path)


def decoded(source: DataFile, what: str, write: Callable[[BinaryIO], None]) -> DataFile:
    """A scratch file that ``write`` fills with what is decoded from ``source``.

    Raises OutputError when there is no room.
    """
    path = DEFAULT.create()
    try:
        with path.open("wb") as f:
            write(f)
    except OSError as e:
        raise no_scratch(e, str(path)) from None
    return DEFAULT.finish(path, source, what)


def no_scratch(e: OSError, place: str) -> OutputError:
    """The error for a scratch file that cannot be written."""
    return OutputError(
        f"the source has to be decoded into a temporary file, which failed: {e.strerror}",
        where=place,
        hint="set TMPDIR to a directory with room for it; pickles of protocol 4 are read in place",
    )
