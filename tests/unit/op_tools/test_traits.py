"""What is known of a function before it is called."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from op_tools.call.traits import name_of, traits_of
from op_tools.files.archive import ArchiveError
from op_tools.replay.captured import function_of


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.add, "torch.add"),
        (torch.Tensor.add_, "torch.Tensor.add_"),
        (F.linear, "torch.nn.functional.linear"),
        (F.cross_entropy, "torch.nn.functional.cross_entropy"),
        (torch.split, "torch.split"),
        (torch.mm, "torch.mm"),
        (torch.linalg.norm, "torch.linalg.norm"),
        (torch._foreach_add, "torch._foreach_add"),
        (torch.Tensor.shape.__get__, "torch.Tensor.shape.__get__"),
        (torch.randn, "torch.randn"),
        (torch.autograd.grad, "torch.autograd.grad"),
        (subprocess.run, "subprocess.run"),
    ],
)
def test_names(function: object, name: str) -> None:
    assert name_of(function) == name


def test_nature() -> None:
    assert traits_of(torch.Tensor.view).view
    assert traits_of(torch.Tensor.t).view
    assert not traits_of(torch.add).view
    assert not traits_of(torch.Tensor.reshape).mutates
    assert traits_of(torch.Tensor.mul_).mutates
    assert not traits_of(torch.Tensor.__add__).mutates
    assert traits_of(torch.rand).random
    assert traits_of(F.dropout).random
    assert traits_of(torch.exp).random is False
    assert traits_of(subprocess.run).random is None
    assert traits_of(torch.Tensor.shape.__get__).bookkeeping
    assert traits_of(torch.Tensor.numel).bookkeeping
    assert traits_of(torch.Tensor.backward).transparent
    assert traits_of(torch.zeros).factory
    assert traits_of(torch.Tensor.half).conversion
    assert traits_of(torch.Tensor.cuda).transfer


@pytest.mark.parametrize(
    "name", ["torch.hub.load", "torch.save", "os.system", "torch.load", "torch.from_file", "torch.compile"]
)
def test_only_operators_are_looked_up_for_replay(name: str) -> None:
    with pytest.raises(ArchiveError, match="not an operator"):
        function_of(name)


def test_operators_are_looked_up_for_replay() -> None:
    assert function_of("torch.nn.functional.linear") is F.linear
    assert function_of("torch.Tensor.add") is torch.Tensor.add
    assert function_of("torch._foreach_add") is torch._foreach_add


def test_importing_op_tools_activates_and_imports_nothing_else() -> None:
    code = (
        "import sys, op_tools, torch; "
        "assert 'ditorch' not in sys.modules and 'rich' not in sys.modules and 'pandas' not in sys.modules; "
        "assert torch._C._len_torch_function_stack() == 0"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=_root())
    assert done.returncode == 0, done.stderr


def _root() -> str:
    from pathlib import Path

    return str(Path(__file__).resolve().parents[3])


@pytest.mark.parametrize("name", ["__rand__", "__ror__", "__rxor__", "__radd__", "__rsub__", "__rmul__", "__rpow__"])
def test_reflected_operators_are_not_random(name: str) -> None:
    assert not traits_of(getattr(torch.Tensor, name)).random


def test_facts_of_the_name_are_kept_on_the_traits() -> None:
    assert traits_of(torch.Tensor.add_).may_write
    assert not traits_of(torch.add).may_write
    assert traits_of(torch._fused_adam_).is_optimizer
    assert not traits_of(torch.add).is_optimizer
    assert traits_of(torch.Tensor.cuda).differs_on_cpu
    assert not traits_of(torch.add).differs_on_cpu
    assert traits_of(torch.linalg.svd).facts.free_vectors
    assert traits_of(torch.nn.functional.linear).facts.autocast_low


def test_names_are_those_of_pytorch() -> None:
    """In a process of its own: where ditorch is active, PyTorch's table may be older than its patches."""
    program = """if True:
        import torch.overrides
        from op_tools.call import functions
        assert functions._names() == torch.overrides._get_overridable_functions()[1]
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


def test_an_overload_has_the_traits_of_its_schema() -> None:
    aten = torch.ops.aten
    assert traits_of(aten.add_.Tensor).mutates
    assert traits_of(aten.mm.out).mutates
    assert traits_of(aten.t.default).view
    assert traits_of(aten.bernoulli.default).random
    assert traits_of(aten.mm.default).random is False
    assert traits_of(aten._fused_adamw_.default).is_optimizer
    assert traits_of(aten.empty_like.default).facts.uninitialised
