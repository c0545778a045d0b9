"""Operators that sum many values: reductions, norms, running sums, values added into memory, images resampled."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Final

import torch

from .registry import CPU, CUDA, FUNCTIONS, KERNELS, FunctionFacts, KernelFacts, Kind

Tensor = torch.Tensor
_STATISTICS: Final = ("running_mean", "running_var")

# --- reductions and norms ----------------------------------------------------------------------------------

KERNELS.register("sum", KernelFacts(sum_of_products=True))


def _norm(x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    if ord != 2 or dtype is not None or x.is_complex():
        raise NotImplementedError("only squares overflow")
    return x.square().sum(dim, keepdim).sqrt()


KERNELS.register("linalg_vector_norm", KernelFacts(Kind.REDUCE, fused=True, steps=_norm))
KERNELS.register("linalg_cross", KernelFacts(Kind.REDUCE, low_on=CPU + CUDA))
KERNELS.register("""
    adaptive_avg_pool2d adaptive_avg_pool3d batch_norm_backward batch_norm_no_update batch_norm_with_update
    nll_loss2d_forward nll_loss_forward
    """, KernelFacts(low_on=CPU))  # fmt: skip
KERNELS.register("""
    dist multi_margin_loss multilabel_margin_loss_forward native_group_norm native_group_norm_backward renorm
    safe_softmax weight_norm_interface
    """, KernelFacts(fused=True))  # fmt: skip
KERNELS.register("fused_rms_norm fused_rms_norm_backward", KernelFacts(fused=True), since="2.9")
KERNELS.register("logsumexp", KernelFacts(fused=True, low_on=CPU + CUDA))
KERNELS.register(
    "native_batch_norm native_batch_norm_backward native_batch_norm_legit native_batch_norm_legit_no_training",
    KernelFacts(fused=True, low_on=CPU),
)
KERNELS.register("native_layer_norm", KernelFacts(fused=True, length=lambda a: math.prod(a[1])))
KERNELS.register("native_layer_norm_backward", KernelFacts(fused=True, adds_rows_low=True))
KERNELS.register("softmax", KernelFacts(fused=True, length=lambda a: a[0].shape[a[1]]))
KERNELS.register("log_softmax", KernelFacts(fused=True, low_on=CPU, length=lambda a: a[0].shape[a[1]]))
KERNELS.register(
    "softmax_backward_data log_softmax_backward_data",
    KernelFacts(fused=True, low_on=CPU, length=lambda a: a[0].shape[a[2]]),
)


def _variance(a: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    if a.is_complex():
        raise NotImplementedError("complex numbers are not done step by step")
    dims = list(range(a.dim())) if not dim else list(dim)
    mean = a.mean(dims, keepdim=True)
    count = math.prod(a.shape[d] for d in dims) - (1 if correction is None else correction)
    total = (a - mean).square().sum(dims, keepdim=keepdim)
    return total / max(count, 0), mean if keepdim else mean.view(total.shape)


def _deviation(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    variance, mean = _variance(*args, **kwargs)
    return variance.sqrt(), mean


KERNELS.register("std std_mean var var_mean", KernelFacts(fused=True))
KERNELS.register("var.correction", KernelFacts(fused=True, steps=lambda *a, **k: _variance(*a, **k)[0]))
KERNELS.register("std.correction", KernelFacts(fused=True, steps=lambda *a, **k: _deviation(*a, **k)[0]))
KERNELS.register("var_mean.correction", KernelFacts(fused=True, steps=_variance))
KERNELS.register("std_mean.correction", KernelFacts(fused=True, steps=_deviation))

FUNCTIONS.register("""
    native_batch_norm cudnn_batch_norm miopen_batch_norm batch_norm_gather_stats batch_norm_gather_stats_with_counts
    """, FunctionFacts(writes=(3, 4), updates=_STATISTICS))  # fmt: skip
FUNCTIONS.register("batch_norm instance_norm", FunctionFacts(inplace_option=True, updates=_STATISTICS))


def _default_eps(args: Any, kwargs: Any, info: torch.finfo) -> Any:
    if kwargs.get("eps") is None and (len(args) < 4 or args[3] is None):
        # Half types are computed in float32, and PyTorch takes the eps of that, not of the input as its documents say.
        eps = info.eps if info.bits >= 32 else torch.finfo(torch.float32).eps
        args, kwargs = args[:3], {**kwargs, "eps": eps}
    return args, kwargs


FUNCTIONS.register("rms_norm", FunctionFacts(defaults=_default_eps))
FUNCTIONS.register("_fused_rms_norm", FunctionFacts(defaults=_default_eps), maybe="not in early releases")

# --- running sums ------------------------------------------------------------------------------------------

KERNELS.register("cumsum cumulative_trapezoid logcumsumexp", KernelFacts(Kind.SCAN))


def _large_and_small(product: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The factors in the order that overflows if one does: some other order, on some device, may as well."""
    large = x.abs() > 1
    parts = product(torch.where(large, x, 1.0), *args, **kwargs), product(torch.where(large, 1.0, x), *args, **kwargs)
    return parts[0] * parts[1].to(torch.float32).to(x.dtype)


