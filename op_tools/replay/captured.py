"""A captured operator, ready to run again on any device: looked up, its arguments placed as they were, run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import torch
from torch.overrides import get_testing_overrides

from ..call import facts
from ..call.description import Tensor, children, map_tensors, tensors_in
from ..call.devices import accelerator_type, get_rng_state, set_rng_state
from ..call.traits import COLLECTIVES, OpTraits, factories, name_of, traits_of
from ..compat import OpOverloadPacket, conj_view, neg_view, no_torch_function
from ..files import archive
from ..files.archive import ArchiveError
from ..files.captures import CannotReplay, is_answer, read
from ..judge import golden

_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX: Final = (torch.complex32, torch.complex64, torch.complex128)


# --- functions --------------------------------------------------------------------------------------------


def function_of(name: str) -> Callable[..., Any]:
    """The operator of this name; only PyTorch's own operators are looked up, whatever a file says.

    >>> function_of("torch.add") is torch.add
    True
    """
    if name in _COLLECTIVE_NAMES:
        raise CannotReplay(f"{name} is a collective: it cannot run without the other processes")
    function = _known_functions().get(name) or _aten_function(name)
    if function is not None:
        return function
    raise ArchiveError(f"{name!r} is no operator of PyTorch {torch.__version__}: it cannot be replayed")


_HOMES: Final[dict[str, Any]] = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.functional": torch.nn.functional,
    "torch.special": torch.special,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
}


def _aten_function(name: str) -> Callable[..., Any] | None:
    """A function that is an ATen operator on tensors by its name, None for everything else."""
    home, _, last = name.rpartition(".")
    if home.startswith("aten"):
        packet, _, overload = name.removeprefix("aten.").partition(".")
        operator = _operator(packet)
        return getattr(operator, overload, None) if operator is not None and overload else operator
    if home not in _HOMES or _operator(last) is None:
        return None
    return getattr(_HOMES[home], last, None)


def _operator(name: str) -> Any:
    if not name.isidentifier() or name.startswith("__") or name.endswith(_NEVER):
        return None
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, OpOverloadPacket):
        return None
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    # the namespace also holds helpers of TorchScript, which have nothing to do with tensors
    return packet if any("Tensor" in str(schema) for schema in schemas) else None


_COLLECTIVE_NAMES: Final = frozenset(f"torch.distributed.{name}" for name in COLLECTIVES)
# getters, and what reads or writes files, changes the process or calls back
_NEVER: Final = ("__get__", "__set__", "__delete__", "from_file", "__reduce_ex__", "__setstate__", "share_memory_")
_by_name: dict[str, Callable[..., Any]] = {}


def _known_functions() -> dict[str, Callable[..., Any]]:
    if not _by_name:
        for function in get_testing_overrides():
            name = name_of(function)
            if not name.endswith(_NEVER):
                _by_name[name] = function
        for name in factories() - {"torch.from_file"}:
            factory = getattr(torch, name.rsplit(".", 1)[-1], None)
            if factory is not None:
                _by_name[name] = factory
    return _by_name


# --- a call -----------------------------------------------------------------------------------------------


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
            payload = _read_call(folder)
            self.name: str = payload["name"]
            self.function = _placed_function(self.name, self.device)
            self.traits: OpTraits = traits_of(function_of(self.name))
            self.payload = payload
            self.drew_from: str = _take_generator(payload["kwargs"])
            missing = archive.unknown_in((payload["args"], payload["kwargs"]))
            if missing:
                raise CannotReplay(f"arguments of type {', '.join(missing)} were not captured")
            self.note = ""
            self.host_args, self.host_kwargs = self._on_host(contiguous)
        self.writes = _writes(self.name, self.host_args, self.host_kwargs)
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.result: Any = None
        self.grad_outputs: list[Tensor | None] | None = None
        self.apart = False  # whether equal-looking arguments are different tensors to autograd
        self._leaves: list[Tensor] = []
        self._parts: dict[str, Any] = {}

    # -- what was captured ----------------------------------------------------------------------------

    @property
    def has_backward(self) -> bool:
        """Whether gradients were captured as well (`op.has_backward`)."""
        return (self.folder / "grad_outputs.pth").exists()

    @property
    def location(self) -> str:
        """The user's line that made the call (`op.location`)."""
        return str(self.payload.get("location") or "")

    def captured(self, part: str) -> Any:
        """`output`, `grad_outputs` or `grad_inputs` as captured, None where that was not saved.

        >>> op.captured("output")  # doctest: +SKIP
        """
        if part in self._parts:
            return self._parts[part]
        path = self.folder / f"{part}.pth"
        if not path.exists():
            return None
        payload = read(path)
        key = "result" if part == "output" else part
        if key not in payload:
            raise ArchiveError(f"{path}: is no {part} of a capture (no {key!r} in it)")
        value = payload[key]
        if part != "output" and not _is_gradients(value):
            raise ArchiveError(f"{path}: {key!r} is not a row of tensors")
        self._parts[part] = value
        return value

    # -- arguments ------------------------------------------------------------------------------------

    def _on_host(self, contiguous: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments in main memory, with the dtype and layout that were asked for."""
        args, kwargs = self.payload["args"], self.payload["kwargs"]
        casts = _casts_to(self.dtype) if self.dtype is not None else {}
        if contiguous and (self.name.endswith(("as_strided", "as_strided_")) or _shares_memory((args, kwargs))):
            contiguous, self.note = False, "kept as captured: its meaning depends on the layout"
        if not casts and not contiguous:
            return args, kwargs
        known: dict[Any, Tensor] = {}

        def change(tensor: Tensor) -> Tensor:
            key = _geometry(tensor)
            if key not in known:
                target = casts.get(tensor.dtype, tensor.dtype)
                known[key] = _converted(tensor, target, contiguous).requires_grad_(tensor.requires_grad)
            return known[key]

        def settings(value: Any) -> Any:
            return casts.get(value, value) if isinstance(value, torch.dtype) else value

        args, kwargs = map_tensors(args, change), map_tensors(kwargs, change)
        return tuple(settings(a) for a in args), {k: settings(v) for k, v in kwargs.items()}

    def prepare(self) -> None:
        """Fresh arguments on the device, of the captured layout, sharing memory where they did (`op.prepare()`)."""
        enter = self.writes and bool(self.payload.get("grad_enabled", True))
        placed = _Placed(self.device, enter, self.apart)
        with no_torch_function():
            args, kwargs = map_tensors(self.host_args, placed), map_tensors(self.host_kwargs, placed)
        self.args = tuple([self._device_in(a) for a in args])
        self.kwargs = {k: self._device_in(v, k) for k, v in kwargs.items()}
        self._leaves = [placed.leaf_of[id(t)] for t in tensors_in((self.args, self.kwargs))]
        self.result = None

    @property
    def has_twins(self) -> bool:
        """Whether two arguments that want gradients look the same: one tensor, or a tensor and a view of all of it."""
        looks = [_geometry(t) for t in tensors_in((self.host_args, self.host_kwargs)) if t.requires_grad]
        return len(set(looks)) < len(looks)

    def reference_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What a reference run on the CPU gets (`golden.run(op.function, *op.reference_arguments())`)."""
        if not self.apart or self.writes:
            return self.host_args, self.host_kwargs
        placed = _Placed(torch.device("cpu"), enter=False, apart=True, own_memory=True)
        return map_tensors(self.host_args, placed), map_tensors(self.host_kwargs, placed)

    def _device_in(self, value: Any, key: str = "") -> Any:
        """This device in place of the one that a call named."""
        if isinstance(value, torch.device):
            return value if value.type == "cpu" else self.device
        if isinstance(value, str) and facts.names_a_device(value) and value != "cpu":
            return self.device
        return self.device if key == "device" and type(value) is int else value

    @staticmethod
    def _rng_kind(rng: Mapping[str, Any]) -> str:
        return str(rng.get("type", "")).split(":")[0]

    @contextlib.contextmanager
    def _random_state(self) -> Iterator[None]:
        rng = self.payload.get("rng")
        if not isinstance(rng, dict):
            yield
            return
        before, before_device = torch.get_rng_state(), get_rng_state(self.device)
        try:
            if isinstance(rng.get("cpu"), Tensor):
                torch.set_rng_state(rng["cpu"])
            if isinstance(rng.get("device"), Tensor) and self._rng_kind(rng) == self.device.type:
                set_rng_state(self.device, rng["device"])
            yield
        finally:
            torch.set_rng_state(before)
            if before_device is not None:
                set_rng_state(self.device, before_device)

    # -- running --------------------------------------------------------------------------------------

    def run_forward(self, around: AbstractContextManager[Any] | None = None) -> Any:
        """Run the operator as it was called, `around` it alone whatever is to measure it (`op.run_forward()`)."""
        with self._random_state(), self._modes(), around or contextlib.nullcontext():
            self.result = self.function(*self.args, **self.kwargs)
        return self.result

    @contextlib.contextmanager
    def _modes(self) -> Iterator[None]:
        autocast = self.payload.get("autocast")
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(bool(self.payload.get("grad_enabled", True))))
            if isinstance(autocast, dict):
                dtype = getattr(torch, str(autocast.get("dtype")).removeprefix("torch."), None)
                if not isinstance(dtype, torch.dtype):
                    raise ArchiveError(f"{self.folder / 'input.pth'}: autocast to {autocast.get('dtype')!r}")
                stack.enter_context(torch.autocast(self.device.type, dtype=dtype))
            if self.traits.factory and self.kwargs.get("device") is None and not any(tensors_in(self.args)):
                stack.enter_context(self.device)
            yield

    @property
    def can_go_backward(self) -> bool:
        """Whether the result of `run_forward` depends on an argument that wants a gradient."""
        return any(t.requires_grad for t in tensors_in(self.result)) and any(t.requires_grad for t in self._leaves)

    def prepare_backward(self) -> None:
        """The gradients to send, on the device: those captured, ones where there are none (`op.prepare_backward()`)."""
        outputs = list(tensors_in(self.result))
        captured = self.captured("grad_outputs") if self.has_backward else None
        if captured is not None and len(captured) != len(outputs):
            raise ArchiveError(
                f"{self.folder / 'grad_outputs.pth'}: {len(captured)} gradients, but {self.name} "
                f"returned {len(outputs)} tensors"
            )
        place = _Placed(self.device, enter=False)
        with no_torch_function(), torch.no_grad():
            if captured is None:
                self.grad_outputs = [torch.ones_like(t) if t.requires_grad else None for t in outputs]
            else:
                self.grad_outputs = [None if g is None else _fitting(place(g), t) for g, t in zip(captured, outputs)]

    def sent_gradients(self) -> list[Tensor | None]:
        """What `run_backward` was given, in main memory (`op.sent_gradients()`)."""
        captured = self.captured("grad_outputs") if self.has_backward else None
        own = self.grad_outputs or []
        if captured is None:
            return [None if g is None else g.detach().cpu() for g in own]
        # a copy of what was captured, unless it had to be converted
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
        wanted = list({id(t): t for t in self._leaves if t.requires_grad}.values())
        sent, grads = [t for t, _ in pairs], [g for _, g in pairs]
        with around or contextlib.nullcontext():
            found = torch.autograd.grad(sent, wanted, grads, allow_unused=True, retain_graph=True)
        by_leaf = {id(leaf): grad for leaf, grad in zip(wanted, found)}
        return [by_leaf.get(id(leaf)) for leaf in self._leaves]


