"""Ties that a class of transformers has and neither the family nor the ends of names say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.helpers.command import ckpttool
from tests.helpers.tensorfile import Tensors, read
from tests.merge.models import bf16, merge, save

DARE = ("--method", "dare_linear", "--weights", "0.7", "--param", "density=0.5")
Z = "model.layers.{}.shared_transformer.feed_forward.down_proj.weight"
D = "model.layers.0.self_attn.q_proj.weight"
CASES: dict[str, tuple[dict[str, Any], list[list[str]]]] = {
    "BartModel": (
        {"model_type": "bart"},
        [["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]],
    ),
    "BltForCausalLM": (
        {"model_type": "blt", "tie_word_embeddings": True},
        [["lm_head.weight", "model.local_encoder.embed_tokens.weight"]],
    ),
    "DiffusionGemmaForBlockDiffusion": (
        {"model_type": "diffusion_gemma"},
        [[D.replace("model.", "model.decoder.", 1), D.replace("model.", "model.encoder.language_model.", 1)]],
    ),
    "Zamba2ForCausalLM": (
        {"model_type": "zamba2", "num_mem_blocks": 2, "num_attention_heads": 1, "hidden_size": 4},
        [[Z.format(1), Z.format(4), Z.format(9)], [Z.format(3), Z.format(6)]],
    ),
    "LukeForMaskedLM": (
        {"model_type": "luke"},
        [
            ["luke.entity_embeddings.entity_embeddings.weight", "entity_predictions.decoder.weight"],
            ["luke.embeddings.word_embeddings.weight"],
        ],
    ),
}


def models(root: Path, cls: str, **fields: object) -> list[str]:
    """Two models that store all copies; names of those that own a weight."""
    config, groups = CASES[cls]
    for folder in "ab":
        rng = np.random.default_rng(ord(folder))
        values = Tensors()
        for g in groups:
            values |= dict.fromkeys(g, bf16(rng.standard_normal((6, 4))))
        values["x.norm.weight"] = bf16(rng.standard_normal(4))
        save(root / folder, values, {**config, "architectures": [cls], "num_hidden_layers": 12, **fields})
    return [g[0] for g in groups]


@pytest.mark.parametrize("cls", CASES)
def test_what_a_class_ties_is_merged_once(tmp_path: Path, cls: str) -> None:
    owners = models(tmp_path, cls)
    merge(tmp_path / "a", "--base", tmp_path / "b", *DARE, "-o", tmp_path / "dst")
    assert set(read(tmp_path / "dst" / "model.safetensors")) == {*owners, "x.norm.weight"}


def test_nothing_is_tied_where_the_config_says_so(tmp_path: Path) -> None:
    models(tmp_path, "BltForCausalLM", tie_word_embeddings=False)
    merge(tmp_path / "a", "--base", tmp_path / "b", *DARE, "-o", tmp_path / "dst")
    assert "model.local_encoder.embed_tokens.weight" in read(tmp_path / "dst" / "model.safetensors")


@pytest.mark.parametrize("trained", [("decoder",), ("encoder.language_model",), ("decoder", "encoder.language_model")])
def test_factors_of_layers_that_are_one_weight_are_refused(tmp_path: Path, trained: tuple[str, ...]) -> None:
    """The model that was trained has a change of its own in each of them."""
    rng = np.random.default_rng(1)
    owner = D.replace("model.", "model.decoder.", 1)
    config = {**CASES["DiffusionGemmaForBlockDiffusion"][0], "architectures": ["DiffusionGemmaForBlockDiffusion"]}
    save(tmp_path / "base", {owner: bf16(rng.standard_normal((6, 4)))}, config)
    factors = {}
    for part in trained:
        module = "base_model.model." + D.replace("model.", f"model.{part}.", 1).removesuffix(".weight")
        factors[f"{module}.lora_A.weight"] = rng.standard_normal((2, 4)).astype(np.float32)
        factors[f"{module}.lora_B.weight"] = rng.standard_normal((6, 2)).astype(np.float32)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2})
    )
    save_file(factors, tmp_path / "adapter" / "adapter_model.safetensors")
    done = ckpttool("merge", f"{tmp_path / 'base'}+{tmp_path / 'adapter'}", "-o", tmp_path / "dst")
    assert done.code != 0
    assert "are one weight in the model" in done.err
    assert not (tmp_path / "dst").exists()
