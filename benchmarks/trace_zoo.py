"""`op_tools diff` on the programs of the zoo: silent where nothing is wrong, and right where a fault was planted.

    python -m benchmarks.trace_zoo healthy                       # every program, against itself in other forms
    python -m benchmarks.trace_zoo healthy hf_gpt2 vgg --forms cpu,bfloat16
    python -m benchmarks.trace_zoo faults --seed 3 --part 0/2    # one fault in each program and precision

`healthy`: a program on the software accelerator in float32, against the same on the CPU, in bfloat16, in float16, with
images in channels_last, once more, and with other values (`seed`). Nothing may part. `faults`: one
fault of a kind in one call of one kernel, both drawn at random among those that the program makes; the operator that
was struck must be named.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OP_TOOLS_CONSOLE", "off")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.programs import PROGRAMS, Job
from benchmarks.trace_runs import Struck, _main_thread
from benchmarks.zoo import LOWS, has_images, prepare

FORMS = ("cpu", "again", "bfloat16", "float16", "channels_last", "seed")
KINDS = ("noise=1e-2", "element=0.5", "nan", "inf", "scale=1.1", "zero", "stale", "drop_half")


class HostJob(Job):
    """A job on the CPU, autocast included."""

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """As on the device."""
        return torch.autocast("cpu", dtype=self.low or torch.bfloat16, enabled=self.low is not None)


def job_of(form: str, low: str = "float32") -> Job:
    """How a program runs in a form (`job_of("bfloat16").low`)."""
    if form == "cpu":
        return HostJob("cpu", LOWS[low])
    return Job("cuda", LOWS[form if form in LOWS else low], form == "channels_last")


def traced(folder: Path, name: str, job: Job, steps: int = 1, seed: int = 0, planted: Any = None) -> Any:
    """The graph of a program's first steps, and which operator a fault struck."""
    from op_tools.native import compiling
    from op_tools.tools.trace import OpTrace
    from op_tools.trace.diff import load
    from op_tools.trace.graph import Graph
    from op_tools.watch.intercept import INTERCEPTOR

    os.environ["OP_TOOLS_INCLUDE_CPU"] = "1" if job.device == "cpu" else "0"
    torch.manual_seed(seed)
    step = PROGRAMS[name](job)
    compiling.wait()
    tool = OpTrace(to=folder)
    struck = None if planted is None else Struck(tool, planted)
    with tool:
        if INTERCEPTOR.sums._library is not None:
            _main_thread[:] = [INTERCEPTOR.sums._library.op_tools_sums_thread()]
        for _ in range(steps):
            step()
    failures = [f for f in tool.findings() if f.kind == "tool-failure"]
    assert not failures, failures
    return Graph(load(folder)), struck


def told(diff: Any) -> str:
    """One line about a divergence."""
    found = diff.divergence
    one = diff.alignment.first
    a = (diff.parted or (0, 0))[0]
    return f"{one.titles[a]}: {found.reason} ({found.inputs:.2g} -> {found.outputs:.2g}, allowed {found.allowed:.2g})"


def healthy(names: list[str], forms: list[str], steps: int) -> int:
    """Compare each program with itself in other forms."""
    from op_tools.trace.diff import Diff

    total: Counter[str] = Counter()
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            try:
                base, _ = traced(Path(scratch) / "base", name, job_of("base"), steps)
            except Exception as error:
                if os.environ.get("ZOO_TRACE"):
                    traceback.print_exc()
                print(f"{name:24s} base: {type(error).__name__}: {str(error)[:150]}", flush=True)
                total["error"] += 1
                continue
            for form in forms:
                if form == "channels_last" and not has_images(name):
                    continue
                began = time.perf_counter()
                try:
                    seed = 1 if form == "seed" else 0
                    other, _ = traced(Path(scratch) / form, name, job_of(form), steps, seed)
                    diff = Diff(base, other)
                except Exception as error:
                    if os.environ.get("ZOO_TRACE"):
                        traceback.print_exc()
                    print(f"{name:24s} {form}: {type(error).__name__}: {str(error)[:150]}", flush=True)
                    total["error"] += 1
                    continue
                pairs, judged = len(diff.alignment.pairs), int(diff.numbers.judged.sum())
                outcome = "alarm" if diff.divergence is not None else "silent"
                total[outcome] += 1
                total["pairs"] += pairs
                total["judged"] += judged
                words = told(diff) if diff.divergence is not None else ""
                counts = f"{base.count} {other.count} {pairs} {judged}"
                print(
                    f"{name:24s} {form:10s} {counts} {time.perf_counter() - began:.1f}s {outcome} {words}", flush=True
                )
    print(dict(total))
    return 1 if total["alarm"] or total["error"] else 0


