"""How far two checkpoints are apart, by layer and by module: what training, or a merge, has changed most.

The change of several tensors together is relative: the norm of all their differences by the norm of all of OTHER's
tensors. So a layer counts as a whole, and a small tensor in it does not stand for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isnan, sqrt
from typing import NamedTuple

from ckpttool.catalog import COMPONENTS
from ckpttool.names import Location, locate


class Apart(NamedTuple):
    """A tensor of both sides."""

    name: str
    gap2: float | None
    """Square of the norm of the difference; None for elements smaller than a byte."""
    norm2: float | None
    """Square of the norm of OTHER's tensor."""
    changed: bool


class Drifted(NamedTuple):
    """A layer, a module, or a module of one layer."""

    name: str
    """``model.layers.3``; ``mlp.up_proj``; of what is in no layer the module, such as ``lm_head``."""
    relative: float | None
    """Norm of the difference by the norm of OTHER; None where elements are smaller than a byte."""
    tensors: int
    """Those whose elements were compared."""
    changed: int
    """Those that differ."""


class Drift(NamedTuple):
    """The largest change first, in both lists; what has not changed at all is in neither."""

    component: str
    """Of whose tensors this is: the model, if it was compared."""
    layers: list[Drifted]
    modules: list[Drifted]
    cells: dict[tuple[str, str], float | None]
    """(layer, module) -> relative change, where there is one; names as in the lists."""


class _Sum:
    """What is known of a group of tensors."""

    __slots__ = ("changed", "gap2", "known", "norm2", "tensors")

    def __init__(self) -> None:
        self.gap2 = self.norm2 = 0.0
        self.tensors = self.changed = 0
        self.known = True

    def add(self, tensor: Apart) -> None:
        self.tensors += 1
        self.changed += tensor.changed
        if tensor.gap2 is None or tensor.norm2 is None:
            self.known = False
        else:
            self.gap2 += tensor.gap2
            self.norm2 += tensor.norm2

    @property
    def relative(self) -> float | None:
        if not self.known:
            return None
        if not self.norm2:
            return float("inf") if self.gap2 else 0.0
        return sqrt(self.gap2) / sqrt(self.norm2)


def place(name: str, component: str) -> Location | None:
    """Where a compared tensor is; None for one of another component."""
    if component != "model":
        return locate(name[len(component) + 1 :]) if name.startswith(f"{component}/") else None
    return None if name.partition("/")[0] in COMPONENTS else locate(name)


def layer_of(at: Location) -> str:
    """The layer, as it is shown; of what is in no layer the module, which is as large."""
    return at.module if at.layer is None else f"{at.stack}.{at.layer}" if at.stack else str(at.layer)


def drift(component: str, tensors: Iterable[Apart]) -> Drift:
    """The changes of the tensors of a component, added up."""
    layers: dict[str, _Sum] = {}
    modules: dict[str, _Sum] = {}
    cells: dict[tuple[str, str], _Sum] = {}
    for tensor in tensors:
        at = place(tensor.name, component)
        if at is None:
            continue
        layer = layer_of(at)
        for sums in (
            layers.setdefault(layer, _Sum()),
            modules.setdefault(at.module, _Sum()),
            cells.setdefault((layer, at.module), _Sum()),
        ):
            sums.add(tensor)
    return Drift(component, _ranked(layers), _ranked(modules), {k: v.relative for k, v in cells.items() if v.changed})


def _ranked(sums: Mapping[str, _Sum]) -> list[Drifted]:
    found = [Drifted(name, s.relative, s.tensors, s.changed) for name, s in sums.items() if s.changed]
    return sorted(found, key=_size, reverse=True)


def _size(drifted: Drifted) -> float:
    """What is not a number, or not known, comes before every number."""
    return float("inf") if drifted.relative is None or isnan(drifted.relative) else drifted.relative
