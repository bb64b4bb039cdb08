"""Calls between nodes along a handle do not meet on the host: the device agrees, and tells every rank of a refusal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moe_ep
from moe_ep.handle import DispatchHandle
from tests.helpers import opening_jobs
from tests.helpers.opening_jobs import (
    CALLS,
    LAYOUTS,
    ODD,
    SHAPES,
    TIGHT,
    check_disagreements,
    check_weights_beside,
    no_host,
    scene,
    told_of_refusals,
)
from tests.helpers.played_kernels import played
from tests.helpers.ranks import Pools


def _played(group: dist.ProcessGroup, job: str, ranks_per_node: int, *args: Any) -> Any:
    with played(group, ranks_per_node, TIGHT):
        return getattr(opening_jobs, job)(group, "ipc", "cpu", ranks_per_node, *args)


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_call_along_a_handle_makes_no_call_to_the_host_group(
    ranks: Pools, layout: str, num_nodes: int, ranks_per_node: int
) -> None:
    world = num_nodes * ranks_per_node
    assert ranks.run(_played, world, "calls_stay_on_the_device", ranks_per_node, layout) == [2 * len(CALLS)] * world


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_is_told_who_refused_and_the_next_call_is_right(
    ranks: Pools, layout: str, num_nodes: int, ranks_per_node: int
) -> None:
    world = num_nodes * ranks_per_node
    for said in ranks.run(_played, world, "refusals", ranks_per_node, layout):
        assert said == told_of_refusals(world)


@pytest.mark.parametrize(("num_nodes", "ranks_per_node", "odd"), ODD)
def test_ranks_that_differ_are_told_on_what_and_which(
    ranks: Pools, num_nodes: int, ranks_per_node: int, odd: int
) -> None:
    world = num_nodes * ranks_per_node
    for told in ranks.run(_played, world, "disagreements", ranks_per_node, odd):
        check_disagreements(told, odd)


@pytest.mark.parametrize(("num_nodes", "ranks_per_node", "num_calls"), [(2, 1, 40), (2, 2, 25)])
def test_random_calls_with_refusals_in_between_stay_in_step(
    ranks: Pools, num_nodes: int, ranks_per_node: int, num_calls: int
) -> None:
    world = num_nodes * ranks_per_node
    assert ranks.run(_played, world, "random_calls", ranks_per_node, "expert_major", num_calls)[0] > 0


# -- calls that go on on the host -------------------------------------------------------------------------------------


def _plan_meets_a_cached_dispatch(group: dist.ProcessGroup) -> str:
    """Rank 1 plans where rank 0 goes along a handle; both go on afterwards."""
    with played(group, 1, TIGHT), scene(group, "ipc", "cpu", 1, "compact") as here:
        if here.buffer.rank == 0:
            assert bool(here.call("cached dispatch")[0].isnan().all())
            said = here.said()
        else:
            with no_host(), pytest.raises(moe_ep.ConfigError) as caught:
                moe_ep.dispatch(here.buffer, here.x, here.handle.slot_rank * 2, None, num_experts=4, layout="compact")
            said = str(caught.value)
        assert torch.equal(here.call("cached dispatch")[0], here.rows)
    return said


def test_a_plan_that_meets_a_call_along_a_handle_raises_at_once(ranks: Pools) -> None:
    for said in ranks.run(_plan_meets_a_cached_dispatch, 2):
        assert "disagree on the operation: rank 0 has cached dispatch, rank 1 has dispatch" in said


def _refused_on_the_host(group: dist.ProcessGroup, call: str) -> str:
    with played(group, 2, TIGHT), scene(group, "ipc", "cpu", 2, "expert_major") as here:
        calls: dict[str, Callable[[], object]] = {
            "refusal": lambda: here.backend.refuse("dispatch", ValueError("no tokens today.")),
            "plan": lambda: moe_ep.dispatch(here.buffer, here.x, here.handle.slot_rank * 2, num_experts=8),
            "sum": lambda: here.buffer.all_reduce(torch.ones(3)),
            "exact combine": lambda: here.backend.combine(here.handle, here.rows, None, exact=True),
        }
        with pytest.raises(ValueError, match="EP rank 2 refused") as caught:
            calls["refusal" if here.buffer.rank == 2 else call]()
        assert torch.equal(here.call("cached dispatch")[0], here.rows)
        assert here.said() == ""
    return str(caught.value)


@pytest.mark.parametrize("call", ["plan", "sum", "exact combine"])
def test_what_goes_on_on_the_host_raises_a_refusal_at_once_and_is_not_told_again(ranks: Pools, call: str) -> None:
    for said in ranks.run(_refused_on_the_host, 4, call):
        assert said.endswith(": no tokens today.")


def _one_node_cannot_grow(group: dist.ProcessGroup, name: str, layout: str) -> str:
    """A graph holds the slots of the ranks of node 0, which are too small for the rows; those of node 1 have room."""
    with played(group, 2, TIGHT), scene(group, "ipc", "cpu", 2, layout) as here:
        legs = here.backend._legs  # type: ignore[attr-defined]
        before, full = legs._exchange.slot_bytes, here.buffer.rank < 2
        if full:
            legs._exchange.slot_bytes, legs._is_in_graph = 16, True
            with pytest.raises(RuntimeError) as caught:
                here.call(name)
            said = str(caught.value)
        else:
            assert all(bool(output.isnan().all()) for output in here.call(name))
            said = here.said()
            assert "more call" not in said
        legs._exchange.slot_bytes = before
        assert torch.equal(here.call("cached dispatch")[0], here.rows)
        assert here.said() == ""
    return said


@pytest.mark.parametrize(
    ("name", "layout"),
    [("combine", "expert_major"), ("dispatch backward", "expert_major"), ("dispatch backward", "compact")],
)
def test_a_node_whose_memory_cannot_grow_tells_the_others_before_any_row_moves(
    ranks: Pools, name: str, layout: str
) -> None:
    """Also where the call has a second part, the weights' gradient, to which the ranks that raise do not come."""
    for said in ranks.run(_one_node_cannot_grow, 4, name, layout):
        assert said.startswith(f"EP rank 0 refused {name}: the call needs ")
        assert "because a CUDA graph holds addresses in it" in said


