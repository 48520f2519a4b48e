"""Two caches for places on other machines: answers that hold for some seconds (listings, signed URLs), and bytes, which
hold as long as their key names the same bytes.

    listed = TimedCache[WebPlace, dict[str, NamedEntry]](30.0)     one for each kind of answer of each storage
    BYTES                                                          the one of this process, for all storages

``forget`` empties all of them. Safe to use from several threads, and after a fork.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

KEPT_BYTES = 64 << 20
"""Bytes that ``BYTES`` holds."""


class TimedCache(Generic[K, V]):
    """Answers of servers, by what was asked. An answer holds for ``seconds``; at most ``most`` are held.

    Single operations of a dict need no lock.
    """

    def __init__(self, seconds: float, most: int = 4096) -> None:
        self.seconds, self.most = seconds, most
        self._answers: dict[K, tuple[float, V]] = {}
        _caches.append(self)

    def get(self, key: K) -> V | None:
        """The answer, if it still holds."""
        until, answer = self._answers.get(key, (0.0, None))
        return answer if time.monotonic() < until else None

    def pop(self, key: K) -> V | None:
        """``get``, once: who asks again hears of a change."""
        answer = self.get(key)
        self._answers.pop(key, None)
        return answer

    def update(self, answers: Mapping[K, V], *, longer: float = 0.0) -> None:
        """Answers that came now; they hold ``longer`` seconds more than others do."""
        if len(self._answers) + len(answers) > self.most:
            self.clear()
        if len(answers) <= self.most:
            until = time.monotonic() + self.seconds + longer
            self._answers.update({key: (until, answer) for key, answer in answers.items()})

    def put(self, key: K, answer: V) -> None:
        """An answer that came now."""
        self.update({key: answer})

    def clear(self) -> None:
        """Forget all answers."""
        self._answers.clear()


class ByteCache:
    """The bytes that were used last, ``most`` of them, by what names them.

    A key has to name other bytes by another key: a file's place, size and tag with an offset, or a hash.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._held: OrderedDict[Hashable, bytes] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()
        _caches.append(self)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    def get(self, key: Hashable) -> bytes | None:
        """Bytes that are held."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
            return self._held.get(key)

    def put(self, key: Hashable, data: bytes) -> None:
        """Hold bytes, in the place of those that were used longest ago; not those that are more than ``most``."""
        if len(data) > self.most:
            return
        with self._lock:
            self._size += len(data) - len(self._held.pop(key, b""))
            self._held[key] = data
            while self._size > self.most:
                self._size -= len(self._held.popitem(last=False)[1])

    def clear(self) -> None:
        """Forget all bytes."""
        with self._lock:
            self._held.clear()
            self._size = 0

    def renew_lock(self) -> None:
        """Threads that a fork left behind may hold the old lock."""
        self._lock = threading.Lock()


_caches: list[TimedCache[Any, Any] | ByteCache] = []
BYTES = ByteCache(KEPT_BYTES)


def forget() -> None:
    """Forget all that was listed and read: servers may give other answers now."""
    for cache in _caches:
        cache.clear()


def _after_fork() -> None:
    for cache in _caches:
        if isinstance(cache, ByteCache):
            cache.renew_lock()


os.register_at_fork(after_in_child=_after_fork)
