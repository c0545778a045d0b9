"""Rows of comparisons: one declaration of their columns for sqlite, CSV, the console and other processes."""

from __future__ import annotations

import csv
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from op_tools.view import rows
from op_tools.view.rows import Row
from op_tools.view.store import Store, plain_cell

numbers = st.one_of(st.floats(0, 1e30), st.just(math.inf), st.just(math.nan))
any_row = st.builds(
    Row,
    st.just("torch.sort"),
    st.sampled_from(["output", "input", "grad_input"]),
    st.none() | st.integers(0, 99),
    st.booleans(),
    numbers,
    numbers,
    st.floats(0, 1),
    st.floats(0, 1),
    st.text('ab ;,"', max_size=9),
    cosine=st.just(math.nan) | st.floats(-1, 1).map(lambda x: x + 0.0),  # sqlite has no -0.0
    max_ulp=numbers,
    verdict=st.sampled_from([rows.RIGHT, rows.WRONG]),
    reason=st.text('ab,=-"', max_size=5),
    where=st.tuples(st.integers(0, 9)),
    bound=st.none(),
)


def test_names_and_labels() -> None:
    row = Row("torch.mul", "grad_input", 1, True, 0.0, 0.0, 0.0, 0.0, "")
    assert (row.name, row.label) == ("torch.mul grad_input[1]", "torch.mul grad[1]")
    row = row._replace(part="output", index=None)
    assert row.name == row.label == "torch.mul output"


@given(row=any_row)
@settings(deadline=None, max_examples=40)
def test_what_sqlite_gives_back_is_shown_as_the_row_is(tmp_path_factory: pytest.TempPathFactory, row: Row) -> None:
    store = Store(tmp_path_factory.mktemp("records") / "rows.sqlite")
    store.table("rows", rows.SQL).append(row.stored())
    (stored,) = store.tuples("SELECT * FROM rows")
    store.close()
    assert not any(isinstance(value, float) and math.isnan(value) for value in stored)
    assert rows.console_cells(stored) == row.cells()
    assert rows.csv_line(stored) == rows.csv_line(row.stored())


@given(row=any_row)
@settings(deadline=None, max_examples=40)
def test_cells_belong_to_their_headers(row: Row) -> None:
    cells = dict(zip(rows.CONSOLE, row.cells(), strict=True))
    assert (cells["name"].strip(), cells["allclose"]) == (row.label, str(row.allclose))
    assert (cells["verdict"], cells["error_info"]) == (row.verdict, row.error_info)
    assert cells["max_abs_diff"] == f"{row.max_abs_diff:.9f}"
    replayed = dict(zip(rows.CONSOLE, row.cells(replayed=True), strict=True))
    assert replayed["max_ulp"] == f"{row.max_ulp:.2f}"
    assert row.reason in replayed["error_info"]
    (line,) = csv.reader([rows.csv_line(row.stored())])
    files = dict(zip(rows.CSV, line, strict=True))
    assert files["reason"] == plain_cell(row.reason)
    assert files == {"name": row.label} | {
        name: plain_cell(column.show(value)) for (name, column), value in zip(rows.COLUMNS.items(), row.values)
    }
    worst = dict(zip(rows.REPLAY_CSV, row.replay_csv(), strict=True))
    assert (worst["worst"], worst["atol"]) == (row.name, row.atol)
    assert row.as_dict()["where"] == row.where


@given(row=any_row)
@settings(deadline=None, max_examples=40)
def test_other_processes_get_plain_tuples(row: Row) -> None:
    sent = pickle.loads(pickle.dumps(tuple(row)))
    assert type(sent) is tuple
    assert repr(Row._make(sent)) == repr(row)


def test_columns_are_those_of_the_documented_table() -> None:
    documented = ["name", "allclose", "max_abs_diff", "max_relative_diff", "atol", "rtol", "error_info"]
    assert rows.CONSOLE[:7] == documented
    assert rows.CONSOLE[7:] == ["cosine", "max_ulp", "verdict"]
    assert [*rows.CONSOLE, "reason"] == rows.CSV
