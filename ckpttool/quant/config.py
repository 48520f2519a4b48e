"""``quantization_config``: what a checkpoint says of its recipe, and what to say of one that was made.

Sources: DeepSeek-V3's and Qwen3's config.json (``fp8``), compressed-tensors 0.20 (``QuantizationConfig``), ModelOpt's
hf_quant_config.json and the copy of it in config.json, gpt-oss (``mxfp4``), FBGEMM (``fbgemm_fp8``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckpttool.errors import UnsupportedError
from ckpttool.quant.scheme import GROUP, Scheme, scheme

HF_QUANT = "hf_quant_config.json"
"""ModelOpt's own file beside config.json."""

FIELDS = ("quantization_config", "compression_config")
"""Under which config.json speaks of quantisation."""

_IGNORED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")


class Said(NamedTuple):
    """What a config says of its weights."""

    scheme: Scheme | None
    """None: they are not quantised."""
    ignored: tuple[str, ...] = ()
    """Modules that are not."""
    preset: str = ""
    """Of ``keep.PRESETS``: what else stays, where the software's own habit says so; "" where it does not."""


def section(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of config.json that speaks of quantisation; {} if there is none."""
    places = [config, config.get("text_config")]
    for place in places:
        if isinstance(place, Mapping):
            for name in FIELDS:
                found = place.get(name)
                if isinstance(found, Mapping) and found:
                    return dict(found)
    return {}


def without(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model in high precision."""
    out = {k: v for k, v in config.items() if k not in FIELDS}
    if isinstance(text := out.get("text_config"), Mapping):
        out["text_config"] = {k: v for k, v in text.items() if k not in FIELDS}
    return out


def said(config: Mapping[str, Any]) -> Said:
    """The recipe that a config names. Raises UnsupportedError for one that is none of ours."""
    quant = section(config)
    if not quant:
        return Said(None)
    ignored = tuple(str(x) for name in _IGNORED for x in quant.get(name) or ())
    method = str(quant.get("quant_method") or quant.get("quant_algo") or "")
    static = quant.get("activation_scheme") == "static"
    if method == "fp8":
        code = "F8_E5M2" if str(quant.get("fmt", "")).startswith("e5m2") else "F8_E4M3"
        block = quant.get("weight_block_size", [128, 128] if "weight_block_size" not in quant else None)
        powers = quant.get("scale_fmt") == "ue8m0"
        if quant.get("expert_dtype") == "fp4":
            raise _unknown("fp8 with FP4 experts")
        if not block:
            return Said(scheme("tensor", method="fp8", code=code, static=static), ignored)
        return Said(
            scheme("block", method="fp8", code=code, block=(block[0], block[1]), powers=powers, static=static), ignored
        )
    if method == "fbgemm_fp8":
        return Said(scheme("channel", method="fbgemm_fp8"), ignored)
    if method == "mxfp4":
        return Said(scheme("mxfp4"), ignored, "experts-only")
    if method == "modelopt" or "producer" in quant:
        return Said(_modelopt(str(quant.get("quant_algo") or "FP8")), ignored)
    if method == "compressed-tensors":
        return Said(_compressed(quant), ignored)
    raise _unknown(method or "(no quant_method)")


def _unknown(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"config.json says that the weights are quantised by `{what}`, whose sizes do not follow from it",
        hint="give the checkpoint itself, whose headers say them, or a --recipe",
    )


def _modelopt(algo: str) -> Scheme:
    if algo == "FP8":
        return scheme("tensor", method="modelopt", static=True)
    if algo in ("NVFP4", "W4A16_NVFP4"):
        return scheme("nvfp4", method="modelopt", static=algo == "NVFP4")
    raise _unknown(f"modelopt {algo}")


def _compressed(quant: Mapping[str, Any]) -> Scheme:
    groups = quant.get("config_groups")
    weights = (
        [g.get("weights") for g in groups.values() if isinstance(g, Mapping)] if isinstance(groups, Mapping) else []
    )
    found = [w for w in weights if isinstance(w, Mapping)]
    if len(found) != 1:
        raise _unknown("compressed-tensors with several groups")
    w = found[0]
    name = (
        str(quant.get("format") or next(iter(groups.values())).get("format") or "")
        if isinstance(groups, Mapping)
        else ""
    )
    inputs = next(iter(groups.values())).get("input_activations") if isinstance(groups, Mapping) else None
    static = isinstance(inputs, Mapping) and inputs.get("dynamic") is False
    if name.startswith("mxfp8"):
        return scheme("mxfp8")
    if name.startswith("mxfp4"):
        return scheme("mxfp4")
    if name.startswith("nvfp4"):
        return scheme("nvfp4", static=static or (isinstance(inputs, Mapping) and inputs.get("dynamic") == "local"))
    strategy = w.get("strategy")
    if w.get("num_bits") == 8 and w.get("type") == "float":
        if strategy == "block" and isinstance(sides := w.get("block_structure"), list) and len(sides) == 2:
            return scheme("block", method="compressed-tensors", block=(sides[0], sides[1]))
        if strategy in ("tensor", "channel"):
            return scheme(str(strategy), method="compressed-tensors", static=static)
    raise _unknown(f"compressed-tensors {w.get('type')} {w.get('num_bits')} bits, {strategy}")


# -- what was made


def quantization_config(scheme: Scheme, kept: Sequence[str], *, blocks: bool = False) -> dict[str, Any]:
    """``quantization_config`` for config.json.

    ``kept`` are the modules with a matrix that stays as it was; ``blocks``: MXFP4 is stored as in gpt-oss's files.
    """
    if blocks:
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(kept)}
    if scheme.method == "fp8":
        out: dict[str, Any] = {
            "quant_method": "fp8",
            "fmt": "e5m2" if scheme.code == "F8_E5M2" else "e4m3",
            "activation_scheme": "static" if scheme.static else "dynamic",
            "weight_block_size": list(scheme.block) if scheme.recipe == "block" else None,
        }
        if scheme.powers:
            out["scale_fmt"] = "ue8m0"
        if kept:
            out["modules_to_not_convert"] = list(kept)
        return out
    if scheme.method == "fbgemm_fp8":
        return {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": list(kept)}
    if scheme.method == "modelopt":
        return {
            "quant_method": "modelopt",
            "quant_algo": _algo(scheme),
            "producer": {"name": "modelopt"},
            "ignore": list(kept),
            "config_groups": {"group_0": {**_groups(scheme), "targets": ["Linear"]}},
        }
    return {
        "quant_method": "compressed-tensors",
        "format": _format(scheme),
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": list(kept),
        "config_groups": {"group_0": {**_groups(scheme), "targets": ["Linear"], "format": _format(scheme)}},
    }


def hf_quant_config(scheme: Scheme, kept: Sequence[str]) -> dict[str, Any] | None:
    """ModelOpt's hf_quant_config.json, or None for other methods."""
    if scheme.method != "modelopt":
        return None
    quantization: dict[str, Any] = {
        "quant_algo": _algo(scheme),
        "kv_cache_quant_algo": None,
        "exclude_modules": list(kept),
    }
    if scheme.recipe == "nvfp4":
        quantization["group_size"] = 16
    return {"producer": {"name": "modelopt"}, "quantization": quantization}


def _algo(scheme: Scheme) -> str:
    if scheme.recipe != "nvfp4":
        return "FP8"
    # NVFP4 alone means activations in F4 as well, for which vLLM takes the scale of activations as it finds it.
    return "NVFP4" if scheme.static else "W4A16_NVFP4"


def _format(scheme: Scheme) -> str:
    return {"mxfp8": "mxfp8-quantized", "nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized"}.get(
        scheme.recipe, "float-quantized"
    )


def _groups(scheme: Scheme) -> dict[str, Any]:
    """One group of compressed-tensors' ``config_groups``: how weights and activations are quantised."""
    bits = 4 if scheme.code == "F4" else 8
    common: dict[str, Any] = {"num_bits": bits, "type": "float", "symmetric": True}
    strategy = {"nvfp4": "tensor_group", "mxfp8": "group", "mxfp4": "group"}.get(scheme.recipe, scheme.recipe)
    weights = {**common, "strategy": strategy, "dynamic": False, "group_size": GROUP.get(scheme.recipe)}
    if scheme.recipe == "block":
        weights["block_structure"] = list(scheme.block)
    inputs: dict[str, Any] = {**common, "dynamic": not scheme.static, "group_size": GROUP.get(scheme.recipe)}
    inputs["strategy"] = "tensor" if scheme.static else "token"
    if scheme.recipe == "block":
        inputs |= {"strategy": "group", "group_size": scheme.block[1]}
    elif scheme.recipe in GROUP:
        inputs |= {"strategy": strategy, "dynamic": "local" if scheme.recipe == "nvfp4" else True}
    for part in (weights, inputs):
        if scheme.recipe in ("mxfp8", "mxfp4"):
            part["scale_dtype"] = "torch.uint8"
        elif scheme.recipe == "nvfp4":
            part["scale_dtype"] = "torch.float8_e4m3fn"
    if scheme.recipe == "nvfp4" and not scheme.static:
        # Without a global scale for the activations the model runs with 16-bit ones.
        return {"weights": weights, "input_activations": None, "output_activations": None}
    return {"weights": weights, "input_activations": inputs, "output_activations": None}
