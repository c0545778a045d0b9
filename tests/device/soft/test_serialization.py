"""Soft tensors survive saving, loading, copying and pickling, onto any device."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn


def saved(value: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {
        "zero": torch.arange(4.0, device="soft:0"),
        "one": torch.arange(6.0, device="soft:1").view(2, 3).t(),
        "host": torch.ones(2),
    }


@pytest.mark.parametrize("weights_only", [True, False])
def test_devices_and_layout_are_kept(tensors, weights_only):
    found = torch.load(saved(tensors), weights_only=weights_only)
    for name, tensor in tensors.items():
        assert found[name].device == tensor.device
        assert found[name].stride() == tensor.stride()
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize(
    ("location", "zero", "one"),
    [
        (lambda: "cpu", "cpu", "cpu"),
        (lambda: torch.device("cpu"), "cpu", "cpu"),
        (lambda: "soft", "soft:0", "soft:0"),
        (lambda: "soft:1", "soft:1", "soft:1"),
        (lambda: torch.device("soft", 1), "soft:1", "soft:1"),
        (lambda: {"soft:1": "soft:0"}, "soft:0", "soft:0"),
        (lambda: {"soft:0": "cpu"}, "cpu", "soft:1"),
        (lambda: lambda storage, place: storage, "cpu", "cpu"),
        (lambda: lambda storage, place: storage.to(device="soft:1"), "soft:1", "soft:1"),
    ],
)
def test_map_location(tensors, location, zero, one):
    found = torch.load(saved(tensors), map_location=location(), weights_only=True)
    assert found["zero"].device == torch.device(zero)
    assert found["one"].device == torch.device(one)
    assert torch.equal(found["one"].cpu(), tensors["one"].cpu())


def test_the_current_device_is_meant_by_plain_soft(tensors):
    with torch.soft.device(1):
        assert torch.load(saved(tensors), map_location="soft")["zero"].device == torch.device("soft:1")


def test_map_location_meta_and_mmap(tensors, tmp_path):
    assert torch.load(saved(tensors), map_location="meta")["one"].device.type == "meta"
    torch.save(tensors, tmp_path / "tensors.pt")
    found = torch.load(tmp_path / "tensors.pt", mmap=True, map_location="cpu")
    assert torch.equal(found["zero"], tensors["zero"].cpu())


def test_a_device_that_is_not_there_names_itself(tensors):
    file = saved({"x": torch.ones(2, device="soft:1")})
    text = file.getvalue().replace(b"soft:1", b"soft:9")
    with pytest.raises(RuntimeError, match=r"soft:?9|9"):
        torch.load(io.BytesIO(text))


def test_sharing_is_kept():
    x = torch.arange(4.0, device="soft")
    found = torch.load(saved([x, x[1:], x]))
    assert found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()
    found[0].fill_(5)
    assert found[1].tolist() == [5, 5, 5]


def test_deepcopy():
    x = torch.arange(4.0, device="soft:1", requires_grad=True)
    y = copy.deepcopy(x)
    assert (y.device, y.requires_grad) == (x.device, True)
    assert y.data_ptr() != x.data_ptr()
    assert torch.equal(x, y)
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to("soft")
    twin = copy.deepcopy(net)
    twin[0].weight.data.zero_()
    assert net[0].weight.abs().sum() > 0
    assert twin[1].running_mean.device.type == "soft"
    base = torch.arange(4.0, device="soft")
    a, b = copy.deepcopy((base, base[2:]))
    a.zero_()
    assert b.tolist() == [0, 0]


def test_pickle():
    x = torch.arange(6.0, device="soft:1").view(2, 3).t()
    y = pickle.loads(pickle.dumps(x))
    assert (y.device, y.stride()) == (x.device, x.stride())
    assert torch.equal(x, y)
    assert pickle.loads(pickle.dumps(torch.device("soft:1"))) == torch.device("soft:1")
    complex_view = torch.randn(3, dtype=torch.complex64, device="soft").conj()
    assert torch.equal(pickle.loads(pickle.dumps(complex_view)), complex_view)


def test_state_dict_between_devices():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to("soft")
    twin = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    twin.load_state_dict(torch.load(saved(net.state_dict())))
    assert twin[0].weight.device.type == "cpu"
    assert torch.equal(twin[0].weight, net[0].weight.cpu())
    net.load_state_dict(twin.state_dict())
    assert net[1].running_var.device.type == "soft"


def test_optimizer_state_resumes_exactly():
    def fresh():
        torch.manual_seed(0)
        net = nn.Linear(3, 3).to("soft")
        return net, torch.optim.AdamW(net.parameters(), lr=0.1)

    def step(net, optimizer):
        optimizer.zero_grad()
        net(torch.ones(2, 3, device="soft")).square().sum().backward()
        optimizer.step()

    net, optimizer = fresh()
    for _ in range(3):
        step(net, optimizer)
    kept = saved({"net": net.state_dict(), "optimizer": optimizer.state_dict()})
    step(net, optimizer)
    again, other = fresh()
    state = torch.load(kept, map_location="cpu")
    again.load_state_dict(state["net"])
    other.load_state_dict(state["optimizer"])
    step(again, other)
    assert torch.equal(net.weight, again.weight)
    assert other.state[again.weight]["exp_avg"].device.type == "soft"


def test_parameters_and_legacy_format():
    parameter = nn.Parameter(torch.ones(2, device="soft"))
    found = torch.load(saved(parameter))
    assert isinstance(found, nn.Parameter)
    assert found.device.type == "soft"
    file = io.BytesIO()
    torch.save(parameter.detach(), file, _use_new_zipfile_serialization=False)
    file.seek(0)
    assert torch.load(file).device.type == "soft"


def test_storages_and_types_move():
    x = torch.ones(3, device="soft")
    assert x.untyped_storage().cpu().device.type == "cpu"
    assert x.type() == "torch.soft.FloatTensor"
    assert torch.ones(3).type("torch.soft.DoubleTensor").dtype == torch.float64
    assert torch.ones(3).soft().is_soft
    assert not torch.ones(3).is_soft
    assert nn.Linear(2, 2).soft(1).weight.device == torch.device("soft:1")
    assert torch.ones(3).untyped_storage().soft().device.type == "soft"


def test_loading_where_soft_is_not_loaded(tensors, tmp_path, python):
    torch.save(tensors, tmp_path / "tensors.pt")
    done = python(
        f"""
        import torch
        found = torch.load({str(tmp_path / "tensors.pt")!r}, map_location="cpu", weights_only=True)
        print(found["zero"].tolist(), found["one"].tolist(), hasattr(torch, "soft"))
        try:
            torch.load({str(tmp_path / "tensors.pt")!r}, weights_only=True)
        except RuntimeError as error:
            print(type(error).__name__)
        """,
        load=False,
    )
    assert done.stdout.splitlines() == [
        "[0.0, 1.0, 2.0, 3.0] [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]] False",
        "RuntimeError",
    ], done.stderr


def test_memory_is_not_shared_with_other_processes():
    """A device tensor is no host memory: sending one to another process is refused or copied, never aliased wrongly."""
    from torch.multiprocessing.reductions import reduce_tensor

    x = torch.arange(4.0, device="soft")
    try:
        rebuild, arguments = reduce_tensor(x)
        y = rebuild(*arguments)
    except (RuntimeError, NotImplementedError):
        return
    assert y.device == x.device
    assert torch.equal(x, y)
