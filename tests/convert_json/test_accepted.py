"""The fixture that says what Paddle does with broken programs has every case of the tables, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpttool.answers.findings import PROGRAM
from ckpttool.formats.paddle.program import examine
from tests.convert_json.accepted import CASES, RIGHTS, recorded

ANSWERS = {"accepted, same output", "accepted, other output", "refused", "crash or hang"}
NOT_LOADED = {
    "attribute-inf",
    "unreadable",
    "version-patched",
    "float8",
    "names-none",
    "names-missing",
    "names-twice",
    "names-shape",
}
"""Findings that say nothing about whether Paddle loads a program: there is nothing to measure."""


@pytest.mark.parametrize("table", CASES)
def test_every_case_was_measured(table: str) -> None:
    found = {name: one["id"] for name, one in recorded()[table].items()}
    hint = "python scripts/measure_paddle_programs.py measures again"
    assert found == {name: case.id for name, case in CASES[table].items()}, hint


def test_answers() -> None:
    said = recorded()
    assert said.keys() == {"paddle", *CASES}
    entries = [one for table in CASES for one in said[table].values()]
    assert {frozenset(one) for one in entries} == {frozenset({"id", "J", "S", "I"})}
    assert {one[loader] for one in entries for loader in "JSI"} == ANSWERS


def test_every_finding_is_there() -> None:
    found = {case.id for cases in CASES.values() for case in cases.values()}
    assert found == PROGRAM.keys() - NOT_LOADED


@pytest.mark.parametrize("table", CASES)
def test_cases_are_what_they_are_called(table: str, tmp_path: Path) -> None:
    """Paddle gets a program with more operators than the tests of the tables, so that a change shows in its output."""
    assert examine(RIGHTS[table].write(tmp_path / "right")).program.problems == []
    found = {
        name: {p.id for p in examine(case.write(tmp_path / str(i))).program.problems}
        for i, (name, case) in enumerate(CASES[table].items())
    }
    assert found == {name: {case.id} for name, case in CASES[table].items()}
