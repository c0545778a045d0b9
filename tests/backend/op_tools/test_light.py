"""Calls that C++ watches by itself leave the same records as those that go through the tools' own code."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import op_tools
from op_tools.call.devices import accelerator_type
from op_tools.native import book, front, ledger, tensors
from op_tools.watch import backward_clock
from op_tools.watch.intercept import INTERCEPTOR

COMPILED = front.LIBRARY.wait()
pytestmark = pytest.mark.skipif(COMPILED is None, reason=f"not compiled here {front.LIBRARY.failure}")


class Marked(torch.Tensor):
    """A tensor of a class of its own."""


class Passes(TorchFunctionMode):
    """Some other mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _program(device: str) -> None:
    x, w = torch.ones(4, 4, device=device, requires_grad=True), torch.nn.Parameter(torch.ones(4, 4, device=device))
    for _ in range(3):
        y = torch.nn.functional.linear(x, w, bias=None)
        torch.cat([y, x], dim=1).max(dim=1)
        y.add(1.5, alpha=2).view(-1)[1:3].sum().backward()
        torch.add(torch.ones(2), 1)  # on the CPU
        torch.empty(0, device=device).mul(2)
        torch.tensor([], dtype=torch.float64, device=torch.device(device))  # no tensor, but a device
        torch.arange(4, device=torch.device(device, 0)).add(1)
        torch.zeros(2, device=torch.device("cpu"))
        with torch.no_grad(), torch.device(device):
            torch.zeros(2).add_(1)
        with Passes():
            torch.mul(x, 2)
        x.as_subclass(Marked).neg()
        with pytest.raises(RuntimeError):
            torch.mm(x, torch.ones(3, 3, device=device))
        {"a": torch.tanh(x)}


def _rows(tool: Any) -> list[Any]:
    kept = ("op", "location", "inputs", "outputs", "step", "phase", "role", "tensor", "min", "max", "norm")
    rows = [{key: row[key] for key in kept if key in row} for row in tool.records()]
    return sorted(rows, key=repr) if "elapsed_ms" in tool.records()[0] else rows  # these are of two queues


@pytest.mark.parametrize("name", ["OpObserve", "OpTimeMeasure", "OpOverflowCheck"])
def test_the_records_are_the_same(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "off")
    backward_clock.LIBRARIES.wait()
    ledger.LIBRARY.wait()
    walked: list[Any] = []
    found, counts, walks = [], [], []
    kind = getattr(op_tools, name)
    after = kind.after

    def counted(self: Any, call: Any) -> None:
        walked.append(call.op)
        after(self, call)

    monkeypatch.setattr(kind, "after", counted)
    for light in (True, False):
        if not light:
            monkeypatch.setattr(kind, "light", lambda self, traits: None)
        with kind() as tool:
            _program(device)
        found.append(_rows(tool))
        counts.append(tool.calls)
        walks.append(len(walked))
        walked.clear()
        assert not tool.findings()
    assert found[0] == found[1]
    assert counts[0] == counts[1]
    assert walks[0] < walks[1] - 19, "C++ watched some by itself"


