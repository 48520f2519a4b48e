"""What a directory and this machine can do: the answers are those of the calls that runs use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpttool.execute import probes


def test_nothing_stays_behind_and_what_was_tried_is_known(tmp_path: Path) -> None:
    found = probes.look_at(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert found.refused == ""
    assert found.policy in ("direct", "uncached", "write-behind", "plain")
    tried = (found.reflinks, found.hard_links, found.locks, found.exchanges, found.sparse, found.case)
    assert set(tried) <= {True, False}
    assert found.locks  # two locks on one file exclude each other, wherever tests run
    assert found.free > 0


@pytest.mark.parametrize("call", ["_locks", "_links", "_exchanges", "_sparse"])
def test_what_fails_is_told(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, call, lambda *_: False)
    monkeypatch.setattr(probes, "share", lambda *_: "")
    found = probes.look_at(tmp_path)
    name = {"_locks": "locks", "_links": "hard_links", "_exchanges": "exchanges", "_sparse": "sparse"}[call]
    assert getattr(found, name) is False
    assert found.reflinks is False


def test_a_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**_: object) -> str:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr("tempfile.mkdtemp", refused)
    found = probes.look_at(tmp_path)
    assert (found.refused, found.locks) == ("Permission denied", None)


def test_limits_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / "slice" / "job"
    group.mkdir(parents=True)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "slice" / "cpu.max").write_text("150000 100000\n")
    (group / "cpu.max").write_text("400000 100000\n")
    (group / "memory.max").write_text(f"{1 << 28}\n")
    (group / "memory.current").write_text(f"{1 << 27}\n")
    (tmp_path / "slice" / "memory.max").write_text("max\n")
    monkeypatch.setattr(probes, "_groups", lambda _: iter([group, group.parent, tmp_path]))
    assert probes.quota() == 1.5
    assert probes.memory() == (1 << 27, 1 << 28)


def test_groups_of_both_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = tmp_path / "cgroup"
    said.write_text("5:cpu,cpuacct:/a\n4:memory:/b\n0::/c/d\n")
    monkeypatch.setattr(probes, "Path", lambda p: said if p == "/proc/self/cgroup" else Path(p))
    root = probes._CGROUP
    assert list(probes._groups("memory")) == [root / "memory/b", root / "memory", root / "c/d", root / "c", root]
