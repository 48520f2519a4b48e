"""How the weights of a run move from checkpoint to checkpoint: norms, changes, elements that are not finite.

One checkpoint is read at a time, twice where it is compared with the one before. What stays in memory of it are sums by
layer and module; histograms are kept of the first and the last one, of the tensors that changed most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import hypot, isfinite, sqrt
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.answers.by_layer import by_layer, norm
from ckpttool.core.catalog import Catalog
from ckpttool.core.tensor_names import Location
from ckpttool.errors import AccessError, CkptError, UsageError
from ckpttool.execute import Progress
from ckpttool.kernels.stats import Stats
from ckpttool.ops.inspect.diff import DiffResult, diff
from ckpttool.ops.inspect.drift import layer_of
from ckpttool.ops.inspect.listing import TensorChoice, TensorListing, list_tensors, logical_rows
from ckpttool.ops.inspect.runs import RunListing, SavedCheckpoint, pick_save
from ckpttool.ops.inspect.values import Values, WantedValues, measure, measure_rows

if TYPE_CHECKING:
    from ckpttool.core.files import Place
    from ckpttool.execute.fleets.base import Fleet
    from ckpttool.formats.base import OpenOptions

MEASURED = 100
"""Most checkpoints of a run that are read; of more, so many at even distances, with the first and the last."""
OVERLAID = 2_000
"""Most tensors with histograms of both sides: those that changed most."""
NAMED = 20
"""Most tensors that are named because they have NaN or infinities."""

Pairs = Mapping[str, tuple[Values, Values]]
"""By name, statistics and histogram of a tensor on the left and on the right side."""


class MeasuredStep(NamedTuple):
    """A checkpoint of a run."""

    name: str
    step: int | None
    norm: float
    """L2 norm of all finite elements."""
    layers: Mapping[str, float]
    """L2 norm of each layer; what is in no layer is one by its module."""
    modules: Mapping[str, float]
    """L2 norm of each module in all layers."""
    nan: int
    inf: int
    broken: Sequence[str]
    """Names of tensors that have NaN or infinities, the first ``NAMED`` of them."""
    change: float | None = None
    """Norm of the difference from the checkpoint before, divided by that one's norm; None for the first one."""
    layer_changes: Mapping[str, float | None] = {}
    module_changes: Mapping[str, float | None] = {}
    """The same by layer and by module; what is in neither has not changed."""


@dataclass(slots=True)
class RunHistory:
    """What was read of a run."""

    component: str = "model"
    steps: list[MeasuredStep] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    """Elements of each module in the last checkpoint."""
    last: TensorListing | None = None
    whole: DiffResult | None = None
    """The last checkpoint (left) compared with the first one."""
    pairs: Pairs = field(default_factory=dict)
    """The tensors that changed most, in the last and in the first checkpoint."""
    notes: list[str] = field(default_factory=list)


def changed_pairs(found: DiffResult, progress: Progress, fleet: Fleet | None = None) -> Pairs:
    """Histograms of both sides, of the ``OVERLAID`` tensors that changed most and have one name on both sides."""
    names = {d.name for d in found.elements[:OVERLAID]}
    wanted = WantedValues(stats=True, histogram=True)

    def side(catalog: Catalog) -> dict[str, Values]:
        rows = [row for row in logical_rows(catalog) if row.name in names]
        return {v.row.name: v for v in measure_rows(catalog, rows, wanted, progress, fleet)}

    left, right = side(found.left.catalog), side(found.right.catalog)
    return {name: (one, right[name]) for name, one in left.items() if name in right}


