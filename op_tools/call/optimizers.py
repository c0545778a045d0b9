"""The arithmetic inside PyTorch's fused optimizers, step by step: each step rounds, and the update is what they leave.

The numbers of a step (learning rate, bias corrections) are computed in double precision, as PyTorch's kernels do; but
some take the decay rates in float32, and 1 - 0.999 is then off by a hundred-thousandth. `number` is how they are taken.
Each function does all but the last step, which rounds like any result: the parameters are to become `value - update`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .operators.registry import CPU, KERNELS, KernelFacts, Kind

Tensor = torch.Tensor
Number = Callable[[float], float]


class Update(NamedTuple):
    """The last step of an optimizer for one of the parameters."""

    parameter: Tensor
    value: Tensor
    update: Tensor


def steps_of(name: str) -> Callable[..., list[Update]] | None:
    """What a fused optimizer does to its lists of tensors, in plain operators (`steps_of("fused_adam")`)."""
    facts = KERNELS.by_name.get(name)
    return None if facts is None else facts.optimizer


def _scaled(steps: Callable[..., list[Update]]) -> Callable[..., list[Update]]:
    """The same steps after what a gradient scaler asks for."""

    def scaled(
        parameters: list[Tensor],
        grads: list[Tensor],
        *state: Any,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        **options: Any,
    ) -> list[Update]:
        if found_inf is not None and float(found_inf) == 1:
            return []
        if grad_scale is not None:
            for grad in grads:
                grad.copy_(grad / float(grad_scale))  # stored, too
        return steps(parameters, grads, *state, **options)

    return scaled


@_scaled
def _adam(
    parameters: list[Tensor],
    grads: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    largest: list[Tensor],
    state_steps: list[Tensor],
    *,
    lr: Any,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    decoupled: bool = False,
    number: Number = float,
) -> list[Update]:
    updates = []
    lr = float(lr)
    of_average, of_square = number(beta1), number(beta2)
    in_lr, in_divisor = number(beta1), number(beta2)
    for i, parameter in enumerate(parameters):
        value, step = parameter, float(state_steps[i])
        grad = _gradient(grads[i], maximize, value, 0.0 if decoupled else weight_decay)
        if weight_decay and decoupled:
            value = value - value * (lr * weight_decay)
        average = averages[i] * of_average + grad * (1 - of_average)
        square = squares[i] * of_square + grad * grad * (1 - of_square)
        averages[i].copy_(average)
        squares[i].copy_(square)
        if amsgrad:
            square = torch.maximum(largest[i], square)
            largest[i].copy_(square)
        divisor = square.sqrt() / math.sqrt(1 - in_divisor**step) + eps
        updates.append(Update(parameter, value, average * (lr / (1 - in_lr**step)) / divisor))
    return updates


def _adamw(*args: Any, **kwargs: Any) -> list[Update]:
    return _adam(*args, **kwargs, decoupled=True)


@_scaled
def _sgd(
    parameters: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    *,
    weight_decay: float,
    momentum: float,
    lr: Any,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    number: Number = float,
) -> list[Update]:
    updates = []
    momentum, dampening = number(momentum), number(dampening)
    for i, parameter in enumerate(parameters):
        grad = _gradient(grads[i], maximize, parameter, weight_decay)
        if momentum:
            buffer = grad if is_first_step else buffers[i] * momentum + grad * (1 - dampening)
            buffers[i].copy_(buffer)
            grad = grad + buffer * momentum if nesterov else buffer
        updates.append(Update(parameter, parameter, grad * float(lr)))
    return updates


@_scaled
def _adagrad(
    parameters: list[Tensor],
    grads: list[Tensor],
    sums: list[Tensor],
    state_steps: list[Tensor],
    *,
    lr: Any,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    number: Number = float,
) -> list[Update]:
    updates = []
    for i, parameter in enumerate(parameters):
        grad = _gradient(grads[i], maximize, parameter, weight_decay)
        total = sums[i] + grad * grad
        sums[i].copy_(total)
        rate = float(lr) / (1 + (float(state_steps[i]) - 1) * number(lr_decay))
        updates.append(Update(parameter, parameter, grad * rate / (total.sqrt() + eps)))
    return updates


def _gradient(grad: Tensor, maximize: bool, parameter: Tensor, weight_decay: float) -> Tensor:
    grad = -grad if maximize else grad
    return grad + parameter * weight_decay if weight_decay else grad


KERNELS.register("fused_adam", KernelFacts(Kind.POINTWISE, optimizer=_adam))
KERNELS.register("fused_adamw", KernelFacts(Kind.POINTWISE, optimizer=_adamw))
KERNELS.register("fused_sgd", KernelFacts(Kind.POINTWISE, optimizer=_sgd))
KERNELS.register("fused_adagrad", KernelFacts(Kind.POINTWISE, low_on=CPU, optimizer=_adagrad))
