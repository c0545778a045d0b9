"""Cambricon MLU through ``torch_mlu``."""

from ditorch.backend import Backend

BACKEND = Backend(
    name="cambricon",
    vendor="Cambricon MLU",
    device_type="mlu",
    package="torch_mlu",
    collective="cncl",
    visible_devices="MLU_VISIBLE_DEVICES",
    capability=(8, 0),
    collective_gaps=frozenset({"avg"}),
)
