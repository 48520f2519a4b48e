"""The report of a merge (``merge --report``): what came from where, and how far the result is from its sources."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpttool.answers.by_layer import Layers, by_layer
from ckpttool.core.dtypes import nbytes
from ckpttool.core.tensor_names import printable
from ckpttool.core.words import count, short
from ckpttool.ops.merge.card import HEADS, recipe_text
from ckpttool.ops.merge.distances import NUMBERS, Distances, ParentDistances
from ckpttool.ops.merge.origins import TensorOrigin, came_from, computed, parameters_of, short_names, some_names
from ckpttool.report.files import save
from ckpttool.report.page import BEGINS, ReportPage, render
from ckpttool.report.page.document import (
    Column,
    Kind,
    PageCell,
    PageSection,
    Series,
    Verdict,
    heat_map,
    line_chart,
    section,
)

if TYPE_CHECKING:
    from ckpttool.ops.merge import MergeResult

WHAT = "the report"
_CHANGES = 50
"""Rows of the table of the largest changes."""
_MAPS = 8
"""Parents with a heat map."""
_KINDS: dict[str, Kind] = {
    "distance": "number",
    "cosine": "number",
    "task_cosine": "number",
    "changed": "share",
    "kept": "share",
    "agreeing": "share",
}
_HELP = {
    "distance": "L2 norm of the difference divided by that of the source",
    "cosine": "of the angle between the result and the source",
    "task_cosine": "of the angle between what the result and what the source differ from the base by",
    "changed": "share of the elements in which the source differs from the base",
    "kept": "share of the elements that the method lets the source add",
    "agreeing": "of the elements that are kept, the share whose sign is the elected one",
}


class _SourceNames(dict[str, str]):
    """What the sources are called, by label."""

    def of(self, parent: ParentDistances) -> str:
        return self[parent.label] + " (base)" * parent.is_base


def write(result: MergeResult, path: Path) -> None:
    """Write the report of a merge that was measured. Raises OutputError."""
    save(path, render(document(result)), WHAT, BEGINS)


def document(result: MergeResult) -> ReportPage:
    """The report as data."""
    distances, prepared = result.distances, result.prepared
    assert distances is not None  # noqa: S101 - it is asked for before the merge begins
    groups = came_from(prepared.plan, prepared.provenance.operands, prepared.method)
    layers = by_layer(distances.names)
    models = sum(not p.is_base for p in distances.parents)
    names = _SourceNames(short_names(prepared.refs))
    sections: list[PageSection] = [
        _distances(distances, names),
        _changes(distances, names),
        _origins(result, groups, names),
        _came_from(groups, names),
        *(c for n in ("distance", "task_cosine") for c in _chart(n, layers, distances, names)),
        *_maps(layers, distances, names),
        *(c for n in ("kept", "agreeing", "conflicts") for c in _chart(n, layers, distances, names)),
        _recipe(result),
        section("tensors", "tensors", "Tensors", "How far each tensor of the output is from the sources."),
    ]
    columns = [*_sizes(result, distances), *_columns(distances, names)]
    return {
        "schema": "ckpttool.report/1",
        "title": f"{result.dst.name or 'merge'}: {prepared.method} of {count(models, 'model')}",
        "subtitle": str(result.dst),
        "verdicts": [_verdict(result)],
        "facts": _facts(result, distances, names),
        "notes": list(dict.fromkeys(prepared.target.notes)),
        "sections": sections,
        "tensors": {"names": list(map(printable, distances.names)), "columns": columns},
    }


def _verdict(result: MergeResult) -> Verdict:
    merged, copied = result.prepared.merged, result.prepared.copied
    read = "read back: every element matches the merge" if result.verified else "not read back (--verify does)"
    return {"state": "good", "text": f"Complete: {count(merged, 'tensor')} merged, {copied:,} copied; {read}"}


def _facts(result: MergeResult, distances: Distances, names: _SourceNames) -> list[list[str]]:
    prepared = result.prepared
    p, plan = prepared.provenance, prepared.plan
    models = [x for x in distances.parents if not x.is_base]
    facts = [["method", prepared.method], ["models", str(len(models))]]
    facts += [["base", names[x.label]] for x in distances.parents if x.is_base]
    if p.seed is not None:
        facts.append(["seed", f"{p.seed} ({p.rng})"])
    facts += [
        ["elements", f"{sum(distances.elements):,}"],
        ["size", short(sum(o.size for o in plan.outputs))],
        ["format", prepared.target.format],
    ]
    if conflicts := distances.conflicts:
        share = conflicts(distances.everything)
        facts.append(["conflicts", "" if share is None else f"{100 * share:.2f} % of the elements"])
    return facts


def _table(
    id_: str, title: str, said: str, columns: Sequence[tuple[str, Kind]], rows: Sequence[Any], **more: Any
) -> PageSection:
    titles = [{"title": name, "kind": kind} if kind != "text" else {"title": name} for name, kind in columns]
    return section("table", id_, title, said, columns=titles, rows=rows, **more)


def _origins(result: MergeResult, groups: Sequence[TensorOrigin], names: _SourceNames) -> PageSection:
    """The sources."""
    bases = {g.base for g in groups if g.base}
    rows: list[list[PageCell]] = []
    for o in result.prepared.provenance.origins:
        how = parameters_of(groups, o.label) or ("base" if o.label in bases else "")
        size = sum(n for _, n in o.files)
        rows.append([names[o.label], how, o.format, size, result.hashes.get(o.label, ""), o.label])
    said = "The hash of a source is the same in every format; inspect --hash shows the parts of it."
    sizes: list[tuple[str, Kind]] = [("size", "bytes"), ("hash", "code"), ("place", "code")]
    columns: list[tuple[str, Kind]] = [("source", "code"), ("parameters", "text"), ("format", "text"), *sizes]
    return _table("sources", "Sources", said, columns, rows)


def _distances(distances: Distances, names: _SourceNames) -> PageSection:
    """How far the result is from each source as a whole."""
    joins = [(p, distances.joins(p)) for p in distances.parents]
    shown = [n for n in NUMBERS if any(n in j for _, j in joins)]
    rows = [
        [names.of(parent), *(each[n](distances.everything) if n in each else None for n in shown)]
        for parent, each in joins
    ]
    text = "; ".join(f"{HEADS[n]}: {_HELP[n]}" for n in shown)
    columns: list[tuple[str, Kind]] = [("source", "code"), *((HEADS[n], _KINDS[n]) for n in shown)]
    return _table("distances", "Distances", f"{text[:1].upper()}{text[1:]}.", columns, rows)


def _lines(
    key: str, title: str, y_label: str, said: str, layers: Layers, series: Sequence[Series]
) -> Iterator[PageSection]:
    """A line chart over the layers; none where the names speak of no layers."""
    inside = [i for i, row in enumerate(layers.rows) if row.layer is not None]
    if len(inside) < 2 or not series:
        return
    one_stack = len({layers.rows[i].stack for i in inside}) == 1
    x = [(layers.rows[i].layer or 0) if one_stack else layers.labels[i] for i in inside]
    chosen: list[Series] = [{"name": s["name"], "values": [s["values"][i] for i in inside]} for s in series]
    yield line_chart(key, title, said, x, ("layer", y_label), chosen)


_CHARTS = {
    "distance": (
        "distance-by-layer",
        "Distance by layer",
        "distance",
        "L2 norm of the difference from a source, divided by that of the source, by layer.",
    ),
    "task_cosine": (
        "direction-by-layer",
        "Direction by layer",
        "cosine of the changes",
        "How much the result has moved from the base in the direction of each source: 1 is all the way, 0 across it.",
    ),
    "kept": (
        "kept-by-layer",
        "Kept by layer",
        "share of elements",
        "Share of the elements that the method lets each source add; the others are dropped.",
    ),
    "agreeing": (
        "signs-by-layer",
        "Elected signs by layer",
        "share of kept elements",
        "Of the elements that a source adds, the share whose sign is the elected one; the others are left out.",
    ),
    "conflicts": (
        "conflicts-by-layer",
        "Conflicts by layer",
        "share of elements",
        "Share of the elements that one source would make larger and another one smaller than the base.",
    ),
}
"""Of each number: id, title, y axis and text of its chart."""


def _chart(number: str, layers: Layers, distances: Distances, names: _SourceNames) -> Iterator[PageSection]:
    """A line for each source that has this number; conflicts are of all sources together."""
    if number == "conflicts":
        found = [("conflicts", distances.conflicts)]
    else:
        found = [(names.of(parent), distances.joins(parent).get(number)) for parent in distances.parents]
    series = [Series(name=name, values=layers.by_row(join)) for name, join in found if join is not None]
    yield from _lines(*_CHARTS[number], layers, series)


def _maps(layers: Layers, distances: Distances, names: _SourceNames) -> Iterator[PageSection]:
    rows, columns, said = list(layers.labels), list(layers.modules), f"{_HELP['distance'].capitalize()}."
    for i, parent in enumerate(distances.parents[:_MAPS]):
        values = layers.grid(distances.joins(parent)["distance"])
        title = f"Distance from {names.of(parent)}"
        yield heat_map(f"distance-map-{i}", title, said, rows, columns, values, "distance", log=False)


def _changes(distances: Distances, names: _SourceNames) -> PageSection:
    """The tensors that are farthest from the base, or without one from the nearest source."""
    joins = [(p, distances.joins(p)["distance"]) for p in distances.parents]
    base = [j for p, j in joins if p.is_base]

    def far(i: int) -> float:
        # Without a base: what is near one source has come from there.
        found = [d for j in (base or [j for _, j in joins]) if (d := j((i,))) is not None and not math.isnan(d)]
        return min(found, default=-1.0)

    order = sorted(distances.everything, key=lambda i: (-far(i), i))[:_CHANGES]
    rows = [[printable(distances.names[i]), distances.elements[i], *(j((i,)) for _, j in joins)] for i in order]
    away: list[tuple[str, Kind]] = [(f"distance from {names.of(p)}", "number") for p, _ in joins]
    which = "the base" if base else "the nearest source"
    said = f"The tensors that are farthest from {which}, the largest distance first."
    columns: list[tuple[str, Kind]] = [("tensor", "code"), ("elements", "count"), *away]
    return _table("changes", "Largest changes", said, columns, rows, first=10)


def _came_from(groups: Sequence[TensorOrigin], names: _SourceNames) -> PageSection:
    rows = [
        [
            some_names(g.names),
            g.elements,
            g.nbytes,
            g.how,
            "; ".join(": ".join(filter(None, parts)) for parts in g.sources(names)),
        ]
        for g in groups
    ]
    said = "Tensors that come from the same sources in the same way, most elements first."
    sizes: list[tuple[str, Kind]] = [("elements", "count"), ("size", "bytes"), ("method", "text"), ("from", "code")]
    return _table("origin", "What came from where", said, [("tensors", "code"), *sizes], rows)


def _recipe(result: MergeResult) -> PageSection:
    text, _ = recipe_text(result.prepared.provenance)
    lines = text.expandtabs(4).splitlines()
    # Spaces that a browser does not fold.
    rows = [["\u00a0" * (len(s) - len(s.lstrip(" "))) + printable(s.lstrip(" "))] for s in lines]
    return _table("recipe", "Recipe", "", [("recipe", "code")], rows)


def _sizes(result: MergeResult, distances: Distances) -> list[Column]:
    """What a tensor is."""
    steps = {c.name: c for c in computed(result.prepared.plan)}
    found = [steps[n] for n in distances.names]
    sizes = [nbytes(c.dtype, n) for c, n in zip(found, distances.elements, strict=True)]
    norms = [math.sqrt(s) if s is not None and s >= 0 else None for s in distances.squares]
    return [
        {"id": "dtype", "title": "dtype", "kind": "text", "values": [c.dtype for c in found]},
        {"id": "shape", "title": "shape", "kind": "shape", "values": [list(c.shape) for c in found]},
        {"id": "bytes", "title": "bytes", "kind": "bytes", "values": sizes},
        {"id": "norm", "title": "norm", "kind": "number", "values": norms, "help": "L2 norm of the result"},
    ]


def _columns(distances: Distances, names: _SourceNames) -> list[Column]:
    """The numbers of each source, and of all of them."""
    found: list[Column] = []
    for i, parent in enumerate(distances.parents):
        for name, join in distances.joins(parent).items():
            values: list[float | None] = [join((at,)) for at in distances.everything]
            column: Column = {
                "id": f"{name}_{i}",
                "title": f"{HEADS[name]}, {names.of(parent)}",
                "kind": _KINDS[name],
                "values": values,
                "help": _HELP[name],
            }
            if name not in ("distance", "kept"):
                column["hidden"] = True
            found.append(column)
    if conflicts := distances.conflicts:
        found.append(
            {
                "id": "conflicts",
                "title": "conflicts",
                "kind": "share",
                "values": [conflicts((at,)) for at in distances.everything],
                "help": "share of the elements where two sources pull in opposite directions",
            }
        )
    return found
