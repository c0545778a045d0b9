"""Axes of calls that no rule knows, such as operators of the user's own, found by trial.

Dimensions are lined up from the last one, as in broadcasting. The call may be cut along one of them if the golden run
of the cut call has the results of the golden run of the whole call there. The run waits for trials, once for each kind
of call, so each is done on a corner of the call: all of the dimension that is tried, and some places of all others,
from their beginning to their end, since an operator may treat half of its channels in another way. Where there is no
golden run of a corner, or one of nothing but zeros, the whole call is tried.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from ...call.description import Tensor, map_tensors, tensors_in
from .axes import Axes, Names
from .places import choose
from .reduction import Index, cut_tensor

_PLACES: Final = 5
_FEW: Final = 16  # places of a corner along dimensions that are not tried
_MAX_IN_CORNER: Final = 1 << 20  # elements of the arguments
_MAX_ELEMENTS: Final = 1 << 27  # of the arguments of a whole call
_ROUNDINGS: Final = 256.0  # by which runs with other vector lengths may differ

Run = Callable[[Any], Sequence[Tensor] | None]  # from (args, kwargs) on the CPU to the golden results, if there are any


def axes_by_trial(value: tuple[Any, Any], run: Run) -> Axes | None:
    """The axes of a call, on any device, along which it may be cut; None where there are none.

    >>> x = torch.randn(5, 9, 7, dtype=torch.float64)
    >>> axes_by_trial(((x,), {}), lambda value: [value[0][0].cumsum(1)]).results
    (('d3', None, 'd1'),)
    """
    given = list(tensors_in(value))
    found = _by_corners(value, given, run) if given else None
    if found is not None:
        return found[0]
    if not given or sum([t.numel() for t in given]) > _MAX_ELEMENTS:
        return None
    value = _corner(value, {})
    expected = run(value)
    if not expected or not any(t.is_floating_point() for t in expected):
        return None
    axes: dict[int, int] = {}
    for place in range(1, max([t.dim() for t in expected]) + 1):
        if (size := _size([*given, *expected], place)) and _holds(value, expected, run, {place: size}, 1):
            axes[place] = size
    if not axes or (len(axes) > 1 and not _holds(value, expected, run, axes, 2)):
        return None
    return _axes(given, [_names(t, axes) for t in expected], axes)


def _by_corners(value: Any, given: Sequence[Tensor], run: Run) -> tuple[Axes | None] | None:
    """What corners of the call show; None where they show nothing."""
    sizes = {n: size for n in range(1, max([t.dim() for t in given]) + 1) if (size := _size(given, n))}
    if all(size <= _FEW for size in sizes.values()):
        return None
    axes: dict[int, int] = {}
    for place, size in sizes.items():
        few = {n: _FEW for n in sizes if n != place}
        corner, expected = _golden_corner(value, few, run)
        if expected is None:
            return None
        if _size([*tensors_in(corner), *expected], place) == size and _holds(corner, expected, run, {place: size}, 1):
            axes[place] = size
    if not axes:
        return (None,)
    # together: all of the others, and as much of these as there is room for
    rest = max([math.prod([s for n, s in enumerate(reversed(t.shape), 1) if n not in axes]) for t in given])
    room = max(2, int((_MAX_IN_CORNER / len(given) / rest) ** (1 / len(axes))))
    corner, expected = _golden_corner(value, dict.fromkeys(axes, room), run)
    if expected is None:
        return None
    cut = {n: min(size, room) for n, size in axes.items()}
    if not _holds(corner, expected, run, cut, 2):
        return (None,)
    return (_axes(given, [_names(t, cut) for t in expected], axes),)


def _golden_corner(value: Any, most: dict[int, int], run: Run) -> tuple[Any, Sequence[Tensor] | None]:
    """A call at some places of some dimensions, and its golden results if they say something."""
    corner = _corner(value, most)
    if sum([t.numel() for t in tensors_in(corner)]) > _MAX_IN_CORNER:
        return corner, None
    expected = run(corner)
    says = expected and any(t.is_floating_point() and bool(t.any()) for t in expected)
    return corner, expected if says else None


def _corner(value: Any, most: dict[int, int]) -> Any:
    def cut(tensor: Tensor) -> Tensor:
        part = tensor = tensor.detach()
        for place, count in most.items():
            if place <= part.dim() and part.shape[-place] > count:
                part = part.index_select(-place, _spread(part.shape[-place], count).to(part.device))
        return tensor.cpu() if part is tensor else part.contiguous().cpu()  # not all of the memory that it lies in

    return map_tensors(value, cut)


def _spread(size: int, count: int) -> Tensor:
    """So many places of a dimension: its ends, and others between them, the same each time.

    >>> len(_spread(100, 16)), int(_spread(100, 16)[-1])
    (16, 99)
    """
    ends = count // 4
    between = random.Random(size).sample(range(ends, size - ends), count - 2 * ends)
    return torch.tensor([*range(ends), *sorted(between), *range(size - ends, size)])


def _size(tensors: Sequence[Tensor], place: int) -> int:
    """How long the dimension at this place from the last is in all tensors that have it; 0 where they differ."""
    sizes = {t.shape[-place] for t in tensors if t.dim() >= place and t.shape[-place] != 1}
    return sizes.pop() if len(sizes) == 1 else 0


def _axes(given: Sequence[Tensor], results: Sequence[Names], axes: dict[int, int]) -> Axes:
    return Axes(tuple([_names(t, axes) for t in given]), tuple(results), by_trial=True)


def _names(tensor: Tensor, axes: dict[int, int]) -> Names:
    dims = range(tensor.dim(), 0, -1)
    return tuple([f"d{n}" if n in axes and tensor.shape[-n] == axes[n] else None for n in dims])


def _holds(value: Any, expected: Sequence[Tensor], run: Run, axes: dict[int, int], seed: int) -> bool:
    """Whether the call cut along these axes has the results of the whole one: cut all over, and to its last part."""
    rng = random.Random(seed)
    some = {n: choose(size, 1, min(_PLACES, size - 1), rng) for n, size in axes.items() if size > 1}
    late = {n: sorted({size - 1 - rng.randrange(max(1, size // 3)) for _ in range(3)}) for n, size in axes.items()}
    return all(_has_results_of_whole(value, expected, run, axes, places) for places in (some, late))


def _has_results_of_whole(
    value: Any, expected: Sequence[Tensor], run: Run, axes: dict[int, int], places: dict[int, list[int]]
) -> bool:
    index: Index = {f"d{n}": torch.tensor(chosen) for n, chosen in places.items() if axes[n] > 1}

    def cut(tensor: Tensor) -> Tensor:
        return cut_tensor(tensor, _names(tensor, axes), index).requires_grad_(tensor.requires_grad)

    found = run(map_tensors(value, cut))
    return found is not None and len(found) == len(expected) and all(map(_same, found, map(cut, expected)))


def _same(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape or not ours.is_floating_point():
        return ours.shape == theirs.shape and torch.equal(ours, theirs)
    near = _ROUNDINGS * torch.finfo(ours.dtype).eps
    ours, theirs = ours.detach().double(), theirs.detach().double()
    scale = float(theirs.nan_to_num(0.0, 0.0, 0.0).abs().max()) if theirs.numel() else 0.0
    return torch.allclose(ours, theirs, rtol=near, atol=near * scale, equal_nan=True)
