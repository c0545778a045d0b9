"""Whatever happens to a worker process costs one case: crashes, hangs, lost devices, interruptions."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ditorch.conformance import engines
from ditorch.conformance import slot as slots
from ditorch.conformance.cases import CRASH, ERROR, PASS, TIMEOUT, WRONG, Result, Unit
from ditorch.conformance.engines import LocalEngine
from ditorch.conformance.slot import Settings, Slot, StartError

FAKE = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))


@pytest.fixture(autouse=True)
def _fake_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "WORKER", FAKE)


@pytest.fixture
def slot() -> Iterator[Slot]:
    made = Slot(Settings("fake", "fake:0", timeout=1.0))
    yield made
    made.close()


def done(slot: Slot, *checks: str, name: str = "add") -> list[Result]:
    found: list[Result] = []
    slot.do(Unit("ops", name, "int8", checks), found.append)
    return found


def test_results_come_in_order_from_one_process(slot: Slot) -> None:
    found = done(slot, "right", "wrong", "other")
    assert [(r.case.check, r.status) for r in found] == [("right", PASS), ("wrong", WRONG), ("other", PASS)]
    assert len({r.message for r in found}) == 1
    assert slot.replaced == 0


@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [
        ("abort", CRASH, "the process was ended by SIGABRT"),
        ("exit", CRASH, "the process ended with exit status 7"),
        ("hang", TIMEOUT, "took longer than 1 s"),
    ],
)
def test_a_lost_worker_costs_one_case(slot: Slot, fault: str, status: str, message: str) -> None:
    found = done(slot, "right", fault, "other")
    assert [(r.case.check, r.status) for r in found] == [("right", PASS), (fault, status), ("other", PASS)]
    assert found[1].message == message
    assert found[0].message != found[2].message  # another process
    assert slot.replaced == 1
    if fault == "abort":
        assert "the kernel is broken" in found[1].details[0]


def test_a_lost_device_is_replaced_after_its_result(slot: Slot) -> None:
    found = done(slot, "lost", "right")
    assert [(r.case.check, r.status) for r in found] == [("lost", ERROR), ("right", PASS)]
    assert slot.replaced == 1


def test_a_process_that_dies_before_any_case_costs_the_first(slot: Slot) -> None:
    found = done(slot, "one", "two", name="dies-before-it-starts")
    assert [(r.case.check, r.status) for r in found] == [("one", CRASH), ("two", CRASH)]


def test_a_worker_that_cannot_start_says_why() -> None:
    slot = Slot(Settings("fake", "broken"))
    with pytest.raises(StartError, match=r"(?s)no worker could be started for broken.*no such device: broken"):
        done(slot, "right")
    slot.close()


def test_nothing_is_left_running_or_lying_around(slot: Slot) -> None:
    done(slot, "right")
    process, folder = slot._process, Path(slot._folder.name)
    assert process is not None
    slot.close()
    assert process.poll() is not None
    assert not folder.exists()


def test_listing_tells_units_and_device(slot: Slot) -> None:
    assert slot.list(["ops"]) == [Unit("ops", "add", "int8", ("right", "wrong"))]
    assert slot.device_name == "fake"


def test_workers_share_the_units() -> None:
    engine = LocalEngine([Settings("fake", f"fake:{n}", timeout=5.0) for n in range(3)])
    units = [Unit("ops", f"op{n}", "int8", ("slow", "other")) for n in range(20)]
    found = list(engine.run(units))
    engine.close()
    assert sorted((r.case.name, r.case.check) for r in found) == sorted((u.name, c) for u in units for c in u.checks)
    assert len({r.message for r in found}) > 1


@pytest.mark.slow  # a matter of time, for a quiet machine
def test_the_engine_does_not_get_in_the_way() -> None:
    """Work that needs no core of its own: two workers take half the time, but for what the engine costs."""

    def seconds(workers: int) -> float:
        engine = LocalEngine([Settings("fake", "fake:0", timeout=20.0)] * workers)
        for slot in engine._slots:
            slot._ready()
        started = time.monotonic()
        assert len(list(engine.run([Unit("ops", f"op{n}", "int8", ("slow",)) for n in range(40)]))) == 40
        taken = time.monotonic() - started
        engine.close()
        return taken

    assert max(seconds(1) / seconds(2) for _ in range(3)) >= 1.7


def test_an_interruption_ends_all_workers_at_once() -> None:
    engine = LocalEngine([Settings("fake", "fake:0", timeout=100.0)] * 2)
    run = engine.run([Unit("ops", f"op{n}", "int8", ("right", "hang")) for n in range(4)])
    first = next(run)
    assert first.status == PASS
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run.throw(KeyboardInterrupt())
    engine.close()
    assert time.monotonic() - started < 15
    pid = int(first.message.split()[1])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_error_of_a_slot_reaches_the_user() -> None:
    engine = LocalEngine([Settings("fake", "broken")])
    with pytest.raises(StartError, match="no such device"):
        list(engine.run([Unit("ops", "add", "int8", ("right",))]))
    engine.close()
    with pytest.raises(ValueError, match="at least one worker"):
        LocalEngine([])


def test_the_worker_sees_a_clean_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "relative/folder")
    environment = Settings("soft", "soft:1").environment()
    assert environment["DITORCH_DEVICE"] == "soft"
    assert environment["DITORCH_DISABLE_MOCK"] == "1"
    assert all(os.path.isabs(part) for part in environment["PYTHONPATH"].split(os.pathsep))
    monkeypatch.setenv("DITORCH_DISABLE_MOCK", "1")
    assert "DITORCH_DISABLE_MOCK" not in Settings("soft", "soft:1", "api").environment()


def test_a_hang_does_not_outlast_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "GRACE", 1.0)
    engine = LocalEngine([Settings("fake", "fake:0", timeout=100.0)] * 2)
    for slot in engine._slots:
        slot._ready()
    units = [Unit("hunt", "hangs", "-", ("hang",)), *(Unit("hunt", f"op{n}", "-", ("slow",)) for n in range(9_999))]
    started = time.monotonic()
    found = list(engine.run(units, started + 1.5))
    assert time.monotonic() - started < 20
    assert found
    assert len(found) < 9_999
    assert all(r.status == PASS for r in found)
    engine.close()
