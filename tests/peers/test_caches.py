"""What kind of attention each layer has and what it keeps, against transformers' own config and cache classes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import pytest

from ckpttool.errors import UnsupportedError
from ckpttool.layout.cache import kept_layers, layer_kinds
from ckpttool.layout.family import find_family, load_family
from tests.peers.families.tiny import Architecture, architectures, tiny_config, tiny_model

Config = dict[str, Any]

LISTS = ("layer_types", "layers_block_type", "per_layer_config", "attention_layers", "no_rope_layers")
"""Fields that say the kinds, which saved configs have and published ones may lack."""
CHANGES: list[Config] = [
    {},
    {"num_hidden_layers": 3},
    {"num_hidden_layers": 14},
    {"num_hidden_layers": 7, "sliding_window": None},
    {"num_hidden_layers": 7, "sliding_window": 8},
    {"num_hidden_layers": 7, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
    {"num_hidden_layers": 7, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 9},
    {"num_hidden_layers": 7, "sliding_window": 8, "use_sliding_window": False},
    {"num_hidden_layers": 9, "sliding_window_pattern": 3},
    {"num_hidden_layers": 9, "full_attention_interval": 3},
    {"num_hidden_layers": 9, "no_rope_layer_interval": 3, "sliding_window": 8, "use_sliding_window": True},
    {"num_hidden_layers": 9, "attn_layer_period": 3, "attn_layer_offset": 1},
    {"num_hidden_layers": 5, "attn_layer_indices": [1, 3]},
    {"num_hidden_layers": 5, "full_attn_idxs": [1, 3]},
    {"num_hidden_layers": 5, "global_attn_every_n_layers": 2},
    {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 3 + ["sliding_attention", "full_attention"]},
    {"num_hidden_layers": 5, "layer_types": ["linear_attention", "full_attention"] * 3},
    {"num_hidden_layers": 5, "layers_block_type": ["mamba", "attention", "mamba", "attention", "mamba"]},
    {"num_hidden_layers": 5, "hybrid_override_pattern": "M*-EM"},
    {"num_hidden_layers": 5, "no_rope_layers": [1, 0, 1, 1, 0]},
    {"num_hidden_layers": 5, "layer_group_size": 2},
    {"num_hidden_layers": 5, "local_layer_ids": [0, 2]},
    {"num_hidden_layers": 5, "block_types": ["attention", "recurrent"]},
    {
        "num_hidden_layers": 7, "first_k_dense_replace": 2, "prefix_dense_sliding_window_pattern": 2,
        "sliding_window_pattern": 3,
    },
]  # fmt: skip
POPPED = {
    "sliding_window_pattern", "full_attention_interval", "no_rope_layers", "hybrid_override_pattern",
    "local_layer_ids", "first_k_dense_replace", "layers_block_type", "global_attn_every_n_layers",
}  # fmt: skip
"""Fields that classes take and do not keep."""
OTHERWISE = {"longcat_flash", "mllama_text", "rwkv", "xlstm"}
"""Families whose layers transformers' cache counts in another way: two of each, images, states of their own."""
REFUSED = {
    "lfm2_moe": "layer_types",
    "nemotron_h": "layers_block_type",
    "nemotron_h_omni": "layers_block_type",
    "transformers/nemo_speechlm": "layers_block_type",
}
"""Families, and the field without which none of their models is published."""


def decoders() -> Iterator[Architecture]:
    """One of each model type that may generate text."""
    seen: set[str] = set()
    for architecture in architectures():
        if architecture.group in ("causal", "i2t", "mm", "speech") and architecture.model_type not in seen:
            seen.add(architecture.model_type)
            yield architecture


def part_of(config: Config, model_type: str) -> Config | None:
    """The part of a config that is of this model type."""
    if config.get("model_type") == model_type:
        return config
    inner = (part_of(v, model_type) for v in config.values() if isinstance(v, dict))
    return next((found for found in inner if found is not None), None)


