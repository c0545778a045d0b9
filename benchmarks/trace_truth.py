"""How well `op_tools diff` aligns runs and names the operator at fault, against the truth.

    python -m benchmarks.trace_truth align faults healthy prints scale

`align`: two runs of a GPT, a ResNet and an RWKV that differ in one way. The truth is which line of the model made an
operator, in which layer, and how often before; the aligner does not look at lines. Beside it: difflib over the names of
operators, and the strict comparison of PyTorch's DebugMode, which gives up where the numbers of operators differ.
`faults`: faults planted on the software accelerator, the good run against the faulty one. `healthy`: two devices and
two layouts without a fault. `prints`: what a print sees and a hash does not. `scale`: a million operators.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OP_TOOLS_CONSOLE", "off")

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.trace_models import MODELS, VOCAB, batch, build
from op_tools.tools.trace import OpTrace
from op_tools.trace import format as columns
from op_tools.trace.align import Alignment
from op_tools.trace.diff import Diff, load
from op_tools.trace.format import TraceWriter
from op_tools.trace.graph import Graph


class Tracing(OpTrace):
    """Also notes which operator a planted fault struck first."""

    name = "OpTraceOfBenchmark"
    planted: Any = None
    culprit = -1

    def _look(self) -> None:
        if self.planted is not None and self.culprit < 0 and self.planted.hits and self._recorder is not None:
            self.culprit = self._recorder.operators - 1

    def after(self, call: Any) -> None:
        struck = self.planted is not None and self.culprit < 0 and self.planted.hits
        super().after(call)
        if struck:
            self._look()

    def after_backward(self, call: Any, grad_outputs: Any, grad_inputs: Any) -> None:
        struck = self.planted is not None and self.culprit < 0 and self.planted.hits
        super().after_backward(call, grad_outputs, grad_inputs)
        if struck:
            self._look()


def one_step(run: Any, x: Tensor, y: Tensor, optimizer: Any, device: str, low: bool) -> None:
    with torch.autocast(device, torch.bfloat16, enabled=low):
        out = run(x).float()
    loss = F.cross_entropy(out.view(-1, VOCAB), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def train(
    folder: Path, kind: str, model: nn.Module, *, device: str = "cuda", low: bool = False, steps: int = 2,
    layout: int = 0, compiled: str = "", fused: bool | None = None, planted: Any = None, size: int = 4,
) -> tuple[Graph, Tracing]:  # fmt: skip
    """Train a model for some steps under OpTrace."""
    model = model.to(device)
    if layout:
        other_layout(model)
    x, y = batch(kind, device, size)
    if layout and kind == "ResNet":
        x = x.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=None if fused else True, fused=fused)
    run: Any = torch.compile(model, backend=compiled) if compiled else model
    os.environ["OP_TOOLS_INCLUDE_CPU"] = "1" if device == "cpu" else "0"
    shutil.rmtree(folder, ignore_errors=True)
    tool = Tracing(to=folder)
    tool.planted = planted
    kind_of = "cuda" if device != "cpu" else "cpu"
    with tool:
        for _ in range(steps):
            one_step(run, x, y, optimizer, kind_of, low)
    return Graph(load(folder)), tool


def other_layout(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()
        elif parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


# --- the truth --------------------------------------------------------------------------------------------------------


def keys(graph: Graph, renamed: dict[str, str] | None = None) -> dict[Any, int]:
    """Operators by what only the truth knows: step, phase, layer, line of Python, name, and count."""
    seen: Counter[Any] = Counter()
    found = {}
    table, texts = graph.operators, graph.trace.texts
    for operator, name in enumerate(graph.names):
        path = _moved(graph.paths.get(int(table["module"][operator]), ""), renamed)
        line = texts[int(table["location"][operator])]
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


def strictly(one: Graph, two: Graph) -> list[tuple[int, int]]:
    """As DebugMode compares logs: in order, and not at all where their lengths differ."""
    return list(zip(range(one.count), range(two.count))) if one.count == two.count else []


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def ranks(strategy: str, kind: str, folder: Path) -> Graph:
    """The same training on two ranks, by this file as a worker."""
    port = str(29_600 + os.getpid() % 300)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port]
    subprocess.run([*command, "-m", "benchmarks.trace_truth", "worker", strategy, kind, str(folder)], check=True,
                   capture_output=True, timeout=300)  # fmt: skip
    return Graph(load(folder))


def worker(strategy: str, kind: str, folder: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = build(kind)
    run: Any = model
    if strategy == "DDP":
        run = nn.parallel.DistributedDataParallel(model)
    elif strategy == "FSDP2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    elif strategy == "TP":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (2,))
        up, down = ("up", "down") if kind == "GPT" else ("key", "value")
        for block in model.blocks:  # type: ignore[union-attr]
            parallelize_module(block, mesh, {up: ColwiseParallel(), down: RowwiseParallel()})
    x, y = batch(kind, "cpu")
    if strategy != "TP":
        rank = dist.get_rank()
        x, y = x.chunk(2)[rank], y.chunk(2)[rank]
    plain = [p for p in run.parameters() if type(p) is nn.Parameter]  # foreach takes no mixture with DTensors
    spread = [p for p in run.parameters() if type(p) is not nn.Parameter]
    groups = [{"params": group} for group in (plain, spread) if group]
    optimizer = torch.optim.AdamW(groups, 1e-3, foreach=True)
    os.environ["OP_TOOLS_INCLUDE_CPU"] = "1"
    with OpTrace(to=folder):
        for _ in range(2):
            one_step(run, x, y, optimizer, "cpu", False)
    dist.destroy_process_group()


def pairings(kind: str, folder: Path) -> Iterator[tuple[str, Graph, Graph, dict[str, str] | None]]:
    def run(name: str, model: nn.Module | None = None, **options: Any) -> Graph:
        return train(folder / name, kind, build(kind) if model is None else model, **options)[0]

    base, host = run("base"), run("host", device="cpu")
    yield "seed against seed", base, run("seed", build(kind, 1)), None
    yield "two devices", base, host, None
    yield "fp32 against bf16", base, run("low", low=True), None
    yield "eager against checkpointing", base, run("remat", build(kind, remat=True)), None
    yield "fused against written out", base, run("written", build(kind, written=True)), None
    yield "foreach against fused optimizer", base, run("fused", fused=True), None
    yield "eager against torch.compile", base, run("compiled", compiled="aot_eager"), None
    longer, shorter = build(kind, 5, layers=4), build(kind)
    state = shorter.state_dict()
    moved = {"model.blocks.2": "model.blocks.3", "model.blocks.1": "model.blocks.2"}  # the new layer is blocks.1
    for name, value in state.items():
        for old, new in moved.items():
            if f"model.{name}".startswith(old + "."):
                name = name.replace(old.removeprefix("model."), new.removeprefix("model."), 1)
                break
        longer.state_dict()[name].copy_(value)
    yield (
        "a layer more",
        base,
        run("longer", longer),
        {"model.blocks.1": "model.blocks.2", "model.blocks.2": "model.blocks.3"},
    )
    for strategy in ("DDP", "FSDP2", "TP"):
        if strategy != "TP" or kind != "ResNet":
            yield f"1 rank against {strategy}", host, ranks(strategy, kind, folder / strategy), None


def measure_alignment(only: str = "") -> None:
    print("| pairing | model | operators | correspond | matched | wrong | difflib | wrong | DebugMode | divergence |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for kind in MODELS:
        if only and kind != only:
            continue
        with scratch() as folder:
            for name, one, two, renamed in pairings(kind, folder):
                print(_row(name, kind, one, two, renamed), flush=True)


def _row(name: str, kind: str, one: Graph, two: Graph, renamed: dict[str, str] | None) -> str:
    diff = Diff(one, two)
    alignment: Alignment = diff.alignment
    if "compile" in name:
        truth_one, truth_two = keys_of_calls(one), keys_of_calls(two)
    else:
        truth_one, truth_two = keys(one, renamed), keys(two)
    total, right, wrong = judged(truth_one, truth_two, alignment.pairs.tolist())
    _, plain, astray = judged(truth_one, truth_two, by_difflib(one, two))
    _, strict, _ = judged(truth_one, truth_two, strictly(one, two))
    first = "-" if diff.divergence is None else one.titles[int(alignment.pairs[diff.divergence.pair][0])]
    share = [f"{100 * n / max(total, 1):.1f} %" for n in (right, wrong, plain, astray, strict)]
    return f"| {name} | {kind} | {one.count}, {two.count} | {total} | {' | '.join(share)} | {first} |"


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
                    bad, tool = train(folder / "bad", "GPT", build("GPT"), low=low, planted=planted, steps=1)
                outcome = _blamed(Diff(good, bad), tool.culprit) if planted.hits else "did not strike"
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
    b = int(diff.alignment.pairs[diff.divergence.pair][1])
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
            a = int(diff.alignment.pairs[diff.divergence.pair][0])
            print(
                f"  {kind} {'layout' if n % 2 else 'device'} low={low}: {one.titles[a]} {diff.divergence}",
                file=sys.stderr,
            )
    print(f"healthy pairs without a divergence: {pairs - told} of {pairs}")


# --- prints against hashes ------------------------------------------------------------------------------------------


def measure_prints() -> None:
    from op_tools.trace.prints import fingerprint

    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    changes = {
        "two elements exchanged": _exchanged(x),
        "rows reversed": x.flip(0),
        "a block transposed": _transposed(x),
        "two signs flipped": _flipped(x),
        "one element off by 50 %": _off(x),
        "rounded once more (bfloat16)": x.bfloat16().float(),
        "another layout, equal values": x.t().contiguous().t(),
    }
    print("| change | L1 norm | XOR of bits | print: distance / norm |")
    print("| --- | --- | --- | --- |")
    for name, y in changes.items():
        l1 = float(x.abs().sum()) != float(y.abs().sum())
        xor = [int(np.bitwise_xor.reduce(t.contiguous().numpy().view(np.uint32).reshape(-1))) for t in (x, y)]
        from op_tools.trace.prints import distance

        apart = float(distance(fingerprint(x).numpy(), fingerprint(y).numpy()) / x.norm())
        print(
            f"| {name} | {'differs' if l1 else 'equal'} | {'differs' if xor[0] != xor[1] else 'equal'} | {apart:.2g} |"
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
            "print(len(d.alignment.pairs), time.time() - began, peak)"
        )
        out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
        size = (folder / "a" / "rank0.optrace").stat().st_size / 2**20
        found = f"{int(out[0]):,} pairs in {float(out[1]):.1f} s, {float(out[2]):.2f} GiB"
        print(f"{operators:,} operators ({size:.0f} MiB): {found}")


def main(arguments: list[str]) -> None:
    """Run what is named, or all of it."""
    if arguments[:1] == ["worker"]:
        worker(*arguments[1:4])
        return
    import ditorch  # noqa: F401

    began = time.time()
    for word in arguments or ["align", "prints", "healthy", "faults", "scale"]:
        name, _, rest = word.partition("=")
        parts: dict[str, Any] = {
            "align": lambda rest=rest: measure_alignment(rest),
            "faults": lambda rest=rest: measure_faults(rest),
            "healthy": lambda rest=rest: measure_healthy(int(rest or 40)),
            "prints": measure_prints,
            "scale": lambda rest=rest: measure_scale(int(rest or 1_000_000)),
        }
        parts[name]()
        print(f"({name}: {time.time() - began:.0f} s)", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
