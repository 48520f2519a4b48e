"""Moving the bytes of a part in bounded blocks.

    Batch   runs up to a block's size are laid out in the order of their destinations; runs that follow each other in a
            source are read in one call, scattered to their places; runs that follow each other in a destination are
            written in one call. Small rows join in
    Rows    a block of rows: every source is read once and rearranged, every destination is written once
    Tile    read in the order of the source, turned on the way, written in the order of the destination

No byte is written that does not belong to a step. Each worker has one ``Mover`` and with it one arena: all its
buffers together, reused from block to block.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod

import numpy as np

from ckpttool.core.dtypes import itemsize
from ckpttool.core.encodings import Contents, Encoding
from ckpttool.execute import moves
from ckpttool.execute.files import IOV_MAX, SECTOR, UNCACHED_FROM, Medium, Stopped
from ckpttool.execute.hashing import TensorHashes
from ckpttool.execute.permute import Array, Permuter, store
from ckpttool.execute.reader import GAPS, Bytes, kinds, offsets, read_strided, read_turned

BLOCK = 4 << 20
"""Bytes of one block: it stays in the processor's cache between the read and the write."""

WRITE = 1 << 20
"""A block grows until each of its destinations gets a write of this size, where memory allows."""

SCRATCH = 1 << 20
SMALL = 256 << 10
"""Rows of up to this many bytes, read and written, are done together with others."""
_ROWS = -2
"""Source number of a run that is put together from rows."""


