"""The graph of a compiled function: the calls of the user's program, as Dynamo hands them to its backend.

It is kept before a backend changes it, without what Dynamo notes on its nodes. `judge.graphs` runs it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from types import CodeType
from typing import Any, Final

import torch

from ..compat import HigherOrderOperator, example_value
from .description import Tensor, tensors_in
from .functions import name_of
from .site import is_user_code, text_of

OP: Final = "torch.compile"
ENTER_AUTOCAST, EXIT_AUTOCAST = "_enter_autocast", "_exit_autocast"
_RUNS_A_GRAPH: Final = frozenset({"tag_activation_checkpoint", "wrap"})  # operators that only call a graph
_COLLECTIVES: Final = ("_c10d_functional", "c10d")
_SETTERS: Final = ("set_", "_set_", "use_deterministic")
_FRAME: Final = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)')
_RESUMED: Final = re.compile(r"^torch_dynamo_resume_in_(.*)_at_(\d+)$")
_LIBRARY: Final = str(torch.__file__).rpartition("/")[0] + "/"


@dataclasses.dataclass(frozen=True)
class Step:
    """One call in a graph."""

    node: Any  # of torch.fx: its name, operation, target and arguments
    name: str  # of what is called, as users write it
    dtypes: tuple[torch.dtype, ...]  # of the tensors that it returns; empty where that is not known
    location: str  # `file:line function: source line`
    done_with: tuple[Any, ...]  # nodes whose results nobody needs after it


@dataclasses.dataclass(eq=False)
class Graph:
    """The calls of one graph, in order; its constants come after its own arguments.

    `why_not` says why it cannot be run on the CPU to compare with it; empty where it can.
    """

    arguments: tuple[Any, ...]  # nodes
    names: tuple[str, ...]  # of the arguments and constants, as the user's program has them
    steps: tuple[Step, ...]
    result: Any  # a tree of nodes
    constants: tuple[Tensor, ...]
    constant_nodes: tuple[Any, ...]
    parts: dict[str, Graph]  # that its operators run, by name
    why_not: str
    location: str  # of the compiled function; empty where it is no code of the user's
    elements: int  # of all results, where their sizes are fixed
    writes: set[int] | None = None  # arguments that it writes to; None until it has been run
    usual: dict[Any, float] = dataclasses.field(
        default_factory=dict
    )  # by result: how far roundings move it, relatively

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Of everything that its calls return."""
        found = {dtype for step in self.steps for dtype in step.dtypes}
        return found.union(*(part.dtypes for part in self.parts.values()))

    @property
    def operators(self) -> Iterator[str]:
        """The names of what it calls."""
        yield from (step.name for step in self.steps)
        for part in self.parts.values():
            yield from part.operators


def graph_of(module: Any, code: CodeType | None = None) -> Graph:
    """What Dynamo hands to its backend, kept as it is now (`graph_of(graph_module)`)."""
    from torch.fx import Graph as Nodes

    copied: dict[Any, Any] = {}
    result = Nodes().graph_copy(module.graph, copied)
    reasons: list[str] = []
    arguments, names, calls = [], [], []
    constants: dict[Any, Tensor] = {}
    parts: dict[str, Graph] = {}
    elements = 0
    for old in module.graph.nodes:
        new: Any = copied.get(old)
        if old.op == "placeholder":
            arguments.append(new)
            names.append(_source_name(old))
        elif old.op == "get_attr":
            value = _attribute(module, old.target)
            if isinstance(value, Tensor):
                constants[new] = value
            elif isinstance(value, torch.fx.GraphModule):
                parts[new.name] = graph_of(value)
            else:
                reasons.append(f"a constant of type {type(value).__name__} in its graph")
        elif old.op != "output":
            example = example_value(old)
            returned = list(tensors_in(example))
            elements += sum(_numel(t) for t in returned)
            reasons += _why_not(old, parts)
            line = line_of_stack(getattr(old, "stack_trace", None) or "")
            calls.append((new, _name(old), tuple([t.dtype for t in returned]), line))
        if new is not None:
            new.meta.clear()
    steps = tuple([Step(*call, done) for call, done in zip(calls, _last_uses([call[0] for call in calls], result))])
    for part in parts.values():
        reasons += [part.why_not] * bool(part.why_not) + ["constants in a part of its graph"] * bool(part.constants)
        elements += part.elements
    called = (*names, *[node.name for node in constants])
    return Graph(
        *(tuple(arguments), called, steps, result, tuple(constants.values()), tuple(constants), parts),
        *(reasons[0] if reasons else "", "" if code is None else _place(code), elements),
    )


