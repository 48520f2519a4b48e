"""``.metadata`` of torch.distributed.checkpoint: one pickle that says which box of which tensor lies where.

    Metadata
      state_dict_metadata  {fqn: TensorStorageMetadata(properties, size, chunks) | BytesStorageMetadata}
      planner_data         {fqn: path}              how the state dict was nested; absent before torch 2.1
      storage_data         {MetadataIndex(fqn, offset): _StorageInfo(relative_path, offset, length)}

Source: torch/distributed/checkpoint/metadata.py and filesystem.py (torch 2.1 to 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from ckpttool.containers.pickle import Global, Machine, PickledObject, interpret, opened, printable
from ckpttool.containers.pickle_write import Instance, Once, Pairs, PickledCall, Stateful, plain_pickle
from ckpttool.containers.torch_pickle import BY_TORCH, TORCH_DTYPE, vocabulary
from ckpttool.core.files import Place
from ckpttool.core.geometry import Box, whole
from ckpttool.errors import CorruptError, UnsupportedError

_CLASSES = "torch.distributed.checkpoint.metadata"
CLASS = f"{_CLASSES}.Metadata"
_FILES = "torch.distributed.checkpoint.filesystem"

Span = tuple[int, int, int]
"""Number of a file, offset and bytes."""
Size = tuple[int, ...]


class DcpChunk(NamedTuple):
    """A box of a tensor, and where it lies."""

    box: Box
    span: Span


class DcpTensor(NamedTuple):
    """A tensor."""

    dtype: str
    """As in ckpttool.core.dtypes; torch's name of one that is not there."""
    shape: Size
    chunks: Sequence[DcpChunk]


class DcpEntry(NamedTuple):
    """A value of the state dict that was saved."""

    fqn: str
    path: tuple[str | int, ...]
    """Keys that lead to it; only (fqn,) where the save does not say them."""
    value: DcpTensor | Span
    """A tensor, or where the bytes of any other object are."""


def read_metadata(path: Place, number: Callable[[str], int]) -> list[DcpEntry]:
    """The entries of a save; ``number`` numbers the files that it names.

    Raises CorruptError for what contradicts itself, UnsupportedError for another software's file, compressed tensors
    and what asks for code.
    """
    return entries_of(read_pickle(path), path, number)


def read_pickle(path: Place) -> Any:
    """The metadata as inert records. Raises what ``read_metadata`` raises."""
    with opened(path) as file:
        return interpret(file, _VOCABULARY)[0]


def entries_of(value: Any, path: Place, number: Callable[[str], int], *classes: str) -> list[DcpEntry]:
    """See ``read_metadata``; ``classes`` are those that the metadata may be. Takes ``value`` apart."""
    return _MetadataParser(path, number).metadata(value, classes or (CLASS,))


_STRINGS = frozenset((str,))


def _fill(machine: Machine, record: PickledObject, state: Any) -> None:
    """There are three records for each chunk, so the dict that the pickle remembers is not kept beside its copy."""
    if type(state) is not dict or not _STRINGS.issuperset(map(type, state)):
        record.fields["state"] = machine.plain(state)
        return
    machine.made += len(state)
    record.fields.update(state)
    state.clear()


_MANY = ((_CLASSES, "MetadataIndex"), (_CLASSES, "ChunkStorageMetadata"), (_FILES, "_StorageInfo"))
_TORCH = vocabulary({})
_VOCABULARY = _TORCH._replace(records={name: name[1] for name in _MANY}, builds={**_TORCH.builds, PickledObject: _fill})


