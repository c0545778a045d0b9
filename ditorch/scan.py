"""Reads a code base and says which CUDA calls it makes and what each becomes on a backend."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ditorch import surface
from ditorch.backend import Backend
from ditorch.backends.surfaces import recorded

DEVICE = re.compile(r"cuda(:\d+)?\Z")
DEVICE_KEYWORDS = {"device", "device_type", "map_location", "device_id", "output_device", "pin_memory_device"}
DEVICE_CALLS = {
    "to",
    "device",
    "autocast",
    "Generator",
    "GradScaler",
    "set_default_device",
    "init_device_mesh",
    "DeviceMesh",
    "set_device",
    "synchronize",
    "Stream",
    "get_device_properties",
    "type",
}
SKIPPED_FOLDERS = {".git", ".venv", "venv", "node_modules", "__pycache__", ".tox", "build", "dist"}
# Packages whose kernels are compiled for CUDA: nothing at the level of PyTorch can redirect them.
CUDA_PACKAGES = {
    "triton": "the vendor's Triton, or the operator written with torch",
    "cupy": "torch tensors, or numpy",
    "pycuda": "torch",
    "pynvml": "the vendor's monitoring library",
    "apex": "torch.amp, torch.optim and torch.nn.parallel",
    "flash_attn": "torch.nn.functional.scaled_dot_product_attention",
    "xformers": "torch.nn.functional.scaled_dot_product_attention",
    "bitsandbytes": "the vendor's quantization package",
    "transformer_engine": "torch.nn modules with torch.autocast",
}
# What a vendor's module is expected to have, for backends that are not installed on this machine.
EXPECTED = frozenset(
    re.findall(
        r"\w+",
        """
        is_available device_count current_device set_device synchronize Stream Event stream current_stream
        default_stream set_stream StreamContext manual_seed manual_seed_all seed seed_all initial_seed
        get_rng_state set_rng_state default_generators memory_allocated max_memory_allocated memory_reserved
        max_memory_reserved memory_stats reset_peak_memory_stats mem_get_info empty_cache get_device_name
        is_bf16_supported is_initialized init
        """,
    )
)


@dataclass(frozen=True)
class Use:
    """One CUDA call or name in a file.

    Example: ``Use("train.py", 12, "torch.cuda.synchronize", "mapped", "torch.npu.synchronize")``
    """

    file: str
    line: int
    name: str
    status: str
    """``mapped``, ``emulated``, ``hint``, ``unsupported``, or ``unreadable`` for a file that is not Python."""
    note: str


@dataclass(frozen=True)
class Scan:
    """All uses in a code base, with the backend they were judged for.

    Example: ``Scan("ascend", uses).counts()["unsupported"]``
    """

    backend: str
    uses: tuple[Use, ...]

    def counts(self) -> dict[str, int]:
        """Number of uses per status.

        Example: ``{"mapped": 10, "unsupported": 1}``
        """
        return dict(Counter(use.status for use in self.uses))

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON.

        Example: ``json.dumps(scan.as_dict())``
        """
        return {"backend": self.backend, "counts": self.counts(), "uses": [asdict(use) for use in self.uses]}


def scan(path: str | Path, backend: Backend) -> Scan:
    """Look at one file or at every Python file below a folder.

    Example: ``scan("examples", ditorch.backend).counts()``
    """
    root = Path(path)
    if not root.exists():
        raise FileNotFoundError(f"ditorch scan: {root} does not exist")
    judge = Judge(backend)
    uses: list[Use] = []
    for file in _python_files(root):
        uses.extend(scan_source(file.read_bytes(), str(file), judge))
    return Scan(backend.name, tuple(uses))


def scan_source(source: str | bytes, file: str, judge: Judge) -> list[Use]:
    """The uses in one file's text; text that is not Python gives one ``unreadable`` use.

    Example: ``scan_source("import torch; torch.cuda.synchronize()", "a.py", Judge(backend))``
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        return [Use(file, getattr(error, "lineno", None) or 1, "", "unreadable", str(error))]
    visitor = _Visitor(file, judge)
    visitor.visit(tree)
    return sorted(visitor.uses, key=lambda use: use.line)


class Judge:
    """Says what becomes of a CUDA name on one backend."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._here = backend.native or (backend.installed() and backend.find_module() is not None)

    def __call__(self, name: str) -> tuple[str, str]:
        if name in surface.LIBRARY_HINTS and not self.backend.native:
            return "hint", surface.LIBRARY_HINTS[name]
        if not name.startswith("torch.cuda."):
            return "mapped", f"means {self.backend.device_type}"
        return self._judge_cuda(name.removeprefix("torch.cuda."))

    def _judge_cuda(self, name: str) -> tuple[str, str]:
        from ditorch.redirect.cuda_module import STATS
        from ditorch.redirect.emulation import Emulation
        from ditorch.redirect.tensor_types import DTYPES

        if self.backend.native:
            return "mapped", "CUDA itself"
        if name in DTYPES:
            return "mapped", "makes tensors on the accelerator"
        if name in ("CUDAGraph", "graph", "make_graphed_callables") and f"torch.cuda.{name}" not in self.backend.gaps:
            return "emulated", "recorded operators are run again where the vendor has no graphs"
        if name in ("memory", "random", "amp", "nvtx", "nccl", "comm", "profiler", "streams", "graphs"):
            return "mapped", "module"
        if not self._here:
            return self._guess(name)
        status, note = surface.classify(self.backend, self.backend.find_module(), Emulation, name)
        if status == "unsupported" and name in STATS:
            return "emulated", "from memory_stats"
        return status, note

    def _guess(self, name: str) -> tuple[str, str]:
        from ditorch.redirect.emulation import Emulation

        known = recorded(self.backend.name)
        if known is not None:
            return surface.classify(self.backend, known.as_module(), Emulation, name)
        why = f"expected of {self.backend.package or self.backend.name}, which is not installed here"
        if f"torch.cuda.{name}" not in self.backend.gaps and name in EXPECTED:
            return "mapped", why
        return surface.classify(self.backend, None, Emulation, name)


