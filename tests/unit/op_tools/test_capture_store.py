"""Capture stores on disk: faithful, and safe to read whatever is in them."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from op_tools import cli
from op_tools.call.description import Descriptions, tensors_in
from op_tools.copies.operands import Layouts
from op_tools.copies.queue import Writer
from op_tools.files import captures, segments, stored
from op_tools.files.archive import ArchiveError
from op_tools.files.store_format import StoreFormat
from op_tools.native import fingerprints

from .test_archive import strided
from .test_plain_archive import VALUES, same

ON_CPU = fingerprints.ByOperators(torch.device("cpu"))


def write(folder: Path, *calls: tuple[Any, ...], op: str = "torch.add") -> Path:
    """A store with calls of these arguments; the result of each is its arguments."""
    writer = Writer(1 << 30)
    made = StoreFormat(folder, "7", writer)
    layouts, seen = Layouts(), Descriptions()
    for number, args in enumerate(calls, 1):
        staged = {}
        for part, value, described in (("input", (args, {}), args), ("output", args, (args,))):
            tensors: list[torch.Tensor] = []
            described = seen.of(described, {}, tensors, False)
            staged[part] = made.stage(layouts, described.number, tensors, value)[0]
        facts = {"name": op, "id": number, "step": number - 1, "rng": {"cpu": torch.get_rng_state(), "type": "cpu"}}
        done: list[Any] = []
        call = {"id": number, "step": number - 1}
        writer.drain()
        made.write(f"{op}/7/{number}/now", call, staged, facts, done.append)
        assert done == [None]
    writer.close()
    made.close()
    return made.folder


def together(tensors: list[torch.Tensor]) -> list[int]:
    """Which tensors share memory: the number of the storage of each."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(t.untyped_storage()._cdata, len(numbers)) for t in tensors]


