"""Tables that fit the terminal: whole columns are dropped, long names lose their middle, numbers stay whole.

In a pipe nothing is dropped and nothing shortened.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence
from functools import partial

from ckpttool.report import text

LEAST = 36
"""Characters that a shortened name keeps at least."""
CUT = "..."


def width() -> int:
    """Columns of the terminal."""
    return shutil.get_terminal_size((80, 24)).columns


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str | int]],
    *,
    names: int = 0,
    drop: Sequence[str] = (),
    right: Iterable[int] = (),
) -> None:
    """Aligned columns on a terminal; elsewhere tab-separated values with a header line.

    On a terminal, integers are aligned to the right and have commas between thousands; ``right`` aligns other columns.
    Columns in ``drop`` go, first come first, until the rest fits; texts of the column ``names`` may be shortened.
    """
    if not text.on_terminal():
        text.write("\n".join(["\t".join(header), *["\t".join(map(str, row)) for row in rows]]) + "\n")
        return
    numbers = {i for row in rows for i, cell in enumerate(row) if isinstance(cell, int)}
    cells = [list(map(text.cell, row)) for row in rows]
    text.write(text.aligned(*fit([list(header), *cells], names=names, drop=drop, right={*numbers, *right})))


def fit(
    rows: Sequence[Sequence[str]], *, names: int = 0, drop: Sequence[str] = (), right: Iterable[int] = ()
) -> tuple[list[list[str]], set[int]]:
    """The rows as they fit, the first of them the header, and which of the columns left are aligned to the right."""
    keep = list(range(len(rows[0])))
    widths = [max(text.columns_of(row[i]) for row in rows) for i in keep]
    room = width()

    def left() -> int:
        """Characters that are left for names."""
        return room - sum(widths[i] + 2 for i in keep if i != names)

    for gone in [name for name in drop if name in rows[0]]:
        if left() >= min(widths[names], LEAST):
            break
        keep.remove(rows[0].index(gone))
    most = max(left(), LEAST)
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


def wrapped(lines: str, hang: int = 2) -> str:
    """Lines of prose, on a terminal broken between words where they are too long for it, and continued after ``hang``
    columns."""
    if not text.on_terminal():
        return lines
    room = max(width(), hang + 24)
    fill = partial(textwrap.fill, width=room, subsequent_indent=" " * hang, break_long_words=False)
    out = [fill(line, break_on_hyphens=False) if len(line) > width() else line for line in lines.splitlines()]
    return "".join(f"{line}\n" for line in out)


def middle(name: str, most: int, head: int = 0) -> str:
    """A name without its middle, ``model...mlp.down_proj.weight``: the end says more than the beginning, which gets
    ``head`` columns, or a fifth.
    """
    if text.columns_of(name) <= most:
        return name
    head = head or (most - len(CUT)) // 5
    if name.isascii():
        return name[:head] + CUT + name[len(name) - (most - len(CUT) - head) :]
    start, end = 0, len(name)
    while text.columns_of(name[: start + 1]) <= head:
        start += 1
    while text.columns_of(name[end - 1 :]) <= most - len(CUT) - head:
        end -= 1
    return name[:start] + CUT + name[end:]
