"""What is read of Paddle's pickles, compared with what the real loaders make of the same files."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.containers.paddle_pickle import read_paddle, read_pickle
from ckpttool.containers.pickle import PickledArray, PickledObject
from ckpttool.core.dtypes import DTYPES
from ckpttool.errors import CkptError, CorruptError, IncompleteError, UnsupportedError
from ckpttool.execute.reader import read_block
from ckpttool.storage.identify import sniff
from tests.helpers import sample

FIXTURES = Path(__file__).parents[2] / "fixtures" / "paddle_pickles"
PICKLES = sorted(p for p in FIXTURES.iterdir() if p.suffix != ".npz" and "binary" not in p.name)
NAMES = {
    "?": "BOOL",
    "i1": "I8",
    "u1": "U8",
    "i2": "I16",
    "u2": "U16",
    "f2": "F16",
    "i4": "I32",
    "u4": "U32",
    "f4": "F32",
    "i8": "I64",
    "u8": "U64",
    "f8": "F64",
    "c8": "C64",
}
CODES = list(NAMES)
NUMPY = {name: code for code, name in NAMES.items()} | {"C128": "c16"}


def load(a: PickledArray) -> np.ndarray[Any, Any]:
    """The elements at the place that an Array names."""
    data = read_block(a.file.contents, a.offset, (1,), (a.nbytes,), "U8")
    return data.view(NUMPY[a.dtype]).reshape(a.shape, order="F" if a.fortran else "C")


class Class:
    """What stands for Paddle's metadata classes when a test really unpickles."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PickledObject) and self.__dict__ == other.fields

    def __hash__(self) -> int:
        return 0


class Unpickler(pickle.Unpickler):
    """The real thing, for files that the project made itself."""

    def find_class(self, module: str, name: str) -> Any:
        return Class if module.startswith("paddle.") else super().find_class(module, name)


def really(path: Path) -> Any:
    """What paddle.load's unpickler makes of a file."""
    with path.open("rb") as f:
        return Unpickler(f, encoding="latin1").load()


def assert_same(read: Any, real: Any) -> None:
    """What was read is what unpickling gives, with Array for ndarray and Record for instances."""
    if isinstance(real, tuple) and len(real) == 2 and isinstance(real[1], np.ndarray):
        assert isinstance(read, PickledArray)
        assert read.name == real[0]
        real = real[1]
    if isinstance(real, np.ndarray):
        assert isinstance(read, PickledArray)
        found = load(read)
        assert (found.dtype, found.shape, found.tobytes()) == (real.dtype, real.shape, real.tobytes())
    elif isinstance(real, Class):
        assert isinstance(read, PickledObject)
        assert_same(read.fields, real.__dict__)
    elif isinstance(real, dict):
        assert type(read) is dict
        assert len(read) == len(real)
        for (k, v), (k2, v2) in zip(read.items(), real.items(), strict=True):
            assert_same(k, k2)
            assert_same(v, v2)
    elif isinstance(real, list | tuple):
        assert type(read) is type(real)
        assert len(read) == len(real)
        for a, b in zip(read, real, strict=True):
            assert_same(a, b)
    elif isinstance(real, np.generic):
        assert type(read) is type(real.item())
        assert np.array_equal(read, real.item(), equal_nan=real.dtype.kind in "fc")
    else:
        assert type(read) is type(real)
        assert read == real or (read != read and real != real)  # noqa: PLR0124  # both NaN


def dump(path: Path, value: Any, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(value, protocol))
    return path


# -- files that Paddle wrote


@pytest.mark.parametrize("path", PICKLES, ids=lambda p: p.name)
def test_reads_what_paddle_wrote(path: Path) -> None:
    assert_same(read_pickle(path), really(path))


@pytest.mark.parametrize("name", ["model.pdparams", "model_proto2.pdparams", "model_proto3.pdparams"])
def test_state_dict_equals_the_tensors_it_was_saved_from(name: str) -> None:
    file = read_paddle(FIXTURES / name)
    with np.load(FIXTURES / "expected.npz") as expected:
        wanted = {k.removeprefix("model/"): expected[k] for k in expected.files if k.startswith("model/")}
    assert file.tensors.keys() == wanted.keys()
    for key, array in file.tensors.items():
        assert load(array).dtype == wanted[key].dtype
        assert np.array_equal(load(array), wanted[key])
    assert file.structured.keys() == file.tensors.keys()
    assert file.structured["fc.weight"] == "linear_0.w_0"
    assert file.info.place == FIXTURES / name
    assert file.info.size == (FIXTURES / name).stat().st_size
    assert (file.chunks, file.other) == ({}, {})


