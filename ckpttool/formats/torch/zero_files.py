"""Shared parts of all DeepSpeed checkpoints: the directory of one save, and the file of model states.

    DIR/latest                                              the tag of the newest save
    DIR/TAG/mp_rank_00_model_states.pt                      model states (stage 3: zero_pp_rank_R_mp_rank_00_...)
      module            {name: tensor}                      stage 3: empty tensors where parameters are partitioned
      param_shapes      [{name: shape}, ...]                of each group of the optimizer, in the order of its elements
      frozen_param_shapes, frozen_param_fragments           stage 3: a run of each frozen parameter
      shared_params     {name: name}                        parameters that are another one
      buffer_names, lr_scheduler, global_steps, ..., and what the trainer put beside these (client state)

Source: deepspeed/runtime/engine.py (DeepSpeed 0.19.8).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

from ckpttool.containers.pickle import printable
from ckpttool.containers.plain import is_plain
from ckpttool.containers.torch_pickle import TorchTensor
from ckpttool.containers.torch_zip import TorchFile, read_torch
from ckpttool.core.catalog import SHARDED, FlatShard, Key, StoredTensor, packed_shards
from ckpttool.core.dtypes import itemsize
from ckpttool.core.files import DataFile, Place
from ckpttool.core.mesh import Mesh
from ckpttool.core.words import count, some
from ckpttool.errors import ConflictError, CorruptError, IncompleteError, UnsupportedError
from ckpttool.formats import base
from ckpttool.formats.torch.prefixes import strip_prefixes
from ckpttool.storage.listing import Listing, list_source
from ckpttool.storage.place import scan

MODEL_STATES = re.compile(r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt\Z")
_POINTER_LIMIT = 4096
_REFUSED = (
    (
        re.compile(r"layer_\d+(-model_\d+)?-model_states\.pt"),
        "a pipeline of DeepSpeed (PipelineModule): its layers have numbers in place of the names of parameters",
        "convert it with the trainer's own script first (convert_checkpoint/deepspeed_to_megatron.py and others)",
    ),
)
STRUCTURE = frozenset(
    {
        *("module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"),
        *("ds_config", "ds_version", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"),
        *("sparse_tensor_module_names", "num_experts", "universal_checkpoint_info"),
        *("ds_autoep_layers", "autoep_layers"),
    }
)
"""Keys of the model states that say how the save is laid out, or how DeepSpeed was configured."""
_OWN = frozenset({"zero_to_fp32.py", "zero_to_torch.py"})


def one_save(listing: Listing, pointer: str, is_save: Callable[[Listing], bool]) -> tuple[Listing, str]:
    """The directory of one save, and a note on which one it is; ``pointer`` is the file that names it.

    Raises IncompleteError with the candidates when the pointer names none, ConflictError when there is no pointer and
    several saves.
    """
    if listing.single or is_save(listing):
        return listing, ""
    tags = saves(listing, is_save)
    if pointer in listing.names:
        tag = pointed(listing, pointer)
        if tag not in tags:
            raise IncompleteError(
                f"`{pointer}` names the save `{printable(tag)}`, which is not here"
                + ("" if not tag or not has_folder(listing, tag) else " complete: it has none of DeepSpeed's files"),
                where=[str(listing.path(pointer)), f"saves: {', '.join(tags) or 'none'}"],
                hint=f"give the directory of one: {listing.root / tags[-1]}" if tags else "fetch its files again",
                finding="latest",
            )
        others = [t for t in tags if t != tag]
        beside = f"; {some(others)} {'is' if len(others) == 1 else 'are'} here too" if others else ""
        return list_source(listing.root / tag), f"`{pointer}` names the save: {tag}{beside}"
    if len(tags) == 1:
        return list_source(listing.root / tags[0]), f"there is no `{pointer}`; the only save is {tags[0]}"
    raise ConflictError(
        f"there are {len(tags)} saves, and no file `{pointer}` that names one",
        where=[str(listing.root), f"saves: {', '.join(tags)}"],
        hint=f"give the directory of one: {listing.root / tags[-1]}" if tags else None,
    )


def pointed(listing: Listing, pointer: str) -> str:
    """The tag that ``latest`` names; "" for a file that is no tag."""
    with listing.path(pointer).open("rb") as f:
        text = f.read(_POINTER_LIMIT).decode("utf-8", "replace").strip()
    return text if text and not re.search(r"[/\\\x00-\x1f]|\A\.\.?\Z", text) else ""


def saves(listing: Listing, is_save: Callable[[Listing], bool]) -> list[str]:
    """Tags of the saves directly below a directory."""
    return [f for f in listing.folders() if is_save(listing.inside(f))]


def has_folder(listing: Listing, name: str) -> bool:
    """Whether there is a directory of this name directly in another."""
    return any(e.name == name and e.is_dir() for e in scan(listing.root))


def config_of(listing: Listing, save: Listing) -> tuple[dict[str, Any], tuple[str, ...], list[str]]:
    """config.json, the small files beside it that are carried along (of ``listing``), and notes."""
    carried, notes = base.companions(listing, [n for n in listing.names if n in _OWN or n.startswith("latest")])
    found = listing.json("config.json") or save.json("config.json")
    if not found and listing.root == save.root:
        found = list_source(save.root.parent).json("config.json")
        notes += ["config.json is read from the parent directory"] if found else []
    return found, carried, notes


class SaveReader(Protocol):
    """A reader of the files of one save, and its results."""

    files: list[DataFile]
    tensors: list[StoredTensor]
    shards: list[Sequence[FlatShard]]
    dtypes: dict[Key, str]
    notes: list[str]

    def read(self) -> base.TrainingState:
        """Fill the others."""


_R = TypeVar("_R", bound=SaveReader)


def read_save(
    format_name: str,
    listing: Listing,
    options: base.ReadOptions,
    pointer: str,
    is_save: Callable[[Listing], bool],
    kind: Callable[[Listing], _R],
) -> tuple[base.StoredCheckpoint, _R]:
    """A save at or below a directory, and what has read it. Raises as ``one_save`` and the reader do."""
    base.check_mesh(format_name, dict.fromkeys(("tp", "pp", "ep", "etp"), 1), options, listing.root)
    save, note = one_save(listing, pointer, is_save)
    config, companions, notes = config_of(listing, save)
    reader = kind(save)
    training = reader.read()
    tensors, dtypes = reader.tensors, reader.dtypes
    said: list[str] = []
    if options.wrapped:
        tensors, dtypes, training, said = without_prefixes(tensors, dtypes, training, str(save.root))
    stored = base.StoredCheckpoint(
        format_name,
        listing.root,
        reader.files,
        tensors,
        Mesh(),
        config=config,
        companions=companions,
        notes=[*([note] if note else []), *notes, *reader.notes, *said],
        shards=reader.shards,
        dtypes=dtypes,
        training=training,
    )
    return stored, reader


def refuse_others(save: Listing) -> None:
    """Raises UnsupportedError for files of pipeline stages, and of tensor-parallel ranks."""
    for name in save.names:
        for pattern, what, hint in _REFUSED:
            if pattern.fullmatch(name):
                raise UnsupportedError(f"this is {what}", where=str(save.path(name)), hint=hint)
        if (m := MODEL_STATES.match(name)) and int(m["mp"]):
            refuse_tensor_parallel(save.path(name))


def refuse_tensor_parallel(path: Place) -> NoReturn:
    """Raise UnsupportedError for the file of a tensor-parallel rank other than the first."""
    raise UnsupportedError(
        "this is a save of several tensor-parallel ranks: its files do not say which axis of a parameter was cut",
        where=str(path),
        hint="convert it with DeepSpeed's ds_to_universal, which has the trainer's patterns, and give what that writes",
    )


# -- model states


@dataclass(slots=True)
class ModelStates:
    """The file of model states of a rank."""

    file: TorchFile
    module: dict[str, TorchTensor]
    groups: list[dict[str, tuple[int, ...]]]
    """Shapes of the parameters of each optimizer group (stage 3: sub-group), in the order of elements."""
    frozen: dict[str, tuple[int, ...]]
    fragments: dict[str, TorchTensor]
    shared: dict[str, str]
    buffers: frozenset[str]
    rest: Mapping[str, Any]
    """The values that are not about tensors of the model."""
    left: list[str]
    """Names in ``module`` that are not tensors."""

    @property
    def path(self) -> str:
        return str(self.file.info.place)

    @property
    def trained(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all parameters of the optimizer, in its order."""
        return {name: shape for group in self.groups for name, shape in group.items()}


