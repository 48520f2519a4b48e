"""Names of Megatron Core's tensors: one canonical name for each, however a file spells it.

Canonical are the names of the local spec (``--transformer-impl local``) with the experts one by one, and with global
numbers of layers and experts. What differs:

    canonical                                    Transformer Engine
    layers.3.input_layernorm.weight              layers.3.self_attention.linear_qkv.layer_norm_weight
    layers.3.pre_mlp_layernorm.weight            layers.3.mlp.linear_fc1.layer_norm_weight     (dense layers only)
    layers.3.self_attention.q_layernorm.weight   layers.3.self_attention.linear_q_up_proj.layer_norm_weight     (MLA)
    layers.3.self_attention.kv_layernorm.weight  layers.3.self_attention.linear_kv_up_proj.layer_norm_weight    (MLA)

    layers.3.mlp.experts.local_experts.7.linear_fc1.weight    layers.3.mlp.experts.linear_fc1.weight7 (TEGroupedMLP)

With latent attention (MLA) the input_layernorm stays apart, with Transformer Engine too.

A layer of multi-token prediction is the one after the last layer: ``mtp.layers.0.transformer_layer.X`` of a model of 61
layers is ``decoder.layers.61.X``, and what lies beside its ``transformer_layer`` (``enorm``, ``hnorm``, ``eh_proj``,
``final_layernorm``) is ``decoder.layers.61.enorm`` and so on. In later legacy files it is
``mtp_model_layer``.

Sources: megatron/core/models/gpt/gpt_layer_specs.py, transformer/moe/experts.py, extensions/transformer_engine.py and
transformer/multi_token_prediction.py of Megatron Core 0.16.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

TARGETS = TRANSFORMER_ENGINE, LOCAL = "transformer_engine", "local"
"""Implementations that name a layer's tensors: values of Megatron's ``--transformer-impl``."""

_WRAPPERS = re.compile(r"(?:module\.)+|model\.(?=(?:embedding|decoder|output_layer|mtp)\.)")
"""Prefixes of wrappers: Float16Module, DistributedDataParallel; NeMo."""
_EXTRA = re.compile(r"\._extra_state(?:\Z|[./])")
_MTP = re.compile(r"mtp\.layers\.(\d{1,9})\.(?:(?:transformer_layer|mtp_model_layer)\.)?")
_LAYER = re.compile(r"decoder\.layers\.(\d{1,9})\.")
_BESIDE = re.compile(r"(?:enorm|hnorm|eh_proj|final_layernorm)\.")
"""Modules that a layer of multi-token prediction has beside its transformer layer."""
_FUSED_NORM = re.compile(
    r"(?P<layer>.*\.layers\.\d+\.)(?P<module>self_attention\.linear_qkv|self_attention\.linear_q_up_proj"
    r"|self_attention\.linear_kv_up_proj|mlp\.linear_fc1)\.layer_norm_(?P<kind>weight|bias)"
)
_NORM_OF = {
    "self_attention.linear_qkv": "input_layernorm",
    "self_attention.linear_q_up_proj": "self_attention.q_layernorm",
    "self_attention.linear_kv_up_proj": "self_attention.kv_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
}
_MODULE_OF = {norm: module for module, norm in _NORM_OF.items()}
_NORM = re.compile(
    r"(?P<layer>.*\.layers\.\d+\.)"
    r"(?P<norm>input_layernorm|pre_mlp_layernorm|self_attention\.(?:q|kv)_layernorm)\.(?P<kind>weight|bias)"
)
_EXPERT = re.compile(
    r"(?P<before>.*\.mlp\.experts\.)local_experts\.(?P<expert>\d{1,9})\.(?P<module>linear_fc[12])\.(?P<kind>weight|bias)"
)
_GROUPED = re.compile(
    r"(?P<before>.*\.mlp\.experts\.)(?P<module>linear_fc[12])\.(?P<kind>weight|bias)(?P<expert>\d{1,9})"
)


def canonical(name: str, layers: int = 0) -> str:
    """The canonical name of a tensor whose layer and expert have the numbers that ``name`` says; "" for what is no
    tensor of a model (``_extra_state``). ``layers`` is how many the model has, which tells what multi-token prediction
    comes after.
    """
    if _EXTRA.search(name):
        return ""
    name = _WRAPPERS.sub("", name, count=1) if (m := _WRAPPERS.match(name)) and not m.start() else name
    if m := _MTP.match(name):
        name = f"decoder.layers.{layers + int(m[1])}.{name[m.end() :]}"
    if m := _FUSED_NORM.fullmatch(name):
        return f"{m['layer']}{_NORM_OF[m['module']]}.{m['kind']}"
    if m := _GROUPED.fullmatch(name):
        return f"{m['before']}local_experts.{int(m['expert'])}.{m['module']}.{m['kind']}"
    return name


def spelled(
    name: str, *, target: str, layers: int, sparse: Collection[int] = (), latent: bool = False, grouped: bool = False
) -> str:
    """The name in a file of ``target`` of the tensor with a canonical name; the inverse of ``canonical``.

    ``layers``: how many the model has without those of multi-token prediction. ``sparse``: the layers with experts,
    counted as in canonical names. ``latent``: its attention is multi-latent (MLA). ``grouped``: its experts are those
    of TEGroupedMLP. ``traits`` says ``sparse`` and ``latent`` of a model's names.
    """
    at = int(m[1]) if (m := _LAYER.match(name)) else -1
    if (
        target == TRANSFORMER_ENGINE
        and (m := _NORM.fullmatch(name))
        and _is_fused(m["norm"], is_sparse=at in sparse, latent=latent)
    ):
        name = f"{m['layer']}{_MODULE_OF[m['norm']]}.layer_norm_{m['kind']}"
    if grouped and (m := _EXPERT.fullmatch(name)):
        name = f"{m['before']}{m['module']}.{m['kind']}{m['expert']}"
    if at >= layers and (m := _LAYER.match(name)):
        rest = name[m.end() :]
        return f"mtp.layers.{at - layers}.{'' if _BESIDE.match(rest) else 'transformer_layer.'}{rest}"
    return name


def _is_fused(norm: str, *, is_sparse: bool, latent: bool) -> bool:
    """Whether Transformer Engine keeps this norm in the linear layer that comes after it."""
    if norm == "pre_mlp_layernorm":
        return not is_sparse
    return latent == norm.startswith("self_attention.")


def traits(names: Iterable[str]) -> tuple[frozenset[int], bool]:
    """(layers with experts, whether attention is multi-latent) of a model with these canonical names."""
    sparse, latent = set(), False
    for name in names:
        if (m := _LAYER.match(name)) and name.startswith("mlp.router.", m.end()):
            sparse.add(int(m[1]))
        latent = latent or ".self_attention.linear_kv_down_proj." in name
    return frozenset(sparse), latent
