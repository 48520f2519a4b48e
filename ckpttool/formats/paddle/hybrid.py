"""Checkpoints of Paddle's hybrid-parallel trainers, and Zero-Cost Checkpoints: one set of pickles per rank.

::

    DIR/model_state.tp00_pp01_shard03.pdparams   {structured name: array, StructuredToParameterName@@: {...}}
    DIR/optimizer.tp00_pp01_shard03.pdopt        {<parameter>[_fp32_master_0]_moment1_0: array, ...,
                                                  master_weights: {<parameter>: array}, LR_Scheduler: {...}}
    DIR/ema.tp00_pp01_shard03.pdopt              {structured name: fp32 array, master_weights: {<parameter>: array}}
    DIR/model_meta.json                          names, shapes and dtypes of every model-parallel rank
    DIR/config.json, scheduler.pdparams, training_args.bin, rng_state_0.pth, saved_signal_0, ...

What the files say is brought together in three steps::

    files         by kind and ranks; the cross product of the degrees must be there
    cells         (stage, tp rank, expert rank): structured name <-> name of the parameter, unique in the cell only
    held arrays   (component, state, name, rank) -> what the shards hold, in ascending order of the shards

With a model_meta.json (sharding_io) the optimizer state is shared out over the shards, whole parameters (v1) or flat
slices laid end to end and padded (v2), and model_state leaves out every parameter that has a master weight: its value
is the master weight rounded to the parameter's dtype. Without one (the classic save) model_state is complete and holds
the names of the parameters.

A file's rank among the experts is ``(shard % ds) * mp + tp`` with ``ds = ep / mp``; experts over data-parallel ranks
have it in the name (``_moeNN``), and model_meta.json then lists the experts of all ranks under the same parameter.
Expert ids in names are either global or count from 0 in each rank; two ranks that use the same name tell.

Sources: ``trainer/utils/sharding_io.py``, ``trainer/utils/reshard/*.py``, ``trainer/utils/zero_cost_checkpoint.py`` and
``convert_opt_name_to_tname`` of paddleformers 1.2.0 and paddlenlp 3.0.0b4, ``EPHybridCommunicateGroup`` of paddle
3.3.1, and checkpoints that they wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, NamedTuple

from ckpttool.containers.paddle_pickle import PaddleFile, read_paddle
from ckpttool.containers.pickle import PickledArray
from ckpttool.containers.safetensors import read_header
from ckpttool.core.catalog import SHARDED, FlatShard, Key, StoredTensor
from ckpttool.core.files import DataFile, Place
from ckpttool.core.geometry import contiguous_strides
from ckpttool.core.mesh import MAX_WORLD, Mesh
from ckpttool.core.notes import Note
from ckpttool.core.patterns import exactly
from ckpttool.errors import ConflictError, CorruptError, IncompleteError, UnsupportedError, UsageError
from ckpttool.formats import base
from ckpttool.formats.config import whole_number
from ckpttool.formats.paddle import config as paddle_config
from ckpttool.formats.paddle import hybrid_names
from ckpttool.formats.paddle.hybrid_names import META, CellNames, ParamMeta, Suffix
from ckpttool.formats.paddle.sharding import ALIGNMENT, ITEMSIZE, TrainableParam, buffers, end_to_end
from ckpttool.formats.paddle.training import read_training, small_files
from ckpttool.storage.listing import Listing, list_source
from ckpttool.storage.nodes import check_copies, shared_config
from ckpttool.storage.place import read_each

MASTER = "_fp32_master_0"
"""Infix between a parameter's name and its state when the state belongs to the master weight."""

COMPONENTS = ("model", "master_weights", "optimizer", "ema")

MOST_RANKS = 4096
"""Ranks that are looked for one by one, and 64 more for each file; a larger size is a damaged number."""
_SIZE_FLAGS = {"tp": "tp", "pp": "pp", "shard": "sharding", "moe": "expert", "ep": "expert"}
_EXPERT = re.compile(r"(?<![^.])experts\.(\d{1,9})(?![^.])")
_LAYER = re.compile(r"(?<![^.])(?:layers|h|blocks)\.(\d{1,9})(?![^.])")

_STATES = tuple(sorted(paddle_config.STATES, key=lambda s: (s.startswith("beta"), s)))
"""Accumulators in the order in which they are listed."""

_UNIFIED = re.compile(r"model-\d{5}-of-\d{5}\.safetensors|model\.safetensors(?:\.index\.json)?")


class _HybridArray(NamedTuple):
    """One array of a file."""

    shape: tuple[int, ...]
    dtype: str
    file: int
    offset: int
    strides: tuple[int, ...] | None = None


class _ArraySlot(NamedTuple):
    """The destination of an array of a file."""

    component: str
    state: str
    name: str
    rank: int
    copy: int
    """Tensor-parallel rank of the file: copies of one tensor are not slices of it."""


