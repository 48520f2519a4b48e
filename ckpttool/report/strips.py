"""Who holds what, ready to be drawn: what is cut alike stands once, as strips of cells, and what repeats is folded.

A strip is a tensor along the axis that is cut, or the experts (layers) of one kind side by side; a cell is what the
same ranks hold. Sixty-four equal cells that go to one rank after the other become the first two, one that stands for
those between, and the last. Pure: nothing here knows how wide a letter is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import prod
from typing import NamedTuple, TypeVar

from ckpttool.core.dtypes import nbytes
from ckpttool.core.words import count, ranges
from ckpttool.ops.inspect.holdings import HeldBox, Holding, HoldingGroup, Layout, Ranks, Which

T = TypeVar("T")

HEAD, TAIL = 2, 1
"""What stays of a fold at its beginning and at its end."""


class StripCell(NamedTuple):
    """What the same ranks hold."""

    ranks: Ranks
    word: str
    """What ``span`` counts: "experts"; "" for places along an axis."""
    span: tuple[int, ...]
    """Start and stop along the axis; or the numbers of the experts."""
    share: Fraction
    """Of the strip."""
    folds: int = 0
    """Cells that this one stands for; 0 for one that is itself."""

    @property
    def note(self) -> str:
        """``0:22``, ``experts 0..3``; "" for a rank itself."""
        if not self.span:
            return ""
        return f"{self.word} {ranges(self.span)}" if self.word else f"{self.span[0]:,}:{self.span[1]:,}"


class LayoutStrip(NamedTuple):
    """Cells side by side."""

    which: Which
    """The layers or experts that it is about; () for all."""
    place: str
    """Where it lies along the other axes that are cut, ``axis 0 0:8``; "" where there are none."""
    cells: tuple[StripCell, ...]
    folds: int = 0
    """Strips that this one stands for."""

    @property
    def label(self) -> str:
        named = [f"{word} {ranges(numbers)}" for word, numbers in self.which]
        return ", ".join([*named, *([self.place] if self.place else [])])

    @property
    def ranks(self) -> Ranks:
        return tuple(sorted({r for c in self.cells for r in c.ranks}))


@dataclass(frozen=True, slots=True)
class StripCard:
    """Kinds of tensor that are cut alike."""

    title: str
    strips: tuple[LayoutStrip, ...]
    axes: tuple[int, ...]
    """That are cut."""
    kinds: tuple[Holding, ...]
    """Most bytes first."""
    nbytes: int
    """Of all these tensors, each whole and once."""

    @property
    def tensors(self) -> int:
        return sum(h.count for h in self.kinds)

    @property
    def same_edges(self) -> bool:
        """Whether the places of the cells are those of every kind."""
        return len({h.shape for h in self.kinds}) == 1


def cards(layout: Layout) -> list[StripCard]:
    """A card for each way of being held, most bytes first."""
    found: dict[tuple[object, ...], tuple[tuple[LayoutStrip, ...], list[Holding]]] = {}
    for h in layout.holdings:
        strips = strips_of(h)
        shape = tuple((s.which, s.place, tuple((c.ranks, c.word, c.share) for c in s.cells)) for s in strips)
        found.setdefault((h.cut_axes, shape), (strips, []))[1].append(h)
    out = []
    for strips, kinds in found.values():
        kinds.sort(key=lambda h: -_nbytes(h))
        title = _title(strips, kinds[0], layout.world)
        total = sum(map(_nbytes, kinds))
        out.append(
            StripCard(title, strips if len(kinds) == 1 else strips_of(kinds[0]), kinds[0].cut_axes, tuple(kinds), total)
        )
    return sorted(out, key=lambda c: -c.nbytes)


def stage_strips(layout: Layout) -> tuple[LayoutStrip, ...]:
    """The ranks themselves: a strip for those that hold the same layers, or one for all."""
    out = []
    for which, owners in layout.stages or (((), tuple(range(layout.world))),):
        cells = tuple(StripCell((r,), "", (), Fraction(1, len(owners))) for r in owners)
        out.append(LayoutStrip(which, "", cells))
    return tuple(out)


def _nbytes(holding: Holding) -> int:
    return holding.count * nbytes(holding.dtype, prod(holding.shape))


def _title(strips: Sequence[LayoutStrip], kind: Holding, world: int) -> str:
    owners = tuple(sorted({r for s in strips for r in s.ranks}))
    if not owners:
        return "Empty, on no rank"
    title, single = _how(strips, kind), len(strips) == 1 and len(strips[0].cells) == 1
    if len(owners) < world or world == 1:
        return f"{title} {'on' if single else 'over'} {ranks_named(owners)}"
    return f"{title} on every rank" if single else title


def _how(strips: Sequence[LayoutStrip], kind: Holding) -> str:
    axes = kind.cut_axes
    if axes:
        if any(s.place == FLAT for s in strips):
            return "Cut into runs of elements"
        if len(axes) > 1:
            return "Cut along axes " + " and ".join(map(str, axes))
        word = {0: " (rows)", 1: " (columns)"}[axes[0]] if len(kind.shape) == 2 else ""
        parts = {len(s.cells) for s in strips}
        return f"Cut along axis {axes[0]}{word}" + (f" into {parts.pop()} parts" if len(parts) == 1 else "")
    words = dict.fromkeys([w for s in strips for w, _ in s.which] + [c.word for s in strips for c in s.cells if c.word])
    return "Whole" + (", by " + " and ".join(words) if words else "")


FLAT = "in row-major order"


def strips_of(holding: Holding) -> tuple[LayoutStrip, ...]:
    """A strip for each group of a kind, and for each place along other axes that are cut."""
    axes, groups = holding.cut_axes, holding.groups
    if not axes and len(groups) > 1 and all(g.which for g in groups):
        rows: dict[Which, list[StripCell]] = {}
        for g in groups:
            word, numbers = g.which[-1]
            rows.setdefault(g.which[:-1], []).append(StripCell(g.ranks, word, numbers, Fraction(len(numbers))))
        return tuple(
            LayoutStrip(which, "", _shares(sorted(cells, key=lambda c: c.span))) for which, cells in rows.items()
        )
    return tuple(strip for g in groups for strip in _of_group(g, holding.shape, axes))


def _shares(cells: Sequence[StripCell]) -> tuple[StripCell, ...]:
    total = sum(c.share for c in cells)
    return tuple(c._replace(share=c.share / total) for c in cells)


def _of_group(group: HoldingGroup, dims: tuple[int, ...], all_axes: tuple[int, ...]) -> list[LayoutStrip]:
    """The strips of a group; ``all_axes`` are those that some group of its kind is cut along."""
    axes = [a for a in all_axes if any(h.box.stop[a] - h.box.start[a] != dims[a] for h in group.held)]
    if not axes:
        cells = tuple(StripCell(h.ranks, "", (0, prod(dims)), Fraction(1)) for h in group.held)
        return [LayoutStrip(group.which, "whole" if all_axes else "", cells)]
    along = max(axes, key=lambda a: len({h.box.start[a] for h in group.held}))
    others = [a for a in axes if a != along]
    runs = _runs(group.held, dims) if others else []
    if runs and len(runs) < len(group.held):
        return [LayoutStrip(group.which, FLAT, tuple(runs))]
    out = []
    for place, held in _rows(group.held, others):
        spans = sorted((h.box.start[along], h.box.stop[along], h.ranks) for h in held)
        cells = tuple(StripCell(owners, "", (a, b), Fraction(b - a, dims[along])) for a, b, owners in spans)
        out.append(LayoutStrip(group.which, place or (f"along axis {along}" if len(all_axes) > 1 else ""), cells))
    return out


def _rows(held: Sequence[HeldBox], axes: Sequence[int]) -> Iterator[tuple[str, Sequence[HeldBox]]]:
    """The places along ``axes`` between all edges of boxes, and the boxes that are there: so no row has a hole."""
    if not axes:
        yield "", held
        return
    axis, *rest = axes
    begin: dict[int, list[HeldBox]] = {}
    for h in held:
        begin.setdefault(h.box.start[axis], []).append(h)
    active: list[HeldBox] = []
    for start, stop in pairwise(sorted({e for h in held for e in (h.box.start[axis], h.box.stop[axis])})):
        active = [h for h in active if h.box.stop[axis] > start] + begin.get(start, [])
        for place, inner in _rows(active, rest):
            yield ", ".join([f"axis {axis} {start:,}:{stop:,}", *([place] if place else [])]), inner


def _runs(held: Iterable[HeldBox], dims: tuple[int, ...]) -> list[StripCell]:
    """The boxes as runs of elements in row-major order; [] where one of them is not such a run."""
    total, found = prod(dims), []
    for h in held:
        sizes = [b - a for a, b in zip(h.box.start, h.box.stop, strict=True)]
        first = next((i for i, n in enumerate(sizes) if n > 1), len(dims))
        if any(n != d for n, d in zip(sizes[first + 1 :], dims[first + 1 :], strict=True)):
            return []
        start = 0
        for a, d in zip(h.box.start, dims, strict=True):
            start = start * d + a
        found.append((start, start + prod(sizes), h.ranks))
    out: list[StripCell] = []
    for start, stop, owners in sorted(found):
        joined = bool(out) and out[-1].ranks == owners and out[-1].span[1] == start
        begin = out.pop().span[0] if joined else start
        out.append(StripCell(owners, "", (begin, stop), Fraction(stop - begin, total)))
    return out


def _step(first: StripCell, second: StripCell) -> int | None:
    """How much further on the ranks of the second are, where it is the first one again; None where it is not."""
    steps = {b - a for a, b in zip(first.ranks, second.ranks, strict=False)}
    near = abs(first.share - second.share) * 4 <= first.share  # a rest makes one a little larger
    same = len(first.ranks) == len(second.ranks) and first.word == second.word and near and len(steps) == 1
    return steps.pop() if same else None


def folded(cells: Sequence[StripCell], fits: Callable[[Sequence[StripCell]], bool]) -> tuple[StripCell, ...]:
    """The cells, with series of alike ones folded, where they do not fit; whatever is too many even so, too."""
    if fits(cells):
        return tuple(cells)
    out: list[StripCell] = []
    for run in _series(cells, _step):
        keep = len(run) <= HEAD + TAIL + 1
        out += run if keep else [*run[:HEAD], _fold(run[HEAD:-TAIL]), *run[-TAIL:]]
    if fits(out):
        return tuple(out)

    def first(head: int) -> list[StripCell]:
        return [*cells[:head], _fold(cells[head:-TAIL]), *cells[-TAIL:]]

    too_many = bisect_left(range(1, len(cells) - TAIL), 1, key=lambda head: not fits(first(head)))
    return tuple(first(too_many))


def _fold(cells: Sequence[StripCell]) -> StripCell:
    owners = tuple(sorted({r for c in cells for r in c.ranks}))
    word = cells[0].word
    span = tuple(n for c in cells for n in c.span)
    span = span if word else span[:1] + span[-1:]
    n = sum(max(c.folds, 1) for c in cells)
    return StripCell(owners, word, span, sum((c.share for c in cells), Fraction()), n)


def folded_strips(strips: Sequence[LayoutStrip], most: int) -> tuple[LayoutStrip, ...]:
    """The strips, with series of alike ones folded, where they are more than ``most``."""
    if len(strips) <= most:
        return tuple(strips)
    out: list[LayoutStrip] = []
    for run in _series(strips, _step_of_strips):
        out += run if len(run) <= HEAD + TAIL + 1 else [*run[:HEAD], _fold_strips(run[HEAD:-TAIL]), *run[-TAIL:]]
    if len(out) > 2 * most:
        out = [*strips[:most], _fold_strips(strips[most:-TAIL]), *strips[-TAIL:]]
    return tuple(out)


def _step_of_strips(first: LayoutStrip, second: LayoutStrip) -> int | None:
    if first.which[:-1] != second.which[:-1] or len(first.cells) != len(second.cells):
        return None
    steps = {_step(a, b) for a, b in zip(first.cells, second.cells, strict=True)}
    return steps.pop() if len(steps) == 1 else None


def _fold_strips(strips: Sequence[LayoutStrip]) -> LayoutStrip:
    """One strip for several; its cell has all their ranks."""
    first = strips[0].which
    which: Which = ()
    if first and all(s.which[:-1] == first[:-1] for s in strips):
        word = first[-1][0]
        which = (*first[:-1], (word, tuple(sorted({n for s in strips for n in s.which[-1][1]}))))
    owners = tuple(sorted({r for s in strips for r in s.ranks}))
    return LayoutStrip(which, "", (StripCell(owners, "", (0, 0), Fraction(1), len(strips)),), len(strips))


def _series(items: Sequence[T], step: Callable[[T, T], int | None]) -> list[list[T]]:
    """Runs of neighbours that follow each other by the same step."""
    out: list[list[T]] = []
    last: int | None = None
    for item in items:
        found = step(out[-1][-1], item) if out else None
        if found is not None and (len(out[-1]) == 1 or found == last):
            out[-1].append(item)
            last = found
        else:
            out.append([item])
    return out


def ranks_short(numbers: Ranks, most: int = 24) -> str:
    """``0-7``; ``0,4,..,60`` for every fourth; the first and how many where a list would be long."""
    if not numbers:
        return "no rank"
    text = ranges(numbers, "-")
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) > 4 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]},{numbers[1]},..,{numbers[-1]}"
    if len(text) > most:
        head = text[:most].rpartition(",")[0] or text[:most]
        return f"{head},.. ({len(numbers)})"
    return text


def ranks_named(numbers: Ranks) -> str:
    """``rank 3``, ``ranks 0-7``."""
    return f"rank {numbers[0]}" if len(numbers) == 1 else ("ranks " if numbers else "") + ranks_short(numbers)


def part(holding: Holding) -> str:
    """What one rank holds of such a tensor: ``[22, 64]``, ``2 x [12, 16]``, ``[32, 64] or [33, 64]``; "" for all."""
    if not holding.cut_axes:
        return ""
    found: dict[tuple[tuple[int, ...], ...], None] = {}
    for group in holding.groups:
        mine: dict[int, list[tuple[int, ...]]] = {}
        for h in group.held:
            size = tuple(b - a for a, b in zip(h.box.start, h.box.stop, strict=True))
            for r in h.ranks:
                mine.setdefault(r, []).append(size)
        found |= dict.fromkeys(tuple(sorted(sizes)) for sizes in mine.values())
    if any(len(set(sizes)) > 1 for sizes in found) or len(found) > 2:
        elements = [sum(map(prod, sizes)) for sizes in found]
        low, high = min(elements), max(elements)
        return f"{low:,} to {high:,} elements" if low < high else count(low, "element")
    return " or ".join((f"{len(s)} x " if len(s) > 1 else "") + f"[{', '.join(map(str, s[0]))}]" for s in found)
