"""OpFallback: runs chosen operators on the CPU and brings their results back to the device.

The operator is entered below autograd and autocast: the graph, the dtypes and the aliasing are those of the
device, and each kernel under it runs on the CPU instead, on copies of the same layout. Its backward kernels
follow. An operator that a device fuses into a kernel the CPU does not have runs on the CPU as a whole.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Container
from typing import Any, ClassVar, Final, NamedTuple

import torch

from ..call.description import Tensor, TensorMeta, labelled, map_tensors, tensors_in
from ..call.devices import accelerator_type, can_pin, get_rng_state, module_of, set_rng_state
from ..compat import DispatchMode, conj_view, neg_view, no_torch_function
from ..copies.operands import span_of
from ..copies.pinned_results import PinnedResults
from ..native.statistics import is_dense
from ..view import console
from ..watch.intercept import Call
from .base import Tool

# Kernels without arithmetic: they allocate, move or rename, and stay on the device.
_STAY: Final = frozenset(
    [
        "empty",
        "empty_strided",
        "empty_like",
        "new_empty",
        "new_empty_strided",
        "empty_permuted",
        "detach",
        "detach_",
        "alias",
        "lift_fresh",
        "lift",
        "set_",
        "resize_",
        "resize_as_",
        "record_stream",
        "is_pinned",
        "pin_memory",
        "_pin_memory",
        "set_data",
        "_has_compatible_shallow_copy_type",
        "view",
        "_unsafe_view",
        "_reshape_alias",
        "unsafe_split",
        "unsafe_chunk",
        "unsafe_split_with_sizes",
        "is_same_size",
    ]
)
# Kernels that write to arguments their schema does not declare as written.
_UNDECLARED: Final = {"native_batch_norm": (3, 4), "cudnn_batch_norm": (3, 4), "miopen_batch_norm": (3, 4)}
_SMALL: Final = 1 << 14  # bytes that are not worth a pinned buffer
_HALVES: Final = (torch.float16, torch.bfloat16)
_MOST_REMEMBERED: Final = 10_000
_STAGING: Final = frozenset({"cuda"})  # their copies from pageable memory have read it all when they return
_WITH_PINNED_RESULTS: Final = frozenset({"cuda"})  # elsewhere results are copied to pinned memory, if there is any


class _Kernel(NamedTuple):
    """What the schema of a kernel says, asked once."""

    stays: bool
    writes: tuple[int | str, ...]  # positions and names of arguments it writes to
    returns: tuple[int | str | None, ...]  # which written argument each result is
    random: bool
    may_move: bool
    counts: bool  # counts the versions of what it writes itself; for others PyTorch does before they are called


@functools.cache
def _kernel(func: Any) -> _Kernel:
    schema = func._schema
    name = schema.name.split("::")
    writes: list[int | str] = []
    by_alias: dict[str, int | str] = {}
    for position, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is not None and info.is_write:
            where: int | str = argument.name if argument.kwarg_only else position
            writes.append(where)
            for alias in info.before_set:
                by_alias[alias] = where
    returns: list[int | str | None] = []
    for result in schema.returns:
        info = result.alias_info
        returns.append(next((by_alias.get(a) for a in info.before_set), None) if info is not None else None)
    writes += _UNDECLARED.get(name[-1], ())
    is_view = (bool(getattr(func, "is_view", False)) and not writes) or torch.Tag.inplace_view in func.tags
    stays = is_view or name[-1] in _STAY or name[0] in ("c10d", "_c10d_functional", "prim", "profiler")
    random = torch.Tag.nondeterministic_seeded in func.tags
    moves = name[-1] in ("_to_copy", "copy_", "_copy_from")
    return _Kernel(stays, tuple(writes), tuple(returns), random, moves, name[-1].startswith("_foreach_"))


class _NoCpuKernel(Exception):
    """The CPU cannot run a kernel under this operator; the operator must run there as a whole."""


class OpFallback(Tool):
    """Run operators on the CPU, to see whether the device's kernel is to blame.

    >>> with op_tools.OpFallback(ops=["torch.nn.functional.linear"]):  # doctest: +SKIP
    ...     loss = model(x)
    """

    name = "OpFallback"
    prefix = "OP_FALLBACK"
    transforms = True
    order = 80
    wants_backward = True
    wants_backward_start = True
    wants_pointers = False
    columns: ClassVar[dict[str, str]] = {"call_id": "INTEGER", "site": "INTEGER", "ran_on": "TEXT", "step": "INTEGER"}

    @property
    def wants_gradients(self) -> bool:
        return False

    def prepare(self) -> None:
        # Copies may be kept only where every operator passes through here, so that every write is seen.
        keep = self.only is None and not self.filter.include and not self.filter.exclude and not self.gated
        here = accelerator_type()
        self._twins = _Twins(keep, PinnedResults.started(here) if here in _WITH_PINNED_RESULTS else None)
        self._missing: dict[Any, str] = {}  # calls like these have no CPU kernel, and why
        self.copied_bytes = 0

    def transform(self, call: Call, run: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        if call.traits.collective:
            self.found(call, "refused", "a collective cannot run on the CPU of one process; left alone", once=True)
            return run(call.args, call.kwargs)
        if call.traits.transfer:
            return run(call.args, call.kwargs)
        self.announce(call)
        like = (call.function, call.inputs.number)
        missing = self._missing.get(like) if call.inputs.number else None
        ran_on = "cpu"
        if missing is None:
            try:
                with _OnCpu(self._twins):
                    result = run(call.args, call.kwargs)
                self._twins.settle()
            except _NoCpuKernel as error:
                missing = str(error)
                if len(self._missing) < _MOST_REMEMBERED:
                    self._missing[like] = missing
        if missing is not None:
            try:
                result = _run_whole(call, self._twins)
            except _CannotRunWhole as reason:
                self.found(call, "refused", f"{missing}; {reason}; it ran on the device", once=True)
                result = run(call.args, call.kwargs)
                ran_on = "device"
        call.notes[self] = ran_on
        return result

    def after(self, call: Call) -> None:
        ran_on = call.notes.get(self)
        if ran_on is None:
            return
        site = self.site(call)
        self.record(call.id, site, ran_on, call.step)
        if self.view.full and ran_on == "cpu":
            self._show(call, site)

    def _show(self, call: Call, site: int) -> None:
        before, after = call.inputs, call.outputs
        twins = self._twins
        inputs = [*tensors_in(call.args), *tensors_in(call.kwargs)]
        on_cpu = [twins.address(t) for t in inputs]
        results = [twins.address(t) for t in tensors_in(call.result)]
        pointers = (*before.data_ptrs, *on_cpu, *after.data_ptrs, *results)

        def rows() -> list[tuple[str, TensorMeta | str]]:
            return [
                *labelled(before, "input(device)"),
                *_as_cpu(labelled(before, "input(cpu)")),
                *labelled(after, "output(device)"),
                *_as_cpu(labelled(after, "output(cpu)")),
            ]

        self.view.block(
            f"{call.op}    forward_id: {call.id}",
            call.location,
            self.view.tables.render(site, call.op, rows, pointers, console.DEFAULT_COLUMNS),
        )

    def before_node(self, call: Call, node: int) -> Any:
        if call.notes.get(self) != "cpu":
            return None
        mode = _OnCpu(self._twins)
        mode.__enter__()
        return mode

    def after_node(self, call: Call, started: Any) -> None:
        started.__exit__(None, None, None)
        self._twins.settle()

    def finish(self) -> None:
        self.copied_bytes = self._twins.copied_bytes
        self._twins.end()

    def summary(self) -> list[str]:
        return [f"{self.copied_bytes / 1e6:.1f} MB copied between device and host"]

    def polish(self, row: dict[str, Any]) -> None:
        row.pop("described", None)


class _Known(weakref.ref):  # type: ignore[type-arg]
    """A device tensor with a copy on the CPU, and what is asked of it again and again."""

    __slots__ = ("dtype", "key", "numel", "offset", "storage", "twin", "version")

    dtype: torch.dtype
    key: int
    numel: int  # -1 where views cannot take their part of the copy
    offset: int
    storage: int
    twin: Tensor
    version: int


class _Twins:
    """CPU copies of device tensors, kept while the tensor lives unchanged."""

    def __init__(self, keep: bool, pinned: PinnedResults | None = None) -> None:
        self._keep = keep
        self.pinned = pinned  # None where results are pageable
        self._kept: dict[int, _Known] = {}
        self._by_storage: dict[int, list[_Known]] = {}
        self._addresses: dict[int, int] = {}
        self._written: list[tuple[Tensor, Tensor, int]] = []
        self._written_storages: set[int] = set()
        self.copied_bytes = 0

    def get(self, tensor: Tensor) -> Tensor | None:
        kept = self._kept.get(id(tensor))
        if kept is not None and kept() is tensor and kept.version == _version(tensor):
            return kept.twin
        return self._part(tensor) if self._keep else None

    def _part(self, tensor: Tensor) -> Tensor | None:
        """The part of a known copy that a view, or another tensor over the same memory, looks at."""
        if tensor.layout != torch.strided or tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
            return None
        known = self._by_storage.get(tensor.untyped_storage()._cdata)
        if not known:
            return None
        version, dtype, offset = tensor._version, tensor.dtype, int(tensor.storage_offset())
        for kept in tuple(known):
            first = offset - kept.offset
            if kept.version != version or kept.dtype != dtype or first < 0 or first >= kept.numel:
                continue
            owner = kept()
            if owner is None or owner._version != version:
                continue
            length = tensor.numel() if tensor.is_contiguous() else span_of(tensor)[1] - offset
            if first + length <= kept.numel:
                twin = kept.twin
                return twin.as_strided(tensor.shape, tensor.stride(), int(twin.storage_offset()) + first)
        return None

    def put(self, tensor: Tensor, twin: Tensor) -> None:
        key = id(tensor)
        if len(self._addresses) > 10_000:
            self._addresses.clear()
        self._addresses[key] = twin.data_ptr()
        if not self._keep or tensor.is_inference():
            return
        old = self._kept.get(key)
        if old is not None:
            self._forget(old)
        known = _Known(tensor, self._forget)
        known.key, known.version, known.twin, known.dtype = key, tensor._version, twin, tensor.dtype
        known.storage, known.offset, known.numel = 0, 0, -1
        if tensor.layout == torch.strided:
            known.storage, known.offset = tensor.untyped_storage()._cdata, int(tensor.storage_offset())
            if _is_whole(tensor, twin):
                known.numel = tensor.numel()
        self._kept[key] = known
        self._by_storage.setdefault(known.storage, []).append(known)

    def _forget(self, known: _Known) -> None:
        if self._kept.get(known.key) is known:
            del self._kept[known.key]
        together = self._by_storage.get(known.storage)
        if together is not None:
            together[:] = [other for other in together if other is not known]
            if not together:
                self._by_storage.pop(known.storage, None)

    def drop_storage(self, tensor: Tensor) -> None:
        """A storage was written to: whatever was copied from it is stale."""
        storage = tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0
        for known in tuple(self._by_storage.get(storage, ())):
            self._forget(known)
        if storage in self._written_storages:
            self._written_storages.discard(storage)
            self._written = [w for w in self._written if w[0].untyped_storage()._cdata != storage]

    def written(self, tensor: Tensor, copy: Tensor, counts: bool) -> None:
        """A kernel wrote to a copy, which was written back; `counts` says that kernels like it count the write."""
        if tensor.layout == torch.strided and not tensor.is_inference():
            if counts:
                torch.autograd.graph.increment_version(tensor)
            self._written.append((tensor, copy, tensor._version))
            self._written_storages.add(tensor.untyped_storage()._cdata)

    def settle(self) -> None:
        """The operator is over, and PyTorch has counted its writes."""
        if not self._written:
            return
        written, self._written = self._written, []
        self._written_storages.clear()
        for tensor, copy, version in written:
            if tensor._version in (version, version + 1) and tensor.stride() == copy.stride():
                self.put(tensor, copy)

    def on_host(self, tensor: Tensor) -> Tensor:
        """A CPU tensor with these values that autograd may hang its own facts on."""
        twin = self.get(tensor)
        if twin is None:
            twin = self.fetch(tensor, keep=True)
            _wait_for_copies(tensor.device)
        return twin.detach()

    def fetch(self, tensor: Tensor, keep: bool) -> Tensor:
        """A new copy, complete once the device's stream is; `keep` says that nobody will write to it."""
        base = tensor._base if keep and self._keep and tensor._is_view() else None
        if base is not None and base.numel() == tensor.numel() and base.layout == torch.strided:
            # the tensor looks at all of its base: the base lives longer than, say, the transposed weight
            twin = _to_host(base)
            self.copied_bytes += twin.numel() * twin.element_size()
            self.put(base, twin)
            part = self.get(tensor)
            if part is not None:
                return part
        twin = _to_host(tensor)
        self.copied_bytes += twin.numel() * twin.element_size()
        if keep:
            self.put(tensor, twin)
        return twin

    def on_device(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A device tensor with these values; it remembers where they came from."""
        moved, twin = _to_device(tensor.detach(), device)
        self.copied_bytes += twin.numel() * twin.element_size()
        self.put(moved, twin)
        return moved

    def own(self, twin: Tensor) -> Tensor:
        """A copy to write to."""
        return twin.clone() if self.pinned is None else self.pinned.run(twin.clone, (), _NO_NAMES)

    def address(self, tensor: Tensor) -> int:
        return self._addresses.get(id(tensor), 0)

    def end(self) -> None:
        """Let go of everything; backward passes of calls that ran may still come."""
        if self.pinned is not None:
            self.pinned.stop()
            self.pinned = None
        self._kept.clear()
        self._by_storage.clear()
        self._addresses.clear()
        self._written = []
        self._written_storages.clear()


def _is_whole(tensor: Tensor, twin: Tensor) -> bool:
    """Whether the copy has the layout of the tensor, without gaps: what lies in a gap was not copied."""
    return twin.layout == torch.strided and twin.stride() == tensor.stride() and is_dense(tensor)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class _OnCpu(DispatchMode):
    """Every kernel that is called under this mode runs on the CPU."""

    def __init__(self, twins: _Twins) -> None:
        super().__init__()
        self._twins = twins

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kernel = _kernel(func)
        with no_torch_function():  # in a backward pass the interceptor is on
            if kernel.stays:
                return func(*args, **kwargs)
            tensors = _flat(args, kwargs)
            device = _device_of(tensors, kwargs)
            if device is None or (kernel.may_move and _moves(func, args, kwargs)):
                if kernel.writes:
                    for tensor in tensors:
                        self._twins.drop_storage(tensor)
                return func(*args, **kwargs)
            return self._run(func, kernel, args, kwargs, tensors, device)

    def _run(
        self,
        func: Any,
        kernel: _Kernel,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        device: torch.device,
    ) -> Any:
        written: list[Tensor] = []
        for where in kernel.writes:
            written.extend(tensors_in(_argument(args, kwargs, where)))
        copies = self._fetch(tensors, {id(t) for t in written} if written else _NONE, device)

        def swap(tensor: Tensor) -> Tensor:
            return copies.get(id(tensor), tensor)

        cpu_args = [
            copies.get(id(a), a) if isinstance(a, Tensor) else map_tensors(a, swap) if type(a) in _LISTS else a
            for a in args
        ]
        cpu_kwargs = {k: _cpu_argument(k, map_tensors(v, swap)) for k, v in kwargs.items()} if kwargs else kwargs
        if kernel.random:
            with _Random(True, device, kwargs.get("generator")) as random:
                if random.generator is not None:
                    cpu_kwargs = {**cpu_kwargs, "generator": random.generator}
                result = _call_on_cpu(func, tuple(cpu_args), cpu_kwargs, self._twins.pinned)
        else:
            result = _call_on_cpu(func, tuple(cpu_args), cpu_kwargs, self._twins.pinned)
        for tensor in written:
            copy = copies.get(id(tensor))
            if copy is not None:
                self._write_back(tensor, copy, kernel.counts)
        return self._return(result, kernel, args, kwargs, tensors, copies, device)

    def _fetch(self, tensors: list[Tensor], written: Container[int], device: torch.device) -> dict[int, Tensor]:
        copies: dict[int, Tensor] = {}
        fetched = False
        for tensor in tensors:
            key = id(tensor)
            if tensor.is_cpu or key in copies:
                continue
            twin = self._twins.get(tensor)
            if twin is None:
                twin = self._twins.fetch(tensor, key not in written)
                fetched = True
            elif key in written:
                twin = self._twins.own(twin)
            copies[key] = twin
        if fetched:
            _wait_for_copies(device)
        return copies

    def _write_back(self, tensor: Tensor, copy: Tensor, counts: bool) -> None:
        self._twins.drop_storage(tensor)
        if tensor.shape != copy.shape:
            tensor.resize_(copy.shape)
        tensor.copy_(copy, non_blocking=tensor.device.type in _STAGING)
        self._twins.copied_bytes += copy.numel() * copy.element_size()
        self._twins.written(tensor, copy, counts)

    def _return(
        self,
        result: Any,
        kernel: _Kernel,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        copies: dict[int, Tensor],
        device: torch.device,
    ) -> Any:
        def move(tensor: Tensor) -> Tensor:
            for key, copy in copies.items():
                if copy is tensor:  # an argument handed back
                    return next(t for t in tensors if id(t) == key)
            return self._twins.on_device(tensor, device)

        if len(kernel.returns) == 1:
            where = kernel.returns[0]
            return map_tensors(result, move) if where is None else _argument(args, kwargs, where)
        if isinstance(result, tuple):
            return tuple(
                [
                    map_tensors(value, move) if where is None else _argument(args, kwargs, where)
                    for value, where in zip(result, kernel.returns)
                ]
            )
        return map_tensors(result, move)


_NONE: Final[frozenset[int]] = frozenset()
_NO_NAMES: Final[dict[str, Any]] = {}
_LISTS: Final = frozenset({list, tuple})


def _flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of a kernel: alone or in lists, by position or by name."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value) in _LISTS:
            found.extend(tensors_in(value))
    return found


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], where: int | str) -> Any:
    if isinstance(where, int):
        return args[where] if where < len(args) else None
    return kwargs.get(where)


def _cpu_argument(name: str, value: Any) -> Any:
    if name == "device" and value is not None:
        return torch.device("cpu")
    if name == "pin_memory":
        return None
    return value


def _device_of(tensors: list[Tensor], kwargs: dict[str, Any]) -> torch.device | None:
    for tensor in tensors:
        if not tensor.is_cpu and not tensor.is_meta:
            return tensor.device
    wanted = kwargs.get("device")
    if wanted is not None and torch.device(wanted).type not in ("cpu", "meta"):
        device = torch.device(wanted)
        if device.index is None:
            device = torch.device(device.type, module_of(device.type).current_device())
        return device
    return None


def _moves(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a kernel carries data between devices, which the CPU alone cannot do."""
    if func is torch.ops.aten._to_copy.default:
        wanted = kwargs.get("device")
        return wanted is not None and torch.device(wanted).type != args[0].device.type
    if func in (torch.ops.aten.copy_.default, torch.ops.aten._copy_from.default):
        return bool(args[0].device != args[1].device)
    return False


def _call_on_cpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], pinned: PinnedResults | None) -> Any:
    try:
        return func(*args, **kwargs) if pinned is None else pinned.run(func, args, kwargs)
    except (NotImplementedError, RuntimeError) as error:
        text = str(error)
        if any(t.dtype in _HALVES for t in tensors_in((args, kwargs))) and "not implemented for" in text:
            return _in_float32(func, args, kwargs)
        if "Could not run" in text or "not implemented" in text or isinstance(error, NotImplementedError):
            raise _NoCpuKernel(f"the CPU has no kernel for {func}") from error
        raise


