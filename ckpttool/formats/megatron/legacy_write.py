"""Writing the files of Megatron-LM's ``--ckpt-format torch``, one set for each model-parallel rank:

    DST/latest_checkpointed_iteration.txt                1000, or release for a model alone
    DST/iter_0001000/mp_rank_01_002_003/                 tensor-parallel rank 1, stage 2 (of several), expert rank 3
        model_optim_rng.pt                               args, model (model0, model1, ... of virtual stages), optimizer
        distrib_optim.pt                                 flat vectors of the distributed optimizer

``release`` is Megatron's name for weights that training starts from: iteration 0, and nothing is asked for that only a
run has. With the state of an optimizer, or the iteration of a run, the save is that of an iteration.

Source: megatron/training/checkpointing.py of Megatron-LM (``get_checkpoint_name``, ``load_checkpoint``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpttool.containers.pickle_write import Hole
from ckpttool.containers.torch_write import lay_out_torch
from ckpttool.core.catalog import RankTensor, RankTensors
from ckpttool.core.mesh import Coords, Mesh
from ckpttool.core.words import some
from ckpttool.errors import UnsupportedError, UsageError
from ckpttool.formats import base
from ckpttool.formats.config import EXPERTS, LAYERS, whole_number
from ckpttool.formats.megatron import names
from ckpttool.formats.megatron.args import args_of
from ckpttool.formats.megatron.common_state import common, iteration_of, own_args
from ckpttool.formats.megatron.legacy_optimizer_write import LegacyOptimizerWriter
from ckpttool.formats.megatron.order import is_parameter, place
from ckpttool.formats.megatron.run import POINTER
from ckpttool.formats.megatron.stages import (
    LayerChunk,
    chunk_of,
    chunks,
    expert_of,
    layer_of,
    local_expert,
    local_layer,
)

_MODEL, _STATE = "model_optim_rng.pt", "distrib_optim.pt"
_EMBEDDING = "embedding."
_FLOATS = ("BF16", "F16", "F32")


def legacy_mesh(asked: Mesh, said: Mapping[str, int]) -> Mesh:
    """The mesh of legacy files. Raises UsageError for one whose ranks they have no names for."""
    if asked.tp % asked.etp:
        named = " ".join(f"--{k}-out {v}" for k, v in said.items() if k in ("tp", "etp")) or f"etp {asked.etp}"
        raise UsageError(
            f"{named} is not possible with --to megatron: its files are named by tp and ep, and with tp {asked.tp},"
            f" etp {asked.etp} several ranks would have one name",
            hint="choose an --etp-out that divides --tp-out, or write --to megatron-dist",
        )
    if len(asked.layout) > asked.pp == 1:
        raise UsageError(
            "virtual stages (--pp-layout with several numbers for each stage) need two pipeline stages or more",
            hint="raise --pp-out, or omit --pp-layout",
        )
    return asked


def write_legacy(request: base.WriteRequest) -> base.FileLayout:
    """The files of each rank. Raises UnsupportedError for a model or an optimizer that Megatron does not have."""
    return _LegacyLayout(request).run()


@dataclass(slots=True)
class _WrittenRank:
    """The tensors that one rank stores."""

    at: Coords
    model: dict[str, RankTensor] = field(default_factory=dict)
    masters: dict[str, RankTensor] = field(default_factory=dict)
    states: dict[tuple[str, str], RankTensor] = field(default_factory=dict)
    """Optimizer states by parameter and state."""
    names: list[dict[str, str]] = field(default_factory=list)
    """Per chunk: canonical name, in the model's order -> name in the file."""


