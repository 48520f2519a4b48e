"""What became of every tensor of a source: for ``--verify``, and without what a plan says about it.

A tensor whose elements are not all in the output needs a reason that can be seen from the source and the command line:
the user's patterns, a statement of the family file that leaves it out, or a tied tensor that holds the same.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod

import numpy as np

from ckpttool.checkpoint import Checkpoint
from ckpttool.core.catalog import Catalog, Key, LogicalTensor, Piece, StoredTensor
from ckpttool.core.dtypes import lookup
from ckpttool.core.patterns import compile_pattern
from ckpttool.core.plan import Adapted, Operand, Scaled, StoredOperand
from ckpttool.core.words import count
from ckpttool.errors import VerifyError
from ckpttool.execute.checks import agree
from ckpttool.execute.compare import compare_one, read_tensor, read_view
from ckpttool.formats.config import quantization
from ckpttool.layout.assemble import LAYER
from ckpttool.layout.packed import GLOBAL, INPUTS, PackedTensor, find_packing
from ckpttool.layout.statements import Drop, DropCopies, DropCopy, DropLayers, Rename, Tie, Transform, inverse, matches
from ckpttool.planning.planner import Computed, Ties
from ckpttool.planning.relate import DerivedTensor, TensorTable, apply_transforms
from ckpttool.quant.coded import find_codes
from ckpttool.targeting.target import WEIGHTS


@dataclass
class Account:
    """The reasons that a source and a command line give for leaving tensors out."""

    source: Checkpoint
    statements: Sequence[Transform]
    """What leads from Hugging Face names to those of the output."""
    remove: Sequence[str] = ()
    keep: Sequence[str] = ()
    """The user's patterns."""
    computed: Computed | None = None
    """Where tensors of the source are worked out from others."""

    def check(self, output: Collection[DerivedTensor]) -> None:
        """Raises VerifyError naming the first tensor that ``output`` lacks without a reason."""
        self._refuse([k for k in _incomplete(self.source.catalog, output) if not self._is_explained(k, output)])

    def check_recoded(self, recoded: Catalog, computed: Computed) -> None:
        """The same for a checkpoint whose weights change their precision: every tensor is read, or left out for a
        reason. Raises VerifyError."""
        source = self.source
        names = {k: self.source.published(k.name) for k in source.catalog.tensors if k.component == "model"}
        read = _Read(recoded, computed)
        unread = [k for k in names if source.catalog.tensors[k] not in read]
        if not unread:
            return
        table = {n: (source.catalog.tensors[k].dtype, source.catalog.tensors[k].shape) for k, n in names.items()}
        codes = find_codes(table, source.config, where=str(source.path))
        self._refuse(
            [
                k
                for k in unread
                if names[k] not in codes.beside
                and not self._is_removed(codes.parts.get(names[k], k.name))
                and not self._is_explained(k, ())
            ]
        )

    def _refuse(self, lost: Sequence[Key]) -> None:
        if lost:
            raise VerifyError(
                f"{count(len(lost), 'tensor')} of the source would be lost: `{lost[0]}`",
                where=str(self.source.path),
                hint="nothing was kept. This is a fault of ckpttool: please report it with the command line",
            )

    def _is_explained(self, key: Key, output: Collection[DerivedTensor]) -> bool:
        return (
            self._is_removed(key.name)
            or self._is_left_out(key.name)
            or self._is_copy(key)
            or self._is_joined(key, output)
        )

    @cached_property
    def _patterns(self) -> tuple[list[re.Pattern[str]], list[re.Pattern[str]]]:
        return [compile_pattern(p) for p in self.remove], [compile_pattern(p) for p in self.keep]

    def _is_removed(self, name: str) -> bool:
        """Whether the user's patterns remove a tensor, by its own name or its published one."""
        remove, keep = self._patterns
        names = (name, self.source.published(name))
        if any(p.search(n) for p in remove for n in names):
            return True
        return bool(keep) and not any(p.search(n) for p in keep for n in names)

    def _is_left_out(self, own: str) -> bool:
        """Whether a statement of the family file says that the output's naming does not have this tensor, or that
        only the source's has it."""
        name = own
        for op in inverse(self.source.ops):
            if isinstance(op, Drop) and matches(op.patterns, name):
                return True
            name = op.forward(name) if isinstance(op, Rename) else name
        layer = LAYER.search(name)
        for op in self.statements:
            if isinstance(op, Drop) and matches(op.patterns, name):
                return True
            limit = self.source.family.size(op.size) if isinstance(op, DropLayers) else None
            if layer and limit is not None and int(layer[1]) >= limit:
                return True
        return False

    def _is_copy(self, key: Key) -> bool:
        """Whether the output has another tensor of the source for this one (the config ties them, or its naming drops
        copies), and both have equal elements."""
        name = self.source.published(key.name)
        ties = self.source.family.ties
        used = [
            of for op in self.statements if isinstance(op, DropCopies) for p, of, _ in op.pairs if matches((p,), name)
        ]
        owners = dict.fromkeys(o for n in (name, *used) for o in (n, ties.get(n, "")) if o not in ("", name))
        return any(self._has_equal_tensors(key, name, owner) for owner in owners)

    def _has_equal_tensors(self, key: Key, name: str, owner: str) -> bool:
        """Whether the source has tensors of both names (``published``) with equal elements.

        Both are of the component and state of ``key``, and compared in the shapes that Hugging Face's checkpoints have.
        """
        source = self.source
        pair = {
            k.name: DerivedTensor(k.name, t.dtype, t.shape, t)
            for k, t in source.catalog.tensors.items()
            if (k.component, k.state) == (key.component, key.state) and self.source.published(k.name) in (name, owner)
        }
        shaping = tuple(op for op in source.ops if not isinstance(op, Tie | Drop | DropCopy | DropLayers))
        views = apply_transforms(TensorTable(pair), inverse(shaping), source.family, shaping).table
        return {name, owner} <= views.keys() and self._has_equal_elements(views[name], views[owner])

    def _has_equal_elements(self, one: DerivedTensor, other: DerivedTensor) -> bool:
        """Whether two tensors have one shape and equal elements, in the wider of their dtypes."""
        catalog = self.source.catalog
        if one.shape != other.shape:
            return False
        if not all(p.stored.file < len(catalog.files) for view in (one, other) for p in _pieces(view)):
            ties = Ties(self.computed, len(catalog.files))
            return agree(ties.steps(one, other), [f.contents for f in catalog.files])
        dtype = max(one.dtype, other.dtype, key=lambda d: lookup(d).bits)
        left, right = (partial(read_view, catalog, view, dtype=dtype) for view in (one, other))
        return compare_one(one.name, one.shape, dtype, left, right) is None

    def _is_joined(self, key: Key, output: Collection[DerivedTensor]) -> bool:
        """Whether a fused tensor has once what each of its parts had: a number of the optimizer, the groups of the
        inputs of packed weights. They are the same, but for the shapes of packed weights, which nobody reads."""
        catalog = self.source.catalog
        mine, packed = catalog.tensors[key], self._packed.get(key.name)
        if packed is not None and packed.place == GLOBAL:
            return True
        if prod(mine.shape) != 1 if key.component not in WEIGHTS else packed is None or packed.place != INPUTS:
            return False
        value = read_tensor(catalog, mine, mine.box)
        others = {id(v.same): v.same for v in output if v.same is not None and v.same.key[1:] == key[1:]}
        return any(
            np.array_equal(value, read_tensor(catalog, t, t.box)) for t in others.values() if t.shape == mine.shape
        )

    @cached_property
    def _packed(self) -> dict[str, PackedTensor]:
        dtypes = {k.name: t.dtype for k, t in self.source.catalog.tensors.items() if k.component == "model"}
        packing = find_packing(quantization(self.source.config), dtypes)
        return packing.parts(dtypes) if packing is not None else {}


