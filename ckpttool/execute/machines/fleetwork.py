"""Gives the tasks of a run to other machines, in shares.

The run that has started here keeps the lock, the one journal and the rename. What comes back from a machine is durable
there; it is remembered here as if this machine had done it.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ckpttool.core.plan import Plan
from ckpttool.execute.destinations.base import Destination
from ckpttool.execute.files import Medium, create, share, sync_all
from ckpttool.execute.fleets.base import Answer, Fleet
from ckpttool.execute.fleets.dispatch import dispatch
from ckpttool.execute.journal import Finished
from ckpttool.execute.machines.node import NodeJob
from ckpttool.execute.options import RunOptions
from ckpttool.execute.schedule import Part, Task, large_units, operand_keys
from ckpttool.execute.shares import TaskSurvey
from ckpttool.execute.workforce import Outlet, Watcher
from ckpttool.storage.travel import check_sent

_SHARES = 8
"""A share is an eighth of what is left for each machine: so little that none waits long for the slowest, so much that
it has long runs."""
_FINEST = 4
"""The last shares are so much smaller than the first ones."""


def waning(pieces: Sequence[Sequence[int]], parts: int) -> list[list[int]]:
    """Pieces in shares that become smaller: each has one in ``parts`` of what is left. So all machines end together."""
    shares, at = [], 0
    while at < len(pieces):
        stop = at + max(1, round((len(pieces) - at) / parts))
        shares.append(sorted(t for piece in pieces[at:stop] for t in piece))
        at = stop
    return shares


class Fleetwork:
    """Has the machines of a fleet carry out tasks, as ``Workforce`` does on this one."""

    def __init__(
        self, plan: Plan, destination: Destination, fleet: Fleet, options: RunOptions, hashes: Sequence[str]
    ) -> None:
        self.plan = plan
        self.destination = destination
        self.fleet = fleet
        self.options = options
        self.hashes = hashes
        self.far: frozenset[int] = frozenset()
        self.stop = threading.Event()
        self.remember: Callable[[Sequence[Part], Answer], None] = destination.remember
        """Told of parts that a machine has made durable, with its answer."""
        self.notes: list[str] = []
        self.shared: list[str] = []
        self.unsynced = False
        self.bytes_read = 0
        self.bytes_written = 0
        self.peak_buffer = 0
        self._done: set[int] = set()
        """Parts."""
        self._moved = 0

    def start_workers(self, tasks: Sequence[Task], finished: Finished) -> None:
        """Machines are asked when there is something to write to. Raises UsageError for sources that do not travel."""
        check_sent([s.path for s in self.plan.sources])

    def carry_out(
        self,
        tasks: Sequence[Task],
        finished: Finished,
        pool: Medium,
        watcher: Watcher,
        undisturbed: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Have other machines do what ``finished`` does not say is done. Raises what stopped one of them."""
        paths = [str(self.destination.partial / o.name) for o in self.plan.outputs]
        outlet = Outlet(paths, self.destination.spools)
        self._link(tasks, finished, outlet, pool, watcher)
        survey = TaskSurvey(self.plan, tasks)
        self.fleet.start(self._job(tasks))
        total, nodes = self.plan.bytes_written, max(1, self.fleet.nodes())
        count = max(1, min(_FINEST * _SHARES * nodes, max(nodes, total // self.destination.least_share)))
        cut = waning(survey.cut(count), _SHARES * nodes)
        shares = [[t for t in share if not self._is_done(tasks[t], finished)] for share in cut]
        orders = self.destination.orders(survey, [s for s in shares if s], finished)
        parts = {p.number: p for task in tasks for p in task.parts}
        for _, answer, _ in dispatch(self.fleet, orders, self.stop):
            self._take(answer, outlet, parts, pool, watcher)

    def _link(self, tasks: Sequence[Task], finished: Finished, outlet: Outlet, pool: Medium, watcher: Watcher) -> None:
        """Link files that may be linked, here: it takes no time. Those that cannot be are copied like all others."""
        for part in [p for t in tasks for p in t.parts if p.carried >= 0 and p.number not in finished.parts]:
            output, path = self.plan.outputs[part.carried], outlet.paths[part.carried]
            if not outlet.links(output):
                continue
            how = share(output.carried, path)
            self.shared.append(how)
            if how:
                watcher.finished([part], {})
                watcher.record(pool, [part], {})
                finished.parts.add(part.number)
            else:
                create(path, output.size)

    def _job(self, tasks: Sequence[Task]) -> NodeJob:
        planned, options = self.plan.digest(), self.options
        digest = f"{planned}-{uuid.uuid4().hex}"
        branch = self.destination.branch()
        memory, workers, connections = options.memory, options.workers, options.connections
        large = large_units(tasks)
        return NodeJob(digest, self.plan, planned, self.hashes, self.far, large, branch, memory, workers, connections)

    def _is_done(self, task: Task, finished: Finished) -> bool:
        keys = [key for key, _ in task.targets]
        if task.computing >= 0:
            keys += operand_keys(self.plan, task.computing)
        return all(p.number in finished.parts for p in task.parts) and all(k in finished.sums for k in keys)

    def _take(self, answer: Answer, outlet: Outlet, parts: Mapping[int, Part], pool: Medium, watcher: Watcher) -> None:
        """Remember what a machine has done, and write what it was not to write itself."""
        edges: list[tuple[int, int, Any]] = answer.get("edges", [])
        for output, at, data in edges:
            pool.write(outlet.paths[output], at, memoryview(data))
        if not outlet.spools:
            sync_all(pool, [outlet.paths[output] for output in sorted({output for output, _, _ in edges})])
        done = [parts[n] for first, stop in answer["parts"] for n in range(first, stop)]
        new = [p for p in done if p.number not in self._done]  # some are done by two machines, each for its chunks
        self._done.update([p.number for p in new])
        self._moved += sum([p.nbytes for p in new])
        watcher.finished(new, answer["sums"])
        self.remember(done, answer)
        self.bytes_read += answer["read"]
        self.bytes_written += answer["written"]
        watcher.moved(self._moved)

    def unrecorded(self) -> tuple[list[Part], dict[str, str]]:
        """Nothing: answered parts are recorded at once."""
        return [], {}

    def end(self, *, now: bool) -> None:
        """Let go of the machines at once, if the run is given up; else they are wanted until it is complete."""
        if now:
            self.fleet.end(now=True)
