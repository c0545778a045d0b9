"""What is known about operators: which are exact, how long their sums are, how precise their functions are.

PyTorch's own schemas and tags answer most questions (views, in-place, pointwise, random); the tables here hold
the rest. Names are those of ATen operators without overload, in-place mark or `_copy`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch

from ..compat import decomposition_table
from . import optimizers

Tensor = torch.Tensor


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# --- what the golden run must know ----------------------------------------------------------------------

UNINITIALISED: Final = _words(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize_ resize_as_ new"
)
# Their result depends on the dtype itself, not only on the values: done in the device's dtype.
_BOUND_TO_DTYPE: Final = _words("nextafter nextafter_ view_dtype")
_TRANSFERS: Final = _words("cuda cpu npu mlu xpu musa hpu gcu soft mps")
_DEVICE_TYPES: Final = _words("cuda npu mlu xpu musa hpu gcu soft mps privateuseone cpu")


def last_name(name: str) -> str:
    """The last part of a dotted name (`last_name("torch.Tensor.add") == "add"`)."""
    return name.rsplit(".", 1)[-1]


def names_a_device(text: str) -> bool:
    """Whether a text is `cuda`, `npu:0` and the like (`names_a_device("cuda:1")`)."""
    kind, _, index = text.partition(":")
    return kind in _DEVICE_TYPES and (not index or index.isdecimal())


def is_bound_to_dtype(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call only means something in its own dtype (`x.view(torch.int16)`)."""
    last = last_name(name)
    if last in _BOUND_TO_DTYPE:
        return True
    return last == "view" and any(isinstance(v, torch.dtype) for v in (*args, *kwargs.values()))


