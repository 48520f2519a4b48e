"""The page of a report in a browser: what one can do with it, by mouse and keyboard, and what it never does."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckpttool.report.page import render
from tests.browser.conftest import Opened
from tests.helpers.command import ckpttool
from tests.helpers.reports import HOSTILE, large, names_of, sample

if TYPE_CHECKING:
    from playwright.sync_api import Page

SEARCH = "input[type=search]"
GRID = "table.tensors"


def names(page: Page) -> list[str]:
    """The names in the rows that are drawn."""
    found: list[str] = page.eval_on_selector_all(
        f"{GRID} tbody tr[data-at] td.name",
        "cells => cells.map(c => c.querySelector('.cut').lastChild?.textContent ?? '')",
    )
    return found


def count(page: Page) -> str:
    return str(page.inner_text(".counted"))


def fold(page: Page, *, on: bool) -> None:
    page.set_checked("label.check:has-text('Fold') input", on)


# -- search, sort, fold


def test_words_globs_patterns_and_fields_find_tensors(open_page: Opened) -> None:
    page = open_page(sample())
    fold(page, on=False)
    every = names_of(12, 8)
    queries = {
        "Q_PROJ layers.3.": ["model.layers.3.self_attn.q_proj.weight"],
        "*.embed_tokens.*": ["model.embed_tokens.weight"],
        "*layers.1?.mlp.gate.weight": [f"model.layers.{i}.mlp.gate.weight" for i in (10, 11)],
        "model.layers.[01].mlp.gate.*": [f"model.layers.{i}.mlp.gate.weight" for i in (0, 1)],
        r"re:layers\.(4|5)\.input": [f"model.layers.{i}.input_layernorm.weight" for i in (4, 5)],
        "layer:7 module:mlp.gate": ["model.layers.7.mlp.gate.weight"],
        "dtype:f32 layer:3": [n for n in every if ".3." in n and "layers.3." in n and "norm" in n],
        "nothing like it": [],
    }
    for query, expected in queries.items():
        page.fill(SEARCH, query)
        assert names(page) == expected, query
        assert count(page).startswith(f"{len(expected)} of {len(every)} tensors")
    page.fill(SEARCH, "")
    assert count(page).startswith("375 tensors, 2.56 GB")


def test_a_pattern_that_is_none_is_said_and_changes_nothing(open_page: Opened) -> None:
    page = open_page(sample())
    page.fill(SEARCH, "re:(")
    assert "not a pattern" in count(page)
    assert page.get_attribute(SEARCH, "aria-invalid") == "true"
    page.fill(SEARCH, "re:(lm)")
    assert page.get_attribute(SEARCH, "aria-invalid") is None
    assert names(page) == ["lm_head.weight"]


def test_every_column_sorts_both_ways_and_back(open_page: Opened) -> None:
    page = open_page(sample())
    fold(page, on=False)
    before = names(page)
    tensors = sample()["tensors"]
    for column in tensors["columns"]:
        if column.get("hidden"):
            continue
        values: dict[str, Any] = dict(zip(tensors["names"], column["values"], strict=True))
        button = f"th[data-column={column['id']}] button"
        page.click(button)
        first = page.get_attribute(f"th[data-column={column['id']}]", "aria-sort")
        size = prod if column["kind"] == "shape" else (lambda v: v)
        found = [size(values[name]) for name in names(page)]
        assert found == sorted(map(size, values.values()), reverse=first == "descending")[: len(found)], column["id"]
        page.click(button)
        found = [size(values[name]) for name in names(page)]
        assert found == sorted(map(size, values.values()), reverse=first != "descending")[: len(found)], column["id"]
        page.click(button)
        assert names(page) == before


def test_names_are_in_natural_order(open_page: Opened) -> None:
    found = ["b.10.w", "b.9.w", "a.10.x", "b.9", "a.2.x", "a.w"]
    page = open_page(sample(found))
    page.click("th[data-column=name] button")
    assert names(page) == ["a.2.x", "a.10.x", "a.w", "b.9", "b.9.w", "b.10.w"]
    page.click("th[data-column=name] button")
    assert names(page)[0] == "b.10.w"


def test_names_fold_into_templates(open_page: Opened) -> None:
    page = open_page(sample())
    assert "in 13 rows" in count(page)
    experts = "model.layers.{0..11}.mlp.experts.{0..7}.up_proj.weight"
    assert experts in names(page)
    row = page.locator("tr.group", has_text=experts)
    assert row.get_attribute("aria-expanded") == "false"
    assert "96\u00d7" in row.inner_text()
    row.click()
    assert row.get_attribute("aria-expanded") == "true"
    at = names(page).index(experts)
    assert names(page)[at + 1] == "model.layers.0.mlp.experts.0.up_proj.weight"
    page.fill(SEARCH, "re:layers.(1|3).mlp.gate")
    assert names(page) == ["model.layers.{1,3}.mlp.gate.weight"]


def test_columns_are_chosen(open_page: Opened) -> None:
    page = open_page(sample(), width=400)
    heads = "table.tensors th"
    assert page.locator(heads).all_inner_texts() == ["Name", "size"]
    page.click("details.menu summary")
    page.check("input[data-column=offset]")
    page.check("input[data-column=std]")
    assert page.locator(heads).all_inner_texts() == ["Name", "size", "offset", "std"]
    page.keyboard.press("Escape")
    assert not page.is_visible("input[data-column=offset]")


# -- keyboard


def test_the_table_is_usable_by_keyboard_alone(open_page: Opened) -> None:
    page = open_page(sample())
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.type") == "search"
    page.keyboard.type("experts")
    assert len(names(page)) == 3
    page.focus(GRID)
    page.keyboard.press("ArrowDown")
    active = f"document.getElementById(document.querySelector('{GRID}').getAttribute('aria-activedescendant'))"
    assert page.evaluate(f"{active}.getAttribute('aria-rowindex')") == "3"
    page.keyboard.press("ArrowRight")
    assert page.evaluate(f"{active}.getAttribute('aria-expanded')") == "true"
    page.keyboard.press("ArrowDown")
    assert page.evaluate(f"{active}.getAttribute('aria-level')") == "2"
    page.keyboard.press("Enter")
    assert page.inner_text("dialog h2") == "model.layers.0.mlp.experts.0.up_proj.weight"
    page.keyboard.press("Escape")
    assert not page.is_visible("dialog")
    assert page.evaluate(f"document.activeElement === document.querySelector('{GRID}')")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(f"{active}.getAttribute('aria-expanded')") == "false"
    page.fill(SEARCH, "")
    fold(page, on=False)
    page.focus(GRID)
    page.keyboard.press("End")
    assert page.get_attribute(GRID, "aria-rowcount") == "376"
    assert page.evaluate(f"{active}.getAttribute('aria-rowindex')") == "376"
    assert page.evaluate(f"{active}.innerText").startswith("lm_head.weight")


def test_the_treemap_goes_down_and_up_by_keyboard(open_page: Opened) -> None:
    page = open_page(sample())
    page.focus(".treemap button[tabindex='0']")
    focused = "document.activeElement.getAttribute('aria-label')"
    labels = page.eval_on_selector_all(".treemap > button", "boxes => boxes.map(b => b.getAttribute('aria-label'))")
    assert [text.split(":")[0] for text in labels] == [*(f"model.layers.{i}" for i in range(12)), "outside layers"]
    assert labels[-1].startswith("outside layers: 1.24 GB, 48.6%, 3 tensors")
    layer = page.evaluate(focused).split(":")[0]
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused).startswith("model.layers.1:")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    assert page.evaluate(focused).startswith("mlp.experts.")
    assert page.inner_text(".crumbs ol").split("\n")[-1] == layer
    page.click("text=Show in the table")
    assert "31 of 375 tensors" in count(page)
    page.focus(".treemap button[tabindex='0']")
    page.keyboard.press("Escape")
    assert page.evaluate(focused).startswith("model.layers.0")
    page.check("input[value=module]")
    assert page.locator(".treemap button[aria-label^='mlp.experts.up_proj: 301.99 MB']").count() == 1


@pytest.mark.parametrize("width", [1280, 390])
def test_boxes_of_layers_have_labels_in_their_order(open_page: Opened, width: int) -> None:
    page = open_page(sample(), width=width)
    boxes = page.eval_on_selector_all(
        ".treemap > button", "all => all.map(b => [b.offsetTop, b.offsetLeft, b.querySelector('.label')?.textContent])"
    )
    layers = [box for box in boxes if box[2] != "outside layers"]
    assert [int(label.split(".")[-1]) for _, _, label in layers] == list(range(12))
    assert layers == sorted(layers, key=lambda box: box[:2])  # row by row, from left to right
    if width == 1280:
        sizes = page.eval_on_selector_all(".treemap > button .size", "all => all.map(s => s.textContent)")
        assert len(sizes) == 13
        assert all("MB" in size or "GB" in size for size in sizes)


def test_a_grouping_of_one_box_is_not_offered(open_page: Opened) -> None:
    page = open_page(sample(["a.weight", "b.weight"]))
    assert page.eval_on_selector_all("#sizes .choice input", "all => all.map(i => i.value)") == ["module"]


def test_the_verdict_stands_first(open_page: Opened) -> None:
    page = open_page(sample())
    lines = page.inner_text("header .verdicts").split("\n")
    assert [line for line in lines if line] == [
        "\u2714 Complete: 375 tensors in 3 files",
        "\u2260 Differs from base: 12 of 375 tensors changed",
        "? Values not compared",
        "\u2716 3 NaN in step-1000",
    ]
    assert page.inner_text("#flat p") == "Every layer has the same value."


def test_both_histograms_lie_over_each_other(open_page: Opened) -> None:
    page = open_page(sample())
    tensors = sample()["tensors"]
    columns: dict[str, Any] = {c["id"]: c["values"] for c in tensors["columns"]}
    assert page.locator("#histograms option").count() == 12
    name = "model.layers.3.self_attn.q_proj.weight"
    page.select_option("#histograms select", label=name)
    at = tensors["names"].index(name)
    low, high = columns["min"][at], columns["max"][at]
    bars = page.eval_on_selector_all(
        "#histograms rect", "all => all.map(r => [Number(r.getAttribute('x')), Number(r.getAttribute('width'))])"
    )
    # Half as wide as the other one, in its middle: 520 points stand for the range of the other one.
    share = (high - low) / (columns["other_max"][at] - columns["other_min"][at])
    assert bars[-1][0] + bars[-1][1] - bars[0][0] == pytest.approx(520 * share, abs=3)
    assert page.locator("#histograms path.series-1").count() == 1
    assert "Bars: tuned" in page.inner_text("#histograms figcaption")
    page.fill(SEARCH, name)
    page.locator(f"{GRID} tbody tr[data-at]").first.click()
    assert page.locator("dialog path.series-1").count() == 1
    assert "Line: base" in page.inner_text("dialog figcaption")


def test_a_report_in_a_notebook(browser: Any, tmp_path: Path) -> None:
    from ckpttool.api.show import frame

    page = browser.new_page()
    file = tmp_path / "notebook.html"
    file.write_text(f"<!doctype html><meta charset=utf-8><title>x</title>{frame(render(sample()))}", encoding="utf-8")
    page.goto(file.as_uri())
    inside = page.frame_locator("iframe")
    assert inside.locator("main section").first.inner_text().startswith("Sizes")
    assert "375 tensors" in inside.locator("#tensors").inner_text()
    page.close()


def test_charts_say_their_values(open_page: Opened) -> None:
    page = open_page(sample())
    page.focus("#norms input[type=range]")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#norms .status") == "layer 1 — self_attn: 2; mlp: 1"
    page.focus("#change td[tabindex='0']")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#change .status").startswith("layers.1, mlp.experts.down_proj: 5.401e\u22124")
    page.click("#norms .twin summary")
    assert page.locator("#norms .twin tbody tr").count() == 12


def test_a_tensor_has_its_details(open_page: Opened) -> None:
    page = open_page(sample())
    page.fill(SEARCH, "lm_head")
    page.click(f"{GRID} tbody tr[data-at]")
    text = page.inner_text("dialog")
    assert "lm_head.weight" in text
    assert "offset" in text
    assert page.locator("dialog svg rect").count() == 20
    page.click("dialog >> text=Close")
    assert not page.is_visible("dialog")


def test_tensors_are_copied_as_csv_and_json(open_page: Opened) -> None:
    page = open_page(sample(["a.0.w", '=1+"2",3', "a.1.w"]))
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.click("text=Copy CSV")
    head, *rows = page.evaluate("window.copied").splitlines()
    assert head.startswith("name,component,dtype,shape,bytes,file,offset,min,max")
    # Only a text that would be a formula is changed.
    assert [row.split(",model,")[0] for row in rows] == ["a.0.w", '"\'=1+""2"",3"', "a.1.w"]
    assert rows[0].split(",")[3] == "2048x2048"
    page.click("text=Copy JSON")
    copied = json.loads(page.evaluate("window.copied"))
    assert copied[1]["name"] == '=1+"2",3'
    assert copied[0]["shape"] == [2048, 2048]


# -- light, dark, print, links


def test_the_theme_follows_the_system_and_a_choice_is_remembered(open_page: Opened) -> None:
    page = open_page(sample(), dark=True)
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.click("text=Light colours")
    light = page.evaluate(background)
    assert light != dark
    page.reload()
    page.wait_for_selector("main section")
    assert page.evaluate(background) == light
    page.emulate_media(color_scheme="light")
    page.click("text=Dark colours")
    assert page.evaluate(background) == dark


def test_on_paper_everything_is_unfolded(open_page: Opened) -> None:
    page = open_page(sample(), dark=True)
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.locator("#files tbody tr").count() == 60
    assert not page.is_visible(SEARCH)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator(f"{GRID} tbody tr").count() == 13
    assert page.eval_on_selector(".virtual", "box => box.scrollHeight <= box.clientHeight + 1")
    assert len(page.pdf()) > 10_000


def test_a_link_leads_to_a_section(open_page: Opened) -> None:
    page = open_page(sample())
    page.goto(page.url + "#check")
    page.reload()
    page.wait_for_selector("main section")
    page.wait_for_function("document.getElementById('check').getBoundingClientRect().top < innerHeight")
    page.click("nav.contents >> text=Norms by layer")
    assert page.url.endswith("#norms")


# -- what must never happen


def test_hostile_names_are_text(open_page: Opened) -> None:
    hostile = [*HOSTILE]
    document = sample(hostile)
    title = "".join(HOSTILE[:4])
    page = open_page({**document, "title": title, "subtitle": title, "notes": hostile, "facts": [[title, title]]})
    assert page.evaluate("window.broken") is None
    assert page.inner_text("h1") == title.replace("\u202e", "\\u202e")
    fold(page, on=False)
    assert names(page)[:2] == list(HOSTILE[:2])
    assert r"new\nline\tand\x00nul" in names(page)
    assert page.locator("main script, main img, main iframe").count() == 0
    ways = page.eval_on_selector_all("#sizes .choice input", "all => all.map(i => i.value)")
    assert "module" in ways
    for view in ways:
        page.check(f"input[value={view}]")
    page.fill(SEARCH, "onerror")
    page.click(f"{GRID} tbody tr[data-at]")
    assert page.inner_text("dialog h2") == HOSTILE[1]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("window.broken") is None


def test_the_policy_stops_other_scripts_and_requests(browser: Any, tmp_path: Any) -> None:
    page = browser.new_page()
    file = tmp_path / "report.html"
    file.write_text(render(sample()), encoding="utf-8")
    page.goto(file.as_uri())
    page.wait_for_selector("main section")
    outcome = page.evaluate(
        """async () => {
        const script = document.createElement("script");
        try { script.text = "window.broken = 1"; document.body.append(script); } catch {}
        const reached = await fetch("https://example.com/").then(() => true, () => false);
        let html = false;
        try { document.body.innerHTML += "<b>x</b>"; html = true; } catch {}
        return [window.broken ?? null, reached, html];
    }"""
    )
    assert outcome == [None, False, False]
    page.close()


def test_what_a_browser_lacks_is_said(open_page: Opened) -> None:
    page = open_page(sample(), script=False)
    assert "JavaScript is off" in page.inner_text("body")
    assert "is being drawn" not in page.inner_text("body")
    html = render(sample())
    broken = html.replace('id="data">', 'id="data">AAAA')
    assert "is damaged" in open_page(broken).inner_text("main")


def test_without_decompression_a_sentence_says_so(browser: Any, tmp_path: Any) -> None:
    page = browser.new_page()
    page.add_init_script("delete window.DecompressionStream")
    file = tmp_path / "report.html"
    file.write_text(render(sample()), encoding="utf-8")
    page.goto(file.as_uri())
    assert "no DecompressionStream" in page.inner_text(".message:not(.needs-script)")
    page.close()


# -- accessibility and layout

CLIPPED = Path(__file__).with_name("clipped.js").read_text(encoding="utf-8")

LOOKS = [(1280, False), (1280, True), (400, False), (400, True)]


def looked_at(page: Page, state: str) -> None:
    """Nothing keeps people from reading the page, as far as axe-core and bounding boxes know."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
    options = {"runOnly": {"type": "tag", "values": tags}, "resultTypes": ["violations"]}
    found = axe.run(page, options=options).response["violations"]
    assert not [(v["id"], [n["html"][:120] for n in v["nodes"][:3]]) for v in found], state
    assert page.evaluate(CLIPPED) == [], state


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_axe_finds_nothing_and_nothing_is_clipped(open_page: Opened, width: int, dark: bool) -> None:
    page = open_page(sample(), width=width, dark=dark)
    looked_at(page, "as opened")
    page.click("details.menu summary")
    looked_at(page, "columns")
    page.keyboard.press("Escape")
    page.locator("tr.group").nth(3).click()
    for summary in page.locator(".twin summary").all():
        summary.click()
    page.locator(".treemap button").nth(1).click()
    page.wait_for_timeout(50)
    looked_at(page, "unfolded")
    page.fill(SEARCH, "experts.3.up_proj layer:4")
    page.locator(f"{GRID} tbody tr[data-at]").first.click()
    looked_at(page, "a tensor")


