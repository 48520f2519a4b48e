"""Sizes, tables and JSON: aligned for a terminal, tab-separated for a pipe."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest

from ckpttool.answers.fields import shape
from ckpttool.core.words import count, either, short, some
from ckpttool.errors import plain
from ckpttool.report import text
from ckpttool.report.tables import table


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1000, "1,000 bytes (1.00 kB)"),
        (1024, "1,024 bytes (1.02 kB)"),
        (688574839360, "688,574,839,360 bytes (688.57 GB)"),
        (10**15, "1,000,000,000,000,000 bytes (1.00 PB)"),
    ],
)
def test_sizes(n: int, expected: str) -> None:
    assert text.exact(n) == expected


def test_small_formats() -> None:
    assert short(5) == "5 bytes"
    assert short(1500) == "1.50 kB"
    assert count(1, "file") == "1 file"
    assert count(1000, "file") == "1,000 files"
    assert count(2, "box", "boxes") == "2 boxes"
    assert (either(["a"]), either(("a", "b", "c"))) == ("a", "a, b or c")
    assert (some(["a", "b"]), some({"a": 1, "b": 2, "c": 3}, 1)) == ("a, b", "a and 2 more")
    assert shape((2, 3)) == "[2, 3]"
    assert shape(()) == "[]"
    assert text.ranks([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert plain("a\tb\nc") == "a\\tb\\nc"


def test_table_off_a_terminal_is_tsv(capsys: pytest.CaptureFixture[str]) -> None:
    table(("name", "n"), [("a", 1000), ("b, c", "-")])
    assert capsys.readouterr().out == "name\tn\na\t1000\nb, c\t-\n"


def test_table_on_a_terminal_is_aligned(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "on_terminal", lambda: True)
    table(("name", "n", "x"), [("a", 1000, "1.5"), ("long", 2, "-")], right=(2,))
    assert capsys.readouterr().out == "name      n    x\na     1,000  1.5\nlong      2    -\n"


def test_long_json_is_compact(capsys: pytest.CaptureFixture[str]) -> None:
    text.dump({"a": [1, 2]}, entries=5)
    assert "\n" in capsys.readouterr().out.rstrip("\n")
    text.dump({"a": ["ü"]}, entries=5000)
    out = capsys.readouterr().out
    assert out == '{"a":["ü"]}\n'
    assert json.loads(out) == {"a": ["ü"]}


def test_json_refuses_nan() -> None:
    with pytest.raises(ValueError, match="JSON"):
        text.dump({"a": float("nan")})


def test_names_that_the_terminal_cannot_show_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    text.write("ü\ud800\n")
    sys.stdout.flush()
    assert raw.getvalue() == b"\\xfc\\ud800\n"


LONG = "the models do not have the same tensors, which is said at length so that it does not fit"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (f"error: {LONG}", 2),
        (f"warning no-index: {LONG}", 2),
        (f"  --> {LONG}", 2),
        (f"hint: {LONG}", 2),
        (f"hint: {LONG}, or `ckpttool reshard SRC DST --to hf`", 2),
        (f"hint: {LONG}: ckpttool reshard SRC DST --to hf", 2),  # the command, to be pasted, stays whole
        (f"hint: {LONG}; or drop it: --to hf --tp-out 2", 2),
        (f"hint: --filter '{LONG}' --to hf", 1),
        (f"next: {LONG}", 1),
        (f"read 3%, {LONG}", 2),
        ("error: short", 1),
    ],
)
def test_messages_are_folded_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, shown: int
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    text.message(line)
    assert capsys.readouterr().err == line + "\n"  # a log has the line as it is
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    text.message(line)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == shown
    assert " ".join(map(str.strip, said)) == line.strip()
    assert shown == 1 or max(map(len, said)) <= 80
    assert all(any(part in one for one in said) for part in re.findall("`.*`|ckpttool .*|--tp-out 2", line))


@pytest.mark.parametrize(
    ("n", "shown"), [(999_994, "999.99 kB"), (999_995, "1.00 MB"), (999_999_999, "1.00 GB"), (1, "1 byte")]
)
def test_no_size_is_a_thousand_of_a_unit(n: int, shown: str) -> None:
    assert short(n) == shown


@pytest.mark.parametrize("columns", [24, 40, 60, 80, 200])
def test_lines_fit_and_numbers_stay_whole(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    line = f"{LONG}: tensor `a.b.weight` [64, 176] has 437,268 bytes of 1.20 GB, pass --tp-out 2 or --values"
    shown = text.fold(line).split("\n")
    assert max(map(len, shown)) <= columns
    for whole in ("`a.b.weight`", "[64, 176]", "437,268 bytes", "1.20 GB", "--tp-out 2"):
        assert any(whole in one for one in shown)


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_wide_tables_take_two_lines_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    monkeypatch.setattr(text, "on_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    digest, name = "d" * 41, "model.layers.0.mlp.down_projection.weight"
    table(("name", "n", "bytes", "digest"), [(name, 100, 999_000, digest)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= max(columns, 62)  # the digest and the numbers stay whole
    assert "999.00 kB" in lines[-1]
    assert " 100 " in lines[-1]
    assert lines[0] == "name" if columns < 80 else lines[0].split() == ["name", "n", "size", "digest"]
    assert len(lines) == (4 if columns < 80 else 2)


def test_a_pipe_has_exact_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    table(("name", "bytes"), [("a", 1_234_567)])
    assert capsys.readouterr().out == "name\tbytes\na\t1234567\n"
