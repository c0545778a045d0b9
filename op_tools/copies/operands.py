"""Operands: snapshots of a call's tensors that keep strides, offsets, shared memory and requires_grad.

`stage` copies storages on the device where they live: quick, and without a sync. A `Fetcher` brings the bytes
to the host later, on any thread; `Operands.tensors` puts tensors over them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch

from ..call.description import Tensor, children, map_tensors, rebuild_container, tensors_in
from ..call.devices import can_pin, event_class, module_of
from ..compat import conj_view, count_dispatch_modes, neg_view, no_dispatch_modes
from ..native.kernels import copy_to_host
from .materialise import span_of

_PLAIN_TYPES: Final = frozenset({torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor)})
# A small view of a large storage is cut out of it; a view of most of a storage keeps its offset.
_KEEP_WHOLE_BELOW: Final = 1 << 16
_KEEP_WHOLE_FACTOR: Final = 4
_MAX_LAYOUTS: Final = 2_000
_ALL: Final = 1 << 62
MAX_BORROWED: Final = 1 << 28  # bytes that go through the pinned buffer at once
AROUND: Final = 1 << 12  # bytes on both sides of a view that show whether a kernel writes beyond it


class Ref(NamedTuple):
    """A tensor of a staged tree: which storage, and how it lies in it."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool
    conjugated: bool
    negated: bool

    @classmethod
    def of(cls, tensor: Tensor, storage: int, start: int = 0) -> Ref:
        """How a tensor lies in a storage of which a copy begins at byte `start`."""
        offset = int(tensor.storage_offset()) - start // tensor.element_size()
        layout = (tuple(tensor.shape), tensor.stride(), offset)
        return cls(storage, tensor.dtype, *layout, tensor.requires_grad, tensor.is_conj(), tensor.is_neg())


class Whole(NamedTuple):
    """A tensor without strides (sparse, quantized, nested), copied as PyTorch copies it."""

    copy: Tensor
    requires_grad: bool


class Opaque(NamedTuple):
    """A tensor that cannot be copied: what it was."""

    kind: str


_STAGED: Final = frozenset({Ref, Whole, Opaque})


class Operands(NamedTuple):
    """A snapshot of the tensors in a tree of arguments: the tree, and a copy of every storage under it."""

    tree: Any
    storages: tuple[Tensor, ...]
    event: Any  # after the last copy on the device; None on the host
    nbytes: int
    opaque: tuple[str, ...] = ()  # types of tensors that could not be copied
    layout: Layout | None = None  # shared with calls that look alike, and so is the tree
    ids: tuple[int, ...] = ()  # of the storages that were copied, while they live
    by: Copy | None = None  # how they were copied; None where that is not known any more

    def tensors(self, flats: Sequence[Tensor] | None = None) -> Any:
        """The tree with tensors over the storages, or over these bytes of them; nothing is copied."""
        return tensors_over(self.tree, [bytes_of(s) for s in self.storages] if flats is None else flats)

    def copies(self) -> tuple[Tensor, ...]:
        """The storages that are copies; a capture store stands for those that it has."""
        return tuple([s for s in self.storages if isinstance(s, Tensor)])


class Layout:
    """How the tensors of a call lie in its storages; worked out once for calls that look alike."""

    __slots__ = ("left_out", "nbytes", "notes", "parts", "tree")

    def __init__(self, tree: Any, parts: tuple[tuple[int, int, int], ...], left_out: int = 0) -> None:
        self.tree = tree
        self.left_out = left_out  # bytes of the storages that are not copied
        self.parts = parts  # of each storage: a tensor in it, first and last byte that are copied
        self.nbytes = sum(end - start for _, start, end in parts)
        self.notes: dict[Any, Any] = {}  # what a writer has worked out about it


Copy = Callable[[Tensor, int, int], Tensor]  # of these bytes of the storage under a tensor


