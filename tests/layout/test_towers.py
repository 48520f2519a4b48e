"""Models with towers whose classes transformers does not have: names as their repositories publish them."""

from __future__ import annotations

from typing import Any

import pytest

from ckpttool.layout.family import pick_family

TEXT: dict[str, Any] = {
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "vocab_size": 100,
    "n_routed_experts": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "deepseek_vl_v2": (
        {"language_config": {**TEXT, "model_type": "deepseek_v2"}},
        {
            "language.model.layers.1.mlp.experts.3.up_proj.weight": "column",
            "language.lm_head.weight": "vocab",
            "vision.blocks.0.attn.qkv.weight": "replicate",
            "image_newline": "replicate",
        },
    ),
    "ovis": (
        {"llm_config": {**TEXT, "model_type": "qwen2"}},
        {
            "llm.model.layers.0.self_attn.k_proj.bias": "column kv_heads",
            "visual_tokenizer.head.0.weight": "replicate",
            "vte.weight": "replicate",
        },
    ),
    "minicpmv": (
        TEXT,
        {
            "llm.model.layers.0.self_attn.q_proj.bias": "column heads",
            "llm.model.embed_tokens.weight": "vocab",
            "vpm.encoder.layers.0.self_attn.q_proj.weight": "replicate",
            "resampler.query": "replicate",
        },
    ),
    "dots_ocr": (
        TEXT,
        {"model.layers.0.mlp.down_proj.weight": "row", "vision_tower.blocks.0.attn.qkv.weight": "replicate"},
    ),
    "phi3_v": (
        TEXT,
        {
            "model.layers.0.self_attn.o_proj.weight": "row heads",
            "model.vision_embed_tokens.img_projection.0.weight": "replicate",
        },
    ),
    "molmo": (
        TEXT,
        {
            "model.transformer.blocks.0.att_proj.weight": "fused q:heads k:kv_heads v:kv_heads",
            "model.transformer.blocks.0.ff_out.weight": "row",
            "model.transformer.ff_out.weight": "vocab",
            "model.vision_backbone.image_projector.w1.weight": "replicate",
        },
    ),
    "phi4mm": (
        TEXT,
        {
            "model.layers.0.self_attn.qkv_proj.base_layer.weight": "fused q:heads k:kv_heads v:kv_heads",
            "model.layers.0.self_attn.qkv_proj.lora_A.speech.weight": "replicate",
            "model.layers.0.mlp.down_proj.lora_A.vision.weight": "row",
            "model.layers.0.mlp.down_proj.lora_B.vision.weight": "replicate",
        },
    ),
    "step3_vl": (
        {"text_config": {**TEXT, "model_type": "step3_text"}},
        {"model.embed_tokens.weight": "vocab", "vit_downsampler2.weight": "replicate"},
    ),
    "internvl_chat": (
        {"llm_config": {**TEXT, "model_type": "qwen2"}},
        {"language_model.lm_head.weight": "vocab", "mlp1.0.weight": "replicate"},
    ),
}


@pytest.mark.parametrize("model_type", MODELS)
def test_published_names(model_type: str) -> None:
    config, names = MODELS[model_type]
    family = pick_family("", "", {**config, "model_type": model_type})
    found = {name: place.rule.text for name in names if (place := family.placement(name)) is not None}
    assert found == names
