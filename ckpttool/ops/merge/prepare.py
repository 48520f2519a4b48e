"""From a recipe to a plan, and its execution."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from ckpttool.adapters import changed_parts
from ckpttool.checkpoint import Checkpoint, OpenOptions, open_checkpoint
from ckpttool.core.catalog import Catalog, Key
from ckpttool.core.dtypes import parse
from ckpttool.core.files import AnyPlace, Place
from ckpttool.core.mesh import Mesh
from ckpttool.core.patterns import compile_pattern
from ckpttool.core.plan import Plan, Randomness
from ckpttool.core.words import count, natural, some
from ckpttool.errors import ConflictError, UnsupportedError, UsageError
from ckpttool.execute import Progress, RunOptions, RunResult, run
from ckpttool.execute.verification import Verification
from ckpttool.formats.base import ChecksItself, StoredCheckpoint
from ckpttool.formats.parts import PipelinePart, PipelineParts, parts_of
from ckpttool.formats.registry import is_multi_part, reader
from ckpttool.kernels.merge import METHODS
from ckpttool.kernels.merge.draws import require_torch
from ckpttool.kernels.merge.sparse import drawing
from ckpttool.layout.assemble import LAYER
from ckpttool.layout.family import pick_family
from ckpttool.ops.merge.adapters import Adaptations
from ckpttool.ops.merge.config import TRAINING, merged_config
from ckpttool.ops.merge.fields import in_line
from ckpttool.ops.merge.form import OutputNaming, form_of
from ckpttool.ops.merge.models import MergeInput, Models
from ckpttool.ops.merge.provenance import ONE, PROGRAM_RECORD, RECORD, Origin, Provenance
from ckpttool.ops.merge.renumber import restacked
from ckpttool.ops.merge.tensors import MergeBuilder, Missing, Vocab
from ckpttool.ops.merge.words import VocabularyPlan
from ckpttool.planning.planner import Computed
from ckpttool.recipe.model import ModelRef, Recipe
from ckpttool.recipe.resolve import resolve
from ckpttool.storage.place import parse_place
from ckpttool.targeting.build import Prepared, plan_recoded, plan_target
from ckpttool.targeting.parts import Several, in_part, part_target
from ckpttool.targeting.prediction import settled
from ckpttool.targeting.recode import Recoding
from ckpttool.targeting.select import Selection
from ckpttool.targeting.target import Target, castable
from ckpttool.targeting.verify import look_through
from ckpttool.vocabulary.read import TOKENIZER_FILES

if TYPE_CHECKING:  # of a card and a report, which are rarely asked for
    from ckpttool.execute.measuring import Measurement
    from ckpttool.ops.merge.card import Parents
    from ckpttool.ops.merge.distances import Distances

CARD = "README.md"
FACTOR = re.compile(r"(?:\A|\.)(?:lora|hada|lokr|vera)_")
"""In names of tensors: a factor of a low-rank product."""


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """What flags say beside the recipe."""

    missing: Missing = ""
    vocab: Vocab = ""
    allow_nonfinite: bool = False
    seed: int = 0
    rng: Literal["counter", "mergekit"] = "counter"
    card: bool = False
    dequant: str = ""
    """The dtype that quantized weights count as; "" is what each model's config says."""

    def check_one(self) -> None:
        """Raises UsageError for flags that do nothing where there is one source."""
        usual = MergeOptions(dequant=self.dequant)
        said = [f.name for f in fields(self) if getattr(self, f.name) != getattr(usual, f.name)]
        if said:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in said)
            has = "has" if len(said) == 1 else "have"
            raise UsageError(f"{names} {has} no effect with one source", hint="omit it, or name another source")


@dataclass(slots=True)
class PreparedMerge:
    """Everything known before a byte is written."""

    target: Prepared
    method: str
    provenance: Provenance
    merged: int
    """Tensors that are worked out from several."""
    copied: int
    roots: tuple[str, ...]
    parts: Mapping[PipelinePart, PreparedMerge] = field(default_factory=dict)
    """The merge of each part, for directories of several models."""
    refs: Sequence[ModelRef] = ()
    """The sources, as the recipe names them."""
    parents: Parents | None = None
    """What the card of the merge is made of, where there is to be one."""
    again: str = ""
    """Flags that are needed beside the recipe to make the same."""

    @property
    def plan(self) -> Plan:
        return self.target.plan

    @property
    def single(self) -> bool:
        """Whether the shards of one checkpoint become one, and nothing is worked out."""
        return self.method == ONE


