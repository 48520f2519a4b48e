"""Reading ahead of bytes on other machines: several requests at a time, into memory that is bounded.

    Range   what somebody will read from its begin to its end. It was announced, or found by a read that nobody had
            announced; then it is read ahead as far as it has been read in order
    Piece   consecutive bytes of a file that are here or on their way: one request

Threads that read take what they need from pieces, and wait where it is on its way. What nobody has asked for yet is
asked for at once, before anything else. Otherwise ranges that are being read come first, the one that has least ahead
of it before the others, then those that were announced, in their order.

Pieces that have been read keep their memory until somebody else needs it. Nobody waits for memory, so no pattern of
reads can block all readers: whoever waits for bytes takes the memory of a piece that is needed later, and where all of
them are on their way, or are just being read, gets ``SPARE`` bytes besides.
"""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from operator import attrgetter

import numpy as np

from ckpttool.core.files import OpenFile, Remote
from ckpttool.execute.files import Stopped, too_short

REQUEST = 16 << 20
"""Most bytes of a request: more would not make it cheaper."""

GAP = 1 << 20
"""Bytes between two ranges that are fetched along: in less time than another request would take."""

LEAST = 64 << 10
"""Fewest bytes of a request, where the file has so many."""

SPARE = 256 << 10
"""Memory of a piece that somebody waits for when there is none left."""

CONNECTIONS = 16
"""Requests at a time where nobody says how many: one of them moves about 85 MB/s from an object store."""

_PER_CONNECTION = 1 << 20
"""Memory, at least, for each of them."""

_FOUND = 16
"""Ranges that nobody announced, and that are remembered: as many files may be read in turns."""

_EVER = 1 << 62


class FarFile:
    """A file on another machine, which is opened when its first bytes are fetched."""

    def __init__(self, place: Remote) -> None:
        self.place = place
        self.size: int | None = None
        """Known when it has been opened."""
        self.pieces: list[_FetchedPiece] = []
        self.ranges: list[_Range] = []
        """Sorted by their start."""
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._file: OpenFile | None = None
        self._users = 0
        self._closed = False

    def fill(self, at: int, buffer: memoryview) -> int:
        """Fetch bytes from ``at`` on; returns how many there are in the file. Raises what the storage raises."""
        with self._lock:
            self._users += 1
        try:
            file = self._opened()
            want = max(0, min(len(buffer), file.info.size - at))
            done = 0
            while done < want:
                got = file.read_into(buffer[done:want], at + done)
                if got <= 0:
                    raise too_short(str(self.place), at + done, want - done, at + done)
                done += got
            return done
        finally:
            with self._lock:
                self._users -= 1
                self._close_unused()

    def _opened(self) -> OpenFile:
        with self._opening:
            if self._file is None:
                if self._closed:
                    raise Stopped
                self._file = self.place.open_file()
                self.size = self._file.info.size
            return self._file

    def close(self) -> None:
        """Now, or when the last request has ended."""
        with self._lock:
            self._closed = True
            self._close_unused()

    def _close_unused(self) -> None:
        if self._closed and not self._users and self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):
                file.close()

    def piece_at(self, at: int) -> _FetchedPiece | None:
        """The piece that holds this byte, or will; None where no piece does."""
        found = None
        for piece in self.pieces:
            if piece.start <= at < piece.stop:
                if piece.is_ready:
                    return piece
                found = found or piece
        return found

    def range_at(self, at: int) -> _Range | None:
        """The range with this byte; of several, the one whose reader is nearest."""
        found = None
        i = bisect_right(self.ranges, at, key=attrgetter("start"))
        for r in self.ranges[max(0, i - 8) : i]:
            if at < r.stop and (found is None or abs(at - r.at) < abs(at - found.at)):
                found = r
        return found


class _Range:
    """Bytes that are read in order, mostly."""

    __slots__ = ("ahead", "at", "begun", "due", "early", "file", "index", "of", "run", "start", "stop")

    def __init__(self, file: FarFile, start: int, stop: int, of: Announcement | None, index: int, run: int) -> None:
        self.file = file
        self.start = start
        self.stop = stop
        self.of = of
        self.index = index
        self.at = start
        """Position of its reader."""
        self.ahead = start
        """Up to where it has been asked for."""
        self.run = run
        """Bytes that were read in order: it may be read ahead by twice as many."""
        self.begun = False
        self.early = 0
        """Bytes asked for before it was begun."""
        self.due = 0
        """Bytes that were announced before it."""

    def needed(self, start: int, stop: int) -> int:
        """The number of these bytes that lie in this range."""
        return min(stop, self.stop) - max(start, self.start)


