"""On a terminal of 80 columns what the commands print fits, and no number is broken; in a pipe nothing is dropped."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from ckpttool.cli.app import main
from tests.helpers.command import ckpttool

FIXTURES = Path(__file__).parents[2] / "fixtures"
LLAMA, MOE, FT1, FT2 = (FIXTURES / n for n in ("llama_tp8", "deepseek_v3", "merge/inputs/ft1", "merge/inputs/ft2"))
PROGRAM = FIXTURES / "paddle_programs" / "pir" / "model.json"
COMMANDS: dict[str, tuple[object, ...]] = {
    "reshard": ("reshard", LLAMA, "a_directory_with_quite_a_long_name", "--tp-out", 2, "--pp-out", 2, "--verify"),
    "plan of a reshard": ("reshard", MOE, "dst", "--to", "deepseek", "--tp-out", 2, "-n"),
    "merge": ("merge", FT1, FT2, "-o", "a_directory_with_quite_a_long_name", "--weights", "1,2", "--verify"),
    "drop-keys": ("drop-keys", MOE, "a_directory_with_quite_a_long_name", "*.q_a_proj.*"),
    "plan of drop-keys": ("drop-keys", MOE, "dst", "*.q_a_proj.*", "-n"),
    "quantize": ("quantize", FT1, "a_directory_with_quite_a_long_name", "--recipe", "channel"),
    "plan of quantize": ("quantize", FT1, "dst", "--recipe", "channel", "-n"),
    "convert-json": ("convert-json", PROGRAM, "a_directory_with_quite_a_long_name"),
    "plan of convert-json": ("convert-json", PROGRAM, "dst", "-n"),
    "explain": ("explain", "verify"),
    "a finding": ("explain", "padding"),
    "findings": ("explain",),
    "methods": ("merge", "--list-methods"),
    **{f"size by {by}": ("size", MOE, "--by", by, "--tp-out", 2) for by in ("class", "dtype", "module", "tensor")},
    "size in training": ("size", MOE, "--train", "--dp", 4, "--zero", 3, "--tp-out", 2, "--recipe", "bf16"),
    "size with a cache": ("size", LLAMA, "--kv", "bf16", "--tokens", "32k", "--gpu", "h100", "--recipe", "bf16"),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


class Terminal(io.StringIO):
    """A stream that a person reads."""

    def isatty(self) -> bool:
        return True


def on_terminal(*arguments: object) -> str:
    out = Terminal()
    with (
        patch.object(sys, "argv", ["ckpttool", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        main()
    return out.getvalue()


@pytest.mark.parametrize("case", COMMANDS)
def test_fits(case: str) -> None:
    shown = on_terminal(*COMMANDS[case])
    assert shown
    assert [line for line in shown.splitlines() if len(line) > 80] == []


def test_a_pipe_has_every_column() -> None:
    wide = ckpttool(*COMMANDS["plan of convert-json"]).out.splitlines()[0]
    assert wide.split("\t") == ["tensor", "parameter", "dtype", "shape", "bytes"]


def test_one_unit(tmp_path: Path) -> None:
    """A size is said once; the summary has the number of ranks besides that of files."""
    done = ckpttool(*COMMANDS["reshard"])
    assert re.search(r": ranks, tp 2, pp 2 \(4 ranks\), 39 tensors in \d+ files, [\d.]+ kB", done.out)
    assert "iB" not in done.out
    assert len(list((tmp_path / "a_directory_with_quite_a_long_name").glob("rank-*"))) == 4
