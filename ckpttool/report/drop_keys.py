"""What ``drop-keys`` is going to leave out, and what it left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.core.words import count, short
from ckpttool.errors import plain
from ckpttool.report import text
from ckpttool.report.reshard import files_of, show_written, target_of
from ckpttool.report.tables import table
from ckpttool.report.text import dump, message, pick

if TYPE_CHECKING:
    from ckpttool.ops.drop_keys import PreparedDrop
    from ckpttool.ops.reshard import ReshardResult

PLAN_SCHEMA = "ckpttool.drop-plan/1"
DROP_SCHEMA = "ckpttool.drop/1"


def _dropped(prepared: PreparedDrop) -> dict[str, Any]:
    return {
        "source": str(prepared.target.source.path),
        "removed_tensors": len(prepared.gone),
        "removed_bytes": prepared.freed,
        "components": {c: {"tensors": n, "bytes": size} for c, (n, size) in prepared.components.items()},
        **pick(prepared, "files_rewritten=rewritten files_carried=carried files_dropped=dropped warnings"),
        "target": target_of(prepared.target),
        "files": files_of(prepared.target.plan),
    }


def _summary(prepared: PreparedDrop) -> str:
    parts = prepared.components
    each = ""
    if set(parts) != {"model"}:
        each = " (" + ", ".join(f"{n:,} {c} {short(b)}" for c, (n, b) in parts.items()) + ")"
    return (
        f"{count(len(prepared.gone), 'tensor')} removed{each}, {short(prepared.freed)} freed;"
        f" {count(prepared.rewritten, 'file')} rewritten, {prepared.carried} unchanged, {prepared.dropped} deleted"
    )


def show_drop_plan(prepared: PreparedDrop, *, as_json: bool, quiet: bool = False) -> None:
    """``--dry-run``: every tensor that would go."""
    target = prepared.target
    if as_json:
        tensors = [pick(g, "name dtype shape bytes=nbytes component") for g in prepared.gone]
        dump(
            {"schema": PLAN_SCHEMA, **_dropped(prepared), "tensors": tensors, "notes": target.notes},
            entries=len(prepared.gone),
        )
        return
    if not quiet:
        text.notes(target.notes)
    for w in prepared.warnings:
        message(f"warning: {w}")
    if not quiet:
        message(_summary(prepared))
    table(
        ("tensor", "dtype", "shape", "bytes"),
        [(plain(g.name), g.dtype, "x".join(map(str, g.shape)), g.nbytes) for g in prepared.gone],
        drop=("dtype", "shape"),
    )


@text.of_a_result()
def show_drop(prepared: PreparedDrop, result: ReshardResult, *, as_json: bool, quiet: bool) -> None:
    """What went and how much that freed."""
    target, run = prepared.target, result.run
    notes = list(dict.fromkeys([*target.notes, *run.notes]))
    if as_json:
        dump(
            {
                "schema": DROP_SCHEMA,
                "path": str(result.dst),
                **_dropped(prepared),
                **text.done(run),
                "verified": result.verified,
                "notes": notes,
            },
            entries=len(target.plan.outputs),
        )
        return
    for w in prepared.warnings:
        message(f"warning: {w}")
    if quiet:
        return
    text.notes(notes)
    if text.show_waiting(str(result.dst), run):
        return
    files = count(len(target.plan.outputs), "file")
    left = f"{count(len(target.views), 'tensor')} left in {files}, {short(target.plan.bytes_written)}"
    show_written(result, f"{_summary(prepared)}; {left}", "every element is equal to the source")