class _MetadataParser:
    def __init__(self, path: Place, number: Callable[[str], int]) -> None:
        self.path, self.number = path, number
        self.boxes: dict[tuple[Size, Size], Box] = {}
        """Tensors are cut in few ways: each box is kept once."""

    def corrupt(self, what: str, hint: str = "fetch or save the checkpoint again") -> NoReturn:
        raise CorruptError(what, where=str(self.path), hint=hint)

    def fields(self, value: Any, *classes: str) -> dict[str, Any]:
        if type(value) is not PickledObject or value.cls.rpartition(".")[2] not in classes:
            self.corrupt(f"a value of the metadata is not a {' or '.join(classes)}")
        return value.fields

    def metadata(self, value: Any, classes: Collection[str]) -> list[DcpEntry]:
        if type(value) is not PickledObject or value.cls not in classes:
            kind = printable(value.cls) if type(value) is PickledObject else type(value).__name__
            raise UnsupportedError(
                f"this is not the metadata of torch.distributed.checkpoint, but a {kind}", where=str(self.path)
            )
        described, stored, paths = (
            value.fields.get(k) for k in ("state_dict_metadata", "storage_data", "planner_data")
        )
        if type(described) is not dict or type(stored) is not dict:
            self.corrupt("the metadata has no state_dict_metadata and storage_data")
        places = self.places(stored)
        if type(paths) is not dict:
            paths = {}
        entries = []
        order = [fqn for fqn in paths if fqn in described]  # that of the state dict; ranks write parts of it
        for fqn in dict.fromkeys((*order, *described)):
            what = described[fqn]
            if type(fqn) is not str:
                self.corrupt("a tensor has a name that is not a string")
            if paths and fqn not in paths:  # its planner writes those of all values, or of none
                self.corrupt(f"the metadata says no path of `{printable(fqn)}`, and those of other values")
            path = self.path_of(paths.get(fqn), fqn)
            if type(what) is PickledObject and what.cls == f"{_CLASSES}.BytesStorageMetadata":
                if (fqn, None) not in places:
                    self.corrupt(f"nothing says where the value `{printable(fqn)}` lies")
                entries.append(DcpEntry(fqn, path, places[fqn, None]))
            else:
                entries.append(DcpEntry(fqn, path, self.tensor(fqn, what, places)))
        return entries

    def places(self, stored: dict[Any, Any]) -> dict[tuple[str, Size | None], Span]:
        out: dict[tuple[str, Size | None], Span] = {}
        while stored:  # what is taken over is not needed any more
            index, info = stored.popitem()
            at, place = self.fields(index, "MetadataIndex"), self.fields(info, "_StorageInfo")
            fqn, offset = at.get("fqn"), at.get("offset")
            if place.get("transform_descriptors"):
                raise UnsupportedError(
                    f"the values are compressed or transformed ({printable(str(place['transform_descriptors'][0]))})",
                    where=str(self.path),
                    hint="save the checkpoint without extensions (FileSystemWriter without _extensions)",
                )
            name, begin, length = (place.get(k) for k in ("relative_path", "offset", "length"))
            if type(name) is not str or type(begin) is not int or type(length) is not int or min(begin, length) < 0:
                self.corrupt(f"the place of `{printable(str(fqn))}` is not a file, an offset and a length")
            if type(fqn) is not str:
                self.corrupt("a place is given for a name that is not a string")
            key = (fqn, None if offset is None else self.size(offset, fqn))
            span = (self.number(name), begin, length)
            if out.setdefault(key, span) != span:
                self.corrupt(f"two places are said for one part of `{printable(str(fqn))}`")
        return out

    def tensor(self, fqn: str, what: Any, places: Mapping[tuple[str, Size | None], Span]) -> DcpTensor:
        said = self.fields(what, "TensorStorageMetadata")
        shape, chunks = self.size(said.get("size"), fqn), said.get("chunks")
        properties = self.fields(said.get("properties"), "TensorProperties")
        dtype = (properties.get("state") or (properties.get("dtype"),))[0]
        if type(chunks) is not list or type(dtype) is not Global:
            self.corrupt(f"tensor `{printable(fqn)}` has no chunks or no dtype")
        out = []
        for i, chunk in enumerate(chunks):
            chunks[i] = None
            fields = self.fields(chunk, "ChunkStorageMetadata")
            offsets, sizes = self.size(fields.get("offsets"), fqn), self.size(fields.get("sizes"), fqn)
            box = self.boxes.get((offsets, sizes))
            if box is None:
                stop = tuple([a + b for a, b in zip(offsets, sizes, strict=False)])
                box = self.boxes[offsets, sizes] = Box(offsets, stop)
            if len(offsets) != len(sizes) or len(sizes) != len(shape) or not whole(shape).contains(box):
                self.corrupt(
                    f"a chunk of tensor `{printable(fqn)}` {list(shape)} begins at {list(offsets)} and has the size"
                    f" {list(sizes)}, which is not inside"
                )
            span = places.get((fqn, offsets))
            if span is None:
                self.corrupt(f"nothing says where the chunk at {list(offsets)} of tensor `{printable(fqn)}` lies")
            out.append(DcpChunk(box, span))
        return DcpTensor(BY_TORCH.get(dtype.name, dtype.name), shape, out)

    def size(self, value: Any, fqn: str) -> Size:
        if type(value) is not tuple or any(type(n) is not int or n < 0 for n in value):
            self.corrupt(f"a size or an offset of `{printable(fqn)}` is not a tuple of numbers")
        return value

    def path_of(self, value: Any, fqn: str) -> tuple[str | int, ...]:
        if value is None:
            return (fqn,)
        if type(value) is not tuple or not value or any(type(k) not in (str, int) for k in value):
            self.corrupt(f"the path of `{printable(fqn)}` is not a tuple of keys")
        if ".".join(map(str, value)) != fqn:
            self.corrupt(f"the path of `{printable(fqn)}` leads to `{printable('.'.join(map(str, value)))}`")
        return value


