"""A survey of a checkpoint as a report: which sections it has, and what each of them shows.

What is summed by layer and module is summed here; the page draws it. What needs all tensors (sizes, the table) the page
works out of their columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite, prod
from pathlib import Path
from typing import Any

from ckpttool.answers.by_layer import Join, Layers, by_layer, largest, norm, share, smallest
from ckpttool.answers.findings import ERROR, INFO, WARNING, folded
from ckpttool.core.tensor_names import natural_order
from ckpttool.core.words import count, short
from ckpttool.errors import CkptError, OutputError, UsageError, plain
from ckpttool.kernels.stats import Stats
from ckpttool.ops.inspect.diff import DiffResult
from ckpttool.ops.inspect.drift import Drift
from ckpttool.ops.inspect.history import Pairs
from ckpttool.ops.inspect.identity import identify, large
from ckpttool.ops.inspect.listing import TensorListing, mesh_text, relative, sharding_of
from ckpttool.ops.inspect.values import Values
from ckpttool.ops.inspect.views.page import PageView, ReportContents
from ckpttool.report import text
from ckpttool.report.files import refuse_others, save
from ckpttool.report.findings import parsed, write_findings
from ckpttool.report.page import BEGINS, render
from ckpttool.report.page.document import (
    Column,
    PageSection,
    PageTensors,
    ReportPage,
    Series,
    Verdict,
    VerdictState,
    heat_map,
    line_chart,
    section,
)
from ckpttool.report.stats import norm_of
from ckpttool.report.svg import figures
from ckpttool.storage.place import resolved

SERIES = 8
"""Most lines of one chart: the modules with most bytes."""
FIRST = 10
"""Changes above the fold."""
OUTLIER = 8.0
"""Largest absolute value by standard deviation, from which outliers are drawn."""
OVERLAID = "One tensor in both checkpoints, those that changed most first. The areas of both histograms are equal."
SHOWN = 500
"""Most rows of a table of changes; the table of tensors has all."""

Known = list[float | None]


def check_page(view: PageView) -> None:
    """Raises OutputError for a file that is there and is no page, such as one of SRC's, and for a missing directory.

    Before a checkpoint is read for hours.
    """
    path = _path(view)
    if path.is_dir():
        raise OutputError("--html names a directory", where=str(path), hint="name a file in it")
    if not path.parent.is_dir():
        raise OutputError("the directory of the report does not exist", where=str(path.parent), hint="create it first")
    refuse_others(path, "the report", BEGINS)


def _path(view: PageView) -> Path:
    if view.html is None:
        raise UsageError("--html needs a file name")
    return view.html


def show_survey(survey: ReportContents, *, as_json: bool, quiet: bool = False) -> int:
    """Write the report and report its size; with ``as_json`` print its document. Returns the exit code."""
    made = document(survey)
    size = save_page(survey.view, render(made))
    if not as_json and not quiet:
        text.notes(survey.notes)
    said = write_findings(survey.check, parsed(survey.view.findings))
    if as_json:
        text.dump(printed(made), entries=len(survey.listing.rows) if survey.listing else 0)
    elif not quiet:
        line = f"{plain(str(survey.view.html))}: {short(size)}, {_what(survey)}"
        if said:
            text.message(line)
        else:
            text.write((text.fold(line) if text.on_terminal() else line) + "\n")
    # A check that was asked for has said why there are no tensors.
    failures = survey.failures[survey.view.check and survey.listing is None :]
    for error in failures:
        text.message(error.render())
    return 3 if not survey.ok else failures[0].exit_code if failures else 0


def save_page(view: PageView, page: str) -> int:
    """Write a page; returns its bytes. Raises OutputError."""
    save(_path(view), page, "the report", BEGINS)
    return len(page.encode(errors="backslashreplace"))


def _what(survey: ReportContents) -> str:
    """What the report is of, in a few words."""
    parts = [count(len(survey.listing.rows), "tensor")] if survey.listing is not None else ["no tensors"]
    parts += ["statistics"] if survey.values else []
    parts.append(_verdict(survey))
    if survey.diff is not None:
        verdict = survey.diff.verdict("SRC", survey.other)
        parts.append(f"{verdict.word}: {verdict.counts}")
    return ", ".join(parts)


def _verdict(survey: ReportContents) -> str:
    errors, warnings = (sum(f.severity == s for f, _ in folded(survey.check.findings)) for s in (ERROR, WARNING))
    found = ", ".join(count(n, w) for n, w in ((errors, "error"), (warnings, "warning")) if n)
    return found or f"no problem found{'' if survey.check.values else ' in headers'}"


def printed(value: Any) -> Any:
    """As JSON has it: numbers that are not finite as texts, as in every view."""
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if isinstance(value, dict):
        return {k: printed(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [printed(v) for v in value]
    return value


# -- the document


def document(survey: ReportContents) -> ReportPage:
    """The report of a survey, as ``render`` takes it and ``--json`` prints it."""
    listing = survey.listing
    sections: list[PageSection] = [] if survey.diff is None else list(_changes(survey.diff, survey.other))
    found = _findings(survey)
    if survey.check.findings:
        sections.append(found)
    if listing is not None and len(listing.rows) > 1:
        sections.append(section("treemap", "sizes", "Sizes"))
    if survey.layout is not None:
        pictures = [f._asdict() for f in figures(survey.layout)]
        sections.append(section("figures", "ranks", "Layout over ranks", figures=pictures))
    if survey.pairs:
        sections.append(section("histograms", "histograms", "Histograms of both", OVERLAID))
    if survey.values:
        sections += _by_layer(survey)
    if not survey.check.findings:
        sections.append(found)
    name = resolved(survey.path).name or str(survey.path)
    out: ReportPage = {
        "schema": "ckpttool.report/1",
        "title": name,
        "subtitle": identify(listing).headline if listing is not None else "The checkpoint cannot be opened",
        "verdicts": list(_verdicts(survey)),
        "facts": list(_facts(survey)),
        "notes": [*survey.notes, *map(_said, survey.failures)],
        "sections": sections,
    }
    if listing is not None and listing.rows:
        out["sections"] = [*sections, section("tensors", "tensors", "Tensors")]
        out["tensors"] = _tensors(survey, listing)
    return out


def _said(error: CkptError) -> str:
    return " ".join([error.what, *(f"({w})" for w in error.where[:1])])


def _verdicts(survey: ReportContents) -> Iterator[Verdict]:
    """Whether it is complete, and whether it is equal to what it was compared with."""
    check, listing, diff = survey.check, survey.listing, survey.diff
    errors = [f for f in check.findings if f.severity == ERROR]
    warnings = [f for f in check.findings if f.severity == WARNING]
    if errors or listing is None:
        why = errors[0].text if errors else _said(survey.failures[0])
        more = f" (and {len(check.findings) - 1:,} more findings)" if len(check.findings) > 1 else ""
        yield {"state": "bad", "text": f"Not complete or damaged: {why}{more}"}
    else:
        held = f"{count(listing.tensors, 'tensor')} in {count(len(listing.files), 'file')}"
        where = "headers and elements" if survey.view.checks_elements else "the headers"
        found = f"{_verdict(survey)}: {warnings[0].text}" if warnings else f"no problem found in {where}"
        yield {"state": "unsure" if warnings else "good", "text": f"Complete: {held}; {found}"}
    if diff is None:
        return
    state: dict[bool | None, VerdictState] = {True: "good", False: "differs", None: "unknown"}
    yield {"state": state[diff.equal], "text": diff.verdict("this checkpoint", survey.other).naming(survey.other)}


def _facts(survey: ReportContents) -> Iterator[list[str]]:
    """Labels and texts of a few words, what matters most first."""
    listing = survey.listing
    if listing is not None:
        yield from _facts_of(listing)
    elif survey.check.format:
        yield ["Format", survey.check.format]
    yield ["Place", str(survey.path)]


def _facts_of(listing: TensorListing) -> Iterator[list[str]]:
    stored, known, totals = listing.stored, identify(listing), listing.totals()
    if known.parameters is not None:
        yield ["Parameters", large(known.parameters)]
    if known.precision:
        yield ["Precision", known.precision]
    yield ["Size", short(listing.nbytes)]
    chosen = f"{len(listing.rows):,} of " if len(listing.rows) != listing.tensors else ""
    yield ["Tensors", f"{chosen}{listing.tensors:,}"]
    yield ["Files", f"{len(listing.files):,}"]
    if known.layers:
        yield ["Layers", f"{known.layers:,}"]
    if known.experts:
        yield ["Experts", f"{known.experts:,}"]
    yield ["Format", listing.format]
    if stored.mesh.world > 1 or stored.cut or sharding_of(stored) > 1:
        yield ["Parallelism", mesh_text(stored)]
    if len(totals) > 1:
        yield ["Dtypes", ", ".join(t.dtype for t in totals)]
    if len(listing.components) > 1:
        yield ["Components", ", ".join(listing.components)]


# -- tensors


def _tensors(survey: ReportContents, listing: TensorListing) -> PageTensors:
    rows = listing.rows
    files = [*(relative(f.place, listing.stored.root) for f in listing.files), None]
    columns: list[Column] = [
        {"id": "dtype", "title": "Dtype", "kind": "code", "values": [r.dtype for r in rows]},
        {"id": "shape", "title": "Shape", "kind": "shape", "values": [r.shape for r in rows]},
        {"id": "bytes", "title": "Bytes", "kind": "bytes", "values": [r.nbytes for r in rows]},
    ]
    if len(listing.components) > 1:
        components = [r.component for r in rows]
        columns.insert(0, {"id": "component", "title": "Component", "kind": "text", "values": components})
    if survey.values:
        columns += _measured([v.stats for v in survey.values])
    if survey.diff is not None and survey.diff.values:
        columns += _apart(survey.diff, listing)
    columns += [
        {"id": "file", "title": "File", "kind": "code", "values": [files[r.file] for r in rows]},
    ]
    offsets = _hidden("offset", "Offset", "count", [r.offset if r.file >= 0 else None for r in rows])
    columns.append({**offsets, "help": "The byte of the file at which its first piece begins"})
    if survey.holders:
        ranks: Column = {"id": "ranks", "title": "Ranks", "kind": "text", "values": list(survey.holders)}
        columns.append({**ranks, "help": "The ranks that hold some of it"})
    if any(r.pieces != 1 for r in rows):
        columns.append(_hidden("pieces", "Pieces", "count", [r.pieces for r in rows]))
    if any(r.derived for r in rows):
        said = ["rounded from its master weight" if r.derived else None for r in rows]
        columns.append(_hidden("derived", "Stored as", "text", said))
    out: PageTensors = {"names": [r.name for r in rows], "columns": columns}
    if any(r.component != "model" for r in rows):
        out["parameters"] = [r.parameter for r in rows]
    if survey.values:
        out["histograms"] = [counts_of(v) for v in survey.values]
    if survey.pairs and survey.diff is not None:
        other = resolved(survey.diff.right.path).name or str(survey.diff.right.path)
        add_pairs(out, survey.pairs, (resolved(survey.path).name, other))
    return out


def counts_of(values: Values | None) -> Sequence[int] | None:
    """The bins of a tensor's histogram."""
    return values.histogram.counts if values is not None and values.histogram is not None else None


