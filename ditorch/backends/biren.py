"""Biren GPUs through ``torch_br`` or its successor ``torch_supa``: one device, two packages."""

from ditorch.backend import Backend
from ditorch_common.environment import VENDORS


def _backend(name: str, package: str) -> Backend:
    return Backend(
        name=name,
        vendor="Biren",
        device_type="supa",
        package=package,
        collective="bccl",
        variables=VENDORS[package],
        capability=(8, 0),
        collective_gaps=frozenset({"avg"}),
    )


BACKEND_BR = _backend("biren", "torch_br")
BACKEND_SUPA = _backend("biren_supa", "torch_supa")
