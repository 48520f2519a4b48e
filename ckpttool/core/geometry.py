"""Boxes: the only geometric primitive. Pure; no I/O, no numpy.

A box is an N-d half-open rectangle. Everything that moves in ckpttool is "this box of that stored tensor is that box
of this logical tensor", so three operations carry the tool: intersect, shift, and turning a flat element range of a
row-major tensor into boxes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """Half-open rectangle ``[start, stop)`` per axis; a 0-d box has no axes and one element."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple([b - a for a, b in zip(self.start, self.stop, strict=True)])

    @property
    def volume(self) -> int:
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None when they share no element."""
        start = tuple([max(b, a) for a, b in zip(self.start, other.start, strict=True)])
        stop = tuple([min(b, a) for a, b in zip(self.stop, other.stop, strict=True)])
        for a, b in zip(start, stop, strict=True):
            if a >= b:
                return None
        return Box(start, stop)

    def shift(self, by: Sequence[int]) -> Box:
        """The box moved by ``by`` elements per axis."""
        return Box(
            tuple([a + d for a, d in zip(self.start, by, strict=True)]),
            tuple([b + d for b, d in zip(self.stop, by, strict=True)]),
        )

    def relative_to(self, origin: Sequence[int]) -> Box:
        """The same box in coordinates that begin at ``origin``."""
        return self.shift([-o for o in origin])

    def contains(self, other: Box) -> bool:
        return all(a <= c for a, c in zip(self.start, other.start, strict=True)) and all(
            d <= b for b, d in zip(self.stop, other.stop, strict=True)
        )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


@lru_cache(maxsize=65536)
def whole(shape: tuple[int, ...]) -> Box:
    """The box of a whole tensor. Cached: a checkpoint has few shapes and many tensors."""
    return Box((0,) * len(shape), shape)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)


def from_flat(start: int, stop: int, shape: Sequence[int]) -> list[Box]:
    """Boxes that hold the flat elements ``[start, stop)`` of a row-major tensor, in order.

    At most ``max(1, 2 * ndim - 1)`` boxes: a ragged head, one block, a ragged tail per axis.
    Raises ValueError when the range does not lie inside the tensor.
    """
    size = prod(shape)
    if not 0 <= start <= stop <= size:
        raise ValueError(f"flat range {start}:{stop} is outside a tensor of {size} elements")
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]

    def cut(lo: int, hi: int, axis: int) -> list[tuple[tuple[int, int], ...]]:
        if axis == len(shape) - 1:
            return [((lo, hi),)]
        row = prod(shape[axis + 1 :])
        first, head = divmod(lo, row)
        last, tail = divmod(hi, row)
        rest = tuple((0, n) for n in shape[axis + 1 :])
        if first == last:
            return [((first, first + 1), *b) for b in cut(head, tail, axis + 1)]
        out: list[tuple[tuple[int, int], ...]] = []
        if head:
            out += [((first, first + 1), *b) for b in cut(head, row, axis + 1)]
            first += 1
        if first < last:
            out.append(((first, last), *rest))
        if tail:
            out += [((last, last + 1), *b) for b in cut(0, tail, axis + 1)]
        return out

    return [Box(tuple(a for a, _ in b), tuple(z for _, z in b)) for b in cut(start, stop, 0)]


class BoxIndex:
    """Many boxes of one tensor, sorted along the axis that cuts them most, to find those near another one.

    For each of n boxes to look at n others took most of the time of a plan between saves of 1,000 ranks.
    """

    __slots__ = ("_axis", "_order", "_reach", "_starts")

    def __init__(self, boxes: Sequence[Box]) -> None:
        cuts = [len({b.start[axis] for b in boxes}) for axis in range(len(boxes[0].start))] if boxes else []
        self._axis = cuts.index(max(cuts)) if cuts else 0
        at = self._axis
        self._order = sorted(range(len(boxes)), key=lambda i: boxes[i].start[at]) if cuts else [*range(len(boxes))]
        self._starts = [boxes[i].start[at] for i in self._order] if cuts else []
        self._reach = list(accumulate([boxes[i].stop[at] for i in self._order], max)) if cuts else []
        """How far a box or one of those before it reaches."""

    def near(self, box: Box) -> Sequence[int]:
        """Numbers, ascending, of all boxes that share elements with ``box``, and of some that do not."""
        if not self._starts:
            return self._order
        first = bisect_right(self._reach, box.start[self._axis])
        return sorted(self._order[first : bisect_left(self._starts, box.stop[self._axis])])


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Indices of two boxes that share an element, or None. Empty boxes overlap nothing.

    Sorted by the first axis and swept, so a list of disjoint slabs costs n log n.
    """
    order = sorted((i for i, b in enumerate(boxes) if b.volume), key=lambda i: boxes[i].start)
    active: list[int] = []
    for i in order:
        box = boxes[i]
        if box.start:
            active = [j for j in active if boxes[j].stop[0] > box.start[0]]
        for j in active:
            if boxes[j].intersect(box) is not None:
                return (j, i)
        active.append(i)
    return None


def uncovered(shape: Sequence[int], boxes: Iterable[Box]) -> Box | None:
    """A box of the tensor that none of the (disjoint) ``boxes`` covers, or None when they cover everything."""
    boxes = [b for b in boxes if b.volume]
    total = prod(shape)
    if sum(b.volume for b in boxes) >= total:
        return None
    return _gap(Box((0,) * len(shape), tuple(shape)), boxes, 0)


def _gap(region: Box, boxes: Sequence[Box], axis: int) -> Box | None:
    """First gap, cutting ``region`` at every box edge of one axis after the other."""
    if not boxes:
        return region if region.volume else None
    if axis == len(region.start):
        return None
    lo, hi = region.start[axis], region.stop[axis]
    edges = sorted({lo, hi, *(e for b in boxes for e in (b.start[axis], b.stop[axis]) if lo < e < hi)})
    for a, b in pairwise(edges):
        slab = Box(
            (*region.start[:axis], a, *region.start[axis + 1 :]), (*region.stop[:axis], b, *region.stop[axis + 1 :])
        )
        inside = [x for x in boxes if x.start[axis] <= a and b <= x.stop[axis]]
        gap = _gap(slab, inside, axis + 1)
        if gap is not None:
            return gap
    return None
