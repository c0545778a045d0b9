"""OpAutoCompare with processes that help: the same findings, whatever happens to them."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ditorch
import op_tools
from op_tools.compare import forkserver, process
from op_tools.compare import pool as compare_pool
from op_tools.compare.judges import workers as workers_module
from op_tools.compare.judges.workers import Workers
from op_tools.watch import sums

pytestmark = pytest.mark.skipif(not compare_pool.available(), reason="needs Linux")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(11, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.table(x)).transpose(0, 1)
        return self.down(F.dropout(F.gelu(self.up(x)), 0.1)).clamp_(-3, 3)


def train(device: str, steps: int = 2) -> list[float]:
    torch.manual_seed(3)
    net = Net().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        x = torch.randint(0, 11, (4, 5), device=device)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x).flatten(0, 1), x.t().flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[op_tools.OpAutoCompare]:
    monkeypatch.setenv("OP_AUTOCOMPARE_PROCESSES", "1")
    tool = op_tools.OpAutoCompare()
    tool.start()
    torch.ones(1, device="cuda").neg()
    pool = tool.judge(Workers).pool
    try:
        assert pool is not None
        assert pool.wait_until_ready() == 1
        yield tool
    finally:
        if tool.active:
            tool.stop()
        for helper in pool._processes if pool is not None else ():
            assert helper.process.poll() is not None, "the process has ended with the tool"


def plain(tool: Any) -> list[tuple[Any, ...]]:
    keys = ("name", "phase", "max_abs_diff", "max_relative_diff", "max_ulp", "cosine", "verdict", "module", "step")
    first = ("torch.Tensor.neg", "torch.ones")  # with which the fixture has the process started
    rows = [tuple(row[key] for key in keys) for row in tool.records() if not row["name"].startswith(first)]
    return [(*row[:-1], row[-1] - rows[0][-1]) for row in rows]


def test_rows_are_the_same_as_without(device: str, one_process: Any) -> None:
    answered: list[tuple[str, bool]] = []
    original = one_process.judge(Workers).pool._answered

    def note(given: Any, answer: Any) -> None:
        answered.append((given.call.op, answer is not None and answer.rows is not None))
        original(given, answer)

    one_process.judge(Workers).pool._answered = note
    losses = train(device)
    helped = plain(one_process)
    assert sum(right for _, right in answered) > 15, "the first call of a kind stays here, and so does its backward"
    assert {op.rpartition(".")[2] for op, right in answered if not right} <= {"dropout", "randint"}, "random ones"
    one_process.stop()
    os.environ["OP_AUTOCOMPARE_PROCESSES"] = "0"
    with op_tools.OpAutoCompare() as alone:
        assert train(device) == losses
    ours, theirs = plain(alone), helped
    assert [[v for v in row if not isinstance(v, float)] for row in ours] == [
        [v for v in row if not isinstance(v, float)] for row in theirs
    ]
    for mine, other in zip(ours, theirs):  # sums over several cores end in other digits
        numbers = [v for v in mine if isinstance(v, float)]
        assert numbers == pytest.approx([v for v in other if isinstance(v, float)], rel=1e-6, abs=1e-12, nan_ok=True)
    assert train(device) == losses
    assert {(f.op, f.kind) for f in alone.findings()} == {(f.op, f.kind) for f in one_process.findings()}


@pytest.mark.skipif(ditorch.backend.name != "soft", reason="faults are planted in the software accelerator")
@pytest.mark.parametrize(
    ("fault", "phase", "module"),
    [("addmm: noise=1e-2, nth=1", "forward", "down"), ("native_layer_norm_backward: noise=1e-2", "backward", "norm")],
)
def test_what_is_wrong_is_found_and_saved(fault: str, phase: str, module: str, device: str, one_process: Any) -> None:
    from ditorch.soft import faults

    with faults.plant(fault):
        train(device, steps=1)
    one_process.stop()
    blames = one_process.blames
    assert blames
    assert blames[0].phase == phase
    assert blames[0].module == module
    assert list((op_tools.settings.results_dir() / "op_capture_results").rglob("*.pth"))
    assert {row["verdict"] for row in one_process.records()} == {"right", "wrong"}


def test_the_run_goes_on_when_a_process_is_killed(device: str, one_process: Any) -> None:
    train(device, steps=1)
    one_process.wait()
    x = torch.randn(4, 4, device=device, requires_grad=True)
    torch.exp(x)  # the first of its kind stays here
    y = torch.exp(x)
    one_process.wait()
    (helper,) = one_process.judge(Workers).pool._processes
    os.kill(helper.process.pid, signal.SIGKILL)
    end = time.monotonic() + 30
    while not helper.ended and time.monotonic() < end:
        time.sleep(0.01)
    y.sum().backward()  # its arguments were over there
    train(device, steps=1)
    rows = one_process.records()
    assert {row["verdict"] for row in rows} == {"right"}
    assert len({row["step"] for row in rows}) >= 2
    assert [f.message for f in one_process.findings() if "exited" in f.message] == [
        "not comparable: the worker holding its arguments exited"
    ]


def test_a_process_that_is_killed_while_it_works(device: str, one_process: Any) -> None:
    (helper,) = one_process.judge(Workers).pool._processes
    os.kill(helper.process.pid, signal.SIGSTOP)
    calls = 30
    x = torch.randn(64, 64, device=device)
    for _ in range(calls):
        x = torch.tanh(x)
    end = time.monotonic() + 30
    expected = calls - 2  # calls whose neighbours are guarded stay here: the first of a kind, and a sample
    while len(helper.flights) < expected and time.monotonic() < end:
        time.sleep(0.01)
    sent = len(helper.flights)
    os.kill(helper.process.pid, signal.SIGKILL)
    assert sent >= expected
    rows = [row["verdict"] for row in one_process.records() if "tanh" in row["name"]]
    assert rows == ["right"] * 2 * calls, "they are compared here"


def test_a_process_that_was_stopped_does_not_keep_the_run_from_ending(
    device: str, one_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (helper,) = one_process.judge(Workers).pool._processes
    os.kill(helper.process.pid, signal.SIGSTOP)
    monkeypatch.setattr(process, "_STALLED_SECONDS", 1.0)
    x = torch.randn(64, 64, device=device)
    for _ in range(10):
        x = torch.tanh(x)
    one_process.wait()
    assert helper.ended
    rows = [row["verdict"] for row in one_process.records() if "tanh" in row["name"]]
    assert rows == ["right"] * 20, "they are compared here"


def test_a_process_that_exits_while_it_is_sent_a_call(device: str, one_process: Any) -> None:
    pool = one_process.judge(Workers).pool
    (helper,) = pool._processes
    one_process.wait()
    send = helper._connection.send

    def send_to_nobody(message: Any) -> None:
        if message[0] != "job":
            send(message)
            return
        os.kill(helper.process.pid, signal.SIGKILL)
        end = time.monotonic() + 30
        while helper.flights and time.monotonic() < end:  # the run has noticed, and compares the call itself
            time.sleep(0.01)
        raise BrokenPipeError

    helper._connection.send = send_to_nobody
    torch.tanh(torch.randn(4, 4, device=device))
    rows = [row["verdict"] for row in one_process.records() if "tanh" in row["name"]]
    assert rows == ["right"] * 2
    assert (pool._flying, helper.load) == (0, 0), "it came back once"


def test_small_calls_wait_for_the_processes_to_start(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_AUTOCOMPARE_PROCESSES", "1")
    answered = []
    original = Workers._answered
    monkeypatch.setattr(Workers, "_answered", lambda *args: (answered.append(args[1].call.op), original(*args))[1])
    with op_tools.OpAutoCompare() as tool:
        x = torch.randn(8, 8, device=device, requires_grad=True)
        for _ in range(4):
            torch.tanh(x).sum().backward()
        pool = tool.judge(Workers).pool
        assert not pool.is_ready(), "it takes seconds to start"
        assert pool.wait_until_ready() == 1
    assert answered.count("torch.tanh") >= 4, "some of a kind stay here"
    rows = [(row["phase"], row["verdict"]) for row in tool.records() if "tanh" in row["name"]]
    assert rows.count(("backward", "right")) == 4
    assert {verdict for _, verdict in rows} == {"right"}


def test_what_waits_is_compared_here_where_the_run_ends_first(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_AUTOCOMPARE_PROCESSES", "1")
    with op_tools.OpAutoCompare() as tool:
        for _ in range(3):
            torch.tanh(torch.randn(8, 8, device=device))
    rows = [row["verdict"] for row in tool.records() if "tanh" in row["name"]]
    assert rows == ["right"] * 6


def test_sums_of_gradients_go_to_the_processes(device: str, one_process: Any) -> None:
    answered = []
    pool = one_process.judge(Workers).pool
    original = pool._answered
    pool._answered = lambda job, answer: (answered.append(job.call.op), original(job, answer))[1]
    assert sums.LIBRARY.wait() is not None, sums.LIBRARY.failure
    x = torch.randn(16, 16, device=device, requires_grad=True)
    for _ in range(6):
        (torch.sin(x) + torch.cos(x)).sum().backward()
    rows = [row["verdict"] for row in one_process.records() if row["name"].startswith("autograd.")]
    assert len(rows) >= 6
    assert set(rows) == {"right"}
    assert any(op.startswith("autograd.") for op in answered), "the first of a kind stay here"


def test_own_functions_stay_here_and_backward_may_go_twice(device: str, one_process: Any) -> None:
    x = torch.randn(3, 3, device=device, requires_grad=True)
    vectors = torch.linalg.svd(x.detach())
    assert len(vectors) == 3
    y = torch.sin(x).sum()
    y.backward(retain_graph=True)
    y.backward()
    rows = one_process.records()
    assert {row["verdict"] for row in rows} == {"right"}
    assert sum(row["phase"] == "backward" and "sin" in row["name"] for row in rows) == 2


def test_processes_are_for_runs_that_last(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from op_tools.compare import cores
    from op_tools.compare.judges import workers

    monkeypatch.delenv("OP_AUTOCOMPARE_PROCESSES", raising=False)
    monkeypatch.setattr(cores, "available", lambda: 9)
    with op_tools.OpAutoCompare() as tool:
        train(device, steps=1)
        tool.wait()
        assert tool.judge(Workers).pool is None
        assert tool.judge(Workers).processes == 5
    monkeypatch.setattr(workers, "_WORTH_STARTING", 0.0001)
    monkeypatch.setattr(workers, "_MAX_PROCESSES", 1)
    with op_tools.OpAutoCompare() as tool:
        train(device, steps=1)
        tool.wait()
        assert tool.judge(Workers).pool is not None
    for options in ({"look": "device"}, {"mode": "once"}, {"budget": "2x"}):
        with op_tools.OpAutoCompare(**options) as tool:
            assert tool.judge(Workers) is None


def test_gradients_that_are_larger_than_the_shared_memory(
    device: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(compare_pool, "RING", 1 << 16)
    tool = request.getfixturevalue("one_process")
    x = torch.randn(8, 4, 8, 8, device=device, requires_grad=True)
    y = torch.relu(x)
    (torch.cat([y] * 16, dim=1) * 2).sum().backward()  # each piece is a view of all of it
    rows = [row for row in tool.records() if "relu" in row["name"]]
    assert [row["verdict"] for row in rows] == ["right"] * 3


def test_nothing_is_left_open(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_AUTOCOMPARE_PROCESSES", "2")
    x = torch.ones(2, device=device)
    counts = []
    kept = []  # tools that somebody still reads
    for _ in range(3):
        with op_tools.OpAutoCompare() as tool:
            torch.add(x, x)
        kept.append(tool)
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[2] <= counts[1] <= counts[0]
    assert "op_tools-comparisons" not in Path("/proc/self/maps").read_text()


def test_a_pool_that_starts_in_part_leaves_nobody_behind(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_AUTOCOMPARE_PROCESSES", "3")
    started: list[Any] = []
    made, fork = os.memfd_create, forkserver.ForkServer.fork

    def fails(name: str) -> int:
        if len(started) == 2:
            raise OSError("no files left")
        return made(name)

    def start(server: Any, *args: Any) -> Any:
        started.append((server, fork(server, *args)))
        return started[-1][1]

    monkeypatch.setattr(os, "memfd_create", fails)
    monkeypatch.setattr(forkserver.ForkServer, "fork", start)
    with op_tools.OpAutoCompare() as tool:
        torch.add(torch.ones(2, device=device), 1)
        assert tool.judge(Workers).pool is None
    assert len(started) == 2
    assert all(server._process.poll() is not None for server, _ in started)
    assert all(worker.poll() is not None for _, worker in started)
    assert {row["verdict"] for row in tool.records()} == {"right"}


def test_a_forked_child_does_not_keep_the_processes_of_its_parent(
    one_process: op_tools.OpAutoCompare, device: str
) -> None:
    pool = one_process.judge(Workers).pool
    assert pool is not None
    child = os.fork()
    if child == 0:
        kept = bool(compare_pool._pools) or not all(helper._connection.closed for helper in pool._processes)
        os._exit(int(kept))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not pool._processes[0]._connection.closed, "the parent goes on"


SCRIPT = """
import atexit, os, sys
tools = []
atexit.register(lambda: os.write(1, f"{tools[0]._teller.told} of {tools[0]._teller.numbered}".encode()))
import torch, ditorch, op_tools
tools.append(op_tools.OpAutoCompare())
tools[0].start()
x = torch.randn(64, 64, device="cuda")
torch.add(x, 1)
from op_tools.compare.judges.workers import Workers
from op_tools.watch import sums
tools[0].judge(Workers).pool.wait_until_ready()
for _ in range(100):
    x = torch.tanh(x)
