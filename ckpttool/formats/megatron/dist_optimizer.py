"""The optimizer in a save of dist_checkpointing, whose form common.pt names (``distrib_optim_sharding_type``).

    optimizer.state.exp_avg.KEY                     as large as the model's KEY       fully_reshardable, or no sharding
    optimizer.state.exp_avg.KEY                     runs of what each rank had        fully_sharded_model_space
    optimizer.distributed.dp_group_idx_G.gbuf_idx_B.dtype_D.bucket_idx_K.exp_avg      dp_reshardable: flat buffers

With experts there are two optimizers, whose keys begin with ``chained_0.`` and ``chained_1.``. Master weights are the
state ``param`` or ``fp32_param``. Source: megatron/core/optimizer/distrib_optimizer.py and optimizer.py (Megatron Core
0.6 to 0.16), and for runs dist_checkpointing/strategies/torch.py of 0.12.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from ckpttool.containers.pickle import printable
from ckpttool.core.dtypes import itemsize
from ckpttool.core.geometry import from_flat
from ckpttool.errors import CorruptError, UnsupportedError
from ckpttool.formats.megatron.dist_names import DistTensor, StoredChunk

MASTERS = frozenset(("param", "fp32_param"))
"""States that are the weights themselves."""
_STATE = re.compile(r"(?:chained_\d{1,3}\.)?optimizer\.state\.(?P<state>\w+)\.(?P<key>.+)")
_OWN = re.compile(r"(?:chained_\d{1,3}\.)?optimizer\.")
_RESHARD = "save it once more with --dist-ckpt-optim-fully-reshardable, or omit the optimizer with --only model"


class ParameterState(NamedTuple):
    """State of a parameter."""

    component: str
    name: str
    """torch's, of an optimizer's."""
    key: str
    """Key of the parameter in the model."""


def is_optimizers(fqn: str) -> bool:
    """Whether an entry of a save belongs to the optimizer."""
    return _OWN.match(fqn) is not None


def state_of(fqn: str) -> ParameterState | None:
    """The parameter and state of an entry."""
    if (m := _STATE.fullmatch(fqn)) is None:
        return None
    return (
        ParameterState("master_weights", "", m["key"])
        if m["state"] in MASTERS
        else ParameterState("optimizer", m["state"], m["key"])
    )


_GROUP = re.compile(r"(?:chained_(\d{1,3})\.)?optimizer\.distributed\.dp_group_idx_(\d{1,7})\.optimizer(?:/.*)?")
_JOINED = re.compile(r".*\.dp_group_idx_\d{1,7}\.param_state(?:/.*)?")


def group_of(fqn: str) -> tuple[int, int] | None:
    """(optimizer, group of ranks) whose param_groups an entry is."""
    m = _GROUP.fullmatch(fqn)
    return (int(m[1] or 0), int(m[2])) if m else None


def is_joined(fqn: str) -> bool:
    """Whether an entry holds all buffers of a group of ranks (``dp_zero_gather_scatter``)."""
    return _JOINED.fullmatch(fqn) is not None


def sharding_type(common: Mapping[str, Any]) -> str:
    """The form of a distributed optimizer's state; "" for another optimizer."""
    content = common.get("content_metadata")
    said = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
    optimizer = common.get("optimizer")
    if said is None and isinstance(optimizer, dict):  # before Megatron Core 0.14
        several = [v for k, v in optimizer.items() if type(k) is int and isinstance(v, dict)]
        said = next((s for o in (optimizer, *several) if (s := o.get("param_state_sharding_type"))), None)
    return said if isinstance(said, str) else ""


def unflattened(fqn: str, held: DistTensor, shape: tuple[int, ...], original: Any) -> DistTensor:
    """A state whose ranks saved runs of elements, as boxes of the parameter's global ``shape``.

    Where ranks held boxes [x, y] of [X, Y], runs of these lie in [X // x, Y // y, x * y]. ``original`` is the shape
    that the metadata says, None where it says none. Raises UnsupportedError for what is turned before it is cut
    (weights of the old GroupedMLP), CorruptError for runs that do not fit.
    """
    if held.shape == shape:
        return held
    if original is not None and tuple(original) != shape:
        raise UnsupportedError(
            f"the state `{printable(fqn)}` is that of a matrix which the model's weights are the transpose of"
            " (GroupedMLP with --moe-use-legacy-grouped-gemm)",
            hint=_RESHARD,
        )
    pieces, run = held.shape[:-1], held.shape[-1] if held.shape else 0
    local = tuple([n // k if k else 0 for n, k in zip(shape, pieces, strict=False)])
    fits = all(k and n % k == 0 for n, k in zip(shape, pieces, strict=False))
    if len(pieces) != len(shape) or not fits or prod(local) != run:
        raise CorruptError(f"the state `{printable(fqn)}` {list(held.shape)} does not fit its parameter {list(shape)}")
    if ".experts." in fqn and original is None:
        raise UnsupportedError(f"nothing says how the state `{printable(fqn)}` of experts lies", hint=_RESHARD)
    chunks: list[StoredChunk] = []
    for box, stored in held.chunks:
        begin = tuple([i * n for i, n in zip(box.start, local, strict=False)])
        if any(n != 1 for n in box.shape[:-1]) or stored.strides is not None:
            raise CorruptError(f"a chunk of the state `{printable(fqn)}` is not a run of one rank's elements")
        at, item = stored.offset, itemsize(stored.dtype)
        for part in from_flat(box.start[-1], box.stop[-1], local):
            chunks.append((part.shift(begin), stored._replace(shape=part.shape, offset=at)))
            at += part.volume * item
    return DistTensor(held.dtype, shape, chunks)


def whole_of(shapes: Mapping[str, tuple[int, ...]], fqn: str, key: str) -> tuple[int, ...]:
    """The shape of the parameter that a state is of. Raises CorruptError where the model has none."""
    if key not in shapes:
        raise CorruptError(f"the save has the state `{printable(fqn)}`, and no weight `{printable(key)}`")
    return shapes[key]
