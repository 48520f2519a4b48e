"""One file of torch.save for each rank, as verl and others save FSDP: ``model_world_size_8_rank_3.pt``.

Beside it are ``optim_world_size_8_rank_3.pt`` (the optimizer's state_dict) and ``extra_state_world_size_8_rank_3.pt``
(schedule, random numbers). Tensors are DTensors (FSDP2, HSDP, FSDP on top of tensor parallelism) or ShardedTensors
(FSDP1), which say where their boxes belong: see ``placement``. A plain tensor is on every rank, as a replica.

    state         {0: {step, exp_avg, exp_avg_sq}, 1: ...}          parameters by number, or by name
    param_groups  [{params: [0, 1, ...], lr: ..., param_names?}]    numbers run through the groups: see ``numbered``

Source: verl/utils/checkpoint/fsdp_checkpoint_manager.py; torch/optim/optimizer.py and torch/distributed/fsdp of 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NoReturn

from ckpttool.containers.pickle import printable
from ckpttool.containers.torch_pickle import Storage, TorchTensor
from ckpttool.containers.torch_zip import TorchFile, read_torch
from ckpttool.core.catalog import Catalog, Key, LogicalTensor, Piece, StoredTensor, logical_tensor
from ckpttool.core.encodings import Encoding, Given
from ckpttool.core.files import DataFile
from ckpttool.core.geometry import whole
from ckpttool.core.mesh import Mesh
from ckpttool.core.optimizer_states import STEP, number_bytes
from ckpttool.core.words import some
from ckpttool.errors import CkptError, ConflictError, CorruptError, IncompleteError, UnsupportedError, found_as
from ckpttool.formats import base
from ckpttool.formats.torch.numbered import Number, names_of, unknown
from ckpttool.formats.torch.optimizer import COMPONENT, is_plain
from ckpttool.formats.torch.placement import LocalPart, parts_of
from ckpttool.formats.torch.prefixes import strip_prefixes
from ckpttool.formats.torch.steps import newest, steps_of
from ckpttool.storage.listing import Listing, list_source
from ckpttool.storage.place import read_each

_FILE = re.compile(r"(?P<stem>[\w.-]*?)[_.-]?world_size_(?P<world>\d{1,9})_rank_(?P<rank>\d{1,9})\.(pt|pth|bin)\Z")
_LOCAL = re.compile(r"pytorch_model_fsdp(_\d+)?_rank\d{1,9}\.bin\Z")
"""accelerate's names for local state dicts."""
_FLAT = re.compile(r"(.*\.)?_?flat_param(_\d+)?\Z")
_COMPONENTS = {"optim": "optimizer", "optimizer": "optimizer", "ema": "ema", "extra_state": "extra"}
"""Components of files by their stem; all other files hold the model."""
_ROLES = ("actor", "critic")
"""Directories of a step of verl, each with a model."""
_OWN = ("fsdp_config.json",)
"""Files that only its own loader can use."""


class Fsdp:
    """Pickled DTensors and ShardedTensors, one file for each rank."""

    name = "fsdp"
    capabilities = base.Capabilities(
        components=("model", "optimizer", "ema"),
        meshes="any",
        records_shapes=True,
        states="torch",
        views=True,
        own_files=r".*_rank_\d+\.pt",
        instead="use --to dcp, which FSDP loads on any number of ranks",
    )

    def detect(self, listing: Listing) -> int:
        if listing.single:
            return 0
        found = any(_LOCAL.match(n) for n in listing.names) or _is_step(listing) or steps_of(listing, _is_step)
        return 2 * bool(found)

    def read(self, listing: Listing, options: base.ReadOptions) -> base.StoredCheckpoint:
        """Raises IncompleteError (the file of a rank is missing, or rows of a tensor), ConflictError (ranks disagree,
        there are two models), UnsupportedError (local state dicts), and what reading a file of torch.save raises.
        """
        listing, notes = _resolved(listing)
        base.check_mesh(self.name, dict.fromkeys(("tp", "pp", "ep", "etp"), 1), options, listing.root)
        named = _rank_files(listing)
        ranks = _FsdpRanks(listing)
        for component in ("model", "ema", COMPONENT):
            paths = [listing.path(name) for name in named.get(component, ())]
            for rank, file in enumerate(read_each(read_torch, paths)):
                ranks.add(file, rank, component)
        training = _with_extra(ranks.training, listing, named.get("extra", ())[:1])
        if training is not None and training.left:
            notes.append(f"skipped, not plain data: {some(training.left)}")
        config, said = _config(listing)
        carried, more = base.companions(listing, [*(n for names in named.values() for n in names), *_OWN])
        return base.StoredCheckpoint(
            self.name,
            listing.root,
            ranks.files,
            ranks.tensors,
            Mesh(),
            config=config,
            companions=carried,
            recorded=ranks.catalog(),
            notes=[*notes, *said, *ranks.notes(), *more],
            training=training,
            refused=ranks.refused,
        )


