"""``params.json`` of Meta's and Mistral's own files, and the fields of config.json that say the same.

Sources: llama-models (``ModelArgs``, ``FeedForward``, ``apply_scaling``), mistral-inference (``TransformerArgs``,
``MoeArgs``), and transformers' ``convert_llama_weights_to_hf.py`` for what a config says beyond them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpttool.core.words import some
from ckpttool.errors import IncompleteError, UnsupportedError
from ckpttool.formats.config import config_fields
from ckpttool.formats.torch import meta_llama4
from ckpttool.formats.torch.meta_numbers import cannot, hidden_rows, number, rate, real

_META = {"multiple_of", "ffn_dim_multiplier", "use_scaled_rope", "rope_scaling_factor"}
_MISTRAL = {"head_dim", "hidden_dim", "sliding_window", "moe", "model_type"}
_BOTH = {"dim", "n_layers", "n_heads", "n_kv_heads", "norm_eps", "rope_theta", "vocab_size"}
_POSITIONS = "max_position_embeddings"
_OF_A_RUN = {
    *("max_seq_len", "max_batch_size", _POSITIONS, "model_parallel_size", "causal", "use_biases"),
    *("tied_embeddings", "quantization_args", "lora_args", "vision_args"),
}
"""Fields without a meaning for the tensors of a text model while they are null, false or only a limit."""
_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_SCALED = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ORIGINAL = 8192
"""Positions that the models were trained on whose rotary embeddings are scaled."""


def config_of(
    params: Mapping[str, Any], *, rows: Mapping[str, int], dtype: str, tied: bool, where: str
) -> tuple[dict[str, Any], list[str]]:
    """config.json in Hugging Face's fields, and notes on what params.json does not say.

    ``rows`` are those of ``feed_forward`` (one expert's) and ``vocab`` in whole tensors, ``tied`` whether the head is
    the embedding, ``dtype`` is torch's word. Raises IncompleteError for a field that must be there, CorruptError for
    one that is no number, UnsupportedError for models of other kinds.
    """
    other = [k for k, v in params.items() if k not in _META | _MISTRAL | _BOTH | _OF_A_RUN and v not in (None, False)]
    other += [k for k in ("use_biases", "quantization_args", "lora_args", "vision_args") if params.get(k)]
    if other:
        raise UnsupportedError(
            f"params.json describes a model of a kind that is not known: {some(other)}",
            where=where,
            hint="known are Llama 1 to 4, Mistral and Mixtral; give the Hugging Face form of this one",
        )
    mistral, moe = "hidden_dim" in params, params.get("moe")
    kind = "mixtral" if isinstance(moe, Mapping) else "mistral" if mistral else "llama"
    dim, heads = (number(params, k, where) for k in ("dim", "n_heads"))
    notes = []
    config: dict[str, Any] = {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "hidden_size": dim,
        "intermediate_size": rows["feed_forward"],
        "num_hidden_layers": number(params, "n_layers", where),
        "num_attention_heads": heads,
        "num_key_value_heads": number(params, "n_kv_heads", where) if params.get("n_kv_heads") else heads,
        "head_dim": number(params, "head_dim", where) if params.get("head_dim") else dim // heads,
        "vocab_size": rows["vocab"],
        "hidden_act": "silu",
        "rms_norm_eps": real(params, "norm_eps", where) or 1e-5,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
    }
    if isinstance(moe, Mapping):
        config["num_local_experts"] = number(moe, "num_experts", where)
        config["num_experts_per_tok"] = number(moe, "num_experts_per_tok", where)
    window = params.get("sliding_window")
    if mistral:
        # The first model has it as a text.
        text = isinstance(window, str) and window.isdecimal()
        said = {"sliding_window": int(window)} if text and isinstance(window, str) else params
        config["sliding_window"] = number(said, "sliding_window", where) if window else None
    theta = real(params, "rope_theta", where)
    if theta is None:
        # mistral-inference takes 1,000,000 but for the first models, which are those with a window.
        theta = 1_000_000.0 if mistral and not window else 10_000.0
        notes.append(f"rope_theta is not in params.json: {theta:,.0f}, which is what {kind}'s own software takes then")
    config["rope_theta"] = theta
    positions = number(params, _POSITIONS, where) if params.get(_POSITIONS) else 0
    if params.get("use_scaled_rope"):
        # Only the small models of Llama 3.2, which are tied, have another factor than 3.1's.
        factor = real(params, "rope_scaling_factor", where) or (32.0 if tied else 8.0)
        config["rope_scaling"] = {**_SCALED, "factor": factor, "original_max_position_embeddings": _ORIGINAL}
        positions = positions or 16 * _ORIGINAL
        if not params.get("rope_scaling_factor"):
            notes.append(f"rope_scaling has factor {factor:g}, as in Llama {'3.2' if tied else '3.1'}")
    if not positions:
        positions = 32_768 if mistral else _ORIGINAL if theta == 500_000 else 4096
        notes.append(f"max_position_embeddings is not in params.json: {positions:,}")
    config[_POSITIONS] = positions
    return config, notes


def params_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """``params.json`` from Hugging Face's fields; what is missing is what transformers takes then.

    Raises IncompleteError without a config, UnsupportedError for a model that Meta's or Mistral's software cannot be.
    """
    config = _flat_rope(config_fields(config))
    kind = str(config.get("model_type", ""))
    if missing := [k for k in _NEEDED if not config.get(k)]:
        raise IncompleteError(
            f"params.json cannot be written: config.json does not say {some(missing)}",
            hint="put the model's config.json beside the weights",
        )
    if kind in meta_llama4.KINDS:
        return meta_llama4.params_of(config)
    dim, heads, ffn = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    head = config.get("head_dim") or dim // heads
    params: dict[str, Any] = {
        "dim": dim,
        "n_layers": config["num_hidden_layers"],
        "n_heads": heads,
        "n_kv_heads": config.get("num_key_value_heads") or heads,
        "vocab_size": config["vocab_size"],
        "norm_eps": config.get("rms_norm_eps", 1e-5 if kind == "mixtral" else 1e-6),
        "rope_theta": config.get("rope_theta", 1_000_000.0 if kind == "mixtral" else 10_000.0),
    }
    scaling = config.get("rope_scaling")
    if kind in ("mistral", "mixtral"):
        params |= {"head_dim": head, "hidden_dim": ffn}
        if window := config.get("sliding_window", 4096 if kind == "mistral" else None):
            params["sliding_window"] = window
        if experts := config.get("num_local_experts"):
            params["moe"] = {"num_experts": experts, "num_experts_per_tok": config.get("num_experts_per_tok", 2)}
        if scaling:
            raise cannot("mistral-inference does not scale rotary embeddings", "rope_scaling")
        return params
    if head * heads != dim:
        raise cannot(f"in Meta's software a head has {dim} / {heads} elements, and here it has {head}", "head_dim")
    if found := [k for k in ("attention_bias", "mlp_bias") if config.get(k)]:
        raise cannot("Meta's software has no biases", found[0])
    if scaling:
        known = {**_SCALED, "original_max_position_embeddings": _ORIGINAL}
        if any(scaling.get(k) != v for k, v in known.items()) or scaling.get("factor") not in (8, 32):
            raise cannot("Meta's software scales rotary embeddings in the way of Llama 3.1 only", "rope_scaling")
        params["use_scaled_rope"] = True
        if (scaling["factor"] == 32) != bool(config.get("tie_word_embeddings")):
            params["rope_scaling_factor"] = scaling["factor"]
    return params | _feed_forward(dim, ffn)


def _feed_forward(dim: int, rows: int) -> dict[str, Any]:
    """``multiple_of`` and, where it takes one, ``ffn_dim_multiplier`` from which Meta's software works out ``rows``."""
    found = rate(dim, rows)
    multiple = found["multiple_of"]
    return {"multiple_of": multiple} if hidden_rows(dim, multiple, None) == rows else found


def _flat_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with ``rope_theta`` and ``rope_scaling``, which transformers 5 writes as one ``rope_parameters``."""
    out = dict(config)
    rope = config.get("rope_parameters")
    if isinstance(rope, Mapping):
        if "rope_theta" in rope:
            out["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") != "default":
            out["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return out
