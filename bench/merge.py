"""Measure merge against mergekit and against ``cp`` of the inputs and the output.

    python bench/merge.py [--gb 1.5 | --layers N] [--rounds 3] [--only METHOD ...] [--mergekit PROGRAM]
                          [--all-methods] [--work DIR] [--json FILE]

Every round runs each method once, in an order that rotates: ckpttool, mergekit with the flags that serve it best, and
``cp -r`` of the inputs and of as many bytes as the output has, all three followed by a sync of what they wrote. Sources
are in the page cache. Both tools read the same recipe. CPU seconds are those of all processes; so is the peak of
memory, which is the sum of their proportional set sizes, looked at twenty times a second.

mergekit is left out where there is none: ``make test-peers`` installs it, or ``--mergekit`` names its mergekit-yaml.
``--all-methods`` measures ckpttool alone with every method that it has.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.run import TOOL, Run, settle, spread

MERGEKIT_FLAGS = [
    "--lazy-unpickle",
    "--async-write",
    *("--out-shard-size", "500M"),
    *("--no-copy-tokenizer", "--no-write-model-card", "--quiet"),
]
"""Its default of 5 GB per shard waits in memory until it is full; smaller shards cost no time."""
COPY = "cp"


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama."""

    hidden: int
    inter: int
    vocab: int
    heads: int
    kv_heads: int

    def tensors(self, layers: int) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes, [out, in]."""
        h, kv = self.hidden, self.hidden // self.heads * self.kv_heads
        out: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (self.vocab, h))]
        for n in range(layers):
            p = f"model.layers.{n}."
            out += [
                (p + "self_attn.q_proj.weight", (h, h)),
                (p + "self_attn.k_proj.weight", (kv, h)),
                (p + "self_attn.v_proj.weight", (kv, h)),
                (p + "self_attn.o_proj.weight", (h, h)),
                (p + "mlp.gate_proj.weight", (self.inter, h)),
                (p + "mlp.up_proj.weight", (self.inter, h)),
                (p + "mlp.down_proj.weight", (h, self.inter)),
                (p + "input_layernorm.weight", (h,)),
                (p + "post_attention_layernorm.weight", (h,)),
            ]
        return [*out, ("model.norm.weight", (h,)), ("lm_head.weight", (self.vocab, h))]

    def bytes(self, layers: int) -> int:
        """In bf16."""
        return 2 * sum(prod(s) for _, s in self.tensors(layers))

    def config(self, layers: int) -> dict[str, Any]:
        """What mergekit needs to know the architecture."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.inter,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "num_hidden_layers": layers,
            "vocab_size": self.vocab,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }


LARGE = Shape(2048, 5632, 32000, 32, 4)
"""TinyLlama's: 0.26 GB, and 0.09 GB per layer."""
SMALL = Shape(512, 1408, 4000, 8, 2)
"""To try this program."""


@dataclass(frozen=True)
class Job:
    """A recipe over base, ft1 and ft2."""

    per_model: tuple[dict[str, Any], ...] = ({}, {})
    whole: dict[str, Any] = field(default_factory=dict)
    base: str = ""
    """"base", which is read too, or "ft1", which is one side of the way between two models."""

    def recipe(self, method: str) -> dict[str, Any]:
        """As mergekit reads it."""
        out: dict[str, Any] = {
            "merge_method": method,
            "models": [{"model": f"./ft{i}", "parameters": p} for i, p in enumerate(self.per_model, 1)],
            "dtype": "bfloat16",
        }
        if self.whole:
            out["parameters"] = self.whole
        if self.base:
            out["base_model"] = f"./{self.base}"
        return out

    @property
    def inputs(self) -> list[str]:
        """Directories that are read."""
        return sorted({f"ft{i}" for i in range(1, len(self.per_model) + 1)} | ({self.base} if self.base else set()))


def weights(**more: Any) -> tuple[dict[str, Any], ...]:
    """Of two models."""
    return ({"weight": 0.6, **more}, {"weight": 0.4, **more})


