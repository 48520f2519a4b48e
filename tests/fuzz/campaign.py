"""The campaign: an even sample of the cases of every subject, or all of them, on several processes.

    python -m tests.fuzz.campaign                    2,000 cases of each file, evenly spread over all of them
    python -m tests.fuzz.campaign --seed 7           2,000 others
    python -m tests.fuzz.campaign --cases 0          all of it: hours
    python -m tests.fuzz.campaign --only flex        subjects whose name contains it

A worker that dies is named with the case it was at, and another goes on behind it.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.fuzz.harness import Bench, FindingError
from tests.fuzz.subjects import subjects
from tests.helpers.memory_disk import memory_disk
from tests.helpers.modules import import_all

SHARED = 200
"""Cases of a file from which on processes share them: each lists all the cases of a subject first."""
THOROUGH = 5
"""Every so many of the cases that can be opened are also written out again."""


def evenly(count: int, wanted: int, seed: int = 0) -> list[int]:
    """Indices of ``wanted`` of ``count`` cases, spread over all of them."""
    if not wanted or wanted >= count:
        return list(range(count))
    return sorted({(i * count + seed) // wanted % count for i in range(wanted)})


def work(name: str, share: tuple[int, int], wanted: int, start: int, pipe: Any, seed: int) -> None:
    """Runs one subject's cases from ``start`` on; sends (case, file, kind, verdict, text) for each."""
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - for the life of this process
    with tempfile.TemporaryDirectory(prefix="ckpttool-fuzz-", dir=memory_disk()) as scratch:
        subject = next(s for s in subjects() if s.name == name)
        bench = Bench(subject, Path(scratch))
        number = -1
        for file, every in bench.cases().items():
            cases = list(every)
            for at, i in enumerate(evenly(len(cases), wanted, seed)):
                number += 1
                if number < start or number % share[1] != share[0]:
                    continue
                what, make = cases[i]
                kind = subject.damaged[file]
                pipe.send((number, file, kind, "begun", what))
                try:
                    verdict, text = bench.run(file, make(), thorough=at % THOROUGH == 0), ""
                except FindingError as e:
                    verdict, text = "finding", str(e)
                pipe.send((number, file, kind, verdict, f"{what}\n{text}" if text else ""))
    pipe.send(None)


def run(name: str, share: tuple[int, int], wanted: int, seed: int) -> tuple[collections.Counter[Any], list[str]]:
    """Counts by (file, kind, verdict), and findings; starts again behind a case that ends its process."""
    counts: collections.Counter[Any] = collections.Counter()
    findings: list[str] = []
    start = 0
    while True:
        ours, theirs = get_context("fork").Pipe(duplex=False)
        process = get_context("fork").Process(target=work, args=(name, share, wanted, start, theirs, seed))
        process.start()
        theirs.close()
        last: Any = None
        while True:
            try:
                got = ours.recv()
            except EOFError:
                break
            if got is None:
                process.join()
                return counts, findings
            last = got
            number, file, kind, verdict, text = got
            if verdict == "begun":
                continue
            counts[file, kind, verdict] += 1
            if verdict == "finding":
                findings.append(f"{name}: {file}: {text}")
        process.join()
        if last is None:
            return counts, [*findings, f"{name}: the undamaged files cannot be read (exit {process.exitcode})"]
        number, file, kind, _, text = last
        counts[file, kind, "finding"] += 1
        findings.append(f"{name}: {file}: {text}\nended the process with exit code {process.exitcode}")
        start = number + 1


def main() -> int:
    """Runs the campaign and prints its table; 1 when there is a finding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000, help="of each file; 0 is all")
    parser.add_argument("--seed", type=int, default=0, help="another sample")
    parser.add_argument("--only", default="", help="subjects whose name contains this")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--findings", type=Path, help="write them here, as JSON")
    asked = parser.parse_args()
    began = time.monotonic()
    shares = 1 if 0 < asked.cases < SHARED else asked.workers
    jobs = [(s.name, (i, shares)) for s in subjects() if asked.only in s.name for i in range(shares)]
    total: collections.Counter[Any] = collections.Counter()
    by_subject: dict[str, collections.Counter[str]] = {}
    findings: list[str] = []
    import_all()  # once for all workers
    with ThreadPoolExecutor(asked.workers) as pool:
        results = pool.map(lambda j: (j[0], *run(j[0], j[1], asked.cases, asked.seed)), jobs)
        for name, counts, found in results:
            findings += found
            for (_, kind, verdict), n in counts.items():
                total[kind, verdict] += n
                by_subject.setdefault(name, collections.Counter())[verdict] += n
    verdicts = ("refused", "same", "told", "answered", "finding")
    print(f"{'structure':<12}" + "".join(f"{v:>10}" for v in verdicts))  # noqa: T201 - what it is for
    for kind in sorted({k for k, _ in total}):
        print(f"{kind:<12}" + "".join(f"{total[kind, v]:>10,}" for v in verdicts))  # noqa: T201
    print(f"{'all':<12}" + "".join(f"{sum(total[k, v] for k in {k for k, _ in total}):>10,}" for v in verdicts))  # noqa: T201
    for name, counts in by_subject.items():
        print(f"  {name:<50}" + "  ".join(f"{v} {counts[v]:,}" for v in verdicts if counts[v]))  # noqa: T201
    print(f"{sum(total.values()):,} cases in {time.monotonic() - began:.0f} s")  # noqa: T201
    for text in findings[:20]:
        print(f"\nFINDING {text}")  # noqa: T201
    if len(findings) > 20:
        print(f"\nand {len(findings) - 20} more")  # noqa: T201
    if asked.findings:
        asked.findings.write_text(json.dumps(findings, indent=1))
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
