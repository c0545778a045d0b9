"""Operators of the user's own in another process: it gets the same ones, or says that it does not know them."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from op_tools.call.own_operators import NotKnown, Origin, origin_of, own_operator

SOURCE = """
import torch
{before}
@torch.library.custom_op("{space}::scan", mutates_args=())
def scan(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(1)
"""
LIBRARY = """
import torch
library = torch.library.Library("{space}", "DEF")
library.define("scan(Tensor x) -> Tensor")
library.impl("scan", lambda x: x.cumsum(1), "CPU")
"""
OTHER = """
import pickle, sys, torch
from op_tools.compat import forget_compilers
from op_tools.call.own_operators import NotKnown, own_operator
forget_compilers()
try:
    scan = own_operator("{space}.scan", pickle.loads({origin!r}))
    print(scan(torch.ones(1, 3)).tolist(), "torch._dynamo" in sys.modules)
except NotKnown as error:
    print("not known:", error)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    there = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - there:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def _module(folder: Path, name: str, source: str = SOURCE, before: str = "", old: bool = True) -> Any:
    file = folder / f"{name}.py"
    file.write_text(source.format(space=name, before=before))
    if old:
        os.utime(file, (1e9, 1e9))
    return importlib.import_module(name)


def _elsewhere(folder: Path, name: str, origin: Origin | None) -> str:
    code = OTHER.format(space=name, origin=pickle.dumps(origin))
    root = str(Path(__file__).resolve().parents[3])
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{folder}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("source", [SOURCE, LIBRARY], ids=["custom_op", "Library"])
def test_another_process_gets_the_operator(folder: Path, source: str) -> None:
    name = "own_a" if source is SOURCE else "own_b"
    module = _module(folder, name, source)
    function = getattr(torch.ops, name).scan
    origin = origin_of(function)
    if source is LIBRARY and "ditorch" in sys.modules:  # which stands between: where it was registered is not known
        assert origin is None
        return
    assert origin is not None
    assert origin.modules == (name,)
    assert own_operator(f"{name}.scan", origin) is function, "it is here"
    assert own_operator(f"{name}.scan.default", origin) is function.default
    assert _elsewhere(folder, name, origin) == "[[1.0, 2.0, 3.0]] False", "and nothing was imported for a compiler"
    del module


def test_nobody_imports_a_file_that_has_changed(folder: Path) -> None:
    module = _module(folder, "own_c", old=False)
    assert origin_of(torch.ops.own_c.scan) is None
    del module


def test_nobody_imports_a_script_that_was_started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _module(folder, "own_d")
    assert origin_of(torch.ops.own_d.scan) is not None
    monkeypatch.setitem(sys.modules, "__main__", module)
    assert origin_of(torch.ops.own_d.scan) is None


def test_an_operator_of_pytorch_has_no_origin() -> None:
    for function in (torch.add, torch.ops.aten.add, torch.ops.aten.add.Tensor, len):
        assert origin_of(function) is None


@pytest.mark.parametrize("change", ["raise SystemExit(3)", "\n\n# the same operator, further down"])
def test_a_process_that_does_not_get_it_says_so(folder: Path, change: str) -> None:
    name = f"own_e{len(change)}"
    module = _module(folder, name)
    origin = origin_of(getattr(torch.ops, name).scan)
    assert origin is not None
    (folder / f"{name}.py").write_text(SOURCE.format(space=name, before=change))
    assert _elsewhere(folder, name, origin).startswith("not known:")
    with pytest.raises(NotKnown):
        own_operator(f"{name}.scan", origin._replace(registered=()))
    del module
