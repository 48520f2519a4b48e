"""Pipeline stages of every target: what layers cannot fill is refused, and the result says how many there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.command import refused, reshard

SOURCE = Path(__file__).parents[2] / "fixtures/hf_tiny_source"
TARGETS = ["ranks", "vllm", "trtllm", "unified", "hybrid", "flex", "megatron-dist", "megatron"]


@pytest.mark.parametrize("target", TARGETS)
def test_more_stages_than_layers(target: str, tmp_path: Path) -> None:
    said = refused(SOURCE, tmp_path / "out", "--to", target, "--pp-out", 3)
    assert "2 layers cannot fill 3 pipeline stages" in said
    assert "use at most 2 stages: --pp-out 2" in said


@pytest.mark.parametrize("target", TARGETS)
def test_a_layout_of_other_layers(target: str, tmp_path: Path) -> None:
    said = refused(SOURCE, tmp_path / "out", "--to", target, "--pp-layout", "1,2")
    assert "places 3 layers, the model has 2" in said


@pytest.mark.parametrize("target", ["megatron-dist", "megatron"])
def test_virtual_stages_of_other_layers(target: str, tmp_path: Path) -> None:
    said = refused(SOURCE, tmp_path / "out", "--to", target, "--pp-out", 2, "--pp-layout", "1,1,1,1")
    assert "places 4 layers, the model has 2" in said


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize("target", TARGETS)
def test_the_result_says_all_sizes(target: str, dry: bool, tmp_path: Path) -> None:
    options = ("--to", target, "--pp-out", 2, "--tp-out", 2, *(["--dry-run"] if dry else []))
    done = reshard(SOURCE, tmp_path / "out", *options)
    assert f"{target}, tp 2, pp 2 (4 ranks)" in done.out + done.err
    mesh = json.loads(reshard(SOURCE, tmp_path / "json", *options, "--json").out)["target"]["mesh"]
    assert (mesh["tp"], mesh["pp"]) == (2, 2)


@pytest.mark.parametrize(
    "source",
    ["hf_tiny_source", "megatron/dist/llama_tp2", "paddle_unified/pf041_qwen2_bf16_tp2", "gguf/llama_q8_0",
     "dcp/titan_llama3/checkpoint", "torch/train", "torch/deepspeed/z1", "paddle_flex/tp2_dp2"],
)  # fmt: skip
@pytest.mark.parametrize("size", ["tp", "pp", "ep"])
def test_sizes_of_whole_tensors_are_those_of_dst(source: str, size: str, tmp_path: Path) -> None:
    """Some readers ignored them."""
    said = refused(SOURCE.parent / source, tmp_path / "out", "--to", "hf", f"--{size}", 2)
    assert f"--{size} 2 contradicts the checkpoint" in said
    assert f"did you mean --{size}-out 2? --{size} describes SRC" in said
