"""Reads a code base and says which CUDA calls it makes and what each becomes on a backend."""

from __future__ import annotations

import ast
import re
import warnings
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
    "mamba_ssm": "the selective scan written with torch",
    "causal_conv1d": "torch.nn.functional.conv1d",
    "fla": "the operator written with torch: its kernels are Triton's",
    "liger_kernel": "the modules of transformers: its kernels are Triton's",
    "tensorrt": "torch.compile",
}
NO_CUDA_SOURCE = "Instead: operators of torch, a C++ extension, or a kernel in the vendor's own language"
CUDA_SOURCE = {".cu", ".cuh"}
MAX_FILES = 500
"""Files that a look at one script follows."""
# Parts of PyTorch that ask more of a device than operators: what a vendor's package must have for them.
FEATURES = {
    "torch.nn.SyncBatchNorm": "batch_norm_stats and its kin, which PyTorch has for CUDA alone",
    "torch.distributed.rpc": "CPU tensors work anywhere; device tensors need the vendor's transport",
    "torch.distributed.tensor": "random operators need a generator with seed and offset",
    "torch.multiprocessing": "device tensors in queues need the vendor's handles; else send tensor.cpu()",
    "torch.nn.attention.flex_attention": "the compiled kernel is Triton's; eager and aot_eager run anywhere",
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


OUTSIDE = (
    "code of installed packages and of compiled extensions, device names that are put together at run time, "
    "and what a script downloads"
)
"""What a look at the source cannot know."""


@dataclass(frozen=True)
class Use:
    """One CUDA call or name in a file.

    Example: ``Use("train.py", 12, "torch.cuda.synchronize", "mapped", "torch.npu.synchronize")``
    """

    file: str
    line: int
    name: str
    status: str
    """``mapped``, ``emulated``, ``hint``, ``unsupported`` (fails), ``optional`` (would fail, but the code provides for
    it), ``depends`` (on the vendor's package, or on whether it runs at all), ``unreadable`` (no Python)."""
    note: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.name}: {self.status}" + (f" ({self.note})" if self.note else "")


