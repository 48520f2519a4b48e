"""Files for what has to be decoded before it can be read block by block; they go when the process ends.

Made where temporary files are made ($TMPDIR), because a source is never written to and DST may not be wanted at all
(inspect).
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ckpttool.catalog import DataFile
from ckpttool.errors import OutputError

_made: list[str] = []


def decoded(source: DataFile, what: str, write: Callable[[BinaryIO], None]) -> DataFile:
    """A scratch file that ``write`` fills with what is decoded from ``source``.

    Its time is the source's, and its label names the source, so that a plan made of it is the same in every run.
    Raises OutputError when there is no room.
    """
    folder = tempfile.mkdtemp(prefix="ckpttool-")
    if not _made:
        atexit.register(_remove, os.getpid())
    _made.append(folder)
    path = Path(folder, what)
    try:
        with path.open("wb") as f:
            write(f)
        os.utime(path, ns=(source.mtime_ns, source.mtime_ns))
    except OSError as e:
        raise OutputError(
            f"{source.path.name} has to be decoded into a temporary file, which failed: {e.strerror}",
            where=str(path),
            hint="set TMPDIR to a directory with room for it",
        ) from None
    return DataFile(path, path.stat().st_size, source.mtime_ns, f"{source.path} decoded: {what}")


def _remove(owner: int) -> None:
    if os.getpid() == owner:  # workers are forked, and the files are not theirs to remove
        for folder in _made:
            shutil.rmtree(folder, ignore_errors=True)