JOBS = {
    "linear": Job(weights()),
    "task_arithmetic": Job(weights(), base="base"),
    "slerp": Job(whole={"t": 0.4}, base="ft1"),
    "dare_ties": Job(weights(density=0.5), base="base"),
    "ties": Job(weights(density=0.5), base="base"),
}
MORE = {
    "passthrough": Job(({},)),
    "nuslerp": Job(weights()),
    "multislerp": Job(weights()),
    "karcher": Job(),
    "dare_linear": Job(weights(density=0.5), base="base"),
    "della": Job(weights(density=0.5), base="base"),
    "della_linear": Job(weights(density=0.5), base="base"),
    "breadcrumbs": Job(weights(density=0.5), base="base"),
    "breadcrumbs_ties": Job(weights(density=0.5), base="base"),
    "model_stock": Job(base="base"),
    "sce": Job(base="base", whole={"select_topk": 0.5}),
    "arcee_fusion": Job(base="ft1"),
    "nearswap": Job(base="ft1", whole={"t": 0.001}),
    "ram": Job(base="base"),
    "ramplus_tl": Job(base="base"),
    "average": Job(),
    "ema": Job(whole={"decay": 0.9}),
}


@dataclass
class Row:
    """What one program took for one method."""

    runs: list[Run] = field(default_factory=list)

    def median(self, what: str) -> float:
        """Of wall, cpu or rss."""
        return statistics.median(float(getattr(r, what)) for r in self.runs)


