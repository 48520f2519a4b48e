"""Coverage-guided fuzzing of every reader with atheris (libFuzzer): a fixed time for each target.

    python -m tests.fuzz.guided --seconds 60             every target for a minute
    python -m tests.fuzz.guided --seconds 600 --only pickle
    python -m tests.fuzz.guided --seed 1 --runs 500      the same inputs each time, while the readers are the same
    python -m tests.fuzz.guided --only flex --input FILE   one input again, with its traceback

Inputs that reach new code are kept in --corpus and are where the next run begins. An input that breaks a reader is
written to --corpus too, and printed.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.helpers.memory_disk import memory_disk

if TYPE_CHECKING:  # what runs imports it where its coverage counts
    from tests.fuzz.targets import Target

MEMORY = 600
"""MiB that a process may take, the interpreter and numpy included."""
SECONDS = 30
"""Longest for one input, of milliseconds, on a busy machine."""


class Ran(NamedTuple):
    """What one target's run came to."""

    name: str
    runs: int
    coverage: int
    finding: str


def instrumented() -> dict[str, Callable[[], Target]]:
    """The targets, for which all that they import counts its coverage: once for the processes forked from this one."""
    import atheris

    with redirect_stderr(io.StringIO()), atheris.instrument_imports(include=["ckpttool"]):  # it lists every module
        from tests.fuzz.targets import TARGETS
    return TARGETS


def fuzz(target: Target, arguments: list[str], log: Path) -> None:
    """Runs one target in this process, for as long as libFuzzer's arguments say; never returns."""
    import atheris

    from tests.fuzz.targets import guarded

    with log.open("wb") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        import random

        rng = random.Random(seed)  # noqa: S311 - nothing secret
        if target.mutate is not None and rng.random() < 0.5:
            try:
                return target.mutate(data, rng)[:most]
            except (ValueError, IndexError):
                pass  # no longer what the mutator understands
        return bytes(atheris.Mutate(data, most))

    options: dict[str, Any] = {"custom_mutator": mutate} if target.mutate is not None else {}
    atheris.Setup([sys.argv[0], *arguments], guarded(target), **options)
    try:
        atheris.Fuzz()
    except SystemExit:
        # multiprocessing would leave with os._exit: libFuzzer writes the input that broke a reader when C exits.
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).exit(1)


def one(name: str, data: bytes) -> None:
    """One input again. Raises what the reader raises."""
    from tests.fuzz.targets import TARGETS, guarded

    guarded(next(make for n, make in TARGETS.items() if name in n)())(data)


class Run:
    """One target in a process of its own."""

    def __init__(self, name: str, target: Target, limits: Sequence[str], corpus: Path, log: Path) -> None:
        self.name, self.log = name, log
        folder = corpus / name.replace(" ", "_")
        folder.mkdir(parents=True, exist_ok=True)
        for i, seed in enumerate(target.seeds):
            (folder / f"seed{i}").write_bytes(seed)
        words = folder.with_suffix(".dict")
        words.write_text("".join('"' + "".join(f"\\x{b:02x}" for b in w) + '"\n' for w in target.words))
        longest = 4 * max(len(s) for s in target.seeds) + 1024
        arguments = [
            *(*limits, f"-max_len={longest}", f"-rss_limit_mb={MEMORY}", f"-timeout={SECONDS}"),
            f"-artifact_prefix={corpus}/broken-{folder.name}-",
            *([f"-dict={words}"] if target.words else []),
            "-print_final_stats=1",
            str(folder),
        ]
        self.process = get_context("fork").Process(target=fuzz, args=(target, arguments, log))
        self.process.start()

    def came_to(self) -> Ran:
        """After the process has ended."""
        self.process.join()
        said = self.log.read_text(errors="replace")
        runs = re.findall(r"stat::number_of_executed_units:\s*(\d+)", said)
        coverage = re.findall(r"cov: (\d+)", said)
        finding = ""
        if self.process.exitcode or not runs:
            said = re.sub(r"(?m)^(?:INFO|WARNING): .*\n", "", said)
            starts = (said.find(start) for start in ("=== Uncaught", "Traceback", "ERROR: libFuzzer"))
            at = next((i for i in starts if i > 0), 0)
            finding = said[at : at + 3000] or f"ended with exit code {self.process.exitcode}"
        return Ran(self.name, int(runs[-1]) if runs else 0, int(coverage[-1]) if coverage else 0, finding)


def side_by_side(starts: Iterable[Callable[[], Run]], workers: int) -> list[Ran]:
    """So many at a time, each as another ends."""
    runs: list[Run] = []
    for start in starts:
        while len(going := [r.process.sentinel for r in runs if r.process.is_alive()]) >= workers:
            wait(going)
        runs.append(start())
    return [run.came_to() for run in runs]


def main() -> int:
    """Runs the targets and prints what they came to; 1 when a reader broke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--runs", type=int, default=-1, help="for each target, if they take no longer than --seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs; 0 takes others each time")
    parser.add_argument("--only", default="", help="targets whose name contains this")
    parser.add_argument("--corpus", type=Path, help="where inputs are kept; a temporary folder by default")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--input", type=Path, help="run the target once on this file")
    asked = parser.parse_args()
    if asked.input:
        one(asked.only, asked.input.read_bytes())
        return 0
    if importlib.util.find_spec("atheris") is None:
        print("skipped: atheris is not installed; it has builds for Linux on x86-64")  # noqa: T201 - what it is for
        return 0
    with tempfile.TemporaryDirectory(prefix="ckpttool-fuzz-", dir=memory_disk()) as scratch:
        tempfile.tempdir = scratch  # for the files that the targets rewrite
        corpus = asked.corpus or Path(scratch)
        limits = (f"-max_total_time={asked.seconds}", f"-runs={asked.runs}", f"-seed={asked.seed}")
        starts = [
            partial(Run, name, make(), limits, corpus, Path(scratch) / f"{name}.log")
            for name, make in instrumented().items()
            if asked.only in name
        ]
        found = side_by_side(starts, asked.workers)
    print(f"{'reader':<14}{'inputs':>10}{'coverage':>10}")  # noqa: T201 - what it is for
    for ran in found:
        print(f"{ran.name:<14}{ran.runs:>10,}{ran.coverage:>10,}" + ("  BROKEN" if ran.finding else ""))  # noqa: T201
    print(f"{'all':<14}{sum(r.runs for r in found):>10,}")  # noqa: T201
    for ran in found:
        if ran.finding:
            print(f"\nFINDING {ran.name}: {ran.finding}")  # noqa: T201
    return int(any(r.finding for r in found))


if __name__ == "__main__":
    sys.exit(main())
