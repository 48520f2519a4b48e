"""One save of Paddle's flex_checkpoint: a directory of files and the record of which block of which tensor each holds.

    0.metadata       pickled Metadata
      state_dict_metadata   key -> [LocalTensorMetadata(global_offset, local_shape, dtype, global_shape,
                                                        is_flattened, flattened_range)]
      storage_metadata      LocalTensorIndex(tensor_key, global_offset, is_flattened, flattened_range, replica_id,
                                             local_shape) -> file name
      flat_mapping          key -> path in the nested dict that was saved
    3_0.distcp       what rank 3 holds: a pickled dict key -> array; or 3_0.safetensors

The dtype stands only in the first table and the file only in the second; key, offset, flattened range and local shape
join them. A flattened entry holds the elements ``[start, stop)`` of the row-major *local* block, as one axis. numpy
has no bfloat16 and no float8, so a .distcp holds them as uint16 and int8.

Sources: ``paddle/distributed/flex_checkpoint/dcp`` of Paddle 3.3.1 (metadata.py, save_state_dict.py,
sharded_weight.py); ``paddle/distributed/checkpoint/metadata.py`` of Paddle 3.0 and older, whose entries have fewer
fields. Paddle reads whatever is there: a table without its last shard makes a smaller tensor, one without its first
makes zeros, and a second save into a directory keeps the first one's table. All of these are errors here.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from ckpttool.containers.paddle_pickle import read_paddle, read_pickle
from ckpttool.containers.pickle import PickledObject
from ckpttool.containers.pickle_write import Instance, plain_pickle
from ckpttool.containers.safetensors import read_header
from ckpttool.core.catalog import StoredTensor
from ckpttool.core.dtypes import DTYPES, parse
from ckpttool.core.files import DataFile, Place
from ckpttool.core.geometry import Box, from_flat
from ckpttool.core.words import natural
from ckpttool.errors import ConflictError, CorruptError, IncompleteError, UnsupportedError
from ckpttool.storage.place import read_all, read_each, scan

METADATA = re.compile(r"\d+\.metadata")
DATA = re.compile(r"(\d+)_\d+\.(?:distcp|safetensors)")

MODULES = ("paddle.distributed.flex_checkpoint.dcp.metadata", "paddle.distributed.checkpoint.metadata")
"""Modules of Paddle's classes: since August 2025, and before."""

DISGUISE = {"BF16": "U16", "F8_E4M3": "I8", "F8_E5M2": "I8"}
"""Dtypes that numpy lacks -> what a pickled array has instead."""

_HELD = ["BOOL", "U8", "I8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64", "C64", "F8_E4M3", "F8_E5M2"]
PADDLE_DTYPES = {name: DTYPES[name].numpy for name in _HELD}
"""Paddle's tensor dtypes and their names. A uint16 would come back as bfloat16."""

BOXES = "ckpttool"
"""A field of our own in the Metadata: where the blocks of a fused tensor belong in the plain tensor. Paddle sets it
like any other field, and asks for none but its three."""


_SHAPES = 16
"""Most shapes of blocks at one place of a tensor. There is one; without a limit, looking for the right one would take
for ever."""


class Shard(NamedTuple):
    """One entry of the metadata and the file that holds it."""

    key: str
    offset: tuple[int, ...]
    """Start of the block in the tensor."""
    shape: tuple[int, ...]
    """Shape of the block."""
    dtype: str
    """Dtype as safetensors names it; "" when the entry is too old to say."""
    tensor: tuple[int, ...] | None
    """Shape of the whole tensor; None when the entry does not say."""
    run: tuple[int, int] | None
    """The elements of the row-major block that are held, when it is flattened."""
    file: str = ""

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple([a + n for a, n in zip(self.offset, self.shape, strict=True)])

    def __str__(self) -> str:
        block = Box(self.offset, self.stop)
        return f"{block}" + (f" elements {self.run[0]:,} to {self.run[1]:,}" if self.run else "")


class ShardBytes(NamedTuple):
    """A shard and its bytes: boxes of the block, each one run of bytes."""

    shard: Shard
    blocks: tuple[tuple[StoredTensor, Box], ...]


class FlexSave(NamedTuple):
    """The save in one directory."""

    metadata: Place
    tensors: dict[str, list[ShardBytes]]
    """Tensors by key, in the order of the metadata."""
    shapes: dict[str, tuple[int, ...]]
    guessed: bool
    """Some shapes are what the shards span, because the metadata does not say them."""
    boxes: Mapping[str, tuple[tuple[int, ...], list[tuple[Box, Box]]]]
    """Key -> (shape of the plain tensor, (box in the written tensor, box in the plain one)), by ckpttool's field."""


