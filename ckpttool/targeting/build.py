"""How a checkpoint becomes a target: the plan, and all that is known before a byte is written.

mesh -> components -> names -> ranks -> files -> plan
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import lcm
from pathlib import Path

from ckpttool.catalog import Catalog, Key, RankTensor, RankTensors
from ckpttool.checkpoint import Checkpoint
from ckpttool.dialects import NamingContext
from ckpttool.errors import ConflictError, UsageError
from ckpttool.formats import registry
from ckpttool.formats.base import Capabilities, TransposedOnDisk, WriteRequest, file_now
from ckpttool.formats.config import quantization
from ckpttool.geometry import Box
from ckpttool.layout.family import Family, Tie, Transform
from ckpttool.layout.packed import find_packing
from ckpttool.layout.partition import Partitioner
from ckpttool.layout.rules import PartitionContext
from ckpttool.mesh import Mesh
from ckpttool.plan import Plan
from ckpttool.planner import Computed, build_plan, output_dtype
from ckpttool.relate import (
    DerivedTensor,
    EqualPair,
    TensorTable,
    parameters,
    permute,
    propagate_to_component,
    rename_by_rules,
)
from ckpttool.select import bounded, nearest_hint
from ckpttool.targeting.components import WEIGHTS, chosen_components, share_of
from ckpttool.targeting.mesh import chosen_ranks, target_mesh
from ckpttool.targeting.naming import choose_dialect, choose_version, renamed, shapes_of
from ckpttool.targeting.recode import Recoded, Recoding, recode
from ckpttool.targeting.select import Selection, select
from ckpttool.targeting.sidecars import beside, carried_below, target_config
from ckpttool.targeting.target import Target, castable, check_target


@dataclass(slots=True)
class Prepared:
    """Everything known before a byte is written."""

    source: Checkpoint
    target: Target
    format: str
    mesh: Mesh
    family: Family
    views: TensorTable
    plan: Plan
    dtype: str
    """What --dtype casts to, or ""."""
    dtypes: dict[str, str]
    """Of every tensor of the output, by its name there."""
    notes: list[str]
    """In the order in which they were found."""
    removed: tuple[int, int] = (0, 0)
    """(tensors, bytes) that --remove-keys or --keep-keys left out."""
    recoded: Recoded | None = None
    """What was dequantised and quantised on the way."""
    computed: Computed | None = None
    """How the tensors come about that are in no file of the source."""
    selection: Selection = field(default_factory=Selection)
    statements: tuple[Transform, ...] = ()
    """What leads from Hugging Face names to those of the output."""
    sharding: int = 1
    """Ranks that share the optimizer state of the output, for each of the mesh."""
    usage: str = ""
    """What reads the output, see ``FileLayout``."""

    def next_step(self, dst: str | Path) -> str:
        """A command, or a line of Python, that reads the output at ``dst``; "" where there is none to name."""
        if self.removed[0]:
            return ""  # whether a reader can do without them is not known
        return self.usage.format(dst=shlex.quote(str(dst)), text=json.dumps(str(dst), ensure_ascii=False))


def plan_recoded(source: Checkpoint, recoding: Recoding, target: Target, selection: Selection) -> Prepared:
    """Plan how a checkpoint whose weights change their precision becomes ``target``."""
    recoded = recode(source, recoding, remove=selection.remove, keep=selection.keep)
    prepared = plan_target(
        recoded.checkpoint, target, replace(selection, remove=(), keep=()),
        computed=recoded.computed, written=recoded.written,
    )  # fmt: skip
    prepared.recoded = recoded
    prepared.removed = recoded.removed
    return prepared


def plan_target(
    source: Checkpoint,
    target: Target,
    selection: Selection,
    *,
    computed: Computed | None = None,
    written: Sequence[tuple[str, bytes]] = (),
) -> Prepared:
    """Plan how ``source`` becomes ``target``.

    ``computed`` says how the tensors of ``source`` come about that are in no file yet; ``written`` are small files
    that lie beside the output, in place of companions of these names.
    """
    if target.fuse and target.unfuse:
        raise UsageError("--fuse and --unfuse exclude each other")
    notes = list(source.notes)
    fmt, mesh, asked = target_mesh(source, target, notes)
    dtype = castable(target.dtype)
    writer = registry.writer(fmt)
    capabilities = writer.capabilities
    check_target(target, writer, source)
    family = source.family
    version = choose_version(source, target, writer)
    equal: list[EqualPair] = []
    catalog, components = chosen_components(source, target.components, capabilities, fmt, notes, equal, ema=target.ema)
    ours, fused = choose_dialect(source, target, writer)
    context = NamingContext(family, source.config, mesh, fused, version)
    views, removed = select(parameters(catalog), selection, notes)
    views, after = renamed(source, target, views, ours, context, notes)
    equal += views.equal
    _check_overrides(family, {t.name for t in source.stored.tensors} | {*views.table})
    views.table = {n: views.table[n] for n in sorted(views.table, key=family.model_order(after))}
    cut = list(views)
    views = rename_by_rules(views, selection.rename)
    names = dict(zip((v.name for v in cut), views.table, strict=True))
    notes += views.notes
    whole = ours.uncut(context, after, {v.name: v.shape for v in cut}, source.stored.whole)
    packing = find_packing(quantization(source.config), {v.name: v.dtype for v in views})
    cast = output_dtype(names, dtype, packing.parts(names) if packing is not None else ())
    family = family.with_whole((*capabilities.whole, *whole))
    partitioner = Partitioner(
        family,
        after,
        _cutting(family, mesh, target, capabilities),
        source.config,
        lambda t: cast(t.name, t.dtype),
        local_layers=capabilities.local_layers,
        tied=family.tied and not any(isinstance(op, Tie) for op in after),
        names=names,
    )
    chosen = chosen_ranks(target, mesh)
    ranks = partitioner.run(cut, chosen)
    if capabilities.pad_vocab and capabilities.sharded and not capabilities.records_shapes:
        _check_vocabulary(ranks, _vocabulary(cut, family, after, names), source)
    tables = {c: propagate_to_component(views, catalog, *c, equal) for c in components}
    like = ranks[0]
    ranks = [
        RankTensors((r for c in components for r in share_of(held, c, tables[c], cast)), share_index_with=like)
        for held in ranks
    ]
    table = {v.name: v for c in components for v in tables[c].values()}
    source_table = dict(table)
    if isinstance(writer, TransposedOnDisk):
        turned = partial(writer.turned, version=version, prefix=ours.prefix(views.table), config=source.config)
        ranks = [RankTensors((_turned(turned, r, table) for r in held), share_index_with=like) for held in ranks]
    sharding = target.sharding or (source.stored.sharding if capabilities.optimizer_shards else 1)
    if sharding > 1 and target.sharding is None:
        notes.append(f"sharding {sharding}: as the source has it; change it with --sharding-out")
    request = WriteRequest(
        ranks=ranks,
        chosen=chosen,
        mesh=mesh,
        requested=asked,
        family=family.name,
        dialect=ours.name,
        fused=fused,
        config=target_config(source, ours, views.table, mesh, dtype),
        dtype=dtype,
        max_shard_size=target.max_shard_size,
        sharding=sharding,
        sharding_version=target.sharding_version,
        version=version,
        source=source.stored,
    )
    file_layout = writer.write(request)
    config = request.config if file_layout.config is None else file_layout.config
    ours.check_written(context._replace(config=config), after, shapes_of(views), ranks)
    if file_layout.ranks is not None:
        equal += _left_to_masters(catalog, tables, file_layout.ranks)
    carried, literal = beside(source, ours, config, file_layout, written, notes)
    plan = build_plan(
        catalog,
        table,
        ranks,
        file_layout,
        carried=[
            *((p.name, file_now(p)) for p in carried),
            *carried_below(source, {f.name for f in file_layout.files} | {n for n, _ in literal}, notes),
        ],
        literal_files=literal,
        computed=computed,
        equal=equal,
        tied=views.tied,
    )
    notes += plan.notes
    plan.notes = notes
    dtypes = {
        v.name: cast(n, v.dtype) if c[0] in WEIGHTS else v.dtype for c in components for n, v in tables[c].items()
    }
    source = replace(source, catalog=catalog)
    return Prepared(
        source, target, fmt, mesh, family, TensorTable(source_table), plan, dtype, dtypes, notes, removed,
        computed=computed, selection=selection, statements=after, sharding=sharding, usage=file_layout.usage,
    )  # fmt: skip


def _cutting(family: Family, mesh: Mesh, target: Target, capabilities: Capabilities) -> PartitionContext:
    return PartitionContext(
        mesh,
        family.sizes,
        vocab_multiple=lcm(target.vocab_multiple, capabilities.vocab_multiple),
        pad_vocab=capabilities.pad_vocab,
        ragged_experts=capabilities.ragged_experts,
    )


def _vocabulary(
    views: Sequence[DerivedTensor], family: Family, after: tuple[Transform, ...], names: Mapping[str, str]
) -> set[str]:
    """Names in the output of the tensors with a row for each token."""
    place_of = family.placer(after)
    return {names[v.name] for v in views if (place := place_of(v.name)) is not None and place.rule.verb == "vocab"}


def _left_to_masters(
    catalog: Catalog, tables: Mapping[tuple[str, str], dict[str, DerivedTensor]], ranks: Sequence[Sequence[RankTensor]]
) -> list[EqualPair]:
    """Model weights that the files hold as master weights only: readers will round those, so they must be that."""
    written = {r.key for held in ranks for r in held}
    out = []
    for name, view in tables.get(("model", ""), {}).items():
        if view.name in written or ("master_weights", "") not in tables or name not in tables["master_weights", ""]:
            continue
        for source in {id(p.source): p.source for p in view.parts}.values():
            master = catalog.tensors.get(Key(source.key.name, "master_weights"))
            if master is not None and source.key.component == "model":
                out.append((source, master))
    return out


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


def _check_overrides(family: Family, names: set[str]) -> None:
    """A --replicate or --split that matches nothing is a typo."""
    for regex, rule in family.overrides:
        with bounded(rule.origin):
            found = any(regex.search(n) for n in names)
        if not found:
            raise UsageError(f"{rule.origin} matches no tensor", hint=nearest_hint(rule.origin.split("'")[1], names))
