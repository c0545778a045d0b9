"""Programs for updates that the others lack: low precision, skipped steps, averages, optimizers written by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from . import Job, Step, program, trained
from .methods import mlp


@program
def skipped_steps(job: Job) -> Step:
    net = job.to(mlp(6, 12, 4))
    x = job.randn(8, 6)
    o = torch.optim.AdamW(net.parameters())
    sc = torch.amp.GradScaler("cuda", init_scale=2.0**60)

    def step():
        with job.autocast():
            total = net(x).square().mean()
        o.zero_grad()
        sc.scale(total * (1e30 if job.low is None else 1)).backward()
        sc.unscale_(o)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        sc.step(o)
        sc.update()

    return step


@program
def double(job: Job) -> Step:
    net = job.to(
        nn.Sequential(nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6), nn.GELU(), nn.Flatten(), nn.Linear(48, 4)).double()
    )
    x = torch.randn(4, 3, 10).double().to(job.device)
    y = job.ints(4, 4)
    o = torch.optim.Adam(net.parameters())

    def step():
        total = F.cross_entropy(net(x), y)
        o.zero_grad()
        total.backward()
        o.step()

    return step


@program
def pure_low(job: Job) -> Step:
    dt = job.low or torch.bfloat16
    net = job.to(
        nn.Sequential(nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 20)).to(dt)
    )
    ids = job.ints(20, 4, 9)
    o = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=True)

    def step():
        total = F.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
        o.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        o.step()

    return step


@program
def pure_low_vision(job: Job) -> Step:
    dt = job.low or torch.bfloat16
    net = job.to(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, groups=4),
            nn.GroupNorm(2, 8),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 5),
        ).to(dt)
    )
    x = job.randn(4, 3, 12, 12).to(dt)
    y = job.ints(5, 4)
    o = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)

    def step():
        total = F.cross_entropy(net(x), y, label_smoothing=0.1)
        o.zero_grad()
        total.backward()
        o.step()

    return step


@program
def low_optimizers(job: Job) -> Step:
    dt = job.low or torch.bfloat16
    ps = [torch.nn.Parameter((torch.randn(12, 8) * 0.3).to(dt).to(job.device)) for _ in range(5)]
    x = job.randn(6, 12).to(dt)
    os = [
        torch.optim.NAdam([ps[0]]),
        torch.optim.RMSprop([ps[1]]),
        torch.optim.Adagrad([ps[2]]),
        torch.optim.Adafactor([ps[3]]),
        torch.optim.Adamax([ps[4]]),
    ]

    def step():
        total = sum((x @ p).square().mean() for p in ps)
        total.backward()
        for o in os:
            o.step()
            o.zero_grad()

    return step


@program
def ema_teacher(job: Job) -> Step:
    s, t = (
        job.to(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))),
        job.to(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))),
    )
    x = job.randn(16, 8)
    center = torch.zeros(6, device=job.device)

    def loss():
        with torch.no_grad():
            tt = t(x + 0.1 * torch.randn_like(x)).float()
            p = ((tt - center) / 0.04).softmax(-1)
            center.mul_(0.9).add_(tt.mean(0), alpha=0.1)
        return -(p * (s(x).float() / 0.1).log_softmax(-1)).sum(-1).mean()

    inner = trained(job, s, loss)

    def step():
        inner()
        with torch.no_grad():
            for a, b in zip(t.parameters(), s.parameters()):
                a.lerp_(b, 0.01)
            torch._foreach_lerp_(
                [q for q in t.buffers() if q.is_floating_point()],
                [q for q in s.buffers() if q.is_floating_point()],
                0.1,
            )

    return step


@program
def sam(job: Job) -> Step:
    net = job.to(mlp(8, 16, 4))
    x, y = job.randn(16, 8), job.ints(4, 16)
    o = torch.optim.SGD(net.parameters(), lr=0.1)

    def step():
        with job.autocast():
            total = F.cross_entropy(net(x), y)
        total.backward()
        ps = list(net.parameters())
        n = torch.nn.utils.get_total_norm([p.grad for p in ps])
        es = [p.grad * (0.05 / (n + 1e-12)) for p in ps]
        with torch.no_grad():
            torch._foreach_add_(ps, es)
        o.zero_grad()
        with job.autocast():
            total = F.cross_entropy(net(x), y)
        total.backward()
        with torch.no_grad():
            torch._foreach_sub_(ps, es)
        o.step()
        o.zero_grad()

    return step


@program
def swa_schedulers(job: Job) -> Step:
    net = job.to(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4)))
    o = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    sched = torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=50)
    x = job.randn(16, 8)
    m = torch.optim.swa_utils.AveragedModel(net)

    def step():
        with job.autocast():
            total = net(x).square().mean()
        o.zero_grad()
        total.backward()
        nn.utils.clip_grad_value_(net.parameters(), 0.1)
        o.step()
        sched.step()
        m.update_parameters(net)
        torch.optim.swa_utils.update_bn([x], m)

    return step


@program
def lr_tensor(job: Job) -> Step:
    net = job.to(nn.Linear(8, 4))
    o = torch.optim.AdamW(net.parameters(), lr=torch.tensor(1e-2), foreach=False, maximize=True, amsgrad=True)
    x = job.randn(16, 8)

    def step():
        with job.autocast():
            total = -net(x).square().mean()
        o.zero_grad()
        total.backward()
        o.step()

    return step


@program
def muon_own(job: Job) -> Step:
    net = job.to(mlp(12, 16, 12))
    x = job.randn(8, 12)
    buf = {p: torch.zeros_like(p) for p in net.parameters()}

    def step():
        with job.autocast():
            total = net(x).square().mean()
        total.backward()
        with torch.no_grad():
            for p in net.parameters():
                b = buf[p].mul_(0.95).add_(p.grad)
                if p.dim() == 2:
                    g = p.grad.add(b, alpha=0.95).bfloat16()
                    g /= g.norm() + 1e-7
                    if g.size(0) > g.size(1):
                        g = g.T
                    for _ in range(5):
                        A = g @ g.T
                        B = torch.addmm(A, A, A, beta=-4.775, alpha=2.0315)
                        g = torch.addmm(g, B, g, beta=3.4445)
                    if p.size(0) > p.size(1):
                        g = g.T
                    p.add_(g.to(p.dtype), alpha=-0.02)
                else:
                    p.sub_(b, alpha=0.02)
                p.grad = None

    return step


@program
def lion_sophia(job: Job) -> Step:
    net = job.to(mlp(12, 16, 12))
    x = job.randn(8, 12)
    m = {p: torch.zeros_like(p) for p in net.parameters()}
    h = {p: torch.ones_like(p) for p in net.parameters()}

    def step():
        with job.autocast():
            total = net(x).square().mean()
        total.backward()
        with torch.no_grad():
            for p in net.parameters():
                u = torch.lerp(p.grad, m[p], 0.9).sign_()
                p.mul_(1 - 1e-3).add_(u, alpha=-1e-3)
                m[p].lerp_(p.grad, 0.01)
                h[p].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                p.addcdiv_(m[p], h[p].clamp(min=1e-3), value=-1e-3)
                p.grad = None

    return step


@program
def shampoo(job: Job) -> Step:
    net = job.to(nn.Linear(6, 5, bias=False))
    x = job.randn(12, 6)
    L = torch.eye(5).to(job.device) * 0.1
    R = torch.eye(6).to(job.device) * 0.1

    def step():
        with job.autocast():
            total = net(x).square().mean()
        total.backward()
        with torch.no_grad():
            g = net.weight.grad
            L.addmm_(g, g.T)
            R.addmm_(g.T, g)

            def root(m):
                w, v = torch.linalg.eigh(m)
                return v @ torch.diag(w.clamp(min=1e-6).pow(-0.25)) @ v.T

            net.weight -= 0.1 * root(L) @ g @ root(R)
            net.weight.grad = None

    return step


@program
def galore(job: Job) -> Step:
    net = job.to(nn.Linear(16, 12, bias=False))
    x = job.randn(12, 16)
    o = torch.optim.Adam(net.parameters(), lr=1e-2)

    def step():
        with job.autocast():
            total = net(x).square().mean()
        total.backward()
        with torch.no_grad():
            g = net.weight.grad
            u, _, _ = torch.linalg.svd(g, full_matrices=False)
            net.weight.grad = u[:, :4] @ (u[:, :4].T @ g)
        o.step()
        o.zero_grad()

    return step


@program
def multi_optimizer_groups(job: Job) -> Step:
    net = job.to(nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.PReLU(), nn.Linear(12, 4)))
    x = job.randn(8, 6)
    o = torch.optim.AdamW(
        [
            {"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in net.parameters() if p.dim() <= 1], "weight_decay": 0.0, "lr": 1e-2},
        ],
        fused=True,
    )
    o2 = torch.optim.SGD(net[0].parameters(), lr=0.1, momentum=0.9, fused=True)
    o3 = torch.optim.Adagrad(net[3].parameters())  # PyTorch has no fused one for CUDA

    def step():
        with job.autocast():
            total = net(x).square().mean()
        for q in (o, o2, o3):
            q.zero_grad()
        total.backward()
        for q in (o, o2, o3):
            q.step()

    return step
