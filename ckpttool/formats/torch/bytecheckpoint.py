"""ByteCheckpoint's directories: metadata like that of torch.distributed.checkpoint, and raw bytes.

    step/model/.metadata          Metadata(state_dict_metadata, planner_data, storage_data, all_tensor_metadata, ...)
    step/model/__3_0.distcp       the chunks of rank 3: their elements and nothing else
    step/optimizer/.metadata      state.NAME.exp_avg, or state.0.exp_avg; param_groups, a file of torch.save in .distcp
    step/extra_state/extra_state_rank_0.pt

``all_tensor_metadata`` has a pickle for each chunk: the tensor as torch.save describes it, so its strides. FSDP1 may
save FlatParameters; ``user_defined_dict`` then says what lies in each, one parameter behind the other.
Source: github.com/ByteDance-Seed/ByteCheckpoint 93292ea (0.0.3): meta_type.py, store_engine.py, merge_tool.py.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

from ckpttool.containers.pickle import PickledObject, interpret, printable
from ckpttool.containers.torch_pickle import TorchTensor, vocabulary
from ckpttool.containers.torch_zip import TorchFile, read_torch
from ckpttool.core.catalog import Catalog, Key, LogicalTensor, Piece, StoredTensor, logical_tensor
from ckpttool.core.dtypes import DTYPES, itemsize
from ckpttool.core.files import DataFile, Place
from ckpttool.core.geometry import Box, whole
from ckpttool.core.mesh import Mesh
from ckpttool.core.optimizer_states import STEP
from ckpttool.core.words import some
from ckpttool.errors import CkptError, CorruptError, IncompleteError, UnsupportedError, found_as
from ckpttool.formats import base
from ckpttool.formats.torch.dcp_metadata import DcpChunk, DcpEntry, DcpTensor, entries_of, read_pickle
from ckpttool.formats.torch.dcp_place import METADATA
from ckpttool.formats.torch.numbered import names_of, unknown
from ckpttool.formats.torch.optimizer import COMPONENT, is_plain
from ckpttool.formats.torch.prefixes import strip_prefixes
from ckpttool.formats.torch.steps import newest, steps_of
from ckpttool.storage.listing import Listing, list_source
from ckpttool.storage.place import open_file

_OWNER = "bytecheckpoint.checkpointer.meta_type"
_FOLDERS = {"model": "model", "optimizer": COMPONENT}
_EXTRA = ("extra_state", "extra_state_rank_0.pt")
_EMBEDDING = re.compile(r"(?:.*\.)?(?:embed_tokens|embed_in|wte|tok_embeddings)\.weight\Z")
_FLAT = re.compile(r"(?:.*\.)?_?flat_param\Z")


class ByteCheckpoint:
    """Directories of ByteCheckpoint and of what uses it."""

    name = "bytecheckpoint"
    capabilities = base.Capabilities(
        components=("model", COMPONENT),
        meshes="any",
        records_shapes=True,
        states="torch",
        own_files=r".*\.distcp",
        instead="use --to dcp",
    )

    def detect(self, listing: Listing) -> int:
        return 0 if listing.single else 2 * (_is_save(listing) or bool(steps_of(listing, _is_save)))

    def read(self, listing: Listing, options: base.ReadOptions) -> base.StoredCheckpoint:
        """Raises IncompleteError (a file or a chunk is missing), CorruptError (metadata and files contradict each
        other), ConflictError (chunks overlap), UnsupportedError, and what reading its pickles raises.
        """
        base.check_mesh(self.name, dict.fromkeys(("tp", "pp", "ep", "etp"), 1), options, listing.root)
        listing, notes = _resolved(listing)
        save = _BytecheckpointReader()
        if METADATA in listing.names:
            folders = {COMPONENT if listing.root.name == COMPONENT else "model": listing}
        else:
            # Whatever their metadata says: what is damaged is an error, and not a save without an optimizer.
            folders = {c: inner for f, c in _FOLDERS.items() if (inner := _folder(listing, f, _has_chunks)) is not None}
        for component, inner in folders.items():
            save.add(component, inner)
        training = _with_extra(save.training, listing)
        if training is not None and training.left:
            notes.append(f"skipped, not plain data: {some(training.left)}")
        carried, said = base.companions(listing, [METADATA])
        return base.StoredCheckpoint(
            self.name,
            listing.root,
            save.files,
            save.tensors,
            Mesh(),
            config=listing.json("config.json"),
            companions=carried,
            recorded=Catalog(save.files, save.logical),
            notes=[*notes, *save.notes, *said],
            training=training,
            refused=save.refused,
        )


# -- where it is


def _is_own(listing: Listing) -> bool:
    """Whether the metadata in a directory is of ByteCheckpoint; torch's begins with another class."""
    if METADATA not in listing.names:
        return False
    try:
        with open_file(listing.path(METADATA)) as f:
            return _OWNER.encode() in f.pread(256, 0)
    except OSError:
        return False


