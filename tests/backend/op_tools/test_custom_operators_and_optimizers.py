"""OpAutoCompare on kernels that show no steps: operators of others' own, and fused optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ditorch
import op_tools

library = torch.library.Library("op_tools_backend_test", "FRAGMENT")
ops = torch.ops.op_tools_backend_test


def on_the_cpu(decay: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Step after step, in numpy: nothing of it is an operator of PyTorch's."""
    out = torch.empty_like(values)
    factors, steps, sums = np.exp(decay.numpy()), values.numpy(), out.numpy()
    sums[:, 0] = steps[:, 0]
    for t in range(1, values.shape[1]):
        sums[:, t] = factors * sums[:, t - 1] + steps[:, t]
    return out


def in_parallel(decay: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A device's kernel: all pairs of steps at once."""
    steps = torch.arange(values.shape[1], device=values.device)
    distance = steps[:, None] - steps
    factors = torch.exp(distance.clamp(min=0)[:, :, None] * decay).masked_fill((distance < 0)[:, :, None], 0.0)
    return (factors[None] * values[:, None]).sum(2)


def slightly_off(decay: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return in_parallel(decay * 1.0001, values)


for name, kernel in (("average", in_parallel), ("wrong_average", slightly_off)):
    library.define(f"{name}(Tensor decay, Tensor values) -> Tensor")
    library.impl(name, on_the_cpu, "CPU")
    for key in ("CUDA", "PrivateUse1"):
        library.impl(name, kernel, key)


@pytest.fixture(autouse=True)
def known_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "off")
    if getattr(ditorch.backend, "name", "") not in ("cuda", "soft"):
        pytest.skip("no kernel is registered for this device, and its optimizers may not be fused")


def differences(work: Callable[[], Any], part: str) -> list[str]:
    with op_tools.OpAutoCompare() as tool:
        work()
    assert any(part in row["op"] for row in tool.records()), "it was compared"
    return [f.message for f in tool.findings() if f.kind == "difference" and part in f.op]


@pytest.mark.parametrize(("name", "wrong"), [("average", False), ("wrong_average", True)])
def test_another_kernel_of_an_operator_of_ones_own(device: str, name: str, wrong: bool) -> None:
    values = torch.randn(4, 60, 16, generator=torch.Generator().manual_seed(0)).to(device)
    decay = -torch.exp(torch.linspace(-5, 2, 16)).to(device)
    assert bool(differences(lambda: getattr(ops, name)(decay, values), name)) == wrong


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_optimizers_in_a_training(device: str, kind: Any, dtype: torch.dtype) -> None:
    if ditorch.backend.name == "soft" and kind is torch.optim.SGD and dtype == torch.bfloat16:
        pytest.skip("the CPU's kernel, which soft uses, gives parameters and momenta that are really wrong")
    if ditorch.backend.name == "cuda" and kind is torch.optim.Adagrad:
        pytest.skip("CUDA has no fused Adagrad")
    generator = torch.Generator().manual_seed(0)
    shapes = [(40, 30), (30,), (7, 9)]
    parameters = [torch.nn.Parameter((0.01 * torch.randn(s, generator=generator)).to(device, dtype)) for s in shapes]
    more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(parameters, lr=1e-2, weight_decay=0.1, fused=True, **more)

    def train() -> None:
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(device, dtype)
            optimizer.step()

    assert differences(train, "_fused_") == []
