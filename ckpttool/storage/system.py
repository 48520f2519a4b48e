"""System calls that Linux has and other systems may lack, each with a substitute.

Everything is looked up when it is called, so a test can take it away. Nothing here decides between right and wrong
bytes: without these calls a run is slower, or sees a full disk later.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS, errno.ESPIPE)
"""Error numbers of an operation that a system or filesystem does not support."""

_RWF_DONTCACHE = 0x80
"""Linux 6.14: pages that this call brings into the page cache leave it again; Python has no name for it yet."""
_FICLONE = 0x40049409
"""Linux: let a file have the blocks of another one until either is written (btrfs, xfs, bcachefs)."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""linux/fs.h"""
_RENAME_SWAP = 2
"""macOS: sys/stdio.h"""
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
"""linux/falloc.h"""


@cache
def libc() -> Any:
    """The system's C library. Loaded when it is called for: a listing has no use for it."""
    import ctypes

    return ctypes.CDLL(None, use_errno=True)


def _failure() -> int:
    """``errno`` of the call before."""
    import ctypes

    return ctypes.get_errno()


_LONGEST = 255
"""Bytes of a name in most filesystems. None that says more is believed: vfat counts letters."""


def longest_name(directory: Path) -> int:
    """Bytes that a name in a directory may have."""
    with contextlib.suppress(OSError, ValueError):
        found = os.pathconf(directory, "PC_NAME_MAX")
        if found > 0:
            return min(found, _LONGEST)
    return _LONGEST


def beside(path: Path, before: str = "", after: str = "") -> Path:
    """``BEFORE NAME AFTER`` in one, in the directory of ``path``: the same each time.

    Where the filesystem has no room for so long a name, that of ``path`` is cut, and a hash of it tells it from others.
    """
    import hashlib

    most = longest_name(path.parent)
    name = os.fsencode(path.name)
    if len(os.fsencode(before)) + len(name) + len(os.fsencode(after)) > most:
        mark = "~" + hashlib.sha256(name).hexdigest()[:16]
        room = most - len(os.fsencode(before + mark + after))
        while room and name[room] & 0xC0 == 0x80:  # not in the middle of a letter
            room -= 1
        return path.with_name(before + os.fsdecode(name[:room]) + mark + after)
    return path.with_name(before + path.name + after)


def cores() -> int:
    """The number of processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def descriptors() -> int | None:
    """The number of open descriptors of this process; None where the system does not say."""
    for listed in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return sum(1 for _ in Path(listed).iterdir())
    return None


# -- reading and writing


def uncached() -> int:
    """A flag for ``preadv`` and ``pwritev`` that leaves nothing in the page cache; 0 where calls have no flags."""
    return _RWF_DONTCACHE if hasattr(os, "RWF_DSYNC") else 0


def read_into(fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
    """``preadv``: returns how many bytes were read. Raises OSError."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, buffers, offset, flags) if flags else os.preadv(fd, buffers, offset)
    first = next((b for b in buffers if b.nbytes), None)
    if first is None:
        return 0
    data = os.pread(fd, first.nbytes, offset)
    first.cast("B")[: len(data)] = data
    return len(data)


def read_at_random(fd: int) -> None:
    """Tell the system to read nothing ahead in a file. A hint."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


def forget(fd: int, offset: int = 0, nbytes: int = 0) -> None:
    """Let clean pages of a file, all with ``nbytes`` 0, leave the page cache. A hint."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def copy_range(source: int, destination: int, count: int, at: int, to: int) -> int:
    """``copy_file_range``: returns how many bytes were copied, 0 where the system does not do that for two files."""
    if not hasattr(os, "copy_file_range"):
        return 0
    try:
        return os.copy_file_range(source, destination, count, at, to)
    except OSError as e:
        if e.errno not in (*UNSUPPORTED, errno.EXDEV, errno.EPERM, errno.EBADF):
            raise
        return 0


# -- durability


def sync(fd: int, *, metadata: bool = True) -> None:
    """Make what was written durable; without ``metadata`` only what is needed to read it again.

    The ``fsync`` of macOS leaves the bytes in the disk's cache: F_FULLFSYNC asks the disk, too (its fsync(2)).
    """
    if hasattr(fcntl, "F_FULLFSYNC"):
        with contextlib.suppress(OSError):  # a filesystem that does not know it
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
    if metadata or not hasattr(os, "fdatasync"):
        os.fsync(fd)
    else:
        os.fdatasync(fd)


