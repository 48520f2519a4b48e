"""Reading boxes of logical tensors and comparing checkpoints, without a plan.

``--verify``, ``inspect --diff --values`` and the Python API come through here: the address of every element is worked
out from pieces and views with numpy indexing, so a fault of the planner or of the executor cannot hide itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isnan, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ckpttool.core.catalog import Catalog, LogicalTensor, Piece, StoredTensor
from ckpttool.core.dtypes import itemsize, lookup, numpy_dtype
from ckpttool.core.encodings import Contents
from ckpttool.core.files import DataFile
from ckpttool.core.geometry import Box, whole
from ckpttool.core.plan import Block
from ckpttool.errors import UnsupportedError
from ckpttool.execute.options import Advance, unwatched
from ckpttool.execute.permute import store
from ckpttool.execute.reader import Reads, block_reads, blocks, read_block
from ckpttool.planning.relate import NONE, DerivedTensor

BLOCK = 4 << 20
"""Bytes compared at a time."""

STRETCH = 64 << 20
"""Most bytes of a ``Comparison``: machines and their threads share out what is compared; stacked experts are 20 GB."""
_TURNED = 8
"""So much longer is a stretch that lies across the rows of a file: each of them reads nearly all of these rows."""

Array = np.ndarray[Any, np.dtype[Any]]


def catalog_of(files: Sequence[DataFile]) -> Catalog:
    """The part of a catalog that reading needs, for tensors from elsewhere."""
    return Catalog(list(files), {})


def read_piece(catalog: Catalog, piece: Piece, box: Box) -> Array:
    """The elements of ``box`` (in the logical tensor, inside ``piece.box``) as an array of the stored dtype."""
    block = _block(piece, box)
    return read_block(catalog.files[block.file].contents, block.offset, block.strides, box.shape, piece.stored.dtype)


def _block(piece: Piece, box: Box) -> Block:
    """Where ``box`` (in the logical tensor) lies in the file of a piece."""
    stored = piece.stored
    item = itemsize(stored.dtype)
    strides = stored.element_strides
    at = stored.offset + item * sum(
        (b - p + q) * s
        for b, p, q, s in zip(box.start, piece.logical_box.start, piece.stored_box.start, strides, strict=True)
    )
    return Block(stored.file, at, tuple([s * item for s in strides]))


def read_tensor(catalog: Catalog, tensor: LogicalTensor, box: Box, dtype: str = "") -> Array:
    """``box`` of a logical tensor, put together from its pieces; ``dtype`` is that of the result where it is another.

    Elements are cast once, from what is stored: model weights may be derived from master weights of another dtype.
    """
    dtype = dtype or tensor.dtype
    if lookup(dtype).bits % 8:
        raise UnsupportedError(f"`{tensor.key}` is {dtype}; its elements are smaller than a byte")
    for piece in tensor.pieces:
        if piece.stored.dtype == dtype and piece.logical_box.contains(box):
            return read_piece(catalog, piece, box)  # a copy of it would take as much memory again
    out = np.empty(box.shape, numpy_dtype(dtype))
    for piece in tensor.pieces:
        common = piece.logical_box.intersect(box) if box.start else box
        if common is not None:
            inside = common.relative_to(box.start)
            where = tuple([slice(a, b) for a, b in zip(inside.start, inside.stop, strict=True)])
            target: Array = out[where] if where else out
            store(read_piece(catalog, piece, common), target)
    return out


def read_view(catalog: Catalog, view: DerivedTensor, box: Box, dtype: str = "") -> Array:
    """``box`` of a view, read from the logical tensors that it is made of; ``dtype`` as in ``read_tensor``."""
    dtype = dtype or view.dtype
    if view.same is not None:
        return read_tensor(catalog, view.same, box, dtype)
    out = np.empty(box.shape, numpy_dtype(dtype))
    for part in view.parts:
        p = part.clip(box)
        if p is None:
            continue
        low, high, order, picks = list(p.origin), [o + 1 for o in p.origin], [], [slice(None)] * len(p.origin)
        for n, axis, stride in zip(p.size, p.axes, p.stride, strict=True):
            if axis != NONE:
                high[axis] = p.origin[axis] + (n - 1) * stride + 1
                picks[axis] = slice(None, None, stride)
                order.append(axis)
        data = read_tensor(catalog, p.source, Box(tuple(low), tuple(high)), dtype)[tuple(picks)]
        rest = [a for a in range(data.ndim) if a not in order]
        data = data.transpose([*order, *rest]).reshape(p.size)
        steps = zip(p.first, box.start, p.size, p.step, strict=True)
        out[tuple([slice(f - o, f - o + (n - 1) * s + 1, s) for f, o, n, s in steps])] = data
    return out


def tensor_reads(
    catalog: Catalog, tensor: LogicalTensor, within: Box | None = None, *, replicas: bool = False
) -> Reads:
    """What is read of a tensor's pieces, and of their copies, from other machines; ``within`` a box of it."""
    found = [(p, p.logical_box) for p in (*tensor.pieces, *(tensor.replicas if replicas else ()))]
    if within is not None and within.start:
        found = [(p, common) for p, box in found if (common := box.intersect(within)) is not None]
    return _reads(catalog, found)