def read_model_states(path: Place) -> ModelStates:
    """Raises CorruptError for what is no file of model states, UnsupportedError for one without ``param_shapes``."""
    file = read_torch(path)
    where, value = str(path), file.value
    if not isinstance(value, dict) or "module" not in value:
        raise CorruptError("this is not a file of DeepSpeed's model states: it has no `module`", where=where)
    if value.get("ds_autoep_layers") or value.get("autoep_layers"):  # None of DeepSpeed's own MoE layers
        raise UnsupportedError(
            "this is a save with DeepSpeed's AutoEP: its experts are shared out over groups of their own",
            where=where,
            hint="convert it with DeepSpeed's ds_to_universal",
        )
    module = value["module"]
    if not isinstance(module, dict):  # without it all masters would be taken for the model
        raise CorruptError("`module` is not a dict of tensors", where=where, hint="fetch or save the checkpoint again")
    shapes = value.get("param_shapes") or []
    if isinstance(shapes, dict):  # DeepSpeed before 0.4 had one for all groups
        shapes = [shapes]
    if not isinstance(shapes, (list, tuple)):
        raise CorruptError("`param_shapes` is not a list of dicts", where=where)
    groups = [_shapes(group, where) for group in shapes]
    if sum(map(len, groups)) != len({n for g in groups for n in g}):
        raise CorruptError("`param_shapes` names a parameter in two groups", where=where)
    shared = value.get("shared_params") or {}
    fragments = value.get("frozen_param_fragments") or {}
    buffers = list_of(value.get("buffer_names"))
    if not isinstance(shared, dict) or not isinstance(fragments, dict):
        raise CorruptError("`shared_params` or `frozen_param_fragments` is not a dict", where=where)
    return ModelStates(
        file,
        {str(k): v for k, v in module.items() if isinstance(v, TorchTensor)},
        groups,
        _shapes(value.get("frozen_param_shapes") or {}, where),
        {str(k): v for k, v in fragments.items() if isinstance(v, TorchTensor)},
        {str(k): str(v) for k, v in shared.items()},
        frozenset(str(n) for n in buffers),
        {str(k): v for k, v in value.items() if k not in STRUCTURE},
        [printable(str(k), 60) for k, v in module.items() if not isinstance(v, TorchTensor)],
    )


