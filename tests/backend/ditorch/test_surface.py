"""Every CUDA name that real training code uses, by frequency: works, or is in the ledger with its reason."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ditorch

pytestmark = pytest.mark.skipif(
    not ditorch.backend.shows_as_cuda, reason="on the CPU a cuda tensor cannot be told from a CPU tensor"
)
TABLE: dict[str, Callable[[], Any]] = {}


@pytest.fixture(autouse=True)
def _flags_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own test helpers, which other tests import, forbid it for the whole process."""
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", True)


def use(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        assert name not in TABLE
        TABLE[name] = function
        return function

    return add


def tensor(*shape: int) -> torch.Tensor:
    return torch.ones(*(shape or (4,)), device="cuda")


def add_checks(**checks: Callable[[], Any]) -> None:
    for name, check in checks.items():
        use("torch.cuda." + name.replace("__", "."))(check)


add_checks(
    is_available=lambda: torch.cuda.is_available() is True,
    current_device=lambda: torch.cuda.current_device() == 0,
    Stream=lambda: isinstance(torch.cuda.Stream(), torch.cuda.Stream),
    current_stream=lambda: torch.cuda.current_stream().query() in (True, False),
    synchronize=lambda: torch.cuda.synchronize() is None and torch.cuda.synchronize("cuda:0") is None,
    empty_cache=lambda: torch.cuda.empty_cache() is None,
    device_count=lambda: torch.cuda.device_count() >= 1,
    get_device_capability=lambda: len(torch.cuda.get_device_capability(torch.device("cuda"))) == 2,
    set_device=lambda: torch.cuda.set_device("cuda:0") is None and torch.cuda.set_device(0) is None,
    get_device_properties=lambda: (
        torch.cuda.get_device_properties("cuda:0").total_memory > 0
        and torch.cuda.get_device_properties(0).major >= 0
        and torch.cuda.get_device_properties(0).multi_processor_count > 0
    ),
    memory_stats=lambda: isinstance(torch.cuda.memory_stats(), dict),
    manual_seed=lambda: torch.cuda.manual_seed(1) is None,
    reset_peak_memory_stats=lambda: torch.cuda.reset_peak_memory_stats() is None,
    FloatTensor=lambda: (
        torch.cuda.FloatTensor([1, 2]).is_cuda and isinstance(torch.cuda.FloatTensor(2, 3), torch.cuda.FloatTensor)
    ),
    HalfTensor=lambda: torch.cuda.HalfTensor([1]).dtype == torch.float16,
    BFloat16Tensor=lambda: isinstance(tensor().bfloat16(), torch.cuda.BFloat16Tensor),
    ByteTensor=lambda: torch.cuda.ByteTensor([1]).dtype == torch.uint8,
    IntTensor=lambda: torch.cuda.IntTensor([1]).dtype == torch.int32,
    LongTensor=lambda: torch.cuda.LongTensor([1]).dtype == torch.int64,
    DoubleTensor=lambda: torch.cuda.DoubleTensor([1]).dtype == torch.float64,
    default_generators=lambda: torch.cuda.default_generators[0].get_state().numel() > 0,
    is_current_stream_capturing=lambda: torch.cuda.is_current_stream_capturing() is False,
    is_bf16_supported=lambda: torch.cuda.is_bf16_supported() in (True, False),
    cudart=lambda: torch.cuda.cudart().cudaProfilerStop() in (0, None) or True,
    manual_seed_all=lambda: torch.cuda.manual_seed_all(1) is None,
    get_device_name=lambda: isinstance(torch.cuda.get_device_name(), str),
    memory_reserved=lambda: torch.cuda.memory_reserved() >= 0,
    default_stream=lambda: torch.cuda.default_stream() == torch.cuda.default_stream(0),
    is_initialized=lambda: (torch.cuda.init(), torch.cuda.is_initialized())[1] is True,
    reset_max_memory_allocated=lambda: torch.cuda.reset_max_memory_allocated() is None,
    mem_get_info=lambda: torch.cuda.mem_get_info()[0] <= torch.cuda.mem_get_info("cuda:0")[1],
    max_memory_reserved=lambda: torch.cuda.max_memory_reserved(0) >= 0,
    memory_snapshot=lambda: isinstance(torch.cuda.memory_snapshot(), list),
    get_rng_state_all=lambda: len(torch.cuda.get_rng_state_all()) == torch.cuda.device_count(),
    set_rng_state_all=lambda: torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all()) is None,
    initial_seed=lambda: torch.cuda.manual_seed(7) or torch.cuda.initial_seed() == 7,
    OutOfMemoryError=lambda: issubclass(torch.cuda.OutOfMemoryError, RuntimeError),
    memory_summary=lambda: isinstance(torch.cuda.memory_summary(), str),
    nccl__version=lambda: torch.cuda.nccl.version() >= (2, 10),
    memory___snapshot=lambda: torch.cuda.memory._snapshot() is not None,
)


