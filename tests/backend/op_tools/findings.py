"""Wrong calls of many kinds on the software accelerator, for tests of what is done with findings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
DEVICE = "cuda"


class Case(NamedTuple):
    """A fault, and work that meets it; `needs_op_tools` where no bound tells right from wrong."""

    fault: str
    work: Callable[[], Any]
    needs_op_tools: bool = False


def r(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    """Random numbers on the device."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + 1))
    return numbers.to(DEVICE, dtype).requires_grad_(grad)


def p(*shape: int, grad: bool = False) -> Tensor:
    """Positive ones."""
    return r(*shape).abs().add(0.5).requires_grad_(grad)


library = torch.library.Library("op_tools_findings", "FRAGMENT")
library.define("scaled(Tensor x, float f) -> Tensor")
library.define("scale_(Tensor(a!) x, float f) -> ()")
library.impl("scaled", lambda x, f: x * f, "CPU")


def scale_(x: Tensor, f: float) -> None:
    x.mul_(f)


library.impl("scale_", scale_, "CPU")


@torch.library.custom_op("op_tools_findings::twice", mutates_args=(), device_types="cpu")
def twice(x: Tensor) -> Tensor:
    return x * 2


ops = torch.ops.op_tools_findings


def fused(kind: Any, **options: Any) -> Callable[[], None]:
    def work() -> None:
        parameters = [torch.nn.Parameter(r(*shape)) for shape in ((5, 3), (7,), ())]
        optimizer = kind(parameters, lr=0.1, **options)
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.25)
        optimizer.step()

    return work


def batch_norm(training: bool = True, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    mean, var = r(3).detach(), p(3)
    return F.batch_norm(r(4, 3, 5, 5).to(memory_format=layout), mean, var, p(3), r(3), training)


def unscale() -> None:
    grads, found = [r(4, 3), r(5)], torch.zeros((), device=DEVICE)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.full((), 0.5, device=DEVICE))


def low(work: Callable[[], Any], dtype: torch.dtype = torch.bfloat16) -> Callable[[], Any]:
    def inside() -> Any:
        with torch.autocast(torch.ones(1, device=DEVICE).device.type, dtype=dtype):
            return work()

    return inside


