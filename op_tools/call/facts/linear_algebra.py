"""Operators that factor matrices, and vectors of unit length among their results, whose sign (or phase) is free."""

from __future__ import annotations

from typing import Any

import torch

from ..registry import CPU, FUNCTIONS, KERNELS, FunctionFacts, KernelFacts, Kind, last_name

Tensor = torch.Tensor

KERNELS.register("linalg_*", KernelFacts(Kind.MATRIX, accuracy=2))
KERNELS.register(
    """
    cholesky cholesky_inverse cholesky_solve det geqrf inverse linalg_check_errors logdet lu_solve lu_unpack
    lu_with_info matrix_power orgqr ormqr pinverse qr slogdet svd triangular_solve
    """,
    KernelFacts(Kind.MATRIX),
)
KERNELS.register("histc", KernelFacts(Kind.MATRIX, low_on=CPU))

FUNCTIONS.register("eigh eig", FunctionFacts(free_vectors=((1, -2),)))
FUNCTIONS.register("svd", FunctionFacts(free_vectors=((0, -2), (2, -1))))


def turned(name: str, number: int, device: Any, golden: Any) -> Any:
    """The golden vectors with the signs that the device chose, where signs are free (`torch.linalg.eigh`)."""
    phase = _phase(name, number, device, golden)
    return golden if phase is None else golden * phase


def gradient_turned(name: str, number: int, device: Any, golden: Any, grad: Tensor) -> Tensor:
    """What came back to a result of the device, for the golden result, whose vectors may have other signs."""
    phase = _phase(name, number, device, golden)
    return grad if phase is None else grad * phase.conj()


def has_free_vectors(name: str) -> bool:
    """Whether a function returns vectors whose signs are free (`has_free_vectors("torch.linalg.svd")`)."""
    facts = FUNCTIONS.by_name.get(last_name(name))
    return facts is not None and bool(facts.free_vectors)


def _phase(name: str, number: int, device: Any, golden: Any) -> Tensor | None:
    """The factor that turns the golden vectors into the device's; None where no sign is free."""
    last = last_name(name)
    facts = FUNCTIONS.by_name.get(last)
    if facts is None or not facts.free_vectors:
        return None
    along = dict(facts.free_vectors).get(number)
    if along is None or not isinstance(device, Tensor) or device.shape != golden.shape or device.dim() < 2:
        return None
    if last == "svd" and number == 2 and ".linalg." not in name:
        along = -2  # torch.svd returns V, torch.linalg.svd its conjugate transpose
    exact = golden.detach()
    product = (exact.conj() * device.detach().to(exact.dtype)).sum(along, keepdim=True)
    return torch.where(product.abs() > 0, product.sgn(), torch.ones_like(product))