def line_of_stack(stack: str) -> str:
    """The innermost line of the user's in a stack as Dynamo writes it (`line_of_stack(node.stack_trace)`)."""
    frames = [found for found in _FRAME.findall(stack) if not found[0].startswith(_LIBRARY)]
    return "{}:{} {}: {}".format(*frames[-1]).strip() if frames else ""


def _place(code: CodeType) -> str:
    """Where compiled code begins: the function, or the line after a graph break."""
    if not is_user_code(code):
        return ""
    resumed = _RESUMED.match(code.co_name)
    return text_of(code, int(resumed[2]) if resumed else code.co_firstlineno).replace(
        code.co_name, resumed[1] if resumed else code.co_name, 1
    )


def _source_name(node: Any) -> str:
    """An argument in the user's words: `L['self']._modules['fc'].weight` is `fc.weight`."""
    words = re.findall(r"\w+", re.sub(r"^L_(self_|fn_)?", "", str(node.target)))
    text = ".".join(words).removesuffix("_")
    return re.sub(r"_(parameters|buffers|modules)_", ".", "_" + text).strip("._") or str(node.name)


def _attribute(module: Any, path: str) -> Any:
    for word in path.split("."):
        module = getattr(module, word)
    return module


def _numel(tensor: Any) -> int:
    total = 1
    for size in tensor.shape:
        if type(size) is not int:  # a symbol
            return 0
        total *= size
    return total


def _name(node: Any) -> str:
    if node.op == "call_method":
        return f"torch.Tensor.{node.target}"
    try:
        return name_of(node.target)
    except Exception:
        return str(node.target)


def _why_not(node: Any, parts: dict[str, Graph]) -> list[str]:
    """Why a call cannot be made again on the CPU by a worker thread."""
    target = node.target
    if node.op == "call_module":
        return [f"a module ({target}) is one call of its graph"]
    if isinstance(target, HigherOrderOperator):
        if target.__name__ in _RUNS_A_GRAPH and node.args and getattr(node.args[0], "name", "") in parts:
            return []
        return [f"the higher-order operator {target.__name__}"]
    if node.op != "call_function":
        return []
    home, word = str(getattr(target, "__module__", "") or ""), str(getattr(target, "__name__", ""))
    if getattr(target, "namespace", "") in _COLLECTIVES or str(target).startswith(_COLLECTIVES):
        return ["a collective: its result depends on other processes"]
    if "functorch" in home or "_functorch" in str(target) or word.startswith(("_vmap", "_grad_", "_jvp")):
        return ["transforms of torch.func"]
    if word.startswith(_SETTERS) and word != "_set_grad_enabled" and home.startswith("torch"):
        return [f"it changes settings of PyTorch ({word})"]
    return []


def _last_uses(nodes: list[Any], result: Any) -> list[tuple[Any, ...]]:
    """For each call, the nodes whose results nobody needs after it."""
    from torch.fx.node import map_arg

    needed: set[Any] = set()
    map_arg(result, needed.add)
    found: list[tuple[Any, ...]] = []
    for node in reversed(nodes):
        last = [used for used in node.all_input_nodes if used not in needed]
        needed.update(last)
        found.append(tuple(last))
    return found[::-1]
