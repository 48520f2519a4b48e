"""Measure the merge of a flex checkpoint against Paddle's ``merge_sharded_state_dict`` and against ``cp -r``.

    python bench/paddle_flex.py [--gb 1.2] [--rounds 3] [--paddle PYTHON] [--no-paddle] [--work DIR] [--json FILE]

The checkpoint is what ``paddle.distributed.save_state_dict`` leaves of a run with tp 2 and 2 sharding ranks: four files
with bf16 weights cut over tp, each stored once, and float32 master weights and moments, flattened and cut within rows.
Every round runs ckpttool, Paddle and cp once, in an order that rotates; all three sync what they wrote. Sources are in
the page cache. The peak of memory is the sum of the proportional set sizes of all processes, looked at twenty times a
second.

Paddle is left out where there is none: ``make test-peers`` installs it into .venv-paddle, or ``--paddle`` names the
interpreter of an environment that has it.
"""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.merge import COPY, Row, measure, round_bf16
from bench.run import TOOL, settle, spread

ROOT = Path(__file__).resolve().parent.parent
HIDDEN, INTER, VOCAB = 1024, 2816, 8192
TP, SHARDING = 2, 2
STATES = ("w_0", "moment1_0", "moment2_0")
METADATA = "paddle.distributed.flex_checkpoint.dcp.metadata"
PADDLE_MERGE = """
import sys
from paddle.distributed.flex_checkpoint.dcp.load_state_dict import merge_sharded_state_dict
merge_sharded_state_dict(sys.argv[1], sys.argv[2])
"""


@dataclass(frozen=True)
class LocalTensorMetadata:
    """As Paddle pickles it."""

    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    global_shape: tuple[int, ...]
    is_flattened: bool = False
    flattened_range: tuple[int, int] | None = None


@dataclass(frozen=True)
class LocalTensorIndex:
    """As Paddle pickles it."""

    tensor_key: str
    global_offset: tuple[int, ...]
    is_flattened: bool = False
    flattened_range: tuple[int, int] | None = None
    replica_id: int | None = None
    local_shape: tuple[int, ...] | None = None


@dataclass
class Metadata:
    """As Paddle pickles it."""

    state_dict_metadata: dict[str, list[LocalTensorMetadata]] = field(default_factory=dict)
    storage_metadata: dict[LocalTensorIndex, str] = field(default_factory=dict)
    flat_mapping: dict[str, tuple[str, ...]] = field(default_factory=dict)


@contextmanager
def named_as_paddle_does() -> Iterator[None]:
    """The classes above stand in Paddle's module, where a pickle looks for them."""
    parts = METADATA.split(".")
    names = [".".join(parts[: n + 1]) for n in range(len(parts))]
    before = {n: sys.modules.get(n) for n in names}
    for n in names:
        sys.modules[n] = ModuleType(n)
    for cls in (LocalTensorMetadata, LocalTensorIndex, Metadata):
        cls.__module__ = METADATA
        setattr(sys.modules[METADATA], cls.__name__, cls)
    try:
        yield
    finally:
        for n, module in before.items():
            if module is None:
                del sys.modules[n]
            else:
                sys.modules[n] = module


def weights(layers: int) -> list[tuple[str, tuple[int, ...], int | None]]:
    """Names, shapes, and the axis that tensor parallelism cuts."""
    out: list[tuple[str, tuple[int, ...], int | None]] = [("model.embed_tokens.weight", (VOCAB, HIDDEN), 0)]
    for n in range(layers):
        p = f"model.layers.{n}."
        out += [
            (p + "self_attn.qkv_proj.weight", (HIDDEN, 3 * HIDDEN), 1),
            (p + "self_attn.o_proj.weight", (HIDDEN, HIDDEN), 0),
            (p + "mlp.up_gate_proj.weight", (HIDDEN, 2 * INTER), 1),
            (p + "mlp.down_proj.weight", (INTER, HIDDEN), 0),
            (p + "input_layernorm.weight", (HIDDEN,), None),
            (p + "post_attention_layernorm.weight", (HIDDEN,), None),
        ]
    return [*out, ("model.norm.weight", (HIDDEN,), None), ("lm_head.weight", (VOCAB, HIDDEN), 0)]


def size(layers: int) -> int:
    """Bytes: bf16 once, float32 once for each state."""
    return (2 + 4 * len(STATES)) * sum(prod(shape) for _, shape, _ in weights(layers))