def view_reads(catalog: Catalog, view: DerivedTensor, within: Box | None = None) -> Reads:
    """What is read of the tensors that a view is made of, from other machines; ``within`` a box of the view."""
    found, turned = [], False
    parts = view.parts if within is None else [p for part in view.parts if (p := part.clip(within)) is not None]
    for part in parts:
        box = part.reads()
        axes = [a for a in part.axes if a != NONE]
        turned = turned or axes != sorted(axes)
        for piece in part.source.pieces:
            if (common := piece.logical_box.intersect(box) if box.start else box) is not None:
                found.append((piece, common))
    reads = _reads(catalog, found)
    return reads._replace(again=reads.again or (turned and view.nbytes > BLOCK))


def _reads(catalog: Catalog, found: Iterable[tuple[Piece, Box]]) -> Reads:
    ranges: list[tuple[Contents, int, int]] = []
    again, nbytes = False, 0
    for piece, box in found:
        stored = piece.stored
        contents = catalog.files[stored.file].contents
        if isinstance(catalog.files[stored.file].place, Path):
            continue
        nbytes += stored.nbytes
        if lookup(stored.dtype).bits % 8:
            ranges.append((contents, stored.offset, stored.offset + stored.nbytes))
            continue
        block = _block(piece, box)
        ranges += [(contents, a, b) for _, a, b in block_reads(block, box.shape, itemsize(stored.dtype))]
        long = [s for s, n in zip(block.strides, box.shape, strict=True) if n > 1]
        again = again or long != sorted(long, reverse=True)
    return Reads(ranges, again and nbytes > BLOCK)


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor whose values differ."""

    name: str
    elements: int
    """How many differ."""
    total: int
    first: tuple[int, ...]
    """Index of the first that differs."""
    max_abs: float
    """Largest absolute difference; NaN when either side is not a number there, 0 for dtypes without arithmetic."""
    packed: bool = field(default=False, kw_only=True)
    """Elements share bytes, which are counted instead."""

    def __str__(self) -> str:
        at = ", ".join(map(str, self.first))
        what = "bytes" if self.packed else "elements"
        return f"`{self.name}`: {self.elements:,} of {self.total:,} {what} differ, first at [{at}]"


def _bits(a: Array) -> Array:
    a = np.ascontiguousarray(a).reshape(a.shape)  # which makes a row of a scalar
    return a.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[a.dtype.itemsize])


def compare_one(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    left: Callable[[Box], Array],
    right: Callable[[Box], Array],
    advance: Advance = unwatched,
    stretch: Box | None = None,
) -> Difference | None:
    """Compare two readers of one tensor block by block, bit for bit; ``advance`` gets the bytes of each block.

    ``stretch`` is a box to which that is limited.
    """
    wrong, first, largest = 0, None, 0.0
    within = stretch or whole(shape)
    for inner in blocks(within.shape, itemsize(dtype), BLOCK):
        box = inner.shift(within.start)
        a, b = left(box), right(box)
        advance(b.nbytes)
        same = _bits(a) == _bits(b)
        if same.all():
            continue
        bad = np.argwhere(~same)
        wrong += len(bad)
        if first is None:
            first = tuple([int(x) + o for x, o in zip(bad[0], box.start, strict=True)])
        if lookup(dtype).kind == "float":
            with np.errstate(all="ignore"):
                gap = np.abs(a[~same].astype(np.float64) - b[~same].astype(np.float64))
            largest = float("nan") if np.isnan(gap).any() else max(largest, float(gap.max()))
    return None if first is None else Difference(name, wrong, prod(shape), first, largest)


class Comparison(NamedTuple):
    """A stretch of a tensor that was written, or of a copy of it, to be compared with what a view of the source says.

    It holds all that is needed but the files, so whoever has these can do it, in any order and by itself.
    """

    view: DerivedTensor
    tensor: LogicalTensor
    dtype: str
    """Dtype of the output."""
    copy: int
    """Which of ``tensor.replicas``; -1 for its pieces."""
    stretch: Box
    """In the tensor, or in the copy; of a tensor whose elements share bytes, in these bytes."""

    @property
    def packed(self) -> bool:
        """Whether elements share bytes."""
        return lookup(self.view.dtype).bits % 8 > 0

    @property
    def nbytes(self) -> int:
        """Bytes of what was written that are compared."""
        return self.stretch.volume * (1 if self.packed else itemsize(self.dtype))

    @property
    def files(self) -> Iterator[int]:
        """Numbers of the written files that hold them."""
        pieces = self.tensor.pieces if self.copy < 0 else (self.tensor.replicas[self.copy],)
        return (p.stored.file for p in pieces)

    def reads(self, source: Catalog, other: Catalog) -> Reads:
        """Remote byte ranges that are read on both sides."""
        if self.packed:
            one, two = view_reads(source, self.view), tensor_reads(other, self.tensor)
        elif self.copy < 0:
            one, two = view_reads(source, self.view, self.stretch), tensor_reads(other, self.tensor, self.stretch)
        else:
            copy = self.tensor.replicas[self.copy]
            box = self.stretch.shift(copy.logical_box.start)
            one, two = view_reads(source, self.view, box), _reads(other, [(copy, box)])
        return Reads([*one.ranges, *two.ranges], one.again or two.again)

    def do(self, source: Catalog, other: Catalog, advance: Advance = unwatched) -> Difference | None:
        """Read both sides and compare them; ``advance`` gets the bytes as they are compared."""
        if self.packed:
            return _compare_raw(source, self, other, advance)
        want = self.dtype
        if self.copy < 0:
            at = (0,) * len(self.view.shape)

            def written(box: Box) -> Array:
                return read_tensor(other, self.tensor, box)
        else:
            copy = self.tensor.replicas[self.copy]
            at = copy.logical_box.start

            def written(box: Box) -> Array:
                data = read_piece(other, copy, box.shift(at))
                out = np.empty(data.shape, numpy_dtype(want))
                store(data, out)
                return out

        def expected(box: Box) -> Array:
            return read_view(source, self.view, box.shift(at), want)

        shape = self.view.shape if self.copy < 0 else self.tensor.replicas[self.copy].logical_box.shape
        return compare_one(self.view.name, shape, want, expected, written, advance, self.stretch)


def comparisons(view: DerivedTensor, tensor: LogicalTensor, want: str) -> list[Comparison] | Difference:
    """What there is to compare of a tensor that should be ``view`` in the dtype ``want``; none for an empty one.

    A difference where shape or dtype are others already. Raises UnsupportedError for elements that share bytes and are
    cut.
    """
    if tensor.shape != view.shape or tensor.dtype != want:
        of = prod(view.shape)
        return Difference(view.name, of, of, (0,) * len(view.shape), float("nan"))
    if not prod(view.shape):
        return []
    if lookup(view.dtype).bits % 8:
        if view.same is None or len(tensor.pieces) != 1:
            raise UnsupportedError(f"`{view.name}` is {view.dtype} and cut; its elements share bytes")
        return [Comparison(view, tensor, want, -1, whole((view.same.pieces[0].stored.nbytes,)))]
    found = []
    most = STRETCH
    if tensor.nbytes > most and (_is_turned(view) or any(_is_across(p.stored) for p in tensor.pieces)):
        most *= _TURNED
    for number, copy in enumerate((None, *tensor.replicas), -1):
        stretches = list(blocks(copy.logical_box.shape if copy else view.shape, itemsize(want), most))
        for stretch in stretches:
            one, two = view, tensor
            if len(stretches) > 1:
                box = stretch.shift(copy.logical_box.start) if copy else stretch
                one, two = _near_view(view, box), replace(tensor, pieces=_near_pieces(tensor, box))
            found.append(Comparison(one, two, want, number, stretch))
    return found


def _is_turned(view: DerivedTensor) -> bool:
    """Whether elements that follow each other in a view lie apart in its files."""
    for part in view.parts:
        axes = [a for a in part.axes if a != NONE]
        if axes != sorted(axes) or any(_is_across(p.stored) for p in part.source.pieces):
            return True
    return False


def _is_across(stored: StoredTensor) -> bool:
    """Whether an axis has longer strides than one before it."""
    if stored.strides is None:
        return False
    long = [s for s, n in zip(stored.strides, stored.shape, strict=True) if n > 1]
    return long != sorted(long, reverse=True)


def _near_view(view: DerivedTensor, box: Box) -> DerivedTensor:
    """The view with what ``box`` of it is read from: a stack of experts has hundreds of parts, and so has each of its
    stretches otherwise."""
    if view.same is not None:
        return replace(view, same=replace(view.same, pieces=_near_pieces(view.same, box), replicas=()))
    return DerivedTensor(view.name, view.dtype, view.shape, None, tuple([p for p in view.parts if p.clip(box)]))


def _near_pieces(tensor: LogicalTensor, box: Box) -> Sequence[Piece]:
    """The pieces that share elements with ``box``."""
    return [p for _, p in tensor.near(box) if not box.start or p.logical_box.intersect(box) is not None]


def joined(found: Iterable[Difference | None]) -> Difference | None:
    """The difference of a tensor, of those of its stretches in order."""
    out: Difference | None = None
    for d in found:
        if d is not None and out is not None:
            largest = float("nan") if isnan(d.max_abs) or isnan(out.max_abs) else max(d.max_abs, out.max_abs)
            out = replace(out, elements=out.elements + d.elements, max_abs=largest)
        else:
            out = out or d
    return out


def _compare_raw(source: Catalog, what: Comparison, other: Catalog, advance: Advance) -> Difference | None:
    """Elements smaller than a byte: whole tensors only, compared as bytes."""
    assert what.view.same is not None  # noqa: S101 - see ``comparisons``
    a, b = what.view.same.pieces[0].stored, what.tensor.pieces[0].stored

    def read(catalog: Catalog, file: int, offset: int) -> Callable[[Box], Array]:
        return lambda box: read_block(catalog.files[file].contents, offset + box.start[0], (1,), box.shape, "U8")

    left, right = read(source, a.file, a.offset), read(other, b.file, b.offset)
    found = compare_one(what.view.name, (a.nbytes,), "U8", left, right, advance)
    return found and replace(found, packed=True)
