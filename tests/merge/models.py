"""Tiny checkpoints for merges, written with numpy alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.command import Done, ckpttool
from tests.helpers.tensorfile import Array, Raw, Tensors, write

HIDDEN, INTER, VOCAB = 16, 24, 32


def bf16(values: Array) -> Raw:
    """The nearest bfloat16 numbers."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return Raw("BF16", ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))


def f32(values: Array) -> Raw:
    return Raw("F32", np.ascontiguousarray(values, np.float32).view(np.uint32))


def floats(raw: Raw) -> Array:
    """The elements in float64."""
    if raw.dtype == "BF16":
        return (raw.bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return raw.bits.view({"F32": np.float32, "F16": np.float16}[raw.dtype]).astype(np.float64)


def llama_config(*, layers: int = 3, vocab: int = VOCAB, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **more,
    }


def llama(*, layers: int = 3, vocab: int = VOCAB, seed: int = 0) -> Tensors:
    """Random tensors of a Llama."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, HIDDEN)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {
            at + "input_layernorm.weight": (HIDDEN,),
            at + "mlp.down_proj.weight": (HIDDEN, INTER),
            at + "mlp.gate_proj.weight": (INTER, HIDDEN),
            at + "mlp.up_proj.weight": (INTER, HIDDEN),
            at + "post_attention_layernorm.weight": (HIDDEN,),
            at + "self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
            at + "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            at + "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            at + "self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
        }
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (vocab, HIDDEN)}
    return {n: bf16(rng.standard_normal(s)) for n, s in shapes.items()}


def finetuned(base: Mapping[str, Raw], seed: int) -> Tensors:
    """The base with noise on half of its elements."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, raw in base.items():
        noise = np.where(rng.random(raw.bits.shape) < 0.5, 0.1 * rng.standard_normal(raw.bits.shape), 0)
        out[name] = bf16(floats(raw) + noise)
    return out


def save(folder: Path, tensors: Mapping[str, Raw], config: Mapping[str, Any] | None = None, *, shards: int = 1) -> Path:
    """A checkpoint in one file, or in several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(llama_config() if config is None else config), encoding="utf-8")
    if shards == 1:
        write(folder / "model.safetensors", tensors, {"format": "pt"})
        return folder
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        held = names[i::shards]
        write(folder / file, {n: tensors[n] for n in held}, {"format": "pt"})
        weight_map |= dict.fromkeys(held, file)
    total = sum(r.bits.nbytes for r in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def merge(*arguments: object) -> Done:
    """``ckpttool merge``, which must succeed."""
    done = ckpttool("merge", *arguments)
    assert done.code == 0, f"ckpttool merge {' '.join(map(str, arguments))}\n{done.err}"
    return done


def refused(out: Path, *arguments: object, code: int = 1) -> str:
    """``ckpttool merge ... -o out``, which must fail with one clear error and leave nothing. Returns that error."""
    before = sorted(out.rglob("*")) if out.exists() else None
    done = ckpttool("merge", *arguments, "-o", out)
    assert done.code == code, (done.code, done.err)
    assert done.out == ""
    assert done.err.count("error: ") == 1, done.err
    assert "Traceback" not in done.err
    assert (sorted(out.rglob("*")) if out.exists() else None) == before
    assert not out.with_name(out.name + ".partial").exists()
    return done.err[done.err.index("error: ") :]
