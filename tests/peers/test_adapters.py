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
from tests.peers.families.tiny import find
from tests.peers.families.tiny import save as save_tiny

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


MIXTURES = ["deepseek_v3", "gpt_oss", "granitemoehybrid", "hy_v3", "kimi_linear", "lfm2_moe", "mixtral", "qwen3_moe"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("which", ["all-linear", "experts", "one parameter"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_and_modules_as_transformers_names_them(tmp_path: Path, kind: str, which: str) -> None:
    """Logits of the model that was trained. Experts of the tiny models are square where gate and up are joined."""
    model = save_tiny(find(kind)[0], tmp_path / "base")
    experts = {".".join(n.split(".")[-2:]) for n, p in model.named_parameters() if p.dim() == 3 and "experts" in n}
    chosen = sorted(experts) if which == "experts" else [n for n in sorted(experts) if "gate_up" in n]
    options = {"target_modules": "all-linear"} if which == "all-linear" else {"target_parameters": chosen}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=5, **{"target_modules": [], **options}))
    with torch.no_grad():
        for p in wrapped.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) * 0.3)
    wrapped.save_pretrained(tmp_path / "adapter")
    done = ckpttool("merge", f"{tmp_path / 'base'}+{tmp_path / 'adapter'}", "-o", tmp_path / "ours", "--verify")
    assert done.code == 0, done.err
    again = type(model).from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    with torch.no_grad():
        theirs = wrapped(TOKENS).logits
        assert (again(TOKENS).logits - theirs).abs().max() < 1e-4 * theirs.abs().max()
