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

from ckpttool.core.dtypes import CASTABLE, itemsize, lookup, nbytes
from ckpttool.core.plan import Copy, Fill, joined, merged_axes
from ckpttool.errors import UnsupportedError

ZEROS = -1
"""Source number of a Fill."""

BRIDGE = 32 << 10
"""A gap of unneeded bytes up to this long is read along: one call costs as much as moving it."""

NOMINAL = 24 << 20
"""Memory for which ``arrange`` chooses between rows and tiles; the bytes do not depend on it."""

TURNED_PART = 16 << 20
"""Smallest part of rows that transpose: shorter ones would read their sources in slivers."""


class ByteRun(NamedTuple):
    """``nbytes`` from ``start`` of file ``src`` to ``to`` of file ``dst``."""

    dst: int
    to: int
    nbytes: int
    src: int
    start: int
    again: bool = False
    """Another run reads some of these bytes, too."""

    def split(self, at: int) -> tuple[ByteRun, ByteRun]:
        """The first ``at`` bytes, and the rest."""
        start = self.start if self.src == ZEROS else self.start + at
        return self._replace(nbytes=at), self._replace(to=self.to + at, nbytes=self.nbytes - at, start=start)


class StridedCopy(NamedTuple):
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

    def cut(self, start: Sequence[int], stop: Sequence[int]) -> StridedCopy:
        """The part inside a box of the shape; the axes stay as they are."""
        return self._replace(
            shape=tuple([b - a for a, b in zip(start, stop, strict=True)]),
            to=self.to + sum([a * s for a, s in zip(start, self.dst_strides, strict=True)]),
            start=self.start + sum([a * s for a, s in zip(start, self.src_strides, strict=True)]),
        )

    def row(self, i: int) -> StridedCopy:
        """One index of the first axis, without that axis."""
        return self._replace(
            shape=self.shape[1:],
            to=self.to + i * self.dst_strides[0],
            dst_strides=self.dst_strides[1:],
            start=self.start + i * self.src_strides[0],
            src_strides=self.src_strides[1:],
        )


class LaneMember(NamedTuple):
    """A move's place in the row of a lane."""

    move: int
    offset: int
    strides: tuple[int, ...]
    """Strides in bytes of the move's axes after the first."""


class FileRows(NamedTuple):
    """What the rows of one file have in common: row ``i`` is ``width`` bytes at ``offset + i * stride``."""

    file: int
    offset: int
    stride: int
    width: int
    tail: int
    """Bytes of the last row that are needed; less than ``width`` where the gap behind a row is read along."""
    members: tuple[LaneMember, ...]
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


class RowBlock(NamedTuple):
    """Rows ``[start, stop)`` of copies that are carried out together."""

    start: int
    stop: int
    moves: tuple[StridedCopy, ...]
    reads: tuple[FileRows, ...]
    writes: tuple[FileRows, ...]
    turned: tuple[int, ...] = ()
    """Moves whose source has its axes in another order; they are in no lane of ``reads``."""

    @property
    def row_bytes(self) -> int:
        """Bytes written per row."""
        return sum([lane.width for lane in self.writes])


class Batch(NamedTuple):
    """Linear runs, in the order of their destinations."""

    runs: tuple[ByteRun, ...]


class TransposeTile(NamedTuple):
    """A copy that changes the order of axes."""

    move: StridedCopy


Item = Batch | RowBlock | TransposeTile


def item_bytes(item: Item) -> int:
    """Bytes that an item writes."""
    if isinstance(item, Batch):
        return sum([r.nbytes for r in item.runs])
    if isinstance(item, RowBlock):
        return item.row_bytes * (item.stop - item.start)
    return item.move.nbytes


def item_files(item: Item) -> Iterator[tuple[int, int]]:
    """(destination file, bytes written to it); a file may come more than once."""
    if isinstance(item, Batch):
        yield from ((r.dst, r.nbytes) for r in item.runs)
    elif isinstance(item, RowBlock):
        yield from ((lane.file, lane.width * (item.stop - item.start)) for lane in item.writes)
    else:
        yield item.move.dst, item.move.nbytes


