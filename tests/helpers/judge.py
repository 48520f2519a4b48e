"""What each rank holds, worked out with numpy slices and one table of names: the judge of ckpttool's layouts.

Shares nothing with ckpttool: no family files, no boxes, no mesh. ``held`` gives the tensors of one rank of a model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import lcm
from pathlib import Path

import numpy as np

from tests.helpers.families import LAYERS, A, E, K, Model
from tests.helpers.tensorfile import Array, Raw, Tensors, write


@dataclass(frozen=True)
class Grid:
    """Parallel sizes, and the layers of each pipeline stage."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 0
    """0: as tp."""
    layout: tuple[int, ...] = ()
    """Layers of each chunk of the pipeline, dealt out to the stages in turn; (): equal shares."""

    @property
    def width(self) -> int:
        return lcm(self.tp, self.ep * (self.etp or self.tp))

    @property
    def world(self) -> int:
        return self.pp * self.width

    def layers(self, stage: int) -> list[int]:
        """Of one stage."""
        counts = self.layout or (LAYERS // self.pp,) * self.pp
        edges = accumulate(counts, initial=0)
        chunks = [range(a, b) for a, b in pairwise(edges)]
        return [n for chunk in chunks[stage :: self.pp] for n in chunk]

    def flags(self, suffix: str = "-out") -> list[object]:
        """How the command line asks for it."""
        sizes = {"tp": self.tp, "pp": self.pp, "ep": self.ep, "etp": self.etp}
        out: list[object] = [x for k, v in sizes.items() if v for x in (f"--{k}{suffix}", v)]
        return [*out, "--pp-layout", ",".join(map(str, self.layout))] if self.layout and suffix else out

    def dense(self) -> Grid:
        """Without what is for experts."""
        return replace(self, ep=1, etp=0)


@dataclass(frozen=True)
class Seat:
    """Where one rank stands."""

    tp: int
    ways: int
    ep: int
    eps: int
    etp: int
    eways: int


def part(bits: Array, axis: int, ways: int, index: int) -> Array:
    """An equal share of an axis."""
    return np.split(bits, ways, axis)[index]


def shared(bits: Array, axis: int, heads: int, ways: int, index: int) -> Array:
    """Heads of which there are fewer than ranks: neighbours hold the same one."""
    if ways <= heads:
        return part(bits, axis, ways, index)
    return np.split(bits, heads, axis)[index // (ways // heads)]


def padded(bits: Array, rows: int) -> Array:
    """Zero rows up to a multiple of ``rows``."""
    return np.concatenate([bits, np.zeros((-len(bits) % rows, *bits.shape[1:]), bits.dtype)])


def vocab(bits: Array, at: Seat, multiple: int = 1) -> Array:
    return part(padded(bits, lcm(multiple, at.ways)), 0, at.ways, at.tp)


def column(bits: Array, at: Seat) -> Array:
    return part(bits, 0, at.ways, at.tp)


def row(bits: Array, at: Seat) -> Array:
    return part(bits, 1, at.ways, at.tp)


def kv(bits: Array, at: Seat, heads: int = K) -> Array:
    return shared(bits, 0, heads, at.ways, at.tp)


def qkv(bits: Array, at: Seat) -> Array:
    q, k, v = np.split(bits, [len(bits) * A // (A + 2 * K), len(bits) * (A + K) // (A + 2 * K)])
    return np.concatenate([column(q, at), kv(k, at), kv(v, at)])


def halves(bits: Array, at: Seat) -> Array:
    return np.concatenate([column(x, at) for x in np.split(bits, 2)])


def thirds_last(bits: Array, at: Seat) -> Array:
    parts = np.split(bits, 3, -1)
    return np.concatenate([part(x, -1, at.ways, at.tp) for x in parts], -1)


def last(bits: Array, at: Seat) -> Array:
    return part(bits, -1, at.ways, at.tp)


def expert_part(axis: int) -> Callable[[Array, Seat], Array]:
    return lambda bits, at: part(bits, axis, at.eways, at.etp)


def mine(bits: Array, at: Seat) -> Array:
    """Whole experts; the first ranks take what does not divide."""
    return np.array_split(bits, at.eps)[at.ep]


def stacked_part(axis: int) -> Callable[[Array, Seat], Array]:
    return lambda bits, at: part(mine(bits, at), axis, at.eways, at.etp)


def stacked_halves(bits: Array, at: Seat) -> Array:
    return np.concatenate([part(x, 1, at.eways, at.etp) for x in np.split(mine(bits, at), 2, 1)], 1)


def stacked_halves_last(bits: Array, at: Seat) -> Array:
    return np.concatenate([part(x, 2, at.eways, at.etp) for x in np.split(mine(bits, at), 2, 2)], 2)


def whole(bits: Array, at: Seat) -> Array:  # noqa: ARG001
    return bits


_GPT2: list[tuple[str, Callable[[Array, Seat], Array]]] = [
    (r"wte\.", vocab),
    (r"c_attn\.", thirds_last),
    (r"c_fc\.", last),
    (r"c_proj\.weight", column),  # rows of [in, out] are inputs
    (r"", whole),
]
_TABLE: list[tuple[str, Callable[[Array, Seat], Array]]] = [
    (r"indexer\.", whole),
    (r"qkv_proj\.", qkv),
    (r"gate_up_proj\.", halves),
    (r"(embed_tokens|lm_head|embed_in|embed_out|shared_head\.head)\.weight", vocab),
    (r"experts\.\d+\.(gate_proj|up_proj|w1|w3)\.", expert_part(0)),
    (r"experts\.\d+\.(down_proj|w2)\.", expert_part(1)),
    (r"(q_proj|q_b_proj|kv_b_proj|query_key_value|dense_h_to_4h|sinks)\b", column),
    (r"(k_proj|v_proj)\.", kv),
    (r"(gate_proj|up_proj)\.", column),
    (r"(o_proj|down_proj|attention\.dense|dense_4h_to_h)\.weight", row),
    (r"", whole),
]
_STACKED: dict[str, list[tuple[str, Callable[[Array, Seat], Array]]]] = {
    "gpt_oss": [
        (r"experts\.gate_up_proj_(blocks|scales)", stacked_part(1)),
        (r"experts\.down_proj_(blocks|scales)", stacked_part(2)),
        (r"experts\.gate_up_proj(_bias)?$", stacked_part(-1)),
        (r"experts\.down_proj$", stacked_part(1)),
        (r"experts\.down_proj_bias", mine),
    ],
    "llama4": [
        (r"experts\.gate_up_proj$", stacked_halves_last),
        (r"experts\.down_proj$", stacked_part(1)),
        (r"vision_model.*(q_proj|k_proj|v_proj|fc1)\.|multi_modal_projector", column),
        (r"vision_model.*fc2\.weight", row),
    ],
    "": [(r"experts\.gate_up_proj$", stacked_halves), (r"experts\.down_proj$", stacked_part(2))],
}


def cut(model: Model, name: str, bits: Array, at: Seat) -> Array:
    """What a rank holds of one tensor."""
    table = _GPT2 if model.family == "gpt2" else _STACKED.get(model.family, _STACKED[""]) + _TABLE
    function = next(f for pattern, f in table if re.search(pattern, name))
    if function is kv and model.config["num_key_value_heads"] != K:
        return kv(bits, at, model.config["num_key_value_heads"])
    return function(bits, at)


def held(model: Model, grid: Grid, rank: int, tensors: Tensors | None = None) -> Tensors:
    """The tensors of one rank."""
    stage, i = divmod(rank, grid.width)
    etp = grid.etp or grid.tp
    at = Seat(i % grid.tp, grid.tp, i // etp % grid.ep, grid.ep, i % etp, etp)
    owner = [ep for ep, ids in enumerate(np.array_split(np.arange(E), grid.ep)) for _ in ids]
    out: Tensors = {}
    for name, raw in (tensors or model.tensors()).items():
        if (m := re.search(r"experts\.(\d+)\.", name)) and owner[int(m[1])] != at.ep:
            continue
        if grid.pp > 1 and stage not in stages_of(model, grid, name):
            continue
        out[name] = Raw(raw.dtype, cut(model, name, raw.bits, at))
    return out


def stages_of(model: Model, grid: Grid, name: str) -> set[int]:
    """Stages that hold a tensor. Towers go where the embedding is, to which they are an input."""
    if name.startswith(("vision_model.", "multi_modal_projector.")):
        return {0}
    if m := re.search(r"\b(?:layers|h)\.(\d+)\.", name):
        layer = int(m[1])
        return {next((s for s in range(grid.pp) if layer in grid.layers(s)), grid.pp - 1)}
    if re.search(r"\b(embed_tokens|embed_in|wte|wpe)\.", name):
        tied = model.config["tie_word_embeddings"] and "wpe" not in name
        return {0, grid.pp - 1} if tied else {0}
    return {grid.pp - 1}


def write_ranks(folder: Path, model: Model, grid: Grid, pattern: str = "model_{rank}.safetensors") -> Path:
    """A checkpoint as another tool would leave it: one file per rank, no metadata, config beside them."""
    tensors = model.tensors()
    for rank in range(grid.world):
        stage, i = divmod(rank, grid.width)
        etp = grid.etp or grid.tp
        name = pattern.format(rank=rank, pp=stage, tp=i % grid.tp, ep=i // etp % grid.ep, etp=i % etp)
        write(folder / name, held(model, grid, rank, tensors))
    (folder / "config.json").write_text(json.dumps(model.config), encoding="utf-8")
    return folder
