"""What Megatron-LM is told to train a model of Hugging Face: TransformerConfig's fields, GPTModel's, and ``args``.

Written from the papers and configs of the models, and proven by equal logits (tests/peers/test_megatron.py); what
ckpttool itself knows of this is not used.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

Config = Mapping[str, Any]
"""config.json."""
GATED = {"gated_linear_unit": True, "activation_func": functional.silu}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_dtype": "fp32"}


@dataclass
class Told:
    """``transformer`` for TransformerConfig, ``gpt`` for GPTModel; with ``mla`` it is an MLATransformerConfig."""

    transformer: dict[str, Any]
    gpt: dict[str, Any]
    mla: bool = False
    yarn: dict[str, Any] = field(default_factory=dict)
    """What Megatron-LM puts into the config by hand for position_embedding_type yarn."""


def told(c: Config) -> Told:
    """Raises KeyError for a kind of model that is not here."""
    return KINDS[c["model_type"]](c)


def dense(c: Config) -> Told:
    """Llama, Mistral; what all others differ from."""
    heads = c["num_attention_heads"]
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    transformer = {
        "num_layers": c["num_hidden_layers"],
        "hidden_size": c["hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": c.get("num_key_value_heads") or heads,
        "kv_channels": c.get("head_dim") or c["hidden_size"] // heads,
        "ffn_hidden_size": c["intermediate_size"],
        "add_bias_linear": bool(c.get("mlp_bias", False)),
        "add_qkv_bias": bool(c.get("attention_bias", False)),
        "normalization": "RMSNorm",
        "layernorm_epsilon": c.get("rms_norm_eps", 1e-5),
        **GATED,
    }
    gpt = {
        "position_embedding_type": "rope",
        "rotary_base": rope.get("rope_theta") or c.get("rope_theta", 10000.0),
        "rotary_percent": rope.get("partial_rotary_factor") or c.get("partial_rotary_factor", 1.0),
        "share_embeddings_and_output_weights": c.get("tie_word_embeddings", False),
    }
    if rope.get("rope_type") == "llama3":
        gpt |= {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    return Told(transformer, gpt)


def qwen2(c: Config) -> Told:
    out = dense(c)
    out.transformer["add_qkv_bias"] = True
    return out


def qwen3(c: Config) -> Told:
    out = dense(c)
    out.transformer["qk_layernorm"] = True
    return out


def experts(out: Told, c: Config, size: str) -> Told:
    out.transformer |= {
        "num_moe_experts": next(c[k] for k in ("num_experts", "num_local_experts", "n_routed_experts") if k in c),
        "moe_router_topk": c["num_experts_per_tok"],
        "moe_ffn_hidden_size": c[size],
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
        "moe_router_pre_softmax": not c.get("norm_topk_prob", True),
        # "moe_grouped_gemm": Transformer Engine's, or CUDA's
    }
    return out


def qwen3_moe(c: Config) -> Told:
    out = experts(qwen3(c), c, "moe_intermediate_size")
    if dense_layers := c.get("mlp_only_layers"):
        out.transformer["moe_layer_freq"] = [int(i not in dense_layers) for i in range(c["num_hidden_layers"])]
    return out


def mixtral(c: Config) -> Told:
    return experts(dense(c), c, "intermediate_size")


def sigmoid_experts(out: Told, c: Config) -> Told:
    """DeepSeek-V3's routing, its shared experts, and the dense layers that come first."""
    experts(out, c, "moe_intermediate_size")
    shared, first = c.get("n_shared_experts") or 0, c.get("first_k_dense_replace", 0)
    out.transformer |= {
        **SIGMOID,
        "moe_router_pre_softmax": False,
        "moe_router_topk_scaling_factor": c["routed_scaling_factor"],
        "moe_shared_expert_intermediate_size": shared * c["moe_intermediate_size"] or None,
    }
    if c.get("n_group", 1) > 1:
        out.transformer |= {"moe_router_num_groups": c["n_group"], "moe_router_group_topk": c["topk_group"]}
    if first:
        out.transformer["moe_layer_freq"] = [int(i >= first) for i in range(c["num_hidden_layers"])]
    return out