# -- normal form


def normal(step: Copy | Fill) -> ByteRun | StridedCopy | None:
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
            return ByteRun(dst.file, dst.offset, nbytes(dst_dtype, prod(shape)), src.file, src.offset)
        size = itemsize(dst_dtype)
        if not shape or (len(shape) == 1 and (shape[0] == 1 or src.strides[0] == dst.strides[0] == size)):
            return ByteRun(dst.file, dst.offset, prod(shape) * size, src.file, src.offset)
    elif src_dtype not in CASTABLE or dst_dtype not in CASTABLE:
        raise UnsupportedError(f"{src_dtype} cannot be cast to {dst_dtype}")
    if any(a < b for a, b in zip(dst.strides, dst.strides[1:], strict=False)):
        order = sorted(range(len(shape)), key=lambda i: -dst.strides[i])
        shape = tuple([shape[i] for i in order])
        dst = dst._replace(strides=tuple([dst.strides[i] for i in order]))
        src = src._replace(strides=tuple([src.strides[i] for i in order]))
    shape, (src_strides, dst_strides) = merged_axes(shape, src.strides, dst.strides)
    move = StridedCopy(
        shape, dst.file, dst.offset, dst_strides, src.file, src.offset, src_strides, dst_dtype, src_dtype
    )
    return _as_linear(move)


def _as_linear(move: StridedCopy) -> ByteRun | StridedCopy:
    if move.src_dtype != move.dst_dtype or len(move.shape) > 1:
        return move
    size = itemsize(move.dst_dtype)
    if not move.shape:
        return ByteRun(move.dst, move.to, size, move.src, move.start)
    if move.dst_strides[0] == size and move.src_strides[0] == size:
        return ByteRun(move.dst, move.to, size * move.shape[0], move.src, move.start)
    return move


# -- grouping


def arrange(steps: Sequence[Copy | Fill]) -> list[Item]:
    """The items that move the bytes of these steps, in the order of the destinations."""
    found = [normal(s) for s in steps]
    return _arrange([m for m in found if m is not None])


def arrange_row(rows: RowBlock, i: int) -> list[Item]:
    """The same for one row of a group, whose rows are too long to be handled whole."""
    return _arrange([_as_linear(m.row(i)) for m in rows.moves])


def _arrange(found: Sequence[ByteRun | StridedCopy]) -> list[Item]:
    linear: list[ByteRun] = []
    moves: list[_PlacedCopy] = []
    items: list[Item] = []
    for m in found:
        if isinstance(m, ByteRun):
            linear.append(m)
            continue
        if m.shape:
            placed = _PlacedCopy.of(m)
        else:  # a single element to cast
            sizes = (itemsize(m.dst_dtype),), (itemsize(m.src_dtype),)
            placed = _PlacedCopy.of(m._replace(shape=(1,), dst_strides=sizes[0], src_strides=sizes[1]))
        if placed.dst.nested:
            moves.append(placed)
        else:
            items.append(TransposeTile(m))
    linear = _marked(linear)
    items += _grouped(moves)
    if not items:
        linear.sort()
        return [Batch(tuple(linear))] if linear else []
    items += [Batch((run,)) for run in linear]
    items.sort(key=_place)
    return list(_joined(items))


def _marked(runs: list[ByteRun]) -> list[ByteRun]:
    """The same, sorted by source, with a mark on those that share bytes (a tensor that goes to several ranks)."""
    runs.sort(key=lambda r: (r.src, r.start))
    shared = set()
    last = 0
    for i in range(1, len(runs)):
        a, b = runs[last], runs[i]
        if a.src == b.src != ZEROS and b.start < a.start + a.nbytes:
            shared |= {last, i}
        if a.src != b.src or b.start + b.nbytes > a.start + a.nbytes:
            last = i
    return [r._replace(again=True) if i in shared else r for i, r in enumerate(runs)] if shared else runs


def _place(item: Item) -> tuple[int, int]:
    """The first destination: (file, offset)."""
    if isinstance(item, Batch):
        return item.runs[0].dst, item.runs[0].to
    if isinstance(item, RowBlock):
        return min((lane.file, lane.offset) for lane in item.writes)
    return item.move.dst, item.move.to


