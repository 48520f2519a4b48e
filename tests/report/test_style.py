"""Colours: who gets them, and what they are put on."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from ckpttool.report.style import coloured, painted
from tests.helpers.command import ckpttool

LLAMA = Path(__file__).parents[2] / "fixtures" / "llama_tp8"


class Terminal(io.StringIO):
    """A stream that a person reads."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
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
    ("line", "label", "colour"),
    [
        ("error: x", "error:", 31),
        ("warning no-index: shards", "warning no-index:", 33),
        ("note: x: y", "note:", 36),
        ("  hint: x", "hint:", 36),
        ("verified: every element", "verified:", 32),
        ("equal: 3 tensors", "equal:", 32),
        ("different: 3 tensors", "different:", 31),
        ("fits on H100 80 GB: rank 0", "fits on H100 80 GB:", 32),
        ("does not fit: rank 0", "does not fit:", 31),
    ],
)
def test_what_is_coloured(line: str, label: str, colour: int) -> None:
    shown = painted(f"a\n{line}\n", Terminal())
    assert f"\x1b[1;{colour}m{label}\x1b[0m" in shown
    assert shown.replace("\x1b[0m", "").replace(f"\x1b[1;{colour}m", "") == f"a\n{line}\n"
    assert painted(line, io.StringIO()) == line


@pytest.mark.parametrize("line", ["errors: 3", "model.error: x", '{"error": 1}', "noted: x", "fitsy: x", "error"])
def test_what_is_not(line: str) -> None:
    assert painted(line, Terminal()) == line


def test_the_commands_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them write through one function: errors, notes and verdicts."""
    assert "\x1b" not in "".join(ckpttool("inspect", tmp_path / "no")[1:])
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert ckpttool("inspect", tmp_path / "no").err.startswith("\x1b[1;31merror:\x1b[0m the source does not exist")
    done = ckpttool("reshard", LLAMA, tmp_path / "dst", "--tp-out", 2, "--verify")
    assert "\x1b[1;32mverified:\x1b[0m every element" in done.out
    assert "\x1b[1;36mnote:\x1b[0m written as ranks" in done.err
    assert "\x1b" not in ckpttool("inspect", tmp_path / "dst", "--json").out
