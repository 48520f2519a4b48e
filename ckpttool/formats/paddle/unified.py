"""PaddleNLP's and PaddleFormers' unified checkpoint: whole tensors, spread over safetensors files.

    model-0000i-of-0000N.safetensors            model weights          + model.safetensors.index.json
    peft_model-0000i-of-0000N.safetensors       a LoRA adapter         + peft_model.safetensors.index.json
    master_weights-0000i-of-0000N.safetensors   float32 weights        + master_weights.safetensors.index.json
    optimizer-0000i-of-0000N.safetensors        <weight>/moment1_0 ... + optimizer.safetensors.index.json
    optimizer.<suffix>.safetensors[_shard_000k] not merged: what one rank held (suffix tpNN_ppNN_shardNN_moeNN)

Headers are the truth and an index is a hint, because real ones lie: quantized state, split parameters and saves by
several nodes leave indexes that name missing files, miss keys, or give a wrong total. bfloat16 is U16 or BF16. The
optimizer's files are always in Paddle's orientation, the model's are not (``_paddle.transposed_on_disk``).

Sources: paddlenlp 3.0.0b4, paddleformers 0.4.1 and 1.2.0 (trainer/unified_checkpoint), measured on their checkpoints.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, NamedTuple

from ckpttool.containers.index import gaps, index_name, set_of, shard_name
from ckpttool.containers.safetensors import read_header, tensor_bytes
from ckpttool.core.catalog import SHAPE_FROM_RULES, SHARDED, Catalog, FlatShard, Key, RankTensor, StoredTensor
from ckpttool.core.files import DataFile, Place, source_files
from ckpttool.core.mesh import MAX_WORLD, Mesh
from ckpttool.core.notes import Note
from ckpttool.errors import ConflictError, CorruptError, IncompleteError, UnsupportedError
from ckpttool.formats import base
from ckpttool.formats.config import missing_config
from ckpttool.formats.paddle import config as paddle_config
from ckpttool.formats.paddle.sharding import end_to_end
from ckpttool.formats.paddle.training import TRAINER_FILES, left_out, read_training, schedule_file, small_files
from ckpttool.formats.paddle.unified_index import STEMS, UnifiedIndex
from ckpttool.storage.listing import Listing, list_source
from ckpttool.storage.nodes import check_copies, shared_config
from ckpttool.storage.place import read_each

_STEM = "(?P<stem>model|peft_model|master_weights|optimizer)"
_MERGED = re.compile(_STEM + r"(?:-(?P<part>\d{5})-of-(?P<total>\d{5}))?\.safetensors\Z")
_RANKED = re.compile(
    _STEM + r"\.(?P<suffix>(?:tp|pp|shard|moe)\d{2,}(?:_(?:tp|pp|shard|moe)\d{2,})*)"
    r"\.safetensors(?:_shard_(?P<part>\d{4}))?\Z"
)
_COORDINATE = re.compile(r"(tp|pp|shard|moe)(\d+)")
_QUANTIZED = re.compile(r"@(?:min_|max_)?scales\Z")
_OWN = re.compile(r"(?:config\.json|.*\.index\.json|ckpttool\.manifest\.json)\Z")
_WORLD_BOUND = re.compile(r"(?:rng_state.*\.pth|saved_signal_\d+|\..*\.done.*)\Z")


class _ShardFile(NamedTuple):
    """One file of tensors."""

    path: Place
    component: str
    stem: str
    coords: Mapping[str, int]
    """Coordinates of the rank that wrote it; empty for merged files."""
    part: int
    total: int


_Held = list[tuple[StoredTensor, _ShardFile]]
"""The stored tensors of one key, each with its file."""


class Unified:
    """Whole tensors by structural name, with optimizer state and master weights."""

    name = "unified"
    dialect = "paddle"
    capabilities = base.Capabilities(
        shards=True,
        components=("model", "adapter", "master_weights", "optimizer"),
        targets=paddle_config.TARGETS,
        default_target=True,
        states="paddle",
        fp32_masters="added",
        multi_directory=True,
        indexes=UnifiedIndex(),
    )

    def detect(self, listing: Listing) -> int:
        if listing.single:
            return 0
        names = listing.names
        if any(n.endswith((".pdopt", ".distcp")) or n.startswith("model_state") for n in names):
            return 0
        # Model weights alone may be anybody's; Paddle's are numbered even when they are one file.
        found = [m for n in names if (m := _MERGED.match(n) or _RANKED.match(n))]
        if {m["stem"] for m in found} - {"model"}:
            return 2
        stems = [m for m in found if m.groupdict().get("total")]
        if stems:
            try:
                return 2 if paddle_config.software(listing.json("config.json")).name else 0
            except CorruptError:
                return 0  # what reads it says so
        # A save that failed may have left only what is carried; transformers writes a training_args.bin, too.
        carried = all(TRAINER_FILES.fullmatch(n) for n in names if n.endswith((".bin", ".pt", ".pth", ".ckpt")))
        return int(carried and not listing.safetensors() and "training_args.bin" in names)

    def read(self, listing: Listing, options: base.ReadOptions) -> base.StoredCheckpoint:
        """Raises IncompleteError (files are missing), ConflictError (contradictions), CorruptError, UsageError."""
        listings = [listing, *(list_source(p) for p in options.more)]
        config = shared_config(listings)
        found = _files(listings)
        return _UnifiedReader(listing, listings, options, config, found).read()

    def target_mesh(self, asked: Mesh, said: Mapping[str, int]) -> Mesh:
        return Mesh()

    def write(self, request: base.WriteRequest) -> base.FileLayout:
        """Whole tensors, shared out to files in model order; every component has a file for each rank asked for.

        Raises LayoutError or UnsupportedError for tensors that could not be read again as they are.
        """
        version = request.version
        _check_readable(request)
        tensors = request.ranks[0]
        groups: list[tuple[str, int, Sequence[RankTensor], Mapping[str, str] | None]] = []
        indexes: list[tuple[str, bytes]] = []
        has_master = any(t.component == "master_weights" for t in tensors)
        model_format = "np" if version.startswith("paddlenlp") else "pt"
        for stem, component in STEMS.items():
            own = [t for t in tensors if t.component == component]
            if not own:
                continue
            shared = _share(own, request)
            total = len(shared)
            weight_map: dict[str, str] = {}
            for i, part in enumerate(shared):
                file = shard_name(stem, i + 1, total)
                meta = {"format": model_format if component in ("model", "adapter") else "np"}
                groups.append((file, 0, part, meta))
                weight_map |= {base.name_in_file(t): file for t in part}
            size = sum(tensor_bytes(t.dtype, t.shape) for t in own)
            index: dict[str, Any] = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
            if component == "adapter":
                index["type"] = "lora"
            if component == "optimizer":
                index["quant_ckpt_resume_times"] = 0
                index["master_weights"] = has_master
            indexes.append((f"{stem}.safetensors.index.json", json.dumps(index, indent=4).encode()))
        file_layout = base.build_files(groups, 1)
        for name, data in indexes:
            file_layout.files.append(base.OutFile(name, len(data), ((0, data),)))
        return file_layout._replace(
            config=paddle_config.target_config(request.config, version, request.dtype),
            notes=left_out(request),
            generated=schedule_file(request),
            dropped=tuple(n for n in request.companions if _WORLD_BOUND.match(n)),
            usage=paddle_config.resume_flags(request, "unified_checkpoint"),
            mesh=request.requested,
        )

    def turned(self, name: str, ndim: int, version: str, prefix: str, config: Mapping[str, Any]) -> bool:
        """Whether the model files of this version hold the weight [out, in]."""
        return paddle_config.transposed_on_disk(name, ndim, paddle_config.target_software(version), prefix, config)

    def without(self, stored: base.StoredCheckpoint, catalog: Catalog, lost: Collection[str]) -> base.Remainder | None:
        """None when a component loses all that it has (the indexes speak of each other), and when the files lie in
        several directories.
        """
        kept: list[base.KeptFile] = []
        stems: dict[str, list[int]] = {}
        for f in source_files(stored.files):
            stem = f.place.name.split(".")[0].split("-")[0]
            if f.place.parent != stored.root or stem not in STEMS:
                return None
            tensors = read_header(f.place).tensors
            held = [t for t in tensors if _parameter(t.name, stem) not in lost]
            own = stems.setdefault(stem, [])
            # What a rank wrote stays even when nothing is left in it: the files of all ranks must be there.
            if held or not set_of(f.place.name):
                own.append(len(kept))
                kept.append(base.KeptFile(f, f.place.name, held, len(held) < len(tensors)))
        listing = list_source(stored.root)
        indexes = []
        for stem, component in STEMS.items():
            found = stems.get(stem, [])
            if stem in stems and not any(kept[i].tensors for i in found):
                return None
            shards = [i for i in found if set_of(kept[i].name)]
            for n, i in enumerate(shards, 1):
                kept[i] = kept[i]._replace(name=shard_name(stem, n, len(shards)))
            if data := listing.json(index_name(stem)):
                moments = sum(
                    t.nbytes for k, t in catalog.tensors.items() if k.component == component and k.name not in lost
                )
                indexes.append((index_name(stem), _index_without(data, stem, [kept[i] for i in found], lost, moments)))
        return base.Remainder(kept, indexes)


def _check_readable(request: base.WriteRequest) -> None:
    """Raises LayoutError or UnsupportedError for what a reader of the files would take for something else."""
    tensors = request.ranks[0]
    linear = [
        t for t in tensors
        if t.component == "model" and paddle_config.is_linear(t.name, len(t.whole), request.config)
    ]  # fmt: skip
    told = {t.name for t in linear if t.whole[0] != t.whole[1]} & {
        t.name for t in tensors if t.component == "master_weights" or t.state == "moment1_0"
    }
    if linear and not told and not request.config and not request.version.startswith("paddlenlp"):
        root = request.source and request.source.root
        why = "readers of --to unified learn from it which way round linear weights lie"
        raise missing_config(why, root, linear[0].name)
    if odd := next((t for t in tensors if t.dtype == "U16"), None):
        raise UnsupportedError(
            f"`{odd.name}` is U16, and Paddle would read it as BF16",
            hint=f"drop it with --remove-keys '{odd.name}', or write another format",
        )


def _parameter(name: str, stem: str) -> str:
    """The parameter of a tensor in a file: the optimizer's are called ``parameter/state``."""
    return name.rpartition("/")[0] if stem == "optimizer" else name


