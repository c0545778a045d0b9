"""The hunt finds what PyTorch's samples do not reach, makes it small, and is silent where nothing is wrong."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ditorch
from ditorch.conformance import findings
from ditorch.conformance.cases import PASS, WRONG, Limits, Unit
from ditorch.conformance.hunt_checks import HuntChecks
from ditorch.conformance.trial import DeviceLost, Outcome, Trial
from ditorch.conformance.variants import Variant
from tests.databases import load

LIMITS = Limits(samples=40, timeout=240, hunt_seconds=20)  # calls decide, not the clock of a busy machine


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    load()


def hunted(name: str, rounds: int = 4) -> list[Any]:
    device = f"{ditorch.backend.device_type}:0" if ditorch.backend.device_type != "cpu" else "cpu"
    checks = HuntChecks(Unit("hunt", name, "-", ()), device, LIMITS)
    return [checks.run(f"round-{number}") for number in range(1, rounds + 1)]


def test_a_bug_that_needs_a_layout_and_an_argument_is_found_and_made_small() -> None:
    if getattr(ditorch.backend, "name", "") != "soft":
        pytest.skip("only the software accelerator can be made to fail on purpose")
    from ditorch.soft import faults

    with faults.plant("avg_pool2d_backward: scale=0.6, layout=channels_last, arg=padding != 0"):
        found = [result for result in hunted("nn.functional.avg_pool2d", 12) if result.status == WRONG]
    assert found
    assert "backward" in found[0].message
    smallest = min(found, key=lambda result: len(result.message))
    assert "strides" in smallest.message  # it is not wrong without them
    assert "import torch" in smallest.details[1]
    compile(smallest.details[1], "script", "exec")


@pytest.mark.parametrize("name", ["add", "nn.functional.layer_norm"])
def test_what_is_right_is_not_found(name: str) -> None:
    results = hunted(name, 2)
    assert {result.status for result in results} == {PASS}, [result.message for result in results]
    assert sum(result.samples for result in results) > 10


def test_a_bug_of_one_way_does_not_hide_that_of_another() -> None:
    """`out=` is wrong in nearly every call, the gradient in few: a round that ended with the first never got there."""
    if getattr(ditorch.backend, "name", "") != "soft":
        pytest.skip("only the software accelerator can be made to fail on purpose")
    from ditorch.soft import faults

    rare = "avg_pool2d_backward: scale=0.6, layout=channels_last, arg=padding != 0"
    with faults.plant("avg_pool2d.out: zero"), faults.plant(rare):
        found = [result for result in hunted("nn.functional.avg_pool2d", 12) if result.status == WRONG]
    several = [one for result in found for one in findings.of(result)]
    ways = {one.message.partition(",")[0] for one in several}
    assert {"out", "backward"} <= ways
    assert all("import torch" in one.script for one in several)


def test_a_lost_device_is_told_with_the_call_that_lost_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: Any, **kwargs: Any) -> Any:
        raise DeviceLost("RuntimeError: CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Trial, "run", lost)
    with pytest.raises(DeviceLost, match=r"plain, float32, \(.*illegal memory access") as caught:
        hunted("tanh", 1)
    (found,) = findings.of(caught.value.result)
    assert "illegal memory access" in found.message
    compile(found.script, found.file, "exec")  # what took the device down can be tried again


def test_what_was_found_before_the_device_was_lost_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: HuntChecks, dtype: str, way: str, variant: Any) -> Outcome:
        if way == "backward":
            raise DeviceLost(f"{way}, {dtype}: RuntimeError: CUDA error: misaligned address")
        return Outcome(WRONG, "off")

    monkeypatch.setattr(HuntChecks, "_tried", wrong)
    with pytest.raises(DeviceLost) as caught:
        hunted("tanh", 1)
    result = caught.value.result
    assert result.status == WRONG
    several = list(findings.of(result))
    assert len(several) > 1
    assert "misaligned" in several[-1].message
    assert len({one.file for one in several}) == len(several)


def test_what_takes_the_cpu_down_is_not_tried() -> None:
    x = torch.ones(1, 1, 16)
    variant = Variant((x, None, None, None, None, False, 0.5, 1e-5), {}, (), None)
    checks = HuntChecks(Unit("hunt", "native_batch_norm", "-", ()), "cpu", LIMITS)
    sample = SimpleNamespace(output_process_fn_grad=lambda result: result, broadcasts_input=False)
    outcome = checks._tried("float32", "plain", replace(variant, sample=sample))
    assert "takes the process down" in outcome.message
