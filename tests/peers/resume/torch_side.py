"""What FSDP2 and DeepSpeed have in common: the model of transformers, the loss, and names. Runs on ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.peers.resume.held import Bits, Digests, digests, unrounded
from tests.peers.resume.task import sentences


def transformers_model(weights: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_pretrained(
        weights, dtype=dtype, experts_implementation="eager", attn_implementation="eager"
    ).train()


def loss_of(model: Any, step: int, shards: int | None = None) -> torch.Tensor:
    """The mean cross entropy of this rank's sentences."""
    rank, world = (0, 1) if shards == 1 else (dist.get_rank(), dist.get_world_size())
    mine = torch.from_numpy(sentences(step)).chunk(world)[rank]
    logits = model(input_ids=mine[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), mine[:, 1:].flatten())


def mean(loss: torch.Tensor) -> float:
    """Over all ranks."""
    total = loss.detach().double()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def bits(value: Any) -> Bits:
    """A tensor of any rank, whole, as float32 or the bits of bfloat16."""
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    array: torch.Tensor = whole.detach().contiguous().clone()
    return array.view(torch.uint16).numpy() if array.dtype == torch.bfloat16 else array.numpy()


def digested(arrays: dict[str, Bits]) -> Digests:
    """Raises RuntimeError where weights are not their masters, rounded."""
    if wrong := unrounded(arrays):
        raise RuntimeError(f"weights are not their masters: {wrong[:3]}")
    odd = [n for n, v in arrays.items() if v.dtype not in (np.float32, np.uint16)]
    if odd:
        raise RuntimeError(f"neither float32 nor bfloat16: {odd[:3]}")
    return digests(arrays)
