"""Calls on lists of tensors side by side, as optimizers make them, compared piece by piece.

Each tensor of the lists has nothing to do with the others, so a large call is as many small ones: memory for its golden
run is bounded, and used again instead of being asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from ..call import facts
from ..call.description import Tensor, tensors_in
from ..judge.verdict import RIGHT, Judgement, Row, leaves_of

_AT_ONCE: Final = 32 * 2**20  # bytes of arguments in one piece
WORTH_IT: Final = 2 * _AT_ONCE  # bytes of a call


class Sides(NamedTuple):
    """Positional arguments before a call and after it on the device, and what it returned."""

    args: tuple[Any, ...]
    args_after: tuple[Any, ...]
    result: Any


class Piece(NamedTuple):
    """A part of a call, and what the rows of its arguments and results are in the whole call."""

    sides: Sides
    inputs: list[int]
    outputs: list[int]


def pieces(op: str, sides: Sides, kwargs: dict[str, Any]) -> list[Piece] | None:
    """The pieces of a call, in order; None where it is not made of any.

    >>> a, b = [torch.ones(3), torch.ones(2)], [torch.ones(3), torch.ones(2)]
    >>> [p.inputs for p in pieces("torch._foreach_add_", Sides((a, b), (a, b), None), {})]
    [[0, 1, 2, 3]]
    """
    length = _length(op, sides, kwargs)
    if length is None:
        return None
    inputs, outputs = _numbered(sides.args), _numbered((sides.result,))
    found = []
    for part in _slices(sides.args, length):

        def cut(values: Any, part: slice = part) -> tuple[Any, ...]:
            return tuple([v[part] if isinstance(v, (list, tuple)) and len(v) == length else v for v in values])

        here = Sides(cut(sides.args), cut(sides.args_after), cut((sides.result,))[0])
        found.append(Piece(here, [n for some in cut(inputs) for n in some], [n for some in cut(outputs) for n in some]))
    return found


def together(op: str, judged: list[tuple[Piece, Judgement]]) -> Judgement | None:
    """The rows of the whole call in their order, and what they come to; None where rows and pieces do not match."""
    inputs: dict[int, Row] = {}
    outputs: dict[int, Row] = {}
    whole = Judgement(RIGHT, "")
    for piece, judgement in judged:
        whole = whole + judgement
        count = len(piece.inputs)
        if len(judgement.rows) != count + len(piece.outputs):
            return None
        inputs.update(zip(piece.inputs, judgement.rows[:count]))
        outputs.update(zip(piece.outputs, judgement.rows[count:]))
    return dataclasses.replace(whole, rows=(*_named(op, "input", inputs), *_named(op, "output", outputs)))


def _named(op: str, part: str, rows: dict[int, Row]) -> Iterator[Row]:
    for number in sorted(rows):
        yield rows[number]._replace(op=op, part=part, index=None if len(rows) == 1 else number)


def _length(op: str, sides: Sides, kwargs: dict[str, Any]) -> int | None:
    """How long the lists are that lie side by side."""
    if not facts.works_on_lists(op):
        return None
    if any(True for _ in tensors_in(kwargs)):
        return None  # a scale of the gradients, say, that belongs to all of them
    args, result = sides.args, sides.result
    lists = [a for a in args if isinstance(a, (list, tuple)) and a]
    lengths = {len(a) for a in lists}
    if len(lengths) != 1 or any(isinstance(a, Tensor) for a in args) or len(sides.args_after) != len(args):
        return None
    (length,) = lengths
    plain = all(isinstance(member, (Tensor, int, float)) for a in lists for member in a)
    whole = result is None or (isinstance(result, (list, tuple)) and len(result) == length)
    return length if length > 1 and plain and whole else None


def _slices(args: tuple[Any, ...], length: int) -> Iterator[slice]:
    start, size = 0, 0
    for place in range(length):
        beside = [a[place] for a in args if isinstance(a, (list, tuple)) and a]
        here = sum(t.nbytes for t in beside if isinstance(t, Tensor))
        if place > start and size + here > _AT_ONCE:
            yield slice(start, place)
            start, size = place, 0
        size += here
    yield slice(start, length)


def _numbered(values: tuple[Any, ...]) -> list[list[int]]:
    """The numbers of the leaves in each of the values."""
    found: list[list[int]] = []
    count = 0
    for value in values:
        leaves = sum(1 for _ in leaves_of(value))
        found.append(list(range(count, count + leaves)))
        count += leaves
    return found
