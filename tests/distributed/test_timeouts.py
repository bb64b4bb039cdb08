"""Nothing waits for ever: who is missing is said within the limit, and reset() makes the buffer usable again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep
from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import (
    BACKENDS,
    Setup,
    assert_values,
    assert_works,
    caught,
    loss_of,
    make_case,
    mark,
    open_buffer,
    scale_moe,
    share,
)

LIMIT_SECS = 2.0
GRACE_SECS = 10.0  # over the limit, for finding out who is missing and for a loaded machine

A11 = make_case(
    x=[[1, 2], [3]],
    idx=[[[0, 1], [1, -1]], [[0, 1]]],
    weights=[[[0.5, 0.5], [1, 0]], [[0.25, 0.75]]],
    num_experts=2,
    hidden=1,
)


@dataclass(frozen=True)
class Failed:
    """What a call raised, and after how long."""

    kind: type[BaseException] | None
    text: str
    waited_secs: float


def timed(call: Callable[[], object]) -> Failed:
    began = time.monotonic()
    kind, text = caught(call)
    return Failed(kind, text, time.monotonic() - began)


def assert_timed_out(failed: Failed, operation: str, missing: int) -> None:
    assert failed.kind is moe_ep.EPTimeoutError, failed
    assert operation in failed.text
    assert f"rank {missing} did not take part" in failed.text
    assert f"limit {LIMIT_SECS:g} s" in failed.text
    assert failed.waited_secs < LIMIT_SECS + GRACE_SECS


def skip_a_call(group: dist.ProcessGroup, backend: str, operation: str, missing: int) -> dict[str, Any]:
    """All ranks but one do `operation`; then the next call, the caller's own group, reset(), and a good step."""
    with open_buffer(group, backend, timeout_secs=LIMIT_SECS) as buffer:
        setup = Setup(backend, "expert_major", buffer.group_size)
        own, earlier = share(A11, group, setup), share(A11, group, setup)
        pending, _ = scale_moe(buffer, earlier, setup)
        out = moe_ep.dispatch(buffer, own.x, own.idx, own.weights, num_experts=2)
        y = moe_ep.combine(buffer, out.x, out.handle, topk_weights=out.topk_weights)
        operations: dict[str, Callable[[], object]] = {
            "dispatch": lambda: moe_ep.dispatch(buffer, own.x, own.idx, own.weights, num_experts=2),
            "combine": lambda: moe_ep.combine(buffer, out.x, out.handle),
            "combine backward": lambda: y.sum().backward(),
        }
        absent = buffer.rank == missing
        first = None if absent else timed(operations[operation])
        dead = None if absent else timed(operations["dispatch"])
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        buffer.reset()
        assert_works(buffer, group, setup)
        loss_of(pending, earlier.dy).backward()
        return {"first": first, "dead": dead, "total": total.item(), "dx": earlier.x.grad}


def assert_skipped(results: list[dict[str, Any]], operation: str, missing: int) -> None:
    for rank, seen in enumerate(results):
        assert seen["total"] == len(results)  # the caller's group lives
        if rank != missing:
            assert_timed_out(seen["first"], operation, missing)
            assert seen["dead"].kind is moe_ep.EPTimeoutError
            assert "reset()" in seen["dead"].text
            assert seen["dead"].waited_secs < 1.0
    # A backward that was pending when the group died still works after the reset.
    assert_values(torch.cat([seen["dx"] for seen in results]), [1.5, 2, 1.75])


