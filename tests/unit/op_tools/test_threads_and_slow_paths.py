"""Counts that several threads change are exact; a fast path that is broken for good is a finding."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import op_tools
from op_tools.call.traits import OpTraits
from op_tools.copies import host_copies
from op_tools.native import compiling, statistics
from op_tools.tools import fallback, time_measure
from op_tools.tools.base import Tool
from op_tools.view import store
from op_tools.watch import backward_clock, patches
from op_tools.watch.intercept import INTERCEPTOR, Call


@pytest.fixture(autouse=True)
def _quiet_console(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "off")
    monkeypatch.setenv("OP_TOOLS_RESULTS_DIR", str(tmp_path))
    monkeypatch.setenv("OP_TOOLS_INCLUDE_CPU", "1")


@pytest.fixture
def often() -> Iterator[None]:
    """Threads take turns as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)
    yield
    sys.setswitchinterval(before)


def _together(work: Callable[[], None], threads: int = 8) -> None:
    started = [threading.Thread(target=work) for _ in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


def _call(op: str) -> Call:
    return Call(OpTraits(op, len), len, (), {})


class _SlowCounter(Counter[str]):
    """Another thread runs between reading a count and writing it."""

    def __getitem__(self, key: str) -> int:
        found = super().__getitem__(key)
        time.sleep(0)
        return found


class _SlowInt(int):
    """The same for a number."""

    def __add__(self, other: int) -> _SlowInt:
        time.sleep(0)
        return _SlowInt(int(self) + other)


class _SlowSet(set[Any]):
    """Another thread runs between asking and adding."""

    def __contains__(self, key: object) -> bool:
        found = super().__contains__(key)
        time.sleep(0)
        return found


def test_calls_are_counted_once_each(often: None) -> None:
    tool = Tool()
    tool.calls = _SlowCounter()
    calls = [_call(f"torch.op{number}") for number in range(10)]

    def work() -> None:
        for call in calls * 50:
            tool.count(call)

    _together(work)
    assert set(tool.calls.values()) == {400}


def test_what_is_reported_once_is_reported_once(often: None) -> None:
    tool = Tool()
    tool._reported = _SlowSet()
    calls = [_call(f"torch.op{number}") for number in range(500)]

    def work() -> None:
        for call in calls:
            tool.found(call, "kind", "message", once=True)
            tool.failed(call, ValueError("twice"))

    _together(work)
    assert len(tool.findings()) == 1_000


def test_steps_are_counted_once_each(often: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before = INTERCEPTOR.step
    monkeypatch.setattr(INTERCEPTOR, "step", _SlowInt(before))
    _together(lambda: [Tool().step() for _ in range(500)] and None)
    assert INTERCEPTOR.step == before + 4_000


def test_copied_bytes_are_counted_once_each(often: None) -> None:
    copies = host_copies.HostCopies(keep=False)
    one = torch.zeros(3)
    _together(lambda: [copies.count(one) for _ in range(500)] and None)
    assert copies.copied_bytes == 8 * 500 * 12


def test_the_last_free_event_is_given_to_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Emptied(list[Any]):
        """It looks as if there were one, and another thread takes it."""

        def __bool__(self) -> bool:
            return True

    made: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            made.append(self)

        def record(self) -> None:
            pass

    monkeypatch.setattr(time_measure, "event_class", lambda device_type: Event)
    tool = op_tools.OpTimeMeasure()
    tool._free = {"cuda": Emptied()}
    assert tool._mark("cuda") is made[0]


def _slow(tool: Tool) -> list[tuple[str, str]]:
    with tool:
        torch.ones(2).add(1)
        torch.ones(2).add(1)
    return [(found.op, found.message) for found in tool.findings() if found.kind == "slow"]


def test_a_library_that_cannot_be_built_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> Any:
        raise subprocess.CalledProcessError(1, "g++")

    library = compiling.Library("broken", load)
    monkeypatch.setattr(compiling, "_libraries", [])
    assert library.wait() is None
    assert "CalledProcessError" in library.failure
    monkeypatch.setattr(time_measure, "LIBRARIES", library)
    monkeypatch.setattr(backward_clock, "LIBRARIES", library)
    ((part, message),) = _slow(op_tools.OpTimeMeasure())
    assert part == "backward clock"
    assert "CalledProcessError" in message


def test_a_kernel_for_statistics_that_does_not_work_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(statistics, "_FusedKernels", fails)
    monkeypatch.setattr(statistics, "BROKEN", broken := {})
    monkeypatch.setattr("op_tools.tools.overflow_check.BROKEN", broken)
    assert statistics._tried.__wrapped__(7, True) is None
    assert _slow(op_tools.OpOverflowCheck()) == [
        (
            "statistics on GPU 7",
            "a slower way is used: PyTorch's reductions compute them: RuntimeError: no such instruction",
        )
    ]

    def absent(*args: Any, **kwargs: Any) -> Any:
        raise ImportError("triton")

    broken.clear()
    monkeypatch.setattr(statistics, "_FusedKernels", absent)
    assert statistics._tried.__wrapped__(7, True) is None
    assert _slow(op_tools.OpOverflowCheck()) == [], "a machine without Triton is as it should be"


class _Pinned:
    stopped = 0

    def stop(self) -> None:
        self.stopped += 1


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> _Pinned:
    made = _Pinned()
    monkeypatch.setattr(fallback, "_WITH_PINNED_RESULTS", {fallback.accelerator_type()})
    monkeypatch.setattr(fallback.PinnedResults, "started", lambda device_type: made)
    return made


def test_the_allocator_is_listed_and_given_back_once(pinned: _Pinned) -> None:
    with op_tools.OpFallback(ops=["torch.nothing"]):
        (patch,) = [patch for patch in patches.listed() if patch.how == "native"]
        assert patch.what.startswith("c10::GetCPUAllocator")
        patches.undo_all()
        assert pinned.stopped == 1
    assert pinned.stopped == 1


def test_a_tool_that_cannot_start_gives_back_what_it_took(pinned: _Pinned, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> Any:
        raise op_tools.SettingsError("no room")

    monkeypatch.setattr(store, "current", full)
    with pytest.raises(op_tools.SettingsError):
        op_tools.OpFallback().start()
    assert pinned.stopped == 1
    assert patches.listed() == []
