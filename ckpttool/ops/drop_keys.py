"""``ckpttool drop-keys``: the same checkpoint without some of its tensors.

A Hugging Face or a unified checkpoint keeps its files: those that lose nothing are carried (or linked), the others
are written anew with what is left in them. What has ranks is written anew by the planner of reshard, over the same
ranks. A parameter goes with all of its components.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from ckpttool.catalog import Catalog, Key, RankTensor, StoredTensor, in_order, is_derived, whole_tensor
from ckpttool.checkpoint import Checkpoint, OpenOptions, open_checkpoint, refuse_empty
from ckpttool.containers.index import NUMBERED
from ckpttool.containers.safetensors import read_header, tensor_bytes
from ckpttool.errors import UsageError
from ckpttool.formats.base import build_files, file_now
from ckpttool.formats.config import ties_head
from ckpttool.formats.paddle.unified_index import STEMS
from ckpttool.formats.registry import reader
from ckpttool.geometry import whole
from ckpttool.layout.assemble import LAYER
from ckpttool.layout.scales import weight_of
from ckpttool.mesh import Mesh
from ckpttool.planner import build_plan
from ckpttool.relate import DerivedTensor, TensorTable, identity, parameters
from ckpttool.storage.json_file import indented
from ckpttool.storage.listing import list_source
from ckpttool.storage.place import DataFile, Place, source_files
from ckpttool.targeting.build import Prepared, plan_target
from ckpttool.targeting.select import Selection, left_out, select
from ckpttool.targeting.sidecars import carried_below
from ckpttool.targeting.target import Target
from ckpttool.words import count

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
LAYERS, MTP = "num_hidden_layers", "num_nextn_predict_layers"
_PARAMETERS = "total_parameters"
"""Elements of all tensors, in indexes that transformers 5 writes."""


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
    """Files with tensors that are written anew."""
    carried: int
    """Files with tensors that stay as they are."""
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


def prepare(
    src: str | Place, options: OpenOptions, selection: Selection, target: Target, *, link: bool = False
) -> PreparedDrop:
    """Plan what is left. Raises a CkptError subclass; nothing is written.

    ``link``: files that stay as they are may share their bytes with the source. UsageError for a target that
    rewrites everything.
    """
    if not selection.remove and not selection.keep:
        raise UsageError("nothing is to go", hint="name patterns: ckpttool drop-keys SRC DST 'lm_head.*'")
    source = open_checkpoint(src, options)
    refuse_empty(source)
    table = parameters(source.catalog).table
    views, _ = select(parameters(source.catalog), selection, [], option="the pattern")
    lost = {n for n in table if n not in views.table}
    # A parameter goes with all that there is of it: its master weight, the optimizer's states, its average.
    gone = [
        DroppedTensor(str(k), t.dtype, t.shape, 0 if is_derived(source.catalog, k) else t.nbytes, k.component)
        for k, t in source.catalog.tensors.items()
        if k.name in lost
    ]
    warnings = list(_warnings(source, lost, views))
    _settle(source, views, lost)
    same = target == Target() and not selection.rename
    same_files = source.format == "hf" and same
    unified = _keep_unified(source, lost) if source.format == "unified" and same else None
    if link and not same_files and unified is None:
        raise UsageError(
            "--link keeps files that do not change, and this target writes all of them",
            hint="drop --link, or the options for another target",
        )
    if same_files:
        return _in_place(source, selection, gone, warnings, link=link)
    if unified is not None:
        return _in_unified(source, selection, unified, lost, gone, warnings, link=link)
    if not target.format and not target.from_flags() and reader(source.format).capabilities.sharded:
        target = replace(target, format=source.format)  # one rank stays one rank
    prepared = plan_target(source, target, selection)
    notes = prepared.notes
    if len(gone) > len(lost):
        # reshard counts what its patterns choose, which are parameters.
        counted = left_out(prepared.removed)
        said = f"{count(len(lost), 'parameter')} left out, {len(gone):,} tensors of all components"
        notes[:] = [said if n == counted else n for n in notes]
    if prepared.format == source.format and reader(source.format).capabilities.default_target:
        notes.append("every file is rewritten, also those that lose nothing")
    written = {t.file for unit in prepared.plan.units for t in unit.stored_tensors}
    return PreparedDrop(prepared, gone, warnings, len(written), 0, 0)


def _in_place(
    source: Checkpoint,
    selection: Selection,
    gone: Sequence[DroppedTensor],
    warnings: Sequence[str],
    *,
    link: bool,
) -> PreparedDrop:
    """Plan the same files with fewer tensors."""
    notes = list(source.notes)
    views, removed = select(identity(source.catalog), selection, notes)
    root = source.stored.root
    files = source.catalog.files
    held: list[list[StoredTensor]] = [[] for _ in files]
    lost = [False] * len(files)
    for t in source.stored.tensors:
        if t.name in views.table:
            held[t.file].append(t)
        else:
            lost[t.file] = True
    kept = [i for i, tensors in enumerate(held) if tensors]
    names = _names([files[i].place.name for i in kept], [f.place.name for f in files])
    rewritten = [(i, name) for i, name in zip(kept, names, strict=True) if lost[i]]
    stay = [(i, name) for i, name in zip(kept, names, strict=True) if not lost[i]]
    tensors = [
        [RankTensor(t.name, t.dtype, t.shape, t.name, t.shape, ((whole(t.shape), whole(t.shape)),)) for t in held[i]]
        for i, _ in rewritten
    ]
    groups = [
        (name, 0, group, read_header(files[i].place).metadata or None)
        for (i, name), group in zip(rewritten, tensors, strict=True)
    ]
    index = source.stored.native.found or source.stored.native.index
    where = {t.name: (n, t) for i, n in zip(kept, names, strict=True) for t in held[i]}
    literal = (
        [(index, _index(root, index, where, source.stored.tensors))]
        if len(names) > 1 or (root / index).is_file()
        else []
    )
    carried = [(name, files[i]) for i, name in stay]
    config = root / "config.json"
    if source.stored.native_config:
        literal.append(("config.json", indented(source.config)))
    elif config.is_file():
        carried.append((config.name, file_now(config)))
    carried += [(n, file_now(root / n)) for n in source.stored.companions]
    carried += carried_below(source, {*(n for n, _ in (*carried, *literal)), *(g[0] for g in groups)}, notes)
    plan = build_plan(
        source.catalog,
        views.table,
        [[t for group in tensors for t in group]],
        build_files(groups, 1),
        carried=carried,
        literal_files=literal,
        linked={name for _, name in stay} if link else (),
    )
    plan.notes = notes
    dtypes = {v.name: v.dtype for v in views}
    prepared = Prepared(
        source, Target(), "hf", Mesh(), source.family, views, plan, "", dtypes, notes, removed, selection=selection
    )
    return PreparedDrop(prepared, gone, warnings, len(rewritten), len(stay), len(files) - len(kept))


class _UnifiedFile(NamedTuple):
    """A file of a unified checkpoint that stays."""

    file: DataFile
    name: str
    """In DST."""
    component: str
    held: list[StoredTensor]
    """What stays in it, as its header says: names with states, codes of quantised moments, runs of shards."""
    loses: bool


def _parameter(raw: str, component: str) -> str:
    """The parameter of a tensor in a file of this component: the optimizer's are called ``parameter/state``."""
    return raw.rpartition("/")[0] if component == "optimizer" else raw


