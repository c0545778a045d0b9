"""The layer on the device of this machine: shown devices, the ledger, errors, deactivation."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch

import ditorch

redirected = pytest.mark.skipif(ditorch.backend.native, reason="real CUDA: nothing is patched")
shown = pytest.mark.skipif(not ditorch.backend.shows_as_cuda, reason="CPU tensors cannot be shown as cuda")


def run(code: str, **environment: str) -> None:
    import os

    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], check=True, timeout=240, env={**os.environ, **environment}
    )


def test_nothing_is_patched_on_real_cuda() -> None:
    assert (ditorch.patches() == []) == ditorch.backend.native


def test_framework_names_package_and_version() -> None:
    name, _, version = ditorch.framework.partition(":")
    assert name
    assert version[0].isdigit()


def test_doctor_describes_the_device() -> None:
    found = ditorch.doctor()
    assert found.backend["name"] == ditorch.backend.name
    assert len(found.devices) == torch.cuda.device_count()
    assert found.versions["torch"] == torch.__version__
    assert str(found)


@shown
def test_shown_devices_survive_pickle_and_copies() -> None:
    x = torch.ones(2, device="cuda")
    assert pickle.loads(pickle.dumps(x.device)) == torch.device("cuda:0")
    assert copy.deepcopy(x).device == x.device
    assert pickle.loads(pickle.dumps(x)).device == x.device
    assert torch.nn.Parameter(x).device == x.device
    assert torch.zeros(2, device=x.device).device == x.device


@shown
def test_default_device() -> None:
    torch.set_default_device("cuda")
    try:
        assert torch.ones(1).is_cuda
        assert torch.get_default_device() == torch.device("cuda:0")
    finally:
        torch.set_default_device(None)
    assert not torch.ones(1).is_cuda


@shown
def test_optimizers_and_scaler_state_stay_on_the_device() -> None:
    weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    state = optimizer.state[weight]
    assert state["exp_avg"].device == weight.device
    fresh = torch.optim.AdamW([weight], lr=0.1)
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.state[weight]["exp_avg"].device == weight.device


@shown
def test_activation_checkpoint_keeps_random_state() -> None:
    from torch.utils.checkpoint import checkpoint

    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)).cuda()

    def gradient(use_checkpoint: bool) -> torch.Tensor:
        torch.cuda.manual_seed(3)
        x = torch.ones(2, 8, device="cuda", requires_grad=True)
        y = checkpoint(layer, x, use_reentrant=False) if use_checkpoint else layer(x)
        y.sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(True), gradient(False))


@shown
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_data_parallel_over_two_devices() -> None:
    model = torch.nn.Linear(4, 2).cuda()
    parallel = torch.nn.DataParallel(model, device_ids=[0, 1])
    x = torch.randn(6, 4, device="cuda")
    out = parallel(x)
    assert torch.allclose(out, model(x), atol=1e-6)
    out.sum().backward()
    assert model.weight.grad is not None
    assert torch.allclose(model.weight.grad, x.sum(0).expand(2, 4), atol=1e-5)


@redirected
def test_what_cannot_be_done_names_call_backend_and_alternative() -> None:
    with pytest.raises(ditorch.UnsupportedError) as caught:
        torch.cuda.power_draw()
    for part in ("torch.cuda.power_draw", ditorch.backend.vendor, "Instead: the vendor's monitoring command"):
        assert part in str(caught.value)
    listed = {patch.what: patch for patch in ditorch.patches()}
    assert listed["torch.cuda.power_draw"].kind == "unsupported"


@redirected
def test_graph_capture_refuses_to_read_values() -> None:
    x = torch.ones(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"), torch.cuda.graph(graph):
        x.sum().item()
    assert not torch.cuda.is_current_stream_capturing()


@redirected
def test_graph_replay_trains_a_model() -> None:
    def train(graphed: bool) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1).cuda()
        x = torch.zeros(8, 4, device="cuda")
        weights = list(model.parameters())

        def step() -> torch.Tensor:
            loss = model(x).sub(1).square().mean()
            for weight, grad in zip(weights, torch.autograd.grad(loss, weights)):
                weight.data.sub_(grad, alpha=0.1)
            return loss

        graph = torch.cuda.CUDAGraph()
        if graphed:
            start = [w.detach().clone() for w in weights]
            with torch.cuda.graph(graph):
                loss = step()
            for weight, value in zip(weights, start):
                weight.data.copy_(value)
        seen = []
        for index in range(4):
            x.fill_(float(index))
            if graphed:
                graph.replay()
                seen.append(loss.item())
            else:
                seen.append(step().item())
        return seen

    assert train(True) == train(False)


@redirected
@pytest.mark.slow
def test_ranges_appear_in_a_profile() -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        torch.cuda.nvtx.range_push("my step")
        torch.ones(4, device="cuda").sum()
        torch.cuda.nvtx.range_pop()
    assert "my step" in {event.key for event in found.key_averages()}


@redirected
@shown
def test_devices_can_be_shown_as_they_are() -> None:
    code = """
import torch, ditorch
x = torch.ones(2, device="cuda")
kind = ditorch.backend.device_type
assert x.device.type == kind and str(x.device) == f"{kind}:0" and kind in repr(x), x.device
assert x.to("cuda:0").device == x.device and torch.zeros(1, device=x.device).device == x.device
"""
    run(code, DITORCH_SHOW_DEVICE_AS_CUDA="0")


@redirected
@shown
def test_deactivate_leaves_tensors_usable_under_their_own_name() -> None:
    code = """
import torch
before = {n: dict(vars(s)) for n, s in (("torch", torch), ("cuda", torch.cuda), ("Tensor", torch.Tensor))}
is_available = torch.cuda.is_available
code = is_available.__code__
import ditorch
x = torch.ones(2, device="cuda")
ditorch.deactivate()
kind = ditorch.backend.device_type
assert x.device.type == kind and (x + 1).sum().item() == 4 and not x.is_cuda
assert is_available.__code__ is code and torch.cuda.is_available is is_available and not torch.cuda.is_available()
for name, space in (("torch", torch), ("cuda", torch.cuda), ("Tensor", torch.Tensor)):
    changed = [k for k, v in before[name].items() if vars(space).get(k) is not v]
    assert not changed, (name, changed)
    extra = set(vars(space)) - set(before[name]) - {kind, f"is_{kind}", "comm"}
    assert not extra, (name, extra)
try:
    torch.ones(1, device="cuda")
except (AssertionError, RuntimeError):
    pass
else:
    raise AssertionError("cuda still means something")
ditorch.activate()
assert x.is_cuda
"""
    run(code)


@pytest.mark.skipif(ditorch.backend.name != "soft", reason="the number of soft devices is a setting")
def test_visible_devices_are_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DITORCH_SOFT_DEVICES", raising=False)  # a number that was asked for stays
    run("import torch, ditorch; assert torch.cuda.device_count() == 1", CUDA_VISIBLE_DEVICES="1")
    run("import torch, ditorch; assert torch.cuda.device_count() == 3", CUDA_VISIBLE_DEVICES="0,1,2")