@pytest.mark.parametrize(
    ("operation", "world", "missing"),
    [
        pytest.param("dispatch", 4, 2, marks=mark(4)),
        pytest.param("combine", 2, 0, marks=mark(2)),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_skips_a_call_is_named_and_reset_recovers(
    ranks: Pools, backend: str, operation: str, world: int, missing: int
) -> None:
    assert_skipped(ranks.run(skip_a_call, world, backend, operation, missing), operation, missing)


# case A12 (the form 0 * y.sum() is in tests/autograd/test_cases_grad.py)
@pytest.mark.world_size(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_whose_loss_does_not_depend_on_y_is_named(ranks: Pools, backend: str) -> None:
    # Rank 1's loss is a constant that needs no gradient, so it has no backward to call.
    assert_skipped(ranks.run(skip_a_call, 2, backend, "combine backward", 1), "combine backward", 1)


def reset_without_meeting(group: dist.ProcessGroup, backend: str) -> Failed | None:
    """Rank 1 skips a call and is in reset() at once, long before rank 0 has given up waiting."""
    with open_buffer(group, backend, timeout_secs=LIMIT_SECS) as buffer:
        setup = Setup(backend, "expert_major", 2)
        own = share(A11, group, setup)
        failed = None if buffer.rank == 1 else timed(lambda: scale_moe(buffer, own, setup))
        buffer.reset()
        assert_works(buffer, group, setup)
        return failed


@pytest.mark.world_size(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_skipped_a_call_may_wait_in_reset_for_the_others(ranks: Pools, backend: str) -> None:
    waited, absent = ranks.run(reset_without_meeting, 2, backend)
    assert_timed_out(waited, "dispatch", 1)
    assert absent is None


def come_too_late(group: dist.ProcessGroup, backend: str) -> Failed:
    """Rank 1 starts its dispatch when rank 0 has given up; then both reset, and step."""
    with open_buffer(group, backend, timeout_secs=LIMIT_SECS) as buffer:
        setup = Setup(backend, "expert_major", 2)
        own = share(A11, group, setup)

        def step() -> Tensor:
            return scale_moe(buffer, own, setup)[0]

        failed = timed(step) if buffer.rank == 0 else None
        dist.barrier(group)
        failed = timed(step) if failed is None else failed
        dist.barrier(group)
        buffer.reset()
        assert_works(buffer, group, setup)
        return failed


@pytest.mark.world_size(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_comes_too_late_raises_too(ranks: Pools, backend: str) -> None:
    early, late = ranks.run(come_too_late, 2, backend)
    assert_timed_out(early, "dispatch", 1)
    assert late.kind is moe_ep.EPTimeoutError
    assert "dispatch" in late.text
    assert late.waited_secs < LIMIT_SECS + GRACE_SECS


def reset_alone(group: dist.ProcessGroup, backend: str) -> Failed | None:
    """Rank 0 resets while rank 1 does not; then both do."""
    with open_buffer(group, backend, timeout_secs=LIMIT_SECS) as buffer:
        failed = timed(buffer.reset) if buffer.rank == 0 else None
        dist.barrier(group)
        buffer.reset()
        assert_works(buffer, group, Setup(backend, "expert_major", 2))
        return failed


@pytest.mark.world_size(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_reset_that_one_rank_missed_can_be_repeated(ranks: Pools, backend: str) -> None:
    alone, _ = ranks.run(reset_alone, 2, backend)
    assert alone.kind is moe_ep.EPTimeoutError
    assert "[0, 1]" in alone.text
    assert "reset()" in alone.text
    assert alone.waited_secs < 2 * LIMIT_SECS + GRACE_SECS


def construct_alone(group: dist.ProcessGroup, backend: str) -> Failed | None:
    """Of the ranks 1 and 2 only the first constructs its buffer; then both do."""
    pair = dist.new_group([1, 2])
    try:
        rank = dist.get_rank(group)
        failed = timed(lambda: open_buffer(pair, backend, timeout_secs=LIMIT_SECS)) if rank == 1 else None
        dist.barrier(group)
        if rank in (1, 2):
            with open_buffer(pair, backend, timeout_secs=LIMIT_SECS) as buffer:
                assert_works(buffer, pair, Setup(backend, "expert_major", 2))
        return failed
    finally:
        dist.barrier(group)
        if dist.get_rank(group) in (1, 2):
            dist.destroy_process_group(pair)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_buffer_that_one_rank_did_not_construct_can_be_constructed_again(ranks: Pools, backend: str) -> None:
    alone = ranks.run(construct_alone, 4, backend)[1]
    assert alone.kind is moe_ep.EPTimeoutError
    assert "[1, 2]" in alone.text
    assert f"{LIMIT_SECS:g} s" in alone.text
    assert alone.waited_secs < LIMIT_SECS + GRACE_SECS
