"""Statistics and histograms of blocks, added up in bounded memory.

Three ways, chosen by the kind and the width of an element:

* up to 16 bits there are at most 65,536 different elements, so counting them says everything, exactly and whatever
  the order of the blocks;
* wider integers are added up, and squared, as integers of any size: exact, too;
* wider floats go through float64 sums. Blocks must then come in a fixed order, because sums of floats depend on it.
  Within a block, ``portable`` fixes the order: the same figures on every processor.

NaN and infinities are counted and left out of everything else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from ckpttool.core.dtypes import lookup, numpy_dtype
from ckpttool.errors import UnsupportedError
from ckpttool.kernels.portable import dot, tree_sum

Array = np.ndarray[Any, np.dtype[Any]]
Number = int | float


_PLAIN = 480
"""Values between 2^-480 and 2^480 are squared and added up as they are; others are scaled first, by a power of two."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of all finite elements; None where there is none."""

    elements: int
    minimum: Number | None
    maximum: Number | None
    mean: float | None
    std: float | None
    """Standard deviation of the population: the root of the mean squared distance from the mean."""
    amax: Number | None
    """Largest absolute value."""
    nan: int
    inf: int
    zeros: int
    saturated: int | None
    """Elements at the largest finite value of an FP8 dtype, where casts that overflow end; None for other dtypes."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Finite elements by value, in bins of equal width."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


class Collector(Protocol):
    """Takes blocks of one tensor."""

    def add(self, block: Array) -> None:
        """Count a block in."""

    def stats(self) -> Stats:
        """Statistics of everything added so far."""

    def histogram(self, bins: int) -> Histogram | None:
        """Histogram of everything added so far; None when it takes another pass over the blocks with ``Binning``."""


def collector(dtype: str) -> Collector:
    """A fresh collector. Raises UnsupportedError for elements smaller than a byte."""
    entry = lookup(dtype)
    if entry.bits < 8:
        raise UnsupportedError(f"{dtype} elements are smaller than a byte and have no statistics")
    if entry.bits <= 16:
        return _Patterns(dtype)
    return _Integers() if entry.kind == "int" else _WideSums(dtype)


@lru_cache(maxsize=32)
def _values(dtype: str) -> Array:
    """The value of every bit pattern, as float64."""
    kind = numpy_dtype(dtype)
    bits = np.arange(1 << 8 * kind.itemsize, dtype=np.uint32).astype(f"u{kind.itemsize}")
    if lookup(dtype).kind == "bool":
        bits = (bits != 0).astype(np.uint8)
        kind = np.dtype(np.uint8)
    with np.errstate(all="ignore"):
        values: Array = bits.view(kind).astype(np.float64)
    return values


class _Patterns:
    """Counts how often each bit pattern occurs."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._kind = np.dtype(f"u{numpy_dtype(dtype).itemsize}")
        self._counts = np.zeros(1 << 8 * self._kind.itemsize, np.int64)

    def add(self, block: Array) -> None:
        flat = np.ascontiguousarray(block).reshape(-1).view(self._kind)
        self._counts += np.bincount(flat, minlength=self._counts.size)

    def _finite(self) -> tuple[Array, Array]:
        """Values that occur, and how often, smallest first."""
        values = _values(self._dtype)
        there = (self._counts > 0) & np.isfinite(values)
        values, counts = values[there], self._counts[there]
        order = np.argsort(values, kind="stable")
        return values[order], counts[order]

    def stats(self) -> Stats:
        every, counts = _values(self._dtype), self._counts
        values, times = self._finite()
        n = int(times.sum())
        saturated = None
        if lookup(self._dtype).kind == "float" and self._kind.itemsize == 1:
            largest = np.abs(every[np.isfinite(every)]).max()
            saturated = int(counts[np.abs(every) == largest].sum())
        mean = std = low = high = amax = None
        if n:
            mean = float(tree_sum(values * times) / n)
            std = float(np.sqrt(tree_sum((values - mean) ** 2 * times) / n))
            low, high = _number(values[0], self._dtype), _number(values[-1], self._dtype)
            amax = max(abs(low), abs(high))
        return Stats(
            int(counts.sum()),
            low,
            high,
            mean,
            std,
            amax,
            int(counts[np.isnan(every)].sum()),
            int(counts[np.isinf(every)].sum()),
            int(counts[every == 0].sum()),
            saturated,
        )

    def histogram(self, bins: int) -> Histogram | None:
        values, times = self._finite()
        if not values.size:
            return Histogram((), ())
        binning = Binning(float(values[0]), float(values[-1]), bins)
        binning.count(values, times)
        return binning.result()


