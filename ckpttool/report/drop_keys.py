"""The documents of ``drop-keys``: what it is going to remove, and what it has removed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckpttool.answers.document import Document, Message, Overview, Section, Table
from ckpttool.answers.fields import pick
from ckpttool.core.words import count, short
from ckpttool.errors import plain
from ckpttool.report import target

if TYPE_CHECKING:
    from ckpttool.core.files import AnyPlace
    from ckpttool.ops.drop_keys import PreparedDrop
    from ckpttool.ops.reshard import ReshardResult


def _warnings(prepared: PreparedDrop) -> list[Section]:
    return [Message(f"warning: {w}", quiet=True) for w in prepared.warnings]


def _drop_json(prepared: PreparedDrop) -> dict[str, Any]:
    return {
        "source": str(prepared.target.source.path),
        "removed_tensors": len(prepared.gone),
        "removed_bytes": prepared.freed,
        "components": {c: {"tensors": n, "bytes": size} for c, (n, size) in prepared.components.items()},
        **pick(prepared, "files_rewritten=rewritten files_carried=carried files_dropped=dropped warnings"),
        "target": target.target_json(prepared.target),
        "files": target.files_json(prepared.target.plan),
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


def plan_document(prepared: PreparedDrop, dst: AnyPlace) -> Document:
    """``--dry-run``: every tensor that would be removed."""
    notes, plan = prepared.target.notes, prepared.target.plan

    def json() -> dict[str, Any]:
        return {
            "schema": "ckpttool.drop-plan/1",
            **_drop_json(prepared),
            **target.space_json(plan, dst),
            "tensors": [pick(g, "name dtype shape bytes=nbytes component") for g in prepared.gone],
            "notes": notes,
        }

    def sections() -> Iterator[Section]:
        yield from _warnings(prepared)
        yield Message(_summary(prepared))
        yield Overview([target.space_row(plan, dst)])
        rows = [(plain(g.name), g.dtype, "x".join(map(str, g.shape)), g.nbytes) for g in prepared.gone]
        yield Table(("tensor", "dtype", "shape", "bytes"), rows, drop=("dtype", "shape"), quiet=True)
        yield from target.space_warning(plan, dst)

    return Document(json, sections, notes, len(prepared.gone))


def document(prepared: PreparedDrop, result: ReshardResult) -> Document:
    """What was removed and how much that freed."""
    dst, run = prepared.target, result.run
    notes = target.all_notes(dst.notes, run.notes)

    def json() -> dict[str, Any]:
        return {
            "schema": "ckpttool.drop/1",
            "path": str(result.dst),
            **_drop_json(prepared),
            **target.run_json(run),
            "verified": result.verified,
            "notes": notes,
        }

    def sections() -> Iterator[Section]:
        yield from _warnings(prepared)
        files = count(len(dst.plan.outputs), "file")
        left = f"{count(len(dst.views), 'tensor')} left in {files}, {short(dst.plan.bytes_written)}"
        yield from target.written(result.dst, run, f"{_summary(prepared)}; {left}", target.EQUAL)

    return Document(json, sections, notes, len(dst.plan.outputs), of_files=True)
