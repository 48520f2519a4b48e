"""What ``merge`` is going to write, and what it wrote."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpttool.core.words import count, short
from ckpttool.errors import OutputError, plain
from ckpttool.report import text
from ckpttool.report.reshard import files_of, held, peak_memory, plan_files, ranked, show_written, target_of
from ckpttool.report.tables import table
from ckpttool.report.text import dump, message, pick

if TYPE_CHECKING:
    from ckpttool.core.files import AnyPlace
    from ckpttool.execute import RunOptions
    from ckpttool.kernels.merge.base import MethodParameter
    from ckpttool.ops.merge import MergeResult, PreparedMerge
    from ckpttool.ops.merge.origins import Group

PLAN_SCHEMA = "ckpttool.merge-plan/1"
MERGE_SCHEMA = "ckpttool.merge/1"
_ALIKE, _GROUPS = 2, 12
"""Ways in which tensors come about: from how many on they are told apart, and how many are shown."""
METHODS_SCHEMA = "ckpttool.merge-methods/1"


def _parameter(name: str, parameter: MethodParameter) -> str:
    """``density=1``: with its default, where it has one."""
    if parameter.default is None:
        return name
    value = str(parameter.default).lower() if parameter.kind == "bool" else f"{parameter.default:g}"
    return f"{name}={value}"


def show_methods(*, as_json: bool) -> None:
    """``--list-methods``: every method, what it computes, and its parameters with their defaults."""
    from ckpttool.kernels.merge import METHODS

    if as_json:
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
        dump({"schema": METHODS_SCHEMA, "methods": methods}, entries=len(methods))
        return
    rows = [
        (m.name, m.formula, ", ".join(_parameter(n, p) for s in (m.per_model, m.whole) for n, p in s.items()))
        for m in METHODS.values()
    ]
    if not text.on_terminal():
        table(("method", "formula", "parameters"), rows)
        return
    for name, formula, parameters in rows:
        lines = [*textwrap.wrap(formula, 58), *textwrap.wrap(parameters and f"parameters: {parameters}", 58)]
        text.write("\n".join(f"{name if not i else '':20}{line}" for i, line in enumerate(lines)) + "\n")


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


def _groups(prepared: PreparedMerge) -> list[Group]:
    from ckpttool.ops.merge.origins import came_from

    return came_from(prepared.plan, prepared.provenance.operands, prepared.method)


def _group(group: Group) -> dict[str, Any]:
    from ckpttool.core.tensor_names import fold

    return {
        **pick(group, "method base=base elements bytes=nbytes"),
        "tensors": len(group.names),
        "names": [name for name, _ in fold(group.names)],
        "parameters": dict(group.whole),
        "sources": [{"source": label, "parameters": dict(p)} for label, p in group.models],
        "by_token": group.by_token,
    }


def _from_where(groups: Sequence[Group]) -> list[tuple[str, str]]:
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


def show_merge_plan(prepared: PreparedMerge, run: RunOptions, *, as_json: bool, quiet: bool = False) -> None:
    """``--dry-run``: the files that would be written, and what that takes."""
    target = prepared.target
    plan = target.plan
    groups = [] if quiet or prepared.single or prepared.parts else _groups(prepared)
    if as_json:
        dump(
            {
                "schema": PLAN_SCHEMA,
                **_merge(prepared),
                "origin": [_group(g) for g in groups],
                "target": target_of(target),
                "buffers": run.memory,
                "peak_memory_estimate": peak_memory(run),
                **text.share_of(plan, run),
                "files": files_of(plan),
                "notes": target.notes,
            },
            entries=len(plan.outputs),
        )
        return
    if quiet:
        plan_files(plan)
        return
    text.notes(target.notes)
    seed = prepared.provenance.seed
    rows = [("method", prepared.method + (f", seed {seed}" if seed is not None else ""))]
    for i, o in enumerate(prepared.provenance.origins):
        has = f"{count(o.tensors, 'tensor')} in {count(len(o.files), 'file')}, {short(sum(n for _, n in o.files))}"
        rows.append(("" if i else "source", f"{o.label}: {o.format}, {has}"))
    rows += [
        ("work", f"{count(prepared.merged, 'tensor')} to merge, {prepared.copied} to copy"),
        *_from_where(groups),
        *[("", line) for line in [text.share_line(plan, run)] if line],
        ("target", f"{target.format}, {ranked(target.mesh, target.sharding)}"),
        ("", held(target)),
        ("memory", f"{short(peak_memory(run))} at most, of which {short(run.memory)} are buffers (--memory)"),
    ]
    text.overview(rows)
    plan_files(plan)


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


@text.of_a_result()
def show_merge(result: MergeResult, *, as_json: bool, quiet: bool, verbose: bool, page: Path | None = None) -> None:
    """What was written, how fast, and what became of the tensors; ``page`` is where the report is."""
    prepared, run = result.prepared, result.run
    target = prepared.target
    plan = target.plan
    notes = list(dict.fromkeys([*target.notes, *run.notes]))
    if as_json:
        dump(
            {
                "schema": MERGE_SCHEMA,
                "path": str(result.dst),
                **_merge(prepared),
                "target": target_of(target),
                "bytes_read": run.bytes_read,
                **text.done(run),
                "write_policy": run.policy,
                "verified": result.verified,
                "files": files_of(plan),
                "checksums": [pick(c, "file tensor bytes=nbytes digest") for c in run.manifest],
                "next_step": (run.committed and target.next_step(result.dst)) or None,
                "report": {"path": str(page), **result.distances.summary()} if result.distances else None,
                "notes": notes,
            },
            entries=len(plan.outputs) + len(run.manifest),
        )
        return
    if quiet:
        return
    text.notes(notes)
    if run.bytes_skipped:
        message(f"note: {short(run.bytes_skipped)} were already written by the interrupted run")
    if verbose:
        message(f"read {short(run.bytes_read)}; writes: {run.policy}")
    if text.show_waiting(str(result.dst), run):
        return
    models = "" if prepared.single else f" of {count(len(prepared.provenance.origins), 'model')}"
    said = f"{prepared.method}{models}, {target.format}, {ranked(target.mesh, target.sharding)}, {held(target)}"
    show_written(result, said, "every element is what the merge of the sources gives")
    if page is not None:
        text.write(f"report: {plain(str(page))}\n")
    text.next_step(target.next_step(result.dst))
