"""Other ways to read the checkpoints of torch's world: zipfile, CPython's unpickler with stand-ins, and numpy.

Short, slow, whole tensors in memory, and written from the formats' descriptions, to say what damaged files really hold.
Each raises (anything) for what it cannot read. Nothing of a pickle runs: every class is a ``Thing``.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.fuzz.naive import Bits, bits, library

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "UntypedStorage": "uint8",
}
_SIZES = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
}
_MOST = 1 << 24
"""Elements; damaged files say that they have more."""

Answers = dict[str, Bits]
Array = np.ndarray[Any, Any]


class Held(NamedTuple):
    """A tensor: its elements are bytes of a size."""

    dtype: str
    array: Array

    @property
    def answer(self) -> Bits:
        return bits(self.array)


class Thing:
    """Stands for an instance of any class, and for what any function returns: keeps its arguments and its state."""

    kind = ""

    def __new__(cls, *args: Any, **_: Any) -> Any:
        it = object.__new__(cls)
        it.args, it.said = args, {}  # type: ignore[attr-defined]
        return it

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            self.said.update(part if isinstance(part, dict) else {"state": state})  # type: ignore[attr-defined]

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None: ...


def _thing(module: str, name: str) -> type:
    return type("It", (Thing,), {"kind": f"{module}.{name}", "dtype": name if module.startswith("torch") else ""})


class _Unpickler(pickle._Unpickler):
    def __init__(self, data: bytes, storage: Callable[[str, str, int], bytes]) -> None:
        self.file = io.BytesIO(data)
        super().__init__(self.file, encoding="utf-8")
        self.storage = storage

    def find_class(self, module: str, name: str) -> Any:
        known: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("collections", "defaultdict"): lambda *_: {},
            ("torch", "Size"): tuple,
            ("torch._utils", "_rebuild_tensor"): _view,
            ("torch._utils", "_rebuild_tensor_v2"): _view,
            ("torch._utils", "_rebuild_tensor_v3"): lambda s, o, n, st, _g, _h, dtype, *_: _view(
                (s[0], dtype.dtype), o, n, st
            ),
            ("torch._utils", "_rebuild_parameter"): lambda t, *_: t,
            ("torch._tensor", "_rebuild_from_type_v2"): _of_type,
            **{(b, "getattr"): lambda of, name: _thing(of.kind, name) for b in ("builtins", "__builtin__")},
            **{(b, n): getattr(__import__("builtins"), n) for b in ("builtins", "__builtin__") for n in _BUILTINS},
        }
        return known.get((module, name)) or _thing(module, name)

    def persistent_load(self, pid: Any) -> Any:
        what, kind, key, _, n = pid[:5]
        if what != "storage" or not isinstance(key, str):
            raise pickle.UnpicklingError(what)
        dtype = _STORAGES[kind.dtype]
        data = self.storage(key, dtype, n)
        if n * _SIZES[dtype] > len(data):
            raise ValueError("the storage is too short")
        return data, dtype


_BUILTINS = ("set", "list", "dict", "tuple", "int", "float", "bytes", "bytearray", "complex", "slice", "range")


def _view(storage: tuple[bytes, str], offset: int, shape: Sequence[int], strides: Sequence[int], *_: Any) -> Held:
    data, dtype = storage
    size = _SIZES[dtype]
    if min((offset, *shape, *strides)) < 0 or math.prod(shape) > _MOST:
        raise ValueError("a view that cannot be")
    if not math.prod(shape):
        return Held(dtype, np.zeros(shape, f"V{size}"))
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if (last + 1) * size > len(data):
        raise ValueError("a view leaves its storage")
    return Held(dtype, np.ndarray(shape, f"V{size}", data, offset * size, [s * size for s in strides]))


def _of_type(call: Any, kind: Any, args: Any, state: Any) -> Any:
    if kind.kind in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        return call(*args)
    return Thing(call, kind, args, state)


def load(data: bytes) -> Any:
    """The object in a file of torch.save; its tensors are ``Held``."""
    return _load_zip(data) if data[:2] == b"PK" else _load_old(data)


def _load_zip(data: bytes) -> Any:
    archive = zipfile.ZipFile(io.BytesIO(data))
    (name,) = [n for n in archive.namelist() if n.endswith("/data.pkl") and n.count("/") == 1]
    top = name.removesuffix("data.pkl")

    def storage(key: str, _dtype: str, _n: int) -> bytes:
        with archive.open(f"{top}data/{key}") as f:
            f._expected_crc = None  # type: ignore[attr-defined]  # no loader looks at those of tensors
            return f.read()

    return _Unpickler(archive.read(name), storage).load()


def _load_old(data: bytes) -> Any:
    def none(*_: Any) -> bytes:
        raise ValueError

    at = 0
    for want in (0x1950A86A20F9469CFC6C, 1001, None):
        reader = _Unpickler(data[at:], none)
        if reader.load() != want and want is not None:
            raise ValueError("not a file of torch.save")
        at += reader.file.tell()
    sizes: dict[str, str] = {}

    def seen(key: str, dtype: str, n: int) -> bytes:
        sizes[key] = dtype
        return bytes(min(n, _MOST) * _SIZES[dtype])

    reader = _Unpickler(data[at:], seen)
    reader.load()
    begin, at = at, at + reader.file.tell()
    reader = _Unpickler(data[at:], none)
    keys = reader.load()
    at += reader.file.tell()
    parts = {}
    for key in keys:
        (n,) = struct.unpack_from("<q", data, at)
        parts[key] = data[at + 8 : at + 8 + n * _SIZES[sizes[key]]]
        at += 8 + n * _SIZES[sizes[key]]
    return _Unpickler(data[begin:], lambda key, *_: parts[key]).load()


def tensors(value: Any, prefix: str = "") -> Iterator[tuple[str, Held]]:
    """The tensors of nested dicts and lists, by dotted names."""
    for k, v in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(v, Held):
            yield f"{prefix}{k}", v
        elif isinstance(v, dict | list | tuple):
            yield from tensors(v, f"{prefix}{k}.")


def _number(value: Any) -> Bits:
    """A step, in whatever form it is."""
    if isinstance(value, Held):
        return (), value.array.tobytes()
    return (), struct.pack("<f", value)


def state_dict(value: Any) -> Answers:
    """A model alone."""
    return {n: t.answer for n, t in tensors(value)}


def one_file(folder: Path) -> Answers:
    """Files of torch.save that hold a model, together: a name is in the file that an index says, or in one."""
    out: Answers = {}
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth")):
        out |= state_dict(load(path.read_bytes()))
    return out


def trained(model: str, optimizer: str) -> Callable[[Path], Answers]:
    """A model and its optimizer, whose parameters have names, or numbers in the order of the model."""

    def read(folder: Path) -> Answers:
        weights = load((folder / model).read_bytes())
        state = load((folder / optimizer).read_bytes())
        out = state_dict(weights)
        names: dict[Any, str] = {}
        for group in state["param_groups"]:
            names |= dict(zip(group["params"], group["param_names"], strict=True))
        return out | _states({names[n]: s for n, s in state["state"].items()})

    return read


def _states(states: Mapping[str, Mapping[str, Any]]) -> Answers:
    out: Answers = {}
    for name, state in states.items():
        for what, v in state.items():
            if v is not None:
                out[f"optimizer/{name}/{what}"] = _number(v) if what == "step" else v.answer
    return out


# -- boxes


class _Whole:
    """Tensors that are put together of boxes; where nothing was put, they have zeros."""

    def __init__(self) -> None:
        self.held: dict[str, Array] = {}

    def put(self, key: str, shape: Sequence[int], box: Any, part: Array) -> None:
        if math.prod(shape) > _MOST:
            raise ValueError("too large")
        whole = self.held.setdefault(key, np.zeros(shape, part.dtype))
        if whole.shape != tuple(shape) or whole.dtype != part.dtype:
            raise ValueError("two shapes")
        whole[box] = part

    @property
    def answers(self) -> Answers:
        return {k: bits(a) for k, a in self.held.items()}


def _box(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))


def _metadata(folder: Path) -> Any:
    return _Unpickler((folder / ".metadata").read_bytes(), lambda *_: b"").load()


def _kept(tensor: Any) -> tuple[Any, Any]:
    """Properties of a tensor: its dtype and all that the metadata says."""
    state = tensor.said["properties"].said
    return (state.get("state") or (state.get("dtype"),))[0].dtype, tensor.said


def dcp(prefix: str = "") -> Callable[[Path], Answers]:
    """A save of torch.distributed.checkpoint; ``prefix`` is that of the model's names."""

    def read(folder: Path) -> Answers:
        top, whole = _metadata(folder).said, _Whole()
        places = {}
        for index, info in top["storage_data"].items():
            offset = index.said.get("offset")
            places[index.said["fqn"], None if offset is None else tuple(offset)] = info.said
        numbers: Answers = {}
        for fqn, what in top["state_dict_metadata"].items():
            path = (top.get("planner_data") or {}).get(fqn, (fqn,))
            key = _key(".".join(map(str, path)) if len(path) > 1 else fqn, prefix)
            if what.kind.endswith("BytesStorageMetadata"):
                place = places[fqn, None]
                value = load(_slice(folder, place))
                if key.endswith("/step"):
                    numbers[key] = _number(value)
                continue
            dtype, said = _kept(what)
            for chunk in said["chunks"]:
                offset, shape = chunk.said["offsets"], chunk.said["sizes"]
                part = Held(dtype, np.zeros(shape, f"V{_SIZES[dtype]}"))
                if math.prod(shape):
                    part = load(_slice(folder, places[fqn, tuple(offset)]))
                if part.array.shape != tuple(shape) or part.dtype != dtype:
                    raise ValueError("a chunk of another shape or dtype")
                whole.put(key, said["size"], _box(offset, shape), part.array)
        return whole.answers | numbers

    return read


