"""Random operators: no two runs agree, so their results are judged by what must hold for every draw.

Dropout must leave each value scaled or make it zero, in the right proportion; samplers must draw from the same
distribution as the CPU's. Thresholds are set so that a correct device fails about once in ten billion calls.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch

from ..call.description import Tensor
from ..call.operators.registry import FUNCTIONS, last_name
from .pair import first_place

_MIN_VALUES: Final = 256  # fewer say nothing about a distribution
_SIGMAS: Final = 6.5
_KOLMOGOROV_FACTOR: Final = 3.5  # 2 exp(-2 c²) is about 5e-11


def judge(name: str, source: Any, outputs: Any) -> tuple[bool, str] | None:
    """Whether a random result can be right, and if not, why; None where no rule applies."""
    facts = FUNCTIONS.by_name.get(last_name(name))
    if facts is None or not facts.law or not isinstance(outputs, Tensor) or not outputs.is_floating_point():
        return None
    if facts.law == "samples":
        return _sampled(source, outputs)
    return _dropout(source, outputs, whole_channels=facts.law == "channel dropout")


def _dropout(source: Any, outputs: Tensor, whole_channels: bool) -> tuple[bool, str] | None:
    args, kwargs = source.args, source.kwargs
    if not args or not isinstance(args[0], Tensor) or args[0].shape != outputs.shape:
        return None
    p = float(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
    if not 0 < p < 1:
        return None
    before, after = args[0].detach().double(), outputs.detach().double()
    scaled = before / (1 - p)
    slack = scaled.abs() * (2 * torch.finfo(outputs.dtype).eps) + torch.finfo(outputs.dtype).smallest_normal
    neither = (after != 0) & ((after - scaled).abs() > slack) & before.isfinite()
    if bool(neither.any()):
        at = first_place(neither)
        return False, f"{after[at].item():.9g} at {list(at)} is neither 0 nor {scaled[at].item():.9g}"
    nonzero = before != 0
    count = int(nonzero.sum())
    if whole_channels or count < _MIN_VALUES:
        return True, ""
    dropped = int(((after == 0) & nonzero).sum())
    if abs(dropped - p * count) > _SIGMAS * math.sqrt(count * p * (1 - p)) + 1:
        return False, f"{dropped / count:.4f} of the values are dropped instead of {p:g}"
    return True, ""


def _sampled(source: Any, outputs: Tensor) -> tuple[bool, str] | None:
    values = outputs.detach().double().reshape(-1)
    if values.numel() < _MIN_VALUES:
        return None
    drawn = _draw_on_cpu(source)
    if drawn is None or drawn.numel() != values.numel():
        return None
    if bool(values.isnan().any()) and not bool(drawn.isnan().any()):
        return False, "NaN among the values drawn"
    distance = _kolmogorov_smirnov(values, drawn)
    limit = _KOLMOGOROV_FACTOR * math.sqrt(2 / values.numel())
    if distance > limit:
        return False, f"the values are not distributed as on the CPU: distance {distance:.3f}, at most {limit:.3f}"
    return True, ""


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
