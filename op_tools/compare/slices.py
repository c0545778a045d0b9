"""Slices of the tensors of a call, and operands over them: calls that are cut to some places, as jobs.

On a GPU one launch takes all slices of a job to pinned memory, so that nothing on the device waits for the job.
Elsewhere each slice is a tensor of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.utils.weak import TensorWeakRef

from ..call.description import Tensor, map_tensors, tensors_in
from ..call.devices import can_pin
from ..call.traits import traits_of
from ..compat import cuda_device
from ..copies.operands import Layout, Operands, Ref, bytes_of, mark_after, padded
from ..copies.queue import Reservation
from ..judge.sampling.axes import Names
from ..judge.sampling.reduction import Cut, Index, cut_tensor
from ..judge.sampling.suspects import Projected
from ..judge.sampling.totals import Reduced, Total
from ..native.gather import MAX_DIMS, Gather, Piece, dense_piece, gather_on, piece_of
from ..native.layout import is_dense
from .ladder import BACKWARD, ComparedCall, Job
from .sample import Kind

_SLAB: Final = 1 << 25  # bytes of pinned memory that small jobs share
Layouts = dict[Hashable, Layout]


class Slice(NamedTuple):
    """Some elements of a tensor: a tensor of their own, or where a kernel will find them."""

    tensor: Tensor | None  # that tensor, or what holds the memory that the piece lies in
    dtype: torch.dtype
    shape: Sequence[int]
    stride: Sequence[int]
    nbytes: int
    piece: Piece | None = None


Ready = dict[int, Slice]  # arguments that are cut, by position


@dataclasses.dataclass(eq=False)
class Slices:
    """The slices under a tree of arguments or results."""

    parts: Sequence[Slice]
    leaves: tuple[tuple[int, bool], ...]  # of each tensor in the tree: which slice it is, and whether it requires grad
    tree: Callable[[Iterator[Ref]], Any]  # the tree over these leaves
    pattern: Hashable = None  # which leaves of the tree there are, where that differs between calls that look alike
    packed: bool = False  # all slices lie in one storage
    flats: Sequence[Tensor] | None = None  # the storages, once they are taken
    mark: Any = None  # an event after which they are there

    @property
    def nbytes(self) -> int:
        return sum([part.nbytes for part in self.parts])


@dataclasses.dataclass(eq=False)
class Taken:
    """What is kept of a call until its backward."""

    kind: Kind | Total
    index: Index = dataclasses.field(default_factory=dict)
    copies: Sequence[Tensor] = ()  # of arguments that the call writes to
    before: Slices | None = None  # of arguments that the call writes to, or that its backward needs as they were
    part: ComparedCall | None = None  # of a random call: what its forward has found belongs to its backward
    held: Sequence[Tensor | None] = ()  # aliases of arguments that somebody else holds, too
    versions: Sequence[int] = ()
    reservation: Reservation | None = None
    slices: dict[Cut, tuple[Index, Ready]] = dataclasses.field(default_factory=dict)
    observed: Sequence[TensorWeakRef] = ()  # the arguments themselves, while somebody else holds them
    kept: Any = None  # of a call that is judged from partial results
    projected: dict[int, Projected] = dataclasses.field(default_factory=dict)

    @property
    def changed(self) -> bool:
        """Whether something was written to the arguments since."""
        return [t._version for t in self.held if t is not None] != list(self.versions)


def cut(tensor: Tensor, names: Names, index: Index, flat: bool = False) -> Slice:
    """The elements of a tensor at some places along the dimensions with these names."""
    if gather_for(tensor.device) is not None and not (tensor.is_neg() or tensor.is_conj()):
        found = _lazily(tensor, names, index, flat)
        if found is not None:
            return found
    return _taken(cut_tensor(tensor, names, index, flat))


def _taken(made: Tensor) -> Slice:
    return Slice(made, made.dtype, made.shape, made.stride(), made.nbytes)


def _lazily(tensor: Tensor, names: Names, index: Index, flat: bool) -> Slice | None:
    size, dtype = tensor.element_size(), tensor.dtype
    places = [index.get(name or "") for name in names]
    if flat and places and places[0] is not None:
        count, stride = places[0].numel(), tensor.stride()
        if not any(stride):  # one number for all
            piece = Piece(tensor.data_ptr(), size, [(count, 0, None)])
        elif tensor.is_contiguous():
            piece = Piece(tensor.data_ptr(), size, [(count, size, places[0])])
        else:
            return None
        return Slice(tensor, dtype, (count,), (1,), count * size, piece)
    if flat or not any(p is not None for p in places):
        if is_dense(tensor):
            count = tensor.numel()
            piece = dense_piece(tensor.data_ptr(), size, count)
            return Slice(tensor, dtype, tensor.shape, tensor.stride(), count * size, piece)
        places = [None] * tensor.dim()
    piece = piece_of(tensor, places)
    if len(piece.dims) > MAX_DIMS:
        return None
    shape = [n if p is None else p.numel() for n, p in zip(tensor.shape, places)]
    return Slice(tensor, dtype, shape, _steps(shape), piece.elements * size, piece)


def _steps(shape: Sequence[int]) -> list[int]:
    """The strides of a tensor without gaps."""
    return list(itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1))[::-1] if shape else []


def gather_for(device: torch.device) -> Gather | None:
    """The kernel that takes slices, if there is one for this device."""
    if device.type != "cuda" or torch.version.cuda is None or cuda_device() != device.index or not can_pin("cuda"):
        return None
    return gather_on(device.index)


def cut_arguments(
    kind: Kind, tensors: Sequence[Tensor | None], index: Index, needed: Iterable[int] | None = None
) -> Ready:
    """The arguments cut to some places, or only those that are needed."""
    axes, tensors = kind.axes, kind.prepare(tensors)
    made: dict[Hashable, Slice] = {}
    found: Ready = {}
    for number in range(len(tensors)) if needed is None else needed:
        tensor = tensors[number]
        assert tensor is not None
        key = place_of(tensor)
        if key not in made:
            made[key] = cut(tensor, axes.tensors[number], index, axes.flat)
        found[number] = made[key]
    return found


def kept(ready: Ready) -> Ready:
    """Slices that do not depend on the memory of the whole tensors any more, on the device."""
    pieces = {id(s): s for s in ready.values() if s.piece is not None}
    if not pieces:
        return ready
    some = list(pieces.values())
    starts = list(itertools.accumulate([padded(s.nbytes) for s in some], initial=0))
    assert some[0].tensor is not None
    device = some[0].tensor.device
    buffer = torch.empty(starts[-1], dtype=torch.uint8, device=device)
    first, gather = buffer.data_ptr(), gather_for(device)
    if gather is None or not gather([s.piece for s in some if s.piece], [first + start for start in starts]):
        raise RuntimeError("slices could not be taken")
    found = {}
    for at, each in zip(starts, some):
        size = each.dtype.itemsize
        piece = dense_piece(first + at, size, each.nbytes // size)
        found[id(each)] = each._replace(tensor=buffer, piece=piece)
    return {number: found.get(id(each), each) for number, each in ready.items()}


def slices(kind: Kind, ready: Ready, index: Index) -> Slices:
    """The arguments of a cut call, with zeros for those whose values do not matter."""
    made: list[Slice] = []
    numbers: dict[int, int] = {}
    leaves = []
    lazy = any(s.piece is not None for s in ready.values()) or any(gather_for(p.device) for p in index.values())
    for number, model in enumerate(kind.tensors):
        each = ready.get(number)
        if each is None:
            each = _zeros(kind, model, kind.axes.tensors[number], index, lazy)
        if id(each) not in numbers:
            numbers[id(each)] = len(made)
            made.append(each)
        leaves.append((numbers[id(each)], model.requires_grad))
    return Slices(
        made, tuple(leaves), lambda refs: map_tensors(kind.prepared, lambda _: next(refs)), None, not kind.writes
    )


def _zeros(kind: Kind, model: Tensor, names: Names, index: Index, lazy: bool) -> Slice:
    """Zeros in place of an argument that is cut to some places."""
    shape = kind.cut_shape(model, names, index)
    if not lazy:
        return _taken(torch.zeros(shape, dtype=model.dtype))
    size, count = model.element_size(), torch.Size(shape).numel()
    return Slice(None, model.dtype, shape, _steps(shape), size * count, dense_piece(0, size, count))


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


def cut_results(kind: Kind, after: Slices | None, results: Sequence[Tensor], result: Any, index: Index) -> Slices:
    """(args, kwargs, result) after a call: arguments only where the call writes to them."""
    parts, leaves = (list(after.parts), list(after.leaves)) if after is not None else ([], [])
    for tensor, names in zip(results, kind.axes.results):
        leaves.append((len(parts), tensor.requires_grad))
        parts.append(cut(tensor, names, index, kind.axes.flat))

    def tree(refs: Iterator[Ref]) -> Any:
        arguments = (None, None) if after is None else after.tree(refs)
        return (*arguments, map_tensors(result, lambda _: next(refs)))

    return Slices(parts, tuple(leaves), tree, None, not kind.writes)


def cut_gradients(job: Job, kind: Kind, index: Index, some: Sequence[int]) -> Slices:
    """The gradients that came in and those that are judged, cut to some places."""
    assert job.grads is not None
    sent, found = job.grads
    there = [*sent, *[found[n] if n in some else None for n in range(len(kind.axes.tensors))]]
    names = (*kind.axes.results, *kind.axes.tensors)
    parts = [cut(g, own, index, kind.axes.flat) for g, own in zip(there, names) if g is not None]
    present, count = tuple([g is not None for g in there]), len(sent)

    def tree(refs: Iterator[Ref]) -> Any:
        every = [next(refs) if p else None for p in present]
        return every[:count], every[count:]

    return Slices(parts, tuple([(n, False) for n in range(len(parts))]), tree, present, packed=True)


class _Pinned(threading.local):
    """Pinned memory that small jobs of a thread share; what is taken is free again with the last tensor over it."""

    def __init__(self) -> None:
        self._slab, self._used = torch.empty(0, dtype=torch.uint8), 0

    def room(self, nbytes: int) -> tuple[Tensor, int]:
        """Memory, and where in it so many bytes are free."""
        if nbytes > _SLAB // 8:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), 0
        if self._used + nbytes > self._slab.numel():
            self._slab, self._used = torch.empty(_SLAB, dtype=torch.uint8, pin_memory=True), 0
        self._used += nbytes
        return self._slab, self._used - nbytes


_pinned: Final = _Pinned()


def pinned_room(nbytes: int) -> tuple[Tensor, int]:
    """Pinned memory, and where in it so many bytes are free (`buffer, start = pinned_room(100)`)."""
    return _pinned.room(nbytes)


def take(*several: Slices) -> Any:
    """Take the slices that are not taken yet; an event after which all are there."""
    wanted = [each for each in several if each.flats is None]
    parts = [part for each in wanted for part in each.parts]
    source = next((p.tensor for p in parts if p.piece is not None and p.tensor is not None), None)
    gather = None if source is None else gather_for(source.device)
    if source is not None and gather is not None:
        mark = _take_to_host(gather, wanted, parts, source)
    elif any(part.piece is not None for part in parts):
        raise RuntimeError("slices could not be taken")
    else:
        for each in wanted:
            each.packed, each.flats = False, [part.tensor for part in each.parts if part.tensor is not None]
        mark = mark_after(tuple([flat for each in wanted for flat in each.flats or ()]))
    for each in wanted:
        each.mark, each.parts = mark, [part._replace(tensor=None, piece=None) for part in each.parts]
    return mark if wanted else several[-1].mark


def _take_to_host(gather: Gather, wanted: Sequence[Slices], parts: Sequence[Slice], source: Tensor) -> Any:
    starts = list(itertools.accumulate([padded(p.nbytes) for p in parts], initial=0))
    buffer, begin = pinned_room(starts[-1])
    starts = [begin + start for start in starts]
    first = buffer.data_ptr()
    there = [(p.piece, first + start) for p, start in zip(parts, starts) if p.piece is not None]
    if not gather([piece for piece, _ in there], [place for _, place in there]):
        raise RuntimeError("slices could not be taken")
    for part, start in zip(parts, starts):
        if part.piece is None and part.tensor is not None:  # by operators of PyTorch, on either side
            buffer[start : start + part.nbytes].copy_(bytes_of(part.tensor), non_blocking=True)
    number = 0
    for each in wanted:
        end = number + len(each.parts)
        if each.packed:
            each.flats = [buffer[starts[number] : starts[end]]]
        else:
            each.flats = [buffer[s : s + p.nbytes] for s, p in zip(starts[number:], each.parts)]
        number = end
    return mark_after((source,))


def operands_of(layouts: Layouts, key: Hashable, found: Slices, mark: Any) -> Operands:
    """Slices as operands; calls that look alike share the layout, and so the tree."""
    assert found.flats is not None
    parts = found.parts
    key = (
        key,
        found.packed,
        found.pattern,
        found.leaves,
        tuple([(p.dtype, tuple(p.shape), tuple(p.stride)) for p in parts]),
    )
    layout = layouts.get(key)
    if layout is None:
        starts = list(itertools.accumulate([padded(p.nbytes) for p in parts], initial=0))
        refs = []
        for number, requires_grad in found.leaves:
            part = parts[number]
            place = (0, starts[number] // part.dtype.itemsize) if found.packed else (number, 0)
            shape, stride = tuple(part.shape), tuple(part.stride)
            refs.append(Ref(place[0], part.dtype, shape, stride, place[1], requires_grad, False, False))
        layout = layouts[key] = Layout(found.tree(iter(refs)), ())
    return Operands(layout.tree, tuple(found.flats), mark, found.nbytes, (), layout)


def _whole(value: Any) -> Slices:
    """All of the tensors in a tree, which nobody else writes to."""
    tensors = list(tensors_in(value))
    parts = [cut(t.detach(), (None,) * t.dim(), {}) for t in tensors]
    leaves = tuple([(n, t.requires_grad) for n, t in enumerate(tensors)])
    return Slices(parts, leaves, lambda refs: map_tensors(value, lambda _: next(refs)), packed=True)


def reduced_job(job: Job, each: Reduced, number: int, layouts: Layouts) -> Job:
    """A job that judges a call which stands for another one; the number is that of such calls, or 0."""
    call, backward = job.call, job.phase == BACKWARD
    assert isinstance(call, ComparedCall)
    value = (list(each.sent), list(each.found)) if backward else (None, None, each.result)
    before, after = _whole((each.args, each.kwargs)), _whole(value)
    mark = take(before, after)
    others = repr(map_tensors((each.args, each.kwargs), lambda _: None))  # arguments that are no tensors
    layouts = layouts if number else {}
    own = dataclasses.replace(
        call,
        op=each.op,
        function=each.function,
        traits=traits_of(each.function),
        numbers=(number, number),
        before=operands_of(layouts, (number, others, "before"), before, mark),
        notes={},
        region=call.region._replace(grad_enabled=backward),
        places=None,
        drawn=None,
    )
    snapshot = operands_of(layouts, (number, others, "after"), after, mark)
    part = Job(own, job.phase, event=job.event, live=job.live, before=own.before, snapshot=snapshot)
    part.nbytes = before.nbytes + after.nbytes
    part.unasked = tuple([n for n, g in enumerate(each.found) if g is None])
    return part
