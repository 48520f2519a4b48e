"""Runs `ckpttool` commands in forks of one process that has imported it.

Starting Python and importing takes longer than most examples; a fork has both behind it. The process listens at a
socket and serves all shells that the pages of a test process start. Each order (client.py) brings arguments, folder,
environment and the three streams; a fork of its own becomes the command and answers with the exit status.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import select
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from functools import cache
from pathlib import Path

from tests.docs import client

ROOT = Path(__file__).parents[2]

ORDER_BYTES = 1 << 20

# Kept for the life of the process: what a command says of warnings, and what its output is encoded in.
FIXED = {"LC_ALL": "C.UTF-8", "PYTHONWARNINGS": "error"}


class Forks:
    """The process."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ckpttool-forks-"))
        self._server = str(self._folder / "socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self._server)
            listener.listen()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.docs.forks", str(listener.fileno())],
                cwd=ROOT,
                env={"PATH": os.environ.get("PATH", os.defpath), **FIXED},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
            )
        self.bin = self._folder / "bin"
        """A folder for PATH: its `ckpttool` is run by the process."""
        self.bin.mkdir()
        words = [sys.executable, "-IS", client.__file__, self._server]
        (self.bin / "ckpttool").write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
        (self.bin / "ckpttool").chmod(0o755)

    def close(self) -> None:
        """End the process."""
        shutil.rmtree(self._folder)  # first: xdist kills a worker that takes long to end, and the process ends with it
        self._process.communicate()


@cache
def forks() -> Forks:
    """The one of this test process, started when it is first needed."""
    one = Forks()
    atexit.register(one.close)
    return one


def _command(arguments: list[str], folder: str, environment: dict[str, str], streams: list[int]) -> int:
    """In a fork: what the console script does."""
    from ckpttool.cli.app import main

    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["ckpttool", *arguments]
    status = 1
    try:
        os.chdir(folder)
        main()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # noqa: BLE001  # as the interpreter does
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _serve_one(connection: socket.socket) -> None:
    """In a fork: carry out the order that comes over the connection."""
    text, streams, _, _ = socket.recv_fds(connection, ORDER_BYTES, 3)
    arguments, folder, environment = json.loads(text)
    connection.send(str(_command(arguments, folder, environment, streams)).encode())


def _warm() -> None:
    """Import what commands import when they run, and make what they make once: the options, the table of families."""
    import ckpttool.ops.convert_json
    import ckpttool.ops.drop_keys
    import ckpttool.ops.inspect.views.registry
    import ckpttool.ops.merge
    import ckpttool.ops.quantize
    import ckpttool.ops.reshard
    import ckpttool.ops.size
    import ckpttool.report  # noqa: F401
    from ckpttool.cli.app import main

    sys.modules["__main__"].__package__ = None  # or usage lines would say `python -m tests.docs.forks`
    sys.argv = ["ckpttool", "inspect", "fixtures/llama_tp8"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main()
    assert threading.active_count() == 1, "a fork would lack the other threads"


def serve(listener: socket.socket) -> None:
    """Carry out orders until stdin ends."""
    _warm()
    running = 0
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        with connection:
            if not os.fork():
                _serve_one(connection)
                os._exit(0)
        running += 1
        while running and os.waitpid(-1, os.WNOHANG)[0]:
            running -= 1
    for _ in range(running):
        os.wait()


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as given:
        serve(given)
