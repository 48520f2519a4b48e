"""Other ways to read the same files: short, slow and separate from ckpttool, to say what a damaged file really holds.

safetensors by its own library, pickles by CPython's unpickler in pure Python with a list of allowed names, flex
checkpoints and parameter files from their description. Each raises (anything) for what it cannot read.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors

from ckpttool.checkpoint import Checkpoint
from ckpttool.storage.place import local_path
from tests.fuzz.damage import fields, records

Bits = tuple[tuple[int, ...], bytes]
"""Shape and elements of a tensor."""


def bits(array: np.ndarray[Any, Any]) -> Bits:
    """What counts of an array when dtypes are only views."""
    return array.shape, array.tobytes()


# -- safetensors


class Entry(NamedTuple):
    """A tensor of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def library(data: bytes) -> dict[str, Entry]:
    """The tensors of a file by the safetensors library."""
    found = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    return {n: Entry(t["dtype"], tuple(t["shape"]), bytes(t["data"])) for n, t in found}


def whole(folder: Path) -> dict[str, Bits]:
    """The tensors of all safetensors files of a folder; of a name that occurs twice, the one that the index means."""
    index = folder / "model.safetensors.index.json"
    said = json.loads(index.read_bytes())["weight_map"] if index.exists() else {}
    out: dict[str, Bits] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, t in library(path.read_bytes()).items():
            if name in out and name not in said:
                raise ValueError(name)
            if name not in out or said[name] == path.name:
                out[name] = t.shape, t.data
    return out


class _Part(NamedTuple):
    """A box of a stored tensor that is a box of a logical one."""

    file: str
    name: str
    delta: int
    """Bytes from the beginning of the named tensor."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    local: tuple[slice, ...]
    box: tuple[slice, ...]


class Placement:
    """How an undamaged checkpoint of safetensors files is put together: which box of which named tensor goes where.

    A damaged checkpoint that is put together the same way gives the same tensors from what the library reads.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        root = local_path(checkpoint.path)
        files = checkpoint.catalog.files
        self.known = {f.place.name: self._entries(local_path(f.place)) for f in files}
        spans = {f.place.name: self._spans(local_path(f.place)) for f in files}
        self.tensors: dict[str, tuple[tuple[int, ...], int, list[_Part]]] = {}
        self.root = root
        for key, logical in checkpoint.catalog.tensors.items():
            parts = []
            for p in logical.pieces:
                if p.stored.dtype != logical.dtype and {p.stored.dtype, logical.dtype} != {"U16", "BF16"}:
                    break  # rounded on reading: only compared with the undamaged checkpoint
                file = files[p.stored.file].place.name
                held = [(n, p.stored.offset - a) for n, (a, b) in spans[file].items() if a <= p.stored.offset < b]
                strides = p.stored.strides or tuple(
                    int(np.prod(p.stored.shape[i + 1 :])) for i in range(len(p.stored.shape))
                )
                local = tuple(slice(a, b) for a, b in zip(p.stored_box.start, p.stored_box.stop, strict=True))
                box = tuple(slice(a, b) for a, b in zip(p.logical_box.start, p.logical_box.stop, strict=True))
                parts.append(_Part(file, *held[0], p.stored.shape, strides, local, box))
            else:
                size = p.stored.nbytes // max(1, int(np.prod(p.stored.shape))) if logical.pieces else 0
                self.tensors[str(key)] = logical.shape, size, parts

    @staticmethod
    def _entries(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {n: (t.dtype, t.shape) for n, t in library(path.read_bytes()).items()}

    @staticmethod
    def _spans(path: Path) -> dict[str, tuple[int, int]]:
        data = path.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        return {
            n: (8 + size + t["data_offsets"][0], 8 + size + t["data_offsets"][1])
            for n, t in header.items()
            if n != "__metadata__"
        }

    def __call__(self, folder: Path) -> dict[str, Bits]:
        found = {name: library((folder / name).read_bytes()) for name in self.known}
        for name, entries in found.items():
            if {n: (t.dtype, t.shape) for n, t in entries.items()} != self.known[name]:
                raise ValueError(f"{name} has other tensors")
        out: dict[str, Bits] = {}
        for key, (shape, size, parts) in self.tensors.items():
            if not size:
                continue
            kind = f"V{size}"
            whole_ = np.zeros(shape, kind)
            for p in parts:
                flat = np.frombuffer(found[p.file][p.name].data, kind, offset=p.delta)
                view = np.lib.stride_tricks.as_strided(flat, p.shape, tuple(s * size for s in p.strides))
                whole_[p.box] = view[p.local]
            out[key] = bits(whole_)
        return out


# -- pickles


class Held:
    """An instance of one of Paddle's classes."""

    def __init__(self, *_: Any) -> None:
        self.fields: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.fields = dict(state)


def _evaluate(text: str, names: dict[str, Any]) -> Any:
    if text != "data":
        raise pickle.UnpicklingError(text)
    return names["data"]


def _dtype(code: str, *rest: Any) -> np.dtype[Any]:
    if str(code)[:1] not in "biufc" or len(code) > 3:
        raise pickle.UnpicklingError(code)
    return np.dtype(code, *rest)


def _empty(cls: Any, *_: Any) -> np.ndarray[Any, Any]:
    if cls is not np.ndarray:
        raise pickle.UnpicklingError(str(cls))
    return np.ndarray((0,), "i1")


def _encode(text: str, name: str) -> bytes:
    if name != "latin1":
        raise pickle.UnpicklingError(name)
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _encode,
    ("collections", "OrderedDict"): OrderedDict,
    **{(f"numpy.{c}.multiarray", "_reconstruct"): _empty for c in ("core", "_core")},
    **{(f"numpy.{c}.multiarray", "scalar"): lambda d, b: np.frombuffer(b, d)[0] for c in ("core", "_core")},
    **{(b, "tuple"): tuple for b in ("builtins", "__builtin__")},
    **{(b, "slice"): slice for b in ("builtins", "__builtin__")},
    **{(b, "bytes"): bytes for b in ("builtins", "__builtin__")},
    **{(b, "eval"): _evaluate for b in ("builtins", "__builtin__")},
}


