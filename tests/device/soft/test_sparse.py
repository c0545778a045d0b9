"""Sparse tensors on soft: the CPU's results, on the device, in every layout."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ditorch.soft.faults import plant

pytestmark = pytest.mark.filterwarnings("ignore")
LAYOUTS = {
    "coo": lambda x: x.to_sparse(),
    "hybrid": lambda x: x.to_sparse(1),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "bsc": lambda x: x.to_sparse_bsc((2, 2)),
}


def matrix(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(4, 6, generator=generator)
    return (dense * (torch.rand(4, 6, generator=generator) < 0.4)).to(dtype)


def check(soft: Any, cpu: Any) -> None:
    """The same values in the same layout, on the other device."""
    if not isinstance(cpu, torch.Tensor):
        assert soft == cpu
        return
    assert soft.device.type == "soft"
    assert (soft.layout, soft.shape, soft.dtype) == (cpu.layout, cpu.shape, cpu.dtype)
    if cpu.layout == torch.sparse_coo:
        assert soft.is_coalesced() == cpu.is_coalesced()
        assert torch.equal(soft._indices().cpu(), cpu._indices())
    assert torch.equal(soft.cpu().to_dense(), cpu.to_dense())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back(layout: str) -> None:
    cpu = LAYOUTS[layout](matrix())
    check(cpu.to("soft"), cpu)
    check(LAYOUTS[layout](matrix().to("soft")), cpu)
    file = io.BytesIO()
    torch.save(cpu.to("soft"), file)
    file.seek(0)
    check(torch.load(file), cpu)
    assert "soft" in repr(cpu.to("soft"))


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "mm": lambda s: torch.sparse.mm(s, torch.eye(6, device=s.device)),
    "spgemm": lambda s: torch.sparse.mm(s, s.t()),
    "addmm": lambda s: torch.sparse.addmm(torch.ones(4, 6, device=s.device), s, torch.eye(6, device=s.device)),
    "coalesce": lambda s: torch.cat([s, s]).coalesce(),
    "indices": lambda s: s.coalesce().indices(),
    "add": lambda s: s + s * 3,
    "add_": lambda s: s.clone().add_(s),
    "zero_": lambda s: s.clone().zero_(),
    "copy_": lambda s: torch.empty(4, 6, layout=torch.sparse_coo, device=s.device).copy_(s),
    "sum": lambda s: torch.sparse.sum(s, dim=1),
    "softmax": lambda s: torch.sparse.softmax(s, 1),
    "select": lambda s: s[1],
    "index_select": lambda s: s.index_select(0, torch.tensor([2, 0], device=s.device)),
    "beside dense": lambda s: torch.ones(4, 6, device=s.device) + s,
    "into dense": lambda s: torch.ones(4, 6, device=s.device).add_(s),
    "resize": lambda s: s.clone().sparse_resize_((5, 6), 2, 0),
    "dtype": lambda s: s.to(torch.float64),
    "zeros_like": lambda s: torch.zeros_like(s),
    "nnz": lambda s: s._nnz(),
    "mask": lambda s: torch.ones(4, 6, device=s.device).sparse_mask(s),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_give_what_they_give_on_the_cpu(name: str) -> None:
    cpu = matrix().to_sparse()
    check(CALLS[name](cpu.to("soft")), CALLS[name](cpu))


@given(st.integers(0, 9), st.sampled_from(list(LAYOUTS)), st.sampled_from([torch.float32, torch.float64, torch.int64]))
@settings(max_examples=25, deadline=None)
def test_any_layout_and_dtype(seed: int, layout: str, dtype: torch.dtype) -> None:
    cpu = LAYOUTS[layout](matrix(seed, dtype))
    check(cpu.to("soft"), cpu)
    assert torch.equal(cpu.to("soft").to_dense().cpu(), cpu.to_dense())
    check(cpu.to("soft").clone(), cpu)


def test_gradients() -> None:
    for reduce in ("sum", "mean", "amax", None):
        found = []
        for device in ("soft", "cpu"):
            a = matrix().to_sparse_csr().to(device).requires_grad_()
            if reduce is None:
                a = matrix().to_sparse().to(device).requires_grad_()
            b = (torch.arange(12.0).reshape(6, 2) / 7).to(device).requires_grad_()
            (torch.sparse.mm(a, b, reduce) if reduce else torch.sparse.mm(a, b)).square().sum().backward()
            found.append((a.grad, b.grad))
        for soft, cpu in zip(*found):
            check(soft, cpu)


@pytest.mark.parametrize("make", [torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_embeddings_train_as_on_the_cpu(make: Any) -> None:
    weights = []
    for device in ("soft", "cpu"):
        layer = torch.nn.Embedding(5, 2, sparse=True, _weight=torch.arange(10.0).reshape(5, 2)).to(device)
        optimizer = make(layer.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.tensor([3, 1, 3], device=device)).square().sum().backward()
            optimizer.step()
        assert layer.weight.grad is not None
        assert layer.weight.grad.is_sparse
        weights.append(layer.weight.detach().cpu())
    assert torch.equal(*weights)


def test_a_tensor_of_the_cpu_beside_a_sparse_one_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.sparse.mm(matrix().to_sparse().to("soft"), torch.eye(6))


def test_a_fault_beside_sparse_tensors_leaves_them_alone() -> None:
    with plant("_to_sparse:zero"):
        made = matrix().to("soft").to_sparse()
    assert made.shape == (4, 6)
