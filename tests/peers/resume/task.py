"""What every framework trains: two tiny models, their first weights, the data and the numbers of AdamW.

Only numpy: Paddle's processes, which have no torch, read the same.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.tensorfile import Raw, write

Bits = np.ndarray[Any, np.dtype[Any]]

STEPS = 5
"""Before a run moves, and after."""
LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1
"""Of AdamW. The rate is constant, and everything decays: universal checkpoints give all of ZeRO-3 one group."""
BATCH, LENGTH = 4, 24
"""Sentences of a step, over all ranks, and tokens of each."""
VOCAB = 130

_PLAIN: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 8, "mlp_bias": False, **_PLAIN},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "head_dim": 16,
        "mlp_only_layers": [],
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
        "sliding_window": None,
        "use_sliding_window": False,
        **_PLAIN,
    },
}


@dataclass(frozen=True)
class Job:
    """What one framework does: begin, train, save."""

    model: str
    """A key of ``CONFIGS``."""
    bf16: bool
    """Weights of bfloat16 beside masters, where the framework has such; else all is float32."""
    weights: str
    """Folder of the first weights, as the framework reads them."""
    load: str = ""
    """A checkpoint to resume from."""
    save: str = ""
    """Where to save after ``STEPS`` steps."""
    first: int = 0
    last: int = 2 * STEPS
    """Steps ``first`` to ``last`` are taken."""
    cold: bool = False
    """Forget the optimizer's state after loading: what that costs shows what a comparison can see."""

    def text(self, **more: Any) -> str:
        return json.dumps(asdict(self) | more)


def sentences(step: int) -> Bits:
    """Tokens of a step, int64 [BATCH, LENGTH + 1]: all but the last are read, all but the first are predicted.

    None of them is 0, which some models of Paddle take for padding.
    """
    rng = np.random.default_rng(1000 + step)
    first = rng.integers(0, VOCAB, (BATCH, 1))
    walk = rng.integers(1, 4, (BATCH, LENGTH))  # the next token is one of three: there is something to learn
    return 1 + np.concatenate([first, walk], 1).cumsum(1) % (VOCAB - 1)


def shapes(model: str) -> dict[str, tuple[int, ...]]:
    """Every parameter as Hugging Face publishes it."""
    c = CONFIGS[model]
    hidden, vocab, d = c["hidden_size"], c["vocab_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for n in range(c["num_hidden_layers"]):
        at = f"model.layers.{n}."
        out[f"{at}input_layernorm.weight"] = out[f"{at}post_attention_layernorm.weight"] = (hidden,)
        for name, shape in {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}.items():
            out[f"{at}self_attn.{name}_proj.weight"] = shape
        if "num_experts" not in c:
            out |= _mlp(f"{at}mlp.", hidden, c["intermediate_size"])
            continue
        out[f"{at}self_attn.q_norm.weight"] = out[f"{at}self_attn.k_norm.weight"] = (d,)
        out[f"{at}mlp.gate.weight"] = (c["num_experts"], hidden)
        for e in range(c["num_experts"]):
            out |= _mlp(f"{at}mlp.experts.{e}.", hidden, c["moe_intermediate_size"])
    return out | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def _mlp(at: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    widths = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return {f"{at}{name}_proj.weight": shape for name, shape in widths.items()}


def qkv_rows(at: str, model: str, tp: int = 1) -> dict[str, Bits]:
    """Rows of q, k and v in a rank's fused tensor: for each key/value head its query heads, itself, its value head."""
    c = CONFIGS[model]
    d, groups = c["head_dim"], c["num_key_value_heads"]
    queries = c["num_attention_heads"] // groups * d
    starts = np.arange(groups // tp)[:, None] * (queries + 2 * d)
    spans = {"q": (0, queries), "k": (queries, d), "v": (queries + d, d)}
    return {f"{at}.{x}_proj.weight": (starts + begin + np.arange(n)).ravel() for x, (begin, n) in spans.items()}


def first_weights(model: str, folder: Path) -> Path:
    """The weights that all runs begin with, as a Hugging Face checkpoint. They are numbers of bfloat16."""
    rng = np.random.default_rng(7)
    tensors = {}
    for name, shape in shapes(model).items():
        norm = "norm" in name
        values = (1.0 if norm else 0.0) + (0.05 if norm else 0.15) * rng.standard_normal(shape)
        bits = values.astype("<f4").view("<u4") & np.uint32(0xFFFF0000)
        tensors[name] = Raw("F32", bits)
    write(folder / "model.safetensors", tensors, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**CONFIGS[model], "torch_dtype": "float32"}), encoding="utf-8")
    return folder