def add_pairs(tensors: PageTensors, pairs: Pairs, sides: tuple[str, str]) -> None:
    """Histograms of both checkpoints, which have these names, with the columns that say where they begin and end."""
    found = [pairs.get(name, (None, None)) for name in tensors["names"]]
    columns = list(tensors["columns"])
    ends = [("other_min", f"Min of {sides[1]}", 1, "minimum"), ("other_max", f"Max of {sides[1]}", 1, "maximum")]
    if "histograms" not in tensors:
        ends += [("min", "Min", 0, "minimum"), ("max", "Max", 0, "maximum")]
        tensors["histograms"] = [counts_of(one) for one, _ in found]
    for id_, title, side, attribute in ends:
        stats = [None if (v := pair[side]) is None else v.stats for pair in found]
        values = [None if s is None else getattr(s, attribute) for s in stats]
        columns.append(_hidden(id_, title, "number", values))
    tensors["columns"] = columns
    tensors["others"] = {"names": sides, "counts": [counts_of(other) for _, other in found]}


def _hidden(name: str, title: str, kind: Any, values: Sequence[Any]) -> Column:
    return {"id": name, "title": title, "kind": kind, "values": values, "hidden": True}


def _measured(stats: Sequence[Stats | None]) -> list[Column]:
    """Statistics; what no tensor has, such as a NaN, has no column."""

    def each(attribute: str) -> list[Any]:
        return [None if s is None else getattr(s, attribute) for s in stats]

    out: list[Column] = [
        {"id": "min", "title": "Min", "kind": "number", "values": each("minimum")},
        {"id": "max", "title": "Max", "kind": "number", "values": each("maximum")},
        {"id": "mean", "title": "Mean", "kind": "number", "values": each("mean")},
        {"id": "std", "title": "Std", "kind": "number", "values": each("std")},
        {"id": "norm", "title": "Norm", "kind": "number", "values": [norm_of(s) for s in stats]},
    ]
    out[-1]["help"] = "The root of the sum of all squares (L2)"
    zeros = [None if s is None else s.zeros / s.elements if s.elements else 0.0 for s in stats]
    out.append({"id": "zeros", "title": "Zeros", "kind": "share", "values": zeros, "help": "Share of elements"})
    for name, title in (("nan", "NaN"), ("inf", "Inf"), ("saturated", "Saturated")):
        found = each(name)
        if any(found):
            out.append({"id": name, "title": title, "kind": "count", "values": found})
    return out


