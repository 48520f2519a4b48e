"""The tables of docs/ that follow from the code are what the code says now."""

from __future__ import annotations

import pytest

from scripts.make_reference import ROOT, TABLES, commands, page_text, with_table


@pytest.mark.parametrize("page", sorted({page for page, _ in TABLES.values()}))
def test_pages_are_up_to_date(page: str) -> None:
    assert (ROOT / page).read_text(encoding="utf-8") == page_text(page), "run: python scripts/make_reference.py"


def test_every_command_has_a_heading() -> None:
    assert "### ckpttool reshard\n" in commands()
    assert "| `--tp-out N` |" in commands()


def test_only_the_table_is_replaced() -> None:
    text = "before\n<!-- begin x -->\nold\n<!-- end x -->\nafter\n"
    assert with_table(text, "x", "new") == "before\n<!-- begin x -->\n\nnew\n\n<!-- end x -->\nafter\n"


def test_a_page_without_a_place_is_an_error() -> None:
    with pytest.raises(SystemExit, match="begin x"):
        with_table("nothing here", "x", "new")
