"""Programs for uses of autograd that the others lack: hooks, checkpoints, transforms, derivatives, quantisation."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from . import Job, Step, program, trained
from .methods import mlp


def _weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.3 * torch.randn(*shape))


@program
def module_hooks(job: Job) -> Step:
    net = job.to(mlp(6, 12, 4))
    seen = []
    net[0].register_forward_pre_hook(lambda m, a: (a[0] * 1.5,))
    net[0].register_forward_hook(lambda m, a, o: o + 1)
    net[2].register_full_backward_pre_hook(lambda m, g: (g[0] * 0.5,))
    net[2].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,) + gi[1:])
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm()))
    x = job.randn(8, 6).requires_grad_()

    def loss():
        y = net(x)
        y.register_hook(lambda g: g * 2)
        y.retain_grad()
        return y.square().mean()

    return trained(job, net, loss)


@program
def optimizer_in_backward(job: Job) -> Step:
    net = job.to(mlp(6, 12, 4))
    opts = {p: torch.optim.AdamW([p], foreach=False) for p in net.parameters()}

    def hook(p):
        opts[p].step()
        opts[p].zero_grad()

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(hook)
    x = job.randn(8, 6)

    def step():
        with job.autocast():
            total = net(x).square().mean()
        total.backward()

    return step


@program
def nested_checkpoint(job: Job) -> Step:
    a, b, c = (mlp(8, 16, 8) for _ in range(3))
    net = job.to(nn.ModuleList([a, b, c]))
    x = job.randn(6, 8)

    def inner(h):
        return checkpoint(b, h, use_reentrant=False) + h

    def outer(h):
        return c(inner(a(h)).relu())

    return trained(job, net, lambda: checkpoint(outer, x, use_reentrant=False).square().mean())


@program
def selective_checkpoint(job: Job) -> Step:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    net = job.to(mlp(8, 16, 8))
    x = job.randn(6, 8)

    def pol(ctx, op, *a, **k):
        return (
            CheckpointPolicy.MUST_SAVE
            if op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    cf = functools.partial(create_selective_checkpoint_contexts, pol)
    return trained(job, net, lambda: checkpoint(net, x, use_reentrant=False, context_fn=cf).square().mean())


@program
def custom_fn_saved(job: Job) -> Step:
    class Sw(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            s = torch.sigmoid(x)
            ctx.save_for_backward(x, s, w)
            return x * s @ w

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):
            x, s, w = ctx.saved_tensors
            gx = g @ w.T
            return gx * (s + x * s * (1 - s)), (x * s).T @ g

    class Amp(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * x.exp()

    net = nn.ParameterList([_weights(8, 8), _weights(8, 8)]).to(job.device)
    x = job.randn(5, 8)
    return trained(
        job,
        net,
        lambda: (
            Amp.apply(Sw.apply(x @ net[0].to(x.dtype), net[1]).tanh()).mean()
            if job.low is None
            else Amp.apply((x @ net[0]).tanh()).mean()
        ),
    )


@program
def func_jvp_hess(job: Job) -> Step:
    net = job.to(mlp(4, 8, 1))
    x = job.randn(6, 4)
    v = job.randn(6, 4)

    def step():
        p = {k: t.detach() for k, t in net.named_parameters()}

        def f(q: Any, z: Any) -> torch.Tensor:
            return torch.func.functional_call(net, q, (z,)).sum()

        _, t = torch.func.jvp(lambda z: f(p, z), (x,), (v,))
        H = torch.func.hessian(lambda z: f(p, z))(x[0])
        g = torch.func.grad(f)(p, x)
        _, pull = torch.func.vjp(lambda z: torch.func.functional_call(net, p, (z,)), x)
        (gx,) = pull(torch.ones(6, 1, device=x.device))
        J = torch.func.jacfwd(lambda z: torch.func.functional_call(net, p, (z,)))(x[0])
        with torch.no_grad():
            for k, q in net.named_parameters():
                q -= 0.01 * (g[k] + 0 * t + 0 * H.sum() + 0 * gx.sum() + 0 * J.sum())

    return step


@program
def ensemble_vmap(job: Job) -> Step:
    nets = [job.to(mlp(4, 8, 2)) for _ in range(3)]
    params, bufs = torch.func.stack_module_state(nets)
    params = {k: v.detach().requires_grad_() for k, v in params.items()}
    base = mlp(4, 8, 2).to("meta")
    x = job.randn(10, 4)
    o = torch.optim.SGD(list(params.values()), lr=0.1)

    def step():
        with job.autocast():
            total = (
                torch.func.vmap(
                    lambda p, b, z: torch.func.functional_call(base, (p, b), (z,)), (0, 0, None), randomness="different"
                )(params, bufs, x)
                .square()
                .mean()
            )
        job.update(total, o)

    return step


@program
def forward_ad(job: Job) -> Step:
    import torch.autograd.forward_ad as fw

    net = job.to(mlp(4, 8, 2))
    x, v = job.randn(6, 4), job.randn(6, 4)

    def step():
        with fw.dual_level():
            y = net(fw.make_dual(x, v))
            p, t = fw.unpack_dual(y)
        (p.square().mean() + t.square().mean()).backward()
        with torch.no_grad():
            for q in net.parameters():
                q -= 0.1 * q.grad
                q.grad = None

    return step


@program
def qat_module(job: Job) -> Step:
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver

    aq = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255).to(job.device)
    wq = FakeQuantize(
        MovingAveragePerChannelMinMaxObserver,
        quant_min=-128,
        quant_max=127,
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
    ).to(job.device)
    net = job.to(nn.Linear(8, 6))
    x = job.randn(10, 8)
    return trained(job, net, lambda: F.linear(aq(x), wq(net.weight), net.bias).square().mean())


@program
def learnable_quant(job: Job) -> Step:
    net = nn.ParameterList(
        [
            _weights(6, 8),
            nn.Parameter(torch.full((1,), 0.05)),
            nn.Parameter(torch.zeros(1)),
            nn.Parameter(torch.full((6,), 0.05)),
            nn.Parameter(torch.zeros(6)),
        ]
    ).to(job.device)
    x = job.randn(10, 8)

    def loss():
        w = torch._fake_quantize_learnable_per_tensor_affine(net[0], net[1], net[2], -128, 127, 0.1)
        u = torch._fake_quantize_learnable_per_channel_affine(net[0], net[3], net[4], 0, -128, 127, 0.1)
        return (x @ w.T).square().mean() + (x @ u.T).square().mean()

    return trained(job, net, loss)


@program
def retain_graph(job: Job) -> Step:
    net = job.to(mlp(6, 12, 4))
    x = job.randn(8, 6)
    o = torch.optim.SGD(net.parameters(), lr=0.1)

    def step():
        with job.autocast():
            y = net(x)
            a = y[:, :2].square().mean()
            b = y[:, 2:].abs().mean()
        o.zero_grad(set_to_none=False)
        a.backward(retain_graph=True)
        b.backward(retain_graph=True)
        (a + b).backward()
        o.step()

    return step


@program
def zoneout_alphadrop(job: Job) -> Step:
    net = job.to(
        nn.Sequential(
            nn.Linear(8, 16), nn.SELU(), nn.AlphaDropout(0.2), nn.Linear(16, 8), nn.FeatureAlphaDropout(0.1), nn.CELU()
        )
    )
    cv = job.to(nn.Sequential(nn.Conv2d(3, 6, 3), nn.Dropout2d(0.3)))
    x = job.randn(6, 8)
    im = job.randn(2, 3, 6, 6)
    return trained(job, nn.ModuleList([net, cv]), lambda: net(x).square().mean() + cv(im).square().mean())


@program
def stochastic_depth(job: Job) -> Step:
    net = job.to(mlp(8, 16, 8))
    x = job.randn(16, 8)

    def loss():
        h = x
        for _ in range(3):
            keep = torch.empty(16, 1, device=x.device).bernoulli_(0.8) / 0.8
            h = h + net(h) * keep
        return h.square().mean() + torch.rand_like(h).mean() * 0

    return trained(job, net, loss)


@program
def anomaly_grad_mode(job: Job) -> Step:
    net = job.to(mlp(6, 12, 4))
    x = job.randn(8, 6)

    def loss():
        with torch.inference_mode():
            a = net(x).float().softmax(-1)
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            y = net(x)
        with torch.set_grad_enabled(False):
            t = y.detach().mean(0)
        return (y - t).square().mean() + a.clone().sum().item() * 0

    return trained(job, net, loss)


@program
def saved_tensor_hooks(job: Job) -> Step:
    net = job.to(mlp(6, 12, 4))
    x = job.randn(8, 6)

    def loss():
        with torch.autograd.graph.save_on_cpu():
            y = net(x)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            z = y.tanh().exp()
        return z.mean()

    return trained(job, net, loss)


@program
def random_erasing(job: Job) -> Step:
    net = job.to(nn.Conv2d(3, 4, 3))
    x = job.rand(4, 3, 10, 10)

    def loss():
        z = x.clone()
        z[:, :, 2:5, 3:7] = torch.randn(4, 3, 3, 4, device=x.device)
        f = torch.rand(4, device=x.device) < 0.5
        z[f] = z[f].flip(-1)
        p = torch.randperm(4, device=x.device)
        lam = torch.distributions.Beta(0.4, 0.4).sample().to(x.device)
        z = lam * z + (1 - lam) * z[p]
        z = (z * 255).to(torch.uint8).float() / 255
        z = z + torch.normal(0.0, 0.1, z.shape, device=z.device)
        return net(z).square().mean()

    return trained(job, net, loss)


@program
def int8_dequant(job: Job) -> Step:
    w8 = torch.randint(-127, 127, (8, 6), dtype=torch.int8).to(job.device)
    sc = job.rand(8, 1) * 0.01
    lora = job.to(nn.Sequential(nn.Linear(6, 2, bias=False), nn.Linear(2, 8, bias=False)))
    x = job.randn(5, 6)
    return trained(job, lora, lambda: (F.linear(x, (w8.float() * sc).to(x.dtype)) + lora(x)).square().mean())


@program
def embeddings_losses(job: Job) -> Step:
    net = job.to(mlp(8, 16, 8))
    a, b, c = job.randn(12, 8), job.randn(12, 8), job.randn(12, 8)
    y = job.ints(2, 12).float() * 2 - 1

    def loss():
        u, v, w = net(a).float(), net(b).float(), net(c).float()
        return (
            F.triplet_margin_with_distance_loss(
                u, v, w, distance_function=lambda p, q: 1 - F.cosine_similarity(p, q), margin=0.5
            )
            + F.cosine_embedding_loss(u, v, y, margin=0.1)
            + F.pairwise_distance(u, v, p=3).mean()
            + F.pdist(u).mean()
            + F.kl_div(u.log_softmax(-1), v.softmax(-1), reduction="batchmean")
            + F.huber_loss(u, v, delta=0.3)
            + F.multilabel_margin_loss(u, torch.zeros(12, 8, dtype=torch.long, device=u.device))
        )

    return trained(job, net, loss)


@program
def focal_iou(job: Job) -> Step:
    net = job.to(nn.Linear(6, 4))
    cl = job.to(nn.Linear(6, 3))
    x = job.randn(10, 6)
    t = job.rand(10, 4)
    y = job.ints(3, 10)

    def loss():
        b = net(x).float()
        lt = torch.maximum(b[:, :2], t[:, :2])
        rb = torch.minimum(b[:, 2:], t[:, 2:])
        wh = (rb - lt).clamp(min=0)
        i = wh.prod(1)
        u = ((b[:, 2:] - b[:, :2]).prod(1).abs() + (t[:, 2:] - t[:, :2]).prod(1).abs() - i).clamp(min=1e-6)
        ce = F.cross_entropy(cl(x), y, reduction="none", weight=torch.tensor([1.0, 2, 0.5], device=x.device))
        return (
            ((1 - torch.exp(-ce)) ** 2 * ce).mean()
            + (1 - i / u).mean()
            + F.nll_loss(cl(x).float().log_softmax(1), y, ignore_index=1)
        )

    return trained(job, net, loss)


@program
def infonce_tau(job: Job) -> Step:
    a, b = mlp(8, 16, 8), mlp(8, 16, 8)
    net = nn.ModuleList([a, b])
    net.register_parameter("t", nn.Parameter(torch.tensor(2.6)))
    job.to(net)
    x, y = job.randn(10, 8), job.randn(10, 8)

    def loss():
        u, v = F.normalize(a(x), dim=-1), F.normalize(b(y), dim=-1)
        total = net.t.exp() * (u @ v.T).float()
        k = torch.arange(10, device=x.device)
        return (
            F.cross_entropy(total, k)
            + F.cross_entropy(total.T, k)
            + F.binary_cross_entropy_with_logits(
                total, torch.eye(10, device=x.device), pos_weight=torch.full((10,), 3.0, device=x.device)
            )
        )

    return trained(job, net, loss)
