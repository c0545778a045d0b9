"""DeepLink DIPU through ``torch_dipu``: one package for several chips."""

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