class Announcement:
    """Ranges that belong together, in the order in which they will be read."""

    def __init__(self) -> None:
        self.ranges: list[_Range] = []
        self.next = 0
        """The first range that may not have been asked for."""
        self.early = 0
        """Bytes asked for of ranges that nobody has begun to read."""


class _FetchedPiece:
    """Bytes of a file, and who needs them."""

    __slots__ = ("changed", "error", "file", "is_ready", "left", "memory", "pins", "ranges", "start", "stop")

    def __init__(
        self, file: FarFile, start: int, stop: int, memory: Memory, ranges: list[_Range], changed: threading.Condition
    ) -> None:
        self.file = file
        self.start = start
        self.stop = stop
        self.memory = memory
        self.ranges = ranges
        self.left = sum([r.needed(start, stop) for r in ranges])
        """Bytes that nobody has read yet."""
        self.pins = 0
        self.is_ready = False
        """Here, or failed."""
        self.error: BaseException | None = None
        self.changed = changed

    @property
    def is_idle(self) -> bool:
        """Here, and nobody is reading it."""
        return self.is_ready and not self.pins


class Memory:
    """Memory for one piece."""

    __slots__ = ("array", "size", "spare")

    def __init__(self, size: int, *, spare: bool) -> None:
        self.size = size
        self.spare = spare
        # A mapping of its own: given back to the system when it is dropped, whatever else was allocated meanwhile.
        self.array = np.frombuffer(mmap.mmap(-1, size), np.uint8)


