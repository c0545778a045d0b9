"""Functions of a few values: how precise they are, and which are done in several steps."""

from __future__ import annotations

from .registry import CPU, CUDA, FUNCTIONS, KERNELS, FunctionFacts, KernelFacts, Kind

KERNELS.register("add div mul sqrt sub", KernelFacts(rounded_once=True))
KERNELS.register("rsub", KernelFacts(rounded_once=True, fused=True))
KERNELS.register("fmod remainder", KernelFacts(jumps=True))
KERNELS.register("floor_divide", KernelFacts(Kind.POINTWISE, jumps=True))  # PyTorch does not tag it
KERNELS.register("glu_jvp", KernelFacts(Kind.POINTWISE))  # PyTorch does not tag it

# Accuracies are those of CUDA's mathematical library, and measured for functions that its tables lack.
KERNELS.register("erf erfc erfinv", KernelFacts(accuracy=3))
KERNELS.register("lgamma pow", KernelFacts(accuracy=4))
KERNELS.register("""
    digamma i0 mvlgamma special_erfcx special_i1 special_i1e special_log_ndtr special_modified_bessel_i0
    special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
    special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0
    """, KernelFacts(accuracy=8))  # fmt: skip
KERNELS.register("special_i0e", KernelFacts(accuracy=8, low_on=CPU))
# Recurrences: one step for each degree.
KERNELS.register("""
    special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
    special_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he
    special_laguerre_polynomial_l special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t
    special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
    special_shifted_chebyshev_polynomial_w
    """, KernelFacts(accuracy=8))  # fmt: skip
KERNELS.register("special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1", KernelFacts(accuracy=16))
KERNELS.register("special_zeta", KernelFacts(accuracy=32))
KERNELS.register("polygamma", KernelFacts(accuracy=32, low_on=CPU))
KERNELS.register("igamma igammac special_airy_ai special_gammainc", KernelFacts(accuracy=64))

KERNELS.register("""
    addcdiv addcmul celu elu elu_backward gelu gelu_backward glu hardsigmoid hardsigmoid_backward hardswish
    hardswish_backward lerp log_sigmoid_backward log_sigmoid_forward logaddexp logaddexp2 mish mish_backward polar
    selu silu_backward sinc softplus softplus_backward special_entr special_ndtr special_xlog1py
    """, KernelFacts(fused=True))  # fmt: skip
# exp overflows below -88.7
KERNELS.register("sigmoid", KernelFacts(fused=True, steps=lambda x: 1 / (1 + (-x).exp())))
KERNELS.register("silu", KernelFacts(fused=True, steps=lambda x: x / (1 + (-x).exp())))
KERNELS.register("""
    glu_backward logit logit_backward prelu_kernel_backward xlogy
    """, KernelFacts(fused=True, low_on=CPU))  # fmt: skip
KERNELS.register("smooth_l1_loss_backward tanh_backward", KernelFacts(fused=True, low_on=CUDA))
KERNELS.register("""
    binary_cross_entropy binary_cross_entropy_backward huber_loss huber_loss_backward mse_loss mse_loss_backward
    sigmoid_backward smooth_l1_loss
    """, KernelFacts(fused=True, low_on=CPU + CUDA))  # fmt: skip
KERNELS.register(
    "binary_cross_entropy_with_logits soft_margin_loss soft_margin_loss_backward",
    KernelFacts(fused=True, hidden_steps=True),
)

FUNCTIONS.register("""
    celu elu hardsigmoid hardswish hardtanh leaky_relu mish relu relu6 selu silu threshold
    """, FunctionFacts(inplace_option=True))  # fmt: skip
