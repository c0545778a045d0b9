"""What the interceptor sees, where it says a call was made, and what it leaves alone."""

from __future__ import annotations

import dataclasses
import gc
import threading
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import typing_extensions
from torch import add as plain_add
from torch.cuda import comm
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import op_tools
from op_tools.watch.intercept import INTERCEPTOR


def ops(tool: op_tools.OpObserve) -> list[str]:
    return [row["op"] for row in tool.records()]


def test_names_are_those_that_users_write(device: str) -> None:
    x = torch.randn(3, 3, device=device)
    with op_tools.OpObserve() as seen:
        x + 1
        x.mul(2)
        torch.add(x, x)
        F.linear(x, x)
        F.cross_entropy(x, torch.zeros(3, dtype=torch.long, device=device))
        x @ x
        x[0]
        torch.split(x, 1)
        torch.linalg.norm(x)
        plain_add(x, x)
        x**2
        torch._foreach_add([x], [x])
    assert ops(seen) == [
        "torch.Tensor.add",
        "torch.Tensor.mul",
        "torch.add",
        "torch.nn.functional.linear",
        "torch.zeros",
        "torch.nn.functional.cross_entropy",
        "torch.Tensor.matmul",
        "torch.Tensor.__getitem__",
        "torch.split",
        "torch.linalg.norm",
        "torch.add",
        "torch.Tensor.__pow__",
        "torch._foreach_add",
    ]


def test_cpu_is_left_alone_unless_asked_for(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3)
    with op_tools.OpObserve() as seen:
        x + 1
        torch.zeros(2)
    assert ops(seen) == []
    monkeypatch.setenv("OP_TOOLS_INCLUDE_CPU", "1")
    with seen:
        x + 1
    assert ops(seen) == ["torch.Tensor.add"]


def test_getters_and_bookkeeping_are_skipped(device: str) -> None:
    x = torch.randn(3, device=device, requires_grad=True)
    with op_tools.OpObserve() as seen:
        _ = (x.shape, x.grad, x.dtype, x.device, x.is_leaf)
        _ = (x.size(), x.numel(), x.stride(), x.is_contiguous(), x.dim(), x.is_floating_point())
    assert ops(seen) == []


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    parts: list[torch.Tensor]


def test_tensors_in_keywords_and_containers(device: str) -> None:
    x = torch.randn(3, device=device)

    def third_party(value: Any, **kwargs: Any) -> torch.Tensor:
        return next(iter(kwargs.values()), x)

    globals()["third_party"] = third_party
    third_party.__module__, third_party.__qualname__ = __name__, "third_party"
    with op_tools.apply_feature(f"{__name__}.third_party", "dump_op_args") as handle:
        globals()["third_party"](Pair(x, x))
        globals()["third_party"](Batch(x, [x, x]))
        globals()["third_party"]({"a": [x, {"b": x}]})
        globals()["third_party"](1, key=x)
        torch.add(input=x, other=x)
        rows = handle.tool.records()
    labels = [[label for label, part in row["inputs"] if isinstance(part, dict)] for row in rows]
    assert labels == [
        ["inputs [0][left]", "inputs [0][right]"],
        ["inputs [0][x]", "inputs [0][parts][0]", "inputs [0][parts][1]"],
        ["inputs [0][a][0]", "inputs [0][a][1][b]"],
        ["inputs key"],
    ]
    assert globals()["third_party"] is third_party, "undone"


def test_tensors_given_only_by_keyword_are_seen(device: str) -> None:
    x = torch.randn(3, device=device)
    with op_tools.OpObserve() as seen:
        torch.add(input=x, other=x)
        torch.cat(tensors=[x, x])
    assert ops(seen) == ["torch.add", "torch.cat"]


def test_location_is_the_users_line(device: str) -> None:
    layer = nn.Linear(3, 3).to(device)
    x = torch.randn(3, 3, device=device)
    with op_tools.OpObserve() as seen:
        layer(x)  # marked line
    location = seen.records()[0]["location"]
    assert location.startswith(f"{__file__}:")
    assert location.endswith("test_location_is_the_users_line: layer(x)  # marked line")


