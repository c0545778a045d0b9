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
    class       apply  apply_boxed                  of `PythonNode`, replaced once Dynamo is there; some have no second
    class       call_user_compiler                  of `dynamo_output_graph`, replaced while compiled code is compared
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.utils.checkpoint
from torch._decomp import decomposition_table as decomposition_table
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.storage import _dtype_to_storage_type_map
from torch.utils._device import DeviceContext as DeviceContext
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

# -- modes ------------------------------------------------------------------------------------------------

no_torch_function: Final = torch._C.DisableTorchFunction
push_function_mode: Final = torch._C._push_on_torch_function_stack
pop_function_mode: Final = torch._C._pop_torch_function_stack
count_function_modes: Final = torch._C._len_torch_function_stack
function_mode_at: Final = torch._C._get_function_stack_at
# What `torch.jit.trace` does is in its function `_trace_impl` (2.13); without one, calls that are traced are watched.
JIT_TRACER: Final[Any] = torch.jit._trace
count_dispatch_modes: Final = torch._C._len_torch_dispatch_stack
no_dispatch_modes: Final = _disable_current_modes
push_dispatch_mode: Final = torch._C._push_on_torch_dispatch_stack
pop_dispatch_mode: Final = torch._C._pop_torch_dispatch_stack
dispatch_mode_at: Final = torch._C._get_dispatch_stack_at
set_grad_enabled: Final = torch._C._set_grad_enabled  # torch.set_grad_enabled makes an object
device_constructors: Final = _device_constructors
TensorBase: Final = torch._C.TensorBase  # the class in C++, whose getters nobody can replace
plugin_device: Final = torch._C._get_privateuse1_backend_name
"""Device type that a package added to this PyTorch, `privateuseone` where none did."""


def in_fake_mode() -> bool:
    """Whether tensors of this thread have no values: DTensor and compilers ask for shapes that way."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_below_autograd() -> bool:
    """Whether this thread is inside a kernel or a `__torch_dispatch__`, where nothing is recorded for a backward."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)


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

    def interrupted(self) -> None:
        """The mode is taken off for a while: compiled code runs under it."""

    if TYPE_CHECKING:  # PyTorch's have no types

        def __init__(self) -> None: ...

        def __init_subclass__(cls) -> None: ...

        def __enter__(self) -> DispatchMode: ...


def pop_own_dispatch_modes() -> list[DispatchMode]:
    """Take the modes of op_tools off the top of this thread's stack; `push_dispatch_modes` puts them back."""
    popped: list[DispatchMode] = []
    while count_dispatch_modes():
        top = _get_current_dispatch_mode_stack()[-1]
        if not isinstance(top, DispatchMode):
            break
        _pop_mode()
        top.interrupted()
        popped.append(top)
    return popped


def push_dispatch_modes(popped: list[DispatchMode]) -> None:
    """Put modes back that `pop_own_dispatch_modes` took off."""
    for mode in reversed(popped):
        _push_mode(mode)


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


PythonNode: Final = torch.autograd.function.BackwardCFunction  # nodes of the graph that are written in Python
running_pass: Final = torch._C._current_graph_task_id  # number of the backward pass that this thread works on, or -1
# The node that this thread runs in that pass, or None. Those who ask for it do without where it is missing.
current_node: Final[Callable[[], Any]] = getattr(torch._C, "_current_autograd_node", lambda: None)


def is_compiled_node(node: Any) -> bool:
    """Whether AOTAutograd made a node of the graph: all that its backward does is one compiled function."""
    return getattr(getattr(node, "_forward_cls", None), "_aot_id", None) is not None


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


class Checkpointed(NamedTuple):
    """A region of `torch.utils.checkpoint(use_reentrant=False)`, in its first forward or when it is computed again."""

    frame: Any
    again: bool
    group: Any  # the backward pass that it is computed again for

    def saved(self) -> int:
        """How many tensors calls have saved in it so far."""
        return int(self.frame.recomp_counter[self.group]) if self.again else len(self.frame.weak_holders)

    def tensors(self, start: int) -> list[torch.Tensor]:
        """Those that have been saved since it was `start`, computed again."""
        holders = [holder() for holder in self.frame.weak_holders[start : self.saved()]]
        handles = [None if holder is None else holder.handles.get(self.group) for holder in holders]
        found = self.frame.recomputed[self.group]
        return [found[handle] for handle in handles if handle is not None and handle in found]


STOPS_RECOMPUTATION: Final[type] = getattr(torch.utils.checkpoint, "_StopRecomputationError", type(None))


