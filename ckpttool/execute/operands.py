"""Reading the operands of a computed tensor, a chunk at a time, as float32.

A reader gives the elements ``[lo, hi)`` of its row-major tensor. What it reads beside that is bounded: a scale grid's
rows, an adapter's factors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import prod
from typing import ClassVar, Protocol
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import xxhash

from ckpttool.core.dtypes import itemsize, numpy_dtype
from ckpttool.core.plan import Adapted, Gathered, LowRank, Operand, Scaled, StoredOperand, shape_of
from ckpttool.errors import UnsupportedError
from ckpttool.execute.blocks import Mover
from ckpttool.execute.permute import Array, store
from ckpttool.execute.reader import Bytes
from ckpttool.execute.strided import gather, is_turned
from ckpttool.kernels.cast import cast
from ckpttool.kernels.fp8 import FORMATS, decode, decode_scaled
from ckpttool.kernels.portable import Factor

_PRODUCT = 256 << 10
"""Elements of a product of adapter factors that is worked out in one go."""

_AHEAD = 8 << 10
"""Scales that are read in one go."""

_SCALE_ROWS = 1 << 10
"""Rows of scales that are looked at together."""

_LARGEST = float(np.finfo(np.float32).max)

_STRIPS = 4 << 20
"""Least bytes for the strips of all operands: a process that only verifies has hardly an arena."""


class OperandReader(Protocol):
    """One operand."""

    label: str

    def read(self, lo: int, hi: int, out: Array, *, last: bool) -> None:
        """Put elements ``[lo, hi)`` into the float32 ``out``; ``last`` says that nobody will ask for them again."""

    def pass_over(self, lo: int, hi: int) -> None:
        """Hash elements that are not read."""

    def digest(self, size: int) -> str | None:
        """The hash of all ``size`` elements as they are stored, if they have passed in order."""


class OperandBuffer:
    """Bytes of a stretch of one operand; several operands may share one."""

    def __init__(self) -> None:
        self._memory: Bytes = np.empty(0, np.uint8)
        self.holds: tuple[object, int, int] | None = None

    def take(self, nbytes: int) -> Bytes:
        if self._memory.nbytes < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes]


class _OperandStrip:
    """Elements ``[start, stop)`` of an operand whose neighbours lie apart in its file.

    The wider a strip, the longer the runs of which it is read: a chunk of a transposed matrix is a few columns of it.
    """

    def __init__(self, strips: _OperandStrips) -> None:
        self._strips = strips
        self.start = self.stop = 0

    @cached_property
    def memory(self) -> Bytes:
        """Its share, taken when it is first read: all operands of the tensor are there then."""
        return np.empty(self._strips.share, np.uint8)


class _OperandStrips:
    """The strips of one worker's operands: together as large as the arena that stands idle while it computes."""

    _all: ClassVar[WeakKeyDictionary[Mover, _OperandStrips]] = WeakKeyDictionary()

    def __init__(self, room: int) -> None:
        self._room = room
        self._open: WeakSet[_OperandStrip] = WeakSet()

    @classmethod
    def of(cls, carrier: Mover) -> _OperandStrips:
        """The strips of this worker."""
        return cls._all.setdefault(carrier, cls(max(carrier.arena.size, _STRIPS)))

    def strip(self) -> _OperandStrip:
        """Add a strip. The strips of the previous tensor are gone by now."""
        strip = _OperandStrip(self)
        self._open.add(strip)
        return strip

    @property
    def share(self) -> int:
        return self._room // max(1, len(self._open))


