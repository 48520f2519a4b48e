"""``ckpttool explain``: every class of errors and every finding has an explanation, and errors name theirs."""

from __future__ import annotations

import io
import json
import sys

import pytest

from ckpttool import errors
from ckpttool.answers.findings import CHECKPOINT, SEVERITY
from ckpttool.cli import failure
from ckpttool.errors import CkptError, LayoutError
from ckpttool.kernels.merge import METHODS
from ckpttool.report.explained import CLASSES, explain, page, plain_text
from tests.helpers.command import ckpttool


def test_every_class_has_a_page() -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, CkptError)]
    assert {c.__name__.removesuffix("Error").lower() for c in classes} - {"ckpt"} == set(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_a_page_is_plain_text(name: str) -> None:
    done = ckpttool("explain", name)
    assert (done.code, done.err) == (0, "")
    title = page(name).splitlines()[0].removeprefix("# ")
    assert done.out.startswith(f"{title}\n{'=' * len(title)}\n\n")
    assert "```" not in done.out
    assert "](" not in done.out
    assert f"ckpttool.errors.{name.capitalize()}Error" in done.out
    assert ckpttool("explain", f"{name.capitalize()}Error").out == done.out


def test_every_finding_is_explained() -> None:
    for name in SEVERITY:
        assert explain(name), name
    rows = [line.split("|") for line in page("findings").splitlines() if line.startswith("| `")]
    assert [(row[1].strip(" `"), row[2].strip()) for row in rows] == list(CHECKPOINT.items())


def test_a_finding() -> None:
    assert ckpttool("explain", "[shard-missing]").out.splitlines() == [
        "shard-missing: a finding",
        "  severity:    error",
        "  meaning:     a shard that the index lists, or a number between those of the others, is missing",
        "  what to do:  fetch that file",
    ]


def test_every_merge_method_is_explained() -> None:
    rows = [line.split("|")[1].strip(" `") for line in page("methods").splitlines() if line.startswith("| `")]
    assert rows == list(METHODS)
    listed = ckpttool("explain", "methods").out.splitlines()
    assert [line.split(":")[0].strip() for line in listed[1:]] == rows


@pytest.mark.parametrize("name", ["slerp", "ties", "nuslerp", "model_stock"])
def test_a_merge_method(name: str) -> None:
    """What --list-methods says of it, each parameter with its meaning, and when to use it."""
    done = ckpttool("explain", name)
    assert done.out.startswith(f"{name}: a merge method\n  use it for: ")
    (method,) = [
        m for m in json.loads(ckpttool("merge", "--list-methods", "--json").out)["methods"] if m["name"] == name
    ]
    assert method["formula"] in done.out
    said = {line.split(":")[0].strip(): line for line in done.out.splitlines()[1:]}
    for parameter in method["parameters"]:
        line = said[parameter["name"]]
        default = parameter["default"]
        assert ("must be given" if default is None else f"default {str(default).lower()}") in line
        assert line.endswith(parameter["help"])
        assert (", for each model" in line) is parameter["per_model"]


def test_explanations_fit_a_terminal() -> None:
    for name in ("methods", "ties", "truncated"):
        text = explain(name, 80)
        assert max(map(len, text.splitlines())) <= 80
        assert text.split() == explain(name).split()


def test_names_of_nothing() -> None:
    done = ckpttool("explain", "shard-mising")
    assert done.code == 2
    assert "did you mean shard-missing, " in done.err
    assert "did you mean slerp or " in ckpttool("explain", "slep").err
    assert "shard-missing" in ckpttool("explain").out
    found = json.loads(ckpttool("explain", "layout", "--json").out)
    assert found == {"schema": "ckpttool.explain/1", "name": "layout", "text": plain_text(page("layout"))}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("error", "kind", "line"),
    [
        (LayoutError("no"), "", "more: ckpttool explain layout\n"),
        (CkptError("interrupted"), "interrupted", ""),
        (CkptError("not enough memory"), "memory", ""),
    ],
)
def test_an_error_on_a_terminal_names_its_page(
    error: CkptError, kind: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stream, more in ((Terminal(), line), (io.StringIO(), "")):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("NO_COLOR", "1")
        failure.failed(error, kind=kind)
        assert stream.getvalue() == f"error: {error.what}\n{more}"
