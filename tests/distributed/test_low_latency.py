"""The results of the low-latency mode against loops. DeepEP's checks A11 (dispatch), A12 (combine), A13, A15."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep
from moe_ep.fp8 import dequantize_1x128, quantize_1x128
from moe_ep.reference import LoopRow, combine_loop, dispatch_loop
from tests.distributed.conformance import owner_table
from tests.helpers.compare import assert_same_bits
from tests.helpers.ranks import Pools
from tests.helpers.routing import ROUTINGS, TOKEN_COUNTS, make_inputs

WORLDS = (1, 2, 4, 8)
HIDDEN, NUM_TOPK = 8, 3
Inputs = list[tuple[Tensor, Tensor, Tensor]]  # (x [T, H], topk_idx [T, K], topk_weights [T, K]) of every rank


def least_max_tokens(inputs: Inputs) -> int:
    """The smallest M that serves the inputs: tokens of a rank, or times that a rank names an expert."""
    named = [int(idx.flatten().bincount(minlength=1).max()) for _, idx, _ in ((x, i[i >= 0], w) for x, i, w in inputs)]
    return max(1, *named, *(len(x) for x, _, _ in inputs))


@dataclass(frozen=True)
class Expected:
    """What one rank must get: places [L, N], counts [L], ranges [L, W], and the source of the row in each place."""

    src_info: Tensor
    recv_count: Tensor
    layout_range: Tensor
    sources: dict[tuple[int, int], tuple[int, int]]  # (local expert, place) -> (rank, token)


def expected_places(rows: list[LoopRow], num_local: int, world: int, num_max: int) -> Expected:
    """Counts the rows of one rank up, one at a time."""
    src_info = torch.full((num_local, world * num_max), -1, dtype=torch.int32)
    count, of_rank = [0] * num_local, [[0] * world for _ in range(num_local)]
    sources = {}
    for row in rows:
        assert row.source is not None
        expert = row.ids[0]
        sources[expert, count[expert]] = row.source
        src_info[expert, count[expert]] = row.source[1]
        count[expert] += 1
        of_rank[expert][row.source[0]] += 1
    ranges = [[of[r] + (sum(of[:r]) << 32) for r in range(world)] for of in of_rank]
    return Expected(
        src_info,
        torch.tensor(count, dtype=torch.int32),
        torch.tensor(ranges, dtype=torch.int64).view(num_local, world),
        sources,
    )


def spread(
    sources: dict[tuple[int, int], tuple[int, int]], values: list[Tensor], shape: tuple[int, int], fill: float = 0
) -> Tensor:
    """[L, N, ...]: the source's row of `values` in each place that has one, `fill` elsewhere."""
    out = torch.full((*shape, *values[0].shape[1:]), fill, dtype=values[0].dtype)
    for place, (rank, token) in sources.items():
        out[place] = values[rank][token]
    return out


