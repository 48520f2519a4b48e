"""What a report holds: the document that `render` makes a page of, and that `--json` prints.

A document is plain data. Who makes one says what is to be seen, never how: a section has a kind, and the page has one
function for each kind. It is the contract with the scripts of the page and the JSON of a report: unlike a document of
``answers.document``, it holds no callables and nothing that a terminal needs. Every text may hold anything, because
names of tensors and files do: the page shows it as text. Texts are one line unless it says otherwise. A number may be
None (unknown), NaN or infinite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Literal, NotRequired, TypedDict, cast

SCHEMA = "ckpttool.report/1"

FLAT = 0.03
"""Values that differ by less than this share of the largest are not drawn but written."""

Number = int | float | None
PageCell = str | int | float | bool | None
Kind = Literal["text", "code", "shape", "bytes", "count", "number", "share"]
"""How a value is shown: plain text; a name (monospaced); a list of sizes as `2 x 3`; bytes as `1.20 GB`; a whole number
with separators; a number of any size with a few significant digits; a share of 1 as a percentage."""


class Column(TypedDict):
    """One property of all tensors."""

    id: str
    """Of lowercase letters, digits and `_`, once in a document. Some have a meaning, if they are there: `component`,
    `dtype`, `shape`, `bytes` (the treemap draws these), `min` and `max` (ends of the histograms), `file`."""
    title: str
    kind: Kind
    values: Sequence[str | int | float | Sequence[int] | None]
    """One for each tensor, None where there is none: texts for `text` and `code`, sequences for `shape`, whole numbers
    below 2^53 for `bytes` and `count`, else numbers. Of `number` and `share` the page keeps six significant digits,
    four when there are more than 20,000 tensors, three above 50,000."""
    hidden: NotRequired[bool]
    """Shown in the details of a tensor, and in the table only if the reader chooses it."""
    help: NotRequired[str]
    """A sentence that explains the column."""


class PageTensors(TypedDict):
    """All tensors, as columns."""

    names: Sequence[str]
    """As people know them, in the order to show; each once."""
    parameters: NotRequired[Sequence[str]]
    """The parameter that each belongs to, where that is not its name (`optimizer/lm_head.weight/moment1_0`); layers and
    modules are read from it."""
    columns: Sequence[Column]
    histograms: NotRequired[Sequence[Sequence[int] | None]]
    """Counts of finite elements in bins of equal width between the columns `min` and `max`; the same number of bins for
    all, None or () for a tensor without. The page keeps their heights in steps of 1/15 of the
    highest, or of 1/7 when there are more than 20,000 tensors."""
    others: NotRequired[OtherHistograms]


class OtherHistograms(TypedDict):
    """Histograms of the same tensors in another checkpoint, between the columns `other_min` and `other_max`."""

    names: Sequence[str]
    """What this checkpoint and the other one are called."""
    counts: Sequence[Sequence[int] | None]


class _PageSection(TypedDict):
    id: str
    """Of lowercase letters, digits and `-`, once in a document: the address of the section is `#id`."""
    title: str
    text: NotRequired[str]
    """A paragraph or, with blank lines between, several that explain what is shown."""


class Treemap(_PageSection):
    """Sizes as areas, of the columns `bytes`, `dtype`, `component` and of the names. Needs `tensors`."""

    kind: Literal["treemap"]


class TensorsSection(_PageSection):
    """The table of tensors. Needs `tensors`; once in a document."""

    kind: Literal["tensors"]


class Picture(TypedDict):
    """A picture made by Python."""

    title: str
    caption: str
    """What can be seen, for those who cannot see it, too."""
    svg: str
    """An SVG document of shapes and text with presentation attributes: neither `style` nor `<style>`, scripts, links,
    images or foreign objects, which `render` refuses. Colours are `var(--ck-NAME, #fallback)`; see page.css."""


class HistogramsSection(_PageSection):
    """Histograms of one tensor in both checkpoints, laid over each other, with a choice of tensors. Needs `tensors`
    with `others`."""

    kind: Literal["histograms"]


class Figures(_PageSection):
    """Pictures."""

    kind: Literal["figures"]
    figures: Sequence[Picture]


class Series(TypedDict):
    """One line."""

    name: str
    values: Sequence[Number]
    """As many as there are x; None is a gap."""


class LineChart(_PageSection):
    """A line chart."""

    kind: Literal["lines"]
    x: Sequence[int | float | str]
    x_label: str
    y_label: str
    log: NotRequired[bool]
    """A logarithmic y axis; values that are not positive are left out of the drawing."""
    series: Sequence[Series]


class Heatmap(_PageSection):
    """Numbers as colours."""

    kind: Literal["heatmap"]
    rows: Sequence[str]
    columns: Sequence[str]
    row_label: NotRequired[str]
    column_label: NotRequired[str]
    values: Sequence[Sequence[Number]]
    """By row; None is an empty cell."""
    unit: str
    """What the numbers are: `relative change`."""
    log: NotRequired[bool]
    value_kind: NotRequired[Kind]
    """How numbers are shown; `number` if it is not given."""


class BarChart(_PageSection):
    """One bar for each label, from zero."""

    kind: Literal["bars"]
    labels: Sequence[str]
    values: Sequence[Number]
    unit: str
    log: NotRequired[bool]
    value_kind: NotRequired[Kind]


class TextSection(_PageSection):
    """A text alone: what a chart would not show any better."""

    kind: Literal["statement"]


class TableColumn(TypedDict):
    """One column of a small table."""

    title: str
    align: NotRequired[Literal["left", "right"]]
    """Numbers are to the right if it is not given."""
    kind: NotRequired[Kind]
    """`text` if it is not given."""


class PageTable(_PageSection):
    """A small table: all of its rows are in the page. It is folded behind its first rows."""

    kind: Literal["table"]
    first: NotRequired[int]
    """Rows before the fold, 25 if it is not given."""
    columns: Sequence[TableColumn]
    rows: Sequence[Sequence[PageCell]]


class PageFinding(TypedDict):
    """One finding of a check."""

    id: str
    severity: Literal["error", "warning", "note"]
    text: str
    where: NotRequired[str | None]
    hint: NotRequired[str | None]


class PageFindings(_PageSection):
    """What a check found."""

    kind: Literal["findings"]
    findings: Sequence[PageFinding]
    checked: Mapping[str, PageCell]
    """What was looked at, and how many of it: `{"files": 3, "tensors": 291}`."""


PageSection = (
    Treemap
    | TensorsSection
    | HistogramsSection
    | Figures
    | LineChart
    | Heatmap
    | BarChart
    | TextSection
    | PageTable
    | PageFindings
)


def section(kind: str, id_: str, title: str, said: str = "", **rest: Any) -> PageSection:
    """A section of any kind; ``said`` is the text above it, and ``rest`` what its class above needs."""
    about = {"id": id_, "title": title, "kind": kind, **({"text": said} if said else {})}
    return cast("PageSection", about | rest)


def line_chart(
    id_: str,
    title: str,
    said: str,
    x: Sequence[int | float | str],
    labels: tuple[str, str],
    series: Sequence[Series],
    *,
    log: bool = False,
) -> PageSection:
    """Lines over ``x``, or a sentence where all of them are flat; ``labels`` are those of x and y."""
    if all(_is_flat(s["values"]) for s in series):
        values = ", ".join([f"{s['name']} {_first(s['values']):.4g}" for s in series if _is_known(s["values"])])
        flat = f"Every {labels[0]} has the same value within {FLAT:.0%}: {values}." if values else "No value is known."
        return section("statement", id_, title, f"{said}\n\n{flat}")
    axes = {"x_label": labels[0], "y_label": labels[1]}
    return section("lines", id_, title, said, x=x, **axes, log=log, series=series)


def heat_map(
    id_: str,
    title: str,
    said: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[Number]],
    unit: str,
    labels: tuple[str, str] = ("layer", "module"),
    *,
    log: bool = True,
) -> PageSection:
    """Numbers as colours, or a sentence where all are the same; ``labels`` are those of rows and columns."""
    known = [v for row in values for v in row]
    if _is_flat(known):
        same = f"{unit} {_first(known):.4g}" if _is_known(known) else "no value is known"
        where = f"{rows[0]}, {columns[0]}" if len(known) == 1 else f"the same in all cells within {FLAT:.0%}"
        return section("statement", id_, title, f"{said}\n\n{where[:1].upper()}{where[1:]}: {same}.")
    named = {"row_label": labels[0], "column_label": labels[1]}
    return section("heatmap", id_, title, said, rows=rows, columns=columns, **named, values=values, unit=unit, log=log)


def _is_known(values: Sequence[Number]) -> bool:
    return any(v is not None for v in values)


def _first(values: Sequence[Number]) -> int | float:
    return next(v for v in values if v is not None)


def _is_flat(values: Sequence[Number]) -> bool:
    """Whether a drawing would show nothing; gaps between values, and values that are not finite, are worth showing."""
    known = [v for v in values if v is not None]
    if len(known) < len(values) or not all(map(isfinite, known)):
        return not known
    return not known or max(known) - min(known) <= FLAT * max(map(abs, known))


VerdictState = Literal["good", "bad", "unsure", "differs", "unknown"]


class Verdict(TypedDict):
    """An answer that stands above everything else."""

    state: VerdictState
    text: str


class ReportPage(TypedDict):
    """A report."""

    schema: Literal["ckpttool.report/1"]
    title: str
    subtitle: str
    verdicts: NotRequired[Sequence[Verdict]]
    """What the checkpoint is worth: complete or not, equal or not, in a sentence each."""
    facts: Sequence[Sequence[str]]
    """(label, text), shown as tiles above the sections: the most important ones first, texts of a few words."""
    notes: Sequence[str]
    sections: Sequence[PageSection]
    tensors: NotRequired[PageTensors]
