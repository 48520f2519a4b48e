"""From views and ranks to steps: the only place where boxes become byte addresses. Pure, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ckpttool.catalog import Catalog, LogicalTensor, Pad, Piece, RankTensor, StoredTensor
from ckpttool.dtypes import CASTABLE, itemsize, lookup, nbytes
from ckpttool.errors import IncompleteError, LayoutError
from ckpttool.formats.base import Skeleton
from ckpttool.geometry import Box, contiguous_strides, whole
from ckpttool.layout.scales import is_beside, weight_of
from ckpttool.plan import (
    Block,
    Compute,
    Copy,
    Fill,
    Operand,
    Output,
    Padding,
    Plan,
    Quantize,
    Randomness,
    Same,
    Scaled,
    Source,
    Step,
    Stored,
    Target,
    Unit,
    merged_axes,
)
from ckpttool.relate import NONE, Equal, Part, View


def caster(names: Collection[str], wanted: str) -> Callable[[str, str], str]:
    """(name, dtype) -> the dtype that ``--dtype`` makes of it.

    Floats of 16 bits and more are cast. Scales are not: their weights were rounded with just these values.
    """

    def cast(name: str, dtype: str) -> str:
        if not wanted or dtype not in CASTABLE or weight_of(name, names) is not None or is_beside(name):
            return dtype
        return wanted

    return cast


def build_plan(
    catalog: Catalog,
    views: dict[str, View],
    ranks: Sequence[Sequence[RankTensor]],
    skeleton: Skeleton,
    *,
    carried: Sequence[tuple[str, str, int]] = (),
    literal_files: Sequence[tuple[str, bytes]] = (),
    check_replicas: bool = True,
    computed: Computed | None = None,
    linked: Collection[str] = (),
    equal: Sequence[Equal] = (),
) -> Plan:
    """All steps for writing ``ranks`` (what each rank stores of which view) into the files of ``skeleton``.

    ``carried`` are (source path, name, bytes) of companion files, ``literal_files`` (name, bytes) of generated ones.
    Carried files whose name is in ``linked`` may share their bytes with the source. A stored tensor whose file number
    is ``len(catalog.files) + k`` is a result of ``computed``.
    Raises IncompleteError when the pieces do not cover what a rank needs, LayoutError for a cut inside a byte.
    """
    outputs = [Output(f.name, f.size, f.literals) for f in skeleton.files]
    steps: dict[str, list[Step]] = {}
    targets: dict[str, list[Target]] = {}
    used: dict[int, LogicalTensor] = {} if computed is None else dict(computed.operands.used)
    for rank, tensors in enumerate(skeleton.ranks or ranks):
        places = skeleton.places[rank]
        for t in tensors:
            view = views[t.key]
            file, offset = places[t.slot]
            todo = steps.setdefault(view.name, [])
            size = nbytes(t.dtype, prod(t.shape), where=t.name)
            label = t.name + (f"/{t.state}" if t.state else "") + (f"#{t.part}" if t.part else "")
            targets.setdefault(view.name, []).append(Target(label, file, offset, size))
            _rank_steps(todo, view, t, file, offset, used)
    units = [Unit(name, tuple(todo), tuple(targets[name])) for name, todo in steps.items() if todo or targets[name]]
    if computed is not None:
        units = _with_computed(units, computed, len(catalog.files))
    units.sort(key=_order)
    if check_replicas:
        units = _checks(used.values()) + _equal(equal) + units
    sources = [Source(str(f.path), f.size, f.mtime_ns, f.label) for f in catalog.files]
    for path, name, size in carried:
        outputs.append(Output(name, size, (), path, name in linked))
    for name, data in literal_files:
        outputs.append(Output(name, len(data), ((0, data),)))
    randomness = computed.randomness if computed is not None else None
    return Plan(sources, outputs, units, list(skeleton.notes), skeleton.rank_files, randomness)


def _order(unit: Unit) -> tuple[int, int, int]:
    """By output file, then by where the bytes come from, so that sources are read forwards."""
    first = min((t.file for t in unit.targets), default=0)
    for s in unit.steps:
        if isinstance(s, Copy):
            return (first, s.src.file, s.src.offset)
        if isinstance(s, Compute | Quantize) and isinstance(o := _codes_of(s.operands[0]), Stored) and o.copies:
            return (first, o.copies[0].src.file, o.copies[0].src.offset)
    return (first, 0, 0)


class Operands:
    """Makes operands of views, and remembers the source tensors that have something to check."""

    def __init__(self) -> None:
        self.used: dict[int, LogicalTensor] = {}

    def stored(self, view: View, label: str) -> Stored:
        """All of a view, row-major. Raises LayoutError for elements smaller than a byte."""
        box = whole(view.shape)
        steps: list[Step] = []
        _item(view.dtype, view.name)
        t = RankTensor(view.name, view.dtype, view.shape, view.name, view.shape, ((box, box),))
        _rank_steps(steps, view, t, 0, 0, self.used)
        return Stored(view.dtype, view.shape, tuple([s for s in steps if isinstance(s, Copy)]), label)


@dataclass(slots=True)
class Computed:
    """The tensors of a catalog that are in no file yet."""

    steps: Sequence[Compute | Quantize]
    operands: Operands
    randomness: Randomness | None = None
    results: Sequence[tuple[int, int]] | None = None
    """(step, which of its results) of each tensor; None: tensor ``k`` is the one result of step ``k``."""


def _codes_of(operand: Operand) -> Operand:
    """The operand, or the codes of a quantised weight."""
    return operand.weight if isinstance(operand, Scaled) else operand


def _with_computed(units: Sequence[Unit], computed: Computed, real: int) -> list[Unit]:
    """The same work with a Compute or Quantize in place of the copies from each computed tensor.

    Units that take from one computed tensor (a fused tensor that is written apart) become one, and so do all the
    tensors that one unit takes from: what is worked out is worked out once.
    """
    results = computed.results
    home: dict[int, int] = {}
    group = list(range(len(units)))

    def result(copy: Copy) -> tuple[int, int]:
        slot = copy.src.file - real
        return (slot, 0) if results is None else results[slot]

    def root(i: int) -> int:
        while group[i] != i:
            group[i] = group[group[i]]
            i = group[i]
        return i

    for i, unit in enumerate(units):
        for s in unit.steps:
            if isinstance(s, Copy) and s.src.file >= real:
                group[root(i)] = root(home.setdefault(result(s)[0], i))
    members: dict[int, list[Unit]] = {}
    for i, unit in enumerate(units):
        members.setdefault(root(i), []).append(unit)
    out = []
    for joined in members.values():
        outputs: dict[int, dict[int, list[Copy]]] = {}
        steps: list[Step] = []
        for unit in joined:
            for s in unit.steps:
                if isinstance(s, Copy) and s.src.file >= real:
                    step, which = result(s)
                    outputs.setdefault(step, {}).setdefault(which, []).append(s)
                else:
                    steps.append(s)
        made = [_with_outputs(computed.steps[k], copies) for k, copies in sorted(outputs.items())]
        targets = tuple([t for unit in joined for t in unit.targets])
        out.append(Unit(joined[0].name, (*made, *steps), targets))
    return out


def _with_outputs(step: Compute | Quantize, copies: Mapping[int, Sequence[Copy]]) -> Compute | Quantize:
    if isinstance(step, Compute):
        return step._replace(outputs=tuple(copies[0]))
    results = [r._replace(outputs=tuple(copies.get(i, ()))) for i, r in enumerate(step.results)]
    return step._replace(results=tuple(results))


def _rank_steps(
    todo: list[Step],
    view: View,
    t: RankTensor,
    file: int,
    offset: int,
    used: dict[int, LogicalTensor],
) -> None:
    same, dtype = view.same, t.dtype
    if (
        same is not None
        and len(same.pieces) == 1
        and len(t.boxes) == 1
        and t.shape == view.shape
        and same.pieces[0].stored.shape == view.shape
        and same.pieces[0].stored.strides is None
    ):
        # A whole tensor that stays whole: one run of bytes, also for elements smaller than a byte.
        stored = same.pieces[0].stored
        _note_used(used, same)
        if stored.dtype == dtype:
            count, unit, kind = stored.nbytes, 1, "U8"
            if not lookup(dtype).bits % 8:
                unit, kind = itemsize(dtype), dtype
                count //= unit
            if count:
                todo.append(
                    Copy(Block(stored.file, stored.offset, (unit,)), Block(file, offset, (unit,)), (count,), kind, kind)
                )
            return
    out_strides = contiguous_strides(t.shape)
    out_item = _item(dtype, view.name)
    for inner, outer in t.boxes:
        need = outer.volume
        if not need:
            continue
        for part in view.parts:
            clipped = part if outer == whole(view.shape) else part.clip(outer)
            if clipped is None:
                continue
            _note_used(used, part.source)
            for piece in part.source.pieces:
                c = clipped.clip_source(piece.box)
                if c is None:
                    continue
                need -= prod(c.size)
                todo.append(_copy(c, piece, inner, outer, out_strides, out_item, file, offset, dtype))
        if need:
            raise IncompleteError(
                f"{need:,} elements of `{view.name}` {list(view.shape)} come from nowhere",
                hint="this is a fault of the family file's fusions or namings: its sizes do not add up",
            )
    for pad in t.pads:
        if pad.volume:
            at = offset + sum(a * s for a, s in zip(pad.start, out_strides, strict=True)) * out_item
            shape, (strides,) = merged_axes(pad.shape, [s * out_item for s in out_strides])
            todo.append(Fill(Block(file, at, strides), shape, dtype))


def _note_used(used: dict[int, LogicalTensor], tensor: LogicalTensor) -> None:
    """Remember a source tensor that has something to check."""
    if tensor.replicas or tensor.pads:
        used[id(tensor)] = tensor


def _item(dtype: str, name: str) -> int:
    if lookup(dtype).bits % 8:
        raise LayoutError(
            f"tensor `{name}` is {dtype}: its elements share bytes, so it cannot be cut or fused",
            hint="keep it whole: --replicate",
        )
    return itemsize(dtype)


def _copy(
    c: Part,
    piece: Piece,
    inner: Box,
    outer: Box,
    out_strides: Sequence[int],
    out_item: int,
    file: int,
    offset: int,
    dtype: str,
) -> Copy:
    stored = piece.stored
    item = _item(stored.dtype, stored.name)
    strides = stored.element_strides
    start = sum(
        (at - box + local) * s
        for at, box, local, s in zip(c.origin, piece.box.start, piece.local.start, strides, strict=True)
    )
    src_strides = [0 if axis == NONE else by * strides[axis] * item for axis, by in zip(c.axes, c.stride, strict=True)]
    dst = sum(
        (at - box + local) * s for at, box, local, s in zip(c.first, outer.start, inner.start, out_strides, strict=True)
    )
    dst_strides = [step * s * out_item for step, s in zip(c.step, out_strides, strict=True)]
    shape, (a, b) = merged_axes(c.size, src_strides, dst_strides)
    if not shape:
        shape, a, b = (1,), (item,), (out_item,)
    return Copy(
        Block(stored.file, stored.offset + start * item, a),
        Block(file, offset + dst * out_item, b),
        shape,
        stored.dtype,
        dtype,
    )


def block_of(stored: StoredTensor, box: Box) -> tuple[Block, tuple[int, ...]]:
    """The block of a box of a stored tensor, and its shape with contiguous axes joined."""
    item = _item(stored.dtype, stored.name)
    strides = stored.element_strides
    at = stored.offset + sum(a * s for a, s in zip(box.start, strides, strict=True)) * item
    shape, (out,) = merged_axes(box.shape, [s * item for s in strides])
    if not shape:
        shape, out = (1,), (item,)
    return Block(stored.file, at, out), shape


def _checks(tensors: Iterable[LogicalTensor]) -> list[Unit]:
    """Replicas must agree and padding must be padding, or the source contradicts itself."""
    units = []
    for tensor in tensors:
        if not tensor.replicas and not tensor.pads:
            continue
        primary = {p.box: p for p in tensor.pieces}
        steps: list[Step] = []
        for other in tensor.replicas:
            if (mine := primary.get(other.box)) is not None:
                steps.append(_same(tensor, mine, other))
                continue
            # Replicas that are cut in other places (flat shards of ranks that hold the same) overlap several pieces.
            for piece in tensor.pieces:
                if (common := piece.box.intersect(other.box)) is not None:
                    steps.append(_same(tensor, _clipped(piece, common), _clipped(other, common)))
        steps += [_padding(tensor, pad) for pad in tensor.pads if pad.local.volume]
        units.append(Unit(f"check {tensor.key}", tuple(steps)))
    return units


def _clipped(piece: Piece, box: Box) -> Piece:
    """The part of a piece that is ``box`` of the logical tensor."""
    by = [b - a for a, b in zip(piece.box.start, piece.local.start, strict=True)]
    return Piece(piece.stored, box.shift(by), box)


def _equal(pairs: Iterable[Equal]) -> list[Unit]:
    """Tensors of which only one is written must hold the same: where dtypes differ, the second one rounded."""
    units = []
    for a, b in pairs:
        steps: list[Step] = []
        for one in a.pieces:
            for other in b.pieces:
                common = one.box.intersect(other.box) if one.box.start else one.box
                if common is None:
                    continue
                mine, its = _clipped(one, common), _clipped(other, common)
                if (mine.stored.file, mine.stored.offset) == (its.stored.file, its.stored.offset):
                    continue  # derived from it
                steps.append(_same(a, mine, its))
        if steps:
            units.append(Unit(f"check {a.key}", tuple(steps)))
    return units


def _same(tensor: LogicalTensor, mine: Piece, other: Piece) -> Same:
    """Two pieces that hold the same box."""
    a, b, what = mine.stored, other.stored, str(tensor.key)
    if lookup(a.dtype).bits % 8 and mine.local == whole(a.shape) and other.local == whole(b.shape):
        # Elements that share bytes are never cut, so these are copies of the whole.
        return Same(Block(a.file, a.offset, (1,)), Block(b.file, b.offset, (1,)), (a.nbytes,), "U8", what)
    sa = [s * _item(a.dtype, what) for s in a.element_strides]
    sb = [s * _item(b.dtype, what) for s in b.element_strides]
    shape, (x, y) = merged_axes(other.box.shape, sa, sb)
    if not shape:
        shape, x, y = (1,), (_item(a.dtype, what),), (_item(b.dtype, what),)
    return Same(
        Block(a.file, a.offset + _at(mine.local, sa), x),
        Block(b.file, b.offset + _at(other.local, sb), y),
        shape,
        a.dtype,
        what,
        "" if a.dtype == b.dtype else b.dtype,
    )


def _at(box: Box, strides: Sequence[int]) -> int:
    return sum(a * s for a, s in zip(box.start, strides, strict=True))


def _padding(tensor: LogicalTensor, pad: Pad) -> Padding:
    """Zeros or copies of the last true row, which may be in another rank's file."""
    item = _item(pad.stored.dtype, str(tensor.key))
    strides = [s * item for s in pad.stored.element_strides]
    rows, inner = pad.local.shape[0], pad.local.shape[1:]
    shape, (tail,) = merged_axes(inner, strides[1:])
    like = None
    ends = [p for p in tensor.pieces if p.box.stop and p.box.stop[0] == tensor.shape[0]]
    if len(ends) == 1 and ends[0].box.shape[1:] == inner and len(pad.local.shape) > 1:
        p = ends[0]
        last = [s * item for s in p.stored.element_strides]
        row = Box((p.local.stop[0] - 1, *p.local.start[1:]), p.local.stop)
        _, (like_strides,) = merged_axes(inner, last[1:])
        like = Block(p.stored.file, p.stored.offset + _at(row, last), like_strides)
    return Padding(
        Block(pad.stored.file, pad.stored.offset + _at(pad.local, strides), (strides[0], *tail)),
        (rows, *shape),
        pad.stored.dtype,
        like,
        str(tensor.key),
    )
