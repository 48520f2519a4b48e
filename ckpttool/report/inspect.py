"""What a view of ``inspect`` found: its document, its drawings, and the files that go with it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import singledispatch
from typing import TYPE_CHECKING

from ckpttool.answers.fields import shape
from ckpttool.core.words import count, short
from ckpttool.errors import UsageError, plain
from ckpttool.ops.inspect.views.base import PrintedAnswer, View, ViewAnswer
from ckpttool.ops.inspect.views.check import CheckAnswer
from ckpttool.ops.inspect.views.page import PageView, ReportContents, RunContents
from ckpttool.ops.inspect.views.ranks import LayoutDrawing, RanksAnswer
from ckpttool.ops.inspect.views.show import Elements
from ckpttool.ops.inspect.views.tree import TreeDrawing
from ckpttool.ops.inspect.views.values import FoldedStats, HistogramBars
from ckpttool.report import text
from ckpttool.report.convert_json import program_lines
from ckpttool.report.findings import parsed, write_findings
from ckpttool.report.meters import LONGEST, bar, histogram
from ckpttool.report.render import draws, show
from ckpttool.report.style import BOLD, coloured, column_colours, styled
from ckpttool.report.tables import fit
from ckpttool.report.text import aligned, columns_of, width
from ckpttool.storage.place import resolved
from ckpttool.storage.system import beside

if TYPE_CHECKING:
    from ckpttool.ops.inspect.listing import ComponentTotal, TensorListing
    from ckpttool.ops.inspect.tree import TreeLine


def prepare(view: View[ViewAnswer], *, as_json: bool) -> None:
    """Raises UsageError and OutputError for files that could not be written, before a checkpoint is read for hours."""
    files = parsed(getattr(view, "findings", ()))
    if as_json and any(file is None for _, file in files):
        raise UsageError("--json and --findings both write to stdout", hint="name a file: --findings KIND=FILE")
    if isinstance(view, PageView):
        from ckpttool.report.survey import check_page

        check_page(view)


@singledispatch
def show_answer(answer: ViewAnswer, *, as_json: bool, quiet: bool = False) -> int:
    """Print an answer, and write the files that go with it. Returns the exit code."""
    if not isinstance(answer, PrintedAnswer):
        raise TypeError(answer)
    show(answer.document(), as_json=as_json, quiet=quiet)
    return 0 if answer.ok else 3


@show_answer.register
def _show_survey(answer: ReportContents, *, as_json: bool, quiet: bool = False) -> int:
    from ckpttool.report.survey import show_survey  # with the page, which few need

    return show_survey(answer, as_json=as_json, quiet=quiet)


@show_answer.register
def _show_run(answer: RunContents, *, as_json: bool, quiet: bool = False) -> int:
    from ckpttool.report.page import render
    from ckpttool.report.run_page import document
    from ckpttool.report.survey import printed, save_page

    made = document(answer)
    size = save_page(answer.view, render(made))
    if as_json:
        text.dump(printed(made))
    elif not quiet:
        text.notes(answer.notes)
        read = f", {len(answer.history.steps):,} read" if answer.history else ""
        found = count(len(answer.run.rows), "checkpoint")
        text.write(f"{plain(str(answer.view.html))}: {short(size)}, {found}{read}\n")
    return 0


@show_answer.register
def _show_check(answer: CheckAnswer, *, as_json: bool, quiet: bool = False) -> int:
    """With the findings in other forms, one of which may take the place of text."""
    if not write_findings(answer.result, parsed(answer.findings)):
        show(answer.document(), as_json=as_json, quiet=quiet)
    elif not quiet:
        text.notes(answer.result.notes)
    return 0 if answer.ok else 3


@show_answer.register
def _show_ranks(answer: RanksAnswer, *, as_json: bool, quiet: bool = False) -> int:
    """With pictures in files, ``FILE-2.svg`` the second page."""
    names = []
    if (svg := answer.svg) is not None:
        from ckpttool.report.files import save
        from ckpttool.report.svg import pages

        drawn = pages(answer.layout, f"{resolved(answer.listing.path).name}: who holds what")
        names = [svg, *(beside(svg.with_name(svg.stem), after=f"-{n}{svg.suffix}") for n in range(2, len(drawn) + 1))]
        for name, page in zip(names, drawn, strict=True):
            save(name, page, "the picture", "<svg")
    show(answer.document(), as_json=as_json, quiet=quiet)
    if len(names) > 1 and not quiet:
        text.notes([f"{len(names)} pages: {', '.join(map(str, names))}"])
    return 0 if answer.ok else 3


# -- drawings


@draws
def _layout(section: LayoutDrawing) -> None:
    from ckpttool.report.layout import draw

    text.write(draw(section.layout))


@draws
def _folded(section: FoldedStats) -> None:
    from ckpttool.report.stats import show_folded

    show_folded(section.values)


@draws
def _elements(section: Elements) -> None:
    import numpy as np

    s = section.slice
    where = f"[{s.index}]" if s.index else ""
    cut = f" of {shape(s.shape)}" if s.index else ""
    text.write(f"{plain(s.name)}{where}  {s.dtype} {shape(s.values.shape)}{cut}\n")
    columns = width() if text.on_terminal() else 110
    with np.printoptions(threshold=1000, edgeitems=4, linewidth=columns, precision=9, floatmode="unique"):
        text.write(f"{s.printable}\n")


@draws
def _bars(section: HistogramBars) -> None:
    v = section.values
    h = v.histogram
    if h is None:
        text.write(f"\n{plain(v.row.name)}  {v.row.dtype}: elements smaller than a byte are not counted\n")
        return
    text.write(f"\n{plain(v.row.name)}  {v.row.dtype} {shape(v.row.shape)}\n")
    if not h.counts:
        text.write("  no finite element\n")
        return
    if text.on_terminal():
        text.write("\n".join(histogram(h.counts, f"{h.edges[0]:.4g}", f"{h.edges[-1]:.4g}")) + "\n")
        return
    rows = [(f"{a:.4g}", f"{b:.4g}", f"{n:,}") for a, b, n in zip(h.edges[:-1], h.edges[1:], h.counts, strict=True)]
    text.write(aligned(rows, right=(0, 1, 2), indent="  "))


def _summary(listing: TensorListing) -> str:
    """A few lines: where it is, how large, and which components or dtypes."""
    from ckpttool.formats.paddle import Native
    from ckpttool.ops.inspect.listing import mesh_text, sharding_of

    stored = listing.stored
    mesh = f", {mesh_text(stored)}" if stored.mesh.world > 1 or stored.cut or sharding_of(stored) > 1 else ""
    lines = [
        f"{plain(str(listing.path))}: {listing.format}{mesh}, {count(len(listing.files), 'file')}",
    ]
    chosen = f" of {listing.tensors:,}" if len(listing.rows) != listing.tensors else ""
    totals = listing.totals()
    lines.append(
        f"{len(listing.rows):,}{chosen} tensor{'s' if listing.tensors != 1 else ''},"
        f" {count(sum(t.elements for t in totals), 'element')}, {short(listing.nbytes)}"
    )
    components = listing.component_totals()
    if [t.component for t in components] not in ([], ["model"]) or any(t.derived for t in components):
        by_component = [
            (t.component, count(t.tensors, "tensor"), short(t.nbytes), ", ".join(t.dtypes) + _derived(t))
            for t in components
        ]
        lines.append(aligned(by_component, right=(1, 2), indent="  ").rstrip("\n"))
    elif len(totals) > 1:
        rows = [(t.dtype, count(t.tensors, "tensor"), count(t.elements, "element"), short(t.nbytes)) for t in totals]
        lines.append(aligned(rows, right=(1, 2, 3), indent="  ").rstrip("\n"))
    if isinstance(stored.native, Native):
        lines += program_lines(stored.native.program)
    lines = "\n".join(lines).split("\n")
    return "\n".join(map(text.fold, lines) if text.on_terminal() else lines) + "\n"


def _derived(total: ComponentTotal) -> str:
    """That some or all tensors have no bytes of their own."""
    if not total.derived:
        return ""
    which = "all" if total.derived == total.tensors else f"{total.derived:,}"
    return f" ({which} rounded master weights)"


@draws
def _tree(section: TreeDrawing) -> None:
    """Names with numbers collapsed, as a tree for each component."""
    from ckpttool.ops.inspect.identity import identify

    answer = section.answer
    trees, roots, shown = answer.trees, answer.roots, answer.lines
    rows: list[tuple[str, ...]] = [("", "dtype", "shape", "tensors", "size", " ")]
    sizes = [0]
    headed = any(component != "model" or mark for component, (mark, _) in trees.items())
    heads: set[int] = set()
    between: dict[int, str] = {}
    """Lines that are no rows, by the row before which they stand."""
    for component, (mark, _) in trees.items():
        root = roots[component]
        if headed:
            if len(rows) > 1:
                between[len(rows)] = "\n"
            heads.add(len(rows))
            rows.append((component, "", "", f"{root.count:,}", short(root.nbytes), ""))
            sizes.append(root.nbytes)
            if mark:
                between[len(rows)] = f"  {'each: ' if component == 'optimizer' else ''}{mark}\n"
        rows += [_tree_line(line, headed=headed) for line in shown[component]]
        sizes += [line.times * line.node.nbytes for line in shown[component]]
    total = sum(r.nbytes for r in roots.values())
    cells, right = _with_shares(rows, sizes, total) if text.on_terminal() else (rows, {3, 4})
    colours = column_colours(cells[0]) if coloured(sys.stdout) else None
    colour = colours and (lambda row, column, cell: BOLD if row in heads else colours(row, column, cell))
    lined = text.aligned(cells, right, colour=colour).splitlines(keepends=True)
    headline = _fold(identify(answer.listing).headline + "\n")
    text.put(styled(headline, BOLD) if colours else headline, sys.stdout)
    text.write(_summary(answer.listing) + "\n")
    text.put("".join(_fold(between.get(i, "")) + line for i, line in enumerate(lined)), sys.stdout)


def _fold(line: str) -> str:
    return "".join(text.fold(part) + "\n" for part in line.splitlines()) if text.on_terminal() else line


def _with_shares(
    rows: Sequence[tuple[str, ...]], sizes: Sequence[int], total: int
) -> tuple[Sequence[Sequence[str]], set[int]]:
    """The tree as it fits the terminal, with a bar for each line's share of the bytes where there is room."""
    if not any(row[5] for row in rows[1:]):
        rows = [row[:5] for row in rows]
    cells, right = fit(rows, right=(3, 4), drop=(" ", "tensors", "shape", "dtype"))
    room = width() - sum(max(columns_of(row[i]) for row in cells) + 2 for i in range(len(cells[0])))
    if room < len("share") or not total or "tensors" not in cells[0]:
        return cells, right
    bars = ["share", *(bar(n / total, min(LONGEST, room)) for n in sizes[1:])]
    return [[*row[:5], b, *row[5:]] for row, b in zip(cells, bars, strict=True)], right


def _tree_line(line: TreeLine, *, headed: bool) -> tuple[str, ...]:
    node, n = line.node, line.times * line.node.count
    return (
        "  " * (line.depth + headed) + (plain(node.label) or "."),
        node.dtype,
        shape(node.shape) if node.dtype else "",
        f"{n:,}" if n > 1 or not node.dtype else "",
        short(line.times * node.nbytes),
        node.mark,
    )