@use("torch.cuda.utilization")
def _() -> bool:
    return torch.cuda.utilization() >= 0


@use("torch.cuda.Event")
def _() -> bool:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    tensor(64, 64) @ tensor(64, 64)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) >= 0 and isinstance(start, torch.cuda.Event)


@use("torch.cuda.stream")
def _() -> bool:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        inside = torch.cuda.current_stream() == side
        out = tensor() * 2
    torch.cuda.current_stream().wait_stream(side)
    return inside and out.sum().item() == 8 and torch.cuda.current_stream() == torch.cuda.default_stream()


@use("torch.cuda.set_stream")
def _() -> bool:
    before = torch.cuda.current_stream()
    side = torch.cuda.Stream(device="cuda:0")
    torch.cuda.set_stream(side)
    changed = torch.cuda.current_stream() == side
    torch.cuda.set_stream(before)
    return changed


@use("torch.cuda.StreamContext")
def _() -> bool:
    with torch.cuda.StreamContext(torch.cuda.Stream()):
        return tensor().sum().item() == 4


@use("torch.cuda.MemPool")
def _() -> bool:
    return torch.cuda.MemPool() is not None


@use("torch.cuda.use_mem_pool")
def _() -> bool:
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        return tensor().sum().item() == 4


def _capture() -> bool:
    x = tensor()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x * 2 + 1
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = (x * 2 + 1).view(2, 2)
    x.copy_(torch.full((4,), 5.0))
    graph.replay()
    return y.flatten().tolist() == [11.0] * 4


use("torch.cuda.CUDAGraph")(_capture)
use("torch.cuda.graph")(_capture)


@use("torch.cuda.max_memory_allocated")
def _() -> bool:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    big = torch.empty(1 << 20, device="cuda")
    return torch.cuda.max_memory_allocated() >= before + big.nbytes


@use("torch.cuda.memory_allocated")
def _() -> bool:
    before = torch.cuda.memory_allocated()
    big = torch.empty(1 << 20, device="cuda")
    return torch.cuda.memory_allocated("cuda:0") - before >= big.nbytes


@use("torch.cuda.set_rng_state")
def _() -> bool:
    state = torch.cuda.get_rng_state()
    first = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state)
    return torch.equal(first, torch.rand(4, device="cuda"))


@use("torch.cuda.get_rng_state")
def _() -> bool:
    return torch.cuda.get_rng_state("cuda:0").dtype == torch.uint8


@use("torch.cuda.amp.GradScaler")
@pytest.mark.filterwarnings("ignore")
def _() -> bool:
    from torch.cuda.amp import GradScaler

    weight = tensor().requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = GradScaler()
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_([weight], 100.0)
    scaler.step(optimizer)
    scaler.update()
    return weight.tolist() == [0.5] * 4 and scaler.get_scale() == 65536.0


@use("torch.cuda.amp.autocast")
def _() -> bool:
    from torch.cuda.amp import autocast

    with autocast():
        return (tensor(4, 4) @ tensor(4, 4)).dtype == torch.float16


@use("torch.cuda.amp.custom_fwd")
def _() -> bool:
    class Double(torch.autograd.Function):
        @staticmethod
        @torch.cuda.amp.custom_fwd(cast_inputs=torch.float32)
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            assert not torch.is_autocast_enabled()
            return x * 2

        @staticmethod
        @torch.cuda.amp.custom_bwd
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    x = tensor().half().requires_grad_()
    with torch.autocast("cuda", dtype=torch.float16):
        y = Double.apply(x)
    y.sum().backward()
    return y.dtype == torch.float32 and x.grad is not None and x.grad.tolist() == [2.0] * 4


