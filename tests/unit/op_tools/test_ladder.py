"""The ladder of judges and the teller: who is found, in which order things are told, what nobody waits for."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from op_tools.call.traits import traits_of
from op_tools.compare import judges
from op_tools.compare.ladder import FORWARD, ComparedCall, Job, Setup, make_ladder
from op_tools.compare.teller import Teller
from op_tools.copies.invocation import Invocation, Region, Site
from op_tools.judge.verdict import RIGHT, WRONG, Judgement, Row, Rules
from op_tools.view import console
from op_tools.watch.intercept import Call


def setup(**changes: Any) -> Setup:
    options: dict[str, Any] = {
        "rules": Rules(),
        "shown": False,
        "at_once": False,
        "sampled": False,
        "precheck": "cpu",
        "threads": 1,
        "queue_bytes": 1 << 20,
        "max_bytes": 1 << 20,
        "max_seconds": 1.0,
        "finish": lambda job: None,
        "again": lambda job: None,
        "wait": lambda: None,
        "report": lambda message: None,
    }
    return Setup(**{**options, **changes})


JUDGE = """
from op_tools.compare.ladder import Judge


class Lenient(Judge):
    order = 35

    def settle(self, job):
        return None
"""


def test_a_new_judge_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lenient.py").write_text(JUDGE)
    names = [type(judge).__name__ for judge in make_ladder(setup())]
    assert names[0] == "Views"
    assert names[-1] == "Host"
    monkeypatch.setattr(judges, "__path__", [*judges.__path__, str(tmp_path)])
    found = [type(judge).__name__ for judge in make_ladder(setup())]
    assert found == [*names[:2], "Lenient", *names[2:]]


@pytest.mark.parametrize("changes", [{"shown": True}, {"rules": Rules(standard="torch")}, {"precheck": "cpu"}])
def test_the_device_judges_only_where_it_may(changes: dict[str, Any]) -> None:
    kinds = [type(judge).__name__ for judge in make_ladder(setup(**{"precheck": "device", **changes}))]
    assert "DevicePrecheck" not in kinds


def test_a_call_keeps_its_meaning_on_the_wire() -> None:
    region = Region("cuda", False, torch.bfloat16, torch.bfloat16)
    call = Invocation(7, "torch.add", torch.add, traits_of(torch.add), Site("f.py:1"), region, (3, 4))
    back = Invocation.from_wire(*call.wire())
    assert (back.op, back.function, back.region, back.numbers) == ("torch.add", torch.add, region, (3, 4))


class Tool:
    """Takes what the teller tells."""

    def __init__(self) -> None:
        self.view = console.View("off")
        self.rows: list[tuple[Any, ...]] = []
        self.told: list[str] = []

    def record_all(self, rows: Any) -> None:
        self.rows += rows

    def found(self, call: Any, kind: str, message: str, once: bool = False, **more: Any) -> None:
        self.told.append(message)

    def failed(self, call: Any, error: BaseException, what: str = "", phase: str = "") -> None:
        self.told.append(str(error))

    def note_wrong(self, *row: Any) -> None:
        self.wrong = row


def job(teller: Teller, verdict: str = RIGHT) -> Job:
    call = ComparedCall(teller.numbered, "torch.add", torch.add, traits_of(torch.add), Site(), Region("cuda"))
    row = Row("torch.add", "output", None, True, 0.0, 0.0, 0.0, 0.0, "", verdict=verdict, reason="off by one")
    live = Call(call.traits, torch.add, (), {})
    return Job(call, FORWARD, number=teller.number(), live=live, judgement=Judgement(verdict, "", (row,)))


def test_outcomes_are_told_in_the_order_of_the_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_TOOLS_RESULTS_DIR", str(tmp_path))
    tool = Tool()
    teller = Teller(tool, lambda work: work())
    jobs = [job(teller) for _ in range(30)]
    threads = [
        threading.Thread(target=lambda part=jobs[k::3]: [teller.tell(j) for j in reversed(part)]) for k in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    teller.wait()
    assert [row[0] for row in tool.rows] == list(range(30))
    assert teller.verdicts == {RIGHT: 30}


def test_nobody_waits_for_a_call_that_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_TOOLS_RESULTS_DIR", str(tmp_path))
    tool = Tool()
    teller = Teller(tool, lambda work: threading.Thread(target=work).start())
    saving, go_on = threading.Event(), threading.Event()

    def save(*_: Any) -> str:
        saving.set()
        assert go_on.wait(10)
        return "folder"

    monkeypatch.setattr(teller, "_save", save)
    wrong = job(teller, WRONG)
    wrong.golden = object()  # type: ignore[assignment]
    threading.Thread(target=teller.tell, args=(wrong,)).start()
    assert saving.wait(10)
    later = [job(teller) for _ in range(3)]  # numbers are given out meanwhile
    for one in later:
        teller.tell(one, at_once=False)
    assert not tool.rows[1:], "their turn comes after it"
    go_on.set()
    for one in later:
        assert one.done.wait(10)
    assert [row[0] for row in tool.rows] == [0, 1, 2, 3]
    assert teller.blames[0].folder == "folder"


def test_the_thread_of_the_run_leaves_files_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_TOOLS_RESULTS_DIR", str(tmp_path))
    handed_over: list[Any] = []
    teller = Teller(Tool(), handed_over.append)
    writers: list[int] = []
    monkeypatch.setattr(teller, "_save", lambda *_: writers.append(threading.get_ident()) or "folder")
    settled, wrong = job(teller), job(teller, WRONG)
    wrong.golden = object()  # type: ignore[assignment]
    teller.tell(wrong)  # not its turn yet
    teller.tell(settled, at_once=False)
    assert not writers
    (work,) = handed_over
    other = threading.Thread(target=work)
    other.start()
    other.join(10)
    assert writers == [other.ident]


def test_an_interrupt_while_it_tells_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_TOOLS_RESULTS_DIR", str(tmp_path))
    tool = Tool()
    teller = Teller(tool, lambda work: work())
    first, second = job(teller), job(teller)

    def interrupted(rows: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tool, "record_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            teller.tell(first)
    waiting = threading.Thread(target=teller.wait)
    waiting.start()
    waiting.join(10)
    assert not waiting.is_alive()
    teller.tell(second)
    assert [row[0] for row in tool.rows] == [1]
