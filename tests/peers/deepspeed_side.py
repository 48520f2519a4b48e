"""One rank of DeepSpeed that trains a small model: python deepspeed_side.py OUT CASE (JSON), with torchrun's variables.

It takes ``steps`` (3) from ``first`` (0) on, after it has loaded ``load``, and saves to OUT unless ``save`` is false.
Rank 0 writes what its engine holds to OUT.truth, a safetensors file with the names of --to ranks. With
``round_robin_gradients`` its masters and states are wrong: DeepSpeed 0.19.8 looks for them in the order of the model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import save_file

WORDS = 13


class Block(torch.nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(n, 11)
        self.down = torch.nn.Linear(11, n, bias=False)
        self.norm = torch.nn.LayerNorm(n)
        self.gate = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: Any) -> Any:
        return x + self.gate * self.down(torch.tanh(self.up(self.norm(x))))


class Model(torch.nn.Module):
    def __init__(self, n: int = 7) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, n)
        self.blocks = torch.nn.ModuleList([Block(n) for _ in range(2)])
        self.head = torch.nn.Linear(n, WORDS, bias=False)
        self.register_buffer("positions", torch.arange(5))

    def forward(self, x: Any) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(case: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    model = Model()
    if case.get("tied"):
        model.head.weight = model.embed.weight
    if case.get("frozen"):
        model.embed.weight.requires_grad_(False)
        model.get_parameter("blocks.1.up.bias").requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained}]
    if case.get("groups"):
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0, "betas": (0.8, 0.99)},
        ]
    kind = getattr(torch.optim, case.get("optimizer", "AdamW"))
    optimizer = kind(groups, lr=1e-2, **case.get("optimizer_args", {}))
    config = {
        "train_batch_size": 2 * dist.get_world_size(),
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": case["stage"], "stage3_param_persistence_threshold": 0, **case.get("zero", {})},
        **case.get("config", {}),
    }
    if (precision := case.get("precision", "bf16")) != "fp32":
        config.setdefault(precision, {})["enabled"] = True
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n)) if case.get("schedule") else None
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, lr_scheduler=schedule)[0]


def step(engine: Any, number: int) -> None:
    torch.manual_seed(20 + number + 100 * dist.get_rank())
    x = torch.randint(0, WORDS, (2, 5))
    engine.backward(torch.nn.functional.cross_entropy(engine(x).float().flatten(0, 1), x.flatten()))
    engine.step()


def truth(engine: Any, states: list[str]) -> dict[str, torch.Tensor]:
    """What the engine holds, under the names of --to ranks."""
    wrapped = engine.optimizer
    if hasattr(wrapped, "_hp_optimizer_states_linked"):  # with several groups only the first one is
        wrapped._hp_optimizer_states_linked = False
        wrapped._lazy_init_hp_params_optimizer_state()
    out = {}
    for name, p in engine.module.named_parameters(remove_duplicate=False):
        shape = getattr(p, "ds_shape", p.shape)
        if not p.requires_grad:
            with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
                out[name] = p.detach().clone()
            continue
        master = safe_get_full_fp32_param(p)
        master = (p.detach().float() if master is None else master).clone().reshape(shape)
        out[name] = master.to(p.dtype)
        if p.dtype != torch.float32:
            out[f"master_weights/{name}"] = master
        for state in states:
            if (value := safe_get_full_optimizer_state(p, state)) is not None:
                out[f"optimizer/{name}/{state}"] = value.clone().reshape(shape)
    return out | {name: b.clone() for name, b in engine.module.named_buffers()}


def main() -> None:
    out, case = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    engine = build(case)
    if case.get("load"):
        engine.load_checkpoint(case["load"])
    first = case.get("first", 0)
    for number in range(first, first + case.get("steps", 3)):
        step(engine, number)
    if case.get("save", True):
        odd = torch.Generator().get_state()
        engine.save_checkpoint(out, client_state={"epoch": 4, "seen": [1, 2], "odd": odd})
    held = truth(engine, case.get("states", ["exp_avg", "exp_avg_sq"]))
    if dist.get_rank() == 0:
        save_file({k: v.contiguous().clone() for k, v in held.items()}, out + ".truth")
        for name in ("zero_to_fp32.py", "zero_to_torch.py"):
            Path(out, name).unlink(missing_ok=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
