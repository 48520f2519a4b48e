"""Every example in README.md, in docs/ and of `ckpttool explain` runs and prints what is shown."""

from pathlib import Path

import pytest

from tests.docs.runner import ROOT, Session, pages, problems

PAGES = [str(path.relative_to(ROOT)) for path in (*pages(), *(ROOT / "ckpttool/report/explained").glob("*.md"))]


def test_there_are_pages() -> None:
    assert "README.md" in PAGES


@pytest.mark.sample(
    "README.md",
    "docs/architecture.md",
    "docs/reference.md",
)
@pytest.mark.parametrize("page", PAGES)
def test_examples(page: str, tmp_path: Path) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert list(problems(text)) == []
    differences = list(Session(tmp_path).check(text, page))
    assert not differences, "\n\n".join(differences)


@pytest.mark.product(one_in=20)  # `make docs-check` looks at every page
@pytest.mark.parametrize("page", PAGES)
def test_no_machine_paths(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert f"{ROOT}/" not in text