def _keep_unified(source: Checkpoint, lost: Collection[str]) -> list[_UnifiedFile] | None:
    """The files of a unified checkpoint that stay; None when they cannot stay what they are.

    That is so when a component loses all that it has (the indexes speak of each other), and when the files lie in
    several directories.
    """
    root = source.stored.root
    out: list[_UnifiedFile] = []
    stems: dict[str, list[int]] = {}
    for f in source_files(source.stored.files):
        stem = f.place.name.split(".")[0].split("-")[0]
        if f.place.parent != root or stem not in STEMS:
            return None
        tensors = read_header(f.place).tensors
        held = [t for t in tensors if _parameter(t.name, STEMS[stem]) not in lost]
        numbered = NUMBERED.match(f.place.name)
        # What a rank wrote stays even when nothing is left in it: the files of all ranks must be there.
        if held or not numbered:
            stems.setdefault(stem, []).append(len(out))
            out.append(_UnifiedFile(f, f.place.name, STEMS[stem], held, len(held) < len(tensors)))
        else:
            stems.setdefault(stem, [])
    for stem, found in stems.items():
        if not any(out[i].held for i in found):
            return None
        shards = [i for i in found if NUMBERED.match(out[i].name)]
        for n, i in enumerate(shards, 1):
            out[i] = out[i]._replace(name=f"{stem}-{n:05d}-of-{len(shards):05d}.safetensors")
    return out


