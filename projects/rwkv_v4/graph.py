"""What ``graph.debug`` prints: modules, inputs, parameters, operators and outputs of one forward pass."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, enable_grad, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from op_tools.tools.trace import OpTrace
from op_tools.trace.diff import load
from op_tools.trace.graph import Graph
from op_tools.trace.show import STACKS, lines

MODULES, OPERATORS, WHOLE = 1, 2, 3
"""Levels of ``graph.debug``: modules with their tensors, operators of forward, and all with stacks and memory."""


def list_whole(loss: Callable[[], Tensor], write: Callable[[str], None]) -> None:
    """List a forward and a backward pass as ``op_tools trace show -v 3`` does: who made what, where, and its memory."""
    with tempfile.TemporaryDirectory() as folder:
        with enable_grad(), OpTrace(to=folder, prints=False, stacks=2):
            loss().backward()
        for line in lines(Graph(load(Path(folder))), STACKS):
            write(line)


@contextmanager
def listed(model: nn.Module, level: int, write: Callable[[str], None]) -> Iterator[None]:
    """List what the model does inside the block.

    >>> with listed(nn.ReLU(), MODULES, print):
    ...     pass
    (GRAPH:train:ReLU): (
    )
    """
    listing = _Listing(level, write)
    with ExitStack() as stack:
        listing.open(f"(GRAPH:train:{type(model).__name__})")
        stack.callback(listing.close)
        for name, module in model.named_modules(prefix="model"):
            stack.enter_context(_removed(module.register_forward_pre_hook(listing.entering(name))))
            stack.enter_context(_removed(module.register_forward_hook(listing.leaving(name))))
        if level >= OPERATORS:
            stack.enter_context(listing)
        yield


@contextmanager
def _removed(hook: Any) -> Iterator[None]:
    yield
    hook.remove()


class _Listing(TorchDispatchMode):
    def __init__(self, level: int, write: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.level, self.write = level, write
        self.inside: list[str] = []
        self.operators = 0

    def line(self, text: str) -> None:
        self.write("  " * len(self.inside) + text)

    def open(self, head: str, name: str = "") -> None:
        self.line(f"{head}: (")
        self.inside.append(name)

    def close(self) -> None:
        self.inside.pop()
        self.line(")")

    def entering(self, name: str) -> Callable[[nn.Module, Any], None]:
        def enter(module: nn.Module, inputs: Any) -> None:
            self.open(f"(MODULE:{name}:{type(module).__name__}({module.extra_repr()}))", name)
            self.tensors("INPUT", f"_{name}_input", inputs)
            for kind, found in (("BUFFER", module.named_buffers), ("PARAMETER", module.named_parameters)):
                for own, tensor in found(recurse=False):
                    self.line(f"({kind}:{name}.{own}:{_shown(tensor)}): ()")

        return enter

    def leaving(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            self.tensors("OUTPUT", f"_{name}_output", output)
            self.close()

        return leave

    def tensors(self, kind: str, name: str, values: Any) -> None:
        for i, tensor in enumerate(x for x in tree_leaves(values) if isinstance(x, Tensor)):
            self.line(f"({kind}:{name}.{i}:{_shown(tensor)})")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        taken, made = (", ".join(_shape(x) for x in tree_leaves(v) if isinstance(x, Tensor)) for v in (args, out))
        name = f"{self.inside[-1]}-{func._schema.name.partition('::')[2]}-{self.operators}"
        self.line(f"(OPERATOR: {name}({taken}) -> ({made}))")
        self.operators += 1
        return out


def _shape(x: Tensor) -> str:
    return f"size={tuple(x.shape)}, dtype={x.dtype}"


def _shown(x: Tensor) -> str:
    return f"tensor(..., device='{x.device}', {_shape(x)})"
