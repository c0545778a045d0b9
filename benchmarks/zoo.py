"""Trains many small programs of the usual kinds under OpAutoCompare: healthy kernels must give no alarm.

Each program runs in float32, bfloat16 and float16 autocast. The table says how many tensors were compared, what was
called wrong and what was not compared.

    python -m benchmarks.zoo                          # everything, on the active device
    python -m benchmarks.zoo simclr dcgan --low bfloat16
    python -m benchmarks.zoo --list
    python -m benchmarks.zoo --jobs 8 --minutes 8 --results zoo.jsonl    # many at once; ends by itself (zoo_jobs.py)
    torchrun --nproc_per_node=2 -m benchmarks.zoo fully_sharded tensor_parallel sequence_parallel
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.programs import PROGRAMS, Job

LOWS: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
KINDS = (
    *("vision", "language", "generative", "methods", "parallel", "libraries"),
    *("layers", "attention", "functions", "autograd", "updates", "research"),
)


class Outcome(NamedTuple):
    """What one program gave under the tool."""

    verdicts: Counter[str]
    wrong: Counter[tuple[str, str, str]]  # operator, phase, module
    reasons: tuple[str, ...]  # of what is wrong, the first few
    skipped: Counter[str]  # what was not compared, with the reason
    failed: Counter[str]  # failures of the tool itself
    coverage: str = ""  # the first line of the summary
    error: str = ""  # of the program


def load() -> None:
    """Import every module of programs."""
    import importlib

    for kind in KINDS:
        importlib.import_module(f"benchmarks.programs.{kind}")


def has_images(name: str) -> bool:
    """Whether a program has a layout to choose (`has_images("vgg")`): images, and the networks for them."""
    images = ("timm_", "hf_vit", "hf_deit", "hf_swin", "hf_convnext", "hf_resnet", "hf_segformer")
    return name.startswith(images) or getattr(PROGRAMS[name], "__module__", "") == "benchmarks.programs.vision"


def prepare(tf32: bool) -> None:
    """Make "cuda" a device that there is, and import the programs."""
    if not torch.cuda.is_available():
        import ditorch  # noqa: F401  makes "cuda" the software accelerator
    load()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32


def watch(name: str, job: Job, steps: int) -> Outcome:
    """Train one program under OpAutoCompare."""
    import op_tools

    torch.manual_seed(0)
    error = ""
    try:
        step = PROGRAMS[name](job)
        comparison: Any = op_tools.OpAutoCompare()
        with comparison:
            for _ in range(steps):
                step()
    except Exception as problem:  # the program's own, or what the tool made of it
        error = f"{type(problem).__name__}: {problem}".splitlines()[0]
        if os.environ.get("ZOO_TRACE"):
            traceback.print_exc()
        return Outcome(Counter(), Counter(), (), Counter(), Counter(), error=error)
    verdicts = Counter(row["verdict"] for row in comparison.records())
    wrong = Counter((b.op, b.phase, b.module) for b in comparison.blames)
    reasons = tuple(dict.fromkeys(blame.reason for blame in comparison.blames))[:8]
    skipped: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for finding in comparison.findings():
        if finding.kind == "skipped":
            skipped[f"{finding.op}: {finding.message}"] += 1
        elif finding.kind == "tool-failure":
            failed[f"{finding.op}: {finding.message}"] += 1
    return Outcome(verdicts, wrong, reasons, skipped, failed, comparison.summary()[0])


def main() -> int:
    """Run the programs and print the table; exit with 1 when there is an alarm or a failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="programs (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names of the programs")
    parser.add_argument("--low", default="", help=f"comma-separated, of {', '.join(LOWS)} (default: all)")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0, help="threads of PyTorch's CPU kernels")
    parser.add_argument("--channels-last", action="store_true", help="images and networks in channels_last")
    parser.add_argument("--tf32", action="store_true", help="let float32 convolutions and products be in TF32")
    parser.add_argument("--part", default="", metavar="I/N", help="only every Nth program, from the Ith (0/4)")
    parser.add_argument("--jobs", type=int, default=0, help="so many processes at once, with a short report")
    parser.add_argument("--minutes", type=float, default=8.0, help="with --jobs: for everything")
    parser.add_argument("--each", type=float, default=60.0, help="with --jobs: seconds for one run")
    parser.add_argument("--results", default="", help="with --jobs: file of results; those it has are not run again")
    parser.add_argument("--summary", default="", metavar="FILE", help="print what a file of results says")
    options = parser.parse_args()
    if options.summary:
        from benchmarks import zoo_jobs

        lines, fine = zoo_jobs.summary(zoo_jobs.read(options.summary))
        print("\n".join(lines))
        return 0 if fine else 1
    crew = None
    if options.jobs and not options.list:
        from benchmarks import zoo_jobs

        how = zoo_jobs.Options(options.steps, options.tf32, options.each)
        crew = zoo_jobs.Zoo(options.jobs, options.minutes, how)
    os.environ["OP_TOOLS_CONSOLE"] = "off"
    results = os.environ["OP_TOOLS_RESULTS_DIR"] = tempfile.mkdtemp(prefix="zoo-")
    prepare(options.tf32)
    if options.list:
        print("\n".join(PROGRAMS))
        return 0
    if options.threads:
        torch.set_num_threads(options.threads)
    unknown = [name for name in options.names if name not in PROGRAMS]
    if unknown:
        parser.error(f"no such program: {', '.join(unknown)} (see --list)")
    names = options.names or list(PROGRAMS)
    if options.part:
        start, count = (int(n) for n in options.part.split("/"))
        names = names[start::count]
    lows = options.low.split(",") if options.low else list(LOWS)
    if crew is not None:
        return crew.run(names, lows, options.results)
    total: Counter[str] = Counter()
    for name in names:
        for low in lows:
            started = time.perf_counter()
            found = watch(name, Job("cuda", LOWS[low], options.channels_last), options.steps)
            report(name, low, found, time.perf_counter() - started)
            total.update(found.verdicts)
            total["programs"] += 1
            total["programs with an alarm"] += bool(found.wrong)
            total["errors"] += bool(found.error) + len(found.failed)
            shutil.rmtree(results, ignore_errors=True)
    print(f"{dict(total)}; torch {torch.__version__}")
    return 0 if not (total["wrong"] or total["errors"]) else 1


def report(name: str, low: str, found: Outcome, seconds: float) -> None:
    """Print the lines of one program."""
    counts = ", ".join(f"{n} {verdict}" for verdict, n in found.verdicts.most_common())
    print(f"{name:24s} {low:9s} {seconds:6.1f} s  {found.error or counts}", flush=True)
    if found.coverage and "every call" not in found.coverage:
        print(f"    {found.coverage.partition('; ')[2] or found.coverage}")
    for (op, phase, module), count in found.wrong.most_common(8):
        print(f"    WRONG {op} {phase} in {module or '-'}: {count}")
    for reason in found.reasons[:1]:
        print(f"    first: {reason}"[:260])
    for text, _ in found.skipped.most_common(8):
        print(f"    skipped {text}"[:200])
    for text, _ in found.failed.most_common(8):
        print(f"    FAILED {text}"[:260])


if __name__ == "__main__":
    sys.exit(main())
