"""The queue of tasks. What the next ones read from other machines is announced before their turn, and read ahead."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from ckpttool.core.encodings import Contents
from ckpttool.core.plan import Plan
from ckpttool.execute.files import Medium
from ckpttool.execute.moves import Item, arrange
from ckpttool.execute.reads import Checking, Range, check_reads, item_reads, named, turned_reads
from ckpttool.execute.schedule import Task, separate


class Turn:
    """A task from the queue, the moves and checks that it consists of, and the reads announced for it."""

    def __init__(self, task: Task, plan: Plan, sources: Sequence[Contents], pool: Medium) -> None:
        self.task = task
        self._plan = plan
        self._sources = sources
        self._pool = pool
        self.size = 0
        """Bytes that were announced; 0 where everything is on this machine."""
        self._forget: Callable[[], None] = lambda: None
        self._units = [plan.units[p.unit] for p in task.parts if p.unit >= 0]
        self._arranged: tuple[list[Item], list[Checking]] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is made of whole units, which are done together."""
        return bool(self._units)

    def arranged(self) -> tuple[list[Item], list[Checking]]:
        """The moves and checks of whole units."""
        if self._arranged is None:
            found = [separate(u) for u in self._units]
            self._arranged = arrange([m for moves, _ in found for m in moves]), [c for _, cs in found for c in cs]
        return self._arranged

    @property
    def _items(self) -> Iterator[Item]:
        yield from self.arranged()[0]
        for part in self.task.parts:
            yield from part.items

    def announce(self, most: int) -> None:
        """Announce to the pool the byte ranges that the task reads, in the order of its reads: they are read ahead.

        ``most``: bytes that the pool holds at a time.
        """
        reads = [*self._turned(), *(r for item in self._items for r in item_reads(item))]
        for step in [*self.arranged()[1], *(c.step for part in self.task.parts for c in part.checks)]:
            reads += check_reads(step)
        if sum([b - a for _, a, b in reads]) <= most // 4:
            reads.sort()  # all of it will be there: long requests are better than the right order
        outputs = [self._plan.outputs[part.carried] for part in self.task.parts if part.carried >= 0]
        ranges = [*self._named(reads), *((o.carried, 0, o.size) for o in outputs)]
        self.size = sum([b - a for _, a, b in ranges]) + 1
        self._forget = self._pool.announce(ranges)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """The context in which the task is done; its announced reads are forgotten at the end.

        Bytes that it reads in another order than the file's are fetched to this machine before it begins.
        """
        kept = self._pool.keep(self._named(self._turned()) if self.size else ())
        try:
            yield
        finally:
            kept()
            self._forget()

    def _named(self, reads: Iterable[Range]) -> list[tuple[Contents, int, int]]:
        return named(reads, self._sources)

    def _turned(self) -> Iterator[Range]:
        """The ranges that are read in another order than the file's."""
        for item in self._items:
            yield from turned_reads(item)


class Upcoming:
    """The queue of tasks, which announces the reads of the next ones: about ``ahead`` bytes, none for 0."""

    def __init__(self, tasks: Iterable[Task], plan: Plan, pool: Medium, ahead: int) -> None:
        self._tasks = deque(tasks)
        self._plan = plan
        self._sources = [s.contents for s in plan.sources]
        self._pool = pool
        self._ahead = ahead
        self._ready: deque[Turn] = deque()
        self._announced = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._tasks) + len(self._ready)

    def popleft(self) -> Turn:
        """The next task. Raises IndexError when there is none."""
        with self._lock:
            if not self._ahead:
                return Turn(self._tasks.popleft(), self._plan, self._sources, self._pool)
            self._look_ahead(0)
            turn = self._ready.popleft()
            self._announced -= turn.size
            self._look_ahead(self._ahead)
            return turn

    def _look_ahead(self, wanted: int) -> None:
        """Announce the reads of tasks until ``wanted`` bytes are announced, and those of one task at least."""
        while self._tasks and (not self._ready or self._announced < wanted):
            turn = Turn(self._tasks.popleft(), self._plan, self._sources, self._pool)
            turn.announce(self._ahead)
            self._ready.append(turn)
            self._announced += turn.size
