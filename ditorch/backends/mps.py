"""Apple GPUs through ``torch.mps``, which is part of PyTorch."""

import torch

from ditorch.backend import Backend


def _probe() -> tuple[bool, str]:
    if not torch.backends.mps.is_built():
        return False, "PyTorch was built without MPS"
    if not torch.backends.mps.is_available():
        return False, "torch.backends.mps.is_available() is False"
    return True, "available"


BACKEND = Backend(
    name="mps",
    vendor="Apple GPU",
    device_type="mps",
    capability=(8, 0),
    probe=_probe,
    aliases={
        "Event": "event.Event",
        "memory_allocated": "current_allocated_memory",
        "memory_reserved": "driver_allocated_memory",
    },
    gaps={
        "torch.float64": "float32: the device has no float64",
    },
)
