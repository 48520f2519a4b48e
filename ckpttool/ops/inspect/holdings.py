"""Which rank holds which box of which tensor, one picture for each kind of tensor.

Tensors whose names differ only in numbers are drawn once: the numbers (layers, experts) that some ranks hold and
others do not become groups, and each group is one matrix cut into boxes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from ckpttool.core.catalog import Key, LogicalTensor
from ckpttool.core.geometry import Box
from ckpttool.core.tensor_names import SLOT, templates
from ckpttool.core.words import ranges
from ckpttool.ops.inspect.listing import Holders, TensorListing, holders_of, runs

Ranks = tuple[int, ...]
Which = tuple[tuple[str, tuple[int, ...]], ...]
"""Which of the numbers in a name: ``(("layers", (0, 1)), ("experts", (0, 1, 2)))``."""


class HeldBox(NamedTuple):
    """A box of a tensor and the ranks that hold it."""

    box: Box
    ranks: Ranks


@dataclass(frozen=True, slots=True)
class HoldingGroup:
    """Tensors that the same ranks hold in the same way."""

    which: Which
    """The numbers of the name that decide who holds it; () where none does."""
    count: int
    held: tuple[HeldBox, ...]

    @property
    def label(self) -> str:
        """``layers 0..15, experts 0..31``."""
        return ", ".join([f"{word} {ranges(numbers)}" for word, numbers in self.which])

    @property
    def ranks(self) -> Ranks:
        """All ranks that hold something of it."""
        return tuple(sorted({r for h in self.held for r in h.ranks}))


@dataclass(frozen=True, slots=True)
class Holding:
    """One kind of tensor and who holds it."""

    name: str
    """With the numbers collapsed."""
    dtype: str
    shape: tuple[int, ...]
    count: int
    groups: tuple[HoldingGroup, ...]
    padding: int
    """Elements of padding that the ranks store besides, in one of these tensors."""
    padded: Ranks = ()
    """The ranks that store some, in any of these tensors."""
    component: str = "model"
    state: str = ""
    """Of an optimizer."""

    @property
    def parameter(self) -> str:
        """What the tensors belong to, with the numbers collapsed; their own name for model weights."""
        if self.component == "model":
            return self.name
        return self.name.removeprefix(f"{self.component}/").removesuffix(f"/{self.state}" if self.state else "")

    @property
    def cut_axes(self) -> tuple[int, ...]:
        """Axes along which boxes differ."""
        axes = range(len(self.shape))
        return tuple(
            a for a in axes if any(h.box.stop[a] - h.box.start[a] != self.shape[a] for g in self.groups for h in g.held)
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """The whole picture."""

    mesh: str
    world: int
    holdings: tuple[Holding, ...]
    bytes_of_rank: dict[int, int]
    """Bytes of tensors that each rank stores, copies and padding included."""
    stages: tuple[tuple[Which, Ranks], ...] = ()
    """Ranks that hold the same layers, and which these are; () where all hold the same."""


_Pattern = tuple[str, tuple[int, ...], tuple[HeldBox, ...], int, Ranks]


def layout_of(listing: TensorListing) -> Layout:
    """Who holds the listed tensors. Raises LayoutError when ranks' tensors cannot be put together."""
    by_name = {str(t.key): t for t in listing.checkpoint().catalog}
    tensors = [by_name[r.name] for r in listing.rows]
    holders = holders_of(listing.stored)
    stored = dict.fromkeys(range(holders.world), 0)
    for s in runs(listing.stored):
        stored[holders.rank(s)] += s.nbytes
    kinds: dict[tuple[str, str, tuple[int, ...]], dict[_Pattern, list[tuple[int, ...]]]] = {}
    known: dict[tuple[object, ...], _Pattern] = {}
    keys: dict[str, Key] = {}
    for (template, numbers), tensor in zip(templates([str(t.key) for t in tensors]), tensors, strict=True):
        raw = _raw_pattern(tensor, holders)
        pattern = known.get(raw)
        if pattern is None:
            pattern = known[raw] = _pattern(tensor, holders)
        keys[template] = tensor.key
        kinds.setdefault((template, tensor.dtype, tensor.shape), {}).setdefault(pattern, []).append(numbers)
    holdings = []
    layers: dict[str, dict[int, set[int]]] = {}
    for (template, dtype, shape), patterns in kinds.items():
        for (_, _, held, *_), alike in patterns.items() if SLOT in template else ():
            mine = layers.setdefault(_words(template)[0], {})
            for rank in {r for h in held for r in h.ranks}:
                mine.setdefault(rank, set()).update({n[0] for n in alike})
        everything = [n for alike in patterns.values() for n in alike]
        slots = _slots(everything)
        groups = []
        for (_, _, held, *_), alike in patterns.items():
            groups += [HoldingGroup(which, count, held) for which, count in _decisive(template, alike, slots)]
        padding = max(p[3] for p in patterns)
        padded = tuple(sorted({r for p in patterns for r in p[4]}))
        name = _fill(template, slots)
        key, n = keys[template], len(everything)
        holdings.append(Holding(name, dtype, shape, n, tuple(groups), padding, padded, key.component, key.state))
    return Layout(holders.text, holders.world, tuple(holdings), stored, _stages(layers, holders.world))


