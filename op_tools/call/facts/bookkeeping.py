"""Functions that run no kernel of a model, operators with swapped operands, collectives, and autograd nodes."""

from __future__ import annotations

from typing import Final

from ..registry import FUNCTIONS, NODES, FunctionFacts

_ASKS: Final = FunctionFacts(bookkeeping=True)
FUNCTIONS.register(
    """
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
    """,
    _ASKS,
)
FUNCTIONS.register(
    "_update_names align_as has_names names refine_names rename rename_", _ASKS, maybe="PyTorch gives up named tensors"
)
FUNCTIONS.register(
    "_has_compatible_shallow_copy_type is_pinned is_same_size pin_memory record_stream",
    FunctionFacts(bookkeeping=True, stays=True),
)
FUNCTIONS.register(
    """
    __radd__ __rand__ __rdiv__ __rfloordiv__ __rlshift__ __rmod__ __rmul__ __ror__ __rpow__ __rrshift__ __rsub__
    __rtruediv__ __rxor__
    """,
    FunctionFacts(reflected=True),
)
FUNCTIONS.register(
    """
    distributed.all_reduce distributed.all_gather distributed.all_gather_into_tensor distributed.all_gather_coalesced
    distributed.all_reduce_coalesced distributed.all_to_all distributed.all_to_all_single distributed.barrier
    distributed.broadcast distributed.gather distributed.reduce distributed.reduce_scatter
    distributed.reduce_scatter_tensor distributed.scatter distributed.send distributed.recv distributed.isend
    distributed.irecv
    """,
    FunctionFacts(collective=True),
    maybe="PyTorch may be built without torch.distributed",
)
NODES.register(
    """
    AliasBackward0 PermuteBackward0 SqueezeBackward0 SqueezeBackward1 TBackward0 TransposeBackward0 UnsafeViewBackward0
    UnsqueezeBackward0 ViewBackward0
    """,
    False,
)
