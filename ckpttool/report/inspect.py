"""What ``inspect`` found, for people and for programs."""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpttool.core.words import count, short
from ckpttool.errors import plain
from ckpttool.report import text
from ckpttool.report.convert_json import counted, program_json, program_lines
from ckpttool.report.findings import folded, write_findings
from ckpttool.report.meters import bar
from ckpttool.report.tables import fit, table, width
from ckpttool.report.text import aligned, columns_of, dump, pick, shape, size
from ckpttool.storage.place import resolved
from ckpttool.storage.system import beside

if TYPE_CHECKING:
    from ckpttool.answers.findings import CheckResult, Import, ImportsResult
    from ckpttool.ops.inspect.answer import Suggested, TensorStats, Totalled, View
    from ckpttool.ops.inspect.diff import Changed, DiffResult
    from ckpttool.ops.inspect.holdings import Layout
    from ckpttool.ops.inspect.identity import Identity
    from ckpttool.ops.inspect.listing import ComponentTotal, FileRow, Listing
    from ckpttool.ops.inspect.runs import RunListing
    from ckpttool.ops.inspect.tree import Line
    from ckpttool.ops.inspect.values import Slice, Values

SCHEMA = "ckpttool.inspect/1"
BAR = 50
"""Characters of the longest bar of a histogram."""
SHARE = 10
"""Characters of a bar that stands for all bytes."""


def show_inspect(
    answer: View | ImportsResult | CheckResult | DiffResult | RunListing,
    *,
    as_json: bool,
    quiet: bool = False,
    findings: Sequence[tuple[str, Path | None]] = (),
) -> None:
    """Print what ``ops.inspect`` answered; ``quiet`` leaves notes out, ``findings`` are other forms of a check's."""
    from ckpttool.answers.findings import CheckResult, ImportsResult
    from ckpttool.ops.inspect.answer import (
        LayoutView,
        Suggested,
        TensorListing,
        TensorSlices,
        TensorStats,
        Totalled,
        View,
    )

    if not as_json and not quiet:
        text.notes(answer.listing.notes if isinstance(answer, View) else answer.notes)
    if isinstance(answer, TensorListing):
        listing, question = answer.listing, answer.question
        if question.list:
            show_list(listing, as_json=as_json)
        elif question.files:
            show_files(listing, answer.files, as_json=as_json)
        elif question.metadata:
            show_metadata(listing, answer.metadata, as_json=as_json)
        else:
            show_tree(listing, depth=question.depth, as_json=as_json)
    elif isinstance(answer, LayoutView):
        show_layout(answer.listing, answer.layout, svg=answer.question.svg, as_json=as_json, quiet=quiet)
    elif isinstance(answer, TensorStats):
        show_values(answer, as_json=as_json, quiet=quiet)
    elif isinstance(answer, Totalled):
        show_total(answer, as_json=as_json, quiet=quiet)
    elif isinstance(answer, Suggested):
        show_suggestion(answer, as_json=as_json, quiet=quiet)
    elif isinstance(answer, TensorSlices):
        show_slices(answer.listing, answer.slices, as_json=as_json)
    elif isinstance(answer, ImportsResult):
        show_imports(answer, as_json=as_json, quiet=quiet)
    elif isinstance(answer, CheckResult):
        if not write_findings(answer, findings):
            show_check(answer, as_json=as_json, quiet=quiet)
    elif not isinstance(answer, View):
        from ckpttool.ops.inspect.runs import RunListing

        if isinstance(answer, RunListing):
            from ckpttool.report.runs import show_run

            show_run(answer, as_json=as_json, quiet=quiet)
        else:
            show_diff(answer, as_json=as_json, quiet=quiet)


def _head(listing: Listing, view: str) -> dict[str, Any]:
    """What every JSON answer begins with."""
    from ckpttool.formats.paddle import Native
    from ckpttool.ops.inspect.identity import identify
    from ckpttool.ops.inspect.listing import sharding_of

    return {
        "schema": SCHEMA,
        "view": view,
        "path": str(listing.path),
        "format": listing.format,
        "mesh": listing.mesh.to_json(),
        "sharding": sharding_of(listing.stored),
        "files": len(listing.files),
        "file_bytes": sum(f.size for f in listing.files),
        "tensors": listing.tensors,
        "listed": len(listing.rows),
        "listed_bytes": listing.nbytes,
        "logical": listing.logical,
        "dtypes": {t.dtype: pick(t, "tensors elements bytes=nbytes") for t in listing.totals()},
        "components": {
            t.component: pick(t, "dtypes tensors elements bytes=nbytes derived") for t in listing.component_totals()
        },
        "identity": _identity_json(identify(listing)),
        "notes": listing.notes,
        **({"program": program_json(native.program)} if isinstance(native := listing.stored.native, Native) else {}),
    }


