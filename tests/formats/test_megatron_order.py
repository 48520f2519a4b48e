"""The order of Megatron Core's ``named_parameters()``."""

from __future__ import annotations

from ckpttool.formats.megatron import names
from ckpttool.formats.megatron.order import in_model_order, is_parameter

# Every kind of module of the local spec, in the order of the constructors of megatron-core 0.16.1.
LOCAL = [
    "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight",
    "decoder.layers.0.input_layernorm.weight",
    "decoder.layers.0.self_attention.linear_proj.weight",
    "decoder.layers.0.self_attention.linear_proj.bias",
    "decoder.layers.0.self_attention.linear_qkv.weight",
    "decoder.layers.0.self_attention.linear_qkv.bias",
    "decoder.layers.0.self_attention.q_layernorm.weight",
    "decoder.layers.0.self_attention.k_layernorm.weight",
    "decoder.layers.0.pre_mlp_layernorm.weight",
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.layers.0.mlp.linear_fc1.bias",
    "decoder.layers.0.mlp.linear_fc2.weight",
    "decoder.layers.0.mlp.linear_fc2.bias",
    "decoder.layers.1.input_layernorm.weight",
    "decoder.layers.1.self_attention.core_attention.softmax_offset",
    "decoder.layers.1.self_attention.linear_proj.weight",
    "decoder.layers.1.self_attention.linear_q_down_proj.weight",
    "decoder.layers.1.self_attention.linear_q_up_proj.weight",
    "decoder.layers.1.self_attention.linear_kv_down_proj.weight",
    "decoder.layers.1.self_attention.linear_kv_up_proj.weight",
    "decoder.layers.1.self_attention.q_layernorm.weight",
    "decoder.layers.1.self_attention.kv_layernorm.weight",
    "decoder.layers.1.pre_mlp_layernorm.weight",
    "decoder.layers.1.mlp.router.weight",
    "decoder.layers.1.mlp.router.bias",
    "decoder.layers.1.mlp.router.expert_bias",
    "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight",
    "decoder.layers.1.mlp.experts.local_experts.2.linear_fc2.weight",
    "decoder.layers.1.mlp.experts.local_experts.10.linear_fc1.weight",
    "decoder.layers.1.mlp.experts.local_experts.10.linear_fc2.weight",
    "decoder.layers.1.mlp.shared_experts.gate_weight",
    "decoder.layers.1.mlp.shared_experts.linear_fc1.weight",
    "decoder.layers.1.mlp.shared_experts.linear_fc2.weight",
    "decoder.layers.10.input_layernorm.weight",
    "decoder.final_layernorm.weight",
    "mtp.layers.0.enorm.weight",
    "mtp.layers.0.hnorm.weight",
    "mtp.layers.0.eh_proj.weight",
    "mtp.layers.0.transformer_layer.input_layernorm.weight",
    "mtp.layers.0.final_layernorm.weight",
    "output_layer.weight",
]


def test_local() -> None:
    assert in_model_order(sorted(LOCAL)) == in_model_order(reversed(LOCAL)) == LOCAL


def test_transformer_engine() -> None:
    layer = "decoder.layers.0."
    held = [
        "input_layernorm.weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_qkv.bias",
        "self_attention.linear_proj.weight",
        "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    ]
    found = in_model_order(names.spelled(layer + n, target=names.TRANSFORMER_ENGINE, layers=1) for n in held)
    assert [n.removeprefix(layer) for n in found] == [
        "self_attention.linear_proj.weight",
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_qkv.bias",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    ]


def test_grouped_experts_have_weight_and_bias_of_one_side_by_side() -> None:
    wanted = [f"decoder.layers.0.mlp.experts.linear_fc1.{k}{e}" for e in (0, 1, 2, 10) for k in ("weight", "bias")]
    assert in_model_order(reversed(wanted)) == wanted


def test_buffers() -> None:
    assert [n for n in LOCAL if not is_parameter(n)] == ["decoder.layers.1.mlp.router.expert_bias"]
