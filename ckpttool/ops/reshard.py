"""``ckpttool reshard``: the same tensors for another mesh, another format or another naming.

open SRC -> views (names, fusions, selections) -> ranks of DST -> skeleton -> plan -> execute -> verify
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from math import lcm
from pathlib import Path, PurePosixPath
from typing import Any

from ckpttool.aoa import apply_aoa, read_aoa
from ckpttool.catalog import Catalog, DataFile, Key, RankTensor, RankTensors, StoredTensor
from ckpttool.checkpoint import Checkpoint, OpenOptions, assemble, naming_transforms, open_checkpoint
from ckpttool.dtypes import CASTABLE, parse
from ckpttool.errors import ConflictError, LayoutError, UsageError, VerifyError
from ckpttool.execute import Advance, Progress, RunOptions, RunResult, run
from ckpttool.execute.compare import compare_views
from ckpttool.execute.compute import verify_computed
from ckpttool.formats.base import (
    Capabilities,
    FileLayout,
    Format,
    ReadOptions,
    TransposedOnDisk,
    WriteRequest,
    file_now,
)
from ckpttool.formats.config import quantization
from ckpttool.formats.paddle.config import (
    TRAINER_FILES,
    TRANSPOSED,
    base_prefix,
    module_of,
    published_config,
    software,
    with_fused_flags,
)
from ckpttool.formats.registry import by_name, read_source
from ckpttool.geometry import Box
from ckpttool.layout import paddle
from ckpttool.layout.assemble import EXPERT
from ckpttool.layout.family import Family, Tie, Transform, inverse
from ckpttool.layout.packed import NAMINGS, find_packing
from ckpttool.layout.partition import Partitioner
from ckpttool.layout.rules import PartitionContext
from ckpttool.mesh import Mesh, default_etp
from ckpttool.ops.account import Account
from ckpttool.ops.components import WEIGHTS, chosen_components, share_of
from ckpttool.ops.recode import Recoded, Recoding, recode
from ckpttool.plan import Plan
from ckpttool.planner import Computed, build_plan, output_dtype
from ckpttool.quant.config import DTYPE_FIELDS, with_fields
from ckpttool.relate import (
    DerivedTensor,
    EqualPair,
    TensorTable,
    apply_transforms,
    keep,
    parameters,
    permute,
    propagate_to_component,
    rename_by_rules,
)
from ckpttool.select import bounded, matching, nearest_hint
from ckpttool.storage.below import files_below
from ckpttool.storage.json_file import indented
from ckpttool.storage.listing import is_index
from ckpttool.words import count, some

PARALLEL_FIELDS = {
    "tp": (
        "tensor_parallel_degree",
        "tensor_model_parallel_size",
        "tensor_parallel_size",
        "tp_size",
        "model_parallel_size",
    ),
    "pp": ("pipeline_parallel_degree", "pipeline_model_parallel_size", "pipeline_parallel_size", "pp_size"),
    "ep": ("expert_parallel_degree", "expert_model_parallel_size", "expert_parallel_size", "ep_size"),
}
"""Fields of a config that name a parallel size, in Paddle's, Megatron's and vLLM's words."""


