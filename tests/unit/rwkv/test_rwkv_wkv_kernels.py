"""Every kernel of wkv that runs on a CPU agrees with the float64 reference, forward and backward."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from projects.rwkv_v4.wkv import gpu, native, scan, wkv_reference

KERNELS = {"scan": scan, "native": native}


def case(
    batch: int, steps: int, channels: int, low: float, high: float, size: float, seed: int = 0
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    w = -torch.exp(torch.linspace(low, high, channels))
    u = size * torch.randn(channels, generator=generator)
    k, v, grad = (torch.randn(batch, steps, channels, generator=generator) for _ in range(3))
    return [w, u, size * k, v, grad]


def right_answer(w, u, k, v, grad):  # type: ignore[no-untyped-def]
    leaves = [x.detach().double().requires_grad_() for x in (w, u, k, v)]
    y = wkv_reference(*leaves)
    y.backward(grad.double())
    return [y.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-20))


@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 3),
    steps=st.integers(1, 40),
    channels=st.integers(1, 140),
    size=st.sampled_from([0.0, 1.0, 5.0]),
    seed=st.integers(0, 9),
)
def test_any_shape(name: str, batch: int, steps: int, channels: int, size: float, seed: int) -> None:
    w, u, k, v, grad = case(batch, steps, channels, -5, 3, size, seed)
    y, total = KERNELS[name].forward(w, u, k, v)
    got = [y, *KERNELS[name].backward(w, u, k, v, y, total, grad)]
    want = right_answer(w, u, k, v, grad)
    for value, right in zip(got, want):
        torch.testing.assert_close(value.double(), right, rtol=1e-4, atol=1e-4 * max(1.0, float(right.abs().max())))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("low", "high", "size"), [(-30, -20, 1), (5, 9, 1), (-12, 8, 20), (-12, 8, 80)])
def test_extreme_decays_and_keys(name: str, low: float, high: float, size: float) -> None:
    w, u, k, v, grad = case(2, 90, 70, low, high, size)
    y, total = KERNELS[name].forward(w, u, k, v)
    got = [y, *KERNELS[name].backward(w, u, k, v, y, total, grad)]
    assert all(x.isfinite().all() for x in got)
    want = right_answer(w, u, k, v, grad)
    # The gradient of w is nothing but rounding where decays are so strong that only one step counts.
    for value, right, scale in zip(got, want, [1, float(k.numel()), 1, 1, 1]):
        assert float((value.double() - right).norm()) < 2e-4 * max(float(right.norm()), 1e-4 * scale)


@pytest.mark.parametrize("name", KERNELS)
def test_float64_is_computed_in_float64(name: str) -> None:
    w, u, k, v, grad = (x.double() for x in case(2, 33, 20, -5, 3, 2))
    y, total = KERNELS[name].forward(w, u, k, v)
    got = [y, *KERNELS[name].backward(w, u, k, v, y, total, grad)]
    assert max(error(a, b) for a, b in zip(got, right_answer(w, u, k, v, grad))) < 1e-13


@pytest.mark.parametrize("name", KERNELS)
def test_half_inputs_are_widened_not_computed_in(name: str) -> None:
    w, u, k, v, grad = case(2, 33, 20, -5, 3, 1)
    k, v = k.bfloat16(), v.bfloat16()
    y, total = KERNELS[name].forward(w, u, k, v)
    grads = KERNELS[name].backward(w, u, k, v, y, total, grad)
    assert y.dtype == torch.float32
    assert [g.dtype for g in grads] == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    assert error(y, right_answer(w, u, k, v, grad)[0]) < 1e-5


def test_strided_inputs() -> None:
    w, u, k, v, _ = case(2, 16, 12, -5, 3, 1)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v)]
    assert not strided[0].is_contiguous()
    assert torch.equal(native.forward(w, u, *strided)[0], native.forward(w, u, k, v)[0])


def test_nan_and_overflow_are_not_hidden() -> None:
    w, u, k, v, _ = case(1, 8, 16, -5, 3, 1)
    k[0, 3, 5] = float("nan")
    for kernel in KERNELS.values():
        y, _ = kernel.forward(w, u, k, v)
        assert y[0, 3:, 5].isnan().all()
        assert y[0, :3].isfinite().all()
        assert y[0, :, :5].isfinite().all()


def test_the_check_of_variants_accepts_the_right_and_refuses_the_wrong() -> None:
    cpu = torch.device("cpu")
    good = gpu.Variant("good", native.forward, native.backward)
    assert gpu.check(good, cpu) is None

    def forward_off(w, u, k, v):  # type: ignore[no-untyped-def]
        y, total = native.forward(w, u, k, v)
        return y * 1.001, total

    assert "y is off" in (gpu.check(gpu.Variant("off", forward_off, native.backward), cpu) or "")

    def crash(*_):  # type: ignore[no-untyped-def]
        raise RuntimeError("no such instruction")

    assert "no such instruction" in (gpu.check(gpu.Variant("crash", crash, crash), cpu) or "")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("name", ["chunked", "tiled", "sequential"])
def test_triton_kernels_in_its_interpreter(name: str) -> None:
    code = f"""
import torch
from projects.rwkv_v4.wkv import gpu
problem = gpu.check(gpu.VARIANTS[{name!r}], torch.device("cpu"))
assert problem is None, problem
"""
    root = Path(__file__).parents[3]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
