"""Relations: how the logical tensors of one dialect become those of another.

A ``DerivedTensor`` is a logical tensor of the new dialect, expressed as regions of logical tensors of the old one. A
region is a loop nest with one loop per axis of the derived tensor: its position ``first + step * k`` is position
``origin + stride * k`` of an axis of the source. Steps other than 1 are what interleaving needs (gpt-oss keeps gate and
up in alternate columns); everything else is a translation.

Renaming, fusing, taking apart, stacking experts and dropping layers are functions from one table of views to the
next, so dialects compose by applying them in turn.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from ckpttool.core.catalog import Catalog, Key, LogicalTensor, Piece
from ckpttool.core.dtypes import nbytes
from ckpttool.core.geometry import Box, whole
from ckpttool.core.optimizer_states import SCALARS
from ckpttool.core.patterns import bounded, nearest_hint, renamer
from ckpttool.core.words import count, short
from ckpttool.errors import ConflictError, IncompleteError, LayoutError, UnsupportedError, UsageError
from ckpttool.layout import statements as transforms
from ckpttool.layout.assemble import LAYER, is_bias
from ckpttool.layout.family import Family
from ckpttool.layout.names import Renamer, expand, pattern_regex
from ckpttool.layout.packed import GLOBAL, INPUTS, PackedTensor, Packing, find_packing
from ckpttool.layout.rules import CutSize, Rule, UnknownSizeError, cut_axis, unit_count
from ckpttool.layout.scales import block_of, weight_of
from ckpttool.layout.statements import Transform, matches

EqualPair = tuple[LogicalTensor, LogicalTensor]
"""Two tensors that become one, and must hold the same."""

NONE = -1
"""In ``Region.axes``: the axis of the view has one element and no counterpart."""


class Region(NamedTuple):
    """A loop nest from a source tensor to a view; all tuples but ``origin`` have one entry per axis of the view."""

    size: tuple[int, ...]
    first: tuple[int, ...]
    step: tuple[int, ...]
    source: LogicalTensor
    origin: tuple[int, ...]
    """Per axis of the source."""
    axes: tuple[int, ...]
    """Axis of the source that each axis of the view walks, or NONE."""
    stride: tuple[int, ...]
    """Source elements per loop step, per axis of the view."""

    def clip(self, box: Box) -> Region | None:
        """The part of the part that lies in ``box`` of the view."""
        size, first, origin = list(self.size), list(self.first), list(self.origin)
        for i, (n, at, step) in enumerate(zip(self.size, self.first, self.step, strict=True)):
            lo = max(0, -(-(box.start[i] - at) // step))
            hi = min(n, -(-(box.stop[i] - at) // step))
            if lo >= hi:
                return None
            if lo or hi != n:
                size[i], first[i] = hi - lo, at + lo * step
                if self.axes[i] != NONE:
                    origin[self.axes[i]] += lo * self.stride[i]
        return self._replace(size=tuple(size), first=tuple(first), origin=tuple(origin))

    def clip_source(self, box: Box) -> Region | None:
        """The part of the part that reads from ``box`` of the source."""
        size, first, origin = list(self.size), list(self.first), list(self.origin)
        walked = set(self.axes)
        for axis, at in enumerate(self.origin):
            if axis not in walked and not box.start[axis] <= at < box.stop[axis]:
                return None
        for i, axis in enumerate(self.axes):
            if axis == NONE:
                continue
            n, at, stride = size[i], origin[axis], self.stride[i]
            lo = max(0, -(-(box.start[axis] - at) // stride))
            hi = min(n, -(-(box.stop[axis] - at) // stride))
            if lo >= hi:
                return None
            if lo or hi != n:
                size[i], first[i], origin[axis] = hi - lo, first[i] + lo * self.step[i], at + lo * stride
        return self._replace(size=tuple(size), first=tuple(first), origin=tuple(origin))

    def reads(self) -> Box:
        """The box of the source that holds all that the part reads."""
        stop = [at + 1 for at in self.origin]
        for axis, n, by in zip(self.axes, self.size, self.stride, strict=True):
            if axis != NONE:
                stop[axis] += (n - 1) * by
        return Box(self.origin, tuple(stop))

    def pieces_in(self, box: Box) -> Iterator[tuple[int, Piece, Region]]:
        """What of the part lies in ``box`` of the view: number and piece of the source, and the part in that piece."""
        if (inside := self.clip(box)) is None:
            return
        for i, piece in self.source.near(inside.reads()):
            if (found := inside.clip_source(piece.logical_box)) is not None:
                yield i, piece, found


@dataclass(slots=True)
class DerivedTensor:
    """A logical tensor of the target's dialect. ``same`` is set when it is a source tensor unchanged."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    same: LogicalTensor | None = None
    _parts: tuple[Region, ...] = ()
    _starts: list[int] | None = None
    """Where each of many parts that lie one behind the other begins on the first axis; [] when they do not."""
    _longest: int = 1
    """The most that one of them takes up there."""

    @property
    def parts(self) -> tuple[Region, ...]:
        if self.same is None:
            return self._parts
        n = len(self.shape)
        return (Region(self.shape, (0,) * n, (1,) * n, self.same, (0,) * n, tuple(range(n)), (1,) * n),)

    def parts_in(self, boxes: Iterable[tuple[Box, Box]]) -> tuple[Region, ...]:
        """The parts, without some that lie in none of ``boxes`` (the second of each pair): of the experts of a stack
        those that a rank does not hold, which would be looked at in vain for each of many ranks."""
        parts = self.parts
        if len(parts) < 8 or not self.shape:
            return parts
        if self._starts is None:
            starts = [p.first[0] for p in parts]
            self._starts = starts if starts == sorted(starts) else []
            self._longest = max(1 + (p.size[0] - 1) * p.step[0] for p in parts)
        if not self._starts:
            return parts
        outer = [b for _, b in boxes]
        low = min((b.start[0] for b in outer), default=0)
        high = max((b.stop[0] for b in outer), default=0)
        return parts[bisect_right(self._starts, low - self._longest) : bisect_left(self._starts, high)]

    def named(self, name: str) -> DerivedTensor:
        """The same elements under another name."""
        return DerivedTensor(name, self.dtype, self.shape, self.same, self._parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return nbytes(self.dtype, prod(self.shape), where=self.name)


Tied = tuple[DerivedTensor, DerivedTensor]
"""A copy and its owner, which the config ties to each other."""


@dataclass(slots=True)
class TensorTable:
    """The table of views while statements are applied to it."""

    table: dict[str, DerivedTensor]
    notes: list[str] = field(default_factory=list)
    equal: list[EqualPair] = field(default_factory=list)
    """What a statement made one tensor of, although there were several."""
    tied: list[Tied] = field(default_factory=list)
    """What the config ties and a statement takes for one tensor; both are there, and must hold the same."""

    def __iter__(self) -> Iterator[DerivedTensor]:
        return iter(self.table.values())

    def __len__(self) -> int:
        return len(self.table)


def identity(catalog: Catalog) -> TensorTable:
    """Every model weight under its own name."""
    return TensorTable(
        {t.key.name: DerivedTensor(t.key.name, t.dtype, t.shape, t) for t in catalog if t.key.component == "model"}
    )


def _put(table: dict[str, DerivedTensor], view: DerivedTensor, why: str) -> None:
    if view.name in table:
        raise ConflictError(f"two tensors would both be named `{view.name}`", where=why)
    table[view.name] = view


def rename(views: TensorTable, function: Callable[[str], str | None], why: str) -> TensorTable:
    """Give every view the name ``function`` returns (None keeps it)."""
    table: dict[str, DerivedTensor] = {}
    for view in views:
        new = function(view.name)
        _put(table, view if new in (None, view.name) else view.named(str(new)), why)
    return replace(views, table=table)


def rename_by_rules(views: TensorTable, rules: Sequence[str]) -> TensorTable:
    """--rename OLD=NEW; a rule that matches nothing is an error."""
    for regex, replacement, text in renamer(rules):
        with bounded(f"--rename {text}"):
            hits = [n for n in views.table if regex.search(n)]
        if not hits:
            raise UsageError(f"--rename `{text}` matches no tensor", hint=nearest_hint(text.split("=")[0], views.table))
        views = rename(views, lambda n, r=regex, to=replacement: r.sub(to, n), f"--rename {text}")  # type: ignore[misc]
    return views


def keep(views: TensorTable, names: Iterable[str]) -> TensorTable:
    """The views with these names."""
    wanted = set(names)
    return replace(views, table={n: v for n, v in views.table.items() if n in wanted})


def concat(name: str, parts: Sequence[DerivedTensor], axis: int) -> DerivedTensor:
    """Join along ``axis``. Raises LayoutError when dtypes or other axes differ."""
    first = parts[0]
    for p in parts[1:]:
        if p.dtype != first.dtype or len(p.shape) != len(first.shape):
            raise LayoutError(
                f"`{first.name}` is {first.dtype} {list(first.shape)} and `{p.name}` is {p.dtype} {list(p.shape)}:"
                f" they cannot be fused into `{name}`",
            )
        if any(a != b for i, (a, b) in enumerate(zip(p.shape, first.shape, strict=True)) if i != axis):
            raise LayoutError(
                f"`{first.name}` {list(first.shape)} and `{p.name}` {list(p.shape)} differ besides axis {axis}:"
                f" they cannot be fused into `{name}`",
            )
    out: list[Region] = []
    at = 0
    for p in parts:
        out += [q._replace(first=_add(q.first, axis, at)) for q in p.parts]
        at += p.shape[axis]
    shape = (*first.shape[:axis], at, *first.shape[axis + 1 :])
    return DerivedTensor(name, first.dtype, shape, None, tuple(out))


def _add(t: tuple[int, ...], axis: int, by: int) -> tuple[int, ...]:
    return (*t[:axis], t[axis] + by, *t[axis + 1 :])


def _set(t: tuple[int, ...], axis: int, to: int) -> tuple[int, ...]:
    return (*t[:axis], to, *t[axis + 1 :])


def take(name: str, view: DerivedTensor, axis: int, start: int, stop: int) -> DerivedTensor:
    """The slab ``[start, stop)`` of an axis, as a tensor of its own."""
    if view.same is not None:  # the most: a part of one tensor
        shape, n = _set(view.shape, axis, stop - start), len(view.shape)
        region = Region(shape, (0,) * n, (1,) * n, view.same, _set((0,) * n, axis, start), tuple(range(n)), (1,) * n)
        return DerivedTensor(name, view.dtype, shape, None, (region,) if stop > start else ())
    box = whole(view.shape)
    box = Box(_set(box.start, axis, start), _set(box.stop, axis, stop))
    parts = [c._replace(first=_add(c.first, axis, -start)) for p in view.parts if (c := p.clip(box)) is not None]
    return DerivedTensor(name, view.dtype, _set(view.shape, axis, stop - start), None, tuple(parts))


def interleave(name: str, parts: Sequence[DerivedTensor], axis: int, groups: int) -> DerivedTensor:
    """Interleave along ``axis``: ``groups`` times (1/groups of part 1, 1/groups of part 2, ...)."""
    each = [p.shape[axis] // groups for p in parts]
    for p in parts:
        if p.shape[axis] % groups:
            raise LayoutError(f"`{p.name}` {list(p.shape)} does not divide into {groups} groups on axis {axis}")
    joined = concat(name, parts, axis)
    period = sum(each)
    out: list[Region] = []
    at = 0
    for p, n in zip(parts, each, strict=True):
        if n == 1:
            for q in p.parts:
                first = _set(q.first, axis, q.first[axis] * period + at)
                out.append(q._replace(first=first, step=_set(q.step, axis, q.step[axis] * period)))
        else:
            for g in range(groups):
                share = take("", p, axis, g * n, (g + 1) * n).parts
                out += [q._replace(first=_add(q.first, axis, g * period + at)) for q in share]
        at += n
    return DerivedTensor(name, joined.dtype, joined.shape, None, tuple(out))


def deinterleave(
    name: str, view: DerivedTensor, axis: int, groups: int, start: int, length: int, period: int
) -> DerivedTensor:
    """The inverse of ``interleave`` for one part: rows ``[start, start + length)`` of every period."""
    if length == 1 and all(p.step[axis] == 1 for p in view.parts):
        out = []
        for p in view.parts:
            # View positions first + k that are start modulo period become loop steps of their own.
            lead = (start - p.first[axis]) % period
            steps = -(-(p.size[axis] - lead) // period)
            if steps <= 0:
                continue
            origin = list(p.origin)
            if p.axes[axis] != NONE:
                origin[p.axes[axis]] += lead * p.stride[axis]
            out.append(
                p._replace(
                    size=_set(p.size, axis, steps),
                    first=_set(p.first, axis, (p.first[axis] + lead - start) // period),
                    origin=tuple(origin),
                    stride=_set(p.stride, axis, p.stride[axis] * period),
                )
            )
        return DerivedTensor(name, view.dtype, _set(view.shape, axis, groups), None, tuple(out))
    slabs = [take("", view, axis, g * period + start, g * period + start + length) for g in range(groups)]
    return concat(name, slabs, axis)


def stack(name: str, parts: Sequence[DerivedTensor]) -> DerivedTensor:
    """Put tensors of one shape on a new first axis."""
    first = parts[0]
    out = []
    for e, p in enumerate(parts):
        if p.shape != first.shape or p.dtype != first.dtype:
            raise LayoutError(
                f"`{p.name}` is {p.dtype} {list(p.shape)}, `{first.name}` is {first.dtype} {list(first.shape)}:"
                f" they cannot be stacked into `{name}`"
            )
        for q in p.parts:
            out.append(
                Region((1, *q.size), (e, *q.first), (1, *q.step), q.source, q.origin, (NONE, *q.axes), (1, *q.stride))
            )
    return DerivedTensor(name, first.dtype, (len(parts), *first.shape), None, tuple(out))


def unstack(name: str, view: DerivedTensor, index: int) -> DerivedTensor:
    """One tensor of a stack."""
    slab = take("", view, 0, index, index + 1)
    parts = [
        Region(p.size[1:], p.first[1:], p.step[1:], p.source, p.origin, p.axes[1:], p.stride[1:]) for p in slab.parts
    ]
    return DerivedTensor(name, view.dtype, view.shape[1:], None, tuple(parts))


def permute(name: str, view: DerivedTensor, order: Sequence[int]) -> DerivedTensor:
    """Axis i of the result is axis ``order[i]`` of the view; metadata only."""

    def pick(t: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(t[a] for a in order)

    parts = [
        Region(pick(p.size), pick(p.first), pick(p.step), p.source, p.origin, pick(p.axes), pick(p.stride))
        for p in view.parts
    ]
    return DerivedTensor(name, view.dtype, pick(view.shape), None, tuple(parts))


def apply_transforms(
    views: TensorTable, ops: Sequence[Transform], family: Family, before: Sequence[Transform] = ()
) -> TensorTable:
    """Apply the statements of a dialect. ``before`` are those that led to the names ``views`` has now."""
    done = list(before)
    renames: list[transforms.Rename] = []
    packing = find_packing(family.quantization, {n: v.dtype for n, v in views.table.items()}) if ops else None
    for op in [*ops, None]:
        if isinstance(op, transforms.Rename):
            renames.append(op)  # neighbours are applied in one pass over the names
            continue
        if renames:
            views = rename(views, _all_of(renames), f"naming of family `{family.name}`")
            done += renames
            renames = []
        if op is None:
            break
        if isinstance(op, transforms.Tie):
            views = _tie(views, op, family)
        elif isinstance(op, transforms.DropCopy):
            views = _drop_copy(views, op)
        elif isinstance(op, transforms.DropCopies):
            views = (_make_copies if op.inverse else _drop_copies)(views, op, family)
        elif isinstance(op, transforms.DropLayers):
            views = _drop_layers(views, op, family)
        elif isinstance(op, transforms.Drop):
            views = _drop(views, op)
        elif isinstance(op, transforms.Fuse):
            views = (_take_apart if op.inverse else _fuse)(views, op, _Axes(views, family, tuple(done), packing))
        elif isinstance(op, transforms.RotaryPairs):
            views = _rotate(views, op, _Axes(views, family, tuple(done), packing))
        elif isinstance(op, transforms.Transpose | transforms.Squeeze):
            if packing is not None:
                _refuse_packed(views, op.patterns, packing, "transposed")
            views = _reshape(views, op)
        elif isinstance(op, transforms.Refuse):
            _refuse(views, op, family)
        elif isinstance(op, transforms.OverrideRules | transforms.CreateTensors | transforms.ReadAs):
            pass  # says how the ranks hold them, or what else they are called, and changes nothing about what they are
        else:
            if packing is not None:
                why = "how engines hold stacked experts depends on their kernel"
                _refuse_packed(views, (op.part, op.whole), replace(packing, why=packing.why or why), "stacked")
            views = (_unstack_all if op.inverse else _stack_all)(views, op)
        done.append(op)
    return views


def _all_of(renames: Sequence[transforms.Rename]) -> Callable[[str], str]:
    """One function for several renamings, evaluated per template where no pattern names a number."""
    steps = [op.forward for op in renames]

    def forward(name: str) -> str:
        for step in steps:
            name = step(name)
        return name

    if not all(op.by_template for op in renames):
        return forward
    cached = Renamer(forward)
    return lambda name: cached(name) or name


def _tie(views: TensorTable, op: transforms.Tie, family: Family) -> TensorTable:
    owner = views.table.get(op.owner)
    if not family.tied or owner is None:
        return views
    if op.inverse:
        return _drop_copy(views, op)
    copy = views.table.get(op.name)
    if copy is not None:
        views.tied.append((copy, owner))
    else:
        views.notes.append(f"`{op.name}` is written as a copy of `{op.owner}`, to which the config ties it")
    return replace(views, table={**views.table, op.name: owner.named(op.name)})


def _drop_copy(views: TensorTable, op: transforms.Tie | transforms.DropCopy) -> TensorTable:
    copy, owner = views.table.get(op.name), views.table.get(op.owner)
    if copy is None or owner is None:
        return views
    views.tied.append((copy, owner))
    views.notes.append(f"`{op.name}` is left out: the config ties it to `{op.owner}`")
    return replace(views, table={n: v for n, v in views.table.items() if n != op.name})


def _drop_copies(views: TensorTable, op: transforms.DropCopies, family: Family) -> TensorTable:
    table = dict(views.table)
    for pattern, of, _ in op.pairs:
        owner = table.get(of) or table.get(family.ties.get(of, ""))
        if owner is None:
            continue
        for name in [n for n in table if matches((pattern,), n)]:
            views.tied.append((table.pop(name), owner))
            views.notes.append(f"`{name}` is left out: the target uses `{owner.name}` in its place")
    return replace(views, table=table)


def _make_copies(views: TensorTable, op: transforms.DropCopies, family: Family) -> TensorTable:
    table = dict(views.table)
    for pattern, of, beside in op.pairs:
        regex = pattern_regex(beside)
        names = [expand(pattern, m.groupdict()) for n in views.table if (m := regex.match(n))]
        owner = table.get(of) or table.get(family.ties.get(of, ""))
        if owner is not None:
            table |= {n: owner.named(n) for n in names if n not in table}
    return replace(views, table=table)


def _drop_layers(views: TensorTable, op: transforms.DropLayers, family: Family) -> TensorTable:
    limit = family.size(op.size)
    if limit is None:
        raise UnknownSizeError(op.size)
    kept = {n: v for n, v in views.table.items() if not ((m := LAYER.search(n)) and int(m[1]) >= limit)}
    if dropped := [v for n, v in views.table.items() if n not in kept]:
        size = sum(v.nbytes for v in dropped)
        views.notes.append(
            f"{count(len(dropped), 'tensor')} ({short(size)}) of layers from {limit} on left out:"
            " the target has no multi-token-prediction layer"
        )
    return replace(views, table=kept)


def _drop(views: TensorTable, op: transforms.Drop) -> TensorTable:
    kept = {n: v for n, v in views.table.items() if not matches(op.patterns, n)}
    if dropped := [v for n, v in views.table.items() if n not in kept]:
        size = sum(v.nbytes for v in dropped)
        views.notes.append(
            f"{count(len(dropped), 'tensor')} ({short(size)}) left out, which the target does not store:"
            f" {dropped[0].name}" + (", ..." if len(dropped) > 1 else "")
        )
    return replace(views, table=kept)


def _reshape(views: TensorTable, op: transforms.Transpose | transforms.Squeeze) -> TensorTable:
    table: dict[str, DerivedTensor] = {}
    for name, view in views.table.items():
        if not matches(op.patterns, name):
            table[name] = view
        elif isinstance(op, transforms.Transpose):
            axes = range(len(view.shape))
            table[name] = permute(name, view, (*axes[:-2], axes[-1], axes[-2]))
        elif op.inverse:
            table[name] = stack(name, [view])
        elif view.shape[:1] == (1,):
            table[name] = unstack(name, view, 0)
        else:
            raise LayoutError(f"the first axis of `{name}` {list(view.shape)} has not one element")
    return replace(views, table=table)


def _rotate(views: TensorTable, op: transforms.RotaryPairs, axes: _Axes) -> TensorTable:
    packing = axes.packing
    patterns = [pattern for pattern, _ in op.pairs]
    for name in views.table if packing is not None else ():
        if packing is not None and (part := packing.part(name, views.table)) and matches(patterns, part.weight):
            raise replace(packing, example=name).refuse("put into the order of rotary pairs, or out of it")
    table = dict(views.table)
    rows: dict[int, str] = {}
    for pattern, size in op.pairs:
        for name in [n for n in table if matches((pattern,), n)]:
            view, heads = table[name], axes.family.size(size, axes.layer(name))
            if view.dtype not in _FLOATS:
                raise UnsupportedError(
                    f"`{name}` is {view.dtype}: rows of quantized weights are not put into another order",
                    hint="dequantize it first: ckpttool quantize SRC DST --to bf16",
                )
            if heads is None:
                raise UnknownSizeError(size, name)
            if not view.shape or view.shape[0] % (2 * heads):
                raise LayoutError(f"`{name}` {list(view.shape)} does not divide into {heads} heads of an even size")
            if len(rows := {view.shape[0] // heads: name, **rows}) > 1:
                (one, here), (other, there) = rows.items()
                raise ConflictError(
                    f"a head of `{here}` has {one} rows, and one of `{there}` has {other}",
                    hint="check num_attention_heads and num_key_value_heads in config.json",
                )
            table[name] = _paired(view, heads, apart=op.inverse)
    return replace(views, table=table)


_FLOATS = ("F64", "F32", "BF16", "F16")


def _paired(view: DerivedTensor, heads: int, *, apart: bool) -> DerivedTensor:
    """Rows of each head: those of a pair side by side, or (``apart``) the second ones behind the first ones."""
    rows = view.shape[0] // heads
    out = []
    for head in range(heads):
        one = take("", view, 0, head * rows, (head + 1) * rows)
        if apart:
            out += [deinterleave("", one, 0, rows // 2, member, 1, 2) for member in (0, 1)]
        else:
            halves = [take("", one, 0, i * rows // 2, (i + 1) * rows // 2) for i in (0, 1)]
            out.append(interleave("", halves, 0, rows // 2))
    return concat(view.name, out, 0)


def _refuse(views: TensorTable, op: transforms.Refuse, family: Family) -> None:
    for pattern, why in op.pairs:
        for name in views.table:
            if matches((pattern,), name):
                raise UnsupportedError(why, where=[f"tensor `{name}`", family.origin])


def _refuse_packed(views: TensorTable, patterns: Sequence[str], packing: Packing, what: str) -> None:
    """Raises UnsupportedError if a statement would rearrange packed integers."""
    for name in views.table:
        if packing.part(name, views.table) is not None and matches(patterns, name):
            raise replace(packing, example=name).refuse(what)


@dataclass(frozen=True, slots=True)
class _Axes:
    """What the axes of the tensors are that a fusion joins or takes apart."""

    views: TensorTable
    family: Family
    before: tuple[Transform, ...]
    """The statements that led to the names of ``views``."""
    packing: Packing | None

    def packed(self, name: str) -> PackedTensor | None:
        """What the tensor is to a packed weight. Raises UnsupportedError for weights that cannot be joined."""
        if self.packing is None:
            return None
        if self.packing.why:
            raise replace(self.packing, example=name).refuse("fused or taken apart")
        return self.packing.part(name, self.views.table)

    def output(self, name: str) -> int:
        """The output axis, from the tensor's rule."""
        ndim = len(self.views.table[name].shape)
        if self.packing is not None and self.packed(name) is not None:
            return ndim - (1 if self.packing.in_out else 2)
        place = self.family.placement(name, self.before)
        if place is None or ndim == 0:
            return 0
        rule = place.rule
        if rule.verb == "replicate":
            # Fused although every rank holds all of it: the rule does not say an axis, its orientation does.
            return ndim - 1 if rule.in_out or is_bias(name) or ndim == 1 else ndim - 2
        axis = cut_axis(rule, ndim, bias=is_bias(name))
        return ndim - 1 if axis is None else axis

    def layer(self, name: str) -> int | None:
        """The layer whose tensor it is."""
        place = self.family.placement(name, self.before)
        return place.layer if place else None

    def count(self, units: str, name: str, op: transforms.Fuse) -> CutSize | None:
        """A size that a fusion needs. Raises LayoutError when the model's config does not give it."""
        where = Rule("fused", text=f"fusion {op.name}")
        return unit_count(self.family.word(units, self.layer(name)), self.family.sizes, where)

    def grid(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(elements of the weight for each of the tensor along each axis, shape of the weight) of scale grids and
        packed weights; ((), the tensor's own shape) of others."""
        shape = self.views.table[name].shape
        part = self.packed(name)
        if self.packing is not None and part is not None:
            codes = self.views.table[part.codes].shape
            return self.packing.blocks(part, len(shape)), self.packing.base(part, name, shape, codes)
        block = _scale_block(self.views, name, self.family)
        return block, self.views.table[weight_of(name, self.views.table) or name].shape if block else shape


def _fuse(views: TensorTable, op: transforms.Fuse, axes: _Axes) -> TensorTable:
    first = pattern_regex(op.parts[0])
    others = [pattern_regex(p) for p in op.parts[1:]]
    table: dict[str, DerivedTensor] = {}
    used: set[str] = set()
    for name, view in views.table.items():
        if name in used:
            continue
        m = first.match(name)
        if not m:
            if any(r.match(name) for r in others):
                table.setdefault(name, view)  # placed now, removed when its first part turns up
            else:
                table[name] = view
            continue
        names = [expand(p, m.groupdict()) for p in op.parts]
        missing = [n for n in names if n not in views.table]
        if missing:
            raise IncompleteError(
                f"`{name}` cannot be fused ({op.name}): `{missing[0]}` is not in the checkpoint",
                hint="keep or remove all that is fused; or, where it was asked for, drop --fuse",
            )
        parts = [views.table[n] for n in names]
        whole_name = expand(op.whole, m.groupdict())
        part = axes.packed(name)
        if part is not None and part.place in (INPUTS, GLOBAL):
            fused = _one_for_all(views, parts, part, whole_name)
        else:
            fused = _joined(op, parts, whole_name, axes)
        used.update(names)
        for n in names:
            table.pop(n, None)
        table[whole_name] = fused
    return replace(views, table=table)


_APART = "write other scales (--requant channel), none (--dequant bf16), or a format that does not fuse"


def _joined(op: transforms.Fuse, parts: Sequence[DerivedTensor], whole_name: str, axes: _Axes) -> DerivedTensor:
    """The parts one after the other, or interleaved. Raises LayoutError where a scale would be for two of them."""
    first = parts[0]
    name = first.name
    block, _ = axes.grid(name)
    if not first.shape or (prod(first.shape) == 1 and not block):
        raise LayoutError(
            f"`{name}` is one scale for its whole tensor; the fused `{whole_name}` has only one for all parts",
            hint=_APART,
        )
    axis = axes.output(name)
    for n in [p.name for p in parts[:-1]] if block else ():
        rows = axes.grid(n)[1][axis]
        if block[axis] and rows % block[axis]:
            raise LayoutError(
                f"`{n}` cannot be fused into `{whole_name}`: its weight's {rows} rows end inside a scale block"
                f" of {block[axis]}",
                hint=_APART,
            )
    if not block and axes.packed(name) is None and {len(p.shape) for p in parts} == {len(first.shape)}:
        _check_lengths(op, parts, whole_name, axes, axis)
    if op.groups:
        size = axes.count(op.groups, name, op)
        if size is None or (block and block[axis] != 1):
            raise LayoutError(f"`{name}` cannot be interleaved into `{whole_name}`: one scale is for several rows")
        return interleave(whole_name, parts, axis, size.value)
    return concat(whole_name, parts, axis)


def _check_lengths(
    op: transforms.Fuse, parts: Sequence[DerivedTensor], whole_name: str, axes: _Axes, axis: int
) -> None:
    """Raises LayoutError for parts whose lengths are not as their sizes, by which all readers tell them apart."""
    layer = axes.layer(parts[0].name)
    counts = [1 if not u else int(u) if u.isdigit() else axes.family.size(u, layer) for u in op.units]
    first = parts[0]
    for part, each, units in zip(parts, counts, op.units, strict=True):
        if each and counts[0] and part.shape[axis] * counts[0] != first.shape[axis] * each:
            said = f"{counts[0]} `{op.units[0]}` and {each} `{units}`" if op.units[0] else "equal parts"
            raise LayoutError(
                f"`{first.name}` {list(first.shape)} and `{part.name}` {list(part.shape)} cannot be fused into"
                f" `{whole_name}`: they are not as long as {said}",
                hint="the sizes in config.json do not fit these tensors, and the fused one is cut by them",
            )


def _one_for_all(views: TensorTable, parts: Sequence[DerivedTensor], packed: PackedTensor, name: str) -> DerivedTensor:
    """What the fused weight has once and each of its parts had: groups of the inputs, which must be equal, or the
    shape of the uncut weight, of which engines keep the last that they meet (and look at none)."""
    if packed.place == GLOBAL:
        return parts[-1].named(name)
    first = parts[0]
    for other in parts[1:]:
        if first.same is None or other.same is None:
            raise LayoutError(f"`{first.name}` and `{other.name}` cannot be fused: each is only a part of a tensor")
        if other.same is not first.same:
            views.equal.append((first.same, other.same))
    return first.named(name)


def _scale_block(views: TensorTable, name: str, family: Family) -> tuple[int, ...]:
    """Elements per scale along each axis when ``name`` is a scale grid of its weight's rank, else ()."""
    weight = weight_of(name, views.table)
    if weight is None:
        return ()
    shape, grid = views.table[weight].shape, views.table[name].shape
    if grid == (1, 1) and family.block and all(n <= b for n, b in zip(shape, family.block, strict=True)):
        return family.block  # a grid of one block
    block = block_of(shape, grid, family.block, name=name)
    return block if block and len(block) == len(shape) else ()


def _take_apart(views: TensorTable, op: transforms.Fuse, axes: _Axes) -> TensorTable:
    regex = pattern_regex(op.whole)
    table: dict[str, DerivedTensor] = {}
    for name, view in views.table.items():
        m = regex.match(name)
        if not m:
            _put(table, view, f"fusion {op.name}")
            continue
        names = [expand(p, m.groupdict()) for p in op.parts]
        packed = axes.packed(name)
        if packed is not None and packed.place == GLOBAL:
            raise UnsupportedError(
                f"`{name}` is the shape of the fused weight: those of its parts are not in the checkpoint",
                hint="keep it fused",
            )
        if packed is not None and packed.place == INPUTS:
            for part in names:
                _put(table, view.named(part), f"fusion {op.name}")
            continue
        axis = axes.output(name)
        units = [axes.count(u, name, op) for u in op.units]
        weights = [u.value if u else 1 for u in units]
        block, whole_shape = axes.grid(name)
        n = whole_shape[axis] if whole_shape else 0
        if not n or n % sum(weights):
            raise LayoutError(
                f"`{name}` {list(view.shape)} does not divide into parts {':'.join(map(str, weights))} on axis {axis}",
                hint="the sizes in config.json do not fit this tensor, or it has one scale for all its parts",
            )
        lengths = [w * (n // sum(weights)) for w in weights]
        rows = block[axis] if block else 1
        if any(x % rows for x in lengths[:-1]):
            raise LayoutError(
                f"`{name}` cannot be taken apart: parts of {lengths} rows end inside a scale block of {rows}",
                hint="keep it fused, or dequantize first",
            )
        lengths = [-(-x // rows) for x in lengths]
        groups = 0
        if op.groups:
            size = axes.count(op.groups, name, op)
            if size is None or rows != 1:
                raise LayoutError(f"`{name}` cannot be taken apart: one scale is for rows of several parts")
            groups = size.value
            lengths = [x // groups for x in lengths]
        at = 0
        for part, length in zip(names, lengths, strict=True):
            if groups:
                got = deinterleave(part, view, axis, groups, at, length, sum(lengths))
            else:
                got = take(part, view, axis, at, at + length)
            _put(table, got, f"fusion {op.name}")
            at += length
    return replace(views, table=table)


def _stack_all(views: TensorTable, op: transforms.Stack) -> TensorTable:
    regex = pattern_regex(op.part)
    groups: dict[str, dict[int, DerivedTensor]] = {}
    table: dict[str, DerivedTensor] = {}
    for name, view in views.table.items():
        if m := regex.match(name):
            captures = m.groupdict()
            target = expand(op.whole, captures)
            if target not in groups:
                groups[target] = {}
                table[target] = view  # keeps the place of the first expert
            groups[target][int(captures["expert"])] = view
        else:
            table[name] = view
    for target, experts in groups.items():
        missing = sorted(set(range(len(experts))) - set(experts))
        if missing:
            raise IncompleteError(f"`{target}` cannot be stacked: expert {missing[0]} is not in the checkpoint")
        table[target] = stack(target, [experts[e] for e in range(len(experts))])
    return replace(views, table=table)


def _unstack_all(views: TensorTable, op: transforms.Stack) -> TensorTable:
    regex = pattern_regex(op.whole)
    table: dict[str, DerivedTensor] = {}
    for name, view in views.table.items():
        if m := regex.match(name):
            for e in range(view.shape[0]):
                part = unstack(expand(op.part, {**m.groupdict(), "expert": str(e)}), view, e)
                _put(table, part, f"naming of family (experts of {name})")
        else:
            _put(table, view, "naming of family")
    return replace(views, table=table)


# -- components


def parameters(catalog: Catalog) -> TensorTable:
    """A view for each parameter, whatever components it has: its model weight, else its adapter, master weight, ...

    The other components of a parameter follow what becomes of this view (``propagate_to_component``). The largest
    state of an optimizer stands for a parameter that has nothing else.
    """
    order = {"model": 0, "adapter": 1, "master_weights": 2, "ema": 3, "optimizer": 4}
    best: dict[str, tuple[tuple[int, int], LogicalTensor]] = {}
    for t in catalog:
        rank = (order.get(t.key.component, 5), -prod(t.shape))
        known = best.get(t.key.name)
        if known is None or rank < known[0]:
            best[t.key.name] = (rank, t)
    return TensorTable({name: DerivedTensor(name, t.dtype, t.shape, t) for name, (_, t) in best.items()})


def _is_number(t: LogicalTensor, parameter: LogicalTensor) -> bool:
    """Whether the tensor is one number about a parameter, and not its one element.

    torch keeps such numbers without axes (NAdam's ``mu_product``, ASGD's ``eta``), Paddle with one.
    """
    return prod(t.shape) == 1 and (t.shape != parameter.shape or t.key.state in SCALARS)


def propagate_to_component(
    views: TensorTable, catalog: Catalog, component: str, state: str, equal: list[EqualPair]
) -> dict[str, DerivedTensor]:
    """What becomes of one component (or state of the optimizer) when the parameters become ``views``.

    A tensor of its parameter's shape goes where the parameter's elements go. A scalar goes to every tensor that its
    parameter is in; where several are joined they must be equal, which ``equal`` collects. The result is by parameter
    name. A cast is one of weights: other components keep their precision. Raises ConflictError for other shapes,
    IncompleteError when only some of the joined parameters have it.
    """
    weights = component in ("model", "adapter")
    out: dict[str, DerivedTensor] = {}
    for view in views:
        parts = view.parts if view.same is None else ()
        sources = [view.same] if view.same is not None else list({id(p.source): p.source for p in parts}.values())
        if component == "model" and sources and all(catalog.tensors.get(Key(s.key.name)) is s for s in sources):
            out[view.name] = view  # by far the most: a weight that becomes what it is
            continue
        found = [catalog.tensors.get(Key(s.key.name, component, state)) for s in sources]
        there = [t for t in found if t is not None]
        if not there:
            continue
        if len(there) < len(sources):
            lost = sources[found.index(None)]
            raise IncompleteError(
                f"`{view.name}` is made of several tensors, and `{lost.key.name}` has no {state or component}",
                hint="keep the tensors apart (--unfuse), or omit the component with --only",
            )
        key = Key(view.name, component, state)
        if all(_is_number(t, s) for s, t in zip(sources, there, strict=True)):
            first = there[0]
            equal += [(first, t) for t in there[1:]]
            out[view.name] = DerivedTensor(str(key), first.dtype, first.shape, first)
            continue
        for s, t in zip(sources, there, strict=True):
            if s.shape != t.shape:
                raise ConflictError(
                    f"`{t.key}` is {list(t.shape)}, its parameter is {list(s.shape)}",
                    where=[catalog.place(p.stored) for p in t.pieces[:1]],
                    hint="an optimizer whose state has other shapes (Adafactor, 8 bits) cannot be carried: omit it"
                    " with --only model"
                    if component == "optimizer"
                    else None,
                )
        mine = {id(s): t for s, t in zip(sources, there, strict=True)}
        moved = tuple(p._replace(source=mine[id(p.source)]) for p in parts)
        same = there[0] if view.same is not None else None
        dtype = view.dtype if weights else there[0].dtype
        out[view.name] = DerivedTensor(str(key), dtype, view.shape, same, moved)
    return out