def checkpoint_of(hooks: Any) -> Checkpointed | None:
    """The region whose hooks for saved tensors these are; None for other hooks (`checkpoint_of((pack, unpack))`)."""
    pack = inspect.unwrap(hooks[0])
    if getattr(pack, "__module__", "") != torch.utils.checkpoint.__name__:
        return None
    try:
        found = dict(zip(pack.__code__.co_freevars, [cell.cell_contents for cell in pack.__closure__ or ()]))
        if "frame" in found:
            return Checkpointed(found["frame"], False, None)
        frame = found["target_frame_ref"]()
        return None if frame is None else Checkpointed(frame, True, found["gid"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def keeps_saved_values(hooks: Any) -> bool:
    """Whether these hooks for saved tensors are PyTorch's own, which change no values."""
    names = {torch.autograd.graph.__name__, torch.utils.checkpoint.__name__}
    return getattr(hooks[0], "__module__", "") in names


def reusable_results() -> int:
    """How many results of its first forward selective checkpointing has still to give to the one that runs now."""
    count = 0
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, getattr(torch.utils.checkpoint, "_CachedTorchDispatchMode", ())):
            storage: dict[Any, Any] = getattr(mode, "storage", {})
            for results in storage.values():  # lists of what is left before 2.12, then marks where it is not
                some = results.values() if isinstance(results, dict) else results
                count += sum([type(result) is not object for result in some])
    return count


# -- tensors and operators --------------------------------------------------------------------------------

conj_view: Final = torch._conj
neg_view: Final = torch._neg_view
storage_id: Final = torch._C._storage_id  # type: ignore[attr-defined]  # one number per storage, no Python object
storage_class_names: Final = _dtype_to_storage_type_map
aten_operator_names: Final = torch._C._dispatch_get_all_op_names  # "aten::add.Tensor", and those of other libraries
foreach_norm: Final = torch._foreach_norm
takes_numbers_as_tensors: Final = torch._C._should_allow_numbers_as_tensors  # ("add"): a number for any tensor
autograd_nodes: Final = torch._C._functions  # the classes of the nodes that PyTorch defines in C++
CPU_KERNELS: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
MODULE_CALL: Final = torch.nn.Module._call_impl.__code__  # the frame in which a module's forward runs


AFTER_BACKEND_SELECT: Final = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def c10d_classes() -> tuple[Any, Any] | None:
    """The classes of process groups and of handles on collectives; None where operators of c10d do not show them."""
    if not torch.distributed.is_available():
        return None
    classes = (torch.distributed.ProcessGroup, torch.distributed.Work)
    return classes if all(hasattr(kind, "unbox") for kind in classes) else None


def awaited(tensor: torch.Tensor) -> torch.Tensor:
    """What a functional collective fills, behind the tensor that waits for it; other tensors are themselves."""
    kind = type(tensor)
    return tensor.elem if kind.__name__ == "AsyncCollectiveTensor" and hasattr(tensor, "elem") else tensor


def results_of_graph() -> slice:
    """Which outputs of the forward graph that is being compiled go to user code; others are for its backward."""
    context = torch._guards.TracingContext.try_get()
    found = getattr(context, "fw_metadata", None)
    first = getattr(found, "num_mutated_inp_runtime_indices", 0)
    count = getattr(found, "num_outputs", None)
    return slice(first, None if count is None else first + count)


def devices_in_use() -> set[int]:
    """The accelerator's devices of which memory is taken (`devices_in_use() == {0}`)."""
    found = set[int]()
    with contextlib.suppress(AttributeError, RuntimeError):
        for index in range(torch.accelerator.device_count()):
            level = allocator_level((index,))
            if level is not None and level[0]:
                found.add(index)
    return found


def allocator_level(devices: Collection[int]) -> tuple[int, int] | None:
    """Bytes that the accelerator's allocator has handed out by now, and at most had, on these devices.

    None where it keeps no books that PyTorch knows of, or has handed out nothing yet.
    """
    try:
        if not torch._C._accelerator_isAllocatorInitialized():
            return None
        found = [torch._C._accelerator_getDeviceStats(i)["allocated_bytes"]["all"] for i in devices]
    except (AttributeError, RuntimeError, KeyError):  # PyTorch before 2.9, or an allocator without them
        return None
    return sum(one["current"] for one in found), sum(one["peak"] for one in found)


Future: Final = torch._C.Future  # what `Work.get_future` returns


def default_store() -> Any:
    """The store of the default process group; an error where there is none."""
    return torch.distributed.distributed_c10d._get_default_store()


def coalesces() -> bool:
    """Whether collectives are being gathered, to be sent together."""
    world = getattr(torch.distributed.distributed_c10d, "_world", None)
    return bool(getattr(world, "pg_coalesce_state", None))


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


def registrations(name: str) -> dict[str, str]:
    """By dispatch key: the file and line that registered a kernel of an operator; its schema under "schema".

    >>> sorted(registrations("aten::view_as_real"))[:1]
    ['ADInplaceOrView']
    """
    dump = torch._C._dispatch_dump(name)
    schema = re.search(r"^schema: (.*)$", dump, re.MULTILINE)
    found = re.findall(r"^([\w\[\]]+): registered at (.*?:\d+) ", dump, re.MULTILINE)
    return {**dict(found), **({"schema": schema[1]} if schema else {})}


def custom_op_functions(name: str) -> list[Any]:
    """What the golden run of an operator calls that `torch.library.custom_op` defined; nothing for others."""
    from torch._library.custom_ops import OPDEFS

    known = OPDEFS.get(name)
    if known is None:
        return []
    kernels = [known._init_fn, *[known._backend_fns.get(device) for device in (None, "cpu")]]
    return [_written(f) for f in (*kernels, known._backward_fn, known._setup_context_fn) if f is not None]


def _written(function: Any) -> Any:
    """The function that a user wrote, inside what PyTorch has put around it."""
    function = inspect.unwrap(function)
    if getattr(function, "__module__", "") == "torch._library.custom_ops":
        function = inspect.unwrap(inspect.getclosurevars(function).nonlocals.get("fn", function))
    return function


def forget_compilers() -> None:
    """In a process that compiles nothing: operators that are defined from now on do not import Dynamo, for seconds."""

    def as_it_is(fn: Any = None, recursive: bool = True) -> Any:
        return as_it_is if fn is None else fn

    vars(torch)["_disable_dynamo"] = as_it_is


# -- CUDA and Dynamo --------------------------------------------------------------------------------------


def _no_cuda(*_: Any) -> int:
    raise RuntimeError("this PyTorch is built without CUDA")


cuda_device: Final[Callable[[], int]] = getattr(torch._C, "_cuda_getDevice", _no_cuda)
cuda_stream_captures: Final[Callable[[], bool] | None] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
cuda_stream: Final[Callable[[int], int]] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_cuda)

