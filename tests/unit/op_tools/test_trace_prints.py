"""The kernel that fingerprints tensors on a GPU, run on the CPU: fibers stand for the threads of a block."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import threading
import time
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from ditorch_common.toolchain import find_compiler
from op_tools import settings
from op_tools.native import book, compiling
from op_tools.native.compiling import SOURCES
from op_tools.trace import device_prints
from op_tools.trace.prints import CHUNK, fingerprint, stretch_print

_AROUND = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ucontext.h>
#include <vector>
#define __device__
#define __global__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
struct Dim { unsigned x; };
static Dim threadIdx, blockIdx;
template <typename To, typename From> To cast(From from) { To to; std::memcpy(&to, &from, sizeof(to)); return to; }
static double __longlong_as_double(long long x) { return cast<double>(x); }
static long long __double_as_longlong(double x) { return cast<long long>(x); }
static float __uint_as_float(unsigned x) { return cast<float>(x); }
static double __dadd_rn(double a, double b) { return a + b; }
static double __dmul_rn(double a, double b) { return a * b; }
static double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
static float from_half(unsigned short bits) { _Float16 h; std::memcpy(&h, &bits, 2); return float(h); }
static ucontext_t scheduler, fibers[256];
static unsigned threads;
static long long exchanged[256];
static void __syncthreads() {
  const unsigned me = threadIdx.x;
  swapcontext(&fibers[me], &scheduler);
  threadIdx.x = me;
}
template <typename T> T __shfl_xor_sync(unsigned, T value, int apart) {
  std::memcpy(&exchanged[threadIdx.x], &value, sizeof(value));
  __syncthreads();
  T other;
  std::memcpy(&other, &exchanged[threadIdx.x ^ apart], sizeof(other));
  __syncthreads();
  return other;
}
"""
_RUN = r"""
static const Table *table_now;
static Word numbers_now[4];
static int which;
static bool ended[256];
static void fiber() {
  const unsigned me = threadIdx.x;
  if (which == 0) trace_prints_chunks(*table_now);
  else trace_prints_together(numbers_now[0], numbers_now[1], numbers_now[2], numbers_now[3]);
  ended[me] = true;
}
static void run(unsigned blocks) {
  threads = which == 1 ? kTogether : kThreads;
  static std::vector<char> stacks(256 * 65536);
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    for (unsigned i = 0; i < threads; ++i) {
      ended[i] = false;
      getcontext(&fibers[i]);
      fibers[i].uc_stack.ss_sp = &stacks[i * 65536];
      fibers[i].uc_stack.ss_size = 65536;
      fibers[i].uc_link = &scheduler;
      makecontext(&fibers[i], fiber, 0);
    }
    for (bool any = true; any;) {
      any = false;
      for (unsigned i = 0; i < threads; ++i)
        if (!ended[i]) {
          threadIdx.x = i;
          swapcontext(&scheduler, &fibers[i]);
          any = any || !ended[i];
        }
    }
  }
}
extern "C" void print_one(const void *data, Word numel, Word kind, double *rows, Word *starts, double *found) {
  Table table{};
  const unsigned blocks = (numel + kChunk - 1) / kChunk;
  table.count = 1;
  table.rows = reinterpret_cast<Word>(rows);
  table.entries[0].data = reinterpret_cast<Word>(data);
  table.entries[0].numel = numel;
  table.entries[0].kind = int(kind);
  table.entries[0].pairs = 1;
  table_now = &table;
  which = 0;
  run(blocks);
  numbers_now[0] = reinterpret_cast<Word>(rows);
  numbers_now[1] = reinterpret_cast<Word>(starts);
  static const Word from_the_first = 0;
  numbers_now[2] = reinterpret_cast<Word>(&from_the_first);
  numbers_now[3] = reinterpret_cast<Word>(found);
  which = 1;
  run(1);
}
"""
_LAUNCH = r"""
extern "C" int launch(void *, unsigned blocks, unsigned, unsigned, unsigned given, unsigned, unsigned, unsigned,
                      void *, void **parameters, void **) {
  if (given != kThreads) return 1;
  table_now = static_cast<const Table *>(parameters[0]);
  which = 0;
  run(blocks);
  return 0;
}
extern "C" void together(Word rows, Word starts, Word chunks, Word found, unsigned count) {
  numbers_now[0] = rows;
  numbers_now[1] = starts;
  numbers_now[2] = chunks;
  numbers_now[3] = found;
  which = 1;
  run(count);
}
"""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = find_compiler(settings.environment())
    if compiler is None:
        pytest.skip("no compiler here")
    folder = tmp_path_factory.mktemp("prints")
    source = (SOURCES / "trace_prints.cu").read_text()
    convert = 'asm("cvt.f32.f16 %0, %1;" : "=f"(found) : "h"(bits));'
    assert convert in source
    (folder / "prints.cpp").write_text(_AROUND + source.replace(convert, "found = from_half(bits);") + _RUN + _LAUNCH)
    target = folder / "prints.so"
    flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w"]
    done = subprocess.run([compiler, *flags, str(folder / "prints.cpp"), "-o", str(target)], capture_output=True)
    if b"_Float16" in done.stderr:
        pytest.skip("the compiler knows no half precision")
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return ctypes.CDLL(str(target))


