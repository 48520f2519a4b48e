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


def test_names_of_nothing() -> None:
    done = ckpttool("explain", "shard-mising")
    assert done.code == 2
    assert "did you mean shard-missing?" in done.err
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
