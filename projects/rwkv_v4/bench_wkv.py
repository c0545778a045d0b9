"""Checks and times every way to compute wkv on a device: ``python -m projects.rwkv_v4.bench_wkv --device cuda``.

Each variant is compared with the float64 reference, forward and backward, at ordinary and extreme decays, and timed in
turn with the others in the same run. Bandwidth counts what must move (each input read once, each output written once).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ditorch

from .wkv import gpu, native, plain_cuda, scan, wkv_reference
from .wkv.gpu import Variant

NAMES = ("y", "w", "u", "k", "v")
SETS = 4
"""Input sets that are timed in turn, so that none is still in the cache when its turn comes."""


def inputs(batch: int, steps: int, channels: int, dtype: torch.dtype, seed: int, extreme: bool = False) -> list[Tensor]:
    """w, u, k, v and a gradient for y, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    low, high, size = (-12.0, 8.0, 20.0) if extreme else (-5.0, 3.0, 1.0)
    w = -torch.exp(torch.linspace(low, high, channels))
    u = torch.randn(channels, generator=generator)
    k, v, grad = (torch.randn(batch, steps, channels, generator=generator) for _ in range(3))
    return [w, u, (size * k).to(dtype), v.to(dtype), grad]


def variants(device: str) -> tuple[list[Variant], dict[str, str]]:
    """What can be run here, and what cannot with the reason."""
    if device != "cuda" or ditorch.backend.name != "cuda":
        operator = Variant("operator", torch.ops.rwkv_v4.wkv, torch.ops.rwkv_v4.wkv_backward)
        found = [Variant("C++ SIMD", native.forward, native.backward)] if device == "cpu" else [operator]
        return [*found, Variant("torch scan", scan.forward, scan.backward)], {}
    found, missing = [v for v in gpu.VARIANTS.values() if v.name != "scan"] + list(gpu.candidates().values()), {}
    # for each shape on its own: what is compiled for all shapes is slower
    forward = torch.compile(scan.forward, dynamic=False)
    compiled = Variant("torch.compile scan", forward, torch.compile(scan.backward, dynamic=False))
    for name, make in (("plain CUDA", plain_cuda.build), ("torch.compile scan", lambda: compiled), ("fla", _fla)):
        try:
            found.append(make())
        except Exception as error:  # an alternative that is not here is a line in the report
            missing[name] = f"{type(error).__name__}: {str(error).strip()[:200]}"
    return [*found, Variant("torch scan", scan.forward, scan.backward)], missing


