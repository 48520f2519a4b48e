"""What the hook of pre-commit makes of the files that it is given."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from ckpttool.cli.pre_commit import checkpoints, main

ROOT = Path(__file__).parents[2]


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["ckpttool-pre-commit", *map(str, words)])
    return main()


def test_files_of_one_checkpoint_are_one(tmp_path: Path) -> None:
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "config.json"):
        (tmp_path / name).touch()
    (tmp_path / "alone").mkdir()
    files = [str(p) for p in tmp_path.glob("*.safetensors")] + [str(tmp_path / "alone/x.safetensors")]
    assert checkpoints(files) == [tmp_path, tmp_path / "alone/x.safetensors"]


def test_sound_and_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(ROOT / "fixtures/hf_tiny_source", tmp_path / "m")
    file = tmp_path / "m/model.safetensors"
    assert run(monkeypatch, "--values", file) == 0
    assert capsys.readouterr().out == ""
    file.write_bytes(file.read_bytes()[:-10])
    assert run(monkeypatch, file, tmp_path / "m/model.safetensors.index.json") == 1
    assert "[truncated]" in capsys.readouterr().out


def test_a_pointer_of_git_lfs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    assert run(monkeypatch, tmp_path / "a.safetensors") == 1
    captured = capsys.readouterr()
    assert "git-lfs" in captured.out + captured.err


def test_an_option_that_it_does_not_have(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--valus", "x.safetensors") == 2
    assert "no option --valus" in capsys.readouterr().err
