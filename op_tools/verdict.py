"""The rule that says whether a result is right: tolerances, comparisons and their rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from . import settings
from .opcall import Tensor, children

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
_VARIABLE: Final = "AUTOCOMPARE_ERROR_TOLERANCE"


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
        import os

        self._set: dict[str, tuple[float, float]] = {}
        for variable, text in os.environ.items():
            if _VARIABLE in variable and text.strip():
                self._set[variable] = settings.parse_tolerance(text, variable)

    def for_dtype(self, op: str, dtype: torch.dtype) -> tuple[float, float]:
        """`<OP>_..._<DTYPE>`, `..._<DTYPE>`, `<OP>_...`, `...`, in this order, then the defaults."""
        kind = str(dtype).removeprefix("torch.").upper()
        prefix = settings.op_prefix(op)
        for variable in (
            f"{prefix}_{_VARIABLE}_{kind}",
            f"{_VARIABLE}_{kind}",
            f"{prefix}_{_VARIABLE}",
            _VARIABLE,
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
    if isinstance(value, Tensor) or isinstance(value, str):
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
