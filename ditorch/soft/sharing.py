"""Soft tensors in several processes: their memory is the host's, so it is shared as the CPU's is."""

from __future__ import annotations

from typing import Any

import torch

from . import native


def share(tensor: torch.Tensor) -> torch.Tensor:
    """Move the memory of a tensor to shared memory, in place; its bytes as a CPU tensor over that memory."""
    storage = tensor.untyped_storage()
    found: torch.Tensor | None = native().adopted_bytes(tensor)
    if found is not None and found.is_shared():
        return found
    shared = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(storage.nbytes()))
    if storage.nbytes():
        everything = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        shared.copy_(native().host_alias(everything))
        native().move_to(tensor, shared)
    return shared


def reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How a soft tensor is pickled for another process: the handle of its memory, and where the tensor lies in it."""
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "a tensor that requires grad and is not a leaf cannot go to another process: autograd ends there. "
            "Send tensor.detach() instead."
        )
    torch.utils.hooks.warn_if_has_hooks(tensor)
    where = (tensor.size(), tensor.stride(), tensor.storage_offset())
    shared = share(tensor.detach()).untyped_storage()
    return _rebuild, (type(tensor), shared, tensor.dtype, tensor.device.index, where, tensor.requires_grad)


def _rebuild(cls: type, shared: Any, dtype: torch.dtype, index: int, where: Any, requires_grad: bool) -> torch.Tensor:
    size, stride, offset = where
    if shared.nbytes():
        host = torch.empty(0, dtype=torch.uint8).set_(shared)
        storage = native().bytes_over(host, min(index, native().device_count() - 1)).untyped_storage()
        tensor = torch.empty(0, dtype=dtype, device=f"soft:{index}").set_(storage, offset, size, stride)
    else:
        tensor = torch.empty(size, dtype=dtype, device=f"soft:{index}")
    if cls is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)
