"""OP_AUTOCOMPARE_COVERAGE=sample: faults are found at a sample of the elements, and healthy code stays silent."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ditorch
import op_tools
from op_tools.compare import slices
from op_tools.compare.judges import sampled
from op_tools.compare.judges.host import Comparer
from op_tools.compare.judges.sampled import Sampled
from op_tools.compare.teller import Teller

soft = pytest.mark.skipif(ditorch.backend.name != "soft", reason="faults are planted in the software accelerator")


@pytest.fixture(autouse=True)
def _sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_AUTOCOMPARE_COVERAGE", "sample")


def _network(device: str) -> Callable[[], torch.Tensor]:
    torch.manual_seed(0)
    table, weight = torch.randn(200, 96, device=device), torch.randn(130, 96, device=device)
    bias, scale = torch.randn(130, device=device), torch.randn(130, device=device)
    images, kernel = torch.randn(6, 5, 20, 20, device=device), torch.randn(60, 5, 3, 3, device=device)
    parameters = [table, weight, bias, scale, kernel]
    for parameter in parameters:
        parameter.requires_grad_()
    tokens, targets = torch.randint(200, (8, 60)).to(device), torch.randint(130, (480,)).to(device)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=True)

    def step() -> torch.Tensor:
        x = F.embedding(tokens, table)
        q = x.view(8, 60, 4, 24).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(8, 60, 96)
        y = F.layer_norm(F.gelu(F.linear(x, weight, bias)), (130,), scale, bias)
        z = F.relu(F.batch_norm(F.conv2d(images, kernel), None, None, training=True), inplace=True)
        loss = F.cross_entropy(y.flatten(0, 1), targets) + F.dropout(z, 0.1).square().mean() + F.softmax(y, -1).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.parametrize("low", [None, torch.bfloat16])
def test_a_healthy_network_is_right_and_unchanged(device: str, low: torch.dtype | None) -> None:
    losses = []
    for watched in (False, True):
        step = _network(device)
        torch.manual_seed(1)
        tool = op_tools.OpAutoCompare() if watched else None
        if tool is not None:
            tool.start()
        with torch.autocast("cuda", dtype=low or torch.bfloat16, enabled=low is not None):
            losses.append([step().item() for _ in range(2)])
        if tool is not None:
            tool.stop()
            wrong = [row for row in tool.records() if row["verdict"] != "right"]
            assert not wrong, wrong[0]
            assert not [f for f in tool.findings() if f.kind not in ("difference",)]
            assert tool.judge(Sampled).calls > 60
            assert not tool._teller.coverage.missed
    assert losses[0] == losses[1]


def _linear(device: str) -> Any:
    x, w = (
        torch.randn(300, 64, device=device, requires_grad=True),
        torch.randn(200, 64, device=device, requires_grad=True),
    )
    return lambda: F.linear(x, w).backward(torch.randn(300, 200, device=device))


def _add_(device: str) -> Any:
    x, y = torch.randn(300, 200, device=device), torch.randn(300, 200, device=device)
    return lambda: x.add_(y)


def _split(device: str) -> Any:
    x = torch.randn(300, 200, device=device)
    return lambda: torch.max(x, 1)


def _layer_norm(device: str) -> Any:
    x = torch.randn(400, 96, device=device, requires_grad=True)
    return lambda: F.layer_norm(x, (96,)).backward(torch.randn(400, 96, device=device))


@soft
@pytest.mark.parametrize(
    ("make", "fault", "phase"),
    [
        (_linear, "mm: noise=1e-2, dtype=float32", "forward"),
        (_linear, "mm: noise=1e-2, dtype=float32, phase=backward", "backward"),
        (_linear, "mm: element=0.5, dtype=float32, phase=forward", "forward"),
        (_linear, "mm: element=0.5, dtype=float32, phase=backward", "backward"),
        (_linear, "mm: nan, dtype=float32, phase=forward", "forward"),
        (_linear, "mm: accumulate=bfloat16, dtype=float32", "forward"),
        (_add_, "add_.Tensor: element=0.5", "forward"),
        (_add_, "add_.Tensor: drop_write", "forward"),
        (_layer_norm, "native_layer_norm: element=0.5, dtype=float32", "forward"),
        (_layer_norm, "native_layer_norm_backward: element=0.5, dtype=float32", "backward"),
    ],
)
def test_planted_faults_are_found(device: str, make: Any, fault: str, phase: str) -> None:
    from ditorch.soft import faults

    torch.manual_seed(0)
    call = make(device)
    with op_tools.OpAutoCompare() as tool, faults.plant(fault):
        call()
    assert any(b.phase == phase for b in tool.blames), [r["verdict"] for r in tool.records()]
    assert tool.judge(Sampled).calls


class Broken(TorchDispatchMode):
    """A kernel for products that goes wrong beyond some row."""

    def __init__(self, fault: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.fault = fault

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::mm", "aten::linear") and found.dtype == torch.float32 and found.shape[0] > 9000:
            with torch._C.DisableTorchFunction():
                self.fault(found)
        return found


@pytest.mark.parametrize(
    "fault",
    [
        lambda y: y[8192:].copy_(y[: y.shape[0] - 8192].clone()),  # an index that wraps around
        lambda y: y.view(-1)[-40:].zero_(),  # the last elements are not written
        lambda y: y.copy_(y.view(y.shape[1], y.shape[0]).t().contiguous()),  # the layout of another tensor
        lambda y: y[4000:4001].mul_(1.01),  # one row
    ],
)
def test_errors_of_a_whole_region_are_found(device: str, fault: Any) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(9100, 16, device=device), torch.randn(40, 16, device=device)
    with op_tools.OpAutoCompare() as tool, Broken(fault):
        F.linear(x, w)
    assert [b.op for b in tool.blames] == ["torch.nn.functional.linear"]
    assert "in a sample" in tool.blames[0].reason


def test_calls_beyond_the_limit_are_sampled_and_small_ones_are_not(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OP_AUTOCOMPARE_COVERAGE", "auto")
    monkeypatch.setenv("OP_AUTOCOMPARE_MAX_BYTES", "1000000")
    large, small = torch.randn(1100, 1000, device=device), torch.randn(100, 1000, device=device)
    with op_tools.OpAutoCompare() as tool:
        small.mul(2)
        assert list(tool.judge(Sampled)._kinds.values()) == [None]
        large.mul(2)
        large.sum()
    assert tool.judge(Sampled).calls == 2
    assert {row["verdict"] for row in tool.records()} == {"right"}
    assert not tool._teller.coverage.missed
    assert any("by a sample" in line for line in tool.summary())


def test_a_call_that_asks_for_a_layout_keeps_its_rank(device: str) -> None:
    images = torch.randn(4, 3, 20, 20, device=device)
    with op_tools.OpAutoCompare() as tool:
        images.to(memory_format=torch.channels_last).contiguous(memory_format=torch.contiguous_format)
        images.clone(memory_format=torch.channels_last)
    assert not tool.blames
    assert "every call that computes was compared" in tool.summary()[0]


class Replaced(TorchDispatchMode):
    """A kernel that returns something else."""

    def __init__(self, kernel: str, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.kernel, self.change = kernel, change

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        first = found[0] if isinstance(found, (tuple, list)) else found
        named = func._schema.name.partition("::")[2] == self.kernel
        if named and isinstance(first, torch.Tensor) and first.is_cuda:
            with torch._C.DisableTorchFunction():
                return self.change(found)
        return found


def _views(x: torch.Tensor, sent: torch.Tensor) -> None:
    a, b = x.view(700, 20, 50).transpose(0, 1).split(10)
    y = torch.cat((a, b), 0).permute(1, 0, 2).reshape(700, 1000)
    (y[:, :900] * sent).sum().backward()


def test_large_views_need_no_copy(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "off")
    x, sent = torch.randn(700, 1000, device=device, requires_grad=True), torch.randn(700, 900, device=device)
    tool, whole = _sampled(lambda: [_views(x, sent) for _ in range(2)])
    assert not tool.blames
    assert not tool._teller.coverage.missed
    assert not [op for op in whole if op not in ("torch.Tensor.sum", "torch.Tensor.mul")], whole


@pytest.mark.parametrize(
    ("kernel", "change", "blamed"),
    [
        ("transpose", lambda y: y.roll(1, 0), ("torch.Tensor.transpose", "forward")),
        ("split", lambda y: tuple(reversed(y)), ("torch.Tensor.split", "forward")),
        ("slice_backward", lambda y: y.roll(1, 1), ("torch.Tensor.__getitem__", "backward")),
        ("cat", lambda y: y.roll(1, 1), ("torch.cat", "forward")),
    ],
)
def test_large_moves_that_go_wrong_are_found(device: str, kernel: str, change: Any, blamed: tuple[str, str]) -> None:
    x, sent = torch.randn(700, 1000, device=device, requires_grad=True), torch.randn(700, 900, device=device)
    with op_tools.OpAutoCompare() as tool, Replaced(kernel, change):
        _views(x, sent)
    assert (tool.blames[0].op, tool.blames[0].phase) == blamed


@pytest.mark.parametrize(
    ("kernel", "change", "blamed"),
    [
        ("native_layer_norm_backward", lambda y: (y[0], y[1] * 1.01, y[2]), "torch.nn.functional.layer_norm"),
        ("native_layer_norm_backward", lambda y: (y[0], y[1], y[2] * 1.01), "torch.nn.functional.layer_norm"),
        ("add", lambda y: y * 1.01, "autograd.sum_of_gradients.add"),
    ],
)
def test_sums_over_all_rows_are_judged(device: str, kernel: str, change: Any, blamed: str) -> None:
    torch.manual_seed(0)
    x, w, b = (torch.randn(*shape, device=device, requires_grad=True) for shape in ((1500, 96), (96,), (96,)))
    sent = torch.randn(1500, 96, device=device)
    for broken in (False, True):
        y = F.layer_norm(x, (96,), w, b) * x.sigmoid()
        with op_tools.OpAutoCompare() as tool:
            y = F.layer_norm(x, (96,), w, b) * x.sigmoid()
            if not broken:
                y.backward(sent)
            else:
                with Replaced(kernel, change):
                    y.backward(sent)
        assert [x.op for x in tool.blames] == ([blamed] if broken else [])
        assert not tool._teller.coverage.missed


def test_a_norm_of_two_million_elements_is_right(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long chains of squares drift as far as some order of summation gives, which partial norms do not show."""
    monkeypatch.delenv("OP_AUTOCOMPARE_COVERAGE", raising=False)
    x = torch.rand(2_000_000, device=device)
    with op_tools.OpAutoCompare() as tool:
        torch.linalg.vector_norm(x)
    assert not tool.blames


