"""Learning rates: a function of the iteration alone, so that a resumed run goes on as if it had never stopped."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .config import ConfigError

Schedule = Callable[[int], float]
"""The factor on the first learning rate at an iteration."""


def exponential_to(final: float, train_iter: int) -> Schedule:
    """Reaches ``final`` at the last iteration."""
    return lambda i: final ** min(i / train_iter, 1.0)


def named(options: dict[str, Any], train_iter: int, warmup_iter: int) -> Schedule:
    """A schedule by its name in the training log's framework; ``Warmup…`` ones rise over ``warmup_iter`` first.

    >>> [named({"name": "StepLR", "step_size": 10, "gamma": 0.5}, 100, 0)(i) for i in (0, 9, 10, 25)]
    [1.0, 1.0, 0.5, 0.25]
    """
    options = dict(options)
    name, make = options.pop("name", None), None
    if isinstance(name, str):
        make = SCHEDULES.get(name.removeprefix("Warmup"))
    if make is None:
        known = ", ".join(f"{n}, Warmup{n}" for n in SCHEDULES)
        raise ConfigError(f"train.scheduler.name={name!r}: expected one of {known}")
    factor, method = options.pop("warmup_factor", 0.001), options.pop("warmup_method", "linear")
    try:
        schedule = make(train_iter, **options)
        schedule(train_iter)
    except (TypeError, ArithmeticError) as error:
        raise ConfigError(f"train.scheduler: {name} cannot be used with {options}: {error}") from None
    if not name.startswith("Warmup") or warmup_iter == 0:
        return schedule
    if method not in ("linear", "constant"):
        raise ConfigError(f"train.scheduler.warmup_method={method!r}: expected linear or constant")

    def warming(i: int) -> float:
        if i >= warmup_iter:
            return schedule(i)
        return float(factor if method == "constant" else factor + (1 - factor) * i / warmup_iter)

    return warming


def _step(train_iter: int, step_size: int, gamma: float = 0.1) -> Schedule:
    return lambda i: float(gamma ** (i // step_size))


def _exponential(train_iter: int, gamma: float) -> Schedule:
    return lambda i: float(gamma**i)


def _cosine(train_iter: int, alpha: float = 0.0) -> Schedule:
    return lambda i: alpha + (1 - alpha) * 0.5 * (1 + math.cos(math.pi * min(i / train_iter, 1.0)))


SCHEDULES: dict[str, Callable[..., Schedule]] = {"StepLR": _step, "ExponentialLR": _exponential, "CosineLR": _cosine}