def test_all_dtypes_of_paddle() -> None:
    tensors = read_paddle(FIXTURES / "all_dtypes.pdparams").tensors
    assert tensors["bfloat16"].dtype == "U16"
    assert tensors["float8_e4m3fn"].dtype == tensors["float8_e5m2"].dtype == "I8"
    assert (tensors["scalar"].shape, tensors["zero_size"].shape) == ((), (0, 3))
    with np.load(FIXTURES / "expected.npz") as expected:
        for key, array in tensors.items():
            wanted = expected[f"all/{key}"]
            assert load(array).tobytes() == wanted.tobytes()
            assert array.shape == wanted.shape


def test_optimizer() -> None:
    file = read_paddle(FIXTURES / "model.pdopt")
    assert file.other["LR_Scheduler"] == {"last_epoch": 1, "last_lr": 0.01}
    master = file.other["master_weights"]["linear_0.w_0"]
    assert (master.dtype, master.shape, master.name) == ("F32", (8, 6), "linear_0.w_0_fp32_master_0")
    assert file.tensors["linear_0.w_0_moment1_0"].name == "linear_0.w_0_moment1_0"


def test_metadata_has_numbers_and_records_as_keys() -> None:
    top = read_pickle(FIXTURES / "scalars.metadata")
    assert isinstance(top, PickledObject)
    assert top.cls == "Metadata"
    keys = list(top.fields["storage_metadata"])
    assert {k.cls for k in keys} == {"LocalTensorIndex"}
    # lm_head's lies in two files.
    assert len({k.fields["tensor_key"] for k in keys}) == len(keys) - 1
    ranges = [k.fields["flattened_range"] for k in keys]
    assert all(type(n) is int for r in ranges if r is not None for n in r)
    assert keys[0] in top.fields["storage_metadata"]
    assert keys[0] != PickledObject(*keys[0])


def test_sniff(tmp_path: Path) -> None:
    assert sniff(FIXTURES / "model.pdparams") == sniff(FIXTURES / "model_proto2.pdparams") == "pickle"
    assert sniff(FIXTURES / "single_binary.pdtensor") == "dense"
    other = tmp_path / "x.pdparams"
    for data, kind in (
        (b"", ""),
        (b"\x80", ""),
        (b"PK\x03\x04 a zip archive of torch", ""),
        (b"\x02\0\0\0\0\0\0\0{}", "safetensors"),
        # A header of 640 bytes has a length that begins like a pickle of protocol 2.
        ((640).to_bytes(8, "little") + b"{}" + b" " * 638, "safetensors"),
        (bytes(64), ""),
    ):
        other.write_bytes(data)
        assert sniff(other) == kind, data[:16]
    with pytest.raises(IncompleteError):
        sniff(tmp_path / "none")
    with pytest.raises(CorruptError):
        sniff(tmp_path)


# -- everything that a writer may do


@pytest.mark.product
@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("code", [*CODES, "c16"])
def test_every_dtype(tmp_path: Path, code: str, protocol: int) -> None:
    bits = np.random.default_rng(7).integers(0, 256, 16 * 24, dtype=np.uint8)
    full = (bits % 2 if code == "?" else bits).view(code)[:24].reshape(2, 3, 4)
    value = {"c": full, "f": np.asfortranarray(full), "scalar": full[0, 0, 0], "0d": np.array(full[0, 0, 1])}
    value |= {"empty": full[:0], "one": full[:1, 0, 0], "swap": full.transpose(1, 0, 2)}
    path = dump(tmp_path / "x", value, protocol)
    read = read_pickle(path)
    assert_same(read, really(path))
    assert read["f"].fortran
    assert not read["c"].fortran
    assert read["c"].dtype == NAMES.get(code, "C128")
    assert (read["c"].file.encoding is None) == (protocol > 2)


def test_dtypes_are_those_of_the_table_but_one() -> None:
    assert set(NUMPY) - set(DTYPES) == {"C128"}


def test_plain_values(tmp_path: Path) -> None:
    value = {
        "ints": [0, 255, 256, 65535, 65536, -1, 2**31 - 1, -(2**31), 2**31, 2**63, -(2**100), 2**2000],
        "floats": (0.0, -1.5, float("inf"), float("nan")),
        "texts": ["", "é" * 300, "x" * 5000, "\ud800"],
        "bytes": (b"", b"abc", bytes(70000)),
        "rest": [None, True, False, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], {}],
        "odd keys": {7: 2, None: 3, (1, "a"): 4, True: 5, b"k": 6},
        "ordered": OrderedDict(a=1, b=OrderedDict()),
        "many": {str(i): i for i in range(3000)},
        "long": list(range(3000)),
    }
    for protocol in (2, 3, 4):
        if protocol == 2:
            value["bytes"] = ("latin1 texts stand for bytes",)
        path = dump(tmp_path / "x", value, protocol)
        assert_same(read_pickle(path), really(path))


