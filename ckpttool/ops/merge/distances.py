"""How far a merge is from its parents, by tensor; sums of many tensors are made of these numbers.

y is a tensor of the output, x a parent's operand for it, b the base's: as float32, dequantized, with its adapters, and
with rows in the order of the output's vocabulary. d = x - b is the parent's task vector. p is what the method lets the
parent add: see ``ckpttool.kernels.merge.measure``. All numbers are of the elements of a tensor, or of all elements of
several:

    distance      |y - x| / |x|           L2 norms; 0 where nothing differs, infinite where something does from zeros
    cosine        y.x / (|y| |x|)         None where one of them is zeros
    task_cosine   (y - b).d / (|y - b| |d|)
    changed       share of the elements with d != 0
    kept          share of the elements with p != 0
    agreeing      of the elements with p != 0, the share whose sign is the elected one
    conflicts     share of the elements where one parent's p is positive and another's negative
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckpttool.answers.by_layer import Join, Positions, relative, share
from ckpttool.core.tensor_names import natural_order
from ckpttool.kernels.merge.measure import Measured

Known = list[float | None]
"""One number for each tensor; None where there is none."""

NUMBERS = ("distance", "cosine", "task_cosine", "changed", "kept", "agreeing")
"""Figures of a parent."""


@dataclass
class ParentDistances:
    """How far the merge is from one parent, tensor by tensor."""

    label: str
    is_base: bool = False
    gaps: Known = field(default_factory=list)
    norms: Known = field(default_factory=list)
    dots: Known = field(default_factory=list)
    task_norms: Known = field(default_factory=list)
    task_dots: Known = field(default_factory=list)
    changed: Known = field(default_factory=list)
    kept: Known = field(default_factory=list)
    agreeing: Known = field(default_factory=list)

    def add(self, one: Measured | None, at: int) -> None:
        """The next tensor, in which the parent is operand ``at``; ``one`` is None where it has no part."""
        for name in ("gaps", "norms", "dots", "task_norms", "task_dots", "changed", "kept", "agreeing"):
            values = getattr(one, name) if one is not None else ()
            getattr(self, name).append(values[at] if 0 <= at < len(values) else None)


class Distances:
    """The output beside its parents. ``names`` are in natural order; whatever has one entry for each tensor follows."""

    def __init__(
        self, found: Mapping[str, Measured], operands: Mapping[str, Sequence[tuple[str, str]]], labels: Sequence[str]
    ) -> None:
        """``operands`` are the labels of the parents of each tensor, the models first; ``labels`` all of them."""
        listed = list(found)
        self.names = [listed[i] for i in natural_order(listed)]
        measured = [found[n] for n in self.names]
        self.elements = [m.elements for m in measured]
        self.squares: Known = [m.squares for m in measured]
        """sum y^2"""
        self.moved: Known = [m.gaps[-1] if m.task_norms else None for m in measured]
        """sum (y - b)^2"""
        self.conflicting: Known = [m.conflicts for m in measured]
        self.parents = [ParentDistances(label) for label in labels]
        for name, one in zip(self.names, measured, strict=True):
            places: dict[str, int] = {}
            for i, (label, _) in enumerate(operands[name][: len(one.gaps)]):
                places.setdefault(label, i)
            for parent in self.parents:
                at = places.get(parent.label, -1)
                parent.add(one if at >= 0 else None, at)
                parent.is_base = parent.is_base or (bool(one.task_norms) and at == len(one.task_norms))

    @property
    def everything(self) -> range:
        """Positions of all tensors."""
        return range(len(self.names))

    def joins(self, parent: ParentDistances) -> dict[str, Join]:
        """How each of ``NUMBERS`` is worked out for some tensors; without those that the parent or method has not."""
        found = {
            "distance": relative(parent.gaps, parent.norms),
            "cosine": _cosine(parent.dots, self.squares, parent.norms),
        }
        if any(n is not None for n in parent.task_norms):
            found["task_cosine"] = _cosine(parent.task_dots, self.moved, parent.task_norms)
            found["changed"] = share(parent.changed, self.elements)
        if any(n is not None for n in parent.kept):
            found["kept"] = share(parent.kept, self.elements)
        if any(n is not None for n in parent.agreeing):
            found["agreeing"] = _share_of(parent.agreeing, parent.kept)
        return found

    @property
    def conflicts(self) -> Join | None:
        """How the share of conflicts is worked out; None where parents cannot contradict each other."""
        if all(n is None for n in self.conflicting):
            return None
        return share(self.conflicting, self.elements)

    def summary(self) -> dict[str, object]:
        """The numbers of the whole merge, as plain data: None for what is not known or not finite."""
        conflicts = self.conflicts
        return {
            "tensors": len(self.names),
            "elements": sum(self.elements),
            "conflicts": _finite(conflicts(self.everything)) if conflicts else None,
            "parents": [
                {
                    "source": parent.label,
                    "base": parent.is_base,
                    **{name: _finite(join(self.everything)) for name, join in self.joins(parent).items()},
                }
                for parent in self.parents
            ],
        }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _cosine(dots: Known, ones: Known, others: Known) -> Join:
    """The cosine of two tensors, or of several put together, of dot products and squared norms."""

    def join(at: Positions) -> float | None:
        known = [
            (d, a, b)
            for i in at
            if (d := dots[i]) is not None and (a := ones[i]) is not None and (b := others[i]) is not None
        ]
        norms = math.sqrt(sum(a for _, a, _ in known)) * math.sqrt(sum(b for _, _, b in known))
        if not norms:
            return None
        found = sum(d for d, _, _ in known) / norms
        # Rounding may lead a hair beyond what a cosine can be; NaN stays NaN.
        return found if math.isnan(found) else max(-1.0, min(1.0, found))

    return join


def _share_of(parts: Known, wholes: Known) -> Join:
    def join(at: Positions) -> float | None:
        known = [(p, w) for i in at if (p := parts[i]) is not None and (w := wholes[i]) is not None]
        whole = sum(w for _, w in known)
        return sum(p for p, _ in known) / whole if whole else None

    return join
