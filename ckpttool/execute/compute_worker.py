"""A process that computes: works out its assigned tensors, part by part, and reports what it has written.

<- {"unit": ..., "number": 7, "first": 31, "done": [31]}   this tensor; its parts count from 31, these are written
-> {"at": 1048576}                                  so many bytes of what was to do are done
-> {"part": 32}                                     this part is written
-> {"end": true, "sums": {...}, ...}                the tensor is finished, with its hashes

What lies on pages that this machine must not write ("held": [[output, [page, ...]], ...] of an order) comes with the
next answer, before the part counts as written: "edges": [[output, offset, bytes in base64], ...].
"""

from __future__ import annotations

import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ckpttool.core.encodings import Contents
from ckpttool.core.plan import Compute, Quantize, Randomness, Unit
from ckpttool.execute.blocks import Mover
from ckpttool.execute.compute import TensorComputer
from ckpttool.execute.draws import tensor_draws
from ckpttool.execute.files import Fence, Medium
from ckpttool.execute.hashing import TensorHashes
from ckpttool.execute.plan_json import decode, encode
from ckpttool.execute.quantize import Quantizer
from ckpttool.execute.reads import operands_at_hand
from ckpttool.execute.remote import open_medium
from ckpttool.execute.schedule import Task, computing_task
from ckpttool.execute.withheld_pages import WithholdingMedium
from ckpttool.execute.worker_pool import Answer, Order, Serve, run_helper
from ckpttool.kernels.merge import METHODS
from ckpttool.kernels.merge.base import Draws
from ckpttool.storage.access import QUERIES

_MIB = 1 << 20
_TELL_EVERY = 0.1
"""Seconds between two words about how far a tensor is."""


@dataclass(frozen=True, slots=True)
class ComputeJob:
    """Data that all orders of a run share."""

    sources: Sequence[Contents]
    paths: Sequence[str]
    """Paths of the outputs, which exist at their full size."""
    randomness: Randomness | None
    memory: int
    """Bytes of buffers for each worker."""
    limit: int
    """Bytes of a part of what is only moved."""
    hashes: Sequence[str]
    """Names of the checksums that are wanted of stored tensors."""
    ahead: int = 0
    """Bytes that each worker has besides for what it reads ahead from other machines."""
    connections: int | None = None
    """Requests that each worker makes at a time; None is as many as that memory is good for."""
    fence: Fence | None = None
    """See ``Medium``."""

    def to_json(self) -> dict[str, Any]:
        """JSON data for a process that reads it with ``from_json``."""
        said = {"sources": encode(tuple(self.sources)), "randomness": encode(self.randomness)}
        return asdict(self) | said | {"queries": QUERIES}

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> ComputeJob:
        """The job that ``to_json`` has encoded."""
        QUERIES.update(said.pop("queries"))
        fence = said["fence"] and Fence(*said["fence"])
        known = {"sources": decode(said["sources"]), "randomness": decode(said["randomness"]), "fence": fence}
        return cls(**said | known)


def is_known(unit: Unit) -> bool:
    """Whether a fresh interpreter can work a unit out: it has no methods but those of this package."""
    programs = [METHODS[s.method].program for s in unit.steps if isinstance(s, Compute)]
    return all(p.__module__.startswith("ckpttool.kernels.") for p in programs)


def order(
    unit: Unit, number: int, task: Task, done: Collection[int], held: Mapping[int, Sequence[int]] = MappingProxyType({})
) -> Order:
    """Have a unit of the plan worked out; its parts in ``done`` are written already, pages ``held`` are not written."""
    first, pages = task.parts[0].number, [[f, list(p)] for f, p in held.items()]
    return {"unit": encode(unit), "number": number, "first": first, "done": sorted(done), "held": pages}


def edges(answer: Answer) -> Iterator[tuple[int, int, bytes]]:
    """(output, offset, bytes) of what a process has kept and not written."""
    for output, offset, data in answer.get("edges", ()):
        yield output, offset, b64decode(data)