# -- files


def _resolved(listing: Listing) -> tuple[Listing, list[str]]:
    """The directory of the ranks' files: of a run of verl its last step, of a step its only model."""
    if _has_ranks(listing):
        return listing, []
    if local := next((n for n in listing.names if _LOCAL.match(n)), ""):
        _refuse_local(str(listing.path(local)))
    notes = []
    if steps := steps_of(listing, _is_step):
        name, note = newest(listing, steps)
        listing, notes = list_source(listing.root / name), [note]
    models = [] if _has_ranks(listing) else _models(listing)
    if len(models) > 1:
        raise ConflictError(
            f"there are {len(models)} models here: {some(models)}",
            where=str(listing.root),
            hint=f"give the directory of one: {listing.root / models[0]}",
        )
    if models:
        return list_source(listing.root / models[0]), [*notes, f"the model is in {models[0]}/"]
    if not steps:
        raise IncompleteError(
            "there are no files of ranks here",
            where=f"{listing.root}/model_world_size_N_rank_R.pt",
            hint="give the directory that holds them",
        )
    return listing, notes


def _has_ranks(listing: Listing) -> bool:
    return any(_FILE.match(n) for n in listing.names)


def _models(listing: Listing) -> list[str]:
    """Directories of models in that of a step."""
    return [f for f in listing.folders() if f in _ROLES and _has_ranks(listing.inside(f))]


def _is_step(listing: Listing) -> bool:
    return _has_ranks(listing) or bool(_models(listing))


def _rank_files(listing: Listing) -> dict[str, list[str]]:
    """Component -> the file of each rank. Raises IncompleteError, ConflictError."""
    found: dict[str, dict[str, dict[int, str]]] = {}
    worlds: dict[int, str] = {}
    for name in listing.names:
        if m := _FILE.match(name):
            worlds.setdefault(int(m["world"]), name)
            stems = found.setdefault(_COMPONENTS.get(m["stem"], "model"), {})
            stems.setdefault(m["stem"], {})[int(m["rank"])] = name
    if len(worlds) > 1:
        raise ConflictError(
            f"there are files of saves with different numbers of ranks: {some([str(n) for n in sorted(worlds)])}",
            where=[str(listing.path(n)) for n in worlds.values()],
            hint="move all but one set away",
        )
    (world,) = worlds
    if "model" not in found:
        raise IncompleteError(
            "the files of the model are missing; without them nothing says whose state an optimizer has",
            where=f"{listing.root}/model_world_size_{world}_rank_*.pt",
            hint="copy them beside the others",
            finding="rank-missing",
        )
    out = {}
    for component, stems in found.items():
        if len(stems) > 1:
            raise ConflictError(
                f"there are {len(stems)} sets of rank files: {some([f'{s}_world_size_*' for s in sorted(stems)])}",
                where=str(listing.root),
                hint="move all but one set away",
            )
        (ranks,) = stems.values()
        if component != "extra":  # only what the first rank says is used of these
            naming = re.sub(r"rank_\d+", "rank_*", next(iter(ranks.values())))
            with found_as(incomplete="rank-missing", conflict="ranks-differ"):
                base.contiguous_ranks(ranks, world, listing.root, naming)
        out[component] = [ranks[r] for r in sorted(ranks)]
    return out


def _config(listing: Listing) -> tuple[dict[str, Any], list[str]]:
    """config.json, which verl puts into huggingface/."""
    if "config.json" in listing.names or not (listing.root / "huggingface" / "config.json").is_file():
        return listing.json("config.json"), []
    return list_source(listing.root / "huggingface").json("config.json"), ["config.json is that in huggingface/"]


def _refuse_local(where: str) -> NoReturn:
    raise UnsupportedError(
        "this is a local state dict of FSDP1: its FlatParameters are parameters laid end to end, no file says which",
        where=where,
        hint="load it with the training script, and save it with StateDictType.SHARDED_STATE_DICT or FULL_STATE_DICT",
    )


# -- what is in them


@dataclass(slots=True)
class _FsdpTensor:
    """A tensor and the pieces of it that all ranks hold."""

    shape: tuple[int, ...]
    stored: StoredTensor
    """The first of them."""
    pieces: list[Piece] = field(default_factory=list)


