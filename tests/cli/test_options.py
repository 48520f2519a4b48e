"""Options are declared once, in groups that commands take as one parameter."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from inspect import signature
from typing import Annotated

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from ckpttool.cli.app import app
from ckpttool.cli.options import CONNECTIONS, RunFlags, flag, grouped, number, value, whole_and_cut, without
from ckpttool.errors import UsageError

OF_THEIR_OWN = {
    "--atol": {"diff"},
    "--check": {"inspect", "convert-json"},
    "--dtype": {"inspect"},
    "--max-shard-size": {"convert-json"},
    "--findings": {"check"},
    "--headers-only": {"diff"},
    "--html": {"check", "diff"},
    "--memory": {"convert-json"},
    "--dry-run": {"inspect"},
    "--output": {"inspect", "merge"},
    "--part": {"inspect", "diff", "check"},
    "--recipe": {"size"},
    "--rtol": {"diff"},
    "--to": {"quantize"},
    "--values": {"check", "diff"},
    "--verify": {"merge"},
}
"""Where an option means something else than in the other commands."""


def test_an_option_says_the_same_in_every_command() -> None:
    said: dict[str, set[str]] = defaultdict(set)
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        for p in command.params:
            if name not in OF_THEIR_OWN.get(p.opts[-1], ()):
                said[p.opts[-1]].add(f"{p.opts} {getattr(p, 'metavar', '')}: {getattr(p, 'help', '')}")
    assert {option: texts for option, texts in said.items() if option.startswith("-") and len(texts) > 1} == {}


@dataclass
class Ranks:
    tp: Annotated[int | None, number("--tp", "Tensor-parallel ranks.")] = None
    names: Annotated[list[str] | None, value("--name", "NAME", "A name.", ("one", "two"))] = None
    quick: Annotated[bool, flag("-q --quick", "At once.")] = False


@dataclass
class OtherRanks(Ranks):
    tp: Annotated[int | None, number("--tp", "Another text.")] = 3


def output_of(command: object, *words: str) -> str:
    own = typer.Typer(add_completion=False, rich_markup_mode=None)
    own.command()(command)  # type: ignore[type-var]
    return CliRunner().invoke(own, list(words)).output


def test_a_group_comes_filled() -> None:
    @grouped
    def command(*, src: str, ranks: Ranks, last: bool = False) -> None:
        """What it does."""
        typer.echo(f"{src} {ranks} {last}")

    assert list(signature(command).parameters) == ["src", "tp", "names", "quick", "last"]
    assert output_of(command, "x", "--tp", "2", "--name", "one", "--name", "b", "-q").strip() == (
        "x Ranks(tp=2, names=['one', 'b'], quick=True) False"
    )
    assert "What it does." in output_of(command, "--help")


def test_options_that_a_command_does_not_have_keep_their_defaults() -> None:
    @grouped
    def command(*, ranks: Annotated[OtherRanks, without("tp", "quick")]) -> None:
        typer.echo(ranks)

    assert list(signature(command).parameters) == ["names"]
    assert "tp=3, names=None, quick=False" in output_of(command)
    assert "No such option" in output_of(command, "--tp", "2")


def test_a_group_that_has_an_option_anew_replaces_it_in_its_place() -> None:
    @grouped
    def command(*, ranks: OtherRanks) -> None:
        typer.echo(ranks)

    assert list(signature(command).parameters) == ["tp", "names", "quick"]
    assert "Another text." in output_of(command, "--help")
    assert "Tensor-parallel" not in output_of(command, "--help")


def test_split_says_what_is_whole() -> None:
    assert whole_and_cut(["a.*=none", "b=0", "=none=none"]) == (("a.*", "=none"), ("b=0",))


def test_requests_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """CKPTTOOL_CONNECTIONS; nothing else limits what is sent."""
    monkeypatch.delenv(CONNECTIONS, raising=False)
    assert RunFlags().options().connections is None
    monkeypatch.setenv(CONNECTIONS, "3")
    assert RunFlags().options().connections == 3
    monkeypatch.setenv(CONNECTIONS, "none")
    with pytest.raises(UsageError, match="CKPTTOOL_CONNECTIONS is `none`"):
        RunFlags().options()