def _stages(layers: dict[str, dict[int, set[int]]], world: int) -> tuple[tuple[Which, Ranks], ...]:
    """Ranks by the layers that they hold something of, in the order of the ranks."""
    telling = {w: mine for w, mine in layers.items() if any(mine.get(r) != mine.get(0) for r in range(world))}
    found: dict[Which, list[int]] = {}
    for rank in range(world):
        which = tuple((word, tuple(sorted(mine[rank]))) for word, mine in telling.items() if rank in mine)
        found.setdefault(which, []).append(rank)
    return tuple((which, tuple(mine)) for which, mine in found.items()) if len(found) > 1 else ()


def _raw_pattern(tensor: LogicalTensor, holders: Holders) -> tuple[object, ...]:
    """Equal for tensors that are held alike; cheap."""
    pieces = tuple([(p.logical_box, holders.rank(p.stored)) for p in tensor.pieces])
    copies = [(p.logical_box, holders.rank(p.stored)) for p in tensor.replicas]
    return (tensor.dtype, tensor.shape, pieces, *copies, *[p.stored_box for p in tensor.pads])


def _pattern(tensor: LogicalTensor, holders: Holders) -> _Pattern:
    owners: dict[Box, set[int]] = {}
    for p in (*tensor.pieces, *tensor.replicas):
        if not p.logical_box.volume:
            continue  # of an empty tensor
        owners.setdefault(p.logical_box, set()).add(holders.rank(p.stored))
    held = merge([HeldBox(box, tuple(sorted(ranks))) for box, ranks in owners.items()])
    padded = tuple(sorted({holders.rank(p.stored) for p in tensor.pads}))
    return (tensor.dtype, tensor.shape, tuple(held), sum(p.stored_box.volume for p in tensor.pads), padded)


def merge(held: Iterable[HeldBox]) -> list[HeldBox]:
    """Join neighbouring boxes of the same ranks, so that what is drawn is what is cut."""
    out = sorted(held, key=lambda h: h.box.start)
    for axis in range(len(out[0].box.start) if out else 0):
        rows: dict[tuple[object, ...], list[HeldBox]] = {}
        for h in out:
            other = (h.box.start[:axis], h.box.stop[:axis], h.box.start[axis + 1 :], h.box.stop[axis + 1 :], h.ranks)
            line = rows.setdefault(other, [])
            if line and line[-1].box.stop[axis] == h.box.start[axis]:
                line[-1] = HeldBox(Box(line[-1].box.start, h.box.stop), h.ranks)
            else:
                line.append(h)
        out = sorted((h for line in rows.values() for h in line), key=lambda h: h.box.start)
    return out


def _slots(numbers: list[tuple[int, ...]]) -> list[frozenset[int]]:
    """The values that occur in each slot."""
    return [frozenset(n) for n in zip(*numbers, strict=True)]


def _fill(template: str, slots: list[frozenset[int]]) -> str:
    parts = template.split(SLOT)
    out = parts[0]
    for slot, text in zip(slots, parts[1:], strict=True):
        out += ("{" + ranges(slot) + "}" if len(slot) > 1 else str(next(iter(slot)))) + text
    return out


def _words(template: str) -> list[str]:
    """What is numbered: ``layers``, ``experts``."""
    return [part.rstrip(".").rpartition(".")[2] for part in template.split(SLOT)[:-1]]


def _decisive(template: str, numbers: list[tuple[int, ...]], slots: list[frozenset[int]]) -> list[tuple[Which, int]]:
    """What tells these tensors from the others of their kind; several when no product of ranges does."""
    found = _slots(numbers)
    if prod(len(s) for s in found) == len(numbers):
        products = [found]
    else:
        rest: dict[frozenset[tuple[int, ...]], list[int]] = {}
        by_first: dict[int, list[tuple[int, ...]]] = {}
        for n in numbers:
            by_first.setdefault(n[0], []).append(n[1:])
        for first, tails in by_first.items():
            rest.setdefault(frozenset(tails), []).append(first)
        products = []
        for tails_set, firsts in rest.items():
            tails = list(tails_set)
            if prod(len(s) for s in _slots(tails)) == len(tails):
                products.append([frozenset(firsts), *_slots(tails)])
            else:
                products += [[frozenset(firsts), *(frozenset([n]) for n in tail)] for tail in tails]
    out = []
    for values in products:
        named = zip(_words(template), values, slots, strict=True)
        which = tuple((word, tuple(sorted(v))) for word, v, every in named if v != every)
        out.append((which, prod(len(v) for v in values)))
    return out


def grid(
    held: tuple[HeldBox, ...], axes: tuple[int, ...]
) -> tuple[list[list[int]], list[tuple[tuple[int, ...], Ranks]]]:
    """Edges along each of ``axes`` and the ranks of each cell between them, cells without an owner left out."""
    edges = [sorted({e for h in held for e in (h.box.start[a], h.box.stop[a])}) for a in axes]
    cells = []
    for index in product(*(range(len(e) - 1) for e in edges)):
        for h in held:
            if all(
                h.box.start[a] <= edges[i][n] and edges[i][n + 1] <= h.box.stop[a]
                for i, (a, n) in enumerate(zip(axes, index, strict=True))
            ):
                cells.append((index, h.ranks))
                break
    return edges, cells