class Layouts:
    """Stages calls; those that look like an earlier one share its tree. `around` a view, so many bytes are copied, too.

    >>> Layouts().stage(describe((x,)).number, [x], (x,))  # doctest: +SKIP
    """

    def __init__(self, around: int = 0) -> None:
        self._known: dict[tuple[Any, ...], Layout] = {}
        self._around = around
        self.copy: Copy = copy_storage

    def stage(
        self,
        number: int,
        tensors: list[Tensor],
        value: Any,
        event: bool = True,
        whole: bool = False,
        gradients: bool = False,
    ) -> Operands:
        """Copy the storages under `value`; `number` is that of its description, `tensors` are all in it.

        With `whole`, all of each storage is copied, however small the views of it are. Of `gradients` only what they
        touch is: autograd adds to one in place only while nobody else holds its memory, and a Python object for its
        storage would count.
        """
        if count_dispatch_modes():  # the user's are not to see the copies; function modes are off already
            with no_dispatch_modes():
                return self.stage(number, tensors, value, event, whole, gradients)
        found = self._find(number, tensors, value, whole, gradients)
        if found is None:
            return stage(value, event, self._margin(whole, gradients), self.copy)
        layout, ids = found
        copy = self.copy
        copies = tuple([copy(tensors[at], start, end) for at, start, end in layout.parts])
        mark = mark_after(copies) if event else None
        return Operands(layout.tree, copies, mark, layout.nbytes, (), layout, ids, copy)

    def of(self, number: int, tensors: list[Tensor], value: Any) -> Layout | None:
        """How the tensors in `value` lie in their storages; None where that cannot be shared with other calls."""
        found = self._find(number, tensors, value, False, False)
        return None if found is None else found[0]

    def _margin(self, whole: bool, gradients: bool) -> int:
        return 0 if gradients else _ALL if whole else self._around

    def _find(
        self, number: int, tensors: list[Tensor], value: Any, whole: bool, gradients: bool
    ) -> tuple[Layout, tuple[int, ...]] | None:
        """The layout, and which storages these are."""
        if not number:
            return None
        key: list[Any] = [number, whole, gradients]
        storages: dict[int, int] = {}
        for tensor in tensors:
            if type(tensor) not in _PLAIN_TYPES or tensor.layout is not torch.strided or tensor.is_quantized:
                return None
            if tensor.is_conj() or tensor.is_neg():
                return None
            if gradients:
                key += (storages.setdefault(start_of_storage(tensor), len(storages)), tensor.storage_offset())
            else:
                storage = tensor.untyped_storage()
                index = storages.setdefault(storage._cdata, len(storages))
                key += (index, tensor.storage_offset(), storage.nbytes())
        layout = self._known.get(tuple(key))
        if layout is None:
            if len(self._known) >= _MAX_LAYOUTS:
                self._known.clear()
            layout = lay_out(value, tensors, [], self._margin(whole, gradients), gradients)
            self._known[tuple(key)] = layout
        return layout, () if gradients else tuple(storages)


def measure(value: Any) -> int:
    """Bytes that staging these arguments would need, at most (`measure((x, y))`)."""
    return sum(t.numel() * t.element_size() for t in tensors_in(value) if t.layout == torch.strided)


def stage(value: Any, event: bool = True, around: int = 0, copy: Copy | None = None) -> Operands:
    """Copy every storage under `value` on its own device (`stage((args, kwargs))`)."""
    tensors = list(tensors_in(value))
    opaque: list[str] = []
    layout = lay_out(value, tensors, opaque, around)
    copy = copy or copy_storage
    copies = tuple([copy(tensors[at], start, end) for at, start, end in layout.parts])
    ids = tuple([tensors[at].untyped_storage()._cdata for at, _, _ in layout.parts])
    mark = mark_after(copies) if event else None
    return Operands(layout.tree, copies, mark, layout.nbytes, tuple(opaque), None, ids, copy)


def start_of_storage(tensor: Tensor) -> int:
    """The address of a tensor's storage, without a Python object for it (`start_of_storage(x[1:])`)."""
    address = tensor.data_ptr()
    if not address:  # it is empty
        return tensor.untyped_storage().data_ptr()
    return address - int(tensor.storage_offset()) * tensor.element_size()


def lay_out(value: Any, tensors: list[Tensor], opaque: list[str], around: int = 0, gradients: bool = False) -> Layout:
    """How `tensors`, which are all in `value`, lie in their storages; adds to `opaque` what cannot be copied."""
    keys: dict[int, int] = {}  # of a tensor: its storage
    spans: dict[int, tuple[int, int, int]] = {}  # of a storage: a tensor in it, first and last byte that are needed
    for number, tensor in enumerate(tensors):
        if is_plain(tensor):
            size = tensor.element_size()
            start, end = (place * size for place in span_of(tensor))
            key = keys[id(tensor)] = start_of_storage(tensor) if gradients else tensor.untyped_storage()._cdata
            first, low, high = spans.get(key, (number, start, end))
            spans[key] = (first, min(low, start), max(high, end))
    placed: dict[int, tuple[int, int]] = {}
    parts: list[tuple[int, int, int]] = []
    left_out = 0
    for key, (first, start, end) in spans.items():
        if not gradients:
            total = tensors[first].untyped_storage().nbytes()
            if total <= _KEEP_WHOLE_BELOW or total <= _KEEP_WHOLE_FACTOR * (end - start):
                start, end = 0, total
            start, end = max(start - around, 0), min(end + around, total) if around else end
            left_out += total - (end - start + start % 64)
        start -= start % 64  # stay aligned for every dtype
        placed[key] = (len(parts), start)
        parts.append((first, start, end))

    def replace(tensor: Tensor) -> Any:
        if id(tensor) not in keys:
            odd = _stage_odd(tensor)
            if isinstance(odd, Opaque):
                opaque.append(odd.kind)
            return odd
        index, start = placed[keys[id(tensor)]]
        return Ref.of(tensor, index, start)

    return Layout(map_tensors(value, replace), tuple(parts), left_out)