def test_wrappers_around_functions_are_not_the_users_lines(device: str) -> None:
    @typing_extensions.deprecated("old", category=None)
    def wrapped(x: torch.Tensor) -> torch.Tensor:
        return _HELPER(x)

    x = torch.randn(2, device=device)
    with op_tools.OpObserve() as seen:
        wrapped(x)
        comm.broadcast(x, [0])  # redirected by ditorch, where that is needed
    locations = [row["location"].partition(" ")[0] for row in seen.records()]
    assert locations
    assert {location.rpartition(":")[0] for location in locations} == {__file__}


# Code that no line of this file stands for, as that of a function of PyTorch: the wrapper around it comes next.
_HELPER = eval(compile("lambda x: x.exp()", "<frozen helper>", "eval"))


def test_checkpoint_recomputation_is_seen(device: str) -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)).to(device)
    x = torch.randn(3, 3, device=device, requires_grad=True)
    # without re-entry, recomputation breaks off inside the last layer, once it has what it needs
    for reentrant, expected in ((True, 4), (False, 3)):
        with op_tools.OpObserve(ops=["torch.nn.functional.linear"]) as seen:
            checkpoint(layers, x, use_reentrant=reentrant).sum().backward()
        assert len(ops(seen)) == expected, f"use_reentrant={reentrant}"


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.mul(x, 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.mul(grad, 2)


def test_custom_function_is_seen_forward_and_backward(device: str) -> None:
    x = torch.randn(3, device=device, requires_grad=True)
    with op_tools.OpObserve(ops=["torch.mul"]) as seen:
        Double.apply(x).sum().backward()
    assert ops(seen) == ["torch.mul", "torch.mul"]


def test_threads_started_by_a_watched_thread_are_watched(device: str) -> None:
    x = torch.randn(3, device=device)
    done: list[torch.Tensor] = []
    with op_tools.OpObserve() as seen:
        workers = [threading.Thread(target=lambda: done.append(torch.add(x, 1))) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert ops(seen) == ["torch.add"] * 4
    assert len(done) == 4
    start = threading.Thread.start
    assert start.__module__ == "threading", "the patch is undone"


def test_data_parallel_threads(device: str) -> None:
    from torch.nn.parallel.parallel_apply import parallel_apply

    layers = [nn.Linear(3, 3).to(device) for _ in range(2)]
    x = torch.randn(2, 3, device=device)
    with op_tools.OpObserve(ops=["torch.nn.functional.linear"]) as seen:
        parallel_apply(layers, [(x,), (x,)])
    assert len(ops(seen)) == 2


def test_several_tools_see_one_call(device: str) -> None:
    x = torch.randn(3, device=device, requires_grad=True)
    with op_tools.OpObserve() as a, op_tools.OpTimeMeasure() as b, op_tools.OpOverflowCheck() as c:
        (x * 2).sum().backward()
    assert [r["call_id"] for r in a.records()] == [r["call_id"] for r in b.records() if r["phase"] == "forward"]
    assert {r["op"] for r in c.records()} == {"torch.Tensor.mul", "torch.Tensor.sum"}


def test_restart_and_reentry(device: str) -> None:
    x = torch.randn(3, device=device)
    tool = op_tools.OpObserve()
    with tool, tool:
        x + 1
    assert not tool.active
    assert len(tool.records()) == 1
    tool.start()
    x + 1
    x + 2
    tool.end()
    tool.stop()  # stopping once more does no harm
    assert len(tool.records()) == 2
    assert INTERCEPTOR.tools == []


def test_start_inside_and_stop_outside_of_other_modes(device: str) -> None:
    class Other(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Other.seen += 1
            return func(*args, **(kwargs or {}))

    x = torch.randn(3, device=device)
    tool = op_tools.OpObserve()
    with Other(), torch.device("cpu"):
        tool.start()
        x + 1
    y = torch.ones(2)
    x + 1
    tool.stop()
    assert torch._C._len_torch_function_stack() == 0
    assert len(tool.records()) == 2
    assert Other.seen >= 1
    assert y.device.type == "cpu"
    with torch.device("meta"):
        tool.start()
        tool.stop()
        assert torch.ones(1).device.type == "meta"


def test_steps_ranks_and_calls(device: str) -> None:
    weight = torch.randn(3, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    first = INTERCEPTOR.step
    tool = op_tools.OpObserve(ops=["torch.Tensor.mul"], steps=range(first + 1, first + 3))
    limited = op_tools.OpObserve(ops=["torch.Tensor.mul"], max_calls=1)
    other_rank = op_tools.OpObserve(ranks=[7])
    with tool, limited, other_rank:
        for _ in range(5):
            optimizer.zero_grad()
            (weight * 2).sum().backward()
            optimizer.step()
    assert [r["step"] - first for r in tool.records()] == [1, 2]
    assert len(limited.records()) == 1
    assert other_rank.records() == []


def test_steps_are_counted_on_when_an_optimizer_follows_another(device: str) -> None:
    weight = torch.randn(3, device=device, requires_grad=True)
    first = INTERCEPTOR.step
    with op_tools.OpObserve(ops=["torch.Tensor.mul"]) as tool:
        for _ in range(2):
            optimizers = [torch.optim.SGD([weight], lr=0.1), torch.optim.Adam([weight], lr=0.1)]
            for _ in range(2):
                (weight * 2).sum().backward()
                for optimizer in optimizers:
                    optimizer.step()
            del optimizers, optimizer
            gc.collect()
    assert [r["step"] - first for r in tool.records()] == [0, 1, 2, 3]


def test_tensor_used_as_an_index(device: str) -> None:
    index = torch.tensor(1, device=device)
    with op_tools.OpObserve() as seen, op_tools.OpAutoCompare() as compared:
        assert [10, 20, 30][index] == 20
        assert len(torch.randn(3, device=device)) == 3
    assert "torch.Tensor.__index__" in ops(seen)
    assert [f for f in compared.findings() if f.kind == "tool-failure"] == []


def test_operator_errors_reach_the_user_unchanged(device: str) -> None:
    x = torch.randn(3, device=device)
    for name in ("OpObserve", "OpCapture", "OpFallback", "OpTimeMeasure", "OpOverflowCheck", "OpAutoCompare"):
        with getattr(op_tools, name)(), pytest.raises(RuntimeError, match="must match the size"):
            torch.add(x, torch.randn(4, device=device))


def test_inference_mode(device: str) -> None:
    with torch.inference_mode():
        x = torch.randn(3, 3, device=device)
        for name in ("OpObserve", "OpCapture", "OpFallback", "OpTimeMeasure", "OpOverflowCheck", "OpAutoCompare"):
            with getattr(op_tools, name)() as tool:
                F.linear(x, x).mul_(2)
            assert [f for f in tool.findings() if f.kind == "tool-failure"] == [], name


TOOLS = ["OpObserve", "OpTimeMeasure", "OpDtypeCast", "OpOverflowCheck", "OpFallback", "OpCapture", "OpAutoCompare"]


@pytest.mark.parametrize("name", TOOLS)
def test_what_a_graph_captures_is_left_alone(device: str, name: str) -> None:
    if not hasattr(torch.cuda, "CUDAGraph") or not torch.cuda.is_available():
        pytest.skip("this device has no graphs")
    x, w = torch.ones(4, device=device), torch.full((4,), 3.0, device=device)

    def work() -> torch.Tensor:
        return torch.mul(x, w).exp().add(1)

    work()  # what is set up on first use must not be captured
    graph = torch.cuda.CUDAGraph()
    with getattr(op_tools, name)(disable=["torch.Tensor.fill_"]) as tool:
        with torch.cuda.graph(graph):
            y = work()
        x.fill_(0.5)
        graph.replay()
        torch.cuda.synchronize()
        captured = y.cpu()
        expected = work().cpu()
    assert torch.equal(captured, expected)
    assert tool.findings() == []
    if name == "OpObserve":
        assert len([r for r in tool.records() if r["op"] == "torch.mul"]) == 1, "the last call, not the captured one"


def test_no_tool_leaves_nothing_patched(device: str) -> None:
    engine = torch.autograd.Variable._execution_engine
    with op_tools.OpObserve():
        assert torch.autograd.Variable._execution_engine is not engine
    assert torch.autograd.Variable._execution_engine is engine
