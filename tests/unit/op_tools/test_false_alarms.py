"""Correct results that were called wrong on CUDA, and their neighbours that are wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from op_tools.judge import golden, verdict
from op_tools.judge.noise import Noise, Signs
from op_tools.judge.rounding import precision_of


def judged(name: str, call: Any, args: tuple[Any, ...], sent: Any = None, **parts: Any) -> str:
    result = golden.run(call, args, {}, name=name, grad_outputs=None if sent is None else [sent], device="cuda")
    return verdict.judge_call(name, result, **parts).verdict


def test_absolute_values_of_complex_numbers_are_computed() -> None:
    z = 5 * torch.randn(400, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    absolute = (z.real**2 + z.imag**2).sqrt()
    assert judged("torch.abs", torch.abs, (z,), outputs=absolute) == verdict.RIGHT
    assert judged("torch.sgn", torch.sgn, (z,), outputs=z / absolute) == verdict.RIGHT
    assert judged("torch.abs", torch.abs, (z,), outputs=absolute * (1 + 2e-6)) == verdict.WRONG
    x = z.real.contiguous()  # of real numbers they are exact
    assert judged("torch.abs", torch.abs, (x,), outputs=torch.nextafter(x.abs(), torch.tensor(99.0))) == verdict.WRONG


def test_the_smallest_numbers_of_float64_have_a_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (15 * torch.randn(2, n, 4, dtype=torch.float64, generator=generator) for n in (3, 5))

    signs = torch.randn(2, 3, 5, dtype=torch.float64, generator=generator).sign()

    def attended(q: torch.Tensor, k: torch.Tensor, off: float = 0.0) -> torch.Tensor:
        scores = q @ k.mT
        return (scores * (1 + off * signs) if off else scores).softmax(-1)

    exact = attended(q, k)
    assert bool(((exact > 0) & (exact < 1e-200)).any())
    assert judged("torch.softmax", attended, (q, k), outputs=attended(q, k, 1.01 * 2**-53)) == verdict.RIGHT
    assert judged("torch.softmax", attended, (q, k), outputs=attended(q, k, 2**-44)) == verdict.WRONG


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_subnormal_numbers_on_the_way_are_rounded_to_their_distance(dtype: torch.dtype) -> None:
    x = torch.linspace(-98, -90, 300).to(dtype)

    def thousandfold(x: torch.Tensor) -> torch.Tensor:
        return x.exp() * 1000.0  # exp(-98) has one or two binary digits left in bfloat16, eight in float32

    found = thousandfold(x)
    off = (found.double() / thousandfold(x.double()) - 1).abs()
    assert float(off[found > 2 * torch.finfo(dtype).tiny].max()) > 8 * torch.finfo(dtype).eps
    assert judged("torch.exp", thousandfold, (x,), outputs=found) == verdict.RIGHT
    assert judged("torch.exp", thousandfold, (x,), outputs=found * 1.5) == verdict.WRONG


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_overflows_on_the_way(dtype: torch.dtype) -> None:
    x = torch.full((4,), 6.15, dtype=dtype, requires_grad=True)
    y = torch.full((4,), torch.finfo(dtype).tiny, dtype=dtype, requires_grad=True)
    sent = torch.full((4,), 0.05, dtype=dtype)
    found = torch.autograd.grad(torch.fmod(x, y), (x, y), sent)
    assert bool(found[1].isinf().all())  # 6 / 1e-38; times 0.05 it would be a number
    assert judged("torch.fmod", torch.fmod, (x, y), sent, grad_inputs=list(found)) == verdict.RIGHT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_that_are_stored_between_two_kernels(dtype: torch.dtype) -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        x, w, sent = (torch.randn(*s, generator=generator).to(dtype) for s in ((5, 10, 5), (10,), (5, 10, 5)))
        x, w = x.requires_grad_(), w.requires_grad_()
        products = torch.where(x < 0, x * sent, 0).detach()  # stored in the half type, summed in float32
        found = [torch.where(x < 0, w[None, :, None] * sent, sent).detach(), products.float().sum((0, 2)).to(dtype)]
        assert judged("torch.prelu", F.prelu, (x, w), sent, grad_inputs=found) == verdict.RIGHT
        found[1][0] += 2
        assert judged("torch.prelu", F.prelu, (x, w), sent, grad_inputs=found) == verdict.WRONG


def test_complex_numbers_too_large_for_the_dtype() -> None:
    z = torch.tensor([300 + 200j, 1 + 1j], dtype=torch.complex64)
    right = (z.to(torch.complex128) ** 2).to(torch.complex64)
    small = torch.view_as_complex(torch.view_as_real(right).half())
    spoiled = small.clone()
    spoiled[0] = complex(float("nan"), float("nan"))
    half = torch.view_as_complex(torch.view_as_real(z).half())
    for result, expected in ((small, verdict.RIGHT), (spoiled, verdict.RIGHT), (small * 0, verdict.WRONG)):
        assert judged("torch.square", torch.square, (half,), outputs=result) == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["sigmoid", "tanh"])
def test_gradients_whose_steps_are_in_a_half_type(name: str, dtype: torch.dtype) -> None:
    """CUDA's kernels of these two round after each product."""
    function = getattr(torch, name)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        x, sent = (torch.randn(20_000, generator=generator).to(dtype) for _ in range(2))
        y = function(x)
        found = sent * (1 - y) * y if name == "sigmoid" else sent * (1 - y * y)
        call = (f"torch.{name}", function, (x.requires_grad_(),), sent)
        assert judged(*call, grad_inputs=[found]) == verdict.RIGHT
        found = torch.where(y.abs() < 0.7, found * 1.05, found)
        assert judged(*call, grad_inputs=[found]) == verdict.WRONG


