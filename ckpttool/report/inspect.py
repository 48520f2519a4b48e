"""What a view of ``inspect`` found, for people and for programs."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from ckpttool.core.words import count, short
from ckpttool.errors import UsageError, plain
from ckpttool.report import text
from ckpttool.report.convert_json import counted, program_lines
from ckpttool.report.findings import folded, parsed, write_findings
from ckpttool.report.meters import bar
from ckpttool.report.tables import fit, table, width
from ckpttool.report.text import aligned, columns_of, dump, shape, size
from ckpttool.storage.place import resolved
from ckpttool.storage.system import beside

if TYPE_CHECKING:
    from ckpttool.answers.findings import CheckResult, Import
    from ckpttool.ops.inspect.diff import Changed, DiffResult
    from ckpttool.ops.inspect.listing import ComponentTotal, Listing
    from ckpttool.ops.inspect.tree import Line
    from ckpttool.ops.inspect.values import Values
    from ckpttool.ops.inspect.views.base import Answer, View
    from ckpttool.ops.inspect.views.check import CheckAnswer
    from ckpttool.ops.inspect.views.diff import DiffAnswer
    from ckpttool.ops.inspect.views.family import FamilyAnswer
    from ckpttool.ops.inspect.views.imports import ImportsAnswer
    from ckpttool.ops.inspect.views.metadata import MetadataAnswer
    from ckpttool.ops.inspect.views.page import PageView, Survey
    from ckpttool.ops.inspect.views.ranks import RanksAnswer
    from ckpttool.ops.inspect.views.runs import RunAnswer
    from ckpttool.ops.inspect.views.show import ShowAnswer
    from ckpttool.ops.inspect.views.tree import TreeAnswer
    from ckpttool.ops.inspect.views.values import TotalAnswer, ValuesAnswer

BAR = 50
"""Characters of the longest bar of a histogram."""
SHARE = 10
"""Characters of a bar that stands for all bytes."""


def prepare(view: View, *, as_json: bool) -> None:
    """Raises UsageError and OutputError for files that could not be written, before a checkpoint is read for hours."""
    files = parsed(getattr(view, "findings", ()))
    if as_json and any(file is None for _, file in files):
        raise UsageError("--json and --findings both write to stdout", hint="name a file: --findings KIND=FILE")
    if view.name == "report":
        from ckpttool.report.survey import check_page

        check_page(cast("PageView", view))


def show_answer(answer: Answer, *, as_json: bool, quiet: bool = False) -> int:
    """Print an answer, and write the files that go with it; ``quiet`` leaves notes out. Returns the exit code."""
    if not as_json and not quiet:
        text.notes(answer.notes)
    if answer.name == "report":
        from ckpttool.report.survey import show_survey

        return show_survey(cast("Survey", answer), as_json=as_json, quiet=quiet)
    taken = _FILES[answer.name](answer, quiet=quiet) if answer.name in _FILES else False
    if as_json:
        data, entries = answer.json()
        dump(data, entries=entries)
    elif not taken:
        _TEXTS.get(answer.name, _table)(answer, quiet=quiet)
    return 0 if answer.ok else 3


def _write_findings(answer: CheckAnswer, **_flags: bool) -> bool:
    """Other forms of the findings. Returns whether one of them went to stdout."""
    return write_findings(answer.result, parsed(answer.findings))


def _write_pictures(answer: RanksAnswer, *, quiet: bool) -> bool:
    """Pictures of a layout in files, ``FILE-2.svg`` the second page."""
    if (svg := answer.svg) is not None:
        from ckpttool.report.files import save
        from ckpttool.report.svg import pages

        drawn = pages(answer.layout, f"{resolved(answer.listing.path).name}: who holds what")
        more = [beside(svg.with_name(svg.stem), after=f"-{n}{svg.suffix}") for n in range(2, len(drawn) + 1)]
        names = [svg, *more]
        for name, page in zip(names, drawn, strict=True):
            save(name, page, "the picture", "<svg")
        if len(names) > 1 and not quiet:
            text.notes([f"{len(names)} pages: {', '.join(map(str, names))}"])
    return False


def summary(listing: Listing) -> str:
    """A few lines: what it is, how large, and which components or dtypes."""
    from ckpttool.formats.paddle import Native
    from ckpttool.ops.inspect.identity import identify
    from ckpttool.ops.inspect.listing import mesh_text, sharding_of

    stored = listing.stored
    mesh = f", {mesh_text(stored)}" if stored.mesh.world > 1 or stored.cut or sharding_of(stored) > 1 else ""
    first = identify(listing).headline
    lines = [
        textwrap.fill(first, width(), subsequent_indent="  ") if text.on_terminal() else first,
        f"{plain(str(listing.path))}: {listing.format}{mesh}, {count(len(listing.files), 'file')}",
    ]
    chosen = f" of {listing.tensors:,}" if len(listing.rows) != listing.tensors else ""
    totals = listing.totals()
    lines.append(
        f"{len(listing.rows):,}{chosen} tensor{'s' if listing.tensors != 1 else ''},"
        f" {count(sum(t.elements for t in totals), 'element')}, {size(listing.nbytes)}"
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
    return "\n".join(lines) + "\n"


def _derived(total: ComponentTotal) -> str:
    """That some or all tensors have no bytes of their own."""
    if not total.derived:
        return ""
    which = "all" if total.derived == total.tensors else f"{total.derived:,}"
    return f" ({which} rounded master weights)"


def _tree(answer: TreeAnswer, **_flags: bool) -> None:
    """Names with numbers collapsed, as a tree for each component."""
    trees, roots, shown = answer.trees, answer.roots, answer.lines
    rows: list[tuple[str, ...]] = [("", "dtype", "shape", "tensors", "bytes", " ")]
    sizes = [0]
    headed = any(component != "model" or mark for component, (mark, _) in trees.items())
    between: dict[int, str] = {}
    """Lines that are no rows, by the row before which they stand."""
    for component, (mark, _) in trees.items():
        root = roots[component]
        if headed:
            if len(rows) > 1:
                between[len(rows)] = "\n"
            rows.append((component, "", "", f"{root.count:,}", f"{root.nbytes:,}", ""))
            sizes.append(root.nbytes)
            if mark:
                between[len(rows)] = f"  {'each: ' if component == 'optimizer' else ''}{mark}\n"
        rows += [_tree_line(line, headed=headed) for line in shown[component]]
        sizes += [line.times * line.node.nbytes for line in shown[component]]
    cells, right = (
        _with_shares(rows, sizes, sum(r.nbytes for r in roots.values())) if text.on_terminal() else (rows, {3, 4})
    )
    lined = aligned(cells, right=right).splitlines(keepends=True)
    text.write(summary(answer.listing) + "\n" + "".join(between.get(i, "") + line for i, line in enumerate(lined)))


def _with_shares(
    rows: Sequence[tuple[str, ...]], sizes: Sequence[int], total: int
) -> tuple[Sequence[Sequence[str]], set[int]]:
    """The tree as it fits the terminal, with a bar for each line's share of the bytes where there is room."""
    if not any(row[5] for row in rows[1:]):
        rows = [row[:5] for row in rows]
    cells, right = fit(rows, right=(3, 4), drop=(" ",) if len(rows[0]) > 5 else ())
    room = width() - sum(max(columns_of(row[i]) for row in cells) + 2 for i in range(len(cells[0])))
    if room < len("share") or not total:
        return cells, right
    bars = ["share", *(bar(n / total, min(SHARE, room)) for n in sizes[1:])]
    return [[*row[:5], b, *row[5:]] for row, b in zip(cells, bars, strict=True)], right


