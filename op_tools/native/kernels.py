"""Kernels of one GPU, compiled once for each dtype, and a short way to launch them.

Kernels that are written in CUDA (`csrc/*.cu`) are compiled by NVRTC, which comes with PyTorch and takes a fraction of a
second; Triton compiles the others, and takes seconds in a new process. Triton's own launcher takes longer than most of
the kernels that the tools need. All of theirs take nothing but 64-bit numbers (addresses, counts, bits), so the driver
can be called with them as they are; where the driver does not confirm that, Triton launches. What was compiled is kept
in the build cache: the next process gives it to the driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from ditorch_common.private import complete, is_trusted
from ditorch_common.toolchain import cache_root

from .. import settings
from ..compat import cuda_device, cuda_stream
from . import compiling, nvrtc

Launch = Callable[..., Any]  # (stream, *numbers)
_MAX_HIDDEN: Final = 8  # parameters that Triton adds at the end; they are zero for kernels without scratch memory
_MAX_SHARED_BYTES: Final = 48 * 1024  # of shared memory that a kernel may use without asking the driver


class Kernels:
    """The kernels of one kind on one device.

    `source` names `csrc/SOURCE.cu`, if there is one, and `triton_SOURCE.py` of this package.
    """

    def __init__(self, index: int, source: str, arguments: int) -> None:
        self.index = index
        self._source, self._arguments = source, arguments
        self._compiled: dict[torch.dtype, Any] = {}
        self._launches: dict[tuple[torch.dtype, int], Launch] = {}

    def current(self) -> bool:
        """Whether their device is the one that launches go to."""
        return cuda_device() == self.index

    def stream(self) -> int:
        """The current stream of the device, as its driver knows it."""
        return cuda_stream(self.index)

    def launch(self, dtype: torch.dtype, programs: int) -> Launch:
        """How to run the kernel for a dtype in so many programs; the device must be the current one then."""
        return self._launches.get((dtype, programs)) or self._new_launch(dtype, programs)

    def _new_launch(self, dtype: torch.dtype, programs: int) -> Launch:
        with torch.cuda.device(self.index):
            kernel = self._compiled.get(dtype)
            if kernel is None:
                kernel = self._by_nvrtc(str(dtype).removeprefix("torch."))
            if kernel is None:
                path = _cache_path(f"triton_{self._source}.py", dtype, self.index)
                kernel = _load_cached(path) or self._by_triton(dtype, path)
            launch = _direct(kernel, programs, self._arguments)
            if launch is None:
                if isinstance(kernel, _CachedKernel):
                    kernel = self._by_triton(dtype, None)
                launch = _launched_by(kernel[(programs, 1, 1)])
        self._compiled[dtype] = kernel
        self._launches[(dtype, programs)] = launch
        return launch

    def compile_beside(self) -> compiling.Library | None:
        """What compiles the CUDA source in the background; None where that is done, or there is no build cache."""
        source = compiling.SOURCES / f"{self._source}.cu"
        path = _cache_path(f"csrc/{source.name}", None, self.index) if source.exists() else None
        if path is None or path.exists():
            return None
        return _compiled_beside(source, path, torch.cuda.get_device_capability(self.index))

    def is_checked(self, name: str) -> bool:
        """Whether this GPU computed with the present source what it should, in this process or an earlier one."""
        path = self._checked_path(name)
        return path is not None and is_trusted(path)

    def note_checked(self, name: str) -> None:
        """Remember that, beside the machine code (`kernels.note_checked("prints")`)."""
        path = self._checked_path(name)
        with contextlib.suppress(OSError):
            if path is not None and path.parent.is_dir():
                with complete(str(path)) as place:
                    Path(place).write_bytes(b"")

    def _checked_path(self, name: str) -> Path | None:
        path = _cache_path(f"csrc/{self._source}.cu", None, self.index)
        return None if path is None else path.with_name(f"{name}.checked")

    def in_cuda(self, name: str, parameters: Sequence[int]) -> int | None:
        """The driver's number of a kernel in CUDA with parameters of so many bytes; None where it has no such kernel.

        The function that launches it is `launcher()`.
        """
        with torch.cuda.device(self.index):
            found = self._by_nvrtc(name)
        if found is None or _sizes(_driver(), found.function) != list(parameters):
            return None
        return found.function

    def _by_nvrtc(self, name: str) -> _CachedKernel | None:
        """A kernel from CUDA source; None where there is none, or no NVRTC."""
        source = compiling.SOURCES / f"{self._source}.cu"
        if not source.exists() or not settings.native() or _driver() is None:
            return None
        metadata = _Metadata(f"{self._source}_{name}", num_warps=8, shared=0)
        if f"{metadata.name}(" not in source.read_text().replace(",", "("):  # a macro may make it
            return None
        path = _cache_path(f"csrc/{source.name}", None, self.index)
        found = _load_cached(path, metadata.name)
        if found is None:
            code = nvrtc.compiled(source, torch.cuda.get_device_capability(self.index))
            if code is not None:
                _write(path, metadata, code)
                found = _load(code, metadata)
        return found

    def _by_triton(self, dtype: torch.dtype, path: Path | None) -> Any:
        source = importlib.import_module(f".triton_{self._source}", __package__)
        kernel = source.compiled(dtype, f"cuda:{self.index}")
        if path is not None:
            _save_to_cache(kernel, path)
        return kernel


class _Metadata(NamedTuple):
    name: str
    num_warps: int
    shared: int
    num_ctas: int = 1


class _CachedKernel(NamedTuple):
    """A kernel that an earlier process compiled, as far as a launch needs it."""

    function: int
    metadata: _Metadata


def _cache_path(source: str, dtype: torch.dtype | None, index: int) -> Path | None:
    """The file of a kernel in the build cache, one per source, GPU, compiler and CUDA; None where there is no cache."""
    try:
        if not settings.native() or _driver() is None:
            return None
        file = Path(__file__).parent / source
        code = file.read_bytes()
        gpu = (torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index))
        triton = "" if file.suffix == ".cu" else importlib.metadata.version("triton")
        identity = repr((str(dtype), gpu, triton, torch.version.cuda))
        key = hashlib.sha256(b"|".join((code, identity.encode()))).hexdigest()[:16]
        return cache_root(settings.environment()) / f"op_tools-{key}" / f"{file.stem}.cubin"
    except Exception:  # no Triton by that name, no home: it is compiled in each process
        return None


def _compiled_beside(source: Path, path: Path, capability: tuple[int, int]) -> compiling.Library:
    """Compiles a source file with NVRTC into the build cache, in a thread; nothing in it touches the device."""

    def build() -> bool:
        code = nvrtc.compiled(source, capability)
        if code is not None:
            _write(path, _Metadata(source.stem, num_warps=8, shared=0), code)
        return code is not None

    library = compiling.Library(source.stem, build)
    library.begin()
    return library


def _save_to_cache(kernel: Any, path: Path) -> None:
    """Write a kernel that Triton compiled to the build cache."""
    try:
        found = kernel.metadata
        head = _Metadata(str(found.name), int(found.num_warps), int(found.shared), int(found.num_ctas))
        if head.num_ctas == 1 and head.shared <= _MAX_SHARED_BYTES:
            _write(path, head, bytes(kernel.asm["cubin"]))
    except Exception:  # another Triton: the next process compiles again
        return


def _write(path: Path | None, head: _Metadata, code: bytes) -> None:
    """Write code to the build cache, atomically; a disk that is full costs the next process some time."""
    with contextlib.suppress(OSError):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            whole = json.dumps(head._asdict()).encode() + b"\n" + code
            with complete(str(path)) as place:
                Path(place).write_bytes(hashlib.sha256(whole).digest() + whole)


def _load_cached(path: Path | None, name: str = "") -> _CachedKernel | None:
    """The kernel in a file, loaded by the driver; None where there is none that can be trusted."""
    try:
        if path is None or not is_trusted(path):
            return None
        found = path.read_bytes()
        if hashlib.sha256(found[32:]).digest() != found[:32]:
            return None
        head, _, code = found[32:].partition(b"\n")
        metadata = _Metadata(**json.loads(head))
        return _load(code, metadata._replace(name=name or metadata.name))
    except Exception:
        return None


def _load(code: bytes, metadata: _Metadata) -> _CachedKernel | None:
    """Give code to the driver; None where it does not take it."""
    driver, module, function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    if driver.cuModuleLoadData(ctypes.byref(module), code):
        return None
    if driver.cuModuleGetFunction(ctypes.byref(function), module, metadata.name.encode()) or not function.value:
        return None
    return _CachedKernel(function.value, metadata)


def _launched_by(runner: Any) -> Launch:
    return lambda stream, *numbers: runner(*numbers, stream=stream)


class _Direct:
    """A kernel, its grid, and its arguments where the driver reads them."""

    __slots__ = ("_call", "_lock", "_numbers", "_pointers", "_zero")

    def __init__(self, driver: Any, kernel: Any, programs: int, arguments: int) -> None:
        self._numbers = (ctypes.c_int64 * arguments)()
        self._zero = ctypes.c_int64(0)
        first = ctypes.addressof(self._numbers)
        places = [first + 8 * k for k in range(arguments)] + [ctypes.addressof(self._zero)] * _MAX_HIDDEN
        self._pointers = (ctypes.c_void_p * len(places))(*places)
        threads, shared = 32 * kernel.metadata.num_warps, kernel.metadata.shared
        call = functools.partial(driver.cuLaunchKernel, kernel.function, programs, 1, 1, threads, 1, 1, shared)
        self._call = call
        self._lock = threading.Lock()

    def __call__(self, stream: int, *numbers: int) -> None:
        with self._lock:  # until the driver has read them
            self._numbers[:] = numbers  # type: ignore[call-overload]
            error = self._call(stream, self._pointers, None)
        if error:
            raise RuntimeError(f"cuLaunchKernel: error {error}")


def _direct(kernel: Any, programs: int, arguments: int) -> Launch | None:
    """A launch without Triton; None where it is not sure that the kernel takes what it would be given."""
    try:
        driver = _driver()
        if driver is None or kernel.metadata.num_ctas != 1 or not _takes(driver, kernel.function, arguments):
            return None
        return _Direct(driver, kernel, programs, arguments)
    except Exception:  # another Triton
        return None


def _takes(driver: Any, function: int, arguments: int) -> bool:
    """Whether a kernel has so many 64-bit parameters, and behind them only some that may be zero."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    count = 0
    while driver.cuFuncGetParamInfo(function, count, ctypes.byref(offset), ctypes.byref(size)) == 0:
        if size.value != 8 or offset.value != 8 * count or count >= arguments + _MAX_HIDDEN:
            return False
        count += 1
    return count >= arguments


