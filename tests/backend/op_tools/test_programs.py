"""Programs of the usual kinds under OpAutoCompare: healthy kernels give no alarm, and the gradients are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import op_tools
from benchmarks import zoo
from benchmarks.programs import PROGRAMS, Job

zoo.load()

SAMPLE = {
    "float32": ["mnist_cnn", "fgsm", "pinn", "maml", "istft", "stochastic_depth"],
    "bfloat16": ["simclr", "shared_layers", "kalman", "mha_masks"],
    "float16": ["dcgan", "gradient_penalty"],
}


@pytest.mark.parametrize(("low", "name"), [(low, name) for low, names in SAMPLE.items() for name in names])
def test_no_alarm(name: str, low: str, device: str) -> None:
    found = zoo.watch(name, Job(device, zoo.LOWS[low]), steps=1)
    assert not found.error
    assert not found.wrong, found.reasons
    assert not found.failed
    assert found.verdicts["right"] > 100


def test_every_program_is_named_once() -> None:
    assert len(PROGRAMS) > 100
    assert all(name.isidentifier() for name in PROGRAMS)


def compared(step: Callable[[], Any]) -> tuple[list[str], list[str]]:
    """The gradients that were compared, and what is wrong."""
    with op_tools.OpAutoCompare() as comparison:
        step()
    rows = comparison.records()
    wrong = [f"{row['name']}: {row['reason']}" for row in rows if row["verdict"] == "wrong"]
    return [row["name"] for row in rows if row["phase"] == "backward"], wrong


def test_gradients_that_nobody_asked_for(device: str) -> None:
    """`autograd.grad` and `inputs=` leave the other gradients out; they are not missing."""
    net, x = nn.Linear(8, 4).to(device), torch.randn(3, 8, device=device, requires_grad=True)
    names, wrong = compared(lambda: torch.autograd.grad(F.linear(x, net.weight, net.bias).sum(), x))
    assert not wrong
    assert any("linear grad" in name for name in names)
    names, wrong = compared(lambda: F.linear(x, net.weight, net.bias).sum().backward(inputs=[net.bias]))
    assert not wrong
    assert any("linear grad" in name for name in names)


def test_a_gradient_that_is_missing_is_wrong(device: str) -> None:
    """An operator that returns no gradient on the device, where one was asked for, is found."""

    @torch.library.custom_op("zoo_test::twice", mutates_args=())
    def twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 + y

    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (grad * 2 if grad.is_cpu else None), grad

    twice.register_autograd(backward)
    x, y = (torch.randn(3, device=device, requires_grad=True) for _ in range(2))
    _, wrong = compared(lambda: twice(x, y).sum().backward())
    assert wrong
    assert all("None instead of Tensor" in text for text in wrong)
    _, wrong = compared(lambda: torch.autograd.grad(twice(x, y).sum(), y))
    assert not wrong


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_a_layer_used_twice_under_autocast(low: torch.dtype, device: str) -> None:
    """Autocast keeps the copy of a weight: its node gets the gradients of both calls."""
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, 4)).to(device)
    a, b = (torch.randn(2, 2, 6, 6, device=device) for _ in range(2))

    def step() -> None:
        with torch.autocast(device, dtype=low):
            loss = net(a).square().mean() + net(b).abs().mean()
        loss.backward()

    names, wrong = compared(step)
    assert not wrong
    assert sum("linear grad" in name for name in names) == 6, "all gradients of both calls are compared"
    assert sum("conv2d grad" in name for name in names) == 6, "and the images have rows without one"


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8)])
def test_second_derivatives(shape: tuple[int, ...], device: str) -> None:
    """The graph of the first derivative leads into the nodes of the call it differentiates."""
    net = nn.Linear(8, 4).to(device)
    x = torch.randn(shape, device=device, requires_grad=True)

    def step() -> None:
        out = F.cross_entropy(net(x).flatten(0, -2), torch.zeros(x[..., 0].numel(), dtype=torch.long, device=device))
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        (out + grad.square().sum()).backward()

    names, wrong = compared(step)
    assert not wrong
    assert sum("linear grad" in name for name in names) >= 3


@pytest.mark.parametrize("weights_used", [True, False])
def test_attention_weights_that_are_a_result_as_well(weights_used: bool, device: str) -> None:
    """They are a view of what the values are multiplied with: what the product sends back is not theirs."""
    attention, x = nn.MultiheadAttention(8, 2).to(device), torch.randn(4, 3, 8, device=device)

    def step() -> None:
        y, weights = attention(x, x, x, average_attn_weights=False)
        loss = y.square().sum() + (weights.square().sum() if weights_used else 0)
        loss.backward()

    names, wrong = compared(step)
    assert not wrong
    assert any("multi_head_attention_forward grad" in name for name in names)


def test_derivatives_in_forward_mode_are_named(device: str) -> None:
    from torch.autograd import forward_ad

    net, x = nn.Linear(4, 2).to(device), torch.randn(3, 4, device=device)
    with op_tools.OpAutoCompare() as comparison, forward_ad.dual_level():
        forward_ad.unpack_dual(net(forward_ad.make_dual(x, torch.ones_like(x))))
    assert not comparison.blames
    assert any("derivatives in forward mode are not compared" in line for line in comparison.summary())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_windows_at_random_places(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, 11, 13, device=device).to(dtype).requires_grad_()
    _, wrong = compared(lambda: F.fractional_max_pool2d(x, 2, output_ratio=(0.5, 0.5)).sum().backward())
    assert not wrong


@pytest.mark.parametrize("call", [torch.mul, torch.matmul, torch.kron])
def test_two_views_of_one_place(call: Any, device: str) -> None:
    """Autograd tells them apart, a copy of the call does not."""

    def step() -> None:
        x = torch.randn(3, 3, device=device, requires_grad=True) * 1.0
        call(x[:2, :2], x[:2, :2]).square().sum().backward()

    names, wrong = compared(step)
    assert not wrong
    assert any(f"{call.__name__} grad" in name for name in names)