def _print_of(kernel: ctypes.CDLL, tensor: torch.Tensor) -> list[float]:
    chunks = -(-tensor.numel() // CHUNK)
    rows, found = np.full((chunks, 16), np.nan), np.full(14, np.nan)
    starts = np.array([0, chunks], np.int64)
    places = [ctypes.c_void_p(part.ctypes.data) for part in (rows, starts, found)]
    numbers = (ctypes.c_longlong(tensor.numel()), ctypes.c_longlong(_DTYPES.index(tensor.dtype)))
    kernel.print_one(ctypes.c_void_p(tensor.data_ptr()), *numbers, *places)
    found[9] = np.sqrt(found[9])
    return list(found)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 257, 8192, 17_000])
def test_the_kernel_finds_the_prints_of_the_cpu(kernel: ctypes.CDLL, dtype: torch.dtype, count: int) -> None:
    draw = torch.Generator().manual_seed(count)
    x = torch.randn(count, generator=draw).to(dtype)
    x[0] *= 1000
    assert _print_of(kernel, x) == fingerprint(x).tolist()


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_elements_of_all_sizes_have_the_prints_of_the_cpu(kernel: ctypes.CDLL, dtype: torch.dtype) -> None:
    least, most = torch.finfo(dtype).smallest_normal / 2, min(torch.finfo(dtype).max, 1e150)
    for size in (least, 1.0, most):
        x = (torch.randn(9000, generator=torch.Generator().manual_seed(1)).clamp(-1, 1).double() * size).to(dtype)
        x[::5] = -0.0
        assert _print_of(kernel, x) == fingerprint(x).tolist(), size
    assert _print_of(kernel, -x.abs() - 1) == fingerprint(-x.abs() - 1).tolist()
    tiny = torch.full((300,), 1.0).to(dtype)
    tiny[7:] = least  # halves of the grid, and far below it
    tiny[9] = 2.0**-37
    tiny[10] = 3 * 2.0**-37
    assert _print_of(kernel, tiny) == fingerprint(tiny).tolist()


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_what_is_no_number_is_counted(kernel: ctypes.CDLL, dtype: torch.dtype) -> None:
    x = torch.linspace(-3, 5, 9000).to(dtype)
    x[[3, 8500]], x[[7, 9, 8999]] = float("nan"), float("-inf")
    found = _print_of(kernel, x)
    assert found == fingerprint(x).tolist()
    assert found[-2:] == [2, 3]


def _views(x: torch.Tensor) -> list[torch.Tensor]:
    flat = x.reshape(-1)
    return [
        x,
        x.transpose(1, 2),
        x.permute(3, 1, 0, 2),
        x[:, ::2, :, 3:],
        x[:, 1:, :, 2:8],
        x[..., :5].transpose(0, 2),
        x[0, 0, 0].expand(40, 70),
        x[..., 1:2],
        x[1, 2, 3, 4],
        flat[1:4000],
        flat[3:4],
    ]


