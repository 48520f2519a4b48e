"""The tables of docs/ that follow from the code are what the code says now."""

from __future__ import annotations

import pytest

from scripts.make_reference import ROOT, commands, options, pages, visible, with_table


def test_pages_are_up_to_date() -> None:
    old = [page for page, text in pages().items() if (ROOT / page).read_text(encoding="utf-8") != text]
    assert not old, "run: python scripts/make_reference.py"


def test_every_option_stands_once() -> None:
    """What many commands have is one row, with their names; what means something else in a command is another one."""
    rows = [line for line in options().splitlines() if line.startswith("| `")]
    assert len(rows) == len(set(rows))
    assert [row.rsplit(" | ", 1)[1] for row in rows if row.startswith("| `--json` |")] == ["all |"]
    assert [row for row in rows if row.startswith("| `--tp-out N` |")] == [
        "| `--tp-out N` | Tensor-parallel ranks of DST. | reshard, merge, size |"
    ]
    assert all(f"`{name}`" in commands() for name, _ in visible())


def test_only_the_table_is_replaced() -> None:
    text = "before\n<!-- begin x -->\nold\n<!-- end x -->\nafter\n"
    assert with_table(text, "x", "new") == "before\n<!-- begin x -->\n\nnew\n\n<!-- end x -->\nafter\n"


def test_a_page_without_a_place_is_an_error() -> None:
    with pytest.raises(SystemExit, match="begin x"):
        with_table("nothing here", "x", "new")
