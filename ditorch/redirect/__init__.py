"""Turns "cuda" into the machine's device: one engine for every backend, no cost per operator."""

from __future__ import annotations

from ditorch import distributed
from ditorch.backend import Backend
from ditorch.patching import Ledger
from ditorch.redirect import (
    amp,
    comm,
    compiler,
    cuda_module,
    extensions,
    graphs,
    library,
    locations,
    runtime,
    sharing,
    tensor_types,
    tensors,
)
from ditorch.redirect.devices import Devices

__all__ = ["Devices", "install"]


def install(ledger: Ledger, backend: Backend, show_as_cuda: bool) -> Devices:
    """Apply every patch that the backend needs, in the ledger.

    Example: ``install(Ledger(), backend, show_as_cuda=True)``
    """
    devices = Devices(backend, show_as_cuda)
    parts = (tensors, tensor_types, cuda_module, graphs, amp, comm, runtime, compiler, library, distributed)
    for part in (*parts, sharing, extensions, locations):
        part.install(ledger, devices)
    return devices
