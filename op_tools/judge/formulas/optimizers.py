"""Fused optimizers: the roundings of the averages and of the update, which count where a parameter is near zero."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from ...call import optimizers
from ..rounding import SINGLE
from .query import FORMULAS, Formula, FormulaQuery, Terms, single

# each step of the probes rounds its result by 1 ± half of this; see `Noise._optimized`
_UNIT: Final = optimizers.UNITS * SINGLE


def _place(query: FormulaQuery) -> tuple[int, list[Any]]:
    """Which list a result belongs to, and the same tensor of each list."""
    number, lists = query.number, list[Any](query.source.args)
    for which, each in enumerate(lists):
        if number < len(each):
            return which, [tensors[number] if tensors else None for tensors in lists]
        number -= len(each)
    raise LookupError("not one of the lists")


def _narrow(rate: float) -> float:
    """The square of how far a rate moves in float32, at least: half of the probes take it so, wherever it is used.

    What two uses of a rate do may cancel, and half of their squares is left.
    """
    return 0.25 * (float(np.float32(rate)) - rate) ** 2


def _adam(query: FormulaQuery) -> Terms | None:
    """p · (1 - decay) - rate · average / (root of square + eps), with both averages as they become."""
    options = query.source.kwargs
    if query.precision.stored != SINGLE or any(options.get(n) is not None for n in ("grad_scale", "found_inf")):
        return None
    which, (parameter, grad, average, square, _, step) = _place(query)
    if options["amsgrad"] or which not in (0, 2, 3):
        return None
    decoupled, decay = "adamw" in query.source.name, float(options["weight_decay"])
    parameter, grad, unit = single(parameter), single(grad), 0.25 * _UNIT**2
    grad = grad.neg() if options["maximize"] else grad
    grad = grad.add(parameter, alpha=decay) if decay and not decoupled else grad
    of_average, of_square = float(options["beta1"]), float(options["beta2"])
    average = single(average)
    in_average = average.mul(of_average).square_().add_(grad.mul(1 - of_average).square_())
    in_average.add_(average.sub(grad).square_(), alpha=_narrow(of_average) / unit)
    if which == 2:
        return Terms(in_average, unit, unit)
    grad, square = grad.square(), single(square)
    if which == 3:
        squares = square.mul(of_square).square_().add_(grad.mul(1 - of_square).square_(), alpha=2)
        return Terms(squares.add_(square.sub(grad).square_(), alpha=_narrow(of_square) / unit), unit, unit)
    value = parameter.mul(1 - float(options["lr"]) * decay) if decoupled else parameter
    updates, count = single(query.golden).sub(value).square_(), float(step)
    # of the update: both averages, the product with the rate, the divisor, the quotient, and the corrections of bias
    in_rate, in_divisor = (_of_correction(rate, count) * _narrow(rate) / unit for rate in (of_average, of_square))
    root = square.mul(of_square).add_(grad, alpha=1 - of_square).sqrt_().div_(math.sqrt(1 - of_square**count))
    divisor = root.add(float(options["eps"]))
    in_average.mul_((float(options["lr"]) / (1 - of_average**count)) ** 2).div_(divisor.square())
    share = root.div_(divisor).square_()
    squares = share.mul_(0.25 * in_divisor).add_(4 + in_rate).mul_(updates).add_(in_average).nan_to_num_(0.0)
    return Terms(squares.add_(value.square()) if decoupled and decay else squares, unit, 0.0)


def _of_correction(rate: float, step: float) -> float:
    """The square of how far the logarithm of 1 - rate ** step moves with the rate."""
    return float((step * rate ** (step - 1) / (1 - rate**step)) ** 2)


FORMULAS.register("fused_adam fused_adamw", Formula(("_fused_adam_", "_fused_adamw_"), _adam))
