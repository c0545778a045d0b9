"""Operators without arithmetic: they ask, allocate, move, compare, convert, rename or communicate."""

from __future__ import annotations

from typing import Final

from ditorch_common.environment import PLUGIN_DEVICES

from .registry import CPU, FUNCTIONS, KERNELS, NODES, FunctionFacts, KernelFacts, Kind

KERNELS.register("""
    alias argwhere as_strided assert_async atleast_1d bitwise_and bitwise_left_shift bitwise_not bitwise_or
    bitwise_right_shift bitwise_xor block_diag bucketize ceil channel_shuffle clamp clamp_max clamp_min coalesced
    combinations complex concat conj conj_physical contiguous copysign count_nonzero dense_dim diag diag_embed
    diagonal_backward diagonal_scatter efficientzerotensor embedding empty_permuted eq equal eye fill_diagonal flip
    fliplr flipud floor fmax fmin frexp full full_like fw_primal gather ge gt hardtanh hardtanh_backward
    has_compatible_shallow_copy_type heaviside im2col imag index index_fill index_select indices is_nonzero isclose
    isfinite isin isinf isnan isneginf isposinf item le lift lift_fresh local_scalar_dense logical_and logical_not
    logical_or logical_xor lt make_dual masked_fill masked_scatter masked_select max_unpool2d max_unpool3d meshgrid
    movedim nan_to_num narrow ne neg neg_view nested_view_from_buffer new_full new_ones nnz nonzero nonzero_static
    one_hot ones pad permute pin_memory pixel_shuffle pixel_unshuffle positive real reflection_pad1d
    reflection_pad2d reflection_pad3d relu relu6 repeat repeat_interleave replication_pad1d replication_pad2d
    replication_pad3d reshape_alias resize resize_as resolve_conj resolve_neg roll rot90 round scalar_tensor scatter
    searchsorted select_scatter set sign signbit slice_scatter sparse_dim split squeeze take tensor_split threshold
    threshold_backward tile tril tril_indices triu triu_indices trunc unfold unique_consecutive unique_dim
    unpack_dual unsafe_index unsafe_masked_index values view_as_complex view_as_real where
    """, KernelFacts(Kind.EXACT))  # fmt: skip
KERNELS.register("round.decimals", KernelFacts())
KERNELS.register("abs sgn", KernelFacts(Kind.EXACT, exact_if_real=True))
KERNELS.register("""
    cat clone constant_pad_nd copy empty empty_like empty_strided fill new_empty new_empty_strided new_zeros ones_like
    select_backward slice_backward stack to unsafe_view zero zeros zeros_like
    """, KernelFacts(Kind.EXACT, plain_move=True))  # fmt: skip
KERNELS.register(
    "arange range bartlett_window blackman_window hamming_window hann_window kaiser_window", KernelFacts(Kind.FACTORY)
)
KERNELS.register("linspace", KernelFacts(Kind.FACTORY, low_on=CPU))
KERNELS.register("logspace", KernelFacts(Kind.FACTORY, accuracy=16, low_on=CPU))

FUNCTIONS.register("new", FunctionFacts(uninitialised=True))
FUNCTIONS.register("_make_dual _unpack_dual", FunctionFacts(left_out="derivatives in forward mode are not compared"))
FUNCTIONS.register(
    "empty empty_like empty_permuted empty_strided new_empty new_empty_strided resize_ resize_as_",
    FunctionFacts(uninitialised=True, stays=True),
)
FUNCTIONS.register("""
    _pin_memory _reshape_alias _unsafe_view detach_ lift lift_fresh set_ set_data unsafe_chunk unsafe_split
    unsafe_split_with_sizes
    """, FunctionFacts(stays=True))  # fmt: skip
