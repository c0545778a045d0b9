"""Sampled golden runs: a call that is cut down gives the elements of the whole call, forward and backward."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from op_tools.call.description import map_tensors, tensors_in
from op_tools.call.functions import name_of
from op_tools.compare.judges.views import without_memory
from op_tools.compare.sample import Kind
from op_tools.judge.sampling import chains, places, suspects
from op_tools.judge.sampling.axes import axes_of
from op_tools.judge.sampling.reduction import cut_tensor
from op_tools.judge.sampling.totals import total_of

Make = Callable[..., torch.Tensor]


def _index(shape: tuple[int, ...], high: int) -> torch.Tensor:
    return torch.randint(high, shape)


CALLS: dict[str, Callable[[Make, int], tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {
    "linear": lambda x, n: (F.linear, (x(3, 60 + n, 20), x(70, 20), x(70)), {}),
    "linear, transposed": lambda x, n: (F.linear, (x(20, 90).t(), x(20, 70).t()), {}),
    "matmul": lambda x, n: (torch.matmul, (x(2, 3, 60, 20), x(3, 20, 70 + n)), {}),
    "bmm": lambda x, n: (torch.bmm, (x(5, 80, 6), x(5, 6, 60)), {}),
    "addmm": lambda x, n: (torch.addmm, (x(70), x(60, 20), x(20, 70)), {"alpha": 0.5, "beta": 2.0}),
    "einsum": lambda x, n: (torch.einsum, ("bnd,bmd->bmn", x(3, 60, 8), x(3, 70, 8)), {}),
    "conv2d": lambda x, n: (F.conv2d, (x(60, 5, 6, 7), x(70, 5, 3, 3), x(70)), {"padding": 1}),
    "conv2d, grouped": lambda x, n: (F.conv2d, (x(60, 4, 6, 7), x(8, 2, 3, 3)), {"groups": 2}),
    "attention": lambda x, n: (F.scaled_dot_product_attention, (x(3, 2, 90, 8), x(3, 2, 50, 8), x(3, 2, 50, 4)), {}),
    "causal attention": lambda x, n: (
        F.scaled_dot_product_attention,
        (x(2, 2, 90, 8), x(2, 2, 90, 8), x(2, 2, 90, 8)),
        {"is_causal": True},
    ),
    "softmax": lambda x, n: (F.softmax, (x(80, 70),), {"dim": 0}),
    "log_softmax": lambda x, n: (torch.log_softmax, (x(80, 70), -1), {}),
    "layer_norm": lambda x, n: (F.layer_norm, (x(3, 80, 20), (20,), x(20), x(20)), {}),
    "rms_norm": lambda x, n: (F.rms_norm, (x(90, 20), (20,), x(20), 1e-5), {}),
    "batch_norm": lambda x, n: (F.batch_norm, (x(6, 70, 5, 5), None, None, x(70), x(70), True), {}),
    "group_norm": lambda x, n: (F.group_norm, (x(70, 8, 5), 2, x(8), x(8)), {}),
    "embedding": lambda x, n: (F.embedding, (_index((7, 60), 30), x(30, 90)), {}),
    "index_select": lambda x, n: (torch.index_select, (x(9, 30, 60), 1, _index((90,), 30)), {}),
    "getitem": lambda x, n: (torch.Tensor.__getitem__, (x(30, 90), _index((7, 60), 30)), {}),
    "gather": lambda x, n: (torch.gather, (x(70, 30), 1, _index((70, 90), 30)), {}),
    "index_add": lambda x, n: (torch.index_add, (x(30, 90), 0, _index((80,), 30), x(80, 90)), {}),
    "scatter_add": lambda x, n: (torch.scatter_add, (x(30, 90), 0, _index((80, 90), 30), x(80, 90)), {}),
    "gelu": lambda x, n: (F.gelu, (x(90, 70 + n),), {"approximate": "tanh"}),
    "add": lambda x, n: (torch.add, (x(6, 60, 70), x(70)), {"alpha": 2}),
    "mul, transposed": lambda x, n: (torch.mul, (x(80, 60).t(), x(60, 1)), {}),
    "where": lambda x, n: (torch.where, (x(90, 70) > 0, x(90, 70), x(1)), {}),
    "to": lambda x, n: (torch.Tensor.to, (x(90, 70), torch.float64), {}),
    "sum": lambda x, n: (torch.sum, (x(60, 9, 70), (1,)), {}),
    "mean": lambda x, n: (torch.Tensor.mean, (x(60, 9, 70), -1), {"keepdim": True}),
    "cat": lambda x, n: (torch.cat, ([x(60, 9), x(60, 4)], 1), {}),
    "cat, with an empty one": lambda x, n: (torch.cat, ([torch.empty(0).double(), x(60, 9)], -1), {}),
    "split": lambda x, n: (torch.Tensor.split, (x(60, 9, 70), 4, 1), {}),
    "chunk": lambda x, n: (torch.chunk, (x(60, 9, 70), 2), {"dim": -1}),
    "slices": lambda x, n: (torch.Tensor.__getitem__, (x(60, 9, 70), (slice(None), None, ..., slice(3, 50))), {}),
    "permute": lambda x, n: (torch.permute, (x(60, 9, 70), (2, 0, 1)), {}),
    "transpose": lambda x, n: (torch.Tensor.transpose, (x(60, 9, 70), 1, -1), {}),
    "flip": lambda x, n: (torch.flip, (x(60, 9, 70), (1,)), {}),
    "roll": lambda x, n: (torch.roll, (x(60, 9, 70), 3, 1), {}),
    "stack": lambda x, n: (torch.stack, ([x(60, 9), x(60, 9)], 1), {}),
    "pad": lambda x, n: (F.pad, (x(60, 9, 70), (0, 0, 1, -1)), {}),
    "max_pool2d": lambda x, n: (F.max_pool2d, (x(60, 70, 6, 6), 2), {}),
    "foreach": lambda x, n: (torch._foreach_mul, ([x(60, 90), x(3)], [x(60, 90), x(3)]), {}),
}


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.shape == theirs.shape and torch.allclose(ours.double(), theirs.double(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CALLS)
def test_a_cut_call_has_the_elements_of_the_whole_one(name: str) -> None:
    torch.manual_seed(0)
    function, args, kwargs = CALLS[name](lambda *s: torch.randn(*s, dtype=torch.float64).requires_grad_(), 13)
    axes = axes_of(name_of(function), args, kwargs)
    assert axes is not None
    results = list(tensors_in(function(*args, **kwargs)))
    prepared = (args, kwargs) if axes.prepare is None else axes.prepare(args, kwargs)
    tensors = list(tensors_in(prepared))
    kind = Kind(axes, map_tensors((args, kwargs), without_memory), writes=False, random=False)
    assert kind.fits(results)

    def cut(index: Any) -> tuple[Any, Any]:
        names = iter(axes.tensors)
        cut_args, cut_kwargs = map_tensors(
            prepared,
            lambda t: cut_tensor(t, next(names), index, axes.flat).requires_grad_(t.requires_grad),
        )
        return cut_args, cut_kwargs

    index = kind.chosen(kind.forward(), tensors).index(torch.device("cpu"))
    assert index
    few_args, few_kwargs = cut(index)
    few = list(tensors_in(function(*few_args, **few_kwargs)))
    assert sum(t.numel() for t in few) < sum(t.numel() for t in results)
    for ours, theirs, names in zip(few, results, axes.results):
        assert _close(ours, cut_tensor(theirs, names, index, axes.flat))

    sent = [torch.randn_like(t) for t in results]
    wanted = [n for n, t in enumerate(tensors) if t.requires_grad]
    gradients = dict(zip(wanted, torch.autograd.grad(results, [tensors[n] for n in wanted], sent)))
    for way, positions in kind.backward(wanted).items():
        index = kind.chosen(way, tensors).index(torch.device("cpu"))
        few_args, few_kwargs = cut(index)
        leaves = list(tensors_in((few_args, few_kwargs)))
        outputs = list(tensors_in(function(*few_args, **few_kwargs)))
        came = [cut_tensor(g, names, index, axes.flat) for g, names in zip(sent, axes.results)]
        found = torch.autograd.grad(outputs, [leaves[n] for n in positions], came)
        for position, ours in zip(positions, found):
            assert _close(ours, cut_tensor(gradients[position], axes.tensors[position], index, axes.flat)), position


@pytest.mark.parametrize(
    "name", ["linear", "linear, transposed", "matmul", "bmm", "addmm", "einsum", "gelu", "softmax"]
)
def test_the_worst_element_stands_out(name: str) -> None:
    torch.manual_seed(0)
    function, args, kwargs = CALLS[name](lambda *shape: torch.randn(*shape), 3)
    axes = axes_of(name_of(function), args, kwargs)
    assert axes is not None
    result = function(*args, **kwargs)
    place = tuple(random.Random(1).randrange(size) for size in result.shape)
    result[place] += 3.0
    call = suspects.Call(function, (args, kwargs), list(tensors_in((args, kwargs))), None, [result])
    found = suspects.find(axes, axes.cut_for_results(), call, random.Random(0))
    if axes.flat:
        flat = int(torch.arange(result.numel()).view(result.shape)[place])
        assert all(flat in index["e"].tolist() for index in found)
        return
    for name_of_axis, where in zip(axes.results[0], place):
        if name_of_axis is not None:
            assert any(where in index.get(name_of_axis, torch.empty(0)).tolist() for index in found)


def test_places_have_both_sides_of_every_edge() -> None:
    chosen = places.choose(1 << 20, 4096, 48, random.Random(0))
    assert {0, (1 << 20) - 1, 15, 16, 4095, 4096, (1 << 19) - 1, 1 << 19} <= set(chosen)
    assert len(chosen) <= 48
    assert places.choose(5, 1, 48, random.Random(0)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (torch.sum, ("x",), {}),
        (torch.Tensor.mean, ("x",), {}),
        (torch.linalg.vector_norm, ("x",), {}),
        (F.cross_entropy, ("x", "t"), {"label_smoothing": 0.1}),
        (F.cross_entropy, ("x", "t"), {"reduction": "sum", "ignore_index": 3}),
        (F.cross_entropy, ("x", "t", "w"), {}),
    ],
)
def test_totals_come_from_partial_results(function: Any, args: Any, kwargs: Any) -> None:
    torch.manual_seed(0)
    known = {"x": torch.randn(300, 40), "t": torch.randint(40, (300,)), "w": torch.rand(40) + 0.5}
    given = tuple([known[a] for a in args])
    total = total_of(name_of(function), function, given, kwargs)
    assert total is not None
    known["x"].requires_grad_()
    result = function(*given, **kwargs)
    for reduced in total.forward(given, kwargs, result, random.Random(0)):
        again = reduced.function(*map_tensors(reduced.args, _double), **map_tensors(reduced.kwargs, _double))
        for ours, theirs in zip(tensors_in(again), tensors_in(reduced.result)):
            assert torch.allclose(ours, theirs.double(), rtol=1e-5)
    if "norm" in function.__name__:
        return
    gradient = torch.autograd.grad(result * 3, known["x"])[0]
    found = [gradient, *[None] * (len(given) - 1)]
    for reduced in total.backward(
        total.keep(given, kwargs, random.Random(0)), [torch.tensor(3.0)], found, random.Random(0)
    ):
        few = map_tensors(reduced.args, _double)
        leaf = few[0].requires_grad_()
        output = reduced.function(*few, **map_tensors(reduced.kwargs, _double))
        ours = torch.autograd.grad(output, leaf, reduced.sent[0].double())[0]
        assert reduced.found[0] is not None
        assert torch.allclose(ours, reduced.found[0].double(), rtol=1e-4, atol=1e-8)


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().double() if tensor.is_floating_point() else tensor


@pytest.mark.parametrize("lanes", [1, 4, 64])
def test_terms_are_added_one_by_one_in_each_lane(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "_AT_ONCE", 128)
    terms = torch.rand(1000, generator=torch.Generator().manual_seed(2)) + 0.1
    sums = [0.0] * lanes
    for number, term in enumerate(terms.numpy()):
        sums[number % lanes] = np.float32(sums[number % lanes]) + np.float32(term * term)
    total = np.float32(0)
    for one in sums:
        total += one
    found = dict(zip(chains.LANES, chains._totals(terms, squares=True)))
    assert found[lanes] == float(total)


def test_a_total_that_an_order_of_adding_explains_is_as_good_as_the_exact_one() -> None:
    terms = torch.full((3_000_000,), 0.1)
    partial = terms.double().view(1000, -1).sum(1)
    chain = float(np.add.accumulate(terms.numpy())[-1])
    assert abs(chain / 300_000 - 1) > 1e-4  # far from the exact total
    results = [torch.tensor(value) for value in (chain, 300_000 + 3 * (chain - 300_000), float("nan"))]
    found = chains.as_rounded_in_order(results, [partial] * 3, [terms] * 3, lambda total: total, squares=False)
    assert found[0] == pytest.approx(300_000, rel=1e-6)
    assert found[1] == results[1]
    assert found[2].isnan()
