"""How staged copies reach the host: through pinned memory, on a stream of the fetching thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from ..call.description import Tensor
from ..call.devices import can_pin, module_of
from ..native.kernels import copy_to_host
from .operands import Operands, bytes_of, is_flat

MOST_BORROWED: Final = 1 << 28  # bytes that go through the pinned buffer at once


class _PinnedBuffer:
    """One reused pinned buffer: device memory reaches the host through it at full speed."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def room(self, size: int) -> Tensor:
        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = torch.empty(max(size, 1 << 24), dtype=torch.uint8, pin_memory=True)
        return self._buffer


class Fetcher:
    """Brings staged copies to the host; each thread has its own, with its own stream and pinned buffer."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._pinned = _PinnedBuffer()

    def unpack(self, staged: Operands) -> Any:
        """The staged tree with CPU tensors (`Fetcher().unpack(stage(args))`)."""
        return staged.tensors(self.fetch(staged))

    def fetch(self, staged: Operands) -> list[Tensor]:
        """The bytes of the staged storages on the host, to keep."""
        together = [staged.storages] if staged.nbytes <= MOST_BORROWED else [(s,) for s in staged.storages]
        return [
            flat if storage.is_cpu else flat.clone()
            for some in together
            for storage, flat in zip(some, self.borrow(some, staged.event))
        ]

    def borrow(self, storages: Sequence[Tensor], event: Any) -> list[Tensor]:
        """The bytes of staged storages on the host, valid until this fetcher is used again."""
        flats = [bytes_of(s) for s in storages]
        devices = {f.device for f in flats if not f.is_cpu}
        if not devices:
            return flats
        device = devices.pop()
        if devices or not can_pin(device.type):
            if event is not None:
                event.synchronize()
            return [f.cpu() for f in flats]
        buffer = self._pinned.room(sum([padded(f.numel()) for f in flats if not f.is_cpu]))
        found, position = [], 0
        for flat in flats:
            if flat.is_cpu:
                found.append(flat)
            else:
                found.append(buffer[position : position + flat.numel()])
                position += padded(flat.numel())
        self._copy([(view, flat) for view, flat in zip(found, flats) if view is not flat], device, event)
        return found

    def put(self, storages: Sequence[Tensor], event: Any, buffer: Tensor, spans: Sequence[tuple[int, int]]) -> None:
        """Copy the bytes of staged storages to a buffer on the host: each has a span, of as many as `bytes_in` says."""
        devices = {s.device for s in storages}
        device = devices.pop() if len(devices) == 1 else None
        if device is not None and device.type == "cuda" and self._put_by_driver(storages, device, event, buffer, spans):
            return
        pairs = [(buffer[start : start + count], bytes_of(s)) for (start, count), s in zip(spans, storages)]
        if device is not None and can_pin(device.type):
            self._copy(pairs, device, event)
            return
        if event is not None:
            event.synchronize()
        for place, flat in pairs:
            place.copy_(flat)

    def _put_by_driver(
        self,
        storages: Sequence[Tensor],
        device: torch.device,
        event: Any,
        buffer: Tensor,
        spans: Sequence[tuple[int, int]],
    ) -> bool:
        """The same in fewer words: most of these copies take less time than PyTorch needs to ask for them."""
        stream, first = self._stream(device), buffer.data_ptr()
        if event is not None:
            stream.wait_event(event)
        copies = [(first + start, _address(s), count) for (start, count), s in zip(spans, storages)]
        with module_of(device.type).device(device):
            done = copy_to_host(copies, stream.cuda_stream)
            stream.synchronize()
        return done

    def _stream(self, device: torch.device) -> Any:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = module_of(device.type).Stream(device)
        return stream

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device, event: Any) -> None:
        """Copy from a device on a stream of this fetcher, and wait for it."""
        stream = self._stream(device)
        with module_of(device.type).stream(stream):
            if event is not None:
                stream.wait_event(event)
            for view, flat in pairs:
                view.copy_(flat, non_blocking=True)
            stream.synchronize()


def _address(copy: Tensor) -> int:
    if is_flat(copy):
        return copy.data_ptr()
    return int(copy.untyped_storage().data_ptr())


def bytes_in(copy: Tensor) -> int:
    """How many bytes a staged storage has (`bytes_in(torch.ones(2)) == 8`)."""
    if is_flat(copy):
        return copy.numel()
    return int(copy.untyped_storage().nbytes())


def padded(nbytes: int) -> int:
    """So many bytes, up to where the next storage begins (`padded(1) == 64`)."""
    return (nbytes + 63) & -64
