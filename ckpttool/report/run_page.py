"""The report of a run (``inspect RUN --html``): its checkpoints and, where they were read, how the weights move."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpttool.core.words import count, short
from ckpttool.kernels.stats import Stats
from ckpttool.ops.inspect.history import MeasuredStep, RunHistory
from ckpttool.ops.inspect.runs import RunListing, SavedCheckpoint
from ckpttool.ops.inspect.views.page import RunContents
from ckpttool.report.page.document import (
    Column,
    PageCell,
    PageSection,
    PageTensors,
    ReportPage,
    Series,
    Verdict,
    heat_map,
    line_chart,
    section,
)
from ckpttool.report.stats import norm_of
from ckpttool.report.survey import OVERLAID, SERIES, add_pairs
from ckpttool.storage.place import resolved

_COMPLETE = {True: "complete", False: "incomplete", None: "unknown"}


def document(contents: RunContents) -> ReportPage:
    """The report of a run, as ``render`` takes it and ``--json`` prints it."""
    run, history = contents.run, contents.history
    out: ReportPage = {
        "schema": "ckpttool.report/1",
        "title": resolved(run.path).name or str(run.path),
        "subtitle": f"A run of {count(len(run.rows), 'checkpoint')}, {short(sum(r.nbytes for r in run.rows))}",
        "verdicts": list(_verdicts(run, history)),
        "facts": list(_facts(run)),
        "notes": list(contents.notes),
        "sections": [],
    }
    sections: list[PageSection] = []
    if history is not None and len(history.steps) > 1:
        sections += _charts(history)
    if history is not None and history.pairs:
        sections.append(section("histograms", "histograms", "First and last checkpoint", OVERLAID))
    sections.insert(0, _checkpoints(run, history))
    if history is not None and history.last is not None and history.last.rows:
        of = f"The tensors of {history.steps[-1].name}, compared with {history.steps[0].name}."
        sections.append(section("tensors", "tensors", "Tensors", of))
        out["tensors"] = _tensors(history)
    out["sections"] = sections
    return out


def _verdicts(run: RunListing, history: RunHistory | None) -> Iterator[Verdict]:
    """From where training resumes, what is not complete, and what is not finite."""
    bad = [r.name for r in run.rows if r.complete is False]
    if run.resume:
        yield {"state": "good", "text": f"Training resumes from {run.resume} ({run.because})"}
    else:
        yield {"state": "bad", "text": "No checkpoint is complete"}
    if bad:
        names = ", ".join(bad[:4]) + (", ..." if len(bad) > 4 else "")
        yield {"state": "unsure", "text": f"{len(bad)} of {count(len(run.rows), 'checkpoint')} incomplete: {names}"}
    broken = [s for s in history.steps if s.broken] if history else []
    for step in broken[:3]:
        what = f"{step.nan:,} NaN and {step.inf:,} infinite elements in {step.name}"
        yield {"state": "bad", "text": f"{what}: {', '.join(step.broken[:3])}"}
    if len(broken) > 3:
        yield {"state": "bad", "text": f"NaN or infinite elements in {len(broken) - 3:,} more checkpoints"}


def _facts(run: RunListing) -> Iterator[list[str]]:
    steps = [r.step for r in run.rows if r.step is not None]
    yield ["Checkpoints", f"{len(run.rows):,}"]
    yield ["Complete", f"{sum(r.complete is True for r in run.rows):,}"]
    if steps:
        yield ["Steps", f"{min(steps):,} to {max(steps):,}" if len(steps) > 1 else f"{steps[0]:,}"]
    yield ["Size", short(sum(r.nbytes for r in run.rows))]
    yield ["Format", ", ".join(dict.fromkeys(r.format for r in run.rows if r.format)) or "unknown"]
    yield ["Place", str(run.path)]


def _checkpoints(run: RunListing, history: RunHistory | None) -> PageSection:
    """A row for each; with numbers where it was read."""
    read = {s.name: s for s in history.steps} if history else {}
    titles = [("Checkpoint", "code"), ("Step", "count"), ("Size", "bytes"), ("State", "text"), ("Format", "text")]
    titles += [("Ranks", "text")] if any(r.mesh for r in run.rows) else []
    titles.append(("Optimizer", "text"))
    titles += [("Norm", "number"), ("Change", "number"), ("NaN", "count"), ("Inf", "count")] if read else []
    titles += [("Missing", "text")] if any(r.why for r in run.rows) else []

    def row(r: SavedCheckpoint) -> list[Any]:
        step = read.get(r.name)
        has = "yes" if r.optimizer else "no" if r.components else None
        cells: dict[str, PageCell] = {
            "Checkpoint": r.name,
            "Step": r.step,
            "Size": r.nbytes,
            "State": _COMPLETE[r.complete],
        }
        cells |= {"Format": r.format, "Ranks": r.mesh, "Optimizer": has, "Missing": r.why}
        if step is not None:
            cells |= {"Norm": step.norm, "Change": step.change, "NaN": step.nan, "Inf": step.inf}
        return [cells.get(title) for title, _ in titles]

    said = "Change is the L2 norm of the difference from the checkpoint before, divided by that one's norm."
    columns = [{"title": title, "kind": kind} for title, kind in titles]
    rows = [row(r) for r in run.rows]
    return section("table", "checkpoints", "Checkpoints", said if read else "", columns=columns, rows=rows)


def _charts(history: RunHistory) -> Iterator[PageSection]:
    """Changes and norms by step, of modules and of layers."""
    steps, changed = history.steps, history.steps[1:]
    of = "" if history.component == "model" else f" ({history.component})"
    modules = sorted(history.sizes, key=lambda m: -history.sizes[m])[:SERIES]
    layers = list(dict.fromkeys(layer for s in steps for layer in s.layers))
    drift = "L2 norm of the difference from the checkpoint before, divided by that one's norm"
    if len(changed) > 1:
        everything: list[Series] = [{"name": "all tensors", "values": [s.change for s in changed]}]
        axes = ("step", "relative change")
        yield line_chart("change", f"Change from step to step{of}", f"{drift}.", _x(changed), axes, everything)
    norms = "L2 norm divided by that in the first checkpoint"
    for what, names in (("module", modules), ("layer", layers)):
        some = f" The {SERIES} modules with most elements." if what == "module" and len(history.sizes) > SERIES else ""
        moved = [s.module_changes if what == "module" else s.layer_changes for s in changed]
        moved = [{name: found.get(name, 0.0) for name in names} for found in moved]
        title, said = f"Change by {what}{of}", f"{drift}, of each {what}.{some}"
        yield _by_step(f"change-{what}s", title, said, changed, names, moved, "change")
        held = [s.modules if what == "module" else s.layers for s in steps]
        parts = [{n: _by_first(found.get(n), held[0].get(n)) for n in names} for found in held]
        title, said = f"Norm by {what}{of}", f"{norms}, of each {what}.{some}"
        yield _by_step(f"norms-{what}s", title, said, steps, names, parts, "norm")


def _by_first(norm: float | None, first: float | None) -> float | None:
    return norm / first if norm is not None and first else None


def _x(steps: Sequence[MeasuredStep]) -> list[str]:
    return [s.name if s.step is None else f"{s.step}" for s in steps]


def _by_step(
    id_: str, title: str, said: str, steps: Sequence[MeasuredStep], names: Sequence[str],
    values: Sequence[Mapping[str, float | None]], what: str,
) -> PageSection:  # fmt: skip
    """Lines over the steps; a map where they would be too many, or where there is one step."""
    if len(names) <= SERIES and len(steps) > 1:
        series: list[Series] = [{"name": name, "values": [v.get(name) for v in values]} for name in names]
        return line_chart(id_, title, said, _x(steps), ("step", what), series)
    cells = [[v.get(name) for v in values] for name in names]
    return heat_map(id_, title, said, list(names), _x(steps), cells, what, ("", "step"))


def _tensors(history: RunHistory) -> PageTensors:
    """Those of the last checkpoint; numbers of both where both were measured."""
    last, whole, pairs = history.last, history.whole, history.pairs
    assert last is not None  # noqa: S101 - there is a section for them
    rows = last.rows
    changed = {d.name: d.relative for d in whole.elements} if whole is not None else {}
    alone = {*whole.only_left, *(m.name for m in (*whole.shapes, *whole.dtypes))} if whole else {r.name for r in rows}
    change = [changed.get(r.name, None if r.name in alone else 0.0) for r in rows]
    sides = [[None if (pair := pairs.get(r.name)) is None else pair[side].stats for r in rows] for side in (0, 1)]

    def numbers(of: Sequence[Stats | None]) -> list[float | None]:
        return [norm_of(s) for s in of]

    columns: list[Column] = [
        {"id": "dtype", "title": "Dtype", "kind": "code", "values": [r.dtype for r in rows]},
        {"id": "shape", "title": "Shape", "kind": "shape", "values": [r.shape for r in rows]},
        {"id": "bytes", "title": "Bytes", "kind": "bytes", "values": [r.nbytes for r in rows]},
        {"id": "relative", "title": "Change", "kind": "number", "values": change, "help": "Since the first checkpoint"},
        {"id": "norm", "title": "Norm", "kind": "number", "values": numbers(sides[0])},
        {"id": "first_norm", "title": "Norm at first", "kind": "number", "values": numbers(sides[1])},
    ]
    out: PageTensors = {"names": [r.name for r in rows], "columns": columns}
    if any(r.component != "model" for r in rows):
        out["parameters"] = [r.parameter for r in rows]
    if pairs:
        add_pairs(out, pairs, (history.steps[-1].name, history.steps[0].name))
    return out
