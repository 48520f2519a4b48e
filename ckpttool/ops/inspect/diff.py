"""Two checkpoints, compared tensor by tensor whatever their sharding and dialect.

Where the namings differ, both are brought to Hugging Face names by the relations of their families; what cannot be
brought there (a layer that one format leaves out) is a difference.

Components that both sides have are compared; those that only one side has are listed and do not count as a difference,
because formats differ in what they hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import isnan, prod
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.checkpoint import Checkpoint, refuse_empty
from ckpttool.core.catalog import Catalog, Key, in_order
from ckpttool.core.dtypes import itemsize, lookup
from ckpttool.core.files import AnyPlace, DataFile, Place
from ckpttool.core.geometry import Box
from ckpttool.core.words import count
from ckpttool.errors import CkptError, LayoutError, UnsupportedError, UsageError
from ckpttool.execute import Progress
from ckpttool.execute.compare import BLOCK, Difference, catalog_of, read_view, view_reads
from ckpttool.execute.machines.each import each
from ckpttool.execute.reader import Reads, blocks
from ckpttool.formats.base import OpenOptions
from ckpttool.kernels.stats import Array, Distance, differs, differs_in_bits, first_index
from ckpttool.layout.statements import inverse
from ckpttool.ops.inspect.drift import Apart, Drift, drift, layer_of, place
from ckpttool.ops.inspect.listing import check_components, wanted_names
from ckpttool.ops.inspect.source import join, read
from ckpttool.planning.relate import (
    DerivedTensor,
    TensorTable,
    apply_transforms,
    identity,
    parameters,
    propagate_to_component,
)
from ckpttool.storage.place import parse_place
from ckpttool.storage.travel import SentFiles

if TYPE_CHECKING:
    from ckpttool.execute.fleets.base import Fleet


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Elements are equal when |left - right| <= atol + rtol * |right|."""

    atol: float = 0.0
    rtol: float = 0.0


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A tensor whose dtype or shape differs."""

    name: str
    left: str
    right: str


@dataclass(frozen=True, slots=True)
class Changed(Difference):
    """A tensor whose values differ, and how far as a whole."""

    relative: float | None = None
    """Norm of the difference by the norm of the right side; None for elements smaller than a byte."""
    cosine: float | None = None
    """Of the angle between both sides; None where one is all zeros, and for elements smaller than a byte."""
    gap2: float | None = None
    """Square of the norm of the difference; None for elements smaller than a byte."""
    norm2: float | None = None
    """Square of the norm of the right side; None for elements smaller than a byte."""


class Squares(NamedTuple):
    """Squared norms of a tensor's two sides."""

    gap2: float
    """Of the difference; within a tolerance it may be more than 0."""
    norm2: float
    """Of the right side."""


class DiffVerdict(NamedTuple):
    """The verdict of a comparison in words. Only what was read is called equal."""

    word: str
    """different, equal, no difference (of what could be compared), or same headers (values were not compared)."""
    counts: str
    """How many tensors were compared, changed, and are on one side only."""
    how: str
    """What of them was compared."""
    omitted: list[str]
    """Components that were not compared, in sentences."""

    def __str__(self) -> str:
        """``different: 1 of 39 tensors changed (names, dtypes, shapes, values compared)``."""
        return f"{self.word}: {self.counts} ({self.how})"

    def naming(self, other: str) -> str:
        """The same with the name of the other side: ``Different from base: 1 of ...``."""
        preposition = {"equal": "to", "same headers": "as"}.get(self.word, "from")
        return f"{self.word.capitalize()} {preposition} {other}: {self.counts} ({self.how})"


