"""Byte ranges that the parts of a plan write. Pure.

An extent goes from the first byte of a step in an output to its last: there may be gaps in it, where other steps write.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from ckpttool.core.dtypes import itemsize, lookup, nbytes
from ckpttool.core.plan import Block, Compute, Copy, Fill, Plan, Quantize, Step, Unit
from ckpttool.execute.compute import part_elements
from ckpttool.execute.moves import Batch, Item, RowBlock, StridedCopy
from ckpttool.execute.schedule import Part
from ckpttool.execute.strided import clip

Extent = tuple[int, int, int]
"""(output, first byte, last + 1)."""


def part_extents(plan: Plan, part: Part, unit: Unit | None) -> Iterator[Extent]:
    """A byte range that a part writes. ``unit`` is the one of its task, where that is computed."""
    if part.carried >= 0:
        yield part.carried, 0, plan.outputs[part.carried].size
    elif part.unit >= 0:
        for step in plan.units[part.unit].steps:
            yield from step_extents(step)
    elif part.compute[0] >= 0 and unit is not None:
        yield from _computed_extents(unit.steps[part.compute[0]], part.compute[1])
    else:
        for item in part.items:
            yield from _item_extents(item)


def step_extents(step: Step) -> Iterator[Extent]:
    """The extents that a step writes."""
    if isinstance(step, Copy):
        yield _reach(step.dst, step.shape, step.dst_dtype)
    elif isinstance(step, Fill):
        yield _reach(step.dst, step.shape, step.dtype)
    elif isinstance(step, Compute | Quantize):
        for copy in step.outputs:
            yield from step_extents(copy)


def _computed_extents(step: Step, number: int) -> Iterator[Extent]:
    if not isinstance(step, Compute):  # codes, scales and a factor: all of them, for each part of a quantized tensor
        yield from step_extents(step)
        return
    size, each = itemsize(step.dtype), part_elements(step)
    lo, hi = number * each, min((number + 1) * each, prod(step.shape))
    for copy in step.outputs:
        for c in clip(copy, lo * size, hi * size, inner="src"):
            yield _reach(c.dst, c.shape, c.dst_dtype)


def _item_extents(item: Item) -> Iterator[Extent]:
    if isinstance(item, Batch):
        yield from ((r.dst, r.to, r.to + r.nbytes) for r in item.runs)
    elif isinstance(item, RowBlock):
        for m in item.moves:
            first = m.to + item.start * m.dst_strides[0]
            yield _move_reach(m._replace(to=first, shape=(item.stop - item.start, *m.shape[1:])))
    else:
        yield _move_reach(item.move)


def _move_reach(move: StridedCopy) -> Extent:
    return _reach(Block(move.dst, move.to, move.dst_strides), move.shape, move.dst_dtype)


def _reach(block: Block, shape: Sequence[int], dtype: str) -> Extent:
    """The extent of a block."""
    file, start, strides = block
    if 0 in shape:
        return file, start, start
    if lookup(dtype).bits % 8:  # packed elements are moved as one run
        return file, start, start + nbytes(dtype, prod(shape))
    return file, start, start + sum([(n - 1) * s for n, s in zip(shape, strides, strict=True)]) + itemsize(dtype)
