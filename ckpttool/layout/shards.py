"""Flat shards of a rank's tensors -> pieces of logical tensors.

Sharded optimizers (ZeRO, Paddle's sharding stage 1 v2 and split_param) lay a rank's tensor end to end and give each of
several ranks a run of its elements. Such a tensor is assembled in two steps: where the rank's whole tensor belongs,
which a format or the rules say, and where each run lies in it. A run is at most ``2 * ndim - 1`` boxes, and a box of
the row-major tensor is one run of bytes, so each becomes a stored tensor of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ckpttool.catalog import SHARDED, Catalog, FlatShard, LogicalTensor, Pad, Piece, StoredTensor
from ckpttool.dtypes import itemsize
from ckpttool.errors import ConflictError, IncompleteError
from ckpttool.geometry import Box, from_flat

Blocks = list[tuple[StoredTensor, Box]]
"""(a run of bytes with the shape of its box, the box in the rank's tensor)."""


def join_shards(catalog: Catalog, shards: Sequence[tuple[FlatShard, ...]]) -> Catalog:
    """The catalog with every piece of an ``SHARDED`` tensor replaced by pieces of what its shards hold.

    Raises IncompleteError when the shards leave elements out, ConflictError when they overlap.
    """
    if not shards:
        return catalog
    known: dict[int, tuple[Blocks, list[Pad]]] = {}

    def blocks(stored: StoredTensor) -> tuple[Blocks, list[Pad]]:
        if stored.offset not in known:
            known[stored.offset] = _blocks(catalog, stored, shards[stored.offset])
        return known[stored.offset]

    def pieces(found: Sequence[Piece]) -> tuple[Piece, ...]:
        out: list[Piece] = []
        for p in found:
            if p.stored.file == SHARDED:
                out += _inside(p, blocks(p.stored)[0])
            else:
                out.append(p)
        return tuple(out)

    for key, t in catalog.tensors.items():
        held = {p.stored.offset: p.stored for p in (*t.pieces, *t.replicas) if p.stored.file == SHARDED}
        if not held:
            continue
        pads = [pad for stored in held.values() for pad in blocks(stored)[1]]
        for pad in t.pads:
            if pad.stored.file == SHARDED:
                found = _inside(Piece(pad.stored, pad.stored_box, pad.stored_box), blocks(pad.stored)[0])
                pads += [Pad(p.stored, p.stored_box) for p in found]
            else:
                pads.append(pad)
        catalog.tensors[key] = LogicalTensor(t.key, t.dtype, t.shape, pieces(t.pieces), pieces(t.replicas), tuple(pads))
    return catalog


def _inside(piece: Piece, blocks: Blocks) -> list[Piece]:
    """The part of a piece that lies in each block."""
    out = []
    by = [b - a for a, b in zip(piece.stored_box.start, piece.logical_box.start, strict=True)]
    for stored, box in blocks:
        common = box.intersect(piece.stored_box) if box.start else box
        if common is not None:
            out.append(Piece(stored, common.relative_to(box.start), common.shift(by)))
    return out


def _blocks(catalog: Catalog, stored: StoredTensor, shards: tuple[FlatShard, ...]) -> tuple[Blocks, list[Pad]]:
    """What the shards of one rank's tensor hold, in order, and their padding."""
    size, item = prod(stored.shape), itemsize(stored.dtype)
    blocks: Blocks = []
    pads = []
    at = 0

    def places() -> list[str]:
        return [catalog.place(s.stored) for s in shards]

    for shard in sorted(shards, key=lambda s: s.start):
        run = shard.stored
        if run.dtype != stored.dtype:
            raise ConflictError(f"the shards of `{stored.key}` are {stored.dtype} and {run.dtype}", where=places())
        length = prod(run.shape)
        if min(shard.start, size) != at:
            wrong = IncompleteError if shard.start > at else ConflictError
            raise wrong(
                f"the shards of `{stored.key}` {list(stored.shape)} "
                + (f"leave out elements {at:,} to {shard.start:,}" if shard.start > at else "overlap"),
                where=places(),
            )
        stop = min(size, shard.start + length)
        for box in from_flat(min(shard.start, size), stop, stored.shape):
            skipped = at - shard.start
            blocks.append((run._replace(shape=box.shape, offset=run.offset + skipped * item, strides=None), box))
            at += box.volume
        if shard.start + length > stop:
            used = max(0, stop - shard.start)
            pads.append(Pad(run, Box((used,), (length,))))
    if at < size:
        raise IncompleteError(
            f"the shards of `{stored.key}` {list(stored.shape)} hold {at:,} of its {size:,} elements",
            where=places(),
            hint="the file of a rank is missing, or its elements belong to another tensor",
        )
    return blocks, pads