def text_class(architecture: Architecture) -> tuple[Any, Any]:
    """The class of a config, and that of its language model's part. Raises what they raise."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = CONFIG_MAPPING[architecture.model_type]
    try:
        base = cls()
    except Exception:  # noqa: BLE001 - a class whose defaults are not valid together
        base = tiny_config(architecture.model_type, None, architecture.group)
    return base, base.get_text_config(decoder=True)


def variants(architecture: Architecture) -> Iterator[tuple[Config, Config]]:
    """Configs of a class without lists of kinds, and what was changed in each."""
    base, text = text_class(architecture)
    own = getattr(type(text), "layer_types", None)
    may_list = hasattr(type(text), "layer_types") and not isinstance(own, property)
    source = inspect.getsource(inspect.getmodule(type(text)))  # type: ignore[arg-type]
    for change in CHANGES:
        config = json.loads(json.dumps(base.to_dict(), default=str)) | {"architectures": [architecture.cls]}
        part = part_of(config, text.model_type) or config
        for name in LISTS:
            part.pop(name, None)
        layers = next((n for n in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if n in part), "")
        changed = {layers if k == "num_hidden_layers" and layers else k: v for k, v in change.items()}
        known = {*part, *(["layer_types"] if may_list else []), *(n for n in POPPED if n in source)}
        if known.issuperset(changed):
            if changed:
                part.pop("mlp_layer_types", None)
            part |= changed
            yield config, change


def theirs(base: Any, config: Config) -> list[str] | None:
    """The kinds that transformers gives the layers; None for a config that its class refuses."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    try:
        text = type(base).from_dict(json.loads(json.dumps(config))).get_text_config(decoder=True)
        said = getattr(text, "layer_types", None)
        return list(get_layer_types_and_kwargs(text)[0] if said is None else said)
    except Exception:  # noqa: BLE001 - of many classes
        return None


def wrong_kinds(architecture: Architecture) -> list[str]:
    """Where the kinds of a family are not those of transformers."""
    try:
        base = text_class(architecture)[0]
        found = list(variants(architecture))
    except Exception:  # noqa: BLE001 - no language model, or one without layers
        return []
    out = []
    for config, change in found:
        wanted, name = theirs(base, config), find_family(config)
        if wanted is None or name is None:
            continue
        family = load_family(name, config)
        if family.spec.cache is None or name in OTHERWISE:
            return []
        try:
            # GPT-Neo's window limits what a layer looks at, not what it keeps.
            got = [k.replace("local", "full") for k in layer_kinds(family, config)]
        except UnsupportedError:
            lacking = REFUSED.get(name, "")
            if lacking in change or (not lacking and change.get("sliding_window") is None):
                out.append(f"{architecture.name} {change}: refused")
            continue
        if got != wanted:
            out.append(f"{architecture.name} {change}: {got}, and transformers says {wanted}")
    return out


def test_kinds_of_layers_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [w for a in decoders() for w in wrong_kinds(a)] == []


# -- what a forward pass leaves

BATCH, TOKENS = 2, 24
"""Of a pass; a tiny window has 16 tokens."""
TINY: dict[str, Config] = {
    "recurrent_gemma": {"num_hidden_layers": 3},
    "rwkv": {"attention_hidden_size": 64},
    "gemma4_text": {"per_layer_config": ..., "global_head_dim": 32, "head_dim": 16},
}
"""Changes of tiny configs with which a pass works, or of which others know nothing."""
NOT_COUNTED = {
    "cpmant", "deepseek_v4", "glm5_next", "idefics", "inkling_mm_model", "mistral_large4", "mllama", "nemo_speechlm",
    "openai-gpt", "qwen4_exp", "qwen4_exp_text", "unlimited_ocr", "xlstm", "zaya",
}  # fmt: skip
"""Model types whose layers keep what no family describes; --kv refuses them."""
NO_PASS = {
    "blip-2", "granite4_vision", "instructblip", "instructblipvideo", "kosmos-2", "kyutai_speech_to_text",
    "qwen2_5_omni", "qwen3_omni_moe", "voxtral_realtime",
}  # fmt: skip
"""Model types that cannot read text alone, or give no cache back."""


