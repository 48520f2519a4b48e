"""``ckpttool doctor``: a line for each point, and exit 3 where no run can work."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ckpttool.execute import probes
from ckpttool.ops import doctor
from ckpttool.report.doctor import document
from ckpttool.report.render import show
from tests.helpers.command import ckpttool


@pytest.fixture(autouse=True)
def _nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No login of whoever runs the tests counts."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "HF_", "STORAGE_EMULATOR")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))


def points(*arguments: object) -> tuple[int, dict[str, dict[str, str]]]:
    done = ckpttool("doctor", *arguments, "--json")
    made = json.loads(done.out)
    assert made["schema"] == "ckpttool.doctor/1"
    assert made["ok"] == (done.code == 0)
    return done.code, {p["id"]: p for p in made["points"]}


def test_a_directory_of_this_machine(tmp_path: Path) -> None:
    code, found = points(tmp_path)
    assert code == 0
    assert found["space"]["verdict"] == "ok"
    assert found["locks"]["text"] == "concurrent runs to the same DST are blocked"
    assert found["cores"]["verdict"] in ("ok", "slow")


def test_a_directory_that_is_to_be_made(tmp_path: Path) -> None:
    code, found = points(tmp_path / "a" / "b")
    assert code == 0
    assert found["filesystem"]["text"].startswith(f"{tmp_path}: ")
    assert not (tmp_path / "a").exists()


def test_lines_and_what_quiet_leaves_out(tmp_path: Path) -> None:
    lines = ckpttool("doctor", tmp_path).out.splitlines()
    assert lines[0] == "ready"
    assert "  ok       locks               concurrent runs to the same DST are blocked" in lines
    quiet = ckpttool("doctor", tmp_path, "-q").out
    assert "  ok " not in quiet


def test_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = probes.Filesystem("ext4", "/", 10**12, None, refused="Read-only file system")
    monkeypatch.setattr(probes, "look_at", lambda _: there)
    code, found = points(tmp_path)
    assert code == 3
    assert found["writing"]["text"] == "not writable: Read-only file system"
    assert ckpttool("doctor", tmp_path).out.startswith(
        "not ready: not writable: Read-only file system; reading works; choose another directory for DST\n"
    )
    assert "locks" not in found


def test_a_poor_filesystem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = probes.Filesystem("fuse", "/mnt", 10**12, 10, "", "plain", *[False] * 6)
    monkeypatch.setattr(probes, "look_at", lambda _: there)
    code, found = points(tmp_path)
    assert code == 0
    names = ("files", "writing", "links", "locks", "exchange", "sparse", "case")
    assert [found[n]["verdict"] for n in names] == ["slow", "slow", "slow", "missing", "slow", "slow", "slow"]


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "look_at", lambda _: probes.Filesystem("ext4", "/", 1000, None, refused=""))
    monkeypatch.setattr(doctor, "_abilities", lambda _: iter(()))
    assert points(tmp_path)[0] == 3


def test_a_small_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "memory", lambda: (1 << 28, 1 << 29))
    monkeypatch.setattr(doctor, "cores", lambda: 64)
    monkeypatch.setattr(probes, "quota", lambda: 2.0)
    monkeypatch.setattr(probes, "processor", lambda: frozenset({"sse2"}))
    code, found = points(tmp_path)
    assert code == 0
    assert [found[n]["verdict"] for n in ("memory", "cores", "processor")] == ["slow"] * 3
    assert found["cores"]["hint"].startswith("--workers 2 ")


def test_what_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_there", lambda module: module == "huggingface_hub")
    code, found = points(tmp_path)
    assert code == 0
    said = ckpttool("doctor", tmp_path).out.splitlines()
    assert any(line.startswith("optional, not set up: ") and "boto3" in line for line in said[:3])
    assert found["boto3"]["hint"] == "pip install 'ckpttool[remote]'"
    assert "s3" not in found
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "xxhash" else "1")
    code, found = points(tmp_path)
    assert (code, found["packages"]["hint"]) == (3, "pip install xxhash")


def test_logins_are_found_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert points(tmp_path)[1]["s3"]["verdict"] == "missing"
    assert "AWS_EC2_METADATA_DISABLED" not in os.environ
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET")
    monkeypatch.setenv("HF_TOKEN", "hf_SECRET")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountKey=SECRET")
    done = ckpttool("doctor", tmp_path, "--json")
    assert "SECRET" not in done.out
    found = {p["id"]: p for p in json.loads(done.out)["points"]}
    assert [found[n]["verdict"] for n in ("hf", "s3", "gs", "az")] == ["ok", "ok", "missing", "ok"]


def test_a_place_elsewhere_is_asked_only_online() -> None:
    code, found = points("hf://nobody/nothing")
    assert code == 0
    assert found["place"]["text"] == "hf://nobody/nothing: not checked (--online does)"


def test_modules_of_clouds_are_named_as_they_are_imported() -> None:
    assert {m for m, _, _ in doctor.EXTRAS} >= {"boto3", "google.auth", "azure.storage.blob", "ray", "torch"}
    assert not doctor._there("no_such_package.below")
    assert doctor._there("json")


def test_a_terminal_is_not_overrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("ckpttool.report.text.on_terminal", lambda: True)
    found = [doctor.Point("place", "space", "ok", "word " * 30), doctor.Point("python", "x", "wrong", "", "hint " * 30)]
    show(document(doctor.MachineHealth(tmp_path, found)))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.count("word") for line in lines) == 30
