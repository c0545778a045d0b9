"""Which calls tell most: those that join features (a layout, an argument, a size, a dtype) that no call has joined yet.

Bugs that escape a vendor's tests need two things at once, rarely three: channels_last and padding, a mask and a long
sequence. So the hunt covers pairs first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, Final

import torch

from ditorch.conformance.variants import Variant
from op_tools.call.description import tensors_in

_REFUSED: Final = 0.2
"""What a pair is worth that was tried and refused by the CPU: another call may join the two in a way that works."""
_TENSORS: Final = 4
_EDGES: Final = (0, 1, 8, 32, 64, 256, 1024, 4096, 1 << 16)
Feature = tuple[Any, ...]


class Pairs:
    """The pairs of features that calls have had so far.

    >>> pairs = Pairs()
    >>> pairs.add([("padding", 1), ("layout", "plain")], accepted=True)
    >>> pairs.news([("padding", 1), ("layout", "channels_last")]) > pairs.news([("padding", 1), ("layout", "plain")])
    True
    """

    def __init__(self) -> None:
        self._worth: dict[tuple[Feature, Feature], float] = {}

    def news(self, features: Iterable[Feature]) -> float:
        """How much of a call is new."""
        return sum(self._worth.get(pair, 1.0) for pair in itertools.combinations(features, 2))

    def add(self, features: Iterable[Feature], *, accepted: bool) -> None:
        """Note a call, and whether the CPU did it."""
        for pair in itertools.combinations(features, 2):
            self._worth[pair] = 0.0 if accepted else min(_REFUSED, self._worth.get(pair, 1.0))


def features(dtype: str, way: str, variant: Variant) -> list[Feature]:
    """What a kernel may decide by: dtype, way of calling, arguments, layouts, sizes.

    >>> features("float32", "plain", Variant((torch.ones(3, 40).t(), 2), {"dim": 1}))[:4]
    [('dtype', 'float32'), ('way', 'plain'), (1, '2'), ('dim', '1')]
    """
    found: list[Feature] = [("dtype", dtype), ("way", way)]
    plain = [*enumerate(variant.args), *variant.kwargs.items()]
    found += [(key, repr(value)[:24]) for key, value in plain if not list(tensors_in((value,)))]
    tensors = variant.tensors[:_TENSORS]
    found.append(("tensors", len(tensors), *(t.dim() for t in tensors)))
    for number, tensor in enumerate(tensors):
        if tensor.layout is not torch.strided:
            continue
        found.append(("layout", number, layout(tensor)))
        if number < 2 and tensor.dim():
            found.append(("last", number, _class(tensor.shape[-1]), tensor.shape[-1] % 4 == 0))
            found.append(("first", number, _class(tensor.shape[0])))
            found.append(("elements", number, _class(tensor.numel())))
    return found


def layout(tensor: torch.Tensor) -> str:
    """How a tensor lies in memory, in a word.

    >>> layout(torch.ones(2, 3).t()), layout(torch.ones(2, 3)[:, :2]), layout(torch.ones(1).expand(4))
    ('permuted', 'gaps', 'expanded')
    """
    strides = [s for n, s in zip(tensor.shape, tensor.stride()) if n > 1]
    if 0 in strides:
        return "expanded"
    if tensor.is_contiguous():
        return "offset" if tensor.storage_offset() else "plain"
    if tensor.dim() in (4, 5) and tensor.is_contiguous(
        memory_format=torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    ):
        return "channels_last"
    return "permuted" if strides != sorted(strides, reverse=True) else "gaps"


def _class(number: int) -> int:
    """The edge below a size: sizes of one class are much alike."""
    return max((edge for edge in _EDGES if edge <= number), default=0)
