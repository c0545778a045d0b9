"""The plain CUDA kernel ``plain.cu``, compiled by nvcc where there is one: a yardstick for the benchmark."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from .gpu import Variant

SOURCE = Path(__file__).with_name("plain.cu")


def build() -> Variant:
    """Compile and load; an error says what is missing."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        raise FileNotFoundError("no nvcc on the PATH or in /usr/local/cuda/bin")
    major, minor = torch.cuda.get_device_capability()
    target = Path(tempfile.mkdtemp(prefix="wkv-plain-")) / "plain.so"
    command = [
        nvcc,
        "-O3",
        f"-arch=sm_{major}{minor}",
        "-shared",
        "-Xcompiler",
        "-fPIC",
        str(SOURCE),
        "-o",
        str(target),
    ]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise RuntimeError(f"nvcc failed: {made.stderr.strip()[:500]}")
    kernels = ctypes.CDLL(str(target))

    def call(name: str, tensors: tuple[Tensor, ...], k: Tensor) -> None:
        kind = {torch.float32: "float", torch.bfloat16: "bfloat16"}[k.dtype]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in tensors]
        status = getattr(kernels, f"wkv_{name}_{kind}")(*pointers, *map(int, k.shape), stream)
        if status:
            raise RuntimeError(f"CUDA error {status} from the plain kernel")

    def forward(w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        y, total = torch.empty_like(k, dtype=torch.float32), torch.empty_like(k, dtype=torch.float32)
        call("forward", (w, u, k, v, y, total), k)
        return y, total

    def backward(
        w: Tensor, u: Tensor, k: Tensor, v: Tensor, y: Tensor, total: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gw, gu = (w.new_empty(k.shape[0], k.shape[2]) for _ in range(2))
        gk, gv = torch.empty_like(k), torch.empty_like(v)
        call("backward", (w, u, k, v, y, total, grad, gw, gu, gk, gv), k)
        return gw.sum(0), gu.sum(0), gk, gv

    return Variant("plain CUDA", forward, backward)
