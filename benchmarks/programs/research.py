"""Programs as repositories of research have them: losses, samplers and layers that are written out by hand."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import Job, Step, program, trained
from .methods import mlp


@program
def modulated_conv(job: Job) -> Step:
    """As StyleGAN2: weights for each image, as one grouped convolution; lengths of paths are penalised."""

    class Modulated(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.weight, self.style = nn.Parameter(torch.randn(outputs, inputs, 3, 3)), nn.Linear(8, inputs)
            self.noise = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            batch, inputs, height, width = x.shape
            weight = self.weight[None] * (self.style(w) + 1).view(batch, 1, inputs, 1, 1)
            weight = weight * torch.rsqrt(weight.square().sum((2, 3, 4), keepdim=True) + 1e-8)
            x = F.conv2d(x.reshape(1, -1, height, width), weight.flatten(0, 1), padding=1, groups=batch)
            x = x.view(batch, -1, height, width)
            x = x + self.noise * torch.randn(batch, 1, height, width, device=x.device)
            blur = torch.tensor([1.0, 3.0, 3.0, 1.0], device=x.device, dtype=x.dtype)
            kernel = (blur[:, None] * blur / 64).expand(x.shape[1], 1, 4, 4)
            x = F.conv2d(F.pad(x, (2, 1, 2, 1)), kernel, groups=x.shape[1])
            return F.leaky_relu(x, 0.2) * math.sqrt(2)

    class Generator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map, self.start = mlp(8, 16, 8), nn.Parameter(torch.randn(1, 8, 4, 4))
            self.layers = nn.ModuleList([Modulated(8, 8), Modulated(8, 3)])

        def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
            w = self.map(z * torch.rsqrt(z.square().mean(1, keepdim=True) + 1e-8))
            x = self.start.expand(len(z), -1, -1, -1)
            for layer in self.layers:
                x = layer(F.interpolate(x, scale_factor=2, mode="bilinear"), w)
            return x, w

    net = job.to(Generator())
    z, mean = job.randn(4, 8), job.put(torch.zeros(()))

    def loss() -> Tensor:
        image, w = net(z)
        noise = torch.randn_like(image) / math.sqrt(image.shape[2] * image.shape[3])
        (grad,) = torch.autograd.grad((image * noise).sum(), w, create_graph=True)
        lengths = grad.float().square().sum(1).sqrt()
        mean.lerp_(lengths.mean().detach(), 0.01)
        return F.softplus(-image.float().mean()) + (lengths - mean).square().mean()

    return trained(job, net, loss)


@program
def box_assignment(job: Job) -> Step:
    """As YOLOX: boxes are assigned by cost with a number of places for each; complete IoU with its angle."""
    net = job.to(nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 9, 1)))
    x, truth, kinds = job.rand(2, 3, 32, 32), job.rand(2, 3, 4) * 8 + 4, job.ints(4, 2, 3)
    grid = torch.stack(torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij"), -1).flatten(0, 1)
    grid = grid.to(job.device).float()

    def overlap(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        low = torch.max(a[..., :2] - a[..., 2:] / 2, b[..., :2] - b[..., 2:] / 2)
        high = torch.min(a[..., :2] + a[..., 2:] / 2, b[..., :2] + b[..., 2:] / 2)
        both = (high - low).clamp(min=0).prod(-1)
        iou = both / (a[..., 2:].prod(-1) + b[..., 2:].prod(-1) - both + 1e-7)
        angle = 4 / math.pi**2 * (torch.atan(b[..., 2] / b[..., 3]) - torch.atan(a[..., 2] / a[..., 3])).square()
        with torch.no_grad():
            alpha = angle / (1 - iou + angle + 1e-7)
        return iou, iou - (a[..., :2] - b[..., :2]).square().sum(-1) / 512 - alpha * angle

    def loss() -> Tensor:
        out = net(x).flatten(2).transpose(1, 2).float()
        boxes = torch.cat([out[..., :2] + grid, out[..., 2:4].clamp(max=4).exp() * 4], -1)
        total = out.new_zeros(())
        for image in range(2):
            with torch.no_grad(), torch.autocast("cuda", enabled=False):
                iou, _ = overlap(truth[image][:, None], boxes[image][None])
                wanted = F.one_hot(kinds[image], 4).float()[:, None].expand(-1, 256, -1)
                score = (out[image, :, 5:].sigmoid() * out[image, :, 4:5].sigmoid()).sqrt()
                cost = F.binary_cross_entropy(score[None].expand(3, -1, -1), wanted, reduction="none").sum(-1)
                cost = cost - 3 * torch.log(iou + 1e-8)
                counts = iou.topk(10, dim=1).values.sum(1).int().clamp(min=1)
                match = torch.zeros_like(cost)
                for row, count in enumerate(counts.tolist()):
                    match[row][cost[row].topk(count, largest=False).indices] = 1
                many = match.sum(0) > 1
                if many.any():
                    best = cost[:, many].argmin(0)
                    match[:, many] = 0
                    match[best, many] = 1
                chosen = match.sum(0) > 0
                which = match[:, chosen].argmax(0)
            _, quality = overlap(boxes[image][chosen], truth[image][which])
            total = total + (1 - quality).sum() / chosen.sum()
            total = total + F.binary_cross_entropy_with_logits(out[image, :, 4], chosen.float())
            target = F.one_hot(kinds[image][which], 4) * quality.detach().clamp(0)[:, None]
            total = total + F.binary_cross_entropy_with_logits(out[image][chosen][:, 5:], target)
        return total

    return trained(job, net, loss)


@program
def deformable_attention(job: Job) -> Step:
    """As Deformable DETR: each query looks at a few points of several levels."""
    heads, points, sizes = 2, 4, ((8, 8), (4, 4))

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.offsets, self.weights = nn.Linear(16, heads * 2 * points * 2), nn.Linear(16, heads * 2 * points)
            self.value, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, query: Tensor, where: Tensor, memory: Tensor) -> Tensor:
            batch, count, _ = query.shape
            values = self.value(memory).view(batch, -1, heads, 8).split([h * w for h, w in sizes], 1)
            offsets = self.offsets(query).view(batch, count, heads, 2, points, 2)
            scale = torch.tensor([[w, h] for h, w in sizes], device=query.device)
            places = where[:, :, None, None, None] + offsets / scale[None, None, None, :, None]
            weights = self.weights(query).view(batch, count, heads, -1).softmax(-1)
            sampled = []
            for level, (height, width) in enumerate(sizes):
                value = values[level].flatten(2).transpose(1, 2).reshape(batch * heads, 8, height, width)
                grid = (2 * places[:, :, :, level] - 1).transpose(1, 2).flatten(0, 1)
                sampled.append(F.grid_sample(value.float(), grid.float(), padding_mode="zeros", align_corners=False))
            weights = weights.transpose(1, 2).reshape(batch * heads, 1, count, -1)
            out = (torch.stack(sampled, -2).flatten(-2) * weights).sum(-1).view(batch, 16, count)
            return self.out(out.transpose(1, 2))  # type: ignore[no-any-return]

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.where = nn.Embedding(6, 16), nn.Linear(16, 2)
            self.cross, self.norm = Attention(), nn.LayerNorm(16)
            self.box = mlp(16, 16, 4)

        def forward(self, memory: Tensor) -> Tensor:
            query = self.query.weight.expand(len(memory), -1, -1)
            where = self.where(query).sigmoid()
            query = self.norm(query + self.cross(query, where, memory))
            shift = self.box(query)
            clamped = where.clamp(1e-5, 1 - 1e-5)
            return torch.cat([shift[..., :2] + torch.log(clamped / (1 - clamped)), shift[..., 2:]], -1).sigmoid()

    net = job.to(Decoder())
    memory, truth = job.randn(2, 80, 16), job.rand(2, 6, 4)
    return trained(job, net, lambda: F.l1_loss(net(memory).float(), truth))


@program
def gaussian_splats(job: Job) -> Step:
    """Gaussians from quaternions and scales, projected, sorted by depth and blended from front to back."""
    count = 24
    shapes = {"place": (count, 3), "turn": (count, 4), "size": (count, 3), "colour": (count, 3), "opacity": (count,)}
    net = job.to(nn.ParameterDict({name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}))
    image = job.rand(12, 12, 3)
    axis = torch.linspace(-1, 1, 12)
    pixels = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).to(job.device)

    def loss() -> Tensor:
        w, x, y, z = F.normalize(net["turn"], dim=-1).unbind(-1)
        rows = [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)]
        rows += [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)]
        rows += [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)]
        half = torch.stack(rows, -1).view(-1, 3, 3) @ torch.diag_embed(torch.exp(net["size"].clamp(-3, 0)))
        spread = half @ half.mT
        depth = net["place"][:, 2] + 4
        flat = net["place"][:, :2] / depth[:, None]
        jacobian = torch.zeros(count, 2, 3, device=depth.device)
        jacobian[:, 0, 0] = jacobian[:, 1, 1] = 1 / depth
        jacobian[:, :, 2] = -flat / depth[:, None]
        low = (jacobian @ spread @ jacobian.mT).float() + 0.05 * torch.eye(2, device=depth.device)
        inverse = torch.linalg.inv(low)
        order = depth.argsort()
        apart = pixels[:, :, None] - flat.float()[order]
        power = -0.5 * torch.einsum("hwni,nij,hwnj->hwn", apart, inverse[order], apart)
        alpha = (torch.sigmoid(net["opacity"])[order] * power.exp()).clamp(max=0.99)
        light = torch.cumprod(torch.cat([torch.ones_like(alpha[..., :1]), 1 - alpha[..., :-1]], -1), -1)
        shown = ((alpha * light)[..., None] * torch.sigmoid(net["colour"])[order]).sum(2)
        return F.l1_loss(shown.float(), image)

    return trained(job, net, loss, lr=1e-2)


@program
def hash_grid(job: Job) -> Step:
    """As Instant NGP: corners of cells are hashed into tables of several resolutions, and interpolated."""
    primes = torch.tensor([1, 2654435761, 805459861])

    class Encoding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ParameterList([nn.Parameter(torch.rand(256, 2) * 2e-4 - 1e-4) for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            corners = torch.tensor([[i, j, k] for i in (0, 1) for j in (0, 1) for k in (0, 1)], device=x.device)
            features = []
            for level, table in enumerate(self.tables):
                scaled = x * (4 * 1.6**level)
                cell = scaled.floor()
                part = (scaled - cell)[:, None]
                at = (cell.long()[:, None] + corners) * primes.to(x.device)
                index = (at[..., 0] ^ at[..., 1] ^ at[..., 2]) & 255
                weights = torch.where(corners.bool(), part, 1 - part).prod(-1, keepdim=True)
                features.append((table[index] * weights).sum(1))
            return torch.cat(features, -1)

    net = job.to(nn.Sequential(Encoding(), mlp(8, 16, 4)))
    x = job.rand(200, 3)

    def loss() -> Tensor:
        density, colour = net(x).view(20, 10, 4).split([1, 3], -1)
        opacity = 1 - torch.exp(-F.softplus(density[..., 0].float()) * 0.1)
        weights = opacity * torch.cumprod(1 - opacity + 1e-10, -1).roll(1, -1)
        return ((weights[..., None] * colour.sigmoid()).sum(1) - 0.5).square().mean()

    return trained(job, net, loss, lr=1e-2)


@program
def forces(job: Job) -> Step:
    """As SchNet: energies of molecules from distances, and forces as their gradient, both trained."""

    class Interaction(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.atoms, self.filter = nn.Embedding(10, 16), nn.ModuleList([mlp(20, 16, 16) for _ in range(2)])
            self.mix, self.out = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)]), mlp(16, 16, 1)
            self.register_buffer("centres", torch.linspace(0, 5, 20))

        def forward(self, kinds: Tensor, places: Tensor, edges: Tensor, molecule: Tensor) -> Tensor:
            source, target = edges
            distance = (places[source] - places[target]).norm(dim=-1)
            basis = torch.exp(-10 * (distance[:, None] - self.centres).square())
            cut = 0.5 * (torch.cos(distance * math.pi / 5) + 1) * (distance < 5)
            h = self.atoms(kinds)
            for kernel, mix in zip(self.filter, self.mix, strict=True):
                message = h[source] * kernel(basis) * cut[:, None]
                h = h + mix(torch.zeros_like(h).index_add(0, target, message.to(h.dtype)))
            energy = self.out(F.silu(h)).float().squeeze(-1)
            return torch.zeros(2, device=energy.device).scatter_add(0, molecule, energy)

    net = job.to(Interaction())
    kinds, places, molecule = job.ints(10, 12), job.randn(12, 3), torch.arange(12).to(job.device) // 6
    pairs = [(i, j) for i in range(12) for j in range(12) if i != j and i // 6 == j // 6]
    edges = torch.tensor(pairs).T.contiguous().to(job.device)
    energies, wanted = job.randn(2), job.randn(12, 3)

    def loss() -> Tensor:
        at = places.clone().requires_grad_()
        energy = net(kinds, at, edges, molecule)
        (grad,) = torch.autograd.grad(energy.sum(), at, create_graph=True)
        return F.mse_loss(energy, energies) + 100 * F.mse_loss(-grad, wanted)

    return trained(job, net, loss)


@program
def recommender(job: Job) -> Step:
    """As DLRM: bags of embeddings with weights, products of all pairs, an optimizer for sparse gradients."""
    bags = job.to(nn.ModuleList([nn.EmbeddingBag(50, 8, mode="sum", sparse=True) for _ in range(3)]))
    bottom, top = job.to(mlp(4, 16, 8)), job.to(mlp(8 + 6, 16, 1))
    sparse = torch.optim.SparseAdam(bags.parameters(), lr=0.01)
    dense = torch.optim.Adagrad([*bottom.parameters(), *top.parameters()], lr=0.01)
    x, clicks = job.randn(16, 4), job.ints(2, 16).float()
    index, offsets = job.ints(50, 3, 40), torch.arange(0, 40, 2.5).long().to(job.device)
    pairs = torch.tril_indices(4, 4, offset=-1).to(job.device)

    def step() -> None:
        with job.autocast():
            low = bottom(x)
            rows = torch.stack([low, *(bag(i, offsets).to(low.dtype) for bag, i in zip(bags, index, strict=True))], 1)
            products = torch.bmm(rows, rows.mT)[:, pairs[0], pairs[1]]
            loss = F.binary_cross_entropy_with_logits(top(torch.cat([low, products], 1)).squeeze(1).float(), clicks)
        for optimizer in (sparse, dense):
            optimizer.zero_grad()
        loss.backward()
        for optimizer in (sparse, dense):
            optimizer.step()

    return step


@program
def vocoder(job: Job) -> Step:
    """As HiFi-GAN: transposed convolutions with normalised weights, judges of periods, losses on spectra."""
    from torch.nn.utils.parametrizations import weight_norm

    class Judge(nn.Module):
        def __init__(self, period: int) -> None:
            super().__init__()
            self.period = period
            sizes = ((1, 4), (4, 8), (8, 1))
            self.layers = nn.ModuleList([weight_norm(nn.Conv2d(a, b, (5, 1), (3, 1), (2, 0))) for a, b in sizes])

        def forward(self, x: Tensor) -> list[Tensor]:
            x = F.pad(x, (0, -x.shape[-1] % self.period), "reflect")
            x, seen = x.view(len(x), 1, -1, self.period), []
            for layer in self.layers:
                x = F.leaky_relu(layer(x), 0.1)
                seen.append(x)
            return seen

    up = [weight_norm(nn.ConvTranspose1d(a, b, 8, 4, 2)) for a, b in ((8, 8), (8, 4))]
    maker = job.to(nn.Sequential(up[0], nn.LeakyReLU(0.1), up[1], nn.LeakyReLU(0.1), nn.Conv1d(4, 1, 7, padding=3)))
    judges = job.to(nn.ModuleList([Judge(2), Judge(3)]))
    mel, sound = job.randn(2, 8, 16), torch.tanh(job.randn(2, 1, 256))
    window, bank = torch.hann_window(64).to(job.device), job.rand(8, 33)
    makes = torch.optim.AdamW(maker.parameters(), 2e-4, betas=(0.8, 0.99))
    tells = torch.optim.AdamW(judges.parameters(), 2e-4, betas=(0.8, 0.99))

    def spectrum(x: Tensor) -> Tensor:
        bins = torch.stft(x.float().squeeze(1), 64, 16, window=window, return_complex=True)
        return torch.log((bank @ torch.sqrt(bins.abs().square() + 1e-9)).clamp(min=1e-5))

    def step() -> None:
        with job.autocast():
            made = torch.tanh(maker(mel))
            loss = made.new_zeros(())
            for judge in judges:
                loss = loss + (judge(sound)[-1] - 1).square().mean() + judge(made.detach())[-1].square().mean()
        job.update(loss.float(), tells)
        with job.autocast():
            total = 45 * F.l1_loss(spectrum(made), spectrum(sound))
            for judge in judges:
                real, false = judge(sound), judge(made)
                total = total + sum(F.l1_loss(b, a.detach()) for a, b in zip(real, false, strict=True))
                total = total + (false[-1] - 1).square().mean()
        job.update(total.float(), makes)

    return step


@program
def triangle_updates(job: Job) -> Step:
    """As AlphaFold's Evoformer: gated attention with a bias of pairs, outer products, sums over triangles."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.LayerNorm(8) for _ in range(4)])
            self.qkv, self.gate, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8), nn.Linear(8, 8)
            self.bias = nn.Linear(8, 2, bias=False)
            self.left, self.right = nn.Linear(8, 16), nn.Linear(8, 16)
            self.opened, self.merged, self.outer = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(16, 8)

        def forward(self, rows: Tensor, pairs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            x = self.norms[0](rows)
            q, k, v = (t.unflatten(-1, (2, 4)) for t in self.qkv(x).chunk(3, -1))
            scores = torch.einsum("sqhc,skhc->shqk", q * 0.5, k) + 1e9 * (mask[:, None, None] - 1)
            scores = scores + self.bias(self.norms[1](pairs)).permute(2, 0, 1)
            mixed = torch.einsum("shqk,skhc->sqhc", scores.softmax(-1), v).flatten(-2)
            rows = rows + self.out(torch.sigmoid(self.gate(x)) * mixed)
            a, b = (rows * mask[..., None]).split(4, -1)
            counts = torch.einsum("si,sj->ij", mask, mask)
            pairs = pairs + self.outer(torch.einsum("sic,sjd->ijcd", a, b).flatten(-2) / (1e-3 + counts[..., None]))
            z = self.norms[2](pairs)
            (a, c), (b, d) = self.left(z).chunk(2, -1), self.right(z).chunk(2, -1)
            product = torch.einsum("ikc,jkc->ijc", a * torch.sigmoid(c), b * torch.sigmoid(d))
            pairs = pairs + torch.sigmoid(self.opened(z)) * self.merged(F.layer_norm(product, (8,)))
            return rows, self.norms[3](pairs)

    net = job.to(nn.ModuleList([Block(), Block()]))
    rows, pairs, mask = job.randn(4, 10, 8), job.randn(10, 10, 8), job.put((torch.rand(4, 10) > 0.2).float())

    def loss() -> Tensor:
        a, b = rows, pairs
        for block in net:
            a, b = block(a, b, mask)
        return a.float().square().mean() + (b + b.transpose(0, 1)).float().logsumexp(-1).mean()

    return trained(job, net, loss, clip=0.1)


@program
def scans(job: Job) -> Step:
    """As Mamba 2 and minGRU: scans as matrices of sums of segments, and in logarithms."""

    class Scan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps, self.ins, self.outs = nn.Linear(8, 2), nn.Linear(8, 4), nn.Linear(8, 4)
            self.decay = nn.Parameter(torch.log(torch.arange(1.0, 3.0)))
            self.gates, self.hidden = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            delta = F.softplus(self.steps(x)).float()
            a = -torch.exp(self.decay) * delta
            a = a.unflatten(1, (4, 4)).permute(0, 3, 1, 2)
            total = a.cumsum(-1)
            segments = (total[..., :, None] - total[..., None, :]).masked_fill(
                ~torch.tril(torch.ones(4, 4, dtype=torch.bool, device=x.device)), -torch.inf
            )
            chunks = (x.unflatten(-1, (2, 4)) * delta[..., None]).unflatten(1, (4, 4))
            b, c = self.ins(x).unflatten(1, (4, 4)).float(), self.outs(x).unflatten(1, (4, 4)).float()
            inside = torch.einsum("bcln,bcsn,bhcls,bcshp->bclhp", c, b, segments.exp(), chunks.float())
            states = torch.einsum("bcln,bhcl,bclhp->bchpn", b, torch.exp(total[..., -1:] - total), chunks.float())
            kept = [torch.zeros_like(states[:, 0])]
            for i in range(3):
                kept.append(kept[-1] * total[:, :, i, -1].exp()[..., None, None] + states[:, i])
            across = torch.einsum("bcln,bchpn,bhcl->bclhp", c, torch.stack(kept, 1), total.exp())
            y = (inside + across).flatten(3).flatten(1, 2)
            gate, hidden = self.gates(y).float(), self.hidden(y).float()
            keep, take = -F.softplus(gate), -F.softplus(-gate)
            value = torch.where(hidden >= 0, (F.relu(hidden) + 0.5).log(), -F.softplus(-hidden))
            sums = keep.cumsum(1)
            return (sums + torch.logcumsumexp(take + value - sums, 1)).exp()

    net = job.to(Scan())
    x = job.randn(2, 16, 8)
    return trained(job, net, lambda: (net(x) - x).square().mean())


@program
def generation(job: Job) -> Step:
    """Tokens one after the other with a growing cache: top k, top p, penalties, beams and Gumbel noise."""
    net = job.to(nn.ModuleDict({"tokens": nn.Embedding(40, 16), "qkv": nn.Linear(16, 48), "head": nn.Linear(16, 40)}))

    @torch.inference_mode()
    def step() -> None:
        ids, past = job.ints(40, 3, 1), None
        for _ in range(6):
            with job.autocast():
                q, k, v = net["qkv"](net["tokens"](ids[:, -1:])).unflatten(-1, (2, 24)).transpose(1, 2).chunk(3, -1)
                past = (k, v) if past is None else (torch.cat([past[0], k], 2), torch.cat([past[1], v], 2))
                y = F.scaled_dot_product_attention(q, *past).transpose(1, 2).flatten(2)
                scores = net["head"](y)[:, -1].float()
            seen = scores.gather(1, ids)
            scores = scores.scatter(1, ids, torch.where(seen < 0, seen * 1.2, seen / 1.2)) / 0.8
            scores = scores.masked_fill(scores < scores.topk(20)[0][:, -1:], -torch.inf)
            ordered, index = scores.sort(descending=True)
            drop = ordered.softmax(-1).cumsum(-1) > 0.9
            drop[:, 1:] = drop[:, :-1].clone()
            drop[:, 0] = False
            scores = scores.masked_fill(drop.scatter(1, index, drop), -torch.inf)
            chances = scores.softmax(-1)
            first = torch.multinomial(chances, 1)
            second = (chances / torch.empty_like(chances).exponential_()).argmax(-1, keepdim=True)
            best = chances.log().flatten().topk(3)
            beam = ids[best.indices // 40]
            ids = torch.cat([torch.where(first < second, beam, ids), torch.maximum(first, second)], 1)

    return step


@program
def masked_autoencoder(job: Job) -> Step:
    """As MAE: patches in a random order, most of them left out, put back with one token for the missing."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True)
    net = job.to(nn.ModuleDict({"embed": nn.Conv2d(3, 16, 4, 4), "encode": layer, "decode": nn.Linear(16, 48)}))
    token, place = (nn.Parameter(job.put(torch.randn(1, n, 16) * 0.02)) for n in (1, 16))
    net.register_parameter("token", token)
    net.register_parameter("place", place)
    x = job.rand(3, 3, 16, 16)

    def loss() -> Tensor:
        patches = net["embed"](x).flatten(2).transpose(1, 2) + place
        order = torch.rand(3, 16, device=x.device).argsort(1)
        back = order.argsort(1)
        kept = patches.gather(1, order[:, :4, None].expand(-1, -1, 16))
        seen = net["encode"](kept)
        whole = torch.cat([seen, token.expand(3, 12, -1).to(seen.dtype)], 1)
        out = net["decode"](whole.gather(1, back[..., None].expand(-1, -1, 16)) + place).float()
        target = F.unfold(x, 4, stride=4).transpose(1, 2)
        target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6).sqrt()
        mask = (back >= 4).float()
        return ((out - target).square().mean(-1) * mask).sum() / mask.sum()

    return trained(job, net, loss)


@program
def world_model(job: Job) -> Step:
    """As DreamerV3: discrete states with straight-through gradients, balanced divergences, returns, two-hot targets."""
    from torch.distributions import Independent, OneHotCategoricalStraightThrough, kl_divergence

    net = job.to(nn.ModuleDict({"cell": nn.GRUCell(12 + 2, 16), "prior": nn.Linear(16, 12), "value": nn.Linear(16, 9)}))
    net["posterior"] = job.to(nn.Linear(16 + 6, 12))
    seen, actions, rewards = job.randn(5, 3, 6), job.randn(5, 3, 2), job.randn(5, 3)
    bins = torch.linspace(-4, 4, 9).to(job.device)

    def state(logits: Tensor) -> Any:
        chances = 0.99 * logits.float().unflatten(-1, (3, 4)).softmax(-1) + 0.01 / 4
        return Independent(OneHotCategoricalStraightThrough(probs=chances), 1)

    def loss() -> Tensor:
        h, z = seen.new_zeros(3, 16), seen.new_zeros(3, 12)
        total, values = seen.new_zeros(()), []
        for t in range(5):
            h = net["cell"](torch.cat([z, actions[t]], -1), h)
            prior, posterior = state(net["prior"](h)), state(net["posterior"](torch.cat([h, seen[t].to(h.dtype)], -1)))
            z = posterior.rsample().flatten(1)
            fixed = [state(torch.log(d.base_dist.probs).flatten(1).detach()) for d in (posterior, prior)]
            total = total + 0.5 * kl_divergence(fixed[0], prior).clamp(min=1.0).mean()
            total = total + 0.1 * kl_divergence(posterior, fixed[1]).clamp(min=1.0).mean()
            values.append(net["value"](h).float())
        guesses = torch.stack(values)
        with torch.no_grad():
            value = (guesses.softmax(-1) * bins).sum(-1)
            value = torch.sign(value) * torch.expm1(value.abs())
            returns = [value[-1]]
            for t in reversed(range(4)):
                returns.insert(0, rewards[t] + 0.99 * (0.05 * value[t + 1] + 0.95 * returns[0]))
            target = torch.stack(returns)
            target = (torch.sign(target) * torch.log1p(target.abs())).clamp(-4, 4)
            below = (bins <= target[..., None]).sum(-1).sub(1).clamp(0, 7)
            share = (target - bins[below]) / (bins[below + 1] - bins[below])
            hot = F.one_hot(below, 9) * (1 - share[..., None]) + F.one_hot(below + 1, 9) * share[..., None]
        return total + -(hot * guesses.log_softmax(-1)).sum(-1).mean()

    return trained(job, net, loss, clip=100.0)


@program
def optical_flow(job: Job) -> Step:
    """As RAFT: all pairs of features, a pyramid that is looked up where the flow points, a convolutional GRU."""

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gates, self.new = nn.Conv2d(8 + 20, 16, 3, padding=1), nn.Conv2d(8 + 20, 8, 3, padding=1)

        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            z, r = torch.sigmoid(self.gates(torch.cat([h, x], 1))).chunk(2, 1)
            return (1 - z) * h + z * torch.tanh(self.new(torch.cat([r * h, x], 1)))

    parts = {"see": nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.InstanceNorm2d(8), nn.ReLU()), "cell": Cell()}
    net = job.to(nn.ModuleDict({**parts, "flow": nn.Conv2d(8, 2, 3, padding=1)}))
    first, second, truth = job.rand(1, 3, 16, 16), job.rand(1, 3, 16, 16), job.randn(1, 2, 8, 8)
    base = torch.stack(torch.meshgrid(torch.arange(8), torch.arange(8), indexing="xy")).float().to(job.device)
    near = torch.stack(torch.meshgrid(torch.arange(-1, 2), torch.arange(-1, 2), indexing="ij"), -1).float()
    near = near.to(job.device)

    def loss() -> Tensor:
        a, b = (net["see"](image) for image in (first, second))
        all_pairs = (a.flatten(2).mT @ b.flatten(2) / math.sqrt(8)).float().view(64, 1, 8, 8)
        pyramid = [all_pairs, F.avg_pool2d(all_pairs, 2)]
        flow, h, total = torch.zeros_like(truth), torch.tanh(a), truth.new_zeros(())
        for turn in range(3):
            flow = flow.detach()
            at = (base + flow[0]).permute(1, 2, 0).reshape(64, 1, 1, 2)
            seen = []
            for level, pairs in enumerate(pyramid):
                grid = (at / 2**level + near) * 2 / (pairs.shape[-1] - 1) - 1
                seen.append(F.grid_sample(pairs, grid, align_corners=True).view(8, 8, 9))
            x = torch.cat([torch.cat(seen, -1).permute(2, 0, 1)[None], flow], 1)
            h = net["cell"](h, x.to(h.dtype))
            flow = flow + net["flow"](h).float()
            total = total + 0.8 ** (2 - turn) * (flow - truth).abs().mean()
        return total

    return trained(job, net, loss)


@program
def sparse_attention(job: Job) -> Step:
    """As TabNet: sparsemax over features, normalised in small groups; losses by Lovasz and by ranks."""

    def sparsemax(z: Tensor) -> Tensor:
        ordered = z.sort(-1, descending=True).values
        ranks = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
        sums = ordered.cumsum(-1) - 1
        count = (ranks * ordered > sums).sum(-1, keepdim=True)
        return F.relu(z - sums.gather(-1, count - 1) / count)

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.masks = nn.BatchNorm1d(8, momentum=0.02), nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
            self.change, self.out = nn.Linear(8, 16), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            prior, total, entropy = torch.ones_like(x), torch.zeros_like(x), x.new_zeros(())
            a = x
            for layer in self.masks:
                scores = torch.cat([self.norm(part) for part in layer(a).float().chunk(2)])
                mask = sparsemax(scores * prior)
                prior = prior * (1.3 - mask)
                entropy = entropy - (mask * torch.log(mask + 1e-15)).sum(-1).mean()
                a = F.glu(self.change(mask * x), -1).float()
                total = total + F.relu(a)
            return self.out(total), entropy

    net = job.to(Steps())
    x, y = job.randn(16, 8), job.ints(3, 16)

    def lovasz(chances: Tensor) -> Tensor:
        losses = []
        for kind in range(3):
            hit = (y == kind).float()
            errors, order = (hit - chances[:, kind]).abs().sort(descending=True)
            hit = hit[order]
            both, either = hit.sum() - hit.cumsum(0), hit.sum() + (1 - hit).cumsum(0)
            jaccard = 1 - both / either
            jaccard[1:] = jaccard[1:] - jaccard[:-1].clone()
            losses.append(torch.dot(errors, jaccard.detach()))
        return torch.stack(losses).mean()

    def loss() -> Tensor:
        scores, entropy = net(x)
        wide = scores.float()
        apart = (wide[:, None, 0] - wide[None, :, 0]) / 0.1
        ranks = torch.sigmoid(apart).sum(0) + 0.5
        gains = (2.0 ** y.float() - 1) / torch.log2(ranks + 1)
        return lovasz(wide.softmax(-1)) + 1e-3 * entropy - 0.01 * gains.mean()

    return trained(job, net, loss)


@program
def self_distillation(job: Job) -> Step:
    """As DINO: crops of two sizes, a teacher that follows, centred and sharpened; the last layer is frozen at first."""
    import copy

    def head() -> nn.Module:
        net = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), mlp(8, 16, 8))
        return nn.Sequential(net, nn.utils.parametrizations.weight_norm(nn.Linear(8, 12, bias=False)))

    student = job.to(head())
    student[1].parametrizations.weight.original0.data.fill_(1)
    student[1].parametrizations.weight.original0.requires_grad = False
    teacher = copy.deepcopy(student).requires_grad_(False)
    centre, crops = job.put(torch.zeros(1, 12)), [job.rand(4, 3, n, n) for n in (16, 16, 8, 8)]
    optimizer = torch.optim.AdamW([p for p in student.parameters() if p.requires_grad], lr=1e-3)

    def step() -> None:
        with job.autocast():
            with torch.no_grad():
                targets = teacher(torch.cat(crops[:2])).float()
                sharp = ((targets - centre) / 0.04).softmax(-1).chunk(2)
            out = torch.cat([student(torch.cat(crops[:2])), student(torch.cat(crops[2:]))]).float() / 0.1
            total = sum(
                -(q * p.log_softmax(-1)).sum(-1).mean()
                for i, q in enumerate(sharp)
                for j, p in enumerate(out.chunk(4))
                if i != j
            )
        optimizer.zero_grad()
        job.scaler.scale(total).backward()
        job.scaler.unscale_(optimizer)
        for p in student[1].parameters():
            p.grad = None
        for p in student.parameters():
            if p.grad is not None:
                p.grad.mul_((3.0 / (p.grad.norm() + 1e-6)).clamp(max=1))
        job.scaler.step(optimizer)
        job.scaler.update()
        with torch.no_grad():
            for p, q in zip(student.parameters(), teacher.parameters(), strict=True):
                q.mul_(0.996).add_(p.detach(), alpha=0.004)
            centre.mul_(0.9).add_(targets.mean(0, keepdim=True), alpha=0.1)

    return step


@program
def point_groups(job: Job) -> Step:
    """As PointNet++: farthest points, balls around them, features by inverse distances of three neighbours."""
    net = job.to(nn.ModuleDict({"near": mlp(6, 16, 16), "back": nn.Conv1d(16 + 3, 4, 1)}))
    points, labels = job.rand(2, 64, 3), job.ints(4, 2, 64)
    batch = torch.arange(2).to(job.device)

    def farthest(count: int) -> Tensor:
        chosen = torch.zeros(2, count, dtype=torch.long, device=points.device)
        distance = torch.full((2, 64), 1e10, device=points.device)
        last = torch.randint(0, 64, (2,), device=points.device)
        for i in range(count):
            chosen[:, i] = last
            apart = (points - points[batch, last][:, None]).square().sum(-1)
            closer = apart < distance
            distance[closer] = apart[closer]
            last = distance.max(-1).indices
        return chosen

    def loss() -> Tensor:
        centres = points[batch[:, None], farthest(8)]
        square = -2 * centres @ points.mT
        square = square + centres.square().sum(-1)[..., None] + points.square().sum(-1)[:, None]
        index = torch.arange(64, device=points.device).expand(2, 8, -1).clone()
        index[square > 0.2] = 64
        index = index.sort(-1).values[..., :16]
        first = index[..., :1].expand_as(index)
        index = torch.where(index == 64, first, index).clamp(max=63)
        grouped = points[batch[:, None, None], index]
        ball = torch.cat([grouped - centres[:, :, None], grouped], -1)
        features = net["near"](ball).amax(2)
        distance, nearest = torch.cdist(points, centres).topk(3, largest=False)
        weights = 1 / (distance + 1e-8)
        weights = weights / weights.sum(-1, keepdim=True)
        back = (features[batch[:, None, None], nearest] * weights[..., None]).sum(2)
        return F.nll_loss(net["back"](torch.cat([back, points], -1).mT).log_softmax(1), labels)

    return trained(job, net, loss)


@program
def float8_layers(job: Job) -> Step:
    """Weights and inputs that are rounded to float8 with a scale of their own, gradients in the wide format."""

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
            scale = torch.finfo(dtype).max / x.abs().amax().clamp(min=1e-12).float()
            return ((x * scale).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype).float() / scale).to(
                x.dtype
            )

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return Rounded.apply(grad, torch.float8_e5m2), None

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            rounded = [Rounded.apply(t, torch.float8_e4m3fn) for t in (x, self.weight)]
            return F.linear(rounded[0], rounded[1], self.bias)

    net = job.to(nn.Sequential(Layer(8, 32), nn.GELU(approximate="tanh"), nn.RMSNorm(32), Layer(32, 4)))
    x = job.randn(16, 8)
    return trained(job, net, lambda: F.huber_loss(net(x).float(), x[:, :4]))


@program
def prefetched(job: Job) -> Step:
    """Batches that are copied and normalised in another stream while the step runs; gradients in one flat buffer."""
    net = job.to(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)))
    parameters = list(net.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters), device=job.device)
    at = 0
    for p in parameters:
        p.grad = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    side = torch.cuda.Stream()
    mean, std = (job.put(torch.rand(1, 3, 1, 1) * 255) for _ in range(2))
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)

    def batch() -> tuple[Tensor, Tensor]:
        x, y = torch.randint(0, 256, (8, 3, 8, 8), dtype=torch.uint8), torch.randint(0, 4, (8,))
        with torch.cuda.stream(side):
            x, y = x.to(job.device, non_blocking=True), y.to(job.device, non_blocking=True)
            return job.put(x.float().sub_(mean).div_(std + 1)), y

    def step() -> None:
        torch.cuda.current_stream().wait_stream(side)
        x, y = batch()
        torch.cuda.current_stream().wait_stream(side)
        x.record_stream(torch.cuda.current_stream())
        with job.autocast():
            loss = F.cross_entropy(net(x), y, label_smoothing=0.1)
        flat.zero_()
        loss.backward()
        flat.mul_((1.0 / flat.norm()).clamp(max=1))
        optimizer.step()

    return step
