"""How objects of the API look in a console and in a notebook."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from ckpttool.errors import plain

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def amount(n: int) -> str:
    """``688.57 GB``."""
    if n < 1000:
        return f"{n} byte" if n == 1 else f"{n} bytes"
    value, at = float(n), 0
    while value >= 1000 and at < len(_UNITS) - 1:
        value /= 1000
        at += 1
    return f"{value:.2f} {_UNITS[at]}"


def count(n: int, noun: str) -> str:
    """``1 file``, ``1,000 files``."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


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
