"""Files of torch.save, written without torch and without holding their tensors in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from math import prod
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np

from bench.models import Shape, round_bf16
from ckpttool.containers.pickle_write import Hole, PickledCall
from ckpttool.containers.torch_write import lay_out_torch

BLOCK = 2 << 20
"""Elements that are written at once."""
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "maximize": False}
"""What a group of parameters says of its optimizer, beside ``params``."""
Shapes = Mapping[str, tuple[int, ...]]


class Noise:
    """Normal numbers of a usual weight's size, from another place in the same pool each time."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        floats = (0.02 * self._rng.standard_normal(4 * BLOCK)).astype(np.float32)
        self._pools: dict[str, np.ndarray[Any, np.dtype[Any]]] = {"F32": floats, "BF16": round_bf16(floats)}

    def take(self, dtype: str, count: int) -> bytes:
        """At most ``BLOCK`` elements."""
        pool = self._pools[dtype]
        start = int(self._rng.integers(0, len(pool) - count))
        return pool[start : start + count].tobytes()


def write_torch(path: Path, value: Any, noise: Noise, *, empty: Sequence[str] = ()) -> None:
    """A file of ``value`` with noise for its Holes.

    Where a key on the way to a Hole is in ``empty``, there are no elements but a hole of the file itself. CRC-32 sums
    are left 0: neither torch nor ckpttool looks at them.
    """
    laid = lay_out_torch(value, "archive")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as f:
        f.truncate(laid.size)
        for at, data in laid.literals:
            f.seek(at)
            f.write(data)
        for keys, at in laid.offsets.items():
            if not set(keys).isdisjoint(empty):
                continue
            hole = reduce(getitem, keys, value)
            f.seek(at)
            for left in range(prod(hole.shape), 0, -BLOCK):
                f.write(noise.take(hole.dtype, min(BLOCK, left)))


def write_run(path: Path, shape: Shape, layers: int) -> None:
    """What ``torch.distributed.checkpoint.state_dict`` gives of a run with AdamW, in one file: names, no numbers.

    The weights are bf16, the moments float32.
    """
    shapes = dict(shape.tensors(layers))
    moments = {
        n: {"step": Hole("F32", ()), "exp_avg": Hole("F32", s), "exp_avg_sq": Hole("F32", s)} for n, s in shapes.items()
    }
    value = {
        "model": {n: Hole("BF16", s) for n, s in shapes.items()},
        "optimizer": {"state": moments, "param_groups": [ADAMW | {"params": list(shapes)}]},
    }
    write_torch(path, value, Noise())


def write_zero3(folder: Path, shape: Shape, layers: int, ranks: int) -> None:
    """A save of DeepSpeed's ZeRO stage 3: a flat vector of each of two groups of parameters on each rank.

    The moments, which make most of the files of a real save, are holes of the files: nothing reads them here.
    """
    shapes = dict(shape.tensors(layers))
    groups: list[Shapes] = [{n: s for n, s in shapes.items() if (len(s) > 1) == wide} for wide in (True, False)]
    lengths = [sum(-(-prod(s) // ranks) for s in group.values()) for group in groups]
    noise, save = Noise(), folder / "global_step3"
    model = {
        "module": {n: Hole("BF16", (0,)) for n in shapes},
        "buffer_names": [],
        "param_shapes": [{n: PickledCall("torch", "Size", (s,)) for n, s in group.items()} for group in groups],
        "frozen_param_shapes": {},
        "frozen_param_fragments": {},
        "shared_params": {},
        "global_steps": 3,
        "dp_world_size": ranks,
        "ds_version": "0.19.8",
    }
    state = {
        i: {"step": 3, "exp_avg": Hole("F32", (n,)), "exp_avg_sq": Hole("F32", (n,))} for i, n in enumerate(lengths)
    }
    optimizer = {
        "zero_stage": 3,
        "partition_count": ranks,
        "fp32_flat_groups": [Hole("F32", (n,)) for n in lengths],
        "optimizer_state_dict": {"state": state, "param_groups": [ADAMW | {"params": [i]} for i in range(len(groups))]},
    }
    for rank in range(ranks):
        write_torch(save / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", model, noise)
        path = save / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        write_torch(path, {"optimizer_state_dict": optimizer}, noise, empty=("exp_avg", "exp_avg_sq"))
    (folder / "latest").write_text(save.name)
