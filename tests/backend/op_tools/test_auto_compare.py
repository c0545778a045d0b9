"""OpAutoCompare: what it calls wrong, what it never calls wrong, whom it blames, what it leaves behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import ditorch
import op_tools
from op_tools import launch, settings
from op_tools.compare import cores, pieces
from op_tools.compare.judges.host import Comparer, Host
from op_tools.compare.judges.views import Views
from op_tools.replay.captured import CapturedOp
from op_tools.replay.check import replay
from op_tools.replay.outcome import Options

ROOT = Path(__file__).resolve().parents[3]


class Block(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.proj = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(torch.nn.Module):
    def __init__(self, width: int = 32, layers: int = 2, save_memory: bool = False) -> None:
        super().__init__()
        self.token = torch.nn.Embedding(64, width)
        self.blocks = torch.nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, 64, bias=False)
        self.save_memory = save_memory

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.save_memory else block(x)
        logits = self.head(self.norm(x[:, :-1]))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(
    device: str,
    steps: int = 2,
    low: torch.dtype | None = None,
    after_step: Callable[[], object] = lambda: None,
    **options: Any,
) -> list[float]:
    torch.manual_seed(3)
    model = GPT(**options).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 64, (2, 17)).to(device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast(torch.device(device).type, dtype=low or torch.bfloat16, enabled=low is not None):
            loss = model(tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after_step()
    return losses


@pytest.fixture
def faults(device: str) -> Iterator[Any]:
    if not device.startswith("soft") and getattr(ditorch.backend, "name", "") != "soft":
        pytest.skip("only the software accelerator can be made to fail on purpose")
    from ditorch.soft import faults as module

    yield module
    module.clear()


@pytest.mark.parametrize("low", [None, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])
def test_a_healthy_training_is_called_right(device: str, low: torch.dtype | None) -> None:
    bare = train(device, low=low)
    with op_tools.OpAutoCompare() as compared:
        watched = train(device, low=low)
    assert watched == bare, "losses are the same to the last bit"
    assert [f for f in compared.findings() if f.kind != "skipped"] == []
    rows = compared.records()
    assert {row["verdict"] for row in rows} == {"right"}
    assert {row["phase"] for row in rows} == {"forward", "backward"}
    assert any(row["name"].startswith("torch.nn.functional.linear grad[") for row in rows)
    assert {"blocks.1.qkv", "blocks.0.down", "head"} <= {row["module"] for row in rows}


class ResNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 16, 7, 2, 3)
        self.first, self.second = (torch.nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = torch.nn.BatchNorm2d(16), torch.nn.BatchNorm2d(16)
        self.head = torch.nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.stem(x), 3, 2, 1)
        x = F.relu(x + self.norm2(self.second(F.relu(self.norm1(self.first(x)), inplace=True))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = torch.nn.LSTM(12, 24, 2, batch_first=True), torch.nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x.flatten(1)[:, :96].view(-1, 8, 12))[0][:, -1])


@pytest.mark.parametrize("low", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [ResNet, Recurrent])
def test_other_healthy_models(device: str, kind: type[torch.nn.Module], low: torch.dtype | None) -> None:
    torch.manual_seed(1)
    model = kind().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(4, 3, 16, 16).to(device), torch.randint(0, 10, (4,)).to(device)
    with op_tools.OpAutoCompare() as compared:
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast(torch.device(device).type, dtype=low or torch.bfloat16, enabled=low is not None):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    found = [f for f in compared.findings() if f.kind != "skipped"]
    if ditorch.backend.name == "cuda":  # what benchmarks/cuda_evidence.py shows of CUDA's own kernels
        known = {(ResNet, torch.bfloat16): "torch.nn.functional.batch_norm", (Recurrent, None): "torch.lstm"}
        found = [f for f in found if f.op != known.get((kind, low))]
    assert found == []


def test_norms_of_lists_of_tensors(device: str) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(n).bfloat16().float().to(device) for n in (9216, 32, 150_000)]
    with op_tools.OpAutoCompare() as compared:
        torch._foreach_norm(tensors)
    assert {row["verdict"] for row in compared.records()} == {"right"}


def test_long_sums_inside_a_fused_kernel(device: str) -> None:
    torch.manual_seed(0)
    norm = torch.nn.LayerNorm(256).to(device)
    x = torch.randn(512, 256).to(device).requires_grad_()
    with op_tools.OpAutoCompare() as compared:
        norm(x).backward(torch.randn(512, 256).to(device))
    assert {row["verdict"] for row in compared.records()} == {"right"}, compared.findings()


def test_checkpointing_is_compared_and_not_disturbed(device: str) -> None:
    bare = train(device, save_memory=True)
    with op_tools.OpAutoCompare() as compared:
        assert train(device, save_memory=True) == bare
    assert [f for f in compared.findings() if f.kind != "skipped"] == []


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_wrong_operator_is_named(device: str, faults: Any, phase: str) -> None:
    operator = "gelu" if phase == "forward" else "gelu_backward"
    with faults.plant(f"{operator}: noise=1e-2, nth=2"), op_tools.OpAutoCompare() as compared:
        train(device, steps=1)
    blames = compared.blames
    assert [(b.op, b.phase) for b in blames] == [("torch.nn.functional.gelu", phase)], blames
    # backward meets the blocks in reverse
    assert blames[0].module == ("blocks.1" if phase == "forward" else "blocks.0")
    assert "self.down(F.gelu(self.up" in blames[0].location
    text = "\n".join(compared.summary())
    assert f"first wrong: torch.nn.functional.gelu ({phase})" in text
    assert "nothing wrong went into them" in text


def test_a_wrong_gradient_is_blamed_on_its_argument(device: str, faults: Any) -> None:
    """The input needs no gradient: the weight's is still that of argument 1, and has the parameter's name."""
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(8, 4))).to(device)
    x = torch.randn(6, 8, device=device)
    with faults.plant("mm: noise=0.1, phase=backward"), op_tools.OpAutoCompare() as compared:
        model(x).sum().backward()
    rows = {row["name"]: row for row in compared.records() if row["phase"] == "backward"}
    op = "torch.nn.functional.linear"
    assert list(rows) == ["torch.Tensor.sum grad", *[f"{op} grad[{n}]" for n in range(3)]]
    assert [rows[f"{op} grad[{n}]"]["verdict"] for n in range(3)] == ["right", "wrong", "right"]
    absent = rows[f"{op} grad[0]"]
    assert (absent["allclose"], absent["atol"], absent["rtol"], absent["error_info"]) == (True, 0.0, 0.0, "")
    assert rows[f"{op} grad[1]"]["reason"].startswith("parameter 0.0.weight: ")
    assert compared.blames[0].reason.startswith(f"{op} gradient of weight (grad[1]): parameter 0.0.weight: ")
    assert any(f"{op} gradient of weight (grad[1]): parameter 0.0.weight: " in line for line in compared.summary())
    assert compared.csv_path is not None
    assert f"{op} grad[1]," in compared.csv_path.read_text()
    folder = Path(compared.blames[0].folder)
    assert f"{op} grad[1]: parameter 0.0.weight: " in (folder / "reproduce.py").read_text()
    replayed = replay(folder / "device", Options(acc_check=True))
    assert [row.label for row in replayed.rows if row.part == "grad_input"] == [f"{op} grad[{n}]" for n in range(3)]
    assert replayed.like_capture.startswith("grad[1] differs")


def test_spreading_errors_do_not_hide_their_origin(device: str, faults: Any) -> None:
    with faults.plant("native_layer_norm: noise=0.3"), op_tools.OpAutoCompare() as compared:
        train(device, steps=1)
    wrong = {row["op"] for row in compared.records() if row["verdict"] == "wrong"}
    assert wrong == {"torch.nn.functional.layer_norm"}, "what works on wrong values is not wrong itself"
    assert compared.blames[0].module == "blocks.0.norm1"
    assert not any(line.startswith("  0 later events") for line in compared.summary())


def run_script(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize(
    "where",
    [pytest.param("forward", marks=pytest.mark.slow), "backward", pytest.param("bfloat16", marks=pytest.mark.slow)],
)
def test_the_script_repeats_the_fault_alone(device: str, faults: Any, where: str) -> None:
    fault = {"forward": "addmm: noise=0.1", "backward": "mm: noise=0.1, phase=backward", "bfloat16": "addmm: noise=0.5"}
    low = torch.bfloat16 if where == "bfloat16" else None
    with faults.plant(fault[where]), op_tools.OpAutoCompare(ops=["torch.nn.functional.linear"]) as compared:
        train(device, steps=1, low=low)
    script = Path(compared.blames[0].folder) / "reproduce.py"
    assert script.exists()
    faulty = run_script(script, DITORCH_SOFT_FAULTS=fault[where].replace(", phase=backward", ""))
    assert faulty.returncode == 1, faulty.stdout + faulty.stderr
    assert "the difference is still there" in faulty.stdout
    healthy = run_script(script)
    assert healthy.returncode == 0, healthy.stdout + healthy.stderr
    assert "the difference is gone" in healthy.stdout


def test_a_call_saved_under_autocast_is_replayed_under_autocast(device: str, faults: Any) -> None:
    x, linear = torch.randn(4, 8).to(device), torch.nn.Linear(8, 3).to(device)
    low = torch.autocast(torch.device(device).type, dtype=torch.bfloat16)
    with faults.plant("addmm: noise=0.5"), op_tools.OpAutoCompare() as compared, low:
        y = linear(x)
    op = CapturedOp(Path(compared.blames[0].folder) / "device", device)
    op.prepare()
    assert op.run_forward().dtype == y.dtype == torch.bfloat16
    assert (op.region.autocast, op.region.rounded_to) == (torch.bfloat16, torch.bfloat16)


def test_calls_that_only_move_values_are_compared_each_time(
    device: str, faults: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time in their own dtype, and no less strictly."""
    again = []
    moved = Comparer._moved_as_before
    monkeypatch.setattr(Comparer, "_moved_as_before", lambda self, job: again.append(job.call.op) or moved(self, job))
    x, sent = torch.randn(8, 16, device=device, requires_grad=True), torch.ones(16, 8, device=device)

    def step() -> None:
        x.t().flip(0).backward(sent)

    with op_tools.OpAutoCompare() as compared:
        step()
        compared.wait()
        assert not again
        step()
        compared.wait()
        assert set(again) == {"torch.Tensor.flip"}, "t runs no kernel"
        assert not compared.blames
        with faults.plant("flip: element=1e-3"):
            step()
    assert {(blame.op, blame.phase) for blame in compared.blames} == {
        ("torch.Tensor.flip", "forward"),
        ("torch.Tensor.flip", "backward"),
    }
    rows = [row for row in compared.records() if row["name"] == "torch.Tensor.flip output"]
    assert [row["verdict"] for row in rows] == ["right", "right", "wrong"]
    same = ("allclose", "max_abs_diff", "cosine", "max_ulp", "atol", "rtol", "error_info")
    assert [rows[0][k] for k in same] == [rows[1][k] for k in same]


