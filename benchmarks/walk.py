"""How far one call walks through op_tools: function calls, modules and changes of module, the second time it is made.

python -m benchmarks.walk                        # OpAutoCompare, OpCapture and replay, a table
python -m benchmarks.walk OpAutoCompare --list   # the modules of one tool, with their share
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import ditorch  # noqa: F401  (a device on every machine)
import op_tools

PACKAGE = os.path.dirname(os.path.abspath(op_tools.__file__)) + os.sep


class Walk:
    """Counts calls of Python functions of op_tools while it is active, in every thread, those of autograd included."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.changes = 0
        self._last = threading.local()
        self.active = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not self.active or threading.current_thread().name == "op_tools-store":
            return  # that thread writes records by the clock, whatever is called
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE):
            return
        module = name[len(PACKAGE) :]
        self.calls[module] += 1
        if getattr(self._last, "module", module) != module:
            self.changes += 1
        self._last.module = module

    def follow(self, grad: torch.Tensor) -> None:
        """Count on the thread that calls this hook of a tensor: C++ started it, and Python 3.11 cannot reach it."""
        sys.setprofile(self if self.active else None)

    def __enter__(self) -> Walk:
        sys.setprofile(self)
        self.active = True
        return self

    def __exit__(self, *error: object) -> None:
        self.active = False
        sys.setprofile(None)


def linear(tensors: list[torch.Tensor], walk: Walk) -> None:
    """Forward and backward of one linear layer."""
    x, weight, bias = tensors
    total = torch.nn.functional.linear(x, weight, bias).sum()
    total.register_hook(walk.follow)
    total.backward()


def watched(tool: str) -> Walk:
    """The second call of the same kind under a tool, until the tool has done all its work for it."""
    walk = Walk()
    threading.setprofile(walk)  # for threads that the tool starts
    torch.manual_seed(0)  # how far a result is off decides how much is looked at
    tensors = [torch.randn(s, device="cuda", requires_grad=True) for s in ((4, 8), (16, 8), (16,))]
    with getattr(op_tools, tool)(["torch.nn.functional.linear"]) as watching:
        for second in (False, True):
            if second:
                with walk:
                    linear(tensors, walk)
                    _settle(watching)
            else:
                linear(tensors, walk)
                _settle(watching)
    threading.setprofile(None)
    return walk


def _settle(tool: Any) -> None:
    """Wait for what the tool does in the background, outside of the count of its own waiting."""
    queue = getattr(tool, "writer", None) or getattr(getattr(tool, "_judging", None), "_queue", None)
    if queue is not None:
        queue.drain()


def replayed(folder: Path) -> Walk:
    """The second replay of a captured call."""
    from op_tools.files.captures import find
    from op_tools.replay.check import Options, replay

    (path,) = [p for p in find(folder) if "linear" in str(p)][:1]
    walk = Walk()
    options = Options(acc_check=True)
    replay(path, options)
    with walk:
        replay(path, options)
    return walk


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("what", nargs="*", default=[], help="OpAutoCompare, OpCapture, ... or replay")
    parser.add_argument("--list", action="store_true", help="the modules as well")
    options = parser.parse_args()
    os.environ.setdefault("OP_TOOLS_CONSOLE", "off")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OP_TOOLS_RESULTS_DIR"] = folder
        print(f"{'':<16} {'calls':>6} {'modules':>8} {'changes':>8}")
        for what in options.what or ["OpAutoCompare", "OpCapture", "replay"]:
            if what == "replay":
                watched("OpCapture")
                walk = replayed(Path(folder))
            else:
                walk = watched(what)
            print(f"{what:<16} {sum(walk.calls.values()):>6} {len(walk.calls):>8} {walk.changes:>8}")
            if options.list:
                for module, count in walk.calls.most_common():
                    print(f"    {module:<32} {count}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
