"""Pictures of wrong results: which elements, and by how many rounding bounds."""

from __future__ import annotations

import json

import pytest
import torch

from op_tools.compare.wrong_elements import picture, source_around


def test_errors_are_counted_in_bounds() -> None:
    golden = torch.ones(1000, dtype=torch.float64)
    device = golden.float()
    device[:10] += 0.5
    found = picture(device, golden, torch.full((1000,), 0.1, dtype=torch.float64))
    assert found is not None
    assert (found.unit, found.elements, found.wrong, found.nan) == ("bound", 1000, 10, 0)
    assert sum(found.counts) == 1000
    place = next(n for n, count in enumerate(found.counts) if count == 10)
    assert found.edges[place] <= 5.0 < found.edges[place + 1]
    assert 1.0 in found.edges
    assert len(found.edges) == len(found.counts) + 1


def test_the_map_keeps_rows_and_the_tail() -> None:
    golden = torch.zeros(100, 130, dtype=torch.float64)
    device = golden.clone()
    device[99] = 1.0  # the tail
    device[:, 0] = 1.0
    found = picture(device, golden, 1e-6)
    assert found is not None
    assert found.rows <= 24
    assert found.columns <= 64
    cells = torch.tensor(found.cells).reshape(found.rows, found.columns)
    assert (cells[-1] > 0.15).all()
    assert (cells[:, 0] > 0).all()
    assert (cells[:-1, 1:] == 0).all()


@pytest.mark.parametrize("shape", [(), (1,), (1000,), (3, 5, 7), (200, 1), (1, 300), (2, 70000)])
def test_any_shape_has_a_small_map(shape: tuple[int, ...]) -> None:
    golden = torch.zeros(shape, dtype=torch.float64)
    found = picture(golden + 1, golden, 0.5)
    assert found is not None
    assert len(found.cells) == found.rows * found.columns <= 24 * 64
    assert all(cell == 1.0 for cell in found.cells) or 0.0 in found.cells  # the rest of the last line of a vector
    assert len(found.as_json()) < 40_000


def test_nan_is_wrong_where_it_should_not_be_and_infinities_agree() -> None:
    nan, inf = float("nan"), float("inf")
    found = picture(torch.tensor([nan, nan, inf, 1.0]), torch.tensor([nan, 1.0, inf, 1.0], dtype=torch.float64), None)
    assert found is not None
    assert (found.wrong, found.nan, found.unit) == (1, 1, "ulp")


def test_whole_numbers_and_complex_ones() -> None:
    found = picture(torch.tensor([1, 2, 9]), torch.tensor([1, 2, 3]), None)
    assert found is not None
    assert (found.wrong, found.unit) == (1, "half")
    found = picture(torch.tensor([1 + 1j]), torch.tensor([1 + 2j], dtype=torch.complex128), 0.1)
    assert found is not None
    assert found.wrong == 1


def test_what_cannot_be_compared_has_no_picture() -> None:
    assert picture(torch.ones(2), torch.ones(3), 1.0) is None
    assert picture(torch.ones(0), torch.ones(0), 1.0) is None


def test_lines_around_a_call_are_kept() -> None:
    found = json.loads(source_around(f"{__file__}:3 f: x"))
    assert found["line"] == 3
    assert [3, "from __future__ import annotations"] in found["lines"]
    assert source_around("<stdin>:3 f: x") == ""
    assert source_around("nowhere") == ""
