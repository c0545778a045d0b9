"""Intel GPUs through ``torch.xpu``, which is part of PyTorch."""

from ditorch.backend import Backend

BACKEND = Backend(
    name="intel",
    vendor="Intel GPU",
    device_type="xpu",
    collective="xccl",
    visible_devices="ZE_AFFINITY_MASK",
    capability=(8, 0),
    profiler_activity="XPU",
)
