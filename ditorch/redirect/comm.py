"""Copies between several devices of one process (``nn.DataParallel``), written with ordinary tensor moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.parallel.comm

from ditorch.patching import Ledger
from ditorch.redirect.devices import Devices

WHY = "PyTorch has this for CUDA alone; done here with Tensor.to"


class Copies:
    """The functions of ``torch.nn.parallel.comm`` for any device."""

    def __init__(self, devices: Devices) -> None:
        self._on = devices.indexed

    def broadcast(self, tensor: torch.Tensor, devices: Any = None, *, out: Any = None) -> Any:
        if out is not None:
            for target in out:
                target.copy_(tensor)
            return tuple(out)
        return tuple(tensor.to(self._on(device)) for device in devices)

    def broadcast_coalesced(
        self, tensors: Sequence[torch.Tensor], devices: Any, buffer_size: int = 0
    ) -> list[tuple[torch.Tensor, ...]]:
        return [tuple(tensor.to(self._on(device)) for tensor in tensors) for device in devices]

    def reduce_add(self, inputs: Sequence[torch.Tensor], destination: Any = None) -> torch.Tensor:
        target = self._on(torch.cuda.current_device() if destination is None else destination)
        total = inputs[0].to(target, copy=True)
        for other in inputs[1:]:
            total += other.to(target)
        return total

    def reduce_add_coalesced(
        self, inputs: Sequence[Sequence[torch.Tensor]], destination: Any = None, buffer_size: int = 0
    ) -> tuple[torch.Tensor, ...]:
        return tuple(self.reduce_add(column, destination) for column in zip(*inputs))

    def scatter(
        self,
        tensor: torch.Tensor,
        devices: Any = None,
        chunk_sizes: Any = None,
        dim: int = 0,
        streams: Any = None,
        *,
        out: Any = None,
    ) -> tuple[torch.Tensor, ...]:
        count = len(devices if out is None else out)
        parts = tensor.split(list(chunk_sizes), dim) if chunk_sizes else tensor.chunk(count, dim)
        if out is not None:
            for target, part in zip(out, parts):
                target.copy_(part)
            return tuple(out)
        return tuple(part.to(self._on(device)) for part, device in zip(parts, devices))

    def gather(
        self, tensors: Sequence[torch.Tensor], dim: int = 0, destination: Any = None, *, out: Any = None
    ) -> torch.Tensor:
        if out is not None:
            return torch.cat([tensor.to(out.device) for tensor in tensors], dim, out=out)
        target = torch.device("cpu") if destination == -1 else self._on(destination)
        return torch.cat([tensor.to(target) for tensor in tensors], dim)


def install(ledger: Ledger, devices: Devices) -> None:
    """Redirect ``torch.nn.parallel.comm``; ``torch.cuda.comm`` is the same functions.

    Example: ``install(ledger, devices); torch.nn.DataParallel(model)(x)``
    """
    copies = Copies(devices)
    for name in (
        "broadcast",
        "broadcast_coalesced",
        "reduce_add",
        "reduce_add_coalesced",
        "scatter",
        "gather",
    ):
        replacement = getattr(copies, name)
        function = getattr(torch.nn.parallel.comm, name)
        ledger.redirect(function, lambda original, call=replacement: call, WHY, "emulated")  # type: ignore[misc]
