"""The container: our headers against the safetensors library, both ways, and on files that break the format."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ckpttool.containers.safetensors import Header, layout_file, problems, read_header
from ckpttool.core.catalog import RankTensor
from ckpttool.core.dtypes import DTYPES
from ckpttool.core.words import natural
from ckpttool.errors import CkptError, CorruptError, IncompleteError, UnsupportedError
from ckpttool.formats.base import build_files, fill_files
from tests.helpers.sample import examples

KINDS = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "F16": "float16",
    "I32": "int32",
    "F32": "float32",
    "I64": "int64",
    "F64": "float64",
}
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(lambda n: n != "__metadata__")
TENSORS = st.dictionaries(
    NAMES, st.tuples(st.sampled_from(sorted(KINDS)), st.lists(st.integers(0, 4), max_size=3).map(tuple)), max_size=6
)
METADATA = st.one_of(st.none(), st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), NAMES, max_size=1))


def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("x") / "x.safetensors"


@given(TENSORS, METADATA)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_files_of_the_library(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    metadata: dict[str, str] | None,
) -> None:
    """Its file and ours are the same bytes; what we read is where it is."""
    path = scratch(tmp_path_factory)
    arrays = {n: np.arange(prod(s)).astype(KINDS[d]).reshape(s) for n, (d, s) in tensors.items()}
    save_file(arrays, path, metadata or None)
    data = path.read_bytes()
    found = read_header(path, index=3, rank=7)
    assert found.metadata == (metadata or {})
    assert {t.name: (t.dtype, t.shape) for t in found.tensors} == tensors
    for t in found.tensors:
        assert (t.file, t.rank) == (3, 7)
        assert data[t.offset : t.offset + t.nbytes] == arrays[t.name].tobytes()
    ours, offsets, size = layout_file([(n, d, s) for n, (d, s) in tensors.items()], metadata)
    assert data[: len(ours)] == ours
    assert size == len(data)
    assert list(offsets.items()) == [(t.name, t.offset) for t in found.tensors] or 0 in {
        prod(s)
        for _, s in tensors.values()  # the place of an empty tensor says nothing
    }


ENTRY: dict[str, st.SearchStrategy[Any]] = {
    "dtype": st.sampled_from([*DTYPES, "F13", None, 3, ["U8"]]),
    "shape": st.one_of(st.lists(st.sampled_from([0, 1, 2, 3, -1, 2**63, 1.0, None, True]), max_size=3), st.just("12")),
    "data_offsets": st.one_of(
        st.lists(st.integers(-1, 9), min_size=1, max_size=3), st.none(), st.just({"a": 1, "b": 2})
    ),
}
ENTRIES = st.one_of(
    st.fixed_dictionaries({}, optional=ENTRY),
    st.fixed_dictionaries(ENTRY),
    st.tuples(st.integers(0, 6), st.integers(0, 6)).map(
        lambda e: {"dtype": "U8", "shape": [e[1]], "data_offsets": [e[0], e[0] + e[1]]}
    ),
)
HEADERS: st.SearchStrategy[dict[str, Any]] = st.dictionaries(
    st.sampled_from(["a", "b", "c", "__metadata__"]), st.one_of(ENTRIES, st.none(), st.just([]))
)


@given(HEADERS, st.integers(0, 8))
@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_header(tmp_path_factory: pytest.TempPathFactory, header: dict[str, object], payload: int) -> None:
    """Read, or one clean error; never another exception. What the library accepts is accepted."""
    path = scratch(tmp_path_factory)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(payload))
    try:
        with safe_open(path, framework="np") as f:
            theirs = {n: (f.get_slice(n).get_dtype(), tuple(f.get_slice(n).get_shape())) for n in f.keys()}  # noqa: SIM118
    except SafetensorError:
        theirs = None
    found: Header | CkptError
    try:
        found = read_header(path)
    except CkptError as e:
        found = e
    if header.get("__metadata__", "") is None:
        del header["__metadata__"]
    assert bool(problems(header, payload)) == isinstance(found, CkptError)
    if isinstance(found, CkptError):
        assert theirs is None, (header, found)
        assert str(path) in found.render()
    elif theirs is not None:
        assert {t.name: (t.dtype, t.shape) for t in found.tensors} == theirs


def test_every_problem_is_listed() -> None:
    header = {
        "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        "b": {"dtype": "U8", "shape": [4], "data_offsets": [3, 7]},
        "c": {"dtype": "F32", "shape": [1], "data_offsets": [9, 13]},
        "d": {"dtype": "F99", "shape": [1], "data_offsets": [0, 1]},
        "e": {"dtype": "BF16", "shape": [3], "data_offsets": [7, 9]},
    }
    assert {p.id for p in problems(header, 10)} == {"overlap", "truncated", "dtype", "size"}


def test_a_name_that_occurs_twice(tmp_path: Path) -> None:
    text = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    for raw in (
        text,
        text.replace(b'"a"', b'"\\u0061"', 1),
        text.replace(b'"shape":[1]', b'"shape":[1],"shape":[1]', 1),
    ):
        (tmp_path / "x").write_bytes(struct.pack("<Q", len(raw)) + raw + b"\0")
        with pytest.raises(CorruptError, match="twice"):
            read_header(tmp_path / "x")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(IncompleteError, match="does not exist"):
        read_header(tmp_path / "x")
    with pytest.raises(CorruptError, match="directory"):
        read_header(tmp_path)


def test_a_header_longer_than_one_read(tmp_path: Path) -> None:
    names = [f"layer.{i:06d}" for i in range(3000)]
    head, _, size = layout_file([(n, "U8", (1,)) for n in names], None)
    assert len(head) > 1 << 17
    (tmp_path / "x").write_bytes(head + bytes(size - len(head)))
    assert [t.name for t in read_header(tmp_path / "x").tensors] == names


def stored(name: str, size: int) -> RankTensor:
    return RankTensor(name, "U8", (size,), name, (size,), ())


@pytest.mark.parametrize("name", ["__metadata__", "a\ud800"])
def test_names_that_no_header_has(name: str) -> None:
    with pytest.raises(UnsupportedError, match="is not a valid tensor name") as e:
        layout_file([(name, "F32", (2,))], None)
    assert "--rename" in str(e.value.hint)


def test_files_are_filled_in_order() -> None:
    tensors = [stored(n, s) for n, s in zip("abcde", (4, 5, 1, 20, 1), strict=True)]
    assert [[t.name for t in g] for g in fill_files(tensors, 10)] == [["a", "b", "c"], ["d"], ["e"]]
    assert [len(g) for g in fill_files(tensors, None)] == [5]
    assert fill_files([], 10) == [[]]


def test_places_of_a_skeleton() -> None:
    got = build_files([("x.safetensors", 0, [stored("a", 3)], None), ("y.safetensors", 2, [stored("a", 4)], None)], 3)
    assert [f.name for f in got.files] == ["x.safetensors", "y.safetensors"]
    assert got.rank_files == [[0], [], [1]]
    for rank, (file, size) in ((0, (0, 3)), (2, (1, 4))):
        at, offset = got.places[rank]["a"]
        assert (at, offset + size) == (file, got.files[file].size)
        ((start, head),) = got.files[file].literals
        assert (start, len(head)) == (0, offset)


def test_natural_order() -> None:
    names = ["model-10", "model-9", "a2b1", "a10b", "2", "x"]
    assert sorted(names, key=natural) == ["2", "a2b1", "a10b", "model-9", "model-10", "x"]
