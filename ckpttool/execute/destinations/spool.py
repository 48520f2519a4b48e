"""A directory below TMPDIR in which outputs are made whose place is elsewhere.

Files have their full size and no blocks where nothing is written; bytes that have been sent give their blocks back.
The directory's name follows from DST, so that the next run of the same DST finds and clears what a killed one has left.
It is locked as long as a process of a run could write into it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Self

from ckpttool.errors import OutputError
from ckpttool.execute.destinations.local import PATIENCE, SLACK
from ckpttool.execute.files import write_error
from ckpttool.storage import system

_HINT = "free space there, or set TMPDIR to a directory on a larger disk"


class BusyError(OutputError):
    """Another process has the directory."""


class Spool:
    """The spool of a destination; ``text`` names that one. ``one_of`` tells those of several processes apart."""

    def __init__(self, text: str, one_of: str = "") -> None:
        digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
        self.path = Path(tempfile.gettempdir()) / f"ckpttool-spool-{os.geteuid()}-{digest}{one_of and '.'}{one_of}"
        self._fd = -1

    @classmethod
    def free(cls, text: str) -> Self:
        """An open one of those that processes have for the same destination: the first that no other one has."""
        for number in count(1):
            found = cls(text, str(number))
            try:
                found.open(patience=0)
            except BusyError:
                continue
            return found
        raise AssertionError

    @property
    def locks(self) -> list[int]:
        """The descriptor that holds the lock, as long as any process has one of it open."""
        return [self._fd] if self._fd >= 0 else []

    def check_space(self, needed: int) -> None:
        """Raises OutputError when the disk has less room."""
        usage = shutil.disk_usage(self.path.parent)
        if usage.free < needed + SLACK:
            what = (
                f"not enough space for data that waits to be sent: {needed:,} bytes and {SLACK >> 20} MiB to spare are"
            )
            what += f" needed, {usage.free:,} bytes are free"
            raise OutputError(what, where=str(self.path.parent), hint=_HINT)

    def open(self, patience: float = PATIENCE) -> None:
        """Make the directory, or clear it. Raises BusyError when another run has it for so many seconds."""
        try:
            deadline = time.monotonic() + patience
            while not self._lock(deadline):
                pass
            for entry in os.scandir(self.path):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    Path(entry.path).unlink()
        except OSError as e:
            self.close()
            raise write_error(e, str(self.path), 0, 0) from e

    def _lock(self, deadline: float) -> bool:
        """Whether the directory is there, ours and locked; False when it has just gone."""
        try:
            self.path.mkdir(0o700)
        except FileExistsError:
            self._check_owner()
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(fd)
                    what, hint = (
                        "another run is writing this destination",
                        "wait until it has finished, or choose another DST",
                    )
                    raise BusyError(what, where=str(self.path), hint=hint) from None
                time.sleep(0.02)
            except OSError as e:
                if e.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF):
                    os.close(fd)
                    raise
                break  # a filesystem without locks: the marker beside DST has to do
        try:
            if os.path.samestat(os.fstat(fd), self.path.lstat()):
                self._fd = fd
                return True
        except FileNotFoundError:
            pass
        os.close(fd)
        return False

    def _check_owner(self) -> None:
        """Raises OutputError for what somebody else has put there, where anybody can."""
        try:
            info = self.path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
            what = "the directory for outputs that wait to be sent is occupied"
            raise OutputError(what, where=str(self.path), hint="remove it, or set TMPDIR to a directory of your own")

    def make(self, path: str, size: int) -> None:
        """A file of zeros without blocks."""
        try:
            with Path(path).open("xb") as f:
                f.truncate(size)
        except OSError as e:
            raise write_error(e, path, 0, 0) from e

    @staticmethod
    def forget(path: str, start: int, size: int) -> None:
        """Give back the blocks of bytes that nobody needs any more, where the filesystem can.

        Not of a file with another name: it may be one of the sources, linked.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(fd).st_nlink == 1:
                system.punch(fd, start, size)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Remove the directory, and let go of the lock."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1
