"""Random calls: no two runs agree, so what a device drew is found out first, and then judged by what must hold.

A dropout shows its mask in its result: with that mask, forward and backward are compared like any other call. Masks and
samples must follow their distribution and must not repeat; a `Tally` adds up what small calls show. Limits are set so
that a correct device exceeds one of them about once in ten billion calls.
"""

from __future__ import annotations

import collections
import math
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, NamedTuple

import torch

from ..call.description import Tensor
from ..call.operators.registry import function_facts, last_name
from . import whole_draws
from .draws import Draw, law_of

_MIN_VALUES: Final = 256  # fewer say nothing about a distribution
_SIGMAS: Final = 6.5
_KOLMOGOROV_FACTOR: Final = 3.5  # 2 exp(-2 c²) is about 5e-11
_IMPROBABLE: Final = 24.0  # minus the logarithm of a probability: 4e-11
_IMPROBABLE_EVER: Final = 30.0  # the same for sums that are looked at after every call
_MAX_KINDS: Final = 4_000
_RECENT: Final = 8  # masks of one kind that later ones are compared with
_SAMPLE: Final = 4_096  # elements of each
_MAX_MET: Final = 1 << 18  # states of the generator that are remembered
_NEGLIGIBLE: Final = 1e-4  # a share by which a distribution may be off, however many values there are
_ALPHA: Final = 1.7580993408473766  # minus what `selu` tends to

States = tuple[bytes, bytes]  # of the device's generator, before and after a call


class Mask(NamedTuple):
    """What a dropout kept, told by its result."""

    kept: Tensor  # one for each number drawn: for each element or channel
    known: Tensor  # where the result tells
    keeps: float  # the probability
    zeroed: Tensor  # elements that are not finite, and zero in the result: NaN is as good there

    @property
    def draw(self) -> Draw:
        """The same as a draw."""
        return Draw(self.kept, ("bernoulli", self.keeps))

    def clean(self, outputs: Tensor) -> None:
        """Make the elements of a golden result zero that are NaN there, and zero on the device, by multiplication."""
        if bool(self.zeroed.any()):
            outputs.masked_fill_(self.zeroed, 0)

    @property
    def complete(self) -> bool:
        """Whether the result tells everywhere."""
        return bool(self.known.all())

    def packed(self) -> Mask:
        """The same in less memory, for the backward."""
        nowhere = torch.zeros((), dtype=torch.bool)
        return self._replace(known=(~nowhere).expand(self.kept.shape) if self.complete else self.known, zeroed=nowhere)

    def completed(self, gradient: Tensor | None) -> Mask:
        """The same where the result does not tell, by the gradient of the input (`mask.completed(x.grad)`)."""
        if gradient is None or self.complete:
            return self
        passed = (gradient.detach() != 0).reshape(self.kept.numel(), -1).any(1).reshape(self.kept.shape)
        return self._replace(kept=torch.where(self.known, self.kept, passed))


def is_dropout(name: str) -> bool:
    """Whether the result of a function shows what it dropped (`is_dropout("torch.nn.functional.dropout")`)."""
    return function_facts(name).law.endswith("dropout")


def recover(name: str, args: Sequence[Any], kwargs: dict[str, Any], outputs: Any) -> Mask | None:
    """The mask of a dropout, from its arguments before the call and its result; None where it drops nothing."""
    law = function_facts(name).law
    if not law.endswith("dropout"):
        return None
    given = [*args[:3], *[None] * (3 - len(args))]
    x = kwargs.get("input", given[0])
    p = kwargs.get("p", 0.5) if given[1] is None else given[1]
    training = kwargs.get("training", kwargs.get("train", True)) if given[2] is None else given[2]
    if not isinstance(x, Tensor) or not isinstance(outputs, Tensor) or not x.is_floating_point() or not x.numel():
        return None
    if x.shape != outputs.shape or x.dtype != outputs.dtype or not training or not 0 < p < 1:
        return None
    before, after = x.detach(), outputs.detach()
    finite = before.isfinite()
    if "alpha" in law:
        scale = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
        if_dropped = _ALPHA * scale * (p - 1)
        if_kept = before.double() * scale + _ALPHA * scale * p
        kept = (after.double() - if_kept).abs() <= (after.double() - if_dropped).abs()
        known = finite & ((if_kept - if_dropped).abs() > 0.05 * abs(if_dropped))
        zeroed = torch.zeros_like(finite)
    else:
        kept = (after != 0) & ~(before.isinf() & after.isnan())  # infinity times zero
        known = finite & (before.abs() >= torch.finfo(x.dtype).smallest_normal)
        zeroed = (after == 0) & ~finite
    if "channel" in law:
        alone = last_name(name) in ("dropout1d", "dropout3d") and x.dim() % 2 == 0  # without a dimension of samples
        channels = int(x.shape[0] if alone or x.dim() < 2 else x.shape[0] * x.shape[1])
        kept, known = (t.reshape(channels, -1) for t in (kept, known))
        kept, known = torch.where(known.any(1), (kept & known).any(1), kept.any(1)), known.any(1)
    return Mask(kept, known, 1 - float(p), zeroed)


