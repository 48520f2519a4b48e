"""What ``reshard`` says before and after: the plan, and the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.helpers.command import ckpttool

FIXTURE = Path(__file__).parents[2] / "fixtures" / "llama_tp8"


def sizes(folder: Path) -> dict[str, int]:
    return {p.name: p.stat().st_size for p in folder.iterdir()}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("written") / "out"
    assert ckpttool("reshard", FIXTURE, out, "--tp-out", 2).code == 0
    return out


def test_plan_as_json_is_what_is_written(written: Path, tmp_path: Path) -> None:
    done = ckpttool("reshard", FIXTURE, tmp_path / "out", "--tp-out", 2, "--dry-run", "--json", "--memory", "32MiB")
    plan: dict[str, Any] = json.loads(done.out)
    assert not (tmp_path / "out").exists()
    assert done.err == ""
    assert plan["schema"] == "ckpttool.plan/1"
    assert {f["name"]: f["bytes"] for f in plan["files"]} == sizes(written)
    ranks = {f["name"]: (f["kind"], f["ranks"]) for f in plan["files"] if f["ranks"]}
    assert ranks == {f"rank-{r:05d}-of-00002.safetensors": ("tensors", [r]) for r in range(2)}
    assert {f["kind"] for f in plan["files"]} == {"tensors", "carried"}
    assert plan["source"]["files"] == 8
    assert plan["source"]["mesh"]["tp"] == 8
    assert plan["target"]["mesh"]["tp"] == 2
    assert plan["target"]["bytes"] == sum(sizes(written).values())
    assert plan["boxes"] > 0
    assert plan["buffers"] == 32 << 20
    assert 32 << 20 < plan["peak_memory_estimate"] < 4 << 30


def test_plan_as_text(written: Path, tmp_path: Path) -> None:
    done = ckpttool("reshard", FIXTURE, tmp_path / "out", "--tp-out", 2, "-n")
    lines = [line.split("\t") for line in done.out.splitlines()]
    assert lines[0] == ["file", "bytes", "kind", "ranks"]
    assert {line[0]: int(line[1]) for line in lines[1:]} == sizes(written)
    assert "source  " in done.err
    assert "target  ranks, tp 2" in done.err
    assert "slices to copy" in done.err
    assert "at most, of which 67.11 MB are buffers (--memory)" in done.err


def test_plan_on_a_terminal_is_one_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpttool.report.text.on_terminal", lambda: True)
    done = ckpttool("reshard", FIXTURE, tmp_path / "out", "--tp-out", 2, "-n")
    assert done.out.startswith("source  ")
    assert "\t" not in done.out
    assert "419,712" not in done.err


def test_result_as_json(tmp_path: Path) -> None:
    done = ckpttool(
        "reshard",
        FIXTURE,
        tmp_path / "out",
        "--to",
        "hf",
        "--verify",
        "--manifest",
        "--json",
        "--max-shard-size",
        "200kB",
    )
    found: dict[str, Any] = json.loads(done.out)
    assert found["schema"] == "ckpttool.reshard/1"
    assert found["verified"] is True
    files = {f["name"]: f["bytes"] for f in found["files"]}
    assert files == {n: s for n, s in sizes(tmp_path / "out").items() if n != "ckpttool.manifest.json"}
    assert found["path"] == str(tmp_path / "out")
    assert found["bytes_written"] > 419_712
    assert found["bytes_resumed"] == 0
    assert found["seconds"] > 0
    assert len(found["checksums"]) == 39
    listed = ckpttool("inspect", tmp_path / "out", "--hash", "--json")
    digests = {t["name"]: t["digest"] for t in json.loads(listed.out)["list"]}
    assert {c["tensor"]: c["digest"] for c in found["checksums"]} == digests


def test_result_as_text(tmp_path: Path) -> None:
    done = ckpttool("reshard", FIXTURE, tmp_path / "out", "--to", "hf", "--verify", "-v")
    lines = done.out.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'out'}: hf, tp 1, 39 tensors in ")
    assert lines[1] == "verified: every element is equal to the source"
    assert "slices; writes: " in done.err


def test_notes_go_to_stderr_and_not_when_quiet(tmp_path: Path) -> None:
    loud = ckpttool("reshard", FIXTURE, tmp_path / "a", "--tp-out", 2)
    assert "note: " in loud.err
    assert "note: " not in loud.out
    quiet = ckpttool("reshard", FIXTURE, tmp_path / "b", "--tp-out", 2, "-q")
    assert (quiet.out, quiet.err) == ("", "")
    noted = json.loads(ckpttool("reshard", FIXTURE, tmp_path / "c", "--tp-out", 2, "--json").out)["notes"]
    assert [f"note: {n}" for n in noted] == [line for line in loud.err.splitlines() if line.startswith("note: ")]


def test_a_part_writes_what_its_dry_run_says(tmp_path: Path) -> None:
    """Archives of torch have checksums, so that a large tensor is one task; without a manifest, too."""
    src = tmp_path / "large.safetensors"
    save_file({"model.a.weight": np.zeros((1024, 600), np.float32), "model.b.weight": np.zeros(64, np.float32)}, src)
    for part in ("1/2", "2/2"):
        words = ["reshard", src, tmp_path / "out", "--to", "torch-bin", "--part", part, "--json"]
        planned, done = (json.loads(ckpttool(*words, *more).out) for more in (["--dry-run"], []))
        assert 0 <= done["bytes_written"] - planned["part_bytes"] < 20_000  # and what is not tensors
