"""Pickles that ckpttool lays out, unpickled by the real loader and read back by its own."""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import warnings
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.containers.paddle_pickle import read_paddle, read_pickle
from ckpttool.containers.pickle import PickledArray, PickledObject
from ckpttool.containers.pickle_write import (
    _CODES,
    Hole,
    Instance,
    PickledCall,
    PickleSkeleton,
    layout_pickle,
    plain_pickle,
)
from ckpttool.core.dtypes import nbytes
from ckpttool.core.files import DataFile
from ckpttool.errors import UnsupportedError

MODULE = "paddle.distributed.flex_checkpoint.dcp.metadata"


def elements(hole: Hole, seed: int) -> bytes:
    data = np.random.default_rng(seed).integers(0, 256, nbytes(hole.dtype, prod(hole.shape)), dtype=np.uint8)
    return (data & 1 if hole.dtype == "BOOL" else data).tobytes()


def holes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Hole]]:
    if isinstance(value, Hole):
        yield path, value
    elif isinstance(value, dict):
        for k, v in value.items():
            yield from holes(v, (*path, k))
    elif isinstance(value, list | tuple):
        for i, v in enumerate(value):
            yield from holes(v, (*path, i))


def fill(value: Any, path: Path) -> PickleSkeleton:
    """Write the file as an executor does: literals at their offsets, payloads at theirs, and nothing else."""
    written = layout_pickle(value)
    data = bytearray(written.size)
    filled = 0
    for at, literal in written.literals:
        data[at : at + len(literal)] = literal
        filled += len(literal)
    for seed, (where, hole) in enumerate(holes(value)):
        payload = elements(hole, seed)
        at = written.places[where]
        data[at : at + len(payload)] = payload
        filled += len(payload)
    assert filled == written.size == len(data)
    path.write_bytes(data)
    return written


def expected(value: Any) -> Any:
    """The value with arrays for its holes, as paddle.save's own pickles load."""
    number = iter(range(10_000))

    def make(v: Any) -> Any:
        if isinstance(v, Hole):
            array = np.frombuffer(elements(v, next(number)), _CODES[v.dtype]).reshape(v.shape)
            return array if v.name is None else (v.name, array)
        if isinstance(v, dict):
            return {k: make(x) for k, x in v.items()}
        if isinstance(v, list | tuple):
            return type(v)([make(x) for x in v])
        return v

    return make(value)