def _joined(items: Sequence[Item]) -> Iterator[Item]:
    """The same, with batches that follow each other as one."""
    runs: list[ByteRun] = []
    for item in items:
        if isinstance(item, Batch):
            runs += item.runs
            continue
        if runs:
            yield Batch(tuple(runs))
            runs = []
        yield item
    if runs:
        yield Batch(tuple(runs))


class _FileSpan(NamedTuple):
    """The stretch of one side of a move in its file."""

    file: int
    start: int
    stop: int
    row: int
    """End of the first row."""
    held: int
    """Bytes of a row that belong to the move."""
    stride: int
    """Bytes from one row to the next."""
    nested: bool
    """Every axis steps over all that the axes behind it reach: the file holds the axes in the order of the move."""


def _span(file: int, start: int, shape: Sequence[int], strides: Sequence[int], size: int) -> _FileSpan:
    reach, nested = size, True
    for i in range(len(shape) - 1, 0, -1):
        if strides[i] < reach:
            nested = False
        reach += (shape[i] - 1) * strides[i]
    stop = start + reach + (shape[0] - 1) * strides[0]
    held = prod(shape[1:]) * size
    return _FileSpan(file, start, stop, start + reach, held, strides[0], nested and strides[0] >= reach)


class _PlacedCopy(NamedTuple):
    """A move, and where its sides lie."""

    move: StridedCopy
    dst: _FileSpan
    src: _FileSpan

    @classmethod
    def of(cls, m: StridedCopy) -> _PlacedCopy:
        return cls(
            m,
            _span(m.dst, m.to, m.shape, m.dst_strides, itemsize(m.dst_dtype)),
            _span(m.src, m.start, m.shape, m.src_strides, itemsize(m.src_dtype)),
        )


def _is_turned(move: StridedCopy) -> bool:
    return bool(move.shape) and not _PlacedCopy.of(move).src.nested


def _grouped(moves: Sequence[_PlacedCopy]) -> Iterator[RowBlock | TransposeTile]:
    for group in _components(moves):
        for rows in _rows(group):
            if rows.turned and by_strips(rows, NOMINAL) == TILES:
                yield from untangle(rows)
            else:
                yield rows


def untangle(rows: RowBlock) -> Iterator[RowBlock | TransposeTile]:
    """The same work with a Tile for each move that transposes."""
    cut = [m.cut((rows.start, *[0] * len(m.shape[1:])), (rows.stop, *m.shape[1:])) for m in rows.moves]
    for i in rows.turned:
        yield TransposeTile(cut[i])
    yield from _grouped([_PlacedCopy.of(m) for i, m in enumerate(cut) if i not in rows.turned])


STRIPS, DESCEND, TILES = "strips", "descend", "tiles"


def by_strips(rows: RowBlock, room: int) -> str:
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


def _read_cost(side: _AxisOrder, tile: Sequence[int]) -> float:
    """Nanoseconds per byte that is needed."""
    run, stride = side.run(tile), side.next_stride(tile)
    calls = _READ_CALL / run
    if run <= stride <= run + BRIDGE:
        return min(calls, _READ_BYTE * stride / run)
    return calls if stride else _READ_BYTE


def _components(moves: Sequence[_PlacedCopy]) -> list[list[_PlacedCopy]]:
    """Moves that interleave in a file, directly or through others, belong together."""
    if len(moves) < 2:
        return [[m] for m in moves]
    groups = (*_overlapping(_targets(moves)), *_overlapping(_sources(moves)))
    return joined(moves, ((group[0], i) for group in groups for i in group[1:]))


def _targets(moves: Sequence[_PlacedCopy]) -> list[tuple[int, int, int, int]]:
    return [(m.dst.file, m.dst.start, m.dst.stop, i) for i, m in enumerate(moves)]


def _sources(moves: Sequence[_PlacedCopy]) -> list[tuple[int, int, int, int]]:
    """Without transposed sources: they are read in strips, which no other move can share."""
    return [
        (m.src.file, m.src.start, m.src.stop, i) for i, m in enumerate(moves) if m.src.nested and m.src.file != ZEROS
    ]


