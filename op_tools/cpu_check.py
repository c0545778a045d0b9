"""The CPU's answer to a call, on private copies of its arguments, and the comparison by fixed tolerances."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from . import settings
from .opcall import Tensor, children, map_tensors, tensors_in
from .snapshot import Staged, Unpacker, rebuild, stage
from .traits import OpTraits

_UPCAST: Final = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
_VARIABLE: Final = "OP_DTYPE_CAST_DICT"
_UNDEFINED: Final = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")


class NotComparable(Exception):
    """There is no golden result for this call; the message says why."""


class Inputs(NamedTuple):
    """The arguments of a call as they were before it ran, with the state it ran under."""

    staged: Staged
    grad_enabled: bool

    def on_host(self, unpacker: Unpacker) -> Inputs:
        """The same with its copies in host memory: device memory is not held for a backward to come."""
        staged = self.staged
        return Inputs(staged._replace(storages=tuple(unpacker.fetch(staged)), event=None), self.grad_enabled)

    def values(self) -> Any:
        """The arguments as CPU tensors of the original dtypes."""
        return rebuild(self.staged.tree, self.staged.storages)


class Golden(NamedTuple):
    """A finished reference run."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: tuple[Tensor | None, ...]  # of the tensors among the arguments, those that take gradients
    result: Any
    cast: dict[torch.dtype, torch.dtype]

    def backward(self, grad_outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the inputs for these gradients of the outputs (`golden.backward([g])`)."""
        outputs, grads = [], []
        for tensor, grad in zip(tensors_in(self.result), grad_outputs):
            if grad is not None and tensor.requires_grad:
                outputs.append(tensor)
                grads.append(grad.detach().cpu().to(tensor.dtype))
        wanted = [leaf for leaf in self.leaves if leaf is not None]
        if not outputs or not wanted:
            return [None] * len(self.leaves)
        found = iter(torch.autograd.grad(outputs, wanted, grads, allow_unused=True, retain_graph=True))
        return [next(found) if leaf is not None else None for leaf in self.leaves]


def cast_map(op: str) -> dict[torch.dtype, torch.dtype]:
    """Dtypes of the reference run: float64 unless the environment says otherwise (`cast_map("torch.add")`)."""
    variable = f"{settings.op_prefix(op)}_{_VARIABLE}"
    text = settings.read(variable)
    if not text:
        variable, text = _VARIABLE, settings.read(_VARIABLE)
    return settings.parse_dtype_map(text, variable) if text else dict(_UPCAST)


def why_not(traits: OpTraits, kwargs: Mapping[str, Any]) -> str | None:
    """Why a call has no golden result, or None when it has one."""
    if traits.collective:
        return "a collective needs all ranks"
    if traits.name.rsplit(".", 1)[-1] in _UNDEFINED:
        return "its result is uninitialised memory"
    if traits.random and not _is_quiet_random(kwargs):
        return "it draws random numbers"
    return None


def _is_quiet_random(kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("training") is False or kwargs.get("dropout_p") == 0.0 or kwargs.get("p") == 0.0


def take_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], grad_enabled: bool) -> Inputs:
    """Copy the arguments before the operator may write to them (`take_inputs(args, kwargs, True)`)."""
    return Inputs(stage((args, kwargs)), grad_enabled)


def run(
    function: Callable[..., Any],
    inputs: Inputs,
    cast: Mapping[torch.dtype, torch.dtype],
    mutates: bool,
) -> Golden:
    """Run `function` on the CPU with the arguments, which are on the host, in the dtypes of `cast`."""
    staged = inputs.staged
    if staged.opaque:
        raise NotComparable(f"arguments of type {', '.join(staged.opaque)} cannot be copied")
    storages = [s.clone() for s in staged.storages] if mutates else staged.storages
    with torch.no_grad():
        raw = rebuild(staged.tree, storages, cast)
    applied = _applied(staged, cast)
    leaves: list[Tensor | None] = []
    seen: dict[int, Tensor] = {}

    def private(tensor: Tensor) -> Tensor:
        takes = tensor.requires_grad and inputs.grad_enabled
        leaves.append(tensor if takes else None)
        # an operator may write to a copy of a leaf, not to the leaf itself
        if takes and mutates:
            return seen.setdefault(id(tensor), tensor.clone())
        return tensor

    # Hooks of the user's (checkpointing counts what is saved under them) must not see the golden run.
    unhooked = torch.autograd.graph.saved_tensors_hooks(_as_is, _as_is)
    with unhooked, torch.set_grad_enabled(inputs.grad_enabled), torch.autocast("cpu", enabled=False):
        args, kwargs = map_tensors(raw, private)
        kwargs = {k: torch.device("cpu") if k == "device" and v is not None else v for k, v in kwargs.items()}
        args = tuple(torch.device("cpu") if isinstance(a, torch.device) else a for a in args)
        result = function(*args, **kwargs)
    return Golden(args, kwargs, tuple(leaves), result, applied)


def _as_is(tensor: Tensor) -> Tensor:
    return tensor


def _applied(staged: Staged, cast: Mapping[torch.dtype, torch.dtype]) -> dict[torch.dtype, torch.dtype]:
    from .snapshot import Ref, map_leaves

    found: dict[torch.dtype, torch.dtype] = {}

    def look(leaf: Any) -> Any:
        if isinstance(leaf, Ref) and leaf.dtype in cast:
            found[leaf.dtype] = cast[leaf.dtype]
        return leaf

    map_leaves(staged.tree, look)
    return found


# (atol, rtol) where nothing is set
_DEFAULTS: Final[dict[torch.dtype, tuple[float, float]]] = {
    torch.float16: (1e-4, 1e-4),
    torch.bfloat16: (1e-3, 1e-3),
    torch.float32: (1e-5, 1e-5),
    torch.float64: (1e-8, 1e-8),
    torch.complex64: (1e-5, 1e-5),
    torch.complex128: (1e-8, 1e-8),
}
_OTHER: Final = (1e-3, 1e-3)
_NUMBERS: Final = (1e-6, 1e-6)
_TOLERANCE: Final = "AUTOCOMPARE_ERROR_TOLERANCE"


class Comparison(NamedTuple):
    """One row of a comparison table."""

    name: str
    allclose: bool
    max_abs_diff: float
    max_relative_diff: float
    atol: float
    rtol: float
    error_info: str


class Tolerances:
    """Tolerances by dtype and operator, from the environment where it says something.

    >>> Tolerances().for_dtype("torch.add", torch.float32)
    (1e-05, 1e-05)
    """

    def __init__(self) -> None:
        self._set: dict[str, tuple[float, float]] = {}
        for variable, text in os.environ.items():
            if _TOLERANCE in variable and text.strip():
                self._set[variable] = settings.parse_tolerance(text, variable)

    def for_dtype(self, op: str, dtype: torch.dtype) -> tuple[float, float]:
        """`<OP>_..._<DTYPE>`, `..._<DTYPE>`, `<OP>_...`, `...`, in this order, then the defaults."""
        kind = str(dtype).removeprefix("torch.").upper()
        prefix = settings.op_prefix(op)
        for variable in (
            f"{prefix}_{_TOLERANCE}_{kind}",
            f"{_TOLERANCE}_{kind}",
            f"{prefix}_{_TOLERANCE}",
            _TOLERANCE,
        ):
            if variable in self._set:
                return self._set[variable]
        return _DEFAULTS.get(dtype, _OTHER)

    @staticmethod
    def for_numbers() -> tuple[float, float]:
        """Tolerances of Python numbers."""
        return _NUMBERS


def compare(op: str, name: str, device: Any, golden: Any, tolerances: Tolerances) -> list[Comparison]:
    """Compare a device's value with the golden one, leaf by leaf (`compare(op, "output", y, y64, t)`)."""
    left, right = _leaves(device), _leaves(golden)
    if len(left) != len(right):
        text = f"Inconsistent number of results: {len(left)} {len(right)}"
        return [Comparison(f"{op} {name}", False, math.nan, math.nan, 0.0, 0.0, text)]
    several = len(left) > 1
    return [
        _compare_leaf(op, f"{op} {name}[{i}]" if several else f"{op} {name}", a, b, tolerances)
        for i, (a, b) in enumerate(zip(left, right))
    ]


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (Tensor, str)):
        return [value]
    parts = children(value)
    if parts is None:
        return [value]
    return [leaf for member in parts[1] for leaf in _leaves(member)]