FUNCTIONS.register("alias detach view", FunctionFacts(stays=True, aliases=True))
FUNCTIONS.register("""
    as_strided chunk diagonal expand expand_as moveaxis movedim narrow permute select squeeze swapaxes swapdims t
    transpose unbind unflatten unsqueeze view_as view_as_complex view_as_real
    """, FunctionFacts(aliases=True))  # fmt: skip
FUNCTIONS.register("_to_copy copy_ _copy_from", FunctionFacts(moves=True))
FUNCTIONS.register("nextafter nextafter_", FunctionFacts(bound_to_dtype=True))
FUNCTIONS.register(
    "bfloat16 bool byte cdouble cfloat chalf char double float half int long short type type_as",
    FunctionFacts(converts="dtype"),
)
FUNCTIONS.register("to", FunctionFacts(converts="both"))
_TO_DEVICE: Final = FunctionFacts(converts="device")
FUNCTIONS.register("cpu cuda mps xpu", _TO_DEVICE)
FUNCTIONS.register(" ".join(PLUGIN_DEVICES), _TO_DEVICE, maybe="defined by the device's plugin")

_ASKS: Final = FunctionFacts(bookkeeping=True)
FUNCTIONS.register("""
    __array__ __array_priority__ __array_wrap__ __class__ __contains__ __cuda_array_interface__ __deepcopy__ __dir__
    __dlpack__ __dlpack_device__ __format__ __hash__ __iter__ __reduce__ __reduce_ex__ __repr__ __setstate__
    __torch_dispatch__ _backward_hooks _dimI _dimV _indices _is_view _is_zerotensor _nnz _reduce_ex_internal
    _typed_storage _values _version apply_ as_subclass broadcast_shapes can_cast compiled_with_cxx11_abi data_ptr
    dense_dim dim dim_order element_size finfo get_default_device get_default_dtype get_device get_rng_state
    has_torch_function iinfo initial_seed is_complex is_conj is_contiguous is_distributed is_floating_point
    is_grad_enabled is_inference is_inference_mode_enabled is_neg is_nonzero is_set_to is_shared is_signed is_storage
    is_tensor is_warn_always_enabled itemsize layout manual_seed map_ ndim ndimension nelement numel promote_types
    q_per_channel_axis q_scale q_zero_point qscheme register_hook register_post_accumulate_grad_hook requires_grad
    requires_grad_ result_type retain_grad seed set_default_device set_grad_enabled set_printoptions set_rng_state
    share_memory_ size sparse_dim storage storage_offset storage_type stride typename untyped_storage
    """, _ASKS)  # fmt: skip
FUNCTIONS.register(
    "_update_names align_as has_names names refine_names rename rename_", _ASKS, maybe="named tensors, not in 2.13"
)
FUNCTIONS.register(
    "_has_compatible_shallow_copy_type is_pinned is_same_size pin_memory record_stream",
    FunctionFacts(bookkeeping=True, stays=True),
)
FUNCTIONS.register("""
    __radd__ __rand__ __rdiv__ __rfloordiv__ __rlshift__ __rmod__ __rmul__ __ror__ __rpow__ __rrshift__ __rsub__
    __rtruediv__ __rxor__
    """, FunctionFacts(reflected=True))  # fmt: skip
FUNCTIONS.register("""
    distributed.all_reduce distributed.all_gather distributed.all_gather_into_tensor distributed.all_gather_coalesced
    distributed.all_reduce_coalesced distributed.all_to_all distributed.all_to_all_single distributed.barrier
    distributed.broadcast distributed.gather distributed.reduce distributed.reduce_scatter
    distributed.reduce_scatter_tensor distributed.scatter distributed.send distributed.recv distributed.isend
    distributed.irecv
    """, FunctionFacts(collective=True))  # fmt: skip
NODES.register("""
    AliasBackward0 PermuteBackward0 SqueezeBackward0 SqueezeBackward1 TBackward0 TransposeBackward0 UnsafeViewBackward0
    UnsqueezeBackward0 ViewBackward0
    """, False)  # fmt: skip
