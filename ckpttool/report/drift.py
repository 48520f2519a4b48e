"""How far two checkpoints are apart, by layer and by module as bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpttool.errors import plain
from ckpttool.report import text
from ckpttool.report.meters import bar
from ckpttool.report.tables import table

if TYPE_CHECKING:
    from ckpttool.ops.inspect.drift import Drift, Drifted

MOST = 16
"""Lines of a table; what has changed less is one line more."""
COLUMNS = 16
"""Characters of the longest bar."""


def show_drift(drift: Drift) -> None:
    """Two tables, the largest change first."""
    of = "" if drift.component == "model" else f" ({drift.component})"
    for title, found in ((f"layer{of}", drift.layers), (f"module{of}", drift.modules)):
        text.write("\n")
        _show(title, found)
    text.write("\n")


def _show(title: str, found: Sequence[Drifted]) -> None:
    most = max((d.relative for d in found if d.relative is not None and math.isfinite(d.relative)), default=0.0)
    rows: list[tuple[str | int, ...]] = []
    for d in found[: MOST if len(found) > MOST + 1 else None]:
        share = 1.0 if d.relative == math.inf else (d.relative or 0) / most if most else 0.0
        said = "-" if d.relative is None else f"{d.relative:.4g}"
        rows.append((plain(d.name), said, bar(share, COLUMNS), f"{d.changed:,} of {d.tensors:,}"))
    table((title, "relative", "", "changed"), rows, drop=["changed"], right=(1, 3))
    if len(rows) < len(found):
        text.write(f"and {len(found) - len(rows):,} more, the largest {found[len(rows)].relative or 0:.4g}\n")
