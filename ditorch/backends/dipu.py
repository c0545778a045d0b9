"""DeepLink DIPU through ``torch_dipu``: one package for several chips, written for PyTorch 2.0 to 2.2.

ditorch needs PyTorch 2.6, so this description is checked against the package's surface and promises nothing more.
"""

from ditorch.backend import Backend

BACKEND = Backend(
    name="dipu",
    vendor="DeepLink DIPU",
    device_type="xpu",
    package="torch_dipu",
    module_path="torch_dipu.dipu",
    collective="dicl",
    capability=(8, 0),
    collective_gaps=frozenset({"avg"}),
)
