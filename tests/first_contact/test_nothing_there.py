"""Checkpoints without a tensor, indexes that name no file, and elements that cannot be named so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.command import ckpttool
from tests.helpers.tensorfile import origin, write

COMMANDS: dict[str, list[str]] = {
    "reshard": ["reshard", "{src}", "{dst}", "--to", "hf"],
    "ranks": ["reshard", "{src}", "{dst}", "--tp-out", "2"],
    "merge": ["merge", "{src}", "-o", "{dst}"],
    "drop-keys": ["drop-keys", "{src}", "{dst}", "lm_head.*"],
    "fp8-cast": ["fp8-cast", "{src}", "{dst}"],
    "fp8-size": ["fp8-size", "{src}"],
    "show": ["inspect", "{src}", "--show", "a.weight[0]"],
    "diff": ["inspect", "{src}", "--diff", "{other}"],
    "diff, turned": ["inspect", "{other}", "--diff", "{src}"],
}


@pytest.fixture
def other(tmp_path: Path) -> Path:
    write(tmp_path / "other/model-00001-of-00001.safetensors", {"a.weight": origin(1, "F32", (2, 3))})
    return tmp_path / "other"


@pytest.mark.parametrize("command", COMMANDS)
def test_no_tensors(tmp_path: Path, other: Path, command: str) -> None:
    """One error that says so, whatever is asked for."""
    src = write(tmp_path / "src/model.safetensors", {}, {"format": "pt"}).parent
    done = ckpttool(*[w.format(src=src, dst=tmp_path / "dst", other=other) for w in COMMANDS[command]])
    assert done.code == 1
    assert done.err == (
        f"error: the checkpoint holds no tensors\n  --> {src}\n\n"
        "hint: its files have headers and nothing else: save or fetch it again\n"
    )
    assert not (tmp_path / "dst").exists()


def test_an_index_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {}, "weight_map": {}}')
    done = ckpttool("inspect", tmp_path)
    assert done.code == 1
    assert "there are no model weights here" in done.err
    assert "hint: model.safetensors.index.json is here, and no file that it could be of: fetch the shards" in done.err


@pytest.mark.parametrize(
    ("file", "why"),
    [
        ("", "which is not a name"),
        (".", "which is a directory"),
        ("..", "which is outside of the checkpoint"),
        ("/etc/passwd", "which is outside of the checkpoint"),
        ("sub/model.safetensors", "which is outside of the checkpoint"),
    ],
)
def test_an_index_that_names_no_file(other: Path, file: str, why: str) -> None:
    index = other / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a.weight": file}}))
    done = ckpttool("reshard", other, other.parent / "dst", "--to", "hf")
    assert done.code == 1
    assert f"error: the index says that `a.weight` is in `{file}`, {why}\n  --> {index}\n" in done.err
    checked = ckpttool("inspect", other, "--check")
    assert checked.code == 3
    assert f"the index names `{file}`, {why}" in checked.out + checked.err
    assert ckpttool("inspect", other, "--write-index").code == 0  # what the hint says
    assert ckpttool("reshard", other, other.parent / "dst", "--to", "hf").code == 0


@pytest.mark.parametrize("index", ["[[0, 1]]", "[[0], [1]]", "[:, [0, 1]]", "[(0, 1)]", "[0", "[:][0]", "[[[0]]]"])
def test_elements_in_lists(other: Path, index: str) -> None:
    """The tensor is there; it is the index that cannot be."""
    done = ckpttool("inspect", other, "--show", f"a.weight{index}")
    assert done.code == 2
    assert "behind the name comes one index in brackets, without lists in it" in done.err
    assert "'a.weight[:2, -1]'" in done.err


def test_names_with_brackets(tmp_path: Path) -> None:
    tensors = {"a[0]": origin(1, "F32", (2,)), "a": origin(2, "F32", (3,))}
    write(tmp_path / "model.safetensors", tensors)
    assert "F32 [2]" in ckpttool("inspect", tmp_path, "--show", "a[0]").out
    assert "F32 [1] of [2]" in ckpttool("inspect", tmp_path, "--show", "a[0][1:]").out
