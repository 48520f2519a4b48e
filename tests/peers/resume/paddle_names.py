"""Parameters of Paddle's models in terms of Hugging Face's published ones, worked out from their layers. Only numpy.

A structured name stands for rows of one or more published tensors: ``qkv_proj`` has for each key/value head its query
heads, its key and its value head; ``up_gate_proj`` has gate, then up. Linear weights are [in, out]. A tensor-parallel
rank makes them of its parts of the published tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from tests.peers.resume import task
from tests.peers.resume.held import Bits
from tests.peers.resume.task import qkv_rows

_COLUMN = re.compile(r"\.(?:q|k|v|gate|up)_proj\.weight|embed_tokens\.|lm_head\.")
_ROW = re.compile(r"\.(?:o|down)_proj\.weight")


def axis(name: str) -> int | None:
    """Which axis of a published tensor [out, in] tensor parallelism cuts."""
    return 0 if _COLUMN.search(name) else 1 if _ROW.search(name) else None


def cut(name: str, array: Bits, tp: int, rank: int) -> Bits:
    """A rank's part of a published tensor."""
    along = axis(name)
    return array if along is None else np.split(array, tp, along)[rank]


def rows(name: str, model: str, tp: int) -> dict[str, Bits]:
    """Published names of a structured one, and which of its rows (outputs) on each rank are theirs, in their order."""
    sizes = task.shapes(model)
    plain = re.sub(r"^(?:llama|qwen3_moe|model)\.", "model.", name)
    at = plain.rpartition(".weight")[0].rpartition(".")[0]
    if name.endswith("qkv_proj.weight"):
        return qkv_rows(at, model, tp)
    if name.endswith("up_gate_proj.weight"):
        gate, up = f"{at}.gate_proj.weight", f"{at}.up_proj.weight"
        n = sizes[gate][0] // tp
        return {gate: np.arange(n), up: np.arange(n, 2 * n)}
    return {plain: np.arange(sizes[plain][0] // (tp if axis(plain) == 0 else 1))}


def _turned(name: str, shape: Sequence[int], tp: int) -> bool:
    """Whether a parameter of this shape is [in, out]: the head is, or is not, as the software has it."""
    return name.endswith(("_proj.weight", ".gate.weight")) or (
        name == "lm_head.weight" and shape[0] != task.VOCAB // tp
    )


def published(name: str, ranks: Sequence[Bits], model: str) -> dict[str, Bits]:
    """The published tensors of a structured one, of which each tensor-parallel rank holds a part."""
    tp = len(ranks)
    whole = [a.T if _turned(name, a.shape, tp) else a for a in ranks]
    out = {}
    for n, mine in rows(name, model, tp).items():
        parts, along = [a[mine] for a in whole], axis(n)
        out[n] = np.ascontiguousarray(parts[0] if along is None else np.concatenate(parts, along))
    return out


def structured(name: str, shape: Sequence[int], first: Mapping[str, Bits], model: str, tp: int, rank: int) -> Bits:
    """A rank's parameter, made of the published ones."""
    parts = {n: (mine, cut(n, first[n], tp, rank)) for n, mine in rows(name, model, tp).items()}
    outputs = sum(len(mine) for mine, _ in parts.values())
    width = next(iter(parts.values()))[1].shape[1:]
    whole = np.empty((outputs, *width), "<f4")
    for mine, part in parts.values():
        whole[mine] = part
    return np.ascontiguousarray(whole.T) if _turned(name, shape, tp) else whole
