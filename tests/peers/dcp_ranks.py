"""Jobs of ranks: FSDP2 models that are trained and saved with ``dcp.save``, or go on from what ``dcp.load`` loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint._fsspec_filesystem  # every load and save asks for it
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.peers.rank_training import SHAPES, Held, Model

LR = 1e-2
Run = tuple[Model, torch.optim.Optimizer]


def start(
    seed: int, lr: float, *, shapes: Mapping[str, tuple[int, ...]] = SHAPES, frozen: bool = False, groups: bool = False
) -> Run:
    torch.manual_seed(seed)
    model = Model(shapes, frozen=frozen)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, module in model.named_modules():
        if name.rpartition(".")[2].isdigit():
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(model.groups() if groups else trained, lr=lr)


def step(model: Model, optimizer: torch.optim.Optimizer, number: int) -> None:
    model(number).backward()
    optimizer.step()
    optimizer.zero_grad()


def held(model: Model, optimizer: torch.optim.Optimizer) -> Held:
    out = {name: whole(v) for name, v in model.state_dict().items()}
    for name, p in model.named_parameters():
        out |= {f"optimizer/{name}/{state}": whole(v) for state, v in optimizer.state[p].items()}
    return out


def whole(value: Any) -> torch.Tensor:
    found: torch.Tensor = (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
    return found


def train(out: str, case: dict[str, Any]) -> tuple[Held, Held]:
    """Three steps that are saved: what the run holds then, and after one more step."""
    run = start(3, LR, **case)
    for number in range(3):
        step(*run, number)
    model, optimizer = get_state_dict(*run)
    save({"model": model, "optimizer": optimizer}, checkpoint_id=out)
    before = held(*run)
    step(*run, 3)
    return before, held(*run)


def resume(source: str, case: dict[str, Any], *, masters: bool = False, known: bool = True) -> tuple[Held, Held, Held]:
    """The model's weights in ``source``, what a run holds that goes on from it, and after one more step.

    ``masters``: it goes on from the master weights. ``known``: ``source`` has param_groups.
    """
    run = start(9, 0.5 if known else LR, **case)
    model, optimizer = get_state_dict(*run)
    load({"model": model}, checkpoint_id=source)
    weights = {name: whole(v) for name, v in model.items()}
    if masters:
        trained = {n: model[n] for n, p in run[0].named_parameters() if p.requires_grad}
        load({"master_weights": trained}, checkpoint_id=source)
    state: dict[str, Any] = {"optimizer": optimizer}
    load(state, checkpoint_id=source, planner=DefaultLoadPlanner(allow_partial_load=not known))
    set_state_dict(*run, model_state_dict=model, optim_state_dict=state["optimizer"])
    before = held(*run)
    step(*run, 3)
    return weights, before, held(*run)
