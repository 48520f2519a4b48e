"""How the copies of a unit are carried out: which bytes are read together and written together. Pure, no I/O.

    Linear  a run of bytes that is dense on both sides; neighbours are read and written in one call
    Rows    copies that interleave in a file (slices of one matrix): the same number of rows in all of them, so a block
            of rows is read once per source, rearranged in memory and written once per destination. Copies that
            transpose may be among them: their sources are then read in strips
    Tile    one copy that transposes and whose rows are too long for that, cut into tiles with runs on both sides

``arrange`` sorts copies into these, ``divide`` cuts them into parts. Both see the plan only, never the memory or the
number of workers, so parts can be journalled and the bytes do not depend on either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import NamedTuple

from ckpttool.dtypes import CASTABLE, itemsize, lookup, nbytes
from ckpttool.errors import UnsupportedError
from ckpttool.plan import Copy, Fill, merged_axes

ZEROS = -1
"""Source number of a Fill."""

BRIDGE = 32 << 10
"""A gap of unneeded bytes up to this long is read along: one call costs as much as moving it."""

NOMINAL = 24 << 20
"""Memory for which ``arrange`` chooses between rows and tiles; the bytes do not depend on it."""

TURNED_PART = 16 << 20
"""Smallest part of rows that transpose: shorter ones would read their sources in slivers."""


class Linear(NamedTuple):
    """``nbytes`` from ``start`` of file ``src`` to ``to`` of file ``dst``."""

    dst: int
    to: int
    nbytes: int
    src: int
    start: int


class Move(NamedTuple):
    """A Copy or Fill in normal form: axes by falling destination stride, without axes of one element."""

    shape: tuple[int, ...]
    dst: int
    to: int
    dst_strides: tuple[int, ...]
    src: int
    start: int
    src_strides: tuple[int, ...]
    dst_dtype: str
    src_dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return prod(self.shape) * itemsize(self.dst_dtype)

    def cut(self, start: Sequence[int], stop: Sequence[int]) -> Move:
        """The part inside a box of the shape; the axes stay as they are."""
        return self._replace(
            shape=tuple([b - a for a, b in zip(start, stop, strict=True)]),
            to=self.to + sum([a * s for a, s in zip(start, self.dst_strides, strict=True)]),
            start=self.start + sum([a * s for a, s in zip(start, self.src_strides, strict=True)]),
        )

    def row(self, i: int) -> Move:
        """One index of the first axis, without that axis."""
        return self._replace(
            shape=self.shape[1:],
            to=self.to + i * self.dst_strides[0],
            dst_strides=self.dst_strides[1:],
            start=self.start + i * self.src_strides[0],
            src_strides=self.src_strides[1:],
        )


class Member(NamedTuple):
    """A move's place in the row of a lane."""

    move: int
    offset: int
    strides: tuple[int, ...]
    """Of the move's axes after the first."""


class Lane(NamedTuple):
    """What the rows of one file have in common: row ``i`` is ``width`` bytes at ``offset + i * stride``."""

    file: int
    offset: int
    stride: int
    width: int
    tail: int
    """Bytes of the last row that are needed; less than ``width`` where the gap behind a row is read along."""
    members: tuple[Member, ...]
    solid: bool
    """Every byte of the row belongs to a member (to be written) or may be read along. Otherwise there is one member,
    whose elements stand close together in memory and apart in the file."""

    @property
    def joined(self) -> bool:
        """Consecutive rows touch in the file (when read: nearly), so a block of rows is one call."""
        return self.solid and self.width == self.stride

    def nbytes(self, rows: int) -> int:
        """Bytes that ``rows`` rows take in memory and, when joined, in the file."""
        return (rows - 1) * self.width + self.tail


class Rows(NamedTuple):
    """Rows ``[start, stop)`` of copies that are carried out together."""

    start: int
    stop: int
    moves: tuple[Move, ...]
    reads: tuple[Lane, ...]
    writes: tuple[Lane, ...]
    turned: tuple[int, ...] = ()
    """Moves whose source has its axes in another order; they are in no lane of ``reads``."""

    @property
    def row_bytes(self) -> int:
        """Bytes written per row."""
        return sum([lane.width for lane in self.writes])


