"""The part of ``--check`` that reads tensors: healthy numbers, copies that agree, padding, scales, tied tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ckpttool.checkpoint import Checkpoint
from ckpttool.containers.torch_zip import member_sums
from ckpttool.core.catalog import Catalog, Key, LogicalTensor, Pad, Piece, StoredTensor, is_derived
from ckpttool.core.dtypes import CASTABLE, itemsize, lookup
from ckpttool.core.files import source_files
from ckpttool.core.geometry import Box, whole
from ckpttool.errors import CkptError
from ckpttool.execute import Progress
from ckpttool.execute.compare import (
    BLOCK,
    Difference,
    catalog_of,
    compare_one,
    read_piece,
    read_tensor,
    read_view,
    tensor_reads,
)
from ckpttool.execute.machines.each import each
from ckpttool.execute.reader import Reads, blocks
from ckpttool.formats.config import ties_head
from ckpttool.kernels.stats import TensorHealth
from ckpttool.ops.inspect.soundness import NamedShape, heads, scale_pairs
from ckpttool.ops.inspect.values import digest, read_blocks
from ckpttool.planning.relate import DerivedTensor, permute
from ckpttool.storage.listing import content
from ckpttool.storage.travel import SentFiles

if TYPE_CHECKING:
    from ckpttool.execute.fleets.base import Fleet

_Found = Iterator[tuple[str, str, str, str]]
"""Kind, text, where and hint of each finding."""
_Raw = tuple[str, str, tuple[StoredTensor, ...], str]
"""The same; the machine that asks knows what to call the places."""


def value_findings(
    checkpoint: Checkpoint,
    checked: dict[str, int],
    progress: Progress,
    only: tuple[str, ...] = (),
    fleet: Fleet | None = None,
) -> _Found:
    """All findings of the chosen components; ``checked`` gets the numbers of what was read."""
    catalog = checkpoint.catalog
    chosen = [t for t in catalog if not only or t.key.component in only]
    named = {t.key.name: NamedShape(t.dtype, t.shape, ()) for t in chosen if t.key.component == "model"}
    tensors = {t.key.name: t for t in chosen if t.key.component == "model"}
    pairs = scale_pairs(named)
    scales = [tensors[n] for n in pairs if lookup(tensors[n].dtype).kind in ("float", "scale")]
    copied = [t for t in chosen if (t.replicas or t.pads) and not lookup(t.dtype).bits % 8]
    if not only or "master_weights" in only:
        copied = [t for t in copied if not is_derived(catalog, t.key)]  # the same bytes as the master weight's
    floats = [t for t in chosen if _has_floats(t) and t.key.name not in pairs and not is_derived(catalog, t.key)]
    progress.start(sum(2 * t.nbytes for t in copied) + sum(t.nbytes for t in (*scales, *floats)), 0)
    checked["replica"] = sum(len(t.replicas) for t in copied)
    checked["scale"] = len(scales)
    checked["element"] = sum(prod(t.shape) for t in floats)
    masters = [(t, m) for t in floats if (m := _master(catalog, t)) is not None]
    items = [_Item("health", t) for t in floats]
    items += [_Item("copies", t) for t in copied]
    items += [_Item("scale", t) for t in scales]
    items += [_Item("master", t, m) for t, m in masters]
    embedding, head = heads(named)
    if ties_head(checkpoint.config) and embedding is not None and head is not None:
        items.append(_Item("tied", tensors[embedding], tensors[head]))
    work = _Examining(SentFiles(catalog.files))
    for item, found in zip(items, each(work, items, lambda i: i.nbytes, fleet), strict=True):
        for kind, text, places, hint in found:
            yield kind, text, "; ".join(map(catalog.place, places)), hint
        progress.advance(0 if item.other else item.nbytes)
    progress.finish()
    yield from _sums(catalog, checked)


class _Item(NamedTuple):
    """What to read one tensor for, or two that are tied."""

    kind: str
    tensor: LogicalTensor
    other: LogicalTensor | None = None

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes * (2 if self.kind == "copies" or self.other else 1)


@dataclass(frozen=True, slots=True)
class _Examining:
    """See ``Work``."""

    files: SentFiles

    def reads(self, item: _Item) -> Reads:
        catalog = catalog_of(self.files)
        one = tensor_reads(catalog, item.tensor, replicas=item.kind == "copies")
        two = tensor_reads(catalog, item.other) if item.other else Reads(())
        return Reads([*one.ranges, *two.ranges], one.again or two.again)

    def do(self, item: _Item) -> list[_Raw]:
        catalog, tensor = catalog_of(self.files), item.tensor
        if item.other is not None:
            compare = _unrounded if item.kind == "master" else _tied
            return [*compare(catalog, tensor, item.other)]
        if item.kind == "health":
            return [*_unhealthy(tensor, _health(catalog, tensor))]
        return [*_scale(catalog, tensor)] if item.kind == "scale" else _copies(catalog, tensor)


def _copies(catalog: Catalog, tensor: LogicalTensor) -> list[_Raw]:
    return [*_replicas(catalog, tensor), *_padding(catalog, tensor)]


def _has_floats(tensor: LogicalTensor) -> bool:
    """Whether its elements are numbers by themselves: no codes that share a byte, no integers, no scales."""
    entry = lookup(tensor.dtype)
    return entry.kind in ("float", "complex") and not entry.bits % 8 and prod(tensor.shape) > 0


def _health(catalog: Catalog, tensor: LogicalTensor) -> TensorHealth:
    found = TensorHealth()
    for box in blocks(tensor.shape, itemsize(tensor.dtype), BLOCK):
        found.add(read_tensor(catalog, tensor, box), box.start)
    return found


def _unhealthy(tensor: LogicalTensor, health: TensorHealth) -> Iterator[_Raw]:
    """Zeros are a finding in matrices of weights only: biases, norms that are stored as 1 + w and moments begin so."""
    total = f"{prod(tensor.shape):,}"
    diverged = "training diverged, or the file was damaged: take an earlier checkpoint"
    narrow = "values were too large for the dtype: cast again, from float32 to bfloat16"
    found = (("NaN", health.nan, health.first_nan, diverged), ("Inf", health.inf, health.first_inf, narrow))
    for what, n, first, hint in found:
        if n:
            text = f"`{tensor.key}` has {n:,} {what} among {total} elements, the first at {[*(first or ())]}"
            yield what.lower(), text, (), hint
    weights = tensor.key.component in ("model", "adapter", "master_weights")
    if health.zeros and weights and len(tensor.shape) > 1 and not tensor.key.name.endswith("bias"):
        hint = "its layer does nothing: it was never trained, or never filled in by a conversion"
        yield "zeros", f"every element of `{tensor.key}` is zero", (), hint


def _master(catalog: Catalog, tensor: LogicalTensor) -> LogicalTensor | None:
    """The master of a model weight of another dtype, of which both are stored."""
    master = catalog.tensors.get(Key(tensor.key.name, "master_weights")) if tensor.key.component == "model" else None
    if master is None or master.shape != tensor.shape or not master.pieces:
        return None
    stored = {p.stored.dtype for p in (*tensor.pieces, *master.pieces)}
    return master if len(stored) == 2 and tensor.dtype in CASTABLE and master.dtype in CASTABLE else None


def _unrounded(catalog: Catalog, tensor: LogicalTensor, master: LogicalTensor) -> Iterator[_Raw]:
    """A model weight that is not what its master rounds to: the optimizer's files are of another save."""
    read, rounded = partial(read_tensor, catalog, tensor), partial(read_tensor, catalog, master, dtype=tensor.dtype)
    found = compare_one(tensor.key.name, tensor.shape, tensor.dtype, read, rounded)
    if found is not None:
        text = (
            f"`{found.name}` is not its master weight rounded to {tensor.dtype}: {found.elements:,} of {found.total:,}"
        )
        where = tensor.pieces[0].stored, master.pieces[0].stored
        hint = "the model and its optimizer are of two saves, or the trainer rounds in another way"
        yield "masters-differ", f"{text} elements differ", where, hint


