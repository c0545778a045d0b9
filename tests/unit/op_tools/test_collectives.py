"""Verdicts on collectives from facts that ranks publish, and the exchange of these facts."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from op_tools.compare.exchange import Exchange, Question
from op_tools.judge.collectives import MOVE, NotComparable, Part, decode, encode, facts_of, judge_part
from op_tools.judge.verdict import RIGHT, WRONG, Rules
from op_tools.view.rows import Row

SMALL, LARGE = 1_000, 200_000
LIMIT = 1 << 14


def judged(found: torch.Tensor, sent: list[torch.Tensor], reduction: str, **more: float) -> Row:
    facts = {rank: facts_of(t, reduction, LIMIT, seed=3) for rank, t in enumerate(sent)}
    part = Part(
        "torch.distributed.all_reduce", None, facts_of(found, reduction, LIMIT, 3), facts, reduction, len(sent), **more
    )
    return judge_part(part, Rules(), seed=3)


def inputs(ranks: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(ranks)
    return [(torch.randn(count, generator=random) * 10.0 ** (rank % 3)).to(dtype) for rank in range(ranks)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_sums_in_any_order_are_right(dtype: torch.dtype, count: int) -> None:
    for ranks in (2, 8, 16):
        sent = inputs(ranks, count, dtype)
        in_a_ring = sent[0]
        for term in sent[1:]:
            in_a_ring = in_a_ring + term  # rounded at each step
        tree = list(sent)
        while len(tree) > 1:
            tree = [a + b for a, b in itertools.zip_longest(tree[::2], tree[1::2])]
        wide = torch.stack(sent).double().sum(0).to(dtype)
        for found in (in_a_ring, tree[0], wide):
            assert judged(found, sent, "sum").verdict == RIGHT
        scaled = [t * torch.tensor(1 / ranks, dtype=dtype) for t in sent]
        mean = scaled[0]
        for term in scaled[1:]:
            mean = mean + term
        assert judged(mean, sent, "avg").verdict == RIGHT
        assert judged(mean, sent, "premul_sum", factor=1 / ranks).verdict == RIGHT
        assert judged(mean, sent, "sum").verdict == WRONG
        without = functools.reduce(torch.add, sent[:-1])
        assert judged(without, sent, "sum").verdict == WRONG or (dtype.itemsize == 2 and ranks == 16)


@pytest.mark.parametrize("ranks", [4, 16, 64])
def test_a_missing_rank_is_found_in_half_types_too(ranks: int) -> None:
    random = torch.Generator().manual_seed(1)
    common = torch.randn(SMALL, generator=random)  # gradients of ranks are alike
    sent = [(common + torch.randn(SMALL, generator=random)).bfloat16() for _ in range(ranks)]
    assert judged(functools.reduce(torch.add, sent), sent, "sum").verdict == RIGHT
    row = judged(functools.reduce(torch.add, sent[:2] + sent[3:]), sent, "sum")
    assert row.verdict == WRONG
    assert "rank 2" in row.reason
    swamped = [1000 * common.bfloat16(), *sent]  # a correct sum loses what is small beside the rest
    assert judged(functools.reduce(torch.add, swamped), swamped, "sum").verdict == RIGHT
    assert judged(functools.reduce(torch.add, swamped[::-1]), swamped, "sum").verdict == RIGHT


def test_equal_terms_whose_roundings_all_go_the_same_way_are_right() -> None:
    sent = [torch.full((LARGE,), 0.1 + rank / 3).bfloat16() for rank in range(8)]
    found = sent[0]
    for term in sent[1:]:
        found = found + term
    assert judged(found, sent, "sum").verdict == RIGHT


@pytest.mark.parametrize("place", [0, 1, 70_001, LARGE - 1])
@pytest.mark.parametrize("reduction", ["sum", "max", MOVE])
def test_one_wrong_element_among_many_is_found(place: int, reduction: str) -> None:
    sent = inputs(1 if reduction == MOVE else 2, LARGE, torch.float32)
    found = torch.stack(sent).amax(0) if reduction == "max" else torch.stack(sent).sum(0)
    assert judged(found, sent, reduction).verdict == RIGHT
    found[place] = 100.0  # larger than all others
    row = judged(found, sent, reduction)
    assert row.verdict == WRONG
    assert f"element {place:,} is 100" in row.reason or f"to {min(LARGE, 131_072) - 1:,}" in row.reason, row.reason


@pytest.mark.parametrize("reduction", ["sum", "product", "min", "max", "band", "bor", "bxor"])
def test_integers_are_exact(reduction: str) -> None:
    sent = [torch.arange(LARGE, dtype=torch.int32) * 7919 * (rank + 3) for rank in range(3)]
    combine = {
        "sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum,
        "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
    }[reduction]  # fmt: skip
    found = combine(combine(sent[0], sent[1]), sent[2])
    assert judged(found, sent, reduction).verdict == RIGHT
    found[1] += 1
    assert judged(found, sent, reduction).verdict == WRONG


def test_infinity_nan_and_overflow() -> None:
    inf, nan = float("inf"), float("nan")
    sent = [torch.tensor([inf, inf, nan, 6e4, 1.0]).half(), torch.tensor([1.0, -inf, 1.0, 6e4, 1.0]).half()]
    assert judged(torch.tensor([inf, nan, nan, inf, 2.0]).half(), sent, "sum").verdict == RIGHT
    assert judged(torch.tensor([1.0, nan, nan, inf, 2.0]).half(), sent, "sum").verdict == WRONG
    assert judged(torch.tensor([inf, nan, nan, inf, inf]).half(), sent, "sum").verdict == WRONG


def test_ranks_that_disagree_are_not_comparable() -> None:
    with pytest.raises(NotComparable, match="rank 1 sent 3 elements"):
        judged(torch.ones(2), [torch.ones(2), torch.ones(3)], "sum")


def test_facts_survive_the_way() -> None:
    facts = [facts_of(t, "sum", LIMIT, 0) for t in inputs(2, LARGE, torch.bfloat16)]
    header = {"op": "allreduce_", "number": 3}
    assert decode(encode(header, facts)) == (header, facts)
    assert len(encode(header, facts)) < 2 * LIMIT


# -- the exchange ------------------------------------------------------------------------------------------


class Answers:
    def __init__(self) -> None:
        self.found: list[tuple[dict[int, bytes], list[int]]] = []

    def __call__(self, found: dict[int, bytes], missing: object) -> None:
        self.found.append((found, list(missing)))  # type: ignore[call-overload]


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_messages_arrive_in_any_order_and_are_deleted(kind: str, tmp_path: Path) -> None:
    store: Any = {
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 2),
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False),
    }[kind]()
    ranks = [Exchange(dist.PrefixStore("training", store), 20.0) for _ in range(2)]
    answers = [Answers(), Answers()]
    try:
        for rank, keys in enumerate((("a", "b"), ("b", "a"))):
            for key in keys:
                ranks[rank].ask(Question(key, [1 - rank], [0, 1], 2, answers[rank]))
                ranks[rank].publish(key, rank, f"{key}{rank}".encode())
        for exchange in ranks:
            exchange.drain()
        assert sorted(found[1] for found, _ in answers[0].found) == [b"a1", b"b1"]
        assert sorted(found[0] for found, _ in answers[1].found) == [b"a0", b"b0"]
        if kind != "file":
            assert [key for key in store.list_keys() if not key.endswith("op_tools/run")] == []
    finally:
        for exchange in ranks:
            exchange.close()


def test_nobody_waits_long_for_a_silent_rank_or_a_broken_store() -> None:
    exchange, answers = Exchange(dist.HashStore(), 0.2), Answers()
    started = time.monotonic()
    try:
        exchange.ask(Question("a", [1, 2], [0, 1, 2], 3, answers))
        exchange.publish("a", 2, b"two")
        exchange.drain()
        assert answers.found == [({2: b"two"}, [1])]
    finally:
        exchange.close()

    class Broken:
        def check(self, keys: object) -> bool:
            raise RuntimeError("connection lost")

        def __getattr__(self, name: str) -> object:
            raise AttributeError(name)

    exchange, answers = Exchange(Broken(), 0.2), Answers()
    try:
        exchange.ask(Question("a", [1], [0, 1], 2, answers))
        exchange.drain()
        assert answers.found == [({}, [1])]
        assert exchange.failure
    finally:
        exchange.close()
    assert time.monotonic() - started < 5
    assert not [t for t in threading.enumerate() if t.name == "op_tools-exchange"]
