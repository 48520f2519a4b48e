"""Work of a machine for a run that another one started: shares of its tasks, durable before they are answered.

<- {"tasks": [7, 8], "done": [31], "hold": [[0, [12, 13]]], ...}    these tasks of the schedule, without these parts and
                                                 without what they write to these pages; the rest is the branch's
-> {"parts": [[29, 31], [32, 40]], "sums": {...}, "edges": [[0, 786432, b"..."]], "read": 1, "written": 1, ...}

A share can be done by anyone, again, and by two at a time: it writes the same bytes to the same places. So whoever
gave the order may give it to somebody else when no answer comes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpttool.core.files import DataFile
from ckpttool.core.plan import Plan
from ckpttool.errors import ConflictError, UsageError
from ckpttool.execute.destinations import branch_for
from ckpttool.execute.files import Medium
from ckpttool.execute.fleets.base import Answer, Order
from ckpttool.execute.journal import Finished, ranges
from ckpttool.execute.options import RunOptions
from ckpttool.execute.remote import check_here, open_medium
from ckpttool.execute.schedule import Part, Schedule
from ckpttool.execute.withheld_pages import WithholdingMedium
from ckpttool.execute.workforce import Outlet, Workforce
from ckpttool.storage.access import settings, use_settings
from ckpttool.storage.place import parse_place
from ckpttool.version import __version__


@dataclass(frozen=True, slots=True)
class NodeJob:
    """A run, as other machines see it; see ``ckpttool.execute.fleets.base.FleetJob``."""

    digest: str
    """Digest of this run of this plan."""
    plan: Plan
    planned: str
    """The digest of the plan."""
    hashes: Sequence[str]
    far: frozenset[int]
    """Sources on other machines, seen from where the schedule was made."""
    large: Mapping[int, tuple[int, int]]
    """See ``large_units``: a machine makes the tasks that it is to do, and no others."""
    branch: Mapping[str, Any]
    """The answer of ``Destination.branch``."""
    memory: int
    workers: int | None
    connections: int | None
    version: str = __version__
    directory: str = field(default_factory=os.getcwd)
    """Working directory of the run: the base of relative paths."""
    access: Mapping[str, str] = field(default_factory=settings)

    def open(self) -> NodeWorker:
        """Raises UsageError, ConflictError or AccessError where this machine is unfit for the run."""
        if self.version != __version__:
            raise UsageError(
                f"another version of ckpttool is installed here: {__version__}, the run has {self.version}",
                hint="install the same version on all nodes, or none: then the run brings its own",
            )
        use_settings(self.access)
        return NodeWorker(self)


class NodeWorker:
    """Does shares, one after the other."""

    def __init__(self, job: NodeJob) -> None:
        self._job = job
        self._check()
        plan = job.plan
        self._tasks = Schedule(plan, job.hashes, job.far, job.large)
        self._branch = branch_for(job.branch, plan, self._tasks)
        paths = [str(self._branch.partial / o.name) for o in plan.outputs]
        self._outlet = Outlet(paths, self._branch.spools, self._branch.locks, alone=False, fence=self._branch.fence)
        self._options = RunOptions(memory=job.memory, workers=job.workers, connections=job.connections)
        self._pool: WithholdingMedium | None = None
        self._workforce: Workforce | None = None
        self._parts: list[int] = []
        self._sums: dict[str, str] = {}
        self._outputs = {path: i for i, path in enumerate(paths)}

    def _check(self) -> None:
        """The plan is what was sent, and the sources of this machine are those that were planned."""
        plan, job = self._job.plan, self._job
        if plan.digest() != job.planned:
            raise ConflictError("the plan of this machine differs from that of the run", hint="repeat the command")
        here = [s for s in plan.sources if isinstance(parse_place(s.path), Path)]
        if any(not Path(s.path).is_absolute() for s in here) and Path.cwd() != Path(job.directory):
            hint = "give SRC as an absolute path that all nodes have"
            raise UsageError("SRC is relative to a directory that this machine lacks", where=job.directory, hint=hint)
        check_here(DataFile(Path(s.path), s.size, s.tag) for s in here)

    def do(self, order: Order) -> Answer:
        """Carry out a share. Raises what went wrong; the next order begins with everything fresh."""
        try:
            return self._do(order)
        except BaseException:
            self._drop(now=True)
            raise

    def _do(self, order: Order) -> Answer:
        self._branch.begin(order)
        pool, workforce = self._ready()
        self._parts, self._sums = [], {}
        read, written = workforce.bytes_read, workforce.bytes_written
        finished = Finished(set(order["done"]))
        tasks = [self._tasks[t] for t in order["tasks"]]
        pool.hold({self._outlet.paths[output]: pages for output, pages in order.get("hold", ())})
        workforce.carry_out(tasks, finished, pool, self)
        self.record(pool, *workforce.unrecorded())
        edges = [[self._outputs[e.path], e.offset, e.data] for e in pool.take()]
        answer: Answer = {"parts": ranges(self._parts), "sums": self._sums, "edges": edges}
        answer |= {"read": workforce.bytes_read - read, "written": workforce.bytes_written - written}
        return answer | self._branch.finish(pool)

    def _ready(self) -> tuple[WithholdingMedium, Workforce]:
        if self._pool is None or self._workforce is None:
            job, options = self._job, self._options
            self._pool = WithholdingMedium(open_medium(memory=options.memory // 2, connections=options.connections))
            self._pool.scratch = str(self._branch.partial)
            self._pool.fence = self._branch.fence
            for output, path in zip(job.plan.outputs, self._outlet.paths, strict=True):
                self._pool.expect_writes(path, scattered=output.summed)
            self._workforce = Workforce(job.plan, self._outlet, options, job.hashes, threading.Event())
            self._workforce.ahead = options.memory // 2 if job.far else 0
            self._workforce.start_workers(self._tasks.computing(), Finished())
        return self._pool, self._workforce

    # -- seen by the workforce

    def finished(self, parts: Sequence[Part], sums: Mapping[str, str]) -> None:
        """Does nothing: finished parts are reported with the answer."""

    def moved(self, nbytes: int) -> None:
        """Does nothing: a node shows no progress."""

    def record(self, pool: Medium, parts: Sequence[Part], sums: Mapping[str, str]) -> None:
        self._branch.record(pool, parts, sums)
        self._parts += [p.number for p in parts]
        self._sums.update(sums)

    # -- the end

    def _drop(self, *, now: bool) -> None:
        if self._workforce is not None:
            self._workforce.end(now=now)
        if self._pool is not None:
            self._pool.stop()
            self._pool.close()
        self._workforce = self._pool = None

    def close(self) -> None:
        self._drop(now=False)
        self._branch.close()
