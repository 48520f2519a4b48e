"""Running programs side by side: what each of them costs, round after round.

A job is something that several programs can do. In each round every program of a job runs once, one after the other, in
an order that rotates, so that a ratio compares neighbours in time: absolute times mean little on a shared machine.

Before each run, dirty pages are written back and the sources are read into the page cache ("warm") or dropped from it
("cold"). A program's time has everything in it: its start, and a sync of the files that it wrote.
"""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Self, TypeVar

T = TypeVar("T")

OUT = "{out}"
"""Stands in a command for the path that the program is to write."""
URL = "{url}"
"""Stands in a command for where the job's server is."""
OURS = "ckpttool"
COPY = "cp"
_TICK = 0.05
"""Seconds between two looks at a program's memory."""


@dataclass(frozen=True, slots=True)
class Program:
    """One way to do a job."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """What is measured. The programs are ckpttool, cp (a download, for sources elsewhere) and the peers, in order."""

    name: str
    sources: tuple[Path, ...]
    """Files and directories that are read."""
    programs: tuple[Program, ...]
    prepare: Callable[[], None]
    """Makes the sources that are not there yet. Run in a process of its own, so it has to be picklable."""
    compare: Callable[[Path, Path, str], str] | None = None
    """(what ckpttool wrote, what a peer wrote, the peer's name) -> "" when they are equal, or how they differ."""
    of_copy: float | None = None
    """Target: at most this many times the time of cp."""
    of_copy_cpu: float | None = None
    """Target: at most this many times the CPU time of cp."""
    times_as_fast: float | None = None
    """Target: at least so many times as fast as the first peer."""
    cold: bool = False
    serve: Callable[[], AbstractContextManager[str]] | None = None
    """Starts a server for each run, and gives its URL."""
    usual: bool = True
    """Runs when no job is asked for by name."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one run cost."""

    wall: float
    """Seconds."""
    cpu: float
    """Seconds of all processes, user and system."""
    peak: float
    """MB of all processes together, looked at twenty times a second; pages that several of them map count once."""


@dataclass(slots=True)
class Row:
    """All runs of one program for one job."""

    job: Job
    program: Program
    runs: list[Run] = field(default_factory=list)
    differs: str = ""
    """How its output differs from ckpttool's."""

    def median(self, what: str) -> float:
        """Of ``wall``, ``cpu`` or ``peak``."""
        return statistics.median([float(getattr(r, what)) for r in self.runs])

    def ratios(self, other: Row, what: str = "wall") -> list[float]:
        """This program's cost by that of another one, pairs of one round."""
        return [float(getattr(a, what)) / float(getattr(b, what)) for a, b in zip(self.runs, other.runs, strict=True)]


def copy_of(*sources: Path) -> Program:
    """``cp -r`` of these; as many bytes as the job reads and writes are on the move."""
    script = 'mkdir "$0" && for i; do n=$((n + 1)) && cp -r "$i" "$0/$n"; done'
    return Program(COPY, ("sh", "-c", script, OUT, *map(str, sources)))


def measure(jobs: Sequence[Job], rounds: int, work: Path, say: Callable[[str], None]) -> list[Row]:
    """Run every program of every job once in each round; Ctrl-C ends that early. Raises SystemExit when one fails."""
    rows = {(j.name, p.name): Row(j, p) for j in jobs for p in j.programs}
    try:
        for n in range(rounds):
            for j, job in enumerate(rotated(jobs, n)):
                say(f"round {n + 1}/{rounds}, job {j + 1}/{len(jobs)}: {job.name}")
                _round(job, n, rows, work)
    except KeyboardInterrupt:
        say("interrupted: the table has what was complete")
        for job in jobs:
            mine = [rows[job.name, p.name] for p in job.programs]
            for row in mine:
                del row.runs[min(len(r.runs) for r in mine) :]
    return [row for row in rows.values() if row.runs]


def _round(job: Job, n: int, rows: dict[tuple[str, str], Row], work: Path) -> None:
    """Run every program of a job once."""
    ours = work / f"out-{OURS}"
    for program in rotated(job.programs, n):
        out = work / f"out-{program.name.replace(' ', '-')}"
        row = rows[job.name, program.name]
        with job.serve() if job.serve else nullcontext("") as url:
            row.runs.append(run(program, out, job.sources, cold=job.cold, log=work / "log", url=url))
        if not n and job.compare and program.name not in (OURS, COPY):  # the first round is not rotated
            row.differs = job.compare(ours, out, program.name)
        if n or out != ours:
            remove(out)
    remove(ours)


def rotated(items: Sequence[T], by: int) -> list[T]:
    """The same, beginning elsewhere."""
    by %= len(items)
    return [*items[by:], *items[:by]]


def run(program: Program, out: Path, sources: Iterable[Path], *, cold: bool, log: Path, url: str = "") -> Run:
    """Run a program to its end, and sync what it wrote. Raises SystemExit with what it said when it fails."""
    remove(out)
    settle(sources, cold=cold)
    command = [word.replace(OUT, str(out)).replace(URL, url) for word in program.command]
    begin = perf_counter()
    with log.open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
    with _watched(process.pid) as peak:
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{shlex.join(command)} failed:\n{log.read_text(errors='replace')[-3000:]}")
    syncing = resource.getrusage(resource.RUSAGE_THREAD)
    sync(out)
    synced = resource.getrusage(resource.RUSAGE_THREAD)
    wall = perf_counter() - begin
    cpu = sum(b - a for a, b in zip(syncing[:2], synced[:2], strict=True)) + usage.ru_utime + usage.ru_stime
    return Run(wall, cpu, peak.value)


class _watched:  # noqa: N801 - reads as a statement
    """The peak of memory of a process and its descendants, looked at while the block runs."""

    def __init__(self, pid: int) -> None:
        self.value = 0.0
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._over.wait(_TICK):
            self.value = max(self.value, resident(self._pid))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def family(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return
    for task in tasks:
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        for child in children:
            yield from family(int(child))


def resident(pid: int) -> float:
    """MB of a process and its descendants: the sum of their proportional set sizes."""
    total = 0
    for one in family(pid):
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return total * 1024 / 1e6


def files_below(path: Path) -> Iterator[Path]:
    """The file itself, or all files of a directory."""
    if path.is_dir():
        yield from sorted(p for p in path.rglob("*") if p.is_file())
    elif path.exists():
        yield path


def settle(sources: Iterable[Path], *, cold: bool) -> None:
    """Write back what is dirty, then load the sources into the page cache or drop them from it."""
    os.sync()
    for source in sources:
        for path in files_below(source):
            with path.open("rb", buffering=0) as f:
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while not cold and f.read(8 << 20):
                    pass


def sync(path: Path) -> None:
    """Make what was written durable."""
    for file in files_below(path):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def remove(path: Path) -> None:
    """Delete a file or a directory, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
