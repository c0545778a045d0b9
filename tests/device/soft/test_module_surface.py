"""torch.soft has the names that programs and PyTorch itself ask a device module for."""

from __future__ import annotations

import inspect

import pytest
import torch

# What training programs use of torch.cuda, as far as a device of any kind can have it.
USED = """
is_available current_device Event Stream current_stream stream synchronize empty_cache device_count
get_device_capability set_device get_device_properties memory_stats manual_seed max_memory_allocated memory_allocated
set_rng_state get_rng_state reset_peak_memory_stats device default_generators is_bf16_supported manual_seed_all
get_device_name memory_reserved default_stream is_initialized reset_max_memory_allocated mem_get_info
max_memory_reserved memory_snapshot get_rng_state_all set_rng_state_all set_stream initial_seed StreamContext
memory_summary amp seed seed_all init ipc_collect device_of get_arch_list set_per_process_memory_fraction
""".split()  # noqa: SIM905


@pytest.mark.parametrize("name", USED)
def test_name_is_there_and_public(name):
    assert hasattr(torch.soft, name)
    assert name in torch.soft.__all__


def test_everything_public_is_documented():
    for name in torch.soft.__all__:
        value = getattr(torch.soft, name)
        assert value is not None
        if inspect.isclass(value):
            assert value.__doc__


def test_device_module_is_registered():
    import torch.soft as module  # importable by name

    assert torch.get_device_module("soft") is module
    assert torch.get_device_module() is module
    assert torch.utils.backend_registration._get_custom_mod_func("device_count")() == 2
    assert torch._C._get_privateuse1_backend_name() == "soft"


def test_devices():
    assert torch.soft.is_available()
    torch.soft.init()
    assert torch.soft.is_initialized()
    assert torch.soft.device_count() == 2
    assert torch.soft.current_device() == 0
    with torch.soft.device(1):
        assert torch.soft.current_device() == 1
        assert torch.empty(1, device="soft").device == torch.device("soft:1")
        with torch.soft.device("soft:0"):
            assert torch.soft.current_device() == 0
        assert torch.soft.current_device() == 1
    assert torch.soft.current_device() == 0
    with torch.soft.device_of(torch.ones(1, device="soft:1")):
        assert torch.soft.current_device() == 1
    with torch.soft.device_of(torch.ones(1)):
        assert torch.soft.current_device() == 0
    with pytest.raises(ValueError, match="inside"), torch.soft.device(1):
        raise ValueError("inside")
    assert torch.soft.current_device() == 0


def test_properties():
    properties = torch.soft.get_device_properties(1)
    assert properties.name == torch.soft.get_device_name()
    assert properties.total_memory == torch.soft.mem_get_info(1)[1]
    assert properties.multi_processor_count >= 1
    assert torch.soft.get_device_capability() == (8, 0) == (properties.major, properties.minor)
    assert torch.soft.is_bf16_supported()
    assert torch.soft.can_device_access_peer(0, 1)
    with pytest.raises(AttributeError):
        properties.name = "other"


def test_torch_accelerator():
    accelerator = torch.accelerator
    assert accelerator.current_accelerator() == torch.device("soft")
    assert accelerator.is_available()
    assert accelerator.device_count() == 2
    index = getattr(accelerator, "current_device_index", None) or accelerator.current_device_idx
    choose = getattr(accelerator, "set_device_index", None) or accelerator.set_device_idx
    assert index() == 0
    choose(1)
    assert index() == torch.soft.current_device() == 1
    choose(0)
    accelerator.synchronize()
    accelerator.synchronize(1)
    side = torch.Stream("soft:1")
    before = accelerator.current_stream(1)
    accelerator.set_stream(side)
    assert accelerator.current_stream() == side
    accelerator.set_stream(before)
    choose(0)
    if hasattr(accelerator, "device_index"):
        with accelerator.device_index(1):
            assert index() == 1
        assert index() == 0


@pytest.mark.skipif(not hasattr(torch.accelerator, "get_device_capability"), reason="torch has it since 2.10")
def test_capability_lists_the_types():
    supported = torch.accelerator.get_device_capability()["supported_dtypes"]
    assert {torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.bool} <= supported
    assert torch.qint8 not in supported


def test_default_device_and_contexts():
    with torch.device("soft:1"):
        assert torch.zeros(1).device == torch.device("soft:1")
        assert torch.arange(3).device == torch.device("soft:1")
    torch.set_default_device("soft")
    try:
        assert torch.tensor([1.0]).device == torch.device("soft:0")
    finally:
        torch.set_default_device(None)
    assert torch.zeros(1).device.type == "cpu"


def test_device_objects():
    assert str(torch.device("soft")) == "soft"
    assert torch.device("soft:1") == torch.device("soft", 1)
    assert torch.device("soft:1").index == 1
    x = torch.zeros(1, device="soft")
    assert x.device == torch.device("soft:0")
    assert x.get_device() == 0
    assert x.is_soft
    assert not x.is_cpu
    assert "device='soft:0'" in repr(x)
    assert torch.tensor([1.5, 2], device="soft").tolist() == [1.5, 2]
    assert torch.as_tensor([1], device="soft").new_zeros(2).device == x.device


def test_packed_sequences_move():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    there = packed.soft()
    assert there.is_soft
    assert there.data.device.type == "soft"
    assert there.batch_sizes.device.type == "cpu"


def test_loading_twice_does_nothing():
    import ditorch.soft

    module = torch.soft
    ditorch.soft.load()
    assert torch.soft is module
    assert ditorch.soft.is_loaded()
    assert ditorch.soft.native().device_count() == 2
