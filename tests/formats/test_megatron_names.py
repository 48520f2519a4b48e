"""Megatron's names: every spelling is read as one canonical name, and written again."""

from __future__ import annotations

import itertools

import pytest

from ckpttool.formats.megatron.names import LOCAL, TARGETS, TRANSFORMER_ENGINE, canonical, spelled, traits

LAYERS = 3
"""The last two of five are of multi-token prediction."""


def model(*, latent: bool, sparse: frozenset[int], biases: bool) -> list[str]:
    """Canonical names of everything that a model of the GPT kind has, but for what its activation needs."""
    kinds = ("weight", "bias") if biases else ("weight",)
    attention = ["linear_proj"]
    if latent:
        attention += ["linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj"]
        attention += ["linear_kv_up_proj", "q_layernorm", "kv_layernorm"]
    else:
        attention += ["linear_qkv", "q_layernorm", "k_layernorm"]
    out = ["embedding.word_embeddings.weight", "embedding.position_embeddings.weight", "output_layer.weight"]
    out += [f"decoder.final_layernorm.{k}" for k in kinds]
    for n in range(LAYERS + 2):
        modules = ["input_layernorm", "pre_mlp_layernorm", *(f"self_attention.{a}" for a in attention)]
        if n in sparse:
            out += [f"decoder.layers.{n}.mlp.router.{x}" for x in ("weight", "bias", "expert_bias")]
            out += [f"decoder.layers.{n}.mlp.shared_experts.gate_weight"]
            modules += [f"mlp.shared_experts.linear_fc{i}" for i in (1, 2)]
            modules += [f"mlp.experts.local_experts.{e}.linear_fc{i}" for e in (0, 7, 11) for i in (1, 2)]
        else:
            modules += ["mlp.linear_fc1", "mlp.linear_fc2"]
        if n >= LAYERS:
            modules += ["enorm", "hnorm", "eh_proj", "final_layernorm"]
        out += [f"decoder.layers.{n}.{m}.{k}" for m in modules for k in kinds]
        out += [] if latent else [f"decoder.layers.{n}.self_attention.core_attention.softmax_offset"]
    return out


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("wrapper", ["", "module.", "module.module.", "model."])
def test_every_spelling_is_read_back(target: str, wrapper: str) -> None:
    for latent, biases, grouped, sparse in itertools.product(
        (False, True), (False, True), (False, True), (frozenset[int](), frozenset((1, 2, 3, 4)))
    ):
        names = model(latent=latent, sparse=sparse, biases=biases)
        assert traits(names) == (sparse, latent)
        files = [spelled(n, target=target, layers=LAYERS, sparse=sparse, latent=latent, grouped=grouped) for n in names]
        assert len(set(files)) == len(files), "two tensors under one name"
        assert [canonical(wrapper + f, LAYERS) for f in files] == names


@pytest.mark.parametrize(
    ("name", "local", "fused", "latent"),
    [
        (
            "decoder.layers.0.input_layernorm.weight",
            "",
            "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
            "",
        ),
        ("decoder.layers.0.pre_mlp_layernorm.bias", "", *["decoder.layers.0.mlp.linear_fc1.layer_norm_bias"] * 2),
        ("decoder.layers.1.pre_mlp_layernorm.weight", "", "", ""),
        (
            "decoder.layers.1.self_attention.q_layernorm.weight",
            "",
            "",
            "decoder.layers.1.self_attention.linear_q_up_proj.layer_norm_weight",
        ),
        (
            "decoder.layers.3.self_attention.kv_layernorm.weight",
            "mtp.layers.0.transformer_layer.self_attention.kv_layernorm.weight",
            "",
            "mtp.layers.0.transformer_layer.self_attention.linear_kv_up_proj.layer_norm_weight",
        ),
        ("decoder.layers.4.eh_proj.weight", *["mtp.layers.1.eh_proj.weight"] * 3),
        ("decoder.layers.4.final_layernorm.weight", *["mtp.layers.1.final_layernorm.weight"] * 3),
        (
            "decoder.layers.1.mlp.experts.local_experts.12.linear_fc2.weight",
            *["decoder.layers.1.mlp.experts.linear_fc2.weight12"] * 3,
        ),
    ],
)
def test_spellings_of_megatron_core(name: str, local: str, fused: str, latent: str) -> None:
    """As gpt_layer_specs.py and multi_token_prediction.py of Megatron Core 0.16 build modules; "" is as it is."""
    sparse = frozenset((1, 3, 4))

    def file_name(target: str, latent: bool) -> str:
        return spelled(name, target=target, layers=LAYERS, sparse=sparse, latent=latent, grouped=True)

    if "kv_layernorm" not in name:
        assert file_name(TRANSFORMER_ENGINE, False) == (fused or name)
    assert file_name(TRANSFORMER_ENGINE, True) == (latent or name)
    assert file_name(LOCAL, False) == (local or name)


def test_what_is_no_tensor_of_a_model() -> None:
    for name in ("decoder.layers.0.mlp.linear_fc1._extra_state", "module.decoder.layers.mlp.x._extra_state/shard_0_2"):
        assert canonical(name, LAYERS) == ""


def test_the_prediction_layer_of_later_releases() -> None:
    name = "mtp.layers.1.mtp_model_layer.mlp.router.weight"
    assert canonical(name, 61) == "decoder.layers.62.mlp.router.weight"
