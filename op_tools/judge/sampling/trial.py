"""Axes of calls that no rule knows, such as operators of the user's own, found by trial.

Dimensions are lined up from the last one, as in broadcasting. The call may be cut along one of them if the golden run
of the cut call has the results of the golden run of the whole call there. A trial costs a golden run without a
judgement, once for each kind of call.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from ...call.description import Tensor, map_tensors, tensors_in
from .axes import Axes, Names
from .places import choose
from .reduction import Index, cut_tensor

_PLACES: Final = 5
_MAX_ELEMENTS: Final = 1 << 27  # of the arguments: the trial is done while the run waits
_ROUNDINGS: Final = 256.0  # by which runs with other vector lengths may differ

Run = Callable[[Any], Sequence[Tensor] | None]  # from (args, kwargs) on the CPU to the golden results, if there are any


def axes_by_trial(value: tuple[Any, Any], run: Run) -> Axes | None:
    """The axes of a call along which it may be cut; None where there are none.

    >>> x = torch.randn(5, 9, 7, dtype=torch.float64)
    >>> axes_by_trial(((x,), {}), lambda value: [value[0][0].cumsum(1)]).results
    (('d3', None, 'd1'),)
    """
    given = list(tensors_in(value))
    if not given or sum([t.numel() for t in given]) > _MAX_ELEMENTS:
        return None
    expected = run(value)
    if not expected or not any(t.is_floating_point() for t in expected):
        return None
    found: dict[int, int] = {}
    for place in range(1, max([t.dim() for t in expected]) + 1):
        sizes = {t.shape[-place] for t in (*given, *expected) if t.dim() >= place and t.shape[-place] != 1}
        if len(sizes) == 1 and _holds(value, expected, run, one := {place: sizes.pop()}, 1):
            found |= one
    if not found or (len(found) > 1 and not _holds(value, expected, run, found, 2)):
        return None
    return Axes(tuple([_names(t, found) for t in given]), tuple([_names(t, found) for t in expected]), by_trial=True)


def _names(tensor: Tensor, axes: dict[int, int]) -> Names:
    dims = range(tensor.dim(), 0, -1)
    return tuple([f"d{n}" if n in axes and tensor.shape[-n] == axes[n] else None for n in dims])


def _holds(value: Any, expected: Sequence[Tensor], run: Run, axes: dict[int, int], seed: int) -> bool:
    """Whether the call cut along these axes has the results of the whole one."""
    rng = random.Random(seed)
    index: Index = {
        f"d{n}": torch.tensor(choose(size, 1, min(_PLACES, size - 1), rng)) for n, size in axes.items() if size > 1
    }

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