def test_a_big_array_lies_outside_frames(tmp_path: Path) -> None:
    value = {"a": np.arange(100_000, dtype="i4"), "b": np.arange(5, dtype="i4"), "c": np.arange(100_000, dtype="i8")}
    for protocol in (3, 4):
        path = dump(tmp_path / "x", value, protocol)
        assert_same(read_pickle(path), really(path))


def test_tensors_of_static_programs(tmp_path: Path) -> None:
    """paddle.save of a DenseTensor: __reduce__ gives eval with the literal 'data'."""

    class Dense:
        def __reduce__(self) -> Any:
            return eval, ("data", {"data": np.arange(3, dtype="f4")})

    path = dump(tmp_path / "x", {"outer": {"inner": Dense()}, "k": 1})
    read = read_pickle(path)
    assert load(read["outer"]["inner"]).tolist() == [0, 1, 2]
    dump(path, {"outer": Dense()}, 2)
    assert load(read_pickle(path)["outer"]).tolist() == [0, 1, 2]


def test_a_name_and_an_array_are_a_tensor_however_they_are_put_together(tmp_path: Path) -> None:
    class Named:
        def __reduce__(self) -> Any:
            return tuple, (("w", np.zeros(2, "f4")),)

    class Pair:
        def __reduce__(self) -> Any:
            return tuple, (("w", 1, 2),)

    same = np.zeros(2, "f4")
    read = read_pickle(
        dump(tmp_path / "x", {"a": Named(), "b": ("w", same), "c": (same, "w"), "d": Pair(), "e": (1, ("v", same))})
    )
    assert read["a"].name == read["b"].name == "w"
    assert [type(v) for v in read["c"]] == [PickledArray, str]
    assert read["d"] == ("w", 1, 2)
    assert read["e"][1].name == "v"
    assert read["c"][0].offset == read["b"].offset != read["a"].offset