@dataclass(slots=True)
class DiffResult:
    """How two checkpoints differ."""

    left: Checkpoint
    right: Checkpoint
    renamed: bool
    """Both sides were brought to Hugging Face names."""
    compared: int = 0
    """Tensors of equal name."""
    values: bool = False
    """Elements were compared, too."""
    tolerance: Tolerance | None = None
    only_left: list[str] = field(default_factory=list)
    only_right: list[str] = field(default_factory=list)
    dtypes: list[Mismatch] = field(default_factory=list)
    """Listed; with a tolerance they do not count as differences."""
    shapes: list[Mismatch] = field(default_factory=list)
    elements: list[Changed] = field(default_factory=list)
    """Largest relative difference first."""
    notes: list[str] = field(default_factory=list)
    by_component: dict[str, int] = field(default_factory=dict)
    """Tensors of equal name, by component."""
    components_left: list[str] = field(default_factory=list)
    """Components that only the left side has; they are not compared."""
    components_right: list[str] = field(default_factory=list)
    components_failed: list[str] = field(default_factory=list)
    """Components of both sides that could not be brought to the same names; ``notes`` say why."""
    unchanged: dict[str, Squares] = field(default_factory=dict)
    """Of tensors that are equal, in layers and modules where others are not: how large they are (see ``drift``)."""

    def __repr__(self) -> str:
        """``<DiffResult llama_tp8, llama_tp2: different: 1 of 39 tensors changed, 2 only in left>``."""
        verdict = self.verdict("left", "right")
        return f"<DiffResult {self.left.path}, {self.right.path}: {verdict.word}: {verdict.counts}>"

    def verdict(self, left: str = "A", right: str = "B") -> DiffVerdict:
        """What is known, for every place that shows it; ``left`` and ``right`` are what it calls the two sides."""
        compared = count(self.compared, "tensor") + (" under Hugging Face names" if self.renamed else "")
        counts, word = compared, "equal" if self.equal else "no difference" if self.values else "same headers"
        if not self.ok:
            sides = ((left, self.only_left), (right, self.only_right))
            alone = [f", {len(names):,} only in {side}" for side, names in sides if names]
            word, counts = "different", f"{self.changed:,} of {compared} changed{''.join(alone)}"
        kinds = [f"{n:,} {c}" for c, n in self.by_component.items()] if set(self.by_component) - {"model"} else []
        omitted = [
            f"not compared: {', '.join(components)}, {why}"
            for components, why in (
                (self.components_left, f"only in {left}"),
                (self.components_right, f"only in {right}"),
                (self.components_failed, "whose names differ"),
            )
            if components
        ]
        how = "; ".join([*([", ".join(kinds)] if kinds else []), self._how(right)])
        return DiffVerdict(word, counts, how, omitted)

    def _how(self, right: str) -> str:
        if not self.values:
            return "names, dtypes, shapes compared; values not compared"
        if self.tolerance is None:
            return "names, dtypes, shapes, values compared"
        return f"names and shapes compared, values within {self.tolerance.atol:g} + {self.tolerance.rtol:g} * |{right}|"

    @property
    def drifting(self) -> str:
        """The component whose drift is shown: the first that was compared, which is the model where both have one."""
        return next(iter(self.by_component), "model")

    @property
    def drift(self) -> Drift | None:
        """How far both are apart by layer and by module; None where no element is known to differ."""
        if not self.elements:
            return None
        apart = [Apart(d.name, d.gap2, d.norm2, changed=True) for d in self.elements]
        apart += [Apart(name, *squares, changed=False) for name, squares in self.unchanged.items()]
        return drift(self.drifting, apart)

    @property
    def changed(self) -> int:
        """Tensors of equal name that differ in a way that counts."""
        dtypes = self.dtypes if self.tolerance is None else []
        return len({m.name for m in (*dtypes, *self.shapes)} | {d.name for d in self.elements})

    @property
    def ok(self) -> bool:
        """Whether no difference was found that counts, in what was compared."""
        return not (self.only_left or self.only_right or self.changed)

    @property
    def equal(self) -> bool | None:
        """Whether both are equal; None where no difference was found, but values or components were not compared."""
        return (True if self.values and not self.components_failed else None) if self.ok else False


