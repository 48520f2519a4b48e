"""Measure quantising and dequantising against ``cp`` of the inputs and against the torch scripts that people write.

    python bench/fp8.py [--gb 1] [--rounds 3] [--only JOB ...] [--processes N] [--work DIR] [--json FILE]

Every round runs each job once, in an order that rotates: this package's executor on a hand-made plan (no command, so
that nothing but reading, arithmetic and writing is measured), a torch script that does a whole tensor at a time, one
that does 128 rows at a time, and ``cp``, each followed by a sync of what it wrote. Sources are in the page cache.
Codes and scales of all ways are compared once, byte by byte. Speeds are of bf16 bytes, read or written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ckpttool.dtypes import itemsize, numpy_dtype
from ckpttool.plan import Block, Compute, Copy, Output, Plan, Quantize, Result, Rounding, Scaled, Source, Stored, Unit

SHAPE = (8192, 7168)
Entry = tuple[str, tuple[int, ...]]
"""dtype and shape."""

JOBS: dict[str, Rounding] = {
    "block 128x128 f32": Rounding("block", "F8_E4M3", "F32", (128, 128)),
    "channel bf16": Rounding("channel", "F8_E4M3", "BF16", (1, 0)),
    "mxfp8": Rounding("mxfp8", "F8_E4M3", "F8_E8M0", (1, 32), powers=True),
    "nvfp4": Rounding("nvfp4", "F4", "F8_E4M3", (1, 16)),
}
BACK = "dequantise block"
TORCH = ("block 128x128 f32", "channel bf16", BACK)
"""What the torch scripts can do."""


def laid(entries: dict[str, Entry]) -> tuple[bytes, dict[str, int], int]:
    """(header, where each tensor begins, size) of a safetensors file."""
    at, table = 0, {}
    for name, (dtype, shape) in entries.items():
        n = prod(shape) * itemsize(dtype)
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, at + n)}
        at += n
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    return head, {n: len(head) + e["data_offsets"][0] for n, e in table.items()}, len(head) + at


def results(r: Rounding, name: str, shape: tuple[int, ...]) -> dict[str, tuple[str, Entry]]:
    """Role -> (name, dtype and shape) of what a weight becomes."""
    rows, columns = shape
    grid = -(-rows // (r.block[0] or rows)), -(-columns // (r.block[1] or columns))
    codes = ("U8", (rows, columns // 2)) if r.code == "F4" else (r.code, shape)
    out: dict[str, tuple[str, Entry]] = {"codes": (name, codes), "scales": (f"{name}_scale", (r.scale, grid))}
    if r.scheme == "nvfp4":
        out["factor"] = (f"{name}_global_scale", ("F32", (1,)))
    return out


def line(file: int, offset: int, n: int, dtype: str, *, to_file: bool) -> Copy:
    """All of a tensor, from or to a place in a file."""
    item = itemsize(dtype)
    there, here = Block(file, offset, (item,)), Block(0, 0, (item,))
    return Copy(here, there, (n,), dtype, dtype) if to_file else Copy(there, here, (n,), dtype, dtype)


def stored(places: dict[str, int], name: str, entry: Entry) -> Stored:
    """A tensor of the only source."""
    dtype, shape = entry
    return Stored(dtype, shape, (line(0, places[name], prod(shape), dtype, to_file=False),), name)


def plan_of(job: str, names: list[str], source: Path) -> Plan:
    """The plan of a job over the tensors of a prepared file."""
    st = source.stat()
    units = []
    back = job == BACK
    r = JOBS["block 128x128 f32" if back else job]
    forms = {n: results(r, n, SHAPE) for n in names}
    weights: dict[str, Entry] = dict.fromkeys(names, ("BF16", SHAPE))
    coded: dict[str, Entry] = {n: e for f in forms.values() for n, e in f.values()}
    _, have, _ = laid(coded if back else weights)
    head, want, size = laid(weights if back else coded)
    for name in names:
        if back:
            parts = {role: stored(have, n, e) for role, (n, e) in forms[name].items()}
            operand = Scaled(parts["codes"], parts["scales"], r.block)
            outputs = (line(0, want[name], prod(SHAPE), "BF16", to_file=True),)
            step: Any = Compute(
                name,
                SHAPE,
                "BF16",
                "passthrough",
                (operand,),
                None,
                ((("scale", 1.0),),),
                (),
                None,
                finite=False,
                outputs=outputs,
            )
        else:
            made = tuple(
                Result(role, d, s, (line(0, want[n], prod(s), d, to_file=True),))
                for role, (n, (d, s)) in forms[name].items()
            )
            step = Quantize(name, SHAPE, stored(have, name, ("BF16", SHAPE)), r, made)
        units.append(Unit(name, (step,)))
    return Plan(
        [Source(str(source), st.st_size, st.st_mtime_ns)],
        [Output("model.safetensors", size, ((0, head),))],
        units,
    )


def ours(job: str, source: Path, target: Path, count: int, processes: int) -> None:
    """Run by a process of its own."""
    from ckpttool.execute import RunOptions, run

    options = RunOptions(processes=processes) if processes else RunOptions()
    run(plan_of(job, [f"w{i}" for i in range(count)], source), target, options)


def torch_way(job: str, source: Path, target: Path, *, panels: bool) -> None:
    """The script that people write: load_file, a few lines for each tensor, save_file."""
    import torch
    from safetensors.torch import load_file, save_file

    largest = 448.0
    tensors = load_file(source)
    out: dict[str, Any] = {}

    def quantise(w: Any) -> tuple[Any, Any]:
        rows, columns = w.shape
        if job == "channel bf16":
            scale = w.abs().amax(1, keepdim=True) / largest
            return (w / scale).clamp(-largest, largest).to(torch.float8_e4m3fn), scale
        blocks = w.float().view(-(-rows // 128), -1, columns // 128, 128)
        scale = blocks.abs().amax((1, 3), keepdim=True) / largest
        scale[scale == 0] = 1
        q = (blocks / scale).clamp(-largest, largest).to(torch.float8_e4m3fn)
        return q.view(rows, columns), scale[:, 0, :, 0]

    def dequantise(q: Any, scale: Any) -> Any:
        rows, columns = q.shape
        blocks = q.float().view(-(-rows // 128), -1, columns // 128, 128)
        return (blocks * scale[:, None, :, None]).view(rows, columns).to(torch.bfloat16)

    for name in [n for n in tensors if not n.endswith("_scale")]:
        w = tensors.pop(name)
        step = 128 if panels else len(w)
        starts = range(0, len(w), step)
        if job == BACK:
            scale = tensors.pop(f"{name}_scale")
            out[name] = torch.empty(w.shape, dtype=torch.bfloat16) if panels else None
            for a in starts:
                part = dequantise(w[a : a + step], scale[a // 128 : -(-(a + step) // 128)])
                if panels:
                    out[name][a : a + step] = part
                else:
                    out[name] = part
            continue
        codes = torch.empty(w.shape, dtype=torch.float8_e4m3fn) if panels else None
        scales = []
        for a in starts:
            part, scale = quantise(w[a : a + step])
            scales.append(scale)
            if panels:
                codes[a : a + step] = part
            else:
                codes = part
        out[name], out[f"{name}_scale"] = codes, torch.cat(scales)
    target.mkdir(parents=True)
    save_file(out, target / "model.safetensors")


def prepare(work: Path, weights: Path, codes: Path, count: int) -> None:
    """Sources: bf16 weights with a few large ones, and what blocks make of them."""
    weights.parent.mkdir(parents=True, exist_ok=True)
    if not weights.exists():
        head, _, _ = laid(dict.fromkeys([f"w{i}" for i in range(count)], ("BF16", SHAPE)))
        with weights.open("wb") as f:
            f.write(head)
            for i in range(count):
                rng = np.random.default_rng(i)
                x = rng.standard_normal(SHAPE, dtype=np.float32) * np.float32(0.02)
                x[rng.random(SHAPE, dtype=np.float32) < 1e-4] *= 30
                f.write(x.astype(numpy_dtype("BF16")).tobytes())
    if not codes.exists():
        shutil.rmtree(work / "made", ignore_errors=True)
        ours("block 128x128 f32", weights, work / "made", count, 0)
        (work / "made/model.safetensors").rename(codes)


def measure(command: list[str], target: Path, source: Path) -> tuple[float, float, float]:
    """(seconds, CPU seconds of all processes, peak MB of the largest) of a command and a sync of what it wrote."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    with source.open("rb", buffering=0) as f:
        while f.read(8 << 20):
            pass
    begin = perf_counter()
    process = subprocess.Popen(["/bin/sh", "-c", '"$@" && sync "$0"/*', str(target), *command])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed")
    wall = perf_counter() - begin
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000


