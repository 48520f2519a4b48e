"""``python -m tests.walk``: thousands of random chains of commands, each judged from outside."""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.walk.chain import Told, walk
from tests.walk.merging import START, walk_merges, walk_start
from tests.walk.run import warm
from tests.walk.training import walk_training

_KINDS = {"chain": walk, "merges": walk_merges, "training": walk_training}
"""Of chains: every seed has one of each."""


def _one(job: tuple[int | str, str, bool, float]) -> list[Told]:
    """The chains of a seed, or one of the start set; none once the time is over."""
    which, root, keep, end = job
    if time.monotonic() > end:
        return []
    if isinstance(which, str):
        return [_walked(which, Path(root) / which.replace(" ", "-"), keep=keep)]
    return [_walked(which, Path(root) / f"{name}-{which}", keep=keep) for name in _KINDS]


def _walked(which: int | str, folder: Path, *, keep: bool) -> Told:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        if isinstance(which, str):
            return walk_start(which, folder)
        return _KINDS[folder.name.partition("-")[0]](which, folder)
    except Exception:  # noqa: BLE001  # one chain's trouble is not the others'
        return Told(which if isinstance(which, int) else -1, wrong=f"the walk itself: {traceback.format_exc()}")
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.walk")
    parser.add_argument("--chains", type=int, default=2000)
    parser.add_argument("--from", dest="first", type=int, default=0, help="first seed")
    parser.add_argument("--seconds", type=float, help="as many chains as this time allows, instead of --chains")
    parser.add_argument("--seed", type=int, help="the chains of this seed only, with its commands")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", type=Path, help="leave the files of the chains here")
    said = parser.parse_args()
    shared = Path("/dev/shm")  # noqa: S108  # memory, where there is such a place
    root = said.keep or Path(tempfile.mkdtemp(prefix="walk-", dir=shared if os.access(shared, os.W_OK) else None))
    root.mkdir(parents=True, exist_ok=True)
    warm()
    start = time.monotonic()
    end = start + said.seconds if said.seconds else float("inf")
    jobs = ((which, str(root.resolve()), said.keep is not None, end) for which in _which(said))
    told: list[Told] = []
    try:
        with multiprocessing.get_context("fork").Pool(said.jobs) as pool:
            while batch := list(itertools.islice(jobs, 8 * said.jobs)):
                for one in itertools.chain.from_iterable(pool.imap(_one, batch)):
                    told.append(one)
                    if one.wrong or said.seed is not None:
                        _show(one)
                if time.monotonic() > end:
                    break
    finally:
        if said.keep is None:
            shutil.rmtree(root, ignore_errors=True)
    return _sum_up(told, time.monotonic() - start)


def _which(said: argparse.Namespace) -> Iterator[int | str]:
    """The start set, then seeds."""
    if said.seed is not None:
        yield said.seed
        return
    yield from START
    yield from itertools.count(said.first) if said.seconds else range(said.first, said.first + said.chains)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _show(one: Told) -> None:
    _say("\n".join(one.log))
    if one.wrong:
        again = f"python -m tests.walk --seed {one.seed}" if one.seed >= 0 else "in the start set"
        _say(f"WRONG {one.wrong}\n    {again}\n")


def _sum_up(told: list[Told], seconds: float) -> int:
    steps: Counter[str] = sum((t.steps for t in told), Counter())
    pairs: Counter[tuple[str, str]] = sum((t.pairs for t in told), Counter())
    _say(f"\n{len(told)} chains, {seconds:.0f} s")
    for what, count in steps.most_common():
        _say(f"{count:7,} {what}")
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
        which = t.log[0] if t.seed < 0 and t.log else t.seed
        _say(f"  {which}: {t.wrong.splitlines()[0][:200]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
