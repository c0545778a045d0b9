"""A run under a tool is the run without it: outputs, gradients, random streams and aliasing, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import op_tools
from op_tools.call.description import tensors_in
from op_tools.call.devices import get_rng_state

from .samples import Sample, gradients_of, operators, samples_of, seed

OBSERVERS = ["OpObserve", "OpTimeMeasure", "OpCapture", "OpOverflowCheck", "OpAutoCompare"]


def all_observers() -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for name in OBSERVERS:
        stack.enter_context(getattr(op_tools, name)())
    return stack


CONTEXTS: dict[str, Callable[[], Any]] = {
    **{name: getattr(op_tools, name) for name in OBSERVERS},
    "all together": all_observers,
}


def aliasing(result: Any, inputs: Any) -> list[tuple[int, int, int]]:
    """Which results are, or share memory with, which arguments and earlier results."""
    before = list(tensors_in(inputs))
    found = []
    for i, tensor in enumerate(tensors_in(result)):
        for j, other in enumerate([*before, *list(tensors_in(result))[:i]]):
            if tensor is other:
                found.append((i, j, 2))
            elif (
                tensor.layout == other.layout == torch.strided
                and tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
                and tensor.untyped_storage().nbytes()
            ):
                found.append((i, j, 1))
    return found


def observe(sample: Sample, device: str) -> dict[str, Any]:
    """Everything about one run that must not change."""
    args, kwargs, leaves = sample.on(device)
    seed()
    result = sample.function(*args, **kwargs)
    shared = aliasing(result, (args, kwargs))
    grads = gradients_of(result, leaves)
    return {
        "result": [t.detach().cpu().clone() for t in tensors_in(result)],
        "strides": [t.stride() for t in tensors_in(result) if t.layout == torch.strided],
        "inputs": [t.detach().cpu().clone() for t in tensors_in((args, kwargs))],
        "versions": [t._version for t in tensors_in((args, kwargs))],
        "requires_grad": [t.requires_grad for t in tensors_in(result)],
        "gradients": [g.detach().cpu().clone() if g is not None else None for g in grads],
        "aliasing": shared,
        "cpu_random": torch.get_rng_state(),
        "device_random": get_rng_state(torch.empty(0, device=device).device),
        "type": type(result),
    }


def differences(bare: dict[str, Any], watched: dict[str, Any], only: set[str] | None = None) -> list[str]:
    found = []
    for key, value in bare.items():
        if only is not None and key not in only:
            continue
        if not same(value, watched[key]):
            found.append(key)
    return found


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.shape != right.shape or left.dtype != right.dtype or left.layout != right.layout:
            return False
        if left.layout != torch.strided:
            left, right = left.to_dense(), right.to_dense()
        if left.is_complex():
            left, right = torch.view_as_real(left.resolve_conj()), torch.view_as_real(right.resolve_conj())
        return torch.equal(left, right) or torch.equal(left.nan_to_num(7.5), right.nan_to_num(7.5))
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right))
    return bool(left == right)


def sweep(
    ops: list[Any], device: str, limit: int, contexts: dict[str, Callable[[], Any]], only: set[str] | None = None
) -> tuple[dict[str, Any], int]:
    wrong: dict[str, Any] = {}
    checked = 0
    for op in ops:
        for inplace in (False, True):
            for sample in samples_of(op, limit, gradients=True, inplace=inplace):
                try:
                    bare = observe(sample, device)
                    if differences(bare, observe(sample, device), only):
                        continue  # not even the same twice without tools
                except Exception:
                    continue  # the device or the sample cannot do it without tools either
                checked += 1
                for label, context in contexts.items():
                    with context():
                        watched = observe(sample, device)
                    found = differences(bare, watched, only)
                    if found:
                        wrong[f"{op.name} {op.variant_test_name} inplace={inplace} under {label}"] = found
    return wrong, checked


def test_sampled_operators_under_all_observers(device: str) -> None:
    wrong, checked = sweep(operators(False), device, 2, {"all together": all_observers})
    assert wrong == {}
    assert checked > 100


@pytest.mark.slow
@pytest.mark.timeout(6000)
@pytest.mark.parametrize("label", list(CONTEXTS))
def test_all_operators(device: str, label: str) -> None:
    wrong, checked = sweep(operators(True), device, 3, {label: CONTEXTS[label]})
    assert wrong == {}
    assert checked > 1000


# On a device whose kernels are the CPU's, falling back changes nothing at all.
def same_kernels(device: str) -> bool:
    return torch.empty(0, device=device).device.type == "soft" or not torch.cuda.get_device_name().startswith("NVIDIA")


# PyTorch computes the gradients of these by another formula while a dispatch mode is on, which OpFallback is
# (it asks whether tensors are "subclass like"): the last bit may differ.
OTHER_FORMULA = {"masked_fill", "masked.prod", "linalg.householder_product", "prod"}


def without_other_formulas(wrong: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in wrong.items() if not (k.split(" ")[0] in OTHER_FORMULA and v == ["gradients"])}


def test_sampled_operators_under_fallback(device: str) -> None:
    if not same_kernels(device):
        pytest.skip("the device's kernels round otherwise than the CPU's")
    wrong, checked = sweep(operators(False), device, 2, {"OpFallback": op_tools.OpFallback})
    assert without_other_formulas(wrong) == {}
    assert checked > 100


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_all_operators_under_fallback(device: str) -> None:
    if not same_kernels(device):
        pytest.skip("the device's kernels round otherwise than the CPU's")
    wrong, checked = sweep(operators(True), device, 3, {"OpFallback": op_tools.OpFallback})
    assert without_other_formulas(wrong) == {}
    assert checked > 1000


# -- training runs ------------------------------------------------------------------------------------


class TinyGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True) for _ in "ab")
        self.head = nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.token(x)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return F.cross_entropy(self.head(hidden).view(-1, 32), x.view(-1))


class TinyCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        self.classify = nn.Linear(8 * 16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.features, x, use_reentrant=True)
        return F.cross_entropy(self.classify(hidden.flatten(1)), torch.arange(x.shape[0], device=x.device))


class TinyLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 12, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(x)
        return F.mse_loss(self.head(hidden), x)


def train(kind: str, device: str, amp: bool) -> tuple[list[float], list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(0)
    if kind == "gpt":
        model: nn.Module = TinyGPT()
        data = torch.randint(0, 32, (4, 8))
    elif kind == "cnn":
        model, data = TinyCNN(), torch.randn(4, 3, 8, 8)
    else:
        model, data = TinyLSTM(), torch.randn(4, 5, 6)
    model, data = model.to(device), data.to(device)
    if kind == "cnn":
        data.requires_grad_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device, enabled=amp)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16, enabled=amp):
            loss = model(data)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    grads = [p.grad.detach().cpu() for p in model.parameters() if p.grad is not None]
    state = [torch.get_rng_state(), get_rng_state(torch.empty(0, device=device).device)]
    return losses, grads + [p.detach().cpu() for p in model.parameters()], state


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "amp"])
@pytest.mark.parametrize("kind", ["gpt", "cnn", "lstm"])
def test_training_runs(device: str, kind: str, amp: bool) -> None:
    bare = train(kind, device, amp)
    assert same(bare, train(kind, device, amp)), "the run is not deterministic by itself"
    contexts = dict(CONTEXTS)
    if same_kernels(device):
        contexts["OpFallback"] = op_tools.OpFallback
    for label, context in contexts.items():
        with context() as tool:
            watched = train(kind, device, amp)
        assert same(bare[0], watched[0]), f"loss under {label}"
        assert same(bare[1], watched[1]), f"gradients or weights under {label}"
        assert same(bare[2], watched[2]), f"random streams under {label}"
        if label in OBSERVERS:
            failures = [f for f in tool.findings() if f.kind == "tool-failure"]
            assert failures == [], label
            assert tool.calls, label