def _look_alikes(device: str) -> list[Callable[[], Any]]:
    """Calls of a few functions whose arguments differ in one thing each: what tells them apart must be in their key."""
    base = torch.arange(24.0, device=device).reshape(2, 3, 4)
    shaped = [
        base,
        base.transpose(0, 2),
        base[:, :, ::2],
        base[1:],
        base.view(6, 4),
        base.view(24),
        base.to(torch.float64),
    ]
    shaped += [
        base.to(torch.complex64),
        base.to(torch.complex64).conj(),
        base.detach().clone().requires_grad_(),
        base[:0],
    ]
    shaped += [torch.nn.Parameter(base.clone()), base.to(torch.int64), base.to(torch.int32), base[0, 0, 0]]
    found: list[Callable[[], Any]] = [lambda x=x: torch.add(x, x) for x in shaped]
    numbers = [0, 1, True, False, 0.0, -0.0, 1.0, float("inf"), -1, 2**40]
    found += [lambda n=n: torch.mul(base, n) for n in numbers]
    found += [lambda n=n: torch.add(base, 1, alpha=n) for n in (1, 1.0, 2)]
    found += [lambda d=d, k=k: torch.sum(base, d, keepdim=k) for d in (0, 1, (0,), [0, 1]) for k in (True, False)]
    found += [lambda d=d: torch.sum(base, 0, dtype=d) for d in (torch.float32, torch.float64, None)]
    found += [lambda s=s: base.view(s) for s in ((6, 4), [6, 4], base.view(6, 4).shape, (24,))]
    found += [lambda a=a: torch.nn.functional.gelu(base, approximate=a) for a in ("none", "tanh")]
    slices = [slice(0, 1), slice(0, 2), slice(None, 2), slice(0, None, 2), ..., None, 0]
    found += [lambda i=i: base[i] for i in slices]
    found += [lambda p=p: torch.cat(p) for p in ([base, base], (base, base), [base])]
    found += [lambda m=m: base.to(memory_format=m) for m in (torch.contiguous_format, torch.preserve_format)]
    places = [torch.device(device), torch.device(device, 0), device, f"{device}:0"]
    found += [lambda d=d, t=t: torch.ones(3, dtype=t, device=d) for d in places for t in (torch.float32, torch.int8)]
    found += [lambda d=d: base.to(d) for d in places]
    found += [lambda k=k: torch.einsum(k, base, base) for k in ("abc,abc->ab", "abc,abc->a", "abc,abc->" + "ab" * 1)]
    return found


@pytest.mark.parametrize("light", [True, False])
def test_calls_that_look_nearly_alike_are_told_apart(device: str, light: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the numbers that are read from tensors, as by Python's objects."""
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "off")
    if tensors.LIBRARY.wait() is None:
        pytest.skip(f"not compiled here {tensors.LIBRARY.failure}")
    order = [number for number in range(len(_look_alikes(device))) for _ in range(4)]
    random.Random(1).shuffle(order)
    if not light:
        monkeypatch.setattr(op_tools.OpObserve, "light", lambda self, traits: None)
    found = []
    for reading in (True, False):
        if not reading:
            COMPILED.set_reader(0, torch._C.TensorBase, frozenset(), torch.device)
        try:
            with op_tools.OpObserve() as observe:
                calls = _look_alikes(device)
                for number in order:
                    calls[number]()
        finally:
            monkeypatch.setattr(front, "_reading", False)
            front.use_reader()
        found.append(_rows(observe))
    assert found[0] == found[1]


def test_addresses_are_those_of_the_tensors(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "off")
    x = torch.ones(3, device=device)
    results = []
    with op_tools.OpObserve() as observe:
        for _ in range(3):
            results.append(torch.neg(x))
    assert [row["data_ptrs"] for row in observe.records()] == [[x.data_ptr(), y.data_ptr()] for y in results]
    assert [row["call_id"] for row in observe.records()] == sorted(row["call_id"] for row in observe.records())


def test_threads_with_a_small_stack_are_watched(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "off")
    x = torch.ones(3, device=device)
    before = threading.stack_size(1 << 17)
    try:
        with op_tools.OpObserve() as observe:
            thread = threading.Thread(target=lambda: [torch.neg(x) for _ in range(5)])
            thread.start()
            thread.join()
    finally:
        threading.stack_size(before)
    assert len(observe.records()) == 5


def test_what_goes_wrong_is_a_finding(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "off")
    x = torch.ones(3, device=device)
    with op_tools.OpObserve() as observe:
        torch.neg(x)
        plan = INTERCEPTOR._plans[torch.neg]  # type: ignore[index]
        light = list(plan.light)
        light[4] = {}  # no site is known

        def broken(*seen: Any) -> int:
            raise OSError("disk full")

        light[5] = broken
        plan.light = tuple(light)
        assert torch.equal(torch.neg(x).cpu(), -torch.ones(3))
        torch.neg(x)
    assert [(f.kind, f.op) for f in observe.findings()] == [("tool-failure", "torch.neg")]
    assert "disk full" in observe.findings()[0].message


def test_a_tool_of_ones_own_sees_every_call(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "off")

    class Mine(op_tools.OpObserve):
        seen = 0

        def after(self, call: Any) -> None:
            Mine.seen += 1
            super().after(call)

    x = torch.ones(3, device=device)
    with Mine():
        for _ in range(4):
            torch.neg(x)
    assert Mine.seen == 4


