"""Captured files: faithful, whole or absent, and harmless to read."""

from __future__ import annotations

import json
import math
import os
import pickle
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from op_tools.call.description import Descriptions, tensors_in
from op_tools.copies.operands import Fetcher, Layouts, stage
from op_tools.files import archive, captures
from op_tools.files.archive import ArchiveError
from op_tools.files.seed_layout import CallFiles

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.uint8,
]


@st.composite
def strided(draw: Any) -> torch.Tensor:
    """Tensors of every layout that slicing, transposing and expanding can make."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    base = torch.arange(max(1, torch.Size(shape).numel())).to(dtype)[: torch.Size(shape).numel()].reshape(shape)
    if base.dim() and draw(st.booleans()):
        base = base.permute(*draw(st.permutations(range(base.dim()))))
    if base.dim() and draw(st.booleans()):
        base = base[draw(st.integers(0, 2)) :: draw(st.integers(1, 3))]
    if draw(st.booleans()):
        base = base.unsqueeze(0).expand(3, *base.shape)
    if base.is_complex() and draw(st.booleans()):
        base = base.conj()
    if base.dtype.is_floating_point and draw(st.booleans()):
        base = base.detach().requires_grad_()
    return base


def check_same(left: torch.Tensor, right: torch.Tensor) -> None:
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    assert left.stride() == right.stride()
    assert left.requires_grad == right.requires_grad
    assert left.is_conj() == right.is_conj()
    assert torch.equal(left.detach(), right.detach())


@given(st.lists(strided(), min_size=1, max_size=3))
@settings(deadline=None, max_examples=60)
def test_staged_tensors_keep_their_layout(tensors: list[torch.Tensor]) -> None:
    with torch.no_grad():
        back = Fetcher().unpack(stage(tensors))
    for old, new in zip(tensors, back):
        check_same(old, new)
        assert new.data_ptr() != old.data_ptr() or old.numel() == 0


@given(st.lists(strided(), min_size=1, max_size=3))
@settings(deadline=None, max_examples=60)
def test_saved_tensors_keep_their_layout(tensors: list[torch.Tensor]) -> None:
    path = Path("x.pth")
    archive.save(path, {"args": archive.encode(tuple(tensors))})
    for old, new in zip(tensors, captures.read(path)["args"]):
        check_same(old, new)
        assert old.storage_offset() == new.storage_offset()


def test_shared_memory_stays_shared() -> None:
    base = torch.randn(6, 6)
    with torch.no_grad():
        a, b, c = Fetcher().unpack(stage((base[1:], base.t(), torch.randn(2))))
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    assert c.untyped_storage().data_ptr() != a.untyped_storage().data_ptr()
    archive.save(Path("x.pth"), {"args": archive.encode((a, b))})
    a, b = captures.read(Path("x.pth"))["args"]
    a.zero_()
    assert b[:, 1:].abs().sum() == 0


def test_a_small_view_of_a_large_storage_is_cut_out() -> None:
    base = torch.randn(1 << 18)
    with torch.no_grad():
        staged = stage((base[1000:1010],))
    assert staged.nbytes < 1000
    (back,) = Fetcher().unpack(staged)
    assert torch.equal(back, base[1000:1010])


VALUES = [
    slice(1, None, 2),
    Ellipsis,
    torch.Size([1, 2]),
    torch.device("cpu"),
    torch.float16,
    torch.strided,
    torch.channels_last,
    range(1, 5, 2),
    {"a": [1, (2.5, None)], 3: "x"},
    2 + 3j,
    "text",
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_values_come_back(value: Any) -> None:
    archive.save(Path("x.pth"), {"args": archive.encode((value,))})
    assert captures.read(Path("x.pth"))["args"] == (value,)


def test_plain_torch_load_reads_a_capture() -> None:
    archive.save(Path("x.pth"), {"args": archive.encode((torch.ones(3), torch.nn.Parameter(torch.ones(2))))})
    first, second = torch.load("x.pth", weights_only=True)["args"]
    assert first.tolist() == [1.0] * 3
    assert second.requires_grad


def test_large_records_and_sparse_tensors() -> None:
    big = torch.randn(300_000)
    archive.save(Path("x.pth"), {"args": archive.encode((big, torch.eye(3).to_sparse()))})
    back, sparse = captures.read(Path("x.pth"))["args"]
    assert torch.equal(back, big)
    assert torch.equal(sparse.to_dense(), torch.eye(3))


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch exploded",)


def test_nothing_in_a_file_is_executed() -> None:
    torch.save({"format": 1, "args": (Bomb(),)}, "x.pth")
    with pytest.raises(ArchiveError, match=r"x\.pth: cannot be read"):
        captures.read(Path("x.pth"))
    Path("y.pth").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ArchiveError, match=r"y\.pth"):
        captures.read(Path("y.pth"))
    assert not Path("exploded").exists()


@given(st.integers(0, 2000))
@settings(deadline=None, max_examples=40)
def test_truncated_files_are_a_clear_error(length: int) -> None:
    archive.save(Path("whole.pth"), {"args": archive.encode((torch.arange(100),))})
    content = Path("whole.pth").read_bytes()
    Path("cut.pth").write_bytes(content[: min(length, len(content) - 1)])
    with pytest.raises(ArchiveError, match=r"cut\.pth"):
        captures.read(Path("cut.pth"))


def test_foreign_files_are_a_clear_error() -> None:
    torch.save([1, 2], "x.pth")
    with pytest.raises(ArchiveError, match="not an op_tools capture"):
        captures.read(Path("x.pth"))
    torch.save({"format": 99}, "x.pth")
    with pytest.raises(ArchiveError, match="format 99"):
        captures.read(Path("x.pth"))


def test_a_failed_write_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archive, "write_archive", fail)
    with pytest.raises(OSError, match="No space"):
        archive.save(Path("x.pth"), {"args": ()})
    assert not Path("x.pth").exists()


def test_opaque_arguments_are_described() -> None:
    encoded = archive.encode((object(), torch.zeros(1)))
    archive.save(Path("x.pth"), {"args": encoded})
    args = captures.read(Path("x.pth"))["args"]
    assert archive.unknown_in(args) == ["builtins.object"]
    assert len(list(tensors_in(args))) == 1


# -- calls that look alike -----------------------------------------------------------------------------


@st.composite
def _arguments(draw: st.DrawFn) -> Callable[[float], tuple[Any, ...]]:
    """A function that makes arguments of one fixed layout with values that depend on its argument."""
    dtype = draw(
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
    )
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    step, transposed, shared = draw(st.integers(1, 2)), draw(st.booleans()), draw(st.booleans())
    grad = draw(st.booleans()) and dtype.is_floating_point
    constant = draw(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3)))
    large = draw(st.booleans())

    def make(seed: float) -> tuple[Any, ...]:
        base = (torch.arange(40000 if large else 8 * math.prod(shape)) * seed).to(dtype)
        view = base[1 : 1 + math.prod(shape) * step : step].view(shape) if step == 1 else base[3::step][: shape[0]]
        view = view.t() if transposed and view.dim() == 2 else view
        other = base[: shape[0]] if shared else base[: shape[0]].clone()
        return (view.detach().requires_grad_(grad), [other, constant], (), 2**40)

    return make


@given(_arguments())
@settings(max_examples=150, deadline=None)
def test_the_second_of_two_calls_that_look_alike_is_written_as_faithfully(make: Callable[[float], Any]) -> None:
    layouts, seen = Layouts(), Descriptions()
    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate((1.0, 2.0)):
            args = make(seed)
            tensors: list[torch.Tensor] = []
            described = seen.of(args, {}, tensors, False)
            staged = layouts.stage(described.number, tensors, (args, {}))
            assert staged.layout is not None
            files = CallFiles(f"{folder}/{number}", Fetcher())
            told = files.add("input", staged, {"name": "torch.add", "id": number, "autocast": None})
            payload = captures.read(Path(f"{folder}/{number}/input.pth"))
            loaded = payload["args"]
            assert (payload["name"], payload["id"], payload["kwargs"]) == ("torch.add", number, {})
            assert loaded[1][1] == args[1][1]
            assert loaded[2:] == args[2:]
            assert json.loads(told)["inputs[0]"]["shape"] == list(args[0].shape)
            for mine, theirs in zip(tensors_in(loaded), tensors):
                assert torch.equal(mine, theirs)
                assert (mine.dtype, mine.stride(), mine.requires_grad) == (
                    theirs.dtype,
                    theirs.stride(),
                    theirs.requires_grad,
                )
            together = [t.untyped_storage().data_ptr() for t in tensors_in(loaded)]
            originals = [t.untyped_storage().data_ptr() for t in tensors]
            assert (together[0] == together[1]) == (originals[0] == originals[1])
        known = next(iter(layouts._known.values())).notes
        assert "input" in known, "the second call took the short way"


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
        lambda v: st.one_of(st.lists(v), st.lists(v).map(tuple), st.dictionaries(st.text(), v)),
        max_leaves=10,
    )
)
def test_fragments_are_pickles(value: Any) -> None:
    assert repr(pickle.loads(b"\x80\x02" + archive.fragment(value) + b".")) == repr(value)


def test_several_threads_read_files_of_torch_save_at_once(tmp_path: Path) -> None:
    """PyTorch's list of types that may be loaded belongs to the whole process: one reader must not end another's."""
    file = tmp_path / "output.pth"
    torch.save({"name": "torch.sort", "args": (torch.ones(3).sort(),), "kwargs": {}, "identifier": "1/output"}, file)

    def read_often(_: int) -> None:
        for _ in range(40):
            captures.encoded(file)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read_often, range(4)))
