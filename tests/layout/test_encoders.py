"""What encoders hold, where their heads and halves differ; tests/size/data/published.json has whole models."""

from __future__ import annotations

import pytest

from ckpttool.errors import LayoutError
from ckpttool.layout.family import load_family
from ckpttool.layout.shapes import declared_tensors


def test_the_labels_of_a_classifier() -> None:
    """config.json has them as a map."""
    config = {
        "model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 128, "vocab_size": 100,
        "id2label": {"0": "no", "1": "yes", "2": "perhaps"},
    }  # fmt: skip
    shapes = {t.name: t.shape for t in declared_tensors(load_family("bert", config), config)}
    assert shapes["classifier.weight"] == (3, 64)
    assert "bert.pooler.dense.weight" in shapes
    assert "cls.predictions.bias" not in shapes


def test_another_codes_architecture() -> None:
    """Remote code, which calls its models BERT and has other layers."""
    config = {"model_type": "bert", "architectures": ["JinaBertModel"], "num_hidden_layers": 1}
    with pytest.raises(LayoutError, match="another architecture") as caught:
        declared_tensors(load_family("bert", config), config)
    assert 'config.json: `architectures` is ["JinaBertModel"]' in caught.value.where


def test_the_encoder_of_t5_alone() -> None:
    """As pipelines of diffusers have it."""
    config = {
        "model_type": "t5", "architectures": ["T5EncoderModel"], "d_model": 64, "d_kv": 64, "d_ff": 128,
        "num_layers": 2, "num_decoder_layers": 2, "num_heads": 1, "vocab_size": 100,
    }  # fmt: skip
    names = [t.name for t in declared_tensors(load_family("t5", config), config)]
    assert not [n for n in names if n.startswith(("decoder.", "lm_head."))]
    assert sum("relative_attention_bias" in n for n in names) == 1


def test_experts_whose_number_is_a_part_of_a_word() -> None:
    """``expert_3`` of layer 3 is not told from layer 3's number by where it stands between dots."""
    family = load_family("switch_transformers", {"num_layers": 8, "num_heads": 4, "num_experts": 8})
    name = "decoder.block.{}.layer.2.mlp.experts.expert_{}.wi.weight"
    places = [family.placement(name.format(*at)) for at in ((3, 3), (5, 3), (3, 5))]
    assert [(p.layer, p.expert) for p in places if p is not None] == [(3, 3), (5, 3), (3, 5)]


def test_two_stacks_have_no_pipeline() -> None:
    for name in ("t5", "whisper", "bart", "clip"):
        assert load_family(name, {}).spec.no_pipeline
