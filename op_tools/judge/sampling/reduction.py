"""A call cut down to some places: an ordinary call of the same operator whose results equal the whole call's there."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from ...call.description import Tensor
from ...call.devices import can_pin
from . import places
from .axes import Axes, Names

Index = dict[str, Tensor]  # by axis: the places, on the device

VARIANTS: Final = 8  # choices of places for a kind of call, used in turn
FIRST_CALLS: Final = 6  # of a kind: they are judged at all of the places that are meant for one
_MIN_PLACES: Final = 4  # along an axis; 1 of a call that is slow on the CPU
_FEWER: Final = 4  # later calls but one of VARIANTS are judged at so many times fewer: other places in each of them


class Cut(NamedTuple):
    """Which axes a call is cut along, and the names of the dimensions of the tensors that are judged."""

    axes: frozenset[str]
    judged: tuple[Names, ...]


def cut_tensor(tensor: Tensor, names: Names, index: Index, flat: bool = False) -> Tensor:
    """The slices of a tensor, in memory of their own (`cut_tensor(x, ("n", "k"), {"n": rows})`)."""
    tensor = tensor.detach()
    if flat:
        places = index.get(names[0] or "") if names else None
        return tensor.clone() if places is None else tensor.reshape(-1).index_select(0, places)
    dims = [n for n, name in enumerate(names) if name in index]
    if not dims:
        return tensor.clone()
    if len(dims) > 1:  # the one first that leaves least
        dims.sort(key=lambda n: index[names[n] or ""].numel() / tensor.shape[n])
    for dim in dims:
        tensor = tensor.index_select(dim, index[names[dim] or ""])
    return tensor


class Chosen:
    """The places at which calls of one kind are judged, for one way to cut them."""

    def __init__(self, axes: Axes, cut: Cut, tensors: Sequence[Tensor], sizes: dict[str, int]) -> None:
        self.cut = cut
        self._sizes, self._shape = sizes, _judged_shape(axes, cut, tensors, sizes)
        shapes = [(t.numel(),) if axes.flat and names else tuple(t.shape) for t, names in zip(tensors, axes.tensors)]
        rest = [
            math.prod([size for size, name in zip(shape, names) if name is None])
            for shape, names in zip(shapes, axes.tensors)
        ]
        judged = cut.judged[0] if cut.judged else ()

        def rows(names: Names) -> int:
            """About how many elements a row of such a tensor has, if it is made of rows."""
            same = [r for r, own in zip(rest, axes.tensors) if own == names]
            return min(same) if same else max(rest, default=1) if None in names else 1

        came = () if cut.judged == axes.results else axes.results  # with a gradient
        needed = [*axes.tensors, *came, judged]
        if axes.lists:
            each = max(16, 8192 // max(1, len(cut.axes)))
            self.counts, self.more = {name: min(sizes[name], each) for name in sorted(cut.axes)}, 0
        else:
            self.counts, self.more = places.counts(
                sizes, sorted(cut.axes), needed, [*rest, *map(rows, came), rows(judged)], axes.flat, axes.is_slow
            )
        self.some = frozenset([name for name, count in self.counts.items() if count < sizes[name]])
        fewer = round(_FEWER ** (1 / max(1, len(self.some)))) if not axes.lists else 1
        least = 1 if axes.is_slow else _MIN_PLACES
        self._fewer = {
            name: max(min(count, least), count // fewer) if name in self.some else count
            for name, count in self.counts.items()
        }
        self.elements = sum([r * self._product(names) for names, r in zip(axes.tensors, rest)])
        self._made: dict[Any, dict[int, Index]] = {}
        self._uses = 0
        self.ranked = 0  # calls in which places that stand out were looked for, or could have been

    def _product(self, names: Names) -> int:
        return math.prod([self.counts.get(n, self._sizes[n]) for n in names if n is not None])

    def index(self, device: torch.device) -> Index:
        """The places for the next call: all that are meant for one at first, then other ones in turn, mostly fewer."""
        made = self._made.get(device)
        if made is None:
            made = self._made[device] = {}
        self._uses += 1
        number = self._uses % VARIANTS
        if self._uses <= FIRST_CALLS:
            number = 0 if self._uses % 2 else VARIANTS
        found = made.get(number)
        if found is None:
            found = made[number] = self._choose(device, number)
        return found

    def _choose(self, device: torch.device, variant: int) -> Index:
        counts = self._fewer if variant % VARIANTS else self.counts
        return {
            name: places_on(device, self._sizes[name], self._shape.get(name, 1), count, 16 * variant + number)
            for number, (name, count) in enumerate(counts.items())
        }


@functools.lru_cache(maxsize=4096)
def places_on(device: torch.device, size: int, inner: int, count: int, seed: int) -> Tensor:
    """Some places along an axis, on the device; calls of several kinds share them."""
    return on_device(torch.tensor(places.choose(size, inner, count, random.Random(seed)), dtype=torch.int64), device)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the host on the device, which need not finish its work first where memory can be pinned."""
    if device.type == "cuda" and can_pin("cuda"):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _judged_shape(axes: Axes, cut: Cut, tensors: Sequence[Tensor], sizes: dict[str, int]) -> dict[str, int]:
    """By axis: how many elements one step along it is, in the tensor that is judged."""
    found: dict[str, int] = {}
    for names in cut.judged:
        inner = 1
        for name in reversed(names):
            if name is not None:
                found.setdefault(name, max(1, inner))
                inner *= sizes[name]
    return found
