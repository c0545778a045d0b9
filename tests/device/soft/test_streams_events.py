"""Streams and events of soft: current per thread and device, ordered, measurable."""

from __future__ import annotations

import threading
import time

import pytest
import torch


def test_every_device_has_a_default_stream():
    for index in range(2):
        default = torch.soft.default_stream(index)
        assert torch.soft.current_stream(index) == default
        assert default.device == torch.device("soft", index)
        assert default.stream_id == 0


def test_new_streams_differ():
    streams = [torch.soft.Stream() for _ in range(3)] + [torch.soft.Stream(device=1)]
    assert len({(s.device_index, s.stream_id) for s in streams}) == 4
    assert all(isinstance(s, torch.soft.Stream) and isinstance(s, torch.Stream) for s in streams)
    assert streams[0] != torch.soft.default_stream()
    assert not isinstance(torch.Event("soft"), torch.soft.Stream)
    assert len({hash(s) for s in streams}) > 1
    same = torch.soft.Stream(stream_id=streams[0].stream_id, device_index=0, device_type=streams[0].device_type)
    assert same == streams[0]


def test_stream_context_makes_stream_and_device_current():
    side = torch.soft.Stream(device=1)
    with torch.soft.stream(side) as entered:
        assert entered is side
        assert torch.soft.current_device() == 1
        assert torch.soft.current_stream() == side
        assert torch.soft.current_stream(0) == torch.soft.default_stream(0)
    assert torch.soft.current_device() == 0
    assert torch.soft.current_stream(1) == torch.soft.default_stream(1)
    with torch.soft.stream(None):
        assert torch.soft.current_device() == 0


def test_a_failed_block_restores_the_stream():
    with pytest.raises(ValueError, match="out"), torch.soft.stream(torch.soft.Stream()):
        raise ValueError("out")
    assert torch.soft.current_stream() == torch.soft.default_stream()


def test_set_stream_keeps_the_device():
    side = torch.soft.Stream(device=1)
    torch.soft.set_stream(side)
    try:
        assert torch.soft.current_device() == 0
        assert torch.soft.current_stream(1) == side
        assert torch.accelerator.current_stream(1) == side
    finally:
        torch.soft.set_stream(torch.soft.default_stream(1))


def test_generic_stream_as_a_context():
    side = torch.Stream("soft")
    with side:
        assert torch.accelerator.current_stream() == side
    assert torch.accelerator.current_stream() == torch.soft.default_stream()


def test_each_thread_has_its_own_current_stream_and_device():
    side = torch.soft.Stream()
    seen = []

    def look() -> None:
        seen.append((torch.soft.current_stream(), torch.soft.current_device()))
        torch.soft.set_device(1)

    with torch.soft.stream(side):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert torch.soft.current_stream() == side
    assert seen == [(torch.soft.default_stream(), 0)]
    assert torch.soft.current_device() == 0


def test_work_is_ordered_between_streams():
    side = torch.soft.Stream()
    x = torch.zeros(1000, device="soft")
    with torch.soft.stream(side):
        side.wait_stream(torch.soft.default_stream())
        x.add_(1)
        done = side.record_event()
    torch.soft.current_stream().wait_event(done)
    x.mul_(2)
    assert x.sum().item() == 2000
    assert side.query()
    side.synchronize()
    x.record_stream(side)
    torch.soft.synchronize()
    torch.soft.synchronize("soft:1")


def test_elapsed_time_is_the_time_between():
    start, end = torch.soft.Event(enable_timing=True), torch.soft.Event(enable_timing=True)
    start.record()
    time.sleep(0.02)
    end.record()
    end.synchronize()
    assert 19 < start.elapsed_time(end) < 2000
    assert end.elapsed_time(start) < 0
    assert start.query()


def test_elapsed_time_covers_the_kernels():
    from ditorch.soft import faults

    start, end = (torch.Event("soft", enable_timing=True) for _ in range(2))
    x = torch.ones(4, device="soft")
    with faults.plant("sin: slow=30ms"):
        start.record()
        x.sin()
        end.record()
    assert 30 <= start.elapsed_time(end) < 3000


def test_an_event_can_be_recorded_again_and_on_a_stream():
    event, start = torch.soft.Event(enable_timing=True), torch.soft.Event(enable_timing=True)
    start.record()
    event.record(torch.soft.Stream())
    first = start.elapsed_time(event)
    time.sleep(0.005)
    event.record()
    assert start.elapsed_time(event) > first
    assert event.device == torch.device("soft:0")
    assert isinstance(event, torch.soft.Event)


def test_mistakes_with_events():
    timed, plain = torch.soft.Event(enable_timing=True), torch.soft.Event()
    with pytest.raises(ValueError, match="must be recorded"):
        timed.elapsed_time(torch.soft.Event(enable_timing=True))
    timed.record()
    plain.record()
    with pytest.raises(ValueError, match="enable_timing=True"):
        timed.elapsed_time(plain)
    with pytest.raises(RuntimeError, match="interprocess=False"):
        torch.soft.Event(interprocess=True)
