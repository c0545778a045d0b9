"""What op_tools changes in PyTorch and Python: all of it is listed, and one call restores the original objects."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
import torch._dynamo

import ditorch
import op_tools
from op_tools.watch import patches
from op_tools.watch.intercept import INTERCEPTOR


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _attributes() -> dict[str, Any]:
    """Attributes of all modules and of their classes, and what functions of torch.distributed hold in their cells."""
    found: dict[str, Any] = {}
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.startswith("op_tools"):
            continue
        for name, value in list(vars(module).items()):
            found[f"{module.__name__}.{name}"] = value
            if isinstance(value, type) and value.__module__ == module.__name__:
                found.update({f"{value.__module__}.{value.__qualname__}.{n}": v for n, v in vars(value).items()})
    for name, value in vars(torch.distributed).items():
        for cell in getattr(value, "__closure__", None) or ():
            found[f"torch.distributed.{name}"] = cell.cell_contents
    return found


def _changed(before: dict[str, Any]) -> set[str]:
    now = _attributes()
    return {
        name
        for name, value in now.items()
        if name in before and before[name] is not value and _home(value).startswith("op_tools")
    }


def _home(value: Any) -> str:
    value = getattr(value, "__func__", value)  # of a class method
    return value.__globals__["__name__"] if isinstance(value, FunctionType) else type(value).__module__


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_all_that_is_patched_is_listed_and_comes_back(device: str) -> None:
    assert patches.listed() == []
    torch.compile(doubled)  # Dynamo is there
    before = _attributes()
    with op_tools.OpObserve() as tool, op_tools.apply_feature(doubled, "dump_op_args"):
        listed = {patch.what for patch in patches.listed()}
        changed = _changed(before)
        assert {"threading.Thread.start", "torch.distributed.all_reduce"} <= changed
        assert "torch.autograd.function.BackwardCFunction.apply" in changed
        assert f"{__name__}.doubled" in changed
        assert changed <= {what.removesuffix(", for apply_feature") for what in listed}
        same = {"torch.distributed.isend", "torch.distributed.irecv"}  # the function itself does something else
        assert len(listed - same) == len(changed) + 2, "each once, a hook on optimizer steps, and one on imports"
        assert all(patch.why and patch.undo for patch in patches.listed())
        assert tool.active
        patches.undo_all()
        assert _changed(before) == set()
        now = _attributes()
        assert all(now[name] is before[name] for name in changed)
        assert patches.listed() == []
    assert _changed(before) == set()


def test_a_feature_on_the_compiler(device: str) -> None:
    original = torch.compile
    with op_tools.apply_feature("torch.compile", "dump_op_args") as handle:
        torch.compile(doubled)
        torch.exp(torch.ones(2, device=device))
        assert handle.tool.active
    assert torch.compile is original


def test_a_feature_that_cannot_be_applied_leaves_nothing_wrapped(device: str) -> None:
    original = doubled
    with pytest.raises(op_tools.SettingsError, match="not an attribute of any module"):
        op_tools.apply_feature([doubled, lambda x: x], "dump_op_args")
    assert doubled is original
    assert patches.listed() == []


def test_what_others_patched_meanwhile_stays(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = threading.Thread.start
    with op_tools.OpObserve():
        ours = threading.Thread.start

        def theirs(thread: threading.Thread) -> None:
            ours(thread)

        threading.Thread.start = theirs  # type: ignore[method-assign]
    try:
        assert threading.Thread.start is theirs
        assert patches.listed() == []
    finally:
        threading.Thread.start = original  # type: ignore[method-assign]


def test_dynamo_that_is_imported_late_is_patched_once(device: str) -> None:
    frames = torch._dynamo.eval_frame
    original = frames._maybe_set_eval_frame
    installed_elsewhere = sys.modules.pop("torch._dynamo.eval_frame")
    try:
        with op_tools.OpObserve():
            assert frames._maybe_set_eval_frame is original
            sys.modules["torch._dynamo.eval_frame"] = installed_elsewhere
            assert INTERCEPTOR._patches is not None
            look = INTERCEPTOR._patches.look_for_dynamo
            threads = [threading.Thread(target=look) for _ in range(8)]
            for one in threads:
                one.start()
            for one in threads:
                one.join()
            whats = [patch.what for patch in patches.listed()]
            assert whats.count("torch._dynamo.eval_frame._maybe_set_eval_frame") == 1
        assert frames._maybe_set_eval_frame is original
    finally:
        sys.modules["torch._dynamo.eval_frame"] = installed_elsewhere


def test_the_doctor_lists_the_patches(device: str) -> None:
    assert "op_tools" not in str(ditorch.doctor())
    with op_tools.OpObserve():
        found = ditorch.doctor()
        assert "threading.Thread.start" in found.op_tools_patches
        assert "threading.Thread.start: modes belong to a thread" in str(found)


def _in_child(check: Any) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            check()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_child_has_nothing_patched_and_may_start_its_own_tool(device: str) -> None:
    if ditorch.backend.name == "cuda":
        pytest.skip("CUDA cannot be used in a forked child")
    start = threading.Thread.start
    with op_tools.OpObserve() as tool:
        torch.ones(2).add(1)

        def check() -> None:
            assert threading.Thread.start is start
            assert patches.listed() == []
            assert not INTERCEPTOR.is_on()
            os.environ["OP_TOOLS_INCLUDE_CPU"] = "1"
            with op_tools.OpObserve() as own:
                thread = threading.Thread(target=lambda: torch.ones(2).mul(2))
                thread.start()
                thread.join()
            assert [row["op"] for row in own.records()].count("torch.Tensor.mul") == 1, own.records()
            tool.stop()

        _in_child(check)
        x = torch.ones(2, device=device)
        x.exp()
    assert "torch.Tensor.exp" in [row["op"] for row in tool.records()]


COLLECTIVES = """
import tempfile, torch, torch.distributed as dist, op_tools
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
x = torch.ones(4)
with op_tools.OpTimeMeasure() as timing:
    dist.all_reduce(x)
    dist.all_gather_into_tensor(torch.empty_like(x), x)
print([row["op"] for row in timing.records()])
dist.destroy_process_group()
"""


def test_a_collective_is_one_call_whatever_it_calls_inside(tmp_path: Path) -> None:
    root = str(Path(__file__).resolve().parents[3])
    env = {**os.environ, "PYTHONPATH": root, "OP_TOOLS_RESULTS_DIR": str(tmp_path), "OP_TOOLS_INCLUDE_CPU": "1"}
    done = subprocess.run([sys.executable, "-c", COLLECTIVES], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    names = ["torch.distributed.all_reduce", "torch.empty_like", "torch.distributed.all_gather_into_tensor"]
    assert done.stdout.splitlines()[-1] == str(names)
