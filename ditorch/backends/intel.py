"""Intel GPUs through ``torch.xpu``, which is part of PyTorch."""

from ditorch.backend import Backend
from ditorch_common.environment import Variables

BACKEND = Backend(
    name="intel",
    vendor="Intel GPU",
    device_type="xpu",
    collective="xccl",
    variables=Variables("ZE_AFFINITY_MASK", {"PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF"}),
    capability=(8, 0),
    profiler_activity="XPU",
)