def _fla() -> Variant:
    from fla.ops.rwkv4 import fused_recurrent_rwkv4

    graph: list[Any] = []

    def forward(w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        leaves = [x.detach().requires_grad_() for x in (torch.log(-w), u, k.float(), v.float())]
        state = k.new_zeros(k.shape[0], 3, 1, k.shape[2], dtype=torch.float32)
        state[:, 2] = -1e38
        with torch.enable_grad():
            y, _ = fused_recurrent_rwkv4(*leaves, state)
        graph[:] = [leaves, y]
        return y.detach(), y.detach()

    def backward(w: Tensor, u: Tensor, k: Tensor, v: Tensor, y: Tensor, total: Tensor, grad: Tensor) -> Any:
        leaves, out = graph
        gd, gu, gk, gv = torch.autograd.grad(out, leaves, grad, retain_graph=True)
        return gd / w, gu, gk.to(k.dtype), gv.to(v.dtype)  # it is given log(-w)

    return Variant("fla", forward, backward)


def errors(variant: Variant, device: str, dtype: torch.dtype, extreme: bool) -> dict[str, float]:
    """Relative error (norm) of y and of each gradient against the float64 reference."""
    w, u, k, v, grad = inputs(2, 203, 192, dtype, 1, extreme)
    leaves = [x.double().requires_grad_() for x in (w, u, k, v)]
    y = wkv_reference(*leaves)
    want = [y.detach(), *torch.autograd.grad(y, leaves, grad.double())]
    w, u, k, v, grad = (x.to(device) for x in (w, u, k, v, grad))
    out, total = variant.forward(w, u, k, v)
    got = [out, *variant.backward(w, u, k, v, out, total, grad)]
    return {n: float((a.double().cpu() - b).norm() / b.norm()) for n, a, b in zip(NAMES, got, want)}


def timed(call: Callable[[int], Any], device: str, budget: float = 0.4) -> tuple[float, float]:
    """Median seconds of a call and its spread (quartiles), warmed up; ``call`` gets the number of the input set."""
    for i in range(SETS if device == "cuda" else 1):
        call(i)
    _wait(device)
    started = time.perf_counter()
    call(0)
    _wait(device)
    count = max(3, min(400, int(budget / max(time.perf_counter() - started, 1e-6))))
    if device == "cuda":
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for i, (start, end) in enumerate(marks):
            start.record()
            call(i % SETS)
            end.record()
        _wait(device)
        seconds = [start.elapsed_time(end) / 1e3 for start, end in marks]
    else:
        seconds = []
        for i in range(count):
            started = time.perf_counter()
            call(i % SETS)
            seconds.append(time.perf_counter() - started)
    low, middle, high = statistics.quantiles(seconds, n=4)
    return middle, high - low


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def copy_bandwidth(device: str) -> float:
    """Bytes per second of a large copy on the device, read and written."""
    size = 2**30 if ditorch.backend.name == "cuda" and device == "cuda" else 2**26
    source = [torch.randn(size // 4, device=device) for _ in range(2)]
    target = torch.empty_like(source[0])
    return 2 * size / timed(lambda i: target.copy_(source[i % 2]), device)[0]


def measure(variant: Variant, sets: list[list[Tensor]], device: str) -> dict[str, float]:
    """Seconds of forward and backward, and the bytes that they must move."""
    state = [variant.forward(*s[:4]) for s in sets]
    forward, forward_spread = timed(lambda i: variant.forward(*sets[i][:4]), device)
    if variant.name == "fla":  # keeps one graph: its backward belongs to the last forward
        variant.forward(*sets[0][:4])
        backward, backward_spread = timed(lambda i: variant.backward(*sets[0][:4], *state[0], sets[0][4]), device)
    else:
        backward, backward_spread = timed(lambda i: variant.backward(*sets[i][:4], *state[i], sets[i][4]), device)
    k, wide = sets[0][2], 4 * sets[0][2].numel()
    narrow = k.element_size() * k.numel()
    moved = (2 * narrow + 2 * wide) + (4 * narrow + 3 * wide)
    return {
        "forward": forward,
        "backward": backward,
        "total": forward + backward,
        "spread": forward_spread + backward_spread,
        "bytes": moved,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check and time every way to compute wkv.")
    parser.add_argument("--device", default="cuda", help="cuda (whatever that means here) or cpu")
    parser.add_argument("--shape", type=int, nargs=3, default=(8, 1024, 1024), metavar=("B", "T", "C"))
    parser.add_argument("--dtype", default=None, help="of k and v: bfloat16 (GPU) or float32 (elsewhere)")
    parser.add_argument("--only", help="names of variants, separated by commas (default: all)")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    args = parser.parse_args(arguments)
    gpu_here = args.device == "cuda" and ditorch.backend.name == "cuda"
    dtype = getattr(torch, args.dtype or ("bfloat16" if gpu_here else "float32"))
    name = torch.cuda.get_device_name() if gpu_here else ditorch.backend.name if args.device == "cuda" else "cpu"
    print(f"wkv on {name}, torch {torch.__version__}, B T C = {tuple(args.shape)}, k and v in {dtype}", flush=True)
    bandwidth = copy_bandwidth(args.device)
    print(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s (read + written)", flush=True)
    found, missing = variants(args.device)
    if args.only:
        names = [name.strip() for name in args.only.split(",")]
        unknown = set(names) - {variant.name for variant in found}
        if unknown:
            known = ", ".join(variant.name for variant in found)
            parser.error(f"--only: no variant {', '.join(sorted(unknown))} here; there are {known}")
        found = [variant for variant in found if variant.name in names]
    for alternative, why in missing.items():
        print(f"not here: {alternative}: {why}")
    batch, steps, channels = args.shape
    sets = [[x.to(args.device) for x in inputs(batch, steps, channels, dtype, seed)] for seed in range(SETS)]
    rows: dict[str, Any] = {}
    wrong = 0
    used = gpu.chosen(torch.device("cuda", 0)).name if gpu_here else found[0].name
    result = {
        "device": name,
        "torch": torch.__version__,
        "shape": list(args.shape),
        "dtype": str(dtype),
        "copy_bandwidth": bandwidth,
        "used": used,
        "variants": rows,
        "missing": missing,
    }
    heads = ("fwd ms", "bwd ms", "sum ms", "GB/s", "of copy", "error", "extreme")
    print(f"{'variant':22} " + " ".join(head.rjust(n) for head, n in zip(heads, (8, 8, 8, 7, 8, 9, 9))))
    for variant in found:
        try:
            usual = errors(variant, args.device, dtype, extreme=False)
            extreme = errors(variant, args.device, dtype, extreme=True)
            row: dict[str, Any] = {**measure(variant, sets, args.device), "errors": usual, "errors_extreme": extreme}
        except Exception as error:  # one variant that fails must not hide the others
            print(f"{variant.name:22} failed: {type(error).__name__}: {str(error).strip()[:160]}", flush=True)
            rows[variant.name] = {"failed": f"{type(error).__name__}: {str(error).strip()[:1000]}"}
            continue
        # The gradients of k and v are rounded to their dtype; everything else is float32.
        limit = 1e-2 if dtype == torch.bfloat16 else 1e-4
        row["right"] = all(e < limit for e in (*usual.values(), *extreme.values()))
        wrong += not row["right"]
        rate = row["bytes"] / row["total"]
        row["share_of_copy"] = rate / bandwidth
        rows[variant.name] = row
        print(
            f"{variant.name:22} {row['forward'] * 1e3:8.3f} {row['backward'] * 1e3:8.3f} {row['total'] * 1e3:8.3f} "
            f"{rate / 1e9:7.0f} {row['share_of_copy']:8.1%} {max(usual.values()):9.1e} {max(extreme.values()):9.1e}"
            + ("" if row["right"] else "  WRONG"),
            flush=True,
        )
        if args.out:  # after each variant: a run that is cut off leaves what it measured
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    if gpu_here:
        print(f"the operator uses: {used}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