def _sampled(work: Callable[[], Any]) -> tuple[Any, list[str]]:
    """A tool that has watched this work with the usual coverage, and the operators that were not compared by parts."""
    whole = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OP_AUTOCOMPARE_COVERAGE", "auto")
        compare = Comparer.compare

        def note(self: Any, job: Any, *rest: Any) -> Any:
            if job.whole is None:
                whole.append(job.call.op)
            return compare(self, job, *rest)

        patch.setattr(Comparer, "compare", note)
        with op_tools.OpAutoCompare() as tool:
            work()
    return tool, whole


@pytest.mark.parametrize("change", [None, lambda y: y.mul_(1.01)])
def test_a_large_call_that_works_in_place_is_no_view(device: str, change: Any) -> None:
    x = torch.randn(600, 1000, device=device, requires_grad=True)

    def work() -> None:
        with Replaced("relu_", change or (lambda y: y)):
            y = F.relu(x * 2, inplace=True)
        y.sum().backward()

    tool, whole = _sampled(work)
    assert [b.op for b in tool.blames] == (["torch.nn.functional.relu"] if change else [])
    assert not [op for op in whole if "relu" in op]


def test_a_batch_of_one_is_sampled(device: str) -> None:
    x = torch.randn(1, 600, 1000, device=device, requires_grad=True)
    w = torch.randn(300, 1000, device=device, requires_grad=True)
    tool, whole = _sampled(lambda: F.linear(F.pad(x * 2, (0, 0, 1, -1)), w).sum().backward())
    assert not tool.blames
    assert not tool.findings()
    assert not [op for op in whole if "linear" in op or "pad" in op]


