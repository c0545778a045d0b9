"""Programs of other kinds: science, graphs, reinforcement learning, second derivatives, optimizers, transforms."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from . import PROGRAMS, Job, Step, program, trained


def mlp(*sizes: int, act: Any = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


# -- derivatives ---------------------------------------------------------------------------------------


@program
def pinn(job: Job) -> Step:
    net = job.to(mlp(2, 32, 32, 1))

    def loss() -> torch.Tensor:
        x = torch.rand(64, 2, device=job.device, requires_grad=True)
        u = net(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (ddu,) = torch.autograd.grad(du[:, 0].sum(), x, create_graph=True)
        return (du[:, 1] - 0.1 * ddu[:, 0]).square().mean() + u.square().mean()

    return trained(job, net, loss)


@program
def score_matching(job: Job) -> Step:
    net = job.to(mlp(2, 32, 2, act=nn.Softplus))
    data = job.randn(32, 2)

    def loss() -> torch.Tensor:
        x = data.clone().requires_grad_()
        s, v = net(x), torch.randn_like(data)
        (jvp,) = torch.autograd.grad((s * v).sum(), x, create_graph=True)
        return ((jvp * v).sum(1) + 0.5 * s.square().sum(1)).mean()

    return trained(job, net, loss)


@program
def maml(job: Job) -> Step:
    net = job.to(mlp(1, 16, 1, act=nn.ReLU))
    x, y = job.randn(16, 1), job.randn(16, 1)

    def loss() -> torch.Tensor:
        params = dict(net.named_parameters())
        inner = F.mse_loss(torch.func.functional_call(net, params, (x,)), y)
        grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(params.items(), grads)}
        return F.mse_loss(torch.func.functional_call(net, fast, (x + 0.1,)), y)

    return trained(job, net, loss)


@program
def hessian_vector(job: Job) -> Step:
    net = job.to(mlp(4, 8, 1))
    x = job.randn(16, 4)

    def loss() -> torch.Tensor:
        value = net(x).square().mean()
        grads = torch.autograd.grad(value, list(net.parameters()), create_graph=True)
        return value + 0.01 * sum(g.square().sum() for g in grads)

    return trained(job, net, loss)


@program
def implicit_layer(job: Job) -> Step:
    net = job.to(nn.Linear(8, 8))
    x = job.randn(4, 8)

    def loss() -> torch.Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(5):
                z = torch.tanh(0.5 * net(z) + x)
        z = torch.tanh(0.5 * net(z) + x)
        return z.square().mean()

    return trained(job, net, loss)


@program
def neural_ode(job: Job) -> Step:
    net = job.to(mlp(2, 16, 2))
    start, goal = job.randn(8, 2), job.randn(8, 2)

    def loss() -> torch.Tensor:
        y, h = start, 0.25
        for _ in range(4):
            a = net(y)
            b = net(y + h / 2 * a)
            c = net(y + h / 2 * b)
            y = y + h / 6 * (a + 2 * b + 2 * c + net(y + h * c))
        return F.mse_loss(y, goal)

    return trained(job, net, loss)


@program
def func_transforms(job: Job) -> Step:
    net = job.to(mlp(4, 8, 1))
    x = job.randn(8, 4)

    def step() -> None:
        params = {k: v.detach() for k, v in net.named_parameters()}

        def one(p: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(net, p, (row[None],)).square().sum()

        each = torch.func.vmap(torch.func.grad(one), (None, 0))(params, x)
        jacobian = torch.func.jacrev(lambda row: one(params, row))(x[0])
        with torch.no_grad():
            for name, p in net.named_parameters():
                p -= 0.01 * each[name].mean(0)
            x.add_(jacobian * 0)

    return step


@program
def custom_function(job: Job) -> Step:
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.sign()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad.clamp(-1, 1)

    net = job.to(mlp(8, 16, 4))
    x = job.randn(16, 8)
    return trained(job, net, lambda: (Straight.apply(net[0](x)) @ net[2].weight.T.to(net[0](x).dtype)).square().mean())


@program
def hooks_and_clipping(job: Job) -> Step:
    net = job.to(mlp(8, 16, 4))
    net[0].weight.register_hook(lambda g: g * 0.5)
    net[0].register_full_backward_hook(lambda m, a, b: None)
    x = job.randn(16, 8)
    return trained(job, net, lambda: net(x).square().mean(), clip=0.1)


# -- graphs, sets, geometry ----------------------------------------------------------------------------


@program
def graph_convolution(job: Job) -> Step:
    net = job.to(nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 3)]))
    x, y = job.randn(20, 8), job.ints(3, 20)
    a, b = job.ints(20, 2, 80)

    def spread(h: torch.Tensor) -> torch.Tensor:
        count = torch.bincount(b, minlength=20).clamp(min=1).to(h.dtype)
        return torch.zeros_like(h).index_add(0, b, h[a]) / count[:, None]

    return trained(job, net, lambda: F.cross_entropy(net[1](spread(F.relu(net[0](spread(x))))), y))


@program
def graph_attention(job: Job) -> Step:
    lift, score = nn.Linear(8, 16), nn.Linear(32, 1)
    net = job.to(nn.ModuleList([lift, score]))
    x, (a, b) = job.randn(20, 8), job.ints(20, 2, 80)

    def loss() -> torch.Tensor:
        h = lift(x)
        e = F.leaky_relu(score(torch.cat([h[a], h[b]], 1)), 0.2).float().squeeze(1)
        top = torch.full((20,), -1e9, device=x.device).scatter_reduce(0, b, e, "amax")
        e = torch.exp(e - top[b])
        e = e / torch.zeros(20, device=x.device).scatter_add(0, b, e)[b]
        out = torch.zeros(20, 16, device=x.device).index_add(0, b, h[a].float() * e[:, None])
        return out.square().mean()

    return trained(job, net, loss)


@program
def point_net(job: Job) -> Step:
    net = job.to(nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 1)))
    head = job.to(nn.Linear(32, 5))
    x, y = job.put(torch.randn(4, 3, 50)), job.ints(5, 4)
    return trained(job, nn.ModuleList([net, head]), lambda: F.cross_entropy(head(net(x).max(2)[0]), y))


@program
def chamfer(job: Job) -> Step:
    net = job.to(mlp(4, 32, 60, act=nn.ReLU))
    z, cloud = job.randn(2, 4), job.rand(2, 20, 3)

    def loss() -> torch.Tensor:
        far = torch.cdist(net(z).float().view(2, 20, 3), cloud)
        return far.min(1)[0].mean() + far.min(2)[0].mean()

    return trained(job, net, loss)


@program
def pairwise_distances(job: Job) -> Step:
    net = job.to(mlp(6, 16, 4))
    x = job.randn(24, 6)

    def loss() -> torch.Tensor:
        z = net(x).float()
        kernel = torch.exp(-torch.cdist(z, z).square() / 2)  # a point is at distance zero from itself
        return (kernel - torch.exp(-torch.cdist(x, x).square() / 2)).square().mean()

    return trained(job, net, loss)


# -- linear algebra, signals ---------------------------------------------------------------------------


@program
def gaussian_process(job: Job) -> Step:
    net = job.to(mlp(2, 8, 4))
    x, y = job.randn(16, 2), job.randn(16, 1)

    def loss() -> torch.Tensor:
        z = net(x).float()
        kernel = torch.exp(-0.5 * (z[:, None] - z[None]).square().sum(-1)) + 0.5 * torch.eye(16, device=z.device)
        lower = torch.linalg.cholesky(kernel)
        alpha = torch.cholesky_solve(y, lower)
        return 0.5 * (y * alpha).sum() + lower.diagonal().log().sum()

    return trained(job, net, loss)


@program
def least_squares(job: Job) -> Step:
    net = job.to(nn.Linear(6, 4))
    x, y = job.randn(20, 6), job.randn(20, 2)

    def loss() -> torch.Tensor:
        z = net(x).float()
        w = torch.linalg.solve((z.T @ z).float() + 0.5 * torch.eye(4, device=z.device), (z.T @ y).float())
        return F.mse_loss(z @ w, y)

    return trained(job, net, loss)


@program
def whitening(job: Job) -> Step:
    net = job.to(nn.Linear(8, 4))
    x = job.randn(40, 8) * torch.arange(1.0, 9.0).to(job.device)

    def loss() -> torch.Tensor:
        z = net(x).float()
        z = z - z.mean(0)
        values, vectors = torch.linalg.eigh(z.T @ z / 40 + 0.1 * torch.eye(4, device=z.device))
        return ((z @ (vectors * values.rsqrt())) @ vectors.T).pow(4).mean()

    return trained(job, net, loss)


@program
def fourier_operator(job: Job) -> Step:
    lift, down = nn.Linear(1, 8), nn.Linear(8, 1)
    net = nn.ModuleList([lift, down])
    net.register_parameter("weight", nn.Parameter(torch.randn(8, 8, 6, dtype=torch.cfloat) * 0.1))
    job.to(net)
    x, y = job.put(torch.randn(4, 32, 1)), job.put(torch.randn(4, 32, 1))

    def loss() -> torch.Tensor:
        h = lift(x).float().transpose(1, 2)
        modes = torch.fft.rfft(h)
        out = torch.zeros_like(modes)
        out[..., :6] = torch.einsum("bix,iox->box", modes[..., :6], net.weight)
        return F.mse_loss(down(F.gelu(torch.fft.irfft(out, n=32) + h).transpose(1, 2)), y)

    return trained(job, net, loss)


@program
def spectrogram(job: Job) -> Step:
    net = job.to(nn.Conv1d(1, 1, 9, padding=4))
    wave, goal = job.put(torch.randn(2, 1, 256)), job.put(torch.randn(2, 256))
    window = torch.hann_window(64).to(job.device)

    def size(signal: torch.Tensor) -> torch.Tensor:
        return torch.stft(signal.float(), 64, 16, window=window, return_complex=True).abs().clamp_min(1e-3).log()

    return trained(job, net, lambda: F.l1_loss(size(net(wave).squeeze(1)), size(goal)))


@program
def complex_network(job: Job) -> Step:
    weight = nn.Parameter(torch.randn(8, 8, dtype=torch.cfloat) * 0.3)
    net = nn.Module()
    net.register_parameter("weight", weight)
    job.to(net)
    x = job.put(torch.randn(6, 8, dtype=torch.cfloat))
    return trained(job, net, lambda: (x @ net.weight).abs().square().mean() + (x @ net.weight.mH).real.mean())


# -- learning by trial ---------------------------------------------------------------------------------


@program
def dqn(job: Job) -> Step:
    net, target = job.to(mlp(4, 32, 2, act=nn.ReLU)), job.to(mlp(4, 32, 2, act=nn.ReLU))
    state, action, reward, after = job.randn(32, 4), job.ints(2, 32), job.randn(32), job.randn(32, 4)

    def loss() -> torch.Tensor:
        with torch.no_grad():
            goal = reward + 0.99 * target(after).max(1).values
        return F.smooth_l1_loss(net(state).gather(1, action[:, None]).squeeze(1).float(), goal.float())

    return trained(job, net, loss, clip=10.0)


@program
def ppo(job: Job) -> Step:
    policy, value = mlp(4, 32, 3), mlp(4, 32, 1)
    net = job.to(nn.ModuleList([policy, value]))
    state, action, old, gain = job.randn(32, 4), job.ints(3, 32), -job.rand(32) - 0.5, job.randn(32)

    def loss() -> torch.Tensor:
        choice = torch.distributions.Categorical(logits=policy(state).float())
        ratio = torch.exp(choice.log_prob(action) - old)
        first = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        return first + 0.5 * F.mse_loss(value(state).squeeze(1).float(), gain) - 0.01 * choice.entropy().mean()

    return trained(job, net, loss, clip=0.5)


@program
def soft_actor_critic(job: Job) -> Step:
    policy, critic = mlp(4, 32, 4, act=nn.ReLU), mlp(6, 32, 1, act=nn.ReLU)
    net = job.to(nn.ModuleList([policy, critic]))
    state = job.randn(32, 4)

    def loss() -> torch.Tensor:
        mean, log = policy(state).float().chunk(2, -1)
        choice = torch.distributions.Normal(mean, log.clamp(-5, 2).exp())
        raw = choice.rsample()
        act = torch.tanh(raw)
        chance = (choice.log_prob(raw) - torch.log(1 - act.square() + 1e-6)).sum(-1)
        return (0.2 * chance - critic(torch.cat([state, act], 1)).squeeze(1)).mean()

    return trained(job, net, loss)


# -- training methods ----------------------------------------------------------------------------------


@program
def accumulation(job: Job) -> Step:
    net = job.to(mlp(8, 16, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        for _ in range(3):
            with job.autocast():
                loss = net(job.randn(8, 8)).square().mean() / 3
            loss.backward()
        optimizer.step()

    return step


@program
def averaged_weights(job: Job) -> Step:
    net = job.to(mlp(8, 16, 4))
    mean = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    x = job.randn(8, 8)
    inner = trained(job, net, lambda: net(x).square().mean())

    def step() -> None:
        inner()
        mean.update_parameters(net)

    return step


@program
def reentrant_checkpoint(job: Job) -> Step:
    net = job.to(nn.Sequential(mlp(8, 16, 8), nn.Dropout(0.1), mlp(8, 16, 8)))
    x = job.randn(8, 8)

    def loss() -> torch.Tensor:
        return checkpoint(net, x.clone().requires_grad_(), use_reentrant=True).square().mean()

    return trained(job, net, loss)


@program
def equal_rows(job: Job) -> Step:
    net = job.to(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)))
    x = torch.ones(64, 8, device=job.device)
    return trained(job, net, lambda: net(x).square().mean())


@program
def hypernetwork(job: Job) -> Step:
    make = job.to(nn.Linear(4, 8 * 8))
    z, x = job.randn(4, 4), job.randn(4, 5, 8)
    return trained(job, make, lambda: torch.baddbmm(x, x, make(z).view(4, 8, 8).to(x.dtype)).square().mean())


@program
def bilinear_forms(job: Job) -> Step:
    net = job.to(nn.Bilinear(6, 5, 4))
    a, b = job.randn(16, 6), job.randn(16, 5)
    return trained(
        job, net, lambda: net(a, b).square().mean() + F.cosine_embedding_loss(a, a, torch.ones(16, device=a.device))
    )


@program
def quantization_aware(job: Job) -> Step:
    net = job.to(nn.Linear(8, 8))
    x = job.randn(16, 8)

    def loss() -> torch.Tensor:
        weight = torch.fake_quantize_per_tensor_affine(net.weight, 0.02, 0, -128, 127)
        return F.linear(x, weight, net.bias).square().mean()

    return trained(job, net, loss)


@program
def losses(job: Job) -> Step:
    net = job.to(nn.Linear(8, 6))
    x, y, many = job.randn(12, 8), job.ints(6, 12), job.ints(2, 12, 6).float()

    def loss() -> torch.Tensor:
        out = net(x).float()
        return (
            F.multi_margin_loss(out, y)
            + F.multilabel_soft_margin_loss(out, many)
            + F.soft_margin_loss(out, many * 2 - 1)
            + F.poisson_nll_loss(out, many)
            + F.gaussian_nll_loss(out, many, torch.ones_like(out))
            + F.hinge_embedding_loss(out, many * 2 - 1)
            + F.margin_ranking_loss(out[:, 0], out[:, 1], torch.ones_like(out[:, 0]))
        )

    return trained(job, net, loss)


@program
def activations(job: Job) -> Step:
    net = job.to(nn.Linear(8, 16))
    x = job.randn(16, 8)
    kinds = [F.elu, F.selu, F.celu, F.mish, F.softsign, F.hardshrink, F.tanhshrink, F.logsigmoid, F.relu6, F.glu]
    return trained(job, net, lambda: sum(f(net(x)).float().square().mean() for f in kinds))


@program
def logistic_lbfgs(job: Job) -> Step:
    net = job.to(nn.Linear(6, 1))
    x, y = job.randn(40, 6), job.ints(2, 40).float()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(net(x).squeeze(1), y)
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)  # type: ignore[return-value]


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {"foreach": True},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "Rprop": {},
    "ASGD": {},
    "Adafactor": {},
    "Muon": {},
}


def _with_optimizer(job: Job, name: str) -> Step:
    net = job.to(nn.Linear(16, 8, bias=False))
    optimizer = getattr(torch.optim, name)(net.parameters(), **OPTIMIZERS[name])
    x = job.randn(16, 16)

    def step() -> None:
        with job.autocast():
            loss = net(x).square().mean()
        job.update(loss, optimizer)

    return step


for _name in OPTIMIZERS:
    if hasattr(torch.optim, _name):
        PROGRAMS[f"optimizer_{_name}"] = functools.partial(_with_optimizer, name=_name)


@program
def kalman(job: Job) -> Step:
    net = nn.Module()
    net.register_parameter("move", nn.Parameter(torch.eye(2) + 0.1 * torch.randn(2, 2)))
    job.to(net)
    seen = job.randn(10, 2)

    def loss() -> torch.Tensor:
        mean, cover, total = seen[0], torch.eye(2, device=seen.device), seen.new_zeros(())
        one = torch.eye(2, device=seen.device)
        for y in seen[1:]:
            mean, cover = net.move @ mean, net.move @ cover @ net.move.T + 0.1 * one
            gain = cover @ torch.linalg.inv((cover + 0.5 * one).float())
            total = total + (y - mean).square().sum()
            mean, cover = mean + gain @ (y - mean), (one - gain) @ cover
        return total / math.sqrt(10)

    return trained(job, net, loss)
