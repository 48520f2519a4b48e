"""The documents of ``quantize``: what it is going to write, and what it has written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckpttool.answers.document import Document, Message, Overview, Section
from ckpttool.core.words import count, short
from ckpttool.quant.keep import kept_words
from ckpttool.report import target

if TYPE_CHECKING:
    from ckpttool.core.files import AnyPlace
    from ckpttool.execute import RunOptions
    from ckpttool.ops.reshard import ReshardResult
    from ckpttool.targeting.build import Prepared


def _cast_json(prepared: Prepared) -> dict[str, Any]:
    recoded = prepared.recoded
    source = prepared.source
    return {
        "source": str(source.path),
        "source_bytes": sum(f.size for f in source.catalog.files),
        "recipe": str(recoded.scheme) if recoded and recoded.scheme else None,
        "quantized": recoded.quantized if recoded else 0,
        "dequantized": recoded.dequantized if recoded else 0,
        "same": recoded.same if recoded else 0,
        "kept": dict(recoded.kept) if recoded else {},
        "target": target.target_json(prepared),
        "tensor_bytes": sum(v.nbytes for v in prepared.views),
        "files": target.files_json(prepared.plan),
    }


def _summary(prepared: Prepared) -> str:
    """What became of the weights, the bytes of the files before and after, and what was kept in high precision."""
    recoded = prepared.recoded
    if recoded is None:
        return ""
    parts = []
    if recoded.quantized:
        parts.append(f"{count(recoded.quantized, 'weight')} quantized ({recoded.scheme})")
    if recoded.same:
        parts.append(f"{count(recoded.same, 'weight')} already in this form")
    if recoded.dequantized:
        parts.append(f"{count(recoded.dequantized, 'weight')} dequantized to {recoded.dtype}")
    before, after = sum(f.size for f in prepared.source.catalog.files), prepared.plan.bytes_written
    lines = [f"{', '.join(parts)}; files: {short(before)} -> {short(after)}"]
    return "\n".join(lines + ([kept_words(recoded.kept)] if recoded.kept else []))


def plan_document(prepared: Prepared, run: RunOptions, dst: AnyPlace) -> Document:
    """``--dry-run``: what becomes of the weights, and the files that would be written."""

    def json() -> dict[str, Any]:
        return {
            "schema": "ckpttool.quantize-plan/1",
            **_cast_json(prepared),
            "buffers": run.memory,
            **target.space_json(prepared.plan, dst),
            **target.share_json(prepared.plan, run),
            "notes": prepared.notes,
        }

    def sections() -> Iterator[Section]:
        yield Message(_summary(prepared))
        yield from map(Message, target.share_lines(prepared.plan, run))
        yield Overview([target.space_row(prepared.plan, dst)])
        yield target.files_table(prepared.plan)
        yield from target.space_warning(prepared.plan, dst)

    return Document(json, sections, prepared.notes, len(prepared.plan.outputs))


def document(result: ReshardResult) -> Document:
    """What was written, how fast, and whether it was verified."""
    prepared, run = result.prepared, result.run
    notes = target.all_notes(prepared.notes, run.notes)

    def json() -> dict[str, Any]:
        return {
            "schema": "ckpttool.quantize/1",
            "path": str(result.dst),
            **_cast_json(prepared),
            "bytes_read": run.bytes_read,
            **target.run_json(run),
            "verified": result.verified,
            "next_step": target.next_json(prepared, result.dst, run),
            "notes": notes,
        }

    def sections() -> Iterator[Section]:
        if run.committed:
            yield Message(_summary(prepared))
        summary = f"{prepared.format}, {target.contents(prepared)}"
        next_step = prepared.next_step(result.dst)
        yield from target.written(result.dst, run, summary, target.RECOMPUTED, next_step=next_step)

    return Document(json, sections, notes, len(prepared.plan.outputs), of_files=True)
