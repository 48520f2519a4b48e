"""The report of a merge (``merge --report``): what came from where, and how far the result is from its sources."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckpttool.answers.by_layer import Layers, by_layer
from ckpttool.core.dtypes import nbytes
from ckpttool.core.tensor_names import printable
from ckpttool.core.words import count, short
from ckpttool.ops.merge.card import HEADS, recipe_text
from ckpttool.ops.merge.distances import NUMBERS, Distances, ParentDistances
from ckpttool.ops.merge.origins import TensorOrigin, came_from, computed, parameters_of, short_names, some_names
from ckpttool.report.files import save
from ckpttool.report.page import BEGINS, Document, render
from ckpttool.report.page.document import (
    Cell,
    Column,
    Heatmap,
    Kind,
    Lines,
    Number,
    Section,
    Series,
    Table,
    TableColumn,
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


class _Names(dict[str, str]):
    """What the sources are called, by label."""

    def of(self, parent: ParentDistances) -> str:
        return self[parent.label] + " (base)" * parent.is_base


def write(result: MergeResult, path: Path) -> None:
    """Write the report of a merge that was measured. Raises OutputError."""
    save(path, render(document(result)), WHAT, BEGINS)


def document(result: MergeResult) -> Document:
    """The report as data."""
    distances, prepared = result.distances, result.prepared
    assert distances is not None  # noqa: S101 - it is asked for before the merge begins
    groups = came_from(prepared.plan, prepared.provenance.operands, prepared.method)
    layers = by_layer(distances.names)
    models = sum(not p.is_base for p in distances.parents)
    names = _Names(short_names(prepared.refs))
    sections: list[Section] = [
        _origins(result, groups, names),
        _distances(distances, names),
        _came_from(groups, names),
        *_by_layer(layers, distances, names),
        *_maps(layers, distances, names),
        *_picked(layers, distances, names),
        _changes(distances, names),
        _recipe(result),
        {
            "id": "tensors",
            "title": "Tensors",
            "kind": "tensors",
            "text": "How far each tensor of the output is from the sources.",
        },
    ]
    columns = [*_sizes(result, distances), *_columns(distances, names)]
    return {
        "schema": "ckpttool.report/1",
        "title": f"{result.dst.name or 'merge'}: {prepared.method} of {count(models, 'model')}",
        "subtitle": str(result.dst),
        "facts": _facts(result, distances, names),
        "notes": list(dict.fromkeys(prepared.target.notes)),
        "sections": sections,
        "tensors": {"names": list(map(printable, distances.names)), "columns": columns},
    }


def _facts(result: MergeResult, distances: Distances, names: _Names) -> list[list[str]]:
    prepared = result.prepared
    p, plan = prepared.provenance, prepared.plan
    models = [x for x in distances.parents if not x.is_base]
    facts = [["method", prepared.method], ["models", str(len(models))]]
    facts += [["base", names[x.label]] for x in distances.parents if x.is_base]
    if p.seed is not None:
        facts.append(["seed", f"{p.seed} ({p.rng})"])
    facts += [
        ["tensors", f"{prepared.merged:,} merged, {prepared.copied:,} copied"],
        ["elements", f"{sum(distances.elements):,}"],
        ["size", short(sum(o.size for o in plan.outputs))],
        ["format", prepared.target.format],
    ]
    if conflicts := distances.conflicts:
        share = conflicts(distances.everything)
        facts.append(["conflicts", "" if share is None else f"{100 * share:.2f} % of the elements"])
    return facts


def _origins(result: MergeResult, groups: Sequence[TensorOrigin], names: _Names) -> Table:
    """The sources."""
    bases = {g.base for g in groups if g.base}
    rows: list[list[Cell]] = []
    for o in result.prepared.provenance.origins:
        said = parameters_of(groups, o.label) or ("base" if o.label in bases else "")
        size = sum(n for _, n in o.files)
        rows.append([names[o.label], said, o.format, size, result.hashes.get(o.label, ""), o.label])
    return {
        "id": "sources",
        "title": "Sources",
        "kind": "table",
        "text": "The hash of a source is the same in every format; inspect --hash shows the parts of it.",
        "columns": [
            {"title": "source", "kind": "code"},
            {"title": "parameters"},
            {"title": "format"},
            {"title": "size", "kind": "bytes"},
            {"title": "hash", "kind": "code"},
            {"title": "place", "kind": "code"},
        ],
        "rows": rows,
    }


def _distances(distances: Distances, names: _Names) -> Table:
    """How far the result is from each source as a whole."""
    joins = [(p, distances.joins(p)) for p in distances.parents]
    shown = [n for n in NUMBERS if any(n in j for _, j in joins)]
    rows: list[list[Cell]] = []
    for parent, each in joins:
        numbers = [each[n](distances.everything) if n in each else None for n in shown]
        rows.append([names.of(parent), *numbers])
    text = "; ".join(f"{HEADS[n]}: {_HELP[n]}" for n in shown)
    return {
        "id": "distances",
        "title": "Distances",
        "kind": "table",
        "text": f"{text[:1].upper()}{text[1:]}.",
        "columns": [{"title": "source", "kind": "code"}, *[TableColumn(title=HEADS[n], kind=_KINDS[n]) for n in shown]],
        "rows": rows,
    }


def _lines(key: str, layers: Layers, series: Sequence[Series], title: str, y_label: str, text: str) -> list[Lines]:
    """A line chart over the layers; none where the names speak of no layers."""
    inside = [i for i, row in enumerate(layers.rows) if row.layer is not None]
    if len(inside) < 2 or not series:
        return []
    one_stack = len({layers.rows[i].stack for i in inside}) == 1
    x = [layers.rows[i].layer if one_stack else layers.labels[i] for i in inside]
    chosen = [Series(name=s["name"], values=[s["values"][i] for i in inside]) for s in series]
    return [
        {
            "id": key,
            "title": title,
            "kind": "lines",
            "text": text,
            "x": [n for n in x if n is not None],
            "x_label": "layer",
            "y_label": y_label,
            "series": chosen,
        }
    ]


def _series(layers: Layers, distances: Distances, number: str, names: _Names) -> list[Series]:
    """A line for each parent that has this number."""
    found: list[Series] = []
    for parent in distances.parents:
        join = distances.joins(parent).get(number)
        if join is not None:
            found.append({"name": names.of(parent), "values": layers.by_row(join)})
    return found


def _by_layer(layers: Layers, distances: Distances, names: _Names) -> list[Lines]:
    return [
        *_lines(
            "distance-by-layer",
            layers,
            _series(layers, distances, "distance", names),
            "Distance by layer",
            "distance",
            "L2 norm of the difference to a source by that of the source, of all tensors of a layer together.",
        ),
        *_lines(
            "direction-by-layer",
            layers,
            _series(layers, distances, "task_cosine", names),
            "Direction by layer",
            "cosine of the changes",
            "How much the result has moved away from the base in the direction of each source: 1 is all the way in its"
            " direction, 0 across it.",
        ),
    ]


def _maps(layers: Layers, distances: Distances, names: _Names) -> list[Heatmap]:
    found: list[Heatmap] = []
    for i, parent in enumerate(distances.parents[:_MAPS]):
        found.append(
            {
                "id": f"distance-map-{i}",
                "title": f"Distance from {names.of(parent)}",
                "kind": "heatmap",
                "rows": list(layers.labels),
                "columns": list(layers.modules),
                "row_label": "layer",
                "column_label": "module",
                "values": layers.grid(distances.joins(parent)["distance"]),
                "unit": "distance",
            }
        )
    return found


def _picked(layers: Layers, distances: Distances, names: _Names) -> list[Section]:
    """What the method kept, and which signs agreed: of methods that thin out or elect."""
    conflicts = distances.conflicts
    own = [Series(name="conflicts", values=layers.by_row(conflicts))] if conflicts else []
    return [
        *_lines(
            "kept-by-layer",
            layers,
            _series(layers, distances, "kept", names),
            "Kept by layer",
            "share of elements",
            "Share of the elements that the method lets each source add; the others are dropped.",
        ),
        *_lines(
            "signs-by-layer",
            layers,
            _series(layers, distances, "agreeing", names),
            "Elected signs by layer",
            "share of kept elements",
            "Of the elements that a source adds, the share whose sign is the elected one; the others are left out.",
        ),
        *_lines(
            "conflicts-by-layer",
            layers,
            own,
            "Conflicts by layer",
            "share of elements",
            "Share of the elements that one source would make larger and another one smaller than the base.",
        ),
    ]


def _changes(distances: Distances, names: _Names) -> Table:
    """The tensors that are farthest from the base, or without one from the nearest source."""
    joins = [(p, distances.joins(p)["distance"]) for p in distances.parents]
    base = [j for p, j in joins if p.is_base]

    def far(i: int) -> float:
        # Without a base: what is near one source has come from there.
        found = [d for j in (base or [j for _, j in joins]) if (d := j((i,))) is not None and not math.isnan(d)]
        return min(found, default=-1.0)

    order = sorted(distances.everything, key=lambda i: (-far(i), i))[:_CHANGES]
    columns: list[TableColumn] = [
        {"title": "tensor", "kind": "code"},
        {"title": "elements", "kind": "count"},
        *[TableColumn(title=f"distance from {names.of(p)}", kind="number") for p, _ in joins],
    ]
    rows: list[list[Cell]] = []
    for i in order:
        about: list[Cell] = [printable(distances.names[i]), distances.elements[i]]
        rows.append([*about, *[j((i,)) for _, j in joins]])
    return {
        "id": "changes",
        "title": "Largest changes",
        "kind": "table",
        "text": "The tensors that are farthest from the base, with the largest distance first."
        if base
        else "The tensors that are farthest from the source that is nearest to them, with the largest distance first.",
        "columns": columns,
        "rows": rows,
    }


def _came_from(groups: Sequence[TensorOrigin], names: _Names) -> Table:
    rows: list[list[Cell]] = []
    for g in groups:
        sources = "; ".join(": ".join(filter(None, said)) for said in g.sources(names))
        rows.append([some_names(g.names), g.elements, g.nbytes, g.how, sources])
    return {
        "id": "origin",
        "title": "What came from where",
        "kind": "table",
        "text": "Tensors that are made of the same sources in the same way, those with most elements first.",
        "columns": [
            {"title": "tensors", "kind": "code"},
            {"title": "elements", "kind": "count"},
            {"title": "size", "kind": "bytes"},
            {"title": "method"},
            {"title": "from", "kind": "code"},
        ],
        "rows": rows,
    }


def _recipe(result: MergeResult) -> Table:
    text, _ = recipe_text(result.prepared.provenance)
    lines = text.expandtabs(4).splitlines()
    # Spaces that a browser does not fold.
    rows: list[list[Cell]] = [["\u00a0" * (len(s) - len(s.lstrip(" "))) + printable(s.lstrip(" "))] for s in lines]
    return {
        "id": "recipe",
        "title": "Recipe",
        "kind": "table",
        "columns": [{"title": "recipe", "kind": "code"}],
        "rows": rows,
    }


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


def _columns(distances: Distances, names: _Names) -> list[Column]:
    """The numbers of each source, and of all of them."""
    found: list[Column] = []
    for i, parent in enumerate(distances.parents):
        for name, join in distances.joins(parent).items():
            values: list[Number] = [join((at,)) for at in distances.everything]
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