def write_models(work: Path, shape: Shape, layers: int) -> None:
    """base, ft1 and ft2. A third of each ft's elements differ from base, by little, as after a finetuning in bf16.

    Differences of bf16 numbers that are close together are a few units in the last place: most magnitudes are equal to
    many others, which is what makes sorting them hard.
    """
    rng = np.random.default_rng(0)
    block = 1 << 22
    normal = (0.02 * rng.standard_normal(2 * block)).astype(np.float32)
    pool = (round_bf16(normal).astype(np.uint32) << 16).view(np.float32)
    noise = [
        np.where(rng.random(2 * block) < 0.35, 3e-4 * rng.standard_t(4, 2 * block), 0).astype(np.float32)
        for _ in range(2)
    ]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dims in shape.tensors(layers):
        header[name] = {"dtype": "BF16", "shape": list(dims), "data_offsets": [at, at + 2 * prod(dims)]}
        at += 2 * prod(dims)
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    files = []
    for name in ("base", "ft1", "ft2"):
        (work / name).mkdir(parents=True, exist_ok=True)
        (work / name / "config.json").write_text(json.dumps(shape.config(layers), indent=2))
        files.append((work / name / "model.safetensors").open("wb"))
        files[-1].write(struct.pack("<Q", len(raw)) + raw)
    for start in range(0, at // 2, block):
        n = min(block, at // 2 - start)
        here = rng.integers(0, block, 3)
        base = pool[here[0] : here[0] + n]
        files[0].write(round_bf16(base).tobytes())
        for f, drawn, where in zip(files[1:], noise, here[1:], strict=True):
            f.write(round_bf16(base + drawn[where : where + n]).tobytes())
    for f in files:
        f.close()


def round_bf16(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """The bits of the nearest bfloat16."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def family(pid: int) -> Iterable[int]:
    """A process and its descendants."""
    yield pid
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return
    for task in tasks:
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        for child in children:
            yield from family(int(child))


def resident(pid: int) -> float:
    """MB of a process and its descendants, pages that several of them map counted once."""
    total = 0
    for one in family(pid):
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return total * 1024 / 1e6


def measure(command: list[str], work: Path) -> Run:
    """Run a command to its end. Raises SystemExit with what it said when it fails."""
    begin = perf_counter()
    with (work / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=work)
    peak = 0.0
    over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.05):
            peak = max(peak, resident(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, status, usage = os.wait4(process.pid, 0)
    wall = perf_counter() - begin
    over.set()
    watcher.join()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{shlex.join(command)} failed:\n{(work / 'log').read_text(errors='replace')[-3000:]}")
    return Run(wall, usage.ru_utime + usage.ru_stime, peak)


def commands(method: str, job: Job, mergekit: str) -> dict[str, list[str]]:
    """What to run for a method, by the program's name. Each writes ``out`` and syncs it."""
    recipe = f"{method}.yml"
    paths = [f"./{i}" for i in job.inputs]
    # mergekit and cp leave dirty pages behind; ckpttool syncs by itself.
    out = {
        "ckpttool": [TOOL, "merge", recipe, "-o", "out", "--quiet"],
        COPY: ["sh", "-c", 'mkdir out && for i; do cp -r "$i" "out/$((n = n + 1))"; done && sync out/*/*', COPY],
    }
    out[COPY] += [*paths, paths[0]]
    if mergekit:
        flags = [*MERGEKIT_FLAGS, "--num-threads", str(os.cpu_count())]
        out["mergekit"] = ["sh", "-c", '"$@" && sync out/*', "sh", mergekit, recipe, "out", *flags]
    return out


def find_mergekit(given: str) -> str:
    """Path of mergekit-yaml, or "" after a note."""
    beside = Path(sys.executable).with_name("mergekit-yaml")
    found = given or (str(beside) if beside.exists() else shutil.which("mergekit-yaml") or "")
    if found and not Path(found).exists():
        sys.exit(f"{found} does not exist")
    if not found:
        print(
            "note: there is no mergekit-yaml here, so ckpttool is measured against cp only; `make test-peers`"
            " installs it, --mergekit PROGRAM names one",
            file=sys.stderr,
        )
    return str(Path(found).absolute()) if found else ""


def show(rows: dict[str, dict[str, Row]]) -> None:
    """The table."""
    width = max(map(len, rows))
    head = f"{'method':<{width}}  {'wall s':>7} {'CPU s':>7} {'peak MB':>8}  {'wall / cp':<18}"
    if any("mergekit" in row for row in rows.values()):
        head += f"  {'mergekit s':>10} {'CPU s':>7} {'peak MB':>8}  times as fast"
    print(head.rstrip())
    for method, row in rows.items():
        ours, copy = row["ckpttool"], row[COPY]
        line = (
            f"{method:<{width}}  {ours.median('wall'):>7.2f} {ours.median('cpu'):>7.2f}"
            f" {max(r.rss for r in ours.runs):>8.0f}"
            f"  {spread([a.wall / b.wall for a, b in zip(ours.runs, copy.runs, strict=True)]):<18}"
        )
        if "mergekit" in row:
            theirs = row["mergekit"]
            line += (
                f"  {theirs.median('wall'):>10.1f} {theirs.median('cpu'):>7.1f} {max(r.rss for r in theirs.runs):>8.0f}"
                f"  {spread([b.wall / a.wall for a, b in zip(ours.runs, theirs.runs, strict=True)]):<18}"
            )
        print(line.rstrip())


def main() -> None:
    """Prepare, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.5, help="size of each model, about")
    parser.add_argument("--layers", type=int, help="decoder layers of each model, instead of --gb")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], help="methods")
    parser.add_argument("--all-methods", action="store_true", help="every method of ckpttool, without mergekit")
    parser.add_argument("--mergekit", default="", metavar="PROGRAM", help="path of mergekit-yaml")
    parser.add_argument("--no-mergekit", action="store_true", help="leave mergekit out")
    parser.add_argument("--work", type=Path, default=Path("build/bench-merge"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shape = LARGE if args.layers or args.gb >= 0.35 else SMALL
    layers = args.layers or max(1, round((args.gb * 1e9 - shape.bytes(0)) / (shape.bytes(1) - shape.bytes(0))))
    jobs = {**JOBS, **MORE} if args.all_methods else JOBS
    unknown = [m for m in args.only if m not in {**JOBS, **MORE}]
    if unknown:
        sys.exit(f"there is no job {', '.join(unknown)}; known: {', '.join({**JOBS, **MORE})}")
    jobs = {m: {**JOBS, **MORE}[m] for m in args.only} or jobs
    mergekit = "" if args.no_mergekit or args.all_methods else find_mergekit(args.mergekit)
    work: Path = args.work.resolve() / f"{shape.hidden}x{layers}"
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "complete").exists():
        write_models(work, shape, layers)
        (work / "complete").touch()
    rows: dict[str, dict[str, Row]] = {}
    for n in range(args.rounds):
        names = list(jobs)
        for method in names[n % len(names) :] + names[: n % len(names)]:
            job = jobs[method]
            (work / f"{method}.yml").write_text(json.dumps(job.recipe(method), indent=1))
            programs = list(commands(method, job, mergekit).items())
            for program, command in programs[n % len(programs) :] + programs[: n % len(programs)]:
                shutil.rmtree(work / "out", ignore_errors=True)
                for i in job.inputs:
                    settle(work / i, cold=False)
                rows.setdefault(method, {}).setdefault(program, Row()).runs.append(measure(command, work))
            print(f"round {n + 1}/{args.rounds}  {method}", file=sys.stderr, flush=True)
    shutil.rmtree(work / "out", ignore_errors=True)
    size = shape.bytes(layers) / 1e9
    print(f"{size:.2f} GB bf16 per model, in the page cache, sync included, {args.rounds} rounds; medians [range]\n")
    show({m: rows[m] for m in jobs})
    if args.json:
        args.json.write_text(
            json.dumps({m: {p: [vars(r) for r in x.runs] for p, x in row.items()} for m, row in rows.items()}, indent=2)
        )


if __name__ == "__main__":
    main()