class _FsdpRanks:
    """The files of all ranks, read one after the other."""

    def __init__(self, listing: Listing) -> None:
        self.listing = listing
        self.files: list[DataFile] = []
        self.tensors: list[StoredTensor] = []
        self.training: base.TrainingState | None = None
        self._groups: dict[Key, _FsdpTensor] = {}
        self._order: dict[str, LocalPart] = {}
        """The first rank's parts, in the order of the model."""
        self._numbers: list[list[Number]] = []
        self._names: dict[Number, str] | None = None
        """Names of the optimizer's parameters; None: unknown."""
        self._called: dict[str, str] = {}
        """The model's own name of each tensor of the first rank."""
        self._prefixes = ""
        self._left: dict[str, None] = {}
        self._unknown: list[str] = []
        """A note about parameters that nothing names."""
        self.refused: dict[str, CkptError] = {}

    def add(self, file: TorchFile, rank: int, component: str) -> None:
        """Take the file of a rank. Ranks and components come in order."""
        path = file.info.place
        number = len(self.files)
        self.files.append(file.info)
        if not isinstance(file.value, dict):
            raise UnsupportedError(
                "the file holds no state dict", where=str(path), hint="save model.state_dict() of each rank"
            )
        if component == COMPONENT:
            self._add_optimizer(file, number, rank)
            return
        if not rank and component == "model":
            self._called, self._prefixes = strip_prefixes(map(str, file.value), str(path))
        for key, value in file.value.items():
            if _FLAT.match(str(key)):
                _refuse_local(str(path))
            called = self._called.get(str(key), str(key))
            parts = parts_of(value, called, str(path))
            if parts is None:
                self._left[printable(called, 60)] = None
                continue
            if not rank and component == "model" and parts:
                self._order[called] = parts[0]
            for part in parts:
                self._place(Key(called, component), part, file, number, rank)

    def _place(self, key: Key, part: LocalPart, file: TorchFile, number: int, rank: int) -> None:
        stored = file.place(part.tensor, key.name, number)._replace(rank=rank, component=key.component, state=key.state)
        self._put(key, part, stored)

    def _put(self, key: Key, part: LocalPart, stored: StoredTensor) -> None:
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _FsdpTensor(part.shape, stored)
        if group.shape != part.shape:
            raise ConflictError(
                f"ranks disagree: `{key}` is {list(group.shape)} in one file and {list(part.shape)} in another",
                where=[str(self.files[group.stored.file].place), str(self.files[stored.file].place)],
                hint="files of different saves were put together",
                finding="ranks-differ",
            )
        self.tensors.append(stored)
        group.pieces += [Piece(stored, local, box) for local, box in part.boxes]

    def _add_optimizer(self, file: TorchFile, number: int, rank: int) -> None:
        where = str(file.info.place)
        state, groups = file.value.get("state"), file.value.get("param_groups")
        if not isinstance(state, dict) or not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
            raise CorruptError("the file is not the state_dict of an optimizer", where=where)
        numbers = [list(g.get("params") or ()) for g in groups]
        if not rank:
            self._numbers = numbers
            self._names = self._named(groups, state, where)
            self._train(groups)
        if numbers != self._numbers:
            raise ConflictError(
                "ranks disagree on the parameters of the optimizer's groups",
                where=[where, str(self.listing.root)],
                hint="files of different saves were put together",
                finding="ranks-differ",
            )
        if self._names is None:
            return
        plain = _Plain(file.info, len(self.files))
        for n, values in state.items():
            if n not in self._names or not isinstance(values, dict):
                raise CorruptError(f"the state of {printable(str(n))} belongs to no group", where=where)
            for what, value in values.items():
                key = Key(self._names[n], COMPONENT, str(what))
                parts = parts_of(value, str(key), where)
                for part in parts or ():
                    self._place(key, part, file, number, rank)
                if parts is None and what == STEP and type(value) in (int, float):
                    self._put(key, _NUMBER, plain.add(key, value, rank))
                elif parts is None:
                    self._left[printable(str(key), 80)] = None
        self.files += plain.files

    def _named(
        self, groups: Sequence[dict[str, Any]], state: Mapping[Any, Any], where: str
    ) -> dict[Number, str] | None:
        """The parameter of each number of the optimizer."""
        names: dict[Number, str] = {}
        for group, numbers in zip(groups, self._numbers, strict=True):
            said = group.get("param_names")
            if isinstance(said, list) and len(said) == len(numbers):
                names.update({n: self._called.get(name, name) for n, name in zip(numbers, said, strict=True)})
            elif all(isinstance(n, str) for n in numbers):
                names.update({n: self._called.get(str(n), str(n)) for n in numbers})
        if len(names) == sum(map(len, self._numbers)):
            others = [n for n in names.values() if n not in self._order]
            if not others:
                return names
            self._refuse(f"it has parameters that the model has not: {some(others)}", where, "save both together")
            return None
        shapes = {n: _shape(values, where) for n, values in state.items() if isinstance(values, dict)}
        dealt = [[(n, shapes.get(n)) for n in numbers] for numbers in self._numbers]
        found = names_of(dealt, self._parameters(), shapes.keys())
        if found is None and shapes and all(shape is None or len(shape) == 1 for shape in shapes.values()):
            self._refuse(
                "it is that of FlatParameters (FSDP1), which are parameters laid end to end",
                where,
                "save FSDP.optim_state_dict(model, optimizer) in place of optimizer.state_dict()",
            )
        elif found is None:
            self._refuse(
                "its parameters are numbers, and their shapes leave more than one order, or none",
                where,
                "build the optimizer with named parameters: AdamW(model.named_parameters())",
            )
        return found

    def _refuse(self, why: str, where: str, hint: str) -> None:
        hint = f"{hint}; or omit the optimizer with --only model"
        self.refused[COMPONENT] = UnsupportedError(
            f"nothing says whose state the optimizer has: {why}", where=where, hint=hint
        )

    def _parameters(self) -> list[tuple[str, tuple[int, ...]]]:
        """Parameters that an optimizer of the model may have: tied parameters once; plain tensors, such as buffers,
        where no parameter is cut.
        """
        cut = any(part.cut for part in self._order.values())
        known: dict[tuple[str, int, tuple[int, ...]], str] = {}
        for name, part in self._order.items():
            if part.cut or not cut:
                known.setdefault((part.tensor.storage.key, part.tensor.offset, part.shape), name)
        return [(name, shape) for (_, _, shape), name in known.items()]

    def _train(self, groups: Sequence[dict[str, Any]]) -> None:
        names = self._names
        if names is None:
            return
        kept = []
        left = []
        for i, (group, numbers) in enumerate(zip(groups, self._numbers, strict=True)):
            values = {str(k): v for k, v in group.items() if k not in ("params", "param_names")}
            left += [f"param_groups.{i}.{k}" for k, v in values.items() if not is_plain(v)]
            plain = {k: v for k, v in values.items() if is_plain(v)}
            kept.append(base.ParamGroup(tuple([names[n] for n in numbers if n in names]), plain))
        self._unknown = unknown([n for numbers in self._numbers for n in numbers], names)
        self.training = base.TrainingState(tuple(kept), left=tuple(left))

    def catalog(self) -> Catalog:
        """Raises IncompleteError for a hole, ConflictError for boxes that overlap."""
        logical: dict[Key, LogicalTensor] = {}
        for key, group in self._groups.items():
            if prod(group.shape):
                with found_as(incomplete="chunk-missing", conflict="chunk-overlap"):
                    logical[key] = logical_tensor(key, group.shape, group.pieces, files=self.files)
            else:
                logical[key] = LogicalTensor(key, group.stored.dtype, group.shape, ())
        return Catalog(self.files, logical)

    def notes(self) -> list[str]:
        notes = [self._prefixes] if self._prefixes else []
        if self._left:
            notes.append(f"skipped, not tensors: {some(list(self._left))}")
        notes += self._unknown
        return notes + [f"the optimizer is not read: {why.what}" for why in self.refused.values()]


