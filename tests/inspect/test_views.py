"""The views of inspect: a new one is a file and a line in the registry."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from unittest.mock import patch

import pytest
from typer.main import get_command

from ckpttool.answers.document import Table
from ckpttool.answers.findings import CheckResult
from ckpttool.cli.app import app
from ckpttool.errors import UsageError
from ckpttool.formats.base import OpenOptions
from ckpttool.ops.inspect.listing import TensorChoice
from ckpttool.ops.inspect.views import registry
from ckpttool.ops.inspect.views.base import InspectedSource, ListingAnswer, View, flag
from ckpttool.ops.inspect.views.check import CheckAnswer
from ckpttool.ops.inspect.views.registry import VIEWS, chosen, look
from ckpttool.report.inspect import show_answer
from tests.helpers.command import ckpttool

SRC = Path("fixtures/llama_tp8")


class LongestView(View["LongestAnswer"]):
    """The longest name."""

    name = "longest"
    whole = True
    longest: bool = flag("--longest", "The longest name.")

    def look(self, at: InspectedSource) -> LongestAnswer:
        return LongestAnswer(at.tensors())


class LongestAnswer(ListingAnswer):
    """The longest name."""

    name = "longest"

    def json(self) -> dict[str, str]:
        return {"longest": max((r.name for r in self.listing.rows), key=len)}

    def sections(self) -> list[Table]:
        return [Table(("name",), [tuple(self.json().values())], quiet=True)]


def test_a_new_view_is_one_class_with_its_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(registry, "VIEWS", (*VIEWS, LongestView)):
        view = chosen(TensorChoice(), longest=True)
        with pytest.raises(UsageError, match="--list and --longest cannot be combined"):
            chosen(TensorChoice(), longest=True, list_=True)
        with pytest.raises(UsageError, match="--longest does not take filters"):
            chosen(TensorChoice(patterns=("*",)), longest=True)
        with pytest.raises(UsageError, match="--longest is not part of a report"):
            chosen(TensorChoice(), longest=True, html=Path("page.html"))
    assert show_answer(look(view, SRC, OpenOptions()), as_json=False) == 0
    name = "model.layers.0.post_attention_layernorm.weight"
    assert capsys.readouterr().out == f"name\n{name}\n"
    show_answer(look(view, SRC, OpenOptions()), as_json=True)
    out = capsys.readouterr().out
    assert '"view": "longest",\n  "path"' in out
    assert out.endswith(f'"longest": "{name}"\n}}\n')


def test_every_option_of_a_view_is_one_of_the_command() -> None:
    command = getattr(get_command(app), "commands", {})["inspect"]
    offered = {name: p.help for p in command.params for name in p.opts}
    for view in VIEWS:
        for option in view.options().values():
            assert option.about in offered[option.name.split()[0]], option


def test_shared_fields_are_options_of_another_view() -> None:
    """A field that nothing fills would be an option that does nothing."""
    own = {name for view in VIEWS for name in view.options()} | {"choice", "second"}
    for view in VIEWS:
        assert own >= {f.name for f in fields(view)}, view


def test_findings_are_wrapped_on_a_terminal_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = CheckResult(tmp_path)
    result.add("truncated", "many words " * 20, tmp_path / "model.safetensors", "copy the file again")
    show_answer(CheckAnswer(result), as_json=False)
    assert f"error: {'many words ' * 20} [truncated]\n" in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("ckpttool.report.text.on_terminal", lambda: True)
    show_answer(CheckAnswer(result), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    finding = lines[: next(i for i, line in enumerate(lines) if line.startswith("  -->"))]
    assert len(finding) > 2
    assert max(map(len, finding)) <= 80
    assert all(line.startswith(("       many", "       words")) for line in finding[1:])


def test_filters_that_a_family_would_not_heed_are_refused() -> None:
    for filters in (["--only", "model"], ["--filter", "*norm*"]):
        done = ckpttool("inspect", SRC, "--suggest-family", *filters)
        assert (done.code, done.out) == (2, "")
        assert "--suggest-family" in done.err
