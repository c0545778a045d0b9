"""Operators that PyTorch has for CUDA alone and that ordinary training calls, since it sees a CUDA device.

The software accelerator runs the CPU's kernels, and the CPU has none for these, so they are written with other
operators. What is left out is in ``REFUSED``, with the reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from . import attention

Tensor = torch.Tensor

REFUSED = {
    "_cslt_*, _sparse_semi_structured_*, _to_sparse_semi_structured": "2:4 sparsity: formats of NVIDIA's libraries",
    "_cudnn_rnn*, _cudnn_init_dropout_state, miopen_*": "formats of cuDNN and MIOpen; nn.LSTM and nn.GRU do not ask",
    "_cudnn_ctc_loss": "F.ctc_loss asks _use_cudnn_ctc_loss first, which answers no",
    "_efficient_attention_*, _fill_mem_eff_dropout_mask_": "mask types of CUTLASS; sdpa does not ask",
    "_cudnn_attention_*, _flash_attention_forward_no_dropout_inplace": "for nested tensors and CUDA graphs",
    "_flash_attention_forward(block_table=, seqused_k=, alibi_slopes=)": "paged key caches are for inference",
    "*.quantized attention, _scaled_grouped_mm*": "float8 with scales of their own",
    "_weight_int4pack_mm, _convert_weight_to_int4pack, _mixed_dtypes_linear": "weights packed for tensor cores",
    "_triton_*": "Triton kernels",
    "_philox_*": "counter-based random numbers; the CPU's are a Mersenne Twister's",
    "quantized and strided nested tensors": "there is no alias of them",
}
"""Operators of CUDA's table that are not provided, and why."""

_library: Any = None


def register() -> None:
    """Give the device a kernel for each operator that this release of PyTorch has."""
    global _library
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")  # histc has the CPU's kernel
        for name, kernel in {**KERNELS, **attention.KERNELS}.items():
            if torch._C._dispatch_has_kernel(f"aten::{name}"):
                _library.impl(name, kernel, "PrivateUse1")


def operators() -> list[str]:
    """Names of what is written here.

    >>> "batch_norm_stats" in operators()
    True
    """
    return sorted({**KERNELS, **attention.KERNELS})


# --- the parts of SyncBatchNorm ------------------------------------------------------------------


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _by_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(1, -1, *[1] * (like.dim() - 2))


def _over(tensor: Tensor) -> list[int]:
    return [axis for axis in range(tensor.dim()) if axis != 1]


def batch_norm_stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = input.to(_wide(input.dtype))
    variance, mean = torch.var_mean(wide, _over(input), correction=0)
    return mean, torch.rsqrt(variance + eps)


