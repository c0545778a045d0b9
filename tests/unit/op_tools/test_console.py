"""Tables are laid out as documented."""

from __future__ import annotations

import io

import pytest
import torch

from op_tools.call.description import describe
from op_tools.view import console

DOCUMENTED = """\
+---------------------------------+------------------+
|               name              |      shape       |
+---------------------------------+------------------+
|    torch.Tensor.mul inputs[0]   |     (2048,)      |
|     torch.Tensor.mul outputs    | (1, 16384, 2048) |
| torch.Tensor.mul inputs(cpu)[0] |     (2048,)      |
|  torch.Tensor.mul outputs(cpu)  | (1, 16384, 2048) |
+---------------------------------+------------------+"""


def test_cells_are_centred_as_in_the_documents() -> None:
    rows = [
        ["torch.Tensor.mul inputs[0]", "(2048,)"],
        ["torch.Tensor.mul outputs", "(1, 16384, 2048)"],
        ["torch.Tensor.mul inputs(cpu)[0]", "(2048,)"],
        ["torch.Tensor.mul outputs(cpu)", "(1, 16384, 2048)"],
    ]
    assert console.table(["name", "shape"], rows) == DOCUMENTED


def test_a_cached_table_is_the_same_as_a_fresh_one() -> None:
    cache = console.TableCache()
    for _ in range(3):
        inputs, outputs = describe((torch.zeros(2, 3), 2.5), {"alpha": 1}), describe((torch.zeros(2, 3),))
        rows = console.call_rows(inputs, outputs)
        pointers = inputs.data_ptrs + outputs.data_ptrs
        cached = cache.render("key", "torch.add", lambda rows=rows: rows, pointers)
        assert cached == console.tensor_table("torch.add", rows, pointers)
    assert len(cache._templates) <= 2


def test_addresses_of_another_width_get_a_table_of_their_own() -> None:
    cache = console.TableCache()
    inputs = describe((torch.zeros(2),))
    rows = console.call_rows(inputs, describe((None,)))
    for pointer in (7, 1234567890123):
        assert cache.render("k", "op", lambda: rows, [pointer]) == console.tensor_table("op", rows, [pointer])


def test_a_closed_output_does_not_raise(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    import io
    import sys

    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    console.emit("text")
    assert closed.closed


def test_a_console_that_is_not_there_or_shows_little_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    console.emit("nobody reads this")
    console.print_error("nor this")
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))
    console.emit("层 \udce4 ok")
    assert shown.getvalue() == b"\\u5c42 \\udce4 ok\n"
