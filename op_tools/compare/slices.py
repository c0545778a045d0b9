"""Calls that are cut to some places, as jobs: slices of their tensors, and operands over them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch

from ..call.description import Tensor, map_tensors, tensors_in
from ..call.devices import can_pin
from ..call.traits import traits_of
from ..compat import cuda_stream
from ..copies.operands import Layout, Operands, bytes_of, mark_after, padded, stage
from ..judge.sampling.axes import Names
from ..judge.sampling.reduction import Index, cut_tensor
from ..judge.sampling.totals import Reduced
from ..native.kernels import copy_to_host
from .ladder import BACKWARD, ComparedCall, Job
from .sample import Kind, ref_of

Slices = tuple[Any, Sequence[Tensor]]  # a tree of staged leaves, and the tensors
Ready = dict[int, Tensor]  # arguments that are cut, by position


def cut_arguments(
    kind: Kind, tensors: Sequence[Tensor | None], index: Index, needed: Iterable[int] | None = None
) -> Ready:
    """The arguments cut to some places, or only those that are needed."""
    axes = kind.axes
    if axes.prepare is not None:
        tensors = list(tensors_in(axes.prepare(*kind.value(tensors))))
    made: dict[Hashable, Tensor] = {}
    found: Ready = {}
    for number in range(len(tensors)) if needed is None else needed:
        tensor = tensors[number]
        assert tensor is not None
        key = place_of(tensor)
        if key not in made:
            made[key] = cut_tensor(tensor, axes.tensors[number], index, axes.flat)
        found[number] = made[key]
    return found


def slices(kind: Kind, ready: Ready, index: Index) -> Slices:
    """The arguments of a cut call, with zeros for those whose values do not matter."""
    made: list[Tensor] = []
    numbers: dict[int, int] = {}
    position = itertools.count()

    def place(model: Tensor) -> Any:
        number = next(position)
        tensor = ready.get(number)
        if tensor is None:
            tensor = kind.zeros(model, kind.axes.tensors[number], index)
        if id(tensor) not in numbers:
            numbers[id(tensor)] = len(made)
            made.append(tensor)
        return ref_of(tensor, numbers[id(tensor)], model.requires_grad)

    return map_tensors(kind.prepared, place), made


def place_of(tensor: Tensor) -> Hashable:
    """Equal for the same memory seen in the same way; no Python object for a storage, which autograd would count."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of all tensors on the device; those at the same place in memory are one."""
    made: dict[Hashable, Tensor] = {}
    for tensor in tensors:
        key = place_of(tensor)
        if key not in made:
            made[key] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return [made[place_of(t)] for t in tensors]


def reduced_job(job: Job, each: Reduced, number: int) -> Job:
    """A job that judges a call which stands for another one; the number is that of such calls, or 0."""
    call, backward = job.call, job.phase == BACKWARD
    assert isinstance(call, ComparedCall)
    value = (list(each.sent), list(each.found)) if backward else (None, None, each.result)
    before, after = (stage(v, event=False) for v in ((each.args, each.kwargs), value))
    storages, mark = on_host((*before.storages, *after.storages))
    count = len(before.storages)
    before = before._replace(storages=tuple(storages[:count]), event=mark)
    after = after._replace(storages=tuple(storages[count:]), event=mark)
    own = dataclasses.replace(
        call,
        op=each.op,
        function=each.function,
        traits=traits_of(each.function),
        numbers=(number, number),
        before=before,
        notes={},
        region=call.region._replace(grad_enabled=backward),
        places=None,
        drawn=None,
    )
    part = Job(own, job.phase, event=job.event, live=job.live, before=before, snapshot=after)
    part.nbytes = before.nbytes + after.nbytes
    part.unasked = tuple([n for n, g in enumerate(each.found) if g is None])
    return part


def on_host(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Any]:
    """The bytes of tensors without gaps in pinned memory, and an event after which they are there.

    The device's memory is free for what it does next. Where there is no such memory, the tensors themselves.
    """
    device = next((t.device for t in tensors if not t.is_cpu), None)
    if device is None or device.type != "cuda" or not can_pin("cuda"):
        return tensors, mark_after(tuple(tensors))
    starts = list(itertools.accumulate([padded(t.nbytes) for t in tensors], initial=0))
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    first = buffer.data_ptr()
    spans = [buffer[start : start + t.nbytes] for start, t in zip(starts, tensors)]
    there = [(first + start, t.data_ptr(), t.nbytes) for start, t in zip(starts, tensors) if not t.is_cpu]
    if not copy_to_host(there, cuda_stream(device.index)):
        return tensors, mark_after(tuple(tensors))
    for span, tensor in zip(spans, tensors):
        if tensor.is_cpu:
            span.copy_(bytes_of(tensor))
    return spans, mark_after(tuple(tensors))


def operands_of(kind: Kind, key: Hashable, tree: Any, made: Sequence[Tensor], mark: Any) -> Operands:
    """Slices as operands; calls that look alike share the layout, and so the tree."""
    layout = kind.layouts.get(key)
    if layout is None or layout.tree != tree:
        layout = kind.layouts[key] = Layout(tree, ())
    return Operands(layout.tree, tuple(made), mark, sum([t.nbytes for t in made]), (), layout)


def cut_gradients(job: Job, kind: Kind, index: Index, some: Sequence[int]) -> Slices:
    """The gradients that came in and those that are judged, cut to some places."""
    assert job.grads is not None
    sent, found = job.grads
    made: list[Tensor] = []

    def cut(tensor: Tensor | None, names: Names) -> Any:
        if tensor is None:
            return None
        made.append(cut_tensor(tensor, names, index, kind.axes.flat))
        return ref_of(made[-1], len(made) - 1)

    ours = [cut(g, names) for g, names in zip(sent, kind.axes.results)]
    theirs = [cut(found[n], names) if n in some else None for n, names in enumerate(kind.axes.tensors)]
    return (ours, theirs), made
