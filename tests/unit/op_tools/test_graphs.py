"""Graphs of compiled code: what is kept of them, how they run on the CPU, and what counts as wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from op_tools.call.graphs import Graph, graph_of, line_of_stack
from op_tools.judge.draws import DrawsRandomNumbers
from op_tools.judge.graphs import Runner, Runs
from op_tools.judge.regions import GRADIENT, INPUT, OUTPUT, judge_graph
from op_tools.judge.verdict import Rules


class _Noted(fx.Interpreter):
    """Notes what nodes return, as Dynamo does."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        n.meta["example_value"] = result
        return result


def traced(function: Callable[..., Any], *args: Tensor) -> Graph:
    """The graph of a function, as Dynamo would hand it on."""
    module = fx.symbolic_trace(function)
    _Noted(module).run(*[a.clone() for a in args])
    return graph_of(module)


def verdict(function: Callable[..., Any], args: tuple[Tensor, ...], ours: Tensor) -> str:
    """What is said of a device that returned `ours`."""
    return judge_graph(Runs(traced(function, *args), args, "xpu"), {OUTPUT: [ours]}, Rules()).verdict


def test_a_near_tie_is_no_error_and_another_place_is() -> None:
    def nearest(x: Tensor) -> Tensor:
        return (x * 3.3).exp().log().argmin(-1)

    x = torch.tensor([[0.5, 0.5 + 2**-24, 0.9], [0.1, 0.2, 0.3]])
    assert verdict(nearest, (x,), torch.tensor([0, 0])) == "right"
    assert verdict(nearest, (x,), torch.tensor([1, 0])) == "right"
    assert verdict(nearest, (x,), torch.tensor([0, 1])) == "wrong"


def test_equal_values_may_be_found_at_any_of_their_places() -> None:
    def largest(x: Tensor) -> Tensor:
        return torch.relu(x).argmax(-1)

    x = torch.tensor([[-1.0, -2.0, -3.0], [1.0, 5.0, 2.0]])
    assert verdict(largest, (x,), torch.tensor([2, 1])) == "right"
    assert verdict(largest, (x,), torch.tensor([0, 2])) == "wrong"


def test_a_long_sum_in_any_order_is_right() -> None:
    def mean(x: Tensor) -> Tensor:
        return (x * 2).sum(-1) / x.shape[-1]

    x = torch.rand(2, 20_000, generator=torch.Generator().manual_seed(1)) + 1
    in_a_loop = (x * 2).cumsum(-1)[:, -1] / 20_000
    assert verdict(mean, (x,), in_a_loop) == "right"
    assert verdict(mean, (x,), in_a_loop * 1.01) == "wrong"


def test_a_jump_beside_zero_is_no_error_elsewhere_it_is() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(x * y - 0.3 > 0, x + 1, x)

    x, y = torch.tensor([0.1, 2.0, 0.01]), torch.tensor([3.0, 3.0, 3.0])
    assert verdict(step, (x, y), torch.tensor([0.1, 3.0, 0.01])) == "right"
    assert verdict(step, (x, y), torch.tensor([1.1, 3.0, 0.01])) == "right"
    assert verdict(step, (x, y), torch.tensor([1.1, 2.0, 0.01])) == "wrong"
    assert verdict(step, (x, y), torch.tensor([1.1, 3.0, 1.01])) == "wrong"


def test_halves_that_are_kept_wide_inside_are_right() -> None:
    def scaled(x: Tensor) -> Tensor:
        return (x * x / 1000).tanh()

    x = torch.linspace(-600, 600, 64).half()  # squares overflow
    fused = (x.float() * x.float() / 1000).tanh().half()
    assert verdict(scaled, (x,), fused) == "right"
    assert verdict(scaled, (torch.linspace(-9, 9, 64).half(),), torch.zeros(64).half()) == "wrong"


