"""docs/coming-from.md: the command lines of other tools and those beside them give the same tensors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.docs.runner import ROOT, Block, Session, blocks, commands

PAGE = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")


def run_section(title: str, folder: Path) -> list[Block]:
    """Run the console blocks of a section in a folder, as the page's test does; the blocks."""
    (text,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    session, found = Session(folder), [block for block in blocks(text) if block.language == "console"]
    for block in found:
        for command in commands(block):
            assert session.run(command).status == command.status, command.text
    return found


def theirs(folder: Path, *words: str) -> None:
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    assert got
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def test_mergekit(tmp_path: Path) -> None:
    run_section("mergekit", tmp_path)
    theirs(tmp_path, "-m", "mergekit.scripts.run_yaml", "recipe.yml", "theirs", "--quiet", "--no-write-model-card")
    same(tensors(tmp_path / "merged"), tensors(tmp_path / "theirs"))


def test_zero_to_fp32(tmp_path: Path) -> None:
    run_section("zero_to_fp32.py", tmp_path)
    script = "deepspeed.utils.zero_to_fp32"
    theirs(tmp_path, "-W", "ignore", "-m", script, "fixtures/torch/deepspeed/rr", "theirs", "--safe_serialization")
    got, want, weights = (tensors(tmp_path / folder) for folder in ("fp32", "theirs", "weights"))
    without = got.keys() - want.keys()  # the script leaves out what has no master weight
    assert without == {"embed.weight", "blocks.1.up.bias"}
    same({name: tensor for name, tensor in got.items() if name not in without}, want)
    same({name: got[name] for name in without}, {name: weights[name].float() for name in without})
