"""What can be known about a function before it is called: its name and nature, asked from PyTorch itself."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.overrides import resolve_name

from ..compat import OpOverloadPacket, device_constructors

# Calls that only ask about a tensor or set it up: no kernel of a model runs in them.
BOOKKEEPING: Final = frozenset(
    [
        "__array__",
        "__array_priority__",
        "__array_wrap__",
        "__class__",
        "__contains__",
        "__cuda_array_interface__",
        "__deepcopy__",
        "__dir__",
        "__dlpack__",
        "__dlpack_device__",
        "__format__",
        "__hash__",
        "__iter__",
        "__reduce__",
        "__reduce_ex__",
        "__repr__",
        "__setstate__",
        "__torch_dispatch__",
        "_backward_hooks",
        "_dimI",
        "_dimV",
        "_has_compatible_shallow_copy_type",
        "_indices",
        "_is_view",
        "_is_zerotensor",
        "_nnz",
        "_reduce_ex_internal",
        "_typed_storage",
        "_update_names",
        "_values",
        "_version",
        "align_as",
        "apply_",
        "as_subclass",
        "can_cast",
        "data_ptr",
        "dense_dim",
        "dim",
        "dim_order",
        "element_size",
        "get_default_dtype",
        "get_device",
        "has_names",
        "has_torch_function",
        "initial_seed",
        "is_complex",
        "is_conj",
        "is_contiguous",
        "is_distributed",
        "is_floating_point",
        "is_grad_enabled",
        "is_inference",
        "is_inference_mode_enabled",
        "is_neg",
        "is_nonzero",
        "is_pinned",
        "is_same_size",
        "is_set_to",
        "is_shared",
        "is_signed",
        "is_storage",
        "is_tensor",
        "itemsize",
        "layout",
        "manual_seed",
        "map_",
        "names",
        "ndim",
        "ndimension",
        "nelement",
        "numel",
        "pin_memory",
        "promote_types",
        "q_per_channel_axis",
        "q_scale",
        "q_zero_point",
        "qscheme",
        "record_stream",
        "refine_names",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "rename",
        "rename_",
        "requires_grad",
        "requires_grad_",
        "result_type",
        "retain_grad",
        "seed",
        "set_rng_state",
        "get_rng_state",
        "share_memory_",
        "size",
        "sparse_dim",
        "storage",
        "storage_offset",
        "storage_type",
        "stride",
        "type_str",
        "typename",
        "untyped_storage",
        "broadcast_shapes",
        "finfo",
        "iinfo",
        "is_warn_always_enabled",
        "set_default_device",
        "get_default_device",
        "set_grad_enabled",
        "set_printoptions",
        "compiled_with_cxx11_abi",
    ]
)
_GETTER_ENDINGS: Final = (".__get__", ".__set__", ".__delete__")
# Functions that run other operators on the user's behalf: what happens inside them is watched too.
_TRANSPARENT_NAMES: Final = frozenset({"torch.Tensor.backward", "torch.autograd.grad", "torch.autograd.backward"})
_CONVERSIONS: Final = frozenset(
    [
        "to",
        "type",
        "type_as",
        "float",
        "half",
        "double",
        "bfloat16",
        "int",
        "long",
        "short",
        "char",
        "byte",
        "bool",
        "cuda",
        "cpu",
        "npu",
        "mlu",
        "xpu",
        "musa",
        "hpu",
        "gcu",
        "soft",
        "mps",
        "cfloat",
        "cdouble",
        "chalf",
    ]
)
_TRANSFERS: Final = frozenset(["to", "cuda", "cpu", "npu", "mlu", "xpu", "musa", "hpu", "gcu", "soft", "mps"])
# Python-level compositions that draw random numbers without a schema that would say so.
_RANDOM_COMPOSITIONS: Final = frozenset(
    [
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "feature_alpha_dropout",
        "rrelu",
        "gumbel_softmax",
        "multi_head_attention_forward",
        "scaled_dot_product_attention",
        "fractional_max_pool2d",
        "fractional_max_pool3d",
        "fractional_max_pool2d_with_indices",
        "fractional_max_pool3d_with_indices",
        "lstm",
        "gru",
        "rnn_tanh",
        "rnn_relu",
        "uniform_",
        "normal_",
        "trunc_normal_",
        "xavier_uniform_",
        "xavier_normal_",
        "kaiming_uniform_",
        "kaiming_normal_",
        "orthogonal_",
        "sparse_",
        "svd_lowrank",
        "pca_lowrank",
    ]
)
COLLECTIVES: Final = [
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
    "recv",
    "isend",
    "irecv",
]


@dataclasses.dataclass(frozen=True, eq=False)
class OpTraits:
    """The fixed facts about one function.

    >>> traits_of(torch.Tensor.add_).mutates
    True
    """

    name: str
    function: Callable[..., Any]
    bookkeeping: bool = False
    transparent: bool = False
    view: bool = False
    mutates: bool = False
    random: bool | None = False
    collective: bool = False
    factory: bool = False
    conversion: bool = False
    transfer: bool = False


def name_of(function: Callable[..., Any]) -> str:
    """The name that users write (`name_of(torch.nn.functional.linear) == "torch.nn.functional.linear"`)."""
    try:
        name: str | None = resolve_name(function)
    except Exception:
        name = None
    if name is None:
        short = getattr(function, "__name__", type(function).__name__)
        module = getattr(function, "__module__", None) or ""
        owner = getattr(function, "__objclass__", None)
        if owner is not None and issubclass(torch.Tensor, owner):
            return f"torch.Tensor.{short}"
        if "_VariableFunctions" in getattr(function, "__qualname__", ""):
            return f"torch.{short}"
        if isinstance(function, types.MethodWrapperType):
            owner = function.__self__
            return f"torch.Tensor.{getattr(owner, '__name__', '?')}.{short}"
        if getattr(torch, short, None) is function:
            return f"torch.{short}"
        if module.startswith("torch.distributed") and getattr(torch.distributed, short, None) is not None:
            return f"torch.distributed.{short}"
        return f"{module}.{getattr(function, '__qualname__', short)}" if module else short
    if name.startswith("torch.functional."):
        plain = name.rsplit(".", 1)[-1]
        if getattr(torch, plain, None) is function:
            return f"torch.{plain}"
    return _SAME_FUNCTION.get(name, name)


# One C function under several names, of which PyTorch tells the rarer one.
_SAME_FUNCTION: Final = {"torch.spmm": "torch.mm"}


_REFLECTED: Final = frozenset(
    ["add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow"]
    + ["matmul", "and", "or", "xor", "lshift", "rshift"]
)


def _overloads(function: Callable[..., Any], name: str) -> Iterator[Any]:
    candidates = [getattr(function, "__name__", ""), name.rsplit(".", 1)[-1]]
    for candidate in list(candidates):
        if candidate.startswith("__r") and candidate[3:-2] in _REFLECTED:  # __rand__ is no rand
            candidates += [f"__{candidate[3:-2]}__", candidate[3:-2]]
        elif candidate.startswith("__") and candidate.endswith("__"):
            candidates.append(candidate.strip("_"))
    for candidate in candidates:
        packet = getattr(torch.ops.aten, candidate, None) if candidate.isidentifier() else None
        if not isinstance(packet, OpOverloadPacket):
            continue
        for overload in packet.overloads():
            yield getattr(packet, overload)
        return


def _is_view_overload(overload: Any) -> bool:
    flag = getattr(overload, "is_view", None)
    if flag is not None:
        return bool(flag)
    infos = [a.alias_info for a in overload._schema.arguments]
    return any(i is not None and not i.is_write for i in infos)


@functools.cache
def factories() -> frozenset[str]:
    """Names of the functions that take their device from the default device."""
    return frozenset(f"torch.{f.__name__}" for f in device_constructors())


def traits_of(function: Callable[..., Any], name: str | None = None) -> OpTraits:
    """Everything that depends on the function alone (`traits_of(torch.add).name == "torch.add"`)."""
    known = name is None
    if name is None:
        name = name_of(function)
    last = name.rsplit(".", 1)[-1]
    if name.endswith(_GETTER_ENDINGS):
        return OpTraits(name, function, bookkeeping=True)
    if name in _TRANSPARENT_NAMES:
        return OpTraits(name, function, bookkeeping=True, transparent=True)
    if (known and last in BOOKKEEPING) or name.startswith("profiler."):
        return OpTraits(name, function, bookkeeping=True)
    if name.startswith("torch.distributed."):
        return OpTraits(name, function, collective=True, mutates=True)
    overloads = list(_overloads(function, name)) if name.startswith("torch.") else []
    if name == "torch.device" or (name.startswith("torch._C.") and not overloads):
        return OpTraits(name, function, bookkeeping=True)
    functional = [o for o in overloads if not o._schema.is_mutable]
    random: bool | None
    if last in _RANDOM_COMPOSITIONS or any(torch.Tag.nondeterministic_seeded in o.tags for o in overloads):
        random = True
    else:
        random = False if overloads else None
    return OpTraits(
        name,
        function,
        view=bool(functional) and all(_is_view_overload(o) for o in functional),
        mutates=bool(overloads) and last.endswith("_") and not last.endswith("__"),
        random=random,
        factory=name in factories(),
        conversion=name.startswith("torch.Tensor.") and last in _CONVERSIONS,
        transfer=name.startswith("torch.Tensor.") and last in _TRANSFERS,
    )
