"""The golden run: same call, double precision, private copies that keep the layout, nothing else touched."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from op_tools.judge import golden


def test_floats_become_double_and_whole_numbers_stay() -> None:
    x, index = torch.randn(4, 3).bfloat16(), torch.tensor([2, 0])
    result = golden.run(torch.index_select, (x, 0, index))
    assert result.comparable
    assert result.outputs.dtype == torch.float64
    assert torch.equal(result.outputs, x.double()[index])
    assert result.cast_info == {torch.bfloat16: torch.float64}


def test_complex_becomes_complex128() -> None:
    assert golden.run(torch.exp, (torch.ones(2, dtype=torch.complex64),)).outputs.dtype == torch.complex128


def test_a_given_cast_wins() -> None:
    result = golden.run(torch.neg, (torch.ones(2).half(),), dtype_cast={torch.float16: torch.float32})
    assert result.outputs.dtype == torch.float32


def test_dtype_arguments_follow_the_cast() -> None:
    x = torch.rand(5).half()
    assert golden.run(torch.softmax, (x, 0), {"dtype": torch.float32}).outputs.dtype == torch.float64
    assert golden.run(torch.Tensor.to, (x, torch.bfloat16)).outputs.dtype == torch.float64


def test_device_arguments_become_the_cpu() -> None:
    assert golden.run(torch.ones, (3,), {"device": "cuda:0"}).outputs.device.type == "cpu"
    assert golden.run(torch.Tensor.to, (torch.ones(2), "cuda")).outputs.device.type == "cpu"
    assert golden.run(torch.Tensor.cuda, (torch.ones(2),)).comparable


def test_inputs_are_never_written() -> None:
    x = torch.ones(3)
    result = golden.run(torch.Tensor.add_, (x, 1))
    assert torch.equal(x, torch.ones(3))
    assert torch.equal(result.inputs_after[0][0], torch.full((3,), 2.0, dtype=torch.float64))


def test_out_arguments_hold_the_result() -> None:
    out = torch.zeros(3)
    result = golden.run(torch.add, (torch.ones(3), 1), {"out": out})
    assert torch.equal(out, torch.zeros(3))
    assert torch.equal(result.inputs_after[1]["out"], torch.full((3,), 2.0, dtype=torch.float64))


def test_setitem_changes_the_private_copy() -> None:
    x = torch.zeros(3, 3)
    result = golden.run(torch.Tensor.__setitem__, (x, (0,), torch.ones(3)))
    assert x.sum() == 0
    assert result.inputs_after[0][0].sum() == 3


def test_arguments_that_share_memory_share_it_in_the_copy() -> None:
    base = torch.arange(6.0)
    result = golden.run(torch.Tensor.copy_, (base[1:], base[:-1].clone()))
    assert result.comparable
    shared = golden.run(lambda a, b: (a.add_(1), b.clone())[1], (base[:3], base[2:5]))
    assert shared.outputs.tolist() == [3.0, 3.0, 4.0]  # base[2] was written through the other view


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.permutations([0, 1, 2]),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
)
def test_strides_and_offset_survive(sizes: list[int], order: list[int], offset: int, dtype: torch.dtype) -> None:
    order = [d for d in order if d < len(sizes)]
    base = torch.randn(offset + int(torch.tensor(sizes).prod())).to(dtype)
    x = base[offset:].view(*[sizes[d] for d in order]).permute(*torch.tensor(order).argsort().tolist())
    seen = []
    golden.run(lambda t: seen.append((t.stride(), t.storage_offset())) or t.clone(), (x,))
    assert seen[0] == (x.stride(), x.storage_offset())


def test_as_strided_sees_the_memory_around_the_tensor() -> None:
    x = torch.arange(10.0)[4:8]
    assert golden.run(torch.as_strided, (x, (3,), (1,), 0)).outputs.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("function", [F.linear, torch.matmul])
def test_gradients_are_those_of_autograd(function: object) -> None:
    x, w = torch.randn(4, 5, requires_grad=True), torch.randn(5, 5, requires_grad=True)
    g = torch.randn(4, 5)
    result = golden.run(function, (x, w), grad_outputs=[g])
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    expected = torch.autograd.grad(function(*wide), wide, g.double())
    for ours, theirs in zip(result.grad_inputs, expected):
        torch.testing.assert_close(ours, theirs)


def test_gradient_of_an_in_place_call() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    result = golden.run(torch.Tensor.mul_, (x, y), grad_outputs=[torch.ones(3)])
    torch.testing.assert_close(result.grad_inputs[0], y.detach().double())
    torch.testing.assert_close(result.grad_inputs[1], x.detach().double())


def test_a_tensor_given_twice_gets_the_whole_gradient_at_both_places() -> None:
    x = torch.tensor([3.0], requires_grad=True)
    result = golden.run(torch.mul, (x, x), grad_outputs=[torch.ones(1)])
    assert [g.item() for g in result.grad_inputs] == [6.0, 6.0]


def test_inputs_without_gradient_have_none() -> None:
    result = golden.run(torch.mul, (torch.ones(1, requires_grad=True), torch.ones(1)), grad_outputs=[torch.ones(1)])
    assert result.grad_inputs[1] is None


def test_foreach_and_optimizer_calls() -> None:
    params = [torch.ones(3), torch.ones(2, 2)]
    result = golden.run(torch._foreach_add_, (params, [torch.ones(3), torch.ones(2, 2)]), {"alpha": 2})
    assert [t.sum().item() for t in result.inputs_after[0][0]] == [9.0, 12.0]
    assert params[0].sum() == 3


def test_tensors_as_indices() -> None:
    x, index = torch.arange(6.0).view(3, 2), torch.tensor([2, 1])
    assert golden.run(torch.Tensor.__getitem__, (x, index)).outputs.tolist() == [[4.0, 5.0], [2.0, 3.0]]
    assert golden.run(torch.Tensor.__getitem__, (x, (slice(None), torch.tensor(1)))).outputs.tolist() == [1, 3, 5]


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (torch.rand, (3,)),
        (torch.Tensor.normal_, (torch.zeros(3),)),
        (F.dropout, (torch.ones(8),)),
        (torch.bernoulli, (torch.full((3,), 0.5),)),
    ],
)
def test_random_calls_are_not_comparable_and_leave_the_stream_alone(function: object, args: tuple) -> None:
    before = torch.get_rng_state()
    result = golden.run(function, args)
    assert not result.comparable
    assert result.random
    assert "random" in result.reason
    assert torch.equal(before, torch.get_rng_state())


def test_dropout_that_drops_nothing_is_compared() -> None:
    assert golden.run(F.dropout, (torch.ones(3),), {"training": False}).comparable
    q = torch.randn(1, 2, 4, 8)
    assert golden.run(F.scaled_dot_product_attention, (q, q, q)).comparable


def test_uninitialised_memory_is_not_comparable() -> None:
    assert "uninitialised" in golden.run(torch.empty, (3,)).reason


def test_errors_are_results() -> None:
    result = golden.run(torch.mm, (torch.ones(2, 3), torch.ones(2, 3)))
    assert not result.comparable
    assert "cannot run" in result.reason


def test_falls_back_when_double_is_missing() -> None:
    def only_single(x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("not implemented for 'Double'")
        return x + 1

    result = golden.run(only_single, (torch.ones(2).half(),))
    assert result.comparable
    assert result.outputs.dtype == torch.float32
    assert "no double-precision kernel" in result.note


def test_a_view_as_another_dtype_keeps_its_dtype() -> None:
    x = torch.ones(2)
    assert torch.equal(golden.run(torch.Tensor.view, (x, torch.int32)).outputs, x.view(torch.int32))


def test_the_limit_on_memory_is_a_reason() -> None:
    result = golden.run(torch.neg, (torch.ones(1000),), max_bytes=100)
    assert not result.comparable
    assert "limit" in result.reason


def test_modes_of_the_calling_thread_do_not_matter() -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        w = torch.ones(2, 2, requires_grad=True)
        result = golden.run(torch.mm, (x, w), grad_outputs=[x])
        assert result.outputs.dtype == torch.float64
        assert result.grad_inputs[1] is not None
    with torch.inference_mode():
        assert golden.run(torch.mm, (x, x)).comparable


def test_many_threads_at_once() -> None:
    x = torch.randn(32, 32, requires_grad=True)
    expected = golden.run(torch.mm, (x, x), grad_outputs=[x]).grad_inputs[0]
    wrong: list[int] = []

    def work() -> None:
        for _ in range(10):
            if not torch.equal(golden.run(torch.mm, (x, x), grad_outputs=[x]).grad_inputs[0], expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_running_statistics_are_updated_on_the_copy() -> None:
    mean, var = torch.zeros(3), torch.ones(3)
    x = torch.randn(8, 3)
    result = golden.run(F.batch_norm, (x, mean, var), {"training": True})
    assert mean.sum() == 0
    torch.testing.assert_close(result.inputs_after[0][1], x.double().mean(0) * 0.1)
