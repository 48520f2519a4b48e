"""NaN, Inf and zeros are found in numbers, and in nothing that is none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.command import ckpttool, reshard
from tests.helpers.tensorfile import BYTES, Raw, Tensors, save_hf, unsigned
from tests.inspect.models import CONFIG, llama


def found(folder: Path) -> dict[str, str]:
    done = ckpttool("inspect", folder, "--check", "--values", "--json")
    known = ("nan", "inf", "zeros")
    return {f["id"]: f["text"] for f in json.loads(done.out)["findings"] if f["id"] in known}


def filled(dtype: str, bits: int, shape: tuple[int, ...] = (3, 4), *, every: bool = False) -> Raw:
    """Ones, or nearly: the lowest normal pattern; one element, or every one, has these bits."""
    out = np.full(shape, 1 << 8 * BYTES[dtype] - 3, unsigned(dtype))
    out.reshape(-1)[slice(None) if every else 6] = bits
    return Raw(dtype, out)


@pytest.mark.parametrize(
    ("dtype", "bits", "expected"),
    [
        ("BF16", 0x7FC1, "nan"),
        ("F16", 0xFE00, "nan"),
        ("F32", 0x7F800001, "nan"),
        ("F64", 0x7FF8 << 48, "nan"),
        ("F8_E4M3", 0x7F, "nan"),
        ("F8_E5M2", 0xFD, "nan"),
        ("BF16", 0x7F80, "inf"),
        ("F16", 0xFC00, "inf"),
        ("F32", 0x7F800000, "inf"),
        ("F8_E5M2", 0x7C, "inf"),
    ],
)
def test_one_element_is_enough(dtype: str, bits: int, expected: str, tmp_path: Path) -> None:
    save_hf(tmp_path, {"a.weight": filled(dtype, bits)}, {})
    answer = found(tmp_path)
    assert answer.keys() == {expected}
    assert "1 NaN" in answer[expected] or "1 Inf" in answer[expected]
    assert answer[expected].endswith("among 12 elements, the first at [1, 2]")


@pytest.mark.parametrize(("dtype", "bits"), [("F8_E4M3", 0x7E), ("I32", 0x7FC00000), ("U8", 0xFF), ("I8", 0x7F)])
def test_largest_codes_and_packed_integers_are_sound(dtype: str, bits: int, tmp_path: Path) -> None:
    save_hf(tmp_path, {"a.qweight": filled(dtype, bits), "b.weight": filled("BF16", 0x3F80)}, {})
    assert found(tmp_path) == {}


def test_zeros_are_told_of_matrices_only(tmp_path: Path) -> None:
    tensors: Tensors = {
        "q_proj.weight": filled("BF16", 0x8000, every=True),
        "q_proj.bias": filled("BF16", 0, (4,), every=True),
        "norm.weight": filled("BF16", 0, (4,), every=True),
        "experts.gate_up_proj_bias": filled("BF16", 0, every=True),
        "empty.weight": Raw("BF16", np.zeros((0, 4), np.uint16)),
        "ids": filled("I64", 0, every=True),
    }
    save_hf(tmp_path, tensors, {})
    assert found(tmp_path) == {"zeros": "every element of `q_proj.weight` is zero"}


def test_a_nan_is_found_through_ranks_and_blocks(tmp_path: Path) -> None:
    tensors = llama()
    tensors["model.layers.1.mlp.down_proj.weight"].bits[9, 20] = 0x7FC0
    save_hf(tmp_path / "model", tensors, CONFIG)
    reshard(tmp_path / "model", tmp_path / "tp2", "--to", "ranks", "--tp-out", 2)
    text = "`model.layers.1.mlp.down_proj.weight` has 1 NaN among 384 elements, the first at [9, 20]"
    assert found(tmp_path / "tp2") == found(tmp_path / "model") == {"nan": text}


def test_moments_may_be_zero() -> None:
    assert found(Path("fixtures/paddle_zcc/ep2_tp2_sharding2_ema")) == {}