def test_the_book_prints_tensors_of_every_layout_by_itself(kernel: ctypes.CDLL) -> None:
    library = book.LIBRARY.wait()
    if library is None:
        pytest.skip(f"no compiler here, or it failed: {book.LIBRARY.failure}")
    capacity, sent = 12, list[int]()
    rows = np.full((capacity, 16), np.nan)
    prints: dict[int, list[float]] = {}

    def send() -> None:
        numbers, starts, chunks, streams = [np.frombuffer(part, np.int64).copy() for part in one.take_printed()]
        found = np.full((len(numbers), 14), np.nan)
        places = [ctypes.c_longlong(part.ctypes.data) for part in (rows, starts, chunks, found)]
        kernel.together(*places, ctypes.c_uint(len(numbers)))
        found[:, 9] = np.sqrt(found[:, 9])
        prints.update(zip(numbers.tolist(), found.tolist()))
        sent.append(len(numbers))
        assert streams.tolist() in ([77], [])

    launch = ctypes.cast(kernel.launch, ctypes.c_void_p).value
    one = library.Book(lambda _: 0, lambda: None, lambda *_: None, "cpu")
    one.print_on(launch, 0, "cpu", rows.ctypes.data, capacity, send, lambda _: 77)
    draw = torch.Generator().manual_seed(2)
    x = torch.randn((2, 5, 6, 70), generator=draw)
    tensors = [view for dtype in _DTYPES for view in _views(x.to(dtype))]
    tensors += [view for dtype in (torch.int64, torch.int32, torch.uint8) for view in _views((x.abs() * 50).to(dtype))]
    tensors += [x > 0, torch.randn(3 * 8192 + 5, generator=draw), torch.full((3,), float("nan"))]
    numbers = []
    for tensor in tensors:
        numbers.append(one.number(tensor, tensor, 0, -1, 0, -1, False, True))
        if len(numbers) % 5 == 0:
            assert one.take_fresh() == []
    many = torch.ones(capacity * 8192 + 1)  # does not fit into the buffer
    six = torch.ones(1, 2, 3, 4, 5, 6).permute(5, 4, 3, 2, 1, 0)  # cannot be joined to four dimensions
    left = [one.number(tensor, tensor, 0, -1, 0, -1, False, True) for tensor in (many, six, x.to(torch.complex64))]
    assert [number for number, _ in one.take_fresh()] == left
    send()
    assert len(sent) > 3
    assert sorted(prints) == sorted(set(numbers))
    for number, tensor in zip(numbers, tensors):
        assert prints[number] == fingerprint(tensor).tolist() or tensor.isnan().any(), (tensor.dtype, tensor.stride())
    assert prints[numbers[-1]][-2:] == [3, 0]
    one.close()