@pytest.mark.parametrize("by", ["host", "device"])
def test_it_reads_what_was_written(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if by == "device":
        monkeypatch.setattr(
            fingerprints, "of_device", lambda spans: [ON_CPU([s])[0] if s[2] > s[1] else None for s in spans]
        )
        monkeypatch.setattr(fingerprints, "sums", lambda copies: [ON_CPU.sums(copy) for copy in copies])

    @given(VALUES, st.lists(strided(), max_size=3), st.booleans())
    @settings(deadline=None, max_examples=40)
    def check(value: Any, tensors: list[torch.Tensor], shared: bool) -> None:
        with tempfile.TemporaryDirectory() as folder:
            more = [tensors[0].detach(), tensors[0].detach().clone()] if shared and tensors else []
            args = (value, [*tensors, *more], {3: complex(1, float("-inf"))}, torch.nn.Parameter(torch.ones(2)))
            calls = captures.find(write(Path(folder), args, args))
            for path in calls:
                payload = captures.read(path / "input.pth")
                assert same(payload["args"][:3], args[:3])
                assert together(list(tensors_in(payload["args"]))) == together(list(tensors_in(args)))
                assert same(captures.read(path / "output.pth")["result"], payload["args"])
                assert payload["name"] == "torch.add"
                assert torch.equal(payload["rng"]["cpu"], torch.get_rng_state())
            assert len(calls) == 2

    check()


@given(st.binary(min_size=1, max_size=200), st.data())
@settings(deadline=None, max_examples=60)
def test_fingerprints_tell_contents_apart(content: bytes, data: st.DataObject) -> None:
    def of(some: bytes) -> Any:
        return ON_CPU([(torch.frombuffer(bytearray(some), dtype=torch.uint8), 0, len(some))])[0]

    place, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
    other = bytearray(content)
    other[place] ^= 1 << bit
    assert of(content) == of(bytes(content)) != of(bytes(other))
    assert of(content) != of(content + b"\0")
    doubled = [of(content + bytes(other)), of(bytes(other) + content)]
    assert doubled[0] != doubled[1], "the order counts"


def test_signs_that_change_in_pairs_are_seen() -> None:
    x = torch.randn(1 << 12, dtype=torch.float64)
    found = {ON_CPU([(x * sign, 0, x.nbytes)])[0] for sign in (1.0, -1.0)}
    for first in range(0, 64, 2):
        y = x.clone()
        y[[first, first + 1]] *= -1
        found.add(ON_CPU([(y, 0, y.nbytes)])[0])
    assert len(found) == 34


def test_numbers_beyond_32_bits_are_read(tmp_path: Path) -> None:
    store = write(tmp_path, (torch.ones(4),))
    (data,) = store.glob("data-*")
    place = (1 << 32) + 64
    with open(data, "r+b") as file:  # most of the file is a hole
        file.seek(place)
        file.write(torch.full((4,), 2.0).numpy().tobytes())
    index = store / segments.INDEX
    index.write_text(without_sums(index.read_text()).replace("[[1,0,16]", f"[[1,{place},16]"))
    (call,) = captures.find(store)
    assert captures.read(call / "input.pth")["args"][0].tolist() == [2.0] * 4


def without_sums(index: str) -> str:
    """An index as one that forges it would write it: without checksums, as the first version did."""
    return re.sub(r',"line_crc32":\d+|"crc32":\[[\d, ]*\],', "", index)


def test_damage_in_a_store_is_noticed(tmp_path: Path) -> None:
    store = write(tmp_path, (torch.rand(40_000), torch.rand(3)))
    (data,), index = store.glob("data-*"), store / segments.INDEX
    (call,) = captures.find(store)
    whole = data.read_bytes()
    for place in (0, 80_001, 160_000 + 11):  # the first tensor, and the second
        data.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(ArchiveError, match=r"is damaged: the checksum of data-1.bin at byte"):
            captures.read(call / "input.pth")
    data.write_bytes(whole)
    assert captures.read(call / "input.pth")["args"][1].shape == (3,)
    index.write_text(index.read_text().replace('"step":0', '"step":1'))
    assert stored.CaptureStore(store).torn == "1 damaged line was left out"


TENSOR = '"storage":0,"dtype":"float32","shape":[4],"stride":[1],"offset":0'
HOSTILE: list[tuple[Callable[[str], str], str]] = [
    (lambda text: text.replace("[[1,0,16]", "[[1,0,16000]"), "is cut off"),
    (lambda text: text.replace("[[1,0,16]", "[[1,-64,16]"), "makes no sense"),
    (lambda text: text.replace("[[1,0,16]", '[["../1",0,16]'), "makes no sense"),
    (lambda text: text.replace("[[1,0,16]", "[[9,0,16]"), "data-9.bin is missing"),
    (lambda text: text.replace("[[1,0,16]", f"[[1,0,{1 << 60}]"), "GiB are free for it here"),
    (lambda text: text.replace(TENSOR, TENSOR.replace("[4]", "[5]")), "larger than its storage"),
    (lambda text: text.replace(TENSOR, TENSOR.replace("[1]", "[-1]")), "makes no sense"),
    (lambda text: text.replace(TENSOR, TENSOR.replace("float32", "load")), "makes no sense"),
    (lambda text: text.replace(TENSOR, TENSOR.replace('"storage":0', '"storage":99')), "makes no sense"),
    (lambda text: text.replace('"$":"tuple"', '"$":"system"'), "written by a newer version"),
    (lambda text: text.replace('"args":', '"arms":'), "no 'args' in it"),
]


@pytest.mark.parametrize(("change", "reason"), HOSTILE, ids=[reason for _, reason in HOSTILE])
def test_a_store_that_was_tampered_with_is_refused(tmp_path: Path, change: Callable[[str], str], reason: str) -> None:
    from op_tools.replay.check import Options, replay

    store = write(tmp_path, (torch.ones(4),))
    (call,) = captures.find(store)
    index = store / segments.INDEX
    text = without_sums(index.read_text())
    assert change(text) != text
    index.write_text(change(text))
    outcome = replay(call, Options("cpu"))
    assert outcome.status == "error"
    assert reason in outcome.reason
    assert str(call) in outcome.reason


def test_a_folder_outside_the_store_is_no_call(tmp_path: Path) -> None:
    store = write(tmp_path, (torch.ones(4),))
    index = store / segments.INDEX
    for evil in ("../../evil/1/now", "/etc/evil/1/now", "torch.add//1/now"):
        text = without_sums(index.read_text())
        index.write_text(text.replace("torch.add/7/1/now", evil))
        found = stored.CaptureStore(store)
        assert found.calls == {}
        assert found.torn == "1 damaged line was left out"
        index.write_text(text)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"id":1', '"id":Infinity'),
        lambda text: text.replace('"bytes":', '"bytes":1e999,"was":'),
        lambda text: text.replace('"folder":"', '"derived":-Infinity,"folder":"'),
        lambda text: text.replace('"folder":"', '"folder":"' + "a/" * 5_000),
        lambda text: text.replace('"folder":"', '"folder":"' + "é" * 200),
        lambda text: text.replace('"folder":"', '"folder":"\\ud800'),
        lambda text: text.replace('"folder":"', '"folder":"\\u001b[2J\\n'),
        lambda text: text.replace('"op":"', '"op":"\\ud800'),
    ],
)
def test_a_call_that_no_run_writes_is_left_out(tmp_path: Path, change: Callable[[str], str]) -> None:
    store = write(tmp_path, (torch.ones(4),))
    index = store / segments.INDEX
    text = without_sums(index.read_text())
    head, _, calls = text.partition("\n")
    index.write_text(f"{head}\n{change(calls)}{calls}")
    assert change(calls) != calls
    found = stored.CaptureStore(store)
    assert len(found.calls) == 1
    assert found.torn == "1 damaged line was left out"
    assert all(captures.read(call / "input.pth") for call in captures.find(store))


