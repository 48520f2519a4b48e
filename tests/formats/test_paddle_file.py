"""Single files of paddle.save as sources, whatever their name."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckpttool
from ckpttool.errors import CkptError
from tests.helpers.command import refused, reshard
from tests.helpers.paddle import read_folder

FIXTURES = Path(__file__).parents[2] / "fixtures/paddle_pickles"


def saved(path: Path, value: Any, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(value, protocol))
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_a_state_dict_becomes_safetensors(protocol: int, tmp_path: Path) -> None:
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    bf16 = np.arange(6).astype(ml_dtypes.bfloat16)
    value = {"a.weight": a, "b.bias": bf16.view(np.uint16), "StructuredToParameterName@@": {"a.weight": "linear_0.w_0"}}
    src = saved(tmp_path / "any_name.pdparams", value, protocol)
    (tmp_path / "notes.txt").write_text("not a part of it")
    reshard(src, tmp_path / "out", "--to", "hf", "--verify")
    got = read_folder(tmp_path / "out", "*.safetensors")
    assert np.array_equal(got["a.weight"], a)
    assert got["b.bias"].dtype == ml_dtypes.bfloat16
    assert np.array_equal(got["b.bias"], bf16)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["model.safetensors"]


def test_nested_values_are_joined_with_dots(tmp_path: Path) -> None:
    one = np.ones(2, np.float32)
    src = saved(
        tmp_path / "x.pdckpt", {"model": {"w": one}, "opt": [one, {"deep": one}], "step": 3, "lr": {"last": 0.1}}
    )
    source = ckpttool.open(src)
    assert list(source) == ["model.w", "opt.0", "opt.1.deep"]
    assert any("step" in n for n in source.notes)
    assert list(ckpttool.open(saved(tmp_path / "one.pdtensor", one))) == ["tensor"]


def test_parts_of_a_large_tensor_are_one(tmp_path: Path) -> None:
    """Protocols 2 and 3 cut what is larger than 1 GiB; the parts say which shape they had."""
    whole = np.arange(35, dtype=np.float32).reshape(5, 7)
    flat = whole.ravel()
    value = {
        "w": None,
        "w@@.0": flat[:20],
        "w@@.1": flat[20:],
        "UnpackBigParamInfor@@": {"w": {"OriginShape": (5, 7), "slices": ["w@@.0", "w@@.1"]}},
    }
    del value["w"]
    source = ckpttool.open(saved(tmp_path / "big.pdparams", value, 3))
    assert np.array_equal(source.read("w"), whole)
    assert np.array_equal(source.read("w", (slice(2, 4), slice(3, 5))), whole[2:4, 3:5])


READABLE = sorted(p.name for p in FIXTURES.iterdir() if p.name.startswith(("model", "all", "list", "nested", "static")))


@pytest.mark.parametrize("name", READABLE)
def test_real_files_are_read(name: str) -> None:
    source = ckpttool.open(FIXTURES / name)
    assert len(source) > 1
    for tensor in source:
        assert source.read(tensor).shape == source[tensor].shape


@pytest.mark.parametrize(
    ("name", "why"), [("single_binary.pdtensor", "raw tensor"), ("scheduler.pdparams", "no arrays")]
)
def test_real_files_that_are_no_checkpoints(name: str, why: str) -> None:
    with pytest.raises(CkptError, match=why):
        ckpttool.open(FIXTURES / name)


def test_what_is_refused(tmp_path: Path) -> None:
    src = saved(tmp_path / "none.pdparams", {"epoch": 3})
    assert "no arrays" in refused(src, tmp_path / "out")
    src = saved(tmp_path / "two.pdparams", {"a": np.ones(1)})
    assert "which one to read" in refused(tmp_path, tmp_path / "out", "--from", "pdparams")
    assert "--to hybrid" in refused(src, tmp_path / "out", "--to", "pdparams")