def _tree_line(line: Line, *, headed: bool) -> tuple[str, ...]:
    node, n = line.node, line.times * line.node.count
    return (
        "  " * (line.depth + headed) + (plain(node.label) or "."),
        node.dtype,
        shape(node.shape) if node.dtype else "",
        f"{n:,}" if n > 1 or not node.dtype else "",
        f"{line.times * node.nbytes:,}",
        node.mark,
    )


def _table(answer: Answer, **_flags: bool) -> None:
    """Aligned on a terminal; elsewhere tab-separated."""
    table(**answer.table()._asdict())


def _metadata(answer: MetadataAnswer, **_flags: bool) -> None:
    """``__metadata__`` of the files; equal ones are shown once."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, found in answer.metadata.items():
        groups.setdefault(tuple(sorted(found.items())), []).append(name)
    for found_items, names in groups.items():
        more = f" and {count(len(names) - 1, 'other file')}" if len(names) > 1 else ""
        text.write(f"{plain(names[0])}{more}\n")
        for key, value in found_items:
            text.write(f"  {plain(key)}: {plain(value)}\n")
        if not found_items:
            text.write("  no metadata\n")


def _run(answer: RunAnswer, *, quiet: bool) -> None:
    from ckpttool.report.runs import show_run

    show_run(answer.run, quiet=quiet)


def _ranks(answer: RanksAnswer, **_flags: bool) -> None:
    from ckpttool.report.layout import draw

    text.write(draw(answer.layout))


def _number(value: float | None) -> str:
    """A number with as many digits as tell it from its neighbours among float32s; with fewer for somebody's eyes."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:.4g}" if text.on_terminal() else f"{value:.9g}"


