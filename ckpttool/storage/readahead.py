"""Small reads of a file on another machine, answered from blocks of it in the byte cache of the process.

Headers, pickles and zips are read in many small steps, and each step would be a request. With the cache, recognising a
format, reading its header and looking at it once more take one request.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from typing import TypeVar

from ckpttool.errors import CkptError
from ckpttool.storage.caches import BYTES

T = TypeVar("T")

BLOCK = 16 << 10
"""Bytes that are kept or forgotten together, and the least that a request asks for."""
HEAD = 16
"""Blocks of the first request at the beginning of a file: most headers."""
LONGEST = 128
"""Blocks that a request asks for ahead, where reads follow each other."""
MOST_EXPECTED = 2048
"""Blocks that ``expect`` asks for: half of what the cache holds."""
STRAIGHT = LONGEST * BLOCK
"""A read of so many bytes is a request of its own, and nothing of it is kept."""

AT_ONCE = 16
"""Requests at a time."""

_requests = threading.BoundedSemaphore(AT_ONCE)


class Windows:
    """A file of ``size`` bytes, read by ``read_into(buffer, at)``. ``key`` is another one when the bytes are others."""

    def __init__(self, key: Hashable, size: int, read_into: Callable[[memoryview, int], int]) -> None:
        self._key, self._size, self._read_into = key, size, read_into
        self._next, self._ahead = 0, HEAD // 2
        """The block that comes when reads follow each other, and how many the last request asked for."""

    def pread(self, n: int, at: int) -> bytes:
        """``n`` bytes from an offset, fewer only at the end. Raises OSError."""
        n = min(n, self._size - at)
        if n <= 0:
            return b""
        if n >= STRAIGHT:
            return self._fetch(at, n)
        first, last = at // BLOCK, (at + n - 1) // BLOCK
        data = b"".join([self._block(i, last) for i in range(first, last + 1)])
        return data[at - first * BLOCK :][:n]

    def expect(self, places: Iterable[int]) -> None:
        """Fetch the blocks in which reads will begin, several requests at a time. A block that cannot be read now is an
        error when it is read."""
        wanted = sorted({at // BLOCK for at in places if 0 <= at < self._size})
        missing = [i for i in wanted if (self._key, i) not in BYTES][:MOST_EXPECTED]
        for _ in at_once([partial(self._keep, i) for i in missing]):
            pass

    def _keep(self, i: int) -> None:
        with suppress(OSError, CkptError):
            self._store(i, self._fetch(i * BLOCK, min(BLOCK, self._size - i * BLOCK)))

    def _block(self, i: int, last: int) -> bytes:
        """A block; when it is not there, with those that are wanted next, ``last`` at least."""
        if (found := BYTES.get((self._key, i))) is not None:
            return found
        self._ahead = min(2 * self._ahead, LONGEST) if i == self._next else HEAD if i == 0 else 1
        stop = max(last + 1, i + self._ahead)
        stop = self._next = next((k for k in range(i + 1, stop) if (self._key, k) in BYTES), stop)
        begin = i * BLOCK
        data = self._fetch(begin, min(stop * BLOCK, self._size) - begin)
        return self._store(i, data)

    def _store(self, i: int, data: bytes) -> bytes:
        """Keep blocks from ``i`` on. Returns the first."""
        blocks = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)] or [b""]
        for k, block in enumerate(blocks, i):
            if len(block) == min(BLOCK, self._size - k * BLOCK):
                BYTES.put((self._key, k), block)
        return blocks[0]

    def _fetch(self, at: int, n: int) -> bytes:
        """Bytes from the file itself; fewer where it ends early."""
        data = bytearray(n)
        done = 0
        with memoryview(data) as view, _requests:  # however many threads there are
            while done < n and (got := self._read_into(view[done:], at + done)):
                done += got
        return bytes(data[:done]) if done < n else bytes(data)


def at_once(calls: Iterable[Callable[[], T]], threads: int = AT_ONCE) -> Iterator[T]:
    """The results of calls that wait for another machine, in order; ``threads`` are made at a time, and as many before
    they are asked for. Raises what they raise, and makes no more calls then."""
    rest = iter(calls)
    first = list(islice(rest, threads))
    if len(first) < 2:  # `threads` may be one
        yield from (call() for call in chain(first, rest))
        return
    from concurrent.futures import ThreadPoolExecutor  # 4 ms, for files on other machines alone

    with ThreadPoolExecutor(len(first), thread_name_prefix="ahead") as pool:
        begun = deque([pool.submit(call) for call in first])
        try:
            while begun:
                yield begun.popleft().result()
                begun.extend([pool.submit(call) for call in islice(rest, 1)])
        finally:
            for waiting in begun:
                waiting.cancel()
