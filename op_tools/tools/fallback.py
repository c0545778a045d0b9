"""OpFallback: runs chosen operators on the CPU and brings their results back to the device.

The operator is entered below autograd and autocast: the graph, the dtypes and the aliasing are those of the
device, and each kernel under it runs on the CPU instead, on copies of the same layout. Its backward kernels
follow. An operator that a device fuses into a kernel the CPU does not have runs on the CPU as a whole.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any, ClassVar, Final, NamedTuple

import torch

from ..call.description import Described, Tensor, TensorMeta, describe, labelled, map_tensors, tensors_in
from ..call.devices import accelerator_type, autocast_dtype
from ..copies.host_copies import HostCopies
from ..copies.pinned_results import LIBRARY, PinnedResults
from ..watch import patches
from ..watch.compiled import CompiledRun
from ..watch.inside import is_wrapper
from ..watch.intercept import Call
from .base import Tool
from .on_cpu import HALVES, NoCpuKernel, OnCpu, cpu_arguments, random_stream

_Move = Callable[[Tensor], Tensor]
_DTYPES: Final = (torch.dtype, Tensor)  # what says in which dtype a conversion ends
_MAX_MISSING: Final = 10_000
_USERS: Final = itertools.count(1)
_WITH_PINNED_RESULTS: Final = frozenset({"cuda"})  # elsewhere results are copied to pinned memory, if there is any


class OpFallback(Tool):
    """Run operators on the CPU, to see whether the device's kernel is to blame.

    >>> with op_tools.OpFallback(ops=["torch.nn.functional.linear"]):  # doctest: +SKIP
    ...     loss = model(x)
    """

    name = "OpFallback"
    prefix = "OP_FALLBACK"
    feature = "fallback"
    transforms = True
    order = 80
    wants_backward = True
    wants_backward_start = True
    wants_pointers = False
    columns: ClassVar[dict[str, str]] = {"call_id": "INTEGER", "site": "INTEGER", "ran_on": "TEXT", "step": "INTEGER"}
    wants_gradients = False

    def prepare(self) -> None:
        # Copies may be kept only where every operator passes through here, so that every write is seen.
        keep = self.only is None and not self.filter.include and not self.filter.exclude and not self.gated
        here = accelerator_type()
        pinned = PinnedResults.started(here) if here in _WITH_PINNED_RESULTS else None
        self._allocator = f"c10::GetCPUAllocator, user {next(_USERS)}"
        if pinned is not None:
            why = "results of CPU kernels are in pinned memory, one copy away from the device"
            patches.record(self._allocator, why, pinned.stop, "native")
        self._copies = HostCopies(keep, pinned, shown=self.view.full)
        self._missing: dict[Any, str] = {}  # calls like these have no CPU kernel, and why
        self._shown = object()  # key of what is shown of a call
        self.copied_bytes = 0

    def transform(self, call: Call, run: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        if call.traits.collective:
            self.found(call, "refused", "a collective cannot run on the CPU of one process; left alone", once=True)
            return run(call.args, call.kwargs)
        if call.traits.transfer:
            return run(call.args, call.kwargs)
        full = self.view.full
        if full:
            self._copies.forget_addresses()
            given = call.inputs if call.inputs.args or call.inputs.kwargs else describe(call.args, call.kwargs)
        like = (call.function, call.inputs.number)
        missing = self._missing.get(like) if call.inputs.number else None
        ran_on = "cpu"
        mode = OnCpu(self._copies)
        if missing is None:
            try:
                with mode:
                    result = run(call.args, call.kwargs)
                self._copies.settle()
                if mode.was_interrupted:
                    self.found(call, "refused", "compiled code inside of it ran on the device", once=True)
            except NoCpuKernel as error:
                missing = str(error)
                if len(self._missing) < _MAX_MISSING:
                    self._missing[like] = missing
        if missing is not None:
            try:
                result = _run_whole(call, self._copies)
            except _CannotRunWhole as reason:
                self.found(call, "refused", f"{missing}; {reason}; it ran on the device", once=True)
                result = run(call.args, call.kwargs)
                ran_on = "device"
        if call.traits.conversion and _only_moved(call, result):
            return result
        self.count(call)
        call.notes[self] = ran_on
        if full and ran_on == "cpu":
            call.notes[self._shown] = _Ran(given, call.args, call.kwargs, result, mode.converted)
        return result

    def after(self, call: Call) -> None:
        ran_on = call.notes.get(self)
        if ran_on is None:
            return
        site = self.site(call)
        self.record(call.id, site, ran_on, call.step)
        ran = call.notes.pop(self._shown, None)
        if ran is not None:
            self._show(call, site, ran)
        if self._copies.narrowed:
            self.no_double()

    def _show(self, call: Call, site: int, ran: _Ran) -> None:
        before = ran.given
        after = call.outputs if ran.result is call.result else describe((ran.result,))
        held: list[Tensor] = []  # or the next copy may be where this one was
        on_cpu = [self._copies.address(t, held) for t in tensors_in((ran.args, ran.kwargs))]
        results = [self._copies.address(t, held) for t in tensors_in(ran.result)]
        pointers = (*before.data_ptrs, *on_cpu, *after.data_ptrs, *results)

        def rows() -> list[tuple[str, TensorMeta | str]]:
            given = describe(*cpu_arguments(ran.args, ran.kwargs))
            wide = {low: dtype for dtype, low in ran.converted.items()}
            return [
                *labelled(before, "input(device)"),
                *_as_cpu(labelled(given, "input(cpu)"), {low: wide[low] for low in HALVES if low in wide}),
                *labelled(after, "output(device)"),
                *_as_cpu(labelled(after, "output(cpu)"), wide),
            ]

        key = (site, before.args, before.kwargs, after.args, tuple(ran.converted))
        lines = [self.view.tables.render(key, call.op, rows, pointers)]
        if ran.converted:
            lines.append(f"dtype_convert_back_dict:{ran.converted}")
        self.view.block(f"{call.op}    forward_id: {call.id}", call.location, *lines, above=3, below=3)

    def before_node(self, call: Call, node: int) -> Any:
        if call.notes.get(self) != "cpu":
            return None
        mode = OnCpu(self._copies, lambda why: self.found(call, "refused", f"{why}; it ran on the device", once=True))
        mode.__enter__()
        return mode

    def after_node(self, call: Call, started: Any) -> None:
        started.__exit__(None, None, None)
        self._copies.settle()

    def after_compiled_code(self, run: CompiledRun | None) -> None:
        self._copies.drop_all()

    def finish(self) -> None:
        self.copied_bytes = self._copies.copied_bytes
        self._copies.end()
        if LIBRARY.failure and accelerator_type() in _WITH_PINNED_RESULTS:
            self.slowed("pinned results", f"results are copied twice: {LIBRARY.failure}")

    def release(self) -> None:
        patches.undo(self._allocator)

    def summary(self) -> list[str]:
        return [f"{self.copied_bytes / 1e6:.1f} MB copied between device and host"]


class _Ran(NamedTuple):
    """A call that ran on the CPU, for the console: a cast around it may have changed its arguments."""

    given: Described
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    converted: dict[torch.dtype, torch.dtype]  # dtypes that the CPU computed in, and those of the results


class _CannotRunWhole(Exception):
    """The operator writes to its arguments or returns views of them: it cannot run as a whole on copies."""


class _Moved(torch.autograd.Function):
    """A tensor that `there` moves between device and host; `back` does the same to its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: _Move, back: _Move) -> Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.back(grad), None, None


