"""What CUDA code does, one check per name, written as users write it; True is the right answer of each."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.cuda.nvtx

cuda: Any = torch.cuda  # some of its names are filled in at run time
TABLE: dict[str, Callable[[], Any]] = {}
"""Name, as the page shows it -> check."""


def _use(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        if name in TABLE:
            raise ValueError(f"two checks for {name}")
        TABLE[name] = function
        return function

    return add


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(*(shape or (4,)), device="cuda")


def _add(**checks: Callable[[], Any]) -> None:
    for name, check in checks.items():
        _use("torch.cuda." + name.replace("__", "."))(check)


def _raises(kind: type[BaseException], call: Callable[[], Any]) -> bool:
    try:
        call()
    except kind:
        return True
    return False


# --- devices, memory, random numbers --------------------------------------------------------------------

_add(
    is_available=lambda: cuda.is_available() is True,
    is_initialized=lambda: (_ones(), cuda.is_initialized())[1] is True,
    init=lambda: cuda.init() is None,
    device_count=lambda: cuda.device_count() >= 1,
    current_device=lambda: cuda.current_device() == 0,
    set_device=lambda: cuda.set_device("cuda:0") is None and cuda.set_device(0) is None,
    get_device_name=lambda: len(cuda.get_device_name(0)) > 0,
    get_device_capability=lambda: all(isinstance(n, int) for n in cuda.get_device_capability("cuda:0")),
    get_device_properties=lambda: cuda.get_device_properties(torch.device("cuda")).total_memory > 0,
    can_device_access_peer=lambda: cuda.device_count() < 2 or isinstance(cuda.can_device_access_peer(0, 1), bool),
    is_bf16_supported=lambda: cuda.is_bf16_supported() in (True, False),
    get_arch_list=lambda: isinstance(cuda.get_arch_list(), list),
    synchronize=lambda: cuda.synchronize() is None and cuda.synchronize("cuda:0") is None,
    empty_cache=lambda: cuda.empty_cache() is None,
    ipc_collect=lambda: cuda.ipc_collect() is None,
    mem_get_info=lambda: 0 < cuda.mem_get_info()[0] <= cuda.mem_get_info("cuda:0")[1],
    memory_stats=lambda: isinstance(cuda.memory_stats(), dict),
    memory_summary=lambda: "llocated" in cuda.memory_summary(),
    memory_snapshot=lambda: isinstance(cuda.memory_snapshot(), list),
    memory_reserved=lambda: cuda.memory_reserved() >= cuda.memory_allocated() >= 0,
    max_memory_reserved=lambda: cuda.max_memory_reserved(0) >= cuda.memory_reserved(0),
    manual_seed=lambda: _drawn_again(cuda.manual_seed),
    manual_seed_all=lambda: _drawn_again(cuda.manual_seed_all),
    initial_seed=lambda: (cuda.manual_seed(7), cuda.initial_seed())[1] == 7,
    seed=lambda: cuda.seed() is None,
    seed_all=lambda: cuda.seed_all() is None,
    get_rng_state_all=lambda: len(cuda.get_rng_state_all()) == cuda.device_count(),
    set_rng_state_all=lambda: cuda.set_rng_state_all(cuda.get_rng_state_all()) is None,
    current_stream=lambda: cuda.current_stream() == cuda.current_stream(0),
    default_stream=lambda: cuda.default_stream() == cuda.default_stream("cuda:0"),
    is_current_stream_capturing=lambda: cuda.is_current_stream_capturing() is False,
    Stream=lambda: isinstance(cuda.Stream(), cuda.Stream) and cuda.Stream().query() in (True, False),
    OutOfMemoryError=lambda: _raises(cuda.OutOfMemoryError, lambda: torch.empty(1 << 50, device="cuda")),
    nvtx__range_push=lambda: (cuda.nvtx.range_push("a"), cuda.nvtx.range_pop())[1] in (0, -1, -2),
    nvtx__mark=lambda: cuda.nvtx.mark("a") in (None, 0),
    FloatTensor=lambda: cuda.FloatTensor([1, 2]).is_cuda and cuda.FloatTensor(2, 3).shape == (2, 3),
    HalfTensor=lambda: cuda.HalfTensor([1]).dtype == torch.float16,
    LongTensor=lambda: cuda.LongTensor([1]).dtype == torch.int64,
    default_generators=lambda: cuda.default_generators[0].get_state().numel() > 0,
)


def _drawn_again(seed: Callable[[int], Any]) -> bool:
    seed(3)
    first = torch.rand(5, device="cuda")
    seed(3)
    return torch.equal(first, torch.rand(5, device="cuda"))


@_use("torch.cuda.memory_allocated")
def _memory_allocated() -> bool:
    before = cuda.memory_allocated()
    big = torch.empty(1 << 20, device="cuda")
    return bool(cuda.memory_allocated(0) - before >= big.nbytes)


@_use("torch.cuda.max_memory_allocated")
def _max_memory_allocated() -> bool:
    cuda.reset_peak_memory_stats()
    before = cuda.memory_allocated()
    torch.empty(1 << 20, device="cuda")
    return bool(cuda.max_memory_allocated() >= before + (1 << 22))


@_use("torch.cuda.reset_peak_memory_stats")
def _reset_peak_memory_stats() -> bool:
    torch.empty(1 << 22, device="cuda")
    cuda.synchronize()
    cuda.reset_peak_memory_stats()
    return bool(cuda.max_memory_allocated() == cuda.memory_allocated())


@_use("torch.cuda.get_rng_state")
def _get_rng_state() -> bool:
    state = cuda.get_rng_state("cuda:0")
    return state.dtype == torch.uint8 and not state.is_cuda


@_use("torch.cuda.set_rng_state")
def _set_rng_state() -> bool:
    state = cuda.get_rng_state()
    first = torch.rand(4, device="cuda")
    cuda.set_rng_state(state)
    return torch.equal(first, torch.rand(4, device="cuda"))


@_use("torch.cuda.device")
def _device() -> bool:
    last = cuda.device_count() - 1
    with cuda.device(last):
        inside = cuda.current_device() == last and torch.ones(1, device="cuda").device.index == last
    return bool(inside and cuda.current_device() == 0)


@_use("torch.cuda.device_of")
def _device_of() -> bool:
    with cuda.device_of(torch.ones(1, device=f"cuda:{cuda.device_count() - 1}")):
        return bool(cuda.current_device() == cuda.device_count() - 1)


# --- streams, events, graphs ----------------------------------------------------------------------------


@_use("torch.cuda.Event")
def _event() -> bool:
    start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    start.record()
    _ones(64, 64) @ _ones(64, 64)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) >= 0 and end.query() is True


@_use("torch.cuda.stream")
def _stream() -> bool:
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        inside = cuda.current_stream() == side
        result = _ones() * 2
    cuda.current_stream().wait_stream(side)
    return inside and result.sum().item() == 8 and cuda.current_stream() == cuda.default_stream()


@_use("torch.cuda.set_stream")
def _set_stream() -> bool:
    before, side = cuda.current_stream(), cuda.Stream(device="cuda:0")
    cuda.set_stream(side)
    changed = cuda.current_stream() == side
    cuda.set_stream(before)
    return bool(changed and cuda.current_stream() == before)


@_use("torch.cuda.CUDAGraph")
def _graph() -> bool:
    x, side = _ones(), cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        x * 2 + 1
    cuda.current_stream().wait_stream(side)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        y = x * 2 + 1
    x.copy_(torch.full((4,), 5.0))
    graph.replay()
    return y.tolist() == [11.0] * 4


@_use("torch.cuda.nvtx.range")
def _nvtx_range() -> bool:
    with cuda.nvtx.range("step"):
        return _ones().sum().item() == 4


# --- what CUDA code does outside of torch.cuda ----------------------------------------------------------


@_use("torch.cuda.amp.autocast")
def _autocast() -> bool:
    from torch.cuda.amp import autocast

    with autocast():
        return (_ones(4, 4) @ _ones(4, 4)).dtype == torch.float16


@_use("torch.cuda.amp.GradScaler")
def _grad_scaler() -> bool:
    from torch.cuda.amp import GradScaler

    weight = _ones().requires_grad_()
    optimizer, scaler = torch.optim.SGD([weight], lr=0.5), GradScaler()
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return weight.tolist() == [0.5] * 4


@_use("torch.Generator(device='cuda')")
def _generator() -> bool:
    one, two = (torch.Generator(device="cuda").manual_seed(3) for _ in range(2))
    same = torch.equal(torch.rand(3, generator=one, device="cuda"), torch.rand(3, generator=two, device="cuda"))
    return same and one.device.type == "cuda"


@_use("Tensor.to('cuda')")
def _to() -> bool:
    made = (
        torch.ones(2).to("cuda"),
        torch.ones(2).to(device="cuda:0"),
        torch.ones(2).cuda(),
        torch.ones(2).to(_ones()),
    )
    return all(t.is_cuda and t.device.type == "cuda" for t in made) and not torch.ones(2).is_cuda


@_use("torch.zeros(device='cuda')")
def _factories() -> bool:
    made = (
        torch.zeros(2, device="cuda"),
        torch.tensor([1], device=torch.device("cuda")),
        torch.arange(3, device="cuda:0"),
    )
    return all(t.is_cuda for t in made)


@_use("torch.device('cuda')")
def _device_context() -> bool:
    with torch.device("cuda"):
        inside = torch.zeros(2).is_cuda
    return inside and _ones().device == torch.device("cuda:0") and not torch.zeros(2).is_cuda


@_use("Tensor.pin_memory")
def _pin_memory() -> bool:
    pinned = torch.ones(4).pin_memory()
    return pinned.is_pinned() and pinned.to("cuda", non_blocking=True).sum().item() == 4


@_use("Tensor.record_stream")
def _record_stream() -> bool:
    x = _ones()
    x.record_stream(cuda.Stream())
    return x.sum().item() == 4


@_use("torch.load(map_location='cuda')")
def _load() -> bool:
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(3.0)}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, map_location="cuda:0", weights_only=True)["w"]
    return bool(loaded.is_cuda and loaded.tolist() == [0.0, 1.0, 2.0])


@_use("copy.deepcopy(module.cuda())")
def _deepcopy() -> bool:
    model = copy.deepcopy(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).cuda())
    return all(p.is_cuda for p in model.parameters()) and model(_ones(3, 2)).is_cuda


@_use("torch.random.fork_rng")
def _fork_rng() -> bool:
    cuda.manual_seed(5)
    expected = torch.rand(3, device="cuda")
    cuda.manual_seed(5)
    with torch.random.fork_rng(devices=[0]):
        torch.rand(3, device="cuda")
    return torch.equal(expected, torch.rand(3, device="cuda"))


@_use("torch.autocast('cuda')")
def _autocast_type() -> bool:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        inside = torch.is_autocast_enabled() and (_ones(4, 4) @ _ones(4, 4)).dtype == torch.bfloat16
    return inside and not torch.is_autocast_enabled()


@_use("ProfilerActivity.CUDA")
def _profiler() -> bool:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as run:
        _ones(8, 8) @ _ones(8, 8)
    return "aten::mm" in run.key_averages().table(sort_by="cuda_time_total", row_limit=20)
