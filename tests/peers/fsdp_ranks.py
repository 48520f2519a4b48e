"""FSDP's ranks: what tests/peers/test_fsdp.py lets the processes of a rank_group do.

``python -m tests.peers.fsdp_ranks CASE RANKS DIR`` writes a file of each rank into DIR, under verl's names, and
``DIR.safetensors``, what torch itself gathers of them. The fixtures/torch_fsdp are ``uneven`` and ``tp_fsdp`` of 4
ranks and ``fsdp1`` of 2.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import (
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.peers.rank_group import Group


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """13 rows do not divide by any number of ranks, and a norm of 6 leaves some of four ranks with fewer or none."""

    freqs: torch.Tensor

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(13, 6), nn.ModuleList([Block()])
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 13, bias=False)
        self.register_buffer("freqs", torch.arange(3.0))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        torch.manual_seed(step)
        model(torch.randint(0, 13, (2, 5))).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def fsdp2(case: str, model: Model) -> tuple[Any, Any, dict[str, Any]]:
    world = dist.get_world_size()
    if case == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    elif case == "tp_fsdp":
        both = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        for layer in model.layers:
            parallelize_module(layer, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = both["dp"]
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    asked: Any = {"named": model.named_parameters(), "groups": [{"params": decayed}, {"params": others, "lr": 0.1}]}
    optimizer = torch.optim.AdamW(asked.get(case) or model.parameters(), lr=1e-2, foreach=False)
    train(model, optimizer)
    gathered = {name: whole(v) for name, v in model.state_dict().items()}
    for name, p in model.named_parameters():
        gathered |= {f"optimizer/{name}/{state}": whole(v) for state, v in optimizer.state[p].items()}
    return model.state_dict(), optimizer.state_dict(), gathered


def fsdp1(case: str, model: nn.Module) -> tuple[Any, Any, dict[str, Any]]:
    sizes = {"fsdp1_mesh": (dist.get_world_size(),), "fsdp1_hybrid": (2, dist.get_world_size() // 2)}.get(case)
    mesh = init_device_mesh("cpu", sizes) if sizes else None
    strategy = ShardingStrategy.HYBRID_SHARD if case == "fsdp1_hybrid" else None
    policy, device = ModuleWrapPolicy({Block}), torch.device("cpu")
    wrapped = Fsdp1(model, None, strategy, auto_wrap_policy=policy, device_id=device, device_mesh=mesh)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2, foreach=False)
    train(wrapped, optimizer)
    with Fsdp1.state_dict_type(wrapped, StateDictType.FULL_STATE_DICT):
        gathered = dict(wrapped.state_dict())
        states = Fsdp1.full_optim_state_dict(wrapped, optimizer, rank0_only=False)["state"]
    for name, values in states.items():
        gathered |= {f"optimizer/{name}/{state}": v for state, v in values.items()}
    if case == "fsdp1_local":
        with Fsdp1.state_dict_type(wrapped, StateDictType.LOCAL_STATE_DICT):
            return wrapped.state_dict(), optimizer.state_dict(), gathered
    kind = StateDictType.SHARDED_STATE_DICT
    with Fsdp1.state_dict_type(wrapped, kind, ShardedStateDictConfig(), ShardedOptimStateDictConfig()):
        mine = optimizer.state_dict() if case == "fsdp1_flat" else Fsdp1.optim_state_dict(wrapped, optimizer)
        return wrapped.state_dict(), mine, gathered


def save(case: str, out: Path) -> None:
    torch.manual_seed(0)
    model = Model(tied=case == "tied")
    state, optimizer, gathered = (fsdp1 if case.startswith("fsdp1") else fsdp2)(case, model)
    rank, world = dist.get_rank(), dist.get_world_size()
    out.mkdir(exist_ok=True, parents=True)
    extra = {"lr_scheduler": {"last_epoch": 2, "base_lrs": [0.01]}, "rng": {"cpu": torch.arange(4)}}
    for stem, value in (("model", state), ("optim", optimizer), ("extra_state", extra)):
        torch.save(value, out / f"{stem}_world_size_{world}_rank_{rank}.pt")
    if not rank:
        save_file({k: v.detach().contiguous().clone() for k, v in gathered.items()}, f"{out}.safetensors")
    dist.barrier()


def main() -> None:
    case, world, out = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        group = Group(int(world), Path(folder))
        group.run(save, case, Path(out))
        group.close()


if __name__ == "__main__":
    from tests.peers.fsdp_ranks import main as named  # the ranks look for their job by the name of its module

    named()
