"""Combines in rounds inside a node: the same bits as in one call, whatever is summed, and no more memory than promised.

A slot is made to look small, so that small calls take many rounds; nothing in the kernels knows of it.
"""

from __future__ import annotations

import gc
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep
from moe_ep._native import require
from moe_ep.backends.node_calls import START_BYTES
from tests.distributed.conformance import check_every_routing, check_routing
from tests.gpu.test_intranode_graphs import captured
from tests.helpers.compare import assert_same_bits
from tests.helpers.ranks import Pools
from tests.helpers.routing import ROUTINGS, TOKEN_COUNTS
from tests.helpers.scale_experts import Setup, assert_works, caught, open_buffer
from tests.helpers.small_slots import slots_of

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HIDDEN, NUM_TOPK = 256, 6
EXPERTS_A_RANK = 4


# -- conformance ------------------------------------------------------------------------------------------------------


def _every_routing(
    group: dist.ProcessGroup, layout: str, dtype: torch.dtype, exact: bool, bulk: bool
) -> tuple[int, int]:
    """The number of checks, and of the most rounds that a combine took."""
    num_checks, world = 0, dist.get_world_size(group)
    with (
        slots_of(world - 1) as numbers,
        mock.patch.object(require(), "has_bulk_copies", return_value=bulk and require().has_bulk_copies()),
    ):
        for routing, tokens in itertools.product(ROUTINGS, TOKEN_COUNTS):
            check_routing(group, "intranode", layout, dtype, routing, tokens, 4, exact=exact, device="cuda")
            num_checks += 1
    return num_checks, max(numbers)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["compact", "expert_major"])
@pytest.mark.parametrize("world", [4, 8])
def test_sums_and_gradients_in_rounds_are_those_of_the_loops(
    ranks: Pools, layout: str, dtype: torch.dtype, world: int
) -> None:
    by_rank = ranks.run(_every_routing, world, layout, dtype, False, True, timeout_secs=200)
    assert by_rank == [(len(ROUTINGS) * len(TOKEN_COUNTS), 7)] * world, "7 tokens, one a round"


