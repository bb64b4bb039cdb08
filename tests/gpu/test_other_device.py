"""A buffer runs on the GPU that was current when it was made, also while a call, a reset or a close finds another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import moe_ep
from tests.helpers.ranks import Pools

pytestmark = pytest.mark.gpu
NUM_TOKENS, HIDDEN = 40, 256


def _calls(buffer: moe_ep.Buffer, own: torch.device, with_low_latency: bool) -> None:
    world = buffer.group_size
    x = torch.full((NUM_TOKENS, HIDDEN), float(buffer.rank + 1), dtype=torch.bfloat16, device=own, requires_grad=True)
    idx = (torch.arange(2 * NUM_TOKENS, device=own).view(NUM_TOKENS, 2) + buffer.rank) % (2 * world)
    weights = torch.full((NUM_TOKENS, 2), 0.5, device=own)
    for layout in ("compact", "expert_major"):
        out = moe_ep.dispatch(buffer, x, idx, weights, num_experts=2 * world, layout=layout)
        y = moe_ep.combine(buffer, out.x, out.handle)
        y.sum().backward()
        assert x.grad is not None
        assert {x.grad.device, y.device, out.x.device} == {own}
        assert bool(((y / x) % 1 == 0).all())
        x.grad = None
    if with_low_latency:
        for hook in (False, True):
            result = buffer.low_latency_dispatch(
                x.detach(), idx, NUM_TOKENS, 2 * world, use_fp8=False, return_recv_hook=hook
            )
            if hook:
                assert result[-1] is not None
                result[-1]()
            assert isinstance(result[0], torch.Tensor)
            y, _, _ = buffer.low_latency_combine(result[0], idx, weights, result[2])
            assert torch.equal(y, x.detach())
    buffer.check()


def _elsewhere(group: dist.ProcessGroup, settings: dict[str, Any]) -> None:
    own = torch.device("cuda", torch.cuda.current_device())
    other = (own.index + 1) % torch.cuda.device_count()
    buffer = moe_ep.Buffer(group, timeout_secs=20, **settings)
    with torch.cuda.device(other):
        for _ in range(2):
            _calls(buffer, own, settings["backend"] == "intranode")
            buffer.reset()
            assert torch.cuda.current_device() == other
        buffer.close()
        assert torch.cuda.current_device() == other


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("backend", ["intranode", "internode"])
def test_calls_resets_and_closes_do_not_ask_which_gpu_is_current(ranks: Pools, world: int, backend: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    settings: dict[str, Any] = {"backend": backend}
    if backend == "internode":
        settings |= {"hop": "ipc", "ranks_per_node": 1}
    ranks.run(_elsewhere, world, settings)
