"""``ckpttool drop-keys``: the same checkpoint without some of its tensors.

A checkpoint whose format can do so (``DropsInPlace``) keeps its files: those that lose nothing are carried (or
linked), the others are rewritten with what is left in them. Any other is rewritten by the planner of reshard, over the
same ranks. A parameter goes with all of its components.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckpttool.checkpoint import Checkpoint, OpenOptions, open_checkpoint, refuse_empty
from ckpttool.containers.safetensors import read_header
from ckpttool.core.catalog import Catalog, Key, RankTensor, in_order, is_derived, whole_tensor
from ckpttool.core.files import AnyPlace, source_files
from ckpttool.core.geometry import whole
from ckpttool.core.mesh import Mesh
from ckpttool.core.notes import is_kind
from ckpttool.core.words import count
from ckpttool.errors import UsageError
from ckpttool.formats.base import DropsInPlace, Remainder, build_files, file_now
from ckpttool.formats.parts import PipelineParts, parts_of
from ckpttool.formats.registry import reader
from ckpttool.planning.planner import build_plan
from ckpttool.planning.relate import DerivedTensor, TensorTable, identity, parameters
from ckpttool.quant.config import without_unused
from ckpttool.storage.json_file import indented
from ckpttool.storage.listing import WEIGHTS
from ckpttool.targeting.build import Prepared, plan_target
from ckpttool.targeting.lacking import lacking
from ckpttool.targeting.parts import Several
from ckpttool.targeting.prediction import settled
from ckpttool.targeting.select import Selection, removal_note, select
from ckpttool.targeting.sidecars import carried_below
from ckpttool.targeting.target import Target


class DroppedTensor(NamedTuple):
    """One tensor that is left out."""

    name: str
    """As ``inspect --list`` shows it: ``optimizer/PARAMETER/moment1_0``."""
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    """0 for a model weight that is its master weight, rounded: it has no bytes of its own."""
    component: str = "model"


@dataclass(slots=True)
class PreparedDrop:
    """Everything known before a byte is written."""

    target: Prepared
    gone: Sequence[DroppedTensor]
    """What is left out, in the order of the checkpoint."""
    warnings: Sequence[str]
    rewritten: int
    """Files with tensors that are rewritten."""
    carried: int
    """Files with tensors that stay unchanged."""
    dropped: int
    """Files that lose all their tensors."""

    @property
    def freed(self) -> int:
        """Bytes of the tensors that are left out."""
        return sum(g.nbytes for g in self.gone)

    @property
    def components(self) -> dict[str, tuple[int, int]]:
        """(tensors, bytes) that are left out of each component."""
        out: dict[str, tuple[int, int]] = {}
        for g in self.gone:
            tensors, size = out.get(g.component, (0, 0))
            out[g.component] = (tensors + 1, size + g.nbytes)
        return {c: out[c] for c in in_order(out)}


def prepare(src: AnyPlace, options: OpenOptions, selection: Selection, *, link: bool = False) -> PreparedDrop:
    """Plan what is left. Raises a CkptError subclass; nothing is written.

    ``link``: files that stay as they are may share their bytes with the source. UsageError for a format that
    rewrites everything.
    """
    if not selection.remove and not selection.keep:
        raise UsageError("no tensors to drop", hint="name patterns: ckpttool drop-keys SRC DST 'lm_head.*'")
    source = open_checkpoint(src, options)
    refuse_empty(source)
    parts = parts_of(source.stored)
    if parts is not None:
        return _of_parts(source, parts, selection, link=link)
    source = _own(source)
    table = parameters(source.catalog).table
    views, _ = select(parameters(source.catalog), selection, [], option="the pattern")
    lost = {n for n in table if n not in views.table}
    # A parameter goes with all that there is of it: its master weight, the optimizer's states, its average.
    gone = [
        DroppedTensor(str(k), t.dtype, t.shape, 0 if is_derived(source.catalog, k) else t.nbytes, k.component)
        for k, t in source.catalog.tensors.items()
        if k.name in lost
    ]
    warnings = lacking(source, lost, views.table)
    found = reader(source.format)
    rest = found.without(source.stored, source.catalog, lost) if isinstance(found, DropsInPlace) else None
    if rest is not None:
        return _in_place(source, selection, rest, lost, gone, warnings, link=link)
    if link:
        raise UsageError(
            f"--link keeps files that do not change, and {source.format} writes all of them",
            hint="drop --link",
        )
    target = Target(format=source.format) if found.capabilities.sharded else Target()  # one rank stays one rank
    prepared = plan_target(source, target, selection)
    notes = prepared.notes
    notes[:] = [n for n in notes if not is_kind(n, "lacking")]
    if len(gone) > len(lost):
        # reshard counts what its patterns choose, which are parameters.
        said = f"{count(len(lost), 'parameter')} left out, {len(gone):,} tensors of all components"
        notes[:] = [said if is_kind(n, "removed") else n for n in notes]
    if prepared.format == source.format and found.capabilities.default_target:
        notes.append("every file is rewritten, also those that lose nothing")
    written = {t.file for unit in prepared.plan.units for t in unit.stored_tensors}
    return PreparedDrop(prepared, gone, warnings, len(written), 0, 0)


def _of_parts(source: Checkpoint, parts: PipelineParts, selection: Selection, *, link: bool) -> PreparedDrop:
    """Plan the parts that lose something; the others stay as they are."""
    several = Several(source, parts, link=link)
    chosen = several.selections(selection)
    planned = {
        p: prepare(p.place, parts.options(p), chosen[p.name], link=link) for p in parts.chosen if chosen[p.name].keep
    }
    prepared = several.joined({p: one.target for p, one in planned.items()})
    gone = [g._replace(name=p.prefix + g.name) for p, one in planned.items() for g in one.gone]
    warnings = [f"{p.name}: {w}" for p, one in planned.items() for w in one.warnings]
    others = sum(o.carried.endswith(WEIGHTS) for o in prepared.plan.outputs)
    ones = planned.values()
    return PreparedDrop(prepared, gone, warnings, sum(o.rewritten for o in ones), others, sum(o.dropped for o in ones))


def _own(source: Checkpoint) -> Checkpoint:
    """The checkpoint without what only lies beside it, and that its format does not hold: a trainer's optimizer."""
    keep = source.capabilities.components
    if not (left := [c for c in source.components if c not in keep]):
        return source
    tensors = {k: t for k, t in source.catalog.tensors.items() if k.component in keep}
    held = [t for t in source.stored.tensors if t.component in keep]
    files = source.stored.files[: 1 + max([t.file for t in held], default=-1)]  # others come behind them
    return replace(
        source,
        stored=replace(source.stored, tensors=held, files=files, training=None),
        catalog=Catalog(files, tensors, source.catalog.aliases),
        notes=[*source.notes, f"{', '.join(left)} left out: {source.format} holds {', '.join(keep)}"],
    )


