"""What kind of attention each layer has, against transformers' own config classes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import pytest

from ckpttool.errors import UnsupportedError
from ckpttool.layout.cache import layer_kinds
from ckpttool.layout.family import find_family, load_family
from tests.peers.families.tiny import Architecture, architectures, tiny_config

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
