"""Measure what planning and inspecting cost as checkpoints and meshes grow: CPU seconds and peak memory.

    python bench/scale.py [--only NAME ...] [--rounds 3] [--no-models] [--no-series] [--work DIR] [--json FILE]

Checkpoints have the names, shapes and dtypes of public models, true headers and pickles, and holes of sparse files for
data (3 GB of disk in all), so that a model of 1.3 TB is planned as it would be. Nothing but headers is read and nothing
is written: every command is ``inspect`` or ends with ``--dry-run``, in a process of its own.

The first table has public models. In the second one thing grows by a factor of about 30: the layers of a model, or the
ranks of a mesh. Its slopes are those of log(cost) over log(tensors or ranks), by least squares, less what a job of a
dozen tensors costs. A slope of 1 is as much again for every tensor; above 1.1 something grows faster than its input.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ckpttool.checkpoint import OpenOptions
from ckpttool.ops.reshard import prepare
from ckpttool.targeting.target import Target
from tests.helpers import hollow_torch as torch_side
from tests.helpers.hollow import CONFIGS, planned, program, published, trained

V3, LLAMA, KIMI = CONFIGS["DeepSeek-V3"], CONFIGS["Llama-3.1-405B"], CONFIGS["Kimi-K2"]
STAGES = (*(4,) * 13, *(3,) * 3)
LAYERS = (5, 11, 25, 69)
"""Of DeepSeek-V3, whose first three layers have no experts: 3,200 to 103,000 tensors in FP8."""
RANKS = (4, 16, 64, 128)
TRAINERS = (16, 64, 256, 1024)
"""Ranks of a training run."""
LLAMA_70B = {
    **LLAMA,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
PARAMETERS = (3_000, 10_000, 30_000, 100_000)


Make = Callable[[Path], object]


def v3(layers: int, *, fp8: bool) -> Make:
    """A DeepSeek-V3 of another depth, without its prediction layer."""
    config = {**V3, "num_hidden_layers": layers, "num_nextn_predict_layers": 0}
    return partial(published, config=config, files=2 * layers, fp8=fp8)


def ranks(source: str, target: Target) -> Make:
    """Another source as ranks."""

    def make(root: Path) -> None:
        planned(root, prepare(root.parent / source, OpenOptions(), target).plan)

    return make


def training(source: str, files: int) -> Make:
    """Another source with master weights and moments."""
    return lambda root: trained(root, root.parent / source, files=files)


def torch_ranks(save: Callable[..., None], count: int, **how: bool) -> Make:
    """What a run of torch on so many ranks saves of a Llama-70B."""

    def make(root: Path) -> None:
        save(root, torch_side.dense(80), count, **how)
        (root / "config.json").write_text(json.dumps(LLAMA_70B))

    return make


SOURCES: dict[str, Make] = {
    "tiny": partial(published, config={**CONFIGS["Llama-3-8B"], "num_hidden_layers": 1}, files=1),
    "v3": partial(published, config=V3, files=163, fp8=True),
    "v3-1200": partial(published, config=V3, files=1200, fp8=True),
    "v3-bf16": partial(published, config=V3, files=163),
    "v3-bf16-b": partial(published, config=V3, files=163),
    "kimi": partial(published, config=KIMI, files=62, fp8=True),
    "llama": partial(published, config=LLAMA, files=191),
    "v3-ep8": ranks("v3", Target(format="ranks", tp=8, pp=1, ep=8, etp=1)),
    "v3-pp16": ranks("v3", Target(format="ranks", tp=8, pp=16, ep=8, etp=1, pp_layout=STAGES)),
    "v3-etp8": ranks("v3", Target(format="ranks", tp=8, pp=1, ep=1, etp=8)),
    "v3-trained": training("v3-bf16", 163),
    **{f"fp8-{n}": v3(n, fp8=True) for n in LAYERS},
    # Without scales there are half as many tensors, so there are twice as many layers with experts.
    **{f"bf16-{n}": v3(2 * n - 3, fp8=False) for n in LAYERS},
    **{f"bf16-{n}-b": v3(2 * n - 3, fp8=False) for n in LAYERS},
    **{f"trained-{n}": training(f"bf16-{n}", n) for n in LAYERS[:3]},
    **{f"llama-tp{n}": ranks("llama", Target(format="ranks", tp=n)) for n in RANKS},
    "rows": partial(published, config={**LLAMA, "num_hidden_layers": 11}, files=30),
    **{f"rows-dcp{n}": ranks("rows", Target(format="dcp", sharding=n)) for n in TRAINERS},
    **{f"zero3-{n}": torch_ranks(torch_side.zero3, n) for n in TRAINERS},
    **{f"zero1-{n}": torch_ranks(torch_side.zero12, n) for n in TRAINERS},
    **{f"fsdp-{n}": torch_ranks(torch_side.fsdp, n) for n in TRAINERS[:2]},
    "fsdp1-16": torch_ranks(torch_side.fsdp, 16, sharded=True, optimizer=False),
    "v3-megatron": lambda root: torch_side.torch_dist(root, torch_side.deepseek_keys()),
    "bytes-128": torch_ranks(torch_side.bytecheckpoint, 128),
    **{f"program-{n}": partial(program, parameters=n) for n in PARAMETERS},
}
"""How each is made, in this order: some are made of others."""

EP8 = "--tp-out 8 --ep-out 8 --etp-out 1"

MODELS = (
    ("inspect", "inspect {v3}"),
    ("inspect", "inspect {v3-1200}"),
    ("inspect", "inspect {kimi}"),
    ("inspect --check", "inspect {v3} --check"),
    ("to tp 8, ep 8", f"reshard {{v3}} DST -n --to ranks {EP8}"),
    ("to pp 16, tp 8, ep 8", f"reshard {{v3}} DST -n --to ranks {EP8} --pp-layout {','.join(map(str, STAGES))}"),
    ("to tp 8, ep 8", f"reshard {{kimi}} DST -n --to ranks {EP8}"),
    ("to deepseek, tp 8", "reshard {v3} DST -n --to deepseek --tp-out 8"),
    ("to vllm, tp 8", "reshard {v3-bf16} DST -n --to vllm --tp-out 8"),
    ("to hf", "reshard {v3-1200} DST -n --to hf"),
    ("a file for each tensor", "reshard {v3-bf16} DST -n --max-shard-size 100"),
    ("to tp 2, ep 2", "reshard {v3-ep8} DST -n --tp-out 2 --ep-out 2"),
    ("to hf", "reshard {v3-ep8} DST -n --to hf"),
    ("to tp 4, ep 16", "reshard {v3-pp16} DST -n --tp-out 4 --ep-out 16 --etp-out 1 --pp-out 1"),
    ("to tp 8, experts cut too", "reshard {v3} DST -n --to ranks --tp-out 8"),
    ("to tp 2, experts cut too", "reshard {v3-etp8} DST -n --tp-out 2"),
    ("to tp 2", "reshard {llama-tp8} DST -n --tp-out 2"),
    ("to trtllm, tp 8", "reshard {llama} DST -n --to trtllm --tp-out 8"),
    ("to unified", "reshard {v3-bf16} DST -n --to unified"),
    ("to hf, weights only", "reshard {v3-trained} DST -n --to hf"),
    ("to flex, tp 2", "reshard {v3-trained} DST -n --to flex --tp-out 2"),
    ("to hybrid, tp 2, sharding 2", "reshard {v3-trained} DST -n --to hybrid --tp-out 2 --sharding-out 2"),
    ("drop-keys", "drop-keys {v3} DST model.layers.61.* -n"),
    ("quantize", "quantize {v3-bf16} DST -n"),
    ("quantize --to bf16", "quantize {v3} DST --to bf16 -n"),
    ("merge of two", "merge {v3-bf16} {v3-bf16-b} -o DST -n"),
    ("inspect", "inspect {rows-dcp1024}"),
    ("to hf", "reshard {rows-dcp1024} DST -n --to hf"),
    ("to tp 8", "reshard {rows-dcp1024} DST -n --to ranks --tp-out 8"),
    ("to dcp, 1,024 files", "reshard {rows-dcp1024} DST -n --to dcp --sharding-out 1024"),
    ("inspect", "inspect {v3-megatron}"),
    ("to hf", "reshard {v3-megatron} DST -n --to hf"),
    ("to tp 8, ep 8", f"reshard {{v3-megatron}} DST -n --to ranks {EP8}"),
    ("inspect", "inspect {zero3-1024}"),
    ("to universal", "reshard {zero3-1024} DST -n --to universal"),
    ("to hf", "reshard {zero3-1024} DST -n --to hf"),
    ("to universal", "reshard {zero1-1024} DST -n --to universal"),
    ("to dcp, 64 files", "reshard {fsdp-64} DST -n --to dcp --sharding-out 64"),
    ("inspect", "inspect {fsdp1-16}"),
    ("to hf", "reshard {bytes-128} DST -n --to hf"),
)
"""(what, command); a name in braces is a source."""

SERIES = (
    ("inspect", "tensors", LAYERS, "inspect {fp8-#}"),
    ("inspect --check", "tensors", LAYERS, "inspect {fp8-#} --check"),
    ("reshard to tp 8, ep 8", "tensors", LAYERS, f"reshard {{fp8-#}} DST -n --to ranks {EP8}"),
    ("reshard to vllm, tp 8", "tensors", LAYERS, "reshard {bf16-#} DST -n --to vllm --tp-out 8"),
    ("reshard to hf", "tensors", LAYERS, "reshard {fp8-#} DST -n --to hf"),
    ("a file for each tensor", "tensors", LAYERS, "reshard {bf16-#} DST -n --max-shard-size 100"),
    ("with optimizer state to flex", "tensors", LAYERS[:3], "reshard {trained-#} DST -n --to flex --tp-out 2"),
    ("drop-keys", "tensors", LAYERS, "drop-keys {fp8-#} DST model.layers.4.* -n"),
    ("quantize", "tensors", LAYERS, "quantize {bf16-#} DST -n"),
    ("quantize --to bf16", "tensors", LAYERS, "quantize {fp8-#} DST --to bf16 -n"),
    ("merge of two", "tensors", LAYERS, "merge {bf16-#} {bf16-#-b} -o DST -n"),
    ("convert-json", "tensors", PARAMETERS, "convert-json {program-#}/model.json DST.safetensors -n"),
    ("Llama-405B to tp #", "ranks", RANKS, "reshard {llama} DST -n --to ranks --tp-out #"),
    ("Llama-405B, tp # to tp 2", "ranks", RANKS, "reshard {llama-tp#} DST -n --tp-out 2"),
    ("V3 to tp 8, ep #", "ranks", RANKS, "reshard {v3} DST -n --to ranks --tp-out 8 --etp-out 1 --ep-out #"),
    ("dcp of # files to as many", "ranks", TRAINERS, "reshard {rows-dcp#} DST -n --to dcp --sharding-out #"),
    ("ZeRO-3 of # ranks to universal", "ranks", TRAINERS, "reshard {zero3-#} DST -n --to universal"),
    ("ZeRO-1 of # ranks to universal", "ranks", TRAINERS, "reshard {zero1-#} DST -n --to universal"),
    ("V3 to vllm, tp 1, ep #", "ranks", RANKS, "reshard {v3-bf16} DST -n --to vllm --tp-out 1 --ep-out #"),
)
"""(what, what grows, its sizes or those of the sources, command with # for the size)."""

NOTHING = {"inspect": "inspect {tiny}", "": "reshard {tiny} DST -n --to ranks --tp-out 2"}
"""What a command costs that has hardly anything to do; inspect needs no numpy."""


class Cost(NamedTuple):
    """What one process took."""

    cpu: float
    """Seconds."""
    rss: float
    """MB."""


def sources(command: str) -> list[str]:
    """The names in braces."""
    return re.findall(r"\{([^}]*)\}", command)


LAUNCHER = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
"""
"""Starts what is measured. What a process has had in memory counts for those that it forks, and this one is large."""


def measure(command: str, work: Path) -> Cost:
    """Run ckpttool."""
    words = [re.sub(r"\{([^}]*)\}", rf"{work}/\1", w).replace("DST", f"{work}/none") for w in shlex.split(command)]
    tool = [sys.executable, "-S", "-c", LAUNCHER, sys.executable, "-m", "ckpttool", *words]
    done = subprocess.run(tool, capture_output=True, text=True, check=True)
    code, cpu, rss = done.stdout.split()
    if int(code):
        sys.exit(f"ckpttool {' '.join(words)} failed:\n{done.stderr}")
    return Cost(float(cpu), float(rss) / 1000)


def typical(command: str, work: Path, rounds: int) -> Cost:
    """The medians of some runs."""
    runs = [measure(command, work) for _ in range(rounds)]
    return Cost(statistics.median(r.cpu for r in runs), statistics.median(r.rss for r in runs))


def prepare_sources(work: Path, wanted: Iterable[str]) -> None:
    """Make those that are not there, and what they are made of."""
    work.mkdir(parents=True, exist_ok=True)
    needed = set(wanted)
    needed |= {"v3", "v3-bf16"} if any(n.startswith("v3-") for n in needed) else set()
    needed |= {"rows"} if any(n.startswith("rows-") for n in needed) else set()
    needed |= {"llama"} if any(n.startswith("llama-") for n in needed) else set()
    needed |= {n.replace("trained-", "bf16-") for n in needed}
    for name, make in SOURCES.items():
        if name in needed and not (work / name).exists():
            # In a process of its own, which is forked from one that has read nothing.
            making = multiprocessing.get_context("fork").Process(target=make, args=(work / name,))
            making.start()
            making.join()
            if making.exitcode:
                sys.exit(f"the source {name} could not be made")


COUNTER = """
import sys
from ckpttool.checkpoint import open_checkpoint
print(sum(len(t.pieces) for t in open_checkpoint(sys.argv[1]).catalog))
"""


def tensors(work: Path, command: str) -> int:
    """Stored tensors of the sources of a command; chunks and other pieces of a trainer's."""
    count = 0
    for name in sources(command):
        if name.startswith(("rows-", "zero", "fsdp", "bytes-")):
            found = subprocess.run([sys.executable, "-c", COUNTER, work / name], capture_output=True, check=True)
            count += int(found.stdout)
            continue
        if name.startswith("program-"):
            count += int(name.removeprefix("program-"))
            continue
        for path in (work / name).glob("*.safetensors"):
            with path.open("rb") as f:
                header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
            count += len(header) - ("__metadata__" in header)
    return count


def slope(points: list[tuple[int, float]]) -> float:
    """Of log(cost) over log(size), by least squares."""
    logs = [(math.log(n), math.log(max(cost, 1e-3))) for n, cost in points]
    return statistics.linear_regression(*zip(*logs, strict=True)).slope


def main() -> None:
    """Prepare, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="parts of what the tables call a job")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-models", action="store_true", help="leave the first table out")
    parser.add_argument("--no-series", action="store_true", help="leave the second table out")
    parser.add_argument("--work", type=Path, default=Path("build/bench_scale"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    work: Path = args.work.resolve()
    models = [m for m in MODELS if not args.no_models and (not args.only or any(o in m[0] for o in args.only))]
    series = [s for s in SERIES if not args.no_series and (not args.only or any(o in s[0] for o in args.only))]
    commands = [*NOTHING.values(), *(m[1] for m in models), *(s[3].replace("#", str(n)) for s in series for n in s[2])]
    prepare_sources(work, [name for c in commands for name in sources(c)])
    nothing = {command: typical(job, work, args.rounds) for command, job in NOTHING.items()}
    for command, base in nothing.items():
        print(f"{command or 'reshard'} of a dozen tensors: {base.cpu:.2f} CPU s, {base.rss:.0f} MB")
    found: dict[str, Any] = {"nothing": nothing, "models": [], "series": []}
    if models:
        print("\n| source | job | tensors | CPU s | peak MB |\n| --- | --- | --- | --- | --- |")
    for what, command in models:
        cost = typical(command, work, args.rounds)
        row = (" + ".join(sources(command)), what, tensors(work, command), round(cost.cpu, 2), round(cost.rss))
        found["models"].append(row)
        print(f"| {row[0]} | {row[1]} | {row[2]:,} | {row[3]} | {row[4]} |", flush=True)
    if series:
        print("\n| job | grows | CPU s | slope | MB above the base | slope |\n| --- | --- | --- | --- | --- | --- |")
    for what, over, sizes, command in series:
        each = [command.replace("#", str(n)) for n in sizes]
        grows = [tensors(work, c) if over == "tensors" else n for c, n in zip(each, sizes, strict=True)]
        costs = [typical(c, work, args.rounds) for c in each]
        base = nothing.get(command.split()[0], nothing[""])
        time = [c.cpu - base.cpu for c in costs]
        space = [c.rss - base.rss for c in costs]
        slopes = [slope(list(zip(grows, column, strict=True))) for column in (time, space)]
        found["series"].append((what, over, grows, time, slopes[0], space, slopes[1]))
        print(
            f"| {what} | {grows[0]:,} to {grows[-1]:,} {over} | {', '.join(f'{t:.2f}' for t in time)} | {slopes[0]:.2f}"
            f" | {', '.join(f'{s:.0f}' for s in space)} | {slopes[1]:.2f} |",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
