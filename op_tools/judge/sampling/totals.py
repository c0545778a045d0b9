"""Calls that make one number of all elements: `sum`, `mean`, norms, and losses that are a mean over rows.

Such a number cannot be cut. The device adds up chunks in float64; from these partial results the CPU makes the total
that is judged, and some chunks are done again on the CPU, so that the partial results are not taken on trust.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from ...call.description import Tensor, tensors_in
from ...call.operators.registry import last_name
from ...compat import foreach_norm
from .axes import Affine
from .chains import as_rounded_in_order
from .places import choose
from .reduction import VARIANTS, on_device, places_on

_CHUNKS: Final = 8192
_CHECKED: Final = 6  # chunks or rows that the CPU does again
_SAMPLE: Final = 2048
_COLUMNS: Final = 16
_MAX_IN_ROWS: Final = 1 << 18  # elements of rows of losses
_AT_ONCE: Final = 1 << 22  # elements in float64 on the device


class Reduced(NamedTuple):
    """A call in place of the whole one, on tensors of the device; what it must return, or the gradients of it."""

    op: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any = None
    sent: Sequence[Tensor | None] = ()
    found: Sequence[Tensor | None] = ()


class Total:
    """How calls of one function are judged from partial results; None from a method where that cannot be done."""

    def __init__(self, op: str, function: Callable[..., Any]) -> None:
        self.op, self.function = op, function

    def elements(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        """How many there are; None for calls of another form, such as those along a dimension."""
        if len(args) != 1 or any(map(_is_given, kwargs.values())) or not isinstance(args[0], Tensor):
            return None
        return args[0].numel() if _is_long(args[0]) else None

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, rng: random.Random) -> list[Reduced]:
        """The calls that judge its result."""
        raise NotImplementedError

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any], rng: random.Random) -> Any:
        """What `backward` will need of the arguments."""
        return None

    def backward(self, kept: Any, sent: Any, found: Any, rng: random.Random) -> list[Reduced]:
        """The calls that judge its gradients."""
        return []


class Sum(Total):
    """`sum` and `mean` of all elements."""

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, rng: random.Random) -> list[Reduced]:
        x = args[0].detach()
        rows, tail = _chunks(x)
        step = max(1, _AT_ONCE // rows.shape[1])
        partial = torch.cat([part.double().sum(1) for part in rows.split(step)])
        chosen = _index(rows.shape[0], _CHECKED, x.device, rng)
        checked = Reduced("torch.sum", torch.sum, (rows.index_select(0, chosen), 1), {}, partial[chosen].float())
        if tail.numel():
            partial = torch.cat((partial, tail.sum(dtype=torch.float64).reshape(1)))
        share = 1 / x.numel() if last_name(self.op) == "mean" else 1.0
        judged = as_rounded_in_order([result], [partial], [x], lambda total: total * share, squares=False)[0]
        if share != 1:
            partial *= partial.numel() * share
        return [Reduced(self.op, self.function, (partial,), {}, judged), checked]

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any], rng: random.Random) -> Any:
        x: Tensor = args[0]
        chosen = _index(x.numel(), _SAMPLE, x.device, rng)
        return x.shape, chosen, x.detach().reshape(-1)[chosen]

    def backward(self, kept: Any, sent: Any, found: Any, rng: random.Random) -> list[Reduced]:
        (shape, chosen, few), (g,), (gradient, *_) = kept, sent, found
        if gradient.shape != shape:
            return []
        few = few.detach().requires_grad_()
        if last_name(self.op) == "mean":
            g = g.double() * (few.numel() / shape.numel())
        picked = _picked(gradient, chosen)
        return [Reduced(self.op, self.function, (few,), {}, None, [g.clone()], [picked])]


class Norm(Total):
    """The norm of all elements, of one tensor or of each in a list."""

    def elements(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        power = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
        others = [v for k, v in kwargs.items() if k not in ("ord", "p") and _is_given(v)]
        tensors = list(tensors_in(args))
        if power not in (2, 2.0, "fro") or len(args) > 2 or others or not tensors:
            return None
        return sum([t.numel() for t in tensors]) if all(t.is_contiguous() for t in tensors) else None

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, rng: random.Random) -> list[Reduced]:
        partial: list[Tensor] = []
        checked: list[Tensor] = []
        expected: list[Tensor] = []
        tensors = list(tensors_in(args))
        for tensor in tensors:
            rows, tail = _chunks(tensor.detach(), 1024)
            step = max(1, _AT_ONCE // rows.shape[1])
            found = torch.cat([torch.linalg.vector_norm(p, 2, dim=1, dtype=torch.float64) for p in rows.split(step)])
            if len(checked) < 16 or rng.random() < 0.1:
                place = rng.randrange(rows.shape[0])
                checked.append(rows[place].clone())
                expected.append(found[place].float())
            if tail.numel():
                found = torch.cat((found, torch.linalg.vector_norm(tail, 2, dtype=torch.float64).reshape(1)))
            partial.append(found)
        several = isinstance(args[0], (list, tuple))
        sums = [p.square() for p in partial]
        values = as_rounded_in_order(list(tensors_in(result)), sums, tensors, math.sqrt, squares=True)
        rest = args[1:]
        return [
            Reduced(
                self.op,
                self.function,
                ((partial if several else partial[0]), *rest),
                kwargs,
                values if several else values[0],
            ),
            Reduced("torch._foreach_norm", foreach_norm, (checked,), {}, expected),
        ]


class CrossEntropy(Total):
    """`cross_entropy` and `nll_loss` of class indices, as a mean or sum over rows."""

    _NAMES: Final = (
        "input",
        "target",
        "weight",
        "size_average",
        "ignore_index",
        "reduce",
        "reduction",
        "label_smoothing",
    )

    def _named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {"weight": None, "ignore_index": -100, "reduction": "mean", **dict(zip(self._NAMES, args)), **kwargs}

    def elements(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        named = self._named(args, kwargs)
        x, target = named["input"], named["target"]
        if named.get("size_average") is not None or named.get("reduce") is not None or x.dim() != 2:
            return None
        if target.dim() != 1 or named["reduction"] == "none" or target.is_floating_point():
            return None
        if named["weight"] is not None and named.get("label_smoothing"):
            return None  # of smoothed losses, the weights are shared otherwise
        return int(x.numel())

    def _rows(self, named: dict[str, Any], some: Any) -> Reduced:
        """The losses of some rows, one for each."""
        more = {k: v for k, v in named.items() if k not in ("input", "target") and v is not None}
        x, target = named["input"].detach()[some], named["target"][some]
        return Reduced(self.op, self.function, (x, target), {**more, "reduction": "none"})

    def _some(self, x: Tensor, rng: random.Random) -> Tensor:
        return _index(x.shape[0], max(4, min(4 * _CHECKED, _MAX_IN_ROWS // x.shape[1])), x.device, rng)

    def _weights(self, named: dict[str, Any]) -> Tensor:
        """By how much a mean is divided, in float64."""
        target: Tensor = named["target"]
        counted: Tensor = target != named["ignore_index"]
        if named["weight"] is None:
            return counted.sum(dtype=torch.float64)
        weights: Tensor = named["weight"].double()[target.clamp(min=0)]
        return (weights * counted).sum()

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, rng: random.Random) -> list[Reduced]:
        named = self._named(args, kwargs)
        x = named["input"]
        step = max(1, _AT_ONCE // x.shape[1])
        losses = []
        for start in range(0, x.shape[0], step):
            part = self._rows(named, slice(start, start + step))
            widened = {k: v.double() if isinstance(v, Tensor) else v for k, v in part.kwargs.items()}
            losses.append(part.function(part.args[0].double(), part.args[1], **widened))
        rows = torch.cat(losses)
        chosen = self._some(x, rng)
        checked = self._rows(named, chosen)._replace(result=rows[chosen].float())
        if named["reduction"] == "mean":
            rows = rows / self._weights(named)
        return [self._summed(rows, x, result), checked]

    def _summed(self, rows: Tensor, x: Tensor, result: Tensor) -> Reduced:
        """The sum of these losses by the same function, which rounds as the whole call does: a row of two logits each.

        A loss of l has logits 0 and log(exp(l) - 1). The weights, which are all one, have the dtype of the whole call.
        """
        rows = rows.clamp(min=1e-30)
        other = rows + torch.log(-torch.expm1(-rows))
        few, first = torch.stack((torch.zeros_like(rows), other), 1), torch.zeros_like(rows, dtype=torch.int64)
        if last_name(self.op) == "nll_loss":
            few = torch.stack((-rows, rows), 1)
        weight = torch.ones(2, dtype=x.dtype, device=x.device)
        named = {"weight": weight, "reduction": "sum"}
        return Reduced(self.op, self.function, (few, first), named, result.detach().clone())

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any], rng: random.Random) -> Any:
        named = self._named(args, kwargs)
        chosen = self._some(named["input"], rng)
        return chosen, self._rows(named, chosen), self._weights(named) if named["reduction"] == "mean" else None

    def backward(self, kept: Any, sent: Any, found: Any, rng: random.Random) -> list[Reduced]:
        (chosen, part, weights), (g,), gradient = kept, sent, found[0]
        if gradient is None or any(f is not None for f in found[1:]):
            return []
        if weights is not None:
            g = g.double() / weights
        few = (part.args[0].detach().requires_grad_(), part.args[1])
        others = [None] * (len(list(tensors_in((few, part.kwargs)))) - 1)
        kwargs = {**part.kwargs, "reduction": "sum"}
        return [part._replace(args=few, kwargs=kwargs, sent=[g.clone()], found=[gradient.detach()[chosen], *others])]


class Reshaped(Total):
    """`view`, `reshape` and the like: the elements stay in their order, and some of them stand for all."""

    def elements(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        tensors = list(tensors_in((args, kwargs)))
        given = args[1] if len(args) > 1 else None
        if not tensors or isinstance(given, torch.dtype) or not tensors[0].numel():
            return None
        return 2 * tensors[0].numel()

    def _args(self, few: Tensor) -> tuple[Any, ...]:
        last, count = last_name(self.op), few.numel()
        more: dict[str, tuple[Any, ...]] = {"view": (count,), "reshape": ((count,),), "unflatten": (0, (count,))}
        return (few, *more.get(last, ()))

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, rng: random.Random) -> list[Reduced]:
        x = next(tensors_in((args, kwargs)))
        if not isinstance(result, Tensor) or result.numel() != x.numel() or result.dtype != x.dtype:
            return []
        few, ours = self._picked((x, result), rng)
        return [Reduced(self.op, self.function, self._args(few), {}, ours)]

    def backward(self, kept: Any, sent: Any, found: Any, rng: random.Random) -> list[Reduced]:
        (g, *_), (gradient, *_) = sent, found
        if gradient is None or g is None or g.numel() != gradient.numel():
            return []
        came, ours = self._picked((g, gradient), rng)
        args = self._args(torch.zeros_like(ours).requires_grad_())
        return [Reduced(self.op, self.function, args, {}, None, [came], [ours])]

    def _picked(self, tensors: Sequence[Tensor], rng: random.Random) -> list[Tensor]:
        """The same elements of both, counted in the order of their dimensions."""
        first = tensors[0]
        seed, count = rng.randrange(VARIANTS), min(_SAMPLE, first.numel())
        return [t.detach()[_places_in(t.shape, count, t.device, seed)] for t in tensors]


@functools.lru_cache(maxsize=512)
def _places_in(shape: torch.Size, count: int, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    """Some elements of a tensor of this shape, as one index for each dimension."""
    flat = torch.tensor(choose(shape.numel(), 1, count, random.Random(seed)), dtype=torch.int64)
    found = torch.unravel_index(flat, shape)
    return tuple([on_device(index, device) for index in found])


class Columns(NamedTuple):
    """Some columns of what a norm normalised, without weight and bias."""

    places: Tensor
    normalised: Tensor


def columns_of(
    affine: Affine, call: tuple[str, Callable[..., Any]], x: Tensor, rng: random.Random
) -> tuple[Columns, Reduced]:
    """What the gradients of weight and bias need of a norm's argument; and a call that checks some rows of it.

    Mean and variance of each row are computed on the device, in float64.
    """
    shape = x.shape[x.dim() - affine.dims :]
    rows = x.detach().reshape(-1, shape.numel())
    eps = torch.finfo(x.dtype).eps if affine.eps is None else affine.eps

    def normalised(part: Tensor) -> Tensor:
        wide = part.double()
        if affine.centred:  # one kernel for all of it
            return torch.native_layer_norm(wide, [shape.numel()], None, None, eps)[0]
        return wide * wide.square().mean(1, keepdim=True).add_(eps).rsqrt_()

    single = torch.float64 if x.dtype == torch.float64 else torch.float32
    places = _index(rows.shape[1], _COLUMNS, x.device, rng)
    columns = [
        normalised(part).index_select(1, places) for part in rows.split(max(1, _AT_ONCE // max(1, rows.shape[1])))
    ]
    few = rows.index_select(0, _index(rows.shape[0], _CHECKED, x.device, rng))
    result = normalised(few).to(single).view(-1, *shape)
    args = (few.view(-1, *shape), tuple(shape), None, *([None] if affine.centred else []), affine.eps)
    whole = columns[0] if len(columns) == 1 else torch.cat(columns)
    return Columns(places, whole.to(single)), Reduced(*call, args, {}, result)


def columns_backward(
    affine: Affine, kept: Columns, sent: Tensor, found: Sequence[Tensor | None], wanted: Sequence[int]
) -> Reduced:
    """The gradients of weight and bias at some columns, as those of `weight · normalised + bias`."""
    _, weight, bias = affine.positions
    places, columns = kept
    came = sent.detach().reshape(len(columns), -1).index_select(1, places)
    of_weight, of_bias = [
        None if at not in wanted or at is None or (g := found[at]) is None else g.detach().reshape(-1)[places]
        for at in (weight, bias)
    ]
    ones = torch.ones_like(columns[0] if of_weight is None else of_weight).requires_grad_(of_weight is not None)
    if of_bias is None:
        return Reduced("torch.mul", torch.mul, (columns, ones), {}, None, [came], [None, of_weight])
    zeros = torch.zeros_like(of_bias).requires_grad_()
    return Reduced("torch.addcmul", torch.addcmul, (zeros, columns, ones), {}, None, [came], [of_bias, None, of_weight])


_TOTALS: Final[dict[str, type[Total]]] = {
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "ravel"), Reshaped),
    "sum": Sum,
    "mean": Sum,
    "norm": Norm,
    "vector_norm": Norm,
    "_foreach_norm": Norm,
    "cross_entropy": CrossEntropy,
    "nll_loss": CrossEntropy,
}


def total_of(op: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Total | None:
    """How a call is judged from partial results; None where no rule knows it."""
    kind = _TOTALS.get(last_name(op)) if op.startswith("torch.") else None
    found = None if kind is None else kind(op, function)
    return None if found is None or found.elements(args, kwargs) is None else found


def _is_given(value: Any) -> bool:
    """Whether an option has another value than that of a call without it."""
    return value is not None and value is not False


def _is_long(x: Tensor) -> bool:
    return x.is_contiguous() and x.is_floating_point()


def _chunks(x: Tensor, most: int = _CHUNKS) -> tuple[Tensor, Tensor]:
    """All elements as rows of equal length, and those that are left over."""
    flat = x.reshape(-1)
    length = max(1, -(-flat.numel() // most))
    count = flat.numel() // length
    return flat[: count * length].view(count, length), flat[count * length :]


def _index(size: int, count: int, device: torch.device, rng: random.Random) -> Tensor:
    return places_on(device, size, 1, count, rng.randrange(VARIANTS))


def _picked(x: Tensor, places: Tensor) -> Tensor:
    """Elements by their place in order, without a copy of what is expanded."""
    if not any(x.stride()):
        return x.detach().as_strided((1,), (1,)).expand(places.shape).clone()
    return x.detach().reshape(-1)[places]
