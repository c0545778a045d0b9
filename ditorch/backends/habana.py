"""Intel Gaudi through ``habana_frameworks``."""

import importlib

from ditorch.backend import Backend
from ditorch_common.environment import VENDORS


def _load() -> None:
    importlib.import_module("habana_frameworks.torch.core")
    importlib.import_module("habana_frameworks.torch.hpu")


BACKEND = Backend(
    name="habana",
    vendor="Intel Gaudi",
    device_type="hpu",
    package="habana_frameworks",
    collective="hccl",
    variables=VENDORS["habana_frameworks"],
    capability=(8, 0),
    distribution="habana-torch-plugin",
    profiler_activity="HPU",
    one_device_per_process=True,
    compilers=("hpu_backend",),
    collective_gaps=frozenset({"avg"}),
    loader=_load,
)
