"""Runs PyTorch's operator database on a device and through the verdict, and prints every alarm.

    python benchmarks/verdict_op_db.py --device cuda --json op_db.json
    python benchmarks/verdict_op_db.py --device cpu --dtypes bfloat16 --ops 'nn.functional.*'

On a device with correct kernels there must be none, except those in `verdict_ledger.txt`, which say why.
`--device refs --dtypes float32` takes the CPU with fused kernels done step by step: other correct kernels, that
round in other places.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import multiprocessing
import os
import random
import re
import sys
import time
import traceback
import types
import warnings
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.utils._python_dispatch import TorchDispatchMode

LEDGER = Path(__file__).with_name("verdict_ledger.txt")


@dataclasses.dataclass
class Outcome:
    """What happened to one (operator, dtype) pair."""

    op: str
    dtype: str
    samples: int = 0
    verdicts: dict[str, int] = dataclasses.field(default_factory=dict)
    alarms: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    excess: dict[str, float] = dataclasses.field(default_factory=dict)  # error / bound, per part
    not_comparable: dict[str, int] = dataclasses.field(default_factory=dict)
    errors: dict[str, int] = dataclasses.field(default_factory=dict)
    probes: int = 0
    seconds: float = 0.0
    tightness: list[float] = dataclasses.field(default_factory=list)  # of each result: its bound / its largest error

    @property
    def key(self) -> str:
        return f"{self.op} {self.dtype}"


# --- one pair, in a worker ----------------------------------------------------------------------------


def database() -> list[Any]:
    """PyTorch's op_db, also where the package that its tests need is not installed."""
    if importlib.util.find_spec("expecttest") is None:
        from ditorch.conformance.databases import import_test_helpers

        import_test_helpers()
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def operators(pattern: str, dtypes: list[str]) -> list[tuple[int, str]]:
    """Every (index in op_db, dtype) that the CPU supports and the pattern wants."""
    op_db = database()
    found = []
    for index, info in enumerate(op_db):
        if pattern and not re.fullmatch(pattern, op_name(info)):
            continue
        for dtype in dtypes:
            if getattr(torch, dtype) in info.supported_dtypes("cpu"):
                found.append((index, dtype))
    return found