def _apart(diff: DiffResult, listing: TensorListing) -> list[Column]:
    """How far each tensor is from B's: 0 for equal ones, None where it is not known."""
    changed = {d.name: d for d in diff.elements}
    alone = {*diff.only_left, *(m.name for m in (*diff.shapes, *diff.dtypes))}
    far: Known = []
    angle: Known = []
    for row in listing.rows:
        found = changed.get(row.name)
        if found is not None:
            far.append(found.relative)
            angle.append(found.cosine)
            continue
        # Under Hugging Face names, a name of this side may be none that was compared; and what is within a tolerance
        # need not be equal.
        compared = row.component in diff.by_component and row.name not in alone and not diff.renamed
        far.append(0.0 if compared and diff.tolerance is None else None)
        angle.append(None)
    norms, same = "Norm of the difference by the norm of the other side's tensor", "1 where the direction is equal"
    return [
        {"id": "relative", "title": "Change", "kind": "number", "values": far, "help": norms},
        {"id": "cosine", "title": "Cosine", "kind": "number", "values": angle, "help": same},
    ]


# -- by layer


def _by_layer(survey: ReportContents) -> Iterator[PageSection]:
    """Plots of the model's statistics; of the first component where there is no model."""
    listing = survey.listing
    if listing is None or not listing.components:
        return
    main = "model" if "model" in listing.components else listing.components[0]
    mine = [v for v in survey.values if v.row.component == main and v.stats is not None]
    stats = [v.stats for v in mine if v.stats is not None]
    layers = by_layer([v.row.parameter for v in mine])
    inside = [i for i, r in enumerate(layers.rows) if r.layer is not None]
    if len(inside) < 2:
        return
    of = "" if main == "model" else f" ({main})"
    sizes = [prod(v.row.shape) for v in mine]
    shown = _largest_modules(layers, inside, sizes)
    x = [layers.labels[i].removeprefix("layer ") for i in inside]

    def chart(
        id_: str, title: str, y: str, said: str, lines: list[tuple[str, Known]], *, log: bool = False
    ) -> PageSection:
        series: list[Series] = [{"name": name, "values": values} for name, values in lines]
        return line_chart(id_, title + of, said, x, ("layer", y), series, log=log)

    norms = layers.grid(norm([norm_of(s) for s in stats]))
    yield chart(
        "norms",
        "Norms by layer",
        "L2 norm",
        "The norm of all elements of a module in a layer together, experts as one."
        + (f" The {SERIES} modules with most elements are drawn." if len(shown) == SERIES else ""),
        [(layers.modules[c], [norms[i][c] for i in inside]) for c in shown],
        log=True,
    )
    # A vector of norms lies around 1 with next to no spread: it would hide what the matrices have.
    matrices = [s if len(v.row.shape) > 1 else None for v, s in zip(mine, stats, strict=True)]
    extremes: list[tuple[str, Join]] = [
        ("max", largest([None if s is None else s.maximum for s in matrices])),
        ("min", smallest([None if s is None else s.minimum for s in matrices])),
    ]
    if any(matrices):
        yield chart(
            "extremes",
            "Extremes by layer",
            "value",
            "The largest and the smallest element of the matrices of each layer.",
            [(name, _at(layers.by_row(join), inside)) for name, join in extremes],
        )
        outliers = [s.amax / s.std if s and s.amax is not None and s.std else None for s in matrices]
        yield _outliers(layers, inside, outliers, of)
    zeros = share([s.zeros for s in stats], [s.elements for s in stats])
    if any(s.zeros for s in stats):
        yield chart(
            "zeros",
            "Zeros by layer",
            "share of elements",
            "The share of elements that are exactly zero.",
            [("zeros", _at(layers.by_row(zeros), inside))],
        )


