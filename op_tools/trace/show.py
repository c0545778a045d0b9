"""Prints a trace as OneFlow's `nn.Graph` prints its graph, at four levels of detail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from . import format as columns
from .format import PHASES
from .graph import Graph
from .memory import memory_of

MODULES, TENSORS, OPERATORS, STACKS = range(4)
_MAX_PORTS: Final = 16
_MAX_MODULES: Final = 5  # of those that need most memory


def lines(graph: Graph, level: int = TENSORS, only: str = "", step: int | None = None) -> Iterator[str]:
    """The lines of the tree: modules; their tensors; operators; memory and stacks (`"\\n".join(lines(graph, 2))`).

    `only` keeps modules and operators whose name holds this text.
    """
    view = _View(graph, level, only, step)
    name = graph.trace.facts.get("graph", "trace")
    yield f"(GRAPH:{name}): ("
    for module in graph.children[-1]:
        yield from view.module(module, 1)
    if level >= OPERATORS:
        yield from view.operators(-1, 1)
    yield ")"
    yield from memory_lines(graph)


def missing(graph: Graph, level: int | None, only: str = "", step: int | None = None) -> str:
    """Why there is nothing to show, in one line; empty where there is (`missing(graph, 2, "gelu")`).

    `level` is the one of the tree, None for forms that are lists of operators.
    """
    steps = graph.operators["step"]
    if step is not None and not (steps == step).any():
        there = f"steps {int(steps.min())} to {int(steps.max())}" if graph.count else "no operators"
        return f"nothing in step {step}; the trace has {there}"
    if not only or (level is not None and any(only in module["name"] for module in graph.modules.values())):
        return ""
    found = len(chosen(graph, only, step))
    if not found:
        return f"no module and no operator{'' if step is None else f' of step {step}'} has {only!r} in its name"
    if level is None or level >= OPERATORS:
        return ""
    told = "an operator has: -v 2 shows it" if found == 1 else f"{found:,} operators have: -v 2 shows them"
    return f"no module has {only!r} in its name; {told}"


def chosen(graph: Graph, only: str = "", step: int | None = None) -> list[int]:
    """The operators of a step with a text in their names (`chosen(graph, "gelu", 0)`)."""
    found = range(graph.count) if step is None else (graph.operators["step"] == step).nonzero()[0].tolist()
    return [operator for operator in found if only in graph.titles[operator]]


def memory_lines(graph: Graph) -> Iterator[str]:
    """What memory the run needs, in the words of the log."""
    plan = graph.trace["plan"]
    if len(plan["rank"]):
        for rank, what, size, blocks in zip(*(plan[c].tolist() for c in ("rank", "what", "bytes", "blocks"))):
            counted = f" with mem_block_num = {blocks}" if blocks >= 0 else ""
            yield f" Rank: {rank}, {graph.trace.texts[what]} [ {size / 2**20:.2f} MiB ]{counted}"
        return
    found = memory_of(graph)
    at = f", most of it at {graph.titles[found.operator]}" if 0 <= found.operator < graph.count else ""
    yield f" Graph in Rank: {graph.trace.rank} needs [ {found.peak / 2**20:.2f} MiB ] device memory{at}."
    for kind, size in sorted(found.kinds.items(), key=lambda item: -item[1]):
        yield f"     {kind} is [ {size / 2**20:.2f} MiB ]"
    largest = sorted(found.modules.items(), key=lambda item: -item[1])
    for module, size in largest[:_MAX_MODULES]:
        name = graph.modules[module]["name"] if module in graph.modules else "outside of modules"
        yield f"     {name} has [ {size / 2**20:.2f} MiB ] of it"
    if len(largest) > _MAX_MODULES:
        left = sum(size for _, size in largest[_MAX_MODULES:])
        yield f"     {len(largest) - _MAX_MODULES} more modules have [ {left / 2**20:.2f} MiB ]"


class _View:
    def __init__(self, graph: Graph, level: int, only: str, step: int | None) -> None:
        self.graph, self.level, self.only, self.step = graph, level, only, step
        self.texts = graph.trace.texts
        kinds = graph.tensors["kind"]
        self.members: dict[int, list[int]] = {}
        seen: set[tuple[int, int]] = set()
        for kind in (columns.BUFFER, columns.PARAMETER):
            for tensor in (kinds == kind).nonzero()[0].tolist():
                module, name = int(graph.tensors["module"][tensor]), int(graph.tensors["name"][tensor])
                if (module, name) not in seen:
                    seen.add((module, name))
                    self.members.setdefault(module, []).append(tensor)
        self.inside = self._inside() if only else set()
        self.ports = _ports(graph, step) if level >= TENSORS else {}

    def _inside(self) -> set[int]:
        """The modules to show: with the text in their names, or with such an operator in them."""
        graph = self.graph
        found = {number for number, module in graph.modules.items() if self.only in module["name"]}
        if self.level >= OPERATORS:
            steps = graph.operators["step"].tolist()
            for module, operators in graph.by_module.items():
                chosen = (n for n in operators if self.step is None or steps[n] == self.step)
                if any(self.only in graph.titles[n] for n in chosen):
                    found.add(module)
        for number in list(found):
            parent = graph.modules[number]["parent"] if number in graph.modules else -1
            while parent in graph.modules and parent not in found:
                found.add(parent)
                parent = graph.modules[parent]["parent"]
        return found

    def module(self, number: int, depth: int) -> Iterator[str]:
        if self.only and number not in self.inside:
            return
        found = self.graph.modules[number]
        pad = "  " * depth
        yield f"{pad}(MODULE:{found['name']}:{found['class']}({found['settings']})): ("
        taken, made = self.ports.get(number, ((), ()))
        if self.level >= TENSORS:
            for i, tensor in enumerate(taken[:_MAX_PORTS]):
                yield f"{pad}  (INPUT:_{found['name']}_input.{i}:{self.tensor(tensor)})"
            for tensor in self.members.get(number, ()):
                kind = columns.KINDS[int(self.graph.tensors["kind"][tensor])].upper()
                name = self.texts[int(self.graph.tensors["name"][tensor])]
                yield f"{pad}  ({kind}:{name.removesuffix('/out')}:{self.tensor(tensor)}): ()"
        for child in self.graph.children[number]:
            yield from self.module(child, depth + 1)
        if self.level >= OPERATORS:
            yield from self.operators(number, depth + 1)
        if self.level >= TENSORS:
            for i, tensor in enumerate(made[:_MAX_PORTS]):
                yield f"{pad}  (OUTPUT:_{found['name']}_output.{i}:{self.tensor(tensor)})"
        yield f"{pad})"

    def operators(self, module: int, depth: int) -> Iterator[str]:
        pad, graph = "  " * depth, self.graph
        for operator in graph.by_module.get(module, ()):
            if self.step is not None and int(graph.operators["step"][operator]) != self.step:
                continue
            title = graph.titles[operator]
            if self.only and self.only not in title:
                continue
            taken = ", ".join(self.edge(t) for t in graph.inputs(operator).tolist())
            outputs = graph.outputs(operator).tolist()
            made = ", ".join(self.edge(t) for t in outputs)
            placement = self.placement(outputs[0] if outputs else None)
            yield f"{pad}(OPERATOR: {title}({taken}) -> ({made}), placement=({placement}))"
            if self.level >= STACKS:
                yield from self.details(operator, pad)

    def details(self, operator: int, pad: str) -> Iterator[str]:
        found = self.graph.operators
        arguments = self.texts[int(found["arguments"][operator])]
        region = self.texts[int(found["region"][operator])]
        stack = self.texts[int(found["stack"][operator])] or self.texts[int(found["location"][operator])]
        words = [f"phase={PHASES[int(found['phase'][operator])]}", f"step={int(found['step'][operator])}"]
        group = self.texts[int(found["group"][operator])]
        words += [w for w in (arguments and f"arguments=({arguments})", group, region) if w]
        yield f"{pad}    {', '.join(words)}"
        for i, line in enumerate(stack.splitlines()):
            yield f"{pad}    Python Stack[-{i + 1}]: {line}"

    def edge(self, tensor: int) -> str:
        look = self.graph.look(tensor)
        shape = look["shape"][1:-1]
        return f"{self.graph.tensor_title(tensor)}:({self.sbp(look)}size=({shape}), dtype=({look['dtype']}))"

    def tensor(self, tensor: int) -> str:
        look = self.graph.look(tensor)
        grad = ", requires_grad=True" if look["requires_grad"] else ""
        shape = look["shape"][1:-1]
        size = f"({shape},)" if shape and "," not in shape else f"({shape})"
        return (
            f"tensor(..., placement={self.placement(tensor)}, {self.sbp(look)}size={size}, dtype={look['dtype']}{grad})"
        )

    def sbp(self, look: dict[str, Any]) -> str:
        return f"sbp=({look['placements']}), " if look["placements"] else ""

    def placement(self, tensor: int | None) -> str:
        if tensor is None:
            return f"ranks=[{self.graph.trace.rank}]"
        look = self.graph.look(tensor)
        ranks = look["mesh"].partition("ranks=")[2] or f"[{self.graph.trace.rank}]"
        return f'type="{look["device"]}", ranks={ranks}'


def _ports(graph: Graph, step: int | None) -> dict[int, tuple[list[int], list[int]]]:
    """What goes into each module and comes out of it: tensors that operators on the other side made, or use."""
    forward = graph.operators["phase"] == columns.FORWARD
    first = int(graph.operators["step"].min()) if graph.count else 0
    chosen = forward & (graph.operators["step"] == (first if step is None else step))
    module_of = graph.operators["module"].tolist()
    above: dict[int, frozenset[int]] = {-1: frozenset()}

    def ancestors(module: int) -> frozenset[int]:
        if module not in above:
            above[module] = ancestors(graph.modules[module]["parent"]) | {module}
        return above[module]

    found: dict[int, tuple[dict[int, None], dict[int, None]]] = {}
    given = frozenset((columns.PARAMETER, columns.BUFFER))
    kinds, producers = graph.tensors["kind"].tolist(), graph.tensors["producer"].tolist()
    for operator in chosen.nonzero()[0].tolist():
        users = ancestors(module_of[operator])
        for tensor in graph.inputs(operator).tolist():
            if kinds[tensor] in given:
                continue
            makers = ancestors(module_of[producers[tensor]]) if producers[tensor] >= 0 else frozenset[int]()
            for module in users - makers:
                found.setdefault(module, ({}, {}))[0][tensor] = None
            for module in makers - users:
                found.setdefault(module, ({}, {}))[1][tensor] = None
    return {module: (list(taken), list(made)) for module, (taken, made) in found.items()}