def _has_chunks(listing: Listing) -> bool:
    return METADATA in listing.names or any(n.endswith(".distcp") for n in listing.names)


def _folder(listing: Listing, name: str, is_one: Callable[[Listing], bool] = _is_own) -> Listing | None:
    """The directory of a component, where there is one."""
    if not (listing.root / name).is_dir():
        return None
    inner = list_source(listing.root / name)
    return inner if is_one(inner) else None


def _is_save(listing: Listing) -> bool:
    return _is_own(listing) or any(_folder(listing, f) is not None for f in _FOLDERS)


def _resolved(listing: Listing) -> tuple[Listing, list[str]]:
    """The save itself: of a run the marked one, or the last."""
    if _is_save(listing):
        return listing, []
    steps = steps_of(listing, _is_save)
    if not steps:
        raise IncompleteError(
            "there is no save of ByteCheckpoint here",
            where=str(listing.root),
            hint="give the directory that holds model/ and optimizer/",
        )
    name, note = newest(listing, steps)
    return list_source(listing.root / name), [note]


# -- what is in it


class _MemoryFile:
    """A pickle that is in memory."""

    def __init__(self, info: DataFile, data: bytes) -> None:
        self.info, self.data = info._replace(size=len(data)), data

    def pread(self, n: int, at: int) -> bytes:
        return self.data[at : at + n]

    def read_into(self, buffer: memoryview, at: int) -> int:
        data = self.pread(len(buffer), at)
        buffer[: len(data)] = data
        return len(data)

    def map(self) -> mmap.mmap:
        raise OSError

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _ComponentDirectory:
    """The directory of a component."""

    listing: Listing
    info: DataFile
    entries: list[DcpEntry]
    order: list[str]
    """Names in the order in which a rank had them."""
    described: Mapping[tuple[str, tuple[int, ...]], bytes]
    """Name and offset of a chunk -> the pickle of its tensor."""

    def corrupt(self, what: str, finding: str = "") -> NoReturn:
        raise CorruptError(what, where=str(self.info.place), hint="fetch or save the checkpoint again", finding=finding)


