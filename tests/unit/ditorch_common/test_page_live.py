"""A page that is served: what is new appears, and what the reader had chosen stays."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ditorch_common.page import Page, View, blocks
from tests.browser import Browser
from tests.unit.ditorch_common.page_samples import records, tree_nodes


def at(version: int) -> Page:
    """A run that goes on: more records, another headline, the same tree."""
    rows = 500 + 100 * version
    views = [
        View(
            "all",
            "All",
            [
                blocks.banner("running", f"version {version}"),
                blocks.tree([{"name": "verdict"}, {"name": "time", "unit": "s"}], tree_nodes(), [[]]),
                blocks.table("records", filters=["op", "rank"], sort=("excess", "down")),
            ],
        ),
        View("later", "Later", [blocks.text("now there is something")] if version > 1 else [], "wait"),
    ]
    return Page("live", views, [records(rows)])


class Server:
    """Serves the page as the contract says; `token` must be in every address."""

    def __init__(self) -> None:
        self.version, self.asked, self.closing = 1, [], False
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}/?token=abc"

    def handler(server: Server) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path, _, query = self.path.partition("?")
                server.asked.append(path)
                self.send_response(200 if query == "token=abc" else 403)
                kind = {"/": "text/html; charset=utf-8", "/events": "text/event-stream"}.get(path, "application/json")
                self.send_header("Content-Type", kind)
                self.end_headers()
                if path == "/events":
                    self.events()
                elif path == "/":
                    self.wfile.write(at(server.version).shell("").encode())
                elif path == "/head":
                    self.wfile.write(json.dumps({**at(server.version).head(), "version": server.version}).encode())
                elif path.startswith("/table/"):
                    self.wfile.write(at(server.version).table(path[7:]))

            def events(self) -> None:
                sent = server.version
                while not server.closing:
                    if sent != server.version:
                        sent = server.version
                        self.wfile.write(f'data: {{"version": {sent}}}\n\n'.encode())
                        self.wfile.flush()
                    time.sleep(0.02)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler

    def close(self) -> None:
        self.closing = True
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def test_new_data_appear_and_the_place_stays(server: Server, browser: Browser) -> None:
    view = browser.open(server.url, "#all")
    view.wait_for_selector(".table-block .grid-row")
    view.wait_for_selector("#live:text('live')")
    view.click(".tree .grid-row:has-text('layers.5')")
    view.select_option("select[aria-label=rank]", "2")
    view.eval_on_selector(".table-block .grid", "grid => { grid.scrollTop = 780 }")
    view.focus("select[aria-label=rank]")  # someone is at the menu: it must not be taken away
    before = view.inner_text(".table-block .count")
    view.wait_for_timeout(100)
    server.version = 2
    view.wait_for_selector(".banner:has-text('version 2')")
    view.wait_for_function("before => document.querySelector('.table-block .count').textContent !== before", arg=before)
    assert "of 700 rows" in view.inner_text(".table-block .count")
    assert view.input_value("select[aria-label=rank]") == "2"
    assert view.evaluate("document.activeElement.ariaLabel") == "rank"
    assert view.eval_on_selector(".table-block .grid", "grid => grid.scrollTop") == 780
    assert view.locator(".tree .grid-row:has-text('softmax')").count() == 2  # what was open is open, and the wrong one
    assert "rank=2" in view.url
    view.click("nav a:text('Later')")
    assert "now there is something" in view.inner_text("main")
    assert set(server.asked) == {"/", "/head", "/table/records", "/events"}


def test_a_server_that_is_gone_is_said(server: Server, browser: Browser) -> None:
    view = browser.open(server.url)
    view.wait_for_selector("#live:text('live')")
    server.close()
    view.wait_for_selector("#live.lost")
    assert "version 1" in view.inner_text("main")
    browser.errors.clear()  # the browser reports the connection that was refused
