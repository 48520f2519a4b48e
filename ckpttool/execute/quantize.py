"""Quantizing a tensor: panels of whole blocks on their way from an operand to codes and scales.

    part     what the journal records: some rows, a whole number of blocks, with the scales that lie there
    band     the rows that share a row of scales: 128 of blocks 128x128, 1 of groups or channels, all for one scale
    panel    what is in memory at a time: some bands; or some columns of one, whole blocks; or, where a block is larger
             than that, a piece of it. Then the block is read twice: for its largest magnitude, and to be rounded

Bytes do not depend on the size of a panel. Where parts begin follows from the step alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ckpttool.core.dtypes import itemsize
from ckpttool.core.plan import Adapted, Operand, Quantize, Result, StoredOperand, shape_of
from ckpttool.errors import CorruptError, UnsupportedError
from ckpttool.execute.blocks import Mover
from ckpttool.execute.files import SECTOR
from ckpttool.execute.operands import OperandBuffer, OperandReader, StoredReader, reader
from ckpttool.execute.permute import Array
from ckpttool.execute.reader import Bytes
from ckpttool.execute.strided import Emit, Seen, WriteBehind, as_in_file, scatter, unseen
from ckpttool.kernels.quantize import NotFiniteError, Rounder, ScaleError

PART = 8 << 20
"""Elements of a part, or as many as the least whole number of blocks has."""

_LEAST = 1 << 16
"""Elements of the smallest panel."""

_PANEL = 4 << 20
"""Elements of the largest panel: more makes no longer reads that would be faster."""


class BandGrid(NamedTuple):
    """A weight as matrices of bands."""

    matrices: int
    rows: int
    """Rows of a matrix."""
    columns: int
    tall: int
    """Rows of a band."""
    grain: int
    """Rows of which parts are made: those of a band, or 1 where a band is all of the matrix."""

    @property
    def bands(self) -> int:
        """Bands of a matrix."""
        return -(-self.rows // self.tall)

    @property
    def grains(self) -> int:
        """Grains of all matrices."""
        return self.matrices * -(-self.rows // self.grain)

    @property
    def each(self) -> int:
        """Grains of a part."""
        return max(1, PART // max(1, self.grain * self.columns))

    def rows_of(self, part: int) -> Iterator[tuple[int, int, int]]:
        """(matrix, first row, last + 1) of a part."""
        per = -(-self.rows // self.grain)
        at, stop = part * self.each, min((part + 1) * self.each, self.grains)
        while at < stop:
            matrix, first = divmod(at, per)
            n = min(stop - at, per - first)
            yield matrix, first * self.grain, min((first + n) * self.grain, self.rows)
            at += n


def grid_of(step: Quantize) -> BandGrid:
    """The band grid of a step's weight."""
    *lead, rows, columns = step.shape if len(step.shape) > 1 else (1, *(step.shape or (1,)))
    matrices = prod(lead)
    whole = step.rounding.block[0] == 0
    if whole and _size(step, "scales") == 1:  # one scale for all matrices
        matrices, rows = 1, matrices * rows
    tall = max(1, min(step.rounding.block[0] or rows, rows))
    return BandGrid(matrices, rows, columns, tall, 1 if whole else tall)


def _size(step: Quantize, role: str) -> int:
    return max([prod(r.shape) for r in step.results if r.role == role], default=1)


