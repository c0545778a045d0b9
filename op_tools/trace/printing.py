"""Fingerprints of the tensors of a run: computed where the tensors lie, written when they have arrived."""

from __future__ import annotations

import time
from typing import Any, Final

import torch

from ..call.description import Tensor
from ..call.devices import accelerator_type
from ..compat import cuda_device
from .device_prints import BookPrints, DevicePrints, Wanted, is_compiling, kernel_of
from .format import TraceWriter
from .places import Sharding
from .prints import Batch, fingerprint, first_place, stretch_print

PLAIN: Final = frozenset({Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", Tensor)})
"""Types of tensors that wrap no others."""
_EARLY_SECONDS: Final = 0.5  # after which prints are fetched that would wait for more of them


class Printing:
    """Takes the print of each tensor once and writes it to the trace.

    >>> Printing(writer, (0, 1)).take(3, x, None)                      # doctest: +SKIP
    """

    def __init__(self, writer: TraceWriter, world: tuple[int, int]) -> None:
        self._writer, self._world = writer, world
        self._on_cuda = accelerator_type() == "cuda"
        self._batch = Batch()
        self._host = Batch()  # of prints that were computed in the memory of the host: nothing to wait for
        self._fetched = time.monotonic()  # when prints were last fetched early
        self._wanted = False  # whether the next launch is to start copies from GPUs
        writer.bring = self.bring
        self.fresh: list[Wanted] = []  # on GPUs, of the present call, not printed yet
        self._on_gpus: dict[torch.device, DevicePrints | None] = {}
        self._book: Any = None  # in machine code: it prints what lies on one GPU, from the first call on if it can
        self._of_book: BookPrints | None = None

    def print_by(self, book: Any) -> None:
        """The book in machine code prints by itself: on the current GPU, or on the one of the first tensor."""
        self._book = book
        if self._on_cuda:  # before the first call: PyTorch's own kernels take long to load
            self._gpu(torch.device("cuda", cuda_device()))

    def take(self, number: int, tensor: Tensor, sharding: Sharding | None) -> None:
        """Print one tensor: now, with the next launch, or not where it has no values (`printing.take(3, x, None)`)."""
        if tensor.is_meta or tensor.layout != torch.strided or tensor.is_nested:
            return
        if type(tensor) not in PLAIN and _storageless(tensor):
            return
        on_kernel = self._on_cuda and tensor.is_cuda and self._gpu(tensor.device) is not None
        for part, first in self._parts_of(tensor, sharding):
            if first is None:
                assert sharding is not None
                self._add(number, part, fingerprint(tensor, sharding.whole, sharding.at))
            elif on_kernel:
                self.fresh.append(((number, part), tensor, first))
            else:
                self._add(number, part, stretch_print(tensor, first))

    def _parts_of(self, tensor: Tensor, sharding: Sharding | None) -> list[tuple[int, int | None]]:
        """The prints of a tensor: their part, and where it begins in a whole; None where the part has gaps."""
        if sharding is not None:
            whole = sharding.whole
            return [(0, 0 if whole is None else first_place(tensor.shape, whole, sharding.at))]
        rank, world = self._world
        return [(0, 0), (1, rank * tensor.numel())] if world > 1 and tensor.dim() else [(0, 0)]

    def _add(self, number: int, part: int, found: Tensor) -> None:
        batch = self._host if found.is_cpu else self._batch
        if batch.add(number, part, found):
            self._land(batch)

    def take_all(self, fresh: list[tuple[int, Tensor]]) -> None:
        """Print the new tensors of a call (`printing.take_all([(3, x)])`)."""
        for number, tensor in fresh:
            self.take(number, tensor, None)
        if self.fresh:
            self.launch()
        if self._wanted:
            self._send_early()

    def bring(self) -> None:
        """Write prints of the last half second, so that a run that is killed leaves them; no device is waited for.

        A thread of op_tools calls this, with the recorder's lock. Copies from GPUs are for the thread that launches.
        """
        now = time.monotonic()
        if now - self._fetched >= _EARLY_SECONDS:
            self._fetched = now
            self._wanted = self._on_cuda
            self._land(self._host)

    def _send_early(self) -> None:
        self._wanted = False
        if self._of_book is not None:
            self._of_book.send_early()
        for prints in self._on_gpus.values():
            if prints is not None:
                prints.send_early()

    def _gpu(self, device: torch.device) -> DevicePrints | None:
        if device not in self._on_gpus:
            kernel = kernel_of(device.index)
            if kernel is None and is_compiling(device.index):
                return None  # PyTorch's operators print until it is there
            self._on_gpus[device] = None if kernel is None else DevicePrints(kernel, self._write_prints)
            alone = self._book is not None and self._of_book is None and self._world[1] == 1
            if kernel is not None and alone:
                self._of_book = BookPrints(kernel, self._book, self._write_numbered)
        return self._on_gpus[device]

    def launch(self) -> None:
        """Print the new tensors of a call that lie on GPUs: before anybody writes to them, with one kernel."""
        fresh, self.fresh = self.fresh, []
        while fresh:
            device = fresh[-1][1].device
            here, fresh = (fresh, []) if len(fresh) == 1 else _divided(fresh, device)
            prints = self._on_gpus[device]
            assert prints is not None
            for (number, part), tensor, first in prints.add(here):
                self._add(number, part, stretch_print(tensor, first))

    def _write_numbered(self, numbers: list[int], rows: Any) -> None:
        self._writer.flush()  # their tensors come first
        self._writer.add_columns("prints", [numbers, *rows.T, [0] * len(numbers)])

    def _write_prints(self, keys: list[tuple[int, int]], rows: Any) -> None:
        numbers, parts = zip(*keys)
        self._writer.flush()
        self._writer.add_columns("prints", [numbers, *rows.T, parts])

    def _land(self, batch: Batch) -> None:
        """Fetch prints that wait on devices, or on the host."""
        for row in batch.land():
            self._writer.add("prints", row)

    def land_all(self) -> None:
        """Wait for all prints and write them (`printing.land_all()`)."""
        self.launch()
        if self._of_book is not None:
            self._of_book.land()
        for prints in self._on_gpus.values():
            if prints is not None:
                prints.land()
        self._land(self._host)
        self._land(self._batch)


def _divided(fresh: list[Wanted], device: torch.device) -> tuple[list[Wanted], list[Wanted]]:
    here = [one for one in fresh if one[1].device == device]
    return here, [one for one in fresh if one[1].device != device]


def _storageless(tensor: Tensor) -> bool:
    try:
        return tensor.data_ptr() == 0 and tensor.numel() > 0
    except Exception:
        return True
