"""Jobs of ranks: DeepSpeed trains a model whose experts are shared out over ranks, and saves it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

from tests.peers.deepspeed_side import configured, truth
from tests.peers.rank_training import Held

EXPERTS = 4


class Model(nn.Module):
    """Two layers of experts, of sizes that do not divide by any number of ranks."""

    def __init__(self, ep_size: int, *, residual: bool) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(13, 6), nn.LayerNorm(6), nn.Linear(6, 13)
        self.layers = nn.ModuleList()
        for _ in range(2):
            expert = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 6))
            layer = MoE(6, expert, EXPERTS, ep_size, k=1, use_residual=residual, min_capacity=0, use_rts=False)
            self.layers.append(layer)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(self.norm(x)).float().pow(2).mean()


def save(case: dict[str, Any], out: str) -> Held:
    """Three steps that are saved: the model with the experts of all ranks, or what ZeRO's engine says that it holds."""
    torch.manual_seed(3)
    model = Model(case["ep"], residual=case.get("residual", False))
    for rank, p in enumerate(model.parameters()):
        if not getattr(p, "allreduce", True):  # experts of other ranks are other ones
            torch.manual_seed(100 * rank + dist.get_rank() % case["ep"])
            p.data.normal_()
    trained = {"params": [p for p in model.parameters() if p.requires_grad], "name": "all"}
    engine = configured(case, model, split_params_into_different_moe_groups_for_optimizer(trained))
    for number in range(case.get("steps", 3)):
        torch.manual_seed(number)
        engine.backward(engine(torch.randint(0, 13, (2, 5))))
        engine.step()
    engine.save_checkpoint(out)
    held = gathered(engine, case["ep"])
    if case["stage"] and case["ep"] == 1:
        held = truth(engine, ["exp_avg", "exp_avg_sq"])
    engine.destroy()
    return held


def gathered(engine: Any, ep_size: int) -> Held:
    """All experts by their numbers among all."""
    here = {n: v.detach().clone() for n, v in engine.module.state_dict().items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, here)
    each, out = EXPERTS // ep_size, {}
    for rank in range(ep_size):
        for name, value in everyone[rank].items():
            before, mark, after = name.partition(".deepspeed_experts.")
            if mark:
                number, _, rest = after.partition(".")
                out[f"{before}{mark}{int(number) + rank * each}.{rest}"] = value
            else:
                out.setdefault(name, value)
    return out
