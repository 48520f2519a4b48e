"""Tensors gathered by the layer and the module that their names speak of: the rows and columns of every sum that
``inspect``, its report and the report of a merge show.

What a sum is of, and how it is made, is the caller's: bytes are added, norms joined as the norm of all, and a change
is the norm of all differences by the norm of all that they are measured against.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ckpttool.core.tensor_names import SLOT, locate, templates

Positions = Sequence[int]
Join = Callable[[Positions], float | None]
"""What becomes of some of the tensors, by their positions among the names."""


class LayerRow(NamedTuple):
    """A layer, or what is outside of layers."""

    stack: str
    """``model.layers``; "" outside layers."""
    layer: int | None
    """None outside layers."""

    def label(self, *, alone: bool = True) -> str:
        """``layer 3``, or ``model.layers.3`` where there are other stacks; ``outside layers``."""
        if self.layer is None:
            return "outside layers"
        return f"layer {self.layer}" if alone else f"{self.stack}.{self.layer}"


@dataclass(frozen=True)
class Layers:
    """Tensors by layer (rows) and module (columns)."""

    rows: tuple[LayerRow, ...]
    """By stack in the order of the names, by number; what is outside of layers comes first."""
    modules: tuple[str, ...]
    """In the order of the names; without numbers, so that all experts of a layer are one."""
    cells: dict[tuple[int, int], list[int]]
    """(row, column) -> positions of the names in it."""

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Of the rows."""
        alone = len({r.stack for r in self.rows if r.layer is not None}) <= 1
        return tuple(r.label(alone=alone) for r in self.rows)

    def grid(self, join: Join) -> list[list[float | None]]:
        """The joined values, a list for each row; None where there is no tensor, or no value."""
        out: list[list[float | None]] = [[None] * len(self.modules) for _ in self.rows]
        for (row, column), at in self.cells.items():
            out[row][column] = join(at)
        return out

    def by_row(self, join: Join) -> list[float | None]:
        """One joined value for each layer."""
        tensors: list[list[int]] = [[] for _ in self.rows]
        for (row, _), at in self.cells.items():
            tensors[row] += at
        return [join(at) for at in tensors]


def by_layer(names: Sequence[str]) -> Layers:
    """Where each of the names belongs. They are names of parameters, without component and state in front or behind."""
    known: dict[str, tuple[str, str, bool]] = {}
    found: dict[tuple[str, int | None], dict[str, list[int]]] = {}
    modules: dict[str, int] = {}
    stacks: dict[str, int] = {"": -1}
    for at, (template, numbers) in enumerate(templates(names)):
        place = known.get(template)
        if place is None:
            where = locate(template.replace(SLOT, "0"))
            place = known[template] = (where.stack, where.module, where.layer is not None)
            modules.setdefault(where.module, len(modules))
            if where.layer is not None:
                stacks.setdefault(where.stack, len(stacks))
        stack, module, inside = place
        found.setdefault((stack, numbers[0] if inside else None), {}).setdefault(module, []).append(at)
    order = sorted(found, key=lambda r: (r[1] is not None, stacks.get(r[0], 0), r[1] or 0))
    cells = {(row, modules[m]): at for row, key in enumerate(order) for m, at in found[key].items()}
    return Layers(tuple(LayerRow(*key) for key in order), tuple(modules), cells)


# -- how values are joined


def norm(values: Sequence[float | None]) -> Join:
    """The norm of all elements together, of the norms of tensors."""
    return lambda at: math.hypot(*some) if (some := _known(values, at)) else None


def largest(values: Sequence[float | None]) -> Join:
    """The largest of them."""
    return lambda at: max(some) if (some := _known(values, at)) else None


def smallest(values: Sequence[float | None]) -> Join:
    """The smallest of them."""
    return lambda at: min(some) if (some := _known(values, at)) else None


def share(parts: Sequence[float | None], wholes: Sequence[float]) -> Join:
    """The share of elements: the sum of the parts by that of the wholes they are of."""

    def join(at: Positions) -> float | None:
        known = [(part, wholes[i]) for i in at if (part := parts[i]) is not None]
        whole = sum(w for _, w in known)
        return sum(p for p, _ in known) / whole if whole else None

    return join


def relative(gaps: Sequence[float | None], wholes: Sequence[float | None]) -> Join:
    """The norm of a difference by the norm of what it is measured against, of the squared norms of both.

    0 where nothing differs, infinite where something does from zeros.
    """

    def join(at: Positions) -> float | None:
        known = [(g, w) for i in at if (g := gaps[i]) is not None and (w := wholes[i]) is not None]
        gap, whole = sum(g for g, _ in known), sum(w for _, w in known)
        if not known or not gap:
            return 0.0 if known else None
        return math.sqrt(gap / whole) if whole else math.inf

    return join


def _known(values: Sequence[float | None], at: Positions) -> list[float]:
    return [v for i in at if (v := values[i]) is not None]
