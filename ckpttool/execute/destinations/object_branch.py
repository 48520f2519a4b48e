"""A machine that sends chunks for a run that holds DST elsewhere.

<- {"tasks": [7, 8], "done": [31], "parts": [[29, 31], [32, 40]], "chunks": [[0, 4, 9], [1, 0, 1]]}
                                              parts that it does, and what it sends: [output, first chunk, last + 1]
-> {"sent": [[0, 4, "<tag>"], ...], "whole": [[1, <bytes>]], ...}

Outputs are made in a spool of this process. What an order asks for has been taken by the store before it is answered;
an output that is not sent in chunks, because it is small, is a chunk whose bytes are in the answer. A machine that was
given up and comes back sends the same bytes again, or finds that the upload is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckpttool.core.plan import Plan
from ckpttool.errors import OutputError
from ckpttool.execute.destinations.chunks import Chunks
from ckpttool.execute.destinations.marker import WRITING, MarkerState
from ckpttool.execute.destinations.outbox import ObjectKeys, Outbox, Upload
from ckpttool.execute.destinations.spool import Spool
from ckpttool.execute.files import Medium, write_error
from ckpttool.execute.journal import ranges
from ckpttool.execute.schedule import Part, Task
from ckpttool.storage.buckets.base import Bucket

BACKLOG = 1
"""Chunks for each thread that sends that may wait to be sent before those who write have to wait."""


class ObjectBranch:
    """See ``Branch``."""

    spools = True
    fence = None
    """The spool is this process's own."""

    def __init__(
        self, said: Mapping[str, Any], plan: Plan, tasks: Sequence[Task], bucket: Bucket, spool: Spool | None = None
    ) -> None:
        self._plan = plan
        self._tasks = tasks
        self._bucket = bucket
        self._keys = ObjectKeys(said["dst"], single=said["single"])
        self._run: str = said["run"]
        self._threads: int = said["threads"]
        outputs = plan.outputs
        self._uploads = {f: Upload(outputs[f].name, outputs[f].size, chunk, up) for f, chunk, up in said["cut"]}
        self._sizes = [self._uploads[f].chunk if f in self._uploads else o.size for f, o in enumerate(outputs)]
        self._spool = spool or Spool.free(said["dst"])
        self._made: set[int] = set()
        self._touched: set[int] = set()
        """Outputs that the order writes into."""
        self._own: set[tuple[int, int]] = set()
        """The chunks that the order asks for: (output, chunk)."""
        self._ready: set[tuple[int, int]] = set()
        """The chunks to which nothing more is written."""
        self._chunks = Chunks(plan, (), self._sizes)
        self._stop = threading.Event()
        self._outbox = self._new_outbox()

    @property
    def partial(self) -> Path:
        return self._spool.path

    @property
    def locks(self) -> Sequence[int]:
        return self._spool.locks

    def _new_outbox(self) -> Outbox:
        outbox = Outbox(self._bucket, self._keys, self._spool, self._threads, self._stop, self._check)
        outbox.objects.update(self._uploads)
        return outbox

    def _check(self) -> None:
        """Raises OutputError when the run does not hold DST any more."""
        found = self._bucket.get(self._keys.marker)
        state = MarkerState.read(found.data, self._keys.text) if found is not None else None
        if state is None or state.run != self._run or state.state != WRITING:
            what = "the run that this machine works for has ended, or another one has taken its destination over"
            raise OutputError(what, where=self._keys.text)

    def begin(self, order: Mapping[str, Any], known: Collection[str] = ()) -> None:
        """Start an order. Hashes that are ``known`` are not taken again."""
        self.stop()  # an order that failed may still be sending
        self._check()
        self._stop = threading.Event()
        self._outbox = self._new_outbox()
        done = set(order["done"])
        tasks = [self._tasks[t] for t in order["tasks"]]
        tasks = [_rest(t, done, known) for t in tasks]
        if ranges(p.number for t in tasks for p in t.parts) != order["parts"]:  # a chunk would lack some of its bytes
            raise OutputError(
                "a task has different parts on this machine than where the run was started", where=self._keys.text
            )
        self._chunks = Chunks(self._plan, tasks, self._sizes)
        self._own = {(f, c) for f, first, stop in order["chunks"] for c in range(first, stop)}
        self._ready = set()
        self._touched = {f for t in tasks for p in t.parts for f in p.files}
        for f in self._touched:
            self._make(f)

    def _make(self, number: int) -> None:
        """A file of zeros with its literal bytes, which have gone with what was sent of it before."""
        output = self._plan.outputs[number]
        path = self._spool.path / output.name
        try:
            if number not in self._made:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._spool.make(str(path), output.size)
                self._made.add(number)
            with path.open("r+b") as f:
                for at, data in output.literals:
                    f.seek(at)
                    f.write(data)
        except OSError as e:
            raise write_error(e, str(path), 0, 0) from e

    def record(self, pool: Medium, parts: Sequence[Part], sums: Mapping[str, str]) -> None:
        """Send what is ready, and wait while too much is waiting."""
        self._outbox.sender.start()
        for f, chunk in self._chunks.done([p.number for p in parts], sums):
            self._ready.add((f, chunk))
            if f not in self._uploads:
                continue
            if (f, chunk) in self._own:
                self._outbox.put(f, chunk)
            else:  # a neighbour sends it
                self._outbox.forget(self._uploads[f], chunk)
        self._outbox.sender.wait(BACKLOG * self._threads, self._stop)

    def finish(self, pool: Medium) -> dict[str, Any]:
        """Everything has been recorded: wait until the store has it. Returns what belongs in the answer."""
        self._outbox.sender.wait(0, self._stop)
        if not self._own <= self._ready:
            raise OutputError("a task names a chunk that nothing writes to", where=self._keys.text)
        sent = [[f, chunk, self._uploads[f].sent[chunk]] for f, chunk in sorted(self._own) if f in self._uploads]
        whole = [[f, self._whole(f)] for f, _ in sorted(self._own) if f not in self._uploads]
        for f in self._touched:  # what neighbours send
            with suppress(OSError):
                self._spool.forget(str(self._spool.path / self._plan.outputs[f].name), 0, self._plan.outputs[f].size)
        return {"sent": sent, "whole": whole}

    def _whole(self, number: int) -> bytes:
        path = self._spool.path / self._plan.outputs[number].name
        try:
            return path.read_bytes()
        except OSError as e:
            raise OutputError(f"cannot read the output: {e.strerror or e}", where=str(path)) from e

    def stop(self) -> None:
        """Send nothing more."""
        self._stop.set()
        self._outbox.sender.end()

    def close(self) -> None:
        self.stop()
        self._spool.close()


def _rest(task: Task, done: Collection[int], known: Collection[str]) -> Task:
    """The task without what is done and known."""
    parts = [p for p in task.parts if p.number not in done]
    return Task(parts, [t for t in task.targets if t[0] not in known], task.computing)
