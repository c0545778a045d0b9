"""Biren GPUs through ``torch_br`` or its successor ``torch_supa``: one device, two packages."""

from ditorch.backend import Backend

BACKEND_BR = Backend(
    name="biren",
    vendor="Biren",
    device_type="supa",
    package="torch_br",
    collective="sccl",
    visible_devices="SUPA_VISIBLE_DEVICES",
    capability=(8, 0),
    collective_gaps=frozenset({"avg"}),
)
BACKEND_SUPA = Backend(
    name="biren_supa",
    vendor="Biren",
    device_type="supa",
    package="torch_supa",
    collective="sccl",
    visible_devices="SUPA_VISIBLE_DEVICES",
    capability=(8, 0),
    collective_gaps=frozenset({"avg"}),
)
