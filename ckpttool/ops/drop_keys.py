"""``ckpttool drop-keys``: the same checkpoint without some of its tensors.

A Hugging Face checkpoint keeps its files: those that lose nothing are carried (or linked), the others are written
anew with what is left in them. What has ranks is written anew by the planner of reshard, over the same ranks.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpttool.catalog import RankTensor, StoredTensor
from ckpttool.checkpoint import Checkpoint, OpenOptions, open_checkpoint
from ckpttool.errors import UsageError
from ckpttool.formats.base import build_files, list_source
from ckpttool.formats.hf import NUMBERED
from ckpttool.formats.safetensors import read_header, tensor_bytes
from ckpttool.geometry import whole
from ckpttool.layout.assemble import LAYER
from ckpttool.layout.scales import weight_of
from ckpttool.mesh import Mesh
from ckpttool.ops.reshard import Prepared, Selection, Target, plan_target, select
from ckpttool.planner import build_plan
from ckpttool.relate import Views, identity

INDEX = "model.safetensors.index.json"
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
LAYERS, MTP = "num_hidden_layers", "num_nextn_predict_layers"


@dataclass(slots=True)
class PreparedDrop:
    """Everything known before a byte is written."""

    target: Prepared
    gone: Sequence[tuple[str, str, tuple[int, ...], int]]
    """(name, dtype, shape, bytes) of what is left out, in the order of the checkpoint."""
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
        return sum(n for _, _, _, n in self.gone)


def prepare(
    src: str | Path, options: OpenOptions, selection: Selection, target: Target, *, link: bool = False
) -> PreparedDrop:
    """Plan what is left. Raises a CkptError subclass; nothing is written.

    ``link``: files that stay as they are may share their bytes with the source. UsageError for a target that
    rewrites everything.
    """
    if not selection.remove and not selection.keep:
        raise UsageError("nothing is to go", hint="name patterns: ckpttool drop-keys SRC DST 'lm_head.*'")
    source = open_checkpoint(src, options)
    table = identity(source.catalog).table
    views, _ = select(identity(source.catalog), selection, [], option="the pattern")
    gone = [(v.name, v.dtype, v.shape, v.nbytes) for v in table.values() if v.name not in views.table]
    warnings = list(_warnings(source, {n for n, *_ in gone}, views))
    _settle(source, views, {n for n, *_ in gone})
    same_files = source.format == "hf" and target == Target() and not selection.rename
    if link and not same_files:
        raise UsageError(
            "--link keeps files that do not change, and this target writes all of them",
            hint="leave --link away, or the options for another target",
        )
    if same_files:
        return _in_place(source, selection, gone, warnings, link=link)
    prepared = plan_target(source, target, selection)
    written = sum(not o.carried for o in prepared.plan.outputs)
    return PreparedDrop(prepared, gone, warnings, written, 0, 0)


def _in_place(
    source: Checkpoint,
    selection: Selection,
    gone: Sequence[tuple[str, str, tuple[int, ...], int]],
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
    names = _names([files[i].path.name for i in kept], [f.path.name for f in files])
    rewritten = [(i, name) for i, name in zip(kept, names, strict=True) if lost[i]]
    stay = [(i, name) for i, name in zip(kept, names, strict=True) if not lost[i]]
    tensors = [
        [RankTensor(t.name, t.dtype, t.shape, t.name, t.shape, ((whole(t.shape), whole(t.shape)),)) for t in held[i]]
        for i, _ in rewritten
    ]
    groups = [
        (name, 0, group, read_header(files[i].path).metadata or None)
        for (i, name), group in zip(rewritten, tensors, strict=True)
    ]
    literal = [(INDEX, _index(root, {t.name: (n, t) for i, n in zip(kept, names, strict=True) for t in held[i]}))]
    if len(names) == 1 and not (root / INDEX).is_file():
        literal = []
    carried = [(str(files[i].path), name, files[i].size) for i, name in stay]
    config = root / "config.json"
    if source.stored.native_config:
        literal.append(("config.json", (json.dumps(source.config, indent=2, ensure_ascii=False) + "\n").encode()))
    elif config.is_file():
        carried.append((str(config), config.name, config.stat().st_size))
    carried += [(str(root / n), n, (root / n).stat().st_size) for n in source.stored.companions]
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
    prepared = Prepared(source, Target(), "hf", Mesh(), source.family, views, plan, "", dtypes, notes, removed)
    return PreparedDrop(prepared, gone, warnings, len(rewritten), len(stay), len(files) - len(kept))


def _names(kept: Sequence[str], before: Sequence[str]) -> list[str]:
    """Names of the files that stay; numbered shards are numbered anew when one of them goes."""
    matches = [NUMBERED.match(n) for n in kept]
    if len(kept) == len(before) or not all(matches):
        return list(kept)
    stems = [m["stem"] for m in matches if m]
    if len(kept) == 1:
        return [f"{stems[0]}.safetensors"]
    return [f"{stem}-{i:05d}-of-{len(kept):05d}.safetensors" for i, stem in enumerate(stems, 1)]


def _index(root: Path, tensors: Mapping[str, tuple[str, StoredTensor]]) -> bytes:
    """The index of what is left; what the old one said besides stays."""
    old = list_source(root).json(INDEX) if (root / INDEX).is_file() else {}
    metadata = old.get("metadata")
    size = sum(tensor_bytes(t.dtype, t.shape) for _, t in tensors.values())
    index: dict[str, Any] = {
        **old,
        "metadata": {**(metadata if isinstance(metadata, dict) else {}), "total_size": size},
        "weight_map": {n: file for n, (file, _) in sorted(tensors.items())},
    }
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def _settle(source: Checkpoint, views: Views, gone: Collection[str]) -> None:
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


def _warnings(source: Checkpoint, gone: Collection[str], views: Views) -> list[str]:
    """What a loader may miss."""
    left = views.table
    tied = source.family.tied or source.config.get("tie_word_embeddings") is True
    out = []
    if HEAD in gone and not tied:
        out.append(f"`{HEAD}` is required: the config does not tie it to the embeddings")
    if EMBEDDING in gone:
        other = f", and `{HEAD}` is tied to it" if tied else ""
        out.append(f"`{EMBEDDING}` is required{other}")
    if NORM in gone:
        out.append(f"`{NORM}` is required")
    names = [*left, *gone]
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
