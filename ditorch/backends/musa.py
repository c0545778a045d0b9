"""Moore Threads GPUs through ``torch_musa``."""

from ditorch.backend import Backend

BACKEND = Backend(
    name="musa",
    vendor="Moore Threads",
    device_type="musa",
    package="torch_musa",
    collective="mccl",
    visible_devices="MUSA_VISIBLE_DEVICES",
    capability=(8, 0),
)
