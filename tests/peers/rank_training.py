"""A model of odd shapes whose gradients are the same numbers however it is cut: a step can be compared bit for bit.

The loss is linear: a gradient is a few small integers. A real one would depend on the kernels that matrices of other
sizes and places in memory get, and its mean on the order of the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Held = dict[str, torch.Tensor]
"""What a run holds, under the names of --to ranks."""


def pull(module: nn.Module, step: int) -> torch.Tensor:
    """The part of the loss that belongs to the module's own parameters."""
    numbers = torch.Generator().manual_seed(step)
    out = torch.zeros(())
    for p in module.parameters(recurse=False):
        out = out + (p.float() * torch.randint(-8, 9, p.shape, generator=numbers)).sum() / 16
    return out


class Part(nn.Module):
    def __init__(self, *shape: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))
        if bias:
            self.bias = nn.Parameter(torch.zeros(shape[0]))

    def forward(self, loss: torch.Tensor, step: int) -> torch.Tensor:
        return loss + pull(self, step)


class Block(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = Part(11, n, bias=True), Part(n, 11), Part(n, bias=True)
        self.gate = nn.Parameter(torch.ones(1))

    def forward(self, loss: torch.Tensor, step: int) -> Any:
        return self.norm(self.down(self.up(loss, step), step), step) + pull(self, step)


class Model(nn.Module):
    """13 rows, 11 and 7 do not divide by any number of ranks; a gate of one element leaves most with none."""

    positions: torch.Tensor

    def __init__(self, *, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.embed = Part(13, 7)
        self.blocks = nn.ModuleList([Block(7) for _ in range(2)])
        self.head = Part(13, 7)
        self.register_buffer("positions", torch.arange(5))
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.embed.weight.requires_grad_(False)
            self.get_parameter("blocks.1.up.bias").requires_grad_(False)

    def forward(self, step: int) -> Any:
        """The loss on this rank. Only rank 0 has gradients: their mean over any ranks is exact then."""
        loss = self.embed(torch.zeros(()), step)
        for block in self.blocks:
            loss = block(loss, step)
        return (0 if dist.get_rank() else dist.get_world_size()) * self.head(loss, step)
