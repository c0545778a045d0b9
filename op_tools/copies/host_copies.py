"""CPU copies of device tensors, kept while the tensors live unchanged; OpFallback computes on them."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any, Final

import torch

from ..call.description import Tensor, pointer_of
from ..call.devices import NARROWER, can_pin, module_of
from ..native.layout import is_dense
from .materialise import span_of, turned_like
from .pinned_results import PinnedResults

_MIN_PINNED_BYTES: Final = 1 << 14  # smaller ones are not worth a pinned buffer
READS_AT_ONCE: Final = frozenset({"cuda"})  # their copies from pageable memory have read it all when they return
_MAX_ADDRESSES: Final = 10_000
_NO_NAMES: Final[dict[str, Any]] = {}


class _Known(weakref.ref):  # type: ignore[type-arg]
    """A device tensor with a copy on the CPU, and what is asked of it again and again."""

    __slots__ = ("copy", "dtype", "key", "numel", "offset", "storage", "version")

    dtype: torch.dtype
    key: int
    numel: int  # -1 where views cannot take their part of the copy
    offset: int
    storage: int
    copy: Tensor
    version: int


class HostCopies:
    """CPU copies of device tensors, kept while the tensor lives unchanged."""

    def __init__(self, keep: bool, pinned: PinnedResults | None = None, shown: bool = False) -> None:
        self._keep = keep
        self._shown = shown  # whether `address` will be asked
        self.pinned = pinned  # None where results are pageable
        self._kept: dict[int, _Known] = {}
        self._by_storage: dict[int, list[_Known]] = {}
        self._addresses: dict[int, int] = {}  # of copies made during this call, by the addresses on the device
        self._written: dict[int, list[tuple[Tensor, Tensor, int]]] = {}  # by storage
        self._counting = threading.Lock()
        self.narrowed = False  # whether results were made float32 for a device without float64
        self.copied_bytes = 0

    def get(self, tensor: Tensor) -> Tensor | None:
        """The copy of a tensor, or its part of another one's; None where there is none of its present version."""
        kept = self._kept.get(id(tensor))
        if kept is not None and kept() is tensor and kept.version == version_of(tensor):
            return kept.copy
        return self._part(tensor) if self._keep else None

    def _part(self, tensor: Tensor) -> Tensor | None:
        """The part of a known copy that a view, or another tensor over the same memory, looks at."""
        if tensor.layout != torch.strided or tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
            return None
        known = self._by_storage.get(tensor.untyped_storage()._cdata)
        if not known:
            return None
        version, dtype, offset = tensor._version, tensor.dtype, int(tensor.storage_offset())
        for kept in tuple(known):
            first = offset - kept.offset
            if kept.version != version or kept.dtype != dtype or first < 0 or first >= kept.numel:
                continue
            owner = kept()
            if owner is None or owner._version != version:
                continue
            length = tensor.numel() if tensor.is_contiguous() else span_of(tensor)[1] - offset
            if first + length <= kept.numel:
                whole = kept.copy
                return whole.as_strided(tensor.shape, tensor.stride(), int(whole.storage_offset()) + first)
        return None

    def put(self, tensor: Tensor, copy: Tensor) -> None:
        """Keep a copy; nobody may write to it."""
        key = id(tensor)
        if self._shown and len(self._addresses) < _MAX_ADDRESSES:
            self._addresses[pointer_of(tensor)] = pointer_of(copy)
        if not self._keep or tensor.is_inference():
            return
        old = self._kept.get(key)
        if old is not None:
            self._forget(old)
        known = _Known(tensor, self._forget)
        known.key, known.version, known.copy, known.dtype = key, tensor._version, copy, tensor.dtype
        known.storage, known.offset, known.numel = 0, 0, -1
        if tensor.layout == torch.strided:
            known.storage, known.offset = tensor.untyped_storage()._cdata, int(tensor.storage_offset())
            # without gaps: what lies in a gap was not copied
            if copy.layout == torch.strided and copy.stride() == tensor.stride() and is_dense(tensor):
                known.numel = tensor.numel()
        self._kept[key] = known
        self._by_storage.setdefault(known.storage, []).append(known)

    def _forget(self, known: _Known) -> None:
        if self._kept.get(known.key) is known:
            self._kept.pop(known.key, None)
        together = self._by_storage.get(known.storage)
        if together is not None:
            together[:] = [other for other in together if other is not known]
            if not together:
                self._by_storage.pop(known.storage, None)

    def drop_storage(self, tensor: Tensor) -> None:
        """A storage was written to: whatever was copied from it is stale."""
        storage = tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0
        for known in tuple(self._by_storage.get(storage, ())):
            self._forget(known)
        self._written.pop(storage, None)

    def drop_all(self) -> None:
        """Any tensor may have been written to, and nobody counted it."""
        self._kept.clear()
        self._by_storage.clear()
        self._written.clear()

    def written(self, tensor: Tensor, copy: Tensor, counts: bool) -> None:
        """A kernel wrote to a copy, which was written back; `counts` says that kernels like it count the write."""
        if tensor.layout == torch.strided and not tensor.is_inference():
            if counts:
                torch.autograd.graph.increment_version(tensor)
            writes = self._written.setdefault(tensor.untyped_storage()._cdata, [])
            writes.append((tensor, copy, tensor._version))

    def settle(self) -> None:
        """The operator is over, and PyTorch has counted its writes."""
        if not self._written:
            return
        written, self._written = self._written, {}
        for tensor, copy, version in itertools.chain(*written.values()):
            if tensor._version in (version, version + 1) and tensor.stride() == copy.stride():
                self.put(tensor, copy)

    def on_host(self, tensor: Tensor) -> Tensor:
        """A CPU tensor with these values that autograd may hang its own facts on."""
        copy = self.get(tensor)
        if copy is None:
            copy = self.fetch(tensor, keep=True)
            wait_for_copies(tensor.device)
        return copy.detach()

    def fetch(self, tensor: Tensor, keep: bool) -> Tensor:
        """A new copy, complete once the device's stream is; `keep` says that nobody will write to it."""
        base = tensor._base if keep and self._keep and tensor._is_view() else None
        if base is not None and base.numel() == tensor.numel() and base.layout == torch.strided:
            # the tensor looks at all of its base: the base lives longer than, say, the transposed weight
            self.fetch(base, keep=True)
            part = self.get(tensor)
            if part is not None:
                return part
        copy = _to_host(tensor)
        self.count(copy)
        if keep:
            self.put(tensor, copy)
        return copy

    def on_device(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A device tensor with these values, in float32 where the device has no float64; it remembers its copy."""
        try:
            moved, copy = _to_device(tensor.detach(), device)
        except TypeError:  # a device without float64
            if tensor.dtype not in NARROWER:
                raise
            self.narrowed = True
            moved, copy = _to_device(tensor.detach().to(NARROWER[tensor.dtype]), device)
        self.count(copy)
        self.put(moved, copy)
        return moved

    def own(self, copy: Tensor) -> Tensor:
        """A copy of a copy, to write to."""
        return copy.clone() if self.pinned is None else self.pinned.run(copy.clone, (), _NO_NAMES)

    def count(self, copied: Tensor) -> None:
        """These bytes went from the device to the host, or back."""
        with self._counting:
            self.copied_bytes += copied.numel() * copied.element_size()

    def forget_addresses(self) -> None:
        """A call begins: from now on, `address` knows copies that are made during this call, or kept."""
        self._addresses.clear()

    def address(self, tensor: Tensor, held: list[Tensor]) -> int:
        """Where the copy of a tensor is; one that has none gets one, which is added to `held`."""
        if tensor.is_cpu:
            return pointer_of(tensor)
        known = self.get(tensor)
        if known is not None:
            return pointer_of(known)
        found = self._addresses.get(pointer_of(tensor))
        if found is None:
            held.append(self.on_host(tensor))
            found = pointer_of(held[-1])
        return found

    def end(self) -> None:
        """Let go of everything; backward passes of calls that ran may still come."""
        self.pinned = None
        self._addresses.clear()
        self.drop_all()


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to; inference tensors do not count (`version_of(x)`)."""
    return -1 if tensor.is_inference() else tensor._version


def wait_for_copies(device: torch.device) -> None:
    """Wait until copies to pinned memory are complete (`wait_for_copies(x.device)`)."""
    if can_pin(device.type):
        module_of(device.type).current_stream(device).synchronize()


def _to_host(tensor: Tensor) -> Tensor:
    """A CPU copy of the same layout; on devices with pinned memory it is complete after a sync."""
    data = tensor.detach()
    if data.layout != torch.strided:
        return data.cpu()
    pin = can_pin(data.device.type)
    if data.is_contiguous() and not data.is_conj() and not data.is_neg():
        copy = torch.empty(data.shape, dtype=data.dtype, pin_memory=pin)
        if copy.stride() == data.stride():
            return copy.copy_(data, non_blocking=pin)
    flat = _bytes_of(data)
    host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=pin)
    return _laid_out(host.copy_(flat, non_blocking=pin), data)


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory between a tensor's first element and its last, gaps included."""
    first, last = span_of(tensor)
    size = tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), first * size, ((last - first) * size,), (1,))


def _laid_out(flat: Tensor, like: Tensor) -> Tensor:
    """What a copy of the bytes of a tensor is as a tensor."""
    made = torch.empty(0, dtype=like.dtype, device=flat.device)
    made.set_(flat.untyped_storage(), 0, like.shape, like.stride())
    return turned_like(made, like)


def _to_device(tensor: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """A device tensor with these values, and a CPU tensor that may be kept as its copy."""
    if tensor.layout != torch.strided:
        return tensor.to(device), tensor
    copy, at_once = tensor, device.type in READS_AT_ONCE
    if can_pin(device.type) and tensor.nbytes > _MIN_PINNED_BYTES and not tensor.is_pinned():
        pinned = torch.empty_like(tensor, pin_memory=True)
        if pinned.stride() == tensor.stride():
            # The pinned copy is the one to keep: the memory of the result is free at once for the next one, and warm.
            copy, at_once = pinned.copy_(tensor), True
    moved = copy.to(device, non_blocking=at_once)
    if moved.stride() != tensor.stride():  # a result with gaps or overlaps in its memory keeps them
        moved = _laid_out(_bytes_of(tensor).to(device), tensor)
    return moved, copy
