"""Tiny models with random weights, one or more for every family, built by transformers itself.

``VARIANTS`` names them; each is a model type and the config fields that make it small, plus the cases worth having
beside the plain one (biases, tied embeddings, one key/value head, no query latent). Sizes differ from each other
where the architecture allows it, so that a cut along the wrong axis shows as a wrong shape. torch and transformers
are imported inside the functions: the names of the variants are free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SEED = 20_240_229
TOKENS = [[3, 17, 81, 99, 150, 140, 2, 7, 55, 120, 31, 64], [44, 0, 156, 9, 78, 21, 133, 100, 5, 60, 111, 38]]
"""Two sentences with tokens from all quarters of the smallest vocabulary."""

_PLAIN: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,  # torch checks a padding index against the rows of a rank, which may be fewer
}
_WIDE_HEADS = {"head_dim": 24}
"""Wider than hidden / heads, as in many models, so that nothing can be derived from the hidden size."""
_LATENT: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
_DEEPSEEK = {
    **_LATENT,
    **_EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_ERNIE_MOE = {
    **_WIDE_HEADS,
    "moe_intermediate_size": 48,
    "moe_num_experts": 8,
    "moe_num_shared_experts": 2,
    "moe_k": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 1,
    "moe_layer_interval": 1,
}
_GPT2 = {
    "vocab_size": 157,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "n_inner": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Tiny:
    """How to build one small model."""

    model_type: str
    fields: dict[str, Any] = field(default_factory=dict)
    """Config fields, on top of the plain ones unless ``alone``."""
    alone: bool = False


VARIANTS: dict[str, Tiny] = {
    "llama": Tiny("llama", _WIDE_HEADS),
    # Vocabulary that no number of ranks divides, embeddings stored once, a bias on every projection
    "llama_tied": Tiny(
        "llama", {"vocab_size": 157, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "mistral": Tiny("mistral", {**_WIDE_HEADS, "sliding_window": None}),
    "qwen2": Tiny("qwen2"),
    "qwen3": Tiny("qwen3", _WIDE_HEADS),
    "qwen2_moe": Tiny(
        "qwen2_moe",
        {**_EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 80, "mlp_only_layers": [0]},
    ),
    "qwen3_moe": Tiny("qwen3_moe", {**_WIDE_HEADS, **_EXPERTS, "num_experts": 8, "mlp_only_layers": [0]}),
    "mixtral": Tiny("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    # V2-Lite has no latent for the queries.
    "deepseek_v2_lite": Tiny(
        "deepseek_v2", {**_DEEPSEEK, "q_lora_rank": None, "topk_method": "group_limited_greedy", "mlp_bias": True}
    ),
    "deepseek_v2": Tiny("deepseek_v2", {**_DEEPSEEK, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": Tiny("deepseek_v3", {**_DEEPSEEK, "attention_bias": True}),
    "deepseek_v32": Tiny(
        "deepseek_v32",
        {
            **_DEEPSEEK,
            "mlp_layer_types": ["dense", "sparse"],
            "index_n_heads": 4,
            "index_head_dim": 20,
            "index_topk": 16,
        },
    ),
    "gpt_oss": Tiny(
        "gpt_oss",
        {
            **_WIDE_HEADS,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "glm4_moe": Tiny(
        "glm4_moe",
        {
            **_WIDE_HEADS,
            **_EXPERTS,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "ernie4_5": Tiny("ernie4_5", {**_WIDE_HEADS, "use_bias": True, "tie_word_embeddings": False}),
    "ernie4_5_moe": Tiny("ernie4_5_moe", {**_ERNIE_MOE, "use_bias": True, "tie_word_embeddings": False}),
    # One key/value head for all ranks, embeddings stored once
    "gemma": Tiny("gemma", {**_WIDE_HEADS, "num_key_value_heads": 1}),
    "gemma2": Tiny("gemma2", {**_WIDE_HEADS, "query_pre_attn_scalar": 24, "sliding_window": 16}),
    "gemma3_text": Tiny("gemma3_text", {**_WIDE_HEADS, "query_pre_attn_scalar": 24, "sliding_window": 16}),
    "nemotron": Tiny("nemotron", _WIDE_HEADS),
    "nemotron_tied": Tiny("nemotron", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "phi3": Tiny("phi3", {"original_max_position_embeddings": 128}),
    "gpt_neox": Tiny("gpt_neox", {k: v for k, v in _PLAIN.items() if k != "num_key_value_heads"}, alone=True),
    "gpt2": Tiny("gpt2", _GPT2, alone=True),
}


def tiny_config(variant: str, **overrides: Any) -> Any:
    """The transformers config of a variant; ``overrides`` come last."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tiny = VARIANTS[variant]
    fields = {**({} if tiny.alone else _PLAIN), **tiny.fields, **overrides}
    return CONFIG_MAPPING[tiny.model_type](**fields)


def tiny_model(variant: str, *, dtype: str = "float32", **overrides: Any) -> Any:
    """The model of a variant on the CPU, every parameter and stored buffer random, norms and biases too."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_config(variant, **overrides), experts_implementation="eager")
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
            if tensor.is_floating_point():
                values = torch.randn(tensor.shape, generator=generator)
                norm = tensor.dim() == 1 and name.endswith("weight")  # every other weight has two axes or more
                centre = 1.0 if norm and "gemma" not in variant else 0.0  # Gemma adds 1 itself
                tensor.copy_(centre + 0.15 * values)
    return model.to(getattr(torch, dtype)).eval()


def save_tiny(
    variant: str,
    folder: Path,
    *,
    published: bool = True,
    dtype: str = "float32",
    max_shard_size: str = "50GB",
    **overrides: Any,
) -> Path:
    """Write a checkpoint of a variant and return its folder.

    ``published`` chooses the names of files on the Hub, with one tensor per expert; otherwise the names are those of
    transformers' modules, with all experts in one tensor.
    """
    model = tiny_model(variant, dtype=dtype, **overrides)
    model.save_pretrained(folder, max_shard_size=max_shard_size, save_original_format=published)
    return folder
