"""``quantization_config``: what a checkpoint says of its recipe, and what to say of one that was made.

Sources: DeepSeek-V3's and Qwen3's config.json (``fp8``), compressed-tensors 0.20 (``QuantizationConfig``), ModelOpt's
hf_quant_config.json and the copy of it in config.json, gpt-oss (``mxfp4``), FBGEMM (``fbgemm_fp8``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ckpttool.core.catalog import Catalog
from ckpttool.core.dtypes import CASTABLE
from ckpttool.errors import ConflictError, UnsupportedError
from ckpttool.formats.config import QUANTIZATION, config_places, is_part, quantization
from ckpttool.quant.scheme import GROUP, Scheme, scheme

HF_QUANT = "hf_quant_config.json"
"""ModelOpt's own file beside config.json."""

DTYPE_FIELDS = ("torch_dtype", "dtype")
"""Fields in config.json and its sections: the dtype of weights in high precision."""


def mapped_fields(config: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """A config whose fields are changed, and those of its sections (``text_config``, ``vision_config``, ...); what it
    says about quantization stays."""
    return {k: mapped_fields(v, change) if is_part(k, v) else change(k, v) for k, v in config.items()}


def with_fields(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A config with these values in the fields that it and its sections have; where a field has a value for each
    section (transformers' ``dtype``), in all of them."""

    def changed(name: str, said: Any) -> Any:
        if name not in values:
            return said
        return dict.fromkeys(said, values[name]) if isinstance(said, dict) else values[name]

    return mapped_fields(config, changed)


_NEVER_CODES = CASTABLE | {"I64", "BOOL"}
"""Dtypes of weights in high precision, and of buffers."""
_IGNORED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")


class ConfigScheme(NamedTuple):
    """A config's statements about its weights."""

    scheme: Scheme | None
    """None: they are not quantized."""
    ignored: tuple[str, ...] = ()
    """Modules that are not."""
    preset: str = ""
    """One of ``keep.PRESETS``: what else stays by the software's own habit; "" where it has none."""


def section(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of config.json that speaks of quantization; {} if there is none. Raises ConflictError for odd ones."""
    for place in config_places(config):
        for name in QUANTIZATION:
            found = place.get(name)
            if found is not None and not isinstance(found, Mapping):
                raise ConflictError(
                    f"`{name}` of config.json is {_short(found)}, which does not describe a recipe",
                    where=f"config.json: {name}",
                    hint='{"quant_method": ...} describes how weights are quantized; omit it if they are not',
                )
            if found:
                return dict(found)
    return {}


def without(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model in high precision."""
    return {k: without(v) if is_part(k, v) else v for k, v in config.items() if k not in QUANTIZATION}


def without_unused(
    config: Mapping[str, Any], catalog: Catalog, left: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """The config without its quantization where none of the quantized weights of ``catalog`` is among ``left``, and
    a note about it."""
    if quantization(config):
        coded = {k.name for k, t in catalog.tensors.items() if k.component == "model" and t.dtype not in _NEVER_CODES}
        if coded and coded.isdisjoint(left):
            return without(config), ["no quantized weights are left: quantization_config removed from config.json"]
    return dict(config), []


def config_scheme(config: Mapping[str, Any]) -> ConfigScheme:
    """The recipe that a config names.

    Raises UnsupportedError for one that is none of ours, ConflictError for fields that are not what they should be.
    """
    quant = section(config)
    if not quant:
        return ConfigScheme(None)
    ignored = tuple(x for name in _IGNORED for x in _modules(quant, name))
    algo = _text(quant, "quant_algo")
    method = _text(quant, "quant_method") or algo
    static = _text(quant, "activation_scheme") == "static"
    if method == "fp8":
        code = "F8_E5M2" if _text(quant, "fmt").startswith("e5m2") else "F8_E4M3"
        powers = _text(quant, "scale_fmt") == "ue8m0"
        if _text(quant, "expert_dtype") == "fp4":
            raise _unknown("fp8 with FP4 experts")
        if "weight_block_size" in quant and quant["weight_block_size"] is None:
            return ConfigScheme(scheme("tensor", method="fp8", code=code, static=static), ignored)
        block = _sides(quant.get("weight_block_size", [128, 128]), "weight_block_size")
        found = scheme("block", method="fp8", code=code, block=block, powers=powers, static=static)
        return ConfigScheme(found, ignored)
    if method == "fbgemm_fp8":
        return ConfigScheme(scheme("channel", method="fbgemm_fp8"), ignored)
    if method == "mxfp4":
        return ConfigScheme(scheme("mxfp4"), ignored, "experts-only")
    if method == "modelopt" or "producer" in quant:
        return ConfigScheme(_modelopt(algo or "FP8"), ignored)
    if method == "compressed-tensors":
        return ConfigScheme(_compressed(quant), ignored)
    raise _unknown(method or "(no quant_method)")


def _short(value: object) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."


def _odd(path: str, value: object, hint: str) -> ConflictError:
    """A field that is there and is not what it should be."""
    return ConflictError(
        f"`{path}` of config.json's quantization_config is {_short(value)}",
        where=f"config.json: quantization_config: {path}",
        hint=hint,
    )


def _text(quant: Mapping[str, Any], name: str, path: str = "") -> str:
    """A text, or "" for one that is not there."""
    value = quant.get(name)
    if value is not None and not isinstance(value, str):
        raise _odd(f"{path}{name}", value, "it must be a string, or be omitted")
    return value or ""


def _modules(quant: Mapping[str, Any], name: str) -> list[str]:
    """Names of modules, or [] for a list that is not there."""
    value = quant.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
        raise _odd(name, value, 'it is a list of names, as in ["lm_head"]')
    return value


def _map(quant: Mapping[str, Any], name: str, path: str = "") -> Mapping[str, Any]:
    """An object, or {} for one that is not there."""
    value = quant.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise _odd(f"{path}{name}", value, "it is an object, or null")
    return value or {}


def _sides(value: object, path: str) -> tuple[int, int]:
    """The sides of a block; compressed-tensors has them as "128x128", too."""
    if isinstance(value, str) and (m := re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", value, re.ASCII)):
        return int(m[1]), int(m[2])
    if isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value):
        return value[0], value[1]
    raise _odd(path, value, "the sides of a block are two whole numbers: [128, 128]")


def _unknown(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"config.json says that the weights are quantized by `{what}`, whose sizes cannot be derived from it",
        hint="give the checkpoint itself, or a --recipe",
    )


def _modelopt(algo: str) -> Scheme:
    if algo == "FP8":
        return scheme("tensor", method="modelopt", static=True)
    if algo in ("NVFP4", "W4A16_NVFP4"):
        return scheme("nvfp4", method="modelopt", static=algo == "NVFP4")
    raise _unknown(f"modelopt {algo}")


def _compressed(quant: Mapping[str, Any]) -> Scheme:
    groups = _map(quant, "config_groups")
    found = []
    for key in groups:
        group, at = _map(groups, key, "config_groups."), f"config_groups.{key}."
        if weights := _map(group, "weights", at):
            found.append((group, weights, at))
    if len(found) != 1:
        raise _unknown(f"compressed-tensors with {len(found) or 'no'} groups")
    group, w, at = found[0]
    name = _text(quant, "format") or _text(group, "format", at)
    inputs = _map(group, "input_activations", at)
    static = bool(inputs) and inputs.get("dynamic") is False
    if name.startswith("mxfp8"):
        return scheme("mxfp8")
    if name.startswith("mxfp4"):
        return scheme("mxfp4")
    if name.startswith("nvfp4"):
        return scheme("nvfp4", static=static or inputs.get("dynamic") == "local")
    strategy = _text(w, "strategy", f"{at}weights.")
    if w.get("num_bits") == 8 and w.get("type") == "float":
        if strategy == "block":
            sides = _sides(w.get("block_structure"), f"{at}weights.block_structure")
            return scheme("block", method="compressed-tensors", block=sides)
        if strategy in ("tensor", "channel"):
            return scheme(strategy, method="compressed-tensors", static=static)
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
    """One group of compressed-tensors' ``config_groups``: how weights and activations are quantized."""
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
