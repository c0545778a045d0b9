"""Programs for layers that the others lack: convolutions, pools, norms, recurrent cells, embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from . import Job, Step, program, trained


@program
def transposed_convs(job: Job) -> Step:
    net = job.to(
        nn.Sequential(
            nn.ConvTranspose1d(4, 6, 4, 2, 1, output_padding=1),
            nn.GELU(),
            nn.ConvTranspose1d(6, 6, 3, padding=2, dilation=2, groups=3),
            nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
        )
    )
    x = job.put(torch.randn(3, 4, 9))
    return trained(job, net, lambda: net(x).square().mean())


@program
def conv3d_grouped(job: Job) -> Step:
    net = job.to(
        nn.Sequential(
            nn.Conv3d(4, 8, 3, padding=1, groups=2),
            nn.BatchNorm3d(8),
            nn.ReLU(inplace=True),
            nn.ConvTranspose3d(8, 4, 2, stride=2),
            nn.MaxPool3d(2),
            nn.AdaptiveMaxPool3d((1, 2, 2)),
        )
    )
    x = job.randn(2, 4, 4, 6, 6)
    return trained(job, net, lambda: net(x).square().mean())


@program
def dilated_depthwise(job: Job) -> Step:
    net = job.to(
        nn.Sequential(
            nn.Conv2d(6, 6, 3, padding=4, dilation=4, groups=6, padding_mode="reflect"),
            nn.Conv2d(6, 12, 3, padding="same", dilation=2, groups=6, bias=False),
            nn.PReLU(12),
            nn.LazyConv2d(5, (1, 3), stride=(2, 1)),
        )
    )
    x = job.randn(2, 6, 12, 12)
    net(x)
    job.to(net)
    return trained(job, net, lambda: net(x).square().mean())


@program
def pixel_unshuffle(job: Job) -> Step:
    net = job.to(
        nn.Sequential(
            nn.PixelUnshuffle(2),
            nn.Conv2d(12, 16, 3, padding=1),
            nn.ChannelShuffle(4),
            nn.Hardswish(),
            nn.PixelShuffle(2),
            nn.ReflectionPad2d(1),
            nn.ReplicationPad2d(1),
            nn.CircularPad2d(1),
        )
    )
    x = job.randn(2, 3, 8, 8)
    return trained(job, net, lambda: net(x).square().mean())


@program
def grid_sample_flow(job: Job) -> Step:
    net = job.to(nn.Conv2d(3, 2, 3, padding=1))
    x = job.randn(2, 3, 10, 10)

    def loss():
        flow = net(x).float().tanh().permute(0, 2, 3, 1)
        a = F.grid_sample(x, flow, mode="bilinear", padding_mode="border", align_corners=True)
        b = F.grid_sample(x, flow, mode="bicubic", padding_mode="reflection", align_corners=False)
        c = F.grid_sample(x, flow, mode="nearest", padding_mode="zeros", align_corners=False)
        return a.square().mean() + b.square().mean() + c.square().mean()

    return trained(job, net, loss)


@program
def unfold_fold(job: Job) -> Step:
    net = job.to(nn.Linear(27, 27))
    x = job.randn(2, 3, 9, 9)

    def loss():
        u = F.unfold(x, 3, stride=2, padding=1)
        y = net(u.transpose(1, 2)).transpose(1, 2)
        f = F.fold(y, (9, 9), 3, stride=2, padding=1)
        return f.square().mean() + f.unfold(2, 3, 2).amax(-1).square().mean()

    return trained(job, net, loss)


@program
def adaptive_pools(job: Job) -> Step:
    net = job.to(nn.Conv2d(3, 6, 3, padding=1))
    x = job.randn(2, 3, 11, 13)

    def loss():
        y = net(x).relu()
        a = F.adaptive_max_pool2d(y, (3, 4))
        b = F.adaptive_avg_pool2d(y, (5, 3))
        c, i = F.max_pool2d(y, 3, 2, 1, dilation=1, return_indices=True, ceil_mode=True)
        d = F.max_unpool2d(c, i, 3, 2, 1, output_size=y.shape)
        e = F.lp_pool2d(y, 2.0, 3, 2)
        f = F.fractional_max_pool2d(y, 2, output_ratio=(0.5, 0.5))
        g = F.adaptive_max_pool1d(y.flatten(2), 7)
        return sum(t.float().square().mean() for t in (a, b, c, d, e, f, g))

    return trained(job, net, loss)


@program
def upsamplings(job: Job) -> Step:
    net = job.to(nn.Conv2d(3, 4, 3, padding=1))
    x = job.randn(2, 3, 7, 9)
    v = job.to(nn.Conv1d(2, 3, 3))
    s = job.put(torch.randn(2, 2, 9))

    def loss():
        y = net(x)
        z = v(s)
        return sum(
            t.float().square().mean()
            for t in (
                F.interpolate(y, scale_factor=2.3, mode="bilinear"),
                F.interpolate(y, size=(3, 4), mode="area"),
                F.interpolate(y, size=(5, 5), mode="bicubic", align_corners=True),
                F.interpolate(y, scale_factor=0.5, mode="bilinear", antialias=True),
                F.interpolate(y, size=(13, 6), mode="nearest-exact"),
                F.interpolate(z, scale_factor=2, mode="linear", align_corners=True),
                F.interpolate(y[:, :, None], scale_factor=2, mode="trilinear"),
            )
        )

    return trained(job, nn.ModuleList([net, v]), loss)


@program
def norms(job: Job) -> Step:
    net = job.to(
        nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
            nn.GroupNorm(4, 8),
            nn.BatchNorm2d(8, momentum=None),
            nn.CELU(),
        )
    )
    r = job.to(nn.RMSNorm(6))
    x = job.randn(3, 3, 8, 8)
    return trained(
        job,
        nn.ModuleList([net, r]),
        lambda: r(net(x)).square().mean() + F.normalize(net(x).float().flatten(1), p=3).mean(),
    )


@program
def bn_eval_frozen(job: Job) -> Step:
    net = job.to(nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)))
    net[1].eval()
    x = job.randn(3, 3, 8, 8)
    return trained(job, net, lambda: net(x).square().mean())


@program
def channels_last_mix(job: Job) -> Step:
    net = job.to(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.SiLU(),
            nn.AvgPool2d(3, 2, 1, count_include_pad=False),
            nn.Conv2d(8, 8, 1),
        )
    ).to(memory_format=torch.channels_last)
    x = job.randn(2, 3, 9, 9).to(memory_format=torch.channels_last)
    return trained(
        job, net, lambda: net(x).contiguous().square().mean() + F.max_pool2d(net(x), 2).permute(0, 2, 3, 1).mean()
    )


@program
def ssim(job: Job) -> Step:
    net = job.to(nn.Conv2d(3, 3, 3, padding=1))
    x = job.rand(2, 3, 16, 16)
    k = (torch.ones(3, 1, 5, 5) / 25).to(job.device)

    def loss():
        y = net(x).float().sigmoid()

        def f(t: torch.Tensor) -> torch.Tensor:
            return F.conv2d(t, k, groups=3)

        mx, my = f(x), f(y)
        vx, vy, c = f(x * x) - mx * mx, f(y * y) - my * my, f(x * y) - mx * my
        return (
            1
            - ((2 * mx * my + 1e-4) * (2 * c + 9e-4) / ((mx * mx + my * my + 1e-4) * (vx + vy + 9e-4))).mean()
            + (y[..., 1:] - y[..., :-1]).abs().mean()
        )

    return trained(job, net, loss)


@program
def deform_roi(job: Job) -> Step:
    net = job.to(nn.Conv2d(4, 4, 3, padding=1))
    x = job.randn(1, 4, 12, 12)

    def loss():
        y = net(x).float()
        boxes = torch.tensor([[1.0, 1, 7, 7], [3, 2, 10, 9]], device=x.device)
        th = torch.stack(
            [
                torch.stack(
                    [(boxes[:, 2] - boxes[:, 0]) / 12, boxes[:, 0] * 0, (boxes[:, 0] + boxes[:, 2]) / 12 - 1], 1
                ),
                torch.stack(
                    [boxes[:, 0] * 0, (boxes[:, 3] - boxes[:, 1]) / 12, (boxes[:, 1] + boxes[:, 3]) / 12 - 1], 1
                ),
            ],
            1,
        )
        g = F.affine_grid(th, (2, 4, 3, 3), align_corners=False)
        return F.grid_sample(y.expand(2, -1, -1, -1), g, align_corners=False).square().mean()

    return trained(job, net, loss)


@program
def inplace_chain(job: Job) -> Step:
    net = job.to(
        nn.Sequential(
            nn.Conv2d(3, 6, 3),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.Conv2d(6, 6, 3),
            nn.Conv2d(6, 6, 1),
            nn.Dropout(0.2, inplace=True),
            nn.Conv2d(6, 6, 1),
            nn.Hardtanh(inplace=True),
            nn.Conv2d(6, 6, 1),
            nn.ELU(inplace=True),
        )
    )
    x = job.randn(2, 3, 9, 9)

    def loss():
        y = net(x)
        y = y * 1
        y.mul_(2).add_(1).clamp_(-3, 3).sigmoid_()
        return y.square().mean()

    return trained(job, net, loss)


@program
def cells(job: Job) -> Step:
    a, b, c = nn.LSTMCell(4, 6), nn.GRUCell(6, 6), nn.RNNCell(6, 6, nonlinearity="relu")
    net = job.to(nn.ModuleList([a, b, c]))
    x = job.put(torch.randn(5, 3, 4))

    def loss():
        h = torch.zeros(3, 6, device=x.device)
        cc = h
        g = h
        r = h
        for t in x:
            h, cc = a(t, (h, cc))
            g = b(h, g.to(h.dtype))
            r = c(g, r.to(g.dtype))
        return r.square().mean() + cc.mean()

    return trained(job, net, loss)


@program
def gru_dropout(job: Job) -> Step:
    net = job.to(nn.GRU(6, 8, num_layers=2, dropout=0.3, bidirectional=True, batch_first=True))
    x = job.put(torch.randn(3, 7, 6))
    return trained(job, net, lambda: net(x)[0].square().mean())


@program
def lstm_proj_packed(job: Job) -> Step:
    net = job.to(nn.LSTM(6, 8, num_layers=2, dropout=0.2, proj_size=5, batch_first=True))
    x = job.put(torch.randn(4, 7, 6))
    le = torch.tensor([3, 7, 5, 1])

    def loss():
        p = nn.utils.rnn.pack_padded_sequence(x, le, batch_first=True, enforce_sorted=False)
        y, (h, c) = net(p)
        z, _ = nn.utils.rnn.pad_packed_sequence(y, batch_first=True, padding_value=-1.0)
        return z.square().mean() + h.mean() + c.mean()

    return trained(job, net, loss)


@program
def ctc_zero_inf(job: Job) -> Step:
    net = job.to(nn.LSTM(6, 8, bidirectional=True))
    head = job.to(nn.Linear(16, 5))
    x = job.put(torch.randn(12, 3, 6))
    y = job.put(torch.randint(1, 5, (3, 4)))
    il = torch.tensor([12, 9, 3])
    tl = torch.tensor([4, 3, 4])

    def loss():
        lp = head(net(x)[0]).float().log_softmax(-1)
        return F.ctc_loss(lp, y, il, tl, zero_infinity=True)

    return trained(job, nn.ModuleList([net, head]), loss)


@program
def embedding_bags(job: Job) -> Step:
    class N(nn.Module):
        def __init__(s):
            super().__init__()
            s.a = nn.EmbeddingBag(30, 8, mode="sum")
            s.b = nn.EmbeddingBag(30, 8, mode="max")
            s.c = nn.EmbeddingBag(30, 8, mode="mean", padding_idx=0)
            s.d = nn.Embedding(30, 8, max_norm=1.0, scale_grad_by_freq=True)

        def forward(s, ids, off, w):
            return (
                s.a(ids, off, per_sample_weights=w).sum()
                + s.b(ids, off).square().sum()
                + s.c(ids, off).square().sum()
                + s.d(ids).square().sum()
            )

    net = job.to(N())
    ids = job.ints(30, 20)
    off = job.put(torch.tensor([0, 4, 4, 11]))
    w = job.rand(20)
    return trained(job, net, lambda: net(ids, off, w))


@program
def sparse_embedding(job: Job) -> Step:
    net = job.to(nn.Embedding(20, 6, sparse=True))
    ids = job.ints(20, 15)
    o = torch.optim.SparseAdam(net.parameters(), lr=1e-2)

    def step():
        with job.autocast():
            total = net(ids).square().mean()
        o.zero_grad()
        total.backward()
        o.step()

    return step


@program
def sparse_mm(job: Job) -> Step:
    net = job.to(nn.Linear(6, 5))
    x = job.randn(10, 6)
    idx = job.put(torch.randint(0, 10, (2, 30)))
    val = job.rand(30)

    def loss():
        A = torch.sparse_coo_tensor(idx, val, (10, 10)).coalesce()
        return (torch.sparse.mm(A, net(x).float()) if job.low is None else (A.to_dense() @ net(x))).square().mean()

    return trained(job, net, loss)


@program
def parametrized(job: Job) -> Step:
    from torch.nn.utils import parametrizations as pz

    net = job.to(
        nn.Sequential(
            pz.weight_norm(nn.Linear(8, 12)),
            nn.Tanh(),
            pz.spectral_norm(nn.Linear(12, 8)),
            nn.Tanh(),
            pz.orthogonal(nn.Linear(8, 8)),
        )
    )
    x = job.randn(10, 8)
    return trained(job, net, lambda: net(x).square().mean())


@program
def old_weight_norm(job: Job) -> Step:
    net = job.to(
        nn.Sequential(
            torch.nn.utils.weight_norm(nn.Conv1d(4, 6, 3)), nn.ELU(), torch.nn.utils.spectral_norm(nn.Conv1d(6, 4, 3))
        )
    )
    x = job.put(torch.randn(3, 4, 12))
    return trained(job, net, lambda: net(x).square().mean())
