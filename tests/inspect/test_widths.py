"""On a terminal every table fits; in a pipe nothing is dropped or shortened."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from ckpttool.cli.app import main
from ckpttool.report.tables import fit, middle
from ckpttool.report.text import columns_of
from tests.helpers.command import ckpttool
from tests.helpers.tensorfile import origin, save_hf
from tests.inspect.models import CONFIG, llama

MODELS = (
    "deepseek_v3",
    "llama_tp8",
    "merge/inputs/lora1",
    "vllm/qwen3_moe",
    "paddle_zcc/sharding2_v1",
    "paddle_flex/tp2_dp2",
)
VIEWS = ("", "--list", "--files", "--stats", "--hash", "--ranks")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(*arguments: object, columns: int = 80) -> list[str]:
    out = Terminal()
    with (
        patch.dict("os.environ", {"COLUMNS": str(columns), "NO_COLOR": "1"}),
        patch.object(sys, "argv", ["ckpttool", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        main()
    return out.getvalue().splitlines()


@pytest.mark.product
@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("model", MODELS)
def test_views_fit(model: str, view: str, columns: int) -> None:
    lines = on_terminal("inspect", f"fixtures/{model}", *([view] if view else []), columns=columns)
    assert len(lines) > 1
    assert [line for line in lines if columns_of(line) > columns and len(line.split()) > 1] == []


def test_the_tree_of_two_layers_is_whole(tmp_path: Path) -> None:
    """With every column at 80; at 60 the numbers of tensors make room for names and sizes."""
    save_hf(tmp_path, llama(), CONFIG)
    screens = [on_terminal("inspect", tmp_path, columns=n) for n in (80, 60)]
    wide, narrow = (lines[next(i for i, line in enumerate(lines) if "dtype" in line) :] for lines in screens)
    assert wide[0].split() == ["dtype", "shape", "tensors", "size", "share"]
    assert narrow[0].split() == ["dtype", "shape", "size"]
    for lines, columns in ((wide, 80), (narrow, 60)):
        assert max(map(len, lines)) <= columns
        assert all(re.search(r"\d [kM]?B$|\d bytes$|#$", line) for line in lines[1:])


def test_wide_terminals_have_every_column() -> None:
    header = on_terminal("inspect", "fixtures/deepseek_v3", "--list", columns=200)[0].split()
    assert header == ["name", "dtype", "shape", "size", "pieces", "file", "offset"]
    assert on_terminal("inspect", "fixtures/deepseek_v3", "--list")[0].split() == ["name", "dtype", "shape", "size"]


@pytest.mark.parametrize("view", ["", "--list", "--stats"])
def test_long_names_lose_their_middle_on_a_terminal_only(view: str, tmp_path: Path) -> None:
    long = "model.language_model." + "decoder_" * 12 + "down_projection_of_everything.weight"
    save_hf(tmp_path, {long: origin(0, "BF16", (12345, 3))}, {})
    options = [view] if view else []
    shown = [line for line in on_terminal("inspect", tmp_path, *options) if "weight" in line]
    assert len(shown) == 1
    assert len(shown[0]) <= 80
    assert "..." in shown[0]
    if view != "--stats":
        assert "74.07 kB" in shown[0]
    piped = ckpttool("inspect", tmp_path, *options).out
    assert long in piped
    assert "..." not in piped


def test_the_middle_goes() -> None:
    assert middle("abcdefghijklmnopqrstuvwxyz", 13) == "ab...stuvwxyz"
    assert middle("abc", 3) == "abc"


def test_names_that_are_cut_still_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    names = [f"decoder.layers.{n}.self_attention.linear_qkv.weight" for n in range(3)]
    names += [f"optimizer/{name}/{state}" for name in names for state in ("exp_avg", "exp_avg_sq")]
    cells, _ = fit([["name", "x"], *[[name, "1"] for name in names]])
    assert len({row[0] for row in cells}) == 10
    assert all(len(row[0]) <= 40 for row in cells)