def tensors_in(found: Any, depth: int = 0) -> Iterator[Any]:
    """All tensors of an object that are no single numbers."""
    import torch

    if torch.is_tensor(found):
        if found.dim() > 1:
            yield found
    elif depth < 6:
        inner = found.values() if isinstance(found, dict) else found if isinstance(found, list | tuple) else ()
        for value in inner or getattr(found, "__dict__", {}).values():
            yield from tensors_in(value, depth + 1)


def kept_by(model: Any) -> int:
    """Bytes that a model keeps of a pass."""
    import torch
    from transformers import DynamicCache

    ids = torch.arange(BATCH * TOKENS).reshape(BATCH, TOKENS) % 200 + 20
    # Of all classes only this one keeps its states in its modules.
    own = [m for m in model.modules() if type(m).__name__.startswith("RecurrentGemmaR")]
    given = {"past_key_values": DynamicCache(config=model.config)} if own else {}
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=True, **given)
    names = ("past_key_values", "cache_params", "state")
    found = given or next(c for c in (getattr(out, n, None) for n in names) if c is not None)
    states = [getattr(m, n) for m in own for n in ("conv1d_state", "recurrent_states") if hasattr(m, n)]
    return sum(t.nbytes for t in tensors_in([found, states]))


def in_bf16(config: Config) -> Config:
    return {k: in_bf16(v) if isinstance(v, dict) else "bfloat16" if k == "dtype" else v for k, v in config.items()}


def counted(config: Config) -> int | None:
    """Bytes that the family says for the same; None where it refuses.

    transformers drops the oldest token of a full window after each pass, as the next one takes its place.
    """
    family = load_family(find_family(config) or "none", config)
    try:
        kept = kept_layers(family, config, tp=1)
    except UnsupportedError:
        return None
    out = 0
    for layer in kept:
        tokens = min(TOKENS, layer.window - 1) if layer.window else TOKENS
        out += BATCH * (2 * layer.attentions * sum(layer.tokens.values()) * tokens + layer.state)
    return out


def wrong_bytes(architecture: Architecture) -> list[str]:
    """Where what is counted is not what a pass leaves, for a config as it is saved and for its fields alone that are
    not the default."""
    import torch

    changes = TINY.get(architecture.model_type)
    try:
        model = tiny_model(architecture, changes)
    except ValueError:  # no valid defaults
        return []
    head = {"architectures": [architecture.cls], "model_type": model.config.model_type, "dtype": "bfloat16"}
    saved = in_bf16(json.loads(json.dumps(model.config.to_dict(), default=str))) | head
    short = in_bf16(json.loads(json.dumps(model.config.to_diff_dict(), default=str))) | head
    name = find_family(saved)
    if name is None or load_family(name, saved).spec.cache is None:
        return []
    got = counted(saved)
    if (got is None) != (architecture.model_type in NOT_COUNTED):
        return [f"{architecture.name}: {got} bytes"]
    if got is None or architecture.model_type in NO_PASS:
        return []
    torch.set_num_threads(1)
    wanted = kept_by(model.bfloat16())
    by_form = {"saved": got, "short": counted(short) if architecture.group == "causal" else got}
    return [f"{architecture.name}, {k}: {n} bytes, and {wanted} are kept" for k, n in by_form.items() if n != wanted]


@pytest.mark.parametrize("group", ["causal", pytest.param("i2t", marks=pytest.mark.thorough), "mm"])
def test_what_layers_keep_is_what_a_pass_leaves(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [w for a in decoders() if a.group == group for w in wrong_bytes(a)] == []