def _at(values: Known, places: Sequence[int]) -> Known:
    return [values[i] for i in places]


def _largest_modules(layers: Layers, inside: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Columns of the modules with most elements that several layers have, in the order of the names."""
    held: dict[int, list[int]] = {}
    for (row, column), at in layers.cells.items():
        if row in set(inside):
            held.setdefault(column, []).append(sum(sizes[i] for i in at))
    several = [c for c, found in held.items() if len(found) > 1] or list(held)
    return sorted(sorted(several, key=lambda c: (-sum(held[c]), c))[:SERIES])


def _outliers(layers: Layers, inside: Sequence[int], found: Known, of: str) -> PageSection:
    """A map where there are outliers, else a sentence."""
    title = f"Outliers by layer and module{of}"
    said = (
        "The largest absolute value divided by the standard deviation, of the matrix of each module where this is"
        " largest. Normally distributed weights have 5 to 6; large values make quantization less exact."
    )
    grid = layers.grid(largest(found))
    most = max((v for i in inside for v in grid[i] if v is not None), default=0.0)
    if most < OUTLIER:
        return section("statement", "outliers", title, f"{said}\n\nNo outliers: the largest value is {most:.3g}.")
    used = [c for c in range(len(layers.modules)) if any(grid[i][c] is not None for i in inside)]
    rows = [layers.labels[i] for i in inside]
    values = [[grid[i][c] for c in used] for i in inside]
    return heat_map("outliers", title, said, rows, [layers.modules[c] for c in used], values, "amax / std")


# -- findings and changes


def _findings(survey: ReportContents) -> PageSection:
    words = {ERROR: "error", WARNING: "warning", INFO: "note"}
    found = []
    for f, also in folded(survey.check.findings):
        found.append(
            {"id": f.id, "severity": words[f.severity], "text": f.text + also, "where": f.where, "hint": f.hint}
        )
    told = "" if survey.check.values else "Values were not checked; --check --values reads them, too."
    checked = {f"{noun}s": n for noun, n in survey.check.checked.items()}
    return section("findings", "findings", "Findings", told, findings=found, checked=checked)


def _changes(diff: DiffResult, other: str) -> Iterator[PageSection]:
    """The largest changes first; nothing for equal checkpoints."""
    if diff.elements:
        changed = [[d.name, d.relative, d.cosine, d.max_abs, d.elements / d.total] for d in diff.elements]
        titles = [("Tensor", "code"), ("Change", "number"), ("Cosine", "number"), ("Largest difference", "number")]
        said = f"Change is the L2 norm of the difference divided by the norm of {other}'s tensor."
        yield _table("changes", "Largest changes", said, [*titles, ("Elements changed", "share")], changed)
    rows: list[list[Any]] = [["only here", name, ""] for name in diff.only_left]
    rows += [[f"only in {other}", name, ""] for name in diff.only_right]
    rows += [["shape", m.name, f"{m.left} here, {m.right} there"] for m in diff.shapes]
    rows += [["dtype", m.name, f"{m.left} here, {m.right} there"] for m in diff.dtypes]
    if rows:
        titles = [("Difference", "text"), ("Tensor", "code"), ("What", "text")]
        yield _table("differences", "Differences in names, shapes and dtypes", "", titles, rows)
    if (drift := diff.drift) is not None and len(drift.cells) > 1:
        yield _drift(drift, other)


def _table(id_: str, title: str, said: str, columns: Sequence[tuple[str, str]], rows: list[list[Any]]) -> PageSection:
    if len(rows) > SHOWN:
        said += f" The first {SHOWN} of {len(rows):,} are listed; --diff --json has all."
    titles = [{"title": name, "kind": kind} for name, kind in columns]
    return section("table", id_, title, said.strip(), columns=titles, rows=rows[:SHOWN], first=FIRST)


def _drift(drift: Drift, other: str) -> PageSection:
    """Relative change by layer and module; layers in their order, modules with the largest change first."""
    layers = list(dict.fromkeys(layer for layer, _ in drift.cells))
    layers = [layers[i] for i in natural_order(layers)]
    modules = [d.name for d in drift.modules]
    of = "" if drift.component == "model" else f" ({drift.component})"
    said = f"L2 norm of the difference divided by the norm of {other}'s tensors. Empty cells did not change."
    values = [[drift.cells.get((layer, module)) for module in modules] for layer in layers]
    return heat_map("drift", f"Change by layer and module{of}", said, layers, modules, values, "relative change")
