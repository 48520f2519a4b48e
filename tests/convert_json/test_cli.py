"""``ckpttool convert-json`` as scripts call it, and the other commands with a program."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.convert_json.programs import usual, write
from tests.helpers.command import ckpttool

PROGRAMS = Path(__file__).parents[2] / "fixtures/paddle_programs"
PIR = PROGRAMS / "pir/model.json"


def ok(*arguments: object) -> str:
    done = ckpttool(*arguments)
    assert done.code == 0, done.err
    return done.out


def answer(*arguments: object, code: int = 0) -> dict[str, Any]:
    done = ckpttool(*arguments, "--json")
    assert done.code == code, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def refused(*arguments: object, code: int = 2) -> str:
    done = ckpttool(*arguments)
    assert done.code == code
    assert done.err.startswith("error: ")
    return done.err


# -- there and back


def test_there_and_back(tmp_path: Path) -> None:
    out = ok("convert-json", PIR, tmp_path / "m.safetensors", "--names", PROGRAMS / "model.pdparams")
    assert "9 tensors" in out
    assert "verified" in out
    said = answer("convert-json", tmp_path / "m.safetensors", tmp_path / "back", "--program", PIR)
    assert said["schema"] == "ckpttool.convert/1"
    assert (said["direction"], said["tensors"], said["renamed"], said["verified"]) == ("to program", 9, 9, True)
    assert (tmp_path / "back/model.pdiparams").read_bytes() == PIR.with_suffix(".pdiparams").read_bytes()


def test_dry_run(tmp_path: Path) -> None:
    out = ok("convert-json", PIR, tmp_path / "m.safetensors", "--names", PROGRAMS / "model.pdparams", "--dry-run")
    assert "fc1.weight\tlinear_0.w_0\tF32\t[8, 16]\t512\n" in out
    said = answer("convert-json", PIR, tmp_path / "m", "--names", PROGRAMS / "model.pdparams", "-n")
    assert {"name": "ids", "parameter": "eager_tmp_0", "dtype": "I64", "shape": [4], "bytes": 32} in said["list"]
    assert list(tmp_path.iterdir()) == []
    ok("convert-json", PIR, tmp_path / "m.safetensors", "--names", PROGRAMS / "model.pdparams", "-q")
    back = ok("convert-json", tmp_path / "m.safetensors", tmp_path / "back", "--program", PIR, "-n")
    assert "fc1.weight\tlinear_0.w_0\tF32" in back
    assert not (tmp_path / "back").exists()


def test_quiet(tmp_path: Path) -> None:
    done = ckpttool("convert-json", PIR, tmp_path / "m.safetensors", "-q")
    assert (done.code, done.out, done.err) == (0, "", "")
    done = ckpttool("convert-json", PIR, "--check", "-q")
    assert (done.code, done.out, done.err) == (0, "", "")


@pytest.mark.parametrize(
    "words",
    [
        [PIR],
        [PIR, "out", "--check"],
        [PIR, "out", "--program", PIR, "--check"],
        [PIR, "--check", "--max-shard-size", "1MB"],
        [PIR, "--check", "--resume"],
        [PIR, "--check", "--dry-run"],
        [PIR, "out.safetensors", "--max-shard-size", "1MB"],
        ["m.safetensors", "out", "--program", PIR, "--params", "x"],
        ["m.safetensors", "out", "--program", PIR, "--max-shard-size", "1MB"],
        ["m.safetensors", "out"],
        ["none.json", "out"],
        [PROGRAMS / "nan.json", "out"],
    ],
    ids=lambda words: " ".join(str(w).rsplit("/", maxsplit=1)[-1] for w in words),
)
def test_what_makes_no_sense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[object]) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"a": np.zeros(3, np.float32)}, "m.safetensors")
    error = refused("convert-json", *words)
    assert "hint: " in error or "does not exist" in error or "has no effect" in error or "takes no" in error
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


# -- checks


def test_one_line_per_finding_and_exit_code_3(tmp_path: Path) -> None:
    shutil.copy(PIR, tmp_path)
    (tmp_path / "model.pdiparams").write_bytes(PIR.with_suffix(".pdiparams").read_bytes()[:-7])
    done = ckpttool("convert-json", tmp_path / "model.json", "--check")
    assert done.code == 3
    lines = done.out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"error params-truncated: {tmp_path / 'model.pdiparams'}: byte 1,700: ")
    assert lines[1].endswith("1 error, 0 warnings in 21 operators, 9 parameters, 8 records")
    said = answer("convert-json", tmp_path / "model.json", "--check", code=3)
    assert said["ok"] is False
    assert [f["id"] for f in said["findings"]] == ["params-truncated"]
    assert refused("convert-json", tmp_path / "model.json", tmp_path / "out", code=1)


def test_a_sound_program() -> None:
    out = ok("convert-json", PIR, "--check")
    assert out == f"{PIR}: 0 errors, 0 warnings in 21 operators, 9 parameters, 9 records\n"
    assert answer("convert-json", PIR, "--check")["ok"] is True


def test_the_repair_is_checked(tmp_path: Path) -> None:
    """With the parameters of the program that was repaired."""
    done = ckpttool("convert-json", PROGRAMS / "nan_attr/model.json", "--check", "--fix", tmp_path / "fixed.json")
    assert done.code == 0
    assert "1 attribute repaired" in done.err
    assert "2 records" in done.out
    said = answer("convert-json", PROGRAMS / "nan_attr/model.json", "--fix", tmp_path / "fixed.json", "--force")
    assert said["repaired"] == {"path": str(tmp_path / "fixed.json"), "attributes": 1}
    assert "exists" in refused("convert-json", PROGRAMS / "nan.json", "--fix", tmp_path / "fixed.json", code=1)


# -- the other commands


def test_inspect(tmp_path: Path) -> None:
    out = ok("inspect", PIR)
    assert "model.json: program, 1 file\n9 tensors" in out
    assert "PIR version 4, 21 operators in 1 block: 9 builtin.parameter" in out
    assert "  out fetch_name_0 F32 [-1, 4]" in out
    said = answer("inspect", PIR.parent)
    assert said["program"]["inputs"] == [{"name": "x", "dtype": "I64", "shape": [-1, 5]}]
    assert answer("inspect", PROGRAMS / "legacy/model.pdmodel")["program"]["kind"] == "pdmodel"
    assert answer("inspect", PROGRAMS / "legacy/model.pdiparams")["tensors"] == 9
    assert ckpttool("inspect", PIR, "--list").out.count("\n") == 10
    assert "linear_0.w_0" in ok("inspect", PIR, "--stats")
    assert ok("inspect", PIR, "--metadata") == "model.pdiparams\n  no metadata\n"
    src = write(tmp_path, params=b"")
    assert "[params-count]" in ckpttool("inspect", src, "--check").out
    assert ckpttool("inspect", tmp_path, "--check").code == 3
    assert "error: the file has 0 tensors" in ckpttool("inspect", src).err


def test_merge_keeps_the_program(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b")
    weights = [load(p, tmp_path / f"{i}.safetensors") for i, p in enumerate((a, b))]
    weights[0]["linear_0.w_0"] = np.full((4, 4), 2, np.float32)
    weights[0]["linear_0.b_0"] = weights[1]["linear_0.b_0"] = np.ones(4, np.float32)
    weights[1]["linear_0.w_0"] = np.full((4, 4), 4, np.float32)
    for i, path in enumerate((a, b)):
        save_file(weights[i], tmp_path / f"{i}.safetensors")
        ok("convert-json", tmp_path / f"{i}.safetensors", tmp_path / f"p{i}", "--program", path)
    words = ("--method", "linear", "--weights", "0.5,0.5", "--verify")
    ok("merge", tmp_path / "p0/model.json", tmp_path / "p1", "-o", tmp_path / "out", *words)
    assert (tmp_path / "out/model.json").read_bytes() == a.read_bytes()
    merged = load(tmp_path / "out/model.json", tmp_path / "m.safetensors")
    assert (merged["linear_0.w_0"] == 3).all()
    ok("merge", tmp_path / "p0", tmp_path / "p1", "-o", tmp_path / "hf", "--to", "hf", *words)
    assert (load_file(tmp_path / "hf/model.safetensors")["linear_0.w_0"] == 3).all()


def load(path: Path, out: Path) -> dict[str, Any]:
    ok("convert-json", path, out, "-q")
    return load_file(out)


def test_drop_keys(tmp_path: Path) -> None:
    src = write(tmp_path / "src")
    error = refused("drop-keys", src, tmp_path / "out", "steps", code=1)
    assert "`steps` is missing" in error
    assert "--to hf" in error
    ok("reshard", src, tmp_path / "out", "--remove-keys", "steps", "--to", "hf", "--verify")
    assert sorted(load_file(tmp_path / "out/model.safetensors")) == ["linear_0.b_0", "linear_0.w_0"]


def test_reshard(tmp_path: Path) -> None:
    src = write(tmp_path / "src")
    ok("reshard", src, tmp_path / "same", "--verify")
    assert (tmp_path / "same/model.pdiparams").read_bytes() == src.with_suffix(".pdiparams").read_bytes()
    ok("reshard", src, tmp_path / "hf", "--to", "hf", "--verify")
    assert len(load_file(tmp_path / "hf/model.safetensors")) == 3
    assert "needs a program" in refused("reshard", tmp_path / "hf", tmp_path / "p", "--to", "program", code=1)
    assert "whole tensors" in refused("reshard", src, tmp_path / "p", "--tp-out", "2")
    assert "whole tensors" in refused("reshard", src, tmp_path / "p", "--tp", "2")
    assert "the program says F32" in refused("reshard", src, tmp_path / "p", "--dtype", "bf16", code=1)


def test_several_programs_in_one_directory(tmp_path: Path) -> None:
    write(tmp_path / "src")
    write(tmp_path / "src", usual(), name="other")
    assert "2 programs" in refused("inspect", tmp_path / "src", code=1)
    assert answer("inspect", tmp_path / "src/other.pdiparams")["tensors"] == 3
    assert answer("inspect", tmp_path / "src/other.json")["tensors"] == 3


def test_a_directory_with_a_program_and_other_weights(tmp_path: Path) -> None:
    src = write(tmp_path / "src")
    ok("convert-json", src, tmp_path / "src/model.safetensors", "-q")
    assert "could be hf or program" in refused("inspect", tmp_path / "src", code=1)
    assert answer("inspect", tmp_path / "src", "--from", "program")["format"] == "program"
    assert answer("inspect", tmp_path / "src/model.safetensors")["format"] == "hf"
    assert ok("convert-json", tmp_path / "src", "--check")


def test_a_directory_with_nothing_but_a_program(tmp_path: Path) -> None:
    write(tmp_path / "src", usual([]), None)
    assert answer("inspect", tmp_path / "src")["program"]["operators"] == 9
    (tmp_path / "src/notes.json").write_text("{}")
    assert answer("inspect", tmp_path / "src")["tensors"] == 0


# In short: tests/first_contact/test_streams.py, with another command.
@pytest.mark.thorough
@pytest.mark.parametrize("words", [["--check"], ["out.safetensors"], ["--check", "--json"]])
def test_full_disks_for_what_is_printed(tmp_path: Path, words: list[str]) -> None:
    command = [sys.executable, "-m", "ckpttool", "convert-json", str(PIR), *words]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    if "out.safetensors" in words:
        assert done.returncode == 0
        assert "cannot write to stdout: No space left on device" in done.stderr
    else:
        assert done.returncode == 1
        assert done.stderr.endswith("error: cannot write to stdout: No space left on device\n")


@pytest.mark.thorough
@pytest.mark.parametrize("words", [["out.safetensors"], ["--check", "--json"]])
def test_full_disks_for_messages(tmp_path: Path, words: list[str]) -> None:
    command = [sys.executable, "-m", "ckpttool", "convert-json", str(PIR), *words]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, cwd=tmp_path, stderr=full, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0
    assert "0 errors" in done.stdout or "verified" in done.stdout or '"ok": true' in done.stdout
