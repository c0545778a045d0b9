"""Mistakes raise clear errors, as on any device, and leave the process usable."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F


@pytest.fixture(autouse=True)
def process_intact():
    yield
    x = torch.arange(4.0, device="soft", requires_grad=True)
    (x * x).sum().backward()
    assert x.grad.tolist() == [0, 2, 4, 6]
    assert torch.ones(2, device="soft:1").sum().item() == 2


MIXES = {
    "add": lambda a, b: a + b,
    "add_": lambda a, b: a.clone().add_(b),
    "mm": lambda a, b: a @ b.t(),
    "addmm": lambda a, b: torch.addmm(a @ a.t(), a, b.t()),
    "linear": lambda a, b: F.linear(a, b),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "out": lambda a, b: torch.add(a, a, out=torch.empty_like(b)),
    "gather": lambda a, b: torch.gather(a, 0, b.long() * 0),
    "embedding": lambda a, b: F.embedding(b.long() * 0, a),
    "layer_norm": lambda a, b: F.layer_norm(a, (4,), b[0]),
    "batch_norm": lambda a, b: F.batch_norm(a, b[0], b[0].abs()),
    "conv": lambda a, b: F.conv1d(a[None], b[:, :, None]),
    "cross_entropy": lambda a, b: F.cross_entropy(a, b[:, 0].long() * 0),
    "mse": lambda a, b: F.mse_loss(a, b),
    "lerp": lambda a, b: torch.lerp(a, a, b),
    "foreach": lambda a, b: torch._foreach_add([a], [b]),
    "masked_fill": lambda a, b: a.masked_fill(b > 0, 0.0),
    "index_add": lambda a, b: a.index_add(0, torch.zeros(4, dtype=torch.long, device=a.device), b),
    "attention": lambda a, b: F.scaled_dot_product_attention(a[None], b[None], b[None]),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a, b),
}


@pytest.mark.parametrize("other", ["cpu", "soft:1"])
@pytest.mark.parametrize("name", sorted(MIXES))
def test_tensors_of_two_devices_do_not_mix(name, other):
    a, b = torch.randn(4, 4, device="soft:0"), torch.randn(4, 4, device=other)
    with pytest.raises(RuntimeError, match=r"device") as error:
        MIXES[name](a, b)
    assert "soft:0" in str(error.value)
    assert other in str(error.value)


def test_the_message_names_the_operator():
    with pytest.raises(
        RuntimeError, match=r"same device.*at least two devices, soft:0 and cpu! \(in aten::add\.Tensor\)"
    ):
        torch.ones(2, device="soft") + torch.ones(2)


def test_what_mixes_on_other_devices_mixes_here():
    x = torch.arange(4.0, device="soft")
    assert (x + torch.tensor(1.0)).tolist() == [1, 2, 3, 4]  # a zero-dim CPU tensor is a number
    assert x[torch.tensor([1, 2])].tolist() == [1, 2]  # CPU indices
    x[torch.tensor([0])] = torch.tensor(9.0)
    assert x[0].item() == 9
    x.copy_(torch.ones(4))
    assert torch.ones(4).copy_(x).sum().item() == 4
    assert torch.where(x > 0, x, torch.tensor(0.0)).sum().item() == 4
    with pytest.raises(RuntimeError, match="device"):
        torch.tensor(1.0).add_(x[0])  # but nothing is written to it


@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.ones(1, device="soft:7"),
        lambda: torch.empty(1, device=torch.device("soft", 7)),
        lambda: torch.ones(1).to("soft:7"),
        lambda: torch.soft.set_device(7),
        lambda: torch.soft.device(7),
        lambda: torch.soft.memory_allocated(7),
        lambda: torch.soft.get_device_properties("soft:7"),
        lambda: torch.soft.Stream(7),
        lambda: torch.soft.synchronize(7),
        lambda: torch.Generator("soft:7"),
        lambda: torch.soft.get_rng_state(7),
    ],
)
def test_a_device_that_does_not_exist(use):
    with pytest.raises(RuntimeError, match=r"soft:7 does not exist: this process has 2 .*DITORCH_SOFT_DEVICES=8"):
        use()
    assert torch.soft.current_device() == 0


def test_a_device_of_another_kind_is_refused_by_name():
    with pytest.raises(ValueError, match="expected a soft device, got cpu"):
        torch.soft.memory_allocated("cpu")


def test_limit_exceeded_names_the_remedy_and_frees_what_it_took():
    gc.collect()  # what earlier tests of this process left in cycles
    torch.soft.set_memory_limit("1MiB")
    before = torch.soft.memory_allocated()
    for make in (
        lambda: torch.empty(2**20, device="soft"),
        lambda: torch.ones(2**20).to("soft"),
        lambda: torch.ones(1, device="soft").repeat(2**20),
        lambda: torch.ones(1024, 1, device="soft") + torch.ones(1024, device="soft"),
        lambda: torch.empty(0, device="soft").resize_(2**20),
        lambda: torch.mm(
            torch.ones(1024, 1, device="soft"), torch.ones(1, 1024, device="soft"), out=torch.empty(0, device="soft")
        ),
        lambda: torch.UntypedStorage(2**21, device="soft"),
    ):
        with pytest.raises(torch.OutOfMemoryError, match=r"limit of 1\.00 MiB.*DITORCH_SOFT_MEMORY_LIMIT"):
            make()
        assert torch.soft.memory_allocated() == before
    assert torch.ones(2**20, device="soft:1").numel() == 2**20  # each device has its own limit
    assert torch.soft.memory_stats()["num_ooms"] >= 7
    torch.soft.set_memory_limit(None)  # the process may hold more than that


def test_more_than_the_host_has_is_out_of_memory_too():
    before = torch.soft.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError, match="the host has no more"):
        torch.empty(2**47, dtype=torch.uint8, device="soft")
    with pytest.raises(torch.OutOfMemoryError, match="the host has no more"):
        torch.ones(1, device="soft").repeat(2**45)
    assert torch.soft.memory_allocated() == before


@pytest.mark.parametrize(
    "use",
    [
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        lambda x: torch.quantize_per_tensor(x.cpu(), 0.1, 0, torch.qint8).to("soft"),
        lambda x: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device="soft") * 2,
        lambda x: torch.nested.as_nested_tensor([x[0], x[1]]),
        lambda x: x.to_mkldnn(),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_quantized_and_nested_are_refused(use):
    with pytest.raises(NotImplementedError, match=r"soft.*(not supported|does not have|strided)"):
        use(torch.eye(3, device="soft"))


@pytest.mark.slow  # the first jagged tensor imports torch's compiler
@pytest.mark.filterwarnings("ignore")
def test_jagged_tensors_are_dense_inside_and_work():
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device="soft", layout=torch.jagged)
    assert (jagged * 2).values().sum().item() == 10


def test_a_generator_of_another_device_is_refused():
    with pytest.raises(RuntimeError, match="Expected a 'soft' device type for generator but found 'cpu'"):
        torch.rand(3, device="soft", generator=torch.Generator())
    with pytest.raises(RuntimeError, match="Expected a 'soft' device type for generator but found 'cpu'"):
        torch.empty(3, device="soft").uniform_(generator=torch.Generator())
    for use in (
        lambda g: torch.rand(3, generator=g),
        lambda g: torch.empty(3).normal_(generator=g),
        lambda g: torch.randint(4, (3,), generator=g),
        lambda g: torch.randperm(4, generator=g),
        lambda g: torch.multinomial(torch.ones(4), 2, generator=g),
    ):
        with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'soft'"):
            use(torch.Generator("soft"))


def test_no_silent_conversion_to_numpy():
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu"):
        torch.ones(2, device="soft").numpy()
    assert torch.ones(2, device="soft").numpy(force=True).tolist() == [1, 1]


def test_kernel_errors_come_through_as_they_are():
    x = torch.ones(2, 3, device="soft")
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        x @ x
    with pytest.raises(IndexError):
        x[5]
    with pytest.raises(torch.linalg.LinAlgError):
        torch.linalg.inv(torch.zeros(2, 2, device="soft"))


def test_an_error_in_place_leaves_the_tensor_alone():
    x = torch.ones(3, device="soft")
    with pytest.raises(RuntimeError):
        x.add_(torch.ones(4, device="soft"))
    assert x.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("DITORCH_SOFT_MEMORY_LIMIT", "lots", "write it like 1048576, 512MiB or 2GiB"),
        ("DITORCH_SOFT_DEVICES", "0", "must be a number from 1 to 64, got '0'"),
        ("DITORCH_SOFT_DEVICES", "two", "must be a number from 1 to 64, got 'two'"),
    ],
)
def test_the_variables_are_validated(monkeypatch, name, value, expected):
    import ditorch.soft

    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"{name}.*{expected}"):
        ditorch.soft._memory_limit(), ditorch.soft._device_count()


def test_the_variables_take_effect(python):
    done = python(
        """
        print(torch.soft.device_count(), torch.soft.mem_get_info(2)[1])
        try:
            torch.ones(2**20, device="soft:2")
        except torch.OutOfMemoryError as error:
            print("out of memory")
        """,
        DITORCH_SOFT_DEVICES="3",
        DITORCH_SOFT_MEMORY_LIMIT="2MiB",
    )
    assert done.stdout.split("\n")[:2] == ["3 2097152", "out of memory"], done.stderr
