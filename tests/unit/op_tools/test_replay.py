"""Captures from disk: placed as they were, compared bit by bit, and harmless whatever a file holds."""

from __future__ import annotations

import csv
import dataclasses
import json
import multiprocessing
import os
import pickle
import signal
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from op_tools import cli
from op_tools.call.description import tensors_in
from op_tools.call.traits import traits_of
from op_tools.copies.invocation import Invocation, Region, Site
from op_tools.copies.operands import Ref
from op_tools.files import archive
from op_tools.files.archive import ArchiveError
from op_tools.files.captures import find, read
from op_tools.files.header import header, read_header
from op_tools.files.saved import save_comparison
from op_tools.judge import golden
from op_tools.replay import pool
from op_tools.replay.captured import CapturedOp
from op_tools.replay.check import Check, replay
from op_tools.replay.outcome import ERROR, IDENTICAL, NOT_COMPARABLE, RAN, RIGHT, WRONG, Options, Outcome
from op_tools.view.rows import Row

from .test_archive import Bomb, check_same, strided

CPU = Options(device="cpu", acc_check=True)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "summary")


def save(
    folder: str | Path,
    name: str,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    result: Any = None,
    grads: tuple[Any, Any] | None = None,
    **facts: Any,
) -> Path:
    """A capture as OpCapture writes it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {"name": name, "id": 1, "location": "train.py:3 f: y = x + 1", "grad_enabled": True, **facts}
    content = {"args": archive.encode(args), "kwargs": archive.encode(kwargs or {})}
    archive.save(folder / "input.pth", {**state, **content})
    if result is not None:
        archive.save(folder / "output.pth", {"name": name, "result": archive.encode(result)})
    if grads is not None:
        archive.save(folder / "grad_outputs.pth", {"grad_outputs": archive.encode(grads[0])})
        archive.save(folder / "grad_inputs.pth", {"grad_inputs": archive.encode(grads[1])})
    return folder


def save_exp(folder: str | Path) -> Path:
    x = torch.randn(4, requires_grad=True)
    y = x.exp()
    g = torch.ones(4)
    return save(folder, "torch.Tensor.exp", (x.detach().requires_grad_(),), {}, y.detach(), ((g,), (g * y.detach(),)))


# -- what comes of a capture --------------------------------------------------------------------------


def test_the_same_device_gives_the_same_bits() -> None:
    outcome = replay(save_exp("a"), CPU)
    assert (outcome.status, outcome.like_capture, outcome.went_backward) == (IDENTICAL, IDENTICAL, True)
    assert [row.verdict for row in outcome.rows] == ["right"] * 3


def test_other_bits_within_rounding_are_right() -> None:
    x = torch.rand(8) + 1
    folder = save("a", "torch.exp", (x,), {}, torch.nextafter(x.exp(), torch.tensor(9.0)))
    outcome = replay(folder, CPU)
    assert outcome.status == RIGHT
    assert outcome.like_capture.startswith("output differs in 8 of 8 elements, by ")
    assert outcome.notes == ["the captured result is right by the CPU"]


def test_a_wrong_capture_is_told_from_a_right_replay() -> None:
    x = torch.rand(8) + 1
    outcome = replay(save("a", "torch.exp", (x,), {}, x.exp() * 1.001), CPU)
    assert outcome.status == RIGHT
    assert outcome.notes == ["the captured result is wrong by the CPU"]


def test_a_result_that_rounding_does_not_explain_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(8) + 1
    right = save("right", "torch.exp", (x,), {}, x.exp())
    wrong = save("wrong", "torch.exp", (x,), {}, x.exp() * 1.001)

    def faulty(op: CapturedOp, around: Any = None) -> Any:
        op.result = torch.exp(*op.args) * 1.001
        return op.result

    monkeypatch.setattr(CapturedOp, "run_forward", faulty)
    outcome = replay(right, CPU)
    assert outcome.status == WRONG
    assert "times the rounding bound" in outcome.reason
    assert outcome.notes == ["the captured result is right by the CPU"]
    outcome = replay(wrong, CPU)
    assert outcome.status == WRONG
    assert outcome.notes == ["the captured result is the same, bit for bit: it is wrong, too"]


def test_without_a_check_it_only_runs() -> None:
    assert replay(save_exp("a"), Options(device="cpu")).status == RAN


def test_one_tensor_given_twice_and_a_tensor_with_its_view() -> None:
    x = torch.randn(4)
    g = torch.rand(4)
    leaf = x.clone().requires_grad_()
    once = save("once", "torch.mul", (leaf, leaf), {}, x * x, ((g,), (2 * g * x, 2 * g * x)))
    view = save("view", "torch.add", (leaf, leaf), {}, x + x, ((g,), (g, g)))
    assert replay(once, CPU).status == IDENTICAL
    assert replay(view, CPU).status == IDENTICAL


def test_an_inplace_operator_on_a_tensor_that_wants_a_gradient() -> None:
    base = torch.randn(3, 4)
    g = torch.rand(4, 3)
    leaf = base.t().requires_grad_()
    folder = save("a", "torch.Tensor.mul_", (leaf, 3), {}, base.t() * 3, ((g,), (g * 3,)))
    op = CapturedOp(folder, "cpu")
    op.prepare()
    result = op.run_forward()
    assert result is op.args[0]
    assert result.stride() == (1, 4)
    assert replay(folder, CPU).status == IDENTICAL


def test_a_call_that_returns_nothing_is_judged_by_its_arguments() -> None:
    x = torch.zeros(3)
    outcome = replay(save("a", "torch.Tensor.__setitem__", (x, 1, 5.0)), CPU)
    assert outcome.status == RIGHT
    assert outcome.notes == ["it returns nothing"]


def test_running_statistics_may_change_other_arguments_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    x, statistics = torch.randn(6, 3), (torch.zeros(3), torch.ones(3))
    args = (x, torch.ones(3), torch.zeros(3), *(s.clone() for s in statistics), True, 0.1, 1e-5)
    result = torch.native_batch_norm(*args)
    folder = save("a", "torch.native_batch_norm", (*args[:3], *statistics, *args[5:]), {}, result)
    assert replay(folder, CPU).status == IDENTICAL
    real = CapturedOp.run_forward

    def careless(op: CapturedOp, around: Any = None) -> Any:
        found = real(op, around)
        op.args[1].mul_(1.001)
        return found

    monkeypatch.setattr(CapturedOp, "run_forward", careless)
    outcome = replay(folder, CPU)
    assert (outcome.status, [row.verdict for row in outcome.rows if "input[1]" in row.name]) == (WRONG, ["wrong"])


def test_random_numbers_of_the_same_device_come_again_and_the_stream_goes_on_untouched() -> None:
    state = torch.get_rng_state()
    y = torch.rand(6)
    folder = save("a", "torch.rand", (6,), {}, y, rng={"cpu": state, "device": state, "type": "cpu"})
    before = torch.get_rng_state()
    assert replay(folder, CPU).status == IDENTICAL
    assert torch.equal(torch.get_rng_state(), before)


def test_random_numbers_of_another_device_are_not_comparable() -> None:
    folder = save("a", "torch.rand", (6,), {}, torch.rand(6), rng={"cpu": None, "device": None, "type": "npu:0"})
    outcome = replay(folder, CPU)
    assert outcome.status == NOT_COMPARABLE
    assert "random" in outcome.reason


def test_a_generator_is_not_comparable_but_runs() -> None:
    x = torch.zeros(6)
    generator = torch.Generator().manual_seed(3)
    folder = save("a", "torch.Tensor.uniform_", (x,), {"generator": generator}, torch.rand(6))
    outcome = replay(folder, CPU)
    assert (outcome.status, outcome.reason) == (NOT_COMPARABLE, "it drew from a generator of its own")


def test_uninitialised_memory_is_not_comparable() -> None:
    outcome = replay(save("a", "torch.empty", (4,), {}, torch.full((4,), 7.0)), CPU)
    assert outcome.status == NOT_COMPARABLE
    assert "uninitialised" in outcome.reason


def test_collectives_and_callables_cannot_run_alone() -> None:
    outcome = replay(save("a", "torch.distributed.all_reduce", (torch.ones(2),)), CPU)
    assert outcome.status == NOT_COMPARABLE
    assert "without the other processes" in outcome.reason
    outcome = replay(save("b", "torch.exp", (object(),)), CPU)
    assert outcome.status == NOT_COMPARABLE
    assert "builtins.object were not captured" in outcome.reason


@pytest.mark.parametrize("named", ["cuda", "npu:1", torch.device("cuda", 3)], ids=str)
def test_a_capture_of_another_device_runs_here(named: Any) -> None:
    made = save("made", "torch.arange", (4,), {"device": named}, torch.arange(4))
    moved = save("moved", "torch.Tensor.to", (torch.ones(2), named), {}, torch.ones(2))
    assert replay(made, CPU).status == IDENTICAL
    assert replay(moved, CPU).status == IDENTICAL
    assert replay(save("c", "torch.Tensor.cuda", (torch.ones(2),), {}, torch.ones(2)), CPU).status == IDENTICAL


def test_autocast_is_restored() -> None:
    x, w = torch.randn(4, 8), torch.randn(3, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.nn.functional.linear(x, w)
    state = {"device_type": "cuda", "dtype": "torch.bfloat16"}
    folder = save("a", "torch.nn.functional.linear", (x, w), {"bias": None}, y, autocast=state)
    outcome = replay(folder, CPU)
    assert y.dtype == torch.bfloat16
    assert outcome.status == IDENTICAL, outcome.reason


def test_a_comparison_saved_under_autocast_replays_under_autocast() -> None:
    x, w = torch.randn(4, 8), torch.randn(3, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.nn.functional.linear(x, w)
    written_before = save("a", "torch.nn.functional.linear", (x, w), {"bias": None}, y, autocast=["cuda", "bfloat16"])
    linear = torch.nn.functional.linear
    region = Region("cuda", autocast=torch.bfloat16, rounded_to=torch.bfloat16)
    call = Invocation(7, "torch.nn.functional.linear", linear, traits_of(linear), Site("train.py:3", "head", 2), region)
    answer = (x.bfloat16() @ w.bfloat16().t()).double()
    sides = {"input": ((x, w), {}), "output": y}, {"input": ((x, w), {}), "output": answer}
    wrong = [Row("torch.nn.functional.linear", "output", None, False, 0.5, 0.5, 0.0, 0.0, "", reason="off", bound=0.1)]
    files = save_comparison(Path("b"), call, *sides, wrong)
    assert {f.name for f in files} == {"input.pth", "output.pth", "forward.pth", "reproduce.py"}
    assert "AUTOCAST = torch.bfloat16" in files[-1].read_text()
    for folder in (written_before, Path("b/device")):
        outcome = replay(folder, CPU)
        assert (outcome.status, outcome.reason) == (IDENTICAL, "")
        op = CapturedOp(folder, "cpu")
        op.prepare()
        assert op.run_forward().dtype == torch.bfloat16
    assert replay(Path("b/device"), CPU).location == "train.py:3"
    assert save_comparison(Path("b"), call, *sides, wrong) == [Path("b/forward.pth"), Path("b/reproduce.py")]


def test_the_reference_knows_the_autocast_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a composite call keeps between its steps is in the lower precision: its bound depends on that."""
    seen: list[golden.Source] = []
    run = golden.run

    def spy(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        seen.append(result.source)
        return result

    monkeypatch.setattr(golden, "run", spy)
    x, w = torch.randn(4, 8), torch.randn(3, 8)
    state = {"device_type": "cuda", "dtype": "torch.bfloat16"}
    replay(save("a", "torch.nn.functional.linear", (x, w), {}, autocast=state), CPU)
    replay(save("b", "torch.exp", (x,), {}, autocast=state), CPU)
    assert [s.autocast for s in seen] == [torch.bfloat16, torch.bfloat16]
    assert [s.rounded_to for s in seen] == [torch.bfloat16, None]


def test_the_header_of_a_file_comes_back_whole() -> None:
    for autocast, rng in ((None, None), (torch.float16, {"cpu": torch.zeros(2), "device": None, "type": "cuda:1"})):
        region = Region("cuda", False, autocast, autocast, rng)
        site = Site("train.py:3 f: y = x + 1", "blocks.0", 5, 3)
        call = Invocation(7, "torch.add", torch.add, traits_of(torch.add), site, region)
        assert read_header(header(call)) == ("torch.add", site, region)
    old = {"name": "torch.add", "id": 1, "rng": {"cpu": None, "device": None, "type": "cuda:1"}}
    assert read_header(old) == ("torch.add", Site(), Region("cuda", rng=old["rng"]))
    assert read_header({"autocast": ("cuda", "float16")})[2] == Region("cuda", autocast=torch.float16)
    for bad in ({"autocast": {"dtype": "torch.nn"}}, {"autocast": ["cuda", "no"]}, {"rounded_to": 3}):
        with pytest.raises(ArchiveError, match="to "):
            read_header(bad)


def test_gradients_of_ones_where_none_were_captured() -> None:
    x = torch.randn(4, requires_grad=True)
    outcome = replay(save("a", "torch.exp", (x,), {}, x.detach().exp()), CPU)
    assert outcome.went_backward
    assert outcome.status == IDENTICAL
    outcome = replay(save("b", "torch.Tensor.acosh_", (x,), {}, x.detach().acosh()), CPU)
    assert outcome.passed
    assert "was not captured and does not run" in outcome.notes[0]


def test_another_dtype() -> None:
    x = torch.randn(6, 6)
    folder = save("a", "torch.matmul", (x.t(), x), {}, x.t() @ x)
    op = CapturedOp(folder, "cpu", torch.float16)
    assert [t.dtype for t in op.host_args] == [torch.float16] * 2
    assert op.host_args[0].stride() == (1, 6)
    outcome = replay(folder, Options("cpu", torch.float16, acc_check=True))
    assert outcome.status == RIGHT
    assert "another dtype" in outcome.like_capture
    complex_ = save("b", "torch.exp", (torch.randn(3, dtype=torch.complex64),))
    assert CapturedOp(complex_, "cpu", torch.float64).host_args[0].dtype == torch.complex128
    dtype_argument = save("c", "torch.zeros", (3,), {"dtype": torch.float32})
    assert CapturedOp(dtype_argument, "cpu", torch.float64).host_kwargs == {"dtype": torch.float64}


def test_contiguous_undoes_the_layout_where_that_means_the_same() -> None:
    base = torch.randn(6, 6)
    folder = save("a", "torch.exp", (base[1:, ::2].t(),), {}, base[1:, ::2].t().exp())
    assert not CapturedOp(folder, "cpu").host_args[0].is_contiguous()
    op = CapturedOp(folder, "cpu", contiguous=True)
    assert op.host_args[0].is_contiguous()
    assert op.host_args[0].untyped_storage().nbytes() == 15 * 4
    assert replay(folder, Options("cpu", contiguous=True, acc_check=True)).status == IDENTICAL
    strided_call = save("b", "torch.as_strided", (base.t(), (3,), (7,)), {}, base.as_strided((3,), (7,)))
    outcome = replay(strided_call, Options("cpu", contiguous=True, acc_check=True))
    assert outcome.status == IDENTICAL
    assert outcome.notes == ["kept as captured: its meaning depends on the layout"]


def test_runs_that_differ_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save("a", "torch.exp", (torch.zeros(2),), {}, torch.ones(2))
    ulps = iter([0.0, 1e-7])

    def shaky(op: CapturedOp, around: Any = None) -> Any:
        op.result = torch.ones(2) + next(ulps)
        return op.result

    monkeypatch.setattr(CapturedOp, "run_forward", shaky)
    outcome = replay(folder, Options("cpu", acc_check=True, run_times=2))
    assert not outcome.repeatable
    assert outcome.notes == ["two runs gave different results"]


def test_only_backward_times_and_judges_the_backward_alone() -> None:
    folder = save_exp("a")
    outcome = replay(folder, Options("cpu", acc_check=True, time=True, run_times=3, forward=False))
    assert (len(outcome.forward_ms), len(outcome.backward_ms)) == (0, 3)
    assert [row.name for row in outcome.rows] == ["torch.Tensor.exp grad_input"]
    outcome = replay(folder, Options("cpu", acc_check=True, time=True, run_times=3, backward=False))
    assert (len(outcome.forward_ms), len(outcome.backward_ms)) == (3, 0)
    assert not any("grad" in row.name for row in outcome.rows)
    none = replay(save("b", "torch.exp", (torch.ones(2),)), Options("cpu", acc_check=True, forward=False))
    assert (none.status, none.reason) == (NOT_COMPARABLE, "it has no backward pass")


@given(st.lists(strided(), min_size=1, max_size=3), st.booleans())
@settings(deadline=None, max_examples=60)
def test_arguments_are_placed_as_they_were(tensors: list[torch.Tensor], share: bool) -> None:
    if share:
        tensors = [*tensors, tensors[0].detach()[..., :1] if tensors[0].dim() else tensors[0].detach()]
    op = CapturedOp(save("p", "torch.cat", (tensors,)), "cpu")
    op.prepare()
    for old, new in zip(tensors, tensors_in(op.args)):
        check_same(old, new)
        assert old.storage_offset() == new.storage_offset()
    placed = list(tensors_in(op.args))
    if share:
        assert placed[0].untyped_storage().data_ptr() == placed[-1].untyped_storage().data_ptr()


@given(strided(), st.sampled_from([torch.float16, torch.float32, torch.float64]), st.booleans())
@settings(deadline=None, max_examples=60)
def test_values_survive_another_dtype_and_layout(x: torch.Tensor, dtype: torch.dtype, contiguous: bool) -> None:
    op = CapturedOp(save("q", "torch.exp", (x,)), "cpu", dtype, contiguous)
    (changed,) = op.host_args
    assert torch.equal(changed.detach().to(x.dtype), x.detach())
    assert changed.requires_grad == x.requires_grad
    assert changed.is_contiguous() if contiguous else changed.stride() == x.stride()
    assert changed.dtype == dtype or not x.dtype.is_floating_point


# -- broken, foreign and malicious files --------------------------------------------------------------


def write_lie(path: Path) -> None:
    claims = Ref(0, torch.float32, (1 << 31,), (1,), 0, False, False, False)  # a shape that its storage cannot hold
    content = {"name": "torch.exp", "args": (claims,), "kwargs": {}}
    fragments = [archive.fragment(value, [16]) for pair in content.items() for value in pair]
    archive.save_fragments(str(path), fragments, [bytes(16)])


def write_compressed(path: Path) -> None:
    torch.save({"format": 1, "name": "torch.exp", "args": (torch.zeros(1 << 20),), "kwargs": {}}, "whole.pth")
    with zipfile.ZipFile("whole.pth") as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry.filename))


