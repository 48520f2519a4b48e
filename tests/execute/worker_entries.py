"""What fresh interpreters run for test_worker_pool.py. It imports no test library: that would take longer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpttool.errors import ConflictError
from ckpttool.execute import compute_worker, worker_pool
from ckpttool.execute.worker_pool import Answer, Order, Serve


def serve(order: Order, tell: Callable[[Answer], None]) -> None:
    """What the workers of these tests do."""
    if order.get("fail"):
        raise ConflictError("what", where=["here"], hint="so")
    if order.get("die"):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(order.get("wait", 0))
    tell({"pid": os.getpid(), "parent": os.getppid()})
    tell({"end": True})


def main() -> None:
    """The helper of these tests."""
    worker_pool.run_helper(lambda _job: lambda: serve)


def noting() -> None:
    """The helper of a run: its workers leave a file with their number when they get an order."""

    def server(said: dict[str, Any]) -> Callable[[], Serve]:
        make = compute_worker.server(compute_worker.ComputeJob.from_json(said))

        def noted() -> Serve:
            work = make()

            def serve(order: Order, tell: Callable[[Answer], None]) -> None:
                (Path(said["paths"][0]).parents[1] / f"pid {os.getpid()}").touch()
                time.sleep(0.3)  # so that one of them does not get all
                work(order, tell)

            return serve

        return noted

    worker_pool.run_helper(server)


def slow() -> None:
    """A helper whose workers take long."""

    def serve(order: Order, tell: Callable[[Answer], None]) -> None:
        del order, tell
        time.sleep(60)

    def server(said: dict[str, Any]) -> Callable[[], Serve]:
        def made() -> Serve:
            (Path(said["paths"][0]).parents[1] / f"pid {os.getpid()}").touch()
            return serve

        return made

    worker_pool.run_helper(server)