class Arena:
    """All buffers of one worker. Memory is touched, and so counted by the system, only where it is used."""

    def __init__(self, nbytes: int) -> None:
        self.size = max(nbytes // SECTOR * SECTOR, 4096)
        self._memory: Bytes = np.empty(self.size + SECTOR, np.uint8)
        self._base = -self._memory.ctypes.data % SECTOR
        self._used = 0
        self.peak = 0

    def reset(self) -> None:
        self._used = 0

    def room(self, buffers: int) -> int:
        """Bytes that so many buffers have together, wherever they begin."""
        return self.size - 2 * SECTOR * buffers

    def take(self, nbytes: int, offset: int = 0) -> Bytes:
        """A buffer, valid until ``reset``. Raises MemoryError when the arena is too small.

        It lies in memory as bytes at ``offset`` of a file do, from the last multiple of a sector on, so that they can
        be written directly.
        """
        phase = _phase(offset)
        start = self._base + self._used + phase
        self._used += -(-(phase + nbytes) // SECTOR) * SECTOR
        if self._used > self.size:
            raise MemoryError(f"a block needs {self._used:,} bytes of {self.size:,}")
        self.peak = max(self.peak, self._used)
        return self._memory[start : start + nbytes]


def _phase(offset: int) -> int:
    """Bytes from a sector's start; 0 where that would put numbers across their natural places."""
    phase = offset % SECTOR
    return 0 if phase % 8 else phase


class Mover:
    """Moves items for one worker thread between the files of a plan."""

    def __init__(
        self, sources: Sequence[Contents], outputs: Sequence[str], pool: Medium, memory: int, stop: threading.Event
    ) -> None:
        self.sources = sources
        self.outputs = outputs
        self.pool = pool
        self.arena = Arena(memory)
        self.stop = stop
        self.bytes_read = 0
        self.bytes_written = 0
        self.sums: TensorHashes | None = None
        self._turn = Permuter()

    # -- files

    def read(self, file: int, offset: int, buffers: Sequence[memoryview], *, once: bool = True) -> None:
        """Fill buffers with consecutive bytes of a source."""
        if self.stop.is_set():
            raise Stopped
        self.pool.read(self.sources[file], offset, buffers, once=once)
        self.bytes_read += buffers[0].nbytes if len(buffers) == 1 else sum([b.nbytes for b in buffers])

    def write(self, file: int, offset: int, data: memoryview, *, scattered: bool = False) -> None:
        """Write consecutive bytes of an output, and take them into its checksums."""
        if self.stop.is_set():
            raise Stopped
        self.pool.write(self.outputs[file], offset, data, scattered=scattered)
        self.bytes_written += data.nbytes
        if self.sums is not None:
            self.sums.feed(file, offset, data)

    def read_back(self, file: int, offset: int, buffer: memoryview) -> None:
        """Fill a buffer with bytes that were written to an output."""
        if self.stop.is_set():
            raise Stopped
        self.pool.read(self.outputs[file], offset, (buffer,), once=False)

    def copy_file(self, path: str, file: int, nbytes: int) -> None:
        """Copy a whole companion file to an output of the same size."""
        self.arena.reset()
        view = self.arena.take(min(BLOCK, self.arena.size)).data
        for a in range(0, nbytes, view.nbytes):
            piece = view[: min(view.nbytes, nbytes - a)]
            self.pool.read(path, a, (piece,))
            self.bytes_read += piece.nbytes
            self.write(file, a, piece)

    # -- items

    def carry(self, items: Sequence[moves.Item]) -> None:
        """Carry out the items, in order; small ones that follow each other share a block."""
        limit = min(BLOCK, self.arena.room(2 + self.arena.size // UNCACHED_FROM))
        runs: list[moves.ByteRun] = []
        small: list[moves.RowBlock] = []
        room = limit
        for item in items:
            if isinstance(item, moves.Batch):
                for run in item.runs:
                    rest = run
                    while rest.nbytes > room:
                        head, rest = rest.split(room)
                        self._block([*runs, head] if room else runs, small)
                        runs, small, room = [], [], limit
                    runs.append(rest)
                    room -= rest.nbytes
                continue
            need = _room_for(item, min(SMALL, limit))
            if need is None or need > room:
                self._block(runs, small)
                runs, small, room = [], [], limit
            if isinstance(item, moves.TransposeTile):
                with self.pool.short_calls:
                    self._tile(item.move)
            elif need is None:
                self._rows(item)
            else:
                small.append(item)
                room -= need
        self._block(runs, small)

    def _block(self, runs: Sequence[moves.ByteRun], small: Sequence[moves.RowBlock]) -> None:
        """Read everything, rearrange the rows, write everything; each in as few calls as the places allow."""
        self.arena.reset()
        pieces = [*runs, *[_lane_run(lane, item) for item in small for lane in item.writes]]
        pieces.sort()
        writes: list[list[int]] = []  # destination, offset, bytes, place in memory
        of = []  # the write that each piece is a part of
        for dst, to, n, *_ in pieces:
            if writes and writes[-1][0] == dst and writes[-1][1] + writes[-1][2] == to:
                writes[-1][2] += n
            else:
                writes.append([dst, to, n, 0])
            of.append(writes[-1])
        at = 0
        for write in writes:
            if write[2] >= UNCACHED_FROM:  # as in the file, for a direct write
                at += (write[1] - at) % SECTOR
            write[3] = at
            at += write[2]
        places: list[tuple[int, int, int, int, bool]] = []  # source, offset, place in memory, bytes, read again
        targets: dict[tuple[int, int], int] = {}
        zeros = []
        for run, write in zip(pieces, of, strict=True):
            here = write[3] + run.to - write[1]
            if run.src >= 0:
                places.append((run.src, run.start, here, run.nbytes, run.again))
            elif run.src == moves.ZEROS:
                zeros.append((here, run.nbytes))
            else:
                targets[run.dst, run.to] = here
        sources: dict[tuple[int, int], int] = {}
        for src, start, n in sorted([_lane_read(lane, item) for item in small for lane in item.reads]):
            places.append((src, start, at, n, False))
            sources[src, start] = at
            at += n
        memory = self.arena.take(at)
        for start, n in zeros:
            memory[start : start + n] = 0
        places.sort()
        self._scatter(places, memory.data)
        for item in small:
            _rearrange(item, memory, targets, sources)
        for dst, to, n, at in writes:
            self.write(dst, to, memory[at : at + n].data)

    def _scatter(self, places: Sequence[tuple[int, int, int, int, bool]], view: memoryview) -> None:
        """Read runs, sorted by source; those that follow each other there in one call."""
        i = 0
        while i < len(places):
            src, start, at, n, again = places[i]
            buffers: list[memoryview] = []
            end, first, last = start + n, at, at + n
            i += 1
            while i < len(places) and len(buffers) < IOV_MAX - 1:
                s, a, at, n, more = places[i]
                if s != src or a != end:
                    break
                again = again or more
                if at == last:
                    last += n
                else:
                    buffers.append(view[first:last])
                    first, last = at, at + n
                end += n
                i += 1
            buffers.append(view[first:last])
            self.read(src, start, buffers, once=not again)

    def _rows(self, item: moves.RowBlock) -> None:
        plan = self._row_blocks(item)
        if item.turned:
            decoded = any(self._is_decoded(item.moves[i]) for i in item.turned)
            if decoded or moves.by_strips(item, self.arena.size - plan[1] if plan else 0) == moves.TILES:
                self.carry(list(moves.untangle(item)))
                return
        if plan is None:
            for i in range(item.start, item.stop):
                self.carry(moves.arrange_row(item, i))
            return
        rows, scratch = plan
        for a in range(item.start, item.stop, rows):
            self._row_block(item, a, min(a + rows, item.stop), scratch)

    def _row_blocks(self, item: moves.RowBlock) -> tuple[int, int] | None:
        """(rows in a block, bytes to read at once), or None when a row is too long for the memory."""
        size = self.arena.room(len(item.writes) + 2)
        longest = max([lane.width for lane in item.reads], default=0)
        if item.turned:
            # The more rows, the wider the strips that are read for them.
            scratch = max(longest, min(BLOCK, size // 4))
            room = size - scratch
        else:
            scratch = max(longest, min(SCRATCH, size // 4)) if item.reads else 0
            room = min(size - scratch, max(BLOCK, WRITE * len(item.writes)))
        rows = room // item.row_bytes if room > 0 else 0
        return (rows, scratch) if rows else None

    def _row_block(self, item: moves.RowBlock, start: int, stop: int, scratch_bytes: int) -> None:
        arena = self.arena
        arena.reset()
        n = stop - start
        targets: dict[int, Array] = {}
        held: list[Bytes] = []
        for lane in item.writes:
            memory = arena.take(n * lane.width, lane.offset + start * lane.stride)
            held.append(memory)
            for member in lane.members:
                move = item.moves[member.move]
                shape, strides = (n, *move.shape[1:]), (lane.width, *member.strides)
                view: Array = np.ndarray(shape, kinds(move)[1], memory.data, member.offset, strides)
                if move.src == moves.ZEROS:
                    view[...] = 0
                else:
                    targets[member.move] = view
        scratch = arena.take(scratch_bytes)
        for lane in item.reads:
            step = max(1, scratch_bytes // lane.width)
            for a in range(0, n, step):
                m = min(step, n - a)
                self._read_rows(item, lane, start + a, m, scratch)
                for member in lane.members:
                    move = item.moves[member.move]
                    shape, strides = (m, *move.shape[1:]), (lane.width, *member.strides)
                    source: Array = np.ndarray(shape, kinds(move)[0], scratch.data, member.offset, strides)
                    store(source, targets[member.move][a : a + m])
        for i in item.turned:
            move = item.moves[i]
            stops = (stop, *move.shape[1:])
            self._read_turned(move.cut((start, *[0] * len(move.shape[1:])), stops), targets[i], scratch)
        for lane, memory in zip(item.writes, held, strict=True):
            self._write_rows(item, lane, start, n, memory)

    def _read_rows(self, item: moves.RowBlock, lane: moves.FileRows, start: int, n: int, memory: Bytes) -> None:
        offset = lane.offset + start * lane.stride
        view = memory.data
        if lane.joined:
            self.read(lane.file, offset, (view[: lane.nbytes(n)],))
        elif lane.solid:
            for i in range(n):
                at = i * lane.width
                self.read(lane.file, offset + i * lane.stride, (view[at : at + lane.width],))
        else:
            move = item.moves[lane.members[0].move]

            def read(at: int, buffer: memoryview) -> None:
                self.read(lane.file, at, (buffer,))

            # No scratch: gaps in such a row are longer than what is worth reading along.
            shape, strides = (n, *move.shape[1:]), (lane.stride, *move.src_strides[1:])
            size = itemsize(move.src_dtype)
            read_strided(read, offset, strides, shape, size, memory[: n * lane.width], memory[:0])

    def _write_rows(self, item: moves.RowBlock, lane: moves.FileRows, start: int, n: int, memory: Bytes) -> None:
        offset = lane.offset + start * lane.stride
        view = memory.data
        if lane.joined:
            self.write(lane.file, offset, view)
        elif lane.solid:
            for i in range(n):
                at = i * lane.width
                self.write(lane.file, offset + i * lane.stride, view[at : at + lane.width], scattered=True)
        else:
            move = item.moves[lane.members[0].move]
            shape, strides = (n, *move.shape[1:]), (lane.stride, *move.dst_strides[1:])
            self._write_strided(lane.file, offset, strides, shape, itemsize(move.dst_dtype), view)

    def _write_strided(
        self, file: int, offset: int, strides: Sequence[int], shape: Sequence[int], size: int, view: memoryview
    ) -> None:
        """Write elements that are dense in memory to a strided block, run by run."""
        k, run = len(shape), size
        while k and (shape[k - 1] == 1 or strides[k - 1] == run):
            run *= shape[k - 1]
            k -= 1
        at, nbytes = 0, run * prod(shape[:k])
        for start in offsets(shape[:k], strides[:k]):
            self.write(file, offset + start, view[at : at + run], scattered=run < nbytes)
            at += run

    def _read_turned(self, move: moves.StridedCopy, target: Array, scratch: Bytes) -> None:
        def read(at: int, buffer: memoryview) -> None:
            # The next strip lies in the same pages, so they may stay in the page cache.
            self.read(move.src, at, (buffer,), once=False)

        read_turned(read, move, target, scratch, self._turn)

    def _is_decoded(self, move: moves.StridedCopy) -> bool:
        return move.src != moves.ZEROS and isinstance(self.sources[move.src], Encoding)

    def _tile(self, move: moves.StridedCopy) -> None:
        size = itemsize(move.dst_dtype)
        room = self.arena.room(2)
        decoded = self._is_decoded(move)
        scratch_bytes = max(itemsize(move.src_dtype), min(GAPS if decoded else BLOCK, room // 4))
        for part in moves.tiles(move, max(1, (room - scratch_bytes) // size), decoded=decoded):
            self.arena.reset()
            memory = self.arena.take(prod(part.shape) * size)
            if part.src == moves.ZEROS:
                memory[...] = 0
            else:
                target: Array = np.ndarray(part.shape, kinds(part)[1], memory.data)
                self._read_turned(part, target, self.arena.take(scratch_bytes))
            self._write_strided(part.dst, part.to, part.dst_strides, part.shape, size, memory.data)


def _room_for(item: moves.RowBlock | moves.TransposeTile, most: int) -> int | None:
    """Memory for doing an item in one block with others, None when it is better done by itself."""
    if (
        isinstance(item, moves.TransposeTile)
        or item.turned
        or not all(lane.joined for lane in (*item.writes, *item.reads))
    ):
        return None
    rows = item.stop - item.start
    need = item.row_bytes * rows + sum([lane.nbytes(rows) for lane in item.reads])
    return need if need <= most else None


def _lane_run(lane: moves.FileRows, item: moves.RowBlock) -> moves.ByteRun:
    return moves.ByteRun(
        lane.file, lane.offset + item.start * lane.stride, lane.nbytes(item.stop - item.start), _ROWS, 0
    )


def _lane_read(lane: moves.FileRows, item: moves.RowBlock) -> tuple[int, int, int]:
    return lane.file, lane.offset + item.start * lane.stride, lane.nbytes(item.stop - item.start)


def _rearrange(
    item: moves.RowBlock, memory: Bytes, targets: dict[tuple[int, int], int], sources: dict[tuple[int, int], int]
) -> None:
    """Move the rows from where they were read to where they are written, all in ``memory``."""
    rows = item.stop - item.start
    found: dict[int, Array] = {}
    for lane in item.reads:
        base = sources[_lane_read(lane, item)[:2]]
        for member in lane.members:
            move = item.moves[member.move]
            shape, strides = (rows, *move.shape[1:]), (lane.width, *member.strides)
            found[member.move] = np.ndarray(shape, kinds(move)[0], memory.data, base + member.offset, strides)
    for lane in item.writes:
        base = targets[lane.file, lane.offset + item.start * lane.stride]
        for member in lane.members:
            move = item.moves[member.move]
            shape, strides = (rows, *move.shape[1:]), (lane.width, *member.strides)
            target: Array = np.ndarray(shape, kinds(move)[1], memory.data, base + member.offset, strides)
            if move.src == moves.ZEROS:
                target[...] = 0
            else:
                store(found[member.move], target)