@dataclass(slots=True)
class MergeResult:
    """What ``merge`` reports."""

    prepared: PreparedMerge
    dst: Place
    run: RunResult
    verified: bool = False
    distances: Distances | None = None
    """How far DST is from the sources, if that was measured."""
    hashes: Mapping[str, str] = field(default_factory=dict)
    """Hashes of the sources, by label, where they were read."""


def prepare(
    recipe: Recipe, options: OpenOptions, target: Target, selection: Selection, choices: MergeOptions
) -> PreparedMerge:
    """Plan a merge. Raises a CkptError subclass; nothing is written."""
    if any(is_multi_part(parse_place(r.path), options) for r in recipe.references()):
        return _parts(recipe, options, target, selection, choices)
    selection = replace(selection, remove=(*selection.remove, *recipe.remove_keys))
    refs = recipe.references()
    masters = recipe.component != "model"
    chosen = castable(target.dtype) or recipe.out_dtype or recipe.dtype
    dtype = parse(chosen).name if chosen else ""
    if masters:
        _check_masters(recipe, refs, dtype)
    models = _opened(recipe, refs, options, choices, selection.remove)
    adaptations = Adaptations(models, refs, rounded=recipe.method != "passthrough")
    donor_ref = recipe.base or refs[0]
    donor = models[donor_ref]
    words = VocabularyPlan.of(recipe, models, donor_ref)
    form = form_of(donor.checkpoint, [m.checkpoint for m in models], target.format)
    resolved = resolve(recipe, {r: adaptations.names(r) for r in refs}, layer=LAYER)
    builder = MergeBuilder(
        models,
        adaptations,
        method=recipe.method,
        dtype="F32" if masters else dtype,
        vocab=choices.vocab,
        finite=not choices.allow_nonfinite,
        words=words,
        removed=selection.remove,
    )
    builder.run(resolved, choices.missing)
    config = merged_config(
        restacked(recipe, resolved, models, donor_ref, options.family),
        dequantized=any(models[r].quantized for r in refs),
        untied=any(Key(n, recipe.component) in builder.tensors for n in adaptations.apart),
    )
    config, files = in_line(config, donor, builder.tensors, words, models.notes)
    config, changes = _with_predictions(config, donor, builder)
    models.notes += changes
    if form is None:
        config = donor.checkpoint.dialect.published_config(config)
    provenance = _provenance(recipe, choices, models, adaptations, builder)
    if str(donor_ref) not in {origin.label for origin in provenance.origins}:
        models.notes.append(f"{donor_ref} gives config and tokenizer only: `{recipe.method}` has no base")
    parents = _parents(models, refs, donor_ref) if choices.card else None
    randomness = _randomness(choices, builder, recipe)
    merged = _as_checkpoint(recipe, donor, models, builder, config, options, words, form)
    if choices.card:
        merged.stored.companions = tuple([n for n in merged.stored.companions if n != CARD])
    prepared = plan_target(
        merged,
        replace(target, dtype="" if masters else dtype, format=target.format or _usual(target, form, donor.checkpoint)),
        _with_owners(selection, merged.catalog, models),
        computed=Computed(builder.computed, builder.operands, randomness),
        written=[*(words.files.items() if words is not None else ()), *files],
    )
    provenance.format = prepared.format
    methods = [c.method == "passthrough" and recipe.method != "passthrough" for c in builder.computed]
    return PreparedMerge(
        prepared,
        recipe.method,
        provenance,
        merged=methods.count(False),
        copied=methods.count(True),
        roots=tuple(dict.fromkeys(r.path for r in refs)),
        refs=refs,
        parents=parents,
        again=_flags(choices, target, selection, random=METHODS[recipe.method].random),
    )