class _Unpickler(pickle._Unpickler):
    """The one in pure Python: the one in C makes a memo of as many entries as an index says."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module.startswith("paddle.distributed."):
            return type(name, (Held,), {})
        raise pickle.UnpicklingError(f"{module}.{name}")


def unpickled(data: bytes) -> Any:
    """What CPython makes of a pickle, with stand-ins for Paddle's classes. Raises for other names."""
    return _Unpickler(io.BytesIO(data)).load()


def arrays(value: Any, name: str = "") -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a saved dict by name; those of Paddle's inner dicts by ``outer/inner``."""
    if isinstance(value, np.ndarray):
        return {name: value}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], np.ndarray):
        return {name: value[1]}
    out: dict[str, np.ndarray[Any, Any]] = {}
    if isinstance(value, Mapping):
        for k, v in value.items():
            out |= arrays(v, f"{name}/{k}" if name else str(k))
    return out


def skeleton(value: Any) -> Any:
    """What a pickle holds, with dtype and shape for each array."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape
    if isinstance(value, Mapping):
        return {k: skeleton(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [skeleton(v) for v in value]
    return skeleton(value.fields) if isinstance(value, Held) else value


def pickled(folder: Path) -> dict[str, Bits]:
    """The arrays of the one .pdparams of a folder."""
    (path,) = folder.glob("*.pdparams")
    return {n: bits(a) for n, a in arrays(unpickled(path.read_bytes())).items()}


# -- flex checkpoints


def flex(folder: Path) -> dict[str, Bits]:
    """Tensors put together by the metadata: each block where it says, holes as zeros."""
    top = unpickled((folder / "0.metadata").read_bytes()).fields
    data = {p.name: arrays(unpickled(p.read_bytes())) for p in folder.glob("*.distcp")}
    entries: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for key, held in top["state_dict_metadata"].items():
        for shard in held:
            f = shard.fields
            run = f.get("flattened_range") if f.get("is_flattened") else None
            run = (run.start, run.stop) if isinstance(run, slice) else run
            entries[key, tuple(f["global_offset"]), run and tuple(run)] = f
            stop = tuple(a + n for a, n in zip(f["global_offset"], f["local_shape"], strict=True))
            known = f.get("global_shape")
            shapes[key] = tuple(known) if known else tuple(map(max, zip(shapes.get(key, stop), stop, strict=True)))
    out: dict[str, np.ndarray[Any, Any]] = {}
    for index, name in top["storage_metadata"].items():
        f = index.fields
        run = f.get("flattened_range") if f.get("is_flattened") else None
        run = (run.start, run.stop) if isinstance(run, slice) else run
        key, offset = f["tensor_key"], tuple(f["global_offset"])
        entry = entries[key, offset, run and tuple(run)]
        local = data[name][key]
        tensor = out.setdefault(key, np.zeros(shapes[key], local.dtype))
        box = tuple(slice(a, a + n) for a, n in zip(offset, entry["local_shape"], strict=True))
        if run:
            block = tensor[box].copy().ravel()
            block[run[0] : run[1]] = local
            tensor[box] = block.reshape(tuple(entry["local_shape"]))
        else:
            tensor[box] = local.reshape(tuple(entry["local_shape"]))
    return {k: bits(a) for k, a in out.items()}


# -- parameter files of programs


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A varint and where it ends."""
    n = shift = 0
    while True:
        byte = data[at]
        n |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return n, at


def parameters(data: bytes) -> list[Bits]:
    """The records of a parameter file, in order. Shapes are those of the descriptions."""
    out = []
    for start, body, stop in records(data):
        shape: list[int] = []
        description = data[start + 20 : body]
        for number, kind, _, value, end in fields(description) or []:
            at = value
            while number == 2 and at < end:
                n, at = _number(description, at)
                shape.append(n)
                if kind == 0:
                    break
        if stop > len(data):
            raise ValueError("cut off")
        out.append((tuple(shape), data[body:stop]))
    return out


def _pir_names(data: bytes) -> list[str]:
    """Names of the parameters of a program in JSON."""

    tree = json.loads(data)
    ops = [op for region in tree["program"]["regions"] for block in region["blocks"] for op in block["ops"]]
    return [op["A"][3] for op in ops if op["#"] == "p"]


def _legacy_names(data: bytes) -> list[str]:
    """Names of the persistable variables of a program in protobuf, without those that feed and fetch."""
    out = []
    for number, _, _, value, stop in fields(data) or []:
        block = data[value:stop]
        for inner, _, _, a, b in (fields(block) or []) if number == 1 else []:
            if inner != 3:
                continue
            variable = block[a:b]
            held = {n: variable[v:s] for n, _, _, v, s in fields(variable) or []}
            kind = {n: held[2][v:s] for n, _, _, v, s in fields(held[2]) or []}[1]
            if held.get(3) == b"\x01" and kind[0] not in (9, 10, 17):
                out.append(held[1].decode())
    return out


def program(folder: Path) -> dict[str, Bits]:
    """The parameters of a program: the records are in the order of the names."""
    (params,) = folder.glob("*.pdiparams")
    (path,) = [p for p in folder.iterdir() if p.suffix in (".json", ".pdmodel")]
    names = (_pir_names if path.suffix == ".json" else _legacy_names)(path.read_bytes())
    return dict(zip(sorted(names), parameters(params.read_bytes()), strict=True))