@dataclass(frozen=True, slots=True)
class Target:
    """What DST shall be; None is "not said"."""

    format: str = ""
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    etp: int | None = None
    pp_layout: tuple[int, ...] = ()
    ranks: tuple[int, ...] | None = None
    """Only these ranks are written."""
    max_shard_size: int | None = None
    dtype: str = ""
    fuse: bool = False
    unfuse: bool = False
    vocab_multiple: int = 1
    sharding: int | None = None
    """Ranks that share the optimizer state of one model-parallel rank."""
    sharding_version: str = ""
    version: str = ""
    """Of the software that shall read the output (--target)."""
    components: tuple[str, ...] = ()
    """Only these; () is all that the format can hold."""
    ema: bool = False
    """The exponential moving average is written as the model."""
    native_names: bool = False
    """Names as the models of ``version`` have them, not those of a Paddle source."""
    aoa: Path | None = None
    """A file of AOA statements that says which tensors are written."""

    def from_flags(self) -> dict[str, int]:
        return {k: v for k in ("tp", "pp", "ep", "etp") if (v := getattr(self, k)) is not None}


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tensors, and under which names."""

    remove: Sequence[str] = ()
    keep: Sequence[str] = ()
    rename: Sequence[str] = ()


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


@dataclass(slots=True)
class ReshardResult:
    """What ``reshard`` reports."""

    prepared: Prepared
    dst: Path
    run: RunResult
    verified: bool
    notes: list[str] = field(default_factory=list)


def prepare(
    src: str | Path,
    options: OpenOptions,
    target: Target,
    selection: Selection | None = None,
    recoding: Recoding | None = None,
) -> Prepared:
    """Plan a reshard. Raises a CkptError subclass; nothing is written."""
    source = open_checkpoint(src, options)
    if recoding is None:
        prepared = plan_target(source, target, selection or Selection())
        if target == Target() and selection in (None, Selection()) and source.mesh.world > 1:
            prepared.notes.append(f"same parallelism as SRC ({source.mesh}); change it with --tp-out")
        return prepared
    return plan_recoded(source, recoding, target, selection or Selection())


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
    fmt, mesh, asked = _target_mesh(source, target, notes)
    dtype = _castable(target.dtype)
    writer = by_name(fmt, "--to")
    capabilities = writer.capabilities
    _check_target(target, fmt, writer, source)
    family = source.family
    version = _version(source, target, capabilities)
    equal: list[EqualPair] = []
    catalog, components = chosen_components(source, target.components, capabilities, fmt, notes, equal, ema=target.ema)
    naming, fused = _naming(source, target, writer)
    views, removed = select(parameters(catalog), selection, notes)
    views, after = _named(source, target, views, naming, fused, mesh, version, notes)
    equal += views.equal
    _check_overrides(family, {t.name for t in source.stored.tensors} | {*views.table})
    views.table = {n: views.table[n] for n in sorted(views.table, key=family.model_order(after))}
    cut = list(views)
    views = rename_by_rules(views, selection.rename)
    names = dict(zip((v.name for v in cut), views.table, strict=True))
    notes += views.notes
    whole = capabilities.whole
    if naming == "paddle":
        whole = (
            *whole,
            *paddle.kept_whole(family, after, {v.name: v.shape for v in cut}, mesh.tp, source.stored.whole),
        )
    packing = find_packing(quantization(source.config), {v.name: v.dtype for v in views})
    cast = output_dtype(names, dtype, packing.parts(names) if packing is not None else ())
    family = family.with_whole(whole)
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
    chosen = _chosen(target, mesh)
    ranks = partitioner.run(cut, chosen)
    if capabilities.pad_vocab and writer.sharded and not capabilities.records_shapes:
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
        prefix = base_prefix(dict.fromkeys(views.table, None))
        turned = partial(writer.turned, version=version, prefix=prefix, config=source.config)
        ranks = [RankTensors((_turned(turned, r, table) for r in held), share_index_with=like) for held in ranks]
    sharding = target.sharding or (source.stored.sharding if capabilities.optimizer_shards else 1)
    if sharding > 1 and target.sharding is None:
        notes.append(f"sharding {sharding}: as the source has it; change it with --sharding-out")
    request = WriteRequest(
        ranks,
        chosen,
        mesh,
        family.name,
        naming,
        fused,
        _config(source, naming, views.table, mesh, dtype),
        dtype,
        target.max_shard_size,
        source.stored.native_config if source.format == fmt else {},
        asked,
        sharding,
        target.sharding_version,
        version,
        source.stored.native,
        source.format,
        tuple(source.stored.root / n for n in source.stored.companions),
    )
    file_layout = writer.write(request)
    if naming == "paddle":
        paddle.check_head(ranks, _shapes(views), after, family, request.config)
    if file_layout.ranks is not None:
        equal += _left_to_masters(catalog, tables, file_layout.ranks)
    carried, literal = _beside(source, request, file_layout, written, notes)
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


def _castable(text: str) -> str:
    """The dtype that --dtype says, or "". Raises UsageError for one that takes more than a cast."""
    dtype = parse(text).name if text else ""
    if dtype and dtype not in CASTABLE:
        raise UsageError(
            f"--dtype {text} is not a cast: it needs scales",
            hint="cast to one of " + ", ".join(sorted(d.lower() for d in CASTABLE)),
        )
    return dtype


def _naming(source: Checkpoint, target: Target, writer: Format) -> tuple[str, str]:
    """The naming of the output, and which fusions are added to it: "fuse", "unfuse" or ""."""
    stored = source.stored
    fused = "fuse" if target.fuse else "unfuse" if target.unfuse else ""
    naming = writer.naming()
    if not naming:
        return stored.naming, fused or stored.fused
    if naming == "hf":
        # What came from Hugging Face in one of its forms goes back in that form.
        if stored.naming in source.family.spec.hf_namings:
            naming = stored.naming
        if stored.format == writer.name:
            fused = fused or stored.fused
    return naming, fused


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


def _beside(
    source: Checkpoint,
    request: WriteRequest,
    file_layout: FileLayout,
    written: Sequence[tuple[str, bytes]],
    notes: list[str],
) -> tuple[list[Path], list[tuple[str, bytes]]]:
    """(files that are carried, files that are made) beside the tensors of the output."""
    root = source.stored.root
    made = [*file_layout.generated, *written]
    own = root / "config.json"
    carried = list(request.companions)
    if own.is_file() and request.config == (source.stored.native_config or source.config):
        carried.insert(0, own)
    elif request.config:
        made.insert(0, ("config.json", indented(request.config)))
    left = [p.name for p in carried if p.name in file_layout.dropped]
    if request.naming != "paddle":
        unused = [p.name for p in carried if TRAINER_FILES.fullmatch(p.name)]
        if unused:
            notes.append(f"not carried, because only a trainer uses them: {some(unused)}")
            carried = [p for p in carried if p.name not in unused]
        left = [n for n in left if n not in unused]
    if left:
        notes.append(f"not carried, because they belong to the ranks of the source: {some(left)}")
    gone = {*file_layout.dropped, *(name for name, _ in made), *(p.name for p in file_layout.copied)}
    return [*file_layout.copied, *(p for p in carried if p.name not in gone)], made


def carried_below(source: Checkpoint, taken: AbstractSet[str], notes: list[str]) -> list[tuple[str, DataFile]]:
    """(name in DST, file) of what is carried from the subdirectories of SRC; a note says what is not.

    ``taken`` are names of DST that are no directories.
    """
    if not (source.path.is_dir() or is_index(source.path.name)):
        return []  # one file of a directory that may hold anything
    root = source.stored.root
    below = files_below(root, [f.path for f in source.stored.files])
    left = list(map(str, below.left))
    carried = []
    for name in below.carried:
        if taken.isdisjoint([name, *map(str, PurePosixPath(name).parents)]):
            carried.append((name, file_now(root / name)))
        else:
            left.append(f"{name} (the output has a file of that name)")
    if left:
        notes.append(f"not carried from subdirectories: {some(left, 8)}")
    return carried


def _named(
    source: Checkpoint,
    target: Target,
    views: TensorTable,
    naming: str,
    fused: str,
    mesh: Mesh,
    version: str,
    notes: list[str],
) -> tuple[TensorTable, tuple[Transform, ...]]:
    """The views under the names of the target, and the statements that lead there from Hugging Face names."""
    family, before = source.family, source.ops
    packing = find_packing(quantization(source.config), {n: v.dtype for n, v in views.table.items()})
    if packing is not None and (target.aoa is not None or (naming != source.stored.naming and naming not in NAMINGS)):
        raise replace(packing, why=packing.why or "Hugging Face and vLLM have them, others do not").refuse(
            "rearranged by --aoa" if target.aoa is not None else f"brought into the names of {naming}"
        )
    if target.aoa is not None:
        if fused:
            raise UsageError("--aoa already determines what is fused", hint="drop --fuse and --unfuse")
        views = apply_aoa(views, read_aoa(target.aoa), sizes=family.sizes)
        # The statements decide; what they made is looked at for the rules by which it is cut.
        if naming == "paddle":
            return views, paddle.source_transforms(family, _shapes(views), source.config)
        return views, naming_transforms(family, naming, "", mesh)
    _refuse_unknown(source, views, naming)
    canonical = None
    if naming != "paddle":
        after = naming_transforms(family, naming, fused, mesh)
    elif source.stored.naming == "paddle" and not target.native_names:
        after = paddle.with_fusions(before, fused, family, _shapes(views))
        if target.version and not fused:
            _note_other_names(source, views, after, version, notes)
    else:
        canonical = apply_transforms(views, inverse(before), family, before)
        after = paddle.target_transforms(family, _shapes(canonical), source.config, version, fused)
    if before != after:
        canonical = canonical or apply_transforms(views, inverse(before), family, before)
        views = apply_transforms(canonical, after, family)
    return views, after


def _refuse_unknown(source: Checkpoint, views: TensorTable, naming: str) -> None:
    """Paddle has a decoder's linear weights the other way round; without its family nothing says which these are."""
    if source.family.name != "none" or (naming == "paddle") == (source.stored.naming == "paddle"):
        return
    odd = next((n for n, v in views.table.items() if len(v.shape) == 2 and module_of(n) in TRANSPOSED), None)
    if odd is not None:
        raise LayoutError(
            f"`{odd}` and its like are [in, out] in Paddle's formats and [out, in] in others, and which of these"
            " tensors that concerns is not known: there is no family",
            where=str(source.path / "config.json"),
            hint="put the model's config.json beside the checkpoint, or pass --family NAME",
        )


