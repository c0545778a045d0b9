"""The registry of operator facts: one entry for each name, and no name that PyTorch does not have."""

from __future__ import annotations

import pytest
import torch

from op_tools.call.facts import kernel_facts
from op_tools.call.operators.registry import (
    FUNCTIONS,
    FunctionFacts,
    KernelFacts,
    Kind,
    Registry,
    base_name_of,
    function_facts,
    function_names,
    last_name,
    unknown_names,
)
from op_tools.judge import formulas, golden


@pytest.fixture
def registry() -> Registry[KernelFacts]:
    from op_tools.call.operators import registry as module

    made = Registry[KernelFacts]("kernel", lambda: {"mm", "bmm", "linalg_qr", "round.decimals"})
    module._REGISTRIES.remove(made)  # its names are made up
    return made


def test_every_registered_name_is_one_of_pytorch() -> None:
    assert unknown_names() == []


def test_formulas_name_functions_of_pytorch() -> None:
    named = {function for formula in formulas.FORMULAS.by_name.values() for function in formula.functions}
    assert named
    assert named <= function_names()


def test_a_name_is_registered_once(registry: Registry[KernelFacts]) -> None:
    registry.register("mm bmm", KernelFacts(Kind.CONTRACT))
    with pytest.raises(ValueError, match=r"kernel 'bmm' is registered twice: at .*test_registry.py:\d+ and .*:\d+"):
        registry.register("bmm", KernelFacts(Kind.CONTRACT))
    with pytest.raises(ValueError, match="'linalg_qr' is registered twice"):
        registry.register("linalg_qr linalg_qr", KernelFacts(Kind.MATRIX))


def test_a_registered_name_cannot_get_a_second_entry_elsewhere() -> None:
    with pytest.raises(ValueError, match=r"function 'dropout' is registered twice: at .*draws.py:\d+ and"):
        FUNCTIONS.register("dropout", FunctionFacts(draws=True))


def test_unknown_names_are_reported_with_their_place(registry: Registry[KernelFacts]) -> None:
    registry.register("mm mn linalg_* linalgebra_* round.decimals round.digits mm+bmm mm+bnm", KernelFacts())
    found = [line.split("'")[1] for line in registry.unknown()]
    assert found == ["mn", "linalgebra_*", "round.digits", "mm+bnm"]
    assert "test_registry.py:" in registry.unknown()[0]


def test_names_of_other_versions_are_not_reported(registry: Registry[KernelFacts]) -> None:
    registry.register("of_the_future", KernelFacts(), since="99.0")
    registry.register("of_a_plugin", KernelFacts(), maybe="defined by a plugin")
    registry.register("of_the_past", KernelFacts(), since="2.0")
    assert [line.split("'")[1] for line in registry.unknown()] == ["of_the_past"]


def test_an_overload_a_name_and_a_family_in_this_order() -> None:
    aten = torch.ops.aten
    assert kernel_facts(aten.round.decimals).kind == ""
    assert kernel_facts(aten.round.default).kind == Kind.EXACT
    assert kernel_facts(aten.linalg_cross.default).kind == Kind.REDUCE
    assert kernel_facts(aten.linalg_eigh.default) == KernelFacts(Kind.MATRIX, accuracy=2)
    assert kernel_facts(aten.sin.default) == KernelFacts()


# --- operators of other libraries


@torch.library.custom_op("other_library::rms_norm", mutates_args=())
def other_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Named as a function of PyTorch, with other arguments."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def test_an_operator_of_another_library_is_not_the_function_of_that_name() -> None:
    operator = torch.ops.other_library.rms_norm
    assert last_name(str(operator)) == last_name(str(operator.default)) == "other_library.rms_norm"
    assert last_name("aten.add_.Tensor") == "add_"
    assert last_name("distributed.all_reduce") == "all_reduce"
    assert last_name("autograd.sum_of_gradients.add") == "add"
    assert function_facts(str(operator)).defaults is None
    assert base_name_of("other_library::mm") == "other_library::mm"
    x, weight = torch.randn(3, 4), torch.randn(4)
    found = golden.run(operator, (x, weight), {}, name=str(operator))
    assert found.comparable, found.reason
