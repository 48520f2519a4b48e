"""Pages in the system's Chromium: `make test-browser`. Without it, or without playwright, these tests are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckpttool.report.page import render
from ckpttool.report.page.document import ReportPage

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HERE = Path(__file__).parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Collect the folder only where the command line names it, as `make test-browser` does."""
    named = (config.invocation_params.dir / argument.split("::")[0] for argument in config.args)
    return None if any(path.resolve().is_relative_to(HERE) for path in named) else True


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install '.[browser]'"
    )
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


Opened = Callable[..., "Page"]


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Opened]:
    """Opens a document from disk; the test fails for any message in the console, error or request."""
    said: list[str] = []
    contexts = []

    def opened(document: ReportPage | str, *, width: int = 1280, dark: bool = False, script: bool = True) -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if dark else "light",
            java_script_enabled=script,
            reduced_motion="reduce",
        )
        contexts.append(context)
        page = context.new_page()
        file = tmp_path / "report.html"
        file.write_text(document if isinstance(document, str) else render(document), encoding="utf-8")
        page.on("console", lambda message: said.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("request", lambda request: said.extend([f"request: {request.url}"] * (request.url != file.as_uri())))
        page.goto(file.as_uri())
        if script:
            page.wait_for_selector("main section, .message:not(.needs-script)")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not said
