"""Streams for a device that has one queue: everything is in order, so waiting has nothing to do."""

from __future__ import annotations

from typing import Any

import torch

from ditorch.backends import cpu


class Stream(cpu.Stream):
    """The device's one queue under CUDA's name; two streams are the same queue."""

    def __init__(self, device: Any = None, priority: int = 0, **unused: Any) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.device_index = self.device.index

    def record_event(self, event: Any = None) -> Any:
        event = torch.cuda.Event() if event is None else event
        event.record()
        return event

    def query(self) -> bool:
        return False  # unknown without waiting

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class StreamContext:
    """``with torch.cuda.stream(s):`` where every stream is the one queue."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> Any:
        return self.stream

    def __exit__(self, *error: Any) -> None:
        return None


CLASSES = {"Stream": Stream, "StreamContext": StreamContext}
