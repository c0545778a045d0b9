"""How well `op_tools diff` names the operator at fault, and stays silent without one (for `benchmarks.trace_truth`)."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable

from torch import Tensor

from benchmarks.trace_models import MODELS, build
from benchmarks.trace_runs import scratch, train
from op_tools.trace.diff import Diff

# --- faults -----------------------------------------------------------------------------------------------------------

FAULTS = [
    *[
        f"{op}: noise=1e-2"
        for op in ("addmm", "mm", "gelu", "native_layer_norm", "add.Tensor", "embedding", "_log_softmax")
    ],
    *[f"{op}: element=0.5" for op in ("addmm", "gelu", "native_layer_norm", "add.Tensor", "embedding")],
    *[f"{op}: nan" for op in ("addmm", "gelu", "native_layer_norm", "add.Tensor", "mm")],
    *[f"{op}: inf" for op in ("addmm", "gelu", "add.Tensor")],
    *[
        f"{op}: noise=1e-2, phase=backward"
        for op in ("mm", "gelu_backward", "native_layer_norm_backward", "sum.dim_IntList")
    ],
    *[f"{op}: element=0.5, phase=backward" for op in ("mm", "gelu_backward", "native_layer_norm_backward")],
    *[f"{op}: nan, phase=backward" for op in ("mm", "gelu_backward", "native_layer_norm_backward")],
    *[f"{op}: inf, phase=backward" for op in ("mm", "gelu_backward")],
    *["addmm: noise=1e-2, nth=5", "gelu: element=0.5, nth=3", "mm: nan, nth=7", "gelu: overflow=0.1"],
    *[
        "gelu: noise=1e-2, nth=2",
        "mm: element=0.5, nth=4",
        "native_layer_norm: nan, nth=4",
    ],
    *["addmm: accumulate=bfloat16", "mm: accumulate=bfloat16, phase=backward"],
]


def measure_faults(only: str = "") -> None:
    from ditorch.soft import faults

    print("| dtype | planted | named | another blamed | silent | did not strike |")
    print("| --- | --- | --- | --- | --- | --- |")
    for low in (True, False):
        with scratch() as folder:
            good, _ = train(folder / "good", "GPT", build("GPT"), low=low, steps=1)
            told: Counter[str] = Counter()
            for text in FAULTS:
                if only and only not in text:
                    continue
                with faults.plant(text) as planted:
                    bad, struck = train(folder / "bad", "GPT", build("GPT"), low=low, planted=planted, steps=1)
                found = -1 if struck is None else struck.operator(bad)
                outcome = _blamed(Diff(good, bad), found) if planted.hits else "did not strike"
                told[outcome.partition(":")[0]] += 1
                if outcome != "named":
                    print(f"  {'bf16' if low else 'fp32'} {text}: {outcome}", file=sys.stderr)
            columns_told = (told[k] for k in ("named", "another", "silent", "did not strike"))
            print(
                f"| {'bf16' if low else 'fp32'} | {sum(told.values())} | {' | '.join(map(str, columns_told))} |",
                flush=True,
            )


def _blamed(diff: Diff, culprit: int) -> str:
    if diff.divergence is None:
        return "silent"
    b = (diff.parted or (0, 0))[1]
    graph = diff.alignment.second
    if b == culprit:
        return "named"
    at = graph.titles[culprit] if 0 <= culprit < graph.count else culprit
    return f"another: {graph.titles[b]} instead of {at} ({diff.divergence})"


def measure_healthy(pairs: int = 40) -> None:
    told = 0
    for n in range(pairs):
        kind, low, seed = list(MODELS)[n % 3], bool(n // 3 % 2), n
        with scratch() as folder:
            one, _ = train(folder / "a", kind, build(kind, seed), low=low, steps=1)
            if n % 2:
                two, _ = train(folder / "b", kind, build(kind, seed), low=low, layout=1, steps=1)
            else:
                two, _ = train(folder / "b", kind, build(kind, seed), low=low, device="cpu", steps=1)
            diff = Diff(one, two)
        if diff.divergence is not None:
            told += 1
            a = (diff.parted or (0, 0))[0]
            print(
                f"  {kind} {'layout' if n % 2 else 'device'} low={low}: {one.titles[a]} {diff.divergence}",
                file=sys.stderr,
            )
    print(f"healthy pairs without a divergence: {pairs - told} of {pairs}")


# --- prints against hashes ------------------------------------------------------------------------------------------


def measure_prints() -> None:
    """What DebugMode's two hashes and a fingerprint see of changes to a tensor."""
    import torch.distributed.tensor  # which its hash needs
    from torch.utils._debug_mode._utils import hash_tensor_fn, norm_hash_fn

    from op_tools.trace.prints import distance, fingerprint

    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "two elements exchanged": _exchanged,
        "two rows exchanged": lambda x: x[[1, 0, *range(2, len(x))]],
        "rows reversed": lambda x: x.flip(0),
        "all shifted by one place": lambda x: x.roll(1),
        "heads in another order": lambda x: x.view(64, 4, 24).flip(1).reshape(64, 96),
        "a block transposed": _transposed,
        "stored in the wrong order (transposed)": lambda x: x.t().reshape(64, 96),
        "two signs flipped": _flipped,
        "every sign flipped": lambda x: -x,
        "a row equal to the next one": lambda x: torch.cat([x[1:2], x[1:]]),
        "one element off by 50 %": _off,
        "noise of 1e-2 in each element": lambda x: x * (1 + 1e-2 * torch.linspace(-1, 1, x.numel()).view_as(x)),
        "rounded once more": lambda x: x.to(torch.float16 if x.dtype == torch.bfloat16 else torch.bfloat16).to(x.dtype),
        "another layout, equal values": lambda x: x.t().contiguous().t(),
    }
    print("| change | dtype | DebugMode's norm (L1) | DebugMode's hash (XOR) | print: distance / norm, true |")
    print("| --- | --- | --- | --- | --- |")
    blind: Counter[str] = Counter()
    for name, change in changes.items():
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
            y = change(x).to(dtype)
            norms = [float(norm_hash_fn(t, use_scalar=True)) for t in (x, y)]
            hashes = [hash_tensor_fn(t, use_scalar=True) for t in (x, y)]
            off = abs(norms[0] - norms[1]) / norms[0]
            apart = float(distance(fingerprint(x).numpy(), fingerprint(y).numpy()) / x.double().norm())
            true = float((x.double() - y.double()).norm() / x.double().norm())
            l1 = "equal" if off < 1e-12 else f"{off:.1e} apart"
            xor = "equal" if hashes[0] == hashes[1] else "differs"
            blind.update({"L1": true > 0 and off < 1e-12, "XOR": true > 0 and xor == "equal"})
            blind.update({"print": true > 0 and apart == 0, "changes": true > 0})
            word = str(dtype).removeprefix("torch.")
            print(f"| {name} | {word} | {l1} | {xor} | {apart:.2g}, {true:.2g} |")
    print(
        f"of {blind['changes']} changes, unseen by L1 {blind['L1']}, by XOR {blind['XOR']}, by prints {blind['print']}"
    )


def _exchanged(x: Tensor) -> Tensor:
    y = x.clone()
    y[0, 0], y[5, 7] = x[5, 7], x[0, 0]
    return y


def _transposed(x: Tensor) -> Tensor:
    y = x.clone()
    y[:32, :32] = x[:32, :32].t()
    return y


def _flipped(x: Tensor) -> Tensor:
    y = x.clone()
    y[1, 1], y[2, 2] = -x[1, 1], -x[2, 2]
    return y


def _off(x: Tensor) -> Tensor:
    y = x.clone()
    y[3, 3] *= 1.5
    return y