def metadata_names(directory: Place) -> list[str]:
    """The metadata files directly in a directory; [] when there is none or no such directory."""
    return [n for n in _names(directory) if METADATA.fullmatch(n)]


def _names(directory: Place) -> list[str]:
    try:
        return sorted((e.name for e in scan(directory) if e.is_file()), key=natural)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as e:
        raise CorruptError(f"the directory cannot be listed: {e.strerror}", where=str(directory)) from None


def read_save(directories: Sequence[Place], files: list[DataFile]) -> FlexSave:
    """Index a save whose files lie in ``directories`` (one for each node); ``files`` grows by its data files.

    Raises IncompleteError, ConflictError, CorruptError or UnsupportedError: metadata and files must say the same.
    """
    path = _metadata_path(directories)
    shards, boxes = _read_metadata(path)
    wanted: dict[str, dict[str, Shard]] = {}
    for held in shards.values():
        for s in held:
            wanted.setdefault(s.file, {})[s.key] = s
    places = _places(directories, wanted, path)
    by_shard: dict[Shard, ShardBytes] = {}
    names, first = sorted(places, key=natural), len(files)
    several = read_each(_read_data, [places[n] for n in names], range(first, first + len(names)))
    for name, (found, info) in zip(names, several, strict=True):
        expected = wanted.get(name, {})
        extra = [k for k in found if k not in expected]
        if extra:
            raise ConflictError(
                f"the file holds {len(extra)} tensors that the metadata does not place there, such as `{extra[0]}`",
                where=[str(places[name]), str(path)],
                hint="two saves lie in one directory, and Paddle keeps the first one's metadata: save again elsewhere",
            )
        if not expected:
            continue  # Paddle writes a file for every rank, also when others have all that it holds
        files.append(info)
        missing = [k for k in expected if k not in found]
        if missing:
            raise IncompleteError(
                f"the file lacks {len(missing)} of the {len(expected)} tensors that the metadata places there,"
                f" the first is `{missing[0]}`",
                where=[str(places[name]), str(path)],
                hint="the file belongs to another save than the metadata",
            )
        for key, shard in expected.items():
            by_shard[shard] = _held(shard, found[key], info, len(files) - 1, path)
    tensors = {key: [by_shard[s] for s in held] for key, held in shards.items()}
    shapes, guessed = {}, False
    for key, parts in tensors.items():
        shapes[key], sure = _whole(parts, path)
        guessed = guessed or not sure
        _check_parts(key, parts, files)
    return FlexSave(path, tensors, shapes, guessed, boxes)


def _metadata_path(directories: Sequence[Place]) -> Place:
    found = [d / n for d in directories for n in metadata_names(d)]
    if not found:
        raise IncompleteError(
            "there is no 0.metadata, which says what the .distcp files hold",
            where=[str(d) for d in directories],
            hint="the save was interrupted, or the file was left behind: it is written by one rank only",
        )
    names = {p.name for p in found}
    if len(names) > 1:
        raise ConflictError(
            f"{len(names)} saves lie in one directory: {', '.join(sorted(names, key=natural))}",
            where=sorted({str(p.parent) for p in found}),
            hint="move the files of all but one away: those of save 1 are 1.metadata and R_1.distcp",
        )
    # Every node writes the same metadata of all ranks.
    first = _bytes(found[0]) if len(found) > 1 else b""
    for other in found[1:]:
        if _bytes(other) != first:
            raise ConflictError(
                "the metadata of two directories differ: they hold different saves", where=[str(found[0]), str(other)]
            )
    return found[0]


def _bytes(path: Place) -> bytes:
    try:
        return read_all(path)
    except OSError as e:
        raise CorruptError(f"the file cannot be read: {e.strerror}", where=str(path)) from None


def _places(directories: Sequence[Place], wanted: Iterable[str], metadata: Place) -> dict[str, Place]:
    """Places of all data files, also those that no entry names."""
    places: dict[str, Place] = {}
    for directory in directories:
        for name in _names(directory):
            if not DATA.fullmatch(name):
                continue
            if name in places:
                raise ConflictError(
                    f"two directories hold a file {name}",
                    where=[str(places[name]), str(directory / name)],
                    hint="the directories of one save's nodes hold different ranks",
                )
            places[name] = directory / name
    wanted = list(wanted)
    missing = sorted((n for n in wanted if n not in places), key=natural)
    if missing:
        shown = ", ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")
        raise IncompleteError(
            f"{len(missing)} of {len(wanted)} files that the metadata names are missing: {shown}",
            where=[str(metadata), *(str(d) for d in directories)],
            hint="each node without a shared disk keeps those of its own ranks: copy them together, or name the nodes'"
            " directories with --also",
        )
    return places