def headline(identity: Identity) -> str:
    """``Qwen3-MoE, 12 layers, 8 experts, 1.02 B parameters, BF16, with optimizer state``."""
    from ckpttool.ops.inspect.identity import BESIDE

    lora = identity.adapter
    parts = [identity.family or "Model of no known family"]
    if lora is not None:
        parts = [f"{lora.kind} adapter", *([f"rank {lora.rank}"] if lora.rank else [])]
        parts += [f"alpha {lora.alpha:g}"] if lora.alpha else []
        parts += [f"for {lora.base or identity.family}"] if lora.base or identity.family else []
        parts += ["targets " + ", ".join(lora.targets)] if lora.targets else []
    elif "model" not in identity.components and identity.components:
        parts.append(identity.components[0])
    if identity.layers and lora is None:
        parts.append(count(identity.layers, "layer"))
    if identity.experts and lora is None:
        parts.append(count(identity.experts, "expert"))
    if identity.parameters is not None:
        parts.append(f"{large(identity.parameters)} parameter{'s' if identity.parameters != 1 else ''}")
    parts += [identity.precision] if identity.precision else []
    beside = [BESIDE[c] for c in identity.components[1:] if c in BESIDE]
    parts += (
        ["with " + " and ".join([", ".join(beside[:-1]), beside[-1]] if len(beside) > 1 else beside)] if beside else []
    )
    return plain(", ".join(parts))


def large(n: int) -> str:
    """``1.02 B``; numbers below a million as they are."""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if n >= unit:
            return f"{n / unit:.2f} {name}"
    return f"{n:,}"


def _identity_json(identity: Identity) -> dict[str, Any]:
    lora = identity.adapter
    return {
        "headline": headline(identity),
        **pick(identity, "family? layers? experts? parameters precision?"),
        "adapter": None if lora is None else pick(lora, "kind rank? alpha? base? targets"),
    }


def summary(listing: Listing) -> str:
    """A few lines: what it is, how large, and which components or dtypes."""
    from ckpttool.formats.paddle import Native
    from ckpttool.ops.inspect.identity import identify
    from ckpttool.ops.inspect.listing import mesh_text, sharding_of

    stored = listing.stored
    mesh = f", {mesh_text(stored)}" if stored.mesh.world > 1 or stored.cut or sharding_of(stored) > 1 else ""
    first = headline(identify(listing))
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


def show_tree(listing: Listing, *, depth: int | None, as_json: bool) -> None:
    """Names with numbers collapsed, as a tree for each component."""
    from ckpttool.ops.inspect.tree import by_component, collapse, lines

    trees = by_component(listing.rows)
    roots = {component: collapse(rows) for component, (_, rows) in trees.items()}
    shown = {component: lines(root, depth) for component, root in roots.items()}
    if as_json:
        tree = [
            {
                "name": line.name,
                "component": component,
                "depth": line.depth,
                "tensors": line.times * line.node.count,
                "elements": line.times * line.node.elements,
                "bytes": line.times * line.node.nbytes,
                **({"dtype": line.node.dtype, "shape": list(line.node.shape)} if line.node.dtype else {}),
                **_said(component, line.node.dtype and (line.node.mark or trees[component][0])),
            }
            for component, found in shown.items()
            for line in found
        ]
        dump({**_head(listing, "tree"), "tree": tree}, entries=len(tree))
        return
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
    text.write(summary(listing) + "\n" + "".join(between.get(i, "") + line for i, line in enumerate(lined)))


def _said(component: str, mark: str) -> dict[str, Any]:
    """What a leaf's mark is, for programs."""
    if not mark:
        return {}
    return {"states": mark.split(", ")} if component == "optimizer" else {"derived": True}


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


def show_list(listing: Listing, *, as_json: bool) -> None:
    """One tensor a line."""
    names = _file_names(listing)
    if as_json:
        tensors = [
            {
                **pick(r, "name dtype shape bytes=nbytes"),
                "file": names[r.file] if r.file >= 0 else None,
                "offset": r.offset if r.file >= 0 else None,
                **pick(r, "pieces component parameter state? derived"),
            }
            for r in listing.rows
        ]
        dump({**_head(listing, "list"), "list": tensors}, entries=len(tensors))
        return
    header = ("name", "dtype", "shape", "bytes", "pieces", "file", "offset")
    names = [*map(plain, names), "-"]  # an empty tensor is in file -1
    shapes = {dims: shape(dims) for dims in {r.shape for r in listing.rows}}
    rows = [
        (plain(name), dtype, shapes[dims], size, pieces, names[file], offset if file >= 0 else "-")
        for name, dtype, dims, size, file, offset, pieces, *_ in listing.rows
    ]
    table(header, rows, drop=("offset", "pieces", "file"))


