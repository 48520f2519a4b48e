"""Runs the command line in forks of this process, and kills some of them at a chosen system call."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SECONDS = 240
"""After which a command hangs."""

_CALLS = (
    "open", "write", "pwrite", "pwritev", "ftruncate", "truncate", "fsync", "fdatasync", "rename", "replace", "link",
    "unlink", "mkdir", "rmdir", "posix_fallocate", "sendfile", "copy_file_range",
)  # fmt: skip
"""Of the module os: what can change a file. A command is killed in front of one of these."""


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    """Its exit status; -9 when it was killed, -14 when it took too long."""
    out: str
    err: str


def _kill_at(call: int) -> None:
    """From now on count what changes files, and die in front of that call."""
    count = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        return counting

    for name in _CALLS:
        if hasattr(os, name):
            setattr(os, name, counted(getattr(os, name)))


def _become(arguments: Sequence[str], folder: Path, kill_at: int) -> int:
    from ckpttool.cli import main

    signal.alarm(SECONDS)
    for stream, name in ((1, "stdout"), (2, "stderr")):
        fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(fd, stream)
        os.close(fd)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    os.chdir(folder)
    os.environ["TMPDIR"] = str(folder / "tmp")
    sys.argv = ["ckpttool", *arguments]
    if kill_at:
        _kill_at(kill_at)
    status = 0
    try:
        main()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # noqa: BLE001  # as the interpreter does
        traceback.print_exc()
        status = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    return status


def ckpttool(arguments: Sequence[str], folder: Path, kill_at: int = 0) -> Ended:
    """Run in ``folder``, which gets files ``stdout`` and ``stderr`` and a directory ``tmp``."""
    (folder / "tmp").mkdir(exist_ok=True)
    sys.stdout.flush()
    child = os.fork()
    if not child:
        status = 1
        try:
            status = _become(arguments, folder, kill_at)
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return Ended(code, *((folder / n).read_text(encoding="utf-8") for n in ("stdout", "stderr")))


def warm() -> None:
    """Import what commands import when they run."""
    import ckpttool.ops.drop_keys
    import ckpttool.ops.merge
    import ckpttool.ops.quantize
    import ckpttool.ops.reshard
    import ckpttool.report  # noqa: F401
    from ckpttool.layout.family import family_names

    family_names()
