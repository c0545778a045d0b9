"""Checks of one module of PyTorch's database: forward and backward, in training and evaluation."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch

from ditorch.conformance import databases
from ditorch.conformance.cases import NOT_COMPARABLE, Case, Limits, Result, Unit
from ditorch.conformance.op_checks import seed_everything
from ditorch.conformance.trial import Outcome, Skip, Trial, one_line, over_samples

CHECKS = ("forward", "backward", "forward-eval")


class ModuleChecks:
    """All checks of one unit; a module is a function of its state and its inputs, so the verdict sees both.

    Example: ``ModuleChecks(unit, "cuda:0", Limits()).run("backward")``
    """

    def __init__(self, unit: Unit, device: str, limits: Limits) -> None:
        found = databases.modules().get(unit.name)
        if found is None:
            raise ValueError(f"this version of PyTorch has no module {unit.name} in its database")
        self.info, self.unit, self.device, self.limits = found, unit, device, limits

    def run(self, check: str) -> Result:
        """Do one check of the unit."""
        if check not in CHECKS:
            raise ValueError(f"modules have no check {check!r}: {', '.join(CHECKS)}")
        case = Case(self.unit.what, self.unit.name, self.unit.dtype, check)
        training = check != "forward-eval"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seed_everything()
            try:
                samples = self.info.module_inputs_func(
                    self.info,
                    device="cpu",
                    dtype=getattr(torch, self.unit.dtype),
                    requires_grad=check == "backward",
                    training=training,
                )
            except Exception as error:
                return Result(case, NOT_COMPARABLE, f"the CPU cannot make samples: {one_line(error)}")

            def judge(number: int, sample: Any) -> Outcome:
                return self._judge(number, sample, training, check == "backward")

            return over_samples(case, samples, judge, self.limits)

    def _judge(self, number: int, sample: Any, training: bool, backward: bool) -> Outcome:
        if sample.forward_input is None:
            raise Skip("nothing to call it with")
        built, inputs = sample.constructor_input, sample.forward_input
        torch.manual_seed(number)
        module = self.info.module_cls(*built.args, **built.kwargs).to(getattr(torch, self.unit.dtype)).train(training)
        if self.info.is_lazy:  # its parameters take their shapes from a first call
            with torch.no_grad():
                module(*copy.deepcopy(inputs.args), **copy.deepcopy(inputs.kwargs))
        state = _state(module, backward)

        def call(state: dict[str, torch.Tensor], args: Any, kwargs: Any) -> Any:
            used = _with_state(module, state)
            result = used(*args, **kwargs)
            buffers = [b for b in _buffers(used, state) if b.is_floating_point()]
            return [result, buffers] if buffers else result

        name = f"torch.{self.unit.name}"
        trial = Trial(name, call, (state, inputs.args, inputs.kwargs), {}, self.device)
        return trial.run(backward=backward, forward=not backward, number=number)


def _state(module: torch.nn.Module, grad: bool) -> dict[str, torch.Tensor]:
    found = {name: p.detach().clone().requires_grad_(grad) for name, p in module.named_parameters()}
    return {**found, **{name: buffer.detach().clone() for name, buffer in module.named_buffers()}}


def _with_state(module: torch.nn.Module, state: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A copy of a module that uses these very tensors, so that gradients reach them."""
    used = copy.deepcopy(module)
    for name, tensor in state.items():
        path, _, last = name.rpartition(".")
        owner = used.get_submodule(path)
        if last in owner._buffers:
            owner._buffers[last] = tensor
        else:
            del owner._parameters[last]
            setattr(owner, last, tensor)  # recurrent modules keep a list of their weights up to date here
    return used


def _buffers(module: torch.nn.Module, state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [buffer for name, buffer in module.named_buffers() if name in state]
