"""What encoders and encoder-decoders hold: parameters of published models, as their pages on the Hugging Face Hub count
them (each tied tensor once)."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from ckpttool.layout.family import find_family, load_family
from ckpttool.layout.shapes import declared_tensors

Config = dict[str, Any]


def t5(width: int, inner: int, layers: int, heads: int, **more: Any) -> Config:
    return {
        "model_type": "t5", "d_model": width, "d_kv": 64, "d_ff": inner, "num_layers": layers,
        "num_decoder_layers": layers, "num_heads": heads, "vocab_size": 32128, **more,
    }  # fmt: skip


def flan(width: int, inner: int, layers: int, heads: int) -> Config:
    return t5(width, inner, layers, heads, feed_forward_proj="gated-gelu", tie_word_embeddings=False)


def whisper(width: int, layers: int, decoder: int, heads: int, mel: int = 80, vocab: int = 51865) -> Config:
    return {
        "model_type": "whisper", "d_model": width, "encoder_layers": layers, "decoder_layers": decoder,
        "encoder_attention_heads": heads, "decoder_attention_heads": heads, "encoder_ffn_dim": 4 * width,
        "decoder_ffn_dim": 4 * width, "num_mel_bins": mel, "vocab_size": vocab,
    }  # fmt: skip


def bert(architecture: str, width: int, layers: int, vocab: int, **more: Any) -> Config:
    return {
        "model_type": "bert", "architectures": [architecture], "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": width // 64, "intermediate_size": 4 * width, "vocab_size": vocab, **more,
    }  # fmt: skip


def clip(name: str, text: Config, vision: Config, **more: Any) -> Config:
    return {"model_type": name, "text_config": text, "vision_config": vision, **more}


def opt(width: int, layers: int) -> Config:
    return {
        "model_type": "opt", "hidden_size": width, "ffn_dim": 4 * width, "num_hidden_layers": layers,
        "num_attention_heads": width // 64, "vocab_size": 50272, "max_position_embeddings": 2048,
    }  # fmt: skip


XLMR = {"model_type": "xlm-roberta", "type_vocab_size": 1}
MODERN = {"model_type": "modernbert", "intermediate_size": 1152}
L14 = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12}
V14 = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": 14,
}
PUBLISHED: dict[str, tuple[Config, int]] = {
    "t5-small": (t5(512, 2048, 6, 8), 60_506_624),
    "t5-base": (t5(768, 3072, 12, 12), 222_903_552),
    "t5-large": (t5(1024, 4096, 24, 16), 737_668_096),
    "flan-t5-base": (flan(768, 2048, 12, 12), 247_577_856),
    "flan-t5-large": (flan(1024, 2816, 24, 16), 783_150_080),
    "flan-t5-xl": (flan(2048, 5120, 24, 32), 2_849_757_184),
    "flan-t5-xxl": (flan(4096, 10240, 24, 64), 11_135_332_352),
    "whisper-tiny": (whisper(384, 4, 4, 6), 37_760_640),
    "whisper-base": (whisper(512, 6, 6, 8), 72_593_920),
    "whisper-small": (whisper(768, 12, 12, 12), 241_734_912),
    "whisper-medium": (whisper(1024, 24, 24, 16), 763_857_920),
    "whisper-large-v3": (whisper(1280, 32, 32, 20, 128, 51866), 1_543_490_560),
    "whisper-large-v3-turbo": (whisper(1280, 32, 4, 20, 128, 51866), 808_878_080),
    "bert-base-uncased": (bert("BertModel", 768, 12, 30522), 109_482_240),
    "bert-base-uncased, MLM": (bert("BertForMaskedLM", 768, 12, 30522), 109_514_298),
    "bert-large-uncased": (bert("BertModel", 1024, 24, 30522), 335_141_888),
    "bge-m3": (bert("XLMRobertaModel", 1024, 24, 250002, **XLMR, max_position_embeddings=8194), 567_754_752),
    "roberta-base": (
        bert("RobertaForMaskedLM", 768, 12, 50265, **{**XLMR, "model_type": "roberta"}, max_position_embeddings=514),
        124_697_433,
    ),
    "xlm-roberta-base": (
        bert("XLMRobertaForMaskedLM", 768, 12, 250002, **XLMR, max_position_embeddings=514),
        278_295_186,
    ),
    "distilbert-base-uncased": (
        {
            "model_type": "distilbert", "architectures": ["DistilBertForMaskedLM"], "dim": 768, "hidden_dim": 3072,
            "n_layers": 6, "n_heads": 12, "vocab_size": 30522,
        },
        66_985_530,
    ),
    "ModernBERT-base": (bert("ModernBertForMaskedLM", 768, 22, 50368, **MODERN), 149_655_232),
    "ModernBERT-large": (
        bert("ModernBertForMaskedLM", 1024, 28, 50368, **{**MODERN, "intermediate_size": 2624}),
        395_881_664,
    ),
    "clip-vit-base-patch32": (clip("clip", {}, {}), 151_277_313),
    "clip-vit-large-patch14": (clip("clip", L14, V14, projection_dim=768), 427_616_513),
    "siglip-base-patch16-224": (clip("siglip", {}, {}), 203_155_970),
    "opt-125m": (opt(768, 12), 125_239_296),
    "opt-6.7b": (opt(4096, 32), 6_658_473_984),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters(name: str) -> None:
    config, count = PUBLISHED[name]
    family = load_family(find_family(config) or "", config)
    assert sum(prod(t.shape) for t in declared_tensors(family, config)) == count


def test_the_labels_of_a_classifier() -> None:
    """config.json has them as a map."""
    config = bert("BertForSequenceClassification", 64, 1, 100, id2label={"0": "no", "1": "yes", "2": "perhaps"})
    shapes = {t.name: t.shape for t in declared_tensors(load_family("bert", config), config)}
    assert shapes["classifier.weight"] == (3, 64)


def test_the_encoder_of_t5_alone() -> None:
    """As pipelines of diffusers have it."""
    config = t5(64, 128, 2, 1, architectures=["T5EncoderModel"])
    names = [t.name for t in declared_tensors(load_family("t5", config), config)]
    assert not [n for n in names if n.startswith(("decoder.", "lm_head."))]
    assert sum("relative_attention_bias" in n for n in names) == 1
