"""Exact order statistics of a tensor that is never held: which value has a rank, and which of its equals come first.

A search keeps a bracket ``[lo, hi]`` of values. A pass over the tensor counts the elements below it and notes those
inside, chunk by chunk, as distinct values and how often each occurs: weights that were stored in 16 bits differ by few
distinct values, and such ties cost nothing that way. Where what is noted tells the answer, one pass was enough:

1. A sample of sixteen chunks brackets the rank by four standard deviations, those between chunks included.
2. When the bracket holds more distinct values than may be kept, they are counted in 64K bins of their bit patterns and
   the bin with the rank is the next bracket. A bracket has at most 2^32 patterns, so this happens twice at most.
3. When the sample was misleading, the rank lies on a known side of the bracket, which is the next bracket.

The result is exact whatever the sample says. Equal elements are told apart by their position, lowest first, as a stable
sort does; -0 equals 0, and NaN has no rank: with NaN the result means nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, inf, isnan, sqrt

import numpy as np

from ckpttool.kernels.merge.base import Array, Chunk, Pass

Values = Callable[[Chunk, Sequence[int]], Iterator[Array]]
"""Yields the float32 values that are ordered, of each of the given models; an array may die when the next is asked."""

KEPT = 1 << 19
"""Distinct values kept by all searches of a tensor together, 8 bytes each."""

_SMALL = 1 << 15
"""Elements of a tensor that is not sampled: keeping them all costs less."""

_SAMPLED_CHUNKS = 16
_STRIDE = 31
"""Every 31st element of a chunk is in the sample: a number that rows are no multiple of."""

_BINS = 16
"""Binary logarithm of the number of bins."""

_FEW = 4096
"""Counters that cost less than sorting a chunk's share of a bracket."""

_LOWEST, _HIGHEST = np.float32(-inf), np.float32(inf)


