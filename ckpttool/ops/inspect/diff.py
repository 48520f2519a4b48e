"""Two checkpoints, compared tensor by tensor whatever their sharding and naming.

Where the namings differ, both are brought to Hugging Face names by the relations of their families; what cannot be
brought there (a layer that one format leaves out) is a difference.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import isnan, prod
from pathlib import Path

from ckpttool.catalog import Key
from ckpttool.checkpoint import Checkpoint, assemble
from ckpttool.dtypes import itemsize, lookup
from ckpttool.errors import LayoutError, UnsupportedError
from ckpttool.execute import Progress
from ckpttool.execute.compare import BLOCK, Difference, compare_one, read_view
from ckpttool.execute.reader import blocks
from ckpttool.formats.base import OpenOptions
from ckpttool.formats.registry import read_source
from ckpttool.kernels.stats import differs, first_index
from ckpttool.layout.family import inverse
from ckpttool.relate import View, Views, apply_ops, identity
from ckpttool.select import matching


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
    """With a tolerance these are told, and are no difference."""
    shapes: list[Mismatch] = field(default_factory=list)
    elements: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing differs that counts."""
        dtypes = self.dtypes if self.tolerance is None else []
        return not (self.only_left or self.only_right or dtypes or self.shapes or self.elements)


def diff(
    left: str | Path,
    right: str | Path,
    options: OpenOptions,
    progress: Progress,
    *,
    patterns: tuple[str, ...] = (),
    values: bool = False,
    tolerance: Tolerance | None = None,
    workers: int = 2,
) -> DiffResult:
    """Compare; ``options`` are about ``left``, ``right`` is opened by what it says itself.

    With ``values`` every element is read, bit for bit unless there is a ``tolerance``. ``patterns`` choose tensors.
    """
    a, b = _open(Path(left), Path(right), options)
    (mine, theirs), renamed = _same_names(a, b)
    result = DiffResult(a, b, renamed, values=values, tolerance=tolerance)
    if renamed:
        result.notes += [*mine.notes, *theirs.notes]
    one, two = _with_aliases(a, mine, renamed=renamed), _with_aliases(b, theirs, renamed=renamed)
    names = [*one, *(n for n in two if n not in one)]
    if patterns:
        wanted = matching(patterns, names, option="--filter")
        names = [n for n in names if n in wanted]
    # A name that one side only has as another name of stored elements is no difference when the other lacks it.
    shared_left, shared_right = set(one) - set(mine.table), set(two) - set(theirs.table)
    both = []
    for name in names:
        if name not in two:
            if name not in shared_left:
                result.only_left.append(name)
        elif name not in one:
            if name not in shared_right:
                result.only_right.append(name)
        elif name not in shared_left or name not in shared_right:
            x, y = one[name], two[name]
            result.compared += 1
            if x.shape != y.shape:
                result.shapes.append(Mismatch(name, str(list(x.shape)), str(list(y.shape))))
            if x.dtype != y.dtype:
                result.dtypes.append(Mismatch(name, x.dtype, y.dtype))
            if x.shape == y.shape and (x.dtype == y.dtype or tolerance is not None):
                both.append((x, y))
    if values:
        _compare(result, both, progress, workers)
    return result


def _open(left: Path, right: Path, options: OpenOptions) -> tuple[Checkpoint, Checkpoint]:
    """Both sides. One that has no config.json is taken for the same model as the other."""
    other = OpenOptions(family=options.family, replicate=options.replicate, split=options.split)
    one = read_source(left, options.format, options.mesh)
    two = read_source(right, other.format, other.mesh)
    if one.config or not two.config:
        a = assemble(one, left, options)
        return a, assemble(two, right, other, None if two.config or not one.config else a.family)
    b = assemble(two, right, other)
    return assemble(one, left, options, b.family), b


def _same_names(a: Checkpoint, b: Checkpoint) -> tuple[tuple[Views, Views], bool]:
    """Views of both under one naming."""
    left, right = identity(a.catalog), identity(b.catalog)
    if a.ops == b.ops:
        return (left, right), False
    return (_published(a, left), _published(b, right)), True


def _published(checkpoint: Checkpoint, views: Views) -> Views:
    """The views under Hugging Face names."""
    family = checkpoint.family
    try:
        return apply_ops(views, inverse(checkpoint.ops), family, checkpoint.ops)
    except LayoutError as e:
        e.where = (*e.where, f"while bringing {checkpoint.path} to Hugging Face names")
        raise


def _with_aliases(checkpoint: Checkpoint, views: Views, *, renamed: bool) -> dict[str, View]:
    """The views, and under their other names those that a tied model does not store twice."""
    table = dict(views.table)
    aliases = {Key(k.name): Key(v.name) for k, v in checkpoint.catalog.aliases.items()}
    if renamed and checkpoint.config.get("tie_word_embeddings"):
        aliases.setdefault(Key("lm_head.weight"), Key("model.embed_tokens.weight"))
    for alias, owner in aliases.items():
        if alias.name not in table and owner.name in table:
            table[alias.name] = replace(table[owner.name], name=alias.name)
    return table


def _compare(result: DiffResult, pairs: list[tuple[View, View]], progress: Progress, workers: int) -> None:
    progress.start(sum(x.nbytes for x, _ in pairs), 0)
    with ThreadPoolExecutor(workers) as pool:
        for (x, _), found in zip(pairs, pool.map(lambda pair: _compare_one(result, *pair), pairs), strict=True):
            progress.advance(x.nbytes)
            if found is not None:
                result.elements.append(found)
    progress.finish()


def _compare_one(result: DiffResult, x: View, y: View) -> Difference | None:
    if not prod(x.shape):
        return None
    a, b = result.left.catalog, result.right.catalog
    if lookup(x.dtype).bits % 8:
        return _compare_packed(result, x, y)
    if result.tolerance is None:
        return compare_one(x.name, x.shape, x.dtype, lambda box: read_view(a, x, box), lambda box: read_view(b, y, box))
    wrong, first, largest = 0, None, 0.0
    for box in blocks(x.shape, max(itemsize(x.dtype), itemsize(y.dtype)), BLOCK // 4):  # float64 takes more room
        bad, gap = differs(read_view(a, x, box), read_view(b, y, box), result.tolerance.atol, result.tolerance.rtol)
        if bad.any():
            wrong += int(bad.sum())
            first = first or first_index(bad, box.start)
            largest = float("nan") if isnan(gap) or isnan(largest) else max(largest, gap)
    return None if first is None else Difference(x.name, wrong, prod(x.shape), first, largest)


def _compare_packed(result: DiffResult, x: View, y: View) -> Difference | None:
    """Elements that share bytes are compared as the bytes that they are, which are in one piece."""
    from ckpttool.ops.inspect.values import digest

    if x.same is None or y.same is None:
        raise UnsupportedError(f"`{x.name}` is {x.dtype} and fused on one side; its elements share bytes")
    one, two = digest(result.left.catalog, x.same), digest(result.right.catalog, y.same)
    if one is None or two is None:
        raise UnsupportedError(f"`{x.name}` is {x.dtype} and cut; its elements share bytes")
    n = prod(x.shape)
    return None if one == two else Difference(x.name, n, n, (0,) * len(x.shape), float("nan"))
