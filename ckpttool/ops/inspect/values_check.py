"""The part of ``--check`` that reads tensors: copies that must agree, padding, scales, tied tensors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckpttool.catalog import Catalog, LogicalTensor, Pad, Piece
from ckpttool.checkpoint import Checkpoint
from ckpttool.dtypes import itemsize, lookup
from ckpttool.execute import Progress
from ckpttool.execute.compare import BLOCK, Difference, compare_one, read_piece, read_tensor
from ckpttool.execute.reader import blocks
from ckpttool.geometry import Box, whole
from ckpttool.ops.inspect.soundness import Named, heads, scale_pairs
from ckpttool.ops.inspect.values import digest, read_blocks

_Found = Iterator[tuple[str, str, str, str]]


def value_findings(checkpoint: Checkpoint, checked: dict[str, int], progress: Progress) -> _Found:
    """All findings; ``checked`` gets the numbers of what was read."""
    catalog = checkpoint.catalog
    named = {str(t.key): Named(t.dtype, t.shape, ()) for t in catalog}
    tensors = {str(t.key): t for t in catalog}
    scales = [tensors[n] for n in scale_pairs(named) if lookup(tensors[n].dtype).kind in ("float", "scale")]
    copied = [t for t in catalog if (t.replicas or t.pads) and not lookup(t.dtype).bits % 8]
    progress.start(sum(2 * t.nbytes for t in copied) + sum(t.nbytes for t in scales), 0)
    checked["replica"] = sum(len(t.replicas) for t in copied)
    checked["scale"] = len(scales)
    for t in copied:
        yield from _replicas(catalog, t)
        yield from _padding(catalog, t)
        progress.advance(2 * t.nbytes)
    for t in scales:
        yield from _scale(catalog, t)
        progress.advance(t.nbytes)
    embedding, head = heads(named)
    tied = checkpoint.config.get("tie_word_embeddings") is True and embedding is not None and head is not None
    if tied and digest(catalog, tensors[embedding or ""]) != digest(catalog, tensors[head or ""]):
        text = f"config.json ties `{head}` to `{embedding}`, and they differ"
        yield "tied-differ", text, "", "loaders use one of them and lose the other"
    progress.finish()


def _replicas(catalog: Catalog, tensor: LogicalTensor) -> _Found:
    primary = {p.box: p for p in tensor.pieces}
    for copy in tensor.replicas:
        mine = primary[copy.box]
        found = _compare(catalog, tensor, mine, copy)
        if found is not None:
            yield (
                "replica",
                f"two copies of {found}",
                f"{catalog.place(mine.stored)}; {catalog.place(copy.stored)}",
                "the ranks are from different checkpoints, or one was not synchronised",
            )


def _compare(catalog: Catalog, tensor: LogicalTensor, one: Piece, other: Piece) -> Difference | None:
    at = one.box.start
    return compare_one(
        str(tensor.key),
        one.box.shape,
        tensor.dtype,
        lambda box: read_piece(catalog, one, box.shift(at)),
        lambda box: read_piece(catalog, other, box.shift(at)),
    )


def _padding(catalog: Catalog, tensor: LogicalTensor) -> _Found:
    for pad in tensor.pads:
        if pad.local.volume and not _is_padding(catalog, tensor, pad):
            text = f"the padding of `{tensor.key}` holds something else than zeros or copies of the last row"
            yield "padding", text, catalog.place(pad.stored), "the sizes given for the source may be wrong"


def _is_padding(catalog: Catalog, tensor: LogicalTensor, pad: Pad) -> bool:
    """Zeros, or the last true row again and again."""
    every = whole(pad.stored.shape)
    stored = Piece(pad.stored, every, every)
    shape = pad.local.shape
    zeros, copies = True, bool(tensor.shape) and tensor.shape[0] > 0 and tensor.shape[1:] == shape[1:] != ()
    for box in blocks(shape, itemsize(tensor.dtype), BLOCK):
        found = read_piece(catalog, stored, box.shift(pad.local.start))
        zeros = zeros and not found.view(np.uint8).any()
        if copies:
            last = tensor.shape[0] - 1
            row = read_tensor(catalog, tensor, Box((last, *box.start[1:]), (last + 1, *box.stop[1:])))
            copies = bool((found.view(np.uint8) == row.view(np.uint8)).all())
        if not zeros and not copies:
            return False
    return True


def _scale(catalog: Catalog, tensor: LogicalTensor) -> _Found:
    wrong = 0
    for block in read_blocks(catalog, tensor):
        with np.errstate(all="ignore"):
            values = block.astype(np.float64)
        wrong += int(np.count_nonzero(~(np.isfinite(values) & (values > 0))))
    if wrong:
        text = f"{wrong:,} of the scales `{tensor.key}` are zero, negative, infinite or not a number"
        yield "scale-value", text, "", "the weights that they scale are lost"