def test_both_names_of_numpy_and_of_the_metadata_module(tmp_path: Path) -> None:
    data = pickle.dumps({"w": np.arange(3, dtype="f4")}, 2)
    assert b"numpy._core.multiarray" in data
    path = tmp_path / "x"
    path.write_bytes(data.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    assert load(read_pickle(path)["w"]).tolist() == [0, 1, 2]
    for module in ("paddle.distributed.flex_checkpoint.dcp.metadata", "paddle.distributed.checkpoint.metadata"):
        path.write_bytes(b"\x80\x02c" + module.encode() + b"\nLocalTensorIndex\n)\x81}X\x01\0\0\0aK\x05sb.")
        record = read_pickle(path)
        assert (record.cls, record.fields) == ("LocalTensorIndex", {"a": 5})


# -- tensors that were cut


def chunked(**changes: Any) -> dict[str, Any]:
    """The layout of io_utils._unpack_saved_dict, whose threshold is 2**30 - 1 bytes."""
    full = np.arange(30, dtype="float32")
    return {
        "w@@.0": full[:16],
        "w@@.1": full[16:],
        "b": np.ones(3, "float32"),
        "StructuredToParameterName@@": {"w": "linear_0.w_0", "b": "linear_0.b_0"},
        "UnpackBigParamInfor@@": {"w": {"OriginShape": (5, 6), "slices": ["w@@.0", "w@@.1"]}},
        **changes,
    }


@pytest.mark.parametrize("protocol", [2, 3])
def test_chunks_are_joined(tmp_path: Path, protocol: int) -> None:
    file = read_paddle(dump(tmp_path / "x", chunked(), protocol))
    assert file.tensors.keys() == {"w", "b"}
    whole = file.tensors["w"]
    assert (whole.dtype, whole.shape, whole.offset, whole.nbytes) == ("F32", (5, 6), -1, 120)
    assert np.concatenate([load(a) for a in file.chunks["w"]]).tolist() == list(range(30))
    assert (file.structured["w"], file.other) == ("linear_0.w_0", {})


@pytest.mark.parametrize(
    ("info", "error", "words"),
    [
        ({"w": {"OriginShape": (5, 6), "slices": ["w@@.0", "w@@.2"]}}, IncompleteError, "w@@.2"),
        ({"w": {"OriginShape": (5, 7), "slices": ["w@@.0", "w@@.1"]}}, CorruptError, "35"),
        ({"w": {"OriginShape": (4, 4), "slices": ["w@@.0", "w@@.0"]}}, CorruptError, "twice"),
        ({"b": {"OriginShape": (30,), "slices": ["w@@.0", "w@@.1"]}}, CorruptError, "twice"),
        ({"w": {"slices": ["w@@.0"]}}, CorruptError, "how"),
        ({"w": {"OriginShape": (0,), "slices": []}}, CorruptError, "how"),
        ({"w": 3}, CorruptError, "how"),
        ({(1, 2): 3}, CorruptError, "how"),
        ([], CorruptError, "not a dict"),
    ],
)
def test_wrong_chunks(tmp_path: Path, info: Any, error: type[CkptError], words: str) -> None:
    path = dump(tmp_path / "x", chunked(**{"UnpackBigParamInfor@@": info}))
    with pytest.raises(error, match=words):
        read_paddle(path)


def test_chunks_of_different_dtypes(tmp_path: Path) -> None:
    path = dump(tmp_path / "x", chunked(**{"w@@.1": np.zeros(14, "i4")}))
    with pytest.raises(CorruptError, match="one dtype"):
        read_paddle(path)


@pytest.mark.parametrize(
    ("value", "words"),
    [([1], "a list"), (np.ones(3), "a single tensor"), ({1: np.ones(3)}, "not a name"), (3, "an? int")],
)
def test_no_dict_of_tensors(tmp_path: Path, value: Any, words: str) -> None:
    with pytest.raises((UnsupportedError, CorruptError), match=words):
        read_paddle(dump(tmp_path / "x", value))


@pytest.mark.parametrize("names", [3, {"a": 1}, {1: "a"}])
def test_wrong_names(tmp_path: Path, names: Any) -> None:
    with pytest.raises(CorruptError, match="StructuredToParameterName"):
        read_paddle(dump(tmp_path / "x", {"StructuredToParameterName@@": names}))


# -- what is wrong


@pytest.mark.parametrize("name", ["all_dtypes.pdparams", "model_proto2.pdparams", "list.pd"])
def test_cut_off_anywhere(tmp_path: Path, name: str) -> None:
    data = (FIXTURES / name).read_bytes()
    path = tmp_path / "x"
    for size in range(0, len(data), sample.some(1, 3)):
        path.write_bytes(data[:size])
        with pytest.raises(IncompleteError) as e:
            read_pickle(path)
        assert f"the file has {size:,}" in e.value.what
        assert e.value.hint


def test_bytes_after_the_end(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(pickle.dumps({"a": 1}) + b"\0\0")
    with pytest.raises(CorruptError, match="ends before the file: 2 bytes left"):
        read_pickle(path)


def test_array_of_another_size(tmp_path: Path) -> None:
    data = pickle.dumps({"w": np.zeros((2, 3), "f4")}, 4)
    path = tmp_path / "x"
    assert data.count(b"K\x02K\x03\x86") == 1
    path.write_bytes(data.replace(b"K\x02K\x03\x86", b"K\x02K\x04\x86"))
    with pytest.raises(CorruptError, match=r"F32 \[2, 4\] needs 32 bytes, the pickle has 24"):
        read_pickle(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(IncompleteError, match="does not exist"):
        read_pickle(tmp_path / "none")
    with pytest.raises(CorruptError, match="directory"):
        read_paddle(tmp_path)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.array([1, "x"], object), "Python objects"),
        (np.zeros(2, ">f4"), "byte order"),
        (np.zeros(2, [("a", "f4"), ("b", "i4")]), "dtype `V8`"),
        (np.array(["abc"]), "dtype `U3`"),
        (np.zeros(2, "datetime64[s]"), "dtype `M8`"),
        (np.zeros(2, "g"), "dtype `f16`"),
        (np.dtype("f4"), "a numpy dtype `f4`"),
        (np.ma.zeros(3), "numpy"),
        ({1, 2}, "EMPTY_SET"),
        (frozenset({1}), "FROZENSET"),
        (bytearray(b"abc"), "builtins.bytearray"),
        ({1.5: 2}, "key of type float"),
        ({2**50: 2}, "key of type int"),
        ({((1, 2), 3): 4}, "key of type tuple"),
        (1j, "builtins.complex"),
        (np.ndarray, "stores `numpy.ndarray` itself"),
        (10**1000, "LONG4"),
    ],
)
def test_values_that_no_checkpoint_has(tmp_path: Path, value: Any, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words) as e:
        read_pickle(dump(tmp_path / "x", {"k": value}))
    assert "[byte " in e.value.where[0]
    assert e.value.hint


