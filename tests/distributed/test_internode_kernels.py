"""Backend `internode` on kernels that are played on the CPU: the contract, rounds, crossings, and all other calls."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.compare import assert_same_bits
from tests.distributed.conformance import check_routing
from tests.internode_jobs import as_torch_does, low_level
from tests.played_kernels import played
from tests.ranks import Pools
from tests.routing import ROUTINGS, TOKEN_COUNTS

SHAPES = [(2, 1), (2, 2)]  # (nodes, ranks a node)
SLOW_SHAPES = [pytest.param(*shape, marks=pytest.mark.slow(ci=True)) for shape in [(1, 2), (3, 1), (4, 1)]]
TIGHT = 2048  # bytes of a rail: many rounds
ROOMY = pytest.param(1 << 20, marks=pytest.mark.slow(ci=True))  # one holds everything


def _every_routing(
    group: dist.ProcessGroup, ranks_per_node: int, layout: str, dtype: torch.dtype, exact: bool, staging_bytes: int
) -> int:
    num_checks = 0
    with played(group, ranks_per_node, staging_bytes) as kernels:
        for routing, tokens in itertools.product(ROUTINGS, TOKEN_COUNTS):
            check_routing(
                group,
                "internode",
                layout,
                dtype,
                routing,
                tokens,
                4,
                exact=exact,
                ranks_per_node=ranks_per_node,
                hop="ipc",
            )
            num_checks += 1
    crosses = dist.get_world_size(group) > ranks_per_node
    assert (kernels.crossed[0] > 0, kernels.num_in_place > 0) == (crosses, crosses)
    return num_checks


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), SHAPES + SLOW_SHAPES)
@pytest.mark.parametrize("staging_bytes", [TIGHT, ROOMY])
@pytest.mark.parametrize(("layout", "dtype"), [("compact", torch.bfloat16), ("expert_major", torch.float32)])
def test_rows_sums_and_gradients_are_those_of_the_loops(
    ranks: Pools, layout: str, dtype: torch.dtype, staging_bytes: int, num_nodes: int, ranks_per_node: int
) -> None:
    world, args = num_nodes * ranks_per_node, (ranks_per_node, layout, dtype, False, staging_bytes)
    assert ranks.run(_every_routing, world, *args, timeout_secs=200) == [len(ROUTINGS) * len(TOKEN_COUNTS)] * world


def _played(group: dist.ProcessGroup, job: str, ranks_per_node: int, *args: Any) -> Any:
    with played(group, ranks_per_node, TIGHT * 8):
        if job == "low_level":
            return low_level(group, "ipc", "cpu", ranks_per_node)
        return as_torch_does(group, "ipc", "cpu", ranks_per_node, *args)


@pytest.mark.parametrize(("layout", "num_nodes", "ranks_per_node"), [("compact", 2, 2), ("expert_major", 3, 1)])
def test_rows_cross_once_for_each_node_and_sums_are_those_of_collectives(
    ranks: Pools, layout: str, num_nodes: int, ranks_per_node: int
) -> None:
    args = ("as_torch_does", ranks_per_node, layout, 60, 32)
    assert all(num > 0 for num in ranks.run(_played, num_nodes * ranks_per_node, *args))


@pytest.mark.parametrize(("world", "ranks_per_node"), [(2, 1), (4, 2)])
def test_every_other_call_gives_what_collectives_give(ranks: Pools, world: int, ranks_per_node: int) -> None:
    expected = ranks.run(low_level, world, "torch", "cpu", ranks_per_node)
    actual = ranks.run(_played, world, "low_level", ranks_per_node)
    for theirs, ours in zip(expected, actual, strict=True):
        for number, (one, two) in enumerate(zip(theirs, ours, strict=True)):
            assert_same_bits(two, one, f"result {number}")