def _note_other_names(
    source: Checkpoint, views: TensorTable, after: tuple[Transform, ...], version: str, notes: list[str]
) -> None:
    """Say so when the models of --target know the tensors otherwise; trainers skip names that they do not know."""
    canonical = apply_transforms(views, inverse(source.ops), source.family, source.ops)
    usual = paddle.target_transforms(source.family, _shapes(canonical), source.config, version, "")
    if found := paddle.differ(after, usual):
        notes.append(
            f"{', '.join(found)}: kept as the source has them; the models of {version} have others, which"
            " --native-names writes"
        )


def _shapes(views: TensorTable) -> dict[str, tuple[int, ...]]:
    return {n: v.shape for n, v in views.table.items()}


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


def _version(source: Checkpoint, target: Target, capabilities: Capabilities) -> str:
    """What --target says; else the version that wrote the source, else the newest. "" where there are no versions."""
    if target.version:
        if target.version not in capabilities.targets:
            raise UsageError(
                f"--target `{target.version}` is not known"
                + (
                    "" if capabilities.targets else f" for --to {target.format or source.format}, which has no versions"
                ),
                hint="targets: " + ", ".join(capabilities.targets)
                if capabilities.targets
                else "omit it, or choose one of Paddle's formats: --to unified, hybrid, zcc or flex",
            )
        return target.version
    if not capabilities.targets:
        return ""
    wrote = software(source.config)
    if wrote.name == "paddlenlp":
        return next(t for t in capabilities.targets if t.startswith("paddlenlp"))
    if wrote.name == "paddleformers" and wrote.version < (1,):
        return next(t for t in capabilities.targets if t.startswith("paddleformers-0"))
    return capabilities.targets[0]


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


