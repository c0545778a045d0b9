"""What each tool promises beyond what all tools promise."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import op_tools
from op_tools.files import archive, captures
from op_tools.native import ledger

# -- OpCapture ----------------------------------------------------------------------------------------


def captured(tool: op_tools.OpCapture, part: str) -> list[dict[str, Any]]:
    return [captures.read(Path(row["path"])) for row in tool.records() if row["part"] == part]


def test_capture_keeps_layout_and_aliasing(device: str) -> None:
    base = torch.randn(6, 8, device=device)
    left, right = base[1:5, ::2], base[2:6, 1::2]
    with op_tools.OpCapture(ops=["torch.add"]) as capture:
        torch.add(left, right)
        torch.add(base.t(), torch.randn(1, device=device).expand(8, 6))
    first, second = captured(capture, "input")
    a, b = first["args"]
    assert (a.stride(), a.storage_offset()) == (left.stride(), left.storage_offset())
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr(), "shared memory stays shared"
    assert torch.equal(a, left.cpu())
    assert torch.equal(b, right.cpu())
    assert second["args"][0].stride() == (1, 8)
    assert second["args"][1].stride() == (0, 0)


def test_capture_takes_inputs_before_they_are_overwritten(device: str) -> None:
    x = torch.ones(4, device=device)
    with op_tools.OpCapture() as capture:
        x.add_(1)
        x.add_(1)
    assert [p["args"][0].tolist() for p in captured(capture, "input")] == [[1.0] * 4, [2.0] * 4]
    assert [p["result"].tolist() for p in captured(capture, "output")] == [[2.0] * 4, [3.0] * 4]


def test_capture_keeps_random_state_and_flags(device: str) -> None:
    x = torch.randn(100, device=device, requires_grad=True)
    with op_tools.OpCapture(ops=["torch.nn.functional.dropout"]) as capture:
        y = F.dropout(x, 0.5)
    (payload,) = captured(capture, "input")
    assert payload["rng"]["device"] is not None
    assert payload["grad_enabled"] is True
    assert payload["args"][0].requires_grad
    from op_tools.replay.captured import CapturedOp

    op = CapturedOp(Path(capture.records()[0]["path"]).parent)
    op.prepare()
    assert torch.equal(op.run_forward().cpu(), y.cpu()), "the same random numbers again"


def test_capture_metadata_is_readable(device: str) -> None:
    with op_tools.OpCapture() as capture:
        torch.randn(3, device=device).exp()
    row = next(r for r in capture.records() if r["op"] == "torch.Tensor.exp")
    meta = json.loads((Path(row["path"]).parent / "metadata.json").read_text())
    assert meta["name"] == "torch.Tensor.exp"
    assert meta["tensors"]["input"]["inputs"]["shape"] == [3]


def test_capture_blocks_or_drops_when_its_queue_is_full(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = archive.write_archive

    def slowly(*args: Any) -> None:
        time.sleep(0.02)
        slow(*args)

    monkeypatch.setattr(archive, "write_archive", slowly)
    monkeypatch.setenv("OP_CAPTURE_QUEUE_MB", "1")
    x = torch.randn(64, 1024, device=device)  # 256 kB
    for policy in ("block", "drop"):
        monkeypatch.setenv("OP_CAPTURE_WHEN_FULL", policy)
        with op_tools.OpCapture() as capture:
            for _ in range(20):
                x.exp()
        assert capture.writer.peak_bytes <= 1 << 20
        if policy == "block":
            assert capture.files_written == 40
            assert any("waited for the disk" in fact for fact in capture.summary())
        else:
            assert capture.files_written < 40
            assert any("dropped" in fact for fact in capture.summary())
            assert any(f.kind == "dropped" for f in capture.findings())


class SlowToAdd(int):
    """A counter that several threads cannot change at once without losing counts."""

    def __add__(self, other: int) -> SlowToAdd:
        time.sleep(0.002)
        return SlowToAdd(int(self) + other)


def test_several_writers_lose_no_counts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_CAPTURE_WRITERS", "4")
    x = torch.randn(4, device=device)
    with op_tools.OpCapture() as capture:
        capture._files.files, capture._files.bytes_written = SlowToAdd(0), SlowToAdd(0)
        for _ in range(20):
            x.exp()
    rows = capture.records()
    assert capture.files_written == len(rows) == 40
    assert capture.bytes_written == sum(row["bytes"] for row in rows)


# -- OpTimeMeasure ------------------------------------------------------------------------------------


def test_times_by_operator_and_trace(device: str, tmp_path: Path) -> None:
    x = torch.randn(64, 64, device=device, requires_grad=True)
    with op_tools.OpTimeMeasure() as timing:
        for _ in range(5):
            (x @ x).sum().backward()
    rows = {(r["name"], r["phase"]): r for r in timing.by_op()}
    assert rows[("torch.Tensor.matmul", "forward")]["calls"] == 5
    assert rows[("torch.Tensor.matmul", "backward")]["calls"] == 5
    assert abs(sum(r["share"] for r in rows.values()) - 1) < 1e-6
    for row in rows.values():
        assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["total_ms"] + 1e-9
    trace = json.loads(Path(timing.trace_path).read_text())["traceEvents"]
    assert len(trace) == 20
    assert all(e["ph"] == "X" and e["dur"] >= 0 for e in trace)


def test_many_calls_are_read_back_in_batches(device: str) -> None:
    x = torch.randn(4, device=device)
    with op_tools.OpTimeMeasure() as timing:
        for _ in range(2500):
            x.add(1)
        assert len(timing._waiting) < 2500
    assert timing.by_op()[0]["calls"] == 2500
    assert len(timing.records()) == 2500


# -- OpFallback ---------------------------------------------------------------------------------------


def test_fallback_writes_in_place_results_to_the_device(device: str) -> None:
    x = torch.ones(4, device=device)
    out = torch.empty(0, device=device)
    view = x[1:3]
    with op_tools.OpFallback() as fallback:
        same = x.add_(1)
        view.mul_(10)
        torch.add(x, 1, out=out)
        part = x.view(2, 2)
        part.sub_(1)
    assert same is x
    assert x.tolist() == [1.0, 19.0, 19.0, 1.0]
    assert out.tolist() == [3.0, 21.0, 21.0, 3.0]
    assert part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert all(row["ran_on"] == "cpu" for row in fallback.records())


def test_fallback_continues_the_devices_random_stream(device: str) -> None:
    if torch.empty(0, device=device).device.type == "cuda" and "soft" not in torch.cuda.get_device_name():
        pytest.skip("the generators are of different kinds")
    torch.manual_seed(5)
    bare = [torch.rand(3, device=device).tolist() for _ in range(3)]
    cpu = torch.get_rng_state()
    torch.manual_seed(5)
    with op_tools.OpFallback():
        assert [torch.rand(3, device=device).tolist() for _ in range(3)] == bare
    assert torch.equal(cpu, torch.get_rng_state())


def test_fallback_with_an_own_generator_is_reproducible(device: str) -> None:
    def draw() -> list[float]:
        generator = torch.Generator(device=device).manual_seed(3)
        return torch.rand(4, device=device, generator=generator).tolist()

    with op_tools.OpFallback():
        assert draw() == draw()


def test_fallback_really_runs_on_the_cpu(device: str) -> None:
    seen: list[str] = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.exp.default:
                seen.append(args[0].device.type)
            return func(*args, **(kwargs or {}))

    x = torch.randn(3, device=device)
    with Spy(), op_tools.OpFallback():
        y = x.exp()
    assert seen == ["cpu"]
    assert y.device == x.device


def test_fallback_moves_each_version_of_a_tensor_once_views_included(device: str) -> None:
    weight = torch.randn(32, 16, device=device)
    x = torch.randn(8, 16, device=device)
    expected = []
    with op_tools.OpFallback() as fallback:
        F.linear(x, weight)
        before = fallback._copies.copied_bytes
        expected.append((F.linear(x, weight), x @ weight.t()))
        moved = fallback._copies.copied_bytes - before
        assert moved == 2 * 8 * 32 * 4, "only the results, to the device"
        weight[:, ::2].neg_()  # written to through a view: what was copied is stale
        expected.append((F.linear(x, weight), x @ weight.t()))
        rest = weight.flatten()[5:]
        weight.mul_(2)  # the copy that was written is the copy of the new version
        before = fallback._copies.copied_bytes
        expected.append((rest.clone(), weight.flatten()[5:]))
        assert fallback._copies.copied_bytes - before == rest.numel() * 4
    for found, wanted in expected:
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("rows", [4, 700], ids=["small", "large"])
def test_fallback_keeps_gaps_in_the_memory_of_results(device: str, rows: int) -> None:
    a, b = (torch.randn(rows, rows - 1, generator=torch.Generator().manual_seed(n)) for n in range(2))
    expected = torch.linalg.lstsq(a, b, driver="gels").solution
    assert expected.stride() == (1, rows), "the last row of the kernel's result is not shown"
    with op_tools.OpFallback():
        found = torch.linalg.lstsq(a.to(device), b.to(device), driver="gels").solution
        again = found + 1
    assert found.stride() == expected.stride()
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(again.cpu(), expected + 1)


def test_fallback_counts_versions_as_pytorch_does(device: str) -> None:
    def versions() -> list[int]:
        parameters = [torch.nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
        x = torch.ones(4, device=device)
        with torch.no_grad():
            torch._foreach_add_(parameters, [torch.ones(3, device=device)] * 2)
            torch._foreach_mul_(parameters, 2.0)
            x[1:].add_(1).mul_(2)
            torch.add(x, 1, out=x)
        return [*(p._version for p in parameters), x._version]

    bare = versions()
    with op_tools.OpFallback():
        assert versions() == bare
    with op_tools.OpFallback(ops=["torch._foreach.*"]):
        assert versions() == bare


# -- OpDtypeCast --------------------------------------------------------------------------------------


def test_cast_computes_in_the_other_dtype_and_keeps_the_original_outside(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OP_DTYPE_CAST_DICT", "torch.float16->torch.float32")
    x = torch.randn(64, 64, device=device, dtype=torch.float16, requires_grad=True)
    with op_tools.OpDtypeCast() as cast:
        y = F.softmax(x, dim=-1)
        y.sum().backward()
        z = torch.ones(4, device=device, dtype=torch.float16)
        z.add_(1)
        mixed = x.detach() + torch.ones((), device=device)
        wide = x.detach() * torch.ones(64, device=device)
        index = x.detach().argmax()
        converted = x.detach().float()
    assert y.dtype == torch.float16
    assert x.grad.dtype == torch.float16
    assert torch.equal(y, F.softmax(x.float(), dim=-1).half())
    assert z.tolist() == [2.0] * 4
    assert z.dtype == torch.float16
    assert (mixed.dtype, wide.dtype, index.dtype, converted.dtype) == (
        torch.float16,
        torch.float32,
        torch.int64,
        torch.float32,
    )
    actions = {(r["op"], r["target"], r["action"]) for r in cast.records()}
    assert ("torch.nn.functional.softmax", "input[0]", "torch.float16 -> torch.float32") in actions
    assert ("torch.nn.functional.softmax", "output[0]", "torch.float32 -> torch.float16") in actions


def test_cast_of_one_operator_by_its_own_variable(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINEAR_OP_DTYPE_CAST_DICT", "torch.float32->torch.float64")
    monkeypatch.setenv("OP_DTYPE_CAST_DICT", "torch.float16->torch.float32")
    x = torch.randn(3, 3, device=device)
    with op_tools.OpDtypeCast() as cast:
        F.linear(x, x)
        x.exp()
    assert {r["op"] for r in cast.records()} == {"torch.nn.functional.linear"}
    assert {r["config"] for r in cast.records()} == {"torch.float32->torch.float64"}


def test_cast_and_fallback_together(device: str) -> None:
    x = torch.randn(3, 3, device=device, dtype=torch.float16)
    with op_tools.OpDtypeCast() as cast, op_tools.OpFallback() as fallback:
        y = F.linear(x, x)
    assert y.dtype == torch.float16
    assert len(cast.records()) == 3
    assert [r["op"] for r in fallback.records()] == ["torch.nn.functional.linear"]


def test_unknown_dtype_is_an_error_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_DTYPE_CAST_DICT", "torch.float15->torch.float32")
    with pytest.raises(op_tools.SettingsError, match=r"OP_DTYPE_CAST_DICT.*float15.*did you mean"):
        op_tools.OpDtypeCast().start()


# -- OpOverflowCheck ----------------------------------------------------------------------------------


def test_the_first_operator_that_made_an_infinity_is_named(device: str) -> None:
    x = torch.tensor([1.0, 100.0], device=device)
    with op_tools.OpOverflowCheck() as check:
        y = x.mul(2)
        bad = y.exp()  # made here
        bad.sub(1)
    first = check.first()
    assert first.op == "torch.Tensor.exp"
    assert first.location.endswith("bad = y.exp()  # made here")
    assert [f.op for f in check.findings()] == ["torch.Tensor.exp"], "later ones only pass it on"


def test_statistics(device: str) -> None:
    x = torch.tensor([[1.0, -3.0], [2.0, 6.0]], device=device)
    with op_tools.OpOverflowCheck() as check:
        x.add(0)
        torch.ones(1, device=device).mul(1)
    row = next(r for r in check.records() if r["op"] == "torch.Tensor.add" and r["role"] == "inputs")
    assert (row["min"], row["max"], row["mean"]) == (-3.0, 6.0, 1.5)
    assert row["std"] == pytest.approx(x.std().item())
    assert row["norm"] == pytest.approx(x.norm().item())
    assert (row["inf"], row["nan"]) == (False, False)


def test_nan_in_a_gradient_is_found(device: str) -> None:
    x = torch.zeros(3, device=device, requires_grad=True)
    with op_tools.OpOverflowCheck() as check:
        x.sqrt().sum().backward()
    assert check.first().op == "torch.Tensor.sqrt"
    assert "backward" in check.first().message


def test_masks_filled_with_infinity_on_purpose_are_no_finding(device: str) -> None:
    scores = torch.randn(3, 3, device=device)
    with op_tools.OpOverflowCheck() as check:
        scores.masked_fill(scores > 0, float("-inf"))
        torch.full((2,), float("inf"), device=device)
    assert check.findings() == []


def test_memory_that_nobody_has_written_to_is_no_finding(device: str) -> None:
    garbage = torch.full((64,), float("nan"), device=device)
    del garbage  # its memory is likely to be handed out again
    with op_tools.OpOverflowCheck() as check:
        buffer = torch.empty(64, device=device)
        other = torch.empty_like(buffer)
        torch.add(torch.ones(64, device=device), 1, out=buffer)
        other.fill_(2.0)
        assert check.findings() == []
        torch.log(-torch.ones(64, device=device), out=torch.empty(64, device=device))
    assert check.first().op == "torch.log"


def test_each_version_of_a_tensor_is_measured_once(device: str) -> None:
    x = torch.randn(8, device=device)
    with op_tools.OpOverflowCheck() as check:
        for _ in range(5):
            x.exp()
    assert check.measured == 6
    assert check.reused == 4
    with check:
        x.exp()
        x.add_(1)
        x.exp()
    assert check.measured == 4, "changed in place: measured again"


def test_a_view_of_everything_needs_no_measurement_of_its_own(device: str) -> None:
    x = torch.randn(4, 6, device=device)
    with op_tools.OpOverflowCheck() as check:
        y = x.exp()
        y.t().neg()  # y in another order
        y[:, ::2].neg()  # a part of y
        y[0:1].expand(4, 6).neg()  # as many numbers as y, but not the same
    rows = [r for r in check.records() if r["op"] == "torch.Tensor.neg" and r["role"] == "inputs"]
    y = y.cpu()
    for row, seen in zip(rows, (y.t(), y[:, ::2], y[0:1].expand(4, 6))):
        assert (row["min"], row["max"]) == (seen.min().item(), seen.max().item())
        assert row["mean"] == pytest.approx(seen.mean().item(), rel=1e-5)
        assert row["std"] == pytest.approx(seen.std().item(), rel=1e-5)
    assert check.measured == 8, "x, y, the three partial views, and three results"


def test_statistics_do_not_depend_on_the_order_in_memory(device: str) -> None:
    x = torch.randn(3, 4, 5, device=device).permute(2, 0, 1)
    with op_tools.OpOverflowCheck() as check:
        x.add(0)
    row = next(r for r in check.records() if r["role"] == "inputs")
    assert (row["min"], row["max"]) == (x.min().item(), x.max().item())
    assert row["norm"] == pytest.approx(x.norm().item(), rel=1e-5)


def test_more_tensors_in_one_call_than_a_batch_holds(device: str) -> None:
    parts = [torch.full((2,), float(i), device=device) for i in range(700)]
    parts[699][0] = float("inf")
    with op_tools.OpOverflowCheck() as check:
        torch.stack(parts)
    rows = [r for r in check.records() if r["role"] == "inputs"]
    assert [r["min"] for r in rows] == [float(i) for i in range(700)]
    assert [r["tensor"] for r in rows if r["inf"]] == [699]


def test_a_conversion_that_overflows_is_what_made_it(device: str) -> None:
    ledger.LIBRARY.wait()
    x, w = torch.full((2, 3), 1e6, device=device), torch.ones(2, 3, device=device, requires_grad=True)
    with op_tools.OpOverflowCheck() as check:
        for _ in range(2):  # the second time in machine code, where that is compiled
            x.to(torch.float16).t().reshape(6) + 1
            (w.t() * 1e6).to(torch.float16)
    assert [finding.op for finding in check.findings()] == ["torch.Tensor.to"] * 4


def test_half_values_that_only_their_square_overflows_are_fine(device: str) -> None:
    x = torch.full((100,), 60000.0, device=device, dtype=torch.float16)
    with op_tools.OpOverflowCheck() as check:
        x.clone()
    assert check.findings() == []
    assert check.records()[0]["max"] == 60000.0


# -- OpAutoCompare ------------------------------------------------------------------------------------


def test_a_wrong_result_is_found_and_saved(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.Tensor.exp
    monkeypatch.setenv("AUTOCOMPARE_ERROR_TOLERANCE", "1e-4,1e-4")

    def wrong(x: torch.Tensor) -> torch.Tensor:
        return right(x) + (0.5 if x.device.type != "cpu" else 0.0)

    globals()["wrong_exp"] = wrong
    wrong.__module__, wrong.__qualname__ = __name__, "wrong_exp"
    x = torch.randn(3, device=device)
    with op_tools.apply_feature(f"{__name__}.wrong_exp", "autocompare") as handle:
        globals()["wrong_exp"](x)
        rows = handle.tool.records()
        kinds = [f.kind for f in handle.tool.findings()]
    verdicts = {row["name"].rsplit(" ", 1)[-1]: row["allclose"] for row in rows}
    assert verdicts == {"input": True, "output": False}
    assert "difference" in kinds
    folder = Path("op_tools_results/op_capture_results") / f"{__name__}.wrong_exp"
    assert {p.parent.name + "/" + p.name for p in folder.rglob("*put.pth")} == {
        "device/input.pth",
        "device/output.pth",
        "cpu/input.pth",
        "cpu/output.pth",
    }


def test_an_attention_block_is_compared_without_failure(device: str) -> None:
    block = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).to(device)
    x = torch.randn(2, 5, 16, device=device, requires_grad=True)
    with op_tools.OpAutoCompare() as compared:
        block(x).sum().backward()
    assert [f for f in compared.findings() if f.kind == "tool-failure"] == []
    assert any("grad" in r["name"] for r in compared.records())


# -- settings and summary -----------------------------------------------------------------------------


def test_a_pattern_that_matched_nothing_is_reported_with_near_misses(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "summary")
    monkeypatch.setenv("OP_OBSERVE_LIST", "torch.Tensor.adds")
    with op_tools.OpObserve():
        torch.randn(3, device=device).add(1)
    out = capsys.readouterr().out
    assert "OP_OBSERVE_LIST: 'torch.Tensor.adds' matched no operator; did you mean torch.Tensor.add" in out


def test_console_levels(device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(3, device=device)
    printed = {}
    for level in ("off", "summary", "full"):
        monkeypatch.setenv("OP_TOOLS_CONSOLE", level)
        with op_tools.OpObserve():
            x.add(1)
        printed[level] = capsys.readouterr().out
    assert printed["off"] == ""
    assert printed["summary"].startswith("OpObserve summary")
    assert "1 call of 1 operator" in printed["summary"]
    assert printed["full"].startswith("torch.Tensor.add    forward_id: ")
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "loud")
    with pytest.raises(op_tools.SettingsError, match="OP_TOOLS_CONSOLE"):
        op_tools.OpObserve().start()


def test_a_tool_does_not_show_the_records_of_an_earlier_one(device: str) -> None:
    x = torch.ones(2, device=device)
    taken: set[int] = set()  # by tools that are gone; memory is used again after a few rounds
    for _ in range(200):
        tool = op_tools.OpObserve(ops=["torch.add"])
        with tool:
            torch.add(x, x)
        assert len(tool.records()) == 1
        if id(tool) in taken:
            return
        taken.add(id(tool))
        del tool
    pytest.skip("no two tools had the same address")


def test_notebook_and_rich_views(device: str) -> None:
    with op_tools.OpObserve() as seen:
        torch.randn(3, device=device).add(1)
    assert "<table>" in seen._repr_html_()
    assert "torch.Tensor.add" in seen._repr_html_()
    assert seen.__rich__().row_count == len(seen.records())


# -- features -----------------------------------------------------------------------------------------


def test_features_compose_and_undo(device: str) -> None:
    x = torch.randn(2, 2, device=device)
    with (
        op_tools.apply_feature(torch.add, "dump_op_args") as one,
        op_tools.apply_feature(
            ["torch.add", torch.nn.functional.linear], "measure_op_time", lambda a, b, *_: a.dim() == 2
        ) as two,
    ):
        torch.add(x, x)
        F.linear(x, x)
        torch.add(x[0], x[0])
        assert [r["op"] for r in one.tool.records()] == ["torch.add", "torch.add"]
        assert [r["op"] for r in two.tool.records()] == ["torch.add", "torch.nn.functional.linear"]
    with op_tools.OpObserve() as seen:
        torch.sub(x, x)
    assert len(seen.records()) == 1


def test_features_on_a_whole_module(device: str) -> None:
    x = torch.randn(2, 2, device=device)
    with op_tools.apply_feature(torch.nn.functional, "overflow_check") as handle:
        F.relu(x)
        torch.add(x, x)
        assert {r["op"] for r in handle.tool.records()} == {"torch.nn.functional.relu"}


def test_feature_mistakes_are_named() -> None:
    with pytest.raises(AssertionError, match="feature 'fall_back' is unknown"):  # what the first releases raised
        op_tools.apply_feature("torch.add", "fall_back")
    with pytest.raises(op_tools.SettingsError, match=r"choose one of autocompare, cast_dtype, .*, fallback, "):
        op_tools.apply_feature("torch.add", "fall_back")
    with pytest.raises(op_tools.SettingsError, match=r"no function 'torch\.adds'; did you mean torch\.add"):
        op_tools.apply_feature("torch.adds", "fallback")
    with pytest.raises(op_tools.SettingsError, match="cannot apply a feature"):
        op_tools.apply_feature(3, "fallback")


def test_a_condition_that_raises_leaves_the_call_alone(device: str) -> None:
    x = torch.randn(3, device=device)
    with op_tools.apply_feature("torch.add", "fallback", lambda a: True) as handle:
        assert torch.equal(torch.add(x, x), x + x)
        assert any("condition_func" in f.message for f in handle.tool.findings())


def test_a_third_party_function_is_one_operator(device: str) -> None:
    def attention(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x, -1)

    globals()["attention"] = attention
    attention.__module__, attention.__qualname__ = __name__, "attention"
    x = torch.randn(3, 3, device=device, requires_grad=True)
    with op_tools.apply_feature(attention, "dump_op_args"), op_tools.OpObserve() as seen, op_tools.OpTimeMeasure() as t:
        globals()["attention"](x).sum().backward()
    assert [r["op"] for r in seen.records()] == [f"{__name__}.attention", "torch.Tensor.sum"]
    assert (f"{__name__}.attention", "backward") in {(r["op"], r["phase"]) for r in t.records()}
