"""Device tensors in other processes (``torch.multiprocessing``): handed over where the device can, refused by name
where it cannot.

PyTorch pickles what a queue is given in a thread of the queue: an error there is printed, the tensor is lost, and
the reader waits for ever. So what cannot be sent is refused when it is put.
"""

from __future__ import annotations

import multiprocessing.queues
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing.reductions as reductions
import torch.utils.dlpack

from ditorch import surface
from ditorch.errors import UnsupportedError
from ditorch.imports import AfterImport
from ditorch.patching import Ledger, Patch
from ditorch.redirect.devices import Devices

INSTEAD = "send tensor.cpu(), and move it to the device in the process that receives it"


def install(ledger: Ledger, devices: Devices) -> None:
    """Redirect how tensors are pickled for other processes.

    Example: ``install(ledger, devices); queue.put(torch.zeros(2, device="cuda"))``
    """
    _install_dlpack(ledger, devices)
    _install_remote_calls(ledger, devices)
    reducers: dict[Any, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    if devices.type == "cpu" or reducers.get(torch.Tensor) is not reductions.reduce_tensor:
        return  # the vendor has its own
    device_type, module = devices.type, devices.backend.module
    reduce: Any = getattr(module, "_reduce_tensor", None)

    def make_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
        def reduce_tensor(tensor: torch.Tensor) -> Any:
            if tensor.device.type != device_type:
                return original(tensor)
            if reduce is None:
                raise _refused(devices, "sending a device tensor to another process")
            return reduce(tensor)

        return reduce_tensor

    kind = "unsupported" if reduce is None else "mapped"
    ledger.redirect(reductions.reduce_tensor, make_reduce, "device tensors in other processes", kind)
    if reduce is None:
        _refuse_at_put(ledger, devices)
    else:
        _share_in_place(ledger, devices, module._share)


def _install_dlpack(ledger: Ledger, devices: Devices) -> None:
    """DLPack calls such a device an extension; PyTorch asks for it by a name that a renamed device does not have."""
    if devices.type != torch._C._get_privateuse1_backend_name():
        return
    extension = int(torch.utils.dlpack.DLDeviceType.kDLExtDev)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def __dlpack_device__(self: torch.Tensor) -> Any:
            if self.device.type != devices.type or torch.overrides.has_torch_function_unary(self):
                return original(self)
            return torch.utils.dlpack.DLDeviceType(extension), self.device.index or 0

        return __dlpack_device__

    ledger.redirect(
        torch.Tensor.__dlpack_device__, make, "DLPack knows the device", what="torch.Tensor.__dlpack_device__"
    )


def _install_remote_calls(ledger: Ledger, devices: Devices) -> None:
    """RPC's transport moves host memory and CUDA's own; a map of devices promises more than it can do here."""
    if devices.type == "cpu":
        return

    def redirect(module: Any) -> None:
        options = module.TensorPipeRpcBackendOptions

        def refuse(call: str) -> Callable[..., Any]:
            def refused(*args: Any, **kwargs: Any) -> Any:
                raise _refused(devices, f"TensorPipeRpcBackendOptions{call}")

            return refused

        def make_init(original: Callable[..., Any]) -> Callable[..., Any]:
            def init(self: Any, **kwargs: Any) -> None:
                for name in ("device_maps", "devices"):
                    if kwargs.get(name):
                        refuse(f"({name}=...)")()
                original(self, **kwargs)

            return init

        why = "RPC sends tensors of the CPU only"
        ledger.redirect(options.__init__, make_init, why, "unsupported", "TensorPipeRpcBackendOptions(device_maps=)")
        for name in ("set_device_map", "set_devices"):
            what = f"TensorPipeRpcBackendOptions.{name}"
            ledger.redirect(getattr(options, name), _always(refuse(f".{name}")), why, "unsupported", what)

    hook = AfterImport("torch.distributed.rpc.options", redirect)
    ledger.record(
        Patch("import of torch.distributed.rpc", "RPC's device maps", "mapped", "registered", None, hook.remove)
    )
    hook.install()


def _always(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda original: call


def _refused(devices: Devices, call: str) -> UnsupportedError:
    return UnsupportedError(call, surface.label(devices.backend), INSTEAD)


def _share_in_place(ledger: Ledger, devices: Devices, share: Callable[[torch.Tensor], Any]) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def share_memory_(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.device.type == devices.type and self.nbytes():
                share(torch.empty(0, dtype=torch.uint8, device=self.device).set_(self))
            return original(self, *args, **kwargs)

        return share_memory_

    why = "forked processes see what the others write"
    ledger.redirect(torch.UntypedStorage.share_memory_, make, why)


def _refuse_at_put(ledger: Ledger, devices: Devices) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def put(self: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
            if any(tensor.device.type == devices.type for tensor in _tensors(obj)):
                raise _refused(devices, "Queue.put of a device tensor")
            return original(self, obj, *args, **kwargs)

        return put

    queue = multiprocessing.queues.Queue
    ledger.redirect(queue.put, make, "the error appears where the tensor is put", "unsupported")


def _tensors(thing: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        yield thing
    elif depth and isinstance(thing, (list, tuple, dict)):
        for part in thing.values() if isinstance(thing, dict) else thing:
            yield from _tensors(part, depth - 1)
