"""Traces on disk, fingerprints, the log of OneFlow, and alignment, without a device."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import zlib
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from op_tools.cli import main
from op_tools.trace import format as columns
from op_tools.trace import prints
from op_tools.trace.align import align, aligned
from op_tools.trace.commands import _misplaced
from op_tools.trace.diverge import largest_with
from op_tools.trace.format import SUFFIX, TraceError, TraceWriter, files_of, read
from op_tools.trace.graph import Graph
from op_tools.trace.merge import merged
from op_tools.trace.oneflow_log import import_log
from op_tools.trace.prints import CHUNK, _signs, distance, fingerprint, smallest_step, weights
from op_tools.trace.show import lines

LOG = """\
nothing of interest
(GRAPH:GraphBase_0:GraphBase): (
  (CONFIG:config:GraphConfig(training=True, ))
  (MODULE:model:GPT()): (
    (INPUT:_model_input.1.0_idx:tensor(..., placement=oneflow.placement(type="cpu", ranks=[0, 1]),
           sbp=(oneflow.sbp.split(dim=0),), is_lazy='True', size=(8, 4),
           dtype=oneflow.int64))
    (BUFFER:model.mask:tensor(..., placement=oneflow.placement(type="cuda", ranks=[0, 1]),
           sbp=(oneflow.sbp.broadcast,), size=(4, 4), dtype=oneflow.float32)): ()
    (MODULE:model.head:Linear(in_features=4, out_features=2, bias=False)): (
      (PARAMETER:model.head.weight:tensor(..., placement=oneflow.placement(type="cuda", ranks=[0, 1]),
             sbp=(oneflow.sbp.broadcast,), size=(2, 4), dtype=oneflow.float32,
             grad_fn=<accumulate_grad>)): ()
      (OPERATOR: model.head.weight() -> (out:sbp=(B), size=(2, 4), dtype=(oneflow.float32)), \
placement=(oneflow.placement(type="cuda", ranks=[0, 1])))
      (OPERATOR: model.head-matmul-3(in/out:(sbp=(S(0)), size=(8, 4), dtype=(oneflow.float32)), \
model.head.weight/out:(sbp=(B), size=(2, 4), dtype=(oneflow.float32))) -> \
(model.head-matmul-3/out_0:(sbp=(B), size=(8, 2), dtype=(oneflow.float32))), \
placement=(oneflow.placement(type="cuda", ranks=[0, 1])))
    )
  )
)
after it
"""


def _written(path: Path, names: list[str], seed: int = 0, scale: float = 1.0) -> Path:
    """A chain of operators in one module."""
    draw = np.random.default_rng(seed)
    with TraceWriter(path / f"rank0{SUFFIX}", {"rank": 0, "world": 1}) as writer:
        text = writer.text
        writer.add("modules", (0, -1, text("model"), text("Model"), 0))
        look = writer.add("looks", (text("[4]"), text("float32"), text("[1]"), text("cpu"), 1, 0, 0, 16))
        for number, name in enumerate(names):
            writer.add("operators", (0, columns.FORWARD, text(name), 0, 0, 0, 0, 0, 0, 0, -1, 0.0, 0))
            writer.add("tensors", (0, 0, look, number, 0, -1, 0))
            row = draw.standard_normal(9) * (scale if number >= 2 else 1.0)
            writer.add("prints", (number, *row.tolist(), 3.0, -1.0, 1.0, 0, 0, 0))
            writer.add("edges", (number, columns.OUTPUT, 0, number))
            if number:
                writer.add("edges", (number, columns.INPUT, 0, number - 1))
    return path


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    graph = Graph(read(files_of(_written(tmp_path, ["torch.add", "torch.mul", "torch.exp"]))[0]))
    assert graph.names == ["torch.add", "torch.mul", "torch.exp"]
    assert [graph.inputs(2).tolist(), graph.outputs(2).tolist()] == [[1], [2]]
    assert graph.titles[1] == "model-mul-1"
    assert any("(OPERATOR: model-exp-2(model-mul-1/out_0" in line for line in lines(graph, 2))


@pytest.mark.parametrize("kept", [0.5, 0.9, 0.999])
def test_a_truncated_trace_is_one_clear_line(tmp_path: Path, kept: float) -> None:
    (file,) = files_of(_written(tmp_path, ["torch.add"] * 200))
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(TraceError, match=r"its end is missing|damaged"):
        read(file)


def test_another_version_a_foreign_file_and_runs_with_nothing_in_common(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newer, foreign = tmp_path / f"a{SUFFIX}", tmp_path / f"b{SUFFIX}"
    newer.write_bytes(b"op_tools trace 99\n")
    foreign.write_bytes(b"\x80\x04pickle")
    with pytest.raises(TraceError, match="version 99; this op_tools reads version 3"):
        read(newer)
    with pytest.raises(TraceError, match="is not an op_tools trace"):
        read(foreign)
    _written(tmp_path / "one", ["torch.add"] * 9)
    _written(tmp_path / "two", ["torch.conv2d", "torch.sort"] * 5)
    assert main(["diff", str(tmp_path / "one"), str(tmp_path / "two")]) == 2
    assert "have nothing in common" in capsys.readouterr().err
    assert main(["trace", "show", str(tmp_path / "nowhere")]) == 2
    assert "no such file or folder" in capsys.readouterr().err


def test_prints_are_the_same_in_every_layout_and_see_the_order() -> None:
    x = torch.randn(40, 30, 7, generator=torch.Generator().manual_seed(0))  # one draw in a hundred is further off
    same = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert torch.equal(fingerprint(x), fingerprint(same))
    assert torch.equal(fingerprint(x)[:8], fingerprint(x.double().view(-1))[:8])
    for other in (x.flip(0), x.transpose(0, 1).reshape(40, 30, 7), x.view(-1).roll(256).view_as(x)):
        apart = float(distance(fingerprint(x).numpy(), fingerprint(other).numpy()))
        assert 0.4 < apart / float((x - other).norm()) < 2.0


def test_prints_of_shards_add_up_and_close_values_are_close() -> None:
    x = torch.randn(12, 20)
    parts = [fingerprint(p, (12, 20), (0, 5 * n)) for n, p in enumerate(x.split(5, 1))]
    assert torch.allclose(sum(parts)[:9], fingerprint(x)[:9], rtol=1e-9, atol=1e-9)  # type: ignore[index]
    rounded = x.bfloat16().float()
    apart = float(distance(fingerprint(x).numpy(), fingerprint(rounded).numpy()))
    assert 0.3 < apart / float((x - rounded).norm()) < 2.5
    assert smallest_step(fingerprint(x).numpy(), fingerprint(rounded).numpy()) == 0.0


def test_a_part_is_printed_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(50, 30, 40)
    whole[7, 3, 5] = float("nan")
    expected = {(0, 0, 20): whole[:, :, 20:], (0, 10, 0): whole[:, 10:], (3, 0, 1): whole[3:45, :, 1:9]}
    found = {at: fingerprint(part, whole.shape, at) for at, part in expected.items()}
    sizes = list[int]()
    pad = torch.nn.functional.pad
    monkeypatch.setattr(prints, "_SLAB", 5_000)
    monkeypatch.setattr(torch.nn.functional, "pad", lambda x, *rest: sizes.append(x.numel()) or pad(x, *rest))
    for at, part in expected.items():
        in_slabs = fingerprint(part, whole.shape, at)
        assert torch.allclose(in_slabs, found[at], rtol=1e-9, atol=1e-7)
        assert torch.equal(in_slabs[10:], found[at][10:])
    assert max(sizes) < 8_192
    sizes.clear()
    last = fingerprint(whole[40:], (100_000, 30, 40), (90_000, 0, 0))  # without room for the whole
    assert max(sizes) < 20_000
    assert last[-4:].tolist() == [whole[40:].min(), whole[40:].max(), 0, 0]


def test_nan_and_inf_are_counted_and_do_not_spread() -> None:
    x = torch.ones(1000)
    x[3], x[4] = float("nan"), float("inf")
    found = fingerprint(x).tolist()
    assert found[12:] == [1.0, 1.0]
    assert all(np.isfinite(found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elements_show_beside_the_mask_of_attention(dtype: torch.dtype) -> None:
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    y = x + 0.5
    mask = torch.ones(16, 16, dtype=torch.bool).triu(1)
    one, two = (fingerprint(part.masked_fill(mask, torch.finfo(dtype).min)).numpy() for part in (x, y))
    true = float((y - x)[~mask].double().norm())
    assert 0.4 < float(distance(one, two)) / true < 2.0
    assert one[13] == two[13] == int(mask.sum())


def test_prints_follow_one_order_of_chunks_and_their_signs() -> None:
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(1)).double()
    chunks = [x[k : k + CHUNK] for k in range(0, len(x), CHUNK)]
    signs = np.stack([_signs(1_000_003 + k, 1)[0] for k in range(3)])
    rows = np.stack([c.numpy() @ weights()[: len(c)] for c in chunks]) * signs
    assert np.allclose(fingerprint(x).numpy()[:9], rows.sum(0), rtol=1e-8, atol=1e-6)
    assert np.unique(np.abs(weights()[:, :8])).tolist() == [1, 3, 5, 7, 9, 11, 13, 15]


def test_of_equal_operators_the_first_are_matched() -> None:
    assert aligned(4, 2, lambda i, j: 1.0 if "aabb"[i] == "ab"[j] else -1e9) == [(0, 0), (2, 1)]


def test_sequences_align_around_what_only_one_has() -> None:
    one, two = "abcdef", "abXcdYYef"
    found = aligned(6, 9, lambda i, j: 1.0 if one[i] == two[j] else -1e9)
    assert [two[j] for _, j in found] == list(one)


def test_alignment_finds_the_inserted_operator(tmp_path: Path) -> None:
    names = ["torch.add", "torch.mul", "torch.exp", "torch.mul"]
    first = Graph(read(files_of(_written(tmp_path / "a", names))[0]))
    second = Graph(read(files_of(_written(tmp_path / "b", [*names[:2], "torch.sort", *names[2:]], seed=5))[0]))
    assert align(first, second).pairs.tolist() == [[0, 0], [1, 1], [2, 3], [3, 4]]


def test_the_graph_in_a_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(LOG)
    path, counts = import_log(log, tmp_path / "run")
    assert [counts[what] for what in ("operators", "parameters", "buffers")] == [2, 1, 1]
    graph = Graph(read(path))
    assert graph.titles == ["model.head.weight", "model.head-matmul-3"]
    assert graph.look(int(graph.outputs(1)[0]))["placements"] == "B"
    log.write_text(LOG[: LOG.index("after it") - 8])
    with pytest.raises(TraceError, match="its graph is cut off"):
        import_log(log, tmp_path / "run")
    log.write_text("(MODULE:model:GPT())\n(INPUT:_model_input")
    with pytest.raises(TraceError, match="ends after line 2, before the graph is printed"):
        import_log(log, tmp_path / "run")
    log.write_text("iteration 1, loss 3")
    with pytest.raises(TraceError, match="no graph in it"):
        import_log(log, tmp_path / "run")


def test_ranks_are_put_together_by_their_placements(tmp_path: Path) -> None:
    whole = torch.randn(4, 6)
    traces = []
    for rank, part in enumerate(whole.chunk(2)):
        path = tmp_path / f"rank{rank}{SUFFIX}"
        with TraceWriter(path, {"rank": rank, "world": 2}) as writer:
            text = writer.text
            look = (text("[4, 6]"), text("float32"), 0, text("cpu"), 0, text("S(0)"), text("2 ranks=[0, 1]"), 96)
            writer.add("looks", look)
            writer.add("operators", (0, 0, text("torch.add"), -1, 0, 0, 0, 0, 0, 0, -1, 0.0, 0))
            writer.add("tensors", (0, 0, 0, 0, 0, -1, -1))
            writer.add("edges", (0, columns.OUTPUT, 0, 0))
            writer.add("prints", (0, *fingerprint(part, (4, 6), (2 * rank, 0)).tolist(), 0))
        traces.append(read(path))
    rows, _ = Graph(merged(traces)).prints()
    assert np.allclose(rows[0][:9], fingerprint(whole).numpy()[:9], rtol=1e-9, atol=1e-9)


def _hostile(path: Path, head: dict[str, object], body: bytes) -> Path:
    packed = zlib.compress(body, 9)
    line = json.dumps({"bytes": len(packed), **head}).encode()
    path.write_bytes(columns.NAMED + f"{columns.VERSION}\n".encode() + line + b"\n" + packed)
    return path


@pytest.mark.parametrize(
    ("head", "body"),
    [
        ({"texts": 1}, b'["' + b"a" * 10**8 + b'"]'),  # a hundred megabytes in a hundred kilobytes
        ({"table": "operators", "rows": 1}, bytes(10**8)),
        ({"texts": 1}, b"[" * 10**5),
        ({"texts": 1, "bytes": -100}, b"[]"),
        ({"table": "operators", "rows": 1, "bytes": -100}, b""),
        ({"table": "texts", "rows": 1, "bytes": [1]}, b""),
    ],
)
def test_a_hostile_trace_is_one_clear_line(head: dict[str, object], body: bytes, tmp_path: Path) -> None:
    path = _hostile(tmp_path / "rank0.optrace", head, body)
    with pytest.raises(TraceError, match="damaged after byte"):
        read(path, partial=True)


def test_a_trace_that_claims_to_be_huge_is_cut_off(tmp_path: Path) -> None:
    path = _hostile(tmp_path / "rank0.optrace", {"texts": 1, "bytes": 2**62}, b"[]")
    with pytest.raises(TraceError, match="its end is missing"):
        read(path)


def test_a_text_that_is_not_there_is_damage(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "rank0.optrace", {}) as writer:
        writer.add("modules", (0, -1, 5, 0, 0))
    with pytest.raises(TraceError, match="a text that is not there"):
        read(tmp_path / "rank0.optrace")


def test_what_was_flushed_outlives_the_process(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "rank0.optrace", {"rank": 0})
    assert read(writer.path, partial=True).facts == {"rank": 0}
    writer.add("modules", (0, -1, writer.text("model"), 0, 0))
    writer.flush()
    writer.settle()
    assert read(writer.path, partial=True).words("modules", "name") == ["model"]


def test_what_is_flushed_and_settled_outlives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "rank0.optrace"
    code = f"""
