"""Whether the model that a configuration describes is the one in the files.

The query, key and value of a group lie in one tensor. With other numbers of heads in the same proportion it would be
cut in wrong places, and nothing else would show it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckpttool.errors import ConflictError
from ckpttool.formats.config import EXPERTS, config_fields, whole_number

_EMBEDDING = "embedding.word_embeddings.weight"
_QKV = ".self_attention.linear_qkv.weight"
_OUT = ".self_attention.linear_proj.weight"
_DOWN = ".mlp.linear_fc2.weight"
_ROUTER = ".mlp.router.weight"


def check_sizes(
    config: Mapping[str, Any], tensors: Iterable[tuple[str, tuple[int, ...]]], where: str, tp: int = 1
) -> None:
    """Compare config.json (in Hugging Face's fields) with the shapes of ``tensors``, (name, shape) of one of ``tp``
    ranks. Raises ConflictError where they contradict each other.
    """
    fields = config_fields(config)
    hidden = whole_number(fields, "hidden_size", "n_embd")
    heads = whole_number(fields, "num_attention_heads", "n_head")
    if not hidden or not heads:
        return
    groups = whole_number(fields, "num_key_value_heads") or heads
    width = whole_number(fields, "head_dim") or hidden // heads
    latent = whole_number(fields, "kv_lora_rank") is not None
    inner = whole_number(fields, "intermediate_size", "n_inner")
    wanted: dict[str, tuple[str, int, int]] = {_EMBEDDING: ("hidden_size", hidden, 1)}
    if not latent and groups % tp == 0:
        wanted[_QKV] = "num_attention_heads, num_key_value_heads and head_dim", (heads + 2 * groups) * width // tp, 0
        wanted[_OUT] = "num_attention_heads and head_dim", heads * width // tp, 1
    if inner:
        wanted[_DOWN] = "intermediate_size", inner // tp, 1
    if experts := whole_number(fields, *EXPERTS):
        wanted[_ROUTER] = "the number of experts", experts, 0
    for name, shape in tensors:
        end = next((e for e in wanted if name.endswith(e)), None)
        if end is None or len(shape) != 2:
            continue
        said, size, axis = wanted[end]
        if shape[axis] != size:
            raise ConflictError(
                f"`{name}` {list(shape)} does not fit {said} of the model's configuration: axis {axis} is {size} by it",
                where=where,
                hint="put the config.json of this model beside the save",
            )