def prepare_one(
    src: AnyPlace,
    options: OpenOptions,
    target: Target,
    selection: Selection,
    choices: MergeOptions,
    recoding: Recoding | None = None,
) -> PreparedMerge:
    """Plan how the shards of one checkpoint become one whole checkpoint, or what ``target`` says.

    Paddle's checkpoints keep all components that a unified checkpoint can hold: the result can be trained on.
    Raises UsageError for ``choices`` that only a merge of several has.
    """
    choices.check_one()
    source = open_checkpoint(src, options)
    if parts_of(source.stored) is not None:
        raise UsageError(
            "these are the parts of one pipeline, and there is nothing to merge",
            where=str(src),
            hint="name a second pipeline, or PATH+ADAPTER; `ckpttool reshard` casts and cuts",
        )
    cut = _is_cut(target)
    usual = _kept(source) or source.dialect.whole_format or "hf"
    if source.stored.merged_raw and not target.format and not cut:
        # What Paddle's own merge of such a directory gives: every key under its own name, states included. (What a
        # trainer writes is several such directories, which it does not merge.)
        source = open_checkpoint(src, replace(options, mesh=replace(options.mesh, raw=True)))
        usual = "hf"
        if source.family.name == "none":  # names and orientation stay, so that it does not matter whose they are
            source.stored.dialect = "hf"
    whole = target if cut else replace(target, tp=1, pp=1, ep=1, etp=1, format=target.format or usual)
    origin = Origin(str(src), str(src), source.format, _files(source), len(source.catalog))
    if recoding is None:
        prepared = plan_target(source, whole, selection)
    else:
        prepared = plan_recoded(source, recoding, whole, selection)
    provenance = Provenance({"merge_method": ONE}, "", None, "", [origin])
    provenance.format = prepared.format
    return PreparedMerge(prepared, ONE, provenance, 0, len(prepared.views), (str(src),))


def execute(
    prepared: PreparedMerge,
    dst: AnyPlace,
    options: RunOptions,
    progress: Progress,
    *,
    verify: bool = False,
    measure: bool = False,
) -> MergeResult:
    """Write DST, and with ``measure`` find out how far it is from the sources.

    Raises OutputError, CorruptError, UsageError for what cannot be measured, or VerifyError when ``verify`` finds a
    difference.
    """
    place = parse_place(dst)
    measurement = _measurement(prepared, options) if measure else None
    target, plan = prepared.target, prepared.plan
    record = PROGRAM_RECORD if isinstance(reader(target.format), ChecksItself) else RECORD
    late: dict[str, Callable[[Mapping[str, str]], bytes]] = {}
    first = 0
    for part, one in prepared.parts.items():
        late[part.folder + RECORD] = partial(_record_of, one, first)
        first += len(one.plan.units)
    hashes: dict[str, str] = {}
    if not late:
        late[record] = partial(prepared.provenance.record, plan)
    if prepared.parents is not None:
        late[CARD] = partial(_card, prepared, place.name or "merge", measurement)
    if measurement is not None:
        late[record] = partial(_noted, prepared, hashes)
    check = Verification(partial(look_through, target), options.memory, options.connections)
    options = replace(
        options,
        source_roots=prepared.roots,
        late_files=late,
        verify=check if verify else None,
        measure=measurement,
        prove=check,
    )
    result = run(plan, place, options, progress)
    return MergeResult(prepared, place, result, result.verified, _distances(prepared, measurement), hashes)


def _noted(prepared: PreparedMerge, hashes: dict[str, str], digests: Mapping[str, str]) -> bytes:
    """The record; what the sources' hashes are goes into ``hashes``."""
    found = prepared.provenance.hashes(prepared.plan, digests)
    hashes |= {label: digest for label, (_, digest) in found.items()}
    return prepared.provenance.record(prepared.plan, digests)


def check_measurable(prepared: PreparedMerge, options: RunOptions) -> None:
    """Raises UsageError for a merge whose result is not compared with its sources."""
    hint = "omit it; `ckpttool inspect --html` has a report on a checkpoint"
    if prepared.single:
        raise UsageError("--report says how far a merge is from its sources, and there is one source", hint=hint)
    if prepared.parts:
        what = "--report is for one model, and the sources are directories of several"
        raise UsageError(what, hint="merge one part of them: PIPELINE/transformer")
    if options.member is not None:
        raise UsageError("--report and --part I/N exclude each other", hint="use --on, or one process")


