"""DeepSpeed's ranks train a small model: what tests/peers/test_deepspeed.py lets the processes of a rank_group do.

``python -m tests.peers.deepspeed_side OUT WORLD CASE`` writes what a CASE (JSON) saves and, as OUT.safetensors, what
the engine holds, under the names of --to ranks. With ``round_robin_gradients`` its masters and states are wrong:
DeepSpeed 0.19.8 looks for them in the order of the model.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

with warnings.catch_warnings(action="ignore"):
    import deepspeed
    import deepspeed.runtime.zero.muon.muon_optimizer  # every engine loads it, and that takes longer than a job
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import save_file
from torch import nn

from tests.peers.rank_group import Group
from tests.peers.rank_training import Held, Model

# Or it compiles its own reductions, for half a minute and where there is a compiler; its ranks would poll, not wait.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
FUSED = deepspeed.runtime.engine.FusedAdam


def build(case: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    model = Model(tied=case.get("tied", False), frozen=case.get("frozen", False))
    one_group = [{"params": [p for p in model.parameters() if p.requires_grad]}]
    return configured(case, model, model.groups() if case.get("groups") else one_group)


def configured(case: dict[str, Any], model: nn.Module, groups: Any) -> Any:
    """The engine of a case around a model; ``groups`` are those of its optimizer."""
    kind = getattr(torch.optim, case.get("optimizer", "AdamW"))
    optimizer = kind(groups, lr=1e-2, **case.get("optimizer_args", {}))
    config = {
        "train_batch_size": 2 * dist.get_world_size(),
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": case["stage"], "stage3_param_persistence_threshold": 0, **case.get("zero", {})},
        **case.get("config", {}),
    }
    # The class of NVIDIA's GPUs, which CPUs do not have.
    deepspeed.runtime.engine.FusedAdam = kind if case.get("fused") else FUSED
    if (precision := case.get("precision", "bf16")) != "fp32":
        config.setdefault(precision, {})["enabled"] = True
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n)) if case.get("schedule") else None
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, lr_scheduler=schedule)[0]


def step(engine: Any, number: int) -> None:
    engine.backward(engine(number))
    engine.step()


def without_zero(engine: Any) -> Held:
    """What the optimizer itself holds, which no function of DeepSpeed gives."""
    wrapped, names = engine.optimizer, {id(p): n for n, p in engine.module.named_parameters()}
    out = {n: p.detach().clone() for n, p in engine.module.named_parameters(remove_duplicate=False)}
    out |= {n: b.clone() for n, b in engine.module.named_buffers()}
    inner = getattr(wrapped, "optimizer", wrapped)
    if hasattr(wrapped, "fp32_groups_flat"):
        for params, flat in zip(wrapped.fp16_groups, wrapped.fp32_groups_flat, strict=True):
            steps = inner.state[flat]["step"]
            out |= {f"optimizer/{names[id(p)]}/step": steps.clone() for p in params}
            held = {"": flat, **{k: v for k, v in inner.state[flat].items() if k != "step"}}
            for key, vector in held.items():
                for p, part in zip(params, vector.detach().split([p.numel() for p in params]), strict=True):
                    at = f"optimizer/{names[id(p)]}/{key}" if key else f"master_weights/{names[id(p)]}"
                    out[at] = part.clone().reshape(p.shape)
        return out
    pairs = [(p, p) for g in inner.param_groups for p in g["params"]]
    if hasattr(wrapped, "fp32_groups"):
        mine = zip(wrapped.fp16_groups, wrapped.fp32_groups, strict=True)
        pairs = [pair for a, b in mine for pair in zip(a, b, strict=True)]
        out |= {f"master_weights/{names[id(p)]}": m.detach().clone() for p, m in pairs}
    for p, master in pairs:
        out |= {f"optimizer/{names[id(p)]}/{k}": v.clone() for k, v in inner.state[master].items()}
    return out


def truth(engine: Any, states: list[str]) -> Held:
    if not engine.zero_optimization():
        return without_zero(engine)
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


def train(case: dict[str, Any], save: str = "", load: str = "") -> tuple[Held, Held]:
    """Three steps that are saved, or what is loaded instead: what the engine holds then, and after one more step."""
    engine = build(case)
    if load:
        engine.load_checkpoint(load)
    else:
        for number in range(3):
            step(engine, number)
    if save:
        odd = torch.Generator().get_state()
        engine.save_checkpoint(save, client_state={"epoch": 4, "seen": [1, 2], "odd": odd})
        dist.barrier()
    states = case.get("states", ["exp_avg", "exp_avg_sq"])
    held = truth(engine, states)
    step(engine, 3)
    after = truth(engine, states)
    engine.destroy()
    return held, after


def main() -> None:
    out, world, case = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        group = Group(int(world), Path(folder))
        held, _ = group.run(train, json.loads(case), out)
        group.close()
    save_file({k: v.contiguous().clone() for k, v in held.items()}, f"{out}.safetensors")
    for name in ("zero_to_fp32.py", "zero_to_torch.py"):
        Path(out, name).unlink(missing_ok=True)


if __name__ == "__main__":
    from tests.peers.deepspeed_side import main as named  # the ranks look for their job by the name of its module

    named()