def write_metadata(
    tensors: Mapping[str, DcpTensor], objects: Mapping[str, Span], paths: Mapping[str, Any] | None, files: Sequence[str]
) -> bytes:
    """The ``.metadata`` of tensors and of other objects by their names, which torch's own loaders read.

    ``paths`` are the keys that lead to each, or None for a state dict that was flat.
    """

    def values() -> Iterator[tuple[str, Instance | Once]]:
        for fqn, t in tensors.items():
            chunks = [
                Instance(_CLASSES, "ChunkStorageMetadata", {"offsets": _size(c.box.start), "sizes": _size(c.box.shape)})
                for c in t.chunks
            ]
            fields = {"properties": _properties(t.dtype), "size": _size(t.shape), "chunks": chunks}
            yield fqn, Instance(_CLASSES, "TensorStorageMetadata", fields)
        for fqn in objects:
            yield fqn, Once(Instance(_CLASSES, "BytesStorageMetadata", {}))

    def places() -> Iterable[tuple[Instance, Instance | Once]]:
        for fqn, t in tensors.items():
            for i, c in enumerate(t.chunks):
                yield _index(fqn, c.box.start, i), _info(c.span, files)
        for fqn, span in objects.items():
            yield _index(fqn, None, None), Once(_info(span, files))  # equal values may lie in one place

    fields = {
        "state_dict_metadata": Pairs(values),
        "planner_data": paths,
        "storage_data": Pairs(places),
        "storage_meta": None,
        "version": "1.0.0",
    }
    return plain_pickle(Instance(_CLASSES, "Metadata", fields))


def _size(shape: Size) -> PickledCall:
    return PickledCall("torch", "Size", (shape,))


def _properties(dtype: str) -> Stateful:
    layout = PickledCall("torch.serialization", "_get_layout", ("torch.strided",))
    order = PickledCall(_CLASSES, "_MEM_FORMAT_ENCODING", (0,))
    return Stateful(_CLASSES, "TensorProperties", (Global("torch", TORCH_DTYPE[dtype]), layout, False, order, False))


def _index(fqn: str, offset: Size | None, number: int | None) -> Instance:
    at = None if offset is None else _size(offset)
    return Instance(_CLASSES, "MetadataIndex", {"fqn": fqn, "index": number, "offset": at})


def _info(span: Span, files: Sequence[str]) -> Instance:
    fields = {"relative_path": files[span[0]], "offset": span[1], "length": span[2]}
    return Instance(_FILES, "_StorageInfo", fields)
