"""The fast reader of captures: says what `torch.load` says, or nothing."""

from __future__ import annotations

import math
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from op_tools.files import archive, captures, limits, plain_archive
from op_tools.files.archive import ArchiveError

from .test_archive import Bomb, check_same, strided

NUMBERS = st.one_of(st.integers(), st.integers(-(2**31), 2**31 - 1), st.floats(allow_nan=False))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(), st.sampled_from([torch.float16, torch.device("cpu")])),
    lambda some: st.one_of(
        st.lists(some, max_size=4),
        st.lists(some, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=5), some, max_size=3),
    ),
    max_leaves=10,
)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        check_same(left, right)
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(map(same, left.values(), right.values()))
    return bool(left == right or (left != left and right != right))


@given(VALUES, st.lists(strided(), max_size=3))
@settings(deadline=None, max_examples=100)
@example((2**31 - 1, -(2**31), 2**31, -(2**31) - 1, 2**2000, math.inf, -0.0, "\ud800"), [])
def test_it_reads_what_was_written(value: Any, tensors: list[torch.Tensor]) -> None:
    path = Path("x.pth")
    archive.save(path, {"args": archive.encode((value, tensors))})
    found = plain_archive.load(path)
    if any(t.is_conj() for t in tensors):
        assert found is None
    else:
        assert same(found, torch.load(path, weights_only=True))


def test_numbers_and_tensors_beyond_the_plain_form_are_written_all_the_same() -> None:
    path = Path("x.pth")
    for odd in (1j, torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2).to_sparse()):
        archive.save(path, {"args": archive.encode((odd,))})
        assert plain_archive.load(path) is None
        assert captures.read(path)["args"][0].__class__ is odd.__class__


def test_tensors_without_a_storage_class_of_their_dtype_are_written_all_the_same() -> None:
    z = torch.arange(6).to(torch.complex64)
    tensors = (z, torch.view_as_real(z)[1:], z.conj().imag, torch.ones(3).to(torch.float8_e5m2))
    archive.save(Path("x.pth"), {"args": tensors})
    found = captures.read(Path("x.pth"))["args"]
    for old, new in zip(tensors, found):
        assert (new.dtype, new.stride(), new.is_neg()) == (old.dtype, old.stride(), old.is_neg())
        assert torch.equal(new.to(torch.complex64), old.to(torch.complex64))
    assert found[0].untyped_storage()._cdata == found[1].untyped_storage()._cdata


def test_tensors_share_memory_as_they_did_and_can_be_written_to() -> None:
    x = torch.arange(6.0)
    archive.save(Path("x.pth"), {"args": (x[:4], x[2:], torch.ones(2), torch.empty(0))})
    a, b, c, d = plain_archive.load(Path("x.pth"))["args"]
    a[2] = 77
    assert (b[0], b.storage_offset(), d.shape) == (77, 2, (0,))
    assert a.untyped_storage()._cdata == b.untyped_storage()._cdata != c.untyped_storage()._cdata
    assert c.tolist() == [1, 1]


@pytest.mark.parametrize("aligned", [0, 1, 2])
def test_records_are_as_aligned_as_tensors_are(aligned: int) -> None:
    archive.save(Path("x.pth"), {"text": "x" * aligned, "args": (torch.ones(3), torch.ones(5, dtype=torch.float64))})
    assert [t.data_ptr() % 64 for t in plain_archive.load(Path("x.pth"))["args"]] == [0, 0]


def test_what_others_wrote_is_left_to_torch() -> None:
    path = Path("x.pth")
    torch.save({"format": 1, "x": torch.ones(2)}, path)
    assert plain_archive.load(path) is None
    torch.save({"format": 1, "x": Bomb()}, path)
    assert plain_archive.load(path) is None
    for content in (b"", b"PK\5\6" + bytes(18), b"x" * 100):
        path.write_bytes(content)
        assert plain_archive.load(path) is None
    assert plain_archive.load(Path("missing.pth")) is None


