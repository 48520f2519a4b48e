"""Models whose config says by number what each layer is, and what those numbers mean.

The tensors of a layer are its norm only: what counts here is which layers a merge leaves, and what the config beside
them then says. tests/peers compares ``kinds`` with the config classes of transformers.
"""

from __future__ import annotations

from random import Random
from typing import Any

from tests.walk.bits import Raw, made

HIDDEN, VOCAB = 4, 6

ARCHITECTURES = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "jamba": "JambaForCausalLM",
    "bamba": "BambaForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
}
"""By model_type."""

_PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def config(kind: str, layers: int, r: Random) -> dict[str, Any]:
    """The config of a model of so many layers; fields that have a default are there or not."""

    def some() -> list[int]:
        return sorted(r.sample(range(layers), r.randint(1, layers)))

    def optional(**fields: object) -> dict[str, object]:
        return {name: value for name, value in fields.items() if r.random() < 0.7}

    period, step = r.choice([2, 3]), r.choice([1, 2, 3])
    said: dict[str, object] = {}
    if kind in ("gemma3_text", "cohere2", "exaone4"):
        said = optional(sliding_window_pattern=period) | {"sliding_window": 8}
    elif kind == "smollm3":
        said = optional(no_rope_layer_interval=period) | {"use_sliding_window": r.choice([True, False])}
        said |= {"sliding_window": 8} if r.random() < 0.5 else {}
    elif kind == "llama4_text":
        said = optional(no_rope_layer_interval=period, interleave_moe_layer_step=step)
        said |= {"moe_layers": some()} if r.random() < 0.4 else {}
    elif kind == "jamba":
        said = {"attn_layer_period": period, "attn_layer_offset": r.randrange(period), "num_experts": 4}
        said |= {"expert_layer_period": step, "expert_layer_offset": r.randrange(step)}
    elif kind == "bamba":
        said = {"attn_layer_indices": some()}
    elif kind == "lfm2":
        said = {"full_attn_idxs": some()}
    elif kind == "nemotron_h":
        said = {"hybrid_override_pattern": "".join(r.choices("ME*-", k=layers))}
    elif kind == "qwen3_next":
        said = optional(full_attention_interval=period)
    elif kind == "qwen2_moe":
        said = {"decoder_sparse_step": step, "mlp_only_layers": r.choice([[], some()]), "num_experts": 4}
        said |= {"use_sliding_window": r.choice([True, False]), "max_window_layers": r.randint(0, layers)}
    elif kind == "deepseek_v3":
        said = {"first_k_dense_replace": r.randint(0, layers)}
    elif kind == "ernie4_5_moe":
        start = r.randrange(layers)
        said = {"moe_layer_start_index": start, "moe_layer_end_index": r.randrange(start, layers)}
        said |= {"moe_layer_interval": step}
    if r.random() < 0.4:
        said["eos_token_id"] = list(range(layers))  # a list as long as the layers that is none of layers
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_hidden_layers": layers,
        "tie_word_embeddings": False,  # which some of these take for granted
        **said,
    }


def tensors(said: dict[str, Any], ident: int) -> dict[str, Raw]:
    """The checkpoint of a config; models of different ``ident`` differ in every element."""
    prefix = "backbone" if said["model_type"] == "nemotron_h" else "model"
    names = [f"{prefix}.{'embeddings' if prefix == 'backbone' else 'embed_tokens'}.weight", "lm_head.weight"]
    out = {name: made(64 * ident + i, "BF16", (VOCAB, HIDDEN)) for i, name in enumerate(names)}
    for layer in range(said["num_hidden_layers"]):
        out[layer_name(said, layer)] = made(64 * ident + 8 + layer, "BF16", (HIDDEN,))
    return out


def layer_name(said: dict[str, Any], layer: int) -> str:
    """The one tensor of a layer."""
    if said["model_type"] == "nemotron_h":
        return f"backbone.layers.{layer}.norm.weight"
    return f"model.layers.{layer}.input_layernorm.weight"


def kinds(said: dict[str, Any]) -> list[tuple[str, ...]]:
    """What each layer is: its attention, its feed-forward part, whether it turns positions, as far as they differ."""
    count = said["num_hidden_layers"]
    listed = said.get("layer_types") or said.get("layers_block_type")
    if listed and len(listed) != count:
        raise ValueError(f"{len(listed)} layer types for {count} layers")
    out = [_kind(said, layer) for layer in range(count)]
    return [(kind, *rest[1:]) for kind, rest in zip(listed, out, strict=True)] if listed else out


def _kind(said: dict[str, Any], layer: int) -> tuple[str, ...]:
    def every(field: str, default: int) -> bool:
        return (layer + 1) % int(said.get(field, default)) == 0

    def attention(full: bool, other: str = "sliding_attention") -> str:
        return "full_attention" if full else other

    kind = said["model_type"]
    if kind == "gemma2":
        return (attention(layer % 2 == 1),)
    if kind in ("gemma3_text", "cohere2", "exaone4"):
        return (attention(every("sliding_window_pattern", 6 if kind == "gemma3_text" else 4)),)
    if kind in ("smollm3", "llama4_text"):
        turns = said.get("no_rope_layers")
        rope = bool(turns[layer]) if turns else not every("no_rope_layer_interval", 4)
        if kind == "smollm3":
            slides = said["use_sliding_window"] and said.get("sliding_window") is not None and not rope
            return (attention(not slides), str(rope))
        listed = said.get("moe_layers")
        moe = layer in listed if listed is not None else every("interleave_moe_layer_step", 1)
        return (attention(not rope, "chunked_attention"), str(rope), str(moe))
    if kind == "jamba":
        full = layer % said["attn_layer_period"] == said["attn_layer_offset"]
        moe = layer % said["expert_layer_period"] == said["expert_layer_offset"] and said["num_experts"] > 1
        return (attention(full, "linear_attention"), str(moe))
    if kind == "bamba":
        return (attention(layer in said["attn_layer_indices"], "linear_attention"),)
    if kind == "lfm2":
        return (attention(layer in said["full_attn_idxs"], "conv") if "full_attn_idxs" in said else "full_attention",)
    if kind == "nemotron_h":
        pattern = said.get("hybrid_override_pattern", "")
        return (_PATTERN[pattern[layer]] if layer < len(pattern) else "beyond the pattern",)
    if kind == "qwen3_next":
        return (attention(every("full_attention_interval", 4), "linear_attention"),)
    if kind == "deepseek_v3":
        return ("full_attention", str(layer >= said["first_k_dense_replace"]))
    if kind == "ernie4_5_moe":
        inside = said["moe_layer_start_index"] <= layer <= said["moe_layer_end_index"]
        return ("full_attention", str(inside and every("moe_layer_interval", 1)))
    slides = said["use_sliding_window"] and layer % 2 == 0 and layer < said["max_window_layers"]
    moe = every("decoder_sparse_step", 1) and layer not in said["mlp_only_layers"]
    return (attention(not slides), str(moe))
