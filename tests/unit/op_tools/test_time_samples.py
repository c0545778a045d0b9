"""The times of an operator: exact sums, and a bounded sample for the percentiles."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from op_tools.tools.time_measure import _MAX_SAMPLES, _Samples


@given(st.lists(st.integers(0, 9_000), min_size=1, max_size=6))
@settings(deadline=None, max_examples=30)
def test_any_parts_give_the_same_sample(sizes: list[int]) -> None:
    at_once, parts = _Samples(), _Samples()
    values = [float(n) for n in range(sum(sizes))]
    at_once.extend(values)
    start = 0
    for size in sizes:
        parts.extend(values[start : start + size])
        start += size
    assert (parts.count, parts.total) == (at_once.count, at_once.total) == (len(values), sum(values))
    assert len(parts.values) < _MAX_SAMPLES
    for samples in (at_once, parts):
        assert len(values) < _MAX_SAMPLES // 4 or len(samples.values) >= _MAX_SAMPLES // 4
        assert samples.values.tolist() == values[:: samples._stride]
        assert samples.percentile(0.5) == pytest.approx(len(values) / 2, abs=2 * samples._stride)