def _read_call(folder: Path) -> dict[str, Any]:
    path = folder / "input.pth"
    payload = read(path)
    if not payload.get("name") and is_answer(folder):  # the CPU's side of a comparison
        payload["name"] = read(folder.parent / "device" / "input.pth").get("name")
    for key, kind in (("name", str), ("args", tuple), ("kwargs", dict)):
        if not isinstance(payload.get(key), kind):
            raise ArchiveError(f"{path}: is no input of a capture (no {key!r} in it)")
    if not all(isinstance(key, str) for key in payload["kwargs"]):
        raise ArchiveError(f"{path}: is no input of a capture (a keyword that is no name)")
    return payload


def _placed_function(name: str, device: torch.device) -> Callable[..., Any]:
    """What to call: `x.cuda()` means this device, whatever its name is."""
    last = facts.last_name(name)
    if name == f"torch.Tensor.{last}" and last != "cpu" and facts.names_a_device(last):
        return lambda tensor, *_, **__: tensor.to(device)
    return function_of(name)


def _take_generator(kwargs: dict[str, Any]) -> str:
    """A generator has no file form: the call draws from the default one, and cannot be compared."""
    kinds = archive.unknown_in((kwargs.get("generator"),))
    if not kinds or "Generator" not in kinds[0]:
        return ""
    del kwargs["generator"]
    return "a generator of its own"