class Changed:
    """How much a fault changed of the results that it struck, relative to their norm; infinite for new NaN or Inf."""

    def __init__(self) -> None:
        self.share = 0.0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measure while the `with` block runs."""
        from ditorch.soft.faults.effects import EFFECTS

        kept = dict(EFFECTS)
        EFFECTS.update({kind: self._around(effect) for kind, effect in kept.items()})
        try:
            yield
        finally:
            EFFECTS.update(kept)

    def _around(self, effect: Any) -> Any:
        def struck(strike: Any, results: list[torch.Tensor]) -> None:
            before = [tensor.clone() for tensor in results]
            effect(strike, results)
            for one, other in zip(before, results):
                if one.shape != other.shape or not torch.equal(one.isfinite(), other.isfinite()):
                    self.share = float("inf")
                    continue
                x, y = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (one, other))
                size = float(x.nan_to_num(0.0, 0.0, 0.0).norm())
                apart = float((x - y).nan_to_num(0.0, 0.0, 0.0).norm())
                self.share = max(self.share, apart / size if size else float(apart > 0) * float("inf"))

        return struck


class Kernels(TorchDispatchMode):
    """Lists the kernels that run, with how often."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        name = func.name().removeprefix("aten::")
        if not isinstance(first, torch.Tensor) or func.is_view or name.partition(".")[0] in ("empty", "empty_like"):
            return out
        if first.is_floating_point() and first.numel() and first.device.type != "cpu":
            self.seen[name] += 1
        return out


def faults(names: list[str], seed: int, lows: list[str], each: int) -> int:
    """Plant faults and see who is blamed."""
    from op_tools.trace.diff import Diff

    total: Counter[str] = Counter()
    for name in names:
        for low in lows:
            with tempfile.TemporaryDirectory() as scratch:
                try:
                    torch.manual_seed(0)
                    step = PROGRAMS[name](job_of("base", low))
                    with Kernels() as kernels:
                        step()
                    good, _ = traced(Path(scratch) / "good", name, job_of("base", low))
                except Exception as error:
                    print(f"{name:24s} {low} good: {type(error).__name__}: {str(error)[:150]}", flush=True)
                    total["error"] += 1
                    continue
                draw = random.Random(f"{name} {low} {seed}")
                for _ in range(each):
                    changed = Changed()
                    text, planted = fault_in(draw, kernels.seen)
                    try:
                        with planted, changed.measured():
                            bad, struck = traced(Path(scratch) / "bad", name, job_of("base", low), planted=planted)
                        culprit = struck.operator(bad)
                        diff = Diff(good, bad)
                        outcome, words = verdict(diff, culprit, planted.hits, changed.share)
                    except Exception as error:
                        if os.environ.get("ZOO_TRACE"):
                            traceback.print_exc()
                        outcome, words = "error", f"{type(error).__name__}: {str(error)[:150]}"
                    total[outcome] += 1
                    print(f"{name:24s} {low:9s} {text:50s} {outcome} {words}", flush=True)
    print(dict(total))
    return 0


def fault_in(draw: random.Random, kernels: Counter[str]) -> tuple[str, Any]:
    """A fault in one call of one of the kernels, in force (`fault_in(draw, Counter(mm=3))`)."""
    from ditorch.soft import faults as planting

    while True:
        kernel = draw.choice(sorted(kernels))
        nth = draw.randint(1, kernels[kernel])
        text = f"{kernel}: {draw.choice(KINDS)}, nth={nth}"
        with contextlib.suppress(planting.FaultSyntaxError):  # not every operator has a kernel of its own
            return text, planting.plant(text)


def verdict(diff: Any, culprit: int, hits: int, share: float) -> tuple[str, str]:
    """What was said of a run with a fault, and a line about it."""
    if not hits:
        return "did not strike", ""
    graph = diff.alignment.second
    at = f"{graph.titles[culprit] if 0 <= culprit < graph.count else culprit}, changed by {share:.2g}"
    if diff.divergence is None:
        differ = diff.numbers.outputs.any() or diff.numbers.inputs.any()
        return ("silent", at) if differ else ("without effect", at)
    b = (diff.parted or (0, 0))[1]
    return (
        ("named", at)
        if b == culprit
        else ("another", f"{graph.titles[b]} ({b}) instead of {at} ({culprit}): {told(diff)}")
    )


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("healthy", "faults"))
    parser.add_argument("names", nargs="*", help="programs (default: all)")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--low", default="float32,bfloat16")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--each", type=int, default=1, help="faults in each program and precision")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="", metavar="I/N", help="only every Nth program, from the Ith (0/4)")
    options = parser.parse_args()
    prepare(False)
    names = options.names or [
        n for n in PROGRAMS if getattr(PROGRAMS[n], "__module__", "") != "benchmarks.programs.parallel"
    ]
    unknown = [name for name in names if name not in PROGRAMS]
    if unknown:
        parser.error(f"no such program: {', '.join(unknown)}")
    if options.part:
        start, count = (int(n) for n in options.part.split("/"))
        names = names[start::count]
    if options.what == "healthy":
        return healthy(names, options.forms.split(","), options.steps)
    return faults(names, options.seed, options.low.split(","), options.each)


if __name__ == "__main__":
    sys.exit(main())
