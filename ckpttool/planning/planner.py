"""From views and ranks to steps: the only place where boxes become byte addresses. Pure, no I/O."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ckpttool.core import plan
from ckpttool.core.catalog import Catalog, LogicalTensor, Pad, Piece, Pieces, RankTensor
from ckpttool.core.dtypes import CASTABLE, itemsize, lookup, nbytes
from ckpttool.core.files import DataFile
from ckpttool.core.geometry import Box, contiguous_strides, whole
from ckpttool.errors import ConflictError, IncompleteError, LayoutError
from ckpttool.formats.base import FileLayout
from ckpttool.planning.relate import NONE, DerivedTensor, EqualPair, Region, Tied


def build_plan(
    catalog: Catalog,
    views: dict[str, DerivedTensor],
    ranks: Sequence[Sequence[RankTensor]],
    file_layout: FileLayout,
    *,
    carried: Sequence[tuple[str, DataFile]] = (),
    literal_files: Sequence[tuple[str, bytes]] = (),
    computed: Computed | None = None,
    linked: Collection[str] = (),
    equal: Sequence[EqualPair] = (),
    tied: Sequence[Tied] = (),
) -> plan.Plan:
    """All steps for writing ``ranks`` (what each rank stores of which view) into the files of ``file_layout``.

    ``carried`` are (name, file of the source) of companion files, ``literal_files`` (name, bytes) of generated ones.
    Carried files whose name is in ``linked`` may share their bytes with the source. A stored tensor whose file number
    is ``len(catalog.files) + k`` is a result of ``computed``. ``tied`` are pairs of which only one is written.
    Raises IncompleteError when the pieces do not cover what a rank needs, LayoutError for a cut inside a byte,
    ConflictError for tied tensors that cannot be equal.
    """
    outputs = [
        plan.Output(f.name, f.size, f.literals, checksums=f.checksums, shared=f.shared) for f in file_layout.files
    ]
    units = plan.Units()
    moves = _Moves(units)
    jobs: dict[str, _PackedUnit] = {}
    used: dict[int, LogicalTensor] = {} if computed is None else dict(computed.operands.used)
    for rank, tensors in enumerate(file_layout.ranks or ranks):
        places = file_layout.places[rank]
        for t in tensors:
            view = views[t.key]
            file, offset = places[t.slot]
            job = jobs.get(view.name)
            if job is None:
                job = jobs[view.name] = _PackedUnit(view.name)
            job.labels.append(file_layout.label(t))
            job.targets.extend((file, offset, nbytes(t.dtype, prod(t.shape), where=t.name)))
            for form, src, at, to in moves.of(view, t, used):
                job.steps.extend((form, src, at, file, offset + to))
    work = list(jobs.values())
    if computed is not None:
        work = _with_computed(work, units, computed, len(catalog.files))
    for check in (*_checks(used.values()), *_equal(equal)):
        units.append(check)
    ties = Ties(computed, len(catalog.files))
    for pair in (*tied, *(computed.operands.tied if computed is not None else ())):
        units.append(ties.check(*pair))
    jobs.clear()
    work.sort(key=lambda job: job.order(units))
    work.reverse()
    while work:  # each goes when it is packed
        job = work.pop()
        units.add(job.name, job.steps, job.labels, job.targets)
    sources = [plan.SourceFile(str(f.place), f.size, f.tag, f.encoding) for f in catalog.files]
    for name, given in carried:
        outputs.append(plan.Output(name, given.size, (), str(given.place), name in linked, given.tag))
    for name, data in literal_files:
        outputs.append(plan.Output(name, len(data), ((0, data),)))
    randomness = computed.randomness if computed is not None else None
    return plan.Plan(sources, outputs, units, list(file_layout.notes), file_layout.rank_files, randomness)


class _PackedUnit:
    """A unit in the making, packed as ``Units`` keeps it."""

    __slots__ = ("labels", "name", "steps", "targets")

    def __init__(self, name: str) -> None:
        self.name = name
        self.steps = array("q")
        self.labels: list[str] = []
        self.targets = array("q")

    def order(self, units: plan.Units) -> tuple[int, int, int]:
        """Sort key: output file, then where the bytes come from, so that sources are read forwards."""
        first = min(self.targets[:: plan.TARGET], default=0)
        if not self.steps:
            return (first, 0, 0)
        step = units.computed(self.steps[0])
        if step is not None:
            codes = _codes_of(step.operands[0])
            if isinstance(codes, plan.StoredOperand) and codes.copies:
                return (first, codes.copies[0].src.file, codes.copies[0].src.offset)
            return (first, 0, 0)
        return (first, self.steps[1], self.steps[2])


class Operands:
    """Makes operands of views, and remembers the source tensors that have something to check."""

    def __init__(self) -> None:
        self.used: dict[int, LogicalTensor] = {}
        self.tied: list[Tied] = []
        """Pairs of source tensors of which one was left out because it is tied to the other."""
        self._units = plan.Units()
        self._moves = _Moves(self._units)

    def stored(self, view: DerivedTensor, label: str) -> plan.StoredOperand:
        """All of a view, row-major. Raises LayoutError for elements smaller than a byte."""
        box = whole(view.shape)
        _item(view.dtype, view.name)
        t = RankTensor(view.name, view.dtype, view.shape, view.name, view.shape, ((box, box),))
        steps = [self._units.step(form, src, at, 0, to) for form, src, at, to in self._moves.of(view, t, self.used)]
        return plan.StoredOperand(view.dtype, view.shape, tuple([s for s in steps if isinstance(s, plan.Copy)]), label)


@dataclass(slots=True)
class Computed:
    """The tensors of a catalog that are in no file yet."""

    steps: Sequence[plan.Compute | plan.Quantize]
    operands: Operands
    randomness: plan.Randomness | None = None
    results: Sequence[tuple[int, int]] | None = None
    """(step, which of its results) of each tensor; None: tensor ``k`` is the one result of step ``k``."""


def _codes_of(operand: plan.Operand) -> plan.Operand:
    """The operand, or the codes of a quantized weight."""
    return operand.weight if isinstance(operand, plan.Scaled) else operand


def _with_computed(jobs: Sequence[_PackedUnit], units: plan.Units, computed: Computed, real: int) -> list[_PackedUnit]:
    """The same work with a Compute or Quantize in place of the copies from each computed tensor.

    Jobs that take from one computed tensor (a fused tensor that is written apart) become one, and so do all the
    tensors that one job takes from: what is worked out is worked out once.
    """
    results = computed.results
    home: dict[int, int] = {}

    def result(file: int) -> tuple[int, int]:
        return (file - real, 0) if results is None else results[file - real]

    files = ((i, file) for i, job in enumerate(jobs) for file in job.steps[1 :: plan.STEP] if file >= real)
    out = []
    for together in plan.joined(jobs, ((home.setdefault(result(file)[0], i), i) for i, file in files)):
        outputs: dict[int, dict[int, list[plan.Copy]]] = {}
        one = _PackedUnit(together[0].name)
        for job in together:
            one.labels += job.labels
            one.targets += job.targets
            for i in range(0, len(job.steps), plan.STEP):
                packed = job.steps[i : i + plan.STEP]
                if packed[1] < real:
                    one.steps += packed
                    continue
                copy = units.step(*packed)
                if isinstance(copy, plan.Copy):
                    step, which = result(copy.src.file)
                    outputs.setdefault(step, {}).setdefault(which, []).append(copy)
        made = array("q")
        for k, copies in sorted(outputs.items()):
            made.extend((units.form(_with_outputs(computed.steps[k], copies)), 0, 0, 0, 0))
        one.steps = made + one.steps
        out.append(one)
    return out


def _with_outputs(
    step: plan.Compute | plan.Quantize, copies: Mapping[int, Sequence[plan.Copy]]
) -> plan.Compute | plan.Quantize:
    if isinstance(step, plan.Compute):
        return step._replace(outputs=tuple(copies[0]))
    results = [r._replace(outputs=tuple(copies.get(i, ()))) for i, r in enumerate(step.results)]
    return step._replace(results=tuple(results))


class _Moves:
    """Works out what of a view goes where in a rank's tensor, once for all tensors that are cut alike."""

    def __init__(self, units: plan.Units) -> None:
        self._units = units
        self._whole: dict[tuple[str, int], int] = {}
        self._parts: dict[tuple[Any, ...], tuple[int, tuple[tuple[int, int, int, int], ...]]] = {}
        """Blocks by what decides them: elements and (piece, form, byte in the stored tensor, byte in the rank's)."""
        self._geometry: dict[int, tuple[LogicalTensor, int]] = {}
        """Numbers of tensors of several pieces, equal for equal geometry. The tensor is kept because ids are reused."""
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._boxes: dict[int, object] = {}
        """Those of packed pieces, which tensors share; kept for the same reason."""

    def of(
        self, view: DerivedTensor, t: RankTensor, used: dict[int, LogicalTensor]
    ) -> Iterator[tuple[int, int, int, int]]:
        """(form, source file, byte in it, byte in the rank's tensor) of each copy and fill.

        plan.Source tensors that have something to check are added to ``used``.
        """
        same, dtype = view.same, t.dtype
        if same is not None and len(same.pieces) == 1 and len(t.boxes) == 1 and t.shape == view.shape:
            stored = same.pieces[0].stored
            if stored.dtype == dtype and stored.shape == view.shape and stored.strides is None:
                # A whole tensor that stays whole: one run of bytes, also for elements smaller than a byte.
                _note_used(used, same)
                if stored.nbytes:
                    yield self._run(dtype, stored.nbytes), stored.file, stored.offset, 0
                return
        need = sum([outer.volume for _, outer in t.boxes])
        for part in view.parts_in(t.boxes):
            found, copies = self._of_part(part, t)
            if found:
                _note_used(used, part.source)
                need -= found
            for piece, form, at, to in copies:
                stored = part.source.pieces[piece].stored
                yield form, stored.file, stored.offset + at, to
        if need:
            raise IncompleteError(
                f"{need:,} elements of `{view.name}` {list(view.shape)} come from nowhere",
                hint="this is a fault of the family file's fusions or namings: its sizes do not add up",
            )
        strides = contiguous_strides(t.shape) if t.pads else ()
        for pad in t.pads:
            if pad.volume:
                item = _item(dtype, view.name)
                shape, (steps,) = plan.merged_axes(pad.shape, [s * item for s in strides])
                yield self._units.form(plan.Fill(plan.Block(0, 0, steps), shape, dtype)), 0, 0, _at(pad, strides) * item

    def _run(self, dtype: str, size: int) -> int:
        """The form of a run of bytes that keeps its dtype."""
        form = self._whole.get((dtype, size))
        if form is None:
            unit, kind = (1, "U8") if lookup(dtype).bits % 8 else (itemsize(dtype), dtype)
            block = plan.Block(0, 0, (unit,))
            form = self._whole[dtype, size] = self._units.form(plan.Copy(block, block, (size // unit,), kind, kind))
        return form

    def _of_part(self, part: Region, t: RankTensor) -> tuple[int, tuple[tuple[int, int, int, int], ...]]:
        size, first, step, source, *walk = part
        key = (self._geometry_of(source), size, first, step, *walk, t.boxes, t.shape, t.dtype)
        known = self._parts.get(key)
        if known is None:
            known = self._parts[key] = self._clipped(part, t)
        return known

    def _geometry_of(self, tensor: LogicalTensor) -> object:
        """Equal for tensors whose pieces lie in them, and in what is stored, in the same way."""
        pieces = tensor.pieces
        if len(pieces) == 1:
            ((stored, local, box),) = pieces
            return (local, box, stored.dtype, stored.shape, stored.strides)
        if isinstance(pieces, Pieces):
            self._boxes[id(pieces.boxes)] = pieces.boxes
            return (id(pieces.boxes), pieces.like.dtype)
        known = self._geometry.get(id(tensor))
        if known is None:
            all_of = tuple(
                [(p.stored_box, p.logical_box, p.stored.dtype, p.stored.shape, p.stored.strides) for p in pieces]
            )
            known = self._geometry[id(tensor)] = (tensor, self._numbers.setdefault(all_of, len(self._numbers)))
        return known[1]

    def _clipped(self, part: Region, t: RankTensor) -> tuple[int, tuple[tuple[int, int, int, int], ...]]:
        strides, item = contiguous_strides(t.shape), _item(t.dtype, t.key)
        found, copies = 0, []
        for inner, outer in t.boxes:
            for i, piece, c in part.pieces_in(outer):
                found += prod(c.size)
                form, at, to = _copy(c, piece, inner, outer, strides, item, t.dtype)
                copies.append((i, self._units.form(form), at, to))
        return found, tuple(copies)


def _note_used(used: dict[int, LogicalTensor], tensor: LogicalTensor) -> None:
    """Remember a source tensor that has something to check."""
    if tensor.replicas or tensor.pads:
        used[id(tensor)] = tensor


def _item(dtype: str, name: str) -> int:
    if lookup(dtype).bits % 8:
        raise LayoutError(
            f"tensor `{name}` is {dtype}: its elements share bytes, so it cannot be cut or fused",
            hint=f"keep it whole: --split '{name}=none'",
        )
    return itemsize(dtype)


def _copy(
    c: Region, piece: Piece, inner: Box, outer: Box, out_strides: Sequence[int], out_item: int, dtype: str
) -> tuple[plan.Copy, int, int]:
    """The form of a copy, the byte in the stored tensor and the byte in the rank's tensor at which it begins."""
    start, src_strides = _source_block(c, piece)
    dst = sum(
        (at - box + local) * s for at, box, local, s in zip(c.first, outer.start, inner.start, out_strides, strict=True)
    )
    dst_strides = [step * s * out_item for step, s in zip(c.step, out_strides, strict=True)]
    shape, (a, b) = plan.merged_axes(c.size, src_strides, dst_strides)
    if not shape:
        shape, a, b = (1,), (_item(piece.stored.dtype, piece.stored.name),), (out_item,)
    return plan.Copy(plan.Block(0, 0, a), plan.Block(0, 0, b), shape, piece.stored.dtype, dtype), start, dst * out_item


def _source_block(c: Region, piece: Piece) -> tuple[int, list[int]]:
    """The byte of the stored tensor at which a part of a view begins, and bytes per step along each axis of it."""
    item, strides = _item(piece.stored.dtype, piece.stored.name), piece.stored.element_strides
    start = sum(
        (at - box + local) * s
        for at, box, local, s in zip(c.origin, piece.logical_box.start, piece.stored_box.start, strides, strict=True)
    )
    return start * item, [
        0 if axis == NONE else by * strides[axis] * item for axis, by in zip(c.axes, c.stride, strict=True)
    ]


def _checks(tensors: Iterable[LogicalTensor]) -> list[plan.Unit]:
    """Replicas must agree and padding must be padding, or the source contradicts itself."""
    units = []
    for tensor in tensors:
        pads = [p for p in tensor.pads if p.stored_box.volume and not p.free]
        if not tensor.replicas and not pads:
            continue
        primary = {p.logical_box: p for p in tensor.pieces}
        steps: list[plan.Step] = []
        for other in tensor.replicas:
            if (mine := primary.get(other.logical_box)) is not None:
                steps.append(_same(tensor, mine, other))
                continue
            # Replicas that are cut in other places (flat shards of ranks that hold the same) overlap several pieces.
            for _, piece in tensor.near(other.logical_box):
                if (common := piece.logical_box.intersect(other.logical_box)) is not None:
                    steps.append(_same(tensor, _clipped(piece, common), _clipped(other, common)))
        steps += [_padding(tensor, pad) for pad in pads]
        units.append(plan.Unit(f"check {tensor.key}", tuple(steps)))
    return units


def _clipped(piece: Piece, box: Box) -> Piece:
    """The part of a piece that is ``box`` of the logical tensor."""
    by = [b - a for a, b in zip(piece.logical_box.start, piece.stored_box.start, strict=True)]
    return Piece(piece.stored, box.shift(by), box)


def _equal(pairs: Iterable[EqualPair]) -> list[plan.Unit]:
    """Tensors of which only one is written must hold the same: where dtypes differ, the second one rounded."""
    units = []
    for a, b in pairs:
        steps: list[plan.Step] = []
        for one in a.pieces:
            for _, other in b.near(one.logical_box):
                common = one.logical_box.intersect(other.logical_box) if one.logical_box.start else one.logical_box
                if common is None:
                    continue
                mine, its = _clipped(one, common), _clipped(other, common)
                if (mine.stored.file, mine.stored.offset) == (its.stored.file, its.stored.offset):
                    continue  # derived from it
                steps.append(_same(a, mine, its))
        if steps:
            units.append(plan.Unit(f"check {a.key}", tuple(steps)))
    return units


class Ties:
    """Checks that tied tensors hold the same: those in files element by element, computed ones by their operands."""

    def __init__(self, computed: Computed | None, real: int) -> None:
        self._computed = computed
        self._real = real

    def check(self, copy: DerivedTensor, owner: DerivedTensor) -> plan.Unit:
        """The unit that compares a pair. Raises ConflictError when it cannot be equal."""
        return plan.Unit(f"check {copy.name} = {owner.name}", tuple(self.steps(copy, owner)))

    def steps(self, copy: DerivedTensor, owner: DerivedTensor) -> Iterator[plan.AssertEqual]:
        """The comparisons of a pair. Raises ConflictError when it cannot be equal."""
        if copy.shape != owner.shape:
            raise self._differ(copy, owner, f"are {list(copy.shape)} and {list(owner.shape)}")
        return (self._stored if self._is_stored(copy) and self._is_stored(owner) else self._worked_out)(copy, owner)

    def _is_stored(self, view: DerivedTensor) -> bool:
        return all(piece.stored.file < self._real for part in view.parts for piece in part.source.pieces)

    def _stored(self, copy: DerivedTensor, owner: DerivedTensor) -> Iterator[plan.AssertEqual]:
        narrow, wide = sorted((owner, copy), key=lambda view: lookup(view.dtype).bits)
        if narrow.dtype != wide.dtype and not (
            {narrow.dtype, wide.dtype} <= CASTABLE and lookup(narrow.dtype).bits < lookup(wide.dtype).bits
        ):
            raise self._differ(copy, owner, f"are {copy.dtype} and {owner.dtype}")
        compared = 0
        for a, one, b, other in _common_parts(wide, narrow):
            compared += prod(a.size)
            at, strides = _source_block(a, one)
            its, its_strides = _source_block(b, other)
            shape, (x, y) = plan.merged_axes(a.size, strides, its_strides)
            if not shape:
                shape, x, y = (1,), (itemsize(wide.dtype),), (itemsize(narrow.dtype),)
            yield plan.AssertEqual(
                plan.Block(one.stored.file, one.stored.offset + at, x),
                plan.Block(other.stored.file, other.stored.offset + its, y),
                shape,
                one.stored.dtype,
                wide.name,
                "" if one.stored.dtype == other.stored.dtype else other.stored.dtype,
                narrow.name,
            )
        if compared != prod(copy.shape):
            raise self._differ(copy, owner, "are cut so that they cannot be compared")

    def _worked_out(self, copy: DerivedTensor, owner: DerivedTensor) -> Iterator[plan.AssertEqual]:
        one, other = (self._step_of(view) for view in (copy, owner))
        if one is None or other is None or _recipe_of(one) != _recipe_of(other):
            raise self._differ(copy, owner, "are worked out in different ways")
        for a, b in zip(one.operands, other.operands, strict=True):
            for mine, its in self._operands(copy, owner, a, b):
                for c, d in zip(mine.copies, its.copies, strict=True):
                    yield plan.AssertEqual(c.src, d.src, c.shape, c.src_dtype, copy.name, "", owner.name)

    def _step_of(self, view: DerivedTensor) -> plan.Compute | None:
        """The step that makes all of a view, and nothing else."""
        files = {piece.stored.file for part in view.parts for piece in part.source.pieces}
        if self._computed is None or len(files) != 1 or min(files) < self._real:
            return None
        results, at = self._computed.results, min(files) - self._real
        step = self._computed.steps[at if results is None else results[at][0]]
        return step if isinstance(step, plan.Compute) else None

    def _operands(
        self, copy: DerivedTensor, owner: DerivedTensor, a: plan.Operand, b: plan.Operand
    ) -> Iterator[tuple[plan.StoredOperand, plan.StoredOperand]]:
        """What must hold the same so that two operands do."""
        if isinstance(a, plan.StoredOperand) and isinstance(b, plan.StoredOperand):
            if [c[1:] for c in a.copies] == [c[1:] for c in b.copies]:
                yield a, b
                return
        elif isinstance(a, plan.Gathered) and isinstance(b, plan.Gathered):
            if (a.shape, a.runs, a.means) == (b.shape, b.runs, b.means):
                for mine, its in zip(a.sources, b.sources, strict=True):
                    yield from self._operands(copy, owner, mine, its)
                return
        elif isinstance(a, plan.Scaled) and isinstance(b, plan.Scaled):
            parts, its_parts = ([p for p in (x.weight, x.scale, x.factor) if p is not None] for x in (a, b))
            if (a.block, a.code, a.divides, len(parts)) == (b.block, b.code, b.divides, len(its_parts)):
                for part, its_part in zip(parts, its_parts, strict=True):
                    yield from self._operands(copy, owner, part, its_part)
                return
        raise self._differ(copy, owner, "are worked out in different ways")

    @staticmethod
    def _differ(copy: DerivedTensor, owner: DerivedTensor, how: str) -> ConflictError:
        return ConflictError(
            f"`{copy.name}` and `{owner.name}`, which the config ties to each other, {how}", hint=plan.TIED_HINT
        )


def _recipe_of(step: plan.Compute) -> tuple[object, ...]:
    """All that decides the result but the operands."""
    return (step.shape, step.dtype, step.method, step.parameters, step.whole, step.base_at, step.base is None)


def _common_parts(a: DerivedTensor, b: DerivedTensor) -> Iterator[tuple[Region, Piece, Region, Piece]]:
    """The boxes of two views of one shape that lie in one piece on either side; steps between elements are 1."""
    for part in a.parts:
        for _, piece, mine in part.pieces_in(whole(a.shape)):
            for other in b.parts:
                for _, its_piece, both in other.pieces_in(_box_of(mine)):
                    if (same := mine.clip(_box_of(both))) is not None:
                        yield same, piece, both, its_piece


def _box_of(part: Region) -> Box:
    return Box(part.first, tuple([f + n for f, n in zip(part.first, part.size, strict=True)]))


def _same(tensor: LogicalTensor, mine: Piece, other: Piece) -> plan.AssertEqual:
    """Two pieces that hold the same box."""
    a, b, what = mine.stored, other.stored, str(tensor.key)
    if lookup(a.dtype).bits % 8 and mine.stored_box == whole(a.shape) and other.stored_box == whole(b.shape):
        # Elements that share bytes are never cut, so these are copies of the whole.
        return plan.AssertEqual(
            plan.Block(a.file, a.offset, (1,)), plan.Block(b.file, b.offset, (1,)), (a.nbytes,), "U8", what
        )
    sa = [s * _item(a.dtype, what) for s in a.element_strides]
    sb = [s * _item(b.dtype, what) for s in b.element_strides]
    shape, (x, y) = plan.merged_axes(other.logical_box.shape, sa, sb)
    if not shape:
        shape, x, y = (1,), (_item(a.dtype, what),), (_item(b.dtype, what),)
    return plan.AssertEqual(
        plan.Block(a.file, a.offset + _at(mine.stored_box, sa), x),
        plan.Block(b.file, b.offset + _at(other.stored_box, sb), y),
        shape,
        a.dtype,
        what,
        "" if a.dtype == b.dtype else b.dtype,
    )


def _at(box: Box, strides: Sequence[int]) -> int:
    return sum(a * s for a, s in zip(box.start, strides, strict=True))


def _padding(tensor: LogicalTensor, pad: Pad) -> plan.AssertPadding:
    """Zeros or copies of the last true row, which may be in another rank's file."""
    item = _item(pad.stored.dtype, str(tensor.key))
    strides = [s * item for s in pad.stored.element_strides]
    rows, inner = pad.stored_box.shape[0], pad.stored_box.shape[1:]
    shape, (tail,) = plan.merged_axes(inner, strides[1:])
    like = None
    ends = [p for p in tensor.pieces if p.logical_box.stop and p.logical_box.stop[0] == tensor.shape[0]]
    if len(ends) == 1 and ends[0].logical_box.shape[1:] == inner and len(pad.stored_box.shape) > 1:
        p = ends[0]
        last = [s * item for s in p.stored.element_strides]
        row = Box((p.stored_box.stop[0] - 1, *p.stored_box.start[1:]), p.stored_box.stop)
        _, (like_strides,) = plan.merged_axes(inner, last[1:])
        like = plan.Block(p.stored.file, p.stored.offset + _at(row, last), like_strides)
    return plan.AssertPadding(
        plan.Block(pad.stored.file, pad.stored.offset + _at(pad.stored_box, strides), (strides[0], *tail)),
        (rows, *shape),
        pad.stored.dtype,
        like,
        str(tensor.key),
    )
