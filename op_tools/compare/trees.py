"""Trees of arguments on their way to a worker process: what another process can be told, and their numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final

import torch

from ..copies.operands import Layout, Operands, Ref

# what means the same in another process
_SIMPLE: Final = frozenset(
    {
        *(int, float, bool, complex, str, type(None), type(...)),
        *(torch.dtype, torch.memory_format, torch.layout, torch.Size, Ref),  # a device may not exist there
    }
)
_tree_numbers = itertools.count(1)


def sendable(staged: Operands) -> bool:
    """Whether a worker can be told all about a snapshot (`sendable(stage((x, 2)))`)."""
    return staged.layout is not None and _properties(staged.layout)[0]


def needs_gradients(layout: Layout) -> bool:
    """Whether any of the tensors may get a gradient (`needs_gradients(staged.layout)`)."""
    return _properties(layout)[1]


def _properties(layout: Layout) -> tuple[bool, bool]:
    """Whether a tree means the same in another process, and whether gradients may come; worked out once."""
    found: tuple[bool, bool] | None = layout.notes.get(_properties)
    if found is None:
        leaves = list(_leaves(layout.tree))
        gradients = any(isinstance(leaf, Ref) and leaf.requires_grad for leaf in leaves)
        found = layout.notes[_properties] = (all(type(leaf) in _SIMPLE for leaf in leaves), gradients)
    return found


def _leaves(value: Any) -> Iterator[Any]:
    kind = type(value)
    if kind is dict:
        value = [*value, *value.values()]
    elif kind is slice:
        value = (value.start, value.stop, value.step)
    elif kind not in (list, tuple):
        yield value
        return
    for member in value:
        yield from _leaves(member)


def number_of(staged: Operands) -> int:
    """The number of a tree, given once to each layout."""
    assert staged.layout is not None
    notes = staged.layout.notes
    return int(notes.get(number_of) or notes.setdefault(number_of, next(_tree_numbers)))
