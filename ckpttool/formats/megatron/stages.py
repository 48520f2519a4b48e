"""The layers and other tensors in each chunk of a Megatron pipeline stage."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ckpttool.core.mesh import Mesh

_LAYER = re.compile(r"decoder\.layers\.(\d{1,9})\.")
_EXPERT = re.compile(r"(\.experts\.local_experts\.)(\d{1,9})(?=\.)")


class LayerChunk(NamedTuple):
    """The layers that follow each other on a stage: all that it has, or those of one of its virtual stages."""

    stage: int
    first: int
    stop: int


def chunks(mesh: Mesh, layers: int) -> list[LayerChunk]:
    """All chunks of a model, in the order of its layers; chunk c is on stage c % pp."""
    counts = mesh.layout or (layers // mesh.pp,) * mesh.pp
    out, at = [], 0
    for i, n in enumerate(counts):
        out.append(LayerChunk(i % mesh.pp, at, at + n))
        at += n
    return out


def chunk_of(name: str, among: Sequence[LayerChunk], stage: int) -> int:
    """The chunk that holds a tensor of ``stage``, by canonical name.

    A layer after the last one is multi-token prediction, which the last chunk has, with a copy of the embedding.
    """
    m = _LAYER.match(name)
    if m is None:
        return 0 if name.startswith("embedding.") and stage == 0 else len(among) - 1
    n = int(m[1])
    return next((i for i, c in enumerate(among) if c.first <= n < c.stop), len(among) - 1)


def local_layer(spelled: str, chunk: LayerChunk) -> str:
    """A name with the number that its layer has in the chunk."""
    m = _LAYER.match(spelled)
    return f"decoder.layers.{int(m[1]) - chunk.first}.{spelled[m.end() :]}" if m else spelled


def local_expert(name: str, first: int) -> str:
    """A canonical name with the number that its expert has on a rank whose first one is ``first``."""
    return _EXPERT.sub(lambda m: f"{m[1]}{int(m[2]) - first}", name, count=1) if first else name


def layer_of(name: str) -> int:
    """The number of a layer in a canonical name, or -1."""
    return int(m[1]) if (m := _LAYER.match(name)) else -1


def expert_of(name: str) -> int:
    """The number of an expert in a canonical name, or -1."""
    return int(m[2]) if (m := _EXPERT.search(name)) else -1
