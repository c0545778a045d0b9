"""Parts of large calls that wait for worker processes: none is lost, whatever fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from op_tools.compare import batches
from op_tools.compare.batches import Batches
from op_tools.compare.ladder import FORWARD, Job
from op_tools.copies.invocation import Invocation, Region, Site
from op_tools.copies.operands import stage


class _Worker:
    ended = False


class _Lease:
    def __init__(self, worker: _Worker) -> None:
        self.worker, self.weight, self.kind = worker, 0, None


class _Pool:
    """Processes that have room for so many calls at a time; or that fail."""

    def __init__(self, room: int, error: type[Exception] | None = None) -> None:
        self.room, self.error, self.sent, self.batches = room, error, list[int](), 0

    def is_ready(self) -> bool:
        return True

    def send_batch(self, worker: _Worker, batch: Any) -> tuple[int, list[Any]]:
        if self.error is not None:
            raise self.error("no")
        self.sent += [each.given.number for each in batch[: self.room]]
        self.batches += 1
        return min(self.room, len(batch)), []


def _part(number: int, device: str = "cpu") -> Job:
    operands = stage((torch.ones(3, device=device),))
    call = Invocation(1, "torch.neg", torch.neg, None, Site(), Region("cpu"), (1, 1), operands)  # type: ignore[arg-type]
    part = Job(call, FORWARD, number=number, before=operands, snapshot=operands)
    part.nbytes = operands.nbytes
    return part


def _taken(found: Batches, count: int) -> None:
    for number in range(count):
        assert found.reserve([_part(number)])
        found.add([_part(number)])


def test_all_parts_are_sent_though_processes_have_little_room() -> None:
    pool, back, workers = _Pool(2), list[int](), [_Worker(), _Worker()]
    made = Batches(lambda _, part, may_wait: _Lease(workers[part.number % 2]), lambda part: back.append(part.number))  # type: ignore[return-value, arg-type]
    _taken(made, 100)
    made.start(pool)  # type: ignore[arg-type]
    made.close()
    assert sorted(pool.sent) == list(range(100))
    assert not back


def test_processes_that_start_later_get_their_share() -> None:
    pool, workers, shares = _Pool(8), [_Worker(), _Worker()], [0, 0]

    def lease(_: Any, part: Job, may_wait: bool) -> Any:
        there = [0, 1] if pool.batches > 2 else [0]  # the second one starts later
        best = min(there, key=shares.__getitem__)
        if may_wait and shares[best] >= 20 + 4 * pool.batches:  # it does four while a batch is sent
            pool.batches += 1
            return None
        shares[best] += 1
        return _Lease(workers[best])

    made = Batches(lease, lambda part: None)
    _taken(made, 200)
    made.start(pool)  # type: ignore[arg-type]
    made.close()
    assert sorted(pool.sent) == list(range(200))
    assert shares[1] > 60, "the first one was given everything that waited when it had started"


@pytest.mark.parametrize("gone", [False, True])
def test_parts_go_back_when_the_processes_exit(gone: bool) -> None:
    back: list[int] = []
    pool = _Pool(8)
    pool.is_ready = lambda: pool.batches < 1 and not gone  # type: ignore[method-assign]
    leases = iter([True] * 8 + [False] * 100)
    made = Batches(
        lambda _, part, may_wait: _Lease(_Worker()) if next(leases) else None, lambda p: back.append(p.number)
    )  # type: ignore[return-value, arg-type]
    _taken(made, 20)
    made.start(pool)  # type: ignore[arg-type]
    made.close()
    assert sorted([*pool.sent, *back]) == list(range(20))
    assert len(back) == (20 if gone else 12)


@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_what_cannot_be_sent_goes_back_and_is_said(error: type[Exception]) -> None:
    back, said = list[int](), list[str]()
    made = Batches(lambda _, part, may_wait: _Lease(_Worker()), lambda part: back.append(part.number), said.append)  # type: ignore[return-value, arg-type]
    _taken(made, 10)
    made.start(_Pool(1, error))  # type: ignore[arg-type]
    made.close()
    assert sorted(back) == list(range(10))
    assert error.__name__ in said[0]


def test_without_processes_everything_goes_back() -> None:
    back: list[int] = []
    made = Batches(lambda _, part, may_wait: None, lambda part: back.append(part.number))
    _taken(made, 5)
    made.drain()
    assert back == list(range(5))
    made.close()
    assert not made.reserve([_part(9)])


def test_no_more_than_a_bound_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_BYTES", 30)
    made = Batches(lambda _, part, may_wait: None, lambda part: None)
    assert made.reserve([_part(0)])
    assert made.reserve([_part(1)])
    assert not made.reserve([_part(2)])
