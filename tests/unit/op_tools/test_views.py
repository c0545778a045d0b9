"""Calls that run no kernel: what says that a result is a view, and which one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from op_tools.call.traits import traits_of
from op_tools.compare.judges.views import Views, places
from op_tools.compare.ladder import Job
from op_tools.copies.invocation import Invocation, Region, Site
from op_tools.copies.operands import stage
from op_tools.judge.verdict import NOT_COMPARABLE, RIGHT, Judgement

SETUP: Any = None  # which learning needs nothing of

VIEWS: dict[str, Any] = {
    "transpose": lambda x: x.transpose(0, -1),
    "select": lambda x: x[-1],
    "slice": lambda x: x[..., 1:],
    "unsqueeze": lambda x: x.unsqueeze(0),
    "expand": lambda x: x.expand(2, *x.shape),
    "detach": torch.Tensor.detach,
    "flip dims": lambda x: x.permute(*reversed(range(x.dim()))),
    "itself": lambda x: x,
}


@given(
    name=st.sampled_from(sorted(VIEWS)),
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    start=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
)
def test_a_view_is_found_where_it_lies(name: str, shape: list[int], start: int, dtype: torch.dtype) -> None:
    count = torch.Size(shape).numel()
    x = torch.arange(count + start).to(dtype)[start:].view(shape)
    view = VIEWS[name](x)
    assert places([torch.ones(3), x], [view]) is None, "the other one may have a say in it"
    found = places([x], [view])
    assert found is not None
    ((index, distance, conj, neg),) = found
    assert (index, conj, neg) == (0, False, False)
    assert view.numel() or not distance
    offset = x.storage_offset() + distance // x.element_size()
    assert torch.equal(x.as_strided(view.shape, view.stride(), offset), view)


@pytest.mark.parametrize(
    ("given_", "results"),
    [
        ([], [torch.ones(2)]),
        ([torch.ones(2)], []),
        ([torch.ones(2)], [torch.ones(2)]),
        ([torch.empty(0)], [torch.empty(0)]),
        ([torch.ones(2).to_sparse()], [torch.ones(2)]),
        ([torch.ones(2, device="meta")], [torch.ones(2, device="meta")]),
    ],
    ids=["nothing given", "no result", "new memory", "no memory", "sparse", "meta"],
)
def test_what_is_no_view(given_: list[torch.Tensor], results: list[torch.Tensor]) -> None:
    assert places(given_, results) is None


def test_one_result_in_new_memory_makes_it_a_computation() -> None:
    x = torch.ones(4)
    assert places([x], [x[1:], x[2:]]) == ((0, 4, False, False), (0, 8, False, False))
    assert places([x], [x[1:], x + 1]) is None


def test_bits_that_change_the_meaning_count() -> None:
    x = torch.ones(2, dtype=torch.complex64)
    assert places([x], [x.conj()]) != places([x], [x])
    assert places([x.conj()], [x.conj()]) == places([x], [x])
    assert places([x], [torch._neg_view(x)]) != places([x], [x])


def test_only_what_was_right_is_learned() -> None:
    views, x = Views(SETUP), torch.ones(3, requires_grad=True)
    staged = stage(((x,), {}))
    call = Invocation(1, "torch.detach", torch.detach, traits_of(torch.detach), Site(), Region("cuda"), (1, 2))
    job = Job(call, "forward", before=staged, places=places([x], [x.detach()]), moves_only=True)
    job.judgement = Judgement(NOT_COMPARABLE, "random")
    views.learn(job)
    assert not views.known
    job.judgement = Judgement(RIGHT, "")
    views.learn(job)
    (known,) = views.known.values()
    again = known.arguments()
    assert [s.tolist() for s in again.storages] == [[0] * 12]
    assert again.tree == staged.tree
