"""The hot path in machine code and its twin in Python say the same."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from op_tools.call import description, site
from op_tools.native import front
from op_tools.watch.intercept import INTERCEPTOR, Interceptor

COMPILED = front.LIBRARY.wait()
pytestmark = pytest.mark.skipif(COMPILED is None, reason=f"not compiled here {front.LIBRARY.failure}")


def _in_python(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
    key: list[Any] = []
    for value in args:
        if not description._add_to_key(value, key, tensors):
            return None
    for name, value in kwargs.items():
        key.append(name)
        if not description._add_to_key(value, key, tensors):
            return None
    return tuple(key)


leaves = st.one_of(
    st.integers(-3, 3),
    st.booleans(),
    st.none(),
    st.floats(width=16),
    st.sampled_from(["a", "b", torch.float32, torch.int64, torch.strided, torch.preserve_format, ..., b"x", 1j]),
    st.sampled_from([torch.device("cpu"), torch.Size([2]), slice(1, 2), slice(None, 0.5), {1: 2}, {3}, print]),
    st.tuples(
        st.lists(st.integers(0, 3), max_size=3), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16])
    ).map(lambda x: torch.zeros(x[0], dtype=x[2]).requires_grad_(x[1])),
    st.sampled_from([torch.zeros(2, 3).t(), torch.zeros(1).expand(4), torch.nn.Parameter(torch.zeros(2))]),
    st.sampled_from([torch.zeros(2).to_sparse(), torch.zeros(3, dtype=torch.complex64)]),
)
values = st.recursive(
    leaves, lambda inner: st.one_of(st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple))
)
calls = st.tuples(st.lists(values, max_size=4).map(tuple), st.dictionaries(st.sampled_from("xyz"), values, max_size=2))


def _outcome(of: Any, call: Any) -> tuple[Any, list[int]]:
    tensors: list[torch.Tensor] = []
    try:
        return of(*call, tensors), [id(t) for t in tensors]
    except Exception as error:
        return type(error), []


@given(calls, calls)
def test_arguments_have_the_same_keys(one: Any, other: Any) -> None:
    plain, quick = (_outcome(of, one) for of in (_in_python, COMPILED.key_of))
    assert (plain[0] is None, isinstance(plain[0], tuple)) == (quick[0] is None, isinstance(quick[0], tuple))
    if isinstance(plain[0], tuple):
        assert plain[1] == quick[1]
        same = plain[0] == _outcome(_in_python, other)[0]
        assert same == (quick[0] == _outcome(COMPILED.key_of, other)[0])


@given(calls)
def test_a_key_is_described_as_its_arguments_are(call: Any) -> None:
    """Both twins' keys have a tensor's parts and all others in places that descriptions count on."""
    for of in (_in_python, COMPILED.key_of):
        key = _outcome(of, call)[0]
        if isinstance(key, tuple):
            expected = description.describe(*call)._replace(data_ptrs=())
            for _ in range(2):  # the second time its tensors have been seen
                assert description._described_by(key, *call) == expected


def test_many_arguments() -> None:
    tensors: list[torch.Tensor] = []
    many = [torch.zeros(n % 7) for n in range(500)]
    key = COMPILED.key_of((many, 1), {"out": None}, tensors)
    assert (len(tensors), len(key)) == (500, 2 + 6 * 500 + 2 + 3)


def test_bad_arguments_of_the_library_are_refused() -> None:
    for wrong in ((), ([], {}, []), ((), [], []), ((), {}, ())):
        with pytest.raises(TypeError):
            COMPILED.key_of(*wrong)


def test_the_place_of_a_call_is_the_same() -> None:
    places = [(_python_site(), COMPILED.call_site()) for _ in range(3)]  # one line
    assert len({place for pair in places for place in pair}) == 1
    assert "test_front.py" in places[0][0]
    assert places[0][0].endswith("# one line")
    assert COMPILED.call_site() != places[0][1]


def _python_site() -> str:
    frame = sys._getframe(1)
    return site.text_of(frame.f_code, frame.f_lineno)


def test_the_place_of_a_call_below_other_code() -> None:
    class Layer(torch.nn.Module):
        def forward(self) -> tuple[str, ...]:
            return (COMPILED.call_site(),)

    assert " forward: return" in Layer()()[0]
    assert "test_front.py" in functools.wraps(print)(lambda: COMPILED.call_site())()


def test_a_mode_lets_pass_and_watches() -> None:
    seen: list[Any] = []

    def watch(plan: Any, function: Any, args: Any, kwargs: Any) -> Any:
        seen.append((plan, args, kwargs))
        return function(*args, **kwargs)

    mode = Interceptor()
    vars(mode)["__torch_function__"] = COMPILED.bound_to(mode)
    plans: dict[Any, Any] = {}

    def make(function: Any) -> Any:
        plans[function] = "plan" if function is torch.add else None
        return plans[function]

    x = torch.ones(2)
    try:
        COMPILED.set_plans(plans, make, watch, ())
        with mode:
            torch.add(x, x, alpha=2)
            torch.mul(x, x)
            assert x.shape == (2,)
            with pytest.raises(RuntimeError):
                torch.add(x, torch.ones(3))
        assert [(plan, kwargs) for plan, _, kwargs in seen] == [("plan", {"alpha": 2}), ("plan", {})]
        COMPILED.set_plans(None, make, watch, ())
        with mode:
            torch.add(x, x)
        assert len(seen) == 2
    finally:
        INTERCEPTOR._start_plans(INTERCEPTOR._plans)
    with pytest.raises(TypeError):
        vars(mode)["__torch_function__"]()