def _shapes(value: Any, where: str) -> dict[str, tuple[int, ...]]:
    if not isinstance(value, dict):
        raise CorruptError("the shapes of parameters are not a dict", where=where)
    for name, shape in value.items():
        if not isinstance(shape, (tuple, list)) or any(type(n) is not int or n < 0 for n in shape):
            raise CorruptError(f"the shape of `{printable(str(name))}` is not a shape", where=where)
    return {str(name): tuple(shape) for name, shape in value.items()}


def model_weights(
    states: ModelStates, file: int, whole: Mapping[str, StoredTensor], dtypes: dict[Key, str]
) -> list[StoredTensor]:
    """The model: tensors of ``module``, and where these are empty (stage 3) those that the optimizer has.

    ``whole`` are masters, and frozen parameters that are put together; ``dtypes`` gets what the model's weights are
    rounded to. Raises ConflictError for shapes that contradict, IncompleteError for a parameter that is nowhere.
    """
    out: list[StoredTensor] = []
    lost: list[str] = []
    keys = Counter(t.storage.key for name, t in states.module.items() if name in whole)
    owners = {t.storage.key: n for n, t in states.module.items() if n in whole and keys[t.storage.key] == 1}
    for name, tensor in states.module.items():
        empty = 0 in tensor.shape
        held = whole.get(name) or whole.get(states.shared.get(name, ""))
        if held is None and empty and name not in states.buffers:
            held = whole.get(owners.get(tensor.storage.key, ""))  # tied, which this version does not say
        if held is None and (not empty or name in states.buffers):
            out.append(states.file.place(tensor, name, file))
        elif held is None:
            lost.append(printable(name))
        elif tensor.shape == held.shape:
            out.append(states.file.place(tensor, name, file))
        elif not empty:
            raise ConflictError(
                f"`{printable(name)}` is {list(tensor.shape)} in `module`, and {list(held.shape)} in the optimizer",
                where=states.path,
                hint="the files are not of one save",
                finding="ranks-differ",
            )
        else:
            out.append(_derived(held, name, tensor.dtype, dtypes))
    out += [_derived(held, name, held.dtype, dtypes) for name, held in whole.items() if name not in states.module]
    if lost:
        raise IncompleteError(
            f"{count(len(lost), 'parameter')} of `module` {'is' if len(lost) == 1 else 'are'} in no file: {some(lost)}",
            where=states.path,
            hint="ZeRO stage 3 saves parameters that the optimizer has, and those that are frozen",
        )
    return out


