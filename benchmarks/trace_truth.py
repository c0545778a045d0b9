"""How well `op_tools diff` aligns runs and names the operator at fault, against the truth.

    python -m benchmarks.trace_truth align inductor faults healthy prints scale

`align`: two runs of a GPT, a ResNet and an RWKV that differ in one way. The truth is which line of the model made an
operator, in which layer, and how often before; the aligner does not look at lines. Beside it: difflib over the names of
operators, and the comparison of PyTorch's DebugMode with its logs of the same steps, which gives up where the numbers
or names of operators differ. `inductor`: code of Inductor, whose runs stand for modules, on a GPU or the CPU. `scale`:
a million operators. The other words are in `benchmarks.trace_faults`: `faults`, planted on the software accelerator,
the good run against the faulty one; `healthy`, two devices and two layouts without a fault; `prints`, what a print sees
and a hash does not.
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OP_TOOLS_CONSOLE", "off")

import numpy as np
import torch
from torch import nn

from benchmarks.trace_models import MODELS, batch, build
from benchmarks.trace_runs import debug_logs, debug_verdict, one_step, prepared, scratch, train
from op_tools.call.devices import accelerator_type
from op_tools.call.graphs import OP as COMPILED
from op_tools.tools.trace import OpTrace
from op_tools.trace import format as columns
from op_tools.trace.align import Alignment
from op_tools.trace.diff import Diff, load
from op_tools.trace.format import TraceWriter
from op_tools.trace.graph import Graph

# --- the truth --------------------------------------------------------------------------------------------------------


def keys(graph: Graph, renamed: dict[str, str] | None = None) -> dict[Any, int]:
    """Operators by what only the truth knows: step, phase, layer, line of Python, name, and count."""
    seen: Counter[Any] = Counter()
    found = {}
    table, texts = graph.operators, graph.trace.texts
    for operator, name in enumerate(graph.names):
        path = _moved(graph.paths.get(int(table["module"][operator]), ""), renamed)
        line = "" if name == COMPILED else texts[int(table["location"][operator])]
        key = (int(table["step"][operator]) - int(table["step"][0]), int(table["phase"][operator]), path, line, name)
        if int(table["phase"][operator]) == columns.OPTIMIZER:  # all of it is one line of Python
            shape = [graph.look(t)["shape"] for t in graph.outputs(operator).tolist()[:1]]
            used = [_parameter_of(graph, operator)]
            key = (*key, *shape, *(_moved(title, renamed) for title in used))
        seen[key] += 1
        full = (*key, seen[key])
        found[full] = operator
    return found


def _parameter_of(graph: Graph, operator: int) -> str:
    """The parameter or gradient that an optimizer's operator is for: its first input, or what that is the state of."""
    for _ in range(100):
        while operator < graph.count and not len(graph.inputs(operator)):
            operator += 1
        if operator == graph.count:
            return "other"
        tensor = int(graph.inputs(operator)[0])
        if graph.tensors["name"][tensor] > 0:
            path = graph.paths.get(int(graph.tensors["module"][tensor]), "")
            return f"{path}.{graph.tensor_title(tensor).rpartition('.')[2]}"
        while graph.tensors["base"][tensor] >= 0:
            tensor = int(graph.tensors["base"][tensor])
        operator = int(graph.tensors["producer"][tensor])
        if operator < 0:
            return "other"
    return "other"


def keys_of_calls(graph: Graph) -> dict[Any, int]:
    """The same for an eager and a compiled run: which call of a function it is, as Dynamo counts them (`mul_7`).

    Lines are no truth there: what is computed twice, or never used, is not in a compiled graph.
    """
    by_line = keys(graph)
    found, numbers, counts = {}, dict[int, Any](), Counter[Any]()
    table, texts = graph.operators, graph.trace.texts
    for full, operator in by_line.items():
        step, phase, path, name = full[0], full[1], full[2], graph.names[operator]
        if not path or phase == columns.OPTIMIZER:
            found[full] = operator
            continue
        word, said = name.rpartition(".")[2], texts[int(table["arguments"][operator])]
        word = "truediv" if word == "div" else re.sub(r"^__r?(\w+)__$", r"\1", word)
        forward = int(table["forward"][operator])
        if name.startswith("torch.compile."):
            word, _, digits = said.rpartition("_") if said[-1].isdigit() else (said, "", "0")
            numbers[operator] = (step, word, int(digits))
        elif phase == columns.BACKWARD and forward >= 0:
            numbers[operator] = numbers.get(forward)
        elif phase == columns.FORWARD:
            numbers[operator] = (step, word, counts[step, word])
            counts[step, word] += 1
        if numbers.get(operator) is not None:
            found[phase, numbers[operator]] = operator
    return found


