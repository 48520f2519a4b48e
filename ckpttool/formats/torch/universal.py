"""DeepSpeed's universal checkpoints: a file for each state of each parameter, whole. Every ZeRO stage loads them.

    DIR/latest_universal                             the tag
    DIR/TAG/mp_rank_00_model_states.pt               see zero_files; or zero_pp_rank_R_mp_rank_00_... of stage 3
    DIR/TAG/zero/NAME/fp32.pt, exp_avg.pt, ...       {"param": tensor, "cat_dim": 0}; of stage 3 a flat tensor
                                                     of frozen parameters and buffers fp32.pt alone, in any dtype
    DIR/TAG/zero/NAME/step.pt                        a number without axes, or an int
    DIR/TAG/zero/optimizer_state.pt                  param_groups; of stage 3 in optimizer_state_dict, with the step

Tensor-parallel ranks are joined in these files, so that their model states are of no use for the model's weights: these
are the masters, rounded to the dtype of `module`.

Source: deepspeed/checkpoint/ds_to_universal.py and universal_checkpoint.py, load_universal_checkpoint of the optimizers
(DeepSpeed 0.19.8).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ckpttool.containers.pickle import printable
from ckpttool.containers.plain import Numbers
from ckpttool.containers.torch_pickle import TorchTensor
from ckpttool.containers.torch_zip import TorchFile, read_torch
from ckpttool.core.catalog import FlatShard, Key, StoredTensor
from ckpttool.core.files import DataFile, Place
from ckpttool.core.mesh import Mesh
from ckpttool.core.notes import Note
from ckpttool.core.optimizer_states import STEP
from ckpttool.core.words import some
from ckpttool.errors import ConflictError, CorruptError, IncompleteError
from ckpttool.formats import base
from ckpttool.formats.torch import zero_files
from ckpttool.formats.torch.universal_write import MASTER, OPTIMIZER, POINTER, write_universal
from ckpttool.formats.torch.zero_files import MODEL_STATES, ModelStates
from ckpttool.storage.listing import Listing, list_source
from ckpttool.storage.place import read_each, scan


class Universal:
    """Universal checkpoints."""

    name = "universal"
    dialect = "hf"
    capabilities = base.Capabilities(
        components=("model", "master_weights", "optimizer"),
        views=True,
        states="torch",
        own_files=r".*_states\.pt",
        namings=("transformers",),
        counts_steps=True,
        fp32_masters="dropped",  # and written as the weights: reading knows no others
    )

    def detect(self, listing: Listing) -> int:
        if listing.single:
            return 0
        return 2 if POINTER in listing.names or zero_files.saves(listing, is_save) or is_save(listing) else 0

    def read(self, listing: Listing, options: base.ReadOptions) -> base.StoredCheckpoint:
        """Raises IncompleteError (files are missing), ConflictError (files do not fit together), CorruptError."""
        return zero_files.read_save(self.name, listing, options, POINTER, is_save, _UniversalReader)[0]

    def target_mesh(self, asked: Mesh, said: Mapping[str, int]) -> Mesh:
        return base.whole_mesh(said, f"{self.name}: its files hold whole tensors")

    def write(self, request: base.WriteRequest) -> base.FileLayout:
        return write_universal(request)


def is_save(listing: Listing) -> bool:
    """Whether a directory holds a universal checkpoint."""
    return any(MODEL_STATES.match(n) for n in listing.names) and zero_files.has_folder(listing, "zero")


@dataclass(slots=True)
class _UniversalReader:
    """One checkpoint while it is read."""

    save: Listing
    files: list[DataFile] = field(default_factory=list)
    tensors: list[StoredTensor] = field(default_factory=list)
    shards: list[Sequence[FlatShard]] = field(default_factory=list)
    dtypes: dict[Key, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def read(self) -> base.TrainingState:
        """Fill in everything; what is returned is what training goes on from."""
        names = [n for n in self.save.names if MODEL_STATES.match(n)]
        first = next((n for n in names if not n.startswith("zero_")), names[0])
        states = zero_files.read_model_states(self.save.path(first))
        file = self._file(states.file)
        cut = any(int(m["mp"]) for n in names if (m := MODEL_STATES.match(n)))
        found, steps = self._states(states, cut=cut)
        whole = found.pop(MASTER, {})
        masters = {n: t for n, t in whole.items() if n in states.trained}
        optimizer, groups = self._optimizer(states)
        if steps is None:
            steps = dict.fromkeys(masters, optimizer) if optimizer is not None else {}
        frozen: dict[str, StoredTensor] = {}
        if states.frozen and first.startswith("zero_"):
            paths = [self.save.path(f"zero_pp_rank_{r}_mp_rank_00_model_states.pt") for r in range(len(names))]
            if missing := [p.name for p in paths if p.name not in self.save.names]:
                raise IncompleteError(
                    f"files of frozen parameters are missing: {some(missing)}", where=str(self.save.root)
                )
            frozen = zero_files.frozen_parameters(states, file, paths, self.files, self.shards)
        weights = zero_files.model_weights(_uncut(states, whole) if cut else states, file, whole | frozen, self.dtypes)
        dtypes = {t.name: self.dtypes.get(Key(t.name), t.dtype) for t in weights}
        kept = [m._replace(component="master_weights") for n, m in masters.items() if dtypes.get(n) != m.dtype]
        self.tensors = [*weights, *kept]
        for state, of in sorted(found.items()):
            self.tensors += [t._replace(component="optimizer", state=state) for t in of.values()]
        for name, t in steps.items():
            self.tensors.append(t._replace(name=name, component="optimizer", state=STEP))
        if self.dtypes:
            rounded = ", ".join(sorted(set(self.dtypes.values())))
            self.notes.append(Note("derived weights", f"model weights are master_weights rounded to {rounded}"))
        training = zero_files.training_of(states, groups, {})
        if training.left:
            self.notes.append(f"skipped, not plain data: {some(training.left)}")
        return training

    def _file(self, torch: TorchFile) -> int:
        self.files.append(torch.info)
        return len(self.files) - 1

    def _states(
        self, states: ModelStates, *, cut: bool
    ) -> tuple[dict[str, dict[str, StoredTensor]], dict[str, StoredTensor] | None]:
        """(tensors by state and parameter, steps by parameter; None where there are none)."""
        root = self.save.root / "zero"
        found: dict[str, dict[str, StoredTensor]] = {}
        steps: dict[str, StoredTensor] = {}
        numbers = Numbers(self.files)
        there = {e.name for e in scan(root) if e.is_dir()} - states.buffers
        order = [n for n in states.trained if n in there] + sorted(there - states.trained.keys())
        if missing := [n for n in states.trained if n not in there]:
            raise IncompleteError(
                f"there is no directory of {len(missing)} parameters: {some([printable(n) for n in missing])}",
                where=str(root),
                hint="the conversion was interrupted, or files got lost: convert or fetch it again",
            )
        for name, held in zip(order, read_each(_read_states, [root / n for n in order]), strict=True):
            for state, torch in held.items():
                value = torch.value.get("param") if isinstance(torch.value, dict) else torch.value
                if state == STEP:
                    steps[name] = self._step(torch, value, numbers)
                elif isinstance(value, TorchTensor):
                    single = state != MASTER and not value.shape  # one number, as NAdam keeps
                    shape = None if single else states.trained.get(name, states.frozen.get(name))
                    shape = None if cut and shape and _is_part(shape, value.shape) else shape
                    found.setdefault(state, {})[name] = self._whole(torch, value, name, shape)
                else:
                    raise CorruptError("there is no tensor in it", where=str(torch.info.place))
            if MASTER not in found or name not in found[MASTER]:
                raise IncompleteError(f"there is no {MASTER}.pt of `{printable(name)}`", where=str(root / name))
        return found, steps or None

    def _whole(self, torch: TorchFile, tensor: TorchTensor, name: str, shape: tuple[int, ...] | None) -> StoredTensor:
        stored = torch.place(tensor, name, self._file(torch))
        if shape is None or stored.shape == shape:
            return stored
        if prod(stored.shape) != prod(shape) or stored.strides is not None:
            raise ConflictError(
                f"`{printable(name)}` is {list(stored.shape)} in a file, and {list(shape)} in `param_shapes`",
                where=str(torch.info.place),
                hint="the files are not of one save",
            )
        return stored._replace(shape=shape)

    def _step(self, torch: TorchFile, value: Any, numbers: Numbers) -> StoredTensor:
        if isinstance(value, TorchTensor) and prod(value.shape) == 1:
            return torch.place(value, STEP, self._file(torch))._replace(shape=(), strides=None)
        if type(value) in (int, float):
            return numbers.place(value, torch.info)
        raise CorruptError("the step is not a number", where=str(torch.info.place))

    def _optimizer(self, states: ModelStates) -> tuple[StoredTensor | None, Sequence[base.ParamGroup]]:
        """The step where it is said once for all, and the groups of optimizer_state.pt."""
        path = self.save.root / "zero" / OPTIMIZER
        if not path.is_file():
            return None, ()
        torch = read_torch(path)
        value = torch.value if isinstance(torch.value, dict) else {}
        inner = value.get("optimizer_state_dict")
        inner = inner if isinstance(inner, dict) else {}
        said = value.get("param_groups") or inner.get("param_groups")
        groups = [g for g in zero_files.list_of(said) if isinstance(g, dict)]
        first = next(iter(inner.get("state", {}).values()), None) if isinstance(inner.get("state"), dict) else None
        step = first.get(STEP) if isinstance(first, dict) else None
        stored = None if step is None else self._step(torch, step, Numbers(self.files))
        units, at, out = list(states.groups), 0, []
        for group in groups:
            count = len(zero_files.list_of(group.get("params")))  # of stage 3: sub-groups
            names = tuple(n for unit in units[at : at + count] for n in unit)
            at += count
            if names:
                out.append(base.ParamGroup(names, zero_files.values_of(group)))
        return stored, out


def _is_part(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether a tensor-parallel rank has a part of this shape; a flat tensor says nothing of the shape of the whole."""
    return prod(shape) != prod(whole) and len(shape) == len(whole)


def _uncut(states: ModelStates, whole: Mapping[str, StoredTensor]) -> ModelStates:
    """The model states of a tensor-parallel rank without the elements of parameters, of which they hold a part."""
    module = {n: t._replace(shape=(0,), strides=(1,)) if n in whole else t for n, t in states.module.items()}
    if lost := [n for n in states.module if n not in whole and n not in states.buffers and n not in states.shared]:
        raise IncompleteError(
            f"the files hold only a tensor-parallel rank's part of {some([printable(n) for n in lost])}",
            where=states.path,
            hint="ds_to_universal of newer versions of DeepSpeed joins frozen parameters too: convert it again",
        )
    return replace(states, module=module)


def _read_states(directory: Place) -> dict[str, TorchFile]:
    """The files of a parameter, by the state that each holds."""
    listing = list_source(directory)
    return {n.removesuffix(".pt"): read_torch(listing.path(n)) for n in listing.names if n.endswith(".pt")}