def assert_equal(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
        assert a.flags.writeable
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for k in a:
            assert_equal(a[k], b[k])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b or (a != a and b != b)  # noqa: PLR0124  # both NaN


def unpickled(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return pickle.loads(path.read_bytes(), encoding="latin1")  # noqa: S301  # made by the test


SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (300,), (2, 3), (2, 3, 4, 5), (70_000,)]


@pytest.mark.parametrize("dtype", _CODES)
def test_every_dtype_and_shape(tmp_path: Path, dtype: str) -> None:
    value = {f"{shape}": Hole(dtype, shape) for shape in SHAPES}
    value |= {f"named {shape}": Hole(dtype, shape, f"t{len(shape)}") for shape in SHAPES}
    written = fill(value, tmp_path / "x")
    assert_equal(unpickled(tmp_path / "x"), expected(value))
    file = read_paddle(tmp_path / "x")
    assert file.tensors.keys() == value.keys()
    for key, array in file.tensors.items():
        assert array.offset == written.places[(key,)]
        assert array.shape == value[key].shape
        assert array.nbytes == nbytes(dtype, prod(array.shape))
        assert array.name == (value[key].name or "")
        assert not array.fortran


def test_optimizer_file(tmp_path: Path) -> None:
    value = {
        "linear_0.w_0_moment1_0": Hole("F32", (4, 3), "linear_0.w_0_moment1_0"),
        "master_weights": {"linear_0.w_0": Hole("F32", (4, 3), "linear_0.w_0_fp32_master_0")},
        "LR_Scheduler": {"last_epoch": 2, "last_lr": 0.008},
        "list": [Hole("I64", ()), (1, Hole("BF16", (2,)))],
    }
    written = fill(value, tmp_path / "x")
    assert written.places.keys() == {
        ("linear_0.w_0_moment1_0",),
        ("master_weights", "linear_0.w_0"),
        ("list", 0),
        ("list", 1, 1),
    }
    assert_equal(unpickled(tmp_path / "x"), expected(value))
    file = read_paddle(tmp_path / "x")
    assert file.other["LR_Scheduler"] == value["LR_Scheduler"]
    assert file.other["master_weights"]["linear_0.w_0"].name == "linear_0.w_0_fp32_master_0"
    assert file.other["master_weights"]["linear_0.w_0"].offset == written.places["master_weights", "linear_0.w_0"]
    assert file.other["list"][1][1].dtype == "U16"


def test_arrays_are_numpys_own_but_for_frames_and_memo(tmp_path: Path) -> None:
    """Opcode by opcode what CPython's pickler makes of the same dict."""
    fill({"w": Hole("F32", (4, 3)), "b": None}, tmp_path / "x")
    dull = {"FRAME", "MEMOIZE", "PROTO", "BINGET", "SHORT_BINUNICODE", "STACK_GLOBAL"}

    def opcodes(data: bytes) -> list[tuple[str, Any]]:
        return [(op.name, arg) for op, arg, _ in pickletools.genops(data) if op.name not in dull]

    theirs = pickle.dumps(unpickled(tmp_path / "x"), 4)
    assert opcodes((tmp_path / "x").read_bytes()) == opcodes(theirs)


def test_old_numpy_finds_its_module() -> None:
    data = layout_pickle({"w": Hole("F32", (4, 3))}).literals[0][1]
    assert b"numpy.core.multiarray" in data
    assert b"numpy._core" not in data


def test_same_value_same_bytes() -> None:
    value = {"a": Hole("F32", (2,)), "b": [1, "x", {"y": None}]}
    assert layout_pickle(value) == layout_pickle(dict(value))


def test_an_array_of_5_gib() -> None:
    written = layout_pickle({"w": Hole("U8", (5 << 30,)), "v": Hole("U8", (3,))})
    (first, a), (second, b), (third, c) = written.literals
    assert first == 0
    assert a.endswith(b"\x8e" + struct.pack("<Q", 5 << 30))
    assert written.places["w",] == len(a)
    assert second == len(a) + (5 << 30)
    assert written.places["v",] == second + len(b)
    assert third == second + len(b) + 3
    assert written.size == third + len(c)


def test_many_arrays_take_little(tmp_path: Path) -> None:
    value = {f"layers.{i}.weight": Hole("F32", (2, 2), f"linear_{i}.w_0") for i in range(3000)}
    written = fill(value, tmp_path / "x")
    assert written.size < 3000 * 110
    assert len(unpickled(tmp_path / "x")) == len(read_paddle(tmp_path / "x").tensors) == 3000


def test_plain_values() -> None:
    value: dict[Any, Any] = {
        "ints": [0, 255, 256, 65535, 65536, -1, 2**31 - 1, -(2**31), 2**31, 2**63, -(2**100), 2**2000],
        "floats": (0.0, -1.5, float("inf")),
        "texts": ["", "é" * 300, "x" * 70_000, "\ud800"],
        "bytes": (b"", b"abc", bytes(70000)),
        "rest": [None, True, False, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], {}],
        3: {(1, "a"): 4},
        "many": {str(i): [i] for i in range(2500)},
        "long": list(range(2500)),
    }
    assert_equal(pickle.loads(plain_pickle(value)), value)  # noqa: S301  # made above
    assert_equal(pickle.loads(plain_pickle({})), {})  # noqa: S301  # made above


def test_empty_state_as_paddle_writes_it() -> None:
    """model_state of a sharded checkpoint whose weights are all in the optimizer's files."""
    value: dict[str, Any] = {"StructuredToParameterName@@": {}}
    assert pickle.loads(plain_pickle(value)) == value  # noqa: S301  # made above


class Stand:
    """For Paddle's classes."""


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        assert module == MODULE
        return type(name, (Stand,), {})


