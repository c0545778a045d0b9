"""wkv on GPUs: launches the Triton kernels, and uses only a variant that passed its check on this device.

``RWKV_WKV=name`` chooses a variant (``chunked``, ``tiled``, ``sequential``, ``scan``) instead of the first one that
works; ``bench_wkv.py`` times them all.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import scan

Forward = Callable[[Tensor, Tensor, Tensor, Tensor], "tuple[Tensor, Tensor]"]
Backward = Callable[..., "tuple[Tensor, Tensor, Tensor, Tensor]"]


@dataclass(frozen=True)
class Variant:
    """One way to compute wkv on a GPU."""

    name: str
    forward: Forward
    backward: Backward


def forward(w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output y and the logarithm of its denominator, which backward needs."""
    return chosen(k.device).forward(w, u, k, v)


def backward(
    w: Tensor, u: Tensor, k: Tensor, v: Tensor, y: Tensor, log_total: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of w, u, k and v."""
    return chosen(k.device).backward(w, u, k, v, y, log_total, grad)


@cache
def chosen(device: torch.device) -> Variant:
    """The variant used on this device: the one asked for, or the first that agrees with the scan in float64."""
    wanted = os.environ.get("RWKV_WKV")
    if wanted:
        if wanted not in VARIANTS:
            raise ValueError(f"RWKV_WKV={wanted!r}: expected one of {', '.join(VARIANTS)}")
        return VARIANTS[wanted]
    for variant in VARIANTS.values():
        problem = check(variant, device)
        if problem is None:
            return variant
        warnings.warn(f"wkv: variant {variant.name!r} is not used on {device}: {problem}", stacklevel=2)
    raise RuntimeError(f"wkv: no variant works on {device}; see the warnings above")


def check(variant: Variant, device: torch.device) -> str | None:
    """What is wrong with a variant on this device, or None: a small case, odd sizes, strong and weak decays."""
    generator = torch.Generator().manual_seed(0)
    batch, steps, channels = 2, 150, 70
    w = -torch.exp(torch.linspace(-8, 4, channels)).to(device)
    u = torch.randn(channels, generator=generator).to(device)
    k = 4 * torch.randn(batch, steps, channels, generator=generator).to(device)
    v, grad = (torch.randn(batch, steps, channels, generator=generator).to(device) for _ in range(2))
    exact = [x.double().cpu() for x in (w, u, k, v, grad)]
    try:
        y, total = variant.forward(w, u, k, v)
        got = (y, total, *variant.backward(w, u, k, v, y, total, grad))
    except Exception as error:  # whatever the compiler or the driver says: another variant may still work
        return f"{type(error).__name__}: {str(error).strip()[:300]}"
    right_y, right_total = scan.forward(*exact[:4])
    want = (right_y, right_total, *scan.backward(*exact[:4], right_y, right_total, exact[4]))  # type: ignore[call-arg]
    for name, x, right in zip(("y", "log_total", "grad_w", "grad_u", "grad_k", "grad_v"), got, want):
        off = float((x.double().cpu() - right).norm() / right.norm())
        if not off < 1e-4:
            return f"{name} is off by {off:.1e} (relative norm)"
    return None


def _prepared(w: Tensor, u: Tensor, *rest: Tensor) -> list[Tensor]:
    dtype = scan.compute_dtype(w, u, *rest[:2])
    return [w.to(dtype).contiguous(), u.to(dtype).contiguous(), *(x.contiguous() for x in rest)]


def _variant(name: str, launch_forward: Callable[..., None], launch_backward: Callable[..., list[Tensor]]) -> Variant:
    """A variant from its launches, which get prepared inputs and memory for the results.

    The one of backward answers with the gradients of w and u by batch row (and chunk): they are summed up here.
    """

    def forward(w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        w, u, k, v = _prepared(w, u, k, v)
        y, total = torch.empty_like(k, dtype=w.dtype), torch.empty_like(k, dtype=w.dtype)
        launch_forward(w, u, k, v, y, total)
        return y, total

    def backward(
        w: Tensor, u: Tensor, k: Tensor, v: Tensor, y: Tensor, total: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dtypes = w.dtype, u.dtype
        inputs = _prepared(w, u, k, v, y, total, grad)
        gk, gv = torch.empty_like(inputs[2]), torch.empty_like(inputs[3])
        gw, gu = (g.sum(tuple(range(g.dim() - 1))) for g in launch_backward(*inputs, gk, gv))
        return gw.to(dtypes[0]), gu.to(dtypes[1]), gk, gv

    return Variant(name, forward, backward)


def _walking(name: str, chunk: int | None, block: int = 64, warps: int = 1) -> Variant:
    """Walk through time in chunks (chunk is None: in one piece)."""
    tail = {"BLOCK": block, "num_warps": warps}

    def sizes(k: Tensor) -> tuple[int, int, int, int]:
        batch, steps, channels = k.shape
        length = min(chunk or steps, steps)
        return batch, length, -(-steps // length), -(-channels // block)

    def launch_forward(w: Tensor, u: Tensor, k: Tensor, v: Tensor, y: Tensor, total: Tensor) -> None:
        from . import triton_kernels as kernels

        (_, steps, channels), (batch, length, chunks, blocks) = k.shape, sizes(k)
        sums = w.new_empty(3, batch, chunks, channels)
        if chunks > 1:
            kernels.chunk_forward_sums[blocks, chunks - 1, batch](
                w, k, v, sums, steps, channels, chunks, CHUNK=length, **tail
            )
        kernels.walk_forward[blocks, chunks, batch](w, u, k, v, y, total, sums, steps, channels, chunks, length, **tail)

    def launch_backward(w: Tensor, u: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> list[Tensor]:
        from . import triton_kernels as kernels

        y, total, grad, gk, gv = rest
        (_, steps, channels), (batch, length, chunks, blocks) = k.shape, sizes(k)
        gw, gu = w.new_empty(batch, chunks, channels), w.new_empty(batch, chunks, channels)
        sums = w.new_empty(5, batch, chunks, channels)
        if chunks > 1:
            kernels.chunk_backward_sums[blocks, chunks - 1, batch](
                w, y, total, grad, sums, steps, channels, chunks, CHUNK=length, **tail
            )
        kernels.walk_backward[blocks, chunks, batch](
            w, u, k, v, y, total, grad, sums, gw, gu, gk, gv, steps, channels, chunks, length, **tail
        )
        return [gw, gu]

    return _variant(name, launch_forward, launch_backward)


def _tiled(name: str, tile: int, block: int, warps: int) -> Variant:
    """Scan a tile of time steps at once."""
    tail = {"TILE": tile, "BLOCK": block, "num_warps": warps}

    def launch_forward(w: Tensor, u: Tensor, k: Tensor, v: Tensor, y: Tensor, total: Tensor) -> None:
        from . import triton_kernels as kernels

        batch, steps, channels = k.shape
        kernels.tile_forward[-(-channels // block), batch](w, u, k, v, y, total, steps, channels, **tail)

    def launch_backward(w: Tensor, u: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> list[Tensor]:
        from . import triton_kernels as kernels

        y, total, grad, gk, gv = rest
        batch, steps, channels = k.shape
        gw, gu = w.new_empty(batch, channels), w.new_empty(batch, channels)
        kernels.tile_backward[-(-channels // block), batch](
            w, u, k, v, y, total, grad, gw, gu, gk, gv, steps, channels, **tail
        )
        return [gw, gu]

    return _variant(name, launch_forward, launch_backward)


def candidates() -> dict[str, Variant]:
    """More shapes of the same kernels, for the benchmark."""
    made: list[Any] = [_walking(f"chunked-{c}x{b}", c, b) for c in (16, 32, 64) for b in (64, 128)]
    made += [_walking("chunked-32x256", 32, 256, 2), _walking("chunked-64x256", 64, 256, 2)]
    made += [_walking("sequential-32", None, 32)]
    made += [_tiled(f"tiled-{t}x{b}", t, b, n) for t, b, n in ((32, 32, 4), (64, 16, 4), (64, 32, 8), (128, 16, 8))]
    return {variant.name: variant for variant in made}


# In order of preference. Others follow only where the ones before them failed their check.
VARIANTS = {
    variant.name: variant
    for variant in (
        _walking("chunked", 32, 256, 2),  # the fastest of the candidates on an H200
        _tiled("tiled", 64, 16, 4),
        _walking("sequential", None, 32),
        Variant("scan", scan.forward, scan.backward),
    )
}
