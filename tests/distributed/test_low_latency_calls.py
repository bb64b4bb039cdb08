"""What the low-latency calls promise beside their numbers: hooks, results in flight, refusals, the mask (A14)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep
from moe_ep.reference import LoopRow, combine_loop, dispatch_loop
from tests.distributed.conformance import owner_table
from tests.distributed.test_low_latency import (
    Inputs,
    check_round_trip,
    expected_places,
    expert_results,
    in_places,
    least_max_tokens,
    spread,
)
from tests.helpers.compare import assert_same_bits
from tests.helpers.ranks import Pools
from tests.helpers.routing import make_inputs

HIDDEN, NUM_TOPK = 8, 3
Seen = tuple[str, str]  # the class of an error and its text


def caught(call: Callable[[], object]) -> Seen:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def inputs_of(world: int, routing: str = "random", seed: int = 0) -> Inputs:
    return make_inputs(routing, "ragged", world, HIDDEN, NUM_TOPK, 2 * world, torch.bfloat16, seed)


# -- hooks ------------------------------------------------------------------------------------------------------------


def is_zero(*tensors: Tensor) -> bool:
    return not any(bool(tensor.view(torch.uint8).any()) for tensor in tensors)


def hooks_in_either_order(group: dist.ProcessGroup, in_order: bool) -> None:
    """Two micro-batches whose dispatches, then whose combines, are in flight together."""
    world = dist.get_world_size(group)
    owner = owner_table(2 * world, world)
    batches = [inputs_of(world, seed=seed) for seed in range(2)]
    order = (0, 1) if in_order else (1, 0)
    with moe_ep.Buffer(group, timeout_secs=20) as buffer:
        rank, sent = buffer.rank, []
        stats = torch.zeros(owner.count(rank), dtype=torch.int32)
        for inputs in batches:
            x, idx, _ = inputs[rank]
            sent.append(buffer.low_latency_dispatch(x, idx, 32, 2 * world, stats, use_fp8=False, return_recv_hook=True))
            received, count, handle, _, hook = sent[-1]
            assert isinstance(received, Tensor)
            assert is_zero(received, count, handle.src_info, handle.layout_range, stats)
        all_rows = [dispatch_loop([i for _, i, _ in batch], [w for _, _, w in batch], owner) for batch in batches]
        expected = [expected_places(rows[rank], owner.count(rank), world, 32) for rows in all_rows]
        for batch in order:
            received, count, _, _, hook = sent[batch]
            assert hook is not None
            hook()
            assert isinstance(received, Tensor)
            shape = (owner.count(rank), 32 * world)
            x = [x for x, _, _ in batches[batch]]
            assert_same_bits(received, spread(expected[batch].sources, x, shape), "recv")
            assert_same_bits(count, expected[batch].recv_count, "recv_count")
            assert "already run" in caught(hook)[1]
        assert_same_bits(stats, expected[0].recv_count + expected[1].recv_count, "cumulative stats")

        made = [expert_results(rows, HIDDEN, torch.bfloat16, seed=9) for rows in all_rows]
        homes = []
        for batch in range(2):
            _, idx, weights = batches[batch][rank]
            rows = in_places(made[batch][rank], expected[batch], float("nan"))
            out = torch.full((len(idx), HIDDEN), 5.0, dtype=torch.bfloat16) if batch else None
            homes.append(buffer.low_latency_combine(rows, idx, weights, sent[batch][2], return_recv_hook=True, out=out))
            assert bool((homes[batch][0] == (5.0 if batch else 0.0)).all())
        for batch in order:
            y, _, hook = homes[batch]
            assert hook is not None
            hook()
            lengths = [len(i) for _, i, _ in batches[batch]]
            home = combine_loop(made[batch], all_rows[batch], lengths, weighted=True, exact=True)
            assert_same_bits(y, home[rank], "combined")


# case T04 (results outlive later calls)
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_results_are_zero_until_their_hook_runs_and_hooks_run_in_any_order(
    ranks: Pools, world: int, in_order: bool
) -> None:
    ranks.run(hooks_in_either_order, world, in_order)


def third_in_flight(group: dist.ProcessGroup, held_by: list[int]) -> list[Seen]:
    """Two dispatches with hooks; the ranks of `held_by` run none before the third call, the others both."""
    world = dist.get_world_size(group)
    inputs = inputs_of(world)
    owner = owner_table(2 * world, world)
    with moe_ep.Buffer(group, timeout_secs=20) as buffer:
        x, idx, weights = inputs[buffer.rank]

        def dispatch(return_recv_hook: bool) -> Any:
            return buffer.low_latency_dispatch(x, idx, 32, 2 * world, use_fp8=False, return_recv_hook=return_recv_hook)

        flying = [dispatch(True) for _ in range(2)]
        if buffer.rank not in held_by:
            for *_, hook in flying:
                hook()
        recv, _, handle, _, _ = flying[0]
        seen = [
            caught(lambda: dispatch(True)),
            caught(lambda: dispatch(False)),
            caught(lambda: buffer.low_latency_combine(recv, idx, weights, handle)),
        ]
        if buffer.rank in held_by:
            flying[1][-1]()
        # One is still in flight where it was held: there is room, but not for the combine that needs it.
        seen.append(caught(lambda: buffer.low_latency_combine(recv, idx, weights, handle)))
        if buffer.rank in held_by:
            flying[0][-1]()
        check_round_trip(buffer, inputs, owner, 32)
        return seen


# case T08
@pytest.mark.parametrize(("world", "held_by"), [(1, [0]), (3, [0, 1, 2]), (3, [1])])
def test_a_third_result_in_flight_is_refused_on_every_rank(ranks: Pools, world: int, held_by: list[int]) -> None:
    for seen in ranks.run(third_in_flight, world, held_by):
        assert [kind for kind, _ in seen] == ["RuntimeError"] * 4
        for _, text in seen[:3]:
            assert "2 results are in flight, those of low_latency_dispatch and low_latency_dispatch" in text
            assert "Call one of the hooks first" in text
        assert "the hook of the dispatch that made this handle has not run" in seen[3][1]
        assert world == 1 or all(f"rank {held_by[0]}" in text for _, text in seen)


# -- refusals ---------------------------------------------------------------------------------------------------------

X = torch.ones(2, 512, dtype=torch.bfloat16)
IDX = torch.tensor([[0, 3], [1, 2]])
WEIGHTS = torch.full((2, 2), 0.5)
STATS = torch.zeros(5, dtype=torch.int32)

# Arguments that replace good ones, the error's class, and parts of its text.
BAD_DISPATCH: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    ({"x": X.tolist()}, "TypeError", ("x is list",)),
    ({"x": X[0]}, "ValueError", ("x has shape [512]", "two dimensions")),
    ({"x": X.float()}, "TypeError", ("x is torch.float32", "with use_fp8=True are torch.bfloat16")),
    ({"x": X.double(), "use_fp8": False}, "TypeError", ("x is torch.float64", "torch.float16, torch.float32")),
    ({"x": X[:, :100]}, "ValueError", ("H = 100", "multiple of 128", "use_fp8=False")),
    ({"x": X[:, :384], "round_scale": True, "use_ue8m0": True}, "ValueError", ("H = 384", "multiple of 512")),
    ({"use_ue8m0": True}, "ValueError", ("use_ue8m0=True", "round_scale=True")),
    ({"topk_idx": IDX + 1}, "ValueError", ("topk_idx[0, 1] is 4", "[-1, 4)")),
    ({"topk_idx": IDX.float()}, "TypeError", ("topk_idx is torch.float32",)),
    ({"topk_idx": IDX[:1]}, "ValueError", ("topk_idx has shape [1, 2]",)),
    ({"num_max_dispatch_tokens_per_rank": 1}, "ValueError", ("T = 2 tokens", "per_rank is 1")),
    ({"num_max_dispatch_tokens_per_rank": 0}, "ValueError", ("per_rank is 0", "at least 1")),
    ({"num_max_dispatch_tokens_per_rank": 4.0}, "TypeError", ("per_rank is 4.0",)),
    ({"topk_idx": IDX * 0, "num_max_dispatch_tokens_per_rank": 3}, "ValueError", ("expert 0 4 times", "is 3")),
    ({"num_experts": 0}, "ValueError", ("num_experts is 0",)),
    ({"async_finish": True, "return_recv_hook": True}, "ValueError", ("async_finish and return_recv_hook",)),
    ({"cumulative_local_expert_recv_stats": STATS}, "ValueError", ("cumulative_local_expert_recv_stats is", "int32")),
    ({"cumulative_local_expert_recv_stats": STATS[:1].long()}, "ValueError", ("torch.int64 [1]",)),
    ({"dispatch_wait_recv_cost_stats": STATS}, "ValueError", ("dispatch_wait_recv_cost_stats is", "int64")),
]
BAD_COMBINE: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    ({"x": torch.ones(1, 1, 512).bfloat16()}, "ValueError", ("x is [1, 1, 512]", "the handle stands for rows")),
    ({"use_logfmt": True}, "ValueError", ("use_logfmt=True",)),
    ({"use_logfmt": True, "zero_copy": True}, "ValueError", ("use_logfmt=True",)),
    ({"zero_copy": True}, "RuntimeError", ("zero_copy=True", "get_next_low_latency_combine_buffer")),
    ({"topk_idx": IDX.flip(0)}, "ValueError", ("topk_idx differs from the ids that made the handle",)),
    ({"topk_idx": IDX[:, :1]}, "ValueError", ("topk_idx differs",)),
    ({"topk_weights": WEIGHTS[:1]}, "ValueError", ("topk_weights is [1, 2]",)),
    ({"topk_weights": WEIGHTS.double()}, "TypeError", ("topk_weights is float64",)),
    ({"handle": (1, 2)}, "TypeError", ("handle is tuple", "low_latency_dispatch")),
    ({"out": torch.empty(2, 512)}, "ValueError", ("out is torch.float32 [2, 512]", "torch.bfloat16 [2, 512]")),
    ({"out": torch.empty(3, 512).bfloat16()}, "ValueError", ("out is torch.bfloat16 [3, 512]",)),
    ({"combine_wait_recv_cost_stats": STATS[:1]}, "ValueError", ("combine_wait_recv_cost_stats is",)),
]


def bad_calls(group: dist.ProcessGroup | None, bad_rank: int) -> list[Seen]:
    """Every bad call on `bad_rank` beside good ones on the others, then a call that works."""
    seen = []
    good: dict[str, Any] = {"x": X, "topk_idx": IDX, "num_max_dispatch_tokens_per_rank": 4, "num_experts": 4}
    with moe_ep.Buffer(group, timeout_secs=20) as buffer:
        is_bad = buffer.rank == bad_rank
        for changes, _, _ in BAD_DISPATCH:
            arguments = {**good, **(changes if is_bad else {})}
            seen.append(caught(lambda arguments=arguments: buffer.low_latency_dispatch(**arguments)))  # type: ignore[misc]
        recv, _, handle, _, _ = buffer.low_latency_dispatch(**good, use_fp8=False)
        good = {"x": recv, "topk_idx": IDX, "topk_weights": WEIGHTS, "handle": handle}
        for changes, _, _ in BAD_COMBINE:
            arguments = {**good, **(changes if is_bad else {})}
            seen.append(caught(lambda arguments=arguments: buffer.low_latency_combine(**arguments)))  # type: ignore[misc]
        y, _, _ = buffer.low_latency_combine(**good)
        assert torch.equal(y, X)
    return seen


@pytest.mark.parametrize("world", [1, 3])
def test_bad_arguments_are_refused_on_every_rank_and_the_buffer_goes_on(ranks: Pools, world: int) -> None:
    bad_rank = min(1, world - 1)
    for rank, of_rank in enumerate(ranks.run(bad_calls, world, bad_rank)):
        for (kind, text), (changes, expected, says) in zip(of_rank, BAD_DISPATCH + BAD_COMBINE, strict=True):
            assert kind == expected, f"rank {rank}, {changes}: {kind} {text}"
            for part in (*says, *([f"rank {bad_rank}"] if world > 1 else [])):
                assert part in text, f"rank {rank}, {changes}: {text}"


def disagreements(group: dist.ProcessGroup) -> list[Seen]:
    """Rank 1 differs from the others in one thing after another."""
    with moe_ep.Buffer(group, timeout_secs=20) as buffer:
        odd = buffer.rank == 1

        def dispatch(num_max: int = 4, **arguments: Any) -> Any:
            return buffer.low_latency_dispatch(X, IDX, num_max, 4, **arguments)

        first = dispatch(use_fp8=False)
        second = buffer.low_latency_dispatch(X, IDX * 0 + buffer.rank, 4, 4, use_fp8=False)

        def combine(of: Any) -> Any:
            idx = IDX if of is first else IDX * 0 + buffer.rank
            return buffer.low_latency_combine(of[0], idx, WEIGHTS, of[2])

        seen = [
            caught(lambda: dispatch(8 if odd else 4)),
            caught(lambda: dispatch(use_fp8=not odd)),
            caught(lambda: dispatch(round_scale=odd)),
            caught(lambda: combine(first) if odd else dispatch()),
            caught(lambda: combine(second if odd else first)),
            caught(lambda: moe_ep.dispatch(buffer, X, IDX, num_experts=4) if odd else dispatch()),
        ]
        assert torch.equal(combine(first)[0], X)
        return seen


# case P04 (different settings, different order of calls)
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_disagree_all_learn_on_what(ranks: Pools, world: int) -> None:
    says = (
        ("num_max_dispatch_tokens_per_rank: rank 0 has 4, rank 1 has 8",),
        ("what travels: rank 0 has FP8, rank 1 has rows as given",),
        ("what travels: rank 0 has FP8, rank 1 has FP8 with power-of-two scales",),
        ("the operation: rank 0 has low_latency_dispatch, rank 1 has low_latency_combine",),
        ("the routing of the dispatch that is combined",),
        ("the operation",),
    )
    for seen in ranks.run(disagreements, world):
        assert [kind for kind, _ in seen] == ["ConfigError"] * len(says)
        for (_, text), parts in zip(seen, says, strict=True):
            assert all(part in text for part in parts), text


# -- the zero-copy buffer, and calls that stay on one rank ------------------------------------------------------------


def test_the_combine_buffer_is_read_once_and_fits_its_handle() -> None:
    buffer = moe_ep.Buffer()
    _, _, after_fp8, _, _ = buffer.low_latency_dispatch(X, IDX, 4, 4)
    wide, _, handle, _, _ = buffer.low_latency_dispatch(X.float(), IDX, 4, 4, use_fp8=False)
    assert buffer.get_next_low_latency_combine_buffer(after_fp8).dtype == torch.bfloat16
    held = buffer.get_next_low_latency_combine_buffer(handle)
    assert held.shape == wide.shape  # type: ignore[union-attr]
    assert held.dtype == torch.float32
    assert buffer.get_next_low_latency_combine_buffer(handle) is held
    held.copy_(wide)  # type: ignore[arg-type]
    y, _, _ = buffer.low_latency_combine(torch.empty_like(held), IDX, WEIGHTS, handle, zero_copy=True)
    assert torch.equal(y, X.float())
    assert buffer.get_next_low_latency_combine_buffer(handle) is not held
    with pytest.raises(ValueError, match=r"x is torch.bfloat16 .* the combine buffer is torch.float32"):
        buffer.low_latency_combine(held.bfloat16(), IDX, WEIGHTS, handle, zero_copy=True)


def test_cleaning_only_checks_its_arguments() -> None:
    buffer = moe_ep.Buffer(expert_placement=[0, 0])
    assert buffer.clean_low_latency_buffer(4, 128, 2) is None  # type: ignore[func-returns-value]
    for arguments, says in (
        ((0, 128, 2), "per_rank is 0"),
        ((4, 0, 2), "hidden is 0"),
        ((4, 128, 3), "places 2 experts"),
    ):
        with pytest.raises(ValueError, match=says):
            buffer.clean_low_latency_buffer(*arguments)
    assert moe_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256) % 128 == 0


def test_the_mask_needs_enable_shrink_and_a_rank_of_the_group() -> None:
    status = torch.zeros(1, dtype=torch.int32)
    plain, shrinks = moe_ep.Buffer(), moe_ep.Buffer(enable_shrink=True)
    for call in (
        lambda: plain.low_latency_update_mask_buffer(0, True),
        lambda: plain.low_latency_query_mask_buffer(status),
        plain.low_latency_clean_mask_buffer,
    ):
        with pytest.raises(RuntimeError, match="enable_shrink=True"):
            call()
    with pytest.raises(ValueError, match=r"rank_to_mask is 1; the group has the ranks 0..0"):
        shrinks.low_latency_update_mask_buffer(1, True)
    with pytest.raises(ValueError, match=r"mask_status is torch.int64 \[1\]; it must be int32 \[1\]"):
        shrinks.low_latency_query_mask_buffer(status.long())


# -- A14: ranks that are left out -------------------------------------------------------------------------------------


def without(inputs: Inputs, owner: list[int], rank: int, masked: list[int]) -> list[Tensor]:
    """The ids of all ranks as they count for `rank`: unused where either end of the way is closed to the other."""
    kept = []
    for source, (_, idx, _) in enumerate(inputs):
        closed = [e for e, owns in enumerate(owner) if owns != source and (owns in masked or source in masked)]
        kept.append(idx.masked_fill(torch.isin(idx, torch.tensor(closed, dtype=torch.int64)), -1))
    return kept


def masked_calls(group: dist.ProcessGroup, masked: list[int]) -> None:
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    owner, inputs = owner_table(2 * world + 1, world), inputs_of(world)
    num_max, lengths = least_max_tokens(inputs), [len(i) for _, i, _ in inputs]
    x, idx, weights = inputs[rank]
    status = torch.full((world,), 7, dtype=torch.int32)
    with moe_ep.Buffer(group, timeout_secs=20, enable_shrink=True) as buffer:
        check_round_trip(buffer, inputs, owner, num_max)
        before, _, handle_before, _, _ = buffer.low_latency_dispatch(x, idx, num_max, len(owner), use_fp8=False)
        assert isinstance(before, Tensor)
        for other in masked:
            buffer.low_latency_update_mask_buffer(other, other != rank)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [int(other in masked and other != rank) for other in range(world)]

        # Dispatch and combine with the mask.
        kept = without(inputs, owner, rank, masked)
        rows = dispatch_loop(kept, [w for _, _, w in inputs], owner)
        expected = expected_places(rows[rank], owner.count(rank), world, num_max)
        recv, count, handle, _, _ = buffer.low_latency_dispatch(x, idx, num_max, len(owner), use_fp8=False)
        shape = (owner.count(rank), world * num_max)
        assert_same_bits(recv, spread(expected.sources, [x for x, _, _ in inputs], shape), "recv")  # type: ignore[arg-type]
        assert_same_bits(count, expected.recv_count, "recv_count")
        made = expert_results(rows, HIDDEN, torch.bfloat16, seed=1)
        filled = in_places(made[rank], expected, float("nan"))
        y, _, _ = buffer.low_latency_combine(filled, idx, weights, handle)
        home = combine_loop(made, rows, lengths, weighted=True, exact=True)
        assert_same_bits(y, home[rank], "combined with the mask")

        # A combine whose dispatch had all ranks: the closed ways are left out, whatever lies in their rows.
        rows = dispatch_loop([i for _, i, _ in inputs], [w for _, _, w in inputs], owner)
        expected = expected_places(rows[rank], owner.count(rank), world, num_max)
        made, filled = closed_to_nan(rows, owner, masked, rank, expected)
        y, _, _ = buffer.low_latency_combine(filled, idx, weights, handle_before)
        open_rows = [[row for row in of if is_open(row, here, masked)] for here, of in enumerate(rows)]
        home = combine_loop(made, open_rows, lengths, weighted=True, exact=True)
        assert_same_bits(y, home[rank], "combined without those that left")

        buffer.low_latency_clean_mask_buffer()
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [0] * world
        check_round_trip(buffer, inputs, owner, num_max)


def is_open(row: LoopRow, here: int, masked: list[int]) -> bool:
    assert row.source is not None
    return row.source[0] == here or not (row.source[0] in masked or here in masked)


def closed_to_nan(
    rows: list[list[LoopRow]], owner: list[int], masked: list[int], rank: int, expected: Any
) -> tuple[list[Tensor], Tensor]:
    """Results of the open rows of every rank, and this rank's places with NaN in the closed ones."""
    made = expert_results(rows, HIDDEN, torch.bfloat16, seed=4)
    filled = in_places(made[rank], expected, float("nan"))
    for place, row in zip(expected.sources, rows[rank], strict=True):
        if not is_open(row, rank, masked):
            filled[place] = float("nan")
    is_kept = [
        torch.tensor([is_open(row, here, masked) for row in of], dtype=torch.bool) for here, of in enumerate(rows)
    ]
    return [values[kept] for values, kept in zip(made, is_kept, strict=True)], filled


@pytest.mark.parametrize(("world", "masked"), [(2, [1]), (4, [1]), (4, [1, 3]), (8, [1, 3, 5])])
def test_masked_ranks_are_left_out_of_dispatch_and_combine_exactly(ranks: Pools, world: int, masked: list[int]) -> None:
    ranks.run(masked_calls, world, masked)