def _run_whole(call: Call, host: HostCopies) -> Any:
    """Run the operator on CPU copies of its arguments, differentiably."""
    if any(is_wrapper(type(t)) for t in tensors_in((call.args, call.kwargs))):
        raise _CannotRunWhole("its arguments are wrapper tensors")
    if call.traits.mutates or call.traits.view or "out" in call.kwargs:
        raise _CannotRunWhole("it writes to its arguments")
    device = call.device
    copies: dict[int, Tensor] = {}

    def fetch(tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor
        if id(tensor) not in copies:
            to_device = functools.partial(host.on_device, device=tensor.device)
            copies[id(tensor)] = _Moved.apply(tensor, host.on_host, to_device)  # type: ignore[no-untyped-call]
        return copies[id(tensor)]

    args, kwargs = cpu_arguments(*map_tensors((call.args, call.kwargs), fetch))
    before = {key: copy._version for key, copy in copies.items()}
    low = autocast_dtype(device.type)
    random = call.traits.random is not False
    stream = random_stream(device, call.kwargs.get("generator")) if random else contextlib.nullcontext()
    with stream, torch.autocast("cpu", dtype=low, enabled=low is not None):
        try:
            result = call.function(*args, **kwargs)
        except NotImplementedError as error:
            raise _CannotRunWhole("nor for all of it") from error
    originals = {id(t): t for t in tensors_in((call.args, call.kwargs))}
    written = {key: copy for key, copy in copies.items() if copy._version != before[key]}  # running statistics, say
    if any(copy.requires_grad for copy in written.values()):
        raise _CannotRunWhole("it writes to an argument that takes gradients")
    for key, copy in written.items():
        host.drop_storage(originals[key])
        originals[key].copy_(copy)
    to_device = functools.partial(host.on_device, device=device)
    return map_tensors(result, lambda t: _Moved.apply(t, to_device, host.on_host))  # type: ignore[no-untyped-call]


def _as_cpu(
    rows: list[tuple[str, TensorMeta | str]], wide: dict[torch.dtype, torch.dtype]
) -> list[tuple[str, TensorMeta | str]]:
    cpu = torch.device("cpu")
    return [
        (label, part._replace(device=cpu, dtype=wide.get(part.dtype, part.dtype)))
        if isinstance(part, TensorMeta)
        else (label, part)
        for label, part in rows
    ]


def _only_moved(call: Call, result: Any) -> bool:
    """Whether a conversion took its tensor to a device, or would have; one of the dtype alone is an operator."""
    tensor = next(tensors_in((call.args, call.kwargs)))
    if not isinstance(result, Tensor) or result.device != tensor.device:  # x.type() is a question
        return True
    asked = (*call.args[1:], *call.kwargs.values())
    return result is tensor and call.op == "torch.Tensor.to" and not any(isinstance(a, _DTYPES) for a in asked)
