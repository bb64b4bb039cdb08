"""Streams and events of CUDA without a GPU: they only note their order."""

from __future__ import annotations

import torch


class FakeEvent:
    """Keeps which stream it was recorded on, and how much of that stream's past it stands for."""

    def __init__(self) -> None:
        self.stream: FakeStream | None = None
        self.num_done = 0
        self.has_fired = True

    def record(self, stream: FakeStream) -> None:
        self.stream, self.num_done = stream, len(stream.past)

    def query(self) -> bool:
        return self.has_fired


class FakeStream:
    """A stream as the list of what it does: waits for a place of another stream, or a launch."""

    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        self.priority = priority
        self.past: list[object] = []
        self.num_synchronizes = 0

    @property
    def cuda_stream(self) -> int:
        return id(self)

    def wait_event(self, event: FakeEvent) -> None:
        self.past.append(event.stream)

    def wait_stream(self, stream: FakeStream) -> None:
        self.past.append(stream)

    def synchronize(self) -> None:
        self.num_synchronizes += 1