def _check_target(target: Target, fmt: str, writer: Format, source: Checkpoint) -> None:
    """Flags that mean nothing for this format or model are errors."""
    family = source.family
    experts = family.has_experts or any(EXPERT.search(k.name) for k in source.catalog.tensors)
    if target.vocab_multiple > 1 and (fmt == "deepseek" or not writer.sharded):
        raise UsageError(
            f"--vocab-multiple {target.vocab_multiple} pads cut embeddings, and --to {fmt} does not pad",
            hint="omit it, or use --to ranks",
        )
    if target.max_shard_size and not writer.capabilities.shards:
        raise UsageError(
            f"--max-shard-size has no effect with --to {fmt}, which has one file for each rank",
            hint="omit it; more ranks make smaller files",
        )
    for flag in ("fuse", "unfuse"):
        if getattr(target, flag) and flag in writer.capabilities.refused:
            raise UsageError(
                f"--{flag} is not possible with --to {fmt}, whose software reads one form of the model only",
                hint=f"omit it; --to hf or --to ranks can {flag}",
            )
    for name in ("ep", "etp"):
        if (getattr(target, name) or 1) > 1 and family.name != "none" and not experts:
            raise UsageError(
                f"--{name}-out {getattr(target, name)} has no effect: models of family `{family.name}` have no experts"
            )
    for flag, said in (("--sharding-out", target.sharding), ("--sharding-version", target.sharding_version)):
        if said and not writer.capabilities.optimizer_shards:
            raise UsageError(
                f"{flag} {said} has no effect with --to {fmt}, which does not share out optimizer state",
                hint="omit it, or use --to hybrid, zcc or flex",
            )
    if target.native_names and writer.naming() != "paddle":
        raise UsageError(f"--native-names has no effect with --to {fmt}", hint="omit it")
    sharding = target.sharding or source.stored.sharding
    if target.sharding_version and (sharding == 1 or fmt == "flex"):
        raise UsageError(
            f"--sharding-version {target.sharding_version} has no effect "
            + ("with --to flex" if fmt == "flex" else "without --sharding-out 2 or more"),
            hint="omit it",
        )
    if target.dtype and writer.capabilities.fp32_masters == "dropped" and sharding > 1:
        raise UsageError(
            f"--dtype {target.dtype} is not possible with sharding {sharding}: model weights are stored as master"
            " weights only, and read back in the model's own dtype",
            hint="write --to unified with --dtype, or --sharding-out 1",
        )
    if target.dtype and target.components and not set(target.components) & set(WEIGHTS):
        raise UsageError(
            f"--dtype {target.dtype} casts model weights, and --only leaves them out",
            hint="the state of an optimizer keeps its precision",
        )
    if target.vocab_multiple > 1 and not writer.capabilities.pad_vocab:
        raise UsageError(f"--to {fmt} does not pad the vocabulary", hint="drop --vocab-multiple")
    if target.sharding is not None and target.sharding < 1:
        raise UsageError(f"--sharding-out is {target.sharding}", hint="parallel sizes start at 1")