def read_history(
    run: RunListing, options: OpenOptions, choice: TensorChoice, progress: Progress, fleet: Fleet | None = None
) -> RunHistory:
    """Measure the checkpoints of a run that are complete; what cannot be read is in the notes.

    Raises UsageError and AccessError as ``list_tensors`` does.
    """
    out = RunHistory()
    rows = [row for row in run.rows if row.complete]
    chosen = _spread(rows)
    if len(chosen) < len(rows):
        out.notes.append(f"{len(chosen)} of {len(rows)} complete checkpoints were read, at even distances")
    before: tuple[Place, MeasuredStep] | None = None
    first: Place | None = None
    for row in chosen:
        place = pick_save(run.path, row.name)
        try:
            listing = _listed(place, options, choice, out)
            if not listing.rows:
                out.notes.append(f"{row.name} is not in the charts: it has no {out.component}")
                continue
            step = _measured(row, listing, progress, fleet, out)
            if before is not None:
                found = _compared(place, before[0], listing, choice, progress, fleet)
                step = _with_changes(step, before[1], found)
                out.whole = found if before[0] == first else None
        except CkptError as e:
            if isinstance(e, AccessError) or (isinstance(e, UsageError) and not out.steps):
                raise
            out.notes.append(f"{row.name} is not in the charts: {e.what}")
            continue
        out.steps.append(step)
        out.last, before, first = listing, (place, step), first or place
    if before is not None and first is not None and before[0] != first and out.last is not None:
        out.whole = out.whole or _compared(before[0], first, out.last, choice, progress, fleet)
        out.pairs = changed_pairs(out.whole, progress, fleet)
    return out


def _spread(rows: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
    if len(rows) <= MEASURED:
        return list(rows)
    return [rows[i * (len(rows) - 1) // (MEASURED - 1)] for i in range(MEASURED)]


def _listed(place: Place, options: OpenOptions, choice: TensorChoice, out: RunHistory) -> TensorListing:
    """The tensors of one component: the model, else the first of the first checkpoint."""
    listing = list_tensors(place, options, choice, stored_too=False)
    there = listing.components
    if not out.steps and there:
        out.component = "model" if "model" in there else there[0]
    listing.rows = [row for row in listing.rows if row.component == out.component]
    return listing


def _measured(
    row: SavedCheckpoint, listing: TensorListing, progress: Progress, fleet: Fleet | None, out: RunHistory
) -> MeasuredStep:
    values = measure(listing, WantedValues(stats=True), progress, fleet)
    stats = [v.stats for v in values]
    norms = [None if s is None else _norm(s) for s in stats]
    layers: dict[str, float] = {}
    modules: dict[str, float] = {}
    sizes: dict[str, int] = {}
    found, join = by_layer([r.parameter for r in listing.rows]), norm(norms)
    for (at, column), tensors in found.cells.items():
        module = found.modules[column]
        layer = layer_of(Location(*found.rows[at], module))
        here = join(tensors) or 0.0
        layers[layer], modules[module] = hypot(layers.get(layer, 0.0), here), hypot(modules.get(module, 0.0), here)
        sizes[module] = sizes.get(module, 0) + sum(s.elements for i in tensors if (s := stats[i]) is not None)
    out.sizes = sizes
    known = [(v.row.name, s) for v in values if (s := v.stats) is not None]
    broken = [name for name, s in known if s.nan or s.inf]
    nan, inf = sum(s.nan for _, s in known), sum(s.inf for _, s in known)
    everything = join(range(len(norms))) or 0.0
    return MeasuredStep(row.name, row.step, everything, layers, modules, nan, inf, broken[:NAMED])


def _norm(stats: Stats) -> float:
    if stats.mean is None or stats.std is None:
        return 0.0
    return sqrt(stats.elements - stats.nan - stats.inf) * hypot(stats.mean, stats.std)


def _compared(
    place: Place, before: Place, listing: TensorListing, choice: TensorChoice, progress: Progress, fleet: Fleet | None
) -> DiffResult:
    only = (listing.rows[0].component,) if listing.rows else ()
    return diff(
        place, before, listing.options, progress, patterns=tuple(choice.patterns), values=True, only=only,
        other_options=listing.options, fleet=fleet,
    )  # fmt: skip


def _with_changes(step: MeasuredStep, before: MeasuredStep, found: DiffResult) -> MeasuredStep:
    gap2 = sum(d.gap2 for d in found.elements if d.gap2 is not None)
    whole = sqrt(gap2) / before.norm if before.norm and isfinite(gap2) else float("nan") if gap2 else 0.0
    drift = found.drift
    if drift is None:
        return step._replace(change=whole)
    layers, modules = ({d.name: d.relative for d in group} for group in (drift.layers, drift.modules))
    return step._replace(change=whole, layer_changes=layers, module_changes=modules)