class ReadAhead:
    """Pieces, and the threads that fetch them. Safe to use from several threads; starts none before it has work."""

    def __init__(self, memory: int, connections: int | None) -> None:
        self.memory = max(memory, 2 * LEAST)
        self.connections = connections or max(1, min(CONNECTIONS, self.memory // _PER_CONNECTION))
        request = self.memory * 3 // 4 // self.connections // LEAST * LEAST
        self.request = max(LEAST, min(REQUEST, request))
        self.peak = 0
        """Most bytes of memory that were there at one time."""
        self._made = 0
        self._free: list[Memory] = []
        self._pieces: dict[_FetchedPiece, None] = {}
        """All there are; the first one was read longest ago."""
        self._spent: dict[_FetchedPiece, None] = {}
        """Pieces without a known reader, oldest first."""
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._queue: deque[_FetchedPiece] = deque()
        self._flying = 0
        """Pieces that are queued or being fetched."""
        self._threads: dict[threading.Thread, bool] = {}
        """And whether each is making a request."""
        self._idle = 0
        self._announced: list[Announcement] = []
        self._due = 0
        """Bytes that were ever announced."""
        self._begun: dict[_Range, None] = {}
        self._found: deque[_Range] = deque()
        self._closed = False

    # -- what readers call

    def announce(self, ranges: Iterable[tuple[FarFile, int, int]]) -> Announcement:
        """These will be read in this order. Those that touch are one."""
        new = Announcement()
        last: _Range | None = None
        for file, start, stop in ranges:
            if last is not None and last.file is file and last.start <= start <= last.stop:
                last.stop = max(last.stop, stop)
            elif start < stop:
                last = _Range(file, start, stop, new, len(new.ranges), _EVER)
                new.ranges.append(last)
        with self._lock:
            for r in new.ranges:
                r.due = self._due
                self._due += r.stop - r.start
                insort(r.file.ranges, r, key=attrgetter("start"))
            self._announced.append(new)
            self._order()
        return new

    def forget(self, announcement: Announcement) -> None:
        """These have been read, or will not be."""
        with self._lock:
            self._announced.remove(announcement)
            for r in announcement.ranges:
                self._close_range(r)
            self._order()

    def read(self, file: FarFile, at: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers with consecutive bytes. Raises what fetching them raised, Stopped after ``close``."""
        left = sum([b.nbytes for b in buffers])
        pending = deque(buffers)
        while left:
            piece = self._take(file, at, left)
            done = 0
            try:
                done = _copy(piece, at, pending)
            finally:
                self._give(piece, at, done)
            at += done
            left -= done

    def close(self) -> None:
        """Whoever waits gets Stopped; requests that are on their way are left to end by themselves."""
        with self._lock:
            self._closed = True
            for piece in self._pieces:
                piece.changed.notify_all()
                piece.file.pieces.clear()
            self._queue.clear()
            self._pieces.clear()
            self._spent.clear()
            self._free.clear()
            self._work.notify_all()
            idle = [thread for thread, is_busy in self._threads.items() if not is_busy]
        for thread in idle:  # a process that is forked now has one thread again
            thread.join()

    # -- pieces

    def _take(self, file: FarFile, at: int, want: int) -> _FetchedPiece:
        """The piece with this byte, when it is here; in use until ``_give``."""
        with self._lock:
            while True:
                if self._closed:
                    raise Stopped
                if file.size is not None and at >= file.size:
                    raise too_short(str(file.place), at, want, file.size)
                piece = file.piece_at(at) or self._demand(file, at, want)
                piece.pins += 1
                try:
                    while not piece.is_ready and not self._closed:
                        piece.changed.wait()
                except BaseException:
                    self._unpin(piece)
                    raise
                if piece.error is None and piece.start <= at < piece.stop and not self._closed:
                    return piece
                self._unpin(piece)
                if piece.error is not None and not self._closed:
                    raise piece.error

    def _give(self, piece: _FetchedPiece, at: int, done: int) -> None:
        with self._lock:
            piece.left -= done
            if piece in self._pieces:
                self._pieces[piece] = self._pieces.pop(piece)
            moved = False
            for r in piece.ranges:
                if r.start <= at + done and at < r.stop:
                    moved = self._advance(r, at, min(at + done, r.stop)) or moved
            spent = self._unpin(piece)
            if spent or moved:
                self._order()

    def _unpin(self, piece: _FetchedPiece) -> bool:
        """Somebody has done with a piece; returns whether its memory is to be had now."""
        piece.pins -= 1
        if not piece.is_idle or piece not in self._pieces:
            return False
        if piece.error is not None:
            self._drop(piece)  # whoever wants these bytes later asks again
            return True
        return self._is_new_spent(piece)

    def _is_new_spent(self, piece: _FetchedPiece) -> bool:
        if piece.left > 0 or not piece.is_idle or piece in self._spent:
            return False
        self._spent[piece] = None
        return True

    def _drop(self, piece: _FetchedPiece) -> None:
        """Take its memory."""
        self._spent.pop(piece, None)
        self._pieces.pop(piece)
        piece.file.pieces.remove(piece)
        if piece.memory.spare:
            self._made -= piece.memory.size
        else:
            self._free.append(piece.memory)

    def _advance(self, r: _Range, start: int, stop: int) -> bool:
        """The reader of a range is at ``stop``. Returns whether there may be something new to order."""
        if r.at <= start <= r.at + GAP:
            r.run += stop - r.at
        elif not (start == r.start and r.of is not None):
            r.run = stop - start
        r.at = stop
        r.ahead = max(r.ahead, stop)
        if r.at >= r.stop:
            return self._begun.pop(r, self) is None
        return self._begin(r)

    def _begin(self, r: _Range) -> bool:
        """Somebody reads in this range. Returns whether that is new."""
        if not r.begun and r.of is not None:
            r.of.early -= r.early
        r.begun = True
        if r in self._begun:
            return False
        self._begun[r] = None
        return True

    def _close_range(self, r: _Range) -> None:
        r.file.ranges.remove(r)
        self._begun.pop(r, None)
        r.stop = r.ahead = r.start  # nothing of it is wanted
        for piece in r.file.pieces:
            if r in piece.ranges:
                piece.ranges.remove(r)
                if not piece.ranges:
                    piece.left = 0
                    self._is_new_spent(piece)

    # -- what to fetch

    def _demand(self, file: FarFile, at: int, want: int) -> _FetchedPiece:
        """Have bytes fetched that somebody waits for."""
        r = file.range_at(at) or self._find(file, at, want)
        if at != r.ahead:
            # Somewhere else than was thought: read ahead again when it has gone on from here for a while.
            r.run = _EVER if at == r.start and r.of is not None else 0
            r.ahead = r.at = at
        size = max(min(want, r.stop - at), min(2 * r.run, self._window() // 2), LEAST)
        self._begin(r)
        stop, ranges = self._extent(r, min(size, self.request))
        piece = self._piece(r, stop, ranges, self._memory_now(stop - at))
        self._queue.appendleft(piece)
        self._wake()
        return piece

    def _find(self, file: FarFile, at: int, want: int) -> _Range:
        """A range that nobody has announced, up to the end of the file."""
        stop = at + want if file.size is None else file.size
        for r in self._found:
            if r.file is file and r.at == r.stop == at:  # it went on when nobody knew yet where the file ends
                r.stop = stop
                return r
        r = _Range(file, at, stop, None, 0, 0)
        insort(file.ranges, r, key=attrgetter("start"))
        self._found.append(r)
        if len(self._found) > _FOUND:
            self._close_range(self._found.popleft())
        return r

    def _order(self) -> None:
        """Have fetched what will be needed next, as far as there are connections and memory."""
        while self._flying < self.connections and not self._closed and (r := self._next()) is not None:
            if self._is_there(r):
                continue
            stop, ranges = self._extent(r, max(LEAST, min(self.request, self._window() // 2)))
            memory = self._memory(stop - r.ahead)
            if memory is None:
                return
            self._queue.append(self._piece(r, stop, ranges, memory))
            self._wake()

    def _is_there(self, r: _Range) -> bool:
        """Whether a piece has the next bytes of a range already: it is shared then."""
        here = r.file.piece_at(r.ahead)
        if here is None or here.error is not None:
            return False
        if r not in here.ranges:
            here.ranges.append(r)
            here.left = max(0, here.left) + r.needed(r.ahead, here.stop)
            self._spent.pop(here, None)
        r.ahead = min(r.stop, here.stop)
        return True

    def _next(self) -> _Range | None:
        """The range whose next bytes are needed first, of those that have not been asked for."""
        window = self._window()
        best, least = None, 0
        for r in self._begun:
            ahead = r.ahead - r.at
            if r.ahead < r.stop and ahead < min(window, 2 * r.run) and (best is None or ahead < least):
                best, least = r, ahead
        if best is not None:
            return best
        for a in self._announced:
            while a.next < len(a.ranges) and (
                a.ranges[a.next].begun or a.ranges[a.next].ahead >= a.ranges[a.next].stop
            ):
                a.next += 1
            if a.next < len(a.ranges) and a.early < self.memory // 4:
                return a.ranges[a.next]
        return None

    def _window(self) -> int:
        """Bytes that each range may have ahead of its reader."""
        return max(2 * LEAST, self.memory // max(1, len(self._begun)))

    def _extent(self, r: _Range, size: int) -> tuple[int, list[_Range]]:
        """Where the next request of a range ends, and whose bytes it fetches: those of ranges behind it, too."""
        start = r.ahead
        end = min([start + size, *[p.start for p in r.file.pieces if p.start > start]])
        stop = min(end, r.stop)
        ranges = [r]
        if stop < end and r.of is not None:
            at = bisect_left(r.file.ranges, stop, key=attrgetter("start"))
            for f in r.file.ranges[at:]:
                if f.start >= end or f.start > stop + GAP:
                    break
                if f.of is None or f.begun or f.ahead != f.start:
                    continue
                if abs(f.due - r.due) > self.memory // 2:  # its memory would be needed before
                    break
                ranges.append(f)
                stop = max(stop, min(end, f.stop))
        return stop, ranges

    def _piece(self, r: _Range, stop: int, ranges: list[_Range], memory: Memory) -> _FetchedPiece:
        start = r.ahead
        stop = min(stop, start + memory.size)
        ranges = [f for f in ranges if f.start < stop]
        for f in ranges:
            if not f.begun and f.of is not None:
                f.early += min(stop, f.stop) - f.ahead
                f.of.early += min(stop, f.stop) - f.ahead
            f.ahead = min(stop, f.stop)
        piece = _FetchedPiece(r.file, start, stop, memory, ranges, threading.Condition(self._lock))
        r.file.pieces.append(piece)
        self._pieces[piece] = None
        self._flying += 1
        return piece

    # -- memory

    def _memory(self, size: int, *, urgent: bool = False) -> Memory | None:
        """Memory for so many bytes, if there is some."""
        fit = self._fit(size)
        while True:
            found = next((m for m in self._free if m.size == fit), None)
            if found is not None:
                self._free.remove(found)
                return found
            if self._made + fit <= self.memory:
                return self._make(fit, spare=False)
            if self._free:
                self._made -= self._free.pop().size
                continue
            victim = next((p for p in self._spent if p.is_idle), None) or self._victim(urgent=urgent)
            if victim is None:
                return None
            self._drop(victim)

    def _memory_now(self, size: int) -> Memory:
        """Memory for somebody who waits: for fewer bytes where there is none."""
        return self._memory(size, urgent=True) or self._make(min(self._fit(size), SPARE), spare=True)

    def _fit(self, size: int) -> int:
        """Memory has few sizes, so that the next one can use it."""
        fit = self.request
        while fit // 2 >= max(size, LEAST):
            fit //= 2
        return fit

    def _make(self, size: int, *, spare: bool) -> Memory:
        self._made += size
        self.peak = max(self.peak, self._made)
        return Memory(size, spare=spare)

    def _victim(self, *, urgent: bool) -> _FetchedPiece | None:
        """A piece whose memory somebody needs more."""
        window = self._window()
        idle = [p for p in self._pieces if p.is_idle]
        for p in idle:  # its readers have passed it, or are far away
            if all(r.begun and (r.at >= p.stop or p.start > r.at + window) for r in p.ranges):
                return p
        if not urgent:
            return None
        for p in reversed(idle):  # its readers are not there yet
            if not any(r.begun for r in p.ranges):
                for r in p.ranges:
                    _take_back(r, p)
                return p
        return idle[0] if idle else None

    # -- threads

    def _wake(self) -> None:
        """Somebody is to fetch what was queued."""
        if self._idle >= len(self._queue):
            self._work.notify()
        elif len(self._threads) < self.connections:
            thread = threading.Thread(target=self._fetch, name=f"fetch-{len(self._threads)}", daemon=True)
            self._threads[thread] = False
            try:
                thread.start()
            except RuntimeError:  # the system allows no more
                del self._threads[thread]
                if not self._threads:
                    raise

    def _fetch(self) -> None:
        """The life of a thread that makes requests."""
        me = threading.current_thread()
        while True:
            with self._lock:
                while not self._queue and not self._closed:
                    self._idle += 1
                    try:
                        self._work.wait()
                    finally:
                        self._idle -= 1
                if self._closed:
                    return
                piece = self._queue.popleft()
                self._threads[me] = True
            error: BaseException | None = None
            done = 0
            try:
                done = piece.file.fill(piece.start, piece.memory.array[: piece.stop - piece.start].data)
            except BaseException as e:  # noqa: BLE001 - raised again by whoever needs the bytes
                error = e
            with self._lock:
                self._flying -= 1
                self._threads[me] = False
                self._arrived(piece, done, error)
                self._order()
            del piece, error

    def _arrived(self, piece: _FetchedPiece, done: int, error: BaseException | None) -> None:
        piece.error = error
        piece.is_ready = True
        if error is None and piece.start + done < piece.stop:  # the file ends there
            piece.stop = piece.start + done
            piece.left = min(piece.left, done)
        if piece in self._pieces:
            self._is_new_spent(piece)
        piece.changed.notify_all()


def _take_back(r: _Range, piece: _FetchedPiece) -> None:
    """Nobody has read this piece of a range, and it is to be fetched again."""
    at = max(r.start, piece.start)
    if r.of is not None and at < r.ahead:
        lost = min(r.early, r.ahead - at)
        r.early -= lost
        r.of.early -= lost
        r.of.next = min(r.of.next, r.index)
        r.ahead = at


def _copy(piece: _FetchedPiece, at: int, pending: deque[memoryview]) -> int:
    """Fill buffers from a piece, as far as it goes; ``pending`` keeps the rest of them."""
    start = at - piece.start
    stop = piece.stop - piece.start
    begin = start
    while pending and start < stop:
        buffer = pending.popleft()
        n = min(buffer.nbytes, stop - start)
        np.frombuffer(buffer, np.uint8, n)[...] = piece.memory.array[start : start + n]
        start += n
        if n < buffer.nbytes:
            pending.appendleft(buffer[n:])
    return start - begin
