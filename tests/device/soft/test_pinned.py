"""Pinned host memory for soft: made, recognized, copied from without blocking, fed by a DataLoader."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset


def test_pin_memory_copies_into_pinned_memory():
    x = torch.arange(4.0)
    y = x.pin_memory()
    assert y.is_pinned()
    assert not x.is_pinned()
    assert y.device.type == "cpu"
    assert torch.equal(x, y)
    assert y.pin_memory() is y
    assert x.pin_memory("soft").is_pinned("soft")


def test_factories_pin():
    for make in (
        lambda: torch.empty(5, pin_memory=True),
        lambda: torch.zeros(5, pin_memory=True),
        lambda: torch.randn(5, pin_memory=True),
        lambda: torch.tensor([1.0, 2.0], pin_memory=True),
        lambda: torch.empty_like(torch.ones(5), pin_memory=True),
    ):
        assert make().is_pinned()


def test_views_and_storages_of_pinned_memory_are_pinned():
    x = torch.arange(12.0).pin_memory()
    for view in (x[3:], x.view(3, 4).t(), x[-1:], x.view(3, 4)[1]):
        assert view.is_pinned()
    assert x.untyped_storage().is_pinned()
    assert not (x + 1).is_pinned()
    assert not x.clone().is_pinned()


def test_pinned_memory_is_forgotten_when_freed():
    for _ in range(50):
        x = torch.empty(1000, pin_memory=True)
        address = x.data_ptr()
        del x
        y = torch.empty(1000)
        if y.data_ptr() == address:  # the host reuses the place
            assert not y.is_pinned()


def test_device_tensors_are_not_pinned():
    x = torch.ones(3, device="soft")
    assert not x.is_pinned()
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        x.pin_memory()
    with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
        torch.empty(3, device="soft", pin_memory=True)


def test_pinning_takes_no_device_memory():
    before = torch.soft.memory_allocated()
    x = torch.empty(1000, pin_memory=True)
    assert torch.soft.memory_allocated() == before
    del x


def test_non_blocking_copies_both_ways():
    host = torch.randn(100).pin_memory()
    there = host.to("soft", non_blocking=True)
    back = torch.empty(100, pin_memory=True)
    back.copy_(there, non_blocking=True)
    torch.soft.current_stream().synchronize()
    assert torch.equal(host, back)
    assert there.cpu().equal(host)
    assert there.to("cpu", non_blocking=True).equal(host)
    host.fill_(0)
    assert not there.cpu().equal(host)  # a copy, not an alias


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader(workers):
    data = TensorDataset(torch.arange(40.0).view(20, 2), torch.arange(20))
    loader = DataLoader(data, batch_size=4, pin_memory=True, num_workers=workers)
    seen = []
    for x, label in loader:
        assert x.is_pinned()
        assert label.is_pinned()
        on_device = x.to("soft", non_blocking=True)
        assert torch.equal(on_device.cpu(), x)
        seen.extend(label.tolist())
    assert seen == list(range(20))


def test_data_loader_pins_nested_batches():
    samples = [{"x": torch.ones(2) * i, "name": str(i), "pair": (torch.tensor(i), i)} for i in range(4)]
    for batch in DataLoader(samples, batch_size=2, pin_memory=True):
        assert batch["x"].is_pinned()
        assert batch["pair"][0].is_pinned()
        assert isinstance(batch["name"], list)


def test_forked_workers_get_the_error_that_cuda_gives():
    torch.ones(1, device="soft")

    class OnDevice(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return (torch.full((2,), float(index), device="soft") * 2).cpu()

    with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA in forked subprocess"):
        list(DataLoader(OnDevice(), batch_size=2, num_workers=1))
