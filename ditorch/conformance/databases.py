"""PyTorch's own databases of operators, modules and optimizers, and which cases they make for a device.

For worker processes alone: importing them freezes global flags of PyTorch.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
import unittest
from collections.abc import Iterator
from typing import Any

import torch

from ditorch.conformance.cases import NO_DTYPE, Unit

LAYOUT_DTYPES = ("float32", "int64", "complex64")
"""Non-contiguous inputs are tried in these dtypes, as in PyTorch's own tests: strides do not depend on the dtype."""
AUTOGRAD_DTYPES = ("float32", "float64", "complex64", "complex128")
"""Second derivatives and forward-mode are tried in the first of these that the operator has."""


def import_test_helpers() -> None:
    """Let ``torch.testing._internal`` be imported where ``expecttest`` is not installed.

    Its common_utils derives its TestCase from expecttest.TestCase and reads expecttest.ACCEPT; the databases use
    neither. So a module with just these two stands in, in this process only. Native test files, which may compare
    expected texts, are run with the real one.

    Example: ``import_test_helpers(); from torch.testing._internal.common_modules import module_db``
    """
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        stand_in.ACCEPT = False  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in


@functools.cache
def operators() -> dict[str, Any]:
    """Every OpInfo by its full name (`operators()["norm.fro"]`)."""
    import_test_helpers()
    from torch.testing._internal.common_methods_invocations import op_db

    return _by_name(op_db, full_name)


def called(info: Any) -> str:
    """The name of the function that an OpInfo calls: `rand_like` of some versions draws by `torch.randn_like`."""
    code = getattr(info.op, "__code__", None)
    return "randn_like" if info.name == "rand_like" and code and "randn_like" in code.co_names else str(info.name)


@functools.cache
def modules() -> dict[str, Any]:
    """Every ModuleInfo by name (`modules()["nn.Linear"]`)."""
    import_test_helpers()
    from torch.testing._internal.common_modules import module_db

    return _by_name(module_db, lambda info: info.name)


@functools.cache
def optimizers() -> dict[str, Any]:
    """Every OptimizerInfo by name (`optimizers()["Adam"]`)."""
    import_test_helpers()
    from torch.testing._internal.common_optimizers import optim_db

    return _by_name(optim_db, lambda info: info.optim_cls.__name__)


def _by_name(infos: Any, name: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for info in infos:
        key = name(info)
        number = 2
        while key in found:  # two entries under one name: the second is told apart by a number
            key, number = f"{name(info)}#{number}", number + 1
        found[key] = info
    return found


def full_name(info: Any) -> str:
    """Name and variant of an OpInfo (`"norm.fro"`)."""
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def claimed(info: Any, device_type: str) -> list[str]:
    """Dtypes that the database says an operator has on a device; for devices it does not know, those of the CPU.

    Example: ``claimed(operators()["add"], "cuda")``
    """
    return sorted(dtype_name(dtype) for dtype in info.supported_dtypes(device_type))


def claimed_backward(info: Any, device_type: str) -> list[str]:
    """Dtypes with a gradient, likewise.

    Example: ``claimed_backward(operators()["add"], "cuda")``
    """
    return sorted(dtype_name(dtype) for dtype in info.supported_backward_dtypes(device_type))


def borrows_claims(info: Any, device_type: str) -> bool:
    """Whether the claims for a device are the CPU's, for want of its own (`borrows_claims(info, "soft")`)."""
    own = getattr(info, "dtypesIf", None)  # before torch 2.12 there were single fields
    return device_type not in own if own is not None else device_type != "cuda"


def units(what: list[str], device_type: str) -> list[Unit]:
    """Everything there is to ask, in the order of the databases.

    Example: ``units(["modules"], "cuda")[0]``
    """
    found: list[Unit] = []
    if "ops" in what:
        for name, info in operators().items():
            found += _operator_units(name, info, device_type)
    if "autograd" in what:
        for name, info in operators().items():
            found += _autograd_units(name, info, device_type)
    if "modules" in what:
        for name, info in modules().items():
            dtypes = sorted({dtype_name(dtype) for dtype in info.supported_dtypes(device_type)})
            checks = ("forward", "backward", "forward-eval") if info.train_and_eval_differ else ("forward", "backward")
            found += [Unit("modules", name, dtype, checks) for dtype in dtypes]
    if "hunt" in what:
        from ditorch.conformance import hunt_checks

        found += hunt_checks.units(device_type)
    if "optimizers" in what:
        for name, info in optimizers().items():
            found += [Unit("optimizers", name, d, _implementations(info, device_type)) for d in ("float32", "float64")]
    return found


def _operator_units(name: str, info: Any, device_type: str) -> Iterator[Unit]:
    dtypes, differentiable = claimed(info, device_type), claimed_backward(info, device_type)
    strided = [dtype for dtype in LAYOUT_DTYPES if dtype in dtypes] or dtypes[:1]
    for dtype in dtypes:
        checks = ["forward"]
        checks += ["backward"] if dtype in differentiable else []
        checks += ["noncontiguous"] if dtype in strided else []
        checks += ["out"] if info.supports_out else []
        checks += ["inplace"] if info.get_inplace() is not None else []
        yield Unit("ops", name, dtype, tuple(checks))
    whole = ["dtypes"] if dtypes else []
    whole += ["errors"] if info.error_inputs_func is not None else []
    if whole:
        yield Unit("ops", name, NO_DTYPE, tuple(whole))


def _autograd_units(name: str, info: Any, device_type: str) -> Iterator[Unit]:
    dtype = next((d for d in AUTOGRAD_DTYPES if d in claimed_backward(info, device_type)), None)
    checks = ["double-backward"] if info.supports_gradgrad else []
    checks += ["forward-mode"] if info.supports_forward_ad else []
    if dtype is not None and checks:
        yield Unit("autograd", name, dtype, tuple(checks))


def _implementations(info: Any, device_type: str) -> tuple[str, ...]:
    if info.only_supports_sparse_grads:
        return ("for-loop",)
    found = ["for-loop"]
    found += ["foreach"] if "foreach" in info.supported_impls else []
    # Devices outside of PyTorch are not in its list of fused ones: there the question is put to the CPU's.
    known = device_type if device_type in ("cuda", "mps", "xpu", "hpu") else "cpu"
    found += ["fused"] if "fused" in info.supported_impls and known in info.supports_fused_on else []
    return tuple(found)
