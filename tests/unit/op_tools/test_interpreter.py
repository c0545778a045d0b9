"""Settings of the interpreter while tools are on."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

import op_tools
from op_tools.tools.base import TOOLS
from op_tools.watch.interpreter import Interpreter


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    threshold, seconds = gc.get_threshold(), sys.getswitchinterval()
    yield
    gc.set_threshold(*threshold)
    sys.setswitchinterval(seconds)


def test_settings_are_as_before_afterwards() -> None:
    gc.set_threshold(700, 10, 10)
    sys.setswitchinterval(0.005)
    interpreter = Interpreter()
    interpreter.ease()
    interpreter.ease()  # a second tool
    young, middle, old = gc.get_threshold()
    assert young > 700
    assert middle == 10
    assert old > 10  # a full run takes as long as several steps
    assert sys.getswitchinterval() < 0.005
    interpreter.restore()
    interpreter.restore()
    assert gc.get_threshold() == (700, 10, 10)
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_what_the_program_sets_itself_stays() -> None:
    interpreter = Interpreter()
    interpreter.ease()
    gc.set_threshold(5, 6, 7)
    sys.setswitchinterval(0.02)
    interpreter.restore()
    assert gc.get_threshold() == (5, 6, 7)
    assert sys.getswitchinterval() == pytest.approx(0.02)


def test_a_collector_that_is_off_stays_off() -> None:
    gc.set_threshold(0, 10, 10)
    interpreter = Interpreter()
    interpreter.ease()
    assert gc.get_threshold()[0] == 0


def test_no_full_run_follows_at_once() -> None:
    """Objects that were made meanwhile are over the limits that hold again."""
    gc.set_threshold(700, 10, 10)
    full: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            full.append(1)

    interpreter = Interpreter()
    interpreter.ease()
    kept = []
    gc.callbacks.append(note)
    try:
        kept.append([[i] for i in range(1_500_000)])  # more than a quarter of all objects: a reason for a full run
        assert not full
        interpreter.restore()
        kept.append([[i] for i in range(2_000)])
        assert not full
    finally:
        gc.callbacks.remove(note)
        kept.clear()


def test_what_the_program_has_frozen_stays_frozen() -> None:
    interpreter = Interpreter()
    interpreter.ease()
    gc.freeze()
    try:
        interpreter.restore()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_the_collector_goes_easy_until_a_tool_has_written_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "off")
    before = gc.get_threshold()
    seen = []

    class Late(op_tools.OpObserve):
        name = "Late"

        def finish(self) -> None:
            seen.append(gc.get_threshold())

    try:
        with Late():
            pass
    finally:
        del TOOLS["Late"]
    assert seen[0][0] > before[0]
    assert gc.get_threshold() == before
