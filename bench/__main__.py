"""Measure ckpttool beside ``cp`` and the programs that do the same jobs; prints one table.

python -m bench                                  every usual job, 3 rounds: about 40 minutes, 60 GB of disk
python -m bench --quick                          small sources, one round: below 2 minutes, 2 GB
python -m bench --only "TP8 -> TP2" slerp    jobs whose names have one of these in them
python -m bench --list                           the names of all jobs

measure.py   how a program is run and what is measured      jobs/    a file for each family of jobs
table.py     the table                                       peers/   programs that ckpttool is compared with
models.py    the models                                      setting.py   sizes, paths, which peers are there
torch_files.py   torch's and DeepSpeed's checkpoints
"""

from __future__ import annotations

import argparse
import multiprocessing
import shlex
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from bench.jobs import cluster, dcp, flex, fp8, megatron, merge, program, remote, reshard, zero
from bench.measure import Job, measure
from bench.setting import ROOT, Setting
from bench.table import machine, save, table

SIZE, QUICK = 4.3, 0.3
JUDGED_FROM = 4.0
"""GB. The targets are for checkpoints of this size: of a small one, most of the time is the start of Python."""
PAGE = ROOT / "docs" / "performance.md"


def all_jobs(setting: Setting) -> list[Job]:
    """Every job, in the order of the table."""
    return [
        job
        for family in (reshard, dcp, zero, megatron, merge, flex, fp8, program, remote, cluster)
        for job in family.jobs(setting)
    ]


def chosen(jobs: Sequence[Job], only: Sequence[str], *, cold: bool, judged: bool) -> list[Job]:
    """The usual jobs, or those whose names have one of ``only`` in them, with their targets if they are to be judged.

    Raises SystemExit when there is none.
    """
    found = [j for j in jobs if (any(o in j.name for o in only) if only else j.usual)]
    if not found:
        raise SystemExit(f"no job has {' or '.join(only)} in its name; --list shows all")
    if cold:
        found = [
            replace(j, name=f"{j.name}, cold", cold=True, of_copy=None, of_copy_cpu=None) for j in found if not j.cold
        ]
    if not judged:
        found = [replace(j, of_copy=None, of_copy_cpu=None, times_as_fast=None) for j in found]
    return found


def prepare(jobs: Sequence[Job]) -> None:
    """Make what the jobs read, in a process of its own, so that the memory it takes is gone before anything is run."""
    for job in jobs:
        print(f"preparing {job.name}", file=sys.stderr, flush=True)
        process = multiprocessing.get_context("spawn").Process(target=job.prepare)
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"the sources of {job.name} could not be made")


def find(given: str, usual: Path, what: str) -> str:
    """Path of a peer, or "" after a note."""
    path = Path(given) if given else usual
    if path.exists():
        return str(path.absolute())
    if given:
        raise SystemExit(f"{given} does not exist")
    print(f"note: {what} is left out: there is no {usual.relative_to(ROOT)}; `make bench` installs it", file=sys.stderr)
    return ""


def installed(package: str) -> bool:
    """Whether a peer can be imported; a note where it cannot."""
    if find_spec(package) is not None:
        return True
    print(f"note: {package} is left out: it is not installed; `make bench` installs it", file=sys.stderr)
    return False


def _rounds(counts: Sequence[int]) -> str:
    """How many there were; of some jobs one less when the run was interrupted."""
    least, most = min(counts, default=0), max(counts, default=0)
    return f"{least} round{'s' * (least != 1)}" if least == most else f"{least} or {most} rounds"


def main() -> None:
    """Prepare, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="parts of names of jobs")
    parser.add_argument("--list", action="store_true", help="print the names of all jobs; a * marks the usual ones")
    parser.add_argument("--rounds", type=int, help="3 unless said")
    parser.add_argument("--cold", action="store_true", help="no source is in the page cache, in any job")
    parser.add_argument("--size", type=float, metavar="GB", help="of the checkpoint that is resharded, 4.3 unless said;"
                        " models that are merged and all other sources have a third of it")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help=f"--size {QUICK} --rounds 1")
    parser.add_argument("--no-peers", action="store_true", help="ckpttool and cp alone")
    parser.add_argument("--mergekit", default="", metavar="PROGRAM", help="path of mergekit-yaml")
    parser.add_argument("--paddle", default="", metavar="PYTHON", help="an interpreter with paddlepaddle")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "bench", help="where sources are made and kept")
    parser.add_argument("--save", action="store_true", help="put the table into docs/performance.md")
    args = parser.parse_args()
    size = args.size or (QUICK if args.quick else SIZE)
    rounds = args.rounds or (1 if args.quick else 3)
    setting = Setting(
        args.work.resolve(),
        size,
        torch=not args.no_peers,
        deepspeed=not args.no_peers and installed("deepspeed"),
        megatron=not args.no_peers and installed("megatron"),
        mergekit="" if args.no_peers else find(args.mergekit, ROOT / ".venv/bin/mergekit-yaml", "mergekit"),
        paddle="" if args.no_peers else find(args.paddle, ROOT / ".venv-paddle/bin/python", "Paddle"),
    )
    if args.list:
        print("\n".join(f"{'*' if j.usual else ' '} {j.name}" for j in all_jobs(setting)))
        return
    jobs = chosen(all_jobs(setting), args.only, cold=args.cold, judged=size >= JUDGED_FROM)
    began = time.monotonic()
    prepare(jobs)
    rows = measure(jobs, rounds, setting.work, lambda text: print(text, file=sys.stderr, flush=True))
    words = shlex.join([w for w in sys.argv[1:] if w != "--save"])
    head = (
        f"{machine()}; {_rounds([len(row.runs) for row in rows])} in {(time.monotonic() - began) / 60:.0f} minutes."
        f" Reshards of {size:g} GB, everything else of {size / 3:.2g} GB for each model or file:"
        f" `make bench{f' ARGS={shlex.quote(words)}' if words else ''}`"
    )
    text = f"{textwrap.fill(head, 120, break_long_words=False, break_on_hyphens=False)}\n\n{table(rows)}"
    print(text)
    if args.save:
        save(text, PAGE)


if __name__ == "__main__":
    main()
