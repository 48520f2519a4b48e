"""Measure fp8-cast against ``cp`` of the same bytes and against the torch script that people write.

    python bench/fp8.py [--gb 1.5] [--rounds 3] [--only JOB ...] [--no-torch] [--work DIR] [--json FILE]

Every round runs each job once in each way, in an order that rotates: ckpttool, ``cp`` of the source and torch_fp8.py,
with whole tensors and 128 rows at a time. Sources are in the page cache, what is written is synced. In the first round
all ways must have written the same codes, scales and values. The table shows medians; ratios are of runs of one round.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path
from time import perf_counter

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ckpttool.dtypes import numpy_dtype
from ckpttool.formats.safetensors import layout_file, read_header

TOOL = str(Path(sys.executable).with_name("ckpttool"))
SCRIPT = str(Path(__file__).with_name("torch_fp8.py"))
SHAPE = (8192, 7168)


@dataclass(frozen=True)
class Job:
    """One cast; ``source`` is ``bf16`` or ``fp8``."""

    name: str
    args: tuple[str, ...]
    source: str = "bf16"
    torch: str = ""
    """What torch_fp8.py calls it; "" leaves that out."""


JOBS = (
    Job("block 128x128, f32 scales", ("--recipe", "block"), torch="block"),
    Job("channel, bf16 scales", ("--recipe", "channel"), torch="channel"),
    Job("tensor", ("--recipe", "tensor")),
    Job("mxfp8", ("--recipe", "mxfp8")),
    Job("mxfp4", ("--recipe", "mxfp4")),
    Job("nvfp4", ("--recipe", "nvfp4")),
    Job("block back to bf16", ("--to", "bf16"), "fp8", "dequantise"),
)


def prepare(work: Path, count: int) -> None:
    """``bf16``: weights with some large elements. ``fp8``: what blocks make of them."""
    there = work / "bf16"
    if not there.exists():
        making = work / "making"
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(count)]
        head, places, size = layout_file([(n, "BF16", SHAPE) for n in names], {"format": "pt"})
        with (making / "model.safetensors").open("wb") as f:
            f.write(head)
            f.truncate(size)
            for i, place in enumerate(places):
                rng = np.random.default_rng(i)
                x = rng.standard_normal(SHAPE, dtype=np.float32) * np.float32(0.02)
                x[rng.random(SHAPE, dtype=np.float32) < 1e-4] *= 30
                f.seek(place.offset)
                f.write(x.astype(numpy_dtype("BF16")).tobytes())
        making.rename(there)
    if not (work / "fp8").exists():
        subprocess.run([TOOL, "fp8-cast", str(there), str(work / "fp8"), "-q"], check=True)


def measure(command: list[str], target: Path, source: Path) -> tuple[float, float, float]:
    """(seconds, CPU seconds of all processes, peak MB of the largest) of a command and a sync of what it wrote."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    for file in source.iterdir():
        with file.open("rb", buffering=0) as f:
            while f.read(8 << 20):
                pass
    begin = perf_counter()
    process = subprocess.Popen(["/bin/sh", "-c", '"$@" && sync "$0"/*', str(target), *command])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed")
    return perf_counter() - begin, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000


def compare(job: str, ours: Path, theirs: Path) -> None:
    """Both ways have written the same bytes under each name."""

    a, b = ({t.name: t for t in read_header(p / "model.safetensors").tensors} for p in (ours, theirs))
    with (ours / "model.safetensors").open("rb") as f, (theirs / "model.safetensors").open("rb") as g:
        for name in a | b:
            equal = name in a and name in b and a[name].nbytes == b[name].nbytes
            for at in range(0, a[name].nbytes if equal else 0, 8 << 20):
                n = min(8 << 20, a[name].nbytes - at)
                f.seek(a[name].offset + at)
                g.seek(b[name].offset + at)
                equal = equal and f.read(n) == g.read(n)
            if not equal:
                sys.exit(f"{job}: {name} differs between ckpttool and torch")


def main() -> None:
    """Prepare, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.5, help="of bf16 weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], help="parts of job names")
    parser.add_argument("--no-torch", action="store_true", help="leave the torch script out")
    parser.add_argument("--work", type=Path, default=Path("build/bench_fp8"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    count = max(1, round(args.gb * 1e9 / (2 * prod(SHAPE))))
    gb = count * 2 * prod(SHAPE) / 1e9
    work: Path = args.work / f"{count}"
    # In a process of its own: what this one has had in memory counts for those that it forks.
    preparing = multiprocessing.get_context("spawn").Process(target=prepare, args=(work, count))
    preparing.start()
    preparing.join()
    if preparing.exitcode:
        sys.exit("the sources could not be made")
    rows: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for n in range(args.rounds):
        for job in [j for j in JOBS if not args.only or any(o in j.name for o in args.only)]:
            source = work / job.source
            ways = {
                "ckpttool": [TOOL, "fp8-cast", str(source), "DST", *job.args, "-q"],
                "cp": ["cp", "-r", str(source), "DST"],
            }
            if job.torch and not args.no_torch:
                script = [sys.executable, SCRIPT, job.torch, str(source), "DST"]
                ways |= {"torch": script, "torch, 128 rows": [*script, "--panels"]}
            order = list(ways)
            for way in order[n % len(order) :] + order[: n % len(order)]:
                target = work / f"out {way}"
                command = [str(target) if word == "DST" else word for word in ways[way]]
                rows.setdefault((job.name, way), []).append(measure(command, target, source))
            if not n and "torch" in ways:
                for way in order[2:]:
                    compare(job.name, work / "out ckpttool", work / f"out {way}")
            for way in order:
                shutil.rmtree(work / f"out {way}", ignore_errors=True)
            print(f"round {n + 1}/{args.rounds}  {job.name}", file=sys.stderr, flush=True)
    print(f"{gb:.2f} GB of bf16 weights, warm, synced, {args.rounds} rounds\n")
    print("| job | program | wall s | wall / cp | CPU s | peak MB | times as fast as torch |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for (job_name, way), found in rows.items():
        wall, cpu = (statistics.median([f[i] for f in found]) for i in (0, 1))
        ratios = [f[0] / c[0] for f, c in zip(found, rows[job_name, "cp"], strict=True)]
        ratio = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}]"
        faster = ""
        if way == "ckpttool" and (torch := rows.get((job_name, "torch"))):
            faster = f"{statistics.median([t[0] / f[0] for f, t in zip(found, torch, strict=True)]):.1f}"
        print(f"| {job_name} | {way} | {wall:.2f} | {ratio} | {cpu:.2f} | {max(f[2] for f in found):,.0f} | {faster} |")
    if args.json:
        args.json.write_text(json.dumps({f"{j} / {w}": v for (j, w), v in rows.items()}, indent=2))


if __name__ == "__main__":
    main()
