"""Invocation: one call as data, wherever it is: in the run, on the host, in a worker process, in a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..call.traits import OpTraits
from .operands import Operands

FORWARD, BACKWARD = "forward", "backward"


class Region(NamedTuple):
    """The numerics of the place where a call was made."""

    device: str  # its type: "cuda"
    grad_enabled: bool = True
    autocast: torch.dtype | None = None
    rounded_to: torch.dtype | None = None  # what autocast rounded the float32 arguments to
    rng: Mapping[str, Any] | None = None  # random states before the call: cpu, device, type


class Site(NamedTuple):
    """Where in the user's program a call was made."""

    location: str = ""
    module: str = ""
    step: int = 0
    rank: int = 0


@dataclasses.dataclass(slots=True)
class Invocation:
    """What was called, where, under what, and snapshots of its operands.

    >>> Invocation(1, "torch.add", torch.add, traits, Site(), Region("cuda"))  # doctest: +SKIP
    """

    id: int
    op: str
    function: Callable[..., Any]
    traits: OpTraits
    site: Site
    region: Region
    numbers: tuple[int, int] = (0, 0)  # of the descriptions of arguments and results; equal for calls that look alike
    phase: str = FORWARD
    before: Operands | None = None  # (args, kwargs)
    after: Operands | None = None  # (args, kwargs, result)
    grads: Operands | None = None  # (grad_outputs, grad_inputs)

    @property
    def nbytes(self) -> int:
        """Bytes that its snapshots take."""
        return sum([s.nbytes for s in (self.before, self.after, self.grads) if s is not None])
