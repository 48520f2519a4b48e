"""Claims on a directory that several machines write: one holder at a time, without locks and without a common clock.

A lock of the system (flock) may reach no further than one machine. A claim is a file, which all machines see:

    .claim-NAME-1  .claim-NAME-2  ...         the highest number holds
    {"token": ..., "host": ..., "pid": ..., "machine": ..., "plan": ...}
    0000000000000017                          how often its holder has said that it lives; "-" when it has let go

Each is made whole, and only where there is none of its number: a temporary file gets it as a second name (``link``);
where a filesystem has no links, it is created exclusively, and who reads half of it sees a holder whom nobody knows.

A holder counts every ``BEAT`` seconds. A claim may be taken, by making the next number, when its holder has let go,
when its process is gone from this machine, or when its count has stayed the same for ``SILENT`` seconds of the clock of
who watches it. What any other clock says plays no part; time in which the watcher itself stood still hardly counts.

Who takes a claim removes the lower numbers. So a holder that was stopped for a while finds its file gone, or a higher
number, when it looks (``check``), and ends. Between two looks it may still believe that it holds: what must not happen
then has to fail by itself, such as a rename of a directory that has another name by now.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass

from ckpttool.errors import OutputError
from ckpttool.execute.destinations.holder import HERE, Holder
from ckpttool.execute.files import write_error
from ckpttool.storage import system

BEAT = 10.0
SILENT = 60.0
LOOK = 1.0
"""Seconds between two looks of somebody who waits."""

PREFIX = ".claim-"
TEMPORARY = ".new-"
_FREE = b"-" * 16
_MOST = 1 << 26
"""Bytes of a file that does not grow with the work."""
_NUMBER = r"([1-9][0-9]*)"
"""Number of a claim: no other spelling names the same file."""
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EACCES)


class Folder:
    """Small files in one directory, known by its descriptor: whatever name it gets, it stays the same one."""

    def __init__(self, fd: int, where: str) -> None:
        self.fd = fd
        self.where = where

    def names(self) -> list[str]:
        # Not of the descriptor itself: threads that list it at a time would move each other's position.
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            return os.listdir(fd)  # noqa: PTH208 - by descriptor
        finally:
            os.close(fd)

    def read(self, name: str, most: int = _MOST) -> bytes | None:
        """What a file holds; None where there is none. Raises OutputError for what no part has made: a link, a pipe,
        more than ``most`` bytes.
        """
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.fd)
        except FileNotFoundError:
            return None
        except OSError as e:
            if e.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
                raise self._foreign(name) from e
            raise
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_size > most:
                raise self._foreign(name)
        except BaseException:
            os.close(fd)
            raise
        with os.fdopen(fd, "rb") as f:
            return f.read()

    def _foreign(self, name: str) -> OutputError:
        what = "no part of the run made this"
        return OutputError(what, where=f"{self.where}/{name}", hint="find out what did, and remove it")

    def put_new(self, name: str, data: bytes) -> bool:
        """Make a file with these bytes, durable, unless there is one. Returns whether it was made."""
        temporary = self._temporary(data)
        try:
            os.link(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)
            made = True
        except FileExistsError:
            # An answer that was lost on its way from a server is asked for again: then it was there by ourselves.
            made = os.stat(temporary, dir_fd=self.fd, follow_symlinks=False).st_nlink > 1
        except OSError as e:
            if e.errno not in _NO_LINKS:
                raise
            made = self._create(name, data)
        finally:
            self.remove(temporary)
        self.sync()
        return made

    def put(self, name: str, data: bytes) -> None:
        """Make a file with these bytes, durable, or replace one at once."""
        temporary = self._temporary(data)
        try:
            os.replace(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except BaseException:
            self.remove(temporary)
            raise
        self.sync()

    def touch(self) -> None:
        """Change the directory, and nothing in it."""
        self.remove(self._temporary(b""))

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def sync(self) -> None:
        system.sync(self.fd)

    def _temporary(self, data: bytes) -> str:
        name = TEMPORARY + uuid.uuid4().hex
        self._create(name, data)
        return name

    def _create(self, name: str, data: bytes) -> bool:
        try:
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=self.fd)
        except FileExistsError:
            return False
        with os.fdopen(fd, "wb") as f:
            f.write(data)
            f.flush()
            system.sync(fd)
        return True


@dataclass(frozen=True, slots=True)
class ClaimFile:
    """A claim as it lies in the directory."""

    name: str
    number: int
    data: bytes

    @property
    def holder(self) -> Holder | None:
        """None for what cannot be read: it is being made, or was never finished."""
        try:
            said = json.loads(self.data.split(b"\n")[0])
            holder = Holder(said["token"], said["host"], said["pid"], said["machine"])
            holder.check()
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        return holder

    @property
    def is_free(self) -> bool:
        """Whether its holder has let go."""
        return self.data.endswith(b"\n" + _FREE)

    def __str__(self) -> str:
        holder = self.holder
        return "an unknown process" if holder is None else str(holder)


class TakenOverError(OutputError):
    """This process was silent for so long that another one has taken its claim."""


class Claims:
    """The claims in one directory, for one plan."""

    def __init__(self, folder: Folder, plan: str) -> None:
        self.folder = folder
        self.plan = plan

    def all(self) -> list[ClaimFile]:
        """The valid claim of each name, unless its holder has released it."""
        names: dict[str, int] = {}
        for file in self.folder.names():
            if match := re.fullmatch(re.escape(PREFIX) + r"(.+)-" + _NUMBER, file):
                names[match[1]] = max(int(match[2]), names.get(match[1], 0))
        found = [self._read(name, number) for name, number in sorted(names.items())]
        return [f for f in found if f is not None and not f.is_free]

    def highest(self, name: str) -> ClaimFile | None:
        """The valid claim of this name; None where there never was one."""
        while True:
            number = max(self._numbers(name), default=0)
            if not number:
                return None
            if (found := self._read(name, number)) is not None:
                return found
            # Who has just taken the next one has removed it.

    def _read(self, name: str, number: int) -> ClaimFile | None:
        data = self.folder.read(_file(name, number))
        return None if data is None else ClaimFile(name, number, data)

    def _numbers(self, name: str) -> list[int]:
        start = _file(name, "")
        found = [re.fullmatch(re.escape(start) + _NUMBER, file) for file in self.folder.names()]
        return [int(match[1]) for match in found if match]

    def take(self, name: str, over: Callable[[ClaimWatch], bool]) -> Claim | None:
        """Wait until the claim is this process's. ``over`` is called after each look at somebody who holds it: it may
        raise, or say that there is nothing to wait for any more; then None is returned.
        """
        watch = ClaimWatch(self, name)
        while True:
            if watch.look():
                if claim := self._next(name, watch.number):
                    return claim
                continue
            if over(watch):
                return None
            time.sleep(LOOK)

    def _next(self, name: str, number: int) -> Claim | None:
        """Take the next number; None when another process has it."""
        me = Holder.here()
        data = json.dumps(asdict(me) | {"plan": self.plan}).encode() + b"\n" + _counted(0)
        HERE.add(me.token)
        if not self.folder.put_new(_file(name, number + 1), data):
            HERE.discard(me.token)
            return None
        for lower in self._numbers(name):
            if lower <= number:
                self.folder.remove(_file(name, lower))
        return Claim(self, name, number + 1, me, data)


class ClaimWatch:
    """Waits for a claim: looks from time to time whether its holder is alive."""

    def __init__(self, claims: Claims, name: str) -> None:
        self._claims = claims
        self._name = name
        self._seen: ClaimFile | None = None
        self._last = 0.0
        self.silent = 0.0
        """Seconds for which its holder has said nothing."""
        self.beats = False
        """Whether its holder has said something since the first look."""

    @property
    def holder(self) -> ClaimFile:
        """The claim file at the last look; empty where there was none."""
        return self._seen or ClaimFile(self._name, 0, b"")

    @property
    def number(self) -> int:
        return self._seen.number if self._seen else 0

    def look(self) -> bool:
        """Whether the claim may be taken: nobody has it, or who has it is gone, or has been silent for too long."""
        found, now = self._claims.highest(self._name), time.monotonic()
        if found is None or self._seen is None or found != self._seen:
            self.beats = found is not None and self._seen is not None and found.number == self._seen.number
            self.silent = 0.0
        else:
            self.silent += min(now - self._last, 2 * LOOK)
        self._seen, self._last = found, now
        if found is None or found.is_free or self.silent >= SILENT:
            return True
        holder = found.holder
        return holder is not None and holder.is_gone()


class Claim:
    """A claim that this process holds, or held."""

    def __init__(self, claims: Claims, name: str, number: int, me: Holder, data: bytes) -> None:
        self._claims = claims
        self._file = _file(name, number)
        self._next = _file(name, number + 1)
        self._size = len(data)
        self._count = 0
        self._name = name
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._looked = time.monotonic()
        self.me = me

    def beat(self) -> None:
        """Begin to say every ``BEAT`` seconds that this process lives."""
        if self._thread is None:
            thread = threading.Thread(target=self._beat, name=f"claim-{self._name}", daemon=True)
            thread.start()
            self._thread = thread  # Ctrl-C before this leaves a thread that ends when the claim is let go

    def _beat(self) -> None:
        while not self._end.wait(BEAT):
            with self._lock, contextlib.suppress(OSError, TakenOverError):  # who asks next hears of it
                if not self._end.is_set():
                    self._count += 1
                    self._write(_counted(self._count))

    def check(self) -> None:
        """Raises TakenOverError when somebody else has the claim, OutputError when that cannot be found out."""
        with self._lock:
            try:
                os.close(self._open())
            except OSError as e:
                raise write_error(e, self._claims.folder.where, 0, 0) from e
            self._looked = time.monotonic()

    def check_lately(self) -> None:
        """``check``, unless that was done so lately that nobody can have thought this process silent."""
        if time.monotonic() - self._looked > SILENT / 4:
            self.check()

    def _open(self) -> int:
        """The claim's own file. Raises TakenOverError when it does not count any more."""
        folder = self._claims.folder
        try:
            fd = os.open(self._file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder.fd)
        except FileNotFoundError:
            raise self._lost() from None
        try:
            found = ClaimFile(self._name, 0, os.pread(fd, self._size, 0)).holder
            with contextlib.suppress(FileNotFoundError):
                os.stat(self._next, dir_fd=folder.fd, follow_symlinks=False)
                found = None
            if found != self.me:
                raise self._lost()
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _lost(self) -> TakenOverError:
        found = None
        with contextlib.suppress(OSError):
            found = self._claims.highest(self._name)
        who = f"{found} has taken over" if found else "its claim is gone"
        what = f"this process was silent for {SILENT:.0f} s or more, and {who}"
        return TakenOverError(what, where=self._claims.folder.where)

    def _write(self, count: bytes) -> None:
        fd = self._open()
        try:
            os.pwrite(fd, count, self._size - len(count))
            system.sync(fd)
        finally:
            os.close(fd)
        self._looked = time.monotonic()

    def release(self) -> None:
        """Let go."""
        self._end.set()
        HERE.discard(self.me.token)
        if self._thread is not None:
            self._thread.join(LOOK)  # it may hang in a write
        with self._lock, contextlib.suppress(OSError, TakenOverError):
            self._write(_FREE)


def _file(name: str, number: int | str) -> str:
    return f"{PREFIX}{name}-{number}"


def _counted(count: int) -> bytes:
    return b"%016d" % count
