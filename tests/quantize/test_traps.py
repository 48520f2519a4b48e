"""Inputs whose output looked right once and was not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.command import ckpttool
from tests.helpers.tensorfile import Raw, Tensors, assert_same, read_all, save_hf
from tests.quantize.judge import stored
from tests.quantize.models import cast, llama, refused, sound, weight

NAME = "model.layers.0.mlp.up_proj.weight"
BLOCKS = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}


def coded(folder: Path, scale: np.ndarray[Any, Any], shape: tuple[int, int], config: dict[str, Any]) -> Path:
    """One FP8 weight of ones with these scales."""
    codes = Raw("F8_E4M3", np.full(shape, 0x38, np.uint8))
    return save_hf(folder, {NAME: codes, f"{NAME}_scale_inv": stored("F32", scale)}, config)


@pytest.mark.parametrize("recipe", ["block", "channel", "nvfp4"])
def test_a_name_that_is_taken(recipe: str, tmp_path: Path) -> None:
    suffix = {"block": "_scale_inv", "channel": "_scale", "nvfp4": "_packed"}[recipe]
    taken = {NAME: weight(1, (128, 64)), f"{NAME}{suffix}": stored("F32", np.full((3, 2), 7.0, np.float32))}
    for i, order in enumerate((list(taken), list(taken)[::-1])):
        save_hf(tmp_path / f"src{i}", {n: taken[n] for n in order}, {"architectures": ["X"]})
        error = refused("quantize", tmp_path / f"src{i}", tmp_path / "dst", "--recipe", recipe)
        assert f"two tensors would both be named `{NAME}{suffix}`" in error


@pytest.mark.parametrize("wanted", ["f16", "f16:pow2"])
def test_scales_that_f16_cannot_hold(wanted: str, tmp_path: Path) -> None:
    large = {NAME: stored("BF16", np.full((4, 32), 3e38, np.float32))}
    save_hf(tmp_path / "large", large, {"architectures": ["X"]})
    options = ("--recipe", "channel", "--scale-dtype", wanted)
    error = refused("quantize", tmp_path / "large", tmp_path / "dst", *options)
    assert f"`{NAME}` takes a scale of" in error
    assert "hint: --scale-dtype f32" in error
    small = {NAME: stored("BF16", np.full((4, 32), 1e-6, np.float32))}
    save_hf(tmp_path / "small", small, {"architectures": ["X"]})
    cast(tmp_path / "small", tmp_path / "dst", *options)
    written = read_all(tmp_path / "dst")[f"{NAME}_scale"].bits.view(np.float16)
    assert (written > 0).all()


def test_scales_that_are_not_in_the_blocks_of_the_config(tmp_path: Path) -> None:
    coded(tmp_path / "src", np.ones((4, 4), np.float32), (300, 256), {"architectures": ["X"], **BLOCKS})
    error = refused("quantize", tmp_path / "src", tmp_path / "dst", "--to", "bf16")
    assert "[4, 4] do not fit their weight [300, 256] in blocks of 128x128" in error


def test_experts_in_one_tensor_of_any_name_are_read_again(tmp_path: Path) -> None:
    tensors: Tensors = {
        "model.layers.0.mlp.experts.w1": weight(1, (4, 64, 64)),
        "model.layers.0.mlp.experts.w2.weight": weight(2, (4, 64, 32)),
    }
    save_hf(tmp_path / "src", tensors, {"architectures": ["X"]})
    cast(tmp_path / "src", tmp_path / "block", "--block", "32x32")
    sound(tmp_path / "block")
    assert set(read_all(tmp_path / "block")) == {
        "model.layers.0.mlp.experts.w1",
        "model.layers.0.mlp.experts.w1_scale_inv",
        "model.layers.0.mlp.experts.w2.weight",
        "model.layers.0.mlp.experts.w2.weight_scale_inv",
    }
    cast(tmp_path / "block", tmp_path / "back", "--to", "bf16", "--verify")
    cast(tmp_path / "src", tmp_path / "tensor", "--recipe", "tensor", "--keep", "*.w1")
    sound(tmp_path / "tensor")
    cast(tmp_path / "tensor", tmp_path / "again", "--to", "bf16", "--verify")


@pytest.mark.sample("mxfp8", "block:16x16")
@pytest.mark.parametrize("recipe", ["mxfp8", "channel", "tensor", "block:16x16"])
def test_fp8_stays_fp8_in_files_that_do_not_say_so(recipe: str, tmp_path: Path) -> None:
    llama(tmp_path / "src")
    ranks = ("--to", "hybrid", "--tp-out", "2")
    once = ("--requant", recipe, "--remove-keys", "*down_proj*")  # whose groups of 32 two ranks cannot share
    done = ckpttool("reshard", tmp_path / "src", tmp_path / "ranks", *ranks, *once, "--verify")
    assert done.code == 0, done.err
    for dst, src, more in (("back", "ranks", ()), ("straight", "src", once)):
        done = ckpttool("reshard", tmp_path / src, tmp_path / dst, "--to", "hf", "--tp-out", "1", *more)
        assert done.code == 0, done.err
    assert_same(read_all(tmp_path / "back"), read_all(tmp_path / "straight"))


def test_one_group_for_each_rank_is_no_scale_of_rows(tmp_path: Path) -> None:
    llama(tmp_path / "src")
    many = ("--to", "vllm", "--tp-out", "4", "--requant", "mxfp8")
    kept = ("--remove-keys", "*down_proj*")
    done = ckpttool("reshard", tmp_path / "src", tmp_path / "ranks", *many, *kept)
    assert done.code == 0, done.err
    done = ckpttool("reshard", tmp_path / "ranks", tmp_path / "back", "--to", "hf", "--tp-out", "1", "--verify")
    assert done.code == 0, done.err


def test_scales_go_with_their_weights(tmp_path: Path) -> None:
    llama(tmp_path / "src")
    cast(tmp_path / "src", tmp_path / "kept", "--keep-keys", "*down_proj.weight")
    assert set(read_all(tmp_path / "kept")) == {
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.mlp.down_proj.weight_scale_inv",
    }
    cast(tmp_path / "src", tmp_path / "left", "--remove-keys", "*down_proj.weight")
    assert not [n for n in read_all(tmp_path / "left") if "down_proj" in n]
    error = refused("quantize", tmp_path / "src", tmp_path / "dst", "--remove-keys", "*_scale_inv", code=2)
    assert "matches no tensor" in error


def test_a_scale_that_is_no_number_is_said_so(tmp_path: Path) -> None:
    coded(tmp_path / "src", np.full((3, 2), np.nan, np.float32), (300, 256), {"architectures": ["X"], **BLOCKS})
    error = refused("quantize", tmp_path / "src", tmp_path / "dst", "--to", "bf16")
    assert f"`{NAME}` is nan at [0, 0] when it is dequantized" in error
    assert "allow-nonfinite" not in error


def test_a_dtype_that_the_config_does_not_settle(tmp_path: Path) -> None:
    config = {"architectures": ["X"], "torch_dtype": "auto", **BLOCKS}
    coded(tmp_path / "src", np.ones((3, 2), np.float32), (300, 256), config)
    cast(tmp_path / "src", tmp_path / "dst", "--to", "bf16")
    assert read_all(tmp_path / "dst")[NAME].dtype == "BF16"


def test_mxfp4_of_gpt_oss_is_that_of_its_experts(tmp_path: Path) -> None:
    tensors: Tensors = {
        "model.layers.0.mlp.experts.gate_up_proj": weight(1, (2, 32, 64)),
        "model.layers.0.mlp.experts.down_proj": weight(2, (2, 32, 32)),
        "model.layers.0.self_attn.q_proj.weight": weight(3, (64, 32)),
    }
    config = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 2}
    save_hf(tmp_path / "src", tensors, config)
    mxfp4 = ("--recipe", "mxfp4")
    refused("quantize", tmp_path / "src", tmp_path / "dst", *mxfp4, "--keep-preset", "none", code=2)
    cast(tmp_path / "src", tmp_path / "dst", *mxfp4)
    assert "model.layers.0.mlp.experts.down_proj_blocks" in read_all(tmp_path / "dst")


INTEGERS: dict[str, dict[str, Any]] = {
    "blocks": {"quant_method": "blockwise_int8", "weight_block_size": [128, 128]},
    "groups": {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 128}}},
    },
}


@pytest.mark.parametrize("quant", INTEGERS)
def test_integers_are_no_fp8(quant: str, tmp_path: Path) -> None:
    grid = (2, 2) if quant == "blocks" else (256, 2)
    tensors = {NAME: Raw("I8", np.ones((256, 256), np.uint8)), f"{NAME}_scale_inv": stored("F32", np.ones(grid))}
    save_hf(tmp_path / "src", tensors, {"architectures": ["X"], "quantization_config": INTEGERS[quant]})
    for options in (("--to", "bf16"), ("--recipe", "channel")):
        error = refused("quantize", tmp_path / "src", tmp_path / "dst", *options)
        assert f"`{NAME}` is I8 with scales: integers" in error
    # What is stored has its size all the same.
    done = ckpttool("size", tmp_path / "src", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["bytes"] == 256 * 256 + 4 * grid[0] * grid[1]
    assert ckpttool("size", tmp_path / "src", "--recipe", "channel").code == 1
