"""Calls with CUDA's arguments on a vendor's signature, and CUDA's variables on a vendor's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ditorch.backend import Backend
from ditorch.backends import BUILTIN
from ditorch.backends.surfaces import recorded
from ditorch.errors import UnsupportedError
from ditorch.redirect.devices import Devices
from ditorch.redirect.signatures import adapt
from ditorch_common.environment import PLUGIN_DEVICES, VENDORS, Variables, hides_all, translated, visible_numbers
from op_tools.call.facts import is_device_text
from tests.unit.ditorch.vendor_stubs import run, write_package

DEVICES = Devices(Backend("acme", "Acme", "privateuseone"), show_as_cuda=True)


def cuda_name(device: Any = None) -> Any: ...
def cuda_graph_context(
    cuda_graph: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
) -> Any: ...
def cuda_event(enable_timing: bool = False, blocking: bool = False, external: bool = False) -> Any: ...


def test_signatures_that_agree_cost_nothing() -> None:
    assert adapt(DEVICES, "f", cuda_name, lambda device=None, extra=1: device) is None
    assert adapt(DEVICES, "f", cuda_name, lambda *args, **kwargs: args) is None
    assert adapt(DEVICES, "f", cuda_name, lambda *args: args) is None


def test_a_parameter_of_another_name_is_renamed() -> None:
    call = adapt(DEVICES, "get_device_name", cuda_name, lambda device_name=None: device_name)
    assert call is not None
    assert call(device="cuda:1") == torch.device("privateuseone", 1)
    assert call(0) == 0
    assert call() is None


def test_the_fourth_position_does_not_land_in_another_parameter() -> None:
    def npu_graph(npu_graph, pool=None, stream=None, auto_dispatch_capture=False, capture_error_mode="global"):  # type: ignore[no-untyped-def]
        return npu_graph, auto_dispatch_capture, capture_error_mode

    call = adapt(DEVICES, "graph", cuda_graph_context, npu_graph)
    assert call is not None
    assert call("g", None, None, "relaxed") == ("g", False, "relaxed")
    assert call(cuda_graph="g") == ("g", False, "global")


def test_what_a_vendor_lacks_is_dropped_at_its_default_and_refused_by_name_otherwise() -> None:
    call = adapt(DEVICES, "Event", cuda_event, lambda enable_timing=False: enable_timing)
    assert call is not None
    assert call(enable_timing=True, external=False) is True
    assert call(True, True) is True  # how the host waits: no effect on results
    with pytest.raises(UnsupportedError, match=r"torch\.cuda\.Event\(external=True\).*Acme"):
        call(external=True)
    with pytest.raises(TypeError):
        call(unknown=1)


def test_a_device_that_the_vendor_demands_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    call = adapt(DEVICES, "get_device_properties", cuda_name, lambda device: device)
    assert call is not None
    assert call() == 1


def test_surfaces_name_their_source() -> None:
    for name in ("ascend", "cambricon", "musa", "habana", "dipu", "intel"):
        surface = recorded(name)
        assert surface is not None
        assert surface.source
        assert surface.commit
        assert "synchronize" in surface.functions
    assert recorded("enflame") is None


def test_visible_devices_end_at_the_first_invalid_entry_as_in_cuda() -> None:
    assert visible_numbers("1,0") == [1, 0]
    assert visible_numbers("0,-1,1") == [0]
    assert visible_numbers("") == visible_numbers("-1") == visible_numbers("NoDevFiles") == []
    with pytest.raises(ValueError, match="UUID of an NVIDIA device"):
        visible_numbers("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6")
    assert hides_all({"CUDA_VISIBLE_DEVICES": ""})
    assert not hides_all({})


def test_variables_are_translated_and_the_users_own_stay() -> None:
    npu = VENDORS["torch_npu"]
    given = {"CUDA_VISIBLE_DEVICES": "3,1", "PYTORCH_CUDA_ALLOC_CONF": "a:b", "TORCH_NCCL_BLOCKING_WAIT": "1"}
    assert translated(given, npu) == {
        "ASCEND_RT_VISIBLE_DEVICES": "1,3",
        "PYTORCH_NPU_ALLOC_CONF": "a:b",
        "TORCH_HCCL_BLOCKING_WAIT": "1",
    }
    assert translated({**given, "ASCEND_RT_VISIBLE_DEVICES": "0"}, npu)["PYTORCH_NPU_ALLOC_CONF"] == "a:b"
    assert translated({"CUDA_VISIBLE_DEVICES": "3,1"}, Variables("X")) == {"X": "3,1"}
    assert translated({"CUDA_VISIBLE_DEVICES": ""}, npu) == {}


def test_op_tools_knows_every_backends_device() -> None:
    for backend in BUILTIN:
        assert is_device_text(f"{backend.device_type}:0"), backend.name
    plugins = {b.device_type for b in BUILTIN if b.package and b.name != "dipu"}
    assert plugins == set(PLUGIN_DEVICES)


@pytest.mark.slow
def test_probe_writes_a_backend_for_an_unknown_package(tmp_path: Path) -> None:
    write_package(tmp_path, "torch_acme", "acme")
    code = """
import sys
from ditorch.cli import main
main(["probe", "torch_acme", "--write", "acme.py"])
scope = {}
exec(open("acme.py").read(), scope)
backend = scope["BACKEND"]
assert (backend.name, backend.device_type, backend.package) == ("acme", "acme", "torch_acme"), backend
"""
    result = run(f"import os; os.chdir({str(tmp_path)!r})" + code, tmp_path, DITORCH_DEVICE="cpu")
    assert result.returncode == 0, result.stderr
    assert "device type acme" in result.stdout
    assert "power_draw" in result.stdout
