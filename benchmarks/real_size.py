"""Cost of the tools on models of real size: GPT-2 124M, a Llama-7B layer, ResNet-50, RWKV; and on single large calls.

Each pair of model and tool runs in a process of its own, between two bare runs of the same model. `all-in` is the time
of all steps with starting and stopping the tool, divided by that of as many bare steps (the mean of both runs);
`marginal` is the median step while the tool is active. OpCapture writes a store, as `op_tools run` does, and is held
against plain files that as many threads write: run it with `--steps 1`. Memory is the peak beyond that of the bare run,
worker processes included. One JSON line per run goes to `--json`, or to the standard output after the table.

    python -m benchmarks.real_size --steps 10                                  # on the accelerator
    python -m benchmarks.real_size --model gpt2 --tool OpAutoCompare --steps 10
    python -m benchmarks.real_size --single                                    # single calls, healthy and broken
    python -m benchmarks.real_size --bits --model gpt2                         # bits with and without the tools
    python -m benchmarks.real_size --tiny --steps 2                            # a smoke test for two cores
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.real_models import MODELS, TRAINED, Step  # noqa: E402

OBSERVING = ["OpObserve", "OpTimeMeasure", "OpOverflowCheck", "OpAutoCompare"]
TOOLS = ["bare", "OpAutoCompare", "OpObserve", "OpTimeMeasure", "OpOverflowCheck", "OpCapture"]


# --- measuring ----------------------------------------------------------------------------------------


class Memory:
    """The peak of the memory of this process and its children, looked at ten times a second."""

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            self.peak = max(self.peak, _resident())

    def end(self) -> int:
        """The peak in bytes."""
        self._stop.set()
        self._thread.join()
        return max(self.peak, _resident())


def _resident() -> int:
    """Bytes of this process and those that it started, directly or not, that no file backs; what is shared counts once.

    Adding up shares (smaps_rollup) walks all pages. Of this process that took 7 of the 17 seconds of a run, ten times a
    second; of the worker processes, which are forks and share most of their memory, it is done once in a second.
    """
    total = 0
    for line in _read(Path("/proc/self/status")).splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            total += int(line.split()[1]) * 1024
    return total + _of_others()


def _of_others() -> int:
    now = time.monotonic()
    if now - _others[0] > 1:
        _others[:] = now, sum(map(_private, _started_by(os.getpid())))
    return int(_others[1])


_others = [0.0, 0.0]  # when it was looked at, and the bytes


def _started_by(process: int) -> list[int]:
    own = [int(p) for path in Path(f"/proc/{process}/task").glob("*/children") for p in _read(path).split()]
    return [*own, *[p for each in own for p in _started_by(each)]]


def _private(process: int) -> int:
    for line in _read(Path(f"/proc/{process}/smaps_rollup")).splitlines():
        if line.startswith("Pss_Anon:"):
            return int(line.split()[1]) * 1024
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _device_peak() -> int:
    try:
        return int(torch.cuda.max_memory_allocated())
    except Exception:
        return 0


def _forget_peak() -> None:
    with contextlib.suppress(Exception):
        torch.cuda.reset_peak_memory_stats()


def _wait() -> None:
    torch.cuda.synchronize()


def _prepared() -> str:
    """Make "cuda" mean the accelerator; its name."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    import ditorch

    return str(ditorch.backend.name)


def _bare(step: Step, steps: int) -> float:
    """Seconds of a step without any tool."""
    _wait()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    _wait()
    return (time.perf_counter() - started) / steps


