"""Ranks that are lost in low-latency calls: the others go on without them. The dead ranks of DeepEP's check A14."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_ep
from moe_ep.reference import combine_loop, dispatch_loop
from tests.distributed.conformance import owner_table
from tests.distributed.test_low_latency import expected_places, expert_results, in_places, least_max_tokens, spread
from tests.distributed.test_low_latency_calls import HIDDEN, inputs_of, is_open, without
from tests.helpers.compare import assert_same_bits
from tests.helpers.ranks import Pools, RankFailure

LIMIT_SECS = 2.0  # opening a group takes a loaded machine more than one
GRACE_SECS = 20.0  # to find out who is missing, to wait for whoever is late, and for a loaded machine


def open_buffer(group: dist.ProcessGroup) -> moe_ep.Buffer:
    dist.barrier(group)  # processes that are just starting would miss the short limit
    return moe_ep.Buffer(group, timeout_secs=LIMIT_SECS, enable_shrink=True)


class Scene:
    """A group of which some ranks are lost, with what the others must get from then on."""

    def __init__(self, buffer: moe_ep.Buffer, lost: list[int]) -> None:
        self.buffer, self.lost, self.world, self.rank = buffer, lost, buffer.group_size, buffer.rank
        self.owner, self.inputs = owner_table(2 * self.world + 1, self.world), inputs_of(self.world)
        self.num_max = least_max_tokens(self.inputs)
        self.lengths = [len(idx) for _, idx, _ in self.inputs]

    def dispatch(self) -> Any:
        x, idx, _ = self.inputs[self.rank]
        return self.buffer.low_latency_dispatch(x, idx, self.num_max, len(self.owner), use_fp8=False)

    def check_dispatch(self, result: Any, lost: list[int]) -> None:
        """The places and counts without the rows of `lost`."""
        kept = without(self.inputs, self.owner, self.rank, lost)
        rows = dispatch_loop(kept, [w for _, _, w in self.inputs], self.owner)[self.rank]
        expected = expected_places(rows, self.owner.count(self.rank), self.world, self.num_max)
        recv, count, handle, _, _ = result
        shape = (self.owner.count(self.rank), self.world * self.num_max)
        assert_same_bits(recv, spread(expected.sources, [x for x, _, _ in self.inputs], shape), "recv")
        assert_same_bits(count, expected.recv_count, "recv_count")
        assert_same_bits(handle.src_info, expected.src_info, "src_info")

    def combine(self, handle: Any, lost_in_dispatch: list[int]) -> Tensor:
        """Combines made-up results and checks the sums without what `lost` would have added."""
        kept = without(self.inputs, self.owner, self.rank, lost_in_dispatch)
        rows = dispatch_loop(kept, [w for _, _, w in self.inputs], self.owner)
        made = expert_results(rows, HIDDEN, torch.bfloat16, seed=1)
        expected = expected_places(rows[self.rank], self.owner.count(self.rank), self.world, self.num_max)
        filled = in_places(made[self.rank], expected, float("nan"))
        _, idx, weights = self.inputs[self.rank]
        y, _, _ = self.buffer.low_latency_combine(filled, idx, weights, handle)
        is_kept = [torch.tensor([is_open(row, here, self.lost) for row in of]).bool() for here, of in enumerate(rows)]
        open_rows = [[row for row in of if is_open(row, here, self.lost)] for here, of in enumerate(rows)]
        open_made = [values[kept] for values, kept in zip(made, is_kept, strict=True)]
        home = combine_loop(open_made, open_rows, self.lengths, weighted=True, exact=True)
        assert_same_bits(y, home[self.rank], "combined")
        return y

    def check_mask(self) -> None:
        status = torch.empty(self.world, dtype=torch.int32)
        self.buffer.low_latency_clean_mask_buffer()  # does not bring back who is lost
        self.buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [int(rank in self.lost) for rank in range(self.world)]


def lose_ranks(group: dist.ProcessGroup, lost: list[int], phase: str, how: str) -> float:
    """The ranks of `lost` stop before `phase`; returns how long the call that meets it took on the others."""
    with open_buffer(group) as buffer:
        scene = Scene(buffer, lost)
        first = scene.dispatch()
        scene.check_dispatch(first, [])
        if buffer.rank in lost and phase == "rows":
            buffer.backend.dispatch = lambda *_: os._exit(1)  # type: ignore[method-assign, assignment]
            scene.dispatch()
        if buffer.rank in lost:
            time.sleep(4 * LIMIT_SECS + 4 if how == "stays silent" else 0)
            return 0.0
        began = time.monotonic()
        if phase == "combine":
            scene.combine(first[2], [])
        again = scene.dispatch()
        waited_secs = time.monotonic() - began
        scene.check_dispatch(again, lost)
        scene.combine(again[2], lost)
        scene.check_mask()
        assert_normal_calls_are_refused(scene)
        return waited_secs


def assert_normal_calls_are_refused(scene: Scene) -> None:
    """Every rank that is left gets a sentence, and the low-latency calls go on after it."""
    x, idx, _ = scene.inputs[scene.rank]
    idx = torch.full_like(idx, scene.owner.index(scene.lost[0]))
    if sum(n for rank, n in enumerate(scene.lengths) if rank not in scene.lost):
        with pytest.raises(RuntimeError, match="which the low-latency calls left out"):
            moe_ep.dispatch(scene.buffer, x, idx, num_experts=len(scene.owner))
    scene.check_dispatch(scene.dispatch(), scene.lost)


@pytest.mark.parametrize(
    ("world", "lost", "phase", "how"),
    [
        (4, [1, 3], "dispatch", "stays silent"),
        (2, [1], "combine", "closes"),
    ],
)
def test_the_others_go_on_without_ranks_that_are_lost(
    ranks: Pools, world: int, lost: list[int], phase: str, how: str
) -> None:
    for rank, waited_secs in enumerate(ranks.run(lose_ranks, world, lost, phase, how)):
        assert rank in lost or LIMIT_SECS <= waited_secs < LIMIT_SECS + GRACE_SECS


def test_the_others_go_on_without_a_process_that_dies_between_counts_and_rows(ranks: Pools) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks.run(lose_ranks, 4, [2], "rows", "dies")
    text = str(failure.value)
    assert "rank 2:\nthe process died" in text, text
    assert not any(f"rank {rank}:\n" in text or f"rank {rank} did not" in text for rank in (0, 1, 3)), text


def fail_after_the_rows(group: dist.ProcessGroup, failing: int, lost: bool) -> None:
    """One rank fails in the exchange that ends a dispatch: before it (and is lost), or after it (and is not)."""
    with open_buffer(group) as buffer:
        scene = Scene(buffer, [failing] if lost else [])
        real, num_calls = buffer.backend.all_reduce, 0

        def all_reduce(tensor: Tensor) -> Tensor:
            nonlocal num_calls
            num_calls += 1
            if num_calls != 2:
                return real(tensor)
            if lost:
                raise InterruptedError
            real(tensor)
            buffer.backend._group.break_off("a connection broke")  # type: ignore[attr-defined]
            raise moe_ep.EPTimeoutError("a connection broke")

        if buffer.rank == failing:
            buffer.backend.all_reduce = all_reduce  # type: ignore[method-assign]
        try:
            first = scene.dispatch()
        except InterruptedError:
            return
        scene.check_dispatch(first, [])  # all had all rows, those of the lost rank too
        scene.combine(first[2], [])
        scene.check_dispatch(scene.dispatch(), scene.lost)


@pytest.mark.parametrize("lost", [False, True])
def test_a_call_whose_rows_all_came_stands_even_if_its_end_fails(ranks: Pools, lost: bool) -> None:
    ranks.run(fail_after_the_rows, 4, 1, lost)


def come_back(group: dist.ProcessGroup) -> None:
    store, went_on = dist.distributed_c10d._get_default_store(), "the others went on"
    with open_buffer(group) as buffer:
        scene = Scene(buffer, [1])
        if buffer.rank == 1:
            store.wait([went_on], timedelta(seconds=4 * GRACE_SECS))
            for _ in range(2):  # trying again does not make a group of its own
                with pytest.raises(moe_ep.EPTimeoutError, match="ranks 0, 2 .* went on without rank 1, which came too"):
                    scene.dispatch()
        else:
            result = scene.dispatch()
            scene.check_dispatch(result, scene.lost)
            scene.combine(result[2], scene.lost)
            scene.check_dispatch(scene.dispatch(), scene.lost)
            store.set(went_on, "1")
        buffer.reset()
        scene.lost = []
        result = scene.dispatch()
        scene.check_dispatch(result, [])
        scene.combine(result[2], [])
        scene.check_mask()
        scene.lost = [2]
        if buffer.rank not in scene.lost:
            scene.check_dispatch(scene.dispatch(), scene.lost)


def test_a_rank_that_comes_too_late_is_told_so_and_reset_takes_it_in_again(ranks: Pools) -> None:
    ranks.run(come_back, 3)