Measure = Callable[[list[torch.Tensor], list[int]], list[bool]]


def _ledgers(*measures: Measure) -> list[Any]:
    """One in Python and one that is compiled."""
    library = ledger.LIBRARY.wait()
    assert library is not None, ledger.LIBRARY.failure
    first, second = measures if len(measures) == 2 else measures * 2
    return [ledger.Ledger(first, _nothing), library.Ledger(second, _nothing, _nothing, 0)]


def _nothing(*_: Any) -> None:
    pass


def _all(new: list[torch.Tensor], numbers: list[int]) -> list[bool]:
    return [True for _ in new]


def test_ledgers_agree(device: str) -> None:
    rng = random.Random(0)
    measured: list[list[Any]] = [[], []]

    def measuring(seen: list[Any]) -> Measure:
        def measure(new: list[torch.Tensor], numbers: list[int]) -> list[bool]:
            seen.extend((id(t), number) for t, number in zip(new, numbers))
            return [t.shape != (2, 3) for t in new]

        return measure

    both = _ledgers(*map(measuring, measured))
    tensors: list[torch.Tensor | None] = [None]
    makers: list[Callable[[], Any]] = [
        lambda: torch.ones(4, 3, device=device),
        lambda: torch.ones(2, device=device, dtype=torch.int64),
        lambda: torch.ones(0, device=device),
        lambda: torch.ones(2, 3, device=device),  # cannot be measured
        lambda: rng.choice([t for t in tensors if t is not None] or [torch.ones(2, device=device)]).t(),
        lambda: rng.choice([t for t in tensors if t is not None] or [torch.ones(2, device=device)])[1:],
        lambda: torch.ones(3, device=device, dtype=torch.complex64),
    ]
    for _ in range(400):
        action = rng.random()
        if action < 0.35:
            made = rng.choice(makers)()
            tensors.append(made if made.dim() < 3 else None)
        elif action < 0.5 and len(tensors) > 4:
            del tensors[rng.randrange(len(tensors))]
        elif action < 0.6:
            written = rng.choice(tensors)
            if written is not None:
                written.add_(1)
        elif action < 0.62:
            for one in both:
                one.clear()
        elif action < 0.66:
            fresh = torch.empty(3, device=device)
            tensors.append(fresh)
            for one in both:
                one.leave_alone([fresh])
        some = [None, *[rng.choice(tensors)] * rng.randrange(3)]
        arriving = [one.look(some) for one in both]
        assert arriving[0] == arriving[1]
        for one, pairs in zip(both, arriving):
            one.enter(7, 8, True, 9, pairs, pairs[:2], "call")
        assert measured[0] == measured[1]
        assert both[0].reused == both[1].reused
    logs = [one.take() for one in both]
    assert logs[0] == logs[1]
    assert len(logs[0][2]) > 100
    assert [one.take() for one in both] == [(b"", b"", [])] * 2


def test_a_ledger_does_not_keep_tensors(device: str) -> None:
    for one in _ledgers(_all):
        for _ in range(10_000):
            one.look([torch.empty(1, device=device)])
        assert one.reused == 0, "another tensor at the same address is another tensor"


def test_errors_of_measuring_come_through(device: str) -> None:
    def broken(new: list[torch.Tensor], numbers: list[int]) -> list[bool]:
        raise OSError("no kernel")

    tensor = torch.ones(2, device=device)
    for one in _ledgers(broken):
        for _ in range(2):  # it was not measured: it is tried again
            with pytest.raises(OSError, match="no kernel"):
                one.look([tensor])
    with pytest.raises(TypeError):
        _ledgers(lambda new, numbers: [])[1].look([tensor])


def _failures(tool: Any) -> list[str]:
    return [f"{found.op}: {found.message}" for found in tool.findings() if found.kind == "tool-failure"]


def test_a_backward_pass_after_the_tool_has_stopped(device: str) -> None:
    assert ledger.LIBRARY.wait() is not None
    for _ in range(2):
        x = torch.ones(3, 4, device=device, requires_grad=True)
        with op_tools.OpOverflowCheck() as tool:
            for _ in range(2):
                loss = (x * 2).relu_().mul(2).sum()
        loss.backward()
        assert _failures(tool) == []