class _LegacyLayout:
    """All files of a save."""

    def __init__(self, request: base.WriteRequest) -> None:
        self.request, self.mesh = request, request.mesh
        held = {t.name: t for rank in request.ranks for t in rank if t.component == "model"}
        _check_dtypes(held)
        known = whole_number(request.config, *LAYERS)
        self.layers = known if known is not None else 1 + max(map(layer_of, held), default=-1)
        self.chunks = chunks(self.mesh, self.layers)
        written = {rank // self.mesh.width for rank in request.chosen}
        _check_layers(held, self.layers, [c for c in self.chunks if c.stage in written])
        self.sparse, self.latent = names.traits(held)
        self.experts = whole_number(request.config, *EXPERTS) or 1 + max(map(expert_of, held), default=-1)
        self.mtp = any(layer_of(n) >= self.layers for n in held)
        self.grouped = request.version == names.TRANSFORMER_ENGINE and self._of_source("moe_grouped_gemm")
        self.args = self._args(held)
        trained = {n: t.whole for n, t in held.items() if is_parameter(n)}
        states = any(t.component == "optimizer" for rank in request.ranks for t in rank)
        self.optimizer = LegacyOptimizerWriter(request, trained, self.args) if states else None
        if not states and any(t.component == "master_weights" for rank in request.ranks for t in rank):
            raise UnsupportedError(
                "Megatron keeps master weights together with the moments of the optimizer, and there are none",
                hint="write the model alone: --only model",
            )
        alone = next((t.name for rank in request.ranks for t in rank if t.state and t.name not in trained), None)
        if alone is not None:
            raise UnsupportedError(
                f"`{alone}`: Megatron's files hold the state of a weight together with the weight, which is left out",
                where=alone,
                hint="omit --only",
            )
        self.files: list[base.OutFile] = []
        self.places: list[dict[str, tuple[int, int]]] = [{} for _ in range(self.mesh.world)]
        self.rank_files: list[list[int]] = [[] for _ in self.places]
        first = RankTensors()
        self.ranks = [first, *(RankTensors(share_index_with=first) for _ in self.places[1:])]
        self.iteration = iteration_of(request)
        self.release = not states and not self.iteration
        self.folder = "release" if self.release else f"iter_{self.iteration:07d}"
        own = self.optimizer.args if self.optimizer is not None else {}
        self.common, self.notes = common(request, self.args | own, optimizer=states)
        self.common["iteration"] = self.iteration

    def run(self) -> base.FileLayout:
        for r in self.request.chosen:
            rank = self._rank(r)
            folder = f"{self.folder}/{self._named(rank.at)}"
            self._model(rank, folder)
            if self.optimizer is not None:
                self._state(rank, folder, self.optimizer)
        loads = " --no-load-optim" if self.optimizer is None else " --use-distributed-optimizer"
        return base.FileLayout(
            self.files,
            self.places,
            [*self.notes, *(self.optimizer.notes if self.optimizer is not None else ())],
            self.rank_files,
            ranks=self.ranks,
            generated=((POINTER, b"release" if self.release else str(self.iteration).encode()),),
            label=self._label,
            usage="torchrun pretrain_gpt.py --load {dst} --use-checkpoint-args --ckpt-format torch"
            + ("" if self.release else f"{loads} --no-load-rng"),
        )

    def _args(self, held: Mapping[str, RankTensor]) -> dict[str, Any]:
        """The arguments, which are the same on all ranks."""
        tables = [t for n, t in held.items() if n.startswith((f"{_EMBEDDING}word_embeddings.", "output_layer."))]
        rows = max((t.shape[0] for t in tables), default=0) * self.mesh.tp
        return own_args(self.request) | args_of(self.request, rows, grouped=self.grouped)

    def _of_source(self, name: str) -> bool:
        """An argument of a source in the same form; True where it is another one."""
        source = self.request.source
        same = source is not None and source.version == self.request.version
        return bool(own_args(self.request).get(name, True)) if same else True

    def _named(self, at: Coords) -> str:
        """The directory of a rank."""
        stage = f"_{at.pp:03d}" if self.mesh.pp > 1 else ""
        return f"mp_rank_{at.tp:02d}{stage}" + (f"_{at.ep:03d}" if self.mesh.ep > 1 else "")

    def _rank(self, r: int) -> _WrittenRank:
        """Collect the tensors that a rank stores, in the model's order."""
        rank = _WrittenRank(self.mesh.coords(r))
        held = list(self.request.ranks[r])
        if self.mtp and rank.at.pp == self.mesh.pp - 1 > 0:
            # Multi-token prediction looks its tokens up itself.
            first = self.request.ranks[r - (self.mesh.pp - 1) * self.mesh.width]
            held += [t for t in first if t.name.startswith(_EMBEDDING)]
        for t in held:
            if t.component == "model":
                rank.model[t.name] = t
            elif t.component == "master_weights":
                rank.masters[t.name] = t
            else:
                rank.states[t.name, t.state] = t
        mine = [c for c in self.chunks if c.stage == rank.at.pp]
        first_expert = self.experts // self.mesh.ep * rank.at.ep
        rank.names = [{} for _ in mine]
        for name in rank.model:
            at = chunk_of(name, mine, rank.at.pp)
            rank.names[at][name] = self._spelled(name, mine[at], first_expert)
        rank.names = [dict(sorted(of.items(), key=lambda item: place(item[1]))) for of in rank.names]
        return rank

    def _spelled(self, name: str, chunk: LayerChunk, first_expert: int) -> str:
        return local_layer(self._global(local_expert(name, first_expert)), chunk)

    def _global(self, name: str) -> str:
        return names.spelled(
            name, target=self.request.version, layers=self.layers,
            sparse=self.sparse, latent=self.latent, grouped=self.grouped,
        )  # fmt: skip

    def _label(self, t: RankTensor) -> str:
        state = t.state or {"model": "", "master_weights": "param"}[t.component]
        return self._global(t.name) + (f"/{'param' if t.part else state}" if state or t.part else "")

    def _model(self, rank: _WrittenRank, folder: str) -> None:
        """The file of a rank's weights, and of all that is plain."""
        keys = [f"model{i}" for i in range(len(rank.names))] if len(rank.names) > 1 else ["model"]
        value = dict(self.common)
        holes: dict[tuple[Any, ...], RankTensor] = {}
        for key, of in zip(keys, rank.names, strict=True):
            value[key] = {label: Hole(rank.model[n].dtype, rank.model[n].shape) for n, label in of.items()}
            holes |= {(key, label): rank.model[n] for n, label in of.items()}
        if self.optimizer is not None:
            value["optimizer"] = self.optimizer.plain
        laid = lay_out_torch(value, "archive")
        file = self._add(base.OutFile(f"{folder}/{_MODEL}", laid.size, laid.literals, laid.checksums), rank.at.rank)
        for path, t in holes.items():
            self._put(rank.at.rank, t, (file, laid.offsets[path]))

    def _state(self, rank: _WrittenRank, folder: str, optimizer: LegacyOptimizerWriter) -> None:
        """The file of a rank's flat vectors."""
        order = [[n for n in of if is_parameter(n)] for of in rank.names]
        value, inside, sizes = optimizer.vectors(
            rank.at, order, rank.model, rank.masters, rank.states, alone=self._shared(rank.at.pp)
        )
        laid = lay_out_torch(value, "archive")
        begins = ((laid.offsets[path], size) for path, size in sizes.items())
        shared = [(at, size, laid.checksums[at]) for at, size in begins if size]
        file = self._add(base.OutFile(f"{folder}/{_STATE}", laid.size, laid.literals, shared=shared), rank.at.rank)
        for path, t, element in inside:
            self._put(rank.at.rank, t, (file, laid.offsets[path] + 4 * element))

    def _shared(self, stage: int) -> Collection[str]:
        """The weight of a stage that another one has, too: the embedding, or the head that is tied to it."""
        last = self.mesh.pp - 1
        if not last or stage not in (0, last) or (self.args["untie_embeddings_and_output_weights"] and not self.mtp):
            return ()
        return (f"{_EMBEDDING}word_embeddings.weight",) if stage == 0 or self.mtp else ("output_layer.weight",)

    def _add(self, file: base.OutFile, rank: int) -> int:
        self.rank_files[rank].append(len(self.files))
        self.files.append(file)
        return len(self.files) - 1

    def _put(self, rank: int, t: RankTensor, at: tuple[int, int]) -> None:
        self.places[rank][t.slot] = at
        self.ranks[rank].append(t)


def _check_layers(held: Collection[str], layers: int, among: Sequence[LayerChunk]) -> None:
    """Raises UnsupportedError for a layer of these chunks that is left out: the next one would get its number."""
    found = {*map(layer_of, held)}
    if held and (lost := [str(i) for c in among for i in range(c.first, c.stop) if i not in found]):
        raise UnsupportedError(
            f"the model has {layers} layers, and nothing of {some([f'layer {i}' for i in lost])} is written:"
            " Megatron's files count the layers of a stage, and the next one would get its number",
            hint="write all layers; or --to hf, and give those that are left new numbers there",
        )


def _check_dtypes(held: Mapping[str, RankTensor]) -> None:
    coded = [n for n, t in held.items() if t.dtype not in _FLOATS]
    if coded:
        raise UnsupportedError(
            f"Megatron's files hold weights in bf16, f16 or f32: {some(coded)}"
            f" {'is' if len(coded) == 1 else 'are'} {held[coded[0]].dtype}",
            hint="dequantize them on the way: --dequant bf16",
        )
