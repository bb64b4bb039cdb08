"""Low-latency calls whose two halves lie apart: hooks in any order, the limit of two, graphs among eager calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.test_low_latency import Options
from tests.gpu.low_latency_scene import Scene, open_buffer, scene_of
from tests.gpu.test_intranode_graphs import captured
from tests.helpers.compare import assert_same_bits
from tests.helpers.ranks import Pools
from tests.helpers.scale_experts import caught

pytestmark = pytest.mark.gpu
NUM_REPLAYS = 1000
HOOK = Options(hook=True)


def _two_batches(group: dist.ProcessGroup, in_order: bool) -> None:
    """Two micro-batches whose dispatches, then whose combines, are in flight together."""
    scenes = [scene_of(group, seed=seed) for seed in range(2)]
    for scene in scenes:
        scene.num_max = 32
    order = (0, 1) if in_order else (1, 0)
    with open_buffer(group) as buffer:
        for _ in range(3):
            sent = [scene.dispatch(buffer, HOOK) for scene in scenes]
            for i in order:
                sent[i][-1]()
                scenes[i].check_dispatch(sent[i], HOOK)
                assert "already run" in caught(sent[i][-1])[1]
            made = [scene.made(seed=9) for scene in scenes]
            homes = [
                scene.combine(buffer, sent[i][2], made[i], return_recv_hook=True) for i, scene in enumerate(scenes)
            ]
            for i in order:
                homes[i][-1]()
                scenes[i].check_combine(homes[i][0], made[i])
        buffer.check()


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_hooks_run_in_any_order(ranks: Pools, world: int, in_order: bool) -> None:  # case T04
    ranks.run(_two_batches, world, in_order)


def _third(group: dist.ProcessGroup) -> list[str]:
    scene = scene_of(group)
    with open_buffer(group) as buffer:
        scene.round_trip(buffer)
        first = scene.dispatch(buffer, HOOK)
        second = scene.dispatch(buffer, HOOK)
        seen = [caught(lambda: scene.dispatch(buffer, HOOK))[1]]
        second[-1]()
        # One is in flight, but its place is the one that the next call needs.
        seen.append(caught(lambda: scene.dispatch(buffer, Options()))[1])
        first[-1]()
        for result in (first, second):
            scene.check_dispatch(result, HOOK)
        scene.round_trip(buffer)
        return seen


@pytest.mark.parametrize("world", [1, 2])
def test_a_call_that_would_wait_for_a_hook_is_refused(ranks: Pools, world: int) -> None:  # case T08
    for third, early in ranks.run(_third, world):
        assert "2 results are in flight" in third
        assert "two calls before it is in flight" in early


def _reset_between(group: dist.ProcessGroup) -> None:
    """Resets between the halves of calls; every generation begins with the same numbers of calls."""
    scene = scene_of(group)
    with open_buffer(group) as buffer:
        for _ in range(4):
            scene.round_trip(buffer, HOOK)
            taken, lost = (scene.dispatch(buffer, HOOK) for _ in range(2))
            taken[-1]()
            torch.cuda.synchronize()
            buffer.reset()
            assert "and are lost" in caught(lost[-1])[1]
            assert "and are lost" in caught(lambda lost=lost: scene.combine(buffer, lost[2], scene.made(1)))[1]
            buffer.check()
        scene.round_trip(buffer)


@pytest.mark.parametrize("world", [1, 2])
def test_a_reset_between_the_halves_of_a_call_loses_it_and_nothing_else(ranks: Pools, world: int) -> None:
    ranks.run(_reset_between, world)


def _fill(scene: Scene, static: tuple[Tensor, ...], seed: int, group: dist.ProcessGroup) -> Scene:
    """Other values and ids of the same shapes, now in the static tensors too."""
    fresh = scene_of(group, "holes", "equal", hidden=512, num_topk=4, seed=seed)
    fresh.num_max = scene.num_max
    for tensor, value in zip(static, fresh.inputs[fresh.rank], strict=True):
        tensor.copy_(value)
    return fresh


def _replays(group: dist.ProcessGroup, num_combines: int, hooks: bool, use_fp8: bool) -> None:
    """A graph with an even or odd number of calls; every tenth replay is compared, between them eager calls."""
    option = Options(use_fp8=use_fp8, hook=hooks)
    scene = scene_of(group, "holes", "equal", hidden=512, num_topk=4)
    scene.num_max = 24
    with open_buffer(group) as buffer:
        x, idx, weights = scene.own
        kept: list[Any] = []

        def work() -> None:
            fp8 = {"use_fp8": use_fp8}
            result = buffer.low_latency_dispatch(
                x, idx, scene.num_max, scene.num_experts, return_recv_hook=hooks, **fp8
            )
            if hooks:
                assert result[-1] is not None
                result[-1]()
            rows = result[0] if isinstance(result[0], Tensor) else result[0][0].bfloat16()
            kept[:] = [result]
            for _ in range(num_combines):
                y, _, hook = buffer.low_latency_combine(rows, idx, weights, result[2], return_recv_hook=hooks)
                if hook is not None:
                    hook()
                kept.append(y)

        graph = captured(work)
        static = list(kept)
        for replay in range(NUM_REPLAYS):
            now = _fill(scene, (x, idx, weights), replay, group) if replay % 10 == 0 else None
            graph.replay()
            if now is not None:
                now.check_dispatch(static[0], option)
                first = [y.clone() for y in static[1:]]
                work()
                for y, eager in zip(first, kept[1:], strict=True):
                    assert_same_bits(y, eager, f"sums of replay {replay}")
            if replay % 100 == 50:
                now = scene_of(group, seed=replay)
                now.round_trip(buffer, HOOK)
        torch.cuda.synchronize()
        buffer.check()


@pytest.mark.parametrize(("num_combines", "hooks"), [(0, False), (1, False), (1, True), (2, True)])
@pytest.mark.parametrize(("world", "use_fp8"), [(1, True), (2, True), (2, False)])
def test_a_thousand_replays_with_changing_inputs_among_eager_calls(
    ranks: Pools, world: int, use_fp8: bool, num_combines: int, hooks: bool
) -> None:
    ranks.run(_replays, world, num_combines, hooks, use_fp8, timeout_secs=110)


def _no_room(group: dist.ProcessGroup) -> tuple[str, str]:
    with open_buffer(group) as buffer:
        scene = scene_of(group)
        x, idx, _ = scene.own

        def work() -> None:
            buffer.low_latency_dispatch(x, idx, scene.num_max, scene.num_experts, use_fp8=False)

        def capture() -> None:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                work()

        early = caught(capture)[1]
        torch.cuda.synchronize()
        graph = captured(work)
        larger = scene_of(group, hidden=4096)
        late = caught(lambda: larger.round_trip(buffer))[1]
        graph.replay()
        scene.round_trip(buffer)
        return early, late


def test_memory_does_not_grow_in_a_graph_nor_once_a_graph_holds_it(ranks: Pools) -> None:
    for early, late in ranks.run(_no_room, 2):
        assert "run the call once before the capture" in early
        assert "cannot grow any more" in late