def _sizes(driver: Any, function: int) -> list[int]:
    """Bytes of each parameter of a kernel."""
    offset, size, found = ctypes.c_size_t(), ctypes.c_size_t(), list[int]()
    while driver.cuFuncGetParamInfo(function, len(found), ctypes.byref(offset), ctypes.byref(size)) == 0:
        found.append(size.value)
    return found


def launcher() -> int:
    """The address of the driver's `cuLaunchKernel`, for code in C++."""
    return ctypes.cast(_driver().cuLaunchKernel, ctypes.c_void_p).value or 0


def launch_in_cuda(function: int, stream: int, blocks: int, threads: int, *numbers: int) -> None:
    """Run a kernel of `in_cuda` whose parameters are 64-bit numbers; its device must be the current one."""
    values = (ctypes.c_int64 * len(numbers))(*numbers)
    first = ctypes.addressof(values)
    places = (ctypes.c_void_p * len(numbers))(*[first + 8 * k for k in range(len(numbers))])
    error = _driver().cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, places, None)
    if error:
        raise RuntimeError(f"cuLaunchKernel: error {error}")


def copy_to_host(copies: Sequence[tuple[int, int, int]], stream: int) -> bool:
    """Have the driver copy (place, source, bytes) from the current device on a stream; False if any was not copied."""
    try:
        driver = _driver()
        copy = None if driver is None else driver.cuMemcpyDtoHAsync_v2
    except (OSError, AttributeError):
        return False
    return copy is not None and not any(copy(*words, stream) for words in copies if words[2])


@functools.cache
def _driver() -> Any:
    if torch.version.cuda is None:  # ROCm calls its devices cuda, too
        return None
    library = ctypes.CDLL("libcuda.so.1")
    address, number = ctypes.c_void_p, ctypes.c_uint
    library.cuLaunchKernel.argtypes = [address, *[number] * 7, address, address, address]
    library.cuFuncGetParamInfo.argtypes = [address, ctypes.c_size_t, address, address]
    library.cuMemcpyDtoHAsync_v2.argtypes = [address, ctypes.c_uint64, ctypes.c_size_t, address]
    library.cuModuleLoadData.argtypes = [address, ctypes.c_char_p]
    library.cuModuleGetFunction.argtypes = [address, address, ctypes.c_char_p]
    return library
