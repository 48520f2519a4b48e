"""A model without config.json, or with one that no family knows: one error for every target that must know it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.command import refused, reshard
from tests.helpers.dcp import write_save
from tests.helpers.tensorfile import Raw, header, save_hf

HF = Path(__file__).parents[2] / "fixtures/hf_tiny_source"
TARGETS = ["vllm", "deepseek", "trtllm", "unified", "hybrid", "zcc", "flex", "meta", "megatron-dist", "megatron"]


@pytest.fixture(params=["directory", "safetensors", "bin", "dcp"])
def bare(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The tensors of a Llama, and nothing that says so."""
    folder = tmp_path / "bare"
    folder.mkdir()
    if request.param == "dcp":
        held = {n: (t["dtype"], tuple(t["shape"])) for n, t in header(HF / "model.safetensors").items() if n[0] != "_"}
        write_save(folder, {n: (d, s, [((0,) * len(s), s, 0)]) for n, (d, s) in held.items()})
        return folder
    if request.param == "bin":
        reshard(HF, tmp_path / "whole", "--to", "torch-bin")
        (tmp_path / "whole/pytorch_model.bin").rename(folder / "pytorch_model.bin")
        return folder / "pytorch_model.bin"
    (folder / "model.safetensors").write_bytes((HF / "model.safetensors").read_bytes())
    return folder / "model.safetensors" if request.param == "safetensors" else folder


@pytest.mark.parametrize("options", [*([("--to", t)] for t in TARGETS), [("--to", "ranks"), ("--tp-out", 2)]])
def test_without_a_config(options: list[tuple[object, ...]], bare: Path, tmp_path: Path) -> None:
    said = refused(bare, tmp_path / "out", *(o for pair in options for o in pair))
    assert said.startswith("error: config.json is missing, and ")
    assert said.splitlines()[0].endswith("on the model")
    folder = bare.parent if bare.is_file() else bare
    assert f"--> {folder}/config.json\n" in said
    assert "hint: put the model's config.json there, or pass --family llama" in said
    assert "namings" not in said


@pytest.mark.parametrize("target", TARGETS)
def test_a_model_that_no_family_knows(target: str, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((HF / "model.safetensors").read_bytes())
    config = json.loads((HF / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "lemur", "architectures": ["Lemur"]}))
    said = refused(folder, tmp_path / "out", "--to", target)
    assert "config.json names no known model (model_type `lemur`), and " in said
    assert "if the model is built like those of a family with such names: --family llama" in said


@pytest.mark.parametrize("target", ["vllm", "megatron-dist", "megatron", "meta", "unified", "trtllm"])
def test_a_family_alone_is_not_enough(target: str, tmp_path: Path) -> None:
    """The rules of a family need the sizes of the model, and readers of Paddle's files its config."""
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((HF / "model.safetensors").read_bytes())
    said = refused(folder, tmp_path / "out", "--to", target, "--family", "llama")
    assert said.startswith("error: config.json is missing, and ")
    assert f"--> {folder}/config.json\n" in said
    assert "hint: put the model's config.json there\n" in said


def test_a_config_without_a_size(tmp_path: Path) -> None:
    folder = tmp_path / "less"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((HF / "model.safetensors").read_bytes())
    config = json.loads((HF / "config.json").read_text())
    del config["num_attention_heads"], config["num_key_value_heads"]
    (folder / "config.json").write_text(json.dumps(config))
    said = refused(folder, tmp_path / "out", "--to", "vllm")
    assert said.startswith("error: config.json does not give the size `heads`\n")
    assert f"--> {folder}/config.json\n" in said


def test_reading_the_names_of_vllm_without_a_config(tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    shutil.copytree(HF.parent / "vllm_sharded_tp2", folder)
    (folder / "config.json").unlink()
    said = refused(folder, tmp_path / "out", "--to", "hf")
    assert said.startswith("error: config.json is missing, and the names of vllm depend on the model\n")


def test_integers_that_paddle_reads_as_bfloat16(tmp_path: Path) -> None:
    source = save_hf(tmp_path / "src", {"a.table": Raw("U16", np.arange(12, dtype=np.uint16))})
    said = refused(source, tmp_path / "out", "--to", "unified")
    assert said.startswith("error: `a.table` is U16, and Paddle would read it as BF16\n")
