"""Help that depends on the command: the methods of merge."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from ckpttool.cli.app import app
from ckpttool.kernels.merge import METHODS
from tests.helpers.command import ckpttool

MOST = 25
"""Lines of -h."""
FEW = 8
"""Options that need no short list."""


def test_names_of_help_have_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come out of a set, which has another order in another process."""
    whole: Any = get_command(app)
    for kind in (TyperGroup, TyperCommand):
        monkeypatch.setattr(kind, "get_help_option_names", lambda _self, _context: ["--help", "-h"])
    assert [
        c.name for c in (whole, *whole.commands.values()) if c.get_help_option_names(None) != ["-h", "--help"]
    ] == []


@pytest.mark.parametrize("name", get_command(app).commands)  # type: ignore[attr-defined]
def test_first_help_fits_a_screen(name: str) -> None:
    """-h: usage, a sentence, examples, and an option a line; then how many there are, which --help lists."""
    first, whole = (ckpttool(name, option) for option in ("-h", "--help"))
    assert first.code == whole.code == 0
    for out in (first.out, whole.out):
        assert max(map(len, out.splitlines())) <= 80
    options = re.findall("^  -", whole.out, re.MULTILINE)
    if len(options) < FEW:
        assert first.out == whole.out
        return
    assert len(first.out.splitlines()) <= MOST
    rows = re.findall("^  -.*", first.out, re.MULTILINE)
    assert 5 <= len(rows) <= 9
    assert set(rows) <= set(re.findall("^  -.*", whole.out, re.MULTILINE))
    assert first.out.endswith(f"\n\nckpttool {name} --help shows all {len(options)} options, in groups.\n")


def test_first_help_at_any_place() -> None:
    assert ckpttool("reshard", "a", "--tp-out", 2, "-h").out == ckpttool("reshard", "-h").out


def test_merge_names_its_methods() -> None:
    words = ckpttool("merge", "--help").out.partition("Methods:")[2].replace(",", " ").replace(".", " ").split()
    assert set(METHODS) <= set(words)


def test_list_methods() -> None:
    """Without sources or -o; a row for each, with the defaults that a recipe would have."""
    done = ckpttool("merge", "--list-methods")
    assert done.code == 0
    header, *rows = (line.split("\t") for line in done.out.splitlines())
    assert header == ["method", "formula", "parameters"]
    assert [r[0] for r in rows] == list(METHODS)
    assert {r[0]: r[2] for r in rows}["dare_ties"].startswith("weight, density=1, normalize=false")


def test_list_methods_as_json() -> None:
    data = json.loads(ckpttool("merge", "--list-methods", "--json").out)
    assert [m["name"] for m in data["methods"]] == list(METHODS)
    slerp = next(m for m in data["methods"] if m["name"] == "slerp")
    assert [p["name"] for p in slerp["parameters"]] == ["t"]
    assert (slerp["base"], slerp["models"]) == (METHODS["slerp"].base, list(METHODS["slerp"].models))