_SPELLED = (
    ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
)
_OF_STATE = re.compile(r"optimizer/(\w+?)\.(.+)/(\w+)")
"""What ``dcp`` makes of a state: the parameter's name ends behind the slash."""
_ROWS = ("embedding.word_embeddings.weight", "output_layer.weight")


def megatron_dist(rows: int, step: float) -> Callable[[Path], Answers]:
    """A save of Megatron Core's of a Llama with ``rows`` tokens, whose optimizer has the shapes of its model and took
    ``step`` steps; common.pt is not looked at.
    """
    plain = dcp()

    def read(folder: Path) -> Answers:
        out: Answers = {}
        for fqn, (shape, data) in plain(folder).items():
            component, state, key = "", "", fqn
            if m := _OF_STATE.fullmatch(fqn):
                state, key = m[1], f"{m[2]}.{m[3]}"
                component = "master_weights/" if state == "param" else "optimizer/"
                state = "" if state == "param" else f"/{state}"
            for said, meant in _SPELLED:
                key = key.replace(said, meant)
            own = {key: (shape, data)}
            if key.startswith("decoder.layers."):
                each = len(data) // shape[0] if shape[0] else 0
                rest = key.removeprefix("decoder.layers.")
                own = {
                    f"decoder.layers.{i}.{rest}": (tuple(shape[1:]), data[i * each : (i + 1) * each])
                    for i in range(shape[0])
                }
            elif key in _ROWS:
                own = {key: ((rows, *shape[1:]), data[: len(data) // shape[0] * rows])}
            for name, answer in own.items():
                out[f"{component}{name}{state}"] = answer
                if component == "optimizer/":
                    out[f"optimizer/{name}/step"] = bits(np.array(step, "<f4"))
        return out

    return read


def megatron(rows: int) -> Callable[[Path], Answers]:
    """The only rank of a save of Megatron-LM's of a Llama with ``rows`` tokens, without its optimizer."""

    def read(folder: Path) -> Answers:
        (path,) = folder.glob("*/mp_rank_00/model_optim_rng.pt")
        out = state_dict(load(path.read_bytes())["model"])
        return {k: ((rows, *s[1:]), d[: len(d) // s[0] * rows]) if k in _ROWS else (s, d) for k, (s, d) in out.items()}

    return read


def _slice(folder: Path, place: Mapping[str, Any]) -> bytes:
    name, begin, length = place["relative_path"], place["offset"], place["length"]
    data = (folder / name).read_bytes()[begin : begin + length]
    if "/" in name or begin < 0 or len(data) != length:
        raise ValueError("cut off")
    return bytes(data)


def _key(fqn: str, prefix: str) -> str:
    if m := re.fullmatch(r"optimizer\.state\.(.+)\.(\w+)", fqn):
        return f"optimizer/{m[1]}/{m[2]}"
    if fqn.startswith("master_weights."):
        return fqn.replace(".", "/", 1)
    return fqn.removeprefix(prefix)


def bytecheckpoint(folder: Path) -> Answers:
    """A save of ByteCheckpoint whose optimizer has names, or numbers in the order of the model."""
    whole = _Whole()
    names: list[str] = []
    for part in ("model", "optimizer"):
        top = _metadata(folder / part).said
        places, forms = {}, {}
        for index, info in top["storage_data"].items():
            offset = index.said.get("offset")
            places[index.said["fqn"], None if offset is None else tuple(offset)] = info.said
        for index, data in top["all_tensor_metadata"].items():
            forms[index.said["fqn"], tuple(index.said.get("offset") or ())] = data
        names = names or [*top["planner_data"]]
        for fqn, what in top["state_dict_metadata"].items():
            if what.kind.endswith("BytesStorageMetadata"):
                continue
            dtype, said = _kept(what)
            m = re.fullmatch(r"state\.(.+)\.(\w+)", fqn)
            if m and part == "optimizer":
                fqn_of = names[int(m[1])] if m[1].isdecimal() else m[1]
                key = f"optimizer/{fqn_of}/{m[2]}"
            else:
                key = fqn
            for chunk in said["chunks"]:
                offset, shape = tuple(chunk.said["offsets"]), tuple(chunk.said["sizes"])
                data = _slice(folder / part, places[fqn, offset]) if math.prod(shape) else b""
                form = _Unpickler(forms[fqn, offset], lambda _k, _d, _n, data=data: data).load()  # type: ignore[misc]
                if form.dtype != dtype or form.array.shape != shape or len(data) != math.prod(shape) * _SIZES[dtype]:
                    raise ValueError("a chunk of another shape or dtype")
                whole.put(key, said["size"], _box(offset, shape), form.array)
    return whole.answers


def sharded_safetensors(folder: Path) -> Answers:
    """What torch's HuggingFaceStorageWriter saves of each rank."""
    import json

    parts: dict[str, list[tuple[tuple[int, ...], Any]]] = {}
    for path in sorted(folder.glob("shard-*.safetensors")):
        data = path.read_bytes()
        (n,) = struct.unpack("<Q", data[:8])
        said = json.loads(json.loads(data[8 : 8 + n])["__metadata__"].get("DCP_SHARDING_INFO", "{}"))
        for name, t in library(data).items():
            at = said.get(name, {"saved_offsets": [0] * len(t.shape)})["saved_offsets"]
            size = len(t.data) // max(1, math.prod(t.shape))
            parts.setdefault(name, []).append((tuple(at), np.frombuffer(t.data, f"V{size}").reshape(t.shape)))
    whole = _Whole()
    for name, held in parts.items():
        ends = [tuple(a + n for a, n in zip(at, array.shape, strict=True)) for at, array in held]
        for at, array in held:
            whole.put(name, tuple(map(max, zip(*ends, strict=True))), _box(at, array.shape), array)
    return whole.answers


# -- a file for each rank


def fsdp(folder: Path) -> Answers:
    """DTensors of FSDP2, with tensor parallelism or not, and ShardedTensors; an optimizer of numbers or names."""
    whole = _Whole()
    model = [load(p.read_bytes()) for p in sorted(folder.glob("model_world_size_*.pt"))]
    optim = [load(p.read_bytes()) for p in sorted(folder.glob("optim_world_size_*.pt"))]
    names = [n for n, v in model[0].items() if isinstance(v, Thing)]  # buffers are plain tensors here
    for state in model:
        for name, value in state.items():
            _part(whole, name, value)
    for state in optim:
        numbers = [n for g in state["param_groups"] for n in g["params"]]
        said = [n for g in state["param_groups"] for n in g.get("param_names", ())]
        known = dict(zip(numbers, said or names, strict=True)) if isinstance(numbers[0], int) else {}
        for n, values in state["state"].items():
            for what, value in values.items():
                _part(whole, f"optimizer/{known.get(n, n)}/{what}", value)
    return whole.answers


def _part(whole: _Whole, key: str, value: Any) -> None:
    """Put what one rank has of a tensor where it belongs."""
    if isinstance(value, Held):
        whole.put(key, value.array.shape, ..., value.array)
        return
    if not isinstance(value, Thing):
        if key.endswith("/step"):
            whole.put(key, (), ..., np.frombuffer(_number(value)[1], "V4").reshape(()))
        return
    _, kind, (_, _, shape, *_), state = value.args  # type: ignore[attr-defined]
    if kind.kind.endswith("ShardedTensor"):
        for shard in state[0]:
            at = shard.said["metadata"].said
            whole.put(key, shape, _box(at["shard_offsets"], at["shard_sizes"]), shard.said["tensor"].array)
        return
    (fields,) = [s for s in state if s]
    local, spec = fields["_local_tensor"], fields["_spec"].said
    mesh = spec["mesh"].said
    sizes = mesh["_layout"].said
    sizes = [_flat(a.said["shape"]) for a in sizes["axes"]] if "axes" in sizes else list(sizes["shape"])
    if math.prod(shape) > _MOST:
        raise ValueError("too large")
    where = np.arange(math.prod(shape)).reshape(shape)
    # What cuts an axis in the plain way comes first: a strided one cuts what these have left.
    steps = sorted(enumerate(spec["placements"]), key=lambda p: "Strided" in p[1].kind)
    for axis, placement in steps:
        if "Shard" in placement.kind:
            dim = placement.said["dim"] if "dim" in placement.said else placement.args[0]
            rows = -(-where.shape[dim] // sizes[axis])
            at = mesh["_coordinate_on_dim"][axis] * rows
            where = np.take(where, range(min(at, where.shape[dim]), min(at + rows, where.shape[dim])), dim)
    if local.array.shape != where.shape:
        raise ValueError("a rank has another shape")
    whole.put(key, shape, np.unravel_index(where, shape) if len(shape) else ..., local.array)


def _flat(shape: Any) -> int:
    return math.prod(map(_flat, shape)) if isinstance(shape, tuple) else shape


# -- DeepSpeed


def _rounded(master: Held, dtype: str) -> Held:
    """float32 numbers in another dtype, to the nearest even one."""
    if dtype == master.dtype:
        return master
    if (master.dtype, dtype) != ("float32", "bfloat16"):
        raise ValueError("not rounded here")
    plain = np.frombuffer(master.array.tobytes(), "<u4").astype("u8")
    nan = (plain & 0x7FFFFFFF) > 0x7F800000
    out = ((plain + 0x7FFF + (plain >> 16 & 1)) >> 16).astype("<u2")
    out[nan] = plain[nan] >> 16 | 0x40
    return Held(dtype, np.frombuffer(out.tobytes(), "V2").reshape(master.array.shape))


def _vector(parts: Sequence[Held]) -> Array:
    if any(p.dtype != "float32" or p.array.ndim != 1 for p in parts):
        raise ValueError("not a vector of float32")
    return np.frombuffer(b"".join(p.array.tobytes() for p in parts), "V4")


def deepspeed(folder: Path) -> Answers:
    """A ZeRO save of stages 1, 2 and 3, found by ``latest``."""
    root = folder / (folder / "latest").read_bytes().decode().strip()
    model = [load(p.read_bytes()) for p in sorted(root.glob("*model_states.pt"))]
    optim = [load(p.read_bytes())["optimizer_state_dict"] for p in sorted(root.glob("*optim_states.pt"))]
    flat = _stage3 if "fp32_flat_groups" in optim[0] else _stage12
    found = flat(model[0], optim)
    masters = {n: Held("float32", a) for n, a in found.pop("").items()}
    out: Answers = {}
    for state, of in found.items():
        out |= {f"optimizer/{n}/{state}": bits(a) for n, a in of.items()}
    frozen: dict[str, Held] = {}
    for name, shape in (model[0].get("frozen_param_shapes") or {}).items() if len(model) > 1 else ():
        parts = [m["frozen_param_fragments"][name] for m in model]
        data = b"".join(p.array.tobytes() for p in parts)[: math.prod(shape) * parts[0].array.itemsize]
        frozen[name] = Held(parts[0].dtype, np.frombuffer(data, parts[0].array.dtype).reshape(shape))
    return out | _weights(model[0], masters, frozen)


def _weights(states: Mapping[str, Any], masters: Mapping[str, Held], other: Mapping[str, Held]) -> Answers:
    """The model of a save, and masters of what is no float32 itself."""
    out: Answers = {}
    dtypes: dict[str, str] = {}
    shared = states.get("shared_params") or {}
    for name, t in states["module"].items():
        if not isinstance(t, Held):
            continue
        held = masters.get(name) or other.get(name) or masters.get(shared.get(name, ""))
        whole = _rounded(held, t.dtype) if 0 in t.array.shape and held is not None else t
        out[name], dtypes[name] = whole.answer, t.dtype
    for name, held in masters.items():
        out.setdefault(name, held.answer)
        if dtypes.get(name, "float32") != "float32":
            out[f"master_weights/{name}"] = held.answer
    return out | {n: t.answer for n, t in other.items() if n not in out}


def _inner(state: Mapping[str, Any], key: str) -> dict[int, Mapping[str, Any]]:
    """State of the optimizer by the numbers of its vectors."""
    inner = state[key]
    if isinstance(inner, list):
        return dict(enumerate(inner))
    numbers = [n for g in inner["param_groups"] for n in g["params"]]
    return {i: inner["state"][n] for i, n in enumerate(numbers) if n in inner["state"]}


def _stage12(model: Mapping[str, Any], optim: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Array]]:
    """State -> parameter -> elements; "" are the masters."""
    out: dict[str, dict[str, Array]] = {"": {}}
    shapes = model["param_shapes"]
    for g, group in enumerate(shapes):
        inner = [_inner(o, "base_optimizer_state") for o in optim]
        said = [o.get("group_paddings") for o in optim]
        parts = [o["single_partition_of_fp32_groups"][g] for o in optim]
        keep = [
            p.array.shape[0] - (s[g] if s and "zero_stage" not in o else 0)
            for p, s, o in zip(parts, said, optim, strict=True)
        ]
        vectors = {"": _vector([Held(p.dtype, p.array[:n]) for p, n in zip(parts, keep, strict=True)])}
        for state in inner[0].get(g, {}):
            held = [i[g][state] for i in inner]
            if all(isinstance(h, Held) and h.array.ndim == 1 and state != "step" for h in held):
                vectors[state] = _vector([Held(h.dtype, h.array[:n]) for h, n in zip(held, keep, strict=True)])
        paddings = optim[0].get("param_alignment_paddings") or [[0] * len(s) for s in shapes]
        at = 0
        steps = [i[g]["step"] for i in inner if "step" in i.get(g, {})]
        for (name, shape), padding in zip(group.items(), paddings[g], strict=True):
            n = math.prod(shape)
            for state, vector in vectors.items():
                out.setdefault(state, {})[name] = vector[at : at + n].reshape(shape)
            at += n + padding
            if steps:
                out.setdefault("step", {})[name] = np.frombuffer(_number(steps[0])[1], "V4").reshape(())
    return out


def _stage3(model: Mapping[str, Any], optim: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Array]]:
    """See ``_stage12``."""
    shapes = {n: s for group in model["param_shapes"] for n, s in group.items()}
    count = len(optim[0]["fp32_flat_groups"])
    inner = [_inner(o, "optimizer_state_dict") for o in optim]
    vectors = {"": [_vector(o["fp32_flat_groups"]) for o in optim]}
    for state, v in inner[0].get(0, {}).items():
        if isinstance(v, Held) and v.array.ndim == 1 and state != "step":
            vectors[state] = [_vector([i[k][state] for k in range(count)]) for i in inner]
    out: dict[str, dict[str, Array]] = {}
    for state, ranks in vectors.items():
        at = 0
        for name, shape in shapes.items():
            n = math.prod(shape)
            part = -(-n // len(ranks))
            data = np.concatenate([r[at : at + part] for r in ranks])[:n]
            out.setdefault(state, {})[name] = data.reshape(shape)
            at += part
    step = inner[0].get(0, {}).get("step")
    if step is not None:
        out["step"] = {n: np.frombuffer(_number(step)[1], "V4").reshape(()) for n in shapes}
    return out


def universal(folder: Path) -> Answers:
    """A universal checkpoint, found by ``latest_universal``."""
    root = folder / (folder / "latest_universal").read_bytes().decode().strip()
    first = next(
        p
        for p in (root / "mp_rank_00_model_states.pt", root / "zero_pp_rank_0_mp_rank_00_model_states.pt")
        if p.is_file()
    )
    states = load(first.read_bytes())
    shapes = {n: s for group in states["param_shapes"] for n, s in group.items()}
    out: Answers = {}
    masters: dict[str, Held] = {}
    other: dict[str, Held] = {}
    buffers = set(states.get("buffer_names") or ())
    for inner in sorted((root / "zero").iterdir()):
        if not inner.is_dir() or inner.name in buffers:
            continue
        for path in sorted(inner.glob("*.pt")):
            value = load(path.read_bytes())
            value = value["param"] if isinstance(value, dict) else value
            if path.stem == "step":
                out[f"optimizer/{inner.name}/step"] = _number(value)
                continue
            shape = shapes.get(inner.name, (states.get("frozen_param_shapes") or {}).get(inner.name, value.array.shape))
            held = Held(value.dtype, value.array.reshape(shape))
            if path.stem == "fp32":
                (masters if inner.name in shapes else other)[inner.name] = held
            else:
                out[f"optimizer/{inner.name}/{path.stem}"] = held.answer
    more = root / "zero" / "optimizer_state.pt"
    if more.is_file() and not any(k.endswith("/step") for k in out):
        state = load(more.read_bytes()).get("optimizer_state_dict", {}).get("state", {})
        step = next((s.get("step") for s in state.values()), None)
        out |= {f"optimizer/{n}/step": _number(step) for n in masters} if step is not None else {}
    return out | _weights(states, masters, other)


# -- Meta


def meta(folder: Path) -> Answers:
    """Tensor-parallel ranks of a Llama; its embedding is cut by rows."""
    ranks = [load(p.read_bytes()) for p in sorted(folder.glob("consolidated.*.pth"))]
    out = {}
    for name in ranks[0]:
        parts = [r[name].array for r in ranks]
        if any(
            p.dtype != parts[0].dtype or r[name].dtype != ranks[0][name].dtype
            for p, r in zip(parts, ranks, strict=True)
        ):
            raise ValueError("two dtypes")
        if parts[0].ndim < 2:
            if any(p.tobytes() != parts[0].tobytes() for p in parts):
                raise ValueError("copies that differ")
            out[name] = bits(parts[0])
        else:
            out[name] = bits(np.concatenate(parts, 1 if re.search(r"\.(wo|w2)\.weight$", name) else 0))
    return out