@pytest.fixture
def _sums_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever forges a file writes checksums that fit: they must not be what protects the reader."""
    monkeypatch.setattr(plain_archive, "check_sum", lambda *_: None)


@pytest.mark.usefixtures("_sums_fit")
@given(st.data())
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_files_are_read_as_torch_reads_them_or_not_at_all(data: st.DataObject) -> None:
    path = Path("x.pth")
    x = torch.arange(4.0)
    archive.save(path, {"args": (x, x[1:3], torch.ones(2, dtype=torch.int64), {"dim": 3}), "kwargs": {"p": 0.5}})
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content))
    found = plain_archive.load(path)
    if found is not None:
        assert same(found, torch.load(path, weights_only=True))


@pytest.mark.usefixtures("_sums_fit")
@pytest.mark.slow
def test_any_damaged_byte_is_read_as_torch_reads_it_or_not_at_all() -> None:
    path = Path("x.pth")
    archive.save(path, {"args": (torch.ones(2), 3)})
    whole, read = path.read_bytes(), 0
    for place, byte in enumerate(whole):
        for other in {0, 1, 255, byte ^ 1, byte ^ 16, (byte + 1) % 256} - {byte}:
            path.write_bytes(whole[:place] + bytes([other]) + whole[place + 1 :])
            found = plain_archive.load(path)
            if found is not None:
                read += 1
                assert same(found, torch.load(path, weights_only=True)), place
    assert read > 100  # values, sums of bytes that nobody looks at, padding


@pytest.mark.parametrize("odd", [False, True], ids=["plain", "by torch.save"])
def test_every_damaged_bit_of_tensor_data_is_noticed(odd: bool) -> None:
    path, x, small = Path("x.pth"), torch.rand(70_000), torch.rand(5)
    archive.save(path, {"args": (x, small, small.to_sparse() if odd else 1)})
    whole = path.read_bytes()
    starts = [whole.index(t.numpy().tobytes()) for t in (x, small)]
    places = [starts[0], starts[0] + 140_001, starts[0] + 279_999, starts[1], starts[1] + 19]
    for place in places:
        for bit in (1, 128):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            with pytest.raises(archive.Damaged, match=r"is damaged: the checksum of .*/data/"):
                captures.encoded(path)
    path.write_bytes(whole)
    assert torch.equal(captures.encoded(path)["args"][0], x)


def test_the_checksums_are_those_of_zip_and_files_without_them_are_read() -> None:
    path, x = Path("x.pth"), torch.rand(70_000)
    archive.save(path, {"args": (x,)})
    with zipfile.ZipFile(path) as records:
        assert records.testzip() is None  # what `unzip -t` asks
        sums = [entry.CRC for entry in records.infolist() if entry.file_size == x.nbytes]
    path.write_bytes(path.read_bytes().replace(sums[0].to_bytes(4, "little"), bytes(4)))  # as earlier versions wrote
    assert torch.equal(captures.encoded(path)["args"][0], x)


def test_a_large_file_is_looked_at_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("x.pth")
    with path.open("wb") as file:
        file.truncate(3 << 30)  # a hole
    read: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, into, *at: read.append(len(into[0])) or preadv(file, into, *at))
    with pytest.raises(ArchiveError, match="cannot be read as a capture"):
        captures.encoded(path)
    assert sum(read) < 1_000


def test_a_file_that_claims_more_than_the_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("x.pth")
    archive.save(path, {"args": (torch.zeros(9 << 20),)})
    monkeypatch.setattr(limits, "free_memory", lambda: 10 << 20)
    with pytest.raises(ArchiveError, match=r"it needs 0.0 GiB; 0.0 GiB are free for it here"):
        captures.encoded(path)


@pytest.mark.usefixtures("_sums_fit")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"J\x03\0\0\0t(J\x01\0\0\0t", b"J\x05\0\0\0t(J\x01\0\0\0t"),  # longer than its storage
        (b"J\x03\0\0\0t(J\x01\0\0\0t", b"J\x03\0\0\0t(J\x02\0\0\0t"),
        (b"J\x03\0\0\0t(J\x01\0\0\0t", b"J\x03\0\0\0t(J\xff\xff\xff\xfft"),
        (b"J\x03\0\0\0t(J\x01\0\0\0t", b"J\xff\xff\xff\xfft(J\x01\0\0\0t"),
        (b"FloatStorage", b"BoolStorages"),
        (b"_rebuild_tensor_v2", b"_rebuild_tensor_v3"),
        (b"X\x01\0\0\x000X", b"X\x01\0\0\x009X"),  # a record that is not there
        (b"little", b"bottle"),
    ],
)
def test_nothing_outside_a_storage_is_seen(old: bytes, new: bytes) -> None:
    path = Path("x.pth")
    archive.save(path, {"args": (torch.ones(3),)})
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))
    assert plain_archive.load(path) is None
