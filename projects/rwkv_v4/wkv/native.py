"""wkv on the CPU through ``kernel.cpp``, compiled on first use and kept in ditorch's build cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ditorch_common.toolchain import cache_root, find_compiler

from . import scan

SOURCE = Path(__file__).with_name("kernel.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared")


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None (after one warning) where they cannot be built."""
    try:
        return ctypes.CDLL(str(_built()))
    except (OSError, subprocess.CalledProcessError, FileNotFoundError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        warnings.warn(f"wkv: no C++ kernel on this machine, using the torch scan: {detail.strip()[:500]}", stacklevel=2)
        return None


def forward(w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output y and the logarithm of its denominator, which backward needs."""
    kernels = library()
    if kernels is None:
        return scan.forward(w, u, k, v)
    dtype = scan.compute_dtype(w, u, k, v)
    w, u, k, v = (x.to(dtype).contiguous() for x in (w, u, k, v))
    y, log_total = torch.empty_like(k), torch.empty_like(k)
    _call(kernels, "forward", (w, u, k, v, y, log_total), k)
    return y, log_total


def backward(
    w: Tensor, u: Tensor, k: Tensor, v: Tensor, y: Tensor, log_total: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of w, u, k and v."""
    kernels = library()
    if kernels is None:
        return scan.backward(w, u, k, v, y, log_total, grad)
    dtypes = [x.dtype for x in (w, u, k, v)]
    dtype = scan.compute_dtype(w, u, k, v, y)
    w, u, k, v, y, log_total, grad = (x.to(dtype).contiguous() for x in (w, u, k, v, y, log_total, grad))
    grad_w, grad_u = k.new_empty(k.shape[0], k.shape[2]), k.new_empty(k.shape[0], k.shape[2])
    grad_k, grad_v = torch.empty_like(k), torch.empty_like(k)
    _call(kernels, "backward", (w, u, k, v, y, log_total, grad, grad_w, grad_u, grad_k, grad_v), k)
    grads = (grad_w.sum(0), grad_u.sum(0), grad_k, grad_v)
    return tuple(g.to(d) for g, d in zip(grads, dtypes))  # type: ignore[return-value]


def _call(kernels: ctypes.CDLL, name: str, tensors: tuple[Tensor, ...], k: Tensor) -> None:
    kernel = getattr(kernels, f"wkv_{name}_{'double' if k.dtype == torch.float64 else 'float'}")
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in tensors]
    kernel(*pointers, *map(ctypes.c_int64, k.shape), torch.get_num_threads())


def _built() -> Path:
    compiler = find_compiler()
    if compiler is None:
        raise FileNotFoundError("no C++ compiler found (looked for $CXX, g++, c++ and clang++)")
    # -march=native: a cache that is shared between machines must not hand one's instructions to another.
    native = subprocess.run([compiler, "-march=native", "-Q", "--help=target"], capture_output=True, check=False).stdout
    key = hashlib.sha256(SOURCE.read_bytes() + repr((FLAGS, compiler, platform.machine())).encode() + native)
    target = cache_root() / f"rwkv_v4-{key.hexdigest()[:16]}" / "wkv.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as scratch:
            made = Path(scratch) / target.name
            command = [compiler, *FLAGS, str(SOURCE), "-o", str(made)]
            subprocess.run(command, capture_output=True, text=True, check=True)
            os.replace(made, target)  # several processes may build at once: each moves a whole file into place
    return target
