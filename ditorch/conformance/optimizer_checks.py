"""Checks of one optimizer of PyTorch's database: some steps on the device end where double precision does."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ditorch.conformance import databases
from ditorch.conformance.cases import Case, Limits, Result, Unit
from ditorch.conformance.op_checks import seed_everything
from ditorch.conformance.trial import Outcome, Trial, over_samples

STEPS = 3
SHAPES = ((), (7,), (4, 5), (2, 3, 4))
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
_ONLY_ON_DEVICES = ("capturable", "foreach", "fused", "differentiable")


class OptimizerChecks:
    """All checks of one unit: one per implementation of the optimizer.

    Example: ``OptimizerChecks(unit, "cuda:0", Limits()).run("fused")``
    """

    def __init__(self, unit: Unit, device: str, limits: Limits) -> None:
        found = databases.optimizers().get(unit.name)
        if found is None:
            raise ValueError(f"this version of PyTorch has no optimizer {unit.name} in its database")
        self.info, self.unit, self.device, self.limits = found, unit, device, limits

    def run(self, check: str) -> Result:
        """Do one check of the unit."""
        if check not in IMPLEMENTATIONS:
            raise ValueError(f"optimizers have no check {check!r}: {', '.join(IMPLEMENTATIONS)}")
        case = Case(self.unit.what, self.unit.name, self.unit.dtype, check)
        dtype = getattr(torch, self.unit.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seed_everything()
            samples = self.info.optim_inputs_func(device=self.device, dtype=dtype)
            return over_samples(case, samples, lambda n, sample: self._judge(n, sample, check, dtype), self.limits)

    def _judge(self, number: int, sample: Any, implementation: str, dtype: torch.dtype) -> Outcome:
        torch.manual_seed(number)
        shapes = [shape for shape in SHAPES if self._takes(shape)]
        parameters = [torch.randn(shape, dtype=dtype) for shape in shapes]
        gradients = [[torch.randn(shape, dtype=dtype) for shape in shapes] for _ in range(STEPS)]
        options = dict(sample.kwargs)
        chosen = {} if self.info.only_supports_sparse_grads else self._accepted(IMPLEMENTATIONS[implementation])
        plain = {key: value for key, value in options.items() if key not in _ONLY_ON_DEVICES}

        def on_device(parameters: Any, gradients: Any, options: Any) -> Any:
            return self._steps(parameters, gradients, {**options, **chosen})

        def on_cpu(parameters: Any, gradients: Any, options: Any) -> Any:
            return self._steps(parameters, gradients, plain)

        trial = Trial(
            f"torch.optim.{self.unit.name}", on_device, (parameters, gradients, options), {}, self.device, on_cpu
        )
        return trial.run()

    def _takes(self, shape: tuple[int, ...]) -> bool:
        if self.unit.name == "Muon":
            return len(shape) == 2  # made for matrices
        return bool(shape) or not self.info.only_supports_sparse_grads

    def _accepted(self, options: dict[str, bool]) -> dict[str, bool]:
        known = self.info.optim_cls.__init__.__code__.co_varnames
        return {key: value for key, value in options.items() if key in known}

    def _steps(self, parameters: Any, gradients: Any, options: dict[str, Any]) -> Any:
        leaves = [p.detach().clone().requires_grad_() for p in parameters]
        optimizer = self.info.optim_cls(leaves, **options)
        for step in gradients:
            for leaf, gradient in zip(leaves, step):
                leaf.grad = gradient.to_sparse(1) if self.info.only_supports_sparse_grads else gradient.clone()
            if self.info.step_requires_closure:
                with torch.enable_grad():
                    optimizer.step(lambda: _loss(leaves))
            else:
                optimizer.step()
        return [leaf.detach() for leaf in leaves]


def _loss(leaves: list[torch.Tensor]) -> torch.Tensor:
    """A bowl with its lowest point at one: what a closure of a training step computes."""
    for leaf in leaves:
        leaf.grad = None
    loss = torch.stack([((leaf - 1) ** 2).sum() for leaf in leaves]).sum()
    loss.backward()
    return loss
