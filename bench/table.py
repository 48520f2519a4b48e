"""The table of a run, in Markdown."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.measure import COPY, OURS, Row

BEGIN, END = "<!-- the last run of make bench -->", "<!-- end of the last run -->"
HEAD = ("job", "program", "wall s", "cp's", "wall / cp", "CPU s", "CPU / cp", "peak MB", "ckpttool is", "target")


def spread(values: Iterable[float], digits: int = 2) -> str:
    """``median [least-most]``, or the only one."""
    found = sorted(values)
    if len(found) == 1:
        return f"{found[0]:.{digits}f}"
    return f"{statistics.median(found):.{digits}f} [{found[0]:.{digits}f}-{found[-1]:.{digits}f}]"


def table(rows: Sequence[Row]) -> str:
    """A line for each program of each job, ckpttool first; cp's time stands on the line of ckpttool."""
    lines = [HEAD, tuple("---" for _ in HEAD)]
    by_job: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_job.setdefault(row.job.name, {})[row.program.name] = row
    for found in by_job.values():
        shown = [name for name in found if name != COPY]
        peers = [name for name in shown if name != OURS]
        lines += [_line(found[n], found, first=n == shown[0], peer=peers[:1] == [n]) for n in shown]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _line(row: Row, found: dict[str, Row], *, first: bool, peer: bool) -> tuple[str, ...]:
    job, copy, ours = row.job, found.get(COPY), found[OURS]
    wall = row.ratios(copy) if copy and copy is not row else []
    cpu = row.ratios(copy, "cpu") if copy and copy is not row else []
    faster = row.ratios(ours) if row is not ours else []
    targets = []
    if row is ours:
        for values, most, what in ((wall, job.of_copy, "cp"), (cpu, job.of_copy_cpu, "CPU")):
            if most is not None and values:
                targets.append(_judged(f"{most:g} {what}", met=statistics.median(values) <= most))
    elif peer and job.times_as_fast is not None:
        targets.append(_judged(f"{job.times_as_fast:g} x", met=statistics.median(faster) >= job.times_as_fast))
    return (
        job.name if first else "",
        row.program.name,
        f"{row.median('wall'):.2f}",
        f"{copy.median('wall'):.2f}" if row is ours and copy else "",
        spread(wall) if wall else "",
        f"{row.median('cpu'):.2f}",
        f"{statistics.median(cpu):.2f}" if cpu else "",
        f"{max(r.peak for r in row.runs):,.0f}",
        f"{spread(faster, 1)} x as fast{'; ' + row.differs if row.differs else ''}" if faster and _is_peer(row) else "",
        ", ".join(targets),
    )


def _is_peer(row: Row) -> bool:
    """Whether the program is one that ckpttool is compared with, beside cp."""
    return row.program.name not in (OURS, COPY)


def _judged(what: str, *, met: bool) -> str:
    return f"{what}: {'met' if met else '**missed**'}"


def machine() -> str:
    """What the figures were measured on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores, {memory:.0f} GB of memory, {platform.system()} {platform.release().split('-')[0]}"


def save(text: str, page: Path) -> None:
    """Put the text between the two marks of the page. Raises SystemExit when they are not there."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page} has no place for the table: {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")