def _python_files(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    for file in sorted(root.rglob("*.py")):
        if not SKIPPED_FOLDERS.intersection(file.relative_to(root).parts):
            yield file


class _Visitor(ast.NodeVisitor):
    def __init__(self, file: str, judge: Judge) -> None:
        self.file, self.judge = file, judge
        self.uses: list[Use] = []
        self.names: dict[str, str] = {}

    def _add(self, node: ast.AST, name: str, verdict: tuple[str, str] | None = None) -> None:
        status, note = verdict or self.judge(name)
        self.uses.append(Use(self.file, getattr(node, "lineno", 1), name, status, note))

    # imports ---------------------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.partition(".")[0]
            self._check_package(node, top)
            if top == "torch":
                self.names[alias.asname or top] = alias.name if alias.asname else top

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        top = module.partition(".")[0]
        if node.level:
            return
        self._check_package(node, top)
        if top != "torch":
            return
        for alias in node.names:
            full = f"{module}.{alias.name}"
            self.names[alias.asname or alias.name] = full
            if full.startswith("torch.cuda."):
                self._add(node, full)
            elif alias.name in ("CUDAExtension", "CUDA_HOME"):
                self._add(node, full, ("unsupported", "Instead: operators written with torch or for the vendor"))

    def _check_package(self, node: ast.AST, package: str) -> None:
        if package in CUDA_PACKAGES and not self.judge.backend.native:
            self._add(node, package, ("unsupported", f"compiled for CUDA. Instead: {CUDA_PACKAGES[package]}"))

    # names -----------------------------------------------------------------------------------------

    def _dotted(self, node: ast.AST) -> str | None:
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.names:
            return None
        return ".".join([self.names[node.id], *reversed(parts)])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        full = self._dotted(node)
        if full is None:
            if node.attr == "is_cuda":
                self._add(node, ".is_cuda")
            self.generic_visit(node)
        elif self._is_cuda_name(full):
            self._add(node, full)
        elif full.endswith(("cpp_extension.CUDAExtension", "cpp_extension.load_inline")):
            self._add(node, full, ("unsupported", "Instead: operators written with torch or for the vendor"))

    @staticmethod
    def _is_cuda_name(full: str) -> bool:
        if full.startswith("torch.cuda.") or full in surface.LIBRARY_HINTS:
            return True
        return full == "torch.version.cuda" or full.endswith("ProfilerActivity.CUDA")

    def visit_Name(self, node: ast.Name) -> None:
        full = self.names.get(node.id, "")
        if full.startswith("torch.cuda.") and isinstance(node.ctx, ast.Load):
            self._add(node, full)

    # strings ---------------------------------------------------------------------------------------

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called == "cuda" and isinstance(node.func, ast.Attribute) and self._dotted(node.func) is None:
            self._add(node, ".cuda()")
        for keyword in node.keywords:
            if keyword.arg in DEVICE_KEYWORDS:
                self._check_device(keyword.value, f"{keyword.arg}='%s'")
            elif keyword.arg == "backend":
                self._check_collective(keyword.value)
        for argument in node.args:
            if called in DEVICE_CALLS:
                self._check_device(argument, f"{called}('%s')")
            elif called in ("init_process_group", "new_group"):
                self._check_collective(argument)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for side in (node.left, *node.comparators):
            self._check_device(side, "== '%s'")
            self._check_collective(side, "== 'nccl'")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if node.value == "CUDA_VISIBLE_DEVICES":
            variable = self.judge.backend.visible_devices
            note = f"means {variable}" if variable else "the backend has no such variable"
            self._add(node, "CUDA_VISIBLE_DEVICES", ("mapped" if variable else "hint", note))

    def _check_device(self, node: ast.AST, form: str) -> None:
        for value in _strings(node):
            if DEVICE.match(value):
                self._add(node, form % value)

    def _check_collective(self, node: ast.AST, form: str = "'nccl'") -> None:
        for value in _strings(node):
            if "nccl" in value.lower().replace(",", ":").split(":"):
                collective = self.judge.backend.collective
                self._add(
                    node,
                    form,
                    ("mapped", f"means {collective}")
                    if collective
                    else ("unsupported", "Instead: gloo; the backend has no collectives"),
                )


def _strings(node: ast.AST) -> Iterable[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from _strings(node.body)
        yield from _strings(node.orelse)
    elif isinstance(node, ast.JoinedStr) and ast.unparse(node).startswith(("f'cuda:{", 'f"cuda:{')):
        yield "cuda:0"
