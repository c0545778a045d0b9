"""Invocation: one call as data, wherever it is: in the run, on the host, in a worker process, in a file."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..call.functions import compared_function_of
from ..call.own_operators import NotKnown, Origin, own_operator
from ..call.traits import OpTraits, traits_of
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
    before: Operands | None = None  # snapshot of (args, kwargs)

    def wire(self) -> tuple[str, Region, tuple[int, int]]:
        """What another process needs to know besides the operands; `from_wire` is its inverse."""
        return (self.op, self.region, self.numbers)

    @classmethod
    def from_wire(cls, op: str, region: Region, numbers: tuple[int, int], origin: Origin | None = None) -> Invocation:
        """The call again, with the function and traits that this process has under that name, or gets by its origin."""
        function, traits = _operator(op, origin)
        return cls(0, op, function, traits, Site(), region, numbers)


@functools.lru_cache(maxsize=4096)
def _operator(op: str, origin: Origin | None) -> tuple[Callable[..., Any], OpTraits]:
    try:
        function = compared_function_of(op) if origin is None else own_operator(op, origin)
    except LookupError as error:
        raise NotKnown(str(error)) from error
    traits = traits_of(function)
    return function, dataclasses.replace(traits, name=op, by_engine=True) if op.startswith("autograd.") else traits