def _overlapping(spans: list[tuple[int, int, int, int]]) -> list[list[int]]:
    """(file, start, stop, index) -> lists of indices whose spans overlap, in the order of the spans."""
    spans.sort()
    out: list[list[int]] = []
    file, end = ZEROS, 0
    for f, a, b, i in spans:
        if f == file and a < end:
            out[-1].append(i)
            end = max(end, b)
        else:
            out.append([i])
            file, end = f, b
    return out


def _rows(group: Sequence[_PlacedCopy]) -> Iterator[RowBlock]:
    """One group of rows, or one per move when the moves have no number of rows in common."""
    n = gcd(*[m.move.shape[0] for m in group])
    if n == 1 and len(group) > 1 and any(m.move.shape[0] > 1 for m in group):
        for m in group:
            yield from _rows([m])
        return
    group = [m if m.move.shape[0] == n else _unmerge(m.move, n) for m in group]
    writes = [lane for cluster in _overlapping(_targets(group)) for lane in _write_lanes(group, cluster)]
    reads = [lane for cluster in _overlapping(_sources(group)) for lane in _read_lanes(group, cluster)]
    turned = tuple([i for i, m in enumerate(group) if not m.src.nested and m.src.file != ZEROS])
    yield RowBlock(0, n, tuple([m.move for m in group]), tuple(reads), tuple(writes), turned)


def _unmerge(m: StridedCopy, n: int) -> _PlacedCopy:
    inner = m.shape[0] // n
    dst, src = ((inner * strides[0], *strides) for strides in (m.dst_strides, m.src_strides))
    return _PlacedCopy.of(m._replace(shape=(n, inner, *m.shape[1:]), dst_strides=dst, src_strides=src))


class _RowSpan(NamedTuple):
    """Members of a cluster whose bytes in a row touch or nearly touch."""

    start: int
    stop: int
    held: int
    members: list[int]


def _row_spans(spans: Sequence[_FileSpan], cluster: Sequence[int], gap: int) -> list[_RowSpan] | None:
    """The row of a cluster, joined over gaps of up to ``gap`` bytes; None when its members have no row in common."""
    stride = spans[cluster[0]].stride
    out: list[_RowSpan] = []
    for i in cluster:
        s = spans[i]
        if s.stride != stride:
            return None
        if out and s.start <= out[-1].stop + gap:
            last = out[-1]
            out[-1] = _RowSpan(last.start, max(last.stop, s.row), last.held + s.held, [*last.members, i])
        else:
            out.append(_RowSpan(s.start, s.row, s.held, [i]))
    return out if out[-1].stop - out[0].start <= stride else None


def _write_lanes(group: Sequence[_PlacedCopy], cluster: Sequence[int]) -> Iterator[FileRows]:
    """Joined spans of the row that are written whole; a span with holes is written move by move."""
    for span in _row_spans([m.dst for m in group], cluster, 0) or ():
        if span.held == span.stop - span.start:
            first = group[span.members[0]].dst
            members = [
                LaneMember(i, group[i].dst.start - span.start, group[i].move.dst_strides[1:]) for i in span.members
            ]
            yield FileRows(first.file, span.start, first.stride, span.held, span.held, tuple(members), solid=True)
            cluster = [i for i in cluster if i not in span.members]
    for i in cluster:
        m = group[i].move
        yield _loose(i, group[i].dst, m.shape[1:], m.dst_strides[1:], itemsize(m.dst_dtype))


def _read_lanes(group: Sequence[_PlacedCopy], cluster: Sequence[int]) -> Iterator[FileRows]:
    """Spans of the row that are read together, unneeded bytes in between included when they are few."""
    row = _row_spans([m.src for m in group], cluster, BRIDGE) or ()
    for span in row:
        need = span.stop - span.start
        if need <= span.held + max(BRIDGE, 3 * span.held):
            first = group[span.members[0]].src
            members = [
                LaneMember(i, group[i].src.start - span.start, group[i].move.src_strides[1:]) for i in span.members
            ]
            width = first.stride if len(row) == 1 and first.stride - need <= BRIDGE else need
            yield FileRows(first.file, span.start, first.stride, width, need, tuple(members), solid=True)
            cluster = [i for i in cluster if i not in span.members]
    for i in cluster:
        m = group[i].move
        yield _loose(i, group[i].src, m.shape[1:], m.src_strides[1:], itemsize(m.src_dtype))


