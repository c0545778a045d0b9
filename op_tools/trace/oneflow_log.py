"""Reads the graph that OneFlow's `nn.Graph.debug` printed into a training log, as a trace."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from . import format as columns
from .format import INPUT, OUTPUT, TraceError, TraceWriter

_TREE: Final = re.compile(r"^\(GRAPH:([^:]+):\w+\): \($")
_MODULE: Final = re.compile(r"^(\s*)\(MODULE:([\w.]+):(\w+)\((.*)\)\): \($")
_MEMBER: Final = re.compile(r"^\s*\((INPUT|OUTPUT|PARAMETER|BUFFER):([^:]+):tensor\(\.\.\., (.*)\)\)(?:: \(\))?$")
_OPERATOR: Final = re.compile(r"^\s*\(OPERATOR: ([^\s(]+)\((.*)\) -> \((.*)\), placement=\((.*)\)\)$")
_TENSOR: Final = re.compile(
    r"([^\s(\[,:]+):\(?sbp=\(((?:[^()]|\([^()]*\))*)\), size=\(([^()]*)\), dtype=\(oneflow\.(\w+)\)"
)
_PLACEMENT: Final = re.compile(r'type="(\w+)", ranks=(\[[\d, ]*\])')
_LISTED: Final = re.compile(r"^(?:.*?)-([a-z][a-z0-9_]*?)-(\d+)(.*)$")
_NEEDS: Final = re.compile(r"in Rank: (\d+), Device: \d+ (needs to allocate) \[ ([\d.]+) MiB \]")
_PLAN: Final = re.compile(r"^\s+(In general, Chunk id: \d+  memory|Unreused memory not eager var|Eager Variable Tensor "
                          r"total memory) is\s+\[ ([\d.]+) MiB \] with mem_block_num = (\d+)")  # fmt: skip
_ADDED: Final = re.compile(r'^:? ?name: "(.*)"$')
_LOC: Final = re.compile(r"at \\'([^']*)\\': line (\d+)")
_SBP: Final = {"oneflow.sbp.broadcast": "B", "oneflow.sbp.partial_sum": "P"}
_OPTIMIZER: Final = re.compile(r"(_optimizer|adam_bias_correction_factor\d|-[mv])$|^System-Train-")
_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "bool": 1, "float64": 8}


class _Op(NamedTuple):
    name: str
    module: int
    inputs: list[tuple[str, str, str, str]]  # name, sbp, size, dtype
    outputs: list[tuple[str, str, str, str]]
    device: str
    ranks: str


def import_log(log: Path, folder: Path) -> tuple[Path, dict[str, int]]:
    """Write the graph in a log as a trace; returns its file, and what was read (`import_log(log, Path("run"))`)."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise TraceError(f"{log}: cannot be read ({error.strerror or error})") from None
    start = next((i for i, line in enumerate(lines) if _TREE.match(line)), None)
    if start is None and any(line.startswith("(MODULE:") for line in lines):  # listed while the graph is being made
        raise TraceError(f"{log}: ends after line {len(lines):,}, before the graph is printed")
    if start is None:
        raise TraceError(f"{log}: no graph in it (OneFlow prints it with graph.debug >= 1)")
    end = next((i for i in range(start, len(lines)) if lines[i] == ")"), None)
    if end is None:
        read = sum("(OPERATOR:" in line for line in lines[start:])
        raise TraceError(f"{log}: its graph is cut off after line {len(lines):,} ({read:,} operators were listed)")
    found = _Graph(lines, start, end, log)
    path = folder / f"rank0{columns.SUFFIX}"
    world = 1 + max((max(eval_ranks(op.ranks), default=0) for op in found.operators), default=0)
    facts = {"rank": 0, "world": world, "graph": found.name, "imported": str(log), "device": "cuda"}
    with TraceWriter(path, facts) as writer:
        found.write(writer)
    return path, found.counts()


def eval_ranks(text: str) -> list[int]:
    """The numbers in `[0, 1]`."""
    return [int(word) for word in re.findall(r"\d+", text)]


