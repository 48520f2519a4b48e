"""The tables of docs/ that follow from the code are what the code says now."""

from __future__ import annotations

import pytest

from scripts.make_reference import ROOT, command_pages, pages, with_table


def test_pages_are_up_to_date() -> None:
    old = [page for page, text in pages().items() if (ROOT / page).read_text(encoding="utf-8") != text]
    assert not old, "run: python scripts/make_reference.py"


def test_every_command_has_a_page() -> None:
    found = command_pages()
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "docs/reference").glob("*")} == set(found)
    assert "\n# ckpttool reshard\n" in "\n" + found["docs/reference/reshard.md"]
    assert "| `--tp-out N` |" in found["docs/reference/reshard.md"]


def test_only_the_table_is_replaced() -> None:
    text = "before\n<!-- begin x -->\nold\n<!-- end x -->\nafter\n"
    assert with_table(text, "x", "new") == "before\n<!-- begin x -->\n\nnew\n\n<!-- end x -->\nafter\n"


def test_a_page_without_a_place_is_an_error() -> None:
    with pytest.raises(SystemExit, match="begin x"):
        with_table("nothing here", "x", "new")
