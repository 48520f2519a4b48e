"""Open files and how bytes go through them: a bounded pool of descriptors, whole reads, and the write policy.

Growing the page cache costs more than moving the bytes, so large writes leave nothing in it. Which call does that
depends on kernel and filesystem; it is found out by the first write that is refused:

    direct        pwrite past the page cache (O_DIRECT) of whole pages; the edges of a write, which share their pages
                  with its neighbours, go through the page cache. No page is written in both ways
    uncached      pwritev2 with RWF_DONTCACHE (Linux 6.14 and a filesystem that takes it)
    write-behind  pwrite, then sync_file_range and fadvise(DONTNEED) one step behind
    plain         pwrite
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import numpy as np

from ckpttool.core.encodings import Contents, Decoder, Encoding
from ckpttool.core.words import count
from ckpttool.errors import CorruptError, OutputError
from ckpttool.storage import system

UNCACHED_FROM = 256 << 10
"""Smaller pieces go through the page cache: dropping a page that the next piece shares means reading it back."""

PAGE = max(4096, mmap.PAGESIZE)
"""Direct writes begin and end at multiples of this in the file: no page cache holds a part of what they write. Some
kernels have pages of 64 KiB; disks have sectors of 4 KiB at most."""

SECTOR = 512
"""A direct write wants its bytes in memory at the same distance from a multiple of this as in the file. Whoever gives
other ones has them written uncached."""

PIECE = 8 << 20
"""Longest single read or write: long enough to cost nothing, short enough to stop soon after Ctrl-C."""

IOV_MAX = 1024

_SYNCS = 8

_READ, _WRITE, _DIRECT = "read", "write", "direct"
"""What a descriptor is for. None is for both reading and writing: through such a one NFS reads each page before it
writes a part of it, and writes the whole page back, with what other machines may have changed by then."""

_Name = tuple[str, str]
"""A path, and what its descriptor is for."""

_SYNC_WRITE = 2
_SYNC_WAIT_BEFORE_WRITE_WAIT_AFTER = 7


class Stopped(Exception):  # noqa: N818 - not an error: another thread failed, or the user interrupted
    """The run is to end now."""


class SourceReadError(CorruptError):
    """A source could not be read this time; unlike wrong bytes, that may pass, so the run can be resumed."""


def span(offset: int, nbytes: int) -> str:
    """A byte range as errors show it."""
    return f"[bytes {offset:,}..{offset + nbytes:,})"


def descriptor_limit() -> int:
    """How many descriptors a pool may hold. Raises the soft limit to the hard one when that is worth it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 4096 and (hard == resource.RLIM_INFINITY or hard > soft):
        wanted = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError):
            pass  # a container may forbid it; a small pool only opens files more often
    if soft == resource.RLIM_INFINITY:
        return 4096
    used = system.descriptors()
    return max(8, min(4096, soft - (16 if used is None else used) - 24))


class Fence(NamedTuple):
    """A file that says whether those who write for a run may still do so."""

    path: str
    token: str
    """Content of the file while the run continues."""

    def check(self) -> None:
        """Raises OutputError when the run has ended, or this machine does not see where it writes."""
        try:
            found = Path(self.path).read_text(encoding="ascii")
        except (OSError, ValueError):
            found = ""
        if found != self.token:
            raise OutputError(
                "this machine does not see the destination of the run, or the run has ended",
                where=str(Path(self.path).parent),
                hint="choose a DST in a directory that all nodes share, under the same path",
            )