class StoredReader:
    """A tensor as it lies in files; also gives its raw elements, and the hash of all of them once they have passed."""

    def __init__(self, operand: StoredOperand, carrier: Mover, buffer: OperandBuffer) -> None:
        self.label = operand.label
        self.dtype = numpy_dtype(operand.dtype)
        self._item = itemsize(operand.dtype)
        self._copies = operand.copies
        self._carrier = carrier
        self._buffer = buffer
        self._hash = xxhash.xxh3_128()
        self._hashed = 0
        self._size = prod(operand.shape)
        self._strip = _OperandStrips.of(carrier).strip() if is_turned(operand.copies) else None

    def raw(self, lo: int, hi: int, *, last: bool) -> Array:
        """Elements as they are stored; valid until the buffer's next use."""
        item = self._item
        memory = self._buffer.take((hi - lo) * item)
        if self._buffer.holds != (self, lo, hi):
            if self._strip is not None and hi - lo < self._strip.memory.nbytes // item:
                self._through(self._strip, lo, hi, memory, last=last)
            else:
                gather(self._carrier, self._copies, lo * item, hi * item, memory, once=last)
            self._buffer.holds = (self, lo, hi)
        if last and self._hashed == lo:
            self._hash.update(memory.data)
            self._hashed = hi
        found: Array = memory.view(self.dtype)
        return found

    def _through(self, strip: _OperandStrip, lo: int, hi: int, memory: Bytes, *, last: bool) -> None:
        """Take elements from the strip, and read the strip that holds them where it does not."""
        item = self._item
        while lo < hi:
            if not strip.start <= lo < strip.stop:
                strip.start, strip.stop = lo, min(self._size, lo + strip.memory.nbytes // item)
                held = strip.memory[: (strip.stop - lo) * item]
                gather(self._carrier, self._copies, lo * item, strip.stop * item, held, once=last)
            n = (min(hi, strip.stop) - lo) * item
            at = (lo - strip.start) * item
            memory[:n] = strip.memory[at : at + n]
            memory = memory[n:]
            lo += n // item

    def read(self, lo: int, hi: int, out: Array, *, last: bool) -> None:
        store(self.raw(lo, hi, last=last), out)

    def pass_over(self, lo: int, hi: int) -> None:
        self.raw(lo, hi, last=True)

    def digest(self, size: int) -> str | None:
        return self._hash.hexdigest() if self._hashed == size else None


def stretches(lo: int, hi: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """(first row, last row + 1, first column, last column + 1) of the boxes that make up a stretch of a matrix."""
    while lo < hi:
        row, column = divmod(lo, columns)
        if column or hi - lo < columns:
            n = min(columns - column, hi - lo)
            yield row, row + 1, column, column + n
        else:
            n = (hi - lo) // columns * columns
            yield row, row + n // columns, 0, columns
        lo += n


class ScaledReader:
    """A quantized weight: each code times the scale of its block (and the factor of the weight)."""

    def __init__(self, operand: Scaled, carrier: Mover, buffer: OperandBuffer) -> None:
        self.label = operand.weight.label
        self._code = operand.code or operand.weight.dtype
        self._each = 2 if self._code == "F4" else 1
        self._coded = self._code in FORMATS
        self._weight = StoredReader(operand.weight, carrier, buffer)
        shape = shape_of(operand)
        block = operand.block or shape
        self._shape = shape if len(shape) > 1 else (1, *(shape or (1,)))
        full = [b or n for b, n in zip(block, shape, strict=False)]
        full += shape[len(full) :]
        self._block = tuple(full if len(shape) > 1 else [1, *(full or [1])])
        self._grid = tuple([-(-n // max(b, 1)) for n, b in zip(self._shape, self._block, strict=True)])
        if prod(self._grid) != prod(operand.scale.shape):
            raise UnsupportedError(
                f"the scales {list(operand.scale.shape)} of `{self.label}` {list(shape)} are not a grid of blocks"
            )
        self._scales = _Scales(operand, carrier)
        self._bytes = np.empty(0, np.float32)

    def read(self, lo: int, hi: int, out: Array, *, last: bool) -> None:
        over = self._values(lo, hi, out, last=last)
        columns, across = self._shape[-1], self._grid[-1]
        at = 0
        for r0, r1, c0, c1 in stretches(lo, hi, columns):
            part = out[at : at + (r1 - r0) * (c1 - c0)].reshape(r1 - r0, c1 - c0)
            at += part.size
            rows = list(self._grid_rows(r0, r1))
            g0, g1 = c0 // self._block[-1], -(-c1 // self._block[-1])
            for first in range(0, len(rows), _SCALE_ROWS):
                some = rows[first : first + _SCALE_ROWS]
                scales = self._scales.rows([row for row, _, _ in some], g0, g1, across)
                runs = [(a - some[0][1], b - some[0][1]) for _, a, b in some]
                with np.errstate(all="ignore"):
                    self._multiply(part[some[0][1] - r0 : some[-1][2] - r0], c0, runs, scales, over)

    def _multiply(self, whole: Array, c0: int, runs: list[tuple[int, int]], scales: Array, over: float) -> None:
        """Multiply elements, which begin at column ``c0``, by ``over`` and each run of rows by a row of scales."""
        columns, wide = whole.shape[1], self._block[-1]
        if over != 1:
            if scales.size and float(np.abs(scales).max()) * over < _LARGEST:
                scales = scales * np.float32(over)  # exact, and so one multiplication rounds what two would
            else:
                np.multiply(whole, np.float32(over), out=whole)
        skip = c0 % wide
        if scales.shape[1] == 1:
            if len(whole) == len(runs):
                np.multiply(whole, scales, out=whole)
                return
            spread = scales
        elif not skip and len(whole) == len(runs) and columns == scales.shape[1] * wide and whole.flags.c_contiguous:
            groups = whole.reshape(-1, wide)
            np.multiply(groups, scales.reshape(-1, 1), out=groups)
            return
        else:
            spread = np.repeat(scales, wide, axis=1)[:, skip : skip + columns]
        for line, (a, b) in zip(spread, runs, strict=True):
            np.multiply(whole[a:b], line, out=whole[a:b])

    def _values(self, lo: int, hi: int, out: Array, *, last: bool) -> float:
        """Put the values of the codes into ``out``; they are to be multiplied by what is returned."""
        if not self._coded:
            self._weight.read(lo, hi, out, last=last)
            return 1.0
        each = self._each
        first, stop = lo // each, -(-hi // each)
        codes = self._weight.raw(first, stop, last=last).view(np.uint8)
        if lo % each or hi % each:
            if self._bytes.size < each * codes.size:
                self._bytes = np.empty(each * codes.size, np.float32)
            values = self._bytes[: each * codes.size]
            over = decode_scaled(self._code, codes, values)
            out[...] = values[lo - first * each :][: hi - lo]
            return over
        return decode_scaled(self._code, codes, out)

    def pass_over(self, lo: int, hi: int) -> None:
        self._weight.pass_over(lo // self._each, -(-hi // self._each))

    def digest(self, size: int) -> str | None:
        """The hash of the codes, without the scales."""
        return self._weight.digest(size // self._each)

    def _grid_rows(self, r0: int, r1: int) -> Iterator[tuple[int, int, int]]:
        """(row of the grid, first row of the weight, last + 1): runs of rows that share their scales."""
        tall = self._block[-2]
        outer = prod(self._shape[:-2])
        height = self._shape[-2]
        while r0 < r1:
            matrix, row = divmod(r0, height)
            stop = min(r1, matrix * height + min(height, (row // tall + 1) * tall))
            above = 0
            if outer > 1:
                for n, b, g, i in zip(
                    self._shape[:-2], self._block[:-2], self._grid[:-2], np.unravel_index(matrix, self._shape[:-2]),
                    strict=True,
                ):  # fmt: skip
                    above = above * g + int(i) // (b or n)
            yield above * self._grid[-2] + row // tall, r0, stop
            r0 = stop


class _Scales:
    """The scales of a weight, as float32, a stretch of their grid at a time; the factor is in them."""

    def __init__(self, operand: Scaled, carrier: Mover) -> None:
        self._reader = StoredReader(operand.scale, carrier, OperandBuffer())
        self._size = prod(operand.scale.shape)
        self._dtype = operand.scale.dtype if operand.scale.dtype in ("F8_E8M0", *FORMATS) else ""
        self._factor: np.float32 | None = None
        self._divides = operand.divides
        if operand.factor is not None:
            one = np.empty(1, np.float32)
            StoredReader(operand.factor, carrier, OperandBuffer()).read(0, 1, one, last=True)
            self._factor = one[0]
        self._start = self._stop = 0
        self._held = np.empty(0, np.float32)

    def rows(self, rows: Sequence[int], g0: int, g1: int, across: int) -> Array:
        """Columns ``[g0, g1)`` of rows of a grid with ``across`` columns, [rows, g1 - g0]."""
        # No step is longer than to the next row, but where a scale is for several matrices there are steps back.
        if rows[-1] - rows[0] == len(rows) - 1 and (len(rows) > 1 or g1 - g0 == across):
            held = self._take(rows[0] * across, (rows[-1] + 1) * across)
            return held.reshape(len(rows), across)[:, g0:g1]
        out = np.empty((len(rows), g1 - g0), np.float32)
        for line, r in zip(out, rows, strict=True):
            line[...] = self._take(r * across + g0, r * across + g1)
        return out

    def _take(self, lo: int, hi: int) -> Array:
        """Elements [lo, hi) of the grid, and some more kept for the next call."""
        if not self._start <= lo <= hi <= self._stop:
            stop = min(self._size, max(hi, lo + _AHEAD))
            if self._held.size < stop - lo:
                self._held = np.empty(stop - lo, np.float32)
            self._read(lo, stop, self._held[: stop - lo])
            self._start, self._stop = lo, stop
        return self._held[lo - self._start : hi - self._start]

    def _read(self, lo: int, hi: int, out: Array) -> None:
        if self._dtype:
            decode(self._dtype, self._reader.raw(lo, hi, last=False).view(np.uint8), out)
        else:
            self._reader.read(lo, hi, out, last=False)
        if self._factor is not None:
            with np.errstate(all="ignore"):
                (np.divide if self._divides else np.multiply)(out, self._factor, out=out)


class AdaptedReader:
    """A weight with low-rank adapters: the product is worked out for fixed groups of rows."""

    def __init__(self, operand: Adapted, weight: OperandReader, carrier: Mover) -> None:
        self.label = weight.label
        self._weight = weight
        self._columns = operand.columns
        self._rows = max(1, _PRODUCT // self._columns)
        self._dtype = numpy_dtype(operand.dtype)
        self._terms = [_AdapterTerm(t, carrier) for t in operand.terms]

    def read(self, lo: int, hi: int, out: Array, *, last: bool) -> None:
        self._weight.read(lo, hi, out, last=last)
        columns, group = self._columns, self._rows
        for first in range(lo // columns // group * group, -(-hi // columns), group):
            for term in self._terms:
                r0, r1 = max(first, term.row), min(first + group, term.row + term.rows)
                if r0 < r1 and max(lo, r0 * columns) < min(hi, r1 * columns):
                    self._add(term, r0, r1, lo, hi, out)
        if self._dtype != np.float32:
            rounded = np.empty(out.shape, self._dtype)
            cast(out, rounded)
            cast(rounded, out)

    def _add(self, term: _AdapterTerm, r0: int, r1: int, lo: int, hi: int, out: Array) -> None:
        """Add rows ``[r0, r1)`` of a term to the part of them that lies in ``[lo, hi)``."""
        product = term.product(r0 - term.row, r1 - term.row)
        columns, left = self._columns, term.column
        right = left + product.shape[1]
        begin, end = max(lo, r0 * columns), min(hi, r1 * columns)
        for a, b, c0, c1 in stretches(begin, end, columns):
            x, y = max(c0, left), min(c1, right)
            if x < y:
                part = out[a * columns + c0 - lo :][: (b - a) * (c1 - c0)].reshape(b - a, c1 - c0)
                part[:, x - c0 : y - c0] += product[a - r0 : b - r0, x - left : y - left]

    def pass_over(self, lo: int, hi: int) -> None:
        self._weight.pass_over(lo, hi)

    def digest(self, size: int) -> str | None:
        """The hash of the weight, without the adapters."""
        return self._weight.digest(size)


class _AdapterTerm:
    """One adapter's share: the factor [rank, columns] is held, the rows of the other are read as they are needed."""

    def __init__(self, term: LowRank, carrier: Mover) -> None:
        self.row, self.column = term.row, term.column
        self.rows, self._rank = term.up.shape
        self._factor = np.float32(term.factor)
        self._up = StoredReader(term.up, carrier, OperandBuffer())
        down = np.empty(prod(term.down.shape), np.float32)
        StoredReader(term.down, carrier, OperandBuffer()).read(0, down.size, down, last=True)
        self._down = Factor(down.reshape(term.down.shape))
        self._held: tuple[int, int, Array] | None = None

    def product(self, r0: int, r1: int) -> Array:
        """Rows of ``factor * up @ down``."""
        if self._held is None or self._held[:2] != (r0, r1):
            up = np.empty((r1 - r0) * self._rank, np.float32)
            self._up.read(r0 * self._rank, r1 * self._rank, up, last=False)
            product = self._down.product(up.reshape(r1 - r0, self._rank))
            np.multiply(product, self._factor, out=product)
            self._held = r0, r1, product
        return self._held[2]


class GatheredReader:
    """Rows picked from other operands."""

    def __init__(self, operand: Gathered, sources: Sequence[OperandReader]) -> None:
        self.label = sources[0].label
        self._sources = sources
        self._columns = operand.shape[-1]
        self._runs = operand.runs
        self._starts = np.array([r.start for r in operand.runs], np.int64)
        self._means = dict(operand.means)
        self._held: tuple[tuple[int, int, int], Array] | None = None

    def read(self, lo: int, hi: int, out: Array, *, last: bool) -> None:
        at = 0
        for r0, r1, c0, c1 in stretches(lo, hi, self._columns):
            part = out[at : at + (r1 - r0) * (c1 - c0)].reshape(r1 - r0, c1 - c0)
            at += part.size
            self._rows(r0, r1, c0, c1, part, last=last)

    def _rows(self, r0: int, r1: int, c0: int, c1: int, out: Array, *, last: bool) -> None:
        del last  # rows are shared, so somebody may ask again
        columns = self._columns
        i = max(0, int(np.searchsorted(self._starts, r0, "right")) - 1)
        while i < len(self._runs) and self._runs[i].start < r1:
            run = self._runs[i]
            a, b = max(r0, run.start), min(r1, run.stop)
            i += 1
            if a >= b:
                continue
            if run.source < 0:
                out[a - r0 : b - r0] = 0
                continue
            first = run.first + a - run.start
            target = out[a - r0 : b - r0]
            begin, end = first * columns + c0, (first + b - a - 1) * columns + c1
            self._sources[run.source].read(begin, end, target.reshape(-1), last=False)
        for row in range(r0, r1) if self._means else ():
            if row in self._means:
                out[row - r0] = self._mean(row, c0, c1)

    def pass_over(self, lo: int, hi: int) -> None:
        """Rows pass in another order than they lie: there is no hash to take them into."""

    def digest(self, size: int) -> str | None:
        return None

    def _mean(self, row: int, c0: int, c1: int) -> Array:
        """The mean of a row's picks, summed in float64; rows that follow each other are read together."""
        if self._held is None or self._held[0] != (row, c0, c1):
            columns = self._columns
            total = np.zeros(c1 - c0, np.float64)
            picks = self._means[row]
            most = max(1, _PRODUCT // columns)
            i = 0
            while i < len(picks):
                n = 1
                while n < most and i + n < len(picks) and picks[i + n] == (picks[i][0], picks[i][1] + n):
                    n += 1
                source, first = picks[i]
                block = np.empty((n - 1) * columns + c1 - c0, np.float32)
                self._sources[source].read(first * columns + c0, (first + n - 1) * columns + c1, block, last=False)
                for k in range(n):
                    total += block[k * columns : k * columns + c1 - c0]
                i += n
            self._held = (row, c0, c1), (total / len(picks)).astype(np.float32)
        return self._held[1]


def reader(operand: Operand, carrier: Mover, buffer: Callable[[], OperandBuffer]) -> OperandReader:
    """The reader of an operand; ``buffer`` gives the place for raw elements of a tensor that is read forwards."""
    if isinstance(operand, StoredOperand):
        return StoredReader(operand, carrier, buffer())
    if isinstance(operand, Scaled):
        return ScaledReader(operand, carrier, buffer())
    if isinstance(operand, Adapted):
        return AdaptedReader(operand, reader(operand.weight, carrier, buffer), carrier)
    return GatheredReader(operand, [reader(s, carrier, buffer) for s in operand.sources])
