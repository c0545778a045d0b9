"""How well faults are found: recall of the verdict and of other standards against the size of the fault.

    python benchmarks/verdict_curve.py --matrix              every kind of fault, on every operator and dtype
    python benchmarks/verdict_curve.py --json curve.json     the curve: recall against fault size, false alarms
    python benchmarks/verdict_curve.py --from curve.json --plot docs/verdicts.png

Faults are planted in the kernels of the software accelerator, one operator at a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STANDARDS = ("ulp", "torch", "dual", "seed")  # of the verdict; beside them torch.allclose as one finds it
RULES = (*STANDARDS, "allclose")


@dataclasses.dataclass(frozen=True)
class Case:
    """A call, and the ATen operator in which a fault is planted."""

    name: str
    operator: str
    call: Callable[..., Any]
    inputs: Callable[[Draw], tuple[Any, ...]]
    kinds: str = "noise element nan inf overflow"
    backward: str = ""  # operator that computes the gradient, where it is another one
    length: int = 1  # of the sums: the bound grows with it


class Draw:
    """Inputs of a case: the same for every run."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(7)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype).requires_grad_()

    def positive(self, *shape: int) -> torch.Tensor:
        drawn = torch.rand(shape, generator=self.generator) * 2 + 0.1
        return drawn.to(self.dtype).requires_grad_()

    def index(self, below: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, below, shape, generator=self.generator)

    def mask(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator) < 0.5


