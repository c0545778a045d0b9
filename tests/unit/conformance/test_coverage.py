"""Which overloads a device can be asked for, and which a run came to."""

from __future__ import annotations

import json
import math

import pytest
import torch

from ditorch.conformance import coverage
from ditorch.conformance.cases import PASS, Case, Result
from ditorch.conformance.coverage import Observer
from ditorch.conformance.ledger import Ledger
from ditorch.conformance.page import page
from ditorch.conformance.summary import Summary
from ditorch_common.page import read_page


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", coverage.KERNEL),
        ("aten::add.out", coverage.KERNEL),
        ("aten::convolution", coverage.DEFAULT),
        ("aten::matmul", coverage.COMPOSITE),
        ("aten::cudnn_convolution", coverage.OTHER_DEVICES),
        ("aten::_test_warn_in_autograd", coverage.INTERNAL),
    ],
)
def test_what_an_overload_is_to_a_device(name: str, kind: str) -> None:
    assert coverage.overloads()[name] == kind


def test_the_mode_sees_what_reaches_the_device_and_each_overload_is_told_once() -> None:
    observer = Observer()
    x = torch.randn(3, 4, requires_grad=True)
    observer.begin("cpu")
    observer.repeat(lambda: torch.matmul(x, x.t()).sum().backward())
    seen = set(observer.new())
    assert {"aten::mm", "aten::t", "aten::sum"} <= seen
    assert "aten::matmul" not in seen  # made of mm before
    observer.begin("cpu")
    observer.repeat(lambda: torch.mm(x, x.t()).exp())
    assert observer.new() == ("aten::exp",)


def test_calls_for_other_devices_errors_and_calls_beyond_the_first_few_do_not_count() -> None:
    observer = Observer()
    observer.begin("meta")
    observer.repeat(lambda: torch.ones(2) + 1)
    observer.repeat(lambda: torch.ones(2).view(3))  # raises
    assert observer.new() == ()
    calls = []
    observer.begin("cpu")
    for _ in range(50):
        observer.repeat(lambda: calls.append(torch.ones(2).exp()))
    assert len(calls) == coverage.CALLS_PER_CASE


def test_a_run_counts_and_shows_what_its_cases_saw() -> None:
    cases = [("ops/mm/float32/forward", ("aten::mm",)), ("ops/mm/float32/out", ("aten::mm.out", "aten::mm"))]
    results = [Result(Case.parse(case), PASS, seen=seen) for case, seen in cases]
    assert [Result.from_dict(json.loads(json.dumps(r.as_dict()))) for r in results] == results
    summary = Summary.of(results, {"backend": "soft"}, Ledger([], "2.13"))
    found = summary.coverage
    assert found is not None
    done, asked = found.share
    assert (done, found.exercised[coverage.KERNEL]) == (2, 2)
    assert asked == 2 + len(found.missing)
    assert "aten::mm" not in found.missing
    assert "aten::bmm" in found.missing
    assert f"2 of {asked:,}" in str(found)
    assert sum(known for _, known, _ in found.rows()) == len(coverage.overloads())
    shown = read_page(page(summary))[1]["coverage"]
    seen = [None if math.isnan(number) else number for number in shown["seen"].values.tolist()]
    assert [list(row) for row in zip(shown["kind"].texts(), shown["known"].values.tolist(), seen)] == found.rows()


def test_a_run_of_an_earlier_version_has_no_figure() -> None:
    assert Summary.of([Result(Case.parse("ops/mm/float32/forward"), PASS)], {}, Ledger([], "2.13")).coverage is None