def _file_names(listing: Listing) -> list[str]:
    from ckpttool.ops.inspect.listing import relative

    return [relative(f.place, listing.stored.root) for f in listing.files]


def show_files(listing: Listing, files: Sequence[FileRow], *, as_json: bool) -> None:
    """One file a line."""
    if as_json:
        rows = [pick(f, "name bytes=nbytes tensors tensor_bytes=data ranks") for f in files]
        dump({**_head(listing, "files"), "list": rows}, entries=len(rows))
        return
    table(
        ("file", "bytes", "tensors", "tensor bytes", "rank"),
        [(plain(f.name), f.nbytes, f.tensors, f.data, text.ranks(f.ranks)) for f in files],
        drop=("tensor bytes", "rank"),
    )


def show_metadata(listing: Listing, metadata: dict[str, dict[str, str]], *, as_json: bool) -> None:
    """``__metadata__`` of the files; equal ones are shown once."""
    if as_json:
        dump({**_head(listing, "metadata"), "config": listing.stored.config, "metadata": metadata})
        return
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, found in metadata.items():
        groups.setdefault(tuple(sorted(found.items())), []).append(name)
    for found_items, names in groups.items():
        more = f" and {count(len(names) - 1, 'other file')}" if len(names) > 1 else ""
        text.write(f"{plain(names[0])}{more}\n")
        for key, value in found_items:
            text.write(f"  {plain(key)}: {plain(value)}\n")
        if not found_items:
            text.write("  no metadata\n")


def show_layout(listing: Listing, layout: Layout, *, svg: Path | None, as_json: bool, quiet: bool) -> None:
    """Who holds what: text or JSON on stdout, and pictures in files, ``FILE-2.svg`` the second page."""
    if svg is not None:
        from ckpttool.report.files import save
        from ckpttool.report.svg import pages

        drawn = pages(layout, f"{resolved(listing.path).name}: who holds what")
        more = [beside(svg.with_name(svg.stem), after=f"-{n}{svg.suffix}") for n in range(2, len(drawn) + 1)]
        names = [svg, *more]
        for name, page in zip(names, drawn, strict=True):
            save(name, page, "the picture", "<svg")
        if len(names) > 1 and not quiet:
            text.notes([f"{len(names)} pages: {', '.join(map(str, names))}"])
    if as_json:
        holdings = [
            {
                **pick(h, "name dtype shape tensors=count padding"),
                "groups": [
                    {
                        **pick(g, "which=label tensors=count"),
                        "held": [{**pick(b.box, "start stop"), "ranks": b.ranks} for b in g.held],
                    }
                    for g in h.groups
                ],
            }
            for h in layout.holdings
        ]
        rank_bytes = {str(r): n for r, n in layout.bytes_of_rank.items()}
        dump({**_head(listing, "ranks"), "rank_bytes": rank_bytes, "holdings": holdings}, entries=len(holdings))
        return
    from ckpttool.report.layout import draw

    text.write(draw(layout))


def _number(value: float | None) -> str:
    """A number with as many digits as tell it from its neighbours among float32s; with fewer for somebody's eyes."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:.4g}" if text.on_terminal() else f"{value:.9g}"


def _plain_number(value: float | None) -> float | str | None:
    """JSON has no NaN and no infinity: they are written as text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def show_values(answer: TensorStats, *, as_json: bool, quiet: bool = False) -> None:
    """Statistics, histograms and checksums."""
    listing, values, question = answer.listing, answer.values, answer.question
    if as_json:
        found = []
        for v in values:
            entry = pick(v.row, "name dtype shape")
            if v.stats is not None:
                names = "elements min=minimum max=maximum mean std amax nan inf zeros saturated"
                entry["stats"] = {key: _plain_number(n) for key, n in pick(v.stats, names).items()}
            if v.histogram is not None:
                entry["histogram"] = pick(v.histogram, "edges counts")
            if v.digest is not None:
                entry["digest"] = v.digest
            found.append(entry)
        dump({**_head(listing, "values"), "list": found}, entries=len(found))
        return
    from ckpttool.report.stats import is_long, show_folded

    if question.stats and not question.digest and text.on_terminal() and is_long(values):
        show_folded(values, quiet=quiet)
    elif question.stats or question.digest:
        _values_table(values, stats=question.stats, digests=question.digest)
    if question.histogram:
        for v in values:
            _bars(v)


