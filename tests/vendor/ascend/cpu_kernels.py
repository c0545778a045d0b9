"""Computes each operator of the device on the CPU, over the same memory: device memory is host memory here.

What needs no kernel stays the package's own: allocation, views, copies of whole blocks, generators, serialization.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree

aten = torch.ops.aten
DEVICE = "npu"
# The real device, whatever ditorch shows to code like this.
real = torch._C.TensorBase.device.__get__
_GENERATOR = torch._C.Generator
_saved: dict[str, Any] = {}
_FORCED = ("kaiser_window",)  # composites over a kernel that the device lacks
# Run by torch_npu itself.
_OWN = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.detach.default,
    aten.record_stream.default,
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
    aten.set_.source_Tensor,
    aten.set_.default,
    aten.resize_.default,
    aten.is_pinned.default,
    aten._pin_memory.default,
    aten.is_same_size.default,
}


def enter() -> torch.library.Library:
    """Register a CPU kernel for every ATen operator of the device, once in a process.

    Example: ``kernels = enter()`` at the start of a process
    """
    if "library" in _saved:
        return _saved["library"]
    library = _saved["library"] = torch.library.Library("aten", "IMPL")
    _saved["copy"] = torch.library.get_kernel(aten.copy_.default, "PrivateUse1")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::"):
            continue
        packet, _, overload = name.removeprefix("aten::").partition(".")
        func = getattr(getattr(aten, packet, None), overload or "default", None)
        if func is None or func in _OWN or _is_view(func) or not (packet in _FORCED or _needs_kernel(name)):
            continue
        if has(name, "CompositeImplicitAutograd") and has(name, "AutogradPrivateUse1"):
            # The package has an autograd formula over its own kernels: PyTorch's composite does the same.
            library.impl(name.removeprefix("aten::"), func.decompose, "AutogradPrivateUse1", allow_override=True)
        call = _copy if func in (aten.copy_.default, aten._to_copy.default, aten._copy_from.default) else _compute
        library.impl(name.removeprefix("aten::"), _kernel(call, func), "PrivateUse1", allow_override=True)
    return library


def _needs_kernel(name: str) -> bool:
    """Whether the device has a kernel of its own for an operator, or would need one."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    composite = has(name, "CompositeImplicitAutograd") or has(name, "CompositeExplicitAutograd")
    own = has(name, "PrivateUse1") or has(name, "AutogradPrivateUse1")
    return own or (has(name, "CPU") and not composite)


def _kernel(call: Any, func: Any) -> Any:
    return lambda *args, **kwargs: call(func, args, kwargs)


def host(tensor: torch.Tensor) -> torch.Tensor:
    """The device's tensor as a CPU tensor over the same memory."""
    storage = tensor.untyped_storage()
    alias = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    made = torch.empty(0, dtype=tensor.dtype).set_(alias, tensor.storage_offset(), tensor.size(), tensor.stride())
    if tensor.is_conj():
        made = torch._conj(made)
    return torch._neg_view(made) if tensor.is_neg() else made


def device_like(result: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU result as a tensor of the device."""
    made = torch.empty_strided(result.size(), result.stride(), dtype=result.dtype, device=device)
    if result.numel():
        host(made).copy_(result)
    return made


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    if func is aten._to_copy.default:
        target = kwargs.get("device") or real(args[0])
        source = host(args[0]) if real(args[0]).type == DEVICE else args[0]
        kwargs |= {"device": torch.device("cpu"), "pin_memory": None, "non_blocking": False}
        if target.type not in (DEVICE, "cpu"):
            return func(args[0], **kwargs | {"device": target})
        result = aten._to_copy.default(source, **kwargs)
        return device_like(result, target) if target.type == DEVICE else result
    to, source = (args[0], args[1]) if func is aten.copy_.default else (args[1], args[0])
    whole = (
        func is aten.copy_.default
        and to.is_contiguous()
        and source.is_contiguous()
        and to.shape == source.shape
        and to.dtype == source.dtype
    )
    if whole and real(to) != real(source) and not (to.is_neg() or source.is_neg() or source.is_conj()):
        return _own_copy(*args, **kwargs)  # one block from place to place
    values = [host(t) if real(t).type == DEVICE else t for t in (to, source)]
    values[0].copy_(values[1])
    return to


def _own_copy(*args: Any, **kwargs: Any) -> Any:
    """The package's own copy, as it was before `enter`."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
    return _saved["copy"].call_boxed(keys, *args, **kwargs)


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    device = kwargs.get("device")
    devices = [real(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    found = next((d for d in devices if d.type == DEVICE), device)
    if found.index is None:
        found = torch.device(DEVICE, torch.npu.current_device())
    known: dict[int, torch.Tensor] = {}

    def down(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and real(value).type == DEVICE:
            made = host(value)
            known[id(made)] = value
            return made
        if isinstance(value, _GENERATOR) and _GENERATOR.device.__get__(value).type == DEVICE:
            return _draw(value)
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == DEVICE else value

    host_args, host_kwargs = pytree.tree_map(down, (args, kwargs))
    host_kwargs.pop("pin_memory", None)
    random = torch.Tag.nondeterministic_seeded in func.tags
    if random and not any(isinstance(leaf, _GENERATOR) for leaf in pytree.tree_leaves((host_args, host_kwargs))):
        state = torch.get_rng_state()
        torch.set_rng_state(_draw(torch.npu.default_generators[found.index]).get_state())
        try:
            result = func(*host_args, **host_kwargs)
        finally:
            torch.set_rng_state(state)
    else:
        result = func(*host_args, **host_kwargs)
    to_host = device is not None and device.type == "cpu"

    def up(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return known.get(id(value), value if to_host else device_like(value, found))

    # In-place and out= results resized by the CPU kernel: the device's tensor takes the new shape.
    for made in list(pytree.tree_leaves((host_args, host_kwargs))):
        original = known.get(id(made)) if isinstance(made, torch.Tensor) else None
        if original is not None and made.size() != original.size():
            torch.ops.aten.resize_.default(original, made.size())
            host(original).copy_(made)
    return pytree.tree_map(up, result)


def _draw(generator: torch.Generator) -> torch.Generator:
    """A CPU generator for one draw, from the device generator's seed and offset, which moves on."""
    state = generator.get_state()
    seed, offset = state[:16].view(torch.int64).tolist()
    state[8:16].copy_(torch.tensor([offset + 4], dtype=torch.int64).view(torch.uint8))
    generator.set_state(state)
    return _GENERATOR().manual_seed((seed * 1000003 + offset) & 0x7FFFFFFFFFFFFFFF)
