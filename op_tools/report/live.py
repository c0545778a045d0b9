"""The page of a run while it goes on: a server on this machine alone, which only reads.

Every answer needs the token of the address that was printed. The page asks again when the records have grown; how often
is bounded by what it costs, so that the run keeps the machine to itself.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ditorch_common.page import Page

from .run import Run

_SHARE: Final = 0.02  # of the time that may go into looking for news
_EVERY: Final = 1.0  # seconds between two looks, at least
_AT_MOST: Final = 60.0
_ALIVE: Final = 15.0  # seconds between two lines on a connection on which nothing happens
_HOSTS: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
_PERFETTO: Final = "https://ui.perfetto.dev"
_MAX_TRACED: Final = 1_000_000
_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class Live:
    """A run and its newest page. `look()` reads on, if the last time is long enough ago for what it cost.

    >>> Live(run, page_of).look()  # doctest: +SKIP
    """

    def __init__(self, run: Run, make: Callable[[Run], Page]) -> None:
        self.run, self._make = run, make
        self._lock = threading.Lock()
        self.page = make(run)
        self.version = 1
        self._state = run.state
        self._packed: dict[tuple[str, int], bytes] = {}
        self._due = 0.0

    def look(self, now: Callable[[], float] = time.monotonic, spent: Callable[[], float] = time.thread_time) -> int:
        """The version of the page, a new one where the run has grown."""
        if now() < self._due or not self._lock.acquire(blocking=False):
            return self.version
        try:
            began = spent()
            changed = self.run.refresh()
            state = self.run.state
            if changed or state != self._state:
                self._state = state
                self.page = self._make(self.run)
                self.version += 1
                self._packed.clear()
            self._due = now() + min(_AT_MOST, max(_EVERY, (spent() - began) / _SHARE))
            return self.version
        finally:
            self._lock.release()

    def head(self) -> dict[str, Any]:
        """The page without its tables, with its version."""
        return {**self.page.head(), "version": self.version}

    def table(self, name: str) -> bytes:
        """A packed table; KeyError where there is none of that name."""
        key = (name, self.version)
        packed = self._packed.get(key)
        if packed is None:
            packed = self._packed[key] = self.page.table(name)
        return packed

    def traced(self) -> Iterator[str]:
        """The times so far for ui.perfetto.dev, in pieces."""
        with self._lock:
            return chrome_trace(self.run)


class Guard:
    """Lets through what this machine's own browser asks with the token, and nothing but GET."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or say why not."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        request = Request(scope)
        refused = self._refused(request)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *[pair for pair in _HEADERS if pair[0] not in given]]
            await send(message)

        await (refused or self._app)(scope, receive, with_headers)

    def _refused(self, request: Request) -> Response | None:
        host = request.headers.get("host", "").rpartition(":")
        if (host[0] if host[2].isdigit() else "".join(host)) not in _HOSTS:
            return PlainTextResponse("this page is for this machine alone\n", 403)
        if request.method != "GET":
            return PlainTextResponse("only GET is answered\n", 405, {"allow": "GET"})
        given = request.query_params.get("token", "")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            return PlainTextResponse("the address needs the token that op_tools ui printed\n", 403)
        return None


def application(live: Live, token: str) -> ASGIApp:
    """The server's application: `/`, `/head`, `/table/NAME`, `/events`, `/trace.json`."""

    async def shell(request: Request) -> Response:
        return Response(live.page.shell(""), media_type="text/html")

    async def head(request: Request) -> Response:
        await run_in_threadpool(live.look)
        return JSONResponse(live.head())

    async def table(request: Request) -> Response:
        try:
            packed = await run_in_threadpool(live.table, request.path_params["name"])
        except KeyError:
            return PlainTextResponse("no such table\n", 404)
        return Response(packed, media_type="application/octet-stream")

    async def events(request: Request) -> Response:
        return StreamingResponse(_events(live, request), media_type="text/event-stream")

    async def trace(request: Request) -> Response:
        rows = await run_in_threadpool(live.traced)
        allowed = {"access-control-allow-origin": _PERFETTO, "cross-origin-resource-policy": "cross-origin"}
        return StreamingResponse(rows, media_type="application/json", headers=allowed)

    routes = {"/": shell, "/head": head, "/table/{name}": table, "/events": events, "/trace.json": trace}
    app = Starlette(routes=[Route(path, answer, methods=["GET"]) for path, answer in routes.items()])
    return Guard(app, token)


async def _events(live: Live, request: Request) -> AsyncIterator[str]:
    """A line whenever there is a new version, until the page is closed."""
    told, quiet = 0, 0.0
    while not await request.is_disconnected():
        version = await run_in_threadpool(live.look)
        if version != told:
            told, quiet = version, 0.0
            yield f"data: {json.dumps({'version': version})}\n\n"
        elif quiet >= _ALIVE:
            quiet = 0.0
            yield ": still here\n\n"
        await asyncio.sleep(_EVERY / 2)
        quiet += _EVERY / 2


def chrome_trace(run: Run) -> Iterator[str]:
    """The times of a run, as they are now, for ui.perfetto.dev, in pieces."""
    kept = []
    for process in run.processes:
        rows = process.growing["op_time_measure"]
        words = (process.sites.words["op"].known, rows.words["phase"].known)
        columns = [rows[name] for name in ("phase", "start_us", "elapsed_ms", "thread", "step", "call_id")]
        kept.append((process.rank, words, [process.of_site(rows["site"], "op"), *columns]))
    return _events_of(kept)


def _events_of(kept: list[tuple[int, Any, list[Any]]]) -> Iterator[str]:
    yield '{"displayTimeUnit": "ms", "traceEvents": ['
    left, between = _MAX_TRACED, ""
    for rank, (ops, phases), columns in kept:
        for op, phase, start, elapsed, thread, step, call in zip(*[column.tolist() for column in columns]):
            left -= 1
            if left < 0 or start != start or elapsed != elapsed:
                continue
            event = {"name": ops[op], "cat": phases[phase], "ph": "X", "ts": start, "dur": elapsed * 1e3,
                     "pid": rank, "tid": thread, "args": {"call": call, "step": step}}  # fmt: skip
            yield between + json.dumps(event)
            between = ","
    yield "]}"