def _moved(path: str, renamed: dict[str, str] | None) -> str:
    for old, new in (renamed or {}).items():
        if path == old or path.startswith(old + "."):
            return new + path[len(old) :]
    return path if path.startswith("model") else ""


def judged(one: dict[Any, int], two: dict[Any, int], pairs: Any) -> tuple[int, int, int]:
    """Operators that correspond, how many of them were matched, and how many were matched wrongly."""
    truth = {one[key]: two[key] for key in one if key in two}
    back = {b: a for a, b in truth.items()}
    right = sum(truth.get(int(a)) == int(b) for a, b in pairs)
    wrong = sum(1 for a, b in pairs if truth.get(int(a), int(b)) != int(b) or back.get(int(b), int(a)) != int(a))
    return len(truth), right, wrong


def by_difflib(one: Graph, two: Graph) -> list[tuple[int, int]]:
    blocks = difflib.SequenceMatcher(None, one.names, two.names, autojunk=False).get_matching_blocks()
    return [(i + k, j + k) for i, j, n in blocks for k in range(n)]


def ranks(strategy: str, kind: str, folder: Path) -> tuple[Graph, None, str]:
    """The same training on two ranks, by this file as a worker: its trace, and what DebugMode says against one rank."""
    port = str(29_600 + os.getpid() % 300)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port]
    done = subprocess.run([*command, "-m", "benchmarks.trace_truth", "worker", strategy, kind, str(folder)],
                          check=False, capture_output=True, text=True, timeout=400)  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return Graph(load(folder)), None, (folder / "debug.txt").read_text()


