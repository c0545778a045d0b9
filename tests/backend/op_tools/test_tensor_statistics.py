"""Statistics of tensors of any shape, layout and dtype, by whatever the device measures them with."""

from __future__ import annotations

import importlib.util
import linecache
import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ditorch
from op_tools.native.statistics import NAMES, FusedBatch, TorchBatch, batch_for, fused

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]


def measured(*tensors: torch.Tensor) -> list[dict[str, float]]:
    batches = {}
    for number, tensor in enumerate(tensors):
        key, kind = batch_for(tensor)
        if key not in batches:
            batches[key] = kind(tensor)
        batches[key].add(tensor, number)
    found = {}
    for batch in batches.values():
        rows = batch.land(batch.values().cpu())
        found.update(zip(batch.numbers, rows.tolist()))
    return [dict(zip(NAMES, found[number])) for number in range(len(tensors))]


def compare(row: dict[str, float], tensor: torch.Tensor) -> None:
    numbers = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    exact = numbers.cpu().double().flatten()
    assert row["inf"] == bool(exact.isinf().any())
    assert row["nan"] == bool(exact.isnan().any())
    for name, value in (("min", exact.min()), ("max", exact.max())):
        assert row[name] == value or (math.isnan(row[name]) and value.isnan())
    close = {"rel": 1e-4, "abs": 1e-5 * float(exact.nan_to_num().abs().max()) + 1e-30, "nan_ok": True}
    assert row["mean"] == pytest.approx(float(exact.mean()), **close)
    if len(exact) > 1:
        assert row["std"] == pytest.approx(float(exact.std()), **close)
    if exact.isfinite().all():
        assert row["norm"] == pytest.approx(float(exact.norm()), rel=1e-4)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.integers(1, 40), min_size=0, max_size=3),
    dtype=st.sampled_from(DTYPES),
    order=st.sampled_from(["as it is", "transposed", "every other", "from the second", "expanded", "conjugated"]),
    strange=st.sampled_from(["", "inf", "-inf", "nan", "inf nan", "inf -inf"]),
    far=st.booleans(),
)
def test_any_tensor(device: str, shape: list[int], dtype: torch.dtype, order: str, strange: str, far: bool) -> None:
    tensor = torch.randn(shape, device=device).to(dtype)
    if far:
        tensor = tensor * 0.01 + 100  # the mean is large beside the spread
    flat = tensor.view(-1)
    for place, text in enumerate(strange.split()):
        if place < len(flat):
            flat[place] = float(text)
    if order == "transposed":
        tensor = tensor.transpose(0, -1) if tensor.dim() else tensor
    elif order == "every other":
        tensor = tensor[..., ::2] if tensor.dim() else tensor
    elif order == "from the second" and len(flat) > 1:
        tensor = flat[1:]  # at an address that is not aligned
    elif order == "expanded":
        tensor = tensor[None].expand(3, *tensor.shape)
    elif order == "conjugated":
        tensor = tensor.conj()
    compare(measured(tensor)[0], tensor)


def test_large_tensors_beside_small_ones(device: str) -> None:
    tensors = [torch.randn(n, device=device) + 3 for n in (1, 8191, 8193, 300_000, 3_000_000, 2)]
    tensors[4][2_999_999] = float("inf")
    for row, tensor in zip(measured(*tensors), tensors):
        compare(row, tensor)


def test_what_measures_on_this_device(device: str) -> None:
    if ditorch.backend.name == "cuda" and importlib.util.find_spec("triton") is not None:
        assert fused(0, wait=True) is not None, "the kernel agrees with PyTorch here"
    kind = batch_for(torch.ones(2, device=device))[1]
    if ditorch.backend.name == "cuda" and importlib.util.find_spec("triton") is not None:
        assert kind is FusedBatch
    else:
        assert kind is TorchBatch


@pytest.mark.parametrize("after", range(1, 16))
def test_an_interrupt_between_two_lines_shifts_nothing(after: int) -> None:
    batch = TorchBatch(torch.ones(1))
    batch.add(torch.tensor([1.0, 2.0]), 1)
    lines = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        if frame.f_code is not TorchBatch.add.__code__:
            return None
        lines += event == "line"
        # at the end of a block its `with` comes again; Python itself looks for signals inside of `__exit__` only
        is_with = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip().startswith("with ")
        if lines == after and not is_with:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        batch.add(torch.tensor([float("inf"), 0.0]), 2)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    assert torch.is_grad_enabled()
    assert torch._C._is_torch_function_enabled()
    batch.add(torch.tensor([5.0, 7.0, 9.0]), 3)
    rows = dict(zip(batch.numbers, batch.land(batch.values()).tolist()))
    assert rows[1][:5] == [0, 0, 1, 2, 1.5]
    assert rows[3][:5] == [0, 0, 5, 9, 7]
    assert set(rows) <= {1, 2, 3}