@st.composite
def _laid_out(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of some dtype and layout, with a few NaN and Inf."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 8, 17, 64]), min_size=1, max_size=4))
    dtype = draw(st.sampled_from([*_DTYPES, torch.int64, torch.int32, torch.uint8, torch.bool]))
    seed = draw(st.integers(0, 1000))
    x = torch.randn(sizes, generator=torch.Generator().manual_seed(seed)) * 10 ** draw(st.integers(-3, 2))
    x = (x.abs() if dtype == torch.uint8 else x).to(dtype)
    if dtype.is_floating_point and draw(st.booleans()):
        x.view(-1)[draw(st.integers(0, x.numel() - 1))] = draw(
            st.sampled_from([float("nan"), float("inf"), torch.finfo(x.dtype).min])
        )
    x = x.permute(draw(st.permutations(range(x.dim()))))
    for d in range(x.dim()):
        first, step = draw(st.integers(0, x.shape[d] - 1)), draw(st.integers(1, 3))
        x = x[(slice(None),) * d + (slice(first, None, step),)]
    if draw(st.booleans()):
        x = x[..., :1].expand(*x.shape[:-1], draw(st.integers(1, 300)))
    return x


@given(_laid_out(), st.one_of(st.just(0), st.integers(0, 3_000_000)))
@settings_of_hypothesis(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_layout_and_part_has_the_print_of_the_cpu(kernel: ctypes.CDLL, tensor: torch.Tensor, first: int) -> None:
    library = book.LIBRARY.wait()
    if library is None:
        pytest.skip(f"no compiler here, or it failed: {book.LIBRARY.failure}")
    rows, found = np.full((tensor.numel() // CHUNK + 2, 16), np.nan), np.full(14, np.nan)
    one = library.Book(lambda _: 0, lambda: None, lambda: None, "cpu")
    launch = ctypes.cast(kernel.launch, ctypes.c_void_p).value
    one.print_on(launch, 0, "cpu", rows.ctypes.data, len(rows), lambda: None, lambda _: 77)
    assert one.print([tensor], [5], [first]) == [True]
    numbers, starts, chunks, _ = [np.frombuffer(part, np.int64).copy() for part in one.take_printed()]
    assert numbers.tolist() == [5]
    places = [ctypes.c_longlong(part.ctypes.data) for part in (rows, starts, chunks, found)]
    kernel.together(*places, ctypes.c_uint(1))
    found[9] = np.sqrt(found[9])
    assert np.array_equal(found, stretch_print(tensor, first).numpy())
    one.close()


def test_nobody_waits_for_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def build() -> None:
        compiling._building.now.set()  # as when the compiler has begun
        ended.wait(60)

    library = compiling.Library("slow", build)
    monkeypatch.setattr(device_prints.native, "LIBRARY", library)
    began = time.perf_counter()
    try:
        assert device_prints.is_compiling(0)
        assert device_prints.kernel_of(0) is None
        assert time.perf_counter() - began < 30
        assert library.building
    finally:
        ended.set()
    library.wait()
    compiling._libraries.remove(library)


def test_prints_of_a_gpu_are_fetched_early_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    now, capturing, waited = [5], [False], []
    monkeypatch.setattr(device_prints, "cuda_stream", lambda index: now[0])
    monkeypatch.setattr(device_prints, "stream_captures", lambda kind: lambda: capturing[0])
    monkeypatch.setattr(device_prints.torch.cuda, "device", lambda device: contextlib.nullcontext())
    stream = types.SimpleNamespace(wait_event=lambda event: waited.append((now[0], event)))
    monkeypatch.setattr(device_prints.torch.cuda, "current_stream", lambda index: stream)
    monkeypatch.setattr(device_prints.torch.cuda, "synchronize", lambda index: pytest.fail("it waited"))
    empty = torch.empty
    monkeypatch.setattr(device_prints.torch, "empty", lambda *size, **more: empty(0))
    book = types.SimpleNamespace(print_on=lambda *given: given[-2:], take_printed=lambda: taken)
    book.print_on = lambda *given: setattr(book, "stream", given[-1])
    kernels = types.SimpleNamespace(index=0, stream=lambda: now[0])
    written: list[list[int]] = []
    kernel = device_prints._Kernel(kernels, 0, 0, 0)  # type: ignore[arg-type]
    prints = device_prints.BookPrints(kernel, book, lambda numbers, rows: written.append(numbers))

    class Event:
        arrived = False

        def query(self) -> bool:
            return self.arrived

    def send(numbers: list[int], places: Any, streams: set[int]) -> None:
        assert streams == {5}
        prints._sent = Event()
        prints._landing.append((numbers, torch.zeros(len(numbers), 14, dtype=torch.float64), prints._sent))

    monkeypatch.setattr(prints, "_send_rows", send)
    taken = [np.array(part, np.int64).tobytes() for part in ([3, 4], [0, 1, 2], [0, 0], [5])]
    assert book.stream(0) == 5
    capturing[0] = True
    prints.send_early()
    assert not prints._landing  # a graph of calls is being captured
    capturing[0] = False
    prints.send_early()
    prints.send_early()
    assert len(prints._landing) == 1  # the copy is under way
    assert not written
    prints._sent.arrived = True
    prints.send_early()
    assert written == [[3, 4]]
    assert len(prints._landing) == 1
    now[0] = 6
    assert book.stream(0) == 6
    assert waited == [(6, prints._sent)]  # on the device, until the rows have been read
    prints._sent.arrived = True
    prints.send_early()
    assert len(written) == 1  # with several streams, a full buffer sends
