"""Shows, on a CUDA device alone, each inaccuracy that the ledgers claim of PyTorch's CUDA kernels.

    python benchmarks/cuda_evidence.py [--device cuda] [--only NAME]

No verdict, no golden run and no CPU takes part: a kernel is compared with float64 on the same device, and beside it
another way to the same numbers on the same device, which is precise. A claim is shown where the kernel is far off and
the other way is not. One line each; exit status 1 where one is not shown. With `--device cpu` all formulas are run,
which says nothing about CUDA.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
HALF = (torch.bfloat16, torch.float16)
CLEARLY = 3.0  # how many times as far off as the other way the kernel must be


@dataclasses.dataclass(frozen=True)
class Found:
    """Errors of the kernel and of the other way, in units in the last place, or what was seen instead."""

    compared: str
    kernel: float = 0.0
    other: float = 0.0
    seen: bool | None = None
    """Set where there is no error to measure: memory that was not written, a call that is refused."""

    @property
    def shown(self) -> bool:
        """Whether the claim holds here."""
        return self.seen if self.seen is not None else self.kernel > max(1.5, CLEARLY * self.other)


Claim = Callable[[torch.device], Iterator[Found]]
CLAIMS: dict[str, Claim] = {}


def claim(check: Claim) -> Claim:
    CLAIMS[check.__name__] = check
    return check


# --- measuring ------------------------------------------------------------------------------------------


def ulps(result: Any, truth: Any) -> float:
    """The largest error in units in the last place of the result's dtype."""
    if isinstance(result, (tuple, list)):
        return max(ulps(a, b) for a, b in zip(result, truth))
    if result.is_complex():
        result, truth = torch.view_as_real(result.resolve_conj()), torch.view_as_real(truth.resolve_conj())
    info = torch.finfo(result.dtype)
    wide, truth = result.detach().double(), truth.detach().double()
    step = torch.exp2(truth.abs().clamp(min=info.smallest_normal).log2().floor()) * info.eps
    within = truth.abs() <= info.max
    error = ((wide - truth).abs() / step).nan_to_num(nan=float("inf"))
    return float(torch.where(within, error, torch.zeros_like(error)).max())


def rounded(values: Any, like: Any) -> Any:
    if isinstance(values, (tuple, list)):
        return [rounded(a, b) for a, b in zip(values, like)]
    return values.detach().to(like.dtype)


def cast(value: Any, real: torch.dtype) -> Any:
    """The same numbers in another precision; whole numbers stay."""
    if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
        kinds = {torch.float32: torch.complex64, torch.float64: torch.complex128}
        return value.detach().to(kinds[real] if value.is_complex() else real).requires_grad_(value.requires_grad)
    return value


def against_float32(what: str, call: Callable[..., Any], *args: Any) -> Found:
    """A kernel of a half type beside the same call in float32, rounded once; the truth is the call in float64."""
    wide = [[cast(a, dtype) for a in args] for dtype in (torch.float32, torch.float64)]
    truth, single = call(*wide[1]), call(*wide[0])
    try:
        result = call(*args)
    except NotImplementedError:
        if args[0].device.type != "cpu":
            raise
        result = _as_stored(single, args[0].dtype)  # the formulas are run all the same
    other = rounded(single, result)
    return Found(f"{what}: {_name(args)} against float32, rounded", ulps(result, truth), ulps(other, truth))


SEEDS = range(1, 21)


def worst(tries: Iterable[Found]) -> Found:
    """The one with the largest error: whether a sum meets a bad rounding depends on the numbers."""
    return max(tries, key=lambda found: found.kernel)


def _as_stored(values: Any, dtype: torch.dtype) -> Any:
    return [_as_stored(v, dtype) for v in values] if isinstance(values, list) else values.detach().to(dtype)


def _name(args: Any) -> str:
    dtype = next(a.dtype for a in args if isinstance(a, Tensor) and (a.is_floating_point() or a.is_complex()))
    return str(dtype).removeprefix("torch.")


