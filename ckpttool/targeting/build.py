"""How a checkpoint becomes a target: the plan, and all that is known before a byte is written.

mesh -> components -> names -> ranks -> files -> plan
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

from ckpttool.checkpoint import Checkpoint
from ckpttool.core.activity import activity
from ckpttool.core.catalog import Catalog, Key, RankTensor
from ckpttool.core.dtypes import CASTABLE
from ckpttool.core.files import Place
from ckpttool.core.mesh import Mesh
from ckpttool.core.optimizer_states import SCALARS, STEP
from ckpttool.core.patterns import bounded, nearest_hint
from ckpttool.core.plan import Plan
from ckpttool.core.words import count
from ckpttool.dialects import NamingContext
from ckpttool.errors import UsageError
from ckpttool.formats.base import TrainingState, WriteRequest
from ckpttool.layout.family import Family
from ckpttool.layout.scales import weight_of
from ckpttool.layout.statements import Rename, Transform
from ckpttool.layout.unknown import sizes_from
from ckpttool.planning.planner import Computed, build_plan
from ckpttool.planning.relate import DerivedTensor, EqualPair, TensorTable, Tied, parameters, rename_by_rules
from ckpttool.quant.config import without_unused
from ckpttool.targeting.components import chosen_components, in_one_dtype, with_single
from ckpttool.targeting.lacking import lacking
from ckpttool.targeting.mesh import target_mesh
from ckpttool.targeting.mixed import doubts
from ckpttool.targeting.naming import OutputTensors, choose_dialect, choose_version, renamed, shapes_of
from ckpttool.targeting.prediction import settled
from ckpttool.targeting.ranks import RankShares, kept_single, share_out
from ckpttool.targeting.recode import Recoded, Recoding, recode
from ckpttool.targeting.select import Selection, select
from ckpttool.targeting.sidecars import beside, target_config
from ckpttool.targeting.states import Translation, steps_of, translated
from ckpttool.targeting.target import WEIGHTS, Goal, Target, castable, check_target
from ckpttool.targeting.training import training_of


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
    """Dtype of every tensor of the output, by its name there."""
    notes: list[str]
    """In the order in which they were found."""
    removed: tuple[int, int] = (0, 0)
    """(tensors, bytes) that --remove-keys or --keep-keys left out."""
    recoded: Recoded | None = None
    """What was dequantized and quantized on the way."""
    computed: Computed | None = None
    """How the tensors come about that are in no file of the source."""
    selection: Selection = field(default_factory=Selection)
    statements: tuple[Transform, ...] = ()
    """What leads from Hugging Face names to those of the output."""
    translation: Translation | None = None
    """What was worked out of the optimizer's state."""
    sharding: int = 1
    """Ranks that share the optimizer state of the output, for each of the mesh."""
    usage: str = ""
    """What reads the output, see ``FileLayout``."""
    run_mesh: Mesh = field(default_factory=Mesh)
    """The mesh of the run that the output is for, see ``FileLayout``; ``mesh`` is how its files are cut."""
    parts: Mapping[str, Prepared] = field(default_factory=dict)
    """The rewritten models of a directory of several models, by their directories."""

    def next_step(self, dst: Place) -> str:
        """A command, or a line of Python, that reads the output at ``dst``; "" where there is none to name."""
        if self.removed[0] or not isinstance(dst, Path):
            return ""  # whether a reader can do without them, or reads from there, is not known
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
    activity.begin("planning")
    with sizes_from(source.config, str(source.stored.root)):
        return _planned(source, target, selection, computed, written)


