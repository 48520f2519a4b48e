"""The documents of ``merge``: its methods, what it is going to write, and what it has written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpttool.answers.document import Document, Message, Overview, Paragraph, PerMedium, Section, Table
from ckpttool.answers.fields import pick
from ckpttool.core.words import count, short
from ckpttool.errors import OutputError, plain
from ckpttool.report import target
from ckpttool.report.text import exact

if TYPE_CHECKING:
    from ckpttool.core.files import AnyPlace
    from ckpttool.execute import RunOptions
    from ckpttool.kernels.merge.base import Parameter
    from ckpttool.ops.merge import MergeResult, PreparedMerge
    from ckpttool.ops.merge.origins import TensorOrigin

_PROVEN = "recomputed the merge; every element matches"
_ALIKE, _GROUPS = 2, 12
"""Ways in which tensors come about: from how many on they are told apart, and how many are shown."""


def _parameter(name: str, parameter: Parameter) -> str:
    """``density=1``: with its default, where it has one."""
    if parameter.default is None:
        return name
    value = str(parameter.default).lower() if parameter.kind == "bool" else f"{parameter.default:g}"
    return f"{name}={value}"


def methods_document() -> Document:
    """``--list-methods``: every method, what it computes, and its parameters with their defaults."""
    from ckpttool.kernels.merge import METHODS

    def json() -> dict[str, Any]:
        methods = [
            {
                **pick(m, "name formula paper base models"),
                "parameters": [
                    {"name": n, **pick(p, "kind default help"), "per_model": schema is m.per_model}
                    for schema in (m.per_model, m.whole)
                    for n, p in schema.items()
                ],
            }
            for m in METHODS.values()
        ]
        return {"schema": "ckpttool.merge-methods/1", "methods": methods}

    rows = [
        (m.name, m.formula, ", ".join(_parameter(n, p) for s in (m.per_model, m.whole) for n, p in s.items()))
        for m in METHODS.values()
    ]

    def drawn() -> Iterator[Section]:
        for name, formula, parameters in rows:
            yield Paragraph(f"{name:20}{formula}", hang=20)
            yield from [Paragraph(f"{'':20}parameters: {parameters}", hang=20)] if parameters else []

    table = Table(("method", "formula", "parameters"), rows)
    return Document(json, lambda: [PerMedium(drawn, lambda: [table])], entries=len(METHODS))


def _merge(prepared: PreparedMerge) -> dict[str, Any]:
    return {
        "method": prepared.method,
        **pick(prepared.provenance, "seed rng"),
        "sources": [
            {
                **pick(o, "path format"),
                "files": len(o.files),
                "bytes": sum(n for _, n in o.files),
                "tensors": o.tensors,
                "adapters": [p for p, _ in o.adapters],
            }
            for o in prepared.provenance.origins
        ],
        "merged_tensors": prepared.merged,
        "copied_tensors": prepared.copied,
    }


def _groups(prepared: PreparedMerge) -> list[TensorOrigin]:
    from ckpttool.ops.merge.origins import came_from

    return came_from(prepared.plan, prepared.provenance.operands, prepared.method)


def _group(group: TensorOrigin) -> dict[str, Any]:
    from ckpttool.core.tensor_names import fold

    return {
        **pick(group, "method base=base elements bytes=nbytes"),
        "tensors": len(group.names),
        "names": [name for name, _ in fold(group.names)],
        "parameters": dict(group.whole),
        "sources": [{"source": label, "parameters": dict(p)} for label, p in group.models],
        "by_token": group.by_token,
    }


def _from_where(groups: Sequence[TensorOrigin]) -> list[tuple[str, str]]:
    """What came from where, where there is more to say than that all tensors are made alike."""
    from ckpttool.ops.merge.origins import some_names

    if len(groups) < _ALIKE:
        return []
    rows = []
    for group in groups[:_GROUPS]:
        sources = "; ".join(": ".join(filter(None, said)) for said in group.sources())
        rows += [f"{group.how} of {plain(sources)}", f"  {plain(some_names(group.names, most=3))}"]
    if len(groups) > _GROUPS:
        rows.append(f"and {len(groups) - _GROUPS} more ways: --json has all of them")
    return [("" if i else "from", row) for i, row in enumerate(rows)]


def plan_document(prepared: PreparedMerge, run: RunOptions, place: AnyPlace) -> Document:
    """``--dry-run``: the files that would be written, and what that takes."""
    dst = prepared.target
    plan = dst.plan
    groups = cache(lambda: [] if prepared.single or prepared.parts else _groups(prepared))

    def json() -> dict[str, Any]:
        return {
            "schema": "ckpttool.merge-plan/1",
            **_merge(prepared),
            "origin": [_group(g) for g in groups()],
            "target": target.target_json(dst),
            "buffers": run.memory,
            "peak_memory_estimate": target.peak_memory(run),
            **target.space_json(plan, place),
            **target.share_json(plan, run),
            "files": target.files_json(plan),
            "notes": dst.notes,
        }

    def rows() -> Iterator[tuple[str, str]]:
        seed = prepared.provenance.seed
        yield "method", prepared.method + (f", seed {seed}" if seed is not None else "")
        for i, o in enumerate(prepared.provenance.origins):
            has = f"{count(o.tensors, 'tensor')} in {count(len(o.files), 'file')}, {short(sum(n for _, n in o.files))}"
            yield "" if i else "source", f"{o.label}: {o.format}, {has}"
        yield "work", f"{count(prepared.merged, 'tensor')} to merge, {prepared.copied} to copy"
        yield from _from_where(groups())
        yield from [("", line) for line in target.share_lines(plan, run)]
        yield from target.target_rows(dst)
        yield target.memory_row(run)
        yield target.space_row(plan, place)

    def sections() -> Iterator[Section]:
        yield Overview(list(rows()))
        yield target.files_table(plan)
        yield from target.space_warning(plan, place)

    return Document(json, sections, dst.notes, len(plan.outputs))


def check_report(prepared: PreparedMerge, dst: AnyPlace, run: RunOptions, path: Path) -> None:
    """``--report``, before anything is written. Raises UsageError and OutputError."""
    from ckpttool.ops.merge import check_measurable
    from ckpttool.report.files import check_place
    from ckpttool.report.page import BEGINS
    from ckpttool.storage.place import parse_place

    check_measurable(prepared, run)
    place = parse_place(dst)
    check_place(path, "the report", BEGINS, appears=place if isinstance(place, Path) else None)


def write_report(result: MergeResult, path: Path) -> None:
    """``--report``. Raises OutputError, which says that DST is complete."""
    from ckpttool.report import merged  # with the page, which few merges need

    try:
        merged.write(result, path)
    except OutputError as e:
        raise type(e)(
            e.what, where=e.where, hint=f"{result.dst} is complete; name another file, and use --force"
        ) from e


def document(result: MergeResult, *, verbose: bool = False, page: Path | None = None) -> Document:
    """What was written, how fast, and what became of the tensors; ``page`` is where the report is."""
    prepared, run = result.prepared, result.run
    dst = prepared.target
    notes = target.all_notes(dst.notes, run.notes)

    def json() -> dict[str, Any]:
        return {
            "schema": "ckpttool.merge/1",
            "path": str(result.dst),
            **_merge(prepared),
            "target": target.target_json(dst),
            "bytes_read": run.bytes_read,
            **target.run_json(run),
            "write_policy": run.policy,
            "verified": result.verified,
            "files": target.files_json(dst.plan),
            "checksums": target.checksums_json(run),
            "next_step": target.next_json(dst, result.dst, run),
            "report": {"path": str(page), **result.distances.summary()} if result.distances else None,
            "notes": notes,
        }

    def sections() -> Iterator[Section]:
        yield from target.resumed(run)
        if verbose:
            yield Message(f"read {exact(run.bytes_read)}; writes: {run.policy}")
        models = "" if prepared.single else f" of {count(len(prepared.provenance.origins), 'model')}"
        place = f"{dst.format}, {target.ranked(dst.run_mesh, dst.sharding)}, {target.contents(dst)}"
        summary = f"{prepared.method}{models}, {place}"
        pages = [] if page is None else [Paragraph(f"report: {plain(str(page))}")]
        next_step = dst.next_step(result.dst)
        yield from target.written(result.dst, run, summary, _PROVEN, *pages, next_step=next_step)

    return Document(json, sections, notes, len(dst.plan.outputs) + len(run.manifest), of_files=True)