def execute(
    prepared: Prepared, dst: str | Path, options: RunOptions, progress: Progress, *, verify: bool = False
) -> ReshardResult:
    """Write DST. Raises OutputError, CorruptError, or VerifyError when ``verify`` finds a difference."""
    path = Path(dst)
    options = replace(options, source_roots=(str(prepared.source.path),))
    if verify:
        if prepared.target.ranks is not None:
            raise UsageError(
                "--verify needs all ranks, --ranks-out writes only some",
                hint="verify when all ranks are there: ckpttool inspect SRC --diff DST --values",
            )
        options = replace(options, verify=partial(verify_output, prepared, memory=options.memory))
    result = run(prepared.plan, path, options, progress)
    return ReshardResult(prepared, path, result, verify)


def verify_output(prepared: Prepared, written: Path, advance: Advance, *, memory: int) -> None:
    """Read ``written`` back through its format's reader and compare every element with the source.

    Knows nothing of the plan: the source side goes through pieces and views, the written side through its own headers.
    What is dequantised or quantised is worked out once more, with ``memory`` bytes, and compared where it was written.
    ``advance`` is told the bytes of ``written`` that are verified.
    Raises VerifyError naming the first tensors that differ.
    """
    mesh = prepared.mesh
    said = ReadOptions(mesh.tp, mesh.pp, mesh.ep, mesh.etp, mesh.layout)
    stored = read_source(written, prepared.format, said)
    out = assemble(stored, written, OpenOptions(prepared.format, said), prepared.family)
    expected = prepared.views.table
    # By the names that views have, which say the component too; a reader derives components that were not written.
    components = {k.component for k in prepared.source.catalog.tensors}
    tensors = {Key(str(k)): t for k, t in out.catalog.tensors.items() if k.component in components}
    found = Catalog(out.catalog.files, tensors)
    have = {k.name for k in found.tensors}
    missing, extra = sorted(set(expected) - have), sorted(have - set(expected))
    if missing or extra:
        raise VerifyError(
            f"the output has {len(extra)} unexpected tensors and lacks {len(missing)}: {(missing + extra)[0]}",
            where=str(written),
        )
    _verify_nothing_lost(prepared)
    real = len(prepared.source.catalog.files)
    if prepared.computed is not None:
        verify_computed(prepared.plan, written, memory, advance)
    wrong = compare_views(
        prepared.source.catalog,
        [v for v in expected.values() if all(s.file < real for s in _stored(v))],
        found,
        cast=lambda name, _: prepared.dtypes[name],
        check_replicas=True,
        advance=advance,
    )
    if wrong:
        raise VerifyError(
            f"{len(wrong)} of {len(expected)} tensors differ from the source",
            where=[str(w) for w in wrong[:5]],
            hint="nothing was kept. This is a fault of ckpttool or of the disk: please report it with the command line",
        )


def _verify_nothing_lost(prepared: Prepared) -> None:
    """Raises VerifyError for a tensor of the source that is left out for no reason."""
    if prepared.target.aoa is not None:
        return  # the statements say what is written
    chosen, recoded = prepared.selection, prepared.recoded
    account = partial(Account, statements=prepared.statements)
    account(prepared.source, remove=chosen.remove, keep=chosen.keep, computed=prepared.computed).check(
        prepared.views.table.values()
    )
    if recoded is not None:
        account(recoded.source, remove=recoded.remove, keep=recoded.keep).check_recoded(
            recoded.checkpoint.catalog, recoded.computed
        )