def _sums(catalog: Catalog, checked: dict[str, int]) -> _Found:
    """Members of files of torch.save whose CRC-32 is not what the zip says."""
    for info in source_files(catalog.files):
        if content(info.place) != "torch":
            continue
        try:
            for member, said, crc in member_sums(info.place):
                checked["checksum"] = checked.get("checksum", 0) + 1
                if crc != said:
                    text = f"`{member}` is damaged: its CRC-32 is {crc:08x}, the zip records {said:08x}"
                    yield "member-checksum", text, str(info.place), "fetch or write the file again"
        except CkptError as e:
            yield "corrupt", e.what, "; ".join(e.where), e.hint or ""


def _tied(catalog: Catalog, embedding: LogicalTensor, head: LogicalTensor) -> Iterator[_Raw]:
    if _differ(catalog, embedding, head):
        text = f"config.json ties `{head.key}` to `{embedding.key}`, but they differ"
        yield "tied-differ", text, (), "loaders use one of them and lose the other"


def _differ(catalog: Catalog, embedding: LogicalTensor, head: LogicalTensor) -> bool:
    """Whether two tied tensors are different; one may be the other turned round."""
    if embedding.shape == head.shape[::-1] != head.shape:
        turned = permute(str(head.key), DerivedTensor(str(head.key), head.dtype, head.shape, head), (1, 0))
        read = partial(read_tensor, catalog, embedding)
        return (
            embedding.dtype != head.dtype
            or compare_one(turned.name, turned.shape, head.dtype, read, partial(read_view, catalog, turned)) is not None
        )
    return digest(catalog, embedding) != digest(catalog, head)