def can_sync_range() -> bool:
    """Whether a part of a file can be written to disk by itself."""
    return hasattr(libc(), "sync_file_range")


def sync_range(fd: int, offset: int, nbytes: int, flags: int) -> bool:
    """``sync_file_range``; False where the filesystem cannot. Raises OSError: a failure is reported only once."""
    import ctypes

    if not libc().sync_file_range(fd, ctypes.c_longlong(offset), ctypes.c_longlong(nbytes), ctypes.c_uint(flags)):
        return True
    code = _failure()
    if code in UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code))


# -- space


def reserve(fd: int, size: int) -> None:
    """Take space for a file, so that a full disk shows now. Does nothing where that is not possible.

    The system call itself: where the filesystem lacks it, glibc's posix_fallocate writes to every block.
    """
    import ctypes

    if not size or not hasattr(libc(), "fallocate"):
        return
    if libc().fallocate(fd, 0, ctypes.c_longlong(0), ctypes.c_longlong(size)):
        code = _failure()
        if code not in (*UNSUPPORTED, errno.EINTR, errno.ENODEV, errno.EPERM):
            raise OSError(code, os.strerror(code))


def punch(fd: int, start: int, size: int) -> None:
    """Give back the blocks of a stretch of a file, where the filesystem can."""
    import ctypes

    if hasattr(libc(), "fallocate"):
        mode = ctypes.c_int(_PUNCH_HOLE | _KEEP_SIZE)
        libc().fallocate(fd, mode, ctypes.c_longlong(start), ctypes.c_longlong(size))


# -- names


def clone(source: str, path: str) -> bool:
    """Make ``path``, which is not there, a file that shares the blocks of ``source``. False where that is not possible.

    Linux: FICLONE; macOS: clonefile(2).
    """
    import ctypes

    if hasattr(libc(), "clonefile"):
        return not libc().clonefile(os.fsencode(os.path.realpath(source)), os.fsencode(path), ctypes.c_uint32(0))
    with contextlib.suppress(OSError), Path(source).open("rb") as f, Path(path).open("xb") as g:
        fcntl.ioctl(g.fileno(), _FICLONE, f.fileno())
        return True
    return False


def exchange(a: Path, b: Path) -> bool:
    """Exchange two names at once. False where the system or the filesystem cannot.

    Linux: renameat2; macOS: renamex_np.
    """
    import ctypes

    one, two = os.fsencode(a), os.fsencode(b)
    if hasattr(libc(), "renameat2"):
        failed = libc().renameat2(_AT_FDCWD, one, _AT_FDCWD, two, ctypes.c_uint(_RENAME_EXCHANGE))
    elif hasattr(libc(), "renamex_np"):
        failed = libc().renamex_np(one, two, ctypes.c_uint(_RENAME_SWAP))
    else:
        return False
    if not failed:
        return True
    code = _failure()
    if code in UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), os.fspath(b))


# -- processes


def killed_with_parent(signal: int) -> bool:
    """Have the system send this process a signal when its parent ends. False where it cannot."""
    import ctypes

    try:
        return not libc().prctl(1, ctypes.c_ulong(signal), 0, 0, 0)  # PR_SET_PDEATHSIG
    except AttributeError:
        return False


def keep_freed(nbytes: int) -> None:
    """Have malloc keep freed memory up to ``nbytes``; other libraries than glibc decide by themselves."""
    if hasattr(libc(), "mallopt"):
        for threshold in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            libc().mallopt(threshold, nbytes)


def this_boot() -> str:
    """A text that identifies machine, boot and container; "" where the system does not say."""
    import ctypes

    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115
    except OSError:
        pass
    if not hasattr(libc(), "sysctlbyname"):
        return ""
    text, size = ctypes.create_string_buffer(64), ctypes.c_size_t(64)
    if libc().sysctlbyname(b"kern.bootsessionuuid", text, ctypes.byref(size), None, ctypes.c_size_t(0)):
        return ""
    return text.value.decode("ascii", "replace")
