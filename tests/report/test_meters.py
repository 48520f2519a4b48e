"""Small bars: shares, rows of columns, terminals that have no eighths of a block, and wide characters."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from ckpttool.report.meters import bar, has_blocks, histogram, spark
from ckpttool.report.tables import middle
from ckpttool.report.text import aligned, columns_of
from tests.helpers.command import ckpttool
from tests.helpers.tensorfile import Raw, origin, save_hf
from tests.inspect.models import CONFIG, llama
from tests.inspect.test_widths import on_terminal


@pytest.fixture
def utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "utf-8"))
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.usefixtures("utf8")
def test_a_bar_is_as_long_as_its_share() -> None:
    assert [bar(x, 4) for x in (1, 0.5, 0.25, 9 / 32, 1e-9, 0)] == ["████", "██", "█", "█▏", "▏", ""]
    assert bar(2.0, 4) == "████"
    assert bar(math.nan, 4) == bar(None, 4) == bar(-1.0, 4) == ""
    lengths = [len(bar(i / 100, 10)) for i in range(101)]
    assert lengths == sorted(lengths)


@pytest.mark.usefixtures("utf8")
def test_a_row_of_columns() -> None:
    assert spark([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▁▂▃▄▅▆▇█"
    assert spark([1, 2, 3, 4, 5, 6, 7, 8], 4) == "▁▃▆█"  # the larger of two neighbours
    assert spark([1, None, math.nan, 2], 4) == "▁??█"
    assert spark([1.0, 1.001, 1.0], 4) in ("▄▅▄", "▄▄▄")  # nearly equal looks equal
    assert (spark([], 4), spark([0, 0], 4), spark([None], 4)) == ("", "▁▁", "?")
    assert len(spark(range(1000), 16)) == 16


@pytest.mark.usefixtures("utf8")
def test_a_histogram_has_an_axis_from_the_smallest_to_the_largest() -> None:
    assert histogram([1, 1000, 500, 0, 250], "-0.5", "1.5") == [
        "  1,000 │  ██",
        "        │  ██",
        "        │  ████",
        "      0 │▁▁████  ██",
        "        └──────────",
        "        -0.5    1.5",
    ]
    counts = [0, 3, 8, 32]
    columns = list(zip(*[line[6:].ljust(8) for line in histogram(counts, "0", "1")[:4]], strict=True))
    eighths = [sum("▁▂▃▄▅▆▇█".index(sign) + 1 for sign in column if sign != " ") for column in columns]
    assert eighths == [0, 0, 3, 3, 8, 8, 32, 32]


def test_a_histogram_without_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert histogram([2], "4", "4") == ["  2 |##", "    |##", "    |##", "  0 |##", "    +--", "    4 4"]
    assert histogram([], "0", "0")[0] == "  0 |"


@pytest.mark.parametrize(
    ("encoding", "term"), [("ascii", "xterm"), ("latin-1", "xterm"), ("utf-8", "dumb"), ("utf-8", "linux")]
)
def test_where_there_are_no_blocks_it_is_ascii(encoding: str, term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding))
    monkeypatch.setenv("TERM", term)
    assert not has_blocks()
    assert (bar(0.5, 4), bar(1e-9, 4)) == ("##", "#")
    assert spark([1, 8], 4) == ".@"


def test_wide_characters_take_two_columns() -> None:
    assert [columns_of(t) for t in ("abc", "模型", "é", "e\u0301", "한글", "🙂")] == [3, 4, 1, 1, 4, 2]
    lines = aligned([("模型", "1"), ("abcdef", "22")], right=(1,)).splitlines()
    assert {columns_of(line) for line in lines} == {10}
    assert columns_of(middle("模型" * 20, 21)) <= 21
    assert middle("模型" * 20, 21).endswith("模型")


def test_shares_are_of_all_bytes_and_go_first(tmp_path: Path) -> None:
    save_hf(
        tmp_path, {"half.weight": origin(0, "F32", (64,)), **{f"x.{i}.w": origin(1, "F32", (32,)) for i in (0, 1)}}, {}
    )
    lines = [line for line in on_terminal("inspect", tmp_path) if line.endswith("#")]
    assert [line.split()[-1] for line in lines] == ["#" * 8, "#" * 8]
    assert not any("#" in line for line in on_terminal("inspect", tmp_path, columns=44))
    assert "#" not in ckpttool("inspect", tmp_path).out


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve layers, and one NaN."""
    tensors = {n: Raw("BF16", (t.bits & 0x807F) | 0x3E80) for n, t in llama(layers=12).items()}
    tensors["model.norm.weight"].bits[3] = 0x7FC0
    return save_hf(tmp_path_factory.mktemp("deep"), tensors, CONFIG | {"num_hidden_layers": 12})


def test_many_statistics_are_folded_on_a_terminal(deep: Path) -> None:
    lines = on_terminal("inspect", deep, "--stats", columns=200)
    assert len(lines) == 13  # a header, nine kinds of tensors in layers, three outside
    header = lines[0].split()
    assert header[:5] == ["name", "tensors", "min", "max", "norm"]
    row = next(line for line in lines if ".mlp.up_proj." in line).split()
    assert row[:2] == ["model.layers.{0..11}.mlp.up_proj.weight", "12"]
    each = [line.split("\t") for line in ckpttool("inspect", deep, "--stats", "--filter", "*up_proj*").out.splitlines()]
    assert len(each) == 13  # in a pipe one line for each
    norm = math.sqrt(sum(16 * 24 * (float(r[5]) ** 2 + float(r[6]) ** 2) for r in each[1:]))
    assert float(row[4]) == pytest.approx(norm, rel=1e-3)
    assert len(row[6]) == 12  # a bar for each layer
    nan = next(line for line in lines if line.startswith("model.norm.weight"))
    assert nan.split()[-2:] == ["1", "0"]


@pytest.mark.parametrize("columns", [60, 80])
def test_folded_statistics_fit(columns: int, deep: Path) -> None:
    lines = on_terminal("inspect", deep, "--stats", columns=columns)
    assert max(map(len, lines)) <= columns
    assert "norm" in lines[0].split()


def test_few_statistics_and_checksums_have_a_line_each(deep: Path) -> None:
    assert len(on_terminal("inspect", deep, "--stats", "--filter", "*up_proj*")) == 13
    assert len(on_terminal("inspect", deep, "--stats", "--hash")) == 12 * 9 + 4


def test_the_norm_is_that_of_numbers() -> None:
    from ckpttool.kernels.stats import collector
    from ckpttool.report.stats import norm_of

    values = np.array([3.0, np.nan, 4.0, np.inf], np.float32)
    numbers = collector("F32")
    numbers.add(values)
    assert norm_of(numbers.stats()) == pytest.approx(5.0)
    none = collector("F32")
    none.add(values[1:2])
    assert norm_of(none.stats()) is None


def test_colours_and_bars_have_nothing_to_do_with_each_other(deep: Path) -> None:
    with patch.dict("os.environ", {"NO_COLOR": "1"}):
        assert not any("\x1b" in line for line in on_terminal("inspect", deep, "--stats"))
        assert any("#" in line for line in on_terminal("inspect", deep, "--depth", "1"))