class _BytecheckpointReader:
    """The tensors of all components."""

    def __init__(self) -> None:
        self.files: list[DataFile] = []
        self.tensors: list[StoredTensor] = []
        self.logical: dict[Key, LogicalTensor] = {}
        self.training: base.TrainingState | None = None
        self.refused: dict[str, CkptError] = {}
        self.notes: list[str] = []
        self._called: dict[str, str] = {}
        self._model: list[tuple[str, tuple[int, ...]]] = []
        """Parameters in the model's order."""
        self._forms: dict[bytes, TorchTensor] = {}

    def add(self, component: str, listing: Listing) -> None:
        """Read the metadata of a component; the model comes first."""
        part = self._part(listing)
        if component == "model":
            self._add_model(part)
        else:
            self._add_optimizer(part)

    def _part(self, listing: Listing) -> _ComponentDirectory:
        path = listing.path(METADATA)
        if METADATA not in listing.names:
            raise IncompleteError(
                f"the save was not finished: {METADATA} is missing, which is written last",
                where=str(listing.root),
                hint="take an earlier save: `ckpttool inspect RUN --checkpoints` shows which are complete",
                finding="save-unfinished",
            )
        value = read_pickle(path)
        fields = value.fields if isinstance(value, PickledObject) else {}
        described, order = _described(fields, path)
        numbers: dict[str, int] = {}

        def number(name: str) -> int:
            if name not in numbers:
                if name not in listing.names:
                    raise IncompleteError(
                        f"the file {printable(name)} is missing, which {METADATA} names",
                        where=str(listing.root),
                        hint="copy the files of all ranks into one directory",
                        finding="rank-missing",
                    )
                numbers[name] = len(self.files)
                self.files.append(base.file_now(listing.path(name)))
            return numbers[name]

        entries = entries_of(value, path, number, f"{_OWNER}.Metadata")
        rank = {name: i for i, name in enumerate(order)}
        part = _ComponentDirectory(listing, base.file_now(path), entries, order, described)
        if order and (lost := [e.fqn for e in entries if e.fqn not in rank]):  # its planner says the keys of each
            part.corrupt(f"nothing says which keys lead to `{printable(lost[0])}`")
        entries.sort(key=lambda e: rank.get(e.fqn, len(rank)))
        return part

    def _add_model(self, part: _ComponentDirectory) -> None:
        tensors = [(e.fqn, e.value) for e in part.entries if isinstance(e.value, DcpTensor)]
        if flat := [name for name, _ in tensors if _FLAT.match(name)]:
            raise UnsupportedError(
                f"these are FlatParameters of FSDP1 ({some(flat)}), which are parameters laid end to end",
                where=str(part.info.place),
                hint="merge them first: scripts/merge_bcp.py --framework fsdp --fsdp_save_decomposed_model",
            )
        if any(_EMBEDDING.match(name) for name, _ in tensors):
            self._called, note = strip_prefixes([name for name, _ in tensors], str(part.info.place))
            self.notes += [note] if note else []
        left = []
        for name, tensor in tensors:
            key = Key(self._called.get(name, name))
            self._put(key, name, tensor, part)
            if tensor.dtype in DTYPES and DTYPES[tensor.dtype].kind == "float":
                self._model.append((key.name, tensor.shape))
        left = [printable(e.fqn, 60) for e in part.entries if not isinstance(e.value, DcpTensor)]
        if left:
            self.notes.append(f"skipped, not tensors: {some(left)}")

    def _put(self, key: Key, fqn: str, tensor: DcpTensor, part: _ComponentDirectory) -> None:
        pieces = []
        for chunk in tensor.chunks:
            if chunk.box.volume:
                stored = self._chunk(key, fqn, tensor, chunk, part)
                self.tensors.append(stored)
                pieces.append(Piece(stored, whole(stored.shape), chunk.box))
        if not prod(tensor.shape):
            self.logical[key] = LogicalTensor(key, tensor.dtype, tensor.shape, ())
        else:
            with found_as(incomplete="chunk-missing", conflict="chunk-overlap"):
                self.logical[key] = logical_tensor(key, tensor.shape, pieces, files=self.files)

    def _chunk(self, key: Key, fqn: str, tensor: DcpTensor, chunk: DcpChunk, part: _ComponentDirectory) -> StoredTensor:
        number, begin, length = chunk.span
        file = self.files[number]
        if begin + length > file.size:
            raise IncompleteError(
                f"`{printable(fqn)}` lies at bytes {begin:,} to {begin + length:,}, and the file has {file.size:,}",
                where=str(file.place),
                hint="the download or save was interrupted; fetch the file again",
                finding="truncated",
            )
        form = self._form(fqn, chunk.box, part)
        if (form.dtype, form.shape) != (tensor.dtype, chunk.box.shape):
            part.corrupt(
                f"a chunk of `{printable(fqn)}` is {tensor.dtype} {list(chunk.box.shape)} by its box, and {form.dtype}"
                f" {list(form.shape)} by the description of its tensor",
                "chunk-size",
            )
        if tensor.dtype in DTYPES and length != chunk.box.volume * itemsize(tensor.dtype):
            here = f"a chunk of `{printable(fqn)}`, {tensor.dtype} {list(chunk.box.shape)}, has {length:,} bytes"
            part.corrupt(here, "chunk-size")
        held = TorchFile(file, None, {form.storage.key: (begin, length)})
        return held.place(form, key.name, number)._replace(component=key.component, state=key.state)

    def _form(self, fqn: str, box: Box, part: _ComponentDirectory) -> TorchTensor:
        """The tensor of a chunk as it was described; equal descriptions are read once."""
        data = part.described.get((fqn, box.start))
        if data is None:
            part.corrupt(f"nothing describes the chunk at {list(box.start)} of `{printable(fqn)}`")
        if data not in self._forms:
            value, _ = interpret(_MemoryFile(part.info, data), vocabulary({}))
            if not isinstance(value, TorchTensor):
                raise UnsupportedError(
                    f"a chunk of `{printable(fqn)}` is not a plain tensor",
                    where=str(part.info.place),
                    hint="save plain tensors or DTensors: dequantized, and not sparse",
                )
            self._forms[data] = value
        return self._forms[data]

    def _add_optimizer(self, part: _ComponentDirectory) -> None:
        states: dict[str, dict[str, tuple[str, DcpTensor]]] = {}
        groups: list[dict[str, Any]] = []
        left = []
        for e in part.entries:
            if isinstance(e.value, DcpTensor) and len(e.path) == 3 and e.path[0] == "state":
                states.setdefault(str(e.path[1]), {})[str(e.path[2])] = e.fqn, e.value
            elif e.path == ("param_groups",) and not isinstance(e.value, DcpTensor):
                groups = self._groups(e.value, part)
            else:
                left.append(printable(e.fqn, 60))
        if left:
            self.notes.append(f"skipped, not state of a parameter: {some(left)}")
        names = self._names(groups, states, part)
        if names is None:
            return
        for number, state in states.items():
            for what, (fqn, tensor) in state.items():
                self._put(Key(names[number], COMPONENT, what), fqn, tensor, part)
        kept, unfit = [], []
        for i, group in enumerate(groups):
            values = {str(k): v for k, v in group.items() if k not in ("params", "param_names")}
            unfit += [f"param_groups.{i}.{k}" for k, v in values.items() if not is_plain(v)]
            parameters = tuple([names[str(n)] for n in group.get("params") or () if str(n) in names])
            kept.append(base.ParamGroup(parameters, {k: v for k, v in values.items() if is_plain(v)}))
        self.training = base.TrainingState(tuple(kept), left=tuple(unfit))

    def _groups(self, span: tuple[int, int, int], part: _ComponentDirectory) -> list[dict[str, Any]]:
        number, begin, length = span
        value = read_torch(self.files[number].place, begin, begin + length).value
        if not isinstance(value, list) or not all(isinstance(g, dict) for g in value):
            part.corrupt("param_groups is not a list of dicts")
        return value

    def _names(
        self,
        groups: list[dict[str, Any]],
        states: Mapping[str, Mapping[str, tuple[str, DcpTensor]]],
        part: _ComponentDirectory,
    ) -> dict[str, str] | None:
        """The parameter of each key of the optimizer's state; None where nothing says it."""
        model = dict(self._model)
        named = {n: self._called.get(n, n) for n in states}
        every = [str(n) for group in groups for n in group.get("params") or ()]
        if all(name in model for name in (named.values() if named else every)):
            return named | {n: self._called.get(n, n) for n in every}
        shapes = {n: _shape(state) for n, state in states.items()}
        numbers = [[(str(n), shapes.get(str(n))) for n in g.get("params") or ()] for g in groups]
        found = names_of(numbers, self._model, states.keys())
        if found is None:
            self.refused[COMPONENT] = why = UnsupportedError(
                "nothing says whose state the optimizer has: its parameters are numbers, and their shapes leave more"
                " than one order, or none",
                where=str(part.info.place),
                hint="save it with torch's get_optimizer_state_dict, which names them; or omit the optimizer with"
                " --only model",
            )
            self.notes.append(f"the optimizer is not read: {why.what}")
            return None
        self.notes += unknown(every, found)
        return {str(n): name for n, name in found.items()}


