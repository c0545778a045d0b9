"""Results of CPU kernels in pinned memory: only where they were asked for, and valid as long as they live."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import op_tools
from op_tools.call.devices import accelerator_type, can_pin
from op_tools.copies import pinned_results
from op_tools.copies.pinned_results import PinnedResults
from op_tools.native import compiling
from op_tools.tools import fallback

from .test_auto_compare import train

pytestmark = pytest.mark.skipif(
    compiling.find_compiler() is None or not can_pin(accelerator_type()), reason="no compiler, or nothing to pin"
)
LARGE, SMALL = 10_000, 100


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    assert pinned_results.LIBRARY.wait() is not None


@pytest.fixture
def pinned() -> Iterator[PinnedResults]:
    started = PinnedResults.started(accelerator_type())
    assert started is not None
    yield started
    started.stop()


def ones(pinned: PinnedResults, numel: int) -> torch.Tensor:
    result: torch.Tensor = pinned.run(torch.ones, (numel,), {})
    return result


def test_only_large_results_of_who_asks_are_pinned(pinned: PinnedResults) -> None:
    assert ones(pinned, LARGE).is_pinned()
    assert not ones(pinned, SMALL).is_pinned()
    assert not torch.ones(LARGE).is_pinned()
    elsewhere: list[bool] = []

    def ask_while_another_wants() -> torch.Tensor:
        thread = threading.Thread(target=lambda: elsewhere.append(torch.ones(LARGE).is_pinned()))
        thread.start()
        thread.join()
        return torch.ones(LARGE)

    assert pinned.run(ask_while_another_wants, (), {}).is_pinned()
    assert elsewhere == [False]


def test_a_kernel_that_fails_leaves_nothing_on(pinned: PinnedResults) -> None:
    with pytest.raises(RuntimeError):
        pinned.run(torch.mm, (torch.ones(2, 3), torch.ones(2, 3)), {})
    assert not torch.ones(LARGE).is_pinned()


def test_results_outlive_the_tool(device: str) -> None:
    outer, inner = (PinnedResults.started(accelerator_type()) for _ in range(2))
    assert outer is not None
    assert inner is not None
    inner.stop()
    kept = [ones(outer, LARGE) * 0 + k if k % 2 else ones(outer, LARGE).fill_(k) for k in range(20)]
    outer.stop()
    assert not torch.ones(LARGE).is_pinned()
    for k, tensor in enumerate(kept):
        assert torch.equal(tensor, torch.full((LARGE,), float(k)))
        moved = tensor.to(device, non_blocking=True)
        tensor = tensor.resize_(3 * LARGE)[:LARGE].clone()
        assert torch.equal(moved.cpu(), tensor)
    kept[0].share_memory_()
    assert bool((kept[0].numpy()[:LARGE] == 0).all())
    storage = torch.UntypedStorage(1 << 20)
    del kept, storage
    gc.collect()


def test_memory_is_used_again(pinned: PinnedResults) -> None:
    first = {ones(pinned, LARGE).data_ptr() for _ in range(50)}
    assert len(first) < 50


def test_the_fallback_trains_the_same_with_and_without(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[Any] = []
    run = PinnedResults.run

    def counting(self: PinnedResults, func: Any, args: Any, kwargs: Any) -> Any:
        counted.append(func)
        return run(self, func, args, kwargs)

    monkeypatch.setattr(PinnedResults, "run", counting)
    losses = []
    for where in (frozenset({accelerator_type()}), frozenset[str]()):
        monkeypatch.setattr(fallback, "_WITH_PINNED_RESULTS", where)
        before = len(counted)
        with op_tools.OpFallback():
            losses.append(train(device, steps=1, width=256))
        assert (len(counted) > before) == bool(where)
        assert not torch.ones(LARGE).is_pinned()
    assert losses[0] == losses[1]
