"""Memory of soft is counted per device, can be limited, and answers to the usual names."""

from __future__ import annotations

import re
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ditorch.soft.memory import parse_bytes

KIB = 1024


@pytest.fixture(autouse=True)
def no_garbage():
    import gc

    gc.collect()
    torch.soft.reset_peak_memory_stats(0)
    torch.soft.reset_accumulated_memory_stats(0)


def test_allocated_follows_tensors():
    base = torch.soft.memory_allocated()
    x = torch.empty(KIB, device="soft")
    assert torch.soft.memory_allocated() == base + 4 * KIB
    y = x * 2
    assert torch.soft.memory_allocated() == base + 8 * KIB
    view = y[3:]
    del x, y
    assert torch.soft.memory_allocated() == base + 4 * KIB
    del view
    assert torch.soft.memory_allocated() == base
    assert torch.soft.memory_reserved() == torch.soft.memory_allocated()


def test_views_and_inplace_take_nothing():
    x = torch.ones(KIB, device="soft")
    base = torch.soft.memory_allocated()
    y = x.view(32, 32).t()[3:]
    y.add_(1)
    assert torch.soft.memory_allocated() == base


def test_devices_are_counted_apart():
    base = [torch.soft.memory_allocated(i) for i in range(2)]
    x = torch.empty(KIB, device="soft:1")
    y = x + 1
    assert torch.soft.memory_allocated(0) == base[0]
    assert torch.soft.memory_allocated("soft:1") == base[1] + 8 * KIB
    del x, y


def test_peak_and_reset():
    base = torch.soft.memory_allocated()
    torch.soft.reset_peak_memory_stats()
    x = torch.empty(10 * KIB, device="soft")
    del x
    assert torch.soft.max_memory_allocated() == base + 40 * KIB
    assert torch.soft.max_memory_reserved() == torch.soft.max_memory_allocated()
    torch.soft.reset_peak_memory_stats()
    assert torch.soft.max_memory_allocated() == base
    torch.soft.reset_max_memory_allocated()


def test_what_the_host_could_not_give_is_no_peak():
    kept = torch.empty(KIB, device="soft")
    base = torch.soft.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 44, device="soft")
    assert torch.soft.memory_allocated() == torch.soft.max_memory_allocated() == base
    del kept


def test_statistics_under_the_names_of_cuda():
    torch.soft.reset_accumulated_memory_stats()
    x = torch.empty(KIB, device="soft")
    stats = torch.soft.memory_stats()
    assert stats["allocated_bytes.all.allocated"] == 4 * KIB
    assert stats["allocation.all.allocated"] == 1
    assert stats["allocated_bytes.all.current"] == torch.soft.memory_allocated()
    assert stats["reserved_bytes.all.peak"] == torch.soft.max_memory_reserved()
    del x
    assert torch.soft.memory_stats()["allocated_bytes.all.freed"] == 4 * KIB
    assert "soft:0 memory" in torch.soft.memory_summary()
    assert torch.soft.memory_snapshot() == []
    torch.soft.empty_cache()


def test_mem_get_info_follows_limit_and_use():
    free, total = torch.soft.mem_get_info()
    assert 0 < free <= total
    base = torch.soft.memory_allocated()
    torch.soft.set_memory_limit(base + 100 * KIB)
    x = torch.empty(5 * KIB, device="soft")
    assert torch.soft.mem_get_info() == (80 * KIB, base + 100 * KIB)
    assert torch.soft.get_device_properties().total_memory == base + 100 * KIB
    del x


def test_limit_is_exact_and_can_be_lifted():
    torch.soft.set_memory_limit(torch.soft.memory_allocated() + 4 * KIB)
    x = torch.empty(KIB, device="soft")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, device="soft")
    ooms = torch.soft.memory_stats()["num_ooms"]
    assert ooms == 1
    del x
    torch.empty(KIB, device="soft")
    torch.soft.set_memory_limit(None)
    torch.empty(100 * KIB, device="soft")
    with pytest.raises(ValueError, match="must be 0"):
        torch.soft.set_memory_limit(-1)