def _pieces(view: DerivedTensor) -> Iterator[Piece]:
    for part in view.parts:
        yield from part.source.pieces


def _incomplete(catalog: Catalog, output: Iterable[DerivedTensor]) -> list[Key]:
    """The tensors of which some elements are in no view."""
    read: dict[int, dict[object, int]] = {}
    whole: set[int] = set()
    for view in output:
        if view.same is not None:
            whole.add(id(view.same))
            continue
        for part in view.parts:
            elements = (part.origin, part.axes, part.stride, part.size)  # a copy of the same elements counts once
            read.setdefault(id(part.source), {})[elements] = prod(part.size)
    return [
        key
        for key, t in catalog.tensors.items()
        if id(t) not in whole and sum(read.get(id(t), {}).values()) < prod(t.shape)
    ]


class _Read:
    """The tensors of a source that are read for a checkpoint with computed tensors."""

    def __init__(self, catalog: Catalog, computed: Computed) -> None:
        real = len(catalog.files)
        places = {(p.stored.file, p.stored.offset) for t in catalog for p in t.pieces if p.stored.file < real}
        for step in computed.steps:
            for operand in step.operands:
                places |= {(c.src.file, c.src.offset) for stored in _stored(operand) for c in stored.copies}
        self._places = sorted(places)

    def __contains__(self, tensor: LogicalTensor) -> bool:
        return all(self._has(p.stored) for p in tensor.pieces)

    def _has(self, stored: StoredTensor) -> bool:
        """Whether a place that is read lies in a stored tensor."""
        start, stop = ((stored.file, stored.offset + n) for n in (0, max(stored.nbytes, 1)))
        return bisect_left(self._places, start) < bisect_left(self._places, stop)


def _stored(operand: Operand) -> Iterator[StoredOperand]:
    """The stored operands that an operand is made of."""
    if isinstance(operand, StoredOperand):
        yield operand
    elif isinstance(operand, Scaled):
        yield from (part for part in (operand.weight, operand.scale, operand.factor) if part is not None)
    elif isinstance(operand, Adapted):
        yield from _stored(operand.weight)
    else:
        for source in operand.sources:
            yield from _stored(source)
