"""Fused optimizers: their steps are PyTorch's, any order of them in float32 is right, and wrong updates are found."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from op_tools.call import optimizers
from op_tools.judge import formulas, golden, uncertainty, verdict
from op_tools.judge.noise import PROBES, Noise
from op_tools.judge.rounding import precision_of

Tensor = torch.Tensor
OPTIMIZERS = ["adam", "adamw", "sgd", "adagrad"]
LR = 4e-4


def options(kind: str, **changed: Any) -> dict[str, Any]:
    common = {"lr": LR, "weight_decay": 0.0, "maximize": False}
    own: dict[str, dict[str, Any]] = {
        "sgd": {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "is_first_step": False},
        "adagrad": {"lr_decay": 0.0, "eps": 1e-10},
    }
    adam = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "amsgrad": False}
    return common | own.get(kind, adam) | changed


def state(kind: str, shapes: list[tuple[int, ...]], seed: int = 0, step: float = 3.0, dtype: Any = None) -> list[Any]:
    """Lists of parameters, gradients and what the optimizer remembers of those before."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(size: float) -> list[Tensor]:
        return [size * torch.randn(s, generator=generator, dtype=dtype) for s in shapes]

    parameters, grads, averages, squares = drawn(0.05), drawn(1e-3), drawn(1e-3), [t.square() for t in drawn(1e-3)]
    steps = [torch.tensor(step) for _ in shapes]
    if kind == "sgd":
        return [parameters, grads, averages]
    if kind == "adagrad":
        return [parameters, grads, squares, steps]
    return [parameters, grads, averages, squares, [], steps]


def fused(kind: str) -> Any:
    return getattr(torch, f"_fused_{kind}_")


def copied(lists: list[Any]) -> list[Any]:
    return [[t.clone() for t in tensors] for tensors in lists]


def by_steps(kind: str, lists: list[Any], settings: dict[str, Any]) -> list[Any]:
    steps = optimizers.steps_of(f"fused_{kind}")
    assert steps is not None
    for parameter, value, update in steps(*lists, **settings):
        parameter.copy_(value - update)
    return lists


def variants(kind: str) -> list[dict[str, Any]]:
    scales = {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(0.0)}
    skipped = {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(1.0)}
    found = []
    for decay, maximize, scaled in itertools.product((0.0, 0.1), (False, True), ({}, scales, skipped)):
        base = {"weight_decay": decay, "maximize": maximize, **scaled}
        if kind == "sgd":
            for momentum, nesterov, first in (
                (0.0, False, True),
                (0.9, False, True),
                (0.9, False, False),
                (0.9, True, False),
            ):
                found.append(base | {"momentum": momentum, "nesterov": nesterov, "is_first_step": first})
        elif kind == "adagrad":
            found += [base | {"lr_decay": d} for d in (0.0, 0.1)]
        else:
            found += [base | {"amsgrad": a} for a in (False, True)]
    return found


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_steps_are_those_of_the_kernels(kind: str) -> None:
    for changed in variants(kind):
        lists = state(kind, [(5, 7), (3,)], dtype=torch.float64)
        if changed.get("amsgrad"):
            lists[4] = [t * 1.5 for t in lists[3]]
        if changed.get("momentum") == 0.0:
            lists[2] = []
        settings = options(kind, **changed)
        expected = copied(lists)
        fused(kind)(*expected, **settings)
        for mine, theirs in zip(by_steps(kind, lists, settings), expected):
            for a, b in zip(mine, theirs):
                assert torch.allclose(a, b, rtol=1e-13, atol=1e-16), changed


def cancelling(kind: str, lists: list[Any], settings: dict[str, Any]) -> None:
    """Make the old values of the parameters nearly equal to their updates."""
    wide = [[t.double() if t.dim() else t for t in tensors] for tensors in copied(lists)]
    for value in wide[0]:
        value.zero_()
    generator = torch.Generator().manual_seed(1)
    for parameter, after in zip(lists[0], by_steps(kind, wide, settings)[0]):
        off = torch.randn(after.shape, generator=generator) * torch.logspace(-7, 0, after.numel()).view(after.shape)
        parameter.copy_(-after * (1 + off))


