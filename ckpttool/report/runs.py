"""The checkpoints of a run, as a table."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from ckpttool.answers.fields import utc
from ckpttool.core.words import count, short
from ckpttool.errors import plain
from ckpttool.report import text
from ckpttool.report.tables import table, wrapped

if TYPE_CHECKING:
    from ckpttool.ops.inspect.runs import Row, RunListing

_STATES = {True: "complete", False: "incomplete", None: "unknown"}
_COMPLETE = {True: "yes", False: "no", None: "unknown"}


def show_run(run: RunListing, *, quiet: bool) -> None:
    """One checkpoint a line; on a terminal below it, unless ``quiet``, what is missing and where training goes on."""
    if text.on_terminal():
        _on_terminal(run, quiet=quiet)
        return
    header = ("name", "step", "bytes", "files", "format", "mesh", "optimizer", "saved", "complete", "resume", "why")
    table(header, [_fields(run, r) for r in run.rows])


def _fields(run: RunListing, row: Row) -> tuple[str | int, ...]:
    return (
        plain(row.name),
        "-" if row.step is None else row.step,
        row.nbytes,
        row.files,
        row.format or "-",
        row.mesh or "-",
        "yes" if row.optimizer else "no" if row.components else "-",
        utc(row.saved) or "-",
        _COMPLETE[row.complete],
        "yes" if row.name == run.resume else "no",
        plain(row.why) or "-",
    )


def _on_terminal(run: RunListing, *, quiet: bool) -> None:
    steps = any(r.step is not None for r in run.rows)
    meshes = any(r.mesh for r in run.rows)
    header = ["checkpoint", "step", "size", "state", "format", "mesh", "optimizer", "saved"]
    rows: list[list[str | int]] = []
    for r in run.rows:
        mark = " <" if r.name == run.resume else ""
        step = "-" if r.step is None else f"{r.step:,}"
        saved = datetime.fromtimestamp(r.saved).astimezone().strftime("%Y-%m-%d %H:%M") if r.saved else "-"
        has = "yes" if r.optimizer else "no" if r.components else "-"
        rows.append(
            [plain(r.name), step, short(r.nbytes), _STATES[r.complete] + mark, r.format or "-", r.mesh, has, saved]
        )
    gone = [*([] if steps else ["step"]), *([] if meshes else ["mesh"])]
    keep = [i for i, name in enumerate(header) if name not in gone]
    drop = [n for n in ("saved", "mesh", "format", "optimizer", "step") if n not in gone]
    right = [at for at, i in enumerate(keep) if header[i] in ("step", "size")]
    table([header[i] for i in keep], [[row[i] for i in keep] for row in rows], drop=drop, right=right)
    if quiet:
        return
    lines = [f"{plain(r.name)}: {plain(r.why)}" for r in run.rows if r.why]
    if run.resume:
        lines.append(f"< training goes on from {plain(run.resume)} ({plain(run.because)})")
    total = sum(r.nbytes for r in run.rows)
    lines.append(f"{plain(str(run.path))}: {count(len(run.rows), 'checkpoint')}, {short(total)}")
    text.write("\n" + wrapped("\n".join(lines)))
