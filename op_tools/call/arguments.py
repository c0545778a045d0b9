"""The numbers of a call's arguments in the tables: `grad[i]` is the gradient of `input[i]`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from ..compat import takes_numbers_as_tensors
from .description import Described, Tensor, TensorMeta, tensors_in
from .equality import leaves_of
from .operators.registry import function_facts, last_name

_MAX_KINDS: Final = 20_000


def compared_arguments(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What is compared of the arguments after a call: positional ones, and tensors given by keyword."""
    return [*args, *tensors_in(dict(kwargs))] if kwargs else list(args)


class Numbers(NamedTuple):
    """Which number each argument of a call has, and which of them have a gradient row.

    >>> x, w = torch.ones(2), torch.ones(2)
    >>> numbers_of("torch.add", (x, w), {"out": x}).inputs
    (0, 1, 2)
    >>> numbers_of("torch.div", (x, 2), {}).gradients  # a Python number in place of a tensor: its gradient is None
    ((0, 0), (1, None))
    """

    inputs: tuple[int, ...]  # of each tensor among the arguments
    indices: tuple[int | None, ...]  # of each tensor: that of its gradient row; None where it is the only one
    gradients: tuple[tuple[int | None, int | None], ...]  # of each gradient row: its index, and the place of its tensor

    def place(self, part: str, index: int | None) -> int | None:
        """Which of the tensors a row is about, by its part and index; None where it is about none of them."""
        if part == "grad_input":
            return dict(self.gradients).get(index)
        number = index or 0  # a lone argument has no index
        return self.inputs.index(number) if part == "input" and number in self.inputs else None

    def labels(self, what: str) -> list[str]:
        """The name of each tensor's gradient (`numbers.labels("grad") == ["grad[0]", "grad[1]"]`)."""
        return [what if index is None else f"{what}[{index}]" for index in self.indices]

    def labelled(self, gradients: Described, what: str) -> list[tuple[str, TensorMeta | str]]:
        """Rows of a table of gradients, of which there is one or None for each tensor."""
        parts: Any = gradients.args  # tensors and None: no containers
        return [
            (what if index is None else f"{what}[{index}]", "None" if place is None else parts[place])
            for index, place in self.gradients
            if place is None or place < len(parts)
        ]


def numbers_of(op: str, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Numbers:
    """Number the arguments of a call as the rows of its forward comparison do.

    A gradient row has what could carry a gradient: floating and complex tensors, and Python numbers that PyTorch itself
    turns into tensors (`x / 2`). A lone one has no index.
    """
    leaves = list(leaves_of(compared_arguments(args, kwargs)))
    inputs = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    places = {number: place for place, number in enumerate(inputs)}
    wraps = takes_numbers_as_tensors(last_name(op)) and not function_facts(op).converts
    carriers = [number for number, leaf in enumerate(leaves) if _carries(leaf, wraps and number < 2)]
    alone = len(carriers) == 1
    return Numbers(
        tuple(inputs),
        tuple([number if number in carriers and not alone else None for number in inputs]),
        tuple([(None if alone else number, places.get(number)) for number in carriers]),
    )


def _carries(leaf: Any, wrapped: bool) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.is_floating_point() or leaf.is_complex()
    return wrapped and isinstance(leaf, (int, float, complex))


class Numbering:
    """`numbers_of`, worked out once for calls that look alike."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, int], Numbers] = {}

    def of(self, op: str, number: int, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Numbers:
        """The numbers of a call; `number` is that of the description of its arguments, or 0."""
        found = self.known.get((op, number))
        if found is None:
            found = numbers_of(op, args, kwargs)
            if number and len(self.known) < _MAX_KINDS:
                self.known[(op, number)] = found
        return found