class Medium(Protocol):
    """Reads and writes bytes, by path or by the text of another place. Safe to use from several threads."""

    scratch: str
    """A directory for ``keep``; "" for the system's."""
    unsynced: bool
    """A sync has failed. The kernel says so once: a later one succeeds although the pages are gone."""
    fence: Fence | None
    """Looked at before a file is opened to be written: by then another run may have files by the same names."""
    held: Mapping[str, Sequence[int]]
    """Pages of files that are not written but kept (see ``held``), sorted."""

    @property
    def policy(self) -> str:
        """Write policy: ``direct``, ``uncached``, ``write-behind`` or ``plain``."""

    @property
    def short_calls(self) -> threading.Lock:
        """Taken around thousands of short calls: two threads at that only pass the interpreter to and fro."""

    def read(self, path: Contents, offset: int, buffers: Sequence[memoryview], *, once: bool = True) -> None:
        """Fill ``buffers`` (at most IOV_MAX) with consecutive bytes, of an encoding with decoded ones.

        ``once`` says that the bytes will not be needed again: pages that were not in the page cache before do not
        stay there. Raises CorruptError when the file ends early, SourceReadError when it cannot be read, AccessError
        when it cannot be reached.
        """

    @property
    def ahead(self) -> int:
        """Bytes of memory for what was announced; 0 where the system reads ahead by itself."""

    def is_far(self, path: Contents) -> bool:
        """Whether the bytes come from another machine."""

    def announce(self, ranges: Iterable[tuple[Contents, int, int]]) -> Callable[[], None]:
        """What will be read, in that order: (file, first byte, end). Sources on other machines are read ahead.

        Call what is returned when they have been read, or will not be.
        """

    def keep(self, ranges: Iterable[tuple[Contents, int, int]]) -> Callable[[], None]:
        """Fetch these from other machines to a file of this one, from which this thread reads them until it calls what
        is returned: each byte of them is fetched once, however often and in whatever order it is read.

        Raises as ``read`` and ``write`` do.
        """

    def stop(self) -> None:
        """Reads of bytes on other machines raise Stopped from now on, those that wait for some at once."""

    def expect_writes(self, path: str, *, scattered: bool = False) -> None:
        """This path will be written, and perhaps read. ``scattered`` as for ``write``, of all of them."""

    def write(self, path: str, offset: int, data: memoryview, *, scattered: bool = False) -> None:
        """Write all of ``data``. Raises OutputError.

        ``scattered`` says that other short pieces will share its pages: these stay in the page cache until the end.
        """

    def sync(self, path: str, *, metadata: bool = False) -> None:
        """Make the file's bytes durable; with ``metadata`` its size and times, too. Raises OutputError."""

    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


