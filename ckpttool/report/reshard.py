"""The documents of ``reshard``: what it is going to write, and what it has written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckpttool.answers.document import Document, Message, Overview, Section
from ckpttool.core.words import count, short
from ckpttool.report import target
from ckpttool.report.target import EQUAL, RECOMPUTED, contents, ranked
from ckpttool.report.text import exact

if TYPE_CHECKING:
    from ckpttool.core.files import AnyPlace
    from ckpttool.execute import RunOptions
    from ckpttool.ops.reshard import ReshardResult
    from ckpttool.targeting.build import Prepared


def _source(prepared: Prepared) -> dict[str, Any]:
    src = prepared.source
    return {
        "path": str(src.path),
        "format": src.format,
        "mesh": src.mesh.to_json(),
        "family": src.family.name,
        "files": len(src.catalog.files),
        "bytes": sum(f.size for f in src.catalog.files),
        "tensors": len(src.catalog),
        "tensor_bytes": src.catalog.nbytes,
    }


def plan_document(prepared: Prepared, run: RunOptions, dst: AnyPlace) -> Document:
    """``--dry-run``: the files that would be written, and what that takes."""
    plan = prepared.plan

    def json() -> dict[str, Any]:
        return {
            "schema": "ckpttool.plan/1",
            "source": _source(prepared),
            "target": target.target_json(prepared),
            "boxes": plan.boxes,
            "units": len(plan.units),
            "buffers": run.memory,
            "peak_memory_estimate": target.peak_memory(run),
            **target.space_json(plan, dst),
            **target.share_json(plan, run),
            "files": target.files_json(plan),
            "notes": prepared.notes,
        }

    def sections() -> Iterator[Section]:
        source = prepared.source
        src = _source(prepared)
        first = [
            ("source", f"{src['path']}: {src['format']}, {ranked(source.mesh, source.stored.sharding)}"),
            ("", f"{count(src['tensors'], 'tensor')} in {count(src['files'], 'file')}, {short(src['bytes'])}"),
        ]
        lines = [f"{count(plan.boxes, 'slice')} to copy", *target.share_lines(plan, run)]
        work = [("" if i else "work", line) for i, line in enumerate(lines)]
        yield Overview(
            [*first, *target.target_rows(prepared), *work, target.memory_row(run), target.space_row(plan, dst)]
        )
        yield target.files_table(plan)
        yield from target.space_warning(plan, dst)

    return Document(json, sections, prepared.notes, len(plan.outputs))


def document(result: ReshardResult, *, verbose: bool = False) -> Document:
    """What was written, how fast, and whether it was verified."""
    prepared, run = result.prepared, result.run
    plan = prepared.plan
    notes = target.all_notes(prepared.notes, result.notes, run.notes)

    def json() -> dict[str, Any]:
        return {
            "schema": "ckpttool.reshard/1",
            "path": str(result.dst),
            "source": _source(prepared),
            "target": target.target_json(prepared),
            "bytes_read": run.bytes_read,
            **target.run_json(run),
            "bytes_per_second": round(run.bytes_written / run.seconds) if run.seconds else None,
            "peak_buffers": run.peak_buffer,
            "write_policy": run.policy,
            "verified": result.verified,
            "files": target.files_json(plan),
            "checksums": target.checksums_json(run),
            "next_step": target.next_json(prepared, result.dst, run),
            "notes": notes,
        }

    def sections() -> Iterator[Section]:
        yield from target.resumed(run)
        if verbose:
            yield Message(f"read {exact(run.bytes_read)}; {count(plan.boxes, 'slice')}; writes: {run.policy};")
            yield Message(f"at most {short(run.peak_buffer)} of buffers")
        summary = f"{prepared.format}, {ranked(prepared.run_mesh, prepared.sharding)}, {contents(prepared)}"
        proven = EQUAL if prepared.recoded is None else RECOMPUTED
        yield from target.written(result.dst, run, summary, proven, next_step=prepared.next_step(result.dst))

    return Document(json, sections, notes, len(plan.outputs) + len(run.manifest), of_files=True)
