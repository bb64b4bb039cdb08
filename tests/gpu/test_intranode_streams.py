"""Streams and lifetimes inside a node: who may free, overwrite or reuse what, and when. Cases T01, T02, T04 and T05."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep
from tests.distributed.conformance import check_routing
from tests.distributed.test_cases_life import assert_growth
from tests.gpu.busy import keep_busy
from tests.helpers.compare import assert_same_bits
from tests.helpers.ranks import Pool, Pools
from tests.helpers.routing import ROUTINGS
from tests.helpers.scale_experts import LAYOUTS, Setup, open_buffer, uninitialised_is_nan

pytestmark = pytest.mark.gpu
NUM_TOKENS, HIDDEN, NUM_EXPERTS = 600, 1024, 8


def make(rank: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """x of small integers, so that every sum is exact; ids with holes; weights that are powers of two."""
    g = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randint(-8, 9, (NUM_TOKENS, HIDDEN), generator=g).float()
    idx = torch.randint(-1, NUM_EXPERTS, (NUM_TOKENS, 3), generator=g)
    weights = 2.0 ** torch.randint(-2, 2, (NUM_TOKENS, 3), generator=g)
    return x.cuda(), idx.cuda(), weights.cuda()


def copies_of(idx: Tensor, world: int) -> Tensor:
    """[T, 1]: on how many ranks a token has an expert, for the balanced split of 8 experts over 1, 2 or 4 ranks."""
    per_rank = NUM_EXPERTS // world
    there = [((idx >= rank * per_rank) & (idx < (rank + 1) * per_rank)).any(dim=1) for rank in range(world)]
    return torch.stack(there, dim=1).sum(dim=1, keepdim=True)


def spoil(*like: Tensor) -> list[Tensor]:
    """Takes memory of these sizes, whatever was just freed among it, and fills it."""
    return [torch.full_like(tensor, 7777) for tensor in like for _ in range(2)]


def assert_spoilt(tensors: list[Tensor]) -> None:
    assert all(bool((tensor == 7777).all()) for tensor in tensors), "a kernel wrote into memory that was freed"


def _nan_in_what_is_empty(group: dist.ProcessGroup, num_steps: int) -> None:  # case T01
    with open_buffer(group, "intranode") as buffer, uninitialised_is_nan():
        x, idx, weights = make(buffer.rank, 0)
        first: list[Tensor] = []
        for step in range(num_steps):
            leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
            if step % 8 == 0:
                keep_busy(2)
            out = moe_ep.dispatch(buffer, leaves[0], idx, leaves[1], num_experts=NUM_EXPERTS, alignment=16)
            y = moe_ep.combine(buffer, out.x * 2, out.handle, out.topk_weights)
            results = [y.detach(), *torch.autograd.grad(y, leaves, x), out.x.detach(), out.topk_idx]
            num_rows = out.x.shape[0]
            fixed = moe_ep.dispatch(
                buffer, x, idx, weights, num_experts=NUM_EXPERTS, alignment=16, max_rows=num_rows + 7
            )
            results += [fixed.x[:num_rows], fixed.topk_idx[:num_rows]]
            assert not bool(fixed.x[num_rows:].any()), f"rows behind the last of step {step}"
            names = ("y", "dx", "dw", "rows", "ids", "rows of max_rows", "ids of max_rows")
            first = first or results
            for name, tensor, expected in zip(names, results, first, strict=True):
                assert not bool(tensor.isnan().any()), f"{name} of step {step}"
                assert torch.equal(tensor, expected), f"{name} of step {step}"


@pytest.mark.parametrize("world", [1, 2, 4])
def test_no_output_shows_memory_that_was_not_written(ranks: Pools, world: int) -> None:  # case T01
    ranks.run(_nan_in_what_is_empty, world, 60)


def _late_ids(group: dist.ProcessGroup, num_steps: int) -> None:  # case T02
    with open_buffer(group, "intranode") as buffer:
        x, idx, _ = make(buffer.rank, 1)
        keep = torch.arange(NUM_TOKENS, device="cuda").unsqueeze(1) % 2 == 0
        expected = x * copies_of(idx.masked_fill(keep, -1), buffer.group_size) + 0.0  # 0, not -0, for no expert
        for _ in range(num_steps):
            given, rows = idx.clone(), torch.zeros_like(x)
            torch.cuda.synchronize()
            keep_busy(3)
            given.masked_fill_(keep, -1)
            rows.copy_(x)
            out = moe_ep.dispatch(buffer, rows, given, num_experts=NUM_EXPERTS, layout="compact")
            assert out.real_tokens_per_expert is not None
            assert sum(out.real_tokens_per_expert) == int((out.topk_idx >= 0).sum())
            assert_same_bits(moe_ep.combine(buffer, out.x, out.handle), expected, "y")


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ids_and_rows_that_the_stream_is_still_to_write_are_read_in_time(ranks: Pools, world: int) -> None:
    ranks.run(_late_ids, world, 40)


@contextmanager
def _on(side: bool) -> Iterator[None]:
    if not side:
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def _freed(group: dist.ProcessGroup, side: bool, num_steps: int) -> None:  # case T04
    """Asynchronous calls whose inputs and outputs are dropped at once, while the last rank is 50 ms behind."""
    with open_buffer(group, "intranode") as buffer, _on(side):
        world, rank = buffer.group_size, buffer.rank
        base, idx, weights = make(rank, 2)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, NUM_EXPERTS)
        layout: dict[str, Any] = {
            "num_tokens_per_rank": per_rank,
            "is_token_in_rank": in_rank,
            "num_tokens_per_expert": per_expert,
        }
        expected_rows, _, _, _, handle, _ = buffer.dispatch(base, **layout, topk_idx=idx, topk_weights=weights)
        assert isinstance(expected_rows, Tensor)
        assert handle is not None
        expected = base * copies_of(idx, world)
        for step in range(num_steps):
            late = rank == world - 1 and step % 8 == 0
            if late:
                keep_busy(50)
            x = base.clone()
            rows, *_, event = buffer.dispatch(x, handle=handle, async_finish=True)
            del x
            spoilt = spoil(base)
            event.current_stream_wait()
            assert isinstance(rows, Tensor)
            assert torch.equal(rows, expected_rows), f"rows of step {step}"
            if late:
                keep_busy(50)
            y, _, event = buffer.combine(rows, handle, async_finish=True)
            del rows
            spoilt += spoil(expected_rows)
            event.current_stream_wait()
            assert torch.equal(y, expected), f"y of step {step}"
            # Nobody takes what this call gives, nor waits for it: its memory is not anybody else's before it ends.
            ids, given = idx.clone(), weights.clone()
            buffer.dispatch(base, **layout, topk_idx=ids, topk_weights=given, async_finish=True)
            del ids, given, y
            spoilt += spoil(idx, weights, expected_rows, base)
            buffer.dispatch(base, handle=handle)  # the stream waits for this one, which comes after it
            assert_spoilt(spoilt)


@pytest.mark.parametrize("side", [False, True], ids=["current stream", "side stream"])
@pytest.mark.parametrize("world", [2, 4])
def test_what_is_freed_behind_an_asynchronous_call_stays_its_own_until_it_ends(
    ranks: Pools, world: int, side: bool
) -> None:
    ranks.run(_freed, world, side, 24)


def _overwritten(group: dist.ProcessGroup, num_steps: int) -> None:  # case T04, and dy of a backward
    """A call that is not asynchronous has read its input where the stream goes on, however late the peers are."""
    with open_buffer(group, "intranode") as buffer:
        base, idx, weights = make(buffer.rank, 3)
        expected = base * copies_of(idx, buffer.group_size)
        gain = (weights * (idx >= 0)).sum(dim=1, keepdim=True)
        for step in range(num_steps):
            if buffer.rank == 0 and step % 8 == 0:
                keep_busy(50)
            x, ids, given = base.clone().requires_grad_(), idx.clone(), weights.clone()
            out = moe_ep.dispatch(buffer, x, ids, num_experts=NUM_EXPERTS, layout="compact")
            with torch.no_grad():
                x.fill_(7777)
            ids.fill_(7777)
            rows = out.x.detach().clone()
            y = moe_ep.combine(buffer, rows, out.handle)
            rows.fill_(7777)
            assert torch.equal(y, expected), f"y of step {step}"
            if buffer.rank == 0 and step % 8 == 4:
                keep_busy(50)
            x = base.clone().requires_grad_()
            out = moe_ep.dispatch(buffer, x, idx, given, num_experts=NUM_EXPERTS)
            y = moe_ep.combine(buffer, out.x, out.handle, out.topk_weights)
            dy = torch.ones_like(y)
            (dx,) = torch.autograd.grad(y, x, dy)
            dy.fill_(7777)
            assert torch.equal(dx, gain.expand_as(dx)), f"dx of step {step}"


@pytest.mark.parametrize("world", [2, 4])
def test_what_is_overwritten_behind_a_call_was_read_before(ranks: Pools, world: int) -> None:
    ranks.run(_overwritten, world, 16)


def _read_in_place(group: dist.ProcessGroup, on_all: bool, num_steps: int) -> None:  # case T04
    """Rows in memory that the peers read where it lies, on all ranks or on rank 0 only, overwritten behind the call."""
    with open_buffer(group, "intranode") as buffer:
        base, idx, _ = make(buffer.rank, 5)
        handle = moe_ep.dispatch(buffer, base, idx, num_experts=NUM_EXPERTS, layout="compact").handle
        assert isinstance(handle, moe_ep.DispatchHandle)
        expected_rows = buffer.dispatch(base, handle=handle)[0]
        assert isinstance(expected_rows, Tensor)
        x, made = buffer.empty(base.shape, base.dtype), buffer.empty(expected_rows.shape, base.dtype)
        if buffer.rank and not on_all:
            x, made = torch.empty_like(x), torch.empty_like(made)
        expected = base * copies_of(idx, buffer.group_size)
        for step in range(num_steps):
            if buffer.rank == buffer.group_size - 1 and step % 8 == 0:
                keep_busy(50)
            x.copy_(base)
            rows = buffer.dispatch(x, handle=handle)[0]
            x.fill_(7777)
            assert isinstance(rows, Tensor)
            assert torch.equal(rows, expected_rows), f"rows of step {step}"
            if buffer.rank == buffer.group_size - 1 and step % 8 == 4:
                keep_busy(50)
            made.copy_(rows)
            y = buffer.combine(made, handle)[0]
            made.fill_(7777)
            assert torch.equal(y, expected), f"y of step {step}"


@pytest.mark.parametrize("on_all", [True, False], ids=["on all ranks", "on one rank"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_what_peers_read_in_place_may_be_overwritten_behind_the_call(ranks: Pools, world: int, on_all: bool) -> None:
    ranks.run(_read_in_place, world, on_all, 16)


def _previous_event(group: dist.ProcessGroup) -> None:
    """The call waits for the event that it is given, and the stream that made the input need not be the current one."""
    with open_buffer(group, "intranode") as buffer:
        base, idx, weights = make(buffer.rank, 4)
        expected = base * copies_of(idx, buffer.group_size) + 0.0  # 0, not -0, for no expert
        producer = torch.cuda.Stream()
        for allocate in (False, True):
            x = torch.full_like(base, 7777)
            torch.cuda.synchronize()
            with torch.cuda.stream(producer):
                keep_busy(20)
                x.copy_(base)
                before = buffer.capture()
            streams: dict[str, Any] = {"async_finish": True, "allocate_on_comm_stream": allocate}
            per_rank, _, per_expert, in_rank, event = buffer.get_dispatch_layout(
                idx, NUM_EXPERTS, previous_event=before, **streams
            )
            rows, _, _, _, handle, event = buffer.dispatch(
                x,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=idx,
                topk_weights=weights,
                previous_event=event,
                **streams,
            )
            assert isinstance(rows, Tensor)
            assert handle is not None
            y, _, event = buffer.combine(rows, handle, previous_event=event, **streams)
            event.current_stream_wait()
            assert_same_bits(y, expected, f"y, allocate_on_comm_stream={allocate}")


@pytest.mark.parametrize("world", [1, 2])
def test_a_call_waits_for_its_previous_event(ranks: Pools, world: int) -> None:
    ranks.run(_previous_event, world)


# case T05
@pytest.mark.parametrize("last_first", [False, True], ids=["first backward first", "last backward first"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_that_grows_on_one_rank_while_another_is_pending(ranks: Pools, layout: str, last_first: bool) -> None:
    assert_growth(ranks, Setup("intranode", layout, 2), last_first)


def _with_one_connection(group: dist.ProcessGroup) -> None:
    """Every stream of the process feeds one queue of the GPU, so that kernels run in the order of their launch."""
    for layout, routing in zip(("compact", "expert_major") * 3, ROUTINGS, strict=True):
        check_routing(group, "intranode", layout, torch.bfloat16, routing, "ragged", 4, device="cuda")
    _nan_in_what_is_empty(group, 20)
    _late_ids(group, 10)
    _freed(group, True, 16)
    _overwritten(group, 16)
    _previous_event(group)


def test_one_connection_to_the_gpu_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    pool = Pool(2, on_cuda=True)
    try:
        pool.run(_with_one_connection, 2, (), 110)
    finally:
        pool.close()


def _from_another_device(group: dist.ProcessGroup) -> None:
    with open_buffer(group, "intranode") as buffer:
        x, idx, weights = make(buffer.rank, 0)

        def round_trip() -> Tensor:
            out = moe_ep.dispatch(buffer, x, idx, weights, num_experts=NUM_EXPERTS)
            return moe_ep.combine(buffer, out.x, out.handle, out.topk_weights)

        expected = round_trip()
        with torch.cuda.device((x.device.index + 1) % torch.cuda.device_count()):
            y = round_trip()
        assert_same_bits(y, expected, "while another device is current")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, so that another one can be current")
def test_calls_run_on_the_buffers_device_whichever_is_current(ranks: Pools) -> None:
    ranks.run(_from_another_device, 1)