def _loose(i: int, span: _FileSpan, shape: Sequence[int], strides: tuple[int, ...], size: int) -> FileRows:
    """A lane of one move whose elements stand close together in memory."""
    close = dense(shape, size)
    return FileRows(
        span.file, span.start, span.stride, span.held, span.held, (LaneMember(i, 0, close),), close == strides
    )


def dense(shape: Sequence[int], size: int) -> tuple[int, ...]:
    """Byte strides of a row-major block."""
    strides = [size] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)


# -- parts


@dataclass(slots=True)
class _PartCollector:
    """Collects items into parts of at most ``limit`` bytes, where an item can be cut."""

    limit: int
    done: list[list[Item]]
    current: list[Item]
    size: int = 0

    def add(self, item: Item, size: int) -> None:
        if self.size and self.size + size > self.limit:
            self.close()
        self.current.append(item)
        self.size += size

    def close(self) -> None:
        if self.current:
            self.done.append(list(_joined(self.current)))
        self.current, self.size = [], 0


def divide(items: Sequence[Item], limit: int) -> list[list[Item]]:
    """Cut items into parts of about ``limit`` bytes, in order."""
    parts = _PartCollector(limit, [], [])
    _divide(items, parts)
    parts.close()
    return parts.done


def _divide(items: Sequence[Item], parts: _PartCollector) -> None:
    for item in items:
        size = item_bytes(item)
        if size <= parts.limit:
            parts.add(item, size)
        elif isinstance(item, Batch):
            for run in item.runs:
                for piece in _pieces(run, parts.limit):
                    parts.add(Batch((piece,)), piece.nbytes)
        elif isinstance(item, RowBlock):
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
                parts.add(TransposeTile(move), move.nbytes)


def _pieces(run: ByteRun, limit: int) -> Iterator[ByteRun]:
    """Cut at multiples of ``limit`` of the destination file, so that two parts share no page."""
    while (room := limit - run.to % limit) < run.nbytes:
        head, run = run.split(room)
        yield head
    yield run


def tiles(move: StridedCopy, elements: int, *, decoded: bool = False) -> Iterator[StridedCopy]:
    """Cut a copy into boxes of at most ``elements`` elements, in the order of the destination."""
    for start, stop in boxes(move.shape, tile_shape(move, elements, decoded=decoded)):
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


def tile_shape(move: StridedCopy, elements: int, *, decoded: bool = False) -> tuple[int, ...]:
    """Edges of a box of at most ``elements`` elements with runs as long as possible on both sides."""
    sides = _sides(move)
    # A short write costs twice as much as a short read; but around a short run, much is decoded for nothing.
    weight = 1 / 16 if decoded else 2
    tile = [1] * len(move.shape)
    while True:
        volume = prod(tile)
        # The shorter run grows first.
        for side in sorted(sides, key=lambda side: side.run(tile) * (weight if side is sides[0] else 1)):
            axis = next((i for i in side.order if tile[i] < move.shape[i]), None)
            if axis is None:
                return tuple(tile)
            grown = min(move.shape[axis], 2 * tile[axis], elements // (volume // tile[axis]))
            if grown > tile[axis]:
                tile[axis] = grown
                break
        else:
            return tuple(tile)


def _sides(move: StridedCopy) -> tuple[_AxisOrder, _AxisOrder]:
    return (
        _AxisOrder.of(move.shape, move.src_strides, itemsize(move.src_dtype)),
        _AxisOrder.of(move.shape, move.dst_strides, itemsize(move.dst_dtype)),
    )


class _AxisOrder(NamedTuple):
    """One side of a copy: its axes from the fastest to the slowest in the file."""

    order: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> _AxisOrder:
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