def _index_without(
    data: dict[str, Any], stem: str, kept: Sequence[base.KeptFile], lost: Collection[str], moments: int
) -> bytes:
    """The index of one component of what is left; ``moments`` are the bytes that quantized ones stand for."""
    if isinstance(old := data.get("weight_map"), dict):
        renamed = {k.file.place.name: k.name for k in kept}
        data["weight_map"] = {n: renamed.get(file, file) for n, file in old.items() if _parameter(n, stem) not in lost}
    metadata = data.get("metadata")
    if isinstance(metadata, dict) and isinstance(metadata.get("total_size"), int):
        size = sum(t.nbytes for k in kept for t in k.tensors)
        data["metadata"] = {**metadata, "total_size": moments if UnifiedIndex().stands_for(data) else size}
    return (json.dumps(data, indent=4) + "\n").encode()


def _files(listings: Sequence[Listing]) -> list[_ShardFile]:
    """The files of all directories of a save, each once."""
    out: dict[str, _ShardFile] = {}
    for at in listings:
        for name in at.names:
            m = _MERGED.match(name) or _RANKED.match(name)
            if m is None:
                continue
            if name in out:
                check_copies(out[name].path, at.path(name))
                continue
            got = m.groupdict()
            coords = {k: int(v) for k, v in _COORDINATE.findall(got.get("suffix") or "")}
            part, total = int(got["part"] or 0), int(got.get("total") or 0)
            out[name] = _ShardFile(at.path(name), STEMS[got["stem"]], got["stem"], coords, part, total)
    return list(out.values())


