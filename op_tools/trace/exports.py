"""Other forms of a trace: lines of JSON, a timeline for Perfetto, a graph for model-explorer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from .format import PHASES
from .graph import Graph
from .memory import live_bytes
from .show import chosen


def as_json(graph: Graph, only: str = "", step: int | None = None) -> Iterator[str]:
    """The trace as lines of JSON: facts, modules, operators with their tensors.

    `only` and `step` choose operators, as in `chosen`; modules are named all.
    """
    yield json.dumps({"facts": graph.trace.facts})
    for number, module in graph.modules.items():
        yield json.dumps({"module": number, **module})
    rows, where = graph.prints()
    texts, found = graph.trace.texts, graph.operators

    def tensor(number: int) -> dict[str, Any]:
        row = int(where[number])
        printed = {} if row < 0 else {"print": [float(x) for x in rows[row]]}
        return {"tensor": number, "name": graph.tensor_title(number), **graph.look(number), **printed}

    for operator in chosen(graph, only, step):
        words = {
            k: texts[int(found[k][operator])] for k in ("name", "location", "stack", "arguments", "region", "group")
        }
        yield json.dumps(
            {
                "operator": operator,
                "step": int(found["step"][operator]),
                "phase": PHASES[int(found["phase"][operator])],
                "module": int(found["module"][operator]),
                **words,
                "inputs": [tensor(t) for t in graph.inputs(operator).tolist()],
                "outputs": [tensor(t) for t in graph.outputs(operator).tolist()],
            }
        )


def as_perfetto(graphs: Iterable[Graph], only: str = "", step: int | None = None) -> Iterator[str]:
    """The traces of some ranks for ui.perfetto.dev: operators by phase and time, and live bytes.

    `only` and `step` choose operators, as in `chosen`.
    """
    yield '{"traceEvents": ['
    separator = ""
    for graph in graphs:
        for event in _events(graph, only, step):
            yield separator + json.dumps(event)
            separator = ","
    yield "]}"


def _events(graph: Graph, only: str, step: int | None) -> Iterator[dict[str, Any]]:
    pid = graph.trace.rank
    if graph.trace.world > 1:
        yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": f"rank {pid}"}}
    shown = frozenset(chosen(graph, only, step))
    phases = graph.operators["phase"].tolist()
    events = iter(live_bytes(graph))
    event = next(events, None)
    previous = 0.0
    for operator, end in enumerate(graph.operators["time"].tolist()):
        live = None
        while event is not None and event[0] <= operator:
            live, event = event[1], next(events, None)
        if operator in shown:
            yield {
                "name": graph.names[operator],
                "cat": PHASES[phases[operator]],
                "ph": "X",
                "pid": pid,
                "tid": phases[operator],
                "ts": previous * 1e6,
                "dur": (end - previous) * 1e6,
                "args": {"title": graph.titles[operator]},
            }
            if live is not None:
                yield {"name": "live bytes", "ph": "C", "pid": pid, "ts": end * 1e6, "args": {"bytes": live}}
        previous = end


def as_model_explorer(graphs: Iterable[Graph], only: str = "", step: int | None = None) -> Iterator[str]:
    """The traces of some ranks for model-explorer: nodes in namespaces, and edges between them.

    `only` and `step` choose operators, as in `chosen`.
    """
    yield '{"graphs": ['
    for number, graph in enumerate(graphs):
        name = str(graph.trace.facts.get("graph", "trace"))
        name += f" of rank {graph.trace.rank}" if graph.trace.world > 1 else ""
        yield "," * bool(number) + '{"id": ' + json.dumps(name) + ', "nodes": ['
        for place, node in enumerate(_nodes(graph, only, step)):
            yield "," * bool(place) + json.dumps(node)
        yield "]}"
    yield "]}"


def _nodes(graph: Graph, only: str, step: int | None) -> Iterator[dict[str, Any]]:
    shown = dict.fromkeys(chosen(graph, only, step))
    modules = {n: m["name"].replace(".", "/") for n, m in graph.modules.items()}
    producers, outputs = graph.tensors["producer"].tolist(), graph.tensors["output"].tolist()

    def place_of(tensor: int) -> str:
        """Which result of its maker a tensor is; what lies over the same memory is that result."""
        made: list[int] = graph.outputs(producers[tensor]).tolist()
        return str(made.index(tensor) if tensor in made else min(outputs[tensor], max(0, len(made) - 1)))

    for operator in shown:
        taken = graph.inputs(operator).tolist()
        looks = [graph.look(t) for t in graph.outputs(operator).tolist()]
        yield {
            "id": str(operator),
            "label": graph.names[operator].rpartition(".")[2],
            "namespace": modules.get(int(graph.operators["module"][operator]), ""),
            "attrs": [
                {"key": "phase", "value": PHASES[int(graph.operators["phase"][operator])]},
                {"key": "location", "value": graph.trace.texts[int(graph.operators["location"][operator])]},
            ],
            "incomingEdges": [
                {"sourceNodeId": str(producers[t]), "sourceNodeOutputId": place_of(t), "targetNodeInputId": str(i)}
                for i, t in enumerate(taken)
                if producers[t] in shown
            ],
            "outputsMetadata": [
                {"id": str(i), "attrs": [{"key": "tensor_shape", "value": f"{look['dtype']}{look['shape']}"}]}
                for i, look in enumerate(looks)
            ],
        }