MERGE = "fixtures/merge/inputs"
REPORTS = {
    "ranks": ["inspect", "fixtures/llama_tp8", "--stats", "--check", "--html"],
    "components": ["inspect", "fixtures/paddle_zcc/ep2_tp2_sharding2_ema", "--stats", "--html"],
    "quantized": ["inspect", "fixtures/deepseek_v3", "--stats", "--html"],
    "change": ["inspect", f"{MERGE}/ft1", "--stats", "--diff", f"{MERGE}/ft2", "--values", "--html"],
    "run": ["inspect", MERGE, "--checkpoints", "--stats", "--html"],
    "merge": [
        "merge",
        f"{MERGE}/ft1",
        f"{MERGE}/ft2",
        "--base",
        f"{MERGE}/base",
        "--method",
        "ties",
        "--weights",
        "0.6,0.4",
        "--report",
    ],
}


@pytest.mark.parametrize("name", REPORTS)
def test_reports_of_checkpoints(open_page: Opened, tmp_path: Path, name: str) -> None:
    command, *arguments = REPORTS[name]
    file = tmp_path / "made.html"
    done = ckpttool(command, *arguments, file, *(["-o", tmp_path / "out"] if command == "merge" else []))
    assert file.exists(), done.err
    for width, dark in LOOKS[::3]:
        page = open_page(file.read_text(encoding="utf-8"), width=width, dark=dark)
        assert page.locator("text=cannot be drawn").count() == 0
        looked_at(page, f"{width} {dark}")


