"""Tensors with a `__torch_dispatch__` of their own: what they call inside is compared, and told where users called."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import ditorch
import op_tools
from op_tools.watch import sums

Step = Callable[[], Any]


@pytest.fixture(scope="module", autouse=True)
def _world() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def trained(net: nn.Module, device: str, forward: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> Step:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, **options)
    x = torch.randn(4, 8, device=device)

    def step() -> None:
        optimizer.zero_grad()
        forward(x).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

    return step


def tensor_parallel(device: str, recompute: bool = False) -> tuple[nn.Module, Step]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    net = Perceptron().to(device)
    parallelize_module(net, init_device_mesh("cuda", (1,)), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net, trained(net, device, lambda x: checkpoint(net, x, use_reentrant=False) if recompute else net(x))


def fully_sharded(device: str, **options: Any) -> tuple[nn.Module, Step]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = Perceptron().to(device)
    fully_shard(net.up)
    fully_shard(net)
    return net, trained(net, device, net, **options)


def numbers(net: nn.Module) -> list[torch.Tensor]:
    return [getattr(p, "_local_tensor", p).detach().cpu() for p in net.parameters()]


def watch(step: Step, **options: Any) -> op_tools.OpAutoCompare:
    with op_tools.OpAutoCompare(**options) as compared:
        step()
        step()
    return compared


def blamed(compared: op_tools.OpAutoCompare) -> set[tuple[str, str, str]]:
    return {(blame.op, blame.phase, blame.module) for blame in compared.blames}


@pytest.mark.parametrize("make", [tensor_parallel, fully_sharded])
def test_a_healthy_training_is_right_and_the_same_to_the_last_bit(device: str, make: Any) -> None:
    net, step = make(device)
    step()
    step()
    bare = numbers(net)
    net, step = make(device)
    compared = watch(step)
    assert all(map(torch.equal, numbers(net), bare))
    assert [f for f in compared.findings() if f.op != "torch.empty"] == []
    assert "every call that computes was compared" in compared.summary()[0]
    assert compared.calls["aten._foreach_norm.Scalar"] == 2
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_wrong_kernel_of_a_tensor_parallel_linear_is_blamed_forward_and_backward(device: str, faults: Any) -> None:
    _, step = tensor_parallel(device)
    with faults.plant("addmm: noise=1e-2"):
        compared = watch(step)
    assert blamed(compared) == {("aten.addmm.default", "forward", module) for module in ("up", "down")}
    _, step = tensor_parallel(device)
    with faults.plant("mm: noise=1e-2"):
        compared = watch(step)
    assert blamed(compared) == {("aten.mm.default", "backward", module) for module in ("up", "down")}
    location = compared.blames[0].location
    assert "return self.down(F.gelu(self.up(x))) [inside torch.nn.functional.linear]" in location
    assert {row["phase"] for row in compared.records() if row["verdict"] == "wrong"} == {"backward"}
    _, step = tensor_parallel(device)
    with faults.plant("addcdiv_: noise=1e-2"):
        assert re.search(r"parameter (up|down)\.(weight|bias): ", watch(step).blames[0].reason)


@pytest.mark.parametrize(
    ("options", "fault", "op"),
    [
        ({"fused": True}, "_fused_adamw_", "aten._fused_adamw_.default"),
        ({"foreach": True}, "addcdiv_", "aten._foreach_addcdiv_.ScalarList"),
        ({"foreach": False}, "addcdiv_", "aten.addcdiv_.default"),
    ],
    ids=["fused", "foreach", "one by one"],
)
def test_a_wrong_kernel_of_a_sharded_optimizer_is_blamed(
    device: str, faults: Any, options: Any, fault: str, op: str
) -> None:
    _, step = fully_sharded(device, **options)
    with faults.plant(f"{fault}: noise=1e-2"):
        compared = watch(step)
    assert blamed(compared) == {(op, "forward", "")}
    assert "optimizer.step()" in compared.blames[0].location


@pytest.mark.parametrize(("fault", "what"), [("add_", "accumulation into .grad of"), ("add", "sum of 2 gradients of")])
def test_sums_that_autograd_makes_of_wrapper_tensors(device: str, faults: Any, fault: str, what: str) -> None:
    assert sums.LIBRARY.wait() is not None, sums.LIBRARY.failure
    net: Any = tensor_parallel(device)[0]
    x = torch.randn(4, 8, device=device)

    def backward() -> None:
        (net(x).square().mean() + net.up.bias.sin().full_tensor().sum()).backward()

    with faults.plant(f"{fault}.Tensor: noise=1e-1, phase=backward"):
        compared = watch(backward)
    assert {blame.op for blame in compared.blames} == {f"aten.{fault}.Tensor"}
    assert {blame.phase for blame in compared.blames} == {"backward"}
    assert f"{what} up.bias [inside autograd." in "".join(blame.location for blame in compared.blames)
    assert "every call that computes was compared" in compared.summary()[0]


def test_calls_that_checkpointing_repeats_are_told_where_they_were_made(device: str, faults: Any) -> None:
    _, step = tensor_parallel(device, recompute=True)
    with faults.plant("native_layer_norm: noise=1e-2"):  # none of these
        compared = watch(step)
    assert not compared.blames
    assert compared.calls["aten.addmm.default"] == 6  # the last one is not repeated
    assert compared.calls["torch.nn.functional.gelu"] == 4
    assert "every call that computes was compared" in compared.summary()[0]
    with faults.plant("sum.dim_IntList: noise=1e-2"):
        assert blamed(watch(step)) == {("aten.sum.dim_IntList", "backward", module) for module in ("up", "down")}


class Wrapped(torch.Tensor):
    """Hands every operator on to the tensor that it holds."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, requires_grad: bool = False) -> Wrapped:
        layout = {"strides": inner.stride(), "dtype": inner.dtype, "device": inner.device}
        wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, requires_grad=requires_grad, **layout)
        wrapped.inner = inner
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = tree_map_only(Wrapped, lambda t: t.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*inside[0], **inside[1]))


