"""Coverage-guided fuzzing of every reader with atheris (libFuzzer): a fixed time for each target.

    python -m tests.fuzz.guided --seconds 60             every target for a minute
    python -m tests.fuzz.guided --seconds 600 --only pickle
    python -m tests.fuzz.guided --only flex --input FILE   one input again, with its traceback

Inputs that reach new code are kept in --corpus and are where the next run begins. An input that breaks a reader is
written to --corpus too, and printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

NAMES = (
    *("safetensors", "index", "pickle", "torch", "flex", "pdmodel", "pir", "pdiparams", "json stream", "mergekit"),
    *("merge_config", "aoa", "patterns", "renames", "peft", "quant", "journal", "family", "tokenizer", "manifest"),
)
MEMORY = 600
"""MiB that a process may take, the interpreter and numpy included."""
SECONDS = 10
"""Longest for one input."""


class Ran(NamedTuple):
    """What one target's run came to."""

    name: str
    runs: int
    coverage: int
    finding: str


def fuzz(name: str, arguments: list[str]) -> None:
    """Runs one target in this process, for as long as libFuzzer's arguments say; never returns."""
    import atheris

    with atheris.instrument_imports(include=["ckpttool"]):
        from tests.fuzz.targets import TARGETS, guarded
    target = TARGETS[name]()
    run = guarded(target)

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
    atheris.Setup([sys.argv[0], *arguments], run, **options)
    atheris.Fuzz()


def one(name: str, data: bytes) -> None:
    """One input again. Raises what the reader raises."""
    from tests.fuzz.targets import TARGETS, guarded

    guarded(TARGETS[name]())(data)


def start(name: str, seconds: int, corpus: Path) -> Ran:
    """One target in a process of its own."""
    from tests.fuzz.targets import TARGETS

    folder = corpus / name.replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    target = TARGETS[name]()
    for i, seed in enumerate(target.seeds):
        (folder / f"seed{i}").write_bytes(seed)
    words = folder.with_suffix(".dict")
    words.write_text("".join('"' + "".join(f"\\x{b:02x}" for b in w) + '"\n' for w in target.words))
    longest = 4 * max(len(s) for s in target.seeds) + 1024
    command = [sys.executable, "-m", "tests.fuzz.guided", "--target", name, "--"]
    command += [f"-max_total_time={seconds}", f"-max_len={longest}", f"-rss_limit_mb={MEMORY}", f"-timeout={SECONDS}"]
    command += [
        f"-artifact_prefix={corpus}/broken-{folder.name}-",
        *([f"-dict={words}"] if target.words else []),
        "-print_final_stats=1",
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    said = done.stdout + done.stderr
    runs = re.findall(r"stat::number_of_executed_units:\s*(\d+)", said)
    coverage = re.findall(r"cov: (\d+)", said)
    finding = ""
    if done.returncode:
        said = re.sub(r"(?m)^(?:INFO|WARNING): .*\n", "", said)
        at = (
            max(said.find("=== Uncaught"), 0) or max(said.find("Traceback"), 0) or max(said.find("ERROR: libFuzzer"), 0)
        )
        finding = said[at : at + 3000]
    return Ran(name, int(runs[-1]) if runs else 0, int(coverage[-1]) if coverage else 0, finding)


def main() -> int:
    """Runs the targets and prints what they came to; 1 when a reader broke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--only", default="", help="targets whose name contains this")
    parser.add_argument("--corpus", type=Path, help="where inputs are kept; a temporary folder by default")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--input", type=Path, help="run the target once on this file")
    parser.add_argument("--target", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.target:
        fuzz(asked.target, asked.arguments)
    names = [n for n in NAMES if asked.only in n]
    if asked.input:
        one(names[0], asked.input.read_bytes())
        return 0
    if importlib.util.find_spec("atheris") is None:
        print("skipped: atheris is not installed; it has builds for Linux on x86-64")  # noqa: T201 - what it is for
        return 0
    with tempfile.TemporaryDirectory(prefix="ckpttool-fuzz-") as scratch, ThreadPoolExecutor(asked.workers) as pool:
        corpus = asked.corpus or Path(scratch)
        found = list(pool.map(lambda n: start(n, asked.seconds, corpus), names))
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
