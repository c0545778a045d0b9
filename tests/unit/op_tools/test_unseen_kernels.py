"""Operators of others' own, whose kernels show no steps: no alarm on another correct kernel, and faults are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from op_tools.judge import golden, opaque_kernels, verdict

Tensor = torch.Tensor
library = torch.library.Library("op_tools_unseen_test", "FRAGMENT")
ops = torch.ops.op_tools_unseen_test


def define(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(kernel: Callable[..., Any]) -> Callable[..., Any]:
        library.define(schema)
        library.impl(schema.partition("(")[0], kernel, "CPU")
        return kernel

    return register


def averaged(decay: Any, keys: Any, values: Any, out: Any, totals: Any) -> None:
    """A decayed average of the values so far, step after step, and the logarithm of the weights' sum."""
    top = keys[:, 0].copy()
    weighted, weights = values[:, 0].copy(), np.ones_like(top)
    out[:, 0], totals[:, 0] = values[:, 0], top
    for t in range(1, keys.shape[1]):
        before = top + decay
        top = np.maximum(before, keys[:, t])
        past, now = np.exp(before - top), np.exp(keys[:, t] - top)
        weighted = past * weighted + now * values[:, t]
        weights = past * weights + now
        out[:, t], totals[:, t] = weighted / weights, top + np.log(weights)