def backward(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Callable[[], None]:
    """With a gradient of ordinary layout."""

    def work() -> None:
        given = [a() if callable(a) else a for a in args]
        y = function(*given, **kwargs)
        y.backward(r(*y.shape).to(y.dtype))

    return work


def summed(function: Callable[..., Tensor], *args: Any) -> Callable[[], None]:
    """With a gradient of stride 0."""

    def work() -> None:
        function(*[a() if callable(a) else a for a in args]).sum().backward()

    return work


def no_grad(work: Callable[[], Any]) -> Callable[[], Any]:
    return torch.no_grad()(work)


def c(*shape: int, grad: bool = False) -> Tensor:
    return torch.complex(r(*shape), r(*shape).flip(0)).detach().requires_grad_(grad)


CASES: dict[str, Case] = {
    # elementwise, one and several arguments
    "exp": Case("exp: noise=1e-2", lambda: torch.exp(r(6, 5))),
    "log": Case("log: element", lambda: torch.log(p(6, 5))),
    "sin of 0 dimensions": Case("sin: noise=0.5", lambda: torch.sin(r())),
    "tanh in float16": Case("tanh: noise=0.1", lambda: torch.tanh(r(40, dtype=torch.float16))),
    "sigmoid": Case("sigmoid: nan", lambda: torch.sigmoid(r(6, 5))),
    "sqrt": Case("sqrt: inf=2", lambda: p(6, 5).sqrt()),
    "erf of a transposed": Case("erf: element", lambda: torch.erf(r(6, 5).t())),
    "pow": Case("pow.Tensor_Scalar: element", lambda: p(4) ** 3),
    "add of expanded": Case("add.Tensor: element", lambda: r(1, 5).expand(4, 5) + r(4, 1).expand(4, 5)),
    "sub with alpha": Case("sub.Tensor: noise=0.1", lambda: torch.sub(r(3, 4), r(4), alpha=2)),
    "mul of slices": Case("mul.Tensor: element", lambda: r(8, 8)[::2, 1:] * r(8, 8)[1::2, 1:]),
    "mul of complex": Case("mul.Tensor: noise=0.1", lambda: c(3, 4) * c(3, 4).conj()),
    "div of integers": Case("div.Tensor: element", lambda: torch.arange(1, 5, device=DEVICE) / 3),
    "remainder of integers": Case("remainder.Scalar: element", lambda: torch.arange(9, device=DEVICE) % 4),
    "maximum": Case("maximum: element", lambda: torch.maximum(r(5), r(5).flip(0))),
    "where": Case("where.self: element", lambda: torch.where(r(5, 5) > 0, r(5, 5), 0.0)),
    "clamp": Case("clamp: element", lambda: r(5, 5).clamp(-1, 1)),
    "logical_and": Case("logical_and: element", lambda: torch.logical_and(r(9) > 0, r(9) < 1)),
    "lt": Case("lt.Scalar: element", lambda: r(9) < 0.1),
    "bitwise_or": Case(
        "bitwise_or.Tensor: element",
        lambda: torch.arange(8, device=DEVICE) | torch.ones(8, dtype=torch.int64, device=DEVICE),
    ),
    "overflow": Case("exp: overflow=100", lambda: torch.exp(p(6) * 6)),
    "denormals": Case("mul.Tensor: denormals", lambda: torch.mul(p(6), 1e-39)),
    "angle of complex": Case("angle: noise=0.1", lambda: torch.angle(c(6))),
    "channels_last": Case("exp: element", lambda: torch.exp(r(2, 3, 4, 4).to(memory_format=torch.channels_last))),
    # reductions
    "sum": Case("sum.dim_IntList: noise=0.1", lambda: r(6, 5).sum(0)),
    "sum to 0 dimensions": Case("sum: element", lambda: torch.sum(r(6, 5))),
    "sum of nothing": Case("sum.dim_IntList: element", lambda: torch.sum(r(0, 4), 0)),
    "mean": Case("mean.dim: element", lambda: r(6, 5).mean(1, keepdim=True)),
    "amax": Case("amax: element", lambda: torch.amax(r(6, 5), 0)),
    "max with indices": Case("max.dim: element", lambda: torch.max(r(6, 5), 0), True),
    "argmax": Case("argmax: element", lambda: torch.argmax(r(6, 5), 1), True),
    "sort": Case("sort: element", lambda: torch.sort(r(12)), True),
    "topk": Case("topk: element", lambda: torch.topk(r(12), 3), True),
    "cumsum": Case("cumsum: element", lambda: torch.cumsum(r(12), 0)),
    "prod": Case("prod.dim_int: element", lambda: torch.prod(r(3, 4), 1)),
    "logsumexp": Case("logsumexp: element", lambda: torch.logsumexp(r(3, 4), 1)),
    "var": Case("var.correction: element", lambda: torch.var(r(3, 4), 1)),
    "vector_norm": Case("linalg_vector_norm: element", lambda: torch.linalg.vector_norm(r(3, 4))),
    "count_nonzero": Case("count_nonzero: element", lambda: torch.count_nonzero(r(3, 4))),
    "any": Case("any: element", lambda: torch.any(r(3, 4) > 9)),
    # products
    "mm": Case("mm: noise=1e-2", lambda: r(4, 6) @ r(6, 5)),
    "mm in low sums": Case("mm: accumulate=bfloat16", lambda: torch.mm(r(4, 256), r(256, 5))),
    "bmm": Case("bmm: element", lambda: torch.bmm(r(2, 4, 6), r(2, 6, 5))),
    "addmm in bfloat16": Case(
        "addmm: noise=0.5",
        lambda: F.linear(r(4, 6, dtype=torch.bfloat16), r(5, 6, dtype=torch.bfloat16), r(5, dtype=torch.bfloat16)),
    ),
    "baddbmm": Case("baddbmm: element", lambda: torch.baddbmm(r(2, 4, 5), r(2, 4, 6), r(2, 6, 5), beta=0.5)),
    "einsum": Case("bmm: element", lambda: torch.einsum("bij,bjk->bik", r(2, 4, 6), r(2, 6, 5))),
    "conv2d": Case("convolution*: element", lambda: F.conv2d(r(2, 3, 6, 6), r(4, 3, 3, 3), r(4))),
    "conv2d channels_last": Case(
        "convolution*: element",
        lambda: F.conv2d(
            r(2, 3, 6, 6).to(memory_format=torch.channels_last), r(4, 3, 3, 3).to(memory_format=torch.channels_last)
        ),
    ),
    "grouped_mm": Case(
        "_grouped_mm: noise=0.5",
        lambda: torch._grouped_mm(r(2, 16, 16, dtype=torch.bfloat16), r(2, 16, 16, dtype=torch.bfloat16)),
    ),
    "complex mm": Case("mm: noise=0.1", lambda: c(3, 4) @ c(4, 3)),
    # networks
    "gelu": Case("gelu: noise=1e-2", lambda: F.gelu(r(6, 5))),
    "softmax": Case("_softmax: element", lambda: F.softmax(r(6, 5), -1)),
    "log_softmax": Case("_log_softmax: element", lambda: F.log_softmax(r(6, 5), -1)),
    "layer_norm": Case("native_layer_norm: noise=0.1", lambda: F.layer_norm(r(6, 5), (5,), p(5), r(5))),
    "group_norm": Case("native_group_norm: noise=0.1", lambda: F.group_norm(r(2, 4, 5), 2, p(4), r(4))),
    "batch_norm": Case("native_batch_norm: noise=0.1", batch_norm),
    "batch_norm statistics": Case("native_batch_norm: drop_write", batch_norm),
    "batch_norm channels_last": Case("native_batch_norm: element", lambda: batch_norm(layout=torch.channels_last)),
    "nll_loss": Case("nll_loss_forward: element", lambda: F.nll_loss(r(6, 5), torch.arange(6, device=DEVICE) % 5)),
    "mse_loss": Case("mse_loss: element", lambda: F.mse_loss(r(6, 5), r(6, 5).flip(0))),
    "embedding": Case("embedding: element", lambda: F.embedding(torch.arange(4, device=DEVICE), r(6, 5))),
    "max_pool2d": Case("max_pool2d_with_indices: element", lambda: F.max_pool2d(r(2, 3, 4, 4), 2)),
    "avg_pool2d": Case("avg_pool2d: element", lambda: F.avg_pool2d(r(2, 3, 4, 4), 2)),
    "interpolate": Case(
        "upsample_bilinear2d: element", lambda: F.interpolate(r(1, 2, 4, 4), scale_factor=2.0, mode="bilinear")
    ),
    "attention": Case(
        "*scaled_dot_product*: element",
        lambda: F.scaled_dot_product_attention(r(1, 2, 4, 8), r(1, 2, 4, 8), r(1, 2, 4, 8)),
    ),
    # writing to arguments
    "add_": Case("add_.Tensor: noise=0.1", lambda: r(6, 5).add_(r(5))),
    "add_ not written": Case("add_.Tensor: drop_write", lambda: r(6, 5).add_(1.0)),
    "mul_ of a slice": Case("mul_.Tensor: element", lambda: r(6, 5)[:, 1:3].mul_(3)),
    "relu_ with a history": Case("relu_: element", lambda: (r(6, 5, grad=True) * 1).relu_()),
    "addcmul_": Case("addcmul_: element", lambda: r(6, 5).addcmul_(r(6, 5), r(6, 5), value=0.5)),
    "index_add_": Case("index_add_: element", lambda: r(6, 5).index_add_(0, torch.arange(2, device=DEVICE), r(2, 5))),
    "index_put_": Case("index_put_: drop_write", lambda: r(6, 5).__setitem__(torch.arange(2, device=DEVICE), 1.0)),
    "fill_": Case("fill_.Scalar: element", lambda: r(6, 5).fill_(3.0)),
    "add out=": Case("add.out: noise=0.1", lambda: torch.add(r(6, 5), r(5), out=torch.empty(6, 5, device=DEVICE))),
    "mm out= not written": Case(
        "mm.out: drop_write", lambda: torch.mm(r(4, 6), r(6, 5), out=torch.zeros(4, 5, device=DEVICE))
    ),
    "exp out= resized": Case("exp.out: element", lambda: torch.exp(r(6), out=torch.empty(0, device=DEVICE))),
    "sort out=": Case(
        "sort.values: element",
        lambda: torch.sort(r(9), out=(torch.empty(9, device=DEVICE), torch.empty(9, dtype=torch.int64, device=DEVICE))),
        True,
    ),
    # optimizers and lists
    "fused AdamW": Case("_fused_adamw_: element", fused(torch.optim.AdamW, fused=True)),
    "fused Adam not written": Case("_fused_adam_: drop_write", fused(torch.optim.Adam, fused=True)),
    "fused SGD": Case("_fused_sgd_: noise=0.1", fused(torch.optim.SGD, momentum=0.9, fused=True)),
    "foreach lerp_": Case("lerp_.Scalar: element", fused(torch.optim.AdamW, foreach=True)),
    "foreach addcdiv_": Case("addcdiv_: noise=0.1", fused(torch.optim.AdamW, foreach=True)),
    "foreach add_": Case("add_.Tensor: drop_write", fused(torch.optim.SGD, foreach=True)),
    "foreach mul": Case("mul.Scalar: element", lambda: torch._foreach_mul([r(4, 3), r(5), r()], 3.0)),
    "foreach norm": Case("linalg_vector_norm: element", lambda: torch._foreach_norm([r(4, 3), r(5)])),
    "unscale": Case("_amp_foreach_non_finite_check_and_unscale_: element", unscale),
    "cat": Case("cat: element", lambda: torch.cat([r(4, 3), r(0, 3), r(2, 3)])),
    "stack": Case("stack: element", lambda: torch.stack([r(4, 3), r(4, 3)], 1)),
    "index with a list": Case("index.Tensor: element", lambda: r(6, 5)[[1, 2], :]),
    "split_with_sizes_copy": Case("split_with_sizes_copy: element", lambda: torch.split_with_sizes_copy(r(6), [2, 4])),
    "swapped results": Case("aminmax: swap", lambda: torch.aminmax(r(6, 5), dim=0)),
    "unique": Case("_unique2: element", lambda: torch.unique(torch.arange(6, device=DEVICE) % 3)),
    "cpu index": Case("index.Tensor: element", lambda: r(6, 5)[torch.tensor([1, 2])]),
    "indices of all kinds": Case(
        "index.Tensor: element", lambda: r(6, 5, 4)[..., None, 1:3][torch.arange(2, device=DEVICE)]
    ),
    "one tensor twice": Case("mul_.Tensor: element", lambda: (x := r(6, 5)).mul_(x)),
    "views of one tensor": Case("add.Tensor: element", lambda: torch.add(x := r(5, 5), x.t())),
    "forward and backward": Case(
        "gelu: noise=0.1; gelu_backward: noise=0.1", summed(F.gelu, lambda: r(6, 5, grad=True))
    ),
    # gradients
    "x times x": Case(
        "mul.Tensor: element, phase=backward", backward(lambda x: torch.mul(x, x), lambda: r(6, 5, grad=True))
    ),
    "exp backward": Case("mul.Tensor: noise=0.1, phase=backward", backward(torch.exp, lambda: r(6, 5, grad=True))),
    "exp backward, stride 0": Case(
        "mul.Tensor: element, phase=backward, layout=noncontiguous", summed(torch.exp, lambda: r(6, 5, grad=True))
    ),
    "gelu backward": Case("gelu_backward: element", backward(F.gelu, lambda: r(6, 5, grad=True))),
    "layer_norm backward": Case(
        "native_layer_norm_backward: noise=0.1",
        backward(F.layer_norm, lambda: r(6, 5, grad=True), (5,), lambda: p(5, grad=True), lambda: r(5, grad=True)),
    ),
    "mm backward, one asked": Case(
        "mm: element, phase=backward", backward(torch.mm, lambda: r(4, 6), lambda: r(6, 5, grad=True))
    ),
    "linear backward, stride 0": Case(
        "mm: element, phase=backward", summed(F.linear, lambda: r(4, 6, grad=True), lambda: r(5, 6, grad=True))
    ),
    "expanded argument backward": Case(
        "mul.Tensor: noise=0.1, phase=backward",
        backward(torch.mul, lambda: r(1, 5, grad=True).expand(4, 5), lambda: r(4, 5, grad=True)),
    ),
    "conv2d backward": Case(
        "convolution_backward: element",
        backward(F.conv2d, lambda: r(2, 3, 6, 6, grad=True), lambda: r(4, 3, 3, 3, grad=True)),
    ),
    "batch_norm backward": Case(
        "native_batch_norm_backward: noise=0.1",
        backward(
            lambda x, w: F.batch_norm(x, torch.zeros(3, device=DEVICE), torch.ones(3, device=DEVICE), w, None, True),
            lambda: r(4, 3, 5, grad=True),
            lambda: p(3, grad=True),
        ),
    ),
    "softmax backward": Case("_softmax_backward_data: element", backward(F.softmax, lambda: r(6, 5, grad=True), -1)),
    "embedding backward": Case(
        "embedding_dense_backward: element",
        backward(F.embedding, lambda: torch.arange(4, device=DEVICE), lambda: r(6, 5, grad=True)),
    ),
    "mul_ backward": Case(
        "mul.Tensor: element, phase=backward",
        backward(lambda x, y: (x * 1).mul_(y), lambda: r(6, 5, grad=True), lambda: r(6, 5, grad=True)),
    ),
    "complex backward": Case(
        "mul.Tensor: noise=0.1, phase=backward",
        backward(lambda x: torch.view_as_real(x * x), lambda: c(3, 4, grad=True)),
    ),
    "autograd.grad of one": Case(
        "div.Tensor: noise=0.1, phase=backward",
        lambda: torch.autograd.grad(torch.div(x := p(6, grad=True), p(6, grad=True)).sum(), x),
    ),
    # autocast
    "linear under autocast": Case("addmm: noise=0.5", low(lambda: F.linear(r(4, 6), r(5, 6), r(5)))),
    "linear under autocast, backward": Case(
        "mm: noise=0.5, phase=backward", low(summed(F.linear, lambda: r(4, 6, grad=True), lambda: r(5, 6, grad=True)))
    ),
    "matmul under float16": Case("mm: noise=0.5", low(lambda: r(4, 6) @ r(6, 5), torch.float16)),
    "softmax under autocast": Case("_softmax: noise=0.1", low(lambda: F.softmax(r(4, 6, dtype=torch.bfloat16), -1))),
    # without gradients, factories, operators of others
    "no_grad with parameters": Case("mul_.Tensor: noise=0.1", no_grad(lambda: r(6, 5, grad=True).mul_(0.5))),
    "to the device": Case("copy_: noise=0.1", lambda: torch.ones(6).to(DEVICE)),
    "arange": Case("arange.start_out: element", lambda: torch.arange(0, 9, 2, device=DEVICE)),
    "linspace": Case("linspace.out: element", lambda: torch.linspace(0, 1, 7, device=DEVICE)),
    "full": Case("fill_.Scalar: element", lambda: torch.full((4,), 2.0, device=DEVICE)),
    "operator of torch.library": Case("op_tools_findings::scaled: noise=0.1", lambda: ops.scaled(r(6, 5), 2.0)),
    "overload of torch.library": Case("op_tools_findings::scaled: element", lambda: ops.scaled.default(r(6, 5), 2.0)),
    "writing operator of torch.library": Case("op_tools_findings::scale_: noise=0.1", lambda: ops.scale_(r(6, 5), 2.0)),
    "custom_op": Case("op_tools_findings::twice: element", lambda: twice(r(6, 5))),
    "aten packet": Case("mul.Tensor: noise=0.1", lambda: torch.ops.aten.mul(r(6, 5), 2.0)),
    "aten overload": Case("add.Tensor: noise=0.1", lambda: torch.ops.aten.add.Tensor(r(6, 5), r(5))),
    # random
    "dropout": Case("mul.Tensor: noise=0.5", lambda: F.dropout(p(40, 40, grad=True), 0.5), True),
    "normal_": Case("normal_: nan", lambda: torch.empty(4000, device=DEVICE).normal_(), True),
    "uniform_": Case("uniform_: nan", lambda: torch.empty(4000, device=DEVICE).uniform_(), True),
    "randn": Case("normal_: nan", lambda: torch.randn(4000, device=DEVICE), True),
    # linear algebra
    "eigh": Case("_linalg_eigh: element", lambda: torch.linalg.eigh(r(4, 4) + r(4, 4).t()), True),
    "svd": Case("_linalg_svd: noise=0.1", lambda: torch.linalg.svd(r(4, 3), full_matrices=False), True),
    "solve": Case(
        "_linalg_solve_ex: noise=0.1", lambda: torch.linalg.solve(r(4, 4) + 4 * torch.eye(4, device=DEVICE), r(4, 2))
    ),
    "cholesky": Case(
        "linalg_cholesky_ex: noise=0.1",
        lambda: torch.linalg.cholesky(r(4, 4) @ r(4, 4).t() + 4 * torch.eye(4, device=DEVICE)),
    ),
    "fft": Case("_fft_r2c: element", lambda: torch.fft.rfft(r(16))),
}