def _measurement(prepared: PreparedMerge, options: RunOptions) -> Measurement:
    from ckpttool.execute.measuring import Measurement  # which no other merge needs

    check_measurable(prepared, options)
    return Measurement(prepared.plan, options.memory, options.connections)


def _distances(prepared: PreparedMerge, measurement: Measurement | None) -> Distances | None:
    if measurement is None:
        return None
    from ckpttool.ops.merge.distances import Distances

    p = prepared.provenance
    return Distances(measurement.found, p.operands, [o.label for o in p.origins])


def _card(prepared: PreparedMerge, name: str, measurement: Measurement | None, digests: Mapping[str, str]) -> bytes:
    """The model card; with distances when they are measured, which is after it is written for the first time."""
    from ckpttool.ops.merge.card import Subject, card, recipe_text
    from ckpttool.ops.merge.origins import came_from, short_names

    assert prepared.parents is not None  # noqa: S101 - asked before
    provenance, target = prepared.provenance, prepared.target
    file = "merge_config.json" if recipe_text(provenance)[1] == "json" else "merge.yml"
    subject = Subject(
        name,
        provenance,
        came_from(prepared.plan, provenance.operands, prepared.method),
        prepared.parents,
        "transformers" if "from_pretrained" in target.usage and not target.removed[0] else "",
        f"ckpttool merge {file} -o {shlex.quote(name)}{prepared.again}",
        short_names(prepared.refs),
        short_names([ModelRef(p) for r in prepared.refs for p in (r.path, *r.adapters)]),
    )
    hashes = {label: digest for label, (_, digest) in provenance.hashes(prepared.plan, digests).items()}
    found = _distances(prepared, measurement) if measurement is not None and measurement.found else None
    return card(subject, hashes, found)


def _record_of(one: PreparedMerge, first: int, digests: Mapping[str, str]) -> bytes:
    """The record of a part whose units are those from ``first`` on."""
    mine = {}
    for key, digest in digests.items():
        unit, colon, rest = key.partition(":")
        if unit.isdecimal() and int(unit) >= first:
            mine[f"{int(unit) - first}{colon}{rest}"] = digest
    return one.provenance.record(one.plan, mine)


def _parts(
    recipe: Recipe, options: OpenOptions, target: Target, selection: Selection, choices: MergeOptions
) -> PreparedMerge:
    """Merge directories of several models, part by part."""
    _check_parts(recipe, choices)
    refs = recipe.references()
    opened = {r.path: open_checkpoint(r.path, options) for r in refs}
    held = {path: parts_of(c.stored) for path, c in opened.items()}
    known = {path: parts for path, parts in held.items() if parts is not None}
    donor = opened[(recipe.base or refs[0]).path]
    mine = parts_of(donor.stored)
    if mine is None or len(known) < len(held):
        alone = next(p for p, parts in held.items() if parts is None)
        raise ConflictError(
            "one source is a directory of several models, and another one is a single model",
            where=[next(iter(known)), alone],
            hint=f"name the part that {alone} is merged with: PIPELINE/transformer",
        )
    names = {path: [p.name for p in parts.chosen] for path, parts in known.items()}
    for path, found in names.items():
        if odd := sorted(set(found) ^ {p.name for p in mine.chosen}):
            raise ConflictError(
                f"the sources have different parts: not all have {odd[0]}",
                where=[str(donor.path), path],
                hint="choose those that they share: --part NAME",
            )
    target = part_target(donor, mine, target)
    several = Several(donor, mine)
    selections = several.selections(replace(selection, remove=(*selection.remove, *recipe.remove_keys)))
    merged: dict[PipelinePart, PreparedMerge] = {}
    changed = _changed(refs, mine)
    for part in mine.chosen:
        of_part = recipe.mapped(partial(_at_part, known, part.name, changed))
        (first, *others) = of_part.references()
        same = not (first.adapters or others or selections[part.name].keep)
        if same and target == part_target(donor, mine, Target()):
            continue  # no adapter changes it
        merged[part] = prepare(
            replace(of_part, remove_keys=()), mine.options(part), in_part(part, target), selections[part.name], choices
        )
    ones = list(merged.values())
    return PreparedMerge(
        several.joined({p: one.target for p, one in merged.items()}),
        recipe.method,
        ones[0].provenance,
        merged=sum(one.merged for one in ones),
        copied=sum(one.copied for one in ones),
        roots=tuple(dict.fromkeys(r.path for r in refs)),
        parts=merged,
    )