def _in_float32(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The CPU lacks this kernel for half types: compute in float32, give back the half type."""
    half = next(t.dtype for t in tensors_in((args, kwargs)) if t.dtype in _HALVES)
    raised: dict[int, Tensor] = {}

    def up(tensor: Tensor) -> Tensor:
        if tensor.dtype not in _HALVES:
            return tensor
        return raised.setdefault(id(tensor), tensor.float())

    wide_kwargs = {k: torch.float32 if v in _HALVES and k == "dtype" else map_tensors(v, up) for k, v in kwargs.items()}
    result = func(*map_tensors(args, up), **wide_kwargs)
    back = {id(wide): key for key, wide in raised.items()}
    originals = {id(t): t for t in tensors_in((args, kwargs))}
    for key, wide in raised.items():
        if wide._version:  # written to
            originals[key].copy_(wide)

    def down(tensor: Tensor) -> Tensor:
        if id(tensor) in back:
            return originals[back[id(tensor)]]
        return tensor.to(half) if tensor.dtype == torch.float32 else tensor

    return map_tensors(result, down)


class _Random:
    """Random kernels on the CPU continue the device's stream, and leave the CPU's as it was."""

    def __init__(self, wanted: bool, device: torch.device, generator: torch.Generator | None) -> None:
        self._wanted, self._device, self._given = wanted, device, generator
        self.generator: torch.Generator | None = None

    def __enter__(self) -> _Random:
        if not self._wanted:
            return self
        if self._given is not None and self._given.device.type != "cpu":
            self.generator = torch.Generator("cpu")
            self._continue(self._given.get_state(), self.generator.set_state, self._given)
            return self
        self._before = torch.get_rng_state()
        state = get_rng_state(self._device)
        if state is not None:
            self._continue(state, torch.set_rng_state, None)
        return self

    def _continue(self, state: Tensor, put: Callable[[Tensor], Any], generator: torch.Generator | None) -> None:
        self._same_kind = state.numel() == torch.get_rng_state().numel()
        if self._same_kind:
            put(state)
            return
        # another kind of generator: draw the seed from the device's stream, which advances it
        seed = torch.empty((), dtype=torch.int64, device=self._device).random_(generator=generator).item()
        if self.generator is not None:
            self.generator.manual_seed(int(seed))
        else:
            torch.default_generator.manual_seed(int(seed))

    def __exit__(self, *error: Any) -> None:
        if not self._wanted:
            return
        if self.generator is not None:
            if self._same_kind and self._given is not None:
                self._given.set_state(self.generator.get_state())
            return
        if getattr(self, "_same_kind", False):
            set_rng_state(self._device, torch.get_rng_state())
        torch.set_rng_state(self._before)


def _wait_for_copies(device: torch.device) -> None:
    if can_pin(device.type):
        module_of(device.type).current_stream(device).synchronize()


def _to_host(tensor: Tensor) -> Tensor:
    """A CPU copy of the same layout; on devices with pinned memory it is complete after a sync."""
    data = tensor.detach()
    conjugated, negated = data.is_conj(), data.is_neg()
    if data.layout != torch.strided:
        return data.cpu()
    if data.is_contiguous() and not conjugated and not negated:
        pin = can_pin(data.device.type)
        copy = torch.empty(data.shape, dtype=data.dtype, pin_memory=pin)
        if copy.stride() == data.stride():
            return copy.copy_(data, non_blocking=pin)
    first, last = span_of(data)
    size = data.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=data.device)
    flat.set_(data.untyped_storage(), first * size, ((last - first) * size,), (1,))
    pin = can_pin(data.device.type)
    host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=pin)
    host.copy_(flat, non_blocking=pin)
    copy = torch.empty(0, dtype=data.dtype)
    copy.set_(host.untyped_storage(), 0, data.shape, data.stride())
    if conjugated:
        copy = conj_view(copy)
    return neg_view(copy) if negated else copy


def _to_device(tensor: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """A device tensor with these values, and a CPU tensor that may be kept as its copy."""
    if tensor.layout != torch.strided:
        return tensor.to(device), tensor
    if not can_pin(device.type) or tensor.nbytes <= _SMALL or tensor.is_pinned():
        moved = tensor.to(device, non_blocking=device.type in _STAGING)
        return (moved if moved.stride() == tensor.stride() else _bytes_to_device(tensor, device)), tensor
    pinned = torch.empty_like(tensor, pin_memory=True)
    if pinned.stride() != tensor.stride():
        return _bytes_to_device(tensor, device), tensor
    # The pinned copy is the one to keep: the memory of the result is free at once for the next one, and warm.
    pinned.copy_(tensor)
    return pinned.to(device, non_blocking=True), pinned


def _bytes_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A result with gaps or overlaps in its memory keeps them."""
    first, last = span_of(tensor)
    size = tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8)
    flat.set_(tensor.untyped_storage(), first * size, ((last - first) * size,), (1,))
    moved = torch.empty(0, dtype=tensor.dtype, device=device)
    moved.set_(flat.to(device).untyped_storage(), 0, tensor.shape, tensor.stride())
    if tensor.is_conj():
        moved = conj_view(moved)
    return neg_view(moved) if tensor.is_neg() else moved


