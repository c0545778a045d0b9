"""The hunt finds what PyTorch's samples do not reach, makes it small, and is silent where nothing is wrong."""

from __future__ import annotations

from typing import Any

import pytest

import ditorch
from ditorch.conformance.cases import PASS, WRONG, Limits, Unit
from ditorch.conformance.hunt_checks import HuntChecks
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
