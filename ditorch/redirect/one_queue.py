"""Streams for a device that has one queue: everything is in order, so waiting has nothing to do."""

from __future__ import annotations

from typing import Any

import torch


class Stream:
    """The device's one queue under CUDA's name; two streams are the same queue."""

    priority = 0
    stream_id = 0
    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0, **unused: Any) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.device_index = self.device.index

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        event = torch.cuda.Event() if event is None else event
        event.record()
        return event

    def query(self) -> bool:
        return False  # unknown without waiting

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: Any) -> None:
        return None


class StreamContext:
    """``with torch.cuda.stream(s):`` where every stream is the one queue."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> Any:
        return self.stream

    def __exit__(self, *error: Any) -> None:
        return None


CLASSES = {"Stream": Stream, "StreamContext": StreamContext}