@use("torch.cuda.device")
def _() -> bool:
    last = torch.cuda.device_count() - 1
    with torch.cuda.device(last):
        inside = torch.cuda.current_device() == last and torch.ones(1, device="cuda").device.index == last
    with torch.cuda.device(torch.device("cuda:0")), torch.cuda.device_of(tensor()):
        return inside and torch.cuda.current_device() == 0


@use("torch.cuda.nvtx.range_push")
def _() -> bool:
    torch.cuda.nvtx.range_push("step")
    return torch.cuda.nvtx.range_pop() in (0, -1, -2)


@use("torch.cuda.nvtx.range")
def _() -> bool:
    with torch.cuda.nvtx.range("step"):
        return tensor().sum().item() == 4


@use("torch.cuda._lazy_call")
def _() -> bool:
    seen: list[int] = []
    torch.cuda._lazy_call(lambda: seen.append(1))
    return seen == [1]


# Patterns outside torch.cuda ----------------------------------------------------------------------


@use("torch.Generator")
def _() -> bool:
    g = torch.Generator(device="cuda").manual_seed(3)
    h = torch.Generator("cuda").manual_seed(3)
    same = torch.equal(torch.rand(3, generator=g, device="cuda"), torch.rand(3, generator=h, device="cuda"))
    return same and g.device.type == "cuda" and isinstance(torch.Generator(), torch.Generator)


@use("non_blocking")
def _() -> bool:
    pinned = torch.ones(4).pin_memory()
    return pinned.is_pinned() and pinned.to("cuda", non_blocking=True).sum().item() == 4


@use("map_location")
def _() -> bool:
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(3.0)}, buffer)
    results = []
    for location in (
        "cuda",
        "cuda:0",
        torch.device("cuda:0"),
        {"cpu": "cuda:0"},
        lambda storage, tag: storage.cuda(),
    ):
        buffer.seek(0)
        loaded = torch.load(buffer, map_location=location)["w"]
        results.append(loaded.is_cuda and loaded.tolist() == [0.0, 1.0, 2.0])
    return all(results)


@use("pin_memory")
def _() -> bool:
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, pin_memory=True)
    return all(batch.is_pinned() for (batch,) in loader)


@use(".to('cuda')")
def _() -> bool:
    moved = (
        torch.ones(2).to("cuda"),
        torch.ones(2).to(device="cuda:0"),
        torch.ones(2).to("cuda", torch.float64),
        torch.ones(2).to(torch.device("cuda"), non_blocking=True),
        torch.ones(2).to(tensor()),
    )
    return all(t.is_cuda for t in moved) and not torch.ones(2).to(torch.float64).is_cuda


@use("device='cuda'")
def _() -> bool:
    made = (
        torch.zeros(2, device="cuda"),
        torch.randn(2, device="cuda:0"),
        torch.tensor([1], device=torch.device("cuda")),
        torch.arange(3, device="cuda"),
        torch.full((2,), 1.0, device="cuda"),
        torch.empty_like(torch.ones(2), device="cuda"),
        torch.randint(0, 3, (2,), device="cuda"),
        torch.as_tensor([1.0], device="cuda"),
        torch.randperm(4, device="cuda"),
        torch.eye(2, device="cuda"),
        torch.linspace(0, 1, 3, device="cuda"),
        torch.ones(1).new_zeros(2, device="cuda"),
        torch.nn.Linear(2, 2, device="cuda").weight,
        torch.fft.fftfreq(4, device="cuda"),
        torch.tril_indices(2, 2, device="cuda"),
    )
    return all(t.is_cuda for t in made)


@use(".cuda()")
def _() -> bool:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).cuda()
    return all(p.is_cuda for p in model.parameters()) and torch.ones(2).cuda(0, non_blocking=True).is_cuda