def test_forward_passes_that_wait_for_a_backward_do_not_pile_up(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_AUTOCOMPARE_QUEUE_BYTES", str(1 << 20))  # a quarter of it for them
    x = torch.randn(64, 64, device=device, requires_grad=True)
    with op_tools.OpAutoCompare() as compared:
        room = compared.judge(Host).comparer.budget
        pending = [torch.nn.functional.gelu(x) for _ in range(20)]
        compared.wait()
        assert 0 <= room.left < (1 << 18) - (1 << 16), "some are kept, not all"
        sum(pending).sum().backward()
        compared.wait()
        del pending
    gc.collect()
    assert room.left == 1 << 18
    assert {row["verdict"] for row in compared.records()} == {"right"}
    assert sum(row["phase"] == "backward" and "gelu" in row["name"] for row in compared.records()) == 20


@pytest.mark.parametrize("broken", [False, True], ids=["healthy", "broken"])
def test_gradients_of_vectors_whose_signs_are_free(device: str, broken: bool, request: pytest.FixtureRequest) -> None:
    faults = request.getfixturevalue("faults") if broken else None
    drawn = [torch.randn(5, 5, generator=torch.Generator().manual_seed(seed)) for seed in range(12)]
    other = [x for x in drawn if bool(((x.to(device).svd().U.cpu() * x.double().svd().U).sum(0) < 0).any())]
    chosen = other or drawn[:3]
    if ditorch.backend.name == "soft":
        assert other, "the CPU has the same signs in both precisions: choose other matrices"

    def work() -> None:
        for matrix in chosen:
            x = matrix.to(device).requires_grad_()
            u, _, v = torch.linalg.svd(x)
            (u * u.detach().roll(1, 0)).sum().add((v * matrix.to(device)).sum()).backward()
            y = (matrix + matrix.T).to(device).requires_grad_()
            (torch.linalg.eigh(y).eigenvectors * matrix.to(device)).sum().backward()

    with op_tools.OpAutoCompare(ops=["torch.linalg.svd", "torch.linalg.eigh"]) as compared:
        if faults is None:
            work()
        else:
            with faults.plant("mm: noise=1e-2, phase=backward"):
                work()
    assert {row["phase"] for row in compared.records()} == {"forward", "backward"}
    found = [f for f in compared.findings() if f.kind == "difference"]
    assert bool(found) == broken, found


def test_in_place_and_out_calls_are_compared_by_what_they_wrote(device: str, faults: Any) -> None:
    x, out = torch.randn(64, device=device), torch.empty(64, device=device)
    with faults.plant("add.out: noise=0.1"), op_tools.OpAutoCompare() as compared:
        torch.add(x, x, out=out)
        x.mul_(2)
    verdicts = {(row["op"], row["verdict"]) for row in compared.records()}
    assert ("torch.add", "wrong") in verdicts
    assert ("torch.Tensor.mul_", "right") in verdicts
    assert ("torch.Tensor.mul_", "wrong") not in verdicts


def test_random_operators_are_never_wrong(device: str) -> None:
    x = torch.randn(2000, device=device)
    with op_tools.OpAutoCompare() as compared:
        F.dropout(x, 0.5)
        torch.rand_like(x)
        torch.randperm(100, device=device)
        x.clone().normal_()
    assert not [row for row in compared.records() if row["verdict"] == "wrong"]
    assert {f.kind for f in compared.findings()} <= {"skipped"}


def test_each_kind_once(device: str) -> None:
    x = torch.randn(8, device=device)
    with op_tools.OpAutoCompare(mode="once") as compared:
        for _ in range(5):
            x + 1
            torch.randn(3, device=device) * 2
    assert compared.calls["torch.Tensor.add"] == 1
    assert compared.calls["torch.Tensor.mul"] == 1
    assert any("left out (each kind of call once)" in line for line in compared.summary())


@pytest.mark.parametrize("every", [2, 5])
def test_once_finds_a_kernel_that_is_wrong_now_and_then(device: str, every: int) -> None:
    if getattr(ditorch.backend, "name", "") != "soft":
        pytest.skip("only the software accelerator can be made to fail on purpose")
    from ditorch.soft import faults

    x = torch.randn(8, 8, device=device)
    with faults.plant(f"mm: noise=1e-2, every={every}"), op_tools.OpAutoCompare(mode="once") as compared:
        for _ in range(300):
            torch.mm(x, x)
            torch.exp(x)
    assert {(blame.op, blame.phase) for blame in compared.blames} == {("torch.mm", "forward")}
    assert any("gave other bits and were compared in full" in line for line in compared.summary())
    assert compared.calls["torch.exp"] < 10


def test_once_makes_calls_again_only_where_that_changes_nothing(device: str) -> None:
    x, total = torch.ones(4, device=device), torch.zeros(4, device=device)
    with op_tools.OpAutoCompare(mode="once") as compared:
        for _ in range(200):
            total.add_(x)
            torch.rand(3, device=device)
            x.view(2, 2)
            torch.exp(x)
    assert total.tolist() == [200.0] * 4
    assert not compared.blames
    assert any("were made a second time: all gave the same bits" in line for line in compared.summary())


def test_a_budget_leaves_calls_out_and_says_so(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_AUTOCOMPARE_BUDGET", "1.2x")
    x = torch.randn(64, 64, device=device)
    with op_tools.OpAutoCompare() as compared:
        for _ in range(3000):
            x @ x
    total = compared.calls["torch.Tensor.matmul"] + compared.calls["torch.Tensor.__matmul__"]
    assert 1 <= total < 3000
    assert any("budget of 1.2x" in line for line in compared.summary())


@pytest.mark.parametrize(
    ("variable", "value"),
    [("OP_AUTOCOMPARE_BUDGET", "fast"), ("OP_AUTOCOMPARE_MODE", "twice"), ("OP_AUTOCOMPARE_STANDARD", "mine")],
)
def test_settings_that_cannot_be_meant(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(op_tools.SettingsError, match=variable):
        op_tools.OpAutoCompare().start()
    monkeypatch.delenv(variable)
    tool = op_tools.OpAutoCompare(mode="twice")
    with pytest.raises(op_tools.SettingsError, match="mode"):
        tool.start()


def test_tolerances_that_are_set_decide(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1000, device=device)
    monkeypatch.setenv("EXP_AUTOCOMPARE_ERROR_TOLERANCE_FLOAT32", "0,0")
    with op_tools.OpAutoCompare(ops=["torch.exp"]) as compared:
        torch.exp(x)
    assert [row["verdict"] for row in compared.records() if row["name"].endswith("output")] == ["wrong"]
    monkeypatch.setenv("EXP_AUTOCOMPARE_ERROR_TOLERANCE_FLOAT32", "1e-5,1e-5")
    with op_tools.OpAutoCompare(ops=["torch.exp"]) as compared:
        torch.exp(x)
    assert [row["verdict"] for row in compared.records() if row["name"].endswith("output")] == ["right"]


def test_the_golden_dtype_can_be_chosen(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "full")
    monkeypatch.setenv("LINEAR_OP_DTYPE_CAST_DICT", "torch.float32->torch.bfloat16")
    x, w = torch.randn(3, 4, device=device), torch.randn(5, 4, device=device)
    with op_tools.OpAutoCompare():
        F.linear(x, w)
    assert "cpu_dtype_cast_info(from:to): {torch.float32: torch.bfloat16}" in capsys.readouterr().out


def test_records_come_in_the_order_of_the_calls(device: str) -> None:
    x = torch.randn(200, 200, device=device)
    with op_tools.OpAutoCompare() as compared:
        for _ in range(10):
            torch.linalg.svdvals(x) if _ % 3 == 0 else torch.neg(x)
    ids = [row["call_id"] for row in compared.records()]
    assert ids == sorted(ids)
    assert len(set(ids)) == 10


def test_a_script_runs_under_a_tool_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("import sys, torch\nx = torch.ones(3, device='cuda')\nprint((x + 1).tolist(), sys.argv[1:])\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OP_TOOLS_CONSOLE": "summary"}
    command = [sys.executable, "-m", "op_tools.launch", "OpAutoCompare,OpObserve", str(script), "--flag"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "[2.0, 2.0, 2.0] ['--flag']" in done.stdout
    assert "OpAutoCompare summary" in done.stdout
    assert "OpObserve summary" in done.stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["OpNothing", "job.py"], "there is no tool 'OpNothing'"),
        (["OpObserve", "none.py"], "there is no script none.py"),
        (["OpObserve", "--steps", "3:1", "job.py"], "the range is empty"),
        (["OpObserve", "--steps", "x", "job.py"], "write A:B"),
        (["OpObserve", "--budget", "2x", "job.py"], "belong to OpAutoCompare"),
    ],
)
def test_a_launch_that_cannot_be_meant(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(words) == 2
    assert text in capsys.readouterr().err


def _used_twice(y: torch.Tensor) -> torch.Tensor:
    return (y * 2).sum() + y.clamp_(-1, 1).sum()


def _in_part(y: torch.Tensor) -> torch.Tensor:
    y[1:].clamp_(-1, 1)
    return y


CHANGES: dict[str, Any] = {
    "relu_": torch.relu_,
    "chain": lambda y: y.add_(1).mul_(2),
    "used twice": _used_twice,
    "in part": _in_part,
    "expanded": lambda y: y.relu_().sum(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("look", ["cpu", "device"])
def test_results_that_are_changed_in_place(change: str, look: str, device: str) -> None:
    # the result of a linear layer in three dimensions is a view of another one's, and gradients come by there
    layer, x = torch.nn.Linear(6, 5).to(device), torch.randn(4, 3, 6).to(device).requires_grad_()
    with op_tools.OpAutoCompare(look=look) as compared:
        for _ in range(3):
            CHANGES[change](layer(x)).square().sum().backward()
            compared.wait()
    assert not [f for f in compared.findings() if f.kind != "skipped"]
    rows = [row for row in compared.records() if row["phase"] == "backward" and "linear" in row["name"]]
    assert [row["verdict"] for row in rows] == ["right"] * 9


@pytest.mark.parametrize("to_complex", [True, False])
def test_views_of_another_dtype_that_are_changed_in_place(to_complex: bool, device: str) -> None:
    x = torch.randn(4, 3, 2).to(device)
    x = (x if to_complex else torch.view_as_complex(x)).requires_grad_()
    with op_tools.OpAutoCompare() as compared:
        for _ in range(3):
            y = x * 2
            view = (torch.view_as_complex if to_complex else torch.view_as_real)(y[1:])
            view.mul_(3).abs().sum().backward()
            compared.wait()
    assert not [f for f in compared.findings() if f.kind != "skipped"]
    rows = [row for row in compared.records() if row["name"] == "torch.Tensor.mul_ grad[0]"]
    assert [row["verdict"] for row in rows] == ["right"] * 3


def test_complex_half_numbers_that_are_moved(device: str) -> None:
    x = torch.randn(3, 2, device=device, dtype=torch.complex64).to(torch.complex32)
    with op_tools.OpAutoCompare() as compared:
        for _ in range(3):
            x.t().contiguous()
            compared.wait()
    assert not [f for f in compared.findings() if f.kind != "skipped"]


def test_a_fault_behind_a_result_that_is_changed_in_place_is_found(device: str, faults: Any) -> None:
    layer, x = torch.nn.Linear(6, 5).to(device), torch.randn(4, 3, 6).to(device).requires_grad_()
    with faults.plant("mm: noise=1e-2, phase=backward"), op_tools.OpAutoCompare() as compared:
        layer(x).relu_().sum().backward()
    assert {(f.op, f.kind) for f in compared.findings()} == {("torch.nn.functional.linear", "difference")}


def views_step(x: torch.Tensor) -> None:
    parts = x.transpose(0, 1).unsqueeze(0).split(2, dim=-1)
    y = parts[1].squeeze(0).expand(3, -1, -1)[1:].reshape(-1)
    (y * 2).sum().backward()


@pytest.mark.parametrize("look", ["cpu", "device"])
def test_calls_that_run_no_kernel_are_looked_at_once(look: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settle, seen = Host.settle, []
    monkeypatch.setattr(Host, "settle", lambda self, job: (seen.append(job.call.op), settle(self, job))[1])
    x = torch.randn(4, 5, device=device, requires_grad=True)
    with op_tools.OpAutoCompare(look=look) as compared:
        for _ in range(3):
            views_step(x)
            compared.wait()
    rows = [(r["name"], r["phase"], r["max_ulp"], r["verdict"]) for r in compared.records()]
    rows = [row for row in rows if not any(name in row[0] for name in (".mul", ".sum", "autograd."))]
    assert len(rows) % 3 == 0
    third = len(rows) // 3
    assert rows[:third] == rows[third : 2 * third] == rows[2 * third :]
    names = [op.rpartition(".")[2] for op in seen]
    assert [names.count(name) for name in ("transpose", "unsqueeze", "squeeze")] == [2, 2, 2], "forward and backward"
    assert not compared.findings()


def test_a_result_at_another_place_is_looked_at(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 4, device=device)
    flat = x.view(-1)
    narrow = torch.Tensor.narrow
    with op_tools.OpAutoCompare() as compared:
        for _ in range(2):
            narrow(flat, 0, 4, 4)
            compared.wait()
        kind, known = next(iter(compared.judge(Views).known.items()))
        place = (known.places[0][0], known.places[0][1] + 4, False, False)
        compared.judge(Views).known[kind] = known._replace(places=(place,))  # as if the device had erred by one element
        narrow(flat, 0, 4, 4)
        compared.wait()
        assert compared.judge(Views).known[kind].places == known.places, "compared in full, and learned again"
    assert {row["verdict"] for row in compared.records()} == {"right"}


def test_views_whose_place_a_value_decides(device: str) -> None:
    w = torch.randn(4, 3, device=device, requires_grad=True)
    starts = [torch.tensor(k, device=device) for k in (2, 0, 3, 1, 2)]
    with op_tools.OpAutoCompare() as compared:
        for start in starts:
            (w[start] * 2).sum().backward()
            torch.narrow(w, 0, start.cpu().clamp(max=1), 2).square().sum().backward()
            compared.wait()
    assert not [f for f in compared.findings() if f.kind != "skipped"]
    assert {row["verdict"] for row in compared.records()} == {"right"}


def test_an_interrupt_while_the_run_waits_loses_no_later_call(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, device=device)
    with op_tools.OpAutoCompare(ops=["torch.add"]) as compared:
        reserve = compared._judging._queue.reserve

        def interrupted(nbytes: int) -> bool:
            raise KeyboardInterrupt

        monkeypatch.setattr(compared._judging._queue, "reserve", interrupted)
        with pytest.raises(KeyboardInterrupt):
            torch.add(x, x)
        monkeypatch.setattr(compared._judging._queue, "reserve", reserve)
        for _ in range(3):
            torch.add(x, x)
    assert len({row["call_id"] for row in compared.records()}) == 3


@pytest.mark.parametrize("name", ["OpAutoCompare", "OpCapture", "OpTimeMeasure"])
def test_a_forked_child_that_leaves_the_block_does_not_hang(name: str, device: str) -> None:
    x = torch.ones(2, device=device)
    with getattr(op_tools, name)() as tool:
        for _ in range(20):
            torch.add(x, x)
        child = os.fork()
        if child == 0:
            try:
                tool.stop()
            finally:
                os._exit(0)
        end = time.monotonic() + 30
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                pytest.fail("the child waits for threads that it does not have")
            time.sleep(0.05)
    assert tool.records()


@pytest.mark.parametrize(("available", "expected"), [(2, [1, 4]), (8, [1, 4]), (16, [3, 4]), (64, [4])])
def test_a_comparison_gets_the_cores_that_are_there_and_a_large_one_more(
    available: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OP_AUTOCOMPARE_THREADS", "4")
    monkeypatch.setenv("OP_AUTOCOMPARE_QUEUE_BYTES", str(64 * 1024))
    given: list[int] = []
    monkeypatch.setattr(cores, "limit_kernels", given.append)
    monkeypatch.setattr(cores, "available", lambda: available)
    small, large = torch.rand(256, device="cuda"), torch.rand(128 * 1024, device="cuda")
    with op_tools.OpAutoCompare() as tool:
        for x in (small, large, small):
            torch.exp(x)
    assert sorted(set(given)) == expected
    assert not tool.findings()


def test_a_large_optimizer_is_compared_in_pieces(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "WORTH_IT", 1 << 14)
    monkeypatch.setattr(pieces, "_AT_ONCE", 1 << 14)
    counts: list[int] = []
    together = pieces.together

    def counting(op: str, judged: Any) -> Any:
        counts.append(len(judged))
        return together(op, judged)

    parameters = [torch.nn.Parameter(torch.randn(1000 + k, device=device)) for k in range(12)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)
    optimizer.step()
    rows = []
    for monkeypatched in (together, counting):
        monkeypatch.setattr(pieces, "together", monkeypatched)
        monkeypatch.setattr(pieces, "WORTH_IT", 1 << 14 if monkeypatched is counting else 1 << 40)
        with op_tools.OpAutoCompare() as tool:
            optimizer.step()
        assert not tool.findings()
        rows.append([(r["op"], r["name"], r["verdict"]) for r in tool.records()])
    assert max(counts) > 1
    assert rows[0] == rows[1]


def test_a_fault_in_a_piece_is_found_and_saved(device: str, faults: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "WORTH_IT", 1 << 12)
    monkeypatch.setattr(pieces, "_AT_ONCE", 1 << 12)
    tensors = [torch.randn(500 + k, device=device) for k in range(8)]
    others = [torch.randn_like(t) for t in tensors]
    with faults.plant("add: noise=1e-2, nth=3"), op_tools.OpAutoCompare() as compared:
        torch._foreach_add(tensors, others)
    found = [f for f in compared.findings() if f.kind == "difference"]
    assert [f.op for f in found] == ["torch._foreach_add"]
    assert list(settings.results_dir().rglob("reproduce.py"))


def test_lists_that_take_gradients_are_compared_as_a_whole(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "WORTH_IT", 1 << 12)
    monkeypatch.setattr(pieces, "_AT_ONCE", 1 << 12)
    tensors = [torch.randn(500 + k, device=device, requires_grad=True) for k in range(6)]
    with op_tools.OpAutoCompare() as compared:
        products = torch._foreach_mul(tensors, tensors)
        torch.stack([p.sum() for p in products]).sum().backward()
    rows = [r for r in compared.records() if r["op"] == "torch._foreach_mul"]
    assert {r["phase"] for r in rows} == {"forward", "backward"}
    assert {r["verdict"] for r in rows} == {"right"}
    assert not compared.findings()


def test_pieces_side_by_side_keep_their_order_and_their_errors() -> None:
    names: set[str] = set()

    def square(value: int) -> int:
        names.add(threading.current_thread().name)
        if value == 13:
            raise ValueError("thirteen")
        return value * value

    assert cores.side_by_side(square, range(10), 3) == [k * k for k in range(10)]
    assert names == {"op_tools-piece"}
    with pytest.raises(ValueError, match="thirteen"):
        cores.side_by_side(square, range(20), 4)


def test_gradients_of_a_singular_inverse_are_not_called_wrong(device: str) -> None:
    """Which of its digits are right is decided by roundings: the CPU itself gives 1e7 in float32 and 0.5 in float64."""
    rows = torch.tensor([[-1.114950180053711, -0.3856009244918823], [0.6932570934295654, -0.19225582480430603]])
    matrices = rows[:, None, :].repeat(1, 2, 1)  # two equal rows each
    with op_tools.OpAutoCompare() as tool:
        for seed in range(4):
            x = matrices.to(device).requires_grad_()
            y = torch.pinverse(x)
            y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(device))
    assert not tool.blames