def metadata() -> Instance:
    def shard(at: int) -> dict[str, Any]:
        return {"global_offset": (at, 0), "local_shape": (2, 3), "is_flattened": False, "flattened_range": None}

    entries = [Instance(MODULE, "LocalTensorMetadata", {**shard(at), "dtype": "bfloat16"}) for at in (0, 2)]
    storage = {
        Instance(MODULE, "LocalTensorIndex", {"tensor_key": "w", **shard(at)}): f"{rank}_0.distcp"
        for rank, at in enumerate((0, 2))
    }
    fields = {"state_dict_metadata": {"w": entries}, "storage_metadata": storage, "flat_mapping": {"w": ("w",)}}
    return Instance(MODULE, "Metadata", fields)


def test_instances(tmp_path: Path) -> None:
    data = plain_pickle(metadata())
    real = Unpickler(io.BytesIO(data)).load()
    assert type(real).__name__ == "Metadata"
    assert [vars(e)["global_offset"] for e in real.state_dict_metadata["w"]] == [(0, 0), (2, 0)]
    assert {vars(k)["global_offset"]: v for k, v in real.storage_metadata.items()} == {
        (0, 0): "0_0.distcp",
        (2, 0): "1_0.distcp",
    }
    path = tmp_path / "0.metadata"
    path.write_bytes(data)
    read = read_pickle(path)

    def plain(v: Any) -> Any:
        if isinstance(v, PickledObject | Instance):
            return v.cls, plain(v.fields)
        if isinstance(v, Mapping):
            return [(plain(k), plain(x)) for k, x in v.items()]
        return [plain(x) for x in v] if isinstance(v, list) else v

    assert plain(read) == plain(metadata())


def test_instances_as_keys_do_not_meet_in_one_place() -> None:
    keys = [Instance(MODULE, "LocalTensorIndex", {"tensor_key": "w", "global_offset": (i, 0)}) for i in range(1000)]
    assert len({hash(k) for k in keys}) > 990
    assert keys[3] == Instance(*keys[3])


@pytest.mark.parametrize(
    "value",
    [{1}, object(), np.float32(1), 1j, bytearray(b"a"), PickledArray("F32", (), 0, 4, DataFile(Path("x"), 4, ""))],
)
def test_values_that_cannot_be_written(value: Any) -> None:
    with pytest.raises(UnsupportedError, match="cannot be written") as e:
        layout_pickle({"a": [value]})
    assert e.value.where == ("a.0",)


def test_dtypes_that_cannot_be_written() -> None:
    with pytest.raises(UnsupportedError, match="no arrays of F4") as e:
        layout_pickle({"a": {"b": Hole("F4", (2,))}})
    assert e.value.where == ("a.b",)
    with pytest.raises(UnsupportedError, match="257 bytes"):
        plain_pickle(2**2047)


def test_a_plain_pickle_has_no_arrays() -> None:
    for shape in ((0,), (2,)):
        with pytest.raises(UnsupportedError, match="no place") as e:
            plain_pickle({"a": Hole("F32", shape)})
        assert e.value.where == ("a",)


shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.builds(Hole, st.sampled_from(sorted(_CODES)), shapes, st.none() | st.text(max_size=5)),
)
values = st.recursive(
    leaves,
    lambda v: st.one_of(
        st.lists(v, max_size=4), st.dictionaries(st.text(max_size=5), v, max_size=4), st.tuples(v, v, v, v)
    ),
    max_leaves=12,
)


@given(value=values)
def test_whatever_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "written.pickle"
    written = fill(value, path)
    assert_equal(unpickled(path), expected(value))
    read = read_pickle(path)

    def arrays(v: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], PickledArray]]:
        if isinstance(v, PickledArray):
            yield at, v
        elif isinstance(v, dict | list | tuple):
            for k, x in v.items() if isinstance(v, dict) else enumerate(v):
                yield from arrays(x, (*at, k))

    assert {at: (a.offset, a.shape, a.name) for at, a in arrays(read)} == {
        at: (written.places[at], hole.shape, hole.name or "") for at, hole in holes(value)
    }


def test_equal_calls_are_made_once() -> None:
    calls = [
        PickledCall("builtins", "slice", (0, 4)),
        PickledCall("builtins", "slice", (0, 8)),
        PickledCall("builtins", "slice", (0, 4)),
    ]
    data = plain_pickle(calls)
    assert pickle.loads(data) == [slice(0, 4), slice(0, 8), slice(0, 4)]  # noqa: S301 - it was just made
    assert sum(op.name == "REDUCE" for op, _, _ in pickletools.genops(data)) == 2
