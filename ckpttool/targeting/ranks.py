"""What each rank of the output stores, of every component, and as the files of the format hold it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm

from ckpttool.checkpoint import Checkpoint
from ckpttool.core.catalog import RankTensor, RankTensors
from ckpttool.core.dtypes import CASTABLE
from ckpttool.core.geometry import Box
from ckpttool.core.patterns import compile_pattern
from ckpttool.errors import ConflictError
from ckpttool.formats.base import HoldsWhole, TransposedOnDisk
from ckpttool.formats.config import quantization
from ckpttool.layout.family import Family
from ckpttool.layout.packed import find_packing
from ckpttool.layout.partition import Partitioner
from ckpttool.layout.rules import PartitionContext
from ckpttool.layout.scales import is_sidecar, weight_of
from ckpttool.layout.statements import Tie
from ckpttool.planning.relate import DerivedTensor, EqualPair, permute, propagate_to_component
from ckpttool.targeting.components import Component, share_of
from ckpttool.targeting.mesh import chosen_ranks
from ckpttool.targeting.naming import OutputTensors
from ckpttool.targeting.target import WEIGHTS, Goal


@dataclass(slots=True)
class RankShares:
    """The tensors that each rank of the output stores."""

    family: Family
    """The rules, with what the format keeps whole."""
    chosen: tuple[int, ...]
    """Ranks that are written; the others store nothing."""
    ranks: list[RankTensors]
    tables: Mapping[Component, dict[str, DerivedTensor]]
    """The view of each parameter, by component."""
    read: dict[str, DerivedTensor]
    """The views by their own names, as a reader of the output has them."""
    views: dict[str, DerivedTensor]
    """The same as the files hold them: some with their axes exchanged."""
    dtypes: dict[str, str]
    """Dtype of each view in the output."""


def share_out(
    source: Checkpoint, goal: Goal, named: OutputTensors, components: Sequence[Component], equal: list[EqualPair]
) -> RankShares:
    """Cut the parameters over the mesh, and let the other ``components`` follow. ``equal`` collects what must agree.

    Raises LayoutError for a tensor that cannot be cut, ConflictError for a vocabulary that no reader would find again.
    """
    capabilities, views = goal.writer.capabilities, named.views
    packing = find_packing(quantization(goal.context.config), {n: v.dtype for n, v in views.table.items()})
    packed = packing.parts(named.names) if packing is not None else ()
    single = (*capabilities.float32, *kept_single(goal, components))
    cast = _output_dtype(named.names, goal.dtype, packed, single)
    own = goal.writer.whole if isinstance(goal.writer, HoldsWhole) else ()
    family = source.family.with_whole((*own, *named.uncut))
    chosen = chosen_ranks(goal.target, goal.mesh)
    partitioner = _partitioner(family, goal, named, cast, str(source.stored.root))
    if goal.target.pp or goal.target.pp_layout:  # also where the software that loads DST divides the layers
        partitioner.stages((v.name for v in named.ruled), goal.requested)
    held = partitioner.run(named.ruled, chosen)
    if capabilities.pad_vocab and capabilities.sharded and not capabilities.records_shapes:
        _check_vocabulary(held, _vocabulary(family, named), source)
    tables = {c: propagate_to_component(views, source.catalog, *c, equal) for c in components}
    read = {v.name: v for table in tables.values() for v in table.values()}
    dtypes = {
        v.name: cast(n, v.dtype) if c in WEIGHTS else v.dtype
        for (c, _), table in tables.items()
        for n, v in table.items()
    }
    like = held[0]
    ranks = [share_of(rank, tables, cast, RankTensors(share_index_with=like)) for rank in held]
    stored = dict(read)
    if isinstance(goal.writer, TransposedOnDisk):
        prefix = goal.dialect.prefix(views.table)
        turned = partial(goal.writer.turned, version=goal.context.version, prefix=prefix, config=goal.context.config)
        ranks = [_as_on_disk(rank, turned, stored, RankTensors(share_index_with=like)) for rank in ranks]
    return RankShares(family, chosen, ranks, tables, read, stored, dtypes)


def kept_single(goal: Goal, components: Sequence[Component]) -> tuple[str, ...]:
    """Patterns of what the trainer keeps in float32; () where no training continues from the output."""
    trained = any(c == "optimizer" for c, _ in components) and goal.writer.capabilities.states
    return goal.dialect.single(goal.context) if trained else ()


def _output_dtype(
    names: Collection[str], wanted: str, packed: Collection[str], single: Sequence[str]
) -> Callable[[str, str], str]:
    """(name, dtype) -> the dtype that ``--dtype`` makes of it.

    Floats of 16 bits and more are cast. Scales are not, those of ``packed`` weights neither: their weights were rounded
    with just these values. Names of the patterns ``single`` are always float32.
    """
    patterns = [compile_pattern(p) for p in single]

    def cast(name: str, dtype: str) -> str:
        if dtype in CASTABLE and any(p.search(name) for p in patterns):
            return "F32"
        if not wanted or dtype not in CASTABLE or weight_of(name, names) is not None or is_sidecar(name):
            return dtype
        return dtype if name in packed else wanted

    return cast


def _partitioner(
    family: Family, goal: Goal, named: OutputTensors, cast: Callable[[str, str], str], root: str
) -> Partitioner:
    capabilities = goal.writer.capabilities
    context = PartitionContext(
        goal.mesh,
        family.sizes,
        vocab_multiple=_vocab_multiple(goal),
        pad_vocab=capabilities.pad_vocab,
        ragged_experts=capabilities.ragged_experts,
    )
    return Partitioner(
        family,
        named.statements,
        context,
        goal.context.config,
        {t.name: cast(t.name, t.dtype) for t in named.ruled} if goal.dtype or capabilities.float32 else {},
        local_layers=capabilities.local_layers,
        tied=family.tied and not any(isinstance(op, Tie) for op in named.statements),
        names=named.names,
        root=root,
    )


def _vocab_multiple(goal: Goal) -> int:
    """What the rows of a padded vocabulary are a multiple of."""
    asked, own = goal.target.vocab_multiple, goal.writer.capabilities
    if own.vocab_multiple_per_tp:
        return (asked or own.vocab_multiple) * goal.requested.tp
    return lcm(asked or 1, own.vocab_multiple)


def _vocabulary(family: Family, named: OutputTensors) -> set[str]:
    """Names in the output of the tensors with a row for each token."""
    names, place_of = named.names, family.placer(named.statements)
    places = ((v.name, place_of(v.name)) for v in named.ruled)
    return {names[n] for n, place in places if place is not None and place.rule.verb == "vocab"}


def _check_vocabulary(ranks: Sequence[Sequence[RankTensor]], tables: Collection[str], source: Checkpoint) -> None:
    """Raises ConflictError where a vocabulary would be written that a reader takes for another number of rows, by what
    config.json says: rows beyond those are padding.

    ``tables`` are the names of tensors with a row for each token.
    """
    known = source.family.size("vocab")
    odd = next(
        (
            t
            for held in ranks
            for t in held
            if t.key in tables and t.whole[0] != known and (t.pads or known is not None)
        ),
        None,
    )
    if odd is not None:
        raise ConflictError(
            f"`{odd.key}` has {odd.whole[0]:,} rows, and config.json "
            + (f"says a vocabulary of {known:,}" if known is not None else "does not say how large the vocabulary is")
            + ": this target pads it, and nothing would tell the padding from tokens afterwards",
            where=str(source.path / "config.json"),
            hint=f"set vocab_size to {odd.whole[0]} in config.json",
        )


def _as_on_disk(
    rank: RankTensors, turned: Callable[[str, int], bool], table: dict[str, DerivedTensor], out: RankTensors
) -> RankTensors:
    """The tensors of ``rank`` as the format's files hold them, added to ``out``; ``table`` gets their views."""
    for r in rank:
        out.append(_turned(turned, r, table))
    return out


def _turned(turned: Callable[[str, int], bool], r: RankTensor, table: dict[str, DerivedTensor]) -> RankTensor:
    """The tensor as the format's files hold it: some model weights with their axes exchanged."""
    if r.component != "model" or not turned(r.name, len(r.shape)):
        return r
    view = table[r.key]
    if view.shape == r.whole:
        view = table[r.key] = permute(view.name, view, (1, 0))

    def turn(box: Box) -> Box:
        return Box(box.start[::-1], box.stop[::-1])

    return r._replace(
        shape=r.shape[::-1],
        whole=view.shape,
        boxes=tuple([(turn(a), turn(b)) for a, b in r.boxes]),
        pads=tuple(turn(p) for p in r.pads),
    )
