"""Where an error is most likely: all elements of a large call take part on the device, and the worst join the sample.

A product is checked by random sums: y·r against x·(w·r), for the rows and for the columns of the result. Any other call
is run once more in a wider dtype. Nothing is decided here: what stands out is judged on the CPU like the rest of the
sample. Nothing is waited for, either: the places stay on the device.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

from ...call.description import Tensor, map_tensors, tensors_in
from ...call.devices import quiet
from .axes import Axes, Names, Product
from .reduction import VARIANTS, Index, on_device

_AT_ONCE: Final = 1 << 24  # elements of a tensor in a wider dtype
_HALVES: Final = (torch.float16, torch.bfloat16)


class Projected(NamedTuple):
    """An operand of a product summed up over an axis with random signs, kept for the gradient of the other operand."""

    over: str
    signs: Tensor
    sums: Tensor  # with the other axes of the operand as rows


class Call(NamedTuple):
    """A call on the device, with what it returned or the gradients of it."""

    function: Callable[..., Any]
    value: tuple[Any, Any]  # (args, kwargs)
    tensors: Sequence[Tensor | None]  # in these; None for those that are lost
    rounded_to: torch.dtype | None  # by autocast
    results: Sequence[Tensor]  # of a forward
    sent: Sequence[Tensor | None] = ()
    found: dict[int, Tensor] = {}  # noqa: RUF012  # gradients that are judged, by position
    projected: Projected | None = None
    each: int = 2  # places from one ranking


class _Worst:
    """The worst places so far, by axis: one from each of some blocks."""

    def __init__(self, cut: frozenset[str], blocks: int) -> None:
        self._cut, self._blocks = cut, blocks
        self._values: list[Tensor] = []
        self._places: list[dict[str, Tensor]] = []

    def add(self, names: Names, rank: Tensor, start: dict[str, int] | None = None) -> None:
        """Rank some elements, whose dimensions have these names and begin at `start`."""
        flat, blocks = rank.reshape(-1), self._blocks
        count = flat.numel()
        if blocks == 1 or count % blocks or count < 64 * blocks:
            place = flat.argmax(0, keepdim=True)
        else:
            place = flat.view(blocks, -1).argmax(1) + _firsts(blocks, count // blocks, flat.device)
        self._values.append(flat[place])
        found = {}
        inner = 1
        for name, size in zip(reversed(names), reversed(rank.shape)):
            if name in self._cut and name is not None:
                along = place if inner == 1 else place // inner
                if inner * size < count:
                    along = along % size
                begin = (start or {}).get(name, 0)
                found[name] = along + begin if begin else along
            inner *= size
        self._places.append(found)

    def places(self) -> Index:
        """The places to look at, along each axis."""
        if len(self._places) < 2:
            return self._places[0] if self._places else {}
        values = torch.cat(self._values)
        best = values.topk(min(self._blocks, len(values))).indices
        return {name: torch.cat([places[name] for places in self._places])[best] for name in self._places[0]}


@functools.lru_cache(maxsize=256)
def _firsts(blocks: int, length: int, device: torch.device) -> Tensor:
    return torch.arange(blocks, device=device) * length


def find(axes: Axes, cut: frozenset[str], call: Call, rng: random.Random) -> list[Index]:
    """Places that stand out, from one or several rankings; empty where there is no way to rank them."""
    if axes.product is None:
        return _by_wider_run(axes, cut, call)
    found = _by_matrices(axes, axes.product, cut, call, rng)
    return list(_by_projection(axes, axes.product, cut, call, rng)) if found is None else found


# --- products -----------------------------------------------------------------------------------------------


def _sides(axes: Axes, product: Product, call: Call) -> tuple[Tensor, Names, list[Tensor | None], list[Names]] | None:
    """What is judged with its names, and both sides of the product that it must equal; None for a bias alone."""
    sides = [call.tensors[n] for n in product.operands]
    names = [axes.tensors[n] for n in product.operands]
    if not call.found:
        return call.results[0], axes.results[0], sides, names
    target = next((n for n in call.found if n in product.operands), None)
    if target is None or call.sent[0] is None:
        return None
    place = product.operands.index(target)
    sides[place], names[place] = call.sent[0], axes.results[0]
    return call.found[target], axes.tensors[target], sides, names


def _by_matrices(
    axes: Axes, product: Product, cut: frozenset[str], call: Call, rng: random.Random
) -> list[Index] | None:
    """The row and the column of judged[a, b] = left[a, c] · right[b, c] that stand out; None for other products."""
    known = _sides(axes, product, call)
    if known is None:
        return []
    judged, own, (left, right), names = known
    a, b, c = _outer(own, *names)
    if a is None or b is None or c is None:
        return None
    wide = torch.float32 if judged.dtype in _HALVES or call.rounded_to is not None else torch.float64
    low, bias = call.rounded_to, None
    if not call.found and product.added is not None:
        bias = call.tensors[product.added]
        if bias is None or axes.tensors[product.added] != b:
            return None
        bias = bias.detach().to(wide)
    matrix = _matrix(judged, own, a, b, wide)
    if left is not None and right is not None:
        left, right = _matrix(left, names[0], a, c, wide, low), _matrix(right, names[1], b, c, wide, low)
        signs = [_signs(n, judged.device, wide, rng.randrange(VARIANTS)) for n in matrix.shape]
        expected = [_times(right, _times(left, signs[0], True)), _times(left, _times(right, signs[1], True))]
    elif call.projected is not None:  # of the side that is lost, its sums over one axis were kept
        over, signs_over, sums = call.projected
        if (left is None and a != (over,)) or (right is None and b != (over,)):
            return []
        other = _matrix(right, names[1], b, c, wide) if right is not None else None
        if left is not None:
            other = _matrix(left, names[0], a, c, wide)
            matrix, a, b = matrix.t(), b, a
        assert other is not None
        sums = _times(other, sums.to(wide))
        return [_standing_out(matrix, signs_over.to(wide), sums, b, judged, own, cut, call.each)]
    else:
        return []
    found = []
    for dim, line in ((0, b), (1, a)):  # sums over rows tell a column
        sums = expected[dim] * product.alpha if product.alpha != 1 else expected[dim]
        if bias is not None:
            sums = sums + product.beta * (bias * signs[0].sum() if dim == 0 else bias @ signs[1])
        turned = matrix if dim == 0 else matrix.t()
        found.append(_standing_out(turned, signs[dim], sums, line, judged, own, cut, call.each))
    return found


def project(
    axes: Axes, positions: Sequence[int], tensors: Sequence[Tensor], low: torch.dtype | None, rng: random.Random
) -> Projected | None:
    """Sums of the other operand of a product over one of its axes, for the gradient of the one at these positions."""
    product = axes.product
    target = next((n for n in positions if product is not None and n in product.operands), None)
    if product is None or target is None:
        return None
    left, right = product.operands
    other, own = (right, axes.tensors[right]) if target == left else (left, axes.tensors[left])
    a, b, c = _outer(axes.tensors[target], axes.results[0], own)
    if a is None or b is None or c is None or len(b) != 1 or b[0] is None:
        return None
    tensor = tensors[other]
    wide = torch.float32 if tensor.dtype in _HALVES or low is not None else torch.float64
    with quiet():
        matrix = _matrix(tensor, own, c, b, wide, low)
        signs = _signs(matrix.shape[1], matrix.device, wide, rng.randrange(VARIANTS))
        return Projected(b[0], signs, _times(matrix, signs))


def _outer(own: Names, left: Names, right: Names) -> tuple[Names | None, Names | None, Names | None]:
    """The axes that only the left has, those that only the right has, and those that are summed over; or None."""
    a = tuple([n for n in own if n in left and n is not None])
    b = tuple([n for n in own if n in right and n is not None])
    c = tuple([n for n in left if n in right and n not in own and n is not None])
    if {*a} & {*b} or {*left, *right} - {*a, *b, *c, None} or not (a and b and c):
        return None, None, None
    return a, b, c


def _matrix(
    tensor: Tensor, own: Names, rows: Names, columns: Names, wide: torch.dtype, low: torch.dtype | None = None
) -> Tensor:
    """A tensor as a matrix with some of its axes as rows and the others as columns; widened unless it is large."""
    order = [own.index(n) for n in (*rows, *columns)] + [n for n, name in enumerate(own) if name is None]
    height = math.prod([tensor.shape[own.index(n)] for n in rows])
    matrix = tensor.detach().permute(order).reshape(height, -1)
    if low is not None and matrix.dtype == torch.float32:
        matrix = matrix.to(low)
    return matrix.to(wide) if matrix.numel() <= _AT_ONCE else matrix


def _times(matrix: Tensor, vector: Tensor, transposed: bool = False) -> Tensor:
    """A matrix, or its transpose, times a vector in a wide dtype; a large one part by part."""
    if matrix.dtype == vector.dtype:
        return (matrix.t() if transposed else matrix) @ vector
    step = max(1, _AT_ONCE // matrix.shape[1])
    parts = [part.to(vector.dtype) for part in matrix.split(step)] if matrix.numel() <= _AT_ONCE else None
    if parts is None and transposed:
        found = torch.zeros(matrix.shape[1], dtype=vector.dtype, device=vector.device)
        for part, some in zip(matrix.split(step), vector.split(step)):
            found += part.to(vector.dtype).t() @ some
        return found
    if parts is None:
        return torch.cat([part.to(vector.dtype) @ vector for part in matrix.split(step)])
    return torch.cat([part @ vector for part in parts]) if not transposed else parts[0].t() @ vector


def _standing_out(
    matrix: Tensor,
    signs: Tensor,
    expected: Tensor,
    line: Names,
    judged: Tensor,
    own: Names,
    cut: frozenset[str],
    each: int,
) -> Index:
    """The line across which a random sum is furthest from what it must be, compared with its length."""
    sums = _times(matrix, signs, True)
    length = torch.linalg.vector_norm(matrix, 2, dim=0, dtype=signs.dtype)
    rank = (sums - expected).abs_().div_(length.add_(torch.finfo(signs.dtype).tiny))
    worst = _Worst(cut, each)
    worst.add(line, rank.view([judged.shape[own.index(n)] for n in line]))
    return worst.places()


def _by_projection(
    axes: Axes, product: Product, cut: frozenset[str], call: Call, rng: random.Random
) -> Iterator[Index]:
    known = _sides(axes, product, call)
    if known is None:
        return
    judged, names, both, both_names = known
    sides = [(t, own) for t, own in zip(both, both_names) if t is not None]
    if len(sides) < 2 or any(None in own for _, own in sides) or None in names:
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
            added, own = call.tensors[product.added], axes.tensors[product.added]
            if added is None or None in own:
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
    return on_device((torch.randint(0, 2, (size,), generator=generator) * 2 - 1).to(dtype), device)


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
    if any(t is None for t in call.tensors):
        return []
    tensors = list(tensors_in(call.value))
    targets = [(axes.tensors[n], g) for n, g in call.found.items()] or list(zip(axes.results, call.results))
    if not targets or axes.lists or not all(t.is_floating_point() for _, t in targets):
        return []
    low = all(t.dtype in _HALVES or not t.is_floating_point() for t in tensors) or call.rounded_to is not None
    wide = torch.float32 if low else torch.float64
    names = axes.tensors[: len(tensors)]
    step_name, size, step = _steps(axes, cut, tensors, names, wide.itemsize)
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
            reference = reference.reshape(ours.shape)
            error = torch.sub(ours, reference).abs_().masked_fill_(ours == reference, 0.0)  # both may be infinite
            begin = {} if step_name is None else {step_name: start}
            flat = own if not axes.flat else ("e",)
            by_size.add(flat, error, begin)
            by_share.add(flat, error.div_(reference.abs_().add_(torch.finfo(wide).tiny)), begin)
    return [by_size.places(), by_share.places()]


def _steps(
    axes: Axes, cut: frozenset[str], tensors: Sequence[Tensor], names: Sequence[Names], itemsize: int
) -> tuple[str | None, int, int]:
    """The axis along which the call is done in parts, how long it is, and how much of it at once."""
    total, most = max(axes.inner, sum([t.numel() for t in tensors])), _AT_ONCE * 4 // itemsize
    possible: dict[str, int] = {}
    for own, tensor in zip(names, tensors):
        shape = (tensor.numel(),) if axes.flat and own else tensor.shape
        possible.update({n: s for n, s in zip(own, shape) if n in cut and n is not None and n not in axes.ordered})
    if not possible or (total <= most and not axes.flat):
        return None, 1, 1
    name = max(possible, key=lambda n: possible[n])
    return name, possible[name], max(1, possible[name] * most // max(total, most))


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
        args, kwargs = map_tensors(call.value, widen)
        outputs = list(tensors_in(call.function(*args, **kwargs)))
    if not call.found:
        return list(outputs)
    pairs = [(o, g) for o, g in zip(outputs, call.sent) if g is not None and o.requires_grad]
    sent = [part(g, axes.results[n]).to(o.dtype).reshape(o.shape) for n, (o, g) in enumerate(pairs)]
    wanted = [leaves[n] for n in call.found]
    return list(torch.autograd.grad([o for o, _ in pairs], wanted, sent, allow_unused=True))
