"""Keeps a fleet busy with the orders of a run, and gives lost ones out again."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count, islice

from ckpttool.errors import OutputError
from ckpttool.execute.error_data import on_node
from ckpttool.execute.fleets.base import Answer, Fleet, Order, Reply

TRIES = 4
"""How often an order is sent: one that is lost as often takes down whoever has it."""
PATIENCE = 60.0
"""Seconds without any node before the run gives up: long enough for a new one to join."""
_TICKETS = count(1)
"""Not used twice, whatever the job: the answer to an order of an earlier one may come late."""
_TICK = 0.2
"""Seconds after which ``stop`` is looked at."""


class _DispatchedOrder:
    """An order, and the nodes that have lost it."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.losses: list[str] = []


def dispatch(fleet: Fleet, orders: Iterable[Order], stop: threading.Event) -> Iterator[tuple[Order, Answer, str]]:
    """Have all orders carried out, and yield each with its answer and the node that gave it, in any order.

    An order that is lost with its node is sent again; if the first node answers nevertheless, nobody listens. Ends
    early once ``stop`` is set. Raises what a worker raised, with the node as the last line of ``where``, and
    OutputError when an order is lost too often or no node is left.
    """
    coming = iter(orders)
    waiting: deque[_DispatchedOrder] = deque()
    away: dict[int, _DispatchedOrder] = {}
    heard: deque[Reply] = deque()
    seen = time.monotonic()
    while not stop.is_set():
        while len(away) < fleet.slots() and _has_one(waiting, coming):
            ticket = next(_TICKETS)
            away[ticket] = waiting.popleft()
            fleet.send(ticket, away[ticket].order)
        if not away and not _has_one(waiting, coming):
            return
        if not heard:
            heard.extend(fleet.replies(_TICK))
        if heard:
            reply = heard.popleft()
            if reply.error is not None and (reply.ticket is None or reply.ticket in away):
                raise on_node(reply.error, reply.node)
            pending = away.pop(reply.ticket, None) if reply.ticket is not None else None
            if pending is None:
                continue  # it was given up, and is done or will be done by another node
            if reply.answer is not None:
                yield pending.order, reply.answer, reply.node
            else:
                waiting.appendleft(_again(pending, reply))
        if away or fleet.nodes():
            seen = time.monotonic()
        elif time.monotonic() - seen >= PATIENCE:
            raise OutputError("no working node is left", hint="make sure that the cluster has nodes with a free CPU")


def _has_one(waiting: deque[_DispatchedOrder], coming: Iterator[Order]) -> bool:
    """Whether there is something to send; the next order is made when it is needed."""
    if not waiting:
        waiting.extend(_DispatchedOrder(order) for order in islice(coming, 1))
    return bool(waiting)


def _again(pending: _DispatchedOrder, reply: Reply) -> _DispatchedOrder:
    """A lost order is to be sent once more. Raises OutputError when that was done too often."""
    pending.losses.append(f"on {reply.node}: {reply.lost}")
    if len(pending.losses) >= TRIES:
        hint = "if memory was short, use fewer --workers or less --memory"
        raise OutputError(f"a task was lost {TRIES} times", where=pending.losses, hint=hint)
    return pending
