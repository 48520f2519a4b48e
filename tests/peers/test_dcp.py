"""torch.distributed.checkpoint itself: it loads what the tool writes, and the tool reads what it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tests.helpers.command import reshard
from tests.helpers.tiny_models import tiny_model
from tests.peers.test_torch_bin import same

FIXTURES = Path("fixtures/dcp")


def whole(save: Path, scratch: Path) -> dict[str, Any]:
    """All that a save holds, as torch itself puts it together."""
    dcp_to_torch_save(save, scratch)
    found: dict[str, Any] = torch.load(scratch, weights_only=False)
    return found


@pytest.mark.parametrize("files", [1, 2, 5])
def test_torch_puts_together_what_is_written(files: int, tmp_path: Path) -> None:
    source = FIXTURES / "hsdp2x2_llama" / "checkpoint"
    reshard(source, tmp_path / "save", "--to", "dcp", "--sharding-out", files)
    before, after = whole(source, tmp_path / "a.pt"), whole(tmp_path / "save", tmp_path / "b.pt")
    same(after["model"], before["model"])
    assert after["optimizer"]["param_groups"] == before["optimizer"]["param_groups"]
    for name, states in before["optimizer"]["state"].items():
        same(after["optimizer"]["state"][name], states)
    assert torch.equal(after["step"], before["step"])
    assert after["lr"] == before["lr"]


@pytest.mark.parametrize("name", ["uneven", "hf_mixtral"])
def test_every_dtype_and_shape(name: str, tmp_path: Path) -> None:
    reshard(FIXTURES / name / "checkpoint", tmp_path / "save", "--to", "dcp", "--sharding-out", 3)
    same(whole(tmp_path / "save", tmp_path / "a.pt")["model"], load_file(FIXTURES / name / "model.safetensors"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_training_is_resumed(tmp_path: Path) -> None:
    """dcp.load into a model and its optimizer: the next step is that of the run that was not converted."""

    def trainer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.BatchNorm1d(10), torch.nn.Linear(10, 3))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(4)
        model(torch.randn(8, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    first = trainer()
    step(*first)
    model_state, optimizer_state = get_state_dict(*first)
    save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path / "saved", no_dist=True)
    reshard(tmp_path / "saved", tmp_path / "written", "--to", "dcp", "--sharding-out", 4)
    second = trainer()
    model_state, optimizer_state = get_state_dict(*second)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    load(state, checkpoint_id=tmp_path / "written", no_dist=True)
    set_state_dict(*second, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for run in (first, second):
        step(*run)
    same(second[0].state_dict(), first[0].state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("variant", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_the_experts_of_a_model_in_memory(variant: str, tmp_path: Path) -> None:
    """transformers 5 trains all experts in one tensor and publishes one for each: both ways, moments too."""
    model = tiny_model(variant).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.arange(24).reshape(2, 12)).logits.square().sum().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    assert any(n.endswith("mlp.experts.gate_up_proj") for n in model_state)
    save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path / "run", no_dist=True)
    config = model.config.to_json_string(use_diff=False)
    (tmp_path / "run/config.json").write_text(config)
    reshard(tmp_path / "run", tmp_path / "hf", "--to", "hf")
    model.save_pretrained(tmp_path / "want")
    same(load_file(tmp_path / "hf/model.safetensors"), load_file(tmp_path / "want/model.safetensors"))
    # Under published names, and back in the trainer's.
    betas = ("--betas", "0.9,0.999")
    reshard(tmp_path / "run", tmp_path / "paddle", "--to", "unified", *betas)
    reshard(tmp_path / "paddle", tmp_path / "back", "--to", "dcp", "--target", "transformers", *betas)
    reshard(tmp_path / "run", tmp_path / "kept", "--to", "universal")
    reshard(tmp_path / "kept", tmp_path / "again", "--to", "dcp", "--sharding-out", 2)
    for folder in (tmp_path / "back", tmp_path / "again"):
        found = whole(folder, tmp_path / "one.pt")
        same(found["model"], whole(tmp_path / "run", tmp_path / "run.pt")["model"])
        states: Any = optimizer_state["state"]
        for name, held in states.items():
            for key, value in held.items():
                assert torch.equal(found["optimizer"]["state"][name][key], value), (name, key)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_what_is_written_for_torchtitan(tmp_path: Path) -> None:
    """Names, keys and rotary order of a save that torchtitan's checkpointer wrote, from the published form of it."""
    source = FIXTURES / "titan_llama3" / "checkpoint"
    betas = ("--betas", "0.9,0.95")
    reshard(source, tmp_path / "paddle", "--to", "unified", *betas)
    reshard(tmp_path / "paddle", tmp_path / "titan", "--to", "dcp", "--target", "torchtitan", *betas)
    before, after = whole(source, tmp_path / "a.pt"), whole(tmp_path / "titan", tmp_path / "b.pt")
    for name, value in before.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(after[name], value), name
    assert any(n.startswith("optimizer.state.layers.0.attention.qkv_linear.wq") for n in after)
