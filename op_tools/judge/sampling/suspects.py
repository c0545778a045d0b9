"""Where an error is most likely: all elements of a large call take part on the device, and the worst join the sample.

A product is checked by random sums: y·r against x·(w·r), for the rows and for the columns of the result. Any other call
is run once more in a wider dtype. Nothing is decided here: what stands out is judged on the CPU like the rest of the
sample. Nothing is waited for, either: the places stay on the device.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

from ...call.description import Tensor, map_tensors, tensors_in
from .axes import Axes, Names, Product
from .reduction import VARIANTS, Index

_BLOCKS: Final = 256
_AT_ONCE: Final = 1 << 25  # elements of a tensor in a wider dtype
_HALVES: Final = (torch.float16, torch.bfloat16)


class Call(NamedTuple):
    """A call on the device, with what it returned or the gradients of it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rounded_to: torch.dtype | None  # by autocast
    results: Sequence[Tensor]  # of a forward
    sent: Sequence[Tensor | None] = ()
    found: dict[int, Tensor] = {}  # noqa: RUF012  # gradients that are judged, by position
    each: int = 2  # places from one ranking


class _Worst:
    """The worst places so far, by axis."""

    def __init__(self, cut: frozenset[str], count: int) -> None:
        self._cut, self._count = cut, count
        self._values: list[Tensor] = []
        self._places: list[dict[str, Tensor]] = []

    def add(self, names: Names, rank: Tensor, start: dict[str, int] | None = None) -> None:
        """Rank some elements, whose dimensions have these names and begin at `start`."""
        values, places = _largest(rank.reshape(-1), self._count)
        found = {}
        for name, size in zip(reversed(names), reversed(rank.shape)):
            if name in self._cut and name is not None:
                found[name] = places % size + (start or {}).get(name, 0)
            places = places // size
        self._values.append(values.float())
        self._places.append(found)

    def places(self) -> Index:
        """The places to look at, along each axis."""
        if not self._values:
            return {}
        values = torch.cat(self._values)
        best = values.topk(min(self._count, values.numel())).indices if len(self._values) > 1 else None
        found: Index = {}
        for name in self._places[0]:
            every = torch.cat([places[name] for places in self._places])
            found[name] = every if best is None else every[best]
        return found


