"""Calls between nodes along a handle are kernels alone, and a refusal reaches every rank on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from moe_ep.backends import internode_kernels
from tests.gpu.nvshmem_ranks import nvshmem_pool
from tests.helpers.opening_jobs import (
    CALLS,
    LAYOUTS,
    ODD,
    SHAPES,
    TIGHT,
    calls_stay_on_the_device,
    check_disagreements,
    check_weights_beside,
    disagreements,
    random_calls,
    refusals,
    told_of_refusals,
    weights_beside,
)
from tests.helpers.ranks import Pool, Pools

pytestmark = pytest.mark.gpu
NUM_CALLS = 200


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_call_along_a_handle_makes_no_call_to_the_host_group(
    ranks: Pools, layout: str, num_nodes: int, ranks_per_node: int
) -> None:
    args: tuple[Any, ...] = ("ipc", "cuda", ranks_per_node, layout)
    world = num_nodes * ranks_per_node
    assert ranks.run(calls_stay_on_the_device, world, *args) == [2 * len(CALLS)] * world


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_is_told_who_refused_and_the_next_call_is_right(
    ranks: Pools, layout: str, num_nodes: int, ranks_per_node: int
) -> None:
    world = num_nodes * ranks_per_node
    for said in ranks.run(refusals, world, "ipc", "cuda", ranks_per_node, layout):
        assert said == told_of_refusals(world)


@pytest.mark.parametrize(("num_nodes", "ranks_per_node", "odd"), ODD)
def test_ranks_that_differ_are_told_on_what_and_which(
    ranks: Pools, num_nodes: int, ranks_per_node: int, odd: int
) -> None:
    world = num_nodes * ranks_per_node
    for told in ranks.run(disagreements, world, "ipc", "cuda", ranks_per_node, odd):
        check_disagreements(told, odd)


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(2, 1), (2, 2), (1, 2)])
@pytest.mark.parametrize("odd", ["refuses", "sums no weights"])
def test_rows_and_weights_that_go_home_in_one_call_are_refused_in_one(
    ranks: Pools, num_nodes: int, ranks_per_node: int, odd: str
) -> None:
    last = num_nodes * ranks_per_node - 1
    for said in ranks.run(weights_beside, last + 1, "ipc", "cuda", ranks_per_node, odd):
        check_weights_beside(said, last, odd)


def _in_rounds(group: dist.ProcessGroup, *args: Any) -> int:
    with mock.patch.object(internode_kernels, "STAGING_BYTES", TIGHT):
        return random_calls(group, *args)


@pytest.mark.parametrize("job", [random_calls, _in_rounds])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(2, 1), (2, 2), (3, 1)])
def test_random_calls_with_refusals_in_between_stay_in_step(
    ranks: Pools, num_nodes: int, ranks_per_node: int, layout: str, job: Callable[..., int]
) -> None:
    args: tuple[Any, ...] = ("ipc", "cuda", ranks_per_node, layout, NUM_CALLS)
    assert ranks.run(job, num_nodes * ranks_per_node, *args, timeout_secs=100)[0] > NUM_CALLS // 10


# -- over NVSHMEM -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[(2, 1), (2, 2)], ids=["2-1", "2-2"])
def over_nvshmem(request: pytest.FixtureRequest) -> Iterator[tuple[Pool, int]]:
    num_nodes, ranks_per_node = request.param
    pool = nvshmem_pool(num_nodes * ranks_per_node)
    yield pool, ranks_per_node
    pool.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_refusals_over_nvshmem(over_nvshmem: tuple[Pool, int], layout: str) -> None:
    pool, ranks_per_node = over_nvshmem
    for said in pool.run(refusals, pool.size, ("nvshmem", "cuda", ranks_per_node, layout), 150.0):
        assert said == told_of_refusals(pool.size)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_calls_over_nvshmem_stay_in_step_and_on_the_device(over_nvshmem: tuple[Pool, int], layout: str) -> None:
    pool, ranks_per_node = over_nvshmem
    args: tuple[Any, ...] = ("nvshmem", "cuda", ranks_per_node, layout)
    assert pool.run(calls_stay_on_the_device, pool.size, args, 100.0) == [2 * len(CALLS)] * pool.size
    assert pool.run(_in_rounds, pool.size, (*args, NUM_CALLS), 150.0)[0] > NUM_CALLS // 10