@pytest.mark.parametrize("layout", ["compact", "expert_major"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_path_of_older_gpus_runs_in_rounds_too(ranks: Pools, layout: str, dtype: torch.dtype) -> None:
    by_rank = ranks.run(_every_routing, 4, layout, dtype, False, False, timeout_secs=200)
    assert by_rank == [(len(ROUTINGS) * len(TOKEN_COUNTS), 7)] * 4


def test_the_exact_combine_beside_rounds_of_the_backward(ranks: Pools) -> None:
    by_rank = ranks.run(_every_routing, 4, "expert_major", torch.bfloat16, True, True, timeout_secs=200)
    assert by_rank == [(len(ROUTINGS) * len(TOKEN_COUNTS), 7)] * 4


def _between_nodes(group: dist.ProcessGroup, layout: str) -> tuple[int, bool]:
    with slots_of(12) as numbers:
        num_checks = check_every_routing(group, layout, torch.bfloat16, 4, "ipc", False, "cuda")
    return num_checks, max(numbers) > 1


@pytest.mark.parametrize("layout", ["compact", "expert_major"])
def test_sums_inside_the_nodes_of_two_hops_run_in_rounds(ranks: Pools, layout: str) -> None:
    by_rank = ranks.run(_between_nodes, 8, layout, timeout_secs=200)
    assert by_rank == [(len(ROUTINGS) * len(TOKEN_COUNTS), True)] * 8


# -- the same bits as one call ----------------------------------------------------------------------------------------


def _inputs(rank: int, world: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, int]:
    """Ragged T of some hundreds; holes among the slots."""
    g = torch.Generator().manual_seed(rank)
    num_tokens = 400 + 97 * rank if rank != 2 else 31
    num_experts = EXPERTS_A_RANK * world
    x = torch.randn(num_tokens, HIDDEN, generator=g).to(dtype)
    idx = torch.rand(num_tokens, num_experts, generator=g).argsort(dim=1)[:, :NUM_TOPK]
    idx[torch.rand(idx.shape, generator=g) < 0.1] = -1
    weights = torch.rand(num_tokens, NUM_TOPK, generator=g)
    return x.cuda(), idx.cuda(), weights.cuda(), num_experts


def _same_as_one_call(group: dist.ProcessGroup, layout: str, dtype: torch.dtype) -> list[int]:
    """Rounds of every size that slots allow, one behind the other and among calls of other kinds."""
    world, taken = dist.get_world_size(group), []
    with open_buffer(group, "intranode") as buffer:
        x, idx, weights, num_experts = _inputs(buffer.rank, world, dtype)
        out = moe_ep.dispatch(buffer, x, idx, weights, num_experts=num_experts, layout=layout)
        handle = out.handle
        assert isinstance(handle, moe_ep.DispatchHandle)
        rows = out.x * (torch.arange(out.x.shape[0], device="cuda") % 5 + 1).to(dtype).unsqueeze(1)
        row_weights = out.topk_weights if layout == "expert_major" else None
        bias = (torch.randn_like(x), torch.randn_like(x))
        registered = buffer.empty(rows.shape, rows.dtype).copy_(rows)

        def sums() -> list[Tensor]:
            made = [moe_ep.combine(buffer, rows, handle, row_weights), moe_ep.combine(buffer, registered, handle)]
            if layout == "compact":
                made += [buffer.combine(rows, handle, bias=given)[0] for given in (None, bias[0], bias)]
            return made

        expected = sums()
        most = max(handle.rank_tokens)
        for slot_rows in (2 * most, most, most // 2 + 1, 300, 100):
            with slots_of(slot_rows) as numbers:
                for number, (y, one) in enumerate(zip(sums(), expected, strict=True)):
                    assert_same_bits(y, one, f"sum {number} with slots of {slot_rows} rows")
                taken.append(numbers[0])
                assert set(numbers) == {numbers[0]}
                again = moe_ep.dispatch(buffer, x, idx, weights, num_experts=num_experts, layout=layout)
                assert_same_bits(again.x, out.x, "rows of a dispatch between")
        buffer.check()
        assert_works(buffer, group, Setup("intranode", layout, world))
    return taken


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["compact", "expert_major"])
@pytest.mark.parametrize("world", [4, 8])
def test_any_number_of_rounds_gives_the_bits_of_one_call(
    ranks: Pools, layout: str, dtype: torch.dtype, world: int
) -> None:
    by_rank = ranks.run(_same_as_one_call, world, layout, dtype, timeout_secs=150)
    assert all(numbers == by_rank[0] for numbers in by_rank)
    assert by_rank[0] == sorted(by_rank[0])
    assert len({number % 2 for number in by_rank[0]}) == 2, "epochs of both parities begin a call"
    assert by_rank[0][-1] > 10


# -- graphs, bounds, refusals -----------------------------------------------------------------------------------------


def _graph(group: dist.ProcessGroup, slot_rows: int) -> int:
    with open_buffer(group, "intranode") as buffer, slots_of(slot_rows) as numbers:
        base, idx, _, num_experts = _inputs(buffer.rank, buffer.group_size, torch.float32)
        base, x = base.round(), base.clone()
        handle = moe_ep.dispatch(buffer, x, idx, num_experts=num_experts, layout="compact").handle
        assert isinstance(handle, moe_ep.DispatchHandle)
        outputs: list[Tensor] = []

        def work() -> None:
            rows = buffer.dispatch(x, handle=handle)[0]
            assert isinstance(rows, Tensor)
            outputs[:] = [moe_ep.combine(buffer, rows, handle)]

        graph = captured(work)
        owner = torch.where(idx < 0, -1, idx // EXPERTS_A_RANK)
        on_rank = [(owner == rank).any(dim=1) for rank in range(buffer.group_size)]
        copies = torch.stack(on_rank).sum(0).unsqueeze(1)
        for replay in range(20):
            x.copy_(base * (replay % 3 + 1))
            graph.replay()
            assert torch.equal(outputs[0], x * copies), f"y of replay {replay}"
            if replay % 4 == 1:  # eager, and an odd number of calls between replays
                rows = moe_ep.dispatch(buffer, x, idx, num_experts=num_experts, layout="compact").x
                assert torch.equal(moe_ep.combine(buffer, rows, handle), x * copies)
        buffer.check()
        return numbers[-1]


@pytest.mark.parametrize("slot_rows", [400, 1000])
def test_rounds_replay_in_a_graph(ranks: Pools, slot_rows: int) -> None:
    numbers = ranks.run(_graph, 4, slot_rows, timeout_secs=90)
    assert min(numbers) > 1
    assert len(set(numbers)) == 1


def _bounded(
    group: dist.ProcessGroup, layout: str, slot_rows: int, max_rows: list[int], with_backward: bool
) -> tuple[bool, bool, type[BaseException] | None, str]:
    """With max_rows of each rank: whether y is that of a call without, whether it is all NaN, what check() says."""
    with open_buffer(group, "intranode") as buffer:
        x, idx, _, num_experts = _inputs(buffer.rank, buffer.group_size, torch.float32)
        x.requires_grad_()
        arguments: dict[str, Any] = {"num_experts": num_experts, "layout": layout}
        with torch.no_grad():
            known = moe_ep.dispatch(buffer, x, idx, **arguments)
            expected = moe_ep.combine(buffer, known.x, known.handle)
        out = moe_ep.dispatch(buffer, x, idx, **arguments, max_rows=max_rows[buffer.rank])
        torch.cuda.synchronize()
        kind, text = caught(buffer.check)
        with slots_of(slot_rows):
            y = moe_ep.combine(buffer, out.x, out.handle)
            if with_backward:  # behind a refusal it may raise at once
                torch.autograd.backward([y], [torch.ones_like(y)])
                assert x.grad is not None
                assert torch.equal(x.grad.isnan().any(dim=1), y.isnan().any(dim=1))
        torch.cuda.synchronize()
        kind_behind, text_behind = caught(buffer.check)
        assert_works(buffer, group, Setup("intranode", layout, buffer.group_size))
        return torch.equal(y, expected), bool(y.isnan().all()), kind or kind_behind, text + text_behind


ENOUGH = 6000  # rows for each of 4 ranks: no more than 6 times the 1,800 tokens there are


@pytest.mark.parametrize("layout", ["compact", "expert_major"])
@pytest.mark.parametrize("slot_rows", [ENOUGH - 1, 1000])
def test_rounds_whose_counts_only_the_device_knows(ranks: Pools, layout: str, slot_rows: int) -> None:
    """Slots that hold all there is, though not the bound; and slots that hold half of it."""
    for same, _, kind, text in ranks.run(_bounded, 4, layout, slot_rows, [ENOUGH] * 4, True, timeout_secs=90):
        assert (same, kind, text) == (True, None, "")


def test_slots_that_are_too_small_for_the_rounds_of_a_bound_are_named(ranks: Pools) -> None:
    for _, all_nan, kind, text in ranks.run(_bounded, 4, "compact", 300, [ENOUGH] * 4, False, timeout_secs=90):
        assert all_nan
        assert kind is RuntimeError
        assert "combine needs more memory than the buffer's" in text
        assert "Run it once without max_rows" in text


def test_bounds_that_lead_to_different_rounds_are_refused(ranks: Pools) -> None:
    by_rank = ranks.run(_bounded, 4, "compact", 4000, [ENOUGH, 3000, ENOUGH, ENOUGH], False, timeout_secs=90)
    for _, all_nan, kind, text in by_rank:
        assert all_nan
        assert kind is RuntimeError
        assert "the rounds of a combine (which follow from max_rows): rank 0 has 2, rank 1 has 1" in text


def test_a_rank_that_overflows_loses_its_rows_alone(ranks: Pools) -> None:
    """Its bound is larger than a slot, and less than what comes to it."""
    max_rows = [ENOUGH, ENOUGH, 900, ENOUGH]
    by_rank = ranks.run(_bounded, 4, "compact", 850, max_rows, True, timeout_secs=90)
    for rank, (same, all_nan, kind, text) in enumerate(by_rank):
        assert not same
        assert not all_nan
        assert (kind is RuntimeError) == (rank == 2)
        assert ("rows on EP rank 2, max_rows is 900" in text) == (rank == 2)


def _refused(group: dist.ProcessGroup, bad_rank: int) -> tuple[bool, type[BaseException] | None, str]:
    """One rank gives too few rows while the others have all rounds under way; then all go on."""
    with open_buffer(group, "intranode") as buffer:
        x, idx, _, num_experts = _inputs(buffer.rank, buffer.group_size, torch.float32)
        out = moe_ep.dispatch(buffer, x, idx, num_experts=num_experts)
        with slots_of(150):
            expected = moe_ep.combine(buffer, out.x, out.handle)
            for _ in range(3):
                is_bad, y = buffer.rank == bad_rank, torch.full((1,), float("nan"), device="cuda")
                if is_bad:
                    kind, text = caught(lambda: moe_ep.combine(buffer, out.x[:-1], out.handle))
                else:
                    y = moe_ep.combine(buffer, out.x, out.handle)
                    torch.cuda.synchronize()
                    kind, text = caught(buffer.check)
                again = moe_ep.combine(buffer, out.x, out.handle)
                assert_same_bits(again, expected, "y behind a refusal")
            buffer.check()
        assert_works(buffer, group, Setup("intranode", "compact", buffer.group_size))
        return bool(y.isnan().all()), kind, text


@pytest.mark.parametrize("bad_rank", [0, 3])
def test_a_refusal_ends_all_rounds_on_all_ranks(ranks: Pools, bad_rank: int) -> None:
    for rank, (all_nan, kind, text) in enumerate(ranks.run(_refused, 4, bad_rank, timeout_secs=90)):
        assert all_nan
        assert kind is (ValueError if rank == bad_rank else RuntimeError)  # at once, or by check()
        assert f"EP rank {bad_rank} refused combine: " in text


# -- memory -----------------------------------------------------------------------------------------------------------


def _grows(group: dist.ProcessGroup, num_tokens: int, hidden: int) -> tuple[int, int]:
    """Every token goes to every rank and back, then its gradient; bytes of a slot after dispatch and after combine."""
    with open_buffer(group, "intranode") as buffer:
        world = buffer.group_size
        x = (torch.arange(num_tokens, device="cuda") % 509 + 600 * buffer.rank).float().unsqueeze(1).repeat(1, hidden)
        x.requires_grad_()
        idx = torch.arange(world, device="cuda").repeat(num_tokens, 1)
        out = moe_ep.dispatch(buffer, x, idx, num_experts=world, layout="compact")
        sizes = [int(buffer.backend._exchange.slot_bytes)]  # type: ignore[attr-defined]
        y = moe_ep.combine(buffer, out.x, out.handle)
        sizes.append(int(buffer.backend._exchange.slot_bytes))  # type: ignore[attr-defined]
        assert_same_bits(y, world * x.detach(), "y")
        torch.autograd.backward([y], [torch.ones_like(y)])
        assert x.grad is not None
        assert_same_bits(x.grad, torch.full_like(x, float(world)), "dx")
        buffer.check()
        return sizes[0], sizes[1]


@pytest.mark.parametrize("world", [4, 8])
def test_a_dispatch_grows_to_two_rows_a_token_and_its_combine_runs_in_rounds(ranks: Pools, world: int) -> None:  # T05
    hidden = 2048
    num_tokens = START_BYTES // (4 * hidden) * 3 // 4
    sizes = ranks.run(_grows, world, num_tokens, hidden, timeout_secs=90)
    assert sizes == [(2 * num_tokens * 4 * hidden,) * 2] * world


# Segments grow in steps of 8 MiB a slot, and a buffer has a control block and pages of its own.
ALLOWANCE_BYTES = 24 << 20


def _extra_bytes(group: dist.ProcessGroup, num_tokens: int, hidden: int) -> tuple[int, int, int]:
    """The GPU's number; what cudaMemGetInfo misses of it on all its ranks; what PyTorch took of that on this one."""
    world = dist.get_world_size(group)
    num_experts, rank = 8 * world, dist.get_rank(group)
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, hidden, generator=g).bfloat16().cuda()
    idx = torch.rand(num_tokens, num_experts, generator=g).argsort(dim=1)[:, :8].cuda()

    def round_trip(buffer: moe_ep.Buffer, count: int) -> None:
        out = moe_ep.dispatch(buffer, x[:count], idx[:count], num_experts=num_experts, layout="compact")
        moe_ep.combine(buffer, out.x, out.handle)
        buffer.check()

    def load_kernels() -> None:
        with open_buffer(group, "intranode") as buffer, slots_of(world - 1):
            round_trip(buffer, 64)

    def free_and_reserved() -> tuple[int, int]:
        torch.cuda.synchronize()
        dist.barrier(group)
        free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
        dist.barrier(group)
        return free, reserved

    load_kernels()  # for what their first launch takes
    gc.collect()
    free_before, reserved_before = free_and_reserved()
    with open_buffer(group, "intranode") as buffer:
        round_trip(buffer, num_tokens)
        free, reserved = free_and_reserved()
    return torch.cuda.current_device(), free_before - free, reserved - reserved_before


@pytest.mark.no_mps
def test_eight_ranks_take_no_more_than_four_rows_a_token(ranks: Pools) -> None:
    num_tokens, hidden, world = 2048, 7168, 8
    by_rank = ranks.run(_extra_bytes, world, num_tokens, hidden, timeout_secs=90)
    for device in {device for device, _, _ in by_rank}:
        missing = [free for place, free, _ in by_rank if place == device]
        reserved = [own for place, _, own in by_rank if place == device]
        extra_bytes = (max(missing) - sum(reserved)) / len(missing)
        assert extra_bytes <= 4 * num_tokens * hidden * 2 + ALLOWANCE_BYTES
        assert extra_bytes >= 2 * num_tokens * hidden * 2, "the dispatch alone takes two rows a token"