def worker(strategy: str, kind: str, folder: str) -> None:
    """One of two ranks."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    os.environ["OP_TOOLS_INCLUDE_CPU"] = "1"
    steps = _parallel(strategy, kind)
    with OpTrace(to=folder):
        steps()
    logs = debug_logs(_parallel(strategy, kind))
    if dist.get_rank() == 0:
        alone = debug_logs(prepared(kind, build(kind), device="cpu"))
        (Path(folder) / "debug.txt").write_text(debug_verdict(alone, logs))
    dist.destroy_process_group()


def _parallel(strategy: str, kind: str) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    model = build(kind)
    run: Any = model
    blocks: Any = model.blocks
    mesh = init_device_mesh("cpu", (2,))
    x, y = batch(kind, "cpu")
    if strategy == "DDP":
        run = nn.parallel.DistributedDataParallel(model)
    elif strategy == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        for block in (*blocks, model):
            fully_shard(block, mesh=mesh)
    elif strategy == "TP":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        plans: dict[str, Any] = {
            "GPT": {"up": ColwiseParallel(), "down": RowwiseParallel()},
            "RWKV": {"key": ColwiseParallel(), "value": RowwiseParallel()},
            "ResNet": {"head": ColwiseParallel(output_layouts=_replicated())},
        }
        for part in blocks if kind != "ResNet" else [model]:
            parallelize_module(part, mesh, plans[kind])
    if strategy != "TP":
        rank = dist.get_rank()
        x, y = x.chunk(2)[rank], y.chunk(2)[rank]
    plain = [p for p in run.parameters() if type(p) is nn.Parameter]  # foreach takes no mixture with DTensors
    spread = [p for p in run.parameters() if type(p) is not nn.Parameter]
    groups = [{"params": group} for group in (plain, spread) if group]
    optimizer = torch.optim.AdamW(groups, 1e-3, foreach=True)

    def steps() -> None:
        for _ in range(2):
            one_step(run, x, y, optimizer, "cpu", False)

    return steps


def _replicated() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def pairings(kind: str, folder: Path) -> Iterator[tuple[str, Graph, Graph, dict[str, str] | None, str]]:
    """Two runs that differ in one way: name, traces, modules that moved, and what DebugMode says of them."""

    def run(name: str, make: Any = None, **options: Any) -> tuple[Graph, Any]:
        make = make or (lambda: build(kind))
        graph = train(folder / name, kind, make(), **options)[0]
        return graph, debug_logs(prepared(kind, make(), **options))

    (base, logs), (host, _) = run("base"), run("host", device="cpu")

    def pair(name: str, second: tuple[Graph, Any], renamed: dict[str, str] | None = None) -> Any:
        return name, base, second[0], renamed, debug_verdict(logs, second[1])

    yield pair("seed against seed", run("seed", lambda: build(kind, 1)))
    yield pair("two devices", run("other", device="cpu"))
    yield pair("fp32 against bf16", run("low", low=True))
    yield pair("eager against checkpointing", run("remat", lambda: build(kind, remat=True)))
    yield pair("fused against written out", run("written", lambda: build(kind, written=True)))
    yield pair("foreach against fused optimizer", run("fused", fused=True))
    yield pair("eager against torch.compile", run("compiled", compiled="aot_eager"))
    moved = {"model.blocks.1": "model.blocks.2", "model.blocks.2": "model.blocks.3"}
    yield pair("a layer more", run("longer", lambda: longer(kind)), moved)
    for strategy in ("DDP", "FSDP2", "TP"):
        yield f"1 rank against {strategy}", host, *ranks(strategy, kind, folder / strategy)


def longer(kind: str) -> nn.Module:
    """The same model with one layer more, behind the first."""
    found, shorter = build(kind, 5, layers=4), build(kind)
    moved = {"blocks.2.": "blocks.3.", "blocks.1.": "blocks.2."}
    for name, value in shorter.state_dict().items():
        new = next((name.replace(old, to, 1) for old, to in moved.items() if name.startswith(old)), name)
        found.state_dict()[new].copy_(value)
    return found


def measure_alignment(only: str = "") -> None:
    print("| pairing | model | operators | correspond | matched | wrong | difflib | wrong | DebugMode | divergence |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for kind in MODELS:
        if only and kind != only:
            continue
        with scratch() as folder:
            for name, one, two, renamed, debug in pairings(kind, folder):
                print(_row(name, kind, one, two, renamed, debug), flush=True)


def _row(name: str, kind: str, one: Graph, two: Graph, renamed: dict[str, str] | None, debug: str = "") -> str:
    diff = Diff(one, two)
    alignment: Alignment = diff.alignment
    if "compile" in name:
        truth_one, truth_two = keys_of_calls(one), keys_of_calls(two)
    else:
        truth_one, truth_two = keys(one, renamed), keys(two)
    total, right, wrong = judged(truth_one, truth_two, alignment.pairs.tolist())
    _, plain, astray = judged(truth_one, truth_two, by_difflib(one, two))
    first = "-" if diff.parted is None else one.titles[diff.parted[0]]
    share = [f"{100 * n / max(total, 1):.1f} %" for n in (right, wrong, plain, astray)]
    return f"| {name} | {kind} | {one.count}, {two.count} | {total} | {' | '.join(share)} | {debug} | {first} |"


def measure_inductor(only: str = "") -> None:
    """Eager against Inductor, of a whole model or of its blocks: which operators belong to which run."""
    print("| compiled | model | dtype | operators | correspond | matched | wrong | runs | compared | divergence |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    import ditorch

    device = "cuda" if accelerator_type() == "cuda" else "cpu"
    ditorch.deactivate()  # where there is no Inductor for the device, it takes aot_eager
    for kind in MODELS:
        for low in (False, True):
            if only and kind != only:
                continue
            with scratch() as folder:
                base = train(folder / "base", kind, build(kind), device=device, low=low)[0]
                for part in ("whole", "blocks"):
                    torch._dynamo.reset()
                    model = build(kind)
                    if part == "blocks":
                        for block in model.blocks:  # type: ignore[union-attr]
                            block.compile()
                    compiled = "inductor" if part == "whole" else ""
                    other = train(folder / part, kind, model, device=device, low=low, compiled=compiled)[0]
                    print(_inductor_row(part, kind, low, base, other), flush=True)


def _inductor_row(part: str, kind: str, low: bool, one: Graph, two: Graph) -> str:
    diff = Diff(one, two)
    alignment = diff.alignment
    total, right, wrong = judged(keys(alignment.first), keys(alignment.second), alignment.pairs.tolist())
    runs = [n for n, (a, _) in enumerate(alignment.pairs.tolist()) if alignment.first.names[a] == COMPILED]
    told = "-" if diff.divergence is None else diff.divergence.reason
    share = [f"{100 * n / max(total, 1):.1f} %" for n in (right, wrong)]
    counts = (
        f"{one.count}, {two.count} | {total} | {' | '.join(share)} | {len(runs)} | {diff.numbers.judged[runs].sum()}"
    )
    return f"| {part} | {kind} | {'bfloat16' if low else 'float32'} | {counts} | {told} |"


# --- a million operators --------------------------------------------------------------------------------------------


def synthetic(path: Path, operators: int, dropped: float, seed: int, fault: int = -1) -> None:
    """A long training: layers of eight operators, forward and backward, with fingerprints."""
    draw, values = np.random.default_rng(seed), np.random.default_rng(0)
    layers, per_layer = 100, 8
    with TraceWriter(path, {"rank": 0, "world": 1}) as writer:
        text = writer.text
        writer.add("modules", (0, -1, text("model"), text("Model"), 0))
        for layer in range(layers):
            writer.add("modules", (layer + 1, 0, text(f"model.{layer}"), text("Block"), 0))
        names = [text(f"torch.op{k}") for k in range(per_layer)]
        look = writer.add("looks", (text("[4, 8]"), text("float32"), text("[8, 1]"), text("cpu"), 1, 0, 0, 128))
        previous, step, made = -1, 0, 0
        while made < operators:
            for phase in (columns.FORWARD, columns.BACKWARD):
                order = range(layers) if phase == columns.FORWARD else range(layers - 1, -1, -1)
                for layer in order:
                    rows = values.standard_normal((per_layer, 9))
                    kept = draw.random(per_layer) >= dropped
                    for k in range(per_layer):
                        if kept[k]:
                            number = writer.add(
                                "operators", (step, phase, names[k], layer + 1, 0, 0, 0, 0, 0, 0, -1, 0.0, 0)
                            )
                            tensor = writer.add("tensors", (0, 0, look, number, 0, -1, layer + 1))
                            off = 1.5 if number == fault else 1.0
                            writer.add("prints", (tensor, *(off * rows[k]).tolist(), 5.0, -1.0, 1.0, 0, 0, 0))
                            if previous >= 0:
                                writer.add("edges", (number, 0, 0, previous))
                            writer.add("edges", (number, 1, 0, tensor))
                            previous = tensor
                            made += 1
            step += 1


def measure_scale(operators: int = 1_000_000) -> None:
    with scratch() as folder:
        synthetic(folder / "a" / "rank0.optrace", operators, 0.0, 1)
        synthetic(folder / "b" / "rank0.optrace", operators, 0.01, 2)
        code = (
            "import time, resource; began = time.time()\n"
            "from pathlib import Path; from op_tools.trace.diff import compare\n"
            f"d = compare(Path({str(folder / 'a')!r}), Path({str(folder / 'b')!r})); list(d.lines())\n"
            "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20\n"
            "print(len(d.alignment.pairs), time.time() - began, peak, time.process_time())"
        )
        out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
        size = (folder / "a" / "rank0.optrace").stat().st_size / 2**20
        found = (
            f"{int(out[0]):,} pairs in {float(out[1]):.1f} s ({float(out[3]):.1f} s of CPU), {float(out[2]):.2f} GiB"
        )
        print(f"{operators:,} operators ({size:.0f} MiB): {found}")


def main(arguments: list[str]) -> None:
    """Run what is named, or all of it."""
    if arguments[:1] == ["worker"]:
        worker(*arguments[1:4])
        return
    import ditorch  # noqa: F401
    from benchmarks.trace_faults import measure_faults, measure_healthy, measure_prints

    began = time.time()
    for word in arguments or ["align", "prints", "healthy", "faults", "scale"]:
        name, _, rest = word.partition("=")
        parts: dict[str, Any] = {
            "align": lambda rest=rest: measure_alignment(rest),
            "faults": lambda rest=rest: measure_faults(rest),
            "inductor": lambda rest=rest: measure_inductor(rest),
            "healthy": lambda rest=rest: measure_healthy(int(rest or 40)),
            "prints": measure_prints,
            "scale": lambda rest=rest: measure_scale(int(rest or 1_000_000)),
        }
        parts[name]()
        print(f"({name}: {time.time() - began:.0f} s)", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