def frozen_parameters(
    states: ModelStates, first: int, paths: Sequence[Place], files: list[DataFile], shards: list[Sequence[FlatShard]]
) -> dict[str, StoredTensor]:
    """Frozen parameters of stage 3, of which the model states of every rank hold a run.

    ``states`` are those of rank 0, and ``first`` their file; ``paths`` are of all ranks. Adds to ``files`` and
    ``shards``. Raises ConflictError for runs that do not fit.
    """
    runs: dict[str, list[FlatShard]] = {n: [] for n in states.frozen}
    for rank, path in enumerate(paths):
        own, file = states, first
        if rank:
            own, file = read_model_states(path), len(files)
            files.append(own.file.info)
        for name, shape in states.frozen.items():
            tensor, size = own.fragments.get(name), prod(shape)
            part = -(-size // len(paths))
            if tensor is None or tensor.shape != (part,) or own.frozen.get(name) != shape:
                held = "missing" if tensor is None else f"{prod(tensor.shape):,} elements"
                raise ConflictError(
                    f"the fragment of the frozen `{printable(name)}` is {held}, not {part:,} elements",
                    where=own.path,
                    hint="the files are not of one save",
                )
            if (n := min(part, size - rank * part)) > 0:
                stored = own.file.place(tensor, name, file)
                runs[name].append(FlatShard(rank * part, stored._replace(shape=(n,))))
    whole = {name: joined(name, shape, runs[name], shards) for name, shape in states.frozen.items()}
    return {name: tensor for name, tensor in whole.items() if tensor is not None}


def _derived(held: StoredTensor, name: str, dtype: str, dtypes: dict[Key, str]) -> StoredTensor:
    """A weight of the model that is stored as a master weight."""
    if dtype != held.dtype:
        dtypes[Key(name)] = dtype
    return held._replace(name=name, component="model", state="")


# -- what a trainer resumes from


def training_of(states: ModelStates, groups: Iterable[base.ParamGroup], more: Mapping[str, Any]) -> base.TrainingState:
    """Groups, counters, learning-rate schedule and client state; ``more`` is of the optimizer, by names."""
    plain: dict[str, Any] = {}
    left: list[str] = list(states.left)
    for name, value in {**states.rest, **more}.items():
        if value is None or value == {}:
            continue
        if is_plain(value):
            plain[name] = value
        else:
            left.append(printable(name, 60))
    return base.TrainingState(tuple(groups), step_of(states), plain, tuple(left))


def step_of(states: ModelStates) -> int | None:
    """How many steps changed the model; None where the file does not say it."""
    steps, skipped = states.rest.get("global_steps"), states.rest.get("skipped_steps", 0)
    return steps - skipped if type(steps) is int and type(skipped) is int else None


def list_of(value: Any) -> list[Any]:
    """The elements of a list or tuple; of anything else none."""
    return list(value) if type(value) in (list, tuple) else []


def values_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values of a group of an optimizer, without its parameters."""
    return {str(k): v for k, v in group.items() if k != "params" and is_plain(v)}


def without_prefixes(
    tensors: Sequence[StoredTensor], dtypes: Mapping[Key, str], training: base.TrainingState, where: str
) -> tuple[list[StoredTensor], dict[Key, str], base.TrainingState, list[str]]:
    """Tensors, dtypes and groups with the model's own names (``strip_prefixes``), and notes."""
    new, note = strip_prefixes(dict.fromkeys(t.name for t in tensors), where)
    if not note:
        return list(tensors), dict(dtypes), training, []
    groups = tuple(replace(g, parameters=tuple(new.get(n, n) for n in g.parameters)) for g in training.groups)
    return (
        [t._replace(name=new[t.name]) for t in tensors],
        {key._replace(name=new[key.name]): dtype for key, dtype in dtypes.items()},
        replace(training, groups=groups),
        [note],
    )


# -- elements


class ElementRun(NamedTuple):
    """Consecutive elements of a flat vector that one file holds."""

    start: int
    """First element in the vector."""
    stored: StoredTensor
    """1-D."""

    @property
    def stop(self) -> int:
        return self.start + self.stored.shape[0]


def cut(runs: Sequence[ElementRun], start: int, stop: int) -> Iterator[FlatShard]:
    """The shards that hold elements ``[start, stop)`` of the vector, in order."""
    at = bisect_right(runs, start, key=_start) - 1
    for run in runs[max(0, at) :]:
        if run.start >= stop:
            return
        lo, hi = max(start, run.start), min(stop, run.stop)
        if lo < hi:
            t = run.stored
            offset = t.offset + (lo - run.start) * itemsize(t.dtype)
            yield FlatShard(lo - start, t._replace(shape=(hi - lo,), offset=offset))


def _start(run: ElementRun) -> int:
    return run.start


def joined(
    name: str, shape: tuple[int, ...], found: Sequence[FlatShard], shards: list[Sequence[FlatShard]]
) -> StoredTensor | None:
    """The tensor whose elements ``found`` holds; what one file holds in one run needs no entry in ``shards``.

    None where they are not all there.
    """
    if sum(s.stored.shape[0] for s in found) != prod(shape):
        return None
    if len(found) == 1:
        return found[0].stored._replace(name=name, shape=shape)
    if not found:
        return StoredTensor(name, "F32", shape, 0, 0)
    shards.append(packed_shards(found))
    return StoredTensor(name, found[0].stored.dtype, shape, SHARDED, len(shards) - 1)