"""


def test_a_run_that_ends_without_stop_tells_everything(tmp_path: Any) -> None:
    setting = {**os.environ, "OP_AUTOCOMPARE_PROCESSES": "1", "OP_TOOLS_RESULTS_DIR": str(tmp_path)}
    root = str(Path(__file__).resolve().parents[3])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=root, env=setting, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    told, _, submitted = done.stdout.split()
    assert told == submitted
    assert int(told) > 100


@pytest.mark.parametrize(("ranks", "expected"), [(None, 12), ("1", 12), ("2", 12), ("4", 4), ("8", 0), ("many", 12)])
def test_ranks_share_the_cores_of_a_machine(
    ranks: str | None, expected: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from op_tools.compare import cores

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr(cores, "available", lambda: 32)
    with op_tools.OpAutoCompare() as tool:
        workers = tool.judge(Workers)
        assert (workers.processes if workers is not None else 0) == expected


OWN = """
import torch

@torch.library.custom_op("own_in_processes::decayed", mutates_args=())
def decayed(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x * scale).cumsum(1)

decayed.register_fake(lambda x, scale: torch.empty_like(x))
decayed.register_autograd(
    lambda ctx, g: (g.flip(1).cumsum(1).flip(1) * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An operator of the user's own, in a module that can be imported."""
    file = tmp_path / "own_in_processes.py"
    file.write_text(OWN)
    os.utime(file, (1e9, 1e9))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("own_in_processes")
    del sys.modules["own_in_processes"]


class Changed(TorchDispatchMode):
    """The device returns something else."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self._scale = scale

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if "decayed" in str(func) and found.device.type != "cpu" and self._scale != 1:
            with torch._C.DisableTorchFunction():
                found.mul_(self._scale)
        return found


@pytest.mark.parametrize(("known", "scale"), [(True, 1.0), (True, 1.01), (False, 1.01)])
def test_operators_of_the_user_go_to_processes_that_get_them(
    own: Any, device: str, one_process: Any, known: bool, scale: float
) -> None:
    """Right or wrong, and where the process does not get it: the findings are those without."""
    answered: list[tuple[str, bool, bool]] = []
    workers = one_process.judge(Workers)
    original = workers.pool._answered

    def note(given: Any, answer: Any) -> None:
        answered.append((given.call.op, answer.known, answer.rows is not None))
        original(given, answer)

    workers.pool._answered = note
    if not known:
        Path(own.__file__).write_text("raise ImportError")
        os.utime(own.__file__, (1e9, 1e9))
    x, by = torch.randn(4, 9, 7, device=device, requires_grad=True), torch.rand(7, device=device)
    for _ in range(3):
        with Changed(scale):
            y = torch.ops.own_in_processes.decayed(x, by)
        y.sum().backward()
        one_process.wait()
    one_process.stop()
    ours = [(got, right) for name, got, right in answered if name == "own_in_processes.decayed"]
    assert ours, "it was sent"
    assert all(got == known for got, _ in ours), answered
    assert any(right for _, right in ours) == known
    if not known:
        assert len(ours) <= 2, "the process has said that it does not know it"
    assert [b.op for b in one_process.blames] == ["own_in_processes.decayed"] * (0 if scale == 1 else 3)


def test_where_it_cannot_be_told_where_an_operator_comes_from_it_is_judged_here(
    own: Any, device: str, one_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(function: Any) -> Any:
        raise ImportError("a module raises when it is looked at")

    monkeypatch.setattr(workers_module, "origin_of", broken)
    x, by = torch.randn(4, 9, 7, device=device), torch.rand(7, device=device)
    torch.ops.own_in_processes.decayed(x, by)
    one_process.stop()
    assert "own_in_processes.decayed" in {row["op"] for row in one_process.records()}
    assert not one_process.findings()
