"""Fields of config.json. A model with other towers has those of its text model in ``text_config``."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ckpttool.errors import LayoutError, UnsupportedError

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
"""Fields that count the decoder's layers."""
PREDICTION = (
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "mtp_num_hidden_layers",
    "mtp_num_layers",
    "num_mtp_modules",
)
"""Fields that count layers of multi-token prediction."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields that count the routed experts of a layer."""
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tok_embeddings.weight")
HEADS = ("lm_head.weight", "embed_out.weight", "output_layer.weight", "output.weight", "head.weight")
"""Ends of names of the embedding, and names of the head, whoever names them."""
QUANTIZATION = ("quantization_config", "compression_config")
"""Under which a config speaks of quantization."""
TIED = "tie_word_embeddings"
_ADAPTED = re.compile(r"\.(?:lora_(?:A|B|embedding_A|embedding_B|magnitude_vector)|base_layer|modules_to_save)\.")
"""Parts of the names of a model of PEFT that is not merged."""


def missing_config(why: str, root: object, *where: str, more: str = "") -> LayoutError:
    """The error where config.json is missing, ``why`` is what depends on it.

    ``root`` is where it belongs, "" or None if unknown; ``more`` continues the hint.
    """
    place = f"{root}/config.json" if root else ""
    return LayoutError(
        f"config.json is missing, and {why}", where=[place, *where], hint="put the model's config.json there" + more
    )


def config_places(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The places of a text model's fields, the first that has one counts."""
    text = config.get("text_config")
    return [config, *([text] if isinstance(text, Mapping) else [])]


def is_part(name: str, value: object) -> bool:
    """Whether a field of a config is the config of a model inside it (``text_config``, ``decoder``)."""
    return isinstance(value, dict) and name not in QUANTIZATION and (name.endswith("_config") or "model_type" in value)


def config_field(config: Mapping[str, Any], name: str) -> Any:
    """The config's value under this name; None where it has none."""
    return next((p[name] for p in config_places(config) if p.get(name) is not None), None)


def values_at(places: Iterable[Mapping[str, Any]], path: str) -> list[Any]:
    """The values under a name, or a path ``part.field``, in each place that has it, null included."""
    return [v for p in places for v in _at(p, path)]


def _at(place: Mapping[str, Any], path: str) -> list[Any]:
    if path in place:
        return [place[path]]
    part, _, rest = path.partition(".")
    inner = place.get(part)
    return _at(inner, rest) if rest and isinstance(inner, Mapping) else []


def config_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """All that it says of the text model, in one, for a format that says it in words of its own.

    Raises UnsupportedError where fields are something else in some layers.
    """
    if any(p.get("per_layer_config") for p in config_places(config)):
        raise UnsupportedError(
            "layers of the model differ (`per_layer_config` of config.json), which this format's own config cannot say",
            hint="formats with Hugging Face's config.json can: --to hf, ranks or vllm",
        )
    outer, *inner = config_places(config)
    return {**(inner[0] if inner else {}), **{k: v for k, v in outer.items() if k != "text_config"}}


def whole_number(config: Mapping[str, Any], *names: str) -> int | None:
    """The first whole number under one of these names; None where there is none."""
    return next((p[name] for p in config_places(config) for name in names if type(p.get(name)) is int), None)


def ties_head(config: Mapping[str, Any]) -> bool | None:
    """Whether the output head is the embedding; None where the config does not say."""
    return next((bool(p[TIED]) for p in config_places(config) if TIED in p), None)


def quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config's section about quantization; {} if none."""
    for place in config_places(config):
        for name in QUANTIZATION:
            if isinstance(found := place.get(name), Mapping) and found:
                return found
    return {}


def auto_class(config: Mapping[str, Any], names: Collection[str]) -> str:
    """The class of transformers that loads a model whose tensors have these names; "" with an adapter in the model.

    from_pretrained gives parameters that it does not find random values, and says no more than a warning.
    """
    if any(_ADAPTED.search(n) for n in names):
        return ""
    architectures = config.get("architectures")
    first = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    causal = first.endswith(("ForCausalLM", "LMHeadModel")) or (not first and "lm_head.weight" in names)
    return "AutoModelForCausalLM" if causal else "AutoModel"