def gradients(call: Callable[..., Tensor], seed: int = 0) -> Callable[..., list[Tensor]]:
    """Gradients of a call for one random incoming gradient, the same numbers in every precision."""

    def run(*args: Any) -> list[Tensor]:
        leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
        result = call(*args)
        return list(torch.autograd.grad(result, leaves, incoming(result, seed)))

    return run


def incoming(result: Tensor, seed: int = 0) -> Tensor:
    kind = torch.complex64 if result.is_complex() else torch.float32
    drawn = torch.randn(result.shape, generator=torch.Generator().manual_seed(seed), dtype=kind)
    coarse = drawn if result.is_complex() else drawn.bfloat16()  # exact in every dtype
    if result.is_complex():
        coarse = torch.view_as_complex(torch.view_as_real(drawn).bfloat16().float())
    return coarse.to(result.device).to(result.dtype)


def numbers(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    """Normal numbers, made on the CPU: the same on every device."""
    kind = torch.complex64 if dtype.is_complex else torch.float32
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=kind).to(dtype).to(device)


# --- half types: inside of kernels ------------------------------------------------------------------------


def _bias_gradient(call: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, bias_dtype: torch.dtype) -> Found:
    weight = torch.ones(x.shape[1], device=x.device, dtype=bias_dtype, requires_grad=True)
    bias = torch.zeros(x.shape[1], device=x.device, dtype=bias_dtype, requires_grad=True)
    dims = (0, *range(2, x.dim()))
    result = call(x, weight, bias)
    sent = incoming(result)
    found = torch.autograd.grad(result, bias, sent)[0]
    truth = sent.double().sum(dims)
    other = sent.float().sum(dims).to(found.dtype)
    return Found(
        f"gradient of a {_name([bias])} bias, {_name([x])} {tuple(x.shape)}, against grad.float().sum()",
        ulps(found, truth),
        ulps(other, truth),
    )


