"""What ``inspect`` found, for people and for programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpttool.report import text
from ckpttool.report.text import aligned, count, dump, plain, shape, size

if TYPE_CHECKING:
    from ckpttool.ops.inspect.check import CheckResult
    from ckpttool.ops.inspect.diff import DiffResult
    from ckpttool.ops.inspect.holdings import Layout
    from ckpttool.ops.inspect.listing import FileRow, Listing
    from ckpttool.ops.inspect.values import Slice, Values

SCHEMA = "ckpttool.inspect/1"


def _head(listing: Listing, view: str) -> dict[str, Any]:
    """What every JSON answer begins with."""
    return {
        "schema": SCHEMA,
        "view": view,
        "path": str(listing.path),
        "format": listing.format,
        "mesh": listing.mesh.to_json(),
        "files": len(listing.files),
        "file_bytes": sum(f.size for f in listing.files),
        "tensors": listing.tensors,
        "listed": len(listing.rows),
        "listed_bytes": listing.nbytes,
        "logical": listing.logical,
        "dtypes": {
            t.dtype: {"tensors": t.tensors, "elements": t.elements, "bytes": t.nbytes} for t in listing.totals()
        },
        "notes": listing.notes,
    }


def summary(listing: Listing) -> str:
    """Two or three lines: what it is, how large, and which dtypes."""
    mesh = f", {listing.mesh}" if listing.mesh.world > 1 else ""
    lines = [f"{plain(str(listing.path))}: {listing.format}{mesh}, {count(len(listing.files), 'file')}"]
    chosen = f" of {listing.tensors:,}" if len(listing.rows) != listing.tensors else ""
    totals = listing.totals()
    lines.append(
        f"{len(listing.rows):,}{chosen} tensor{'s' if listing.tensors != 1 else ''},"
        f" {count(sum(t.elements for t in totals), 'element')}, {size(listing.nbytes)}"
    )
    if len(totals) > 1:
        rows = [(t.dtype, count(t.tensors, "tensor"), count(t.elements, "element"), size(t.nbytes)) for t in totals]
        lines.append(aligned(rows, right=(1, 2), indent="  ").rstrip("\n"))
    return "\n".join(lines) + "\n"


def show_tree(listing: Listing, *, depth: int | None, as_json: bool) -> None:
    """Names with numbers collapsed, as a tree."""
    from ckpttool.ops.inspect.tree import collapse, lines

    found = lines(collapse(listing.rows), depth)
    if as_json:
        tree = [
            {
                "name": line.name,
                "depth": line.depth,
                "tensors": line.times * line.node.count,
                "elements": line.times * line.node.elements,
                "bytes": line.times * line.node.nbytes,
                **({"dtype": line.node.dtype, "shape": list(line.node.shape)} if line.node.dtype else {}),
            }
            for line in found
        ]
        dump({**_head(listing, "tree"), "tree": tree}, entries=len(found))
        return
    text.notes(listing.notes)
    rows = []
    for line in found:
        node, n = line.node, line.times * line.node.count
        rows.append(
            (
                "  " * line.depth + plain(node.label),
                node.dtype,
                shape(node.shape) if node.dtype else "",
                f"{n:,}" if n > 1 or not node.dtype else "",
                f"{line.times * node.nbytes:,}",
            )
        )
    body = aligned([("", "dtype", "shape", "tensors", "bytes"), *rows], right=(3, 4))
    text.write(summary(listing) + "\n" + body)


def show_list(listing: Listing, *, as_json: bool) -> None:
    """One tensor a line."""
    names = _file_names(listing)
    if as_json:
        tensors = [
            {
                "name": r.name,
                "dtype": r.dtype,
                "shape": list(r.shape),
                "bytes": r.nbytes,
                "file": names[r.file] if r.file >= 0 else None,
                "offset": r.offset if r.file >= 0 else None,
                "pieces": r.pieces,
            }
            for r in listing.rows
        ]
        dump({**_head(listing, "list"), "list": tensors}, entries=len(tensors))
        return
    text.notes(listing.notes)
    header = ("name", "dtype", "shape", "bytes", "pieces", "file", "offset")
    rows = [
        (
            plain(r.name),
            r.dtype,
            shape(r.shape),
            f"{r.nbytes:,}",
            str(r.pieces),
            plain(names[r.file]) if r.file >= 0 else "-",
            f"{r.offset:,}" if r.file >= 0 else "-",
        )
        for r in listing.rows
    ]
    text.table(header, rows, right=(3, 4, 6))


def _file_names(listing: Listing) -> list[str]:
    from ckpttool.ops.inspect.listing import relative

    return [relative(f.path, listing.stored.root) for f in listing.files]


def show_files(listing: Listing, files: list[FileRow], *, as_json: bool) -> None:
    """One file a line."""
    if as_json:
        rows = [
            {"name": f.name, "bytes": f.nbytes, "tensors": f.tensors, "tensor_bytes": f.data, "ranks": f.ranks}
            for f in files
        ]
        dump({**_head(listing, "files"), "list": rows}, entries=len(rows))
        return
    text.notes(listing.notes)
    text.table(
        ("file", "bytes", "tensors", "tensor bytes", "rank"),
        [(plain(f.name), f"{f.nbytes:,}", f"{f.tensors:,}", f"{f.data:,}", text.ranks(f.ranks)) for f in files],
        right=(1, 2, 3),
    )


def show_metadata(listing: Listing, metadata: dict[str, dict[str, str]], *, as_json: bool) -> None:
    """``__metadata__`` of the files; equal ones are shown once."""
    if as_json:
        dump({**_head(listing, "metadata"), "config": listing.stored.config, "metadata": metadata})
        return
    text.notes(listing.notes)
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


def show_layout(listing: Listing, layout: Layout, *, svg: Path | None, as_json: bool) -> None:
    """Who holds what: text or JSON on stdout, and a picture in a file."""
    if svg is not None:
        _write_svg(layout, svg, f"{listing.path.resolve().name}: who holds what")
    if as_json:
        holdings = [
            {
                "name": h.name,
                "dtype": h.dtype,
                "shape": list(h.shape),
                "tensors": h.count,
                "padding": h.padding,
                "groups": [
                    {
                        "which": g.label,
                        "tensors": g.count,
                        "held": [
                            {"start": list(b.box.start), "stop": list(b.box.stop), "ranks": list(b.ranks)}
                            for b in g.held
                        ],
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

    text.notes(listing.notes)
    text.write(draw(layout))


def _write_svg(layout: Layout, path: Path, title: str) -> None:
    from ckpttool.errors import OutputError
    from ckpttool.report.svg import picture

    try:
        path.write_text(picture(layout, title), encoding="utf-8")
    except OSError as e:
        raise OutputError(f"the picture cannot be written: {e.strerror}", where=str(path)) from None


def show_values(listing: Listing, values: list[Values], *, as_json: bool) -> None:
    """Statistics, histograms and checksums."""
    raise NotImplementedError


def show_slices(listing: Listing, slices: list[Slice], *, as_json: bool) -> None:
    """Elements."""
    raise NotImplementedError


def show_check(result: CheckResult, *, as_json: bool) -> None:
    """Findings."""
    raise NotImplementedError


def show_diff(result: DiffResult, *, as_json: bool) -> None:
    """Differences."""
    raise NotImplementedError