def _check_parts(recipe: Recipe, choices: MergeOptions) -> None:
    """Raises UsageError for what is said of one model."""
    layers = any(s.layers is not None for piece in recipe.slices for s in piece.sources)
    draws = choices.rng == "mergekit" and METHODS[recipe.method].random
    wrong = "slices" if layers else "tokenizer" if recipe.tokenizer or recipe.chat_template else ""
    wrong = wrong or ("--rng mergekit" if draws else "--card" if choices.card else "")
    if wrong:
        raise UsageError(
            f"{wrong} is for one model, and the sources are directories of several",
            where=recipe.name,
            hint="merge one part of them: PIPELINE/transformer",
        )


def _changed(refs: Sequence[ModelRef], parts: PipelineParts) -> dict[str, set[str]]:
    """The parts that each adapter changes. Raises ConflictError for one that is not there, and UnsupportedError for an
    adapter that does not say which part it is for."""
    names = [p.name for p in parts.all]
    found: dict[str, set[str]] = {}
    for path in (a for r in refs for a in r.adapters):
        said = changed_parts(path)
        if said is None or () in said:
            raise UnsupportedError(
                "the adapter does not say which part of a pipeline it is for",
                where=path,
                hint="give that part: PIPELINE/transformer+ADAPTER",
            )
        if lacking := next((p for p in said if not set(p) & set(names)), None):
            raise ConflictError(
                f"the adapter changes {' or '.join(lacking)}, which the pipeline does not have",
                where=path,
                hint="parts with weights: " + ", ".join(names),
            )
        found[path] = {n for p in said for n in p}
        if left := sorted(found[path] & set(names) - {p.name for p in parts.chosen}):
            raise UsageError(
                f"the adapter changes {left[0]} too, which --part leaves out", where=path, hint="drop --part"
            )
    return found


def _at_part(known: Mapping[str, PipelineParts], name: str, changed: Mapping[str, set[str]], ref: ModelRef) -> ModelRef:
    """The model that is the part of this name, with the adapters that change it."""
    place = next(p.place for p in known[ref.path].chosen if p.name == name)
    weights = ref.weights or (1.0,) * len(ref.adapters)
    mine = [(a, w) for a, w in zip(ref.adapters, weights, strict=True) if name in changed[a]]
    return replace(ref, path=str(place), adapters=tuple(a for a, _ in mine), weights=tuple(w for _, w in mine))


def _is_cut(target: Target) -> bool:
    """Whether the target is to have more than one rank."""
    return any(n > 1 for n in target.from_flags().values()) or bool(target.pp_layout)


def _files(checkpoint: Checkpoint) -> list[tuple[str, int]]:
    return [(f.place.name, f.size) for f in checkpoint.catalog.files]


def _kept(checkpoint: Checkpoint) -> str:
    """The format, where what comes of its tensors can only be the same again; else ""."""
    return checkpoint.format if checkpoint.is_program else ""


def _usual(target: Target, form: OutputNaming | None, donor: Checkpoint) -> str:
    """The format when --to does not say one; "" leaves it to the ranks that are asked for."""
    if kept := _kept(donor):
        return kept
    return donor.dialect.whole_format if form is not None else "" if _is_cut(target) else "hf"


def _check_masters(recipe: Recipe, refs: Sequence[ModelRef], dtype: str) -> None:
    """Raises for what cannot be asked of a merge of master weights."""
    if dtype not in ("", "F32"):
        raise UsageError(
            f"master weights are float32, and {dtype} is asked for",
            where=recipe.name,
            hint="drop --dtype, or merge the model weights: merge_prefix `model`",
        )
    for ref in refs:
        if ref.adapters:
            raise UnsupportedError(
                "an adapter is added to model weights, and the recipe merges the master weights",
                where=[recipe.name, *ref.adapters],
                hint="omit merge_prefix",
            )