def mark_after(copies: tuple[Tensor, ...]) -> Any:
    """An event after the last copy on a device, for whoever reads the copies on another stream."""
    for copy in reversed(copies):
        if not copy.is_cpu:
            kind = event_class(copy.device.type)
            if kind is None:
                return None
            mark = kind()
            mark.record()
            return mark
    return None


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but numbers in strided memory (`is_plain(torch.ones(2))`)."""
    return type(tensor) in _PLAIN_TYPES and tensor.layout == torch.strided and not tensor.is_quantized


def copy_storage(sample: Tensor, start: int, end: int) -> Tensor:
    """A copy, on the device, of these bytes of the storage that a tensor lies in, with as few launches as will do."""
    size = sample.element_size()
    if not (sample.is_conj() or sample.is_neg()):
        if start == 0 and end == sample.numel() * size:
            copy = sample.detach().clone()  # a tensor that fills its storage
            if copy.stride() == sample.stride():
                return copy
        if start % size == 0 and end % size == 0:
            return torch.as_strided(sample.detach(), ((end - start) // size,), (1,), start // size).clone()
    flat = torch.empty(0, dtype=torch.uint8, device=sample.device)
    flat.set_(sample.untyped_storage(), start, (end - start,), (1,))
    return flat.clone()


def _stage_odd(tensor: Tensor) -> Whole | Opaque:
    try:
        if type(tensor) not in _PLAIN_TYPES:
            return Opaque(f"{type(tensor).__module__}.{type(tensor).__qualname__}")
        return Whole(tensor.detach().clone(), tensor.requires_grad)
    except Exception as error:
        return Opaque(f"{type(tensor).__name__} ({type(error).__name__})")


def bytes_of(copy: Tensor) -> Tensor:
    """The bytes of a staged storage, without a copy (`bytes_of(torch.ones(2)).numel() == 8`)."""
    if copy.dtype == torch.uint8 and copy.dim() == 1:
        return copy
    flat = torch.empty(0, dtype=torch.uint8, device=copy.device)
    return flat.set_(copy.untyped_storage())


def tensors_over(tree: Any, flats: Sequence[Tensor]) -> Any:
    """A staged tree with tensors over the bytes of its storages, wherever these lie; nothing is copied."""
    typed: dict[tuple[int, torch.dtype], Tensor] = {}

    def make(leaf: Any) -> Any:
        if type(leaf) is not Ref:
            return leaf.copy.cpu().requires_grad_(leaf.requires_grad) if isinstance(leaf, Whole) else leaf
        base = typed.get((leaf.storage, leaf.dtype))
        if base is None:
            flat = flats[leaf.storage]
            rest = flat.numel() % leaf.dtype.itemsize
            base = (flat[:-rest] if rest else flat).view(leaf.dtype)
            typed[(leaf.storage, leaf.dtype)] = base
        tensor = base.as_strided(leaf.shape, leaf.stride, base.storage_offset() + leaf.offset)
        if leaf.conjugated:
            tensor = conj_view(tensor)
        if leaf.negated:
            tensor = neg_view(tensor)
        return tensor.requires_grad_() if leaf.requires_grad else tensor

    return map_leaves(tree, make)


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to the staged leaves of a tree, keeping its containers."""
    kind = type(value)
    if kind in _STAGED:
        return change(value)
    if kind is list or kind is tuple:
        found = [change(v) if type(v) in _STAGED else map_leaves(v, change) for v in value]
        return found if kind is list else tuple(found)
    if kind is dict:
        return {k: map_leaves(v, change) for k, v in value.items()} if value else {}
    parts = children(value)
    if parts is None:
        if kind is slice:
            return slice(*(map_leaves(v, change) for v in (value.start, value.stop, value.step)))
        return value
    return rebuild_container(value, kind, [map_leaves(v, change) for v in parts[1]])


# --- to the host --------------------------------------------------------------------------------------


