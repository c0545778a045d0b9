"""The gradients that tools attribute to a call are those of `torch.autograd.grad` on that call."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from op_tools.call.traits import traits_of
from op_tools.tools.base import Tool
from op_tools.tools.capture import OpCapture
from op_tools.watch.intercept import INTERCEPTOR, Call

from .samples import Sample, gradients_of, operators, samples_of, seed


class Recorder(Tool):
    """Keeps the gradients of each call."""

    name, prefix = "Recorder", "OP_RECORDER"
    wants_backward = wants_backward_start = True
    columns: ClassVar[dict[str, str]] = {"call_id": "INTEGER"}

    def prepare(self) -> None:
        self.heard: list[tuple[Call, list[Any], list[Any]]] = []

    def after_backward(self, call: Call, grad_outputs: list[Any], grad_inputs: list[Any]) -> None:
        keep = [[g.clone() if g is not None else None for g in grads] for grads in (grad_outputs, grad_inputs)]
        self.heard.append((call, keep[0], keep[1]))


def attributed_gradients(sample: Sample, device: str) -> str | None:
    """None when what is attributed to the call equals the truth, else what is wrong."""
    args, kwargs, leaves = sample.on(device)
    before = {id(t): t.grad_fn for t in _tensors((args, kwargs))}
    seed()
    traits = traits_of(sample.function, f"sample.{sample.name}")
    with Recorder() as recorder:
        result = INTERCEPTOR.watch_function(sample.function, traits, sample.function, args, kwargs)
        truth = gradients_of(result, leaves)
    if not truth or all(g is None for g in truth):
        return None
    # an input handed back as it is (dropout_ in evaluation, too) has no backward of its own
    returned = {id(t) for t in _tensors(result) if t.grad_fn is before.get(id(t), before)}
    if not recorder.heard:
        return None if returned else "no backward was heard of"
    if len(recorder.heard) != 1:
        return f"{len(recorder.heard)} backward passes were heard of"
    _, _, found = recorder.heard[0]
    # several arguments may be the same tensor: its gradient is attributed to each of its places
    by_leaf: dict[int, Any] = {}
    places = list(_tensors((args, kwargs)))
    for place, grad in zip(places, found):
        by_leaf[id(place)] = grad
    known = iter(truth)
    arguments = iter(dict.fromkeys(id(t) for t in places))
    for leaf in leaves:
        key = next(arguments)
        if not leaf.requires_grad:
            continue
        want, got = next(known), by_leaf[key]
        if (want is None and got is None) or key in returned:
            continue
        if want is None or got is None:
            zero = want if got is None else got
            if not zero.any():
                continue
            return f"a gradient is {'missing' if got is None else 'too many'}"
        if want.shape != got.shape or not torch.allclose(want, got, rtol=1e-5, atol=1e-6, equal_nan=True):
            return f"differs by {float((want - got).abs().max()) if want.shape == got.shape else 'shape'}"
    return None


def _tensors(value: Any) -> Any:
    from op_tools.call.description import tensors_in

    return tensors_in(value)


def check(ops: list[Any], device: str, limit: int) -> tuple[dict[str, str], int]:
    wrong: dict[str, str] = {}
    checked = 0
    for op in ops:
        for inplace in (False, True):
            for sample in samples_of(op, limit, gradients=True, inplace=inplace):
                label = f"{op.name} {op.variant_test_name} inplace={inplace}"
                try:
                    args, kwargs, leaves = sample.on(device)
                    seed()
                    bare = gradients_of(sample.function(*args, **kwargs), leaves)
                except Exception:
                    continue  # the device or the sample cannot do it without tools either
                if not bare:
                    continue
                checked += 1
                problem = attributed_gradients(sample, device)
                if problem is not None:
                    wrong[label] = problem
    return wrong, checked


def test_sampled_operators(device: str) -> None:
    wrong, checked = check(operators(False), device, limit=3)
    assert wrong == {}
    assert checked > 100


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_all_operators(device: str) -> None:
    wrong, checked = check(operators(True), device, limit=6)
    assert wrong == {}
    assert checked > 1500


def test_composite_call_made_of_many_nodes(device: str) -> None:
    x = torch.randn(4, 6, device=device, requires_grad=True)
    with Recorder() as recorder:
        y = torch.nn.functional.normalize(x * 1.0, dim=1)
        (expected,) = torch.autograd.grad(y, x, torch.ones_like(y) * 3, retain_graph=True)
    calls = {call.op: (grad_outputs, grad_inputs) for call, grad_outputs, grad_inputs in recorder.heard}
    grad_outputs, grad_inputs = calls["torch.nn.functional.normalize"]
    assert torch.equal(grad_outputs[0], torch.ones_like(y) * 3)
    assert torch.allclose(grad_inputs[0], expected)


def test_in_place_on_a_view_is_attributed_to_the_view(device: str) -> None:
    base = torch.randn(4, 6, device=device, requires_grad=True).clone()
    part = base[1:3]
    with Recorder() as recorder:
        part.mul_(3.0)
        base.sum().backward()
    found = {call.op: grad_inputs for call, _, grad_inputs in recorder.heard}
    assert torch.equal(found["torch.Tensor.mul_"][0], torch.full((2, 6), 3.0, device=device))


def test_unused_output_still_ends_the_call(device: str) -> None:
    x = torch.randn(6, device=device, requires_grad=True)
    with Recorder() as recorder:
        first, _ = (x * 2).split(3)
        first.sum().backward()
    ops = [call.op for call, _, _ in recorder.heard]
    assert "torch.Tensor.split" in ops


def test_second_backward_is_heard_again(device: str) -> None:
    x = torch.randn(3, device=device, requires_grad=True)
    with Recorder() as recorder:
        y = (x * x).sum()
        y.backward(retain_graph=True)
        y.backward()
    assert [call.op for call, _, _ in recorder.heard].count("torch.Tensor.mul") == 2


def test_hooks_do_not_keep_the_graph_alive(device: str) -> None:
    import gc
    import weakref

    x = torch.randn(3, device=device, requires_grad=True)
    with Recorder():
        y = x.exp()
        node = weakref.ref(y)
        del y
        gc.collect()
    assert node() is None


def test_captured_gradients_are_the_true_ones(device: str) -> None:
    from op_tools.files import captures

    x = torch.randn(5, 7, device=device, requires_grad=True)
    w = torch.randn(3, 7, device=device, requires_grad=True)
    with OpCapture(ops=["torch.nn.functional.linear"]) as capture:
        y = torch.nn.functional.linear(x, w)
        loss = (y * y).sum()
        expected = torch.autograd.grad(loss, [x, w], retain_graph=True)
        loss.backward()
    paths = [row["path"] for row in capture.records() if row["part"] == "grad_inputs"]
    from pathlib import Path

    grads = captures.read(Path(paths[0]))["grad_inputs"]
    for grad, want in zip(grads, expected):
        assert torch.equal(grad, want.cpu())


def test_interceptor_is_off_afterwards() -> None:
    assert INTERCEPTOR.tools == []
