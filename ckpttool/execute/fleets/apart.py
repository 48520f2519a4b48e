"""A fleet in a process of its own. Run as a module, it is that process.

An engine may end the process that uses it: Ray does so when the head node does not answer for a minute, with a line
of C++. Here only the process at the other end of a pipe ends, and a run hears of it as an error like any other. What
an engine prints goes to a file.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from urllib3.util.connection import create_connection

from ckpttool.errors import CkptError, OutputError, not_installed
from ckpttool.execute.error_data import error_from_data, error_to_data
from ckpttool.execute.fleets.base import Fleet, FleetJob, Order, Reply

_END_TIMEOUT = 30.0
"""Seconds for the process to let go of the machines."""
_CONNECT_TIMEOUT = 3.0
"""Seconds until the head node has answered, or is gone."""


class Connected(Fleet, Protocol):
    """A fleet that knows what it is connected to."""

    @property
    def head(self) -> str:
        """HOST:PORT of the machine that keeps the cluster together; "" before there is a connection."""


def connected(engine: str, address: str) -> Connected:
    """The fleet of an engine, in this process. Raises UsageError when the engine is not installed."""
    try:
        module = import_module(f"ckpttool.execute.fleets.{engine}")
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition(".")[0] == "ckpttool":
            raise
        raise not_installed(f"--on {engine}", e.name, engine) from None
    found: Connected = module.fleet(address)
    return found


class ApartFleet:
    """A fleet whose engine runs in a process of its own. Calls and answers go through a pipe."""

    def __init__(self, engine: str, address: str) -> None:
        self._name = f"{engine}={address}" if address else engine
        self._address, self._head = address, ""
        self._nodes = self._slots = 0
        self._early: list[Reply] = []
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._pipe, theirs = Pipe()
        life, held = os.pipe()
        self._life = os.fdopen(held, "wb")
        """The other end of the process's stdin: it closes when this process ends, and then the other ends, too."""
        words = [sys.executable, "-m", __name__, engine, address, str(theirs.fileno())]
        paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(  # noqa: S603 - this package
            words,
            stdin=life,
            stdout=self._printed,
            stderr=self._printed,
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C is for this one
        )
        theirs.close()
        os.close(life)
        try:
            self._receive()
        except BaseException:
            self.end(now=True)
            raise

    def start(self, job: FleetJob) -> None:
        self._ask("start", job)

    def nodes(self) -> int:
        return self._nodes

    def slots(self) -> int:
        return self._slots

    def send(self, ticket: int, order: Order) -> None:
        self._ask("send", ticket, order)

    def replies(self, timeout: float) -> Sequence[Reply]:
        return [
            r if r.error is None else replace(r, error=error_from_data(said, whose="a process of the cluster"))
            for r, said in self._ask("replies", timeout)
        ]

    def end(self, *, now: bool) -> None:
        """Have the process end the fleet (``Fleet.end``) and exit. It is killed after ``_END_TIMEOUT`` seconds."""
        pipe = self._pipe
        if pipe.closed:
            return
        until = time.monotonic() + _END_TIMEOUT
        with contextlib.suppress(OSError, EOFError):
            pipe.send(("end", now))
            # While it cannot send an answer, it does not receive: read and drop answers.
            while pipe.poll(max(0.0, until - time.monotonic())):
                pipe.recv_bytes()
        try:
            self._process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            pipe.close()
            self._life.close()
            self._printed.close()

    # -- what goes through the pipe

    def _ask(self, *what: Any) -> Any:
        with contextlib.suppress(OSError):  # then no answer arrives, either
            self._pipe.send(what)
        return self._receive()

    def _receive(self) -> Any:
        """An answer. Raises what was raised there, and OutputError when there is no answer any more."""
        try:
            error, answer, self._nodes, self._slots, self._head = self._pipe.recv()
        except (OSError, EOFError):
            raise self._connection_error(self._last_line()) from None
        if error is None:
            return answer
        if error[0]:
            raise error_from_data(error, whose="")
        raise self._connection_error(error[1].strip().splitlines()[-1])

    def _last_line(self) -> str:
        """The engine's last output: its first sentence, without time and place."""
        self._printed.seek(0)
        lines = [line for line in self._printed.read().decode(errors="replace").splitlines() if line.strip()]
        return re.sub(r"^\[[^]]*\] \S+: ", "", lines[-1]).strip().partition(". ")[0] if lines else ""

    def _connection_error(self, said: str) -> CkptError:
        """The error for a lost connection to the cluster. ``said``: the last line of the engine; "" for none."""
        self._nodes = self._slots = 0
        head = self._head or self._address
        host, _, port = head.rpartition(":")
        where = [f"--on {self._name}", said and f"last output: {said}"]
        if not host or not port.isdecimal():
            return OutputError("no connection to the cluster", where=where, hint="see `ray status`")
        try:
            create_connection((host, int(port)), _CONNECT_TIMEOUT).close()
        except (OSError, ValueError) as e:  # ValueError: no name of a host
            what = f"the head node of the cluster is gone: no answer from {head} ({getattr(e, 'strerror', '') or e})"
            hint = "start the cluster again, or omit --on"
        else:
            what = f"this machine has lost its connection to the cluster of {head}"
            hint = "`ray status` shows which nodes are left; let this machine join again, or use another one"
        return OutputError(what, where=where, hint=hint)


# -- the process itself


def _result_of(fleet: Connected, method: str, given: Sequence[Any]) -> tuple[list[Any] | None, Any]:
    """Call a method of the fleet: (the error that it raises as data or None, what it returns)."""
    try:
        found = getattr(fleet, method)(*given)
        if method == "replies":
            found = [(replace(r, error=None), r.error and error_to_data(r.error)) for r in found]
    except Exception as e:  # noqa: BLE001 - raised again by the run
        return error_to_data(e), None
    return None, found


def _serve(engine: str, address: str, pipe: Connection[Any, Any]) -> None:
    """Do what the pipe says until it says ``end``."""
    threading.Thread(target=_watch, daemon=True).start()
    try:
        fleet = connected(engine, address)
    except CkptError as e:
        pipe.send((error_to_data(e), None, 0, 0, ""))
        return
    pipe.send((None, None, 0, 0, ""))
    while True:
        method, *given = pipe.recv()
        if method == "end":
            fleet.end(now=given[0])
            return
        pipe.send((*_result_of(fleet, method, given), fleet.nodes(), fleet.slots(), fleet.head))


def _watch() -> None:
    """Exit when the process that has started this one ends."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], Connection(int(sys.argv[3])))
