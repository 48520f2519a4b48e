"""Paddle's flex_checkpoint: any number of files, and a record of which block of which tensor each of them holds.

    DIR/0.metadata, 0_0.distcp, 1_0.distcp, ...      dist.save_state_dict(state, DIR)

    DIR/config.json, model_meta.json                 a PaddleFormers trainer with save_checkpoint_format=flex_checkpoint
    DIR/model_state/0.metadata, 0_0.distcp, ...      <name>: the weights; without those that have a master weight
    DIR/master_weight/...                            <name>.w_0
    DIR/optimizer_state/...                          <name>.moment1_0, <name>.beta1_pow_acc_0, ...
    DIR/ema_state/...                                <name>.w_0 of master weights, <name> of the other parameters

The record makes parallel sizes and a family's rules unnecessary for reading, with one exception: of a weight that fuses
gate and up, each tensor-parallel rank holds its part of both, and Paddle's coordinates put the ranks' blocks side by
side ([g0 u0 g1 u1], not [g0 g1 u0 u1]).

Sources: ``paddle/distributed/flex_checkpoint`` of Paddle 3.3.1; ``trainer/trainer.py`` and
``trainer/utils/zero_cost_checkpoint.py`` of PaddleFormers 1.2.0 for the directories; saves made with both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from ckpttool.containers.pickle_write import Hole, layout_pickle
from ckpttool.core.catalog import Catalog, Key, LogicalTensor, Piece, RankTensor, StoredTensor, logical_tensor
from ckpttool.core.dtypes import nbytes
from ckpttool.core.files import DataFile, Place
from ckpttool.core.geometry import Box, whole
from ckpttool.core.mesh import Mesh, share
from ckpttool.core.notes import Note
from ckpttool.errors import ConflictError, IncompleteError, UnsupportedError, UsageError
from ckpttool.formats import base
from ckpttool.formats.paddle import flex_files
from ckpttool.formats.paddle.config import CONFIG_DTYPES, STATES, TARGETS, resume_flags, target_config
from ckpttool.formats.paddle.sharding import flat_slices
from ckpttool.formats.paddle.training import left_out, read_training, schedule_file
from ckpttool.storage.listing import Listing, list_source
from ckpttool.storage.nodes import shared_config
from ckpttool.storage.place import resolved, scan

MASTER = "w_0"
"""Suffix of a master weight's key."""

PARTS = {"model": "model_state", "master_weights": "master_weight", "optimizer": "optimizer_state", "ema": "ema_state"}
"""Component -> its directory, in reading order."""

_OWN = re.compile(r"saved?_signal_.*|rng_state_\d+\.pth|model_meta\.json")
"""Files of the trainer that speak of the run, its ranks and sizes; no other layout can use them."""

_FUSED = re.compile(r"(?:.*\.)?(?:up_gate_proj|gate_up_proj|gate_up_fused_proj)(?:\.weight|\.bias)?")
"""Parameters that hold gate and up side by side on their last axis."""

_PHI = {10: "F32", 11: "F64", 15: "F16", 16: "BF16"}
"""Numbers of dtypes in model_meta.json (``phi::DataType``)."""

Mapped = list[tuple[Box, Box]]
"""(box in Paddle's coordinates, box in the plain tensor)."""


class _FlexSource(NamedTuple):
    """One directory of saves, with what its keys are."""

    component: str
    """"" where the keys alone say it."""
    save: flex_files.FlexSave


