"""Help that depends on the command: the methods of merge."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from ckpttool.cli.app import app
from ckpttool.kernels.merge import METHODS
from tests.helpers.command import ckpttool


def test_names_of_help_have_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come out of a set, which has another order in another process."""
    whole: Any = get_command(app)
    for kind in (TyperGroup, TyperCommand):
        monkeypatch.setattr(kind, "get_help_option_names", lambda _self, _context: ["--help", "-h"])
    assert [
        c.name for c in (whole, *whole.commands.values()) if c.get_help_option_names(None) != ["-h", "--help"]
    ] == []


def test_merge_names_its_methods() -> None:
    words = ckpttool("merge", "--help").out.partition("Methods:")[2].replace(",", " ").replace(".", " ").split()
    assert set(METHODS) <= set(words)
    assert "--list-methods" in words


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
