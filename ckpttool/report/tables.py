"""Tables that fit the terminal: whole columns are dropped, long names lose their middle, numbers stay whole.

In a pipe nothing is dropped and nothing shortened.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from ckpttool.core.words import short
from ckpttool.report import text
from ckpttool.report.style import coloured, column_colours, styled
from ckpttool.report.text import width

LEAST = 36
"""Characters that a shortened name keeps at least, on a terminal of 80 columns or more."""
_STACKED = 20
"""Characters of a name for which a table gets two lines a row rather than less of it."""
CUT = "..."


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str | int]],
    *,
    names: int = 0,
    drop: Sequence[str] = (),
    right: Iterable[int] = (),
    sizes: bool = True,
) -> None:
    """Aligned columns on a terminal; elsewhere tab-separated values with a header line.

    On a terminal, integers are aligned to the right and have commas between thousands; with ``sizes`` those of columns
    that are named ``bytes`` are sizes. ``right`` aligns other columns. Columns in ``drop`` go, first come first, until
    the rest fits; texts of the column ``names`` may be shortened.
    """
    if not text.on_terminal():
        text.put("\n".join(["\t".join(header), *["\t".join(map(str, row)) for row in rows]]) + "\n", sys.stdout)
        return
    numbers = {i for row in rows for i, cell in enumerate(row) if isinstance(cell, int)}
    sized = {i for i in numbers if sizes and header[i].endswith("bytes")}
    titles = [title.replace("bytes", "size") if i in sized else title for i, title in enumerate(header)]
    cells = [
        [short(c) if i in sized and isinstance(c, int) else text.cell(c) for i, c in enumerate(row)] for row in rows
    ]
    shown, ends = fit([titles, *cells], names=names, drop=drop, right={*numbers, *right})
    show(shown, ends, names=shown[0].index(titles[names]))


def show(rows: Sequence[Sequence[str]], right: Iterable[int] = (), *, names: int = 0) -> None:
    """Print rows, the first of them the header, in columns or, where these are too wide for the terminal, in two lines
    a row: the name, and below it the other columns."""
    right, room = set(right), width()
    colour = column_colours(rows[0], names) if coloured(sys.stdout) else None
    widths = [max(text.columns_of(row[i]) for row in rows) for i in range(len(rows[0]))]
    if sum(widths) + 2 * len(widths) - 2 <= room or len(widths) < 2:
        text.put(text.aligned(rows, right, colour=colour), sys.stdout)
        return
    rest = [i for i in range(len(widths)) if i != names]
    others = [[row[i] for i in rest] for row in rows]
    while (over := sum(2 + max(text.columns_of(row[at]) for row in others) for at in range(len(rest))) - room) > 0:
        wide = {at: max(text.columns_of(row[at]) for row in others) for at, i in enumerate(rest) if i not in right}
        at = max(wide, key=wide.__getitem__, default=0)
        if wide.get(at, 0) <= _STACKED:
            break  # numbers, which stay whole
        for row in others:
            row[at] = middle(row[at], max(wide[at] - over, _STACKED))
    below = text.aligned(
        others,
        {at for at, i in enumerate(rest) if i in right},
        indent="  ",
        colour=colour and (lambda row, column, cell: colour(row, rest[column], cell)),
    )
    above = text.aligned([[name] for name in _shortened([row[names] for row in rows], room)])
    for number, lines in enumerate(zip(above.splitlines(), below.splitlines(), strict=True)):
        name, line = lines
        text.put(f"{styled(name, colour(number, names, name)) if colour else name}\n{line}\n", sys.stdout)


def fit(
    rows: Sequence[Sequence[str]], *, names: int = 0, drop: Sequence[str] = (), right: Iterable[int] = ()
) -> tuple[list[list[str]], set[int]]:
    """The rows as they fit, the first of them the header, and which of the columns left are aligned to the right.

    They are still too wide where a name would keep less than ``_STACKED`` characters.
    """
    keep = list(range(len(rows[0])))
    widths = [max(text.columns_of(row[i]) for row in rows) for i in keep]
    room = width()
    least = min(LEAST, room * 2 // 5 if room < 80 else LEAST)

    def left() -> int:
        """Characters that are left for names."""
        return room - sum(widths[i] + 2 for i in keep if i != names)

    for gone in [name for name in drop if name in rows[0]]:
        if left() >= min(widths[names], least):
            break
        keep.remove(rows[0].index(gone))
    most = left() if left() >= _STACKED else room
    shown = _shortened([row[names] for row in rows], most)
    cells = [[shown[at] if i == names else row[i] for i in keep] for at, row in enumerate(rows)]
    wanted = set(right)
    return cells, {at for at, i in enumerate(keep) if i in wanted}


def _shortened(names: Sequence[str], most: int) -> list[str]:
    """Names without their middles. Of those that would become alike (only their layers differ) the beginning is left up
    to where they differ.
    """
    out = [middle(name, most) for name in names]
    alike: dict[str, set[str]] = {}
    for name, cut in zip(names, out, strict=True):
        alike.setdefault(cut, set()).add(name)
    heads = {cut: min(_differ_at(group) + 2, most - len(CUT) - 3) for cut, group in alike.items() if len(group) > 1}
    return [middle(name, most, heads[cut]) if cut in heads else cut for name, cut in zip(names, out, strict=True)]


def _differ_at(names: Iterable[str]) -> int:
    """How many characters some names have in common at their beginning."""
    columns = list(zip(*names, strict=False))
    return next((i for i, letters in enumerate(columns) if len(set(letters)) > 1), len(columns))


def middle(name: str, most: int, head: int = 0) -> str:
    """A name without its middle, ``model...mlp.down_proj.weight``: the end says more than the beginning, which gets
    ``head`` columns, or a fifth. Spaces before it stay.
    """
    if text.columns_of(name) <= most:
        return name
    if (indent := len(name) - len(name.lstrip())) and indent < most // 2:
        return name[:indent] + middle(name[indent:], most - indent, max(head - indent, 0))
    head = head or (most - len(CUT)) // 5
    if name.isascii():
        return name[:head] + CUT + name[len(name) - (most - len(CUT) - head) :]
    start, end = 0, len(name)
    while text.columns_of(name[: start + 1]) <= head:
        start += 1
    while text.columns_of(name[end - 1 :]) <= most - len(CUT) - head:
        end -= 1
    return name[:start] + CUT + name[end:]