def _in_unified(
    source: Checkpoint,
    selection: Selection,
    kept: Sequence[_UnifiedFile],
    lost: Collection[str],
    gone: Sequence[DroppedTensor],
    warnings: Sequence[str],
    *,
    link: bool,
) -> PreparedDrop:
    """Plan the same files with fewer tensors, byte for byte what they were: moments that are quantised stay it."""
    notes = [*source.notes, f"{count(len(lost), 'parameter')} left out"]
    stored, root = source.stored, source.stored.root
    rewritten = [k for k in kept if k.loses]
    catalog = Catalog([k.file for k in rewritten], {})
    ranks: list[list[RankTensor]] = []
    groups = []
    for i, k in enumerate(rewritten):
        tensors = []
        for t in k.held:
            # The same name is in the files of several components, and in those of several ranks.
            key = Key(f"{k.name}: {t.name}")
            catalog.tensors[key] = whole_tensor(t._replace(file=i), key)
            box = whole(t.shape)
            tensors.append(RankTensor(t.name, t.dtype, t.shape, key.name, t.shape, ((box, box),)))
        ranks.append(tensors)
        groups.append((k.name, i, tensors, read_header(k.file.place).metadata or None))
    literal = [
        (f"{stem}.safetensors.index.json", data) for stem in STEMS if (data := _unified_index(source, stem, kept, lost))
    ]
    carried = [(k.name, k.file) for k in kept if not k.loses]
    config = root / "config.json"
    if stored.native_config:
        literal.append(("config.json", indented(source.config)))
    elif config.is_file():
        carried.append((config.name, file_now(config)))
    carried += [(n, file_now(root / n)) for n in stored.companions]
    carried += carried_below(source, {*(n for n, _ in (*carried, *literal)), *(g[0] for g in groups)}, notes)
    linked = {k.name for k in kept if not k.loses} if link else set()
    plan = build_plan(
        catalog,
        identity(catalog).table,
        ranks,
        build_files(groups, max(1, len(groups))),
        carried=carried,
        literal_files=literal,
        linked=linked,
    )
    plan.notes = notes
    left = {
        str(k): DerivedTensor(str(k), t.dtype, t.shape, t)
        for k, t in source.catalog.tensors.items()
        if k.name not in lost
    }
    dtypes = {n: v.dtype for n, v in left.items()}
    prepared = Prepared(
        source,
        Target(),
        "unified",
        Mesh(),
        source.family,
        TensorTable(left),
        plan,
        "",
        dtypes,
        notes,
        selection=selection,
    )
    files = len(source_files(stored.files))
    return PreparedDrop(prepared, gone, warnings, len(rewritten), len(kept) - len(rewritten), files - len(kept))


def _unified_index(source: Checkpoint, stem: str, kept: Sequence[_UnifiedFile], lost: Collection[str]) -> bytes:
    """The index of one component of what is left; b"" when there is none."""
    name = f"{stem}.safetensors.index.json"
    data = list_source(source.stored.root).json(name) if (source.stored.root / name).is_file() else {}
    if not data:
        return b""
    component = STEMS[stem]
    old = data.get("weight_map")
    if isinstance(old, dict):
        renamed = {k.file.place.name: k.name for k in kept}
        data["weight_map"] = {
            n: renamed.get(file, file) for n, file in old.items() if _parameter(n, component) not in lost
        }
    metadata = data.get("metadata")
    if isinstance(metadata, dict) and isinstance(metadata.get("total_size"), int):
        size = sum(t.nbytes for k in kept if k.component == component for t in k.held)
        if data.get("ckpt_quant_stage"):
            # The total is that of the moments and not of their codes.
            tensors = source.catalog.tensors.items()
            size = sum(t.nbytes for k, t in tensors if k.component == component and k.name not in lost)
        data["metadata"] = {**metadata, "total_size": size}
    return (json.dumps(data, indent=4) + "\n").encode()


def _names(kept: Sequence[str], before: Sequence[str]) -> list[str]:
    """Names of the files that stay; numbered shards are numbered anew when one of them goes."""
    matches = [NUMBERED.match(n) for n in kept]
    if len(kept) == len(before) or not all(matches):
        return list(kept)
    stems = [m["stem"] for m in matches if m]
    if len(kept) == 1:
        return [f"{stems[0]}.safetensors"]
    return [f"{stem}-{i:05d}-of-{len(kept):05d}.safetensors" for i, stem in enumerate(stems, 1)]


