"""A failure with --json: one object on stdout, the same as text on stderr, and the exit code in both worlds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from ckpttool.cli.app import app
from tests.helpers.command import ckpttool

FIXTURES = Path(__file__).parents[2] / "fixtures"
LLAMA, FT1 = FIXTURES / "llama_tp8", FIXTURES / "merge" / "inputs" / "ft1"
PROGRAM = FIXTURES / "paddle_programs" / "pir" / "model.json"

# What is wrong with the command line itself, and what is only found in the files.
USAGE: dict[str, tuple[object, ...]] = {
    "reshard": (LLAMA, "dst", "--to", "nowhere"),
    "merge": (FT1, "-o", "dst", "--vocab", "all"),
    "drop-keys": (FT1, "dst", "no.such.tensor"),
    "convert-json": (PROGRAM,),
    "inspect": (LLAMA, "--sort", "colour"),
    "diff": (FT1, FT1, "--only", "nothing"),
    "check": (FT1, "--findings", "csv"),
    "quantize": (FT1, "dst", "--recipe", "nvfp5"),
    "size": (FT1, "--tokens", "many"),
    "doctor": ("/no/such/place",),
    "explain": ("nothing",),
    "help": ("nothing",),
}
DATA: dict[str, tuple[tuple[object, ...], str]] = {
    "reshard": ((LLAMA, "dst", "--tp-out", 3), "layout"),
    "merge": ((FT1, "broken", "-o", "dst"), "corrupt"),
    "drop-keys": (("broken", "dst", "*"), "corrupt"),
    "convert-json": ((PROGRAM, "there.safetensors"), "output"),
    "inspect": (("broken",), "corrupt"),
    "diff": ((FT1, "broken"), "corrupt"),
    "quantize": (("broken", "dst"), "corrupt"),
    "size": (("broken",), "corrupt"),
}
NO_DATA = {"doctor", "explain", "help", "check"}
"""Commands that read no checkpoint, and one whose answer is what is wrong with it."""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty directory but for a checkpoint that is none and a file in the way."""
    monkeypatch.chdir(tmp_path)
    Path("broken").mkdir()
    Path("broken/model.safetensors").write_bytes(b"no header at all")
    Path("there.safetensors").write_bytes(b"")


def test_every_command_is_here() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert set(USAGE) == set(DATA) | NO_DATA == set(commands)
    assert all(any("--json" in p.opts for p in command.params) for name, command in commands.items() if name != "help")


def failure(*arguments: object, code: int) -> dict[str, Any]:
    """The error of a command with --json."""
    done = ckpttool(*arguments, "--json")
    assert done.code == code, done.err
    found: dict[str, Any] = json.loads(done.out)
    assert set(found) == {"schema", "error", "exit_code"}
    assert found["schema"] == "ckpttool.error/1"
    assert found["exit_code"] == code
    error: dict[str, Any] = found["error"]
    assert set(error) == {"kind", "message", "where", "hint", "page"}
    assert error["page"] == error["kind"]
    assert done.err.startswith(f"error: {error['message']}\n")
    for text in [*error["where"], error["hint"]]:
        assert text is None or text in done.err
    return error


@pytest.mark.parametrize("command", USAGE)
def test_usage(command: str) -> None:
    assert failure(command, *USAGE[command], code=2)["kind"] == "usage"
    assert failure(command, "--no-such-option", code=2)["kind"] == "usage"


@pytest.mark.parametrize("command", DATA)
def test_data(command: str) -> None:
    arguments, kind = DATA[command]
    error = failure(command, *arguments, code=1)
    assert error["kind"] == kind
    assert error["where"]
    assert not Path("dst").exists()


def test_no_such_command() -> None:
    error = failure("validate", LLAMA, code=2)
    assert (error["message"], error["hint"]) == ("there is no command `validate`", "use `ckpttool check SRC`")


def test_without_json_stdout_stays_empty() -> None:
    assert ckpttool("inspect", "broken").out == ""
    assert ckpttool("inspect", "--", "--json").out == ""  # a path
