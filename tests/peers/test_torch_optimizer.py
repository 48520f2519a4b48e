"""Directories that the Trainer of transformers writes: every state belongs to the parameter that torch says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.trainer import Trainer
from transformers.training_args import TrainingArguments

from ckpttool.layout.family import pick_family
from tests.helpers.command import reshard
from tests.helpers.tiny_models import VARIANTS, tiny_config, tiny_model

ORDERED = sorted(set(VARIANTS) - {"gpt2", "gpt_neox", "gemma2", "gemma3_text"})
"""Variants whose family says the order of the model's parameters."""


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_the_order_of_a_family_is_that_of_the_model(variant: str) -> None:
    names = [n for n, _ in tiny_model(variant).named_parameters()]
    found = pick_family("", "", tiny_config(variant).to_dict()).parameter_order(sorted(names))
    assert found == (names if variant in ORDERED else [])


def trained(variant: str, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A directory after three steps, and the states of its optimizer by the names of their parameters."""
    trainer = run(variant, folder)
    model: Any = trainer.model
    optimizer: Any = trainer.optimizer
    states = {f"{n}/{k}": v for n, p in model.named_parameters() for k, v in optimizer.state[p].items()}
    return folder / "checkpoint-3", states


def run(variant: str, folder: Path) -> Trainer:
    model = tiny_model(variant).train()
    numbers = torch.randint(0, 150, (8, 12), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=3, save_steps=3, per_device_train_batch_size=2, use_cpu=True, report_to=[],
        weight_decay=0.1, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": n, "labels": n} for n in numbers])
    trainer.train()
    return trainer


def published(trainer: Trainer, folder: Path) -> dict[str, torch.Tensor]:
    """The states by the names of published tensors: transformers itself saves a model that has moments for weights."""
    model: Any = trainer.model
    optimizer: Any = trainer.optimizer
    out: dict[str, torch.Tensor] = {}
    for key in ("exp_avg", "exp_avg_sq"):
        with torch.no_grad():
            for p in model.parameters():
                held = optimizer.state[p]
                p.copy_(held[key] if held else torch.full_like(p, torch.nan))
        model.save_pretrained(folder / key)
        out |= {
            f"{n}/{key}": t for n, t in load_file(folder / key / "model.safetensors").items() if not t.isnan().any()
        }
    buffers = {n for n in load_file(folder / key / "model.safetensors") if n.endswith("e_score_correction_bias")}
    out = {n: t for n, t in out.items() if n.rpartition("/")[0] not in buffers}
    return out | {f"{n.rpartition('/')[0]}/step": torch.tensor(3.0) for n in out}


def same(folder: Path, states: dict[str, torch.Tensor]) -> None:
    found = load_file(folder / "rank-00000-of-00001.safetensors")
    found = {n.removeprefix("optimizer/"): t for n, t in found.items() if n.startswith("optimizer/")}
    assert found.keys() == states.keys()
    for name, t in states.items():
        assert torch.equal(found[name], t), name


@pytest.mark.parametrize("variant", ["llama_tied", "qwen2", "qwen3"])
def test_a_directory_of_the_trainer(variant: str, tmp_path: Path) -> None:
    """Weights in safetensors, which sort names, and two groups of numbers."""
    source, states = trained(variant, tmp_path / "run")
    reshard(source, tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    same(tmp_path / "out", states)
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    (source / "config.json").unlink()
    model = tiny_model(variant).state_dict()
    torch.save({n: tensors.get(n, tensors["model.embed_tokens.weight"]) for n in model}, source / "pytorch_model.bin")
    reshard(source, tmp_path / "bin", "--to", "ranks", "--tp-out", 1)
    same(tmp_path / "bin", states)


EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v3", "qwen2_moe", "ernie4_5_moe", "glm4_moe", "gpt_oss")


@pytest.mark.sample("qwen3_moe", "deepseek_v3")
@pytest.mark.parametrize("variant", EXPERTS)
def test_experts_in_one_tensor(variant: str, tmp_path: Path) -> None:
    """The model's files have a tensor for each expert, the optimizer has one for all."""
    trainer = run(variant, tmp_path / "run")
    reshard(tmp_path / "run/checkpoint-3", tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    same(tmp_path / "out", published(trainer, tmp_path))


def test_experts_in_one_tensor_by_name(tmp_path: Path) -> None:
    """An optimizer of named parameters has the names of the model in memory."""
    trainer = run("qwen3_moe", tmp_path / "run")
    model: Any = trainer.model
    source = tmp_path / "run/checkpoint-3"
    state = torch.load(source / "optimizer.pt", weights_only=True)
    names = {id(p): n for n, p in model.named_parameters()}
    optimizer: Any = trainer.optimizer
    for group, held in zip(state["param_groups"], optimizer.param_groups, strict=True):
        group["param_names"] = [names[id(p)] for p in held["params"]]
    torch.save(state, source / "optimizer.pt")
    reshard(source, tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    same(tmp_path / "out", published(trainer, tmp_path))