def _elements(tensors: Iterable[StoredTensor]) -> int:
    return sum(prod(t.shape) for t in tensors)


def _index(
    root: Place, name: str, tensors: Mapping[str, tuple[str, StoredTensor]], before: Iterable[StoredTensor]
) -> bytes:
    """The index of what is left; what the old one said besides stays. ``before`` are the tensors of the source."""
    old = list_source(root).json(name) if (root / name).is_file() else {}
    metadata = old.get("metadata")
    if isinstance(metadata, dict) and _PARAMETERS in metadata:
        # A number that did not count elements (packed weights) cannot be brought in line.
        counted = metadata[_PARAMETERS] == _elements(before)
        left = {_PARAMETERS: _elements(t for _, t in tensors.values())} if counted else {}
        metadata = {k: v for k, v in metadata.items() if k != _PARAMETERS or counted} | left
    size = sum(tensor_bytes(t.dtype, t.shape) for _, t in tensors.values())
    index: dict[str, Any] = {
        **old,
        "metadata": {**(metadata if isinstance(metadata, dict) else {}), "total_size": size},
        "weight_map": {n: file for n, (file, _) in sorted(tensors.items())},
    }
    return indented(index)


def _settle(source: Checkpoint, views: TensorTable, gone: Collection[str]) -> None:
    """Bring config.json in line where there is no doubt: multi-token-prediction layers that are all gone."""
    config = source.stored.config
    layers, extra = config.get(LAYERS), config.get(MTP)
    if not isinstance(layers, int) or not isinstance(extra, int) or not extra or source.stored.native_config:
        return

    def beyond(names: Collection[str]) -> bool:
        return any((m := LAYER.search(n)) and int(m[1]) >= layers for n in names)

    if beyond(gone) and not beyond(views.table):
        source.stored.native_config = config
        source.stored.config = {**config, MTP: 0}
        source.notes.append(f"config.json: {MTP} is 0 now; it was {extra}")


def _warnings(source: Checkpoint, gone: Collection[str], views: TensorTable) -> list[str]:
    """What a loader may miss."""
    left = views.table
    tied = source.family.tied or ties_head(source.config)
    out = []
    names = dict.fromkeys([*left, *gone])
    prefix = source.dialect.prefix(names)
    embedding, norm = (n.replace("model.", f"{prefix}.", 1) for n in (EMBEDDING, NORM))
    if HEAD in gone and not tied:
        out.append(f"`{HEAD}` is required: the config does not tie it to the embeddings")
    if embedding in gone:
        other = f", and `{HEAD}` is tied to it" if tied else ""
        out.append(f"`{embedding}` is required{other}")
    if norm in gone:
        out.append(f"`{norm}` is required")
    for name in gone:
        weight = weight_of(name, names)
        if weight is not None and weight in left:
            out.append(f"`{weight}` stays without its scales `{name}`")
    for name in left:
        weight = weight_of(name, names)
        if weight is not None and weight in gone:
            out.append(f"the scales `{name}` stay without their weight")
    out += _layer_warnings(source, gone, left)
    return out


def _layer_warnings(source: Checkpoint, gone: Collection[str], left: Collection[str]) -> list[str]:
    """Layers that lose some of their tensors, or all of them."""
    count = source.config.get(LAYERS)
    lost, kept = _layers_of(gone), _layers_of(left)
    out = []
    if partly := sorted(lost & kept):
        out.append(f"{_numbered(partly)} {'loses some of its' if len(partly) == 1 else 'lose some of their'} tensors")
    if isinstance(count, int) and (whole_ones := sorted(n for n in lost - kept if n < count)):
        verb = "is" if len(whole_ones) == 1 else "are"
        out.append(f"{_numbered(whole_ones)} {verb} gone, and config.json still counts {count}")
    return out


def _numbered(layers: Sequence[int]) -> str:
    shown = ", ".join(map(str, layers[:8])) + (", ..." if len(layers) > 8 else "")
    return f"layer {shown}" if len(layers) == 1 else f"layers {shown}"


def _layers_of(names: Collection[str]) -> set[int]:
    return {int(m[1]) for n in names if (m := LAYER.search(n))}
