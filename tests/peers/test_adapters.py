"""Adapters on tied models: what ``merge BASE+ADAPTER`` writes is what PEFT's merge_and_unload saves.

Factors that PEFT trained as one are another matter: merge_and_unload adds them twice to the one weight, and the model
that was trained is the judge.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.command import ckpttool

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TOKENS = torch.tensor([[1, 5, 9, 30, 2, 17]])
CASES: dict[str, dict[str, Any]] = {
    "embeddings replaced": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "head replaced": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "both replaced": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "factors of the embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "factors of the head": {"target_modules": ["q_proj", "lm_head"]},
    "factors of both": {"target_modules": ["embed_tokens", "lm_head"]},
    "embeddings replaced, factors of the head": {"target_modules": ["lm_head"], "modules_to_save": ["embed_tokens"]},
    "head replaced, factors of the embeddings": {"target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"]},
    "kept tied, embeddings replaced": {
        "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True,
    },
    "kept tied, factors of the embeddings": {
        "target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True,
    },
}  # fmt: skip


def base(folder: Path, *, stored: bool) -> Path:
    """A tied model; ``stored``: its file holds the head as well."""
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(7)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    if stored:
        tensors = load_file(folder / "model.safetensors")
        save_file({**tensors, HEAD: tensors[EMBEDDING].clone()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def train(folder: Path, adapter: Path, options: dict[str, Any]) -> None:
    """An adapter as PEFT saves it, with random numbers in everything that would be trained."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for p in wrapped.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) * 0.3)
    wrapped.save_pretrained(adapter)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stored", [False, True], ids=["one tensor", "head stored"])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_tied_base(tmp_path: Path, options: dict[str, Any], stored: bool) -> None:
    folder, adapter = base(tmp_path / "base", stored=stored), tmp_path / "adapter"
    train(folder, adapter, options)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    merged = peft.PeftModel.from_pretrained(model, adapter)
    once = options.get("ensure_weight_tying") and "modules_to_save" not in options
    if not once:
        merged = merged.merge_and_unload()
        merged.save_pretrained(tmp_path / "theirs")
    done = ckpttool("merge", f"{folder}+{adapter}", "-o", tmp_path / "ours", "--verify")
    assert done.code == 0, done.err
    ours, theirs = (load_file(tmp_path / d / "model.safetensors") for d in ("ours", "base" if once else "theirs"))
    assert set(ours) - {HEAD} == set(theirs) - {HEAD}
    for name, expected in theirs.items():
        assert once or torch.allclose(ours[name], expected, rtol=1e-5, atol=1e-6), name
    configs = [json.loads((tmp_path / d / "config.json").read_text()) for d in ("ours", "base" if once else "theirs")]
    tied = configs[1]["tie_word_embeddings"]
    assert configs[0]["tie_word_embeddings"] == tied
    if tied and HEAD in ours:
        assert torch.equal(ours[HEAD], ours[EMBEDDING])
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    with torch.no_grad():
        torch.testing.assert_close(again(TOKENS).logits, merged(TOKENS).logits, rtol=1e-5, atol=1e-5)
