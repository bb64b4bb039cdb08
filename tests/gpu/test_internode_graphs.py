"""CUDA graphs between nodes: rounds are counted on the device, and what a graph reads is kept and waited for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep
from tests.gpu.test_intranode_graphs import captured
from tests.helpers.compare import assert_same_bits
from tests.helpers.ranks import Pools

pytestmark = pytest.mark.gpu
NUM_REPLAYS = 30
NUM_TOKENS, HIDDEN = 700, 512


def _replays(group: dist.ProcessGroup, layout: str) -> None:
    """A combine in a graph among eager calls; between replays new routes for the same handle, and resets."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=g).bfloat16().cuda()
    idx = torch.rand(NUM_TOKENS, 2 * world, generator=g).argsort(dim=1)[:, :2].cuda()
    with (
        torch.no_grad(),
        moe_ep.Buffer(group, backend="internode", hop="ipc", ranks_per_node=1, timeout_secs=20) as buffer,
    ):
        out = moe_ep.dispatch(buffer, x, idx, None, num_experts=2 * world, layout=layout)
        assert isinstance(out.handle, moe_ep.DispatchHandle)
        rows, handle = out.x.clone(), out.handle
        outputs: list[Tensor] = []

        def work() -> None:
            outputs[:] = [moe_ep.combine(buffer, rows, handle)]

        graph = captured(work)
        (static,) = outputs
        for replay in range(NUM_REPLAYS):
            rows.copy_(out.x * (replay % 5 + 1))
            graph.replay()
            if replay % 10 == 5:  # behind a replay that may still run
                buffer.reset()
            first = static.clone()
            if replay % 10 == 7:  # all ranks work the routes out anew: the graph goes on with those that it knows
                handle.prepared.clear()
                moe_ep.combine(buffer, rows, handle)
                junk = [torch.full((1 << 16,), 0x7FFFFFFF, dtype=torch.int32, device="cuda") for _ in range(20)]
                del junk
            assert_same_bits(first, moe_ep.combine(buffer, rows, handle), f"sums of replay {replay}")
            if replay % 10 == 2:
                _one_refuses(buffer, graph, static, rank == replay // 10 % world)
                graph.replay()
                assert_same_bits(static.clone(), first, f"sums behind the refusal of replay {replay}")
        torch.cuda.synchronize()
        buffer.check()


def _one_refuses(buffer: moe_ep.Buffer, graph: torch.cuda.CUDAGraph, sums: Tensor, is_me: bool) -> None:
    """One rank refuses instead of a replay: the others get NaN, and are told who it was."""
    if is_me:
        with pytest.raises(ValueError, match="refused combine: not this one"):
            buffer.backend.refuse("combine", ValueError("not this one"))
        return
    graph.replay()
    torch.cuda.synchronize()
    assert bool(sums.isnan().all())
    with pytest.raises(RuntimeError, match="EP rank . refused combine: not this one"):
        buffer.check()


@pytest.mark.parametrize("layout", ["compact", "expert_major"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_captured_combine_gives_what_an_eager_one_gives_behind_resets_and_new_routes(
    ranks: Pools, world: int, layout: str
) -> None:
    ranks.run(_replays, world, layout, timeout_secs=100)