class Quantised(Wrapped):
    """Weights in eight bits, which a linear layer turns back into floats."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return F.linear(args[0], args[1].inner.float() / 16)
        return super().__torch_function__(func, types, args, kwargs or {})


class Hidden(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():  # nobody sees what is called here
            return func(*args, **(kwargs or {}))


def test_other_wrappers_are_looked_into(device: str, faults: Any) -> None:
    x = torch.randn(4, 8, device=device, requires_grad=True)
    weight = Wrapped(torch.randn(8, 8, device=device), requires_grad=True)
    quantised = Quantised(torch.randint(-8, 8, (8, 8), dtype=torch.int8, device=device))

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            torch.softmax(Wrapped(x.detach()) @ weight, -1).square().sum().backward()
        F.linear(x, quantised).sum().backward()

    with op_tools.OpAutoCompare() as compared:
        step()
    assert not [f for f in compared.findings() if f.kind != "skipped"]
    assert "every call that computes was compared" in compared.summary()[0]
    with faults.plant("mm: noise=1e-1"), op_tools.OpAutoCompare() as compared:
        step()
    assert blamed(compared) == {("aten.mm.default", phase, "") for phase in ("forward", "backward")}
    around = {blame.location.rpartition("[")[2] for blame in compared.blames}
    assert around == {"inside torch.Tensor.matmul]", "inside torch.nn.functional.linear]"}


def test_jagged_tensors_are_looked_into(device: str, faults: Any) -> None:
    parts = [torch.randn(length, 8) for length in (2, 5, 3)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged, device=device, requires_grad=True)
    linear = nn.Linear(8, 8).to(device)
    with faults.plant("gelu_backward: noise=1e-2"), op_tools.OpAutoCompare() as compared:
        F.gelu(linear(jagged)).values().square().sum().backward()
    assert blamed(compared) == {("aten.gelu_backward.default", "backward", "")}
    assert compared.calls["aten.clone.default"] == 1, "that of the gradient, into .grad"
    assert "every call that computes was compared" in compared.summary()[0]


def test_what_is_not_seen_is_named(device: str) -> None:
    x = torch.randn(4, device=device).as_subclass(Hidden)
    with op_tools.OpAutoCompare() as compared:
        x.exp()
    assert [f.message for f in compared.findings()] == ["not comparable: what Hidden calls inside is not seen"]
    assert compared.summary()[0].startswith("NOTHING THAT COMPUTES WAS COMPARED")


def test_kinds_of_calls_inside_are_chosen_on_their_own(device: str) -> None:
    weight = Wrapped(torch.randn(8, 8, device=device))
    with op_tools.OpAutoCompare(mode="once", disable=["aten.cos.default"]) as compared:
        for _ in range(3):
            weight.t().sin()
            weight.cos()
            torch.exp(weight)
    assert compared.calls == {"aten.sin.default": 1, "aten.exp.default": 1}
    assert any("4 calls left out (each kind of call once)" in line for line in compared.summary())
    with op_tools.OpAutoCompare(ops=["torch.exp"], max_calls=2) as compared:
        for _ in range(3):
            weight.sin()
            torch.exp(weight)
    assert compared.calls == {"aten.exp.default": 2}


def test_modes_of_the_user_see_what_they_saw_without_a_tool(device: str) -> None:
    class Listed(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[tuple[str, Any]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls.append((str(func), tuple(types)))
            return func(*args, **(kwargs or {}))

    def listed() -> list[tuple[str, Any]]:
        weight = Wrapped(torch.ones(8, 8, device=device), requires_grad=True)
        with Listed() as mode:
            (weight @ weight).sum().backward()
        return mode.calls

    bare = listed()
    with op_tools.OpAutoCompare() as compared:
        assert listed() == bare
    assert compared.calls["aten.mm.default"] == 3
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_node_that_raises_leaves_no_mode_behind(device: str) -> None:
    class Refuses(Wrapped):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mm.default and cls.refuses:
                raise ArithmeticError("no")
            return super().__torch_dispatch__(func, types, args, kwargs)

        refuses = False

    weight = Refuses(torch.ones(8, 8, device=device), requires_grad=True)
    with op_tools.OpAutoCompare() as compared:
        loss = (weight @ weight).sum()
        Refuses.refuses = True
        with pytest.raises(ArithmeticError):
            loss.backward()
        assert torch._C._len_torch_dispatch_stack() == 0
        torch.ones(2, device=device).exp()
    assert compared.calls["torch.exp"] + compared.calls["torch.Tensor.exp"] == 1
    assert not compared.blames


@pytest.mark.parametrize("tool", ["OpCapture", "OpOverflowCheck", "OpFallback", "OpTimeMeasure", "OpObserve"])
def test_other_tools_leave_such_a_training_as_it_is(device: str, tool: str) -> None:
    net, step = tensor_parallel(device)
    step()
    bare = numbers(net)
    net, step = tensor_parallel(device)
    with getattr(op_tools, tool)() as used:
        step()
    same = torch.allclose if tool == "OpFallback" and ditorch.backend.name != "soft" else torch.equal  # other kernels
    assert all(map(same, numbers(net), bare))
    assert not used.findings()
    assert ("aten.addmm.default" in used.calls) == (tool in ("OpCapture", "OpOverflowCheck"))


def test_the_first_nan_inside_a_wrapper_is_found(device: str) -> None:
    weight = Wrapped(torch.zeros(8, device=device), requires_grad=True)
    with op_tools.OpOverflowCheck() as check:
        weight.sqrt().sum().backward()
    found = [f for f in check.findings() if f.kind == "overflow"]
    assert [f.op for f in found] == ["aten.div.Tensor"]
    assert "(backward)" in found[0].message
    assert "weight.sqrt().sum().backward() [inside torch.Tensor.sqrt]" in found[0].location
