"""Takes a picture of a page: `python docs/page_picture.py demo_results/faulty.html docs/page.png --view verdict`.

Needs Playwright's Python package and a Chromium: the installed one (CHROMIUM, /usr/bin/chromium) or Playwright's own.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from playwright.sync_api import sync_playwright

MOST = 200_000  # bytes


def take(page: Path, picture: Path, view: str, width: int, height: int, scheme: str, language: str) -> int:
    """Write the picture; returns its size in bytes."""
    chromium = os.environ.get("CHROMIUM", "/usr/bin/chromium")
    with sync_playwright() as playwright:
        found = chromium if Path(chromium).exists() else None
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        tab.goto(f"{page.resolve().as_uri()}#{view}")
        tab.wait_for_selector("main, body")
        if language != "en":
            tab.locator("select:has(option[value=zh])").select_option("zh")
        tab.wait_for_timeout(800)  # charts are drawn
        tab.screenshot(path=str(picture))
        browser.close()
    return picture.stat().st_size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="a page that `op_tools report` or `op_tools diff --html` wrote")
    parser.add_argument("picture", type=Path, help="the PNG file to write")
    parser.add_argument("--view", default="verdict")
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--height", type=int, default=700)
    parser.add_argument("--scheme", choices=["light", "dark"], default="light")
    parser.add_argument("--language", choices=["en", "zh"], default="en")
    given = parser.parse_args()
    size = take(given.page, given.picture, given.view, given.width, given.height, given.scheme, given.language)
    print(f"{given.picture}: {size:,} bytes")
    return 0 if size <= MOST else 1


if __name__ == "__main__":
    raise SystemExit(main())
