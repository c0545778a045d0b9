"""Compiles CUDA source with the NVRTC that PyTorch brings; no header and no `nvcc` is needed."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Final

import torch

_LIBRARY: Final = Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"  # it brings NVRTC itself along


def compiled(source: Path, capability: tuple[int, int]) -> bytes | None:
    """Machine code of a source file for GPUs of this capability, None where NVRTC is not there or refuses.

    >>> compiled(Path("statistics.cu"), (9, 0))  # doctest: +SKIP
    """
    try:
        return _compiled(ctypes.CDLL(str(_LIBRARY)), source, capability)
    except (OSError, AttributeError):
        return None


def _compiled(nvrtc: Any, source: Path, capability: tuple[int, int]) -> bytes | None:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text = source.read_bytes()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, source.name.encode(), 0, None, None):
        return None
    try:
        words = [b"--gpu-architecture=sm_%d%d" % capability, b"--std=c++17"]
        options = (ctypes.c_char_p * len(words))(*words)
        if nvrtc.nvrtcCompileProgram(program, len(words), options):
            return None
        if nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)) or not size.value:
            return None
        code = ctypes.create_string_buffer(size.value)
        return None if nvrtc.nvrtcGetCUBIN(program, code) else code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
