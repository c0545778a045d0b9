"""A real browser for tests of pages; tests that need it are skipped where there is none, with the way to get it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
HOW = "in a browser: pip install 'ditorch[browser]', and apt install chromium or playwright install chromium"


def _path() -> str | None:
    """The browser of the system, "" for the one that Playwright brings, None where there is neither."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found:
        return found
    from playwright.sync_api import sync_playwright

    with sync_playwright() as start:
        return "" if Path(start.chromium.executable_path).exists() else None


class Browser:
    """Chromium; `open` shows a page and fails the test where the page has an error or asks the network for something.

    Example: ``view = browser.open(path, "#records"); view.locator(".grid-row").first.click()``
    """

    def __init__(self, chromium: Any) -> None:
        self.chromium = chromium
        self.contexts: list[Any] = []
        self.errors: list[str] = []

    def context(self, **options: Any) -> Any:
        """A window of its own: `browser.context(viewport={"width": 390, "height": 780}, color_scheme="dark")`."""
        made = self.chromium.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        self.contexts.append(made)
        return made

    def open(self, place: Path | str, address: str = "", **options: Any) -> Any:
        """The page of a file or an http address, once it is shown."""
        page = self.context(**options).new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        url = place if isinstance(place, str) else place.as_uri()
        allowed = "file:" if url.startswith("file:") else url.partition("?")[0]
        page.on("request", lambda request: self._asked(request.url, allowed))
        page.goto(url + address)
        page.wait_for_selector("html[data-ready]")
        return page

    def _asked(self, url: str, allowed: str) -> None:
        if not url.startswith((allowed, "data:")):
            self.errors.append(f"asked for {url}")

    def done(self) -> None:
        """Closes what was opened; an error of a page is one of the test."""
        for context in self.contexts:
            context.close()
        self.contexts.clear()
        errors, self.errors = self.errors, []
        assert not errors, errors


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """One process of the browser for the tests of a file; its event loop would be in the way of others."""
    api = pytest.importorskip("playwright.sync_api", reason=HOW)
    path = _path()
    if path is None:
        pytest.skip(HOW)
    with api.sync_playwright() as start:
        flags = ["--no-sandbox", "--disable-dev-shm-usage", "--enable-precise-memory-info"]
        launched = start.chromium.launch(**({"executable_path": path} if path else {}), args=flags)
        yield launched
        launched.close()


@pytest.fixture
def browser(chromium: Any) -> Iterator[Browser]:
    """A browser whose pages must be without errors at the end of the test."""
    made = Browser(chromium)
    yield made
    made.done()
