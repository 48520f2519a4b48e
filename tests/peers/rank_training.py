"""A model of odd shapes whose gradients are the same numbers however it is cut: a step can be compared bit for bit.

The loss is linear: a gradient is a few small integers. A real one would depend on the kernels that matrices of other
sizes and places in memory get, and its mean on the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch._dynamo  # every optimizer loads it, and that takes longer than a job of a rank
import torch.distributed as dist
from torch import nn

Held = dict[str, torch.Tensor]
"""What a run holds, under the names of --to ranks."""
_BLOCK = {
    "gate": (1,), "up.weight": (11, 7), "up.bias": (11,), "down.weight": (7, 11), "norm.weight": (7,), "norm.bias": (7,)
}  # fmt: skip
SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (13, 7),
    **{f"blocks.{i}.{name}": shape for i in range(2) for name, shape in _BLOCK.items()},
    "head.weight": (13, 7),
}
"""13, 11 and 7 do not divide by any number of ranks; a gate of one element leaves most of them with none."""


class Node(nn.Module):
    """The parameters and modules that names begin with."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        below: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, shape in shapes.items():
            first, _, rest = name.partition(".")
            if rest:
                below.setdefault(first, {})[rest] = shape
            else:
                self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        for name, inside in below.items():
            self.add_module(name, Node(inside))

    def forward(self, loss: torch.Tensor, step: int) -> Any:
        for child in self.children():
            loss = child(loss, step)
        numbers = torch.Generator().manual_seed(step)
        for p in self.parameters(recurse=False):
            loss = loss + (p.float() * torch.randint(-8, 9, p.shape, generator=numbers)).sum() / 16
        return loss


class Model(nn.Module):
    positions: torch.Tensor

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]] = SHAPES, *, tied: bool = False, frozen: bool = False
    ) -> None:
        super().__init__()
        for name, module in Node(shapes).named_children():
            self.add_module(name, module)
        if tied:
            self.get_submodule("head").weight = self.get_parameter("embed.weight")
        if frozen:
            self.get_parameter("embed.weight").requires_grad_(False)
            self.get_parameter("blocks.1.up.bias").requires_grad_(False)
        if shapes == SHAPES:
            self.register_buffer("positions", torch.arange(5))

    def forward(self, step: int) -> Any:
        """The loss on this rank. Only rank 0 has gradients: their mean over any ranks is exact then."""
        loss = torch.zeros(())
        for child in self.children():
            loss = child(loss, step)
        return (0 if dist.get_rank() else dist.get_world_size()) * loss

    def groups(self) -> list[dict[str, Any]]:
        """Two groups of an optimizer, as trainers make them."""
        trained = [p for p in self.parameters() if p.requires_grad]
        return [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0, "betas": (0.8, 0.99)},
        ]