def _described(fields: Mapping[str, Any], path: Place) -> tuple[dict[tuple[str, tuple[int, ...]], bytes], list[str]]:
    """The description of each chunk, and the names in the order in which a rank had them."""
    forms, order = fields.get("all_tensor_metadata") or {}, fields.get("planner_data") or {}
    if not isinstance(forms, dict) or not isinstance(order, dict):
        raise CorruptError("all_tensor_metadata or planner_data is not a dict", where=str(path))
    out = {}
    for index, data in forms.items():
        if isinstance(data, bytes) and isinstance(index, PickledObject):
            fqn, offset = index.fields.get("fqn"), index.fields.get("offset") or ()
            if type(fqn) is not str or type(offset) is not tuple or any(type(n) is not int for n in offset):
                raise CorruptError("all_tensor_metadata has a key that is not a chunk", where=str(path))
            out[fqn, offset] = data
    return out, [str(name) for name in order]


def _shape(state: Mapping[str, tuple[str, DcpTensor]]) -> tuple[int, ...] | None:
    return next((tensor.shape for what, (_, tensor) in state.items() if what != STEP), None)


def _with_extra(training: base.TrainingState | None, listing: Listing) -> base.TrainingState | None:
    """Add the other plain values that the first rank saved."""
    path = listing.root / _EXTRA[0] / _EXTRA[1]
    if not path.is_file():
        return training
    value = read_torch(path).value
    said = training or base.TrainingState()
    if not isinstance(value, dict):
        return base.TrainingState(said.groups, said.step, said.plain, (*said.left, _EXTRA[0]))
    plain = {str(k): v for k, v in value.items() if is_plain(v)}
    left = [printable(str(k), 60) for k, v in value.items() if not is_plain(v)]
    return base.TrainingState(said.groups, said.step, {**said.plain, **plain}, (*said.left, *left))