@dataclass(frozen=True)
class Scan:
    """All uses in a code base, with the backend they were judged for.

    Example: ``Scan("ascend", uses).counts()["unsupported"]``
    """

    backend: str
    uses: tuple[Use, ...]
    files: int = 0

    def counts(self) -> dict[str, int]:
        """Number of uses per status.

        Example: ``{"mapped": 10, "unsupported": 1}``
        """
        return dict(Counter(use.status for use in self.uses))

    def failing(self) -> list[Use]:
        """The uses at which a run will fail.

        Example: ``scan("train.py", backend).failing()``
        """
        return [use for use in self.uses if use.status == "unsupported"]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON.

        Example: ``json.dumps(scan.as_dict())``
        """
        return {
            "backend": self.backend,
            "files": self.files,
            "counts": self.counts(),
            "fails": bool(self.failing()),
            "outside": OUTSIDE,
            "uses": [asdict(use) for use in self.uses],
        }


def scan(path: str | Path, backend: Backend) -> Scan:
    """Look at a script with the modules of its own that it imports, or at everything below a folder.

    Example: ``scan("examples", ditorch.backend).counts()``
    """
    root = Path(path)
    if not root.exists():
        raise FileNotFoundError(f"ditorch scan: {root} does not exist")
    judge = Judge(backend)
    uses: list[Use] = []
    files = _below(root) if root.is_dir() else _imported(root)
    for file in files:
        if file.suffix in CUDA_SOURCE:
            if not backend.native:
                uses.append(Use(str(file), 1, "CUDA source", "unsupported", NO_CUDA_SOURCE))
        else:
            uses.extend(scan_source(file.read_bytes(), str(file), judge, script=file == root))
    return Scan(backend.name, tuple(uses), len(files))


def scan_source(source: str | bytes, file: str, judge: Judge, *, script: bool = False) -> list[Use]:
    """The uses in one file's text; text that is not Python gives one ``unreadable`` use. A script is run as main.

    Example: ``scan_source("import torch; torch.cuda.synchronize()", "a.py", Judge(backend))``
    """
    try:
        tree = _parsed(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [Use(file, getattr(error, "lineno", None) or 1, "", "unreadable", str(error))]
    visitor = _Visitor(file, judge, {id(statement) for statement in _certain(tree, script)})
    visitor.visit(tree)
    return sorted(visitor.uses, key=lambda use: use.line)


def _parsed(source: str | bytes) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the scanned code: escapes and the like
        return ast.parse(source)


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
            return self._judge_graph(name)
        if name in ("memory", "random", "amp", "nvtx", "nccl", "comm", "profiler", "streams", "graphs"):
            return "mapped", "module"
        inner, _, last = name.rpartition(".")
        if inner in ("graphs", "random", "streams", "memory") and not last.startswith("_"):
            name = last  # the same function under the name of its file
        if not self._here:
            return self._guess(name)
        status, note = surface.classify(self.backend, self.backend.find_module(), Emulation, name)
        if status == "unsupported" and name in STATS:
            return "emulated", "from memory_stats"
        return status, note

    def _judge_graph(self, name: str) -> tuple[str, str]:
        from ditorch.redirect.graphs import native_graph

        known = recorded(self.backend.name)
        module = self.backend.find_module() if self._here else known.as_module() if known is not None else None
        vendor = name if hasattr(module, name) else native_graph(self.backend.device_type, module)
        if vendor is None or (name == "make_graphed_callables" and vendor != name):
            return "emulated", "recorded operators are run again where the vendor has no graphs"
        return "mapped", f"{self.backend.where_module()}.{vendor}"

    def _guess(self, name: str) -> tuple[str, str]:
        from ditorch.redirect.emulation import Emulation

        known = recorded(self.backend.name)
        if known is not None:
            return surface.classify(self.backend, known.as_module(), Emulation, name)
        why = f"expected of {self.backend.package or self.backend.name}, which is not installed here"
        if f"torch.cuda.{name}" not in self.backend.gaps and name in EXPECTED:
            return "mapped", why
        return surface.classify(self.backend, None, Emulation, name)


def _below(root: Path) -> list[Path]:
    found = (file for file in root.rglob("*") if file.suffix == ".py" or file.suffix in CUDA_SOURCE)
    return [f for f in sorted(found) if f.is_file() and not SKIPPED_FOLDERS.intersection(f.relative_to(root).parts)]


def _imported(script: Path) -> list[Path]:
    """The script and the modules beside it that it imports for certain, and what those import."""
    roots = [script.parent, *script.resolve().parents[1:3]]
    found, waiting = [script], [script]
    while waiting and len(found) < MAX_FILES:
        file = waiting.pop()
        try:
            tree = _parsed(file.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for name in _certain_imports(tree, file, roots, script=file == script):
            if name not in found:
                found.append(name)
                waiting.append(name)
    return found


def _certain_imports(tree: ast.Module, file: Path, roots: list[Path], *, script: bool) -> Iterator[Path]:
    for node in _certain(tree, script):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _modules(roots, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = roots if not node.level else [file.parents[node.level - 1]]
            parts = node.module.split(".") if node.module else []
            yield from _modules(base, parts)
            for alias in node.names:
                yield from _modules(base, [*parts, alias.name])


def _certain(tree: ast.Module, script: bool) -> Iterator[ast.stmt]:
    """The statements that run for certain: not those in try and if, but those of functions that such ones call."""
    functions = {node.name: node.body for node in tree.body if isinstance(node, ast.FunctionDef)}
    waiting = list(tree.body)
    while waiting:
        statement = waiting.pop(0)
        yield statement
        if isinstance(statement, ast.If):
            if script and "__name__" in ast.unparse(statement.test):
                waiting.extend(statement.body)
        elif isinstance(statement, (ast.With, ast.ClassDef)):
            waiting.extend(statement.body)
        elif not isinstance(statement, (ast.Try, ast.FunctionDef, ast.AsyncFunctionDef, ast.For, ast.While)):
            for call in (node for node in ast.walk(statement) if isinstance(node, ast.Call)):
                # Called by its name, or handed to what calls it: spawn(train, ...).
                named = (getattr(part, "id", "") for part in (call.func, *call.args, *(k.value for k in call.keywords)))
                for name in named:
                    waiting.extend(functions.pop(name, ()))


def _modules(roots: list[Path], parts: list[str]) -> Iterator[Path]:
    """The file of a module, and those of the packages around it, below the first root that has it."""
    for root in roots:
        if not parts or not ((root / parts[0]).is_dir() or (root / f"{parts[0]}.py").is_file()):
            continue
        for count in range(1, len(parts) + 1):
            where = root.joinpath(*parts[:count])
            for file in (where.with_name(f"{where.name}.py"), where / "__init__.py"):
                if file.is_file():
                    yield file
        return


class _Visitor(ast.NodeVisitor):
    def __init__(self, file: str, judge: Judge, certain: set[int]) -> None:
        self.file, self.judge, self.certain = file, judge, certain
        self.uses: list[Use] = []
        self.names: dict[str, str] = {}
        self.tries, self.sources = 0, False

    def _add(self, node: ast.AST, name: str, verdict: tuple[str, str] | None = None) -> None:
        status, note = verdict or self.judge(name)
        if status == "unsupported" and self.tries:
            status = "optional"  # the code provides for its failure
        self.uses.append(Use(self.file, getattr(node, "lineno", 1), name, status, note))

    # what may not run ------------------------------------------------------------------------------

    def visit_Try(self, node: ast.Try) -> None:
        self.tries += 1
        for statement in node.body:
            self.visit(statement)
        self.tries -= 1
        for part in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(part)

    visit_TryStar = visit_Try

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            return
        self.generic_visit(node)

    # imports ---------------------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.partition(".")[0]
            self._check_package(node, top)
            self._check_feature(node, alias.name)
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
            self._check_feature(node, full)
            if full.startswith("torch.cuda."):
                self._add(node, full)
            elif alias.name == "CUDAExtension" and not self.judge.backend.native:
                self._add(node, full, ("unsupported", NO_CUDA_SOURCE))

    def _check_package(self, node: ast.AST, package: str) -> None:
        if package in CUDA_PACKAGES and not self.judge.backend.native:
            note = f"compiled for CUDA. Instead: {CUDA_PACKAGES[package]}"
            runs = self.tries or id(node) in self.certain
            self._add(node, package, ("unsupported", note) if runs else ("depends", f"fails when this runs: {note}"))

    def _check_feature(self, node: ast.AST, full: str) -> None:
        for feature, note in FEATURES.items():
            if full == feature or full.startswith(feature + "."):
                self._add(node, feature, self._feature(note))

    def _feature(self, note: str) -> tuple[str, str]:
        if self.judge.backend.name in ("soft", "cuda", "cpu"):
            return "mapped", f"means {self.judge.backend.device_type}"
        return "depends", note

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
        elif full.endswith("cpp_extension.CUDAExtension") and not self.judge.backend.native:
            self._add(node, full, ("unsupported", NO_CUDA_SOURCE))
        else:
            self._check_feature(node, full)

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
        if called in ("load", "load_inline"):
            self._check_extension(node)
        for keyword in node.keywords:
            if keyword.arg == "out_dtype" and called in ("mm", "bmm", "addmm", "baddbmm", "matmul"):
                self._add(node, f"{called}(out_dtype=)", self._feature("an operator that PyTorch has for CUDA and XPU"))
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

    def _check_extension(self, node: ast.Call) -> None:
        full = self._dotted(node.func) or ""
        if "cpp_extension" not in full or self.judge.backend.native:
            return
        written = ast.unparse(node)
        listed = re.search(r"sources=\w+[,)]|\*\w+", written)  # in a variable
        has_source = any(f"{suffix}'" in written for suffix in CUDA_SOURCE) or (self.sources and listed)
        if has_source or any(keyword.arg == "cuda_sources" for keyword in node.keywords):
            self._add(node, f"{full} of CUDA source", ("unsupported", NO_CUDA_SOURCE))
        elif "sources" in written and not any(f"{suffix}'" in written for suffix in (".cpp", ".cc")):
            self._add(node, full, ("depends", "on whether there is CUDA source among its files"))

    def visit_Compare(self, node: ast.Compare) -> None:
        for side in (node.left, *node.comparators):
            self._check_device(side, "== '%s'")
            self._check_collective(side, "== 'nccl'")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        self.sources |= isinstance(node.value, str) and node.value.endswith(tuple(CUDA_SOURCE))
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
                none = ("unsupported", "Instead: gloo; the backend has no collectives")
                self._add(node, form, ("mapped", f"means {collective}") if collective else none)


def _strings(node: ast.AST) -> Iterable[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from _strings(node.body)
        yield from _strings(node.orelse)
    elif isinstance(node, ast.JoinedStr) and ast.unparse(node).startswith(("f'cuda:{", 'f"cuda:{')):
        yield "cuda:0"
