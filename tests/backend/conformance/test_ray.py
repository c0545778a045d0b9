"""Workers on a Ray cluster give what workers of this machine give."""

from __future__ import annotations

import importlib.util

import pytest

import ditorch
from ditorch.conformance.cases import CRASH, Case, Unit
from ditorch.conformance.engines import LocalEngine
from ditorch.conformance.ray_engine import RayEngine
from ditorch.conformance.slot import Settings

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
UNITS = [Unit("ops", name, "float32", ("forward", "backward")) for name in ("sin", "mm", "softmax", "sum", "cumsum")]


def settings() -> Settings:
    device = ditorch.backend.device_type if ditorch.backend.device_type == "cpu" else f"{ditorch.backend.device_type}:0"
    return Settings(ditorch.backend.name, device, samples=2, timeout=90.0)


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_workers_of_a_cluster_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    if ditorch.backend.name == "soft":
        monkeypatch.setenv("DITORCH_SOFT_FAULTS", "sum: abort")  # a crash costs its case there too
    local = LocalEngine([settings()])
    expected = {result.case: result.status for result in local.run(UNITS)}
    local.close()
    cluster = RayEngine([settings()] * 2)
    found = {result.case: result.status for result in cluster.run(UNITS)}
    cluster.close()
    assert found == expected
    assert len(found) == 10
    if ditorch.backend.name == "soft":
        assert found[Case("ops", "sum", "float32", "forward")] == CRASH


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_error_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"pip install 'ditorch\[ray\]'"):
        RayEngine([settings()])