def test_values_that_are_whole_numbers_are_no_places() -> None:
    x = torch.tensor([[2, 2, 2, 1]])
    assert judged("torch.max", torch.max, (x, 1), outputs=(torch.tensor([2]), torch.tensor([2]))) == verdict.RIGHT
    assert judged("torch.max", torch.max, (x, 1), outputs=(torch.tensor([0]), torch.tensor([0]))) == verdict.WRONG
    assert judged("torch.max", torch.max, (x,), outputs=torch.tensor(0)) == verdict.WRONG


def test_overflow_on_the_way_beside_a_nan() -> None:
    base = torch.tensor([300.0, -1.0], dtype=torch.float16)
    exponent = torch.tensor([2.5, 0.5], dtype=torch.float16)  # the second one is NaN

    def call(base: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
        return base.pow(exponent) * 1e-3

    stored = torch.tensor([float("inf"), float("nan")], dtype=torch.float16)  # 300 ** 2.5 is beyond float16
    assert judged("call", call, (base, exponent), outputs=stored) == verdict.RIGHT


@pytest.mark.parametrize("length", [40, 700, 5000])
def test_running_sums_in_a_loop(length: int) -> None:
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(6, length, generator=generator) * torch.exp(4 * torch.randn(6, length, generator=generator))
        sums = torch.zeros(6, length)
        for i in range(length):
            sums[:, i] = (sums[:, i - 1] if i else 0) + x[:, i]
        assert judged("torch.cumsum", torch.cumsum, (x, -1), outputs=sums) == verdict.RIGHT
        sums[3, length // 2 :] += 1e-4 * sums[3].abs().max()
        assert judged("torch.cumsum", torch.cumsum, (x, -1), outputs=sums) == verdict.WRONG


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("adjoint", [True, False])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_results_that_are_conjugate_views(dtype: torch.dtype, left: bool, adjoint: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    factors, pivots = torch.linalg.lu_factor(torch.randn(5, 5, dtype=dtype, generator=generator))
    b = torch.randn(5, 5, dtype=dtype, generator=generator)

    def solve(*args: torch.Tensor) -> torch.Tensor:
        return torch.linalg.lu_solve(*args, left=left, adjoint=adjoint)

    found = solve(factors, pivots, b).resolve_conj()
    assert judged("torch.linalg.lu_solve", solve, (factors, pivots, b), outputs=found) == verdict.RIGHT
    found[2, 3] *= 1 + 1e-3
    assert judged("torch.linalg.lu_solve", solve, (factors, pivots, b), outputs=found) == verdict.WRONG


def test_arguments_that_are_conjugate_or_negative_views() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, sent = (torch.randn(*s, dtype=torch.complex64, generator=generator) for s in ((6, 7), (7, 5), (6, 5)))
    a, b = a.requires_grad_(), b.requires_grad_()

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.conj() @ b + (a.conj().imag @ b.conj().imag)

    found = [g.resolve_conj() for g in torch.autograd.grad(multiply(a, b), (a, b), sent)]
    assert judged("torch.matmul", multiply, (a, b), sent, grad_inputs=found) == verdict.RIGHT
    found[0][2, 3] *= 1 + 1e-3
    assert judged("torch.matmul", multiply, (a, b), sent, grad_inputs=found) == verdict.WRONG


def test_an_operator_that_calls_one_which_autocast_rounds() -> None:
    """Autocast does not know `affine_grid`, but the product of matrices inside it is done in bfloat16."""
    torch.manual_seed(0)
    theta, size = torch.randn(4, 2, 3) * 0.1 + torch.eye(2, 3), [4, 1, 28, 28]
    low = theta.bfloat16()
    grid = torch.nn.functional.affine_grid(torch.eye(2, 3)[None].double(), [1, 1, 28, 28], False).view(-1, 2)
    base = torch.cat([grid, torch.ones(784, 1).double()], 1).bfloat16()
    found = (base.float() @ low.float().mT).bfloat16().view(4, 28, 28, 2)
    name = "torch.nn.functional.affine_grid"
    rounded = golden.autocast_rounds_to(name, torch.bfloat16, found, [theta])
    assert rounded == torch.bfloat16
    options = {"device": "cuda", "name": name, "autocast": torch.bfloat16}
    arguments = (theta, size, False)
    result = golden.run(torch.nn.functional.affine_grid, arguments, rounded_to=rounded, **options)
    judged = verdict.judge_call(name, result, outputs=found)
    assert judged.verdict == verdict.RIGHT, judged.reason
    assert golden.autocast_rounds_to("torch.add", torch.bfloat16, found, [low, theta]) is None, "low came in"


# -- correct results of other algorithms, orders and step widths -------------------------------------------------------


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_distances_by_a_product_of_matrices(offset: float) -> None:
    z = (3 * normal(40, 8) + offset).requires_grad_()
    sent = normal(40, 40, seed=1)
    distances = torch.cdist(z, z)
    (found,) = torch.autograd.grad(distances, z, sent)

    def call(z: torch.Tensor) -> torch.Tensor:
        return torch.cdist(z, z)

    off = distances.detach().clone()
    assert float(off.diagonal().max()) > 1e-3  # the root of a rounding error
    assert judged("torch.cdist", call, (z,), sent, outputs=off, grad_inputs=[found]) == verdict.RIGHT
    off[3, 7] *= 1.01
    assert judged("torch.cdist", call, (z,), outputs=off) == verdict.WRONG
    off[3, 7] /= 1.01
    off[3, 3] += 0.03 * float(z.detach().norm(dim=-1)[3])
    assert judged("torch.cdist", call, (z,), outputs=off) == verdict.WRONG


def test_what_is_exactly_zero_has_a_bound() -> None:
    """Its probes move it by so much more than nothing that their squares were infinite."""
    x = normal(100)

    def call(x: torch.Tensor) -> torch.Tensor:
        return (x * 3).exp() - (x * 3).exp()

    assert judged("call", call, (x,), outputs=1e-7 * (x * 3).exp()) == verdict.RIGHT
    assert judged("call", call, (x,), outputs=1e-2 * (x * 3).exp()) == verdict.WRONG


def test_products_that_overflow_on_the_way() -> None:
    x = torch.tensor([[1e30, 1e30, 0.0, 2.0], [1e30, 1e30, 1e-30, 1e-30], [1.0, 2.0, 3.0, 4.0]])
    found = torch.tensor([float("nan"), float("inf"), 24.0])
    assert judged("torch.prod", torch.prod, (x, 1), outputs=found) == verdict.RIGHT
    assert judged("torch.cumprod", torch.cumprod, (x, 1), outputs=torch.cumprod(x, 1)) == verdict.RIGHT
    found[2] = float("inf")
    assert judged("torch.prod", torch.prod, (x, 1), outputs=found) == verdict.WRONG
    squares = torch.full((8,), 1e25)
    assert judged("torch.norm", torch.norm, (squares,), outputs=torch.tensor(float("inf"))) == verdict.RIGHT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["remainder", "fmod", "floor_divide"])
def test_quotients_near_whole_numbers(name: str, dtype: torch.dtype) -> None:
    call = getattr(torch, name)
    y = normal(4000, seed=1).to(dtype)
    x = torch.cat([20 * normal(2000), y[2000:].float() * torch.arange(2000) % 30]).to(dtype)
    if name != "floor_divide":
        x, y = x.requires_grad_(), y.requires_grad_()
    found = call(x, y)
    sent = normal(4000, seed=2).to(dtype) if found.requires_grad else None
    parts: dict[str, Any] = {"outputs": found.detach().clone()}
    if sent is not None:
        parts["grad_inputs"] = list(torch.autograd.grad(found, (x, y), sent))
    assert judged(f"torch.{name}", call, (x, y), sent, **parts) == verdict.RIGHT
    assert judged(f"torch.{name}", call, (x, 0.3), outputs=call(x, 0.3).detach()) == verdict.RIGHT
    if name != "floor_divide":
        parts["outputs"][parts["outputs"].abs().argmax()] *= 1.05
        assert judged(f"torch.{name}", call, (x, y), outputs=parts["outputs"]) == verdict.WRONG


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["silu", "sigmoid"])
def test_activations_whose_exponential_overflows(name: str, dtype: torch.dtype) -> None:
    x = torch.linspace(-200, 20, 2000).to(dtype).requires_grad_()
    call = getattr(F, name)
    found, sent = call(x), normal(2000).to(dtype)
    parts = {"outputs": found.detach(), "grad_inputs": list(torch.autograd.grad(found, x, sent))}
    assert judged(f"torch.nn.functional.{name}", call, (x,), sent, **parts) == verdict.RIGHT
    high = torch.linspace(-86, -80, 100).to(dtype)
    assert judged(f"torch.nn.functional.{name}", call, (high,), outputs=torch.zeros_like(high)) == verdict.WRONG


def test_results_that_the_algorithm_of_a_device_does_not_compute() -> None:
    a, b = normal(6, 3), normal(6, 2, seed=1)
    found = torch.linalg.lstsq(a, b, driver="gels")  # CUDA's only one: residuals, but no rank
    assert judged("torch.linalg.lstsq", torch.linalg.lstsq, (a, b), outputs=found) == verdict.RIGHT
    wrong = (found.solution * 1.01, *found[1:])
    assert judged("torch.linalg.lstsq", torch.linalg.lstsq, (a, b), outputs=wrong) == verdict.WRONG


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_rows_that_attend_to_nothing_have_no_value(kind: str) -> None:
    q, k, v = (normal(2, 2, 6, 8, seed=n).requires_grad_() for n in range(3))
    seen = torch.ones(6, 6, dtype=torch.bool)
    seen[2] = False
    mask = seen if kind == "bool" else torch.zeros(6, 6).masked_fill(~seen, float("-inf"))
    name, call = "torch.nn.functional.scaled_dot_product_attention", F.scaled_dot_product_attention
    means = (q @ k.mT / 8**0.5).masked_fill(~seen, -1e30).softmax(-1) @ v  # CUDA's kernel: of all values
    sent = normal(2, 2, 6, 8, seed=9)
    grads = [*torch.autograd.grad(means, (q, k, v), sent), None]
    for value in (means.detach()[:, :, 2].clone(), torch.zeros(8), torch.tensor(float("nan"))):
        found = means.detach().clone()
        found[:, :, 2] = value
        assert judged(name, call, (q, k, v, mask), sent, outputs=found, grad_inputs=grads) == verdict.RIGHT
        found[0, 1, 3, 4] *= 1.01
        assert judged(name, call, (q, k, v, mask), outputs=found) == verdict.WRONG
    result = golden.run(call, (q, k, v, mask), name=name, device="cuda")
    (row,) = verdict.judge_call(name, result, outputs=means.detach()).rows
    assert "32 elements not compared" in row.error_info


def test_wrapped_results_are_compared_by_what_they_hold() -> None:
    from torch.distributed._functional_collectives import _wrap_tensor_autograd

    from op_tools.copies.operands import Opaque

    x = normal(5, 3)
    assert judged("wrap", _wrap_tensor_autograd, (x,), outputs=x) == verdict.RIGHT
    assert judged("wrap", _wrap_tensor_autograd, (x,), outputs=x + 1) == verdict.WRONG
    # the device's own wrapper cannot be copied: nothing is known of it
    assert judged("wrap", _wrap_tensor_autograd, (x,), outputs=Opaque("AsyncCollectiveTensor")) == verdict.RIGHT


def test_products_too_large_for_the_dtype() -> None:
    a = 1e25 * normal(6, 8)
    assert judged("torch.mm", torch.mm, (a, a.mT), outputs=a @ a.mT) == verdict.RIGHT
    assert judged("torch.mm", torch.mm, (a, a.mT), outputs=torch.zeros(6, 6)) == verdict.WRONG


@pytest.mark.parametrize("kind", [torch.nn.GRU, torch.nn.RNN])
def test_gradients_of_weights_added_up_in_a_half_type(kind: Any) -> None:
    low = torch.bfloat16
    net = kind(4, 8)
    call = torch.gru if kind is torch.nn.GRU else torch.rnn_tanh
    generator = torch.Generator().manual_seed(0)
    weights = [torch.rand(p.shape, generator=generator).sub(0.2).div(3).requires_grad_() for p in net.parameters()]
    x, start = normal(120, 1, 4).abs(), torch.zeros(1, 1, 8)
    args = (x, start, weights, True, 1, 0.0, True, False, False)
    rounded = [w.detach().to(low).requires_grad_() for w in weights]
    found = call(x.to(low), start.to(low), rounded, *args[3:])
    sent = [torch.ones_like(t) for t in found]
    grads = [None, None, *[g.float() for g in torch.autograd.grad(found, rounded, sent)]]
    name = f"torch.{call.__name__}"
    result = golden.run(call, args, name=name, grad_outputs=sent, device="cuda", autocast=low, rounded_to=low)
    outputs = tuple(t.detach() for t in found)
    assert verdict.judge_call(name, result, outputs=outputs, grad_inputs=grads).verdict == verdict.RIGHT


@pytest.mark.parametrize("seed", [2, 6])
def test_a_recurrent_network_that_is_probed_a_few_times_for_want_of_time(seed: int) -> None:
    low, width = torch.bfloat16, 8
    generator = torch.Generator().manual_seed(seed)
    shapes = ((3 * width, 32), (3 * width, width), (3 * width,), (3 * width,))
    weights = [torch.rand(shape, generator=generator).sub(0.5).div(1.5).requires_grad_() for shape in shapes]
    x, start = torch.randn(12, 32, 32, generator=generator).requires_grad_(), torch.zeros(1, 32, width)
    args = (x, start, weights, True, 1, 0.0, True, False, False)
    rounded = [t.detach().to(low).requires_grad_() for t in (x, *weights)]
    found = torch.gru(rounded[0], start.to(low), rounded[1:], *args[3:])
    sent = [torch.randn(found[0].shape, generator=generator).to(low), torch.zeros_like(found[1])]
    grads = [g.float() for g in torch.autograd.grad(found, rounded, sent)]
    result = golden.run(
        torch.gru, args, name="torch.gru", grad_outputs=sent, device="cuda", autocast=low, rounded_to=low
    )

    def judge(first: torch.Tensor) -> str:
        grad_inputs = [first, None, *grads[1:]]
        return verdict.judge_call("torch.gru", result, grad_inputs=grad_inputs, max_seconds=0.0).verdict

    assert judge(grads[0]) == verdict.RIGHT
    assert judge(grads[0].roll(1, 0)) == verdict.WRONG


# -- faults that a looser bound would hide -----------------------------------------------------------------------------


@pytest.mark.parametrize("which", [1, 2])
def test_statistics_in_float32_of_numbers_in_a_half_type(which: int) -> None:
    x = normal(32, 8, 10, 10).half() + 1
    args = [x, torch.zeros(8), torch.ones(8), torch.ones(8), torch.zeros(8), True, 0.1, 1e-5]
    name, low = "torch.nn.functional.batch_norm", torch.float16
    before = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)
    result = golden.run(F.batch_norm, before, name=name, device="cuda", autocast=low)
    found = F.batch_norm(*args)
    assert verdict.judge_call(name, result, outputs=found, inputs_after=(args, {})).verdict == verdict.RIGHT
    args[which] = args[which] * (1 + 1e-4)
    assert verdict.judge_call(name, result, outputs=found, inputs_after=(args, {})).verdict == verdict.WRONG


