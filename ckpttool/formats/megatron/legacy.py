"""Megatron-LM's own checkpoints (``--ckpt-format torch``): a directory for each model-parallel rank.

    run/iter_0001000/mp_rank_01_002/model_optim_rng.pt
      args                        argparse.Namespace; absent with --no-save-args
      model, or model0, model1    {name: tensor} of each chunk of the stage's layers (interleaved stages have several)
      optimizer                   see legacy_optimizer
      iteration, opt_param_scheduler, rng_state, ...
    run/iter_0001000/mp_rank_01_002/distrib_optim.pt

A chunk numbers its layers from 0, chunk c of stage s being chunk c * pp + s of the model; a rank numbers its experts
from 0. GroupedMLP holds the experts of a rank in two tensors, which are those of its experts one behind the other:
``weight1`` is [experts, hidden, ffn] and ``weight2`` [experts, ffn, hidden], whatever shape they have, and both are
turned against a linear layer's.

Source: megatron/training/checkpointing.py of Megatron-LM; megatron/core/transformer (moe/experts.py and others) of
Megatron Core 0.16.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from ckpttool.containers.pickle import printable
from ckpttool.containers.plain import is_plain
from ckpttool.containers.torch_pickle import TorchTensor
from ckpttool.containers.torch_zip import TorchFile, read_torch
from ckpttool.core.catalog import StoredTensor
from ckpttool.core.dtypes import itemsize
from ckpttool.core.files import DataFile, Place
from ckpttool.core.mesh import Mesh
from ckpttool.core.words import count, some
from ckpttool.errors import CkptError, ConflictError, CorruptError, IncompleteError, UnsupportedError, UsageError
from ckpttool.formats import base
from ckpttool.formats.config import config_field
from ckpttool.formats.megatron import legacy_ranks, names, nemo, run
from ckpttool.formats.megatron.args import model_config, plain_args
from ckpttool.formats.megatron.groups import counters
from ckpttool.formats.megatron.legacy_optimizer import Optimizers
from ckpttool.formats.megatron.legacy_ranks import LegacyTensor
from ckpttool.formats.megatron.legacy_write import legacy_mesh, write_legacy
from ckpttool.formats.megatron.nemo_names import core_names
from ckpttool.formats.megatron.sizes import check_sizes
from ckpttool.storage.listing import Listing
from ckpttool.storage.place import read_each

FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"
_OLD_FILE = "model_rng.pt"
_MODEL = re.compile(r"model(\d{0,4})")
_LAYERS = re.compile(r"(?<![^.])(decoder|mtp)\.layers\.(\d{1,9})\.")
_LOCAL_EXPERT = re.compile(r"(?<=\.local_experts\.)(\d{1,9})(?=\.)")
_GROUPED = re.compile(r"(?P<before>.*\.mlp\.experts\.)weight(?P<number>[12])\Z")
_SAME = (
    *legacy_ranks.ARGS.values(),
    *("virtual_pipeline_model_parallel_size", "num_layers", "hidden_size", "num_attention_heads", "num_experts"),
    *("padded_vocab_size", "iteration"),
)
"""Arguments that all ranks of one save have in common."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of config.json."""
_EMBEDDING = "embedding.word_embeddings.weight"
_STRUCTURE = frozenset({"args", "checkpoint_version", "model", "optimizer"})


_canonical = lru_cache(maxsize=1 << 16)(names.canonical)
"""Ranks have the same names."""