def batch_norm_elemt(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    result = (input.to(mean.dtype) - _by_channel(mean, input)) * _by_channel(invstd, input)
    if weight is not None:
        result = result * _by_channel(weight, input)
    if bias is not None:
        result = result + _by_channel(bias, input)
    return result.to(input.dtype)


def batch_norm_elemt_out(*args: Any, out: Tensor) -> Tensor:
    return out.copy_(batch_norm_elemt(*args))


def batch_norm_gather_stats_with_counts(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Means and deviations of all ranks (ranks, channels), put together by their counts."""
    share = counts.reshape(-1, 1).to(mean.dtype)
    total = share.sum()
    whole = (mean * share).sum(0) / total
    squares = ((invstd.pow(-2) - eps + (mean - whole).square()) * share).sum(0)
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(whole.to(running_mean.dtype), alpha=momentum)
    if running_var is not None:
        unbiased = squares / (total - 1)
        running_var.mul_(1 - momentum).add_(unbiased.to(running_var.dtype), alpha=momentum)
    return whole, torch.rsqrt(squares / total + eps)


def batch_norm_gather_stats(input: Tensor, mean: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """The same for ranks that have the same count, which is the last argument."""
    *rest, count = given
    together: Callable[..., tuple[Tensor, Tensor]] = batch_norm_gather_stats_with_counts
    return together(input, mean, *rest, mean.new_full((mean.size(0),), count))


def batch_norm_backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor | None, ...]:
    grad = grad_out.to(mean.dtype)
    sum_dy = grad.sum(_over(grad))
    sum_dy_xmu = (grad * (input.to(mean.dtype) - _by_channel(mean, input))).sum(_over(grad))
    kind = mean.dtype if weight is None else weight.dtype
    return (
        sum_dy if input_g else None,
        sum_dy_xmu if input_g else None,
        (sum_dy_xmu * invstd).to(kind) if weight_g else None,
        sum_dy.to(kind) if bias_g else None,
    )


def batch_norm_backward_elemt(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    total = count.sum().to(mean.dtype)
    centred = input.to(mean.dtype) - _by_channel(mean, input)
    slope = _by_channel(sum_dy_xmu / total * invstd.square(), input)
    result = (grad_out.to(mean.dtype) - _by_channel(sum_dy / total, input) - centred * slope) * _by_channel(
        invstd if weight is None else invstd * weight, input
    )
    return result.to(input.dtype)


# --- products whose result has more precision than the factors -------------------------------------


def mm(self: Tensor, mat2: Tensor, out_dtype: torch.dtype) -> Tensor:
    return torch.mm(self.to(out_dtype), mat2.to(out_dtype))


def bmm(self: Tensor, mat2: Tensor, out_dtype: torch.dtype) -> Tensor:
    return torch.bmm(self.to(out_dtype), mat2.to(out_dtype))


def addmm(self: Tensor, mat1: Tensor, mat2: Tensor, out_dtype: torch.dtype, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return torch.addmm(self.to(out_dtype), mat1.to(out_dtype), mat2.to(out_dtype), beta=beta, alpha=alpha)


def baddbmm(
    self: Tensor, batch1: Tensor, batch2: Tensor, out_dtype: torch.dtype, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    return torch.baddbmm(self.to(out_dtype), batch1.to(out_dtype), batch2.to(out_dtype), beta=beta, alpha=alpha)


def _into(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, out, **kwargs: out.copy_(function(*args, **kwargs))


# --- what cuDNN and CUDA's own kernels do under names of their own ---------------------------------


def fused_dropout(self: Tensor, p: float, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """`p` is the chance to be kept, as CUDA's kernel has it."""
    mask = torch.empty_like(self, dtype=torch.uint8).bernoulli_(p, generator=generator)
    return self * mask / p, mask


def masked_scale(self: Tensor, mask: Tensor, scale: float) -> Tensor:
    return self * mask * scale


def fused_rms_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: list[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None]:
    axes = list(range(-len(normalized_shape), 0))
    grad, wide = grad_out.to(rstd.dtype), input.to(rstd.dtype)
    normed = wide * rstd
    scaled = grad if weight is None else grad * weight.to(rstd.dtype)
    grad_input = rstd * (scaled - normed * (scaled * normed).mean(axes, keepdim=True))
    grad_weight = None
    if weight is not None and output_mask[1]:
        grad_weight = (grad * normed).sum_to_size(weight.shape).to(weight.dtype)
    return grad_input.to(input.dtype) if output_mask[0] else None, grad_weight


def _convolution(transposed: bool) -> Callable[..., Tensor]:
    def convolve(self: Tensor, weight: Tensor, padding: Any, *rest: Any) -> Tensor:
        output_padding, stride, dilation, groups = rest[:4] if transposed else ([0] * len(padding), *rest[:3])
        return torch.convolution(self, weight, None, stride, padding, dilation, transposed, output_padding, groups)

    return convolve


def convolution_relu(
    self: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    done = torch.convolution(self, weight, bias, stride, padding, dilation, False, [0] * len(padding), groups)
    return torch.relu(done)


def convolution_add_relu(
    self: Tensor,
    weight: Tensor,
    z: Tensor,
    alpha: Any,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
) -> Tensor:
    done = torch.convolution(self, weight, bias, stride, padding, dilation, False, [0] * len(padding), groups)
    return torch.relu(done + z * (1 if alpha is None else alpha))


def depthwise(
    self: Tensor, weight: Tensor, kernel_size: Any, bias: Tensor | None, stride: Any, padding: Any, dilation: Any
) -> Tensor:
    none = [0] * len(padding)
    return torch.convolution(self, weight, bias, stride, padding, dilation, False, none, self.size(1))


def cudnn_batch_norm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    exponential_average_factor: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    done = torch.native_batch_norm(
        input, weight, bias, running_mean, running_var, training, exponential_average_factor, epsilon
    )
    return (*done, input.new_empty(0, dtype=torch.uint8))


def cudnn_batch_norm_backward(
    input: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_var: Tensor | None,
    epsilon: float,
    reserve: Tensor,
) -> Any:
    return torch.ops.aten.native_batch_norm_backward(
        grad_output,
        input,
        weight,
        running_mean,
        running_var,
        save_mean,
        save_var,
        True,
        epsilon,
        [True, True, True],
    )


def grid_sampler(self: Tensor, grid: Tensor) -> Tensor:
    return torch.grid_sampler(self, grid, 0, 0, True)


def grid_sampler_backward(self: Tensor, grid: Tensor, grad_output: Tensor) -> Any:
    return torch.ops.aten.grid_sampler_2d_backward(grad_output, self, grid, 0, 0, True, [True, True])


def affine_grid(theta: Tensor, N: int, C: int, H: int, W: int) -> Tensor:
    return torch.affine_grid_generator(theta, [N, C, H, W], True)


def affine_grid_backward(grad: Tensor, N: int, C: int, H: int, W: int) -> Tensor:
    of_theta: Tensor = torch.ops.aten.affine_grid_generator_backward(grad, [N, C, H, W], True)
    return of_theta


# --- whole numbers, which the CPU's kernel refuses ------------------------------------------------


def histc(self: Tensor, bins: int = 100, min: Any = 0, max: Any = 0) -> Tensor:
    """Routers of mixtures of experts count tokens of integer indices with it (transformers' Mixtral)."""
    if self.dtype.is_floating_point or bins <= 0:
        return torch.histc(self.cpu(), bins, min, max).to(self.device)
    if not (min == max and self.numel()):
        low, high = int(min), int(max)
    else:
        low, high = int(self.min()), int(self.max())
    if low == high:
        low, high = low - 1, high + 1
    if low > high:
        raise RuntimeError("max must be larger than min")
    values = self.reshape(-1).long()
    values = values[(values >= low) & (values <= high)]
    places = torch.div((values - low) * bins, high - low, rounding_mode="floor").clamp(max=bins - 1)
    return torch.bincount(places, minlength=bins).to(self.dtype)


def histc_out(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
    found = histc(*args, **kwargs)
    return out.resize_(found.shape).copy_(found)


KERNELS: dict[str, Callable[..., Any]] = {
    "histc": histc,
    "histc.out": histc_out,
    "batch_norm_stats": batch_norm_stats,
    "batch_norm_elemt": batch_norm_elemt,
    "batch_norm_elemt.out": batch_norm_elemt_out,
    "batch_norm_gather_stats": batch_norm_gather_stats,
    "batch_norm_gather_stats_with_counts": batch_norm_gather_stats_with_counts,
    "batch_norm_backward_reduce": batch_norm_backward_reduce,
    "batch_norm_backward_elemt": batch_norm_backward_elemt,
    "mm.dtype": mm,
    "mm.dtype_out": _into(mm),
    "bmm.dtype": bmm,
    "bmm.dtype_out": _into(bmm),
    "addmm.dtype": addmm,
    "addmm.dtype_out": _into(addmm),
    "baddbmm.dtype": baddbmm,
    "baddbmm.dtype_out": _into(baddbmm),
    "_fused_dropout": fused_dropout,
    "_masked_scale": masked_scale,
    "_fused_rms_norm_backward": fused_rms_norm_backward,
    "cudnn_convolution": _convolution(False),
    "cudnn_convolution_transpose": _convolution(True),
    "cudnn_convolution_relu": convolution_relu,
    "cudnn_convolution_add_relu": convolution_add_relu,
    "_conv_depthwise2d": depthwise,
    "conv_depthwise3d": depthwise,
    "cudnn_batch_norm": cudnn_batch_norm,
    "cudnn_batch_norm_backward": cudnn_batch_norm_backward,
    "cudnn_grid_sampler": grid_sampler,
    "cudnn_grid_sampler_backward": grid_sampler_backward,
    "cudnn_affine_grid_generator": affine_grid,
    "cudnn_affine_grid_generator_backward": affine_grid_backward,
    "_use_cudnn_ctc_loss": lambda *args: False,
    "_use_cudnn_ctc_loss.Tensor": lambda *args: False,
    "_use_miopen_ctc_loss": lambda *args: False,
    "_use_miopen_ctc_loss.Tensor": lambda *args: False,
}
