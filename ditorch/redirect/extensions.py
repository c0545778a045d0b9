"""``torch.utils.cpp_extension`` with CUDA source: says what is true, instead of asking for CUDA_HOME."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ditorch import surface
from ditorch.errors import UnsupportedError
from ditorch.imports import AfterImport
from ditorch.patching import Ledger, Patch
from ditorch.redirect.devices import Devices

WHY = "CUDA source cannot be compiled for another device"


def install(ledger: Ledger, devices: Devices) -> None:
    """Refuse CUDA source by name when an extension is asked for; C++ source is compiled as before.

    Example: ``install(ledger, devices); torch.utils.cpp_extension.load("ops", ["ops.cpp"])``
    """
    hook = AfterImport("torch.utils.cpp_extension", lambda module: _redirect(ledger, devices, module))
    what = "import of torch.utils.cpp_extension"
    ledger.record(Patch(what, WHY, "unsupported", "registered", None, hook.remove))
    hook.install()


def refusal(devices: Devices, call: str, sources: Sequence[str]) -> UnsupportedError:
    """The error for CUDA source, with its files.

    Example: ``raise refusal(devices, "torch.utils.cpp_extension.load", ["kernel.cu"])``
    """
    named = ", ".join(sources[:3]) + (", ..." if len(sources) > 3 else "")
    return UnsupportedError(
        f"{call} of CUDA source ({named})",
        surface.label(devices.backend),
        f"operators of torch, a C++ extension, or a kernel in {devices.backend.vendor}'s own language. "
        "`ditorch scan` lists what else of this code needs CUDA",
    )


def _cuda_sources(sources: Any) -> list[str]:
    names = [sources] if isinstance(sources, (str, Path)) else list(sources or ())
    return [str(name) for name in names if str(name).endswith((".cu", ".cuh"))]


def _redirect(ledger: Ledger, devices: Devices, module: Any) -> None:
    def watch(name: str, position: int, keyword: str, always: str = "") -> None:
        call = f"torch.utils.cpp_extension.{name}"

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def checked(*args: Any, **kwargs: Any) -> Any:
                given = kwargs.get(keyword, args[position] if position < len(args) else None)
                found = _cuda_sources(given) if keyword == "sources" else [keyword] if given else []
                if found or always:
                    raise refusal(devices, call, found or [always])
                return original(*args, **kwargs)

            return checked

        ledger.redirect(getattr(module, name), make, WHY, "unsupported", call)

    watch("load", 1, "sources")
    watch("load_inline", 2, "cuda_sources")
    watch("CUDAExtension", 1, "sources", "setup.py")