def _values(answer: ValuesAnswer, *, quiet: bool) -> None:
    """Statistics, histograms and checksums."""
    values, wanted = answer.values, answer.wanted
    from ckpttool.report.stats import is_long, show_folded

    if wanted.stats and not wanted.digest and text.on_terminal() and is_long(values):
        show_folded(values, quiet=quiet)
    elif wanted.stats or wanted.digest:
        _values_table(values, stats=wanted.stats, digests=wanted.digest)
    if wanted.histogram:
        for v in values:
            _bars(v)


def _total(answer: TotalAnswer, *, quiet: bool) -> None:
    """The digest alone on stdout, for scripts; what it is of on stderr."""
    lines = answer.total.lines
    if not quiet:
        text.notes([f"the digest is of {count(len(lines), 'tensor')}: {', '.join(answer.listing.components)}"])
    text.write(f"{answer.total.digest}\n")


def _values_table(values: Sequence[Values], *, stats: bool, digests: bool) -> None:
    header = ["name", "dtype", "shape"]
    if stats:
        header += ["min", "max", "mean", "std", "amax", "nan", "inf", "zeros", "saturated"]
    if digests:
        header += ["digest"]
    rows = []
    for v in values:
        row: list[str | int] = [plain(v.row.name), v.row.dtype, shape(v.row.shape)]
        if stats:
            s = v.stats
            if s is None:
                row += ["-"] * 9
            else:
                row += [_number(n) for n in (s.minimum, s.maximum, s.mean, s.std, s.amax)]
                row += [s.nan, s.inf, s.zeros, "-" if s.saturated is None else s.saturated]
        if digests:
            row.append(v.digest or "-")
        rows.append(row)
    gone = ["saturated"] if stats and all(v.stats is None or v.stats.saturated is None for v in values) else []
    gone += ["shape", "amax", "dtype", "zeros", "saturated", "mean"] if stats else ["shape", "dtype"]
    if stats and digests:
        gone += ["std", "max", "min"]
    table(header, rows, drop=list(dict.fromkeys(gone)), right=range(3, 8) if stats else ())


def _bars(v: Values) -> None:
    """A histogram of one tensor, as bars."""
    h = v.histogram
    if h is None:
        text.write(f"\n{plain(v.row.name)}  {v.row.dtype}: elements smaller than a byte are not counted\n")
        return
    text.write(f"\n{plain(v.row.name)}  {v.row.dtype} {shape(v.row.shape)}\n")
    if not h.counts:
        text.write("  no finite element\n")
        return
    most = max(h.counts)
    rows = []
    for a, b, n in zip(h.edges[:-1], h.edges[1:], h.counts, strict=True):
        bar = "#" * max(1, round(BAR * n / most)) if n else ""
        rows.append((f"{a:.4g}", f"{b:.4g}", f"{n:,}", bar))
    text.write(aligned(rows, right=(0, 1, 2), indent="  "))


