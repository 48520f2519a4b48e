"""The checkpoint that the benchmark moves: llama-shaped, bf16, written to disk without holding it in memory."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path

import numpy as np

HIDDEN, INTER, VOCAB, HEADS, KV_HEADS = 4096, 14336, 128256, 32, 8
"""Llama-3-8B's shapes."""


def tensors(layers: int) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes, [out, in]."""
    kv = HIDDEN // HEADS * KV_HEADS
    out: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (VOCAB, HIDDEN))]
    for n in range(layers):
        p = f"model.layers.{n}."
        out += [
            (p + "self_attn.q_proj.weight", (HIDDEN, HIDDEN)),
            (p + "self_attn.k_proj.weight", (kv, HIDDEN)),
            (p + "self_attn.v_proj.weight", (kv, HIDDEN)),
            (p + "self_attn.o_proj.weight", (HIDDEN, HIDDEN)),
            (p + "mlp.gate_proj.weight", (INTER, HIDDEN)),
            (p + "mlp.up_proj.weight", (INTER, HIDDEN)),
            (p + "mlp.down_proj.weight", (HIDDEN, INTER)),
            (p + "input_layernorm.weight", (HIDDEN,)),
            (p + "post_attention_layernorm.weight", (HIDDEN,)),
        ]
    return [*out, ("model.norm.weight", (HIDDEN,)), ("lm_head.weight", (VOCAB, HIDDEN))]


def write(root: Path, layers: int) -> int:
    """Write ``model.safetensors`` and ``config.json``; returns the bytes of the tensors."""
    root.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": layers,
        "vocab_size": VOCAB,
        "torch_dtype": "bfloat16",
    }
    (root / "config.json").write_text(json.dumps(config, indent=2))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensors(layers):
        size = 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    noise = np.random.default_rng(0).integers(0, 1 << 16, 16 << 20, dtype=np.uint16).tobytes()
    with (root / "model.safetensors").open("wb") as f:
        f.write(struct.pack("<Q", len(raw)) + raw)
        left = at
        while left:
            left -= f.write(noise[: min(left, len(noise))])
    return at
