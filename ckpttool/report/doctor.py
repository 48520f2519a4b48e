"""The document of ``doctor``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckpttool.answers.document import Document, Paragraph, Section
from ckpttool.errors import plain

if TYPE_CHECKING:
    from ckpttool.ops.doctor import MachineHealth

_TITLES = {
    "place": "Where files go",
    "machine": "This machine",
    "python": "Python",
    "extras": "Extras",
    "logins": "Other places",
}


def _verdict(health: MachineHealth) -> str:
    """Ready or not; then what is slow, and what is optional and missing."""
    by = {verdict: [p for p in health.points if p.verdict == verdict] for verdict in ("wrong", "slow", "missing")}
    lines = [f"not ready: {p.text}" + (f"; {p.hint}" if p.hint else "") for p in by["wrong"]] or ["ready"]
    lines += [f"slow: {', '.join(p.id for p in by['slow'])}"] if by["slow"] else []
    lines += [f"optional, not set up: {', '.join(p.id for p in by['missing'])}"] if by["missing"] else []
    return "\n".join(map(plain, lines))


def document(health: MachineHealth, *, problems: bool = False) -> Document:
    """The verdict, then each point by topic; with ``problems`` only the points that are not ok."""

    def json() -> dict[str, Any]:
        points = [{**p._asdict(), "hint": p.hint or None} for p in health.points]
        said = {"schema": "ckpttool.doctor/1", "path": str(health.place), "ok": health.ok}
        return {**said, "versions": health.versions, "points": points}

    def sections() -> Iterator[Section]:
        shown = [p for p in health.points if not problems or p.verdict != "ok"]
        most = max((len(p.id) for p in shown), default=0)
        yield Paragraph(_verdict(health), wrap=True)
        topic, hang = "", 13 + most
        for p in shown:
            if p.topic != topic:
                yield Paragraph("\n" + _TITLES[p.topic])
                topic = p.topic
            yield Paragraph(f"  {p.verdict:7}  {p.id:{most}}  {plain(p.text)}", wrap=True, hang=hang)
            if p.hint:
                yield Paragraph(" " * hang + f"hint: {plain(p.hint)}", wrap=True, hang=hang)

    return Document(json, sections, entries=len(health.points))
