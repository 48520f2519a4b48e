"""Saves of Megatron FSDP and of FSDP2 in Megatron-LM (``fsdp_dtensor``, ``torch_dcp``): plain DTensors.

    model.module.decoder.layers.3.mlp.linear_fc1.weight_w            halves of fused tensors are apart, and layers and
    model.module.decoder.layers.3.mlp.experts.linear_fc2.weight7     experts have their own numbers
    optimizer.state.module.decoder.layers.3.mlp.linear_fc2.weight.exp_avg
    args, iteration, ...                                             what others have in common.pt

Source: megatron/core/transformer/fsdp_dtensor_checkpoint.py and megatron/training/checkpointing.py of Megatron-LM.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from ckpttool.core.optimizer_states import STEP
from ckpttool.formats.torch import DcpEntry, DcpTensor, Span

_WRAPPED = re.compile(r"model\d*\.(?:module\.)*(?P<key>.+)")
_STATE = re.compile(r"optimizer\.state\.(?:module\.)*(?P<key>.+)\.(?P<state>\w+)")
_PLAIN = frozenset(("args", "iteration", "num_floating_point_operations_so_far"))


class Translated(NamedTuple):
    """Such a save in the words of ``torch_dist``."""

    entries: list[DcpEntry]
    steps: list[tuple[str, Span]]
    """Steps of the optimizer: (entry, where it is)."""
    values: list[tuple[str, Span]]
    """The values that other saves keep in common.pt."""


def translated(entries: Iterable[DcpEntry]) -> Translated:
    """The entries of a save without common.pt."""
    out = Translated([], [], [])
    for e in entries:
        alone = e.value.chunks[0].span if isinstance(e.value, DcpTensor) and e.value.shape == () else None
        span = alone if isinstance(e.value, DcpTensor) else e.value
        if e.fqn in _PLAIN and span is not None:
            out.values.append((e.fqn, span))
        elif m := _WRAPPED.fullmatch(e.fqn):
            out.entries.append(e._replace(fqn=m["key"]))
        elif (m := _STATE.fullmatch(e.fqn)) is None:
            out.entries.append(e)
        elif m["state"] == STEP and span is not None:
            out.steps.append((e.fqn, span))
        else:
            out.entries.append(e._replace(fqn=f"optimizer.state.{m['state']}.{m['key']}"))
    return out
