"""Take the screenshots of docs/report.md and docs/merge/report.md in Chromium: python scripts/make_screenshots.py

    docs/images/report-light.png, report-dark.png       what one sees first, of fixtures/deepseek_v3
    docs/images/report-narrow-light.png, ...            the same on a phone
    docs/images/report-tensors.png, report-tensor.png   the table, and one tensor
    docs/images/report-ranks.png, report-change.png     fixtures/llama_tp8, and two models of fixtures/merge compared
    docs/images/merge-report.png                        a merge of two models of fixtures/merge

It needs the extra `browser` and Chromium, as `make test-browser` does. Look at what it made before you commit it: fonts
are those of this machine.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.helpers.command import ckpttool  # noqa: E402

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

IMAGES = ROOT / "docs" / "images"
LARGEST = 150_000
"""Bytes of a picture."""
REPORTS = {
    "deepseek": ["fixtures/deepseek_v3", "--stats", "--check"],
    "ranks": ["fixtures/llama_tp8", "--stats"],
    "change": ["fixtures/merge/inputs/ft1", "--diff", "fixtures/merge/inputs/ft2", "--values"],
}
MERGE = "merge models/ft1 models/ft2 --base models/base --method ties --weights 0.6,0.4 --param density=0.5,0.7 -o ties"


def main() -> int:
    """Write the reports, open them, and take the pictures."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        reports = {name: Path(folder) / f"{name}.html" for name in REPORTS}
        for name, arguments in REPORTS.items():
            done = ckpttool("inspect", *arguments, "--html", reports[name])
            if not reports[name].exists():
                raise SystemExit(done.err)
        shutil.copytree(ROOT / "fixtures/merge/inputs", Path(folder) / "models")
        with contextlib.chdir(folder):  # the page shows where DST and the sources are
            ckpttool(*MERGE.split(), "--report", "merged.html")
        page = opened(browser, Path(folder) / "merged.html", "light", 1060, 900)
        page.locator("#distance-by-layer").scroll_into_view_if_needed()
        page.wait_for_timeout(500)  # for what is above it to be as high as it will be
        take(page, "merge-report", "#distance-by-layer")
        for theme in ("light", "dark"):
            take(opened(browser, reports["deepseek"], theme, 1200, 860), f"report-{theme}")
            take(opened(browser, reports["deepseek"], theme, 400, 860), f"report-narrow-{theme}")
        page = opened(browser, reports["deepseek"], "light", 1420, 660)
        page.locator("#tensors label", has_text="Fold").click()
        take(page, "report-tensors", "#tensors")
        page.fill("#tensors input[type=search]", "layers.0 q_a_proj.weight")
        page.locator("#tensors tr[data-at]").first.click()
        take(page, "report-tensor", "dialog")
        take(opened(browser, reports["ranks"], "dark", 1060, 860), "report-ranks", "#ranks")
        take(opened(browser, reports["change"], "light", 1260, 860), "report-change", "#drift")
        browser.close()
    return 0


def opened(browser: Browser, report: Path, theme: str, width: int, height: int) -> Page:
    """A report in a window of that size."""
    scheme: Literal["dark", "light"] = "dark" if theme == "dark" else "light"
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.goto(report.as_uri())
    page.wait_for_selector("main section")
    page.wait_for_timeout(300)  # for the charts, which are drawn when their width is known
    return page


def take(page: Page, name: str, part: str = "") -> None:
    """A picture of the window, or of a part of the page."""
    path = IMAGES / f"{name}.png"
    page.mouse.move(0, 0)  # nothing is pointed at
    if part:
        page.locator(part).first.screenshot(path=path)
    else:
        page.screenshot(path=path)
    size = path.stat().st_size
    print(f"{path.relative_to(ROOT)}: {size:,} bytes")
    if size > LARGEST:
        raise SystemExit(f"{path} has more than {LARGEST:,} bytes")


if __name__ == "__main__":
    sys.exit(main())
