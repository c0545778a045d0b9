"""``torch.cuda.CUDAGraph`` where the backend has no graphs: the captured operators are run again.

Nothing gets faster, but code that captures and replays gives the results it gives on CUDA: replay
reads the tensors that capture read and writes the tensors that capture wrote.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.cuda.graphs
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ditorch.patching import Ledger
from ditorch.redirect.classes import complete
from ditorch.redirect.cuda_module import stand_in
from ditorch.redirect.devices import Devices, translate_call
from ditorch.redirect.signatures import adapt

_state = threading.local()


def capturing() -> bool:
    """Whether this thread is recording a graph.

    Example: ``torch.cuda.is_current_stream_capturing()``
    """
    return getattr(_state, "recorder", None) is not None


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing: reads a value on the host")
        self.steps.append((func, args, kwargs, result))
        return result


class RecordedGraph:
    """The operators between ``capture_begin`` and ``capture_end``, to be run again by ``replay``."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._recorder: _Recorder | None = None
        self._steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if capturing():
            raise RuntimeError("a graph is being captured on this thread already")
        self._recorder = _state.recorder = _Recorder()
        self._recorder.__enter__()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        if self._recorder is None:
            raise RuntimeError("capture_end() without capture_begin()")
        self._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        _state.recorder = None
        self._steps, self._recorder = self._recorder.steps, None

    def instantiate(self) -> None:
        pass

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, captured in self._steps:
                _run_again(func, args, kwargs, captured)

    def reset(self) -> None:
        self._steps = []

    def pool(self) -> tuple[int, int]:
        return (0, 0)

    def enable_debug_mode(self) -> None:
        pass

    def register_generator_state(self, generator: Any) -> None:
        pass


def _run_again(func: Any, args: Any, kwargs: Any, captured: Any) -> None:
    # A view of captured memory sees the new values by itself; an in-place result is its argument.
    if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
        return
    fresh = func(*args, **kwargs)
    for old, new in zip(pytree.tree_leaves(captured), pytree.tree_leaves(fresh)):
        if isinstance(old, torch.Tensor) and old is not new:
            old.copy_(new)


class RecordedCapture:
    """``with torch.cuda.graph(g):`` for a recorded graph."""

    def __init__(
        self,
        cuda_graph: RecordedGraph,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
    ) -> None:
        self.graph = cuda_graph
        self._stream = torch.cuda.stream(stream) if stream is not None else None

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        if self._stream is not None:
            self._stream.__enter__()
        self.graph.capture_begin()

    def __exit__(self, *exception: Any) -> None:
        self.graph.capture_end()
        if self._stream is not None:
            self._stream.__exit__(*exception)


def native_graph(device_type: str, module: Any) -> str | None:
    """The vendor's name for ``CUDAGraph``, or None where it has no graphs.

    Example: ``native_graph("npu", torch.npu) == "NPUGraph"``
    """
    if not hasattr(module, "graph"):
        return None
    return next((name for name in ("CUDAGraph", f"{device_type.upper()}Graph") if hasattr(module, name)), None)


def install(ledger: Ledger, devices: Devices) -> None:
    """Map graphs onto the vendor's, or record and run again.

    Example: ``install(ledger, devices); torch.cuda.CUDAGraph()``
    """
    module = devices.backend.module
    vendor = native_graph(devices.type, module)
    if vendor is not None:
        why, kind = f"{devices.backend.where_module()}.{vendor}", "mapped"
        graph, capture = getattr(module, vendor), module.graph
    else:
        why, kind = "recorded operators are run again: same results, no speed-up", "emulated"
        graph, capture = RecordedGraph, RecordedCapture
    for name, real in (("CUDAGraph", graph), ("graph", capture)):
        original = getattr(torch.cuda, name)
        make = adapt(devices, name, original, real) or translate_call(devices, real)
        stand = stand_in(name, "torch.cuda.graphs", make, real, original.__doc__)
        for owner in (torch.cuda, torch.cuda.graphs):
            ledger.replace(owner, name, stand, why, kind)
        if name == "CUDAGraph":
            complete(ledger, devices, name, original, real)
    if hasattr(module, "make_graphed_callables"):
        return
    function: Any = torch.cuda.graphs.make_graphed_callables
    what = "torch.cuda.make_graphed_callables"
    ledger.redirect(
        function,
        lambda original: _keep_callables,
        "the callables run as they are: no speed-up",
        "emulated",
        what,
    )


def _keep_callables(callables: Any, *args: Any, **kwargs: Any) -> Any:
    return callables