def _replicas(catalog: Catalog, tensor: LogicalTensor) -> Iterator[_Raw]:
    for copy in tensor.replicas:
        box = copy.logical_box
        found = _compare(catalog, tensor, copy)
        if found is not None:
            parts = (p for p in tensor.pieces if p.logical_box == box or not box.start or p.logical_box.intersect(box))
            where = next(parts).stored, copy.stored
            hint = "the ranks are from different checkpoints, or one was not synchronised"
            yield "replica", f"two copies of {found}", where, hint


def _compare(catalog: Catalog, tensor: LogicalTensor, copy: Piece) -> Difference | None:
    """A copy with what the pieces hold there: shards of two ranks may be cut at other places. As stored, not cast."""
    at, dtype = copy.logical_box.start, copy.stored.dtype
    return compare_one(
        str(tensor.key),
        copy.logical_box.shape,
        dtype,
        lambda box: read_tensor(catalog, tensor, box.shift(at), dtype),
        lambda box: read_piece(catalog, copy, box.shift(at)),
    )


def _padding(catalog: Catalog, tensor: LogicalTensor) -> Iterator[_Raw]:
    for pad in tensor.pads:
        if pad.stored_box.volume and not pad.free and not _is_padding(catalog, tensor, pad):
            if len(pad.stored.shape) == len(tensor.shape) > 1:
                text = f"the padding of `{tensor.key}` is neither zeros nor copies of the last row"
                hint = "the sizes given for the source may be wrong"
            else:
                text = f"the padding behind a shard of `{tensor.key}` is not zeros"
                hint = "the shard is longer than the tensor, or its shape is not that of this save"
            yield "padding", text, (pad.stored,), hint


def _is_padding(catalog: Catalog, tensor: LogicalTensor, pad: Pad) -> bool:
    """Zeros, or the last true row again and again."""
    every = whole(pad.stored.shape)
    stored = Piece(pad.stored, every, every)
    shape = pad.stored_box.shape
    zeros, copies = True, bool(tensor.shape) and tensor.shape[0] > 0 and tensor.shape[1:] == shape[1:] != ()
    for box in blocks(shape, itemsize(pad.stored.dtype), BLOCK):
        found = read_piece(catalog, stored, box.shift(pad.stored_box.start))
        zeros = zeros and not found.view(np.uint8).any()
        if copies:
            last = tensor.shape[0] - 1
            at = Box((last, *box.start[1:]), (last + 1, *box.stop[1:]))
            row = read_tensor(catalog, tensor, at, pad.stored.dtype)
            copies = bool((found.view(np.uint8) == row.view(np.uint8)).all())
        if not zeros and not copies:
            return False
    return True


def _scale(catalog: Catalog, tensor: LogicalTensor) -> Iterator[_Raw]:
    wrong = 0
    for block in read_blocks(catalog, tensor):
        with np.errstate(all="ignore"):
            values = block.astype(np.float64)
        wrong += int(np.count_nonzero(~(np.isfinite(values) & (values > 0))))
    if wrong:
        text = f"{wrong:,} of the scales `{tensor.key}` are zero, negative, infinite or not a number"
        yield "scale-value", text, (), "the weights that they scale are lost"
