"""Pictures of who holds what, as Chromium sets their labels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from ckpttool.report import svg
from tests.helpers.layouts import LAYOUTS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BOXES = """() => Array.from(document.querySelectorAll("svg"), svg => {
  const view = svg.viewBox.baseVal;
  const texts = Array.from(svg.querySelectorAll("text"), t => {
    const b = t.getBBox();
    return {text: t.textContent, x: b.x, y: b.y + b.height * 0.1, w: b.width, h: b.height * 0.8};
  });
  const bad = texts.filter(t => t.x < 0 || t.y < 0 || t.x + t.w > view.width || t.y + t.h > view.height);
  for (let i = 0; i < texts.length; i++) for (let j = 0; j < i; j++) {
    const a = texts[i], b = texts[j];
    if (a.x < b.x + b.w && b.x < a.x + a.w && a.y < b.y + b.h && b.y < a.y + a.h) bad.push([a, b]);
  }
  const cells = Array.from(svg.querySelectorAll("rect")).filter(r => r.querySelector("title")).map(r => r.getBBox());
  const within = (t, c) => c.x <= t.x && t.x + t.w <= c.x + c.width && c.y <= t.y && t.y + t.h <= c.y + c.height;
  const empty = cells.filter(c => !texts.some(t => within(t, c)));
  return {texts: texts.length, bad, empty};
})"""


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    made = browser.new_page(viewport={"width": 1280, "height": 800})
    yield made
    made.close()


@pytest.mark.parametrize("name", LAYOUTS)
def test_labels_lie_in_their_cells_and_on_no_other(page: Page, name: str) -> None:
    layout = LAYOUTS[name]
    page.set_content("".join([*svg.pages(layout, "a title"), *(f.svg for f in svg.figures(layout))]))
    found = page.evaluate(BOXES)
    assert found
    for drawn in found:
        assert drawn["texts"]
        assert drawn["bad"] == []
        assert drawn["empty"] == []


def test_colours_of_a_page_replace_those_of_the_figures(page: Page) -> None:
    (first, *_) = svg.figures(LAYOUTS["tp8"])
    page.set_content(f"<style>:root{{{svg.variables('dark')}}}</style>{first.svg}")
    fill = page.evaluate("getComputedStyle(document.querySelector('rect')).fill")
    assert fill == "rgb(27, 88, 120)"
    page.set_content(first.svg)
    assert page.evaluate("getComputedStyle(document.querySelector('rect')).fill") == "rgb(142, 202, 230)"