@dataclass(slots=True)
class _HybridFiles:
    """The files of a checkpoint by kind."""

    kinds: dict[str, dict[Suffix, Place]] = field(default_factory=dict)
    meta: Place | None = None
    roots: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Degrees:
    """Parallel sizes of the source."""

    mp: int
    pp: int
    shards: int
    ep: int
    moe: int
    """Degree of experts over data-parallel ranks; else 1."""

    @property
    def ds(self) -> int:
        """Sharding ranks over which the experts of one sharding rank are spread."""
        return max(1, self.ep // self.mp)

    @property
    def experts(self) -> int:
        return max(self.ep, self.moe)

    def of(self, axis: str) -> int:
        return {"tp": self.mp, "pp": self.pp, "shard": self.shards, "moe": self.moe, "ep": self.ep}[axis]


@dataclass(slots=True)
class _CellLookup:
    """A cell with the ways back from what files say to global names."""

    names: CellNames
    by_struct: dict[str, str] = field(default_factory=dict)
    by_tname: dict[str, str] = field(default_factory=dict)
    experts: set[str] = field(default_factory=set)


class Hybrid:
    """One model_state and one optimizer file per rank."""

    name = "hybrid"
    dialect = "paddle"
    capabilities = base.Capabilities(
        components=COMPONENTS[:3],
        meshes="tp x pp; with experts ep is a multiple of tp, etp 1",
        targets=paddle_config.TARGETS,
        pad_vocab=False,
        multi_directory=True,
        optimizer_shards=True,
        own_files=r"model_state\..*\.pdparams",
        fp32_masters="dropped",
        default_target=True,
        states="paddle",
    )
    sharding_versions = ("v1", "v2")
    ema = False

    def detect(self, listing: Listing) -> int:
        kinds = _kinds(listing)
        if "ema" in kinds:
            return 2 if self.ema else 0
        if self.ema or not kinds & {"model_state", "optimizer"}:
            return 0
        unified = any(_UNIFIED.fullmatch(n) for n in listing.names)
        return 1 if unified and "model_state" not in kinds else 2

    def read(self, listing: Listing, options: base.ReadOptions) -> base.StoredCheckpoint:
        """Raises IncompleteError (files or tensors are missing), ConflictError (files, meta and flags disagree),
        CorruptError (a file is not what its name says), UnsupportedError (an unknown name or dtype).
        """
        return _HybridReader(self.name, listing, options, ema=self.ema).read()

    def target_mesh(self, asked: Mesh, said: Mapping[str, int]) -> Mesh:
        """Raises ConflictError for expert parallelism that Paddle's groups cannot have, UsageError for another etp."""
        etp = asked.tp if asked.ep == 1 else 1
        if said.get("etp", etp) != etp:
            raise UsageError(
                f"--etp-out {said['etp']} is not possible for --to {self.name} with tp {asked.tp}, ep {asked.ep}",
                hint="Paddle cuts experts over tp without expert parallelism, and keeps them whole with it",
            )
        if asked.ep == 1:
            return Mesh(asked.tp, asked.pp, 1, asked.tp, asked.layout)
        if asked.tp > 1 and asked.ep % asked.tp:
            raise ConflictError(
                f"ep {asked.ep} is not a multiple of tp {asked.tp}",
                hint="Paddle's expert groups lie over the tensor-parallel ranks: --ep-out is a multiple of --tp-out",
            )
        return Mesh(asked.tp, asked.pp, asked.ep, 1, asked.layout)

    def write(self, request: base.WriteRequest) -> base.FileLayout:
        from ckpttool.formats.paddle.hybrid_write import write_hybrid

        return write_hybrid(request, ema=self.name == "zcc")


class ZeroCost(Hybrid):
    """The same with averaged weights beside the optimizer."""

    name = "zcc"
    capabilities = Hybrid.capabilities._replace(components=COMPONENTS)
    ema = True


def _kinds(listing: Listing) -> set[str]:
    names = [listing.single] if listing.single else listing.names
    return {found[0] for n in names if (found := hybrid_names.parse_file_name(n))}


def _find(listing: Listing, options: base.ReadOptions, *, ema: bool) -> _HybridFiles:
    """All files of the checkpoint in all its directories. Raises ConflictError for two that differ."""
    found = _HybridFiles()
    named: dict[str, Place] = {}
    for at in (listing, *(list_source(p) for p in options.more)):
        found.roots.append(str(at.root))
        for name in at.names:
            path = at.path(name)
            kind = hybrid_names.parse_file_name(name)
            if kind is None and name != META:
                continue
            if name in named:
                check_copies(named[name], path)
                continue
            named[name] = path
            if kind is None:
                found.meta = path
            elif kind[1] is None:
                if kind[0] == "model":
                    continue  # model.fp16.safetensors and the like
                raise UnsupportedError(
                    f"the ranks in the name {name} are not of a kind that is known",
                    where=str(path),
                    hint="names look like optimizer.tp00_pp01_shard03_moe00.pdopt, parts of degree 1 left out;"
                    " move the file away if it is not part of the checkpoint",
                )
            elif kind[0] != "ema" or ema:
                found.kinds.setdefault(kind[0], {})[kind[1]] = path
    if "model_state" in found.kinds:
        found.kinds.pop("model", None)  # an export that lies beside the checkpoint
    if not found.kinds:
        raise IncompleteError("there are no model_state*.pdparams and optimizer*.pdopt files here", where=found.roots)
    for stem, files in found.kinds.items():
        axes = {s.axes for s in files}
        if len(axes) > 1:
            shown = [str(next(p for s, p in files.items() if s.axes == a)) for a in sorted(axes)]
            raise ConflictError(
                f"the names of the {stem} files have different parts: two checkpoints lie in one directory",
                where=shown,
                hint="move the files of the other checkpoint away",
            )
        found.kinds[stem] = dict(sorted(files.items(), key=lambda f: tuple(-1 if n is None else n for n in f[0])))
    return found


def _degrees(found: _HybridFiles, meta: hybrid_names.ModelMeta | None, config: Mapping[str, Any]) -> _Degrees:
    """Sizes by the meta where there is one, else by the names. Raises ConflictError where both disagree."""
    most = dict.fromkeys(Suffix._fields, 1)
    for files in found.kinds.values():
        for ranks in files:
            for axis in ranks.axes:
                most[axis] = max(most[axis], getattr(ranks, axis) + 1)
    if meta is None:
        said = config.get("tensor_parallel_degree", config.get("tensor_model_parallel_size"))
        # Files are called tpNN where there are several ranks only: rank 0 alone is not all of them.
        if type(said) is int and any("tp" in ranks.axes for files in found.kinds.values() for ranks in files):
            most["tp"] = max(most["tp"], said)
        sizes = _Degrees(most["tp"], most["pp"], most["shard"], most["ep"], most["moe"])
    else:
        sizes = _Degrees(meta.mp, meta.pp, meta.sharding, meta.ep, most["moe"])
    where = [*([str(found.meta)] if meta else []), *found.roots]
    says = META if meta else "the file names"
    for axis, n in most.items():
        if n > sizes.of(axis):  # only a meta can say less
            raise ConflictError(
                f"there are files of {axis}{n - 1:02d}, but {META} says {_SIZE_FLAGS[axis]} {sizes.of(axis)}",
                where=where,
                hint=f"the files and {META} are not of one save",
            )
    files_there = sum(len(files) for files in found.kinds.values())
    ranks_said = sizes.mp * sizes.pp * sizes.shards * sizes.moe
    if max(ranks_said, sizes.ep) > MOST_RANKS + 64 * files_there:
        raise ConflictError(
            f"{says} say{'s' if meta else ''} that there are {ranks_said:,} ranks, and {files_there} files are here",
            where=where,
            hint="the sizes are wrong, or nearly all files are missing",
        )
    if sizes.ep > 1 and sizes.moe > 1:
        raise ConflictError(
            f"files are named _moeNN, which ep {sizes.ep} of {says} excludes",
            where=where,
            hint="experts are spread over expert-parallel or over data-parallel ranks",
        )
    if sizes.ep > 1 and (sizes.ep % sizes.mp or sizes.shards % sizes.ds):
        raise ConflictError(
            f"mp {sizes.mp}, sharding {sizes.shards} and ep {sizes.ep}, which {says} say, cannot be together",
            where=where,
            hint="ep is a multiple of mp, and sharding a multiple of ep / mp",
        )
    return sizes


def _read_kind(found: _HybridFiles, kind: str) -> Iterator[tuple[Suffix, PaddleFile]]:
    """The files of a kind, each with its ranks."""
    places = found.kinds.get(kind, {})
    return zip(places, read_each(read_paddle, list(places.values())), strict=True)


def _complete(found: _HybridFiles, sizes: _Degrees) -> None:
    """Every combination of ranks has its files. Raises IncompleteError with the names of those missing."""
    missing = []
    for kind, files in found.kinds.items():
        axes = set(next(iter(files)).axes)
        needed = {a for a in ("tp", "pp", "shard", "moe") if sizes.of(a) > 1}
        if kind in ("model_state", "model"):
            # The classic save writes weights once and shares only the optimizer out.
            needed -= {"shard"} if "shard" not in axes else set()
        # A degree of 1 may be written out nevertheless: rank 0 alone is complete.
        every = [range(sizes.of(a)) if a in needed | axes else (None,) for a in Suffix._fields]
        if (count := prod(map(len, every))) > MAX_WORLD:
            raise IncompleteError(f"nearly all of {count:,} {kind} files are missing", where=found.roots)
        wanted = [Suffix(*ranks) for ranks in product(*every)]
        # Expert ranks lie over the tensor-parallel ranks.
        wanted = [r for r in wanted if r.ep is None or r.ep % sizes.mp == (r.tp or 0)]
        missing += [hybrid_names.file_name(kind, ranks) for ranks in wanted if ranks not in files]
    if missing:
        shown = ", ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")
        raise IncompleteError(
            f"{len(missing)} file{'s are' if len(missing) > 1 else ' is'} missing: {shown}",
            where=found.roots,
            hint="a save over several nodes leaves a part on each: bring the files together, or name the other"
            " directories with --also",
        )


