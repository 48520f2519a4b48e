"""Nodes of a Ray cluster (``--on ray``). The only module that imports ray.

On each node one process works, a *worker*: an actor of one CPU that Ray neither moves nor restarts. A worker opens the
job once and has up to two orders, so that the next one begins when one is done. When a worker ends, its orders are
lost, and the node gets a new worker while Ray has the node. Ray's own placement and repetition would fill one node
before the next, and wait for a place on a node that is busy with something else.

Nodes get this package with the worker (``py_modules``), so that all have the same. What it needs must be there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RuntimeEnvSetupError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from urllib3.util.connection import create_connection

from ckpttool import version
from ckpttool.errors import CkptError, ConflictError, OutputError, UsageError
from ckpttool.execute.error_data import error_from_data, on_node
from ckpttool.execute.fleets.base import FleetJob, Order, Reply
from ckpttool.version import __version__

_DEPTH = 2
"""Orders of a worker: the one that it does, and the next."""
_STRIKES = 3
"""Workers that a node may lose one after the other, without an answer, until it gets no more."""
_LOOK_EVERY = 1.0
"""Seconds between two looks at the nodes of the cluster."""
_FIRST, _OTHERS = 120.0, 5.0
"""Seconds to wait until a worker can begin, and then for those of other nodes, which may come later, too."""
_REACH = 10.0
"""Seconds to reach the cluster."""
_ANY = ("auto", "local")
"""Addresses that are none, and that Ray understands: the cluster of this machine; a new one."""
_SETTINGS = b"\x04"
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _SETTINGS + b"\0\0\0\0\0"
"""What a client of HTTP/2, and so of gRPC, says first (RFC 9113, 3.4); the server answers with its settings."""
_DISMISS = 10.0
"""Seconds for workers to end in."""


def fleet(address: str) -> RayFleet:
    """The cluster at an address (HOST:PORT), or the one of RAY_ADDRESS, or the one that this machine belongs to."""
    return RayFleet(address or os.environ.get("RAY_ADDRESS") or "auto")


@dataclass(slots=True)
class _Station:
    """A node, and its worker."""

    node: str
    """Ray's identifier of the node."""
    label: str
    worker: Any = None
    ready: bool = False
    """Whether the worker has opened the job."""
    orders: int = 0
    strikes: int = 0