@pytest.mark.parametrize("name", ["torch.sort", "torch.Tensor.sort", "torch.argsort"])
def test_a_sort_that_is_asked_to_be_stable(name: str) -> None:
    x = normal(200).mul(3).round()
    values, right = torch.sort(x, stable=True)
    other = 199 - torch.sort(x.flip(0), stable=True).indices
    twice = right.clone()
    twice[3] = twice[2]
    call = getattr(torch.Tensor if "Tensor" in name else torch, name.rsplit(".", 1)[1])
    for stable in (True, False):
        result = golden.run(call, (x,), {"stable": stable}, name=name, device="cuda")
        for indices in (right, other, twice):
            found = indices if "arg" in name else (values, indices)
            expected = indices is right or (indices is other and not stable)
            verdict_of = verdict.judge_call(name, result, outputs=found).verdict
            assert verdict_of == (verdict.RIGHT if expected else verdict.WRONG)


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 2, 0), (3, 2, 1), (3, 1, 1)])
def test_ties_are_shared_within_a_window(kernel: int, stride: int, padding: int) -> None:
    x = F.relu(normal(2, 2, 9, 9) - 0.7).bfloat16().float().requires_grad_()
    shape = F.max_pool2d(x, kernel, stride, padding).shape
    sent = normal(*shape, seed=1)
    flipped = x.detach().flip(-1, -2).requires_grad_()
    args = (x, kernel, stride, padding)
    # from the other corner the last of equal values is the first; the windows are the same if they fill the image
    size = x.shape[-1] + 2 * padding
    if (size - kernel) % stride == 0:
        pooled = F.max_pool2d(flipped, kernel, stride, padding)
        (last,) = torch.autograd.grad(pooled, flipped, sent.flip(-1, -2))
        found = last.flip(-1, -2)
    else:
        (found,) = torch.autograd.grad(F.max_pool2d(*args), x, sent)
    name = "torch.nn.functional.max_pool2d"
    assert judged(name, F.max_pool2d, args, sent, grad_inputs=[found.clone()]) == verdict.RIGHT
    zero = (x.detach()[0, 0] == 0) & (found[0, 0] != 0)
    here, there = zero.nonzero()[0], (x.detach()[1, 1] == 0).nonzero()[-1]
    moved = found.clone()  # to an equal value in another image
    moved[1, 1, there[0], there[1]] += moved[0, 0, here[0], here[1]]
    moved[0, 0, here[0], here[1]] = 0
    assert judged(name, F.max_pool2d, args, sent, grad_inputs=[moved]) == verdict.WRONG


