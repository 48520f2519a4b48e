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
