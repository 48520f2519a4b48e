"""Measure convert-json against ``cp`` of the same bytes, and its check of a large program against json.load.

    python bench/program.py [--gb 1.5] [--rounds 3] [--work DIR]

The program has float32 parameters of 64 MB; the large one has 100,000 operators and 97 MB of JSON. Every round runs
each job and its measure once, in an order that rotates. Sources are in the page cache, what is written is synced, and
what comes back must be the bytes that went. The table shows medians; ratios are of runs of one round.
"""

from __future__ import annotations

import argparse
import filecmp
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.convert_json.programs import attribute, dumped, operator, ops_of, parameter, program, record, usual

TOOL = str(Path(sys.executable).with_name("ckpttool"))
SHAPE = [4096, 4096]
OPERATORS = 100_000
LOAD = "import json, sys; json.load(open(sys.argv[1]))"


def prepare(work: Path, count: int) -> None:
    """``work/model.json`` with its parameters, and ``work/large.json``."""
    if (work / "large.json").exists():
        return
    work.mkdir(parents=True, exist_ok=True)
    names = sorted(f"linear_{i}.w_0" for i in range(count))
    with (work / "model.pdiparams").open("wb") as f:
        for i, _ in enumerate(names):
            f.write(record("F32", SHAPE, b""))
            f.write(np.random.default_rng(i).standard_normal(SHAPE, dtype=np.float32).tobytes())
    data = program([parameter(i + 1, name, "F32", SHAPE) for i, name in enumerate(names)])
    (work / "model.json").write_bytes(dumped(data))
    large = usual([])
    note = attribute("struct_name", "0.a_str", "/Linear/" + "x" * 680)
    chain = [operator("1.relu", [2 if i == 0 else 99 + i], [100 + i], note) for i in range(OPERATORS)]
    ops_of(large)[-1:-1] = chain
    (work / "large.json").write_bytes(dumped(large))


def measure(command: list[str], source: Path, target: Path) -> tuple[float, float, float]:
    """(seconds, CPU seconds, peak MB) of a command and a sync of what it wrote."""
    if target.is_dir():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    os.sync()
    with source.open("rb", buffering=0) as f:
        while f.read(8 << 20):
            pass
    begin = perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed")
    for path in [target, *target.glob("*")] if target.exists() else []:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    return perf_counter() - begin, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000


def main() -> None:
    """Prepare, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.5, help="of parameters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("build/bench_program"))
    args = parser.parse_args()
    count = max(1, round(args.gb * 1e9 / (4 * SHAPE[0] * SHAPE[1])))
    work: Path = args.work / f"{count}"
    # In a process of its own: what this one has had in memory counts for those that it forks.
    preparing = multiprocessing.get_context("spawn").Process(target=prepare, args=(work, count))
    preparing.start()
    preparing.join()
    if preparing.exitcode:
        sys.exit("the sources could not be made")
    src, params, large = work / "model.json", work / "model.pdiparams", work / "large.json"
    out, back, copy = work / "out.safetensors", work / "back", work / "copy"
    there = [TOOL, "convert-json", str(src), str(out), "-q"]
    again = [TOOL, "convert-json", str(out), str(back), "--program", str(src), "-q"]
    check = [TOOL, "convert-json", str(large), "--check"]
    # Source, what is written, our command, the other way and its command.
    jobs: dict[str, tuple[Path, Path, list[str], str, list[str]]] = {
        "to safetensors": (params, out, there, "cp", ["cp", str(params), str(copy)]),
        "back": (out, back, again, "cp", ["cp", str(out), str(copy)]),
        "check 97 MB of JSON": (large, copy, check, "json.load", [sys.executable, "-c", LOAD, str(large)]),
    }
    rows: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for n in range(args.rounds):
        for job, (source, target, ours, other, theirs) in jobs.items():
            ways = [("ckpttool", ours, target), (other, theirs, copy)]
            for way, command, written in ways[:: -1 if n % 2 else 1]:
                rows.setdefault((job, way), []).append(measure(command, source, written))
        if not filecmp.cmp(back / "model.pdiparams", params, shallow=False):
            sys.exit("what came back is not what went")
    print(f"{params.stat().st_size / 1e9:.2f} GB of parameters, medians of {args.rounds}\n")
    print(f"{'':22}{'way':12}{'s':>7}{'CPU s':>8}{'peak MB':>9}  ratio to the other")
    for (job, way), runs in rows.items():
        wall, cpu, peak = (statistics.median(r[i] for r in runs) for i in range(3))
        ratio = ""
        if way == "ckpttool":
            other = jobs[job][3]
            ratios = sorted(a[0] / b[0] for a, b in zip(runs, rows[job, other], strict=True))
            ratio = f"{statistics.median(ratios):.2f} x {other} [{ratios[0]:.2f}-{ratios[-1]:.2f}]"
        print(f"{job:22}{way:12}{wall:7.2f}{cpu:8.2f}{peak:9.0f}  {ratio}")
    shutil.rmtree(back)
    out.unlink()
    copy.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
