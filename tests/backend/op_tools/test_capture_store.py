"""OpCapture with a store: each content once, and never a stale one, whatever changed it."""

from __future__ import annotations

import contextlib
import ctypes
import filecmp
import importlib.util
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ditorch
import op_tools
from op_tools import cli
from op_tools.call.description import tensors_in
from op_tools.call.equality import same_bits
from op_tools.files import captures, segments, store_format, stored
from op_tools.files.archive import ArchiveError
from op_tools.native import fingerprints
from op_tools.replay.check import Options, replay
from op_tools.view import store as view_store


@pytest.fixture(params=["device", "host"])
def fingerprinted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Fingerprints computed on the device before the call, as on a GPU, or by the writer on the host."""
    on_host = {"cpu"} if request.param == "device" else {"cpu", "cuda", "soft", "npu", "mlu"}
    monkeypatch.setattr(fingerprints, "_HOST_DEVICES", frozenset(on_host))
    fingerprints._method.cache_clear()
    yield request.param
    fingerprints._method.cache_clear()


def parts(capture: op_tools.OpCapture, part: str) -> list[dict[str, Any]]:
    return [captures.read(Path(row["path"])) for row in capture.records() if row["part"] == part]


def unchecked(x: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """What FSDP does around the writes of its collectives."""
    return torch.autograd._unsafe_preserve_version_counter(x)  # type: ignore[no-untyped-call]


def _write_through_data(x: torch.Tensor) -> None:
    x.data.add_(1)


def _write_through_a_view(x: torch.Tensor) -> None:
    x.view(-1)[3:5].fill_(7)


def _write_through_another_dtype(x: torch.Tensor) -> None:
    x.view(torch.int32).fill_(1 << 30)


def _write_detached(x: torch.Tensor) -> None:
    x.detach().add_(1)


def _write_uncounted(x: torch.Tensor) -> None:
    with unchecked(x):
        x.mul_(3)


def _write_to_the_storage(x: torch.Tensor) -> None:
    torch.empty(0, device=x.device).set_(x.untyped_storage(), 0, (8,), (1,)).fill_(9)


def _set_to_other_memory(x: torch.Tensor) -> None:
    x.set_(torch.full((8,), 4.0, device=x.device))


def _resize(x: torch.Tensor) -> None:
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(32)
    with unchecked(x):
        x.fill_(5)


def _give_other_data(x: torch.Tensor) -> None:
    x.data = torch.full((8,), 6.0, device=x.device)


def _write_by_address(x: torch.Tensor) -> None:
    if x.device.type in ("cpu", "soft"):  # memory of the host
        ctypes.memset(x.data_ptr(), 0, 12)
    else:
        _write_uncounted(x)


def _write_as_optimizers_do(x: torch.Tensor) -> None:
    torch._foreach_add_([x], [torch.ones_like(x)], alpha=-2)


WRITES: list[Callable[[torch.Tensor], None]] = [
    *(_write_through_data, _write_through_a_view, _write_through_another_dtype, _write_detached, _write_uncounted),
    *(_write_to_the_storage, _set_to_other_memory, _resize, _give_other_data, _write_by_address),
    _write_as_optimizers_do,
]


def test_no_write_goes_unnoticed(device: str, fingerprinted: str) -> None:
    expected = []
    # only `torch.sub` is watched: the tool sees none of the writes
    with op_tools.OpCapture(ops=["torch.sub"], format="store") as capture:
        for write in WRITES:
            x = torch.arange(8.0, device=device)
            for _ in range(2):
                torch.sub(x, 1)
                expected.append((write.__name__, x.tolist()))
                write(x)
        for number in range(6):  # memory that is freed and given to the next tensor
            y = torch.full((8,), float(number), device=device)
            torch.sub(y, 1)
            expected.append(("freed", y.tolist()))
            del y
    found = [payload["args"][0].tolist() for payload in parts(capture, "input")]
    assert [(name, value) for (name, _), value in zip(expected, found)] == expected
    results = [payload["result"].tolist() for payload in parts(capture, "output")]
    assert results == [[number - 1 for number in value] for _, value in expected]


def test_what_is_known_is_neither_copied_nor_written(
    device: str, fingerprinted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []

    def copy(sample: torch.Tensor, start: int, end: int) -> torch.Tensor:
        copied.append(end - start)
        return original(sample, start, end)

    original = store_format.copy_storage
    monkeypatch.setattr(store_format, "copy_storage", copy)
    weight = torch.randn(64, 64, device=device)
    x = torch.randn(64, 64, device=device)
    with op_tools.OpCapture(format="store") as capture:
        for _ in range(4):
            y = torch.mm(x, weight)
            torch.transpose(y, 0, 1)  # a view of what the call before it returned
            y.contiguous()
    size = 64 * 64 * 4
    assert capture.bytes_written == 3 * size
    assert capture.bytes_captured == 4 * 7 * size
    assert capture.files_written <= 3
    if fingerprinted == "device":
        assert sum(copied) == 3 * size
    assert any("each content written once" in fact for fact in capture.summary())


class Both:
    """The same run, captured in both layouts."""

    def __init__(self, run: Callable[[], Any]) -> None:
        with op_tools.OpCapture() as self.seed, op_tools.OpCapture(format="store") as self.store:
            run()
        self.folder = self.store._files.folder


@pytest.fixture
def on_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch operators on the CPU, which has sparse tensors."""
    monkeypatch.setenv("OP_TOOLS_INCLUDE_CPU", "1")


