"""What ``doctor`` found out, for people and for programs."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from ckpttool.errors import plain
from ckpttool.report.tables import width
from ckpttool.report.text import dump, on_terminal, write

if TYPE_CHECKING:
    from ckpttool.ops.doctor import MachineHealth

SCHEMA = "ckpttool.doctor/1"
_TITLES = {
    "place": "Where files go",
    "machine": "This machine",
    "python": "Python",
    "extras": "Extras",
    "logins": "Other places",
}


def show_health(health: MachineHealth, *, as_json: bool, quiet: bool = False) -> None:
    """Everything by topic; with ``quiet`` only what is not ok."""
    if as_json:
        found = [{**p._asdict(), "hint": p.hint or None} for p in health.points]
        said = {"schema": SCHEMA, "path": str(health.place), "ok": health.ok}
        dump({**said, "versions": health.versions, "points": found}, entries=len(found))
        return
    shown = [p for p in health.points if not quiet or p.verdict != "ok"]
    most = max((len(p.id) for p in shown), default=0)
    topic = ""
    for p in shown:
        if p.topic != topic:
            write(("\n" if topic else "") + f"{_TITLES[p.topic]}\n")
            topic = p.topic
        _line(f"  {p.verdict:7}  {p.id:{most}}  ", plain(p.text))
        if p.hint:
            _line(" " * (13 + most), f"hint: {plain(p.hint)}")


def _line(label: str, text: str) -> None:
    """A point, on a terminal broken between words below its own text."""
    if on_terminal() and len(label) + len(text) > width():
        room = max(width(), len(label) + 24)
        indent = " " * len(label)
        kept = textwrap.wrap(text, room - len(label), break_long_words=False, break_on_hyphens=False)
        text = f"\n{indent}".join(kept)
    write(f"{label}{text}\n")
