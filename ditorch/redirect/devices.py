"""The one table that says what ``cuda`` means, in both directions.

Inwards, a device parameter that is exactly ``cuda`` or ``cuda:N`` becomes the real device. Outwards, the
real device of a tensor is shown to user code as ``cuda:N``. PyTorch's own Python code and the vendor's
see the real device in both cases, so that everything they do for that device type keeps working.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ditorch.backend import Backend
from ditorch.imports import AfterImport
from ditorch.patching import Ledger, Patch

_MAX_DEVICES = 64
# These describe tensors for the user or are CUDA code themselves, so they see what the user sees.
_USER_FACING = ("torch._tensor_str", "torch.cuda", "torch.nn.utils.rnn", "torch.nn.parallel.data_parallel")
_HOUSE = ("torch", "ditorch", "op_tools")


class Devices:
    """Translates between the devices that CUDA code writes and the devices of one backend.

    Example::

        devices = Devices(backend, show_as_cuda=True)
        devices.real("cuda:1")          # device(type='npu', index=1)
        devices.shown(tensor_device)    # device(type='cuda', index=1)
    """

    def __init__(self, backend: Backend, show_as_cuda: bool) -> None:
        self.backend = backend
        self.type = backend.device_type
        self.show_as_cuda = show_as_cuda and backend.shows_as_cuda
        self.inwards: dict[Any, torch.device] = {}
        self.outwards: dict[torch.device, torch.device] = {}
        self._add("cuda", torch.device("cuda"), torch.device(self.type))
        self._one = self.type == "cpu" or backend.one_device_per_process
        for index in range(_MAX_DEVICES):
            real = torch.device(self.type) if self._one else torch.device(self.type, index)
            self._add(f"cuda:{index}", torch.device("cuda", index), real)
        if self._one and self.show_as_cuda:
            self.outwards[torch.device(self.type, 0)] = torch.device("cuda", 0)
        self._inside: dict[Any, bool] = dict.fromkeys(_USER_FACING, False)
        vendor = (backend.package,) if backend.package else ()
        self._inside_packages = frozenset((*_HOUSE, *vendor))

    def _add(self, text: str, cuda: torch.device, real: torch.device) -> None:
        self.inwards[text] = self.inwards[cuda] = real
        if self.show_as_cuda:
            self.outwards.setdefault(real, cuda)

    def real(self, device: Any) -> Any:
        """The device that is meant; anything that is not exactly a cuda device is returned as it is.

        Example: ``devices.real("runs/cuda.pt") == "runs/cuda.pt"``
        """
        if isinstance(device, (str, torch.device)):
            return self.inwards.get(device, device)
        return device

    def real_type(self, device_type: Any) -> Any:
        """The same for a bare device type, as in ``torch.autocast("cuda")``.

        Example: ``devices.real_type("cuda") == "npu"``
        """
        return self.type if device_type == "cuda" else device_type

    def indexed(self, device: Any) -> torch.device:
        """The real device for what ``torch.cuda`` functions accept: None, a number, a name, a device.

        Example: ``devices.indexed(1) == torch.device("npu:1")``
        """
        if device is None:
            return torch.device(self.type)
        if isinstance(device, int):
            return torch.device(self.type) if self._one else torch.device(self.type, device)
        return torch.device(self.real(device))

    def shown(self, device: Any) -> Any:
        """What user code sees for a real device.

        Example: ``devices.shown(torch.device("npu:1")) == torch.device("cuda:1")``
        """
        return self.outwards.get(device, device)

    def is_inside(self, module_name: str | None) -> bool:
        """Whether code of that module belongs to PyTorch, the vendor or this project.

        Example: ``devices.is_inside("torch.optim.adam")`` is True.
        """
        inside = self._inside.get(module_name)
        if inside is None:
            name = str(module_name or "")
            inside = name.partition(".")[0] in self._inside_packages and not name.startswith("torch.cuda.")
            self._inside[module_name] = inside
        return inside

    def called_from_inside(self, depth: int) -> bool:
        """Whether the caller ``depth`` frames up belongs to PyTorch, the vendor or this project.

        Example: used by properties that show ``cuda`` to users alone.
        """
        return self.is_inside(sys._getframe(depth + 1).f_globals.get("__name__"))


def after_import(ledger: Ledger, module: str, redirect: Callable[[Any], None], what: str) -> None:
    """Change a module once it is imported, or now if it is there already; in the ledger from now on.

    Example: ``after_import(ledger, "torch._inductor.utils", redirect, "get_gpu_type()")``
    """
    hook = AfterImport(module, redirect)
    ledger.record(Patch(f"import of {module}", what, "mapped", "registered", None, hook.remove))
    hook.install()


def redirect_parameters(
    ledger: Ledger,
    function: Any,
    translate: Callable[[Any], Any],
    parameters: Mapping[str, int],
    why: str,
    what: str | None = None,
) -> None:
    """Redirect a function so that the named parameters (with their positions) are translated.

    Example: ``redirect_parameters(ledger, torch.jit.load, devices.real, {"map_location": 1}, "...")``
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            for name, position in parameters.items():
                if name in kwargs:
                    kwargs[name] = translate(kwargs[name])
                elif position < len(args):
                    args = (*args[:position], translate(args[position]), *args[position + 1 :])
            return original(*args, **kwargs)

        return call

    ledger.redirect(function, make, why, what=what)


def translate_call(devices: Devices, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose device arguments, by position or by keyword, are translated first.

    Example: ``translate_call(devices, torch.npu.set_device)("cuda:1")``
    """
    real = devices.real

    def call(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = tuple(real(argument) for argument in args)
        if kwargs:
            kwargs = {name: real(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)

    return call
