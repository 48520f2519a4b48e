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

_MAX_ORDERS = 2
"""Orders of a worker: the one that it does, and the next."""
_MAX_FAILURES = 3
"""Workers that a node may lose one after the other, without an answer, until it gets no more."""
_UPDATE_INTERVAL = 1.0
"""Seconds between two looks at the nodes of the cluster."""
_FIRST_TIMEOUT, _OTHERS_TIMEOUT = 120.0, 5.0
"""Seconds to wait until a worker can begin, and then for those of other nodes, which may come later, too."""
_CONNECT_TIMEOUT = 10.0
"""Seconds to reach the cluster."""
_ANY = ("auto", "local")
"""Addresses that are none, and that Ray understands: the cluster of this machine; a new one."""
_SETTINGS = b"\x04"
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _SETTINGS + b"\0\0\0\0\0"
"""What a client of HTTP/2, and so of gRPC, says first (RFC 9113, 3.4); the server answers with its settings."""
_END_TIMEOUT = 10.0
"""Seconds for workers to end in."""


def fleet(address: str) -> RayFleet:
    """The cluster at an address (HOST:PORT), or the one of RAY_ADDRESS, or the one that this machine belongs to."""
    return RayFleet(address or os.environ.get("RAY_ADDRESS") or "auto")


@dataclass(slots=True)
class _RayNode:
    """A node of the cluster and its worker; None where it has no worker now."""

    identifier: str
    """Ray's."""
    label: str
    """The node's name in messages."""
    worker: Any = None
    ready: bool = False
    """Whether the worker has opened the job."""
    orders: int = 0
    """Orders that the worker has not answered."""
    failures: int = 0
    """Workers that were lost since the last answer."""


