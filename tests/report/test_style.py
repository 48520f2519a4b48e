"""Colours: who gets them, and what they are put on."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from ckpttool.core.dtypes import DTYPES
from ckpttool.report.style import coloured, column_colours, dtype_colour, painted, styled
from tests.helpers.command import Terminal, ckpttool, tagged

LLAMA = Path(__file__).parents[2] / "fixtures" / "llama_tp8"


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.parametrize(
    ("environment", "terminal", "pipe"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
        ({"TERM": "dumb"}, False, False),
        ({"CLICOLOR": "0"}, False, False),
        ({"CLICOLOR": "1"}, True, False),
        ({"CLICOLOR_FORCE": "1"}, True, True),
        ({"CLICOLOR_FORCE": "0"}, True, False),
        ({"CLICOLOR_FORCE": "1", "NO_COLOR": "1"}, False, False),
        ({"TERM": "dumb", "FORCE_COLOR": "3"}, True, True),
    ],
)
def test_who_gets_colours(
    environment: dict[str, str], terminal: bool, pipe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (coloured(Terminal()), coloured(io.StringIO())) == (terminal, pipe)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("error: x", "<red>error:</> x"),
        ("warning no-index: shards", "<yellow>warning no-index:</> shards"),
        ("note: x: BF16", "<cyan>note:</><dim> x: BF16</>"),
        ("note: x\n      y\nz", "<cyan>note:</><dim> x\n      y</>\nz"),
        ("  hint: x", "  <cyan>hint:</> x"),
        ("  --> some/file", "<dim>  --> some/file</>"),
        ("verified: every element", "<green>verified:</> every element"),
        ("equal: 3 tensors", "<green>equal:</> 3 tensors"),
        ("different: 3 of 4 tensors changed", "<red>different:</> <b>3</> of 4 tensors changed"),
        ("fits on H100 80 GB: rank 0", "<green>fits on H100 80 GB:</> rank 0"),
        ("does not fit: rank 0", "<red>does not fit:</> rank 0"),
        ("x: 0 errors, 1 warning", "x: <green>0 errors</>, <yellow>1 warning</>"),
        ("x: 2 errors, 0 warnings", "x: <red>2 errors</>, 0 warnings"),
        ("  missing  ray  not installed", "  <yellow>missing</>  ray  not installed"),
        ("w  BF16 [2], F8_E4M3 (F32 scales)", "w  <cyan>BF16</> [2], <magenta>F8_E4M3</> (<blue>F32</> scales)"),
    ],
)
def test_what_is_coloured(line: str, shown: str) -> None:
    painted_ = painted(f"a\n{line}\n", Terminal())
    assert tagged(painted_) == f"a\n{shown}\n"
    assert painted(line, io.StringIO()) == line


def test_every_dtype_has_one_colour_everywhere() -> None:
    """In a column and in prose, by its width; wide integers are not weights, and stay plain."""
    colour = column_colours(("name", "dtype"))
    for name, dtype in DTYPES.items():
        code = dtype_colour(name)
        wide = dtype.kind == "int" and dtype.bits > 8
        assert bool(code) != wide
        assert code == ("" if wide else "35" if dtype.bits <= 8 else "36" if dtype.bits == 16 else "94")
        assert colour(1, 1, name) == code
        assert painted(f" {name} ", Terminal()) == f" {styled(name, code)} "


def test_columns_have_weight() -> None:
    header = ("name", "state", "nan", "relative", "file", "what")
    colour = column_colours(header)
    assert [colour(0, i, h) for i, h in enumerate(header)] == ["1"] * 6
    row = ("error", "complete <", "0", "0.5", "a/b", "F32 and BF16")
    assert [colour(1, i, c) for i, c in enumerate(row)] == ["", "32", "", "1", "2", ""]
    assert colour(1, 1, "incomplete") == colour(1, 2, "3") == "1;31"


@pytest.mark.parametrize("line", ["errors: 3", "model.error: x", '{"error": 1}', "noted: x", "fitsy: x", "error"])
def test_what_is_not(line: str) -> None:
    assert painted(line, Terminal()) == line


def test_the_commands_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them write through one function: errors, notes and verdicts."""
    assert "\x1b" not in "".join(ckpttool("inspect", tmp_path / "no")[1:])
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert ckpttool("inspect", tmp_path / "no").err.startswith("\x1b[1;31merror:\x1b[0m the source does not exist")
    done = ckpttool("reshard", LLAMA, tmp_path / "dst", "--tp-out", 2, "--verify")
    assert "\x1b[32mverified:\x1b[0m every element" in done.out
    assert "\x1b[36mnote:\x1b[0m\x1b[2m written as ranks" in done.err
    assert "\x1b" not in ckpttool("inspect", tmp_path / "dst", "--json").out