def test_ties_are_shared_within_a_row() -> None:
    x = torch.tensor([[1.0, 2, 2], [2, 1, 2], [0, 0, 2]], requires_grad=True)
    sent = torch.tensor([1.0, 2.0, 3.0])

    def of(*rows: list[float]) -> str:
        result = golden.run(torch.max, (x, 1), name="torch.max", grad_outputs=[sent, None], device="cuda")
        return verdict.judge_call("torch.max", result, grad_inputs=[torch.tensor(rows)]).verdict

    assert of([0, 0, 1.0], [0, 0, 2.0], [0, 0, 3.0]) == verdict.RIGHT
    assert of([0, 0, 0.0], [2.0, 0, 1.0], [0, 0, 3.0]) == verdict.WRONG


@pytest.mark.parametrize("low", [torch.bfloat16, None])
@pytest.mark.parametrize("name", ["torch.mm", "torch.nn.functional.linear"])
@pytest.mark.parametrize("length", [32, 64, 512])
def test_products_that_are_added_up_in_bfloat16(length: int, name: str, low: torch.dtype | None) -> None:
    a, b = normal(32, length).bfloat16(), normal(length, 32, seed=1).bfloat16()
    summed = torch.zeros(32, 32, dtype=torch.bfloat16)
    for k in range(length):
        summed = (summed.float() + a[:, k : k + 1].float() * b[k : k + 1].float()).bfloat16()
    part = length // 4
    parts = [(a[:, n : n + part].float() @ b[n : n + part].float()).bfloat16() for n in range(0, length, part)]
    few = (parts[0] + parts[1]) + (parts[2] + parts[3])  # the sum in four parts, each of them stored
    exact = (a.double() @ b.double()).float()
    if low is None:
        a, b, summed = a.float(), b.float(), summed.float()
    call = F.linear if "linear" in name else torch.mm
    args = (a, b.mT if "linear" in name else b)
    assert judged(name, call, args, outputs=summed) == verdict.WRONG
    assert judged(name, call, args, outputs=few if low is not None else exact) == verdict.RIGHT