class Flex:
    """A save of paddle.distributed.save_state_dict, or a trainer's directory of them."""

    name = "flex"
    dialect = "paddle"
    capabilities = base.Capabilities(
        meshes="any",
        records_shapes=True,
        pad_vocab=False,
        components=tuple(PARTS),
        optimizer_shards=True,
        default_target=True,
        states="paddle",
        multi_directory=True,
    )

    def detect(self, listing: Listing) -> int:
        if listing.single and not flex_files.METADATA.fullmatch(listing.single):
            return 0
        if any(flex_files.metadata_names(listing.root / d) for d in ("", *PARTS.values())):
            return 2
        # Payloads whose metadata was left behind: reading says what is missing. (torch's begin with underscores.)
        payloads = (n for n in listing.names if n.endswith(".distcp") and not n.startswith("__"))
        return 2 if not listing.single and any(payloads) else 0

    def read(self, listing: Listing, options: base.ReadOptions) -> base.StoredCheckpoint:
        files: list[DataFile] = []
        roots = [listing.root, *options.more]
        sources = _sources(roots, files)
        config, meta, notes = _shared_files([listing, *(list_source(p) for p in options.more)])
        reader = _FlexReader(files, config, notes, raw=options.raw)
        for source in sources:
            reader.add(source)
        trained = sources[0].component != ""
        if trained and not options.raw:
            reader.derive_model(_parameters(meta, listing.root))
        own = [
            n
            for n in listing.names
            if flex_files.DATA.fullmatch(n) or flex_files.METADATA.fullmatch(n) or _OWN.fullmatch(n)
        ]
        carried, more = base.companions(listing, own)
        logical = {k: reader.logical[k] for k in sorted(reader.logical, key=lambda k: tuple(PARTS).index(k.component))}
        return base.StoredCheckpoint(
            self.name,
            listing.root,
            files,
            reader.stored,
            Mesh(),
            self.dialect,
            config=config,
            companions=carried,
            recorded=Catalog(files, logical),
            notes=notes + more,
            merged_raw=any(flex_files.metadata_names(listing.root)),
            dtypes=reader.dtypes,
            training=read_training(listing) if trained else None,
        )

    def target_mesh(self, asked: Mesh, said: Mapping[str, int]) -> Mesh:
        # Paddle's experts are whole unless someone wants otherwise; the format itself holds any box.
        return asked if "etp" in said else replace(asked, etp=1 if asked.ep > 1 else asked.tp)

    def write(self, request: base.WriteRequest) -> base.FileLayout:
        if len(request.chosen) != request.mesh.world:
            raise UsageError(
                "--to flex has one record of all ranks, so --ranks-out cannot write some of them",
                hint="drop --ranks-out",
            )
        return _FlexWriter(request).file_layout()


def _sources(roots: Sequence[Place], files: list[DataFile]) -> list[_FlexSource]:
    """Every save of a checkpoint. A directory of a trainer may also be given on its own."""
    flat = any(flex_files.metadata_names(r) for r in roots)
    inside = [c for c, d in PARTS.items() if any(_has_saves(r / d) for r in roots)]
    if flat and inside:
        raise ConflictError(
            "the directory holds a save of its own and those of a trainer",
            where=[str(roots[0]), *(str(roots[0] / PARTS[c]) for c in inside)],
            hint="give one of the inner directories, or move the files beside them away",
        )
    if inside:
        return [_FlexSource(c, flex_files.read_save([r / PARTS[c] for r in roots], files)) for c in inside]
    component = next((c for c, d in PARTS.items() if resolved(roots[0]).name == d), "")
    return [_FlexSource(component, flex_files.read_save(roots, files))]


def _has_saves(directory: Place) -> bool:
    """Also without metadata, which reading then asks for."""
    try:
        return any(flex_files.METADATA.fullmatch(e.name) or flex_files.DATA.fullmatch(e.name) for e in scan(directory))
    except OSError:
        return False