def _opened(
    recipe: Recipe, refs: Sequence[ModelRef], options: OpenOptions, choices: MergeOptions, removed: Sequence[str]
) -> Models:
    """The models of the recipe. Raises for what cannot be done with them."""
    models = Models(options, recipe.component, choices.dequant, removed)
    models.open(refs)
    if recipe.method != "passthrough":
        _check_factors(models, refs)
    if choices.dequant and not any(models[r].quantized for r in refs):
        raise UsageError("--dequant: no weight of the sources is quantized", hint="--dtype chooses the output's dtype")
    return models


def _check_factors(models: Models, refs: Sequence[ModelRef]) -> None:
    """Raises UnsupportedError for the factors of adapters: the mean of two products is not the product of the means."""
    for ref in refs:
        if name := next((n for n in models[ref].views if FACTOR.search(n)), None):
            raise UnsupportedError(
                "the source is an adapter: merging its factors one by one does not merge what they stand for",
                where=[ref.path, f"tensor `{name}`"],
                hint="merge the adapted models, each with the base: BASE+ADAPTER, once for each adapter",
            )


def _provenance(
    recipe: Recipe, choices: MergeOptions, models: Models, adaptations: Adaptations, builder: MergeBuilder
) -> Provenance:
    """What the record of the merge says, but for what it was written as."""
    random = METHODS[recipe.method].random
    used = {label for names in builder.names.values() for label, _ in names}
    origins = [_origin(r, models[r], adaptations) for r in recipe.references() if str(r) in used]
    seed, rng = (choices.seed, choices.rng) if random else (None, "")
    return Provenance(recipe.record(), recipe.text, seed, rng, origins, builder.names, recipe.component)


def _origin(ref: ModelRef, model: MergeInput, adaptations: Adaptations) -> Origin:
    checkpoint = model.checkpoint
    held, adapters = _files(checkpoint), adaptations.hashes(ref)
    return Origin(str(ref), model.label, checkpoint.format, held, len(model.views), adapters, model.derived)


def _randomness(choices: MergeOptions, builder: MergeBuilder, recipe: Recipe) -> Randomness | None:
    """Where the draws come from. All tensors of the merge count, also those that are not written.

    mergekit takes them in the order of the names of what they are made from, the last of each (``graph.py`` and
    ``io/tasks.py``, 0.1.5). Of two that are made from tensors of one name, the order of a set of Python's decides: a
    note says so. Raises UsageError where they need torch, which is not installed: here, before anything is written.
    """
    if not METHODS[recipe.method].random:
        return None
    order = []
    last = {name: max(of for _, of in sources) for name, sources in builder.names.items()}
    for c in sorted(builder.computed, key=lambda c: (last[c.name], natural(c.name))):
        if METHODS[c.method].random:
            draws = drawing(c.method, [dict(p) for p in c.parameters])
            working = recipe.dtype or builder.common[c.name]
            order.append((c.name, prod(c.shape), tuple(draws), working))
            if METHODS[c.method].sorts_with_torch and working == "F32" and choices.rng == "mergekit" and any(draws):
                require_torch(c.method)
    times = Counter(last[name] for name, _, draws, _ in order if any(draws))
    if choices.rng == "mergekit" and (again := [n for n, _, draws, _ in order if any(draws) and times[last[n]] > 1]):
        builder.notes.append(
            f"--rng mergekit: {count(len(again), 'tensor')} of layers that are used more than once may get each"
            " other's random numbers: mergekit's order of them is not known"
        )
    return Randomness(choices.rng, choices.seed, tuple(order))


def _with_predictions(
    config: dict[str, Any], donor: MergeInput, builder: MergeBuilder
) -> tuple[dict[str, Any], list[str]]:
    """The config with as many prediction layers as slices and ``--missing`` leave of the donor's, and notes."""
    was = donor.checkpoint
    return settled(config, donor.views, (k.name for k in builder.tensors), was.family.prediction_field, was=was.config)


