"""A run of torch that is put down by hand: model, master weights and the state of AdamW, as one rank's file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.helpers.paddle import Array
from tests.helpers.tensorfile import Raw, write

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 20,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
_LAYER = {
    "self_attn.q_proj": (8, 8), "self_attn.k_proj": (4, 8), "self_attn.v_proj": (4, 8), "self_attn.o_proj": (8, 8),
    "mlp.gate_proj": (12, 8), "mlp.up_proj": (12, 8), "mlp.down_proj": (8, 12),
    "input_layernorm": (8,), "post_attention_layernorm": (8,),
}  # fmt: skip
SHAPES = {
    "model.embed_tokens.weight": (20, 8),
    **{f"model.layers.{i}.{n}.weight": s for i in range(2) for n, s in _LAYER.items()},
    "model.norm.weight": (8,),
    "lm_head.weight": (20, 8),
}
NAMES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F64": np.float64, "I64": np.int64}


def names(*, step: Mapping[str, float] | float = 7, masters: bool = True) -> dict[str, Array]:
    """Every tensor by ``str(Key)``, with a step of its own for parameters that ``step`` names."""
    rng = np.random.default_rng(11)
    out: dict[str, Array] = {}
    for name, shape in SHAPES.items():
        master = rng.standard_normal(shape).astype(np.float32)
        out[name] = master.astype(ml_dtypes.bfloat16) if masters else master
        if masters:
            out[f"master_weights/{name}"] = master
        out[f"optimizer/{name}/exp_avg"] = rng.standard_normal(shape).astype(np.float32)
        out[f"optimizer/{name}/exp_avg_sq"] = rng.random(shape).astype(np.float32)
        steps = step.get(name, 7) if isinstance(step, Mapping) else step
        out[f"optimizer/{name}/step"] = np.array(steps, np.float32)
    return out


def groups(*betas: tuple[float, float]) -> list[dict[str, Any]]:
    """Two groups as trainers make them: matrices with decay, the rest without."""
    decay = [n for n, s in SHAPES.items() if len(s) == 2]
    plain = [n for n, s in SHAPES.items() if len(s) == 1]
    first, second = betas * 2 if len(betas) == 1 else betas
    return [
        {"parameters": decay, "values": {"lr": 1e-3, "betas": list(first), "weight_decay": 0.1}},
        {"parameters": plain, "values": {"lr": 1e-3, "betas": list(second), "weight_decay": 0.0}},
    ]


def save_run(
    folder: Path,
    tensors: Mapping[str, Array],
    *,
    groups: Sequence[Mapping[str, Any]] | None = None,
    config: Mapping[str, Any] = CONFIG,
    family: str = "llama",
    **training: Any,
) -> Path:
    """Write it as ``ranks`` do, with the record of docs/formats/ranks.md."""
    kinds = {np.dtype(v): k for k, v in NAMES.items()}
    record: dict[str, Any] = {
        "version": 2, "rank": 0, "mesh": {"tp": 1, "pp": 1, "ep": 1, "etp": 1}, "family": family, "naming": "hf",
        "fused": "", "tensors": {},
    }  # fmt: skip
    if groups is not None or training:
        record["training"] = {"groups": list(groups or ()), "step": None, "plain": {}, "left": [], **training}
    for name, array in tensors.items():
        component, _, rest = name.partition("/")
        if rest:
            whole = {"shape": array.shape, "boxes": [[[0] * array.ndim, [0] * array.ndim, array.shape]]}
            state = {"state": rest.rpartition("/")[2]} if component == "optimizer" else {}
            record["tensors"][name] = {"component": component, **state, **whole}
    raw = {n: Raw(kinds[a.dtype], a.view(f"u{a.itemsize}")) for n, a in tensors.items()}
    write(folder / "rank-00000-of-00001.safetensors", raw, {"format": "pt", "ckpttool": json.dumps(record)})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