def _shared_files(listings: Sequence[Listing]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """config.json, model_meta.json, and a note when they lie one directory up."""
    config = shared_config(listings)
    meta = next((m for at in listings if (m := at.json("model_meta.json"))), {})
    root = resolved(listings[0].root)
    if config or meta or root.name not in PARTS.values():
        return config, meta, []
    above = list_source(root.parent)
    config, meta = above.json("config.json"), above.json("model_meta.json")
    return config, meta, ["config.json is read from the parent directory"] if config else []


def _parameters(meta: Mapping[str, Any], root: Place) -> dict[str, str]:
    """Dtypes of the parameters of all ranks: ``sharding_metas.KEY.param_meta.NAME = [shape, dtype, ...]``.

    "" stands for a dtype that no master weight is rounded to.
    """
    out: dict[str, str] = {}
    where = str(root / "model_meta.json")
    try:
        for cell in meta.get("sharding_metas", {}).values():
            for name, entry in cell["param_meta"].items():
                dtype = _PHI.get(entry[1], "")
                if out.setdefault(name, dtype) != dtype:
                    raise ConflictError(f"parameter `{name}` has two dtypes in model_meta.json", where=where)
    except (AttributeError, KeyError, TypeError, IndexError):
        raise ConflictError("model_meta.json has no valid param_meta", where=where) from None
    return out


class _FlexReader:
    """Saves -> logical tensors."""

    def __init__(self, files: list[DataFile], config: Mapping[str, Any], notes: list[str], *, raw: bool) -> None:
        self.files = files
        self.config = config
        self.notes = notes
        self.raw = raw
        self.logical: dict[Key, LogicalTensor] = {}
        self.stored: list[StoredTensor] = []
        self.dtypes: dict[Key, str] = {}
        self._came_from: dict[Key, Place] = {}

    def add(self, source: _FlexSource) -> None:
        save = source.save
        names = raw_keys(save.tensors) if self.raw else keys_of(source.component, save.tensors)
        turned: set[str] = set()
        for key, held in save.tensors.items():
            logical = names[key]
            if logical in self.logical:
                raise ConflictError(
                    f"two tensors are `{logical}`",
                    where=[str(self._came_from[logical]), str(save.metadata)],
                    hint="give one of the directories inside" if self.raw else None,
                )
            shape, boxes = save.shapes[key], None
            if not self.raw:
                if key in save.boxes:
                    shape, boxes = save.boxes[key]
                elif self.config.get("model_type") and _FUSED.fullmatch(logical.name):
                    boxes = _turned(logical, held, shape, save)
                    if boxes:
                        turned.add(logical.name)
            self._came_from[logical] = save.metadata
            self.logical[logical] = self._tensor(logical, held, shape, boxes, save)
        if save.guessed:
            self.notes.append(
                f"{save.metadata} does not say how large the tensors are, so a lost last shard would not show"
            )
        if turned:
            self.notes.append(
                f"{len(turned)} tensors of {save.metadata.parent} fuse gate and up, such as `{min(turned)}`: each shard"
                " is [gate up], and they are put together as all of one, all of the other"
            )

    def _tensor(
        self,
        key: Key,
        held: Sequence[flex_files.ShardBytes],
        shape: tuple[int, ...],
        boxes: Mapped | None,
        save: flex_files.FlexSave,
    ) -> LogicalTensor:
        pieces = []
        for h in held:
            for run, local in h.blocks:
                stored = run._replace(name=key.name, component=key.component, state=key.state)
                self.stored.append(stored)
                pieces += _pieces(stored, local.shift(h.shard.offset), boxes)
        dtype = pieces[0].stored.dtype if pieces else held[0].shard.dtype
        if not whole(shape).volume:
            return LogicalTensor(key, dtype, shape, ())
        try:
            return logical_tensor(key, shape, pieces, files=self.files)
        except IncompleteError as e:
            raise IncompleteError(
                e.what,
                where=[*e.where, str(save.metadata)],
                hint="the metadata places it in no file: the save did not finish, or ranks were left out of it",
            ) from None
        except ConflictError as e:
            raise ConflictError(
                e.what, where=[*e.where, str(save.metadata)], hint="files of different saves were put together"
            ) from None

    def derive_model(self, parameters: Mapping[str, str]) -> None:
        """The trainer saves no weights that have a master weight: they are its rounded elements."""
        said = self.config.get("dtype") or self.config.get("torch_dtype")
        default = CONFIG_DTYPES.get(str(said).removeprefix("paddle."), "")
        unknown, derived = [], 0
        for master in [t for t in self.logical.values() if t.key.component == "master_weights"]:
            key = Key(master.key.name)
            if key in self.logical:
                continue
            dtype = parameters.get(key.name, default)
            if not dtype:
                unknown.append(key.name)
                continue
            derived += 1
            self.logical[key] = LogicalTensor(key, master.dtype, master.shape, master.pieces, master.replicas)
            if dtype != master.dtype:
                self.dtypes[key] = dtype
        if derived:
            said = f"{derived} model weights are the rounded master weights: that is how the trainer saves"
            self.notes.append(Note("derived weights", said))
        if unknown:
            self.notes.append(
                f"{len(unknown)} tensors, such as `{unknown[0]}`, have only a master weight, and neither"
                " model_meta.json nor config.json says the dtype of the weight itself: the model is without them"
            )
        lost = [n for n in parameters if Key(n) not in self.logical and n not in unknown]
        if lost and any(k.component == "model" for k in self.logical):
            self.notes.append(
                f"{len(lost)} parameters of model_meta.json are in no file, such as `{lost[0]}`:"
                " the trainer does not save frozen ones"
            )


def _pieces(stored: StoredTensor, box: Box, boxes: Mapped | None) -> list[Piece]:
    """``box`` is that of the stored tensor in Paddle's coordinates."""
    if boxes is None:
        return [Piece(stored, whole(stored.shape), box)]
    out = []
    for written, plain in boxes:
        common = box.intersect(written)
        if common is not None:
            by = [b - a for a, b in zip(written.start, plain.start, strict=True)]
            out.append(Piece(stored, common.relative_to(box.start), common.shift(by)))
    return out


def _turned(
    key: Key, held: Sequence[flex_files.ShardBytes], shape: tuple[int, ...], save: flex_files.FlexSave
) -> Mapped | None:
    """The places of the halves of each shard of a fused gate and up; None when there is one shard on the last axis."""
    cuts = sorted({(h.shard.offset[-1], h.shard.stop[-1]) for h in held}) if shape else []
    if len(cuts) < 2:
        return None
    out: Mapped = []
    for start, stop in cuts:
        if start % 2 or stop % 2:
            raise UnsupportedError(
                f"`{key}` fuses gate and up, but its shard {start}:{stop} on the last axis has no two equal halves",
                where=str(save.metadata),
                hint="without config.json beside it the coordinates are taken as they are",
            )
        half = (stop - start) // 2
        for i in range(2):
            a, b = start + i * half, i * (shape[-1] // 2) + start // 2
            lead, rows = (0,) * (len(shape) - 1), shape[:-1]
            out.append((Box((*lead, a), (*rows, a + half)), Box((*lead, b), (*rows, b + half))))
    return out


# -- keys


def raw_keys(keys: Mapping[str, Any]) -> dict[str, Key]:
    """Every key is a tensor of that name."""
    return {k: Key(k) for k in keys}


def keys_of(component: str, keys: Mapping[str, Any]) -> dict[str, Key]:
    """The keys of one directory; ``component`` is the directory's, or ""."""
    if component == "model":
        return raw_keys(keys)  # a parameter's own name may end like a state
    if component in ("master_weights", "ema"):
        return {k: Key(k.removesuffix(f".{MASTER}"), component) for k in keys}
    split = {k: (n, s) for k in keys if (n := k.rpartition(".")[0]) and ((s := k.rpartition(".")[2]) in _SUFFIXES)}
    if component == "optimizer":
        # An accumulator of another optimizer is named like those of Adam.
        found = {k: split.get(k) or (m.groups() if (m := _STATE.fullmatch(k)) else (k, "")) for k in keys}
        return {k: _state(n, s) for k, (n, s) in found.items()}
    # Nothing but the keys says what they are. A parameter may be called `linear_0.w_0`, so a name is only a state of
    # another one when there is more of that.
    others: dict[str, int] = {}
    for name, _ in split.values():
        others[name] = others.get(name, 0) + 1
    return {
        k: _state(*split[k]) if k in split and (split[k][0] in keys or others[split[k][0]] > 1) else Key(k)
        for k in keys
    }


_SUFFIXES = frozenset({MASTER, *STATES})
_STATE = re.compile(r"(.+)\.([A-Za-z]\w*_\d+)")


def _state(name: str, state: str) -> Key:
    return Key(name, "master_weights") if state == MASTER else Key(name, "optimizer", state)


# -- writing


class _FlexKey(NamedTuple):
    """One key of one file."""

    key: str
    tensor: RankTensor
    offset: tuple[int, ...]
    whole: tuple[int, ...]
    run: tuple[int, int] | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        return self.tensor.shape if self.run is None else (self.run[1] - self.run[0],)


class _FlexWriter:
    """A target's ranks -> files and their record.

    Rank r of the mesh is ``sharding`` ranks of Paddle, which stand between the pipeline and the tensor-parallel
    coordinate (``order`` of fleet's hybrid_configs): (stage * sharding + share) * width + place in the stage.
    """

    def __init__(self, request: base.WriteRequest) -> None:
        self.request = request
        self.world = request.mesh.world * request.sharding
        model = [t for tensors in request.ranks for t in tensors if t.component == "model"]
        self.single = {t.name for t in model if t.dtype == "F32"}
        self.entries: dict[str, list[list[_FlexKey]]] = {}
        self.boxes: dict[str, dict[str, Any]] = {}
        self._share_out(self._placed())

    def _key(self, t: RankTensor) -> str:
        if t.component == "optimizer":
            return f"{t.name}.{t.state}" if t.state else t.name
        # The trainer averages master weights, and the parameter itself where that is float32 and has none.
        if t.component == "master_weights" or (t.component == "ema" and t.name not in self.single):
            return f"{t.name}.{MASTER}"
        return t.name

    def _placed(self) -> dict[tuple[str, Box, tuple[tuple[Box, Box], ...]], _FlexKey]:
        """Every distinct block by (tensor, its box, how it is put together), without its file."""
        blocks: dict[str, dict[tuple[Any, ...], RankTensor]] = {}
        for tensors in self.request.ranks:
            for t in tensors:
                _check(t)
                blocks.setdefault(t.key, {}).setdefault(_same(t), t)
        out = {}
        for key, found in blocks.items():
            offsets, shape = _coordinates(list(found.values()))
            record = []
            for (same, t), offset in zip(found.items(), offsets, strict=True):
                out[(key, *same)] = _FlexKey(self._key(t), t, offset, shape, None)
                record += [(a.shift(offset).start, b.start, a.shape) for a, b in t.boxes]
            first = next(iter(found.values()))
            # Where nothing is recorded, reading takes a fused gate and up for [gate up] in each block.
            if any(a != b for a, b, _ in record) or (len(found) > 1 and _FUSED.fullmatch(first.name)):
                own = self.boxes.setdefault(first.component, {})
                own[self._key(first)] = [first.whole, list(dict.fromkeys(record))]
        return out

    def _share_out(self, placed: Mapping[Any, _FlexKey]) -> None:
        """Give every block to the first rank that holds it, and flattened state to the ranks that share it."""
        mesh, ways = self.request.mesh, self.request.sharding
        seen = set()
        for rank, tensors in enumerate(self.request.ranks):
            stage, i = divmod(rank, mesh.width)
            runs: dict[tuple[str, str], list[_FlexKey]] = {}
            for t in tensors:
                ident = (t.key, *_same(t))
                if ident in seen:
                    continue
                seen.add(ident)
                if ways > 1 and t.component != "model" and prod(t.shape) > 1:
                    runs.setdefault((t.component, t.state), []).append(placed[ident])
                else:
                    self._add(stage * ways * mesh.width + i, placed[ident])
            for entries in runs.values():
                for share_, entry in _cut(entries, ways):
                    self._add((stage * ways + share_) * mesh.width + i, entry)

    def _add(self, rank: int, entry: _FlexKey) -> None:
        self.entries.setdefault(entry.tensor.component, [[] for _ in range(self.world)])[rank].append(entry)

    def file_layout(self) -> base.FileLayout:
        files: list[base.OutFile] = []
        ranks: list[list[RankTensor]] = [[] for _ in range(self.world)]
        places: list[dict[str, tuple[int, int]]] = [{} for _ in range(self.world)]
        rank_files: list[list[int]] = [[] for _ in range(self.world)]
        for component, directory in PARTS.items():
            by_rank = self.entries.get(component, [])
            shards: list[flex_files.Shard] = []
            for rank, entries in enumerate(by_rank):
                if not entries:
                    continue
                name = f"{rank}_0.distcp"
                written = layout_pickle(_contents(entries))
                rank_files[rank].append(len(files))
                for e in entries:
                    t, at = e.tensor, written.places[(e.key,)]
                    for part in [t] if e.run is None else flat_slices(t, *e.run):
                        ranks[rank].append(part)
                        places[rank][part.slot] = (len(files), at)
                        at += nbytes(t.dtype, prod(part.shape), where=t.name)
                    shards.append(flex_files.Shard(e.key, e.offset, t.shape, t.dtype, e.whole, e.run, name))
                files.append(base.OutFile(f"{directory}/{name}", written.size, tuple(written.literals)))
            # A trainer of float32 parameters saves no masters, and wants the record of them none the less.
            if shards or (component == "master_weights" and "optimizer" in self.entries):
                data = flex_files.metadata_pickle(shards, self.boxes.get(component, {}))
                files.append(base.OutFile(f"{directory}/0.metadata", len(data), ((0, data),)))
        usage = resume_flags(self.request, "flex_checkpoint")
        return base.FileLayout(
            files, places, self._notes(), rank_files, ranks,
            generated=schedule_file(self.request),
            dropped=tuple(n for n in self.request.companions if _OWN.fullmatch(n)),
            config=target_config(self.request.config, TARGETS[0], self.request.dtype),
            usage=usage,
        )  # fmt: skip

    def _notes(self) -> list[str]:
        notes = left_out(self.request)
        dtypes = {e.tensor.dtype for by_rank in self.entries.values() for entries in by_rank for e in entries}
        if dtypes & {"F8_E4M3", "F8_E5M2"}:
            notes.append("Paddle 3.3.1 takes float8 for int8 when it resumes on the ranks that are written here")
        return notes


def _same(t: RankTensor) -> tuple[Any, ...]:
    """The identity of a rank's block: two blocks have it in common when they are the same elements in the same
    order."""
    return t.shape, t.boxes


def _check(t: RankTensor) -> None:
    if t.pads or sum(a.volume for a, _ in t.boxes) != prod(t.shape):
        raise UnsupportedError(
            f"`{t.name}` would be padded to {list(t.shape)}, and flex_checkpoint has no padding",
            hint="choose sizes that divide it",
        )
    if t.dtype not in flex_files.PADDLE_DTYPES:
        raise UnsupportedError(f"`{t.name}` is {t.dtype}, which Paddle's files cannot hold")


def _coordinates(blocks: Sequence[RankTensor]) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """Offset of each block and the shape of the tensor, in Paddle's coordinates.

    They are those of the plain tensor, except that a block which is put together of several parts counts as one: the
    blocks of such a tensor stand side by side.
    """
    plain = [_shift(t) for t in blocks]
    first = blocks[0]
    if all(p is not None for p in plain):
        return [p for p in plain if p is not None], first.whole
    axes = {
        axis
        for t in blocks
        for axis in range(len(t.shape))
        if len({b.start[axis] - a.start[axis] for a, b in t.boxes}) > 1
    }
    if len(axes) != 1:
        raise UnsupportedError(f"`{first.name}` is put together on several axes, which flex_checkpoint cannot say")
    (axis,) = axes
    rows: dict[tuple[Any, ...], list[int]] = {}
    for i, t in enumerate(blocks):
        inner, outer = t.boxes[0]
        at = tuple([b - a for a, b in zip(inner.start, outer.start, strict=True)])
        rows.setdefault((_without(at, axis), _without(t.shape, axis)), []).append(i)
    offsets: list[tuple[int, ...]] = [()] * len(blocks)
    lengths = set()
    for (at, _), members in rows.items():
        length = 0
        for i in sorted(members, key=lambda i: min(b.start[axis] for _, b in blocks[i].boxes)):
            offsets[i] = (*at[:axis], length, *at[axis:])
            length += blocks[i].shape[axis]
        lengths.add(length)
    if len(lengths) != 1:
        raise UnsupportedError(f"the blocks of `{first.name}` do not stand side by side")
    return offsets, (*first.whole[:axis], lengths.pop(), *first.whole[axis + 1 :])


def _shift(t: RankTensor) -> tuple[int, ...] | None:
    """The start of the block if it is one box of the tensor, in however many parts it is listed."""
    if not t.boxes:
        return (0,) * len(t.shape)
    by = {tuple([b - a for a, b in zip(x.start, y.start, strict=True)]) for x, y in t.boxes}
    return by.pop() if len(by) == 1 else None


def _without(values: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*values[:axis], *values[axis + 1 :])


def _cut(entries: Sequence[_FlexKey], ways: int) -> Iterator[tuple[int, _FlexKey]]:
    """Lay blocks end to end and cut them evenly, as Paddle's sharding does with its buffers: (share, entry).

    A cut goes to the next end of a row. Paddle 3.3.1 loads a run that is not a box through the box around it, fills
    that only from other such runs, and so writes zeros over elements that a neighbour holds as a box.
    """
    total = sum(prod(e.tensor.shape) for e in entries)
    cuts = [share(total, ways, i)[1] for i in range(ways)]
    at = done = 0
    for e in entries:
        size = prod(e.tensor.shape)
        row = max(1, prod(e.tensor.shape[1:]))
        start = 0
        while start < size:
            while cuts[done] <= at + start:
                done += 1
            stop = size if done == ways - 1 else min(size, (cuts[done] - at + row // 2) // row * row)
            if stop > start:
                yield done, e._replace(run=(start, stop))
                start = stop
            if start < size:
                done += 1
        at += size


def _contents(entries: Sequence[_FlexKey]) -> dict[str, Any]:
    """The content of a .distcp. The table is what makes Paddle turn arrays into tensors; names in it are free."""
    out: dict[str, Any] = {e.key: Hole(e.tensor.dtype, e.shape) for e in entries}
    out["StructuredToParameterName@@"] = {e.key: e.key for e in entries}
    return out
