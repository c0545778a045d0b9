"""Doors that vendors' devices were found closed at: storages, lazy modules, operators of the user's, groups."""

from __future__ import annotations

import pytest
import torch

import ditorch

pytestmark = pytest.mark.skipif(ditorch.backend.native, reason="nothing is redirected on CUDA itself")
accelerator = pytest.mark.skipif(ditorch.backend.device_type == "cpu", reason="needs a device of its own")


def test_a_helper_of_pytorch_is_left_alone() -> None:
    made = torch._utils.classproperty(lambda cls: 3)
    assert type("A", (), {"p": made}).p == 3


def test_lazy_modules_move() -> None:
    made = torch.nn.LazyLinear(3).cuda()
    assert made(torch.ones(2, 2, device="cuda")).shape == (2, 3)


@accelerator
def test_storages_are_made_on_the_device() -> None:
    assert torch.UntypedStorage(4, device="cuda").device.type == "cuda"
    assert torch.TypedStorage(4, dtype=torch.float32, device="cuda").device.type == "cuda"
    assert torch.cuda.FloatStorage(4).device.type == "cuda"
    assert torch.UntypedStorage(4).device.type == "cpu"


@accelerator
def test_streams_show_cuda_and_have_its_handle() -> None:
    for stream in (torch.cuda.Stream(), torch.cuda.current_stream(), torch.Stream(device="cuda")):
        assert stream.device.type == "cuda"
        assert isinstance(stream.cuda_stream, int)  # type: ignore[union-attr]
    assert torch._C._cuda_getCurrentRawStream(0) == torch.cuda.current_stream().cuda_stream
    torch._C._cuda_setDevice(0)


@accelerator
def test_events_show_cuda_and_have_its_handle() -> None:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for event in (first, last):
        torch.cuda.current_stream().record_event(event)
        assert event.device.type == "cuda"
        assert isinstance(event.cuda_event, int)
    last.synchronize()
    assert first.elapsed_time(last) >= 0


@accelerator
def test_operators_registered_for_cuda_are_found() -> None:
    @torch.library.custom_op("vendor_doors::twice", mutates_args=(), device_types="cuda")
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.ones(2, device="cuda")
    assert twice(x).tolist() == [2.0, 2.0]
    library = torch.library.Library("vendor_doors2", "DEF")
    library.define("f(Tensor x) -> Tensor")
    library.impl("f", lambda x: x + 1, "CUDA")
    assert torch.ops.vendor_doors2.f(x).tolist() == [2.0, 2.0]
    torch.library.impl(library, "f", "CPU")(lambda x: x + 7)
    assert torch.ops.vendor_doors2.f(x.cpu()).tolist() == [8.0, 8.0]


def test_generators_are_those_of_now() -> None:
    assert len(torch.cuda.default_generators) == torch.cuda.device_count()
    torch.cuda.default_generators[0].manual_seed(3)


def test_emit_nvtx_is_accepted() -> None:
    with torch.autograd.profiler.emit_nvtx():
        torch.ones(2, device="cuda").add_(1)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="no collectives in this build")
def test_nccl_options_have_their_fields() -> None:
    for owner in (torch.distributed, torch.distributed.distributed_c10d):
        options = owner.ProcessGroupNCCL.Options()  # type: ignore[attr-defined]
        options.config.min_ctas = 4
        assert options._timeout.total_seconds() > 0


@accelerator
def test_inductor_names_the_accelerator() -> None:
    from torch._inductor import utils

    assert utils.get_gpu_type() == ditorch.backend.device_type


@accelerator
def test_a_kernel_in_cuda_source_is_refused_when_it_is_launched() -> None:
    kernel = torch.cuda.jiterator._create_jit_fn("template <typename T> T twice(T x) { return x + x; }")
    with pytest.raises(ditorch.UnsupportedError, match="jiterator"):
        kernel(torch.ones(2, device="cuda"))