_NUMBER = LocalPart(TorchTensor("F32", Storage("F32", "", 1), 0, (), ()), (), ((whole(()), whole(())),), cut=False)


class _Plain:
    """Numbers in a pickle, as tensors without axes in a file of their own."""

    def __init__(self, info: DataFile, number: int) -> None:
        self.info, self.number = info, number
        self.parts: dict[tuple[str, bytes], Given] = {}

    def add(self, key: Key, value: float, rank: int) -> StoredTensor:
        dtype, data = number_bytes(value)
        at = self.parts.setdefault((dtype, data), Given(8 * len(self.parts), data.ljust(8, b"\0").hex())).start
        return StoredTensor(key.name, dtype, (), self.number, at, rank, None, key.component, key.state)

    @property
    def files(self) -> list[DataFile]:
        """The file, where there are such numbers."""
        encoding = Encoding("given", str(self.info.place), list(self.parts.values()))
        return [self.info._replace(encoding=encoding)] if self.parts else []


def _shape(state: Mapping[Any, Any], where: str) -> tuple[int, ...] | None:
    """Shape of the parameter that has this state; None where there is only a number."""
    for what, value in state.items():
        parts = parts_of(value, str(what), where)
        if parts and what != STEP:
            return parts[0].shape
    return None


def _with_extra(
    training: base.TrainingState | None, listing: Listing, names: Sequence[str]
) -> base.TrainingState | None:
    """Add the other values that the first rank saved: the state of the learning rate, and random numbers, which are
    left."""
    for name in names:
        value = read_torch(listing.path(name)).value
        if isinstance(value, dict):
            said = training or base.TrainingState()
            plain = {str(k): v for k, v in value.items() if v and is_plain(v)}
            left = [printable(str(k), 60) for k, v in value.items() if not is_plain(v)]
            training = replace(said, plain={**said.plain, **plain}, left=(*said.left, *left))
    return training
