"""Low-latency calls that do not go as they should: ranks masked, late, dead, at odds; ids that fit nowhere."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep
from moe_ep.reference import combine_loop
from tests.distributed.test_low_latency import Options
from tests.distributed.test_low_latency_calls import without
from tests.gpu.low_latency_scene import Scene, open_buffer, scene_of
from tests.helpers.compare import assert_same_bits
from tests.helpers.ranks import Pool, Pools, RankFailure
from tests.helpers.scale_experts import caught

pytestmark = pytest.mark.gpu
PLAIN, HOOK = Options(), Options(hook=True)
SHORT_SECS = 2.0


def leave_out(scene: Scene, gone: list[int]) -> None:
    scene.kept = without(scene.inputs, scene.owner, scene.rank, gone)


def status_of(buffer: moe_ep.Buffer) -> list[int]:
    status = torch.full((buffer.group_size,), 7, dtype=torch.int32, device="cuda")
    buffer.low_latency_query_mask_buffer(status)
    return status.tolist()


def _masked(group: dist.ProcessGroup, masked: list[int], by: list[int]) -> None:
    """The ranks of `by` mask those of `masked`; rows travel between no two ranks of which one masks the other."""
    scene = scene_of(group)
    with open_buffer(group, enable_shrink=True) as buffer:
        scene.round_trip(buffer)
        for option in (PLAIN, HOOK):
            for other in masked:
                if buffer.rank in by and other != buffer.rank:
                    buffer.low_latency_update_mask_buffer(other, True)
            has_masked = [
                int(buffer.rank in by and other in masked and other != buffer.rank) for other in range(scene.world)
            ]
            assert status_of(buffer) == has_masked
            scene.kept = _kept(scene, masked, by)
            for _ in range(3):
                scene.round_trip(buffer, option)
            buffer.low_latency_clean_mask_buffer()
            assert status_of(buffer) == [0] * scene.world
            scene.kept = []
            scene.round_trip(buffer, option)
        buffer.check()


def _kept(scene: Scene, masked: list[int], by: list[int]) -> list[Tensor]:
    """The ids of all ranks, unused where the expert lies behind a mask."""
    kept = []
    for source, (_, idx, _) in enumerate(scene.inputs):
        closed = [e for e, owns in enumerate(scene.owner) if _is_closed(source, owns, masked, by)]
        kept.append(idx.masked_fill(torch.isin(idx, torch.tensor(closed, dtype=torch.int64)), -1))
    return kept


def _is_closed(a: int, b: int, masked: list[int], by: list[int]) -> bool:
    return a != b and ((a in by and b in masked) or (b in by and a in masked))


@pytest.mark.parametrize(
    ("world", "masked", "by"), [(2, [1], [0, 1]), (4, [1, 3], [0, 1, 2, 3]), (4, [1], [0]), (8, [1, 3, 5], [*range(8)])]
)
def test_masked_ranks_are_left_out_exactly_and_come_back(
    ranks: Pools, world: int, masked: list[int], by: list[int]
) -> None:
    ranks.run(_masked, world, masked, by)


def _masked_behind_a_call(group: dist.ProcessGroup) -> None:
    """Rank 0 masks rank 1 while an asynchronous call has not begun, and while a hook runs on another stream."""
    scene, side = scene_of(group), torch.cuda.Stream()
    with open_buffer(group, enable_shrink=True) as buffer:
        for hook in (False, True):
            scene.kept = []
            scene.round_trip(buffer)
            torch.cuda._sleep(200_000_000)
            result = scene.dispatch(buffer, Options(hook=hook), async_finish=not hook)
            if hook:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    result[-1]()
            if buffer.rank == 0:
                buffer.low_latency_update_mask_buffer(1, True)
            torch.cuda.synchronize()
            scene.check_dispatch(result, PLAIN)
            scene.kept = _kept(scene, [1], [0])
            scene.round_trip(buffer)
            buffer.low_latency_clean_mask_buffer()
        buffer.check()


@pytest.mark.parametrize("world", [2, 4])
def test_a_mask_does_not_change_in_a_call_that_has_been_made(ranks: Pools, world: int) -> None:
    ranks.run(_masked_behind_a_call, world)


def _masked_by_itself(group: dist.ProcessGroup) -> None:
    """The next call in a place waits until the hook of the last one there has run, on whatever stream."""
    scene, side = scene_of(group), torch.cuda.Stream()
    with open_buffer(group, enable_shrink=True) as buffer:
        scene.round_trip(buffer)
        buffer.low_latency_update_mask_buffer(buffer.rank, True)
        torch.cuda.synchronize()
        first = scene.dispatch(buffer, HOOK)
        with torch.cuda.stream(side):
            scene.dispatch(buffer, PLAIN)
        torch.cuda._sleep(200_000_000)
        first[-1]()
        hook_is_over = torch.cuda.Event()
        hook_is_over.record()
        with torch.cuda.stream(side):
            scene.dispatch(buffer, PLAIN)
        side.synchronize()
        assert hook_is_over.query()
        buffer.low_latency_clean_mask_buffer()
        scene.round_trip(buffer)
        buffer.check()


@pytest.mark.parametrize("world", [1, 2])
def test_a_rank_that_masks_itself_still_takes_turns(ranks: Pools, world: int) -> None:
    ranks.run(_masked_by_itself, world)


def _taken_in_again(group: dist.ProcessGroup) -> None:
    """Rank 0 masks rank 1 in a dispatch and no longer in its combine: rows that were not taken are not waited for."""
    scene = scene_of(group)
    with open_buffer(group, enable_shrink=True) as buffer:
        scene.kept = _kept(scene, [1], [0])
        for option in (PLAIN, HOOK, PLAIN):
            if buffer.rank == 0:
                buffer.low_latency_update_mask_buffer(1, True)
            result = scene.dispatch(buffer, option)
            if option.hook:
                result[-1]()
            scene.check_dispatch(result, option)
            buffer.low_latency_clean_mask_buffer()
            made = scene.made(4)
            scene.check_combine(scene.combine(buffer, result[2], made)[0], made)
        assert status_of(buffer) == [0] * scene.world
        buffer.check()


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_that_is_taken_in_again_before_the_combine_owes_nothing(ranks: Pools, world: int) -> None:
    ranks.run(_taken_in_again, world)


def _too_many(group: dist.ProcessGroup) -> tuple[str, str]:
    """Rank 0 names expert 0 more often than M allows, and an id that is none."""
    scene = scene_of(group, "random", "equal", num_topk=3)
    with open_buffer(group) as buffer:
        x, idx, weights = scene.own
        num_max = len(x)
        if buffer.rank == 0:
            idx[:] = 0
        recv, count, handle, _, _ = buffer.low_latency_dispatch(x, idx, num_max, scene.num_experts, use_fp8=False)
        assert isinstance(recv, Tensor)
        assert int(count.max()) <= scene.world * num_max
        many = caught(buffer.check)[1]  # the device has said so by now, and combine would raise it
        y, _, _ = buffer.low_latency_combine(recv, idx, weights, handle)
        torch.cuda.synchronize()
        if buffer.rank == 0:  # the first M slots went, the others are NaN
            fits = torch.arange(len(x) * 3).view(-1, 3) < num_max
            assert torch.equal(y.isnan().any(1).cpu(), ~fits.all(1))
        else:
            assert bool(y.isfinite().all())
        if buffer.rank == 0:
            idx[:] = -1
            idx[1, 2] = scene.num_experts
        buffer.low_latency_dispatch(x, idx, num_max, scene.num_experts, use_fp8=False)
        torch.cuda.synchronize()
        bad = caught(buffer.check)[1]
        scene.round_trip(buffer)
        return many, bad


@pytest.mark.parametrize("world", [1, 2])
def test_more_rows_than_m_and_bad_ids_are_told_at_the_next_look(ranks: Pools, world: int) -> None:
    (many, bad), *others = ranks.run(_too_many, world)
    assert "names an expert" in many
    assert "num_max_dispatch_tokens_per_rank is" in many
    assert "topk_idx[1, 2] is" in bad
    assert others == [("", "")] * (world - 1)


def _with_value(idx: Tensor, place: Any, value: int) -> Tensor:
    """[T, K] of no experts but `value` at `place`, where that is one; everywhere, where it is `...`."""
    ids = torch.full_like(idx, -1)
    ids[place] = value
    return ids


def _faults_in_a_row(group: dist.ProcessGroup) -> tuple[str, str]:
    """Rank 0 names expert 0, then expert 1, too often, then two ids that are none, before the host looks."""
    scene = scene_of(group, "random", "equal", num_topk=3)
    with open_buffer(group) as buffer:
        scene.round_trip(buffer)
        x, idx, _ = scene.own
        said = []
        for wrong in (((..., 0), (..., 1)), (((1, 2), scene.num_experts), ((0, 1), scene.num_experts + 1))):
            given = [_with_value(idx, *what) if buffer.rank == 0 else idx for what in wrong]
            torch.cuda._sleep(500_000_000)  # the calls are made before the first of them begins
            for ids in given:
                buffer.low_latency_dispatch(x, ids, len(x), scene.num_experts, use_fp8=False)
            torch.cuda.synchronize()
            said.append(caught(buffer.check)[1])
        scene.round_trip(buffer)
        return said[0], said[1]


@pytest.mark.parametrize("world", [1, 2])
def test_of_two_faults_before_a_look_the_first_is_told(ranks: Pools, world: int) -> None:
    (many, bad), *others = ranks.run(_faults_in_a_row, world)
    assert "names an expert (number 0 in the order of ranks)" in many
    assert "topk_idx[1, 2] is" in bad
    assert others == [("", "")] * (world - 1)


def _at_odds(group: dist.ProcessGroup) -> list[str]:
    """A rank with another dtype; one that refuses its arguments. Neither hangs the others."""
    scene = scene_of(group, tokens="equal")
    with open_buffer(group, timeout_secs=10) as buffer:
        scene.round_trip(buffer)
        x, idx, _ = scene.own
        seen = []
        given = x.half() if buffer.rank == 1 else x
        _, count, handle, _, _ = buffer.low_latency_dispatch(
            given, idx, scene.num_max, scene.num_experts, use_fp8=False
        )
        torch.cuda.synchronize()
        assert int(count.sum()) == 0
        assert bool((handle.src_info == -1).all())
        seen.append(caught(buffer.check)[1])
        too_many = 1 if buffer.rank == 1 else scene.num_max
        seen.append(caught(lambda: buffer.low_latency_dispatch(x, idx, too_many, scene.num_experts, use_fp8=False))[1])
        torch.cuda.synchronize()
        seen.append(caught(buffer.check)[1])
        scene.round_trip(buffer)
        return seen


def test_ranks_that_disagree_or_refuse_tell_the_others(ranks: Pools) -> None:
    of_0, of_1 = ranks.run(_at_odds, 2)
    assert "disagrees on M, H, K, E" in of_0[0]
    assert "disagrees on M, H, K, E" in of_1[0]
    assert "but num_max_dispatch_tokens_per_rank is 1" in of_1[1]
    assert "EP rank 1 refused the call" in of_0[2]


def _late(group: dist.ProcessGroup) -> str:
    """Rank 1 does not come: rank 0 gets a sentence and NaN; both go on after reset."""
    scene = scene_of(group, tokens="equal")
    with open_buffer(group, timeout_secs=SHORT_SECS) as buffer:
        scene.round_trip(buffer)
        text = ""
        result = scene.dispatch(buffer, PLAIN)
        torch.cuda.synchronize()
        dist.barrier(group)
        if buffer.rank == 0:
            y, _, _ = scene.combine(buffer, result[2], scene.made(1))
            torch.cuda.synchronize()
            assert bool(y.isnan().all())
            kind, text = caught(buffer.check)
            assert kind is moe_ep.EPTimeoutError
            assert caught(lambda: scene.dispatch(buffer, PLAIN))[0] is moe_ep.EPTimeoutError
        dist.barrier(group)
        buffer.reset()
        scene.round_trip(buffer)
        scene.round_trip(buffer, HOOK)
        return text


def test_a_rank_that_does_not_come_is_named_and_reset_makes_the_buffer_usable(ranks: Pools) -> None:
    text = ranks.run(_late, 2)[0]
    assert "low_latency_combine on rank 0" in text
    assert "rank 1 did not come to the call" in text


@pytest.fixture
def four() -> Iterator[Pool]:
    pool = Pool(4, on_cuda=True)
    yield pool
    pool.close()


def _lose(group: dist.ProcessGroup, lost: int, phase: str) -> None:
    """One rank is killed before a dispatch or a combine; the others mask it after the limit and go on, exactly."""
    buffer = open_buffer(group, timeout_secs=SHORT_SECS, enable_shrink=True)
    scene = scene_of(group)
    scene.round_trip(buffer)
    result = scene.dispatch(buffer, PLAIN)
    scene.check_dispatch(result, PLAIN)
    torch.cuda.synchronize()
    dist.barrier(group)
    if buffer.rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    if phase == "combine":
        made, rows = scene.made(3), scene.rows
        y, _, _ = scene.combine(buffer, result[2], made)
        made[lost], rows[lost] = made[lost][:0], []
        home = combine_loop(made, rows, [len(idx) for _, idx, _ in scene.inputs], weighted=True, exact=True)
        assert_same_bits(y, home[scene.rank], "combined without the rank that is gone")
    leave_out(scene, [lost])
    for option in (PLAIN, HOOK, Options(use_fp8=False)):
        scene.round_trip(buffer, option)
    assert time.monotonic() - began < 3 * SHORT_SECS + 10
    assert status_of(buffer) == [int(rank == lost) for rank in range(scene.world)]
    buffer.low_latency_clean_mask_buffer()
    assert status_of(buffer)[lost] == 1
    buffer.check()
    buffer.close()


@pytest.mark.no_mps
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_the_others_go_on_without_a_rank_that_is_killed(four: Pool, phase: str) -> None:
    with pytest.raises(RankFailure) as failure:
        four.run(_lose, 4, (2, phase), 100)
    text = str(failure.value)
    assert "rank 2:\nthe process died" in text, text
    assert not any(f"rank {rank}:\n" in text or f"rank {rank} did not" in text for rank in (0, 1, 3)), text