def _compare_leaf(op: str, name: str, device: Any, golden: Any, tolerances: Tolerances) -> Comparison:
    if isinstance(device, Tensor) and isinstance(golden, Tensor):
        atol, rtol = tolerances.for_dtype(op, device.dtype)
        return _compare_tensors(name, device, golden, atol, rtol)
    if isinstance(device, (int, float, complex)) and isinstance(golden, (int, float, complex)):
        return _compare_numbers(name, device, golden)
    same = _same(device, golden)
    return Comparison(name, same, 0.0, 0.0, 0.0, 0.0, "" if same else f"Inconsistent values: {device} {golden}")


def _same(device: Any, golden: Any) -> bool:
    if isinstance(device, torch.device) and isinstance(golden, torch.device):
        return True
    try:
        return bool(device == golden)
    except Exception:
        return device is golden


def _compare_numbers(name: str, device: complex, golden: complex) -> Comparison:
    atol, rtol = Tolerances.for_numbers()
    if device != device and golden != golden:
        return Comparison(name, True, 0.0, 0.0, atol, rtol, "")
    difference = 0.0 if device == golden else abs(device - golden)
    relative = difference / (abs(golden) + 1e-12)
    return Comparison(name, difference <= atol + rtol * abs(golden), difference, relative, atol, rtol, "")


def _compare_tensors(name: str, device: Tensor, golden: Tensor, atol: float, rtol: float) -> Comparison:
    info = "" if device.dtype == golden.dtype else f"Inconsistent dtypes: {device.dtype} {golden.dtype}"
    if device.shape != golden.shape:
        info = f"Inconsistent shapes: {tuple(device.shape)} {tuple(golden.shape)}"
        return Comparison(name, False, math.nan, math.nan, atol, rtol, info)
    if device.layout != torch.strided:
        device, golden = device.to_dense(), golden.to_dense()
    if device.numel() == 0:
        return Comparison(name, True, 0.0, 0.0, atol, rtol, info)
    # The golden result as the device's dtype would hold it: its rounding is no error of the device.
    left, right = _wide(device), _wide(golden.to(device.dtype))
    both_bad = (left == right) | (left.isnan() & right.isnan())
    difference = torch.where(both_bad, torch.zeros_like(left.abs()), (left - right).abs())
    close = bool(torch.all(both_bad | (difference <= atol + rtol * right.abs())))
    largest = float(difference.max())
    relative = torch.where(difference == 0, difference, difference / (right.abs() + 1e-12))
    return Comparison(name, close, largest, float(relative.max()), atol, rtol, info)


def _wide(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def all_right(rows: Sequence[Comparison]) -> bool:
    """Whether every row is close (`all_right(rows)`)."""
    return all(row.allclose for row in rows)