def expert_results(expected: list[list[LoopRow]], hidden: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """[R, H] random rows of every rank, as if its experts had made them."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(len(rows), hidden, generator=g).to(dtype) for rows in expected]


def in_places(rows: Tensor, expected: Expected, fill: float) -> Tensor:
    """[L, N, H] with the [R, H] rows in their places and `fill` in the others, which nobody may read."""
    out = rows.new_full((*expected.src_info.shape, rows.shape[1]), fill)
    for row, place in zip(rows, expected.sources, strict=True):
        out[place] = row
    return out


def assert_handle(handle: Any, expected: Expected, num_max: int, hidden: int, num_experts: int) -> None:
    src_info, layout_range, *numbers = handle
    assert_same_bits(src_info, expected.src_info, "src_info")
    assert_same_bits(layout_range, expected.layout_range, "layout_range")
    assert numbers == [num_max, hidden, num_experts]
    assert len(handle) == 5
    assert handle[0] is src_info


def check_round_trip(
    buffer: moe_ep.Buffer, inputs: Inputs, owner: list[int], num_max: int, idx_dtype: torch.dtype = torch.int64
) -> None:
    """bf16 (or any row dtype) places and counts, then the weighted sums, all bit for bit."""
    world, rank, num_experts = buffer.group_size, buffer.rank, len(owner)
    x, idx, weights = inputs[rank]
    rows = dispatch_loop([i for _, i, _ in inputs], [w for _, _, w in inputs], owner)
    expected = expected_places(rows[rank], owner.count(rank), world, num_max)
    recv, count, handle, _, hook = buffer.low_latency_dispatch(
        x, idx.to(idx_dtype), num_max, num_experts, use_fp8=False
    )
    assert hook is None
    assert isinstance(recv, Tensor)
    shape = (owner.count(rank), world * num_max)
    assert_same_bits(recv, spread(expected.sources, [x for x, _, _ in inputs], shape), "recv")
    assert_same_bits(count, expected.recv_count, "recv_count")
    assert_handle(handle, expected, num_max, x.shape[1], num_experts)

    made = expert_results(rows, x.shape[1], x.dtype, seed=1)
    filled = in_places(made[rank], expected, float("nan"))
    y, _, hook = buffer.low_latency_combine(filled, idx.to(idx_dtype), weights, handle)
    assert hook is None
    home = combine_loop(made, rows, [len(i) for _, i, _ in inputs], weighted=True, exact=True)
    assert_same_bits(y, home[rank], "combined")


def every_routing(group: dist.ProcessGroup) -> int:
    world, num_checks = dist.get_world_size(group), 0
    owner = owner_table(2 * world + 1, world)
    with moe_ep.Buffer(group, timeout_secs=20) as buffer:
        for routing, tokens in itertools.product(ROUTINGS, TOKEN_COUNTS if world < 8 else ("ragged",)):
            inputs = make_inputs(routing, tokens, world, HIDDEN, NUM_TOPK, len(owner), torch.bfloat16)
            num_max = least_max_tokens(inputs)
            check_round_trip(buffer, inputs, owner, num_max)  # M exactly full
            if tokens == "ragged":
                check_round_trip(buffer, inputs, owner, num_max + 3, torch.int32)
            num_checks += 1
    return num_checks


# case E01, E02, E05, I01, I02, I06
@pytest.mark.parametrize("world", WORLDS)
def test_places_counts_and_sums_are_those_of_the_loops(ranks: Pools, world: int) -> None:
    num_checks = len(ROUTINGS) * (len(TOKEN_COUNTS) if world < 8 else 1)
    assert ranks.run(every_routing, world) == [num_checks] * world


def other_experts_and_dtypes(group: dist.ProcessGroup) -> None:
    world = dist.get_world_size(group)
    scattered = [(5 * expert + 1) % world for expert in range(2 * world + 3)]
    few = owner_table(max(1, world // 2), world)  # half of the ranks own no expert
    for owner, dtype, hidden in ((scattered, torch.float16, 5), (few, torch.float32, 3), (few, torch.bfloat16, 1)):
        inputs = make_inputs("holes", "ragged", world, hidden, NUM_TOPK, len(owner), dtype)
        with moe_ep.Buffer(group, timeout_secs=20, expert_placement=owner) as buffer:
            check_round_trip(buffer, inputs, owner, least_max_tokens(inputs))


@pytest.mark.parametrize("world", [2, 4, 8])
def test_any_placement_of_experts_row_dtype_and_hidden_size_is_served(ranks: Pools, world: int) -> None:
    ranks.run(other_experts_and_dtypes, world)


# -- A11, A12: every option -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    use_fp8: bool = False
    round_scale: bool = False
    use_ue8m0: bool = False
    hook: bool = False
    zero_copy: bool = False


SCALES = ((False, False, False), (False, True, True), (True, False, False), (True, True, False), (True, True, True))
OPTIONS = [
    Options(*scales, hook, zero_copy)
    for scales in SCALES
    for hook, zero_copy in itertools.product((False, True), (False, True))
]


def calc_diff(a: Tensor, b: Tensor) -> float:
    """DeepEP's measure, 1 - 2 <a, b> / (|a|^2 + |b|^2) of the values + 1, in float64."""
    a, b = a.double() + 1, b.double() + 1
    return 1 - 2 * float((a * b).sum() / (a * a + b * b).sum()) if a.numel() else 0.0


def unpack_scales(scales: Tensor) -> Tensor:
    """float32 scales [L, N, B] of whatever dispatch returned; exponent bytes are read off one at a time."""
    if scales.dtype == torch.float32:
        return scales
    words = scales.contiguous().long()
    bytes_ = torch.stack([(words >> (8 * i)) & 0xFF for i in range(4)], dim=-1).flatten(-2)
    return torch.where(bytes_ > 0, 2.0 ** (bytes_.double() - 127), 0.0).float()


def deep_ep_options(group: dist.ProcessGroup, options: list[Options]) -> None:
    """Tokens whose last two slots are unused at 10 random places, as DeepEP's test makes them."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    num_tokens, hidden, num_experts, num_topk = 24, 512, 3 * world, 4
    g = torch.Generator().manual_seed(3)
    inputs = make_inputs("random", "equal", world, hidden, num_topk, num_experts, torch.bfloat16)
    inputs = []
    for _ in range(world):
        x = torch.randn(num_tokens, hidden, generator=g).bfloat16()
        idx = torch.rand(num_tokens, max(num_experts, num_topk), generator=g).argsort(1)[:, :num_topk] % num_experts
        for _ in range(10):
            idx[torch.randint(num_tokens, (), generator=g), torch.randint(num_topk, (), generator=g)] = -1
        inputs.append((x, idx, torch.rand(num_tokens, num_topk, generator=g)))
    owner = owner_table(num_experts, world)
    rows = dispatch_loop([i for _, i, _ in inputs], [w for _, _, w in inputs], owner)
    num_max = least_max_tokens(inputs)
    expected = expected_places(rows[rank], owner.count(rank), world, num_max)
    with moe_ep.Buffer(group, timeout_secs=20) as buffer:
        for option in options:
            check_option(buffer, option, inputs, rows, expected, num_max, num_experts)


def check_option(
    buffer: moe_ep.Buffer,
    option: Options,
    inputs: Inputs,
    rows: list[list[LoopRow]],
    expected: Expected,
    num_max: int,
    num_experts: int,
) -> None:
    rank, (x, idx, weights) = buffer.rank, inputs[buffer.rank]
    stats = torch.full_like(expected.recv_count, 7)
    received, count, handle, event, hook = buffer.low_latency_dispatch(
        x,
        idx,
        num_max,
        num_experts,
        stats,
        use_fp8=option.use_fp8,
        round_scale=option.round_scale,
        use_ue8m0=option.use_ue8m0,
        async_finish=not option.hook,
        return_recv_hook=option.hook,
    )
    if option.hook:
        assert hook is not None
        hook()
    else:
        event.current_stream_wait()
    assert_same_bits(count, expected.recv_count, "recv_count")
    assert_same_bits(stats, expected.recv_count + 7, "cumulative stats")
    assert_handle(handle, expected, num_max, x.shape[1], num_experts)
    recv = check_received(received, option, [x for x, _, _ in inputs], expected)

    if option.zero_copy:
        source = buffer.get_next_low_latency_combine_buffer(handle)
        assert source.shape == recv.shape
        assert source.dtype == torch.bfloat16
        source.copy_(recv)
    out = torch.full_like(x, float("nan"))
    given = torch.full_like(recv, float("nan")) if option.zero_copy else recv
    y, event, hook = buffer.low_latency_combine(
        given,
        idx,
        weights,
        handle,
        zero_copy=option.zero_copy,
        async_finish=not option.hook,
        return_recv_hook=option.hook,
        out=out,
    )
    if option.hook:
        assert hook is not None
        hook()
    assert y is out
    made = [dequantized([x for x, _, _ in inputs], option, of_rank) for of_rank in rows]
    home = combine_loop(made, rows, [len(i) for _, i, _ in inputs], weighted=True, exact=True)
    assert_same_bits(y, home[rank], f"combined, {option}")
    total = weights.masked_fill(idx < 0, 0).sum(dim=1, keepdim=True)
    assert not bool(y.isnan().any())
    assert calc_diff(y, x.float() * total) < (9e-4 if option.use_fp8 else 1e-5)


def dequantized(x: list[Tensor], option: Options, rows: list[LoopRow]) -> Tensor:
    """[R, H] bfloat16, the rows as a rank reads them after the cast."""
    picked = torch.stack([x[row.source[0]][row.source[1]] for row in rows if row.source is not None])
    if not option.use_fp8:
        return picked
    return dequantize_1x128(*quantize_1x128(picked, power_of_two=option.round_scale))


def check_received(received: Any, option: Options, x: list[Tensor], expected: Expected) -> Tensor:
    """Rows, scales and their strides; returns the rows as bfloat16."""
    shape: tuple[int, int] = tuple(expected.src_info.shape)  # type: ignore[assignment]
    if not option.use_fp8:
        assert_same_bits(received, spread(expected.sources, x, shape), "recv")
        return received  # type: ignore[no-any-return]
    recv, scales = received
    cast = [quantize_1x128(rows, power_of_two=option.round_scale) for rows in x]
    codes = spread(expected.sources, [codes.view(torch.uint8) for codes, _ in cast], shape)
    assert_same_bits(recv, codes.view(torch.float8_e4m3fn), "FP8 recv")
    num_scales = x[0].shape[1] // (512 if option.use_ue8m0 else 128)
    assert scales.shape == (*shape, num_scales)
    assert scales.dtype == (torch.int32 if option.use_ue8m0 else torch.float32)
    assert scales.transpose(1, 2).is_contiguous()
    wide = unpack_scales(scales)
    assert_same_bits(wide, spread(expected.sources, [s for _, s in cast], shape, fill=1), "scales")
    flat = dequantize_1x128(recv.flatten(0, 1), wide.flatten(0, 1)).view(recv.shape)
    assert calc_diff(flat, spread(expected.sources, x, shape)) < (0.007 if option.round_scale else 9e-4)
    return flat


# case F01 (zero places stay zero)
@pytest.mark.parametrize("world", WORLDS)
def test_every_option_of_deep_eps_own_test_gives_exact_rows_counts_and_sums(ranks: Pools, world: int) -> None:
    ranks.run(deep_ep_options, world, OPTIONS if world < 8 else OPTIONS[::3])


# -- A13, A15: again and again, and beside the normal mode ------------------------------------------------------------


def twenty_times(group: dist.ProcessGroup) -> list[int]:
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    inputs = make_inputs("skewed", "ragged", world, 128, NUM_TOPK, 2 * world, torch.bfloat16)
    num_max, seen = least_max_tokens(inputs), set()
    x, idx, weights = inputs[rank]
    with moe_ep.Buffer(group, timeout_secs=20) as buffer:
        for repeat in range(20):
            with_hook = repeat % 3 == 0
            (recv, scales), count, handle, _, hook = buffer.low_latency_dispatch(
                x, idx, num_max, 2 * world, return_recv_hook=with_hook
            )
            if hook is not None:
                hook()
            y, _, hook = buffer.low_latency_combine(recv.bfloat16(), idx, weights, handle, return_recv_hook=with_hook)
            if hook is not None:
                hook()
            values = (recv.view(torch.uint8), scales, count, handle.src_info, handle.layout_range, y.view(torch.int16))
            seen.add(hash(str([value.tolist() for value in values])))
    return sorted(seen)


@pytest.mark.parametrize("world", [2, 4])
def test_twenty_repeats_give_the_same_bits(ranks: Pools, world: int) -> None:
    assert [len(seen) for seen in ranks.run(twenty_times, world)] == [1] * world


def between_normal_calls(group: dist.ProcessGroup) -> None:
    world = dist.get_world_size(group)
    owner = owner_table(2 * world + 1, world)
    with moe_ep.Buffer(group, timeout_secs=20, low_latency_mode=True) as buffer:
        for routing in ("random", "holes", "skewed"):
            inputs = make_inputs(routing, "ragged", world, HIDDEN, NUM_TOPK, len(owner), torch.bfloat16)
            x, idx, weights = inputs[buffer.rank]
            before = moe_ep.dispatch(buffer, x, idx, weights, num_experts=len(owner))
            buffer.clean_low_latency_buffer(16, HIDDEN, len(owner))
            check_round_trip(buffer, inputs, owner, least_max_tokens(inputs))
            y = moe_ep.combine(buffer, before.x, before.handle, before.topk_weights, exact=True)
            total = weights.masked_fill(idx < 0, 0).sum(dim=1, keepdim=True)
            assert calc_diff(y, x.float() * total) < 1e-5


@pytest.mark.parametrize("world", [1, 2, 4])
def test_normal_and_low_latency_calls_take_turns_on_one_buffer(ranks: Pools, world: int) -> None:
    ranks.run(between_normal_calls, world)


# -- what the sums leave out ------------------------------------------------------------------------------------------


def with_nan_weights_in_unused_slots(group: dist.ProcessGroup) -> None:
    world = dist.get_world_size(group)
    owner = owner_table(2 * world, world)
    inputs = make_inputs("holes", "equal", world, HIDDEN, NUM_TOPK, len(owner), torch.bfloat16)
    inputs = [(x, idx, weights.masked_fill(idx < 0, float("nan"))) for x, idx, weights in inputs]
    with moe_ep.Buffer(group, timeout_secs=20) as buffer:
        check_round_trip(buffer, inputs, owner, least_max_tokens(inputs))
        strided = replace_x(inputs, buffer.rank)
        check_round_trip(buffer, strided, owner, least_max_tokens(inputs))


def replace_x(inputs: Inputs, rank: int) -> Inputs:
    """The same tokens, of which those of `rank` and their weights are views with gaps."""
    x, idx, weights = inputs[rank]
    wide = torch.stack([x, -x], dim=2)[:, :, 0]
    assert not wide.is_contiguous()
    return [*inputs[:rank], (wide, idx.t().contiguous().t(), weights.t().contiguous().t()), *inputs[rank + 1 :]]


# case I01, W04, I07
@pytest.mark.parametrize("world", [1, 4])
def test_weights_of_unused_slots_are_not_read_and_strides_do_not_matter(ranks: Pools, world: int) -> None:
    ranks.run(with_nan_weights_in_unused_slots, world)


def waiting(group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    world = dist.get_world_size(group)
    inputs = make_inputs("random", "equal", world, HIDDEN, NUM_TOPK, 2 * world, torch.bfloat16)
    waits = [torch.zeros(world, dtype=torch.int64) for _ in range(2)]
    with moe_ep.Buffer(group, timeout_secs=20) as buffer:
        x, idx, weights = inputs[buffer.rank]
        recv, _, handle, _, _ = buffer.low_latency_dispatch(
            x, idx, 64, 2 * world, use_fp8=False, dispatch_wait_recv_cost_stats=waits[0]
        )
        assert isinstance(recv, Tensor)
        for _ in range(2):
            before = waits[1].clone()
            buffer.low_latency_combine(recv, idx, weights, handle, combine_wait_recv_cost_stats=waits[1])
            assert bool((waits[1] >= before).all())
    return waits[0].tolist(), waits[1].tolist()


@pytest.mark.parametrize("world", [1, 4])
def test_the_time_of_waiting_is_added_to_every_peer_alike(ranks: Pools, world: int) -> None:
    for rank, waits in enumerate(ranks.run(waiting, world)):
        for micros in waits:
            assert micros[rank] == 0
            others = {value for peer, value in enumerate(micros) if peer != rank}
            assert len(others) == min(1, world - 1)
            assert all(10 < value < 20e6 for value in others)


def test_the_options_cover_what_deep_ep_tests() -> None:
    assert len(OPTIONS) == 20
    assert replace(Options(), use_fp8=True) in OPTIONS