@dataclass(slots=True)
class _UnifiedReader:
    listing: Listing
    listings: list[Listing]
    options: base.ReadOptions
    config: dict[str, Any]
    found: list[_ShardFile]
    notes: list[str] = field(default_factory=list)
    files: list[DataFile] = field(default_factory=list)
    formats: dict[str, str] = field(default_factory=dict)
    """``format`` in the metadata of the files of each component."""
    shards: list[Sequence[FlatShard]] = field(default_factory=list)
    turned: frozenset[str] = frozenset()
    """Model tensors that are stored [out, in]."""

    def read(self) -> base.StoredCheckpoint:
        self._complete()
        indexes = {stem: self._index(stem) for stem in STEMS}
        held = self._headers(indexes)
        dtypes: dict[Key, str] = {}
        quantized = self._dequantized(held)
        shapes = self._shapes(held)
        tensors: list[StoredTensor] = []
        cut = self._cut_mesh()
        for key, entry in {**held, **quantized}.items():
            tensors += self._tensors(key, entry, shapes.get(key.name), cut)
        tensors = [self._as_paddle(t) for t in tensors]
        self._master_as_model(tensors, dtypes, indexes["optimizer"])
        self._check_index(indexes, held)
        own = [*(f.path.name for f in self.found), *(n for n in self.listing.names if _OWN.match(n))]
        carried, more = small_files(self.listing, own)
        return base.StoredCheckpoint(
            "unified",
            self.listing.root,
            self.files,
            tensors,
            Mesh(),
            dialect="paddle",
            config=self.config,
            companions=carried,
            notes=[*self.notes, *more],
            metadata={"format": self.formats.get("model", "")},
            shards=self.shards,
            dtypes=dtypes,
            cut=dict.fromkeys(("optimizer", "master_weights"), cut) if cut.world > 1 else {},
            records_cuts=cut.world == 1,
            training=read_training(self.listing),
        )

    def _complete(self) -> None:
        """Every numbered set has all of its files. Raises IncompleteError with those missing."""
        root = str(self.listing.root)
        if not self.found:
            what = ", ".join(n for n in self.listing.names[:6]) or "nothing"
            raise IncompleteError(
                "this is not a complete checkpoint: there are no model*, peft_model*, master_weights* or optimizer*"
                " safetensors files",
                where=[root, f"files: {what}"],
                hint="the save was interrupted or failed; take an earlier checkpoint",
            )
        for stem in STEMS:
            sets: dict[int, set[int]] = {}
            for f in self.found:
                if f.stem == stem and f.total:
                    sets.setdefault(f.total, set()).add(f.part)
            named = self._named_by_index(stem)
            if len(sets) > 1:
                kept = {int(m["total"]) for n in named if (m := _MERGED.match(n)) and m["total"]}
                if len(kept) != 1:
                    raise ConflictError(
                        f"{stem} files of {' and '.join(map(str, sorted(sets)))} lie in one directory",
                        where=root,
                        hint="remove the stale set, or put back the index that says which one counts",
                    )
                stale = [f for f in self.found if f.stem == stem and f.total and f.total not in kept]
                self.notes.append(
                    f"{len(stale)} {stem} files are left out: {stem}.safetensors.index.json names another set"
                )
                self.found = [f for f in self.found if f not in stale]
                sets = {n: parts for n, parts in sets.items() if n in kept}
            for total, parts in sets.items():
                # An asynchronous save writes no file for a rank that holds nothing, and its index names none.
                if real := [i for i in gaps(total, parts) if not named or shard_name(stem, i, total) in named]:
                    raise IncompleteError(
                        f"{len(real)} of {total} {stem} files are missing: {shard_name(stem, real[0], total)}",
                        where=root,
                        hint="fetch the missing files; when the save was spread over nodes, name the other"
                        " directories with --also",
                    )
            ranked = [f for f in self.found if f.stem == stem and f.coords]
            self._complete_ranks(stem, ranked)

    def _complete_ranks(self, stem: str, ranked: Sequence[_ShardFile]) -> None:
        if not ranked:
            return
        axes = list(ranked[0].coords)
        sizes = {a: 1 + max(f.coords.get(a, 0) for f in ranked) for a in axes}
        have = {tuple(f.coords.get(a, -1) for a in axes) for f in ranked}
        if prod(sizes.values()) > MAX_WORLD:
            raise IncompleteError(
                f"nearly all of {prod(sizes.values()):,} {stem} rank files are missing", where=str(self.listing.root)
            )
        wanted: list[tuple[int, ...]] = list(product(*[range(sizes[a]) for a in axes]))
        missing = [w for w in wanted if w not in have]
        if missing:
            suffix = "_".join(f"{a}{i:02d}" for a, i in zip(axes, missing[0], strict=True))
            raise IncompleteError(
                f"{len(missing)} of {len(wanted)} {stem} rank files are missing: {stem}.{suffix}.safetensors",
                where=str(self.listing.root),
                hint="copy the missing files beside the others; directories of other nodes go with --also",
            )
        parts: dict[tuple[tuple[str, int], ...], set[int]] = {}
        for f in ranked:
            parts.setdefault(tuple(f.coords.items()), set()).add(f.part)
        most = max((max(p) for p in parts.values()), default=0)
        for coords, p in parts.items():
            if most and p != set(range(1, most + 1)):
                gone = min(set(range(1, most + 1)) - p)
                suffix = "_".join(f"{a}{i:02d}" for a, i in coords)
                raise IncompleteError(
                    f"{stem}.{suffix}.safetensors_shard_{gone:04d} is missing",
                    where=str(self.listing.root),
                    hint=f"every rank has {most} such files (optim_shard_num)",
                )

    def _named_by_index(self, stem: str) -> set[str]:
        data = self._raw_index(stem)
        found = data.get("weight_map")
        return {v for v in found.values() if isinstance(v, str)} if isinstance(found, dict) else set()

    def _raw_index(self, stem: str) -> dict[str, Any]:
        name = f"{stem}.safetensors.index.json"
        for at in self.listings:
            try:
                if data := at.json(name):
                    return data
            except CorruptError as e:
                note = f"{name} is not usable ({e.what}); rebuilt from the headers"
                if note not in self.notes:
                    self.notes.append(note)
        return {}

    def _index(self, stem: str) -> dict[str, Any]:
        data = self._raw_index(stem)
        found = data.get("weight_map")
        if isinstance(found, dict):
            bad = [v for v in found.values() if not isinstance(v, str) or "/" in v or "\\" in v or v in (".", "..")]
            if bad:
                raise ConflictError(
                    f"the index names a file outside the checkpoint: `{bad[0]}`",
                    where=str(self.listing.root / f"{stem}.safetensors.index.json"),
                )
        return data

    def _headers(self, indexes: Mapping[str, dict[str, Any]]) -> dict[Key, _Held]:
        """All stored tensors by key; files that an index leaves out come last."""
        held: dict[Key, _Held] = {}
        order = {stem: set(self._named_by_index(stem)) for stem in STEMS}

        def rank(f: _ShardFile) -> tuple[Any, ...]:
            named = order[f.stem]
            # Shards of one parameter follow each other by sharding rank, which is how the files are numbered.
            return (list(STEMS).index(f.stem), bool(named) and f.path.name not in named, *self._shard_order(f))

        self.found.sort(key=rank)
        paths = [f.path for f in self.found]
        first = len(self.files)
        heads = read_each(read_header, paths, range(first, first + len(paths)))
        for f, head in zip(self.found, heads, strict=True):
            self.files.append(head.file)
            self.formats.setdefault(f.component, head.metadata.get("format", ""))
            for t in head.tensors:
                key = _key(t.name, f.component)
                dtype = "BF16" if t.dtype == "U16" else t.dtype
                stored = t._replace(name=key.name, component=key.component, state=key.state, dtype=dtype)
                held.setdefault(key, []).append((stored, f))
        return held

    @staticmethod
    def _shard_order(f: _ShardFile) -> tuple[int, ...]:
        return (f.coords.get("pp", 0), f.coords.get("moe", 0), f.coords.get("tp", 0), f.coords.get("shard", 0), f.part)

    def _cut_mesh(self) -> Mesh:
        ranked = [f.coords for f in self.found if f.coords]
        sizes = {a: 1 + max((c.get(a, 0) for c in ranked), default=0) for a in ("tp", "pp", "moe")}
        ep = sizes["moe"]
        return Mesh(sizes["tp"], sizes["pp"], ep, 1 if ep > 1 else sizes["tp"])

    def _shapes(self, held: Mapping[Key, _Held]) -> dict[str, tuple[int, ...]]:
        """Paddle's shape of each parameter where the files give it: [in, out] for linear weights.

        What the writer's version says about the orientation of the model's files is believed unless shapes contradict
        it: then the first way that fits all of them counts, and a note says so.
        """
        model = {k.name: e[0][0].shape for k, e in held.items() if k.component == "model"}
        prefix = paddle_config.base_prefix({k.name: None for k in held})
        writer = (
            paddle_config.software(self.config) if self.formats.get("model") == "pt" else paddle_config.Software("")
        )
        ways: tuple[tuple[str, Callable[[str], bool]], ...] = (
            ("", lambda n: paddle_config.transposed_on_disk(n, len(model[n]), writer, prefix, self.config)),
            ("[in, out]", lambda _: False),
            (
                "[out, in]",
                lambda n: paddle_config.transposed_on_disk(
                    n, len(model[n]), paddle_config.Software("paddleformers", (1,)), "", self.config
                ),
            ),
            ("[out, in]", lambda n: paddle_config.is_linear(n, len(model[n]), self.config)),
        )
        seen = {n: s for n, shape in model.items() if (s := self._seen(n, shape, held)) is not None}
        fits = [(text, way) for text, way in ways if all(way(n) == s for n, s in seen.items())]
        if not fits:
            text, way = ways[0]
            odd = next(n for n, s in seen.items() if way(n) != s)
            raise ConflictError(
                "some linear weights are stored [out, in] and others [in, out], in a way that no writer has",
                where=[str(self.listing.root), odd, *(n for n in seen if n != odd)][:4],
                hint="the files of two saves were mixed",
            )
        text, way = fits[0]
        if self.formats.get("model") == "pt" and not writer.name and not seen:
            odd = next((n for n in model if any(way(n) != other(n) for _, other in ways)), "")
            if odd:
                raise IncompleteError(
                    "config.json does not say which version of Paddle's software wrote the model files, and so which"
                    " way round its linear weights lie",
                    where=[str(self.listing.path("config.json")), odd],
                    hint="put back the config.json of the save: it has paddlenlp_version or paddleformers_version",
                )
        if text:
            self.notes.append(
                f"linear weights of the model are stored {text}, by their shapes and not by the version in config.json"
            )
        out = {k.name: e[0][0].shape for k, e in held.items() if k.component == "adapter"}
        out |= {n: shape[::-1] if len(shape) == 2 and way(n) else shape for n, shape in model.items()}
        self.turned = frozenset(n for n in model if len(model[n]) == 2 and way(n))
        return out

    def _seen(self, name: str, shape: tuple[int, ...], held: Mapping[Key, _Held]) -> bool | None:
        """Whether the model's tensor is stored [out, in] by what else is known of it; None when nothing tells."""
        if len(shape) != 2 or shape[0] == shape[1] or not paddle_config.is_linear(name, 2, self.config):
            return None
        a, b = shape
        for component, state in (("master_weights", ""), ("optimizer", "moment1_0")):
            other = held.get(Key(name, component, state))
            if other is not None and len(other[0][0].shape) == 2 and not other[0][1].coords:
                paddle = other[0][0].shape
                return paddle == (b, a) if paddle in ((a, b), (b, a)) else None
        want_in, want_out = paddle_config.expected_side(name, self.config)
        if want_in is not None and (a == want_in) != (b == want_in):
            return b == want_in
        if want_out is not None and (a == want_out) != (b == want_out):
            return a == want_out
        return None

    def _tensors(self, key: Key, entry: _Held, shape: tuple[int, ...] | None, cut: Mesh) -> list[StoredTensor]:
        """Stored tensors of one key: whole ones, those of ranks, or flat shards."""
        if entry[0][1].coords:
            return self._ranked(key, entry, shape, cut)
        first = entry[0][0]
        if key.component not in ("model", "adapter"):
            if key.state and prod(first.shape) == 1 and shape != first.shape:
                return [t for t, _ in entry]
            if shape is not None and len(first.shape) == 1 and (len(shape) > 1 or first.shape != shape):
                return [self._flat(key, shape, [t for t, _ in entry], 0)]
        self._same(key, entry)
        return [t for t, _ in entry]

    def _same(self, key: Key, entry: _Held) -> None:
        """Copies in several files (data-parallel experts, tied weights) have one shape."""
        shapes = {t.shape for t, _ in entry}
        if len(shapes) > 1:
            raise ConflictError(
                f"`{key}` is {' and '.join(str(list(s)) for s in shapes)} in different files",
                where=[str(f.path) for _, f in entry],
                hint="the files of two saves were mixed",
            )
        if len(entry) > 1 and (name := self._by_index(key, entry)):
            # What another file holds under this name is what an earlier or partial save left there.
            entry[:] = [x for x in entry if x[1].path.name == name]

    def _by_index(self, key: Key, entry: _Held) -> str:
        """The one file that the index names for the key, when it leaves out the file of another copy entirely."""
        named = self._named_by_index(entry[0][1].stem)
        inside = [f.path.name for _, f in entry if f.path.name in named]
        return inside[0] if len(inside) == 1 and len(inside) < len(entry) else ""

    def _flat(self, key: Key, shape: tuple[int, ...], runs: Sequence[StoredTensor], rank: int) -> StoredTensor:
        """Runs of elements one behind the other, the last one padded."""
        at = sum(t.shape[0] for t in runs)
        if shape != SHAPE_FROM_RULES and at < prod(shape):
            raise IncompleteError(
                f"the pieces of `{key}` hold {at:,} elements, {list(shape)} has {prod(shape):,}",
                where=[str(self.files[t.file].place) for t in runs],
                hint="the file of a sharding rank is missing",
            )
        self.shards.append(end_to_end(runs))
        return runs[0]._replace(shape=shape, file=SHARDED, offset=len(self.shards) - 1, rank=rank)

    def _ranked(self, key: Key, entry: _Held, shape: tuple[int, ...] | None, cut: Mesh) -> list[StoredTensor]:
        """Tensors of rank files: sharding ranks hold other parameters (or runs of them), tp ranks other boxes."""
        ranks: dict[int, list[StoredTensor]] = {}
        for t, f in sorted(entry, key=lambda x: self._shard_order(x[1])):
            c = f.coords
            if "moe" in c and ".experts." in key.name:
                rank = cut.rank_of(pp=c.get("pp", 0), ep=c["moe"])
            else:
                rank = cut.rank_of(pp=c.get("pp", 0), tp=c.get("tp", 0))
            ranks.setdefault(rank, []).append(t._replace(rank=rank))
        out = []
        for rank, group in ranks.items():
            flat = (
                shape is not None
                and all(len(t.shape) == 1 for t in group)
                and (len(shape) > 1 or len(group) > 1 or group[0].shape != shape)
            )
            if flat and not (key.state and prod(group[0].shape) == 1) and shape is not None:
                # What a tensor-parallel rank holds of it follows from the rules, and is filled in with them.
                known = cut.tp == cut.ep == 1
                out.append(self._flat(key, shape if known else SHAPE_FROM_RULES, group, rank))
            else:
                out += group
        return out

    def _as_paddle(self, t: StoredTensor) -> StoredTensor:
        """A model tensor that is stored [out, in] as a strided view of Paddle's orientation."""
        if t.component != "model" or t.name not in self.turned:
            return t
        return t._replace(shape=t.shape[::-1], strides=(1, t.shape[1]))

    def _master_as_model(self, tensors: list[StoredTensor], dtypes: dict[Key, str], index: Mapping[str, Any]) -> None:
        """A save without model weights (skip_save_model_weight) has the master weights in the model's files."""
        have = {t.component for t in tensors}
        want = paddle_config.config_dtype(self.config)
        if have >= {"model", "optimizer"} and "master_weights" not in have and index.get("master_weights", True):
            model = [t for t in tensors if t.component == "model"]
            if want in ("BF16", "F16") and all(t.dtype == "F32" for t in model):
                tensors += [t._replace(component="master_weights") for t in model]
                dtypes |= {Key(t.name): want for t in model}
                said = (
                    f"the model files hold the master weights (skip_save_model_weight);"
                    f" model weights are these, rounded to {want}"
                )
                self.notes.append(Note("derived weights", said))
        elif "master_weights" in have and not have & {"model", "adapter"}:
            derived = [t for t in tensors if t.component == "master_weights"]
            tensors += [t._replace(component="model") for t in derived]
            if want:
                dtypes |= {Key(t.name): want for t in derived}
            said = f"there are no model files; model weights are master_weights, rounded to {want or 'F32'}"
            self.notes.append(Note("derived weights", said))

    def _dequantized(self, held: dict[Key, _Held]) -> dict[Key, _Held]:
        """Takes quantized optimizer state out of ``held`` and returns what it stands for."""
        if not any(_QUANTIZED.search(k.state) for k in held):
            return {}
        from ckpttool.formats.paddle.quant import dequantize

        stored = {k: [t for t, _ in e] for k, e in held.items() if k.component == "optimizer"}
        file_of = {t.file: f for k in stored for t, f in held[k]}
        made, gone, note = dequantize(stored, self.files)
        for k in gone:
            del held[k]
        self.notes.append(note)
        any_file = next(iter(file_of.values()))
        return {k: [(t, any_file)] for k, t in made.items()}

    def _check_index(self, indexes: Mapping[str, dict[str, Any]], held: Mapping[Key, _Held]) -> None:
        """Note the errors of each index; the headers are taken as right."""
        for stem, component in STEMS.items():
            mapped = indexes[stem].get("weight_map")
            if not isinstance(mapped, dict):
                if mapped is None and any(f.stem == stem and f.total for f in self.found):
                    self.notes.append(f"there is no usable {stem}.safetensors.index.json; built from the headers")
                continue
            keys = {_key(n, component) for n in mapped}
            real = {k for k in held if k.component == component}
            if gone := [k for k in keys - real if not indexes[stem].get("ckpt_quant_stage")]:
                files = sorted({str(mapped[n]) for n in mapped if _key(n, component) in gone})
                absent = [f for f in files if not any(x.path.name == f for x in self.found)]
                if absent:
                    raise IncompleteError(
                        f"{len(absent)} of the files that {stem}.safetensors.index.json names are missing: {absent[0]}",
                        where=str(self.listing.root),
                        hint="fetch the missing files; directories of other nodes go with --also",
                    )
                name = str(min(gone))
                raise IncompleteError(
                    f"{stem}.safetensors.index.json names {len(gone)} tensors that no file holds: `{name}`",
                    where=str(self.listing.root),
                    hint="a file is one of another save; or, when the tensors are really gone, remove the index",
                )
            if extra := real - keys:
                self.notes.append(f"{len(extra)} tensors are not in {stem}.safetensors.index.json; rebuilt")
        weights = {k.name for k in held if k.component in ("model", "adapter")}
        if weights and (lost := sorted({k.name for k in held} - weights)):
            raise IncompleteError(
                f"{len(lost)} parameters have optimizer state or master weights, but no weight: `{lost[0]}`",
                where=str(self.listing.root),
                hint="a model file is missing or is one of another save",
            )


