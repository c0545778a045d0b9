"""Random whole numbers, and zeros and ones: what must hold for whatever `randint`, `bernoulli` and others draw.

Some values are impossible in any draw. Of the others sums are kept over the calls of a run, each with a bound of the
probability that a correct device gets so far from its expected sum: small calls tell together.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from ..call.description import Tensor
from ..call.operators.registry import last_name

_IMPROBABLE_EVER: Final = 30.0  # minus the logarithm of a probability, for sums that are looked at after every call


class Excess(NamedTuple):
    """How far a sum of independent draws is from what is expected of it, and how far it usually gets."""

    key: Hashable
    what: str  # as in "the mean of the values"
    off: float
    variance: float
    spread: float  # no draw is further from its mean
    number: int  # of draws

    def __add__(self, other: Any) -> Excess:
        """Both sums in one."""
        more = other.off, other.variance, other.number
        off, variance, number = (a + b for a, b in zip((self.off, self.variance, self.number), more))
        return self._replace(off=off, variance=variance, number=number)

    @property
    def improbability(self) -> float:
        """Minus the logarithm of Bernstein's bound of the probability of such a sum."""
        below = 2 * (self.variance + abs(self.off) * self.spread / 3)
        return self.off**2 / below if self.off else 0.0


Sums = dict[Hashable, Excess]


def knows(name: str) -> bool:
    """Whether there is a rule for a sampler (`knows("torch.randint")`)."""
    return last_name(name) in _RULES


def judge(name: str, source: Any, drawn: Tensor, sums: Sums) -> str | None:
    """What is wrong with a draw, "" if nothing is; None where nothing is known of it. `sums` are of the run so far.

    >>> source = Source(torch.randperm, "torch.randperm", traits, (3,), {})  # doctest: +SKIP
    >>> judge("torch.randperm", source, torch.tensor([2, 0, 2]), {})  # doctest: +SKIP
    'not a permutation of 0 to 2'
    """
    last = last_name(name)
    rule = _RULES.get(last)
    found = None if rule is None else rule(last, source.args, source.kwargs, drawn.detach())
    return found if found is None or isinstance(found, str) else add_up((name,), found, sums)


def add_up(of: tuple[Any, ...], found: Sequence[Excess], sums: Sums) -> str:
    """Add what one draw of a kind has too much to the sums of a run; what is wrong with these, "" if nothing is."""
    for excess in found:
        key = (*of, excess.key)
        total = excess + sums[key] if key in sums else excess
        sums[key] = total
        if total.improbability > _IMPROBABLE_EVER:
            del sums[key]
            away = total.off / total.number
            return f"{total.what} of {total.number} values is off by {away:.3g}, too far to be chance"
    return ""


def improbability_of_again(name: str, source: Any, count: int) -> float:
    """Minus the logarithm of the probability that a draw of so many comes again, for each of them; 0: not known."""
    last = last_name(name)
    if last == "randperm":
        return math.lgamma(count + 1) / max(1, count)
    low, high = _limits(source.args, source.kwargs) if last.startswith("rand") else (0, 0)
    return math.log(high - low) if high > low else 0.0


Found = str | Sequence[Excess] | None


def _zeros_and_ones(last: str, args: Sequence[Any], named: Mapping[str, Any], drawn: Tensor) -> Found:
    given = args[1] if len(args) > 1 else named.get("p")
    if given is None:
        given = 0.5 if last == "bernoulli_" else (args[0] if args else named.get("input"))
    if not isinstance(given, (int, float, Tensor)):
        return None
    values = drawn.double()
    p = torch.as_tensor(given).double().expand(drawn.shape)
    if not bool(((values == 0) | (values == 1)).all()):
        return "values other than 0 and 1"
    if bool(((p == 0) & (values != 0)).any()) or bool(((p == 1) & (values != 1)).any()):
        return "an impossible value: its probability is 0"
    variance = float((p * (1 - p)).sum())
    return [Excess("ones", "the share of ones", float((values - p).sum()), variance, 1.0, drawn.numel())]


def _limits(args: Sequence[Any], named: Mapping[str, Any]) -> tuple[int, int]:
    """The smallest number, and one more than the largest; the same twice where they are not given."""
    numbers = [a for a in args if isinstance(a, int) and not isinstance(a, bool)]
    high = named.get("high", named.get("to"))
    if high is None:
        high = numbers.pop() if numbers else None
    low = named.get("low", named.get("from", numbers[0] if numbers else 0))
    return (low, high) if isinstance(low, int) and isinstance(high, int) else (0, 0)


def _whole_numbers(last: str, args: Sequence[Any], named: Mapping[str, Any], drawn: Tensor) -> Found:
    low, high = _limits(args, named)
    if high <= low or not drawn.numel():
        return None
    if drawn.is_floating_point() and high - low > 1 / torch.finfo(drawn.dtype).eps:
        return None  # rounded to a neighbour
    values = drawn.double()
    for value in (float(values.min()), float(values.max())):
        if not low <= value < high or value != int(value):
            return f"{value:g} is not a whole number from {low} to {high - 1}"
    if high - low == 1:
        return ""
    # on a scale from 0 to 1
    count, possible, place = drawn.numel(), high - low, (values - low) / (high - 1 - low)
    usual = (possible + 1) / (12 * (possible - 1))  # variance of one
    square = (place - 0.5).square() - usual
    key = (last, low, high)
    return [
        Excess((*key, 1), "the mean, in ranges,", float((place - 0.5).sum()), count * usual, 0.5, count),
        Excess(
            (*key, 2), "the variance, as a share of the squared range,", float(square.sum()), count / 60, 0.25, count
        ),
    ]


def _order(last: str, args: Sequence[Any], named: Mapping[str, Any], drawn: Tensor) -> Found:
    whole = drawn.reshape(-1).sort().values
    right = torch.equal(whole.long(), torch.arange(drawn.numel()))
    return "" if right else f"not a permutation of 0 to {drawn.numel() - 1}"


def _categories(last: str, args: Sequence[Any], named: Mapping[str, Any], drawn: Tensor) -> Found:
    given = [*args, *(None,) * (3 - len(args))]
    weights = named.get("input", given[0])
    again = bool(named.get("replacement", given[2]))
    if not isinstance(weights, Tensor) or not drawn.numel() or not bool(weights.isfinite().all()):
        return None
    weights = weights.detach().double()
    if bool(((drawn < 0) | (drawn >= weights.shape[-1])).any()):
        return f"an index that is not from 0 to {weights.shape[-1] - 1}"
    if bool((weights.gather(-1, drawn) <= 0).any()):
        return "an impossible category: its probability is 0"
    if not again and drawn.shape[-1] > 1 and bool((drawn.sort(-1).values.diff(dim=-1) == 0).any()):
        return "a category twice, though without replacement"
    first = drawn if again else drawn[..., :1]  # those after the first depend on it
    share, top = (weights / weights.sum(-1, keepdim=True)).max(-1, keepdim=True)
    share = share.expand(first.shape)
    off = float(((first == top).double() - share).sum())
    what = "the share of the most probable category"
    return [Excess("top", what, off, float((share * (1 - share)).sum()), 1.0, first.numel())]


_RULES: Final = {
    **dict.fromkeys(("bernoulli", "bernoulli_"), _zeros_and_ones),
    **dict.fromkeys(("randint", "randint_like", "random_"), _whole_numbers),
    "randperm": _order,
    "multinomial": _categories,
}
