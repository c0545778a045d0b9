"""Whole training runs on soft: the CPU's losses, bit for bit where the CPU runs the same kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.project(self.norm(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))


class GPT(nn.Module):
    def __init__(self, tokens: int = 64, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(tokens, width), nn.Embedding(16, width)
        self.layers = nn.Sequential()
        for _ in range(layers):
            self.layers.append(Attention(width, 4))
            self.layers.append(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU()))
            self.layers.append(nn.Linear(4 * width, width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embed.weight  # tied

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.head(self.norm(self.layers(x)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1, groups=2),
            nn.GroupNorm(4, 16),
            nn.SiLU(),
            nn.Dropout(0.25),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 5),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.body(x), torch.arange(x.shape[0], device=x.device) % 5)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], **options: object) -> None:
        super().__init__()
        self.cells, self.head = kind(6, 10, **options), nn.LazyLinear(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x)[0]).square().mean()


def losses(make, batch, device: str, steps: int, optimizer=torch.optim.AdamW, **options) -> list[float]:
    torch.manual_seed(0)
    net = make()
    net(batch)  # lazy layers take their shape
    net, batch = net.to(device), batch.to(device)
    stepper = optimizer(net.parameters(), lr=0.01, **options)
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        stepper.zero_grad()
        loss = net(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        stepper.step()
        found.append(loss.item())
    assert found[-1] < found[0]
    return found


TOKENS = torch.arange(4 * 16).view(4, 16) * 7 % 64


def test_gpt_with_adamw_is_bit_identical_over_20_steps():
    assert losses(GPT, TOKENS, "soft", 20) == losses(GPT, TOKENS, "cpu", 20)


def test_moving_a_module_keeps_its_parameters():
    """Ties between parameters hold, and so do optimizers that were made before."""
    net = GPT()
    before = list(net.parameters())
    stepper = torch.optim.SGD(net.parameters(), lr=1.0)
    for device in ("soft:0", "soft:1", "cpu", "soft:0"):
        net.to(device)
        assert net.head.weight is net.embed.weight
        assert all(a is b for a, b in zip(net.parameters(), before))
        assert net.embed.weight.device == torch.device(device)
    net(TOKENS.to("soft")).backward()
    assert net.embed.weight.grad.device.type == "soft"
    kept = net.norm.weight.detach().clone()
    stepper.step()
    assert not torch.equal(net.norm.weight, kept)
    net.cpu()
    assert net.embed.weight.grad.device.type == "cpu"


def test_gpt_on_the_second_device():
    assert losses(GPT, TOKENS, "soft:1", 3) == losses(GPT, TOKENS, "cpu", 3)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"momentum": 0.9}),
        (torch.optim.NAdam, {}),
        (torch.optim.Adafactor, {"foreach": False}),
    ],
)
def test_optimizers_are_bit_identical(optimizer, options):
    same_kernels = "foreach" in options or "fused" in options
    found = losses(GPT, TOKENS, "soft", 4, optimizer, **options)
    expected = losses(GPT, TOKENS, "cpu", 4, optimizer, **(options if same_kernels else {**options, "foreach": True}))
    assert found == expected


def test_cnn_with_dropout_and_batch_norm_is_bit_identical():
    images = torch.linspace(-1, 1, 6 * 3 * 64).view(6, 3, 8, 8).sin()
    assert losses(CNN, images, "soft", 10) == losses(CNN, images, "cpu", 10)
    last = images.to(memory_format=torch.channels_last)
    # outside the CPU, autograd makes the gradient of group_norm contiguous, and another kernel takes it
    assert losses(without_group_norm, last, "soft", 3) == losses(without_group_norm, last, "cpu", 3)
    assert losses(CNN, last, "soft", 3) == pytest.approx(losses(CNN, last, "cpu", 3), rel=1e-5)


def without_group_norm() -> nn.Module:
    net = CNN()
    net.body[5] = nn.Identity()
    return net


RECURRENT = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    (nn.LSTM, {"bias": False, "proj_size": 4}),
    (nn.GRU, {}),
    (nn.GRU, {"num_layers": 2, "bias": False}),
    (nn.RNN, {}),
]


@pytest.mark.parametrize(("kind", "options"), RECURRENT)
def test_recurrent_networks_learn_as_on_the_cpu(kind, options):
    """Devices run fused cells where the CPU runs several operators, so the rounding may differ."""
    series = torch.linspace(-2, 2, 5 * 3 * 6).view(5, 3, 6).sin()

    def make() -> nn.Module:
        return Recurrent(kind, **options)

    assert losses(make, series, "soft", 10) == pytest.approx(losses(make, series, "cpu", 10), rel=1e-5)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("bias", [True, False])
def test_fused_cells_have_right_gradients_twice(kind, bias):
    torch.manual_seed(0)
    cell = kind(3, 4, bias=bias).double().to("soft")
    x = torch.randn(2, 3, dtype=torch.float64, device="soft", requires_grad=True)
    h = torch.randn(2, 4, dtype=torch.float64, device="soft", requires_grad=True)
    c = torch.randn(2, 4, dtype=torch.float64, device="soft", requires_grad=True)

    def run(x, h, c, *parameters):
        return cell(x, (h, c) if kind is nn.LSTMCell else h)

    inputs = (x, h, c, *cell.parameters())
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs[:3])
    twin = kind(3, 4, bias=bias).double()
    twin.load_state_dict(cell.state_dict())
    state = (h.cpu(), c.cpu()) if kind is nn.LSTMCell else h.cpu()
    found, expected = run(*inputs), twin(x.cpu(), state)
    for a, b in zip(found, expected):
        assert torch.allclose(a.cpu(), b, rtol=1e-12)


def test_packed_sequences():
    torch.manual_seed(0)
    net = nn.LSTM(3, 4)
    series = [torch.randn(n, 3) for n in (5, 3, 2)]
    expected = nn.utils.rnn.pad_packed_sequence(net(nn.utils.rnn.pack_sequence(series))[0])[0]
    found = net.to("soft")(nn.utils.rnn.pack_sequence([s.to("soft") for s in series]))[0]
    assert torch.allclose(nn.utils.rnn.pad_packed_sequence(found)[0].cpu(), expected, rtol=1e-5)


def test_mixed_precision_training():
    def run(device: str) -> list[float]:
        torch.manual_seed(0)
        net = GPT().to(device)
        stepper = torch.optim.AdamW(net.parameters(), lr=0.01)
        found = []
        for _ in range(6):
            stepper.zero_grad()
            with torch.autocast("soft", dtype=torch.bfloat16):
                loss = net(TOKENS.to(device))
            loss.backward()
            stepper.step()
            found.append(loss.item())
        return found

    mixed, full = run("soft"), run("cpu")
    assert mixed != full
    assert mixed == pytest.approx(full, rel=0.1)
    assert mixed[-1] < mixed[0] / 2


def test_transformer_modules():
    torch.manual_seed(0)
    net = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    for training in (True, False):
        net.train(training).cpu()
        with torch.set_grad_enabled(training):
            expected = net(x)
            found = net.to("soft")(x.to("soft"))
        assert torch.allclose(found.cpu(), expected, rtol=1e-4, atol=1e-6)
