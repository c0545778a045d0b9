"""Which elements of an input may share the gradient of an output: equal values of the row or window it comes from.

Rows are known by the arguments of the call. Windows are found by running it on ranks instead of values: equal values
get different ranks, in another order each time, so that the result names the element that was selected.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Final

import torch

from ..call import facts
from ..call.description import Tensor
from ..call.equality import leaves_of, same_values
from .golden import GoldenResult

_MAX_RUNS: Final = 400
_RUNS_WITHOUT_NEWS: Final = 40
_MAX_SECONDS: Final = 5.0


def groups(result: GoldenResult, position: int, different: Tensor) -> Tensor | None:
    """A number for each element of an input, the same for those that may share gradients; None if it is not known.

    `different` are the elements whose gradients differ: in ties with others these win, or lose.
    """
    source = result.source
    values = source.tensors[position].detach()
    if source.rounded_to is not None or not values.is_floating_point() or bool(values.isnan().any()):
        return None
    flat = values.reshape(-1).to(torch.float64)
    rows = facts.selected_from(source) if position == 0 else None
    if rows is not None:
        labels: Tensor = torch.unique(torch.stack([rows.reshape(-1), flat]), dim=1, return_inverse=True)[1]
        return labels.view(values.shape)
    generator = torch.Generator().manual_seed(0)
    first: Tensor | None = None
    labels, quiet, until = torch.arange(flat.numel()), 0, time.perf_counter() + _MAX_SECONDS
    for run in range(_MAX_RUNS):
        key = torch.rand(flat.numel(), generator=generator, dtype=torch.float64)
        key.add_(different.reshape(-1).to(torch.float64), alpha=2 if run % 4 else -2)
        order = key.argsort()
        order = order[flat[order].argsort(stable=True)]
        found = _selected(result, position, order, flat)
        if found is None or time.perf_counter() > until:
            return None
        first = found if first is None else first
        joined = _joined(labels, torch.stack([first, found]))
        quiet = quiet + 1 if torch.equal(joined, labels) else 0
        labels = joined
        if quiet > _RUNS_WITHOUT_NEWS:
            break
    return labels.view(values.shape)


def _selected(result: GoldenResult, position: int, order: Tensor, flat: Tensor) -> Tensor | None:
    """The elements that the results consist of when ties are broken by this order; None if they are other numbers."""
    ranks = torch.empty(flat.numel(), dtype=torch.float64)
    ranks[order] = torch.arange(flat.numel(), dtype=torch.float64)
    outputs = [t for t in leaves_of(_on(result, position, ranks).rerun().outputs) if _is_float(t)]
    expected = [t for t in leaves_of(result.outputs) if _is_float(t)]
    if len(outputs) != len(expected):
        return None
    found = []
    for ours, theirs in zip(outputs, expected):
        index = ours.reshape(-1).clamp(0, flat.numel() - 1).to(torch.int64)
        if not torch.equal(index.to(torch.float64), ours.reshape(-1)):
            return None
        if not same_values(flat[order[index]], theirs.reshape(-1).to(torch.float64)):
            return None
        found.append(order[index])
    return torch.cat(found) if found else None


def _on(result: GoldenResult, position: int, values: Tensor) -> GoldenResult:
    """The same call on other values of one input."""
    target = result.source.tensors[position]
    changed = result.source.mapped(lambda t: values.view(target.shape) if t is target else t)
    return dataclasses.replace(result, source=changed, run=None)


def _joined(labels: Tensor, links: Tensor) -> Tensor:
    """The labels with those of both ends of each link made equal."""
    ends = links.reshape(-1)
    while True:
        least = torch.minimum(labels[links[0]], labels[links[1]]).repeat(2)
        joined = labels.scatter_reduce(0, ends, least, "amin")
        joined = joined[joined]
        if torch.equal(joined, labels):
            return labels
        labels = joined


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
