"""Descriptions of arguments: labels, containers, values that look alike."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from op_tools.call.description import Descriptions, TensorMeta, describe, labelled, map_tensors, tensors_in


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Box:
    inside: Any
    label: str = "box"


leaves = st.one_of(
    st.integers(-5, 5),
    st.none(),
    st.booleans(),
    st.text(max_size=3),
    st.builds(lambda n: torch.zeros(n), st.integers(0, 4)),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Point, inner, inner),
        st.builds(Box, inner),
    ),
    max_leaves=8,
)


@given(trees)
def test_every_tensor_is_described_and_labelled(tree: Any) -> None:
    described = describe((tree,))
    count = len(list(tensors_in(tree)))
    assert len(described.data_ptrs) == count
    rows = labelled(described, "inputs")
    assert sum(isinstance(part, TensorMeta) for _, part in rows) == count
    assert len({label for label, _ in rows}) == len(rows), "labels are unique"
    hash((described.args, described.kwargs))


@given(trees)
def test_mapping_keeps_the_containers(tree: Any) -> None:
    copy = map_tensors(tree, lambda t: t + 1)
    assert type(copy) is type(tree) or isinstance(tree, torch.Tensor)
    assert [t.shape for t in tensors_in(copy)] == [t.shape for t in tensors_in(tree)]
    for old, new in zip(tensors_in(tree), tensors_in(copy)):
        assert torch.equal(old + 1, new)


def test_labels_are_the_documented_ones() -> None:
    x = torch.zeros(2)
    labels = [label for label, _ in labelled(describe((x,), {"dim": -1}), "inputs")]
    assert labels == ["inputs", "inputs dim"]
    labels = [label for label, _ in labelled(describe((x, [1, 2], None), {"keepdim": True}), "inputs")]
    assert labels == ["inputs[0]", "inputs [1][0]", "inputs [1][1]", "inputs[2]", "inputs keepdim"]
    labels = [label for label, _ in labelled(describe(((x, x),)), "outputs")]
    assert labels == ["outputs [0][0]", "outputs [0][1]"]


def test_values_that_compare_equal_stay_apart() -> None:
    signatures = {describe((value,)).args for value in (1, 1.0, True)}
    assert len(signatures) == 3


def test_return_types_and_ordered_dicts_are_rebuilt() -> None:
    sorted_ = torch.sort(torch.tensor([2.0, 1.0]))
    copy = map_tensors(sorted_, lambda t: t)
    assert type(copy) is type(sorted_)
    ordered = collections.OrderedDict(a=torch.zeros(1))
    assert type(map_tensors(ordered, lambda t: t)) is collections.OrderedDict


def test_tensors_without_strides_are_described() -> None:
    sparse = torch.eye(3).to_sparse()
    (meta,) = describe((sparse,)).args
    assert isinstance(meta, TensorMeta)
    assert meta.stride is None
    assert meta.as_dict()["layout"] == "torch.sparse_coo"


def test_each_tensor_has_one_address() -> None:
    sparse, dense = torch.eye(2).to_sparse(), torch.ones(2)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert describe((sparse, sparse, dense)).data_ptrs == (0, 0, dense.data_ptr())
    assert describe((nested, dense)).data_ptrs == (nested.data_ptr(), dense.data_ptr())


# -- descriptions of calls that look alike -------------------------------------------------------------

_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 3),
        st.floats(allow_nan=True, width=16),
        st.sampled_from(["a", "b"]),
        st.sampled_from([torch.float32, torch.device("cpu"), torch.Size([1]), ...]),
        st.builds(
            lambda shape, dtype, grad: torch.zeros(shape, dtype=dtype, requires_grad=grad),
            st.lists(st.integers(0, 2), max_size=2),
            st.sampled_from([torch.float32, torch.float64]),
            st.booleans(),
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.lists(inner, max_size=2).map(tuple), st.dictionaries(st.just("k"), inner)
    ),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.lists(_values, max_size=3), st.dictionaries(st.sampled_from("xy"), _values)), max_size=4))
def test_a_cached_description_is_the_one_that_would_be_made(calls: list[Any]) -> None:
    seen = Descriptions()
    for args, kwargs in [*calls, *calls]:
        tensors: list[torch.Tensor] = []
        found = seen.of(tuple(args), kwargs, tensors, True)
        made = describe(tuple(args), kwargs)
        assert (found.args, found.kwargs, found.data_ptrs) == (made.args, made.kwargs, made.data_ptrs)
        assert [id(t) for t in tensors] == [id(t) for t in tensors_in((tuple(args), kwargs))]


def test_tensors_without_memory_have_address_zero() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        x = torch.ones(3)
    seen = Descriptions()
    tensors: list[torch.Tensor] = []
    found = seen.of((x, torch.ones(2)), {}, tensors, True)
    assert found.data_ptrs[0] == 0
    assert found.data_ptrs[1] == tensors[1].data_ptr()
    assert [part.shape for part in found.args] == [(3,), (2,)]