def server(job: ComputeJob) -> Callable[[], Serve]:
    """The function that a worker of this job calls once to get its task runner."""
    draws = tensor_draws(job.randomness)  # for some streams the places of all tensors are worked out: once for all

    def start() -> Serve:
        pool = WithholdingMedium(open_medium(memory=job.ahead, connections=job.connections))
        pool.fence = job.fence
        work = ComputeWorker(job, draws, pool, threading.Event()).serve
        outputs = {path: i for i, path in enumerate(job.paths)}

        def serve(order: Order, tell: Callable[[Answer], None]) -> None:
            pool.hold({job.paths[output]: pages for output, pages in order["held"]})

            def tell_edges(answer: Answer) -> None:
                kept = [[outputs[e.path], e.offset, b64encode(e.data).decode()] for e in pool.take()]
                tell(answer | {"edges": kept} if kept else answer)

            work(order, tell_edges)

        return serve

    return start


class ComputeWorker:
    """Works out tensors, one after the other."""

    def __init__(self, job: ComputeJob, draws: Callable[[Compute], Draws], pool: Medium, stop: threading.Event) -> None:
        self.job = job
        self.carrier = Mover(job.sources, job.paths, pool, job.memory // 4, stop)
        self.computing = TensorComputer(self.carrier, job.memory, draws)
        self.quantizing = Quantizer(self.carrier, job.memory)
        pool.scratch = str(Path(job.paths[0]).parent) if job.paths else ""
        for path in job.paths:
            pool.expect_writes(path)

    def serve(self, order: Order, tell: Callable[[Answer], None]) -> None:
        """Carry out an order, and tell what is done of it."""
        try:
            self._serve(order, tell)
        except Exception:
            if self.carrier.pool.unsynced:
                tell({"unsynced": True})
            raise

    def _serve(self, order: Order, tell: Callable[[Answer], None]) -> None:
        unit, number, done = decode(order["unit"]), order["number"], set(order["done"])
        task = computing_task(unit, number, order["first"], self.job.limit, self.job.hashes)
        carrier = self.carrier
        before = carrier.bytes_read, carrier.bytes_written
        carrier.sums = sums = TensorHashes(task.targets) if task.targets else None
        found: dict[str, str] = {}
        meter = _OrderMeter(tell)
        for part in task.parts:
            if part.compute[0] < 0 and part.number not in done:
                carrier.carry(part.items)
                meter.add(part.nbytes)
                tell({"part": part.number})
        for i, step in enumerate(unit.steps):
            if not isinstance(step, Compute | Quantize):
                continue
            parts = {p.compute[1]: p for p in task.parts if p.compute[0] == i}
            finished = {n for n, p in parts.items() if p.number in done}
            meter.begin(sum([p.nbytes for n, p in parts.items() if n not in finished]))
            if isinstance(step, Compute):
                events = self.computing.run(step, finished, meter.seen)
            else:
                events = self.quantizing.run(step, finished, meter.seen)
            with operands_at_hand(step, carrier):
                for event in events:
                    if isinstance(event, int):
                        tell({"part": parts[event].number})
                    else:
                        found |= {f"{number}:{i}:{k}": digest for k, digest in event.items()}
            meter.end()
        if sums is not None:
            carrier.arena.reset()
            found |= sums.finish(carrier.read_back, carrier.arena.take(min(_MIB, carrier.arena.size)).data)
        moved = {"read": carrier.bytes_read - before[0], "written": carrier.bytes_written - before[1]}
        tell({"end": True, "at": meter.at, "sums": found, **moved})


class _OrderMeter:
    """Progress of an order, in bytes of its result: those of a step count by the elements that its passes have seen."""

    def __init__(self, tell: Callable[[Answer], None]) -> None:
        self.at = 0
        self._tell = tell
        self._step = 0
        self._told = time.monotonic()

    def add(self, nbytes: int) -> None:
        self.at += nbytes
        self._tell({"at": self.at})

    def begin(self, nbytes: int) -> None:
        """Start a step that writes ``nbytes``."""
        self._step = nbytes

    def seen(self, elements: int, of: int) -> None:
        now = time.monotonic()
        if now - self._told >= _TELL_EVERY:
            self._told = now
            self._tell({"at": self.at + self._step * elements // max(of, 1)})

    def end(self) -> None:
        self.at += self._step


def main() -> None:
    """Entry point of a fresh interpreter that forks the workers; see ``worker_pool``."""
    run_helper(lambda said: server(ComputeJob.from_json(said)))
