"""README.md as a code host shows it: nothing overlaps or is clipped, and axe-core finds nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from scripts.make_recordings import SESSIONS, file_of
from tests.docs.runner import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser

STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--ground:#fff;--code:#f6f8fa;--line:#d1d9e0;--link:#0969da}
@media(prefers-color-scheme:dark){:root{--ink:#f0f6fc;--ground:#0d1117;--code:#151b23;--line:#3d444d;--link:#4493f8}}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.5 sans-serif;overflow-wrap:break-word}
main{max-width:888px;margin:auto;padding:16px}img{max-width:100%}a{color:var(--link)}
pre{background:var(--code);padding:16px;overflow:auto;font-size:85%}
table{border-collapse:collapse;display:block;overflow:auto}th,td{border:1px solid var(--line);padding:6px 13px}
"""
WIDER = """() => Array.from(document.querySelectorAll("body *"), e => [e.tagName, e.getBoundingClientRect().right])
  .filter(([tag, right]) => ["IMG", "P", "H1", "H2", "PRE", "TABLE", "UL"].includes(tag) && right > innerWidth)"""


def html() -> str:
    """The page, with what scrolls reachable by the keyboard as code hosts have it."""
    markdown = pytest.importorskip("markdown", reason="Markdown is not installed: pip install '.[site]'")
    body = markdown.markdown((ROOT / "README.md").read_text(encoding="utf-8"), extensions=["tables", "fenced_code"])
    body = body.replace("<pre>", '<pre tabindex="0">').replace("<table>", '<table tabindex="0">')
    head = f'<meta charset="utf-8"><title>README</title><base href="{ROOT.as_uri()}/"><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body><main>{body}</main></body></html>'


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_readme(browser: Browser, tmp_path_factory: pytest.TempPathFactory, width: int, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed: '.[browser]'")
    file = tmp_path_factory.mktemp("readme") / "readme.html"
    file.write_text(html(), encoding="utf-8")
    page = browser.new_page(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if scheme == "dark" else "light",
        reduced_motion="reduce",
    )
    page.goto(file.as_uri())
    pictures = page.evaluate("Array.from(document.images, i => [i.currentSrc.split('/').pop(), i.naturalWidth])")
    assert all(wide for _, wide in pictures)
    assert pictures[0][0] == f"reshard-{'narrow-' * (width < 600)}{scheme}.svg"
    assert page.evaluate(WIDER) == []
    found = axe.Axe().run(page)
    assert found.response["violations"] == []
    page.close()


@pytest.mark.parametrize("name", SESSIONS)
def test_a_recording_is_complete_at_once(browser: Browser, name: str) -> None:
    shown = """() => Array.from(document.querySelectorAll("text"), t =>
      getComputedStyle(t).visibility === "visible" && !document.getAnimations().length)"""
    page = browser.new_page(reduced_motion="no-preference")
    page.goto(file_of(name).as_uri())
    assert all(page.evaluate(shown))
    page.close()
