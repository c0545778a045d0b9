"""Calls that draw random numbers: compared in full with the numbers that the device drew, and never a false alarm."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ditorch
import op_tools
from op_tools.call.devices import accelerator_type
from op_tools.call.operators.registry import CPU
from op_tools.compare import memory

Kernels = Callable[[str, Callable[..., Any]], None]


@pytest.fixture
def faults(device: str) -> Iterator[Any]:
    if getattr(ditorch.backend, "name", "") != "soft":
        pytest.skip("only the software accelerator can be made to fail on purpose")
    from ditorch.soft import faults as module

    yield module
    module.clear()


@pytest.fixture
def replace_kernel(faults: Any) -> Iterator[Kernels]:
    """Replaces a kernel of the software accelerator until the test ends."""
    libraries = []

    def replace(name: str, function: Callable[..., Any]) -> None:
        library = torch.library.Library("aten", "IMPL")
        library.impl(name, function, "PrivateUse1", allow_override=True)
        libraries.append(library)

    yield replace
    for library in libraries:
        library._destroy()


def verdicts(compared: op_tools.OpAutoCompare) -> set[tuple[str, str, str]]:
    return {(row["op"].rpartition(".")[2], row["phase"], row["verdict"]) for row in compared.records()}


def wrong(compared: op_tools.OpAutoCompare) -> set[tuple[str, str]]:
    return {(op, phase) for op, phase, verdict in verdicts(compared) if verdict == "wrong"}


def reasons(compared: op_tools.OpAutoCompare) -> str:
    return "\n".join(row["reason"] for row in compared.records() if row["verdict"] == "wrong")


def calls(device: str, dtype: torch.dtype = torch.float32) -> dict[str, Callable[[], torch.Tensor]]:
    """Calls that drop something, each by the last part of its name."""
    torch.manual_seed(0)
    x = torch.randn(8, 6, 16, device=device, dtype=dtype, requires_grad=True)
    attention = nn.MultiheadAttention(16, 2, dropout=0.2).to(device, dtype)
    network = nn.LSTM(16, 8, 2, dropout=0.3).to(device, dtype)
    return {
        "dropout": lambda: F.dropout(x.relu(), 0.3),
        "alpha_dropout": lambda: F.alpha_dropout(x, 0.3, training=True),
        "feature_alpha_dropout": lambda: F.feature_alpha_dropout(x, 0.3, training=True),
        "dropout1d": lambda: F.dropout1d(x, 0.3),
        "dropout3d": lambda: F.dropout3d(x.unsqueeze(-1), 0.3),
        "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(*[x[None]] * 3, dropout_p=0.3),
        "multi_head_attention_forward": lambda: attention(x, x, x)[0],
        "lstm": lambda: network(x)[0],
    }


def has_own_networks() -> bool:
    """Whether recurrent networks have a kernel of the device's own, as cuDNN's."""
    return accelerator_type() not in CPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(calls("cpu")))
def test_calls_with_dropout_are_compared_forward_and_backward(device: str, name: str, dtype: torch.dtype) -> None:
    if name == "lstm" and has_own_networks():
        pytest.skip("cuDNN draws from a state of its own: such calls are not comparable")
    if dtype == torch.bfloat16 and name == "lstm":
        pytest.skip("recurrent networks in a half type round at every step, and take seconds to probe")
    call = calls(device, dtype)[name]
    with op_tools.OpAutoCompare() as compared:
        call().square().sum().backward()
    found = verdicts(compared)
    assert {(name, "forward", "right"), (name, "backward", "right")} <= found
    assert not wrong(compared), reasons(compared)
    assert not [f for f in compared.findings() if f.kind != "skipped" or name in f.op]


def test_in_place_dropout_is_compared(device: str, replace_kernel: Kernels) -> None:
    x = torch.randn(500, device=device, requires_grad=True)
    with op_tools.OpAutoCompare() as compared:
        F.dropout(x * 1, 0.4, inplace=True).sum().backward()
        torch.dropout_((x * 1), 0.4, True).sum().backward()
    assert {("dropout", "forward", "right"), ("dropout_", "forward", "right")} <= verdicts(compared)
    assert not wrong(compared), reasons(compared)


def test_a_gradient_through_another_mask_is_found(device: str, replace_kernel: Kernels) -> None:
    kept = calls(device)
    replace_kernel("native_dropout_backward", lambda grad, mask, scale: grad * mask.flip(-1) * scale)
    for name in ("dropout", "scaled_dot_product_attention", "lstm"):
        with op_tools.OpAutoCompare() as compared:
            kept[name]().square().sum().backward()
        assert wrong(compared) == {(name, "backward")}


@pytest.mark.parametrize("same_numbers", [True, False])
@pytest.mark.parametrize("healthy", [True, False])
def test_dropout_at_the_end_of_a_checkpoint_is_compared(
    device: str, replace_kernel: Kernels, monkeypatch: pytest.MonkeyPatch, healthy: bool, same_numbers: bool
) -> None:
    """Its second forward ends before it returns: what it drew is found out by another one."""
    monkeypatch.setattr(memory, "_EVERY", 1)  # the guards of memory around it have no end, either
    if not healthy:
        replace_kernel("native_dropout_backward", lambda grad, mask, scale: grad * mask.flip(-1) * scale)
    w, x = (torch.randn(8, 8, device=device, requires_grad=True) for _ in range(2))

    def part(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x @ w, 0.3)

    with op_tools.OpAutoCompare() as tool:
        for _ in range(2):
            checkpoint(part, x, use_reentrant=False, preserve_rng_state=same_numbers).sum().backward()
        began = time.monotonic()
        tool.stop()
    assert time.monotonic() - began < 20
    assert wrong(tool) == (set() if healthy else {("dropout", "backward")})
    assert not [f for f in tool.findings() if f.kind in ("tool-failure", "skipped")]


def test_a_gradient_of_the_wrong_size_is_found(device: str, replace_kernel: Kernels) -> None:
    x = torch.randn(64, device=device, requires_grad=True)
    replace_kernel("native_dropout_backward", lambda grad, mask, scale: grad * mask)
    with op_tools.OpAutoCompare() as compared:
        F.dropout(x, 0.1).sum().backward()
    assert wrong(compared) == {("dropout", "backward")}


def test_a_wrong_scale_in_the_forward_is_found(device: str, replace_kernel: Kernels) -> None:
    kept = calls(device)

    def unscaled(x: torch.Tensor, p: float, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.rand(x.shape, device=x.device) >= p
        return x * mask, mask

    replace_kernel("native_dropout", unscaled)
    for name in ("dropout", "scaled_dot_product_attention", "multi_head_attention_forward"):
        with op_tools.OpAutoCompare() as compared:
            kept[name]()
        assert (name, "forward") in wrong(compared)


def test_a_fault_beside_the_dropout_is_found(device: str, faults: Any) -> None:
    call = calls(device)["scaled_dot_product_attention"]
    with faults.plant("_safe_softmax: noise=1e-2"), op_tools.OpAutoCompare() as compared:
        call()
    assert wrong(compared) == {("scaled_dot_product_attention", "forward")}


def test_a_wrong_proportion_is_found_in_small_calls_together(device: str, replace_kernel: Kernels) -> None:
    x = torch.randn(16, device=device)
    with op_tools.OpAutoCompare() as healthy:
        for _ in range(60):
            F.dropout(x, 0.1)
    assert not wrong(healthy), reasons(healthy)

    def too_many(x: torch.Tensor, p: float, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.rand(x.shape, device=x.device) >= 3 * p
        return x * mask * (1 / (1 - p)), mask

    replace_kernel("native_dropout", too_many)
    with op_tools.OpAutoCompare() as compared:
        for _ in range(60):
            F.dropout(x, 0.1)
    assert "in all calls so far" in reasons(compared)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_no_alarm(device: str, value: float, replace_kernel: Kernels) -> None:
    x = torch.randn(600, device=device)
    x[::2] = value
    x.requires_grad_()

    def selected(x: torch.Tensor, p: float, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.rand(x.shape, device=x.device) >= p
        return torch.where(mask, x / (1 - p), torch.zeros_like(x)), mask

    with op_tools.OpAutoCompare() as compared:
        F.dropout(x, 0.1).backward(torch.ones_like(x))
        F.dropout(torch.full_like(x, value), 0.1)
        replace_kernel("native_dropout", selected)
        F.dropout(x, 0.1).backward(torch.ones_like(x))
        F.dropout(torch.full_like(x, value), 0.1)
    assert not wrong(compared), reasons(compared)
    assert ("dropout", "backward", "right") in verdicts(compared)


def repeating(advances: bool) -> Callable[..., Any]:
    """A dropout kernel whose mask depends on the size alone; it may advance the generator all the same."""

    def kernel(x: torch.Tensor, p: float, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if advances:
            torch.rand(1, device=x.device)
        mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(3)).to(x.device) >= p
        return x * mask * (1 / (1 - p)), mask

    return kernel


@pytest.mark.parametrize("advances", [True, False])
@pytest.mark.parametrize("name", ["dropout", "scaled_dot_product_attention", "lstm"])
def test_masks_that_repeat_are_found(device: str, name: str, advances: bool, replace_kernel: Kernels) -> None:
    call = calls(device)[name]
    replace_kernel("native_dropout", repeating(advances))
    with op_tools.OpAutoCompare() as compared:
        for _ in range(4):
            call()
    assert (name, "forward") in wrong(compared)
    assert "the same random numbers as in an earlier call" in reasons(compared)
    assert ("does not change the state" in reasons(compared)) is not advances


def test_masks_that_repeat_on_purpose_are_no_alarm(device: str) -> None:
    call = calls(device)["scaled_dot_product_attention"]
    x = torch.randn(400, device=device, requires_grad=True)
    with op_tools.OpAutoCompare() as compared:
        for _ in range(4):
            torch.manual_seed(1)
            F.dropout(x, 0.5)
            call()
            torch.randn(400, device=device)
            checkpoint(F.dropout, x, 0.5, use_reentrant=False).sum().backward()
    assert not wrong(compared), reasons(compared)
    assert ("dropout", "forward", "right") in verdicts(compared)


@pytest.mark.parametrize(
    "name", ["dropout", "randn", "own generator", "uniform_", "exponential_", "randint", "bernoulli", "multinomial"]
)
def test_programs_that_set_their_seed_again_are_no_alarm(device: str, name: str) -> None:
    """The same numbers in every step, on purpose: added up they look as if they were not random."""
    x, own = torch.ones(100, device=device), torch.Generator(device)
    again = {
        "dropout": lambda: F.dropout(x, 0.1),
        "randn": lambda: torch.randn(16, device=device),
        "own generator": lambda: torch.randn(300, device=device, generator=own.manual_seed(1)),
        "uniform_": lambda: torch.empty(20, device=device).uniform_(),
        "exponential_": lambda: torch.empty(20, device=device).exponential_(),
        "randint": lambda: torch.randint(0, 10, (50,), device=device),
        "bernoulli": lambda: torch.bernoulli(x * 0.3),
        "multinomial": lambda: torch.multinomial(torch.ones(5, 4, device=device), 1),
    }[name]
    with op_tools.OpAutoCompare() as compared:
        for step in range(200):
            torch.manual_seed(1 + step // 100)
            again()
    assert not wrong(compared), reasons(compared)


@pytest.mark.parametrize("init", [nn.init.kaiming_uniform_, nn.init.xavier_uniform_, nn.init.uniform_])
def test_weights_from_a_range_that_is_too_small_are_found(
    device: str, init: Callable[..., Any], replace_kernel: Kernels
) -> None:
    def tenth_less(x: torch.Tensor, low: float = 0.0, high: float = 1.0, generator: Any = None) -> torch.Tensor:
        return x.copy_(low + (torch.rand(x.shape) * 0.9 + 0.05).to(x.device) * (high - low))

    with op_tools.OpAutoCompare() as compared:
        init(torch.empty(30, 30, device=device))
    assert not wrong(compared)
    replace_kernel("uniform_", tenth_less)
    with op_tools.OpAutoCompare() as compared:
        init(torch.empty(30, 30, device=device))
    assert "none of 900 values is" in reasons(compared)


def test_samples_of_another_distribution_are_found(device: str, replace_kernel: Kernels) -> None:
    with op_tools.OpAutoCompare() as healthy:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for size in (3, 300, 100_000):
                torch.randn(size, device=device, dtype=dtype)
                torch.rand(size, device=device, dtype=dtype)
                torch.empty(size, device=device, dtype=dtype).normal_(5, 0.1).uniform_(-3, 1).exponential_().cauchy_()
    assert not wrong(healthy), reasons(healthy)
    assert {("randn", "forward", "right"), ("normal_", "forward", "right")} <= verdicts(healthy)
    replace_kernel(
        "normal_", lambda self, mean=0.0, std=1.0, *, generator=None: self.copy_(1.5 * torch.randn(self.shape))
    )
    with op_tools.OpAutoCompare() as compared:
        torch.randn(1000, device=device)
        for _ in range(120):
            torch.randn(8, device=device)
    assert wrong(compared) == {("randn", "forward")}
    assert "the standard deviation of 1000 values" in reasons(compared)
    assert "the standard deviation of 256 values" in reasons(compared)


def test_samples_that_repeat_are_found(device: str, replace_kernel: Kernels) -> None:
    def same(self: torch.Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> torch.Tensor:
        return self.copy_(torch.randn(self.shape, generator=torch.Generator().manual_seed(5)))

    replace_kernel("normal_", same)
    with op_tools.OpAutoCompare() as compared:
        for _ in range(3):
            torch.randn(32, device=device)
    assert "the same random numbers" in reasons(compared)


def whole_draws(device: str) -> dict[str, Callable[[], Any]]:
    weights, shares = torch.tensor([0.0, 3.0, 1.0], device=device), torch.linspace(0, 1, 32, device=device)
    return {
        "bernoulli_": lambda: torch.empty(16, 1, device=device).bernoulli_(0.8),
        "bernoulli": lambda: torch.bernoulli(shares),
        "randint": lambda: torch.randint(5, 1000, (64,), device=device),
        "random_": lambda: torch.empty(64, device=device).random_(-4, 9),
        "randperm": lambda: torch.randperm(20, device=device),
        "multinomial": lambda: torch.multinomial(weights, 40, replacement=True),
        "exponential_": lambda: torch.empty(64, device=device).exponential_(3.0),
    }


@pytest.mark.parametrize("name", list(whole_draws("cpu")))
def test_draws_of_whole_numbers_are_judged_and_raise_no_alarm(device: str, name: str) -> None:
    torch.manual_seed(0)
    draw = whole_draws(device)[name]
    with op_tools.OpAutoCompare() as compared:
        for _ in range(60):
            draw()
    assert verdicts(compared) == {(name, "forward", "right")}


def _wrong_draws() -> dict[str, tuple[str, Callable[..., Any]]]:
    def fill(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return x.copy_(values.to(x.device))

    def likely(weights: torch.Tensor, count: int, *_: Any, **__: Any) -> torch.Tensor:
        return torch.ones(count, dtype=torch.int64, device=weights.device)

    return {
        "bernoulli_": ("bernoulli_.float", lambda x, p, generator=None: fill(x, (torch.rand(x.shape) < 0.5).float())),
        "randint": ("random_.from", lambda x, a, b, generator=None: fill(x, torch.randint(a, b // 2, x.shape))),
        "random_": ("random_.from", lambda x, a, b, generator=None: fill(x, torch.full(x.shape, float(b)))),
        "randperm": ("randperm", lambda n, **_: torch.randint(0, n, (n,)).to("cuda")),
        "multinomial": ("multinomial", likely),
        "exponential_": (
            "exponential_",
            lambda x, lambd=1.0, generator=None: fill(x, torch.empty(x.shape).exponential_(2 * lambd)),
        ),
    }


@pytest.mark.parametrize("name", list(_wrong_draws()))
def test_draws_of_whole_numbers_that_cannot_be_are_found(device: str, name: str, replace_kernel: Kernels) -> None:
    torch.manual_seed(0)
    draw = whole_draws(device)[name]
    replace_kernel(*_wrong_draws()[name])
    with op_tools.OpAutoCompare() as compared:
        for _ in range(20):
            draw()
    assert wrong(compared) == {(name, "forward")}


def test_what_draws_inside_its_kernel_is_named(device: str) -> None:
    x = torch.randn(100, device=device)
    with op_tools.OpAutoCompare() as compared:
        F.rrelu(x, training=True)
    assert [f.message for f in compared.findings()] == [
        "not comparable: random: rrelu_with_noise draws inside its kernel"
    ]
    assert any("torch.nn.functional.rrelu: 1 forward call" in line for line in compared.summary())


def test_training_is_the_same_with_calls_that_are_repeated(device: str) -> None:
    def train(tool: Any) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
        torch.manual_seed(7)
        model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2).to(device)
        own = has_own_networks()  # a seed does not set the state of its dropout: two runs draw other numbers
        recurrent = nn.LSTM(8, 8, 2, dropout=0.0 if own else 0.2).to(device)
        optimizer = torch.optim.SGD([*model.parameters(), *recurrent.parameters()], 0.1)
        x = torch.randn(5, 3, 8, device=device)
        with tool if tool is not None else torch.enable_grad():
            for low in (torch.float32, torch.bfloat16):
                with torch.autocast("cuda", low, enabled=low != torch.float32):
                    y = F.scaled_dot_product_attention(x, x, model(x), dropout_p=0.1)
                    loss = recurrent(y.float())[0].square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return copy.deepcopy(model.state_dict()), torch.get_rng_state(), torch.cuda.get_rng_state()

    bare, watched = train(None), train(op_tools.OpAutoCompare())
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(bare[0].values(), watched[0].values()))
    assert torch.equal(bare[1], watched[1])
    assert torch.equal(bare[2], watched[2])