def test_means_of_many_numbers_that_are_added_up_in_bfloat16() -> None:
    source = (1.5 + 0.1 * normal(4000, 3)).bfloat16()
    x, index = torch.zeros(2, 3).bfloat16(), torch.zeros(4000, dtype=torch.int64)
    call, name = torch.Tensor.index_reduce_, "torch.Tensor.index_reduce_"
    args = (0, index, source, "mean")
    result = golden.run(call, (x, *args), {"include_self": False}, name=name, device="cpu")
    found = x.clone().index_reduce_(*args, include_self=False)
    assert float(found[0, 0]) < 0.2  # the CPU's own
    assert verdict.judge_call(name, result, outputs=found).verdict == verdict.WRONG
    found[0] = source.double().mean(0).bfloat16()
    assert verdict.judge_call(name, result, outputs=found).verdict == verdict.RIGHT


def test_numbers_beside_complex_values_stay_real() -> None:
    """`istft` compares its window with a number, which has no order among complex ones."""
    x = torch.randn(5, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    window = torch.ones(8)
    found = torch.istft(x, 8, window=window)
    result = golden.run(torch.istft, (x, 8), {"window": window}, device="cpu", name="torch.istft")
    off = found.clone()
    off[2] *= 1.01
    assert verdict.judge_call("torch.istft", result, outputs=found).verdict == verdict.RIGHT
    assert verdict.judge_call("torch.istft", result, outputs=off).verdict == verdict.WRONG
    assert type(Noise(precision_of(torch.complex64), frozenset(), Signs(0))._scalar(1e-11)) is float


def test_real_parts_of_complex_products() -> None:
    """The gradient of a real factor is a real part: what is left of it where the parts cancel is rounding."""
    generator = torch.Generator().manual_seed(0)
    z, sent = (torch.randn(4000, dtype=torch.complex64, generator=generator) for _ in range(2))
    sent = torch.where(torch.arange(4000) % 2 == 0, 1j * z * (1 + 1e-6), sent)  # at right angles, nearly
    real = torch.rand(4000, generator=generator).requires_grad_()
    (grad,) = torch.autograd.grad(z * real, real, sent)
    result = golden.run(torch.mul, (z, real), name="torch.mul", grad_outputs=[sent])
    assert verdict.judge_call("torch.mul", result, grad_inputs=[None, grad]).verdict == verdict.RIGHT
    grad[1] *= 1 + 1e-4
    assert verdict.judge_call("torch.mul", result, grad_inputs=[None, grad]).verdict == verdict.WRONG


def test_a_backward_without_a_double_precision_kernel() -> None:
    x, scale = torch.randn(8, requires_grad=True), torch.full((1,), 0.05, requires_grad=True)
    call = (x, scale, torch.zeros(1, requires_grad=True), -128, 127, 0.1)
    kept = golden.run(torch._fake_quantize_learnable_per_tensor_affine, call, keep_graph=True)
    assert kept.graph is not None
    result = golden.backward(kept, [torch.ones(8)])
    assert result.comparable
    assert result.grad_inputs is not None
    assert result.grad_inputs[0] is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_eps_of_rms_norm_is_that_of_the_dtype_it_computes_in(dtype: torch.dtype) -> None:
    x = (torch.linspace(-3, 3, 16) * 2**-10).view(2, 8).to(dtype)

    def normed(x: torch.Tensor, eps: float | None = None) -> torch.Tensor:
        return F.rms_norm(x, (8,), None, eps)

    name = "torch.nn.functional.rms_norm"
    result = golden.run(F.rms_norm, (x, (8,)), {}, name=name)
    assert verdict.judge_call(name, result, outputs=normed(x)).verdict == verdict.RIGHT
    other = normed(x, 10 * torch.finfo(dtype).eps)
    assert verdict.judge_call(name, result, outputs=other).verdict == verdict.WRONG
