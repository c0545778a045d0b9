"""A trace as a graph: the module tree, operators with what goes in and comes out, and how tensors are called."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from . import format as columns
from .format import INPUT, OUTPUT, PRINT_COLUMNS, PROJECTIONS, Trace

_WRAPPERS: Final = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_DATA_PARALLEL: Final = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"})


class Graph:
    """A trace with its edges sorted by operator (`Graph(read(path)).inputs(3)`)."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.count = trace.count("operators")
        self.operators, self.tensors, self.looks = trace["operators"], trace["tensors"], trace["looks"]
        self._sides = tuple(self._sorted(side) for side in (INPUT, OUTPUT))
        self._prints: dict[int, tuple[Any, Any]] = {}
        self.numbers: Sequence[int] = range(self.count)  # of the operators, in the trace that was recorded

    def _sorted(self, side: int) -> tuple[Any, Any]:
        edges = self.trace["edges"]
        mine = edges["side"] == side
        operators, tensors = edges["operator"][mine], edges["tensor"][mine]
        order = np.lexsort((edges["place"][mine], operators))
        starts = np.searchsorted(operators[order], np.arange(self.count + 1))
        return starts, tensors[order]

    def inputs(self, operator: int) -> Any:
        """The numbers of the tensors that go into an operator."""
        starts, tensors = self._sides[INPUT]
        return tensors[starts[operator] : starts[operator + 1]]

    def outputs(self, operator: int) -> Any:
        """The numbers of the tensors that come out of an operator, what it wrote to included."""
        starts, tensors = self._sides[OUTPUT]
        return tensors[starts[operator] : starts[operator + 1]]

    def side(self, side: int) -> tuple[Any, Any]:
        """All edges of one side: where those of each operator start, and the tensors."""
        return self._sides[side]

    # -- modules --------------------------------------------------------------------------------------

    @functools.cached_property
    def modules(self) -> dict[int, dict[str, Any]]:
        """Modules by number: name, class, settings and parent; what was written last counts."""
        table, texts = self.trace["modules"], self.trace.texts
        rows = zip(*(table[name].tolist() for name in ("id", "parent", "name", "class", "settings")))
        found = {n: {"parent": p, "name": texts[a], "class": texts[c], "settings": texts[s]} for n, p, a, c, s in rows}
        return dict(sorted(found.items(), key=lambda item: item[0]))

    @functools.cached_property
    def paths(self) -> dict[int, str]:
        """Names of modules without what wrappers add: `model.module._orig_mod.h` is `model.h`."""
        found: dict[int, str] = {-1: ""}
        wrapped = {m["name"] for m in self.modules.values() if m["class"] in _DATA_PARALLEL}
        for number, module in self.modules.items():
            words: list[str] = []
            whole: list[str] = []
            for word in module["name"].split("."):
                skip = word in _WRAPPERS or (word == "module" and ".".join(whole) in wrapped)
                whole.append(word)
                if not skip:
                    words.append(word)
            found[number] = ".".join(words)
        return found

    @functools.cached_property
    def children(self) -> dict[int, list[int]]:
        """The modules in each module; those of -1 are the models."""
        found: dict[int, list[int]] = defaultdict(list)
        for number, module in self.modules.items():
            found[module["parent"]].append(number)
        return found

    @functools.cached_property
    def by_module(self) -> dict[int, list[int]]:
        """The operators that each module calls itself, in order."""
        found: dict[int, list[int]] = defaultdict(list)
        for operator, module in enumerate(self.operators["module"].tolist()):
            found[module].append(operator)
        return found

    @functools.cached_property
    def step_order(self) -> dict[int, int]:
        """The steps by their order: they count from the start of a process, so those of two runs differ."""
        return {step: n for n, step in enumerate(np.unique(self.operators["step"]).tolist())}

    # -- names ----------------------------------------------------------------------------------------

    @functools.cached_property
    def names(self) -> list[str]:
        """The names of operators (`torch.nn.functional.linear`)."""
        return self.trace.words("operators", "name")

    @functools.cached_property
    def titles(self) -> list[str]:
        """What the log calls operators: module, kind and number (`model.blocks.0.att.key-linear-20`)."""
        known = self.trace.texts
        modules = {n: m["name"] for n, m in self.modules.items()}
        of_backward = (self.operators["phase"] == columns.BACKWARD) & (self.operators["group"] == 0)  # no collectives
        own = self.operators["title"].tolist()
        found, numbers = [], self.numbers
        for i, (name, module) in enumerate(zip(self.operators["name"].tolist(), self.operators["module"].tolist())):
            if own[i]:
                found.append(known[own[i]])
                continue
            last = known[name].rpartition(".")[2] + ("_grad" if of_backward[i] else "")
            prefix = modules.get(module, "")
            found.append(f"{prefix}-{last}-{numbers[i]}" if prefix else f"{last}-{numbers[i]}")
        return found

    def tensor_title(self, tensor: int) -> str:
        """What the log calls a tensor (`model.emb.weight/out`, `model.emb-embedding-0/out_0`)."""
        name = self.trace.texts[int(self.tensors["name"][tensor])]
        if name:
            return name if "/" in name else f"{name}/out"
        producer = int(self.tensors["producer"][tensor])
        if producer < 0:
            return f"input-{tensor}/out"
        return f"{self.titles[producer]}/out_{int(self.tensors['output'][tensor])}"

    def look(self, tensor: int) -> dict[str, Any]:
        """Shape, dtype, stride, device, requires_grad, placements, mesh and bytes of a tensor."""
        number = int(self.tensors["look"][tensor])
        texts = self.trace.texts
        words = {
            k: texts[int(self.looks[k][number])] for k in ("shape", "dtype", "stride", "device", "placements", "mesh")
        }
        grad, size = bool(self.looks["requires_grad"][number]), int(self.looks["bytes"][number])
        return {**words, "requires_grad": grad, "bytes": size}

    # -- fingerprints ---------------------------------------------------------------------------------

    def prints(self, part: int = 0) -> tuple[Any, Any]:
        """Rows of fingerprints, and for each tensor its row, -1 where it has none; not to be changed."""
        if part not in self._prints:
            self._prints[part] = self._read_prints(part)
        return self._prints[part]

    def _read_prints(self, part: int) -> tuple[Any, Any]:
        table = self.trace["prints"]
        mine = table["part"] == part
        rows = np.stack([table[name][mine].astype(np.float64, copy=False) for name in PRINT_COLUMNS], axis=1)
        where = np.full(self.trace.count("tensors"), -1, np.int64)
        where[table["tensor"][mine]] = np.arange(len(rows))
        return rows, where


def short_name(name: str) -> str:
    """The last word of an operator's name, without what marks variants (`short_name("torch.Tensor.add_") == "add"`)."""
    last = name.rpartition(".")[2] if not name.startswith("aten.") else name.split(".")[1]
    last = re.sub(r"^__[ir]?(\w+?)__$", r"\1", last)
    return last.rstrip("_") or last


def projections(rows: Any) -> Any:
    """The projections of rows of prints."""
    return rows[..., :PROJECTIONS]
