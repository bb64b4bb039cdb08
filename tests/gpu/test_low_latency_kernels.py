"""The low-latency kernels give the results of the loops: every routing, option, dtype and number of ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

import moe_ep
from tests.distributed.conformance import owner_table
from tests.distributed.test_low_latency import OPTIONS, Options, calc_diff
from tests.gpu.low_latency_scene import open_buffer, scene_of
from tests.helpers.ranks import Pools
from tests.helpers.routing import ROUTINGS, TOKEN_COUNTS

pytestmark = pytest.mark.gpu
WORLDS = (1, 2, 4, 8)
PLAIN = Options()


def _every_routing(group: dist.ProcessGroup) -> int:
    """M exactly full, and M with room, one buffer for all: its memory grows and serves smaller calls too."""
    num_checks = 0
    with open_buffer(group) as buffer:
        for routing, tokens in itertools.product(ROUTINGS, TOKEN_COUNTS):
            scene = scene_of(group, routing, tokens)
            for hook in (False, True):
                scene.round_trip(buffer, Options(hook=hook))
                scene.num_max += 3
                num_checks += 1
        buffer.check()
    return num_checks


# case E01, E02, E05, I01, I02, I06
@pytest.mark.parametrize("world", WORLDS)
def test_rows_places_and_sums_are_those_of_the_loops(ranks: Pools, world: int) -> None:
    num_checks = 2 * len(ROUTINGS) * len(TOKEN_COUNTS)
    assert ranks.run(_every_routing, world, timeout_secs=100) == [num_checks] * world


def _every_option(group: dist.ProcessGroup, options: list[Options]) -> None:
    scene = scene_of(group, "holes", "equal", hidden=1024, num_topk=4)
    with open_buffer(group) as buffer:
        for option in options:
            stats = torch.full((scene.owner.count(scene.rank),), 7, dtype=torch.int32, device="cuda")
            waits = torch.zeros(scene.world, dtype=torch.int64, device="cuda")
            result = scene.dispatch(
                buffer,
                option,
                cumulative_local_expert_recv_stats=stats,
                dispatch_wait_recv_cost_stats=waits,
                async_finish=not option.hook,
            )
            result[-1]() if option.hook else result[3].current_stream_wait()
            rows = scene.check_dispatch(result, option)
            assert (stats - 7).tolist() == scene.expected.recv_count.tolist()
            assert int(waits[scene.rank]) == 0
            assert bool((waits >= 0).all())
            _, idx, weights = scene.own
            given = source = rows.cuda()
            if option.zero_copy:
                source = buffer.get_next_low_latency_combine_buffer(result[2])
                source.copy_(given)
                given = torch.full_like(given, float("nan"))
            wide = torch.full((len(idx), 2 * 1024), 5.0, dtype=torch.bfloat16, device="cuda")
            out = wide[:, ::2] if option.zero_copy else wide[:, :1024].contiguous()
            y, event, hook = buffer.low_latency_combine(
                given,
                idx,
                weights,
                result[2],
                zero_copy=option.zero_copy,
                async_finish=not option.hook,
                return_recv_hook=option.hook,
                out=out,
                combine_wait_recv_cost_stats=waits,
            )
            hook() if option.hook else event.current_stream_wait()
            assert y is out
            x, idx, weights = scene.inputs[scene.rank]
            total = weights.masked_fill(idx < 0, 0).sum(dim=1, keepdim=True)
            assert calc_diff(y.cpu(), x.float() * total) < (9e-4 if option.use_fp8 else 1e-5)
            scene.round_trip(buffer, option)
        buffer.check()


# case F01
@pytest.mark.parametrize("world", WORLDS)
def test_every_option_of_deep_eps_own_test(ranks: Pools, world: int) -> None:  # A11, A12
    ranks.run(_every_option, world, OPTIONS, timeout_secs=100)


def _dtypes_and_placements(group: dist.ProcessGroup) -> None:
    world = dist.get_world_size(group)
    scattered = [(5 * expert + 1) % world for expert in range(2 * world + 3)]
    few = owner_table(max(1, world // 2), world)  # half of the ranks own no expert
    cases = ((scattered, torch.float16, 8), (few, torch.float32, 4), (few, torch.bfloat16, 2056))
    for owner, dtype, hidden in cases:
        with open_buffer(group, expert_placement=owner) as buffer:
            scene_of(group, "holes", hidden=hidden, owner=owner, dtype=dtype).round_trip(buffer)
            scene_of(group, "duplicates", hidden=hidden, owner=owner, dtype=dtype).round_trip(buffer)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_any_placement_row_dtype_and_row_of_whole_16_bytes(ranks: Pools, world: int) -> None:
    ranks.run(_dtypes_and_placements, world)


def _model_shape(group: dist.ProcessGroup) -> None:
    """The sizes of DeepSeek-V3, ids as int32, rows in memory of any strides."""
    world = dist.get_world_size(group)
    owner = owner_table(288, world)
    g = torch.Generator().manual_seed(dist.get_rank(group))
    x = torch.randn(128, 2 * 7168, generator=g).bfloat16().cuda()[:, ::2]
    idx = torch.rand(128, 288, generator=g).argsort(1)[:, :8].int().cuda()
    weights = torch.rand(128, 8, generator=g).cuda()
    with open_buffer(group, expert_placement=owner) as buffer:
        for use_fp8 in (False, True):
            received, count, handle, _, _ = buffer.low_latency_dispatch(x, idx, 128, 288, use_fp8=use_fp8)
            rows = received if isinstance(received, torch.Tensor) else _wide(*received)
            total = torch.tensor([int(count.sum())])
            dist.all_reduce(total, group=group)
            assert int(total) == 128 * 8 * world
            y, _, _ = buffer.low_latency_combine(rows, idx, weights, handle)
            assert calc_diff(y.cpu(), (x.float() * weights.sum(1, keepdim=True)).cpu()) < (9e-4 if use_fp8 else 1e-5)
        buffer.check()


def _wide(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return moe_ep.fp8.dequantize_1x128(codes.flatten(0, 1), scales.flatten(0, 1).contiguous()).view(codes.shape)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_the_sizes_of_a_large_model(ranks: Pools, world: int) -> None:
    ranks.run(_model_shape, world, timeout_secs=100)


def _two_hundred(group: dist.ProcessGroup) -> None:
    """Changing sizes and routings, beside calls of the normal mode, with ranks that come late."""
    with open_buffer(group) as buffer:
        for repeat in range(200):
            routing = [*ROUTINGS][repeat % len(ROUTINGS)]
            scene = scene_of(group, routing, hidden=128 * (1 + repeat % 3), num_topk=1 + repeat % 4, seed=repeat)
            if repeat % 7 == buffer.rank:
                torch.cuda._sleep(2_000_000)
            scene.round_trip(buffer, Options(use_fp8=repeat % 2 == 0, hook=repeat % 3 == 0), seed=repeat)
            if repeat % 10 == 0:
                x, idx, _ = scene.own
                out = moe_ep.dispatch(buffer, x, idx, num_experts=scene.num_experts)
                assert torch.equal(moe_ep.combine(buffer, out.x, out.handle) * 0, x * 0)
        buffer.check()


@pytest.mark.parametrize("world", [2, 4])
def test_two_hundred_calls_of_changing_sizes_beside_the_normal_mode(ranks: Pools, world: int) -> None:  # A13, A15
    ranks.run(_two_hundred, world, timeout_secs=100)