def op_name(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


def _without_console() -> None:
    """Where rich is not installed, take the modules of op_tools without the package's own imports."""
    try:
        import op_tools  # noqa: F401
    except ImportError:
        package = types.ModuleType("op_tools")
        package.__path__ = [str(Path(__file__).resolve().parents[1] / "op_tools")]
        sys.modules["op_tools"] = package


class _Decomposed(TorchDispatchMode):
    """Fused kernels done step by step: as correct as the kernel, but rounded in other places."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from op_tools.call import facts

        steps = facts.decomposition(func)
        if steps is None:
            return func(*args, **(kwargs or {}))
        return steps(*args, **(kwargs or {}))


class Runner:
    """Runs samples of op_db on the device, through the golden run and the verdict."""

    def __init__(self, device: str, limit: int | None, tightness: bool = False) -> None:
        self.op_db, self.limit, self.tightness = database(), limit, tightness
        self.refs = device == "refs"
        self.device = "cpu" if self.refs else device
        if device == "soft":
            import ditorch.soft

            ditorch.soft.load()
        if device == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.backends.cudnn.allow_tf32 = False
        _without_console()
        from op_tools.judge import golden, verdict  # after op_db, which asks for the real torch.cuda

        self.golden, self.verdict = golden, verdict

    def pair(self, index: int, dtype_name: str) -> Outcome:
        info, dtype = self.op_db[index], getattr(torch, dtype_name)
        outcome = Outcome(op_name(info), dtype_name)
        started = time.perf_counter()
        differentiable = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
        random.seed(0)
        torch.manual_seed(0)
        try:
            samples = info.sample_inputs("cpu", dtype, requires_grad=differentiable)
            for number, sample in enumerate(itertools.islice(samples, self.limit)):
                outcome.samples += 1
                self.sample(info, sample, number, outcome)
        except Exception as error:
            _count(outcome.errors, f"samples: {_line(error)}")
        outcome.seconds = round(time.perf_counter() - started, 3)
        return outcome

    def sample(self, info: Any, sample: Any, number: int, outcome: Outcome) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            return sample.output_process_fn_grad(info.op(*args, **kwargs))

        args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
        name = f"torch.{info.name}"
        traits = self.golden.OpTraits(name, call, random=None)
        before = self.moved((args, kwargs), "cpu")  # samples may be changed by the call
        try:
            outputs, grad_outputs, grad_inputs = self.on_device(call, args, kwargs, number)
        except Exception as error:
            _count(outcome.errors, f"device: {_line(error)}")
            if "CUDA error" in str(error) or "device-side assert" in str(error):
                raise SystemExit(3) from error  # this process can no longer use the device
            return
        golden_args, golden_kwargs = before
        result = self.golden.run(
            call, golden_args, golden_kwargs, name=name, traits=traits, grad_outputs=grad_outputs, device=self.device
        )
        judgement = self.verdict.judge_call(name, result, outputs=outputs, grad_inputs=grad_inputs, max_seconds=10)
        if self.tightness and result.comparable:
            for part, ours, theirs in (
                ("output", outputs, result.outputs),
                ("grad_input", grad_inputs, result.grad_inputs),
            ):
                outcome.tightness += _tightness(result, part, ours, theirs) if theirs is not None else []
        _count(outcome.verdicts, judgement.verdict)
        outcome.probes += judgement.probes
        for row in judgement.rows:
            outcome.excess[row.part] = max(outcome.excess.get(row.part, 0.0), row.excess)
            if row.verdict == self.verdict.WRONG and len(outcome.alarms) < 6:
                outcome.alarms.append(
                    {
                        "sample": number,
                        "row": row.name,
                        "reason": row.reason,
                        "excess": row.excess,
                        "max_ulp": row.max_ulp,
                        "cosine": row.cosine,
                        "inputs": [f"{str(t.dtype)[6:]}{list(t.shape)}" for t in self.golden.tensors_in(before)][:8],
                        "kwargs": {k: repr(v)[:60] for k, v in kwargs.items() if not isinstance(v, torch.Tensor)},
                        "args": [repr(v)[:60] for v in sample.args if not isinstance(v, torch.Tensor)][:8],
                    }
                )
        if judgement.verdict == self.verdict.NOT_COMPARABLE:
            _count(outcome.not_comparable, judgement.reason[:160])

    def on_device(self, call: Any, args: Any, kwargs: Any, number: int) -> tuple[Any, Any, Any]:
        args, kwargs = self.moved((args, kwargs), self.device)
        inputs = list(self.golden.tensors_in((args, kwargs)))
        with self.mode():
            outputs = call(*args, **kwargs)
        tensors = list(self.golden.tensors_in(outputs))
        wanted = [t for t in inputs if t.requires_grad and t.is_leaf]
        used = [t for t in tensors if t.requires_grad and (t.is_floating_point() or t.is_complex())]
        host = _to_host(outputs)
        if not wanted or not used:
            return host, None, None
        generator = torch.Generator().manual_seed(number)
        cotangents: list[Any] = []
        for tensor in tensors:
            drawn = None
            if any(tensor is u for u in used):
                kind = torch.complex64 if tensor.is_complex() else torch.float32
                drawn = torch.randn(tensor.shape, generator=generator, dtype=kind).to(tensor.dtype)
            cotangents.append(drawn)
        try:
            with self.mode():
                grads = torch.autograd.grad(
                    used,
                    wanted,
                    [c.to(self.device) for c in cotangents if c is not None],
                    allow_unused=True,
                )
        except (NotImplementedError, RuntimeError) as error:
            if "CUDA error" in str(error):
                raise
            return host, None, None  # no gradient for this dtype or these arguments
        by_input = {id(t): g for t, g in zip(wanted, grads)}
        grad_inputs = [_to_host(by_input.get(id(t))) for t in inputs]
        return host, cotangents, grad_inputs

    def mode(self) -> Any:
        if not self.refs:
            return contextlib.nullcontext()
        return _Decomposed()

    def moved(self, value: Any, device: str) -> Any:
        """Private copies on a device, with strides and sharing kept; device arguments follow."""
        memo: dict[int, Any] = {}

        def tensor(t: torch.Tensor) -> torch.Tensor:
            if id(t) not in memo:
                memo[id(t)] = _copy_to(t, device)
            return memo[id(t)]

        return _replace_devices(self.golden.map_tensors(value, tensor), device)


def _tightness(result: Any, part: str, ours: Any, theirs: Any) -> list[float]:
    """How often the largest error of each result fits into the bound of its element, after all probes."""
    from op_tools.judge.pair import CallUncertainty
    from op_tools.judge.standards import ulp
    from op_tools.judge.verdict import leaves_of

    device, golden, found = list(leaves_of(ours)), list(leaves_of(theirs)), []
    of_call = CallUncertainty(result, part, device, None)
    for position, (d, g) in enumerate(zip(device, golden)):
        if (
            not isinstance(d, torch.Tensor)
            or not d.is_floating_point()
            or not isinstance(g, torch.Tensor)
            or not d.numel()
        ):
            continue
        uncertainty = of_call.of(d)
        if not uncertainty.usable or uncertainty.structure.exact or d.shape != g.shape:
            continue
        while uncertainty.grow():
            pass
        error, size = (d.double() - g.double()).abs(), g.double().abs()
        sigma = uncertainty.sigma(position)
        if sigma is None or sigma.shape != size.shape:
            continue
        sigma = torch.maximum(sigma, size * uncertainty.least_error(position))
        bound = ulp.STORED * torch.finfo(d.dtype).eps / 2 * size + ulp.SIGMAS * sigma
        normal = (error > 0) & error.isfinite() & (size > torch.finfo(d.dtype).smallest_normal)
        if bool(normal.any()):
            found.append(float((bound / error)[normal].min()))
    return found


def _copy_to(tensor: torch.Tensor, device: str) -> torch.Tensor:
    source = tensor.detach()
    if source.layout != torch.strided or source.is_quantized or source.is_conj() or source.is_neg():
        return source.clone().to(device).requires_grad_(tensor.requires_grad)
    storage = source.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    copied = flat.to(device, copy=True)
    made = torch.empty(0, dtype=source.dtype, device=device)
    made.set_(copied.untyped_storage(), source.storage_offset(), source.shape, source.stride())
    return made.requires_grad_(tensor.requires_grad)


def _replace_devices(value: Any, device: str) -> Any:
    if isinstance(value, torch.device) or (isinstance(value, str) and value in ("cpu", "cuda")):
        return device
    if type(value) in (list, tuple):
        return type(value)(_replace_devices(v, device) for v in value)
    if type(value) is dict:
        return {k: _replace_devices(v, device) for k, v in value.items()}
    return value


def _to_host(value: Any) -> Any:
    from op_tools.call.description import map_tensors

    return map_tensors(value, lambda t: t.detach().cpu() if t.device.type != "cpu" else t.detach().clone())


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160] if text else ''}"


def _count(counts: dict[str, int], what: str) -> None:
    counts[what] = counts.get(what, 0) + 1


# --- many pairs, in processes that may die --------------------------------------------------------------


def _work(pipe: Connection, device: str, limit: int | None, threads: int, tightness: bool) -> None:
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    os.environ.setdefault("PYTORCH_JIT", "0")
    try:
        runner = Runner(device, limit, tightness)
        pipe.send("ready")
        while True:
            item = pipe.recv()
            if item is None:
                return
            pipe.send(runner.pair(*item))
    except (EOFError, KeyboardInterrupt):
        return
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        raise


class Worker:
    """A process that does one pair after the other."""

    def __init__(self, device: str, limit: int | None, threads: int, tightness: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, device, limit, threads, tightness), daemon=True)
        self.process.start()
        theirs.close()
        self.item: tuple[int, str] | None = None
        self.since = time.monotonic()

    def give(self, item: tuple[int, str] | None) -> None:
        self.item, self.since = item, time.monotonic()
        self.pipe.send(item)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def run_all(options: argparse.Namespace, items: list[tuple[int, str]], names: list[str]) -> list[Outcome]:
    """Every pair once, on several processes; one that dies or hangs takes only its pair with it."""
    # expensive ones first would be better for the end of the run; their cost is not known beforehand
    queue = collections.deque(
        sorted(items, key=lambda i: names[i[0]].startswith(("linalg", "nn.functional")), reverse=True)
    )
    outcomes: list[Outcome] = []
    make = lambda: Worker(options.device, options.limit, options.threads, options.tightness)  # noqa: E731
    workers = [make() for _ in range(min(options.workers, max(len(items), 1)))]
    until = time.monotonic() + options.budget
    while workers:
        ready = wait([w.pipe for w in workers], timeout=1.0)
        for worker in list(workers):
            lost = ""
            if worker.pipe in ready:
                try:
                    reply = worker.pipe.recv()
                except (EOFError, OSError):
                    worker.process.join()
                    lost = f"the process ended with code {worker.process.exitcode}"
                else:
                    if isinstance(reply, Outcome):
                        outcomes.append(reply)
                        report(reply, options)
            elif worker.item is not None and time.monotonic() - worker.since > options.pair_seconds:
                lost = f"took longer than {options.pair_seconds} s"
            elif time.monotonic() > until:
                lost = "no time left"
            if lost:
                worker.end()
                workers.remove(worker)
                if worker.item is not None:
                    outcomes.append(Outcome(names[worker.item[0]], worker.item[1], errors={lost: 1}))
                    report(outcomes[-1], options)
                if queue and time.monotonic() < until:
                    workers.append(make())
            elif worker.pipe in ready:
                if queue and time.monotonic() < until:
                    worker.give(queue.popleft())
                else:
                    worker.end()
                    workers.remove(worker)
    outcomes += [Outcome(names[i], d, errors={"not run: no time left": 1}) for i, d in queue]
    return outcomes


def report(outcome: Outcome, options: argparse.Namespace) -> None:
    for alarm in outcome.alarms[: options.show]:
        print(
            f"WRONG {outcome.key} sample {alarm['sample']}: {alarm['row'].split()[-1]}: {alarm['reason']} "
            f"| ulp {alarm['max_ulp']:.3g} cos {alarm['cosine']:.6f} "
            f"{alarm['inputs']} {alarm['args']} {alarm['kwargs']}",
            flush=True,
        )
    for reason, count in outcome.errors.items():
        if options.verbose or not reason.startswith("device:"):
            print(f"ERROR {outcome.key} ({count}x): {reason}", flush=True)
    if options.verbose:
        for reason, count in outcome.not_comparable.items():
            print(f"NOT COMPARABLE {outcome.key} ({count}x): {reason}", flush=True)


def read_ledger(path: Path, device: str) -> dict[str, str]:
    """`device  op dtype  reason` lines: alarms that are explained."""
    known = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        text = line.partition("#")[0].strip()
        if text:
            where, op, dtype, reason = text.split(None, 3)
            if where == device:
                known[f"{op} {dtype}"] = reason
    return known


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "refs", "soft", "cuda"])
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    parser.add_argument("--ops", default="", help="regular expression of operator names")
    parser.add_argument("--limit", type=int, default=None, help="only the first N samples of each")
    parser.add_argument("--json", type=Path, default=None, help="write all outcomes here")
    parser.add_argument("--workers", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 1)))
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each worker")
    parser.add_argument("--budget", type=float, default=330, help="seconds for the whole run")
    parser.add_argument("--pair-seconds", type=float, default=90, help="seconds for one operator and dtype")
    parser.add_argument("--show", type=int, default=2, help="alarms printed per operator and dtype")
    parser.add_argument("--tightness", action="store_true", help="how far the bound is above the largest error (slow)")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    started = time.monotonic()
    op_db = database()
    names = [op_name(info) for info in op_db]
    items = operators(options.ops, options.dtypes.split(","))
    outcomes = run_all(options, items, names)
    outcomes.sort(key=lambda o: o.key)
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(o) for o in outcomes], indent=0, default=str))
    return summarise(options, outcomes, time.monotonic() - started)


def summarise(options: argparse.Namespace, outcomes: list[Outcome], seconds: float) -> int:
    ledger = read_ledger(LEDGER, options.device)
    wrong = {o.key for o in outcomes if o.alarms}
    complete = not options.ops and options.limit is None
    stale = sorted({o.key for o in outcomes if o.key in ledger and not o.errors} - wrong) if complete else []
    totals: collections.Counter[str] = collections.Counter()
    for outcome in outcomes:
        totals.update(outcome.verdicts)
        totals["errors on the device"] += sum(n for r, n in outcome.errors.items() if r.startswith("device:"))
    print(f"{len(outcomes)} pairs in {seconds:.0f} s on {options.device}, torch {torch.__version__}: {dict(totals)}")
    for dtype in options.dtypes.split(",") if options.tightness else ():
        found = sorted(t for o in outcomes if o.dtype == dtype for t in o.tightness)
        if found:
            low, median, high = (found[len(found) * n // 4] for n in (1, 2, 3))
            print(
                f"{dtype}: bound / largest error ({len(found)}): median {median:.1f}, quartiles {low:.1f}, {high:.1f}"
            )
    unexplained = sorted(wrong - set(ledger))
    print(f"{len(wrong)} pairs with alarms, {len(wrong & set(ledger))} of them explained in {LEDGER.name}")
    for key in unexplained:
        print(f"  unexplained: {key}")
    for key in stale:
        print(f"  in the ledger, but right: {key}")
    return 1 if unexplained or stale else 0


if __name__ == "__main__":
    sys.exit(main())
