"""Stopping a program at every system call that changes a file, and deciding there what becomes of it.

A forked process puts a seccomp filter on itself and hands its listener to its parent (``SECCOMP_RET_USER_NOTIF``,
Linux 5.9). From then on the kernel stops each thread of it and of its children before every call in ``_CALLS`` and asks
here: let it run, fail it, answer it without running it, or kill them all. Nothing has to be compiled, traced or
patched, and no way of calling (Python, C, ctypes) goes past it.

    run(work, watched, decide)     fork, call work() in there; decide(call) says what happens at each call

Calls below the ``watched`` directories are reported; all others just run. A call is known by its name, its paths and
how often the same came before, so that points can be named over again when threads take turns in another order.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import re
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn

# Every call of Linux that changes a file, a name or their times, that makes such a change durable, or that opens
# another way to do so (io_uring, shared mappings). (x86_64, aarch64); 0 where it does not exist.
_CALLS: dict[str, tuple[int, int]] = {
    "open": (2, 0),
    "creat": (85, 0),
    "openat": (257, 56),
    "openat2": (437, 437),
    "write": (1, 64),
    "writev": (20, 66),
    "pwrite64": (18, 68),
    "pwritev": (296, 70),
    "pwritev2": (328, 287),
    "sendfile": (40, 71),
    "splice": (275, 76),
    "copy_file_range": (326, 285),
    "ioctl": (16, 29),
    "mmap": (9, 222),
    "io_uring_setup": (425, 425),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "fallocate": (285, 47),
    "mkdir": (83, 0),
    "mkdirat": (258, 34),
    "mknod": (133, 0),
    "mknodat": (259, 33),
    "rmdir": (84, 0),
    "unlink": (87, 0),
    "unlinkat": (263, 35),
    "rename": (82, 0),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "link": (86, 0),
    "linkat": (265, 37),
    "symlink": (88, 0),
    "symlinkat": (266, 36),
    "chmod": (90, 0),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, 0),
    "lchown": (94, 0),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, 0),
    "utimes": (235, 0),
    "futimesat": (261, 0),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "flock": (73, 32),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "sync_file_range": (277, 84),
    "sync": (162, 81),
    "syncfs": (306, 267),
    "msync": (26, 227),
}
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

WRITES = ("write", "writev", "pwrite64", "pwritev", "pwritev2")
SYNCS = ("fsync", "fdatasync", "sync_file_range", "syncfs", "sync", "msync")
_AT = {
    "openat": 0, "mkdirat": 0, "mknodat": 0, "unlinkat": 0, "fchmodat": 0, "fchmodat2": 0, "fchownat": 0, "openat2": 0,
    "futimesat": 0, "utimensat": 0,
}  # fmt: skip
"""Calls with (directory, name); the number is that of the argument with the directory."""
_TWO = {"rename": (-1, 0, -1, 1), "link": (-1, 0, -1, 1), "renameat": (0, 1, 2, 3), "renameat2": (0, 1, 2, 3),
        "linkat": (0, 1, 2, 3), "symlink": (-1, 0, -1, 1), "symlinkat": (-1, 0, 1, 2)}  # fmt: skip
_BY_NAME = ("open", "creat", "truncate", "mkdir", "mknod", "rmdir", "unlink", "chmod", "chown", "lchown", "utime",
            "utimes", "setxattr", "lsetxattr", "removexattr", "lremovexattr")  # fmt: skip
_FD_ARGUMENT = {"sendfile": 0, "splice": 2, "copy_file_range": 2, "mmap": 4}
"""The argument with the descriptor that is written to; 0 in all other calls."""

_OPENED_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CLONE = (0x40049409, 0x4020940D)
_AT_FDCWD = -100
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1
_SECONDS = 60.0
"""After which a process that says nothing is taken for hanging."""
_RANDOM = re.compile(r"\.old-\d+|ckpttool-[a-z0-9_]{8}|(?<=[-.])(?:[0-9a-f]{32}|[0-9a-f]{16})(?![0-9a-f])")


@dataclass(frozen=True, slots=True)
class Call:
    """One call that is about to be made."""

    name: str
    path: str
    """Absolute; what is random in a name is replaced by ``*``."""
    other: str = ""
    """The second path of a rename or link."""
    nth: int = 1
    """How many calls with this name and these paths there were, this one included."""
    number: int = 0
    """How many calls of any kind there were, this one included."""
    pid: int = 0
    fd: int = -1
    """The descriptor that it works on, in the process ``pid``; -1 when it goes by name."""
    flags: int = 0
    """Of ``openat``."""
    offset: int = 0
    nbytes: int = 0
    data: int = 0
    """Where what it writes lies in the memory of the process; an array of (address, length) for vectors."""

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What names this call in every run of the same command."""
        return self.name, self.path, self.other, self.nth

    def __str__(self) -> str:
        which = f" #{self.nth}" if self.nth > 1 else ""
        return f"{self.name} {self.path}{' -> ' + self.other if self.other else ''}{which}"


