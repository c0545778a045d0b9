"""The page in a real browser: it filters, sorts and opens a failure."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ditorch.conformance.cases import CRASH, ERROR, NOT_COMPARABLE, PASS, WRONG, Case, Result
from ditorch.conformance.ledger import Ledger, parse
from ditorch.conformance.page import page
from ditorch.conformance.summary import Summary

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next((found for name in BROWSERS if (found := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(BROWSERS)}")
ABOUT = {"backend": "soft", "device": "soft:0", "torch": "2.13.0", "date": "today", "seconds": 3.2, "jobs": 2}
STATUSES = {
    "ops/add/float32/forward": PASS,
    "ops/add/float32/backward": WRONG,
    "ops/add/int8/forward": PASS,
    "ops/bmm/float32/forward": PASS,
    "ops/mul/float32/forward": CRASH,
    "ops/mul/int8/forward": ERROR,
    "ops/rand/float32/forward": NOT_COMPARABLE,
    "modules/nn.Linear/float32/forward": PASS,
}


@pytest.fixture
def text() -> str:
    results = [Result(Case.parse(c), s, f"message of <b>{c}</b>", 3, details=("line 1",)) for c, s in STATUSES.items()]
    ledger = Ledger(parse("ops/mul/int8/*  error  it is known\nops/bmm/*/*  error  it was", "x"), "2.13")
    return page(Summary.of(results, ABOUT, ledger))


def shown(text: str, folder: Path, actions: str = "", address: str = "") -> str:
    """The document after a user's actions, as the browser holds it."""
    script = f"<script>setTimeout(() => {{ {actions} }}, 50);</script></body>"
    file = folder / "index.html"
    file.write_text(text.replace("</body>", script), encoding="utf-8")
    done = subprocess.run(
        [
            *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *(f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=4000", "--dump-dom"),
            f"file://{file}{address}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "<html" in done.stdout, done.stderr[-2000:]
    return re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)  # what is shown, not what makes it


def rows(document: str) -> list[str]:
    return re.findall(r'<tr data-name="([^"]*)"', document)


def field(document: str, name: str) -> str:
    found = re.search(rf'<(\w+)[^>]* id="{name}"[^>]*>(.*?)</\1>', document, re.DOTALL)
    assert found, f"no {name} in the document"
    return html.unescape(found[2])


def choose(name: str, value: str) -> str:
    return f'$("{name}").value = "{value}"; $("{name}").dispatchEvent(new Event("change"));'


@needs_browser
def test_everything_is_there(text: str, tmp_path: Path) -> None:
    document = shown(text, tmp_path)
    assert rows(document) == ["nn.Linear", "add", "bmm", "mul", "rand"]
    assert "4 of 7 (57.14 %)" in document
    assert field(document, "failures-title") == "Failures (4)"  # three failures and one unexpected pass
    assert 'class="c s1 new" data-case="ops/add/float32/backward"' in document
    assert 'class="c s2" data-case="ops/mul/int8/forward"' in document
    assert "soft" in field(document, "title")


@needs_browser
def test_search_and_filters(text: str, tmp_path: Path) -> None:
    typed = '$("search").value = "MUL"; $("search").dispatchEvent(new Event("input"));'
    document = shown(text, tmp_path, typed)
    assert rows(document) == ["mul"]
    assert field(document, "shown") == "1 of 5 names"
    document = shown(text, tmp_path, choose("status", "failing"))
    assert rows(document) == ["add", "mul"]
    assert "ops/add/int8/forward" not in document.split("</table>")[0].split("<tbody>")[1]
    assert rows(shown(text, tmp_path, choose("what", "modules"))) == ["nn.Linear"]
    assert rows(shown(text, tmp_path, choose("dtype", "int8") + choose("status", "pass"))) == ["add"]
    assert rows(shown(text, tmp_path, choose("status", "unexpected"))) == ["add", "bmm", "mul"]
    cleared = choose("what", "modules") + '$("clear").click();'
    assert len(rows(shown(text, tmp_path, cleared))) == 5


@needs_browser
def test_sort(text: str, tmp_path: Path) -> None:
    assert rows(shown(text, tmp_path, choose("sort", "failures")))[0] == "mul"
    clicked = 'document.querySelector("th button[data-sort=rate]").click();'
    assert rows(shown(text, tmp_path, clicked))[:2] == ["mul", "rand"]


@needs_browser
def test_open_a_failure(text: str, tmp_path: Path) -> None:
    clicked = 'document.querySelector(".fail[data-case=\\"ops/mul/int8/forward\\"]").click();'
    document = shown(text, tmp_path, clicked)
    assert re.search(r'<dialog id="dialog" open', document)
    assert field(document, "d-case") == "ops/mul/int8/forward"
    assert "message of <b>ops/mul/int8/forward</b>" in field(document, "d-body")
    assert "&lt;b&gt;" in document or "&#60;b&#62;" in document  # shown as text, not as markup
    assert "it is known" in field(document, "d-body")
    assert field(document, "d-command") == "ditorch conformance --device soft:0 --case ops/mul/int8/forward"
    closed = shown(text, tmp_path, clicked + '$("d-close").click();')
    assert not re.search(r'<dialog id="dialog" open', closed)


@needs_browser
def test_an_address_keeps_the_view(text: str, tmp_path: Path) -> None:
    document = shown(text, tmp_path, address="#status=failing&sort=failures&case=ops/add/float32/backward")
    assert rows(document) == ["mul", "add"]
    assert field(document, "d-case") == "ops/add/float32/backward"
