"""Programs on images."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from . import Job, Step, program, trained


def digits(job: Job, count: int = 16, size: int = 28) -> torch.Tensor:
    """Images like handwritten digits: a constant background, normalized, with a few strokes."""
    images = torch.zeros(count, 1, size, size)
    for image in images:
        row, column = torch.randint(4, size - 8, (2,)).tolist()
        image[0, row : row + 5, column : column + 3] = torch.rand(5, 3)
    return job.put((images - 0.1307) / 0.3081)


def conv(inputs: int, outputs: int, size: int = 3, stride: int = 1, **more: Any) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False, **more), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(width, width), nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.body(x), inplace=True)


def backbone(width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        conv(3, width, stride=2),
        Residual(width),
        conv(width, width * 2, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


@program
def mnist_mlp(job: Job) -> Step:
    net = job.to(nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)))
    x, y = digits(job, 32), job.ints(10, 32)
    return trained(job, net, lambda: F.cross_entropy(net(x), y))


@program
def mnist_cnn(job: Job) -> Step:
    net = job.to(
        nn.Sequential(
            *(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)),
            *(nn.Flatten(), nn.Linear(4608, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10), nn.LogSoftmax(1)),
        )
    )
    x, y = digits(job, 16), job.ints(10, 16)
    return trained(job, net, lambda: F.nll_loss(net(x), y))


@program
def resnet(job: Job) -> Step:
    net = job.to(nn.Sequential(backbone(), nn.Linear(32, 10)))
    x, y = job.randn(8, 3, 32, 32), job.ints(10, 8)
    return trained(job, net, lambda: F.cross_entropy(net(x), y, label_smoothing=0.1))


@program
def vgg(job: Job) -> Step:
    blocks = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1)]
    net = job.to(
        nn.Sequential(*blocks, nn.ReLU(True), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(), nn.Linear(2048, 10))
    )
    x, y = job.randn(4, 3, 32, 32), job.ints(10, 4)
    return trained(job, net, lambda: F.cross_entropy(net(x), y))


@program
def depthwise(job: Job) -> Step:
    class Inverted(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            wide = width * 4
            self.up, self.deep = conv(width, wide, 1), conv(wide, wide, 3, groups=wide)
            self.squeeze, self.excite = nn.Conv2d(wide, 8, 1), nn.Conv2d(8, wide, 1)
            self.down, self.norm = nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.deep(self.up(x))
            gate = F.hardsigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))
            return x + self.norm(self.down(F.hardswish(y * gate)))

    net = job.to(nn.Sequential(conv(3, 8, 3, 2), Inverted(8), Inverted(8), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    head = job.to(nn.Linear(8, 10))
    both = nn.ModuleList([net, head])
    x, y = job.randn(4, 3, 32, 32), job.ints(10, 4)
    return trained(job, both, lambda: F.cross_entropy(head(net(x)), y))


@program
def convnext(job: Job) -> Step:
    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.deep, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.scale = nn.Parameter(1e-6 * torch.ones(width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(self.deep(x).permute(0, 2, 3, 1))
            return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)

    net = job.to(nn.Sequential(nn.Conv2d(3, 16, 4, 4), Block(16), Block(16)))
    head = job.to(nn.Linear(16, 10))
    x, y = job.randn(4, 3, 32, 32), job.ints(10, 4)
    return trained(job, nn.ModuleList([net, head]), lambda: F.cross_entropy(head(net(x).mean((2, 3))), y))


@program
def unet(job: Job) -> Step:
    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = conv(3, 8), conv(8, 16), conv(24, 8)
            self.up, self.out = nn.ConvTranspose2d(16, 16, 2, 2), nn.Conv2d(8, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = self.a(x)
            return self.out(self.c(torch.cat([a, self.up(self.b(F.max_pool2d(a, 2)))], 1)))

    net = job.to(UNet())
    x, y = job.randn(2, 3, 32, 32), job.ints(2, 2, 32, 32)
    return trained(job, net, lambda: F.cross_entropy(net(x), y))


@program
def segmentation_dice(job: Job) -> Step:
    net = job.to(nn.Sequential(conv(3, 8, 3, 2), nn.Conv2d(8, 1, 1)))
    x, y = job.randn(2, 3, 32, 32), job.ints(2, 2, 1, 32, 32).float()

    def loss() -> torch.Tensor:
        logits = F.interpolate(net(x), scale_factor=2, mode="bilinear", align_corners=False)
        p = logits.sigmoid()
        dice = 1 - (2 * (p * y).sum((1, 2, 3)) + 1) / (p.sum((1, 2, 3)) + y.sum((1, 2, 3)) + 1)
        return dice.mean() + F.binary_cross_entropy_with_logits(logits, y)

    return trained(job, net, loss)


@program
def densenet(job: Job) -> Step:
    layers = nn.ModuleList(
        nn.Sequential(nn.BatchNorm2d(8 * i), nn.ReLU(), nn.Conv2d(8 * i, 8, 3, 1, 1)) for i in (1, 2, 3)
    )
    stem, head = nn.Conv2d(3, 8, 3, 2, 1), nn.Linear(32, 10)
    net = job.to(nn.ModuleList([layers, stem, head]))
    x, y = job.randn(4, 3, 32, 32), job.ints(10, 4)

    def loss() -> torch.Tensor:
        maps = [stem(x)]
        for layer in layers:
            maps.append(layer(torch.cat(maps, 1)))
        return F.cross_entropy(head(F.avg_pool2d(torch.cat(maps, 1), 16).flatten(1)), y)

    return trained(job, net, loss)


@program
def group_norm_net(job: Job) -> Step:
    net = job.to(
        nn.Sequential(
            nn.Conv2d(3, 16, 3),
            nn.GroupNorm(4, 16),
            nn.SiLU(),
            nn.Conv2d(16, 16, 3),
            nn.InstanceNorm2d(16, affine=True),
        )
    )
    x = job.randn(2, 3, 24, 24)
    return trained(job, net, lambda: net(x).square().mean() + net(x).abs().amax())


@program
def vit(job: Job) -> Step:
    patches = nn.Conv2d(3, 32, 8, 8)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
    encoder, head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 10)
    token, places = nn.Parameter(torch.zeros(1, 1, 32)), nn.Parameter(torch.randn(1, 17, 32) * 0.02)
    net = nn.ModuleList([patches, encoder, head])
    net.register_parameter("token", token)
    net.register_parameter("places", places)
    job.to(net)
    x, y = job.randn(4, 3, 32, 32), job.ints(10, 4)

    def loss() -> torch.Tensor:
        tokens = patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([net.token.expand(4, -1, -1), tokens], 1) + net.places
        return F.cross_entropy(head(encoder(tokens)[:, 0]), y)

    return trained(job, net, loss, clip=1.0)


@program
def swin_window(job: Job) -> Step:
    attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
    embed, head, norm = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 10), nn.LayerNorm(16)
    net = job.to(nn.ModuleList([attention, embed, head, norm]))
    x, y = job.randn(2, 3, 32, 32), job.ints(10, 2)

    def loss() -> torch.Tensor:
        maps = torch.roll(embed(x).permute(0, 2, 3, 1), (-2, -2), (1, 2))
        windows = maps.reshape(2, 2, 4, 2, 4, 16).transpose(2, 3).reshape(8, 16, 16)
        windows = windows + attention(norm(windows), norm(windows), norm(windows), need_weights=False)[0]
        return F.cross_entropy(head(windows.reshape(2, -1, 16).mean(1)), y)

    return trained(job, net, loss)


@program
def mixer(job: Job) -> Step:
    embed, tokens, channels = nn.Conv2d(3, 32, 8, 8), nn.Linear(16, 16), nn.Linear(32, 32)
    norm, head = nn.LayerNorm(32), nn.Linear(32, 10)
    net = job.to(nn.ModuleList([embed, tokens, channels, norm, head]))
    x, y = job.randn(4, 3, 32, 32), job.ints(10, 4)

    def loss() -> torch.Tensor:
        h = embed(x).flatten(2).transpose(1, 2)
        h = h + F.gelu(tokens(norm(h).mT)).mT
        h = h + F.gelu(channels(norm(h)))
        return F.cross_entropy(head(h.mean(1)), y)

    return trained(job, net, loss)


@program
def spatial_transformer(job: Job) -> Step:
    where = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.Tanh(), nn.Linear(16, 6))
    net = job.to(nn.ModuleList([where, nn.Conv2d(1, 8, 5, 3), nn.Linear(512, 10)]))
    x, y = digits(job, 8), job.ints(10, 8)

    def loss() -> torch.Tensor:
        grid = F.affine_grid(
            where(x).float().view(-1, 2, 3) * 0.1 + torch.eye(2, 3, device=x.device), [8, 1, 28, 28], False
        )
        warped = F.grid_sample(x, grid, align_corners=False)
        return F.cross_entropy(net[2](F.relu(net[1](warped)).flatten(1)), y)

    return trained(job, net, loss)


@program
def detection(job: Job) -> Step:
    net = job.to(nn.Sequential(conv(3, 16, 3, 2), conv(16, 16, 3, 2), nn.Conv2d(16, 9, 1)))
    x, classes, boxes = job.randn(2, 3, 32, 32), job.ints(5, 2, 8, 8), job.randn(2, 4, 8, 8)

    def loss() -> torch.Tensor:
        out = net(x)
        truth = F.one_hot(classes, 5).permute(0, 3, 1, 2).to(out.dtype)
        p = out[:, :5].sigmoid()
        focal = F.binary_cross_entropy_with_logits(out[:, :5], truth, reduction="none") * (truth - p).abs() ** 2
        return focal.sum() / 50 + F.smooth_l1_loss(out[:, 5:], boxes) + F.huber_loss(out[:, 5:], boxes)

    return trained(job, net, loss)


@program
def video(job: Job) -> Step:
    net = job.to(
        nn.Sequential(nn.Conv3d(3, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.Conv3d(8, 8, 2, 2), nn.Flatten())
    )
    head = job.to(nn.Linear(576, 5))
    x, y = job.put(torch.randn(2, 3, 4, 12, 12)), job.ints(5, 2)
    return trained(job, nn.ModuleList([net, head]), lambda: F.cross_entropy(head(net(x)), y))


@program
def autoencoder(job: Job) -> Step:
    net = job.to(
        nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Sigmoid())
    )
    x = digits(job, 8)
    return trained(job, net, lambda: F.mse_loss(net(x), x) + F.l1_loss(net(x), x))


@program
def super_resolution(job: Job) -> Step:
    net = job.to(
        nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.PReLU(16), nn.Conv2d(16, 12, 3, padding=1), nn.PixelShuffle(2))
    )
    x, y = job.rand(2, 3, 16, 16), job.rand(2, 3, 32, 32)
    return trained(job, net, lambda: F.l1_loss(net(x) + F.interpolate(x, scale_factor=2.0, mode="bicubic"), y))


@program
def simclr(job: Job) -> Step:
    net = job.to(nn.Sequential(backbone(8), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)))
    a, b = job.randn(8, 3, 16, 16), job.randn(8, 3, 16, 16)

    def loss() -> torch.Tensor:
        z = F.normalize(torch.cat([net(a), net(b)]), dim=1)  # the network runs twice in one autocast region
        similar = (z @ z.T / 0.5).masked_fill(torch.eye(16, dtype=torch.bool, device=z.device), float("-inf"))
        return F.cross_entropy(similar.float(), torch.arange(16, device=z.device).roll(8))

    return trained(job, net, loss)


@program
def byol(job: Job) -> Step:
    online = job.to(nn.Sequential(backbone(8), nn.Linear(16, 8)))
    target, predictor = copy.deepcopy(online), job.to(nn.Linear(8, 8))
    a, b = job.randn(4, 3, 16, 16), job.randn(4, 3, 16, 16)
    both = nn.ModuleList([online, predictor])
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)

    def step() -> None:
        with job.autocast():
            with torch.no_grad():
                goal = target(b)
            loss = 2 - 2 * F.cosine_similarity(predictor(online(a)), goal, dim=-1).mean()
        job.update(loss, optimizer)
        with torch.no_grad():
            for p, q in zip(target.parameters(), online.parameters()):
                p.lerp_(q, 0.01)

    return step


@program
def moco_queue(job: Job) -> Step:
    net = job.to(nn.Sequential(backbone(8), nn.Linear(16, 8)))
    queue = F.normalize(job.randn(8, 32), dim=0)
    a, b = job.randn(4, 3, 16, 16), job.randn(4, 3, 16, 16)

    def loss() -> torch.Tensor:
        q = F.normalize(net(a), dim=1)
        with torch.no_grad():
            k = F.normalize(net(b), dim=1)
        logits = torch.cat(
            [torch.einsum("nc,nc->n", q, k).unsqueeze(-1), torch.einsum("nc,ck->nk", q, queue.to(q.dtype, copy=True))],
            1,
        )
        queue[:, :4] = k.T.to(queue.dtype)
        return F.cross_entropy(logits / 0.07, torch.zeros(4, dtype=torch.long, device=logits.device))

    return trained(job, net, loss)


@program
def barlow_twins(job: Job) -> Step:
    net = job.to(nn.Sequential(backbone(8), nn.Linear(16, 16), nn.BatchNorm1d(16, affine=False)))
    a, b = job.randn(8, 3, 16, 16), job.randn(8, 3, 16, 16)

    def loss() -> torch.Tensor:
        c = net(a).T @ net(b) / 8
        on = torch.diagonal(c).add(-1).pow(2).sum()
        return on + 0.005 * (c.pow(2).sum() - torch.diagonal(c).pow(2).sum())

    return trained(job, net, loss)


@program
def distillation(job: Job) -> Step:
    teacher, student = (
        job.to(nn.Sequential(backbone(8), nn.Linear(16, 10))).eval(),
        job.to(nn.Sequential(backbone(4), nn.Linear(8, 10))),
    )
    x, y = job.randn(4, 3, 16, 16), job.ints(10, 4)

    def loss() -> torch.Tensor:
        with torch.no_grad():
            soft = F.softmax(teacher(x) / 4, -1)
        out = student(x)
        return F.kl_div(F.log_softmax(out / 4, -1), soft, reduction="batchmean") * 16 + F.cross_entropy(out, y)

    return trained(job, student, loss)


@program
def mixup_cutmix(job: Job) -> Step:
    net = job.to(nn.Sequential(backbone(8), nn.Linear(16, 10)))
    x, y = job.randn(8, 3, 16, 16), F.one_hot(job.ints(10, 8), 10).float()

    def loss() -> torch.Tensor:
        order = torch.randperm(8).to(x.device)
        mixed = 0.3 * x + 0.7 * x[order]
        mixed[:, :, 4:8, 4:8] = x[:, :, 4:8, 4:8]
        return torch.sum(-(0.3 * y + 0.7 * y[order]) * F.log_softmax(net(mixed), -1), -1).mean()

    return trained(job, net, loss)


@program
def fgsm(job: Job) -> Step:
    net = job.to(nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(1352, 10)))
    x, y = digits(job, 8), job.ints(10, 8)

    def loss() -> torch.Tensor:
        attacked = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(F.cross_entropy(net(attacked), y), attacked)  # of the image alone
        return F.cross_entropy(net((x + 0.1 * grad.sign()).clamp(-1, 3)), y)

    return trained(job, net, loss)


@program
def pgd_inputs(job: Job) -> Step:
    net = job.to(nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10)))
    x, y = digits(job, 8), job.ints(10, 8)

    def loss() -> torch.Tensor:
        noise = torch.zeros_like(x, requires_grad=True)
        for _ in range(2):
            F.cross_entropy(net(x + noise), y).backward(inputs=[noise])
            with torch.no_grad():
                noise += 0.05 * noise.grad.sign()
                noise.grad = None
        return F.cross_entropy(net(x + noise.detach()), y)

    return trained(job, net, loss)


@program
def triplet(job: Job) -> Step:
    net = job.to(nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 8)))
    anchor, near, far = digits(job, 8), digits(job, 8), digits(job, 8)
    return trained(job, net, lambda: F.triplet_margin_loss(net(anchor), net(near), net(far)))


@program
def style_gram(job: Job) -> Step:
    net = job.to(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(8, 8, 3, padding=1))
    ).requires_grad_(False)
    image, goal = nn.Parameter(job.rand(1, 3, 16, 16)), job.rand(1, 3, 16, 16)
    optimizer = torch.optim.Adam([image], lr=0.02)

    def gram(x: torch.Tensor) -> torch.Tensor:
        flat = net(x).flatten(2)
        return flat @ flat.mT / flat[0].numel()

    def step() -> None:
        with job.autocast():
            variation = (image[..., 1:] - image[..., :-1]).abs().mean()
            loss = F.mse_loss(gram(image), gram(goal)) + 0.1 * variation
        job.update(loss, optimizer)

    return step
