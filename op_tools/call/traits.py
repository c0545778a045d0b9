"""What is known about a function before it is called, from PyTorch's schemas and from the registry of facts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final

import torch

from ..compat import OpOverload
from . import facts as questions
from .functions import factories, overloads_of
from .functions import name_of as name_of
from .operators.registry import FUNCTIONS, FunctionFacts, function_facts, last_name

_GETTER_ENDINGS: Final = (".__get__", ".__set__", ".__delete__")
# Functions that run other operators for the user: the calls inside them are watched, too.
_TRANSPARENT_NAMES: Final = frozenset({"torch.Tensor.backward", "torch.autograd.grad", "torch.autograd.backward"})
_COLLECTIVE: Final = ("torch.distributed.", "c10d.", "_c10d_functional.", "_c10d_functional_autograd.")
_WAITS: Final = ("_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd")  # hands its argument back
COLLECTIVES: Final = [last_name(name) for name, facts in FUNCTIONS.by_name.items() if facts.collective]


@dataclasses.dataclass(frozen=True, eq=False)
class OpTraits:
    """The fixed facts about one function.

    >>> traits_of(torch.Tensor.add_).mutates
    True
    """

    name: str
    function: Callable[..., Any]
    bookkeeping: bool = False
    transparent: bool = False
    view: bool = False
    mutates: bool = False
    random: bool | None = False
    collective: bool = False
    factory: bool = False
    conversion: bool = False  # to another dtype or device
    transfer: bool = False  # to another device, never to another dtype
    by_engine: bool = False  # autograd calls it in a backward pass, no user code does

    # Answers of `call.facts` that depend on the name only; each is worked out once.

    @functools.cached_property
    def facts(self) -> FunctionFacts:
        """What is registered for the function (`traits.facts.autocast_low`)."""
        return function_facts(self.name)

    @functools.cached_property
    def runs_kernel(self) -> bool:
        """Whether a call may run a kernel; a view runs none, what gives a view or a copy (`reshape`) may."""
        return not (self.view and self.facts.aliases)

    @functools.cached_property
    def may_write(self) -> bool:
        """Whether a call without keyword arguments may write to its arguments; `out` and `inplace` come on top."""
        return questions.may_mutate(self.name, {})

    @functools.cached_property
    def names_inplace(self) -> bool:
        """Whether it writes to its argument only where `inplace` says so, which modes get by name (`F.relu`)."""
        function = self.function
        if getattr(function, "__module__", "") != "torch.nn.functional" or not isinstance(function, FunctionType):
            return False
        return "inplace" in function.__code__.co_varnames[: function.__code__.co_argcount]

    @functools.cached_property
    def is_optimizer(self) -> bool:
        """Whether it is a fused optimizer."""
        return questions.is_optimizer(self.name)

    @functools.cached_property
    def differs_on_cpu(self) -> bool:
        """Whether another function is called on the CPU (`facts.on_cpu`)."""
        return questions.on_cpu(self.name, self.function) is not self.function


def _overloads(function: Callable[..., Any], name: str) -> list[Any]:
    """The ATen overloads that a function's name leads to, or the one that it is."""
    if isinstance(function, OpOverload):
        return [function]
    candidates = [getattr(function, "__name__", ""), last_name(name)]
    for candidate in list(candidates):
        if function_facts(candidate).reflected:  # __rand__ is not rand
            candidates += [f"__{candidate[3:-2]}__", candidate[3:-2]]
        elif candidate.startswith("__") and candidate.endswith("__"):
            candidates.append(candidate.strip("_"))
    return next(filter(None, map(overloads_of, candidates)), [])


def _writes(function: Callable[..., Any]) -> bool:
    return isinstance(function, OpOverload) and bool(function._schema.is_mutable)


def traits_of(function: Callable[..., Any], name: str | None = None) -> OpTraits:
    """The traits of a function (`traits_of(torch.add).name == "torch.add"`)."""
    known = name is None
    name = name or name_of(function)
    last, facts = last_name(name), function_facts(name)
    if name in _TRANSPARENT_NAMES:
        return OpTraits(name, function, bookkeeping=True, transparent=True)
    if (known and facts.bookkeeping) or name.endswith(_GETTER_ENDINGS) or name.startswith(("profiler.", *_WAITS)):
        return OpTraits(name, function, bookkeeping=True)
    if name.startswith(_COLLECTIVE):
        return OpTraits(name, function, collective=True, mutates=name.startswith("torch."))
    overloads = _overloads(function, name) if name.startswith(("torch.", "aten.")) else []
    if name == "torch.device" or (name.startswith("torch._C.") and not overloads):
        return OpTraits(name, function, bookkeeping=True)
    functional = [o for o in overloads if not o._schema.is_mutable]
    draws = facts.draws or any(torch.Tag.nondeterministic_seeded in o.tags for o in overloads)
    return OpTraits(
        name,
        function,
        view=bool(functional) and all(questions.is_view(o) for o in functional),
        mutates=(bool(overloads) and last.endswith("_") and not last.endswith("__")) or _writes(function),
        random=draws or (False if overloads else None),
        factory=name in factories(),
        conversion=bool(facts.converts) and name.startswith("torch.Tensor."),
        transfer=facts.converts == "device" and name.startswith("torch.Tensor."),
    )