def _stored(view: DerivedTensor) -> Iterator[StoredTensor]:
    """The stored tensors that a view takes elements from."""
    for part in view.parts:
        for piece in part.source.pieces:
            yield piece.stored


def _check_overrides(family: Family, names: set[str]) -> None:
    """A --replicate or --split that matches nothing is a typo."""
    for regex, rule in family.overrides:
        with bounded(rule.origin):
            found = any(regex.search(n) for n in names)
        if not found:
            raise UsageError(f"{rule.origin} matches no tensor", hint=nearest_hint(rule.origin.split("'")[1], names))


def _chosen(target: Target, mesh: Mesh) -> tuple[int, ...]:
    if target.ranks is None:
        return tuple(range(mesh.world))
    wrong = [r for r in target.ranks if r >= mesh.world]
    if wrong:
        raise UsageError(f"--ranks-out names rank {wrong[0]}, the output has ranks 0 to {mesh.world - 1}")
    return tuple(sorted(set(target.ranks)))


def _target_mesh(source: Checkpoint, target: Target, notes: list[str]) -> tuple[str, Mesh, Mesh]:
    """Format of DST, its mesh, and the mesh that the flags ask for. What is not said stays as it is in SRC."""
    said = target.from_flags()
    src = source.mesh
    tp = said.get("tp", src.tp)
    pp = said.get("pp", src.pp)
    ep = said.get("ep")
    if ep is None:
        folded = src.ep > 1 and src.ep == src.tp and src.etp == 1
        ep = tp if folded else src.ep
        if folded and ep != src.ep:
            notes.append(f"ep {ep}: the source has ep = tp; change it with --ep-out")
    etp = said.get("etp", default_etp(src, tp, ep, ep_asked="ep" in said))
    layout = target.pp_layout or (src.layout if pp == src.pp else ())
    if target.pp_layout and "pp" not in said:
        pp = len(target.pp_layout)
    asked = Mesh(tp, pp, ep, etp, layout)
    name = target.format
    if not name:
        if by_name(source.format, "").capabilities.default_target:
            name = source.format
        elif asked.world == 1:
            name = "hf"
        else:
            name = source.format if source.stored.mesh.world > 1 or by_name(source.format, "").sharded else "ranks"
        notes.append(f"written as {name}" + ("" if name == source.format else " (--to chooses another format)"))
    writer = by_name(name, "--to")
    mesh = writer.target_mesh(asked if writer.sharded else Mesh(), said)
    return name, mesh, asked


def select(
    views: TensorTable, selection: Selection, notes: list[str], *, option: str = "--remove-keys"
) -> tuple[TensorTable, tuple[int, int]]:
    """The views that are kept, and (tensors, bytes) of those that are not.

    Raises UsageError for a pattern without a match, and when nothing would be left.
    """
    names = set(views.table)
    wanted = set(names)
    if selection.keep:
        wanted = matching(selection.keep, names, option="--keep-keys")
    if selection.remove:
        wanted -= matching(selection.remove, names, option=option)
    gone = [views.table[n] for n in views.table if n not in wanted]
    if not wanted:
        raise UsageError(
            "no tensor is left: the patterns remove all of them",
            hint="* matches every name; narrower patterns, or --keep-keys with what is to stay",
        )
    if gone:
        removed = len(gone), sum(v.nbytes for v in gone)
        notes.append(left_out(removed))
        return keep(views, wanted), removed
    return views, (0, 0)


def left_out(removed: tuple[int, int]) -> str:
    """The note about (tensors, bytes) that are not in the output."""
    return f"{count(removed[0], 'tensor')} left out, {removed[1]:,} bytes"


def _config(source: Checkpoint, naming: str, names: Iterable[str], mesh: Mesh, dtype: str) -> dict[str, Any]:
    """config.json for the target, whose tensors are called ``names``: fields that name parallel sizes, the dtype or the
    form of the model are updated, the rest is kept."""
    sizes = {"tp": mesh.tp, "pp": mesh.pp, "ep": mesh.ep}
    values: dict[str, Any] = {f: sizes[d] for d, fields in PARALLEL_FIELDS.items() for f in fields}
    if dtype:
        name = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}[dtype]
        values |= dict.fromkeys(DTYPE_FIELDS, name)
    config = with_fields(source.config, values)
    if naming == "paddle":
        return with_fused_flags(config, {n.rsplit(".", 2)[-2] for n in names if n.count(".") > 1})
    return published_config(config) if source.stored.naming == "paddle" and config else config