def parts_of(step: Quantize) -> int:
    """Number of parts of a quantized tensor."""
    grid = grid_of(step)
    return max(1, -(-grid.grains // grid.each))


def part_bytes(step: Quantize, part: int) -> int:
    """Bytes that a part writes."""
    grid = grid_of(step)
    total = 0
    for r in step.results:
        held = _holds(step, r)
        written = sum([prod(c.shape) * itemsize(c.dst_dtype) for c in r.outputs])
        for lo, hi in _ranges(grid, r, part):
            total += written * hi // max(held, 1) - written * lo // max(held, 1)
    return total


def _holds(step: Quantize, result: Result) -> int:
    """Elements of a result as they are counted here: codes by elements of the weight."""
    return prod(step.shape) if result.role == "codes" else prod(result.shape)


def _ranges(grid: BandGrid, result: Result, part: int) -> Iterator[tuple[int, int]]:
    """Elements of a result that belong to a part; every one belongs to just one."""
    if result.role == "codes":
        for matrix, r0, r1 in grid.rows_of(part):
            first = matrix * grid.rows
            yield (first + r0) * grid.columns, (first + r1) * grid.columns
    elif result.role == "scales":
        across = prod(result.shape) // max(1, grid.matrices * grid.bands)
        for matrix, r0, r1 in grid.rows_of(part):
            first = matrix * grid.bands
            yield (first - -r0 // grid.tall) * across, (first - -r1 // grid.tall) * across
    elif prod(result.shape) == 1:
        yield 0, int(part == 0)
    else:
        for matrix, r0, _ in grid.rows_of(part):
            if not r0:
                yield matrix, matrix + 1


def kind_of(operand: Operand) -> str:
    """The dtype that a weight has, or F32 where it is worked out."""
    return operand.dtype if isinstance(operand, StoredOperand | Adapted) else "F32"


@dataclass(slots=True)
class Quantizer:
    """Quantizes tensors, reading and writing through one ``Mover``."""

    carrier: Mover
    memory: int
    emit: Emit | None = None
    """What becomes of a stretch of a result, by default it is written; see ``scatter``."""
    _arrays: dict[str, Bytes] = field(default_factory=dict)
    buffer: OperandBuffer = field(default_factory=OperandBuffer)

    def run(self, step: Quantize, done: Collection[int], seen: Seen = unseen) -> Iterator[int | dict[str, str]]:
        """Quantize one tensor; parts in ``done`` are written already.

        Yields the number of each part that is written, and at last the hash of the operand by its position.
        Raises CorruptError for an element that is not finite.
        """
        self.buffer.holds = None
        writing = WriteBehind(self.emit or scatter)
        work = _TensorQuantizer(self, step, writing, seen)
        count = parts_of(step)
        try:
            for number in range(count):
                if number in done:
                    work.pass_over(number)
                    continue
                try:
                    work.part(number)
                except ScaleError as e:
                    raise CorruptError(
                        f"`{step.name}` takes a scale of {e.scale:g}, which {step.rounding.scale} does not hold",
                        where=work.source.label,
                        hint="--scale-dtype f32",
                    ) from None
                writing.wait()
                yield number
        finally:
            writing.end()
        digest = work.source.digest(prod(step.shape))
        yield {} if digest is None else {"0": digest}

    def take(self, key: str, nbytes: int) -> Bytes:
        """Bytes with whatever was in them; one array per purpose, kept from tensor to tensor."""
        found = self._arrays.get(key)
        if found is None or found.size < nbytes:
            found = self._arrays[key] = np.empty(nbytes, np.uint8)
        return found[:nbytes]


class _TensorQuantizer:
    """Quantizes one tensor."""

    def __init__(self, owner: Quantizer, step: Quantize, writing: WriteBehind, seen: Seen) -> None:
        self.owner = owner
        self._writing = writing
        self._turn = False
        self.step = step
        self.grid = grid = grid_of(step)
        self.source: OperandReader = reader(step.operand, owner.carrier, lambda: owner.buffer)
        kind = kind_of(step.operand)
        self.rounder = Rounder(step.rounding, kind, max(grid.rows, 1), max(grid.columns, 1))
        if self.rounder.packed and grid.columns % 2:
            raise UnsupportedError(
                f"`{step.name}` {list(step.shape)} has an odd number of columns, and two {step.rounding.code} codes lie"
                " in a byte"
            )
        self.half = 2 if self.rounder.packed else 1
        self.item = itemsize(step.rounding.scale)
        self.wide = self.rounder.block[1]
        self.across = -(-grid.columns // self.wide)
        self.results = {r.role: r for r in step.results}
        self._check()
        raw = itemsize(kind) if isinstance(self.source, StoredReader) else 8
        # Raw elements, an array of them where columns are cut, and codes.
        self.room = max(_LEAST, min(_PANEL, owner.memory // 2 // (2 * raw + 1)))
        self._factors: dict[int, float] = {}
        self._band: tuple[tuple[int, int], Array] | None = None
        self._seen = seen
        self._elements = 0
        self._passes = 2 - self._is_local(0, grid.rows)
        size = prod(step.shape)
        self._all = size * self._passes
        if self.rounder.two_passes:
            self._all += size + sum([prod(shape_of(o)) for o in step.beside])

    def _is_local(self, r0: int, r1: int) -> bool:
        """Whether the blocks of these rows fit into a panel, so that they are read once."""
        whole = self.grid.grain == self.grid.tall or (r0, r1) == (0, self.grid.rows)
        return whole and self.grid.tall * self.wide <= self.room

    def _count(self, elements: int) -> None:
        self._elements += elements
        self._seen(min(self._elements, self._all), self._all)

    def _check(self) -> None:
        """The results have as many elements as there are codes and scales."""
        scales = self.grid.matrices * self.grid.bands * self.across
        for role, n in (("codes", prod(self.step.shape) // self.half), ("scales", scales)):
            r = self.results.get(role)
            if r is not None and (prod(r.shape) != n or itemsize(r.dtype) != (1 if role == "codes" else self.item)):
                raise UnsupportedError(f"the {role} of `{self.step.name}` are {n}, and not {r.dtype} {list(r.shape)}")

    # -- parts

    def part(self, number: int) -> None:
        """Write one part."""
        for matrix, r0, r1 in self.grid.rows_of(number):
            factor = self._factor(matrix)
            if "factor" in self.results and r0 == 0 and matrix == self._factor_of(matrix):
                self._emit(self.results["factor"], 4 * matrix, np.array([factor], np.float32).view(np.uint8))
            if self._is_local(r0, r1):
                self._local(matrix, r0, r1, factor)
            else:
                self._twice(matrix, r0, r1, factor)

    def pass_over(self, number: int) -> None:
        """Take a part that is written already into the hash of the operand."""
        for matrix, r0, r1 in self.grid.rows_of(number):
            self._hash(matrix, r0, r1)
            self._count((r1 - r0) * self.grid.columns * self._passes)

    def _hash(self, matrix: int, r0: int, r1: int) -> None:
        first = matrix * self.grid.rows
        lo, stop = (first + r0) * self.grid.columns, (first + r1) * self.grid.columns
        while lo < stop:
            hi = min(stop, lo + self.room)
            self.source.pass_over(lo, hi)
            lo = hi

    def _local(self, matrix: int, r0: int, r1: int, factor: float) -> None:
        """Rows of whole bands, whose blocks fit into a panel."""
        tall, columns = self.grid.tall, self.grid.columns
        down = self.room // max(tall * columns, 1) * tall
        across = columns if down else self.room // tall // self.wide * self.wide
        turned = not down and tall > 1  # what is read is not in order then
        for a in range(r0, r1, down or tall):
            b = min(a + (down or tall), r1)
            for c0 in range(0, columns, across or 1):
                c1 = min(c0 + across, columns)
                panel = self._read(matrix, a, b, c0, c1, last=not turned)
                bands, blocks = -(-(b - a) // tall), -(-(c1 - c0) // self.wide)
                scales = self.owner.take("scales", bands * blocks * self.item).reshape(bands, blocks, self.item)
                codes = self._codes(panel, matrix, a, c0)
                try:
                    self.rounder.local(panel, factor, codes, scales)
                except NotFiniteError as e:
                    raise self._not_finite(matrix, a + e.row, c0 + e.column, panel[e.row, e.column]) from None
                self._emit_scales(matrix, a // tall, c0 // self.wide, scales)
                self._emit_codes(matrix, a, c0, codes)
        if turned:
            self._hash(matrix, r0, r1)

    def _twice(self, matrix: int, r0: int, r1: int, factor: float) -> None:
        """Rows whose blocks are larger than a panel."""
        tall = self.grid.tall
        while r0 < r1:
            band = r0 // tall
            stop = min(r1, (band + 1) * tall)
            maxima = self._maxima(matrix, band)
            stored, divisors = self.rounder.scale(maxima, factor)
            if r0 == band * tall:
                self._emit_scales(matrix, band, 0, stored)
            for a, b, c0, c1 in self._pieces(r0, stop):
                panel = self._read(matrix, a, b, c0, c1, last=True)
                codes = self._codes(panel, matrix, a, c0)
                self.rounder.codes(panel, divisors[:, c0 // self.wide : -(-c1 // self.wide)], codes)
                self._emit_codes(matrix, a, c0, codes)
            r0 = stop

    def _maxima(self, matrix: int, band: int) -> Array:
        """The largest magnitudes of the blocks of a band, of which all is read."""
        if self._band is None or self._band[0] != (matrix, band):
            out = np.zeros((1, self.across), np.uint32)
            tall = self.grid.tall
            for a, b, c0, c1 in self._pieces(band * tall, min((band + 1) * tall, self.grid.rows)):
                panel = self._read(matrix, a, b, c0, c1, last=False)
                part = out[:, c0 // self.wide : -(-c1 // self.wide)]
                found = self.rounder.largest if part.size == 1 else self.rounder.maxima
                np.maximum(part, self._finite(found, panel, matrix, a, c0), out=part)
            self._band = (matrix, band), out
        return self._band[1]

    def _pieces(self, r0: int, r1: int) -> Iterator[tuple[int, int, int, int]]:
        """(first row, last + 1, first column, last + 1), in the order in which elements lie: some rows of one band, or
        some columns of a row: whole blocks, or a part of one."""
        columns = self.grid.columns
        if columns <= self.room:
            down = self.room // max(columns, 1)
            for a in range(r0, r1, down):
                yield a, min(a + down, r1), 0, columns
            return
        wide = self.room // self.wide * self.wide
        for a in range(r0, r1):
            if wide:
                for c0 in range(0, columns, wide):
                    yield a, a + 1, c0, min(c0 + wide, columns)
                continue
            for block in range(0, columns, self.wide):
                end = min(block + self.wide, columns)
                for c0 in range(block, end, self.room):
                    yield a, a + 1, c0, min(c0 + self.room, end)

    # -- the number of the whole tensor

    def _factor_of(self, matrix: int) -> int:
        """The factor of each matrix."""
        return matrix if _size(self.step, "factor") > 1 else 0

    def _factor(self, matrix: int) -> float:
        if not self.rounder.two_passes:
            return 1.0
        key = self._factor_of(matrix)
        if key not in self._factors:
            most = np.zeros((1, 1), np.uint32)
            one = _size(self.step, "factor") > 1
            for m in (matrix,) if one else range(self.grid.matrices):
                for a, b, c0, c1 in self._pieces(0, self.grid.rows):
                    panel = self._read(m, a, b, c0, c1, last=False)
                    np.maximum(most, self._finite(self.rounder.largest, panel, m, a, c0), out=most)
            for operand in self.step.beside:
                np.maximum(most, self._largest_of(operand), out=most)
            self._factors[key] = self.rounder.factor(most)
        return self._factors[key]

    def _largest_of(self, operand: Operand) -> Array:
        """The bits of the largest magnitude of a weight that shares the factor, uint32 [1, 1]."""
        most = np.zeros((1, 1), np.uint32)
        source = reader(operand, self.owner.carrier, OperandBuffer)
        size = prod(shape_of(operand))
        for lo in range(0, size, self.room):
            hi = min(size, lo + self.room)
            self._count(hi - lo)
            if isinstance(source, StoredReader):
                panel = source.raw(lo, hi, last=False).reshape(1, hi - lo)
            else:
                panel = self.owner.take("panel", 4 * (hi - lo)).view(np.float32).reshape(1, hi - lo)
                source.read(lo, hi, panel[0], last=False)
            try:
                np.maximum(most, self.rounder.largest(panel), out=most)
            except NotFiniteError as e:
                place = ", ".join([str(int(i)) for i in np.unravel_index(lo + e.column, shape_of(operand))])
                raise self._refused(source.label, panel[0, e.column], place, source.label) from None
        return most

    # -- in and out

    def _read(self, matrix: int, a: int, b: int, c0: int, c1: int, *, last: bool) -> Array:
        """Elements [a, b) x [c0, c1) of a matrix, in the dtype they are stored in or in float32."""
        columns = self.grid.columns
        self._count((b - a) * (c1 - c0))
        first = matrix * self.grid.rows
        source = self.source
        if isinstance(source, StoredReader) and (c1 - c0 == columns or b - a == 1):
            lo, hi = (first + a) * columns + c0, (first + b - 1) * columns + c1
            found: Array = source.raw(lo, hi, last=last)
            return found.reshape(b - a, c1 - c0)
        kind = source.dtype if isinstance(source, StoredReader) else np.dtype(np.float32)
        n = (b - a) * (c1 - c0)
        panel: Array = self.owner.take("panel", n * kind.itemsize).view(kind).reshape(b - a, c1 - c0)
        if c1 - c0 == columns:
            source.read((first + a) * columns, (first + b) * columns, panel.reshape(-1), last=last)
            return panel
        for i in range(b - a):
            lo = (first + a + i) * columns + c0
            if isinstance(source, StoredReader):
                panel[i] = source.raw(lo, lo + c1 - c0, last=last)
            else:
                source.read(lo, lo + c1 - c0, panel[i], last=last)
        return panel

    def _codes(self, panel: Array, matrix: int, row: int, column: int) -> Bytes:
        """Room for the codes of a panel. One is filled while the other is written."""
        rows, columns = panel.shape
        columns //= self.half
        self._turn = not self._turn
        memory = self.owner.take(f"codes {self._turn}", rows * columns + SECTOR)
        if "codes" in self.results:
            memory = as_in_file(memory, self.results["codes"].outputs, self._code_at(matrix, row, column))
        return memory[: rows * columns].reshape(rows, columns)

    def _code_at(self, matrix: int, row: int, column: int) -> int:
        """The byte of the codes where an element's is."""
        return ((matrix * self.grid.rows + row) * self.grid.columns + column) // self.half

    def _emit_codes(self, matrix: int, row: int, column: int, codes: Bytes) -> None:
        result = self.results.get("codes")
        if result is None or not codes.size:
            return
        columns = self.grid.columns // self.half
        at = self._code_at(matrix, row, column)
        if codes.shape[1] == columns:
            data = codes.reshape(-1)
            self._writing.start(self.owner.carrier, result.outputs, at, at + data.size, data)
            return
        for i, line in enumerate(codes):
            self._emit(result, at + i * columns, line)

    def _emit_scales(self, matrix: int, band: int, block: int, scales: Bytes) -> None:
        """Scales of whole bands, or of some blocks of one."""
        result = self.results.get("scales")
        if result is not None and scales.size:
            at = ((matrix * self.grid.bands + band) * self.across + block) * self.item
            self._emit(result, at, np.ascontiguousarray(scales).reshape(-1))

    def _emit(self, result: Result, at: int, data: Bytes) -> None:
        self._writing.now(self.owner.carrier, result.outputs, at, at + data.size, data)

    # -- errors

    def _finite(self, found: Callable[[Array], Array], panel: Array, matrix: int, row: int, column: int) -> Array:
        try:
            return found(panel)
        except NotFiniteError as e:
            raise self._not_finite(matrix, row + e.row, column + e.column, panel[e.row, e.column]) from None

    def _not_finite(self, matrix: int, row: int, column: int, value: Any) -> CorruptError:
        shape = self.step.shape
        at = (matrix * self.grid.rows + row) * self.grid.columns + column
        place = ", ".join([str(int(i)) for i in np.unravel_index(at, shape)]) if shape else ""
        return self._refused(f"`{self.step.name}`", value, place, self.source.label)

    def _refused(self, name: str, value: Any, place: str, where: str) -> CorruptError:
        return CorruptError(
            f"{name} is {value} at [{place}], for which there is no {self.step.rounding.code} code",
            where=where,
            hint="a weight that is not finite is broken; --keep leaves it as it is",
        )
