"""Rounding blocks of a weight to FP8 or FP4 codes, each block with a scale: the arithmetic, panel by panel.

A panel is a 2-D array of elements. ``Rounder.local`` does panels of whole blocks; for blocks that are larger than
a panel may be, ``maxima`` is taken over all panels first, ``scale`` makes scales of it, and ``codes`` rounds.

=======  ======================================================  ====================================================
scheme   scale s of a block whose largest magnitude is a         codes
=======  ======================================================  ====================================================
tensor,  a / largest code. 1 where that is 0. With ``powers``    x / s
channel, rounded up to a power of two, at least 2^-127 (F16 2^-24).
block    In BF16 and F16, as compressed-tensors has it: rounded  and then x / s, too, is rounded to the dtype of the
         to it; 2^-7 (2^-10) where that is 0.                    scales, if the weight has the same dtype
mxfp8    a / 448, rounded up to a power of two (ceil), as        x / s
         ModelOpt has it; byte 0 where a is 0
mxfp4    2^(e - 2), e the exponent of a, or one more where a's   x / s
         mantissa is 1.75 or more, as compressed-tensors has it
nvfp4    F8_E4M3(a / 6 * g), 0.125 where that is 0,              x / (s / g), or x / (s * f)
         with g = 448 * 6 / (largest magnitude of the tensor)
=======  ======================================================  ====================================================

Divisions are true ones: a multiplication by the inverse gives other bytes now and then. A power of two is rounded up
before anything is divided by it. In nvfp4, ``a / 6`` and g are rounded to BF16 (F16) if the weight has that dtype, and
g is 2688 times the inverse of the largest magnitude: what torch makes of compressed-tensors' formulas. What ModelOpt
stores is f = (largest magnitude) / 2688, in float32, and its scales are F8_E4M3(a / (6 * f)), at least 2^-9, and 1
where a is 0.

The sign of a number that is rounded to 0 is kept, -0 itself is 0 in F4 (as compressed-tensors has it) and -0 in FP8.

Sources, all compared byte by byte: DeepSeek's README_WEIGHTS.md (block), compressed-tensors 0.20.0's
``calculate_qparams``, ``generate_gparam``, ``generate_mx_scales`` and ``_quantize`` as llm-compressor 0.14 calls them;
ModelOpt 0.47's ``NVFP4QTensor`` (read, not run).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from ckpttool.core.plan import Rounding
from ckpttool.kernels.cast import cast
from ckpttool.kernels.fp8 import Encoder, table

Array = np.ndarray[Any, np.dtype[Any]]

SCHEMES = ("tensor", "channel", "block", "mxfp8", "nvfp4", "mxfp4")

TILE = 3 << 16
"""Elements that are worked on at a time: some arrays of them lie in the second-level cache. Changes no bytes."""

_BF16 = np.dtype(ml_dtypes.bfloat16)
_INFINITY = np.uint32(0x7F800000)
_ZERO = np.float32(0)
_EIGHTH, _ONE = np.uint8(0x20), np.uint8(0x38)
"""1/8 and 1 as F8_E4M3."""
_SIGNS = np.uint8(0x80)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_MAGNITUDE_16 = np.uint16(0x7FFF)
_EIGHT = np.uint16(8)
_TWENTY_FOUR = np.uint32(24)

_NARROW = {"BF16": (7, 2.0**-126, _BF16), "F16": (10, 2.0**-14, np.dtype(np.float16))}
"""dtype -> (bits of its mantissa, its first number with a leading bit, numpy's)."""
_EPS = {"BF16": 2.0**-7, "F16": 2.0**-10}
"""Scale of compressed-tensors in place of 0."""
_F16_MOST, _F16_LEAST = np.float32(65504), np.float32(2.0**-24)
"""Largest and smallest positive numbers in F16."""
_NV = 448.0 * 6.0


class NotFiniteError(ValueError):
    """An element of a panel is NaN or an infinity."""

    def __init__(self, row: int, column: int) -> None:
        super().__init__(f"not finite at [{row}, {column}]")
        self.row = row
        self.column = column


class ScaleError(ValueError):
    """A scale is larger than its dtype can hold."""

    def __init__(self, scale: float) -> None:
        super().__init__(f"a scale is {scale}")
        self.scale = scale


class _Tile:
    """The buffers of one tile: views of the same memory for all shapes, since making them takes time."""

    def __init__(self, memory: Array, shape: tuple[int, ...]) -> None:
        n = shape[0] * shape[1]
        at = 0

        def take(dtype: Any) -> Array:
            nonlocal at
            size = n * np.dtype(dtype).itemsize
            at, start = at + size, at
            found: Array = memory[start : start + size].view(dtype)
            return found

        self.flat = take(np.float32)
        """Magnitudes."""
        self.near = self.flat.reshape(shape)
        self.bits = self.near.view(np.uint32)
        self.work = take(np.float32)
        self.far = self.work.view(np.uint32).reshape(shape)
        self.half = take(np.uint16).reshape(shape)
        """The bits of the magnitudes of BF16."""
        self.half_bf16 = self.half.view(_BF16)
        self.signs = take(np.uint8).reshape(shape)
        """0x80 or 0."""
        self.codes = take(np.uint8).reshape(shape)
        self.there = self.codes.view(np.bool_)
        even = not shape[1] % 2
        self.signs_16 = self.signs.view(np.uint16) if even else self.half
        self.codes_16 = self.codes.view(np.uint16) if even else self.half


class Rounder:
    """The arithmetic of one step. Keeps arrays, and so belongs to one thread."""

    def __init__(self, rounding: Rounding, kind: str, rows: int, columns: int) -> None:
        """``kind`` is the dtype that the weight has (F32 for one that is worked out), [rows, columns] its last axes."""
        self.rounding = rounding
        self.block = min(rounding.block[0] or rows, rows), min(rounding.block[1] or columns, columns)
        """Elements of a block along rows and columns, at most those of the weight."""
        self.packed = rounding.code == "F4"
        self.two_passes = rounding.scheme == "nvfp4"
        """A factor of the whole tensor is needed before the first panel."""
        self._kind = kind
        self._encoder = Encoder(rounding.code)
        own = rounding.scheme in ("tensor", "channel", "block") and not rounding.powers
        self._narrow = rounding.scale if own and rounding.scale == kind and kind in _NARROW else ""
        self._eight = Encoder("F8_E4M3")
        self._memory = np.empty(12 * TILE, np.uint8)
        self._views: dict[tuple[int, ...], _Tile] = {}

    def _tile(self, shape: tuple[int, ...]) -> _Tile:
        """The arrays for a tile of this shape."""
        found = self._views.get(shape)
        if found is None:
            found = self._views[shape] = _Tile(self._memory, shape)
        return found

    # -- panels

    def local(self, panel: Array, factor: float, codes: Array, scales: Array) -> None:
        """Round a panel of whole blocks.

        ``panel`` [R, C] holds floats; R and C are multiples of the block, or end where the weight does. ``codes`` are
        bytes [R, C] (F4: [R, C/2], C even), ``scales`` bytes [blocks, blocks, bytes of a scale]. ``factor`` is what
        ``factor()`` gave; 1 otherwise. Raises NotFiniteError.
        """
        tall, wide = self.block
        if tall * wide > TILE:
            stored, divisors = self.scale(self.maxima(panel), factor)
            scales[...] = stored
            self.codes(panel, divisors, codes)
            return
        half = 2 if self.packed else 1
        with np.errstate(under="ignore", over="ignore"):
            for r0, r1, c0, c1 in self._tiles(*panel.shape):
                tile = panel[r0:r1, c0:c1]
                t = self._load(tile)
                most = self._maxima(t, panel.dtype)
                self._check(most, tile, r0, c0)
                stored, divisors = self._scale(most, factor)
                scales[r0 // tall : -(-r1 // tall), c0 // wide : -(-c1 // wide)] = stored
                self._round(t, divisors, codes[r0:r1, c0 // half : -(-c1 // half)])

    def maxima(self, panel: Array) -> Array:
        """The bits of the largest magnitude in each block of a panel, uint32 [blocks, blocks].

        The panel consists of whole blocks as in ``local``, or is a part of one block. Raises NotFiniteError.
        """
        tall, wide = self.block
        rows, columns = panel.shape
        out = np.zeros((-(-rows // tall), -(-columns // wide)), np.uint32)
        for r0, r1, c0, c1 in self._tiles(rows, columns):
            most = self._maxima(self._load(panel[r0:r1, c0:c1]), panel.dtype)
            self._check(most, panel[r0:r1, c0:c1], r0, c0)
            part = out[r0 // tall :, c0 // wide :][: most.shape[0], : most.shape[1]]
            np.maximum(part, most, out=part)
        return out

    def largest(self, panel: Array) -> Array:
        """The bits of the largest magnitude of all elements, uint32 [1, 1]. Raises NotFiniteError."""
        out = np.zeros((1, 1), np.uint32)
        if panel.dtype == _BF16:
            if panel.size:  # of the bits without a sign and with it
                most = max(int(panel.view(np.int16).max()), int(panel.view(np.uint16).max()) & 0x7FFF)
                out[...] = most << 16
            self._check(out, panel, 0, 0)
            return out
        rows, columns = panel.shape
        across = min(columns, TILE)
        down = max(1, TILE // max(across, 1))
        for r0 in range(0, rows, down):
            for c0 in range(0, columns, across):
                tile = panel[r0 : r0 + down, c0 : c0 + across]
                most = self._load(tile).bits.max(initial=0, keepdims=True)
                self._check(most, tile, r0, c0)
                np.maximum(out, most, out=out)
        return out

    def codes(self, panel: Array, divisors: Array, out: Array) -> None:
        """Round a panel as for ``maxima`` with the divisors that ``scale`` gave for its blocks."""
        tall, wide = self.block
        half = 2 if self.packed else 1
        with np.errstate(under="ignore", over="ignore"):
            for r0, r1, c0, c1 in self._tiles(*panel.shape):
                t = self._load(panel[r0:r1, c0:c1])
                part = divisors[r0 // tall : -(-r1 // tall), c0 // wide : -(-c1 // wide)]
                self._round(t, part, out[r0:r1, c0 // half : -(-c1 // half)])

    def _tiles(self, rows: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
        """(first row, last + 1, first column, last + 1) of what is worked on at a time.

        Whole blocks, if a tile has room for one, and else parts of one block.
        """
        tall, wide = self.block
        if tall * wide > TILE:
            wide = min(wide, TILE)
            tall = min(tall, max(1, TILE // wide))
            for b0 in range(0, rows, self.block[0]):
                b1 = min(b0 + self.block[0], rows)
                for a0 in range(0, columns, self.block[1]):
                    a1 = min(a0 + self.block[1], columns)
                    for r0 in range(b0, b1, tall):
                        for c0 in range(a0, a1, wide):
                            yield r0, min(r0 + tall, b1), c0, min(c0 + wide, a1)
            return
        tall = min(tall, rows)
        across = min(columns, max(1, TILE // tall // wide) * wide)
        down = max(1, TILE // across // tall) * tall
        for r0 in range(0, rows, down):
            for c0 in range(0, columns, across):
                yield r0, min(r0 + down, rows), c0, min(c0 + across, columns)

    def _load(self, tile: Array) -> _Tile:
        """Find the magnitudes and signs of a tile."""
        t = self._tile(tile.shape)
        if tile.dtype == _BF16:
            bits = tile.view(np.uint16)
            np.right_shift(bits, _EIGHT, out=t.half)
            np.copyto(t.signs, t.half, casting="unsafe")
            np.bitwise_and(bits, _MAGNITUDE_16, out=t.half)
            np.copyto(t.near, t.half_bf16, casting="unsafe")
        else:
            if tile.dtype == np.float32:
                source = tile.view(np.uint32)
            else:
                cast(tile, t.near)
                source = t.bits
            np.right_shift(source, _TWENTY_FOUR, out=t.far)
            np.copyto(t.signs, t.far, casting="unsafe")
            np.bitwise_and(source, _MAGNITUDE, out=t.bits)
        np.bitwise_and(t.signs, _SIGNS, out=t.signs)
        return t

    def _maxima(self, t: _Tile, dtype: np.dtype[Any]) -> Array:
        """The bits of the largest magnitudes of what ``_load`` has just loaded."""
        tall, wide = self.block
        if dtype == _BF16 and tall > 1:  # along columns, narrow elements are faster
            return _maxima(t.half, tall, wide).astype(np.uint32) << np.uint32(16)
        return _maxima(t.bits, tall, wide)

    @staticmethod
    def _check(most: Array, tile: Array, row: int, column: int) -> None:
        if most.size and most.max() >= _INFINITY:
            with np.errstate(all="ignore"):
                bad = np.argwhere(~np.isfinite(tile.astype(np.float32)))[0]
            raise NotFiniteError(row + int(bad[0]), column + int(bad[1]))

    def _round(self, t: _Tile, divisors: Array, out: Array) -> None:
        """Divide magnitudes, which are used up, and store their codes with signs."""
        self._divide(t.near, divisors)
        if self._narrow:
            _narrow(t.flat, t.work, self._narrow)
        if not self.packed:
            self._encoder.magnitudes(t.flat, t.work, t.codes.reshape(-1))
            np.bitwise_or(t.codes, t.signs, out=out)
            return
        # Two codes at a time, as the shifts of 16 bits are faster than those of 8.
        np.greater(t.near, _ZERO, out=t.there)
        np.left_shift(t.codes_16, np.uint16(3), out=t.codes_16)
        np.right_shift(t.signs_16, np.uint16(4), out=t.signs_16)
        np.bitwise_and(t.signs_16, t.codes_16, out=t.signs_16)
        self._encoder.magnitudes(t.flat, t.work, t.codes.reshape(-1))
        np.bitwise_or(t.codes_16, t.signs_16, out=t.codes_16)
        np.right_shift(t.codes_16, np.uint16(4), out=t.signs_16)
        np.bitwise_or(t.codes_16, t.signs_16, out=t.codes_16)
        np.copyto(out, t.codes_16, casting="unsafe")

    def _divide(self, near: Array, divisors: Array) -> None:
        """Divide each block of a tile by its number, in place."""
        tall, wide = self.block
        rows, columns = near.shape
        if divisors.size == 1:
            np.divide(near, divisors.reshape(()), out=near)
        elif divisors.shape[1] == 1:
            each = divisors if tall == 1 else np.repeat(divisors, tall, axis=0)[:rows]
            np.divide(near, each, out=near)
        elif tall == 1 and not columns % wide:
            groups = near.reshape(-1, wide)
            np.divide(groups, divisors.reshape(-1, 1), out=groups)
        else:
            across = np.repeat(divisors, wide, axis=1)[:, :columns]
            for i, row in enumerate(across):
                part = near[i * tall : (i + 1) * tall]
                np.divide(part, row, out=part)

    # -- scales

    def factor(self, most: Array) -> float:
        """The factor, for nvfp4, of a tensor whose largest magnitude has these bits (uint32 [1, 1])."""
        amax = np.maximum(most.view(np.float32).max(), np.float32(2.0**-126))
        if not self.rounding.divides:
            return float(amax / np.float32(_NV))
        with np.errstate(over="ignore"):
            g = self._as_kind(self._as_kind(np.float32(1) / amax) * np.float32(_NV))
        return float(g) if np.isfinite(g) else 1.0

    def _as_kind(self, x: Any) -> Any:
        """Rounded to the weight's dtype, if that is a narrow one."""
        if self._kind not in _NARROW:
            return x
        with np.errstate(all="ignore"):
            return np.float32(x).astype(_NARROW[self._kind][2]).astype(np.float32)

    def scale(self, maxima: Array, factor: float = 1.0) -> tuple[Array, Array]:
        """Scales of blocks whose largest magnitudes have these bits (uint32 [blocks, blocks]).

        Returns (the scales as stored: bytes [blocks, blocks, bytes of a scale], what elements are divided by: float32
        [blocks, blocks]).
        """
        with np.errstate(under="ignore", over="ignore"):
            return self._scale(maxima, factor)

    def _scale(self, maxima: Array, factor: float) -> tuple[Array, Array]:
        r = self.rounding
        amax = maxima.view(np.float32)
        if r.scheme == "mxfp4":
            exponent = np.maximum((maxima + np.uint32(0x200000) >> np.uint32(23)).astype(np.int32) - 2, 0)
            stored = exponent.astype(np.uint8)
            return stored[..., None], table("F8_E8M0")[stored]
        if r.scheme == "nvfp4":
            return self._nv_scale(amax, np.float32(factor))
        s = amax / np.float32(self._encoder.largest)
        if r.powers:
            s = _rounded_up(s)
            if r.scheme != "mxfp8":
                s[maxima == 0] = 1
            if r.scale == "F8_E8M0":
                stored = (s.view(np.uint32) >> np.uint32(23)).astype(np.uint8)
                return stored[..., None], s
        if r.scale in _NARROW:
            kind = _NARROW[r.scale][2]
            if r.scale == "F16":
                if s.size and s.max() > _F16_MOST:
                    raise ScaleError(float(s.max()))
                if r.powers:
                    s = np.maximum(s, _F16_LEAST)
            narrow = s.astype(kind)
            if not r.powers:
                narrow[narrow == 0] = _EPS[r.scale]
            s = narrow.astype(np.float32)
            return narrow[..., None].view(np.uint8), s
        s[s == 0] = 1
        return s[..., None].view(np.uint8), s

    def _nv_scale(self, amax: Array, factor: np.float32) -> tuple[Array, Array]:
        largest = np.float32(448)
        if self.rounding.divides:
            wanted = np.minimum(self._as_kind(amax / np.float32(6)) * factor, largest)
        else:
            wanted = np.minimum(amax / (np.float32(6) * factor), largest)
        stored = np.empty(wanted.shape, np.uint8)
        there = wanted > 0
        self._eight.magnitudes(wanted.reshape(-1), np.empty(wanted.size, np.float32), stored.reshape(-1))
        if self.rounding.divides:
            stored[stored == 0] = _EIGHTH
        else:
            np.maximum(stored, np.uint8(1), out=stored)
            stored[~there] = _ONE
        scale = table("F8_E4M3")[stored]
        divisors = scale / factor if self.rounding.divides else scale * factor
        return stored[..., None], divisors


def _rounded_up(s: Array) -> Array:
    """The next power of two, at least 2^-127 (which has no leading bit in float32)."""
    bits = s.view(np.uint32)
    up = bits + np.uint32(0x7FFFFF) & np.uint32(0x7F800000)
    up[bits <= 0x400000] = 0x400000
    return up.view(np.float32)


def _narrow(x: Array, work: Array, kind: str) -> None:
    """Round magnitudes to the precision of a narrower dtype, to nearest even, in place."""
    mantissa, least, _ = _NARROW[kind]
    bits = work.view(np.uint32)
    if kind == "F16":
        np.maximum(x, np.float32(least), out=work)
        np.bitwise_and(bits, _INFINITY, out=bits)
    else:
        np.bitwise_and(x.view(np.uint32), _INFINITY, out=bits)
    np.add(bits, np.uint32(23 - mantissa << 23), out=bits)
    np.add(x, work, out=x)
    np.subtract(x, work, out=x)


def _maxima(bits: Array, tall: int, wide: int) -> Array:
    """The largest of each block, [blocks, blocks], of a tile that begins at one."""
    rows, columns = bits.shape
    found: Array
    if tall == 1:
        found = bits
    elif rows <= tall:
        found = bits.max(axis=0, keepdims=True)
    elif not rows % tall:
        found = bits.reshape(rows // tall, tall, columns).max(axis=1)
    else:
        found = np.maximum.reduceat(bits, np.arange(0, rows, tall), axis=0)
    if wide == 1:
        return found
    if columns <= wide:
        found = found.max(axis=1, keepdims=True)
        return found
    blocks = -(-columns // wide)
    if columns % wide:
        found = np.maximum.reduceat(found, np.arange(0, columns, wide), axis=1)
        return found
    if wide & (wide - 1) or wide > 64 or not found.flags.c_contiguous:
        found = found.reshape(-1, blocks, wide).max(axis=2)
        return found
    flat = found.reshape(-1)
    while wide > 1:  # a reduction along rows this short takes three times as long
        flat = np.maximum(flat[0::2], flat[1::2])
        wide //= 2
    return flat.reshape(-1, blocks)
