"""The table of element types, against the safetensors library, numpy and ml_dtypes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from ckpttool.containers.safetensors import layout_file
from ckpttool.core.dtypes import DTYPES, ORDER, itemsize, lookup, nbytes, numpy_dtype, parse
from ckpttool.errors import CorruptError, UnsupportedError


@pytest.mark.parametrize("name", DTYPES)
def test_the_library_knows_it(name: str, tmp_path: Path) -> None:
    """Name and width: the library refuses a header in which either is wrong."""
    head, _, size = layout_file([("x", name, (8,))], None)
    (tmp_path / "x.safetensors").write_bytes(head + bytes(size - len(head)))
    with safe_open(tmp_path / "x.safetensors", framework="np") as f:
        assert f.get_slice("x").get_dtype() == name


@pytest.mark.parametrize("name", [n for n, d in DTYPES.items() if d.bits >= 8])
def test_numpy_has_the_width(name: str) -> None:
    assert numpy_dtype(name).itemsize * 8 == DTYPES[name].bits
    assert itemsize(name) * 8 == DTYPES[name].bits


@pytest.mark.parametrize("name", [n for n, d in DTYPES.items() if d.bits < 8])
def test_packed_elements(name: str) -> None:
    with pytest.raises(UnsupportedError):
        numpy_dtype(name)
    with pytest.raises(UnsupportedError, match="whole"):
        itemsize(name)
    assert nbytes(name, 16) == DTYPES[name].bits * 2
    with pytest.raises(CorruptError, match="whole bytes"):
        nbytes(name, 1)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("bf16", "BF16"),
        ("torch.bfloat16", "BF16"),
        ("BFloat16 ", "BF16"),
        ("float", "F32"),
        ("half", "F16"),
        ("paddle.float64", "F64"),
        ("fp8", "F8_E4M3"),
        ("e5m2", "F8_E5M2"),
    ],
)
def test_names_that_people_write(text: str, name: str) -> None:
    assert parse(text).name == name


def test_aliases_are_unique() -> None:
    names = [a for d in DTYPES.values() for a in {d.name.lower(), *d.aliases}]
    assert len(names) == len(set(names))


def test_unknown_names() -> None:
    with pytest.raises(UnsupportedError, match="unknown dtype `F13`") as caught:
        lookup("F13", where="tensor x")
    assert "tensor x" in caught.value.render()
    with pytest.raises(UnsupportedError, match="unknown dtype"):
        parse("bf17")


def test_order_is_that_of_the_library(tmp_path: Path) -> None:
    """Its writer sorts by dtype, the last of its list first."""
    from safetensors.numpy import save_file

    kinds = ("uint8", "int16", "float16", "int32", "uint32", "float32", "float64", "int64", "uint64")
    save_file({k: np.zeros(1, k) for k in kinds}, tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", framework="np") as f:
        found = [f.get_slice(n).get_dtype() for n in f.offset_keys()]
    assert found == sorted(found, key=ORDER.__getitem__, reverse=True)