class Batch(NamedTuple):
    """Linear runs, in the order of their destinations."""

    runs: tuple[Linear, ...]


class Tile(NamedTuple):
    """A copy that changes the order of axes."""

    move: Move


Item = Batch | Rows | Tile


def item_bytes(item: Item) -> int:
    """Bytes that an item writes."""
    if isinstance(item, Batch):
        return sum([r.nbytes for r in item.runs])
    if isinstance(item, Rows):
        return item.row_bytes * (item.stop - item.start)
    return item.move.nbytes


def item_files(item: Item) -> Iterator[tuple[int, int]]:
    """(destination file, bytes written to it); a file may come more than once."""
    if isinstance(item, Batch):
        yield from ((r.dst, r.nbytes) for r in item.runs)
    elif isinstance(item, Rows):
        yield from ((lane.file, lane.width * (item.stop - item.start)) for lane in item.writes)
    else:
        yield item.move.dst, item.move.nbytes


# -- normal form


def normal(step: Copy | Fill) -> Linear | Move | None:
    """The step as a run of bytes if it is one, else in normal form; None when it moves nothing."""
    shape = step.shape
    if isinstance(step, Fill):
        src, dst, src_dtype, dst_dtype = step.dst._replace(file=ZEROS), step.dst, step.dtype, step.dtype
    else:
        src, dst, src_dtype, dst_dtype = step.src, step.dst, step.src_dtype, step.dst_dtype
    if 0 in shape:
        return None
    if src_dtype == dst_dtype:
        if lookup(dst_dtype).bits % 8:
            if len(shape) > 1:
                raise UnsupportedError(f"a slice of packed {dst_dtype} elements cannot be moved")
            return Linear(dst.file, dst.offset, nbytes(dst_dtype, prod(shape)), src.file, src.offset)
        size = itemsize(dst_dtype)
        if not shape or (len(shape) == 1 and (shape[0] == 1 or src.strides[0] == dst.strides[0] == size)):
            return Linear(dst.file, dst.offset, prod(shape) * size, src.file, src.offset)
    elif src_dtype not in CASTABLE or dst_dtype not in CASTABLE:
        raise UnsupportedError(f"{src_dtype} cannot be cast to {dst_dtype}")
    if any(a < b for a, b in zip(dst.strides, dst.strides[1:], strict=False)):
        order = sorted(range(len(shape)), key=lambda i: -dst.strides[i])
        shape = tuple([shape[i] for i in order])
        dst = dst._replace(strides=tuple([dst.strides[i] for i in order]))
        src = src._replace(strides=tuple([src.strides[i] for i in order]))
    shape, (src_strides, dst_strides) = merged_axes(shape, src.strides, dst.strides)
    move = Move(shape, dst.file, dst.offset, dst_strides, src.file, src.offset, src_strides, dst_dtype, src_dtype)
    return _as_linear(move)


def _as_linear(move: Move) -> Linear | Move:
    if move.src_dtype != move.dst_dtype or len(move.shape) > 1:
        return move
    size = itemsize(move.dst_dtype)
    if not move.shape:
        return Linear(move.dst, move.to, size, move.src, move.start)
    if move.dst_strides[0] == size and move.src_strides[0] == size:
        return Linear(move.dst, move.to, size * move.shape[0], move.src, move.start)
    return move


# -- grouping


def arrange(steps: Sequence[Copy | Fill]) -> list[Item]:
    """What moves the bytes of these steps, in the order of the destinations."""
    found = [normal(s) for s in steps]
    return _arrange([m for m in found if m is not None])


def arrange_row(rows: Rows, i: int) -> list[Item]:
    """The same for one row of a group, whose rows are too long to be handled whole."""
    return _arrange([_as_linear(m.row(i)) for m in rows.moves])


