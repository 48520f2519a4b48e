"""Presets know modules by their names: tensors of transformers' models, and what holds each of them there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckpttool.quant.keep import Keep, Weight
from tests.helpers.command import ckpttool
from tests.helpers.tensorfile import Raw, assert_same, read_all, save_hf

KEPT = (
    "shared", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias", "model.decoder.embed_positions",
    "transformer.tokens_embed", "transformer.positions_embed", "transformer.wpe", "transformer.wte",
    "bert.embeddings.token_type_embeddings", "model.embed_tokens_per_layer", "gpt_neox.embed_in", "embed_out",
    "model.layers.0.mlp.gate", "model.layers.0.mlp.router.classifier", "model.layers.0.block_sparse_moe.router.layer",
    "model.layers.0.mlp.shared_expert_gate", "lm_head", "lm_head.dense", "score", "classifier", "transformer.w",
    "model.segment_emb", "model.embed_tokens_extend.audio_embed.encoder.encoders.0.self_attn.q_proj",
    "model.visual.blocks.0.mlp.fc1", "vision_model.encoder.layers.0.mlp.fc1", "model.layers.0.conv.in_proj",
    "model.layers.0.self_attn.q_norm", "transformer_blocks.0.norm1.linear", "model.layers.61.shared_head.head",
    "model.layers.61.eh_proj", "model.layers.0.self_attn.indexer.weights_proj",
)  # fmt: skip
LINEAR = (
    "roberta_prelayernorm.encoder.layer.0.attention.self.query", "convbert.encoder.layer.0.intermediate.dense",
    "roberta_prelayernorm.encoder.layer.0.output.dense", "visual_bert.encoder.layer.0.attention.self.query",
    "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.experts.3.w1",
    "encoder.block.0.layer.0.SelfAttention.q", "backbone.layers.0.mixer.in_proj", "model.layers.0.mixer.dt_proj",
    "transformer.h.0.attn.attention.out_proj", "model.layers.0.self_attn.kv_a_proj_with_mqa",
)  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_what_is_no_linear_stays(name: str) -> None:
    assert Keep().why(Weight(f"{name}.weight", "BF16", (64, 64))) == "preset"


@pytest.mark.parametrize("name", LINEAR)
def test_linear_weights_are_quantized_whatever_the_model_is_called(name: str) -> None:
    assert not Keep().why(Weight(f"{name}.weight", "BF16", (64, 64)))


@pytest.mark.parametrize("model_type", ["openai-gpt", "gpt_neo"])
def test_conv1d_is_told_by_the_model(model_type: str, tmp_path: Path) -> None:
    """GPT-1's ``c_fc`` is [in, out], GPT-Neo's a Linear: the names are the same. size agrees with the cast."""
    ones = np.full((64, 256), 0x3F80, "<u2")
    tensors = {"transformer.h.0.mlp.c_fc.weight": Raw("BF16", ones), "transformer.h.0.x.weight": Raw("BF16", ones)}
    source = save_hf(tmp_path / "src", tensors, {"model_type": model_type})
    done = ckpttool("quantize", source, tmp_path / "out")
    assert done.code == 0, done.err
    found = read_all(tmp_path / "out")
    assert found["transformer.h.0.x.weight"].dtype == "F8_E4M3"
    quantized = found["transformer.h.0.mlp.c_fc.weight"].dtype == "F8_E4M3"
    assert quantized == (model_type == "gpt_neo")
    size = ckpttool("size", source, "--recipe", "block", "--by", "tensor")
    assert size.code == 0, size.err
    assert ("c_fc.weight_scale_inv" in size.out) == quantized


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize(
    "recipe",
    [
        ("block", "--scale-dtype", "e8m0"), ("block", "--scale-dtype", "bf16"), ("block", "--scale-dtype", "pow2"),
        ("tensor",),
        ("block", "--quant-method", "compressed-tensors", "--scale-dtype", "f32"), ("channel", "--scale-dtype", "f32"),
        ("channel", "--quant-method", "fbgemm_fp8"), ("tensor", "--quant-method", "modelopt"), ("mxfp8",), ("nvfp4",),
        ("mxfp4",),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_cast_of_a_cast_changes_nothing(recipe: tuple[str, ...], tmp_path: Path) -> None:
    bits = np.random.default_rng(5).normal(size=(256, 256)).astype("<f4").view("<u4") >> 16
    config = {"model_type": "llama", "torch_dtype": "bfloat16"}
    source = save_hf(tmp_path / "src", {"a.q_proj.weight": Raw("BF16", bits.astype("<u2"))}, config)
    first = ckpttool("quantize", source, tmp_path / "one", "--recipe", *recipe)
    assert "1 weight quantized" in first.err
    second = ckpttool("quantize", tmp_path / "one", tmp_path / "two", "--recipe", *recipe)
    assert "1 weight already in this form" in second.err
    assert_same(read_all(tmp_path / "two"), read_all(tmp_path / "one"))
