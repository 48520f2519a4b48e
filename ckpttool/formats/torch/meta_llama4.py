"""Llama 4 as Meta publishes it: ``params.json``, and experts whose first two axes are one.

The rank's experts ``moe_w_in_eD_F`` are [experts * dim, F / ranks] and ``moe_w_out_eF_D`` [experts * F / ranks, dim]:
``eD`` is one axis in the file, and two in the model. Sources: llama-models (``llama4/args.py``, ``model.py``,
``moe.py``, ``vision/embedding.py``), transformers' ``convert_llama4_weights_to_hf.py`` for what a config says beyond.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ckpttool.core.catalog import StoredTensor
from ckpttool.core.words import some
from ckpttool.errors import ConflictError, UnsupportedError
from ckpttool.formats.torch.meta_numbers import cannot, hidden_rows, number, rate, real

KINDS = ("llama4", "llama4_text")
"""``model_type`` with and without the tower for images."""
_EXPERTS = re.compile(r".*\.experts\.moe_w_[a-z]+_e[DF]_[DF]")
_MARKS = ("moe_args", "nope_layer_interval", "use_qk_norm", "attention_chunk_size", "vision_args")
"""Fields that only Llama 4 has."""
_ORIGINAL = 8192
_SCALING = {"rope_type": "llama3", "low_freq_factor": 1.0, "original_max_position_embeddings": _ORIGINAL}
_FACTOR, _HIGH = 16.0, 1.0
"""Defaults of Meta's software for scaled rotary embeddings, where params.json has none."""
_POSITIONS = 262_144
_FIELDS = {
    *("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "multiple_of", "ffn_dim_multiplier"),
    *("ffn_exp", "norm_eps", "rope_theta", "use_scaled_rope", "rope_scaling_factor", "rope_high_freq_factor"),
    *("attn_temperature_tuning", "floor_scale", "attn_scale", *_MARKS),
}
_MOE = {"num_experts", "capacity_factor", "auto_scale_F", "top_k", "interleave_moe_layer_step"}
_VISION = {
    *("image_size", "patch_size", "dim", "n_layers", "n_heads", "mlp_ratio", "output_dim", "pixel_shuffle_ratio")
}


def is_llama4(params: Mapping[str, Any]) -> bool:
    """Whether ``params.json`` describes a Llama 4."""
    return any(params.get(k) is not None for k in _MARKS)


def unfolded(tensor: StoredTensor, params: Mapping[str, Any], where: str) -> StoredTensor:
    """A rank's experts as [experts, in, out], any other tensor as it is. Raises ConflictError if they do not divide."""
    if len(tensor.shape) != 2 or not _EXPERTS.fullmatch(tensor.name):
        return tensor
    moe = params.get("moe_args")
    experts = number(moe, "num_experts", where) if isinstance(moe, Mapping) else 0
    rows, columns = tensor.shape
    if not experts or rows % experts:
        raise ConflictError(
            f"`{tensor.name}` {list(tensor.shape)} does not divide into {experts} experts, as many as params.json says",
            where=where,
            hint="the files and params.json must be those of one model",
        )
    strides = tensor.strides and (tensor.strides[0] * (rows // experts), *tensor.strides)
    return tensor._replace(shape=(experts, rows // experts, columns), strides=strides)


def folded(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a rank's tensor has in the file."""
    return (shape[0] * shape[1], shape[2]) if len(shape) == 3 and _EXPERTS.fullmatch(name) else shape


def rows_of(shapes: Mapping[str, tuple[int, ...]], ranks: int) -> dict[str, int]:
    """Rows in whole tensors: those of ``experts`` and of ``feed_forward`` (layers without experts); 0 where there are
    none, ``qkv`` of one rank, and ``layers`` with experts.
    """
    found: dict[str, Any] = {"experts": 0, "feed_forward": 0, "qkv": 0, "layers": set()}
    for name, shape in shapes.items():
        if name.endswith((".moe_w_in_eD_F", ".experts.w1")):
            found["experts"] = shape[-1] * ranks
            found["layers"].add(int(re.sub(r".*layers\.(\d+)\..*", r"\1", name)))
        elif name.endswith(".feed_forward.mlp.fc1_weight"):
            found["feed_forward"] = shape[0] * ranks // 2
        elif name.endswith(".feed_forward.w1.weight"):
            found["feed_forward"] = shape[0] * ranks
        elif name.endswith(".attention.wqkv.weight"):
            found["qkv"] = shape[0]
    return found


def config_of(
    params: Mapping[str, Any], *, rows: Mapping[str, Any], vocab: int, dtype: str, where: str
) -> tuple[dict[str, Any], list[str]]:
    """config.json in Hugging Face's fields, and notes. ``rows`` are those of ``rows_of``.

    Raises IncompleteError for a field that must be there, CorruptError for one that is no number, ConflictError where
    the layers with experts are others than params.json says, UnsupportedError for a model of another kind.
    """
    _known(params, _FIELDS, "", where)
    dim, heads, layers = (number(params, k, where) for k in ("dim", "n_heads", "n_layers"))
    interval = number(params, "nope_layer_interval", where) if params.get("nope_layer_interval") else 0
    notes: list[str] = []
    config: dict[str, Any] = {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "hidden_size": dim,
        "intermediate_size": rows["experts"] or _ORIGINAL,
        "intermediate_size_mlp": rows["feed_forward"] or _usual(params, where),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": number(params, "n_kv_heads", where) if params.get("n_kv_heads") else heads,
        "head_dim": dim // heads,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "rms_norm_eps": real(params, "norm_eps", where) or 1e-5,
        "rope_theta": real(params, "rope_theta", where) or 500_000.0,
        "no_rope_layers": [int(not interval or (i + 1) % interval != 0) for i in range(layers)],
        "use_qk_norm": bool(params.get("use_qk_norm")),
        "attention_chunk_size": number(params, "attention_chunk_size", where)
        if params.get("attention_chunk_size")
        else None,
        "attn_temperature_tuning": bool(params.get("attn_temperature_tuning")),
        "floor_scale": int(real(params, "floor_scale", where) or _ORIGINAL),
        "attn_scale": real(params, "attn_scale", where) or 0.1,
        "max_position_embeddings": _POSITIONS,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **_experts(params, rows, layers, where),
    }
    notes.append(f"max_position_embeddings is not in params.json: {_POSITIONS:,}")
    if "attn_temperature_tuning" not in params:
        notes.append("attn_temperature_tuning is not in params.json: false, as Meta's software has it then")
    if params.get("use_scaled_rope"):
        factor = real(params, "rope_scaling_factor", where) or _FACTOR
        high = real(params, "rope_high_freq_factor", where) or _HIGH
        config["rope_scaling"] = {**_SCALING, "factor": factor, "high_freq_factor": high}
    if isinstance(vision := params.get("vision_args"), Mapping):
        inner = {k: v for k, v in config.items() if k != "architectures"}
        config = {
            "architectures": ["Llama4ForConditionalGeneration"],
            "model_type": "llama4",
            "text_config": inner,
            "vision_config": _tower(vision, where),
            "tie_word_embeddings": False,
            "torch_dtype": dtype,
        }
    return config, notes


def _known(params: Mapping[str, Any], fields: set[str], at: str, where: str) -> None:
    of_a_run = {"max_seq_len", "max_batch_size", "model_parallel_size", "quantization_args", "lora_args"}
    other = [k for k, v in params.items() if k not in fields | of_a_run and v not in (None, False)]
    other += [k for k in ("quantization_args", "lora_args") if params.get(k)]
    if other:
        raise UnsupportedError(
            f"params.json describes a Llama 4 of a kind that is not known: {some([at + k for k in other])}",
            where=where,
            hint="give the Hugging Face form of this one",
        )


def _experts(params: Mapping[str, Any], rows: Mapping[str, Any], layers: int, where: str) -> dict[str, Any]:
    """The fields about experts, which say in which layers they are."""
    moe = params.get("moe_args")
    if not isinstance(moe, Mapping):
        out: dict[str, Any] = {"num_local_experts": 0, "num_experts_per_tok": 0, "moe_layers": []}
    else:
        _known(moe, _MOE, "moe_args.", where)
        step = number(moe, "interleave_moe_layer_step", where) if "interleave_moe_layer_step" in moe else 1
        out = {
            "num_local_experts": number(moe, "num_experts", where),
            "num_experts_per_tok": number(moe, "top_k", where) if "top_k" in moe else 1,
            "interleave_moe_layer_step": step,
            "moe_layers": list(range(step - 1, layers, step)),
        }
    if rows["layers"] != set(out["moe_layers"]):
        raise ConflictError(
            f"layers {_numbers(rows['layers'])} of these files have experts, and by params.json"
            f" {_numbers(out['moe_layers'])} have",
            where=where,
            hint="the files and params.json must be those of one model",
        )
    return out


def _numbers(layers: Iterable[int]) -> str:
    return some([str(n) for n in sorted(layers)]) or "none"


def _usual(params: Mapping[str, Any], where: str) -> int:
    multiplier = real(params, "ffn_dim_multiplier", where)
    multiple = number(params, "multiple_of", where) if "multiple_of" in params else 256
    return hidden_rows(number(params, "dim", where), multiple, multiplier)


def _tower(vision: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``vision_config``."""
    _known(vision, _VISION, "vision_args.", where)
    dim, output = (number(vision, k, where) for k in ("dim", "output_dim"))
    ratio = real(vision, "pixel_shuffle_ratio", where) or 0.5
    inner = int((real(vision, "mlp_ratio", where) or 4.0) * dim)
    sides = {k: vision.get(k) for k in ("image_size", "patch_size")}
    square = {k: v["height"] for k, v in sides.items() if isinstance(v, Mapping) and v.get("height") == v.get("width")}
    if inner != int(dim // ratio**2) or len(square) != 2:
        raise UnsupportedError(
            "the tower for images cannot be said in Hugging Face's config: images and patches must be squares, and"
            " mlp_ratio 1 / pixel_shuffle_ratio ** 2",
            where=where,
        )
    return {
        "model_type": "llama4_vision_model",
        "hidden_size": dim,
        "intermediate_size": inner,
        "num_hidden_layers": number(vision, "n_layers", where),
        "num_attention_heads": number(vision, "n_heads", where),
        **square,
        "pixel_shuffle_ratio": ratio,
        "projector_input_dim": output,
        "projector_output_dim": output,
        "vision_output_dim": output,
        "hidden_act": "gelu",
    }


def params_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """``params.json`` from Hugging Face's fields, those of the text model beside ``vision_config``.

    Raises UnsupportedError for a model that Meta's software cannot be.
    """
    dim, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    if (config.get("head_dim") or 128) * heads != dim:
        raise cannot(f"in Meta's software a head has {dim} / {heads} elements", "head_dim")
    if config.get("attention_bias"):
        raise cannot("Meta's software has no biases", "attention_bias")
    if config.get("tie_word_embeddings"):
        raise cannot("Meta's software does not tie the head", "tie_word_embeddings")
    params: dict[str, Any] = {
        "dim": dim,
        "n_layers": layers,
        "n_heads": heads,
        "n_kv_heads": config.get("num_key_value_heads") or heads,
        "vocab_size": config["vocab_size"],
        "norm_eps": config.get("rms_norm_eps", 1e-5),
        "rope_theta": config.get("rope_theta", 500_000.0),
        "attention_chunk_size": config.get("attention_chunk_size", _ORIGINAL),
        "nope_layer_interval": _interval(config, layers),
        "use_qk_norm": bool(config.get("use_qk_norm", True)),
        "attn_temperature_tuning": bool(config.get("attn_temperature_tuning", True)),
        "floor_scale": config.get("floor_scale", _ORIGINAL),
        "attn_scale": config.get("attn_scale", 0.1),
        "use_scaled_rope": False,
    }
    if scaling := config.get("rope_scaling"):
        if any(scaling.get(k) != v for k, v in _SCALING.items()):
            raise cannot("Meta's software scales rotary embeddings in the way of Llama 3.1 only", "rope_scaling")
        params["use_scaled_rope"] = True
        params["rope_scaling_factor"] = scaling["factor"]
        params["rope_high_freq_factor"] = scaling["high_freq_factor"]
    params |= _widths(config, layers)
    if config["model_type"] == KINDS[0]:
        vision = config.get("vision_config")
        params["vision_args"] = _args(vision if isinstance(vision, Mapping) else {})
    return params


def _interval(config: Mapping[str, Any], layers: int) -> int | None:
    """Every how many layers one has no positions; None where all have."""
    said = config.get("no_rope_layers") or []
    every = config.get("no_rope_layer_interval", 4)
    said = said or [int((i + 1) % every != 0) for i in range(layers)]
    if all(said):
        return None
    first = said.index(0) + 1
    if said != [int((i + 1) % first != 0) for i in range(layers)]:
        raise cannot("in Meta's software every n-th layer has no positions", "no_rope_layers")
    return int(first)


def _widths(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """``moe_args``, and what Meta's software works out the rows of the MLPs from."""
    dim, experts = config["hidden_size"], config.get("num_local_experts") or 0
    step = config.get("interleave_moe_layer_step", 1)
    there = config.get("moe_layers")
    there = list(range(step - 1, layers, step)) if there is None and step else there or []
    wide, routed = config.get("intermediate_size_mlp", 16_384), config["intermediate_size"]
    if not there:
        return {"moe_args": None, "ffn_exp": 4.0, **rate(dim, wide)}
    step = there[0] + 1
    if there != list(range(step - 1, layers, step)):
        raise cannot("in Meta's software every n-th layer has experts", "moe_layers")
    moe = {"num_experts": experts, "top_k": config.get("num_experts_per_tok", 1), "interleave_moe_layer_step": step}
    dense = wide if len(there) < layers else 2 * routed
    numbers = rate(dim, dense, routed)
    # As published: the routed and the shared expert have as many rows together as an MLP
    published = {"ffn_exp": 4.0, "moe_args": {**moe, "capacity_factor": 1.0, "auto_scale_F": True}}
    for ffn_exp in (4.0, *(4.0 * routed / dense + i / (16 * dim) for i in range(-64, 65))):
        chosen = published if ffn_exp == 4.0 else {"ffn_exp": ffn_exp, "moe_args": {**moe, "auto_scale_F": False}}
        if expert_rows(dim, numbers, chosen) == routed:
            return {**numbers, **chosen}
    raise cannot(f"no ffn_exp gives {routed} rows of experts beside {dense} of others", "intermediate_size")


def expert_rows(dim: int, numbers: Mapping[str, Any], chosen: Mapping[str, Any]) -> int:
    """The rows of an expert, as Meta's ``MoE`` computes them."""
    moe = chosen["moe_args"]
    rows = int(numbers["ffn_dim_multiplier"] * int(2 * int(chosen["ffn_exp"] * dim) / 3))
    if moe["auto_scale_F"]:
        rows = int(rows / (moe["capacity_factor"] + 1))
    return rows + -rows % int(numbers["multiple_of"])


def _args(vision: Mapping[str, Any]) -> dict[str, Any]:
    """``vision_args``."""
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if missing := [k for k in needed if not vision.get(k)]:
        raise cannot(f"config.json does not say {some(missing)} of the tower for images", "vision_config")
    dim, inner, ratio = vision["hidden_size"], vision["intermediate_size"], vision.get("pixel_shuffle_ratio", 0.5)
    output = vision.get("projector_output_dim", 4096)
    others = {vision.get("projector_input_dim", 4096), vision.get("vision_output_dim", output)}
    if others != {output} or inner != int(dim // ratio**2):
        raise cannot("the tower has other widths than Meta's", "vision_config")
    sides = {k: vision.get(k, usual) for k, usual in (("image_size", 448), ("patch_size", 14))}
    return {
        **{k: {"height": v, "width": v} for k, v in sides.items()},
        "dim": dim,
        "n_layers": vision["num_hidden_layers"],
        "n_heads": vision["num_attention_heads"],
        "mlp_ratio": inner / dim,
        "output_dim": output,
        "pixel_shuffle_ratio": ratio,
    }