class FilePool:
    """Descriptors by path, least recently used closed first, so that any number of files works under any limit.

    Safe to use from several threads: a descriptor in use is never closed.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit or descriptor_limit()
        self._open: OrderedDict[_Name, list[int]] = OrderedDict()  # -> [descriptor, users]
        self._writable: set[str] = set()
        self._lock = threading.Lock()
        self._cached_reads: set[str] = set()  # files whose filesystem refuses uncached reads
        self._direct = hasattr(os, "O_DIRECT")
        self._indirect = "uncached" if system.uncached() else "write-behind"
        """The policy where direct writes are refused, or cannot be made for where the bytes lie."""
        self._turns = threading.BoundedSemaphore(2)
        """Taken around writes through the page cache: more at a time only get in each other's way."""
        self._behind: dict[str, list[tuple[int, int]]] = {}
        self._scattered: set[str] = set()
        self._decoder = Decoder(self.read)
        self.ahead = 0
        self.scratch = ""
        self.unsynced = False
        self.fence: Fence | None = None
        self.held: Mapping[str, Sequence[int]] = {}
        self.short_calls = threading.Lock()

    @property
    def policy(self) -> str:
        """Write policy: ``direct``, ``uncached``, ``write-behind`` or ``plain``."""
        return "direct" if self._direct else self._indirect

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every descriptor that is not in use."""
        with self._lock:
            for name in [n for n, entry in self._open.items() if not entry[1]]:
                os.close(self._open.pop(name)[0])

    def expect_writes(self, path: str, *, scattered: bool = False) -> None:
        self._writable.add(path)
        if scattered:
            self._scattered.add(path)

    def take(self, path: str, use: str) -> int:
        """A descriptor, in use until ``give``."""
        name = path, use
        with self._lock:
            entry = self._open.get(name)
            if entry is None:
                while len(self._open) >= self._limit:
                    idle = next((n for n, e in self._open.items() if not e[1]), None)
                    if idle is None:
                        break
                    os.close(self._open.pop(idle)[0])
                entry = self._open[name] = [self._opened(path, use), 0]
            else:
                self._open.move_to_end(name)
            entry[1] += 1
            return entry[0]

    def _opened(self, path: str, use: str) -> int:
        if use == _READ:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if path in self._writable:
                # What is read ahead of an output would be there when a direct write changes it below.
                system.read_at_random(fd)
            return fd
        if self.fence is not None:
            self.fence.check()
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | (os.O_DIRECT if use == _DIRECT else 0))

    def give(self, path: str, use: str) -> None:
        with self._lock:
            self._open[path, use][1] -= 1

    # -- reading

    def read(self, path: Contents, offset: int, buffers: Sequence[memoryview], *, once: bool = True) -> None:
        if isinstance(path, Encoding):
            self._decoder.read(path, offset, buffers)
            return
        try:
            fd = self.take(path, _READ)
        except OSError as e:
            raise unreadable(e, path, offset, buffers) from e
        try:
            self._read(fd, path, offset, buffers, once=once)
        except OSError as e:
            raise unreadable(e, path, offset, buffers) from e
        finally:
            self.give(path, _READ)

    def _read(self, fd: int, path: str, offset: int, buffers: Sequence[memoryview], *, once: bool) -> None:
        wanted = buffers[0].nbytes if len(buffers) == 1 else sum([b.nbytes for b in buffers])
        flags = system.uncached() if once and wanted >= UNCACHED_FROM and path not in self._cached_reads else 0
        while wanted:
            try:
                got = system.read_into(fd, buffers, offset, flags)
            except OSError as e:
                if flags and e.errno in system.UNSUPPORTED:
                    self._cached_reads.add(path)
                    flags = 0
                    continue
                raise
            if got == wanted:
                return
            if not got:
                raise too_short(path, offset, wanted, os.fstat(fd).st_size)
            wanted -= got
            offset += got
            buffers = _after(buffers, got)

    def is_far(self, path: Contents) -> bool:
        del path
        return False

    def announce(self, ranges: Iterable[tuple[Contents, int, int]]) -> Callable[[], None]:
        del ranges
        return _nothing

    def keep(self, ranges: Iterable[tuple[Contents, int, int]]) -> Callable[[], None]:
        del ranges
        return _nothing

    def stop(self) -> None:
        """Files are not waited for."""

    # -- writing

    def write(self, path: str, offset: int, data: memoryview, *, scattered: bool = False) -> None:
        if scattered:
            self._scattered.add(path)
        done = 0
        try:
            head = -offset % PAGE
            if self._direct and data.nbytes >= UNCACHED_FROM and (_address(data) + head) % SECTOR == 0:
                done = self._write_direct(path, offset + head, data[head : data.nbytes - (offset + data.nbytes) % PAGE])
            fd = self.take(path, _WRITE)
            try:
                if done:
                    self._write(fd, path, offset, data[:head])
                    done += head
                for start in range(done, data.nbytes, PIECE):
                    with self._turns:
                        self._write(fd, path, offset + start, data[start : start + PIECE])
            finally:
                self.give(path, _WRITE)
        except OSError as e:
            raise write_error(e, path, offset, data.nbytes) from e

    def _write_direct(self, path: str, offset: int, data: memoryview) -> int:
        """Write whole pages past the page cache; returns how many bytes, fewer where that is refused."""
        done = 0
        try:
            fd = self.take(path, _DIRECT)
            try:
                while done < data.nbytes:
                    done += os.pwrite(fd, data[done : done + PIECE], offset + done)
                    if done % PAGE:  # a disk that is full in the middle: the page cache has the next word
                        return done
            finally:
                self.give(path, _DIRECT)
        except OSError as e:
            if e.errno not in system.UNSUPPORTED:
                raise
            self._direct = False
        return done

    def _write(self, fd: int, path: str, offset: int, data: memoryview) -> None:
        start, large = offset, data.nbytes >= UNCACHED_FROM
        while data.nbytes:
            if large and self._indirect == "uncached":
                try:
                    n = os.pwritev(fd, (data,), offset, system.uncached())
                except OSError as e:
                    if e.errno not in system.UNSUPPORTED:
                        raise
                    self._indirect = "write-behind"
                    continue
            else:
                n = os.pwrite(fd, data, offset)
            offset += n
            data = data[n:]
        if large and self._indirect == "write-behind":
            self._write_behind(fd, path, start, offset - start)

    def _write_behind(self, fd: int, path: str, offset: int, nbytes: int) -> None:
        """Start writing this piece to disk; drop the one before last, which has had time to get there."""
        if not system.can_sync_range() or not self._sync_range(fd, offset, nbytes, _SYNC_WRITE):
            self._indirect = "plain"
            return
        with self._lock:
            queue = self._behind.setdefault(path, [])
            queue.append((offset, nbytes))
            old = queue.pop(0) if len(queue) > 4 else None
        if old is not None:
            self._sync_range(fd, *old, _SYNC_WAIT_BEFORE_WRITE_WAIT_AFTER)
            system.forget(fd, *old)

    def _sync_range(self, fd: int, offset: int, nbytes: int, flags: int) -> bool:
        """``sync_file_range``; False where there is none. Raises OSError: what fails here is not said again later."""
        try:
            return system.sync_range(fd, offset, nbytes, flags)
        except OSError:
            self.unsynced = True
            raise

    def sync(self, path: str, *, metadata: bool = False) -> None:
        """Besides, the file's pages leave the page cache."""
        use = _WRITE if path in self._writable else _READ  # a linked file may be a source, and not ours to write
        try:
            fd = self.take(path, use)
        except OSError as e:
            raise write_error(e, path, 0, 0) from e
        try:
            system.sync(fd, metadata=metadata)
            if metadata or path not in self._scattered:
                system.forget(fd)
        except OSError as e:
            self.unsynced = True
            raise write_error(e, path, 0, 0) from e
        finally:
            self.give(path, use)