def deepseek_v3(c: Config) -> Told:
    out = sigmoid_experts(dense(c), c)
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    out.transformer |= {
        "num_query_groups": c["num_attention_heads"],
        "kv_channels": c["v_head_dim"],
        "qk_layernorm": True,
        "multi_latent_attention": True,
        "q_lora_rank": c["q_lora_rank"],
        "kv_lora_rank": c["kv_lora_rank"],
        "qk_head_dim": c["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": c["qk_rope_head_dim"],
        "v_head_dim": c["v_head_dim"],
        "rotary_base": out.gpt["rotary_base"],
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
    }
    if rope.get("rope_type", rope.get("type")) == "yarn":
        names = {"rotary_scaling_factor": "factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
        names |= {"mscale": "mscale", "mscale_all_dim": "mscale_all_dim"}
        names["original_max_position_embeddings"] = "original_max_position_embeddings"
        out.transformer |= {"rope_type": "yarn", **{k: rope[v] for k, v in names.items() if v in rope}}
    out.mla = True
    return out


def glm4_moe(c: Config) -> Told:
    out = sigmoid_experts(dense(c), c)
    out.transformer["qk_layernorm"] = c.get("use_qk_norm", False)
    return out


def gpt_oss(c: Config) -> Told:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    out = experts(dense(c), c, "intermediate_size")
    rope = c.get("rope_parameters") or c["rope_scaling"]
    out.transformer |= {
        "add_bias_linear": True,
        "activation_func": quick_gelu,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": c.get("swiglu_limit", 7.0),
        "softmax_type": "learnable",
        "window_size": (c["sliding_window"] - 1, 0),
        "window_attn_skip_freq": [int(t != "full_attention") for t in c["layer_types"]],
    }
    if rope["rope_type"] != "yarn":
        return out
    out.gpt["position_embedding_type"] = "yarn"
    out.yarn = {
        "yarn_rotary_scaling_factor": rope["factor"],
        "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
        "yarn_beta_fast": rope["beta_fast"],
        "yarn_beta_slow": rope["beta_slow"],
        "yarn_mscale": rope.get("mscale"),
        "yarn_mscale_all_dim": rope.get("mscale_all_dim"),
        "yarn_correction_range_round_to_int": rope.get("truncate", True),
    }
    return out


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    return functional.relu(x).square()


def nemotron(c: Config) -> Told:
    """Its norms add 1 to their weights, which torch's own cannot (see ``ranks.build``)."""
    out = dense(c)
    out.transformer |= {
        "gated_linear_unit": False,
        "activation_func": squared_relu,
        "normalization": "LayerNorm",
        "layernorm_epsilon": c["norm_eps"],
    }
    return out


def gpt2(c: Config) -> Told:
    heads = c["n_head"]
    transformer = {
        "num_layers": c["n_layer"],
        "hidden_size": c["n_embd"],
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "kv_channels": c["n_embd"] // heads,
        "ffn_hidden_size": c.get("n_inner") or 4 * c["n_embd"],
        "add_bias_linear": True,
        "normalization": "LayerNorm",
        "layernorm_epsilon": c["layer_norm_epsilon"],
        "gated_linear_unit": False,
        "activation_func": functools.partial(functional.gelu, approximate="tanh"),
    }
    gpt = {"position_embedding_type": "learned_absolute", "share_embeddings_and_output_weights": True}
    gpt["share_embeddings_and_output_weights"] = c.get("tie_word_embeddings", True)
    return Told(transformer, gpt)


KINDS = {
    "llama": dense,
    "mistral": dense,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "mixtral": mixtral,
    "deepseek_v3": deepseek_v3,
    "glm4_moe": glm4_moe,
    "gpt_oss": gpt_oss,
    "nemotron": nemotron,
    "gpt2": gpt2,
}

SAME = {
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size"),
    *("add_bias_linear", "add_qkv_bias", "normalization", "qk_layernorm", "multi_latent_attention", "q_lora_rank"),
    *("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "rotary_scaling_factor", "original_max_position_embeddings", "moe_router_topk"),
    *("moe_ffn_hidden_size", "moe_router_load_balancing_type", "moe_token_dispatcher_type", "moe_router_pre_softmax"),
    *("moe_router_score_function", "moe_router_enable_expert_bias", "moe_router_dtype", "moe_router_num_groups"),
    *("moe_router_group_topk", "moe_router_topk_scaling_factor", "moe_shared_expert_intermediate_size"),
    *("softmax_type", "window_size", "window_attn_skip_freq", "glu_linear_offset", "activation_func_clamp_value"),
    *("mtp_num_layers", "moe_grouped_gemm"),
}
"""Fields of TransformerConfig that arguments of Megatron-LM are named like."""


def arguments(c: Config, known: Told, transformer: Config, padded: int, **more: Any) -> argparse.Namespace:
    """``args`` as Megatron-LM puts them into a checkpoint (those that matter of some hundred)."""
    act, gated = transformer["activation_func"], transformer["gated_linear_unit"]
    out: dict[str, Any] = {k: v for k, v in transformer.items() if k in SAME}
    out |= {
        "group_query_attention": transformer["num_query_groups"] != transformer["num_attention_heads"],
        "max_position_embeddings": c.get("max_position_embeddings") or c["n_positions"],
        "seq_length": c.get("max_position_embeddings") or c["n_positions"],
        "position_embedding_type": known.gpt["position_embedding_type"],
        "add_position_embedding": True,
        "rotary_base": int(known.gpt.get("rotary_base", 10000)),
        "rotary_percent": known.gpt.get("rotary_percent", 1.0),
        "rotary_interleaved": False,
        "use_rope_scaling": known.gpt.get("rope_scaling", False),
        "rope_scaling_factor": known.gpt.get("rope_scaling_factor", 8.0),
        "swiglu": gated and act is functional.silu,
        "quick_geglu": gated and act is not functional.silu,
        "squared_relu": act is squared_relu,
        "openai_gelu": False,
        "norm_epsilon": transformer["layernorm_epsilon"],
        "apply_layernorm_1p": c["model_type"] == "nemotron",
        "untie_embeddings_and_output_weights": not known.gpt["share_embeddings_and_output_weights"],
        "vocab_size": c["vocab_size"],
        "padded_vocab_size": padded,
        "num_experts": transformer.get("num_moe_experts"),
        "moe_layer_freq": transformer.get("moe_layer_freq", 1),
        "spec": None,
        "tokenizer_type": "HuggingFaceTokenizer",
    }
    unprefixed = {"yarn_rotary_scaling_factor", "yarn_mscale", "yarn_mscale_all_dim"}
    out |= {k.removeprefix("yarn_") if k in unprefixed else k: v for k, v in known.yarn.items()}
    return argparse.Namespace(**(out | more))
