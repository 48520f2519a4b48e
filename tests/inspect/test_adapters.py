"""Adapters of PEFT are looked into like models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.command import ckpttool
from tests.inspect.models import edit_header, edit_json

LORA = Path("fixtures/merge/inputs/lora1")
A = "adapter/base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    shutil.copytree(LORA, tmp_path / "lora")
    return tmp_path / "lora"


def test_the_tree_begins_with_what_the_adapter_is() -> None:
    out = ckpttool("inspect", LORA).out.splitlines()
    assert out[0].startswith("LoRA adapter, rank 4, alpha 8, for ")
    assert out[0].endswith(", targets down_proj, q_proj, v_proj, 4,992 parameters, F32")
    assert any(line.split() == ["q_proj", "6", "6.14", "kB"] for line in out)


@pytest.mark.parametrize("option", ["--list", "--stats", "--hash"])
def test_tensors_of_an_adapter(option: str) -> None:
    done = ckpttool("inspect", LORA, option, "--filter", A)
    assert (done.code, len(done.out.splitlines())) == (0, 2), done.err
    assert done.out.splitlines()[1].startswith(f"{A}\tF32\t[4, 64]\t")


def test_the_file_itself_is_the_adapter() -> None:
    file = ckpttool("inspect", LORA / "adapter_model.safetensors")
    assert file.out.splitlines()[0] == ckpttool("inspect", LORA).out.splitlines()[0]


def test_an_adapter_equals_itself_and_no_other(lora: Path) -> None:
    assert ckpttool("inspect", lora, "--diff", LORA, "--values").code == 0
    edit_header(lora / "adapter_model.safetensors", lambda h: h.update({"x": h.pop(A.removeprefix("adapter/"))}))
    assert ckpttool("inspect", lora, "--diff", LORA, "--values").code == 3


def ids(folder: Path) -> list[str]:
    return [f["id"] for f in json.loads(ckpttool("inspect", folder, "--check", "--json").out)["findings"]]


def test_a_sound_adapter_has_no_findings() -> None:
    assert ids(LORA) == []


def test_a_rank_that_contradicts_the_tensors_is_found(lora: Path) -> None:
    edit_json(lora / "adapter_config.json", lambda c: c.update(r=8))
    assert ids(lora) == ["conflict"]


def test_a_truncated_adapter_is_found(lora: Path) -> None:
    path = lora / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    assert ids(lora) == ["truncated"]


def test_a_kind_that_is_not_merged_is_shown_all_the_same(lora: Path) -> None:
    edit_json(lora / "adapter_config.json", lambda c: c.update(use_dora=True))
    assert ckpttool("inspect", lora).out.startswith("DoRA adapter, rank 4, ")
    assert ids(lora) == ["adapter-kind"]
