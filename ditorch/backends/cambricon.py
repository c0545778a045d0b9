"""Cambricon MLU through ``torch_mlu``."""

from ditorch.backend import Backend
from ditorch_common.environment import VENDORS

BACKEND = Backend(
    name="cambricon",
    vendor="Cambricon MLU",
    device_type="mlu",
    package="torch_mlu",
    collective="cncl",
    variables=VENDORS["torch_mlu"],
    profiler_activity="MLU",
    collective_gaps=frozenset({"avg"}),
)