def test_limit_holds_against_many_threads():
    torch.soft.set_memory_limit(torch.soft.memory_allocated() + 64 * KIB)
    limit = torch.soft.mem_get_info()[1]
    torch.soft.reset_peak_memory_stats()
    failures = []

    def work() -> None:
        for _ in range(200):
            try:
                kept = [torch.empty(2 * KIB, device="soft") for _ in range(4)]
            except torch.OutOfMemoryError:
                failures.append(1)
            kept = []
        del kept

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.soft.max_memory_allocated() <= limit


def test_training_recovers_from_out_of_memory():
    torch.soft.set_memory_limit(torch.soft.memory_allocated() + 256 * KIB)
    net = torch.nn.Linear(64, 64, device="soft")
    with pytest.raises(torch.OutOfMemoryError):
        net(torch.ones(10000, 64, device="soft"))
    net(torch.ones(10, 64, device="soft")).sum().backward()
    assert net.weight.grad is not None


def test_fraction_of_the_host():
    torch.soft.set_per_process_memory_fraction(0.5)
    assert torch.soft.mem_get_info()[1] < torch.soft.mem_get_info(1)[1]
    with pytest.raises(ValueError, match="fraction"):
        torch.soft.set_per_process_memory_fraction(2.0)


@pytest.mark.skipif(not hasattr(torch.accelerator, "memory_allocated"), reason="torch has it since 2.9")
def test_torch_accelerator_memory_functions():
    x = torch.empty(KIB, device="soft")
    assert torch.accelerator.memory_allocated() == torch.soft.memory_allocated()
    assert torch.accelerator.memory_reserved(1) == torch.soft.memory_reserved(1)
    assert torch.accelerator.max_memory_allocated() == torch.soft.max_memory_allocated()
    assert torch.accelerator.memory_stats()["allocated_bytes.all.current"] == torch.soft.memory_allocated()
    del x
    torch.accelerator.reset_peak_memory_stats()
    assert torch.soft.max_memory_allocated() == torch.soft.memory_allocated()
    torch.accelerator.reset_accumulated_memory_stats()
    torch.accelerator.empty_cache()
    if hasattr(torch.accelerator, "get_memory_info"):
        torch.soft.set_memory_limit("1GiB")
        assert torch.accelerator.get_memory_info() == torch.soft.mem_get_info()


@settings(deadline=None)
@given(
    st.integers(0, 2**40), st.sampled_from(["", "k", "K", "m", "M", "g", "t"]), st.sampled_from(["", "b", "iB", "B"])
)
def test_sizes_are_read(number, unit, suffix):
    power = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}[unit.lower()]
    assert parse_bytes(f"{number}{unit}{suffix}") == number * 1024**power


@settings(deadline=None)
@given(st.text(max_size=8))
def test_other_texts_are_refused_with_an_example(text):
    if re.fullmatch(r"\s*\d+(\.\d+)?\s*[kmgt]?(i?b)?\s*", text, re.IGNORECASE):
        assert parse_bytes(text) >= 0
    else:
        with pytest.raises(ValueError, match="write it like 1048576, 512MiB or 2GiB"):
            parse_bytes(text)


def test_statistics_have_the_keys_of_cuda() -> None:
    stats = torch.soft.memory_stats()
    for group in ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "segment"):
        for pool in ("all", "large_pool", "small_pool"):
            assert {f"{group}.{pool}.{name}" for name in ("current", "peak", "allocated", "freed")} <= stats.keys()
    assert {"max_split_size", "num_sync_all_streams", "oversize_segments.peak", "num_device_alloc"} <= stats.keys()
    for name in ("current", "allocated"):
        parts = (stats[f"allocated_bytes.{pool}.{name}"] for pool in ("large_pool", "small_pool"))
        assert stats[f"allocated_bytes.all.{name}"] == sum(parts)
