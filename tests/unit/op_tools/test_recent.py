"""What is remembered of calls stays bounded, though an optimizer gives them other numbers in every step."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from op_tools.call import description
from op_tools.call.description import Described, Descriptions, describe
from op_tools.call.recent import Recent
from op_tools.call.traits import traits_of
from op_tools.compare.coverage import Coverage
from op_tools.compare.memory import Outside
from op_tools.compare.teller import Lineage
from op_tools.copies.operands import stage
from op_tools.judge import golden, uncertainty
from op_tools.judge.rounding import Precision
from op_tools.trace import format as trace_format
from op_tools.view.console import TableCache
from op_tools.view.store import Store
from op_tools.watch.sums import _Calls

TENSORS = [torch.ones(4, 3) for _ in range(20)]


def test_what_is_used_stays_and_the_rest_is_forgotten() -> None:
    recent = Recent[Any, int](10)
    recent["used"] = 1
    for number in range(1000):
        recent[number] = number
        assert recent.get("used") == 1
    assert len(recent) < 25
    assert 999 in recent
    assert 900 not in recent
    assert recent.get(900) is None


def test_something_heavy_takes_more_room() -> None:
    recent = Recent[int, str](100)
    for number in range(50):
        recent.keep(number, "heavy", 60)
    assert len(recent) == 2
    assert recent.get(49) == "heavy", "the last one is there, whatever it weighs"


def described(seen: Descriptions, *args: Any) -> Described:
    return seen.of(args, {}, [], False)


def step_of_an_optimizer(seen: Descriptions, step: int) -> tuple[Described, Described]:
    """Two calls: one that is the same in every step, and one with other numbers."""
    return described(seen, TENSORS, 0.9), described(seen, TENSORS, [1 / step] * len(TENSORS))


def test_calls_that_never_come_again_are_not_kept() -> None:
    seen = Descriptions()
    first = [step_of_an_optimizer(seen, step) for step in range(1, 301)]
    kept = len(seen.known)
    later = [step_of_an_optimizer(seen, step) for step in range(301, 601)]
    assert len(seen.known) == kept < 200
    assert {same.number for same, _ in first + later} == {first[0][0].number}, "it has its number for ever"
    assert {other.number for _, other in later} == {0}
    assert later[-1][1].args == describe((TENSORS, [1 / 600] * len(TENSORS))).args


def test_a_call_that_comes_a_second_time_is_kept() -> None:
    seen = Descriptions()
    for step in range(1, 301):
        step_of_an_optimizer(seen, step)
    x = torch.ones(7)
    assert [described(seen, x, 1).number > 0 for _ in range(3)] == [False, True, True]


def test_kinds_that_come_a_few_times_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "_MAX_PARTS", 1000)
    seen = Descriptions()
    every = {described(seen, TENSORS[0], "always").number}
    sizes = []
    for step in range(1000):
        for _ in range(3):
            described(seen, TENSORS[0], step * 0.1)
        every.add(described(seen, TENSORS[0], "always").number)
        sizes.append(len(seen._kept))
    assert max(sizes[500:]) <= max(sizes[:500]) < 500
    assert len(every) == 1


def test_tensors_that_look_alike_share_their_description() -> None:
    one, two = describe((torch.ones(5, 2),)), describe((torch.zeros(5, 2),))
    assert one.args[0] is two.args[0]


def test_places_in_the_records(tmp_path: Path) -> None:
    store = Store(tmp_path / "records.sqlite")
    try:
        numbers, sizes = set(), []
        for step in range(600):
            text = describe((TENSORS, 0.1 * step)).args
            store.site(("op", "line", text), "op", "line", str)
            numbers.add(store.site(("op", "every step"), "op", "line", str))
            sizes.append(len(store._sites))
        assert len(numbers) == 1
        assert sizes[-1] <= max(sizes[:400])
    finally:
        store.close()


def test_tables_of_the_console() -> None:
    tables, sizes = TableCache(), []
    for number in range(1500):
        tables.render(number, "op", lambda: [("input", "x" * 10_000)], [])
        sizes.append(len(tables._templates))
    assert sizes[-1] < 900


def test_what_a_comparison_covers() -> None:
    coverage, seen, traits = Coverage(), Descriptions(), traits_of(torch.add)
    for step in range(1, 401):
        inputs = described(seen, TENSORS, [1 / step] * len(TENSORS))
        call = SimpleNamespace(op="torch.add", traits=traits, inputs=inputs, outputs=described(seen, TENSORS))
        coverage.add(call, "forward")
    assert len(coverage._calls) == len(coverage.compared) == 1
    assert coverage.compared_by_op() == {"torch.add": 400}


def test_copies_with_layouts_that_no_other_call_has() -> None:
    outside, x = Outside(), torch.ones(8)
    for _ in range(20):
        before, after = stage(((x,), {})), stage(((x,), {}, x))
        assert outside.judge("op", before, after, ([x.view(torch.uint8)], [x.view(torch.uint8)])) is None
    assert not outside._plans


def test_structures_of_calls() -> None:
    sizes = []
    for step in range(150):
        lists = [[torch.ones(2) for _ in range(60)] for _ in range(3)]
        scale = [0.9**step] * 60
        result = golden.run(torch._foreach_addcdiv, (*lists, scale), {}, name="torch._foreach_addcdiv")
        assert uncertainty.Uncertainty(result, "output", Precision(torch.float32), 1.0).structure is not None
        sizes.append(len(uncertainty._structures))
    assert sizes[-1] <= max(sizes[:100])


def test_events_are_kept_in_few_bytes() -> None:
    lineage = Lineage(most=1000)
    events = [lineage.made_from([number], [number + 1]) for number in range(5000)]
    assert len(lineage._ends) <= 1000
    assert lineage.ancestors_among(events[-1], {events[-400]}) == {events[-400]}
    assert lineage.ancestors_among(events[-1], {events[0]}) == set(), "that lies too far back"
    assert lineage.reached_by(events[-10]) == 9
    assert sum(one.itemsize * len(one) for one in (lineage._parents, lineage._ends)) <= 8_000


def test_calls_whose_sums_are_awaited() -> None:
    class Held:
        pass

    calls, last = _Calls(), Held()
    for number in range(0, 100_000, 2):
        last = Held()  # the one before is gone
        calls.note(number, number + 2, last)  # type: ignore[arg-type]
    assert len(calls.calls) <= 1_001
    assert calls.find(99_999) is last
    held = [Held() for _ in range(3000)]
    for number, each in enumerate(held):
        calls.note(200_000 + number, 200_001 + number, each)  # type: ignore[arg-type]
    assert all(calls.find(200_000 + number) is each for number, each in enumerate(held))
    assert isinstance(calls.calls[0], weakref.ref)


def test_texts_of_a_trace(tmp_path: Path) -> None:
    sizes = []
    with trace_format.TraceWriter(tmp_path / "a.optrace", {}) as writer:
        name = writer.text("torch.add")
        for step in range(400):
            number = writer.passing_text(f"{step} " * 5000)
            assert writer.passing_text(f"{step} " * 5000) == number
            assert writer.passing_text("torch.add") == name
            sizes.append(len(writer._passing) + len(writer.texts))
        last = writer.text("the last")
    assert sizes[-1] <= max(sizes[:300])
    texts = trace_format.read(tmp_path / "a.optrace").texts
    assert (texts[name], texts[last], texts[number]) == ("torch.add", "the last", "399 " * 5000)
