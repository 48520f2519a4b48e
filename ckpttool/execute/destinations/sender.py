"""Threads that send what is put into a queue, and one place where their failure shows."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Sender(Generic[_T]):
    """Calls ``send`` for everything that is put, in order, in several threads at a time.

    After a failure nothing more is sent. The threads are daemons: an interrupted program does not wait for them.
    ``weigh``: how much of what ``wait`` counts an item is; 1 unless given.
    """

    def __init__(self, send: Callable[[_T], None], threads: int, weigh: Callable[[_T], int] = lambda _: 1) -> None:
        self._send = send
        self._weigh = weigh
        self._count = threads
        self._threads: list[threading.Thread] = []
        self._items: deque[tuple[_T, int]] = deque()
        self._unsent = 0
        self._ended = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def start(self) -> None:
        """Start the threads, once."""
        while len(self._threads) < self._count:
            self._threads.append(threading.Thread(target=self._work, name="sender", daemon=True))
            self._threads[-1].start()

    def put(self, item: _T) -> None:
        weight = self._weigh(item)
        with self._changed:
            self._items.append((item, weight))
            self._unsent += weight
            self._changed.notify()

    def wait(self, most: int, stop: threading.Event) -> None:
        """Until at most so much waits or is being sent. Raises what sending one raised; returns when ``stop`` is
        set."""
        with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                if self._unsent <= most or stop.is_set() or self._ended:
                    return
                self._changed.wait(0.2)

    def end(self) -> None:
        """Nothing more is sent. What is being sent gets a second to notice."""
        with self._changed:
            self._ended = True
            self._items.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + 1
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._items and not self._ended:
                    self._changed.wait()
                if self._ended:
                    return
                item, weight = self._items.popleft()
            failure: BaseException | None = None
            try:
                self._send(item)
            except BaseException as e:  # noqa: BLE001 - raised again by whoever waits
                failure = e
            with self._changed:
                self._unsent -= weight
                if failure is not None:
                    self._failure = self._failure or failure
                    self._items.clear()
                self._changed.notify_all()
