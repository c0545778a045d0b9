"""The private names of PyTorch that op_tools uses: all of them, each under a name of its own.

Below every other room. PyTorch may change a private name in any release; then this file is the place to mend.
Import the names (`from ..compat import conj_view`): a name costs no more than PyTorch's own.
A name that is bound plainly holds from 2.6 (the oldest release supported) to 2.13, and the import fails without it. The
comment beside a name says otherwise.

Other rooms may read these attributes of PyTorch's objects, which hold for the same releases:

    tensor      _version  _base  _is_view  _is_zerotensor
    storage     _cdata
    overload    _schema  _overloadname              of torch.ops
    node        _sequence_nr                        of the autograd graph
    class       _execution_engine                   of torch.autograd.Variable, replaced while tools watch backward
    module      _maybe_set_eval_frame               of `dynamo_eval_frame`, replaced while tools watch
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._decomp import decomposition_table as decomposition_table
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.storage import _dtype_to_storage_type_map
from torch.utils._device import DeviceContext as DeviceContext
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# -- modes ------------------------------------------------------------------------------------------------

no_torch_function: Final = torch._C.DisableTorchFunction
push_function_mode: Final = torch._C._push_on_torch_function_stack
pop_function_mode: Final = torch._C._pop_torch_function_stack
count_function_modes: Final = torch._C._len_torch_function_stack
function_mode_at: Final = torch._C._get_function_stack_at
count_dispatch_modes: Final = torch._C._len_torch_dispatch_stack
no_dispatch_modes: Final = _disable_current_modes
set_grad_enabled: Final = torch._C._set_grad_enabled  # torch.set_grad_enabled makes an object
device_constructors: Final = _device_constructors


def in_fake_mode() -> bool:
    """Whether tensors of this thread have no values: DTensor and compilers ask for shapes that way."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def in_func_transform() -> bool:
    """Whether this thread is inside `torch.func.vmap`, `grad` and the like, whose tensors have no memory."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that is never compiled.

    Since 2.11 PyTorch guards `__torch_dispatch__` against Dynamo unless `_should_skip_dynamo` is false. The guard
    imports Dynamo and costs more than most modes. Earlier releases have no guard and do not ask.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    if TYPE_CHECKING:  # PyTorch's have no types

        def __init__(self) -> None: ...

        def __init_subclass__(cls) -> None: ...

        def __enter__(self) -> DispatchMode: ...


# -- autograd ---------------------------------------------------------------------------------------------

engine: Final = torch._C._ImperativeEngine()  # the engine itself, whatever has replaced Variable._execution_engine
# The number that the next node of this thread gets. Those who ask for it do without where it is missing.
sequence_number: Final[Callable[[], int] | None] = getattr(torch.autograd, "_get_sequence_nr", None)


def engine_will_run(node: Any) -> bool:
    """Whether the backward pass that is under way comes to this node, or hands out what arrives there."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf whose gradient `autograd.grad` was asked for
        return True


def _unknown_hooks(ignore_is_tracing: bool) -> tuple[Any, ...]:
    return ()  # not None: there may be some


# The innermost pair of this thread's hooks for saved tensors, or None. Before 2.8 PyTorch does not tell.
top_saved_tensor_hooks: Final[Callable[[bool], Any]] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", _unknown_hooks
)


@contextlib.contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Take this thread's hooks for saved tensors off; before 2.8, cover them with hooks that do nothing."""
    if top_saved_tensor_hooks is _unknown_hooks:
        # Detached: a node that kept its own result would keep itself alive.
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda saved: saved):
            yield
        return
    taken = []
    while (hooks := top_saved_tensor_hooks(True)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        taken.append(hooks)
    try:
        yield
    finally:
        for pack, unpack in reversed(taken):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


# -- tensors and operators --------------------------------------------------------------------------------

conj_view: Final = torch._conj
neg_view: Final = torch._neg_view
storage_class_names: Final = _dtype_to_storage_type_map
aten_operator_names: Final = torch._C._dispatch_get_all_op_names  # "aten::add.Tensor", and those of other libraries
takes_numbers_as_tensors: Final = torch._C._should_allow_numbers_as_tensors  # ("add"): a number for any tensor
autograd_nodes: Final = torch._C._functions  # the classes of the nodes that PyTorch defines in C++
CPU_KERNELS: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
MODULE_CALL: Final = torch.nn.Module._call_impl.__code__  # the frame in which a module's forward runs


def has_kernel(name: str, overload: str, key: str) -> bool:
    """Whether a kernel is registered for an operator (`has_kernel("aten::add", "Tensor", "CPU")`)."""
    full = f"{name}.{overload}" if overload else name
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(full, key))


def registering_file(name: str) -> str:
    """The source file that registered an operator, "" if unknown (`registering_file("mylib::scale")`)."""
    from torch._library.custom_ops import OPDEFS

    if name in OPDEFS:  # defined by `torch.library.custom_op`
        return str(OPDEFS[name]._init_fn.__code__.co_filename)
    found = re.search(r"registered at (.*):\d+", torch._C._dispatch_dump(name))
    return found[1] if found else ""


# -- CUDA and Dynamo --------------------------------------------------------------------------------------


def _no_cuda(*_: Any) -> int:
    raise RuntimeError("this PyTorch is built without CUDA")


cuda_device: Final[Callable[[], int]] = getattr(torch._C, "_cuda_getDevice", _no_cuda)
cuda_stream: Final[Callable[[int], int]] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_cuda)

DYNAMO_WRAPPERS: Final = frozenset({"compile_wrapper", "_fn"})  # functions that Dynamo puts around compiled ones


def dynamo_eval_frame() -> Any:
    """Dynamo's module that sets the frame callback; None if Dynamo is not imported yet, or has no such setter."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    return module if hasattr(module, "_maybe_set_eval_frame") else None