def main() -> None:
    """Prepare, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="of bf16 weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], help="parts of job names")
    parser.add_argument("--no-torch", action="store_true", help="leave the torch scripts out")
    parser.add_argument("--processes", type=int, default=0, help="that compute; 0 is as many as there are cores")
    parser.add_argument("--work", type=Path, default=Path("build/bench_fp8"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", nargs=3, metavar=("WAY", "JOB", "DST"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    count = max(1, round(args.gb * 1e9 / (2 * prod(SHAPE))))
    work: Path = args.work
    work.mkdir(parents=True, exist_ok=True)
    weights, codes = work / f"src/bf16_{count}.safetensors", work / f"src/block_{count}.safetensors"
    sources = dict.fromkeys(JOBS, weights) | {BACK: codes}
    if args.run:
        way, job, target = args.run
        if way == "prepare":
            prepare(work, weights, codes, count)
        elif way == "compare":
            compare(work, job)
        elif way == "ours":
            ours(job, sources[job], Path(target), count, args.processes)
        else:
            torch_way(job, sources[job], Path(target), panels=way == "panels")
        return
    # In processes of their own: what this one has in memory would count for those that it starts.
    mine = [sys.executable, __file__, "--gb", str(args.gb), "--work", str(work), "--processes", str(args.processes)]
    subprocess.run([*mine, "--run", "prepare", "", ""], check=True)
    jobs = [j for j in (*JOBS, BACK) if not args.only or any(o in j for o in args.only)]
    rows: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for n in range(args.rounds):
        for job in jobs:
            ways = ["ours", "cp"] if args.no_torch or job not in TORCH else ["ours", "cp", "whole", "panels"]
            for way in ways[n % len(ways) :] + ways[: n % len(ways)]:
                target = work / f"out_{way}"
                me = [*mine, "--run", way, job, str(target)]
                copy = ["sh", "-c", 'mkdir "$1" && cp "$0" "$1"', str(sources[job]), str(target)]
                rows.setdefault((job, way), []).append(measure(copy if way == "cp" else me, target, sources[job]))
            if n == 0 and len(ways) > 2:
                subprocess.run([*mine, "--run", "compare", job, ""], check=True)
            for way in ways:
                shutil.rmtree(work / f"out_{way}", ignore_errors=True)
            print(f"round {n + 1}/{args.rounds}  {job}", file=sys.stderr, flush=True)
    gb = count * 2 * prod(SHAPE) / 1e9
    print(f"{gb:.2f} GB bf16, warm source, sync included, {args.rounds} rounds, medians\n")
    print(f"{'job':<20} {'way':<8} {'wall s':>7} {'/ cp':>6} {'GB/s':>6} {'CPU s':>7} {'GB/CPU s':>9} {'peak MB':>8}")
    names = {"ours": "ckpttool", "whole": "torch", "panels": "torch128", "cp": "cp"}
    for (job, way), found in rows.items():
        wall, cpu = (statistics.median([f[i] for f in found]) for i in (0, 1))
        ratio = statistics.median([f[0] / c[0] for f, c in zip(found, rows[job, "cp"], strict=True)])
        print(
            f"{job:<20} {names[way]:<8} {wall:>7.2f} {ratio:>6.2f} {gb / wall:>6.2f} {cpu:>7.2f} {gb / cpu:>9.2f}"
            f" {max(f[2] for f in found):>8.0f}"
        )
    if args.json:
        args.json.write_text(json.dumps({f"{j} / {w}": v for (j, w), v in rows.items()}, indent=2))


def compare(work: Path, job: str) -> None:
    """All ways have written the same tensors."""
    from safetensors import safe_open

    with safe_open(work / "out_ours/model.safetensors", "pt") as a:
        for way in ("whole", "panels"):
            with safe_open(work / f"out_{way}/model.safetensors", "pt") as b:
                for name in a.keys():  # noqa: SIM118 - it is no dict
                    x, y = a.get_tensor(name), b.get_tensor(name)
                    if x.shape != y.shape or bool((x.view(-1).view(_u8()) != y.view(-1).view(_u8())).any()):
                        sys.exit(f"{job}: `{name}` differs between ckpttool and torch ({way})")


def _u8() -> Any:
    import torch

    return torch.uint8


if __name__ == "__main__":
    main()
