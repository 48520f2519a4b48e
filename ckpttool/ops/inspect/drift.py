"""How far two checkpoints are apart, by layer and by module: what training, or a merge, has changed most.

The change of several tensors together is relative: the norm of all their differences by the norm of all of B's
tensors. So a layer counts as a whole, and a small tensor in it does not stand for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isnan
from typing import NamedTuple

from ckpttool.answers.by_layer import by_layer, relative
from ckpttool.core.catalog import COMPONENTS
from ckpttool.core.tensor_names import Location, locate


class Apart(NamedTuple):
    """A tensor of both sides."""

    name: str
    gap2: float | None
    """Square of the norm of the difference; None for elements smaller than a byte."""
    norm2: float | None
    """Square of the norm of B's tensor."""
    changed: bool


class Drifted(NamedTuple):
    """A layer, a module, or a module of one layer."""

    name: str
    """``model.layers.3``; ``mlp.up_proj``; of what is in no layer the module, such as ``lm_head``."""
    relative: float | None
    """Norm of the difference by the norm of B; None where elements are smaller than a byte."""
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


def parameter(name: str, component: str) -> str:
    """A compared tensor's name without its component, as it is located; "" for one of another component."""
    if component != "model":
        return name[len(component) + 1 :] if name.startswith(f"{component}/") else ""
    return "" if name.partition("/")[0] in COMPONENTS else name


def place(name: str, component: str) -> Location | None:
    """Where a compared tensor is; None for one of another component."""
    own = parameter(name, component)
    return locate(own) if own else None


def layer_of(at: Location) -> str:
    """The layer, as it is shown; of what is in no layer the module, which is as large."""
    return at.module if at.layer is None else f"{at.stack}.{at.layer}" if at.stack else str(at.layer)


def drift(component: str, tensors: Iterable[Apart]) -> Drift:
    """The changes of the tensors of a component, added up."""
    named = [(name, t) for t in tensors if (name := parameter(t.name, component))]
    mine = [t for _, t in named]
    found = by_layer([name for name, _ in named])
    layers: dict[str, list[int]] = {}
    modules: dict[str, list[int]] = {}
    cells: dict[tuple[str, str], list[int]] = {}
    for (row, column), at in found.cells.items():
        module = found.modules[column]
        layer = layer_of(Location(*found.rows[row], module))
        layers.setdefault(layer, []).extend(at)
        modules.setdefault(module, []).extend(at)
        cells.setdefault((layer, module), []).extend(at)

    def ranked(groups: Mapping[str, list[int]]) -> list[Drifted]:
        rows = [Drifted(name, change(at), len(at), sum(mine[i].changed for i in at)) for name, at in groups.items()]
        return sorted([row for row in rows if row.changed], key=_size, reverse=True)

    joined = relative([t.gap2 for t in mine], [t.norm2 for t in mine])

    def change(at: Sequence[int]) -> float | None:
        return None if any(mine[i].gap2 is None for i in at) else joined(at)

    changes = {key: change(at) for key, at in cells.items() if any(mine[i].changed for i in at)}
    return Drift(component, ranked(layers), ranked(modules), changes)


def _size(drifted: Drifted) -> float:
    """What is not a number, or not known, comes before every number."""
    return float("inf") if drifted.relative is None or isnan(drifted.relative) else drifted.relative