def _nothing() -> None:
    pass


def sync_all(pool: Medium, paths: Sequence[str], *, metadata: bool = False) -> None:
    """``Medium.sync`` of several files at a time: filesystems write the journals of all of them together."""
    if len(paths) < 2:
        for path in paths:
            pool.sync(path, metadata=metadata)
        return
    with ThreadPoolExecutor(min(_SYNCS, len(paths)), thread_name_prefix="sync") as syncing:
        for done in [syncing.submit(pool.sync, path, metadata=metadata) for path in paths]:
            done.result()


def create(path: str, size: int) -> bool:
    """Make a file of ``size`` zero bytes with its space reserved, where the filesystem can, so that a full disk shows
    before the work and not after it.

    A file of that size which is already there keeps its bytes; returns whether that was so.
    """
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, 0o666)
        if os.fstat(fd).st_nlink > 1:  # another file by this name too: it is not ours to write
            os.close(fd)
            Path(path).unlink()
            fd = os.open(path, flags | os.O_EXCL, 0o666)
        try:
            kept = os.fstat(fd).st_size == size
            if not kept:
                os.ftruncate(fd, 0)
                os.ftruncate(fd, size)
            system.reserve(fd, size)
        finally:
            os.close(fd)
    except OSError as e:
        raise write_error(e, path, 0, size) from e
    return kept


SHARED = ("reflinked", "hard-linked")
"""How a file can share the bytes of another one."""


def share(source: str, path: str) -> str:
    """Make ``path`` a file that shares the bytes of ``source``: ``reflinked``, ``hard-linked``, or "" where neither
    works (another filesystem, no permission). Raises OutputError when a file that is in the way cannot be removed.
    """
    remove_file(path)
    if system.clone(source, path):
        return SHARED[0]
    remove_file(path)
    with contextlib.suppress(OSError):
        os.link(os.path.realpath(source), path)
        return SHARED[1]
    return ""


def remove_file(path: str) -> None:
    """Raises OutputError when a file that is there cannot be removed."""
    try:
        Path(path).unlink(missing_ok=True)
    except OSError as e:
        raise write_error(e, path, 0, 0) from e


def write_error(e: OSError, path: str, offset: int, nbytes: int) -> OutputError:
    """The error a user sees for a failed write."""
    where = f"{path} {span(offset, nbytes)}" if nbytes else path
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        try:
            free = f"; {shutil.disk_usage(Path(path).parent).free:,} bytes are free"
        except OSError:
            free = ""
        return OutputError(f"no space left on the destination{free}", where=where)
    if e.errno == errno.EFBIG:
        return OutputError("the destination does not allow files of this size", where=where)
    return OutputError(f"cannot write the destination: {e.strerror or e}", where=where)


def too_short(path: str, offset: int, wanted: int, size: int) -> CorruptError:
    """The error for a file that ends before all wanted bytes."""
    where = f"{path} {span(offset, wanted)}: the file has {count(size, 'byte')}"
    return CorruptError("a file is shorter than its index says", where=where)


def unreadable(e: OSError, path: str, offset: int, buffers: Sequence[memoryview]) -> CorruptError:
    """The error a user sees for a failed read."""
    where = f"{path} {span(offset, sum(b.nbytes for b in buffers))}"
    if e.errno in (errno.ENOENT, errno.ENOTDIR):
        return CorruptError("a source file has vanished", where=path)
    return SourceReadError(f"cannot read a source: {e.strerror or e}", where=where)


def _address(data: memoryview) -> int:
    """Memory address of the bytes."""
    return int(np.frombuffer(data, np.uint8).ctypes.data)


def _after(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    rest: list[memoryview] = []
    for b in buffers:
        if done >= b.nbytes:
            done -= b.nbytes
        else:
            rest.append(b[done:] if done else b)
            done = 0
    return rest
