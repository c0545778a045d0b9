"""Random numbers of soft: a generator per device, the CPU's numbers for the same seed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

DRAWS = {
    "rand": lambda device: torch.rand(50, device=device),
    "randn": lambda device: torch.randn(50, device=device),
    "randint": lambda device: torch.randint(9, (50,), device=device),
    "randperm": lambda device: torch.randperm(50, device=device),
    "bernoulli": lambda device: torch.full((50,), 0.3, device=device).bernoulli(),
    "multinomial": lambda device: torch.ones(9, device=device).multinomial(5),
    "normal_": lambda device: torch.empty(50, device=device).normal_(2, 3),
    "exponential_": lambda device: torch.empty(50, device=device).exponential_(),
    "poisson": lambda device: torch.poisson(torch.full((50,), 3.0, device=device)),
    "rand_like": lambda device: torch.rand_like(torch.empty(50, device=device)),
    "random_": lambda device: torch.empty(50, dtype=torch.long, device=device).random_(),
    "dropout": lambda device: F.dropout(torch.ones(50, device=device), 0.3),
    "dropout1d": lambda device: F.dropout1d(torch.ones(5, 10, device=device), 0.3),
    "alpha_dropout": lambda device: F.alpha_dropout(torch.ones(50, device=device), 0.3, training=True),
    "rrelu": lambda device: F.rrelu(-torch.ones(50, device=device), training=True),
    "gumbel": lambda device: F.gumbel_softmax(torch.ones(4, 5, device=device)),
    "kaiming": lambda device: torch.nn.init.kaiming_uniform_(torch.empty(5, 5, device=device)),
    "native_dropout": lambda device: torch.native_dropout(torch.ones(50, device=device), 0.3, True)[0],
    "attention": lambda device: F.scaled_dot_product_attention(
        *[torch.ones(1, 2, 5, 4, device=device)] * 3, dropout_p=0.5
    ),
}


@pytest.mark.parametrize("name", sorted(DRAWS))
def test_a_seed_gives_the_numbers_of_the_cpu(name):
    results = []
    for device in ("cpu", "soft:0", "soft:1"):
        torch.manual_seed(7)
        results.append((DRAWS[name](device).cpu(), DRAWS[name](device).cpu()))
    for first, second in results:
        assert torch.equal(first, results[0][0])
        assert torch.equal(second, results[0][1])
        assert name == "multinomial" or not torch.equal(first, second)


def test_manual_seed_reaches_every_device():
    torch.manual_seed(3)
    first = [torch.rand(4, device=f"soft:{i}") for i in range(2)]
    torch.manual_seed(3)
    assert all(torch.equal(a, torch.rand(4, device=a.device)) for a in first)
    torch.soft.manual_seed(4)  # the current device only
    assert torch.soft.default_generators[0].initial_seed() == 4
    assert torch.soft.default_generators[1].initial_seed() == 3
    torch.soft.manual_seed_all(5)
    assert {g.initial_seed() for g in torch.soft.default_generators} == {5}
    assert torch.soft.initial_seed() == 5


def test_devices_do_not_disturb_each_other_or_the_cpu():
    torch.manual_seed(3)
    torch.rand(10, device="soft:0")
    other = torch.rand(4, device="soft:1")
    host = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(other, torch.rand(4, device="soft:1"))
    assert torch.equal(host, torch.rand(4))


def test_a_random_seed_differs():
    torch.soft.seed()
    first = torch.soft.initial_seed()
    torch.soft.seed_all()
    assert torch.soft.initial_seed() != first
    assert len({g.initial_seed() for g in torch.soft.default_generators}) == 1


@pytest.mark.parametrize("make", [lambda: 0, lambda: "soft", lambda: "soft:1", lambda: torch.device("soft:1")])
def test_state_can_be_taken_and_restored(make):
    device = make()
    on = torch.device("soft", device) if isinstance(device, int) else torch.device(device)
    state = torch.soft.get_rng_state(device)
    assert (state.device.type, state.dtype) == ("cpu", torch.uint8)
    first = torch.rand(4, device=on)
    torch.soft.set_rng_state(state, device)
    assert torch.equal(first, torch.rand(4, device=on))


def test_state_of_all_devices():
    states = torch.soft.get_rng_state_all()
    first = [torch.rand(4, device=f"soft:{i}") for i in range(2)]
    torch.soft.set_rng_state_all(states)
    assert all(torch.equal(a, torch.rand(4, device=a.device)) for a in first)


def test_fork_rng_restores_both_devices():
    torch.manual_seed(1)
    expected = torch.rand(3, device="soft:0"), torch.rand(3, device="soft:1"), torch.rand(3)
    torch.manual_seed(1)
    with torch.random.fork_rng(devices=[0, 1], device_type="soft"):
        torch.manual_seed(99)
        torch.rand(3, device="soft:0"), torch.rand(3, device="soft:1"), torch.rand(3)
    found = torch.rand(3, device="soft:0"), torch.rand(3, device="soft:1"), torch.rand(3)
    assert all(torch.equal(a, b) for a, b in zip(expected, found))


def test_own_generators():
    a, b = torch.Generator("soft:1").manual_seed(5), torch.Generator("soft:1").manual_seed(5)
    assert a.device == torch.device("soft:1")
    first = torch.randn(5, device="soft:1", generator=a)
    torch.rand(5, device="soft:1")  # the default generator is another one
    assert torch.equal(first, torch.randn(5, device="soft:1", generator=b))
    assert torch.equal(first.cpu(), torch.randn(5, generator=torch.Generator().manual_seed(5)))
    state = a.get_state()
    second = torch.randn(5, device="soft:1", generator=a)
    a.set_state(state)
    assert torch.equal(second, torch.randn(5, device="soft:1", generator=a))
    copy = b.clone_state()
    assert torch.equal(torch.rand(3, device="soft:1", generator=b), torch.rand(3, device="soft:1", generator=copy))
    assert a.seed() != 5


def test_generator_pickles_nothing_but_its_state():
    with pytest.raises(RuntimeError):
        torch.Generator("soft").set_state(torch.zeros(3, dtype=torch.uint8))


def test_native_dropout_keeps_scales_and_differentiates():
    x = torch.ones(10000, device="soft", requires_grad=True)
    y, mask = torch.native_dropout(x, 0.25, True)
    assert mask.dtype == torch.bool
    assert torch.equal(y.detach(), mask / 0.75)
    assert 0.7 < mask.float().mean().item() < 0.8
    y.sum().backward()
    assert torch.equal(x.grad, mask / 0.75)
    assert torch.equal(F.dropout(x, 0.5, training=False), x)
    assert F.dropout(x, 1.0).sum().item() == 0