@define("average(Tensor decay, Tensor keys, Tensor values) -> (Tensor, Tensor)")
def average(decay: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(decay.dtype, torch.float32)
    keys, values = keys.to(wide), values.to(wide)
    out, totals = torch.empty_like(keys), torch.empty_like(keys)
    averaged(*(t.numpy() for t in (decay, keys, values, out, totals)))
    return out, totals


def in_parallel(decay: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The same in float32, from all pairs of steps at once: another correct kernel."""
    keys, values, steps = keys.float(), values.float(), torch.arange(keys.shape[1])
    distance = (steps[:, None] - steps).float()
    exponents = keys[:, None] + distance[None, :, :, None] * decay
    exponents = exponents.masked_fill((distance < 0)[None, :, :, None], -torch.inf)
    return (exponents.softmax(2) * values[:, None]).sum(2), exponents.logsumexp(2)


def with_coarse_functions(decay: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The same in float32 step after step, its quotients and exponentials good to some ulps, as those of GPUs are."""
    generator = torch.Generator().manual_seed(0)

    def coarse(x: Tensor) -> Tensor:
        return (x.double() * (1 + 2.0**-22 * (2 * torch.rand(x.shape, generator=generator) - 1))).float()

    def exp(x: Tensor) -> Tensor:
        return torch.where(x == 0, 1.0, coarse(torch.exp2(x * 1.4426950408889634)))

    top, weighted, weights = keys[:, 0], values[:, 0], torch.ones_like(keys[:, 0])
    out, totals = [values[:, 0]], [top]
    for key, value in zip(keys[:, 1:].unbind(1), values[:, 1:].unbind(1)):
        before = top + decay
        top = torch.maximum(before, key)
        past, now = exp(before - top), exp(key - top)
        weighted, weights = past * weighted + now * value, past * weights + now
        out.append(coarse(weighted / weights))
        totals.append(top + torch.log(weights))
    return torch.stack(out, 1), torch.stack(totals, 1)


def data(seed: int, dtype: torch.dtype, size_of_keys: float, size_of_values: float = 1.0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    decay = -torch.exp(torch.linspace(-5, 3, 24))
    keys = size_of_keys * torch.randn(2, 40, 24, generator=generator)
    values = size_of_values * torch.randn(2, 40, 24, generator=generator)
    return decay, keys.to(dtype), values.to(dtype)


def judged(args: tuple[Tensor, ...], outputs: Any, function: Any = None, low: Any = None) -> verdict.Judgement:
    result = golden.run(function or ops.average, args, device="cuda", autocast=low)
    return verdict.judge_call("mine.average", result, outputs=outputs)


def test_none_of_many_elements_is_called_wrong() -> None:
    generator = torch.Generator().manual_seed(0)
    decay = -torch.exp(torch.linspace(-5, 0, 1024))
    keys, values = (size * torch.randn(2, 256, 1024, generator=generator) for size in (0.02, 1.0))
    found = judged((decay, keys, values), with_coarse_functions(decay, keys, values))
    assert found.verdict == verdict.RIGHT, found.reason


@pytest.mark.parametrize("size_of_keys", [0.0, 0.02, 1.0, 20.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_another_order_of_the_steps_is_right(dtype: torch.dtype, size_of_keys: float) -> None:
    for seed in range(6):
        args = data(seed, dtype, size_of_keys, 10.0 ** (seed - 3))
        for low in (None, torch.bfloat16):
            found = judged(args, in_parallel(*args), low=low)
            assert found.verdict == verdict.RIGHT, (seed, found.reason)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("number", [0, 1])
def test_a_small_fault_in_one_element_is_found(dtype: torch.dtype, number: int) -> None:
    args = data(0, dtype, 1.0)
    for low in (None, torch.bfloat16):
        outputs = tuple(t.clone() for t in in_parallel(*args))
        outputs[number][1, 30, 4] += 1e-5 * outputs[number].abs().max()
        assert judged(args, outputs, low=low).verdict == verdict.WRONG


def test_a_decay_that_is_slightly_off_is_found() -> None:
    decay, keys, values = data(0, torch.float32, 1.0)
    outputs = in_parallel(decay * 1.00005, keys, values)
    assert judged((decay, keys, values), outputs).verdict == verdict.WRONG


@define("normalised(Tensor x) -> Tensor")
def normalised(x: Tensor) -> Tensor:
    wide = x.numpy().astype(np.float64)  # no float32 inside: its own runs show no rounding
    return torch.from_numpy((wide / wide.sum(-1, keepdims=True)).astype(x.numpy().dtype))


def test_a_kernel_that_computes_in_double_precision_is_no_measure_of_float32() -> None:
    for seed in range(20):
        x = torch.randn(8, 3000, generator=torch.Generator().manual_seed(seed))
        one_by_one = x.cumsum(-1)[:, -1:]
        assert judged((x,), x / one_by_one, ops.normalised).verdict == verdict.RIGHT
        assert judged((x,), x / one_by_one * (1 + 3e-2), ops.normalised).verdict == verdict.WRONG


@define("double_only(Tensor x) -> Tensor")
def double_only(x: Tensor) -> Tensor:
    if x.dtype != torch.float64:
        raise TypeError("float64 alone")
    return torch.from_numpy(np.cumsum(x.numpy(), -1))


def test_a_kernel_for_double_precision_alone() -> None:
    x = torch.randn(8, 500, generator=torch.Generator().manual_seed(0))
    right = torch.stack([x[:, : i + 1].sum(-1) for i in range(500)], -1)
    assert judged((x,), right, ops.double_only).verdict == verdict.RIGHT
    assert judged((x,), right * (1 + 1e-4), ops.double_only).verdict == verdict.WRONG
    x, right = x.double(), right.double()
    right = torch.cumsum(x.flip(-1), -1).flip(-1)
    right = x.sum(-1, keepdim=True) - right + x
    assert judged((x,), right, ops.double_only).verdict == verdict.RIGHT
    assert judged((x,), right * (1 + 1e-10), ops.double_only).verdict == verdict.WRONG


@define("attended(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)")
def attended(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    dtype = q.dtype
    q, k, v = (t.to(torch.promote_types(dtype, torch.float32)).numpy() for t in (q, k, v))
    scores = q @ k.T
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    return torch.from_numpy(weights @ v / total).to(dtype), torch.from_numpy(top + np.log(total))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_of_an_attention_may_be_rounded_like_its_results(dtype: torch.dtype) -> None:
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(64, 32, generator=generator).to(dtype) for _ in range(3))
        scores = q.float() @ k.float().T
        totals = scores.logsumexp(-1, keepdim=True)
        weights = (scores - totals).exp().to(dtype)
        out = (weights.float() @ v.float()).to(dtype)
        assert judged((q, k, v), (out, totals), ops.attended).verdict == verdict.RIGHT
        out[5] *= 1.1
        assert judged((q, k, v), (out, totals), ops.attended).verdict == verdict.WRONG
        assert judged((q, k, v), (out / 1.1, totals + 1e-4), ops.attended).verdict == verdict.WRONG


@define("add_up_(Tensor(a!) total, Tensor x) -> ()")
def add_up(total: Tensor, x: Tensor) -> None:
    total.numpy()[...] += x.numpy().sum(0)


def test_arguments_that_are_written_to() -> None:
    generator = torch.Generator().manual_seed(0)
    total, x = torch.randn(50, generator=generator), torch.randn(300, 50, generator=generator)
    after = total + x.flip(0).cumsum(0)[-1]
    for factor, expected in ((1.0, verdict.RIGHT), (1.001, verdict.WRONG)):
        result = golden.run(ops.add_up_, (total, x), device="cuda")
        found = verdict.judge_call("mine.add_up_", result, inputs_after=((after * factor, x), {}))
        assert found.verdict == expected, found.reason


@define("seen(Tensor x) -> Tensor")
def seen(x: Tensor) -> Tensor:
    buffer = torch.empty_like(x)
    buffer.copy_(x)
    table = torch.zeros(x.shape, dtype=x.dtype)
    table[0] = 1
    return (buffer * 2 + table).softmax(-1) * torch.tensor(3.0, dtype=x.dtype)


@define("in_zeros(Tensor x) -> Tensor")
def in_zeros(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    np.exp(x.numpy(), out=out.numpy())
    return out


@define("in_a_copy(Tensor x) -> Tensor")
def in_a_copy(x: Tensor) -> Tensor:
    out = x.clone()
    np.exp(out.numpy(), out=out.numpy())
    return out


@define("before_a_sum(Tensor x) -> Tensor")
def before_a_sum(x: Tensor) -> Tensor:
    parts = x.new_empty(x.shape)
    np.exp(x.numpy(), out=parts.numpy())
    return parts.sum(0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("seen", False), ("in_zeros", True), ("in_a_copy", True), ("before_a_sum", True), ("normalised", True)],
)
def test_what_counts_as_unseen(name: str, expected: bool) -> None:
    x = torch.rand(3, 4, dtype=torch.float64)
    before = x.clone()
    assert opaque_kernels.has_hidden_work(getattr(ops, name).default, (x,), {}) == expected
    assert torch.equal(x, before)


def test_a_kernel_that_is_wrong_in_single_precision_is_no_excuse() -> None:
    @define("worse_in_single(Tensor x) -> Tensor")
    def worse(x: Tensor) -> Tensor:
        return torch.from_numpy(np.exp(x.numpy()) * (1.01 if x.dtype == torch.float32 else 1.0))

    x = torch.rand(100)
    assert judged((x,), x.exp(), ops.worse_in_single).verdict == verdict.RIGHT
    assert judged((x,), x.exp() * 1.01, ops.worse_in_single).verdict == verdict.WRONG


def test_infinity_is_expected_where_it_is() -> None:
    @define("exponential(Tensor x) -> Tensor")
    def exponential(x: Tensor) -> Tensor:
        with np.errstate(over="ignore"):
            return torch.from_numpy(np.exp(x.numpy()))

    x = torch.tensor([1.0, 800.0, -800.0, 100.0, 80.0])
    assert judged((x,), x.exp() * (1 + 2e-7), ops.exponential).verdict == verdict.RIGHT
    for place in (0, 1, 4):
        wrong = x.exp()
        wrong[place] = 2.0
        assert judged((x,), wrong, ops.exponential).verdict == verdict.WRONG
