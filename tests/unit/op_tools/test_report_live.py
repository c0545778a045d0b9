"""The live page: who is answered, with what, and that it follows the run without getting in its way."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the live page needs the extra `ui`: pip install 'ditorch[ui]'")
uvicorn = pytest.importorskip("uvicorn", reason="the live page needs the extra `ui`: pip install 'ditorch[ui]'")

from ditorch_common.page import Table  # noqa: E402
from op_tools import cli  # noqa: E402
from op_tools.report import (  # noqa: E402
    Run,
    commands,
    page_of,
)
from op_tools.report.commands import _listening  # noqa: E402
from op_tools.report.live import Live, application, chrome_trace  # noqa: E402

from .report_runs import OP, Written  # noqa: E402

TOKEN = "a-token"


class Answer:
    """What the application answered to one request."""

    def __init__(self) -> None:
        self.status, self.headers, self.body = 0, dict[str, str](), b""

    async def take(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")


def ask(
    app: Any, path: str, query: str = f"token={TOKEN}", method: str = "GET", host: str = "127.0.0.1:9001"
) -> Answer:
    answer = Answer()
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": query.encode(),
             "headers": [(b"host", host.encode())], "http_version": "1.1", "scheme": "http", "root_path": "",
             "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 9001)}  # fmt: skip

    async def receive() -> Any:
        await asyncio.sleep(60)  # it waits for the whole answer
        return {"type": "http.disconnect"}

    asyncio.run(app(scope, receive, answer.take))
    return answer


@pytest.fixture
def written(tmp_path: Path) -> Written:
    written = Written(tmp_path, pid=os.getpid()).compared(1).timed(1)
    written.store.flush()
    return written


@pytest.fixture
def live(written: Written, tmp_path: Path) -> Live:
    return Live(Run(tmp_path), page_of)


def test_the_page_its_head_and_its_tables(live: Live) -> None:
    app = application(live, TOKEN)
    shell = ask(app, "/")
    assert (shell.status, shell.headers["content-type"].split(";")[0]) == (200, "text/html")
    assert OP.encode() not in shell.body  # the data come apart from the page
    head = json.loads(ask(app, "/head").body)
    assert head["version"] == 1
    assert head["views"][0]["id"] == "verdict"
    assert Table.unpack(ask(app, "/table/comparisons").body).name == "comparisons"
    assert ask(app, "/table/none").status == 404
    for answer in (shell, ask(app, "/head")):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("path", ["/", "/head", "/table/comparisons", "/events", "/trace.json"])
@pytest.mark.parametrize("query", ["", "token=", "token=another", "token=a-toke", "token=a-token2", "TOKEN=a-token"])
def test_nothing_without_the_token(path: str, query: str, live: Live) -> None:
    answer = ask(application(live, TOKEN), path, query)
    assert answer.status == 403
    assert answer.body.count(b"\n") == 1


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "get", "X"])
def test_only_get_is_answered(method: str, live: Live) -> None:
    assert ask(application(live, TOKEN), "/head", method=method).status == 405


@pytest.mark.parametrize("host", ["evil.example", "evil.example:9001", "127.0.0.1.evil.example", "", "0.0.0.0:9001"])
def test_other_names_of_this_machine_are_refused(host: str, live: Live) -> None:
    assert ask(application(live, TOKEN), "/", host=host).status == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8000", "[::1]:9001"])
def test_its_own_names_are_answered(host: str, live: Live) -> None:
    assert ask(application(live, TOKEN), "/", host=host).status == 200


@pytest.mark.parametrize(
    "path", ["/../etc/passwd", "/table/../../x", "/table/..%2f..%2fetc%2fpasswd", "/table/%2e%2e", "//etc", "/static/x"]
)
def test_no_path_leads_to_a_file(path: str, live: Live) -> None:
    assert ask(application(live, TOKEN), path).status == 404


def test_a_trace_for_perfetto_alone(live: Live) -> None:
    answer = ask(application(live, TOKEN), "/trace.json")
    assert answer.headers["access-control-allow-origin"] == "https://ui.perfetto.dev"
    assert "access-control-allow-origin" not in ask(application(live, TOKEN), "/head").headers
    events = json.loads(answer.body)["traceEvents"]
    assert events == json.loads("".join(chrome_trace(live.run)))["traceEvents"]
    assert [event["name"] for event in events] == [OP]


def test_a_look_costs_a_bounded_share(written: Written, live: Live) -> None:
    clock = [100.0, 0.0]  # now, and CPU time
    assert live.look(lambda: clock[0], lambda: clock[1]) == 1
    written.compared(2).store.flush()
    assert live.look(lambda: clock[0], lambda: clock[1]) == 1  # too soon
    clock[0] += 1.1
    assert live.look(lambda: clock[0], lambda: clock[1]) == 2
    assert live.head()["tables"]["comparisons"] == 2
    made = live._make

    def slowly(run: Run) -> Any:
        clock[1] += 0.5
        return made(run)

    live._make = slowly
    written.compared(3).store.flush()
    clock[0] += 1.1
    assert live.look(lambda: clock[0], lambda: clock[1]) == 3
    written.compared(4).store.flush()
    clock[0] += 20.0  # half a second is 2 % of 25 seconds
    assert live.look(lambda: clock[0], lambda: clock[1]) == 3
    clock[0] += 6.0
    assert live.look(lambda: clock[0], lambda: clock[1]) == 4


def test_records_are_opened_so_that_nothing_is_written(written: Written, tmp_path: Path) -> None:
    before = {
        file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file() and "shm" not in file.name
    }
    Run(tmp_path).refresh()
    after = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file() and "shm" not in file.name}
    assert before == after


def test_the_server_listens_to_this_machine_alone() -> None:
    with _listening(None) as one, _listening(None) as two:
        assert one.getsockname()[0] == two.getsockname()[0] == "127.0.0.1"
        assert one.getsockname()[1] != two.getsockname()[1]


def test_a_port_that_is_taken_is_one_line(written: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["ui", str(tmp_path), "--port", str(port)]) == 2
    assert capsys.readouterr().err.startswith(f"--port {port}: ")
    assert cli.main(["ui", str(tmp_path), "--port", "99999"]) == 2


def test_a_run_that_has_not_begun_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "later"
    steps = iter([lambda: folder.mkdir(), lambda: Written(folder).compared(1).store.flush()])
    monkeypatch.setattr(commands.time, "sleep", lambda seconds: next(steps)())
    found = commands._awaited(argparse.Namespace(run=folder, loss=[]))
    assert len(found.processes) == 1
    assert capsys.readouterr().out.count("Waiting for a run to begin there") == 1


def test_waiting_ends_with_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands.time, "sleep", interrupted)
    assert cli.main(["ui", str(tmp_path / "none")]) == 130


def test_a_new_version_is_announced(written: Written, live: Live) -> None:
    listener = _listening(0)
    config = uvicorn.Config(application(live, TOKEN), log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/events?token={TOKEN}"
        deadline = time.monotonic() + 30
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.02)
        with urllib.request.urlopen(address, timeout=30) as stream:
            assert json.loads(stream.readline()[5:]) == {"version": 1}
            written.compared(2).store.flush()
            stream.readline()
            assert json.loads(stream.readline()[5:]) == {"version": 2}
    finally:
        server.should_exit = True
        thread.join(10)


def test_the_command_shows_a_run_that_is_killed_meanwhile(tmp_path: Path) -> None:
    script = "import time; from pathlib import Path; from tests.unit.op_tools.report_runs import Written; import os\n"
    script += (
        "w = Written(Path('run'), pid=os.getpid()).compared(1); w.store.flush(); print('x', flush=True); time.sleep(60)"
    )
    root = Path(__file__).resolve().parents[3]
    env = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "x\n"
        live = Live(Run(tmp_path / "run"), page_of)
        assert live.head()["views"][0]["blocks"][0]["state"] == "running"
        run.send_signal(signal.SIGKILL)
    time.sleep(1.1)
    assert live.look() == 2
    banner = live.head()["views"][0]["blocks"][0]
    assert "stopped before its end" in json.dumps(banner)
    assert live.head()["tables"]["comparisons"] == 1