import os
from pathlib import Path
from op_tools.trace.format import TraceWriter
trace = TraceWriter(Path({str(path)!r}), {{"rank": 0}})
for block in range(20):
    for row in range(100):
        trace.add("plan", (row, 0, block, 0))
    trace.flush()
trace.settle()
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 9
    with pytest.raises(TraceError, match="its end is missing"):
        read(path)
    found = read(path, partial=True)
    assert found["plan"]["bytes"].tolist() == [block for block in range(20) for _ in range(100)]


def test_a_trace_that_ends_with_the_interpreter_is_complete(tmp_path: Path) -> None:
    """No thread can be started any more when the functions of `atexit` run."""
    path = tmp_path / "rank0.optrace"
    code = f"""
import atexit
from pathlib import Path
from op_tools.trace.format import TraceWriter
trace = TraceWriter(Path({str(path)!r}), {{"rank": 0}})
trace.add("edges", (1, 0, 0, 2))
atexit.register(trace.close)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
    assert read(path).count("edges") == 1


def test_a_forked_child_does_not_write_to_its_parents_trace(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "rank0.optrace", {"rank": 0})
    trace.add("edges", (1, 0, 0, 2))
    with trace._lock:  # as when another thread has it
        child = os.fork()
        if child == 0:
            done = threading.Thread(target=lambda: (trace.flush(), trace.settle(), trace.close()))
            done.start()
            done.join(20)
            os._exit(done.is_alive())
    assert os.waitpid(child, 0)[1] == 0
    trace.close()
    assert read(trace.path).count("edges") == 1


def test_ctrl_c_while_a_block_is_packed_loses_no_block(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "rank0.optrace", {"rank": 0})
    trace.add("edges", (1, 0, 0, 2))

    class Interrupted(Future[bytes]):
        def result(self, timeout: float | None = None) -> bytes:
            raise KeyboardInterrupt

    waiting: Future[bytes] = Interrupted()
    trace._packed.append(({"texts": 0}, waiting))
    with pytest.raises(KeyboardInterrupt):
        trace.settle()
    assert trace._packed[0][1] is waiting
    done: Future[bytes] = Future()
    done.set_result(zlib.compress(b"[]"))
    trace._packed[0] = ({"texts": 0}, done)
    trace.close()
    assert read(trace.path).count("edges") == 1


def test_blocks_do_not_pile_up_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = TraceWriter(tmp_path / "rank0.optrace", {"rank": 0})

    class Full:
        def write(self, _: bytes) -> None:
            raise OSError(28, "No space left on device")

        def flush(self) -> None: ...

    monkeypatch.setattr(trace, "_file", Full())
    for _ in range(50):
        trace.add("edges", (1, 0, 0, 2))
        with contextlib.suppress(OSError):
            trace.flush()
            trace.settle()
        assert len(trace._packed) <= columns._MAX_PACKING + 1


@pytest.mark.parametrize(
    "facts",
    [
        {"rank": "x"},
        {"rank": -1},
        {"rank": float("inf")},
        {"rank": None},
        {"world": [2]},
        {"world": 0},
        {"world": 1e300},
    ],
)
def test_ranks_that_make_no_sense_are_refused(tmp_path: Path, facts: dict[str, Any]) -> None:
    with TraceWriter(tmp_path / "rank0.optrace", facts):
        pass
    with pytest.raises(TraceError, match=r"rank0.optrace: damaged \((rank|world) .* makes no sense"):
        read(tmp_path / "rank0.optrace")


def test_a_trace_that_is_no_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank0.optrace"
    os.mkfifo(path)
    with pytest.raises(TraceError, match="is not a regular file"):  # it would wait for somebody to write
        read(path)
    path.unlink()
    path.symlink_to(path.name)
    with pytest.raises(TraceError, match="cannot be read"):
        read(files_of(tmp_path)[0])


def test_a_block_of_infinite_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank0.optrace"
    with TraceWriter(path, {}):
        pass
    path.write_bytes(path.read_bytes().splitlines(True)[0] + b'{"table": "operators", "rows": 1, "bytes": 1e999}\n')
    with pytest.raises(TraceError, match="damaged after byte"):
        read(path)


def test_one_wrong_element_is_told_from_a_rounding_of_the_largest() -> None:
    draw = torch.Generator().manual_seed(0)
    x = (torch.randn(4000, generator=draw) * 10.0 ** (6 * torch.rand(4000, generator=draw) - 3)).bfloat16()
    for ulps in (1, 2, 3):
        other = (x.view(torch.int16) + ulps).view(torch.bfloat16)  # a rounding of each element by itself
        steps = (x.double() - other.double()).abs().tolist()
        sizes = torch.maximum(x.double().abs(), other.double().abs()).tolist()
        assert all(largest_with(step, 8) >= size for step, size in zip(steps, sizes))
    wrong = [largest_with(float(a) / 2, 8) / float(a) for a in x.double().abs() if float(a)]
    assert sorted(wrong)[len(wrong) * 9 // 10] < 30  # most elements that lost a half are known to be small


def test_an_option_behind_the_script_is_not_ignored_in_silence() -> None:
    assert "--steps 0:1 is behind the script" in _misplaced(["train.py", "--steps", "0:1"])
    assert "--prints off" in _misplaced(["-m", "pkg.train", "--prints", "off"])
    assert not _misplaced(["--steps", "0:1", "train.py", "--steps", "100"])  # the script's own
    assert not _misplaced(["show"])