@use("p.data = p.data.cuda()")
def _() -> bool:
    model = torch.nn.Linear(2, 2)
    before = model.weight
    for parameter in model.parameters():
        parameter.data = parameter.data.cuda()
    model(torch.ones(1, 2, device="cuda")).sum().backward()
    same = model.weight is before and model.weight.is_cuda and model.weight.requires_grad
    model.weight.data = model.weight.data.to("cpu")
    return same and isinstance(model.weight, torch.nn.Parameter) and not model.weight.is_cuda


@use(".is_cuda")
def _() -> bool:
    return tensor().is_cuda and not torch.ones(1).is_cuda


@use("torch.device('cuda')")
def _() -> bool:
    device = torch.device("cuda")
    with device:
        inside = torch.zeros(2).is_cuda
    return inside and tensor().device == torch.device("cuda:0") and not torch.zeros(2).is_cuda


@use("torch.jit.script")
def _() -> bool:
    @torch.jit.script
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.to("cuda") + torch.ones(2, device=torch.device("cuda"))

    return f(torch.ones(2)).is_cuda


@use("record_stream")
def _() -> bool:
    x = tensor()
    x.record_stream(torch.cuda.Stream())
    return x.sum().item() == 4


@use(".type == 'cuda'")
def _() -> bool:
    return tensor().device.type == "cuda" and torch.ones(1).device.type == "cpu"


@use("CUDA_VISIBLE_DEVICES")
def _() -> bool:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible is None or torch.cuda.device_count() <= len(visible.split(","))


@use("is_autocast_enabled")
def _() -> bool:
    with torch.autocast("cuda"):
        inside = torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda")
    return inside and not torch.is_autocast_enabled()


@use("cudnn.benchmark")
def _() -> bool:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    kept = torch.backends.cudnn.benchmark is True
    torch.backends.cudnn.benchmark = before
    return kept


@use("get_autocast_gpu_dtype")
def _() -> bool:
    with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
        return torch.get_autocast_gpu_dtype() == torch.bfloat16


@use("device_type='cuda'")
def _() -> bool:
    with torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16):
        return (tensor(4, 4) @ tensor(4, 4)).dtype == torch.bfloat16


@use("ProfilerActivity.CUDA")
def _() -> bool:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as run:
        tensor(8, 8) @ tensor(8, 8)
    return "aten::mm" in run.key_averages().table(sort_by="cuda_time_total", row_limit=20)


@use("allow_tf32")
def _() -> bool:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = True
    return torch.backends.cuda.matmul.allow_tf32 is False


@use("version.cuda")
def _() -> bool:
    return tuple(int(part) for part in torch.version.cuda.split(".")) >= (11,)


@use("cudnn.deterministic")
def _() -> bool:
    torch.backends.cudnn.deterministic = False
    return torch.backends.cudnn.deterministic is False


@use("fork_rng")
def _() -> bool:
    torch.cuda.manual_seed(5)
    expected = torch.rand(3, device="cuda")
    torch.cuda.manual_seed(5)
    with torch.random.fork_rng(devices=[0]):
        torch.rand(3, device="cuda")
    return torch.equal(expected, torch.rand(3, device="cuda"))


# Reported by the vendor's tools or allocators; away from CUDA these say what to do instead.
MAY_BE_MISSING = {"torch.cuda.utilization", "torch.cuda.memory_snapshot", "torch.cuda.memory._snapshot"}


def outcome(name: str) -> str:
    try:
        result = TABLE[name]()
    except ditorch.UnsupportedError as error:
        return "ledger" if error.call in {p.what for p in ditorch.patches()} else f"unlisted: {error}"
    except ImportError as error:  # pynvml on a CUDA machine
        return f"ledger: {error}" if name in MAY_BE_MISSING else repr(error)
    return "works" if result else f"wrong result: {result}"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", TABLE)
def test_name_works_or_is_in_the_ledger(name: str) -> None:
    found = outcome(name)
    assert found == "works" or (name in MAY_BE_MISSING and found.startswith("ledger"))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_at_least_95_percent_work() -> None:
    outcomes = {name: outcome(name) for name in TABLE}
    working = sum(result == "works" for result in outcomes.values())
    assert working / len(outcomes) >= 0.95, {n: r for n, r in outcomes.items() if r != "works"}
