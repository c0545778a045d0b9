"""Products of matrices, convolutions, attention, recurrent networks, and factors of matrices."""

from __future__ import annotations

import math
from typing import Any

import torch

from .registry import CPU, CUDA, FUNCTIONS, KERNELS, FunctionFacts, KernelFacts, Kind

Tensor = torch.Tensor

KERNELS.register("""
    addmm_activation bilinear cdist_backward conv_tbc conv_tbc_backward convolution_overrideable cudnn_convolution
    efficient_attention_forward einsum flash_attention_forward inner linalg_matrix_exp linalg_vecdot linear matmul
    matrix_exp mkldnn_linear mkldnn_rnn_layer mkldnn_rnn_layer_backward native_multi_head_attention pdist_backward
    pdist_forward scaled_dot_product_attention_math scaled_dot_product_cudnn_attention
    scaled_dot_product_efficient_attention scaled_dot_product_flash_attention
    scaled_dot_product_flash_attention_for_cpu_backward scaled_mm segment_reduce slow_conv2d_forward
    slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d slow_conv_transpose3d thnn_conv2d
    thnn_fused_lstm_cell transformer_encoder_layer_fwd trilinear
    """, KernelFacts(Kind.CONTRACT))  # fmt: skip
KERNELS.register("grouped_mm", KernelFacts(Kind.CONTRACT), since="2.8")
KERNELS.register("cdist_forward", KernelFacts(Kind.CONTRACT, accuracy=2))


def _distances(x: Tensor, y: Tensor) -> Tensor:
    """By a product of matrices: what is left of the distance of a point from itself is the root of a rounding error."""
    squares = x.square().sum(-1, True) + y.square().sum(-1, True).mT - 2 * (x @ y.mT)
    return squares.clamp_min(0).sqrt()


KERNELS.register("euclidean_dist", KernelFacts(Kind.CONTRACT, fused=True, steps=_distances))
KERNELS.register("mkldnn_convolution", KernelFacts(Kind.CONTRACT, sum_of_products=True))
KERNELS.register("addr", KernelFacts(low_on=CPU + CUDA))


KERNELS.register("mm bmm mv dot", KernelFacts(Kind.CONTRACT, sum_of_products=True, length=lambda a: a[0].shape[-1]))
KERNELS.register("affine_grid_generator", KernelFacts(Kind.CONTRACT, length=lambda a: a[0].shape[-1]))
KERNELS.register("vdot", KernelFacts(Kind.CONTRACT, length=lambda a: a[0].shape[-1]))
KERNELS.register(
    "addmm baddbmm addmv", KernelFacts(Kind.CONTRACT, sum_of_products=True, length=lambda a: a[1].shape[-1] + 1)
)
KERNELS.register("addbmm", KernelFacts(Kind.CONTRACT, length=lambda a: a[1].shape[-1] * a[1].shape[0] + 1))
KERNELS.register(
    "convolution",
    KernelFacts(Kind.CONTRACT, sum_of_products=True, low_on=CPU, length=lambda a: math.prod(a[1].shape[1:])),
)


def _convolution_backward(args: Any) -> int:
    grad, _, weight = args[:3]
    return int(max(grad.numel() // max(grad.shape[1], 1), math.prod(weight.shape) // max(weight.shape[1], 1)))


KERNELS.register(
    "convolution_backward",
    KernelFacts(Kind.CONTRACT, sum_of_products=True, low_on=CPU, length=_convolution_backward),
)
KERNELS.register(
    "scaled_dot_product_flash_attention_for_cpu",
    KernelFacts(Kind.CONTRACT, length=lambda a: max(a[0].shape[-1], a[1].shape[-2])),
)

FUNCTIONS.register("linear mm bmm matmul __matmul__", FunctionFacts(autocast_low=True, factors_at=0))
FUNCTIONS.register("addmm baddbmm", FunctionFacts(autocast_low=True, factors_at=1))
FUNCTIONS.register("__rmatmul__", FunctionFacts(autocast_low=True, reflected=True))
FUNCTIONS.register("""
    addbmm addbmm_ addmm_ addmv addmv_ addr addr_ baddbmm_ bilinear chain_matmul conv1d conv2d conv3d conv_tbc
    conv_transpose1d conv_transpose2d conv_transpose3d einsum gru_cell lstm_cell multi_dot mv prelu rnn_relu_cell
    rnn_tanh_cell tensordot vecdot
    """, FunctionFacts(autocast_low=True))  # fmt: skip
FUNCTIONS.register(  # they draw for dropout
    "multi_head_attention_forward scaled_dot_product_attention", FunctionFacts(autocast_low=True, draws=True)
)
FUNCTIONS.register("gru lstm rnn_relu rnn_tanh", FunctionFacts(autocast_low=True, draws=True, cudnn=True))

KERNELS.register("linalg_*", KernelFacts(Kind.MATRIX, accuracy=2))
KERNELS.register("""
    cholesky cholesky_inverse cholesky_solve det geqrf inverse linalg_check_errors logdet lu_solve lu_unpack
    lu_with_info matrix_power orgqr ormqr pinverse qr slogdet svd triangular_solve
    """, KernelFacts(Kind.MATRIX))  # fmt: skip
KERNELS.register("histc", KernelFacts(Kind.MATRIX, low_on=CPU))
