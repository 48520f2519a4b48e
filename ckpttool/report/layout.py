"""Who holds what, drawn with characters that every terminal and every text file has."""

from __future__ import annotations

from ckpttool.answers.fields import shape
from ckpttool.core.words import short
from ckpttool.errors import plain
from ckpttool.ops.inspect.holdings import HeldBox, HoldingGroup, Layout, grid
from ckpttool.report.text import on_terminal, ranks, width

_INDENT = "    "


def _room() -> int:
    """Characters of a drawing, at most those of a page of text. One that needs more is listed instead."""
    return (min(width(), 80) if on_terminal() else 80) - len(_INDENT)


def draw(layout: Layout) -> str:
    """The whole picture as text."""
    out = [f"{layout.world} rank{'s' if layout.world != 1 else ''}: {layout.mesh}"]
    alike: dict[int, list[int]] = {}
    for r, n in layout.bytes_of_rank.items():
        alike.setdefault(n, []).append(r)
    for n, numbers in alike.items():
        out.append(f"  {_holders(tuple(numbers))}: {short(n)}" + (" each" if len(numbers) > 1 else ""))
    for h in layout.holdings:
        times = f"   {h.count:,} tensors" if h.count > 1 else ""
        name, kind = plain(h.name), f"{h.dtype} {shape(h.shape)}{times}"
        one_line = len(name) + 3 + len(kind) <= _room() + len(_INDENT)
        out += ["", f"{name}   {kind}"] if one_line else ["", name, _INDENT + kind]
        axes = h.cut_axes
        labels = max((len(g.label) for g in h.groups), default=0)
        for g in h.groups:
            if all(held.box.shape == h.shape for held in g.held):
                label = f"{plain(g.label).ljust(labels)}  " if labels else ""
                out.append(f"{_INDENT}{label}{_who(g.ranks, layout.world)}")
                continue
            if g.label:
                out.append(f"{_INDENT}{plain(g.label)}")
            out += [_INDENT + line for line in _matrix(g, axes)]
        if h.padding:
            out.append(f"{_INDENT}and {h.padding:,} elements of padding")
    return "\n".join(out) + "\n"


def _who(numbers: tuple[int, ...], world: int) -> str:
    if not numbers:
        return "no rank: it is empty"
    if len(numbers) == world and world > 1:
        return "whole on every rank"
    return f"whole on {_holders(numbers)}"


def _matrix(group: HoldingGroup, axes: tuple[int, ...]) -> list[str]:
    if len(axes) == 1:
        return _strip(group.held, axes[0])
    if len(axes) == 2:
        edges, cells = grid(group.held, axes)
        drawn = _grid(edges, dict(cells), axes) if len(edges[0]) * len(edges[1]) <= 400 else []
        if drawn and max(map(len, drawn)) <= _room():
            return drawn
    return [f"{h.box}  {_holders(h.ranks)}" for h in group.held]


def _holders(numbers: tuple[int, ...]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {ranks(numbers)}"


def _strip(held: tuple[HeldBox, ...], axis: int) -> list[str]:
    """One axis: ``axis 1 |  0  |  1  |`` over its edges."""
    parts = [(h.box.start[axis], h.box.stop[axis], ranks(h.ranks)) for h in held]
    total = parts[-1][1] - parts[0][0]
    head = f"axis {axis}  "
    room = _room() - len(head) - len(parts) - len(str(parts[-1][1]))
    # A segment is as wide as its share, its label and the number of its left edge need.
    widths = [max(int(room * (b - a) / total), len(label) + 2, len(str(a)) + 1) for a, b, label in parts]
    if sum(widths) > room:
        width = max(len(f"{a}:{b}") for a, b, _ in parts)
        return [
            f"axis {axis}  {f'{a}:{b}':>{width}}  {_holders(h.ranks)}" for (a, b, _), h in zip(parts, held, strict=True)
        ]
    bar = "|" + "|".join(label.center(w) for (_, _, label), w in zip(parts, widths, strict=True)) + "|"
    scale = "".join(str(a).ljust(w + 1) for (a, _, _), w in zip(parts, widths, strict=True)) + str(parts[-1][1])
    return [head + bar, " " * len(head) + scale]


def _grid(edges: list[list[int]], cells: dict[tuple[int, ...], tuple[int, ...]], axes: tuple[int, ...]) -> list[str]:
    """Two axes: rows and columns with the ranks in the cells."""
    columns = [f"{a}:{b}" for a, b in zip(edges[1], edges[1][1:], strict=False)]
    rows = [f"{a}:{b}" for a, b in zip(edges[0], edges[0][1:], strict=False)]
    body = [[ranks(cells.get((i, j), ())) or "-" for j in range(len(columns))] for i in range(len(rows))]
    corner = f"axis {axes[0]} \\ {axes[1]}"
    first = max(len(corner), *(len(r) for r in rows))
    widths = [max(len(c), *(len(line[j]) for line in body)) + 2 for j, c in enumerate(columns)]
    head = corner.ljust(first) + "  " + " ".join(c.center(w) for c, w in zip(columns, widths, strict=True))
    out = [head.rstrip()]
    for label, line in zip(rows, body, strict=True):
        out.append(label.rjust(first) + " |" + "|".join(c.center(w) for c, w in zip(line, widths, strict=True)) + "|")
    return out
