"""Reports in files of their own: whole or as they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpttool.errors import OutputError
from ckpttool.report.files import save


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    save(path, "old", "the report")
    save(path, "näw", "the report")
    assert path.read_bytes() == "näw".encode()
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OutputError, match="the report cannot be written: No space left on device"):
        save(path, "new", "the report")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    link = tmp_path / "latest.html"
    link.symlink_to(tmp_path / "report.html")
    save(link, "new", "the report")
    assert link.is_symlink()
    assert (tmp_path / "report.html").read_text() == "new"


def test_a_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written: Is a directory"):
        save(tmp_path, "new", "the report")
    with pytest.raises(OutputError, match="No such file"):
        save(tmp_path / "none" / "x", "new", "the report")