def test_a_sparse_index_is_not_read_to_its_end(tmp_path: Path) -> None:
    store = write(tmp_path, (torch.ones(4),))
    os.truncate(store / segments.INDEX, 1 << 42)  # reading it would take hours
    found = stored.CaptureStore(store)
    assert len(found.calls) == 1
    assert found.torn


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        ("{}", "is not the index of a capture store"),
        (json.dumps({"format": segments.MAGIC, "version": 3}), "has version 3, this op_tools reads 1 to 2"),
        (json.dumps({"format": segments.MAGIC, "version": 1, "byteorder": "middle"}), "another byte order"),
        ("", "is empty or cut off"),
    ],
)
def test_an_index_that_cannot_be_read_is_one_failure(tmp_path: Path, head: str, reason: str) -> None:
    (tmp_path / "x.store").mkdir()
    (tmp_path / "x.store" / segments.INDEX).write_text(head)
    good = captures.find(write(tmp_path, (torch.ones(4),)))
    assert {*captures.find(tmp_path)} == {tmp_path / "x.store", *good}
    with pytest.raises(ArchiveError, match=reason):
        captures.read(tmp_path / "x.store" / "input.pth")


def test_an_empty_content_lies_within_its_file(tmp_path: Path) -> None:
    store = segments.StoreWriter(tmp_path / "x.store", "7")
    blobs = []
    for content in (b"abc", b""):
        blobs.append(store.claim(content, len(content))[0])
        store.write(blobs[-1], [content])
    done: list[Any] = []
    call = {"folder": "torch.add/7/1/now", "op": "torch.add", "id": 1, "step": 0, "bytes": 3}
    store.add(call, {"input": ('"value":null', blobs)}, done.append)
    store.close()
    assert done == [None]
    flats = stored.CaptureStore(store.folder)._contents(_places(store.folder, 1, "input"))
    assert [flat.numel() for flat in flats] == [3, 0]


def test_a_second_store_of_the_same_second_has_its_own_folder(tmp_path: Path) -> None:
    assert len({write(tmp_path, (torch.ones(4),)) for _ in range(3)}) == 3


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["{store}"], "--to DIR is missing"),
        (["{store}", "--to", "{out}", "--ops", "torch.adds"], "--ops: 'torch.adds' matched no operator; did you mean"),
        (["{store}", "--to", "{out}", "--ops", "torch.("], "is not a valid regular expression"),
        (["{store}", "--to", "{out}", "--ids", "7"], "--ids: no such call; those there have id 1 to 3"),
        (["{store}", "--to", "{out}", "--ids", "x"], "write numbers or ranges, such as 3 or 3,7:9"),
        (["{store}", "--to", "{out}", "--steps", "5:3"], "the range 5:3 is empty"),
        (["{store}", "--to", "{out}", "--steps", "9:"], "--steps: no such call; those there have step 0 to 2"),
        (["{store}/torch.mul", "--to", "{out}"], "no such call in the store"),
        (["{out}/nothing", "--to", "{out}"], "no such file or folder"),
        (["{empty}", "--to", "{out}"], "no capture store (calls.jsonl) under it"),
        (["{store}", "--to", "{store}/x"], "is inside a capture store"),
        (["{store}", "--to", "{store}/calls.jsonl"], "is inside a capture store"),
        (["{store}", "--to", "{file}"], "cannot be made"),
    ],
)
def test_mistakes_in_an_export_are_told(
    tmp_path: Path, words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = write(tmp_path / "stores", *[(torch.ones(n),) for n in (1, 2, 3)])
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    places = {name: tmp_path / name for name in ("out", "empty", "file")} | {"store": store}
    before = sorted(store.iterdir())
    assert cli.main(["export", *(word.format(**places) for word in words)]) == 2
    assert reason in capsys.readouterr().err
    assert sorted(store.iterdir()) == before


def test_an_export_writes_the_chosen_calls_and_skips_what_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = write(tmp_path / "stores", *[(torch.full((16,), float(n)),) for n in (1, 2, 3)])
    assert cli.main(["export", str(store), "--list"]) == 0
    listed = capsys.readouterr().out
    assert "| torch.add |   3   | 1 to 3 | 0 to 2 |" in listed
    assert cli.main(["records", str(store)]) == 0
    assert capsys.readouterr().out == listed
    assert cli.main(["export", str(tmp_path), "--to", str(tmp_path / "a"), "--ids", "2:", "--steps", "1"]) == 0
    assert [path.parent.parent.name for path in (tmp_path / "a").rglob("input.pth")] == ["2"]
    (data,) = store.glob("data-*")
    (first,) = [place for place in _places(store, 3) if place[2] == 64]
    os.truncate(data, first[1] + 10)
    assert cli.main(["export", str(store), "--to", str(tmp_path / "b")]) == 1
    told = capsys.readouterr()
    assert "2 calls, 4 files" in told.out
    assert "is cut off" in told.err


def _places(store: Path, number: int, part: str = "output") -> list[list[int]]:
    lines = [json.loads(line) for line in (store / segments.INDEX).read_text().splitlines()]
    return next(line["parts"][part]["blobs"] for line in lines if line.get("id") == number)