@torch.library.custom_op("op_tools_sampled::scan", mutates_args=())
def _scan(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x * scale).cumsum(1)


_scan.register_fake(lambda x, scale: torch.empty_like(x))
_scan.register_autograd(
    lambda ctx, g: (g.flip(1).cumsum(1).flip(1) * ctx.scale, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "scale", inputs[1]),
)


@pytest.mark.parametrize("change", [None, lambda y: torch.cat((y[:-1], y[:1]))])
def test_operators_of_the_user_are_cut_along_axes_found_by_trial(device: str, change: Any) -> None:
    x, scale = torch.randn(40, 32, 900, device=device, requires_grad=True), torch.rand(900, device=device)

    def work() -> None:
        with Replaced("scan", change or (lambda y: y)):
            y = torch.ops.op_tools_sampled.scan(x, scale)
        y.sum().backward()

    tool, whole = _sampled(work)
    assert [b.op for b in tool.blames] == (["op_tools_sampled.scan"] if change else [])
    assert not [op for op in whole if "scan" in op]


class _OnTheHost:
    """What the kernel that takes slices does, for a device whose memory the host can read."""

    launches = repeated = 0

    def again(self, table: Any, addresses: Any, first: int) -> bool:
        self.repeated += 1
        return self(*table.filled(addresses, first))

    def __call__(self, pieces: Any, places: Any) -> bool:
        self.launches += 1
        for piece, place in zip(pieces, places):
            addresses = np.zeros((), dtype=np.int64)
            for size, stride, index in piece.dims:
                along = np.arange(size) if index is None else index.cpu().numpy()
                addresses = addresses[..., None] + along * stride
            nbytes = piece.elements * piece.itemsize
            result = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(place))
            if not piece.source or not nbytes:
                result[:] = 0
                continue
            whole = (ctypes.c_uint8 * (int(addresses.max()) + piece.itemsize)).from_address(piece.source)
            each = addresses.reshape(-1, 1) + np.arange(piece.itemsize)
            result[:] = np.ctypeslib.as_array(whole)[each].reshape(-1)
        return True


