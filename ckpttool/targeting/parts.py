"""Directories of several models (``formats/parts.py``): each part is planned by itself, and all plans become one.

So a part is written as it would be if it were SRC, and the directory is whole or absent as any other output.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from ckpttool.checkpoint import Checkpoint, open_checkpoint
from ckpttool.core.files import DataFile, Place
from ckpttool.core.mesh import Mesh
from ckpttool.core.patterns import exactly
from ckpttool.core.plan import (
    Adapted,
    AssertEqual,
    AssertPadding,
    Block,
    Compute,
    Copy,
    Fill,
    Gathered,
    Operand,
    Output,
    Plan,
    Quantize,
    Randomness,
    Scaled,
    SourceFile,
    Step,
    StoredOperand,
    Unit,
    Units,
)
from ckpttool.core.words import some
from ckpttool.errors import ConflictError, UsageError
from ckpttool.formats.base import file_now
from ckpttool.formats.parts import ROOT, PipelinePart, PipelineParts, parts_of
from ckpttool.formats.registry import writer
from ckpttool.planning.relate import DerivedTensor, TensorTable, parameters
from ckpttool.storage.below import files_below
from ckpttool.storage.listing import WEIGHTS, list_source
from ckpttool.targeting.build import Prepared, plan_recoded, plan_target
from ckpttool.targeting.promote import promoted, unused_masters
from ckpttool.targeting.recode import Recoded, Recoding, is_quantized
from ckpttool.targeting.select import Selection, select
from ckpttool.targeting.target import Target


def plan_parts(source: Checkpoint, target: Target, selection: Selection, recoding: Recoding | None = None) -> Prepared:
    """Plan how ``source`` becomes ``target``, with its weights in another precision if there is a ``recoding``; for a
    directory of several models, part by part.

    Raises UsageError for what cannot be done to all parts and was not asked of some, and what planning one raises.
    """

    def plan(one: Checkpoint, target: Target, chosen: Selection) -> Prepared:
        given = one
        one, target = promoted(one, target)
        if recoding is not None:
            return plan_recoded(one, recoding, target, chosen)
        planned = plan_target(one, target, chosen)
        if one is given:
            planned.notes += unused_masters(one, planned.source.catalog, planned.dtype)
        return planned

    parts = parts_of(source.stored)
    if parts is None:
        return plan(source, target, selection)
    target = part_target(source, parts, target)
    several = Several(source, parts)
    chosen: Sequence[PipelinePart] = parts.chosen
    if recoding is not None and recoding.scheme is not None:
        chosen = several.models()
    selections = several.selections(selection)
    opened = {p: several.open(p) for p in chosen}
    if recoding is not None and recoding.scheme is None and any(map(is_quantized, opened.values())):
        opened = {p: c for p, c in opened.items() if is_quantized(c)}
    return several.joined({p: plan(c, in_part(p, target), selections[p.name]) for p, c in opened.items()})


def part_target(source: Checkpoint, parts: PipelineParts, target: Target) -> Target:
    """What each part becomes. Raises UsageError for a target that only one model can have."""
    wrong = [f"--{k}-out {v}" for k, v in target.from_flags().items() if v != 1]
    wrong += ["--pp-layout"] if target.pp_layout else []
    wrong += ["--ranks-out"] if target.ranks is not None else []
    if target.format and not writer(target.format).capabilities.keeps_form:
        wrong.append(f"--to {target.format}")
    wrong += ["--aoa"] if target.aoa is not None else []
    if wrong:
        _refuse(source, parts, f"{wrong[0]} is for one model")
    return replace(target, format=target.format or "hf")


def in_part(part: PipelinePart, target: Target) -> Target:
    """The target of one part: what is not a model has one file, or its software would not find it."""
    return target if part.is_model else replace(target, max_shard_size=None)


def _refuse(source: Checkpoint, parts: PipelineParts, why: str) -> NoReturn:
    root = source.stored.root
    alone = [str(root / p.name) for p in parts.chosen if p.name != ROOT]
    hint = f"give one as SRC: {' or '.join(alone)}" if alone else ""
    if any(p.name == ROOT for p in parts.all):
        hint = f"--from {parts.chosen[0].format or 'hf'} reads the model in {root} alone" + (
            f"; or {hint}" if hint else ""
        )
    raise UsageError(f"{why}, and SRC has {len(parts.all)} parts: {_names(parts.all)}", where=str(root), hint=hint)


def _names(parts: Iterable[PipelinePart]) -> str:
    return ", ".join(p.name for p in parts)


@dataclass(slots=True)
class Several:
    """A directory of several models, and what becomes of it."""

    source: Checkpoint
    parts: PipelineParts
    link: bool = False
    """Files that stay as they are may share their bytes with the source."""
    notes: list[str] = field(default_factory=list)

    def open(self, part: PipelinePart) -> Checkpoint:
        """One part by itself."""
        return open_checkpoint(part.place, self.parts.options(part))

    def models(self) -> list[PipelinePart]:
        """The parts that are quantized: those that were asked for by name, or the only model.

        Raises UsageError when there are several, which nobody wants all of.
        """
        chosen = list(self.parts.chosen)
        if self.parts.named or len(chosen) == 1:
            return chosen
        found = [p for p in chosen if p.is_model]
        if len(found) != 1:
            every = " ".join(f"--part {p.name}" for p in self.parts.all)
            first = next((p.name for p in found if p.name in ("transformer", "unet")), self.parts.all[0].name)
            raise UsageError(
                f"which of the {len(self.parts.all)} parts of SRC are to be quantized? {_names(self.parts.all)}",
                where=str(self.source.path),
                hint=f"choose with --part {first}; all of them: {every}",
            )
        self.notes.append(f"quantized: {found[0].name}, the only part whose config.json names a model (--part: others)")
        return found

    def selections(self, selection: Selection) -> dict[str, Selection]:
        """What patterns over the names of all parts mean for each, by its name.

        Raises UsageError for a pattern without a match, and for a part of which nothing would be left.
        """
        if selection.rename:
            _refuse(self.source, self.parts, "--rename is for one model")
        table = parameters(self.source.catalog)
        views, _ = select(table, selection, [])
        out = {}
        for part in self.parts.chosen:
            mine = {n: n in views.table for n in table.table if self.owner(n) == part}
            if not any(mine.values()):
                raise UsageError(
                    f"no tensor of the part {part.name} is left",
                    where=str(part.place),
                    hint="a directory of this form has all of its parts",
                )
            names = {n.removeprefix(part.prefix): kept for n, kept in mine.items()}
            out[part.name] = Selection() if all(names.values()) else Selection(keep=exactly(names))
        return out

    def owner(self, name: str) -> PipelinePart:
        """The part that a tensor is of."""
        named = [p for p in self.parts.chosen if p.prefix and name.startswith(p.prefix)]
        return named[0] if named else next(p for p in self.parts.chosen if p.name == ROOT)

    def joined(self, planned: Mapping[PipelinePart, Prepared]) -> Prepared:
        """All of it as one: what was planned, every other part as it is, and the files beside them."""
        notes = [*self.source.notes, *self.notes]
        views: dict[str, DerivedTensor] = {}
        dtypes: dict[str, str] = {}
        for part, one in planned.items():
            views |= {part.prefix + v.name: replace(v, name=part.prefix + v.name) for v in one.views}
            dtypes |= {part.prefix + n: d for n, d in one.dtypes.items()}
            said = set(self.source.notes)
            notes += [n for n in (f"{part.name}: {n}" for n in one.notes) if n not in said]
        for part in self.parts.chosen:
            if part not in planned:
                same = {n: v for n, v in parameters(self.source.catalog).table.items() if self.owner(n) == part}
                views |= same
                dtypes |= {n: v.dtype for n, v in same.items()}
        carried = self._carried(planned, notes)
        plan = join_plans([(p, one.plan) for p, one in planned.items()], carried)
        if left := [p for p in self.parts.all if p not in planned]:
            notes.append(f"as they are: {_names(left)}")
        plan.notes = notes
        ones = list(planned.values())
        removed = (sum(one.removed[0] for one in ones), sum(one.removed[1] for one in ones))
        dtype = next((one.dtype for one in ones), "")
        return Prepared(
            self.source, Target(), self.source.format, Mesh(), self.source.family, TensorTable(views), plan, dtype,
            dtypes, notes, removed, recoded=(recoded := _recoded(ones)),
            usage="" if recoded is not None and recoded.scheme is not None else self.parts.usage,
            parts={p.folder: one for p, one in planned.items()},
        )  # fmt: skip

    def _carried(self, planned: Mapping[PipelinePart, Prepared], notes: list[str]) -> list[Output]:
        """Every file that is written as it is, but for what belongs to the parts that are planned."""
        root = self.source.stored.root
        out = []
        for part in self.parts.all:
            if part not in planned:
                out += self._whole(part, notes)
        if any(p.name == ROOT for p in self.parts.all):
            return out  # what lies beside the parts goes with that one
        beside = [*self.source.stored.companions, *(["config.json"] if (root / "config.json").is_file() else [])]
        below = files_below(root, [p.place / "config.json" for p in self.parts.all])
        if below.left:
            notes.append(f"not copied from subdirectories: {some(list(map(str, below.left)), 8)}")
        return [*out, *(_output(n, root / n) for n in (*beside, *below.carried))]

    def _whole(self, part: PipelinePart, notes: list[str]) -> list[Output]:
        """All files of a part, of whatever size."""
        listing = list_source(part.place)
        notes += [
            f"{part.folder}{n} is left out: it is a link out of the part, to {to}" for n, to in listing.away.items()
        ]
        names = [n for n in listing.names if not n.startswith(".")]
        others = [p.place / "config.json" for p in self.parts.all if p.name != ROOT] if part.name == ROOT else []
        below = files_below(part.place, others)
        if below.left:
            notes.append(f"not copied from subdirectories of {part.name}: {some(list(map(str, below.left)), 8)}")
        return [
            _output(part.folder + n, part.place / n, link=self.link and n.endswith(WEIGHTS))
            for n in (*names, *below.carried)
        ]


def _output(name: str, place: Place, *, link: bool = False) -> Output:
    file: DataFile = file_now(place)
    return Output(name, file.size, (), str(place), link, file.tag)


def _recoded(ones: Sequence[Prepared]) -> Recoded | None:
    """What was done to the weights of all parts."""
    found = [one.recoded for one in ones if one.recoded is not None]
    if not found:
        return None
    kept: dict[str, int] = {}
    for r in found:
        for why, n in r.kept.items():
            kept[why] = kept.get(why, 0) + n
    return replace(
        found[0],
        quantized=sum(r.quantized for r in found),
        dequantized=sum(r.dequantized for r in found),
        same=sum(r.same for r in found),
        kept=kept,
    )


# -- plans


def join_plans(plans: Iterable[tuple[PipelinePart, Plan]], carried: Iterable[Output]) -> Plan:
    """One plan with the steps of all: files of a part lie in its directory."""
    sources: list[SourceFile] = []
    outputs: list[Output] = []
    units = Units()
    tensors: list[int] = []
    randomness: Randomness | None = None
    for part, plan in plans:
        move = _StepMover(len(sources), len(outputs))
        for unit in plan.units:
            units.append(move.unit(unit, part.prefix))
        tensors += [f + len(outputs) for files in plan.ranks for f in files]
        sources += plan.sources
        outputs += [replace(o, name=part.folder + o.name) for o in plan.outputs]
        if plan.randomness is not None:
            before = randomness.order if randomness is not None else ()
            randomness = plan.randomness._replace(order=(*before, *plan.randomness.order))
    outputs += carried
    names = [o.name for o in outputs]
    if twice := next((n for n in names if names.count(n) > 1), ""):
        raise ConflictError(f"two files of the output would be {twice}")
    return Plan(sources, outputs, units, [], [tensors], randomness)


@dataclass(frozen=True, slots=True)
class _StepMover:
    """Puts the steps of one plan into another one, behind its files."""

    sources: int
    outputs: int

    def unit(self, unit: Unit, prefix: str) -> Unit:
        targets = tuple([t._replace(file=t.file + self.outputs) for t in unit.stored_tensors])
        return Unit(prefix + unit.name, tuple(map(self.step, unit.steps)), targets)

    def step(self, step: Step) -> Step:
        match step:
            case Copy():
                return step._replace(src=self._read(step.src), dst=self._written(step.dst))
            case Fill():
                return step._replace(dst=self._written(step.dst))
            case AssertEqual():
                return step._replace(a=self._read(step.a), b=self._read(step.b))
            case AssertPadding():
                return step._replace(src=self._read(step.src), like=step.like and self._read(step.like))
            case Compute():
                models = tuple(map(self.operand, step.models))
                base = step.base and self.operand(step.base)
                return step._replace(models=models, base=base, outputs=self._results(step.outputs))
            case Quantize():
                results = tuple([r._replace(outputs=self._results(r.outputs)) for r in step.results])
                beside = tuple(map(self.operand, step.beside))
                return step._replace(operand=self.operand(step.operand), results=results, beside=beside)

    def operand(self, operand: Operand) -> Operand:
        match operand:
            case StoredOperand():
                return self._stored(operand)
            case Scaled():
                factor = operand.factor and self._stored(operand.factor)
                return operand._replace(
                    weight=self._stored(operand.weight), scale=self._stored(operand.scale), factor=factor
                )
            case Adapted():
                terms = [t._replace(up=self._stored(t.up), down=self._stored(t.down)) for t in operand.terms]
                return operand._replace(weight=self.operand(operand.weight), terms=tuple(terms))
            case Gathered():
                return operand._replace(sources=tuple(map(self.operand, operand.sources)))

    def _stored(self, operand: StoredOperand) -> StoredOperand:
        return operand._replace(copies=tuple([c._replace(src=self._read(c.src)) for c in operand.copies]))

    def _results(self, copies: tuple[Copy, ...]) -> tuple[Copy, ...]:
        return tuple([c._replace(dst=self._written(c.dst)) for c in copies])

    def _read(self, block: Block) -> Block:
        return block._replace(file=block.file + self.sources)

    def _written(self, block: Block) -> Block:
        return block._replace(file=block.file + self.outputs)
