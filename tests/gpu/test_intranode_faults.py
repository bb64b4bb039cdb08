"""Ranks that stay away or come late: who is missing is said within the limit, and reset() makes the buffer usable."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep
from tests.distributed.test_timeouts import Failed, timed
from tests.helpers.compare import assert_same_bits
from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import Setup, assert_works, caught, open_buffer

pytestmark = pytest.mark.gpu
BACKEND = "intranode"
LIMIT_SECS = 3.0
GRACE_SECS = 5.0  # over the limit, for a loaded machine


def good_call() -> dict[str, Any]:
    return {
        "x": torch.ones(3, 8, device="cuda"),
        "topk_idx": torch.tensor([[0, 3], [1, 2], [2, 0]], device="cuda"),
        "num_experts": 4,
    }


def assert_usable(buffer: moe_ep.Buffer, group: dist.ProcessGroup) -> None:
    assert_works(buffer, group, Setup(BACKEND, "expert_major", buffer.group_size))
    torch.cuda.synchronize()
    buffer.check()


def _stay_away(group: dist.ProcessGroup, missing: int) -> list[list[Failed]]:
    """All ranks but one dispatch, twice; the other one waits in reset() meanwhile. Then the same again."""
    rounds = []
    with open_buffer(group, BACKEND, timeout_secs=LIMIT_SECS) as buffer:
        assert_usable(buffer, group)
        for _ in range(2):
            failed = []
            if buffer.rank != missing:
                failed = [timed(lambda: moe_ep.dispatch(buffer, **good_call())) for _ in range(2)]
            buffer.reset()
            assert_usable(buffer, group)
            rounds.append(failed)
    return rounds


@pytest.mark.parametrize(("world", "missing"), [(2, 0), (2, 1), (4, 2)])
def test_a_rank_that_stays_away_is_named_and_reset_makes_the_buffer_usable_twice_in_a_row(
    ranks: Pools, world: int, missing: int
) -> None:
    for rank, rounds in enumerate(ranks.run(_stay_away, world, missing)):
        for failed in rounds:
            if rank == missing:
                assert failed == []
                continue
            first, dead = failed
            assert first.kind is moe_ep.EPTimeoutError, first
            assert f"dispatch on rank {rank} of the EP group of ranks {list(range(world))}" in first.text
            assert f"limit of {LIMIT_SECS:g} s: rank {missing} did not come to the call" in first.text
            assert LIMIT_SECS - 0.5 < first.waited_secs < LIMIT_SECS + GRACE_SECS
            assert dead.kind is moe_ep.EPTimeoutError
            assert "reset()" in dead.text
            assert dead.waited_secs < 1.0


def _late_calls(group: dist.ProcessGroup, names: list[str]) -> dict[str, list[Failed]]:
    """Rank 1 skips calls without a host wait; of each, what the call, check() and the call after it do on rank 0."""
    results = {}
    with open_buffer(group, BACKEND, timeout_secs=2.0) as buffer:
        for name in names:
            weights = torch.ones(3, 2, device="cuda")
            out = moe_ep.dispatch(buffer, **good_call(), topk_weights=weights, layout="compact")
            leaf = out.x.clone().requires_grad_()
            y = moe_ep.combine(buffer, leaf, out.handle)
            calls: dict[str, Callable[[], Tensor]] = {
                "combine": lambda out=out: moe_ep.combine(buffer, out.x, out.handle),
                "combine backward": lambda y=y, leaf=leaf: torch.autograd.grad(y.sum(), leaf)[0],
                "cached dispatch": lambda out=out: buffer.dispatch(good_call()["x"], handle=out.handle)[0],
                "dispatch": lambda: moe_ep.dispatch(buffer, **good_call(), max_rows=9).x,
                "all_reduce": lambda: buffer.all_reduce(torch.ones(5, device="cuda")),
            }
            if buffer.rank == 0:
                given: list[Tensor] = []
                call = timed(lambda name=name, calls=calls, given=given: given.append(calls[name]()))
                torch.cuda.synchronize()
                assert bool(given[0].isnan().all()), f"{name}: {given[0]}"
                results[name] = [call, timed(buffer.check), timed(calls["combine"])]
            buffer.reset()
            assert_usable(buffer, group)
    return results


def test_a_call_without_a_host_wait_gives_nan_and_the_next_one_raises(ranks: Pools) -> None:
    names = ["combine", "combine backward", "cached dispatch", "dispatch", "all_reduce"]
    seen = ranks.run(_late_calls, 2, names, timeout_secs=90)[0]
    for name, (call, check, after) in seen.items():
        assert call.kind is None, call
        assert call.waited_secs < 1.5, name  # the host did not wait for the device
        assert check.kind is moe_ep.EPTimeoutError
        assert f"{name} on rank 0 of the EP group of ranks [0, 1]" in check.text
        assert "limit of 2 s: rank 1 did not come to the call" in check.text
        assert after.kind is moe_ep.EPTimeoutError
        assert after.waited_secs < 1.0
    assert list(seen) == names


def _come_too_late(group: dist.ProcessGroup) -> Failed:
    """Rank 1 starts its dispatch when rank 0 has given up. It hears so at once or, since it waits no more, by check."""
    with open_buffer(group, BACKEND, timeout_secs=2.0) as buffer:

        def call() -> None:
            out = moe_ep.dispatch(buffer, **good_call())
            torch.cuda.synchronize()
            assert bool(out.x.isnan().all())
            buffer.check()

        failed = timed(call) if buffer.rank == 0 else None
        dist.barrier(group)
        failed = timed(call) if failed is None else failed
        dist.barrier(group)
        buffer.reset()
        assert_usable(buffer, group)
        return failed


def test_a_rank_that_comes_too_late_hears_that_the_others_gave_up(ranks: Pools) -> None:
    early, late = ranks.run(_come_too_late, 2)
    assert early.kind is late.kind is moe_ep.EPTimeoutError
    assert "rank 1 did not come to the call" in early.text
    assert "rank 0 did not go on: it gave the call up" in late.text
    assert late.waited_secs < 1.5


def _reset_alone(group: dist.ProcessGroup) -> Failed | None:
    with open_buffer(group, BACKEND, timeout_secs=1.0) as buffer:
        failed = timed(buffer.reset) if buffer.rank == 0 else None
        dist.barrier(group)
        buffer.reset()
        assert_usable(buffer, group)
        return failed


def test_a_reset_that_one_rank_missed_can_be_repeated(ranks: Pools) -> None:
    alone = ranks.run(_reset_alone, 2)[0]
    assert alone.kind is moe_ep.EPTimeoutError
    assert "rank 1 did not take part" in alone.text


def _opposite_order(group: dist.ProcessGroup) -> Failed:
    """Two buffers on two streams; rank 0 begins with the first, rank 1 with the second."""
    with open_buffer(group, BACKEND, timeout_secs=2.0) as a, open_buffer(group, BACKEND, timeout_secs=2.0) as b:
        with torch.cuda.stream(torch.cuda.Stream()):
            failed = timed(lambda: moe_ep.dispatch(a if a.rank == 0 else b, **good_call()))
        dist.barrier(group)
        for buffer in (a, b):
            buffer.reset()
            assert_usable(buffer, group)
        return failed


def test_two_buffers_in_opposite_order_end_in_a_timeout(ranks: Pools) -> None:
    for rank, failed in enumerate(ranks.run(_opposite_order, 2)):
        assert failed.kind is moe_ep.EPTimeoutError
        assert f"rank {1 - rank} did not come to the call" in failed.text
        assert failed.waited_secs < 2 + GRACE_SECS


def _opposite_order_on_the_device(group: dist.ProcessGroup) -> list[tuple[type[BaseException] | None, bool, bool]]:
    """The same without a host wait, on one stream. Of each buffer: what check() says, and if y is NaN or right."""
    with open_buffer(group, BACKEND, timeout_secs=2.0) as a, open_buffer(group, BACKEND, timeout_secs=2.0) as b:
        outs = [moe_ep.dispatch(buffer, **good_call()) for buffer in (a, b)]
        dist.barrier(group)
        ys: dict[int, Tensor] = {}
        for i in (0, 1) if a.rank == 0 else (1, 0):
            ys[i] = moe_ep.combine((a, b)[i], outs[i].x, outs[i].handle)
        torch.cuda.synchronize()
        seen = []
        for i, buffer in enumerate((a, b)):
            right = torch.equal(ys[i], torch.full_like(ys[i], 2.0))
            seen.append((caught(buffer.check)[0], bool(ys[i].isnan().all()), right))
        dist.barrier(group)
        for buffer in (a, b):
            buffer.reset()
            assert_usable(buffer, group)
        return seen


def test_calls_without_a_host_wait_in_opposite_order_end_in_a_timeout(ranks: Pools) -> None:
    for seen in ranks.run(_opposite_order_on_the_device, 2):
        assert any(kind is moe_ep.EPTimeoutError for kind, _, _ in seen)
        for kind, is_nan, is_right in seen:
            assert (is_nan, is_right) == (kind is not None, kind is None)


def _close_early(group: dist.ProcessGroup, peer_comes: bool) -> tuple[float, Tensor]:
    """Rank 0 closes its buffer right behind a combine for which rank 1 comes a second later, or never."""
    buffer = open_buffer(group, BACKEND, timeout_secs=LIMIT_SECS)
    x = torch.arange(1.0, 4.0, device="cuda").unsqueeze(1).expand(3, 512).contiguous()
    out = moe_ep.dispatch(buffer, **{**good_call(), "x": x})
    torch.cuda.synchronize()
    dist.barrier(group)
    if buffer.rank == 1:
        time.sleep(1.0)
    began = time.monotonic()
    y = x
    if buffer.rank == 0 or peer_comes:
        y = moe_ep.combine(buffer, out.x, out.handle)
    buffer.close()
    secs = time.monotonic() - began
    if peer_comes:
        assert_same_bits(y, 2 * x, "y")
    dist.barrier(group)
    return secs, y


def test_close_waits_for_a_peer_that_is_late(ranks: Pools) -> None:
    early, _ = ranks.run(_close_early, 2, True)
    assert early[0] > 0.7


def test_close_gives_up_a_peer_that_never_comes(ranks: Pools) -> None:
    (secs, y), _ = ranks.run(_close_early, 2, False)
    assert secs < LIMIT_SECS + GRACE_SECS
    assert bool(y.isnan().all())