@dataclass(slots=True)
class _HybridReader:
    """One source while it is read."""

    format: str
    listing: Listing
    options: base.ReadOptions
    ema: bool
    config: dict[str, Any] = field(default_factory=dict)
    meta: hybrid_names.ModelMeta | None = None
    sizes: _Degrees = field(default_factory=lambda: _Degrees(1, 1, 1, 1, 1))
    mesh: Mesh = field(default_factory=Mesh)
    cells: dict[tuple[int, int, int], _CellLookup] = field(default_factory=dict)
    local_experts: bool = False
    schedule: dict[str, Any] | None = None
    files: list[DataFile] = field(default_factory=list)
    held: dict[_ArraySlot, list[_HybridArray]] = field(default_factory=dict)
    shapes: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    """(name, rank) -> shape of the rank's tensor."""
    shards: list[Sequence[FlatShard]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    derived: set[str] = field(default_factory=set)
    """Weights that are only there as master weights."""
    _index: dict[DataFile, int] = field(default_factory=dict)
    _ranks: dict[tuple[int, int, int, bool], int] = field(default_factory=dict)

    def read(self) -> base.StoredCheckpoint:
        listing = self.listing
        found = _find(listing, self.options, ema=self.ema)
        listings = [listing, *(list_source(p) for p in self.options.more)]
        self.config = shared_config(listings)
        if found.meta is not None:
            self.meta = hybrid_names.parse_meta(list_source(found.meta.parent).json(META), str(found.meta))
        self.sizes = _degrees(found, self.meta, self.config)
        _complete(found, self.sizes)
        weights = dict(_read_kind(found, "model_state"))
        self._make_cells(self._tables(found, weights))
        self._make_mesh()
        for ranks, held in weights.items():
            self._add_weights(ranks, held)
        for ranks, path in found.kinds.get("model", {}).items():
            self._add_safetensors(ranks, path)
        for ranks, held in _read_kind(found, "optimizer"):
            self._add_optimizer(ranks, held)
        for ranks, held in _read_kind(found, "ema"):
            self._add_ema(ranks, held)
        if not self.ema and "ema" in _kinds(listing):
            self.notes.append("ema.*.pdopt is not read: --from zcc reads it as well")
        self._check_order(found)
        dtypes = self._derive()
        self._check_all_there(found)
        tensors = self._store()
        native = self._native()
        return base.StoredCheckpoint(
            self.format,
            listing.root,
            self.files,
            tensors,
            self.mesh,
            dialect="paddle",
            config=self.config,
            companions=self._companions(),
            whole=self._whole(),
            records_cuts=self.meta is not None or self.sizes.mp == 1,
            notes=self.notes,
            shards=self.shards,
            dtypes=dtypes,
            sharding=self.sizes.shards,
            native=native,
            training=read_training(listing, native.schedule),
        )

    # Cells: which parameter a name means.

    def _at(self, ranks: Suffix) -> tuple[int, int, int]:
        """The cell of a file."""
        tp, pp, shard = ranks.tp or 0, ranks.pp or 0, ranks.shard or 0
        if ranks.ep is not None:
            return pp, tp, ranks.ep
        if self.sizes.ep > 1:
            return pp, tp, shard % self.sizes.ds * self.sizes.mp + tp
        return pp, tp, ranks.moe or 0

    def _tables(
        self, found: _HybridFiles, weights: Mapping[Suffix, PaddleFile]
    ) -> dict[tuple[int, int, int], CellNames]:
        """The tables of each cell, from meta or else from the weights' own; names as written."""
        sizes, meta = self.sizes, self.meta
        tables: dict[tuple[int, int, int], CellNames] = {}
        if meta is None:
            for ranks, held in weights.items():
                table = tables.setdefault(self._at(ranks), CellNames({}, {}))
                table.names |= {name: held.structured.get(name, "") for name in (*held.tensors, *held.chunks)}
                table.names |= held.structured
            return tables
        for pp, tp, rank in product(range(sizes.pp), range(sizes.mp), range(max(sizes.ds, sizes.moe))):
            ep = rank * sizes.mp + tp if sizes.ep > 1 else rank
            key = hybrid_names.cell_key(tp, pp, ep if sizes.ep > 1 else None)
            cell = meta.cells.get(key)
            if cell is None:
                raise IncompleteError(
                    f"{META} has no entry {key}",
                    where=[str(found.meta), f"entries: {', '.join(list(meta.cells)[:8])}"],
                    hint="the file is not of the same save as the others, or it was written by one node of several",
                )
            names, params = cell.names, cell.params
            if sizes.moe > 1:
                names = self._of_data_rank(names, params, rank, str(found.meta))
                params = {name: params[name] for name in params if name in names or name not in cell.names}
            tables[pp, tp, ep] = CellNames(dict(names), dict(params))
        return tables

    def _of_data_rank(
        self, names: Mapping[str, str], params: Mapping[str, ParamMeta], rank: int, where: str
    ) -> dict[str, str]:
        """The names of one data-parallel rank, of a table in which those of all ranks were gathered."""
        experts: dict[str, list[str]] = {}
        for name, tname in names.items():
            if name in params and params[name].no_sync:
                experts.setdefault(tname, []).append(name)
        others = set()
        for tname, gathered in experts.items():
            if len(gathered) == 1:
                continue
            if len(gathered) != self.sizes.moe:
                raise ConflictError(
                    f"{META} has {len(gathered)} experts for `{tname}`, but there are files of {self.sizes.moe} ranks",
                    where=[where, *gathered[:4]],
                    hint="files of some data-parallel ranks (_moeNN) are missing, or those of another save are there",
                )
            own = sorted(gathered, key=lambda n: int(m[1]) if (m := _EXPERT.search(n)) else -1)[rank]
            others |= set(gathered) - {own}
        return {name: tname for name, tname in names.items() if name not in others}

    def _make_cells(self, tables: Mapping[tuple[int, int, int], CellNames]) -> None:
        """Give experts their global numbers."""
        spread = self.sizes.experts > 1
        experts = {
            at: {
                n
                for n in (*table.params, *table.names)
                if spread and (table.params[n].no_sync if n in table.params else _EXPERT.search(n) is not None)
            }
            for at, table in tables.items()
        }
        first: dict[tuple[int, str], int] = {}
        for (pp, _, ep), names in experts.items():
            for name in names:
                if _EXPERT.search(name) and first.setdefault((pp, name), ep) != ep:
                    self.local_experts = True
        counts: dict[tuple[int, str], dict[int, set[int]]] = {}
        for (pp, _, ep), names in experts.items():
            for name in names:
                if m := _EXPERT.search(name):
                    counts.setdefault((pp, name[: m.start(1)]), {}).setdefault(ep, set()).add(int(m[1]))

        def globally(name: str, pp: int, ep: int) -> str:
            m = _EXPERT.search(name)
            if not self.local_experts or m is None:
                return name
            held = counts[pp, name[: m.start(1)]]
            by = sum(max(held[r]) + 1 for r in range(ep) if r in held)
            return f"{name[: m.start(1)]}{int(m[1]) + by}{name[m.end(1) :]}"

        for at, table in tables.items():
            pp, _, ep = at
            cell = _CellLookup(CellNames({}, {}))
            for name in dict.fromkeys((*table.names, *table.params)):
                new = globally(name, pp, ep) if name in experts[at] else name
                cell.by_struct[name] = new
                if name in experts[at]:
                    cell.experts.add(new)
                if name in table.params:
                    cell.names.params[new] = table.params[name]
                if tname := table.names.get(name):
                    cell.names.names[new] = tname
                    # Tied weights share a parameter; the first of their names is the one that is saved.
                    cell.by_tname.setdefault(tname, new)
            self.cells[at] = cell

    def _make_mesh(self) -> None:
        sizes = self.sizes
        etp = sizes.mp
        if sizes.ep > 1:
            etp = 1
        elif sizes.moe > 1 and self.meta is not None:
            params = [c.names.params[n] for c in self.cells.values() for n in c.experts if n in c.names.params]
            etp = sizes.mp if any(p.distributed for p in params) else 1
        self.mesh = Mesh(sizes.mp, sizes.pp, sizes.experts, etp, self.options.layout or self._layout())
        said = {"tp": sizes.mp, "pp": sizes.pp, "ep": sizes.experts, "etp": etp}
        base.check_mesh("model_meta.json" if self.meta else "file names", said, self.options, self.listing.root)
        if self.options.sharding not in (None, sizes.shards):
            raise ConflictError(
                f"the optimizer state is shared out over {sizes.shards} ranks, not {self.options.sharding}",
                where=str(self.listing.root),
                hint="drop --sharding: it is read from the checkpoint. What is written is --sharding-out",
            )
        for at, cell in self.cells.items():
            for name, param in cell.names.params.items():
                shape = self.shapes.setdefault((name, self._rank(at, name)), param.shape)
                if shape != param.shape:
                    raise ConflictError(
                        f"{META} gives `{name}` the shapes {list(shape)} and {list(param.shape)} on one rank",
                        where=str(self.listing.root),
                    )

    def _layout(self) -> tuple[int, ...]:
        """Layers of each stage where they are not shared out evenly."""
        layers = whole_number(self.config, "num_hidden_layers")
        if self.sizes.pp == 1 or layers is None:
            return ()
        stages: list[set[int]] = [set() for _ in range(self.sizes.pp)]
        for (pp, _, _), cell in self.cells.items():
            for name in cell.names.names:
                m = _LAYER.search(name)
                if m and int(m[1]) < layers:
                    stages[pp].add(int(m[1]))
        held = [n for stage in stages for n in sorted(stage)]
        counts = tuple(len(s) for s in stages)
        # Interleaved (virtual) stages come in another order, and are not said by a number per stage.
        return counts if held == list(range(layers)) and len(set(counts)) > 1 else ()

    def _rank(self, at: tuple[int, int, int], name: str) -> int:
        key = (*at, name in self.cells[at].experts)
        if key not in self._ranks:
            pp, tp, ep, expert = key
            coords = {"ep": ep, "etp": tp if self.mesh.etp > 1 else 0} if expert else {"tp": tp}
            self._ranks[key] = self.mesh.rank_of(pp=pp, **coords)
        return self._ranks[key]

    # Arrays: what each file holds.

    def _file(self, file: DataFile) -> int:
        if file not in self._index:
            self._index[file] = len(self.files)
            self.files.append(file)
        return self._index[file]

    def _held(self, array: PickledArray, dtype: str = "") -> _HybridArray:
        # numpy lacks bfloat16, and Paddle's uint16 arrays are nothing else.
        dtype = dtype or ("BF16" if array.dtype == "U16" else array.dtype)
        strides = None
        if array.fortran and len(array.shape) > 1:
            strides = tuple(reversed(contiguous_strides(array.shape[::-1])))
        return _HybridArray(array.shape, dtype, self._file(array.file), array.offset, strides)

    def _add(
        self, component: str, state: str, at: tuple[int, int, int], name: str, held: Iterable[_HybridArray]
    ) -> None:
        if self.sizes.moe > 1 and at[2] > 0 and name not in self.cells[at].experts:
            return  # dense parameters are those of the first data-parallel rank
        slot = _ArraySlot(component, state, name, self._rank(at, name), at[1])
        self.held.setdefault(slot, []).extend(held)

    def _add_weights(self, ranks: Suffix, file: PaddleFile) -> None:
        at = self._at(ranks)
        for written, arrays in _all_arrays(file):
            name = self._structured(written, at, file.info.place)
            if name is None:
                continue
            param = self.cells[at].names.params.get(name)
            dtype = _weight_dtype(name, arrays[0], param, file.info.place, paddle_config.fp8_dtype(self.config))
            parts = [self._held(a, dtype) for a in arrays]
            if param is None and len(parts) > 1:
                raise UnsupportedError(
                    f"`{written}` is saved in {len(parts)} parts, and nothing says its shape",
                    where=str(file.info.place),
                    hint="paddle.save cuts large tensors for pickle protocols 2 and 3; save it with protocol 4",
                )
            if param is None:
                self.shapes.setdefault((name, self._rank(at, name)), parts[0].shape)
            self._add("model", "", at, name, parts)

    def _add_safetensors(self, ranks: Suffix, path: Place) -> None:
        """Weights that ``save_to_hf`` wrote, which turns those of linear layers round."""
        if self.meta is None:
            raise IncompleteError(
                f"{path.name} lies beside an optimizer, but the save does not record which parameter of it each tensor"
                " is",
                where=str(path),
                hint="--from hf reads the weights alone; the optimizer needs model_state.*.pdparams or model_meta.json",
            )
        at = self._at(ranks)
        head = read_header(path, len(self.files))
        self._file(head.file)
        writer = paddle_config.software(self.config)
        prefix = paddle_config.base_prefix(self.cells[at].by_struct)
        for t in head.tensors:
            name = self._structured(t.name, at, path)
            if name is None:
                continue
            held = _HybridArray(t.shape, t.dtype, t.file, t.offset)
            if paddle_config.transposed_on_disk(t.name, len(t.shape), writer, prefix, self.config):
                held = held._replace(shape=t.shape[::-1], strides=(1, t.shape[1]))
            param = self.cells[at].names.params.get(name)
            if param is not None and param.dtype != t.dtype:
                raise _dtype_conflict(name, t.dtype, param, path)
            self._add("model", "", at, name, [held])

    def _structured(self, written: str, at: tuple[int, int, int], path: Place) -> str | None:
        """The global name for one in a file."""
        cell = self.cells[at]
        name = cell.by_struct.get(written)
        if name is None:
            if self.sizes.moe > 1 and any(written in c.by_struct for c in self.cells.values()):
                return None
            raise ConflictError(
                f"`{written}` is in a file, but {META} does not list it for this rank",
                where=[
                    str(path),
                    f"{META}: {hybrid_names.cell_key(at[1], at[0], at[2] if self.sizes.ep > 1 else None)}",
                ],
                hint=f"the file and {META} are not of one save, or this kind of save is not known yet",
            )
        return name

    def _add_optimizer(self, ranks: Suffix, file: PaddleFile) -> None:
        at = self._at(ranks)
        where = file.info.place
        for key, arrays in _all_arrays(file):
            tname, state = _split_state(key, where)
            name = self._parameter(tname, at, where)
            self._add("optimizer", state, at, name, [self._held(a) for a in arrays])
        self._add_masters("master_weights", at, file)
        schedule = file.other.get("LR_Scheduler")
        if self.schedule is None and isinstance(schedule, dict):
            self.schedule = dict(schedule)

    def _add_ema(self, ranks: Suffix, file: PaddleFile) -> None:
        at = self._at(ranks)
        for written, arrays in _all_arrays(file):
            name = self._structured(written, at, file.info.place)
            if name is not None:
                self._add("ema", "", at, name, [self._held(a) for a in arrays])
        self._add_masters("ema", at, file)

    def _add_masters(self, component: str, at: tuple[int, int, int], file: PaddleFile) -> None:
        masters = file.other.get("master_weights", {})
        if not isinstance(masters, dict):
            raise CorruptError("master_weights is not a dict of tensors", where=str(file.info.place))
        for tname, value in masters.items():
            array = value[1] if isinstance(value, tuple) and len(value) == 2 else value
            if not isinstance(tname, str) or not isinstance(array, PickledArray):
                raise CorruptError(f"master_weights: `{tname}` is not a tensor", where=str(file.info.place))
            name = self._parameter(tname.removesuffix(MASTER), at, file.info.place)
            self._add(component, "", at, name, [self._held(array)])

    def _parameter(self, tname: str, at: tuple[int, int, int], path: Place) -> str:
        """The global name of a parameter of the optimizer."""
        cell = self.cells.get(at)
        if cell is not None and tname in cell.by_tname:
            return cell.by_tname[tname]
        if cell is None or not cell.by_tname:
            raise IncompleteError(
                f"the save does not record which tensor the optimizer's `{tname}` is",
                where=str(path),
                hint=f"the names are in {META}, or in the model_state file of the same ranks",
            )
        raise ConflictError(
            f"the optimizer has state of `{tname}`, which is the name of no parameter of this rank",
            where=[str(path), f"names are such as {', '.join(list(cell.by_tname)[:3])}"],
            hint=f"the file and {META if self.meta else 'model_state'} are not of one save",
        )

    # Stored tensors.

    def _derive(self) -> dict[Key, str]:
        """Weights that are saved as master weights only."""
        present = {slot.name for slot in self.held if slot.component == "model"}
        params = {name: p for c in self.cells.values() for name, p in c.names.params.items()}
        dtypes = {}
        for slot, held in list(self.held.items()):
            if slot.component != "master_weights" or slot.name in present:
                continue
            self.derived.add(slot.name)
            self.held[slot._replace(component="model")] = held
            param = params.get(slot.name)
            dtype = param.dtype if param else paddle_config.config_dtype(self.config)
            if dtype and dtype != held[0].dtype:
                dtypes[Key(slot.name)] = dtype
        if dtypes:
            rounded = ", ".join(sorted(set(dtypes.values())))
            self.notes.append(Note("derived weights", f"model weights are master_weights rounded to {rounded}"))
        return dtypes

    def _check_all_there(self, found: _HybridFiles) -> None:
        """Every parameter of model_meta.json has a value. Raises IncompleteError naming those without."""
        have = {(slot.name, slot.rank) for slot in self.held if slot.component == "model"}
        missing: dict[str, None] = {}
        for at, cell in self.cells.items():
            for name in cell.names.params:
                saved_as = cell.by_tname.get(cell.names.names.get(name, ""), name)
                if not {(name, self._rank(at, name)), (saved_as, self._rank(at, saved_as))} & have:
                    missing[name] = None
        if not missing:
            return
        shown = list(missing)[:8]
        if "optimizer" not in found.kinds:
            hint = "parameters with a master weight are saved as that only: the optimizer.*.pdopt files are needed"
        else:
            hint = (
                "frozen parameters are only saved with save_sharding_stage1_model_include_freeze_params;"
                " they are those of the model that training started from"
            )
        raise IncompleteError(
            f"{len(missing)} parameter{'s' if len(missing) > 1 else ''} of {META} {'are' if len(missing) > 1 else 'is'}"
            " in no file",
            where=[str(found.meta), *shown, *(["..."] if len(missing) > len(shown) else [])],
            hint=hint,
        )

    def _check_order(self, found: _HybridFiles) -> None:
        """Slices are joined in the order of the shards' numbers, so files that changed places would be scrambled.

        Where each file has the slices that version 2 gives to another shard, they did: ConflictError. Files that fit
        no shard are left alone, because a trainer may lay its buffers out in other sizes.
        """
        if self._strategy() != "ShardingV2" or self.sizes.experts > 1:
            return
        lengths: dict[Place, dict[str, int]] = {}
        for slot, parts in self.held.items():
            if slot.component == "master_weights":
                for h in parts:
                    lengths.setdefault(self.files[h.file].place, {})[slot.name] = prod(h.shape)
        for (pp, tp, _), cell in self.cells.items():
            files = {
                r.shard: path
                for r, path in found.kinds.get("optimizer", {}).items()
                if (r.pp or 0, r.tp or 0) == (pp, tp) and r.shard is not None
            }
            held = {shard: lengths.get(path, {}) for shard, path in files.items()}
            trained = {n for names in held.values() for n in names}
            params = [
                TrainableParam(n, m.dtype, prod(m.shape))
                for s, n in cell.by_struct.items()
                if n in trained and (m := cell.names.params.get(n) or cell.names.params.get(s)) and m.dtype in ITEMSIZE
            ]
            if {p.name for p in params} != trained:
                continue
            usual: list[dict[str, int]] = [{} for _ in range(self.sizes.shards)]
            for buffer in buffers(params, self.sizes.shards):
                for name in buffer.starts:
                    for shard, (start, stop) in buffer.spans(name):
                        usual[shard][name] = stop - start
            looks = {shard: [i for i, u in enumerate(usual) if u == its] for shard, its in held.items()}
            moved = {shard: i[0] for shard, i in looks.items() if i and shard not in i}
            if moved and all(looks.values()):
                raise ConflictError(
                    f"{files[min(moved)].name} holds what shard {moved[min(moved)]} holds: files changed places",
                    where=[str(files[s]) for s in sorted(moved)][:4],
                    hint="give the files back their names: slices are joined in the order of the shards",
                )

    def _store(self) -> list[StoredTensor]:
        """Stored tensors in the order of components, states and the model."""
        order: dict[str, int] = {}
        for _, cell in sorted(self.cells.items()):
            for name in cell.by_struct.values():
                order.setdefault(name, len(order))
        states = ("", *_STATES)

        def place(slot: _ArraySlot) -> tuple[int, ...]:
            kind = COMPONENTS.index(slot.component), states.index(slot.state)
            return (*kind, order[slot.name], slot.rank, slot.copy)

        return [t for slot in sorted(self.held, key=place) for t in self._stored(slot, self.held[slot])]

    def _stored(self, slot: _ArraySlot, held: Sequence[_HybridArray]) -> Iterator[StoredTensor]:
        """Whole tensors as they are, one for each copy; slices as one tensor in shards."""
        name, component, state = slot.name, slot.component, slot.state
        shape = self.shapes.get((name, slot.rank))
        if state.endswith("_pow_acc_0"):
            # Every shard that holds a part of the parameter has this, too; the copies are compared.
            for h in held:
                if prod(h.shape) != 1:
                    raise self._wrong_shape(slot, h, (1,))
                yield StoredTensor(name, h.dtype, h.shape, h.file, h.offset, slot.rank, None, component, state)
            return
        if shape is None:
            shape = held[0].shape
            if len(shape) < 2 and self.sizes.shards > 1:
                raise IncompleteError(
                    f"the shape of `{name}` is not known: there are only slices of it",
                    where=[str(self.files[h.file].place) for h in held[:4]],
                    hint=f"shapes are in {META}, or in the model_state files",
                )
        strategy = self._strategy()
        flat = any(h.shape != shape for h in held)
        if not flat and len(shape) == 1 and len(held) > 1:
            # Slices may be as long as the whole by chance, when the last of them is all padding.
            flat = strategy != "ShardingV1" and (component != "model" or name in self.derived)
        if not flat:
            for h in held:
                yield StoredTensor(name, h.dtype, shape, h.file, h.offset, slot.rank, h.strides, component, state)
            return
        yield self._sliced(slot, held, shape, strategy)

    def _sliced(
        self, slot: _ArraySlot, held: Sequence[_HybridArray], shape: tuple[int, ...], strategy: str
    ) -> StoredTensor:
        for h in held:
            if len(h.shape) != 1 or strategy == "ShardingV1":
                raise self._wrong_shape(slot, h, shape)
        size, length = prod(shape), sum(h.shape[0] for h in held)
        label = Key(slot.name, slot.component, slot.state)
        if length < size:
            raise IncompleteError(
                f"the slices of `{label}` {list(shape)} have {length:,} of its {size:,} elements",
                where=self._lengths(held),
                hint=f"the file of a shard is missing or is one of another save, or {META} is",
            )
        # A parameter is padded to a multiple of 256 bytes for every shard; of which dtype is not always known.
        if length >= size + ALIGNMENT * self.sizes.shards:
            raise ConflictError(
                f"the slices of `{label}` {list(shape)} have {length:,} elements, {length - size:,} more than it"
                " and its padding",
                where=self._lengths(held),
                hint=f"the shards and {META} are not of one save",
            )
        belongs = slot.rank, None, slot.component, slot.state
        runs = [StoredTensor(slot.name, h.dtype, h.shape, h.file, h.offset, *belongs) for h in held]
        self.shards.append(end_to_end(runs))
        return StoredTensor(slot.name, held[0].dtype, shape, SHARDED, len(self.shards) - 1, *belongs)

    def _lengths(self, held: Sequence[_HybridArray]) -> list[str]:
        return [f"{self.files[h.file].place} [{h.shape[0]:,} elements]" for h in held]

    def _wrong_shape(self, slot: _ArraySlot, held: _HybridArray, shape: tuple[int, ...]) -> ConflictError:
        source = META if self.meta else "the weight in model_state"
        return ConflictError(
            f"`{Key(slot.name, slot.component, slot.state)}` is {list(held.shape)} in a file, not {list(shape)}",
            where=str(self.files[held.file].place),
            hint=f"the shape is that of {source}; are the files of one save?",
        )

    def _strategy(self) -> str:
        return next((c.strategy for c in self.meta.cells.values()), "") if self.meta else ""

    # The rest of what is known.

    def _whole(self) -> tuple[str, ...]:
        """Patterns of the tensors that the files say are not cut."""
        if self.mesh.world == 1:
            return ()
        uncut: dict[str, bool] = {}
        for cell in self.cells.values():
            for name in cell.by_struct.values():
                uncut[name] = uncut.get(name, True) and self._uncut(name, cell)
        return exactly(uncut)

    def _uncut(self, name: str, cell: _CellLookup) -> bool:
        if name in cell.experts and self.mesh.etp == 1:
            # Those of one rank may be stacked in one tensor, of which each rank holds its part.
            return _EXPERT.search(name) is not None
        if self.meta is None or self.sizes.mp == 1:
            return self.sizes.mp == 1
        return name in cell.names.params and not cell.names.params[name].distributed

    def _companions(self) -> tuple[str, ...]:
        """Small files of the checkpoint, those of the trainer included."""
        listing = self.listing
        if listing.single:
            return ()
        own = [n for n in listing.names if n == META or hybrid_names.parse_file_name(n)]
        carried, notes = small_files(listing, own)
        self.notes += notes
        return carried

    def _native(self) -> hybrid_names.HybridNames:
        sizes, meta = self.sizes, self.meta
        writer = paddle_config.software(self.config).name
        if not writer and meta is not None:
            writer = "paddlenlp" if meta.nlp else "paddleformers"
        return hybrid_names.HybridNames(
            writer=writer,
            mp=sizes.mp,
            pp=sizes.pp,
            sharding=sizes.shards,
            ep=sizes.experts,
            moe_sharding=sizes.shards // sizes.ds if sizes.ep > 1 else 0,
            data_parallel_experts=sizes.moe > 1,
            strategy=self._strategy(),
            has_meta=meta is not None,
            schedule=self.schedule,
            local_experts=self.local_experts,
            cells={at: cell.names for at, cell in sorted(self.cells.items())},
        )


def _all_arrays(file: PaddleFile) -> Iterator[tuple[str, Sequence[PickledArray]]]:
    """Tensors by name, those that were cut because of their size as their parts.

    Raises UnsupportedError for tensors in places where none are known: leaving them out would lose them.
    """
    for name, array in file.tensors.items():
        if name not in file.chunks:
            yield name, (array,)
    yield from file.chunks.items()
    for name, value in file.other.items():
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], PickledArray):
            yield name, (value[1],)  # pickled without Paddle, which Paddle reads all the same
        elif name != "master_weights" and _has_arrays(value):
            raise UnsupportedError(
                f"there are tensors inside `{name}`, where none are expected",
                where=str(file.info.place),
                hint="this kind of save is not known",
            )