class _Graph:
    def __init__(self, lines: list[str], start: int, end: int, log: Path) -> None:
        match = _TREE.match(lines[start])
        assert match is not None
        self.name = match[1]
        self.modules: list[tuple[int, int, str, str, str]] = []
        self.members: list[tuple[str, str, int, dict[str, str]]] = []
        self.operators: list[_Op] = []
        self.plan: list[tuple[int, str, float, int]] = []
        self._read_tree(_joined(lines, start + 1, end), log)
        self.initialisers, self.locations = _added(lines, start)
        rank = 0
        for line in lines[:start]:
            if needs := _NEEDS.search(line):
                rank = int(needs[1])
                self.plan.append((rank, f"{needs[2]}", float(needs[3]), -1))
            elif part := _PLAN.match(line):
                self.plan.append((rank, part[1], float(part[2]), int(part[3])))

    def counts(self) -> dict[str, int]:
        kinds = [kind for kind, *_ in self.members]
        found = {"modules": len(self.modules), "operators": len(self.operators), "memory lines": len(self.plan)}
        return {
            **found,
            **{f"{kind.lower()}s": kinds.count(kind) for kind in ("INPUT", "PARAMETER", "BUFFER", "OUTPUT")},
        }

    def _read_tree(self, lines: Iterator[tuple[int, str]], log: Path) -> None:
        inside = [-1]
        for number, line in lines:
            if module := _MODULE.match(line):
                self.modules.append((len(self.modules), inside[-1], module[2], module[3], module[4]))
                inside.append(len(self.modules) - 1)
            elif operator := _OPERATOR.match(line):
                self.operators.append(self._operator(operator, inside[-1]))
            elif member := _MEMBER.match(line):
                self.members.append((member[1], member[2], inside[-1], _facts(member[3])))
            elif line.strip().startswith("(CONFIG:"):
                continue
            elif line.strip() == ")" and len(inside) > 1:
                inside.pop()
            else:
                raise TraceError(f"{log}: line {number + 1} of its graph cannot be read: {line.strip()[:80]!r}")

    def _operator(self, match: re.Match[str], module: int) -> _Op:
        name = match[1]
        placed = _PLACEMENT.search(match[4])

        def tensors(text: str) -> list[tuple[str, str, str, str]]:
            found = [(m[1], m[2], m[3], m[4]) for m in _TENSOR.finditer(text)]
            return [(n if "/" in n else f"{name}/{n}", s, size, dtype) for n, s, size, dtype in found]

        device, ranks = (placed[1], placed[2]) if placed else ("", "[]")
        return _Op(name, module, tensors(match[2]), tensors(match[3]), device, ranks)

    # -- writing --------------------------------------------------------------------------------------

    def write(self, writer: TraceWriter) -> None:
        text = writer.text
        for number, parent, name, kind, settings in self.modules:
            writer.add("modules", (number, parent, text(name), text(kind), text(settings)))
        order = self._ordered()
        numbers = {op.name: i for i, (op, _, _) in enumerate(order)}
        self._tensors: dict[Any, int] = {}
        members = {name: (kind, module, facts) for kind, name, module, facts in self.members}
        for name, (kind, module, facts) in members.items():
            if kind in ("PARAMETER", "BUFFER"):
                what = columns.PARAMETER if kind == "PARAMETER" else columns.BUFFER
                row = (f"{name}/out", facts["sbp"], facts["size"], facts["dtype"])
                self._tensor(writer, row, facts["device"], facts["ranks"], -1, 0, module, what)
        for i, (op, phase, kind) in enumerate(order):
            location = self.locations.get(op.name, "")
            arguments = f"initializer={self.initialisers[op.name]}" if op.name in self.initialisers else ""
            words = (0, phase, text(f"oneflow.{kind}"), op.module, text(location), 0, text(arguments))
            number = writer.add("operators", (*words, 0, 0, 0, -1, float(i), text(op.name)))
            for side, tensors in ((INPUT, op.inputs), (OUTPUT, op.outputs)):
                for place, row in enumerate(tensors):
                    maker = row[0].rpartition("/")[0]
                    producer = number if side == OUTPUT else numbers.get(maker, -1)
                    what = columns.ACTIVATION
                    if maker in members and members[maker][0] == "PARAMETER":
                        what, producer = columns.PARAMETER, -1
                    elif maker.endswith(("-m", "-v")) and maker[:-2] in members:
                        what = columns.STATE
                    tensor = self._tensor(writer, row, op.device, op.ranks, producer, place, op.module, what)
                    writer.add("edges", (number, side, place, tensor))
        for rank, what_needs, size, blocks in self.plan:
            writer.add("plan", (rank, text(what_needs), int(size * 2**20), blocks))

    def _tensor(self, writer: TraceWriter, row: tuple[str, str, str, str], device: str, ranks: str, *rest: int) -> int:
        producer, place, module, kind = rest
        key = (row, kind)
        found = self._tensors.get(key)
        if found is None:
            text = writer.text
            name, sbp, size, dtype = row
            shape = [int(word) for word in re.findall(r"\d+", size)]
            nbytes = _BYTES.get(dtype, 4)
            for n in shape:
                nbytes *= n
            placed = sbp.removesuffix(",")
            many = f"{len(eval_ranks(ranks))} ranks={ranks}"
            look = (
                text(str(shape)),
                text(dtype),
                0,
                text(device),
                int(kind == columns.PARAMETER),
                text(placed),
                text(many),
                nbytes,
            )
            number = writer.add("looks", look)
            known = f"{name}"
            found = self._tensors[key] = writer.add("tensors", (kind, text(known), number, producer, place, -1, module))
        return found

    def _ordered(self) -> list[tuple[_Op, int, str]]:
        """Operators in the order in which they run, with phase and kind: variables, numbered ones, the optimizer."""
        backward = next(
            (int(m[2]) for op in self.operators if (m := re.match(r"^(ones_like)-(\d+)$", op.name))), 1 << 30
        )
        rows = []
        for place, op in enumerate(self.operators):
            rest = op.name.removeprefix(self.modules[op.module][2]) if op.module >= 0 else f"-{op.name}"
            match = _LISTED.match(rest if rest.startswith("-") else f"-{rest}")
            phase, kind, order = columns.FORWARD, "variable", (0, 0)
            if _OPTIMIZER.search(op.name):
                phase, kind, order = columns.OPTIMIZER, _optimizer_kind(op.name), (2, 0)
            elif "System-Boxing" in op.name:
                kind, order = "boxing", (0, 1)
            elif match:
                number = int(match[2])
                cast = (
                    "cast" if re.search(r"-cast_\w+$", op.name) else "identity" if "pinned_identity" in op.name else ""
                )
                phase = columns.BACKWARD if number >= backward else columns.FORWARD
                kind, order = cast or match[1], (1, number * 2 + bool(match[3]))
            elif re.search(r"-cast_\w+$", op.name):
                kind = "cast"
            rows.append((order, place, op, phase, kind))
        return [(op, phase, kind) for _, _, op, phase, kind in sorted(rows, key=lambda row: row[:2])]


