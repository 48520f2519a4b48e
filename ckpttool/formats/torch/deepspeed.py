"""Checkpoints of DeepSpeed's ZeRO stages 1, 2 and 3 and of its BF16_Optimizer, and those without ZeRO. Only read.

    DIR/latest, DIR/TAG/mp_rank_00_model_states.pt             see zero_files
    DIR/TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   one for each data-parallel rank
      optimizer_state_dict
        zero_stage, partition_count                            absent in BF16_Optimizer's; number of ranks
        single_partition_of_fp32_groups   [1-D, ...]           stages 1, 2: this rank's part of each group's vector
        base_optimizer_state              {state: {g: {exp_avg: 1-D, step, ...}}, param_groups}
        group_paddings                    [n, ...]             elements at the end of the part that are padding
        param_alignment_paddings          [[n, ...], ...]      behind each parameter (since 0.19.7)
        param_slice_mappings              [{name: address}]    the same said of this rank's part (since 0.7)
        fp32_flat_groups                  [1-D, ...]           stage 3: this rank's part of each sub-group
        optimizer_state_dict              {state: {i: ...}, param_groups}

See zero_partitions for which elements a rank holds. The model's weights are `module` in stages 1 and 2. In stage 3 they
are the masters, rounded to the dtype of the empty tensor in `module`.

Source: deepspeed/runtime/zero/stage_1_and_2.py, stage3.py, deepspeed/runtime/bf16_optimizer.py,
deepspeed/utils/zero_to_fp32.py (DeepSpeed 0.19.8).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ckpttool.containers.pickle import PickledObject, printable
from ckpttool.containers.plain import Numbers
from ckpttool.containers.torch_pickle import TorchTensor
from ckpttool.containers.torch_zip import TorchFile, read_torch
from ckpttool.core.catalog import FlatShard, Key, StoredTensor
from ckpttool.core.files import DataFile
from ckpttool.core.notes import Note
from ckpttool.core.words import count, some
from ckpttool.errors import ConflictError, CorruptError, IncompleteError, UnsupportedError
from ckpttool.formats import base
from ckpttool.formats.torch import zero_experts, zero_files
from ckpttool.formats.torch.optimizer import refuse
from ckpttool.formats.torch.zero_files import MODEL_STATES, ModelStates
from ckpttool.formats.torch.zero_none import KEY, add_optimizer
from ckpttool.formats.torch.zero_partitions import FlatTensor, OptimizerFile, Partitions, partitions_of, stage_of
from ckpttool.storage.listing import Listing
from ckpttool.storage.place import read_each

POINTER = "latest"
_OPTIM_STATES = re.compile(r"(?P<kind>(?:[a-z0-9]+_)?)zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt\Z")
_SCRIPT = "zero_to_fp32.py"
_PUBLISHED = re.compile(r".*\.safetensors|.*\.index\.json|pytorch_model.*\.bin")
"""Weights for everyone that a trainer puts beside its state: these are the model then."""
_STEP = "step"


class DeepSpeed:
    """ZeRO checkpoints."""

    name = "deepspeed"
    dialect = "hf"
    capabilities = base.Capabilities(
        components=("model", "master_weights", "optimizer"),
        views=True,
        states="torch",
        own_files=r".*_states\.pt",
        instead="--to universal writes what every ZeRO stage and number of ranks loads",
    )

    def detect(self, listing: Listing) -> int:
        if listing.single or any(_PUBLISHED.fullmatch(n) for n in listing.names):
            return 0
        here = is_save(listing) or (POINTER in listing.names and _SCRIPT in listing.names)
        return 2 if here or zero_files.saves(listing, is_save) else 0

    def read(self, listing: Listing, options: base.ReadOptions) -> base.StoredCheckpoint:
        """Raises IncompleteError (files, or elements of a parameter, are missing), ConflictError (files do not fit
        together), CorruptError (a file is not what its name says), UnsupportedError (other kinds of parallelism).
        """
        stored, reader = zero_files.read_save(self.name, listing, options, POINTER, is_save, _DeepspeedReader)
        stored.sharding, stored.native = max(1, len(reader.ranks)), reader.scaler
        if reader.shared is not None:
            refuse(stored, "of a model with experts", reader.shared)
            stored.refused["master_weights"] = reader.shared
        elif reader.plain is not None:
            add_optimizer(stored, *reader.plain)
        return stored


def is_save(listing: Listing) -> bool:
    """Whether a directory holds the files of one save, and not those of a universal one."""
    named = any(_OPTIM_STATES.match(n) or MODEL_STATES.match(n) for n in listing.names)
    return named and not zero_files.has_folder(listing, "zero")


@dataclass(slots=True)
class _DeepspeedReader:
    """One save while it is read."""

    save: Listing
    files: list[DataFile] = field(default_factory=list)
    tensors: list[StoredTensor] = field(default_factory=list)
    shards: list[Sequence[FlatShard]] = field(default_factory=list)
    dtypes: dict[Key, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    ranks: list[OptimizerFile] = field(default_factory=list)
    plain: tuple[TorchFile, Any, frozenset[str]] | None = None
    """Without ZeRO: the file with the optimizer, the optimizer, and the names of buffers."""
    shared: UnsupportedError | None = None
    """Reason why the optimizer of a model with experts is not read."""
    scaler: PickledObject | None = None
    """The loss scaler, in training with float16."""

    def read(self) -> base.TrainingState:
        """Fill in everything; what is returned is what training goes on from."""
        zero_files.refuse_others(self.save)
        experts = zero_experts.expert_files(self.save)
        optim = self._optim_files()
        for rank, torch in enumerate(read_each(read_torch, [self.save.path(name) for name in optim])):
            self._open(rank, torch)
        count_of = self._world(len(optim), experts=bool(experts))
        stage3 = bool(optim) and stage_of(self.ranks[0].state) == 3
        names = [f"zero_pp_rank_{r}_mp_rank_00_model_states.pt" for r in range(count_of)] if stage3 else []
        self._all_there(names or ["mp_rank_00_model_states.pt"])
        states = zero_files.read_model_states(self.save.path(names[0] if names else "mp_rank_00_model_states.pt"))
        file = self._file(states.file)
        if optim and not states.groups:
            raise UnsupportedError(
                "the model states have no `param_shapes`, which say where each parameter lies",
                where=states.path,
                hint="load the checkpoint with DeepSpeed 0.4 or newer, and save it again",
            )
        mine = zero_experts.expert_weights(self.save, experts, states, self.files)
        self.shared = zero_experts.shared_optimizer(self.save, states, self._counts()) if mine else None
        frozen = {}
        if stage3 and states.frozen:
            paths = [self.save.path(n) for n in names]
            frozen = zero_files.frozen_parameters(states, file, paths, self.files, self.shards)
        readable = optim and self.shared is None
        partitions = partitions_of(self.ranks, states.groups, stage3=stage3) if readable else None
        self._steps(states, partitions.steps() if partitions else [])
        masters = self._whole(partitions.masters()) if partitions else {}
        held = {n: t for n, t in (masters | frozen).items() if n not in {e.name for e in mine}}
        self._emit([*zero_files.model_weights(states, file, held, self.dtypes), *mine], masters)
        left = self._optimizer(partitions) if partitions else []
        return self._train(states, partitions, left)

    # Files.

    def _optim_files(self) -> list[str]:
        """Names of the optimizer's files by rank. Raises ConflictError for those of two saves."""
        found: dict[str, dict[int, str]] = {}
        for name in self.save.names:
            if m := _OPTIM_STATES.match(name):
                if int(m["mp"]):
                    zero_files.refuse_tensor_parallel(self.save.path(name))
                found.setdefault(m["kind"], {})[int(m["dp"])] = name
        if len(found) > 1:
            raise ConflictError(
                "the optimizer's files of two saves lie in one directory",
                where=[str(self.save.path(next(iter(names.values())))) for names in found.values()],
                hint="move those of the other save away",
            )
        ((kind, named),) = found.items() if found else (("", dict[int, str]()),)
        ranks = range(len(named))
        self._all_there([f"{kind}zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in ranks if r not in named])
        return [named[r] for r in range(len(named))]

    def _all_there(self, wanted: Sequence[str]) -> None:
        """Raises IncompleteError naming the files of ranks that are missing."""
        missing = [n for n in wanted if n not in self.save.names]
        if missing:
            raise IncompleteError(
                f"{count(len(missing), 'file')} {'is' if len(missing) == 1 else 'are'} missing: {some(missing, 8)}",
                where=str(self.save.root),
                hint="each node saves the files of its own ranks: bring them together in one directory",
                finding="rank-missing",
            )

    def _open(self, rank: int, torch: TorchFile) -> None:
        state = torch.value.get("optimizer_state_dict") if isinstance(torch.value, dict) else None
        if not isinstance(state, dict):
            raise CorruptError("there is no `optimizer_state_dict` in it", where=str(torch.info.place))
        if "ds_zero_partition_groups" in state:
            raise UnsupportedError(
                "its parameters are shared out over several groups of ranks (AutoEP)",
                where=str(torch.info.place),
                hint="convert it with DeepSpeed's ds_to_universal",
            )
        self.ranks.append(OptimizerFile(self._file(torch), torch, state))

    def _file(self, torch: TorchFile) -> int:
        self.files.append(torch.info)
        return len(self.files) - 1

    def _counts(self) -> set[int]:
        """How many ranks each group of the optimizer was shared out to, where the files say it."""
        said = self.ranks[0].state.get("partition_count") if self.ranks else None
        return {n for n in (said if isinstance(said, list) else [said]) if type(n) is int}

    def _world(self, here: int, *, experts: bool) -> int:
        """The number of ranks that the optimizer was partitioned over, which must be that of its files, ``here``.

        With ``experts``, groups may have different numbers of ranks. Raises IncompleteError, ConflictError and
        UnsupportedError.
        """
        if not here:
            return 0
        counts = self._counts()
        if len(counts) > 1 and not experts:
            raise UnsupportedError(
                f"its groups are shared out over {some(sorted(map(str, counts)))} ranks: this is expert parallelism",
                where=self.ranks[0].path,
                hint="fetch the files of the experts (layer_*_expert_*_model_states.pt): their weights are in them",
            )
        world = max(counts, default=here)  # very old saves do not say
        if world > here:
            first = self.save.root / f"...zero_pp_rank_{here}_mp_rank_00_optim_states.pt"
            raise IncompleteError(
                f"{world - here} of {world} optimizer files are missing: those of the ranks from {here} on",
                where=str(first),
                hint="each node saves the files of its own ranks: bring them together in one directory",
                finding="rank-missing",
            )
        if world != here:
            raise ConflictError(
                f"there are optimizer files of {here} ranks, but they say that there are {world}",
                where=str(self.save.root),
                hint="a save of more ranks was overwritten by one of fewer; move the files of higher ranks away",
                finding="ranks-differ",
            )
        return here

    def _steps(self, states: ModelStates, taken: Sequence[int]) -> None:
        """Note model states of another step; an optimizer may have begun later than the model, too."""
        said = zero_files.step_of(states)
        if taken and said is not None and said != max(taken):
            self.notes.append(
                f"the model states are of step {said:,}, and the optimizer has taken {max(taken):,}: the files are of"
                " two saves, or the optimizer began later"
            )

    # Tensors.

    def _emit(self, weights: Sequence[StoredTensor], masters: Mapping[str, StoredTensor]) -> None:
        """The model, and the masters of parameters that are no float32 numbers themselves."""
        self.tensors += weights
        dtypes = {t.name: self.dtypes.get(Key(t.name), t.dtype) for t in weights}
        for name, master in masters.items():
            if dtypes.get(name) != master.dtype:
                self.tensors.append(master._replace(component="master_weights"))
        if self.dtypes:
            rounded = ", ".join(sorted(set(self.dtypes.values())))
            self.notes.append(Note("derived weights", f"model weights are master_weights rounded to {rounded}"))

    def _whole(self, found: Iterable[FlatTensor]) -> dict[str, StoredTensor]:
        """Tensors by their parameters. Raises IncompleteError."""
        out = {}
        for name, shape, pieces in found:
            tensor = zero_files.joined(name, shape, pieces, self.shards)
            if tensor is None:
                raise IncompleteError(
                    f"the ranks hold {sum(p.stored.shape[0] for p in pieces):,} of the {prod(shape):,} elements of"
                    f" `{printable(name)}`",
                    where=str(self.save.root),
                    hint="the files are not of one save",
                    finding="chunk-missing",
                )
            out[name] = tensor
        return out

    def _optimizer(self, partitions: Partitions) -> list[str]:
        """Add the optimizer's state of each parameter; returns the names of what cannot be told apart by parameters."""
        states, left = partitions.states()
        for state in states:
            for tensor in self._whole(partitions.state(state)).values():
                self.tensors.append(tensor._replace(component="optimizer", state=state))
        numbers = Numbers(self.files)
        for name, state, value, rank in partitions.numbers():
            if isinstance(value, TorchTensor):
                stored = rank.torch.place(value, name, rank.file)
            else:
                stored = numbers.place(value, rank.torch.info)
            self.tensors.append(stored._replace(name=name, shape=(), strides=None, component="optimizer", state=state))
        return left

    def _train(self, states: ModelStates, partitions: Partitions | None, left: Sequence[str]) -> base.TrainingState:
        scaler = self.ranks[0].state.get("loss_scaler") if self.ranks else None
        self.scaler = scaler if isinstance(scaler, PickledObject) else None
        dynamic = self.scaler is not None and self.scaler.fields.get("dynamic")
        more = {"loss_scaler": dict(self.scaler.fields)} if self.scaler is not None and dynamic else {}
        training = zero_files.training_of(states, partitions.groups() if partitions else (), more)
        if left:
            what = f"state of the optimizer that is not one number for each element is left out: {some(left)}"
            self.notes.append(what)
        if objects := [n for n in training.left if n != KEY]:
            self.notes.append(f"skipped, not plain data: {some(objects)}")
        if KEY in training.left:
            self.plain = states.file, states.rest[KEY], states.buffers
        return training
