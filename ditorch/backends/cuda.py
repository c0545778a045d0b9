"""NVIDIA and AMD GPUs: PyTorch itself calls them ``cuda``, so ditorch changes nothing."""

import torch

from ditorch.backend import Backend


def _probe() -> tuple[bool, str]:
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return False, "PyTorch was built without CUDA or ROCm"
    if not torch.cuda.is_available():
        return False, "torch.cuda.is_available() is False"
    return True, f"{torch.cuda.device_count()} device(s)"


BACKEND = Backend(
    name="cuda",
    vendor="NVIDIA or AMD GPU",
    device_type="cuda",
    collective="nccl",
    visible_devices="CUDA_VISIBLE_DEVICES",
    native=True,
    probe=_probe,
)