class RayFleet:
    """See ``Connected``."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._ours = self._connected = False
        self._speak: Callable[[], None] = lambda: None
        """Takes back what made Ray quiet."""
        self._stations: dict[str, _Station] = {}
        self._away: dict[Any, tuple[_Station, Any, int | None]] = {}
        """Reference to an answer -> who gives it, and the ticket; None is the word that a worker can begin."""
        self._backlog: list[Reply] = []
        self._looked = -_LOOK_EVERY
        self._job: Any = None
        self._worker_class: Any = None
        self.head = ""
        self._trouble = ""
        """Why the last worker could not begin."""

    def start(self, job: FleetJob) -> None:
        if not self._connected:
            self._ours = not ray.is_initialized()
            _reach(self._address)
            if self._ours:
                self._speak = _hush()
                _connect(self._address)
            else:
                _check_connected(self._address)
            self._connected = True
            self.head = str(ray.get_runtime_context().gcs_address)
            self._worker_class = ray.remote(_ray_worker_class())
        self._job = ray.put(job)
        for station in self._stations.values():
            if station.worker is not None:
                station.ready = False
                self._begin(station)
        self._looked = -_LOOK_EVERY
        self._gather()

    def _gather(self) -> None:
        """Wait for workers that have opened the job."""
        until = time.monotonic() + _FIRST
        while time.monotonic() < until:
            for reply in self.replies(0.1):
                if reply.error is not None:
                    raise on_node(reply.error, reply.node)
            coming = [s for s in self._stations.values() if s.worker is not None and not s.ready]
            if self.nodes():
                until = min(until, time.monotonic() + _OTHERS) if coming else 0
            elif self._stations and all(s.strikes >= _STRIKES for s in self._stations.values()):
                break
        if not self.nodes():
            raise OutputError(
                f"no node of the Ray cluster can begin{self._trouble and ': '}{self._trouble}",
                where=[s.label for s in self._stations.values()] or self._address,
                hint="a node needs one free CPU: see `ray status`",
            )

    def nodes(self) -> int:
        return sum([s.ready for s in self._stations.values()])

    def slots(self) -> int:
        return _DEPTH * self.nodes()

    def send(self, ticket: int, order: Order) -> None:
        station = min([s for s in self._stations.values() if s.ready], key=lambda s: (s.orders, s.strikes))
        station.orders += 1
        self._away[station.worker.do.remote(order)] = (station, station.worker, ticket)

    def replies(self, timeout: float) -> Sequence[Reply]:
        self._look()
        if not self._backlog:
            if not self._away:
                time.sleep(timeout)
                return []
            refs = list(self._away)
            if ray.wait(refs, num_returns=1, timeout=timeout)[0]:
                done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
                for ref in done:
                    self._hear(ref)
        found, self._backlog = self._backlog, []
        return found

    def end(self, *, now: bool) -> None:
        workers = [s.worker for s in self._stations.values() if s.worker is not None]
        idle = [s.worker for s in self._stations.values() if s.ready and not s.orders]
        self._stations, self._away = {}, {}
        if not self._connected:
            return
        self._connected = False
        with contextlib.suppress(RayError):
            if idle and not now:
                ray.wait([h.close.remote() for h in idle], num_returns=len(idle), timeout=_DISMISS)
            for worker in workers:
                ray.kill(worker)
            # A call of a worker fails when there is none any more.
            if workers:
                ray.wait([w.close.remote() for w in workers], num_returns=len(workers), timeout=_DISMISS)
        self._job = None
        if self._ours:
            ray.shutdown()
            self._speak()

    # -- nodes come and go

    def _look(self) -> None:
        """See which nodes there are, and give each a worker."""
        if time.monotonic() - self._looked < _LOOK_EVERY:
            return
        alive = {n["NodeID"]: n for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0) >= 1}
        for gone in self._stations.keys() - alive.keys():
            self._bury(self._stations.pop(gone))
        for node, said in alive.items():
            station = self._stations.get(node)
            if station is None:
                station = self._stations[node] = _Station(node, self._label(said))
            if station.worker is None and station.strikes < _STRIKES:
                self._add_worker(station)
        self._looked = time.monotonic()

    def _label(self, said: dict[str, Any]) -> str:
        name, address = str(said.get("NodeName") or ""), str(said["NodeManagerAddress"])
        label = f"{said['NodeManagerHostname']} ({name or address})"
        taken = label in {s.label for s in self._stations.values()}
        return f"{label[:-1]}, node {said['NodeID'][:8]})" if taken else label

    def _add_worker(self, station: _Station) -> None:
        place = NodeAffinitySchedulingStrategy(station.node, soft=False)
        station.worker = self._worker_class.options(
            num_cpus=1, max_restarts=0, max_task_retries=0, scheduling_strategy=place
        ).remote()
        self._begin(station)

    def _begin(self, station: _Station) -> None:
        # In a list, it is not fetched before the worker has seen that it can read it.
        ref = station.worker.begin.remote([self._job], __version__, str(Path.cwd()))
        self._away[ref] = (station, station.worker, None)

    def _bury(self, station: _Station) -> None:
        """A node is gone, whatever else is heard of it."""
        for ref in [ref for ref, (who, _, _) in self._away.items() if who is station]:
            _, _, ticket = self._away.pop(ref)
            if ticket is not None:
                self._backlog.append(Reply(ticket, station.label, lost="the node is gone"))
        station.ready = False

    # -- what workers say

    def _hear(self, ref: Any) -> None:
        station, worker, ticket = self._away.pop(ref)
        if ticket is not None and worker is station.worker:
            station.orders -= 1
        try:
            said = ray.get(ref)
        except RuntimeEnvSetupError as e:
            error = UsageError(f"Ray cannot bring ckpttool to a node: {_line(e)}")
            self._backlog.append(Reply(None, station.label, error=error))
        except RayError as e:
            self._lose(station, worker, ticket, e)
        else:
            if "unfit" in said:
                self._backlog.append(Reply(None, station.label, error=_unfit(said)))
            elif "error" in said:
                error_ = error_from_data(said["error"], whose="a process of Ray")
                self._backlog.append(Reply(ticket, station.label, error=error_))
            elif ticket is None:
                station.ready = True
            else:
                station.strikes = 0
                self._backlog.append(Reply(ticket, station.label, answer=said["answer"]))

    def _lose(self, station: _Station, worker: Any, ticket: int | None, why: RayError) -> None:
        """A worker is gone."""
        reason = "out of memory" if "low on memory" in str(why) else "its process is gone"
        if station.worker is worker:
            station.worker, station.ready, station.orders = None, False, 0
            station.strikes += 1
        if isinstance(why, ActorUnavailableError):  # Ray cannot tell; it shall not come back
            with contextlib.suppress(RayError):
                ray.kill(worker)
        if ticket is None:
            self._trouble = _line(why)
        else:
            self._backlog.append(Reply(ticket, station.label, lost=reason))


def _line(error: Exception) -> str:
    """What is worth telling of an error of Ray, which are texts of many lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _unfit(said: dict[str, Any]) -> CkptError:
    """Why this package cannot be used on a node."""
    if "module" in said:
        return UsageError(
            f"a package is not installed there: {said['module']}",
            hint="nodes get ckpttool itself from here; install what it needs there: pip install ckpttool",
        )
    return ConflictError(
        f"another ckpttool: {said['unfit']} there, {__version__} here", hint="install the same version on all nodes"
    )