def _in_place(
    source: Checkpoint,
    selection: Selection,
    rest: Remainder,
    lost: Collection[str],
    gone: Sequence[DroppedTensor],
    warnings: Sequence[str],
    *,
    link: bool,
) -> PreparedDrop:
    """Plan the same files with fewer tensors, byte for byte what they were: moments that are quantized stay it."""
    notes = list(source.notes)
    stored, root = source.stored, source.stored.root
    rewritten = [k for k in rest.files if k.loses]
    stay = [k for k in rest.files if not k.loses]
    catalog = Catalog([k.file for k in rewritten], {})
    # The same name is in the files of several components, and in those of several ranks.
    several = len(source.capabilities.components) > 1
    removed = len(gone), sum(g.nbytes for g in gone)
    if gone:
        notes.append(f"{count(len(lost), 'parameter')} left out" if several else removal_note(removed))
    ranks: list[list[RankTensor]] = []
    groups = []
    for i, k in enumerate(rewritten):
        tensors = []
        for t in k.tensors:
            key = Key(f"{k.name}: {t.name}" if several else t.name)
            catalog.tensors[key] = whole_tensor(t._replace(file=i), key)
            box = whole(t.shape)
            tensors.append(RankTensor(t.name, t.dtype, t.shape, key.name, t.shape, ((box, box),)))
        ranks.append(tensors)
        groups.append((k.name, i, tensors, read_header(k.file.place).metadata or None))
    literal = [*rest.indexes]
    carried = [(k.name, k.file) for k in stay]
    own = root / "config.json"
    held = {k.name for k in source.catalog.tensors}
    config, said = settled(source.config, held, held.difference(lost), source.family.prediction_field)
    config, more = without_unused(config, source.catalog, held.difference(lost))
    notes += said + more
    if config != (stored.native_config or source.config):
        literal.append((own.name, indented(config)))
    elif own.is_file():
        carried.append((own.name, file_now(own)))
    carried += [(n, file_now(root / n)) for n in stored.companions]
    carried += carried_below(source, {*(n for n, _ in (*carried, *literal)), *(g[0] for g in groups)}, notes)
    plan = build_plan(
        catalog,
        identity(catalog).table,
        ranks,
        build_files(groups, max(1, len(groups))),
        carried=carried,
        literal_files=literal,
        linked={k.name for k in stay} if link else (),
    )
    plan.notes = notes
    left = {
        str(k): DerivedTensor(str(k), t.dtype, t.shape, t)
        for k, t in source.catalog.tensors.items()
        if k.name not in lost
    }
    dtypes = {n: v.dtype for n, v in left.items()}
    prepared = Prepared(
        source, Target(), source.format, Mesh(), source.family, TensorTable(left), plan, "", dtypes, notes,
        removed, selection=selection,
    )  # fmt: skip
    files = len(source_files(stored.files))
    return PreparedDrop(prepared, gone, warnings, len(rewritten), len(stay), files - len(rest.files))
