"""Pages of docs/ are short, begin and end alike, and are found: from their entry, and from the texts of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.runner import ROOT, pages
from tests.docs.test_cli_reference import prose

DOCS = ROOT / "docs"
PAGES = [str(path.relative_to(DOCS)) for path in pages() if path.is_relative_to(DOCS)]

MOST_WORDS = 2600
LONGER = {
    "findings.md": "tables with a row for each finding: looked up, not read",
    "reference.md": "tables with a row for each option: looked up, not read",
}
"""Pages that may have more words, and why."""
MOST_PAGES = 90
MOST_WORDS_IN_ALL = 80_000

NAMED = re.compile(r"\bdocs/[\w./-]+[\w/]")
"""The address of a page, a picture or a folder, as comments, messages and scripts name it."""
NAMES = ("ckpttool", "scripts", "bench", "tests")
OF_OTHERS = {"docs/gguf.md"}
"""A page of llama.cpp."""


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def problems(text: str) -> list[str]:
    """What is odd about how a page begins and ends."""
    found = []
    titles = re.findall(r"^# .*", prose(text), re.MULTILINE)
    if len(titles) != 1 or not text.startswith("# "):
        found.append(f"one title in the first line, not {len(titles)}")
    beginning = text.split("\n\n")[1:2]
    if not beginning or re.match(r"[|#>*<-]|```", beginning[0]):
        found.append("a sentence below the title says what the page gives")
    elif re.match(r"For (people|everybody|Megatron's|those|[\w ']+ users)\b", beginning[0]):
        found.append("the sentence below the title says what the page gives, not whom it is for")
    end = text.rstrip("\n").split("\n\n")[-2:]
    if not any(re.match(r"\*{0,2}Next:", part) and "](" in part for part in end):
        found.append("the last lines say where to go on: **Next:** [...](...)")
    return found


def unlinked(folder: Path) -> set[str]:
    """The pages of a folder that its entry, the page of the same name, does not link."""
    entry = folder.with_suffix(".md")
    if not entry.exists():
        return set()
    links = re.findall(r"\]\(([^)#\s]+)", entry.read_text(encoding="utf-8"))
    linked = {(entry.parent / link).resolve() for link in links}
    return {path.name for path in folder.glob("*.md") if path.resolve() not in linked}


@pytest.mark.product(one_in=20)  # `make docs-check` looks at every page
@pytest.mark.parametrize("page", PAGES)
def test_pages_are_short(page: str) -> None:
    words = len(text_of(page).split())
    if page in LONGER:
        assert words > MOST_WORDS, "it is short enough: take it out of LONGER"
    else:
        assert words <= MOST_WORDS, f"{words} words: make it several pages"


def test_all_pages_together_can_be_read() -> None:
    words = sum(len(re.findall(r"\S*\w\S*", text_of(page))) for page in PAGES)  # the bars of tables are no words
    assert len(PAGES) <= MOST_PAGES
    assert words <= MOST_WORDS_IN_ALL, f"{words} words: cut what another page says, too"


@pytest.mark.product(one_in=20)  # `make docs-check` looks at every page
@pytest.mark.parametrize("page", PAGES)
def test_pages_begin_and_end_alike(page: str) -> None:
    assert problems(text_of(page)) == []


def test_the_readme_is_one_screen() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 700
    assert len(text.splitlines()) <= 90


@pytest.mark.parametrize("folder", sorted({path.parent for path in pages()} - {ROOT, DOCS}), ids=lambda path: path.name)
def test_an_entry_links_all_pages_of_its_folder(folder: Path) -> None:
    assert unlinked(folder) == set()


def test_the_code_names_pages_that_are_there() -> None:
    gone = []
    for folder in NAMES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path == Path(__file__):
                continue
            for name in set(NAMED.findall(path.read_text(encoding="utf-8"))) - OF_OTHERS:
                # Capitals stand for any page, docs/reference/COMMAND.md; one letter for a page that a test makes up.
                is_one = Path(name).suffix in (".md", ".svg", ".png", ".yaml") and not re.search(
                    r"[A-Z]{3}|/\w\.", name
                )
                if is_one and not (ROOT / name).exists():
                    gone.append(f"{path.relative_to(ROOT)}: {name}")
    assert gone == []


def test_each_can_fail(tmp_path: Path) -> None:
    good = "# Title\n\nHow to do it.\n\n## One\n\ntext\n\n**Next:** [a](b.md)\n"
    assert problems(good) == []
    assert len(problems(good.replace("How to do it.", "- [One](#one)"))) == 1
    assert len(problems(good.replace("How to do it.", "For people who do it."))) == 1
    assert len(problems(good.replace("## One", "# One"))) == 1
    assert len(problems(good.replace("**Next:** [a](b.md)", ""))) == 1
    (tmp_path / "x").mkdir()
    (tmp_path / "x/one.md").write_text(good)
    (tmp_path / "x.md").write_text("# X\n\n[one](x/one.md)\n")
    assert unlinked(tmp_path / "x") == set()
    (tmp_path / "x.md").write_text("# X\n")
    assert unlinked(tmp_path / "x") == {"one.md"}