class Tally:
    """What the draws of a run show together; several threads may ask at once.

    Each question returns what is wrong, "" if nothing is. Without an earlier call it is about that draw alone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Hashable, tuple[int, int]] = {}  # ones, and all
        self._recent: dict[Hashable, _Recent] = {}
        self._small: dict[Hashable, list[Tensor]] = {}
        self._sums: whole_draws.Sums = {}
        self._met: set[int] = set()  # states of the generator, each with what was drawn from it

    def _adds_up(self, name: str, values: Tensor, weight: float, states: States | None, number: int) -> bool:
        """Whether a draw may be added to earlier ones: not if a program set its generator back to draw it again."""
        if states is None:  # a generator that is not known: the values tell, if they can
            if values.numel() * weight < _IMPROBABLE:
                return False
            place = values[:_SAMPLE].numpy().tobytes()
        elif states[0] == states[1]:  # no program makes a device do that
            return True
        else:
            place = states[0]
        met = hash((name, place, number))
        with self._lock:
            if met in self._met:
                return False
            if len(self._met) >= _MAX_MET:
                self._met.clear()
            self._met.add(met)
        return True

    def mask(self, name: str, mask: Mask, states: States | None = None, number: int = 0) -> str:
        """A mask, the number `number` of its call: its proportion, and whether it came before."""
        kept, known = mask.kept.reshape(-1), mask.known.reshape(-1)
        count, ones = int(known.sum()), int((kept & known).sum())
        key = (name, mask.keeps)
        if not count:
            return ""
        if _improbability(ones, count, mask.keeps) > _IMPROBABLE:
            return f"{1 - ones / count:.4f} of the values are dropped instead of {1 - mask.keeps:g}"
        wrong, all_ones, all_count = False, 0, 0
        weight = -math.log(mask.keeps**2 + (1 - mask.keeps) ** 2)  # improbability of an element that comes again
        if self._adds_up(name, kept, weight, states, number):
            with self._lock:
                before = self._counts.get(key, (0, 0))
                all_ones, all_count = before[0] + ones, before[1] + count
                wrong = _improbability(all_ones, all_count, mask.keeps) > _IMPROBABLE_EVER
                if key in self._counts or len(self._counts) < _MAX_KINDS:
                    self._counts[key] = (0, 0) if wrong else (all_ones, all_count)
        if wrong:
            share = f"{1 - all_ones / all_count:.4f} of {all_count} values"
            return f"in all calls so far {share} are dropped instead of {1 - mask.keeps:g}"
        return self._repeats((*key, kept.numel()), kept[:_SAMPLE], known[:_SAMPLE], weight, states, number)

    def samples(self, name: str, values: Tensor, law: tuple[Any, ...], states: States | None = None) -> str:
        """Samples of a known distribution: whether they can be from it, and whether they came before."""
        dtype = values.dtype
        flat = values.detach().double().reshape(-1)
        adds_up = self._adds_up(name, flat, 4.0, states, 0)
        if flat.numel() >= _MIN_VALUES:
            wrong = _not_from(flat, law, dtype) or (self._drifts((name, dtype), flat, law) if adds_up else "")
        else:
            wrong = _out_of_range(flat, law, dtype)
            kept = self._collect((name, law, dtype), flat) if adds_up and not wrong else None
            wrong = wrong if kept is None else _not_from(kept, law, dtype)
        if wrong or not flat.numel():
            return wrong
        some = flat[:_SAMPLE]
        return self._repeats((name, law, flat.numel()), some, torch.ones_like(some, dtype=torch.bool), 4.0, states, 0)

    def whole(self, name: str, source: Any, values: Tensor, states: States | None = None) -> str | None:
        """Random whole numbers, or zeros and ones; None where nothing is known of them."""
        if not whole_draws.knows(name):
            return None
        weight = whole_draws.improbability_of_again(name, source, values.numel())
        adds_up = self._adds_up(name, values.detach().double().reshape(-1), weight, states, 0)
        with self._lock:
            sums = self._sums if adds_up and len(self._sums) < _MAX_KINDS else {}
            wrong = whole_draws.judge(name, source, values, sums)
        if wrong != "" or weight <= 0:
            return wrong
        some = values.reshape(-1)[:_SAMPLE]
        key = (name, values.numel(), weight)
        return self._repeats(key, some, torch.ones_like(some, dtype=torch.bool), weight, states, 0)

    def draw(self, name: str, draw: Draw, states: States | None, number: int) -> str:
        """A draw that was noted inside a call (`tally.draw("torch.lstm", draw, states, 0)`)."""
        if draw.law[:1] == ("bernoulli",) and draw.values.dtype == torch.bool:
            everywhere = torch.ones_like(draw.values)
            return self.mask(name, Mask(draw.values, everywhere, draw.law[1], everywhere), states, number)
        return self.samples(f"{name} {number}", draw.values, draw.law, states) if draw.law else ""

    def _drifts(self, key: tuple[Any, ...], values: Tensor, law: tuple[Any, ...]) -> str:
        """Whether all samples of a run are off together; each call by itself was right."""
        found = _places(values, law)
        if found is None:
            return ""
        with self._lock:
            sums = self._sums if len(self._sums) < _MAX_KINDS else {}
            return whole_draws.add_up(key, _drift(found, key[-1], law[0]), sums)

    def _collect(self, key: Hashable, values: Tensor) -> Tensor | None:
        """All samples of small calls since they were last looked at, once they are enough."""
        with self._lock:
            if key not in self._small and len(self._small) >= _MAX_KINDS:
                return None
            kept = self._small.setdefault(key, [])
            kept.append(values.clone())
            if sum([v.numel() for v in kept]) < _MIN_VALUES:
                return None
            return torch.cat(self._small.pop(key))

    def _repeats(
        self, key: Hashable, values: Tensor, known: Tensor, weight: float, states: States | None, number: int
    ) -> str:
        """Whether a draw came before though the generator had another state; `weight`: improbability per element."""
        if states is None:  # activation checkpointing draws the same numbers again on purpose
            return ""
        with self._lock:
            if key not in self._recent and len(self._recent) >= _MAX_KINDS:
                return ""
            recent = self._recent.setdefault(key, _Recent())
            again = False
            for earlier, was_known, place in recent.draws:
                if place == (states[0], number) and states[0] != states[1]:
                    return ""  # the generator was set back
                both = known & was_known
                count = int(both.sum())
                if count and torch.equal(values[both], earlier[both]):
                    recent.improbability += max(0.0, count * weight - math.log(_RECENT))
                    again = True
                    break
            if not again:
                recent.improbability = 0.0
            recent.draws.append((values.clone(), known.clone(), (states[0], number)))
            if recent.improbability < _IMPROBABLE:
                return ""
            stuck = "; the call does not change the state of the generator" if states[0] == states[1] else ""
            return f"the same random numbers as in an earlier call{stuck}"


class _Recent:
    """The last draws of one kind."""

    def __init__(self) -> None:
        self.draws: collections.deque[tuple[Tensor, Tensor, Hashable]] = collections.deque(maxlen=_RECENT)
        self.improbability = 0.0  # of the repetitions so far, one after the other


def _improbability(ones: int, count: int, p: float) -> float:
    """Minus the logarithm of a bound of the probability that ones are as far from their expected number as these."""
    q = ones / count
    parts = ((q, p), (1 - q, 1 - p))
    return count * sum([a * math.log(a / b) for a, b in parts if a > 0]) if 0 < p < 1 else 0.0


# --- samples -----------------------------------------------------------------------------------------------------


def judge_samples(
    name: str, source: Any, outputs: Any, tally: Tally | None = None, states: States | None = None
) -> tuple[bool, str] | None:
    """Whether the samples that a function drew can be right, and if not, why; None where no rule applies."""
    if function_facts(name).law != "samples" or not isinstance(outputs, Tensor):
        return None
    if any(isinstance(value, torch.Generator) for value in (*source.args, *source.kwargs.values())):
        states = None  # they are those of another generator
    whole = (tally or Tally()).whole(name, source, outputs, states)
    if whole is not None:
        return not whole, whole
    if not outputs.is_floating_point():
        return None
    law = law_of(last_name(name), source.args, source.kwargs)
    if not law or law[0] == "bernoulli":
        return _as_on_cpu(source, outputs)
    if tally is None and outputs.numel() < _MIN_VALUES:
        return None
    wrong = (tally or Tally()).samples(name, outputs, law, states)
    return not wrong, wrong


def _out_of_range(values: Tensor, law: tuple[Any, ...], dtype: torch.dtype) -> str:
    if bool(values.isnan().any()):
        return "NaN among the values drawn"
    if law[0] != "uniform":
        return ""
    low, high = law[1:]
    slack = torch.finfo(dtype).eps * max(abs(low), abs(high))
    worst = next((v for v in (float(values.min()), float(values.max())) if not low - slack <= v <= high + slack), None)
    return "" if worst is None else f"{worst:.9g} is not between {low:g} and {high:g}"


def _not_from(values: Tensor, law: tuple[Any, ...], dtype: torch.dtype) -> str:
    """Why these values cannot be samples of a distribution, rounded to a dtype; "" if they can."""
    wrong = _out_of_range(values, law, dtype)
    if wrong:
        return wrong
    kind, a, b = (*law, 0.0)[:3]
    # kernels for a half type may draw in it: a few hundred different values, some of them far too often
    count, grid = values.numel(), 2 * torch.finfo(dtype).eps
    middle, deviation = ((a + b) / 2, (b - a) / math.sqrt(12)) if kind == "uniform" else (a, b)
    if kind in ("normal", "uniform") and deviation > 0:
        mean = float(values.mean())
        grain = grid * (deviation + abs(middle))
        if abs(mean - middle) > _SIGMAS * deviation / math.sqrt(count) + grain:
            return f"the mean of {count} values is {mean:.6g} instead of {middle:.6g}"
        found = float((values - middle).square().mean().sqrt())
        off = max(0.0, abs(found - deviation) - 2 * grain) / deviation
        ratio = (1 + math.copysign(min(off, 0.999), found - deviation)) ** 2 if off < 1 else (1 + off) ** 2
        if count / 2 * (ratio - 1 - math.log(ratio)) > _IMPROBABLE:
            return f"the standard deviation of {count} values is {found:.6g} instead of {deviation:.6g}"
    if kind == "exponential" and a > 0:
        mean = float(values.mean())
        ratio = max(mean * a, 1e-300)
        if count * (ratio - 1 - math.log(ratio)) > _IMPROBABLE + count * grid:
            return f"the mean of {count} values is {mean:.6g} instead of {1 / a:.6g}"
    cumulative = _CUMULATIVE.get(kind)
    if cumulative is None or (a if kind == "exponential" else deviation) <= 0:
        return ""
    wrong = _odd_ends(values, law, cumulative, grid)
    if wrong:
        return wrong
    points = values.sort().values.clamp(-1e30, 1e30)  # a half type may overflow
    width = points.abs() * grid
    ranks = torch.arange(count + 1, dtype=torch.float64) / count
    over = cumulative(points - width, a, b) - ranks[1:]
    under = ranks[:-1] - cumulative(points + width, a, b)
    distance, limit = float(torch.maximum(over, under).max()), _KOLMOGOROV_FACTOR / math.sqrt(count) + grid
    return "" if distance <= limit else _not_distributed(f"as {kind} numbers", distance, limit)


def _odd_ends(values: Tensor, law: tuple[Any, ...], cumulative: Callable[..., Tensor], grid: float) -> str:
    """Why the smallest and the largest of these values cannot be so near to the middle, or so far from it."""
    kind, a, b = (*law, 0.0)[:3]
    count = values.numel()
    ends = torch.stack([values.min(), values.max()])
    below, above = cumulative(ends, a, b).tolist()
    for place, share, side in ((0, below, "below"), (1, 1 - above, "above")):
        empty = min(max(share - grid - _NEGLIGIBLE, 0.0), 1 - 1e-12)
        if -count * math.log1p(-empty) > _IMPROBABLE:
            return f"none of {count} values is {side} {float(ends[place]):.6g}, where {share:.3g} of them should be"
    if kind == "normal":
        farthest = float(((ends - a) / b).abs().max()) / (1 + grid)
        if -float(torch.special.log_ndtr(torch.tensor(-farthest).double())) - math.log(2 * count) > _IMPROBABLE:
            return f"a value {farthest:.3g} standard deviations from the mean, among {count}"
    return ""


def _places(values: Tensor, law: tuple[Any, ...]) -> Tensor | None:
    """The share of the distribution below each value: these are uniform from 0 to 1, whatever the law."""
    kind, a, b = (*law, 0.0)[:3]
    cumulative = _CUMULATIVE.get(kind)
    scale = {"uniform": b - a, "exponential": a}.get(kind, b)
    return None if cumulative is None or scale <= 0 else cumulative(values.clamp(-1e30, 1e30), a, b)


def _drift(places: Tensor, dtype: torch.dtype, kind: str) -> list[whole_draws.Excess]:
    """How far the mean and the variance of places are off, beyond what the grid of a dtype does to them."""
    count, slack = places.numel(), 2 * torch.finfo(dtype).eps + _NEGLIGIBLE
    middle = places - 0.5
    off, square = float(middle.sum()), float((middle.square() - 1 / 12).sum())
    off, square = (math.copysign(max(0.0, abs(v) - count * slack), v) for v in (off, square))
    return [
        whole_draws.Excess((kind, 1), f"the mean place among {kind} numbers", off, count / 12, 0.5, count),
        whole_draws.Excess((kind, 2), f"the spread among {kind} numbers", square, count / 180, 0.25, count),
    ]


def _not_distributed(how: str, distance: float, limit: float) -> str:
    return f"the values are not distributed {how}: distance {distance:.3f}, at most {limit:.3f}"


def _normal(x: Tensor, mean: float, deviation: float) -> Tensor:
    found: Tensor = torch.special.ndtr((x - mean) / deviation)
    return found


_CUMULATIVE: Final[dict[str, Callable[[Tensor, float, float], Tensor]]] = {
    "normal": _normal,
    "uniform": lambda x, low, high: ((x - low) / (high - low)).clamp(0, 1),
    "exponential": lambda x, rate, _: -torch.expm1(-rate * x.clamp(min=0)),
    "log normal": lambda x, mean, deviation: _normal(x.clamp(min=1e-300).log(), mean, deviation),
    "cauchy": lambda x, middle, scale: ((x - middle) / scale).atan() / math.pi + 0.5,
}


def _as_on_cpu(source: Any, outputs: Tensor) -> tuple[bool, str] | None:
    """The same for other distributions, by samples that the CPU draws."""
    values = outputs.detach().double().reshape(-1)
    drawn = _draw_on_cpu(source) if values.numel() >= _MIN_VALUES else None
    if drawn is None or drawn.numel() != values.numel():
        return None
    if bool(values.isnan().any()) and not bool(drawn.isnan().any()):
        return False, "NaN among the values drawn"
    distance = _kolmogorov_smirnov(values, drawn)
    limit = _KOLMOGOROV_FACTOR * math.sqrt(2 / values.numel()) + 2 * torch.finfo(outputs.dtype).eps
    return (True, "") if distance <= limit else (False, _not_distributed("as on the CPU", distance, limit))


def _draw_on_cpu(source: Any) -> Tensor | None:
    """The same call on the CPU with a generator of its own: those of the program stay untouched."""
    kwargs = {k: v for k, v in source.kwargs.items() if k not in ("device", "generator", "out", "pin_memory")}
    args = tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in source.args)
    args = tuple(a for a in args if not isinstance(a, torch.Generator))
    try:
        with torch.no_grad():
            drawn: Tensor = source.function(*args, **kwargs, generator=torch.Generator().manual_seed(0))
        return drawn.detach().double().reshape(-1)
    except Exception:  # it takes no generator: there is nothing to compare with
        return None


def _kolmogorov_smirnov(a: Tensor, b: Tensor) -> float:
    """Largest distance between the two empirical distributions."""
    points = torch.cat([a, b]).sort().values
    below_a = torch.searchsorted(a.sort().values, points, right=True).double() / a.numel()
    below_b = torch.searchsorted(b.sort().values, points, right=True).double() / b.numel()
    return float((below_a - below_b).abs().max())
