"""A result of the wrong shape, dtype or strides, or in memory of another, is a verdict, even with the right values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import ditorch
import op_tools


@contextmanager
def kernel(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Another kernel for an operator of the software accelerator."""
    if getattr(ditorch.backend, "name", "") != "soft":
        pytest.skip("only the software accelerator can be made to fail on purpose")
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl(name, function, "PrivateUse1", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def on_host(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().abs()


KERNELS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "alias": (lambda x: x, "it lies in the memory of an argument; it must have its own"),
    "dtype": (lambda x: on_host(x).double().to(x.device), "dtype torch.float64 instead of torch.float32"),
    "strides": (lambda x: on_host(x).t().contiguous().to(x.device).t(), "strides (1, 6) instead of (4, 1)"),
    "shape": (lambda x: on_host(x)[:5].to(x.device), "shape (5, 4) instead of (6, 4)"),
}


@pytest.mark.parametrize("which", KERNELS)
def test_it_is_named(device: str, which: str) -> None:
    function, reason = KERNELS[which]
    x = torch.rand(6, 4, device=device)
    with kernel("abs", function), op_tools.OpAutoCompare() as compared:
        for _ in range(3):
            torch.abs(x)
            torch.neg(x)
    assert {blame.op for blame in compared.blames} == {"torch.abs"}
    assert len(compared.blames) == 3
    assert reason in compared.blames[0].reason


def test_results_that_share_memory_are_named(device: str) -> None:
    """Both have the right value: what is written to one later changes the other."""
    x = torch.ones(6, 4, device=device)

    def both(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        found = x.cpu().amin().to(x.device)
        return found, found.view(())

    with kernel("aminmax", both), op_tools.OpAutoCompare() as compared:
        torch.aminmax(x)
    assert [blame.op for blame in compared.blames] == ["torch.aminmax"]
    assert "results 0 and 1 lie in the same memory" in compared.blames[0].reason


def test_a_result_whose_values_are_still_to_be_conjugated_is_named(device: str) -> None:
    z = torch.rand(6, 4, dtype=torch.complex64).to(device)
    lazy = kernel("exp", lambda z: z.cpu().exp().conj().resolve_conj().to(z.device).conj())
    with lazy, op_tools.OpAutoCompare() as compared:
        torch.exp(z)
    assert [blame.op for blame in compared.blames] == ["torch.exp"]
    assert "conjugate bit is set" in compared.blames[0].reason


def test_parts_of_one_tensor_and_lazy_conjugates_are_right(device: str) -> None:
    z = torch.rand(6, 4, dtype=torch.complex64).to(device)
    with op_tools.OpAutoCompare() as compared:
        torch.conj(z)
        torch.broadcast_tensors(z, z)
        torch.chunk(z.real, 2)
        torch.meshgrid(z[0], z[0], indexing="ij")
        torch.sort(z.real)
    assert not compared.blames


def test_views_in_place_results_and_autocast_are_right(device: str) -> None:
    x = torch.rand(6, 4, device=device)
    with op_tools.OpAutoCompare() as compared:
        for _ in range(2):
            torch.add(x.t(), 1, out=torch.empty(4, 6, device=device))
            x.view(-1)[3:].add_(1).reshape(3, 7).contiguous()
            x.to(torch.bfloat16).float().expand(2, 6, 4).clone()
            with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
                torch.mm(x, x.t())
    assert not compared.blames
