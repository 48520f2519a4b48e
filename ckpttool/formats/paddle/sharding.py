"""Division of one model-parallel rank's optimizer state by Paddle's sharding stage 1. Pure.

Version 1 gives every parameter to one rank; version 2 (``split_param``) lays the parameters end to end in buffers and
cuts each buffer evenly. Both are worked out from names, sizes and the order of the model alone::

    v1   owners(numels, ranks)                       parameter -> rank
    v2   buffers(params, ranks)                      parameters -> buffers with the start of each parameter
         FlatBuffer.spans(name)                          the ranks that hold some of it, and which elements

Sources: ``DygraphShardingOptimizer._partition_parameters`` and ``DygraphShardingOptimizerV2._build_comm_buffers``
(paddle/distributed/fleet/meta_optimizers/dygraph_optimizer/dygraph_sharding_optimizer.py), ``alignment``, ``align``,
``build_reduce_scatter_buffer`` and ``ShardingGradView`` (fleet/utils/tensor_fusion_helper.py) and
``Eager_AssignGroupBySize`` (fluid/distributed/collective/reducer.cc) of Paddle 3.3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from ckpttool.core.catalog import FlatShard, RankTensor, StoredTensor
from ckpttool.core.geometry import Box, from_flat

BUFFER_BYTES = 256 << 20
"""``comm_buffer_size_MB`` of Paddle's sharding_configs, unless the trainer is told otherwise."""

ALIGNMENT = 256
"""Bytes that the start of a rank's part of a parameter is aligned to (``alignment`` of gpu, npu and xpu)."""

ITEMSIZE = {"F16": 2, "BF16": 2, "F32": 4}
"""Bytes of one element of the parameters that can lie in a buffer (``align`` has no other dtypes)."""

_DTYPE_ORDER = {"BF16": 0, "F16": 1, "F32": 2}
"""``sorted(..., key=lambda x: str(x.dtype))``: paddle.bfloat16 < paddle.float16 < paddle.float32."""


class TrainableParam(NamedTuple):
    """One trainable parameter of a model-parallel rank."""

    name: str
    dtype: str
    """Dtype of the parameter itself: its master weights and moments are F32 in a buffer laid out for BF16."""
    numel: int


class FlatBuffer(NamedTuple):
    """Parameters laid end to end, ``size`` elements shared evenly by ``ranks``."""

    starts: dict[str, int]
    """Name -> first element; every parameter begins and ends on a multiple of ``align * ranks`` elements."""
    stops: dict[str, int]
    """Name -> one beyond the last element, padding included."""
    size: int
    ranks: int

    def spans(self, name: str) -> list[tuple[int, tuple[int, int]]]:
        """(rank, [start, stop) in elements of the flat parameter) of each rank that holds some of it, in order.

        The last ``stop`` may lie beyond the parameter's last element: the rest is padding, which is zero.
        """
        each = self.size // self.ranks
        first, last = self.starts[name], self.stops[name]
        if first == last:
            return []
        return [
            (rank, (max(first, rank * each) - first, min(last, (rank + 1) * each) - first))
            for rank in range(first // each, (last - 1) // each + 1)
        ]


def owners(numels: Sequence[int], ranks: int) -> list[int]:
    """Sharding version 1: the rank of each parameter, given their element counts in the order of the model.

    The largest goes first (parameters of one size keep their order), each to the rank that has the fewest elements so
    far, the lowest of those that have equally few.
    """
    load = [0] * ranks
    out = [0] * len(numels)
    for i in owner_order(numels):
        out[i] = load.index(min(load))
        load[out[i]] += numels[i]
    return out


def owner_order(numels: Sequence[int]) -> list[int]:
    """The order in which version 1 gives parameters away: by falling size, stable."""
    return sorted(range(len(numels)), key=lambda i: -numels[i])


def padded(numel: int, dtype: str, ranks: int) -> int:
    """Elements that a parameter takes up in a buffer shared by ``ranks``: a multiple of 256 bytes for each rank."""
    unit = ALIGNMENT // ITEMSIZE[dtype] * ranks
    return (numel + unit - 1) // unit * unit


def buffers(params: Sequence[TrainableParam], ranks: int, limit: int = BUFFER_BYTES) -> list[FlatBuffer]:
    """Sharding version 2: the buffers of ``params``, which all belong to one communication group of ``ranks``.

    Parameters are taken by dtype and then in order; a buffer is closed as soon as its parameters (without padding)
    have ``limit`` bytes. Raises KeyError for a dtype that is not in ``ITEMSIZE``.
    """
    out = []
    for dtype in sorted({p.dtype for p in params}, key=_DTYPE_ORDER.__getitem__):
        group: list[TrainableParam] = []
        size = 0
        for p in (p for p in params if p.dtype == dtype):
            group.append(p)
            size += p.numel * ITEMSIZE[dtype]
            if size >= limit:
                out.append(_buffer(group, ranks))
                group, size = [], 0
        if group:
            out.append(_buffer(group, ranks))
    return out


def _buffer(params: Sequence[TrainableParam], ranks: int) -> FlatBuffer:
    starts, stops = {}, {}
    at = 0
    for p in params:
        starts[p.name] = at
        at += padded(p.numel, p.dtype, ranks)
        stops[p.name] = at
    return FlatBuffer(starts, stops, at, ranks)


def flat_slices(t: RankTensor, start: int, stop: int) -> list[RankTensor]:
    """Elements ``[start, stop)`` of a rank's row-major tensor as tensors that lie one behind the other.

    Each is a box of ``t`` (a ragged head, whole rows, a ragged tail per axis) and has the box's shape; what lies
    beyond the last element of ``t`` comes last, as one flat tensor of padding. ``part`` counts them from 0.
    """
    size = prod(t.shape)
    out: list[RankTensor] = []
    for cut in from_flat(min(start, size), min(stop, size), t.shape):
        boxes = []
        for local, logical in t.boxes:
            common = local.intersect(cut)
            if common is not None:
                by = [b - a for a, b in zip(local.start, logical.start, strict=True)]
                boxes.append((common.relative_to(cut.start), common.shift(by)))
        pads = [common.relative_to(cut.start) for pad in t.pads if (common := pad.intersect(cut)) is not None]
        out.append(t._replace(shape=cut.shape, boxes=tuple(boxes), pads=tuple(pads), part=len(out)))
    rest = stop - max(start, size)
    if rest > 0:
        out.append(t._replace(shape=(rest,), boxes=(), pads=(Box((0,), (rest,)),), part=len(out)))
    return out


def end_to_end(runs: Sequence[StoredTensor]) -> tuple[FlatShard, ...]:
    """Flat runs, one behind the other."""
    starts = accumulate((t.shape[0] for t in runs), initial=0)
    return tuple(FlatShard(start, t) for start, t in zip(starts, runs, strict=False))
