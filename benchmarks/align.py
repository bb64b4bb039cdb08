"""A barrier of the devices, put on the current stream before a timed call."""

from __future__ import annotations

import torch
import torch.distributed as dist

import moe_ep
from benchmarks.processes import World
from benchmarks.timing import Call


class Aligner:
    """A barrier of the devices: NCCL's smallest all-reduce, or on shared GPUs one row a rank through a small buffer."""

    def __init__(self, world: World, backend: str) -> None:
        self._buffer: moe_ep.Buffer | None = None
        if world.size == 1:
            self.wait: Call = lambda: None
        elif world.has_nccl:
            one = torch.zeros(1, device=world.device)
            self.wait = lambda: dist.all_reduce(one, group=world.group)
        else:
            buffer = self._buffer = moe_ep.Buffer(world.group, backend=backend, num_sms=1)
            x = torch.zeros(1, 64, dtype=torch.bfloat16, device=world.device)
            idx = torch.arange(world.size, device=world.device).unsqueeze(0)
            layout = buffer.get_dispatch_layout(idx, world.size)
            weights = torch.ones(idx.shape, device=world.device)
            first = buffer.dispatch(x, None, layout[0], layout[1], layout[3], layout[2], idx, weights)
            self.wait = lambda: buffer.dispatch(x, handle=first[4])

    def close(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