class Megatron:
    """One set of pickles for each model-parallel rank."""

    name = "megatron"
    dialect = "megatron"
    capabilities = base.Capabilities(
        components=("model", "master_weights", "optimizer"),
        meshes="tp x pp x ep x etp",
        targets=names.TARGETS,
        vocab_multiple=128,
        vocab_multiple_per_tp=True,
        free_padding=True,
        fp32_masters="dropped",
        states="torch",
        counts_steps=True,
        float32=("*.mlp.router.expert_bias",),
        one_dtype=True,
        default_target=True,
        views=True,
    )

    def detect(self, listing: Listing) -> int:
        try:
            if (found := nemo.find(listing)) is not None:
                return 2 * bool(nemo.ranks(found.listing))
        except CkptError:
            return 0  # which of NeMo's, only reading says
        if _is_of_one_rank(listing):
            return 2
        if listing.single:
            return 0
        if is_save(listing):
            return 2
        save = run.chosen(listing)
        if save is None:  # the mark leads nowhere
            save = next((listing.inside(n) for n in run.saves(listing)), None)
        return 2 if save is not None and is_save(save) else 0

    def read(self, listing: Listing, options: base.ReadOptions) -> base.StoredCheckpoint:
        """Raises IncompleteError (ranks or their files are missing), ConflictError (ranks, arguments and flags
        contradict each other), CorruptError (a file is not what its name says), UnsupportedError (a model from before
        Megatron Core, tensors of other kinds), UsageError (it is of one rank), and what reading a file of torch.save
        raises.
        """
        if (found := nemo.find(listing)) is not None and nemo.ranks(found.listing):
            return _NemoReader(self.name, found, options).read()
        if _is_of_one_rank(listing):
            alone = "--from torch-bin, which takes the tensors of this file for a model"
            raise UsageError(
                "this is one rank of a checkpoint",
                where=str(listing.path(listing.single)),
                hint=f"pass the directory of all ranks: {listing.root.parent}"
                + (f"; or {alone}" if listing.single else ""),
            )
        save = run.find(listing, is_save=is_save(listing))
        return _LegacyReader(self.name, save, options).read()

    def target_mesh(self, asked: Mesh, said: Mapping[str, int]) -> Mesh:
        return legacy_mesh(asked, said)

    def write(self, request: base.WriteRequest) -> base.FileLayout:
        """A set of files for each rank. Raises UnsupportedError for a model or an optimizer that Megatron lacks."""
        return write_legacy(request)


def is_save(listing: Listing) -> bool:
    """Whether a directory holds those of ranks, with a file of the model in one of them."""
    named = legacy_ranks.directories(listing.folders())
    return any({FILE, _OLD_FILE} & set(listing.inside(n.name).names) for n in named)


def _is_of_one_rank(listing: Listing) -> bool:
    """Whether a source is the directory of a rank, or a file in it."""
    found = listing.single in (FILE, OPTIMIZER_FILE) if listing.single else FILE in listing.names
    return found and bool(legacy_ranks.directories([listing.root.name]))


@dataclass(slots=True)
class _ReadRank:
    """The tensors that were read from one directory."""

    rank: int
    stage: int
    held: list[LegacyTensor]


