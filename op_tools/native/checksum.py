"""CRC-32 of bytes, the checksum of zip archives, at the speed of memory where the processor has instructions for it."""

from __future__ import annotations

import ctypes
import os
import zlib
from typing import Any, Final

import numpy as np

from . import compiling

FASTER_FROM: Final = 1 << 16  # bytes; below this zlib is as fast as the call through ctypes


def _load() -> Any:
    path = compiling.compiled(compiling.SOURCES / "checksum.cpp", ("-O2", "-std=c++17"))
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    library.crc32_update.restype = ctypes.c_size_t
    library.crc32_update.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    if not library.crc32_supported():
        return None
    sample = os.urandom(1_000)
    if any(_by(library, sample[:n], 7) != zlib.crc32(sample[:n], 7) for n in (63, 64, 96, 208, 1_000)):
        raise OSError("the checksums are not those of zlib")
    return library


LIBRARY: Final = compiling.Library("checksum", _load)


def _by(library: Any, buffer: Any, start: int) -> int:
    found = ctypes.c_uint32(start)
    flat = np.frombuffer(buffer, dtype=np.uint8)
    done = library.crc32_update(flat.ctypes.data, flat.size, ctypes.byref(found))  # without the GIL
    return zlib.crc32(memoryview(buffer)[done:], found.value)


def crc32(buffer: Any, start: int = 0) -> int:
    """The checksum of bytes, going on from that of the bytes before them (`crc32(b"b", crc32(b"a"))`).

    >>> crc32(b"op_tools")
    1367420445
    """
    library = LIBRARY.get() if len(buffer) >= FASTER_FROM else None
    return zlib.crc32(buffer, start) if library is None else _by(library, buffer, start)