def show_total(answer: Totalled, *, as_json: bool, quiet: bool) -> None:
    """The digest alone on stdout, for scripts; what it is of on stderr."""
    lines = answer.total.lines
    if as_json:
        found = []
        for name, dtype, dims, digest in (line.rsplit("\t", 3) for line in lines):
            found.append(
                {"name": name, "dtype": dtype, "shape": [int(n) for n in dims.split(",") if n], "digest": digest}
            )
        dump({**_head(answer.listing, "total"), "digest": answer.total.digest, "list": found}, entries=len(found))
        return
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


def show_slices(listing: Listing, slices: Sequence[Slice], *, as_json: bool) -> None:
    """Elements, all of them up to a thousand."""
    import numpy as np

    if as_json:
        found = [
            {
                **pick(s, "name dtype shape index"),
                "shown_shape": np.shape(s.values),
                "values": _nested(_wide(s.values).tolist()),
            }
            for s in slices
        ]
        dump({**_head(listing, "show"), "list": found}, entries=sum(s.values.size for s in slices))
        return
    for s in slices:
        where = f"[{s.index}]" if s.index else ""
        cut = f" of {shape(s.shape)}" if s.index else ""
        text.write(f"{plain(s.name)}{where}  {s.dtype} {shape(np.shape(s.values))}{cut}\n")
        columns = width() if text.on_terminal() else 110
        with np.printoptions(threshold=1000, edgeitems=4, linewidth=columns, precision=9, floatmode="unique"):
            text.write(f"{_wide(s.values)}\n")


def _wide(values: Any) -> Any:
    """The same values in a dtype that numpy prints by itself."""
    import numpy as np

    data = np.asarray(values)
    return data.astype(np.float32) if data.dtype.kind == "V" or data.dtype.name not in np.sctypeDict else data


def _nested(value: Any) -> Any:
    if isinstance(value, list):
        return [_nested(v) for v in value]
    if isinstance(value, complex):
        return [_plain_number(value.real), _plain_number(value.imag)]
    return _plain_number(value)


def show_check(result: CheckResult, *, as_json: bool, quiet: bool = False) -> None:
    """Every finding and, unless ``quiet``, what was checked."""
    if as_json:
        found = {"findings": [pick(f, "id severity where text hint?") for f in result.findings]}
        said = {"schema": SCHEMA, "view": "check", "path": str(result.path), **pick(result, "format? ok checked")}
        dump(said | found, entries=len(result.findings))
        return
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


def show_imports(result: ImportsResult, *, as_json: bool, quiet: bool = False) -> None:
    """Every global, dangerous ones first; in a table those that several files name are one line."""
    order = ("dangerous", "refused", "inert")
    if as_json:
        found = [pick(i, "file member? offset global=name times verdict") for i in result.found]
        said = {"schema": SCHEMA, "view": "imports", "path": str(result.path), **pick(result, "ok files notes")}
        dump({**said, "imports": found}, entries=len(found))
        return
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


def show_suggestion(answer: Suggested, *, as_json: bool, quiet: bool = False) -> None:
    """The file, to be redirected; how far it can be believed goes to stderr."""
    from ckpttool.ops.inspect.suggest import summary

    found = answer.suggestion
    if as_json:
        dump({**_head(answer.listing, "family"), **found._asdict()}, entries=len(found.doubts))
        return
    text.write(found.text)
    if not quiet:
        text.notes([summary(found)])


def show_diff(result: DiffResult, *, as_json: bool, quiet: bool = False) -> None:
    """Every difference, on a terminal those of all layers on one line; then the verdict, that alone when ``quiet``."""
    from ckpttool.report.drift import drift_json, show_drift

    drift = result.drift
    if as_json:
        said = _diff_json(result) | ({"drift": drift_json(drift)} if result.values else {})
        dump(said, entries=len(result.only_left) + len(result.only_right) + len(result.elements))
        return
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


def _diff_json(result: DiffResult) -> dict[str, Any]:
    opened = {
        side: {"path": str(source.path), "format": source.format, "mesh": source.mesh.to_json()}
        for side, source in (("left", result.left), ("right", result.right))
    }
    components = "only_left_components=components_left only_right_components=components_right"
    numbers = ("max_abs", "relative", "cosine")
    return {
        "schema": SCHEMA,
        "view": "diff",
        **opened,
        "equal": result.ok,
        "values": result.values,
        "tolerance": None if result.tolerance is None else pick(result.tolerance, "atol rtol"),
        **pick(result, f"compared changed components=by_component {components} renamed only_left only_right"),
        "shapes": [pick(m, "name left right") for m in result.shapes],
        "dtypes": [pick(m, "name left right") for m in result.dtypes],
        "elements": [
            {
                **pick(d, "name different=elements of=total first"),
                **{name: _plain_number(getattr(d, name)) for name in numbers},
            }
            for d in result.elements
        ],
        "notes": result.notes,
    }