def cases() -> list[Case]:
    """At least thirty operators of real models."""

    def one(d: Draw) -> tuple[Any, ...]:
        return (d.normal(64, 256),)

    def two(d: Draw) -> tuple[Any, ...]:
        return d.normal(64, 256), d.normal(64, 256)

    def wide(d: Draw) -> tuple[Any, ...]:
        return (d.normal(8, 4096),)

    def positive(d: Draw) -> tuple[Any, ...]:
        return (d.positive(64, 256),)

    def image(d: Draw) -> tuple[Any, ...]:
        return (d.normal(4, 8, 16, 16),)

    def conv(d: Draw) -> tuple[Any, ...]:
        return d.normal(2, 64, 12, 12), d.normal(16, 64, 3, 3)

    def product(d: Draw) -> tuple[Any, ...]:
        return d.normal(16, 4096), d.normal(4096, 24)

    def batched(d: Draw) -> tuple[Any, ...]:
        return d.normal(3, 16, 2048), d.normal(3, 2048, 24)

    def affine(d: Draw) -> tuple[Any, ...]:
        return d.normal(16, 4096), d.normal(24, 4096), d.normal(24)

    usual = "noise element nan inf overflow denormals"
    sums = "noise element nan inf accumulate"
    moves = "element nan inf"
    return [
        Case("torch.add", "add.Tensor", torch.add, two, usual),
        Case("torch.sub", "sub.Tensor", torch.sub, two, usual),
        Case("torch.mul", "mul.Tensor", torch.mul, two, usual),
        Case("torch.div", "div.Tensor", torch.div, lambda d: (d.normal(64, 256), d.positive(64, 256)), usual),
        Case("torch.exp", "exp", torch.exp, one, usual),
        Case("torch.log", "log", torch.log, positive, usual),
        Case("torch.sqrt", "sqrt", torch.sqrt, positive, usual),
        Case("torch.rsqrt", "rsqrt", torch.rsqrt, positive, usual),
        Case("torch.sin", "sin", torch.sin, one, usual),
        Case("torch.tanh", "tanh", torch.tanh, one, usual, "tanh_backward"),
        Case("torch.sigmoid", "sigmoid", torch.sigmoid, one, usual, "sigmoid_backward"),
        Case("torch.erf", "erf", torch.erf, one, usual),
        Case("torch.pow", "pow.Tensor_Scalar", lambda x: torch.pow(x, 3), one, usual),
        Case("torch.nn.functional.gelu", "gelu", F.gelu, one, usual, "gelu_backward"),
        Case("torch.nn.functional.silu", "silu", F.silu, one, usual, "silu_backward"),
        Case("torch.nn.functional.relu", "relu", F.relu, one, moves, "threshold_backward"),
        Case("torch.matmul", "mm", torch.matmul, product, sums, "mm", 4096),
        Case("torch.bmm", "bmm", torch.bmm, batched, sums, "bmm", 2048),
        Case("torch.nn.functional.linear", "addmm", F.linear, affine, sums, "mm", 4096),
        Case("torch.nn.functional.conv2d", "convolution", F.conv2d, conv, sums, "convolution_backward", 576),
        Case("torch.softmax", "_softmax", lambda x: x.softmax(-1), one, sums, "_softmax_backward_data"),
        Case("torch.log_softmax", "_log_softmax", lambda x: x.log_softmax(-1), wide, sums,
             "_log_softmax_backward_data"),
        Case("torch.nn.functional.layer_norm", "native_layer_norm",
             lambda x, w, b: F.layer_norm(x, (1024,), w, b),
             lambda d: (d.normal(32, 1024), d.normal(1024), d.normal(1024)), "noise element nan inf accumulate",
             "native_layer_norm_backward"),
        Case("torch.nn.functional.group_norm", "native_group_norm", lambda x: F.group_norm(x, 4), image, usual,
             "native_group_norm_backward"),
        Case("torch.nn.functional.batch_norm", "native_batch_norm",
             lambda x: F.batch_norm(x, None, None, training=True), image, "noise element nan inf",
             "native_batch_norm_backward"),
        Case("torch.sum", "sum.dim_IntList", lambda x: x.sum(-1), lambda d: (d.normal(16, 8192),), sums),
        Case("torch.mean", "mean.dim", lambda x: x.mean(-1), lambda d: (d.normal(16, 8192),), sums),
        Case("torch.var", "var.correction", lambda x: x.var(-1), one, "noise element nan inf"),
        Case("torch.linalg.vector_norm", "linalg_vector_norm", lambda x: torch.linalg.vector_norm(x, dim=-1), one,
             "noise element nan inf"),
        Case("torch.cumsum", "cumsum", lambda x: x.cumsum(-1), lambda d: (d.normal(16, 4096),), sums),
        Case("torch.nn.functional.embedding", "embedding", lambda w, i: F.embedding(i, w),
             lambda d: (d.normal(50, 64), d.index(50, 300)), moves, "embedding_dense_backward"),
        Case("torch.index_add", "index_add", lambda x, i, s: torch.index_add(x, 0, i, s),
             lambda d: (d.normal(20, 64), d.index(20, 100), d.normal(100, 64)), "noise element nan inf"),
        Case("torch.gather", "gather", lambda x, i: x.gather(1, i),
             lambda d: (d.normal(32, 64), d.index(64, 32, 40)), moves, "scatter_add_"),
        Case("torch.cat", "cat", lambda a, b: torch.cat([a, b]), two, moves),
        Case("torch.where", "where.self", lambda m, a, b: torch.where(m, a, b),
             lambda d: (d.mask(64, 256), d.normal(64, 256), d.normal(64, 256)), moves),
        Case("torch.clone", "clone", torch.clone, one, moves),
        Case("torch.max", "max.dim", lambda x: x.max(-1), one, moves),
        Case("torch.topk", "topk", lambda x: x.topk(8), one, moves),
        Case("torch.sort", "sort", lambda x: x.sort(), one, moves),
        Case("torch.std_mean", "std_mean.correction", lambda x: torch.std_mean(x, -1), one, "noise element swap"),
        Case("torch.aminmax", "aminmax", lambda x: torch.aminmax(x, dim=-1), one, "element swap"),
        Case("torch.nn.functional.avg_pool2d", "avg_pool2d", lambda x: F.avg_pool2d(x, 3), image,
             "noise element nan inf", "avg_pool2d_backward"),
        Case("torch.nn.functional.max_pool2d", "max_pool2d_with_indices", lambda x: F.max_pool2d(x, 2), image, moves,
             "max_pool2d_with_indices_backward"),
        Case("torch.nn.functional.cross_entropy", "nll_loss_forward", F.cross_entropy,
             lambda d: (d.normal(64, 100), d.index(100, 64)), "noise element nan inf", "nll_loss_backward"),
        Case("torch.nn.functional.scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu",
             F.scaled_dot_product_attention,
             lambda d: (d.normal(2, 4, 128, 32), d.normal(2, 4, 128, 32), d.normal(2, 4, 128, 32)), "noise nan inf",
             "_scaled_dot_product_flash_attention_for_cpu_backward", 128),
        Case("torch.Tensor.add_", "add_.Tensor", lambda x, y: x.detach().clone().add_(y), two, "drop_write noise"),
        Case("torch.Tensor.copy_", "mul_.Tensor", lambda x, y: x.detach().clone().mul_(y), two, "drop_write noise"),
    ]  # fmt: skip


# --- one run ------------------------------------------------------------------------------------------------


