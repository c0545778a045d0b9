"""Moore Threads GPUs through ``torch_musa``."""

from ditorch.backend import Backend
from ditorch_common.environment import VENDORS

BACKEND = Backend(
    name="musa",
    vendor="Moore Threads",
    device_type="musa",
    package="torch_musa",
    collective="mccl",
    variables=VENDORS["torch_musa"],
    capability=(8, 0),
    profiler_activity="PrivateUse1",
)
