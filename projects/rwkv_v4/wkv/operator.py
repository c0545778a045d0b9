"""wkv as one PyTorch operator: the dispatcher picks the kernel of the device, autograd, autocast and meta know it.

=============================  ==========================================================
device                         kernel
=============================  ==========================================================
CUDA (and ROCm)                Triton, ``gpu.py``
CPU                            C++ SIMD, ``native.py``
the software accelerator       the CPU's, on the same memory, through the device's fallback
any other                      the scan in plain torch operators, ``scan.py``
=============================  ==========================================================
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import gpu, native, scan

NAMESPACE = "rwkv_v4"
_SOFT = torch._C._get_privateuse1_backend_name() in ("soft", "privateuseone")
_NATIVE = torch._C._has_cuda  # else a kernel for cuda would be that of the device which stands in for it
_OTHER_DEVICES = ("XPU", "MPS", "HPU", "MTIA", "XLA")


def wkv(w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Exponentially decayed average of ``v`` with weights ``exp(k)``: RWKV's attention.

    ``w`` (C) is the decay per step, zero or negative, ``u`` (C) the bonus of the current step; ``k`` and ``v`` are
    (B, T, C). Whatever the inputs' dtype, it is computed in float32 (float64 if an input is) and answers in it.

    >>> y = wkv(-torch.ones(4), torch.zeros(4), torch.randn(2, 8, 4), torch.randn(2, 8, 4))
    >>> y.shape
    torch.Size([2, 8, 4])
    """
    y: Tensor = torch.ops.rwkv_v4.wkv(w, u, k, v)[0]
    return y


def prepare(device: torch.device | str) -> None:
    """Build the kernel of a device now, which its first use would do otherwise."""
    some = torch.empty(0, device=device)
    keys, known = torch._C._dispatch_keys(some), torch._C.DispatchKey  # the device's name may be cuda on any device
    if keys.has(known.CUDA):
        gpu.chosen(some.device)
    elif keys.has(known.CPU) or (keys.has(known.PrivateUse1) and _SOFT):
        native.library()


def _check(w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> None:
    if k.dim() != 3 or k.shape != v.shape:
        raise ValueError(
            f"wkv: k and v must both be (batch, time, channels), got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    channels = k.shape[2:]
    if w.shape != channels or u.shape != channels:
        raise ValueError(
            f"wkv: w and u must be ({channels[0]},) like the channels of k, got {tuple(w.shape)} and {tuple(u.shape)}"
        )


@torch.library.custom_op(f"{NAMESPACE}::wkv", mutates_args=(), device_types="cpu")
def _wkv(w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    _check(w, u, k, v)
    return native.forward(w, u, k, v)


@torch.library.custom_op(f"{NAMESPACE}::wkv_backward", mutates_args=(), device_types="cpu")
def _wkv_backward(
    w: Tensor, u: Tensor, k: Tensor, v: Tensor, y: Tensor, log_total: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return native.backward(w, u, k, v, y, log_total, grad)


def _gpu_forward(w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    _check(w, u, k, v)
    return gpu.forward(w, u, k, v)


if _NATIVE:
    _wkv.register_kernel("cuda")(_gpu_forward)
    _wkv_backward.register_kernel("cuda")(gpu.backward)


@_wkv.register_fake
def _(w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    _check(w, u, k, v)
    shape, dtype = k.shape, scan.compute_dtype(w, u, k, v)
    return k.new_empty(shape, dtype=dtype), k.new_empty(shape, dtype=dtype)


@_wkv_backward.register_fake
def _(
    w: Tensor, u: Tensor, k: Tensor, v: Tensor, y: Tensor, log_total: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (w.new_empty(w.shape), u.new_empty(u.shape), k.new_empty(k.shape), v.new_empty(v.shape))


def _remember(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, ...]:
    grads: tuple[Tensor, ...] = torch.ops.rwkv_v4.wkv_backward(*ctx.saved_tensors, grad)
    return grads


_wkv.register_autograd(_differentiate, setup_context=_remember)


def _autocast(w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """In float32, as exponentials must be. The kernels widen k and v as they read them: the same numbers
    as casting them first, without writing two float32 copies."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    for name in ("AutocastCPU", "AutocastPrivateUse1"):
        keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    with torch._C._ExcludeDispatchKeyGuard(keys):
        w, u = w.to(scan.compute_dtype(w)), u.to(scan.compute_dtype(u))
        out: tuple[Tensor, Tensor] = torch.ops.rwkv_v4.wkv(w, u, k, v)
        return out


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
for _key in (*(["CUDA"] if _NATIVE else []), "CPU", "PrivateUse1"):
    _library.impl("wkv", _autocast, f"Autocast{_key}")
for _key in _OTHER_DEVICES + ("PrivateUse1",):
    # soft is left out: its fallback runs the CPU's kernel on the same memory.
    if _key != "PrivateUse1" or not _SOFT:
        _library.impl("wkv", scan.forward, _key)
        _library.impl("wkv_backward", scan.backward, _key)
