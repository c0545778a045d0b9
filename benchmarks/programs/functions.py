"""Programs for functions that the others lack: linear algebra, complex numbers, indices, reductions, shapes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from . import Job, Step, program, trained
from .methods import mlp


def _weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.3 * torch.randn(*shape))


@program
def istft(job: Job) -> Step:
    net = job.to(nn.Conv1d(1, 1, 5, padding=2))
    w = job.put(torch.randn(2, 1, 400))
    win = torch.hann_window(64).to(job.device)

    def loss():
        y = net(w).float().squeeze(1)
        S = torch.stft(y, 64, 16, window=win, return_complex=True)
        m = torch.sigmoid(S.abs())
        z = torch.istft(S * m, 64, 16, window=win, length=400)
        return (z - w.squeeze(1)).square().mean() + S.angle().cos().mean()

    return trained(job, net, loss)


@program
def einsum_chain(job: Job) -> Step:
    net = nn.ParameterList([_weights(4, 5, 6), _weights(6, 7), _weights(7, 8), _weights(8, 4)]).to(job.device)
    x = job.randn(3, 4)

    def loss():
        a, b, c, d = net
        y = torch.einsum("bi,ijk,kl->bjl", x, a, b)
        z = torch.einsum("bjl,lm,mi->bji", y, c, d)
        t = torch.einsum("bji,bki->bjk", z, z)
        return torch.einsum("bii->b", t).mean() + torch.tensordot(z, x, dims=([2], [1])).square().mean()

    return trained(job, net, loss)


@program
def qr_svd(job: Job) -> Step:
    net = job.to(nn.Linear(6, 4))
    x = job.randn(20, 6)

    def loss():
        z = net(x).float()
        q, r = torch.linalg.qr(z)
        _, s, _ = torch.linalg.svd(z, full_matrices=False)
        return (
            r.diagonal().abs().log().sum()
            + s.log().sum()
            + torch.linalg.svdvals(z).sum()
            + torch.linalg.matrix_norm(z, "nuc")
            + (q @ q.T).square().mean()
        )

    return trained(job, net, loss)


@program
def linalg_more(job: Job) -> Step:
    net = job.to(nn.Linear(5, 5))
    x = job.randn(5, 5)
    e = torch.eye(5).to(job.device)

    def loss():
        z = net(x).float()
        with torch.autocast(
            "cuda", enabled=False
        ):  # pinv and others multiply what autocast has rounded by what it has not
            return of_matrix(z)

    def of_matrix(z):
        s = z @ z.T + e
        L = torch.linalg.cholesky(s)
        t = torch.linalg.solve_triangular(L, z, upper=False)
        _, ld = torch.linalg.slogdet(s)
        inv = torch.linalg.inv(s)
        p = torch.linalg.matrix_exp(0.1 * z)
        lu = torch.linalg.lu(s)
        pin = torch.linalg.pinv(z + 3 * e)
        return (
            t.square().mean()
            + ld
            + inv.trace()
            + p.mean()
            + lu[2].diagonal().log().sum()
            + pin.square().mean()
            + torch.linalg.det(s).log()
            + torch.linalg.eigvalsh(s).log().sum()
            + torch.linalg.matrix_power(0.1 * s, 3).mean()
            + torch.linalg.multi_dot([z, s, z]).mean()
            + torch.linalg.cond(s) * 1e-3
        )

    return trained(job, net, loss)


@program
def complex_conv(job: Job) -> Step:
    class N(nn.Module):
        def __init__(s):
            super().__init__()
            s.c = nn.Conv1d(2, 4, 3, padding=1, dtype=torch.cfloat)
            s.total = nn.Linear(4, 3, dtype=torch.cfloat)

        def forward(s, x):
            h = s.c(x)
            h = torch.complex(F.relu(h.real), F.relu(h.imag))
            y = s.total(h.mean(-1))
            return (
                (y * y.conj()).real.sum()
                + torch.view_as_real(y).square().mean()
                + torch.polar(y.abs(), y.angle()).imag.mean()
            )

    net = job.to(N())
    x = job.put(torch.randn(3, 2, 10, dtype=torch.cfloat))
    return trained(job, net, lambda: net(x))


@program
def unique_segments(job: Job) -> Step:
    net = job.to(nn.Linear(6, 4))
    x = job.randn(24, 6)
    g = job.ints(5, 24)

    def loss():
        u, inv, cnt = torch.unique(g, return_inverse=True, return_counts=True)
        h = net(x).float()
        s = torch.zeros(len(u), 4, device=x.device).index_add_(0, inv, h) / cnt[:, None]
        lens = cnt
        o = torch.argsort(inv, stable=True)
        r = torch.segment_reduce(h[o], "mean", lengths=lens, axis=0)
        m = torch.segment_reduce(h[o], "max", lengths=lens, axis=0)
        c = torch.unique_consecutive(g[o]).float().sum() * 0
        return s.square().mean() + (r - s).square().sum() + m.mean() + c

    return trained(job, net, loss)


@program
def masked_scatter(job: Job) -> Step:
    net = job.to(nn.Linear(6, 8))
    x = job.randn(5, 6)
    m = job.put(torch.rand(5, 8) > 0.5)

    def loss():
        y = net(x)
        src = torch.arange(40.0, device=x.device).to(y.dtype)
        z = y.masked_scatter(m, src * y.mean())
        w = torch.masked_select(y, m).square().mean()
        return z.square().mean() * 1e-3 + w + torch.where(m, y, -y).mean() + y.masked_fill(~m, -1e4).logsumexp(1).mean()

    return trained(job, net, loss)


@program
def index_put(job: Job) -> Step:
    net = job.to(nn.Linear(6, 8))
    x = job.randn(30, 6)
    i, j = job.ints(4, 30), job.ints(5, 30)

    def loss():
        y = net(x).float()
        t = torch.zeros(4, 5, 8, device=x.device).index_put((i, j), y, accumulate=True)
        t2 = torch.zeros(4, 8, device=x.device).scatter_reduce(
            0, i[:, None].expand(-1, 8), y, "mean", include_self=False
        )
        t3 = torch.zeros(4, 8, device=x.device).index_reduce(0, i, y, "amax", include_self=False)
        t4 = t.clone()
        t4[1:3, ::2] += y[:2, None].mean()
        t5 = torch.zeros(4, 8, device=x.device).scatter_reduce(
            0, i[:, None].expand(-1, 8), y.abs() + 0.5, "prod", include_self=True
        )
        return (
            t.square().mean()
            + t2.square().mean()
            + t3.mean()
            + t4.mean()
            + torch.take_along_dim(y, y.argsort(1), 1).cumsum(1).mean()
            + t5.sum()
            + torch.take(y, i).mean()
        )

    return trained(job, net, loss)


@program
def bucketize(job: Job) -> Step:
    net = job.to(nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 1)))
    x = job.randn(40)
    b = job.put(torch.linspace(-2, 2, 7))
    y = job.randn(40)

    def loss():
        i = torch.bucketize(x, b)
        k = torch.searchsorted(b, x, right=True)
        h = torch.histc(x, 7, -2, 2).sum() * 0
        q = torch.quantile(x, torch.tensor([0.25, 0.5, 0.75], device=x.device)).sum() * 0
        w = torch.bincount(i, minlength=8).float()
        return (net(i).squeeze(1).float() - y).square().mul(1 / w[i]).mean() + net(k).mean() + h + q

    return trained(job, net, loss)


@program
def cumulative(job: Job) -> Step:
    net = job.to(nn.Linear(6, 8))
    x = job.randn(5, 6)

    def loss():
        y = net(x).float()
        return (
            y.cumsum(1).square().mean()
            + (1 + 0.1 * y.tanh()).cumprod(1).mean()
            + y.cummax(1)[0].mean()
            + y.cummin(1)[0].mean()
            + torch.logcumsumexp(y, 1).mean()
            + y.diff(dim=1).square().mean()
            + torch.trapezoid(y, dim=1).mean()
            + torch.cumulative_trapezoid(y, dim=0).mean()
            + y.flip(1).cumsum(1).roll(2, 1).mean()
        )

    return trained(job, net, loss)


@program
def special(job: Job) -> Step:
    net = job.to(nn.Linear(6, 8))
    x = job.randn(6, 6)

    def loss():
        y = net(x).float()
        p = y.sigmoid() * 0.9 + 0.05
        q = F.softplus(y) + 0.3
        s = torch.special
        return sum(
            t.mean()
            for t in (
                s.erf(y),
                s.erfinv(2 * p - 1),
                s.expit(y),
                s.logit(p),
                s.gammaln(q),
                s.digamma(q),
                s.i0e(y),
                s.i1(y),
                s.entr(p),
                s.ndtri(p),
                s.log_ndtr(y),
                s.xlog1py(p, q),
                s.sinc(y),
                torch.atan2(y, q),
                torch.hypot(y, q),
                torch.logaddexp(y, q),
                torch.acosh(q + 1),
                torch.asinh(y),
                torch.atanh(p * 0.9),
                torch.expm1(y),
                torch.log1p(q),
                torch.rsqrt(q),
                torch.frac(y),
                torch.lerp(y, q, p),
                torch.polygamma(1, q),
                torch.igamma(q.detach(), q),
                torch.nan_to_num(y),
                torch.copysign(q, y),
                torch.heaviside(y.detach(), q.detach()),
                torch.ldexp(y, torch.tensor([2], device=y.device)),
                torch.erfc(y),
                s.zeta(q.detach() + 1.5, q.detach()).detach(),
                s.bessel_j0(y.detach()),
                s.multigammaln(q + 2, 2),
            )
        )

    return trained(job, net, loss)


@program
def reductions(job: Job) -> Step:
    net = job.to(nn.Linear(6, 8))
    x = job.randn(6, 6)

    def loss():
        y = net(x).float()
        return (
            y.std(1).mean()
            + torch.var_mean(y, 0, correction=0)[0].mean()
            + y.median(1)[0].mean()
            + y.kthvalue(3, 1)[0].mean()
            + y.mode(1)[0].mean()
            + torch.aminmax(y.detach(), dim=1)[1].mean()  # PyTorch 2.11 has no derivative
            + y.amax((0, 1))
            + y.norm(p=1)
            + y.norm(dim=1, p=float("inf")).mean()
            + torch.nanmean(y)
            + torch.nansum(y) * 0.01
            + y.logsumexp((0, 1))
            + torch.cov(y).trace()
            + torch.corrcoef(y).mean()
            + y.topk(3)[0].mean()
            + y.nanmedian()
            + torch.std_mean(y)[0]
            + y.prod(1).mean()
            + torch.count_nonzero(y) * 0
            + torch.renorm(y, 2, 0, 1.0).mean()
            + torch.quantile(y, 0.3, dim=1).mean()
        )

    return trained(job, net, loss)


@program
def shapes(job: Job) -> Step:
    net = job.to(nn.Linear(6, 8))
    x = job.randn(6, 6)

    def loss():
        y = net(x)
        a = torch.cat([y, y.flip(0)], 1)
        b = torch.stack(y.unbind(1), 0)
        c = y.repeat(2, 1).repeat_interleave(2, 0)
        d = torch.tril(y) + torch.triu(y, 1)
        e = torch.kron(y[:2, :2], y[:2, :2])
        f = torch.block_diag(y, y)
        g = torch.cartesian_prod(y[0], y[1])
        h = torch.combinations(y[0], 2)
        i = y.unflatten(1, (2, 4)).movedim(1, 0).rot90()
        j = torch.nn.functional.pad(y, (1, 2), value=0.5)
        k = torch.meshgrid(y[0], y[1], indexing="ij")[0]
        total = y.as_strided((3, 3), (2, 1))
        m = y[:1]
        n = y.expand(2, 6, 8).permute(2, 0, 1).contiguous()
        o = torch.tile(y, (1, 2))
        p = torch.column_stack([y[:, 0], y[:, 1]])
        q = torch.outer(y[0], y[1])
        r = torch.cross(y[:, :3].float(), y[:, 3:6].float(), dim=1)
        s = torch.addr(d[:2, :2].float(), y[0, :2].float(), y[1, :2].float())
        t = torch.broadcast_to(y[0], (3, 8))
        u = torch.diag(y[0])
        w = torch.index_select(y, 1, torch.tensor([1, 1, 2], device=y.device))
        z = torch.select_scatter(y, y[0, :6] * 2, 1, 2)
        z2 = torch.slice_scatter(y, y[:2], 0, 1, 3)
        z3 = torch.diagonal_scatter(y, y[0, :6])
        return sum(
            t.float().square().mean()
            for t in (a, b, c, d, e, f, g, h, i, j, k, total, m, n, o, p, q, r, s, t, u, w, z, z2, z3)
        )

    return trained(job, net, loss)


@program
def products(job: Job) -> Step:
    net = nn.ParameterList([_weights(6, 8), _weights(4, 6, 8), _weights(8)]).to(job.device)
    x = job.randn(6, 6)
    b = job.randn(4, 6, 6)

    def loss():
        m, t, v = net
        return sum(
            z.float().square().mean()
            for z in (
                torch.addmv(v[:6], m, v) if job.low is None else m @ v,
                torch.mv(m, v),
                torch.dot(v.float(), v.float()),
                torch.bmm(b, t),
                torch.addbmm(m.float(), b.float(), t.float()),
                torch.baddbmm(t.float(), b.float(), t.float(), beta=0.5, alpha=2),
                x @ m @ m.T,
                torch.inner(m, m),
                torch.matmul(b, m),
                torch.vdot(v.float(), v.float()),
                torch.addcmul(m, m, m, value=0.5),
                torch.addcdiv(m, m, m.square() + 1),
                torch.matmul(t, v),
                F.linear(b, m.T),
                torch.linalg.vecdot(m.float(), m.float()),
            )
        )

    return trained(job, net, loss)


@program
def scalars_ints(job: Job) -> Step:
    net = job.to(nn.Linear(6, 4))
    x = job.randn(8, 6)

    def loss():
        n = torch.arange(8, device=x.device)
        m = (n % 3 == 0).float()
        b = (n << 1) ^ 3
        c = torch.div(n, 3, rounding_mode="floor") + torch.fmod(n, 3) + n.remainder(-3)
        o = F.one_hot(n % 4, 4).float()
        g = torch.gcd(n, n + 6).float()
        s = net(x).float()
        return (
            (s * o).sum()
            + (s.sum(1) * m).mean()
            + b.float().mean() * 0
            + c.float().mean() * 0
            + g.mean() * 0
            + (s.argmax(1) == n % 4).float().mean() * 0
            + torch.isin(n, n[:3]).float().mean() * 0
            + torch.clamp(n, 2, 5).float().mean() * 0
        )

    return trained(job, net, loss)


@program
def ragged_zero(job: Job) -> Step:
    net = job.to(nn.Sequential(nn.Linear(6, 4), nn.ReLU()))
    x = job.randn(0, 6)
    y = job.randn(5, 6)

    def loss():
        return net(x).sum() + net(y[:1]).mean() + net(y[y[:, 0] > 99]).sum() + net(y).mean()

    return trained(job, net, loss)


@program
def out_variants(job: Job) -> Step:
    net = job.to(mlp(6, 12, 4))
    x = job.randn(8, 6)
    buf = torch.empty(8, 4, device=job.device)
    b2 = torch.zeros(16, 8, device=job.device)
    inner = trained(job, net, lambda: net(x).square().mean())

    def step():
        inner()
        with torch.no_grad():
            torch.mul(buf.fill_(2.0), 3.0, out=buf)
            torch.mm(x, x.T, out=b2[::2])
            torch.cat([x, x], 0, out=torch.empty(0, device=x.device))
            torch.sum(x, 1, out=b2[:, 0][:8])
            torch.topk(
                x, 2, out=(torch.empty(8, 2, device=x.device), torch.empty(8, 2, dtype=torch.long, device=x.device))
            )
            torch.add(x, x, out=b2[8:, 2:])
            torch.where(x > 0, x, -x, out=torch.empty_like(x))

    return step


@program
def views_inplace(job: Job) -> Step:
    net = job.to(nn.Linear(6, 8))
    x = job.randn(8, 6)

    def loss():
        y = net(x) * 1.0
        y[:, :2] = y[:, 2:4] * 2
        y[1].zero_()
        y.view(4, 16)[:, 3:5].mul_(3)
        y.t()[5].add_(1)
        y[::2, 4:].mul_(0.5)
        y.diagonal().fill_(0.5)
        y[y > 1] = 0.3
        y[:, [0, 3]] += 1
        z = y.split(4, 1)[0]
        z2 = torch.narrow(y, 0, 1, 3)
        return y.square().mean() + z.sum() * 0.1 + z2.mean()

    return trained(job, net, loss)