def test_a_tool_that_stops_in_the_middle_of_a_call(device: str) -> None:
    assert ledger.LIBRARY.wait() is not None
    x = torch.ones(4, device=device, requires_grad=True)
    tools: list[Any] = [op_tools.OpOverflowCheck(), op_tools.OpTimeMeasure()]
    for tool in tools:
        tool.start()
        for _ in range(2):
            y = x.exp()
        y.register_hook(lambda _, tool=tool: tool.stop())
        y.mul(2).sum().backward()
        INTERCEPTOR.take_off()  # PyTorch has put the mode back after the pass, as it does with every mode
        assert _failures(tool) == []


def test_a_call_that_ends_under_the_next_tool_is_not_of_it(device: str) -> None:
    backward_clock.LIBRARIES.wait()
    rows = []
    with op_tools.OpTimeMeasure() as first:
        old = first._clock  # what a call under way remembers
    with op_tools.OpTimeMeasure() as second:
        assert old is not None or second._clock is None
        for clock in (old, second._clock):
            assert clock is not None
            *_, address, number = clock.functions
            ran = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 6)(address)
            ran(None, None, 7, 0, 0, 0, 0, number)
            rows.append(second._clock.counts().waiting)
    assert rows == [0, 1]


def test_gradients_of_attention_weights_are_their_own(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ledger.LIBRARY.wait() is not None
    found = []
    for light in (True, False):
        if not light:
            monkeypatch.setattr(op_tools.OpOverflowCheck, "light", lambda self, traits: None)
        torch.manual_seed(0)
        attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).to(device)
        with op_tools.OpOverflowCheck() as tool:
            for _ in range(3):
                x = torch.randn(2, 3, 8, device=device, requires_grad=True)
                y, weights = attention(x, x, x, average_attn_weights=False)
                (y.sum() + (weights * weights).sum()).backward()
        rows = [r for r in tool.records() if r["op"].endswith("multi_head_attention_forward")]
        found.append([(r["role"], r["tensor"], r["min"], r["max"]) for r in rows if r["role"] == "grad_outputs"])
    assert found[0] == found[1]


@pytest.mark.parametrize("native", ["1", "0"])
def test_a_view_whose_base_was_changed_is_no_failure(device: str, native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_TOOLS_NATIVE", native)
    assert ledger.LIBRARY.wait() is not None
    assert book.LIBRARY.wait() is not None
    for name in ("OpOverflowCheck", "OpTrace"):
        with getattr(op_tools, name)() as tool:
            for _ in range(3):
                x = torch.ones(4, 3, device=device, requires_grad=True).clone()
                first, *_ = x.unbind()
                x.mul_(2)
                assert bool((first > 0).all())
        assert _failures(tool) == []


_INTERRUPTED = """
import os, signal
import ditorch
import torch
import op_tools
from op_tools.native import ledger
assert ledger.LIBRARY.wait() is not None
from op_tools.tools.overflow_check import OpOverflowCheck
own = OpOverflowCheck._measure
armed = False

def measure(self, tensor, number):
    global armed
    if armed:
        armed = False
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass
    return own(self, tensor, number)

OpOverflowCheck._measure = measure
signal.signal(signal.SIGINT, signal.default_int_handler)
x = torch.ones(3, device="cuda", requires_grad=True)
with op_tools.OpOverflowCheck() as tool:
    try:
        for _ in range(2):
            y = x.exp().mul(2).cpu().sum()
        armed = True
        y.backward()
        for _ in range(1000):
            pass
        print("nothing came")
    except KeyboardInterrupt:
        print("interrupted")
assert not [f for f in tool.findings() if f.kind == "tool-failure"], tool.findings()
"""


def test_ctrl_c_in_a_backward_pass_reaches_the_user(tmp_path: Path) -> None:
    if accelerator_type() == "cuda":
        pytest.skip("the GPU measures without Python")
    environment = {**os.environ, "OP_TOOLS_CONSOLE": "off", "OP_TOOLS_RESULTS_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.stdout.split() == ["interrupted"], ran.stdout + ran.stderr