class Fetcher:
    """Brings staged copies to the host; each thread has its own, with its own stream and pinned buffer."""

    def __init__(self, least: int = 1 << 24) -> None:
        self._least = least  # bytes of the pinned buffer
        self._streams: dict[torch.device, Any] = {}
        self._pinned: Tensor | None = None  # reused: device memory reaches the host through it at full speed
        self.to_host: Callable[[Tensor], Tensor] | None = None  # another way, where that one is wrong

    def unpack(self, staged: Operands) -> Any:
        """The staged tree with CPU tensors (`Fetcher().unpack(stage(args))`)."""
        return staged.tensors(self.fetch(staged))

    def fetch(self, staged: Operands) -> list[Tensor]:
        """The bytes of the staged storages on the host, to keep."""
        together = [staged.storages] if staged.nbytes <= MAX_BORROWED else [(s,) for s in staged.storages]
        return [
            flat if storage.is_cpu else flat.clone()
            for some in together
            for storage, flat in zip(some, self.borrow(some, staged.event))
        ]

    def fetch_and_borrow(self, kept: Operands, lent: Operands) -> tuple[list[Tensor], list[Tensor]]:
        """The bytes of two snapshots, the second one taken later; those of the first are to keep."""
        flats, count = self.borrow((*kept.storages, *lent.storages), lent.event or kept.event), len(kept.storages)
        return [f if s.is_cpu else f.clone() for s, f in zip(kept.storages, flats)], flats[count:]

    def borrow(self, storages: Sequence[Tensor], event: Any) -> list[Tensor]:
        """The bytes of staged storages on the host, valid until this fetcher is used again."""
        there = [s for s in storages if not s.is_cpu]
        if not there:
            if event is not None:  # they may still be on their way
                event.synchronize()
            return [bytes_of(s) for s in storages]
        if self.to_host is not None:
            if event is not None:
                event.synchronize()
            return [bytes_of(s) if s.is_cpu else self.to_host(bytes_of(s)) for s in storages]
        if not can_pin(there[0].device.type):
            if event is not None:
                event.synchronize()
            return [bytes_of(s).cpu() for s in storages]
        spans, size = [], 0
        for storage in there:
            spans.append((size, storage.nbytes))
            size += (storage.nbytes + 63) & -64  # as `padded` has it
        if self._pinned is None or self._pinned.numel() < size:
            self._pinned = torch.empty(max(size, self._least), dtype=torch.uint8, pin_memory=True)
        buffer = self._pinned
        self.put(there, event, buffer, spans)
        found = iter(spans)
        return [bytes_of(s) if s.is_cpu else buffer.narrow(0, *next(found)) for s in storages]

    def put(self, storages: Sequence[Tensor], event: Any, buffer: Tensor, spans: Sequence[tuple[int, int]]) -> None:
        """Copy the bytes of staged storages to a buffer on the host: each has a place there, and so many bytes."""
        if self.to_host is not None:
            if event is not None:
                event.synchronize()
            for span, storage in zip(spans, storages):
                buffer.narrow(0, *span).copy_(self.to_host(bytes_of(storage)))
            return
        devices = {s.device for s in storages}
        device = devices.pop() if len(devices) == 1 else None
        if device is None or not can_pin(device.type):
            if event is not None:
                event.synchronize()
            for span, storage in zip(spans, storages):
                buffer.narrow(0, *span).copy_(bytes_of(storage))
            return
        module = module_of(device.type)
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = module.Stream(device)
        if event is not None:
            stream.wait_event(event)
        done = False
        if device.type == "cuda":  # most of these copies take less time than PyTorch needs to ask for them
            first = buffer.data_ptr()
            copies = [(first + start, s.data_ptr(), count) for (start, count), s in zip(spans, storages)]
            with module.device(device):
                done = copy_to_host(copies, stream.cuda_stream)
        if not done:
            with module.stream(stream):
                for span, storage in zip(spans, storages):
                    buffer.narrow(0, *span).copy_(bytes_of(storage), non_blocking=True)
        stream.synchronize()


def on_host(staged: Operands) -> Operands:
    """The same snapshot in the memory of the host (`on_host(stage((x,)))`)."""
    if all(storage.is_cpu for storage in staged.copies()) or len(staged.copies()) < len(staged.storages):
        return staged
    flats = [torch.empty(s.nbytes, dtype=torch.uint8) for s in staged.storages]
    if staged.event is not None:
        staged.event.synchronize()
    for flat, storage in zip(flats, staged.storages):
        flat.copy_(bytes_of(storage))
    return staged._replace(storages=tuple(flats), event=None)


def padded(nbytes: int) -> int:
    """So many bytes, up to where the next storage begins (`padded(1) == 64`)."""
    return (nbytes + 63) & -64
