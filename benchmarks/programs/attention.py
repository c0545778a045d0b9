"""Programs for kinds of attention and of sequences that the others lack."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from . import Job, Step, program, trained
from .methods import mlp


def _weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.3 * torch.randn(*shape))


@program
def mha_masks(job: Job) -> Step:
    m = job.to(
        nn.MultiheadAttention(
            16, 4, dropout=0.1, batch_first=True, kdim=12, vdim=10, add_bias_kv=True, add_zero_attn=True
        )
    )
    q, k, v = job.put(torch.randn(2, 5, 16)), job.put(torch.randn(2, 7, 12)), job.put(torch.randn(2, 7, 10))
    pad = torch.zeros(2, 7, dtype=torch.bool)
    pad[0, 5:] = True
    pad = pad.to(job.device)
    am = torch.zeros(5, 7, dtype=torch.bool).to(job.device)

    def loss():
        y, w = m(q, k, v, key_padding_mask=pad, attn_mask=am, need_weights=True, average_attn_weights=False)
        z, _ = m(q, k, v, key_padding_mask=pad, need_weights=False)
        return y.square().mean() + w.square().mean() + z.square().mean()

    return trained(job, m, loss)


@program
def full_transformer(job: Job) -> Step:
    t = nn.Transformer(16, 2, 1, 1, 32, dropout=0.1, batch_first=True)
    e = nn.Embedding(20, 16)
    h = nn.Linear(16, 20)
    net = job.to(nn.ModuleList([t, e, h]))
    a, b = job.ints(20, 2, 7), job.ints(20, 2, 6)
    m = nn.Transformer.generate_square_subsequent_mask(6).to(job.device)
    pad = a == 0
    return trained(
        job,
        net,
        lambda: F.cross_entropy(
            h(t(e(a), e(b), tgt_mask=m, src_key_padding_mask=pad, memory_key_padding_mask=pad)).flatten(0, 1),
            b.flatten(),
        ),
    )


@program
def sdpa_kinds(job: Job) -> Step:
    net = job.to(nn.Linear(8, 24))
    x = job.put(torch.randn(2, 3, 7, 8))
    m = torch.rand(7, 7).to(job.device) > 0.3
    m.fill_diagonal_(True)
    bias = nn.Parameter(torch.randn(1, 3, 7, 7))
    net.register_parameter("b2", bias)
    job.to(net)

    def loss():
        q, k, v = net(x).chunk(3, -1)
        return sum(
            F.scaled_dot_product_attention(q, k, v, **kw).float().square().mean()
            for kw in (
                {"attn_mask": m},
                {"attn_mask": net.b2.to(q.dtype)},
                {"dropout_p": 0.2},
                {"dropout_p": 0.2, "is_causal": True},
            )
        )

    return trained(job, net, loss)


@program
def rope_gqa(job: Job) -> Step:
    q, k, v = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
    net = job.to(nn.ModuleList([q, k, v]))
    x = job.put(torch.randn(2, 6, 16))
    fr = torch.polar(torch.ones(6, 2), torch.outer(torch.arange(6.0), torch.tensor([1.0, 0.1]))).to(job.device)

    def rot(t):
        return (
            torch.view_as_real(torch.view_as_complex(t.float().reshape(*t.shape[:-1], 2, 2)) * fr[None, :, None])
            .flatten(3)
            .type_as(t)
        )

    def loss():
        a = rot(q(x).view(2, 6, 4, 4)).transpose(1, 2)
        b = rot(k(x).view(2, 6, 2, 4)).transpose(1, 2)
        c = v(x).view(2, 6, 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True, scale=0.3).square().mean()

    return trained(job, net, loss)


@program
def alibi_window(job: Job) -> Step:
    net = job.to(nn.Linear(8, 24))
    x = job.put(torch.randn(2, 2, 9, 8))

    def loss():
        q, k, v = net(x).chunk(3, -1)
        s = (q @ k.transpose(-1, -2)).float() / 8**0.5
        i = torch.arange(9, device=x.device)
        d = i[:, None] - i[None]
        s = s - d.abs() * torch.tensor([0.5, 0.25], device=x.device)[:, None, None]
        s = s.masked_fill((d < 0) | (d > 3), float("-inf"))
        p = F.dropout(s.softmax(-1), 0.1).to(v.dtype)
        return (p @ v).square().mean()

    return trained(job, net, loss)


@program
def retention(job: Job) -> Step:
    net = job.to(nn.Linear(8, 24))
    x = job.put(torch.randn(2, 9, 8))

    def loss():
        q, k, v = net(x).chunk(3, -1)
        S = torch.zeros(2, 8, 8, device=x.device)
        out = []
        for t in range(9):
            S = 0.9 * S + torch.einsum("bi,bj->bij", k[:, t].float(), v[:, t].float())
            out.append(torch.einsum("bi,bij->bj", q[:, t].float(), S))
        return F.group_norm(torch.stack(out, 2), 2).square().mean()

    return trained(job, net, loss)


@program
def nested_jagged(job: Job) -> Step:
    net = job.to(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4)))
    xs = [job.randn(n, 6) for n in (3, 5, 2)]

    def loss():
        nt = torch.nested.nested_tensor(xs, layout=torch.jagged)
        y = net(nt)
        return y.values().float().square().mean() + torch.nested.to_padded_tensor(y, 0.0).float().mean()

    return trained(job, net, loss)


@program
def tied(job: Job) -> Step:
    e = nn.Embedding(30, 16)
    h = nn.Linear(16, 30, bias=False)
    h.weight = e.weight
    m = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, norm_first=True, batch_first=True)
    net = job.to(nn.ModuleList([e, h, m]))
    ids = job.ints(30, 3, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(8).to(job.device)
    return trained(
        job,
        net,
        lambda: F.cross_entropy(
            h(m(e(ids), src_mask=mask, is_causal=True)).flatten(0, 1),
            ids.flatten(),
            label_smoothing=0.1,
            ignore_index=3,
        ),
    )


@program
def slot_attention(job: Job) -> Step:
    k, q, v, g = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.GRUCell(8, 8)
    net = job.to(nn.ModuleList([k, q, v, g]))
    x = job.put(torch.randn(2, 10, 8))

    def loss():
        s = torch.randn(2, 3, 8, device=x.device)
        K, V = k(x), v(x)
        for _ in range(2):
            a = (K @ q(s).transpose(1, 2)).softmax(-1) + 1e-6
            a = a / a.sum(1, keepdim=True)
            u = a.transpose(1, 2).to(V.dtype) @ V
            s = g(u.reshape(-1, 8), s.reshape(-1, 8).to(u.dtype)).view(2, 3, 8)
        return s.square().mean()

    return trained(job, net, loss)


@program
def crf(job: Job) -> Step:
    em = job.to(nn.Linear(5, 4))
    tr = nn.Parameter(torch.randn(4, 4) * 0.1)
    net = nn.Module()
    net.em = em
    net.register_parameter("tr", tr)
    job.to(net)
    x = job.put(torch.randn(2, 6, 5))
    y = job.ints(4, 2, 6)

    def loss():
        e = net.em(x).float()
        a = e[:, 0]
        for t in range(1, 6):
            a = torch.logsumexp(a[:, :, None] + net.tr[None], 1) + e[:, t]
        gold = e.gather(2, y[..., None]).sum((1, 2)) + net.tr[y[:, :-1], y[:, 1:]].sum(1)
        return (a.logsumexp(1) - gold).mean()

    return trained(job, net, loss)


@program
def dtw_soft(job: Job) -> Step:
    net = job.to(nn.Linear(3, 3))
    a, b = job.randn(6, 3), job.randn(5, 3)

    def loss():
        D = torch.cdist(net(a).float(), b)
        R = [[None] * 6 for _ in range(7)]
        inf = torch.tensor(1e4, device=a.device)
        for i in range(7):
            for j in range(6):
                R[i][j] = inf if (i == 0) != (j == 0) else torch.zeros((), device=a.device)
        for i in range(1, 7):
            for j in range(1, 6):
                R[i][j] = D[i - 1, j - 1] - torch.logsumexp(
                    torch.stack([-R[i - 1][j], -R[i][j - 1], -R[i - 1][j - 1]]), 0
                )
        return R[6][5]

    return trained(job, net, loss)


@program
def beam_search(job: Job) -> Step:
    net = job.to(nn.GRUCell(8, 16))
    e = job.to(nn.Embedding(12, 8))
    h = job.to(nn.Linear(16, 12))
    nn.ModuleList([net, e, h]).eval()

    @torch.no_grad()
    def step():
        with job.autocast():
            hs = torch.zeros(3, 16, device=job.device)
            tok = torch.zeros(3, dtype=torch.long, device=job.device)
            score = torch.zeros(3, device=job.device)
            for _ in range(5):
                hs = net(e(tok), hs)
                lp = h(hs).float().log_softmax(-1) + score[:, None]
                score, ix = lp.flatten().topk(3)
                hs = hs[ix // 12].to(hs.dtype)
                tok = ix % 12
            p = (h(hs).float() / 0.8).softmax(-1)
            sp, si = p.sort(-1, descending=True)
            cut = sp.cumsum(-1) - sp > 0.9
            sp = sp.masked_fill(cut, 0)
            torch.multinomial(sp, 2)
            si.gather(1, sp.argmax(1, keepdim=True))

    return step


@program
def capsule(job: Job) -> Step:
    net = nn.ParameterList([_weights(5, 6, 4, 3)]).to(job.device)
    x = job.randn(2, 6, 3)

    def loss():
        u = torch.einsum("oicd,bid->boic", net[0], x).float()
        b = torch.zeros(2, 5, 6, device=x.device)
        for _ in range(3):
            c = b.softmax(1)
            s = (c[..., None] * u).sum(2)
            n = s.square().sum(-1, keepdim=True)
            v = n / (1 + n) * s / n.sqrt()
            b = b + (u * v[:, :, None]).sum(-1)
        return v.norm(dim=-1).mean()

    return trained(job, net, loss)


@program
def kan_splines(job: Job) -> Step:
    net = nn.ParameterList([_weights(6, 4, 9)]).to(job.device)
    x = job.rand(10, 6)
    gr = torch.linspace(-0.5, 1.5, 13).to(job.device)

    def loss():
        b = ((x[..., None] >= gr[:-1]) & (x[..., None] < gr[1:])).float()
        for k in range(1, 4):
            b = (x[..., None] - gr[: -(k + 1)]) / (gr[k:-1] - gr[: -(k + 1)]) * b[..., :-1] + (
                gr[k + 1 :] - x[..., None]
            ) / (gr[k + 1 :] - gr[1:-k]) * b[..., 1:]
        return torch.einsum("big,iog->bo", b, net[0]).square().mean()

    return trained(job, net, loss)


@program
def sinkhorn(job: Job) -> Step:
    net = job.to(mlp(4, 16, 4))
    x, y = job.randn(12, 4), job.randn(12, 4)

    def loss():
        C = torch.cdist(net(x).float(), y).square()
        K = -C / 0.5
        f = torch.zeros(12, device=x.device)
        g = f
        for _ in range(8):
            f = -torch.logsumexp(K + g[None], 1) - math.log(12)
            g = -torch.logsumexp(K + f[:, None], 0) - math.log(12)
        return (torch.exp(K + f[:, None] + g[None]) * C).sum()

    return trained(job, net, loss)


@program
def graph_laplacian(job: Job) -> Step:
    net = job.to(nn.Linear(4, 3))
    x = job.randn(12, 4)

    def loss():
        z = net(x).float()
        A = torch.exp(-torch.cdist(z, z).square())
        A = A - torch.diag(A.diagonal())
        d = A.sum(1)
        L = torch.diag(d) - A
        w, _ = torch.linalg.eigh(L)
        T = [z, L @ z * 0.1]
        for _ in range(2):
            T.append(0.2 * L @ T[-1] - T[-2])
        return w[1] + sum(t.square().mean() for t in T)

    return trained(job, net, loss)


@program
def distributions(job: Job) -> Step:
    net = job.to(nn.Linear(4, 6))
    x = job.randn(12, 4)
    D = torch.distributions

    def loss():
        o = net(x).float()
        a = F.softplus(o) + 0.2
        total = (
            -D.Beta(a[:, 0], a[:, 1]).log_prob(torch.full((12,), 0.3, device=x.device)).mean()
            - D.Gamma(a[:, 2], a[:, 3]).log_prob(torch.full((12,), 0.7, device=x.device)).mean()
        )
        total = (
            total
            + D.kl_divergence(D.Dirichlet(a), D.Dirichlet(torch.ones_like(a))).mean()
            + D.LogNormal(o[:, 4], a[:, 5]).rsample().log().mean()
        )
        mvn = D.MultivariateNormal(o[:, :2], scale_tril=torch.diag_embed(a[:, :2]))
        total = total - mvn.log_prob(x[:, :2]).mean() + mvn.rsample().mean() * 0.1
        total = (
            total
            + D.Laplace(o[:, 0], a[:, 0]).rsample().abs().mean()
            - D.StudentT(a[:, 1] + 2).log_prob(x[:, 0]).mean()
            + D.Gamma(a[:, 2] + 1, a[:, 3]).rsample().mean() * 0.1
            - D.Poisson(a[:, 4]).log_prob(torch.full((12,), 3.0, device=x.device)).mean()
            + D.VonMises(o[:, 0], a[:, 1]).log_prob(x[:, 1]).mean()
        )
        return (
            total
            + D.MixtureSameFamily(D.Categorical(logits=o[:, :3]), D.Normal(o[:, 3:6], a[:, :3]))
            .log_prob(x[:, 0])
            .mean()
        )

    return trained(job, net, loss)


@program
def gumbel(job: Job) -> Step:
    net = job.to(nn.Linear(8, 6))
    cb = job.to(nn.Linear(6, 8))
    x = job.randn(10, 8)
    return trained(
        job,
        nn.ModuleList([net, cb]),
        lambda: (cb(F.gumbel_softmax(net(x).float(), tau=0.7, hard=True)) - x).square().mean(),
    )


@program
def state_space_fft(job: Job) -> Step:
    net = nn.ParameterList([_weights(4, 16), _weights(4)]).to(job.device)
    x = job.randn(3, 4, 16)

    def loss():
        k, d = net
        K = torch.fft.rfft(k, n=32)
        X = torch.fft.rfft(x, n=32)
        y = torch.fft.irfft(K * X, n=32)[..., :16] + d[:, None] * x
        z = torch.fft.fft2(y)
        w = torch.fft.fftshift(z).abs()
        return (
            F.gelu(y).square().mean()
            + w.mean()
            + torch.fft.ifft(torch.fft.fft(y, norm="ortho"), norm="ortho").real.mean()
            + torch.fft.hfft(y).mean()
        )

    return trained(job, net, loss)
