"""A Llama that is large enough for several parts, of numbers that differ everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.helpers.tensorfile import Raw, save_hf

LAYERS, HIDDEN, INNER, HEADS, GROUPS, ROWS = 6, 512, 1408, 8, 2, 2048
FIXTURE = Path(__file__).parents[2] / "fixtures" / "hf_tiny_source" / "config.json"


def save(folder: Path, seed: int) -> Path:
    """Write it as Hugging Face does: about 39 MB of bf16."""
    config = json.loads(FIXTURE.read_text(encoding="utf-8")) | {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "vocab_size": ROWS,
    }
    random = np.random.default_rng(seed)
    keys = HIDDEN * GROUPS // HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (ROWS, HIDDEN),
        "lm_head.weight": (ROWS, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": (keys, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": (keys, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{layer}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{layer}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{layer}.mlp.down_proj.weight": (HIDDEN, INNER),
            f"{layer}.input_layernorm.weight": (HIDDEN,),
            f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
        }
    # The upper halves of float32 are bf16, and none of these is NaN.
    tensors = {
        name: Raw("BF16", (random.standard_normal(shape).astype("f4").view("u4") >> 16).astype("u2"))
        for name, shape in shapes.items()
    }
    return save_hf(folder, tensors, config)