@soft
def test_slices_that_one_launch_takes_are_judged_like_others(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = _OnTheHost()
    monkeypatch.setattr(slices, "gather_for", lambda place: gather if place.type == "soft" else None)
    monkeypatch.setattr(slices._Pinned, "room", lambda self, n: (torch.empty(n, dtype=torch.uint8), 0))
    step = _network(device)
    with op_tools.OpAutoCompare() as tool:
        step()
        step()
    assert gather.launches > 50, [b.reason for b in tool.blames]
    assert not tool.blames
    assert not tool._teller.coverage.missed
    assert not [f for f in tool.findings() if f.kind != "difference"]


@soft
@pytest.mark.parametrize(
    ("fault", "op", "phase"),
    [
        ("", "", ""),
        ("gelu: noise=0.05, nth=19", "gelu", "forward"),
        ("gelu_backward: noise=0.05, nth=19", "gelu", "backward"),
        ("_fused_adamw_: noise=0.05, nth=19", "_fused_adamw_", "forward"),
    ],
)
def test_slices_that_are_taken_as_before_are_judged_like_others(
    device: str, monkeypatch: pytest.MonkeyPatch, fault: str, op: str, phase: str
) -> None:
    """Later calls of a kind repeat a launch with other addresses, and go to a process in batches."""
    from ditorch.soft import faults

    gather = _OnTheHost()
    monkeypatch.setattr(slices, "gather_for", lambda place: gather if place.type == "soft" else None)
    monkeypatch.setattr(slices._Pinned, "room", lambda self, n: (torch.empty(n, dtype=torch.uint8), 0))
    monkeypatch.setattr(sampled, "FIRST_CALLS", 0)  # no call is made again on the device, where the fault counts it
    monkeypatch.setattr(sampled, "_RANKED_OF", 1 << 60)
    monkeypatch.setenv("OP_AUTOCOMPARE_PROCESSES", "1")
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*n, generator=generator).to(device).requires_grad_() for n in ((300, 40), (50, 40)))
    optimizer = torch.optim.AdamW([w], lr=1e-3, fused=True)
    with op_tools.OpAutoCompare() as tool, faults.plant(fault) if fault else contextlib.nullcontext():
        for _ in range(24):
            loss = F.gelu(F.linear(x, w)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert gather.repeated > 50
    assert not tool._teller.coverage.missed
    assert not [f for f in tool.findings() if f.kind != "difference"]
    assert [(b.op.rpartition(".")[2], b.phase) for b in tool.blames] == ([(op, phase)] if fault else [])


def test_a_call_on_nothing_is_compared_in_full(device: str) -> None:
    x, w = torch.randn(0, 8, device=device, requires_grad=True), torch.randn(4, 8, device=device, requires_grad=True)
    with op_tools.OpAutoCompare() as tool:
        F.linear(x, w).sum().backward()
    assert not tool.blames
    assert not tool._teller.coverage.missed
    assert not tool.findings()


@pytest.mark.parametrize("empty", [(0,), (2, 0, 512)])
def test_an_empty_tensor_among_large_ones_does_not_keep_a_call_from_being_sampled(
    device: str, empty: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of keys and values begins with `cat` of nothing and the first ones."""
    monkeypatch.setenv("OP_AUTOCOMPARE_COVERAGE", "auto")
    nothing, x = torch.zeros(empty, device=device), torch.randn(2, 1024, 512, device=device, requires_grad=True)
    with op_tools.OpAutoCompare() as tool:
        torch.cat([nothing, x], dim=1).backward(torch.ones_like(x))
    judge = tool.judge(Sampled)
    assert (judge.calls, list(tool.blames), tool.findings()) == (2, [], [])
    assert judge.compared < judge.elements


def test_jobs_that_wait_to_be_told_hold_no_gradients(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Views are settled at once and told in their turn; in a run with a backlog, gradients of many steps piled up."""
    monkeypatch.setenv("OP_AUTOCOMPARE_COVERAGE", "auto")
    x, sent = torch.randn(700, 1000, device=device, requires_grad=True), torch.randn(700, 900, device=device)
    waiting = []
    tell = Teller.tell

    def note(self: Any, job: Any, *rest: Any, **named: Any) -> None:
        waiting.append(job.grads)
        tell(self, job, *rest, **named)

    monkeypatch.setattr(Teller, "tell", note)
    with op_tools.OpAutoCompare():
        for _ in range(2):
            _views(x, sent)
    assert waiting
    assert not any(waiting)