# -- 100,000 tensors


@pytest.fixture(scope="module")
def many() -> str:
    return render(large())


def test_100_000_tensors_with_statistics_are_less_than_2_mb(many: str) -> None:
    assert len(many.encode()) < 2_000_000


def test_100_000_tensors_are_interactive_within_a_second(open_page: Opened, many: str) -> None:
    """Of processor time, which other programs do not lengthen: that of all threads of the page's process.

    (The time of the main thread alone begins anew with every page, so two readings around a load say nothing.)
    """
    page = open_page("<!doctype html><main><section>x</section></main>")
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def busy() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return float(next(m["value"] for m in metrics if m["name"] == "ProcessTime"))

    def spent(act: Any) -> float:
        before = busy()
        act()
        return busy() - before

    file = page.url.removeprefix("file://")
    with open(file, "w", encoding="utf-8") as out:  # noqa: PTH123  (the address as the page has it)
        out.write(many)

    def load() -> None:
        page.reload()
        page.wait_for_selector(f"{GRID} tbody tr[data-at]")

    loading = spent(load)
    assert 0.1 < loading < 1  # less, and nothing was measured
    assert count(page).startswith("100,000 tensors")
    assert spent(lambda: page.fill(SEARCH, "layers.17. experts 3.up")) < 1
    assert page.evaluate("performance.getEntriesByName('ckpttool:filtered').length") > 0
    page.fill(SEARCH, "")
    assert spent(lambda: fold(page, on=False)) < 1
    for column in ("name", "std", "bytes"):
        assert spent(lambda at=column: page.click(f"th[data-column={at}] button")) < 1, column
    page.focus(GRID)
    assert spent(lambda: page.keyboard.press("End")) < 0.5
    assert page.locator(f"{GRID} tbody tr").count() < 80
    assert page.get_attribute(GRID, "aria-rowcount") == "100001"
