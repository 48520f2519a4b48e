"""Reports in files of their own: whole or as they were."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckpttool.errors import OutputError
from ckpttool.report.files import save
from tests.helpers.command import ckpttool
from tests.helpers.tensorfile import Raw, write


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    save(path, "old", "the report", "")
    save(path, "näw", "the report", "")
    assert path.read_bytes() == "näw".encode()
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OutputError, match="the report cannot be written: No space left on device"):
        save(path, "new", "the report", "")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    link = tmp_path / "latest.html"
    link.symlink_to(tmp_path / "report.html")
    save(link, "new", "the report", "")
    assert link.is_symlink()
    assert (tmp_path / "report.html").read_text() == "new"


def test_a_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written: Is a directory"):
        save(tmp_path, "new", "the report", "")
    with pytest.raises(OutputError, match="No such file"):
        save(tmp_path / "none" / "x", "new", "the report", "")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "link"])
@pytest.mark.parametrize(
    "options",
    [["--html"], ["--ranks", "--svg"], *[["--check", "--findings", k] for k in ("sarif", "junit", "gitlab", "github")]],
)
def test_no_output_replaces_the_checkpoint(tmp_path: Path, options: list[str], name: str) -> None:
    write(tmp_path / "model.safetensors", {"a": Raw("F32", np.ones((2, 2), np.uint32))})
    (tmp_path / "config.json").write_text('{\n  "architectures": ["X"]\n}')
    (tmp_path / "link").symlink_to("model.safetensors")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    *rest, last = options
    file = [f"{last}={tmp_path / name}"] if rest[-1:] == ["--findings"] else [last, str(tmp_path / name)]
    done = ckpttool("inspect", tmp_path, *rest, *file)
    assert (done.code, "would replace a file that" in done.err) == (1, True), done.err
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_the_report_of_a_merge_replaces_no_source(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        write(tmp_path / name / "model.safetensors", {"a": Raw("F32", np.ones((2, 2), np.uint32))})
    model = tmp_path / "a" / "model.safetensors"
    before = model.read_bytes()
    done = ckpttool("merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out", "--report", model)
    assert (done.code, "would replace a file that is not a report" in done.err) == (1, True), done.err
    assert model.read_bytes() == before
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["sarif", "junit", "gitlab", "github"])
def test_findings_are_written_again(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "model.safetensors", {"a": Raw("F32", np.ones((2, 2), np.uint32))})
    (tmp_path / "config.json").write_text('{"architectures": ["X"]}')
    for _ in range(2):
        done = ckpttool("inspect", tmp_path, "--check", "--findings", f"{kind}={tmp_path / 'found'}")
        assert (done.code, done.err) == (0, "")