class Fail(NamedTuple):
    """The call is not made and fails with this error."""

    code: int


class Give(NamedTuple):
    """The call is not made and returns this."""

    value: int


class Short(NamedTuple):
    """The first ``part`` of what is to be written is written, and the call says so."""

    part: float


class Kill(NamedTuple):
    """``kill -9`` for the process and all its children; ``after``: when the call has been made."""

    after: bool = False


Decision = Fail | Give | Short | Kill | None
"""None: the call is made."""


@dataclass(slots=True)
class Outcome:
    """How a run ended."""

    code: int
    """Exit code; negative: the signal that killed it."""
    out: str
    err: str
    calls: list[Call] = field(default_factory=list)


class UnavailableError(Exception):
    """The kernel, or what this runs in, does not let a process be supervised."""


def run(
    work: Callable[[], int],
    watched: Sequence[Path],
    decide: Callable[[Call], Decision] = lambda _: None,
) -> Outcome:
    """Call ``work`` in a forked process and ``decide`` at each of its calls below ``watched``.

    Raises UnavailableError, and TimeoutError when the process hangs.
    """
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        raise UnavailableError(f"not for {sys.platform} on {platform.machine()}")
    here, there = socket.socketpair()
    streams = [os.memfd_create(name) for name in ("stdout", "stderr")]
    pid = os.fork()
    if not pid:
        here.close()
        _live(work, there, streams)
    there.close()
    try:
        listener = _listener(here, pid)
        try:
            code, calls = _Supervisor(pid, listener, [os.path.realpath(w) for w in watched], decide).watch()
        finally:
            os.close(listener)
        out, err = (os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace") for fd in streams)
        return Outcome(code, out, err, calls)
    finally:
        here.close()
        for fd in streams:
            os.close(fd)


def available() -> str:
    """Why no process can be supervised here; empty when it can."""
    try:
        run(lambda: 0, [])
    except UnavailableError as e:
        return str(e)
    return ""


def _listener(here: socket.socket, pid: int) -> int:
    message, fds, _, _ = socket.recv_fds(here, 200, 1)
    if not fds:
        os.waitpid(pid, 0)
        raise UnavailableError(message.decode() or "the process ended at once")
    return fds[0]


def _live(work: Callable[[], int], there: socket.socket, streams: Sequence[int]) -> NoReturn:
    """The process that is watched."""
    code = 70
    try:
        os.setpgid(0, 0)
        atexit._clear()  # the parent's
        for number, fd in enumerate(streams, 1):
            os.dup2(fd, number)
            os.close(fd)
        sys.stdout, sys.stderr = (open(n, "w", encoding="utf-8", closefd=False) for n in (1, 2))  # noqa: SIM115
        try:
            listener = _install()
        except OSError as e:
            there.send(f"seccomp: {e.strerror}".encode())
            os._exit(70)
        socket.send_fds(there, [b"+"], [listener])
        os.close(listener)
        there.close()
        try:
            code = work()
        except BaseException:  # noqa: BLE001 - the parent looks for tracebacks
            traceback.print_exc()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _install() -> int:
    """Put the filter on this process. Returns its listener. Raises OSError."""
    column, architecture = _MACHINES[platform.machine()]
    allow, ask = (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x7FC00000)

    def load(offset: int) -> tuple[int, int, int, int]:
        return 0x20, 0, 0, offset

    def argument(n: int) -> tuple[int, int, int, int]:
        return load(16 + 8 * n)

    def equal(value: int, skip: int) -> tuple[int, int, int, int]:
        return 0x15, 0, skip, value

    def any_bit(value: int, skip: int) -> tuple[int, int, int, int]:
        return 0x45, 0, skip, value

    program = [load(4), equal(architecture, 1), (0x05, 0, 0, 1), allow, load(0)]
    for name, numbers in _CALLS.items():
        test = [ask]
        if name in ("open", "openat"):
            test = [argument(1 if name == "open" else 2), any_bit(_OPENED_TO_WRITE, 1), ask, allow]
        elif name == "ioctl":
            test = [argument(1), equal(_CLONE[0], 1), ask, equal(_CLONE[1], 1), ask, allow]
        elif name == "mmap":
            test = [argument(3), any_bit(1, 3), argument(2), any_bit(2, 1), ask, allow]
        if numbers[column]:
            program += [equal(numbers[column], len(test)), *test]
    program.append(allow)
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("@HxxxxxxP", len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0):  # PR_SET_NO_NEW_PRIVS
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    seccomp = (317, 277)[column]
    listener = libc.syscall(seccomp, ctypes.c_ulong(1), ctypes.c_ulong(8), ctypes.c_char_p(head))
    if listener < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(listener)


class _Supervisor:
    """The parent's side: answers until the last process of the run is gone."""

    def __init__(self, pid: int, listener: int, watched: list[str], decide: Callable[[Call], Decision]) -> None:
        self.pid = pid
        self.listener = listener
        self.watched = watched
        self.decide = decide
        self.calls: list[Call] = []
        self.seen: Counter[tuple[str, str, str]] = Counter()
        column = _MACHINES[platform.machine()][0]
        self.names = {numbers[column]: name for name, numbers in _CALLS.items() if numbers[column]}
        self.held: list[int] = []
        """Calls that wait while the one after which all is killed is made."""
        self.last = 0
        """The thread that makes that one; 0: none."""

    def watch(self) -> tuple[int, list[Call]]:
        # Workers whose parent is killed come to this process, and are waited for here.
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        poll = select.poll()
        poll.register(self.listener, select.POLLIN)
        leader = os.pidfd_open(self.pid)
        poll.register(leader, select.POLLIN)
        code: int | None = None
        spoke = time.monotonic()
        while True:
            events = dict(poll.poll(2 if code is not None or self.last else 1000))
            if events.get(self.listener, 0) & select.POLLIN:
                spoke = time.monotonic()
                self._answer()
                continue
            if self.last and not _running(self.last):
                self._kill()
            code = self._reap(code)
            if code is not None and leader >= 0:
                poll.unregister(leader)
                os.close(leader)
                leader = -1
            if events.get(self.listener, 0) & select.POLLHUP and code is not None:
                return code, self.calls
            if time.monotonic() - spoke > _SECONDS:
                self._kill()
                while self._reap(code) is None:
                    time.sleep(0.01)
                at = self.calls[-1] if self.calls else "its start"
                raise TimeoutError(f"the process has said nothing for {_SECONDS:.0f} s after {at}")

    def _reap(self, code: int | None) -> int | None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return code
            if not pid:
                return code
            if pid == self.pid:
                code = os.waitstatus_to_exitcode(status)

    def _kill(self) -> None:
        self.last = 0
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _answer(self) -> None:
        data = bytearray(80)
        try:
            fcntl.ioctl(self.listener, _RECEIVE, data)
        except OSError as e:
            if e.errno in (errno.ENOENT, errno.EINTR):  # killed while it asked
                return
            raise
        ident, tid, _, number, _, _, *arguments = struct.unpack("=QIIiIQ6Q", data)
        if self.last:
            if tid == self.last:
                self._kill()
            return
        try:
            call = self._call(tid, self.names[number], arguments)
        except (FileNotFoundError, ProcessLookupError):  # killed while it was looked at
            return
        if call is None:
            self._send(ident, 0, 0, _CONTINUE)
            return
        self.calls.append(call)
        match self.decide(call):
            case None:
                self._send(ident, 0, 0, _CONTINUE)
            case Fail(code):
                self._send(ident, 0, -code, 0)
            case Give(value):
                self._send(ident, value, 0, 0)
            case Short(part):
                self._send(ident, self._write_part(call, part), 0, 0)
            case Kill(after):
                if after:
                    self.last = tid
                    self._send(ident, 0, 0, _CONTINUE)
                else:
                    self._kill()

    def _send(self, ident: int, value: int, error: int, flags: int) -> None:
        try:
            fcntl.ioctl(self.listener, _SEND, struct.pack("=QqiI", ident, value, error, flags))
        except OSError as e:
            if e.errno != errno.ENOENT:
                raise

    # -- what is called

    def _call(self, tid: int, name: str, arguments: Sequence[int]) -> Call | None:
        """The call, if it is about something that is watched."""
        other, fd = "", -1
        if name in ("sync", "io_uring_setup"):
            raise RuntimeError(f"{name} is not watched")
        if name in _TWO:
            a, b, c, d = _TWO[name]
            one = "" if name.startswith("symlink") else _named(tid, arguments, a, b)
            path, other = one, _named(tid, arguments, c, d)
            if not one:
                path, other = other, ""
        elif name in _AT:
            if name == "utimensat" and not arguments[1]:
                fd = _signed(arguments[0])
                path = _opened(tid, fd)
            else:
                path = _named(tid, arguments, _AT[name], _AT[name] + 1)
        elif name in _BY_NAME:
            path = _named(tid, arguments, -1, 0)
        else:
            fd = _signed(arguments[_FD_ARGUMENT.get(name, 0)])
            if fd < 0:
                return None  # anonymous memory
            path = _opened(tid, fd)
        if not any(_below(p, w) for p in (path, other) for w in self.watched):
            return None
        if name == "openat2":
            name = "openat"
        offset = nbytes = data = 0
        flags = arguments[2] if name == "openat" else 0
        if name in WRITES:
            data, nbytes = arguments[1], arguments[2]
            offset = arguments[3] if name.startswith("p") else -1
            if name in ("writev", "pwritev", "pwritev2"):
                nbytes = sum(n for _, n in _vector(tid, data, nbytes))
        path, other = _RANDOM.sub("*", path), _RANDOM.sub("*", other)
        self.seen[name, path, other] += 1
        nth, number = self.seen[name, path, other], len(self.calls) + 1
        return Call(name, path, other, nth, number, tid, fd, flags, offset, nbytes, data)

    def _write_part(self, call: Call, part: float) -> int:
        """Do a write in its place, with a part of its bytes. Returns how many."""
        count = max(1, int(call.nbytes * part))
        if call.name in ("write", "pwrite64"):
            data = _memory(call.pid, call.data, count)
        else:
            pieces = _vector(call.pid, call.data, 1024, call.nbytes)
            data = b"".join(_memory(call.pid, a, n) for a, n in pieces)[:count]
        # The same open file as the program's, so that its position moves on as well.
        group = int(_status(call.pid, "Tgid"))
        process = os.pidfd_open(group)
        fd = ctypes.CDLL(None, use_errno=True).syscall(438, process, call.fd, 0)
        os.close(process)
        if fd < 0:
            raise UnavailableError(f"pidfd_getfd: {os.strerror(ctypes.get_errno())}")
        try:
            return os.write(fd, data) if call.offset < 0 else os.pwrite(fd, data, call.offset)
        finally:
            os.close(fd)


def _signed(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def _below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory + "/")


def _named(tid: int, arguments: Sequence[int], directory: int, name: int) -> str:
    """The absolute path that a pair of arguments means; its last part may be a link."""
    given = os.fsdecode(_string(tid, arguments[name]))
    if not given.startswith("/"):
        at = _AT_FDCWD if directory < 0 else _signed(arguments[directory])
        base = str(Path(f"/proc/{tid}/cwd").readlink()) if at == _AT_FDCWD else _opened(tid, at)
        given = f"{base}/{given}"
    head, tail = os.path.split(os.path.normpath(given))
    return os.path.join(os.path.realpath(head), tail)  # noqa: PTH118


def _opened(tid: int, fd: int) -> str:
    return os.readlink(f"/proc/{tid}/fd/{fd}").removesuffix(" (deleted)")  # noqa: PTH115


def _memory(tid: int, address: int, nbytes: int) -> bytes:
    fd = os.open(f"/proc/{tid}/mem", os.O_RDONLY)
    try:
        return os.pread(fd, nbytes, address)
    finally:
        os.close(fd)


def _string(tid: int, address: int) -> bytes:
    found = b""
    while b"\0" not in found and len(found) < 4096:
        at = address + len(found)
        found += _memory(tid, at, 256 - at % 256)  # never beyond the page
    return found.split(b"\0")[0]


def _vector(tid: int, address: int, count: int, nbytes: int = -1) -> list[tuple[int, int]]:
    """The pieces of a vector: ``count`` of them, or as many as hold ``nbytes``."""
    out: list[tuple[int, int]] = []
    for i in range(count):
        if not nbytes:
            break
        start, length = struct.unpack("=QQ", _memory(tid, address + 16 * i, 16))
        out.append((start, length))
        if nbytes > 0:
            nbytes = max(0, nbytes - length)
    return out


def _status(tid: int, what: str) -> str:
    for line in Path(f"/proc/{tid}/status").read_text().splitlines():
        if line.startswith(what + ":"):
            return line.split(":")[1].strip()
    raise ProcessLookupError(tid)


def _running(tid: int) -> bool:
    """Whether the thread is inside a call or computing, and not waiting for another one that is held."""
    try:
        state = Path(f"/proc/{tid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state in "RD"
