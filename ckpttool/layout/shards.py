"""Flat shards of a rank's tensors -> pieces of logical tensors.

Sharded optimizers (ZeRO, Paddle's sharding stage 1 v2 and split_param) lay a rank's tensor end to end and give each of
several ranks a run of its elements. Such a tensor is assembled in two steps: where the rank's whole tensor belongs,
which a format or the rules say, and where each run lies in it. A run is at most ``2 * ndim - 1`` boxes, and a box of
the row-major tensor is one run of bytes, so each becomes a stored tensor of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple, NoReturn

from ckpttool.core.catalog import (
    SHARDED,
    Catalog,
    FlatShard,
    FlatShards,
    LogicalTensor,
    Pad,
    Piece,
    Pieces,
    StoredTensor,
)
from ckpttool.core.dtypes import itemsize
from ckpttool.core.geometry import Box, from_flat, whole
from ckpttool.errors import ConflictError, IncompleteError

Blocks = list[tuple[StoredTensor, Box]]
"""(a run of bytes with the shape of its box, the box in the rank's tensor)."""


def join_shards(catalog: Catalog, shards: Sequence[Sequence[FlatShard]]) -> Catalog:
    """The catalog with every piece of an ``SHARDED`` tensor replaced by pieces of what its shards hold.

    Raises IncompleteError when the shards leave elements out, ConflictError when they overlap.
    """
    if not shards:
        return catalog
    known: dict[int, tuple[Blocks, list[Pad]]] = {}
    packed: dict[int, LogicalTensor] = {}

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
        if _is_whole(t) and isinstance(alike := shards[t.pieces[0].stored.offset], FlatShards):
            (number,) = held
            if number not in packed or packed[number].shape != t.shape:
                packed[number] = _packed(catalog, t, alike)
            same = packed[number]
            catalog.tensors[key] = LogicalTensor(t.key, t.dtype, t.shape, same.pieces, (), same.pads)
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


def _is_whole(t: LogicalTensor) -> bool:
    """Whether one stored tensor is all of the logical one."""
    return len(t.pieces) == 1 and not t.replicas and not t.pads and t.pieces[0][1:] == (t.box, t.box)


def _packed(catalog: Catalog, t: LogicalTensor, shards: FlatShards) -> LogicalTensor:
    """The tensor with the pieces that its shards hold. Raises as ``_blocks`` does."""
    stored = t.pieces[0].stored
    cut = _checked(catalog, stored, shards, shards.spans)
    item, offsets = itemsize(stored.dtype), array("q")
    if shards.like.dtype != stored.dtype:
        _differ(catalog, stored, shards)
    for i, skipped, _ in cut.blocks:
        offsets.append(shards.offsets[i] + skipped * item)
    numbers = tuple([i for i, _, _ in cut.blocks])
    files = shards.files if numbers == tuple(range(len(shards))) else tuple([shards.files[i] for i in numbers])
    pads = tuple([Pad(shards[i].stored, box) for i, box in cut.pads])
    return LogicalTensor(t.key, t.dtype, t.shape, Pieces(shards.like, files, offsets, cut.boxes), (), pads)


def _inside(piece: Piece, blocks: Blocks) -> list[Piece]:
    """The part of a piece that lies in each block."""
    out = []
    by = [b - a for a, b in zip(piece.stored_box.start, piece.logical_box.start, strict=True)]
    for stored, box in blocks:
        common = box.intersect(piece.stored_box) if box.start else box
        if common is not None:
            out.append(Piece(stored, common.relative_to(box.start), common.shift(by)))
    return out


class _RunBoxes(NamedTuple):
    """The boxes of runs of a row-major tensor, and what of the runs is padding."""

    blocks: tuple[tuple[int, int, Box], ...]
    """(number of the run, its elements before the box, the box), in order."""
    boxes: tuple[tuple[Box, Box], ...]
    """(whole box of the block, its box in the tensor)."""
    pads: tuple[tuple[int, Box], ...]
    """(number of the run, box of it)."""
    reached: int
    """Elements from the first one on that the runs hold."""
    wrong: int
    """Start of the first run that does not follow the one before it; -1 where all do."""


@lru_cache(maxsize=1024)
def _cut(shape: tuple[int, ...], spans: tuple[tuple[int, int], ...]) -> _RunBoxes:
    """Cached: there are few shapes. ``spans`` are start and length of each run."""
    size, at = prod(shape), 0
    blocks, pads = [], []
    for i, (start, length) in sorted(enumerate(spans), key=lambda span: span[1][0]):
        if min(start, size) != at:
            return _RunBoxes((), (), (), at, start)
        stop = min(size, start + length)
        for box in from_flat(min(start, size), stop, shape):
            blocks.append((i, at - start, box))
            at += box.volume
        if start + length > stop:
            pads.append((i, Box((max(0, stop - start),), (length,))))
    boxes = tuple([(whole(box.shape), box) for _, _, box in blocks])
    return _RunBoxes(tuple(blocks), boxes, tuple(pads), at, -1)


def _checked(
    catalog: Catalog, stored: StoredTensor, shards: Sequence[FlatShard], spans: tuple[tuple[int, int], ...]
) -> _RunBoxes:
    """How shards hold a rank's tensor. Raises IncompleteError and ConflictError where they do not hold it once."""
    cut, size = _cut(stored.shape, spans), prod(stored.shape)
    if cut.wrong >= 0:
        wrong = IncompleteError if cut.wrong > cut.reached else ConflictError
        raise wrong(
            f"the shards of `{stored.key}` {list(stored.shape)} "
            + (f"leave out elements {cut.reached:,} to {cut.wrong:,}" if cut.wrong > cut.reached else "overlap"),
            where=[catalog.place(s.stored) for s in shards],
        )
    if cut.reached < size:
        raise IncompleteError(
            f"the shards of `{stored.key}` {list(stored.shape)} hold {cut.reached:,} of its {size:,} elements",
            where=[catalog.place(s.stored) for s in shards],
            hint="the file of a rank is missing, or its elements belong to another tensor",
        )
    return cut


def _differ(catalog: Catalog, stored: StoredTensor, shards: Sequence[FlatShard]) -> NoReturn:
    other = next(s.stored.dtype for s in shards if s.stored.dtype != stored.dtype)
    raise ConflictError(
        f"the shards of `{stored.key}` are {stored.dtype} and {other}",
        where=[catalog.place(s.stored) for s in shards],
    )


def _blocks(catalog: Catalog, stored: StoredTensor, shards: Sequence[FlatShard]) -> tuple[Blocks, list[Pad]]:
    """The blocks that the shards of one rank's tensor hold, in order, and their padding."""
    if any(s.stored.dtype != stored.dtype for s in shards):
        _differ(catalog, stored, shards)
    cut = _checked(catalog, stored, shards, tuple([(s.start, prod(s.stored.shape)) for s in shards]))
    item = itemsize(stored.dtype)
    blocks = []
    for i, skipped, box in cut.blocks:
        run = shards[i].stored
        blocks.append((run._replace(shape=box.shape, offset=run.offset + skipped * item, strides=None), box))
    return blocks, [Pad(shards[i].stored, box) for i, box in cut.pads]
