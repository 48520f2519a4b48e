"""Tries what a directory and this machine can do, with the calls that runs use. Leaves nothing behind."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ckpttool.errors import OutputError
from ckpttool.execute.files import UNCACHED_FROM, FilePool, share
from ckpttool.storage.system import exchange

_SPARSE = 8 << 20
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Filesystem:
    """Findings about one directory; None for what could not be tried."""

    kind: str
    """``ext4``; "" where the system does not say."""
    mounted: str
    """The mount point; "" where the system does not say."""
    free: int
    """Bytes that this user may still write."""
    files: int | None
    """Files that may still be made; None where there is no such limit."""
    refused: str = ""
    """Why nothing can be written, in the system's words; the rest is unknown then."""
    policy: str = ""
    """How large writes go; see ``execute.files``."""
    reflinks: bool | None = None
    hard_links: bool | None = None
    locks: bool | None = None
    exchanges: bool | None = None
    """Two names can be exchanged at once."""
    sparse: bool | None = None
    """Sparse files: unwritten ranges take no space."""
    case: bool | None = None
    """``A`` and ``a`` are two files."""


def look_at(directory: Path) -> Filesystem:
    """Try a directory that exists. Raises OSError when it cannot be looked at."""
    room = os.statvfs(directory)
    kind, mounted = _mount(directory)
    files = room.f_favail if room.f_files else None
    free = room.f_bavail * room.f_frsize
    try:
        with _scratch(directory) as inside:
            return _tried(inside, Filesystem(kind, mounted, free, files))
    except (OSError, OutputError) as e:
        why = (e.strerror if isinstance(e, OSError) else e.what) or type(e).__name__
        return Filesystem(kind, mounted, free, files, refused=why)


@contextlib.contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix=".ckpttool-doctor-", dir=directory))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _tried(inside: Path, known: Filesystem) -> Filesystem:
    one, two, other = inside / "one", inside / "two", inside / "other"
    policy = _policy(one)
    shared = share(str(one), str(two))
    two.unlink(missing_ok=True)
    (inside / "Case").touch()
    return replace(
        known,
        policy=policy,
        reflinks=shared == "reflinked",
        hard_links=shared == "hard-linked" or _links(one, two),
        locks=_locks(one),
        exchanges=_exchanges(one, other),
        sparse=_sparse(inside / "sparse"),
        case=not (inside / "case").exists(),
    )


def _policy(path: Path) -> str:
    """Write as a run does, and see which way of writing is left."""
    path.touch()
    with mmap.mmap(-1, 4 * UNCACHED_FROM) as data, FilePool() as pool:
        view = memoryview(data)
        try:
            pool.write(str(path), 0, view)
            # A direct write that was refused leaves the ways to write through the page cache.
            return pool.policy
        finally:
            view.release()


def _links(one: Path, two: Path) -> bool:
    try:
        os.link(one, two)
    except OSError:
        return False
    return True


def _locks(path: Path) -> bool:
    """Whether a lock keeps another one out."""
    with path.open("rb") as a, path.open("rb") as b:
        try:
            fcntl.flock(a, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        try:
            fcntl.flock(b, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False


def _exchanges(one: Path, other: Path) -> bool:
    other.touch()
    try:
        return exchange(one, other)
    except OSError:
        return False


def _sparse(path: Path) -> bool:
    with path.open("wb") as f:
        f.truncate(_SPARSE)
    return path.stat().st_blocks * 512 < _SPARSE // 2


def _mount(directory: Path) -> tuple[str, str]:
    """Type and mount point of the filesystem that a directory is on, as Linux says it."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
        here = directory.stat().st_dev
    except OSError:
        return "", ""
    wanted, best = f"{os.major(here)}:{os.minor(here)}", ("", "")
    path = os.path.realpath(directory)
    for line in lines:
        words = line.split(" ")
        if "-" not in words:
            continue
        # The fields are documented in proc(5): device, and mount point with spaces as \040.
        point = words[4].replace("\\040", " ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # btrfs and overlays give files other devices than their mount has: there the longest path decides.
        if inside and (words[2] == wanted or len(point) >= len(best[1])):
            best = (words[words.index("-") + 1], point)
    return best


# -- the machine


def quota() -> float | None:
    """Processors' worth of time that a container may use; None where nothing limits it."""
    found = []
    for group in _groups("cpu"):
        with contextlib.suppress(OSError, ValueError):
            limit, period = (group / "cpu.max").read_text().split()
            found.append(int(limit) / int(period))
        with contextlib.suppress(OSError, ValueError):
            limit, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            found += [int(limit) / int(period)] if int(limit) > 0 else []
    return min(found, default=None)


def memory() -> tuple[int, int]:
    """Bytes of memory that are free to use here, and all that there is; within the limit of a container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = total
    with contextlib.suppress(OSError, ValueError):
        said = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(said["MemAvailable"].split()[0]) << 10
    for group in _groups("memory"):
        for most, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
                limit = int((group / most).read_text())
                if limit < total:
                    total = limit
                    free = min(free, max(0, limit - int((group / used).read_text())))
    return free, total


def _groups(controller: str) -> Iterator[Path]:
    """This process's control group and those around it, of both versions."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, names, path = line.split(":", 2)
        if number != "0" and controller not in names.split(","):
            continue
        root = _CGROUP if number == "0" else _CGROUP / controller
        at = root / path.lstrip("/")
        # In a container the path may be one of the host's, which is not there.
        yield from [p for p in (at, *at.parents) if p == root or root in p.parents]


def processor() -> frozenset[str]:
    """What the processor says it can do, in Linux's words; empty where nothing says it."""
    try:
        with Path("/proc/cpuinfo").open() as f:
            for line in f:
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return frozenset(value.split())
    except OSError:
        pass
    return frozenset()
