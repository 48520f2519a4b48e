"""Tensors that Paddle's tensor parallelism holds whole on every rank, when they are written and when they are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ckpttool.core.catalog import SHAPE_FROM_RULES, StoredTensor
from ckpttool.core.patterns import compile_pattern, exactly
from ckpttool.dialects.base import Shapes, Statements
from ckpttool.errors import CkptError, ConflictError
from ckpttool.layout.assemble import is_bias
from ckpttool.layout.family import Family, Placement
from ckpttool.layout.names import expand, pattern_regex, split_numbers
from ckpttool.layout.rules import IndivisibleError, PartitionContext, Rule, Sizes, cut_axis, global_axis, size_name
from ckpttool.layout.shapes import declared_tensors
from ckpttool.layout.statements import Fuse, Rename, Transform, inverse


def keeps_whole(rule: Rule, sizes: Sizes, tp: int) -> bool:
    """Whether Paddle's tensor parallelism holds a tensor with this rule whole on every rank.

    That is so for key and value projections whose heads do not divide, and for embeddings and heads of a vocabulary
    that does not. Writing asks this function, and reading does where a save does not record what is cut.
    """
    kind = "vocab" if rule.verb == "vocab" else rule.units if rule.verb == "column" else ""
    return size_name(kind) in ("vocab", "kv_heads") and kind in sizes and sizes[kind].value % tp != 0


def kept_whole(family: Family, ops: Statements, shapes: Shapes, tp: int, source: Sequence[str] = ()) -> tuple[str, ...]:
    """Patterns of the tensors to write whole on every rank: those of ``keeps_whole``, and of the tensors that no rule
    names those that the source held whole (``source`` are its patterns).

    Raises ConflictError where config.json has a vocabulary by which the tensor could not be read again.
    """
    place_of = family.placer(ops)
    held = [compile_pattern(p) for p in source]
    out = set()
    for name, shape in shapes.items():
        place = place_of(name)
        if place is not None and tp > 1:
            _check_vocabulary(name, shape, place.rule, family, tp)
        if any(p.search(name) for p in held) if place is None else keeps_whole(place.rule, family.sizes, tp):
            out.add("*".join(split_numbers(name)[0].split("#")))
    return tuple(sorted(out))


def _check_vocabulary(name: str, shape: tuple[int, ...], rule: Rule, family: Family, tp: int) -> None:
    """A vocabulary may be padded beyond config.json's, but not be shorter, nor so long that a share looks whole."""
    vocab = family.size("vocab")
    axis = cut_axis(rule, len(shape), bias=is_bias(name)) if rule.verb == "vocab" else None
    if vocab is None or axis is None:
        return
    rows = shape[axis]
    is_cut = not keeps_whole(rule, family.sizes, tp)
    if rows < vocab or (is_cut and rows // tp >= vocab):
        raise ConflictError(
            f"`{name}` has {rows:,} tokens, config.json says a vocabulary of {vocab:,}:"
            f" on {tp} ranks nothing would tell whether it is whole or cut",
            where=rule.place,
            hint=f"set vocab_size to {rows} in config.json, if the tensor is right",
        )


@dataclass(slots=True)
class WholeTensors:
    """Finds the tensors that every tensor-parallel rank holds whole, in a save that does not record which are cut.

    The length of the axis that the rule cuts tells: on the rank it is that of the whole tensor, or a share of it. How
    long the whole tensor is follows from config.json, or from the model's weights for what is saved beside them.
    """

    family: Family
    ops: Statements
    cutting: PartitionContext
    config: Mapping[str, Any]
    known: Shapes = field(default_factory=dict)
    """Whole shapes of the model's weights, once they are known."""
    _declared: Shapes | None = None

    def patterns(self, tensors: Iterable[StoredTensor]) -> tuple[str, ...]:
        """Patterns of their names. Raises ConflictError where lengths fit neither a whole tensor nor a share."""
        place_of = self.family.placer(self.ops)
        chosen: dict[str, bool] = {}
        for t in tensors:
            if t.name in chosen or (t.state and prod(t.shape) == 1 and t.shape != SHAPE_FROM_RULES):
                continue
            place = place_of(t.name)
            said = any(regex.search(t.name) for regex, _ in self.family.overrides)
            chosen[t.name] = place is not None and not said and self._is_whole(t, place)
        return exactly(chosen)

    def _is_whole(self, t: StoredTensor, place: Placement) -> bool:
        rule, sizes, mesh = place.rule, self.family.sizes, self.cutting.mesh
        ways = mesh.etp if rule.expert else mesh.tp
        if ways == 1:
            return False
        usual = keeps_whole(rule, sizes, ways)
        if t.shape == SHAPE_FROM_RULES:
            return usual
        axis = cut_axis(rule, len(t.shape), bias=is_bias(t.name))
        if axis is None:
            return False
        held = t.shape[axis]
        try:
            joined = held * ways if rule.verb == "vocab" else global_axis(rule, held, ways, self.cutting)
        except IndivisibleError:
            joined = 0  # no share has this length
        length = self._length(t.name, rule, axis, len(t.shape))
        if length in (held, joined):
            return length == held
        if rule.verb != "vocab":
            if length is None or size_name(rule.units) != "kv_heads":
                return usual
        elif length is not None:
            # A whole vocabulary may be padded, and so may one that is cut.
            if held < length < joined:
                return False
            if usual and held > length:
                return True
        raise self._unclear(t, rule, axis, ways, length)

    def _length(self, name: str, rule: Rule, axis: int, ndim: int) -> int | None:
        """Elements of the axis in the whole tensor, as far as that is known."""
        if name in self.known and len(self.known[name]) == ndim:
            return self.known[name][axis]
        if rule.verb == "vocab":
            return self.family.size("vocab")
        published = hf_name(self.ops, name)
        fuse = next((f for f in self.ops if isinstance(f, Fuse) and pattern_regex(f.whole).match(published)), None)
        if fuse is None:
            return self._declared_length(published)
        captures = pattern_regex(fuse.whole).match(published)
        parts = [self._declared_length(expand(p, captures.groupdict())) for p in fuse.parts] if captures else []
        return None if None in parts else sum(n for n in parts if n is not None)

    def _declared_length(self, name: str) -> int | None:
        """The same of a tensor as Hugging Face has it, by config.json."""
        if self._declared is None:
            try:
                self._declared = {d.name: d.shape for d in declared_tensors(self.family, self.config)}
            except CkptError:  # the config lacks a field, or the family does not say what its models hold
                self._declared = {}
        place, shape = self.family.placement(name), self._declared.get(name)
        if shape is None and is_bias(name):
            name = name.removesuffix("bias") + "weight"
            place, shape = self.family.placement(name), self._declared.get(name)
        axis = cut_axis(place.rule, len(shape), bias=is_bias(name)) if place is not None and shape else None
        return shape[axis] if shape is not None and axis is not None else None

    def _unclear(self, t: StoredTensor, rule: Rule, axis: int, ways: int, length: int | None) -> ConflictError:
        said = f"config.json says {length:,}" if length is not None else "config.json does not say how long it is"
        field = "vocab_size" if rule.verb == "vocab" else "the sizes of the attention heads"
        return ConflictError(
            f"it is not clear whether `{t.name}` is whole on each of the {ways} ranks or cut: axis {axis} has"
            f" {t.shape[axis]:,} elements on a rank, and {said}",
            where=rule.place,
            hint=f"correct {field} in config.json; or pass --split '{t.name}=none' if it is whole,"
            f" --split '{t.name}={axis}' if it is cut",
        )


def hf_name(ops: Sequence[Transform], name: str) -> str:
    """The name before the renamings of ``ops``."""
    for op in inverse(ops):
        if isinstance(op, Rename):
            name = op.forward(name)
    return name
