"""``make torture``: the whole campaign, on every processor, with a table at the end."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from multiprocessing.pool import Pool
from pathlib import Path
from typing import NamedTuple

from tests.torture import campaign, interpose
from tests.torture.campaign import Bench, Campaign, Report
from tests.torture.contest import RACES, READING, race, read, shift
from tests.torture.full import fill_disk, limit_sizes, small_disk
from tests.torture.power import lose_power
from tests.torture.scenarios import SCENARIOS, prepare

KINDS = {
    "faults": "kill -9 and faults at every call",
    "power": "loss of power before every call",
    "full": "a disk that is really full, and ulimit -f",
    "change": "a source that changes during the run",
    "race": "two at once on one destination",
}
_CHUNK = 40


class Task(NamedTuple):
    """What one process does in one go."""

    kind: str
    which: int
    """Number of the scenario, or of the race."""
    numbers: range = range(0)
    """Of the cases, for ``faults``."""


class Extent(NamedTuple):
    """How much is tried."""

    every: int
    thorough: bool


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--kind", action="append", choices=KINDS, help="only this (repeatable)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="only scenarios with this in their name"
    )
    parser.add_argument("--all", action="store_true", help="every fault at every point, however often it repeats")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every Nth case")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    given = parser.parse_args(words)
    if why := interpose.available():
        print(f"the calls of a process cannot be supervised here: {why}", file=sys.stderr)  # noqa: T201
        return 2
    began = time.monotonic()
    extent = Extent(given.every, given.all)
    kinds = given.kind or list(KINDS)
    chosen = [i for i, s in enumerate(SCENARIOS) if _meant(s.name, given.only)]
    campaign.warm_up()
    wrong = 0
    with campaign.place() as root:
        sources = root / "sources"
        sources.mkdir()
        prepare(sources)
        campaign.make_safetensors(root, sources)
        fork = multiprocessing.get_context("fork")
        with fork.Pool(given.jobs, _begin, (root, sources, extent)) as pool:
            for kind in KINDS:
                if kind in kinds and kind != "full":
                    wrong += _section(pool, kind, _tasks(pool, kind, chosen, given.only))
        if "full" in kinds:
            with fork.Pool(1, _begin_small, (root, sources, extent)) as pool:
                if why := pool.apply(_why_not):
                    print(f"\nno {KINDS['full']}: {why}")  # noqa: T201
                else:
                    wrong += _section(pool, "full", _tasks(pool, "full", chosen, given.only))
    print(f"\n{time.monotonic() - began:.0f} s, {wrong} wrong")  # noqa: T201
    return bool(wrong)


def _meant(name: str, only: Sequence[str]) -> bool:
    return not only or any(text in name for text in only)


def _tasks(pool: Pool, kind: str, chosen: list[int], only: Sequence[str]) -> list[Task]:
    if kind == "race":
        names = [*[r.name for r in RACES], READING]
        return [Task(kind, i) for i, name in enumerate(names) if _meant(name, only)]
    if kind == "change":
        return [Task(kind, i) for i in chosen if not SCENARIOS[i].edits and not SCENARIOS[i].prepared]
    if kind != "faults":
        return [Task(kind, i) for i in chosen]
    tasks = []
    for i, numbers in zip(chosen, pool.map(_count, chosen, 1), strict=True):
        tasks += [Task(kind, i, numbers[a : a + _CHUNK]) for a in range(0, len(numbers), _CHUNK)]
    return tasks


def _section(pool: Pool, kind: str, tasks: Iterable[Task]) -> int:
    """Do the tasks and show a table. Returns how much is wrong."""
    reports: dict[str, Report] = {}
    for part in pool.imap_unordered(_work, tasks):
        for text in part.wrong:
            print(f"WRONG {text}", file=sys.stderr, flush=True)  # noqa: T201
        if part.name in reports:
            reports[part.name] += part
        else:
            reports[part.name] = part
    order = [*[s.name for s in SCENARIOS], *[r.name for r in RACES], READING]
    found = sorted(reports.values(), key=lambda r: order.index(r.name))
    total = Report("all")
    for r in found:
        points = total.points + r.points
        total += r
        total.points = points
    rows: list[tuple[str, ...]] = [(KINDS[kind], "points", "runs", "killed", "failed", "done", "resumed", "wrong")]
    for r in [*found, total]:
        numbers = (r.points, r.runs, *(r.ends[e] for e in ("killed", "error", "done")), r.resumed, len(r.wrong))
        rows.append((r.name, *[f"{n:,}" for n in numbers]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()  # noqa: T201
    for name, *cells in rows:
        line = [name.ljust(widths[0]), *[c.rjust(w) for c, w in zip(cells, widths[1:], strict=True)]]
        print("  ".join(line), flush=True)  # noqa: T201
    return len(total.wrong)


# -- in the processes of the pool


class _Here:
    """What a process of the pool has."""

    bench: Bench
    extent: Extent
    original: Path
    why_not = ""
    campaigns: dict[int, Campaign]


def _begin(root: Path, sources: Path, extent: Extent) -> None:
    """A bench with sources of its own, which may change."""
    home = root / f"bench-{os.getpid()}"
    home.mkdir()
    shutil.copytree(sources, home / "sources")
    _Here.bench = Bench(home, home / "sources")
    _Here.extent = extent
    _Here.original = sources
    _Here.campaigns = {}


def _begin_small(root: Path, sources: Path, extent: Extent) -> None:
    home = root / "small"
    home.mkdir()
    try:
        small_disk(home)
    except interpose.UnavailableError as e:
        _Here.why_not = str(e)
    _Here.bench = Bench(home, sources)
    _Here.extent = extent
    _Here.campaigns = {}


def _why_not() -> str:
    return _Here.why_not


def _campaign(index: int) -> Campaign:
    if index not in _Here.campaigns:
        _Here.campaigns[index] = Campaign(SCENARIOS[index], _Here.bench)
    tried = _Here.campaigns[index]
    tried.report = Report(tried.scenario.name, points=len(tried.calls))
    return tried


def _count(index: int) -> range:
    """The numbers of a scenario's cases."""
    every = _Here.extent.every
    return range(index % every, len(_campaign(index).cases(thorough=_Here.extent.thorough)), every)


def _work(task: Task) -> Report:
    every, thorough = _Here.extent
    if task.kind == "race":
        times = max(1, (300 if thorough else 60) // every)
        return race(RACES[task.which], _Here.bench, times) if task.which < len(RACES) else read(_Here.bench, times)
    tried = _campaign(task.which)
    match task.kind:
        case "power":
            lose_power(tried, every=every if thorough else 8 * every)
        case "full":
            limit_sizes(tried)
            fill_disk(tried, every=every if thorough else 10 * every)
        case "change":
            shift(tried, _Here.original, points=max(1, (20 if thorough else 5) // every))
            del _Here.campaigns[task.which]  # its sources are new files by now
        case _:
            cases = tried.cases(thorough=thorough)
            for n in task.numbers:
                if n < len(cases):
                    tried.strike(cases[n])
    return tried.report


if __name__ == "__main__":
    sys.exit(main())