class _CannotRunWhole(Exception):
    """The operator writes to its arguments or returns views of them: it cannot run as a whole on copies."""


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, twins: _Twins) -> Tensor:
        ctx.device, ctx.twins = tensor.device, twins
        return twins.on_host(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.twins.on_device(grad, ctx.device), None


class _ToDevice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: torch.device, twins: _Twins) -> Tensor:
        ctx.twins = twins
        return twins.on_device(tensor, device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.twins.on_host(grad), None, None


def _run_whole(call: Call, twins: _Twins) -> Any:
    """Run the operator on CPU copies of its arguments, differentiably."""
    if call.traits.mutates or call.traits.view or "out" in call.kwargs:
        raise _CannotRunWhole("it writes to its arguments")
    device = call.device
    copies: dict[int, Tensor] = {}

    def fetch(tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor
        if id(tensor) not in copies:
            copies[id(tensor)] = _ToHost.apply(tensor, twins)  # type: ignore[no-untyped-call]
        return copies[id(tensor)]

    args = map_tensors(call.args, fetch)
    kwargs = {k: _cpu_argument(k, map_tensors(v, fetch)) for k, v in call.kwargs.items()}
    before = {key: copy._version for key, copy in copies.items()}
    with _Random(call.traits.random is not False, device, call.kwargs.get("generator")), _same_autocast(device.type):
        result = call.function(*args, **kwargs)
    originals = {id(t): t for t in tensors_in((call.args, call.kwargs))}
    for key, copy in copies.items():
        if copy._version != before[key]:  # running statistics, say
            twins.drop_storage(originals[key])
            if copy.requires_grad:
                raise _CannotRunWhole("it writes to an argument that takes gradients")
            originals[key].copy_(copy)
    return map_tensors(result, lambda t: _ToDevice.apply(t, device, twins))  # type: ignore[no-untyped-call]


def _same_autocast(device_type: str) -> torch.autocast:
    enabled = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if enabled else torch.bfloat16
    return torch.autocast("cpu", dtype=dtype, enabled=enabled)


def _as_cpu(rows: list[tuple[str, TensorMeta | str]]) -> list[tuple[str, TensorMeta | str]]:
    cpu = torch.device("cpu")
    return [(label, part._replace(device=cpu) if isinstance(part, TensorMeta) else part) for label, part in rows]