def _key(name: str, component: str) -> Key:
    """The key of a tensor in a file of this component: ``<parameter>/<state>`` in the optimizer's."""
    if component != "optimizer":
        return Key(name, component)
    parameter, slash, state = name.rpartition("/")
    if not slash:
        raise CorruptError(f"`{name}` is not an optimizer state: it has no `/` before the name of an accumulator")
    if state.split("@")[0] not in paddle_config.STATES and not re.fullmatch(r"\w+_\d+(?:@\w+)?", state):
        raise CorruptError(f"`{name}` is not an optimizer state: `{state}` is not an accumulator")
    return Key(parameter, component, state)


# -- writing


def _share(tensors: Sequence[RankTensor], request: base.WriteRequest) -> list[list[RankTensor]]:
    """Into one file for each rank asked for, in order, by bytes; or by --max-shard-size."""
    if request.max_shard_size:
        return base.fill_files(tensors, request.max_shard_size)
    files = min(request.requested.world, max(1, len(tensors)))
    total = sum(tensor_bytes(t.dtype, t.shape) for t in tensors)
    out: list[list[RankTensor]] = [[]]
    size = 0
    for i, t in enumerate(tensors):
        n = tensor_bytes(t.dtype, t.shape)
        over = out[-1] and size + n > total * len(out) / files
        if len(out) < files and (over or len(tensors) - i <= files - len(out)):
            out.append([])
        out[-1].append(t)
        size += n
    return out
