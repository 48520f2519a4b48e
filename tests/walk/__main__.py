"""``python -m tests.walk``: thousands of random chains of commands, each judged from outside."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from tests.walk.chain import Told, walk
from tests.walk.run import warm


def _one(job: tuple[int, str, bool]) -> Told:
    seed, root, keep = job
    folder = Path(root) / f"chain-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        return walk(seed, folder)
    except Exception:  # noqa: BLE001  # one chain's trouble is not the others'
        return Told(seed, wrong=f"the walk itself: {traceback.format_exc()}")
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.walk")
    parser.add_argument("--chains", type=int, default=2000)
    parser.add_argument("--from", dest="first", type=int, default=0, help="first seed")
    parser.add_argument("--seed", type=int, help="this chain only, with its commands")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", type=Path, help="leave the files of the chains here")
    said = parser.parse_args()
    shared = Path("/dev/shm")  # noqa: S108  # memory, where there is such a place
    root = said.keep or Path(tempfile.mkdtemp(prefix="walk-", dir=shared if os.access(shared, os.W_OK) else None))
    root.mkdir(parents=True, exist_ok=True)
    seeds = [said.seed] if said.seed is not None else range(said.first, said.first + said.chains)
    jobs = [(seed, str(root.resolve()), said.keep is not None) for seed in seeds]
    warm()
    start = time.monotonic()
    told: list[Told] = []
    try:
        with multiprocessing.get_context("fork").Pool(said.jobs) as pool:
            for one in pool.imap(_one, jobs):
                told.append(one)
                if one.wrong or said.seed is not None:
                    _show(one)
    finally:
        if said.keep is None:
            shutil.rmtree(root, ignore_errors=True)
    return _sum_up(told, time.monotonic() - start)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _show(one: Told) -> None:
    _say("\n".join(one.log))
    if one.wrong:
        _say(f"WRONG {one.wrong}\n    python -m tests.walk --seed {one.seed}\n")


def _sum_up(told: list[Told], seconds: float) -> int:
    steps: Counter[str] = sum((t.steps for t in told), Counter())
    pairs: Counter[tuple[str, str]] = sum((t.pairs for t in told), Counter())
    _say(f"\n{len(told)} chains, {seconds:.0f} s")
    for name, count in steps.most_common():
        _say(f"{count:7,} {name}")
    _say("\nwritten and judged")
    formats = sorted({f for _, f in pairs})
    _say(f"{'':14}" + "".join(f"{f:>10}" for f in formats))
    for family in sorted({f for f, _ in pairs}):
        _say(f"{family:14}" + "".join(f"{pairs[family, f] or '-':>10}" for f in formats))
    _say("\ndrawn")
    traits: Counter[str] = sum((t.traits for t in told), Counter())
    _say(", ".join(f"{n} {c}" for n, c in sorted(traits.items())))
    _say("\nrefused")
    refusals: Counter[str] = sum((t.refusals for t in told), Counter())
    for text, count in refusals.most_common():
        _say(f"{count:7,} {text}")
    wrong = [t for t in told if t.wrong]
    _say(f"\n{len(wrong)} wrong")
    for t in wrong:
        _say(f"  {t.seed}: {t.wrong.splitlines()[0][:200]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