@dataclass(frozen=True, slots=True)
class RankQuery:
    """Asks for the cut before an element of the ascending order."""

    model: int
    rank: int
    """Rank from 0; the tensor's size asks for the cut behind the last element."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """Divides the elements of a tensor by value, and those equal to ``value`` by position.

    The position is that of a chunk and a number of equal elements in it, so that it costs no pass to find.
    """

    value: np.float32
    start: int = 0
    """First element of the chunk that the division falls into."""
    count: int = 0
    """Equal elements of that chunk that lie before the division."""

    def above(self, values: Array, start: int, out: Array, *, first: bool) -> None:
        """Fill ``out`` with True for what lies above the cut, in the chunk of ``values`` from element ``start`` on.

        Of the elements equal to ``value``, those before the division are above it with ``first``, else those behind.
        The chunks must be those of the search.
        """
        _ordered(values)
        if start != self.start:
            compare = np.greater_equal if (start < self.start) == first else np.greater
            compare(values, self.value, out=out)
            return
        at = np.flatnonzero(values == self.value)[self.count - 1] + 1 if self.count else 0
        before, behind = (np.greater_equal, np.greater) if first else (np.greater, np.greater_equal)
        before(values[:at], self.value, out=out[:at])
        behind(values[at:], self.value, out=out[at:])


def cuts(
    size: int, values: Values, ranks: Sequence[RankQuery], *, first: bool = False
) -> Generator[Pass, None, list[Threshold]]:
    """Find a cut for every rank; all of them share their passes, and each pass asks for a model's values once.

    Without ``first``, ``size - rank`` elements lie above the cut: those that a stable ascending sort puts at ``rank``
    and behind. With ``first`` they are as many, but of equal ones the lowest positions are taken, as the head of a
    stable descending sort does.
    """
    kept = KEPT // max(len(ranks), 1)
    searches = [_Search(r, size, kept, first=first) for r in ranks if r.rank < size]
    if size > _SMALL and searches:
        yield from _sampled(size, values, searches)
    waiting = searches
    while waiting:
        models = sorted({s.at.model for s in waiting})

        def look(chunk: Chunk, waiting: list[_Search] = waiting, models: list[int] = models) -> None:
            for model, found in zip(models, values(chunk, models), strict=True):
                _ordered(found)
                for s in waiting:
                    if s.at.model == model:
                        s.see(found, chunk)

        yield look
        waiting = [s for s in waiting if not s.settle()]
    behind = Threshold(_HIGHEST, -1 if first else size)  # not even above infinities
    done = iter(searches)
    return [next(done).cut if r.rank < size else behind for r in ranks]


def kth_values(size: int, values: Callable[[Chunk], Array], ranks: Sequence[int]) -> Generator[Pass, None, list[float]]:
    """The values at some ranks, from 0, of the ascending order of ``values(chunk)``."""

    def only(chunk: Chunk, models: Sequence[int]) -> Iterator[Array]:
        for _ in models:
            yield values(chunk)

    found = yield from cuts(size, only, [RankQuery(0, r) for r in ranks])
    return [float(c.value) for c in found]


def _ordered(values: Array) -> Array:
    """The values with infinities in place of NaN, which have no place in an order: they count as the largest."""
    return np.fmin(values, np.inf, out=values)


def _sampled(size: int, values: Values, searches: Sequence[_Search]) -> Generator[Pass, None, None]:
    """Bracket the ranks by a sample."""
    models = sorted({s.at.model for s in searches})
    samples: dict[int, list[Array]] = {m: [] for m in models}
    seen = turns = 0

    def sample(chunk: Chunk) -> None:
        nonlocal seen, turns
        if chunk.start * _SAMPLED_CHUNKS < turns * size:
            return
        turns = chunk.start * _SAMPLED_CHUNKS // size + 1
        seen += chunk.stop - chunk.start
        for model, found in zip(models, values(chunk, models), strict=True):
            samples[model].append(_ordered(found[::_STRIDE].copy()))

    yield sample
    for model, parts in samples.items():
        ordered = np.sort(np.concatenate(parts))
        for s in searches:
            if s.at.model == model:
                s.bracket(*_bracket(ordered, parts, (s.at.rank + 0.5) / size, 1 - seen / size))


def _bracket(ordered: Array, parts: Sequence[Array], p: float, unseen: float) -> tuple[float, float]:
    """Values between which the quantile ``p`` most likely lies.

    The sample's share below the quantile varies as a binomial does, and with the chunks that were drawn, as far as
    others were left ``unseen``.
    """
    n = len(ordered)
    variance = p * (1 - p) / n
    if len(parts) > 1:
        middle = ordered[int(p * n)]
        variance += unseen * float(np.var([np.mean(s <= middle) for s in parts], ddof=1)) / len(parts)
    reach = 4 * sqrt(variance) + 1 / n
    lo, hi = floor((p - reach) * n), ceil((p + reach) * n)
    return float(ordered[lo]) if lo >= 0 else -inf, float(ordered[hi]) if hi < n else inf


@dataclass(slots=True)
class _Search:
    """One rank on its way to a cut."""

    at: RankQuery
    size: int
    kept: int
    first: bool
    lo: np.float32 = _LOWEST
    hi: np.float32 = _HIGHEST
    cut: Threshold = Threshold(_LOWEST)
    below: int = 0
    """Elements below the bracket."""
    bins: Array | None = None
    """Elements in each bin of the bracket, once there was more than could be kept."""
    held: int = 0
    starts: list[int] = field(default_factory=list)
    distinct: list[Array] = field(default_factory=list)
    counts: list[Array] = field(default_factory=list)
    """For each chunk with values in the bracket: its start, the distinct values in ascending order, how often each
    occurs."""

    def bracket(self, lo: float, hi: float) -> None:
        """Start anew with another bracket, both ends belonging to it."""
        self.lo, self.hi = np.float32(lo), np.float32(hi)
        self.below, self.bins = 0, None
        self._forget()

    def _forget(self) -> None:
        self.held = 0
        self.starts, self.distinct, self.counts = [], [], []

    def see(self, values: Array, chunk: Chunk) -> None:
        """Note a chunk of a pass."""
        inside, over = chunk.scratch(0, np.bool_), chunk.scratch(1, np.bool_)
        np.greater_equal(values, self.lo, out=inside)
        np.greater(values, self.hi, out=over)
        reached = int(np.count_nonzero(inside))
        self.below += len(values) - reached
        count = reached - int(np.count_nonzero(over))
        if not count:
            return
        if self.lo == self.hi:
            distinct, counts = np.array([self.lo]), np.array([count], np.int32)
        else:
            np.logical_xor(inside, over, out=inside)
            distinct, counts = _distinct(np.compress(inside, values))
        self.starts.append(chunk.start)
        self.distinct.append(distinct)
        self.counts.append(counts)
        self.held += len(distinct)
        if self.held > self.kept and self.lo != self.hi:  # one number a chunk is never too much
            self._sort_in()

    def _shift(self) -> int:
        return max((_key(self.hi) - _key(self.lo)).bit_length() - _BINS, 0)

    def _sort_in(self) -> None:
        """Count what is held in bins, and forget it."""
        if self.bins is None:
            self.bins = np.zeros(1 << _BINS, np.int64)
        if self.held:
            place = (_keys(np.concatenate(self.distinct)) - _key(self.lo)) >> self._shift()
            np.add.at(self.bins, place, np.concatenate(self.counts))
        self._forget()

    def settle(self) -> bool:
        """Draw the conclusion of a pass: True when the cut is found, else there is another bracket."""
        if self.bins is not None:
            self._sort_in()
            upto = self.below + np.cumsum(self.bins)
            if self._missed(int(upto[-1])):
                return False
            lo = _key(self.lo) + (int(np.searchsorted(upto, self.at.rank, "right")) << self._shift())
            self.bracket(_value(lo), min(_value(lo + (1 << self._shift()) - 1), float(self.hi)))
            return False
        found = np.concatenate([np.empty(0, np.float32), *self.distinct])
        counts = np.concatenate([np.empty(0, np.int32), *self.counts])
        order = np.argsort(found)
        upto = self.below + np.cumsum(counts[order], dtype=np.int64)
        if self._missed(int(upto[-1]) if len(upto) else self.below):
            return False
        value = found[order[np.searchsorted(upto, self.at.rank, "right")]]
        equal = np.flatnonzero(found == value)
        there = np.cumsum(counts[equal], dtype=np.int64)
        before = self.at.rank - int(upto[np.searchsorted(found[order], value, "right") - 1] - there[-1])
        if self.first:
            before = int(there[-1]) - before
        i = np.searchsorted(there, before)
        starts = np.repeat(self.starts, [len(d) for d in self.distinct])
        self.cut = Threshold(value, int(starts[equal[i]]), before - int(there[i - 1] if i else 0))
        self._forget()
        return True

    def _missed(self, upto: int) -> bool:
        """Whether the rank is outside the bracket, which then moves; ``upto`` elements are in it or below."""
        if self.at.rank < self.below:
            self.bracket(-inf, float(np.nextafter(self.lo, _LOWEST)))
        elif self.at.rank >= upto:
            self.bracket(float(np.nextafter(self.hi, _HIGHEST)), inf)
        else:
            return False
        return True


def _distinct(values: Array) -> tuple[Array, Array]:
    """The distinct values in ascending order, and how often each occurs (int32)."""
    bits = values.view(np.int32)
    least = bits.min()
    if least >= 0:  # no sign bit is set, so that the bits are in order
        np.subtract(bits, least, out=bits)
        used = int(np.bitwise_or.reduce(bits))
        unused = max((used & -used).bit_length() - 1, 0)
        if used >> unused < _FEW:  # differences of 16-bit values end in zeros: what is left can be counted
            counts = np.bincount(bits >> unused)
            at = np.flatnonzero(counts)
            return ((at << unused) + least).astype(np.int32).view(np.float32), counts[at].astype(np.int32)
        np.add(bits, least, out=bits)
    values = np.sort(values)
    ends = np.append(np.flatnonzero(values[1:] != values[:-1]), len(values) - 1)
    return values[ends], np.diff(ends, prepend=-1).astype(np.int32)


def _keys(values: Array) -> Array:
    """Integers in the order of float32 values: int64, 0 to 2^32 - 1."""
    bits = (values + np.float32(0)).view(np.int32).astype(np.int64)  # -0 becomes 0
    keys: Array = np.where(bits < 0, ~bits, bits + (1 << 31))
    return keys


def _key(value: np.float32) -> int:
    return int(_keys(np.array([value]))[0])


def _value(key: int) -> float:
    """The float32 value with a key; the keys beyond that of infinity, which belong to NaNs, give infinity."""
    bits = key - (1 << 31) if key >= 1 << 31 else ~key & 0xFFFFFFFF
    value = float(np.array([bits], np.uint32).view(np.float32)[0])
    return inf if isnan(value) else value