def write_endless(path: Path) -> None:
    tree: Any = [0]
    for _ in range(40):
        tree = [tree, tree]
    torch.save({"format": 1, "name": "torch.exp", "args": tree, "kwargs": {}}, path)


def payload(**parts: Any) -> Callable[[Path], None]:
    return lambda path: torch.save({"format": 1, **parts}, path)


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda p: p.write_bytes(b""), "cannot be read as a capture"),
    "text": (lambda p: p.write_text("hello"), "cannot be read as a capture"),
    "other zip": (lambda p: zipfile.ZipFile(p, "w").writestr("a", "b"), "cannot be read as a capture"),
    "executes": (lambda p: torch.save({"format": 1, "args": (Bomb(),)}, p), "cannot be read as a capture"),
    "bare pickle": (lambda p: p.write_bytes(pickle.dumps(Bomb())), "cannot be read as a capture"),
    "weights": (lambda p: torch.save({"weight": torch.ones(2)}, p), "no format field"),
    "newer": (lambda p: torch.save({"format": 99}, p), "format 99"),
    "no name": (payload(args=(), kwargs={}), "no 'name' in it"),
    "no args": (payload(name="torch.exp", kwargs={}), "no 'args' in it"),
    "args no tuple": (payload(name="torch.exp", args=3, kwargs={}), "no 'args' in it"),
    "odd keyword": (payload(name="torch.exp", args=(), kwargs={3: 4}), "a keyword that is not a name"),
    "odd constant": (payload(args=({"__op_tools__": "dtype", "value": "torch.nonsense"},)), "cannot be read"),
    "odd tag": (payload(args=({"__op_tools__": "code"},)), "unknown kind of value 'code'"),
    "no such operator": (payload(name="torch.no_such_op", args=(), kwargs={}), "is not an operator of PyTorch"),
    "a program": (payload(name="os.system", args=("touch exploded",), kwargs={}), "is not an operator of PyTorch"),
    "a file writer": (payload(name="torch.from_file", args=("exploded",), kwargs={}), "is not an operator of PyTorch"),
    "aten writer": (payload(name="aten.from_file", args=("exploded",), kwargs={}), "is not an operator of PyTorch"),
    "a loader": (payload(name="torch.hub.load", args=("x", "y"), kwargs={}), "is not an operator of PyTorch"),
    "wrong arguments": (payload(name="torch.exp", args=("x",), kwargs={}), "TypeError"),
    "claims memory": (write_lie, "bad/torch.exp/1/1/input.pth: "),
    "zip bomb": (write_compressed, "unpack to more than the file holds"),
    "endless": (write_endless, "more than 1,000,000 values"),
    "a pipe": (lambda p: os.mkfifo(p), "is not a regular file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_clear_errors(name: str) -> None:
    write, message = BAD[name]
    folder = Path("bad/torch.exp/1/1")
    folder.mkdir(parents=True)
    write(folder / "input.pth")
    outcome = replay(folder, CPU)
    assert outcome.status == ERROR
    assert message in outcome.reason
    assert "\n" not in outcome.reason
    assert not Path("exploded").exists()


@given(st.integers(0, 3000), st.sampled_from(["input", "output", "grad_outputs", "grad_inputs"]))
@settings(deadline=None, max_examples=60)
def test_truncated_parts_are_clear_errors(length: int, part: str) -> None:
    folder = save_exp("t")
    path = folder / f"{part}.pth"
    content = path.read_bytes()
    path.write_bytes(content[: min(length, len(content) - 1)])
    outcome = replay(folder, CPU)
    assert outcome.status == ERROR
    assert f"{part}.pth: " in outcome.reason


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_flipped_bytes_never_get_out(data: st.DataObject) -> None:
    folder = save_exp("f")
    path = folder / "input.pth"
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    outcome = replay(folder, CPU)  # the values may have changed, or nothing that matters
    assert outcome.status in (ERROR, WRONG, RIGHT, IDENTICAL, NOT_COMPARABLE)


def test_a_tensor_of_any_size_in_a_few_bytes() -> None:
    huge = torch.zeros(1).expand(1 << 45)
    outcome = replay(save("a", "torch.exp", (huge,)), CPU)
    assert outcome.status == ERROR
    assert "131,072.0 GiB" in outcome.reason


def test_parts_that_do_not_fit_and_missing_ones() -> None:
    folder = save_exp("a")
    archive.save(folder / "grad_outputs.pth", {"grad_outputs": (torch.ones(4), torch.ones(4))})
    assert "2 gradients, but torch.Tensor.exp returned 1 tensors" in replay(folder, CPU).reason
    archive.save(folder / "grad_outputs.pth", {"grad_outputs": (torch.ones(5),)})
    assert replay(folder, CPU).status == ERROR
    archive.save(folder / "grad_outputs.pth", {"grad_outputs": 3})
    assert "is not a row of tensors" in replay(folder, CPU).reason
    archive.save(folder / "output.pth", {"something": 3})
    os.remove(folder / "grad_outputs.pth")
    assert "output.pth: is not the output of a capture (no 'result' in it)" in replay(folder, CPU).reason
    os.remove(folder / "input.pth")
    assert find(Path(".")) == [folder]
    outcome = replay(folder, CPU)
    assert outcome.reason == "a/input.pth: is missing"
    with pytest.raises(ArchiveError, match="is missing"):
        read(folder / "input.pth")


# -- the command --------------------------------------------------------------------------------------


def some_captures(count: int = 3) -> None:
    for number in range(count):
        save_exp(f"tree/torch.Tensor.exp/77/{number + 1}/t")


def test_find_takes_trees_folders_and_files() -> None:
    some_captures(12)
    whole = find(Path("tree"))
    assert [p.parent.name for p in whole] == [str(n) for n in range(1, 13)]
    assert find(whole[3]) == [whole[3]]
    assert find(whole[3] / "input.pth") == [whole[3]]
    device = save_exp("tree/torch.add/77/autocompare/5/t/device")
    answers = save("tree/torch.add/77/autocompare/5/t/cpu", "", (torch.ones(2),))
    assert find(Path("tree"))[12:] == [device]
    assert find(answers) == [answers]


def test_the_cpu_side_of_a_comparison_replays_when_asked_for() -> None:
    save("o/device", "torch.exp", (torch.ones(2),), {}, torch.ones(2))
    answers = save("o/cpu", "", (torch.ones(2, dtype=torch.float64),), {}, torch.ones(2, dtype=torch.float64).exp())
    assert replay(answers, CPU).status == IDENTICAL


def test_the_run_goes_on_and_the_exit_code_and_files_tell(capsys: pytest.CaptureFixture[str]) -> None:
    some_captures()
    Path("tree/torch.Tensor.exp/77/2/t/input.pth").write_bytes(b"broken")
    code = cli.run_from_data(["tree", "--acc_check", "--device", "cpu", "--json", "r.json", "--csv", "r.csv"])
    assert code == 1
    said = capsys.readouterr()
    assert "2/t/input.pth: cannot be read as a capture" in said.err
    assert "2 of 3 captures ran" in said.out
    assert "2 bit-identical, 1 error" in said.out
    written = json.loads(Path("r.json").read_text())
    assert [o["status"] for o in written["outcomes"]] == [IDENTICAL, ERROR, IDENTICAL]
    assert (written["captures"], written["done"], written["passed"]) == (3, 3, False)
    rows = list(csv.DictReader(Path("r.csv").read_text().splitlines()))
    assert [r["status"] for r in rows] == [IDENTICAL, ERROR, IDENTICAL]
    assert rows[0]["name"] == "torch.Tensor.exp"
    assert float(rows[0]["max_ulp"]) < 1
    assert cli.run_from_data(["tree/torch.Tensor.exp/77/1", "--acc_check", "--device", "cpu", "--trust"]) == 0
    assert cli.main(["replay", "tree/torch.Tensor.exp/77/1", "--device", "cpu", "--trust"]) == 0


MISTAKES = [
    (["nowhere"], "nowhere: no such file or folder"),
    (["empty"], "no capture under it"),
    (["tree", "--run_times", "0"], "must run at least once"),
    (["tree", "--dtype", "flaot16"], "did you mean torch.float16"),
    (["tree", "--dtype", "int32"], "a floating dtype is needed"),
    (["tree", "--jobs", "-1"], "a number of processes"),
    (["tree", "--json", "no/such/r.json"], "cannot be written"),
    (["tree", "--device", "nonsense"], "--device nonsense"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_mistakes_are_told_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "activate", lambda device: "")
    some_captures(1)
    Path("empty").mkdir()
    assert cli.run_from_data(arguments) == 2
    assert message in capsys.readouterr().err


def test_wrong_settings_are_one_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    some_captures(2)
    monkeypatch.setenv("OP_AUTOCOMPARE_STANDARD", "strict")
    assert cli.run_from_data(["tree", "--acc_check", "--device", "cpu"]) == 2
    assert capsys.readouterr().err.count("OP_AUTOCOMPARE_STANDARD") == 1


def test_switches_take_a_word_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    some_captures(1)
    for words in (["--only_run_forward", "True", "tree"], ["tree", "--only_run_forward"]):
        assert cli.run_from_data([*words, "--sync_time_measure", "--device", "cpu", "--trust", "--json", "r.json"]) == 0
        (outcome,) = json.loads(Path("r.json").read_text())["outcomes"]
        assert (len(outcome["forward_ms"]), len(outcome["backward_ms"])) == (1, 0)
    assert cli.run_from_data(["tree", "--only_run_backward", "--acc_check", "False", "--device", "cpu", "--trust"]) == 0
    assert "1 ran" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        cli.run_from_data(["tree", "--only_run_forward", "--only_run_backward"])
    assert stopped.value.code == 2


def test_help_has_examples_and_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.run_from_data(["--help"])
    text = capsys.readouterr().out
    options = "acc_check sync_time_measure run_times only_run_forward only_run_backward device dtype jobs json csv"
    assert all(f"--{option}" in text for option in [*options.split(), "contiguous", "as-captured"])
    assert "examples:" in text
    assert "exit code" in text


def test_full_output_has_the_documented_tables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "full")
    some_captures(1)
    assert cli.run_from_data(["tree", "--acc_check", "--sync_time_measure", "--run_times", "2", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["tree/torch.Tensor.exp/77/1/t", "", ""]
    assert lines[3].startswith("torch.Tensor.exp forward_id: 1    cpu_dtype_cast_info(from:to): {torch.float32: ")
    assert "replay/captured.py" in lines[4]
    assert "captured at train.py:3 f: y = x + 1" in lines[4]
    text = "\n".join(lines)
    header = "allclose | max_abs_diff | max_relative_diff |     atol    |     rtol    "
    assert text.count(header) == 2
    for label in ("input ", "output ", "grad "):
        assert f"torch.Tensor.exp {label}" in text
    assert text.count("forward_elasped |") == 3
    assert "torch.Tensor.exp: bit-identical" in text
    assert "op elasped info saved to " in text


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "off")


@pytest.mark.usefixtures("silent")
def test_console_off_says_nothing_but_errors(capsys: pytest.CaptureFixture[str]) -> None:
    some_captures(2)
    Path("tree/torch.Tensor.exp/77/2/t/input.pth").write_bytes(b"broken")
    assert cli.run_from_data(["tree", "--acc_check", "--device", "cpu", "--trust"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "2/t/input.pth" in said.err


def test_ctrl_c_keeps_what_was_done(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    some_captures(5)
    real, done = Check.run, []

    def interrupted(check: Check) -> None:
        if len(done) == 2:
            signal.raise_signal(signal.SIGINT)
        done.append(check)
        real(check)

    monkeypatch.setattr(Check, "run", interrupted)
    arguments = ["tree", "--acc_check", "--device", "cpu", "--jobs", "0", "--json", "r.json", "--csv", "r.csv"]
    assert cli.run_from_data(arguments) == 130
    assert "interrupted: 3 captures were not reached" in capsys.readouterr().out
    written = json.loads(Path("r.json").read_text())
    assert (written["captures"], written["done"], written["interrupted"]) == (5, 2, True)
    assert len(Path("r.csv").read_text().splitlines()) == 3


# -- threads -------------------------------------------------------------------------------------------


def varied_captures() -> list[Path]:
    """What has to do with memory, random numbers and bad files."""
    x = torch.randn(6, 4)
    torch.manual_seed(3)
    rng = {"type": "cpu", "cpu": torch.get_rng_state()}
    drawn = torch.rand(8)
    return [
        save_exp("a"),
        save("b", "torch.Tensor.add_", (x[::2], 1.5), {}, x[::2] + 1.5),
        save("c", "torch.mm", (x, x.t()), {"out": torch.zeros(6, 6)}, x @ x.t()),
        save("d", "torch.rand", (8,), {}, drawn, rng=rng),
        save("e", "torch.exp", (x,), {}, x.exp() * 1.01),
        save("f", "torch.no_such_operator", (x,)),
        save("g", "torch.sort", (x,), {}, torch.sort(x)),
        save("h", "torch.Tensor.t", (x,), {}, x.t()),
    ]


def test_judging_beside_the_next_run_changes_nothing() -> None:
    folders = varied_captures() * 6
    before = torch.get_rng_state()
    apart = [replay(folder, CPU).as_dict() for folder in folders]
    together = [outcome.as_dict() for outcome in pool.replay_all(folders, CPU, jobs=0)]
    for outcome in apart + together:
        outcome.pop("seconds")
    assert repr(together) == repr(apart)
    assert {o["status"] for o in apart} == {IDENTICAL, RIGHT, ERROR}
    assert torch.equal(torch.get_rng_state(), before)


def test_large_captures_are_alone_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_LARGE", 0)
    unfinished: list[Check] = []
    real_run, real_conclude = Check.run, Check.conclude

    def run(check: Check) -> None:
        assert not unfinished
        unfinished.append(check)
        real_run(check)

    def conclude(check: Check) -> Any:
        outcome = real_conclude(check)
        unfinished.remove(check)
        return outcome

    monkeypatch.setattr(Check, "run", run)
    monkeypatch.setattr(Check, "conclude", conclude)
    assert len(list(pool.replay_all(varied_captures(), CPU, jobs=0))) == 8


# -- processes ----------------------------------------------------------------------------------------


def crashing_worker(connection: Any, options: Options, jobs: int) -> None:
    """Like a worker, but some captures take it down."""
    connection.send("")
    while True:
        try:
            folder = connection.recv()
        except EOFError:
            return
        if "crash" in str(folder):
            os.kill(os.getpid(), signal.SIGSEGV)
        if "endless" in str(folder):
            os.kill(os.getpid(), signal.SIGSTOP)
        if "hostile" in str(folder):
            connection.send_bytes(pickle.dumps(Bomb()))
        if folder is not None:
            connection.send(Outcome(folder, f"{os.environ['OMP_NUM_THREADS']} threads", RAN))


@pytest.mark.slow
def test_a_crash_costs_one_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_work", crashing_worker)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folders = [Path(f"torch.exp/{kind}{i}") for i, kind in enumerate(["a", "crash", "b", "c", "crash", "d"])]
    outcomes = list(pool.replay_all(folders, CPU, jobs=2))
    assert [o.folder for o in outcomes] == folders
    assert [o.status for o in outcomes] == [RAN, ERROR, RAN, RAN, ERROR, RAN]
    assert outcomes[1].reason == "the process that ran it died (SIGSEGV)"
    assert outcomes[1].op == "torch.exp"
    assert outcomes[0].op == "1 threads"
    assert os.environ["OMP_NUM_THREADS"] == "1"


@pytest.mark.slow
def test_a_capture_without_end_and_a_worker_that_was_taken_over_cost_one_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "_work", crashing_worker)
    folders = [Path(f"torch.exp/{kind}{i}") for i, kind in enumerate(["a", "endless", "b", "hostile", "c"])]
    outcomes = list(pool.replay_all(folders, dataclasses.replace(CPU, time_limit=0.5), jobs=1))
    assert [o.status for o in outcomes] == [RAN, ERROR, RAN, ERROR, RAN]
    assert outcomes[1].reason == "it took longer than 0.5 s, the time limit of a capture (--time-limit)"
    assert not Path("executed").exists()


def slow_worker(connection: Any, options: Options, jobs: int) -> None:
    """Like a worker that takes its time over all captures but the first."""
    connection.send("")
    while True:
        folder = connection.recv()
        if "slow" in str(folder):
            time.sleep(60)
        if folder is not None:
            connection.send(Outcome(folder, "", RAN))


HOSTILE: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("torch.segment_reduce", (torch.rand(4), "sum"), {"lengths": torch.tensor([2**40]), "unsafe": True}),
    ("torch._convert_indices_from_coo_to_csr", (torch.tensor([10**6]), 3), {}),
    ("torch._convert_indices_from_csr_to_coo", (torch.tensor([0, 10**7]), torch.tensor([1])), {}),
    (
        "aten.max_pool2d_with_indices_backward.default",
        (torch.ones(1, 1, 2, 2), torch.ones(1, 1, 4, 4), [2, 2], [2, 2], [0, 0], [1, 1], False),
        {"indices": torch.full((1, 1, 2, 2), 2**40)},
    ),
    (
        "aten.adaptive_max_pool2d_backward.default",
        (torch.ones(1, 1, 2, 2), torch.ones(1, 1, 4, 4), torch.full((1, 1, 2, 2), -(2**40))),
        {},
    ),
    (
        "aten.embedding_dense_backward.default",
        (torch.ones(2, 3), torch.tensor([0, 2**40]), 4, -1, False),
        {},
    ),
    (
        "aten._embedding_bag_dense_backward.default",
        (torch.ones(1, 3), *[torch.tensor([2**40])] * 4, 4, False, 0, None, -1),
        {},
    ),
    (
        "aten.native_batch_norm_backward.default",
        (*[torch.ones(2, 999, 4)] * 2, *[torch.ones(1)] * 5, True, 1e-5, [True] * 3),
        {},
    ),
    ("torch.nn.functional.embedding", (torch.tensor([2**40]), torch.ones(3, 2)), {}),
    ("torch.index_select", (torch.ones(3, 2), 0, torch.tensor([-1])), {}),
    ("torch.gather", (torch.ones(3, 2), 1, torch.tensor([[7]])), {}),
    ("torch.take", (torch.ones(3), torch.tensor([-4])), {}),
]


@pytest.mark.parametrize(("name", "args", "kwargs"), HOSTILE, ids=[name for name, _, _ in HOSTILE])
def test_an_operator_that_trusts_its_indices_is_refused_or_checked(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save("hostile", name, args, kwargs)
    monkeypatch.setattr(CapturedOp, "run_forward", lambda *_: pytest.fail("it ran"))
    outcome = replay(folder, CPU)
    assert not outcome.forward_ms
    said = ("trusts its arguments", "outside of", "elements", "would not be checked")
    assert any(text in outcome.reason for text in said)


def test_a_crash_in_a_kernel_costs_one_capture_and_the_report_goes_on() -> None:
    folders = [save_exp("a"), save("crash", "aten.remainder.int", (1, 0)), save_exp("b")]
    outcomes = list(pool.replay_all(folders, CPU))  # in a process of its own unless told otherwise
    assert [o.status for o in outcomes] == [IDENTICAL, ERROR, IDENTICAL]
    assert outcomes[1].reason == "the process that ran it died (SIGFPE)"


@pytest.mark.parametrize("jobs", [0, 1])
def test_a_small_file_cannot_cost_gigabytes(jobs: int) -> None:
    one = torch.ones(1)
    folders = [
        save("ones", "torch.ones", (10**9,)),
        save("outer", "torch.outer", (one.expand(40_000), one.expand(40_000))),
        save("unknown", "torch.Tensor.repeat_interleave", (one.int(), one.int() * 3 * 10**8)),  # until it runs
        save_exp("last"),
    ]
    outcomes = list(pool.replay_all(folders if jobs else [folders[0], folders[3]], CPU, jobs=jobs))
    assert [o.status for o in outcomes] == [*[ERROR] * (len(outcomes) - 1), IDENTICAL]
    assert "2.0 GiB is the memory limit of a capture" in outcomes[0].reason
    if jobs:
        assert "2.0 GiB is the memory limit of a capture" in outcomes[1].reason
        assert outcomes[2].reason.startswith("not enough memory to run it; a capture may take 2.0 GiB")


def test_who_stops_early_does_not_wait_for_captures_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_work", slow_worker)
    outcomes = pool.replay_all([Path("quick"), *(Path(f"slow{i}") for i in range(5))], CPU, jobs=2)
    assert next(outcomes).folder == Path("quick")
    started = time.monotonic()
    outcomes.close()  # type: ignore[attr-defined]
    assert time.monotonic() - started < 30
    assert not multiprocessing.active_children()


def test_processes_give_the_same_results_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    some_captures(4)
    Path("tree/torch.Tensor.exp/77/2/t/input.pth").write_bytes(b"broken")
    arguments = ["tree", "--acc_check", "--device", "cpu", "--jobs", "2", "--json", "r.json"]
    assert cli.run_from_data(arguments) == 1
    outcomes = json.loads(Path("r.json").read_text())["outcomes"]
    assert [Path(o["folder"]).parent.name for o in outcomes] == ["1", "2", "3", "4"]
    assert [o["status"] for o in outcomes] == [IDENTICAL, ERROR, IDENTICAL, IDENTICAL]
    assert "3 of 4 captures ran" in capsys.readouterr().out
