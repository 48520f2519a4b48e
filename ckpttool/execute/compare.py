"""Reading boxes of logical tensors and comparing checkpoints, without a plan.

``--verify``, ``inspect --diff --values`` and the Python API come through here: the address of every element is worked
out from pieces and views with numpy indexing, so a fault of the planner or of the executor cannot hide itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ckpttool.catalog import Catalog, LogicalTensor, Piece
from ckpttool.dtypes import itemsize, lookup, numpy_dtype
from ckpttool.encodings import Contents
from ckpttool.errors import UnsupportedError, VerifyError
from ckpttool.execute.options import Advance, unwatched
from ckpttool.execute.permute import store
from ckpttool.execute.reader import Reads, block_reads, blocks, in_turn, read_block
from ckpttool.geometry import Box
from ckpttool.plan import Block
from ckpttool.relate import NONE, DerivedTensor

BLOCK = 4 << 20
"""Bytes compared at a time."""

Array = np.ndarray[Any, np.dtype[Any]]


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


def tensor_reads(catalog: Catalog, tensor: LogicalTensor, *, replicas: bool = False) -> Reads:
    """What is read of a tensor's pieces, and of their copies, from other machines."""
    pieces = [*tensor.pieces, *(tensor.replicas if replicas else ())]
    return _reads(catalog, [(p, p.logical_box) for p in pieces])


def view_reads(catalog: Catalog, view: DerivedTensor) -> Reads:
    """What is read of the tensors that a view is made of, from other machines."""
    found, turned = [], False
    for part in view.parts:
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

    def __str__(self) -> str:
        at = ", ".join(map(str, self.first))
        return f"`{self.name}`: {self.elements:,} of {self.total:,} elements differ, first at [{at}]"


def _bits(a: Array) -> Array:
    a = np.ascontiguousarray(a)
    return a.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[a.dtype.itemsize])


def compare_one(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    left: Callable[[Box], Array],
    right: Callable[[Box], Array],
    advance: Advance = unwatched,
) -> Difference | None:
    """Compare two readers of one tensor block by block, bit for bit; ``advance`` is told the bytes of each block."""
    wrong, first, largest = 0, None, 0.0
    for box in blocks(shape, itemsize(dtype), BLOCK):
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


def verify_views(
    source: Catalog,
    views: Sequence[DerivedTensor],
    other: Catalog,
    *,
    total: int | None = None,
    cast: Callable[[str, str], str] = lambda _, dtype: dtype,
    advance: Advance = unwatched,
) -> None:
    """Raises VerifyError when tensors of ``other``, or copies of their boxes, are not what ``views`` of ``source`` say.

    ``cast`` maps (name, dtype) to the new dtype, ``total`` is how many tensors were written, and ``advance`` is told
    the bytes of ``other`` as they are compared. Tensors of sub-byte elements are compared as bytes.
    """

    def one(view: DerivedTensor) -> list[Difference]:
        tensor = other[view.name]
        want = cast(view.name, view.dtype)
        if tensor.shape != view.shape or tensor.dtype != want:
            return [Difference(view.name, tensor.nbytes, tensor.nbytes, (0,) * len(tensor.shape), float("nan"))]
        if not prod(view.shape):
            return []
        if lookup(view.dtype).bits % 8:
            return _compare_raw(source, view, other, tensor, advance)

        def expected(box: Box) -> Array:
            return read_view(source, view, box, want)

        found = [
            compare_one(view.name, view.shape, want, expected, lambda box: read_tensor(other, tensor, box), advance)
        ]
        for copy in tensor.replicas:
            start = copy.logical_box.start

            def shifted(box: Box, start: tuple[int, ...] = start) -> Array:
                return expected(box.shift(start))

            def written(box: Box, copy: Piece = copy, start: tuple[int, ...] = start) -> Array:
                data = read_piece(other, copy, box.shift(start))
                out = np.empty(data.shape, numpy_dtype(want))
                store(data, out)
                return out

            found.append(compare_one(view.name, copy.logical_box.shape, want, shifted, written, advance))
        return [d for d in found if d is not None]

    def reads(view: DerivedTensor) -> Reads:
        left, right = view_reads(source, view), tensor_reads(other, other[view.name], replicas=True)
        return Reads([*left.ranges, *right.ranges], left.again or right.again)

    wrong = [d for found in in_turn(2, one, views, reads) for d in found]
    if wrong:
        raise VerifyError(
            f"{len(wrong)} of {len(views) if total is None else total} tensors differ from the source",
            where=[str(w) for w in wrong[:5]],
            hint="nothing was kept. This is a fault of ckpttool or of the disk: please report it with the command line",
        )


def _compare_raw(
    source: Catalog, view: DerivedTensor, other: Catalog, tensor: LogicalTensor, advance: Advance
) -> list[Difference]:
    """Elements smaller than a byte: whole tensors only, compared as bytes."""
    if view.same is None or len(tensor.pieces) != 1:
        raise UnsupportedError(f"`{view.name}` is {view.dtype} and cut; its elements share bytes")
    a, b = view.same.pieces[0].stored, tensor.pieces[0].stored

    def read(catalog: Catalog, file: int, offset: int) -> Callable[[Box], Array]:
        return lambda box: read_block(catalog.files[file].contents, offset + box.start[0], (1,), box.shape, "U8")

    left, right = read(source, a.file, a.offset), read(other, b.file, b.offset)
    got = compare_one(view.name, (a.nbytes,), "U8", left, right, advance)
    return [got] if got else []
