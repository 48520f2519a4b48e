"""What ``fp8-cast`` is going to write, and what it wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.core.words import count, short
from ckpttool.report import text
from ckpttool.report.reshard import files_of, held, plan_files, show_written, target_of
from ckpttool.report.text import dump, message

if TYPE_CHECKING:
    from ckpttool.execute import RunOptions
    from ckpttool.ops.reshard import ReshardResult
    from ckpttool.targeting.build import Prepared

PLAN_SCHEMA = "ckpttool.fp8-cast-plan/1"
CAST_SCHEMA = "ckpttool.fp8-cast/1"


def _done(prepared: Prepared) -> dict[str, Any]:
    recoded = prepared.recoded
    source = prepared.source
    return {
        "source": str(source.path),
        "source_bytes": sum(f.size for f in source.catalog.files),
        "recipe": str(recoded.scheme) if recoded and recoded.scheme else None,
        "quantised": recoded.quantised if recoded else 0,
        "dequantised": recoded.dequantised if recoded else 0,
        "same": recoded.same if recoded else 0,
        "kept": dict(recoded.kept) if recoded else {},
        "target": target_of(prepared),
        "tensor_bytes": sum(v.nbytes for v in prepared.views),
        "files": files_of(prepared.plan),
    }


def _summary(prepared: Prepared) -> str:
    recoded = prepared.recoded
    if recoded is None:
        return ""
    parts = []
    if recoded.quantised:
        parts.append(f"{count(recoded.quantised, 'weight')} quantised ({recoded.scheme})")
    if recoded.same:
        parts.append(f"{count(recoded.same, 'weight')} already so")
    if recoded.dequantised:
        parts.append(f"{count(recoded.dequantised, 'weight')} dequantised to {recoded.dtype}")
    if recoded.kept:
        why = ", ".join(f"{n:,} {w}" for w, n in recoded.kept.items())
        parts.append(f"{sum(recoded.kept.values()):,} kept ({why})")
    return "; ".join(parts)


def show_cast_plan(prepared: Prepared, run: RunOptions, *, as_json: bool, quiet: bool = False) -> None:
    """``--dry-run``: what becomes of the weights, and the files that would be written."""
    if as_json:
        dump(
            {
                "schema": PLAN_SCHEMA,
                **_done(prepared),
                "buffers": run.memory,
                **text.share_of(prepared.plan, run),
                "notes": prepared.notes,
            },
            entries=len(prepared.plan.outputs),
        )
        return
    if not quiet:
        text.notes(prepared.notes)
        message(_summary(prepared))
        before = sum(f.size for f in prepared.source.catalog.files)
        message(f"{short(before)} become {short(prepared.plan.bytes_written)}")
        if line := text.share_line(prepared.plan, run):
            message(line)
    plan_files(prepared.plan)


@text.of_a_result()
def show_cast(result: ReshardResult, *, as_json: bool, quiet: bool) -> None:
    """What was written, how fast, and whether it was verified."""
    prepared, run = result.prepared, result.run
    notes = list(dict.fromkeys([*prepared.notes, *run.notes]))
    if as_json:
        dump(
            {
                "schema": CAST_SCHEMA,
                "path": str(result.dst),
                **_done(prepared),
                "bytes_read": run.bytes_read,
                **text.done(run),
                "verified": result.verified,
                "next_step": (run.committed and prepared.next_step(result.dst)) or None,
                "notes": notes,
            },
            entries=len(prepared.plan.outputs),
        )
        return
    if quiet:
        return
    text.notes(notes)
    if text.show_waiting(str(result.dst), run):
        return
    message(_summary(prepared))
    show_written(result, f"{prepared.format}, {held(prepared)}", "every tensor was worked out again and is equal")
    text.next_step(prepared.next_step(result.dst))
