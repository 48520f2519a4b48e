"""A file is replaced by a complete one, or stays: written beside it, synced, renamed, and the name synced."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from ckpttool.errors import OutputError
from ckpttool.execute.destinations.local import name_file, sync_directory
from ckpttool.execute.files import write_error
from ckpttool.storage import system


def resolved(path: Path) -> Path:
    """The file that a name stands for: what is replaced is the file and not a link to it."""
    return Path(os.path.realpath(path))


def lock(fd: int, path: Path) -> None:
    """Hold ``path``, open as ``fd``, for this run. Raises OutputError when another run writes it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another run may have renamed the file away between opening and locking it.
        held = os.path.samestat(os.fstat(fd), path.stat())
    except (BlockingIOError, FileNotFoundError):
        held = False
    except OSError as e:
        if e.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF):
            raise write_error(e, str(path), 0, 0) from e
        held = True  # a filesystem without locks
    if not held:
        raise OutputError("another run is writing this file", where=str(path), hint="wait until it has finished")


class Replacement:
    """A new file beside ``path`` that takes its name when it is complete; gone when it does not come to that.

    A run that is killed leaves it behind (``.NAME.partial``), and the next run writes over it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = system.beside(path, ".", ".partial")
        self.fd = -1

    def __enter__(self) -> Self:
        """Raises OutputError."""
        if self.path.exists() and not self.path.is_file():
            raise OutputError("what is to be replaced is not a file", where=str(self.path))
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self.fd = os.open(self.temporary, flags, 0o666)
            if os.fstat(self.fd).st_nlink > 1:  # another file by this name too: it is not ours to write
                os.close(self.fd)
                self.fd = -1
                self.temporary.unlink()
                self.fd = os.open(self.temporary, flags | os.O_EXCL, 0o666)
        except OSError as e:
            raise write_error(e, str(self.temporary), 0, 0) from e
        try:
            lock(self.fd, self.temporary)
        except BaseException:
            # It is another run's: its name stays.
            os.close(self.fd)
            self.fd = -1
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Remove what was not published."""
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                self.temporary.unlink(missing_ok=True)
            os.close(self.fd)
            self.fd = -1

    def fill(self, data: bytes) -> None:
        """Make ``data`` the contents. Raises OutputError."""
        try:
            os.ftruncate(self.fd, 0)
            write_all(self.fd, data, 0)
        except OSError as e:
            raise write_error(e, str(self.temporary), 0, len(data)) from e

    def keep_mode(self, like: os.stat_result) -> None:
        """Permissions and, where that is allowed, owner of the file that is replaced. Raises OutputError."""
        try:
            own = os.fstat(self.fd)
            if (own.st_uid, own.st_gid) != (like.st_uid, like.st_gid):
                with contextlib.suppress(OSError):
                    os.fchown(self.fd, like.st_uid, like.st_gid)
            os.fchmod(self.fd, like.st_mode & 0o7777)
        except OSError as e:
            raise write_error(e, str(self.temporary), 0, 0) from e

    def sync(self) -> None:
        """Make the contents durable. Raises OutputError."""
        try:
            system.sync(self.fd)
        except OSError as e:
            raise write_error(e, str(self.temporary), 0, 0) from e

    def publish(self, *, force: bool = True) -> None:
        """Take the name; the caller syncs the directory. Raises OutputError, also when there is a file and not
        ``force``.
        """
        try:
            if name_file(self.temporary, self.path, force=force):
                self.temporary.unlink(missing_ok=True)  # the next run may have been quicker
        except FileExistsError as e:
            what = "the destination appeared during the run"
            raise OutputError(what, where=str(self.path), hint="use --force to replace it") from e
        except OSError as e:
            raise write_error(e, str(self.path), 0, 0) from e
        os.close(self.fd)
        self.fd = -1


def write_all(fd: int, data: bytes, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    view = memoryview(data)
    while view.nbytes:
        done = os.pwrite(fd, view, offset)
        offset += done
        view = view[done:]


def sync_names(directories: Iterable[Path]) -> None:
    """Make the names in directories durable. Raises OutputError."""
    for directory in dict.fromkeys(directories):
        try:
            sync_directory(directory)
        except OSError as e:
            raise write_error(e, str(directory), 0, 0) from e


def replace_all(files: Mapping[Path, bytes]) -> None:
    """Write small files: all of them are complete on disk before the first takes its name. Raises OutputError."""
    targets: dict[Path, bytes] = {}
    for path, data in files.items():
        if targets.setdefault(resolved(path), data) != data:
            raise OutputError("two files that differ have one place", where=[str(path), str(resolved(path))])
    with contextlib.ExitStack() as stack:
        new = []
        for target, data in targets.items():
            made = stack.enter_context(Replacement(target))
            made.fill(data)
            if target.exists():
                made.keep_mode(target.stat())
            made.sync()
            new.append(made)
        for made in new:
            made.publish()
        sync_names(made.path.parent for made in new)