class _LegacyReader:
    """One save while it is read."""

    def __init__(self, format_name: str, save: run.MegatronSave, options: base.ReadOptions) -> None:
        self.format_name, self.save, self.options = format_name, save, options
        self.root = save.listing.root
        self.files: list[DataFile] = []
        self.notes: list[str] = list(save.notes)
        self.args: dict[str, Any] = {}
        self.said: dict[str, Any] = {}
        """The first rank's values, which all ranks have in common."""
        self.writers: dict[str, Mapping[str, Any]] = {}
        """Directory: the arguments in it."""
        self.trained = False
        self.left: dict[str, None] = {}
        self.extra = 0

    def read(self) -> base.StoredCheckpoint:
        named = self._directories()
        first = self._open(named[0].name)
        self.args = self._arguments(first)
        config, notes = model_config(self.save.beside, self.args)
        flags = self.options.from_flags()
        said = legacy_ranks.parallel_sizes(self.args, flags, first.info.place)
        if "pp" not in said and "ep" not in said and len(named[0].numbers) == 2:
            said["pp" if self._is_staged(named) else "ep"] = 1 + max(n.numbers[1] for n in named)
        etps = () if "etp" in said else _possible_etps(first, config)
        grid = legacy_ranks.grid_of(named, said, self.root, etps)
        base.check_mesh(self.format_name, grid.sizes(), self.options, self.root)
        optimizers = Optimizers(self.args, grid, self.files)
        ranks = []
        others = [name for name in grid.ranks if name != named[0].name]
        opened = read_each(lambda _, name: self._open(name), [self.root / n for n in others], others)
        for name, rank in grid.ranks.items():
            file = first if name == named[0].name else next(opened)
            ranks.append(self._rank(name, file, rank, grid, optimizers))
        legacy_ranks.check_writers(grid, self.writers, self.root, trained=self.trained)
        naming = _Naming(grid, ranks, self.args, config, str(self.root))
        tensors = [t for r in ranks for h in r.held for t in naming.tensors(h, h.stored)]
        check_sizes(config, ((t.name, t.shape) for t in tensors if not t.rank), str(self.root), grid.tp)
        found = optimizers.finish(naming.tensors)
        if self.extra:
            entries = count(self.extra, "entry", "entries")
            self.notes.append(f"skipped: _extra_state (FP8's scaling history), {entries}")
        if self.left:
            self.notes.append(f"skipped, not tensors: {some(list(self.left))}")
        self.notes += run.other_iteration(self.save.listing, self.said.get("iteration"))
        if not self.args:
            self.notes.append("the save has no arguments (--no-save-args): config.json and names say the sizes")
        own = [n.name for n in named]
        root, carried, more = nemo.small_files(self.save.listing) or run.small_files(self.save, own)
        return base.StoredCheckpoint(
            self.format_name,
            root,
            self.files,
            [*tensors, *found.tensors],
            Mesh(grid.tp, grid.pp, grid.ep, grid.etp, naming.layout),
            "megatron" if config else "hf",
            config=config,
            companions=carried,
            notes=[*self.notes, *notes, *found.notes, *more],
            native=self.args,
            training=self._training(first, found.groups, found.step),
            version=naming.version,
            refused=found.refused,
        )

    def _arguments(self, first: TorchFile) -> dict[str, Any]:
        return plain_args(first.value.get("args"))

    # -- files

    def _directories(self) -> list[legacy_ranks.RankDirectory]:
        """The directories of ranks, each with its file."""
        named = sorted(legacy_ranks.directories(self.save.listing.folders()))
        lacking = [n.name for n in named if FILE not in self.save.listing.inside(n.name).names]
        if lacking and any(_OLD_FILE in self.save.listing.inside(n).names for n in lacking):
            raise UnsupportedError(
                f"the save has {_OLD_FILE} in place of {FILE}, as Megatron-LM wrote it in 2023 with a distributed"
                " optimizer",
                where=str(self.root / lacking[0]),
                hint="load it with Megatron-LM, and save it again",
            )
        if lacking:
            raise IncompleteError(
                f"{count(len(lacking), 'directory has', 'directories have')} no {FILE}: {some(lacking, 8)}",
                where=str(self.root),
                hint="fetch the file again; before April 2026 Megatron-LM did not write those of all ranks where tp is"
                " larger than ep x etp",
                finding="rank-missing",
            )
        return named

    def _open(self, name: str) -> TorchFile:
        path = self.root / name / FILE
        file = read_torch(path)
        if not isinstance(file.value, dict):
            raise CorruptError("the file is not one of Megatron-LM: it holds no dict", where=str(path))
        return file

    def _is_staged(self, named: list[legacy_ranks.RankDirectory]) -> bool:
        """Whether the second number of names is a pipeline stage: ranks of experts all hold the embedding."""
        last = max(named, key=lambda n: n.numbers[1])
        held = [n for _, n, _ in _model(self._open(last.name), str(self.root / last.name))]
        return not any(n.endswith("word_embeddings.weight") for n in held) or not any(
            "final_layernorm" in n for n in [name for _, name, _ in _model(self._open(named[0].name), "")]
        )

    def _rank(
        self, name: str, file: TorchFile, rank: int, grid: legacy_ranks.RankGrid, optimizers: Optimizers
    ) -> _ReadRank:
        where = str(file.info.place)
        self.writers[name] = self._check_same(file, where)
        self.trained |= "rng_state" in file.value
        number = len(self.files)
        self.files.append(file.info)
        held = []
        for chunk, key, value in _model(file, where):
            if not _canonical(key):
                self.extra += 1
            elif isinstance(value, TorchTensor):
                bare = key.removeprefix("module.")
                held.append(LegacyTensor(chunk, bare, file.place(value, bare, number)._replace(rank=rank)))
            elif value is None or is_plain(value):
                self.left[printable(key, 60)] = None
            else:
                raise UnsupportedError(
                    f"`{printable(key)}` is not a plain tensor",
                    where=where,
                    hint="parameters in FP8 (--fp8-param-gather) are not read: save without it",
                )
        beside = self.save.listing.inside(name) if name else self.save.listing
        if any(n.startswith("layer_wise_optimizer") for n in beside.names):
            optimizers.refuse("it is a layer-wise one (Muon and others), whose files name no parameters", where)
        path: Place | None = beside.path(OPTIMIZER_FILE) if OPTIMIZER_FILE in beside.names else None
        optimizers.add(rank // grid.width, held, file, number, path)
        return _ReadRank(rank, rank // grid.width, held)

    def _check_same(self, file: TorchFile, where: str) -> dict[str, Any]:
        """The arguments of a rank. Raises ConflictError for files of two saves."""
        args = plain_args(file.value.get("args"))
        said = {n: args.get(n) for n in _SAME if n != "iteration"} if args else {}
        said["iteration"] = file.value.get("iteration")
        if not self.said:
            self.said = {**said, "place": where}
        for key in said.keys() | self.said.keys() - {"place"}:
            if said.get(key) != self.said.get(key):
                raise ConflictError(
                    f"ranks disagree: {key} is {self.said.get(key)!s:.40} in one file,"
                    f" {said.get(key)!s:.40} in another",
                    where=[self.said["place"], where],
                    hint="files of different saves were put together",
                    finding="ranks-differ",
                )
        return args

    # -- what training goes on from

    def _training(
        self, file: TorchFile, groups: tuple[base.ParamGroup, ...], step: int | None
    ) -> base.TrainingState | None:
        plain = {k: v for k, v in counters(file.value, self.args).items() if is_plain(v) and v not in (None, {})}
        others = [str(k) for k in file.value if k not in plain and k not in _STRUCTURE and not _MODEL.fullmatch(str(k))]
        left = [printable(k, 60) for k in others if file.value.get(k)]
        if left:
            self.notes.append(f"skipped, not plain data: {some(left)}")
        counted = plain.keys() - {"iteration", "num_floating_point_operations_so_far"}
        if not groups and not counted and not plain.get("iteration"):
            return None  # weights for everyone, as a converter writes them
        return base.TrainingState(groups, step, plain, tuple(left))


class _NemoReader(_LegacyReader):
    """NeMo 1: a rank's file is the dict of its tensors, and the arguments lie beside it."""

    def __init__(self, format_name: str, save: run.MegatronSave, options: base.ReadOptions) -> None:
        super().__init__(format_name, save, options)
        self.args, where = nemo.find_arguments(save.listing, save.beside)
        if where:
            self.notes.append(f"sizes of the model are those of {where}")

    def _arguments(self, first: TorchFile) -> dict[str, Any]:
        rows = first.value["model"].get(_EMBEDDING)
        if self.args and isinstance(rows, TorchTensor) and rows.shape:
            tp = self.args.get(legacy_ranks.ARGS["tp"]) or 1
            self.args.setdefault("padded_vocab_size", rows.shape[0] * (tp if type(tp) is int else 1))
        return self.args

    def _directories(self) -> list[legacy_ranks.RankDirectory]:
        named = [legacy_ranks.RankDirectory(n, numbers) for n, numbers in nemo.ranks(self.save.listing).items()]
        if not named[0].name:
            self.args |= dict.fromkeys(legacy_ranks.ARGS.values(), 1) if self.args else {}
        return sorted(named)

    def _open(self, name: str) -> TorchFile:
        path = self.root / name / nemo.RANK_FILE if name else self.root / nemo.RANK_FILE
        file = read_torch(path)
        if not isinstance(file.value, dict):
            raise CorruptError("the file is not one of NeMo: it holds no dict", where=str(path))
        return replace(file, value={"model": core_names(file.value, self.args, str(path))})


def _model(file: TorchFile, where: str) -> Iterator[tuple[int, str, Any]]:
    """(chunk, name, value) of all that the model of a rank holds."""
    chunks = {int(m[1] or 0): k for k in file.value if isinstance(k, str) and (m := _MODEL.fullmatch(k))}
    if sorted(chunks) != list(range(len(chunks))) or not chunks:
        raise CorruptError(
            "the file holds no `model`" if not chunks else "chunks of the model are missing in the file",
            where=where,
            hint="give a checkpoint that Megatron-LM saved",
        )
    for chunk, key in sorted(chunks.items()):
        model = file.value[key]
        if isinstance(model, dict) and isinstance(model.get("language_model"), dict):
            raise UnsupportedError(
                "the model is one from before Megatron Core (`language_model`, --use-legacy-models)",
                where=where,
                hint="convert it with Megatron-LM's tools/checkpoint/convert.py: --loader legacy --saver core",
            )
        if not isinstance(model, dict):
            raise CorruptError(f"`{key}` is not a dict of tensors", where=where)
        for name, value in model.items():
            yield chunk, str(name), value


def _possible_etps(file: TorchFile, config: Mapping[str, Any]) -> tuple[int, ...]:
    """How many ranks may cut an expert, by the shape of one and config.json; () where the model has none."""
    for _, name, value in _model(file, str(file.info.place)):
        if ".mlp.experts." not in name or not isinstance(value, TorchTensor):
            continue
        full = config_field(config, "moe_intermediate_size") or config_field(config, "intermediate_size")
        if re.search(r"linear_fc2\.weight\d*\Z", name) and len(value.shape) == 2 and full and value.shape[1]:
            return (full // value.shape[1],)
    return ()


# -- names


@dataclass(slots=True)
class _Naming:
    """Gives tensors of ranks their names in the whole model."""

    grid: legacy_ranks.RankGrid
    ranks: list[_ReadRank]
    args: Mapping[str, Any]
    config: Mapping[str, Any]
    where: str
    layout: tuple[int, ...] = ()
    version: str = ""
    _first: dict[tuple[int, int], int] = field(default_factory=dict)
    """(stage, chunk) -> its first layer."""
    _first_mtp: dict[tuple[int, int], int] = field(default_factory=dict)
    _layers: int = 0
    _experts: int = 0
    """Experts of each layer on a rank."""
    _known: dict[tuple[int, int, int, str], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        decoder, mtp = self._count("decoder"), self._count("mtp")
        pp = self.grid.pp
        chunks = 1 + max((c for _, c in decoder), default=0)
        at = extra = 0
        for number in range(chunks * pp):
            key = (number % pp, number // pp)
            self._first[key], self._first_mtp[key] = at, extra
            at, extra = at + decoder.get(key, 0), extra + mtp.get(key, 0)
        self._layers = at
        counts = tuple([decoder.get((n % pp, n // pp), 0) for n in range(chunks * pp)])
        self.layout = counts if chunks > 1 or len(set(counts)) > 1 else ()
        said = self.args.get("num_layers")
        if type(said) is int and said != at:
            raise ConflictError(
                f"the files hold {at} layers, their arguments say {said}",
                where=self.where,
                hint="files of different saves were put together",
                finding="ranks-differ",
            )
        self._experts = self._count_experts()
        bare = {h.name for h in self.ranks[0].held}
        fused = any(n.endswith("layer_norm_weight") for n in bare)
        self.version = names.TRANSFORMER_ENGINE if fused else names.LOCAL

    def _count(self, kind: str) -> dict[tuple[int, int], int]:
        """Layers of each (stage, chunk), in which all its ranks agree. Raises ConflictError."""
        out: dict[tuple[int, int], int] = {}
        for r in self.ranks:
            own: dict[int, set[int]] = {}
            for h in r.held:
                if (m := _LAYERS.search(h.name)) and m[1] == kind:
                    own.setdefault(h.chunk, set()).add(int(m[2]))
            for chunk, held in own.items():
                if (n := 1 + max(held)) != len(held):
                    lost = next(i for i in range(n) if i not in held)
                    raise IncompleteError(
                        f"a rank of stage {r.stage} has nothing of layer {lost} of its {n}",
                        where=self.where,
                        hint="the file is damaged, or was changed by another tool",
                    )
                if out.setdefault((r.stage, chunk), n) != n:
                    raise ConflictError(
                        f"ranks of stage {r.stage} hold different numbers of layers: {out[r.stage, chunk]} and {n}",
                        where=self.where,
                        hint="files of different saves were put together",
                        finding="ranks-differ",
                    )
        return out

    def _count_experts(self) -> int:
        """Experts that a rank holds of each layer."""
        counts = [self.args.get("num_experts"), *map(self.config.get, _EXPERTS)]
        total = next((n for n in counts if type(n) is int), 0)
        seen = 0
        for r in self.ranks:
            for h in r.held:
                if h.is_expert and (m := _LOCAL_EXPERT.search(_canonical(h.name))):
                    seen = max(seen, int(m[1]) + 1)
        if total and seen and seen * self.grid.ep != total:
            raise ConflictError(
                f"a rank holds {seen} experts of each layer, and ep is {self.grid.ep}, but the model has {total}",
                where=self.where,
                hint="files of different saves were put together, or config.json is another model's",
                finding="ranks-differ",
            )
        return seen or total // self.grid.ep

    def name(self, rank: int, chunk: int, bare: str) -> str:
        """The canonical name of what a rank's chunk calls so."""
        stage, i = divmod(rank, self.grid.width)
        ep = i // self.grid.etp % self.grid.ep
        key = (stage, chunk, ep, bare)
        known = self._known.get(key)
        if known is None:
            first = {"decoder": self._first, "mtp": self._first_mtp}
            text = _LAYERS.sub(
                lambda m: f"{m[1]}.layers.{int(m[2]) + first[m[1]].get((stage, chunk), 0)}.", bare, count=1
            )
            text = names.canonical(text, self._layers)
            if ep:
                text = _LOCAL_EXPERT.sub(lambda m: str(int(m[1]) + ep * self._experts), text, count=1)
            known = self._known[key] = text
        return known

    def tensors(self, held: LegacyTensor, stored: StoredTensor) -> Iterator[StoredTensor]:
        """``stored``, which holds of ``held`` the weight or a state, as tensors of the model."""
        m = _GROUPED.fullmatch(held.name)
        if m is None:
            yield stored._replace(name=self.name(stored.rank, held.chunk, held.name))
            return
        experts, shape = self._experts, stored.shape
        second = m["number"] == "2"
        if not experts or len(shape) != 2 or shape[not second] % experts or stored.strides is not None:
            raise UnsupportedError(
                f"`{printable(held.name)}` {list(shape)} cannot be taken apart: nothing says how many experts it holds",
                where=self.where,
                hint="put the model's config.json beside the save",
            )
        hidden, inner = (shape[1], shape[0] // experts) if second else (shape[0], shape[1] // experts)
        # Of each expert [hidden, inner] row-major (weight2: [inner, hidden]); a linear layer has the axes exchanged.
        turned, strides = ((hidden, inner), (1, hidden)) if second else ((inner, hidden), (1, inner))
        size = hidden * inner * itemsize(stored.dtype)
        for e in range(experts):
            bare = f"{m['before']}local_experts.{e}.linear_fc{m['number']}.weight"
            yield stored._replace(
                name=self.name(stored.rank, held.chunk, bare),
                shape=turned,
                strides=strides,
                offset=stored.offset + e * size,
            )
