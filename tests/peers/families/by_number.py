"""Models in which something depends on the number of a head and every rank holds it whole.

With the heads of two ranks exchanged, these models compute something else although the cut is right. So the same is
exchanged there as well: a tensor with a part for each head, or what a function gives for each head.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_OVER_ALL_HEADS = "queries and keys are normalised over the heads of all ranks, by a weight that each holds whole"
_SLOPES = "the slope of a head follows from its number"


@dataclass(frozen=True)
class ByNumber:
    """Why, and what else is exchanged."""

    reason: str
    tensors: dict[str, str] = field(default_factory=dict)
    """Regular expression of stored names -> the field of config.json that counts the units of its only axis."""
    numbered: dict[str, str] = field(default_factory=dict)
    """The same of tensors of one head each: ``(before)(number)(behind)``."""
    function: str = ""
    """``module:name``, with ``:name`` of a class between them; what it gives has heads on axis 0."""


_NORMS = {r".*self_attn\.q_norm\.weight": "num_attention_heads", r".*self_attn\.k_norm\.weight": "num_key_value_heads"}

BY_NUMBER: dict[str, ByNumber] = {
    **dict.fromkeys(("olmo2", "olmo3", "olmoe", "flex_olmo", "olmo_hybrid"), ByNumber(_OVER_ALL_HEADS, _NORMS)),
    "bloom": ByNumber(_SLOPES, function="transformers.models.bloom.modeling_bloom:_get_alibi_slopes"),
    "mpt": ByNumber(_SLOPES, function="transformers.models.mpt.modeling_mpt:build_mpt_alibi_tensor"),
    "minimax_m1": ByNumber(
        _SLOPES, function="transformers.models.minimax.modeling_minimax:MiniMaxLightningAttention:get_slope_rate"
    ),
    "stablelm": ByNumber(
        "every head has a norm of its own, and each rank all of them",
        numbered={
            r"(.*q_layernorm\.norms\.)(\d+)(\.weight)": "num_attention_heads",
            r"(.*k_layernorm\.norms\.)(\d+)(\.weight)": "num_key_value_heads",
        },
    ),
    "reformer": ByNumber("every head hashes by random rotations of its own", function="torch:randn"),
}
"""By model type."""


def exchanged(array: Any, axis: int, units: int, ranks: int) -> Any:
    """The shares of ranks 0 and 1 exchanged on an axis of so many units."""
    if ranks > units:
        return array  # they hold the same unit
    parts = list(np.split(np.arange(array.shape[axis]), ranks))
    parts[0], parts[1] = parts[1], parts[0]
    order = np.concatenate(parts)
    return np.take(array, order, axis) if isinstance(array, np.ndarray) else array[order.tolist()]


def exchange_tensors(folder: Path, model_type: str, config: dict[str, Any], ranks: int) -> None:
    """In the checkpoint of a whole model."""
    from safetensors.numpy import save_file

    from tests.peers.families.swap import read

    said = BY_NUMBER.get(model_type, ByNumber(""))
    wanted = said.tensors
    for path in sorted(folder.glob("*.safetensors")) if wanted or said.numbered else ():
        tensors, about = read(path)
        tensors |= {
            f"{m[1]}{exchanged(np.arange(config[units]), 0, config[units], ranks)[int(m[2])]}{m[3]}": tensor
            for name, tensor in tensors.items()
            for pattern, units in said.numbered.items()
            if (m := re.fullmatch(pattern, name))
        }
        for name, tensor in tensors.items():
            for pattern, units in wanted.items():
                if re.fullmatch(pattern, name):
                    tensors[name] = np.ascontiguousarray(exchanged(tensor, 0, config[units], ranks))
        save_file(tensors, path, about)


@contextlib.contextmanager
def exchanging(model_type: str, heads: int, ranks: int) -> Iterator[None]:
    """While it lasts, the function of the model gives what two ranks' heads get exchanged."""
    said = BY_NUMBER[model_type].function if model_type in BY_NUMBER else ""
    if not said:
        yield
        return
    module, *path, name = said.split(":")
    owner: Any = functools.reduce(getattr, path, importlib.import_module(module))
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def other(*args: Any, **kwargs: Any) -> Any:
        got = plain(*args, **kwargs)
        return exchanged(got, 0, heads, ranks) if got.shape[0] == heads else got

    setattr(owner, name, other)
    try:
        yield
    finally:
        setattr(owner, name, plain)
