"""Enflame GCU through ``torch_gcu``."""

from ditorch.backend import Backend
from ditorch_common.environment import VENDORS

BACKEND = Backend(
    name="enflame",
    vendor="Enflame GCU",
    device_type="gcu",
    package="torch_gcu",
    collective="eccl",
    variables=VENDORS["torch_gcu"],
    capability=(8, 0),
    collective_gaps=frozenset({"avg"}),
)