class Bench:
    """Runs cases on the software accelerator and asks every standard for its verdict."""

    def __init__(self) -> None:
        import ditorch.soft

        ditorch.soft.load()
        from ditorch.soft import faults
        from op_tools.judge import golden, verdict

        self.faults, self.golden, self.verdict = faults, golden, verdict
        self._last: tuple[Any, Any] = (None, None)

    def inputs(self, case: Case, dtype: torch.dtype, scale: float = 1.0) -> tuple[Any, ...]:
        drawn = case.inputs(Draw(dtype))
        if scale != 1.0:
            drawn = tuple((t.detach() * scale).requires_grad_() if t.is_floating_point() else t for t in drawn)
        return drawn

    def outcome(self, case: Case, dtype: torch.dtype, fault: str, scale: float = 1.0) -> dict[str, Any]:
        """Verdicts of all standards on one run with a fault ("" for none); `hits` says how often it struck."""
        host = self.inputs(case, dtype, scale)
        device = [t.detach().to("soft").requires_grad_(t.requires_grad) for t in host]
        planted = self.faults.plant(fault) if fault else None
        try:
            outputs = case.call(*device)
            tensors = list(self.golden.tensors_in(outputs))
            used = [t for t in tensors if t.requires_grad]
            generator = torch.Generator().manual_seed(3)
            cotangents = [
                torch.randn(t.shape, generator=generator).to(t.dtype) if t.requires_grad else None for t in tensors
            ]
            wanted = [t for t in device if t.requires_grad]
            grads: dict[int, Any] = {}
            if used and wanted:
                sent = [c.to("soft") for c in cotangents if c is not None]
                found = torch.autograd.grad(used, wanted, sent, allow_unused=True)
                grads = {id(t): g for t, g in zip(wanted, found)}
        finally:
            if planted is not None:
                planted.remove()
        result = self.reference((case.name, dtype, scale), case, host, cotangents if grads else None)
        to_host = lambda v: self.golden.map_tensors(v, lambda t: t.detach().cpu())  # noqa: E731
        host_grads = [to_host(grads.get(id(t))) for t in device] if grads else None
        verdicts: dict[str, Any] = {"hits": planted.hits if planted else 0}
        for standard in STANDARDS:
            judgement = self.verdict.judge_call(
                case.name, result, outputs=to_host(outputs), grad_inputs=host_grads, rules=self.verdict.Rules(standard)
            )
            verdicts[standard] = judgement.verdict == self.verdict.WRONG
            if standard == "ulp":
                verdicts["reason"] = judgement.reason
                verdicts["excess"] = max((row.excess for row in judgement.rows), default=0.0)
        ours = self.golden.tensors_in((to_host(outputs), host_grads))
        theirs = self.golden.tensors_in((result.outputs, result.grad_inputs if grads else None))
        verdicts["allclose"] = not all(torch.allclose(a, b.to(a.dtype), equal_nan=True) for a, b in zip(ours, theirs))
        return verdicts

    def reference(self, key: Any, case: Case, host: tuple[Any, ...], cotangents: Any) -> Any:
        """The golden run of a case, kept for the next fault in it."""
        if self._last[0] != key:
            run = self.golden.run(case.call, host, name=case.name, grad_outputs=cotangents, device="soft")
            self._last = (key, run)
        return self._last[1]


def faults_of(case: Case, dtype: torch.dtype) -> Iterator[tuple[str, str, float]]:
    """Kind, fault and scale of the inputs, for the matrix."""
    size = 64 * torch.finfo(dtype).eps * (max(1.0, math.sqrt(case.length) / 4) if dtype == torch.float32 else 1)
    for kind in case.kinds.split():
        fault, scale = f"{case.operator}: {kind}", 1.0
        if kind == "noise":
            fault += f"={size}"
        elif kind == "element":
            fault += "=0.5"
        elif kind == "accumulate":
            fault += "=float16" if dtype == torch.float16 else "=bfloat16"
        elif kind == "overflow":
            fault += "=0.5"
        elif kind == "denormals":
            if case.name not in ("torch.add", "torch.sub", "torch.sin", "torch.tanh", "torch.erf"):
                continue  # others have no small results for small inputs
            scale = torch.finfo(dtype).smallest_normal / 8
        yield kind, fault, scale
    if case.backward and "noise" in case.kinds:
        yield "gradient", f"{case.backward}: noise={size}, phase=backward", 1.0


