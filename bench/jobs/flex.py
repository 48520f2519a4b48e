"""The merge of a flex checkpoint, against Paddle's own ``merge_sharded_state_dict``.

The checkpoint is what ``paddle.distributed.save_state_dict`` leaves of a run with tp 2 and 2 sharding ranks: four files
with bf16 weights cut over tp, each stored once, and float32 master weights and moments, flattened and cut within rows.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from bench.measure import OURS, OUT, Job, Program, copy_of
from bench.models import round_bf16
from bench.setting import PEERS, TOOL, Setting, differing, made

HIDDEN, INTER, VOCAB = 1024, 2816, 8192
TP, SHARDING = 2, 2
STATES = ("w_0", "moment1_0", "moment2_0")
METADATA = "paddle.distributed.flex_checkpoint.dcp.metadata"


def jobs(setting: Setting) -> list[Job]:
    """One."""
    layers = max(0, round((setting.gb / 3 * 1e9 - _size(0)) / (_size(1) - _size(0))))
    source = setting.work / f"flex-{layers}"
    programs = [Program(OURS, (TOOL, "merge", str(source), "-o", OUT, "--quiet")), copy_of(source)]
    if setting.paddle:
        script = str(PEERS / "paddle_merge.py")
        programs.append(Program("Paddle", (setting.paddle, "-W", "ignore", script, str(source), OUT)))
    return [Job("merge of a flex checkpoint", (source,), tuple(programs), partial(_prepare, source, layers), _compare)]


def _prepare(source: Path, layers: int) -> None:
    with made(source) as missing:
        if missing:
            _write(source, layers)


def _compare(ours: Path, theirs: Path, _peer: str) -> str:
    return differing(ours, theirs)


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
def _named_as_paddle_does() -> Iterator[None]:
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


def _weights(layers: int) -> list[tuple[str, tuple[int, ...], int | None]]:
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


def _size(layers: int) -> int:
    """Bytes: bf16 once, float32 once for each state."""
    return (2 + 4 * len(STATES)) * sum(prod(shape) for _, shape, _ in _weights(layers))


def _write(folder: Path, layers: int) -> None:
    """The files, one after the other, and their metadata."""
    folder.mkdir(parents=True, exist_ok=True)
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

        for number, (name, shape, axis) in enumerate(_weights(layers)):
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
    with _named_as_paddle_does(), (folder / "0.metadata").open("wb") as f:
        pickle.dump(metadata, f, protocol=4)


def _note(metadata: Metadata, file: str, key: str, piece: LocalTensorMetadata) -> None:
    metadata.state_dict_metadata.setdefault(key, []).append(piece)
    index = LocalTensorIndex(
        key, piece.global_offset, piece.is_flattened, piece.flattened_range, None, piece.local_shape
    )
    metadata.storage_metadata[index] = file
    metadata.flat_mapping[key] = (key,)