def _without_cudnn(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with torch.backends.cudnn.flags(enabled=False):
            return norm(x, None, None, weight, bias, True)

    return call


@claim
def batch_norm_bias_gradient(device: torch.device) -> Iterator[Found]:
    call = _without_cudnn(F.batch_norm)
    for dtype in HALF:
        yield _bias_gradient(call, numbers(device, 32, 32, 14, 14, dtype=dtype), dtype)
    yield _bias_gradient(call, numbers(device, 32, 32, 14, 14, dtype=torch.bfloat16), torch.float32)  # as autocast does


@claim
def gradients_by_way_of_an_overflow(device: torch.device) -> Iterator[Found]:
    gradients = []
    for dtype in (torch.float16, torch.float32):
        x = torch.tensor([200.0, 175.0, 2.0], dtype=dtype, device=device, requires_grad=True)
        torch.masked.prod(x).backward()
        gradients.append(float(x.grad[2]))  # type: ignore[index]
    half, single = gradients
    yield Found(f"masked.prod: gradient {half:g} in float16, {single:g} in float32", seen=half > single == 35_000.0)


@claim
def gradients_that_should_not_be(device: torch.device) -> Iterator[Found]:
    gradients = []
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.tensor(-3.0, dtype=dtype, device=device, requires_grad=True)
        (x ** torch.tensor(-1.0078125, dtype=dtype, device=device)).backward()
        gradients.append(float(x.grad))  # type: ignore[arg-type]
    half, single = gradients
    seen = math.isfinite(half) and math.isnan(single)
    yield Found(f"pow: gradient {half:g} in bfloat16, {single:g} in float32", seen=seen)


@claim
def instance_norm_bias_gradient(device: torch.device) -> Iterator[Found]:
    call = _without_cudnn(F.instance_norm)
    for dtype in HALF:
        yield _bias_gradient(call, numbers(device, 8, 5, 14, 14, dtype=dtype), dtype)


@claim
def group_norm(device: torch.device) -> Iterator[Found]:
    for dtype in HALF:
        x = numbers(device, 16, 8, 20, dtype=dtype) + 1
        yield against_float32("forward", lambda x: F.group_norm(x, 2), x)


@claim
def softmax_backward_data(device: torch.device) -> Iterator[Found]:
    for dtype in HALF:
        grad, output = numbers(device, 50, 40, dtype=dtype), numbers(device, 50, 40, dtype=dtype, seed=2).softmax(-1)

        def call(grad: Tensor, output: Tensor) -> Tensor:
            return torch.ops.aten._softmax_backward_data(grad, output, -1, grad.dtype)

        yield against_float32("(grad - sum) * output", call, grad, output)


@claim
def binary_cross_entropy(device: torch.device) -> Iterator[Found]:
    for dtype in HALF:
        x = numbers(device, 2000, dtype=dtype).sigmoid().requires_grad_()
        y = numbers(device, 2000, dtype=dtype, seed=2).sigmoid()
        call = functools.partial(F.binary_cross_entropy, reduction="none")
        if dtype == torch.bfloat16:
            yield against_float32("forward", call, x, y)
        yield against_float32("gradient", gradients(call), x, y)


@claim
def multi_margin_loss(device: torch.device) -> Iterator[Found]:
    target = torch.arange(5, device=device) % 10

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return F.multi_margin_loss(x, target, weight=weight)

    for dtype in (torch.bfloat16,):
        tries = (
            (numbers(device, 5, 10, dtype=dtype, seed=s), numbers(device, 10, dtype=dtype, seed=-s)) for s in SEEDS
        )
        yield worst(against_float32(f"mean, signed weights, worst of {len(SEEDS)}", call, *one) for one in tries)


@claim
def nll_loss_of_images(device: torch.device) -> Iterator[Found]:
    target = torch.arange(8 * 1600, device=device).view(8, 40, 40) % 3

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return F.nll_loss(x, target, weight)

    for dtype in HALF:
        tries = (
            (numbers(device, 8, 3, 40, 40, dtype=dtype, seed=s), numbers(device, 3, dtype=dtype, seed=-s).abs() + 0.1)
            for s in SEEDS
        )
        yield worst(against_float32(f"weighted mean, worst of {len(SEEDS)}", call, *one) for one in tries)


@claim
def cumprod_gradient(device: torch.device) -> Iterator[Found]:
    x = (numbers(device, 64, 30, dtype=torch.float16) * 0.3 + 1).requires_grad_()
    yield against_float32("gradient", gradients(lambda x: x.cumprod(0)), x)


@claim
def linspace(device: torch.device) -> Iterator[Found]:
    for dtype in HALF:
        found = torch.linspace(-2, 1, 50, dtype=dtype, device=device)
        wide = [torch.linspace(-2, 1, 50, dtype=d, device=device) for d in (torch.float32, torch.float64)]
        yield Found(
            f"{_name([found])} against float32, rounded", ulps(found, wide[1]), ulps(wide[0].to(dtype), wide[1])
        )


@claim
def logspace(device: torch.device) -> Iterator[Found]:
    for dtype in HALF:
        found = torch.logspace(0, 2, 4, dtype=dtype, device=device)
        wide = [torch.logspace(0, 2, 4, dtype=d, device=device) for d in (torch.float32, torch.float64)]
        yield Found(
            f"{_name([found])} against float32, rounded", ulps(found, wide[1]), ulps(wide[0].to(dtype), wide[1])
        )


@claim
def interpolate_gradient(device: torch.device) -> Iterator[Found]:
    for mode, dims in (("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3)):
        for dtype in HALF:
            x = numbers(device, 2, 3, *(4,) * dims, dtype=dtype).requires_grad_()
            call = functools.partial(F.interpolate, size=(11,) * dims, mode=mode)
            yield against_float32(f"gradient, {mode}", gradients(call), x)


@claim
def upsample_antialiased(device: torch.device) -> Iterator[Found]:
    for dtype in HALF:
        x = numbers(device, 2, 3, 24, 24, dtype=dtype).requires_grad_()
        call = functools.partial(F.interpolate, size=(7, 7), mode="bilinear", antialias=True)
        yield against_float32("forward", call, x)
        yield against_float32("gradient", gradients(call), x)


@claim
def grid_sample_gradient(device: torch.device) -> Iterator[Found]:
    for dims in (2, 3):
        for dtype in HALF:
            x = numbers(device, 2, 3, *(16,) * dims, dtype=dtype).requires_grad_()
            grid = (numbers(device, 2, *(9,) * dims, dims, dtype=dtype, seed=2) * 0.5).requires_grad_()
            call = functools.partial(F.grid_sample, align_corners=False)
            yield against_float32(f"gradients, {dims}d", gradients(call), x, grid)


@claim
def matrix_exp(device: torch.device) -> Iterator[Found]:
    for dtype in HALF:
        yield against_float32("forward", torch.matrix_exp, numbers(device, 20, 5, 5, dtype=dtype) * 2)


@claim
def fft_of_half(device: torch.device) -> Iterator[Found]:
    for name in ("fft", "ifft", "rfft", "ihfft"):
        yield _transform(name, numbers(device, 8, 256, dtype=torch.float16))
    for name, length in (("fft", 256), ("ifft", 256), ("irfft", 129), ("hfft", 129)):
        x = torch.view_as_complex(torch.view_as_real(numbers(device, 8, length, dtype=torch.complex64)).half())
        yield _transform(name, x)


def _transform(name: str, x: Tensor) -> Found:
    call = getattr(torch.fft, name)
    if x.device.type == "cpu":  # it has no such transform: the formulas are run all the same
        result = rounded(call(cast(x, torch.float32)), x.real if name in ("irfft", "hfft") else x.to(torch.complex32))
    else:
        result = call(x)
    truth, other = call(cast(x, torch.float64)), call(cast(x, torch.float32)).to(result.dtype)
    return Found(f"{name}, {_name([x])} against float32, rounded", ulps(result, truth), ulps(other, truth))


# --- float32 ------------------------------------------------------------------------------------------------


@claim
def recurrent_networks(device: torch.device) -> Iterator[Found]:
    for kind in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
        torch.manual_seed(0)
        net = kind(32, 64).to(device)
        x = numbers(device, 20, 8, 32)
        with torch.no_grad():
            found = net(x)[0]
            with torch.backends.cudnn.flags(enabled=False):
                other = net(x)[0]
                truth = net.double()(x.double())[0]
        size = torch.finfo(torch.float32).eps / 2 * truth.abs().max()  # an ulp of the largest: outputs cross zero
        errors = [float((y.double() - truth).abs().max() / size) for y in (found, other)]
        yield Found(
            f"{kind.__name__}, cuDNN against cudnn.flags(enabled=False), ulp of the largest output",
            errors[0],
            errors[1],
        )


@claim
def weight_gradient_of_a_convolution(device: torch.device) -> Iterator[Found]:
    x, sent = numbers(device, 2, 64, 16, 16), numbers(device, 2, 64, 16, 16, seed=2) * 1e-3
    shape = (64, 64, 3, 3)

    def gradient(x: Tensor, sent: Tensor) -> Tensor:
        return torch.nn.grad.conv2d_weight(x, shape, sent, padding=1)

    truth = gradient(x.double(), sent.double())
    size = torch.finfo(torch.float32).eps / 2 * truth.abs().max()
    found = gradient(x, sent)
    with torch.backends.cudnn.flags(enabled=False):
        other = gradient(x, sent)
    errors = [float((y.double() - truth).abs().max() / size) for y in (found, other)]
    yield Found("conv2d's weight, cuDNN against cudnn.flags(enabled=False), ulp of the largest", errors[0], errors[1])


@claim
def attention_below_normal(device: torch.device) -> Iterator[Found]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = numbers(device, 4, 4, 4, 8) * 8, numbers(device, 4, 4, 512, 8, seed=2) * 8, numbers(device, 4, 4, 512, 8)

    def grad_of_keys(dtype: torch.dtype, backend: Any) -> Tensor:
        keys = k.to(dtype).requires_grad_()
        with sdpa_kernel(backend) if device.type == "cuda" else contextlib.nullcontext():
            result = F.scaled_dot_product_attention(q.to(dtype), keys, v.to(dtype))
        return torch.autograd.grad(result, keys, incoming(result))[0].double()

    truth = grad_of_keys(torch.float64, SDPBackend.MATH)
    weights = (q.double() @ k.double().mT / q.shape[-1] ** 0.5).softmax(-1)
    unlikely = weights.amax(-2).unsqueeze(-1) < 1e-36  # gradients that are small by cancellation are another matter
    tiny = (truth.abs() < torch.finfo(torch.float32).smallest_normal) & (truth.abs() > 1e-42) & unlikely
    step = 2.0**-149
    ways = [grad_of_keys(torch.float32, b) for b in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)]
    errors = [float(((y - truth).abs() / step)[tiny].max()) if bool(tiny.any()) else 0.0 for y in ways]
    yield Found(
        f"{int(tiny.sum())} gradients below 1e-38, memory-efficient against math, in 1.4e-45", errors[0], errors[1]
    )


@claim
def jacobi_svd(device: torch.device) -> Iterator[Found]:
    x = numbers(device, 400, 5, 5, dtype=torch.complex64)
    truth = torch.linalg.svdvals(x.to(torch.complex128))
    drivers = ("gesvdj", "gesvd") if device.type == "cuda" else (None, None)
    errors = []
    for driver in drivers:
        u, s, vh = torch.linalg.svd(x, driver=driver)
        u, s, vh = u.to(torch.complex128), s.double(), vh.to(torch.complex128)
        back = (u @ torch.diag_embed(s).to(u.dtype) @ vh - x).abs().amax((-1, -2)) / truth[:, 0]
        errors.append(float(back.max()) / torch.finfo(torch.float32).eps)
    text = f"complex64, |U S Vh - A| / |A|: gesvdj {errors[0]:.3g} ulp, gesvd {errors[1]:.3g}"
    yield Found(text, seen=errors[0] > 1.5 * errors[1])


@claim
def lu_pivots_by_modulus(device: torch.device) -> Iterator[Found]:
    x = numbers(device, 200, 5, 5, dtype=torch.complex128)
    lu, pivots = torch.linalg.lu_factor(x)
    by_modulus = _pivots(x, lambda column: column.abs())
    by_parts = _pivots(x, lambda column: column.real.abs() + column.imag.abs())
    p, lower, upper = torch.lu_unpack(lu, pivots)
    right = float((p @ lower @ upper - x).abs().max()) < 1e-13
    same = int((pivots == by_modulus).all(-1).sum()), int((pivots == by_parts).all(-1).sum())
    text = f"of 200 batched complex matrices, {same[0]} pivot by |z|, {same[1]} by |re| + |im|; P L U is A: {right}"
    yield Found(text, seen=right and same[0] == 200 and same[1] < 200)


def _pivots(matrices: Tensor, size: Callable[[Tensor], Tensor]) -> Tensor:
    a, rows = matrices.clone(), torch.arange(matrices.shape[0], device=matrices.device)
    found = []
    for k in range(a.shape[-1]):
        pivot = size(a[:, k:, k]).argmax(-1) + k
        found.append(pivot + 1)
        a[rows, k], a[rows, pivot] = a[rows, pivot], a[rows, k].clone()
        a[:, k + 1 :, k] /= a[:, k, k, None]
        a[:, k + 1 :, k + 1 :] -= a[:, k + 1 :, k, None] * a[:, k, None, k + 1 :]
    return torch.stack(found, -1)


# --- float64 with float32 inside ----------------------------------------------------------------------------


@claim
def hardswish_and_hardsigmoid(device: torch.device) -> Iterator[Found]:
    x = numbers(device, 1000, dtype=torch.float64) * 2
    inner = (x + 3).clamp(0, 6)
    yield Found("hardswish, float64, against x * clamp(x + 3, 0, 6) / 6", ulps(F.hardswish(x), x * inner / 6), 1)
    yield Found("hardsigmoid, float64, against clamp(x + 3, 0, 6) / 6", ulps(F.hardsigmoid(x), inner / 6), 1)


@claim
def cov_with_weights(device: torch.device) -> Iterator[Found]:
    x = numbers(device, 3, 50, dtype=torch.float64)
    weights = numbers(device, 50, seed=2).abs() + 0.1
    found, other = torch.cov(x, aweights=weights), torch.cov(x, aweights=weights.double())
    mean = (x * weights.double()).sum(1, keepdim=True) / weights.double().sum()
    square = weights.double().square().sum() / weights.double().sum()
    truth = ((x - mean) * weights.double()) @ (x - mean).T / (weights.double().sum() - square)
    yield Found("float64, float32 weights against the same in float64", ulps(found, truth), ulps(other, truth) / 10)


def _stepped(kind: Any, device: torch.device, sparse: bool = False, **options: Any) -> Tensor:
    x = numbers(device, 50, dtype=torch.float64).requires_grad_()
    optimizer = kind([x], **options)
    for step in range(3):
        gradient = numbers(device, 50, dtype=torch.float64, seed=step + 5)
        x.grad = gradient.to_sparse(1) if sparse else gradient
        optimizer.step()
    return x.detach()


def _optimizer(name: str, device: torch.device, what: str, kernel: dict[str, Any], other: dict[str, Any]) -> Found:
    kind = getattr(torch.optim, name)
    sparse = name == "SparseAdam"
    found, truth = (_stepped(kind, device, sparse, **options) for options in (kernel, other))
    return Found(f"{name}, float64, {what}", ulps(found, truth), 1)


@claim
def optimizers_in_float64(device: torch.device) -> Iterator[Found]:
    captured = {"capturable": True} if device.type == "cuda" else {}
    for name in ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "ASGD"):
        yield _optimizer(name, device, "capturable against not", {"foreach": False, **captured}, {"foreach": False})
    yield _optimizer("ASGD", device, "foreach against for-loop", {"foreach": True}, {"foreach": False})
    rate = torch.tensor(0.001, device=device)
    plain = {"lr": float(rate)}
    text = "lr as a float32 tensor against its number"
    yield _optimizer("SparseAdam", device, text, {"lr": rate}, plain)


# --- memory -------------------------------------------------------------------------------------------------


@claim
def avg_pool2d_into_strided(device: torch.device) -> Iterator[Found]:
    x = numbers(device, 1, 3, 9, 9)
    expected = F.avg_pool2d(x, 3)
    out = torch.full((*expected.shape, 2), torch.nan, device=device)[..., 0]
    torch._C._nn.avg_pool2d(x, 3, out=out)  # type: ignore[call-arg]
    yield Found("out= with strides holds other numbers than the result", seen=not torch.equal(out, expected))


@claim
def avg_pool2d_of_channels_last(device: torch.device) -> Iterator[Found]:
    x, gradients = numbers(device, 2, 3, 9, 9), []
    for layout in (torch.contiguous_format, torch.channels_last):
        leaf = x.clone(memory_format=layout).requires_grad_()
        y = F.avg_pool2d(leaf, 3, 2, padding=1)
        y.backward(torch.linspace(-1, 1, y.numel(), device=device).view(y.shape))
        gradients.append(leaf.grad)
    plain, last = gradients
    yield Found("with padding the gradient depends on the layout of the image", seen=not torch.allclose(plain, last))


@claim
def ihfft_into_out(device: torch.device) -> Iterator[Found]:
    x = numbers(device, 5, 6, 8)
    for name in ("ihfft2", "ihfftn"):
        call = getattr(torch.fft, name)
        expected = call(x, dim=(-1,))
        out = torch.full_like(expected, torch.nan)
        call(x, dim=(-1,), out=out)
        yield Found(f"{name} of one dimension leaves out= unwritten", seen=bool(out.real.isnan().all()))


@claim
def multinomial_into_strided(device: torch.device) -> Iterator[Found]:
    out = torch.zeros(3, 2, dtype=torch.int64, device=device)[:, 0]
    torch.multinomial(torch.ones(3, device=device), 3, replacement=True, out=out)
    yield Found("strides of out= are (2,) before and (1,) after", seen=out.stride() != (2,))


@claim
def clamp_in_place_of_uint8(device: torch.device) -> Iterator[Found]:
    x = torch.tensor([5, 6], dtype=torch.uint8, device=device)
    x.clamp_(torch.tensor([1, -7], dtype=torch.int32, device=device), None)
    yield Found(f"6 with a lower limit of -7 becomes {int(x[1])}", seen=int(x[1]) != 6)


# --- found by a hunt ----------------------------------------------------------------------------------------


@claim
def embedding_with_max_norm(device: torch.device) -> Iterator[Found]:
    places = torch.randint(33, (250, 250), generator=torch.Generator().manual_seed(0)).to(device)
    table = 9 * numbers(device, 33, 33)
    expected = F.embedding(places.flatten().unique(), table.clone(), max_norm=1.0)[places]
    found = F.embedding(places, table.clone(), max_norm=1.0)
    yield Found("indices of two dimensions give other rows", seen=not torch.allclose(found, expected, rtol=1e-3))
    which, bags = torch.tensor([4], device=device), torch.tensor([0], device=device)
    rows = [
        F.embedding_bag(which, weight, bags, max_norm=1.0)
        for weight in (9 * numbers(device, 9, 9).t(), 9 * numbers(device, 9, 9).t().contiguous())
    ]
    yield Found("a bag of a transposed table is another one", seen=not torch.allclose(*rows, rtol=1e-3))


@claim
def nearest_gradient(device: torch.device) -> Iterator[Found]:
    for mode, size, options in (
        ("nearest-exact", 12, {"size": 2}),
        ("nearest-exact", 300, {"size": 2}),
        ("nearest", 27, {"scale_factor": 0.6}),
    ):
        x = torch.arange(float(size), device=device).view(1, 1, size).requires_grad_()
        y = F.interpolate(x, mode=mode, **options)  # type: ignore[arg-type]
        y.sum().backward()
        assert x.grad is not None
        read, sent = y.long().unique().tolist(), x.grad.flatten().nonzero().flatten().tolist()
        apart = [a for a in sent if a not in read]
        yield Found(f"{mode} of {size}: {apart or 'nothing'} has a gradient and was not read", seen=bool(apart))


@claim
def split_into_out(device: torch.device) -> Iterator[Found]:
    x = numbers(device, 5, 5, 5).transpose(0, 1)
    expected = torch.split_with_sizes_copy(x, (1, 3, 1), -1)
    out = [torch.empty_like(part) for part in expected]
    torch.split_with_sizes_copy(x, (1, 3, 1), -1, out=out)
    same = all(torch.equal(a, b) for a, b in zip(out, expected))
    yield Found("out= of a transposed argument holds other numbers", seen=not same)


@claim
def transposed_convolution_of_many_windows(device: torch.device) -> Iterator[Found]:
    x, weight = (numbers(device, 9, 9, 1022, seed=s).abs().bfloat16() for s in (1, 2))
    found = F.conv_transpose1d(x, weight, stride=2, dilation=2).double()
    exact = F.conv_transpose1d(x.double(), weight.double(), stride=2, dilation=2)
    off = float(((found - exact).abs() / exact.abs().clamp(min=1)).max())
    yield Found(f"sums in bfloat16 are off by {100 * off:.0f} percent", seen=off > 0.1)


@claim
def shapes_and_unwritten_memory(device: torch.device) -> Iterator[Found]:
    smallest = torch.aminmax(torch.ones(1, 1, 1, device=device), keepdim=True).min
    yield Found(f"aminmax(keepdim=True) has shape {tuple(smallest.shape)}", seen=smallest.dim() != 3)
    empty = torch.zeros(0, 5, device=device)
    loss = F.multilabel_margin_loss(empty, empty.long())
    yield Found(f"multilabel_margin_loss of nothing has shape {tuple(loss.shape)}", seen=loss.dim() != 0)
    value = float(torch.topk(torch.tensor(3.0, device=device), 0).values)
    yield Found(f"topk(k=0) of the number 3 is {value:g}", seen=value != 3)
    none = float(F.nll_loss(torch.ones(1, device=device), torch.tensor(0, device=device), ignore_index=0))
    yield Found(f"nll_loss of an ignored target is {none}", seen=not math.isnan(none))


@claim
def round_to_decimals(device: torch.device) -> Iterator[Found]:
    for dtype in HALF:
        x = numbers(device, 4096, dtype=dtype)
        exact = torch.round(x.double(), decimals=2)
        yield Found(f"{dtype}: rounded to 0.01", ulps(torch.round(x, decimals=2), exact), ulps(exact.to(dtype), exact))


# --- missing ------------------------------------------------------------------------------------------------


def _refused(what: str, call: Callable[[], Any]) -> Found:
    try:
        call()
    except (RuntimeError, NotImplementedError) as error:
        return Found(f"{what}: {str(error).splitlines()[0][:70]}", seen=True)
    return Found(f"{what}: accepted", seen=False)


@claim
def missing(device: torch.device) -> Iterator[Found]:
    x = numbers(device, 4, 4)
    yield _refused("narrow_copy out=", lambda: torch.narrow_copy(x, 0, 0, 2, out=torch.empty(2, 4, device=device)))
    yield _refused("sparse.mm reduce", lambda: torch.sparse.mm(x.to_sparse_csr(), x, "sum"))
    q, k, v = (numbers(device, 2, 2, 8, 8, seed=s).requires_grad_() for s in range(3))

    def twice() -> Any:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION) if device.type == "cuda" else contextlib.nullcontext():
            result = F.scaled_dot_product_attention(q, k, v)
        first = torch.autograd.grad(result.square().sum(), q, create_graph=True)[0]
        return torch.autograd.grad(first.sum(), k)

    yield _refused("second derivative of memory-efficient attention", twice)
    strided = torch.ones(5, 2, device=device)[:, 0]
    running = [torch.zeros(5, device=device), torch.ones(5, device=device)]
    yield _refused(
        "batch norm with strided weights",
        lambda: torch.ops.aten._batch_norm_with_update(
            numbers(device, 5, 5, 5), strided, strided.clone(), *running, 0.5, 0.6
        ),
    )