# -- the metadata


def _read_metadata(
    path: Place,
) -> tuple[dict[str, list[Shard]], dict[str, tuple[tuple[int, ...], list[tuple[Box, Box]]]]]:
    """Shards by key with their files, and ckpttool's own boxes."""
    top = _fields(read_pickle(path), "Metadata", path)
    entries, storage = top.get("state_dict_metadata"), top.get("storage_metadata")
    if not isinstance(entries, dict) or not isinstance(storage, dict):
        raise CorruptError("the metadata has no state_dict_metadata or no storage_metadata", where=str(path))
    known: dict[tuple[Any, ...], list[Shard]] = {}
    for key, held in entries.items():
        if not isinstance(key, str) or not isinstance(held, list):
            raise CorruptError(f"the metadata of `{key}` is not a list of shards", where=str(path))
        for value in held:
            s = _shard(key, _fields(value, "LocalTensorMetadata", path), path)
            same = known.setdefault((key, s.offset, s.run), [])
            if s not in same:
                if len(same) >= _SHAPES:
                    raise CorruptError(f"the metadata has {_SHAPES} shapes of one block of `{key}`", where=str(path))
                same.append(s)
    out: dict[str, list[Shard]] = {k: [] for k in entries}
    used: set[Shard] = set()
    taken: set[tuple[str, str]] = set()
    for value, name in storage.items():
        index = _fields(value, "LocalTensorIndex", path)
        key = index.get("tensor_key")
        offset, run, shape = _ints(index, "global_offset", path), _run(index, path), index.get("local_shape")
        fits = known.get((key, offset, run), [])
        if shape is not None:
            wanted = _ints(index, "local_shape", path)
            fits = [s for s in fits if s.shape == wanted]
        if len(fits) != 1:
            raise CorruptError(
                f"{name} holds the block of `{key}` at {list(offset)}, of which the metadata has"
                + (" no shape and dtype" if not fits else f" {len(fits)} shapes"),
                where=str(path),
            )
        if not isinstance(name, str) or not DATA.fullmatch(name):
            raise CorruptError(f"the metadata names a file {name!r}, which is none of R_N.distcp", where=str(path))
        placed = fits[0]._replace(file=name)
        if (placed.key, name) in taken:
            raise CorruptError(f"the metadata places two blocks of `{key}` in {name}", where=str(path))
        taken.add((placed.key, name))
        out[placed.key].append(placed)
        used.add(fits[0])
    for same in known.values():
        for s in same:
            if s not in used:
                raise IncompleteError(
                    f"the metadata names no file for {s} of `{s.key}`",
                    where=str(path),
                    hint="the save was interrupted, or the file of a rank was lost before the metadata was written",
                )
    empty = next((k for k, held in out.items() if not held), None)
    if empty is not None:
        raise IncompleteError(f"the metadata lists `{empty}` without a shard", where=str(path))
    return out, _own_boxes(top.get(BOXES), path)


def _fields(value: Any, cls: str, path: Place) -> Mapping[str, Any]:
    if not isinstance(value, PickledObject) or value.cls != cls:
        raise CorruptError(f"the file is not the metadata of a flex checkpoint: no {cls}", where=str(path))
    return value.fields


def _shard(key: str, fields: Mapping[str, Any], path: Place) -> Shard:
    offset, shape = _ints(fields, "global_offset", path), _ints(fields, "local_shape", path)
    tensor = _ints(fields, "global_shape", path) if fields.get("global_shape") is not None else None
    run = _run(fields, path)
    s = Shard(key, offset, shape, _dtype(fields.get("dtype"), key, path), tensor, run)
    where = str(path)
    if len(offset) != len(shape) or (tensor is not None and len(tensor) != len(shape)):
        raise CorruptError(f"offset, block and tensor of `{key}` have different numbers of axes", where=where)
    if tensor is not None and any(b > n for b, n in zip(s.stop, tensor, strict=True)):
        raise CorruptError(f"the block {s} lies outside tensor `{key}` {list(tensor)}", where=where)
    if run is not None and not 0 <= run[0] <= run[1] <= prod(shape):
        raise CorruptError(f"the flattened range {run[0]}:{run[1]} lies outside the block {s} of `{key}`", where=where)
    return s


