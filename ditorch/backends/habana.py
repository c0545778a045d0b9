"""Intel Gaudi through ``habana_frameworks``."""

import importlib

from ditorch.backend import Backend


def _load() -> None:
    importlib.import_module("habana_frameworks.torch.core")
    importlib.import_module("habana_frameworks.torch.hpu")


BACKEND = Backend(
    name="habana",
    vendor="Intel Gaudi",
    device_type="hpu",
    package="habana_frameworks",
    collective="hccl",
    visible_devices="HABANA_VISIBLE_MODULES",
    capability=(8, 0),
    collective_gaps=frozenset({"avg"}),
    loader=_load,
)