def in_float32(
    kind: str, lists: list[Any], settings: dict[str, Any], seed: int | None, wrong: float = 0.0
) -> list[Any]:
    """A device's way: the steps in float32, where `seed` adds an ulp here and there; updates may be wrong."""
    lists = copied(lists)
    dtypes = [[t.dtype for t in tensors] for tensors in lists]
    lists = [[t.float() for t in tensors] for tensors in lists]
    steps = optimizers.steps_of(f"fused_{kind}")
    assert steps is not None
    if seed is None:
        updates = steps(*lists, **settings)
    else:
        with Ulps(seed):
            updates = steps(*lists, **settings)
    for parameter, value, update in updates:
        parameter.copy_(value - update * (1 + wrong))
    return [[t.to(d) for t, d in zip(tensors, kinds)] for tensors, kinds in zip(lists, dtypes)]


class Ulps(torch.utils._python_dispatch.TorchDispatchMode):
    """Moves the result of every operator by up to an ulp."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._local_scalar_dense, torch.ops.aten.neg):
            return result
        return result * (1 + 2.0**-23 * (2 * torch.rand(result.shape, generator=self._generator) - 1))


def judged(kind: str, lists: list[Any], settings: dict[str, Any], after: list[Any]) -> verdict.Judgement:
    result = golden.run(fused(kind), lists, settings, device="cuda")
    return verdict.judge_call(result.source.name, result, inputs_after=(after, settings))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("step", [1.0, 3.0, 1000.0])
def test_any_rounding_of_the_steps_is_right_even_where_value_and_update_cancel(kind: str, step: float) -> None:
    for seed in range(3):
        for decay in (0.0, 0.1):
            settings = options(kind, weight_decay=decay)
            lists = state(kind, [(60, 50), (7,)], seed, step)
            cancelling(kind, lists, options(kind))
            for noise in (None, 2 * seed, 2 * seed + 1):
                found = judged(kind, lists, settings, in_float32(kind, lists, settings, noise))
                assert found.verdict == verdict.RIGHT, (seed, decay, noise, found.reason)


@pytest.mark.parametrize("step", [1.0, 3.0, 1000.0])
@pytest.mark.parametrize("beta2", [0.99, 0.999])
def test_decay_rates_may_be_taken_in_float32(beta2: float, step: float) -> None:
    def narrow(value: float) -> float:
        return float(np.float32(value))

    for everywhere in (True, False):
        numbers = iter([True, True, everywhere, everywhere])
        settings = options("adam", beta2=beta2)
        lists = state("adam", [(60, 50)], step=step)
        cancelling("adam", lists, settings)
        taken = settings | {"number": lambda v, n=numbers: narrow(v) if next(n) else v}
        found = judged("adam", lists, settings, in_float32("adam", lists, taken, None))
        assert found.verdict == verdict.RIGHT, (everywhere, found.reason)
        wrong = settings | {"beta2": beta2 * (1 + (1 - beta2) * 1e-3)}
        assert judged("adam", lists, settings, in_float32("adam", lists, wrong, None)).verdict == verdict.WRONG


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_parameters_in_a_low_precision_are_updated_in_float32(kind: str) -> None:
    for seed in range(3):
        settings = options(kind, weight_decay=0.1)
        lists = state(kind, [(60, 50)], seed)
        lists[0], lists[1] = ([t.bfloat16() for t in tensors] for tensors in lists[:2])
        found = judged(kind, lists, settings, in_float32(kind, lists, settings, seed))
        assert found.verdict == verdict.RIGHT, found.reason


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_updates_that_are_off_by_a_ten_thousandth_are_found(kind: str) -> None:
    settings = options(kind)
    lists = state(kind, [(60, 50), (7,)])
    cancelling(kind, lists, settings)
    assert judged(kind, lists, settings, in_float32(kind, lists, settings, 0, wrong=1e-4)).verdict == verdict.WRONG
    one = in_float32(kind, lists, settings, 0)
    one[0][0].view(-1)[17] *= 1 + 1e-3  # of what remains
    one[0][0].view(-1)[17] += 1e-3 * LR * (1e-3 if kind == "sgd" else 1)
    assert judged(kind, lists, settings, one).verdict == verdict.WRONG


WRONG_SETTINGS = [
    ("adam", {"beta1": 0.8999}),
    ("adamw", {"beta2": 0.9899}),
    ("adam", {"eps": 2e-8}),
    ("adamw", {"weight_decay": 0.0}),
    ("sgd", {"momentum": 0.8999}),
    ("sgd", {"nesterov": True}),
    ("adagrad", {"eps": 2e-7}),
    ("adagrad", {"lr_decay": 1e-3}),
]


@pytest.mark.parametrize(("kind", "changed"), WRONG_SETTINGS)
def test_another_optimizer_than_the_one_that_was_asked_for_is_found(kind: str, changed: dict[str, Any]) -> None:
    settings = options(kind, weight_decay=0.1)
    lists = state(kind, [(60, 50)])
    after = in_float32(kind, lists, settings | changed, None)
    assert judged(kind, lists, settings, after).verdict == verdict.WRONG


def test_a_missing_bias_correction_is_found() -> None:
    settings = options("adam")
    lists = state("adam", [(60, 50)])
    later = copied(lists)
    later[5] = [torch.tensor(1e6)]
    after = in_float32("adam", later, settings, None)
    after[5] = lists[5]
    assert judged("adam", lists, settings, after).verdict == verdict.WRONG


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_reference_is_computed_in_double_precision(kind: str) -> None:
    result = golden.run(fused(kind), state(kind, [(4, 4)]), options(kind))
    assert result.comparable
    assert result.note == ""
    assert result.inputs_after[0][0][0].dtype == torch.float64


def test_elements_in_doubt_are_probed_without_the_other_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    original = Noise._optimized
    monkeypatch.setattr(
        Noise,
        "_optimized",
        lambda self, func, steps, args, kwargs: (
            sizes.append([t.numel() for t in args[0]]),
            original(self, func, steps, args, kwargs),
        )[1],
    )
    monkeypatch.setattr(formulas, "terms", lambda query: None)  # which would explain them
    settings = options("adam")
    lists = state("adam", [(100, 80), (300,), (90, 90)])
    cancelling("adam", lists, settings)
    lists[0][0], lists[0][2] = lists[0][0] + 1, lists[0][2] + 1
    uncertainty._structures.clear()
    found = judged("adam", lists, settings, in_float32("adam", lists, settings, 5))
    assert found.verdict == verdict.RIGHT
    assert sizes
    assert all(len(s) == 1 for s in sizes), sizes


@pytest.mark.parametrize("step", [1.0, 3.0, 1000.0])
@pytest.mark.parametrize("changed", [{}, {"weight_decay": 0.1}, {"maximize": True}], ids=str)
@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_the_formula_of_adam_never_says_more_than_the_probes(kind: str, changed: dict[str, Any], step: float) -> None:
    lists, settings = state(kind, [(40, 30), (700,)], step=step), options(kind, **changed)
    lists[0][1].zero_()  # as biases begin
    if step == 1:
        lists[2:4] = [[torch.zeros_like(t) for t in tensors] for tensors in lists[2:4]]
    result = golden.run(fused(kind), lists, settings, name=f"torch._fused_{kind}_", device="cuda")
    spread = uncertainty.Uncertainty(result, "input", precision_of(torch.float32, "cuda"), None)
    while spread.probes < PROBES:
        assert spread.grow()
    known = 0
    for number, exact in enumerate(spread.exact):
        terms = spread.terms(number, exact)
        if terms is None:
            continue
        known += 1
        variance = terms.squares.double() * terms.of_squares + exact.square() * terms.of_result
        sigma = spread.sigma(number)
        assert sigma is not None
        assert 0.25 * float(sigma.square().sum()) < float(variance.sum()) <= 1.05 * float(sigma.square().sum()), number
        assert float((variance > 2.5 * sigma.square()).double().mean()) < 0.03, number
    assert known == 6, "parameters and both averages"


def test_a_step_that_is_skipped_has_no_roundings() -> None:
    lists = state("adamw", [(4, 4)])
    for given in ({"found_inf": torch.tensor(1.0)}, {"grad_scale": torch.tensor(2.0), "found_inf": torch.tensor(0.0)}):
        result = golden.run(fused("adamw"), lists, options("adamw", **given), name="torch._fused_adamw_", device="cuda")
        spread = uncertainty.Uncertainty(result, "input", precision_of(torch.float32, "cuda"), None)
        assert spread.terms(0, spread.exact[0]) is None


def test_an_optimizer_that_is_right_needs_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    lists, settings = state("adamw", [(40, 30), (700,)]), options("adamw", weight_decay=0.01)
    lists[0][1].zero_()
    monkeypatch.setattr(Noise, "_optimized", lambda *args: pytest.fail("probed"))
    found = judged("adamw", lists, settings, in_float32("adamw", lists, settings, 5))
    assert found.verdict == verdict.RIGHT
