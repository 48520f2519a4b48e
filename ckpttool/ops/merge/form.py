"""The merged tensors under the names, fusions and orientation that Paddle's models have.

A merge is worked out under Hugging Face's names, so that its values do not depend on how the sources are stored: the
statistics of a method are those of one tensor, and draws follow its elements. An ``OutputNaming`` brings the result
back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from ckpttool.checkpoint import Checkpoint
from ckpttool.core.catalog import Key, LogicalTensor, Piece
from ckpttool.core.dtypes import itemsize
from ckpttool.core.geometry import Box, whole
from ckpttool.formats.registry import writer
from ckpttool.layout.family import Family
from ckpttool.layout.names import expand, pattern_of, pattern_regex
from ckpttool.layout.statements import Fuse, Rename, Transform, inverse
from ckpttool.planning.relate import NONE, DerivedTensor, Region, TensorTable, apply_transforms

"""The parameters of one inference program in several versions stay those of the program."""


class OutputNaming(NamedTuple):
    """How a Paddle checkpoint holds its tensors."""

    ops: tuple[Transform, ...]
    """Statements that lead from Hugging Face's names to those of the checkpoint, as its reader found them."""
    exact: tuple[Transform, ...]
    """The same for tensors that are not its own: they fuse only the modules that are fused there. (Experts may be
    fused where the dense layers beside them are not; taking apart what is there needs no such distinction.)"""

    def of(self, tensors: Mapping[Key, LogicalTensor], family: Family) -> dict[Key, LogicalTensor]:
        """The tensors in this form. Raises IncompleteError when a part of a fused tensor is missing."""
        if not self.ops:
            return dict(tensors)
        views = TensorTable({k.name: DerivedTensor(k.name, t.dtype, t.shape, t) for k, t in tensors.items()})
        component = next((k.component for k in tensors), "model")
        out = {}
        for view in apply_transforms(views, self.exact, family):
            t = _tensor(view, component)
            out[t.key] = t
        return out


def form_of(donor: Checkpoint, others: Iterable[Checkpoint], fmt: str) -> OutputNaming | None:
    """The donor's form when it has a format of its own, and all models or the output (``--to``) have its names; else
    None.

    Where it is None the merged tensors have Hugging Face's names.
    """
    own = donor.dialect
    wanted = bool(fmt) and writer(fmt).dialect == own.name
    if not own.whole_format or not (wanted or all(o.dialect.name == own.name for o in others)):
        return None
    return OutputNaming(donor.ops, tuple(_exact(donor.ops, {k.name for k in donor.catalog.tensors})))


def _exact(ops: Sequence[Transform], names: Iterable[str]) -> Iterator[Transform]:
    """The statements, each fusion for the fused tensors among ``names`` alone."""
    back = [op for op in inverse(ops) if isinstance(op, Rename)]
    plain = set(names)
    for rename in back:
        plain = {rename.forward(n) for n in plain}
    for op in ops:
        if not isinstance(op, Fuse):
            yield op
            continue
        found: dict[str, Fuse] = {}
        for name in sorted(plain):
            if m := pattern_regex(op.whole).match(name):
                parts = tuple([pattern_of(expand(p, m.groupdict())) for p in op.parts])
                found[pattern_of(name)] = replace(op, whole=pattern_of(name), parts=parts)
        yield from found.values()


def _tensor(view: DerivedTensor, component: str) -> LogicalTensor:
    """A view of tensors that each are one stored tensor, as a tensor that is stored in pieces of them."""
    key = Key(view.name, component)
    if view.same is not None:
        return LogicalTensor(key, view.dtype, view.shape, view.same.pieces)
    pieces = [piece for part in view.parts if part.source.pieces for piece in _pieces(part)]
    return LogicalTensor(key, view.dtype, view.shape, tuple(pieces))


def _pieces(part: Region) -> Iterator[Piece]:
    """The boxes of a loop nest; an axis whose steps leave gaps in the view gives one box for each step."""
    (piece,) = part.source.pieces
    stored = piece.stored
    item = itemsize(stored.dtype)
    at = stored.offset + sum(a * s for a, s in zip(part.origin, stored.element_strides, strict=True)) * item
    strides = [
        0 if axis == NONE else by * stored.element_strides[axis]
        for axis, by in zip(part.axes, part.stride, strict=True)
    ]
    size = tuple([n if step == 1 else 1 for n, step in zip(part.size, part.step, strict=True)])
    loops = [range(1) if step == 1 else range(n) for n, step in zip(part.size, part.step, strict=True)]
    for index in product(*loops):
        first = tuple([a + i * step for a, i, step in zip(part.first, index, part.step, strict=True)])
        offset = at + sum(i * s for i, s in zip(index, strides, strict=True)) * item
        box = Box(first, tuple([a + n for a, n in zip(first, size, strict=True)]))
        yield Piece(stored._replace(shape=size, offset=offset, strides=tuple(strides)), whole(size), box)
