"""Commands that are another way to ask: ``diff`` and ``check`` of inspect, ``help``, and former names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.command import ckpttool

FIXTURES = Path(__file__).parents[2] / "fixtures"
LLAMA = FIXTURES / "llama_tp8"
ONE, TWO = (FIXTURES / "merge" / "inputs" / n for n in ("ft1", "ft2"))
SAME: dict[str, tuple[tuple[object, ...], tuple[object, ...]]] = {
    "diff": (("diff", ONE, TWO), ("inspect", ONE, "--diff", TWO)),
    "diff within a tolerance": (("diff", ONE, TWO, "--atol", 9), ("inspect", ONE, "--diff", TWO, "--atol", 9)),
    "diff of some tensors": (
        ("diff", ONE, TWO, "--filter", "*.q_proj.*", "--json"),
        ("inspect", ONE, "--diff", TWO, "--filter", "*.q_proj.*", "--json"),
    ),
    "diff of values, which it compares anyway": (
        ("diff", ONE, TWO, "--values"),
        ("inspect", ONE, "--diff", TWO, "--values"),
    ),
    "check": (("check", LLAMA), ("inspect", LLAMA, "--check")),
    "check of values": (
        ("check", LLAMA, "--values", "--only", "model", "--json"),
        ("inspect", LLAMA, "--check", "--values", "--only", "model", "--json"),
    ),
    "check of a rank": (("check", LLAMA, "--tp", 4), ("inspect", LLAMA, "--check", "--tp", 4)),
    "findings": (("check", LLAMA, "--findings", "sarif"), ("inspect", LLAMA, "--check", "--findings", "sarif")),
    "size": (("size", LLAMA, "--json"), ("size", LLAMA, "--json")),
    "quantize": (("quantize", ONE, "dst", "-n", "--json"), ("quantize", ONE, "dst", "-n", "--json")),
    "an option that is missing": (("size", LLAMA, "--nope"), ("size", LLAMA, "--nope")),
    "help": (("help", "reshard"), ("reshard", "--help")),
    "help of a former name": (("help", "size"), ("help", "size")),
    "help of several": (("help", "diff", "check"), ("help", "diff", "check")),
    "help of all": (("help",), ("--help",)),
}


@pytest.mark.parametrize("case", SAME)
def test_says_the_same(case: str) -> None:
    """Both spellings have the same exit code, stdout and stderr."""
    new, old = (ckpttool(*line) for line in SAME[case])
    assert new == old
    assert new.out or new.err


def test_exit_codes() -> None:
    assert ckpttool("diff", ONE, ONE).code == 0
    assert ckpttool("diff", ONE, LLAMA).code == 3
    assert ckpttool("check", LLAMA).code == 0
    assert ckpttool("check", LLAMA, "--tp", 4).code != 0


def test_report(tmp_path: Path) -> None:
    for line in (("diff", ONE, TWO), ("check", ONE)):
        page = tmp_path / f"{line[0]}.html"
        ckpttool(*line, "--html", page)
        assert page.read_text().startswith("<!doctype html>")


def test_former_names_are_not_listed() -> None:
    out = ckpttool("--help").out
    assert "fp8-" not in out
    assert "quantize" in out


def test_json_of_a_former_name() -> None:
    """Programs that read it go on reading it."""
    assert json.loads(ckpttool("size", LLAMA, "--json").out)["schema"] == "ckpttool.size/1"
