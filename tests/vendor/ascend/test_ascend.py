"""The device layer on the real torch_npu, without a chip: see README.md for what is real and what is not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ditorch.backends.ascend import capability
from tests.unit.ditorch.cuda_forms import SETUP, forms
from tests.vendor.ascend.probes import probes

pytestmark = pytest.mark.timeout(1800)
START = "import torch, ditorch\nfrom tests.vendor.ascend.cpu_kernels import enter\nK = enter()\n"
LIMITS = {
    "torch.cuda.ExternalStream(": "torch_npu leaves the synchronization of external streams to the caller",
}
"""Probes that cannot pass, by a part of their text, with the reason."""
SUITE = "tests/backend/ditorch"
_NAMES = "test_surface.py::test_name_works_or_is_in_the_ledger"
NOT_HERE = {
    "a capture holds no work, and its replay does nothing": (
        "test_active.py::test_graph_capture_refuses_to_read_values",
        "test_active.py::test_graph_replay_trains_a_model",
        f"{_NAMES}[torch.cuda.CUDAGraph]",
        f"{_NAMES}[torch.cuda.graph]",
    ),
    "more than one rank": ("test_distributed.py",),
    "a kernel that the CPU does not have": ("test_wild.py::test_histograms_of_whole_numbers",),
}
"""Tests of the suite that need more than CPU kernels, by what they need."""


@pytest.fixture(scope="module")
def outcome(ascend: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What became of each probe under ditorch and under the vendor's own shim: "" or the error."""
    found = {}
    for shim in ("ditorch", "transfer_to_npu"):
        path = tmp_path_factory.mktemp("probes") / f"{shim}.json"
        ascend("-m", "tests.vendor.ascend.probes", shim, str(path))
        found[shim] = json.loads(path.read_text())
    return found


def test_the_probes(outcome: dict[str, dict[str, str]]) -> None:
    failed = {probe: error for probe, error in outcome["ditorch"].items() if error}
    unexplained = {p: e for p, e in failed.items() if not any(part in p for part in LIMITS)}
    assert not unexplained, "\n".join(f"{p}\n    {e}" for p, e in unexplained.items())
    assert len(outcome["ditorch"]) == len(probes()) >= 259


def test_nothing_works_under_the_vendors_shim_alone(outcome: dict[str, dict[str, str]]) -> None:
    worse = [p for p, error in outcome["ditorch"].items() if error and not outcome["transfer_to_npu"][p]]
    assert not worse


def test_every_call_form_on_the_real_package(ascend: Any) -> None:
    code = f"""{START}{SETUP}
failed = []
for form in {forms()!r}:
    try:
        eval(form)
    except ditorch.UnsupportedError:
        pass
    except TypeError as error:
        failed.append(f"{{form}}: {{error}}")
    except Exception:
        pass  # the chip's own refusal
assert not failed, failed
"""
    ascend("-c", code)


def test_the_recorded_surface_is_the_packages(ascend: Any) -> None:
    code = """
import inspect, json, torch, torch_npu
from ditorch.backends.surfaces import recorded, write
import ditorch
ditorch.deactivate()
wrong = []
for name, parameters in recorded("ascend").functions.items():
    function = getattr(torch.npu, name, None) or getattr(torch.npu.memory, name, None)
    if inspect.isfunction(function) and write(inspect.signature(function)) != parameters:
        wrong.append((name, write(inspect.signature(function)), parameters))
print(json.dumps(wrong))
"""
    wrong = json.loads(ascend("-c", code).splitlines()[-1])
    assert len(wrong) <= 3, wrong  # decorated functions show their wrapper


def test_an_overflow_is_seen_by_the_vendors_scaler(ascend: Any) -> None:
    code = (
        START
        + """
import torch_npu
for make in (torch.amp.GradScaler, torch.cuda.amp.GradScaler):
    scaler = make()
    assert isinstance(scaler, torch_npu.npu.amp.GradScaler), type(scaler).__mro__
    assert isinstance(scaler, make)
class Mine(torch.amp.GradScaler):
    pass
assert isinstance(Mine("cuda", init_scale=4.0), Mine) and Mine("cuda", init_scale=4.0).get_scale() == 4.0
assert not isinstance(torch.amp.GradScaler("cpu"), torch_npu.npu.amp.GradScaler)
"""
    )
    ascend("-c", code)


@pytest.mark.parametrize(("visible", "count"), [("1,0", "2"), ("", "0"), ("0,-1,1", "1")], ids=repr)
def test_visible_devices(ascend: Any, visible: str, count: str) -> None:
    code = "import torch, ditorch; print(torch.cuda.device_count(), torch.cuda.is_available())"
    assert ascend("-c", code, CUDA_VISIBLE_DEVICES=visible).split()[-2:] == [count, str(count != "0")]


def test_variables_are_set_before_the_package_is_imported(ascend: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '1,0'\nimport torch\n"
        "e = os.environ\n"
        "print(e['ASCEND_RT_VISIBLE_DEVICES'], e['PYTORCH_NPU_ALLOC_CONF'], torch.cuda.is_available())\n"
    )
    out = ascend("-m", "ditorch", "run", str(script), PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64")
    assert out.split()[-3:] == ["0,1", "max_split_size_mb:64", "True"]


@pytest.mark.parametrize(
    ("chip", "expected"),
    [("Ascend910B4", (8, 0)), ("Ascend910_9362", (8, 0)), ("Ascend910A", (7, 0)), ("Ascend950PR", (9, 0))],
)
def test_capability_by_the_chip(chip: str, expected: tuple[int, int]) -> None:
    assert capability(chip) == expected


def _json(output: str) -> Any:
    return json.loads(output[output.index("{") :])  # the package prints warnings of its own before


def test_doctor_and_scan(ascend: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\ng = torch.cuda.CUDAGraph()\ntorch.cuda.synchronize()\n")
    found = _json(ascend("-m", "ditorch", "scan", str(tmp_path), "--json"))
    assert "unsupported" not in json.dumps(found)
    report = _json(ascend("-m", "ditorch", "doctor", "--json"))
    assert report["backend"]["name"] == "ascend"
    assert report["collectives"]["filled by ditorch"] == []


def test_the_backend_suite(ascend: Any) -> None:
    """tests/backend/ditorch on this device, where CPU kernels suffice."""
    paths = f"{Path(__file__).parent / 'inject'}:{Path(__file__).parents[3]}"
    without = [f"--deselect={SUITE}/{test}" for tests in NOT_HERE.values() for test in tests]
    output = ascend("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", SUITE, *without, PYTHONPATH=paths)
    assert int(re.findall(r"(\d+) passed", output)[-1]) >= 120
