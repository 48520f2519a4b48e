"""FSDP2 trains a model of transformers, saves with ``dcp.save`` and resumes with ``dcp.load``. Runs on ranks.

Parameters are float32 and are their own masters; with ``bf16`` the forward and backward passes use bfloat16, which is
how FSDP2 trains in mixed precision.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint._fsspec_filesystem  # every load and save asks for it
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.peers.resume import task
from tests.peers.resume.held import MOMENTS, Bits, Digests, Ran, named
from tests.peers.resume.task import Job
from tests.peers.resume.torch_side import bits, digested, loss_of, mean, transformers_model


def run(job: Job) -> Ran:
    model, optimizer = _start(job)
    if job.load:
        _load(job.load, model, optimizer)
    if job.cold:
        optimizer.state.clear()
    begun, saved, losses = _held(model, optimizer), {}, []
    for step in range(job.first, job.last):
        loss = loss_of(model, step)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(mean(loss))
        optimizer.step()
        optimizer.zero_grad()
        if job.save and step + 1 == task.STEPS:
            _save(job.save, model, optimizer)
            saved = _held(model, optimizer)
    return Ran(begun, saved, losses, {})


def _save(folder: str, model: Any, optimizer: torch.optim.Optimizer) -> None:
    weights, state = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": state, "train_state": {"step": task.STEPS}}, checkpoint_id=folder)
    if not dist.get_rank():
        model.config.save_pretrained(folder)
    dist.barrier()


def _start(job: Job) -> tuple[Any, torch.optim.Optimizer]:
    model = transformers_model(job.weights, torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if job.bf16 else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=task.LR, betas=task.BETAS, eps=task.EPS, weight_decay=task.DECAY
    )
    return model, optimizer


def _load(source: str, model: Any, optimizer: torch.optim.Optimizer) -> None:
    weights, state = get_state_dict(model, optimizer)
    stored = FileSystemReader(Path(source)).read_metadata().state_dict_metadata
    # What has a master goes on from it; what has none is float32 in the source, too.
    masters = {n: v for n, v in weights.items() if f"master_weights.{n}" in stored}
    others = {n: v for n, v in weights.items() if n not in masters}
    load({"master_weights": masters, "model": others}, checkpoint_id=source)
    # What only torch's optimizers know (foreach, fused, ...) may be absent.
    wanted: dict[str, Any] = {"optimizer": state}
    load(wanted, checkpoint_id=source, planner=DefaultLoadPlanner(allow_partial_load=True))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=wanted["optimizer"])


def _held(model: Any, optimizer: torch.optim.Optimizer) -> Digests:
    out: dict[str, Bits] = {}
    for name, p in model.named_parameters():
        state = optimizer.state.get(p, {})
        moments = {kind: bits(state[kind]) for kind in MOMENTS if kind in state}
        out |= named(name, bits(p), None, moments, float(state.get("step", 0)))
    return digested(out)
