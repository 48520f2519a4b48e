"""Names of tensors in the rank files of NeMo 1: Megatron Core's behind ``model.``, or those of NeMo's own GPT.

    model.decoder.layers.3.mlp.linear_fc1.weight, model.module.decoder...    Megatron Core's (``mcore_gpt: true``)
    model.language_model.encoder.layers.3.mlp.dense_h_to_4h.weight           NeMo's own

The second kind has the same tensors under other names. Source: ``build_key_mapping`` in
scripts/checkpoint_converters/convert_gpt_nemo_to_mcore.py of NeMo 2.5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckpttool.containers.pickle import printable
from ckpttool.errors import UnsupportedError

_WRAPPERS = re.compile(
    r"model\.(?:module\.)*(?=(?:embedding|decoder|output_layer|mtp|language_model|word_embeddings|rotary_pos_emb)\.)"
)
_CHUNK = re.compile(r"model\.\d+\.")
_OWN = "language_model."
_LAYER = re.compile(r"encoder\.layers\.(?P<number>\d{1,9})\.(?P<module>[\w.]+)\.(?P<kind>weight|bias)")
_MODULES = {
    "input_layernorm": "input_layernorm",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
_OTHERS = {
    "embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight": "embedding.position_embeddings.weight",
    "encoder.final_layernorm.weight": "decoder.final_layernorm.weight",
    "encoder.final_layernorm.bias": "decoder.final_layernorm.bias",
    "output_layer.weight": "output_layer.weight",
}
_FREQUENCIES = "rotary_pos_emb.inv_freq"
"""A buffer that follows from the configuration."""
_CONVERT = "convert it with NeMo's scripts/checkpoint_converters/convert_gpt_nemo_to_mcore.py"


def core_names(state: Mapping[Any, Any], args: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A rank file's values under Megatron Core's names. Raises UnsupportedError for one without such a name."""
    out: dict[str, Any] = {}
    for key, value in state.items():
        name = str(key)
        if _CHUNK.match(name):
            raise UnsupportedError(
                f"a rank holds several chunks of the model (`{printable(name)}`: a virtual pipeline)",
                where=where,
                hint="save it without virtual_pipeline_model_parallel_size",
            )
        name = _WRAPPERS.sub("", name, count=1) if _WRAPPERS.match(name) else name
        if name.endswith(_FREQUENCIES):
            continue
        if name.startswith(_OWN):
            name = _core_name(name.removeprefix(_OWN), args, where)
        elif name == "word_embeddings.weight":
            raise UnsupportedError(
                "the head is a copy of the embedding in a model of NeMo's own", where=where, hint=_CONVERT
            )
        out[name] = value
    return out


def _core_name(name: str, args: Mapping[str, Any], where: str) -> str:
    """Megatron Core's name of a tensor of NeMo's own GPT, without its prefix."""
    if args.get("megatron_legacy") or args.get("transformer_block_type", "pre_ln") != "pre_ln":
        raise UnsupportedError(
            "this is a model of NeMo's own that Megatron Core does not have (megatron_legacy, another order of norms)",
            where=where,
            hint=_CONVERT,
        )
    m = _LAYER.fullmatch(name)
    if m and m["module"] in _MODULES:
        return f"decoder.layers.{m['number']}.{_MODULES[m['module']]}.{m['kind']}"
    if name in _OTHERS:
        return _OTHERS[name]
    raise UnsupportedError(
        f"`{printable(_OWN + name)}` of NeMo's own GPT is not one tensor of Megatron Core", where=where, hint=_CONVERT
    )
