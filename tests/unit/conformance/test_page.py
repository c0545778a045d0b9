"""The page of a run in a real browser: it filters, sorts and opens a failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ditorch.conformance.cases import CRASH, ERROR, NOT_COMPARABLE, PASS, WRONG, Case, Result
from ditorch.conformance.ledger import Ledger, parse
from ditorch.conformance.page import page
from ditorch.conformance.summary import Summary
from tests.browser import Browser

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
SORT = "select[aria-label='sort by name']"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    results = [Result(Case.parse(c), s, f"message of <b>{c}</b>", 3, details=("line 1",)) for c, s in STATUSES.items()]
    ledger = Ledger(parse("ops/mul/int8/*  error  it is known\nops/bmm/*/*  error  it was", "x"), "2.13")
    path = tmp_path / "index.html"
    path.write_text(page(Summary.of(results, ABOUT, ledger)), encoding="utf-8")
    return path


def names(view: Any) -> list[str]:
    """The names in the matrix."""
    return view.eval_on_selector_all(".matrix tr[data-name]", "rows => rows.map(row => row.dataset.name)")


def choose(view: Any, title: str, value: str) -> None:
    view.select_option(f"select[aria-label={title}]", value)


def test_everything_is_there(file: Path, browser: Browser) -> None:
    view = browser.open(file)
    view.wait_for_selector(".matrix tr[data-name]")
    assert names(view) == ["nn.Linear", "add", "bmm", "mul", "rand"]
    assert "4 of 7 (57.14 %)" in view.inner_text(".banner")
    assert "Failures and surprises (4)" in view.inner_text("main")  # three failures and one unexpected pass
    assert view.locator(".mark.s-wrong.strange[aria-label='add float32 backward: wrong']").count() == 1
    assert view.locator(".mark.s-error:not(.strange)[aria-label='mul int8 forward: error']").count() == 1
    assert view.inner_text("h1") == "PyTorch on soft"


def test_search_and_filters(file: Path, browser: Browser) -> None:
    view = browser.open(file)
    view.fill("input.search", "MUL")
    view.wait_for_selector(".matrix-count:text('1 of 5 names')")
    assert names(view) == ["mul"]
    view.click("button.clear")
    assert len(names(view)) == 5
    choose(view, "status", "*wrong")
    assert names(view) == ["add", "mul"]
    assert view.locator("[aria-label='add int8 forward: pass']").count() == 0
    choose(view, "status", "")
    choose(view, "part", "modules")
    assert names(view) == ["nn.Linear"]
    choose(view, "part", "")
    choose(view, "dtype", "int8")
    choose(view, "status", "pass")
    assert names(view) == ["add"]
    view.click("button.clear")
    choose(view, "unexpected", "*any")
    assert names(view) == ["add", "bmm", "mul"]


def test_sort(file: Path, browser: Browser) -> None:
    view = browser.open(file)
    view.select_option(SORT, "by_failures")
    assert names(view)[0] == "mul"
    view.select_option(SORT, "by_share")
    assert names(view)[:2] == ["mul", "rand"]


def test_open_a_failure(file: Path, browser: Browser) -> None:
    view = browser.open(file)
    view.click(".grid-row:has-text('mul'):has-text('int8')")
    dialog = view.inner_text("dialog")
    assert view.inner_text("dialog h3") == "ops/mul/int8/forward"
    assert "message of <b>ops/mul/int8/forward</b>" in dialog  # shown as text, not as markup
    assert "it is known" in dialog
    assert "ditorch conformance --device soft:0 --case ops/mul/int8/forward" in dialog
    view.click("dialog button.close")
    view.wait_for_selector("dialog", state="detached")
    view.click("[aria-label='add float32 backward: wrong']")
    assert view.inner_text("dialog h3") == "ops/add/float32/backward"


def test_an_address_keeps_the_view(file: Path, browser: Browser) -> None:
    view = browser.open(file, "#cases?status=*wrong&.lines=by_failures&.row=2")
    view.wait_for_selector("dialog")
    assert names(view) == ["mul", "add"]
    assert view.inner_text("dialog h3") == "ops/add/float32/forward"
