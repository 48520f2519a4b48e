"""Measure reshard against ``cp`` of the same bytes and against the torch script that people write.

    python bench/run.py [--layers 6] [--rounds 3] [--cold] [--only JOB ...] [--work DIR] [--json FILE]

Every round runs each job once, in an order that rotates, and ``cp -r`` of the job's source plus fsync beside it, so
that a ratio compares two runs that were neighbours in time. Absolute times mean nothing on a shared machine: the table
shows the median of the paired ratios with their range, CPU seconds likewise, and peak memory. "warm" reads the source
into the page cache before every run; "cold" drops it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import model

PYTHON = sys.executable
TOOL = str(Path(sys.executable).with_name("ckpttool"))


@dataclass(frozen=True)
class Job:
    """One reshard; ``source`` names a prepared checkpoint."""

    name: str
    source: str
    args: tuple[str, ...]
    torch_ranks: int = 0
    """Ranks of the same job as torch_way.py does it; 0 leaves that out."""


JOBS = (
    Job("TP8 -> TP2", "tp8", ("--tp-out", "2"), 2),
    Job("TP1 -> TP8", "hf", ("--tp-out", "8"), 8),
    Job("TP8 -> 1 file", "tp8", ("--tp-out", "1", "--to", "hf", "--max-shard-size", "1000GB"), 1),
    Job("TP8 -> TP2, fused qkv and gate_up", "tp8_fused", ("--tp-out", "2")),
    Job("TP8 -> TP2, all column", "tp8_column", ("--tp-out", "2", "--split", "*=0")),
    Job("TP8 -> TP2, all row", "tp8_row", ("--tp-out", "2", "--split", "*.weight=1")),
)

PREPARE: dict[str, tuple[str, ...]] = {
    "tp8": ("--tp-out", "8"),
    "tp8_fused": ("--tp-out", "8", "--fuse"),
    "tp8_column": ("--tp-out", "8", "--split", "*=0"),
    "tp8_row": ("--tp-out", "8", "--split", "*.weight=1", "--remove-keys", "*norm*"),
}


@dataclass
class Run:
    """What one process cost."""

    wall: float
    cpu: float
    rss: float
    """MB."""


@dataclass
class Row:
    """One line of the table."""

    name: str
    wall: list[float] = field(default_factory=list)
    """Ratios to cp."""
    cpu: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rss: list[float] = field(default_factory=list)


def measure(command: list[str]) -> Run:
    """Run a command to its end; CPU and memory are those of the whole process tree that was waited for."""
    begin = perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    message = process.stderr.read() if process.stderr else b""
    _, status, usage = os.wait4(process.pid, 0)
    wall = perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.stderr:
        process.stderr.close()
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{message.decode()}")
    return Run(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000)


def settle(source: Path, *, cold: bool) -> None:
    """Write back what is dirty, then load the source into the page cache or drop it."""
    os.sync()
    for path in sorted(source.iterdir()):
        with path.open("rb", buffering=0) as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if not cold:
                while f.read(8 << 20):
                    pass


def one(row: Row, source: Path, target: Path, command: list[str], *, cold: bool, first: bool) -> None:
    """One paired run: the command and cp, in the order that ``first`` says."""

    def ours() -> Run:
        settle(source, cold=cold)
        got = measure(command)
        shutil.rmtree(target, ignore_errors=True)
        return got

    def copy() -> Run:
        settle(source, cold=cold)
        got = measure(["sh", "-c", 'cp -r "$0" "$1" && sync "$1"/*', str(source), str(target)])
        shutil.rmtree(target, ignore_errors=True)
        return got

    runs: list[Callable[[], Run]] = [ours, copy] if first else [copy, ours]
    got = [r() for r in runs]
    mine, cp = got if first else (got[1], got[0])
    row.wall.append(mine.wall / cp.wall)
    row.cpu.append(mine.cpu / cp.cpu)
    row.seconds.append(mine.cpu)
    row.rss.append(mine.rss)


def spread(values: list[float]) -> str:
    """``median [least-most]``."""
    return f"{statistics.median(values):.2f} [{min(values):.2f}-{max(values):.2f}]"


def main() -> None:
    """Prepare, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6, help="decoder layers; 6 make 4.7 GB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="drop the source from the page cache before every run")
    parser.add_argument("--only", nargs="*", default=[], help="parts of job names")
    parser.add_argument("--no-torch", action="store_true", help="leave the torch script out")
    parser.add_argument("--work", type=Path, default=Path("build/bench"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    work: Path = args.work
    work.mkdir(parents=True, exist_ok=True)
    jobs = [j for j in JOBS if not args.only or any(o in j.name for o in args.only)]
    hf = work / "hf"
    size = (
        model.write(hf, args.layers)
        if not (hf / "model.safetensors").exists()
        else (hf / "model.safetensors").stat().st_size
    )
    for name in {j.source for j in jobs} - {"hf"}:
        if not (work / name).exists():
            measure([TOOL, "reshard", str(hf), str(work / name), "-q", *PREPARE[name]])
    rows: dict[str, Row] = {}
    for n in range(args.rounds):
        for job in jobs[n % len(jobs) :] + jobs[: n % len(jobs)]:
            source, target = work / job.source, work / "out"
            shutil.rmtree(target, ignore_errors=True)
            row = rows.setdefault(job.name, Row(job.name))
            command = [TOOL, "reshard", str(source), str(target), "-q", *job.args]
            one(row, source, target, command, cold=args.cold, first=n % 2 == 0)
            if job.torch_ranks and not args.no_torch:
                row = rows.setdefault(job.name + "  (torch script)", Row(job.name + "  (torch script)"))
                script = str(Path(__file__).with_name("torch_way.py"))
                command = [PYTHON, script, str(source), str(target), str(job.torch_ranks)]
                one(row, source, target, command, cold=args.cold, first=n % 2 == 0)
            print(f"round {n + 1}/{args.rounds}  {job.name}", file=sys.stderr, flush=True)
    state = "cold" if args.cold else "warm"
    print(
        f"{size / 1e9:.2f} GB bf16, {state} source, fsync included, {args.rounds} rounds; ratios to `cp -r` + fsync\n"
    )
    order = [r for j in JOBS for r in rows.values() if r.name.split("  (")[0] == j.name]
    width = max(len(r.name) for r in order)
    print(f"{'job':<{width}}  {'wall / cp':<20} {'CPU / cp':<20} {'CPU s':>6} {'peak MB':>8}")
    for r in order:
        print(
            f"{r.name:<{width}}  {spread(r.wall):<20} {spread(r.cpu):<20} {statistics.median(r.seconds):>6.1f}"
            f" {max(r.rss):>8.0f}"
        )
    if args.json:
        args.json.write_text(json.dumps({k: vars(v) for k, v in rows.items()}, indent=2))


if __name__ == "__main__":
    main()
