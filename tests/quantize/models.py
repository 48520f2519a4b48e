"""Tiny checkpoints for the tests of ``quantize``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.command import Done, ckpttool
from tests.helpers.tensorfile import Raw, Tensors, save_hf
from tests.quantize.judge import stored

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
FORMATS = FIXTURES / "fp8" / "formats"
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 40,
    "tie_word_embeddings": False,
}
LINEAR = {
    "self_attn.q_proj": (128, 64),
    "self_attn.k_proj": (64, 64),
    "self_attn.v_proj": (64, 64),
    "self_attn.o_proj": (64, 128),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}


def weight(seed: int, shape: tuple[int, ...], dtype: str = "BF16") -> Raw:
    """Normal numbers with outliers, a group, a row and a block of zeros, and a -0."""
    rng = np.random.default_rng(seed)
    x = 0.02 * rng.standard_normal(shape, np.float32)
    x[rng.random(shape) < 0.003] *= 300
    flat = x.reshape(-1, *shape[-2:])
    flat[:, 5:6] = 0
    flat[:, 32:64, 32:64] = 0
    flat[:, 7:8, :32] = 0
    flat[:, 8:9, 3] = -0.0
    return stored(dtype, x)


def linear(dtype: str = "BF16") -> Tensors:
    """The weights of one layer that are to be quantized."""
    at = "model.layers.0."
    return {f"{at}{n}.weight": weight(i, shape, dtype) for i, (n, shape) in enumerate(LINEAR.items())}


def others(dtype: str = "BF16") -> Tensors:
    """What stays as it is."""
    ones = np.ones(64)
    out = {f"model.layers.0.{n}_layernorm.weight": stored(dtype, ones) for n in ("input", "post_attention")}
    out["model.norm.weight"] = stored(dtype, ones)
    out["model.embed_tokens.weight"] = weight(100, (40, 64), dtype)
    out["lm_head.weight"] = weight(101, (40, 64), dtype)
    return out


def llama(folder: Path, dtype: str = "BF16", **config: Any) -> Path:
    """A Llama with one layer."""
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    return save_hf(folder, linear(dtype) | others(dtype), {**LLAMA, "torch_dtype": names[dtype], **config})


def cast(src: Path, dst: Path, *options: object) -> Done:
    """``ckpttool quantize``, which must succeed."""
    done = ckpttool("quantize", src, dst, *options)
    assert done.code == 0, f"quantize {src} {dst} {' '.join(map(str, options))}\n{done.err}"
    return done


def refused(command: str, src: Path, dst: Path, *options: object, code: int = 1) -> str:
    """A command that must fail with one clear error and leave nothing. Returns the error."""
    done = ckpttool(command, src, dst, *options)
    assert done.code == code, (done.code, done.out, done.err)
    assert done.out == ""
    assert done.err.count("error: ") == 1, done.err
    assert "Traceback" not in done.err
    assert not dst.exists()
    assert not dst.with_name(dst.name + ".partial").exists()
    return done.err[done.err.index("error: ") :]


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return found


def sound(folder: Path) -> None:
    """``inspect --check --values`` finds no error."""
    done = ckpttool("inspect", folder, "--check", "--values", "--json")
    found: Mapping[str, Any] = json.loads(done.out)
    assert [f for f in found["findings"] if f["severity"] == "error"] == [], found["findings"]
    assert done.code == 0, done.err
