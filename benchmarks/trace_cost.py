"""What OpTrace costs: GPT-2 124M (8 x 512 tokens, bfloat16 autocast, fused AdamW), all-in over some steps.

    python -m benchmarks.trace_cost --steps 10            # on the accelerator
    python -m benchmarks.trace_cost --tiny --steps 2      # a smoke test
    python -m benchmarks.trace_cost --cpu --tiny          # CPU time and Python calls of a step, beside OpObserve
    python -m benchmarks.trace_cost --plain --phases      # where the time of a step goes
    python -m benchmarks.trace_cost --processes 5         # five runs of each form, each in a process of its own

All-in is from the start of the tool to the end of its stop, the first step included, divided by as many bare steps,
before and after.
Each form runs twice: the second time the kernel is compiled and every kind of call has been seen. Libraries are built
before; first, prints of the GPU are compared with those of the CPU, bit for bit.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("OP_TOOLS_CONSOLE", "off")

import torch

from benchmarks.real_models import GPT2, _trained, gpt2


def plain(tiny: bool) -> Any:
    """GPT-2 of this project: what transformers writes as eight operators is one here."""
    layers, width, heads, vocabulary, length, batch = (2, 64, 2, 512, 32, 2) if tiny else (12, 768, 12, 50257, 512, 8)
    tokens = torch.randint(vocabulary, (batch, length + 1)).cuda()
    model = GPT2(layers, width, heads, vocabulary, length).cuda()
    return _trained(model, lambda: model(tokens[:, :-1], tokens[:, 1:]))


def _wait() -> None:
    torch.cuda.synchronize()


def _timed(step: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        _wait()
        found.append(time.perf_counter() - began)
    return found


def prints_agree() -> str:
    """Whether the GPU finds the prints of the CPU, over dtypes, sizes and layouts; one line."""
    from op_tools.call.devices import accelerator_type
    from op_tools.native import compiling
    from op_tools.trace.device_prints import BROKEN, DevicePrints, is_compiling, kernel_of
    from op_tools.trace.prints import fingerprint

    if accelerator_type() != "cuda":
        return "prints: no GPU of NVIDIA; PyTorch's operators compute them"
    is_compiling(0)
    compiling.wait()
    kernel = kernel_of(0)
    if kernel is None:
        return f"prints: NO KERNEL ({BROKEN.get(0, 'it was not compiled')}); PyTorch's operators compute them, slowly"
    draw = torch.Generator().manual_seed(5)
    tensors = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for shape in ((1,), (255,), (8193,), (3, 1000, 7), (64, 8, 12, 17), (1_100_003,)):
            x = torch.randn(shape, generator=draw).mul_(3.7).to(dtype)
            x.view(-1)[-1] = 1e-6
            tensors += [x, x.transpose(0, -1), x[..., ::2], x * 0]
            bad = x.clone()
            bad.view(-1)[0] = float("nan")
            bad.view(-1)[-1] = float("-inf")
            tensors.append(bad)
    found: dict[int, Any] = {}
    prints = DevicePrints(kernel, lambda keys, rows: found.update(zip(keys, rows.tolist())))
    left = prints.add([(number, x.to("cuda"), 0) for number, x in enumerate(tensors)])
    prints.land()
    wrong = [key for key, row in found.items() if row != fingerprint(tensors[key]).tolist()]
    told = [(str(tensors[key].dtype), tuple(tensors[key].shape), tensors[key].stride()) for key in wrong[:3]]
    return (
        f"prints: {len(found) - len(wrong)} of {len(tensors)} equal to the CPU's, {len(left)} not taken; wrong {told}"
    )


def measured(step: Any, steps: int, prints: bool, profile: int = 0) -> str:
    """One line: all-in, a later step, what was recorded; `profile` lines of where three more steps spend their time."""
    import op_tools

    cpu = [time.process_time()]
    bare = sum(_timed(step, steps)) / steps
    cpu.append(time.process_time())
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        tool = op_tools.OpTrace(to=folder, prints=prints)
        tool.start()
        each = _timed(step, steps)
        late = 0.0
        if profile:
            late = time.perf_counter()
            watch = cProfile.Profile()
            watch.enable()
            _timed(step, 3)
            watch.disable()
            pstats.Stats(watch, stream=sys.stdout).sort_stats("tottime").print_stats(profile)
            late = time.perf_counter() - late
        tool.stop()
        _wait()
        total = time.perf_counter() - began - late
        cpu.append(time.process_time())
        told = tool.summary()[0]
    around = bare, sum(_timed(step, steps)) / steps
    bare = sum(around) / 2  # the machine may have become slower or quicker meanwhile
    later = statistics.median(each[1:] or each)
    return (
        f"prints {'on' if prints else 'off'}: bare {around[0] * 1e3:.1f} and {around[1] * 1e3:.1f} ms, "
        f"all-in {total / (bare * steps):.2f} x, "
        f"a later step {later / bare:.2f} x, the first {each[0] * 1e3:.0f} ms, "
        f"stop {(total - sum(each)) * 1e3:.0f} ms; CPU time of a step {(cpu[1] - cpu[0]) / steps * 1e3:.0f} and "
        f"{(cpu[2] - cpu[1]) / steps * 1e3:.0f} ms; {told}"
    )


def in_processes(options: argparse.Namespace) -> None:
    """Measure each form in new processes, one after the other; they get ready side by side."""
    more = [word for name in ("tiny", "plain") if getattr(options, name) for word in (f"--{name}",)]
    command = [sys.executable, "-m", "benchmarks.trace_cost", "--steps", str(options.steps), *more]
    started = [
        subprocess.Popen([*command, "--one", form], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(options.processes)
        for form in ("off", "on")
    ]
    for process in started:
        assert process.stdout is not None
        while process.stdout.readline().strip() not in ("ready", ""):
            pass
    for process in started:
        print(process.communicate("go\n")[0].strip(), flush=True)


def phases(tiny: bool, steps: int) -> None:
    """Times of forward, backward and optimizer, with and without a wait for the device after each; bare and traced.

    Without the wait they are the time of the host, which the recorder adds to.
    """
    import op_tools

    layers, width, heads, vocabulary, length, batch = (2, 64, 2, 512, 32, 2) if tiny else (12, 768, 12, 50257, 512, 8)
    tokens = torch.randint(vocabulary, (batch, length + 1)).cuda()
    model = GPT2(layers, width, heads, vocabulary, length).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def forward() -> Any:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(tokens[:, :-1], tokens[:, 1:])

    def one_step(wait: bool) -> list[float]:
        times = [time.perf_counter()]
        loss = forward()
        if wait:
            _wait()
        times.append(time.perf_counter())
        optimizer.zero_grad()
        times.append(time.perf_counter())
        loss.backward()
        if wait:
            _wait()
        times.append(time.perf_counter())
        optimizer.step()
        if wait:
            _wait()
        times.append(time.perf_counter())
        _wait()
        times.append(time.perf_counter())
        return [1e3 * (after - before) for before, after in itertools.pairwise(times)]

    for form in ("bare", "prints off", "prints on"):
        with tempfile.TemporaryDirectory() as folder:
            tool = None if form == "bare" else op_tools.OpTrace(to=folder, prints=form == "prints on")
            if tool is not None:
                tool.start()
            for wait in (False, True):
                one_step(wait)
                found = sorted([one_step(wait) for _ in range(steps)], key=sum)[steps // 2]
                names = ("forward", "zero_grad", "backward", "optimizer", "the device's rest")
                words = ", ".join(f"{name} {value:.1f}" for name, value in zip(names, found))
                print(f"{form}, {'waiting' if wait else 'not waiting'}: {sum(found):.1f} ms: {words}", flush=True)
            if tool is not None:
                tool.stop()


def _cpu_times(step: Any, steps: int) -> None:
    """CPU time and Python calls of a step: bare, under OpObserve, under OpTrace without and with prints, in turns."""
    import op_tools

    forms: dict[str, Any] = {
        "bare": None,
        "OpObserve": lambda _: op_tools.OpObserve(),
        "OpTrace": lambda folder: op_tools.OpTrace(to=folder, prints=False),
        "OpTrace with prints": lambda folder: op_tools.OpTrace(to=folder),
    }
    found: dict[str, list[float]] = {name: [] for name in forms}
    calls: dict[str, int] = {}
    for _ in range(3):
        for name, make in forms.items():
            with tempfile.TemporaryDirectory() as folder:
                tool = None if make is None else make(folder)
                if tool is not None:
                    tool.start()
                for _ in range(2):
                    step()
                for _ in range(steps):
                    began = time.process_time()
                    step()
                    _wait()
                    found[name].append(time.process_time() - began)
                watch = cProfile.Profile()
                watch.enable()
                step()
                watch.disable()
                calls[name] = sum(entry.callcount for entry in watch.getstats())
                if tool is not None:
                    tool.stop()
    for name, times in found.items():
        times.sort()
        low = f"least {times[0] * 1e3:.1f} ms, quartile {times[len(times) // 4] * 1e3:.1f} ms"
        print(f"{name}: CPU time of a step {low}; {calls[name]:,} Python calls of its thread", flush=True)


def main() -> None:
    """Measure without and with fingerprints, twice each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--plain", action="store_true", help="this project's GPT-2 instead of the one of transformers")
    parser.add_argument("--profile", action="store_true", help="where the time of three later steps goes")
    parser.add_argument("--cpu", action="store_true", help="CPU time and Python calls of a step instead")
    parser.add_argument("--phases", action="store_true", help="times of forward, backward and optimizer, as well")
    parser.add_argument("--processes", type=int, default=0, help="measure each form in so many new processes instead")
    parser.add_argument("--one", choices=("off", "on"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        import ditorch  # noqa: F401
    import op_tools  # noqa: F401
    from op_tools.native import compiling
    from op_tools.trace import record  # noqa: F401

    began = time.perf_counter()
    compiling.wait()
    if options.one is None:
        print(f"libraries after {time.perf_counter() - began:.0f} s", flush=True)
        print(prints_agree(), flush=True)
    if options.processes:
        in_processes(options)
        return
    torch.manual_seed(0)
    step = (plain if options.plain else gpt2)(options.tiny)
    _timed(step, 3)
    if options.one is not None:
        print("ready", flush=True)
        sys.stdin.readline()
        _timed(step, 3)
        print(measured(step, options.steps, options.one == "on"), flush=True)
        return
    if options.cpu:
        _cpu_times(step, options.steps)
        return
    for prints in (False, True, False, True):
        print(measured(step, options.steps, prints), flush=True)
    if options.phases:
        phases(options.tiny, options.steps)
    if options.profile:
        for prints in (False, True):
            print(measured(step, options.steps, prints, profile=15), flush=True)


if __name__ == "__main__":
    main()
