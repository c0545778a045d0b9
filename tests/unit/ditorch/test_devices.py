"""Which strings and devices are translated: exactly cuda and cuda:N, and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ditorch.backend import Backend
from ditorch.distributed import Names
from ditorch.redirect.devices import Devices, translate_call

XPU = Devices(Backend("test", "Test", "xpu"), show_as_cuda=True)
CPU = Devices(Backend("test", "Test", "cpu", shows_as_cuda=False), show_as_cuda=True)


@given(st.integers(0, 63))
def test_numbered_devices_go_both_ways(index: int) -> None:
    real = torch.device("xpu", index)
    assert XPU.real(f"cuda:{index}") == XPU.real(torch.device("cuda", index)) == real
    assert XPU.shown(real) == torch.device("cuda", index)
    assert XPU.indexed(index) == real


@given(st.text())
@example("cuda.pt")
@example("/models/cuda:0/weights")
@example("CUDA")
@example(" cuda")
@example("cuda:")
@example("cuda:-1")
@example("cuda:01")
def test_other_text_is_never_translated(text: str) -> None:
    if text != "cuda" and text not in {f"cuda:{n}" for n in range(64)}:
        assert XPU.real(text) is text


@given(st.one_of(st.integers(), st.none(), st.floats(), st.binary(), st.lists(st.integers())))
def test_other_values_are_never_translated(value: object) -> None:
    assert XPU.real(value) is value


def test_unnumbered_device_stays_unnumbered() -> None:
    assert XPU.real("cuda") == torch.device("xpu")
    assert XPU.indexed(None) == torch.device("xpu")


def test_other_devices_are_left_alone() -> None:
    for device in (torch.device("cpu"), torch.device("meta"), torch.device("xpu:1")):
        assert XPU.real(device) is device
    assert XPU.shown(torch.device("cpu")) == torch.device("cpu")


def test_the_cpu_is_never_shown_as_cuda() -> None:
    assert CPU.real("cuda:3") == torch.device("cpu")
    assert CPU.shown(torch.device("cpu")) == torch.device("cpu")


def test_who_sees_the_real_device() -> None:
    for inside in ("torch", "torch.optim.adam", "ditorch.redirect", "op_tools.watch.intercept"):
        assert XPU.is_inside(inside)
    for outside in ("__main__", "transformers.trainer", "torchvision.ops", "torch.cuda", "torch._tensor_str", None):
        assert not XPU.is_inside(outside)


def test_translated_calls_translate_positions_and_keywords() -> None:
    seen = translate_call(XPU, lambda *args, **kwargs: (args, kwargs))("cuda:1", 7, device="cuda", name="x")
    assert seen == ((torch.device("xpu:1"), 7), {"device": torch.device("xpu"), "name": "x"})


def test_collective_names_alone_and_in_pairs() -> None:
    names = Names("npu", "hccl")
    assert names.real("nccl") == names.real("NCCL") == "hccl"
    assert names.real("cpu:gloo,cuda:nccl") == "cpu:gloo,npu:hccl"
    assert names.real("gloo") == "gloo"
    assert names.real(None) is None
    assert names.shown("hccl") == "nccl"
    assert names.shown("cpu:gloo,npu:hccl") == "cpu:gloo,cuda:nccl"


@given(st.text(alphabet="abcdefgh_", min_size=1).filter(lambda name: name != "nccl"))
def test_other_collectives_are_left_alone(name: str) -> None:
    assert Names("npu", "hccl").real(name) == name


def test_a_vendor_that_cannot_share_refuses_when_a_tensor_is_put() -> None:
    from multiprocessing import Queue
    from types import SimpleNamespace
    from typing import Any

    from ditorch.errors import UnsupportedError
    from ditorch.patching import Ledger
    from ditorch.redirect import sharing

    ledger, queue = Ledger(), Queue()
    devices: Any = SimpleNamespace(type="meta", backend=Backend("acme", "Acme", "meta"))
    sharing._refuse_at_put(ledger, devices)
    try:
        with pytest.raises(UnsupportedError, match=r"Queue.put of a device tensor .* Acme .* send tensor.cpu\(\)"):
            queue.put({"x": [torch.empty(2, device="meta")]})
        queue.put(torch.ones(2))
    finally:
        ledger.undo_all()
        queue.cancel_join_thread()