def may_mutate(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call may write to its arguments (`may_mutate("torch.Tensor.add_", {})`)."""
    last = last_name(name)
    if last.startswith("__"):
        return last == "__setitem__" or (last.startswith("__i") and last not in ("__invert__", "__index__", "__int__"))
    return last.endswith("_") or kwargs.get("out") is not None or "inplace" in kwargs or last in _TAKES_INPLACE


_TAKES_INPLACE: Final = _words("""
    relu relu6 elu selu celu leaky_relu rrelu hardtanh hardswish hardsigmoid silu mish threshold dropout
    alpha_dropout dropout1d dropout2d dropout3d feature_alpha_dropout batch_norm instance_norm""")


# what autocast does in the lower precision, whatever the dtypes of the arguments
AUTOCAST_LOW: Final = _words("""
    linear matmul __matmul__ __rmatmul__ mm bmm mv addmm addmv addbmm baddbmm addr einsum chain_matmul multi_dot
    tensordot vecdot bilinear conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d prelu
    scaled_dot_product_attention multi_head_attention_forward lstm gru rnn_tanh rnn_relu lstm_cell gru_cell
    rnn_tanh_cell rnn_relu_cell addmm_ addmv_ addbmm_ baddbmm_ addr_""")


def on_cpu(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function to call on the CPU: a transfer to another device is a copy."""
    if name.startswith("torch.Tensor.") and last_name(name) in _TRANSFERS:
        return lambda tensor, *args, **kwargs: tensor.clone()
    if is_optimizer(name):
        return functools.partial(_with_narrow_numbers, function)
    return function


def is_optimizer(name: str) -> bool:
    """Whether a function is a fused optimizer (`is_optimizer("torch._fused_adam_")`)."""
    return optimizers.steps_of(last_name(name).strip("_")) is not None


def works_on_lists(name: str) -> bool:
    """Whether a function does the same to each tensor of its lists (`works_on_lists("torch._foreach_add_")`)."""
    return is_optimizer(name) or last_name(name).startswith("_foreach_")


def _with_narrow_numbers(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Fused optimizers take numbers of steps and scales in float32 alone, whatever they optimize."""

    def narrow(value: Any) -> Any:
        if isinstance(value, list) and value and all(isinstance(t, Tensor) and t.dim() == 0 for t in value):
            return [t.to(torch.float32) for t in value]
        return value

    tensors = {k: v.to(torch.float32) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    state_steps = len(args) - 1
    return function(*(narrow(a) if i == state_steps else a for i, a in enumerate(args)), **tensors)


def adapt(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments whose default depends on the dtype, written out (the `eps` of `rms_norm`)."""
    kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
    change = _DTYPE_DEFAULTS.get(last_name(name))
    if change is None:
        return args, kwargs
    inputs = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()]
    return change(args, kwargs, torch.finfo(inputs[0].dtype)) if inputs else (args, kwargs)


def _rms_norm(args: Any, kwargs: Any, info: torch.finfo) -> Any:
    if kwargs.get("eps") is None and (len(args) < 4 or args[3] is None):
        args, kwargs = args[:3], {**kwargs, "eps": info.eps}
    return args, kwargs


_DTYPE_DEFAULTS: Final[dict[str, Callable[[Any, Any, torch.finfo], Any]]] = {"rms_norm": _rms_norm}


def really_draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator that may be random is so here: attention without dropout is not."""
    name = func._schema.name
    if "_fused_sdp_choice" in name:
        return False
    for index, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "p", "dropout"):
            value = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
            if value == 0:
                return False
        if argument.name in ("train", "training"):
            value = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
            if value is False:
                return False
    return True


# --- what the rounding model must know: one entry per ATen operator -----------------------------------------


class Kind:
    """How an operator's kernel rounds."""

    VIEW = "view"  # no kernel
    EXACT = "exact"  # moves, selects or compares values
    SELECT = "select"  # exact, but free to choose among equal values
    POINTWISE = "pointwise"  # a function of a few values
    REDUCE = "reduce"  # sums many values in a wide accumulator, rounds once
    CONTRACT = "contract"  # a product of matrices; partial sums may be stored
    SCATTER = "scatter"  # adds into memory, value by value, in the result's dtype
    SCAN = "scan"  # running sums, each stored
    MATRIX = "matrix"  # factors matrices: errors are relative to the whole matrix
    FACTORY = "factory"  # computes a sequence from its endpoints
    RESAMPLE = "resample"  # weights come from coordinates, which are rounded at the size of the image


class Facts(NamedTuple):
    """The kind of an operator and the error of its function, in units of rounding errors."""

    kind: str
    accuracy: float = 1.0


_EXACT: Final = _words("""
    abs alias argwhere as_strided atleast_1d bitwise_and bitwise_left_shift bitwise_not bitwise_or
    bitwise_right_shift bitwise_xor block_diag bucketize cat ceil channel_shuffle clamp clamp_max clamp_min clone
    combinations complex concat conj conj_physical constant_pad_nd contiguous copy copysign diag diag_embed
    diagonal_backward diagonal_scatter embedding empty empty_like empty_permuted empty_strided eq equal eye fill
    fill_diagonal flip fliplr flipud floor fmax fmin frexp full full_like gather ge gt hardtanh
    hardtanh_backward heaviside imag im2col index index_copy index_fill index_select is_nonzero isclose isfinite
    isinf isin isnan isneginf isposinf le lift_fresh lift logical_and logical_not logical_or
    logical_xor lt masked_fill masked_scatter masked_select max_unpool2d max_unpool3d maximum meshgrid minimum
    movedim nan_to_num narrow ne neg new_empty new_empty_strided new_full new_ones new_zeros nonzero
    nonzero_static one_hot ones ones_like pad permute pin_memory pixel_shuffle pixel_unshuffle positive put
    real reflection_pad1d reflection_pad2d reflection_pad3d relu relu6 repeat repeat_interleave
    replication_pad1d replication_pad2d replication_pad3d resize resize_as resolve_conj resolve_neg roll rot90
    scalar_tensor scatter searchsorted select_backward select_scatter set sgn sign signbit slice_backward
    slice_scatter split squeeze stack take tensor_split threshold threshold_backward tile to to_copy tril
    tril_indices triu triu_indices trunc unfold unsafe_index unique_consecutive unique_dim view_as_complex
    view_as_real where zero zeros zeros_like local_scalar_dense assert_async has_compatible_shallow_copy_type
    reshape_alias unsafe_view unsafe_masked_index item nested_view_from_buffer values indices
    coalesced dense_dim sparse_dim nnz efficientzerotensor neg_view fw_primal make_dual unpack_dual
    count_nonzero
    """)
_SELECT: Final = _words("""
    max min amax amin aminmax argmax argmin argsort sort topk kthvalue median nanmedian mode cummax cummin
    max_pool1d max_pool2d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d cummax_helper
    cummin_helper msort sort_stable unique unique2
    """)
_CONTRACT: Final = _words("""
    mm bmm addmm baddbmm addbmm mv addmv dot vdot inner matmul linear einsum convolution convolution_backward
    cudnn_convolution mkldnn_convolution slow_conv2d_forward thnn_conv2d addmm_activation trilinear bilinear
    scaled_dot_product_flash_attention_for_cpu scaled_dot_product_flash_attention_for_cpu_backward
    scaled_dot_product_attention_math scaled_dot_product_efficient_attention scaled_dot_product_cudnn_attention
    scaled_dot_product_flash_attention flash_attention_forward efficient_attention_forward cdist_forward
    cdist_backward pdist_forward pdist_backward euclidean_dist mkldnn_rnn_layer mkldnn_rnn_layer_backward
    convolution_overrideable slow_conv3d_forward slow_conv_transpose2d slow_conv_transpose3d
    slow_conv_dilated2d slow_conv_dilated3d conv_tbc conv_tbc_backward native_multi_head_attention
    transformer_encoder_layer_fwd thnn_fused_lstm_cell linalg_matrix_exp matrix_exp linalg_vecdot segment_reduce
    mkldnn_linear scaled_mm grouped_mm foreach_matmul
    """)
_SCATTER: Final = _words("""
    index_add scatter_add scatter_reduce index_reduce index_put embedding_dense_backward put_accumulate
    embedding_bag_dense_backward embedding_bag_backward index_put_impl unsafe_index_put
    unsafe_masked_index_put_accumulate embedding_bag embedding_bag_per_sample_weights_backward
    max_pool2d_with_indices_backward max_pool3d_with_indices_backward adaptive_max_pool2d_backward
    adaptive_max_pool3d_backward fractional_max_pool2d_backward fractional_max_pool3d_backward
    value_selecting_reduction_backward
    reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
    replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
    adaptive_avg_pool2d_backward adaptive_avg_pool3d_backward avg_pool2d_backward avg_pool3d_backward
    unfold_backward col2im bincount histogram histogramdd_from_bin_cts nll_loss2d_backward
    index_select_backward as_strided_scatter as_strided_backward segment_reduce_backward
    """)
_SCAN: Final = _words("prod cumsum cumprod logcumsumexp cumulative_trapezoid")
_FACTORY: Final = _words(
    """arange linspace logspace range bartlett_window blackman_window hamming_window hann_window kaiser_window"""
)
_RESAMPLE_PREFIXES: Final = ("upsample_", "grid_sampler")
_MATRIX_PREFIXES: Final = ("linalg_",)
_MATRIX: Final = _words("""
    cholesky cholesky_inverse cholesky_solve triangular_solve geqrf ormqr orgqr lu_unpack lu_with_info lu_solve
    svd inverse slogdet logdet det symeig qr pinverse lobpcg ldl_factor_ex householder_product
    linalg_check_errors matrix_power lstsq histc
    """)
_NOT_MATRIX: Final = _words("linalg_vector_norm linalg_cross linalg_vecdot linalg_diagonal")

# Kernels that do several steps in one: PyTorch's own decomposition says which, and each of them rounds.
_COMPOSED: Final = _words("""
    gelu gelu_backward silu silu_backward mish mish_backward softplus softplus_backward log_sigmoid_forward
    log_sigmoid_backward logit logit_backward celu elu elu_backward selu sinc special_entr special_ndtr xlogy
    special_xlog1py native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward
    native_batch_norm native_batch_norm_backward native_batch_norm_legit native_batch_norm_legit_no_training softmax
    softmax_backward_data log_softmax log_softmax_backward_data safe_softmax logsumexp std var std_mean var_mean
    binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits huber_loss huber_loss_backward
    smooth_l1_loss smooth_l1_loss_backward mse_loss mse_loss_backward glu glu_backward dist renorm
    weight_norm_interface fused_rms_norm fused_rms_norm_backward soft_margin_loss soft_margin_loss_backward
    tanh_backward sigmoid_backward lerp addcmul addcdiv hardswish hardswish_backward hardsigmoid
    hardsigmoid_backward multi_margin_loss multilabel_margin_loss_forward polar prelu_kernel_backward
    logaddexp logaddexp2 rsub
    """)


@functools.cache
def decomposition(func: Any) -> Callable[..., Any] | None:
    """The steps inside a fused kernel, as a function of tensors (`decomposition(torch.ops.aten.gelu.default)`)."""
    if base_name(func) not in _COMPOSED or func._schema.is_mutable:
        return None
    if func._overloadname == "correction":
        return _VARIANCES.get(base_name(func))
    steps = decomposition_table.get(func)
    # Without the wrappers that promote dtypes, which there is no need of: the first call of them imports Dynamo.
    return None if steps is None else inspect.unwrap(steps)


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


_VARIANCES: Final[dict[str, Callable[..., Any]]] = {
    "var": lambda *args, **kwargs: _variance(*args, **kwargs)[0],
    "std": lambda *args, **kwargs: _deviation(*args, **kwargs)[0],
    "var_mean": _variance,
    "std_mean": _deviation,
}


# Largest error of a function in units of rounding errors of the dtype it is computed in, where it is more than
# a few: from the accuracy tables of CUDA's mathematical library, and measured for those without an entry there.
_ACCURACY: Final[dict[str, float]] = {
    "euclidean_dist": 2, "cdist_forward": 2, "logspace": 16, "histogram": 8,
    "pow": 4, "lgamma": 4, "erf": 3, "mvlgamma": 8, "erfc": 3, "erfinv": 3, "special_ndtri": 8,
    "special_log_ndtr": 8, "log_ndtr": 8,
    "digamma": 8, "polygamma": 32, "special_zeta": 32, "igamma": 64, "igammac": 64, "special_gammainc": 64,
    "special_bessel_j0": 16, "special_bessel_j1": 16, "special_bessel_y0": 16, "special_bessel_y1": 16,
    "special_modified_bessel_i0": 8, "special_modified_bessel_i1": 8, "special_modified_bessel_k0": 8,
    "special_modified_bessel_k1": 8, "special_scaled_modified_bessel_k0": 8,
    "special_scaled_modified_bessel_k1": 8, "special_spherical_bessel_j0": 8, "special_airy_ai": 64,
    "i0": 8, "special_i0e": 8, "special_i1": 8, "special_i1e": 8, "special_erfcx": 8,
}  # fmt: skip


# Correctly rounded by IEEE 754, on every device: the result's own rounding is all there is.
_ROUNDED_ONCE: Final = _words("add sub rsub mul div sqrt")


def rounds_once(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator's only error is the rounding of its result (`rounds_once(torch.ops.aten.mul.Tensor, {})`)."""
    return base_name(func) in _ROUNDED_ONCE and kwargs.get("alpha", 1) in (1, -1)


@functools.cache
def least_error(func: Any) -> float:
    """Error that a correct kernel may add to its result at least, in units of its arithmetic (0 for a copy)."""
    facts = facts_of(func)
    if facts.kind in (Kind.VIEW, Kind.EXACT, Kind.SELECT) or optimizers.steps_of(base_name(func)) is not None:
        return 0.0
    return 0.5 if base_name(func) in _ROUNDED_ONCE else facts.accuracy


_UNTAGGED: Final = _words("glu_jvp")  # pointwise, though PyTorch does not say so
_RECURRENCE: Final = 8.0  # orthogonal polynomials: one step for each degree


@functools.cache
def base_name(func: Any) -> str:
    """Plain name of an ATen overload (`aten::add_.Tensor` is `add`, `aten::_softmax` is `softmax`)."""
    name: str = func._schema.name.partition("::")[2]
    name = name.removeprefix("_foreach_").strip("_")
    return name.removesuffix("_copy")


@functools.cache
def facts_of(func: Any) -> Facts:
    """What is known about an ATen overload (`facts_of(torch.ops.aten.mm.default).kind == "contract"`)."""
    name = base_name(func)
    accuracy = _ACCURACY.get(name, _RECURRENCE if "_polynomial_" in name else 1.0)
    if _is_view(func):
        return Facts(Kind.VIEW)
    if name == "put" or (name == "round" and func._overloadname != "decimals"):
        return Facts(Kind.EXACT)
    if name in _SELECT or (name in ("maximum", "minimum")):
        return Facts(Kind.SELECT)
    if name in _EXACT:
        return Facts(Kind.EXACT)
    for names, kind in (
        (_CONTRACT, Kind.CONTRACT),
        (_SCATTER, Kind.SCATTER),
        (_SCAN, Kind.SCAN),
        (_FACTORY, Kind.FACTORY),
        (_MATRIX, Kind.MATRIX),
    ):
        if name in names:
            return Facts(kind, accuracy)
    if name.startswith(_RESAMPLE_PREFIXES):
        return Facts(Kind.RESAMPLE, accuracy)
    if name.startswith(_MATRIX_PREFIXES) and name not in _NOT_MATRIX:
        return Facts(Kind.MATRIX, 2 * accuracy)
    foreach = func._schema.name.startswith("aten::_foreach_") and name != "norm"
    foreach = foreach or optimizers.steps_of(name) is not None
    if torch.Tag.pointwise in func.tags or foreach or name in _UNTAGGED:
        return Facts(Kind.POINTWISE, accuracy)
    return Facts(Kind.REDUCE, accuracy)


_EXACT_IF_REAL: Final = _words("abs sgn")  # of complex numbers: a root of squares, and a quotient by it


def facts_for(func: Any, args: tuple[Any, ...]) -> Facts:
    """`facts_of`, where they depend on the arguments as well (`facts_for(torch.ops.aten.abs.default, (z,))`)."""
    if base_name(func) in _EXACT_IF_REAL and any(t.is_complex() for t in _flat(args)):
        return Facts(Kind.POINTWISE)
    return facts_of(func)


@functools.cache
def jumps(func: Any) -> bool:
    """Whether a quotient is rounded to the dtype and then to a whole number: one step more or less is no error."""
    return base_name(func) in ("floor_divide", "fmod", "remainder") or func._overloadname.endswith("_mode")


_SUMS_OF_PRODUCTS: Final = _words("""
    mm bmm addmm baddbmm mv addmv dot convolution convolution_backward mkldnn_convolution sum
    """)
_PLAIN_MOVES: Final = _words("""
    clone copy to cat stack zeros zeros_like empty empty_like empty_strided new_zeros new_empty
    new_empty_strided constant_pad_nd unsafe_view select_backward slice_backward fill ones_like zero
    """)


def is_sum_of_products(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether squaring all numbers squares every term: products, sums and moves without factors."""
    name = base_name(func)
    if _is_view(func) or name in _PLAIN_MOVES:
        return True
    factors = [v for k, v in kwargs.items() if k in ("alpha", "beta")]
    return name in _SUMS_OF_PRODUCTS and all(f == 1 for f in factors) and not any(t.is_complex() for t in _flat(args))


def is_aten(func: Any) -> bool:
    """Whether an operator is PyTorch's own, not somebody's by torch.library (`is_aten(torch.ops.aten.mm.default)`)."""
    return func.namespace in ("aten", "prims", "prim")


@functools.cache
def is_composition(func: Any) -> bool:
    """Whether an operator is made of other operators that the dispatcher does not show on its own."""
    return not is_aten(func) or base_name(func) in _OPENED


_OPENED: Final = _words("soft_margin_loss soft_margin_loss_backward binary_cross_entropy_with_logits")


# Kernels that compute in the dtype of the result, even where that is a half type, by the device they run on.
# Measured with benchmarks/verdict_op_db.py. `soft` runs the CPU's kernels.
_LOW_ON_CPU: Final = _words("""
    log_softmax log_softmax_backward_data softmax_backward_data adaptive_avg_pool3d native_batch_norm
    native_batch_norm_backward native_batch_norm_legit native_batch_norm_legit_no_training batch_norm_with_update
    batch_norm_no_update batch_norm_backward upsample_linear1d upsample_bilinear2d upsample_bicubic2d
    upsample_trilinear3d grid_sampler_2d grid_sampler_3d grid_sampler_2d_backward grid_sampler_3d_backward mse_loss
    linalg_cross logit logit_backward addr special_i0e binary_cross_entropy binary_cross_entropy_backward
    polygamma prod glu_backward prelu_kernel_backward nll_loss_forward nll_loss2d_forward huber_loss smooth_l1_loss
    linspace logspace histc adaptive_avg_pool2d convolution convolution_backward sigmoid_backward logsumexp xlogy
    mse_loss_backward huber_loss_backward fused_adagrad
    """)
_LOW_ON_CUDA: Final = _words("mse_loss smooth_l1_loss huber_loss addr linalg_cross logsumexp")
_LOW: Final = {"cuda": _LOW_ON_CUDA, "cpu": _LOW_ON_CPU, "soft": _LOW_ON_CPU, "privateuseone": _LOW_ON_CPU}


def computes_low(func: Any, device: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether this device's kernel rounds every step to the result's dtype (`computes_low(f, "cpu", {})`)."""
    low = _LOW.get(device)
    if low is None:
        return False
    scaled = kwargs.get("alpha", 1) not in (1, -1) and low is _LOW_ON_CPU
    return scaled or base_name(func) in low


def steps_in_low(func: Any, args: tuple[Any, ...]) -> float:
    """How much larger than one rounding the error of a product in a half type is: gradients of images are added up
    window by window (`steps_in_low(torch.ops.aten.mm.default, args) == 2`)."""
    if base_name(func) != "convolution_backward":
        return 2.0
    return max(2.0, math.sqrt(math.prod(args[2].shape[2:])))


# On the CPU: gradients of weights and biases are summed over the rows in their own dtype, not in a wider one.
_ADDS_ROWS_LOW: Final = _words("native_layer_norm_backward")


def adds_rows_low(func: Any, device: str) -> bool:
    """Whether this device's kernel sums over rows in the result's dtype (`adds_rows_low(f, "cpu")`)."""
    return base_name(func) in _ADDS_ROWS_LOW and _LOW.get(device) is _LOW_ON_CPU


def _is_view(func: Any) -> bool:
    flag = getattr(func, "is_view", None)
    if flag is not None:
        return bool(flag)
    return any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments)


def length_of_sums(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """How many values at most go into one element of the result, from shapes alone.

    >>> length_of_sums(torch.ops.aten.mm.default, (torch.ones(2, 7), torch.ones(7, 3)), {})
    7
    """
    try:
        return max(1, _length(func, args, kwargs))
    except Exception:  # arguments of a shape that was not foreseen
        return max((t.numel() for t in _flat(args)), default=1) or 1


def _length(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    name = base_name(func)
    exact = _CONTRACTED.get(name)
    if exact is not None:
        return exact(args)
    inputs = _flat(args)
    if not inputs:
        return 1
    if name in _SCATTER:
        return _most_hits(name, args)
    if name.startswith(_RESAMPLE_PREFIXES):
        return max(max(t.shape[2:], default=1) for t in inputs)
    if func._schema.name.startswith("aten::_foreach_"):  # each tensor of the list is reduced on its own
        return max(t.numel() for t in inputs)
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args)} | dict(kwargs)
    if "dim" in named and inputs[0].dim():
        dims = named["dim"]
        dims = range(inputs[0].dim()) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
        return math.prod(inputs[0].shape[d] for d in dims)
    if any(argument.name == "dim" for argument in func._schema.arguments) or len(inputs) == 1:
        return inputs[0].numel()
    return max(max(t.shape, default=1) for t in inputs)


def _flat(args: tuple[Any, ...]) -> list[Tensor]:
    return [t for a in args for t in (a if isinstance(a, (list, tuple)) else (a,)) if isinstance(t, Tensor)]


def _most_hits(name: str, args: tuple[Any, ...]) -> int:
    """How many values at most are added into one place of memory."""
    hits: Tensor | None = None
    if name in ("embedding_dense_backward", "index_add", "index_reduce"):
        index = args[1] if name == "embedding_dense_backward" else args[2]
        hits = torch.bincount(index.reshape(-1)) if index.numel() else None
    elif name in ("scatter_add", "scatter_reduce"):
        ones = torch.ones(args[2].shape, dtype=torch.float32)
        hits = torch.zeros(args[0].shape, dtype=torch.float32).scatter_add(args[1], args[2], ones)
    elif name in ("index_put", "index_put_impl", "unsafe_index_put"):
        ones = torch.ones((), dtype=torch.float32)
        hits = torch.zeros(args[0].shape, dtype=torch.float32).index_put(list(args[1]), ones, accumulate=True)
    elif name in ("histogram", "histogramdd_from_bin_cts", "bincount"):
        return int(args[0].numel())
    if hits is not None:
        return max(1, int(hits.max())) if hits.numel() else 1
    sizes = [t.numel() for t in args if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())]
    return max(_OVERLAP, max(sizes, default=1) // max(min(sizes, default=1), 1))


_OVERLAP: Final = 16  # windows of a pooling kernel that cover one place


def _convolved(args: Any) -> int:
    return math.prod(args[1].shape[1:])


def _convolved_backward(args: Any) -> int:
    grad, _, weight = args[0], args[1], args[2]
    return int(max(grad.numel() // max(grad.shape[1], 1), math.prod(weight.shape) // max(weight.shape[1], 1)))


def _attended(args: Any) -> int:
    return int(max(args[0].shape[-1], args[1].shape[-2]))


_CONTRACTED: Final[dict[str, Callable[[Any], int]]] = {
    "mm": lambda a: a[0].shape[-1],
    "bmm": lambda a: a[0].shape[-1],
    "mv": lambda a: a[0].shape[-1],
    "dot": lambda a: a[0].shape[0],
    "vdot": lambda a: a[0].shape[0],
    "addmm": lambda a: a[1].shape[-1] + 1,
    "baddbmm": lambda a: a[1].shape[-1] + 1,
    "addbmm": lambda a: a[1].shape[-1] * a[1].shape[0] + 1,
    "addmv": lambda a: a[1].shape[-1] + 1,
    "convolution": _convolved,
    "convolution_backward": _convolved_backward,
    "scaled_dot_product_flash_attention_for_cpu": _attended,
    "softmax": lambda a: a[0].shape[a[1]],
    "log_softmax": lambda a: a[0].shape[a[1]],
    "softmax_backward_data": lambda a: a[0].shape[a[2]],
    "log_softmax_backward_data": lambda a: a[0].shape[a[2]],
    "native_layer_norm": lambda a: math.prod(a[1]),
}


# --- places instead of values: argmax, sort, topk ------------------------------------------------------------

_INDEX_DEFAULTS: Final[dict[str, Any]] = {
    "argmax": None, "argmin": None, "max": ..., "min": ..., "sort": -1, "argsort": -1, "topk": -1, "kthvalue": -1,
    "median": ..., "nanmedian": ..., "mode": -1, "cummax": ..., "cummin": ..., "msort": 0,
}  # fmt: skip
_DIM_POSITION: Final = {"topk": 2, "kthvalue": 2}
_PERMUTES: Final = _words("sort argsort topk")


def chosen_values(name: str, source: Any, device: Tensor, golden: Tensor, number: int) -> Tensor | None:
    """Where two results that are places in the input point at different values; None if they are no places.

    `number` is that of the result: values come first, places second, and both may be int64.

    Equal values may be chosen in any order, unless the call asks for a stable one.
    """
    shape = device.shape
    last = last_name(name)
    if last == "linspace":
        return _truncated_otherwise(source, device)
    if last not in _INDEX_DEFAULTS or not source.args or not isinstance(source.args[0], Tensor):
        return None
    if last == "mode":
        return _less_frequent(source, device, golden)
    if device.dtype != torch.int64 or source.kwargs.get("stable") or (number == 0 and not last.startswith("arg")):
        return None
    values = source.args[0].detach()
    position = _DIM_POSITION.get(last, 1)
    dim = source.args[position] if len(source.args) > position else source.kwargs.get("dim", _INDEX_DEFAULTS[last])
    if isinstance(dim, bool) or dim is ...:
        dim = _INDEX_DEFAULTS[last] if _INDEX_DEFAULTS[last] is not ... else None
    if dim is None:
        values, dim = values.reshape(-1), 0
        device, golden = device.reshape(-1) if device.dim() else device[None], golden.reshape(-1)
    if values.dim() == 0:
        return (device != golden).reshape(shape)
    if device.dim() == values.dim() - 1:
        device, golden = device.unsqueeze(dim), golden.unsqueeze(dim)
    if device.dim() != values.dim():
        return None
    outside = (device < 0) | (device >= values.shape[dim])
    at_device = values.gather(dim, device.clamp(0, values.shape[dim] - 1))
    at_golden = values.gather(dim, golden)
    different: Tensor = outside | ~((at_device == at_golden) | (at_device.isnan() & at_golden.isnan()))
    if last in _PERMUTES and device.shape[dim] > 1:
        ordered = device.sort(dim).values
        repeated = (ordered.diff(dim=dim) == 0).any(dim, keepdim=True)
        different = different | repeated.expand_as(different)
    return different.reshape(shape)


def _truncated_otherwise(source: Any, device: Tensor) -> Tensor | None:
    """Where whole numbers of a linspace are not what rounding in float32, and then cutting off, may give.

    The ends are whole numbers, too; steps between them may hit a whole number exactly, from either side.
    """
    ends = [source.kwargs.get(key) for key in ("start", "end", "steps")]
    ends[: len(source.args)] = source.args[:3]
    start, end, steps = (float(e) if e is not None else math.nan for e in ends)
    if not (math.isfinite(start) and math.isfinite(end) and steps > 1) or device.numel() != int(steps):
        return None
    start, end = math.trunc(start), math.trunc(end)
    exact = start + (end - start) * torch.arange(int(steps), dtype=torch.float64) / (int(steps) - 1)
    slack = 4 * torch.finfo(torch.float32).eps * max(abs(start), abs(end), 1)
    low, high = (exact - slack).trunc(), (exact + slack).trunc()
    wide = device.to(torch.float64).reshape(-1)
    return ~((wide == low) | (wide == high)).reshape(device.shape)


def _less_frequent(source: Any, device: Tensor, golden: Tensor) -> Tensor | None:
    """Where the device's value (or the value that its index points at) is not among the most frequent ones."""
    values: Tensor = source.args[0].detach()
    dim = source.args[1] if len(source.args) > 1 else source.kwargs.get("dim", -1)
    shape = device.shape
    if values.dim() == 0 or device.dim() not in (values.dim(), values.dim() - 1):
        return None
    if device.dim() == values.dim() - 1:
        device, golden = device.unsqueeze(dim), golden.unsqueeze(dim)

    def frequency(chosen: Tensor) -> Tensor:
        return (values == chosen).sum(dim, keepdim=True)

    most = frequency(golden)
    rarer = frequency(device) != most
    is_index = bool((most == 0).any()) or (device.dtype == torch.int64 != values.dtype)
    if device.dtype == torch.int64 and (is_index or bool(rarer.any())):  # places, as far as whole numbers tell
        inside = (device >= 0) & (device < values.shape[dim])
        at_device = values.gather(dim, device.clamp(0, values.shape[dim] - 1))
        rarer = ~inside | (frequency(at_device) != frequency(values.gather(dim, golden)))
    return rarer.reshape(shape)


# --- vectors of unit length: their sign (or phase) is free ----------------------------------------------------

_FREE_VECTORS: Final[dict[tuple[str, int], int]] = {  # (function, number of the result): dimension along a vector
    ("eigh", 1): -2,
    ("eig", 1): -2,
    ("svd", 0): -2,
    ("svd", 2): -1,
}


def turned(name: str, number: int, device: Any, golden: Any) -> Any:
    """The golden vectors with the signs that the device chose, where signs are free (`torch.linalg.eigh`)."""
    phase = _phase(name, number, device, golden)
    return golden if phase is None else golden * phase


def gradient_turned(name: str, number: int, device: Any, golden: Any, grad: Tensor) -> Tensor:
    """What came back to a result of the device, for the golden result, whose vectors may have other signs."""
    phase = _phase(name, number, device, golden)
    return grad if phase is None else grad * phase.conj()


def has_free_vectors(name: str) -> bool:
    """Whether a function returns vectors whose signs are free (`has_free_vectors("torch.linalg.svd")`)."""
    return any(last == last_name(name) for last, _ in _FREE_VECTORS)


def _phase(name: str, number: int, device: Any, golden: Any) -> Tensor | None:
    """What the golden vectors are multiplied with to be those of the device; None where nothing is free."""
    last = last_name(name)
    along = _FREE_VECTORS.get((last, number))
    if along is None or not isinstance(device, Tensor) or device.shape != golden.shape or device.dim() < 2:
        return None
    if last == "svd" and number == 2 and ".linalg." not in name:
        along = -2  # torch.svd returns V, torch.linalg.svd its conjugate transpose
    exact = golden.detach()
    product = (exact.conj() * device.detach().to(exact.dtype)).sum(along, keepdim=True)
    return torch.where(product.abs() > 0, product.sgn(), torch.ones_like(product))
