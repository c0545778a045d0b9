"""Enflame GCU through ``torch_gcu``."""

from ditorch.backend import Backend

BACKEND = Backend(
    name="enflame",
    vendor="Enflame GCU",
    device_type="gcu",
    package="torch_gcu",
    collective="eccl",
    visible_devices="TOPS_VISIBLE_DEVICES",
    capability=(8, 0),
    collective_gaps=frozenset({"avg"}),
)