DYNAMO_WRAPPERS: Final = frozenset({"compile_wrapper", "_fn"})  # functions that Dynamo puts around compiled ones
DYNAMO_MODULE: Final = "torch._dynamo.eval_frame"
DYNAMO_FRAMES: Final = "_dynamo/eval_frame.py"  # the file of that module


def dynamo_eval_frame() -> Any:
    """Dynamo's module that sets the frame callback; None if Dynamo is not imported yet, or has no such setter."""
    module = sys.modules.get(DYNAMO_MODULE)
    return module if hasattr(module, "_maybe_set_eval_frame") else None


DYNAMO_GRAPHS: Final = "torch._dynamo.output_graph"  # a module


def dynamo_output_graph() -> Any:
    """Dynamo's class that hands graphs to backends; None if Dynamo is not imported yet, or has no such class."""
    kind = getattr(sys.modules.get(DYNAMO_GRAPHS), "OutputGraph", None)
    return kind if hasattr(kind, "call_user_compiler") else None


def compiled_code_of(output_graph: Any) -> Any:
    """The code of the function that a graph is made of; None where Dynamo does not tell."""
    return getattr(getattr(output_graph, "root_tx", None), "f_code", None)


def is_packaged(output_graph: Any) -> bool:
    """Whether Dynamo saves what the backend returns to a file: then nobody may stand around it."""
    return getattr(output_graph, "package", None) is not None


def example_value(node: Any) -> Any:
    """What a node of Dynamo's graphs returned when it was traced: tensors without values; None where it is unknown."""
    return node.meta.get("example_value")


def hide_from_dynamo(function: Any) -> None:
    """Have Dynamo run the frames of a function as they are; what it calls is another matter."""
    skip = getattr(dynamo_eval_frame(), "skip_code", None)
    if skip is not None:
        skip(function.__code__)


COMPILED_AUTOGRAD: Final = "torch._dynamo.compiled_autograd"  # a module; until it is imported, no backward is compiled


def compiles_backward() -> bool:
    """Whether this thread's backward passes are compiled as a whole (`torch._dynamo.config.compiled_autograd`)."""
    return bool(getattr(sys.modules.get(COMPILED_AUTOGRAD), "compiled_autograd_enabled", False))


def compilations() -> int:
    """How many steps of compilations Dynamo has timed so far: the number changes with every compilation."""
    utils = sys.modules.get("torch._dynamo.utils")
    timed: dict[str, list[float]] = getattr(utils, "compilation_time_metrics", {})
    return sum([len(times) for times in list(timed.values())])