def matrix(bench: Bench, pattern: str) -> int:
    missed = total = 0
    by_kind: dict[str, list[int]] = {}
    for case in cases():
        if pattern and pattern not in case.name:
            continue
        for dtype in DTYPES:
            for kind, fault, scale in faults_of(case, dtype):
                try:
                    found = bench.outcome(case, dtype, fault, scale)
                except Exception as error:
                    print(f"ERROR {case.name} {dtype} {fault}: {type(error).__name__}: {str(error)[:200]}")
                    missed += 1
                    continue
                total += 1
                counts = by_kind.setdefault(kind, [0, 0])
                counts[0] += found["ulp"]
                counts[1] += 1
                if not found["ulp"] or not found["hits"]:
                    missed += 1
                    size = f"hits {found['hits']} excess {found['excess']:.3g}"
                    print(f"MISSED {case.name} {str(dtype)[6:]} {fault}: {size}")
    for kind, (found_, of) in sorted(by_kind.items()):
        print(f"{kind:12s} {found_}/{of}")
    print(f"{total} faults planted in {len(cases())} operators, {missed} missed")
    return 1 if missed else 0


def curve(bench: Bench, sizes: list[float], pattern: str) -> list[dict[str, Any]]:
    """One record per operator, dtype and fault size (in eps of the dtype; 0 for none)."""
    records = []
    for case in cases():
        if "noise" not in case.kinds or (pattern and pattern not in case.name):
            continue
        for dtype in DTYPES:
            for size in sizes:
                for kind in ("noise", "element") if size and "element" in case.kinds else ("noise",):
                    fault = f"{case.operator}: {kind}={size * torch.finfo(dtype).eps}" if size else ""
                    found = bench.outcome(case, dtype, fault)
                    records.append({"op": case.name, "dtype": str(dtype)[6:], "size": size, "kind": kind, **found})
    return records


_LABELS = {
    "ulp": "op_tools (rounding-aware)",
    "seed": "fixed tolerance per dtype",
    "allclose": "torch.allclose, defaults",
    "torch": "torch.testing",
    "dual": "cosine, then dual-thousandth",
}
_FAULTS = {"noise": "every element is off by up to this", "element": "one element is off by this"}


def draw(records: list[dict[str, Any]], target: Path) -> None:
    """Recall against the size of the fault, one column per dtype, one row per kind of fault."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    dtypes = ("float32", "bfloat16", "float16")
    figure, axes = pyplot.subplots(2, 3, figsize=(13, 8), sharey=True, sharex=True)
    for row, (kind, what) in enumerate(_FAULTS.items()):
        for axis, dtype in zip(axes[row], dtypes):
            mine = [r for r in records if r["dtype"] == dtype]
            struck = [r for r in mine if r["kind"] == kind]
            sizes = sorted({r["size"] for r in struck if r["size"]})
            for rule, label in _LABELS.items():
                alarms = _share(mine, 0.0, rule)
                shares = [100 * _share(struck, size, rule) for size in sizes]
                style: dict[str, Any] = {"linewidth": 2.6, "zorder": 5} if rule == "ulp" else {"linewidth": 1.3}
                if alarms:  # what always finds something has found nothing
                    style["linestyle"] = "--"
                name = f"{label}: {alarms:.0%} false alarms"
                axis.plot(sizes, shares, marker="o", markersize=3, label=name, **style)
            axis.set_xscale("log", base=2)
            axis.set_title(f"{dtype}: {what}", fontsize=10)
            axis.grid(alpha=0.3)
            if row == 1:
                axis.set_xlabel("relative size of the fault, in eps of the dtype")
                axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False)
        axes[row][0].set_ylabel("faults found, %")
    figure.suptitle(
        "Faults planted in correct kernels: how many each rule finds, and how often it is wrong without one"
    )
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)


def _share(records: list[dict[str, Any]], size: float, standard: str) -> float:
    chosen = [r[standard] for r in records if r["size"] == size]
    return sum(chosen) / len(chosen) if chosen else math.nan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrix", action="store_true", help="plant every kind of fault and list what was missed")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--sizes", default="0,1,2,4,8,16,32,64,256,1024,4096,16384")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None)
    parser.add_argument("--from", dest="source", type=Path, default=None, help="draw from these records")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.source is None:
        bench = Bench()
        if options.matrix:
            return matrix(bench, options.only)
        records = curve(bench, [float(s) for s in options.sizes.split(",")], options.only)
    else:
        records = json.loads(options.source.read_text())
    if options.json:
        options.json.write_text(json.dumps(records, indent=0, default=str))
    for size in sorted({r["size"] for r in records}):
        shares = {s: round(_share(records, size, s), 3) for s in RULES}
        print(f"{'false alarms' if not size else f'fault of {size:g} eps'}: {shares}")
    if options.plot:
        draw(records, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
