"""Places in shared memory, what can be told to another process, and its side of the conversation."""

from __future__ import annotations

import multiprocessing
import os
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from op_tools.call.description import tensors_in
from op_tools.compare import process
from op_tools.compare.process import write_pieces
from op_tools.compare.ring import Ring
from op_tools.compare.trees import needs_gradients, sendable
from op_tools.compare.worker import Answer, Message, Options, Worker
from op_tools.copies.invocation import Region
from op_tools.copies.operands import Layouts, Operands, stage
from op_tools.judge.verdict import Rules
from op_tools.view.rows import Row

OPTIONS = Options(Rules(), 1 << 20, 1 << 30, 10.0)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
@given(
    gaps_and_sizes=st.lists(st.tuples(st.sampled_from([0, 1, 63, 4096, 4097]), st.integers(0, 300)), max_size=40),
    most=st.integers(1, 5),
    short=st.integers(1, 50),
)
def test_pieces_are_written_to_their_places(gaps_and_sizes: list[tuple[int, int]], most: int, short: int) -> None:
    """Whatever lies between them, and where the system writes less than it was given."""
    pieces, place, rng = list[tuple[int, torch.Tensor]](), 0, torch.Generator().manual_seed(most)
    for gap, size in gaps_and_sizes:
        place += gap
        pieces.append((place, torch.randint(1, 255, (size,), dtype=torch.uint8, generator=rng)))
        place += size
    pieces = pieces[len(pieces) // 2 :] + pieces[: len(pieces) // 2]  # a ring begins again somewhere
    memory, write = os.memfd_create("test"), os.pwritev
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "_MAX_PIECES", most)
        patch.setattr(os, "pwritev", lambda file, buffers, at: write(file, [memoryview(buffers[0])[:short]], at))
        try:
            write_pieces(memory, pieces)
            for start, piece in pieces:
                assert os.pread(memory, len(piece), start) == bytes(piece.tolist())
        finally:
            os.close(memory)


@given(
    steps=st.lists(st.one_of(st.integers(0, 120), st.just("give"), st.integers(-5, -1)), max_size=80),
    size=st.integers(1, 300),
)
def test_places_never_overlap_and_come_back(steps: list[Any], size: int) -> None:
    ring = Ring(size)
    taken: list[tuple[int, int]] = []
    for step in steps:
        if step == "give" or (isinstance(step, int) and step < 0):
            if taken:  # mostly in order
                ring.give(taken.pop(0 if step == "give" else step % len(taken))[0])
            continue
        start = ring.take(step)
        if start is None:
            assert taken or step > size, "an empty ring has room"
            continue
        assert 0 <= start <= start + step <= size
        for other, length in taken:
            assert start + step <= other or other + length <= start or not (step and length)
        taken.append((start, step))
    for start, _ in taken:
        ring.give(start)
    assert ring.take(size) == 0


def test_a_call_without_bytes_has_a_place_of_its_own() -> None:
    ring = Ring(256)
    assert [ring.take(64) for _ in range(4)] == [0, 64, 128, 192]
    ring.give(0)
    assert ring.take(64) == 0  # around the end, and full
    assert ring.take(0) is None
    ring.give(64)
    assert ring.take(0) == 64
    assert ring.take(64) is None, "the rest is in use"


def staged(*args: Any, **kwargs: Any) -> Operands:
    tensors = list(tensors_in((args, kwargs)))
    return Layouts().stage(1, tensors, (args, kwargs))


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((torch.ones(2), 3, 1.5, "mean", None, True), True),
        ((torch.ones(2), [torch.ones(3), (2, 1)], slice(0, 1), ..., torch.float16), True),
        ((torch.ones(2), torch.Generator()), False),
        ((torch.ones(2), object()), False),
    ],
    ids=["numbers", "nested", "generator", "object"],
)
def test_what_can_be_told_to_another_process(args: tuple[Any, ...], expected: bool) -> None:
    assert sendable(staged(*args)) is expected
    assert not sendable(stage(args)), "a layout that nothing else has is not sent"