def _slices(answer: ShowAnswer, **_flags: bool) -> None:
    """Elements, all of them up to a thousand."""
    import numpy as np

    for s in answer.slices:
        where = f"[{s.index}]" if s.index else ""
        cut = f" of {shape(s.shape)}" if s.index else ""
        text.write(f"{plain(s.name)}{where}  {s.dtype} {shape(s.values.shape)}{cut}\n")
        columns = width() if text.on_terminal() else 110
        with np.printoptions(threshold=1000, edgeitems=4, linewidth=columns, precision=9, floatmode="unique"):
            text.write(f"{s.printable}\n")


def show_check(result: CheckResult, *, quiet: bool) -> None:
    """Every finding and, unless ``quiet``, what was checked."""
    for f, more in folded(result.findings):
        text.write(f"{f.severity}: {plain(f.text)} [{f.id}]" + (f" and {more:,} more like it" if more else "") + "\n")
        if f.where:
            text.write(f"  --> {plain(f.where)}\n")
        if f.hint:
            text.write(f"  hint: {plain(f.hint)}\n")
    if quiet:
        return
    if result.findings:
        text.write("\n")
    checked = ", ".join(count(n, what, f"{what}s") for what, n in result.checked.items())
    text.write(f"{plain(str(result.path))}: {counted(result)}\nchecked {checked}\n")


def _check(answer: CheckAnswer, *, quiet: bool) -> None:
    show_check(answer.result, quiet=quiet)


def _imports(answer: ImportsAnswer, *, quiet: bool) -> None:
    """Every global, dangerous ones first; in a table those that several files name are one line."""
    order = ("dangerous", "refused", "inert")
    result = answer.result
    together: dict[tuple[str, str], list[Import]] = {}
    for i in result.found:
        together.setdefault((i.verdict, i.name), []).append(i)
    rows = []
    for (verdict, name), same in sorted(together.items(), key=lambda item: order.index(item[0][0])):
        place = ":".join([same[0].file, *filter(None, [same[0].member]), str(same[0].offset)])
        more = f" and {len(same) - 1:,} more" if len(same) > 1 else ""
        rows.append((verdict, plain(name), sum(i.times for i in same), plain(place) + more))
    if rows:
        table(("verdict", "global", "times", "where"), rows, names=3)
    if not quiet:
        sums = [f"{sum(v == verdict for v, _ in together):,} {verdict}" for verdict in order]
        text.write(f"{plain(str(result.path))}: {count(result.files, 'pickle')}, {', '.join(sums)}\n")


def _family(answer: FamilyAnswer, *, quiet: bool) -> None:
    """The file, to be redirected; how far it can be believed goes to stderr."""
    from ckpttool.ops.inspect.suggest import summary

    found = answer.suggestion
    text.write(found.text)
    if not quiet:
        text.notes([summary(found)])


