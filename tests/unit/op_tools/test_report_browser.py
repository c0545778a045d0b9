"""The page of a run in a real browser: every view of hostile records, what a newcomer sees first, and live updates."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ditorch_common.page import write_page
from op_tools.report import Run, page_of
from tests.browser import Browser

from .report_runs import Written
from .test_report import EVIL

TOKEN = "a-token"


@pytest.fixture
def faulty(tmp_path: Path) -> Written:
    """A run with every kind of record, and texts that would do harm as HTML."""
    line = f"/home/me/{EVIL}.py:27 forward: {EVIL}"
    written = Written(tmp_path / "run", pid=os.getpid())
    for step in range(3):
        for layer in range(2):
            call = 10 * step + layer + 1
            module = f"layers.{layer}.{EVIL}"
            written.compared(call, step=step, module=module, op=EVIL, line=line).timed(
                call, step=step, op=EVIL, line=line
            )
            written.measured(call, 10.0 ** (4 * step), step, op=EVIL, line=line)
            if step == 0:
                written.placed(call, module, op=EVIL, line=line)
    written.compared(99, "wrong", 1, module=EVIL, excess=1000.0).wrong(99, module=EVIL, reason=EVIL, step=1)
    written.found("overflow", EVIL, line=line).found("skipped", EVIL)
    written.store.flush()
    return written


def test_every_view_shows_hostile_texts_and_runs_none(faulty: Written, tmp_path: Path, browser: Browser) -> None:
    page = page_of(Run(tmp_path / "run"))
    file = write_page(page, tmp_path / "run.html")
    shown = browser.open(file, viewport={"width": 1000, "height": 700})
    for needed in ("torch.nn.functional.linear", "/home/me/model.py:27", "OpFallback --ops torch.nn.functional.linear"):
        place = shown.get_by_text(needed).first.bounding_box()
        assert place is not None
        assert place["y"] + place["height"] <= 700, needed  # operator, line and next step without scrolling
    shown.on("dialog", lambda dialog: browser.errors.append(f"it ran: {dialog.message}"))
    for view in page.views:
        shown.evaluate("name => { location.hash = name }", view.id)
        shown.wait_for_selector(f"nav [aria-current=page][href='#{view.id}']")
        text = shown.inner_text("main")
        assert "cannot be shown" not in text.lower(), view.id
        if not view.blocks:
            assert "op_tools" in text or "ditorch" in text  # what to run
        assert shown.locator("main script, main img").count() == 0
    assert "alert(1)" in shown.inner_text("main")


@pytest.fixture
def address(faulty: Written, tmp_path: Path) -> Iterator[str]:
    uvicorn: Any = pytest.importorskip("uvicorn", reason="the live page needs the extra `ui`")
    pytest.importorskip("starlette", reason="the live page needs the extra `ui`")
    from op_tools.report.commands import _listening
    from op_tools.report.live import Live, application

    listener = _listening(0)
    app = application(Live(Run(tmp_path / "run"), page_of), TOKEN)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/?token={TOKEN}"
    server.should_exit = True
    thread.join(10)


def test_a_live_page_follows_the_run(faulty: Written, address: str, browser: Browser) -> None:
    shown = browser.open(address, "#records")
    shown.wait_for_selector(".grid-row")
    assert "7 of 7" in shown.inner_text(".filters .count >> nth=0")
    faulty.compared(100, module="new.module").store.flush()
    shown.wait_for_selector(".filters .count:has-text('8 of 8')")
    assert shown.url.endswith("#records")
