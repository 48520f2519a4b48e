"""The optimizer of Megatron-LM's own checkpoints, of each rank.

With the distributed optimizer its state lies in distrib_optim.pt, as flat buffers without names (see buffers)::

    {0: {(bfloat16, float32): {param, exp_avg, exp_avg_sq: 1-D, numel_unpadded}}, 1: ..., buckets_coalesced: True}

numbered by chunk, then by dtype; and a list of such, of which the last is that of the experts, with expert parallelism.
An entry of it is None where another rank has written it. ``optimizer`` in model_optim_rng.pt, which else has all::

    {optimizer: {state: {0: {exp_avg, exp_avg_sq}, ...}, param_groups},       float16 and bfloat16
     fp32_from_fp16_params: [[tensor, ...], ...]}                             masters, by groups
    {state: ..., param_groups}                                                float32

counts the parameters through its groups. No file says which parameter a number is: weights and experts, biases and
norms are in groups of their own, each in the order of the model.

Source: megatron/core/optimizer (distrib_optimizer.py, optimizer.py, __init__.py) of Megatron Core 0.16.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from ckpttool.containers.pickle import Global, printable
from ckpttool.containers.plain import Numbers, is_plain
from ckpttool.containers.torch_pickle import BY_TORCH, TorchTensor
from ckpttool.containers.torch_zip import TorchFile, read_torch
from ckpttool.core.catalog import StoredTensor
from ckpttool.core.dtypes import itemsize
from ckpttool.core.files import DataFile, Place
from ckpttool.core.optimizer_states import STEP
from ckpttool.core.words import count
from ckpttool.errors import CkptError, ConflictError, CorruptError, IncompleteError, UnsupportedError
from ckpttool.formats import base
from ckpttool.formats.megatron import buffers
from ckpttool.formats.megatron.legacy_ranks import LegacyTensor, RankGrid
from ckpttool.formats.torch import names_of

MASTERS, COMPONENT = "master_weights", "optimizer"
_STATES = {"param": (MASTERS, ""), "exp_avg": (COMPONENT, "exp_avg"), "exp_avg_sq": (COMPONENT, "exp_avg_sq")}
"""Name in distrib_optim.pt -> component and state."""
_BUFFER = re.compile(r"\.(?:expert_bias|local_tokens_per_expert|global_tokens_per_expert|ga_steps|inv_freq)\Z")
"""Buffers that modules hold beside parameters."""
_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "max_lr", "min_lr")
"""Fields that tell groups from each other, as Megatron itself does it when it loads them."""
_OLD = "--ckpt-convert-update-legacy-dist-opt-format of Megatron-LM rewrites it"
_FROZEN = "where parameters were frozen, save with --ckpt-format torch_dist, which names those that are trained"
_WITHOUT = "or omit the optimizer: --only model"

FindTensors = Callable[[LegacyTensor, StoredTensor], Iterable[StoredTensor]]
"""The tensors of the whole model that a tensor of a rank stands for."""


class LegacyOptimizer(NamedTuple):
    """The optimizers of all ranks, joined."""

    tensors: list[StoredTensor]
    groups: tuple[base.ParamGroup, ...]
    step: int | None
    notes: list[str]
    refused: dict[str, CkptError]


class _Flat(NamedTuple):
    """Parameters in a flat buffer of a file."""

    parameters: list[LegacyTensor]
    at: list[int]
    """First element of each."""
    vectors: dict[str, tuple[int, int]]
    """Name of the state -> (file, byte of its first element)."""


class _LegacyState(NamedTuple):
    """A tensor of the state of one parameter."""

    held: LegacyTensor
    component: str
    state: str
    stored: StoredTensor


@dataclass(slots=True)
class _LegacyGroup:
    values: dict[str, Any]
    parameters: list[LegacyTensor] = field(default_factory=list)


class Optimizers:
    """Reads those of one rank after the other."""

    def __init__(self, args: Mapping[str, Any], grid: RankGrid, files: list[DataFile]) -> None:
        self.args, self.grid, self.files = args, grid, files
        self._flat: list[_Flat] = []
        self._own: list[_LegacyState] = []
        self._groups: dict[tuple[Any, ...], _LegacyGroup] = {}
        self._grouped = True
        """Whether it is known what the groups hold."""
        self._steps: dict[float, DataFile] = {}
        self._lacking: dict[str, None] = {}
        """Files of models whose distrib_optim.pt is missing."""
        self._distributed = False
        self._why: CkptError | None = None
        self._notes: dict[str, None] = {}

    def refuse(self, what: str, where: str, hint: str = _WITHOUT) -> None:
        """Nothing of the optimizer can be read; the first reason is kept."""
        self._why = self._why or UnsupportedError(f"the optimizer is not read: {what}", where=where, hint=hint)

    def add(self, stage: int, held: Sequence[LegacyTensor], file: TorchFile, number: int, path: Place | None) -> None:
        """Read that of a rank with the tensors ``held``; ``file`` is model_optim_rng.pt, ``path`` distrib_optim.pt."""
        value, where = file.value.get("optimizer"), str(file.info.place)
        parameters = [h for h in held if not _BUFFER.search(h.name)]
        entries = [e for e in (value if isinstance(value, list) else [value]) if e is not None]
        if not all(isinstance(e, dict) for e in entries):
            raise CorruptError("`optimizer` is not the state of an optimizer", where=where)
        try:
            spread = _is_spread(entries, self.grid.ep)
            if path is not None:
                self._distributed = True
                self._read_flat(path, stage, parameters, spread=spread)
            for i, entry in enumerate(entries):
                mine = _of_entry(parameters, i, len(entries), spread=spread)
                self._read_entry(entry, mine, file, number, distributed=path is not None)
        except UnsupportedError as e:
            self._why = self._why or e

    def finish(self, tensors: FindTensors) -> LegacyOptimizer:
        """All of it under the names that ``tensors`` gives. Raises IncompleteError, ConflictError."""
        if self._lacking and self._distributed:
            raise IncompleteError(
                f"{count(len(self._lacking), 'rank has', 'ranks have')} no distrib_optim.pt, which holds the state",
                where=list(self._lacking)[:4],
                hint=f"bring together what all nodes have saved, {_WITHOUT}",
                finding="rank-missing",
            )
        if self._lacking:
            self.refuse("its state lies in distrib_optim.pt, which is missing", next(iter(self._lacking)))
        if len(self._steps) > 1:
            where = list(dict.fromkeys(str(f.place) for f in self._steps.values()))[:2]
            taken = " and ".join(f"{s:g}" for s in list(self._steps)[:2])
            if len(where) == 1:
                self.refuse(f"its groups took {taken} steps, and Megatron counts one for all", where[0])
            else:
                raise ConflictError(
                    f"ranks disagree: their optimizers took {taken} steps",
                    where=where,
                    hint="files of different saves were put together",
                    finding="ranks-differ",
                )
        if self._why is not None:
            note = f"the optimizer is left out: {self._why.what.removeprefix('the optimizer is not read: ')}"
            return LegacyOptimizer([], (), None, [note], {COMPONENT: self._why, MASTERS: self._why})
        out = [t for flat in self._flat for t in self._of_flat(flat, tensors)]
        for held, component, state, stored in self._own:
            out += [t._replace(component=component, state=state) for t in tensors(held, stored)]
        step = next(iter(self._steps), None)
        if step is not None:
            out += self._step_tensors(out, step)
        groups = []
        for group in self._groups.values() if self._grouped else ():
            named = dict.fromkeys(t.name for h in group.parameters for t in tensors(h, h.stored))
            groups.append(base.ParamGroup(tuple(named), group.values))
        whole = int(step) if step is not None and step == int(step) else None
        return LegacyOptimizer(out, tuple(groups), whole, list(self._notes), {})

    def _step_tensors(self, found: Sequence[StoredTensor], step: float) -> Iterator[StoredTensor]:
        """The step of each parameter that has state and no step of its own: one for all its ranks."""
        number = Numbers(self.files).place(step, self._steps[step])
        named = {t.name for t in found if t.state == STEP}
        for t in found:
            if t.component == COMPONENT and t.name not in named:
                named.add(t.name)
                yield number._replace(name=t.name, rank=t.rank, component=COMPONENT, state=STEP)

    # -- the distributed optimizer

    def _read_flat(self, path: Place, stage: int, parameters: list[LegacyTensor], *, spread: bool) -> None:
        file = read_torch(path)
        where, number = str(path), len(self.files)
        self.files.append(file.info)
        entries = file.value if isinstance(file.value, list) else [file.value]
        for i, entry in enumerate(entries):
            if entry is None:  # that of another rank
                continue
            if not isinstance(entry, dict):
                raise CorruptError("the file is not one of Megatron's distributed optimizer", where=where)
            if not entry.get("buckets_coalesced"):
                raise UnsupportedError(
                    "the optimizer is not read: its buffers have the form from before April 2024, which depends on the"
                    " buckets of the run",
                    where=where,
                    hint=f"{_OLD}, {_WITHOUT}",
                )
            wanted = _by_chunk_and_dtype(_of_entry(parameters, i, len(entries), spread=spread))
            keys = sorted(k for k in entry if type(k) is int)
            if keys != list(range(len(wanted))):
                raise UnsupportedError(
                    f"the optimizer is not read: it has {len(keys)} buffers, the rank's parameters fill {len(wanted)}",
                    where=where,
                    hint=f"{_FROZEN}; {_WITHOUT}",
                )
            for key, group in zip(keys, wanted, strict=True):
                self._flat.append(self._buffer(entry[key], group, stage, file, number))

    def _buffer(self, value: Any, group: list[LegacyTensor], stage: int, file: TorchFile, number: int) -> _Flat:
        where = str(file.info.place)
        ((dtypes, state),) = value.items() if isinstance(value, dict) and len(value) == 1 else ((None, None),)
        if not isinstance(state, dict) or not all(isinstance(state.get(n), TorchTensor) for n in _STATES):
            raise CorruptError("a buffer of the optimizer lacks one of param, exp_avg and exp_avg_sq", where=where)
        own = group[0].stored.dtype
        if isinstance(dtypes, tuple) and dtypes and isinstance(dtypes[0], Global):
            said = BY_TORCH.get(dtypes[0].name, dtypes[0].name)
            if said != own:
                raise UnsupportedError(
                    f"the optimizer is not read: a buffer is of {said} parameters where the model's are {own}",
                    where=where,
                    hint=_WITHOUT,
                )
        vectors = {n: file.place(state[n], f"{n} of a buffer", number) for n in _STATES}
        sizes = {n: t.shape for n, t in vectors.items()}
        elements = vectors["param"].shape[0] if len(vectors["param"].shape) == 1 else -1
        if set(sizes.values()) != {(elements,)} or any(t.dtype != "F32" or t.strides for t in vectors.values()):
            raise CorruptError(f"the vectors of a buffer of the optimizer do not fit together: {sizes}", where=where)
        if own == "F32":  # the parameter is its own master
            del vectors["param"]
        chunk = group[0].chunk
        fit = buffers.fit(
            [(str(i), h.stored.shape) for i, h in enumerate(group)],
            elements,
            sizes=self._bucket_sizes(stage, chunk),
            alone=self._alone(group, stage),
        )
        if not fit.offsets:
            say = (
                "fits several layouts of its buckets, which put parameters in different places"
                if fit.several
                else f"does not fit the {sum(prod(h.stored.shape) for h in group):,} of its {len(group)} parameters:"
                f" {fit.expected:,} were expected"
            )
            raise UnsupportedError(
                f"the optimizer is not read: a buffer of {elements:,} elements {say}",
                where=where,
                hint=f"no file says where each parameter lies, and nothing is guessed. {_FROZEN}; {_WITHOUT}",
            )
        at = [fit.offsets[str(i)] for i in range(len(group))]
        return _Flat(group, at, {n: (t.file, t.offset) for n, t in vectors.items()})

    def _bucket_sizes(self, stage: int, chunk: int) -> tuple[int | None, ...]:
        """The sizes that buckets of a chunk may have had; () where nothing says it."""
        overlap, size = self.args.get("overlap_grad_reduce"), self.args.get("ddp_bucket_size")
        if stage or chunk or overlap is False:
            return (None,)
        if overlap is None or self.args.get("ddp_num_buckets") is not None:
            return ()
        if type(size) is int and size > 0:
            return (size,)
        dp, cp = (self.args.get(n) or 1 for n in ("data_parallel_size", "context_parallel_size"))
        if type(dp) is not int or type(cp) is not int:
            return ()
        return tuple({max(buffers.SMALLEST_BUCKET, buffers.PER_RANK * n): None for n in (dp, dp * cp)})

    def _alone(self, group: Sequence[LegacyTensor], stage: int) -> list[frozenset[str]]:
        """The parameters that may have had buckets of their own: the head that is a copy of the embedding."""
        if stage + 1 < self.grid.pp or self.grid.pp == 1 or self.args.get("untie_embeddings_and_output_weights"):
            return [frozenset()]
        head = frozenset(str(i) for i, h in enumerate(group) if h.name == "output_layer.weight")
        return [head, frozenset()] if head else [head]

    def _of_flat(self, flat: _Flat, tensors: FindTensors) -> Iterator[StoredTensor]:
        size = itemsize("F32")
        for name, (file, begin) in flat.vectors.items():
            component, state = _STATES[name]
            for held, at in zip(flat.parameters, flat.at, strict=True):
                _, _, shape, _, _, rank, *_ = held.stored
                stored = StoredTensor(held.name, "F32", shape, file, begin + at * size, rank, None, component, state)
                yield from tensors(held, stored)

    # -- what model_optim_rng.pt has

    def _read_entry(
        self,
        entry: Mapping[str, Any],
        parameters: list[LegacyTensor],
        file: TorchFile,
        number: int,
        *,
        distributed: bool,
    ) -> None:
        where = str(file.info.place)
        masters = entry.get("fp32_from_fp16_params", entry.get("fp32_from_fp16"))
        inner = entry.get("optimizer", entry.get("optimizer_state_dict", entry))
        groups = _groups_of(entry)
        if groups is None:
            raise CorruptError("`optimizer` has no list of groups", where=where)
        if entry.get("grad_scaler"):
            self._notes["the scale of the loss (`grad_scaler`, of float16 training) is left out"] = None
        self._note_steps(groups, file.info)
        members = _members(groups, parameters, self.args)
        numbered = all(isinstance(g.get("params"), list) for g in groups) and isinstance(inner.get("state"), dict)
        known = numbered and {*inner["state"]} <= {n for g in groups for n in g["params"] if type(n) is int}
        if members is not None and known and not distributed:
            members = [_trained(m, g["params"], inner["state"]) for m, g in zip(members, groups, strict=True)]
        if not numbered and not distributed:
            self._lacking[where] = None
        if members is None:
            self._grouped = False
            self._notes["the groups of the optimizer are left out: it is not known which parameters each has"] = None
        else:
            for group, mine in zip(groups, members, strict=True):
                self._merge(group, mine, where)
        if not numbered or distributed:
            return
        if members is None or any(len(m) != len(g["params"]) for m, g in zip(members, groups, strict=True)):
            raise UnsupportedError(
                "the optimizer is not read: the save does not record which parameters its numbers are, and its groups"
                " have not as many as Megatron's rule makes (norms and biases, and all others): some are frozen, and"
                " their shapes do not tell which",
                where=where,
                hint=f"save it with --use-distributed-optimizer, {_WITHOUT}",
            )
        self._numbered(inner["state"], groups, members, file, number)
        self._masters(masters, members, file, number)

    def _note_steps(self, groups: Iterable[Mapping[str, Any]], said_by: DataFile) -> None:
        for group in groups:
            step = group.get(STEP)
            if isinstance(step, (int, float)):
                self._steps.setdefault(float(step), said_by)

    def _merge(self, group: Mapping[str, Any], parameters: list[LegacyTensor], where: str) -> None:
        """A group of a rank with that of the others."""
        values = {str(k): v for k, v in group.items() if k not in ("params", STEP) and is_plain(v)}
        key = tuple([repr(values.get(n, values.get(f"pre_{n}"))) for n in _IDENTITY])
        known = self._groups.setdefault(key, _LegacyGroup(values))
        known.parameters += parameters
        for name in known.values.keys() & values.keys():
            if repr(known.values[name]) != repr(values[name]):
                raise ConflictError(
                    f"ranks disagree: `{printable(name)}` of a group of the optimizer is {known.values[name]!s:.40} in"
                    f" one file, {values[name]!s:.40} in another",
                    where=where,
                    hint="files of different saves were put together",
                    finding="ranks-differ",
                )

    def _numbered(
        self,
        state: Mapping[Any, Any],
        groups: Sequence[Mapping[str, Any]],
        members: Sequence[Sequence[LegacyTensor]],
        file: TorchFile,
        number: int,
    ) -> None:
        """State by numbers, which count the parameters through the groups."""
        where = str(file.info.place)
        count_through = [n for g in groups for n in g["params"]]
        if any(type(n) is not int for n in count_through) or len(set(count_through)) < len(count_through):
            raise CorruptError("the groups of the optimizer do not number its parameters", where=where)
        named = dict(zip(count_through, [h for mine in members for h in mine], strict=True))
        if unknown := [k for k in state if k not in named]:
            raise CorruptError(f"the state of {printable(str(unknown[0]))} belongs to no group", where=where)
        numbers = Numbers(self.files)
        for n, values in state.items():
            held = named[n]
            for what, value in values.items() if isinstance(values, dict) else ():
                if isinstance(value, TorchTensor):
                    stored = self._placed(value, held, str(what), file, number)
                elif what == STEP and type(value) in (int, float):
                    stored = numbers.place(value, file.info)
                else:
                    self._notes[f"`{printable(str(what))}` of the optimizer is not a tensor and is skipped"] = None
                    continue
                if what == STEP:
                    stored = stored._replace(shape=(), strides=None)
                self._own.append(_LegacyState(held, COMPONENT, str(what), stored._replace(rank=held.stored.rank)))

    def _placed(self, value: TorchTensor, held: LegacyTensor, what: str, file: TorchFile, number: int) -> StoredTensor:
        stored = file.place(value, f"{what} of {held.name}", number)
        if stored.shape != held.stored.shape and prod(stored.shape) != 1:
            raise UnsupportedError(
                f"the optimizer is not read: `{printable(what)}` of what should be `{printable(held.name)}` is"
                f" {list(stored.shape)}, not {list(held.stored.shape)}",
                where=str(file.info.place),
                hint=f"the save does not record which parameters its numbers are; {_WITHOUT}",
            )
        return stored

    def _masters(self, masters: Any, members: Sequence[Sequence[LegacyTensor]], file: TorchFile, number: int) -> None:
        """Masters, group by group; parameters that are float32 have none."""
        halves = [[h for h in group if h.stored.dtype != "F32"] for group in members]
        if masters is None and not any(halves):
            return
        lists = masters if isinstance(masters, list) else []
        if [len(m) if isinstance(m, list) else -1 for m in lists] != [len(h) for h in halves]:
            raise UnsupportedError(
                "the optimizer is not read: its masters are not as many as the parameters of its groups",
                where=str(file.info.place),
                hint=f"the save does not record which parameters they are; {_WITHOUT}",
            )
        for group, mine in zip(lists, halves, strict=True):
            for value, held in zip(group, mine, strict=True):
                if not isinstance(value, TorchTensor):
                    raise CorruptError("a master weight is not a tensor", where=str(file.info.place))
                stored = self._placed(value, held, "the master", file, number)
                self._own.append(_LegacyState(held, MASTERS, "", stored._replace(rank=held.stored.rank)))


def _is_spread(entries: Sequence[Any], ep: int) -> bool:
    """Whether experts have an optimizer of their own, as groups say; those of old saves do not.

    They have with expert parallelism, and in later versions where etp is not tp.
    """
    groups = [g for e in entries for g in _groups_of(e) or ()]
    said = [g["is_expert_parallel"] for g in groups if isinstance(g, dict) and "is_expert_parallel" in g]
    return any(said) if said else ep > 1


def _groups_of(entry: Mapping[str, Any]) -> Any:
    inner = entry.get("optimizer", entry.get("optimizer_state_dict", entry))
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    return groups if isinstance(groups, list) and all(isinstance(g, dict) for g in groups) else None


def _of_entry(parameters: Sequence[LegacyTensor], i: int, entries: int, *, spread: bool) -> list[LegacyTensor]:
    """The parameters of one of several optimizers: the last has the experts, if they are ``spread``; where two are
    before it, the first has the first chunk (``--overlap-param-gather-with-optimizer-step``).
    """
    if entries == 1:
        return list(parameters)
    if spread and i == entries - 1:
        return [h for h in parameters if h.is_expert]
    dense = [h for h in parameters if not (spread and h.is_expert)]
    return dense if entries - spread == 1 else [h for h in dense if (h.chunk == 0) == (i == 0)]


def _by_chunk_and_dtype(parameters: Iterable[LegacyTensor]) -> list[list[LegacyTensor]]:
    """The parameters of each buffer: those of one chunk and dtype, chunk by chunk."""
    out: dict[tuple[int, str], list[LegacyTensor]] = {}
    for h in parameters:
        out.setdefault((h.chunk, h.stored.dtype), []).append(h)
    return list(out.values())


def _members(
    groups: Sequence[Mapping[str, Any]], parameters: Sequence[LegacyTensor], args: Mapping[str, Any]
) -> list[list[LegacyTensor]] | None:
    """The parameters of each group by Megatron's rules; None where these do not say it.

    Biases and what has one axis do not decay (``wd_mult`` 0) unless everything does, experts that are spread over ranks
    are apart, and with ``--decoupled-lr`` the embedding and the head are.
    """
    keys = [tuple([_group_value(g, n) for n in ("wd_mult", "is_expert_parallel", "is_decoupled_lr")]) for g in groups]
    if any(k not in (None, 0, 1) for key in keys for k in key) or len(set(keys)) < len(keys):
        return None
    spread, decoupled = any(k[1] for k in keys), any(k[2] for k in keys)
    norms = bool(args.get("apply_wd_to_qk_layernorm"))
    all_decay = all(k[0] for k in keys)  # every rank has the groups of all, those that are empty on it, too
    out: list[list[LegacyTensor]] = [[] for _ in groups]
    for h in parameters:
        flat = h.name.endswith(".bias") or len(h.stored.shape) == 1
        if all_decay or (norms and ("q_layernorm." in h.name or "k_layernorm." in h.name)):
            flat = False
        edge = decoupled and h.name.startswith(("embedding.", "output_layer."))
        fitting = [
            i
            for i, (wd, expert, own_lr) in enumerate(keys)
            if (wd is None or bool(wd) != flat) and bool(expert) == (spread and h.is_expert) and bool(own_lr) == edge
        ]
        if len(fitting) != 1:
            return None
        out[fitting[0]].append(h)
    return out


def _trained(parameters: list[LegacyTensor], numbers: Sequence[Any], state: Mapping[Any, Any]) -> list[LegacyTensor]:
    """The parameters of a group that its optimizer has, where some are frozen and shapes tell which.

    All of them, where they are as many as the numbers, or nothing tells it.
    """
    if len(parameters) == len(numbers) or any(type(n) is not int for n in numbers):
        return parameters
    shapes = {n: _shape(of) for n, of in state.items() if n in numbers}
    own = {str(i): h for i, h in enumerate(parameters)}
    dealt = names_of([[(n, shapes.get(n)) for n in numbers]], [(i, h.stored.shape) for i, h in own.items()], numbers)
    return parameters if dealt is None else [own[dealt[n]] for n in numbers]


def _shape(state: Any) -> tuple[int, ...] | None:
    held = state.items() if isinstance(state, dict) else ()
    return next((t.shape for what, t in held if what != STEP and isinstance(t, TorchTensor)), None)


def _group_value(group: Mapping[str, Any], name: str) -> Any:
    """A value of a group; NeMo puts ``pre_`` in front of the multiples."""
    return group.get(name, group.get(f"pre_{name}"))
