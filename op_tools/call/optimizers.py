"""The arithmetic inside PyTorch's fused optimizers, step by step: each step rounds, and the update is what they leave.

The numbers of a step (learning rate, bias corrections) are computed in double precision, as PyTorch's kernels do; but
some take the decay rates in float32, and 1 - 0.999 is then off by a hundred-thousandth. `number` is how they are taken.
All but the last step is done, which rounds like any result: the parameters are to become `value - update`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch

from .operators.registry import CPU, KERNELS, KernelFacts, Kind

Tensor = torch.Tensor
UNITS: Final = 3  # of rounding in each step: quotients and roots are good to about an ulp, in any order
_Options = Mapping[str, float]


class Update(NamedTuple):
    """The last step of an optimizer for one of the parameters."""

    parameter: Tensor
    value: Tensor
    update: Tensor


def steps_of(name: str) -> Callable[..., list[Update]] | None:
    """What a fused optimizer does to its lists of tensors, in plain operators (`steps_of("fused_adam")`)."""
    facts = KERNELS.by_name.get(name)
    return None if facts is None else facts.optimizer


def _on_lists(one: Callable[..., Tensor], *rates: str, decoupled: bool = False) -> Callable[..., list[Update]]:
    """From `one(options, rates, gradient, *state)`, the update of one parameter: those of lists.

    `rates` names options that a kernel may take in float32; `decoupled`: weight decay bypasses the gradient.
    """

    def steps(
        parameters: list[Tensor],
        grads: list[Tensor],
        *state: list[Tensor],
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        number: Callable[[float], float] = float,
        **options: Any,
    ) -> list[Update]:
        if found_inf is not None and float(found_inf) == 1:
            return []
        options = {**options, "lr": float(options["lr"])}
        taken = [number(options[name]) for name in rates]
        updates = []
        for i, (parameter, grad) in enumerate(zip(parameters, grads)):
            if grad_scale is not None:
                grad.copy_(grad / float(grad_scale))  # stored, too
            value, grad = parameter, -grad if options["maximize"] else grad
            if options["weight_decay"] and decoupled:
                value = value - value * (options["lr"] * options["weight_decay"])
            elif options["weight_decay"]:
                grad = grad + parameter * options["weight_decay"]
            update = one(options, taken, grad, *(tensors[i] if tensors else None for tensors in state))
            updates.append(Update(parameter, value, update))
        return updates

    return steps


def _adam(options: _Options, rates: list[float], grad: Tensor, *state: Tensor) -> Tensor:
    of_average, of_square, in_lr, in_divisor = rates
    average, square, largest, step = state
    average.copy_(new_average := average * of_average + grad * (1 - of_average))
    square.copy_(new_square := square * of_square + grad * grad * (1 - of_square))
    if options["amsgrad"]:
        new_square = torch.maximum(largest, new_square)
        largest.copy_(new_square)
    count = float(step)
    divisor = new_square.sqrt() / math.sqrt(1 - in_divisor**count) + options["eps"]
    update: Tensor = new_average * (options["lr"] / (1 - in_lr**count)) / divisor
    return update


def _sgd(options: _Options, rates: list[float], grad: Tensor, buffer: Tensor) -> Tensor:
    momentum, dampening = rates
    if momentum:
        new = grad if options["is_first_step"] else buffer * momentum + grad * (1 - dampening)
        buffer.copy_(new)
        grad = grad + new * momentum if options["nesterov"] else new
    return grad * options["lr"]


def _adagrad(options: _Options, rates: list[float], grad: Tensor, total: Tensor, step: Tensor) -> Tensor:
    new = total + grad * grad
    total.copy_(new)
    rate = options["lr"] / (1 + (float(step) - 1) * rates[0])
    return grad * rate / (new.sqrt() + options["eps"])


_BETAS = ("beta1", "beta2", "beta1", "beta2")  # for the averages, and for the corrections of their bias
KERNELS.register("fused_adam", KernelFacts(Kind.POINTWISE, optimizer=_on_lists(_adam, *_BETAS)))
KERNELS.register("fused_adamw", KernelFacts(Kind.POINTWISE, optimizer=_on_lists(_adam, *_BETAS, decoupled=True)))
KERNELS.register("fused_sgd", KernelFacts(Kind.POINTWISE, optimizer=_on_lists(_sgd, "momentum", "dampening")))
KERNELS.register("fused_adagrad", KernelFacts(Kind.POINTWISE, low_on=CPU, optimizer=_on_lists(_adagrad, "lr_decay")))
