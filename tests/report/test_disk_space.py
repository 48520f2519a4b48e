"""--dry-run says what disk space is needed, and a run that has too little writes nothing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckpttool.execute.destinations.local import SLACK
from tests.helpers.command import ckpttool, refused, reshard

SOURCE = Path(__file__).parents[2] / "fixtures/hf_tiny_source"


def full(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free, f_frsize=1))


@pytest.mark.parametrize("command", ["reshard", "merge", "quantize", "drop-keys"])
def test_what_is_needed_is_what_is_written(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = shutil.copytree(SOURCE, tmp_path / "other")
    before, after = {"merge": ([other, "-o"], []), "drop-keys": ([], ["*norm*"])}.get(command, ([], []))
    words = (command, SOURCE, *before, tmp_path / "out", *after)
    plan = json.loads(ckpttool(*words, "--dry-run", "--json").out)
    disk, names = plan["disk"], [f["name"] for f in plan["files"]]
    assert ckpttool(*words).code == 0
    assert disk["needed"] == sum((tmp_path / "out" / n).stat().st_size for n in names)  # a merge adds its record
    assert (disk["fits"], disk["replaces"]) == (True, False)
    full(monkeypatch, disk["needed"] + SLACK)
    assert json.loads(ckpttool(*words, "--dry-run", "--json").out)["disk"]["fits"] is True
    full(monkeypatch, disk["needed"] + SLACK - 1)
    done = ckpttool(*words, "--dry-run", "--json")
    assert json.loads(done.out)["disk"] == disk | {"free": disk["needed"] + SLACK - 1, "fits": False, "replaces": True}


def test_a_run_without_space_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full(monkeypatch, 1 << 20)
    done = ckpttool("reshard", SOURCE, tmp_path / "out", "--dry-run", merged=True)
    assert done.code == 0
    assert "warning: not enough disk space: DST needs " in done.out
    assert ", 1.05 MB are free; this run would fail" in done.out
    assert "not enough space" in refused(SOURCE, tmp_path / "out")


def test_a_replaced_output_stays_until_the_end(tmp_path: Path) -> None:
    reshard(SOURCE, tmp_path / "out")
    done = ckpttool("reshard", SOURCE, tmp_path / "out", "--dry-run", "--force", merged=True)
    assert "; the old DST stays until the new one is complete" in done.out


def test_nothing_is_claimed_of_other_machines_and_absent_directories(tmp_path: Path) -> None:
    for dst, line in (("s3://bucket/out", "upload  "), (tmp_path / "no/out", "disk    needs ")):
        done = ckpttool("reshard", SOURCE, dst, "--dry-run", merged=True)
        assert line in done.out
        assert "free" not in done.out
        disk = json.loads(ckpttool("reshard", SOURCE, dst, "--dry-run", "--json").out)["disk"]
        assert (disk["free"], disk["fits"]) == (None, None)
