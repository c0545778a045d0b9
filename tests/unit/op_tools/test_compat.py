"""The private names of PyTorch: they are all in one room, and they are there in this PyTorch."""

from __future__ import annotations

import ast
import gc
import inspect
import re
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import op_tools
from op_tools import compat
from op_tools.judge.golden import neutral

ROOT = Path(op_tools.__file__).parent
# Attributes of PyTorch's objects that every room may read; the docstring of `compat` lists them.
ATTRIBUTES = {
    *("_version", "_base", "_is_view", "_is_zerotensor", "_cdata", "_schema", "_overloadname"),
    *("_sequence_nr", "_execution_engine", "_maybe_set_eval_frame"),
}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def dotted(node: ast.AST) -> list[str]:
    """`torch._C._x` as its parts; empty for what is no chain of names."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return [*before, node.attr]
    return []


def attributes_of_torch() -> set[str]:
    leaf = torch.ones(2, requires_grad=True)
    things = (leaf, leaf.untyped_storage(), torch.ops.aten.add.Tensor, torch.ops.aten.add, leaf.exp().grad_fn)
    return {name for thing in things for name in dir(thing) if private(name)}


def private_uses(source: str) -> Iterator[str]:
    """The private names of PyTorch that a file uses, apart from the attributes that it may read."""
    of_torch = attributes_of_torch()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            parts = [a.name.split(".") for a in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            parts = [f"{node.module}.{a.name}".split(".") for a in node.names]
        elif isinstance(node, ast.Attribute):
            chain = dotted(node)
            if chain[:2] == ["torch", "ops"]:  # operators, not Python names
                continue
            parts = [chain if chain[:1] == ["torch"] else []]
            if node.attr in of_torch - ATTRIBUTES and chain[:1] not in (["torch"], ["self"], ["cls"]):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            called = dotted(node.func)
            if called in (["getattr"], ["hasattr"], ["setattr"]) and dotted(node.args[0])[:1] == ["torch"]:
                parts = [dotted(node.args[0]) + texts]
            elif called in (["sys", "modules", "get"], ["importlib", "import_module"], ["import_module"]):
                parts = [t.split(".") for t in texts]
            else:
                continue
        else:
            continue
        for part in parts:
            if part[:1] == ["torch"] and any(private(n) and n not in ATTRIBUTES for n in part):
                yield ".".join(part)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_other_room_uses_a_private_name_of_pytorch(path: Path) -> None:
    used = sorted(set(private_uses(path.read_text())))
    if path.parent.name == "compat":
        assert used
    else:
        assert not used, "give it a name in op_tools/compat, and import that"


@pytest.mark.parametrize(
    "line",
    [
        "torch._conj(x)",
        "torch._C.DisableTorchFunction()",
        "from torch._ops import OpOverload",
        "from torch.overrides import _get_overloaded_args",
        "import torch._dynamo",
        "getattr(torch.autograd, '_get_sequence_nr', None)",
        "sys.modules.get('torch._dynamo')",
        "x._is_conj_bit(t.y._make_subclass)",
    ],
)
def test_the_scan_finds(line: str) -> None:
    assert list(private_uses(line))


@pytest.mark.parametrize(
    "line", ["torch.ops.aten._to_copy", "tensor._version", "self._conj", "torch.conj(x)", "a.__len__"]
)
def test_the_scan_lets_pass(line: str) -> None:
    assert not list(private_uses(line))


def test_every_name_is_there() -> None:
    names = {name: value for name, value in vars(compat).items() if not name.startswith("_")}
    assert {"conj_view", "DispatchMode", "engine", "no_torch_function"} <= names.keys()
    assert [name for name, value in names.items() if value is None] == []
    assert compat.top_saved_tensor_hooks is not compat._unknown_hooks or torch.__version__ < (2, 8)
    import torch._dynamo.eval_frame as eval_frame

    assert compat.dynamo_eval_frame() is eval_frame
    wrappers = re.findall(r"def (\w+)\(", inspect.getsource(eval_frame))
    assert (compat.DYNAMO_WRAPPERS if torch.__version__ >= (2, 10) else {"_fn"}).issubset(wrappers)


def test_the_attributes_are_there_and_listed() -> None:
    things = [torch.autograd.Variable, compat.dynamo_eval_frame()]
    known = attributes_of_torch() | {name for thing in things for name in dir(thing)}
    assert known >= ATTRIBUTES
    assert all(f"  {name}" in str(compat.__doc__) for name in ATTRIBUTES)


def test_views_share_memory() -> None:
    x = torch.tensor([1 + 2j])
    assert compat.conj_view(x).is_conj()
    assert compat.neg_view(x).is_neg()
    assert compat.conj_view(x).data_ptr() == compat.neg_view(x).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("old", [False, True], ids=["this PyTorch", "before 2.8"])
def test_a_golden_run_is_hidden_from_hooks_for_saved_tensors(monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    if old:  # where PyTorch does not tell which hooks there are
        monkeypatch.setattr(compat, "top_saved_tensor_hooks", compat._unknown_hooks)
        monkeypatch.setattr("op_tools.judge.golden.top_saved_tensor_hooks", compat._unknown_hooks)
    inner = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        with neutral(grad=True):
            leaf = torch.tensor([0.5], requires_grad=True)
            middle = leaf.exp()  # whose node saves it
            inner.append(weakref.ref(middle))
            (gradient,) = torch.autograd.grad(middle.sin().sum(), leaf, retain_graph=True)
            assert torch.allclose(gradient, middle * middle.cos())
        return x.exp().sin()

    gc.disable()  # what is only collected as a cycle would pile up
    try:
        x = torch.ones(3, requires_grad=True)
        # which counts what is saved under its hooks, in the forward pass and again in the backward pass
        checkpoint(layer, x, use_reentrant=False).sum().backward()
        assert [tensor() for tensor in inner] == [None, None]
    finally:
        gc.enable()
    assert x.grad is not None