def _as_checkpoint(
    recipe: Recipe,
    donor: MergeInput,
    models: Models,
    builder: MergeBuilder,
    config: dict[str, Any],
    options: OpenOptions,
    words: VocabularyPlan | None,
    form: OutputNaming | None,
) -> Checkpoint:
    """The merged model as if it were a checkpoint: what reshard can write, merge can write."""
    old = donor.checkpoint.stored
    notes = [*recipe.notes, *models.notes, *(words.notes if words else ()), *builder.notes]
    companions = [n for n in old.companions if n != RECORD and not (words and n in TOKENIZER_FILES)]
    run = [n for n in companions if TRAINING.fullmatch(n)]
    if run:
        notes.append(f"not copied, a merge is not a training run: {some(run)}")
    kind = _kept(donor.checkpoint) or (donor.checkpoint.dialect.whole_format if form else "hf")
    stored = StoredCheckpoint(
        kind,
        old.root,
        models.files,
        [],
        Mesh(),
        dialect=old.dialect if form or models.as_they_are else "hf",
        fused=old.fused if models.as_they_are else "",
        config=config,
        companions=tuple([n for n in companions if n not in run]),
        native_config=old.native_config or (old.config if config != old.config else {}),
        native=old.native if old.format == kind else None,
        beside=old.beside,
        known=old.known,
    )
    family = pick_family(options.family, old.family, config)
    tensors = form.of(builder.tensors, family) if form else builder.tensors
    catalog = Catalog(models.files, tensors)
    ties = [(Key(copy), Key(owner)) for copy, owner in family.ties.items()]
    catalog.aliases = {copy: owner for copy, owner in ties if copy not in tensors and owner in tensors}
    return Checkpoint(donor.checkpoint.path, stored, family, catalog, notes, form.ops if form else ())


def _with_owners(selection: Selection, catalog: Catalog, models: Models) -> Selection:
    """The patterns, where those that name nothing but a tied tensor that is not written mean what is in its place:
    to keep one keeps the owner, and to remove a copy removes nothing more."""
    names = [k.name for k in catalog.tensors]
    ties = {copy: owner for model in models for copy, owner in model.ties.items() if copy not in names}

    def owners(pattern: str) -> set[str]:
        rx = compile_pattern(pattern)
        return set() if any(rx.search(n) for n in names) else {o for c, o in ties.items() if rx.search(c)}

    keep = [p for pattern in selection.keep for p in sorted(owners(pattern)) or [pattern]]
    return replace(selection, remove=[p for p in selection.remove if not owners(p)], keep=keep)


def _parents(models: Models, refs: Sequence[ModelRef], donor: ModelRef) -> Parents:
    """What the models say of themselves, for the card of the merge."""
    from ckpttool.ops.merge.card import ModelCard, Parents, hub_names

    cards = {str(r): ModelCard.at(models[r].checkpoint.stored.root) for r in refs}
    return Parents(cards, str(donor), hub_names(path for r in refs for path in (r.path, *r.adapters)))


def _flags(choices: MergeOptions, target: Target, selection: Selection, *, random: bool) -> str:
    """The flags that change what is written and that no recipe has."""
    values: list[tuple[str, object]] = [
        ("--seed", choices.seed if random else 0),
        ("--rng", choices.rng if random and choices.rng != "counter" else ""),
        ("--missing", choices.missing),
        ("--vocab", choices.vocab),
        ("--dequant", choices.dequant),
        ("--dtype", target.dtype),
        ("--to", target.format),
        ("--max-shard-size", target.max_shard_size),
        *[(f"--{name}-out", n) for name, n in target.from_flags().items()],
        *[("--remove-keys", p) for p in selection.remove],
        *[("--keep-keys", p) for p in selection.keep],
        *[("--rename", p) for p in selection.rename],
    ]
    flags = [name for name, wanted in (("--allow-nonfinite", choices.allow_nonfinite),) if wanted]
    words = [w for name, value in values if value for w in (name, str(value))]
    return "".join(f" {shlex.quote(w)}" for w in [*words, *flags])