def _planned(
    source: Checkpoint, target: Target, selection: Selection, computed: Computed | None,
    written: Sequence[tuple[str, bytes]],
) -> Prepared:  # fmt: skip
    """The steps of ``plan_target``."""
    notes = [*source.notes, *(d.text for d in (doubts(source.catalog) if computed is None else ()))]
    equal: list[EqualPair] = []
    goal = _decide(source, target, notes)
    source, translation = translated(source, target, goal.writer.capabilities, notes)
    source, components = chosen_components(source, goal.target, goal.writer, notes, equal)
    if single := kept_single(goal, components):
        views = _named(source, goal, selection, []).views.table
        source = with_single(source, goal.writer.capabilities, single, views, goal.dtype, notes, equal)
    named = _named(source, goal, selection, notes)
    if goal.dtype and computed is None:
        notes += _not_cast(named.views.table, goal.dtype)
    equal += named.views.equal
    source, moved = _with_tied_states(source, named.views.tied, equal)
    if goal.mesh.pp > 1 and goal.writer.capabilities.optimizer_shards:
        source, copied = _with_states_of_both(source, named)
        moved |= {to: moved.get(of, of) for to, of in copied.items()}
    if translation is not None:
        translation.moved |= moved
    shares = share_out(source, goal, named, components, equal)
    request = _request(source, goal, named, shares, notes)
    file_layout = goal.writer.write(request)
    config = request.config if file_layout.config is None else file_layout.config
    context = goal.context._replace(config=config)
    goal.dialect.check_written(context, named.statements, shapes_of(named.views), shares.ranks)
    if file_layout.ranks is not None:
        equal += _left_to_masters(source.catalog, shares.tables, file_layout.ranks)
    carried, literal = beside(source, goal.dialect, config, file_layout, written, notes)
    plan = build_plan(
        source.catalog, shares.views, shares.ranks, file_layout,
        carried=carried, literal_files=literal, computed=computed, equal=equal, tied=named.views.tied,
    )  # fmt: skip
    notes += plan.notes
    plan.notes = notes
    whole = len(request.chosen) == request.mesh.world
    return Prepared(
        source, target, goal.writer.name, goal.mesh, shares.family, TensorTable(shares.read), plan, goal.dtype,
        shares.dtypes, notes, named.removed, computed=computed, selection=selection, statements=named.statements,
        translation=translation, sharding=request.sharding,
        usage=file_layout.usage if whole and goal.dialect.reads(context) else "",
        run_mesh=file_layout.mesh or goal.mesh,
    )  # fmt: skip


def _decide(source: Checkpoint, target: Target, notes: list[str]) -> Goal:
    """Format, mesh, names and dtype of the output. Raises UsageError for what cannot be asked of them."""
    if target.fuse and target.unfuse:
        raise UsageError("--fuse and --unfuse exclude each other")
    writer, mesh, requested = target_mesh(source.stored, target, notes)
    check_target(target, writer, source)
    target = in_one_dtype(source, target, writer.capabilities, notes)
    dtype = castable(target.dtype)
    version = choose_version(source.stored, target, writer)
    dialect, fused = choose_dialect(source, target, writer)
    context = NamingContext(source.family, source.stored.config, mesh, fused, version)
    return Goal(target, writer, mesh, requested, dtype, dialect, context)


def _named(source: Checkpoint, goal: Goal, selection: Selection, notes: list[str]) -> OutputTensors:
    """The chosen tensors under the names of the output."""
    family = source.family
    everything = parameters(source.catalog)
    views, removed = select(everything, selection, notes)
    if removed[0]:
        notes += lacking(source, [n for n in everything.table if n not in views.table], views.table)
    views, after = renamed(source, goal.target, views, goal.dialect, goal.context, notes)
    _check_overrides(family, {t.name for t in source.stored.tensors} | {*views.table})
    uncut = goal.dialect.uncut(goal.context, after, shapes_of(views), source.stored.whole)
    views.table = {n: views.table[n] for n in family.in_model_order(views.table, after)}
    ruled = list(views.table.values())
    if selection.rename:
        views = rename_by_rules(views, selection.rename)
    notes += views.notes
    names = dict(zip((v.name for v in ruled), views.table, strict=True))
    return OutputTensors(views, ruled, names, after, removed, uncut)


def _not_cast(table: Mapping[str, DerivedTensor], dtype: str) -> list[str]:
    """A note where weights with scales stay what they are, which --dtype does not change."""
    owners = {weight_of(name, table) for name in table}
    coded = [w for w in owners if w is not None and table[w].dtype not in CASTABLE]
    if not coded:
        return []
    return [
        f"{count(len(coded), 'quantized weight')} kept: --dtype does not change them, --dequant {dtype.lower()} does"
    ]