def _dtype(name: Any, key: str, path: Place) -> str:
    if name is None:
        return ""
    if not isinstance(name, str):
        raise CorruptError(f"the dtype of `{key}` is not a name", where=str(path))
    try:
        return parse(name).name
    except UnsupportedError:
        raise UnsupportedError(f"unknown dtype `{name}` of tensor `{key}`", where=str(path)) from None


def _ints(fields: Mapping[str, Any], name: str, path: Place) -> tuple[int, ...]:
    try:
        out = tuple([operator.index(n) for n in fields[name]])
    except (KeyError, TypeError):
        raise CorruptError(f"an entry of the metadata has no valid {name}", where=str(path)) from None
    if any(n < 0 for n in out):
        raise CorruptError(f"an entry of the metadata has a negative {name}: {list(out)}", where=str(path))
    return out


def _run(fields: Mapping[str, Any], path: Place) -> tuple[int, int] | None:
    """The flattened range: a tuple, or a slice in early versions; numpy's integers occur."""
    if not fields.get("is_flattened", False):
        return None
    value = fields.get("flattened_range")
    if isinstance(value, slice):
        value = (value.start, value.stop) if value.step in (None, 1) else None
    try:
        start, stop = value  # type: ignore[misc]  # what it is not is a TypeError
        return operator.index(start), operator.index(stop)
    except (TypeError, ValueError):
        raise CorruptError("a flattened entry of the metadata has no valid flattened_range", where=str(path)) from None


def _own_boxes(value: Any, path: Place) -> dict[str, tuple[tuple[int, ...], list[tuple[Box, Box]]]]:
    if value is None:
        return {}
    out = {}
    try:
        for key, (shape, boxes) in value["boxes"].items():
            out[str(key)] = (tuple(shape), [_pair(*b) for b in boxes])
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CorruptError(f"the field `{BOXES}` of the metadata is not valid", where=str(path)) from None
    return out


def _pair(written: Sequence[int], plain: Sequence[int], extent: Sequence[int]) -> tuple[Box, Box]:
    def box(start: Sequence[int]) -> Box:
        return Box(tuple(start), tuple([a + n for a, n in zip(start, extent, strict=True)]))

    return box(written), box(plain)


# -- the files


