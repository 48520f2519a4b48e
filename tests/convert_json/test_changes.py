"""Two runs at once, and a program that changes while it is repaired."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckpttool.errors import CorruptError, OutputError
from ckpttool.execute import durable
from ckpttool.ops.convert_json import check

FIXTURES = Path(__file__).parents[2] / "fixtures/paddle_programs"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    shutil.copytree(FIXTURES / "nan_attr", tmp_path / "src")
    return tmp_path / "src/model.json"


def test_a_program_that_changes(tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    respell = check._respell

    def changing(src: Path, fd: int, out: Path) -> int:
        count = respell(src, fd, out)
        with src.open("ab") as f:
            f.write(b"\n")
        return count

    monkeypatch.setattr(check, "_respell", changing)
    with pytest.raises(CorruptError, match="the program changed while it was read"):
        check.repair(program, tmp_path / "fixed.json")
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize("force", [True, False])
def test_an_output_that_appears(tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch, force: bool) -> None:
    """Of two runs without --force the second must not replace what the first has just made."""
    out = tmp_path / "fixed.json"
    sync = durable.Replacement.sync

    def late(new: durable.Replacement) -> None:
        out.write_text("another run's")
        sync(new)

    monkeypatch.setattr(durable.Replacement, "sync", late)
    if force:
        check.repair(program, out, force=True)
        assert out.read_text() != "another run's"
    else:
        with pytest.raises(OutputError, match="appeared during the run"):
            check.repair(program, out)
        assert out.read_text() == "another run's"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fixed.json", "src"]
