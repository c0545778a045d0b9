"""Kernels of a device, run on the CPU on copies of the same layout; what OpFallback switches on around an operator."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Container, Iterator
from typing import Any, Final, NamedTuple

import torch

from ..call import facts
from ..call.description import Tensor, map_tensors, tensors_in
from ..call.devices import get_rng_state, module_of, set_rng_state
from ..compat import DispatchMode, in_fake_mode, no_torch_function
from ..copies.host_copies import READS_AT_ONCE, HostCopies, wait_for_copies
from ..copies.pinned_results import PinnedResults
from ..watch.inside import is_wrapper

HALVES: Final = (torch.float16, torch.bfloat16)


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
    writes += facts.UNDECLARED_WRITES.get(name[-1], ())
    is_view = (bool(getattr(func, "is_view", False)) and not writes) or torch.Tag.inplace_view in func.tags
    stays = is_view or name[-1] in facts.STAYS_ON_DEVICE or name[0] in ("c10d", "_c10d_functional", "prim", "profiler")
    random = torch.Tag.nondeterministic_seeded in func.tags
    moves = name[-1] in facts.COPIES_BETWEEN_DEVICES
    return _Kernel(stays, tuple(writes), tuple(returns), random, moves, name[-1].startswith("_foreach_"))


class NoCpuKernel(Exception):
    """The CPU cannot run a kernel under this operator; the operator must run there as a whole."""


class OnCpu(DispatchMode):
    """Every kernel that is called under this mode runs on the CPU."""

    def __init__(self, copies: HostCopies, or_device: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self._copies = copies
        self._or_device = or_device  # told why, kernels that the CPU lacks run on the device; without it they fail
        self.was_interrupted = False  # compiled code ran on the device
        self.converted: dict[torch.dtype, torch.dtype] = {}  # from what the CPU computed in to what it gave back

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(is_wrapper, types)):
            # its own `__torch_dispatch__` is next, with this mode on; with fake tensors nothing is computed
            return func(*args, **kwargs) if in_fake_mode() else NotImplemented
        kernel = _kernel(func)
        with no_torch_function():  # in a backward pass the interceptor is on
            if kernel.stays:
                return func(*args, **kwargs)
            tensors = _flat(args, kwargs)
            device = _device_of(tensors, kwargs)
            if device is None or (kernel.may_move and _moves(func, args, kwargs)):
                if kernel.writes:
                    for tensor in tensors:
                        self._copies.drop_storage(tensor)
                return func(*args, **kwargs)
            try:
                return self._run(func, kernel, args, kwargs, tensors, device)
            except NoCpuKernel as error:
                if self._or_device is None:
                    raise
                self._or_device(str(error))
                for tensor in tensors:
                    self._copies.drop_storage(tensor)
                return func(*args, **kwargs)

    def interrupted(self) -> None:
        self.was_interrupted = True

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
        copies = self._fetch(tensors, {id(t) for t in written} if written else _NO_IDS, device)

        def swap(tensor: Tensor) -> Tensor:
            return copies.get(id(tensor), tensor)

        cpu_args = [
            copies.get(id(a), a) if isinstance(a, Tensor) else map_tensors(a, swap) if type(a) in _LISTS else a
            for a in args
        ]
        cpu_kwargs = {k: cpu_argument(k, map_tensors(v, swap)) for k, v in kwargs.items()} if kwargs else kwargs
        if kernel.random:
            with random_stream(device, kwargs.get("generator")) as generator:
                if generator is not None:
                    cpu_kwargs = {**cpu_kwargs, "generator": generator}
                result = _call_on_cpu(func, tuple(cpu_args), cpu_kwargs, self._copies.pinned, self.converted)
        else:
            result = _call_on_cpu(func, tuple(cpu_args), cpu_kwargs, self._copies.pinned, self.converted)
        for tensor in written:
            copy = copies.get(id(tensor))
            if copy is not None:
                self._write_back(tensor, copy, kernel.counts)

        def move(tensor: Tensor) -> Tensor:
            for key, copy in copies.items():
                if copy is tensor:  # an argument handed back
                    return next(t for t in tensors if id(t) == key)
            moved = self._copies.on_device(tensor, device)
            if moved.dtype != tensor.dtype:
                self.converted[tensor.dtype] = moved.dtype
            return moved

        def returned(value: Any, where: int | str | None) -> Any:
            return map_tensors(value, move) if where is None else _argument(args, kwargs, where)

        if len(kernel.returns) == 1:
            return returned(result, kernel.returns[0])
        if isinstance(result, tuple):
            return tuple([returned(value, where) for value, where in zip(result, kernel.returns)])
        return map_tensors(result, move)

    def _fetch(self, tensors: list[Tensor], written: Container[int], device: torch.device) -> dict[int, Tensor]:
        copies: dict[int, Tensor] = {}
        fetched = False
        for tensor in tensors:
            key = id(tensor)
            if tensor.is_cpu or key in copies:
                continue
            copy = self._copies.get(tensor)
            if copy is None:
                copy = self._copies.fetch(tensor, key not in written)
                fetched = True
            elif key in written:
                copy = self._copies.own(copy)
            copies[key] = copy
        if fetched:
            wait_for_copies(device)
        return copies

    def _write_back(self, tensor: Tensor, copy: Tensor, counts: bool) -> None:
        self._copies.drop_storage(tensor)
        if tensor.shape != copy.shape:
            tensor.resize_(copy.shape)
        tensor.copy_(copy, non_blocking=tensor.device.type in READS_AT_ONCE)
        self._copies.count(copy)
        self._copies.written(tensor, copy, counts)


_NO_IDS: Final[frozenset[int]] = frozenset()
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


def cpu_argument(name: str, value: Any) -> Any:
    if isinstance(value, torch.device) or (name == "device" and value is not None):
        return torch.device("cpu")
    return None if name == "pin_memory" else value


def cpu_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a function for the CPU: devices that they name become the CPU; tensors stay where they are.

    >>> cpu_arguments(("cuda:0", torch.float64), {"device": "cuda"})
    ((device(type='cpu'), torch.float64), {'device': device(type='cpu')})
    """
    cpu = torch.device("cpu")
    named = [cpu if isinstance(a, str) and facts.is_device_text(a) else cpu_argument("", a) for a in args]
    return tuple(named), {k: cpu_argument(k, v) for k, v in kwargs.items()}


