"""A fleet of this process alone, which loses, repeats, delays and reorders orders as no cluster can be made to.

Nothing runs at the same time: each call of ``replies`` lets one node take a step. All that happens follows from the
seed.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpttool.execute.fleets.base import Answer, FleetJob, Order, Reply, Worker


@dataclass(frozen=True)
class Trouble:
    """How often something goes wrong, of 1 for each order."""

    lost: float = 0
    """The order never arrives."""
    torn: float = 0
    """The process dies amid the order: half of its tasks are done, if the order has ``tasks``."""
    mute: float = 0
    """The order is done, and its answer does not arrive."""
    repeated: float = 0
    """The order is done twice, and answered twice."""
    delayed: float = 0
    """The answer comes some steps later."""
    ghosts: float = 0
    """The order is given up, done some steps later all the same, and answered."""
    deaths: Mapping[int, int] = field(default_factory=dict)
    """Step -> node that dies then, with all orders it has."""
    births: Mapping[int, int] = field(default_factory=dict)
    """Step -> node that joins, or comes back."""


CALM = Trouble()
WILD = Trouble(0.05, 0.08, 0.05, 0.1, 0.2, 0.08)


def _travelled(data: dict[str, Any]) -> dict[str, Any]:
    """What arrives."""
    arrived: dict[str, Any] = pickle.loads(pickle.dumps(data))  # noqa: S301
    return arrived


_LIVING: list[FakeFleet] = []


def end_all() -> None:
    """Close what the workers of a test's fleets have open, however the test ended."""
    while _LIVING:
        _LIVING.pop().close()


@dataclass
class _Node:
    name: str
    alive: bool = True
    orders: deque[tuple[int, Order]] = field(default_factory=deque)
    worker: Worker | None = None


class FakeFleet:
    """Nodes that do an order when they are asked for replies."""

    def __init__(self, nodes: int = 3, seed: int = 0, trouble: Trouble = CALM, *, depth: int = 2) -> None:
        self.sent: list[Order] = []
        self.ended: list[bool] = []
        self.opened = 0
        self.step = 0
        self.most = 0
        """Most orders that were under way."""
        self._rng = random.Random(seed)  # noqa: S311
        self._trouble = trouble
        self._depth = depth
        self._nodes = [_Node(f"node-{i}") for i in range(nodes)]
        self._job = b""
        _LIVING.append(self)
        self._ghosts: list[tuple[int, _Node, int, Order, bytes]] = []
        """Orders that were given up, and when they are done."""
        self._due: list[tuple[int, Reply]] = []

    # -- what a run calls

    def start(self, job: FleetJob) -> None:
        self._job = pickle.dumps(job)
        for node in self._nodes:
            self._drop(node)

    def nodes(self) -> int:
        return len(self._alive())

    def slots(self) -> int:
        return self._depth * self.nodes()

    def send(self, ticket: int, order: Order) -> None:
        assert not self.ended, "sent after the end"
        self.sent.append(order)
        node = min(self._alive(), key=lambda n: (len(n.orders), self._rng.random()))
        node.orders.append((ticket, _travelled(order)))
        self.most = max(self.most, sum(len(n.orders) for n in self._nodes))

    def replies(self, timeout: float) -> list[Reply]:
        """Let some node take a step. What is due comes in any order."""
        self.step += 1
        if (born := self._trouble.births.get(self.step)) is not None:
            self._birth(born)
        if (killed := self._trouble.deaths.get(self.step)) is not None:
            self._kill(self._nodes[killed])
        for ghost in [g for g in self._ghosts if g[0] <= self.step]:
            self._ghosts.remove(ghost)
            _, node, ticket, order, job = ghost
            if job == self._job:
                self._due.append((self.step, self._done(node, ticket, order)))
        busy = [n for n in self._alive() if n.orders]
        if busy:
            node = self._rng.choice(busy)
            self._turn(node, *node.orders.popleft())
        due = [r for at, r in self._due if at <= self.step]
        self._due = [(at, r) for at, r in self._due if at > self.step]
        self._rng.shuffle(due)
        return due

    def end(self, *, now: bool) -> None:
        self.ended.append(now)
        self.close()

    def close(self) -> None:
        """End the processes of all nodes."""
        for node in self._nodes:
            if node.worker is not None:
                node.worker.close()
                node.worker = None

    # -- what happens then

    def _alive(self) -> list[_Node]:
        return [n for n in self._nodes if n.alive]

    def _birth(self, number: int) -> None:
        while len(self._nodes) <= number:
            self._nodes.append(_Node(f"node-{len(self._nodes)}"))
        self._nodes[number].alive = True

    def _kill(self, node: _Node) -> None:
        node.alive = False
        self._drop(node)
        for ticket, _ in node.orders:
            self._due.append((self.step, Reply(ticket, node.name, lost="the node is gone")))
        node.orders.clear()

    def _drop(self, node: _Node) -> None:
        """The process of a node ends; the next order gets a new one."""
        if node.worker is not None:
            node.worker.close()
            node.worker = None

    def _turn(self, node: _Node, ticket: int, order: Order) -> None:
        trouble, dice = self._trouble, self._rng.random
        later = self.step + 1 + self._rng.randrange(8)
        lost = Reply(ticket, node.name, lost="the process is gone")
        if dice() < trouble.lost:
            self._due.append((self.step, lost))
        elif dice() < trouble.torn:
            if tasks := order.get("tasks"):
                self._done(node, ticket, order | {"tasks": tasks[: len(tasks) // 2]})
            self._drop(node)
            self._due.append((self.step, lost))
        elif dice() < trouble.ghosts:
            self._ghosts.append((later, node, ticket, order, self._job))
            self._due.append((self.step, lost))
        else:
            reply = self._done(node, ticket, order)
            if dice() < trouble.repeated:
                self._due.append((later, self._done(node, ticket, order)))
            if dice() < trouble.mute:
                reply = lost
            self._due.append((later if dice() < trouble.delayed else self.step, reply))

    def _done(self, node: _Node, ticket: int, order: Order) -> Reply:
        try:
            if node.worker is None:
                self.opened += 1
                node.worker = pickle.loads(self._job).open()  # noqa: S301
            answer: Answer = node.worker.do(order)
        except Exception as e:  # noqa: BLE001 - whatever a worker raises is a reply
            return Reply(ticket, node.name, error=e)
        return Reply(ticket, node.name, answer=_travelled(answer))
