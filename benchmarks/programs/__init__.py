"""Small healthy training programs of many kinds; `benchmarks/zoo.py` runs them under OpAutoCompare.

A program is a function that builds its networks and data and returns one training step. It registers itself:

    @program
    def simclr(job: Job) -> Step:
        net = job.to(nn.Linear(8, 4))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step() -> None:
            with job.autocast():
                loss = net(job.randn(3, 8)).square().mean()
            job.update(loss, optimizer)

        return step
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

Step = Callable[[], None]
Module = TypeVar("Module", bound=nn.Module)
PROGRAMS: dict[str, Callable[[Job], Step]] = {}


@dataclasses.dataclass
class Job:
    """How a program is run: the device, the autocast dtype (None for float32) and the layout of images.

    >>> Job("cpu").randn(2, 3).shape
    torch.Size([2, 3])
    """

    device: str
    low: torch.dtype | None = None
    channels_last: bool = False

    def __post_init__(self) -> None:
        self.without_scaler = torch.amp.GradScaler("cuda", enabled=False)
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.low is torch.float16, init_scale=256.0)

    def to(self, module: Module) -> Module:
        """Move a network to the device, in the layout of the job."""
        module = module.to(self.device)
        if not self.channels_last:
            return module
        has_volumes = any(parameter.dim() == 5 for parameter in module.parameters())
        layout = torch.channels_last_3d if has_volumes else torch.channels_last
        return module.to(memory_format=layout)  # type: ignore[call-overload]

    def randn(self, *shape: int) -> torch.Tensor:
        """Normal numbers on the device, made on the CPU so that they are the same everywhere."""
        return self.put(torch.randn(*shape))

    def rand(self, *shape: int) -> torch.Tensor:
        """Uniform numbers on the device."""
        return self.put(torch.rand(*shape))

    def ints(self, high: int, *shape: int) -> torch.Tensor:
        """Whole numbers below `high` on the device."""
        return torch.randint(0, high, shape).to(self.device)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Move a tensor to the device, images in the layout of the job."""
        tensor = tensor.to(self.device)
        layouts = {4: torch.channels_last, 5: torch.channels_last_3d} if self.channels_last else {}
        layout = layouts.get(tensor.dim())
        return tensor if layout is None else tensor.to(memory_format=layout)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The autocast region of the job; it does nothing in float32."""
        return torch.autocast("cuda", dtype=self.low or torch.bfloat16, enabled=self.low is not None)

    def update(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer, clip: float = 0.0) -> None:
        """Backward pass and optimizer step, with loss scaling in float16 (not of complex numbers: CUDA lacks it)."""
        optimizer.zero_grad()
        parameters = [p for g in optimizer.param_groups for p in g["params"]]
        scaler = self.without_scaler if any(p.is_complex() for p in parameters) else self.scaler
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, clip)
        scaler.step(optimizer)
        scaler.update()


def program(build: Callable[[Job], Step]) -> Callable[[Job], Step]:
    """Register a program under the name of its function."""
    assert build.__name__ not in PROGRAMS, f"two programs are called {build.__name__}"
    PROGRAMS[build.__name__] = build
    return build


def trained(job: Job, net: nn.Module, loss: Callable[[], torch.Tensor], lr: float = 1e-3, clip: float = 0.0) -> Step:
    """The usual step: a loss under autocast, then AdamW (`trained(job, net, lambda: net(x).square().mean())`)."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)

    def step() -> None:
        with job.autocast():
            value = loss()
        job.update(value, optimizer, clip)

    return step