def measured(model: str, tool: str, steps: int, tiny: bool) -> dict[str, Any]:
    """Run one model under one tool, in this process."""
    device = _prepared()
    _forget_peak()
    torch.manual_seed(0)
    step = MODELS[model](tiny)
    losses = [step() for _ in range(2)]
    bare = _bare(step, steps)
    before, device_before = _resident(), _device_peak()
    _forget_peak()
    found: dict[str, Any] = {"model": model, "tool": tool, "device": device, "steps": steps, "bare_ms": bare * 1e3}
    if tool == "bare":
        return found | {"loss": float(losses[-1])}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OP_TOOLS_RESULTS_DIR"] = folder
        os.environ.setdefault("OP_CAPTURE_FORMAT", "store")
        import op_tools

        memory, each = Memory(), []
        began = time.perf_counter()
        active = getattr(op_tools, tool)()
        active.start()
        for _ in range(steps):
            started = time.perf_counter()
            step()
            _wait()
            each.append(time.perf_counter() - started)
        active.stop()
        _wait()
        total = time.perf_counter() - began
        found["bare_around_ms"] = [bare * 1e3, (after := _bare(step, steps)) * 1e3]
        bare = (bare + after) / 2  # the machine may have become slower or quicker meanwhile
        found |= {
            "bare_ms": bare * 1e3,
            "all_in": total / (bare * steps),
            "marginal": statistics.median(each[1:] or each) / bare,
            "steps_ms": [round(e * 1e3, 1) for e in each],
            "host_bytes": max(0, memory.end() - before),
            "device_bytes": max(0, _device_peak() - device_before),
            "device_share": max(0, _device_peak() - device_before) / max(1, device_before),
            "written_bytes": sum(p.stat().st_size for p in Path(folder).rglob("*") if p.is_file()),
        }
        if tool == "OpAutoCompare":
            found |= _coverage(active)
        if tool == "OpCapture":
            threads = int(op_tools.settings.number("OP_CAPTURE_WRITERS"))
            found["bytes_per_s"] = active.bytes_written / (total - bare * steps)
            found["plain_file_bytes_per_s"] = _plain_file(Path(folder), active.bytes_written, threads)
    return found


def _plain_file(folder: Path, nbytes: int, threads: int) -> float:
    """Bytes per second that so many threads write to plain files."""
    piece = memoryview(bytearray(1 << 25))
    count = max(1, nbytes // threads // len(piece))

    def write(number: int) -> None:
        with open(folder / f"plain-{number}", "wb", buffering=0) as file:
            for _ in range(count):
                file.write(piece)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(threads)]
    started = time.perf_counter()
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    return threads * count * len(piece) / (time.perf_counter() - started)


def _coverage(tool: Any) -> dict[str, Any]:
    from op_tools.compare.judges.sampled import Sampled

    coverage, sampled = tool._teller.coverage, tool.judge(Sampled)
    missed: dict[str, int] = {}
    for ((op, _, phase), reason), count in coverage.missed.items():
        missed[f"{op} {phase}: {reason}"] = missed.get(f"{op} {phase}: {reason}", 0) + count
    done = sum(coverage.compared.values())
    wrong = [f"{b.op} {b.phase} {b.module}: {b.reason}"[:200] for b in tool.blames[:8]]
    return {
        "comparisons": done,
        "of": done + sum(missed.values()),
        "wrong": len(tool.blames),
        "first_wrong": wrong,
        "missed": dict(sorted(missed.items(), key=lambda item: -item[1])[:12]),
        "sampled": None if sampled is None else sampled.calls,
        "sampled_elements": None if sampled is None else [sampled.compared, sampled.elements],
    }


# --- bits ---------------------------------------------------------------------------------------------


