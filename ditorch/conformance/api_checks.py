"""The CUDA surface of the device layer: every public name of torch.cuda, and what it must do.

Runs in workers with ditorch active, so "cuda" is the device. A name that works as CUDA code expects passes; one that
ditorch declares unsupported is an error with its advice; one that exists and that no check calls is not comparable.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ditorch
from ditorch import surface
from ditorch.conformance.cases import ERROR, NO_DTYPE, NOT_COMPARABLE, PASS, WRONG, Case, Limits, Result, Unit
from ditorch.conformance.trial import failed
from ditorch.redirect.cuda_module import CLASSES, functions
from ditorch.redirect.emulation import Emulation

CHECK = "call"


def _user_code() -> dict[str, Callable[[], Any]]:
    """The checks, loaded under a name outside of ditorch: inside, tensors tell their real device."""
    file = Path(__file__).with_name("cuda_calls.py")
    spec = importlib.util.spec_from_file_location("cuda_calls", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module.TABLE)


TABLE = _user_code()


def units() -> list[Unit]:
    """One unit for each name, those with a check and all other public ones of ``torch.cuda``.

    Example: ``units()[0].name``
    """
    names = {
        f"torch.cuda.{name}"
        for name, function in functions()
        if not name.rpartition(".")[2].startswith("_") and function.__module__.startswith("torch.cuda")
    }
    names |= {f"torch.cuda.{name}" for name in CLASSES}
    return [Unit("api", name, NO_DTYPE, (CHECK,)) for name in sorted({*names, *TABLE})]


class ApiChecks:
    """Calls one name as training code does.

    Example: ``ApiChecks(unit, "cuda:0", Limits()).run("call")``
    """

    def __init__(self, unit: Unit, device: str, limits: Limits) -> None:
        self.unit = unit

    def run(self, check: str) -> Result:
        """Do it."""
        if check != CHECK:
            raise ValueError(f"names of torch.cuda have no check {check!r}: {CHECK}")
        case, started = Case("api", self.unit.name, NO_DTYPE, check), time.monotonic()
        function = TABLE.get(self.unit.name)
        if function is None:
            return self._classified(case)
        try:
            answer = function()
        except ditorch.UnsupportedError as error:
            return Result(case, ERROR, str(error), 1)
        except Exception as error:
            outcome = failed(error)
            return Result(case, ERROR, outcome.message, 1, details=(outcome.details,))
        seconds = round(time.monotonic() - started, 4)
        if answer is True:
            return Result(case, PASS, samples=1, seconds=seconds)
        return Result(case, WRONG, f"the check answers {answer!r}", 1, seconds=seconds)

    def _classified(self, case: Case) -> Result:
        backend, name = ditorch.backend, self.unit.name.removeprefix("torch.cuda.")
        kind, why = surface.classify(backend, backend.module, Emulation, name)
        if kind == "unsupported":
            return Result(case, ERROR, f"not on this device; instead: {why}")
        if kind == "hint":
            return Result(case, NOT_COMPARABLE, f"accepted, without effect: {why}")
        return Result(case, NOT_COMPARABLE, f"there ({why}), but no check calls it")
