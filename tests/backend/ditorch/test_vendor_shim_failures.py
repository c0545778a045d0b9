"""What the vendors' own transfer shims are known to get wrong, each as a test of ours."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ditorch

shown = pytest.mark.skipif(not ditorch.backend.shows_as_cuda, reason="CPU tensors cannot be shown as cuda")


def test_a_path_containing_cuda_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "cuda:0" / "cuda"
    folder.mkdir(parents=True)
    path = folder / "cuda"
    torch.save({"cuda": torch.ones(2), "name": "cuda:0"}, str(path))
    loaded = torch.load(str(path), map_location="cuda")
    assert loaded["name"] == "cuda:0"
    assert loaded["cuda"].device.type == ("cuda" if ditorch.backend.shows_as_cuda else "cpu")


def test_a_string_argument_cuda_that_is_no_device_is_left_alone() -> None:
    class Named(torch.nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    assert Named("cuda").name == "cuda"
    assert torch.typename("cuda") == "str"
    assert torch.einsum("c,u->cu", torch.ones(2, device="cuda"), torch.ones(3, device="cuda")).shape == (2, 3)


@shown
def test_device_of_a_tensor_equals_the_device_that_was_asked_for() -> None:
    assert torch.device("cuda:0") == torch.ones(1, device="cuda:0").device
    assert torch.ones(1, device="cuda").device == torch.device("cuda", torch.cuda.current_device())
    assert {torch.device("cuda:0"): "here"}[torch.zeros(1).cuda(0).device] == "here"


@shown
def test_device_type_checks_see_cuda() -> None:
    x = torch.ones(1, device="cuda")
    assert x.device.type == "cuda"
    assert x.is_cuda
    assert str(x.device) == f"cuda:{torch.cuda.current_device()}"
    assert torch.nn.Linear(1, 1, device="cuda").weight.device.type == "cuda"
    assert x.type() == "torch.cuda.FloatTensor"
    assert "cuda" in repr(x)
    assert x.untyped_storage().device.type == "cuda"


@shown
def test_torch_itself_sees_the_real_device() -> None:
    seen: dict[str, str] = {}
    exec("def look(x): return x.device.type", {"__name__": "torch.some_internal_module"}, seen)
    assert seen["look"](torch.ones(1, device="cuda")) == ditorch.backend.device_type  # type: ignore[operator]


def test_backend_name_checks_see_nccl(tmp_path: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert dist.get_backend() == "nccl"
        assert dist.get_backend(dist.new_group([0], backend="nccl")) == "nccl"
        assert dist.is_nccl_available()
        total = torch.ones(2, device="cuda")
        dist.all_reduce(total)
        assert total.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jit_script_compiles_and_runs_device_code() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0:
                x = x + torch.ones(2, device="cuda")
            return self.linear(x) * torch.zeros(2, device=x.device)

    model = torch.jit.script(Model().cuda())
    assert isinstance(model, torch.jit.ScriptModule)
    assert model(torch.ones(2).cuda()).tolist() == [0.0, 0.0]


def test_tensors_given_by_keyword() -> None:
    x = torch.arange(4.0, device="cuda")
    out = torch.nn.functional.linear(input=x, weight=torch.ones(2, 4, device="cuda"))
    assert out.tolist() == [6.0, 6.0]
    assert torch.zeros_like(input=x).device == x.device
    assert torch.as_tensor(data=[1.0], device="cuda").device == x.device


def test_meta_device_context_still_works() -> None:
    with torch.device("meta"):
        assert torch.zeros(2).is_meta
        assert torch.nn.Linear(2, 2).weight.is_meta
        assert not torch.zeros(2, device="cpu").is_meta
    with torch.device("cuda"), torch.device("cpu"):
        assert torch.zeros(2).device.type == "cpu"
    model = torch.nn.Linear(2, 2, device="meta").to_empty(device="cuda")
    assert model.weight.device == torch.zeros(1, device="cuda").device


def test_amp_names_imported_from_torch_cuda() -> None:
    from torch.cuda.amp import autocast

    with pytest.warns(FutureWarning), autocast():
        x = torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")
    assert x.dtype == torch.float16


def test_torch_cuda_is_one_module() -> None:
    import torch.cuda as by_import

    assert sys.modules["torch.cuda"] is torch.cuda is by_import
    assert sys.modules["torch.cuda.amp"] is torch.cuda.amp


def test_names_imported_before_ditorch_follow() -> None:
    code = """
import torch
from torch.cuda import is_available, synchronize, current_device, Stream, Event, manual_seed_all
from torch.cuda.amp import autocast, GradScaler
from torch import zeros, randn, autocast as general
from torch.distributed import init_process_group, get_backend
import ditorch
assert is_available() and current_device() == 0
synchronize(); manual_seed_all(1)
device = torch.ones(1, device="cuda").device
assert zeros(2, device="cuda").device == device and randn(2, device="cuda:0").device == device
event = Event(enable_timing=True); event.record(Stream())
with general("cuda", dtype=torch.bfloat16):
    assert (torch.ones(2, 2).cuda() @ torch.ones(2, 2).cuda()).dtype == torch.bfloat16
scaler = GradScaler()
assert scaler.scale(torch.ones(1, device="cuda")).item() == 65536
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=240)


def test_is_available_means_that_a_tensor_can_be_made() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() >= 1
    for index in range(torch.cuda.device_count()):
        assert torch.ones(1, device=f"cuda:{index}").item() == 1
    with pytest.raises(RuntimeError):
        torch.ones(1, device=f"cuda:{torch.cuda.device_count()}" if ditorch.backend.shows_as_cuda else "cuda:x")
    assert torch.version.cuda is None or torch.version.cuda[0].isdigit()
    assert torch.backends.cuda.is_built()


@shown
def test_checkpoints_keep_the_cuda_tag(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(torch.nn.Linear(2, 2).cuda().state_dict(), path)
    assert b"cuda:0" in path.read_bytes()
    assert torch.load(path)["weight"].device == torch.device("cuda:0")
    assert torch.load(path, map_location="cpu")["weight"].device.type == "cpu"
    with pytest.raises((RuntimeError, pickle.UnpicklingError), match="map_location"):  # as the vendor wraps it
        torch.load(path, map_location=f"cuda:{torch.cuda.device_count()}")