def write_flex(folder: Path, layers: int) -> None:
    """The files, one after the other, and their metadata."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    pool = (0.02 * rng.standard_normal(1 << 24)).astype(np.float32)
    bits = round_bf16(pool)
    metadata = Metadata()
    for rank in range(TP * SHARDING):
        file = f"{rank}_0.distcp"
        tensors: dict[str, Any] = {}

        def take(values: Any, count: int) -> Any:
            start = int(rng.integers(0, len(values) - count))
            return values[start : start + count]

        for number, (name, shape, axis) in enumerate(weights(layers)):
            part, slot = rank % TP, rank // TP
            local, offset = list(shape), [0] * len(shape)
            if axis is not None:
                local[axis] //= TP
                offset[axis] = part * local[axis]
            elif part:
                continue  # one of the tp ranks has it
            place, block, numel = tuple(offset), tuple(local), prod(local)
            if number % SHARDING == slot:
                tensors[name] = take(bits, numel).reshape(block)
                _note(metadata, file, name, LocalTensorMetadata(place, block, "bfloat16", shape))
            cut = numel * 5 // 8 + 1  # within a row
            span = (0, cut) if slot == 0 else (cut, numel)
            for state in STATES:
                key = f"{name}.{state}"
                tensors[key] = take(pool, span[1] - span[0])
                _note(metadata, file, key, LocalTensorMetadata(place, block, "float32", shape, True, span))  # noqa: FBT003
        table = {"StructuredToParameterName@@": {k: f"eager_tmp_{n}" for n, k in enumerate(tensors)}}
        with (folder / file).open("wb") as f:
            pickle.dump(tensors | table, f, protocol=4)
    with named_as_paddle_does(), (folder / "0.metadata").open("wb") as f:
        pickle.dump(metadata, f, protocol=4)


def _note(metadata: Metadata, file: str, key: str, piece: LocalTensorMetadata) -> None:
    metadata.state_dict_metadata.setdefault(key, []).append(piece)
    index = LocalTensorIndex(
        key, piece.global_offset, piece.is_flattened, piece.flattened_range, None, piece.local_shape
    )
    metadata.storage_metadata[index] = file
    metadata.flat_mapping[key] = (key,)


def commands(source: str, paddle: str) -> dict[str, list[str]]:
    """What to run, by the program's name. Each writes ``out`` and syncs it."""
    out = {
        "ckpttool": [TOOL, "merge", source, "-o", "out", "--quiet"],
        COPY: ["sh", "-c", 'cp -r "$0" out && sync out/*', source],
    }
    if paddle:
        out["paddle"] = [
            "sh",
            "-c",
            '"$@" && sync out/*',
            "sh",
            paddle,
            "-W",
            "ignore",
            "-c",
            PADDLE_MERGE,
            source,
            "out",
        ]
    return out


def find_paddle(given: str) -> str:
    """Path of an interpreter, or "" after a note."""
    path = Path(given or ROOT / ".venv-paddle" / "bin" / "python")
    if path.exists():
        return str(path.absolute())
    if given:
        sys.exit(f"{given} does not exist")
    print(
        "note: there is no .venv-paddle here, so ckpttool is measured against cp only; `make test-peers` installs it,"
        " --paddle PYTHON names another",
        file=sys.stderr,
    )
    return ""


def show(rows: dict[str, Row], nbytes: int, rounds: int) -> None:
    """The table."""
    print(f"{nbytes / 1e9:.2f} GB in {TP * SHARDING} files, warm source, sync included, {rounds} rounds; medians\n")
    print(f"{'program':<10}  {'wall s':>7} {'CPU s':>7} {'peak MB':>8}  {'wall / cp':<18}  wall / ckpttool".rstrip())
    for name, row in rows.items():
        line = f"{name:<10}  {row.median('wall'):>7.2f} {row.median('cpu'):>7.2f} {max(r.rss for r in row.runs):>8.0f}"
        for other in (COPY, "ckpttool"):
            ratios = [a.wall / b.wall for a, b in zip(row.runs, rows[other].runs, strict=True)]
            line += f"  {spread(ratios) if name != other else '':<18}"
        print(line.rstrip())


def main() -> None:
    """Prepare, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.2, help="size of the checkpoint, about")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--paddle", default="", metavar="PYTHON", help="interpreter with paddlepaddle")
    parser.add_argument("--no-paddle", action="store_true", help="leave Paddle out")
    parser.add_argument("--work", type=Path, default=Path("build/bench-paddle-flex"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    layers = max(0, round((args.gb * 1e9 - size(0)) / (size(1) - size(0))))
    paddle = "" if args.no_paddle else find_paddle(args.paddle)
    work: Path = args.work.resolve()
    source = work / f"flex-{layers}"
    if not (work / f"complete-{layers}").exists():
        shutil.rmtree(source, ignore_errors=True)
        write_flex(source, layers)
        (work / f"complete-{layers}").touch()
    rows: dict[str, Row] = {}
    programs = list(commands(source.name, paddle).items())
    for n in range(args.rounds):
        for program, command in programs[n % len(programs) :] + programs[: n % len(programs)]:
            shutil.rmtree(work / "out", ignore_errors=True)
            settle(source, cold=False)
            rows.setdefault(program, Row()).runs.append(measure(command, work))
        print(f"round {n + 1}/{args.rounds}", file=sys.stderr, flush=True)
    shutil.rmtree(work / "out", ignore_errors=True)
    show({p: rows[p] for p, _ in programs}, size(layers), args.rounds)
    if args.json:
        args.json.write_text(json.dumps({p: [vars(r) for r in row.runs] for p, row in rows.items()}, indent=2))


if __name__ == "__main__":
    main()
