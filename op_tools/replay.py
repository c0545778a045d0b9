"""Runs captured operators again, anywhere: to check them, to time them, or just to see whether they run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.overrides import get_testing_overrides

from . import archive
from .archive import ArchiveError
from .devices import accelerator_type, set_rng_state
from .opcall import Tensor, map_tensors, tensors_in
from .traits import factories, name_of, traits_of


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of replaying one captured call."""

    folder: Path
    op: str
    ran: bool
    error: str = ""


def function_of(name: str) -> Callable[..., Any]:
    """The operator of this name; only PyTorch's own operators are looked up, whatever a file says.

    >>> function_of("torch.add") is torch.add
    True
    """
    known = _known_functions()
    if name in known:
        return known[name]
    last = name.rsplit(".", 1)[-1]
    if name == f"torch.{last}" and last.startswith("_foreach_") and hasattr(torch, last):
        return getattr(torch, last)
    raise ArchiveError(f"{name!r} is no operator of PyTorch {torch.__version__}: it cannot be replayed")


_by_name: dict[str, Callable[..., Any]] = {}


def _known_functions() -> dict[str, Callable[..., Any]]:
    if not _by_name:
        for function in get_testing_overrides():
            name = name_of(function)
            # no getters, nothing that reads or writes files
            if not name.endswith(("__get__", "__set__", "__delete__", "from_file", "__reduce_ex__", "__setstate__")):
                _by_name[name] = function
        for name in factories() - {"torch.from_file"}:
            factory = getattr(torch, name.rsplit(".", 1)[-1], None)
            if factory is not None:
                _by_name[name] = factory
    return _by_name


class CapturedOp:
    """One captured call, loaded from its folder.

    >>> op = CapturedOp(Path("op_tools_results/op_capture_results/torch.add/1/1/t"), "cpu")  # doctest: +SKIP
    >>> op.run_forward()                                                                     # doctest: +SKIP
    """

    def __init__(self, folder: Path, device: str | None = None) -> None:
        self.folder = folder
        with torch._C.DisableTorchFunction():  # tools watch the operator, not its preparation
            self.device = torch.device(device or accelerator_type())
            payload = archive.load(folder / "input.pth")
        self.name = str(payload.get("name") or "")
        self.function = function_of(self.name)
        missing = archive.unknown_in((payload["args"], payload["kwargs"]))
        if missing:
            raise ArchiveError(f"{folder}: arguments of type {', '.join(missing)} were not captured")
        self._payload = payload
        self._writes = (
            traits_of(self.function).mutates or "out" in payload["kwargs"] or bool(payload["kwargs"].get("inplace"))
        )
        self.result: Any = None
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self._inputs: list[Tensor] = []

    @property
    def has_backward(self) -> bool:
        """Whether gradients were captured as well."""
        return (self.folder / "grad_outputs.pth").exists()

    def prepare(self) -> None:
        """Fresh arguments on the device, of the captured layout, sharing memory where they did."""
        moved: dict[int, Tensor] = {}
        self._inputs = []

        def to_device(tensor: Tensor) -> Tensor:
            key = tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)
            with torch.no_grad():
                placed = _place(tensor, key, moved, self.device)
            placed.requires_grad_(tensor.requires_grad)
            self._inputs.append(placed)
            # an operator that writes to its argument needs one that is not a leaf
            return placed.clone() if placed.requires_grad and self._writes else placed

        with torch._C.DisableTorchFunction():
            self.args = map_tensors(self._payload["args"], to_device)
            kwargs = map_tensors(self._payload["kwargs"], to_device)
        self.kwargs = {k: self.device if isinstance(v, torch.device) else v for k, v in kwargs.items()}
        self.args = tuple(self.device if isinstance(a, torch.device) else a for a in self.args)
        self._restore_rng()

    def _restore_rng(self) -> None:
        rng = self._payload.get("rng")
        if not rng:
            return
        if rng.get("cpu") is not None:
            torch.set_rng_state(rng["cpu"])
        if rng.get("device") is not None and str(rng.get("type", "")).split(":")[0] == self.device.type:
            set_rng_state(self.device, rng["device"])

    def run_forward(self) -> Any:
        """Run the operator as it was called."""
        with self._state():
            self.result = self.function(*self.args, **self.kwargs)
        return self.result

    @contextlib.contextmanager
    def _state(self) -> Iterator[None]:
        autocast = self._payload.get("autocast")
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(bool(self._payload.get("grad_enabled", True))))
            if autocast:
                dtype = getattr(torch, str(autocast["dtype"]).removeprefix("torch."))
                stack.enter_context(torch.autocast(self.device.type, dtype=dtype))
            yield

    def run_backward(self) -> list[Tensor | None] | None:
        """Run the backward pass with the captured gradients; None when there is none."""
        outputs = list(tensors_in(self.result))
        if not any(t.requires_grad for t in outputs) or not any(t.requires_grad for t in self._inputs):
            return None
        with torch._C.DisableTorchFunction():
            grads: list[Tensor | None]
            if self.has_backward:
                captured = archive.load(self.folder / "grad_outputs.pth")["grad_outputs"]
                grads = [g.to(self.device) if g is not None else None for g in captured]
            else:
                grads = [torch.ones_like(t) if t.is_floating_point() else None for t in outputs]
        pairs = [(t, g) for t, g in zip(outputs, grads) if t.requires_grad and g is not None]
        wanted = [t for t in self._inputs if t.requires_grad]
        if not pairs:
            return None
        found = iter(
            torch.autograd.grad(
                [t for t, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True, retain_graph=True
            )
        )
        return [next(found) if t.requires_grad else None for t in self._inputs]


def _place(tensor: Tensor, key: int, moved: dict[int, Tensor], device: torch.device) -> Tensor:
    """The tensor on the device with the same strides and offset, in storage shared as it was captured."""
    if tensor.layout != torch.strided:
        return tensor.to(device)
    flat = moved.get(key)
    if flat is None:
        source = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        flat = moved[key] = source.to(device) if device.type != "cpu" else source.clone()
    placed = torch.empty(0, dtype=tensor.dtype, device=device)
    placed.set_(flat.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_conj():
        placed = torch._conj(placed)
    return torch._neg_view(placed) if tensor.is_neg() else placed


def replay(
    folder: Path,
    device: str | None = None,
    run_times: int = 1,
    forward: bool = True,
    backward: bool = True,
) -> Outcome:
    """Load and run one captured call `run_times` times (`replay(folder, "cuda").ran`)."""
    try:
        op = CapturedOp(folder, device)
    except (ArchiveError, OSError, KeyError) as error:
        return Outcome(folder, "", False, str(error))
    try:
        for _ in range(run_times):
            op.prepare()
            op.run_forward()
            if backward:
                op.run_backward()
    except Exception as error:
        text = str(error).strip().splitlines()
        return Outcome(folder, op.name, False, f"{type(error).__name__}: {text[0] if text else ''}")
    return Outcome(folder, op.name, True)