def test_who_may_get_gradients() -> None:
    x, y = torch.ones(2), torch.ones(2, requires_grad=True)
    found = [needs_gradients(s.layout) for s in (staged(x, 2), staged(x, [y]), staged(x, weight=y)) if s.layout]
    assert found == [False, True, True]


class Conversation:
    """A helper in a thread, and what the run would do with it."""

    def __init__(self) -> None:
        self.ours, theirs = multiprocessing.Pipe()
        self.buffer = torch.zeros(1 << 16, dtype=torch.uint8)
        self.helper = Worker(self.buffer, OPTIONS)
        self.thread = threading.Thread(target=self.helper.serve, args=(theirs,))
        self.thread.start()
        self.used = self.trees = self.number = 0

    def put(self, value: Any) -> tuple[int, tuple[tuple[int, int], ...]]:
        part = stage(value)
        spans = []
        for storage in part.storages:
            flat = storage.contiguous().view(torch.uint8).reshape(-1)
            self.buffer[self.used : self.used + len(flat)] = flat
            spans.append((self.used, len(flat)))
            self.used += (len(flat) + 63) // 64 * 64
        self.trees += 1
        self.ours.send(("tree", (self.trees, part.tree)))
        return self.trees, tuple(spans)

    def ask(self, phase: str, op: str, before: Any, after: Any, memory: int = 1) -> Answer:
        self.number += 1
        task = Message(self.number, phase, (op, Region("cuda"), (3, 4)), 64, memory)
        if before is not None:
            tree, spans = self.put(before)
            task = task._replace(before=tree, before_spans=spans)
        tree, spans = self.put(after)
        self.ours.send(("job", task._replace(after=tree, after_spans=spans)))
        (answer,) = self.ours.recv()
        assert answer.number == self.number
        return answer

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: Any) -> None:
        self.ours.close()
        self.thread.join(10)
        assert not self.thread.is_alive()


def test_right_calls_come_back_as_rows_and_wrong_ones_are_handed_back() -> None:
    x, w = torch.randn(5, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    y = torch.nn.functional.linear(x, w)
    sent = torch.randn(5, 4)
    grads = torch.autograd.grad(y, [x, w], sent)
    op, args = "torch.nn.functional.linear", ((x, w), {})
    with Conversation() as talk:
        right = talk.ask("forward", op, args, ((x, w), {}, y.detach()))
        assert right.rows is not None
        assert [Row._make(row).name for row in right.rows] == [f"{op} input[0]", f"{op} input[1]", f"{op} output"]
        back = talk.ask("backward", op, None, ([sent], list(grads)))
        assert back.rows is not None
        assert len(back.rows) == 2
        again = talk.ask("backward", op, None, ([sent], [grads[0] * 1.01, grads[1]]))
        assert again.rows is None
        assert again.before is not None
        assert [torch.frombuffer(bytearray(b), dtype=torch.float32).tolist() for b in again.before] == [
            x.flatten().tolist(),
            w.flatten().tolist(),
        ]
        wrong = talk.ask("forward", op, args, ((x, w), {}, y.detach() * 1.01), memory=2)
        assert wrong.rows is None
        changed = talk.ask("forward", op, args, ((x + 1, w), {}, y.detach()), memory=3)
        assert changed.rows is None


@pytest.mark.parametrize("op", ["os.system", "torch.no_such_operator", "torch.load", "__main__.f"])
def test_only_operators_of_pytorch_run(op: str) -> None:
    x = torch.ones(2)
    with Conversation() as talk:
        assert talk.ask("forward", op, ((x,), {}), ((x,), {}, x)).rows is None


def test_what_is_forgotten_is_gone() -> None:
    x = torch.ones(2, requires_grad=True)
    with Conversation() as talk:
        assert talk.ask("forward", "torch.neg", ((x,), {}), ((x,), {}, -x.detach()), memory=5).rows
        talk.ours.send(("forget", [5]))
        lost = talk.ask("backward", "torch.neg", None, ([torch.ones(2)], [-torch.ones(2)]), memory=5)
    assert (lost.rows, lost.before) == (None, None)