def _connect(address: str) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
            runtime_env={"py_modules": [str(Path(version.__file__).parent)], "excludes": ["__pycache__"]},
        )
    except (ConnectionError, RuntimeError, ValueError, OSError, RayError) as e:
        hint = "start Ray on this machine: ray start --address=HOST:6379 (or --head, for a cluster of one)"
        raise UsageError(f"no connection to a Ray cluster: {_line(e)}", where=address, hint=hint) from e
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _check_connected(address: str) -> None:
    """Raises UsageError when the program around us has connected to another cluster: a process has one."""
    here = ray.get_runtime_context().gcs_address
    host, _, port = address.rpartition(":")
    if not host or address == here:
        return
    with contextlib.suppress(OSError, ValueError), create_connection((host, int(port)), _REACH) as connection:
        if f"{connection.getpeername()[0]}:{port}" == here:
            return
    hint = "pass on='ray', or call ray.shutdown() first"
    raise UsageError(f"this process is connected to another Ray cluster: {here}", where=address, hint=hint)


def _hush() -> Callable[[], None]:
    """Have Ray keep to itself what happens to processes, until the result is called.

    Ray prints it to stdout, and has no option for that. This fleet hears of it anyway, and says what matters.
    """
    from ray._private import worker

    loud = getattr(worker, "print_to_stdstream", None)
    if loud is None:
        return lambda: None
    worker.print_to_stdstream = lambda *_args, **_keywords: None
    return lambda: setattr(worker, "print_to_stdstream", loud)


def _reach(address: str) -> None:
    """See that somebody answers there who may be Ray: Ray itself would ask for minutes, not quietly, and without
    regard to Ctrl-C.
    """
    if "://" in address:
        hint = "run the command on a node of the cluster, with ray=HOST:PORT or just ray"
        raise UsageError(f"--on ray does not go through Ray's client ({address})", hint=hint)
    if address in _ANY:
        return
    host, _, port = address.rpartition(":")
    hint = "--on ray=HOST:PORT; the default port of Ray is 6379"
    if not host or not (port.isdecimal() and len(port) < 6 and int(port) < 1 << 16):
        raise UsageError("the address of a Ray cluster is HOST:PORT", where=address, hint=hint)
    try:
        with create_connection((host, int(port)), _REACH) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
                connection.sendall(_HELLO)
                if connection.recv(4)[3:] != _SETTINGS:
                    raise OSError("something else listens there")
    except (OSError, ValueError) as e:  # ValueError: no name of a host
        raise UsageError(f"no Ray cluster answers at {address}: {e}", hint=hint) from e


def _ray_worker_class() -> type:
    """The class of workers.

    A class in a function goes to the nodes as it is. A node that lacks this package or what it needs can then say so.
    So methods import what they use.
    """

    class RayWorker:
        worker: Any = None

        def begin(self, job: list[Any], expected: str, cwd: str) -> dict[str, Any]:
            """Open a job, after any other. Says what is wrong with this node."""
            import contextlib
            import gc
            import importlib
            import os

            import ray

            try:
                from ckpttool.version import __version__

                if __version__ != expected:
                    return {"unfit": __version__}
                importlib.import_module("ckpttool.execute.blocks")  # with all that a job needs
                from ckpttool.execute.error_data import error_to_data
            except ModuleNotFoundError as e:
                return {"unfit": "", "module": e.name}
            try:
                with contextlib.suppress(OSError):
                    os.chdir(cwd)
                if self.worker is not None:
                    self.worker.close()
                gc.disable()  # a large plan is many small objects, all of which stay
                self.worker = ray.get(job[0]).open()
                gc.freeze()
            except ray.exceptions.RayError:
                raise
            except Exception as e:  # noqa: BLE001 - raised again by the run
                return {"error": error_to_data(e)}
            finally:
                gc.enable()
            return {}

        def do(self, order: dict[str, Any]) -> dict[str, Any]:
            from ckpttool.execute.error_data import error_to_data

            try:
                return {"answer": self.worker.do(order)}
            except Exception as e:  # noqa: BLE001 - raised again by the run
                return {"error": error_to_data(e)}

        def close(self) -> None:
            if self.worker is not None:
                self.worker.close()

    return RayWorker
