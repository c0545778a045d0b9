"""NVIDIA and AMD GPUs: PyTorch itself calls them ``cuda``, so ditorch changes nothing."""

import torch

from ditorch.backend import Backend
from ditorch_common.environment import Variables


def _probe() -> tuple[bool, str]:
    # torch.cuda itself may answer for another device already, so the build is asked.
    count = getattr(torch._C, "_cuda_getDeviceCount", None)
    # A vendor's package may answer as cuda by itself: then the build still has none.
    if count is None or not torch._C._has_cuda:
        return False, "PyTorch was built without CUDA or ROCm"
    found = count()
    return found > 0, f"{found} device(s)"


BACKEND = Backend(
    name="cuda",
    vendor="NVIDIA or AMD GPU",
    device_type="cuda",
    collective="nccl",
    variables=Variables("CUDA_VISIBLE_DEVICES"),
    native=True,
    probe=_probe,
)
