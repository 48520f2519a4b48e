"""What transformers' tensor-parallel plans make of a model: which rank holds which element of which stored tensor.

A model is filled with numbers, one for each element. transformers' own code says how each parameter in memory is cut
(``apply_tensor_parallelism`` and ``apply_expert_parallelism``, in a process group that is only played), and slices
it (``DtensorShardOperation``, which reads a rank's share from files). transformers' own way of saving brings the
numbers to the names and shapes of checkpoints. No rule of ckpttool is asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.core_model_loading import revert_weight_conversion
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.sharding_utils import DtensorShardOperation
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers.initialization import no_tie_weights

GATHERED = frozenset({"colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep"})
"""Styles whose results are put together at once, so that a cut may fall anywhere."""
Owners = dict[str, NDArray[np.int64]]
"""By stored name: for each element, bit r is set where rank r holds it."""


@contextlib.contextmanager
def played_group(rank: int, world: int) -> Iterator[None]:
    """A process group of ``world`` of which only this rank is there, and in which nothing is sent."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def has_plan(model: Any) -> bool:
    return bool(model.tp_plan)


def stored(model: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by their names in memory -> as save_pretrained names and shapes them."""
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    tied = {k: v for k, v in (getattr(model, "all_tied_weights_keys", None) or {}).items() if k in values}
    kept = {k: v.clone() for k, v in values.items() if k not in ignored and k not in tied}
    return {k: v.contiguous() for k, v in revert_weight_conversion(model, kept).items()}


def numbered(model: Any) -> dict[str, torch.Tensor]:
    """The model's state, every element with a number of its own. The same tensor under two names has the same ones."""
    out: dict[str, torch.Tensor] = {}
    seen: dict[int, torch.Tensor] = {}
    following = 1
    for name, t in model.state_dict(keep_vars=True).items():
        key = t.data_ptr()
        if key not in seen or seen[key].shape != t.shape:
            seen[key] = torch.arange(following, following + t.numel(), dtype=torch.float64).reshape(t.shape)
            following += t.numel()
        out[name] = seen[key]
    return out


def _held(build: Any, full: dict[str, torch.Tensor], rank: int, tp: int, *, experts: bool) -> dict[str, torch.Tensor]:
    """What one rank holds of every parameter, by names in memory."""
    with no_tie_weights():
        model = build()
    with played_group(rank, tp):
        config = DistributedConfig(tp_size=tp, ep_size=tp if experts else 1)
        tp_plan, ep_plan, _ = model._resolve_parallel_plans(config)
        mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
        apply_tensor_parallelism(model, mesh, tp_plan)
        if experts:
            apply_expert_parallelism(model, mesh, mesh, ep_plan, ep_implementation="all_reduce")
        out = dict(full)
        for name, p in model.named_parameters():
            if hasattr(p, "placements") and name in full:
                out[name] = DtensorShardOperation(p).shard_tensor(full[name])
    return out


def owners(build: Any, tp: int, *, experts: bool = False) -> Owners:
    """Which ranks of ``tp`` hold each element of the stored tensors of the model that ``build()`` makes.

    With ``experts`` the ranks share out whole experts by the ep_plan, where they else cut each of them.
    """
    model = build()
    full = numbered(model)
    total = int(max(t.max() for t in full.values() if t.numel())) + 1
    masks = np.zeros(total, np.int64)
    for rank in range(tp):
        mine = np.zeros(total, bool)
        for t in _held(build, full, rank, tp, experts=experts).values():
            mine[t.to(torch.int64).numpy().ravel()] = True
        masks |= mine.astype(np.int64) << rank
    return {name: masks[t.to(torch.int64).numpy()] for name, t in stored(model, full).items()}


def styles(model: Any) -> tuple[dict[str, str], dict[str, int]]:
    """By stored name: the style of the plan that cuts it, or ""; and where the model has it among its parameters."""
    numbers = numbered(model)
    total = 1 + int(max(t.max() for t in numbers.values() if t.numel()))
    known = [""]
    which = np.zeros(total, np.int64)
    plan = model._expand_parallel_plan(model.tp_plan or {})
    for name, tensor in numbers.items():
        if tensor.numel():
            known.append(plan.get(name, ""))
            which[tensor.to(torch.int64).numpy().ravel()] = len(known) - 1
    first = {n: int(t.flatten()[0]) for n, t in stored(model, numbers).items() if t.numel()}
    return {n: known[int(which[i])] for n, i in first.items()}, first


def gathered(model: Any) -> frozenset[str]:
    """Stored names of what is cut, and whose results are put together at once."""
    return frozenset(n for n, style in styles(model)[0].items() if style in GATHERED)
