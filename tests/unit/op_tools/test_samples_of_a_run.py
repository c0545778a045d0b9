"""Random numbers of a whole run: what each call by itself does not show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from op_tools.judge.random_draws import Tally

Draw = Callable[[int], torch.Tensor]


def first_wrong(draw: Draw, law: tuple[object, ...], calls: int = 120, count: int = 1000) -> str:
    """What is said of the first call that is called wrong."""
    tally = Tally()
    for call in range(calls):
        states = (str(call).encode(), str(call + 1).encode())
        wrong = tally.samples("torch.sampler", draw(count), law, states)
        if wrong:
            return wrong
    return ""


@pytest.mark.parametrize(
    ("draw", "law", "said"),
    [
        (lambda n: torch.randn(n) * 1.03, ("normal", 0.0, 1.0), "the spread among normal numbers"),
        (lambda n: torch.randn(n) + 0.04, ("normal", 0.0, 1.0), "the mean place among normal numbers"),
        (lambda n: torch.empty(n).exponential_(2.1), ("exponential", 2.0), "place among exponential numbers"),
        (lambda n: torch.rand(n) * 0.95, ("uniform", 0.0, 1.0), "is above 0.9"),
        (lambda n: torch.randn(n).clamp(-1.5, 9), ("normal", 0.0, 1.0), "is below -1.5"),
        (lambda n: torch.cat([torch.randn(n - 1), torch.tensor([12.0])]), ("normal", 0.0, 1.0), "a value 12 standard"),
    ],
)
def test_what_is_off_by_little_is_found_in_the_run(draw: Draw, law: tuple[object, ...], said: str) -> None:
    torch.manual_seed(0)
    assert said in first_wrong(draw, law)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_right_samples_are_no_alarm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert first_wrong(lambda n: torch.empty(n, dtype=dtype).normal_(), ("normal", 0.0, 1.0), count=2000) == ""
    assert first_wrong(lambda n: torch.empty(n, dtype=dtype).uniform_(), ("uniform", 0.0, 1.0), count=2000) == ""
    assert first_wrong(lambda n: torch.empty(n, dtype=dtype).exponential_(), ("exponential", 1.0), count=2000) == ""


@pytest.mark.parametrize("states", [(b"seed 0", b"later"), None])
def test_a_draw_that_comes_again_is_counted_once(states: tuple[bytes, bytes] | None) -> None:
    torch.manual_seed(3)
    tally, values = Tally(), torch.randn(300) + 0.1
    assert not any(tally.samples("torch.randn", values, ("normal", 0.0, 1.0), states) for _ in range(300))
