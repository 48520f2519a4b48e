"""-q means one thing: no progress, notes or summaries; what was asked for is printed."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.command import Done, ckpttool
from tests.helpers.tensorfile import Raw, write

FIXTURES = Path(__file__).parents[2] / "fixtures"
LLAMA, FT1, FT2 = FIXTURES / "llama_tp8", *(FIXTURES / "merge" / "inputs" / n for n in ("ft1", "ft2"))
PROGRAM = FIXTURES / "paddle_programs" / "pir" / "model.json"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("two.safetensors"), {n: Raw("U8", np.zeros(1, np.uint8)) for n in "ab"})


SILENT: dict[str, tuple[object, ...]] = {
    "reshard": ("reshard", LLAMA, "dst", "--tp-out", 2, "--verify"),
    "merge": ("merge", FT1, FT2, "-o", "dst", "--verify"),
    "drop-keys": ("drop-keys", "two.safetensors", "dst", "b"),
    "quantize": ("quantize", FT1, "dst", "--recipe", "channel", "--verify"),
    "convert-json": ("convert-json", PROGRAM, "dst.safetensors"),
    "check": ("inspect", FT1, "--check"),
    "check of a program": ("convert-json", PROGRAM, "--check"),
}


@pytest.mark.parametrize("case", SILENT)
def test_nothing_is_printed_when_all_is_well(case: str) -> None:
    assert ckpttool(*SILENT[case], "-q") == Done(0, "", "")


@pytest.mark.parametrize(
    ("arguments", "columns"),
    [
        (("reshard", LLAMA, "dst", "--tp-out", 2), ["file", "bytes", "kind", "ranks"]),
        (("merge", FT1, FT2, "-o", "dst"), ["file", "bytes", "kind", "ranks"]),
        (("quantize", FT1, "dst"), ["file", "bytes", "kind", "ranks"]),
        (("drop-keys", "two.safetensors", "dst", "b"), ["tensor", "dtype", "shape", "bytes"]),
        (("convert-json", PROGRAM, "dst.safetensors"), ["tensor", "parameter", "dtype", "shape", "bytes"]),
    ],
    ids=lambda value: value[0],
)
def test_a_plan_is_its_table(arguments: tuple[object, ...], columns: list[str]) -> None:
    done = ckpttool(*arguments, "--dry-run", "-q")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0].split("\t") == columns


def test_a_diff_is_its_verdict() -> None:
    same = ckpttool("inspect", FT1, "--diff", FT1, "-q")
    assert (same.code, same.err, same.out.count("\n")) == (0, "", 1)
    assert same.out.startswith("equal: ")
    other = ckpttool("inspect", FT1, "--diff", FT2, "--values", "-q")
    assert (other.code, other.err, other.out.count("\n")) == (3, "", 1)
    assert other.out.startswith("different: ")


def test_findings_of_a_check_stay() -> None:
    shutil.copytree(FT1, "src")
    write(Path("src/extra.safetensors"), {"x": Raw("U8", np.zeros(1, np.uint8))})
    Path("src/config.json").write_text("{")
    done = ckpttool("inspect", "src", "--check", "-q")
    assert done.code == 3
    assert "error: " in done.out
    assert "checked" not in done.out


def test_the_size_is_its_verdict() -> None:
    done = ckpttool("size", FT1, "--recipe", "channel", "--gpu", "80GB", "-q")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("fits")
    total = ckpttool("size", FT1, "-q").out
    assert total.startswith(f"{FT1}: ")
    assert "class" not in total
