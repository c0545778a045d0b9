"""The axes of a call: which dimensions of its arguments and results run over the same index.

`linear(x, w, b)` has x[n, k], w[m, k], b[m] and y[n, m]. An element of y needs one n and one m, and all of k; one of
the gradient of w needs one m and one k, and all of n. So a call can be cut to some places along the axes of the tensor
that is to be judged, and is an ordinary call of the same operator, whose result equals the result of the whole call at
these places.

A rule is registered for the last name of functions: `@rule("linear")`. It gets the arguments by name or position and
returns `Axes`, or None where it does not know such a call.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from ...call.description import Tensor, tensors_in
from ...call.operators.registry import last_name

Prepare = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
Names = tuple[str | None, ...]  # of the dimensions of one tensor; None for one that is never cut


class Product(NamedTuple):
    """A call that is `beta · added + alpha · a sum of products`: random sums over rows and columns check it."""

    operands: tuple[int, int]  # their positions
    over: frozenset[str]  # axes over which sums may be taken
    added: int | None = None
    alpha: float = 1
    beta: float = 1


class Affine(NamedTuple):
    """A norm over the last dimensions: its weight and bias have gradients that are sums over all rows."""

    positions: tuple[int, int | None, int | None]  # of what is normalised, the weight and the bias
    dims: int  # that are normalised
    centred: bool
    eps: float | None


@dataclasses.dataclass(frozen=True)
class Axes:
    """What runs over what in one kind of call.

    `flat` treats all tensors with as many elements as the result as one long row. `beside` says whose gradient comes
    with that of which argument: that of a bias with that of the weight.
    """

    tensors: tuple[Names, ...]  # of each tensor among the arguments, in order
    results: tuple[Names, ...]
    whole: frozenset[str] = frozenset()  # never cut: what is computed depends on all of it
    ordered: frozenset[str] = frozenset()  # places along it must stay in order, unless `prepare` is done
    product: Product | None = None
    affine: Affine | None = None
    inner: int = 0  # elements of what is computed on the way, where these are many
    beside: Mapping[int, int] = dataclasses.field(default_factory=dict)
    flat: bool = False
    writes: bool = False  # to its arguments, though its name does not say so
    fixed_gradient: bool = False  # its gradients do not depend on the values of its arguments
    lists: bool = False  # tensors side by side in lists: each has an axis of its own
    by_trial: bool = False  # found by trial: nothing is known of kernels for other dtypes on the device
    prepare: Prepare | None = None  # writes out an argument that depends on places: a causal mask

    @property
    def is_slow(self) -> bool:
        """Whether golden runs take long for what they have of tensors: attention, and operators that no rule knows."""
        return self.by_trial or self.inner > 0

    def sizes(self, tensors: Sequence[Tensor]) -> dict[str, int] | None:
        """How long each axis is; None where the tensors do not fit."""
        found: dict[str, int] = {}
        for names, tensor in zip(self.tensors, tensors):
            shape = tensor.shape if not self.flat or names == () else (tensor.numel(),)
            if self.flat and not names:
                continue
            if len(shape) != len(names):
                return None
            for name, size in zip(names, shape):
                if name is not None and found.setdefault(name, size) != size:
                    return None
        return found if all(n in found for names in self.results for n in names if n is not None) else None

    def cut_for_results(self) -> frozenset[str]:
        """The axes along which the call may be cut where its results are judged."""
        if self.lists:
            return frozenset(n for names in self.tensors for n in names if n is not None)
        shared = [frozenset(n for n in names if n is not None) for names in self.results]
        return frozenset.intersection(*shared) - self.whole if shared else frozenset()

    def cut_for_gradient(self, position: int) -> frozenset[str]:
        """The same for the gradient of one of the arguments."""
        if self.lists:
            return self.cut_for_results()
        names = self.tensors[self.beside.get(position, position)]
        return frozenset(n for n in names if n is not None) - self.whole


Rule = Callable[["Arguments"], "Axes | None"]
_RULES: Final[dict[str, Rule]] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for functions by their last names; a name that has one is an error."""

    def register(found: Rule) -> Rule:
        for name in names:
            if _RULES.setdefault(name, found) is not found:
                raise ValueError(f"{name} has two sampling rules")
        return found

    return register


class Arguments:
    """The arguments of a call, and names for the dimensions of its tensors as a rule gives them."""

    def __init__(self, op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.op, self.args, self.kwargs = op, args, kwargs
        self.tensors = list(tensors_in((args, dict(kwargs))))
        self._names: dict[int, Names] = {}

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or name (`arguments.get(1, "dim")`)."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def call(self, tensor: Tensor, names: Names) -> None:
        """Name the dimensions of an argument."""
        self._names[id(tensor)] = names

    def is_named(self, name: str) -> bool:
        """Whether a dimension of an argument has this name."""
        return any(name in names for names in self._names.values())

    def axes(self, *results: Names, **more: Any) -> Axes | None:
        """The axes of the call; None unless every tensor has names."""
        if not all(id(t) in self._names for t in self.tensors):
            return None
        return Axes(tuple([self._names[id(t)] for t in self.tensors]), results, **more)

    def position(self, tensor: Tensor) -> int:
        """Which of the tensors this is."""
        return next(n for n, t in enumerate(self.tensors) if t is tensor)


def axes_of(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Axes | None:
    """The axes of a call; None where no rule knows it.

    >>> axes_of("torch.mm", (torch.ones(2, 3), torch.ones(3, 4)), {}).results
    (('n', 'm'),)
    """
    found = _rule_of(op)
    if found is None:
        return None
    arguments = Arguments(op, args, kwargs)
    if kwargs.get("out") is not None or not all(
        t.layout == torch.strided and not t.is_quantized and not t.is_nested for t in arguments.tensors
    ):
        return None
    axes = found(arguments)
    return axes if axes is not None and axes.sizes(arguments.tensors) is not None else None


@functools.cache
def _rule_of(op: str) -> Rule | None:
    from . import images, lists, moves, pointwise, products, rows  # noqa: F401  # they register their rules

    if not op.startswith(("torch.", "autograd.")):
        return None
    last = last_name(op)
    if lists.works_on_lists(op):
        return lists.on_lists
    return _RULES.get(last) or (pointwise.pointwise if pointwise.is_pointwise(op) else None)


def batch_names(shape: Sequence[int], letter: str) -> Names:
    """Names of the leading dimensions, counted from the last, so that they are the same after broadcasting.

    >>> batch_names((5, 1, 7), "b")
    ('b3', None, 'b1')
    """
    return tuple([f"{letter}{len(shape) - n}" if size != 1 else None for n, size in enumerate(shape)])