def diff(
    left: AnyPlace,
    right: AnyPlace,
    options: OpenOptions,
    progress: Progress,
    *,
    patterns: tuple[str, ...] = (),
    values: bool = True,
    tolerance: Tolerance | None = None,
    only: tuple[str, ...] = (),
    other_options: OpenOptions | None = None,
    fleet: Fleet | None = None,
) -> DiffResult:
    """Compare; ``options`` are about ``left``. ``right`` is opened by ``other_options``, or by what it says itself.

    With ``values`` every element is compared, bit for bit unless there is a ``tolerance``; without, only headers are
    read. ``patterns`` choose tensors, ``only`` components.
    """
    a, b = _open(parse_place(left), parse_place(right), options, other_options)
    renamed = a.ops != b.ops
    result = DiffResult(a, b, renamed, values=values, tolerance=tolerance)
    compared = _components(a, b, only, result)
    mine, theirs = side(a, compared, result.notes, renamed=renamed), side(b, compared, result.notes, renamed=renamed)
    for lost in [c for c in compared if c in mine.failed or c in theirs.failed]:
        compared.remove(lost)
        result.components_failed.append(lost)
        result.notes.append(f"{lost} is not compared: {mine.failed.get(lost) or theirs.failed[lost]}")
    if not compared:
        raise UnsupportedError("nothing can be compared", where=result.notes)
    one, two = mine.views(compared), theirs.views(compared)
    _own_masters(one, two)
    owners = {n: v.parameter for n, v in (two | one).items()}
    names = [n for c in compared for n, v in (one | two).items() if v.component == c]
    if patterns:
        wanted = wanted_names(patterns, owners)
        names = [n for n in names if n in wanted]
    # A name that one side only has as another name of stored elements is no difference when the other lacks it.
    both = []
    for name in names:
        if name not in two:
            if name not in mine.aliases:
                result.only_left.append(name)
        elif name not in one:
            if name not in theirs.aliases:
                result.only_right.append(name)
        elif name not in mine.aliases or name not in theirs.aliases:
            component = one[name].component
            x, y = one[name].view, two[name].view
            result.compared += 1
            result.by_component[component] = result.by_component.get(component, 0) + 1
            if x.shape != y.shape:
                result.shapes.append(Mismatch(name, str(list(x.shape)), str(list(y.shape))))
            if x.dtype != y.dtype:
                result.dtypes.append(Mismatch(name, x.dtype, y.dtype))
            if x.shape == y.shape and (x.dtype == y.dtype or tolerance is not None):
                both.append((x, y))
    if values:
        _compare(result, both, progress, fleet)
        _measure_unchanged(result, both, fleet)
    return result


def _open(
    left: Place, right: Place, options: OpenOptions, other: OpenOptions | None = None
) -> tuple[Checkpoint, Checkpoint]:
    """Both sides. One that has no config.json is taken for the same model as the other."""
    other = other or OpenOptions(family=options.family, replicate=options.replicate, split=options.split)
    one, two = read(left, options), read(right, other)
    if one.config or not two.config:
        a = join(one, left, options)
        return a, join(two, right, other, None if two.config or not one.config else a.family)
    b = join(two, right, other)
    return join(one, left, options, b.family), b


@dataclass(frozen=True, slots=True)
class ComparedTensor:
    """A tensor of one side under the name by which it is compared."""

    view: DerivedTensor
    parameter: str
    component: str
    lone: bool = False
    """A float32 model weight that is a master weight at the same time, where its side stores none."""


@dataclass(slots=True)
class Side:
    """One side's tensors by component."""

    tables: dict[str, dict[str, ComparedTensor]] = field(default_factory=dict)
    aliases: set[str] = field(default_factory=set)
    """Other names of stored elements, which the other side may lack."""
    failed: dict[str, str] = field(default_factory=dict)
    """Components that cannot be brought to the common names, and why."""

    def views(self, components: list[str]) -> dict[str, ComparedTensor]:
        """All of these components, by the name that --list shows."""
        return {n: v for c in components for n, v in self.tables.get(c, {}).items()}


def _components(a: Checkpoint, b: Checkpoint, only: tuple[str, ...], result: DiffResult) -> list[str]:
    """Those that both sides have; ``result`` gets the others. Raises UsageError when --only names one of these."""
    refuse_empty(a)
    refuse_empty(b)
    left, right = in_order(a.components), in_order(b.components)
    check_components(only, left, a.path)
    check_components(only, right, b.path)
    compared = [c for c in left if c in right and (not only or c in only)]
    if not compared:
        raise UsageError(
            "the two have no component in common",
            where=[f"{a.path}: {', '.join(left)}", f"{b.path}: {', '.join(right)}"],
            hint="compare each with a checkpoint of its own kind",
        )
    if not only:
        result.components_left = [c for c in left if c not in right]
        result.components_right = [c for c in right if c not in left]
    return compared


def side(checkpoint: Checkpoint, components: list[str], notes: list[str], *, renamed: bool) -> Side:
    """What one side has of the components, under the names by which they are compared."""
    out = Side()
    catalog = checkpoint.catalog
    if not renamed:
        for key, t in catalog.tensors.items():
            if key.component in components:
                name = str(key)
                found = ComparedTensor(DerivedTensor(name, t.dtype, t.shape, t), key.name, key.component)
                out.tables.setdefault(key.component, {})[name] = found
    else:
        _publish(checkpoint, components, out, notes)
    if "model" in components:
        _add_aliases(checkpoint, out, renamed=renamed)
    if "master_weights" in components:
        masters = out.tables["master_weights"]
        weights = out.tables["model"] if "model" in out.tables else {} if renamed else identity(catalog).table
        for weight in weights.values():
            view = weight.view if isinstance(weight, ComparedTensor) else weight
            name = str(Key(view.name, "master_weights"))
            if view.dtype == "F32" and name not in masters:
                masters[name] = ComparedTensor(view.named(name), view.name, "master_weights", lone=True)
    return out


