"""wkv as an operator of this machine's device: right, differentiable, known to autocast, compile and the tools."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ditorch  # noqa: F401
import op_tools
from projects.rwkv_v4.wkv import wkv, wkv_reference


def leaves(batch: int, steps: int, channels: int, device: str, seed: int = 0, wild: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    low, high, size = (-12.0, 8.0, 20.0) if wild else (-5.0, 3.0, 1.0)
    w = -torch.exp(torch.linspace(low, high, channels))
    u = torch.randn(channels, generator=generator)
    k, v = (torch.randn(batch, steps, channels, generator=generator) for _ in range(2))
    return [x.to(device).requires_grad_() for x in (w, u, size * k, v)]


@settings(max_examples=15, deadline=None)
@given(
    batch=st.integers(1, 3),
    steps=st.integers(1, 70),
    channels=st.integers(1, 80),
    seed=st.integers(0, 9),
    wild=st.booleans(),
)
def test_agrees_with_the_reference(batch: int, steps: int, channels: int, seed: int, wild: bool) -> None:
    given_here = leaves(batch, steps, channels, "cuda", seed, wild)
    given_there = leaves(batch, steps, channels, "cpu", seed, wild)
    grad = torch.randn(batch, steps, channels, generator=torch.Generator().manual_seed(seed + 1))
    y, want = wkv(*given_here), wkv_reference(*given_there)
    assert y.device.type == "cuda"
    y.backward(grad.cuda())
    want.backward(grad.double())
    torch.testing.assert_close(y.detach().cpu().double(), want.detach(), rtol=2e-4, atol=2e-4)
    for here, there in zip(given_here[1:], given_there[1:]):
        size = max(1.0, float(there.grad.abs().max()))
        torch.testing.assert_close(here.grad.cpu().double(), there.grad.double(), rtol=2e-4, atol=2e-4 * size)


def test_autocast_keeps_float32_inside_and_the_inputs_as_they_are() -> None:
    w, u, k, v = leaves(2, 10, 12, "cuda")
    narrow = [x.detach().bfloat16().requires_grad_() for x in (k, v)]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = wkv(w, u, *narrow)
        y.sum().backward()
    assert y.dtype == torch.float32
    assert narrow[0].grad.dtype == torch.bfloat16
    want = wkv(w, u, *(x.float() for x in narrow))
    assert torch.equal(y, want), "the same numbers as casting first"


def test_the_registrations_hold_together() -> None:
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.rwkv_v4.wkv.default, tuple(leaves(2, 9, 5, "cpu")), test_utils=checks)
    meta = wkv(*(x.to("meta") for x in leaves(2, 9, 5, "cpu")))
    assert meta.shape == (2, 9, 5)


def test_it_compiles_without_a_break() -> None:
    compiled = torch.compile(lambda *x: 2 * wkv(*x), backend="aot_eager", fullgraph=True)
    one, other = leaves(2, 9, 5, "cpu"), leaves(2, 9, 5, "cpu")
    compiled(*one).sum().backward()
    (2 * wkv(*other)).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(one, other))


def test_shapes_that_do_not_fit_are_named() -> None:
    w, u, k, v = leaves(2, 9, 5, "cuda")
    with pytest.raises(ValueError, match=r"w and u must be \(5,\) like the channels of k, got \(3,\)"):
        wkv(w[:3], u, k, v)
    with pytest.raises(ValueError, match=r"k and v must both be \(batch, time, channels\)"):
        wkv(w, u, k[0], v[0])


def test_the_tools_see_it_like_a_built_in_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "off")
    with op_tools.OpAutoCompare() as comparison:
        wkv(*leaves(2, 9, 5, "cuda")).sum().backward()
    rows = [row for row in comparison.records() if "wkv" in row["op"]]
    assert {row["phase"] for row in rows} >= {"forward", "backward"}
    assert all(row["allclose"] for row in rows)
    with op_tools.OpTimeMeasure() as timing:
        wkv(*leaves(2, 9, 5, "cuda"))
    assert any("wkv" in row["op"] for row in timing.records())