def _arrange(found: Sequence[Linear | Move]) -> list[Item]:
    linear: list[Linear] = []
    moves: list[Move] = []
    placed: list[tuple[int, int, Item]] = []
    for m in found:
        if isinstance(m, Linear):
            linear.append(m)
        elif not m.shape:  # a single element to cast
            sizes = (itemsize(m.dst_dtype),), (itemsize(m.src_dtype),)
            moves.append(m._replace(shape=(1,), dst_strides=sizes[0], src_strides=sizes[1]))
        elif _nested(m.shape, m.dst_strides, itemsize(m.dst_dtype)):
            moves.append(m)
        else:
            placed.append((m.dst, m.to, Tile(m)))
    if not placed and not moves:
        linear.sort()
        return [Batch(tuple(linear))] if linear else []
    for item in _grouped(moves):
        if isinstance(item, Rows):
            placed.append((*min((lane.file, lane.offset) for lane in item.writes), item))
        else:
            placed.append((item.move.dst, item.move.to, item))
    placed += [(run.dst, run.to, Batch((run,))) for run in linear]
    placed.sort(key=lambda p: p[:2])
    out: list[Item] = []
    runs: list[Linear] = []
    for _, _, item in placed:
        if isinstance(item, Batch):
            runs += item.runs
            continue
        if runs:
            out.append(Batch(tuple(runs)))
            runs = []
        out.append(item)
    if runs:
        out.append(Batch(tuple(runs)))
    return out


def _extent(shape: Sequence[int], strides: Sequence[int], size: int) -> int:
    """Bytes from the first to behind the last element."""
    return sum([(n - 1) * s for n, s in zip(shape, strides, strict=True)]) + size


def _nested(shape: Sequence[int], strides: Sequence[int], size: int) -> bool:
    """Every axis steps over all that the axes behind it reach."""
    extent = size
    for n, s in zip(reversed(shape), reversed(strides), strict=True):
        if s < extent:
            return False
        extent += (n - 1) * s
    return True


def _is_turned(move: Move) -> bool:
    return not _nested(move.shape, move.src_strides, itemsize(move.src_dtype))


def _grouped(moves: Sequence[Move]) -> Iterator[Rows | Tile]:
    for group in _components(moves):
        for rows in _rows(group):
            if rows.turned and by_strips(rows, NOMINAL) == TILES:
                yield from untangle(rows)
            else:
                yield rows


def untangle(rows: Rows) -> Iterator[Rows | Tile]:
    """The same work with a Tile for each move that transposes."""
    cut = []
    for m in rows.moves:
        stop = (rows.stop, *m.shape[1:])
        cut.append(m.cut((rows.start, *[0] * len(m.shape[1:])), stop))
    for i in rows.turned:
        yield Tile(cut[i])
    yield from _grouped([m for i, m in enumerate(cut) if i not in rows.turned])


STRIPS, DESCEND, TILES = "strips", "descend", "tiles"


