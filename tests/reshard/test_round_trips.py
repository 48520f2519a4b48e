"""1 -> 8 -> 2 -> 4 -> 1 ranks and back to the same bits, for every family; every element encodes its origin."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.command import reshard
from tests.helpers.families import LAYERS, MODELS, Model
from tests.helpers.tensorfile import Tensors, assert_same, read, read_all, save_hf

FUSED = {"phi3", "gpt_neox", "gpt2", "gpt2_published"}
"""Published with fused tensors: these are first taken apart, the others first fused."""


def source(model: Model, folder: Path) -> Tensors:
    tensors = model.tensors()
    save_hf(folder, tensors, model.config)
    return tensors


def chain(start: Path, *steps: tuple[object, ...]) -> Path:
    """One reshard after the other; returns the last output."""
    at = start
    for i, options in enumerate(steps):
        to = start.with_name(f"step{i}")
        reshard(at, to, "-q", *options)
        at = to
    return at


def meshes(model: Model) -> list[tuple[object, ...]]:
    """8, then 2 x 2 stages, then 4, each with experts over other ranks."""
    uneven = ("--pp-out", 2, "--pp-layout", f"{LAYERS - 1},1")
    if not model.moe:
        return [
            ("--tp-out", 8),
            ("--tp-out", 2, *uneven),
            ("--tp-out", 4, "--pp-out", 1),
        ]
    return [
        ("--tp-out", 8),
        ("--tp-out", 2, "--ep-out", 4, "--etp-out", 1, *uneven),  # six experts on four ranks: 2, 2, 1, 1
        ("--tp-out", 4, "--pp-out", 1, "--ep-out", 2, "--etp-out", 2),
    ]


# Models times ways: half of the models go one of the ways here, test_contents.py meets every model.
@pytest.mark.sample("llama", "phi3", "ernie4_5_moe")
@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    tensors = source(model, tmp_path / "src")
    last = chain(tmp_path / "src", *meshes(model), ("--to", "hf"))
    assert_same(read_all(last), tensors)


@pytest.mark.sample("gpt2", "qwen3_moe@transformers", "deepseek_v2")
@pytest.mark.parametrize("name", MODELS)
def test_round_trip_fused(name: str, tmp_path: Path) -> None:
    """The names change on the way; the target's own names bring back what was published."""
    model = MODELS[name]
    tensors = source(model, tmp_path / "src")
    first, second, _ = meshes(model)
    last = chain(tmp_path / "src", (*first, "--unfuse" if name in FUSED else "--fuse"), second, ("--to", "hf"))
    assert_same(read_all(last), tensors)


@pytest.mark.sample("deepseek_v3_fp8")
@pytest.mark.parametrize("name", ["llama", "phi3", "gpt_neox", "deepseek_v3_fp8"])
def test_fused_and_taken_apart_again(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    tensors = source(model, tmp_path / "src")
    there, back = ("--unfuse", "--fuse") if name in FUSED else ("--fuse", "--unfuse")
    last = chain(tmp_path / "src", ("--tp-out", 8, there), ("--tp-out", 2, back), ("--tp-out", 4), ("--to", "hf"))
    assert_same(read_all(last), tensors)
    for rank in range(4):
        names = read(last.with_name("step2") / f"rank-{rank:05d}-of-00004.safetensors").keys()
        assert names == tensors.keys()