def _largest(rank: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
    """Some of the largest numbers of a long row, and where they are: the largest ones of its blocks."""
    count = rank.numel()
    if count <= _BLOCKS * _BLOCKS:
        values, places = rank.topk(min(wanted, count))
        return values, places
    length = count // _BLOCKS
    values, places = rank[: length * _BLOCKS].view(_BLOCKS, length).max(1)
    places = places + _firsts(length, rank.device)
    if length * _BLOCKS < count:
        last, place = rank[length * _BLOCKS :].max(0, keepdim=True)
        values, places = torch.cat((values, last)), torch.cat((places, place + length * _BLOCKS))
    values, best = values.topk(wanted)
    return values, places[best]


@functools.lru_cache(maxsize=256)
def _firsts(length: int, device: torch.device) -> Tensor:
    return torch.arange(_BLOCKS, device=device) * length


def find(axes: Axes, cut: frozenset[str], call: Call, rng: random.Random) -> list[Index]:
    """Places that stand out, from one or several rankings; empty where there is no way to rank them."""
    if axes.product is not None:
        return list(_by_projection(axes, axes.product, cut, call, rng))
    return _by_wider_run(axes, cut, call)


# --- products -----------------------------------------------------------------------------------------------


def _by_projection(
    axes: Axes, product: Product, cut: frozenset[str], call: Call, rng: random.Random
) -> Iterator[Index]:
    tensors = list(tensors_in((call.args, call.kwargs)))
    result = axes.results[0]
    left, right = product.operands
    sides = [(tensors[left], axes.tensors[left]), (tensors[right], axes.tensors[right])]
    if call.found:
        target = next((n for n in call.found if n in product.operands), None)
        if target is None or call.sent[0] is None:
            return
        judged, names = call.found[target], axes.tensors[target]
        sides[product.operands.index(target)] = (call.sent[0], result)
    else:
        judged, names = call.results[0], result
    if any(None in own for _, own in sides) or None in names:
        return
    wide = torch.float32 if judged.dtype in _HALVES or call.rounded_to is not None else torch.float64
    shared = set(sides[0][1]) & set(sides[1][1])
    for name in names:
        if name is None or name not in cut or name in shared or name not in product.over:
            continue  # what both sides have is no row or column
        size = judged.shape[names.index(name)]
        signs = _signs(size, judged.device, wide, rng.randrange(VARIANTS))
        (p, p_names), (q, q_names) = sides if name in sides[0][1] else reversed(sides)
        rest = tuple([n for n in names if n != name])
        low = call.rounded_to
        p_sum = _summed(signs, (name,), p, p_names, tuple([n for n in p_names if n != name]), low)
        expected = _summed(p_sum, tuple([n for n in p_names if n != name]), q, q_names, rest, low)
        if product.alpha != 1:
            expected *= product.alpha
        ours = _summed(signs, (name,), judged, names, rest, None)
        if not call.found and product.added is not None:
            added, own = tensors[product.added], axes.tensors[product.added]
            if None in own:
                return
            more = _placed(_summed(signs, (name,), added, own, None, None), own, name, rest)
            expected = expected + product.beta * more
        size_of = torch.linalg.vector_norm(judged.detach(), 2, dim=names.index(name), dtype=wide)
        worst = _Worst(cut, call.each)
        worst.add(rest, (ours - expected).abs() / (size_of + expected.abs() + torch.finfo(wide).tiny))
        yield worst.places()


@functools.lru_cache(maxsize=256)
def _signs(size: int, device: torch.device, dtype: torch.dtype, seed: int) -> Tensor:
    """Random signs."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(0, 2, (size,), generator=generator) * 2 - 1).to(device, dtype)


def _summed(
    narrow: Tensor, narrow_names: Names, full: Tensor, names: Names, out: Names | None, low: torch.dtype | None
) -> Tensor:
    """A sum of products as in `einsum`, of a tensor in a wide dtype and one that is widened part by part."""
    full = full.detach()
    if out is None:  # the sum over what the first has; what the second lacks is summed up alone
        shared = [n for n in narrow_names if n in names]
        if not shared:
            return full.to(narrow.dtype) * narrow.sum()
        out = tuple([n for n in names if n not in narrow_names])
    if full.numel() <= _AT_ONCE:
        return _einsum(narrow, narrow_names, _widened(full, narrow.dtype, low), names, out)
    dim = max(range(full.dim()), key=lambda n: full.shape[n])
    step = max(1, _AT_ONCE * full.shape[dim] // full.numel())
    name, parts = names[dim], []
    for start in range(0, full.shape[dim], step):
        part, beside = full.narrow(dim, start, min(step, full.shape[dim] - start)), narrow
        if name in narrow_names:
            beside = narrow.narrow(narrow_names.index(name), start, part.shape[dim])
        parts.append(_einsum(beside, narrow_names, _widened(part, narrow.dtype, low), names, out))
    return torch.cat(parts, out.index(name)) if name in out else torch.stack(parts).sum(0)


def _einsum(a: Tensor, a_names: Names, b: Tensor, b_names: Names, out: Names) -> Tensor:
    letters = {name: chr(97 + n) for n, name in enumerate(dict.fromkeys((*a_names, *b_names)))}
    texts = ["".join([letters[n] for n in names]) for names in (a_names, b_names, out)]
    return torch.einsum(f"{texts[0]},{texts[1]}->{texts[2]}", a, b)


def _widened(tensor: Tensor, dtype: torch.dtype, low: torch.dtype | None) -> Tensor:
    if low is not None and tensor.dtype == torch.float32:
        tensor = tensor.to(low)
    return tensor.to(dtype)


def _placed(value: Tensor, own: Names, gone: str, rest: Names) -> Tensor:
    """A tensor with some of the dimensions of another, in the shape that broadcasts to it."""
    own = tuple([n for n in own if n != gone])
    shape = [value.shape[own.index(n)] if n in own else 1 for n in rest]
    return value.reshape(shape)


# --- all other calls ----------------------------------------------------------------------------------------


def _by_wider_run(axes: Axes, cut: frozenset[str], call: Call) -> list[Index]:
    tensors = list(tensors_in((call.args, call.kwargs)))
    targets = [(axes.tensors[n], g) for n, g in call.found.items()] or list(zip(axes.results, call.results))
    if not targets or axes.lists or not all(t.is_floating_point() for _, t in targets):
        return []
    low = all(t.dtype in _HALVES or not t.is_floating_point() for t in tensors) or call.rounded_to is not None
    wide = torch.float32 if low else torch.float64
    names = axes.tensors[: len(tensors)]
    step_name, size, step = _steps(axes, cut, tensors, names)
    by_size, by_share = _Worst(cut, call.each), _Worst(cut, call.each)
    for start in range(0, size, step):
        count = min(step, size - start)

        def part(tensor: Tensor, own: Names, start: int = start, count: int = count) -> Tensor:
            if axes.flat and own:
                return tensor.detach().reshape(-1).narrow(0, start, count)
            if step_name is None or step_name not in own:
                return tensor.detach()
            return tensor.detach().narrow(own.index(step_name), start, count)

        expected = _run_wide(call, axes, names, part, wide)
        for (own, target), reference in zip(targets, expected):
            if reference is None:
                return []
            if not cut <= set(own):  # a bias beside its weight
                continue
            ours = part(target, own)
            error = (ours.to(wide) - reference.reshape(ours.shape)).abs_()
            scale = reference.reshape(ours.shape).abs()
            error = torch.where(ours == reference.reshape(ours.shape), torch.zeros_like(error), error)
            begin = {} if step_name is None else {step_name: start}
            flat = own if not axes.flat else ("e",)
            by_size.add(flat, error, begin)
            by_share.add(flat, error.div_(scale.add_(torch.finfo(wide).tiny)), begin)
    return [by_size.places(), by_share.places()]


def _steps(
    axes: Axes, cut: frozenset[str], tensors: Sequence[Tensor], names: Sequence[Names]
) -> tuple[str | None, int, int]:
    """The axis along which the call is done in parts, how long it is, and how much of it at once."""
    total = sum([t.numel() for t in tensors])
    possible: dict[str, int] = {}
    for own, tensor in zip(names, tensors):
        shape = (tensor.numel(),) if axes.flat and own else tensor.shape
        possible.update({n: s for n, s in zip(own, shape) if n in cut and n is not None and n not in axes.ordered})
    if not possible or (total <= 2 * _AT_ONCE and not axes.flat):
        return None, 1, 1
    name = max(possible, key=lambda n: possible[n])
    return name, possible[name], max(1, possible[name] * _AT_ONCE // max(total, _AT_ONCE))


def _run_wide(
    call: Call, axes: Axes, names: Sequence[Names], part: Callable[[Tensor, Names], Tensor], wide: torch.dtype
) -> list[Tensor | None]:
    own = iter(names)
    leaves: list[Tensor] = []

    def widen(tensor: Tensor) -> Tensor:
        cut = part(tensor, next(own))
        wider = _widened(cut, wide, call.rounded_to) if cut.is_floating_point() else cut
        if wider is cut:  # which the call may write to
            wider = cut.clone()
        number = len(leaves)
        leaves.append(wider.detach().requires_grad_() if number in call.found else wider)
        return leaves[-1]

    with torch.set_grad_enabled(bool(call.found)):
        args, kwargs = map_tensors((call.args, call.kwargs), widen)
        outputs = list(tensors_in(call.function(*args, **kwargs)))
    if not call.found:
        return list(outputs)
    pairs = [(o, g) for o, g in zip(outputs, call.sent) if g is not None and o.requires_grad]
    sent = [part(g, axes.results[n]).to(o.dtype).reshape(o.shape) for n, (o, g) in enumerate(pairs)]
    wanted = [leaves[n] for n in call.found]
    return list(torch.autograd.grad([o for o, _ in pairs], wanted, sent, allow_unused=True))