def _has_arrays(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_arrays(v) for v in value.values())
    # An array is a tuple itself.
    return isinstance(value, PickledArray) or (isinstance(value, list | tuple) and any(_has_arrays(v) for v in value))


def _split_state(key: str, path: Place) -> tuple[str, str]:
    """(name of the parameter, state) of a key in an optimizer's file."""
    for state in _STATES:
        if key.endswith("_" + state):
            return key[: -len(state) - 1].removesuffix(MASTER), state
    hint = "known states: " + ", ".join(_STATES)
    if key.endswith(".SCALE_VALUE"):
        hint = "moments that are scaled to fewer bits (XPU) cannot be read; save them as float32"
    raise UnsupportedError(f"`{key}` is not a state of an optimizer that is known", where=str(path), hint=hint)


def _weight_dtype(name: str, array: PickledArray, param: ParamMeta | None, path: Place, fp8: str) -> str:
    """The dtype of a weight, which numpy's alone does not always say; ``fp8`` is that of a quantized model."""
    dtype = "BF16" if array.dtype == "U16" else array.dtype
    if param is None and array.dtype == "I8" and fp8 and len(array.shape) > 1:
        return fp8  # Paddle hands FP8 to numpy as int8, and these files have no record of dtypes
    if param is None or param.dtype == dtype:
        return dtype
    if array.dtype == "I8" and param.dtype.startswith("F8_"):
        return param.dtype
    raise _dtype_conflict(name, dtype, param, path)


def _dtype_conflict(name: str, dtype: str, param: ParamMeta, path: Place) -> ConflictError:
    return ConflictError(
        f"`{name}` is {dtype} in a file, and {param.dtype} by {META}",
        where=str(path),
        hint=f"the file and {META} are not of one save",
    )
