"""The report of a merge in Chromium: what is shown, and that everybody can read it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.merge.models import finetuned, llama, llama_config, merge, save

if TYPE_CHECKING:
    from tests.browser.conftest import Opened

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of a merge of models with hostile names."""
    room = tmp_path_factory.mktemp("room")
    base = llama()
    names = ("a", "<b>&|`b", "base")
    for i, name in enumerate(names):
        save(room / name, finetuned(base, i), llama_config())
    one, two, old = (room / name for name in names)
    options = ("--method", "ties", "--weights", "0.6,0.4", "--param", "density=0.5", "--base", old)
    merge(one, two, *options, "-o", room / "dst", "--report", room / "r.html")
    return (room / "r.html").read_text(encoding="utf-8")


def test_what_is_shown(open_page: Opened, report: str) -> None:
    page = open_page(report)
    titles = [t.removesuffix("#") for t in page.locator("main section h2").all_inner_texts()]
    for title in ("Sources", "Distances", "What came from where", "Distance by layer", "Kept by layer", "Recipe"):
        assert title in titles
    assert page.locator("#sources tbody tr").count() == 3
    assert "<b>&|`b" in page.locator("#sources").inner_text()


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_axe_finds_nothing_and_nothing_is_clipped(open_page: Opened, report: str, width: int, *, dark: bool) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = open_page(report, width=width, dark=dark)
    found = axe.run(page).response["violations"]
    assert not [(v["id"], [n["html"][:120] for n in v["nodes"][:3]]) for v in found]
    assert page.evaluate((HERE / "clipped.js").read_text(encoding="utf-8")) == []
