"""Statistics on a terminal: tensors that differ only in the numbers of their names on one line, and their norms by
layer as a row of small bars. In a pipe and in JSON each tensor has its own line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpttool.answers.by_layer import by_layer
from ckpttool.answers.by_layer import norm as norms
from ckpttool.answers.fields import number
from ckpttool.core.tensor_names import fold
from ckpttool.errors import plain
from ckpttool.report.meters import LONGEST, spark
from ckpttool.report.tables import table

if TYPE_CHECKING:
    from ckpttool.kernels.stats import Stats
    from ckpttool.ops.inspect.values import Values


def show_folded(values: Sequence[Values]) -> None:
    """One line for each kind of tensor; what is one number only is of all of them together."""
    found = fold([v.row.name for v in values])
    header = ["name", "tensors", "min", "max", "norm", "norm by layer", "nan", "inf", "zeros"]
    rows: list[list[str | int]] = [
        [plain(name), len(places), *_joined([values[i] for i in sorted(places)])]
        for name, places in sorted(found, key=lambda f: min(f[1]))
    ]
    # What no tensor has needs no column.
    keep = [i for i, h in enumerate(header) if h not in ("nan", "inf") or any(r[i] for r in rows)]
    drop = ["zeros", "tensors", "min", "norm by layer", "max"]
    shown = [[row[i] for i in keep] for row in rows]
    right = [at for at, i in enumerate(keep) if header[i] in ("min", "max", "norm")]
    table([header[i] for i in keep], shown, drop=drop, right=right)


def _joined(values: Sequence[Values]) -> list[str | int]:
    """What is said of several tensors together."""
    stats = [v.stats for v in values if v.stats is not None]
    low = min((s.minimum for s in stats if s.minimum is not None), default=None)
    high = max((s.maximum for s in stats if s.maximum is not None), default=None)
    each = [norm_of(v.stats) for v in values]
    known = [n for n in each if n is not None]
    layers = by_layer([v.row.parameter for v in values])
    bars = _axis(layers.by_row(norms(each))) if len(layers.rows) > 1 else ""
    total = math.hypot(*known) if known else None
    counts = [sum(s.nan for s in stats), sum(s.inf for s in stats), sum(s.zeros for s in stats)]
    return [number(low, 4), number(high, 4), number(total, 4), bars, *counts]


def _axis(norms: Sequence[float | None]) -> str:
    """A column for each layer (neighbours share one where there are many), between the smallest and the largest."""
    known = [n for n in norms if n is not None and math.isfinite(n)]
    low, high = (number(f(known), 3) if known else "-" for f in (min, max))
    return f"{low:>5} {spark(norms, LONGEST)} {high}"


def norm_of(stats: Stats | None) -> float | None:
    """The L2 norm of a tensor's finite elements; None where there is none."""
    if stats is None or stats.mean is None or stats.std is None:
        return None
    return math.sqrt(stats.elements - stats.nan - stats.inf) * math.hypot(stats.mean, stats.std)
