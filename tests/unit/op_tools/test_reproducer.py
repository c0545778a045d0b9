"""What `reproduce.py` says by the recorded bound alone, for results that differ in other ways than by their values."""

from __future__ import annotations

import math
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from op_tools.call.traits import traits_of
from op_tools.copies.invocation import Invocation, Region, Site
from op_tools.files import reproducer
from op_tools.files.saved import save_comparison
from op_tools.view.rows import WRONG, Row

X = torch.tensor([1.0, 0.0, 2.0])
Y = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


def two_or_three(x: torch.Tensor) -> list[torch.Tensor]:
    return [x, x + 1]


def saved(function: Callable[..., Any], name: str, args: tuple[Any, ...], want: Any, bound: Any) -> str:
    """The folder of a call that is said to be wrong by its shape, kind or count; `want` is its reference."""
    call = Invocation(1, name, function, traits_of(function, name), Site('a\\path.py:1 """ x'), Region("cpu"))
    row = Row(name, "output", None, False, 1.0, 1.0, 0.0, 0.0, "", verdict=WRONG, reason="off", bound=bound)
    sides = {"input": (args, {}), "output": None}, {"input": (args, {}), "output": want}
    save_comparison(Path("call"), call, *sides, [row])
    return "call"


def code(folder: str, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[Any, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["reproduce.py", *options])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(f"{folder}/reproduce.py", run_name="__main__")
    return ended.value.code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("function", "args", "want", "bound", "expected"),
    [
        (torch.nonzero, (X,), torch.tensor([[0], [2]]), math.inf, 0),
        (torch.nonzero, (X,), torch.tensor([[0], [1], [2]]), math.inf, 1),
        (torch.nonzero, (X,), torch.tensor([[0.0], [2.0]]), math.inf, 1),
        (torch.split, (X, 2), (X[:2].double(), X[2:].double()), math.inf, 0),
        (torch.split, (X, 2), (X[:2].double(),), math.inf, 1),
        (torch.exp, (X,), X.double().exp(), torch.full((3,), 1e-6).double(), 0),
        (torch.exp, (X,), X.double().exp() + 1, torch.tensor([math.inf, 1e-6, 1e-6]), 1),
        (torch.exp, (X,), X.double().exp() + 1, torch.tensor([math.inf, math.inf, 1.1]), 0),
        (torch.log, (X - 1,), (X - 1).double().log(), torch.full((3,), 1e-6), 0),
        (torch.argmax, (X,), torch.tensor(2), None, 2),
        (torch.is_nonzero, (X[0],), True, math.inf, 0),
        (torch.is_nonzero, (X[0],), False, math.inf, 1),
        (torch.Tensor.item, (X[0],), 1.0, 1e-7, 0),
        (torch.Tensor.item, (X[0],), 1.1, 1e-7, 1),
    ],
)
def test_kinds_of_results(
    function: Any, args: Any, want: Any, bound: Any, expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = "torch.Tensor." if function is torch.Tensor.item else "torch."
    found, text = code(saved(function, owner + function.__name__, args, want, bound), capsys, "--plain")
    assert found == expected, text


def test_functions_of_other_modules(capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{__name__}.two_or_three"
    folder = saved(two_or_three, name, (X,), [X.double(), X.double() + 1], math.inf)
    assert code(folder, capsys, "--plain")[0] == 0
    local = lambda x: x  # noqa: E731
    found, text = code(saved(local, "somewhere.local", (X,), X.double(), math.inf), capsys, "--plain")
    assert found == 2
    assert text.startswith("could not be tried: somewhere.local, which ")
    assert text.count("\n") == 1


def test_flags_that_change_results_come_back(capsys: pytest.CaptureFixture[str]) -> None:
    def set_both(tf32: bool, dtype: torch.dtype) -> None:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.set_default_dtype(dtype)

    before = reproducer._flags()
    try:
        set_both(True, torch.float64)
        folder = saved(torch.full, "torch.full", ((2,), 1.0), torch.ones(2), math.inf)
        set_both(False, torch.float32)
        code(folder, capsys, "--plain")
        assert (torch.backends.cuda.matmul.allow_tf32, torch.get_default_dtype()) == (True, torch.float64)
    finally:
        set_both(False, torch.float32)
    assert reproducer._flags() == before == {}