def _device_of(tensors: list[Tensor], kwargs: dict[str, Any]) -> torch.device | None:
    for tensor in tensors:
        if not tensor.is_cpu and not tensor.is_meta:
            return tensor.device
    wanted = kwargs.get("device")
    if wanted is None or torch.device(wanted).type in ("cpu", "meta"):
        return None
    device = torch.device(wanted)
    return device if device.index is not None else torch.device(device.type, module_of(device.type).current_device())


def _moves(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a kernel carries data between devices, which the CPU alone cannot do."""
    if func is torch.ops.aten._to_copy.default:
        wanted, here = kwargs.get("device"), args[0].device
        return wanted is not None and torch.device(wanted) not in (here, torch.device(here.type))
    if func in (torch.ops.aten.copy_.default, torch.ops.aten._copy_from.default):
        return bool(args[0].device != args[1].device)
    return False


def _call_on_cpu(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    pinned: PinnedResults | None,
    converted: dict[torch.dtype, torch.dtype],
) -> Any:
    try:
        return func(*args, **kwargs) if pinned is None else pinned.run(func, args, kwargs)
    except (NotImplementedError, RuntimeError) as error:
        text = str(error)
        if any(t.dtype in HALVES for t in tensors_in((args, kwargs))):
            with contextlib.suppress(NotImplementedError, RuntimeError):  # then the dtype is not what is wrong
                return _in_float32(func, args, kwargs, converted)
        if "Could not run" in text or "not implemented" in text or isinstance(error, NotImplementedError):
            raise NoCpuKernel(f"the CPU has no kernel for {func}") from error
        raise


def _in_float32(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], converted: dict[torch.dtype, torch.dtype]
) -> Any:
    """The CPU lacks this kernel for half types: compute in float32, give back the half type."""
    half = next(t.dtype for t in tensors_in((args, kwargs)) if t.dtype in HALVES)
    raised: dict[int, tuple[Tensor, Tensor]] = {}  # the original and its copy, by the id of the original

    def up(tensor: Tensor) -> Tensor:
        if tensor.dtype not in HALVES:
            return tensor
        return raised.setdefault(id(tensor), (tensor, tensor.float()))[1]

    wide_kwargs = {k: torch.float32 if v in HALVES and k == "dtype" else map_tensors(v, up) for k, v in kwargs.items()}
    result = func(*map_tensors(args, up), **wide_kwargs)
    converted[torch.float32] = half
    for original, wide in raised.values():
        if wide._version:  # written to
            original.copy_(wide)
    back = {id(wide): original for original, wide in raised.values()}

    def down(tensor: Tensor) -> Tensor:
        if id(tensor) in back:
            return back[id(tensor)]
        return tensor.to(half) if tensor.dtype == torch.float32 else tensor

    return map_tensors(result, down)


@contextlib.contextmanager
def random_stream(device: torch.device, given: torch.Generator | None) -> Iterator[torch.Generator | None]:
    """Random kernels on the CPU continue the device's stream, and leave the CPU's as it was.

    Yields a generator to use in place of the device's that was given; None means the default one.
    """
    own = torch.Generator("cpu") if given is not None and given.device.type != "cpu" else None
    target, before = own or torch.default_generator, torch.get_rng_state()
    state = get_rng_state(device) if own is None or given is None else given.get_state()
    same_kind = state is not None and state.numel() == before.numel()
    if state is not None and same_kind:
        target.set_state(state)
    elif state is not None:
        # another kind of generator: draw the seed from the device's stream, which advances it
        drawn = torch.empty((), dtype=torch.int64, device=device).random_(generator=None if own is None else given)
        target.manual_seed(int(drawn.item()))
    try:
        yield own
    finally:
        if own is not None and given is not None:
            if same_kind:
                given.set_state(own.get_state())
        else:
            if same_kind:
                set_rng_state(device, torch.get_rng_state())
            torch.set_rng_state(before)