def by_strips(rows: Rows, room: int) -> str:
    """How rows that transpose are done best in ``room`` bytes of memory.

    Whole rows are written in long runs, but the fewer of them fit, the thinner the strips that are read for them;
    tiles have runs of middling length on both sides. Rows that are themselves transposed and do not fit are done one
    by one.
    """
    n = min(rows.stop - rows.start, room // rows.row_bytes)
    if not n:
        return DESCEND if any(_is_turned(rows.moves[i].row(0)) for i in rows.turned) else TILES
    count = rows.stop - rows.start
    strips = sum([count * _WRITE_CALL for lane in rows.writes if not lane.joined])
    tiled = 0.0
    for i in rows.turned:
        move = rows.moves[i]
        sides = _sides(move)
        height = (n, *move.shape[1:])
        strips += move.nbytes * _read_cost(sides[0], height)
        tile = tile_shape(move, room // 2 // itemsize(move.dst_dtype))
        tiled += move.nbytes * (_read_cost(sides[0], tile) + _WRITE_CALL / sides[1].run(tile))
    return STRIPS if strips <= tiled else TILES


_READ_CALL = 4000.0
_WRITE_CALL = 8000.0
_READ_BYTE = 0.12
"""Nanoseconds, measured: a small read, a small write that shares its pages with others, a byte of a long read."""


def _read_cost(side: _Side, tile: Sequence[int]) -> float:
    """Nanoseconds per byte that is needed."""
    run, stride = side.run(tile), side.next_stride(tile)
    calls = _READ_CALL / run
    if run <= stride <= run + BRIDGE:
        return min(calls, _READ_BYTE * stride / run)
    return calls if stride else _READ_BYTE


def _components(moves: Sequence[Move]) -> list[list[Move]]:
    """Moves that interleave in a file, directly or through others, belong together."""
    if len(moves) < 2:
        return [[m] for m in moves]
    parent = list(range(len(moves)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for group in (*_overlapping(moves, source=False), *_overlapping(moves, source=True)):
        first = root(group[0])
        for i in group[1:]:
            parent[root(i)] = first
    out: dict[int, list[Move]] = {}
    for i, m in enumerate(moves):
        out.setdefault(root(i), []).append(m)
    return list(out.values())


def _overlapping(moves: Sequence[Move], *, source: bool) -> list[list[int]]:
    """Indices of moves whose spans in one file overlap, in the order of the spans.

    Transposed sources count as overlapping nothing: they are read in strips, which no other move can share.
    """
    spans = []
    for i, m in enumerate(moves):
        if not source:
            spans.append((m.dst, m.to, m.to + _extent(m.shape, m.dst_strides, itemsize(m.dst_dtype)), i))
        elif m.src != ZEROS and not _is_turned(m):
            spans.append((m.src, m.start, m.start + _extent(m.shape, m.src_strides, itemsize(m.src_dtype)), i))
    spans.sort()
    out: list[list[int]] = []
    file, end = -1, 0
    for f, a, b, i in spans:
        if f == file and a < end:
            out[-1].append(i)
            end = max(end, b)
        else:
            out.append([i])
            file, end = f, b
    return out


def _rows(group: list[Move]) -> Iterator[Rows]:
    """One group of rows, or one per move when the moves have no number of rows in common."""
    n = gcd(*[m.shape[0] for m in group])
    if n == 1 and len(group) > 1 and any(m.shape[0] > 1 for m in group):
        for m in group:
            yield from _rows([m])
        return
    moves = tuple([m if m.shape[0] == n else _unmerge(m, n) for m in group])
    reads: list[Lane] = []
    writes: list[Lane] = []
    for cluster in _overlapping(moves, source=False):
        writes += _write_lanes(moves, cluster)
    for cluster in _overlapping(moves, source=True):
        reads += _read_lanes(moves, cluster)
    turned = tuple([i for i, m in enumerate(moves) if m.src != ZEROS and _is_turned(m)])
    yield Rows(0, n, moves, tuple(reads), tuple(writes), turned)


def _unmerge(m: Move, n: int) -> Move:
    inner = m.shape[0] // n
    return m._replace(
        shape=(n, inner, *m.shape[1:]),
        dst_strides=(inner * m.dst_strides[0], *m.dst_strides),
        src_strides=(inner * m.src_strides[0], *m.src_strides),
    )


def _write_lanes(moves: Sequence[Move], cluster: Sequence[int]) -> list[Lane]:
    """Joined spans of the row that are written whole; a span with holes is written move by move."""
    stride = moves[cluster[0]].dst_strides[0]
    spans: list[tuple[int, int, int, list[int]]] = []  # start, end, bytes of the moves, moves
    for i in cluster:
        m = moves[i]
        size = itemsize(m.dst_dtype)
        end = m.to + _extent(m.shape[1:], m.dst_strides[1:], size)
        held = prod(m.shape[1:]) * size
        if spans and m.to <= spans[-1][1]:
            start, last, total, inside = spans[-1]
            spans[-1] = (start, max(last, end), total + held, [*inside, i])
        else:
            spans.append((m.to, end, held, [i]))
    aligned = all(moves[i].dst_strides[0] == stride for i in cluster) and spans[-1][1] - spans[0][0] <= stride
    if not aligned:
        return [_loose_write(moves, i) for i in cluster]
    lanes: list[Lane] = []
    for start, end, total, inside in spans:
        if total == end - start:
            members = tuple([Member(i, moves[i].to - start, moves[i].dst_strides[1:]) for i in inside])
            lanes.append(Lane(moves[inside[0]].dst, start, stride, end - start, end - start, members, solid=True))
        else:
            lanes += [_loose_write(moves, i) for i in inside]
    return lanes


def dense(shape: Sequence[int], size: int) -> tuple[int, ...]:
    """Byte strides of a row-major block."""
    strides = [size] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)


def _loose_write(moves: Sequence[Move], i: int) -> Lane:
    m = moves[i]
    size = itemsize(m.dst_dtype)
    close = dense(m.shape[1:], size)
    solid = close == m.dst_strides[1:]
    width = prod(m.shape[1:]) * size
    return Lane(m.dst, m.to, m.dst_strides[0], width, width, (Member(i, 0, close),), solid)


def _read_lanes(moves: Sequence[Move], cluster: Sequence[int]) -> list[Lane]:
    """Spans of the row that are read together, unneeded bytes in between included when they are few."""
    stride = moves[cluster[0]].src_strides[0]
    spans: list[tuple[int, int, int, list[int]]] = []
    for i in cluster:
        m = moves[i]
        size = itemsize(m.src_dtype)
        end = m.start + _extent(m.shape[1:], m.src_strides[1:], size)
        held = prod(m.shape[1:]) * size
        if spans and m.start <= spans[-1][1] + BRIDGE:
            start, last, total, inside = spans[-1]
            spans[-1] = (start, max(last, end), total + held, [*inside, i])
        else:
            spans.append((m.start, end, held, [i]))
    aligned = all(moves[i].src_strides[0] == stride for i in cluster) and spans[-1][1] - spans[0][0] <= stride
    if not aligned:
        return [_loose_read(moves, i) for i in cluster]
    lanes: list[Lane] = []
    for start, end, total, inside in spans:
        width = tail = end - start
        if width > total + max(BRIDGE, 3 * total):
            lanes += [_loose_read(moves, i) for i in inside]
            continue
        if len(spans) == 1 and stride - width <= BRIDGE:
            width = stride
        members = tuple([Member(i, moves[i].start - start, moves[i].src_strides[1:]) for i in inside])
        lanes.append(Lane(moves[inside[0]].src, start, stride, width, tail, members, solid=True))
    return lanes


def _loose_read(moves: Sequence[Move], i: int) -> Lane:
    m = moves[i]
    size = itemsize(m.src_dtype)
    close = dense(m.shape[1:], size)
    solid = close == m.src_strides[1:]
    width = prod(m.shape[1:]) * size
    return Lane(m.src, m.start, m.src_strides[0], width, width, (Member(i, 0, close),), solid)


# -- parts


@dataclass(slots=True)
class _Parts:
    """Collects items into parts of at most ``limit`` bytes, where an item can be cut."""

    limit: int
    done: list[list[Item]]
    current: list[Item]
    size: int = 0

    def add(self, item: Item, size: int) -> None:
        if self.size and self.size + size > self.limit:
            self.close()
        last = self.current[-1] if self.current else None
        if isinstance(item, Batch) and isinstance(last, Batch):
            self.current[-1] = Batch(last.runs + item.runs)
        else:
            self.current.append(item)
        self.size += size

    def close(self) -> None:
        if self.current:
            self.done.append(self.current)
        self.current, self.size = [], 0


def divide(items: Sequence[Item], limit: int) -> list[list[Item]]:
    """Cut items into parts of about ``limit`` bytes, in order."""
    parts = _Parts(limit, [], [])
    _divide(items, parts)
    parts.close()
    return parts.done


def _divide(items: Sequence[Item], parts: _Parts) -> None:
    for item in items:
        size = item_bytes(item)
        if size <= parts.limit:
            parts.add(item, size)
        elif isinstance(item, Batch):
            for run in item.runs:
                for piece in _pieces(run, parts.limit):
                    parts.add(Batch((piece,)), piece.nbytes)
        elif isinstance(item, Rows):
            limit = max(parts.limit, TURNED_PART) if item.turned else parts.limit
            each = limit // item.row_bytes
            if not each:
                for i in range(item.start, item.stop):
                    _divide(arrange_row(item, i), parts)
                continue
            for a in range(item.start, item.stop, each):
                part = item._replace(start=a, stop=min(a + each, item.stop))
                parts.add(part, item_bytes(part))
        else:
            limit = max(parts.limit, TURNED_PART) // itemsize(item.move.dst_dtype)
            for move in tiles(item.move, limit):
                parts.add(Tile(move), move.nbytes)


def _pieces(run: Linear, limit: int) -> Iterator[Linear]:
    """Cut at multiples of ``limit`` of the destination file, so that two parts share no page."""
    at, end = run.to, run.to + run.nbytes
    while at < end:
        stop = min(end, (at // limit + 1) * limit)
        yield Linear(run.dst, at, stop - at, run.src, run.start if run.src == ZEROS else run.start + at - run.to)
        at = stop


def tiles(move: Move, elements: int) -> Iterator[Move]:
    """Cut a copy into boxes of at most ``elements`` elements, in the order of the destination."""
    for start, stop in boxes(move.shape, tile_shape(move, elements)):
        yield move.cut(start, stop)


def boxes(shape: Sequence[int], tile: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(start, stop) of the boxes of a grid, the last axis fastest."""
    if not shape:
        yield (), ()
        return
    for a in range(0, shape[0], tile[0]):
        b = min(a + tile[0], shape[0])
        for start, stop in boxes(shape[1:], tile[1:]):
            yield (a, *start), (b, *stop)


def tile_shape(move: Move, elements: int) -> tuple[int, ...]:
    """Edges of a box of at most ``elements`` elements with runs as long as possible on both sides."""
    sides = _sides(move)
    tile = [1] * len(move.shape)
    while True:
        volume = prod(tile)
        for side in sorted(sides, key=lambda side: side.run(tile)):  # the shorter run grows first
            axis = next((i for i in side.order if tile[i] < move.shape[i]), None)
            if axis is None:
                return tuple(tile)
            grown = min(move.shape[axis], 2 * tile[axis], elements // (volume // tile[axis]))
            if grown > tile[axis]:
                tile[axis] = grown
                break
        else:
            return tuple(tile)


def _sides(move: Move) -> tuple[_Side, _Side]:
    return (
        _Side.of(move.shape, move.src_strides, itemsize(move.src_dtype)),
        _Side.of(move.shape, move.dst_strides, itemsize(move.dst_dtype)),
    )


class _Side(NamedTuple):
    """One side of a copy: its axes from the fastest to the slowest in the file."""

    order: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> _Side:
        return cls(tuple(sorted(range(len(shape)), key=lambda i: (strides[i], -i))), shape, strides, size)

    def run(self, tile: Sequence[int]) -> int:
        """Bytes of the tile that follow each other in the file."""
        run = self.size
        for i in self.order:
            if self.strides[i] != run:
                break
            run *= tile[i]
            if tile[i] < self.shape[i]:
                break
        return run

    def next_stride(self, tile: Sequence[int]) -> int:
        """Bytes from one such run to the next, 0 when there is only one."""
        run = self.size
        joined = True
        for i in self.order:
            if joined and self.strides[i] == run:
                run *= tile[i]
                joined = tile[i] == self.shape[i]
            elif tile[i] > 1:
                return self.strides[i]
            else:
                joined = False
        return 0