class RayFleet:
    """The nodes of a Ray cluster (``Connected``)."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._ours = self._connected = False
        self._restore_output: Callable[[], None] = lambda: None
        """Lets Ray print again."""
        self._nodes: dict[str, _RayNode] = {}
        self._pending: dict[Any, tuple[_RayNode, Any, int | None]] = {}
        """Reference to an answer -> the node, the worker, the ticket of the order (None for the opening of the job)."""
        self._backlog: list[Reply] = []
        self._updated_at = -_UPDATE_INTERVAL
        self._job: Any = None
        self._worker_class: Any = None
        self.head = ""
        self._last_failure = ""
        """Reason why a worker, the last such one, was lost before it had opened the job."""

    def start(self, job: FleetJob) -> None:
        if not self._connected:
            self._ours = not ray.is_initialized()
            _check_reachable(self._address)
            if self._ours:
                self._restore_output = _silence_ray()
                _connect(self._address)
            else:
                _check_connected(self._address)
            self._connected = True
            self.head = str(ray.get_runtime_context().gcs_address)
            self._worker_class = ray.remote(_ray_worker_class())
        self._job = ray.put(job)
        for node in self._nodes.values():
            if node.worker is not None:
                node.ready = False
                self._open_job(node)
        self._updated_at = -_UPDATE_INTERVAL
        self._await_workers()

    def _await_workers(self) -> None:
        """Wait for workers that have opened the job."""
        until = time.monotonic() + _FIRST_TIMEOUT
        while time.monotonic() < until:
            for reply in self.replies(0.1):
                if reply.error is not None:
                    raise on_node(reply.error, reply.node)
            coming = [s for s in self._nodes.values() if s.worker is not None and not s.ready]
            if self.nodes():
                until = min(until, time.monotonic() + _OTHERS_TIMEOUT) if coming else 0
            elif self._nodes and all(s.failures >= _MAX_FAILURES for s in self._nodes.values()):
                break
        if not self.nodes():
            raise OutputError(
                f"no node of the Ray cluster can start{self._last_failure and ': '}{self._last_failure}",
                where=[s.label for s in self._nodes.values()] or self._address,
                hint="a node needs one free CPU: see `ray status`",
            )

    def nodes(self) -> int:
        return sum([s.ready for s in self._nodes.values()])

    def slots(self) -> int:
        return _MAX_ORDERS * self.nodes()

    def send(self, ticket: int, order: Order) -> None:
        node = min([s for s in self._nodes.values() if s.ready], key=lambda s: (s.orders, s.failures))
        node.orders += 1
        self._pending[node.worker.do.remote(order)] = (node, node.worker, ticket)

    def replies(self, timeout: float) -> Sequence[Reply]:
        self._update_nodes()
        if not self._backlog:
            if not self._pending:
                time.sleep(timeout)
                return []
            refs = list(self._pending)
            if ray.wait(refs, num_returns=1, timeout=timeout)[0]:
                done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
                for ref in done:
                    self._receive(ref)
        found, self._backlog = self._backlog, []
        return found

    def end(self, *, now: bool) -> None:
        workers = [s.worker for s in self._nodes.values() if s.worker is not None]
        idle = [s.worker for s in self._nodes.values() if s.ready and not s.orders]
        self._nodes, self._pending = {}, {}
        if not self._connected:
            return
        self._connected = False
        with contextlib.suppress(RayError):
            if idle and not now:
                ray.wait([h.close.remote() for h in idle], num_returns=len(idle), timeout=_END_TIMEOUT)
            for worker in workers:
                ray.kill(worker)
            # A call of a worker fails when there is none any more.
            if workers:
                ray.wait([w.close.remote() for w in workers], num_returns=len(workers), timeout=_END_TIMEOUT)
        self._job = None
        if self._ours:
            ray.shutdown()
            self._restore_output()

    # -- nodes come and go

    def _update_nodes(self) -> None:
        """Update the list of nodes from Ray, at most once a second; start a worker on each node that has none."""
        if time.monotonic() - self._updated_at < _UPDATE_INTERVAL:
            return
        alive = {n["NodeID"]: n for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0) >= 1}
        for gone in self._nodes.keys() - alive.keys():
            self._drop_node(self._nodes.pop(gone))
        for identifier, said in alive.items():
            node = self._nodes.get(identifier)
            if node is None:
                node = self._nodes[identifier] = _RayNode(identifier, self._label(said))
            if node.worker is None and node.failures < _MAX_FAILURES:
                self._add_worker(node)
        self._updated_at = time.monotonic()

    def _label(self, said: dict[str, Any]) -> str:
        """A name that no other node has. ``said``: Ray's record of the node."""
        name, address = str(said.get("NodeName") or ""), str(said["NodeManagerAddress"])
        label = f"{said['NodeManagerHostname']} ({name or address})"
        taken = label in {s.label for s in self._nodes.values()}
        return f"{label[:-1]}, node {said['NodeID'][:8]})" if taken else label

    def _add_worker(self, node: _RayNode) -> None:
        place = NodeAffinitySchedulingStrategy(node.identifier, soft=False)
        node.worker = self._worker_class.options(
            num_cpus=1, max_restarts=0, max_task_retries=0, scheduling_strategy=place
        ).remote()
        self._open_job(node)

    def _open_job(self, node: _RayNode) -> None:
        # In a list, it is not fetched before the worker has seen that it can read it.
        ref = node.worker.begin.remote([self._job], __version__, str(Path.cwd()))
        self._pending[ref] = (node, node.worker, None)

    def _drop_node(self, node: _RayNode) -> None:
        """Report the orders of a node that has left the cluster as lost; later answers from it are ignored."""
        for ref in [ref for ref, (who, _, _) in self._pending.items() if who is node]:
            _, _, ticket = self._pending.pop(ref)
            if ticket is not None:
                self._backlog.append(Reply(ticket, node.label, lost="the node is gone"))
        node.ready = False

    # -- answers of workers

    def _receive(self, ref: Any) -> None:
        """Turn a finished call of a worker into a reply, or note that its node is ready."""
        node, worker, ticket = self._pending.pop(ref)
        if ticket is not None and worker is node.worker:
            node.orders -= 1
        try:
            said = ray.get(ref)
        except RuntimeEnvSetupError as e:
            error = UsageError(f"Ray cannot install ckpttool on a node: {_line(e)}")
            self._backlog.append(Reply(None, node.label, error=error))
        except RayError as e:
            self._drop_worker(node, worker, ticket, e)
        else:
            if "unfit" in said:
                self._backlog.append(Reply(None, node.label, error=_unfit_error(said)))
            elif "error" in said:
                error_ = error_from_data(said["error"], whose="a process of Ray")
                self._backlog.append(Reply(ticket, node.label, error=error_))
            elif ticket is None:
                node.ready = True
            else:
                node.failures = 0
                self._backlog.append(Reply(ticket, node.label, answer=said["answer"]))

    def _drop_worker(self, node: _RayNode, worker: Any, ticket: int | None, why: RayError) -> None:
        """Forget a worker that has died, and report its order as lost. A node gets a new one in ``_update_nodes``."""
        reason = "out of memory" if "low on memory" in str(why) else "its process is gone"
        if node.worker is worker:
            node.worker, node.ready, node.orders = None, False, 0
            node.failures += 1
        if isinstance(why, ActorUnavailableError):  # Ray cannot tell; it shall not come back
            with contextlib.suppress(RayError):
                ray.kill(worker)
        if ticket is None:
            self._last_failure = _line(why)
        else:
            self._backlog.append(Reply(ticket, node.label, lost=reason))


def _line(error: Exception) -> str:
    """The first line of an error of Ray, which has many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _unfit_error(said: dict[str, Any]) -> CkptError:
    """The error for a node on which this package cannot be used. ``said``: the worker's answer."""
    if "module" in said:
        return UsageError(
            f"a package is not installed there: {said['module']}",
            hint="nodes get ckpttool from here, not its packages; install those there: pip install ckpttool",
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
    with contextlib.suppress(OSError, ValueError), create_connection((host, int(port)), _CONNECT_TIMEOUT) as connection:
        if f"{connection.getpeername()[0]}:{port}" == here:
            return
    hint = "pass on='ray', or call ray.shutdown() first"
    raise UsageError(f"this process is connected to another Ray cluster: {here}", where=address, hint=hint)


def _silence_ray() -> Callable[[], None]:
    """Stop Ray's messages about processes until the result is called.

    Ray prints them to stdout, and has no option against it. This fleet gets these events as errors, and reports them.
    """
    from ray._private import worker

    loud = getattr(worker, "print_to_stdstream", None)
    if loud is None:
        return lambda: None
    worker.print_to_stdstream = lambda *_args, **_keywords: None
    return lambda: setattr(worker, "print_to_stdstream", loud)


def _check_reachable(address: str) -> None:
    """Check that a server which may be Ray answers at an address. Raises UsageError.

    Ray itself would try for minutes, with messages, and ignore Ctrl-C.
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
        with create_connection((host, int(port)), _CONNECT_TIMEOUT) as connection:
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
            """Open a job; one opened before is closed. Returns what is wrong with this node, {} for nothing."""
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
