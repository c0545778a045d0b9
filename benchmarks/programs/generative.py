"""Generative programs: autoencoders, adversarial networks, diffusion, flows."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from . import Job, Step, program, trained
from .vision import digits


@program
def vae(job: Job) -> Step:
    up, mean, spread, down = nn.Linear(784, 64), nn.Linear(64, 8), nn.Linear(64, 8), nn.Linear(8, 784)
    net = job.to(nn.ModuleList([up, mean, spread, down]))
    x = digits(job, 16).flatten(1)
    goal = (x > 0).float()

    def loss() -> torch.Tensor:
        h = F.relu(up(x))
        mu, log = mean(h), spread(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * log)
        fit = F.binary_cross_entropy_with_logits(down(z), goal, reduction="sum")
        return (fit - 0.5 * torch.sum(1 + log - mu.pow(2) - log.exp())) / 16

    return trained(job, net, loss)


@program
def vq_vae(job: Job) -> Step:
    net = job.to(nn.ModuleList([nn.Conv2d(1, 8, 4, 4), nn.ConvTranspose2d(8, 1, 4, 4), nn.Embedding(16, 8)]))
    x = digits(job, 4)

    def loss() -> torch.Tensor:
        z = net[0](x).float()
        flat = z.permute(0, 2, 3, 1).reshape(-1, 8)
        book = net[2].weight
        nearest = (flat.square().sum(1, keepdim=True) - 2 * flat @ book.T + book.square().sum(1)).argmin(1)
        chosen = net[2](nearest).view(4, 7, 7, 8).permute(0, 3, 1, 2)
        through = z + (chosen - z).detach()
        return F.mse_loss(net[1](through), x) + F.mse_loss(chosen, z.detach()) + 0.25 * F.mse_loss(z, chosen.detach())

    return trained(job, net, loss)


def adversaries(job: Job, norm: bool = True) -> tuple[nn.Module, nn.Module]:
    middle = [nn.BatchNorm2d(16)] if norm else []
    make = nn.Sequential(
        nn.ConvTranspose2d(8, 16, 7), *middle, nn.ReLU(True), nn.ConvTranspose2d(16, 1, 4, 4), nn.Tanh()
    )
    judge = nn.Sequential(nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(16, 1, 14), nn.Flatten(0))
    return job.to(make), job.to(judge)


@program
def dcgan(job: Job) -> Step:
    make, judge = adversaries(job)
    first, second = (torch.optim.Adam(n.parameters(), lr=2e-4, betas=(0.5, 0.999)) for n in (judge, make))
    real, ones, zeros = digits(job, 8), torch.ones(8, device=job.device), torch.zeros(8, device=job.device)

    def step() -> None:
        with job.autocast():  # the critic runs on both in one region
            fake = make(job.randn(8, 8, 1, 1))
            loss = F.binary_cross_entropy_with_logits(judge(real), ones)
            loss = loss + F.binary_cross_entropy_with_logits(judge(fake.detach()), zeros)
        job.update(loss, first)
        with job.autocast():
            loss = F.binary_cross_entropy_with_logits(judge(fake), ones)
        job.update(loss, second)

    return step


@program
def wgan(job: Job) -> Step:
    make, judge = adversaries(job, norm=False)
    optimizer = torch.optim.RMSprop(judge.parameters(), lr=5e-5)
    real = digits(job, 8)

    def step() -> None:
        with job.autocast():
            loss = judge(make(job.randn(8, 8, 1, 1)).detach()).mean() - judge(real).mean()
        job.update(loss, optimizer)
        with torch.no_grad():
            for p in judge.parameters():
                p.clamp_(-0.01, 0.01)

    return step


@program
def gradient_penalty(job: Job) -> Step:
    make, judge = adversaries(job, norm=False)
    real = digits(job, 8)

    def loss() -> torch.Tensor:
        fake = make(job.randn(8, 8, 1, 1)).detach()
        share = torch.rand(8, 1, 1, 1, device=real.device)
        mixed = (share * real + (1 - share) * fake).requires_grad_()
        (grad,) = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)
        penalty = (grad.flatten(1).norm(2, dim=1) - 1).square().mean()
        return judge(fake).mean() - judge(real).mean() + 10 * penalty

    return trained(job, judge, loss, lr=1e-4)


@program
def r1_penalty(job: Job) -> Step:
    _, judge = adversaries(job, norm=False)
    real = digits(job, 8)

    def loss() -> torch.Tensor:
        x = real.detach().requires_grad_()
        score = judge(x)
        (grad,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return F.softplus(-score).mean() + 5 * grad.square().sum((1, 2, 3)).mean()

    return trained(job, judge, loss)


@program
def spectral_gan(job: Job) -> Step:
    judge = job.to(
        nn.Sequential(spectral_norm(nn.Conv2d(1, 8, 4, 4)), nn.ReLU(), nn.Flatten(), spectral_norm(nn.Linear(392, 1)))
    )
    real, fake = digits(job, 8), job.randn(8, 1, 28, 28)
    return trained(job, judge, lambda: F.relu(1 - judge(real)).mean() + F.relu(1 + judge(fake)).mean())


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))
        self.a, self.b = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 1, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        angle = t[:, None].float() * torch.exp(torch.arange(8, device=x.device) * (-math.log(1e4) / 8))
        when = self.time(torch.cat([angle.sin(), angle.cos()], -1))
        return self.b(F.silu(self.norm(self.a(x)) + when[:, :, None, None]))


@program
def diffusion(job: Job) -> Step:
    net = job.to(Denoiser())
    x = digits(job, 4)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0).to(job.device)

    def loss() -> torch.Tensor:
        t, noise = torch.randint(0, 100, (4,), device=x.device), torch.randn_like(x)
        share = kept[t][:, None, None, None]
        return F.mse_loss(net(share.sqrt() * x + (1 - share).sqrt() * noise, t), noise)

    return trained(job, net, loss)


@program
def flow_matching(job: Job) -> Step:
    net = job.to(Denoiser())
    x = digits(job, 4)

    def loss() -> torch.Tensor:
        noise, t = torch.randn_like(x), torch.rand(4, device=x.device)
        mixed = torch.lerp(noise, x, t[:, None, None, None])
        return (net(mixed, t * 1000) - (x - noise)).square().mean()

    return trained(job, net, loss)


@program
def coupling_flow(job: Job) -> Step:
    nets = job.to(nn.ModuleList(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2)))
    mix = nn.Parameter(torch.linalg.qr(torch.randn(8, 8))[0].to(job.device))
    both = nn.ModuleList([nets])
    both.register_parameter("mix", mix)
    x = job.randn(32, 8)

    def loss() -> torch.Tensor:
        z, log = x, x.new_zeros(32)
        for net in nets:
            a, b = (z @ both.mix).float().chunk(2, 1)
            scale, shift = net(a).float().chunk(2, 1)
            z, log = torch.cat([b * torch.exp(torch.tanh(scale)) + shift, a], 1), log + torch.tanh(scale).sum(1)
            log = log + torch.linalg.slogdet(both.mix.float())[1]
        return (0.5 * z.square().sum(1) - log).mean()

    return trained(job, both, loss)


@program
def pixel_cnn(job: Job) -> Step:
    a = job.to(nn.Conv2d(1, 8, 5, padding=2))
    b = job.to(nn.Conv2d(8, 2, 1))
    mask = torch.ones(5, 5)
    mask[2, 2:], mask[3:] = 0, 0
    mask = mask.to(job.device)
    x = digits(job, 4)
    y = (x[:, 0] > 0).long()

    def loss() -> torch.Tensor:
        return F.cross_entropy(b(F.relu(F.conv2d(x, a.weight * mask, a.bias, padding=2))), y)

    return trained(job, nn.ModuleList([a, b]), loss)


@program
def langevin(job: Job) -> Step:
    energy = job.to(nn.Sequential(nn.Linear(2, 32), nn.Softplus(), nn.Linear(32, 1)))
    data = job.randn(64, 2) * 0.5 + 1

    def loss() -> torch.Tensor:
        x = torch.randn(64, 2, device=data.device)
        for _ in range(3):
            x.requires_grad_()
            (grad,) = torch.autograd.grad(energy(x).sum(), x)
            x = (x - 0.1 * grad + 0.05 * torch.randn_like(x)).detach()
        return energy(data).mean() - energy(x).mean()

    return trained(job, energy, loss)


@program
def nerf(job: Job) -> Step:
    net = job.to(nn.Sequential(nn.Linear(18, 32), nn.ReLU(), nn.Linear(32, 4)))
    origin, goal = job.rand(16, 3), job.rand(16, 3)

    def loss() -> torch.Tensor:
        points = origin[:, None] + torch.linspace(0, 1, 8, device=origin.device)[None, :, None]
        high = torch.cat([f(points * 2**i * math.pi) for i in range(3) for f in (torch.sin, torch.cos)], -1)
        out = net(high).float()
        alpha = 1 - torch.exp(-F.relu(out[..., 3]) / 8)
        kept = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
        return F.mse_loss(((alpha * kept)[..., None] * out[..., :3].sigmoid()).sum(1), goal)

    return trained(job, net, loss)


@program
def wave_net(job: Job) -> Step:
    layers = nn.ModuleList(weight_norm(nn.Conv1d(8, 16, 2, dilation=2**i)) for i in range(3))
    net = job.to(nn.ModuleList([layers, nn.Conv1d(1, 8, 1), nn.Conv1d(8, 16, 1)]))
    wave, goal = job.put(torch.randn(2, 1, 40)), job.ints(16, 2, 40)

    def loss() -> torch.Tensor:
        h = net[1](wave)
        for i, layer in enumerate(layers):
            a, b = layer(F.pad(h, (2**i, 0))).chunk(2, 1)
            h = h + torch.tanh(a) * torch.sigmoid(b)
        return F.cross_entropy(net[2](F.relu(h)), goal)

    return trained(job, net, loss)
