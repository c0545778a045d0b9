"""The random numbers that a call draws: noted while the device repeats the call, and given to the golden run.

`Recorder` is for the device, `Substitute` for the CPU. What both know are the operators whose only random part is a
tensor of draws; a kernel that draws inside itself shows nothing, unless it is attention: its mask is found by probing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from ..call import facts
from ..call.description import Tensor, tensors_in
from ..compat import DispatchMode

_IN_PLACE: Final = frozenset({
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"
})  # fmt: skip
_NEW: Final = frozenset({"bernoulli", "rand", "rand_like", "randn", "randn_like"})
_MAX_PROBES: Final = 32  # calls of a fused attention for one mask
_MAX_MASK: Final = 1 << 26  # elements


class DrawsRandomNumbers(Exception):
    """The call draws random numbers that are not known."""


class Draw(NamedTuple):
    """One tensor of random numbers."""

    values: Tensor  # booleans for what is zero or one
    law: tuple[Any, ...] = ()  # ("bernoulli", probability of a one), ("normal", mean, deviation), ...; () where unknown


def draws(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether this call of an ATen operator draws random numbers (`draws(torch.ops.aten.rand.default, (2,), {})`)."""
    return torch.Tag.nondeterministic_seeded in func.tags and facts.really_draws(func, args, kwargs)


def _name(func: Any) -> str:
    return str(func._schema.name.partition("::")[2])


def _has_generator(args: Any, kwargs: Mapping[str, Any]) -> bool:
    return any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))


def _argument(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[index] if index < len(args) else kwargs.get(name, argument.default_value)
    return None


class Recorder(DispatchMode):
    """Notes all that a call draws on the device; raises `DrawsRandomNumbers` where it cannot be seen.

    `rewound` is called with a function: it calls that from the present state of the device's generator, and puts the
    state back.
    """

    def __init__(self, rewound: Callable[[Callable[[], Any]], Any]) -> None:
        super().__init__()
        self._rewound = rewound
        self.draws: list[Draw] = []
        self.probed = False  # a mask was found out by probing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        if _has_generator(args, kwargs):
            raise DrawsRandomNumbers("a generator of its own draws")
        name = _name(func)
        if name.startswith("_scaled_dot_product_") and name.endswith("_attention"):
            self.draws.append(self._mask_inside(func, args, kwargs))
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if name == "native_dropout":
            self.draws.append(Draw(result[1].detach(), ("bernoulli", 1 - args[1])))
        elif name in _IN_PLACE or name in _NEW:
            values = result.detach()
            values = values != 0 if name.startswith("bernoulli") else values.clone()  # it may be written to
            self.draws.append(Draw(values, law_of(name, args, kwargs)))
        else:
            raise DrawsRandomNumbers(f"{name} draws inside its kernel")
        return result

    def _mask_inside(self, func: Any, args: Any, kwargs: Any) -> Draw:
        """What a fused attention drops: with equal weights, and the identity for values, its result shows it."""
        self.probed = True
        query, key, value = args[:3]
        length, width = value.shape[-2:]
        elements = query.numel() // max(1, query.shape[-1]) * length
        if length > _MAX_PROBES * width or elements > _MAX_MASK or value.is_nested:
            raise DrawsRandomNumbers(f"{_name(func)} draws inside its kernel, and its mask is too large to find out")
        rest = [torch.zeros_like(a) if isinstance(a, Tensor) else a for a in args[3:]]
        named = {k: torch.zeros_like(a) if isinstance(a, Tensor) else a for k, a in kwargs.items()}
        equal = torch.zeros_like(query), torch.zeros_like(key)
        found = []
        for start in range(0, length, width):
            part = torch.zeros_like(value)
            part[..., start : start + width, :].diagonal(dim1=-2, dim2=-1).fill_(1)

            def probe(part: Tensor = part) -> Tensor:
                result: Tensor = func(*equal, part, *rest, **named)[0]
                return result

            found.append(self._rewound(probe)[..., : min(width, length - start)] != 0)
        p = _argument(func, "dropout_p", args, kwargs)
        causal = bool(_argument(func, "is_causal", args, kwargs))  # the upper triangle shows nothing
        return Draw(torch.cat(found, -1), () if causal else ("bernoulli", 1 - p))


class Substitute(DispatchMode):
    """Gives a call on the CPU the draws of the device, in order."""

    def __init__(self, found: Sequence[Tensor]) -> None:
        super().__init__()
        self._left = list(reversed(found))

    @property
    def used_up(self) -> bool:
        """Whether the call took all of them."""
        return not self._left

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        name = _name(func)
        if name == "native_dropout":
            mask = self._next(args[0].shape).to(torch.bool)
            return args[0] * (mask.to(args[0].dtype) / (1 - args[1])), mask
        if name in _IN_PLACE:
            return args[0].copy_(self._next(args[0].shape))
        if name not in _NEW:
            raise DrawsRandomNumbers(name)
        like = next(tensors_in(args), None)
        dtype = kwargs.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype)
        return self._next(args[0] if like is None else like.shape).to(dtype, copy=True)

    def _next(self, shape: Sequence[int]) -> Tensor:
        values = self._left.pop() if self._left else torch.empty(0)
        if values.numel() != torch.Size(shape).numel():
            raise DrawsRandomNumbers("the CPU draws other numbers than the device")
        return values.reshape(tuple(shape))


def law_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The distribution that a sampler draws from; () where it is not known, or not the same for all elements.

    >>> law_of("uniform_", (x, -1.0), {})  # doctest: +SKIP
    ('uniform', -1.0, 1.0)
    """
    known = _LAWS.get(name)
    if known is None:
        return ()
    law, *parameters = known
    found: list[Any] = []
    for place, (names, default) in enumerate(parameters, 1):
        given = [kwargs[n] for n in names if n in kwargs]
        value = args[place] if place < len(args) and names else given[0] if given else default
        if isinstance(value, Tensor) or not isinstance(value, (int, float)):
            return ()
        found.append(float(value))
    return (law, *found)


_UNIFORM: Final = ("uniform", (("a", "from", "from_"), 0.0), (("b", "to"), 1.0))
_NORMAL: Final = ("normal", (("mean",), 0.0), (("std",), 1.0))
# Of each sampler: the distribution, and for each of its parameters the names, if it has any, and the default.
_LAWS: Final[dict[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("rand", "rand_like"), ("uniform", ((), 0.0), ((), 1.0))),
    **dict.fromkeys(("randn", "randn_like"), ("normal", ((), 0.0), ((), 1.0))),
    "uniform_": _UNIFORM,
    "normal_": _NORMAL,
    "bernoulli_": ("bernoulli", (("p",), 0.5)),
    "exponential_": ("exponential", (("lambd",), 1.0)),
    "log_normal_": ("log normal", (("mean",), 1.0), (("std",), 2.0)),
    "cauchy_": ("cauchy", (("median",), 0.0), (("sigma",), 1.0)),
}