def _diff(answer: DiffAnswer, *, quiet: bool) -> None:
    """Every difference, on a terminal those of all layers on one line; then the verdict, that alone when ``quiet``."""
    from ckpttool.report.drift import show_drift

    result = answer.result
    drift = result.drift
    kinds = [("only in SRC", name, "") for name in result.only_left]
    kinds += [("only in OTHER", name, "") for name in result.only_right]
    kinds += [("shape", m.name, f"{m.left} and {m.right}") for m in result.shapes]
    kinds += [("dtype", m.name, f"{m.left} and {m.right}") for m in result.dtypes]
    if text.on_terminal() and not quiet:
        _folded_table(kinds, result.elements)
        if drift is not None:
            show_drift(drift)
    elif (kinds or result.elements) and not quiet:
        rows = [(k, plain(n), w, "", "") for k, n, w in kinds]
        for d in result.elements:
            at = ", ".join(map(str, d.first))
            gap = f", largest difference {d.max_abs:.9g}" if d.max_abs else ""
            what = f"{d.elements:,} of {d.total:,} elements, first at [{at}]{gap}"
            rows.append(("values", plain(d.name), what, _number(d.relative), _number(d.cosine)))
        columns = 5 if result.values else 3
        table(("difference", "name", "what", "relative", "cosine")[:columns], [r[:columns] for r in rows])
    sys.stdout.flush()  # what follows may go to stderr, and comes last
    parts = ", ".join(f"{n:,} {c}" for c, n in result.by_component.items())
    parts = f" ({parts})" if set(result.by_component) - {"model"} else ""
    naming = ", both under Hugging Face names" if result.renamed else ""
    if result.ok:
        more = "" if result.values else "; values not compared (--values)"
        text.write(f"equal: {count(result.compared, 'tensor')}{parts} by {_how(result)}{naming}{more}\n")
    else:
        alone = [
            f", {len(names):,} only in {side}"
            for side, names in (("SRC", result.only_left), ("OTHER", result.only_right))
            if names
        ]
        (text.write if quiet else _line)(
            f"different: {result.changed:,} of {count(result.compared, 'tensor')}{parts} changed{''.join(alone)}"
            f" ({_how(result, values='values')} compared{naming})\n"
        )
    for side, components in (("SRC", result.components_left), ("OTHER", result.components_right)):
        if components:
            (text.write if result.ok or quiet else _line)(f"not compared: {', '.join(components)}, only in {side}\n")


def _how(result: DiffResult, values: str = "every element") -> str:
    """What was compared."""
    if not result.values:
        return "names, dtypes, shapes"
    if result.tolerance is None:
        return "names, dtypes, shapes" + (f", {values}" if values == "values" else f" and {values}")
    return f"names and shapes, and {values} within {result.tolerance.atol:g} + {result.tolerance.rtol:g} * |OTHER|"


def _folded_table(kinds: Sequence[tuple[str, str, str]], changed: Sequence[Changed]) -> None:
    """Names that differ only in numbers on one line, with the largest relative difference and the smallest cosine."""
    from ckpttool.core.tensor_names import fold

    rows: list[tuple[str | int, ...]] = []
    alike: dict[tuple[str, str], list[str]] = {}
    for kind, name, what in kinds:
        alike.setdefault((kind, what), []).append(name)
    for (kind, what), names in alike.items():
        rows += [(kind, plain(name), len(places), "", "", what) for name, places in fold(names)]
    # In the order of the largest in each, which comes first.
    for name, places in sorted(fold([d.name for d in changed]), key=lambda f: min(f[1])):
        mine = [changed[i] for i in places]
        cosines = [d.cosine for d in mine if d.cosine is not None]
        what = f"{sum(d.elements for d in mine):,} of {sum(d.total for d in mine):,} elements"
        largest = _number(changed[min(places)].relative)
        rows.append(("values", plain(name), len(mine), largest, _cosine(min(cosines, default=None)), what))
    if rows:
        header = ("difference", "name", "tensors", "relative", "cosine", "what")
        keep = range(6) if changed else (0, 1, 2, 5)
        columns, cells = [header[i] for i in keep], [[row[i] for i in keep] for row in rows]
        table(columns, cells, names=1, drop=["what", "tensors", "difference"], right=(3, 4) if changed else ())


def _cosine(value: float | None) -> str:
    """With the digits that tell it from 1."""
    return "-" if value is None else f"{value:.6f}"


def _line(line: str) -> None:
    text.message(line.rstrip("\n"))


_TEXTS: Mapping[str, Callable[..., None]] = {
    "tree": _tree,
    "metadata": _metadata,
    "ranks": _ranks,
    "values": _values,
    "total": _total,
    "show": _slices,
    "imports": _imports,
    "family": _family,
    "check": _check,
    "diff": _diff,
    "checkpoints": _run,
}
"""How people see an answer that is more than a table, by its name."""

_FILES: Mapping[str, Callable[..., bool]] = {"check": _write_findings, "ranks": _write_pictures}
"""What is written to files of its own; the answer is whether stdout is taken by it."""
