"""Shorter ways than PyTorch's past the mode, and to it, miss no operator."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import op_tools
from op_tools.compat import count_function_modes
from op_tools.watch import patches

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True},
    "RMSprop": {"centered": True, "foreach": False},
    "Adagrad": {},
    "NAdam": {"foreach": True},
    "Rprop": {},
    "Adafactor": {},
}


def train(device: str, name: str, steps: int = 3) -> Any:
    """The calls that OpObserve sees; one parameter gets its first gradient in the second step."""
    torch.manual_seed(0)
    first, second = torch.nn.Linear(3, 4).to(device), torch.nn.Linear(4, 3).to(device)
    options = {"lr": 0.01, **OPTIMIZERS[name]}
    optimizer = getattr(torch.optim, name)([*first.parameters(), *second.parameters()], **options)
    x = torch.randn(2, 3, device=device)
    with op_tools.OpObserve() as tool:
        for step in range(steps):
            y = F.layer_norm(F.gelu(first(x)), (4,))
            loss = (second(y) if step else y).square().sum()
            optimizer.zero_grad(set_to_none=step != 1)
            loss.backward()
            optimizer.step()
            first.zero_grad()
    return Counter(tool.calls), [p.detach().cpu() for p in (*first.parameters(), *second.parameters())]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_calls_are_seen(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short = train(device, name)
    monkeypatch.setattr(patches, "quiet_methods", lambda: iter(()))
    monkeypatch.setattr(patches, "straight_to_the_mode", lambda interceptor, original: original)
    plain = train(device, name)
    assert short[0] == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(short[1], plain[1]))


def test_questions_go_past_the_mode(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[tuple[str, int]] = []
    for kind, name in ((torch.optim.Adam, "_init_group"), (torch.optim.Optimizer, "zero_grad")):
        own = vars(kind)[name]

        def counted(*args: Any, own: Any = own, name: str = name, **kwargs: Any) -> Any:
            modes.append((name, count_function_modes()))
            return own(*args, **kwargs)

        monkeypatch.setattr(kind, name, counted)
    train(device, "Adam")
    asked = [count for name, count in modes if name == "_init_group"]
    assert asked == [1, 1, 0], "state is made in the first two steps"
    assert [count for name, count in modes if name == "zero_grad"] == [0, 1, 0], "the second sets gradients to zero"


def test_odd_arguments_raise_what_pytorch_raises(device: str) -> None:
    optimizer = torch.optim.SGD([torch.ones(2, device=device, requires_grad=True)])
    with op_tools.OpObserve():
        with pytest.raises(TypeError, match="unexpected keyword argument 'to_nothing'"):
            optimizer.zero_grad(to_nothing=True)  # type: ignore[call-arg]
        assert count_function_modes() == 1


def test_another_mode_sees_functions_as_before(device: str) -> None:
    class Counting(TorchFunctionMode):
        names: list[str] = []  # noqa: RUF012

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func.__name__, types))
            return super().__torch_function__(func, types, args, kwargs or {})

    seen: list[Any] = []
    x = torch.ones(2, 4, device=device)
    with op_tools.OpObserve() as tool:
        with Counting():
            F.layer_norm(x, (4,))
        F.layer_norm(x.as_subclass(Own), (4,))
        with pytest.raises(RuntimeError, match="normalized_shape"):
            F.layer_norm(x, (5,))
        assert count_function_modes() == 1
        F.layer_norm(x, (4,))
    assert "layer_norm" in Counting.names
    assert ("layer_norm", (Own,)) in seen
    assert tool.calls["torch.nn.functional.layer_norm"] >= 3


def test_state_of_ones_own_is_no_state_that_is_complete(device: str) -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this PyTorch has no Muon")
    weight = torch.ones(3, 4, device=device, requires_grad=True)
    optimizer = torch.optim.Muon([weight])
    optimizer.state[weight]["mine"] = 1
    with op_tools.OpObserve() as tool:
        weight.square().sum().backward()
        optimizer.step()
    assert tool.calls["torch.zeros_like"] == 1


def test_parameters_that_operators_make_are_seen(device: str) -> None:
    class Doubled(torch.nn.Linear):
        def parameters(self, recurse: bool = True) -> Any:
            return iter([p.detach().mul(2) for p in super().parameters(recurse)])

    model = Doubled(2, 2).to(device)
    with op_tools.OpObserve() as tool:
        model.zero_grad()
    assert tool.calls["torch.Tensor.mul"] == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["OpObserve", "OpTimeMeasure", "OpOverflowCheck", "OpTrace", "OpAutoCompare"])
def test_what_is_traced_calls_no_tool(device: str, name: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.GELU()).to(device)
    x = torch.randn(2, 4, device=device)
    expected = model(x)
    with getattr(op_tools, name)() as tool:
        traced = torch.jit.trace(model, x)
        with_method = torch.jit.trace_module(model, {"forward": x})
        model(x)
    assert torch.equal(traced(x), expected)
    assert torch.equal(with_method(x), expected)
    assert [f for f in tool.findings() if f.kind == "tool-failure"] == []