KERNELS.register(
    "cumprod", KernelFacts(Kind.SCAN, fused=True, steps=functools.partial(_large_and_small, torch.cumprod))
)
KERNELS.register(
    "prod", KernelFacts(Kind.SCAN, fused=True, steps=functools.partial(_large_and_small, torch.prod), low_on=CPU)
)

# --- values added into memory: at most how many into one element -------------------------------------------

_OVERLAPPING_WINDOWS: Final = 16  # of a pooling kernel, over one element


def _overlap(args: Any) -> int:
    sizes = [t.numel() for t in args if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())]
    return max(_OVERLAPPING_WINDOWS, max(sizes, default=1) // max(min(sizes, default=1), 1))


def _most(counts: Tensor) -> int:
    return max(1, int(counts.max())) if counts.numel() else 1


def _most_frequent(index: Tensor, args: Any) -> int:
    return _most(torch.bincount(index.reshape(-1))) if index.numel() else _overlap(args)


def _scattered(args: Any) -> int:
    ones = torch.ones(args[2].shape, dtype=torch.float32)
    return _most(torch.zeros(args[0].shape, dtype=torch.float32).scatter_add(args[1], args[2], ones))


def _put(args: Any) -> int:
    ones = torch.ones((), dtype=torch.float32)
    counts = torch.zeros(args[0].shape, dtype=torch.float32)
    return _most(counts.index_put(list(args[1]), ones, accumulate=True))


KERNELS.register("""
    adaptive_avg_pool2d_backward adaptive_avg_pool3d_backward adaptive_max_pool2d_backward
    adaptive_max_pool3d_backward as_strided_scatter avg_pool2d_backward avg_pool3d_backward col2im embedding_bag
    embedding_bag_backward embedding_bag_dense_backward embedding_bag_per_sample_weights_backward
    fractional_max_pool2d_backward fractional_max_pool3d_backward index_select_backward
    max_pool2d_with_indices_backward max_pool3d_with_indices_backward nll_loss2d_backward reflection_pad1d_backward
    reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward
    replication_pad3d_backward segment_reduce_backward unfold_backward unsafe_masked_index_put_accumulate
    value_selecting_reduction_backward
    """, KernelFacts(Kind.SCATTER, length=_overlap))  # fmt: skip
KERNELS.register("embedding_dense_backward", KernelFacts(Kind.SCATTER, length=lambda a: _most_frequent(a[1], a)))
KERNELS.register("index_add index_reduce", KernelFacts(Kind.SCATTER, length=lambda a: _most_frequent(a[2], a)))
KERNELS.register("scatter_add scatter_reduce", KernelFacts(Kind.SCATTER, length=_scattered))
KERNELS.register("scatter.reduce scatter.reduce_out", KernelFacts(Kind.SCATTER, length=_scattered))
KERNELS.register("scatter.value_reduce scatter.value_reduce_out", KernelFacts(Kind.SCATTER, length=_scattered))
KERNELS.register(
    "put", KernelFacts(Kind.SCATTER, length=lambda a: _most_frequent(a[1] % max(1, a[0].numel()), a) if a[3:] else 1)
)
KERNELS.register("index_put index_put_impl unsafe_index_put", KernelFacts(Kind.SCATTER, length=_put))
KERNELS.register("bincount histogramdd_from_bin_cts", KernelFacts(Kind.SCATTER, length=lambda a: a[0].numel()))
KERNELS.register("histogram", KernelFacts(Kind.SCATTER, accuracy=8, length=lambda a: a[0].numel()))

# --- images resampled --------------------------------------------------------------------------------------


def _longest_side(args: Any) -> int:
    return max(max(t.shape[2:], default=1) for t in args if isinstance(t, Tensor))


KERNELS.register("upsample_* grid_sampler*", KernelFacts(Kind.RESAMPLE, length=_longest_side))
KERNELS.register("""
    grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward upsample_bicubic2d
    upsample_bilinear2d upsample_linear1d upsample_trilinear3d
    """, KernelFacts(Kind.RESAMPLE, low_on=CPU, length=_longest_side))  # fmt: skip