# --- running ------------------------------------------------------------------------------------------------


def run(device: torch.device, only: str = "") -> tuple[int, int, int]:
    """Run all claims and print a line for each thing compared: shown, not shown, failed."""
    shown = missed = failed = 0
    for name, check in CLAIMS.items():
        if only and only not in name:
            continue
        try:
            for found in check(device):
                shown, missed = shown + found.shown, missed + (not found.shown)
                size = "" if found.seen is not None else f"  {found.kernel:.3g} ulp, the other way {found.other:.3g}"
                print(f"{name:28s} {found.compared}{size}  {'shown' if found.shown else 'NOT shown'}", flush=True)
        except Exception as error:
            failed += 1
            print(f"{name:28s} failed: {type(error).__name__}: {str(error).splitlines()[0][:160]}", flush=True)
    return shown, missed, failed


def main() -> int:
    """Show everything; 0 when all claims are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", metavar="NAME", help="only claims whose name contains this")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    warnings.simplefilter("ignore")
    started = time.monotonic()
    shown, missed, failed = run(device, options.only)
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else options.device
    seconds = time.monotonic() - started
    print(f"{shown} shown, {missed} not shown, {failed} failed; {what}, torch {torch.__version__}, {seconds:.0f} s")
    return 1 if missed or failed else 0


if __name__ == "__main__":
    sys.exit(main())
