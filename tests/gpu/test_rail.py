"""Rounds between nodes over each hop: every row comes to its place, slots are not written over, silence is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from moe_ep.backends.device_faults import _PHASES
from tests.gpu.nvshmem_ranks import nvshmem_pool
from tests.gpu.rail_jobs import (
    generations_do_not_mix,
    openings_are_heard,
    rounds_arrive,
    silence_is_reported,
    start_nvshmem,
)
from tests.helpers.ranks import Pool, Pools

pytestmark = pytest.mark.gpu
SHAPES = [(2, 4), (2, 300), (4, 64), (6, 33)]  # (rounds a call, rows of a round)


@pytest.mark.parametrize(("num_rounds", "most_rows"), SHAPES)
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4])
def test_rows_arrive_in_their_rounds_over_ipc(ranks: Pools, num_nodes: int, num_rounds: int, most_rows: int) -> None:
    num_rows = ranks.run(rounds_arrive, num_nodes, "ipc", num_rounds, most_rows)
    assert all(num > 0 for num in num_rows) == (num_nodes > 1)


@pytest.mark.parametrize("num_nodes", [2, 3])
def test_rows_of_a_call_that_was_given_up_do_not_come_into_a_new_generation_over_ipc(
    ranks: Pools, num_nodes: int
) -> None:
    assert all(num > 0 for num in ranks.run(generations_do_not_mix, num_nodes, "ipc", 300))


def test_a_node_that_does_not_send_is_named_over_ipc(ranks: Pools) -> None:
    reports = ranks.run(silence_is_reported, 3, "ipc")
    assert reports[1] == []
    for report in (reports[0], reports[2]):
        ((name, values),) = report
        assert name == "timeout"
        assert values[0] == 1
        assert _PHASES[values[1]] == "send its rows of a round"


@pytest.mark.parametrize("num_nodes", [2, 3, 4])
def test_a_rank_hears_which_node_refuses_an_opening_or_differs_over_ipc(ranks: Pools, num_nodes: int) -> None:
    num_heard = ranks.run(openings_are_heard, num_nodes, "ipc")
    assert num_heard[0] > 0
    assert len(set(num_heard)) == 1


@pytest.fixture(scope="module")
def over_nvshmem(say: Callable[[str], None]) -> Iterator[Pool]:
    """Ranks with NVSHMEM."""
    pool = nvshmem_pool(2)
    say(" ".join(pool.run(start_nvshmem, 2, (), 120.0)[0].split()))
    yield pool
    pool.close()


@pytest.mark.parametrize(("num_rounds", "most_rows"), SHAPES)
def test_rows_arrive_in_their_rounds_over_nvshmem(over_nvshmem: Pool, num_rounds: int, most_rows: int) -> None:
    assert all(num > 0 for num in over_nvshmem.run(rounds_arrive, 2, ("nvshmem", num_rounds, most_rows), 60.0))


def test_rows_of_a_call_that_was_given_up_do_not_come_into_a_new_generation_over_nvshmem(over_nvshmem: Pool) -> None:
    assert all(num > 0 for num in over_nvshmem.run(generations_do_not_mix, 2, ("nvshmem", 300), 60.0))


def test_a_rank_hears_which_node_refuses_an_opening_or_differs_over_nvshmem(over_nvshmem: Pool) -> None:
    num_heard = over_nvshmem.run(openings_are_heard, 2, ("nvshmem",), 60.0)
    assert num_heard[0] > 0
    assert len(set(num_heard)) == 1
