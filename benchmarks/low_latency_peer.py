"""DeepEP V1's low-latency calls, if the package is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.deep_ep import missing as missing_package
from benchmarks.processes import World

Call = Callable[[], Any]


def missing(world: World) -> str | None:
    return missing_package(world)


class DeepEpLowLatency:
    """Its buffer, sized as its own test does."""

    def __init__(self, world: World, num_max: int, hidden: int, num_experts: int) -> None:
        import deep_ep

        num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(num_max, hidden, world.size, num_experts)
        self.hidden, self.num_experts = hidden, num_experts
        self.buffer = deep_ep.Buffer(
            world.group,
            num_rdma_bytes=num_bytes,
            low_latency_mode=True,
            num_qps_per_rank=num_experts // world.size,
            explicitly_destroy=True,
        )

    def calls(self, x: Tensor, idx: Tensor, weights: Tensor, num_max: int) -> list[tuple[str, Call]]:
        """(operation, call) of FP8 dispatch and bfloat16 combine."""
        self.buffer.clean_low_latency_buffer(num_max, self.hidden, self.num_experts)  # as it asks for where M changes

        def dispatch() -> Any:
            return self.buffer.low_latency_dispatch(x, idx, num_max, self.num_experts, use_fp8=True)

        (rows, _), _, handle, _, _ = dispatch()
        given = torch.randn(rows.shape, device=x.device, dtype=torch.bfloat16)

        def combine() -> Any:
            return self.buffer.low_latency_combine(given, idx, weights, handle)

        return [("ll_dispatch", dispatch), ("ll_combine", combine)]

    def close(self) -> None:
        self.buffer.destroy()