def _publish(checkpoint: Checkpoint, components: list[str], out: Side, notes: list[str]) -> None:
    """Tensors under Hugging Face names. Raises LayoutError when the model cannot be brought there."""
    catalog = checkpoint.catalog
    if "model" in components:
        table = _published(checkpoint, identity(catalog), notes)
        out.tables["model"] = {v.name: ComparedTensor(v, v.name, "model") for v in table}
    others = [c for c in components if c != "model"]
    if not others:
        return
    try:
        names = _published(checkpoint, parameters(catalog), [])
    except CkptError as e:
        out.failed |= dict.fromkeys(others, e.what)
        return
    for component in others:
        states = dict.fromkeys(k.state for k in catalog.tensors if k.component == component)
        held: dict[str, ComparedTensor] = {}
        try:
            for state in states:
                for name, view in propagate_to_component(names, catalog, component, state, []).items():
                    held[view.name] = ComparedTensor(view, name, component)
        except CkptError as e:
            out.failed[component] = e.what
        out.tables[component] = held


def _published(checkpoint: Checkpoint, views: TensorTable, notes: list[str]) -> TensorTable:
    """The views under Hugging Face names."""
    try:
        out = apply_transforms(views, inverse(checkpoint.ops), checkpoint.family, checkpoint.ops)
    except LayoutError as e:
        e.where = (*e.where, f"while bringing {checkpoint.path} to Hugging Face names")
        raise
    notes += out.notes
    return out


def _add_aliases(checkpoint: Checkpoint, side: Side, *, renamed: bool) -> None:
    """Under their other names, the tensors that a tied model does not store twice."""
    table = side.tables["model"]
    aliases = {k.name: v.name for k, v in checkpoint.catalog.aliases.items()}
    if renamed:
        aliases = {**checkpoint.family.ties, **aliases}
    for alias, owner in aliases.items():
        if alias not in table and owner in table:
            side.aliases.add(alias)
            table[alias] = ComparedTensor(replace(table[owner].view, name=alias), alias, "model")


def _own_masters(one: dict[str, ComparedTensor], two: dict[str, ComparedTensor]) -> None:
    """Take out float32 weights as their own master weights where the other side has none either.

    Some formats store a master weight of a parameter that is float32 itself, and others do not.
    """
    for mine, other in ((one, two), (two, one)):
        for name in [n for n, v in mine.items() if v.lone and (n not in other or other[n].lone)]:
            del mine[name]
            if name in other:
                del other[name]


_Pair = tuple[DerivedTensor, DerivedTensor]


@dataclass(frozen=True, slots=True)
class _Comparing:
    """See ``Work``."""

    left: SentFiles
    right: SentFiles
    tolerance: Tolerance | None

    @property
    def files(self) -> Iterator[DataFile]:
        yield from self.left
        yield from self.right

    def reads(self, pair: _Pair) -> Reads:
        one, two = view_reads(catalog_of(self.left), pair[0]), view_reads(catalog_of(self.right), pair[1])
        return Reads([*one.ranges, *two.ranges], one.again or two.again)

    def do(self, pair: _Pair) -> Changed | None:
        return _compare_one(catalog_of(self.left), catalog_of(self.right), self.tolerance, *pair)


def _compare(result: DiffResult, pairs: list[_Pair], progress: Progress, fleet: Fleet | None) -> None:
    progress.start(sum(x.nbytes for x, _ in pairs), 0)
    left, right = SentFiles(result.left.catalog.files), SentFiles(result.right.catalog.files)
    work = _Comparing(left, right, result.tolerance)
    compared = each(work, pairs, lambda pair: pair[0].nbytes + pair[1].nbytes, fleet)
    for (x, _), found in zip(pairs, compared, strict=True):
        progress.advance(x.nbytes)
        if found is not None:
            result.elements.append(found)
    result.elements.sort(key=_size, reverse=True)
    progress.finish()