def _with_tied_states(
    source: Checkpoint, tied: Sequence[Tied], equal: list[EqualPair]
) -> tuple[Checkpoint, dict[str, str]]:
    """The checkpoint with the state that a tied tensor has under the name of its copy only, as its owner's; and the
    names of these owners, with those of their copies.

    ``equal`` collects what both have, of which the owner's is written.
    """
    tensors, moved = dict(source.catalog.tensors), {}
    for copy, owner in tied:
        if copy.same is None or owner.same is None:
            continue
        mine, its = copy.same.key.name, owner.same.key.name
        for key in [k for k in tensors if k.name == mine and k.component not in WEIGHTS]:
            to = key._replace(name=its)
            if to in tensors:
                equal.append((tensors[to], tensors[key]))
            else:
                tensors[to] = replace(tensors.pop(key), key=to)
                moved[its] = mine
    return replace(source, catalog=replace(source.catalog, tensors=tensors)), moved


def _with_states_of_both(source: Checkpoint, named: OutputTensors) -> tuple[Checkpoint, dict[str, str]]:
    """The checkpoint with the state and the masters of tied tensors under both of their names, where both are written;
    and the names that have got state, with those that had it.

    Trainers of one process save them under one of the names. In a pipeline the first stage has the embedding and the
    last one the head, each with an optimizer of its own.
    """
    renames = [op for op in named.statements if isinstance(op, Rename)]
    tensors, copied = dict(source.catalog.tensors), {}
    for pair in source.family.ties.items():
        views = [named.views.table.get(reduce(lambda name, op: op.forward(name), renames, n)) for n in pair]
        one, other = (v.same.key.name if v is not None and v.same is not None else "" for v in views)
        for a, b in ((one, other), (other, one)) if one and other else ():
            for key in [k for k in tensors if k.name == a and k.component in ("master_weights", "optimizer")]:
                if (to := key._replace(name=b)) not in tensors:
                    tensors[to] = replace(tensors[key], key=to)
                    copied[b] = a
    return replace(source, catalog=replace(source.catalog, tensors=tensors)), copied


def _request(
    source: Checkpoint, goal: Goal, named: OutputTensors, shares: RankShares, notes: list[str]
) -> WriteRequest:
    """The request to the format's writer."""
    target = goal.target
    config, said = _config(source, goal, named)
    notes += [n for n in said if n not in notes]
    sharding = target.sharding or (source.stored.sharding if goal.writer.capabilities.optimizer_shards else 1)
    if sharding > 1 and target.sharding is None:
        notes.append(f"sharding {sharding}: as the source has it; change it with --sharding-out")
    return WriteRequest(
        ranks=shares.ranks,
        chosen=shares.chosen,
        mesh=goal.mesh,
        requested=goal.requested,
        family=source.family.name,
        dialect=goal.dialect.name,
        fused=goal.context.fused,
        config=config,
        dtype=goal.dtype,
        max_shard_size=target.max_shard_size,
        sharding=sharding,
        sharding_version=target.sharding_version,
        version=goal.context.version,
        training=_training(source, goal, named, shares),
        source=source.stored,
    )


def _config(source: Checkpoint, goal: Goal, named: OutputTensors) -> tuple[dict[str, Any], list[str]]:
    """config.json of the output, and notes about it."""
    views = named.views
    read = {r.source.key.name for v in (*views, *(copy for copy, _ in views.tied)) for r in v.parts}
    held = (k.name for k in source.catalog.tensors)
    config, notes = settled(goal.context.config, held, read, source.family.prediction_field)
    config, more = without_unused(config, source.catalog, read)
    goal = replace(goal, context=goal.context._replace(config=config))
    return target_config(source.dialect, goal, views.table), notes + more


def _training(source: Checkpoint, goal: Goal, named: OutputTensors, shares: RankShares) -> TrainingState | None:
    """What a trainer resumes from, where the output is that of a run; its optimizer may have no state yet, or none."""
    if not goal.target.resumes(goal.writer.capabilities):
        return None
    states = {state: table for (component, state), table in shares.tables.items() if component == "optimizer"}
    counted = {n for state, table in states.items() if state in SCALARS for n in table}
    training = training_of(source, named.views, counted, goal.target.betas)
    if STEP in states and goal.writer.capabilities.counts_steps:
        training = replace(training or TrainingState(), steps=steps_of(source.catalog, states[STEP]))
    return training


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


def _check_overrides(family: Family, names: set[str]) -> None:
    """A --split that matches nothing is a typo."""
    for regex, rule in family.overrides:
        with bounded(rule.origin):
            found = any(regex.search(n) for n in names)
        if not found:
            pattern = rule.origin.split("'")[1].rpartition("=")[0]
            raise UsageError(f"{rule.origin} matches no tensor", hint=nearest_hint(pattern, names))
