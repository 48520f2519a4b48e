"""How objects of the API look in a notebook: HTML without a script, in which everything is escaped.

What ``core``, ``ops`` and ``answers`` return knows nothing of notebooks: ``in_notebooks`` gives it its HTML here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from math import prod
from typing import TYPE_CHECKING, Any

from ckpttool.answers.findings import ERROR, WARNING, CheckResult, Finding, folded
from ckpttool.core.words import count, short
from ckpttool.errors import plain
from ckpttool.ops.inspect.diff import DiffResult
from ckpttool.ops.inspect.listing import logical_rows
from ckpttool.ops.inspect.tree import TreeNode, by_component, collapse

if TYPE_CHECKING:
    from ckpttool.core.catalog import Catalog, LogicalTensor

ROWS = 20
"""Rows of a table, and changes of a diff."""
NODES = 400
"""Lines of a tree; a model has dozens, because names that differ only in numbers are one line."""
_SEVERITY = {ERROR: ("\u2716 error", "#b42318"), WARNING: ("\u26a0 warning", "#8a5300")}
_CODE = "font-family:monospace;white-space:pre"


def table(
    title: str, rows: Iterable[tuple[object, ...]], notes: Iterable[str] = (), head: Sequence[str] = (), more: str = ""
) -> str:
    """A title, a table of its first rows, notes, and ``more`` HTML below them."""
    all_rows = list(rows)
    body = "".join("<tr>" + "".join(f"<td>{_cell(c)}</td>" for c in row) + "</tr>" for row in all_rows[:ROWS])
    if len(all_rows) > ROWS:
        body += f"<tr><td>and {len(all_rows) - ROWS:,} more</td></tr>"
    top = "<tr>" + "".join(f"<th>{text(h)}</th>" for h in head) + "</tr>" if head and body else ""
    shown = f"<table>{top}{body}</table>" if body else ""
    said = "".join(f"<li>{text(n)}</li>" for n in notes)
    return f"<div><b>{text(title)}</b>{shown}" + (f"<ul>{said}</ul>" if said else "") + f"{more}</div>"


def text(value: object) -> str:
    """Text as HTML shows it."""
    return escape(plain(str(value)))


def _cell(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return text(", ".join(map(str, value)) if isinstance(value, tuple | list) else value)


def tree(catalog: Catalog) -> str:
    """The tensors of a checkpoint as a tree that folds: names, dtypes, shapes, sizes."""
    left = [NODES]
    components = by_component(logical_rows(catalog))
    out = []
    for component, (mark, rows) in components.items():
        root = collapse(rows)
        root.label, root.mark = component, mark
        nodes = root.children if list(components) == ["model"] else [root]
        out += [_node(node, left, 1, is_open=component == "model") for node in nodes]
    more = f"<div>and {-left[0]:,} more lines</div>" if left[0] < 0 else ""
    return "".join(out) + more


def _node(node: TreeNode, left: list[int], times: int, *, is_open: bool = False) -> str:
    left[0] -= 1
    if left[0] < 0:
        return ""
    many = count(times * node.count, "tensor") if node.children or times > 1 else ""
    parts = [node.dtype, str(list(node.shape)) if node.dtype else "", many, short(times * node.nbytes), node.mark]
    line = (
        f'<span style="{_CODE}">{text(node.label or ".")}</span> <small>{text(", ".join(filter(None, parts)))}</small>'
    )
    if not node.children:
        return f'<div style="padding-left:2.1em">{line}</div>'
    inner = "".join([_node(child, left, times * node.times) for child in node.children])
    state = " open" if is_open else ""
    return f'<details{state} style="padding-left:1em"><summary>{line}</summary>{inner}</details>'


def tensor(catalog: Catalog, found: LogicalTensor, preview: Any = None) -> str:
    """A logical tensor: dtype, shape, size, the files that hold it and, if given, its first elements."""
    kinds = [(p, "") for p in found.pieces] + [(p, "copy") for p in found.replicas]
    rows = [
        (
            catalog.files[p.stored.file].place.name,
            p.stored.rank,
            p.stored.name,
            str(p.logical_box),
            p.stored.offset,
            kind,
        )
        for p, kind in kinds
    ]
    first = f"<pre>{escape(str(preview))}</pre>" if preview is not None else ""
    title = (
        f"{found.key}: {found.dtype} {list(found.shape)}, {short(found.nbytes)}, {count(prod(found.shape), 'element')}"
    )
    return table(title, rows, head=("file", "rank", "stored as", "elements", "byte", ""), more=first)


def check(result: CheckResult) -> str:
    """A verdict, and the findings with their severity."""
    verdict = "\u2714 no problem found" if not result.findings else result.counts
    checked = ", ".join(count(n, noun) for noun, n in result.checked.items())
    found = [_finding(f, also) for f, also in folded(result.findings)]
    rest = f"<li>and {len(found) - ROWS:,} more</li>" if len(found) > ROWS else ""
    listed = f"<ul>{''.join(found[:ROWS])}{rest}</ul>" if found else ""
    return table(f"{result.path}: {verdict} in {checked}", [], result.notes, more=listed)


def _finding(found: Finding, also: str = "") -> str:
    word, colour = _SEVERITY.get(found.severity, ("\u2139 note", "#0b5cc4"))
    where = f"<br><code>{text(found.where)}</code>" if found.where else ""
    hint = f"<br>hint: {text(found.hint)}" if found.hint else ""
    head = f'<b style="color:{colour}">{word}</b> <code>{text(found.id)}</code>'
    return f"<li>{head} {text(found.text)}{also}{where}{hint}</li>"


def diff(result: DiffResult) -> str:
    """A verdict, and the largest changes."""
    said = result.verdict("left", "right")
    mark = {True: "\u2714 ", False: "\u2260 ", None: ""}[result.equal]
    rows: list[tuple[object, ...]] = [
        (c.name, f"{c.elements:,} of {c.total:,}", _number(c.relative), _number(c.cosine), _number(c.max_abs))
        for c in result.elements
    ]
    changes = table("Largest changes", rows, head=("tensor", "elements", "change", "cosine", "largest")) if rows else ""
    others: list[tuple[object, ...]] = [("only left", name, "") for name in result.only_left]
    others += [("only right", name, "") for name in result.only_right]
    others += [("shape", m.name, f"{m.left} and {m.right}") for m in result.shapes]
    others += [("dtype", m.name, f"{m.left} and {m.right}") for m in result.dtypes]
    listed = table("Other differences", others) if others else ""
    title = f"{result.left.path} and {result.right.path}: {mark}{said}"
    return table(title, [], [*said.omitted, *result.notes], more=changes + listed)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def frame(page: str) -> str:
    """A page in a notebook. It cannot reach the notebook: its scripts run in a sandbox, and it loads nothing."""
    held = escape(page, quote=True)
    return f'<iframe sandbox="allow-scripts" style="width:100%;height:800px;border:0" srcdoc="{held}"></iframe>'


def in_notebooks() -> None:
    """Give the results of other packages their HTML."""
    shown = {CheckResult: check, DiffResult: diff, Finding: lambda found: f"<ul>{_finding(found)}</ul>"}
    for kind, html in shown.items():
        setattr(kind, "_repr_html_", html)  # noqa: B010  (mypy has it for no attribute of the class)