def _optimizer_kind(name: str) -> str:
    if name.endswith("_optimizer"):
        return "adam"
    return "state" if name.endswith(("-m", "-v")) else "schedule"


def _joined(lines: list[str], start: int, end: int) -> Iterator[tuple[int, str]]:
    """The entries of the tree; what is told of a tensor goes over several lines."""
    whole, first = "", start
    for i in range(start, end):
        line = lines[i]
        if re.match(r"^\s*(\((GRAPH|CONFIG|MODULE|INPUT|OUTPUT|PARAMETER|BUFFER|OPERATOR):|\)$)", line):
            if whole:
                yield first, whole
            whole, first = line, i
        else:
            whole += " " + line.strip()
    if whole:
        yield first, whole


def _facts(text: str) -> dict[str, str]:
    placed = _PLACEMENT.search(text)
    sbp = re.search(r"sbp=\(((?:[^()]|\([^()]*\))*)\)", text)
    size = re.search(r"size=\(([^()]*)\)", text)
    dtype = re.search(r"dtype=oneflow\.(\w+)", text)
    words = [w.strip() for w in re.split(r",\s*(?![^(]*\))", sbp[1] if sbp else "") if w.strip()]
    placements = [_SBP.get(w) or re.sub(r"oneflow\.sbp\.split\((?:dim|axis)=(\d+)\)", r"S(\1)", w) for w in words]
    return {
        "device": placed[1] if placed else "",
        "ranks": placed[2] if placed else "[]",
        "sbp": ", ".join(placements),
        "size": size[1] if size else "",
        "dtype": dtype[1] if dtype else "",
    }


def _added(lines: list[str], end: int) -> tuple[dict[str, str], dict[str, str]]:
    """What was told when operators were added: how variables are initialised, and lines of Python."""
    initialisers: dict[str, str] = {}
    locations: dict[str, str] = {}
    name, awaits = "", False
    for line in lines[:end]:
        if match := _ADDED.match(line):
            name = match[1]
        elif line.strip() == "initializer {":
            awaits = True
        elif awaits:
            initialisers[name] = line.strip().removesuffix(" {").removesuffix("_conf")
            awaits = False
        elif line.startswith('loc: "') and (places := _LOC.findall(line)):
            locations[name] = f"{places[-1][0]}:{places[-1][1]}"
    return initialisers, locations
