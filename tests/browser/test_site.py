"""The site that `make site` builds, opened from disk: every page, narrow and wide, light and dark; search; axe-core."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.docs.runner import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BUILD_CPU_S = 30
"""CPU time of a build; it takes 3 seconds on a machine of 2020."""

VIEWS = [(width, dark) for width in (1280, 400) for dark in (False, True)]

CLIPPED = """() => [...document.querySelectorAll("article *")].filter(e => {
  if (e.closest("pre, .md-typeset__scrollwrap, svg, .headerlink") || !e.getClientRects().length) return false
  return e.getBoundingClientRect().right > document.documentElement.clientWidth + 1
}).map(e => e.outerHTML.slice(0, 120))"""
"""What sticks out of the window and lies in nothing that scrolls."""

DARK = "matchMedia('(prefers-color-scheme: dark)').matches"
OPTIONS = {"resultTypes": ["violations"], "preload": False}
"""For axe-core: not to ask for style sheets once more, which a browser refuses on file://."""

LOOKED_AT = {
    "index.html",
    "merge.html",
    "merge/methods.html",
    "reference.html",
    "formats.html",
    "coming-from.html",
}
"""Where axe-core looks in every view: it takes a second for a page. In one view it looks at all."""


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install '.[site]'")
    folder = tmp_path_factory.mktemp("site") / "site"
    began = os.times()
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    ended = os.times()
    assert ended.children_user + ended.children_system - began.children_user - began.children_system < BUILD_CPU_S
    return folder


def html(site: Path) -> list[Path]:
    """Every page; 404.html is for servers, and names things from their root."""
    return sorted(path for path in site.rglob("*.html") if path.name != "404.html")


@pytest.fixture(params=VIEWS, ids=lambda v: f"{v[0]}-{'dark' if v[1] else 'light'}")
def page(request: pytest.FixtureRequest, browser: Browser) -> Iterator[Page]:
    """A window; the test fails for any message, error, or request that is not for a file."""
    width, dark = request.param
    said: list[str] = []
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
    )
    one = context.new_page()
    one.on("console", lambda message: said.append(f"{one.url}: console: {message.text}"))
    one.on("pageerror", lambda error: said.append(f"{one.url}: error: {error}"))
    one.on("request", lambda r: said.extend([f"{one.url}: {r.url}"] * (not r.url.startswith(("file:", "data:")))))
    yield one
    context.close()
    assert not said


def test_every_page(site: Path, page: Page) -> None:
    """Opens, fits the window, and has nothing that axe-core minds."""
    from axe_playwright_python.sync_playwright import Axe

    axe, found = Axe(), []
    everywhere = page.viewport_size == {"width": 1280, "height": 900} and not page.evaluate(DARK)
    for path in html(site):
        name = path.relative_to(site)
        page.goto(path.as_uri(), wait_until="load")
        if page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
            found.append(f"{name}: scrolls sideways")
        found += [f"{name}: sticks out: {element}" for element in page.evaluate(CLIPPED)]
        if not everywhere and str(name) not in LOOKED_AT:
            continue
        for violation in axe.run(page, options=OPTIONS).response["violations"]:
            found += [f"{name}: {violation['id']}: {node['html'][:160]}" for node in violation["nodes"]]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("words", "place"), [("zero_to_fp32", "coming-from.html"), ("KV cache", "size"), ("dare_ties", "merge/")]
)
def test_search(site: Path, page: Page, words: str, place: str) -> None:
    page.goto((site / "index.html").as_uri(), wait_until="load")
    page.keyboard.press("/")
    page.keyboard.type(words, delay=20)
    page.wait_for_selector(".md-search-result__item a")
    targets = page.eval_on_selector_all(".md-search-result__item a", "all => all.map(a => a.href)")
    assert any(place in target for target in targets), targets
    page.locator(".md-search-result__item a").first.click()
    page.wait_for_url("**/*.html*")
    assert page.locator("article h1").is_visible()


def test_the_scheme_can_be_switched(site: Path, page: Page) -> None:
    page.goto((site / "merge.html").as_uri(), wait_until="load")
    scheme = "document.body.dataset.mdColorScheme"
    before = page.evaluate(scheme)
    page.locator("label[for^=__palette]:visible").click()
    assert page.evaluate(scheme) != before
    page.goto((site / "reshard.html").as_uri(), wait_until="load")
    assert page.evaluate(scheme) != before


def test_examples_are_copied_as_commands(site: Path, page: Page) -> None:
    page.goto((site / "tutorials" / "mergekit.html").as_uri(), wait_until="load")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    block = page.locator("div.highlight", has_text="merge_method: ties").first
    block.get_by_role("button").click(force=True)
    deadline = time.monotonic() + 10
    while not (text := page.evaluate("navigator.clipboard.readText()")) and time.monotonic() < deadline:
        page.wait_for_timeout(50)
    assert text.startswith("cat > ties.yml <<'EOF'\nmerge_method: ties\n")
    assert text.endswith("dtype: bfloat16\nEOF")


def test_it_prints(site: Path, page: Page) -> None:
    page.goto((site / "tutorials" / "inference.html").as_uri(), wait_until="load")
    page.emulate_media(media="print")
    assert not page.locator(".md-header").is_visible()
    assert not page.locator(".md-sidebar--primary").is_visible()
    wraps = "all => all.every(e => getComputedStyle(e).whiteSpace === 'pre-wrap')"
    assert page.eval_on_selector_all("pre > code", wraps)