@pytest.fixture
def within_one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock of the names: each tool asks it for itself, and a new second may begin between two of them."""
    monkeypatch.setattr(view_store, "_label_of", lambda second: "2026-01-02-03-04-05")


def _many_kinds_of_calls(device: str) -> None:
    torch.manual_seed(3)
    x = torch.randn(6, 8, device=device, requires_grad=True)
    w = torch.randn(8, 8, device=device, requires_grad=True)
    with torch.autocast(device.split(":")[0], torch.bfloat16):
        y = F.linear(x, w)
    z = F.dropout(torch.relu(y.float()), 0.5)
    values, _ = z.sort(dim=1, descending=True)
    (values[:, ::2].sum() + (x.t()[1:3] * 2).sum()).backward()
    with torch.no_grad():
        torch._foreach_add_([w, x], [w.grad, x.grad], alpha=-0.1)
        base = torch.arange(40_000.0, device=device)
        torch.add(base[1:9], base[2:10], alpha=2)  # overlapping views, cut out of a large storage
        torch.add(base[1:9], 1.5, out=base[100:108])
        torch.view_as_complex(base[:8].view(4, 2)).conj().mul(1j)
        base.view(torch.int32)[:4].clone()
        torch.where(base[:4] > 2, base[:4], float("-inf"))
        torch.zeros(0, device=device).sum()
        torch.tensor(3, dtype=torch.int8, device=device).bitwise_not()
        torch.eye(3).to_sparse().to_dense()
        base[None, ..., 3:7:2].expand(3, 1, 2)
        torch.einsum("ij,jk->ik", x, w)


@pytest.mark.usefixtures("on_cpu_too", "within_one_second")
def test_an_export_is_the_documented_capture_bit_for_bit(
    device: str, fingerprinted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = Both(lambda: _many_kinds_of_calls(device))
    seed = both.seed.folder
    assert cli.main(["export", str(seed), "--to", str(tmp_path / "out")]) == 0
    assert f"{both.seed.files_written} files" in capsys.readouterr().out
    shutil.move(both.folder, tmp_path)
    originals, exported = (
        {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
        for folder in (seed, tmp_path / "out")
    )
    assert exported == originals
    _, different, errors = filecmp.cmpfiles(seed, tmp_path / "out", [str(p) for p in originals], shallow=False)
    assert not different
    assert not errors


@pytest.mark.usefixtures("on_cpu_too", "within_one_second")
def test_a_store_replays_with_the_verdicts_of_files(device: str, fingerprinted: str) -> None:
    both = Both(lambda: _many_kinds_of_calls(device))
    of_store = captures.find(both.folder)
    of_files = [both.seed.folder / path.relative_to(both.folder) for path in of_store]
    assert {*of_store, *of_files} == {*captures.find(both.seed.folder)}
    options = Options(acc_check=True)
    outcomes = [[replay(path, options) for path in paths] for paths in (of_store, of_files)]
    for mine, theirs in zip(*outcomes):
        assert (mine.op, mine.status, mine.reason, mine.location) == (
            *(theirs.op, theirs.status, theirs.reason, theirs.location),
        ), mine.folder
    assert sum(outcome.status == "bit-identical" for outcome in outcomes[0]) > 10
    one = both.folder / "torch.nn.functional.linear"
    assert captures.exists(one)
    assert len(captures.find(one)) == 1
    assert not captures.exists(both.folder / "torch.no.such")
    assert cli.main(["replay", str(one), "--acc_check"]) == 0


def test_memory_shared_between_arguments_stays_shared_and_equal_contents_apart(device: str, fingerprinted: str) -> None:
    x = torch.zeros(8, device=device)
    with op_tools.OpCapture(ops=["torch.add"], format="store") as capture:
        torch.add(x[:4], x[4:])
        torch.add(x, torch.zeros(8, device=device))
    (first, second) = ([t.untyped_storage().data_ptr() for t in tensors_in(p["args"])] for p in parts(capture, "input"))
    assert first[0] == first[1]
    assert second[0] != second[1]
    assert capture.bytes_written == 32 + 16  # 32 bytes of zeros; the first sum


def test_the_files_of_a_running_capture_are_readable_and_a_torn_tail_is_reported(
    device: str, fingerprinted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(stored, "note", said.append)
    with op_tools.OpCapture(format="store") as capture:
        for number in range(4):
            torch.full((100,), float(number), device=device).exp()
        capture.writer.drain()
        killed = tmp_path / "killed.store"  # what is there after kill -9
        shutil.copytree(capture._files.folder, killed)
    calls = captures.find(killed)
    assert len(calls) == 8
    index = killed / segments.INDEX
    os.truncate(index, index.stat().st_size - 10)
    assert {*captures.find(killed)} < {*calls}
    assert len(captures.find(killed)) == 7
    assert said == [f"{killed}: its last call was being written when the run ended, and is not there"]
    assert [captures.read(path / "output.pth")["result"].numel() for path in captures.find(killed)] == [100] * 7
    for data in killed.glob("data-*"):
        os.truncate(data, 40)
    outcome = replay(captures.find(killed / "torch.Tensor.exp")[-1])
    assert outcome.status == "error"
    assert "is cut off" in outcome.reason


def test_a_full_disk_loses_what_does_not_fit_and_nothing_else(
    device: str, fingerprinted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = False

    def pwrite(descriptor: int, data: Any, place: int) -> int:
        if full:
            original(descriptor, data[:3], place)
            raise OSError(28, "No space left on device")
        return original(descriptor, data, place)

    original = os.pwrite
    monkeypatch.setattr(segments.os, "pwrite", pwrite)
    x, y = (torch.full((50,), float(n), device=device) for n in (1, 2))
    with op_tools.OpCapture(ops=["torch.exp"], format="store") as capture:
        torch.exp(x)
        capture.writer.drain()
        full = True
        torch.exp(y)
        torch.exp(x)  # all of it is there
        capture.writer.drain()
        full = False
        torch.exp(y)
    found = [payload["args"][0].tolist() for payload in parts(capture, "input")]
    assert found == [[1.0] * 50, [1.0] * 50, [2.0] * 50]
    assert [f.kind for f in capture.findings()] == ["tool-failure"]
    assert any("1 captures were dropped" in fact for fact in capture.summary())


def test_large_contents_go_in_pieces_and_many_in_portions(
    device: str, fingerprinted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_format, "_AT_ONCE", 1000)
    tensors = [torch.full((n,), float(n), device=device) for n in (10, 100, 300, 5, 251, 1)]
    with op_tools.OpCapture(ops=["torch.cat"], format="store") as capture:
        torch.cat(tensors)
    (payload,) = parts(capture, "input")
    assert all(same_bits(mine, theirs.cpu()) for mine, theirs in zip(payload["args"][0], tensors))
    assert same_bits(parts(capture, "output")[0]["result"], torch.cat(tensors).cpu())


def test_a_wait_that_is_interrupted_loses_its_call_alone(
    device: str, fingerprinted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.full((8,), 5.0, device=device)
    with op_tools.OpCapture(ops=["torch.exp"], format="store") as capture:
        with monkeypatch.context() as patched:
            patched.setattr(capture.writer, "reserve", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                torch.exp(x)
        torch.exp(x)
    assert [payload["args"][0].tolist() for payload in parts(capture, "input")] == [[5.0] * 8]
    assert capture.writer._bytes == 0


def _interrupt(nbytes: int) -> bool:
    raise KeyboardInterrupt


def test_a_tensor_that_another_stream_changes_meanwhile_is_not_taken_for_what_it_was(
    device: str, fingerprinted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(sample: torch.Tensor, start: int, end: int) -> torch.Tensor:
        found = original(sample, start, end)
        return found.add_(1) if changing and fingerprinted == "device" else found

    original, changing = store_format.copy_storage, True
    monkeypatch.setattr(store_format, "copy_storage", copy)
    x = torch.full((8,), 5.0, device=device)
    with op_tools.OpCapture(ops=["torch.exp"], format="store") as capture:
        torch.exp(x)
        capture.writer.drain()
        changing = False
        torch.exp(x)
    found = [payload["args"][0].tolist() for payload in parts(capture, "input")]
    assert found == [[5.0] * 8] * (1 if fingerprinted == "device" else 2)
    if fingerprinted == "device":
        assert "another stream wrote to a tensor while it was captured" in capture.findings()[0].message


def test_a_call_that_raises_leaves_its_arguments_to_others(device: str, fingerprinted: str) -> None:
    x = torch.ones(3, 4, device=device)
    with op_tools.OpCapture(format="store") as capture:
        with pytest.raises(RuntimeError):
            torch.mm(x, x)
        torch.exp(x)
    assert capture.writer._bytes == 0
    assert len(captures.find(capture._files.folder)) == 1
    assert same_bits(parts(capture, "input")[0]["args"][0], torch.ones(3, 4))


def test_a_queue_that_is_full_drops_and_says_so(
    device: str, fingerprinted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.pwrite
    monkeypatch.setenv("OP_CAPTURE_QUEUE_MB", "1")
    monkeypatch.setenv("OP_CAPTURE_WHEN_FULL", "drop")
    monkeypatch.setattr(segments.os, "pwrite", lambda *words: time.sleep(0.05) or original(*words))
    with op_tools.OpCapture(ops=["torch.exp"], format="store") as capture:
        for number in range(20):
            torch.exp(torch.full((100_000,), float(number), device=device))
    assert capture.writer.peak_bytes <= 1 << 20
    assert any("dropped" in fact for fact in capture.summary())
    for payload in parts(capture, "output"):
        assert payload["result"].numel() == 100_000


class _Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.exp(torch.full((4,), float(number)))


@pytest.mark.usefixtures("on_cpu_too")
def test_training_is_the_same_and_forked_workers_write_nothing(device: str, fingerprinted: str) -> None:
    def train() -> list[list[float]]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2).to(device)
        losses = []
        for batch in torch.utils.data.DataLoader(_Numbers(), num_workers=1):
            loss = F.dropout(model(batch.to(device)), 0.5).square().sum()
            loss.backward()
            losses.append(loss.tolist())
        return [losses, model.weight.grad.tolist()]

    bare = train()
    with op_tools.OpCapture(format="store") as capture:
        assert train() == bare
    store = stored.opened(capture._files.folder)
    assert not store.torn
    assert {call.op for call in store.calls.values()}.isdisjoint({"torch.exp", "torch.full"})
    assert sum(call.op == "torch.nn.functional.linear" for call in store.calls.values()) == 4


@pytest.mark.skipif(ditorch.backend.name != "cuda", reason="a GPU is needed")
def test_a_gpu_computes_fingerprints_itself() -> None:
    found = fingerprints._method(torch.device("cuda", 0))
    if importlib.util.find_spec("triton") is None:
        assert isinstance(found, fingerprints.ByOperators)
    else:
        assert isinstance(found, fingerprints.OnGpu), fingerprints.BROKEN
    x = torch.randn((1 << 26) + 1, device="cuda")
    odd = torch.ones(333, dtype=torch.uint8, device="cuda")
    spans = [(x, 0, x.nbytes), (odd, 0, 333), (x, 64, 128)] * 40
    expected = fingerprints.ByOperators(x.device)(spans[:3]) * 40
    assert fingerprints.of_device(spans) == expected
    assert fingerprints.from_sums(fingerprints.sums([x])[0].cpu().numpy().tobytes(), x.nbytes) == expected[0]


def test_a_running_command_chooses_the_store(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import torch\ntorch.ones(2, device={device!r}).exp()\n")
    assert cli.main(["run", "OpCapture", "--ops", "torch.Tensor.exp", str(script)]) == 0
    assert "OP_CAPTURE_FORMAT" not in os.environ
    folder = Path("op_tools_results/op_capture_results")
    (store,) = folder.glob("*.store")
    assert not (folder / "torch.Tensor.exp").exists()
    assert len(stored.opened(store).calls) == 1
    assert cli.main(["run", "OpCapture", "--format", "seed", "--ops", "torch.Tensor.exp", str(script)]) == 0
    assert (folder / "torch.Tensor.exp").exists()


def _gelu(x: torch.Tensor) -> torch.Tensor:
    inner = (2 / 3.14159265) ** 0.5 * (x + 0.044715 * torch.pow(x.float(), 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def test_results_of_one_rounding_are_written_as_their_operation(
    device: str, fingerprinted: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OP_TOOLS_RESULTS_DIR", str(tmp_path))
    x = torch.randn(512, 1040, device=device).bfloat16().requires_grad_()
    seen: dict[str, dict[str, list[torch.Tensor]]] = {}
    for layout in ("seed", "store"):
        torch.manual_seed(0)
        x.grad = None
        with op_tools.OpCapture(format=layout) as capture:
            _gelu(x).float().sum().backward()
        seen[layout] = {
            part: [t for read in parts(capture, part) for t in tensors_in(read)]
            for part in ("input", "output", "grad_inputs", "grad_outputs")
        }
    for part, tensors in seen["seed"].items():
        found = seen["store"][part]
        assert len(tensors) == len(found), part
        assert all(map(same_bits, tensors, found)), part
    size = x.numel() * 4
    if fingerprinted == "device":
        # x and its sum of gradients in bfloat16; what pow, tanh, their gradients and a product's two gradients are
        assert capture.bytes_written < 8 * size, "none of the sums, products and conversions"
        assert capture.bytes_captured > 30 * size


def test_nans_are_written_as_they_are(
    device: str, fingerprinted: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OP_TOOLS_RESULTS_DIR", str(tmp_path))
    x = torch.full((512, 1040), torch.nan, device=device)
    with op_tools.OpCapture(format="store") as capture:
        y = torch.mul(x, 3.0)
        torch.sub(y, x)
    assert len([*tmp_path.rglob(segments.INDEX)]) == 1
    assert '"derived"' not in next(tmp_path.rglob(segments.INDEX)).read_text()
    assert all(t.isnan().all() for read in parts(capture, "output") for t in tensors_in(read))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"do":"mul"', '"do":"add"', "other bits than the captured one"),
        ('"do":"mul"', '"do":"system"', "cannot be computed"),
        ('"of":[[', '"of":[[0,1,4],[', "makes no sense"),
        ('"derived":1,', '"derived":9,', "missing in the index"),
        ('"dtype":"float32"', '"dtype":"int64"', "cannot be computed"),
    ],
)
def test_damaged_operations_are_refused(
    device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, old: str, new: str, message: str
) -> None:
    monkeypatch.setattr(fingerprints, "_HOST_DEVICES", frozenset({"cpu"}))
    fingerprints._method.cache_clear()
    monkeypatch.setenv("OP_TOOLS_RESULTS_DIR", str(tmp_path))
    with op_tools.OpCapture(format="store") as capture:
        torch.mul(torch.randn(512, 1040, device=device), 3.0)
    index = next(tmp_path.rglob(segments.INDEX))
    text = re.sub(r',"line_crc32":\d+', "", index.read_text())  # as one that forges it would write it
    lines = text.splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if '"derived"' in line)
    assert old in lines[at]
    lines[at] = lines[at].replace(old, new)
    index.write_text("".join(lines))
    with pytest.raises(ArchiveError, match=message):
        parts(capture, "output")
    fingerprints._method.cache_clear()
