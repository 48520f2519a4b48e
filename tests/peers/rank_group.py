"""Ranks of torch.distributed over gloo: a process for each, forked once and there for all jobs of a number of ranks."""

from __future__ import annotations

import contextlib
import datetime as dt
import gc
import multiprocessing
import os
import pickle
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

LIMIT = 300
"""Seconds for a job."""


class Group:
    """``world`` ranks. They start with the first job, and those of a job that failed are replaced."""

    def __init__(self, world: int, folder: Path) -> None:
        self.world, self.folder = world, folder
        self._ranks: dict[Connection, Any] = {}

    def run(self, job: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Every rank calls ``job``, a function of a module; what rank 0 gives back is the answer.

        Raises RuntimeError with what the ranks said where one fails, and the group ends.
        """
        if not self._ranks:
            self._start()
        for end in self._ranks:
            _send(end, (job, args, options))
        answers: dict[Connection, Any] = {}
        limit = time.monotonic() + LIMIT
        while len(answers) < self.world:
            ready = wait([e for e in self._ranks if e not in answers], max(0, limit - time.monotonic()))
            if not ready:
                self._fail("the ranks do not answer")
            for ended in ready:
                assert isinstance(ended, Connection)
                failed, answers[ended] = _receive(ended)
                if failed:
                    self._fail(answers[ended])
        return next(answers[end] for end in self._ranks)

    def close(self) -> None:
        for end, process in self._ranks.items():
            end.close()
            process.kill()
            process.join()
        self._ranks = {}

    def _fail(self, what: str) -> None:
        self.close()
        said = "\n".join(p.read_text(encoding="utf-8")[-3000:] for p in sorted(self.folder.glob("rank*.log")))
        raise RuntimeError(f"{what}\n{said}")

    def _start(self) -> None:
        # Forks: importing torch and what runs on it takes longer than all jobs of a rank.
        fork = multiprocessing.get_context("fork")
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "meet").unlink(missing_ok=True)
        for rank in range(self.world):
            here, there = fork.Pipe()
            process = fork.Process(target=_serve, args=(there, rank, self.world, self.folder), daemon=True)
            process.start()
            there.close()
            self._ranks[here] = process


@contextlib.contextmanager
def groups(folder: Path) -> Iterator[Callable[[int], Group]]:
    """Groups by their number of ranks."""
    made: dict[int, Group] = {}
    try:
        yield lambda world: made.setdefault(world, Group(world, folder / f"ranks{world}"))
    finally:
        for group in made.values():
            group.close()


def _send(end: Connection, value: Any) -> None:
    # By value: multiprocessing's own way shares the memory of tensors with a process that may be gone by then.
    end.send_bytes(pickle.dumps(value))


def _receive(end: Connection) -> tuple[bool, Any]:
    try:
        failed, answer = pickle.loads(end.recv_bytes())  # noqa: S301  # from processes that this one forked
    except EOFError:
        return True, "a rank is gone"
    return failed, answer


def _serve(end: Connection, rank: int, world: int, folder: Path) -> None:
    sys.stdout = sys.stderr = (folder / f"rank{rank}.log").open("w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), 1)
    os.dup2(sys.stderr.fileno(), 2)
    warnings.simplefilter("ignore")  # pytest makes errors of them, but nobody here can do better than the software
    import torch
    import torch.distributed as dist

    # DeepSpeed asks the environment, as it does below torchrun; nobody listens at the port.
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    os.environ.update({k: str(v) for k, v in variables.items()})
    torch.set_num_threads(1)
    gc.freeze()  # DeepSpeed and FSDP collect garbage themselves, and need not look through all that is imported
    dist.init_process_group("gloo", f"file://{folder}/meet", dt.timedelta(seconds=LIMIT), world, rank)
    while True:
        try:
            job, args, options = pickle.loads(end.recv_bytes())  # noqa: S301  # from the process that forked this one
        except EOFError:
            os._exit(0)
        try:
            answer, failed = job(*args, **options), False
        except Exception:  # noqa: BLE001  whatever it is, the test that asked for the job shows it
            answer, failed = traceback.format_exc(), True
        _send(end, (failed, answer if failed or rank == 0 else None))