def test_protocols_that_are_not_read(tmp_path: Path) -> None:
    path = dump(tmp_path / "x", {"a": 1}, 0)
    with pytest.raises(CorruptError, match="protocol 2 to 5"):
        read_pickle(path)
    path.write_bytes(b"\x80\x06N.")
    with pytest.raises(UnsupportedError, match="protocol 6"):
        read_pickle(path)
    # Values without arrays are the same in protocol 5; arrays are not.
    assert read_pickle(dump(path, {"a": [1]}, 5)) == {"a": [1]}
    with pytest.raises(UnsupportedError, match="_frombuffer"):
        read_pickle(dump(path, {"a": np.zeros(3)}, 5))


# -- large files


def test_a_tensor_of_5_gib_costs_nothing(tmp_path: Path) -> None:
    """Its bytes are a hole in the file; reading them would take seconds and memory would show it."""
    size = 5 << 30
    head = pickle.dumps({"w": np.zeros(3, "u1")}, 4)
    at = head.index(b"C\x03\0\0\0")
    shape = b"\x8a\x08" + size.to_bytes(8, "little")
    before = head[:at].replace(b"K\x03\x85", shape + b"\x85")
    before = before[:2] + before[11:]  # without the frame, whose length is no longer right
    path = tmp_path / "x"
    with path.open("wb") as f:
        f.write(before + b"\x8e" + size.to_bytes(8, "little"))
        f.seek(size, os.SEEK_CUR)
        f.write(head[at + 5 :])
    code = """
import resource, sys, time
from pathlib import Path
from ckpttool.containers.paddle_pickle import read_paddle
resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
start = time.process_time()
a = read_paddle(Path(sys.argv[1])).tensors["w"]
assert (a.shape, a.nbytes) == ((5 << 30,), 5 << 30), a
print(time.process_time() - start, a.offset)
"""
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    seconds, offset = done.stdout.split()
    assert float(seconds) < 1
    assert int(offset) == len(before) + 9
    with path.open("r+b") as f:
        f.truncate(size)
    with pytest.raises(IncompleteError, match=f"needs at least {len(before) + 9 + size:,} bytes.*{size:,}"):
        read_pickle(path)


def test_many_tensors_in_little_time(tmp_path: Path) -> None:
    one = np.zeros(3, "f4")
    path = dump(tmp_path / "x", {f"model.layers.{i}.weight": one.copy() for i in range(5_000)})
    start = time.process_time()
    assert len(read_paddle(path).tensors) == 5_000
    # An eighth of a second on an idle core.
    assert time.process_time() - start < 5


# -- anything

leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5), st.binary(max_size=5)
)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Small arrays of any dtype and order."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    dtype = np.dtype(draw(st.sampled_from(CODES)))
    count = int(np.prod(shape, dtype=int))
    data = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype.kind == "b":
        data = bytes(b & 1 for b in data)
    return np.frombuffer(data, dtype).reshape(shape, order=draw(st.sampled_from("CF")))


values = st.recursive(
    leaves | arrays() | st.tuples(st.text(max_size=5), arrays()),
    lambda v: st.one_of(
        st.lists(v, max_size=4), st.dictionaries(st.text(max_size=5), v, max_size=4), st.tuples(v, v, v, v)
    ),
    max_leaves=12,
)


@given(value=values, protocol=st.integers(2, 4))
def test_reads_whatever_is_pickled(tmp_path_factory: pytest.TempPathFactory, value: Any, protocol: int) -> None:
    path = tmp_path_factory.getbasetemp() / "any.pickle"
    dump(path, value, protocol)
    assert_same(read_pickle(path), really(path))


@given(data=st.binary(max_size=60), at=st.integers(0, 1600))
def test_damage_is_an_error_or_another_value(tmp_path_factory: pytest.TempPathFactory, data: bytes, at: int) -> None:
    whole = (FIXTURES / "all_dtypes.pdparams").read_bytes()
    path = tmp_path_factory.getbasetemp() / "damaged.pickle"
    path.write_bytes(whole[:at] + data + whole[at + len(data) :])
    # Any other exception fails.
    with contextlib.suppress(CkptError):
        read_paddle(path)


def test_the_tests_own_comparison_sees_differences() -> None:
    with pytest.raises(AssertionError):
        assert_same({"a": [1, (2,)]}, {"a": [1, (3,)]})
    with pytest.raises(AssertionError):
        assert_same({"a": 1}, {"a": np.float32(1)})
