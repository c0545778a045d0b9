"""What a sample finds of faults in whole regions and in single elements, where `OP_AUTOCOMPARE_COVERAGE=auto` samples.

    python -m benchmarks.sampled_curve                 # regions, then recall against the size of one wrong element
    python -m benchmarks.sampled_curve --json out.json

On the software accelerator. Each call has more than a million elements. A wrong element is off by so many standard
deviations of the result. "sample" judges only the places of the sample; "all elements" adds those that stand out in the
check on the device, in which every element takes part.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OP_TOOLS_CONSOLE", "off")
os.environ.setdefault("OP_TOOLS_RESULTS_DIR", tempfile.mkdtemp())

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ditorch
import op_tools
from ditorch.soft import faults
from op_tools.compare.judges import sampled
from op_tools.compare.judges.sampled import Sampled
from op_tools.judge.sampling import suspects

Call = Callable[[], Any]


def _make(*shape: int, grad: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).cuda().requires_grad_(grad)


def calls() -> dict[str, tuple[str, Call]]:
    """By name: the kernel that is broken, and a call of it."""
    x, w, images, kernel = _make(4100, 64), _make(256, 64), _make(8, 16, 96, 96), _make(16, 16, 3, 3)
    wide, table = _make(1100, 1024), _make(40_000, 32)
    q, k, v = (_make(2, 4, 720, 64) for _ in range(3))
    half, low = _make(4100, 64, dtype=torch.bfloat16), _make(256, 64, dtype=torch.bfloat16)
    index, summed = torch.randint(40_000, (64, 600)).cuda(), _make(64, 130, 150)
    return {
        "linear": ("mm", lambda: F.linear(x, w)),
        "linear, bfloat16": ("mm", lambda: F.linear(half, low)),
        "conv2d": ("convolution", lambda: F.conv2d(images, kernel, padding=1)),
        "attention": ("scaled_dot_product", lambda: F.scaled_dot_product_attention(q, k, v)),
        "layer_norm": ("native_layer_norm", lambda: F.layer_norm(wide, (1024,))),
        "softmax": ("_softmax", lambda: F.softmax(wide, -1)),
        "gelu": ("gelu", lambda: F.gelu(wide)),
        "add": ("add", lambda: wide + wide),
        "embedding": ("embedding", lambda: F.embedding(index, table)),
        "sum of rows": ("sum", lambda: summed.sum(-1)),
    }


def backwards() -> dict[str, tuple[str, Call]]:
    """By name: the kernel of the backward that is broken, and a forward with gradients."""
    x, w, images, kernel = _make(4100, 64), _make(256, 64), _make(8, 16, 96, 96), _make(16, 16, 3, 3)
    wide, table, index = _make(1100, 1024), _make(40_000, 32), torch.randint(40_000, (64, 600)).cuda()
    q, k, v = (_make(2, 4, 720, 64) for _ in range(3))
    scale, shift = _make(1024), _make(1024)
    for leaf in (x, w, images, kernel, wide, table, q, k, v, scale, shift):
        leaf.requires_grad_()
    return {
        "linear": ("mm", lambda: F.linear(x, w)),
        "conv2d": ("convolution_backward", lambda: F.conv2d(images, kernel, padding=1)),
        "attention": ("scaled_dot_product", lambda: F.scaled_dot_product_attention(q, k, v)),
        "layer_norm": ("native_layer_norm_backward", lambda: F.layer_norm(wide, (1024,), scale, shift)),
        "softmax": ("_softmax_backward_data", lambda: F.softmax(wide, -1)),
        "gelu": ("gelu_backward", lambda: F.gelu(wide)),
        "embedding": ("embedding_dense_backward", lambda: F.embedding(index, table)),
        "relu, in place": ("threshold_backward", lambda: F.relu(wide * 1, inplace=True)),
    }


class Broken(TorchDispatchMode):
    """Changes what a kernel returns; `count` says how often."""

    def __init__(self, kernel: str, fault: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.kernel, self.fault, self.count = kernel, fault, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        plain = func._schema.name.removeprefix("aten::")
        first = found[0] if isinstance(found, tuple) else found
        exact = self.kernel in plain if self.kernel in ("convolution", "scaled_dot_product") else plain == self.kernel
        if exact and isinstance(first, torch.Tensor) and first.device.type != "cpu" and self.armed:
            self.armed = False  # the tool runs the kernel as well
            self.count += 1
            with torch._C.DisableTorchFunction():
                self.fault(first)
        return found

    armed = False


def _wrapped(y: torch.Tensor) -> None:
    flat = y.reshape(-1)
    half = flat.numel() // 2
    y.copy_(torch.cat((flat[:half], flat[:half], flat[: flat.numel() - 2 * half])).view(y.shape))


def _transposed(y: torch.Tensor) -> None:
    y.copy_(y.reshape(y.shape[-1], -1).t().reshape(y.shape).clone())


def _tail(y: torch.Tensor) -> None:
    flat = y.reshape(-1).clone()
    flat[-y.numel() // 64 :] = 0
    y.copy_(flat.view(y.shape))


def _one_row(y: torch.Tensor) -> None:
    rows = y.reshape(-1, y.shape[-1]).clone()
    rows[len(rows) // 3] *= 1.5
    y.copy_(rows.view(y.shape))


REGIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "noise": lambda y: y.mul_(1 + 0.05 * torch.randn(y.shape).to(y.device, y.dtype)),
    "layout": _transposed,
    "wrap": _wrapped,
    "tail": _tail,
    "one row": _one_row,
}
PLANTED = {
    "accumulate": "mm: accumulate=bfloat16, dtype=float32",
    "swap": "max.dim: swap",
    "drop_write": "add_: drop_write",
}


def blamed(call: Call, broken: Broken, times: int) -> int:
    """How many of so many broken calls are called wrong."""
    with op_tools.OpAutoCompare() as tool, broken:
        for _ in range(times):
            broken.armed = True
            call()
            broken.armed = False
    assert tool.judge(Sampled).calls >= times, "it is not sampled"
    assert broken.count == times, "the fault was not planted"
    return len({b.call_id for b in tool.blames})


def blamed_backward(forward: Call, broken: Broken) -> bool:
    """Whether a backward with a broken kernel is called wrong."""
    with op_tools.OpAutoCompare() as tool, broken:
        result = forward()
        sent = torch.randn(result.shape).to(result.device)
        broken.armed = True
        result.backward(sent)
        broken.armed = False
    assert broken.count == 1, "the fault was not planted"
    return any(b.phase == "backward" for b in tool.blames)


def _planted(name: str, text: str) -> bool:
    """Whether a fault of the software accelerator is found in a call that is sampled."""
    x, w = _make(4100, 64), _make(256, 64)
    y = _make(1100, 1024)
    call: Call = {
        "accumulate": lambda: F.linear(x, w),
        "swap": lambda: torch.max(y, 1),
        "drop_write": lambda: y.add_(1.0),
    }[name]
    with op_tools.OpAutoCompare() as tool, faults.plant(text):
        call()
    return bool(tool.blames)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=16, help="calls for each point of the curve")
    parser.add_argument("--sizes", default="0.01,0.1,1,4,16", help="of a wrong element, in standard deviations")
    parser.add_argument("--regions", action="store_true", help="only faults in whole regions")
    parser.add_argument("--only", help="a call by name")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    assert ditorch.backend.name == "soft"
    torch.manual_seed(0)
    rng = random.Random(0)
    found: dict[str, Any] = {"regions": {}, "elements": {}}
    made = {name: call for name, call in calls().items() if not args.only or name == args.only}
    for name, (kernel, call) in made.items():
        row = {what: blamed(call, Broken(kernel, fault), 1) == 1 for what, fault in REGIONS.items()}
        found["regions"][name] = row
        print(
            f"{name:<18} " + "  ".join(f"{what} {'found' if ok else 'MISSED'}" for what, ok in row.items()), flush=True
        )
    for name, (kernel, forward) in backwards().items():
        if args.only and name != args.only:
            continue
        row = {what: blamed_backward(forward, Broken(kernel, fault)) for what, fault in REGIONS.items()}
        found["regions"][f"{name}, backward"] = row
        told = "  ".join(f"{what} {'found' if ok else 'MISSED'}" for what, ok in row.items())
        print(f"{name + ', backward':<26} {told}", flush=True)
    if args.regions:
        args.sizes = ""
    if not args.only:
        for name, text in PLANTED.items():
            found["regions"][name] = {name: _planted(name, text)}
            print(f"{name:<18} {'found' if found['regions'][name][name] else 'MISSED'}", flush=True)
    search, sampled.FIRST_CALLS = suspects.find, 1 << 30  # in a run, some of the later calls of a kind
    for name, (kernel, call) in made.items() if args.sizes else ():
        scale = float(call().float().std())
        for way in ("sample", "all elements"):
            suspects.find = search if way == "all elements" else lambda *_: []
            shares = []
            for size in map(float, args.sizes.split(",")):

                def one(y: torch.Tensor, off: float = size * scale) -> None:
                    y.view(-1)[rng.randrange(y.numel())] += off

                shares.append(blamed(call, Broken(kernel, one), args.times) / args.times)
            found["elements"].setdefault(name, {})[way] = shares
            print(f"{name:<18} {way:<13} " + "  ".join(f"{share:5.0%}" for share in shares), flush=True)
    suspects.find = search
    if args.json:
        args.json.write_text(json.dumps(found))
    return int(not all(ok for row in found["regions"].values() for ok in row.values()))


if __name__ == "__main__":
    sys.exit(main())