class _FlexArray(NamedTuple):
    """A tensor as its file has it."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    fortran: bool = False
    pickled: bool = False
    """numpy has no name for some dtypes, safetensors has for all."""


def _read_data(path: Place, file: int) -> tuple[dict[str, _FlexArray], DataFile]:
    if path.suffix == ".safetensors":
        head = read_header(path, file)
        return {t.name: _FlexArray(t.dtype, t.shape, t.offset) for t in head.tensors}, head.file
    data = read_paddle(path)
    cut = next(iter(data.chunks), None)
    if cut is not None:
        raise UnsupportedError(
            f"tensor `{cut}` is saved in {len(data.chunks[cut])} parts",
            where=str(path),
            hint="paddle.save cuts large tensors for pickle protocols 2 and 3; save it with protocol 4",
        )
    # Protocol 2: the elements of every array that has any are decoded from its texts.
    held = next((a.file for a in data.tensors.values() if a.file.encoding), data.info)
    found = {k: _FlexArray(a.dtype, tuple(a.shape), a.offset, a.fortran, pickled=True) for k, a in data.tensors.items()}
    return found, held


def _held(shard: Shard, array: _FlexArray, info: DataFile, file: int, metadata: Place) -> ShardBytes:
    """The bytes of a shard. Raises ConflictError when its file has another shape or dtype than the metadata."""
    where = [str(info.place), str(metadata)]
    want = shard.shape if shard.run is None else (shard.run[1] - shard.run[0],)
    if array.shape != want:
        raise ConflictError(
            f"tensor `{shard.key}` is {list(array.shape)} in its file and {list(want)} in the metadata",
            where=where,
            hint="two saves went into one directory, and Paddle keeps the first one's metadata: save again elsewhere",
        )
    # Where only the file says it: Paddle itself has no uint16.
    dtype = shard.dtype or ("BF16" if array.pickled and array.dtype == "U16" else array.dtype)
    if array.dtype != (DISGUISE.get(dtype, dtype) if array.pickled else dtype):
        raise ConflictError(
            f"tensor `{shard.key}` is {array.dtype} in its file and {dtype} in the metadata", where=where
        )
    rank = int(shard.file.partition("_")[0])
    stored = StoredTensor(shard.key, dtype, array.shape, file, array.offset, rank)
    if shard.run is None:
        strides = None
        if array.fortran and len(array.shape) > 1:
            strides = tuple([prod(array.shape[:i]) for i in range(len(array.shape))])
        return ShardBytes(shard, ((stored._replace(strides=strides), Box((0,) * len(shard.shape), shard.shape)),))
    blocks = []
    item = stored.nbytes // max(1, prod(array.shape))
    at = array.offset
    for box in from_flat(*shard.run, shard.shape):
        blocks.append((stored._replace(shape=box.shape, offset=at), box))
        at += box.volume * item
    return ShardBytes(shard, tuple(blocks))


def _whole(held: Sequence[ShardBytes], path: Place) -> tuple[tuple[int, ...], bool]:
    """Shape of the tensor, and whether the metadata says it."""
    said = {h.shard.tensor: h.shard for h in held if h.shard.tensor is not None}
    if len(said) > 1:
        (a, x), (b, y) = list(said.items())[:2]
        raise ConflictError(
            f"tensor `{x.key}` is {list(a)} by {x.file} and {list(b)} by {y.file}",
            where=str(path),
            hint="files of different saves were put together",
        )
    if said:
        return next(iter(said)), True
    if len({len(h.shard.shape) for h in held}) > 1:
        raise ConflictError(
            f"the shards of tensor `{held[0].shard.key}` have different numbers of axes", where=str(path)
        )
    return tuple([max(stops) for stops in zip(*(h.shard.stop for h in held), strict=True)]), False


def _check_parts(key: str, held: Sequence[ShardBytes], files: Sequence[DataFile]) -> None:
    """One dtype, and flattened copies of a block cut alike."""
    runs: dict[tuple[tuple[int, ...], tuple[int, ...]], list[ShardBytes]] = {}
    first: tuple[str, int] | None = None
    for h in held:
        if h.shard.run is not None:
            runs.setdefault((h.shard.offset, h.shard.shape), []).append(h)
        for stored, _ in h.blocks[:1]:
            if first is None:
                first = (stored.dtype, stored.file)
            elif first[0] != stored.dtype:
                raise ConflictError(
                    f"tensor `{key}` is {first[0]} in one file and {stored.dtype} in another",
                    where=[str(files[first[1]].place), str(files[stored.file].place)],
                    hint="files of different saves were put together",
                )
    for same in runs.values():
        for a, b in pairwise(sorted(same, key=lambda h: h.shard.run or (0, 0))):
            if a.shard.run and b.shard.run and a.shard.run != b.shard.run and b.shard.run[0] < a.shard.run[1]:
                raise ConflictError(
                    f"two shards of `{key}` overlap without being equal: {a.shard} in {a.shard.file}"
                    f" and {b.shard} in {b.shard.file}",
                    where=[str(files[h.blocks[0][0].file].place) for h in (a, b) if h.blocks],
                    hint="replicas of flattened tensors must be cut at the same elements",
                )


# -- writing


class _LocalTensorIndex(Instance):
    """A key of storage_metadata; there are as many as shards, so they must not all have one hash."""

    def __hash__(self) -> int:
        return hash(tuple(self.fields.values()))


def metadata_pickle(shards: Sequence[Shard], boxes: Mapping[str, Any]) -> bytes:
    """N.metadata as Paddle's writer makes it; shards in the order of ranks. ``boxes`` go into ckpttool's field."""
    entries: dict[str, list[Instance]] = {}
    storage: dict[Instance, str] = {}
    for s in shards:
        flat = s.run is not None
        entry = {
            "global_offset": s.offset,
            "local_shape": s.shape,
            "dtype": PADDLE_DTYPES[s.dtype],
            "global_shape": s.tensor,
            "is_flattened": flat,
            "flattened_range": s.run,
        }
        entries.setdefault(s.key, []).append(Instance(MODULES[0], "LocalTensorMetadata", entry))
        index = {
            "tensor_key": s.key,
            "global_offset": s.offset,
            "is_flattened": flat,
            "flattened_range": s.run,
            "replica_id": None,
            "local_shape": s.shape,
        }
        storage[_LocalTensorIndex(MODULES[0], "LocalTensorIndex", index)] = s.file
    fields: dict[str, Any] = {
        "state_dict_metadata": entries,
        "storage_metadata": storage,
        "flat_mapping": {k: (k,) for k in entries},
    }
    if boxes:
        fields[BOXES] = {"boxes": dict(boxes)}
    return plain_pickle(Instance(MODULES[0], "Metadata", fields))