@dataclass(frozen=True, slots=True)
class _DistanceWork:
    """See ``Work``: the norms of two tensors whose elements were found to be equal."""

    left: SentFiles
    right: SentFiles
    alike: bool
    """They are the same in every bit, so that one side says it all."""

    @property
    def files(self) -> Iterator[DataFile]:
        yield from self.left
        yield from self.right

    def reads(self, pair: _Pair) -> Reads:
        two = view_reads(catalog_of(self.right), pair[1])
        if self.alike:
            return two
        one = view_reads(catalog_of(self.left), pair[0])
        return Reads([*one.ranges, *two.ranges], one.again or two.again)

    def do(self, pair: _Pair) -> Squares:
        x, y = pair
        distance = Distance()
        for box in blocks(y.shape, max(itemsize(x.dtype), itemsize(y.dtype)), BLOCK):
            b = read_view(catalog_of(self.right), y, box)
            if self.alike:
                distance.add_right(b)
            else:
                distance.add(read_view(catalog_of(self.left), x, box), b)
        return Squares(distance.gap2, distance.norm2)


def _measure_unchanged(result: DiffResult, pairs: list[_Pair], fleet: Fleet | None) -> None:
    """Read equal tensors once more where the drift of their layer or module needs to know how large they are.

    Only there: two checkpoints that are equal are read once.
    """
    if not result.elements:
        return
    changed = {d.name for d in result.elements}
    where = [at for name in changed if (at := place(name, result.drifting))]
    layers, modules = {layer_of(at) for at in where}, {at.module for at in where}

    def is_needed(x: DerivedTensor) -> bool:
        at = None if x.name in changed or not prod(x.shape) else place(x.name, result.drifting)
        return at is not None and (layer_of(at) in layers or at.module in modules) and not lookup(x.dtype).bits % 8

    wanted = [(x, y) for x, y in pairs if is_needed(x)]
    left, right = SentFiles(result.left.catalog.files), SentFiles(result.right.catalog.files)
    work = _DistanceWork(left, right, result.tolerance is None)
    measured = each(work, wanted, lambda pair: pair[1].nbytes, fleet)
    result.unchanged = {x.name: squares for (x, _), squares in zip(wanted, measured, strict=True)}


def _size(changed: Changed) -> float:
    """What is not a number, or not known, comes before every number."""
    return float("inf") if changed.relative is None or isnan(changed.relative) else changed.relative


def _compare_one(
    left: Catalog, right: Catalog, tolerance: Tolerance | None, x: DerivedTensor, y: DerivedTensor
) -> Changed | None:
    """Compare block by block. Blocks before the first difference are read again for the norms, when there is one."""
    if not prod(x.shape):
        return None
    if lookup(x.dtype).bits % 8:
        return _compare_packed(left, right, x, y)

    def both(box: Box) -> tuple[Array, Array]:
        return read_view(left, x, box), read_view(right, y, box)

    wrong, first, largest = 0, None, 0.0
    distance = Distance()
    equal: list[Box] = []
    room = BLOCK if tolerance is None else BLOCK // 4  # float64 takes more
    for box in blocks(x.shape, max(itemsize(x.dtype), itemsize(y.dtype)), room):
        a, b = both(box)
        bad, gap = differs_in_bits(a, b) if tolerance is None else differs(a, b, tolerance.atol, tolerance.rtol)
        if bad.any():
            wrong += int(bad.sum())
            first = first or first_index(bad, box.start)
            largest = float("nan") if isnan(gap) or isnan(largest) else max(largest, gap)
        if first is None:
            equal.append(box)
        else:
            distance.add(a, b)
    if first is None:
        return None
    for box in equal:
        distance.add(*both(box))
    far = distance.relative, distance.cosine, distance.gap2, distance.norm2
    return Changed(x.name, wrong, prod(x.shape), first, largest, *far)


def _compare_packed(left: Catalog, right: Catalog, x: DerivedTensor, y: DerivedTensor) -> Changed | None:
    """Elements that share bytes are compared as the bytes that they are, which are in one piece."""
    from ckpttool.ops.inspect.values import digest

    if x.same is None or y.same is None:
        raise UnsupportedError(f"`{x.name}` is {x.dtype} and fused on one side; its elements share bytes")
    one, two = digest(left, x.same), digest(right, y.same)
    if one is None or two is None:
        raise UnsupportedError(f"`{x.name}` is {x.dtype} and cut; its elements share bytes")
    n = prod(x.shape)
    return None if one == two else Changed(x.name, n, n, (0,) * len(x.shape), float("nan"))