class _WideSums:
    """Adds up wider elements."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._n = self._nan = self._inf = self._zeros = self._all = 0
        self._low: Number | None = None
        self._high: Number | None = None
        self._amax: Number | None = None
        self._mean = self._squares = 0.0
        self._exponent = 0
        """The mean is ``_mean * 2**_exponent``; squares have twice that exponent."""

    def add(self, block: Array) -> None:
        data = block.reshape(-1)
        self._all += data.size
        self._zeros += data.size - int(np.count_nonzero(data))
        data = finite(data)
        if data.size < block.size:
            nan = int(np.isnan(block).sum())
            self._nan += nan
            self._inf += block.size - data.size - nan
        if not data.size:
            return
        real = _magnitudes(data) if data.dtype.kind == "c" else data
        low, high = _number(real.min(), self._dtype), _number(real.max(), self._dtype)
        self._low = low if self._low is None else min(self._low, low)
        self._high = high if self._high is None else max(self._high, high)
        # Joining means and squared distances (Chan, Golub and LeVeque) loses nothing to cancellation.
        with np.errstate(over="ignore", invalid="ignore"):
            wide = self._scaled(real.astype(np.float64), max(abs(low), abs(high)))
            mean = float(tree_sum(wide)) / wide.size
            wide -= mean
            squares = dot(wide, wide, wide)
            n = self._n + data.size
            gap = mean - self._mean
            self._mean += gap * data.size / n
            self._squares += squares + gap * gap * self._n * data.size / n
            self._n = n

    def _scaled(self, values: Array, amax: Number) -> Array:
        """The values, all at most ``amax``, in the scale of the sums, which is changed where it has to be."""
        if amax:
            own = int(np.frexp(float(amax))[1])
            own = own if abs(own) > _PLAIN else 0
            exponent = max(own, self._exponent) if self._n and (self._mean or self._squares) else own
            if exponent != self._exponent:
                self._mean = float(np.ldexp(self._mean, self._exponent - exponent))
                self._squares = float(np.ldexp(self._squares, 2 * (self._exponent - exponent)))
                self._exponent = exponent
        return np.ldexp(values, -self._exponent) if self._exponent else values

    def stats(self) -> Stats:
        some = self._n > 0
        amax = mean = std = None
        if some and self._low is not None and self._high is not None:
            amax = max(abs(self._low), abs(self._high))
            mean, std = self._mean, float(np.sqrt(self._squares / self._n))
            if self._exponent:
                # Rounding may go beyond what there is, and at the largest numbers that is an infinity.
                with np.errstate(over="ignore"):
                    mean = min(max(float(np.ldexp(mean, self._exponent)), self._low), self._high)
                    std = min(float(np.ldexp(std, self._exponent)), amax)
        return Stats(self._all, self._low, self._high, mean, std, amax, self._nan, self._inf, self._zeros, None)

    def histogram(self, bins: int) -> Histogram | None:
        return Histogram((), ()) if not self._n else None


class _Integers:
    """Adds up integers that floats cannot hold, and their squares, exactly."""

    def __init__(self) -> None:
        self._n = self._zeros = self._sum = self._squares = 0
        """The sums are of ``_unsigned`` elements: how far they spread does not depend on where they begin."""
        self._ends: tuple[int, int] | None = None
        self._shift = 0

    def add(self, block: Array) -> None:
        data = block.reshape(-1)
        self._n += data.size
        self._zeros += data.size - int(np.count_nonzero(data))
        if not data.size:
            return
        ends = int(data.min()), int(data.max())
        self._ends = ends if self._ends is None else (min(self._ends[0], ends[0]), max(self._ends[1], ends[1]))
        for at in range(0, data.size, _SLICE):
            values, self._shift = _unsigned(data[at : at + _SLICE])
            self._sum += _total(values)
            self._squares += _squared(values)

    def stats(self) -> Stats:
        if self._ends is None:
            return Stats(0, None, None, None, None, None, 0, 0, 0, None)
        # Quotients of integers are rounded once, however large they are.
        mean = (self._sum + self._n * self._shift) / self._n
        std = math.sqrt((self._n * self._squares - self._sum**2) / self._n**2)
        low, high = self._ends
        return Stats(self._n, low, high, mean, std, max(abs(low), abs(high)), 0, 0, self._zeros, None)

    def histogram(self, bins: int) -> Histogram | None:
        return Histogram((), ()) if not self._n else None


def _unsigned(data: Array) -> tuple[Array, int]:
    """Integers as U64, and what was taken from each of them for it."""
    if data.dtype.kind == "u":
        return data.astype(np.uint64), 0
    least = 1 << 63
    return data.astype(np.int64).view(np.uint64) ^ np.uint64(least), -least


def _total(values: Array) -> int:
    """The sum of less than 2^32 elements of U64."""
    return (int((values >> np.uint64(32)).sum()) << 32) + int((values & _HALF).sum())


def _squared(values: Array) -> int:
    """The sum of the squares of less than 2^32 elements of U64."""
    high, low = values >> np.uint64(32), values & _HALF
    return (_total(high * high) << 64) + (_total(high * low) << 33) + _total(low * low)


@dataclass(slots=True)
class TensorHealth:
    """Elements of one tensor that no sound weight has, counted over blocks in row-major order."""

    nan: int = 0
    inf: int = 0
    first_nan: tuple[int, ...] | None = None
    first_inf: tuple[int, ...] | None = None
    zeros: bool = True
    """Whether everything so far is zero."""

    def add(self, block: Array, start: Sequence[int]) -> None:
        """Count a block of floats in that begins at ``start``."""
        with np.errstate(invalid="ignore"):  # of signalling NaN
            self.zeros = self.zeros and not np.any(block)
        good = np.isfinite(block)
        if good.all():
            return
        nan = np.isnan(block)
        inf = ~(good | nan)
        self.nan += int(np.count_nonzero(nan))
        self.inf += int(np.count_nonzero(inf))
        if self.first_nan is None and nan.any():
            self.first_nan = first_index(nan, start)
        if self.first_inf is None and inf.any():
            self.first_inf = first_index(inf, start)


def finite(data: Array) -> Array:
    """The elements that are numbers, in order."""
    if data.dtype.kind not in "fc":
        return data
    good = np.isfinite(data)
    return data if good.all() else data[good]


def _magnitudes(data: Array) -> Array:
    """Absolute values. What numpy makes of complex numbers depends on the processor in its last bit."""
    if data.dtype.kind != "c":
        return np.asarray(np.abs(data))
    with np.errstate(all="ignore"):
        sides = np.stack([data.real, data.imag]).astype(np.float64)
        exponents = np.frexp(np.abs(sides).max(0))[1]
        sides = np.ldexp(sides, -exponents)
        sides *= sides
        found: Array = np.ldexp(np.sqrt(sides[0] + sides[1]), exponents).astype(data.real.dtype)
    return found


class Binning:
    """Counts elements into bins of equal width between two values."""

    def __init__(self, low: float, high: float, bins: int) -> None:
        if high - low == np.inf:
            self._edges = 2 * np.linspace(low / 2, high / 2, bins + 1)
        else:
            self._edges = np.linspace(low, high, bins + 1) if high > low else np.array([low, high])
        self._counts = np.zeros(len(self._edges) - 1, np.int64)

    def add(self, block: Array) -> None:
        """Count a block in."""
        data = finite(block.reshape(-1))
        self.count(_magnitudes(data) if data.dtype.kind == "c" else data)

    def count(self, values: Array, times: Array | None = None) -> None:
        """Count finite values in, each so many times."""
        # The first edge is below every value; the last bin takes its right edge, the others do not.
        place = np.searchsorted(self._edges[1:-1], values.astype(np.float64), side="right")
        if times is None:
            self._counts += np.bincount(place, minlength=self._counts.size)
        else:
            np.add.at(self._counts, place, times)

    def result(self) -> Histogram:
        """The counts so far."""
        return Histogram(tuple(map(float, self._edges)), tuple(map(int, self._counts)))


def _number(value: Any, dtype: str) -> Number:
    """A Python number: an int for integers, which floats cannot hold exactly."""
    return int(value) if lookup(dtype).kind in ("int", "bool") else float(value)


def differs(left: Array, right: Array, atol: float, rtol: float) -> tuple[Array, float]:
    """Compare two blocks: where they differ by more than ``atol + rtol * |right|``, and the largest absolute difference
    there.

    NaN equals NaN and an infinity itself; the difference from a NaN is NaN.
    """
    # A tensor without axes has no view of another width.
    one, two = np.atleast_1d(left), np.atleast_1d(right)
    if left.dtype == right.dtype and np.array_equal(one.view(np.uint8), two.view(np.uint8)):
        return np.zeros(left.shape, np.bool_), 0.0  # the common case, many times faster
    if _are_wide_integers(left, right):
        far = _integers_apart(left, right)
        wrong = far > atol + rtol * np.abs(right.astype(np.float64))
        return wrong, float(far[wrong].max(initial=0))
    kind = np.complex128 if "c" in (left.dtype.kind, right.dtype.kind) else np.float64
    with np.errstate(all="ignore"):
        a, b = left.astype(kind), right.astype(kind)
        close = np.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
        if close.all():
            return ~close, 0.0
        gap = _magnitudes(a[~close] - b[~close])
    return ~close, float("nan") if np.isnan(gap).any() else float(gap.max())


def _are_wide_integers(left: Array, right: Array) -> bool:
    """Whether both are integers, of which float64 may not tell two apart."""
    return left.dtype.kind in "iu" and right.dtype.kind in "iu" and 8 in (left.itemsize, right.itemsize)


def _integers_apart(left: Array, right: Array) -> Array:
    """The distance of each two integers: exact, and only then float64."""
    if left.dtype != right.dtype:  # of two of them, numpy makes floats first
        return np.asarray(np.abs(left.astype(object) - right.astype(object)), np.float64)
    larger, smaller = np.maximum(left, right), np.minimum(left, right)
    far = np.asarray(larger).astype(np.uint64) - np.asarray(smaller).astype(np.uint64)  # wraps as the integers do
    return np.asarray(far, np.float64)


def differs_in_bits(left: Array, right: Array) -> tuple[Array, float]:
    """Compare two blocks of one dtype: where they differ in any bit, and the largest absolute difference there."""
    kind = np.dtype(f"u{left.dtype.itemsize}") if left.dtype.itemsize <= 8 else np.dtype((np.void, left.dtype.itemsize))
    wrong = np.ascontiguousarray(left).view(kind) != np.ascontiguousarray(right).view(kind)
    wrong = wrong.reshape(left.shape)  # a tensor without axes got one on the way
    if not wrong.any():
        return wrong, 0.0
    wide = np.complex128 if left.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        if _are_wide_integers(left, right):
            gap = _integers_apart(left[wrong], right[wrong])
        else:
            gap = _magnitudes(left[wrong].astype(wide) - right[wrong].astype(wide))
    return wrong, float("nan") if np.isnan(gap).any() else float(gap.max())


class Distance:
    """The distance of two tensors as a whole, summed over blocks in float64."""

    def __init__(self) -> None:
        self._gap = self._left = self._right = self._dot = 0.0

    def add(self, left: Array, right: Array) -> None:
        """Count two blocks of one shape in."""
        kind = np.complex128 if "c" in (left.dtype.kind, right.dtype.kind) else np.float64
        a, b, exact = left.reshape(-1), right.reshape(-1), _are_wide_integers(left, right)
        for at in range(0, a.size, _SLICE):
            with np.errstate(all="ignore"):
                part = slice(at, at + _SLICE)
                x, y = a[part].astype(kind), b[part].astype(kind)
                gap: Array = _integers_apart(a[part], b[part]) if exact else x - y
                self._gap += _dot(gap, gap)
                self._dot += _dot(x, y)
                self._left += _dot(x, x)
                self._right += _dot(y, y)

    def add_right(self, right: Array) -> None:
        """Count two blocks in that are equal."""
        kind = np.complex128 if right.dtype.kind == "c" else np.float64
        flat = right.reshape(-1)
        for at in range(0, flat.size, _SLICE):
            with np.errstate(all="ignore"):
                y = flat[at : at + _SLICE].astype(kind)
                self._right += _dot(y, y)

    @property
    def gap2(self) -> float:
        """Square of the norm of the difference."""
        return self._gap

    @property
    def norm2(self) -> float:
        """Square of the norm of the right side."""
        return self._right

    @property
    def relative(self) -> float:
        """Norm of the difference by the norm of the right side; NaN where an element is not a number."""
        if not self._right:
            return float("inf") if self._gap else 0.0
        return math.sqrt(self._gap) / math.sqrt(self._right)

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between both; None where one is all zeros."""
        norms = math.sqrt(self._left) * math.sqrt(self._right)
        return self._dot / norms if norms else None


def _dot(left: Array, right: Array) -> float:
    """The real part of the dot product of two float64 or complex128 vectors."""
    a, b = left.view(np.float64), right.view(np.float64)
    return dot(a, b, np.empty_like(a))


_SLICE = 1 << 18
"""Elements that are widened at a time."""
_HALF = np.uint64((1 << 32) - 1)
"""The lower half of an element of U64."""


def first_index(wrong: Array, start: Sequence[int]) -> tuple[int, ...]:
    """The index in the tensor of the first element that is set, for a block that begins at ``start``."""
    at = np.unravel_index(int(np.argmax(wrong)), wrong.shape) if wrong.shape else ()
    return tuple([int(i) + s for i, s in zip(at, start, strict=True)])