# -- calls of two parts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("odd", ["refuses", "sums no weights"])
def test_rows_and_weights_that_go_home_in_one_call_are_refused_in_one(
    ranks: Pools, num_nodes: int, ranks_per_node: int, odd: str
) -> None:
    last = num_nodes * ranks_per_node - 1
    for said in ranks.run(_played, last + 1, "weights_beside", ranks_per_node, odd):
        check_weights_beside(said, last, odd)


# -- copies of a handle -----------------------------------------------------------------------------------------------


def _copies(group: dist.ProcessGroup, ranks_per_node: int, layout: str) -> str:
    """Shallow copies know the way, deep ones on all ranks find it, one on a single rank is refused."""
    with played(group, ranks_per_node, TIGHT), scene(group, "ipc", "cpu", ranks_per_node, layout) as here:
        handle, is_last = here.handle, here.buffer.rank == here.buffer.group_size - 1
        right = {name: here.call(name) for name in CALLS}
        here.handle = copy.copy(handle) if is_last else handle
        with no_host():
            assert torch.equal(here.call("cached dispatch")[0], here.rows)
        for name in reversed(CALLS):
            here.handle = DispatchHandle.unpack(handle.pack()) if name == "combine" else copy.deepcopy(handle)
            for _ in range(2):
                for one, two in zip(here.call(name), right[name], strict=True):
                    assert torch.equal(one, two), name
        here.handle = copy.deepcopy(handle) if is_last else handle
        if is_last:
            with pytest.raises(moe_ep.ConfigError) as caught:
                here.call("cached dispatch")
            said = str(caught.value)
        else:
            assert bool(here.call("cached dispatch")[0].isnan().all())
            said = here.said()
        here.handle = handle
        assert torch.equal(here.call("cached dispatch")[0], here.rows)
    return said


@pytest.mark.parametrize(("num_nodes", "ranks_per_node", "layout"), [(2, 1, "expert_major"), (2, 2, "compact")])
def test_copies_of_a_handle_agree_on_whether_they_know_the_way(
    ranks: Pools, num_nodes: int, ranks_per_node: int, layout: str
) -> None:
    world = num_nodes * ranks_per_node
    for said in ranks.run(_copies, world, ranks_per_node, layout):
        assert "disagree on whether the handle knows its way between nodes" in said
        assert f"rank {world - 1} has False" in said
