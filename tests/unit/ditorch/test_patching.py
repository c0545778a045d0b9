"""The ledger: what it changes stays the same object, and comes back exactly."""

from __future__ import annotations

import functools
import inspect
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ditorch.patching import Ledger, Patch, copy_function


def plain(a: int, b: int = 2, *, c: int = 3) -> tuple[int, int, int]:
    """Three numbers."""
    return a, b, c


def make_closure(x: int, y: int):  # type: ignore[no-untyped-def]
    def closure(a: int) -> int:
        return a + x + y

    return closure


@functools.wraps(plain)
def decorated(*args: int, **kwargs: int) -> tuple[int, int, int]:
    return plain(*args, **kwargs)


def test_redirected_function_is_the_same_object_and_comes_back() -> None:
    ledger = Ledger()
    earlier, code = plain, plain.__code__
    ledger.redirect(plain, lambda original: lambda *a, **k: ("new", original(*a, **k)), "test")
    assert plain is earlier
    assert plain(1) == ("new", (1, 2, 3))
    assert str(inspect.signature(plain)) == "(a: 'int', b: 'int' = 2, *, c: 'int' = 3) -> 'tuple[int, int, int]'"
    assert plain.__doc__ == "Three numbers."
    ledger.undo_all()
    assert plain.__code__ is code
    assert plain(1, c=5) == (1, 2, 5)
    assert "__signature__" not in vars(plain)


def test_one_patch_is_taken_back_or_only_forgotten() -> None:
    owner = types.SimpleNamespace(__module__="home", __qualname__="owner", a=1, b=2)
    ledger = Ledger()
    ledger.replace(owner, "a", 10, "test")
    ledger.replace(owner, "b", 20, "test")
    ledger.undo("home.owner.a")
    ledger.undo("home.owner.a")
    assert (owner.a, owner.b) == (1, 20)
    assert "home.owner.a" not in ledger
    assert ledger.forget("home.owner.b") is not None
    ledger.undo_all()
    assert owner.b == 20
    ledger.replace(owner, "b", 30, "test")
    ledger.undo_all()
    assert owner.b == 20


def test_functions_with_closures_are_redirected() -> None:
    closure = make_closure(10, 20)
    ledger = Ledger()
    ledger.redirect(closure, lambda original: lambda a: original(a) * 2, "test")
    assert closure(1) == 62
    ledger.undo_all()
    assert closure(1) == 31


def test_decorated_functions_are_redirected() -> None:
    ledger = Ledger()
    ledger.redirect(decorated, lambda original: lambda *a, **k: original(*a, **k)[0], "test")
    assert decorated(7) == 7
    ledger.undo_all()
    assert decorated(7) == (7, 2, 3)


def test_replace_restores_identity_and_absence() -> None:
    owner = types.SimpleNamespace(value=(original := object()))

    class Base:
        inherited = 1

    class Child(Base):
        pass

    ledger = Ledger()
    owner.__module__, owner.__qualname__ = "here", "owner"
    ledger.replace(owner, "value", 1, "test")
    ledger.replace(Child, "inherited", 2, "test")
    assert (owner.value, Child.inherited) == (1, 2)
    ledger.undo_all()
    assert owner.value is original
    assert Child.inherited == 1
    assert "inherited" not in vars(Child)


def test_the_same_thing_is_not_patched_twice() -> None:
    ledger = Ledger()
    ledger.record(Patch("torch.x", "why"))
    with pytest.raises(ValueError, match=r"torch\.x is patched twice"):
        ledger.record(Patch("torch.x", "why"))


@given(st.dictionaries(st.text(max_size=3), st.integers()), st.text(max_size=3), st.integers())
def test_put_restores_any_table(table: dict[str, int], key: str, value: int) -> None:
    before = dict(table)
    ledger = Ledger()
    ledger.put(table, key, value, "entry", "test")
    assert table[key] == value
    ledger.undo_all()
    assert table == before


@given(st.integers(), st.integers(), st.integers())
def test_copied_function_does_the_same(a: int, b: int, c: int) -> None:
    assert copy_function(plain)(a, b, c=c) == plain(a, b, c=c)
    assert copy_function(make_closure(a, b))(c) == a + b + c


def test_undo_runs_backwards() -> None:
    order: list[int] = []
    ledger = Ledger()
    for number in range(3):
        ledger.record(Patch(str(number), "why", undo=functools.partial(order.append, number)))
    ledger.undo_all()
    assert order == [2, 1, 0]
    assert ledger.patches == []
