"""A captured call that can run again on any device, with its arguments laid out as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import torch

from ..call import facts, functions
from ..call.description import Tensor, tensors_in
from ..call.devices import accelerator_type, get_rng_state, set_rng_state
from ..call.traits import COLLECTIVES, OpTraits, traits_of
from ..compat import no_torch_function
from ..copies.invocation import Region, Site
from ..copies.materialise import Copier, is_strided, place_of
from ..files import archive
from ..files.archive import ArchiveError
from ..files.captures import CannotReplay, has_part, is_cpu_side, read
from ..files.header import read_header

_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX: Final = (torch.complex32, torch.complex64, torch.complex128)
_COLLECTIVE_NAMES: Final = frozenset(f"torch.distributed.{name}" for name in COLLECTIVES)


def function_of(name: str) -> Callable[..., Any]:
    """The operator of this name; only PyTorch's own operators are looked up, whatever a file says.

    >>> function_of("torch.add") is torch.add
    True
    """
    if name in _COLLECTIVE_NAMES:
        raise CannotReplay(f"{name} is a collective: it cannot run without the other processes")
    try:
        return functions.function_of(name)
    except LookupError as error:
        raise ArchiveError(f"{error}: it cannot be replayed") from None


class CapturedOp:
    """One captured call, loaded from its folder.

    `dtype` replaces every floating dtype among the arguments; `contiguous` undoes strides, offsets and sharing.

    >>> op = CapturedOp(Path("op_tools_results/op_capture_results/torch.add/1/1/t"), "cpu")  # doctest: +SKIP
    >>> op.prepare()                                                                         # doctest: +SKIP
    >>> op.run_forward()                                                                     # doctest: +SKIP
    """

    def __init__(
        self,
        folder: Path,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        contiguous: bool = False,
    ) -> None:
        self.folder, self.dtype = folder, dtype
        with no_torch_function():  # tools watch the operator, not its preparation
            self.device = torch.device(device or accelerator_type())
            payload, (self.name, self.site, self.region) = _read_call(folder)
            self.function = _placed_function(self.name, self.device)
            self.traits: OpTraits = traits_of(function_of(self.name))
            self.lost_types: list[str] = payload["as_tuples"]  # types that come back as plain tuples
            self.drew_from: str = _take_generator(payload["kwargs"])
            missing = archive.unknown_in((payload["args"], payload["kwargs"]))
            if missing:
                raise CannotReplay(f"arguments of type {', '.join(missing)} were not captured")
            self.note = ""
            self._of_ditorch = bool(payload.get("of_ditorch"))
            if self._of_ditorch and self.traits.random is not False:
                self.drew_from = self.drew_from or "a random state that was not captured"
            self.host_args, self.host_kwargs = self._on_host(payload["args"], payload["kwargs"], contiguous)
        self.writes = _writes(self.name, self.host_args, self.host_kwargs)
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.result: Any = None
        self.grad_outputs: list[Tensor | None] | None = None
        self.distinct_leaves = False  # whether autograd takes arguments with the same place in memory for several
        self._leaves: list[Tensor | None] = []
        self._parts: dict[str, Any] = {}

    # -- what was captured ----------------------------------------------------------------------------

    @property
    def has_backward(self) -> bool:
        """Whether gradients were captured as well (`op.has_backward`)."""
        return has_part(self.folder / "grad_outputs.pth")

    def captured(self, part: str) -> Any:
        """`output`, `grad_outputs` or `grad_inputs` as captured, None where that was not saved.

        >>> op.captured("output")  # doctest: +SKIP
        """
        if part in self._parts:
            return self._parts[part]
        path = self.folder / f"{part}.pth"
        # ditorch saved gradients of the last autograd node, which may be within the operator
        if not has_part(path) or (self._of_ditorch and part == "grad_inputs"):
            return None
        payload = read(path)
        key = "result" if part == "output" else part
        if key not in payload:
            raise ArchiveError(f"{path}: is not the {part} of a capture (no {key!r} in it)")
        value = payload[key]
        if part != "output" and not (
            isinstance(value, (tuple, list)) and all(g is None or isinstance(g, Tensor) for g in value)
        ):
            raise ArchiveError(f"{path}: {key!r} is not a row of tensors")
        self._parts[part] = value
        return value

    # -- arguments ------------------------------------------------------------------------------------

    def _on_host(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], contiguous: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments in main memory, with the dtype and layout that were asked for."""
        casts = _casts_to(self.dtype) if self.dtype is not None else {}
        if contiguous and (self.name.endswith(("as_strided", "as_strided_")) or _shares_memory((args, kwargs))):
            contiguous, self.note = False, "kept as captured: its meaning depends on the layout"
        if not casts and not contiguous:
            return args, kwargs

        def settings(value: Any) -> Any:
            return casts.get(value, value) if isinstance(value, torch.dtype) else value

        args, kwargs = Copier(cast=casts, whole=True, contiguous=contiguous).copy((args, kwargs))
        return tuple(settings(a) for a in args), {k: settings(v) for k, v in kwargs.items()}

    def prepare(self) -> None:
        """Make fresh arguments on the device, with the captured layout and aliasing (`op.prepare()`)."""
        enter = self.writes and self.region.grad_enabled
        copier = Copier(self.device, enter=enter, distinct_leaves=self.distinct_leaves, whole=True)
        with no_torch_function():
            args, kwargs = copier.copy((self.host_args, self.host_kwargs))
        self.args = tuple([self._device_in(a) for a in args])
        self.kwargs = {k: self._device_in(v, k) for k, v in kwargs.items()}
        self._leaves = copier.leaves
        self.result = None

    @property
    def has_aliased_leaves(self) -> bool:
        """Whether two arguments that require grad have one place in memory: one tensor, or a tensor and a full view."""
        places = [place_of(t) for t in tensors_in((self.host_args, self.host_kwargs)) if t.requires_grad]
        return len(set(places)) < len(places)

    def reference_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the reference run on the CPU (`golden.run(op.function, *op.reference_arguments())`)."""
        if not self.distinct_leaves or self.writes:
            return self.host_args, self.host_kwargs
        args, kwargs = Copier(distinct_leaves=True, own_memory=True).copy((self.host_args, self.host_kwargs))
        return args, kwargs

    def _device_in(self, value: Any, key: str = "") -> Any:
        """The value, with this device in place of the one that the call named."""
        if isinstance(value, torch.device):
            return value if value.type == "cpu" else self.device
        if isinstance(value, str) and facts.is_device_text(value) and value != "cpu":
            return self.device
        return self.device if key == "device" and type(value) is int else value

    # -- running --------------------------------------------------------------------------------------

    def run_forward(self, around: AbstractContextManager[Any] | None = None) -> Any:
        """Run the operator as it was called, inside the context `around` if given (`op.run_forward()`)."""
        with contextlib.ExitStack() as modes:
            self._set_random_states(modes)
            modes.enter_context(torch.set_grad_enabled(self.region.grad_enabled))
            if self.region.autocast is not None:
                modes.enter_context(torch.autocast(self.device.type, dtype=self.region.autocast))
            if (
                self.traits.factory
                and self.kwargs.get("device") is None
                and not any(True for _ in tensors_in(self.args))
            ):
                modes.enter_context(self.device)
            modes.enter_context(around or contextlib.nullcontext())
            self.result = self.function(*self.args, **self.kwargs)
        return self.result

    def _set_random_states(self, undo: contextlib.ExitStack) -> None:
        """Let the call draw what it drew when it was captured; `undo` gives the generators their states back."""
        rng = self.region.rng
        if rng is None:
            return
        drawn_here = str(rng.get("type", "")).split(":")[0] == self.device.type
        on_device = rng.get("device") if drawn_here else None
        for device, state in ((torch.device("cpu"), rng.get("cpu")), (self.device, on_device)):
            before = get_rng_state(device)
            if before is not None:
                undo.callback(set_rng_state, device, before)
            if isinstance(state, Tensor):
                set_rng_state(device, state)

    @property
    def can_go_backward(self) -> bool:
        """Whether the result of `run_forward` depends on an argument that requires grad."""
        return any(t.requires_grad for t in tensors_in(self.result)) and any(leaf is not None for leaf in self._leaves)

    def prepare_backward(self) -> None:
        """Put the incoming gradients on the device: the captured ones, or ones (`op.prepare_backward()`)."""
        outputs = list(tensors_in(self.result))
        as_saved = "grad_outputs" not in self._parts
        captured = self.captured("grad_outputs") if self.has_backward else None
        if captured is not None and as_saved and self._of_ditorch:  # ditorch saved those of differentiable results
            given = iter(captured)
            captured = self._parts["grad_outputs"] = [next(given, None) if t.requires_grad else None for t in outputs]
        if captured is not None and len(captured) != len(outputs):
            raise ArchiveError(
                f"{self.folder / 'grad_outputs.pth'}: {len(captured)} gradients, but {self.name} "
                f"returned {len(outputs)} tensors"
            )
        with no_torch_function(), torch.no_grad():
            if captured is None:
                self.grad_outputs = [torch.ones_like(t) if t.requires_grad else None for t in outputs]
            else:
                placed = Copier(self.device, whole=True).copy(captured)
                self.grad_outputs = [None if g is None else g.to(t) for g, t in zip(placed, outputs)]

    def sent_gradients(self) -> list[Tensor | None]:
        """The incoming gradients of `run_backward`, in main memory (`op.sent_gradients()`)."""
        captured = self.captured("grad_outputs") if self.has_backward else None
        own = self.grad_outputs or []
        if captured is None:
            return [None if g is None else g.detach().cpu() for g in own]
        # the captured gradient itself, unless it had to be converted
        return [c if g is None or g.dtype == c.dtype else g.detach().cpu() for c, g in zip(captured, own)]

    def run_backward(self, around: AbstractContextManager[Any] | None = None) -> list[Tensor | None] | None:
        """Gradients of the arguments, one (or None) per tensor; None without a backward pass (`op.run_backward()`)."""
        if not self.can_go_backward:
            return None
        if self.grad_outputs is None:
            self.prepare_backward()
        assert self.grad_outputs is not None
        outputs = tensors_in(self.result)
        pairs = [(t, g) for t, g in zip(outputs, self.grad_outputs) if t.requires_grad and g is not None]
        if not pairs:
            return None
        wanted = list({id(leaf): leaf for leaf in self._leaves if leaf is not None}.values())
        sent, grads = [t for t, _ in pairs], [g for _, g in pairs]
        with around or contextlib.nullcontext():
            found = torch.autograd.grad(sent, wanted, grads, allow_unused=True, retain_graph=True)
        by_leaf = {id(leaf): grad for leaf, grad in zip(wanted, found)}
        return [by_leaf.get(id(leaf)) for leaf in self._leaves]


def _read_call(folder: Path) -> tuple[dict[str, Any], tuple[str, Site, Region]]:
    """The arguments of a call, and what its file says about it."""
    path = folder / "input.pth"
    payload = read(path)
    if not payload.get("name") and is_cpu_side(folder):  # the CPU's side of a comparison
        payload["name"] = read(folder.parent / "device" / "input.pth").get("name")
    for key, kind in (("name", str), ("args", tuple), ("kwargs", dict)):
        if not isinstance(payload.get(key), kind):
            raise ArchiveError(f"{path}: is not the input of a capture (no {key!r} in it)")
    if not all(isinstance(key, str) for key in payload["kwargs"]):
        raise ArchiveError(f"{path}: is not the input of a capture (a keyword that is not a name)")
    try:
        return payload, read_header(payload)
    except ArchiveError as error:
        raise ArchiveError(f"{path}: {error}") from None


def _placed_function(name: str, device: torch.device) -> Callable[..., Any]:
    """What to call: `x.cuda()` means this device, whatever its name is."""
    last = facts.last_name(name)
    if name == f"torch.Tensor.{last}" and last != "cpu" and facts.is_device_text(last):
        return lambda tensor, *_, **__: tensor.to(device)
    return function_of(name)


def _take_generator(kwargs: dict[str, Any]) -> str:
    """Remove a generator, which no file can hold: the call draws from the default one and cannot be compared."""
    kinds = archive.unknown_in((kwargs.get("generator"),))
    if not kinds or "Generator" not in kinds[0]:
        return ""
    del kwargs["generator"]
    return "a generator of its own"


def _writes(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call writes to an argument; functions with an `inplace` option only if it is set."""
    if not facts.may_mutate(name, kwargs):
        return False
    plain = facts.last_name(name).endswith("_") or kwargs.get("out") is not None
    return plain or any(v is True for v in (*args, *kwargs.values()))


def _casts_to(dtype: torch.dtype) -> dict[torch.dtype, torch.dtype]:
    casts = dict.fromkeys(_FLOATS, dtype)
    if dtype in (torch.float32, torch.float64):  # few operators support complex32
        casts.update(dict.fromkeys(_COMPLEX, dtype.to_complex()))
    return casts


def _shares_memory(value: Any) -> bool:
    """Whether different arguments lie in one storage."""
    places = {place_of(t) for t in tensors_in(value) if is_strided(t)}
    return len({place[0] for place in places}) < len(places)