def _writes(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call writes to an argument; functions with an `inplace` option say so."""
    if not facts.may_mutate(name, kwargs):
        return False
    plain = facts.last_name(name).endswith("_") or kwargs.get("out") is not None
    return plain or any(v is True for v in (*args, *kwargs.values()))


def _is_gradients(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(g is None or isinstance(g, Tensor) for g in value)


def _fitting(grad: Tensor, output: Tensor) -> Tensor:
    same = grad.dtype == output.dtype and grad.device == output.device
    return grad if same else grad.to(device=output.device, dtype=output.dtype)


def _casts_to(dtype: torch.dtype) -> dict[torch.dtype, torch.dtype]:
    casts = dict.fromkeys(_FLOATS, dtype)
    if dtype in (torch.float32, torch.float64):  # operators lack complex numbers of two halves
        casts.update(dict.fromkeys(_COMPLEX, dtype.to_complex()))
    return casts


def _converted(tensor: Tensor, dtype: torch.dtype, contiguous: bool) -> Tensor:
    plain = tensor.detach()
    if plain.layout != torch.strided or (contiguous and plain.dtype == dtype):
        return plain.to(dtype) if plain.dtype != dtype else plain.clone(memory_format=torch.contiguous_format)
    if contiguous:
        return plain.to(dtype).contiguous()
    first, last = _span(plain)
    flat = plain.as_strided((last - first,), (1,), first).to(dtype, copy=True)  # which starts at the first element
    copy = torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), 0, plain.shape, plain.stride())
    return neg_view(copy) if plain.is_neg() else copy


def _span(tensor: Tensor) -> tuple[int, int]:
    first = int(tensor.storage_offset())
    if tensor.numel() == 0:
        return first, first
    return first, first + 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))


def _geometry(tensor: Tensor) -> Any:
    """Equal for arguments that are the same tensor: same memory seen in the same way."""
    if tensor.layout != torch.strided:
        return id(tensor)
    memory = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.dtype)
    look = (tuple(tensor.shape), tuple(tensor.stride()), tensor.is_conj(), tensor.is_neg(), tensor.requires_grad)
    return memory, look


def _shares_memory(value: Any) -> bool:
    """Whether different arguments lie in one storage."""
    looks = {_geometry(t) for t in tensors_in(value) if t.layout == torch.strided}
    return len({look[0][0] for look in looks}) < len(looks)


class _Placed:
    """Puts tensors on the device with their strides and offsets, in storages shared as they were captured.

    A file does not say whether two arguments of the same look are one tensor: they are, unless told `apart`.
    """

    def __init__(self, device: torch.device, enter: bool, apart: bool = False, own_memory: bool = False) -> None:
        self.device, self._enter, self._apart, self._own_memory = device, enter, apart, own_memory
        self.leaf_of: dict[int, Tensor] = {}  # by the id of a placed tensor: what to differentiate by
        self._storages: dict[int, Tensor] = {}
        self._made: dict[Any, Tensor] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        key = len(self._made) if self._apart else _geometry(tensor)
        if key not in self._made:
            with torch.no_grad():
                placed = leaf = self._place(tensor)
            if tensor.requires_grad:
                leaf = placed.requires_grad_() if not self._enter else torch.empty_like(placed).requires_grad_()
                if self._enter:
                    with torch.enable_grad():
                        placed = golden.Enter.apply(leaf, [placed])  # type: ignore[no-untyped-call]
            self._made[key] = placed
            self.leaf_of[id(placed)] = leaf
        return self._made[key]

    def _place(self, tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided or tensor.is_quantized:
            return tensor.detach().to(self.device, copy=True)
        key = tensor.untyped_storage()._cdata
        flat = self._storages.get(key)
        if flat is None or self._own_memory:
            source = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            flat = self._storages[key] = source.to(self.device, copy=True)
        placed = torch.empty(0, dtype=tensor.dtype, device=self.device)
        placed.set_(flat.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.is_conj():
            placed = conj_view(placed)
        return neg_view(placed) if tensor.is_neg() else placed


def leaves_of(value: Any) -> Iterator[Any]:
    """Tensors and plain values of a result, in order (`list(leaves_of((x, [1])))`)."""
    parts = None if isinstance(value, (Tensor, str)) else children(value)
    if parts is None:
        yield value
        return
    for member in parts[1]:
        yield from leaves_of(member)
