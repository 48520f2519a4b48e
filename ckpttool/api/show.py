"""How objects of the API look in a console and in a notebook."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from ckpttool.errors import plain


def table(title: str, rows: Iterable[tuple[object, ...]], notes: Iterable[str] = ()) -> str:
    """An HTML table. Names come from files, so everything is escaped."""
    body = "".join("<tr>" + "".join(f"<td>{_cell(c)}</td>" for c in row) + "</tr>" for row in rows)
    said = "".join(f"<li>{escape(plain(n))}</li>" for n in notes)
    return f"<div><b>{escape(plain(title))}</b><table>{body}</table>" + (f"<ul>{said}</ul>" if said else "") + "</div>"


def _cell(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, tuple | list):
        return escape(plain(", ".join(map(str, value))))
    return escape(plain(str(value)))