def bits(model: str, tiny: bool, steps: int = 3) -> dict[str, Any]:
    """Whether losses, gradients and parameters after some steps are the same bits with each tool as without.

    With deterministic algorithms: what a bare run does not repeat says nothing about a tool.
    """
    device = _prepared()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    import op_tools

    def trained(tool: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        TRAINED.clear()
        step = MODELS[model](tiny)
        active = None if tool == "bare" else getattr(op_tools, tool)()
        with tempfile.TemporaryDirectory() as folder, active or contextlib.nullcontext():
            os.environ["OP_TOOLS_RESULTS_DIR"] = folder
            losses = [step().clone() for _ in range(steps)]
        parameters = list(TRAINED[0].parameters())
        return [*losses, *parameters, *[p.grad for p in parameters if p.grad is not None]]

    expected = [t.detach().clone() for t in trained("bare")]
    same = {}
    for tool in ("bare", *OBSERVING):
        found = trained(tool)
        same[tool] = len(found) == len(expected) and all(map(torch.equal, found, expected))
        del found
    return {"bits": same, "model": model, "device": device, "steps": steps, "tensors": len(expected)}


# --- single calls -------------------------------------------------------------------------------------


def _wrapped(y: torch.Tensor, rows: int) -> torch.Tensor:
    """As a kernel does it whose index of rows has 16 bits: those beyond are left as the first ones are."""
    flat = y.view(-1, y.shape[-1])
    if flat.shape[0] > rows:
        flat[rows:].copy_(flat[: flat.shape[0] - rows].clone())
    return y


def _singles(tiny: bool) -> dict[str, Callable[[], Step]]:
    """By name: what makes the arguments, and returns the call."""
    small, low = (64, torch.bfloat16) if tiny else (1, torch.bfloat16)

    def make(*shape: int, dtype: torch.dtype = low, grad: bool = True) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_(grad)

    def product(rows: tuple[int, ...], inside: int, outside: int, dtype: torch.dtype = low) -> Step:
        x, w = make(*rows, inside, dtype=dtype), make(outside, inside, dtype=dtype)
        sent = make(*rows, outside, dtype=dtype, grad=False)
        return lambda: F.linear(x, w).backward(sent)

    def head() -> Step:
        tokens, width, vocabulary = 8 * 1024 // small, 768 // min(small, 4), 50304 // small
        x, w, targets = make(tokens, width), make(vocabulary, width), torch.randint(vocabulary, (tokens,)).cuda()
        return lambda: F.cross_entropy(F.linear(x, w), targets).backward()

    def attention() -> Step:
        shape = (4, 32 // min(small, 8), 4096 // small, 128 // min(small, 4))
        q, k, v, sent = make(*shape), make(*shape), make(*shape), make(*shape, grad=False)
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(sent)

    def total() -> Step:
        x = make(2**21 + 64 if tiny else 2**31 + 4096, dtype=torch.float16, grad=False)
        return lambda: torch.sum(x)

    def products() -> Step:
        batch, n, k, m = (4, 512, 16, 512) if tiny else (2, 49152, 16, 49152)
        a, b = make(batch, n, k, grad=False), make(batch, k, m, grad=False)
        return lambda: torch.bmm(a, b)

    return {
        "linear (70000, 8, 64) to 32": lambda: product((70000 // min(small, 4), 8), 64, 32, torch.float32),
        "GPT-2 head 8 x 1024 to 50304, cross_entropy": head,
        "Llama-7B linear, 4096 tokens": lambda: product((4096 // small,), 4096 // small, 11008 // small),
        "attention (4, 32, 4096, 128)": attention,
        "sum of 2**31 + 4096 halves": total,
        "bmm with more than 2**32 results": products,
    }


_FAULTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "linear (70000, 8, 64) to 32": ("linear", lambda y: _wrapped(y, 65536)),
    "GPT-2 head 8 x 1024 to 50304, cross_entropy": ("linear", lambda y: _tail(y)),
    "Llama-7B linear, 4096 tokens": ("linear", lambda y: _tail(y)),
    "attention (4, 32, 4096, 128)": ("scaled_dot_product_attention", lambda y: _tail(y)),
    "bmm with more than 2**32 results": ("bmm", lambda y: _tail(y, 2**31)),
}


def _tail(y: torch.Tensor, after: int = 0) -> torch.Tensor:
    """The last elements are zero: those after so many, or a sixteenth of all."""
    flat = y.detach().view(-1)
    first = after if 0 < after < flat.numel() else flat.numel() - flat.numel() // 16
    flat[first:].zero_()
    return y


def single(name: str, tiny: bool, broken: bool) -> dict[str, Any]:
    """One large call under OpAutoCompare; with `broken`, the device returns something else."""
    device = _prepared()
    call = _singles(tiny)[name]()
    call()
    _wait()
    started = time.perf_counter()
    call()
    _wait()
    bare = time.perf_counter() - started
    before, device_before = _resident(), _device_peak()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OP_TOOLS_RESULTS_DIR"] = folder
        import op_tools

        undo = _broken(*_FAULTS[name]) if broken else lambda: None
        memory = Memory()
        began = time.perf_counter()
        with op_tools.OpAutoCompare() as tool:
            call()
        seconds = time.perf_counter() - began
        undo()
        return {
            "single": name,
            "broken": broken,
            "device": device,
            "bare_ms": bare * 1e3,
            "seconds": seconds,
            "host_bytes": max(0, memory.end() - before),
            "device_bytes": max(0, _device_peak() - device_before),
            **_coverage(tool),
        }


def _broken(name: str, fault: Callable[[Any], Any]) -> Callable[[], None]:
    """Plant a fault in a function of PyTorch, below what the tools see of it; how to undo it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Fault(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            kernels = {
                "linear": ("mm", "addmm", "linear"),
                "scaled_dot_product_attention": ("_scaled_dot",),
            }
            plain = func._schema.name.removeprefix("aten::")
            if any(plain.startswith(k) if k.startswith("_") else plain == k for k in kernels.get(name, (name,))):
                first = found[0] if isinstance(found, tuple) else found
                if first.is_contiguous() and first.device.type != "cpu" and not self.done:
                    self.done = True
                    with torch._C.DisableTorchFunction():  # the tools are not to see what breaks it
                        fault(first)
            return found

        done = False

    mode = Fault()
    mode.__enter__()
    return lambda: mode.__exit__(None, None, None)


# --- the command --------------------------------------------------------------------------------------


def _in_a_process(arguments: list[str], timeout: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.real_size", *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {timeout:.0f} s", "arguments": arguments}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    if done.returncode or not lines:
        return {"failed": (done.stderr or done.stdout)[-600:], "arguments": arguments}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _line(found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"{' '.join(found['arguments'])}: failed: {found['failed']}"
    if "bits" in found:
        said = ", ".join(f"{tool} {'the same' if same else 'OTHER BITS'}" for tool, same in found["bits"].items())
        return f"{found['model']:<8} {found['tensors']} losses, parameters and gradients: {said}"
    if "single" in found:
        what = "broken" if found["broken"] else "healthy"
        share = f"{found['comparisons']} of {found['of']} compared, {found['wrong']} wrong"
        memory = f"host {found['host_bytes'] / 2**30:.2f} GiB"
        return f"{found['single']:<46} {what:<8} {found['seconds']:8.2f} s  {share}, {memory}"
    if found["tool"] == "bare":
        return f"{found['model']:<8} bare          {found['bare_ms']:9.1f} ms a step"
    if "bytes_per_s" in found:
        speed = found["bytes_per_s"] / found["plain_file_bytes_per_s"]
        print(f"{found['model']:<8} {found['tool']:<15} {speed:.0%} of the speed of plain files")
    share = (
        f", {found['comparisons']} of {found['of']} compared, {found['wrong']} wrong" if "comparisons" in found else ""
    )
    memory = f"host {found['host_bytes'] / 2**30:.2f} GiB, device {found['device_share']:.1%}"
    return (
        f"{found['model']:<8} {found['tool']:<15} all-in {found['all_in']:7.1f} x  marginal {found['marginal']:7.1f} x "
        f" {memory}, written {found['written_bytes'] / 2**20:.1f} MiB{share}"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(MODELS), help="only this model; may be repeated")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="only this tool; may be repeated")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a smoke test")
    parser.add_argument("--single", action="store_true", help="single calls instead of models")
    parser.add_argument("--bits", action="store_true", help="whether the tools change the bits of a run")
    parser.add_argument("--json", type=Path, help="append one JSON line per run to this file")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one run")
    parser.add_argument("--here", nargs=2, metavar=("WHAT", "HOW"), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    os.environ.setdefault("OP_TOOLS_CONSOLE", "off")
    if args.here:
        what, how = args.here
        found = (
            bits(what, args.tiny)
            if args.bits
            else single(what, args.tiny, how == "broken")
            if args.single
            else measured(what, how, args.steps, args.tiny)
        )
        print(json.dumps(found), flush=True)
        return 0
    more = ["--tiny"] * args.tiny
    if args.single:
        both = ("healthy", "broken")
        runs = [[n, how] for n in _singles(True) for how in both if how == "healthy" or n in _FAULTS]
        runs = [["--single", *more, "--here", *run] for run in runs]
    elif args.bits:
        runs = [["--bits", *more, "--here", m, "every"] for m in args.model or ["gpt2"]]
    else:
        tools = args.tool or ["bare", "OpAutoCompare"]
        runs = [["--steps", str(args.steps), *more, "--here", m, t] for m in args.model or MODELS for t in tools]
    failed = False
    for run in runs:
        found = _in_a_process(run, args.timeout)
        failed |= "failed" in found
        print(_line(found), flush=True)
        text = json.dumps(found)
        if args.json:
            with args.json.open("a") as file:
                file.write(text + "\n")
        else:
            print(text, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