@pytest.mark.parametrize(("change", "expected"), [(0.0, "right"), (1e-7, "right"), (1e-2, "wrong")])
def test_gradients(change: float, expected: str) -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).sin().sum()

    x, w = torch.rand(4, 5), torch.rand(5, 3).requires_grad_()
    graph = traced(loss, x, w)
    (grad,) = torch.autograd.grad(loss(x, w), w)
    runs = Runs(graph, (x, w), "xpu", [torch.ones(())])
    assert judge_graph(runs, {GRADIENT: [None, grad * (1 + change)]}, Rules()).verdict == expected


def test_later_runs_of_a_graph_need_no_float64() -> None:
    def chain(x: Tensor) -> Tensor:
        return (x.sin() @ x.cos()).tanh().softmax(-1)

    drawn = torch.Generator().manual_seed(0)
    graph = traced(chain, torch.rand(16, 16, generator=drawn))
    for number, change in enumerate((1e-7, 1e-7, 1e-3)):
        x = torch.rand(16, 16, generator=drawn)
        runs = Runs(graph, (x,), "xpu")
        judged = judge_graph(runs, {OUTPUT: [chain(x) * (1 + change)]}, Rules())
        assert judged.verdict == ("wrong" if change > 1e-4 else "right")
        assert ("exact" in vars(runs)) == (number != 1)


def test_what_a_graph_writes_to_is_learned_and_compared() -> None:
    def update(x: Tensor, total: Tensor) -> Tensor:
        total.add_(x)
        return total * 2

    x, total = torch.ones(3), torch.full((3,), 2.0)
    graph = traced(update, x, total)
    found = {OUTPUT: [torch.full((3,), 6.0)], INPUT: [x, torch.full((3,), 3.0)]}
    assert judge_graph(Runs(graph, (x, total), "xpu"), found, Rules()).verdict == "right"
    assert graph.writes == {1}
    assert total.tolist() == [2.0] * 3, "the snapshot was written to"
    judged = judge_graph(Runs(graph, (x, total), "xpu"), {**found, INPUT: [x, total]}, Rules())
    assert [row.name for row in judged.rows if row.verdict == "wrong"] == ["torch.compile input[1]"]


def test_wrong_shapes_and_dtypes_are_wrong() -> None:
    x = torch.rand(3)
    for ours in (x.sin()[None], x.sin().double()):
        assert verdict(lambda x: x.sin(), (x,), ours) == "wrong"


def test_random_numbers_are_not_compared() -> None:
    x = torch.ones(8)
    graph = traced(lambda x: torch.nn.functional.dropout(x, 0.5), x)
    before = torch.random.get_rng_state()
    with pytest.raises(DrawsRandomNumbers):
        judge_graph(Runs(graph, (x,), "xpu"), {OUTPUT: [x]}, Rules())
    assert torch.equal(before, torch.random.get_rng_state())


def test_what_cannot_be_run_again_is_said() -> None:
    def graph_with(target: Any, *args: Any) -> Graph:
        graph = fx.Graph()
        x = graph.placeholder("x")
        graph.output((graph.call_function(target, args or (x,)),))
        return graph_of(fx.GraphModule(torch.nn.Module(), graph))

    assert graph_with(torch.sin).why_not == ""
    assert "higher-order operator cond" in graph_with(torch.ops.higher_order.cond).why_not
    assert "changes settings" in graph_with(torch._C._set_sdp_use_flash, True).why_not
    assert graph_with(torch._C._set_grad_enabled, False).why_not == ""


def test_a_graph_is_kept_as_it_was_before_the_backend_changes_it() -> None:
    module = fx.symbolic_trace(lambda x: (torch.sin(x) + torch.ones(2),))
    graph = graph_of(module)
    for node in list(module.graph.nodes):
        if node.target is torch.sin:
            node.target = torch.cos
    module.recompile()
    x = torch.rand(2)
    assert torch.equal(Runner(graph)(x, *graph.constants)[0], x.sin() + 1)
    assert torch.equal(module(x)[0], x.cos() + 1)


def test_the_users_line_in_a_stack() -> None:
    own = '  File "/home/me/model.py", line 7, in forward\n    return f(x)\n'
    stack = f'{own}  File "{torch.__file__}", line 3, in g\n    x\n'
    assert line_of_stack(stack) == "/home/me/model.py:7 forward: return f(x)"
    assert line_of_stack("") == ""
